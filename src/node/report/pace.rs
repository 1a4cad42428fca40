//! When the status is written: soon after a change of state, and now and then while something is in force; never
//! because a value moves. How far an emergency stop has come is waited for by people, and whether a node is closed by the
//! controller, which keeps most nodes open.

use std::time::Duration;

use jiff::Timestamp;

use crate::crd::NodeWatermarkStatus;
use crate::crd::node_watermark::condition::STOPPED;
use crate::crd::node_watermark::scheduling::ENABLED;
use crate::engine::time::BootTime;

/// Two writes are at least so far apart.
const LEAST: Duration = Duration::from_secs(10);
/// Of which the second tells what others wait for.
const URGENT: Duration = Duration::from_secs(1);
/// While something is in force, values are not older than this.
const MOST: Duration = Duration::from_mins(5);
/// What was written is seen long before.
const LOST: Duration = Duration::from_mins(1);

/// Remembers what was written.
#[derive(Debug, Default)]
pub struct Pace {
    written: Option<NodeWatermarkStatus>,
    /// The time that it bears.
    time: Option<Timestamp>,
    /// That of the one which it was written over.
    over: Option<Timestamp>,
    /// Nobody has told of it.
    untold: bool,
    at: Option<BootTime>,
}

/// What to do about a status now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Write it.
    Write,
    /// Look again after so long.
    Wait(Duration),
    /// Nothing until it changes.
    Rest,
}

impl Pace {
    /// What to do about the status as it is now. `over` is the time that the one bears which stands there, as far as was
    /// told: it may be one of a backup.
    pub fn step(
        &mut self,
        status: &NodeWatermarkStatus,
        over: Option<Timestamp>,
        now: BootTime,
    ) -> Step {
        self.untold &= over != self.time;
        // A watch that tells nothing any more tells of no other status either.
        let stands = over == self.time || self.untold && over == self.over;
        let (Some(written), Some(at)) = (&self.written, self.at) else {
            return match self.at.map(|at| LEAST.saturating_sub(now.since(at))) {
                Some(left) if !left.is_zero() => Step::Wait(left),
                _ => Step::Write,
            };
        };
        let due = if says_the_same(written, status) {
            match (in_force(status), stands) {
                (false, true) => return Step::Rest,
                (true, true) => MOST,
                (_, false) => LOST,
            }
        } else if stop(written) == stop(status) && closing(written) == closing(status) {
            LEAST
        } else {
            URGENT
        };
        let left = due.saturating_sub(now.since(at));
        if left.is_zero() {
            Step::Write
        } else {
            Step::Wait(left)
        }
    }

    /// It was written, with this time, over the one of another.
    pub fn wrote(
        &mut self,
        status: NodeWatermarkStatus,
        over: Option<Timestamp>,
        time: Timestamp,
        now: BootTime,
    ) {
        self.written = Some(status);
        self.over = over;
        self.untold = true;
        self.time = Some(time);
        self.at = Some(now);
    }

    /// The object is another, or gone: what was written is not there any more.
    pub fn forget(&mut self) {
        self.written = None;
    }
}

fn in_force(status: &NodeWatermarkStatus) -> bool {
    let closed = status.scheduling.as_ref();
    closed.is_some_and(crate::crd::node_watermark::SchedulingStatus::is_disabled)
        || !status.throttled.is_empty()
        || status.rules.iter().any(|rule| rule.state != "Normal")
}

/// How far an emergency stop has come; `None`: there is none.
fn stop(status: &NodeWatermarkStatus) -> Option<&str> {
    let mut conditions = status.conditions.iter();
    let stopped = conditions.find(|it| it.type_ == STOPPED)?;
    Some(&stopped.reason)
}

/// The effect of the taint, and whether there is to be one.
fn closing(status: &NodeWatermarkStatus) -> (&str, bool) {
    let scheduling = status.scheduling.as_ref();
    scheduling.map_or((ENABLED, false), |it| (&it.state, !it.rules.is_empty()))
}

