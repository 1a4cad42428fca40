//! What happened when: the spans that figures are taken over, and the steps.

use std::collections::BTreeMap;
use std::time::Duration;

use super::latency::{Latencies, Span};
use super::story::Act;
use super::view::{Happening, Second};
use crate::engine::plan::{Change, Spared};
use crate::engine::pod::PodUid;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};
use crate::node::machine::event::{Decision, Event, News};

/// The events and moments of one run.
#[derive(Clone, Debug)]
pub struct Chronicle {
    begun: BootTime,
    ended: Option<BootTime>,
    /// When each act began.
    acts: Vec<(Act, BootTime)>,
    happenings: Vec<Happening>,
    first_breach: Option<BootTime>,
    first_step: Option<BootTime>,
    /// The first evaluation at or below the line after the first step.
    settled: Option<BootTime>,
    steps_down: usize,
    steps_up: usize,
    lowest: BTreeMap<String, Quota>,
    spared: Vec<(PodUid, Spared)>,
    busy: Vec<Busy>,
}

/// Counters of busy nanoseconds at one moment.
#[derive(Clone, Copy, Debug)]
struct Busy {
    at: BootTime,
    node: u64,
    /// All pods of the demo together.
    pods: u64,
}

impl Chronicle {
    /// Begins with the first act.
    pub fn begin(now: BootTime) -> Self {
        Self {
            begun: now,
            ended: None,
            acts: vec![(Act::Alone, now)],
            happenings: Vec::new(),
            first_breach: None,
            first_step: None,
            settled: None,
            steps_down: 0,
            steps_up: 0,
            lowest: BTreeMap::new(),
            spared: Vec::new(),
            busy: Vec::new(),
        }
    }

    /// An act begins.
    pub fn enter(&mut self, act: Act, now: BootTime) {
        self.acts.push((act, now));
    }

    /// The run ends.
    pub const fn end(&mut self, now: BootTime) {
        self.ended = Some(now);
    }

    /// Notes a sample.
    pub fn see(&mut self, sample: &Sample) {
        if let Some(cpu) = sample.node.cpu {
            self.busy.push(Busy {
                at: sample.at,
                node: cpu.busy,
                pods: sample.pods.iter().filter_map(|pod| pod.cpu_nanos).sum(),
            });
        }
    }

    /// Notes how the rules stand: some count breaches, some count quiet evaluations.
    pub fn judge(&mut self, now: BootTime, over: bool, quiet: bool) {
        if over {
            self.first_breach.get_or_insert(now);
        }
        if quiet && self.first_step.is_some() {
            self.settled.get_or_insert(now);
        }
    }

    /// Takes the machine's events; `written` says that some kernel file differs from its original.
    pub fn hear(&mut self, now: BootTime, events: &[Event], written: bool) {
        let steps = events.iter().any(is_step);
        for event in events {
            match event {
                Event::Decision(decision) => self.hear_decision(decision),
                // The writes that carry out a step told in the same breath.
                Event::Notice(notice) if steps && matches!(notice.news, News::FileSet { .. }) => {}
                Event::Notice(notice) => self.tell(notice.at, notice.news.to_string()),
            }
        }
        if written && self.began(Act::Enforced).is_some() {
            self.first_step.get_or_insert(now);
        }
    }

    fn hear_decision(&mut self, decision: &Decision) {
        let transition = &decision.transition;
        match &transition.change {
            Change::Throttle { from, to, .. } if !transition.would => {
                self.steps_down += usize::from(to < from);
                self.steps_up += usize::from(to > from);
            }
            Change::Spared { pod, reason } => {
                // Near the floor the reasons come and go; each is worth telling once.
                let reason = (pod.clone(), *reason);
                if self.spared.contains(&reason) {
                    return;
                }
                self.spared.push(reason);
            }
            _ => {}
        }
        self.tell(transition.at, in_short(decision));
    }

    /// Something happened.
    pub fn tell(&mut self, at: BootTime, what: String) {
        self.happenings.push(Happening {
            after: at.since(self.begun),
            what,
        });
    }

    /// A quota below its original was seen in force.
    pub fn note_quota(&mut self, pod: &str, quota: Quota) {
        let lower = |known: &Quota| match (quota, known) {
            (Quota::Limit(new), Quota::Limit(old)) => new < *old,
            (Quota::Limit(_), Quota::Unlimited) => true,
            (Quota::Unlimited, _) => false,
        };
        if self.lowest.get(pod).is_none_or(lower) {
            self.lowest.insert(pod.to_owned(), quota);
        }
    }

    /// Everything that happened, oldest first.
    pub fn happenings(&self) -> &[Happening] {
        &self.happenings
    }

    /// When each act began.
    pub fn acts(&self) -> &[(Act, BootTime)] {
        &self.acts
    }

    /// When the run began.
    pub const fn begun(&self) -> BootTime {
        self.begun
    }

    /// Steps down.
    pub const fn steps_down(&self) -> usize {
        self.steps_down
    }

    /// Steps up.
    pub const fn steps_up(&self) -> usize {
        self.steps_up
    }

    /// The lowest quota that was in force for a pod.
    pub fn lowest_quota(&self, pod: &str) -> Option<String> {
        self.lowest.get(pod).map(ToString::to_string)
    }

    /// From the first evaluation above the line to the first step, in seconds.
    pub fn breach_to_first_step(&self) -> Option<f64> {
        self.to_first_step(self.first_breach?)
    }

