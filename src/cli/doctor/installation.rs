//! Checks of the cluster, the definitions and the controller.

use std::collections::BTreeSet;

use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::ResourceExt;
use serde_json::Value;

use super::finding::{DoctorFinding, INSTALL, REINSTALL, finding, full_name, list, unreadable};
use super::permissions::Review;
use super::snapshot::{ClusterSnapshot, Read, SnapshotError, arguments, items};
use crate::crd::emergency_stop::{self, ANNOTATION, OBJECT};
use crate::crd::{KubernetesVersion, definitions, missing_fields, node_watermark};
use crate::messages::count;

/// A leader is gone this long after its Lease has expired; clocks may differ by as much.
const LEADER_GRACE: SignedDuration = SignedDuration::from_secs(60);

/// The version of the API server, if known.
pub(super) fn version_of(snapshot: &ClusterSnapshot) -> Option<KubernetesVersion> {
    KubernetesVersion::of(snapshot.version.as_ref().ok()?)
}

/// What to run if a definition is missing or outdated.
pub(super) fn install_command(snapshot: &ClusterSnapshot) -> String {
    version_of(snapshot).unwrap_or_default().install_command()
}

pub(super) fn kubernetes(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let oldest = KubernetesVersion::OLDEST;
    let old = version_of(snapshot).filter(|version| *version < oldest);
    old.map(|version| {
        let what = format!("it is {version}: plimsoll needs {oldest} or later");
        let fix = "upgrade the cluster, the control plane first";
        finding("Kubernetes", what, fix)
    })
}

/// Anything that could not be read may have problems.
pub(super) fn unread(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    fn error<'a, T>(
        what: &'static str,
        read: &'a Read<T>,
    ) -> Option<(&'static str, &'a SnapshotError)> {
        let error = read.as_ref().err().filter(|it| !it.is_missing())?;
        Some((what, error))
    }
    let mut errors = vec![
        error("nodes", &snapshot.nodes),
        error("DaemonSets", &snapshot.daemon_sets),
    ];
    for namespace in &snapshot.agents {
        errors.push(error("pods of agents", &namespace.pods));
        errors.push(error("the namespace of agents", &namespace.object));
    }
    if !snapshot.only_agents {
        errors.extend([
            error("the version", &snapshot.version),
            error("Deployments", &snapshot.deployments),
            error("NodeWatermarks", &snapshot.watermarks),
            error("Leases", &snapshot.leases),
            error("admission policies", &snapshot.admission_policies),
            error(
                "bindings of admission policies",
                &snapshot.admission_bindings,
            ),
            error("flow schemas", &snapshot.flow_schemas),
            error("priority levels", &snapshot.priority_levels),
            error("the emergency stop", &snapshot.stop),
            error("the APIService", &snapshot.api_service),
            error("NodeQOS", &snapshot.node_qos),
            error("PodQOS", &snapshot.pod_qos),
            error("AvoidanceActions", &snapshot.actions),
        ]);
    }
    let elections = snapshot.elections.iter();
    errors.extend(elections.map(|it| error("the Lease of the leader", it)));
    let errors = errors.into_iter().flatten();
    let found = errors.map(|(what, error)| {
        unreadable(
            "plimsoll doctor",
            &format!("{what} could not be read"),
            error,
        )
    });
    found.collect()
}

pub(super) fn emergency_stop(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let namespace = &snapshot.lease_namespace;
    let about = || format!("ConfigMap {namespace}/{OBJECT}");
    match &snapshot.stop {
        Err(error) if error.is_missing() => {
            let what = "it is missing, so kubectl annotate can't stop the agents in an emergency";
            let fix = format!("kubectl create configmap {OBJECT} -n {namespace}");
            vec![finding(about(), what, fix)]
        }
        Err(_) => Vec::new(),
        Ok(object) => {
            let all = emergency_stop::stop_of_all(object).map(|reason| {
                let reason = emergency_stop::stop_message(&reason);
                let what = format!("everything is {reason}: no agent acts ({ANNOTATION})");
                let fix = "plimsoll resume, when the reason no longer applies";
                finding(about(), what, fix)
            });
            let alone = emergency_stop::stopped_nodes(object).map(|(node, reason)| {
                let reason = emergency_stop::stop_message(&reason);
                let what = format!("node {node} is {reason}: its agent does not act");
                let fix =
                    format!("plimsoll resume --node {node}, when the reason no longer applies");
                finding(about(), what, fix)
            });
            all.into_iter().chain(alone).collect()
        }
    }
}

