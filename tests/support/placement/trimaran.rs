//! Trimaran's plugin `TargetLoadPacking`. Restated from kubernetes-sigs/scheduler-plugins 903da7d,
//! `pkg/trimaran/{collector,handler}.go` and `targetloadpacking/targetloadpacking.go`.
//!
//! Defaults: a target of 40 percent, means of 15 minutes that are asked for every 30 s. It packs, so the scores of requests are
//! turned off beside it, as its example configuration does. It has no Filter.

use super::node::{CPUS, Node};
use super::{Placing, Scheduler, TICK, truncated};

const TARGET: f64 = 40.0;
/// What a pod without a limit is expected to use, relative to its request.
const MULTIPLIER: f64 = 1.5;
const WINDOW: u64 = 15 * 60;
const POLL: u64 = 30;
/// Pods bound less than this before the end of the window are added.
const REPORTING: f64 = 60.0;

#[derive(Clone, Debug, Default)]
struct Known {
    percent: Option<f64>,
    /// When pods were bound, and their expected millicores.
    bound: Vec<(f64, f64)>,
}

#[derive(Debug)]
pub struct Trimaran {
    nodes: Vec<Known>,
    window_end: f64,
}

impl Trimaran {
    pub fn new(nodes: usize) -> Self {
        Self {
            nodes: vec![Known::default(); nodes],
            window_end: 0.0,
        }
    }
}

fn predicted(pod: &Placing) -> f64 {
    (pod.requests[0] as f64 * MULTIPLIER).round()
}

/// 0 to 100 for a predicted use in percent.
pub fn score(predicted: f64) -> i64 {
    if predicted > 100.0 {
        0
    } else if predicted > TARGET {
        truncated((TARGET * (100.0 - predicted) / (100.0 - TARGET)).round())
    } else {
        truncated(((100.0 - TARGET) * predicted / TARGET + TARGET).round())
    }
}

impl Scheduler for Trimaran {
    fn ticked(&mut self, now: f64, nodes: &[Node]) {
        let ticks = truncated(now).unsigned_abs() / TICK;
        if !ticks.is_multiple_of(POLL / TICK) && self.window_end > 0.0 {
            return;
        }
        self.window_end = now;
        for (node, known) in nodes.iter().zip(&mut self.nodes) {
            known.percent = node.history.mean(WINDOW).map(|used| used[0]);
            known.bound.retain(|(at, _)| now - at < REPORTING);
        }
    }

    fn bound(&mut self, now: f64, pod: &Placing, index: usize) {
        self.nodes[index].bound.push((now, predicted(pod)));
    }

    fn points(
        &mut self,
        _now: f64,
        pod: &Placing,
        feasible: &[usize],
        _nodes: &[Node],
    ) -> Vec<Option<i64>> {
        let points = feasible.iter().map(|index| {
            let known = &self.nodes[*index];
            let Some(percent) = known.percent else {
                return Some(0);
            };
            let recent = known.bound.iter();
            let recent = recent.filter(|(at, _)| self.window_end - at < REPORTING);
            let missing: f64 = recent.map(|(_, millicores)| millicores).sum();
            let more = (missing + predicted(pod)) / f64::from(CPUS) / 10.0;
            Some(score(percent + more))
        });
        points.collect()
    }
}
