//! What a Pod object says of its containers that throttling on cgroup v1 has to know.

use serde::{Deserialize, Serialize};

use super::object::{Container, ContainerStatus, PodObject, PodSpec};
use super::resources::{all_containers, has_cpu_limit, is_sidecar};

/// The containers of a pod, as its object has them: a cgroup tells nothing of a container that is not there at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerFacts {
    /// Some container, init containers too, has a CPU limit: whenever it starts, its quota is written into its cgroup. On
    /// cgroup v1 the kernel refuses it while the pod's own quota is below.
    pub limited: bool,
    /// Some container that should run does not: it waits to be started, or to be started again.
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

/// A limit of the pod as a whole is one of each container that has none of its own.
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
        // A kubelet tells of all containers at once: without any status nothing is known.
        let of_it = |status: &&ContainerStatus| status.name == container.name;
        statuses.is_some_and(|all| is_to_start(container, spec, all.iter().find(of_it)))
    };
    containers.any(|it| waits(it, regular)) || sidecars.any(|it| waits(it, init))
}

/// Whether the container does not run and will be started: one that has ended may be over for good.
fn is_to_start(container: &Container, spec: &PodSpec, status: Option<&ContainerStatus>) -> bool {
    let Some(state) = status.and_then(|status| status.state.as_ref()) else {
        return true;
    };
    if state.running.is_some() {
        return false;
    }
    let Some(ended) = &state.terminated else {
        return true;
    };
    let policy = container.restart_policy.as_deref();
    match policy.or(spec.restart_policy.as_deref()) {
        Some("Never") => false,
        Some("OnFailure") => ended.exit_code != 0,
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
    fn a_limit_of_any_container_counts_also_of_one_that_runs_only_at_the_start() {
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
    fn a_container_that_will_be_started_is_missing_and_one_that_is_over_is_not() {
        let running = json!({"running": {"startedAt": "2026-01-01T00:00:00Z"}});
        let crashed = json!({"waiting": {"reason": "CrashLoopBackOff"}});
        let ended = |code: i32| json!({"terminated": {"exitCode": code}});
        for (policy, state, missing) in [
            ("Always", &running, false),
            ("Always", &crashed, true),
            ("Always", &ended(0), true),
            ("OnFailure", &ended(0), false),
            ("OnFailure", &ended(1), true),
            ("Never", &ended(1), false),
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
    fn of_init_containers_only_sidecars_go_on_running() {
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
