//! Reports what happens on the node: the status of its `NodeWatermark`, events, metrics.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::Machine;
use super::metrics::{AgentMetrics, ThrottledSeries};
use super::pods::NodePods;
use super::rules::Rules;
use crate::agent::eviction::EvictionOutcome;
use crate::agent::report::conditions::{AgentHealth, StopProgress, Unready};
use crate::agent::report::events::{self, EventBuilder, MessageFacts, NewEvent};
use crate::agent::report::publish::Publisher;
use crate::agent::report::status::{StatusBuilder, StatusView, this_agent};
use crate::agent::report::write::{self, PendingStatus, Writes};
use crate::agent::taint::TaintState;
use crate::clock;
use crate::crd::NodeWatermarkStatus;
use crate::crd::node_watermark::{AgentStatus, condition, stopped};
use crate::engine::metric::ActionKind;
use crate::engine::plan::{Plan, RuleState, Scheduling, Unknown};
use crate::engine::pod::PodUid;
use crate::engine::policy::{PolicySet, RuleId, Strategy};
use crate::engine::time::BootTime;
use crate::engine::weight_share::HIGH_PERCENT;
use crate::engine::{RuleReport, WouldReport};
use crate::messages::event::{Event, NamedDecision};
use crate::node::journal::JournalRecord;
use crate::node::machine::ineffective::{Cause, IneffectiveAction, reason};

/// A pod has its cgroup within this time after it is reported running.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The `NodeWatermark` that the status goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusTarget<'a> {
    /// Its UID.
    pub uid: &'a str,
    /// Its generation.
    pub generation: i64,
    /// The report time of its current status.
    pub reported: Option<Timestamp>,
}

impl StatusTarget<'_> {
    fn to_owned(self) -> (String, i64, Option<Timestamp>) {
        (self.uid.to_owned(), self.generation, self.reported)
    }
}

type EvaluatedRule = (bool, Option<Unknown>, Option<WouldReport>);

/// Reports the state of the machine after each tick.
pub struct Reporter {
    agent: AgentStatus,
    builder: StatusBuilder,
    event_builder: EventBuilder,
    publisher: Publisher,
    reports: watch::Sender<Option<PendingStatus>>,
    /// The task that writes the status.
    writer: JoinHandle<()>,
    /// Results of status writes.
    writes: watch::Receiver<Writes>,
    /// The taint state on the Node, as last reported.
    taint_state: TaintState,
    /// Whether scheduling was decided, and for each rule whether it has a value, or why not, and what it would have done in the last
    /// day.
    evaluated_rules: (bool, Vec<EvaluatedRule>),
    /// UID and generation of the object that was last reported to, and the report time of the status that was overwritten.
    target: Option<(String, i64, Option<Timestamp>)>,
    /// The status may have changed.
    changed: bool,
    /// When it changes by the passing of time alone.
    changes_at: Option<BootTime>,
    new_events: Vec<NewEvent>,
    /// The actions without effect, at the last evaluation.
    ineffective: Vec<IneffectiveAction>,
    /// A rule asks for the idle class, which is unsafe.
    idle_unsafe: bool,
    /// The batch weight share, in whole percent.
    batch_weight_share: Option<i64>,
    /// It is too high for the idle class that a policy asks for.
    batch_weight_high: bool,
    /// The reason of the emergency stop, and whether the status says that everything is restored.
    stopped: Option<(String, bool)>,
}

impl Reporter {
    /// Starts the tasks that write. `boot_id` is the kernel's.
    pub fn start(client: &Client, node: &str, boot_id: &str) -> Self {
        let (reports, taken) = watch::channel(None);
        let (counts, writes) = watch::channel(Writes::default());
        let run = write::run(client.clone(), node.to_owned(), taken, counts);
        Self {
            agent: this_agent(boot_id),
            builder: StatusBuilder::default(),
            event_builder: EventBuilder::default(),
            publisher: Publisher::start(client.clone(), node),
            reports,
            writer: tokio::spawn(run),
            writes,
            taint_state: TaintState::default(),
            evaluated_rules: (false, Vec::new()),
            target: None,
            changed: true,
            changes_at: None,
            new_events: Vec::new(),
            ineffective: Vec::new(),
            idle_unsafe: false,
            batch_weight_share: None,
            batch_weight_high: false,
            stopped: None,
        }
    }

