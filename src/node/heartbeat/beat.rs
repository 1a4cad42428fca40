//! When the Lease is read, created or renewed, and how often. Pure: the time and what came of each call in, the next
//! step out.

use std::time::Duration;

use fastrand::Rng;

use super::INTERVAL;
use crate::engine::time::BootTime;

/// A period is so much longer or shorter by chance, so that agents that started together do not stay together.
const JITTER: f64 = 0.04;
/// An outsider may take the agent for gone when so many intervals passed.
const INTERVALS: u32 = 4;
/// The pause after a first failure; it doubles with each further one, up to [`INTERVAL`].
const PAUSE: Duration = Duration::from_millis(500);
/// No server is obeyed for longer when it asks to be left alone.
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// So many answers in a row may lead to another call at once: from a conflict by way of a read to a create, and one
/// more.
const MOST_AT_ONCE: u32 = 3;
/// What changed is written within this time, so that those who learned of it together do not write together.
const SOON: Duration = Duration::from_secs(2);
/// While the sampling loop stands still it is looked at this often.
const LOOK: Duration = Duration::from_secs(1);

/// A call to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Read the Lease.
    Read,
    /// Create it.
    Create,
    /// Write it, with the version of the object that the last call returned as a precondition.
    Renew,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Call the API server, and tell [`Beat::came`] what came of it. The Lease holds for `holds`.
    Call {
        /// What to call.
        call: Call,
        /// `leaseDurationSeconds`.
        holds: Duration,
    },
    /// Nothing for so long, or until `acknowledged` changes.
    Wait(Duration),
    /// The sampling loop stands still: nothing for so long.
    Stalled(Duration),
}

/// What came of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The Lease was read, and is there.
    Found,
    /// It was created or written.
    Renewed,
    /// It is not there.
    Missing,
    /// It is not as it was thought to be.
    Conflict,
    /// Anything else; the server may have said how long to wait.
    Failed(Option<Duration>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    Absent,
    Present,
}

/// The heartbeat of one agent.
#[derive(Debug)]
pub struct Beat {
    random: Rng,
    relaxed: Duration,
    stuck_after: Duration,
    known: Known,
    /// When this period's first call began.
    began: Option<BootTime>,
    /// The period is over: the next call begins another.
    over: bool,
    /// Nothing is done before.
    due: BootTime,
    /// The interval that the Lease was last written for, and that of the call under way.
    interval: Duration,
    asked: Duration,
    failures: u32,
    at_once: u32,
}

impl Beat {
    /// The first call is at a random moment of the first interval.
    pub fn new(relaxed: Duration, stuck_after: Duration, mut random: Rng, now: BootTime) -> Self {
        Self {
            due: now + INTERVAL.mul_f64(random.f64()),
            random,
            relaxed: relaxed.max(INTERVAL),
            stuck_after,
            known: Known::Nothing,
            began: None,
            over: true,
            interval: INTERVAL,
            asked: INTERVAL,
            failures: 0,
            at_once: 0,
        }
    }

    /// What to do now. `turned` is when the sampling loop turned last; `acknowledged`: the controller hears of the node
    /// by other means.
    pub fn step(&mut self, now: BootTime, turned: Option<BootTime>, acknowledged: bool) -> Step {
        let left = self.due(acknowledged).since(now);
        if !left.is_zero() {
            return Step::Wait(left);
        }
        if turned.is_none_or(|turned| now.since(turned) > self.stuck_after) {
            return Step::Stalled(LOOK);
        }
        // A retry belongs to the period of the call that failed.
        let late = |began| now.since(began) >= INTERVAL;
        if std::mem::take(&mut self.over) || self.began.is_none_or(late) {
            self.began = Some(now);
        }
        self.asked = if acknowledged { self.relaxed } else { INTERVAL };
        let call = match self.known {
            Known::Nothing => Call::Read,
            Known::Absent => Call::Create,
            Known::Present => Call::Renew,
        };
        Step::Call {
            call,
            holds: self.asked * INTERVALS,
        }
    }

    /// When the next call is due: what was to come later, while reports were acknowledged, comes sooner when they no
    /// longer are.
    fn due(&self, acknowledged: bool) -> BootTime {
        match self.began {
            Some(began) if !acknowledged && self.failures == 0 => {
                self.due.min(began + INTERVAL.mul_f64(1.0 + JITTER))
            }
            _ => self.due,
        }
    }

    /// The Lease is to be renewed within [`SOON`], unless the last call failed.
    pub fn hurry(&mut self, now: BootTime) {
        if self.failures == 0 {
            self.due = self.due.min(now + SOON.mul_f64(self.random.f64()));
        }
    }

    /// The call came to its end.
    pub fn came(&mut self, now: BootTime, outcome: Outcome) {
        match outcome {
            Outcome::Renewed => return self.renewed(now),
            Outcome::Found => self.known = Known::Present,
            Outcome::Missing => self.known = Known::Absent,
            Outcome::Conflict => self.known = Known::Nothing,
            Outcome::Failed(wait) => return self.failed(now, wait),
        }
        self.at_once += 1;
        if self.at_once > MOST_AT_ONCE {
            return self.failed(now, None);
        }
        // At once: also where the call itself came sooner than it was due.
        self.due = now;
    }

    fn renewed(&mut self, now: BootTime) {
        self.known = Known::Present;
        let relaxes = self.asked > self.interval;
        self.interval = self.asked;
        (self.failures, self.at_once, self.over) = (0, 0, true);
        let pause = if relaxes {
            // A fleet begins to relax within the same few seconds: chance spreads it over the whole interval.
            INTERVAL + self.interval.mul_f64(self.random.f64())
        } else {
            let jitter = JITTER * (2.0 * self.random.f64() - 1.0);
            self.interval.mul_f64(1.0 + jitter)
        };
        self.due = self.began.unwrap_or(now) + pause;
    }

    fn failed(&mut self, now: BootTime, wait: Option<Duration>) {
        let pause = PAUSE * (1 << self.failures.min(10));
        let pause = pause.min(INTERVAL).mul_f64(0.5 + self.random.f64() / 2.0);
        let wait = wait.unwrap_or_default().min(LONGEST_PAUSE);
        // Whom the server sends away together does not come back together.
        let wait = wait.mul_f64(1.0 + self.random.f64() / 4.0);
        self.due = now + pause.max(wait);
        self.failures = self.failures.saturating_add(1);
        self.at_once = 0;
    }

    /// The interval that the Lease was last written for.
    pub const fn interval(&self) -> Duration {
        self.interval
    }
}

#[cfg(test)]
#[path = "beat_tests.rs"]
mod tests;
