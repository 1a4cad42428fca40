//! Events on the Node, its `NodeWatermark` and its pods: one for each transition, never one per tick or throttle step.
//!
//! | object | events |
//! |---|---|
//! | Node | rules: breached, cooling, ended; scheduling disabled, enabled; the emergency stop; an unsafe idle class |
//! | Pod | throttle: start, floor, end; eviction: accepted, refused |
//! | `NodeWatermark` | what prevents the agent from carrying out the rules |
//!
//! A Preview rule has the events that it would have with `strategy: Enforce`, with reasons that start with `Would`.

use std::collections::{BTreeMap, BTreeSet};

use crate::agent::eviction::{EvictionOutcome, EvictionResult};
use crate::agent::report::conditions::{BATCH_WEIGHT_MESSAGE, IDLE_UNSAFE_MESSAGE};
use crate::agent::taint::TaintState;
use crate::crd::duration::format_duration;
use crate::crd::emergency_stop;
use crate::engine::RuleReport;
use crate::engine::plan::{PlanChange, RuleState, Skipped, Transition, Unknown};
use crate::engine::pod::PodUid;
use crate::engine::policy::{PolicySet, Rule, RuleId, Standing, TaintEffect};
use crate::engine::units::MilliCpu;
use crate::messages::event::{Event, NamedDecision, NoticeKind};
use crate::messages::{MEMORY_RUNS_OUT, format_value, unknown_reason};
use crate::node::cgroup::control_file::Role;
use crate::node::journal::JournalRecord;
use crate::node::machine::ineffective::IneffectiveAction;

mod throttles;

use self::throttles::Throttles;

/// The object that an event regards.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Regarding {
    /// Our Node.
    Node,
    /// Our `NodeWatermark`.
    Watermark,
    /// A pod of ours.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its UID.
        uid: PodUid,
    },
}

impl Regarding {
    /// The pod of a `namespace/name`.
    fn pod(full_name: Option<&str>, uid: &PodUid) -> Option<Self> {
        let (namespace, name) = full_name?.split_once('/')?;
        Some(Self::Pod {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.clone(),
        })
    }
}

/// An event to be published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewEvent {
    /// The object.
    pub regarding: Regarding,
    /// Its type is Warning.
    pub warning: bool,
    /// Its reason.
    pub reason: &'static str,
    /// Its message.
    pub message: String,
}

/// The reasons of an action: enforced, and in Preview.
type Reasons = (&'static str, &'static str);

const THROTTLED: Reasons = ("PodThrottled", "WouldThrottle");
const AT_FLOOR: Reasons = ("PodAtThrottleFloor", "WouldThrottleToFloor");
const RESTORED: Reasons = ("PodRestored", "WouldRestore");
const HELD: Reasons = ("IdleClassSet", "WouldSetIdleClass");
const RELEASED: Reasons = ("IdleClassEnded", "WouldEndIdleClass");
const BURST: Reasons = ("BurstSet", "WouldSetBurst");
const BURST_ENDED: Reasons = ("BurstEnded", "WouldEndBurst");
const RECLAIMED: Reasons = ("PageCacheReclaimed", "WouldReclaim");
const EVICTED: Reasons = ("PodEvicted", "WouldEvict");
const CLOSED: Reasons = ("SchedulingDisabled", "WouldDisableScheduling");
const OPENED: Reasons = ("SchedulingEnabled", "WouldEnableScheduling");

const fn reason_of((done, would): Reasons, is_would: bool) -> &'static str {
    if is_would { would } else { done }
}

/// The state that messages are built from.
#[derive(Clone, Copy, Debug)]
pub struct MessageFacts<'a> {
    /// The policies in force.
    pub policy: &'a PolicySet,
    /// The state of the rules.
    pub reports: &'a [RuleReport],
}

fn rule<'a>(policy: &'a PolicySet, id: &RuleId) -> Option<&'a Rule> {
    policy.rules.iter().find(|rule| rule.id == *id)
}

/// The lowest ratio of a rule's throttle.
fn floor(policy: &PolicySet, id: &RuleId) -> Option<u8> {
    let throttle = rule(policy, id)?.action.throttle?;
    Some(throttle.min_ratio)
}

