//! The watched objects, each reduced while it is decoded to the fields that the agent needs, so that at most one whole
//! Pod or Node is in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as k8s;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use serde::Deserialize;
use serde_json::Value;

use crate::cluster::taint::NodeSnapshot;
use crate::cluster::typed::Typed;
use crate::crd::pod_facts::{
    ContainerFacts, PodObject, annotation, container_facts, phase, pod_facts,
};
use crate::crd::{NodeWatermark, NodeWatermarkSpec};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::units::MilliCpu;

/// `metadata.uid`
pub fn uid(object: &impl Resource) -> &str {
    object.meta().uid.as_deref().unwrap_or_default()
}

/// The metadata that identify an object.
fn identity(metadata: ObjectMeta) -> ObjectMeta {
    ObjectMeta {
        name: metadata.name,
        namespace: metadata.namespace,
        uid: metadata.uid,
        resource_version: metadata.resource_version,
        ..ObjectMeta::default()
    }
}

/// A pod of this node.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = k8s::Pod)]
#[serde(from = "Typed<PodObject>")]
pub struct SeenPod {
    metadata: ObjectMeta,
    /// Its facts, or why they cannot be read.
    pub facts: Result<Arc<Pod>, String>,
    /// The state of its containers.
    pub containers: ContainerFacts,
    /// The UID in the name of its cgroup: for a static pod the kubelet's, not the API server's.
    pub cgroup_uid: PodUid,
    /// It has finished and has no cgroup any more.
    pub finished: bool,
    /// Its controller, if that is a `DaemonSet`.
    pub daemon_set: Option<Owner>,
}

/// The owner of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
}

impl From<Typed<PodObject>> for SeenPod {
    fn from(Typed(full): Typed<PodObject>) -> Self {
        Self {
            facts: facts(&full),
            containers: container_facts(&full),
            cgroup_uid: cgroup_uid(&full.metadata),
            finished: matches!(phase(&full), Some("Succeeded" | "Failed")),
            daemon_set: daemon_set(&full.metadata),
            metadata: identity(full.metadata),
        }
    }
}

fn facts(pod: &PodObject) -> Result<Arc<Pod>, String> {
    let mut facts = pod_facts(pod).map_err(|error| error.to_string())?;
    add_requests_by_directory(&mut facts, pod);
    Ok(Arc::new(facts))
}

/// Container throttling finds a container by the directory of its cgroup, which contains its id.
fn add_requests_by_directory(facts: &mut Pod, pod: &PodObject) {
    if facts.container_requests.is_empty() {
        return;
    }
    let Some(status) = &pod.status else { return };
    let statuses = [&status.container_statuses, &status.init_container_statuses];
    for status in statuses.into_iter().flatten().flatten() {
        let id = status.container_id.as_deref();
        let request = facts.container_requests.get(&status.name).copied();
        if let (Some((runtime, id)), Some(request)) = (id.and_then(split_id), request) {
            insert_directories(facts, runtime, id, request);
        }
    }
}

/// `containerd://<id>`
fn split_id(id: &str) -> Option<(&str, &str)> {
    id.split_once("://").filter(|(_, id)| !id.is_empty())
}

fn insert_directories(facts: &mut Pod, runtime: &str, id: &str, request: MilliCpu) {
    let prefix = match runtime {
        "containerd" => "cri-containerd",
        "cri-o" => "crio",
        other => other,
    };
    let directories = [id.to_owned(), format!("{prefix}-{id}.scope")];
    let requests = &mut facts.container_requests;
    requests.extend(directories.map(|directory| (directory, request)));
}

/// Any pod can be annotated with another pod's UID. But the kubelet runs a pod with the mirror annotation only if it
/// created that pod itself for a static pod, so no forged one is ever Running.
fn cgroup_uid(meta: &ObjectMeta) -> PodUid {
    let mirrored = annotation(meta, "kubernetes.io/config.mirror");
    let uid = mirrored.or(meta.uid.as_deref());
    PodUid::from(uid.unwrap_or_default())
}

fn daemon_set(meta: &ObjectMeta) -> Option<Owner> {
    let is_daemon_set =
        |owner: &&OwnerReference| owner.controller == Some(true) && owner.kind == "DaemonSet";
    let owner = meta.owner_references.as_ref()?.iter().find(is_daemon_set)?;
    Some(Owner {
        name: owner.name.clone(),
        uid: owner.uid.clone(),
    })
}

