//! The history of a run: its log, the times of its phases, and the throttle steps.

use std::collections::BTreeMap;
use std::time::Duration;

use super::latency::{Latencies, Span};
use super::phase::Phase;
use super::view::{LogEntry, Second};
use crate::engine::plan::{Change, Skipped};
use crate::engine::pod::PodUid;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};
use crate::node::machine::event::{Decision, Event, NoticeKind};

/// The history of one run.
#[derive(Clone, Debug)]
pub struct History {
    started: BootTime,
    finished: Option<BootTime>,
    /// Start of each phase.
    phases: Vec<(Phase, BootTime)>,
    entries: Vec<LogEntry>,
    first_breach: Option<BootTime>,
    first_step: Option<BootTime>,
    /// The first evaluation at or below the threshold after the first step.
    below_threshold: Option<BootTime>,
    steps_down: usize,
    steps_up: usize,
    lowest: BTreeMap<String, Quota>,
    skipped: Vec<(PodUid, Skipped)>,
    busy: Vec<BusyTime>,
}

/// CPU time used so far, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct BusyTime {
    at: BootTime,
    node: u64,
    /// All pods of the demo together.
    pods: u64,
}

impl History {
    /// Starts with the first phase.
    pub fn start(now: BootTime) -> Self {
        Self {
            started: now,
            finished: None,
            phases: vec![(Phase::Alone, now)],
            entries: Vec::new(),
            first_breach: None,
            first_step: None,
            below_threshold: None,
            steps_down: 0,
            steps_up: 0,
            lowest: BTreeMap::new(),
            skipped: Vec::new(),
            busy: Vec::new(),
        }
    }

    /// Notes the start of a phase.
    pub fn enter(&mut self, phase: Phase, now: BootTime) {
        self.phases.push((phase, now));
    }

    /// Notes the end of the run.
    pub const fn finish(&mut self, now: BootTime) {
        self.finished = Some(now);
    }

    /// Adds a sample.
    pub fn add_sample(&mut self, sample: &Sample) {
        if let Some(cpu) = sample.node.cpu {
            self.busy.push(BusyTime {
                at: sample.at,
                node: cpu.busy,
                pods: sample.pods.iter().filter_map(|pod| pod.cpu_nanos).sum(),
            });
        }
    }

    /// Adds an evaluation: whether a rule was above its threshold, and whether one was below.
    pub fn add_evaluation(&mut self, now: BootTime, breached: bool, below: bool) {
        if breached {
            self.first_breach.get_or_insert(now);
        }
        if below && self.first_step.is_some() {
            self.below_threshold.get_or_insert(now);
        }
    }

    /// Adds the machine's events; `written`: some kernel file differs from its original.
    pub fn add_events(&mut self, now: BootTime, events: &[Event], written: bool) {
        let steps = events.iter().any(is_step);
        for event in events {
            match event {
                Event::Decision(decision) => self.add_decision(decision),
                // The step that caused these writes is in the log already.
                Event::Notice(notice)
                    if steps && matches!(notice.kind, NoticeKind::FileSet { .. }) => {}
                Event::Notice(notice) => self.log(notice.at, notice.kind.to_string()),
            }
        }
        if written && self.start_of(Phase::Enforced).is_some() {
            self.first_step.get_or_insert(now);
        }
    }

    fn add_decision(&mut self, decision: &Decision) {
        let transition = &decision.transition;
        match &transition.change {
            Change::Throttle { from, to, .. } if !transition.would => {
                self.steps_down += usize::from(to < from);
                self.steps_up += usize::from(to > from);
            }
            Change::Skipped { pod, reason } => {
                // Near the floor the reasons alternate; each is logged once.
                let reason = (pod.clone(), *reason);
                if self.skipped.contains(&reason) {
                    return;
                }
                self.skipped.push(reason);
            }
            _ => {}
        }
        self.log(transition.at, without_rule(decision));
    }

    /// Adds a line to the log.
    pub fn log(&mut self, at: BootTime, message: String) {
        self.entries.push(LogEntry {
            after: at.since(self.started),
            message,
        });
    }

    /// Notes a quota below its original that was in force.
    pub fn add_quota(&mut self, pod: &str, quota: Quota) {
        let lower = |known: &Quota| match (quota, known) {
            (Quota::Limit(new), Quota::Limit(old)) => new < *old,
            (Quota::Limit(_), Quota::Unlimited) => true,
            (Quota::Unlimited, _) => false,
        };
        if self.lowest.get(pod).is_none_or(lower) {
            self.lowest.insert(pod.to_owned(), quota);
        }
    }

    /// The log, oldest first.
    pub fn entries(&self) -> &[LogEntry] {
        &self.entries
    }

    /// Steps down.
    pub const fn steps_down(&self) -> usize {
        self.steps_down
    }

    /// Steps up.
    pub const fn steps_up(&self) -> usize {
        self.steps_up
    }

    /// The lowest quota that was in force for a pod; `None` if it was never throttled.
    pub fn lowest_quota(&self, pod: &str) -> Option<String> {
        self.lowest.get(pod).map(ToString::to_string)
    }

    /// From the first evaluation above the threshold to the first step, in seconds.
    pub fn breach_to_first_step(&self) -> Option<f64> {
        self.to_first_step(self.first_breach?)
    }

    /// From the policies being applied to the first step, in seconds.
    pub fn policy_to_first_step(&self) -> Option<f64> {
        self.to_first_step(self.start_of(Phase::Enforced)?)
    }

    fn to_first_step(&self, from: BootTime) -> Option<f64> {
        let millis = self.first_step?.since(from).as_millis();
        Some(millis as f64 / 1000.0)
    }

