//! Retry state of a write. Pure.

use std::time::Duration;

use crate::cluster::backoff::{exponential, jittered};
use crate::crd::node_watermark::Hash;
use crate::engine::time::BootTime;

/// Delay before the first retry, doubled after each further failure.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(1);
/// The longest delay before a retry.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);

/// A write that is in progress, or failed and waits for its retry.
#[derive(Clone, Copy, Debug, Default)]
pub struct Attempt {
    running: bool,
    failures: u32,
    not_before: Option<BootTime>,
    /// The hash of the spec that is being written.
    pub hash: Option<Hash>,
}

impl Attempt {
    /// Whether it may start.
    pub fn is_due(&self, now: BootTime) -> bool {
        !self.running && self.not_before.is_none_or(|at| now >= at)
    }

    /// It is in progress or waits for a retry.
    pub const fn is_started(&self) -> bool {
        self.running || self.failures > 0
    }

    /// It starts.
    pub const fn start(&mut self) {
        self.running = true;
    }

    /// It failed.
    pub fn failed(&mut self, now: BootTime) {
        self.running = false;
        self.not_before = Some(now + retry_delay(self.failures));
        self.failures = self.failures.saturating_add(1);
    }

    /// Delays it until then at least.
    pub fn wait(&mut self, until: BootTime) {
        self.not_before = self.not_before.max(Some(until));
    }
}

/// The delay after `failures` earlier failures. With jitter, so that writes that failed together are not retried together.
pub fn retry_delay(failures: u32) -> Duration {
    jittered(exponential(MIN_RETRY_DELAY, MAX_RETRY_DELAY, failures))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn retries_after_a_common_failure_are_spread() {
        for (failures, min) in [(0, 1), (3, 8), (10, 60)] {
            let min = Duration::from_secs(min);
            let pauses: BTreeSet<Duration> = (0..100).map(|_| retry_delay(failures)).collect();
            assert!(pauses.len() > 50, "{pauses:?}");
            assert!(pauses.iter().all(|it| (min..=min * 5 / 4).contains(it)));
        }
    }
}
