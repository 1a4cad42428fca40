//! The history of a run: its log, the times of its phases, and the throttle steps.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use super::phase::Phase;
use super::view::{LogEntry, Mark, Second};
use crate::engine::plan::{PlanChange, Skipped};
use crate::engine::pod::PodUid;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};
use crate::messages::event::{Event, NamedDecision, NoticeKind};
use crate::scene::latency::{Latencies, TimeSpan};

/// The important pod has recovered at this multiple of the p99 that it has alone.
pub const RECOVERED: f64 = 1.5;

/// The history of one run.
#[derive(Clone, Debug)]
pub struct DemoHistory {
    started: BootTime,
    finished: Option<BootTime>,
    /// Start of each phase.
    phases: Vec<(Phase, BootTime)>,
    entries: Vec<LogEntry>,
    first_breach: Option<BootTime>,
    first_step: Option<BootTime>,
    steps_down: usize,
    steps_up: usize,
    lowest: BTreeMap<String, Quota>,
    idle: BTreeSet<String>,
    skipped: Vec<(PodUid, Skipped)>,
    busy: Vec<BusyTime>,
}

/// CPU time used so far, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct BusyTime {
    at: BootTime,
    node: u64,
    important: u64,
    /// All batch pods together.
    batch: u64,
}

/// Mean CPU use over a span, in millicores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MeanUse {
    /// The whole node.
    pub node: u64,
    /// The important pod.
    pub important: u64,
    /// All batch pods together.
    pub batch: u64,
}