/// But for how high values are.
fn says_the_same(a: &NodeWatermarkStatus, b: &NodeWatermarkStatus) -> bool {
    let masked = |status: &NodeWatermarkStatus| {
        let mut status = status.clone();
        for rule in &mut status.rules {
            rule.value = rule.value.map(|_| 0.0);
            rule.judged_by = None;
        }
        status
    };
    masked(a) == masked(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::node_watermark::{RuleStatus, SchedulingStatus};

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    /// The time that all that is written bears.
    const TIME: Timestamp = Timestamp::UNIX_EPOCH;

    /// Over what was written last.
    fn step(pace: &mut Pace, status: &NodeWatermarkStatus, now: BootTime) -> Step {
        pace.step(status, Some(TIME), now)
    }

    fn wrote(pace: &mut Pace, status: NodeWatermarkStatus, now: BootTime) {
        pace.wrote(status, None, TIME, now);
    }

    fn status(state: &str, value: f64) -> NodeWatermarkStatus {
        let rule = RuleStatus {
            state: state.to_owned(),
            value: Some(value),
            ..RuleStatus::default()
        };
        NodeWatermarkStatus {
            rules: vec![rule],
            ..NodeWatermarkStatus::default()
        }
    }

    #[test]
    fn a_change_of_state_is_written_at_once_but_not_more_often_than_every_ten_seconds() {
        let mut pace = Pace::default();
        assert_eq!(
            step(&mut pace, &status("Normal", 1.0), at(100)),
            Step::Write
        );
        wrote(&mut pace, status("Normal", 1.0), at(100));
        assert_eq!(
            step(&mut pace, &status("Breached", 9.0), at(103)),
            Step::Wait(Duration::from_secs(7))
        );
        assert_eq!(
            step(&mut pace, &status("Breached", 9.0), at(110)),
            Step::Write
        );
    }

    #[test]
    fn a_first_value_is_written_and_no_later_one_at_rest() {
        let mut pace = Pace::default();
        let mut first = status("Normal", 1.0);
        first.rules[0].value = None;
        wrote(&mut pace, first, at(100));
        assert_eq!(
            step(&mut pace, &status("Normal", 1.0), at(110)),
            Step::Write
        );
        wrote(&mut pace, status("Normal", 1.0), at(110));
        assert_eq!(
            step(&mut pace, &status("Normal", 2.0), at(1000)),
            Step::Rest
        );
    }

    #[test]
    fn how_far_an_emergency_stop_has_come_is_written_after_a_second() {
        let stopped = |reason: &str| {
            let condition = serde_json::json!({
                "type": STOPPED, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
            });
            NodeWatermarkStatus {
                conditions: vec![serde_json::from_value(condition).expect("a condition")],
                ..status("Normal", 1.0)
            }
        };
        let mut pace = Pace::default();
        wrote(&mut pace, status("Breached", 9.0), at(100));
        assert_eq!(
            step(&mut pace, &stopped("Releasing"), at(100)),
            Step::Wait(Duration::from_secs(1))
        );
        assert_eq!(step(&mut pace, &stopped("Releasing"), at(101)), Step::Write);
        wrote(&mut pace, stopped("Releasing"), at(101));
        assert_eq!(step(&mut pace, &stopped("Released"), at(102)), Step::Write);
        wrote(&mut pace, stopped("Released"), at(102));
        assert_eq!(step(&mut pace, &stopped("Released"), at(9999)), Step::Rest);
        assert_eq!(
            step(&mut pace, &status("Normal", 1.0), at(9999)),
            Step::Write
        );
    }

    #[test]
    fn that_a_node_closes_and_opens_is_written_after_a_second() {
        let closes = |state: &str, rules: &[&str]| NodeWatermarkStatus {
            scheduling: Some(SchedulingStatus {
                state: state.to_owned(),
                rules: rules.iter().map(|rule| (*rule).to_owned()).collect(),
                since: None,
            }),
            ..NodeWatermarkStatus::default()
        };
        let second = Step::Wait(Duration::from_secs(1));
        let mut pace = Pace::default();
        wrote(&mut pace, NodeWatermarkStatus::default(), at(100));
        // It is open, as any node is of which nothing is known yet.
        assert_eq!(
            step(&mut pace, &closes("Enabled", &[]), at(100)),
            Step::Wait(Duration::from_secs(10))
        );
        assert_eq!(
            step(&mut pace, &closes("Enabled", &["q/r"]), at(100)),
            second
        );
        wrote(&mut pace, closes("Enabled", &["q/r"]), at(101));
        assert_eq!(
            step(&mut pace, &closes("NoSchedule", &["q/r"]), at(101)),
            second
        );
        wrote(&mut pace, closes("NoSchedule", &["q/r"]), at(102));
        // The controller has heard of it by now: another rule that asks for the same is no news.
        assert_eq!(
            step(&mut pace, &closes("NoSchedule", &["q/r", "q/s"]), at(102)),
            Step::Wait(Duration::from_secs(10))
        );
        assert_eq!(
            step(&mut pace, &closes("PreferNoSchedule", &["q/r"]), at(103)),
            Step::Write
        );
        wrote(&mut pace, closes("PreferNoSchedule", &["q/r"]), at(103));
        assert_eq!(
            step(&mut pace, &closes("Enabled", &[]), at(104)),
            Step::Write
        );
    }

    #[test]
    fn a_value_that_moves_is_written_every_five_minutes_while_in_force_and_never_at_rest() {
        let mut pace = Pace::default();
        wrote(&mut pace, status("Normal", 1.0), at(0));
        assert_eq!(
            step(&mut pace, &status("Normal", 2.0), at(9999)),
            Step::Rest
        );
        wrote(&mut pace, status("Breached", 9.0), at(10_000));
        assert_eq!(
            step(&mut pace, &status("Breached", 8.0), at(10_060)),
            Step::Wait(Duration::from_mins(4))
        );
        assert_eq!(
            step(&mut pace, &status("Breached", 8.0), at(10_300)),
            Step::Write
        );
    }

    #[test]
    fn an_object_that_was_made_anew_gets_its_status_anew() {
        let mut pace = Pace::default();
        wrote(&mut pace, status("Normal", 1.0), at(0));
        pace.forget();
        assert_eq!(
            step(&mut pace, &status("Normal", 1.0), at(4)),
            Step::Wait(Duration::from_secs(6))
        );
        assert_eq!(step(&mut pace, &status("Normal", 1.0), at(10)), Step::Write);
    }

    #[test]
    fn a_status_of_a_backup_that_stands_there_is_written_over() {
        let mut pace = Pace::default();
        let mut over = |over, now| {
            let calm = status("Normal", 1.0);
            let step = pace.step(&calm, over, now);
            if step == Step::Write {
                pace.wrote(calm, over, TIME, now);
            }
            step
        };
        let earlier = Some(TIME - Duration::from_hours(1));
        assert_eq!(over(earlier, at(100)), Step::Write);
        // Nobody tells of what was just written, or of anything.
        assert_eq!(over(earlier, at(9999)), Step::Rest);
        assert_eq!(over(Some(TIME), at(10_000)), Step::Rest);
        // The last one again, or the object as it was before there was one.
        for (backup, since) in [(earlier, 20_000), (None, 30_000)] {
            assert_eq!(over(backup, at(since)), Step::Write);
            assert_eq!(over(backup, at(since + 5000)), Step::Rest);
            assert_eq!(over(Some(TIME), at(since + 5000)), Step::Rest);
        }
        // What is told late of an earlier write is not in the way.
        let half = Step::Wait(Duration::from_secs(30));
        assert_eq!(over(earlier, at(30_030)), half);
        assert_eq!(over(Some(TIME), at(30_031)), Step::Rest);
    }
}
