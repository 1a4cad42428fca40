//! Evictions of a node's pods: a task that asks the controller's leader for one at a time, each checked once more against the pod
//! as it is at that moment.

mod refusal;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::{mpsc, watch};

pub use self::refusal::{Obstacle, Refusal};
use super::taint::Standing;
use crate::cluster::backoff::{backoff, jittered};
use crate::cluster::client::CallError;
use crate::cluster::eviction;
use crate::crd::eviction::{Answer, Delay, Objection, Target, permit};
use crate::crd::pod_facts::PodObject;
use crate::engine::plan::Evict;
use crate::engine::pod::{Pod as Facts, PodUid};
use crate::engine::policy::{PolicySet, RuleId, TaintEffect};
use crate::engine::time::BootTime;
use crate::node::clock;

/// More are not asked for at a time.
const MOST_REQUESTS: usize = 64;
/// A refused pod is left alone for so long, twice as long each time.
const LEAST_BACKOFF: Duration = Duration::from_secs(10);
const MOST_BACKOFF: Duration = Duration::from_mins(5);
/// A pod that was not refused for so long begins anew.
const FORGET: Duration = Duration::from_mins(15);
/// Pauses between looks at a pod of which it is not known whether it was evicted.
const LOOKS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));
/// A request without an answer is carried out by then, or never.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// After that it is left to the next decision, which begins with a look.
const LONGEST_LOOK: Duration = Duration::from_mins(2);

/// A wish to evict a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Which pod.
    pub target: Target,
    /// For which rule.
    pub rule: RuleId,
    /// From the first signal to the kill.
    pub grace: Duration,
    /// When the next evaluation decides anew: what was not sent by then is dropped.
    pub expires: BootTime,
}

impl Request {
    /// As the engine decided; `expires` is when the rule is evaluated next.
    pub fn of(evict: &Evict, pod: &Facts, expires: BootTime) -> Self {
        Self {
            target: Target {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
                uid: evict.uid.to_string(),
            },
            rule: evict.rule.clone(),
            grace: evict.grace,
            expires,
        }
    }

    /// The pod.
    pub fn uid(&self) -> PodUid {
        PodUid::from(self.target.uid.as_str())
    }
}

/// What became of a wish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The wish.
    pub request: Request,
    /// When.
    pub at: BootTime,
    /// What.
    pub fate: Fate,
}

/// The ends of a wish, and [`Fate::Unsure`], which is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// The pod is being terminated.
    Accepted,
    /// It was being terminated already, not by this wish.
    Terminating,
    /// There is no such pod any more.
    Gone,
    /// It was asked for, but nobody knows yet whether it happens: the pod is looked at until that is known.
    Unsure(String),
    /// Nothing was done. To be decided anew, for this pod not before `until`.
    Refused {
        /// When it may be tried again.
        until: BootTime,
        /// Why.
        why: Refusal,
    },
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepted => f.write_str("it is being terminated"),
            Self::Terminating => f.write_str("it was being terminated already"),
            Self::Gone => f.write_str("it is gone"),
            Self::Unsure(why) => write!(f, "no answer yet: {why}"),
            Self::Refused { why, .. } => why.fmt(f),
        }
    }
}

/// The way to the task: neither end ever waits.
#[derive(Debug)]
pub struct Evictions {
    requests: mpsc::Sender<Request>,
    outcomes: mpsc::UnboundedReceiver<Outcome>,
}

impl Evictions {
    /// Begins an eviction; returns its end where too many were begun and not ended.
    pub fn ask(&self, request: Request, now: BootTime) -> Option<Outcome> {
        let error = self.requests.try_send(request).err()?;
        Some(Outcome {
            request: error.into_inner(),
            at: now,
            fate: late(now),
        })
    }

    /// The next thing that came of them, if there is one.
    pub fn poll(&mut self) -> Option<Outcome> {
        self.outcomes.try_recv().ok()
    }
}

const fn late(now: BootTime) -> Fate {
    Fate::Refused {
        until: now,
        why: Refusal::Late,
    }
}

/// What a node enforces.
#[derive(Clone, Debug, Default)]
pub struct InForce {
    /// The policies.
    pub policy: Arc<PolicySet>,
    /// `spec.hash` of the `NodeWatermark` that carries them; empty where they are from none.
    pub hash: Arc<str>,
}

/// Has pods of a node evicted: asks the controller's leader.
pub trait Requester: Send + Sync + 'static {
    /// Asks for the eviction of a pod, for a rule of the `NodeWatermark` with this hash.
    fn evict(
        &self,
        target: &Target,
        rule: &RuleId,
        hash: &str,
    ) -> impl Future<Output = Answer> + Send;
}

