//! Whether a replica has enough reports to answer for the cluster. Pure.
//!
//! A standby has all reports, so a failover needs no warm-up. But when all replicas start at once, none has any, and a
//! list with hardly any data would be worse than none.

use std::time::Duration;

use crate::engine::time::BootTime;

/// Maximum duration: agents report every 10 s, and find a new replica within another 10 s.
pub const MAX_DURATION: Duration = Duration::from_secs(20);
/// Percentage of live agents that must have reported.
const REQUIRED_PERCENT: usize = 95;

/// Progress of the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarmUpProgress {
    /// Agents that hold their Lease. `None`: the Leases are not listed yet.
    pub live: Option<usize>,
    /// Those of them that have reported to this replica.
    pub reported: usize,
}

impl WarmUpProgress {
    const fn is_enough(self) -> bool {
        match self.live {
            Some(live) => self.reported * 100 >= live * REQUIRED_PERCENT,
            None => false,
        }
    }
}

/// Warm-up of a replica.
#[derive(Debug, Default)]
pub struct WarmUp {
    started: Option<BootTime>,
    done: bool,
}

impl WarmUp {
    /// No warm-up.
    pub const fn none() -> Self {
        Self {
            started: None,
            done: true,
        }
    }

    /// Advances it; whether it is over. It starts with the first call, and never starts again.
    pub fn advance(&mut self, now: BootTime, progress: impl FnOnce() -> WarmUpProgress) -> bool {
        if !self.done {
            let started = *self.started.get_or_insert(now);
            self.done = now.since(started) >= MAX_DURATION || progress().is_enough();
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    fn progress(live: usize, reported: usize) -> impl FnOnce() -> WarmUpProgress {
        move || WarmUpProgress {
            live: Some(live),
            reported,
        }
    }

    #[test]
    fn it_is_over_when_95_percent_of_live_agents_have_reported() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.advance(at(0), progress(100, 0)));
        assert!(!warm_up.advance(at(1), progress(100, 94)));
        assert!(warm_up.advance(at(2), progress(100, 95)));
        assert!(
            warm_up.advance(at(3), progress(100, 0)),
            "it does not start again"
        );
    }

    #[test]
    fn it_is_over_after_20_s_in_any_case() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.advance(at(50), WarmUpProgress::default));
        assert!(!warm_up.advance(at(69), progress(10, 0)));
        assert!(warm_up.advance(at(70), WarmUpProgress::default));
    }

    #[test]
    fn without_agents_it_is_over_once_the_leases_are_listed() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.advance(at(0), WarmUpProgress::default));
        assert!(warm_up.advance(at(0), progress(0, 0)));
        assert!(WarmUp::none().advance(at(0), WarmUpProgress::default));
    }
}