impl MessageFacts<'_> {
    fn rule(&self, id: &RuleId) -> Option<&Rule> {
        rule(self.policy, id)
    }

    /// `q/r: cpu_total_usage 7200m, threshold 4000m`
    fn why(&self, id: &RuleId) -> String {
        let report = self.reports.iter().find(|report| report.id == *id);
        let metric = self.rule(id).map(|rule| rule.metric.to_string());
        let (Some(report), Some(metric)) = (report, metric) else {
            return id.to_string();
        };
        let value = |value| format_value(Some(&metric), value);
        let now = report.value.map_or_else(|| "unknown".to_owned(), value);
        format!(
            "{id}: {metric} {now}, threshold {}",
            value(report.threshold)
        )
    }
}

/// What a `PodQOS` gives its pods at all times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Gives {
    IdleClass,
    Burst,
}

impl Gives {
    fn is_of(self, standing: Standing) -> bool {
        match self {
            Self::IdleClass => standing.idle,
            Self::Burst => standing.burst > MilliCpu::ZERO,
        }
    }
}

/// Builds events from decisions and outcomes.
#[derive(Debug, Default)]
pub struct EventBuilder {
    throttles: Throttles,
    /// What each `PodQOS` is reported to give its pods; true in Preview.
    standing: BTreeSet<(RuleId, bool, Gives)>,
    /// Rules that were reported as unknown.
    unknown: BTreeSet<RuleId>,
    /// The taint state on the Node, as last reported.
    taint_state: Option<TaintState>,
    /// Messages of the evictions that were decided.
    evicting: BTreeMap<PodUid, String>,
    /// Actions without effect, as last reported.
    ineffective: BTreeMap<PodUid, &'static str>,
    /// Whether a rule asked for an idle class that is unsafe, as last reported.
    idle_unsafe: bool,
    /// Whether the batch pods weighed too much, as last reported.
    batch_weight_high: bool,
}

impl EventBuilder {
    /// Adopts throttles that an earlier process already reported.
    pub fn adopt(&mut self, records: impl Iterator<Item = JournalRecord>, policy: &PolicySet) {
        for record in records {
            if record.rule.pod_qos().is_some() {
                let is_burst = record.file.role() == Role::Burst;
                let gives = if is_burst {
                    Gives::Burst
                } else {
                    Gives::IdleClass
                };
                self.standing.insert((record.rule, false, gives));
                continue;
            }
            let floor = floor(policy, &record.rule);
            self.throttles.adopt(record, floor);
        }
    }

    /// Forgets deleted pods.
    pub fn forget(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        self.throttles.forget(is_there);
    }

    /// Adds the events of a tick.
    pub fn record(&mut self, events: &[Event], facts: MessageFacts, out: &mut Vec<NewEvent>) {
        for event in events {
            match event {
                Event::Decision(decision) => self.decided(decision, facts, out),
                Event::Notice(notice) => notice_event(&notice.kind, out),
            }
        }
    }

