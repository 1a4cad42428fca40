//! The node's usage over longer windows, in fixed memory: averages, percentiles and lasting peaks.
//!
//! ```text
//! samples ─► 3 s means ─► ring of 1 h ─► avg, p50, p90, p95, p99, max of 5 min, 30 min, 1 h
//!                             │
//!                             └─ sliding 5 min average ─► maxima by minute (1 h), by 5 minutes (1 d)
//! ```
//! Time is divided into slots of 3 s, and a slot is the mean over the part of it that samples cover. A slot that is less
//! than half covered is a gap: it is not counted, and [`Window::coverage`] is the share of a window that is not gaps. Below
//! half coverage a window has no value (like Koordinator's `validateTimeRangeRatio`).
//!
//! - Averages are running sums of integers, so they do not drift.
//! - Percentiles are by nearest rank over the slots.
//! - A peak is the highest average of *any* 5 minutes, updated with each slot: with fixed blocks of 5 minutes, a burst
//!   across two blocks would count half. Maxima are stored per minute and per 5 minutes, so a peak stays up to that much
//!   longer than the window, but is never missed within it.
//!
//! One [`Series`] takes 3.6 KiB and a node has two; adding a sample is O(1) and does not allocate.

mod node;
mod peaks;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::node::NodeWindows;
use self::peaks::{MISSING, Peaks};
use super::time::BootTime;

/// The length of a slot.
pub const SLOT: Duration = Duration::from_secs(3);
/// Samples further apart than this leave a gap.
pub const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// A window with less coverage than this has no value.
pub const MIN_COVERAGE: f64 = 0.5;

const SLOT_NANOS: u64 = SLOT.as_secs() * 1_000_000_000;
/// Slots of an hour: the longest window with percentiles.
const SLOTS: usize = 1200;
const SLOTS_PER_MINUTE: u8 = 20;
const SLOTS_PER_FIVE_MINUTES: u8 = 100;
/// Buckets of an hour.
const MINUTES: usize = 60;
/// Buckets of a day.
const FIVE_MINUTES: usize = 288;
/// Values are stored in units of 1/500 percent: 0 to 131 %, with an error of at most 0.001 %.
const UNITS_PER_PERCENT: f64 = 500.0;

/// A window with averages and percentiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// 5 minutes.
    FiveMinutes = 0,
    /// 30 minutes.
    HalfHour = 1,
    /// 1 hour.
    Hour = 2,
}

impl Span {
    /// All of them, the shortest first.
    pub const ALL: [Self; 3] = [Self::FiveMinutes, Self::HalfHour, Self::Hour];

    const fn slots(self) -> usize {
        match self {
            Self::FiveMinutes => 100,
            Self::HalfHour => 600,
            Self::Hour => SLOTS,
        }
    }
}

/// A window with a highest 5-minute average.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeakSpan {
    /// 1 hour.
    Hour,
    /// 1 day.
    Day,
}

/// A value over a window.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Window<T> {
    /// The share of the window that has samples, 0 to 1.
    pub coverage: f64,
    /// `None` if the coverage is less than half.
    pub value: Option<T>,
}

impl<T> Window<T> {
    fn of(coverage: f64, value: impl FnOnce() -> Option<T>) -> Self {
        let enough = coverage >= MIN_COVERAGE;
        Self {
            coverage,
            value: enough.then(value).flatten(),
        }
    }
}

/// The distribution of the values of a window, in percent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Mean over the covered time.
    pub average: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 95th percentile.
    pub p95: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Highest slot.
    pub max: f64,
}

/// One quantity in percent, over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Series {
    /// The closed slots of the last hour; slot `n` is at index `n % SLOTS`.
    slots: Box<[u16]>,
    /// Running sums of each [`Span`].
    #[serde(skip)]
    sums: [Sum; 3],
    open: Open,
    hour: Peaks,
    day: Peaks,
}

/// The current slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Open {
    slot: u64,
    /// Nanoseconds since boot up to which samples were added.
    until: u64,
    /// Percent times nanoseconds.
    area: f64,
    /// Nanoseconds.
    covered: u64,
}

/// Sum over the slots that are not gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    total: u32,
    count: u32,
}

impl Default for Series {
    fn default() -> Self {
        Self {
            slots: vec![MISSING; SLOTS].into(),
            sums: [Sum::default(); 3],
            open: Open::default(),
            hour: Peaks::new(MINUTES, SLOTS_PER_MINUTE),
            day: Peaks::new(FIVE_MINUTES, SLOTS_PER_FIVE_MINUTES),
        }
    }
}

impl Series {
    /// Recomputes the sums of a deserialized series. Returns `false` if the series is invalid and must not be used.
    #[must_use]
    fn resume(&mut self) -> bool {
        let valid = self.slots.len() == SLOTS
            && self
                .hour
                .is_valid(MINUTES, SLOTS_PER_MINUTE, self.open.slot)
            && self
                .day
                .is_valid(FIVE_MINUTES, SLOTS_PER_FIVE_MINUTES, self.open.slot)
            && self.open.slot == self.open.until / SLOT_NANOS
            && self.open.covered <= SLOT_NANOS
            && self.open.area.is_finite();
        if valid {
            for span in Span::ALL {
                let sum = &mut self.sums[span as usize];
                *sum = Sum::default();
                let last = (1..=span.slots()).map(|back| ring_index(self.open.slot, back));
                last.for_each(|index| sum.add(self.slots[index]));
            }
        }
        valid
    }