/// Has pods of one node evicted, as long as the policies in force still want it.
pub struct Evictor<R> {
    client: Client,
    requester: R,
    node: String,
    in_force: watch::Receiver<InForce>,
    /// What stands on the Node.
    standing: watch::Receiver<Standing>,
    requests: mpsc::Receiver<Request>,
    outcomes: mpsc::UnboundedSender<Outcome>,
    refusals: Refusals,
    call_timeout: Duration,
    /// Until then nothing is asked: by whose wish, and why.
    wait: Option<(BootTime, Delay, String)>,
}

impl<R: Requester> Evictor<R> {
    /// For the node of this name; to be [run](Self::run).
    pub fn new(
        client: Client,
        requester: R,
        node: &str,
        in_force: watch::Receiver<InForce>,
        standing: watch::Receiver<Standing>,
    ) -> (Self, Evictions) {
        let (requests, taken) = mpsc::channel(MOST_REQUESTS);
        let (told, outcomes) = mpsc::unbounded_channel();
        let evictor = Self {
            client,
            requester,
            node: node.to_owned(),
            in_force,
            standing,
            requests: taken,
            outcomes: told,
            refusals: Refusals::default(),
            call_timeout: CALL_TIMEOUT,
            wait: None,
        };
        (evictor, Evictions { requests, outcomes })
    }

    /// The same, where a request without an answer is carried out within so long, or never: 10 s if nothing else is said.
    #[must_use]
    pub fn with_call_timeout(self, call_timeout: Duration) -> Self {
        Self {
            call_timeout,
            ..self
        }
    }

    /// Runs until the other end is gone.
    pub async fn run(mut self) {
        while let Some(request) = self.requests.recv().await {
            let fate = match self.admit(&request, clock::boot_time()) {
                Ok(()) => self.evict(&request).await,
                Err(fate) => fate,
            };
            if matches!(fate, Fate::Accepted | Fate::Gone) {
                self.refusals.forget(&request.uid());
            }
            self.tell(request, fate);
        }
    }

    fn tell(&self, request: Request, fate: Fate) {
        // Whoever asked is gone: the loop ends at its next look.
        drop(self.outcomes.send(Outcome {
            request,
            at: clock::boot_time(),
            fate,
        }));
    }

    /// Whether anything may be sent now.
    fn admit(&mut self, request: &Request, now: BootTime) -> Result<(), Fate> {
        if let Some((until, by, why)) = self.wait.clone() {
            if now < until {
                let wait = until.since(now);
                let why = Refusal::Wait { wait, by, why };
                return Err(Fate::Refused { until, why });
            }
            self.wait = None;
        }
        if now >= request.expires {
            return Err(late(now));
        }
        Ok(())
    }

    /// Waits until new pods are kept away as the rule's action says, as long as the request holds.
    async fn closed(&mut self, request: &Request) -> Result<(), Fate> {
        let in_force = &self.in_force;
        let closed = self.standing.wait_for(|standing| {
            standing.effect >= wanted_effect(&in_force.borrow().policy, request)
        });
        let left = request.expires.since(clock::boot_time());
        if let Ok(Ok(_)) = tokio::time::timeout(left, closed).await {
            return Ok(());
        }
        let why = {
            let standing = self.standing.borrow();
            let failing = standing.failing.clone();
            let why = if standing.contested {
                "somebody keeps taking it off"
            } else {
                "it was not seen there in time"
            };
            failing.unwrap_or_else(|| why.to_owned())
        };
        Err(Fate::Refused {
            until: clock::boot_time(),
            why: Refusal::Open(why),
        })
    }