/// This node.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = k8s::Node)]
#[serde(from = "FullNode")]
pub struct SeenNode {
    metadata: ObjectMeta,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Our taint and condition on it.
    pub taint_snapshot: NodeSnapshot,
}

/// A Node without its images, addresses and the like.
#[derive(Deserialize)]
struct FullNode {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: FullNodeSpec,
    #[serde(default)]
    status: FullNodeStatus,
}

#[derive(Default, Deserialize)]
struct FullNodeSpec {
    #[serde(default)]
    taints: Value,
}

#[derive(Default, Deserialize)]
struct FullNodeStatus {
    #[serde(default)]
    conditions: Value,
}

impl From<FullNode> for SeenNode {
    fn from(mut full: FullNode) -> Self {
        let taint_snapshot =
            NodeSnapshot::new(&full.metadata, &full.spec.taints, &full.status.conditions);
        Self {
            labels: full.metadata.labels.take().unwrap_or_default(),
            metadata: identity(full.metadata),
            taint_snapshot,
        }
    }
}

/// The rules of this node.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = NodeWatermark)]
#[serde(from = "FullWatermark")]
pub struct SeenWatermark {
    metadata: ObjectMeta,
    /// `metadata.generation`
    pub generation: i64,
    /// Its spec, or why that cannot be read.
    pub spec: Result<Arc<NodeWatermarkSpec>, String>,
    /// The report time in its status.
    pub reported: Option<Timestamp>,
}

/// A `NodeWatermark` with unparsed content.
#[derive(Deserialize)]
struct FullWatermark {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Value,
    #[serde(default)]
    status: Value,
}