    /// Adopts what an earlier process left in force and already reported.
    pub fn adopt(&mut self, machine: &Machine) {
        self.event_builder
            .adopt(machine.records(), machine.policy());
    }

    /// Sets the reason of the emergency stop, if there is one; `is_new` also sends an event.
    pub fn stop(&mut self, reason: Option<&str>, is_new: bool) {
        self.stopped = reason.map(|reason| (reason.to_owned(), false));
        self.changed = true;
        if is_new {
            self.new_events.push(events::stopped(reason));
        }
    }

    /// Pods or rules have changed.
    pub fn recount(&mut self, machine: &Machine) {
        let pods = machine.pods().values().map(|known| &known.pod);
        self.builder.count(machine.policy(), pods);
        self.changed = true;
    }

    /// Reports what happened in a tick. Allocates nothing if nothing did, between evaluations.
    pub fn report_tick(
        &mut self,
        machine: &mut Machine,
        rules: &Rules,
        target: Option<StatusTarget<'_>>,
        pods: &NodePods,
        metrics: &AgentMetrics,
        now: BootTime,
    ) {
        self.observe_batch(machine, metrics);
        let outcomes = machine.backend_mut().take_outcomes();
        for outcome in &outcomes {
            metrics.outcome(&outcome.result);
        }
        let taint_state = machine.backend().taint_state();
        let taint_changed = taint_state != self.taint_state;
        let evaluated = machine.plan().evaluated;
        metrics.count(&machine.plan().transitions);
        self.changed |=
            self.builder.record(machine.events()) || taint_changed || !outcomes.is_empty();
        if self.changed || evaluated {
            let reports: Vec<RuleReport> = machine.reports().collect();
            let decided = machine.plan().scheduling != Scheduling::Unchanged;
            let known = reports
                .iter()
                .map(|report| (report.value.is_some(), report.unknown, report.would));
            // A first evaluation sends no event, nor does an hour that ends, but they change the status.
            if decided != self.evaluated_rules.0
                || !known.clone().eq(self.evaluated_rules.1.iter().copied())
            {
                self.evaluated_rules = (decided, known.collect());
                self.changed = true;
            }
            self.ineffective = ineffective(machine, &reports, pods, now);
            let idle_unsafe = machine.is_idle_unsafe() && asks_for_idle(machine.policy());
            self.changed |= idle_unsafe != self.idle_unsafe;
            self.idle_unsafe = idle_unsafe;
            self.collect_events(machine, &reports, &outcomes, &taint_state);
            metrics.figures(|figures| {
                figures.throttled = machine.throttled_pods();
                figures.throttled_pods = throttled_pods(machine);
                figures.ineffective = count_reasons(&self.ineffective);
                figures.idle_unsafe = machine.is_idle_unsafe();
                figures.pods = machine.pods().len();
                figures.refused = rules.refused().len();
                figures.would = would(machine.previews());
                figures.scheduling.clone_from(&machine.plan().scheduling);
                (figures.events, figures.dropped) = self.publisher.counts();
                figures.writes = *self.writes.borrow();
                figures.rules = reports;
            });
        }
        self.taint_state = taint_state;
        let uid = target.map_or("", |target| target.uid);
        for event in self.new_events.drain(..) {
            self.publisher
                .publish(event, Some(uid).filter(|uid| !uid.is_empty()));
        }
        self.report(machine, rules, target, now);
    }

    /// Takes what batch pods weigh and use from a new sample of the pods.
    fn observe_batch(&mut self, machine: &Machine, metrics: &AgentMetrics) {
        if machine.sample().pods.is_empty() && !machine.pods().is_empty() {
            return;
        }
        let share = machine.batch_weight_share().map(|share| share.percent);
        let high = is_high(share, self.batch_weight_high) && lowers_pods(machine.policy());
        metrics.figures(|figures| {
            figures.batch_weight_share = share;
            figures.batch_cpus = machine.batch_cpus();
        });
        let now = (share.map(whole), high);
        self.changed |= now != (self.batch_weight_share, self.batch_weight_high);
        (self.batch_weight_share, self.batch_weight_high) = now;
    }

