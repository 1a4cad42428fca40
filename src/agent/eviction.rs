//! Evictions of a node's pods: a task that requests one at a time from the controller's leader, after checking the
//! current pod again.

mod refusal;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::{mpsc, watch};

pub use self::refusal::{EvictionObstacle, Refusal};
use super::taint::TaintState;
use crate::clock;
use crate::cluster::backoff::{backoff, exponential, jittered};
use crate::cluster::client::CallError;
use crate::cluster::eviction;
use crate::crd::eviction::{Delay, EvictionAnswer, EvictionTarget, Objection, permit};
use crate::crd::pod_facts::PodObject;
use crate::engine::plan::Evict;
use crate::engine::pod::{Pod as Facts, PodUid};
use crate::engine::policy::{PolicySet, RuleId, TaintEffect};
use crate::engine::time::BootTime;

const MAX_PENDING_REQUESTS: usize = 64;
/// Backoff of a refused pod; it doubles each time.
const MIN_RETRY_DELAY: Duration = Duration::from_secs(10);
const MAX_RETRY_DELAY: Duration = Duration::from_mins(5);
/// The backoff of a pod that was not refused for this long is reset.
const BACKOFF_RESET: Duration = Duration::from_mins(15);
/// Minimum and maximum pause between checks of a pod whose eviction has an unknown result.
const POLL_INTERVAL: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));
/// A request without an answer is carried out within this time, or never.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// After this time the next evaluation decides; it checks the pod first.
const POLL_TIMEOUT: Duration = Duration::from_mins(2);

/// A request to evict a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedEviction {
    /// Which pod.
    pub target: EvictionTarget,
    /// The rule that wants it.
    pub rule: RuleId,
    /// Time from SIGTERM to SIGKILL.
    pub grace: Duration,
    /// When the next evaluation decides again: a request not sent by then is dropped.
    pub expires: BootTime,
}

impl WantedEviction {
    /// The request for an engine decision; `expires` is when the rule is evaluated next.
    pub fn of(evict: &Evict, pod: &Facts, expires: BootTime) -> Self {
        Self {
            target: EvictionTarget {
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

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionOutcome {
    /// The request.
    pub request: WantedEviction,
    /// When it was known.
    pub at: BootTime,
    /// The result.
    pub result: EvictionResult,
}

/// The result of a request; all but [`EvictionResult::ResultUnknown`] are final.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EvictionResult {
    /// The pod is being terminated.
    Accepted,
    /// It was already being terminated, not by this request.
    Terminating,
    /// The pod no longer exists.
    Gone,
    /// It was requested, with an unknown result: the pod is polled until that is known.
    ResultUnknown(String),
    /// Nothing was done. The engine decides again, for this pod not before `until`.
    Refused {
        /// When it may be tried again.
        until: BootTime,
        /// Why.
        why: Refusal,
    },
}

impl fmt::Display for EvictionResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Accepted => f.write_str("it is being terminated"),
            Self::Terminating => f.write_str("it was already being terminated"),
            Self::Gone => f.write_str("it is gone"),
            Self::ResultUnknown(why) => write!(f, "no answer yet: {why}"),
            Self::Refused { why, .. } => why.fmt(f),
        }
    }
}

/// The channel to the task; neither side ever blocks.
#[derive(Debug)]
pub struct EvictionChannel {
    requests: mpsc::Sender<WantedEviction>,
    outcomes: mpsc::UnboundedReceiver<EvictionOutcome>,
}

impl EvictionChannel {
    /// Requests an eviction; returns its outcome at once if too many are pending.
    pub fn request(&self, request: WantedEviction, now: BootTime) -> Option<EvictionOutcome> {
        let error = self.requests.try_send(request).err()?;
        Some(EvictionOutcome {
            request: error.into_inner(),
            at: now,
            result: late(now),
        })
    }

    /// The next outcome, if there is one.
    pub fn poll(&mut self) -> Option<EvictionOutcome> {
        self.outcomes.try_recv().ok()
    }
}

const fn late(now: BootTime) -> EvictionResult {
    EvictionResult::Refused {
        until: now,
        why: Refusal::Late,
    }
}

/// The policies in force on a node.
#[derive(Clone, Debug, Default)]
pub struct PoliciesInForce {
    /// The policies.
    pub policy: Arc<PolicySet>,
    /// `spec.hash` of their `NodeWatermark`; empty if they are not from one.
    pub hash: Arc<str>,
}

/// Requests evictions from the controller's leader.
pub trait Requester: Send + Sync + 'static {
    /// Requests the eviction of a pod, for a rule of the `NodeWatermark` with this hash.
    fn evict(
        &self,
        target: &EvictionTarget,
        rule: &RuleId,
        hash: &str,
    ) -> impl Future<Output = EvictionAnswer> + Send;
}

