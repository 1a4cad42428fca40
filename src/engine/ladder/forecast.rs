//! Whether memory runs out before the next evaluations could act: then evictions do not wait for their rung.

use std::collections::VecDeque;
use std::time::Duration;

use crate::engine::sample::{NodeMemory, Sample};
use crate::engine::time::BootTime;
use crate::engine::units::Bytes;

/// The kubelet's default for `memory.available` in `evictionHard`.
pub(in crate::engine) const HARD_EVICTION: Bytes = Bytes(100 << 20);
/// Each half of this time alone must reach the threshold.
const SPAN: Duration = Duration::from_secs(10);
/// Samples are at least this far apart.
const MIN_INTERVAL: Duration = Duration::from_millis(900);
/// More than there are in the span.
const MAX_SAMPLES: usize = 16;
/// Time until an eviction that is decided now is carried out, without the grace period of its pod.
const REACTION: Duration = Duration::from_secs(30);
/// A longer grace period does not count: an eviction would always come too early.
const MAX_GRACE: Duration = Duration::from_mins(1);

/// What is left by one measure, in bytes, may be negative.
type Left = f64;

/// The memory that was left in the last ten seconds.
#[derive(Debug, Default)]
pub(in crate::engine) struct MemoryForecast {
    /// By `MemAvailable`, and by what cannot be reclaimed or is in use.
    samples: VecDeque<(BootTime, [Option<Left>; 2])>,
}

impl MemoryForecast {
    /// Adds a sample, if the last one is old enough; those older than [`SPAN`] are dropped.
    pub(in crate::engine) fn add(&mut self, sample: &Sample) {
        let Some(memory) = sample.node.memory else {
            self.samples.clear();
            return;
        };
        let last = self.samples.back();
        if last.is_some_and(|(at, _)| sample.at.since(*at) < MIN_INTERVAL) {
            return;
        }
        self.samples.push_back((sample.at, left(memory)));
        // The last one that is at least as old as the span stays, so that it is covered.
        while let Some((second, _)) = self.samples.get(1)
            && sample.at.since(*second) >= SPAN
        {
            self.samples.pop_front();
        }
    }

    /// How much will be missing when a pod with that grace period is gone, if it goes on like this: `None` if the kubelet's
    /// threshold is not reached until then.
    pub(in crate::engine) fn shortage(&self, grace: Duration) -> Option<Bytes> {
        let within = (REACTION + grace.min(MAX_GRACE)).as_secs_f64();
        let missing = (0..2).filter_map(|measure| self.missing(measure, within));
        missing.reduce(f64::max).map(bytes)
    }

    fn missing(&self, measure: usize, within: f64) -> Option<f64> {
        let (first, last) = (self.samples.front()?, self.samples.back()?);
        if last.0.since(first.0) < SPAN {
            return None;
        }
        let middle = last.0.before(SPAN / 2);
        let is_late = |at: BootTime| at >= middle;
        // The slower half decides how much.
        let slope = self.usual_change(measure, |at| !is_late(at))?;
        let slope = slope.max(self.usual_change(measure, is_late)?);
        let left = last.1[measure]? + slope * within;
        let missing = HARD_EVICTION.0 as f64 - left;
        (slope < 0.0 && missing >= 0.0).then_some(missing)
    }

    /// The median of the changes per second that began in that half: a pod that exits does not hide the others' growth.
    fn usual_change(&self, measure: usize, half: impl Fn(BootTime) -> bool) -> Option<f64> {
        let mut changes = [f64::NAN; MAX_SAMPLES];
        let mut count = 0;
        for (from, to) in self.samples.iter().zip(self.samples.iter().skip(1)) {
            if half(from.0) && count < MAX_SAMPLES {
                let seconds = to.0.since(from.0).as_secs_f64();
                changes[count] = (to.1[measure]? - from.1[measure]?) / seconds;
                count += 1;
            }
        }
        let changes = &mut changes[..count];
        changes.sort_unstable_by(f64::total_cmp);
        changes.get(count / 2).copied()
    }
}

fn left(memory: NodeMemory) -> [Option<Left>; 2] {
    let active = || {
        let held = memory.anon?.0 + memory.shmem?.0 + memory.active_file?.0;
        Some(memory.capacity().0 as f64 - held as f64)
    };
    [Some(memory.available.0 as f64), active()]
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "not negative, and `as` saturates"
)]
const fn bytes(value: f64) -> Bytes {
    Bytes(value as u64)
}
