//! Requests evictions from the controller's leader: over the connection of the reports, else through the API server.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use kube::Client;
use tokio::time::{Instant, timeout_at};

use super::Options;
use super::credentials::CredentialFiles;
use super::links::{Links, Sender};
use crate::agent::eviction::Requester;
use crate::clock;
use crate::cluster::client::{CallError, call};
use crate::cluster::eviction::was_not_sent;
use crate::crd::eviction::{
    ANSWER_TIMEOUT, Delay, EvictionAnswer, EvictionRequest, EvictionTarget, Key, LEADERLESS_WAIT,
    Misdirected, PATH, api_path,
};
use crate::engine::policy::RuleId;

/// Largest answer that is read.
const MAX_ANSWER_BYTES: usize = 16 << 10;

/// A client of the controller's leader for one node.
#[derive(Clone)]
pub struct LeaderClient {
    client: Client,
    node: String,
    boot_id: String,
    links: Links,
    /// The name in the replicas' certificates and the agent's credentials; `None`: direct reports are off.
    direct: Option<(String, Arc<Mutex<CredentialFiles>>)>,
}

/// The answer of a replica.
enum Direct {
    Answer(EvictionAnswer),
    /// It is not the leader.
    Misdirected(Misdirected),
    /// It did not accept the request, for example because it is older.
    Refused(String),
}

impl LeaderClient {
    /// For the agent of `node`; `reports` are the options of direct reports.
    pub fn new(
        client: Client,
        node: &str,
        boot_id: &str,
        reports: Option<&Options>,
        links: Links,
    ) -> Self {
        let files = |directory: &Path| Arc::new(Mutex::new(CredentialFiles::new(directory)));
        let direct = reports.map(|reports| (reports.server_name(), files(&reports.credentials)));
        Self {
            client,
            node: node.to_owned(),
            boot_id: boot_id.to_owned(),
            links,
            direct,
        }
    }

    /// Sends the request over the connection of the reports. `Err` has the reason, and whether the request may have arrived.
    async fn request_directly(&self, body: &Bytes) -> Result<EvictionAnswer, (String, bool)> {
        let not_sent = |why: &str| (why.to_owned(), false);
        let (name, authorization) = self
            .credentials()
            .ok_or_else(|| not_sent("there are no credentials for direct reports"))?;
        let none = || not_sent("no connection to the controller");
        let mut sender = self.links.best().ok_or_else(none)?;
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        // A standby names the leader.
        for _ in 0..2 {
            if sender.ready().await.is_err() {
                return Err(not_sent("the connection to the controller broke"));
            }
            let sent = send(&mut sender, &name, &authorization, body.clone());
            let unanswered = |why: String| (why, true);
            match timeout_at(deadline, sent).await {
                Ok(Ok(Direct::Answer(answer))) => return Ok(answer),
                Ok(Ok(Direct::Misdirected(Misdirected { leader }))) => {
                    let leader = leader.and_then(|leader| self.links.to(leader));
                    sender = leader.ok_or_else(|| not_sent("no connection to the leader"))?;
                }
                Ok(Ok(Direct::Refused(why))) => return Err((why, false)),
                Ok(Err(error)) => return Err(unanswered(error.to_string())),
                Err(_) => {
                    let seconds = ANSWER_TIMEOUT.as_secs();
                    return Err(unanswered(format!("no answer within {seconds} s")));
                }
            }
        }
        Err(not_sent("no replica of the controller leads"))
    }

    fn credentials(&self) -> Option<(String, HeaderValue)> {
        let (name, files) = self.direct.as_ref()?;
        let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
        let credentials = files.current().ok()?;
        Some((name.clone(), credentials.authorization))
    }

    async fn request_through_api_server(&self, body: &Bytes) -> Result<EvictionAnswer, CallError> {
        let request = Request::post(api_path(&self.node))
            .header(CONTENT_TYPE, "application/json")
            .body(body.to_vec());
        let request = request.map_err(kube::Error::HttpError)?;
        call(self.client.request(request)).await
    }
}

impl Requester for LeaderClient {
    async fn evict(&self, target: &EvictionTarget, rule: &RuleId, hash: &str) -> EvictionAnswer {
        let request = EvictionRequest {
            key: Key {
                boot_id: self.boot_id.clone(),
                // Increases across restarts of the agent, too.
                sequence: clock::boot_time().as_nanos(),
            },
            target: target.clone(),
            rule: rule.to_string(),
            hash: hash.to_owned(),
        };
        let body = match serde_json::to_vec(&request) {
            Ok(body) => Bytes::from(body),
            Err(error) => {
                let why = error.to_string();
                return EvictionAnswer::Refused { why };
            }
        };
        let (why, may_have_arrived) = match self.request_directly(&body).await {
            Ok(answer) => return answer,
            Err(failed) => failed,
        };
        // The same key: a request that has arrived is not carried out again.
        match self.request_through_api_server(&body).await {
            // Another leader may not know what the first one did.
            Ok(answer) if may_have_arrived && answer.why().is_some() => {
                EvictionAnswer::Unknown { why }
            }
            Ok(answer) => answer,
            Err(_) if may_have_arrived => EvictionAnswer::Unknown { why },
            Err(error) if may_be_processed(&error) => EvictionAnswer::Unknown {
                why: error.message(),
            },
            Err(error) => unreachable_leader(&why, &error),
        }
    }
}

/// The request was sent and its result is unknown.
fn may_be_processed(error: &CallError) -> bool {
    let is_lost = error.code().is_none_or(|code| code >= 500);
    is_lost && !was_not_sent(error) && !was_not_forwarded(error)
}

/// Whether the API server had no controller to forward the request to. Other 5xx may follow a processed request.
fn was_not_forwarded(error: &CallError) -> bool {
    let message = error.message();
    let found_none = message.contains("service unavailable") || message.contains("dial ");
    error.code() == Some(503) && found_none
}

fn unreachable_leader(direct: &str, error: &CallError) -> EvictionAnswer {
    let by_api_server = match error.code() {
        Some(404) => "the controller accepts no requests through the API server".to_owned(),
        _ => error.message(),
    };
    EvictionAnswer::Wait {
        wait: error.retry_after().unwrap_or_default().max(LEADERLESS_WAIT),
        by: Delay::Leader,
        why: format!("the controller cannot be reached: {direct}; {by_api_server}"),
    }
}

async fn send(
    sender: &mut Sender,
    name: &str,
    authorization: &HeaderValue,
    body: Bytes,
) -> Result<Direct, Box<dyn std::error::Error + Send + Sync>> {
    let request = Request::post(format!("https://{name}{PATH}"))
        .header(AUTHORIZATION, authorization)
        .header(CONTENT_TYPE, "application/json")
        .body(Full::new(body))?;
    parse_answer(sender.send_request(request).await?).await
}

async fn parse_answer(
    answer: Response<Incoming>,
) -> Result<Direct, Box<dyn std::error::Error + Send + Sync>> {
    let status = answer.status();
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect();
    let body = body.await?.to_bytes();
    Ok(match status {
        StatusCode::OK => Direct::Answer(serde_json::from_slice(&body)?),
        StatusCode::MISDIRECTED_REQUEST => {
            // Without a readable body the leader is unknown.
            Direct::Misdirected(serde_json::from_slice(&body).unwrap_or_default())
        }
        _ => Direct::Refused(format!("the controller answered {status}")),
    })
}