    /// Collects the events that `kubectl describe` shows.
    fn collect_events(
        &mut self,
        machine: &Machine,
        reports: &[RuleReport],
        outcomes: &[EvictionOutcome],
        taint_state: &TaintState,
    ) {
        let policy = machine.policy();
        let facts = MessageFacts { policy, reports };
        self.event_builder
            .record(machine.events(), facts, &mut self.new_events);
        self.event_builder
            .ineffective(&self.ineffective, &mut self.new_events);
        self.event_builder
            .idle_class(self.idle_unsafe, &mut self.new_events);
        self.event_builder
            .batch_weight(self.batch_weight_high, &mut self.new_events);
        self.event_builder
            .forget(|uid| machine.pods().contains_key(uid));
        for outcome in outcomes {
            if self.builder.record_outcome(outcome) {
                self.new_events.push(events::evictions_blocked(outcome));
            }
            self.event_builder.outcome(outcome, &mut self.new_events);
        }
        if *taint_state != self.taint_state {
            let message = machine.backend().scheduling_message();
            self.event_builder
                .taint_state(taint_state, &message, &mut self.new_events);
        }
    }

    /// The last status is out of date.
    pub const fn mark_changed(&mut self) {
        self.changed = true;
    }

    /// Reports why no rules are enforced, before there is a machine: only if the reason is in the `NodeWatermark`.
    pub fn report_waiting(
        &mut self,
        rules: &Rules,
        target: Option<StatusTarget<'_>>,
        now: BootTime,
    ) {
        let (Some(target), Some(problem)) = (target, rules.problem()) else {
            return;
        };
        let known = self.target.as_ref();
        if known.is_some_and(|(uid, generation, _)| {
            uid == target.uid && *generation == target.generation
        }) {
            return;
        }
        self.target = Some(target.to_owned());
        let health = AgentHealth {
            unready: Some(Unready::PreviousRulesEnforced(problem.to_string())),
            ..AgentHealth::default()
        };
        let status = self.builder.build(&StatusView {
            now,
            time: clock::wall_time(),
            generation: Some(target.generation),
            hash: None,
            agent: &self.agent,
            reports: Vec::new(),
            policy: &PolicySet::default(),
            plan: &Plan::default(),
            names: BTreeMap::new(),
            records: Vec::new(),
            previews: &[],
            ineffective: &[],
            taint_state: TaintState::default(),
            evicted: Vec::new(),
            batch_weight_share: None,
            health,
            not_enforced: Vec::new(),
        });
        self.send(target, status);
    }

    /// Stops writing; a write in progress may finish within `timeout_after`.
    pub async fn shut_down(self, timeout_after: Duration) {
        drop(self.reports);
        let mut writer = self.writer;
        if timeout(timeout_after, &mut writer).await.is_err() {
            writer.abort();
        }
    }

    fn send(&self, target: StatusTarget<'_>, status: NodeWatermarkStatus) {
        self.reports.send_replace(Some(PendingStatus {
            uid: target.uid.to_owned(),
            status,
            replaces: target.reported,
        }));
    }

    fn health(&self, machine: &Machine, rules: &Rules) -> AgentHealth {
        let decided = machine.plan().scheduling != Scheduling::Unchanged;
        let stopped = self.stopped.as_ref().map(|(reason, _)| StopProgress {
            reason: reason.clone(),
            ..StopProgress::default()
        });
        let unready = match rules.problem() {
            Some(problem) => Some(Unready::PreviousRulesEnforced(problem.to_string())),
            None if stopped.is_some() => Some(Unready::Stopped),
            None => (!decided).then_some(Unready::Starting),
        };
        AgentHealth {
            unready,
            stopped,
            idle_unsafe: self.idle_unsafe,
            batch_weight_high: self.batch_weight_high,
            ..AgentHealth::default()
        }
    }