    /// The worker alone; overloaded; throttled. The last starts with the first evaluation at or below the threshold
    /// after the first step, or with the first step if there was no such evaluation.
    pub fn spans(&self) -> [Option<Span>; 3] {
        let throttled = self.below_threshold.or(self.first_step);
        let until = |phase: Phase| self.start_of(phase).or(self.finished);
        let span = |from: Option<BootTime>, to: Option<BootTime>| {
            let (from, to) = (from?, to?);
            (from < to).then_some(Span { from, to })
        };
        [
            span(Some(self.started), until(Phase::Overloaded)),
            span(self.start_of(Phase::Overloaded), until(Phase::Enforced)),
            span(throttled, until(Phase::Release)),
        ]
    }

    fn start_of(&self, phase: Phase) -> Option<BootTime> {
        let found = self.phases.iter().find(|(known, _)| *known == phase);
        found.map(|(_, at)| *at)
    }

    /// Mean CPU use of the node over a span, in millicores.
    pub fn node_mean(&self, span: Span) -> Option<u64> {
        self.mean(span, |busy| busy.node)
    }

    /// Mean CPU use of everything but the demo's pods over the whole run, in millicores.
    pub fn others_mean(&self) -> Option<u64> {
        let span = Span {
            from: self.started,
            to: self.finished?,
        };
        let pods = self.mean(span, |busy| busy.pods)?;
        Some(self.node_mean(span)?.saturating_sub(pods))
    }

    fn mean(&self, span: Span, counter: impl Fn(&BusyTime) -> u64) -> Option<u64> {
        let inside = |busy: &&BusyTime| busy.at >= span.from && busy.at < span.to;
        let mut inside = self.busy.iter().filter(inside);
        let first = inside.next()?;
        let last = inside.next_back()?;
        let elapsed = u64::try_from(last.at.since(first.at).as_nanos()).ok()?;
        let used = counter(last).checked_sub(counter(first))?;
        MilliCpu::from_usage(used, elapsed).map(|usage| usage.0)
    }

    /// The worker's p99 in every whole second so far, with the phase at its start.
    pub fn seconds(&self, latencies: &Latencies, now: BootTime) -> Vec<Second> {
        let p99 = latencies.p99_by_second(self.started, now);
        (0..)
            .zip(p99)
            .map(|(second, p99_ms)| Second {
                p99_ms,
                phase: self.phase_at(self.started + Duration::from_secs(second)),
            })
            .collect()
    }

    fn phase_at(&self, at: BootTime) -> Phase {
        let before = self.phases.iter().rev().find(|(_, start)| *start <= at);
        before.map_or(Phase::Alone, |(phase, _)| *phase)
    }
}

fn is_step(event: &Event) -> bool {
    matches!(event, Event::Decision(decision) if matches!(decision.transition.change, Change::Throttle { .. }))
}

/// Without the rule's name: the demo has one rule, and its lines have to fit 80 columns.
fn without_rule(decision: &Decision) -> String {
    let message = decision.to_string();
    let rule = decision.transition.rule.to_string();
    let rest = message.strip_prefix(&rule).unwrap_or(&message);
    rest.trim_start_matches([':', ' ']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::Transition;

    fn at(millis: u64) -> BootTime {
        BootTime::from_nanos(millis * 1_000_000)
    }

    fn step(at: BootTime, from: u8, to: u8) -> Event {
        Event::Decision(Decision {
            cause: None,
            transition: Transition {
                at,
                rule: "q/r".into(),
                would: false,
                change: Change::Throttle {
                    pod: "a".into(),
                    from,
                    to,
                    idle: false,
                    quota: Quota::Unlimited,
                    release: MilliCpu(1),
                },
            },
            metric: None,
            pod_name: None,
        })
    }

    fn finished_run() -> History {
        let mut history = History::start(at(0));
        history.enter(Phase::Overloaded, at(1000));
        history.enter(Phase::Enforced, at(2000));
        history.add_evaluation(at(2400), true, false);
        history.add_events(at(2900), &[step(at(2890), 100, 90)], true);
        history.add_evaluation(at(3400), true, false);
        history.add_evaluation(at(3900), false, true);
        history.enter(Phase::Release, at(5000));
        history.add_events(at(5500), &[step(at(5500), 90, 100)], false);
        history.finish(at(6000));
        history
    }

    #[test]
    fn the_throttled_span_starts_once_the_node_is_below_its_threshold() {
        let [before, overloaded, throttled] = finished_run().spans();
        let span = |from, to| {
            Some(Span {
                from: at(from),
                to: at(to),
            })
        };
        assert_eq!(before, span(0, 1000));
        assert_eq!(overloaded, span(1000, 2000));
        assert_eq!(throttled, span(3900, 5000));
    }

    #[test]
    fn steps_are_counted_and_timed_from_the_first_breach() {
        let history = finished_run();
        assert_eq!((history.steps_down(), history.steps_up()), (1, 1));
        assert_eq!(history.breach_to_first_step(), Some(0.5));
        assert_eq!(history.policy_to_first_step(), Some(0.9));
    }

    #[test]
    fn a_run_that_was_stopped_early_has_the_spans_it_reached() {
        let mut history = History::start(at(0));
        history.enter(Phase::Overloaded, at(1000));
        history.finish(at(1500));
        let [before, overloaded, throttled] = history.spans();
        assert!(before.is_some() && overloaded.is_some());
        assert_eq!(throttled, None);
        assert_eq!(history.breach_to_first_step(), None);
    }

    #[test]
    fn a_second_belongs_to_the_phase_at_its_start() {
        let history = finished_run();
        assert_eq!(history.phase_at(at(999)), Phase::Alone);
        assert_eq!(history.phase_at(at(1000)), Phase::Overloaded);
        assert_eq!(history.phase_at(at(9999)), Phase::Release);
    }
}
