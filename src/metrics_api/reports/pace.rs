//! How often agents are asked to report, by how busy the listener is. Pure.

use std::time::Duration;

use crate::crd::report::{INTERVAL, LONGEST_INTERVAL};
use crate::engine::time::BootTime;

/// Reports may take so much of a core; agents are asked to report less often until they do.
const TARGET: f64 = 0.5;
/// From so much on what an agent sends before it is due is refused.
const OVERLOAD: f64 = 0.9;
/// Reports that wait for so long to be looked at show that the rest of the controller is behind.
const BEHIND: Duration = Duration::from_secs(5);
/// No agent may report more often. They do at most once a second, and the network brings two of them closer together.
const LEAST: Duration = Duration::from_millis(200);

/// Over less time a thread that looks at its clock is as busy as can be.
const SHORTEST_LOOK: Duration = Duration::from_secs(1);

/// How many cores a thread uses, between two looks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// When it was looked last, and how much time of a core the thread had used by then.
    last: Option<(BootTime, Duration)>,
}

impl Meter {
    /// Cores that were used since the last look: 0 to 1. `None`: there was none, or it is younger than a second, and stays
    /// the last.
    pub fn busy(&mut self, now: BootTime, used: Duration) -> Option<f64> {
        let Some((then, before)) = self.last else {
            self.last = Some((now, used));
            return None;
        };
        let passed = now.since(then);
        if passed < SHORTEST_LOOK {
            return None;
        }
        self.last = Some((now, used));
        let used = used.saturating_sub(before);
        Some((used.as_secs_f64() / passed.as_secs_f64()).min(1.0))
    }
}

/// What is measured, over a while.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Cores that the listener's thread used: 0 to 1.
    pub busy: f64,
    /// For how long the oldest report waits to be looked at.
    pub waits: Duration,
}

/// What agents are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// When the next report is wanted: 10 to 60 s.
    pub interval: Duration,
    /// No node's reports are taken that are closer together.
    pub least: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            interval: INTERVAL,
            least: LEAST,
        }
    }
}

impl Pace {
    /// The pace at this load, which is what came of the pace so far. The interval moves towards what would bring the load
    /// to its target, in whole seconds and by half of itself at most; never below 10 s nor above 60 s. At overload nothing is
    /// taken before two thirds of it have passed.
    #[must_use]
    pub fn at(self, load: Load) -> Self {
        let behind = load.waits >= BEHIND;
        let wanted = load.busy / TARGET;
        let factor = if behind { wanted.max(1.5) } else { wanted };
        let interval = self.interval.mul_f64(factor.clamp(0.5, 1.5));
        let interval = Duration::from_secs_f64(interval.as_secs_f64().ceil());
        let interval = interval.clamp(INTERVAL, LONGEST_INTERVAL);
        let overload = load.busy >= OVERLOAD || behind;
        Self {
            interval,
            least: if overload { interval * 2 / 3 } else { LEAST },
        }
    }

    /// After how many seconds what was refused may be sent again.
    pub fn retry_after(&self) -> u32 {
        u32::try_from(self.least.as_secs())
            .unwrap_or(u32::MAX)
            .max(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn load(busy: f64) -> Load {
        Load {
            busy,
            waits: Duration::ZERO,
        }
    }

    /// What a fleet that costs `cost` seconds of a core a second at the usual interval settles at.
    fn settled(cost: f64) -> Pace {
        (0..40).fold(Pace::default(), |pace, _| {
            let busy = cost * INTERVAL.as_secs_f64() / pace.interval.as_secs_f64();
            pace.at(load(busy.min(1.0)))
        })
    }

    #[test]
    fn looks_that_come_in_a_burst_after_a_pause_tell_of_no_load() {
        let mut meter = Meter::default();
        let mut look = |micros, used| {
            let now = BootTime::default() + Duration::from_micros(micros);
            meter.busy(now, Duration::from_micros(used))
        };
        let second = 1_000_000;
        assert_eq!(look(5 * second, 700), None, "there was none before");
        assert_eq!(look(7 * second, 700 + second), Some(0.5));
        // The process was stopped for half a minute; each look takes 20 us, in which it does nothing else.
        let after = 37 * second;
        let idle = look(after, 800 + second).unwrap();
        assert!(idle < 0.001, "{idle}");
        for late in 1..15 {
            assert_eq!(look(after + 20 * late, 800 + second + 20 * late), None);
        }
        let next = look(after + 2 * second, 1000 + second).unwrap();
        assert!(next < 0.001, "{next}");
    }

    #[test]
    fn a_thread_that_does_nothing_else_uses_one_core_and_never_more() {
        let mut meter = Meter::default();
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        meter.busy(at(0), Duration::ZERO);
        let busy = meter.busy(at(2), Duration::from_millis(2001));
        assert_eq!(busy, Some(1.0));
    }

    #[test]
    fn a_fleet_that_fits_reports_every_10_s() {
        for cost in [0.0, 0.1, 0.5] {
            assert_eq!(settled(cost), Pace::default(), "{cost}");
        }
    }

    #[test]
    fn a_fleet_that_costs_too_much_reports_as_seldom_as_it_takes() {
        let Pace { interval, least } = settled(1.0);
        assert!((20..=22).contains(&interval.as_secs()), "{interval:?}");
        assert_eq!(least, LEAST);
        assert_eq!(settled(100.0).interval, LONGEST_INTERVAL);
        assert_eq!(settled(100.0).least, LONGEST_INTERVAL * 2 / 3);
    }

    #[test]
    fn when_the_load_is_gone_so_is_the_wait() {
        let long = settled(100.0);
        let back = (0..10).fold(long, |pace, _| pace.at(load(0.1)));
        assert_eq!(back, Pace::default());
    }

    #[test]
    fn a_controller_that_is_behind_is_told_less() {
        let behind = Load {
            busy: 0.0,
            waits: BEHIND,
        };
        let pace = Pace::default().at(behind);
        assert_eq!(pace.interval, Duration::from_secs(15));
        assert_eq!(pace.retry_after(), 10);
    }

    proptest! {
        #[test]
        fn more_load_never_asks_for_more_reports(
            seconds in 10_u64..=60, busy in 0.0_f64..2.0, more in 0.0_f64..1.0, waits in 0_u64..60,
        ) {
            let pace = Pace { interval: Duration::from_secs(seconds), ..Pace::default() };
            let waits = Duration::from_secs(waits);
            let (less, more) = (Load { busy, waits }, Load { busy: busy + more, waits });
            let (less, more) = (pace.at(less), pace.at(more));
            prop_assert!(less.interval <= more.interval && less.least <= more.least);
            prop_assert!((INTERVAL..=LONGEST_INTERVAL).contains(&more.interval));
            prop_assert!(more.least < more.interval);
        }
    }
}
