//! A quantity over longer windows, in fixed memory: averages, deviations, percentiles and lasting peaks.
//!
//! ```text
//! samples ─► 3 s means ─┬─► ring of 1 h ─► avg, stddev, percentiles of 1 min, 5 min, 30 min, 1 h
//!                       ├─► means of minutes (1 d) ─► avg, stddev, percentiles of a day
//!                       └─► sliding 5 min average ─► maxima by minute (1 h), by 5 minutes (1 d)
//! ```
//! Time is divided into slots of 3 s, and a slot is the mean over the part of it that samples cover. A slot that is less
//! than half covered is a gap: it is not counted, and [`Window::coverage`] is the share of a window that is not gaps. Below
//! half coverage a window has no value (like Koordinator's `validateTimeRangeRatio`).
//!
//! - Averages up to an hour are running sums of integers, so they do not drift. The average of a day is exact, too, over up
//!   to a minute more than a day.
//! - Deviations and percentiles (by nearest rank) are computed from the slots when they are read: a value may have any
//!   magnitude, so squares would not fit into an integer, and a running sum of floats would drift. Those of a day are over
//!   means of minutes, so they miss what changes within a minute.
//! - A peak is the highest average of *any* 5 minutes, updated with each slot: with fixed blocks of 5 minutes, a burst
//!   across two blocks would count half. Maxima are stored per minute and per 5 minutes, so a peak stays up to that much
//!   longer than the window, but is never missed within it.
//!
//! One [`TimeSeries`] takes 13.9 KiB, of which a day of minutes is 7 KiB, and a node has two; adding a sample is O(1) and does
//! not allocate.

mod buckets;
mod custom;
mod gaps;
mod node;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::buckets::Buckets;
pub use self::custom::{CustomWindow, MAX_WINDOWS};
pub use self::node::NodeWindows;
pub use super::statistic::{PeakSpan, Span, Statistic};
use super::time::BootTime;

/// The length of a slot.
pub const SLOT: Duration = Duration::from_secs(3);
/// Samples further apart than this leave a gap.
pub const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// A window with less coverage than this has no value.
pub const MIN_COVERAGE: f64 = 0.5;

const SLOT_NANOS: u64 = SLOT.as_secs() * 1_000_000_000;
/// Slots of an hour: the longest window with a value per slot.
const SLOTS: usize = 1200;
const SLOTS_PER_MINUTE: u8 = 20;
const SLOTS_PER_FIVE_MINUTES: u8 = 100;
const MINUTES_PER_HOUR: usize = 60;
const MINUTES_PER_DAY: usize = 1440;
const FIVE_MINUTES_PER_DAY: usize = 288;
/// The windows with running sums.
const SUMMED: [Span; 4] = [Span::Minute, Span::FiveMinutes, Span::HalfHour, Span::Hour];
/// A larger value, positive or negative, is a gap: with it, the sum of an hour would not fit into an integer.
const MAX_VALUE: f32 = 1e18;
/// Sums count in units of 2^-40.
const UNITS_PER_ONE: f64 = (1_u64 << 40) as f64;

impl Span {
    /// Slots of the ring; all of them for a day, which the ring does not hold.
    const fn slots(self) -> usize {
        match self {
            Self::Minute => 20,
            Self::FiveMinutes => 100,
            Self::HalfHour => 600,
            Self::Hour | Self::Day => SLOTS,
        }
    }
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

/// The distribution of the values of a window.
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
    /// Highest value.
    pub max: f64,
}

/// One quantity over time.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TimeSeries {
    /// The closed slots of the last hour, NaN for a gap; slot `n` is at index `n % SLOTS`.
    #[serde(deserialize_with = "gaps::deserialize")]
    slots: Box<[f32]>,
    /// Running sums of [`SUMMED`].
    #[serde(skip)]
    sums: [Sum; SUMMED.len()],
    open: Open,
    /// The highest 5-minute average of each minute of the last hour.
    hour_peaks: Buckets,
    /// The highest 5-minute average of each 5 minutes of the last day.
    day_peaks: Buckets,
    /// The minutes of the last day.
    minutes: Buckets,
}

/// The current slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Open {
    slot: u64,
    /// Nanoseconds since boot up to which samples were added.
    until: u64,
    /// Value times nanoseconds.
    area: f64,
    /// Nanoseconds.
    covered: u64,
}

/// Sum over the slots that are not gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sum {
    total: i128,
    count: u32,
}

impl Default for TimeSeries {
    fn default() -> Self {
        Self {
            slots: vec![f32::NAN; SLOTS].into(),
            sums: [Sum::default(); SUMMED.len()],
            open: Open::default(),
            hour_peaks: Buckets::new(MINUTES_PER_HOUR, SLOTS_PER_MINUTE),
            day_peaks: Buckets::new(FIVE_MINUTES_PER_DAY, SLOTS_PER_FIVE_MINUTES),
            minutes: Buckets::new(MINUTES_PER_DAY, SLOTS_PER_MINUTE),
        }
    }
}

