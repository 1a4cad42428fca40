//! A leader that agents can't reach gets their reports from the other replicas: each asks the leader which reports it
//! is missing, and relays those that it has.

use std::future::pending;
use std::net::SocketAddr;
use std::time::Duration;

use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::cluster::client::describe;
use crate::cluster::clock;
use crate::cluster::election::Standing;
use crate::crd::report::{Missed, RELAY_PATH};

use super::certificates::Tls;
use super::forward::{self, ANSWER_TIMEOUT, ForwardError};
use super::reports::Reports;
use super::server::{Answer, Api, JSON, body_of, whole};
use super::status::Refusal;

/// How often the leader is asked.
const LOOK: Duration = Duration::from_secs(1);
/// Size limit of a batch, because the leader parses it in one go.
const MOST_BYTES: usize = 1 << 20;
/// Limit of batches in a row.
const MOST_PASSES: u32 = 16;
/// Enough for all nodes of a cluster of 15,000, with names of maximum length.
const LONGEST_ANSWER: usize = 8 << 20;
/// Time limit for request and response bodies.
const BODY: Duration = Duration::from_secs(3);

/// Why nothing was relayed.
#[derive(Debug, Error)]
enum RelayError {
    /// The leader can't be reached.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// The leader refuses, e.g. because of an earlier version.
    #[error("the leader answered {0}")]
    Refused(StatusCode),
    /// The answer is too long or incomplete.
    #[error("failed to read the list of missing reports")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer took too long.
    #[error("no answer within {} s", BODY.as_secs())]
    TimedOut,
    /// The answer can't be parsed.
    #[error("failed to parse the list of missing reports")]
    Answer(#[from] serde_json::Error),
}

/// Stores relayed reports, and answers which reports are missing here.
pub async fn take(reports: &Reports, request: Request<Incoming>) -> Result<Answer, Refusal> {
    if *request.method() != Method::POST {
        let message = "reports are relayed by POST";
        return Err(Refusal::new(405, "MethodNotAllowed", message));
    }
    let broken = || Refusal::bad_request("the request is too long or incomplete");
    let body = body_of(request, MOST_BYTES, BODY).await;
    let missed = reports.take_relayed(&body.ok_or_else(broken)?);
    let answer = missed.and_then(|missed| serde_json::to_vec(&missed));
    let answer = answer.map_err(|error| Refusal::bad_request(error.to_string()))?;
    Ok(whole(StatusCode::OK, JSON, answer.into()))
}

/// Relays reports to the leader.
pub struct Relay {
    /// Leadership.
    pub standing: watch::Receiver<Standing>,
    /// TLS configuration for calls to replicas.
    pub tls: watch::Receiver<Option<Tls>>,
    /// The name in our certificate.
    pub server_name: String,
    /// Reports received here. `None`: reports are disabled.
    pub reports: Option<Reports>,
}

impl Relay {
    /// Of the replica that serves this API.
    pub fn of(api: &Api) -> Self {
        Self {
            standing: api.standing.clone(),
            tls: api.tls.clone(),
            server_name: api.server_name.clone(),
            reports: api.reports.clone(),
        }
    }

    /// Runs forever; relays missing reports while another replica leads.
    pub async fn run(self) {
        let Some(reports) = &self.reports else {
            return pending().await;
        };
        let mut looks = interval(LOOK);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut helps = false;
        loop {
            looks.tick().await;
            let standing = *self.standing.borrow();
            let leader = standing
                .leader()
                .filter(|_| standing.term(clock::now()).is_none());
            let Some(leader) = leader.filter(|_| reports.hears()) else {
                continue;
            };
            match self.pass_on(leader, reports).await {
                Ok(0) => helps = false,
                Ok(count) => {
                    if !std::mem::replace(&mut helps, true) {
                        tracing::info!(%leader, count, "the leader is missing reports of agents that reach this replica: relaying them");
                    }
                }
                Err(error) => {
                    tracing::debug!(%leader, why = describe(&error), "failed to relay reports");
                }
            }
        }
    }

    /// Relays one batch, and returns its size.
    async fn pass_on(&self, leader: SocketAddr, reports: &Reports) -> Result<usize, RelayError> {
        let (mut body, mut passed) = (b"[]".to_vec(), 0);
        for _ in 0..MOST_PASSES {
            let missed = self.ask(leader, body).await?;
            let (next, count) = reports.relay(&missed, MOST_BYTES);
            if count == 0 {
                break;
            }
            (body, passed) = (next, passed + count);
        }
        Ok(passed)
    }

    async fn ask(&self, leader: SocketAddr, body: Vec<u8>) -> Result<Vec<Missed>, RelayError> {
        let tls = self.tls.borrow().clone();
        let Some(Tls { client, .. }) = tls else {
            return Ok(Vec::new());
        };
        let (name, body) = (&self.server_name, Some(Bytes::from(body)));
        let answer =
            forward::pass(leader, client, name, RELAY_PATH, JSON, body, ANSWER_TIMEOUT).await?;
        if answer.status() != StatusCode::OK {
            return Err(RelayError::Refused(answer.status()));
        }
        let body = Limited::new(answer.into_body(), LONGEST_ANSWER).collect();
        let body = timeout(BODY, body)
            .await
            .map_err(|_| RelayError::TimedOut)?;
        let body = body.map_err(RelayError::Body)?;
        Ok(serde_json::from_slice(&body.to_bytes())?)
    }
}