impl From<FullWatermark> for SeenWatermark {
    fn from(full: FullWatermark) -> Self {
        let spec = serde_json::from_value(full.spec);
        let reported = full.status["agent"]["reportTime"].as_str();
        Self {
            reported: reported.and_then(|time| time.parse().ok()),
            generation: full.metadata.generation.unwrap_or_default(),
            spec: spec.map(Arc::new).map_err(|error| error.to_string()),
            metadata: identity(full.metadata),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(object: Value) -> SeenPod {
        serde_json::from_value(object).expect("a pod")
    }

    #[test]
    fn the_cgroup_of_a_static_pod_is_named_by_the_kubelets_hash() {
        let mirror = pod(json!({
            "metadata": {
                "name": "etcd-n", "namespace": "kube-system", "uid": "api-uid",
                "annotations": {
                    "kubernetes.io/config.hash": "0123456789abcdef0123456789abcdef",
                    "kubernetes.io/config.mirror": "0123456789abcdef0123456789abcdef",
                },
            },
            "spec": {"containers": [{"name": "etcd"}]},
            "status": {"phase": "Running"},
        }));
        assert_eq!(uid(&mirror), "api-uid");
        assert_eq!(&*mirror.cgroup_uid.0, "0123456789abcdef0123456789abcdef");
        let facts = mirror.facts.expect("facts");
        assert_eq!(&*facts.uid.0, "api-uid");
    }

    /// A status as a kubelet of 1.36 publishes it for a pod in the idle class.
    #[test]
    fn a_kubelet_that_reports_the_resources_of_the_pod_is_recognised() {
        let status = json!({
            "phase": "Running",
            "observedGeneration": 1,
            "hostIP": "10.0.0.1",
            "qosClass": "Burstable",
            "startTime": "2026-11-28T10:00:00Z",
            "conditions": [
                {"type": "PodReadyToStartContainers", "status": "True", "observedGeneration": 1},
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-11-28T10:00:02Z"},
            ],
            "containerStatuses": [{
                "name": "c", "ready": true, "restartCount": 0, "image": "busybox", "imageID": "sha256:0",
                "containerID": "containerd://0123", "state": {"running": {"startedAt": "2026-11-28T10:00:01Z"}},
                "allocatedResources": {"cpu": "200m"},
                "resources": {"requests": {"cpu": "200m"}},
            }],
            "allocatedResources": {"cpu": "200m"},
            "resources": {"limits": {"cpu": "450m"}, "requests": {"cpu": "1801620012949469m"}},
        });
        let facts = |status: &Value| {
            let pod = pod(json!({
                "metadata": {"name": "p", "namespace": "batch", "uid": "u", "generation": 1},
                "spec": {"containers": [{"name": "c", "resources": {"requests": {"cpu": "200m"}}}]},
                "status": status,
            }));
            let facts = pod.facts.expect("facts");
            (facts.running, facts.resources_reported, facts.resizing)
        };
        assert_eq!(facts(&status), (true, true, false));
        let without = |field: &str| {
            let mut status = status.clone();
            let fields = status.as_object_mut().expect("an object");
            fields.remove(field).expect("the field");
            status
        };
        // The resources of a container have been there since 1.33, and do no harm.
        assert_eq!(facts(&without("resources")), (true, false, false));
        for (kind, condition, resizing) in [
            ("PodResizePending", "True", true),
            ("PodResizeInProgress", "True", true),
            ("PodResizeInProgress", "False", false),
        ] {
            let mut status = without("resources");
            status["conditions"][1] =
                json!({"type": kind, "status": condition, "reason": "Deferred"});
            assert_eq!(
                facts(&status),
                (true, false, resizing),
                "{kind} {condition}"
            );
        }
    }

    #[test]
    fn a_pod_cannot_claim_another_pods_cgroup() {
        let victim = "11111111-2222-3333-4444-555555555555";
        let named = pod(json!({
            "metadata": {
                "name": "a", "namespace": "tenant", "uid": "own",
                "annotations": {"kubernetes.io/config.hash": victim, "kubernetes.io/config.source": "file"},
            },
            "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": "Running"},
        }));
        assert_eq!(&*named.cgroup_uid.0, "own");
    }

    #[test]
    fn container_requests_are_found_by_cgroup_directory() {
        let seen = pod(json!({
            "metadata": {"name": "a", "namespace": "b", "uid": "u"},
            "spec": {"containers": [
                {"name": "web", "resources": {"requests": {"cpu": "300m"}}},
                {"name": "side"},
            ]},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "web", "containerID": "containerd://abc", "image": "", "imageID": "", "ready": true, "restartCount": 0},
                {"name": "side", "containerID": "containerd://def", "image": "", "imageID": "", "ready": true, "restartCount": 0},
            ]},
        }));
        let requests = seen.facts.expect("facts").container_requests.clone();
        assert_eq!(requests.get("abc"), Some(&MilliCpu(300)));
        assert_eq!(
            requests.get("cri-containerd-abc.scope"),
            Some(&MilliCpu(300))
        );
        assert!(!requests.contains_key("def"));
    }

    #[test]
    fn an_invalid_pod_does_not_hide_the_others() {
        let seen = pod(json!({
            "metadata": {"name": "a", "namespace": "b", "uid": "u"},
            "spec": {"containers": [{"name": "web", "resources": {"requests": {"cpu": "-1"}}}]},
        }));
        let error = seen.facts.expect_err("no facts");
        assert!(error.contains("below zero"), "{error}");
    }

    #[test]
    fn only_a_controlling_daemonset_is_the_owner() {
        let owner = |kind: &str, controller: bool| json!({"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "y", "controller": controller});
        let owner_of = |owner: Value| {
            let meta = json!({"name": "a", "namespace": "b", "ownerReferences": [owner]});
            pod(json!({"metadata": meta, "spec": {"containers": []}})).daemon_set
        };
        assert_eq!(owner_of(owner("ReplicaSet", true)), None);
        assert_eq!(owner_of(owner("DaemonSet", false)), None);
        assert_eq!(owner_of(owner("DaemonSet", true)).expect("owner").uid, "y");
    }

    #[test]
    fn a_watermark_with_an_unknown_shape_is_still_decoded() {
        let seen: SeenWatermark = serde_json::from_value(json!({
            "metadata": {"name": "n", "generation": 3},
            "spec": {"rules": 7},
            "status": {"agent": {"reportTime": "2026-01-02T03:04:05Z"}},
        }))
        .expect("seen");
        assert_eq!(seen.generation, 3);
        let time = seen.reported.expect("a time");
        assert_eq!(time.to_string(), "2026-01-02T03:04:05Z");
        seen.spec.expect_err("no spec");
    }
}
