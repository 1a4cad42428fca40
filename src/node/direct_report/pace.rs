//! When one replica is told. Pure: the time, the newest report and what came of the last one in, the next step out.

use std::time::Duration;

use backon::ExponentialBackoff;
use fastrand::Rng;

use crate::cluster::backoff::backoff;
use crate::crd::report::{INTERVAL, LONGEST_INTERVAL};
use crate::engine::time::BootTime;

/// Between two reports, whatever they tell; longer where the replica wants fewer of them.
const LEAST: Duration = Duration::from_secs(1);
/// A change is told after this part of the interval at the earliest.
const PARTS: u32 = 10;
/// The pause after a failure; it doubles with each further one, up to the other. By chance up to twice as long.
const PAUSES: [Duration; 2] = [LEAST, Duration::from_secs(5)];
/// Who is asked to wait waits up to this part longer, so that not everybody comes back at once.
const SPREAD: f64 = 0.25;

/// Which report is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Newest {
    /// Its number.
    pub sequence: i64,
    /// The number of the last one that told of a change.
    pub changed: i64,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Send the newest report, and tell [`Pace::came`] what came of it.
    Send,
    /// Nothing for so long.
    Wait(Duration),
    /// Nothing until there is a newer one.
    Rest,
}

/// What came of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The replica took it, and wants the next after so long.
    Taken(Duration),
    /// It did not, or did not answer; it may have said how long to wait.
    Failed(Option<Duration>),
}

/// The pace of one replica.
#[derive(Debug)]
pub struct Pace {
    random: Rng,
    /// Nothing is sent before.
    due: BootTime,
    interval: Duration,
    /// The last report that was taken: its number, and when it was sent.
    taken: Option<(i64, BootTime)>,
    /// The same of the last one that was sent.
    sent: (i64, BootTime),
    /// While it fails.
    backoff: Option<ExponentialBackoff>,
}

impl Pace {
    /// The first report goes out at a random moment of the first interval: when a replica appears, every agent of the
    /// cluster sees it at once.
    pub fn new(now: BootTime, mut random: Rng) -> Self {
        Self {
            due: now + INTERVAL.mul_f64(random.f64()),
            random,
            interval: INTERVAL,
            taken: None,
            sent: (0, now),
            backoff: None,
        }
    }

    /// What to do now.
    pub fn step(&mut self, now: BootTime, newest: Option<Newest>) -> Step {
        let Some(newest) = newest.filter(|newest| self.is_wanted(now, *newest)) else {
            return Step::Rest;
        };
        let left = self.due.since(now);
        if !left.is_zero() {
            return Step::Wait(left);
        }
        self.sent = (newest.sequence, now);
        Step::Send
    }

    /// One that was taken is not told again, and one that tells of no change is left out where the one after it is still
    /// in time.
    fn is_wanted(&self, now: BootTime, newest: Newest) -> bool {
        let Some((taken, at)) = self.taken else {
            return true;
        };
        let news = newest.changed > taken || self.backoff.is_some();
        let in_time = now + INTERVAL <= at + self.interval;
        newest.sequence > taken && (news || !in_time)
    }

    /// What came of the report that was sent.
    pub fn came(&mut self, now: BootTime, outcome: Outcome) {
        match outcome {
            Outcome::Taken(interval) => {
                self.interval = interval;
                self.taken = Some(self.sent);
                self.backoff = None;
                self.due = self.sent.1 + LEAST.max(self.interval / PARTS);
            }
            Outcome::Failed(wait) => {
                let wait = wait.unwrap_or_default().min(LONGEST_INTERVAL);
                let wait = wait.mul_f64(1.0 + SPREAD * self.random.f64());
                let [least, most] = PAUSES;
                let backoff = self.backoff.get_or_insert_with(|| backoff(least, most));
                self.due = now + wait.max(backoff.next().unwrap_or(most));
            }
        }
    }

    /// The next report is to be expected within so long.
    pub const fn interval(&self) -> Duration {
        self.interval
    }
}

#[cfg(test)]
#[path = "pace_tests.rs"]
mod tests;
