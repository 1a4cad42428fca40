//! What kube-scheduler scores by default, of what differs here: the requests. Restated from kubernetes
//! `pkg/scheduler/framework/plugins/noderesources/{least_allocated,balanced_allocation}.go` (02d7708).
//!
//! Left out, for all schedulers alike: taints, spreading of a Service's pods, images, affinity of pods. No pod here has any.

use fastrand::Rng;

use super::node::{CAPACITY, Node};
use super::{Amounts, Placing, Scheduler, truncated};

/// `NodeResourcesFit` with `LeastAllocated`, 0 to 100: the mean of what is not requested of CPU and memory, with the pod.
pub fn least_allocated(requested: Amounts, capacity: Amounts) -> i64 {
    let free = |of: usize| match capacity[of].checked_sub(requested[of]) {
        Some(free) => free * 100 / capacity[of],
        None => 0,
    };
    i64::try_from(u64::midpoint(free(0), free(1))).unwrap()
}

/// `NodeResourcesBalancedAllocation`, 0 to 100: how near the requested shares of CPU and memory are to each other, with the pod.
pub fn balanced_allocation(requested: Amounts, capacity: Amounts) -> i64 {
    let share = |of: usize| (requested[of] as f64 / capacity[of] as f64).min(1.0);
    let deviation = ((share(0) - share(1)) / 2.0).abs();
    truncated((1.0 - deviation) * 100.0)
}

/// Both, at their weights of 1.
pub fn by_requests(requested: Amounts, pod: Amounts, capacity: Amounts) -> i64 {
    let with_pod = [requested[0] + pod[0], requested[1] + pod[1]];
    least_allocated(with_pod, capacity) + balanced_allocation(with_pod, capacity)
}

/// [`by_requests`] on a node of the simulation.
pub fn base(node: &Node, pod: &Placing) -> i64 {
    by_requests(node.requested, pod.requests, CAPACITY)
}

/// Whether the pod fits by its requests (`NodeResourcesFit`).
pub fn fits(requested: Amounts, pod: Amounts, capacity: Amounts) -> bool {
    (0..2).all(|of| requested[of] + pod[of] <= capacity[of])
}

/// `DefaultNormalizeScore`: the best of the candidates has 100.
pub fn normalized(scores: &[i64]) -> Vec<i64> {
    match scores.iter().copied().max() {
        None | Some(0) => scores.to_vec(),
        Some(highest) => scores.iter().map(|score| score * 100 / highest).collect(),
    }
}

/// The place of the highest points; one of several at random (`selectHost`). `None`: a filter closed all.
pub fn select(points: &[Option<i64>], random: &mut Rng) -> Option<usize> {
    let highest = points.iter().flatten().copied().max()?;
    let best = points.iter().enumerate();
    let best: Vec<usize> = best
        .filter(|(_, points)| **points == Some(highest))
        .map(|(place, _)| place)
        .collect();
    Some(best[random.usize(..best.len())])
}

/// kube-scheduler with its default profile.
#[derive(Debug)]
pub struct KubeScheduler;

impl Scheduler for KubeScheduler {
    fn points(
        &mut self,
        _now: f64,
        pod: &Placing,
        feasible: &[usize],
        nodes: &[Node],
    ) -> Vec<Option<i64>> {
        let points = feasible.iter().map(|index| Some(base(&nodes[*index], pod)));
        points.collect()
    }
}
