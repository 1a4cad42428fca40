//! How often a Preview rule would have acted in the last day, counted by hours of the wall clock.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::Engine;
use super::plan::{PlanChange, RuleState, Transition};
use super::run::Run;

/// Counted are the current hour and this many before.
const HOURS: i64 = 24;
const SECONDS_PER_HOUR: i64 = 3600;

/// What a rule would have done in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WouldCounts {
    /// How many times it became active.
    pub breaches: u32,
    /// Evaluations in which it would have throttled pods further.
    pub throttle_rounds: u32,
    /// Pods that it would have evicted.
    pub evictions: u32,
    /// How long it was active: each evaluation in which it is not Normal counts as one period.
    pub active: Duration,
}

/// What a rule would have done in the last day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WouldReport {
    /// When counting began.
    pub since: Timestamp,
    /// When it last became active.
    pub last_breach: Option<Timestamp>,
    /// The sums.
    #[serde(flatten)]
    pub counts: WouldCounts,
}

/// The counts of a rule by hour. Times when the agent did not run are not counted. Persisted across restarts and reboots.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct WouldHistory {
    since: Option<Timestamp>,
    /// The last evaluation.
    evaluated: Option<Timestamp>,
    last_breach: Option<Timestamp>,
    /// The hours with counts, since the epoch, in order.
    hours: Vec<(i64, WouldCounts)>,
}

impl WouldCounts {
    fn add(&mut self, other: Self) {
        self.breaches = self.breaches.saturating_add(other.breaches);
        self.throttle_rounds = self.throttle_rounds.saturating_add(other.throttle_rounds);
        self.evictions = self.evictions.saturating_add(other.evictions);
        self.active = self.active.saturating_add(other.active);
    }

    /// The counts of one evaluation of a rule.
    fn of(run: &Run, period: Duration, transitions: &[Transition]) -> Self {
        let mut counts = Self::default();
        // Throttles that are restored afterwards are no action.
        if run.machine.in_force() {
            counts.active = period;
        }
        for Transition { rule, change, .. } in transitions {
            if *rule != run.rule.id {
                continue;
            }
            match change {
                PlanChange::State {
                    from: RuleState::Normal,
                    ..
                } => counts.breaches += 1,
                PlanChange::Throttle { .. } if run.machine.in_force() => counts.throttle_rounds = 1,
                PlanChange::Evict { .. } => counts.evictions += 1,
                _ => {}
            }
        }
        counts
    }
}

impl WouldHistory {
    /// Whether nothing was counted yet.
    pub(super) const fn is_new(&self) -> bool {
        self.since.is_none()
    }

    /// Adds the counts of an evaluation at `time`.
    fn add(&mut self, time: Timestamp, counts: WouldCounts) {
        let day = SignedDuration::from_hours(HOURS);
        let is_known = |at: Timestamp| time.duration_since(at) <= day;
        if !self.evaluated.is_none_or(is_known) {
            *self = Self::default();
        }
        self.evaluated = Some(time);
        // A clock that was set back makes what lies in the future part of now.
        self.since = Some(self.since.map_or(time, |since| since.min(time)));
        self.last_breach = self.last_breach.map(|at| at.min(time));
        if counts.breaches > 0 {
            self.last_breach = Some(time);
        }
        let now = time.as_second().div_euclid(SECONDS_PER_HOUR);
        for (hour, _) in &mut self.hours {
            *hour = (*hour).min(now);
        }
        self.hours.retain(|(hour, _)| now - hour <= HOURS);
        if counts != WouldCounts::default() {
            self.hours.push((now, counts));
        }
        self.hours.dedup_by(|(hour, counts), (before, sum)| {
            let is_same = hour == before;
            if is_same {
                sum.add(*counts);
            }
            is_same
        });
    }

    /// The sums of all hours. A rule that has been active all the time became active once.
    pub(super) fn report(&self) -> Option<WouldReport> {
        let mut counts = WouldCounts::default();
        for (_, hour) in &self.hours {
            counts.add(*hour);
        }
        let is_active = counts.active > Duration::ZERO;
        counts.breaches = counts.breaches.max(u32::from(is_active));
        Some(WouldReport {
            since: self.since?,
            last_breach: self.last_breach,
            counts,
        })
    }
}

