//! The load of a node with the pod, in percent of its load line. Pure.

use super::in_flight::Shares;
use super::wire::PodToPlace;
use crate::crd::load_label::BUSY_FROM;
use crate::crd::node_metric::{Load, ResourceLoad};
use crate::metrics_api::loads::KnownLoad;

/// Why Filter rejects a node. The same for all nodes: the pod's events count nodes by reason.
pub const REASON: &str = "its load with the pod would reach its load line";

/// What the pod would use of the node, in percent of it; `None` if the node's capacity is unknown.
pub fn share(pod: &PodToPlace, node: &KnownLoad) -> Option<Shares> {
    let share = |amount: f64, capacity: u64| {
        let share = amount / capacity as f64 * 100.0;
        share.is_finite().then_some(share)
    };
    Some([
        share(pod.cpu, node.cpu.0)?,
        share(pod.memory, node.memory.0)?,
    ])
}

/// What counts as used, in percent of the node.
pub fn used(load: &Load) -> Shares {
    let used = |of: &ResourceLoad| of.expected.max(of.history.unwrap_or_default());
    [used(&load.cpu), used(&load.memory)]
}

/// The load with this share more, while the node has at least `floor`, in percent of the load line. `None` if it is not finite.
pub fn with_pod(load: &Load, share: Shares, floor: Option<Shares>) -> Option<f64> {
    let used = used(load);
    let floor = floor.unwrap_or(used);
    let after =
        |index: usize, line: f64| (used[index].max(floor[index]) + share[index]) / line * 100.0;
    let (cpu, memory) = (after(0, load.cpu.line), after(1, load.memory.line));
    let finite = cpu.is_finite() && memory.is_finite() && load.percent.is_finite();
    finite.then(|| load.percent.max(cpu).max(memory))
}

/// The headroom at a load: 1 at 0; 0 where the node is busy. Busy nodes are all alike.
pub fn headroom(percent: f64) -> f64 {
    ((BUSY_FROM - percent) / BUSY_FROM).clamp(0.0, 1.0)
}