    fn decided(&mut self, decision: &NamedDecision, facts: MessageFacts, out: &mut Vec<NewEvent>) {
        let Transition {
            rule,
            would,
            change,
            ..
        } = &decision.transition;
        match change {
            PlanChange::State { from, to, .. } => {
                if (*from, *to) == (RuleState::Normal, RuleState::Breached) {
                    self.throttles.start(rule, *would);
                }
                state(decision, facts, out);
            }
            PlanChange::Unknown { reason } => self.value_unknown(rule, *reason, decision, out),
            PlanChange::Known { .. } if self.unknown.remove(rule) => {
                let message = format!("{} has a value again", facts.why(rule));
                out.push(new_event(Regarding::Watermark, false, "RuleKnown", message));
            }
            PlanChange::OutsideHours => drop(self.unknown.remove(rule)),
            PlanChange::Throttle { idle, .. } if rule.pod_qos().is_some() => {
                out.extend(self.standing((rule, *would, Gives::IdleClass), *idle, facts.policy));
            }
            PlanChange::Burst { burst, .. } => {
                let given = *burst > MilliCpu::ZERO;
                out.extend(self.standing((rule, *would, Gives::Burst), given, facts.policy));
            }
            PlanChange::Throttle { .. } => {
                let floor = floor(facts.policy, rule);
                let why = facts.why(rule);
                self.throttles.step(decision, floor, &why, out);
            }
            PlanChange::Skipped {
                reason: Skipped::AtFloor,
                ..
            } => self.throttles.floor(decision, out),
            PlanChange::Reclaim { pod, amount } => {
                let message = format!("{}; up to {amount} of page cache", facts.why(rule));
                let regarding = Regarding::pod(decision.pod_name.as_deref(), pod);
                let reason = reason_of(RECLAIMED, *would);
                out.extend(regarding.map(|regarding| new_event(regarding, false, reason, message)));
            }
            PlanChange::Evict { .. } => self.evict(decision, facts, out),
            PlanChange::SchedulingDisabled { effect } if *would => {
                let message = closed(*effect, &facts.why(rule));
                out.push(on_node(true, reason_of(CLOSED, true), message));
            }
            PlanChange::SchedulingEnabled if *would => {
                out.push(on_node(false, reason_of(OPENED, true), facts.why(rule)));
            }
            _ => {}
        }
    }

    /// A `PodQOS` takes a pod into the idle class or gives it a burst, or no longer does: an event for the first pod, and when the
    /// policy has gone.
    fn standing(
        &mut self,
        (rule, would, gives): (&RuleId, bool, Gives),
        starts: bool,
        policy: &PolicySet,
    ) -> Option<NewEvent> {
        let key = (rule.clone(), would, gives);
        let name = rule.pod_qos()?;
        let mut policies = policy.pods.iter().filter(|it| it.name == name);
        let stays = policies.any(|it| gives.is_of(it.standing) && it.standing.preview == would);
        let (reasons, what) = match (gives, starts) {
            (Gives::IdleClass, true) => (HELD, "its pods are in the idle class at all times"),
            (Gives::IdleClass, false) => (RELEASED, "its pods are no longer in the idle class"),
            (Gives::Burst, true) => (BURST, "its pods may burst above their CPU limits"),
            (Gives::Burst, false) => (
                BURST_ENDED,
                "its pods no longer burst above their CPU limits",
            ),
        };
        let changed = if starts {
            self.standing.insert(key)
        } else {
            !stays && self.standing.remove(&key)
        };
        let message = format!("{rule}: {what}");
        let reason = reason_of(reasons, would);
        changed.then(|| new_event(Regarding::Watermark, false, reason, message))
    }

    /// A rule has no value. The first sample after a start has nothing to compare with: that is no event.
    fn value_unknown(
        &mut self,
        rule: &RuleId,
        why: Unknown,
        decision: &NamedDecision,
        out: &mut Vec<NewEvent>,
    ) {
        if matches!(why, Unknown::Rebased | Unknown::Sparse) || !self.unknown.insert(rule.clone()) {
            return;
        }
        let metric = decision.metric.as_deref().unwrap_or("its metric");
        let why = unknown_reason(why);
        let message = format!("{rule}: {metric} cannot be evaluated: {why}; actions in force stay");
        out.push(new_event(
            Regarding::Watermark,
            true,
            "RuleUnknown",
            message,
        ));
    }

    fn evict(&mut self, decision: &NamedDecision, facts: MessageFacts, out: &mut Vec<NewEvent>) {
        let PlanChange::Evict {
            pod,
            grace,
            release,
            urgent,
        } = &decision.transition.change
        else {
            return;
        };
        let metric = decision.metric.as_deref();
        let release = release.map_or_else(String::new, |release| {
            format!(", to release {}", format_value(metric, release as f64))
        });
        let why = facts.why(&decision.transition.rule);
        let urgent = if *urgent { MEMORY_RUNS_OUT } else { "" };
        let grace = format_duration(*grace);
        let message = format!("{why}{urgent}; grace {grace}{release}");
        if decision.transition.would {
            let regarding = Regarding::pod(decision.pod_name.as_deref(), pod);
            let reason = reason_of(EVICTED, true);
            out.extend(regarding.map(|regarding| new_event(regarding, true, reason, message)));
        } else {
            self.evicting.insert(pod.clone(), message);
        }
    }

