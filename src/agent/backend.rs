//! The backend for a node in a cluster: the taint through the API server, evictions through the controller's leader. It
//! passes requests to tasks and never waits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::Client;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::eviction::{
    EvictionChannel, EvictionObstacle, EvictionOutcome, EvictionResult, Evictor, PoliciesInForce,
    Requester, WantedEviction,
};
use super::taint::{self, TaintState, WantedTaint, WatchedNode};
use crate::clock;
use crate::engine::RuleReport;
use crate::engine::plan::{Evict, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::policy::{PolicySet, RuleId};
use crate::engine::time::BootTime;
use crate::messages::event::metric;
use crate::messages::format_value;
use crate::node::machine::backend::Backend;
use crate::node::machine::enforce::Effect;
use crate::node::machine::workload::Workload;

/// How long evictions are kept in memory.
pub const EVICTION_HISTORY: Duration = Duration::from_hours(1);
const MAX_REMEMBERED: usize = 64;
/// How long after its grace period to wait for an evicted pod to disappear.
const TERMINATION_TIMEOUT: Duration = Duration::from_mins(1);

/// An eviction of the last hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Evicted {
    /// Which pod.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The rule that caused it.
    pub rule: RuleId,
    /// Wall-clock time of acceptance.
    pub time: Timestamp,
    /// Time of acceptance since boot.
    pub at: BootTime,
    /// Until when to wait for the pod to terminate; absent: finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<BootTime>,
}

/// Taints the node and evicts its pods through the API server.
#[derive(Debug)]
pub struct ApiServer {
    wanted: watch::Sender<WantedTaint>,
    taint_state: watch::Receiver<TaintState>,
    in_force: watch::Sender<PoliciesInForce>,
    evictions: EvictionChannel,
    /// Requested evictions without an answer yet.
    requested: Vec<PodUid>,
    /// For each rule that disables scheduling: its threshold, and the message of the evaluation that started it.
    disabled_by: BTreeMap<RuleId, (f64, String)>,
    /// Newest first.
    evicted: VecDeque<Evicted>,
    /// Time between two evaluations.
    evaluation_period: Duration,
    /// Outcomes since the last [`Self::take_outcomes`].
    outcomes: Vec<EvictionOutcome>,
}

impl ApiServer {
    /// Spawns the tasks for the node named `node`; they end when this value is dropped. `seen` is the node from a watch;
    /// `requester` evicts its pods.
    pub fn start(
        client: Client,
        node: &str,
        requester: impl Requester,
        seen: watch::Receiver<WatchedNode>,
        evaluation_period: Duration,
    ) -> Self {
        let (in_force, watched) = watch::channel(PoliciesInForce::default());
        let (wanted, wanted_receiver) = watch::channel(WantedTaint::default());
        let (taint_sender, taint_state) = watch::channel(TaintState::default());
        let (evictor, evictions) = Evictor::new(
            client.clone(),
            requester,
            node,
            watched,
            taint_state.clone(),
        );
        tokio::spawn(evictor.run());
        tokio::spawn(taint::run(client, wanted_receiver, seen, taint_sender));
        Self {
            wanted,
            taint_state,
            in_force,
            evictions,
            requested: Vec::new(),
            disabled_by: BTreeMap::new(),
            evicted: VecDeque::new(),
            evaluation_period,
            outcomes: Vec::new(),
        }
    }

    /// Sets the policies in force and the hash of their `NodeWatermark`: evictions that they no longer want are not
    /// requested.
    pub fn set_policy(&self, policy: Arc<PolicySet>, hash: Arc<str>) {
        self.in_force.send_replace(PoliciesInForce { policy, hash });
    }

    /// Stops waiting for evicted pods that no longer exist, according to `is_there`.
    pub fn set_pods(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        let waited = self.evicted.iter_mut().filter(|it| it.until.is_some());
        for gone in waited.filter(|evicted| !is_there(&evicted.uid)) {
            gone.until = None;
        }
    }

    /// Whether the taint and the condition have no message yet.
    pub fn lacks_message(&self) -> bool {
        let wanted = self.wanted.borrow();
        matches!(wanted.scheduling, Scheduling::Disabled { .. }) && wanted.message.is_empty()
    }