impl TimeSeries {
    /// Recomputes the sums of a deserialized series. Returns `false` if the series is invalid and must not be used.
    #[must_use]
    fn resume(&mut self) -> bool {
        let slot = self.open.slot;
        let buckets = [
            (&self.hour_peaks, MINUTES_PER_HOUR, SLOTS_PER_MINUTE),
            (
                &self.day_peaks,
                FIVE_MINUTES_PER_DAY,
                SLOTS_PER_FIVE_MINUTES,
            ),
            (&self.minutes, MINUTES_PER_DAY, SLOTS_PER_MINUTE),
        ];
        let valid = self.slots.len() == SLOTS
            && !self.slots.iter().any(|value| value.abs() > MAX_VALUE)
            && buckets
                .iter()
                .all(|(buckets, count, slots)| buckets.is_valid(*count, *slots, slot))
            && slot == self.open.until / SLOT_NANOS
            && self.open.covered <= SLOT_NANOS
            && self.open.area.is_finite();
        if valid {
            for span in SUMMED {
                let sum = &mut self.sums[span as usize];
                *sum = Sum::default();
                let last = (1..=span.slots()).map(|back| ring_index(slot, back));
                last.for_each(|index| sum.add(self.slots[index]));
            }
        }
        valid
    }

    /// Adds an average of `value` from `from` to `to`. An interval that is longer than [`MAX_INTERVAL`] or has no finite
    /// value is a gap; a part that was already added is not counted again.
    pub fn add(&mut self, from: BootTime, to: BootTime, value: f64) {
        if value.is_finite() && to.since(from) <= MAX_INTERVAL {
            self.reset_if_clock_went_back(to);
            let mut at = from.as_nanos().max(self.open.until);
            while at < to.as_nanos() {
                self.roll(at / SLOT_NANOS);
                let slot_end = (self.open.slot + 1).saturating_mul(SLOT_NANOS);
                let end = to.as_nanos().min(slot_end);
                self.open.area += value * (end - at) as f64;
                self.open.covered += end - at;
                at = end;
            }
        }
        self.advance(to);
    }

