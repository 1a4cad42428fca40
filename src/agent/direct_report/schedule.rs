//! Decides when a report is sent to one replica. Pure: takes the time, the newest report and the last outcome, returns the
//! next step.

use std::time::Duration;

use backon::ExponentialBackoff;
use fastrand::Rng;

use crate::cluster::backoff::backoff;
use crate::crd::report::{INTERVAL, MAX_INTERVAL};
use crate::engine::time::BootTime;

/// Minimum interval of reports; longer if the replica wants fewer.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// A change waits at least for this fraction of the interval (1/10).
const CHANGE_FRACTION: u32 = 10;
/// First and longest delay after failures; jittered by up to the delay itself.
const RETRY_DELAYS: [Duration; 2] = [MIN_INTERVAL, Duration::from_secs(5)];
/// Jitter of a Retry-After, so that not all agents come back at once.
const RETRY_AFTER_JITTER: f64 = 0.25;

/// Which report is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newest {
    /// Its sequence.
    pub sequence: i64,
    /// The sequence of the last report with a change.
    pub changed: i64,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendStep {
    /// Send the newest report and pass the outcome to [`ReportSchedule::record`].
    Send,
    /// Wait this long.
    Wait(Duration),
    /// Wait for a newer report.
    Idle,
}

/// The outcome of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendOutcome {
    /// The replica accepted it and wants the next after this interval.
    Accepted(Duration),
    /// It failed or was refused, with the replica's Retry-After.
    Failed(Option<Duration>),
}

/// The schedule of one replica.
#[derive(Debug)]
pub struct ReportSchedule {
    random: Rng,
    /// No report before then.
    due: BootTime,
    interval: Duration,
    /// The last accepted report: its sequence and when it was sent.
    accepted: Option<(i64, BootTime)>,
    /// The same for the last sent report.
    sent: (i64, BootTime),
    /// Set after a failure.
    backoff: Option<ExponentialBackoff>,
}

impl ReportSchedule {
    /// The first report is sent at a random moment of the first interval, because all agents see a new replica at once.
    pub fn new(now: BootTime, mut random: Rng) -> Self {
        Self {
            due: now + INTERVAL.mul_f64(random.f64()),
            random,
            interval: INTERVAL,
            accepted: None,
            sent: (0, now),
            backoff: None,
        }
    }

    /// What to do now.
    pub fn step(&mut self, now: BootTime, newest: Option<Newest>) -> SendStep {
        let Some(newest) = newest.filter(|newest| self.is_wanted(now, *newest)) else {
            return SendStep::Idle;
        };
        let left = self.due.since(now);
        if !left.is_zero() {
            return SendStep::Wait(left);
        }
        self.sent = (newest.sequence, now);
        SendStep::Send
    }

    /// An accepted report is not sent again. A report without a change is skipped if the next one is still in time.
    fn is_wanted(&self, now: BootTime, newest: Newest) -> bool {
        let Some((accepted, at)) = self.accepted else {
            return true;
        };
        let is_urgent = newest.changed > accepted || self.backoff.is_some();
        let in_time = now + INTERVAL <= at + self.interval;
        newest.sequence > accepted && (is_urgent || !in_time)
    }

    /// Records the outcome of the sent report.
    pub fn record(&mut self, now: BootTime, outcome: SendOutcome) {
        match outcome {
            SendOutcome::Accepted(interval) => {
                self.interval = interval;
                self.accepted = Some(self.sent);
                self.backoff = None;
                self.due = self.sent.1 + MIN_INTERVAL.max(self.interval / CHANGE_FRACTION);
            }
            SendOutcome::Failed(wait) => {
                let wait = wait.unwrap_or_default().min(MAX_INTERVAL);
                let wait = wait.mul_f64(1.0 + RETRY_AFTER_JITTER * self.random.f64());
                let [min, max] = RETRY_DELAYS;
                let backoff = self.backoff.get_or_insert_with(|| backoff(min, max));
                self.due = now + wait.max(backoff.next().unwrap_or(max));
            }
        }
    }

    /// The interval within which the next report is expected.
    pub const fn interval(&self) -> Duration {
        self.interval
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
