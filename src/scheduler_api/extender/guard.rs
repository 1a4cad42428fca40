//! When Filter rejects no node: it must never stop scheduling because much is hot, or little is known. Pure.

use std::fmt;
use std::time::Duration;

use crate::engine::time::BootTime;

/// Share of the candidates that may be rejected, in percent.
const MAX_REJECTED: usize = 30;
/// Fewer candidates are never rejected: one of them would be more than the share. The scheduler also asks for single nodes, those
/// that it nominated.
const MIN_CANDIDATES: usize = 4;
/// Filter is in force again after this long without a reason to suspend it.
const RESUME_AFTER: Duration = Duration::from_mins(1);

/// Why no node is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspension {
    /// Half of the candidates, or more, have no recent report.
    Unknown,
    /// Too many would be rejected.
    Hot,
}

impl fmt::Display for Suspension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("half of the nodes have no recent report"),
            Self::Hot => write!(
                f,
                "more than {MAX_REJECTED} % of the nodes would be rejected"
            ),
        }
    }
}

/// A change of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuardChange {
    /// No node is rejected from now on.
    Suspended(Suspension),
    /// Nodes are rejected again.
    Resumed,
}

/// The state.
#[derive(Debug, Default)]
pub struct FilterGuard {
    /// When a request last had a reason.
    suspended: Option<BootTime>,
}

impl FilterGuard {
    /// Whether the nodes of this request may be rejected, and whether that is new.
    pub fn check(
        &mut self,
        candidates: usize,
        rejected: usize,
        unknown: usize,
        now: BootTime,
    ) -> (bool, Option<GuardChange>) {
        if candidates < MIN_CANDIDATES {
            return (false, None);
        }
        let why = if unknown * 2 >= candidates {
            Some(Suspension::Unknown)
        } else if rejected * 100 > candidates * MAX_REJECTED {
            Some(Suspension::Hot)
        } else {
            None
        };
        let Some(why) = why else {
            let over = self
                .suspended
                .is_some_and(|last| now.since(last) >= RESUME_AFTER);
            if over {
                self.suspended = None;
            }
            return (true, over.then_some(GuardChange::Resumed));
        };
        let is_new = self.suspended.replace(now).is_none();
        (false, is_new.then_some(GuardChange::Suspended(why)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn at_most_thirty_percent_are_rejected() {
        let mut guard = FilterGuard::default();
        assert_eq!(guard.check(10, 3, 4, at(0)), (true, None));
        let hot = Some(GuardChange::Suspended(Suspension::Hot));
        assert_eq!(guard.check(10, 4, 0, at(1)), (false, hot));
    }

    #[test]
    fn half_must_be_known() {
        let mut guard = FilterGuard::default();
        assert_eq!(guard.check(10, 0, 4, at(0)), (true, None));
        let unknown = Some(GuardChange::Suspended(Suspension::Unknown));
        assert_eq!(guard.check(10, 1, 5, at(0)), (false, unknown));
    }

    #[test]
    fn a_change_is_said_once() {
        let mut guard = FilterGuard::default();
        assert!(guard.check(10, 9, 0, at(0)).1.is_some());
        assert_eq!(guard.check(10, 9, 0, at(1)), (false, None));
        // Other pods have other candidates.
        assert_eq!(guard.check(10, 1, 0, at(2)), (true, None));
        assert_eq!(guard.check(10, 9, 9, at(3)), (false, None));
        assert_eq!(guard.check(10, 1, 0, at(62)), (true, None));
        assert_eq!(
            guard.check(10, 1, 0, at(63)),
            (true, Some(GuardChange::Resumed))
        );
        assert_eq!(guard.check(10, 1, 0, at(64)), (true, None));
    }

    #[test]
    fn few_candidates_are_never_rejected() {
        let mut guard = FilterGuard::default();
        assert_eq!(guard.check(1, 1, 0, at(0)), (false, None));
        assert_eq!(guard.check(3, 1, 3, at(0)), (false, None));
        assert_eq!(guard.check(0, 0, 0, at(0)), (false, None));
    }
}
