//! Decides when the status is written: after a change of state, and every few minutes while something is in force, but
//! not for a changed value alone. Operators wait for the progress of an emergency stop, and the controller for the
//! scheduling state, because it limits how many nodes are closed.

use std::time::Duration;

use jiff::Timestamp;

use crate::crd::NodeWatermarkStatus;
use crate::crd::node_watermark::condition::STOPPED;
use crate::crd::node_watermark::scheduling::ENABLED;
use crate::engine::time::BootTime;

/// Minimum interval of writes.
const MIN_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum interval before an urgent write.
const URGENT_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum age of the values while something is in force.
const MAX_AGE: Duration = Duration::from_mins(5);
/// By this time the watch has shown what was written; otherwise it is written again.
const REWRITE_AFTER: Duration = Duration::from_mins(1);

/// Decides when to write, by what was written.
#[derive(Debug, Default)]
pub struct StatusSchedule {
    written: Option<NodeWatermarkStatus>,
    /// The report time in it.
    time: Option<Timestamp>,
    /// The report time of the status that it replaced.
    replaces: Option<Timestamp>,
    /// The watch has not shown it yet.
    unconfirmed: bool,
    at: Option<BootTime>,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusStep {
    /// Write it.
    Write,
    /// Check again after this time.
    Wait(Duration),
    /// Do nothing until the status changes.
    Idle,
}

impl StatusSchedule {
    /// What to do about the current status. `replaces` is the report time of the status in the API server, as last seen by the
    /// watch: it may come from a restored backup.
    pub fn step(
        &mut self,
        status: &NodeWatermarkStatus,
        replaces: Option<Timestamp>,
        now: BootTime,
    ) -> StatusStep {
        self.unconfirmed &= replaces != self.time;
        // A stalled watch does not mean that the status was replaced.
        let is_current = replaces == self.time || self.unconfirmed && replaces == self.replaces;
        let (Some(written), Some(at)) = (&self.written, self.at) else {
            return match self.at.map(|at| MIN_INTERVAL.saturating_sub(now.since(at))) {
                Some(left) if !left.is_zero() => StatusStep::Wait(left),
                _ => StatusStep::Write,
            };
        };
        let due = if same_except_values(written, status) {
            match (in_force(status), is_current) {
                (false, true) => return StatusStep::Idle,
                (true, true) => MAX_AGE,
                (_, false) => REWRITE_AFTER,
            }
        } else if stop(written) == stop(status)
            && scheduling_state(written) == scheduling_state(status)
        {
            MIN_INTERVAL
        } else {
            URGENT_INTERVAL
        };
        let left = due.saturating_sub(now.since(at));
        if left.is_zero() {
            StatusStep::Write
        } else {
            StatusStep::Wait(left)
        }
    }

    /// Records a write with report time `time` that replaced the status of `replaces`.
    pub fn record_write(
        &mut self,
        status: NodeWatermarkStatus,
        replaces: Option<Timestamp>,
        time: Timestamp,
        now: BootTime,
    ) {
        self.written = Some(status);
        self.replaces = replaces;
        self.unconfirmed = true;
        self.time = Some(time);
        self.at = Some(now);
    }