/// Requests evictions of one node's pods, as long as the policies in force still want them.
pub struct Evictor<R> {
    client: Client,
    requester: R,
    node: String,
    in_force: watch::Receiver<PoliciesInForce>,
    taint_state: watch::Receiver<TaintState>,
    requests: mpsc::Receiver<WantedEviction>,
    outcomes: mpsc::UnboundedSender<EvictionOutcome>,
    refusals: Refusals,
    call_timeout: Duration,
    /// No request is sent before this time; who asked for the delay, and why.
    wait: Option<(BootTime, Delay, String)>,
}

impl<R: Requester> Evictor<R> {
    /// An evictor for the node named `node`, to be [run](Self::run).
    pub fn new(
        client: Client,
        requester: R,
        node: &str,
        in_force: watch::Receiver<PoliciesInForce>,
        taint_state: watch::Receiver<TaintState>,
    ) -> (Self, EvictionChannel) {
        let (requests, received) = mpsc::channel(MAX_PENDING_REQUESTS);
        let (sender, outcomes) = mpsc::unbounded_channel();
        let evictor = Self {
            client,
            requester,
            node: node.to_owned(),
            in_force,
            taint_state,
            requests: received,
            outcomes: sender,
            refusals: Refusals::default(),
            call_timeout: CALL_TIMEOUT,
            wait: None,
        };
        (evictor, EvictionChannel { requests, outcomes })
    }

    /// Sets the time within which a request without an answer is carried out, or never. The default is 10 s.
    #[must_use]
    pub fn with_call_timeout(self, call_timeout: Duration) -> Self {
        Self {
            call_timeout,
            ..self
        }
    }

    /// Runs until the other side is dropped.
    pub async fn run(mut self) {
        while let Some(request) = self.requests.recv().await {
            let result = match self.admit(&request, clock::boot_time()) {
                Ok(()) => self.evict(&request).await,
                Err(result) => result,
            };
            if matches!(result, EvictionResult::Accepted | EvictionResult::Gone) {
                self.refusals.forget(&request.uid());
            }
            self.report(request, result);
        }
    }

    fn report(&self, request: WantedEviction, result: EvictionResult) {
        // If the receiver is gone, the loop ends at its next request.
        drop(self.outcomes.send(EvictionOutcome {
            request,
            at: clock::boot_time(),
            result,
        }));
    }

    /// Whether a request may be sent now.
    fn admit(&mut self, request: &WantedEviction, now: BootTime) -> Result<(), EvictionResult> {
        if let Some((until, by, why)) = self.wait.clone() {
            if now < until {
                let wait = until.since(now);
                let why = Refusal::Wait { wait, by, why };
                return Err(EvictionResult::Refused { until, why });
            }
            self.wait = None;
        }
        if now >= request.expires {
            return Err(late(now));
        }
        Ok(())
    }

    /// Waits for the taint that the rule's action needs, until the request expires.
    async fn wait_for_taint(&mut self, request: &WantedEviction) -> Result<(), EvictionResult> {
        let in_force = &self.in_force;
        let tainted = self.taint_state.wait_for(|taint_state| {
            taint_state.effect >= wanted_effect(&in_force.borrow().policy, request)
        });
        let left = request.expires.since(clock::boot_time());
        if let Ok(Ok(_)) = tokio::time::timeout(left, tainted).await {
            return Ok(());
        }
        let why = {
            let taint_state = self.taint_state.borrow();
            let failing = taint_state.failing.clone();
            let why = if taint_state.contested {
                "another writer keeps removing it"
            } else {
                "it was not seen there in time"
            };
            failing.unwrap_or_else(|| why.to_owned())
        };
        Err(EvictionResult::Refused {
            until: clock::boot_time(),
            why: Refusal::NotTainted(why),
        })
    }

    async fn evict(&mut self, request: &WantedEviction) -> EvictionResult {
        if let Err(result) = self.wait_for_taint(request).await {
            return result;
        }
        let target = &request.target;
        let pod = match eviction::read_pod(&self.client, target).await {
            Ok(Some(pod)) => pod,
            Ok(None) => return EvictionResult::Gone,
            Err(error) => return self.unreadable(request, &error),
        };
        if let Some(result) = self.check(request, &pod) {
            return result;
        }
        if clock::boot_time() >= request.expires {
            return late(clock::boot_time());
        }
        let hash = Arc::clone(&self.in_force.borrow().hash);
        match self.requester.evict(target, &request.rule, &hash).await {
            EvictionAnswer::Accepted => EvictionResult::Accepted,
            EvictionAnswer::Terminating => EvictionResult::Terminating,
            EvictionAnswer::Gone => EvictionResult::Gone,
            EvictionAnswer::Budget { why } => self.refuse(request, Refusal::Budget(why)),
            EvictionAnswer::ManyBudgets { why } => self.refuse(request, Refusal::ManyBudgets(why)),
            EvictionAnswer::Refused { why } => self.refuse(request, Refusal::Server(why)),
            EvictionAnswer::Wait { wait, by, why } => self.delay(wait, by, why),
            EvictionAnswer::NotSent { why } => EvictionResult::Refused {
                until: clock::boot_time(),
                why: Refusal::ApiServerUnreachable(why),
            },
            EvictionAnswer::Unknown { why } => self.poll_result(request, why).await,
        }
    }

