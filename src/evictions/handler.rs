//! Handles one eviction request: checks, budgets, and the Eviction call.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::ledger::{BudgetKey, Granted, Settled, Victim};
use super::metrics::EvictionMetrics;
use super::recorder::{LedgerChange, Settlement, SharedLedger};
use super::refusal::LeaderRefusal;
use super::{Denial, EvictionPermit, RuleQuery};
use crate::clock;
use crate::cluster::client::{CallError, call, found};
use crate::cluster::election::Leadership;
use crate::cluster::eviction;
use crate::crd::emergency_stop;
use crate::crd::eviction::{EvictionAnswer, EvictionRequest};
use crate::crd::pod_facts::PodObject;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;

const NOT_LEADING: &str = "this replica of the controller no longer leads";
const NO_RECORD: &str = "the leader has not read the eviction record yet";
const NO_RULES: &str = "the leader has not read all policies and nodes yet";
const ENDING: &str = "the controller is shutting down";

/// Result of the checks that run before the API server is asked to evict.
enum Prepared {
    /// The pod may be evicted.
    Reserved { grace: Duration, granted: Granted },
    /// An earlier request has evicted it already.
    Done(EvictionAnswer),
}

/// Decides on requests, and posts Evictions.
pub struct Handler {
    pub(super) client: Client,
    pub(super) leadership: watch::Receiver<Leadership>,
    pub(super) lease_namespace: String,
    pub(super) rules: mpsc::Sender<RuleQuery>,
    /// The ledger, and the channel for changes to it. `None`: no budgets.
    pub(super) budgets: Option<(SharedLedger, mpsc::Sender<LedgerChange>)>,
    pub(super) metrics: EvictionMetrics,
}

impl Handler {
    /// Whether this replica is the leader now.
    pub fn leads(&self) -> bool {
        self.leadership.borrow().term(clock::boot_time()).is_some()
    }

    /// Evicts the pod, unless a check fails or `deadline` passes before all checks are done.
    pub async fn evict(
        &self,
        node: &Arc<str>,
        request: &EvictionRequest,
        deadline: BootTime,
    ) -> EvictionAnswer {
        let started = clock::boot_time();
        let (result, answer) = match self.try_evict(node, request, deadline).await {
            Ok(answer) => (label(&answer), answer),
            Err(refusal) => {
                let (pod, why) = (&request.target.name, refusal.answer.why());
                tracing::debug!(%node, pod, why, result = refusal.label, "not evicted");
                (refusal.label, refusal.answer)
            }
        };
        self.metrics
            .answered(result, clock::boot_time().since(started));
        answer
    }

    async fn try_evict(
        &self,
        node: &Arc<str>,
        request: &EvictionRequest,
        deadline: BootTime,
    ) -> Result<EvictionAnswer, LeaderRefusal> {
        let prepared = timeout(
            deadline.since(clock::boot_time()),
            self.prepare(node, request),
        );
        let prepared = prepared
            .await
            .unwrap_or_else(|_| Err(LeaderRefusal::late()))?;
        let uid = &request.target.uid;
        let (grace, granted) = match prepared {
            Prepared::Reserved { grace, granted } => (grace, granted),
            Prepared::Done(answer) => return Ok(answer),
        };
        if let Err(refusal) = self.recheck(node, deadline).await {
            self.settle(uid, release(granted)).await;
            return Err(refusal);
        }
        let answer = eviction::evict(&self.client, &request.target, grace).await;
        if let Some(settlement) = settlement(&answer, granted) {
            self.settle(uid, settlement).await;
        }
        Ok(answer)
    }

    /// Last checks right before the Eviction: emergency stop, deadline, leadership.
    async fn recheck(&self, node: &str, deadline: BootTime) -> Result<(), LeaderRefusal> {
        if self.is_stopped(node).await? {
            return Err(LeaderRefusal::later(
                "stopped",
                "an emergency stop is in force",
            ));
        }
        if clock::boot_time() >= deadline {
            return Err(LeaderRefusal::late());
        }
        if !self.leads() {
            return Err(not_ready(NOT_LEADING));
        }
        Ok(())
    }

