//! What to do on SIGTERM: restore everything if the agent is being removed, else leave it to the next agent.

use std::time::Duration;

use k8s_openapi::api::apps::v1 as k8s;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Api, Client, Resource};
use serde::Deserialize;
use tokio::time::timeout;

use super::feed::Failure;
use super::objects::Owner;
use crate::cluster::client::{CallError, call};
use crate::crd::node_selector::{NodeView, Placement, selects};

/// Well within the pod's grace period.
const TIMEOUT: Duration = Duration::from_secs(3);

/// What to do with the actions in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shutdown {
    /// Restore it, for this reason.
    Restore(String),
    /// Leave it to the next agent, for this reason.
    Leave(String),
}

/// The fields of a `DaemonSet` that decide where its pods run.
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
    spec: Placement,
}

/// Decides by the state of the agent's own `DaemonSet`, within 3 s.
pub async fn decide(
    client: &Client,
    namespace: &str,
    owner: &Owner,
    node: NodeView<'_>,
) -> Shutdown {
    let api: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    match timeout(TIMEOUT, call(api.get(&owner.name))).await {
        Err(_) => Shutdown::Leave(format!(
            "the API server did not answer within {} s whether DaemonSet {namespace}/{} exists",
            TIMEOUT.as_secs(),
            owner.name
        )),
        Ok(answer) => by_daemon_set(answer, owner, node),
    }
}

/// In doubt everything stays in force.
fn by_daemon_set(
    answer: Result<DaemonSet, CallError>,
    owner: &Owner,
    node: NodeView<'_>,
) -> Shutdown {
    let name = &owner.name;
    let found = match answer {
        Ok(found) => found,
        Err(error) if error.is_not_found() => {
            return Shutdown::Restore(format!("DaemonSet {name} is deleted"));
        }
        Err(error) => {
            let why = format!("failed to read DaemonSet {name}: {}", error.message());
            return by_refusal(error.code(), why);
        }
    };
    if found.metadata.uid.as_ref() != Some(&owner.uid) {
        return Shutdown::Restore(format!("DaemonSet {name} was deleted and created again"));
    }
    if found.metadata.deletion_timestamp.is_some() {
        return Shutdown::Restore(format!("DaemonSet {name} is being deleted"));
    }
    let pod = found.spec.template.spec;
    match selects(&pod, node) {
        Some(false) => Shutdown::Restore(format!("DaemonSet {name} does not select this node")),
        Some(true) | None => Shutdown::Leave(format!("DaemonSet {name} exists")),
    }
}

/// Decides when the agent's `DaemonSet` is unknown, by why its own pod was not read.
pub fn without_owner(unread: Option<&Failure>) -> Shutdown {
    match unread {
        Some(failure) => by_refusal(
            failure.code,
            format!("failed to list pods: {}", failure.why),
        ),
        None => Shutdown::Leave("terminated; the agent's DaemonSet is not known".to_owned()),
    }
}

/// If the account is gone or lost its rights, as when an installation is deleted object by object, no next agent could
/// take over what is in force.
fn by_refusal(code: Option<u16>, why: String) -> Shutdown {
    match code {
        Some(401 | 403) => {
            Shutdown::Restore(format!("{why}: no agent with this account can continue"))
        }
        _ => Shutdown::Leave(why),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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

    fn error_answer(code: u16, reason: &str) -> CallError {
        let mut status = Status::failure("no", reason);
        status.code = code;
        CallError::Kube(kube::Error::Api(status.boxed()))
    }

    fn restores(answer: Result<DaemonSet, CallError>) -> bool {
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
        matches!(by_daemon_set(answer, &owner, node), Shutdown::Restore(_))
    }

    #[test]
    fn a_deleted_or_recreated_daemonset_means_restore() {
        let pod = json!({"containers": []});
        assert!(!restores(Ok(daemon_set(&json!({}), &pod))));
        assert!(restores(Err(error_answer(404, "NotFound"))));
        assert!(restores(Ok(daemon_set(&json!({"uid": "another"}), &pod))));
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        assert!(restores(Ok(daemon_set(&deleted, &pod))));
    }

    fn pods_unlisted(code: Option<u16>) -> Shutdown {
        let why = "no".to_owned();
        without_owner(Some(&Failure { code, why }))
    }

    #[test]
    fn an_account_without_rights_means_restore() {
        for code in [401, 403] {
            assert!(restores(Err(error_answer(code, "Denied"))), "{code}");
            let shutdown = pods_unlisted(Some(code));
            assert!(matches!(shutdown, Shutdown::Restore(_)), "{shutdown:?}");
        }
    }

    #[test]
    fn in_doubt_everything_stays_in_force() {
        for code in [429, 500, 503, 504] {
            assert!(!restores(Err(error_answer(code, "Failure"))), "{code}");
        }
        let not_ours = "Failed to parse error data";
        assert!(
            !restores(Err(error_answer(404, not_ours))),
            "a 404 from a proxy in front of the API server"
        );
        let server = "https://127.0.0.1:6443".to_owned();
        assert!(!restores(Err(CallError::TimedOut { server })));
        for shutdown in [
            pods_unlisted(Some(500)),
            pods_unlisted(None),
            without_owner(None),
        ] {
            assert!(matches!(shutdown, Shutdown::Leave(_)), "{shutdown:?}");
        }
    }

    #[test]
    fn a_daemonset_that_no_longer_selects_the_node_means_restore() {
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
            assert_eq!(restores(Ok(daemon_set(&json!({}), &pod))), end, "{pod}");
        }
    }
}
