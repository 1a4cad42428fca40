//! Checks of what the controller serves to schedulers, by the metrics of its replicas.

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt as _};

use super::finding::{DoctorFinding, finding};
use super::snapshot::{
    ClusterSnapshot, InstalledWorkload as _, Read, arguments, component, items, list, read,
};

const DOCS: &str = "docs/scheduling.md";
/// The controller's option for requests of schedulers.
const SCHEDULER_LISTEN: &str = "--scheduler-listen=";
/// Its option with the port of its metrics.
const LISTEN: &str = "--listen=";
/// Metrics of `SchedulerApiMetrics`.
const ANSWERS: &str = "plimsoll_controller_scheduler_answers_total";
const FILTER_SUSPENDED: &str = "plimsoll_controller_scheduler_filter_suspended";
const POLICY_INVALID: &str = "plimsoll_controller_scheduler_policy_invalid";

/// What a replica's metrics say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ReplicaMetrics {
    /// Answers to schedulers since it started.
    pub answers: f64,
    pub filter_suspended: bool,
    pub policy_invalid: bool,
}

impl ReplicaMetrics {
    fn of(metrics: &str) -> Self {
        let sum = |name: &str| {
            let series = metrics.lines().filter_map(|line| {
                let rest = line.strip_prefix(name)?;
                let is_it = rest.starts_with(['{', ' ']);
                is_it.then(|| rest.rsplit(' ').next()?.parse::<f64>().ok())?
            });
            series.sum::<f64>()
        };
        Self {
            answers: sum(ANSWERS),
            filter_suspended: sum(FILTER_SUSPENDED) > 0.0,
            policy_invalid: sum(POLICY_INVALID) > 0.0,
        }
    }
}

/// The replicas that serve schedulers. None where the user may not ask pods through the API server (`pods/proxy`), or it can't
/// reach them: neither is a problem of the installation.
pub(super) async fn replicas(
    client: &Client,
    deployments: &Read<Vec<Deployment>>,
) -> Vec<ReplicaMetrics> {
    let mut found = Vec::new();
    let serving = items(deployments).iter();
    let serving = serving.filter(|it| !it.argument(SCHEDULER_LISTEN).is_empty());
    for deployment in serving {
        let listen = deployment.argument(LISTEN);
        let port = listen.first().and_then(|it| it.rsplit(':').next());
        let (Some(namespace), Some(port)) = (deployment.namespace(), port) else {
            continue;
        };
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        let labels = ListParams::default().labels(&component("controller"));
        let names = list(pods, labels, |it| it.name_any()).await;
        for name in items(&names) {
            let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{port}/proxy/metrics");
            let metrics = read(async {
                let request = hyper::Request::get(path).body(Vec::new());
                client
                    .request_text(request.map_err(kube::Error::HttpError)?)
                    .await
            });
            if let Ok(metrics) = metrics.await {
                found.push(ReplicaMetrics::of(&metrics));
            }
        }
    }
    found
}

/// The controller serves schedulers.
pub(super) fn is_on(snapshot: &ClusterSnapshot) -> bool {
    !arguments(&snapshot.deployments, SCHEDULER_LISTEN).is_empty()
}

/// No scheduler has asked any replica.
pub(super) fn no_requests(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let replicas = &snapshot.placement.replicas;
    if replicas.is_empty() || replicas.iter().any(|it| it.answers > 0.0) {
        return None;
    }
    let what = "the controller serves schedulers, and none has asked since it started";
    let fix =
        format!("configure the scheduler or the descheduler to ask it: {DOCS}#what-to-turn-on");
    Some(finding("scheduler API", what, fix))
}

/// Filter of the extender rejects no node for now.
pub(super) fn suspended_filter(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let mut replicas = snapshot.placement.replicas.iter();
    replicas.any(|it| it.filter_suspended).then(|| {
        let what = "Filter of the extender rejects no node at the moment: too many are hot, or have no recent report";
        let fix = "plimsoll top shows which; a log line of the controller says which of the two it is";
        finding("extender", what, fix)
    })
}

/// The policy file is invalid.
pub(super) fn invalid_policy(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let mut replicas = snapshot.placement.replicas.iter();
    replicas.any(|it| it.policy_invalid).then(|| {
        let what = "the scheduler policy is invalid; its last valid content is in use";
        let fix = "the controller's log says what is wrong; correct placement.schedulerAPI.policy";
        finding("extender", what, fix)
    })
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;
    use crate::scheduler_api::SchedulerApiMetrics;

    #[test]
    fn the_metrics_are_the_controllers() {
        let mut registry = Registry::with_prefix("plimsoll_controller");
        let metrics = SchedulerApiMetrics::default();
        metrics.register(&mut registry);
        metrics.example();
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for name in [ANSWERS, FILTER_SUSPENDED, POLICY_INVALID] {
            assert!(text.lines().any(|line| line.starts_with(name)), "{text}");
        }
        let quiet = ReplicaMetrics {
            answers: 0.0,
            filter_suspended: false,
            policy_invalid: false,
        };
        assert_eq!(ReplicaMetrics::of(&text), quiet);
        let busy = format!(
            "{text}{ANSWERS}{{page=\"filter\",code=\"200\"}} 3\n{ANSWERS}{{page=\"query\",code=\"503\"}} 4\n{FILTER_SUSPENDED} 1\n"
        );
        let wanted = ReplicaMetrics {
            answers: 7.0,
            filter_suspended: true,
            policy_invalid: false,
        };
        assert_eq!(ReplicaMetrics::of(&busy), wanted);
    }
}
