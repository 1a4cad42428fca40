//! The facts about the containers of a pod that throttling on cgroup v1 needs.

use serde::{Deserialize, Serialize};

use super::object::{Container, ContainerStatus, PodObject, PodSpec};
use super::resources::{all_containers, has_cpu_limit, is_sidecar};

/// Facts from the Pod object, because a container that is not running has no cgroup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerFacts {
    /// Whether a container or init container has a CPU limit. When it starts, its quota is written to its cgroup, and on cgroup
    /// v1 the kernel rejects it while the quota of the pod is lower.
    pub limited: bool,
    /// Whether a container that should run is not running, and waits to be started or restarted.
    pub missing: bool,
}

/// The facts of the pod's containers.
pub fn container_facts(pod: &PodObject) -> ContainerFacts {
    let Some(spec) = &pod.spec else {
        return ContainerFacts::default();
    };
    ContainerFacts {
        limited: is_limited(spec),
        missing: is_missing(pod, spec),
    }
}

/// A limit of the pod applies to each container without its own limit.
fn is_limited(spec: &PodSpec) -> bool {
    let resources = all_containers(spec).filter_map(|container| container.resources.as_ref());
    spec.resources.iter().chain(resources).any(has_cpu_limit)
}

fn is_missing(pod: &PodObject, spec: &PodSpec) -> bool {
    let status = pod.status.as_ref();
    let regular = status.and_then(|status| status.container_statuses.as_deref());
    let init = status.and_then(|status| status.init_container_statuses.as_deref());
    let sidecars = spec.init_containers.iter().flatten();
    let mut sidecars = sidecars.filter(|container| is_sidecar(container));
    let mut containers = spec.containers.iter().flatten();
    let waits = |container: &Container, statuses: Option<&[ContainerStatus]>| {
        // The kubelet reports all containers at once: without any status nothing is known.
        let same_name = |status: &&ContainerStatus| status.name == container.name;
        statuses.is_some_and(|all| is_to_start(container, spec, all.iter().find(same_name)))
    };
    containers.any(|it| waits(it, regular)) || sidecars.any(|it| waits(it, init))
}

/// Whether the container is not running and will be started: a terminated one may not be restarted.
fn is_to_start(container: &Container, spec: &PodSpec, status: Option<&ContainerStatus>) -> bool {
    let Some(state) = status.and_then(|status| status.state.as_ref()) else {
        return true;
    };
    if state.running.is_some() {
        return false;
    }
    let Some(terminated) = &state.terminated else {
        return true;
    };
    let policy = container.restart_policy.as_deref();
    match policy.or(spec.restart_policy.as_deref()) {
        Some("Never") => false,
        Some("OnFailure") => terminated.exit_code != 0,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn facts(spec: &Value, status: &Value) -> ContainerFacts {
        let pod = json!({"metadata": {"name": "p"}, "spec": spec, "status": status});
        container_facts(&serde_json::from_value(pod).expect("a pod"))
    }

    #[test]
    fn a_limit_of_any_container_or_init_container_counts() {
        let limit = json!({"limits": {"cpu": "100m"}});
        let memory = json!({"requests": {"cpu": "1"}, "limits": {"memory": "1Gi", "cpu": "0"}});
        let plain = json!({"name": "a"});
        let with = |resources: &Value| json!({"name": "b", "resources": resources});
        for (spec, limited) in [
            (json!({"containers": [plain, with(&limit)]}), true),
            (
                json!({"containers": [plain], "initContainers": [with(&limit)]}),
                true,
            ),
            (json!({"containers": [plain], "resources": limit}), true),
            (
                json!({"containers": [plain, with(&memory)], "resources": memory}),
                false,
            ),
        ] {
            assert_eq!(facts(&spec, &json!({})).limited, limited, "{spec}");
        }
    }

    #[test]
    fn only_a_container_that_will_be_started_is_missing() {
        let running = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
        let crashed = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let terminated = |code: i32| json!({"terminated": {"exitCode": code}});
        for (policy, state, missing) in [
            ("Always", &running, false),
            ("Always", &crashed, true),
            ("Always", &terminated(0), true),
            ("OnFailure", &terminated(0), false),
            ("OnFailure", &terminated(1), true),
            ("Never", &terminated(1), false),
            ("Never", &json!({}), true),
        ] {
            let spec =
                json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]});
            let status = json!({"containerStatuses": [
                {"name": "a", "state": running}, {"name": "b", "state": state},
            ]});
            assert_eq!(facts(&spec, &status).missing, missing, "{policy} {state}");
        }
        let two = json!({"containers": [{"name": "a"}, {"name": "b"}]});
        let one_known = json!({"containerStatuses": [{"name": "a", "state": running}]});
        assert!(facts(&two, &one_known).missing);
        assert!(
            !facts(&two, &json!({"phase": "Running"})).missing,
            "nothing is known"
        );
    }

    #[test]
    fn of_init_containers_only_sidecars_can_be_missing() {
        let spec = json!({"containers": [{"name": "a"}], "initContainers": [
            {"name": "first"}, {"name": "side", "restartPolicy": "Always"},
        ]});
        let with_side = |state: Value| {
            facts(
                &spec,
                &json!({
                    "containerStatuses": [{"name": "a", "state": {"running": {}}}],
                    "initContainerStatuses": [
                        {"name": "first", "state": {"terminated": {"exitCode": 0}}},
                        {"name": "side", "state": state},
                    ],
                }),
            )
        };
        assert!(!with_side(json!({"running": {}})).missing);
        assert!(with_side(json!({"terminated": {"exitCode": 0}})).missing);
    }
}
