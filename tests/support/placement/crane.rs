//! crane-scheduler's plugin `Dynamic` with its controller's annotations. Restated from gocrane/crane-scheduler c2c0533,
//! `pkg/plugins/dynamic/{plugins,stats}.go` and `pkg/controller/annotator/`, with the periods and weights of its own
//! `deploy/manifests/dynamic/policy.yaml` and the plugin's recommended weight of 3.
//!
//! In its favour: Prometheus is exact and never late, the controller writes every annotation at its time (its client writes
//! about 5 a second), and the limits of Filter are at the nodes' threshold and 10 above, not at 65 and 75 percent.

use std::collections::VecDeque;

use super::history::Use;
use super::in_tree::base;
use super::node::{Node, THRESHOLD};
use super::{Placing, Scheduler, TICK, truncated};

const WEIGHT: i64 = 3;
/// The annotations: `avg_5m`, `max_avg_1h`, `max_avg_1d`: period in seconds, weight of CPU and memory each, and limit in percent.
const METRICS: [(u64, f64, Option<f64>); 3] = [
    (3 * 60, 0.2, Some(THRESHOLD)),
    (15 * 60, 0.3, Some(THRESHOLD + 10.0)),
    (3 * 3600, 0.5, None),
];
/// Bindings in so many seconds that make a point of ten.
const HOT: [(f64, usize); 2] = [(300.0, 5), (60.0, 2)];
/// The hot value expires after this many seconds.
const HOT_LIFETIME: f64 = 300.0;

#[derive(Clone, Debug, Default)]
struct Annotations {
    uses: [Option<Use>; 3],
    /// The value, and when it was written.
    hot: Option<(usize, f64)>,
    bindings: VecDeque<f64>,
}

#[derive(Debug)]
pub struct Crane {
    nodes: Vec<Annotations>,
}

impl Crane {
    pub fn new(nodes: usize) -> Self {
        Self {
            nodes: vec![Annotations::default(); nodes],
        }
    }
}

impl Annotations {
    fn write(&mut self, metric: usize, node: &Node, now: f64) {
        self.uses[metric] = match metric {
            0 => node.history.last_minute(),
            1 => node.history.max_mean(60),
            _ => node.history.max_mean(24 * 60),
        };
        while self.bindings.front().is_some_and(|at| now - at > HOT[0].0) {
            self.bindings.pop_front();
        }
        let within = |seconds: f64| self.bindings.iter().filter(move |at| now - **at <= seconds);
        let hot = HOT
            .iter()
            .map(|(seconds, count)| within(*seconds).count() / count);
        self.hot = Some((hot.sum(), now));
    }

    /// 0 to 100; what is not known counts as full. `None`: Filter closes the node.
    fn score(&self, now: f64) -> Option<i64> {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (used, (_, weight, limit)) in self.uses.iter().zip(METRICS) {
            weights += 2.0 * weight;
            let Some(used) = used else { continue };
            let over = |limit: f64| used.iter().any(|percent| *percent > limit);
            if limit.is_some_and(over) {
                return None;
            }
            sum += used
                .iter()
                .map(|percent| (100.0 - percent) * weight)
                .sum::<f64>();
        }
        let hot = self.hot.filter(|(_, at)| now - at < HOT_LIFETIME);
        let hot = hot.map_or(0, |(points, _)| i64::try_from(points).unwrap());
        Some((truncated(sum / weights) - 10 * hot).clamp(0, 100))
    }
}

impl Scheduler for Crane {
    fn ticked(&mut self, now: f64, nodes: &[Node]) {
        let ticks = truncated(now).unsigned_abs() / TICK;
        for (node, found) in nodes.iter().zip(&mut self.nodes) {
            for (metric, (period, _, _)) in METRICS.iter().enumerate() {
                // The first at once, as when its controller starts.
                let first = found.uses[metric].is_none();
                if first || ticks.is_multiple_of(period / TICK) {
                    found.write(metric, node, now);
                }
            }
        }
    }

    fn bound(&mut self, now: f64, _pod: &Placing, index: usize) {
        self.nodes[index].bindings.push_back(now);
    }

    fn points(
        &mut self,
        now: f64,
        pod: &Placing,
        feasible: &[usize],
        nodes: &[Node],
    ) -> Vec<Option<i64>> {
        let points = feasible.iter().map(|index| {
            let score = self.nodes[*index].score(now)?;
            Some(base(&nodes[*index], pod) + WEIGHT * score)
        });
        points.collect()
    }
}
