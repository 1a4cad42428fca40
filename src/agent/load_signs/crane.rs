//! When crane's annotations are written. Pure.
//!
//! When a use has moved by 2 percent of the node for a minute, and when the hot value changes by a point: at once if it
//! rises. Otherwise before they expire in crane-scheduler: `*_avg_5m` after 8 minutes, the hot value after 5.

use std::time::Duration;

use fastrand::Rng;

use super::WantedCrane;
use super::schedule::{Settling, Urgency, WriteDecision};
use crate::crd::crane_annotations::{CraneAnnotations, CraneValues};
use crate::engine::time::BootTime;

/// A change of a use that counts, in percent of the node.
const MOVE: f64 = 2.0;
/// A rise of the hot value by these points may take the last write.
const URGENT_POINTS: u32 = 10;
/// They are written again after this time, and at random up to the second one later, so that the writes of all nodes spread.
/// 5000 nodes then write 5000 / 330 s = 15 times a second, and if all of them have a hot value 5000 / 255 s = 19.6 times. What
/// changes beside that comes out of the same bucket, which gains a token per 5000 / 20 s = 250 s: 20 writes a second in all.
const REFRESH: (Duration, Duration) = (Duration::from_mins(5), Duration::from_mins(1));
/// The same while the hot value is above 0. One of 0 may expire: crane-scheduler then takes it for 0.
const HOT_REFRESH: (Duration, Duration) = (Duration::from_mins(4), Duration::from_secs(30));

/// Decides about the annotations.
#[derive(Debug)]
pub(super) struct Crane {
    settling: Settling,
    /// When this agent wrote them last.
    written: Option<BootTime>,
    /// Position in the random part of the time until they are written again, from 0 to 1.
    jitter: f64,
    rng: Rng,
}

impl Crane {
    pub(super) fn new(rng: Rng) -> Self {
        Self {
            settling: Settling::default(),
            written: None,
            jitter: 0.0,
            rng,
        }
    }

    /// They were written, and so have their time again.
    pub(super) fn written(&mut self, now: BootTime) {
        self.written = Some(now);
        self.settling = Settling::default();
        self.jitter = self.rng.f64();
    }

    /// Whether another writer changed what this agent wrote.
    pub(super) fn is_contested(&self, seen: &CraneAnnotations) -> bool {
        self.written.is_some() && seen.others().next().is_some()
    }

    /// Whether to write them on a Node that has the annotations `seen`: because they differ, and because they would expire.
    pub(super) fn verdicts(
        &mut self,
        now: BootTime,
        wants: WantedCrane,
        seen: &CraneAnnotations,
    ) -> [WriteDecision; 2] {
        let differs = self.settling.verdict(now, change(wants, seen));
        let expires = match wants {
            WantedCrane::Values(values) if !values.is_empty() => self.refresh(now, &values),
            _ => WriteDecision::Unchanged,
        };
        [differs, expires]
    }

    /// When they have to be written again. What an earlier agent wrote is of unknown age.
    fn refresh(&self, now: BootTime, values: &CraneValues) -> WriteDecision {
        let is_hot = values.hot().is_some_and(|points| points > 0);
        let (after, random) = if is_hot { HOT_REFRESH } else { REFRESH };
        let after = after + random.mul_f64(self.jitter);
        let due = self.written.map(|written| written + after);
        match due.map(|due| due.since(now)) {
            None | Some(Duration::ZERO) => WriteDecision::Due { reserve: 0 },
            Some(left) => WriteDecision::Later(left),
        }
    }
}

/// How much the annotations on a Node differ from what is wanted.
fn change(wants: WantedCrane, seen: &CraneAnnotations) -> Urgency {
    let wanted = match wants {
        WantedCrane::Unchanged => return Urgency::None,
        WantedCrane::Removed if seen.ours().next().is_none() => return Urgency::None,
        WantedCrane::Removed => return Urgency::Urgent,
        WantedCrane::Values(wanted) => wanted,
    };
    let current = seen.values();
    // Not a race with a writer that answers each write with its own.
    let contested = seen.others().next().is_some();
    let hot = match (current.hot(), wanted.hot()) {
        _ if contested => Urgency::Slow,
        (current, Some(wanted)) if wanted >= current.unwrap_or(0) + URGENT_POINTS => Urgency::Full,
        (current, Some(wanted)) if wanted > current.unwrap_or(0) => Urgency::Urgent,
        (current, wanted) if current != wanted => Urgency::Slow,
        _ => Urgency::None,
    };
    if matches!(hot, Urgency::Full | Urgency::Urgent) {
        return hot;
    }
    let uses = current.usage().into_iter().zip(wanted.usage());
    let mut moves = uses.map(|uses| match uses {
        (Some(current), Some(wanted)) => (current - wanted).abs() >= MOVE,
        (current, wanted) => current.is_some() != wanted.is_some(),
    });
    if moves.any(|moves| moves) {
        Urgency::Slow
    } else {
        hot
    }
}

#[cfg(test)]
#[path = "crane_tests.rs"]
mod tests;