    /// Checks budgets, pod and rules, cheapest first, and makes a reservation. [`Self::recheck`] does the other checks.
    async fn prepare(
        &self,
        node: &Arc<str>,
        request: &EvictionRequest,
    ) -> Result<Prepared, LeaderRefusal> {
        let target = &request.target;
        let key = BudgetKey {
            node,
            namespace: &target.namespace,
            zone: None,
            owner: None,
        };
        self.within_budgets(&target.uid, &key)?;
        let pod = eviction::read_pod::<PodObject>(&self.client, target).await;
        let pod = pod.map_err(|error| unread("the pod", &error))?;
        let pod = pod.ok_or_else(LeaderRefusal::gone)?;
        if pod.metadata.deletion_timestamp.is_some() && self.is_ours(&target.uid) {
            return Ok(Prepared::Done(EvictionAnswer::Accepted));
        }
        let owner = controller(&pod);
        let EvictionPermit { grace, zone } = self.permit(node, request, pod).await?;
        let victim = Victim {
            uid: target.uid.clone(),
            namespace: target.namespace.clone(),
            name: target.name.clone(),
            node: node.to_string(),
            zone,
            owner,
        };
        let granted = self.reserve(victim).await?;
        Ok(Prepared::Reserved { grace, granted })
    }

    /// Reads the emergency stop, of all nodes or of this one, from the API server.
    async fn is_stopped(&self, node: &str) -> Result<bool, LeaderRefusal> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.lease_namespace);
        let object = found(call(api.get(emergency_stop::OBJECT)).await);
        let object = object.map_err(|error| unread("the emergency stop", &error))?;
        Ok(object.is_some_and(|object| emergency_stop::stop_of(&object, node).is_some()))
    }

    async fn permit(
        &self,
        node: &Arc<str>,
        request: &EvictionRequest,
        pod: PodObject,
    ) -> Result<EvictionPermit, LeaderRefusal> {
        let (reply, permit) = oneshot::channel();
        let query = RuleQuery {
            node: Arc::clone(node),
            hash: request.hash.clone(),
            rule: RuleId::from(request.rule.as_str()),
            pod: Box::new(pod),
            reply,
        };
        if self.rules.send(query).await.is_err() {
            return Err(not_ready(ENDING));
        }
        match permit.await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(Denial::NotReady)) => Err(self.not_read(NO_RULES)),
            Err(_) => Err(not_ready(ENDING)),
            Ok(Err(Denial::OtherRules)) => {
                let why =
                    "the node's rules have changed: the agent retries when it has the new ones";
                Err(LeaderRefusal::later("other_rules", why))
            }
            Ok(Err(Denial::Objection(objection))) => Err(LeaderRefusal::objection(&objection)),
        }
    }

    /// Whether the budgets allow one more eviction, or contain this one already.
    fn within_budgets(&self, uid: &str, key: &BudgetKey<'_>) -> Result<(), LeaderRefusal> {
        let Some((ledger, _)) = &self.budgets else {
            return Ok(());
        };
        let verdict = ledger.read(|ledger| {
            if ledger.is_unsettled(key.node, uid) {
                let why = "the outcome of another eviction on the node is not known yet";
                return Err(LeaderRefusal::later("unsettled", why));
            }
            match ledger.exhausted(key, clock::boot_time()) {
                Some(exhausted) if !ledger.contains(uid) => {
                    Err(LeaderRefusal::exhausted(&exhausted))
                }
                _ => Ok(()),
            }
        });
        verdict.unwrap_or_else(|| Err(self.not_read(NO_RECORD)))
    }

    /// A leader has not read something yet: `why` names it. A replica that no longer leads reads nothing.
    fn not_read(&self, why: &str) -> LeaderRefusal {
        not_ready(if self.leads() { why } else { NOT_LEADING })
    }

    fn is_ours(&self, uid: &str) -> bool {
        let contains =
            |ledger: &SharedLedger| ledger.read(|ledger| ledger.contains(uid)) == Some(true);
        let budgets = self.budgets.as_ref();
        budgets.is_some_and(|(ledger, _)| contains(ledger))
    }

    /// Records the reservation. An eviction that is not on record is never posted.
    async fn reserve(&self, victim: Victim) -> Result<Granted, LeaderRefusal> {
        let Some((_, changes)) = &self.budgets else {
            return Ok(Granted::New);
        };
        let (reply, granted) = oneshot::channel();
        let reserved = changes.send(LedgerChange::Reserve { victim, reply }).await;
        reserved.map_err(|_| unrecorded())?;
        match granted.await {
            Ok(Ok(granted)) => Ok(granted),
            Ok(Err(exhausted)) => Err(LeaderRefusal::exhausted(&exhausted)),
            Err(_) if !self.leads() => Err(not_ready(NOT_LEADING)),
            Err(_) => Err(unrecorded()),
        }
    }

    /// Applies the outcome to the ledger, and waits until that is done.
    async fn settle(&self, uid: &str, settled: Settlement) {
        let Some((_, changes)) = &self.budgets else {
            return;
        };
        let (done, is_done) = oneshot::channel();
        let uid = uid.to_owned();
        let change = LedgerChange::Settle { uid, settled, done };
        // The recorder runs until the process exits.
        if changes.send(change).await.is_ok() {
            is_done.await.ok();
        }
    }
}

