//! Builds the status of a `NodeWatermark`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use super::conditions::{AgentHealth, Evaluated, conditions};
use super::obstacles::{Obstacles, over_at};
use crate::agent::backend::{EVICTION_HISTORY, Evicted};
use crate::agent::eviction::{EvictionOutcome, EvictionResult};
use crate::agent::taint::TaintState;
use crate::crd::NodeWatermarkStatus;
use crate::crd::duration::format_duration;
use crate::crd::node_watermark::{
    AgentStatus, Counts, EvictionStatus, PodPolicyStatus, RefusedStatus, RuleStatus,
    SchedulingStatus, ThrottledStatus, WouldLastDay, WouldStatus, scheduling,
};
use crate::crd::words::truncated;
use crate::engine::plan::{Plan, PlanChange, RuleState, Scheduling, Skipped};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{PolicySet, RuleId, TaintEffect};
use crate::engine::time::BootTime;
use crate::engine::{RuleReport, WouldReport};
use crate::messages::event::{Event, NamedDecision, NoticeKind, metric};
use crate::messages::{count, format_value, skip_reason, unknown_reason};
use crate::node::cgroup::control_file::Role;
use crate::node::journal::JournalRecord;
use crate::node::machine::ineffective::{IneffectiveAction, reason};

mod throttled;

/// Longest lists of the status: the object has to stay small.
const MAX_ENTRIES: usize = 64;
/// A failed write to the state directory is shown for this time.
const WRITE_FAILURE_SHOWN_FOR: Duration = Duration::from_mins(1);
/// A larger difference means that the wall clock was set.
const MAX_CLOCK_DRIFT: SignedDuration = SignedDuration::from_secs(2);

/// The current state of a node.
#[derive(Debug)]
pub struct StatusView<'a> {
    /// The time since boot.
    pub now: BootTime,
    /// The wall clock.
    pub time: Timestamp,
    /// `metadata.generation` of the `NodeWatermark`.
    pub generation: Option<i64>,
    /// `spec.hash` of the enforced rules; `None` if they come from no `NodeWatermark`.
    pub hash: Option<&'a str>,
    /// This agent.
    pub agent: &'a AgentStatus,
    /// The state of the rules.
    pub reports: Vec<RuleReport>,
    /// The policies in force.
    pub policy: &'a PolicySet,
    /// The actions in force.
    pub plan: &'a Plan,
    /// Every changed cgroup file.
    pub records: Vec<JournalRecord>,
    /// `namespace/name` of the pods in `records`.
    pub names: BTreeMap<PodUid, String>,
    /// The actions that Preview rules would have in force.
    pub previews: &'a [NamedDecision],
    /// The actions without effect.
    pub ineffective: &'a [IneffectiveAction],
    /// The taint state on the Node.
    pub taint_state: TaintState,
    /// The evictions of the last hour, the newest first.
    pub evicted: Vec<Evicted>,
    /// The batch weight share, in percent.
    pub batch_weight_share: Option<i64>,
    /// Problems that the caller knows of.
    pub health: AgentHealth,
    /// Rules and pod policies of the spec that are not enforced: kind, name, reason.
    pub not_enforced: Vec<(&'static str, String, String)>,
}

/// What was not done to a pod.
const ACT: &str = "act";
const EVICT: &str = "evict";

/// The key of a refusal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Subject {
    rule: RuleId,
    pod: String,
    what: &'static str,
}

/// A refusal and until when it is shown; `None`: until the rule ends.
#[derive(Debug)]
struct Refused {
    reason: String,
    until: Option<BootTime>,
}

/// Builds the status, and remembers what only events contain.
#[derive(Debug, Default)]
pub struct StatusBuilder {
    refused: BTreeMap<Subject, Refused>,
    obstacles: Obstacles,
    write_failure: Option<(BootTime, String)>,
    matched: Vec<PodPolicyStatus>,
    conditions: Vec<Condition>,
    scheduling: Option<SchedulingStatus>,
    /// The wall-clock time of the boot.
    boot: Option<Timestamp>,
}

