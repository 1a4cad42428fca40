//! The leader evicts: agents request evictions of pods of their own nodes; the leader checks each request and posts the
//! Eviction.
//!
//! ```text
//! agent ─► report listener or aggregated API ─► Evictions ─► handler ─► ledger (budgets) ─► Eviction (policy/v1)
//!                                                              │
//!                                                              └─ the controller's rules of that node
//! ```
//! [`ledger::EvictionLedger`] decides about budgets and does no I/O; the recorder writes each eviction to a `ConfigMap` before it is
//! posted, so that the next leader continues the budgets and evicts no pod twice.

pub mod budget;
mod handler;
pub mod ledger;
mod metrics;
mod queue;
pub mod record;
mod recorder;
mod refusal;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use kube::Client;
use tokio::sync::{mpsc, oneshot, watch};

use crate::cluster::election::Leadership;
use crate::crd::eviction::{EvictionAnswer, EvictionRequest, Objection};
use crate::crd::pod_facts::PodObject;
use crate::engine::policy::RuleId;
use budget::Budgets;
use handler::Handler;
use queue::{Pending, Queue};
use recorder::{RecordLocation, Recorder, SharedLedger};
use refusal::LeaderRefusal;

pub use metrics::EvictionMetrics;

/// Limit of queued requests. Agents retry those beyond it.
const MAX_WAITING: usize = 256;

/// Settings of evictions by the leader.
#[derive(Clone, Debug)]
pub struct Options {
    /// Namespace of the record.
    pub namespace: String,
    /// Name of the `ConfigMap` that records the evictions that count.
    pub record: String,
    /// Budgets. `None`: unlimited.
    pub budgets: Option<Budgets>,
    /// Namespace of the emergency stop, which is that of the agents' Leases.
    pub lease_namespace: String,
    /// Prometheus metrics.
    pub metrics: EvictionMetrics,
}

/// Query to the reconciler: do the rules of `node` allow this eviction?
#[derive(Debug)]
pub struct RuleQuery {
    /// The node, from the agent's token.
    pub node: Arc<str>,
    /// `spec.hash` of the `NodeWatermark` that the agent enforces.
    pub hash: String,
    /// The rule that requests the eviction.
    pub rule: RuleId,
    /// The pod as the API server has it.
    pub pod: Box<PodObject>,
    /// Channel for the answer.
    pub reply: oneshot::Sender<Result<EvictionPermit, Denial>>,
}

/// The node's rules allow the eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionPermit {
    /// Grace period of the eviction.
    pub grace: Duration,
    /// Zone of the node, if any.
    pub zone: Option<String>,
}

/// The node's rules do not allow the eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The controller has not read all policies and nodes yet, or does not lead.
    NotReady,
    /// The agent enforces other rules than the controller last assigned to its node.
    OtherRules,
    /// The pod must not be evicted for this rule.
    Objection(Objection),
}

/// Reply to an eviction request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The leader's answer.
    Answer(EvictionAnswer),
    /// This replica does not lead. Carries the leader's address, if known.
    NotLeading(Option<IpAddr>),
}

/// Handle for eviction requests. Clones share the same queue.
#[derive(Clone, Debug)]
pub struct Evictions {
    requests: mpsc::Sender<Pending>,
    metrics: EvictionMetrics,
    leadership: watch::Receiver<Leadership>,
}

impl Evictions {
    /// Requests the eviction of a pod of `node` on behalf of its agent.
    pub async fn evict(&self, node: Arc<str>, request: EvictionRequest) -> Reply {
        let (reply, answer) = oneshot::channel();
        let pending = Pending {
            node,
            request,
            reply,
        };
        if self.requests.try_send(pending).is_err() {
            let refusal = LeaderRefusal::later("busy", "too many eviction requests at once");
            self.metrics.answered(refusal.label, Duration::ZERO);
            return Reply::Answer(refusal.answer);
        }
        if let Ok(Some(answer)) = answer.await {
            return Reply::Answer(answer);
        }
        let leader = self.leadership.borrow().leader();
        Reply::NotLeading(leader.map(|leader| leader.ip()))
    }
}

#[cfg(test)]
impl Evictions {
    /// For a replica that never leads.
    pub fn unconnected() -> Self {
        Self {
            requests: mpsc::channel(1).0,
            metrics: EvictionMetrics::default(),
            leadership: watch::channel(Leadership::default()).1,
        }
    }
}

#[cfg(test)]
impl Options {
    /// Without budgets.
    pub fn unconnected() -> Self {
        Self {
            namespace: "plimsoll".to_owned(),
            record: "plimsoll-evictions".to_owned(),
            budgets: None,
            lease_namespace: "plimsoll-node-lease".to_owned(),
            metrics: EvictionMetrics::default(),
        }
    }
}

/// Returns the handle for requests, and the future that carries them out. `rules` reaches the reconciler that knows
/// each node's rules.
pub fn start(
    client: Client,
    options: Options,
    rules: mpsc::Sender<RuleQuery>,
    leadership: watch::Receiver<Leadership>,
) -> (Evictions, BoxFuture<'static, ()>) {
    let (requests, pending) = mpsc::channel(MAX_WAITING);
    let (changes, to_record) = mpsc::channel(MAX_WAITING);
    let ledger = SharedLedger::default();
    let recorder = options.budgets.map(|budgets| {
        let location = RecordLocation {
            namespace: options.namespace.clone(),
            name: options.record.clone(),
            budgets,
        };
        Recorder::new(
            client.clone(),
            location,
            leadership.clone(),
            ledger.clone(),
            to_record,
            options.metrics.clone(),
        )
    });
    let handler = Handler {
        budgets: recorder.is_some().then_some((ledger, changes)),
        lease_namespace: options.lease_namespace,
        rules,
        metrics: options.metrics.clone(),
        leadership: leadership.clone(),
        client,
    };
    let queue = Queue::new(handler, pending);
    let evictions = Evictions {
        requests,
        metrics: options.metrics,
        leadership,
    };
    let run = async move {
        match recorder {
            Some(recorder) => drop(tokio::join!(queue.run(), recorder.run())),
            None => queue.run().await,
        }
    };
    (evictions, run.boxed())
}