impl DemoHistory {
    /// Starts with the first phase.
    pub fn start(now: BootTime) -> Self {
        Self {
            started: now,
            finished: None,
            phases: vec![(Phase::Alone, now)],
            entries: Vec::new(),
            first_breach: None,
            first_step: None,
            steps_down: 0,
            steps_up: 0,
            lowest: BTreeMap::new(),
            idle: BTreeSet::new(),
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
    pub fn add_sample(&mut self, sample: &Sample, important: &PodUid) {
        let Some(cpu) = sample.node.cpu else {
            return;
        };
        let used = |of_important: bool| {
            let pods = sample.pods.iter();
            pods.filter(|pod| (pod.uid == *important) == of_important)
                .filter_map(|pod| pod.cpu_nanos)
                .sum()
        };
        self.busy.push(BusyTime {
            at: sample.at,
            node: cpu.busy,
            important: used(true),
            batch: used(false),
        });
    }

    /// Notes an evaluation with a rule above its threshold.
    pub fn add_breach(&mut self, now: BootTime) {
        self.first_breach.get_or_insert(now);
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

    fn add_decision(&mut self, decision: &NamedDecision) {
        let transition = &decision.transition;
        match &transition.change {
            PlanChange::Throttle { from, to, idle, .. } if !transition.would => {
                // At the same ratio it became idle class, or left it.
                let (down, up) = (to < from || (to == from && *idle), to > from || !idle);
                self.steps_down += usize::from(down);
                self.steps_up += usize::from(!down && up);
            }
            // Nothing more is taken from a pod that is throttled.
            PlanChange::Skipped {
                reason: Skipped::AtFloor | Skipped::UsesLittle,
                ..
            } if self.steps_down > 0 => return,
            PlanChange::Skipped { pod, reason } => {
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

    /// Notes that a pod was idle class.
    pub fn add_idle(&mut self, pod: &str) {
        if !self.idle.contains(pod) {
            self.idle.insert(pod.to_owned());
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

    /// How far a pod was throttled: idle class, and its lowest quota; `None` if it never was.
    pub fn deepest_throttle(&self, pod: &str) -> Option<String> {
        let idle = self.idle.contains(pod).then(|| "idle class".to_owned());
        let quota = self.lowest.get(pod).map(|it| format!("at least {it}"));
        let throttles: Vec<String> = idle.into_iter().chain(quota).collect();
        (!throttles.is_empty()).then(|| throttles.join(", "))
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

    /// The moments that the plot marks, in order.
    pub fn marks(&self) -> Vec<Mark> {
        let moments = [
            ("batch pods start", self.start_of(Phase::Overloaded)),
            ("policy in force", self.start_of(Phase::Enforced)),
            ("first write", self.first_step),
            ("batch pods stop", self.start_of(Phase::Release)),
        ];
        let reached = moments
            .into_iter()
            .filter_map(|(what, at)| Some((what, at?)));
        reached
            .map(|(what, at)| Mark {
                after: at.since(self.started),
                what,
            })
            .collect()
    }

    /// When the important pod had recovered after the first write: the p99 of a second is below [`RECOVERED`] times that of
    /// the pod alone.
    fn recovered(&self, latencies: &Latencies) -> Option<BootTime> {
        let [alone, ..] = self.phase_spans();
        let span = TimeSpan {
            from: self.first_step?,
            to: self.start_of(Phase::Release).or(self.finished)?,
        };
        latencies.recovered(span, latencies.over(alone?)?.p99_ms * RECOVERED)
    }

    /// From the first write to recovery, in seconds.
    pub fn first_step_to_recovery(&self, latencies: &Latencies) -> Option<f64> {
        let millis = self
            .recovered(latencies)?
            .since(self.first_step?)
            .as_millis();
        Some(millis as f64 / 1000.0)
    }

    /// The important pod alone; unprotected; protected. The last starts with its recovery, or with the first write if it has
    /// not recovered.
    pub fn spans(&self, latencies: &Latencies) -> [Option<TimeSpan>; 3] {
        let [alone, unprotected, since_first_step] = self.phase_spans();
        let protected = since_first_step.map(|span| TimeSpan {
            from: self.recovered(latencies).unwrap_or(span.from),
            to: span.to,
        });
        [alone, unprotected, protected]
    }

    fn phase_spans(&self) -> [Option<TimeSpan>; 3] {
        let until = |phase: Phase| self.start_of(phase).or(self.finished);
        let span = |from: Option<BootTime>, to: Option<BootTime>| {
            let (from, to) = (from?, to?);
            (from < to).then_some(TimeSpan { from, to })
        };
        [
            span(Some(self.started), until(Phase::Overloaded)),
            span(self.start_of(Phase::Overloaded), until(Phase::Enforced)),
            span(self.first_step, until(Phase::Release)),
        ]
    }

    fn start_of(&self, phase: Phase) -> Option<BootTime> {
        let found = self.phases.iter().find(|(known, _)| *known == phase);
        found.map(|(_, at)| *at)
    }

    /// Mean CPU use over a span; `None` without two samples in it.
    pub fn mean_use(&self, span: TimeSpan) -> Option<MeanUse> {
        let inside = |busy: &&BusyTime| busy.at >= span.from && busy.at < span.to;
        let mut inside = self.busy.iter().filter(inside);
        let first = inside.next()?;
        let last = inside.next_back()?;
        let elapsed = u64::try_from(last.at.since(first.at).as_nanos()).ok()?;
        let mean = |counter: fn(&BusyTime) -> u64| {
            let used = counter(last).checked_sub(counter(first))?;
            MilliCpu::from_usage(used, elapsed).map(|usage| usage.0)
        };
        Some(MeanUse {
            node: mean(|busy| busy.node)?,
            important: mean(|busy| busy.important)?,
            batch: mean(|busy| busy.batch)?,
        })
    }

    /// Mean CPU use of everything but the demo's pods over the whole run, in millicores.
    pub fn others_mean(&self) -> Option<u64> {
        let mean = self.mean_use(TimeSpan {
            from: self.started,
            to: self.finished?,
        })?;
        Some(mean.node.saturating_sub(mean.important + mean.batch))
    }

    /// The important pod's p99 in every whole second so far, with the phase at its start.
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
    matches!(event, Event::Decision(decision) if matches!(decision.transition.change, PlanChange::Throttle { .. }))
}

/// Without the rule's name: the demo has one rule, and its lines have to fit 80 columns.
fn without_rule(decision: &NamedDecision) -> String {
    let message = decision.to_string();
    let rule = decision.transition.rule.to_string();
    let rest = message.strip_prefix(&rule).unwrap_or(&message);
    rest.trim_start_matches([':', ' ']).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::Transition;
    use crate::scene::latency::TimedRequest;

    const fn at(millis: u64) -> BootTime {
        BootTime::from_nanos(millis * 1_000_000)
    }

    fn step(at: BootTime, from: u8, to: u8) -> Event {
        Event::Decision(NamedDecision {
            cause: None,
            transition: Transition {
                at,
                rule: "q/r".into(),
                would: false,
                change: PlanChange::Throttle {
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

    fn finished_run() -> DemoHistory {
        let mut history = DemoHistory::start(at(0));
        history.enter(Phase::Overloaded, at(1000));
        history.enter(Phase::Enforced, at(2000));
        history.add_breach(at(2400));
        history.add_events(at(2900), &[step(at(2890), 100, 90)], true);
        history.add_breach(at(3400));
        history.enter(Phase::Release, at(8000));
        history.add_events(at(8500), &[step(at(8500), 90, 100)], false);
        history.finish(at(9000));
        history
    }

    /// A request every 10 ms, slow from 1 s to `recovery`.
    fn latencies(recovery: u64) -> Latencies {
        let mut latencies = Latencies::default();
        latencies.extend((0..900).map(|n| TimedRequest {
            due: at(n * 10),
            latency: Duration::from_millis(if (1000..recovery).contains(&(n * 10)) {
                900
            } else {
                20
            }),
            served: true,
        }));
        latencies
    }

    const fn span(from: u64, to: u64) -> TimeSpan {
        TimeSpan {
            from: at(from),
            to: at(to),
        }
    }

    #[test]
    fn the_protected_span_starts_with_the_recovery() {
        let history = finished_run();
        let latencies = latencies(4200);
        let [alone, unprotected, protected] = history.spans(&latencies);
        assert_eq!(alone, Some(span(0, 1000)));
        assert_eq!(unprotected, Some(span(1000, 2000)));
        assert_eq!(protected, Some(span(4200, 8000)));
        assert_eq!(history.first_step_to_recovery(&latencies), Some(1.3));
    }

    #[test]
    fn without_a_recovery_the_protected_span_starts_with_the_first_write() {
        let history = finished_run();
        let [.., protected] = history.spans(&latencies(9000));
        assert_eq!(protected, Some(span(2900, 8000)));
        assert_eq!(history.first_step_to_recovery(&latencies(9000)), None);
    }

    #[test]
    fn the_moments_of_action_are_marked() {
        let marks = finished_run().marks();
        let seconds: Vec<f32> = marks.iter().map(|it| it.after.as_secs_f32()).collect();
        assert_eq!(seconds, [1.0, 2.0, 2.9, 8.0]);
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
        let mut history = DemoHistory::start(at(0));
        history.enter(Phase::Overloaded, at(1000));
        history.finish(at(1500));
        let [alone, unprotected, protected] = history.spans(&Latencies::default());
        assert!(alone.is_some() && unprotected.is_some());
        assert_eq!(protected, None);
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
