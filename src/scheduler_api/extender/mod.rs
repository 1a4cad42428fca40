//! The HTTP extender of kube-scheduler: Prioritize and Filter by the load of nodes. Pure; the time is an argument.

mod crane;
mod guard;
mod in_flight;
mod line;
mod score;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::Arc;

pub use self::guard::GuardChange;
use self::in_flight::{PodsInFlight, Shares};
use self::wire::PodToPlace;
pub use self::wire::{ExtenderRequest, WireError};
use crate::crd::NodeMetricStatus;
use crate::crd::node_metric::Load;
use crate::crd::scheduler_policy::SchedulerPolicy;
use crate::engine::time::BootTime;
use crate::metrics_api::loads::{ByNode, KnownLoad};

/// The extender.
#[derive(Debug, Default)]
pub struct Extender {
    /// crane's policy; `None`: by load line.
    policy: Option<Arc<SchedulerPolicy>>,
    in_flight: PodsInFlight,
    guard: guard::FilterGuard,
}

/// An answer to the scheduler.
#[derive(Debug, PartialEq, Eq)]
pub struct ExtenderAnswer {
    /// JSON.
    pub body: Vec<u8>,
    /// Candidates without a recent report.
    pub unknown: usize,
    /// Filter stops to reject nodes, or starts again.
    pub change: Option<GuardChange>,
}

/// A node with a recent report.
#[derive(Clone, Copy)]
struct Known<'a> {
    name: &'a Arc<str>,
    node: &'a KnownLoad,
    load: &'a Load,
    /// What the node has with its pods in flight, at least.
    floor: Option<Shares>,
}

impl Extender {
    /// With crane's policy, or by load line.
    pub fn new(policy: Option<Arc<SchedulerPolicy>>) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }

    /// Replaces the policy.
    pub fn set_policy(&mut self, policy: Arc<SchedulerPolicy>) {
        self.policy = Some(policy);
    }

    /// Answers `POST /extender/prioritize`.
    pub fn prioritize(
        &mut self,
        request: &ExtenderRequest<'_>,
        nodes: &ByNode,
        now: BootTime,
    ) -> ExtenderAnswer {
        let names = request.candidates.names();
        let (points, unknown) = self.points(&request.pod, &names, nodes, now);
        ExtenderAnswer {
            body: wire::priorities(&request.candidates, &points),
            unknown,
            change: None,
        }
    }

    /// The points of each candidate, and how many have no recent report. Charges the pod to the first.
    fn points(
        &mut self,
        pod: &PodToPlace,
        names: &[&str],
        nodes: &ByNode,
        now: BootTime,
    ) -> (Vec<u8>, usize) {
        let known = self.known(pod, names, nodes, now);
        let headroom = self.headroom(pod, &known);
        let first = score::first(&headroom, &pod.uid, names);
        if let Some(node) = first.and_then(|index| known[index])
            && let Some(share) = line::share(pod, node.node)
        {
            let base = self.base(node);
            self.in_flight.charge(&pod.uid, node.name, base, share, now);
        }
        let points = score::points(&score::neutral(&headroom), &pod.uid, first);
        let unknown = headroom
            .iter()
            .filter(|headroom| headroom.is_none())
            .count();
        (points, unknown)
    }

    /// The candidates with a recent report.
    fn known<'a>(
        &mut self,
        pod: &PodToPlace,
        names: &[&str],
        nodes: &'a ByNode,
        now: BootTime,
    ) -> Vec<Option<Known<'a>>> {
        self.in_flight.expire(now);
        self.in_flight.forget(&pod.uid);
        let known = |name: &&str| {
            let (name, node) = nodes.get_key_value(*name)?;
            let node = node.as_ref()?;
            let load = node.fresh(now)?;
            let floor = self.in_flight.floor(name);
            Some(Known {
                name,
                node,
                load,
                floor,
            })
        };
        names.iter().map(known).collect()
    }

    /// What a pod is added to: what the node reported, with the pods in flight before it.
    fn base(&self, known: Known<'_>) -> Shares {
        let [cpu, memory] = match self.policy {
            None => line::used(known.load),
            Some(_) => crane::newcomers(known.load),
        };
        let floor = known.floor.unwrap_or_default();
        [cpu.max(floor[0]), memory.max(floor[1])]
    }

    /// The headroom on each candidate for the pod, from 0 to 1.
    fn headroom(&self, pod: &PodToPlace, known: &[Option<Known<'_>>]) -> Vec<Option<f64>> {
        let Some(policy) = &self.policy else {
            let headroom = |known: &Option<Known<'_>>| {
                known.and_then(|node| Some(line::headroom(with_pod(pod, node)?)))
            };
            return known.iter().map(headroom).collect();
        };
        let statuses = known.iter().map(Option::as_ref);
        let statuses: Vec<Option<&NodeMetricStatus>> = statuses
            .map(|known| known.map(|known| &*known.node.status))
            .collect();
        let free = crane::free(policy, &statuses).into_iter().zip(known);
        free.map(|(free, node)| {
            let node = node.as_ref()?;
            let hot = crane::hot(crane::newcomers(node.load), node.floor);
            Some((free? - hot).clamp(0.0, 1.0))
        })
        .collect()
    }

    /// Answers `POST /extender/filter`.
    pub fn filter(
        &mut self,
        request: &ExtenderRequest<'_>,
        nodes: &ByNode,
        now: BootTime,
    ) -> ExtenderAnswer {
        let ExtenderRequest { pod, candidates } = request;
        let names = candidates.names();
        let known = self.known(pod, &names, nodes, now);
        let unknown = known.iter().filter(|node| node.is_none()).count();
        let mut rejected = vec![None; names.len()];
        let mut change = None;
        if !pod.exempt {
            let rejection = |node: &Option<Known<'_>>| {
                node.as_ref().and_then(|node| match &self.policy {
                    Some(policy) => crane::rejection(policy, &node.node.status),
                    None => with_pod(pod, *node)
                        .filter(|percent| *percent >= 100.0)
                        .map(|_| line::REASON.to_owned()),
                })
            };
            let reasons: Vec<Option<String>> = known.iter().map(rejection).collect();
            let count = reasons.iter().flatten().count();
            let (may_reject, is_new) = self.guard.check(names.len(), count, unknown, now);
            change = is_new;
            if may_reject {
                rejected = reasons;
            }
        }
        ExtenderAnswer {
            body: wire::filter_result(candidates, &rejected),
            unknown,
            change,
        }
    }
}

/// The points of a node with this load in percent of its load line: 0 to 9, as a mean over pods. The best node of a pod gets one
/// more.
pub fn mean_points(percent: f64) -> f64 {
    score::mean_points(line::headroom(percent))
}

/// The load of a node with the pod, in percent of its load line; `None` if it is unknown.
fn with_pod(pod: &PodToPlace, node: Known<'_>) -> Option<f64> {
    line::with_pod(node.load, line::share(pod, node.node)?, node.floor)
}
