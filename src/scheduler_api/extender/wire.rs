//! What kube-scheduler sends and reads: `k8s.io/kube-scheduler/extender/v1`. Its types have no JSON tags, so keys are written
//! as in Go (`NodeNames`) and read whatever their case is; older schedulers wrote them in lower case.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use thiserror::Error;

use crate::crd::pod_facts::{PodFactsError, PodObject, PodSpec, pod_facts};
use crate::engine::load::expected_of;
use crate::engine::pod::EvictionExemption;

/// Why a request has no answer.
#[derive(Debug, Error)]
pub enum WireError {
    /// Not JSON, or other types.
    #[error("the body is no ExtenderArgs of kube-scheduler: {0}")]
    Json(#[from] serde_json::Error),
    /// There is nothing to place.
    #[error("the body is no ExtenderArgs of kube-scheduler: it has no Pod")]
    NoPod,
    /// The pod is invalid.
    #[error("invalid Pod: {0}")]
    Pod(#[from] PodFactsError),
}

/// A request.
#[derive(Debug)]
pub struct ExtenderRequest<'a> {
    /// The pod to place.
    pub pod: PodToPlace,
    /// Where it fits.
    pub candidates: Candidates<'a>,
}

/// What counts of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct PodToPlace {
    /// Its UID.
    pub uid: String,
    /// The CPU that it is expected to use, in millicores.
    pub cpu: f64,
    /// The memory that it is expected to use, in bytes.
    pub memory: f64,
    /// No node is closed to it: a `DaemonSet`'s pod, or one with system-critical priority.
    pub exempt: bool,
}

/// The nodes where the pod fits, as the scheduler sent them.
#[derive(Debug)]
pub enum Candidates<'a> {
    /// With `nodeCacheCapable: true`.
    Names(Vec<Name<'a>>),
    /// Without: whole objects, which are passed back as they came.
    Nodes(Vec<(String, &'a RawValue)>),
}

impl Candidates<'_> {
    /// Their names, in the order of the request.
    pub fn names(&self) -> Vec<&str> {
        match self {
            Self::Names(names) => names.iter().map(Name::as_str).collect(),
            Self::Nodes(nodes) => nodes.iter().map(|(name, _)| name.as_str()).collect(),
        }
    }
}

/// A name of a node, borrowed unless it has escapes.
#[derive(Debug, Deserialize)]
pub struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

impl Name<'_> {
    fn as_str(&self) -> &str {
        &self.0
    }
}

#[derive(Deserialize)]
struct ExtenderArgs<'a> {
    #[serde(rename = "Pod", alias = "pod")]
    pod: Option<WirePod>,
    #[serde(borrow, default, rename = "Nodes", alias = "nodes")]
    nodes: Option<NodeList<'a>>,
    #[serde(
        borrow,
        default,
        rename = "NodeNames",
        alias = "nodeNames",
        alias = "nodenames"
    )]
    names: Option<Vec<Name<'a>>>,
}

/// A Pod without what its placement by load does not need: labels, annotations and managed fields can be long.
#[derive(Deserialize)]
struct WirePod {
    metadata: WireMeta,
    spec: Option<PodSpec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMeta {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Deserialize)]
struct NodeList<'a> {
    #[serde(borrow, default)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
struct NamedObject {
    metadata: NameMeta,
}

#[derive(Deserialize)]
struct NameMeta {
    name: String,
}

impl<'a> ExtenderRequest<'a> {
    /// Reads a body.
    ///
    /// # Errors
    /// It is no `ExtenderArgs`, or its pod is invalid.
    pub fn read(body: &'a [u8]) -> Result<Self, WireError> {
        let args: ExtenderArgs<'a> = serde_json::from_slice(body)?;
        let pod = args.pod.ok_or(WireError::NoPod)?.facts()?;
        let candidates = match (args.names, args.nodes) {
            (Some(names), _) => Candidates::Names(names),
            (None, Some(nodes)) => {
                let nodes = nodes.items.unwrap_or_default().into_iter();
                let named = nodes.map(|raw| {
                    let object: NamedObject = serde_json::from_str(raw.get())?;
                    Ok((object.metadata.name, raw))
                });
                Candidates::Nodes(named.collect::<Result<_, serde_json::Error>>()?)
            }
            (None, None) => Candidates::Names(Vec::new()),
        };
        Ok(Self { pod, candidates })
    }
}

impl WirePod {
    fn facts(self) -> Result<PodToPlace, PodFactsError> {
        let metadata = ObjectMeta {
            name: self.metadata.name,
            namespace: self.metadata.namespace,
            uid: self.metadata.uid,
            owner_references: self.metadata.owner_references,
            ..ObjectMeta::default()
        };
        let pod = pod_facts(&PodObject {
            metadata,
            spec: self.spec,
            status: None,
        })?;
        let (cpu, memory) = expected_of(&pod);
        let exempt = matches!(
            pod.eviction_exemption,
            Some(EvictionExemption::DaemonSet | EvictionExemption::SystemCritical)
        );
        Ok(PodToPlace {
            uid: pod.uid.0.to_string(),
            cpu: cpu.0 as f64,
            memory: memory.0 as f64,
            exempt,
        })
    }
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority<'a> {
    host: &'a str,
    score: u8,
}

/// A `HostPriorityList`: the points of each candidate, in the order of the request.
pub fn priorities(candidates: &Candidates<'_>, points: &[u8]) -> Vec<u8> {
    let names = candidates.names().into_iter().zip(points);
    let list: Vec<_> = names
        .map(|(host, score)| HostPriority {
            host,
            score: *score,
        })
        .collect();
    // It consists of strings and numbers, which serialize.
    serde_json::to_vec(&list).unwrap_or_default()
}