    /// Adds the event of an eviction's outcome. What blocks all evictions is not the pod's event: see [`evictions_blocked`].
    pub fn outcome(&mut self, outcome: &EvictionOutcome, out: &mut Vec<NewEvent>) {
        let target = &outcome.request.target;
        let uid = outcome.request.uid();
        let regarding = Regarding::Pod {
            namespace: target.namespace.clone(),
            name: target.name.clone(),
            uid: uid.clone(),
        };
        match &outcome.result {
            EvictionResult::ResultUnknown(_) => {}
            EvictionResult::Accepted => {
                let message = self.evicting.remove(&uid);
                let message = message.unwrap_or_else(|| outcome.request.rule.to_string());
                out.push(new_event(
                    regarding,
                    true,
                    reason_of(EVICTED, false),
                    message,
                ));
            }
            EvictionResult::Terminating | EvictionResult::Gone => drop(self.evicting.remove(&uid)),
            EvictionResult::Refused { why, .. } => {
                self.evicting.remove(&uid);
                if why.obstacle().is_none() {
                    let message = format!("{}: {why}", outcome.request.rule);
                    out.push(new_event(regarding, true, "EvictionRefused", message));
                }
            }
        }
    }

    /// Adds the events of actions that have no effect any more, or have one again.
    pub fn ineffective(&mut self, actions: &[IneffectiveAction], out: &mut Vec<NewEvent>) {
        let reasons = actions.iter().map(|it| (it.uid.clone(), it.cause.reason));
        let before = std::mem::replace(&mut self.ineffective, reasons.collect());
        for action in actions {
            if before.get(&action.uid) == Some(&action.cause.reason) {
                continue;
            }
            let message = format!("{}: {}", action.rule, action.cause.message);
            let regarding = if action.uid.0.is_empty() {
                Some(Regarding::Watermark)
            } else {
                Regarding::pod(Some(&action.pod), &action.uid)
            };
            out.extend(regarding.map(|it| new_event(it, true, "ActionIneffective", message)));
        }
    }

    /// Adds the event of an idle class that has become unsafe while a rule asks for it.
    pub fn idle_class(&mut self, idle_unsafe: bool, out: &mut Vec<NewEvent>) {
        if idle_unsafe && !self.idle_unsafe {
            out.push(on_node(true, "IdleUnsafe", IDLE_UNSAFE_MESSAGE.to_owned()));
        }
        self.idle_unsafe = idle_unsafe;
    }

    /// Adds the event of batch pods that have come to weigh too much for the idle class.
    pub fn batch_weight(&mut self, high: bool, out: &mut Vec<NewEvent>) {
        if high && !self.batch_weight_high {
            let message = BATCH_WEIGHT_MESSAGE.to_owned();
            out.push(on_node(true, "BatchWeightHigh", message));
        }
        self.batch_weight_high = high;
    }

    /// Adds the events of a changed taint state; `message` says which rules want it, with their values.
    pub fn taint_state(
        &mut self,
        taint_state: &TaintState,
        message: &str,
        out: &mut Vec<NewEvent>,
    ) {
        if !taint_state.known {
            return;
        }
        let Some(before) = self.taint_state.replace(taint_state.clone()) else {
            return;
        };
        if before.effect != taint_state.effect {
            if let Some(effect) = taint_state.effect {
                out.push(on_node(
                    true,
                    reason_of(CLOSED, false),
                    closed(effect, message),
                ));
            } else {
                let message =
                    "no rule disables scheduling any more: the taint is removed".to_owned();
                out.push(on_node(false, reason_of(OPENED, false), message));
            }
        }
        if taint_state.contested && !before.contested {
            let message =
                "another writer keeps changing our taint and condition: leaving them alone for a while".to_owned();
            out.push(on_node(true, "TaintContested", message));
        }
    }
}

