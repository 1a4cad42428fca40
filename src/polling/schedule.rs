//! Which nodes are asked in a round, how long one that fails is left alone, and which values are too old. Pure; the time is an
//! argument.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::targets::PollTarget;
use crate::cluster::backoff::exponential;
use crate::engine::time::BootTime;
use crate::metrics_api::reports::is_fresh;

/// A node that fails is asked again after this many intervals, at the latest.
const MAX_PAUSE: u32 = 8;

/// The state of all polled nodes.
#[derive(Debug)]
pub struct PollSchedule {
    interval: Duration,
    nodes: BTreeMap<Arc<str>, State>,
}

#[derive(Debug)]
struct State {
    target: PollTarget,
    /// In a row.
    failures: u32,
    /// Not asked before this time.
    due: BootTime,
    /// When its value was measured; `None`: it has none.
    measured: Option<BootTime>,
    /// Its agent reports.
    reports: bool,
}

/// What a round begins with.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PollRound {
    /// The nodes to ask.
    pub due: Vec<(Arc<str>, PollTarget)>,
    /// Those whose value is to be forgotten: their endpoint is gone, or it has failed for too long.
    pub gone: Vec<Arc<str>>,
}

/// The nodes by what is known of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolledNodeCounts {
    /// With a value that may be used.
    pub current: usize,
    /// Without one.
    pub failed: usize,
    /// Not asked, because their agents report.
    pub reporting: usize,
}

impl PollSchedule {
    /// No nodes.
    pub const fn new(interval: Duration) -> Self {
        Self {
            interval,
            nodes: BTreeMap::new(),
        }
    }

    /// Whether there are no endpoints.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Begins a round with these endpoints. A node whose agent reports is left alone.
    pub fn begin(
        &mut self,
        targets: BTreeMap<Arc<str>, PollTarget>,
        reports: impl Fn(&str) -> bool,
        now: BootTime,
    ) -> PollRound {
        let mut before = std::mem::take(&mut self.nodes);
        let mut round = PollRound::default();
        // Rounds begin a little earlier or later than planned.
        let slack = self.interval / 2;
        for (node, target) in targets {
            let known = before.remove(&node);
            let measured = known.as_ref().and_then(|known| known.measured);
            let same = known.filter(|known| known.target == target);
            let mut state = same.unwrap_or(State {
                target,
                failures: 0,
                due: now,
                measured,
                reports: false,
            });
            state.reports = reports(&node);
            if state.reports {
                state.measured = None;
            } else if state.due <= now + slack {
                round.due.push((Arc::clone(&node), target));
            }
            let is_old = |at: &BootTime| !is_fresh(*at, self.interval, now);
            if state.measured.take_if(|at| is_old(at)).is_some() {
                round.gone.push(Arc::clone(&node));
            }
            self.nodes.insert(node, state);
        }
        let gone = before.into_iter();
        let gone = gone.filter(|(_, state)| state.measured.is_some());
        round.gone.extend(gone.map(|(node, _)| node));
        round
    }

    /// A node of the round that began at `began` answered with a value of this time, or (`None`) failed. Returns the time of
    /// the value before.
    pub fn record(
        &mut self,
        node: &str,
        measured: Option<BootTime>,
        began: BootTime,
    ) -> Option<BootTime> {
        let state = self.nodes.get_mut(node)?;
        if measured.is_some() {
            state.failures = 0;
            return std::mem::replace(&mut state.measured, measured);
        }
        let max = self.interval * MAX_PAUSE;
        state.due = began + exponential(self.interval, max, state.failures);
        state.failures = state.failures.saturating_add(1);
        None
    }

