//! Whether enough is known to answer for the cluster. Pure.
//!
//! A replica that has listened for a while has all reports, so that a failover needs no warm-up. Where all replicas start
//! at once nobody has any, and a list that says nothing of most nodes would be worse than none.

use std::time::Duration;

use crate::engine::time::BootTime;

/// It never takes longer: agents report every 10 s, and find a new replica within another 10.
pub const MOST: Duration = Duration::from_secs(20);
/// So many of a hundred living agents have to have reported.
const ENOUGH_PERCENT: usize = 95;

/// How much is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Heard {
    /// Agents that hold their Lease; `None`: the Leases are not known yet.
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

/// The warm-up of one replica.
#[derive(Debug, Default)]
pub struct WarmUp {
    begun: Option<BootTime>,
    over: bool,
}

impl WarmUp {
    /// One that is not needed.
    pub const fn none() -> Self {
        Self {
            begun: None,
            over: true,
        }
    }

    /// Whether it is over. It begins with the first call, and once over stays so.
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
    fn it_is_over_when_95_of_100_living_agents_have_reported() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.is_over(at(0), heard(100, 0)));
        assert!(!warm_up.is_over(at(1), heard(100, 94)));
        assert!(warm_up.is_over(at(2), heard(100, 95)));
        assert!(warm_up.is_over(at(3), heard(100, 0)), "it does not return");
    }

    #[test]
    fn it_is_over_after_20_s_whoever_has_reported() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.is_over(at(50), Heard::default));
        assert!(!warm_up.is_over(at(69), heard(10, 0)));
        assert!(warm_up.is_over(at(70), Heard::default));
    }

    #[test]
    fn a_cluster_without_agents_waits_for_nothing_but_to_know_that() {
        let mut warm_up = WarmUp::default();
        assert!(!warm_up.is_over(at(0), Heard::default));
        assert!(warm_up.is_over(at(0), heard(0, 0)));
        assert!(WarmUp::none().is_over(at(0), Heard::default));
    }
}
