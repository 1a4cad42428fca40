//! Whether the controller hears of the node without its Lease. Pure.

use std::time::Duration;

use super::DEADLINE;
use crate::crd::report::Acknowledgement;
use crate::engine::time::BootTime;

/// So many reports in a row may go without an acknowledgement of the leader, as they do while another takes over.
const INTERVALS: u32 = 2;

/// What the leader acknowledged.
#[derive(Clone, Copy, Debug, Default)]
pub struct Acknowledged {
    epoch: u64,
    until: BootTime,
}

impl Acknowledged {
    /// A replica answered a report that was sent then; whether that was an acknowledgement of the leader. One of an
    /// earlier term is none, while that of a later one holds: whoever was stopped for a while may not know yet that it
    /// leads no more.
    pub fn hear(&mut self, sent: BootTime, answer: &Acknowledgement) -> bool {
        let epoch = answer.epoch.unwrap_or_default();
        let is_past = epoch < self.epoch && self.left(sent).is_some();
        let counts = answer.leading && !is_past;
        if counts {
            self.epoch = epoch;
            self.until = self
                .until
                .max(sent + answer.next_interval() * INTERVALS + DEADLINE);
        }
        counts
    }

    /// For how long it still holds; `None`: the controller knows the node by its Lease alone.
    pub fn left(&self, now: BootTime) -> Option<Duration> {
        let left = self.until.since(now);
        (!left.is_zero()).then_some(left)
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
        }
    }

    #[test]
    fn two_reports_may_go_astray_and_no_more() {
        let mut known = Acknowledged::default();
        assert_eq!(known.left(at(0)), None);
        assert!(known.hear(at(0), &answer(7, true)));
        assert_eq!(known.left(at(24)), Some(Duration::from_secs(1)));
        assert_eq!(known.left(at(25)), None);
        assert!(known.hear(
            at(30),
            &Acknowledgement {
                next_interval_seconds: 30,
                ..answer(7, true)
            }
        ));
        assert_eq!(known.left(at(94)), Some(Duration::from_secs(1)));
    }

    #[test]
    fn a_standby_acknowledges_nothing() {
        let mut known = Acknowledged::default();
        assert!(!known.hear(at(0), &answer(7, false)));
        assert_eq!(known.left(at(0)), None);
        known.hear(at(0), &answer(7, true));
        assert!(!known.hear(at(10), &answer(7, false)));
        assert_eq!(known.left(at(25)), None, "it prolongs nothing");
    }

    #[test]
    fn who_led_before_acknowledges_nothing_while_another_does() {
        let mut known = Acknowledged::default();
        known.hear(at(0), &answer(7, true));
        assert!(known.hear(at(1), &answer(9, true)));
        assert!(!known.hear(at(10), &answer(7, true)));
        assert_eq!(known.left(at(26)), None);
        // Versions begin anew where an API server is put back from a backup.
        assert!(known.hear(at(30), &answer(3, true)));
        assert!(known.left(at(30)).is_some());
    }
}