    /// The pod can't be read, so nothing is sent.
    fn unreadable(&mut self, request: &WantedEviction, error: &CallError) -> EvictionResult {
        let why = error.message();
        match error.code() {
            Some(429 | 503) => {
                let wait = error.retry_after().unwrap_or(POLL_INTERVAL.0);
                self.delay(wait, Delay::Server, why)
            }
            Some(401 | 403) => self.refuse(request, Refusal::Server(why)),
            _ => EvictionResult::Refused {
                until: clock::boot_time(),
                why: Refusal::ApiServerUnreachable(why),
            },
        }
    }

    fn check(&mut self, request: &WantedEviction, pod: &PodObject) -> Option<EvictionResult> {
        let objection = {
            let in_force = self.in_force.borrow();
            permit(pod, &self.node, &request.rule, &in_force.policy).err()?
        };
        Some(match objection {
            Objection::Terminating => EvictionResult::Terminating,
            objection => self.refuse(request, Refusal::Objection(objection)),
        })
    }

    fn refuse(&mut self, request: &WantedEviction, why: Refusal) -> EvictionResult {
        let now = clock::boot_time();
        let pause = match why {
            Refusal::ManyBudgets(_) => jittered(MAX_RETRY_DELAY),
            _ => self.refusals.pause(&request.uid(), now),
        };
        EvictionResult::Refused {
            until: now + pause,
            why,
        }
    }

    fn delay(&mut self, wait: Duration, by: Delay, why: String) -> EvictionResult {
        // Jitter, so that agents delayed together do not retry together.
        let until = clock::boot_time() + jittered(wait);
        self.wait = Some((until, by, why.clone()));
        let why = Refusal::Wait { wait, by, why };
        EvictionResult::Refused { until, why }
    }

    /// The request may have been carried out: polls the pod to find out.
    async fn poll_result(&mut self, request: &WantedEviction, why: String) -> EvictionResult {
        self.report(request.clone(), EvictionResult::ResultUnknown(why.clone()));
        let started = clock::boot_time();
        for pause in backoff(POLL_INTERVAL.0, POLL_INTERVAL.1) {
            tokio::time::sleep(pause).await;
            match eviction::read_pod::<PodObject>(&self.client, &request.target).await {
                Ok(None) => return EvictionResult::Gone,
                Ok(Some(pod)) if pod.metadata.deletion_timestamp.is_some() => {
                    return EvictionResult::Accepted;
                }
                Ok(Some(_)) if clock::boot_time().since(started) >= self.call_timeout => break,
                Err(_) if clock::boot_time().since(started) >= POLL_TIMEOUT => break,
                Ok(Some(_)) | Err(_) => {}
            }
        }
        EvictionResult::Refused {
            until: clock::boot_time(),
            why: Refusal::Unanswered(why),
        }
    }
}

/// The taint effect required before an eviction: that of the rule's action, or `PreferNoSchedule` beyond the fleet cap.
fn wanted_effect(policy: &PolicySet, request: &WantedEviction) -> Option<TaintEffect> {
    let mut rules = policy.rules.iter();
    rules
        .find(|rule| rule.id == request.rule)?
        .action
        .scheduling
}

/// How often each pod was refused, and when it was last.
#[derive(Debug, Default)]
struct Refusals(BTreeMap<PodUid, (u32, BootTime)>);

impl Refusals {
    /// The pod's next backoff.
    fn pause(&mut self, uid: &PodUid, now: BootTime) -> Duration {
        self.0
            .retain(|_, (_, last)| now.since(*last) < BACKOFF_RESET);
        let (refusals, last) = self.0.entry(uid.clone()).or_insert((0, now));
        let pause = exponential(MIN_RETRY_DELAY, MAX_RETRY_DELAY, *refusals);
        (*refusals, *last) = (refusals.saturating_add(1), now);
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
    fn repeated_refusals_double_the_backoff() {
        let mut refusals = Refusals::default();
        let uid = PodUid::from("u");
        let mut now = BootTime::default();
        let mut pause = || {
            let pause = refusals.pause(&uid, now);
            now = now + pause;
            pause.as_secs_f64()
        };
        for min in [10.0, 20.0, 40.0, 80.0, 160.0, 300.0, 300.0] {
            let pause = pause();
            assert!((min..=min * 1.25).contains(&pause), "{pause}");
        }
        let reset = refusals.pause(&uid, now + BACKOFF_RESET).as_secs_f64();
        assert!((10.0..=12.5).contains(&reset), "{reset}");
        let of_others = (0..20).map(|pod| refusals.pause(&PodUid::from(&*format!("v{pod}")), now));
        let of_others: BTreeSet<Duration> = of_others.collect();
        assert!(of_others.len() > 10, "with jitter: {of_others:?}");
    }
}
