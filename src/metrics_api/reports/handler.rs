//! Handles requests of agents.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use serde_json::value::RawValue;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::super::authn::bearer;
use super::super::status::ErrorResponse;
use super::identity::{Denied, Identity};
use super::interval::{ListenerLoad, ReportLimits};
use super::latest::{Latest, ReceivedReport, StoreOutcome};
use super::metrics::ReportMetrics;
use super::token::BadToken;
use crate::clock;
use crate::cluster::election::Leadership;
use crate::crd::Report;
use crate::crd::eviction::{self, EvictionRequest, Misdirected};
use crate::crd::report::{Acknowledgement, MAX_ACCEPTED_BYTES, MissingReport, PATH, RelayedReport};
use crate::engine::time::BootTime;
use crate::evictions::{Evictions, Reply};

/// Time limit for reading a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);

/// A response.
pub type Answer = Response<Full<Bytes>>;

/// A refusal with its metric label.
type Refused = (&'static str, ErrorResponse);

/// Receives reports.
pub struct ReportHandler {
    /// Authenticates agents.
    pub identity: Identity,
    leadership: watch::Receiver<Leadership>,
    latest: Mutex<Latest>,
    limits: Mutex<ReportLimits>,
    arrived: Notify,
    /// Queue of eviction requests.
    pub evictions: Evictions,
    /// Prometheus metrics.
    pub metrics: ReportMetrics,
}

/// A response, with the node of a stored report.
pub struct Answered {
    /// The response.
    pub answer: Answer,
    /// `None`: the request failed or was an eviction. Only reports keep a connection open.
    pub node: Option<Arc<str>>,
}

impl ReportHandler {
    /// Refuses reports until [`Self::open`] is called.
    pub fn new(
        identity: Identity,
        leadership: watch::Receiver<Leadership>,
        metrics: ReportMetrics,
        evictions: Evictions,
    ) -> Self {
        Self {
            identity,
            leadership,
            latest: Mutex::default(),
            limits: Mutex::default(),
            arrived: Notify::new(),
            evictions,
            metrics,
        }
    }

    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn limits(&self) -> ReportLimits {
        *self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All nodes are known: accepts reports from now on.
    pub fn open(&self) {
        self.latest().open(clock::boot_time());
    }

    /// A Node was added or changed (with its boot ID, or an empty string), or (`None`) deleted.
    pub fn node(&self, name: &str, boot_id: Option<&str>) {
        self.latest().node(name, boot_id);
    }

    /// The region and zone of a node.
    pub fn zone(&self, name: &str, zone: &Arc<str>) {
        self.latest().zone(name, zone);
    }

    /// Completes when a report has arrived.
    pub async fn arrived(&self) {
        self.arrived.notified().await;
    }

    /// The newest report of each node since the last call.
    pub fn take(&self) -> Vec<ReceivedReport> {
        self.latest().take()
    }

    /// Updates the limits from the CPU usage of the listener.
    pub fn measure(&self, busy: f64) {
        let now = clock::boot_time();
        let (backlog, nodes) = {
            let mut latest = self.latest();
            latest.permit_soft_taints(now);
            let since = latest.waiting_since();
            let backlog = since.map_or(Duration::ZERO, |since| now.since(since));
            (backlog, latest.reporting(now))
        };
        let mut limits = self.limits.lock().unwrap_or_else(PoisonError::into_inner);
        *limits = limits.at(ListenerLoad { busy, backlog }).for_nodes(nodes);
        self.metrics.set_load(nodes, busy, *limits);
    }

    /// Handles one request.
    pub async fn answer(&self, request: Request<Incoming>) -> Answered {
        if request.uri().path() == eviction::PATH {
            let answer = self.evict(request).await;
            return answer.unwrap_or_else(|(result, refusal)| {
                self.metrics.count(result);
                refused(&refusal)
            });
        }
        let started = clock::boot_time();
        let taken = self.receive(request).await;
        let (result, answered) = match taken {
            Ok((result, node)) => (result, self.acknowledged(node)),
            Err((result, refusal)) => (result, refused(&refusal)),
        };
        self.metrics
            .answered(result, clock::boot_time().since(started));
        answered
    }

    /// Checks are ordered by cost: the body is only read after authentication.
    async fn receive(
        &self,
        request: Request<Incoming>,
    ) -> Result<(&'static str, Arc<str>), Refused> {
        if request.uri().path() != PATH {
            return Err(("path", ErrorResponse::no_path()));
        }
        if *request.method() != Method::POST {
            return Err((
                "method",
                ErrorResponse::new(405, "MethodNotAllowed", "reports are sent by POST"),
            ));
        }
        if !self.latest().is_open() {
            return Err(not_open());
        }
        let node = self.identify(request.headers()).await?;
        let report = read(request).await?;
        if *report.node != *node {
            let message = format!(
                "the agent of node {node:?} cannot report for node {:?}",
                report.node
            );
            return Err(("other_node", ErrorResponse::new(403, "Forbidden", message)));
        }
        match self.put(report) {
            StoreOutcome::Stored(_) => Ok(("stored", node)),
            StoreOutcome::Replayed => Ok(("replayed", node)),
            StoreOutcome::Stale => {
                let message = format!("a later report of node {node:?} was received already");
                Err(("stale", conflict(message)))
            }
            StoreOutcome::OtherBoot => {
                let message = format!(
                    "the report is of another boot than status.nodeInfo.bootID of node {node:?}; after a restart of the \
                     machine its kubelet has to write that first"
                );
                Err(("other_boot", conflict(message)))
            }
            StoreOutcome::StartedAhead => {
                let message = format!(
                    "the agent of node {node:?} cannot have started that late according to its earlier reports and the clock of the \
                     controller"
                );
                Err(("started_ahead", conflict(message)))
            }
            StoreOutcome::NotOpen => Err(not_open()),
            StoreOutcome::UnknownNode => {
                let message = format!("nodes {node:?} not found");
                Err(("unknown_node", ErrorResponse::new(404, "NotFound", message)))
            }
            StoreOutcome::TooSoon => {
                let message = "the controller is overloaded: this report came before the requested interval had passed";
                let refusal = ErrorResponse::new(429, "TooManyRequests", message);
                Err(("too_soon", refusal.after(self.limits().retry_after())))
            }
        }
    }

    /// Handles an eviction request for the node of the token.
    async fn evict(&self, request: Request<Incoming>) -> Result<Answered, Refused> {
        if *request.method() != Method::POST {
            let message = "evictions are requested by POST";
            return Err((
                "method",
                ErrorResponse::new(405, "MethodNotAllowed", message),
            ));
        }
        let node = self.identify(request.headers()).await?;
        let body = read_body(request, eviction::MAX_BYTES).await?;
        let request = EvictionRequest::parse(&body);
        let request = request.map_err(|error| invalid(&error))?;
        let answer = replied(&self.evictions.evict(node, request).await);
        Ok(Answered { answer, node: None })
    }

    /// Stores a report.
    pub fn put(&self, report: Report) -> StoreOutcome {
        let min_age = self.limits().min_interval;
        self.store(report, min_age, clock::boot_time())
    }

    fn store(&self, report: Report, min_age: Duration, arrived_at: BootTime) -> StoreOutcome {
        let outcome = self.latest().put(report, min_age, arrived_at);
        if let StoreOutcome::Stored(age) = outcome {
            self.arrived.notify_one();
            if let Some(age) = age {
                self.metrics.followed(age);
            }
        }
        outcome
    }

    /// Stores relayed reports, and returns which nodes' reports are still missing. Invalid reports are skipped.
    ///
    /// # Errors
    /// The body can't be parsed.
    pub fn store_relayed(&self, body: &[u8]) -> serde_json::Result<Vec<MissingReport>> {
        let all: Vec<RelayedReport<&RawValue>> = serde_json::from_slice(body)?;
        let now = clock::boot_time();
        for relayed in all {
            let age = Duration::from_millis(relayed.age_millis);
            let result = match Report::parse(relayed.report.get().as_bytes()) {
                Ok(report) => match self.store(report, Duration::ZERO, now.before(age)) {
                    StoreOutcome::Stored(_) => "relayed",
                    _ => continue,
                },
                Err(_) => "invalid",
            };
            self.metrics.count(result);
        }
        Ok(self.latest().missed(now))
    }

    /// Encodes reports that another replica is missing, up to `max_bytes` bytes. Returns the body and the number of
    /// reports.
    pub fn relay(&self, missed: &[MissingReport], max_bytes: usize) -> (Vec<u8>, usize) {
        let (mut body, mut count, now) = (vec![b'['], 0, clock::boot_time());
        for missed in missed {
            // Lock for one report at a time, so that agents can report meanwhile.
            let text = self
                .latest()
                .relayed(missed, now)
                .map(|relayed| serde_json::to_vec(&relayed));
            let Some(Ok(text)) = text else { continue };
            if body.len() + text.len() + 2 > max_bytes {
                break;
            }
            if count > 0 {
                body.push(b',');
            }
            body.extend(text);
            count += 1;
        }
        body.push(b']');
        (body, count)
    }

    /// Whether any node currently reports here.
    pub fn has_reporting_nodes(&self) -> bool {
        self.latest().reporting(clock::boot_time()) > 0
    }

    async fn identify(&self, headers: &HeaderMap) -> Result<Arc<str>, Refused> {
        let token = bearer(headers).ok_or_else(|| {
            let message = "a report needs a bearer token of the agents' ServiceAccount";
            ("no_token", ErrorResponse::new(401, "Unauthorized", message))
        })?;
        self.identity.node(token).await.map_err(refuse_token)
    }

    fn acknowledged(&self, node: Arc<str>) -> Answered {
        let term = self.leadership.borrow().term(clock::boot_time());
        let limits = self.limits();
        let label_interval = limits.label_interval.as_secs();
        let acknowledgement = Acknowledgement {
            epoch: term.map(|term| term.epoch),
            leading: term.is_some(),
            next_interval_seconds: u32::try_from(limits.interval.as_secs()).unwrap_or(u32::MAX),
            label_interval_seconds: u32::try_from(label_interval).ok(),
            busy: self.latest().may_have_soft_taint(&node),
        };
        Answered {
            answer: json(StatusCode::OK, body(&acknowledgement)),
            node: Some(node),
        }
    }
}

fn conflict(message: String) -> ErrorResponse {
    ErrorResponse::new(409, "Conflict", message)
}

fn not_open() -> Refused {
    let message = "the nodes are not listed yet";
    (
        "not_ready",
        ErrorResponse::new(503, "ServiceUnavailable", message).after(1),
    )
}

fn refuse_token(why: Denied) -> Refused {
    let (result, code, reason) = match why {
        Denied::Bad(BadToken::Malformed) => ("token_malformed", 401, "Unauthorized"),
        Denied::Bad(BadToken::Audience) => ("token_audience", 401, "Unauthorized"),
        Denied::Bad(BadToken::Expired) => ("token_expired", 401, "Unauthorized"),
        Denied::Bad(BadToken::NotYet) => ("token_not_yet", 401, "Unauthorized"),
        Denied::Bad(BadToken::LongLived) => ("token_long_lived", 401, "Unauthorized"),
        Denied::Bad(BadToken::Signature) => ("token_signature", 401, "Unauthorized"),
        Denied::Account => ("other_account", 403, "Forbidden"),
        Denied::NoNode => ("no_node", 403, "Forbidden"),
        Denied::Unknown => ("token_unknown", 503, "ServiceUnavailable"),
    };
    let refusal = ErrorResponse::new(code, reason, why.to_string());
    (
        result,
        if code == 503 {
            refusal.after(5)
        } else {
            refusal
        },
    )
}

async fn read(request: Request<Incoming>) -> Result<Report, Refused> {
    let body = read_body(request, MAX_ACCEPTED_BYTES).await?;
    Report::parse(&body).map_err(|error| invalid(&error))
}

fn invalid(error: &dyn std::error::Error) -> Refused {
    ("invalid", ErrorResponse::bad_request(error.to_string()))
}

async fn read_body(request: Request<Incoming>, max: usize) -> Result<Bytes, Refused> {
    let too_large = || {
        let message = format!("the request has more than {max} bytes");
        (
            "too_large",
            ErrorResponse::new(413, "RequestEntityTooLarge", message),
        )
    };
    let body = request.into_body();
    if body.size_hint().lower() > max as u64 {
        return Err(too_large());
    }
    let body = Limited::new(body, max).collect();
    let Ok(body) = timeout(BODY_TIMEOUT, body).await else {
        let message = format!(
            "the request body was not received within {} s",
            BODY_TIMEOUT.as_secs()
        );
        return Err(("too_slow", ErrorResponse::new(408, "Timeout", message)));
    };
    let body = body.map_err(|error| {
        if error.is::<LengthLimitError>() {
            too_large()
        } else {
            (
                "broken_off",
                ErrorResponse::bad_request("the request is incomplete"),
            )
        }
    })?;
    Ok(body.to_bytes())
}

/// The leader's answer to an eviction request, or the leader's address.
fn replied(reply: &Reply) -> Answer {
    match reply {
        Reply::Answer(answer) => json(StatusCode::OK, body(answer)),
        Reply::NotLeading(leader) => {
            let misdirected = Misdirected { leader: *leader };
            json(StatusCode::MISDIRECTED_REQUEST, body(&misdirected))
        }
    }
}

fn body(answer: &impl serde::Serialize) -> Vec<u8> {
    // Serialization can't fail.
    serde_json::to_vec(answer).unwrap_or_default()
}

fn refused(refusal: &ErrorResponse) -> Answered {
    let status = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = json(status, refusal.status().to_string());
    let headers = answer.headers_mut();
    if let Some(seconds) = refusal.retry_after {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    if status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    Answered { answer, node: None }
}

fn json(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static("application/json");
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