    async fn evict(&mut self, request: &Request) -> Fate {
        if let Err(fate) = self.closed(request).await {
            return fate;
        }
        let target = &request.target;
        let pod = match eviction::look(&self.client, target).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return Fate::Gone,
            Err(error) => return self.unseen(request, &error),
        };
        if let Some(fate) = self.objects(request, &pod) {
            return fate;
        }
        if clock::boot_time() >= request.expires {
            return late(clock::boot_time());
        }
        let hash = Arc::clone(&self.in_force.borrow().hash);
        match self.requester.evict(target, &request.rule, &hash).await {
            Answer::Accepted => Fate::Accepted,
            Answer::Terminating => Fate::Terminating,
            Answer::Gone => Fate::Gone,
            Answer::Budget { why } => self.refuse(request, Refusal::Budget(why)),
            Answer::ManyBudgets { why } => self.refuse(request, Refusal::ManyBudgets(why)),
            Answer::Refused { why } => self.refuse(request, Refusal::Server(why)),
            Answer::Wait { wait, by, why } => self.hold(wait, by, why),
            Answer::Away { why } => Fate::Refused {
                until: clock::boot_time(),
                why: Refusal::Away(why),
            },
            Answer::Unknown { why } => self.find_out(request, why).await,
        }
    }

    /// The pod can't be read, so that nothing is sent.
    fn unseen(&mut self, request: &Request, error: &CallError) -> Fate {
        let why = error.words();
        match error.code() {
            Some(429 | 503) => {
                let wait = error.retry_after().unwrap_or(LOOKS.0);
                self.hold(wait, Delay::Server, why)
            }
            Some(401 | 403) => self.refuse(request, Refusal::Server(why)),
            _ => Fate::Refused {
                until: clock::boot_time(),
                why: Refusal::Away(why),
            },
        }
    }

    fn objects(&mut self, request: &Request, pod: &PodObject) -> Option<Fate> {
        let objection = {
            let in_force = self.in_force.borrow();
            permit(pod, &self.node, &request.rule, &in_force.policy).err()?
        };
        Some(match objection {
            Objection::Terminating => Fate::Terminating,
            objection => self.refuse(request, Refusal::Objection(objection)),
        })
    }

    fn refuse(&mut self, request: &Request, why: Refusal) -> Fate {
        let now = clock::boot_time();
        let pause = match why {
            Refusal::ManyBudgets(_) => jittered(MOST_BACKOFF),
            _ => self.refusals.pause(&request.uid(), now),
        };
        Fate::Refused {
            until: now + pause,
            why,
        }
    }

    fn hold(&mut self, wait: Duration, by: Delay, why: String) -> Fate {
        // Agents that were sent away together do not come back together.
        let until = clock::boot_time() + jittered(wait);
        self.wait = Some((until, by, why.clone()));
        let why = Refusal::Wait { wait, by, why };
        Fate::Refused { until, why }
    }

    /// The request may have been carried out: the pod says so.
    async fn find_out(&mut self, request: &Request, why: String) -> Fate {
        self.tell(request.clone(), Fate::Unsure(why.clone()));
        let begun = clock::boot_time();
        for pause in backoff(LOOKS.0, LOOKS.1) {
            tokio::time::sleep(pause).await;
            match eviction::look::<PodObject>(&self.client, &request.target).await {
                Ok(None) => return Fate::Gone,
                Ok(Some(pod)) if pod.metadata.deletion_timestamp.is_some() => {
                    return Fate::Accepted;
                }
                Ok(Some(_)) if clock::boot_time().since(begun) >= self.call_timeout => break,
                Err(_) if clock::boot_time().since(begun) >= LONGEST_LOOK => break,
                Ok(Some(_)) | Err(_) => {}
            }
        }
        // It was waited for long enough.
        Fate::Refused {
            until: clock::boot_time(),
            why: Refusal::Unanswered(why),
        }
    }
}

/// The taint that has to stand before: that of the rule's action, softened where the fleet's cap says so.
fn wanted_effect(policy: &PolicySet, request: &Request) -> Option<TaintEffect> {
    let mut rules = policy.rules.iter();
    rules
        .find(|rule| rule.id == request.rule)?
        .action
        .scheduling
}

/// How often each pod was refused.
#[derive(Debug, Default)]
struct Refusals(BTreeMap<PodUid, (Duration, BootTime)>);

impl Refusals {
    /// For how long the pod is left alone now.
    fn pause(&mut self, uid: &PodUid, now: BootTime) -> Duration {
        self.0.retain(|_, (_, last)| now.since(*last) < FORGET);
        let pause = match self.0.get(uid) {
            Some((before, _)) => before.saturating_mul(2).min(MOST_BACKOFF),
            None => LEAST_BACKOFF,
        };
        self.0.insert(uid.clone(), (pause, now));
        jittered(pause)
    }

    fn forget(&mut self, uid: &PodUid) {
        self.0.remove(uid);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_pod_that_is_refused_again_and_again_is_asked_ever_more_seldom() {
        let mut refusals = Refusals::default();
        let uid = PodUid::from("u");
        let mut now = BootTime::default();
        let mut pause = || {
            let pause = refusals.pause(&uid, now);
            now = now + pause;
            pause.as_secs_f64()
        };
        for least in [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0] {
            let pause = pause();
            assert!((least..=least * 1.25).contains(&pause), "{pause}");
        }
        let forgotten = refusals.pause(&uid, now + FORGET).as_secs_f64();
        assert!((10.0..=12.5).contains(&forgotten), "{forgotten}");
        let of_others = (0..20).map(|pod| refusals.pause(&PodUid::from(&*format!("v{pod}")), now));
        let of_others: BTreeSet<Duration> = of_others.collect();
        assert!(of_others.len() > 10, "with jitter: {of_others:?}");
    }
}
