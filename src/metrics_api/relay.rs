//! A replica that leads and is cut from agents hears of them by way of those that they still reach: each asks it whose
//! reports it misses, and passes on what they told.

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
/// So much goes at a time, since who takes it does nothing else meanwhile...
const MOST_BYTES: usize = 1 << 20;
/// ...and so often in a row.
const MOST_PASSES: u32 = 16;
/// All nodes of a cluster of 15 000, with the longest names that Nodes have.
const LONGEST_ANSWER: usize = 8 << 20;
/// Either body has to be here by then.
const BODY: Duration = Duration::from_secs(3);

/// Why nothing was passed on.
#[derive(Debug, Error)]
enum RelayError {
    /// The leader can't be asked.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// It refuses, as one of an earlier version does.
    #[error("the leader answers {0}")]
    Refused(StatusCode),
    /// Its answer broke off, or is too long.
    #[error("failed to read what the leader misses")]
    Body(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Its answer took too long.
    #[error("no answer within {} s", BODY.as_secs())]
    TimedOut,
    /// Its answer is none of ours.
    #[error("failed to understand what the leader misses")]
    Answer(#[from] serde_json::Error),
}

/// Takes what another replica passes on, and answers what is missed here.
pub async fn take(reports: &Reports, request: Request<Incoming>) -> Result<Answer, Refusal> {
    if *request.method() != Method::POST {
        let message = "reports are passed on by POST";
        return Err(Refusal::new(405, "MethodNotAllowed", message));
    }
    let broken = || Refusal::bad_request("what is passed on is too long, or broke off");
    let body = body_of(request, MOST_BYTES, BODY).await;
    let missed = reports.take_relayed(&body.ok_or_else(broken)?);
    let answer = missed.and_then(|missed| serde_json::to_vec(&missed));
    let answer = answer.map_err(|error| Refusal::bad_request(error.to_string()))?;
    Ok(whole(StatusCode::OK, JSON, answer.into()))
}

/// How the leader is reached, and known.
pub struct Relay {
    /// Who leads.
    pub standing: watch::Receiver<Standing>,
    /// By what replicas know each other.
    pub tls: watch::Receiver<Option<Tls>>,
    /// Our name in our certificate.
    pub server_name: String,
    /// What agents report; `None`: they don't.
    pub reports: Option<Reports>,
}

impl Relay {
    /// Of the replica that serves this.
    pub fn of(api: &Api) -> Self {
        Self {
            standing: api.standing.clone(),
            tls: api.tls.clone(),
            server_name: api.server_name.clone(),
            reports: api.reports.clone(),
        }
    }

    /// Passes on for ever, while another replica leads, what it misses.
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
                        tracing::info!(%leader, count, "the leader misses reports of agents that reach this replica: passing them on");
                    }
                }
                Err(error) => {
                    tracing::debug!(%leader, why = describe(&error), "failed to pass reports on");
                }
            }
        }
    }

    /// How many reports that were.
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