/// This process as an agent. `boot_id` is the kernel's.
pub fn this_agent(boot_id: &str) -> AgentStatus {
    AgentStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        boot_id: boot_id.to_owned(),
        report_time: None,
        reads_quantities: true,
    }
}

impl StatusBuilder {
    /// Continues from a written status, so that unchanged conditions keep their times.
    pub fn continue_from(status: &NodeWatermarkStatus) -> Self {
        Self {
            conditions: status.conditions.clone(),
            scheduling: status.scheduling.clone(),
            ..Self::default()
        }
    }

    /// Counts the pods that each policy matches and forgets deleted pods and rules; to be called when pods or policies change.
    pub fn count<'a>(&mut self, policy: &PolicySet, pods: impl Iterator<Item = &'a Arc<Pod>>) {
        let mut matched = vec![0i64; policy.pods.len()];
        let mut names = BTreeSet::new();
        for pod in pods {
            names.insert(pod.full_name().to_string());
            for (count, policy) in matched.iter_mut().zip(&policy.pods) {
                *count += i64::from(policy.matches(pod));
            }
        }
        let status =
            |(policy, matched): (&crate::engine::policy::PodPolicy, i64)| PodPolicyStatus {
                name: policy.name.clone(),
                matched,
            };
        self.matched = policy.pods.iter().zip(matched).map(status).collect();
        let is_there = |rule: &RuleId| policy.rules.iter().any(|known| known.id == *rule);
        self.refused
            .retain(|it, _| names.contains(&it.pod) && is_there(&it.rule));
        self.obstacles.retain(is_there);
    }

    /// Records the events of a tick; true if they may change the status.
    pub fn record(&mut self, events: &[Event]) -> bool {
        for event in events {
            match event {
                Event::Decision(decision) => self.record_decision(decision),
                Event::Notice(notice) => {
                    if let NoticeKind::StateNotWritten { reason } = &notice.kind {
                        self.write_failure = Some((notice.at, reason.clone()));
                    }
                }
            }
        }
        events.iter().any(|event| !event.is_detail())
    }

    fn record_decision(&mut self, decision: &NamedDecision) {
        let transition = &decision.transition;
        let pod = || decision.pod_name.clone().unwrap_or_default();
        match &transition.change {
            PlanChange::State {
                to: RuleState::Normal,
                ..
            } => {
                self.refused.retain(|it, _| it.rule != transition.rule);
                self.obstacles.retain(|rule| *rule != transition.rule);
            }
            PlanChange::Skipped { reason, .. } if !transition.would => {
                self.record_skipped(&transition.rule, pod(), *reason);
            }
            PlanChange::Throttle { .. } if !transition.would => {
                self.forget(&transition.rule, &pod());
            }
            PlanChange::Evict { .. } if !transition.would => self.forget(&transition.rule, &pod()),
            _ => {}
        }
    }

    fn record_skipped(&mut self, rule: &RuleId, pod: String, reason: Skipped) {
        // Transient reasons: the user cannot do anything about them.
        let transient = matches!(
            reason,
            Skipped::UsesLittle | Skipped::NotRunning | Skipped::NoSample
        );
        let subject = Subject {
            rule: rule.clone(),
            pod,
            what: ACT,
        };
        if transient {
            self.refused.remove(&subject);
        } else if reason != Skipped::BackingOff {
            let reason = skip_reason(reason).to_owned();
            let until = None;
            self.refused.insert(subject, Refused { reason, until });
        }
    }

    /// The pod is acted on again. Whether it can be evicted is not known yet.
    fn forget(&mut self, rule: &RuleId, pod: &str) {
        self.refused
            .retain(|it, _| it.what != ACT || it.rule != *rule || it.pod != pod);
    }

    /// Records the outcome of an eviction; true if it met a new obstacle that blocks all evictions.
    pub fn record_outcome(&mut self, outcome: &EvictionOutcome) -> bool {
        let target = &outcome.request.target;
        let subject = Subject {
            rule: outcome.request.rule.clone(),
            pod: format!("{}/{}", target.namespace, target.name),
            what: EVICT,
        };
        match &outcome.result {
            EvictionResult::Refused { why, until } if why.obstacle().is_none() => {
                let reason = why.to_string();
                let until = Some(over_at(outcome, *until));
                self.refused.insert(subject, Refused { reason, until });
            }
            EvictionResult::Accepted | EvictionResult::Terminating | EvictionResult::Gone => {
                drop(self.refused.remove(&subject));
            }
            // These are not about the pod.
            EvictionResult::Refused { .. } | EvictionResult::ResultUnknown(_) => {}
        }
        self.obstacles.record(outcome)
    }

    /// When the status changes by the passing of time alone, if it does.
    pub fn changes_at(&self, now: BootTime, evicted: &[Evicted]) -> Option<BootTime> {
        let evictions = evicted
            .iter()
            .flat_map(|it| [Some(it.at + EVICTION_HISTORY), it.until])
            .flatten();
        let write_failure = self
            .write_failure
            .as_ref()
            .map(|(at, _)| *at + WRITE_FAILURE_SHOWN_FOR);
        let refused = self.refused.values().filter_map(|it| it.until);
        let times = evictions.chain(write_failure).chain(self.obstacles.ends());
        let times = times.chain(refused);
        times.filter(|at| *at > now).min()
    }

    /// Builds the current status.
    pub fn build(&mut self, view: &StatusView) -> NodeWatermarkStatus {
        let boot_time = self.boot_time(view);
        let throttled = throttled::status(view);
        let would = would(view.previews);
        self.scheduling = scheduling(view, self.scheduling.as_ref());
        let health = self.health(view);
        self.conditions = conditions(
            &health,
            view.generation,
            &self.conditions,
            seconds(view.time),
        );
        NodeWatermarkStatus {
            observed_hash: view.hash.map(str::to_owned),
            agent: Some(view.agent.clone()),
            counts: Some(counts(view, &throttled, &would)),
            rules: view
                .reports
                .iter()
                .map(|it| rule(view, it, boot_time))
                .collect(),
            scheduling: self.scheduling.clone(),
            throttled,
            bursts: throttled::bursts(view),
            evictions: view
                .evicted
                .iter()
                .take(MAX_ENTRIES)
                .map(eviction)
                .collect(),
            would: would.into_iter().take(MAX_ENTRIES).collect(),
            refused: self.refusals(view),
            pod_policies: self.matched.clone(),
            batch_weight_share: view.batch_weight_share,
            conditions: self.conditions.clone(),
        }
    }

    /// The wall-clock time of the boot, stable so that a moment always has the same time in the status.
    fn boot_time(&mut self, view: &StatusView) -> Timestamp {
        let since_boot = SignedDuration::try_from(view.now.since(BootTime::default()));
        let boot = view.time - since_boot.unwrap_or_default();
        let known = self
            .boot
            .filter(|known| boot.duration_since(*known).abs() < MAX_CLOCK_DRIFT);
        *self.boot.insert(known.unwrap_or(boot))
    }

    fn health(&self, view: &StatusView) -> AgentHealth {
        let mut health = view.health.clone();
        health.rules = Evaluated::of(&view.reports);
        if view.taint_state.contested {
            let message = "another writer keeps changing our taint on the Node".to_owned();
            health.ineffective.push((reason::CONTESTED, message));
        }
        let actions = view.ineffective.iter().map(|action| {
            let IneffectiveAction {
                pod, rule, cause, ..
            } = action;
            (cause.reason, format!("{rule}: {pod}: {}", cause.message))
        });
        health.ineffective.extend(actions);
        if let [(what, name, why), ..] = view.not_enforced.as_slice() {
            let more = match view.not_enforced.len() {
                1 => String::new(),
                all => format!(" (and {} more)", all - 1),
            };
            let message = format!("not enforced: {what} {name}: {why}{more}");
            health.degraded.push(("PartsNotUnderstood", message));
        }
        if let Some(stopped) = &mut health.stopped {
            stopped.left = not_restored(view);
        }
        if let Some(why) = &view.taint_state.failing {
            health.degraded.push(("NodeNotUpdated", why.clone()));
        }
        if let Some((at, why)) = &self.write_failure
            && view.now.since(*at) < WRITE_FAILURE_SHOWN_FOR
        {
            health.degraded.push(("StateNotWritten", why.clone()));
        }
        health
    }

    fn refusals(&self, view: &StatusView) -> Vec<RefusedStatus> {
        let not_enforced = view
            .not_enforced
            .iter()
            .map(|(what, name, why)| RefusedStatus {
                what: (*what).to_owned(),
                pod: None,
                rule: Some(name.clone()),
                reason: truncated(why.clone(), 1024),
            });
        let obstacles = self.obstacles.current(view.now);
        let obstacles = obstacles.map(|(rule, reason)| RefusedStatus {
            what: EVICT.to_owned(),
            pod: None,
            rule: Some(rule.to_string()),
            reason: truncated(reason.to_owned(), 1024),
        });
        let is_shown = |it: &Refused| it.until.is_none_or(|until| view.now < until);
        let pods = self.refused.iter().filter(|(_, it)| is_shown(it));
        let pods = pods.map(|(subject, it)| RefusedStatus {
            what: subject.what.to_owned(),
            pod: Some(subject.pod.clone()),
            rule: Some(subject.rule.to_string()),
            reason: truncated(it.reason.clone(), 1024),
        });
        not_enforced
            .chain(obstacles)
            .chain(pods)
            .take(MAX_ENTRIES)
            .collect()
    }
}

