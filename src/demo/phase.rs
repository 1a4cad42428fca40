//! The demo's phases: how long each lasts, and what ends it. Pure.

use std::fmt;
use std::time::Duration;

use crate::engine::time::BootTime;

/// The phases, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// The important pod runs alone.
    Alone,
    /// The batch work runs, and no policy is in force.
    Overloaded,
    /// The policies are in force.
    Enforced,
    /// The batch work has stopped; the policies restore the originals.
    Release,
    /// Everything is restored.
    Done,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "the important pod runs alone",
            Self::Overloaded => "batch pods keep all CPUs busy, no policy in force",
            Self::Enforced => "the policies are in force",
            Self::Release => "batch pods have stopped, originals are being restored",
            Self::Done => "everything is restored",
        })
    }
}

/// How long the phases last, and policy settings that fit them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseSchedule {
    /// The important pod alone.
    pub alone: Duration,
    /// Overload without policies.
    pub overloaded: Duration,
    /// Policies in force and the batch work running.
    pub enforced: Duration,
    /// From the end of the batch work until the demo restores the originals itself.
    pub release: Duration,
    /// `coolDownSeconds` of a rule that the policies themselves make quiet: nearly as long as [`Self::enforced`], so that they
    /// restore after the batch work has stopped, and do not oscillate before.
    pub cool_down_after_harm: Duration,
    /// `coolDownSeconds` of a rule that is breached for as long as the batch work runs.
    pub cool_down_after_load: Duration,
    /// Evaluation period of the rules.
    pub period: Duration,
}

/// The shortest demo in which every phase fits.
pub const MIN_DURATION: Duration = Duration::from_secs(10);

impl PhaseSchedule {
    /// The phases of a demo that lasts about `total`, at least [`MIN_DURATION`].
    pub fn lasting(total: Duration) -> Self {
        let total = total.max(MIN_DURATION);
        let (enforced, release) = (total * 7 / 20, total * 3 / 10);
        let period = if total < Duration::from_secs(40) {
            Duration::from_millis(200)
        } else {
            Duration::from_millis(500)
        };
        Self {
            alone: total * 3 / 20,
            overloaded: total / 5,
            enforced,
            release,
            cool_down_after_harm: whole_seconds(enforced.saturating_sub(period * 6)),
            cool_down_after_load: whole_seconds(release / 3),
            period,
        }
    }

    /// The longest time that the demo can take.
    pub fn total(&self) -> Duration {
        self.alone + self.overloaded + self.enforced + self.release
    }
}

/// As policies have them, at least 1.
fn whole_seconds(duration: Duration) -> Duration {
    Duration::from_secs(duration.as_secs().max(1))
}

/// Progress through the phases.
#[derive(Clone, Copy, Debug)]
pub struct Timeline {
    schedule: PhaseSchedule,
    phase: Phase,
    phase_started: BootTime,
    started: BootTime,
}

impl Timeline {
    /// Starts with [`Phase::Alone`].
    pub const fn start(schedule: PhaseSchedule, now: BootTime) -> Self {
        Self {
            schedule,
            phase: Phase::Alone,
            phase_started: now,
            started: now,
        }
    }

    /// The current phase.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// When the demo started.
    pub const fn started(&self) -> BootTime {
        self.started
    }

    /// Upper bound of the time left.
    pub fn left(&self, now: BootTime) -> Duration {
        self.schedule
            .total()
            .saturating_sub(now.since(self.started))
    }

    /// Enters the next phase if it is due; `released`: the policies have restored everything. At most one phase a call,
    /// so that none is skipped.
    pub fn advance(&mut self, now: BootTime, released: bool) -> Option<Phase> {
        let lasted = now.since(self.phase_started);
        let next = match self.phase {
            Phase::Alone if lasted >= self.schedule.alone => Phase::Overloaded,
            Phase::Overloaded if lasted >= self.schedule.overloaded => Phase::Enforced,
            Phase::Enforced if lasted >= self.schedule.enforced => Phase::Release,
            Phase::Release if released || lasted >= self.schedule.release => Phase::Done,
            _ => return None,
        };
        self.phase = next;
        self.phase_started = now;
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> BootTime {
        BootTime::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn every_phase_is_entered_and_the_demo_ends() {
        let schedule = PhaseSchedule::lasting(Duration::from_mins(1));
        let mut timeline = Timeline::start(schedule, at(0));
        let mut phases = vec![timeline.phase()];
        let mut now = 0;
        while timeline.phase() != Phase::Done {
            now += 100;
            assert!(now <= 61_000, "not done: {timeline:?}");
            phases.extend(timeline.advance(at(now), false));
        }
        assert_eq!(
            phases,
            [
                Phase::Alone,
                Phase::Overloaded,
                Phase::Enforced,
                Phase::Release,
                Phase::Done
            ]
        );
    }

    #[test]
    fn it_ends_early_once_the_batch_work_has_stopped_and_all_is_restored() {
        let mut timeline = Timeline::start(PhaseSchedule::lasting(Duration::from_mins(1)), at(0));
        let mut now = 0;
        while timeline.phase() < Phase::Release {
            now += 100;
            timeline.advance(at(now), true);
        }
        assert!(now >= 42_000, "{now}");
        assert_eq!(timeline.advance(at(now + 100), true), Some(Phase::Done));
    }

    #[test]
    fn the_policies_have_time_to_restore_everything() {
        for seconds in 10..=600 {
            let schedule = PhaseSchedule::lasting(Duration::from_secs(seconds));
            // The last breach comes a few evaluations after the policies; from then on the cool-down runs.
            let last_breach = schedule.period * 8;
            let after_harm = schedule
                .enforced
                .max(last_breach + schedule.cool_down_after_harm);
            let after_load = schedule.enforced + schedule.cool_down_after_load;
            let up = schedule.period * 9;
            assert!(
                after_harm.max(after_load) + up <= schedule.enforced + schedule.release,
                "{seconds} s: {schedule:?}"
            );
        }
    }

    #[test]
    fn a_stalled_machine_skips_no_phase() {
        let mut timeline = Timeline::start(PhaseSchedule::lasting(Duration::from_secs(10)), at(0));
        assert_eq!(
            timeline.advance(at(100_000), false),
            Some(Phase::Overloaded)
        );
        assert_eq!(timeline.advance(at(100_000), false), None);
    }
}