    /// Passes the status to the task that writes it, if it may have changed. While something is in force this is after every
    /// evaluation: the task writes the values every few minutes.
    fn report(
        &mut self,
        machine: &Machine,
        rules: &Rules,
        target: Option<StatusTarget<'_>>,
        now: BootTime,
    ) {
        let known = self.target.as_ref();
        let known = known.map(|(uid, generation, reported)| StatusTarget {
            uid,
            generation: *generation,
            reported: *reported,
        });
        let acting = machine.plan().evaluated && machine.is_acting();
        let aged = self.changes_at.is_some_and(|at| now >= at);
        let releasing = matches!(self.stopped, Some((_, false)));
        if known == target && !self.changed && !acting && !aged && !releasing {
            return;
        }
        self.changed = false;
        let evicted: Vec<_> = machine.backend().evicted(now).cloned().collect();
        self.changes_at = self.builder.changes_at(now, &evicted);
        self.target = target.map(StatusTarget::to_owned);
        let Some(target) = target else {
            self.reports.send_replace(None);
            return;
        };
        let status = self.builder.build(&StatusView {
            now,
            time: clock::wall_time(),
            generation: Some(target.generation),
            hash: rules.spec().map(|spec| &*spec.hash),
            agent: &self.agent,
            reports: machine.reports().collect(),
            policy: machine.policy(),
            plan: machine.plan(),
            names: machine
                .records()
                .filter_map(|record| Some((record.uid.clone(), machine.name(&record.uid)?)))
                .collect(),
            records: machine.records().collect(),
            previews: machine.previews(),
            ineffective: &self.ineffective,
            taint_state: machine.backend().taint_state(),
            evicted,
            batch_weight_share: self.batch_weight_share,
            health: self.health(machine, rules),
            not_enforced: not_enforced(rules),
        });
        if let Some((_, released)) = &mut self.stopped {
            *released = is_released(&status);
        }
        self.send(target, status);
    }
}

/// Logs an event.
pub fn log(event: &Event) {
    tracing::info!("{event}");
}

/// The actions without effect: those that the engine observed, and those of rules that could not choose from all pods,
/// since some have no cgroup where the layout expects it.
fn ineffective(
    machine: &Machine,
    reports: &[RuleReport],
    pods: &NodePods,
    now: BootTime,
) -> Vec<IneffectiveAction> {
    let mut actions = machine.ineffective();
    let rules = &machine.policy().rules;
    let acts_on_pods = |id: &RuleId| {
        let rule = rules.iter().find(|rule| rule.id == *id);
        rule.is_some_and(|rule| ActionKind::ALL.iter().any(|it| rule.action.includes(*it)))
    };
    let acting = reports.iter().find(|report| {
        let lasted = report.since.map(|since| now.since(since));
        report.strategy == Strategy::Enforce
            && acts_on_pods(&report.id)
            && report.state == RuleState::Breached
            && lasted.is_some_and(|lasted| lasted >= START_TIMEOUT)
    });
    if let Some(report) = acting {
        actions.extend(pods.without_cgroup().map(|(uid, pod)| IneffectiveAction {
            uid,
            pod,
            rule: report.id.clone(),
            cause: Cause::no_cgroup(),
        }));
    }
    let ended = reports.iter().filter(|report| {
        report.strategy == Strategy::Enforce && report.evictions_ended && report.rung.is_some()
    });
    actions.extend(ended.map(|report| IneffectiveAction {
        uid: PodUid::from(""),
        pod: "its victims".to_owned(),
        rule: report.id.clone(),
        cause: Cause::no_effect(),
    }));
    actions
}

fn asks_for_idle(policy: &PolicySet) -> bool {
    let throttles = policy.rules.iter().filter_map(|rule| rule.action.throttle);
    throttles.into_iter().any(|throttle| throttle.idle)
}

/// Whether a rule or a `PodQOS` puts pods into the idle class.
fn lowers_pods(policy: &PolicySet) -> bool {
    asks_for_idle(policy) || policy.pods.iter().any(|it| it.standing.lowers())
}

#[expect(clippy::cast_possible_truncation, reason = "a percentage")]
fn whole(percent: f64) -> i64 {
    percent.round() as i64
}

/// Whether the batch weight share, in percent, is too high for the idle class. One that was does not end by a small change.
fn is_high(share: Option<f64>, before: bool) -> bool {
    let limit = HIGH_PERCENT * if before { 0.8 } else { 1.0 };
    share.is_some_and(|percent| percent > limit)
}