/// Times in a status have no fractions.
pub(super) fn seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn rule(view: &StatusView, report: &RuleReport, boot: Timestamp) -> RuleStatus {
    let since = report.since.map(|since| time(boot, since));
    RuleStatus {
        id: report.id.to_string(),
        metric: metric(view.policy, &report.id),
        strategy: report.strategy.name().to_owned(),
        state: format!("{:?}", report.state),
        value: report.value.filter(|value| value.is_finite()).map(rounded),
        threshold: report.threshold,
        limited: report.limited,
        rung: report.rung.map(|rung| rung.name().to_owned()),
        next_rung: report.next_rung.map(|rung| rung.name().to_owned()),
        earliest_eviction_time: report.earliest_eviction.map(|at| time(boot, at)),
        evictions_ended: report.evictions_ended,
        outside_hours: report.outside_hours,
        cool_down_seconds: lengthened(view.policy, report),
        since,
        unknown: report.unknown.map(|why| unknown_reason(why).to_owned()),
        would_last_day: report.would.map(would_last_day),
    }
}

/// Minutes are rounded up, so that a short breach shows.
fn would_last_day(would: WouldReport) -> WouldLastDay {
    let counts = would.counts;
    let minutes = counts.active.as_secs().div_ceil(60);
    WouldLastDay {
        breaches: counts.breaches.into(),
        active_minutes: i64::try_from(minutes).unwrap_or(i64::MAX),
        throttle_rounds: counts.throttle_rounds.into(),
        evictions: counts.evictions.into(),
        last_breach_time: would.last_breach.map(|at| Time(seconds(at))),
        since: Some(Time(seconds(would.since))),
    }
}

