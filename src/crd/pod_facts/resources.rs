//! Requests and limits of a pod, and its quality-of-service class.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Written;

use crate::engine::pod::{QosClass, Resources as PodResources};
use crate::engine::quantity::Quantity;
use crate::engine::units::{Bytes, MilliCpu, Quota};

use super::object::{Container, PodSpec, ResourceRequirements};

/// The resources that determine the quality-of-service class.
const COMPUTE: [&str; 2] = ["cpu", "memory"];

/// An invalid quantity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("failed to read {resource} `{written}`: {reason}")]
pub struct ResourceError {
    /// The resource, such as `cpu`.
    resource: String,
    /// The value in the object.
    written: String,
    /// What is wrong.
    reason: String,
}

/// Amounts by resource, without zeros: Kubernetes treats a zero quantity as absent.
type Amounts = BTreeMap<&'static str, Nanos>;
/// Billionths of a unit, the finest resolution of Kubernetes.
type Nanos = i128;
type WrittenList = Option<BTreeMap<String, Written>>;

/// Every container, including init containers.
pub(super) fn all_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    let init = spec.init_containers.iter().flatten();
    containers(spec).chain(init)
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.containers.iter().flatten()
}

/// The quality-of-service class as computed by Kubernetes: from the pod-level resources if set, else from the sums over all containers,
/// including init containers.
pub(super) fn qos_class(spec: &PodSpec) -> Result<QosClass, ResourceError> {
    let mut totals = Totals::default();
    match &spec.resources {
        Some(own) => totals.add(&with_pod_defaults(own, spec)?, &amounts(&own.limits)?),
        None => {
            for container in all_containers(spec) {
                totals.add(&requests(container)?, &limits(container)?);
            }
        }
    }
    Ok(totals.class())
}

/// Sums over the containers of a pod.
#[derive(Default)]
struct Totals {
    requests: Amounts,
    limits: Amounts,
    /// Whether a container has no limit for CPU or memory.
    unlimited: bool,
}

impl Totals {
    fn add(&mut self, requests: &Amounts, limits: &Amounts) {
        self.unlimited |= COMPUTE
            .iter()
            .any(|resource| !limits.contains_key(resource));
        add_all(&mut self.requests, requests);
        add_all(&mut self.limits, limits);
    }

    fn class(&self) -> QosClass {
        if self.requests.is_empty() && self.limits.is_empty() {
            QosClass::BestEffort
        } else if !self.unlimited && self.requests == self.limits {
            QosClass::Guaranteed
        } else {
            QosClass::Burstable
        }
    }
}

/// The CPU request of the pod.
pub(super) fn cpu_request(spec: &PodSpec) -> Result<MilliCpu, ResourceError> {
    Ok(pod_request(spec, "cpu")?.map_or(MilliCpu::ZERO, milli))
}

/// Its memory request, and its limits.
pub(super) fn pod_resources(spec: &PodSpec) -> Result<PodResources, ResourceError> {
    Ok(PodResources {
        cpu_limit: pod_limit(spec, "cpu")?.map(milli),
        memory_request: pod_request(spec, "memory")?.map_or(Bytes::ZERO, bytes),
        memory_limit: pod_limit(spec, "memory")?.map(bytes),
    })
}

/// What the pod requests: its pod-level request if set, else the larger of the sum over its containers and sidecars, and of any
/// init container plus the sidecars started before it; plus the overhead of its runtime class.
fn pod_request(spec: &PodSpec, resource: &str) -> Result<Option<Nanos>, ResourceError> {
    let own = match &spec.resources {
        Some(own) => with_pod_defaults(own, spec)?.get(resource).copied(),
        None => None,
    };
    let request = match own {
        Some(own) => Some(own),
        None => containers_request(spec, resource)?,
    };
    let overhead = amounts(&spec.overhead)?;
    Ok(sum(request, overhead.get(resource).copied()))
}

/// The CPU request of each container and sidecar, by name.
pub(super) fn container_requests(
    spec: &PodSpec,
) -> Result<BTreeMap<String, MilliCpu>, ResourceError> {
    let sidecars = spec
        .init_containers
        .iter()
        .flatten()
        .filter(|c| is_sidecar(c));
    let mut by_name = BTreeMap::new();
    for container in containers(spec).chain(sidecars) {
        if let Some(cpu) = requests(container)?.get("cpu") {
            by_name.insert(container.name.clone(), milli(*cpu));
        }
    }
    Ok(by_name)
}

/// The quota that the kubelet sets on the pod (`ResourceConfigForPod`).
pub(super) fn cpu_quota(spec: &PodSpec) -> Result<Quota, ResourceError> {
    let limit = pod_limit(spec, "cpu")?;
    Ok(limit.map_or(Quota::Unlimited, |limit| Quota::Limit(milli(limit))))
}

