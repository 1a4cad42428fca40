//! The node's lasting peaks of the last hour and day, without the share of pods that have ended since.
//!
//! ```text
//! history = max(0.9 x highest 5-minute average of the last hour, 0.8 x that of the last day)
//! ```
//! The two weights and windows are those of crane-scheduler's default policy: recent load is likely to return.
//! But what a pod used that has ended will not. So for each bucket of time the highest average is stored, and with it the
//! part that each pod had in it; when a pod ends, its part is taken off. A bucket is 5 minutes or 2 hours long, so that a
//! peak counts up to that much longer than an hour or a day, but no longer than in [`NodeWindows`].

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::metric::Resource;
use crate::engine::time::BootTime;
use crate::engine::window::{NodeWindows, PeakSpan};

/// An hour or a day in 12 buckets, and one more, so that all of it is covered.
const BUCKETS: usize = 13;
/// Values are stored in units of 1/500 percent: 0 to 131 %, with an error of at most 0.001 %.
const UNITS_PER_PERCENT: f64 = 500.0;
/// No average is known.
const MISSING: u16 = u16::MAX;

/// Part of the highest 5-minute average of the last hour that counts as used.
pub const HOUR_WEIGHT: f64 = 0.9;
/// The same of the last day.
pub const DAY_WEIGHT: f64 = 0.8;
/// Each window: its span, the length of its buckets, and its weight.
const SPANS: [(PeakSpan, Duration, f64); 2] = [
    (PeakSpan::Hour, Duration::from_mins(5), HOUR_WEIGHT),
    (PeakSpan::Day, Duration::from_hours(2), DAY_WEIGHT),
];
pub(super) const RESOURCES: [Resource; 2] = [Resource::Cpu, Resource::Memory];

/// By span, resource and bucket.
type Table = [[[u16; BUCKETS]; 2]; 2];

/// The part that one pod had in each of the peaks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PodShares(Table);

impl Default for PodShares {
    fn default() -> Self {
        Self([[[0; BUCKETS]; 2]; 2])
    }
}

/// The highest averages of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Peaks {
    /// The current bucket of each span. Bucket `n` is at index `n % BUCKETS`.
    buckets: [u64; 2],
    highest: Table,
}

impl Default for Peaks {
    fn default() -> Self {
        Self {
            buckets: [0; 2],
            highest: [[[MISSING; BUCKETS]; 2]; 2],
        }
    }
}

impl Peaks {
    /// Starts with the peaks that the node's windows know, as after a restart without this state. Which pods had a part in
    /// them is not known, so nothing is taken off.
    pub(super) fn seed(&mut self, now: BootTime, windows: &NodeWindows) {
        self.advance(now, std::iter::empty());
        for (span, (peak, _, _)) in SPANS.into_iter().enumerate() {
            for resource in RESOURCES {
                if let Some(value) = windows.of(resource).peak(peak).value {
                    let highest = &mut self.highest[span][resource as usize];
                    highest[index(self.buckets[span])] = units(value);
                }
            }
        }
    }

    /// Whether nothing is known.
    pub(super) fn is_empty(&self) -> bool {
        let mut all = self.highest.iter().flatten().flatten();
        all.all(|value| *value == MISSING)
    }

    /// Moves on to the buckets of `now`.
    pub(super) fn advance<'a>(
        &mut self,
        now: BootTime,
        pods: impl Iterator<Item = &'a mut PodShares>,
    ) {
        let mut cleared = [[false; BUCKETS]; 2];
        for (span, (_, length, _)) in SPANS.into_iter().enumerate() {
            let bucket = now.since(BootTime::default()).as_secs() / length.as_secs();
            // A clock that went back makes all of them new.
            let steps = bucket.checked_sub(self.buckets[span]).unwrap_or(u64::MAX);
            for step in 0..steps.min(BUCKETS as u64) {
                cleared[span][index(bucket.saturating_sub(step))] = true;
            }
            self.buckets[span] = bucket;
        }
        if cleared.iter().flatten().any(|it| *it) {
            clear(&mut self.highest, &cleared, MISSING);
            pods.for_each(|parts| clear(&mut parts.0, &cleared, 0));
        }
    }

    /// Records the node's average of the last 5 minutes, in percent, without the share of pods that have ended; and the part
    /// of each pod in it.
    pub(super) fn record<'a>(
        &mut self,
        resource: Resource,
        percent: f64,
        pods: impl Iterator<Item = (&'a mut PodShares, f64)>,
    ) {
        let value = units(percent);
        let of = resource as usize;
        let slots = self.buckets.map(index);
        let higher = [0, 1].map(|span| {
            let highest = &mut self.highest[span][of][slots[span]];
            let higher = *highest == MISSING || value > *highest;
            if higher {
                *highest = value;
            }
            higher
        });
        if higher == [false; 2] {
            return;
        }
        for (parts, percent) in pods {
            let part = units(percent);
            for span in [0, 1] {
                if higher[span] {
                    parts.0[span][of][slots[span]] = part;
                }
            }
        }
    }

    /// Takes off the part of a pod that has ended.
    pub(super) fn end(&mut self, parts: &PodShares) {
        let peaks = self.highest.iter_mut().flatten().flatten();
        for (peak, part) in peaks.zip(parts.0.iter().flatten().flatten()) {
            if *peak != MISSING {
                *peak = peak.saturating_sub(*part);
            }
        }
    }

    /// The history of a resource, in percent of the node; `None` if nothing is known yet.
    pub(super) fn history(&self, resource: Resource, windows: &NodeWindows) -> Option<f64> {
        let weighted = SPANS
            .iter()
            .enumerate()
            .filter_map(|(span, (peak, _, weight))| {
                let known = self.highest[span][resource as usize].iter();
                let highest = known.copied().filter(|value| *value != MISSING).max()?;
                let highest = f64::from(highest) / UNITS_PER_PERCENT;
                let windowed = windows.of(resource).peak(*peak).value;
                Some(weight * windowed.map_or(highest, |windowed| highest.min(windowed)))
            });
        weighted.reduce(f64::max)
    }
}

fn clear(table: &mut Table, cleared: &[[bool; BUCKETS]; 2], with: u16) {
    for (span, cleared) in table.iter_mut().zip(cleared) {
        for buckets in span {
            for (value, cleared) in buckets.iter_mut().zip(cleared) {
                if *cleared {
                    *value = with;
                }
            }
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "less than the number of buckets"
)]
const fn index(bucket: u64) -> usize {
    (bucket % BUCKETS as u64) as usize
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and the largest value that is not missing"
)]
fn units(percent: f64) -> u16 {
    (percent * UNITS_PER_PERCENT)
        .round()
        .clamp(0.0, f64::from(MISSING - 1)) as u16
}