    /// The nodes by what is known of them.
    pub fn counts(&self, now: BootTime) -> PolledNodeCounts {
        let mut counts = PolledNodeCounts::default();
        for state in self.nodes.values() {
            let is_current = |at| is_fresh(at, self.interval, now);
            let count = if state.reports {
                &mut counts.reporting
            } else if state.measured.is_some_and(is_current) {
                &mut counts.current
            } else {
                &mut counts.failed
            };
            *count += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_secs(15);

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(1000 + seconds)
    }

    fn targets(nodes: &[(&str, u16)]) -> BTreeMap<Arc<str>, PollTarget> {
        let target = |port| PollTarget {
            address: ([10, 0, 0, 1], port).into(),
            service: 0,
        };
        nodes
            .iter()
            .map(|(node, port)| (Arc::from(*node), target(*port)))
            .collect()
    }

    fn names(round: &[(Arc<str>, PollTarget)]) -> Vec<&str> {
        round.iter().map(|(node, _)| &**node).collect()
    }

    #[test]
    fn a_node_that_fails_is_asked_less_often_and_at_once_when_it_has_moved() {
        let mut schedule = PollSchedule::new(INTERVAL);
        let mut asked = Vec::new();
        for round in 0..40 {
            let now = at(round * 15);
            let found = schedule.begin(targets(&[("a", 1), ("b", 1)]), |_| false, now);
            assert!(names(&found.due).contains(&"a"), "a works");
            schedule.record("a", Some(now), now);
            if names(&found.due).contains(&"b") {
                asked.push(round);
                schedule.record("b", None, now);
            }
        }
        assert_eq!(asked, [0, 1, 3, 7, 15, 23, 31, 39]);
        assert_eq!(
            schedule.counts(at(39 * 15)),
            PolledNodeCounts {
                current: 1,
                failed: 1,
                reporting: 0
            }
        );
        let moved = schedule.begin(targets(&[("a", 1), ("b", 2)]), |_| false, at(600));
        assert_eq!(names(&moved.due), ["a", "b"]);
        schedule.record("b", Some(at(601)), at(600));
        let works = schedule.begin(targets(&[("b", 2)]), |_| false, at(615));
        assert_eq!(names(&works.due), ["b"]);
    }

    #[test]
    fn a_round_may_begin_early_or_late() {
        let mut schedule = PollSchedule::new(INTERVAL);
        for millis in [0, 14_990, 30_020, 47_000] {
            let now = at(0) + Duration::from_millis(millis);
            let round = schedule.begin(targets(&[("a", 1)]), |_| false, now);
            assert_eq!(names(&round.due), ["a"], "{millis}");
            schedule.record("a", if millis == 0 { None } else { Some(now) }, now);
        }
    }

    #[test]
    fn age_and_not_the_round_decides_when_a_value_is_forgotten() {
        let mut schedule = PollSchedule::new(INTERVAL);
        schedule.begin(targets(&[("a", 1)]), |_| false, at(0));
        // Measured 10 s before it was asked for.
        schedule.record("a", Some(at(0).before(Duration::from_secs(10))), at(0));
        let round = schedule.begin(targets(&[("a", 1)]), |_| false, at(30));
        assert_eq!(round.gone, Vec::<Arc<str>>::new());
        let round = schedule.begin(targets(&[("a", 1)]), |_| false, at(36));
        assert_eq!(round.gone, [Arc::from("a")]);
        let round = schedule.begin(targets(&[("a", 1)]), |_| false, at(51));
        assert_eq!(round.gone, Vec::<Arc<str>>::new(), "it is said once");
    }

    #[test]
    fn a_deleted_endpoint_leaves_nothing() {
        let mut schedule = PollSchedule::new(INTERVAL);
        schedule.begin(targets(&[("a", 1), ("b", 1)]), |_| false, at(0));
        schedule.record("a", Some(at(1)), at(0));
        schedule.record("b", None, at(0));
        let round = schedule.begin(BTreeMap::new(), |_| false, at(15));
        assert_eq!(round.gone, [Arc::from("a")]);
        assert!(schedule.nodes.is_empty() && round.due.is_empty());
        assert_eq!(
            schedule.record("a", Some(at(16)), at(0)),
            None,
            "it answers late"
        );
        assert!(schedule.nodes.is_empty());
    }

    #[test]
    fn a_node_whose_agent_reports_is_not_asked() {
        let mut schedule = PollSchedule::new(INTERVAL);
        schedule.begin(targets(&[("a", 1)]), |_| false, at(0));
        schedule.record("a", Some(at(1)), at(0));
        let round = schedule.begin(targets(&[("a", 1)]), |node| node == "a", at(15));
        assert_eq!(round, PollRound::default());
        assert_eq!(schedule.counts(at(15)).reporting, 1);
        let round = schedule.begin(targets(&[("a", 1)]), |_| false, at(30));
        assert_eq!(names(&round.due), ["a"]);
    }
}