/// The number of pods for each reason.
fn count_reasons(actions: &[IneffectiveAction]) -> BTreeMap<&'static str, i64> {
    let mut counts: BTreeMap<_, _> = reason::ALL.iter().map(|reason| (*reason, 0)).collect();
    for action in actions {
        *counts.entry(action.cause.reason).or_default() += 1;
    }
    counts
}

/// Every throttled cgroup file, with its pod.
fn throttled_pods(machine: &Machine) -> Vec<ThrottledSeries> {
    let throttles = machine.records().filter(JournalRecord::is_of_throttle);
    let pods = throttles.filter_map(|record| {
        let name = machine.name(&record.uid)?;
        let (namespace, pod) = name.split_once('/')?;
        Some(ThrottledSeries {
            percent: record.ratio,
            namespace: namespace.to_owned(),
            pod: pod.to_owned(),
            rule: record.rule.to_string(),
        })
    });
    pods.collect()
}

/// Whether the status says that everything is restored.
fn is_released(status: &NodeWatermarkStatus) -> bool {
    let is_stop = |it: &&Condition| it.type_ == condition::STOPPED;
    let stop = status.conditions.iter().find(is_stop);
    stop.is_some_and(|it| it.reason == stopped::RELEASED)
}

fn not_enforced(rules: &Rules) -> Vec<(&'static str, String, String)> {
    let refused = rules.refused().iter();
    refused
        .map(|refusal| (refusal.what, refusal.name.clone(), refusal.why.to_string()))
        .collect()
}

/// Counts for each Preview rule the pods, and the node, on which it would have an action in force.
fn would(previews: &[NamedDecision]) -> BTreeMap<RuleId, i64> {
    let subject = |it: &NamedDecision| {
        let uid = it.transition.change.pod().cloned();
        (it.transition.rule.clone(), uid)
    };
    let subjects: BTreeSet<(RuleId, Option<PodUid>)> = previews.iter().map(subject).collect();
    let mut counts = BTreeMap::new();
    for (rule, _) in subjects {
        *counts.entry(rule).or_default() += 1;
    }
    counts
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::policy::{PodPolicy, Standing};

    #[test]
    fn a_batch_weight_share_that_was_high_ends_well_below_a_tenth() {
        assert!(!is_high(Some(10.0), false) && is_high(Some(10.1), false));
        assert!(is_high(Some(8.1), true) && !is_high(Some(8.0), true));
        assert!(!is_high(None, true));
    }

    #[test]
    fn the_idle_class_of_a_rule_or_of_a_pod_qos_lowers_pods() {
        let idle = |preview| PodPolicy {
            name: "batch".to_owned(),
            labels: None,
            scopes: Vec::new(),
            allowed: Vec::new(),
            standing: Standing {
                idle: true,
                preview,
                burst: crate::engine::units::MilliCpu::ZERO,
            },
        };
        let lowers = |pods: Vec<PodPolicy>| {
            lowers_pods(&PolicySet {
                pods,
                ..PolicySet::default()
            })
        };
        assert!(!lowers(Vec::new()) && !lowers(vec![idle(true)]));
        assert!(lowers(vec![idle(false)]));
    }

    #[test]
    fn a_pod_counts_once_in_a_preview_that_throttles_and_evicts_it() {
        let decision = |change: &serde_json::Value| {
            let mut decision = json!({"at": 0, "rule": "q/r", "would": true});
            let fields = change.as_object().expect("an object").clone();
            decision.as_object_mut().expect("an object").extend(fields);
            serde_json::from_value::<NamedDecision>(decision).expect("a decision")
        };
        let grace = json!({"secs": 30, "nanos": 0});
        let previews = [
            json!({"change": "schedulingDisabled", "effect": "NoSchedule"}),
            json!({"change": "reclaim", "pod": "a", "amount": 1}),
            json!({"change": "evict", "pod": "a", "grace": grace}),
            json!({"change": "evict", "pod": "b", "grace": grace}),
        ];
        let previews: Vec<NamedDecision> = previews.iter().map(decision).collect();
        let counts = would(&previews);
        assert_eq!(counts, BTreeMap::from([(RuleId::from("q/r"), 3)]));
    }
}
