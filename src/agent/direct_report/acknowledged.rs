//! Whether the leader acknowledges direct reports, so that the Lease can be renewed less often. Pure.

use std::time::Duration;

use super::TIMEOUT;
use crate::crd::report::Acknowledgement;
use crate::engine::time::BootTime;

/// How many reports in a row may lack an acknowledgement of the leader, as during a failover.
const MAX_LOST_REPORTS: u32 = 2;

/// The last acknowledgement of the leader.
#[derive(Clone, Copy, Debug, Default)]
pub struct Acknowledged {
    epoch: u64,
    until: BootTime,
}

impl Acknowledged {
    /// Records a replica's answer to a report sent at `sent`; true if the leader acknowledged it. An answer from an earlier
    /// term does not count while a later one is valid: a replica that was paused may not know yet that it lost the lead.
    pub fn record(&mut self, sent: BootTime, answer: &Acknowledgement) -> bool {
        let epoch = answer.epoch.unwrap_or_default();
        let is_past = epoch < self.epoch && self.remaining(sent).is_some();
        let counts = answer.leading && !is_past;
        if counts {
            self.epoch = epoch;
            self.until = self
                .until
                .max(sent + answer.next_interval() * MAX_LOST_REPORTS + TIMEOUT);
        }
        counts
    }

    /// How long the acknowledgement is still valid; `None`: only the Lease counts.
    pub fn remaining(&self, now: BootTime) -> Option<Duration> {
        let remaining = self.until.since(now);
        (!remaining.is_zero()).then_some(remaining)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(1000 + seconds)
    }

    fn answer(epoch: u64, leading: bool) -> Acknowledgement {
        Acknowledgement {
            epoch: Some(epoch),
            leading,
            next_interval_seconds: 10,
            label_interval_seconds: None,
            busy: false,
        }
    }

    #[test]
    fn at_most_two_reports_may_be_lost() {
        let mut known = Acknowledged::default();
        assert_eq!(known.remaining(at(0)), None);
        assert!(known.record(at(0), &answer(7, true)));
        assert_eq!(known.remaining(at(24)), Some(Duration::from_secs(1)));
        assert_eq!(known.remaining(at(25)), None);
        assert!(known.record(
            at(30),
            &Acknowledgement {
                next_interval_seconds: 30,
                ..answer(7, true)
            }
        ));
        assert_eq!(known.remaining(at(94)), Some(Duration::from_secs(1)));
    }

    #[test]
    fn an_answer_of_a_standby_is_no_acknowledgement() {
        let mut known = Acknowledged::default();
        assert!(!known.record(at(0), &answer(7, false)));
        assert_eq!(known.remaining(at(0)), None);
        known.record(at(0), &answer(7, true));
        assert!(!known.record(at(10), &answer(7, false)));
        assert_eq!(known.remaining(at(25)), None, "it extends nothing");
    }

    #[test]
    fn a_former_leader_does_not_count_while_a_later_one_does() {
        let mut known = Acknowledged::default();
        known.record(at(0), &answer(7, true));
        assert!(known.record(at(1), &answer(9, true)));
        assert!(!known.record(at(10), &answer(7, true)));
        assert_eq!(known.remaining(at(26)), None);
        // Epochs start again when an API server is restored from a backup.
        assert!(known.record(at(30), &answer(3, true)));
        assert!(known.remaining(at(30)).is_some());
    }
}