    /// Sets the message of the taint and the condition from the last evaluation. Call it after a tick if they have none.
    pub fn set_message(&mut self, reports: impl Iterator<Item = RuleReport>) {
        let (in_force, disabled_by) = (&self.in_force, &mut self.disabled_by);
        self.wanted.send_if_modified(|wanted| {
            let Scheduling::Disabled { rules, .. } = &wanted.scheduling else {
                return false;
            };
            let disabling = reports.filter(|report| rules.contains(&report.id));
            update_messages(&in_force.borrow().policy, disabling, disabled_by);
            let messages: Vec<&str> = disabled_by
                .values()
                .map(|(_, message)| message.as_str())
                .collect();
            wanted.message = messages.join("; ");
            true
        });
    }

    /// The rules that disable scheduling, each with the value that started it; empty if none does.
    pub fn scheduling_message(&self) -> String {
        self.wanted.borrow().message.clone()
    }

    /// Whether to remove the condition as well, once there is no taint.
    pub fn set_remove_condition(&self, remove_condition: bool) {
        self.wanted.send_if_modified(|wanted| {
            std::mem::replace(&mut wanted.remove_condition, remove_condition) != remove_condition
        });
    }

    /// Whether the node has the soft taint.
    pub fn set_busy(&self, busy: bool) {
        self.wanted
            .send_if_modified(|wanted| std::mem::replace(&mut wanted.busy, busy) != busy);
    }

    /// The state of our taint on the Node.
    pub fn taint_state(&self) -> TaintState {
        self.taint_state.borrow().clone()
    }

    /// Waits until our taint is off the Node; false after `max`.
    pub async fn wait_for_no_taint(&mut self, max: Duration) -> bool {
        let gone = self
            .taint_state
            .wait_for(|taint_state| taint_state.effect.is_none());
        matches!(tokio::time::timeout(max, gone).await, Ok(Ok(_)))
    }

    /// Eviction outcomes since the last call.
    pub fn take_outcomes(&mut self) -> Vec<EvictionOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// The evictions of the last hour, newest first.
    pub fn evicted(&self, now: BootTime) -> impl Iterator<Item = &Evicted> {
        let recent = move |it: &&Evicted| now.since(it.at) < EVICTION_HISTORY;
        self.evicted.iter().filter(recent)
    }

    fn handle_outcome(&mut self, outcome: EvictionOutcome, effects: &mut Vec<Effect>) {
        let uid = outcome.request.uid();
        let message = outcome.result.to_string();
        if !matches!(outcome.result, EvictionResult::ResultUnknown(_)) {
            self.requested.retain(|requested| *requested != uid);
        }
        effects.push(match &outcome.result {
            EvictionResult::Accepted => Effect::evicted(&uid, message),
            EvictionResult::Terminating | EvictionResult::ResultUnknown(_) => {
                Effect::evicting(&uid, message)
            }
            EvictionResult::Gone => Effect::gone(&uid, message),
            EvictionResult::Refused { until, .. } => Effect::refused(&uid, *until, message),
        });
        if outcome.result == EvictionResult::Accepted {
            self.remember(&outcome.request, outcome.at);
        }
        self.outcomes.push(outcome);
    }

    fn remember(&mut self, request: &WantedEviction, now: BootTime) {
        self.evicted
            .retain(|it| now.since(it.at) < EVICTION_HISTORY);
        self.evicted.truncate(MAX_REMEMBERED - 1);
        self.evicted.push_front(Evicted {
            uid: request.uid(),
            namespace: request.target.namespace.clone(),
            name: request.target.name.clone(),
            rule: request.rule.clone(),
            time: clock::wall_time(),
            at: now,
            until: Some(now + request.grace + TERMINATION_TIMEOUT),
        });
    }
}

/// `q/r: cpu_total_usage 7200m is above 4000m`, for each rule. Rules already in `disabled_by` keep their message, since
/// their value may have fallen, unless it is above an edited threshold.
fn update_messages(
    policy: &PolicySet,
    reports: impl Iterator<Item = RuleReport>,
    disabled_by: &mut BTreeMap<RuleId, (f64, String)>,
) {
    let before = std::mem::take(disabled_by);
    let of = |report: RuleReport| {
        let metric = metric(policy, &report.id);
        let value = |value| format_value(metric.as_deref(), value);
        let name = metric.as_deref().unwrap_or("its metric");
        let threshold = value(report.threshold);
        let is_edited = |known: f64| known.total_cmp(&report.threshold).is_ne();
        let known = before.get(&report.id);
        let is_new = known.is_none_or(|(known, _)| is_edited(*known));
        let breach = report.value.filter(|now| is_new && *now > report.threshold);
        let message = match (breach, known) {
            (Some(now), _) => format!("{}: {name} {} is above {threshold}", report.id, value(now)),
            (None, Some((_, message))) => message.clone(),
            // Only an earlier process saw the value.
            _ => format!("{}: {name} was above {threshold} before", report.id),
        };
        (report.id, (report.threshold, message))
    };
    disabled_by.extend(reports.map(of));
}