pub(super) fn crds(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let check = |definition: &CustomResourceDefinition| {
        let [policies, watermarks] = &snapshot.schemas;
        let document = if definition.spec.group == node_watermark::GROUP {
            watermarks
        } else {
            policies
        };
        let about = format!("definition of {}", definition.spec.names.kind);
        let document = match document {
            Ok(document) => document,
            Err(error) if error.is_missing() => &Value::Null,
            Err(error) => return Some(unreadable(about, "it could not be read", error)),
        };
        let what = match missing_fields(definition, document) {
            None => "it is not installed".to_owned(),
            Some(missing) if missing.is_empty() => return None,
            Some(missing) => {
                let missing = list(missing);
                format!("it is from another version of plimsoll, and lacks {missing}")
            }
        };
        Some(finding(about, what, install_command(snapshot)))
    };
    definitions().iter().filter_map(check).collect()
}

pub(super) fn no_controller(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let none = snapshot.deployments.as_ref().is_ok_and(Vec::is_empty);
    let what = "there is none: no policy is compiled for any node";
    none.then(|| finding("controller", what, INSTALL))
}

fn ready_replicas(deployment: &Deployment) -> i32 {
    let status = deployment.status.as_ref();
    status.and_then(|it| it.ready_replicas).unwrap_or(0)
}

pub(super) fn replicas(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let check = |deployment: &Deployment| {
        let wanted = deployment.spec.as_ref().and_then(|it| it.replicas);
        let (ready, wanted) = (ready_replicas(deployment), wanted.unwrap_or(0));
        if wanted > 0 && ready >= wanted {
            return None;
        }
        let conditions = deployment.status.iter().flat_map(|it| &it.conditions);
        let mut conditions = conditions.flatten();
        let failure = conditions.find(|it| it.type_ == "ReplicaFailure" && it.status == "True");
        let failure = failure.map(|it| message(it.message.as_deref(), it.reason.as_deref()));
        let fix = match failure {
            _ if wanted == 0 => "kubectl scale it to 2 replicas",
            Some(_) => "make whatever rejects its pods admit them",
            None => "kubectl describe pod and kubectl logs of a replica that is not ready show why",
        };
        let failure = failure.map(|it| format!("; {it}")).unwrap_or_default();
        let what = format!("{ready} of {wanted} replicas are ready{failure}");
        let about = format!("Deployment {}", full_name(deployment));
        Some(finding(about, what, fix))
    };
    let schedulers = items(&snapshot.placement.schedulers).iter();
    let all = items(&snapshot.deployments).iter().chain(schedulers);
    all.filter_map(check).collect()
}

/// `message (reason)`
pub(super) fn message(message: Option<&str>, reason: Option<&str>) -> String {
    format!("{} ({})", message.unwrap_or("?"), reason.unwrap_or("?"))
}

/// Whether any controller replica is ready.
fn controller_runs(snapshot: &ClusterSnapshot) -> bool {
    let mut deployments = items(&snapshot.deployments).iter();
    deployments.any(|it| ready_replicas(it) > 0)
}

/// Ready replicas without a leader.
pub(super) fn leader(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let leads = |lease: &Lease| {
        let spec = lease.spec.as_ref()?;
        let duration = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or(0).into());
        let age = snapshot.now.duration_since(spec.renew_time.as_ref()?.0);
        let is_held = spec.holder_identity.as_deref() != Some("");
        Some(is_held && age < duration + LEADER_GRACE)
    };
    let may_lead = |lease: &Read<Lease>| match lease {
        Ok(lease) => leads(lease).unwrap_or(false),
        Err(error) => !error.is_missing(),
    };
    if !controller_runs(snapshot) || snapshot.elections.iter().all(may_lead) {
        return None;
    }
    let fix = "kubectl logs of its replicas show why they can't acquire the Lease";
    let what = "no replica leads: no policy is compiled for any node";
    Some(finding("controller", what, fix))
}

