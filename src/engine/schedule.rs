//! All rules of a node are evaluated together, at fixed times.

use std::time::Duration;

use super::ladder::next_due_after;
use super::sample::{NodeSample, Sample};
use super::time::BootTime;
use super::values::{Baseline, GAP_PERIODS};

/// The time between two evaluations, unless the node is given another.
pub const DEFAULT_PERIOD: Duration = Duration::from_secs(10);

/// When the rules are evaluated, and what was sampled since.
#[derive(Debug)]
pub(super) struct Schedule {
    pub(super) period: Duration,
    /// `None` before the first evaluation, which is due immediately.
    pub(super) next_due: Option<BootTime>,
    last: Option<BootTime>,
    pub(super) baseline: Baseline,
    /// Statistics of the samples since the last evaluation.
    pub(super) stats: IntervalStats,
    /// The rules are due in the current step, which may also be only for what is restored.
    pub(super) due: bool,
    /// More than three periods have passed since the last evaluation, so this one is not counted.
    pub(super) gap: bool,
}

/// Statistics of the samples between two evaluations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IntervalStats {
    tasks: u64,
    samples: u32,
}

impl IntervalStats {
    /// Adds a sample of the node.
    pub(super) fn add(&mut self, node: &NodeSample) {
        if let Some(tasks) = node.tasks {
            self.tasks = self.tasks.saturating_add(tasks);
            self.samples += 1;
        }
    }

    /// The mean number of tasks that were running, runnable or waiting for I/O.
    pub(super) fn tasks(&self) -> Option<f64> {
        let samples = f64::from(self.samples);
        (self.samples > 0).then(|| self.tasks as f64 / samples)
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            period: DEFAULT_PERIOD,
            next_due: None,
            last: None,
            baseline: Baseline::default(),
            stats: IntervalStats::default(),
            due: false,
            gap: false,
        }
    }
}

impl Schedule {
    /// Continues after another process that evaluated last at about `last`.
    pub(super) const fn resume(&mut self, last: Option<BootTime>) {
        self.last = last;
    }

    /// Forgets when rules were evaluated: there are none, and the next one is evaluated immediately.
    pub(super) fn reset(&mut self) {
        *self = Self {
            period: self.period,
            ..Self::default()
        };
    }

    /// Starts a step; the rules, if there are any, may be due in it.
    pub(super) fn start(&mut self, now: BootTime, has_rules: bool) {
        let max_interval = self.period.saturating_mul(GAP_PERIODS);
        self.due = has_rules && self.next_due.is_none_or(|due| due <= now);
        self.gap = self.due && self.last.is_some_and(|last| now.since(last) > max_interval);
    }

    /// Finishes the evaluation; the sample becomes the baseline of the next one.
    pub(super) fn finish(&mut self, now: BootTime, sample: &Sample) {
        let anchor = self.next_due.filter(|_| !self.gap).unwrap_or(now);
        self.next_due = Some(next_due_after(anchor, self.period, now));
        self.last = Some(now);
        self.baseline.store(sample);
        self.stats = IntervalStats::default();
    }
}