    /// The object was deleted or recreated: the written status is gone.
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

/// The progress of an emergency stop, if there is one.
fn stop(status: &NodeWatermarkStatus) -> Option<&str> {
    let mut conditions = status.conditions.iter();
    let stopped = conditions.find(|it| it.type_ == STOPPED)?;
    Some(&stopped.reason)
}

/// The effect of the taint, and whether rules want one.
fn scheduling_state(status: &NodeWatermarkStatus) -> (&str, bool) {
    let scheduling = status.scheduling.as_ref();
    scheduling.map_or((ENABLED, false), |it| (&it.state, !it.rules.is_empty()))
}

/// Equal except for the values.
fn same_except_values(a: &NodeWatermarkStatus, b: &NodeWatermarkStatus) -> bool {
    let masked = |status: &NodeWatermarkStatus| {
        let mut status = status.clone();
        status.batch_weight_share = status.batch_weight_share.map(|_| 0);
        for rule in &mut status.rules {
            rule.value = rule.value.map(|_| 0.0);
            rule.earliest_eviction_time = None;
            if let Some(would) = rule
                .would_last_day
                .as_mut()
                .filter(|_| rule.state != "Normal")
            {
                would.active_minutes = 0;
            }
        }
        status
    };
    masked(a) == masked(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::node_watermark::{RuleStatus, SchedulingStatus, WouldLastDay};

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    /// The report time of all writes.
    const TIME: Timestamp = Timestamp::UNIX_EPOCH;

    /// A step with the last written status in the API server.
    fn step(
        schedule: &mut StatusSchedule,
        status: &NodeWatermarkStatus,
        now: BootTime,
    ) -> StatusStep {
        schedule.step(status, Some(TIME), now)
    }

    fn record_write(schedule: &mut StatusSchedule, status: NodeWatermarkStatus, now: BootTime) {
        schedule.record_write(status, None, TIME, now);
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
    fn a_change_of_state_is_written_at_most_every_ten_seconds() {
        let mut schedule = StatusSchedule::default();
        assert_eq!(
            step(&mut schedule, &status("Normal", 1.0), at(100)),
            StatusStep::Write
        );
        record_write(&mut schedule, status("Normal", 1.0), at(100));
        assert_eq!(
            step(&mut schedule, &status("Breached", 9.0), at(103)),
            StatusStep::Wait(Duration::from_secs(7))
        );
        assert_eq!(
            step(&mut schedule, &status("Breached", 9.0), at(110)),
            StatusStep::Write
        );
    }

    #[test]
    fn a_first_value_is_written_and_later_ones_are_not_when_idle() {
        let mut schedule = StatusSchedule::default();
        let mut first = status("Normal", 1.0);
        first.rules[0].value = None;
        record_write(&mut schedule, first, at(100));
        assert_eq!(
            step(&mut schedule, &status("Normal", 1.0), at(110)),
            StatusStep::Write
        );
        record_write(&mut schedule, status("Normal", 1.0), at(110));
        assert_eq!(
            step(&mut schedule, &status("Normal", 2.0), at(1000)),
            StatusStep::Idle
        );
    }

    #[test]
    fn the_progress_of_an_emergency_stop_is_written_after_a_second() {
        let stopped = |reason: &str| {
            let condition = serde_json::json!({
                "type": STOPPED, "status": "True", "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
            });
            NodeWatermarkStatus {
                conditions: vec![serde_json::from_value(condition).expect("a condition")],
                ..status("Normal", 1.0)
            }
        };
        let mut schedule = StatusSchedule::default();
        record_write(&mut schedule, status("Breached", 9.0), at(100));
        assert_eq!(
            step(&mut schedule, &stopped("Releasing"), at(100)),
            StatusStep::Wait(Duration::from_secs(1))
        );
        assert_eq!(
            step(&mut schedule, &stopped("Releasing"), at(101)),
            StatusStep::Write
        );
        record_write(&mut schedule, stopped("Releasing"), at(101));
        assert_eq!(
            step(&mut schedule, &stopped("Released"), at(102)),
            StatusStep::Write
        );
        record_write(&mut schedule, stopped("Released"), at(102));
        assert_eq!(
            step(&mut schedule, &stopped("Released"), at(9999)),
            StatusStep::Idle
        );
        assert_eq!(
            step(&mut schedule, &status("Normal", 1.0), at(9999)),
            StatusStep::Write
        );
    }

    #[test]
    fn a_change_of_scheduling_is_written_after_a_second() {
        let scheduled = |state: &str, rules: &[&str]| NodeWatermarkStatus {
            scheduling: Some(SchedulingStatus {
                state: state.to_owned(),
                rules: rules.iter().map(|rule| (*rule).to_owned()).collect(),
                since: None,
            }),
            ..NodeWatermarkStatus::default()
        };
        let second = StatusStep::Wait(Duration::from_secs(1));
        let mut schedule = StatusSchedule::default();
        record_write(&mut schedule, NodeWatermarkStatus::default(), at(100));
        // Scheduling is enabled, as on any node without a status.
        assert_eq!(
            step(&mut schedule, &scheduled("Enabled", &[]), at(100)),
            StatusStep::Wait(Duration::from_secs(10))
        );
        assert_eq!(
            step(&mut schedule, &scheduled("Enabled", &["q/r"]), at(100)),
            second
        );
        record_write(&mut schedule, scheduled("Enabled", &["q/r"]), at(101));
        assert_eq!(
            step(&mut schedule, &scheduled("NoSchedule", &["q/r"]), at(101)),
            second
        );
        record_write(&mut schedule, scheduled("NoSchedule", &["q/r"]), at(102));
        // The controller knows by now: another rule that wants the same is not urgent.
        assert_eq!(
            step(
                &mut schedule,
                &scheduled("NoSchedule", &["q/r", "q/s"]),
                at(102)
            ),
            StatusStep::Wait(Duration::from_secs(10))
        );
        assert_eq!(
            step(
                &mut schedule,
                &scheduled("PreferNoSchedule", &["q/r"]),
                at(103)
            ),
            StatusStep::Write
        );
        record_write(
            &mut schedule,
            scheduled("PreferNoSchedule", &["q/r"]),
            at(103),
        );
        assert_eq!(
            step(&mut schedule, &scheduled("Enabled", &[]), at(104)),
            StatusStep::Write
        );
    }

    #[test]
    fn a_changed_value_is_written_every_five_minutes_while_in_force() {
        let mut schedule = StatusSchedule::default();
        record_write(&mut schedule, status("Normal", 1.0), at(0));
        assert_eq!(
            step(&mut schedule, &status("Normal", 2.0), at(9999)),
            StatusStep::Idle
        );
        record_write(&mut schedule, status("Breached", 9.0), at(10_000));
        assert_eq!(
            step(&mut schedule, &status("Breached", 8.0), at(10_060)),
            StatusStep::Wait(Duration::from_mins(4))
        );
        assert_eq!(
            step(&mut schedule, &status("Breached", 8.0), at(10_300)),
            StatusStep::Write
        );
    }

    #[test]
    fn the_time_that_a_preview_is_active_is_no_change_before_it_ends() {
        let active = |state: &str, breaches: i64, active_minutes: i64| {
            let mut status = status(state, 1.0);
            status.rules[0].would_last_day = Some(WouldLastDay {
                breaches,
                active_minutes,
                ..WouldLastDay::default()
            });
            status
        };
        let mut schedule = StatusSchedule::default();
        record_write(&mut schedule, active("Breached", 1, 1), at(0));
        let mut waits = |status| step(&mut schedule, &status, at(60)) != StatusStep::Write;
        assert!(waits(active("Breached", 1, 2)));
        assert!(!waits(active("Breached", 2, 2)));
        assert!(!waits(active("Normal", 1, 2)));
        // An hour ended.
        record_write(&mut schedule, active("Normal", 0, 2), at(100));
        let step = step(&mut schedule, &active("Normal", 0, 1), at(3700));
        assert_eq!(step, StatusStep::Write);
    }

    #[test]
    fn a_recreated_object_gets_its_status_again() {
        let mut schedule = StatusSchedule::default();
        record_write(&mut schedule, status("Normal", 1.0), at(0));
        schedule.forget();
        assert_eq!(
            step(&mut schedule, &status("Normal", 1.0), at(4)),
            StatusStep::Wait(Duration::from_secs(6))
        );
        assert_eq!(
            step(&mut schedule, &status("Normal", 1.0), at(10)),
            StatusStep::Write
        );
    }

    #[test]
    fn a_status_from_a_backup_is_overwritten() {
        let mut schedule = StatusSchedule::default();
        let mut overwrite = |replaces, now| {
            let normal = status("Normal", 1.0);
            let step = schedule.step(&normal, replaces, now);
            if step == StatusStep::Write {
                schedule.record_write(normal, replaces, TIME, now);
            }
            step
        };
        let earlier = Some(TIME - Duration::from_hours(1));
        assert_eq!(overwrite(earlier, at(100)), StatusStep::Write);
        // The watch does not show what was just written, or anything.
        assert_eq!(overwrite(earlier, at(9999)), StatusStep::Idle);
        assert_eq!(overwrite(Some(TIME), at(10_000)), StatusStep::Idle);
        // The same backup again, or the object from before it had a status.
        for (backup, since) in [(earlier, 20_000), (None, 30_000)] {
            assert_eq!(overwrite(backup, at(since)), StatusStep::Write);
            assert_eq!(overwrite(backup, at(since + 5000)), StatusStep::Idle);
            assert_eq!(overwrite(Some(TIME), at(since + 5000)), StatusStep::Idle);
        }
        // A late watch event of an earlier write does no harm.
        let half = StatusStep::Wait(Duration::from_secs(30));
        assert_eq!(overwrite(earlier, at(30_030)), half);
        assert_eq!(overwrite(Some(TIME), at(30_031)), StatusStep::Idle);
    }
}
