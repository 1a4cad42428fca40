//! One review to its answer.

use std::time::Duration;

use kube::Client;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use super::books::{Ask, Shared};
use super::ledger::{Granted, Place, Victim};
use super::metrics::GuardMetrics;
use super::objects;
use super::review::{self, Asked, Refusal};
use super::telling::Teller;
use crate::cluster::client::CallError;
use crate::cluster::clock;
use crate::cluster::election::Standing;

/// An answer has to be found by then: whoever passed the question on, and the API server, wait longer.
const ANSWER: Duration = Duration::from_millis(2500);

/// Says whether agents may evict pods.
pub struct Guard {
    pub(super) client: Client,
    /// The agents' name as users.
    pub(super) agents: String,
    pub(super) standing: watch::Receiver<Standing>,
    pub(super) shared: Shared,
    pub(super) asks: mpsc::Sender<Ask>,
    pub(super) teller: Teller,
    pub(super) metrics: GuardMetrics,
}

/// What came of a question.
pub enum Judged {
    /// The answer, an `AdmissionReview`.
    Said(Vec<u8>),
    /// The replica that leads has to say. Where none can be asked, [`Guard::leaderless`] has the answer.
    Elsewhere(Asked),
}

impl Guard {
    /// Judges an `AdmissionReview`; `None`: it is none.
    pub async fn judge(&self, body: &[u8]) -> Option<Judged> {
        let asked = Asked::read(body)?;
        if asked.user != self.agents {
            // Nobody else's evictions are ours to judge, whatever we are asked.
            self.metrics.answered("others");
            return Some(Judged::Said(review::allowed(&asked.uid, "others")));
        }
        if self.standing.borrow().term(clock::now()).is_none() {
            return Some(Judged::Elsewhere(asked));
        }
        let verdict = timeout(ANSWER, self.decide(&asked)).await;
        let verdict = verdict.unwrap_or_else(|_| {
            let message = "it could not be found out in time whether the pod may be evicted";
            Err(Refusal::later("timeout", message))
        });
        Some(Judged::Said(match verdict {
            Ok(label) => {
                self.metrics.answered(label);
                review::allowed(&asked.uid, label)
            }
            Err(refusal) => self.refuse(&asked, &refusal),
        }))
    }

    /// The answer where no replica that leads can be asked.
    pub fn leaderless(&self, asked: &Asked) -> Vec<u8> {
        let refusal = Refusal::later("not_leading", "no replica of the controller leads");
        self.refuse(asked, &refusal)
    }

    fn refuse(&self, asked: &Asked, refusal: &Refusal) -> Vec<u8> {
        self.metrics.answered(refusal.label);
        self.teller.refused(asked, refusal);
        review::refused(&asked.uid, refusal)
    }

    /// In the order of what it costs: what is known to be spent costs the API server nothing.
    async fn decide(&self, asked: &Asked) -> Result<&'static str, Refusal> {
        let (node, uid) = claims(asked)?;
        let here = Place {
            node,
            namespace: &asked.namespace,
            zone: None,
            owner: None,
        };
        self.is_left(uid, &here)?;
        let found = objects::pod(&self.client, &asked.namespace, &asked.pod).await;
        let pod = found
            .map_err(|error| unread("the pod", &error))?
            .ok_or_else(|| Refusal::gone(asked))?;
        if pod.uid != uid {
            return Err(Refusal::other_pod(asked, &pod.uid));
        }
        if pod.node.as_deref() != Some(node) {
            let place = pod.node.unwrap_or_else(|| "no node".to_owned());
            return Err(Refusal::forbidden(
                "other_node",
                format!(
                    "the pod is on {place}, and the agent on {node}: agents evict pods of their own node only"
                ),
            ));
        }
        if pod.is_ending {
            return Ok("ending");
        }
        let zone = objects::zone(&self.client, node).await;
        let victim = Victim {
            uid: pod.uid,
            namespace: asked.namespace.clone(),
            name: asked.pod.clone(),
            node: node.to_owned(),
            zone: zone.map_err(|error| unread("its node", &error))?,
            owner: pod.owner,
        };
        if asked.dry_run {
            self.is_left(uid, &victim.place())?;
            return Ok("dry_run");
        }
        self.reserve(victim).await
    }

    /// Whether the budgets allow one more there, or this one already.
    fn is_left(&self, uid: &str, place: &Place<'_>) -> Result<(), Refusal> {
        let spent = self.shared.read(|ledger| {
            let spent = ledger.spent(place, clock::now());
            spent.filter(|_| !ledger.knows(uid))
        });
        match spent {
            None => Err(Refusal::later(
                "counting",
                "the replica that leads has still to read which evictions count",
            )),
            Some(Some(spent)) => Err(Refusal::spent(&spent)),
            Some(None) => Ok(()),
        }
    }

    async fn reserve(&self, victim: Victim) -> Result<&'static str, Refusal> {
        let (reply, said) = oneshot::channel();
        let asked = self.asks.try_send(Ask { victim, reply });
        asked.map_err(|_| Refusal::later("busy", "too many evictions are asked for at once"))?;
        match said.await {
            Ok(Ok(Granted::New)) => Ok("allowed"),
            Ok(Ok(Granted::Again)) => Ok("again"),
            Ok(Err(spent)) => Err(Refusal::spent(&spent)),
            Err(_) => Err(Refusal::later(
                "unrecorded",
                "the controller can't record the eviction: its log says why",
            )),
        }
    }
}

/// The agent's node and the pod's UID, which have to be there.
fn claims(asked: &Asked) -> Result<(&str, &str), Refusal> {
    if !asked.is_named() {
        let message = "these are no names of a pod, a namespace and a node";
        return Err(Refusal::forbidden("bad_name", message));
    }
    let node = asked.node.as_deref().ok_or_else(|| {
        let message = "the token names no node: only those that the kubelet gives to the agent's pods may evict";
        Refusal::forbidden("no_node", message)
    })?;
    let uid = asked.pod_uid.as_deref().ok_or_else(|| {
        let message = "an agent has to name the UID of the pod, in deleteOptions.preconditions.uid";
        Refusal::forbidden("no_uid", message)
    })?;
    if asked.is_forced {
        let message = "an agent may not force a pod's end: gracePeriodSeconds has to be at least 1";
        return Err(Refusal::forbidden("forced", message));
    }
    Ok((node, uid))
}

fn unread(what: &str, error: &CallError) -> Refusal {
    let message = format!("{what} can't be read: {}", error.words());
    Refusal::later("unread", message)
}
