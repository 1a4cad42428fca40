//! Rules with one period are evaluated together, on a steady grid.

use std::time::Duration;

use super::sample::Sample;
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
    /// Being evaluated now.
    pub(super) due: bool,
    /// More than three periods have passed since the last evaluation: this one counts for nothing.
    pub(super) gap: bool,
}

impl Group {
    pub(super) fn new(period: Duration) -> Self {
        Self {
            period,
            next_due: None,
            last: None,
            base: Base::default(),
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
    }
}
