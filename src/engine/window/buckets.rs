//! One value for each of many buckets, for windows up to a day.

use serde::{Deserialize, Serialize};

use super::gaps;

/// A ring of buckets of equal length.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Buckets {
    /// Slots per bucket.
    slots: u8,
    /// The current bucket.
    bucket: u64,
    /// Bucket `n` is at index `n % length`; NaN is a gap. One more bucket than the window has, so the whole window is always
    /// covered.
    #[serde(deserialize_with = "gaps::deserialize")]
    values: Box<[f32]>,
    /// How many slots of each bucket were not gaps.
    known: Box<[u8]>,
}

impl Buckets {
    /// A window of `buckets` buckets of `slots` slots each.
    pub(super) fn new(buckets: usize, slots: u8) -> Self {
        Self {
            slots,
            bucket: 0,
            values: vec![f32::NAN; buckets + 1].into(),
            known: vec![0; buckets + 1].into(),
        }
    }

    /// Whether it is a valid state for these parameters, filled up to `slot`.
    pub(super) fn is_valid(&self, buckets: usize, slots: u8, slot: u64) -> bool {
        self.slots == slots
            && self.bucket <= slot / u64::from(slots)
            && self.values.len() == buckets + 1
            && self.known.len() == buckets + 1
            && self.known.iter().all(|known| *known <= slots)
            && !self.values.iter().any(|value| value.is_infinite())
    }

    pub(super) fn clear(&mut self) {
        self.values.fill(f32::NAN);
        self.known.fill(0);
        self.bucket = 0;
    }

    /// Moves on to the bucket of `slot`.
    pub(super) fn roll(&mut self, slot: u64) {
        let bucket = slot / u64::from(self.slots);
        let steps = bucket.saturating_sub(self.bucket);
        for step in 1..=steps.min(self.values.len() as u64) {
            let index = self.index_of(self.bucket + step);
            self.values[index] = f32::NAN;
            self.known[index] = 0;
        }
        self.bucket = self.bucket.max(bucket);
    }

    /// Raises the bucket to the value at the end of `slot`, which may be a gap; `known` if the slot itself is not a gap.
    pub(super) fn raise(&mut self, slot: u64, value: f32, known: bool) {
        self.roll(slot);
        let index = self.index_of(self.bucket);
        self.known[index] += u8::from(known);
        // The maximum with a gap is the other value.
        self.values[index] = self.values[index].max(value);
    }

    /// Adds the value of `slot`, unless it is a gap, to the sum of its bucket.
    pub(super) fn add(&mut self, slot: u64, value: f32) {
        self.roll(slot);
        if value.is_nan() {
            return;
        }
        let index = self.index_of(self.bucket);
        let sum = self.values[index];
        self.values[index] = if sum.is_nan() { value } else { sum + value };
        self.known[index] += 1;
    }

    /// The highest value of the window, or of up to one bucket more.
    pub(super) fn highest(&self) -> Option<f64> {
        let present = self.values.iter().filter(|value| !value.is_nan());
        present.copied().reduce(f32::max).map(f64::from)
    }

    /// The mean of the slots that were added within the window, or within up to one bucket more.
    pub(super) fn mean(&self) -> Option<f64> {
        let sums = self.values.iter().filter(|sum| !sum.is_nan());
        let total: f64 = sums.map(|sum| f64::from(*sum)).sum();
        let known = self.known();
        (known > 0).then(|| total / f64::from(known))
    }

    /// The mean of each bucket of which at least half is known.
    pub(super) fn means(&self) -> impl Iterator<Item = f32> {
        let buckets = self.values.iter().zip(&self.known);
        let covered = buckets.filter(|(_, known)| **known > 0 && **known * 2 >= self.slots);
        covered.map(|(sum, known)| sum / f32::from(*known))
    }

    /// The share of the window's slots that are not gaps.
    pub(super) fn coverage(&self) -> f64 {
        let slots = (self.known.len() - 1) * usize::from(self.slots);
        (f64::from(self.known()) / slots as f64).min(1.0)
    }

    fn known(&self) -> u32 {
        self.known.iter().map(|known| u32::from(*known)).sum()
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "less than the number of buckets"
    )]
    fn index_of(&self, bucket: u64) -> usize {
        (bucket % self.values.len() as u64) as usize
    }
}
