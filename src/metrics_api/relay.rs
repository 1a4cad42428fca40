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

use crate::clock;
use crate::cluster::client::describe;
use crate::cluster::election::Leadership;
use crate::crd::report::{MissingReport, RELAY_PATH};

use super::certificates::Tls;
use super::forward::{self, ANSWER_TIMEOUT, ForwardError};
use super::reports::Reports;
use super::server::{Answer, Api, JSON, body_of, full_response};
use super::status::ErrorResponse;

/// How often the leader is asked.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Size limit of a batch, because the leader parses it in one go.
const MAX_BATCH_BYTES: usize = 1 << 20;
/// Limit of batches in a row.
const MAX_BATCHES: u32 = 16;
/// Enough for all nodes of a cluster of 15,000, with names of maximum length.
const MAX_ANSWER_BYTES: usize = 8 << 20;
/// Time limit for request and response bodies.
const BODY_TIMEOUT: Duration = Duration::from_secs(3);

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
    #[error("no answer within {} s", BODY_TIMEOUT.as_secs())]
    TimedOut,
    /// The answer can't be parsed.
    #[error("failed to parse the list of missing reports")]
    Answer(#[from] serde_json::Error),
}

/// Stores relayed reports, and answers which reports are missing here.
pub async fn receive(
    reports: &Reports,
    request: Request<Incoming>,
) -> Result<Answer, ErrorResponse> {
    if *request.method() != Method::POST {
        let message = "reports are relayed by POST";
        return Err(ErrorResponse::new(405, "MethodNotAllowed", message));
    }
    let broken = || ErrorResponse::bad_request("the request is too long or incomplete");
    let body = body_of(request, MAX_BATCH_BYTES, BODY_TIMEOUT).await;
    let missed = reports.store_relayed(&body.ok_or_else(broken)?);
    let answer = missed.and_then(|missed| serde_json::to_vec(&missed));
    let answer = answer.map_err(|error| ErrorResponse::bad_request(error.to_string()))?;
    Ok(full_response(StatusCode::OK, JSON, answer.into()))
}

/// Relays reports to the leader.
pub struct Relay {
    /// Leadership.
    pub leadership: watch::Receiver<Leadership>,
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
            leadership: api.leadership.clone(),
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
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut is_relaying = false;
        loop {
            ticks.tick().await;
            let leadership = *self.leadership.borrow();
            let leader = leadership
                .leader()
                .filter(|_| leadership.term(clock::boot_time()).is_none());
            let Some(leader) = leader.filter(|_| reports.has_reporting_nodes()) else {
                continue;
            };
            match self.relay(leader, reports).await {
                Ok(0) => is_relaying = false,
                Ok(count) => {
                    if !std::mem::replace(&mut is_relaying, true) {
                        tracing::info!(%leader, count, "the leader is missing reports of agents that reach this replica: relaying them");
                    }
                }
                Err(error) => {
                    tracing::debug!(%leader, why = describe(&error), "failed to relay reports");
                }
            }
        }
    }

    /// Relays what the leader has missed, and returns the number of reports.
    async fn relay(&self, leader: SocketAddr, reports: &Reports) -> Result<usize, RelayError> {
        let (mut body, mut relayed) = (b"[]".to_vec(), 0);
        for _ in 0..MAX_BATCHES {
            let missed = self.missing(leader, body).await?;
            let (next, count) = reports.relay(&missed, MAX_BATCH_BYTES);
            if count == 0 {
                break;
            }
            (body, relayed) = (next, relayed + count);
        }
        Ok(relayed)
    }

    async fn missing(
        &self,
        leader: SocketAddr,
        body: Vec<u8>,
    ) -> Result<Vec<MissingReport>, RelayError> {
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
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect();
        let body = timeout(BODY_TIMEOUT, body)
            .await
            .map_err(|_| RelayError::TimedOut)?;
        let body = body.map_err(RelayError::Body)?;
        Ok(serde_json::from_slice(&body.to_bytes())?)
    }
}