/// The event for an obstacle that blocks all evictions of a rule.
pub fn evictions_blocked(outcome: &EvictionOutcome) -> NewEvent {
    let message = format!(
        "{}: no pod is evicted: {}",
        outcome.request.rule, outcome.result
    );
    new_event(Regarding::Watermark, true, "EvictionRefused", message)
}

/// The event for an emergency stop that started for this reason, or ended.
pub fn stopped(reason: Option<&str>) -> NewEvent {
    let message = match reason {
        Some(reason) => format!(
            "{}; everything in force is being restored, and no new action is taken",
            emergency_stop::stop_message(reason)
        ),
        None => "the emergency stop is over: the rules are evaluated again".to_owned(),
    };
    let event_reason = reason.map_or("EmergencyStopEnded", |_| "EmergencyStop");
    new_event(Regarding::Node, reason.is_some(), event_reason, message)
}

fn state(decision: &NamedDecision, facts: MessageFacts, out: &mut Vec<NewEvent>) {
    let PlanChange::State {
        to,
        value,
        threshold,
        unknown_too_long,
        ..
    } = &decision.transition.change
    else {
        return;
    };
    let id = &decision.transition.rule;
    let metric = decision.metric.as_deref();
    let rule = facts.rule(id);
    let named = metric.unwrap_or("its metric");
    let now = value.map_or_else(|| "unknown".to_owned(), |it| format_value(metric, it));
    let threshold = format_value(metric, *threshold);
    let preview = if decision.transition.would {
        " (Preview: no action is taken)"
    } else {
        ""
    };
    match to {
        RuleState::Breached => {
            let action = rule.map_or("", |rule| rule.action.name.as_str());
            let message = format!(
                "{id}: {named} {now} is above its threshold {threshold}; action {action}{preview}"
            );
            out.push(on_node(true, "RuleBreached", message));
        }
        RuleState::Cooling => {
            let cool = rule.map_or_else(String::new, |rule| format_duration(rule.action.cool_down));
            let message = format!(
                "{id}: {named} {now}, threshold {threshold}: actions stay in force for {cool} after the last breach{preview}"
            );
            out.push(on_node(false, "RuleCooling", message));
        }
        RuleState::Normal => {
            let outside = facts
                .reports
                .iter()
                .any(|it| it.id == *id && it.outside_hours);
            let why = if *unknown_too_long {
                format!("{named} has been unknown for too long")
            } else if outside {
                "outside its hours".to_owned()
            } else {
                format!("{named} {now}, threshold {threshold}")
            };
            let message = format!("{id}: {why}: what the rule did is being restored{preview}");
            out.push(on_node(*unknown_too_long, "RuleEnded", message));
        }
    }
}

fn closed(effect: TaintEffect, why: &str) -> String {
    let taint = format!("taint {}:{}", crate::cluster::taint::KEY, effect.name());
    if why.is_empty() {
        return taint;
    }
    format!("{why}; {taint}")
}

const fn new_event(
    regarding: Regarding,
    warning: bool,
    reason: &'static str,
    message: String,
) -> NewEvent {
    NewEvent {
        regarding,
        warning,
        reason,
        message,
    }
}

const fn on_node(warning: bool, reason: &'static str, message: String) -> NewEvent {
    new_event(Regarding::Node, warning, reason, message)
}

fn notice_event(notice: &NoticeKind, out: &mut Vec<NewEvent>) {
    let (reason, message) = match notice {
        NoticeKind::ThrottleFailed { pod_name, reason } => {
            let pod = pod_name.as_deref().unwrap_or("a pod");
            ("ThrottleFailed", format!("{pod}: {reason}"))
        }
        NoticeKind::StateNotWritten { reason } => ("StateNotWritten", reason.clone()),
        NoticeKind::Probe {
            url,
            failure: Some(failure),
        } => ("ProbeFailed", format!("{url}: {failure}")),
        NoticeKind::Probe { url, failure: None } => {
            let message = format!("{url} answers again");
            return out.push(new_event(
                Regarding::Watermark,
                false,
                "ProbeAnswers",
                message,
            ));
        }
        _ => return,
    };
    out.push(new_event(Regarding::Watermark, true, reason, message));
}

#[cfg(test)]
mod tests;
