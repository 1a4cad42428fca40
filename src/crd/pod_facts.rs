//! Extracts the facts that decisions need from a `v1` Pod.
//!
//! The quality-of-service class follows `ComputePodQOS` of Kubernetes 1.34 (`pkg/apis/core/v1/helper/qos`), the requests follow
//! `PodRequests` (`k8s.io/component-helpers/resource`). A manifest that did not pass an API server gets the same defaults: a
//! limit without a request is also the request.

mod containers;
mod object;
mod resources;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};

use crate::engine::pod::{EvictionExemption, Pod, PodUid, Reserved};
use crate::engine::units::Quota;

pub use self::containers::{ContainerFacts, container_facts};
pub use self::object::{PodObject, PodSpec};
pub use self::resources::ResourceError;

/// With the value `"true"` no action is taken on the pod.
pub const PROTECTED_ANNOTATION: &str = "plimsoll.dev/protected";
/// The prefix of the resources that elastic pods request.
const ELASTIC_PREFIX: &str = "gocrane.io/";
/// The lowest priority that counts as system-critical.
const SYSTEM_CRITICAL: i32 = 2_000_000_000;
/// The default grace period of Kubernetes in seconds.
const DEFAULT_GRACE: i64 = 30;

/// Why a Pod object cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PodFactsError {
    /// It has no `metadata.name`.
    #[error("the pod has no metadata.name")]
    Unnamed,
    /// It has no `spec`.
    #[error("the pod has no spec")]
    NoSpec,
    /// A request or limit is invalid.
    #[error(transparent)]
    Resources(#[from] ResourceError),
}

/// The facts of `pod`.
///
/// Defaults: the UID is `namespace/name` (for manifests), the namespace `default`, the start time 0. `running` only depends
/// on the phase: without a status it is false.
///
/// # Errors
/// The object has no name or no spec, or an invalid quantity.
pub fn pod_facts(pod: &PodObject) -> Result<Pod, PodFactsError> {
    let meta = &pod.metadata;
    let spec = pod.spec.as_ref().ok_or(PodFactsError::NoSpec)?;
    let name = meta.name.clone().ok_or(PodFactsError::Unnamed)?;
    let namespace = meta
        .namespace
        .clone()
        .unwrap_or_else(|| "default".to_owned());
    let priority = priority(spec);
    Ok(Pod {
        uid: uid(meta, &namespace, &name),
        labels: meta.labels.clone().unwrap_or_default(),
        priority,
        qos: resources::qos_class(spec)?,
        started: started(pod),
        running: phase(pod) == Some("Running"),
        terminating: meta.deletion_timestamp.is_some(),
        resources_reported: pod.status.as_ref().is_some_and(|it| it.resources.is_some()),
        resizing: is_resizing(pod),
        elastic: is_elastic(spec),
        cpu_request: resources::cpu_request(spec)?,
        resources: resources::pod_resources(spec)?,
        exec_probes: has_exec_probes(spec),
        container_requests: resources::container_requests(spec)?,
        grace: grace(meta, spec),
        protected: annotation(meta, PROTECTED_ANNOTATION) == Some("true"),
        reserved: (namespace == "kube-system").then_some(Reserved::Namespace),
        eviction_exemption: never_evicted(meta, priority),
        owned: controller(meta).is_some_and(|owner| owner.kind != "Node"),
        owner: controller(meta).map(|owner| owner.uid.as_str().into()),
        namespace,
        name,
    })
}

/// The CPU quota that the kubelet sets on the pod's cgroup, from its limits.
///
/// # Errors
/// The object has no spec, or an invalid quantity.
pub fn cpu_quota(pod: &PodObject) -> Result<Quota, PodFactsError> {
    let spec = pod.spec.as_ref().ok_or(PodFactsError::NoSpec)?;
    Ok(resources::cpu_quota(spec)?)
}

/// `status.phase`, if set.
pub fn phase(pod: &PodObject) -> Option<&str> {
    pod.status.as_ref()?.phase.as_deref()
}

/// The value of an annotation.
pub fn annotation<'a>(meta: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(key).map(String::as_str)
}