#[derive(Serialize)]
#[serde(rename_all = "PascalCase")]
struct FilterResult<'a> {
    nodes: Option<PassedNodes<'a>>,
    node_names: Option<Vec<&'a str>>,
    failed_and_unresolvable_nodes: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct PassedNodes<'a> {
    items: Vec<&'a RawValue>,
}

/// An `ExtenderFilterResult`. `rejected` has the reason for each candidate in the order of the request; `None`: it passes.
/// Rejected nodes are unresolvable: evicting pods there would not lower an average at once.
pub fn filter_result(candidates: &Candidates<'_>, rejected: &[Option<String>]) -> Vec<u8> {
    let names = candidates.names();
    let failed = names.iter().zip(rejected);
    let failed = failed.filter_map(|(name, reason)| Some((*name, reason.as_deref()?)));
    let is_open = |index: &usize| rejected.get(*index).is_none_or(Option::is_none);
    let open = (0..names.len()).filter(is_open);
    let (nodes, node_names) = match candidates {
        Candidates::Names(_) => (None, Some(open.map(|index| names[index]).collect())),
        Candidates::Nodes(nodes) => {
            let items = open.map(|index| nodes[index].1).collect();
            (Some(PassedNodes { items }), None)
        }
    };
    let result = FilterResult {
        nodes,
        node_names,
        failed_and_unresolvable_nodes: failed.collect(),
    };
    // It consists of strings and what was JSON before.
    serde_json::to_vec(&result).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: &Value) -> Value {
        json!({"metadata": {"name": "web-0", "namespace": "shop", "uid": "u", "labels": {"app": "web"}}, "spec": spec})
    }

    fn small() -> Value {
        pod(
            &json!({"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}]}),
        )
    }

    #[test]
    fn names_are_read_as_go_writes_them() {
        for key in ["NodeNames", "nodenames", "nodeNames"] {
            let body = json!({"Pod": small(), "Nodes": null, key: ["a", "b\u{e9}\n"], "More": 1})
                .to_string();
            let request = ExtenderRequest::read(body.as_bytes()).unwrap();
            assert_eq!(request.candidates.names(), ["a", "b\u{e9}\n"]);
            let wanted = PodToPlace {
                uid: "u".to_owned(),
                cpu: 850.0,
                memory: f64::from(1 << 30).mul_add(0.7, 0.0).floor(),
                exempt: false,
            };
            assert_eq!(request.pod, wanted);
            let answer: Value =
                serde_json::from_slice(&priorities(&request.candidates, &[3, 10])).unwrap();
            assert_eq!(
                answer,
                json!([{"Host": "a", "Score": 3}, {"Host": "b\u{e9}\n", "Score": 10}])
            );
        }
    }

    #[test]
    fn whole_nodes_are_passed_back_as_they_came() {
        let node = |name: &str| json!({"metadata": {"name": name, "labels": {"a": "b"}}, "status": {"x": 1.50}});
        let body =
            json!({"Pod": small(), "Nodes": {"metadata": {}, "items": [node("a"), node("b")]}, "NodeNames": null})
                .to_string();
        let request = ExtenderRequest::read(body.as_bytes()).unwrap();
        assert_eq!(request.candidates.names(), ["a", "b"]);
        let rejected = [Some("hot".to_owned()), None];
        let answer: Value =
            serde_json::from_slice(&filter_result(&request.candidates, &rejected)).unwrap();
        let wanted = json!({"Nodes": {"items": [node("b")]}, "NodeNames": null, "FailedAndUnresolvableNodes": {"a": "hot"}});
        assert_eq!(answer, wanted);
    }

    #[test]
    fn names_that_pass_are_never_null() {
        for body in [
            json!({"Pod": small(), "NodeNames": []}),
            json!({"Pod": small()}),
        ] {
            let body = body.to_string();
            let request = ExtenderRequest::read(body.as_bytes()).unwrap();
            let answer: Value =
                serde_json::from_slice(&filter_result(&request.candidates, &[])).unwrap();
            assert_eq!(answer["NodeNames"], json!([]));
            assert_eq!(priorities(&request.candidates, &[]), b"[]");
        }
    }

    #[test]
    fn daemon_pods_and_critical_ones_are_exempt() {
        let exempt = |pod: Value| {
            let body = json!({"Pod": pod, "NodeNames": ["a"]}).to_string();
            ExtenderRequest::read(body.as_bytes()).unwrap().pod.exempt
        };
        let containers = json!([{"name": "c"}]);
        let critical = pod(&json!({"containers": containers, "priority": 2_000_000_000}));
        assert!(exempt(critical));
        let owner = |kind: &str| {
            let mut pod = small();
            pod["metadata"]["ownerReferences"] = json!([
                {"apiVersion": "apps/v1", "kind": kind, "name": "o", "uid": "o", "controller": true}
            ]);
            pod
        };
        assert!(exempt(owner("DaemonSet")));
        assert!(!exempt(owner("ReplicaSet")));
    }

    #[test]
    fn other_bodies_are_errors() {
        for body in [
            "",
            "{}",
            "[]",
            "null",
            "{\"Pod\": null}",
            "{\"Pod\": {}}",
            "{\"Pod\": {\"metadata\": {\"name\": \"x\"}}}",
            "{\"Pod\": {\"metadata\": {\"name\": \"x\"}, \"spec\": {\"containers\": [{\"name\": \"c\", \"resources\": {\"requests\": {\"cpu\": \"lots\"}}}]}}}",
            "{\"NodeNames\": 7}",
            "\u{0}",
        ] {
            assert!(ExtenderRequest::read(body.as_bytes()).is_err(), "{body}");
        }
    }
}
