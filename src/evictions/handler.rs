//! One request: what speaks against it, the budgets, and the Eviction.

use std::sync::Arc;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use tokio::sync::{mpsc, oneshot, watch};

use super::events::RefusalEvents;
use super::ledger::{Granted, Place, Settled, Victim};
use super::metrics::EvictionMetrics;
use super::recorder::{Change, SharedLedger};
use super::refusal::Refusal;
use super::{Denial, Permit, RuleQuery};
use crate::cluster::client::{CallError, call, found};
use crate::cluster::clock;
use crate::cluster::election::Standing;
use crate::cluster::eviction;
use crate::crd::emergency_stop;
use crate::crd::eviction::{Answer, EvictionRequest};
use crate::crd::pod_facts::PodObject;
use crate::engine::policy::RuleId;

/// Decides about requests, and posts Evictions.
pub struct Handler {
    pub(super) client: Client,
    pub(super) leadership: watch::Receiver<Standing>,
    pub(super) lease_namespace: String,
    pub(super) rules: mpsc::Sender<RuleQuery>,
    /// The ledger, and the way to change it; `None`: there are no budgets.
    pub(super) budgets: Option<(SharedLedger, mpsc::Sender<Change>)>,
    pub(super) events: RefusalEvents,
    pub(super) metrics: EvictionMetrics,
}

impl Handler {
    /// Whether this replica may act for the cluster now.
    pub fn leads(&self) -> bool {
        self.leadership.borrow().term(clock::now()).is_some()
    }

    /// Evicts the pod, unless something speaks against it.
    pub async fn evict(&self, node: &Arc<str>, request: &EvictionRequest) -> Answer {
        let begun = clock::now();
        let (result, answer) = match self.try_evict(node, request).await {
            Ok(answer) => (label(&answer), answer),
            Err(refusal) => {
                // That a pod is gone, or on its way, is what was wanted.
                if !matches!(refusal.answer, Answer::Gone | Answer::Terminating) {
                    self.events.refused(node, &request.target, &refusal);
                }
                (refusal.label, refusal.answer)
            }
        };
        self.metrics.answered(result, clock::now().since(begun));
        answer
    }

    /// In the order of what it costs: what is known to be spent costs the API server nothing.
    async fn try_evict(
        &self,
        node: &Arc<str>,
        request: &EvictionRequest,
    ) -> Result<Answer, Refusal> {
        let target = &request.target;
        let here = Place {
            node,
            namespace: &target.namespace,
            zone: None,
            owner: None,
        };
        self.within_budgets(&target.uid, &here)?;
        let (stopped, pod) = tokio::join!(
            self.is_stopped(),
            eviction::look::<PodObject>(&self.client, target)
        );
        if stopped? {
            return Err(Refusal::later("stopped", "an emergency stop is in force"));
        }
        let pod = pod.map_err(|error| unread("the pod", &error))?;
        let pod = pod.ok_or_else(Refusal::gone)?;
        if pod.metadata.deletion_timestamp.is_some() && self.is_ours(&target.uid) {
            return Ok(Answer::Accepted);
        }
        let owner = controller(&pod);
        let permit = self.permit(node, request, pod).await?;
        let victim = Victim {
            uid: target.uid.clone(),
            namespace: target.namespace.clone(),
            name: target.name.clone(),
            node: node.to_string(),
            zone: permit.zone,
            owner,
        };
        let granted = self.reserve(victim).await?;
        if !self.leads() {
            // Whoever leads next finds the reservation, and that nothing came of it.
            return Err(Refusal::later("not_leading", "another replica is to lead"));
        }
        let answer = eviction::evict(&self.client, target, permit.grace).await;
        self.settle(&target.uid, granted, &answer).await;
        Ok(answer)
    }