fn uid(meta: &ObjectMeta, namespace: &str, name: &str) -> PodUid {
    match &meta.uid {
        Some(uid) => PodUid::from(uid.as_str()),
        None => PodUid::from(format!("{namespace}/{name}").as_str()),
    }
}

/// `spec.priority`, which admission sets from the priority class; for manifests, that of the two built-in classes.
fn priority(spec: &PodSpec) -> i32 {
    match (spec.priority, spec.priority_class_name.as_deref()) {
        (Some(priority), _) => priority,
        (None, Some("system-cluster-critical")) => SYSTEM_CRITICAL,
        (None, Some("system-node-critical")) => SYSTEM_CRITICAL + 1000,
        (None, _) => 0,
    }
}

/// Whether a probe runs a command in a container, which then needs CPU within its timeout.
fn has_exec_probes(spec: &PodSpec) -> bool {
    let containers = [&spec.containers, &spec.init_containers];
    let mut containers = containers.into_iter().flatten().flatten();
    containers.any(|it| {
        let probes = [&it.liveness_probe, &it.readiness_probe, &it.startup_probe];
        let mut probes = probes.into_iter().flatten();
        probes.any(|probe| probe.exec.is_some())
    })
}

fn started(pod: &PodObject) -> i64 {
    let start = pod.status.as_ref().and_then(|s| s.start_time.as_ref());
    start
        .or(pod.metadata.creation_timestamp.as_ref())
        .map_or(0, |time| time.0.as_second())
}

/// The grace period; of a terminating pod, that of its deletion. Kubernetes treats a negative one as 1 s.
fn grace(meta: &ObjectMeta, spec: &PodSpec) -> Duration {
    let given = meta.deletion_grace_period_seconds;
    let seconds = given.or(spec.termination_grace_period_seconds);
    let seconds = u64::try_from(seconds.unwrap_or(DEFAULT_GRACE)).unwrap_or(1);
    Duration::from_secs(seconds)
}

/// Whether the kubelet has a resize to carry out, also one that it puts off or cannot grant.
fn is_resizing(pod: &PodObject) -> bool {
    let conditions = pod.status.iter().flat_map(|status| &status.conditions);
    conditions.flatten().any(|condition| {
        condition.status == "True"
            && matches!(
                condition.type_.as_str(),
                "PodResizePending" | "PodResizeInProgress"
            )
    })
}

fn is_elastic(spec: &PodSpec) -> bool {
    let pod = spec.resources.iter();
    resources::all_containers(spec)
        .filter_map(|container| container.resources.as_ref())
        .chain(pod)
        .flat_map(|resources| [&resources.requests, &resources.limits])
        .flatten()
        .flat_map(BTreeMap::keys)
        .any(|resource| resource.starts_with(ELASTIC_PREFIX))
}

fn controller(meta: &ObjectMeta) -> Option<&OwnerReference> {
    let owners = meta.owner_references.as_ref()?;
    owners.iter().find(|owner| owner.controller == Some(true))
}

/// Why the pod is never evicted. The most fundamental reason comes first: only one is shown.
fn never_evicted(meta: &ObjectMeta, priority: i32) -> Option<EvictionExemption> {
    let is = |key, value| annotation(meta, key) == Some(value);
    let owner = controller(meta).map(|owner| owner.kind.as_str());
    let source = annotation(meta, "kubernetes.io/config.source");
    if annotation(meta, "kubernetes.io/config.mirror").is_some()
        || source.is_some_and(|source| source != "api")
        || owner == Some("Node")
    {
        Some(EvictionExemption::Static)
    } else if owner == Some("DaemonSet") {
        Some(EvictionExemption::DaemonSet)
    } else if priority >= SYSTEM_CRITICAL {
        Some(EvictionExemption::SystemCritical)
    } else if is("cluster-autoscaler.kubernetes.io/safe-to-evict", "false")
        || is("karpenter.sh/do-not-disrupt", "true")
    {
        Some(EvictionExemption::DoNotDisrupt)
    } else {
        None
    }
}