    /// Adds an average of `percent` from `from` to `to`. An interval that is longer than [`MAX_INTERVAL`] or has no finite
    /// value is a gap; a part that was already added is not counted again.
    pub fn add(&mut self, from: BootTime, to: BootTime, percent: f64) {
        if percent.is_finite() && to.since(from) <= MAX_INTERVAL {
            self.reset_if_clock_went_back(to);
            let mut at = from.as_nanos().max(self.open.until);
            while at < to.as_nanos() {
                self.roll(at / SLOT_NANOS);
                let slot_end = (self.open.slot + 1).saturating_mul(SLOT_NANOS);
                let end = to.as_nanos().min(slot_end);
                self.open.area += percent * (end - at) as f64;
                self.open.covered += end - at;
                at = end;
            }
        }
        self.advance(to);
    }

    /// Advances the time; what no sample covered is a gap.
    pub fn advance(&mut self, now: BootTime) {
        self.reset_if_clock_went_back(now);
        self.roll(now.as_nanos() / SLOT_NANOS);
        self.open.until = now.as_nanos();
    }

    /// Resets the series if the clock went back.
    fn reset_if_clock_went_back(&mut self, now: BootTime) {
        if now.as_nanos() < self.open.until {
            self.clear();
            self.open = Open::default();
            self.hour.clear();
            self.day.clear();
        }
    }

    fn clear(&mut self) {
        self.slots.fill(MISSING);
        self.sums = [Sum::default(); 3];
    }

    /// Closes the slots before `slot`.
    fn roll(&mut self, slot: u64) {
        if slot <= self.open.slot {
            return;
        }
        self.close_slot(self.open.value());
        if slot - self.open.slot >= SLOTS as u64 {
            self.clear();
            self.hour.roll(slot);
            self.day.roll(slot);
            self.open.slot = slot;
        }
        while self.open.slot < slot {
            self.close_slot(MISSING);
        }
    }

    /// Closes the open slot.
    fn close_slot(&mut self, value: u16) {
        let slot = self.open.slot;
        for span in Span::ALL {
            let expired = self.slots[ring_index(slot, span.slots())];
            let sum = &mut self.sums[span as usize];
            sum.remove(expired);
            sum.add(value);
        }
        self.slots[ring_index(slot, 0)] = value;
        let known = value != MISSING;
        let average = self.rounded_average();
        self.hour.add(slot, average, known);
        self.day.add(slot, average, known);
        self.open = Open {
            slot: slot + 1,
            until: self.open.until,
            ..Open::default()
        };
    }

    /// The average of the last 5 minutes; a gap if the coverage is too low.
    fn rounded_average(&self) -> u16 {
        let Sum { total, count } = self.sums[Span::FiveMinutes as usize];
        if self.coverage(Span::FiveMinutes) < MIN_COVERAGE {
            return MISSING;
        }
        let rounded = (total + count / 2) / count.max(1);
        u16::try_from(rounded).unwrap_or(MISSING)
    }

    fn coverage(&self, span: Span) -> f64 {
        f64::from(self.sums[span as usize].count) / span.slots() as f64
    }

    /// The average of the last slots, in percent. O(1).
    pub fn average(&self, span: Span) -> Window<f64> {
        let sum = self.sums[span as usize];
        Window::of(self.coverage(span), || sum.average())
    }

    /// The average and percentiles of the last slots. Sorts them, so use it for reports and not for each sample.
    pub fn spread(&self, span: Span) -> Window<Spread> {
        Window::of(self.coverage(span), || {
            let mut buffer = [0; SLOTS];
            let mut count = 0;
            let last = (1..=span.slots()).map(|back| self.slots[ring_index(self.open.slot, back)]);
            for value in last.filter(|value| *value != MISSING) {
                buffer[count] = value;
                count += 1;
            }
            let values = &mut buffer[..count];
            values.sort_unstable();
            Some(Spread {
                average: self.sums[span as usize].average()?,
                p50: percentile(values, 50)?,
                p90: percentile(values, 90)?,
                p95: percentile(values, 95)?,
                p99: percentile(values, 99)?,
                max: percentile(values, 100)?,
            })
        })
    }

    /// The highest average of any 5 minutes that ended within the window, in percent.
    pub fn peak(&self, span: PeakSpan) -> Window<f64> {
        let peaks = match span {
            PeakSpan::Hour => &self.hour,
            PeakSpan::Day => &self.day,
        };
        Window::of(peaks.coverage(), || peaks.highest().map(percent))
    }
}

impl Open {
    fn value(&self) -> u16 {
        if self.covered * 2 < SLOT_NANOS {
            return MISSING;
        }
        units(self.area / self.covered as f64)
    }
}

impl Sum {
    fn add(&mut self, value: u16) {
        if value != MISSING {
            self.total += u32::from(value);
            self.count += 1;
        }
    }

    fn remove(&mut self, value: u16) {
        if value != MISSING {
            self.total -= u32::from(value);
            self.count -= 1;
        }
    }

    fn average(self) -> Option<f64> {
        let mean = f64::from(self.total) / f64::from(self.count);
        (self.count > 0).then_some(mean / UNITS_PER_PERCENT)
    }
}

/// The index of the slot that is `back` before `slot`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "less than the number of slots"
)]
const fn ring_index(slot: u64, back: usize) -> usize {
    ((slot + (SLOTS - back) as u64) % SLOTS as u64) as usize
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and the largest value that is not a gap"
)]
fn units(percent: f64) -> u16 {
    let max = f64::from(MISSING - 1);
    (percent * UNITS_PER_PERCENT).round().clamp(0.0, max) as u16
}

fn percent(units: u16) -> f64 {
    f64::from(units) / UNITS_PER_PERCENT
}

/// Nearest-rank percentile of sorted values.
fn percentile(sorted: &[u16], hundredths: usize) -> Option<f64> {
    let rank = (sorted.len() * hundredths).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied().map(percent)
}