impl Backend for ApiServer {
    type Pending = Evicted;

    fn set_scheduling(&mut self, wanted: &Scheduling, _: BootTime, _: &mut Vec<Effect>) {
        if !matches!(wanted, Scheduling::Disabled { .. }) {
            self.disabled_by.clear();
        }
        self.wanted.send_if_modified(|known| {
            if known.scheduling == *wanted {
                return false;
            }
            known.scheduling.clone_from(wanted);
            known.message.clear();
            true
        });
    }

    fn evict(
        &mut self,
        evict: &Evict,
        workload: &Workload,
        now: BootTime,
        effects: &mut Vec<Effect>,
    ) {
        if self.evicting().any(|uid| *uid == evict.uid) {
            return;
        }
        // By then its rule is evaluated again.
        let expires = now + self.evaluation_period;
        let request = WantedEviction::of(evict, &workload.pod, expires);
        self.requested.push(evict.uid.clone());
        if let Some(outcome) = self.evictions.request(request, now) {
            self.handle_outcome(outcome, effects);
        }
    }

    fn poll(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        while let Some(outcome) = self.evictions.poll() {
            self.handle_outcome(outcome, effects);
        }
        let waited = self.evicted.iter_mut();
        for late in waited.filter(|it| it.until.is_some_and(|until| now >= until)) {
            late.until = None;
        }
    }

    fn evicting(&self) -> impl Iterator<Item = &PodUid> {
        let leaving = self.evicted.iter().filter(|it| it.until.is_some());
        self.requested.iter().chain(leaving.map(|it| &it.uid))
    }

    fn pending(&self) -> Vec<Evicted> {
        self.evicted.iter().cloned().collect()
    }

    fn resume(&mut self, pending: Vec<Evicted>) {
        self.evicted = pending.into();
    }
}

impl EvictionOutcome {
    /// The obstacle to all evictions on this node, if this eviction was refused for one.
    pub const fn obstacle(&self) -> Option<EvictionObstacle> {
        match &self.result {
            EvictionResult::Refused { why, .. } => why.obstacle(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::plan::RuleState;
    use crate::engine::policy::Strategy;

    fn report(rule: &str, value: f64) -> RuleReport {
        RuleReport {
            id: RuleId::from(rule),
            strategy: Strategy::Enforce,
            outside_hours: false,
            state: RuleState::Breached,
            since: None,
            value: Some(value),
            threshold: 4000.0,
            restore_value: 4000.0,
            breaches: 0,
            quiet_evaluations: 0,
            unknown: None,
            limited: false,
            rung: None,
            next_rung: None,
            evictions_ended: false,
            earliest_eviction: None,
            cool_down: std::time::Duration::ZERO,
            would: None,
        }
    }

    #[test]
    fn the_message_keeps_the_value_that_disabled_scheduling() {
        let mut disabled_by = BTreeMap::new();
        let mut messages = |reports: Vec<RuleReport>| {
            update_messages(&PolicySet::default(), reports.into_iter(), &mut disabled_by);
            let messages = disabled_by.values().map(|(_, message)| message.clone());
            messages.collect::<Vec<_>>()
        };
        let first = "q/a: its metric 7200 is above 4000";
        assert_eq!(messages(vec![report("q/a", 7200.0)]), [first]);
        let both = vec![report("q/a", 100.0), report("q/b", 5000.0)];
        assert_eq!(
            messages(both),
            [first, "q/b: its metric 5000 is above 4000"]
        );
        let second = vec![report("q/b", 100.0)];
        assert_eq!(messages(second), ["q/b: its metric 5000 is above 4000"]);
        let edited = |threshold| RuleReport {
            threshold,
            ..report("q/b", 5500.0)
        };
        let renewed = ["q/b: its metric 5500 is above 5200"];
        assert_eq!(messages(vec![edited(5200.0)]), renewed);
        assert_eq!(messages(vec![edited(6000.0)]), renewed, "unchanged");
        let adopted = "q/c: its metric was above 4000 before";
        assert_eq!(messages(vec![report("q/c", 100.0)]), [adopted]);
    }
}
