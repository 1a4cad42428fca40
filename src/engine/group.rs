//! Rules with one period are evaluated together, on a steady grid.

use std::time::Duration;

use super::sample::{NodeSample, Sample};
use super::throttle::following;
use super::time::BootTime;
use super::values::{Base, GAP_PERIODS};

/// The rules of one period.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) period: Duration,
    /// `None` before the first evaluation: at once.
    pub(super) next_due: Option<BootTime>,
    last: Option<BootTime>,
    pub(super) base: Base,
    /// What the samples since the last evaluation say together.
    pub(super) between: Between,
    /// Being evaluated now.
    pub(super) due: bool,
    /// More than three periods have passed since the last evaluation: this one counts for nothing.
    pub(super) gap: bool,
}

/// Figures of the samples between two evaluations.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Between {
    tasks: u64,
    samples: u32,
    /// Percent of the CPUs, in the busiest of the samples.
    pub(super) busiest: Option<f64>,
}

impl Between {
    /// Takes in a sample of the node, and what share of its CPUs was busy since the sample before.
    pub(super) fn take(&mut self, node: &NodeSample, busy: Option<f64>) {
        if let Some(tasks) = node.tasks {
            self.tasks = self.tasks.saturating_add(tasks);
            self.samples += 1;
        }
        self.busiest = match (self.busiest, busy) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        };
    }

    /// The mean of the tasks that ran, could run or waited for I/O.
    pub(super) fn tasks(&self) -> Option<f64> {
        let samples = f64::from(self.samples);
        (self.samples > 0).then(|| self.tasks as f64 / samples)
    }
}

impl Group {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            period,
            next_due: None,
            last: None,
            base: Base::default(),
            between: Between::default(),
            due: false,
            gap: false,
        }
    }

    /// Begins an evaluation, if one is due.
    pub(super) fn begin(&mut self, now: BootTime) {
        let most = self.period.saturating_mul(GAP_PERIODS);
        self.due = self.next_due.is_none_or(|due| due <= now);
        self.gap = self.due && self.last.is_some_and(|last| now.since(last) > most);
    }

    /// Ends the evaluation: the sample is the base of the next.
    pub(super) fn end(&mut self, now: BootTime, sample: &Sample) {
        let anchor = self.next_due.filter(|_| !self.gap).unwrap_or(now);
        self.next_due = Some(following(anchor, self.period, now));
        self.last = Some(now);
        self.base.keep(sample);
        self.between = Between::default();
    }
}
