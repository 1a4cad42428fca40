//! The pods of agents.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use kube::ResourceExt as _;

use super::snapshot::{ClusterSnapshot, items};

/// A pod of an agent.
#[derive(Clone, Debug)]
pub(super) struct AgentPod {
    pub name: String,
    /// The `DaemonSet` that owns it.
    pub set: String,
    /// `None` until it is scheduled.
    pub node: Option<String>,
    /// What its containers wait for, or its phase, as in the column STATUS of kubectl.
    pub status: String,
    /// All its containers are ready.
    pub ready: bool,
    /// It is being deleted.
    pub deleted: bool,
}

impl From<Pod> for AgentPod {
    fn from(pod: Pod) -> Self {
        let deleted = pod.metadata.deletion_timestamp.is_some();
        let containers = pod.status.iter();
        let containers: Vec<_> = containers
            .flat_map(|it| &it.container_statuses)
            .flatten()
            .collect();
        let phase = pod.status.as_ref().and_then(|it| it.phase.clone());
        let status = match containers.iter().find_map(|it| reason(it)) {
            _ if deleted => "Terminating".to_owned(),
            Some(reason) => reason,
            None => phase.unwrap_or_else(|| "Pending".to_owned()),
        };
        let owner = pod.owner_references().first();
        Self {
            set: owner.map(|it| it.name.clone()).unwrap_or_default(),
            node: pod.spec.as_ref().and_then(|it| it.node_name.clone()),
            ready: !containers.is_empty() && containers.iter().all(|it| it.ready),
            name: pod.name_any(),
            status,
            deleted,
        }
    }
}

/// Why a container does not run.
fn reason(container: &ContainerStatus) -> Option<String> {
    let ContainerState {
        waiting,
        terminated,
        ..
    } = container.state.as_ref()?;
    let terminated = terminated.as_ref();
    let terminated = terminated.map(|it| it.reason.clone().unwrap_or_else(|| "Error".to_owned()));
    let waiting = waiting.as_ref().and_then(|it| it.reason.clone());
    waiting.or(terminated)
}

impl AgentPod {
    pub(super) const fn is_waiting(&self) -> bool {
        self.deleted || !self.ready
    }
}

/// The pods of all agents.
pub(super) fn pods(snapshot: &ClusterSnapshot) -> Vec<&AgentPod> {
    let namespaces = snapshot.agents.iter();
    namespaces.flat_map(|it| items(&it.pods)).collect()
}

/// Nodes where an agent can be ready: Ready and not being deleted.
pub(super) fn up(snapshot: &ClusterSnapshot) -> BTreeSet<&str> {
    let nodes = items(&snapshot.nodes).iter();
    let up = nodes.filter(|node| node.ready && !node.deleted);
    up.map(|node| node.name.as_str()).collect()
}

/// The pods that are waited for: with `--only agents`, those on nodes that are down are not.
pub(super) fn expected(snapshot: &ClusterSnapshot) -> Vec<&AgentPod> {
    let up = up(snapshot);
    let is_up = |pod: &AgentPod| pod.node.as_deref().is_none_or(|node| up.contains(node));
    let mut pods = pods(snapshot);
    pods.retain(|pod| !snapshot.only_agents || is_up(pod));
    pods
}

/// Nodes with a ready agent.
pub(super) fn running(snapshot: &ClusterSnapshot) -> BTreeSet<&str> {
    let ready = pods(snapshot).into_iter().filter(|pod| pod.ready);
    ready.filter_map(|pod| pod.node.as_deref()).collect()
}

/// Nodes with pods of several `DaemonSet`s, and the names of these.
pub(super) fn shared_nodes<'a>(pods: &[&'a AgentPod]) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let mut sets: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| !pod.deleted) {
        if let Some(node) = &pod.node {
            sets.entry(node).or_default().insert(&pod.set);
        }
    }
    sets.retain(|_, sets| sets.len() > 1);
    sets
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn agent(metadata: &Value, state: &Value) -> AgentPod {
        let mut pod = json!({
            "metadata": {"name": "agent-x", "ownerReferences": [{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agent", "uid": "u"}]},
            "spec": {"nodeName": "a", "containers": []},
            "status": {"phase": "Running", "containerStatuses": [
                {"name": "agent", "image": "", "imageID": "", "restartCount": 0, "ready": state["running"].is_object(), "state": state},
            ]},
        });
        for (field, value) in metadata.as_object().unwrap() {
            pod["metadata"][field] = value.clone();
        }
        let pod: Pod = serde_json::from_value(pod).unwrap();
        pod.into()
    }

    #[test]
    fn the_status_of_a_pod_is_as_kubectl_shows_it() {
        for (state, status, ready) in [
            (json!({"running": {}}), "Running", true),
            (
                json!({"waiting": {"reason": "CrashLoopBackOff"}}),
                "CrashLoopBackOff",
                false,
            ),
            (
                json!({"terminated": {"exitCode": 2, "reason": "Error"}}),
                "Error",
                false,
            ),
        ] {
            let pod = agent(&json!({}), &state);
            assert_eq!((pod.status.as_str(), pod.ready), (status, ready));
            assert_eq!(
                (pod.set.as_str(), pod.node.as_deref()),
                ("agent", Some("a"))
            );
        }
        let deleted = json!({"deletionTimestamp": "2026-01-01T00:00:00Z"});
        let pod = agent(&deleted, &json!({"running": {}}));
        assert!(pod.deleted && pod.status == "Terminating");
        let pending = AgentPod::from(Pod::default());
        assert_eq!((pending.status.as_str(), pending.ready), ("Pending", false));
    }
}