/// The pod-level limit, else the aggregated limits of its containers, plus the overhead of its runtime class; `None` if a
/// container has no limit.
fn pod_limit(spec: &PodSpec, resource: &str) -> Result<Option<Nanos>, ResourceError> {
    let own = match &spec.resources {
        Some(own) => amounts(&own.limits)?.get(resource).copied(),
        None => None,
    };
    let mut unlimited = false;
    for container in all_containers(spec) {
        unlimited |= !limits(container)?.contains_key(resource);
    }
    let all = if unlimited {
        None
    } else {
        aggregate(spec, resource, limits)?
    };
    let Some(limit) = own.or(all) else {
        return Ok(None);
    };
    let overhead = amounts(&spec.overhead)?.get(resource).copied();
    Ok(Some(limit + overhead.unwrap_or(0)))
}

fn containers_request(spec: &PodSpec, resource: &str) -> Result<Option<Nanos>, ResourceError> {
    aggregate(spec, resource, requests)
}

/// The larger of the sum over containers and sidecars, and of any init container plus the sidecars started before it.
fn aggregate(
    spec: &PodSpec,
    resource: &str,
    of: fn(&Container) -> Result<Amounts, ResourceError>,
) -> Result<Option<Nanos>, ResourceError> {
    let mut regular = None;
    for container in containers(spec) {
        regular = sum(regular, of(container)?.get(resource).copied());
    }
    let mut sidecars = None;
    let mut peak = None;
    for container in spec.init_containers.iter().flatten() {
        let own = of(container)?;
        if is_sidecar(container) {
            sidecars = sum(sidecars, own.get(resource).copied());
            peak = peak.max(sidecars);
        } else {
            peak = peak.max(sum(sidecars, own.get(resource).copied()));
        }
    }
    Ok(sum(regular, sidecars).max(peak))
}

/// Whether there is a CPU limit above zero.
pub(super) fn has_cpu_limit(resources: &ResourceRequirements) -> bool {
    amounts(&resources.limits).is_ok_and(|limits| limits.contains_key("cpu"))
}

/// Whether an init container keeps running.
pub(super) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The pod-level requests. A missing one defaults to that of the containers, else to the pod-level limit.
fn with_pod_defaults(own: &ResourceRequirements, spec: &PodSpec) -> Result<Amounts, ResourceError> {
    let mut requests = amounts(&own.requests)?;
    let limits = amounts(&own.limits)?;
    for resource in COMPUTE {
        if is_given(&own.requests, resource) {
            continue;
        }
        let requested = containers_request(spec, resource)?;
        if let Some(amount) = requested.or_else(|| limits.get(resource).copied()) {
            requests.insert(resource, amount);
        }
    }
    Ok(requests)
}

/// The requests of a container. A limit without a request is also the request.
fn requests(container: &Container) -> Result<Amounts, ResourceError> {
    let Some(resources) = &container.resources else {
        return Ok(Amounts::new());
    };
    let mut requests = amounts(&resources.requests)?;
    for (resource, limit) in amounts(&resources.limits)? {
        if !is_given(&resources.requests, resource) {
            requests.insert(resource, limit);
        }
    }
    Ok(requests)
}

fn limits(container: &Container) -> Result<Amounts, ResourceError> {
    match &container.resources {
        Some(resources) => amounts(&resources.limits),
        None => Ok(Amounts::new()),
    }
}

/// Whether the resource is given, even as zero: a zero request does not default to the limit.
fn is_given(list: &WrittenList, resource: &str) -> bool {
    list.as_ref()
        .is_some_and(|list| list.contains_key(resource))
}

/// The CPU and memory of a list, without zeros.
fn amounts(list: &WrittenList) -> Result<Amounts, ResourceError> {
    let mut amounts = Amounts::new();
    for resource in COMPUTE {
        let Some(written) = list.as_ref().and_then(|list| list.get(resource)) else {
            continue;
        };
        let amount = read(resource, written)?;
        if amount > 0 {
            amounts.insert(resource, amount);
        }
    }
    Ok(amounts)
}

fn add_all(sums: &mut Amounts, amounts: &Amounts) {
    for (resource, amount) in amounts {
        *sums.entry(resource).or_default() += amount;
    }
}

fn sum(a: Option<Nanos>, b: Option<Nanos>) -> Option<Nanos> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a + b),
        (one, other) => one.or(other),
    }
}

/// Rounded up, as Kubernetes does.
fn milli(amount: Nanos) -> MilliCpu {
    let milli = amount.max(0).div_euclid(1_000_000) + i128::from(amount % 1_000_000 > 0);
    MilliCpu(u64::try_from(milli).unwrap_or(u64::MAX))
}

/// Rounded up.
fn bytes(amount: Nanos) -> Bytes {
    let bytes = amount.max(0).div_euclid(1_000_000_000) + i128::from(amount % 1_000_000_000 > 0);
    Bytes(u64::try_from(bytes).unwrap_or(u64::MAX))
}

fn read(resource: &str, written: &Written) -> Result<Nanos, ResourceError> {
    let error = |reason: String| ResourceError {
        resource: resource.to_owned(),
        written: written.0.clone(),
        reason,
    };
    let parsed: Result<Quantity, _> = written.0.parse();
    match parsed.map(Quantity::nanos) {
        Ok(nanos) if nanos < 0 => Err(error("it is below zero".to_owned())),
        Ok(nanos) => Ok(nanos),
        Err(reason) => Err(error(reason.to_string())),
    }
}
