//! Maxima over many short buckets, for windows up to a day.

use serde::{Deserialize, Serialize};

/// A gap.
pub(super) const MISSING: u16 = u16::MAX;

/// Maximum per bucket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Peaks {
    /// Slots per bucket.
    slots: u8,
    /// The current bucket.
    bucket: u64,
    /// Bucket `n` is at index `n % length`. One more bucket than the window has, so the whole window is always covered.
    highest: Box<[u16]>,
    /// How many slots of each bucket were not gaps.
    known: Box<[u8]>,
}

impl Peaks {
    /// A window of `buckets` buckets of `slots` slots each.
    pub(super) fn new(buckets: usize, slots: u8) -> Self {
        Self {
            slots,
            bucket: 0,
            highest: vec![MISSING; buckets + 1].into(),
            known: vec![0; buckets + 1].into(),
        }
    }

    /// Whether it is a valid state for these parameters, filled up to `slot`.
    pub(super) fn is_valid(&self, buckets: usize, slots: u8, slot: u64) -> bool {
        self.slots == slots
            && self.bucket <= slot / u64::from(slots)
            && self.highest.len() == buckets + 1
            && self.known.len() == buckets + 1
            && self.known.iter().all(|known| *known <= slots)
    }

    pub(super) fn clear(&mut self) {
        self.highest.fill(MISSING);
        self.known.fill(0);
        self.bucket = 0;
    }

    /// Moves on to the bucket of `slot`.
    pub(super) fn roll(&mut self, slot: u64) {
        let bucket = slot / u64::from(self.slots);
        let steps = bucket.saturating_sub(self.bucket);
        for step in 1..=steps.min(self.highest.len() as u64) {
            let index = self.index_of(self.bucket + step);
            self.highest[index] = MISSING;
            self.known[index] = 0;
        }
        self.bucket = self.bucket.max(bucket);
    }

    /// Adds the value at the end of `slot`, which may be a gap; `known` if the slot itself is not a gap.
    pub(super) fn add(&mut self, slot: u64, value: u16, known: bool) {
        self.roll(slot);
        let index = self.index_of(self.bucket);
        self.known[index] += u8::from(known);
        let highest = &mut self.highest[index];
        if value != MISSING && (*highest == MISSING || value > *highest) {
            *highest = value;
        }
    }

    /// The highest value of the window, or of up to one bucket more.
    pub(super) fn highest(&self) -> Option<u16> {
        let present = self.highest.iter().filter(|value| **value != MISSING);
        present.max().copied()
    }

    /// The share of the window's slots that are not gaps.
    pub(super) fn coverage(&self) -> f64 {
        let known: u32 = self.known.iter().map(|known| u32::from(*known)).sum();
        let slots = (self.known.len() - 1) * usize::from(self.slots);
        (f64::from(known) / slots as f64).min(1.0)
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the number of buckets"
    )]
    fn index_of(&self, bucket: u64) -> usize {
        (bucket % self.highest.len() as u64) as usize
    }
}
