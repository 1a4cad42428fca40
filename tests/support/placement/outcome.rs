//! What is measured.

use super::node::{Node, THRESHOLD};

/// Of one run, from the workload's `from` on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    pub placements: usize,
    /// Node-minutes whose mean CPU use is over the load line.
    pub hot_minutes: f64,
    /// The highest mean of a minute on any node, in percent of its CPUs.
    pub highest: f64,
    pub evictions: usize,
    /// Placements within 30 min of the pod's eviction by a rule.
    pub returned: usize,
    /// Of these: onto the same node, or one over its threshold while another had room.
    pub ping_pongs: usize,
    /// Minutes that pods waited for a node, all together.
    pub pending_minutes: f64,
    /// Pods that were placed on the emptied node, if there is one.
    pub on_emptied: usize,
    /// Load 5 min after placements less what was promised, in points.
    pub regrets: Vec<f64>,
    minutes: usize,
    /// Sums over minutes: of the deviation of nodes, and of their mean.
    deviations: f64,
    means: f64,
}

impl Outcome {
    /// At the end of a tick.
    pub fn observe(&mut self, nodes: &[Node]) {
        self.regrets
            .extend(nodes.iter().filter_map(|node| node.regret));
        if !nodes[0].history.is_full_minute() {
            return;
        }
        let used = nodes.iter().filter_map(|node| node.history.mean(60));
        let used: Vec<f64> = used.map(|used| used[0]).collect();
        let mean = used.iter().sum::<f64>() / used.len() as f64;
        let squares: f64 = used.iter().map(|used| (used - mean).powi(2)).sum();
        self.minutes += 1;
        self.means += mean;
        self.deviations += (squares / used.len() as f64).sqrt();
        self.hot_minutes += used.iter().filter(|used| **used > THRESHOLD).count() as f64;
        self.highest = used.iter().copied().fold(self.highest, f64::max);
    }

    /// Standard deviation of the CPU use of nodes, in percent of their CPUs, as a mean over time.
    pub fn balance(&self) -> f64 {
        self.deviations / self.minutes as f64
    }

    /// Mean CPU use of the cluster, in percent.
    pub fn mean_use(&self) -> f64 {
        self.means / self.minutes as f64
    }

    /// The regret that 95 percent of placements do not exceed.
    pub fn regret_p95(&self) -> f64 {
        let mut sorted = self.regrets.clone();
        sorted.sort_by(f64::total_cmp);
        let rank = (sorted.len() * 95).div_ceil(100);
        rank.checked_sub(1).map_or(0.0, |index| sorted[index])
    }

    pub fn regret_mean(&self) -> f64 {
        self.regrets.iter().sum::<f64>() / self.regrets.len().max(1) as f64
    }
}
