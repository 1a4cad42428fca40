//! A write that is under way, or failed and waits. Pure.

use std::time::Duration;

use crate::cluster::backoff::jittered;
use crate::crd::node_watermark::Hash;
use crate::engine::time::BootTime;

/// A failed write is tried again after this, doubled at each failure...
const RETRY: Duration = Duration::from_secs(1);
/// ...up to this.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// A write that is under way, or failed and waits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attempt {
    running: bool,
    failures: u32,
    not_before: Option<BootTime>,
    /// The hash that was asked for, if it is about a hash.
    pub asked: Option<Hash>,
}

impl Attempt {
    /// Whether it may begin.
    pub fn is_due(&self, now: BootTime) -> bool {
        !self.running && self.not_before.is_none_or(|at| now >= at)
    }

    /// It is under way, or failed and is to be tried again.
    pub const fn is_begun(&self) -> bool {
        self.running || self.failures > 0
    }

    /// It begins.
    pub const fn begin(&mut self) {
        self.running = true;
    }

    /// It failed.
    pub fn failed(&mut self, now: BootTime) {
        self.running = false;
        self.not_before = Some(now + pause(self.failures));
        self.failures = self.failures.saturating_add(1);
    }

    /// It waits at least for so long.
    pub fn wait(&mut self, until: BootTime) {
        self.not_before = self.not_before.max(Some(until));
    }
}

/// How long to wait after this many failures before: with jitter, as what fails at once for many nodes is not to be tried
/// for all of them at once.
pub fn pause(failures: u32) -> Duration {
    let pause = RETRY.saturating_mul(1 << failures.min(10));
    jittered(pause.min(LONGEST_RETRY))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn writes_that_failed_together_are_not_tried_again_together() {
        for (failures, least) in [(0, 1), (3, 8), (10, 60)] {
            let least = Duration::from_secs(least);
            let pauses: BTreeSet<Duration> = (0..100).map(|_| pause(failures)).collect();
            assert!(pauses.len() > 50, "{pauses:?}");
            assert!(pauses.iter().all(|it| (least..=least * 5 / 4).contains(it)));
        }
    }
}
