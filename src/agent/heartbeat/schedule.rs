//! Decides when the Lease is read, created or renewed. Pure: takes the time and the outcome of each call, returns the
//! next step.

use std::time::Duration;

use fastrand::Rng;

use super::INTERVAL;
use crate::cluster::backoff::exponential;
use crate::engine::time::BootTime;

/// Jitter of a period, so that agents that started together do not stay in step.
const JITTER: f64 = 0.04;
/// `leaseDurationSeconds` in intervals.
const DURATION_INTERVALS: u32 = 4;
/// The delay after the first failure; it doubles with each further one, up to [`INTERVAL`].
const MIN_RETRY_DELAY: Duration = Duration::from_millis(500);
/// Upper limit for a server's Retry-After.
const MAX_RETRY_AFTER: Duration = Duration::from_mins(1);
/// How many answers in a row may lead to another call at once: from a conflict over a read to a create, and one more.
const MAX_IMMEDIATE_CALLS: u32 = 3;
/// A change is written at a random moment within this time, so that not all agents write at once.
const CHANGE_DELAY: Duration = Duration::from_secs(2);
/// How often a stuck sampling loop is checked.
const STUCK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// A call to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Reads the Lease.
    Read,
    /// Creates it.
    Create,
    /// Writes it, with the resource version that the last call returned as precondition.
    Renew,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RenewalStep {
    /// Call the API server and pass the outcome to [`RenewalSchedule::record`].
    Call {
        /// Which call.
        call: Call,
        /// `leaseDurationSeconds`.
        duration: Duration,
    },
    /// Wait this long, or until `acknowledged` changes.
    Wait(Duration),
    /// The sampling loop is stuck: wait this long.
    Stuck(Duration),
}

/// The outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The Lease was read and exists.
    Found,
    /// It was created or written.
    Renewed,
    /// It does not exist.
    Missing,
    /// It was changed by another writer.
    Conflict,
    /// Any other failure, with the server's Retry-After.
    Failed(Option<Duration>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    Absent,
    Present,
}

/// The renewal schedule of one agent.
#[derive(Debug)]
pub struct RenewalSchedule {
    random: Rng,
    relaxed: Duration,
    stuck_after: Duration,
    known: Known,
    /// When this period's first call started.
    period_start: Option<BootTime>,
    /// The period has ended: the next call starts another.
    period_over: bool,
    /// No call before then.
    due: BootTime,
    /// The interval that the Lease was last written for, and that of the call under way.
    interval: Duration,
    requested: Duration,
    failures: u32,
    immediate_calls: u32,
}

impl RenewalSchedule {
    /// The first call is at a random moment of the first interval.
    pub fn new(relaxed: Duration, stuck_after: Duration, mut random: Rng, now: BootTime) -> Self {
        Self {
            due: now + INTERVAL.mul_f64(random.f64()),
            random,
            relaxed: relaxed.max(INTERVAL),
            stuck_after,
            known: Known::Nothing,
            period_start: None,
            period_over: true,
            interval: INTERVAL,
            requested: INTERVAL,
            failures: 0,
            immediate_calls: 0,
        }
    }

    /// What to do now. `last_run` is the last run of the sampling loop; `acknowledged`: the leader acknowledges direct reports.
    pub fn step(
        &mut self,
        now: BootTime,
        last_run: Option<BootTime>,
        acknowledged: bool,
    ) -> RenewalStep {
        let left = self.due(acknowledged).since(now);
        if !left.is_zero() {
            return RenewalStep::Wait(left);
        }
        if last_run.is_none_or(|last_run| now.since(last_run) > self.stuck_after) {
            return RenewalStep::Stuck(STUCK_CHECK_INTERVAL);
        }
        // A retry belongs to the period of the call that failed.
        let late = |period_start| now.since(period_start) >= INTERVAL;
        if std::mem::take(&mut self.period_over) || self.period_start.is_none_or(late) {
            self.period_start = Some(now);
        }
        self.requested = if acknowledged { self.relaxed } else { INTERVAL };
        let call = match self.known {
            Known::Nothing => Call::Read,
            Known::Absent => Call::Create,
            Known::Present => Call::Renew,
        };
        RenewalStep::Call {
            call,
            duration: self.requested * DURATION_INTERVALS,
        }
    }

    /// When the next call is due: earlier than planned when reports are no longer acknowledged.
    fn due(&self, acknowledged: bool) -> BootTime {
        match self.period_start {
            Some(period_start) if !acknowledged && self.failures == 0 => {
                self.due.min(period_start + INTERVAL.mul_f64(1.0 + JITTER))
            }
            _ => self.due,
        }
    }

    /// Makes the next renewal due within [`CHANGE_DELAY`], unless the last call failed.
    pub fn plan_early_renewal(&mut self, now: BootTime) {
        if self.failures == 0 {
            self.due = self.due.min(now + CHANGE_DELAY.mul_f64(self.random.f64()));
        }
    }

    /// Records the outcome of a call.
    pub fn record(&mut self, now: BootTime, outcome: CallOutcome) {
        match outcome {
            CallOutcome::Renewed => return self.renewed(now),
            CallOutcome::Found => self.known = Known::Present,
            CallOutcome::Missing => self.known = Known::Absent,
            CallOutcome::Conflict => self.known = Known::Nothing,
            CallOutcome::Failed(wait) => return self.failed(now, wait),
        }
        self.immediate_calls += 1;
        if self.immediate_calls > MAX_IMMEDIATE_CALLS {
            return self.failed(now, None);
        }
        // At once, even if the call itself was made before it was due.
        self.due = now;
    }

    fn renewed(&mut self, now: BootTime) {
        self.known = Known::Present;
        let relaxes = self.requested > self.interval;
        self.interval = self.requested;
        (self.failures, self.immediate_calls, self.period_over) = (0, 0, true);
        let pause = if relaxes {
            // All agents relax within the same few seconds: this spreads them over the whole interval.
            INTERVAL + self.interval.mul_f64(self.random.f64())
        } else {
            let jitter = JITTER * (2.0 * self.random.f64() - 1.0);
            self.interval.mul_f64(1.0 + jitter)
        };
        self.due = self.period_start.unwrap_or(now) + pause;
    }

    fn failed(&mut self, now: BootTime, wait: Option<Duration>) {
        let pause = exponential(MIN_RETRY_DELAY, INTERVAL, self.failures);
        let pause = pause.mul_f64(0.5 + self.random.f64() / 2.0);
        let wait = wait.unwrap_or_default().min(MAX_RETRY_AFTER);
        // Agents that were throttled together do not come back together.
        let wait = wait.mul_f64(1.0 + self.random.f64() / 4.0);
        self.due = now + pause.max(wait);
        self.failures = self.failures.saturating_add(1);
        self.immediate_calls = 0;
    }

    /// The interval that the Lease was last written for.
    pub const fn interval(&self) -> Duration {
        self.interval
    }
}

#[cfg(test)]
#[path = "schedule_tests.rs"]
mod tests;