impl Engine {
    /// Counts what the Preview rules would have done in this evaluation, at `time` on the wall clock.
    pub(super) fn count_would(&mut self, time: Option<Timestamp>, transitions: &[Transition]) {
        let Some(time) = time else { return };
        let previews = self.runs.iter_mut();
        for run in previews.filter(|run| run.due && run.is_preview()) {
            let counts = WouldCounts::of(run, self.schedule.period, transitions);
            run.would.add(time, counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BREACH: WouldCounts = WouldCounts {
        breaches: 1,
        throttle_rounds: 2,
        evictions: 3,
        active: Duration::from_mins(4),
    };
    const MINUTE: i64 = 60;
    const HOUR: i64 = SECONDS_PER_HOUR;
    const DAY: i64 = 24 * HOUR;
    /// An hour begins.
    const START: i64 = 1_000_000 * HOUR;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(START + seconds).expect("a time")
    }

    /// The history of these evaluations.
    fn history(evaluations: &[(i64, WouldCounts)]) -> WouldHistory {
        let mut history = WouldHistory::default();
        for (seconds, counts) in evaluations {
            history.add(at(*seconds), *counts);
        }
        history
    }

    /// Since when it counts, breaches, the last one, and how many hours it stores.
    fn shown(evaluations: &[(i64, WouldCounts)]) -> (i64, u32, Option<i64>, usize) {
        let history = history(evaluations);
        let report = history.report().expect("a report");
        let seconds = |at: Timestamp| at.as_second() - START;
        let last = report.last_breach.map(seconds);
        let breaches = report.counts.breaches;
        (seconds(report.since), breaches, last, history.hours.len())
    }

    #[test]
    fn hours_are_summed_and_age_out() {
        let none = WouldCounts::default();
        assert!(WouldHistory::default().report().is_none());
        assert_eq!(shown(&[(0, none)]), (0, 0, None, 0));
        let twice = [(10, BREACH), (50 * MINUTE, BREACH), (2 * HOUR, BREACH)];
        assert_eq!(shown(&twice), (10, 3, Some(2 * HOUR), 2));
        let sum = history(&twice).report().expect("a report").counts;
        assert_eq!((sum.throttle_rounds, sum.evictions), (6, 9));
        assert_eq!(sum.active, Duration::from_mins(12));
        let then = |seconds| shown(&[&twice[..], &[(3 * HOUR, none), (seconds, none)]].concat());
        assert_eq!(then(DAY + HOUR - 1), (10, 3, Some(2 * HOUR), 2));
        assert_eq!(then(DAY + HOUR), (10, 1, Some(2 * HOUR), 1));
        assert_eq!(then(DAY + 3 * HOUR), (10, 0, Some(2 * HOUR), 0));
    }

    #[test]
    fn a_breach_that_began_earlier_counts_once() {
        let active = WouldCounts {
            active: Duration::from_secs(10),
            ..WouldCounts::default()
        };
        let evaluations: Vec<_> = (0..100).map(|hour| (hour * HOUR, active)).collect();
        assert_eq!(shown(&evaluations), (0, 1, None, 25));
        let sum = history(&evaluations).report().expect("a report").counts;
        assert_eq!(sum.active, Duration::from_secs(250));
    }

    #[test]
    fn a_clock_that_jumps_neither_loses_nor_adds_counts_within_a_day() {
        let back = [(5 * HOUR, BREACH), (6 * HOUR, BREACH), (2 * HOUR, BREACH)];
        assert_eq!(shown(&back), (2 * HOUR, 3, Some(2 * HOUR), 1));
        let again = [&back[..], &[(7 * HOUR, BREACH)]].concat();
        assert_eq!(shown(&again), (2 * HOUR, 4, Some(7 * HOUR), 2));
        let ahead = [(0, BREACH), (DAY, BREACH)];
        assert_eq!(shown(&ahead), (0, 2, Some(DAY), 2));
        // Counts of a longer time in which nothing was evaluated are not those of a day.
        let far = [(0, BREACH), (DAY + 1, BREACH)];
        assert_eq!(shown(&far), (DAY + 1, 1, Some(DAY + 1), 1));
        let mut extremes = history(&[(0, BREACH)]);
        for time in [Timestamp::MAX, Timestamp::MIN, Timestamp::MAX, at(0)] {
            extremes.add(time, BREACH);
            assert_eq!(extremes.hours.len(), 1);
        }
    }

    #[test]
    fn a_saved_history_goes_on() {
        let evaluations: Vec<_> = (0..200).map(|it| (it * 20 * MINUTE, BREACH)).collect();
        let whole = history(&evaluations);
        let saved = serde_json::to_string(&history(&evaluations[..150])).expect("JSON");
        let mut resumed: WouldHistory = serde_json::from_str(&saved).expect("read");
        for (seconds, counts) in &evaluations[150..] {
            resumed.add(at(*seconds), *counts);
        }
        assert_eq!(resumed, whole);
        assert_eq!(whole.hours.len(), 25, "it does not grow");
    }
}