    /// Adds the mean since the last sample, taken at `before`; a gap if either is unknown.
    fn record(&mut self, before: Option<BootTime>, now: BootTime, mean: Option<f64>) {
        match (before, mean) {
            (Some(before), Some(mean)) if before <= now => self.add(before, now, mean),
            _ => self.advance(now),
        }
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
            for buckets in self.buckets() {
                buckets.clear();
            }
        }
    }

    const fn buckets(&mut self) -> [&mut Buckets; 3] {
        [&mut self.hour_peaks, &mut self.day_peaks, &mut self.minutes]
    }

    fn clear(&mut self) {
        self.slots.fill(f32::NAN);
        self.sums = [Sum::default(); SUMMED.len()];
    }

    /// Closes the slots before `slot`.
    fn roll(&mut self, slot: u64) {
        if slot <= self.open.slot {
            return;
        }
        self.close_slot(self.open.value());
        if slot - self.open.slot >= SLOTS as u64 {
            self.clear();
            for buckets in self.buckets() {
                buckets.roll(slot);
            }
            self.open.slot = slot;
        }
        while self.open.slot < slot {
            self.close_slot(f32::NAN);
        }
    }

    /// Closes the open slot.
    fn close_slot(&mut self, value: f32) {
        let slot = self.open.slot;
        for span in SUMMED {
            let expired = self.slots[ring_index(slot, span.slots())];
            let sum = &mut self.sums[span as usize];
            sum.remove(expired);
            sum.add(value);
        }
        self.slots[ring_index(slot, 0)] = value;
        let known = !value.is_nan();
        let average = self.average(Span::FiveMinutes).value;
        let average = average.map_or(f32::NAN, to_f32);
        self.hour_peaks.raise(slot, average, known);
        self.day_peaks.raise(slot, average, known);
        self.minutes.add(slot, value);
        self.open = Open {
            slot: slot + 1,
            until: self.open.until,
            ..Open::default()
        };
    }

    fn coverage(&self, span: Span) -> f64 {
        match span {
            Span::Day => self.minutes.coverage(),
            _ => f64::from(self.sums[span as usize].count) / span.slots() as f64,
        }
    }

    /// The statistic of the last slots.
    pub fn value(&self, statistic: Statistic) -> Window<f64> {
        match statistic {
            Statistic::Average(span) => self.average(span),
            Statistic::Deviation(span) => self.deviation(span),
            Statistic::Percentile(percentile, span) => self.percentile(percentile as usize, span),
            Statistic::Peak(span) => self.peak(span),
        }
    }

    /// The average of the last slots. O(1), or of a day from its minutes.
    pub fn average(&self, span: Span) -> Window<f64> {
        Window::of(self.coverage(span), || match span {
            Span::Day => self.minutes.mean(),
            _ => self.sums[span as usize].average(),
        })
    }

    /// The standard deviation of the last slots; of a day, of its minutes.
    pub fn deviation(&self, span: Span) -> Window<f64> {
        Window::of(self.coverage(span), || {
            let mut buffer = [0.0; MINUTES_PER_DAY + 1];
            let values = self.collect(span, &mut buffer);
            let values = || values.iter().map(|value| f64::from(*value));
            let count = values().len();
            let mean = values().sum::<f64>() / count as f64;
            let squares: f64 = values().map(|value| (value - mean).powi(2)).sum();
            (count > 0).then(|| (squares / count as f64).sqrt())
        })
    }

    /// A percentile of the last slots; of a day, of its minutes.
    fn percentile(&self, hundredths: usize, span: Span) -> Window<f64> {
        Window::of(self.coverage(span), || {
            let mut buffer = [0.0; MINUTES_PER_DAY + 1];
            let values = self.collect(span, &mut buffer);
            let rank = nearest_rank(values.len(), hundredths)?;
            let (_, value, _) = values.select_nth_unstable_by(rank, f32::total_cmp);
            Some(f64::from(*value))
        })
    }

    /// The average and percentiles of the last slots; of a day, percentiles of its minutes. Sorts them, so use it for
    /// reports and not for each sample.
    pub fn spread(&self, span: Span) -> Window<Spread> {
        Window::of(self.coverage(span), || {
            let mut buffer = [0.0; MINUTES_PER_DAY + 1];
            let values = self.collect(span, &mut buffer);
            values.sort_unstable_by(f32::total_cmp);
            let percentile = |hundredths| {
                let rank = nearest_rank(values.len(), hundredths)?;
                values.get(rank).copied().map(f64::from)
            };
            Some(Spread {
                average: self.average(span).value?,
                p50: percentile(50)?,
                p90: percentile(90)?,
                p95: percentile(95)?,
                p99: percentile(99)?,
                max: percentile(100)?,
            })
        })
    }

    /// The highest average of any 5 minutes that ended within the window.
    pub fn peak(&self, span: PeakSpan) -> Window<f64> {
        let peaks = match span {
            PeakSpan::Hour => &self.hour_peaks,
            PeakSpan::Day => &self.day_peaks,
        };
        Window::of(peaks.coverage(), || peaks.highest())
    }

    /// Copies the slots of the window that are not gaps; of a day, its minutes.
    fn collect<'a>(&self, span: Span, buffer: &'a mut [f32]) -> &'a mut [f32] {
        let last = (1..=span.slots()).map(|back| self.slots[ring_index(self.open.slot, back)]);
        let count = match span {
            Span::Day => fill(buffer, self.minutes.means()),
            _ => fill(buffer, last.filter(|value| !value.is_nan())),
        };
        &mut buffer[..count]
    }
}

impl Open {
    fn value(&self) -> f32 {
        if self.covered * 2 < SLOT_NANOS {
            return f32::NAN;
        }
        to_f32(self.area / self.covered as f64)
    }
}

impl Sum {
    fn add(&mut self, value: f32) {
        if !value.is_nan() {
            self.total += units(value);
            self.count += 1;
        }
    }

    fn remove(&mut self, value: f32) {
        if !value.is_nan() {
            self.total -= units(value);
            self.count -= 1;
        }
    }

    fn average(self) -> Option<f64> {
        let mean = self.total as f64 / f64::from(self.count);
        (self.count > 0).then_some(mean / UNITS_PER_ONE)
    }
}

/// Fills the buffer from its start; returns how many values there are.
fn fill(buffer: &mut [f32], values: impl Iterator<Item = f32>) -> usize {
    let filled = buffer.iter_mut().zip(values);
    filled.map(|(place, value)| *place = value).count()
}

/// The index of the slot that is `back` before `slot`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "less than the number of slots"
)]
const fn ring_index(slot: u64, back: usize) -> usize {
    ((slot + (SLOTS - back) as u64) % SLOTS as u64) as usize
}

/// The value as it is stored; a gap if it is too large.
#[expect(
    clippy::cast_possible_truncation,
    reason = "seven digits are enough, and what is too large is a gap"
)]
fn to_f32(value: f64) -> f32 {
    let value = value as f32;
    if value.abs() <= MAX_VALUE {
        value
    } else {
        f32::NAN
    }
}

#[expect(clippy::cast_possible_truncation, reason = "at most 1e18 times 2^40")]
fn units(value: f32) -> i128 {
    (f64::from(value) * UNITS_PER_ONE) as i128
}

/// The index of the nearest-rank percentile of sorted values; `None` without values.
const fn nearest_rank(count: usize, hundredths: usize) -> Option<usize> {
    (count * hundredths).div_ceil(100).checked_sub(1)
}