/// Outcome of a reservation according to the answer. `None`: unclear, polling the pod will settle it.
const fn settlement(answer: &EvictionAnswer, granted: Granted) -> Option<Settlement> {
    match answer {
        EvictionAnswer::Accepted | EvictionAnswer::Terminating => {
            Some(Settlement::Known(Settled::Confirmed))
        }
        EvictionAnswer::Gone
        | EvictionAnswer::Budget { .. }
        | EvictionAnswer::ManyBudgets { .. }
        | EvictionAnswer::Refused { .. }
        | EvictionAnswer::NotSent { .. } => Some(release(granted)),
        EvictionAnswer::Wait { .. } | EvictionAnswer::Unknown { .. } => None,
    }
}

const fn release(granted: Granted) -> Settlement {
    match granted {
        Granted::New => Settlement::Known(Settled::Returned),
        Granted::Existing => Settlement::RefusedAgain,
    }
}

fn not_ready(why: &str) -> LeaderRefusal {
    LeaderRefusal::later("not_ready", why)
}

fn unrecorded() -> LeaderRefusal {
    let why = "the controller cannot record the eviction: see its log";
    LeaderRefusal::later("unrecorded", why)
}

fn unread(what: &str, error: &CallError) -> LeaderRefusal {
    let why = format!("failed to read {what}: {}", error.message());
    LeaderRefusal::later("unread", why)
}

/// Metric label for an answer of the API server.
const fn label(answer: &EvictionAnswer) -> &'static str {
    match answer {
        EvictionAnswer::Accepted => "accepted",
        EvictionAnswer::Terminating => "terminating",
        EvictionAnswer::Gone => "gone",
        EvictionAnswer::Budget { .. } => "disruption_budget",
        EvictionAnswer::ManyBudgets { .. } => "many_disruption_budgets",
        EvictionAnswer::Wait { .. } => "server_busy",
        EvictionAnswer::Refused { .. } => "server_refused",
        EvictionAnswer::NotSent { .. } => "server_unreachable",
        EvictionAnswer::Unknown { .. } => "unknown",
    }
}

/// Kind and name of the pod's controller, if it has one.
fn controller(pod: &PodObject) -> Option<String> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let mut controllers = owners.filter(|owner| owner.controller == Some(true));
    let owner = controllers.next()?;
    Some(format!("{}/{}", owner.kind, owner.name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cluster::election::Term;

    #[tokio::test]
    async fn a_refusal_says_whether_the_record_is_unread_or_the_replica_no_longer_leads() {
        let nowhere = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
        let client = Client::try_from(nowhere).unwrap();
        let key = BudgetKey {
            node: "n",
            namespace: "shop",
            zone: None,
            owner: None,
        };
        let until = clock::boot_time() + Duration::from_hours(1);
        for (term, why) in [
            (Some(Term { epoch: 1, until }), NO_RECORD),
            (None, NOT_LEADING),
        ] {
            let handler = Handler {
                client: client.clone(),
                leadership: watch::channel(Leadership::new(term, None)).1,
                lease_namespace: String::new(),
                rules: mpsc::channel(1).0,
                budgets: Some((SharedLedger::default(), mpsc::channel(1).0)),
                metrics: EvictionMetrics::default(),
            };
            let refused = handler.within_budgets("uid", &key);
            assert_eq!(refused, Err(not_ready(why)));
        }
    }

    #[test]
    fn only_the_controller_of_a_pod_counts_as_owner() {
        let pod = |owners: serde_json::Value| -> PodObject {
            serde_json::from_value(json!({"metadata": {"name": "p", "ownerReferences": owners}}))
                .unwrap()
        };
        let owner = |kind: &str, controller: bool| json!({"apiVersion": "v1", "kind": kind, "name": "x", "uid": "u", "controller": controller});
        let both = pod(json!([owner("Node", false), owner("ReplicaSet", true)]));
        assert_eq!(controller(&both).as_deref(), Some("ReplicaSet/x"));
        assert_eq!(controller(&pod(json!([owner("Node", false)]))), None);
    }
}
