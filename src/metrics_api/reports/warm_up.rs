//! Whether a replica has enough reports to answer for the cluster. Pure.
//!
//! A standby has all reports, so a failover needs no warm-up. But when all replicas start at once, none has any, and a
//! list with hardly any data would be worse than none.

use std::time::Duration;

use crate::engine::time::BootTime;

/// Maximum duration: agents report every 10 s, and find a new replica within another 10 s.
pub const MOST: Duration = Duration::from_secs(20);
/// Percentage of live agents that must have reported.
const ENOUGH_PERCENT: usize = 95;

/// Progress of the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Agents that hold their Lease. `None`: the Leases are not listed yet.
    pub living: Option<usize>,
    /// Those of them that have reported to this replica.
    pub reported: usize,
}

impl Heard {
    const fn is_enough(self) -> bool {
        match self.living {
            Some(living) => self.reported * 100 >= living * ENOUGH_PERCENT,
            None => false,
        }
    }
}

/// Warm-up of a replica.
#[derive(Debug, Default)]
pub struct WarmUp {
    begun: Option<BootTime>,
    over: bool,
}

impl WarmUp {
    /// No warm-up.
    pub const fn none() -> Self {
        Self {
            begun: None,
            over: true,
        }
    }

    /// Whether it is over. It starts with the first call, and never starts again.
    pub fn is_over(&mut self, now: BootTime, heard: impl FnOnce() -> Heard) -> bool {
        if !self.over {
            let begun = *self.begun.get_or_insert(now);
            self.over = now.since(begun) >= MOST || heard().is_enough();
        }
        self.over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    fn heard(living: usize, reported: usize) -> impl FnOnce() -> Heard {
        move || Heard {
            living: Some(living),
            reported,
        }
    }

    #[test]
    fn it_is_over_when_95_percent_of_live_agents_have_reported() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.is_over(at(0), heard(100, 0)));
        assert!(!warm_up.is_over(at(1), heard(100, 94)));
        assert!(warm_up.is_over(at(2), heard(100, 95)));
        assert!(warm_up.is_over(at(3), heard(100, 0)), "it does not start again");
    }

    #[test]
    fn it_is_over_after_20_s_in_any_case() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.is_over(at(50), Heard::default));
        assert!(!warm_up.is_over(at(69), heard(10, 0)));
        assert!(warm_up.is_over(at(70), Heard::default));
    }

    #[test]
    fn without_agents_it_is_over_once_the_leases_are_listed() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.is_over(at(0), Heard::default));
        assert!(warm_up.is_over(at(0), heard(0, 0)));
        assert!(WarmUp::none().is_over(at(0), Heard::default));
    }
}
