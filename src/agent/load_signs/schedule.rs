//! When the label and crane's annotations are written. Pure.
//!
//! At most three writes at a time, then one per interval. The last of the three is reserved for a node that becomes full, so that it
//! is always avoided at once, and for annotations that would expire.

use std::time::Duration;

use fastrand::Rng;

use super::crane::Crane;
use super::{WantedCrane, WantedSigns, label};
use crate::cluster::token_bucket::TokenBucket;
use crate::crd::crane_annotations::CraneAnnotations;
use crate::engine::time::BootTime;

/// One write per this time, for long. On many nodes the controller asks for a longer one. At a minute, a node under changing jobs
/// was labelled full or free long after it was, and rules evicted more pods than without labels (`tests/pure/engine/placement.rs`).
pub(super) const INTERVAL: Duration = Duration::from_secs(5);
/// The same where no controller says how many nodes write.
pub const INTERVAL_ALONE: Duration = Duration::from_mins(1);
/// Writes at a time.
const BURST: u32 = 3;
/// Small differences are written after this time: at once, a burst of pods would run after each step of 5.
const SETTLE: Duration = Duration::from_secs(10);
/// An unknown load, and small differences of annotations, are written after this time.
const LONG_SETTLE: Duration = Duration::from_mins(1);

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignStep {
    /// Write these.
    Write(WrittenParts),
    /// Wait until something changes, or for this long.
    Wait(Option<Duration>),
}

/// What of a Node is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenParts {
    /// The label.
    pub label: bool,
    /// crane's annotations.
    pub crane: bool,
}

/// What is on a Node.
#[derive(Clone, Copy, Debug)]
pub struct SeenSigns<'a> {
    /// The text of the label.
    pub label: Option<&'a str>,
    /// crane's annotations.
    pub crane: &'a CraneAnnotations,
}

/// How much a difference between a Node and what is wanted matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Urgency {
    None,
    /// Written once it has lasted [`LONG_SETTLE`].
    Slow,
    /// Written once it has lasted [`SETTLE`].
    Small,
    /// Written at once, unless only the last write is left.
    Urgent,
    /// Written at once, also with the last write: the node becomes full, or its hot value jumps.
    Full,
}

/// Whether to write one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WriteDecision {
    /// Not before something changes.
    Unchanged,
    /// After this time.
    Later(Duration),
    /// As soon as the bucket holds a token more than this.
    Due { reserve: u32 },
}

impl WriteDecision {
    /// How long until it can be written; `None`: not before something changes.
    fn wait(self, now: BootTime, bucket: &TokenBucket) -> Option<Duration> {
        match self {
            Self::Unchanged => None,
            Self::Later(left) => Some(left),
            Self::Due { reserve } => Some(bucket.time_until(now, 1 + reserve)),
        }
    }

    const fn is_due(self) -> bool {
        matches!(self, Self::Due { .. })
    }
}

/// Since when a part differs.
#[derive(Debug, Default)]
pub(super) struct Settling(Option<BootTime>);

impl Settling {
    pub(super) fn verdict(&mut self, now: BootTime, change: Urgency) -> WriteDecision {
        if change == Urgency::None {
            self.0 = None;
            return WriteDecision::Unchanged;
        }
        let lasted = now.since(*self.0.get_or_insert(now));
        let settle = match change {
            Urgency::Slow => LONG_SETTLE,
            Urgency::Small => SETTLE,
            Urgency::None | Urgency::Urgent | Urgency::Full => Duration::ZERO,
        };
        let left = settle.saturating_sub(lasted);
        if !left.is_zero() {
            return WriteDecision::Later(left);
        }
        let reserve = u32::from(change != Urgency::Full);
        WriteDecision::Due { reserve }
    }
}

/// Decides the next step.
#[derive(Debug)]
pub struct SignSchedule {
    bucket: TokenBucket,
    /// The interval of the bucket.
    interval: Duration,
    label: Settling,
    crane: Crane,
}

impl SignSchedule {
    /// With all writes left; `rng` spreads those of crane's annotations.
    pub fn new(rng: Rng) -> Self {
        Self {
            bucket: TokenBucket::new(BURST, INTERVAL),
            interval: INTERVAL,
            label: Settling::default(),
            crane: Crane::new(rng),
        }
    }

    /// The next step on a Node with these signs.
    pub fn step(&mut self, now: BootTime, wants: &WantedSigns, seen: SeenSigns) -> SignStep {
        self.set_interval(wants.interval);
        let label = label::change(seen.label, wants);
        let label = self.label.verdict(now, label);
        let [differs, expires] = self.crane.verdicts(now, wants.crane, seen.crane);
        let left = [label, differs, expires].map(|it| it.wait(now, &self.bucket));
        let wait = left.into_iter().flatten().min();
        if wait != Some(Duration::ZERO) {
            return SignStep::Wait(wait);
        }
        self.bucket.try_take(now);
        SignStep::Write(WrittenParts {
            label: label.is_due(),
            // With any write, so that they need fewer of their own.
            crane: differs.is_due() || matches!(wants.crane, WantedCrane::Values(_)),
        })
    }

    /// These parts were written.
    pub fn written(&mut self, now: BootTime, parts: WrittenParts) {
        if parts.crane {
            self.crane.written(now);
        }
    }

    /// Whether another writer changed crane's annotations since this agent wrote them.
    pub fn is_contested(&self, seen: SeenSigns) -> bool {
        self.crane.is_contested(seen.crane)
    }

    fn set_interval(&mut self, interval: Duration) {
        let interval = interval.max(INTERVAL);
        if interval != self.interval {
            self.interval = interval;
            self.bucket.set_interval(interval);
        }
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
