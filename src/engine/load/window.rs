//! CPU time over the last 5 minutes, in intervals of at least 15 s that all counters of a node share.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::time::BootTime;

/// The window of expected use. A pod that is younger is measured over its own life.
pub const WINDOW: Duration = Duration::from_mins(5);

/// Minimum length of an interval: shorter ones would take more memory.
const MIN_INTERVAL: Duration = Duration::from_secs(15);
/// As many intervals as reach into the window.
const INTERVALS: usize = 21;
/// Run time is counted in units of 2^14 ns (16 us), so that an interval fits into 32 bits.
const TICK_SHIFT: u32 = 14;

/// Units of run time.
pub(super) const fn ticks(nanos: u64) -> u64 {
    nanos >> TICK_SHIFT
}

/// Millicores of `ticks` over `elapsed`; `None` if no time passed.
pub(super) fn millicores(ticks: f64, elapsed: Duration) -> Option<f64> {
    let nanos = elapsed.as_nanos() as f64;
    (nanos > 0.0).then(|| ticks * f64::from(1_u32 << TICK_SHIFT) * 1000.0 / nanos)
}

/// The intervals of the window. The last one is open: it grows with every sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Intervals {
    /// When each closed interval ended; interval `n` is at index `n % INTERVALS`.
    ends: [BootTime; INTERVALS],
    /// How many were closed so far.
    closed: usize,
    /// How many of these reach into the window.
    count: usize,
    /// When the first interval of the window began.
    begin: BootTime,
    /// The first sample.
    pub(super) start: BootTime,
    /// The last sample.
    pub(super) at: BootTime,
}

/// An interval, by its index in every ring.
type Slot = usize;

impl Intervals {
    /// Starts with a sample at `now`.
    pub(super) fn starting(now: BootTime) -> Self {
        Self {
            begin: now,
            start: now,
            at: now,
            ..Self::default()
        }
    }

    /// Whether restored intervals are consistent.
    pub(super) fn is_valid(&self) -> bool {
        let kept = self.count.min(self.closed);
        let mut ends = (1..=kept).rev().map(|back| self.end(self.closed - back));
        let mut last = self.begin;
        let ordered = ends.all(|end| std::mem::replace(&mut last, end) <= end);
        self.count <= INTERVALS.min(self.closed)
            && ordered
            && self.start <= self.begin
            && last <= self.at
    }

    /// Where the window begins: 5 minutes ago, or at the first sample.
    pub(super) fn from(&self) -> BootTime {
        self.at.before(WINDOW).max(self.begin)
    }

    /// The length of the window.
    pub(super) fn length(&self) -> Duration {
        self.at.since(self.from())
    }

    /// Whether the open interval is long enough to be closed.
    pub(super) fn is_due(&self) -> bool {
        self.at.since(self.last_end()) >= MIN_INTERVAL
    }

    /// Closes the open interval and returns its slot.
    pub(super) fn close(&mut self) -> Slot {
        let slot = self.closed % INTERVALS;
        self.ends[slot] = self.at;
        self.closed += 1;
        self.count += 1;
        slot
    }

    /// Removes the oldest interval and returns its slot, if it is no longer within the window or its slot is needed.
    pub(super) fn expire(&mut self) -> Option<Slot> {
        let (slot, end) = self.oldest()?;
        if end > self.at.before(WINDOW) && self.count < INTERVALS {
            return None;
        }
        self.begin = end;
        self.count -= 1;
        Some(slot)
    }

    /// When the last closed interval ended, or the first sample.
    fn last_end(&self) -> BootTime {
        match self.count {
            0 => self.begin,
            _ => self.end(self.closed - 1),
        }
    }

    /// The last closed interval: its slot and its beginning.
    fn last(&self) -> Option<(Slot, BootTime)> {
        let begin = match self.count {
            0 => return None,
            1 => self.begin,
            _ => self.end(self.closed - 2),
        };
        Some(((self.closed - 1) % INTERVALS, begin))
    }

    fn oldest(&self) -> Option<(Slot, BootTime)> {
        let first = self.closed.checked_sub(self.count)?;
        (self.count > 0).then(|| (first % INTERVALS, self.end(first)))
    }

    fn end(&self, interval: usize) -> BootTime {
        self.ends[interval % INTERVALS]
    }
}

/// The run time of a pod or the node in each interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct RunTime {
    slots: [u32; INTERVALS],
    /// Of all slots.
    #[serde(skip)]
    sum: u64,
    open: u32,
}

impl RunTime {
    /// Recomputes what is not saved.
    pub(super) fn resume(&mut self) {
        self.sum = self.slots.iter().copied().map(u64::from).sum();
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn add(&mut self, ticks: u64) {
        let ticks = u32::try_from(ticks).unwrap_or(u32::MAX);
        self.open = self.open.saturating_add(ticks);
    }

    pub(super) fn close(&mut self, slot: Slot) {
        self.sum += u64::from(self.open);
        self.slots[slot] = std::mem::take(&mut self.open);
    }

    pub(super) fn expire(&mut self, slot: Slot) {
        self.sum -= u64::from(std::mem::take(&mut self.slots[slot]));
    }

    /// Adds what `other` ran in each interval.
    pub(super) fn absorb(&mut self, other: &Self) {
        for (slot, more) in self.slots.iter_mut().zip(other.slots) {
            let sum = slot.saturating_add(more);
            self.sum += u64::from(sum - *slot);
            *slot = sum;
        }
        self.open = self.open.saturating_add(other.open);
    }

    /// Ticks within the window, of something that was first measured at `first`. The oldest interval may begin before the
    /// window: of that one, a part proportional to its time counts.
    pub(super) fn within(&self, intervals: &Intervals, first: BootTime) -> f64 {
        let total = (self.sum + u64::from(self.open)) as f64;
        let Some((slot, end)) = intervals.oldest() else {
            return total;
        };
        let begin = intervals.begin.max(first);
        let before = intervals.from().since(begin).as_secs_f64();
        let length = end.since(begin).as_secs_f64();
        if before <= 0.0 || length <= 0.0 {
            return total;
        }
        total - f64::from(self.slots[slot]) * (before / length).min(1.0)
    }

    /// Ticks of the open interval and the one before, and when these began: the last 15 to 30 s.
    pub(super) fn recent(&self, intervals: &Intervals) -> (f64, BootTime) {
        match intervals.last() {
            Some((slot, begin)) => (f64::from(self.slots[slot]) + f64::from(self.open), begin),
            None => (f64::from(self.open), intervals.begin),
        }
    }
}