fn time(boot: Timestamp, at: BootTime) -> Time {
    let since = SignedDuration::try_from(at.since(BootTime::default()));
    Time(seconds(boot + since.unwrap_or_default()))
}

/// The cool-down of the rule, if it is longer than its action says.
fn lengthened(policy: &PolicySet, report: &RuleReport) -> Option<i64> {
    let rule = policy.rules.iter().find(|rule| rule.id == report.id)?;
    let seconds = i64::try_from(report.cool_down.as_secs()).ok()?;
    (report.cool_down > rule.action.cool_down).then_some(seconds)
}

/// Rounds to three decimal places.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// What is not restored yet.
fn not_restored(view: &StatusView) -> Vec<String> {
    let pods: BTreeSet<_> = view.records.iter().map(|record| &record.uid).collect();
    let pods = match pods.len() {
        0 => None,
        pods => Some(format!("CPU of {}", count(pods, "pod"))),
    };
    let taint = match &view.taint_state {
        TaintState { known: false, .. } => {
            Some("our taint, if there is one: the node was not read yet")
        }
        TaintState { effect: None, .. } => None,
        TaintState { .. } => Some("our taint"),
    };
    pods.into_iter().chain(taint.map(str::to_owned)).collect()
}

/// The scheduling state of the Node and the rules that want it.
fn scheduling(view: &StatusView, before: Option<&SchedulingStatus>) -> Option<SchedulingStatus> {
    let rules = match &view.plan.scheduling {
        Scheduling::Unchanged if view.taint_state.effect.is_none() => return None,
        Scheduling::Unchanged | Scheduling::Enabled => Vec::new(),
        Scheduling::Disabled { rules, .. } => rules.iter().map(ToString::to_string).collect(),
    };
    let state = view
        .taint_state
        .effect
        .map_or(scheduling::ENABLED, TaintEffect::name);
    let state = state.to_owned();
    let same = before.filter(|before| before.state == state);
    let since = same.map_or_else(|| Some(Time(seconds(view.time))), |same| same.since.clone());
    Some(SchedulingStatus {
        state,
        rules,
        since,
    })
}