/// Nodes without a `NodeWatermark`.
pub(super) fn missing_watermarks(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let Ok(table) = &snapshot.watermarks else {
        return None;
    };
    let compiled = table.cells(["Name"]).into_iter();
    let compiled: BTreeSet<&str> = compiled.map(|[name]| name).collect();
    let nodes = items(&snapshot.nodes).iter().map(|it| it.name.as_str());
    let without: Vec<&str> = nodes.filter(|it| !compiled.contains(it)).collect();
    if without.is_empty() || !controller_runs(snapshot) {
        return None;
    }
    let what = format!(
        "there is none for {}: {}",
        count(without.len(), "node"),
        list(without)
    );
    let fix = "kubectl logs of the leading controller shows why it does not write them";
    Some(finding("NodeWatermarks", what, fix))
}

pub(super) fn installations(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    fn instance(object: &impl ResourceExt) -> String {
        let label = object.labels().get("app.kubernetes.io/instance");
        let namespace = object.namespace().unwrap_or_default();
        format!("{namespace}/{}", label.map_or("", String::as_str))
    }
    let deployments = items(&snapshot.deployments).iter().map(instance);
    let daemon_sets = items(&snapshot.daemon_sets).iter().map(instance);
    let found: BTreeSet<String> = deployments.chain(daemon_sets).collect();
    if found.len() < 2 {
        return None;
    }
    let what = format!(
        "there are {}: {}; they interfere with each other",
        found.len(),
        list(found)
    );
    Some(finding("installations", what, "helm uninstall all but one"))
}

/// Whether API servers pass requests on to aggregated APIs at all.
pub(super) fn aggregation(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    if snapshot.api_service.is_err() {
        return None;
    }
    let is_off = match &snapshot.aggregation {
        Ok(config) => {
            let data = config.data.as_ref();
            !data.is_some_and(|it| it.contains_key("requestheader-client-ca-file"))
        }
        Err(error) if error.is_missing() => true,
        Err(error) => {
            let what = "API aggregation could not be checked";
            return Some(unreadable("plimsoll doctor", what, error));
        }
    };
    let what = "the API server has no --requestheader-client-ca-file, so kubectl get nodemetrics can't work";
    let fix = "configure the aggregation layer, or install with metricsAPI.enabled=false";
    is_off.then(|| finding("API aggregation", what, fix))
}

pub(super) fn api_service(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let about = "APIService v1alpha1.metrics.plimsoll.dev";
    match &snapshot.api_service {
        Ok(service) => {
            let conditions = service.status.iter().flat_map(|it| &it.conditions);
            let available = conditions.flatten().find(|it| it.type_ == "Available");
            let reason = message(
                available.and_then(|it| it.message.as_deref()),
                available.and_then(|it| it.reason.as_deref()),
            );
            let what = format!("it is not available: {reason}");
            let fix = "check the controller's pods, and whether API servers can reach them (NetworkPolicy, firewall)";
            let is_available = available.is_some_and(|it| it.status == "True");
            (!is_available).then(|| finding(about, what, fix))
        }
        Err(error) => {
            let is_wanted = !arguments(&snapshot.deployments, "--metrics-api-listen=").is_empty();
            let what = "it is missing, so kubectl get nodemetrics can't work";
            (is_wanted && error.is_missing()).then(|| finding(about, what, REINSTALL))
        }
    }
}

pub(super) fn permissions(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let mut denied: Vec<(&Review, String)> = Vec::new();
    let reviews = snapshot.reviews.iter();
    for review in reviews.filter(|it| it.allowed == Ok(false)) {
        match denied.last_mut() {
            Some((last, verbs)) if (&last.user, &last.what) == (&review.user, &review.what) => {
                verbs.push_str(", ");
                verbs.push_str(review.verb);
            }
            _ => denied.push((review, review.verb.to_owned())),
        }
    }
    let denied = denied.into_iter().map(|(review, verbs)| {
        let what = format!("{} may not {verbs} {}", review.user, review.what);
        let about = format!("permissions of {}", review.actor.name());
        finding(about, what, "reinstall the chart's roles with helm upgrade")
    });
    denied.collect()
}

pub(super) fn unknown_permissions(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let mut errors = snapshot.reviews.iter();
    let error = errors.find_map(|it| it.allowed.as_ref().err());
    error.map(|error| {
        let why = &error.why;
        let what = format!("the permissions of agents and controller could not be checked: {why}");
        let fix = "run it as a user who may create subjectaccessreviews";
        finding("plimsoll doctor", what, fix)
    })
}
