//! What SIGTERM means: the agent is to go for good, or its successor is on its way.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::apps::v1 as k8s;
use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, Resource};
use serde::Deserialize;
use tokio::time::timeout;

use super::feed::Failure;
use super::objects::Owner;
use crate::cluster::client::{CallError, call};

/// The answer has to be there by then: the grace period of the pod runs.
const PATIENCE: Duration = Duration::from_secs(3);

/// What to do with what is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Undo it; in words why.
    Restore(String),
    /// Leave it to the next agent; in words why.
    Leave(String),
}

/// A `DaemonSet`, as far as it says where its pods are.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = k8s::DaemonSet)]
struct DaemonSet {
    metadata: ObjectMeta,
    #[serde(default)]
    spec: DaemonSetSpec,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct DaemonSetSpec {
    template: Template,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Template {
    spec: Placed,
}

/// What of a pod's specification says where it may be.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Placed {
    affinity: Option<Affinity>,
    node_selector: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Affinity {
    node_affinity: Option<NodeAffinity>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: Option<NodeSelector>,
}

/// The node, as a `DaemonSet` chooses it.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its labels; `None` where they are not known.
    pub labels: Option<&'a BTreeMap<String, String>>,
}

/// Asks for the agent's own `DaemonSet`, within 3 s.
pub async fn ask(client: &Client, namespace: &str, owner: &Owner, node: NodeView<'_>) -> Ending {
    let api: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    match timeout(PATIENCE, call(api.get(&owner.name))).await {
        Err(_) => Ending::Leave(format!(
            "the API server did not answer within {} s whether DaemonSet {namespace}/{} is there",
            PATIENCE.as_secs(),
            owner.name
        )),
        Ok(answer) => judge(answer, owner, node),
    }
}

/// What the answer means. From doubt everything stays as it is.
fn judge(answer: Result<DaemonSet, CallError>, owner: &Owner, node: NodeView<'_>) -> Ending {
    let name = &owner.name;
    let found = match answer {
        Ok(found) => found,
        Err(error) if error.is_not_found() => {
            return Ending::Restore(format!("DaemonSet {name} is deleted"));
        }
        Err(error) => {
            let why = format!("failed to read DaemonSet {name}: {}", error.words());
            return refused(error.code(), why);
        }
    };
    if found.metadata.uid.as_ref() != Some(&owner.uid) {
        return Ending::Restore(format!("DaemonSet {name} was deleted and made anew"));
    }
    if found.metadata.deletion_timestamp.is_some() {
        return Ending::Restore(format!("DaemonSet {name} is being deleted"));
    }
    let pod = found.spec.template.spec;
    match selects(&pod, node) {
        Some(false) => Ending::Restore(format!("DaemonSet {name} does not select this node")),
        Some(true) | None => Ending::Leave(format!("DaemonSet {name} is there")),
    }
}

/// What it means that nobody knows which `DaemonSet` is ours, by why our own pod was not read.
pub fn unowned(unread: Option<&Failure>) -> Ending {
    match unread {
        Some(failure) => refused(
            failure.code,
            format!("failed to list pods: {}", failure.why),
        ),
        None => Ending::Leave("terminated; no DaemonSet of ours is known".to_owned()),
    }
}

/// Where the account is gone or has no rights any more, as when an installation is deleted object by object, no agent that
/// comes next could keep what is in force.
fn refused(code: Option<u16>, why: String) -> Ending {
    match code {
        Some(401 | 403) => Ending::Restore(format!("{why}: no agent of this account may go on")),
        _ => Ending::Leave(why),
    }
}

/// Whether pods of this kind may be on the node; `None` where that can't be told.
fn selects(pod: &Placed, node: NodeView<'_>) -> Option<bool> {
    let labels = node.labels?;
    let mut wanted = pod.node_selector.iter().flatten();
    if !wanted.all(|(key, value)| labels.get(key) == Some(value)) {
        return Some(false);
    }
    let affinity = pod.affinity.as_ref();
    let affinity = affinity.and_then(|affinity| affinity.node_affinity.as_ref());
    match affinity.and_then(|affinity| affinity.required.as_ref()) {
        Some(selector) => any_term(selector, node.name, labels),
        None => Some(true),
    }
}

/// Terms are alternatives. One that is not understood might hold.
fn any_term(
    selector: &NodeSelector,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> Option<bool> {
    let verdicts = selector.node_selector_terms.iter();
    let verdicts: Vec<_> = verdicts.map(|term| all_hold(term, name, labels)).collect();
    if verdicts.contains(&Some(true)) {
        return Some(true);
    }
    (!verdicts.contains(&None)).then_some(false)
}

/// An empty term matches nothing.
fn all_hold(
    term: &NodeSelectorTerm,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> Option<bool> {
    let by_label = term.match_expressions.iter().flatten();
    let by_label =
        by_label.map(|wanted| holds(wanted, labels.get(&wanted.key).map(String::as_str)));
    let by_field = term.match_fields.iter().flatten();
    let by_field = by_field.map(|wanted| match wanted.key.as_str() {
        "metadata.name" => holds(wanted, Some(name)),
        _ => None,
    });
    let verdicts: Vec<_> = by_label.chain(by_field).collect();
    if verdicts.is_empty() || verdicts.contains(&Some(false)) {
        return Some(false);
    }
    (!verdicts.contains(&None)).then_some(true)
}

fn holds(wanted: &NodeSelectorRequirement, value: Option<&str>) -> Option<bool> {
    let values = wanted.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|known| known == value));
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
    let limit = || number(values.first().map(String::as_str));
    match wanted.operator.as_str() {
        "In" => Some(listed()),
        "NotIn" => Some(!listed()),
        "Exists" => Some(value.is_some()),
        "DoesNotExist" => Some(value.is_none()),
        "Gt" => Some(
            number(value)
                .zip(limit())
                .is_some_and(|(it, limit)| it > limit),
        ),
        "Lt" => Some(
            number(value)
                .zip(limit())
                .is_some_and(|(it, limit)| it < limit),
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use serde_json::{Value, json};

    use super::*;

    fn daemon_set(changes: &Value, pod: &Value) -> DaemonSet {
        let mut meta = json!({"name": "agent", "namespace": "plimsoll", "uid": "ours"});
        for (key, value) in changes.as_object().expect("fields") {
            meta[key] = value.clone();
        }
        serde_json::from_value(json!({
            "metadata": meta,
            "spec": {"selector": {}, "template": {"spec": pod}},
        }))
        .expect("a DaemonSet")
    }

    fn answered(code: u16, reason: &str) -> CallError {
        let mut status = Status::failure("no", reason);
        status.code = code;
        CallError::Kube(kube::Error::Api(status.boxed()))
    }

    fn ends(answer: Result<DaemonSet, CallError>) -> bool {
        let owner = Owner {
            name: "agent".to_owned(),
            uid: "ours".to_owned(),
        };
        let labels = BTreeMap::from([
            ("pool".to_owned(), "batch".to_owned()),
            ("cores".to_owned(), "8".to_owned()),
        ]);
        let node = NodeView {
            name: "worker-1",
            labels: Some(&labels),
        };
        matches!(judge(answer, &owner, node), Ending::Restore(_))
    }

    #[test]
    fn a_daemonset_that_is_gone_or_going_or_another_means_the_end() {
        let pod = json!({"containers": []});
        assert!(!ends(Ok(daemon_set(&json!({}), &pod))));
        assert!(ends(Err(answered(404, "NotFound"))));
        assert!(ends(Ok(daemon_set(&json!({"uid": "another"}), &pod))));
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(ends(Ok(daemon_set(&deleted, &pod))));
    }

    fn unlisted(code: Option<u16>) -> Ending {
        let why = "no".to_owned();
        unowned(Some(&Failure { code, why }))
    }

    #[test]
    fn an_account_without_rights_means_the_end() {
        for code in [401, 403] {
            assert!(ends(Err(answered(code, "Denied"))), "{code}");
            let ending = unlisted(Some(code));
            assert!(matches!(ending, Ending::Restore(_)), "{ending:?}");
        }
    }

    #[test]
    fn from_doubt_everything_stays() {
        for code in [429, 500, 503, 504] {
            assert!(!ends(Err(answered(code, "Failure"))), "{code}");
        }
        let not_ours = "Failed to parse error data";
        assert!(
            !ends(Err(answered(404, not_ours))),
            "a 404 of what stands before the API server"
        );
        assert!(!ends(Err(CallError::TimedOut)));
        for ending in [unlisted(Some(500)), unlisted(None), unowned(None)] {
            assert!(matches!(ending, Ending::Leave(_)), "{ending:?}");
        }
    }

    #[test]
    fn a_daemonset_that_no_longer_selects_the_node_means_the_end() {
        let affinity = |term: Value| {
            json!({"containers": [], "affinity": {"nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]},
            }}})
        };
        let expression = |key: &str, operator: &str, values: Value| {
            affinity(
                json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]}),
            )
        };
        let cases = [
            (
                json!({"containers": [], "nodeSelector": {"pool": "batch"}}),
                false,
            ),
            (
                json!({"containers": [], "nodeSelector": {"pool": "web"}}),
                true,
            ),
            (expression("pool", "In", json!(["batch"])), false),
            (expression("pool", "NotIn", json!(["batch"])), true),
            (expression("pool", "DoesNotExist", json!([])), true),
            (expression("gpu", "Exists", json!([])), true),
            (expression("cores", "Gt", json!(["4"])), false),
            (expression("cores", "Lt", json!(["4"])), true),
            (expression("pool", "Resembles", json!(["web"])), false),
            (
                affinity(
                    json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["worker-1"]}]}),
                ),
                false,
            ),
            (
                affinity(
                    json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["other"]}]}),
                ),
                true,
            ),
        ];
        for (pod, end) in cases {
            assert_eq!(ends(Ok(daemon_set(&json!({}), &pod))), end, "{pod}");
        }
    }
}