fn counts(view: &StatusView, throttled: &[ThrottledStatus], would: &[WouldStatus]) -> Counts {
    let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
    let breached = view
        .reports
        .iter()
        .filter(|report| report.state == RuleState::Breached);
    let pods: BTreeSet<_> = would
        .iter()
        .filter_map(|it| Some((it.namespace.as_ref()?, it.pod.as_ref()?)))
        .collect();
    let would_last_day = view.reports.iter().filter_map(|report| report.would);
    let would_last_day = would_last_day.map(|it| i64::from(it.counts.breaches));
    Counts {
        rules: count(view.reports.len()),
        breached: count(breached.count()),
        throttled: count(throttled.len()),
        evicted_last_hour: count(view.evicted.len()),
        would: count(pods.len()),
        would_last_day: would_last_day.reduce(i64::saturating_add),
    }
}

fn eviction(evicted: &Evicted) -> EvictionStatus {
    EvictionStatus {
        namespace: evicted.namespace.clone(),
        pod: evicted.name.clone(),
        uid: evicted.uid.to_string(),
        rule: evicted.rule.to_string(),
        time: Some(Time(seconds(evicted.time))),
        outcome: match evicted.until {
            Some(_) => "Terminating",
            None => "Gone",
        }
        .to_owned(),
    }
}

fn would(previews: &[NamedDecision]) -> Vec<WouldStatus> {
    let of = |decision: &NamedDecision| {
        let (what, how) = would_do(decision)?;
        let name = decision
            .pod_name
            .as_deref()
            .and_then(|it| it.split_once('/'));
        Some(WouldStatus {
            rule: decision.transition.rule.to_string(),
            what: what.to_owned(),
            namespace: name.map(|(namespace, _)| namespace.to_owned()),
            pod: name.map(|(_, name)| name.to_owned()),
            how: Some(truncated(how, 256)),
        })
    };
    previews.iter().filter_map(of).collect()
}

fn would_do(decision: &NamedDecision) -> Option<(&'static str, String)> {
    let metric = decision.metric.as_deref();
    Some(match &decision.transition.change {
        PlanChange::Throttle {
            to, idle, quota, ..
        } => {
            let idle = if *idle { ", idle class" } else { "" };
            ("throttle", format!("to {to} %, {quota}{idle}"))
        }
        PlanChange::Burst { burst, .. } => ("burst", format!("up to {burst} above its limit")),
        PlanChange::Reclaim { amount, .. } => ("reclaim", format!("up to {amount} of page cache")),
        PlanChange::Evict { grace, release, .. } => {
            let release = release.map_or_else(String::new, |release| {
                format!(", to release {}", format_value(metric, release as f64))
            });
            (
                "evict",
                format!("grace {}{release}", format_duration(*grace)),
            )
        }
        PlanChange::SchedulingDisabled { effect } => {
            ("disableScheduling", effect.name().to_owned())
        }
        _ => return None,
    })
}

/// Whether a record is of a CPU quota file.
const fn is_quota(record: &JournalRecord) -> bool {
    matches!(record.file.role(), Role::Quota)
}

#[cfg(test)]
mod tests;
