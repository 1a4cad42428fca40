//! koordinator's plugin `LoadAwareScheduling` with the reports of its agents. Restated from koordinator-sh/koordinator a7a1b76
//! (v1.8.0), `pkg/scheduler/plugins/loadaware/{load_aware,pod_assign_cache}.go` and its `estimator/default_estimator.go`.
//!
//! Defaults, but for the threshold of CPU, which is the nodes' threshold instead of 65 percent. Its scores stand beside those of
//! the requests at a weight of 1, as in its scheduler's own configuration.

use std::collections::{BTreeMap, VecDeque};

use super::in_tree::base;
use super::node::{CAPACITY, Node, THRESHOLD};
use super::{Placing, Scheduler, TICK, truncated};

/// Seconds between two reports of a node, and of the means in them.
const INTERVAL: u64 = 60;
const WINDOW: f64 = 300.0;
/// What a pod is expected to use of what it requests: CPU and memory.
const FACTORS: [f64; 2] = [0.85, 0.70];
/// Percent of a node above which Filter closes it.
const THRESHOLDS: [f64; 2] = [THRESHOLD, 95.0];

/// A pod that was assigned to a node.
#[derive(Clone, Debug)]
struct Assigned {
    at: f64,
    estimate: [f64; 2],
    /// Counter of CPU at reports, in CPU seconds.
    readings: VecDeque<(f64, f64)>,
    /// Mean use in the last report: millicores and bytes.
    used: Option<[f64; 2]>,
}

#[derive(Clone, Debug, Default)]
struct Reported {
    at: f64,
    /// Millicores and bytes.
    used: Option<[f64; 2]>,
    pods: BTreeMap<usize, Assigned>,
}

#[derive(Debug)]
pub struct Koordinator {
    nodes: Vec<Reported>,
}

fn estimate(pod: &Placing) -> [f64; 2] {
    [0, 1].map(|of| (pod.requests[of] as f64 * FACTORS[of]).round())
}

impl Koordinator {
    pub fn new(nodes: usize) -> Self {
        Self {
            nodes: vec![Reported::default(); nodes],
        }
    }
}

impl Reported {
    fn report(&mut self, now: f64, node: &Node) {
        self.at = now;
        let used = node.history.mean(truncated(WINDOW).unsigned_abs());
        self.used = used.map(|percent| [0, 1].map(|of| percent[of] / 100.0 * CAPACITY[of] as f64));
        for worker in &node.sim.workers {
            let Some(pod) = self.pods.get_mut(&worker.tag) else {
                continue;
            };
            let counter = worker.used / 1e9;
            if pod.readings.is_empty() {
                // It started at a tick, some seconds after its binding.
                let tick = TICK as f64;
                let started = ((pod.at + 2.5) / tick).ceil() * tick;
                pod.readings.push_back((started, 0.0));
            }
            pod.readings.push_back((now, counter));
            while pod.readings.len() > 2 && now - pod.readings[1].0 >= WINDOW {
                pod.readings.pop_front();
            }
            let (since, before) = pod.readings[0];
            let millicores = (counter - before) / (now - since).max(1.0) * 1000.0;
            pod.used = Some([millicores, worker.memory as f64]);
        }
    }

    /// What the node is estimated to use with this pod; `None`: it has not reported.
    fn estimate(&self, with: [f64; 2]) -> Option<[f64; 2]> {
        let mut estimated = self.used?;
        for of in [0, 1] {
            estimated[of] += with[of];
        }
        for pod in self.pods.values() {
            // Not in the last report, or less than an interval before it.
            let is_recent = pod.used.is_none() || pod.at > self.at - INTERVAL as f64;
            if is_recent {
                let used = pod.used.unwrap_or_default();
                for of in [0, 1] {
                    estimated[of] += (pod.estimate[of] - used[of]).max(0.0);
                }
            }
        }
        Some(estimated)
    }

    /// 0 to 100. `None`: Filter closes the node.
    fn score(&self, pod: &Placing) -> Option<i64> {
        let Some(estimated) = self.estimate(estimate(pod)) else {
            return Some(0);
        };
        let mut sum = 0;
        for of in [0, 1] {
            let capacity = CAPACITY[of] as f64;
            let percent = estimated[of] * 100.0 / capacity;
            if percent.round() > THRESHOLDS[of] {
                return None;
            }
            sum += truncated((100.0 - percent).max(0.0));
        }
        Some(sum / 2)
    }
}

impl Scheduler for Koordinator {
    fn ticked(&mut self, now: f64, nodes: &[Node]) {
        let ticks = truncated(now).unsigned_abs() / TICK;
        let every = INTERVAL / TICK;
        for (index, (node, reported)) in nodes.iter().zip(&mut self.nodes).enumerate() {
            // Agents do not report all at once.
            if reported.used.is_none() || (ticks + index as u64).is_multiple_of(every) {
                reported.report(now, node);
            }
        }
    }

    fn bound(&mut self, now: f64, pod: &Placing, index: usize) {
        let assigned = Assigned {
            at: now,
            estimate: estimate(pod),
            readings: VecDeque::new(),
            used: None,
        };
        self.nodes[index].pods.insert(pod.id, assigned);
    }

    fn ended(&mut self, id: usize, index: usize) {
        self.nodes[index].pods.remove(&id);
    }

    fn points(
        &mut self,
        _now: f64,
        pod: &Placing,
        feasible: &[usize],
        nodes: &[Node],
    ) -> Vec<Option<i64>> {
        let points = feasible.iter().map(|index| {
            let score = self.nodes[*index].score(pod)?;
            Some(base(&nodes[*index], pod) + score)
        });
        points.collect()
    }
}
