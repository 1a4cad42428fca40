//! What a node has really used, from which the data of peers are made: exact, without scrape errors or missing samples.

use super::TICK;

/// CPU and memory, in percent of the node.
pub type Use = [f64; 2];

#[expect(clippy::cast_possible_truncation, reason = "a few seconds")]
const TICKS_A_MINUTE: usize = 60 / TICK as usize;

/// Every tick of a node.
#[derive(Debug)]
pub struct History {
    /// Sums of all ticks before.
    sums: Vec<Use>,
    /// The mean of 5 minutes at every full minute.
    minutes: Vec<Use>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            sums: vec![[0.0; 2]],
            minutes: Vec::new(),
        }
    }
}

impl History {
    pub fn push(&mut self, used: Use) {
        let last = self.sums[self.sums.len() - 1];
        self.sums.push([last[0] + used[0], last[1] + used[1]]);
        if self.is_full_minute() {
            self.minutes.extend(self.mean(300));
        }
    }

    pub fn is_full_minute(&self) -> bool {
        (self.sums.len() - 1).is_multiple_of(TICKS_A_MINUTE)
    }

    /// The mean of so many seconds, or of what there is of them.
    pub fn mean(&self, seconds: u64) -> Option<Use> {
        let last = self.sums.len() - 1;
        let ticks = last.min(usize::try_from(seconds / TICK).unwrap_or(usize::MAX));
        let before = self.sums[last - ticks];
        let mean = |of: usize| (self.sums[last][of] - before[of]) / ticks as f64;
        (ticks > 0).then(|| [mean(0), mean(1)])
    }

    /// The last mean of 5 minutes that was taken at a full minute.
    pub fn last_minute(&self) -> Option<Use> {
        self.minutes.last().copied()
    }

    /// The highest of these means in so many minutes.
    pub fn max_mean(&self, minutes: usize) -> Option<Use> {
        let of = &self.minutes[self.minutes.len().saturating_sub(minutes)..];
        let highest = |a: Use, b: &Use| [a[0].max(b[0]), a[1].max(b[1])];
        (!of.is_empty()).then(|| of.iter().fold([0.0; 2], highest))
    }
}
