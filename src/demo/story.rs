//! The demo's plot: how long each act lasts, and what ends it. Pure.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::time::BootTime;

/// The acts, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Act {
    /// The important worker runs alone.
    Alone,
    /// The batch work has started, and no policy is in force.
    Overloaded,
    /// The policies are in force.
    Enforced,
    /// The batch work has stopped; the policies let go.
    Release,
    /// Everything is as it was.
    Over,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "the important worker runs alone",
            Self::Overloaded => "batch work on all CPUs, no policy in force",
            Self::Enforced => "the policies are in force",
            Self::Release => "batch work has stopped, originals are put back",
            Self::Over => "everything is as it was",
        })
    }
}

/// How long the acts last, and what the policies are set to so that they fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The worker alone.
    pub alone: Duration,
    /// Overload without policies.
    pub overloaded: Duration,
    /// Policies in force and the batch work running.
    pub enforced: Duration,
    /// From the end of the batch work until the demo puts things back itself.
    pub release: Duration,
    /// `coolDownSeconds`, from the last breach on: nearly as long as [`Self::enforced`], so that the policies let go when the batch work has
    /// stopped, and do not swing meanwhile.
    pub cool_down: Duration,
    /// How often the rules are evaluated.
    pub period: Duration,
}

/// The shortest demo that tells its whole story.
pub const SHORTEST: Duration = Duration::from_secs(10);

impl Schedule {
    /// The acts of a demo that lasts about `total`, at least [`SHORTEST`].
    pub fn lasting(total: Duration) -> Self {
        let total = total.max(SHORTEST);
        let enforced = total * 7 / 20;
        let period = if total < Duration::from_secs(40) {
            Duration::from_millis(200)
        } else {
            Duration::from_millis(500)
        };
        Self {
            alone: total * 3 / 20,
            overloaded: total / 5,
            enforced,
            release: total * 3 / 10,
            cool_down: Duration::from_secs(enforced.saturating_sub(period * 6).as_secs().max(1)),
            period,
        }
    }

    /// The longest that the demo can take.
    pub fn total(&self) -> Duration {
        self.alone + self.overloaded + self.enforced + self.release
    }
}

/// Where the plot stands.
#[derive(Clone, Copy, Debug)]
pub struct Story {
    schedule: Schedule,
    act: Act,
    /// When the act began.
    since: BootTime,
    begun: BootTime,
}

impl Story {
    /// Begins with [`Act::Alone`].
    pub const fn begin(schedule: Schedule, now: BootTime) -> Self {
        Self {
            schedule,
            act: Act::Alone,
            since: now,
            begun: now,
        }
    }

    /// The act.
    pub const fn act(&self) -> Act {
        self.act
    }

    /// When the demo began.
    pub const fn begun(&self) -> BootTime {
        self.begun
    }

    /// The lengths of the acts.
    pub const fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// At most so long until the end.
    pub fn left(&self, now: BootTime) -> Duration {
        self.schedule.total().saturating_sub(now.since(self.begun))
    }

    /// Goes on to the next act where it is time; `released` says that the policies have let go of everything. At
    /// most one act a call, so that none is skipped.
    pub fn advance(&mut self, now: BootTime, released: bool) -> Option<Act> {
        let lasted = now.since(self.since);
        let next = match self.act {
            Act::Alone if lasted >= self.schedule.alone => Act::Overloaded,
            Act::Overloaded if lasted >= self.schedule.overloaded => Act::Enforced,
            Act::Enforced if lasted >= self.schedule.enforced => Act::Release,
            Act::Release if released || lasted >= self.schedule.release => Act::Over,
            _ => return None,
        };
        self.act = next;
        self.since = now;
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
    fn every_act_is_played_and_the_demo_ends_by_itself() {
        let schedule = Schedule::lasting(Duration::from_mins(1));
        let mut story = Story::begin(schedule, at(0));
        let mut acts = vec![story.act()];
        let mut now = 0;
        while story.act() != Act::Over {
            now += 100;
            assert!(now <= 61_000, "it has not ended: {story:?}");
            acts.extend(story.advance(at(now), false));
        }
        assert_eq!(
            acts,
            [
                Act::Alone,
                Act::Overloaded,
                Act::Enforced,
                Act::Release,
                Act::Over
            ]
        );
    }

    #[test]
    fn it_ends_early_once_the_policies_have_let_go_but_never_before_the_batch_work_stopped() {
        let mut story = Story::begin(Schedule::lasting(Duration::from_mins(1)), at(0));
        let mut now = 0;
        while story.act() < Act::Release {
            now += 100;
            story.advance(at(now), true);
        }
        assert!(now >= 42_000, "{now}");
        assert_eq!(story.advance(at(now + 100), true), Some(Act::Over));
    }

    #[test]
    fn the_policies_have_time_to_let_go_by_themselves() {
        for seconds in 10..=600 {
            let schedule = Schedule::lasting(Duration::from_secs(seconds));
            // The last breach comes a few evaluations after the policies; from then on the cool-down runs.
            let last_breach = schedule.period * 10;
            let quiet = schedule.enforced.max(last_breach + schedule.cool_down);
            let up = schedule.period * 12;
            assert!(
                quiet + up <= schedule.enforced + schedule.release,
                "{seconds} s: {schedule:?}"
            );
        }
    }

    #[test]
    fn a_stalled_machine_skips_no_act() {
        let mut story = Story::begin(Schedule::lasting(Duration::from_secs(10)), at(0));
        assert_eq!(story.advance(at(100_000), false), Some(Act::Overloaded));
        assert_eq!(story.advance(at(100_000), false), None);
    }
}