    /// From the policies being in force to the first step, in seconds.
    pub fn policy_to_first_step(&self) -> Option<f64> {
        self.to_first_step(self.began(Act::Enforced)?)
    }

    fn to_first_step(&self, from: BootTime) -> Option<f64> {
        let millis = self.first_step?.since(from).as_millis();
        Some(millis as f64 / 1000.0)
    }

    /// The worker alone; overloaded; throttled, which is from the first evaluation at or below the line after the
    /// first step. Where none came, from the first step.
    pub fn spans(&self) -> [Option<Span>; 3] {
        let throttled = self.settled.or(self.first_step);
        let until = |act: Act| self.began(act).or(self.ended);
        let span = |from: Option<BootTime>, to: Option<BootTime>| {
            let (from, to) = (from?, to?);
            (from < to).then_some(Span { from, to })
        };
        [
            span(Some(self.begun), until(Act::Overloaded)),
            span(self.began(Act::Overloaded), until(Act::Enforced)),
            span(throttled, until(Act::Release)),
        ]
    }

    fn began(&self, act: Act) -> Option<BootTime> {
        let found = self.acts.iter().find(|(known, _)| *known == act);
        found.map(|(_, at)| *at)
    }

    /// Mean CPU use of the node over a span, in millicores.
    pub fn node_mean(&self, span: Span) -> Option<u64> {
        self.mean(span, |busy| busy.node)
    }

    /// Mean CPU use of all but the demo's pods over the whole run, in millicores.
    pub fn others_mean(&self) -> Option<u64> {
        let span = Span {
            from: self.begun,
            to: self.ended?,
        };
        let pods = self.mean(span, |busy| busy.pods)?;
        Some(self.node_mean(span)?.saturating_sub(pods))
    }

    fn mean(&self, span: Span, counter: impl Fn(&Busy) -> u64) -> Option<u64> {
        let inside = |busy: &&Busy| busy.at >= span.from && busy.at < span.to;
        let mut inside = self.busy.iter().filter(inside);
        let first = inside.next()?;
        let last = inside.next_back()?;
        let elapsed = u64::try_from(last.at.since(first.at).as_nanos()).ok()?;
        let used = counter(last).checked_sub(counter(first))?;
        MilliCpu::from_usage(used, elapsed).map(|usage| usage.0)
    }

    /// The worker's p99 of every whole second so far, with the act in which it began.
    pub fn seconds(&self, latencies: &Latencies, now: BootTime) -> Vec<Second> {
        let p99 = latencies.p99_by_second(self.begun, now);
        (0..)
            .zip(p99)
            .map(|(second, p99_ms)| Second {
                p99_ms,
                act: self.act_at(self.begun + Duration::from_secs(second)),
            })
            .collect()
    }

    /// The act that was on at a moment.
    pub fn act_at(&self, at: BootTime) -> Act {
        let before = self.acts.iter().rev().find(|(_, began)| *began <= at);
        before.map_or(Act::Alone, |(act, _)| *act)
    }
}

fn is_step(event: &Event) -> bool {
    matches!(event, Event::Decision(decision) if matches!(decision.transition.change, Change::Throttle { .. }))
}

/// Without the rule's name: the demo has one rule, and its lines have to fit 80 columns.
pub fn in_short(decision: &Decision) -> String {
    let told = decision.to_string();
    let rule = decision.transition.rule.to_string();
    let rest = told.strip_prefix(&rule).unwrap_or(&told);
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

    fn played() -> Chronicle {
        let mut chronicle = Chronicle::begin(at(0));
        chronicle.enter(Act::Overloaded, at(1000));
        chronicle.enter(Act::Enforced, at(2000));
        chronicle.judge(at(2400), true, false);
        chronicle.hear(at(2900), &[step(at(2890), 100, 90)], true);
        chronicle.judge(at(3400), true, false);
        chronicle.judge(at(3900), false, true);
        chronicle.enter(Act::Release, at(5000));
        chronicle.hear(at(5500), &[step(at(5500), 90, 100)], false);
        chronicle.end(at(6000));
        chronicle
    }

    #[test]
    fn the_throttled_span_begins_once_the_node_is_below_its_line() {
        let [before, overloaded, throttled] = played().spans();
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
        let chronicle = played();
        assert_eq!((chronicle.steps_down(), chronicle.steps_up()), (1, 1));
        assert_eq!(chronicle.breach_to_first_step(), Some(0.5));
        assert_eq!(chronicle.policy_to_first_step(), Some(0.9));
    }

    #[test]
    fn a_run_that_was_stopped_early_measures_what_it_had() {
        let mut chronicle = Chronicle::begin(at(0));
        chronicle.enter(Act::Overloaded, at(1000));
        chronicle.end(at(1500));
        let [before, overloaded, throttled] = chronicle.spans();
        assert!(before.is_some() && overloaded.is_some());
        assert_eq!(throttled, None);
        assert_eq!(chronicle.breach_to_first_step(), None);
    }

    #[test]
    fn a_second_belongs_to_the_act_that_it_began_in() {
        let chronicle = played();
        assert_eq!(chronicle.act_at(at(999)), Act::Alone);
        assert_eq!(chronicle.act_at(at(1000)), Act::Overloaded);
        assert_eq!(chronicle.act_at(at(9999)), Act::Release);
    }
}
