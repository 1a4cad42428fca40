//! Requests and limits of a pod: its class of service, and the CPU that it was promised.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Written;

use crate::engine::pod::QosClass;
use crate::engine::quantity::Quantity;
use crate::engine::units::{MilliCpu, Quota};

use super::object::{Container, PodSpec, Resources};

/// The resources that decide the class of service.
const COMPUTE: [&str; 2] = ["cpu", "memory"];

/// A quantity that is not one.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("failed to read {resource} `{written}`: {reason}")]
pub struct ResourceError {
    /// Which resource, such as `cpu`.
    resource: String,
    /// What the object has.
    written: String,
    /// What is wrong with it.
    reason: String,
}

/// Amounts by resource, those above zero only: Kubernetes counts a zero quantity as absent.
type Amounts = BTreeMap<&'static str, Nanos>;
/// Billionths of a unit, the finest that Kubernetes keeps.
type Nanos = i128;
type WrittenList = Option<BTreeMap<String, Written>>;

/// Every container that can have resources, init containers too.
pub(super) fn all_containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    let init = spec.init_containers.iter().flatten();
    containers(spec).chain(init)
}

fn containers(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    spec.containers.iter().flatten()
}

/// The class that Kubernetes gives the pod: from the pod's own resources where it has any, else from the sums over
/// all its containers, init containers included.
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
    /// Some container lacks a limit for CPU or memory.
    open: bool,
}

impl Totals {
    fn add(&mut self, requests: &Amounts, limits: &Amounts) {
        self.open |= COMPUTE
            .iter()
            .any(|resource| !limits.contains_key(resource));
        add_all(&mut self.requests, requests);
        add_all(&mut self.limits, limits);
    }

    fn class(&self) -> QosClass {
        if self.requests.is_empty() && self.limits.is_empty() {
            QosClass::BestEffort
        } else if !self.open && self.requests == self.limits {
            QosClass::Guaranteed
        } else {
            QosClass::Burstable
        }
    }
}

/// The CPU that the pod was promised: its own request where it has one, else the larger of what its containers and
/// sidecars need together and what any init container needs beside the sidecars started before it; and the
/// overhead of its runtime class.
pub(super) fn cpu_request(spec: &PodSpec) -> Result<MilliCpu, ResourceError> {
    let own = match &spec.resources {
        Some(own) => with_pod_defaults(own, spec)?.get("cpu").copied().map(milli),
        None => None,
    };
    let containers = match own {
        Some(own) => own,
        None => containers_request(spec, "cpu")?.map_or(MilliCpu::ZERO, milli),
    };
    let overhead = amounts(&spec.overhead)?;
    Ok(containers + overhead.get("cpu").copied().map_or(MilliCpu::ZERO, milli))
}

/// The CPU that each container which runs beside the others was promised, by name.
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

/// The quota that the kubelet gives the pod (`ResourceConfigForPod`): the pod's own limit, else what its containers'
/// limits come to, and none where a container has no limit.
pub(super) fn cpu_quota(spec: &PodSpec) -> Result<Quota, ResourceError> {
    let own = match &spec.resources {
        Some(own) => amounts(&own.limits)?.get("cpu").copied(),
        None => None,
    };
    let mut open = false;
    for container in all_containers(spec) {
        open |= !limits(container)?.contains_key("cpu");
    }
    let all = if open {
        None
    } else {
        together(spec, "cpu", limits)?
    };
    let Some(limit) = own.or(all) else {
        return Ok(Quota::Unlimited);
    };
    let overhead = amounts(&spec.overhead)?.get("cpu").copied();
    Ok(Quota::Limit(milli(limit + overhead.unwrap_or(0))))
}

fn containers_request(spec: &PodSpec, resource: &str) -> Result<Option<Nanos>, ResourceError> {
    together(spec, resource, requests)
}

/// The larger of what containers and sidecars have together and what any init container has beside the sidecars
/// started before it.
fn together(
    spec: &PodSpec,
    resource: &str,
    of: fn(&Container) -> Result<Amounts, ResourceError>,
) -> Result<Option<Nanos>, ResourceError> {
    let mut together = None;
    for container in containers(spec) {
        together = sum(together, of(container)?.get(resource).copied());
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
    Ok(sum(together, sidecars).max(peak))
}

/// A CPU limit above zero.
pub(super) fn has_cpu_limit(resources: &Resources) -> bool {
    amounts(&resources.limits).is_ok_and(|limits| limits.contains_key("cpu"))
}

/// An init container that keeps running.
pub(super) fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The pod's own requests. Where one is not given, what the containers ask together stands, else the pod's limit.
fn with_pod_defaults(own: &Resources, spec: &PodSpec) -> Result<Amounts, ResourceError> {
    let mut requests = amounts(&own.requests)?;
    let limits = amounts(&own.limits)?;
    for resource in COMPUTE {
        if is_given(&own.requests, resource) {
            continue;
        }
        let asked = containers_request(spec, resource)?;
        if let Some(amount) = asked.or_else(|| limits.get(resource).copied()) {
            requests.insert(resource, amount);
        }
    }
    Ok(requests)
}

/// A container's requests; a limit without a request is one.
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

/// Given at all, be it as zero: a zero request is not filled in from the limit.
fn is_given(list: &WrittenList, resource: &str) -> bool {
    list.as_ref()
        .is_some_and(|list| list.contains_key(resource))
}

/// CPU and memory of a list, without zeros.
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

/// `None` is nothing asked; nothing and something is something.
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