    /// Whether somebody has stopped everything, as the API server says now.
    async fn is_stopped(&self) -> Result<bool, Refusal> {
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.lease_namespace);
        let object = found(call(api.get_metadata(emergency_stop::OBJECT)).await);
        let object = object.map_err(|error| unread("the emergency stop", &error))?;
        let annotations = |object: PartialObjectMeta<ConfigMap>| object.metadata.annotations;
        let annotations = object.and_then(annotations);
        Ok(emergency_stop::order(annotations.as_ref()).is_some())
    }

    async fn permit(
        &self,
        node: &Arc<str>,
        request: &EvictionRequest,
        pod: PodObject,
    ) -> Result<Permit, Refusal> {
        let (reply, permit) = oneshot::channel();
        let query = RuleQuery {
            node: Arc::clone(node),
            hash: request.hash.clone(),
            rule: RuleId::from(request.rule.as_str()),
            pod: Box::new(pod),
            reply,
        };
        if self.rules.send(query).await.is_err() {
            return Err(not_ready());
        }
        match permit.await {
            Ok(Ok(permit)) => Ok(permit),
            Ok(Err(Denial::NotReady)) | Err(_) => Err(not_ready()),
            Ok(Err(Denial::OtherRules)) => {
                let why = "the controller has given the node other rules since: the agent asks again when it has them";
                Err(Refusal::later("other_rules", why))
            }
            Ok(Err(Denial::Objection(objection))) => Err(Refusal::objection(&objection)),
        }
    }

    /// Whether the budgets allow one more there, or this one already.
    fn within_budgets(&self, uid: &str, place: &Place<'_>) -> Result<(), Refusal> {
        let Some((ledger, _)) = &self.budgets else {
            return Ok(());
        };
        let spent = ledger.read(|ledger| {
            let spent = ledger.spent(place, clock::now());
            spent.filter(|_| !ledger.knows(uid))
        });
        match spent {
            None => Err(not_ready()),
            Some(Some(spent)) => Err(Refusal::spent(&spent)),
            Some(None) => Ok(()),
        }
    }

    fn is_ours(&self, uid: &str) -> bool {
        let ledger = self.budgets.as_ref().map(|(ledger, _)| ledger);
        ledger.is_some_and(|ledger| ledger.read(|ledger| ledger.knows(uid)) == Some(true))
    }

    /// Writes down that the pod is to be evicted; an eviction that is not on record is not posted.
    async fn reserve(&self, victim: Victim) -> Result<Granted, Refusal> {
        let Some((_, changes)) = &self.budgets else {
            return Ok(Granted::New);
        };
        let (reply, granted) = oneshot::channel();
        let reserved = changes.send(Change::Reserve { victim, reply }).await;
        reserved.map_err(|_| unrecorded())?;
        match granted.await {
            Ok(Ok(granted)) => Ok(granted),
            Ok(Err(spent)) => Err(Refusal::spent(&spent)),
            Err(_) => Err(unrecorded()),
        }
    }

    /// Has the budgets follow the answer. Where that does not say what became of the pod, looks at the pod do; so they do
    /// where the same pod was asked for before, as that may still be carried out.
    async fn settle(&self, uid: &str, granted: Granted, answer: &Answer) {
        let settled = match answer {
            Answer::Accepted | Answer::Terminating => Settled::Confirmed,
            Answer::Unknown { .. } => return,
            _ if granted == Granted::Again => return,
            _ => Settled::Returned,
        };
        if let Some((_, changes)) = &self.budgets {
            let uid = uid.to_owned();
            // The recorder ends with this process.
            changes.send(Change::Settle { uid, settled }).await.ok();
        }
    }
}

fn not_ready() -> Refusal {
    let why = "the replica that leads has still to read what counts";
    Refusal::later("not_ready", why)
}

fn unrecorded() -> Refusal {
    let why = "the controller can't record the eviction: its log says why";
    Refusal::later("unrecorded", why)
}

fn unread(what: &str, error: &CallError) -> Refusal {
    let why = format!("{what} can't be read: {}", error.words());
    Refusal::later("unread", why)
}

/// The word by which an answer of the API server is counted.
const fn label(answer: &Answer) -> &'static str {
    match answer {
        Answer::Accepted => "accepted",
        Answer::Terminating => "terminating",
        Answer::Gone => "gone",
        Answer::Budget { .. } => "disruption_budget",
        Answer::ManyBudgets { .. } => "many_disruption_budgets",
        Answer::Wait { .. } => "server_busy",
        Answer::Refused { .. } => "server_refused",
        Answer::Away { .. } => "server_away",
        Answer::Unknown { .. } => "unknown",
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

    #[test]
    fn of_a_pod_its_controller_counts_and_no_other_owner() {
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
