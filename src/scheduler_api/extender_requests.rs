//! Requests of kube-scheduler to its extender: bodies, the lock, and the policy file around the pure [`Extender`].

use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::{BodyExt, Limited};
use hyper::body::{Body, Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::extender::{self, Extender, GuardChange, WireError};
use super::metrics::SchedulerApiMetrics;
use super::policy_file::{POLL_INTERVAL, PolicyFile};
use super::server::{Answer, BODY_TIMEOUT, JSON, TEXT, text};
use crate::clock;
use crate::crd::scheduler_policy::SchedulerPolicy;
use crate::metrics_api::loads::NodeLoads;

/// Size limit of a body: 5000 names are 0.3 MB; a thousand whole nodes are 10 MB and more.
const MAX_BODY_BYTES: u64 = 16 << 20;
/// Bodies above this size wait for each other.
const SMALL_BODY_BYTES: u64 = 512 << 10;
/// Large bodies in memory at a time.
const MAX_LARGE_BODIES: usize = 3;

const TOO_LARGE: &str = "the body is larger than 16 MiB: set nodeCacheCapable: true for this extender, so that the scheduler sends \
                         names of nodes instead of whole Nodes\n";

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub enum Verb {
    /// Points of each node.
    Prioritize,
    /// Nodes that the pod must not go to.
    Filter,
}

/// Why a body was not read.
enum BodyError {
    TooLarge,
    Incomplete,
}

/// The extender, and what it needs.
pub struct ExtenderRequests {
    extender: Mutex<Extender>,
    large_bodies: Semaphore,
    loads: NodeLoads,
    metrics: SchedulerApiMetrics,
}

impl ExtenderRequests {
    /// By this policy, or by load line.
    pub fn new(
        policy: Option<SchedulerPolicy>,
        loads: NodeLoads,
        metrics: SchedulerApiMetrics,
    ) -> Self {
        if policy.is_some() {
            metrics.policy(true);
        }
        Self {
            extender: Mutex::new(Extender::new(policy.map(Arc::new))),
            large_bodies: Semaphore::new(MAX_LARGE_BODIES),
            loads,
            metrics,
        }
    }

    /// Answers a request.
    pub async fn answer(&self, verb: Verb, request: Request<Incoming>) -> Answer {
        if *request.method() != Method::POST {
            return text(
                StatusCode::METHOD_NOT_ALLOWED,
                TEXT,
                "only POST is allowed\n",
            );
        }
        let body = request.into_body();
        let size = body.size_hint();
        // A body of unknown size counts as large.
        let small = size.upper().is_some_and(|upper| upper <= SMALL_BODY_BYTES);
        if size.lower() > MAX_BODY_BYTES {
            return text(StatusCode::PAYLOAD_TOO_LARGE, TEXT, TOO_LARGE);
        }
        let _slot = if small {
            None
        } else {
            self.large_bodies.acquire().await.ok()
        };
        match read(body).await {
            Ok(body) => self.score(verb, &body),
            Err(BodyError::TooLarge) => text(StatusCode::PAYLOAD_TOO_LARGE, TEXT, TOO_LARGE),
            Err(BodyError::Incomplete) => {
                text(StatusCode::BAD_REQUEST, TEXT, "the body is incomplete\n")
            }
        }
    }

    fn score(&self, verb: Verb, body: &[u8]) -> Answer {
        match self.ask(verb, body) {
            Ok(scored) => {
                self.metrics.unknown_nodes(scored.unknown);
                if let Some(change) = scored.change {
                    self.changed(change);
                }
                text(StatusCode::OK, JSON, scored.body)
            }
            Err(error) => text(StatusCode::BAD_REQUEST, TEXT, format!("{error}\n")),
        }
    }

    fn ask(&self, verb: Verb, body: &[u8]) -> Result<extender::ExtenderAnswer, WireError> {
        let request = extender::ExtenderRequest::read(body)?;
        let now = clock::boot_time();
        let mut extender = self.extender.lock().unwrap_or_else(PoisonError::into_inner);
        let nodes = self.loads.read();
        Ok(match verb {
            Verb::Prioritize => extender.prioritize(&request, &nodes, now),
            Verb::Filter => extender.filter(&request, &nodes, now),
        })
    }

    fn changed(&self, change: GuardChange) {
        match change {
            GuardChange::Suspended(why) => {
                tracing::warn!("the extender's filter rejects no node: {why}");
                self.metrics.filter_suspended(true);
            }
            GuardChange::Resumed => {
                tracing::info!("the extender's filter rejects hot nodes again");
                self.metrics.filter_suspended(false);
            }
        }
    }

    /// Follows the policy file. An invalid one is reported once, and what was valid last stays in use.
    pub async fn follow(&self, mut file: PolicyFile) {
        loop {
            sleep(POLL_INTERVAL).await;
            match file.poll() {
                None => {}
                Some(Ok(policy)) => {
                    let mut extender = self.extender.lock().unwrap_or_else(PoisonError::into_inner);
                    extender.set_policy(Arc::new(policy));
                    self.metrics.policy(true);
                    tracing::info!("the scheduler policy has changed");
                }
                Some(Err(error)) => {
                    self.metrics.policy(false);
                    tracing::error!("{error}; the last valid scheduler policy stays in use");
                }
            }
        }
    }
}

async fn read(body: Incoming) -> Result<Bytes, BodyError> {
    let limit = usize::try_from(MAX_BODY_BYTES).unwrap_or(usize::MAX);
    let body = timeout(BODY_TIMEOUT, Limited::new(body, limit).collect()).await;
    match body {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            Err(BodyError::TooLarge)
        }
        _ => Err(BodyError::Incomplete),
    }
}
