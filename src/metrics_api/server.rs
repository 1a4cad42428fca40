//! Request handling of the API.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, BodyStream, Full, Limited, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::header::{
    ACCEPT, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, ETAG, HeaderName, HeaderValue, IF_NONE_MATCH,
    RETRY_AFTER, VARY,
};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use rustls::pki_types::CertificateDer;
use tokio::sync::{Semaphore, watch as channel};
use tokio::time::{sleep, timeout};

use crate::clock;
use crate::cluster::election::Leadership;
use crate::crd::node_metric::{API_VERSION, PLURAL};
use crate::crd::report::RELAY_PATH;

use super::ApiObserver;
use super::authn::{Authenticator, User};
use super::authz::{Access, Authorizer};
use super::certificates::Tls;
use super::data::Data;
use super::documents::{Documents, StaticDocument};
use super::encode::Encoder;
use super::evict;
use super::forward::{self, ANSWER_TIMEOUT};
use super::in_flight::{InFlightSlot, RequestsInFlight};
use super::negotiate;
use super::options::{Filter, List, ListOrWatch, Options};
use super::readiness::Readiness;
use super::relay;
use super::reports::Reports;
use super::status::ErrorResponse;
use super::store::Unavailable;
use super::watch;

/// How long data requests wait for a leader: longer than a failover takes, shorter than API servers wait.
const LEADER_TIMEOUT: Duration = Duration::from_secs(20);
/// The same while this replica shuts down: within the time that connections have.
const SHUTDOWN_LEADER_TIMEOUT: Duration = Duration::from_secs(4);
/// How often waiting requests check for a leader.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Limit of waiting requests. Others are refused with a retry delay.
pub const MAX_WAITING: usize = 256;

/// A response.
pub type Answer = Response<Body>;
/// Body of a response.
pub type Body = UnsyncBoxBody<Bytes, hyper::Error>;

/// Handles requests.
pub struct Api {
    /// The objects.
    pub data: Arc<Data>,
    /// Static documents.
    pub documents: Documents,
    /// Authentication.
    pub authenticator: Authenticator,
    /// Authorization.
    pub authorizer: Authorizer,
    /// Leadership.
    pub leadership: channel::Receiver<Leadership>,
    /// TLS configuration for calls to the leader.
    pub tls: channel::Receiver<Option<Tls>>,
    /// The name in our certificate.
    pub server_name: String,
    /// Whether this replica shuts down.
    pub stop: channel::Receiver<bool>,
    /// Limits requests that wait for a leader.
    pub waiting: Semaphore,
    /// Limits lists and watches per user.
    pub in_flight: Arc<RequestsInFlight>,
    /// Readiness of this replica.
    pub readiness: Arc<Readiness>,
    /// Receives metrics of each response.
    pub observer: Arc<dyn ApiObserver>,
    /// Reports and evictions. `None`: disabled.
    pub reports: Option<Reports>,
}

/// Meaning of a path.
enum Target<'a> {
    All,
    One(&'a str),
}

fn target(path: &str) -> Option<Target<'_>> {
    let rest = path.strip_prefix("/apis/")?.strip_prefix(API_VERSION)?;
    let rest = rest.strip_prefix('/')?.strip_prefix(PLURAL)?;
    match rest.strip_prefix('/') {
        None if rest.is_empty() => Some(Target::All),
        Some("") => Some(Target::All),
        Some(name) if !name.contains('/') => Some(Target::One(name)),
        _ => None,
    }
}

impl Api {
    /// Handles a request of a client with these certificates.
    pub async fn answer(
        &self,
        request: Request<Incoming>,
        certificates: &[CertificateDer<'static>],
    ) -> Answer {
        let mut what = "other";
        let answer = self.try_answer(request, certificates, &mut what).await;
        let answer = answer.unwrap_or_else(|refusal| refused(&refusal));
        self.observer.answered(what, answer.status().as_u16());
        answer
    }

    async fn try_answer(
        &self,
        request: Request<Incoming>,
        certificates: &[CertificateDer<'static>],
        what: &mut &'static str,
    ) -> Result<Answer, ErrorResponse> {
        let path = request.uri().path();
        let accept = accept(request.headers());
        if matches!(path, "/healthz" | "/livez" | "/readyz") {
            *what = "health";
            let ready = self.readiness.verdict().err();
            return Ok(health(ready.filter(|_| path == "/readyz")));
        }
        if let Some(document) = self.documents.at(path, &accept) {
            *what = "discovery";
            return match *request.method() {
                Method::GET | Method::HEAD => Ok(documented(document?, request.headers())),
                _ => Err(ErrorResponse::method()),
            };
        }
        let is_forwarded =
            forward::is_forwarded(request.headers()) && self.is_replica(certificates);
        if let (RELAY_PATH, true, Some(reports)) = (path, is_forwarded, &self.reports) {
            *what = "relay";
            return relay::receive(reports, request).await;
        }
        if let (Some(node), Some(reports)) = (evict::node_of(path), &self.reports) {
            *what = "eviction";
            let node = Arc::from(node);
            return self
                .evict(reports, node, request, certificates, is_forwarded)
                .await;
        }
        let target = target(path).ok_or_else(ErrorResponse::no_path)?;
        let parsed = ApiRequest::of(&target, &request, &accept)?;
        *what = parsed.verb();
        if is_forwarded {
            // The forwarding replica has authenticated and authorized it already.
            return self.serve(&parsed);
        }
        let user = tokio::select! {
            user = self.authorize(request.headers(), certificates, &parsed) => user?,
            () = self.disconnected() => return Err(ErrorResponse::unknown("to authenticate or authorize the request")),
        };
        if matches!(parsed.what, Operation::Get(_)) {
            return self.serve_or_wait(&parsed, &request, &accept).await;
        }
        let slot = self.in_flight.begin(&user.name);
        let slot = slot.ok_or_else(|| ErrorResponse::too_many_in_flight(&user.name))?;
        let answer = self.serve_or_wait(&parsed, &request, &accept).await?;
        Ok(answer.map(|body| hold_slot(body, slot)))
    }

    async fn serve_or_wait(
        &self,
        parsed: &ApiRequest,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Answer, ErrorResponse> {
        let Ok(_permit) = self.waiting.try_acquire() else {
            return self.serve_or_forward(parsed, request, accept).await;
        };
        // A refused client backs off longer and longer; one that waits is answered as soon as there is a leader.
        let answer = self.wait_for_leader(parsed, request, accept);
        let answer = timeout(LEADER_TIMEOUT, answer).await;
        answer.unwrap_or_else(|_| Err(ErrorResponse::not_leading()))
    }

    async fn wait_for_leader(
        &self,
        parsed: &ApiRequest,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Answer, ErrorResponse> {
        let (mut leadership, mut changes) = (self.leadership.clone(), self.data.changes());
        leadership.mark_unchanged();
        let over = async {
            self.stopped().await;
            sleep(SHUTDOWN_LEADER_TIMEOUT).await;
        };
        tokio::pin!(over);
        loop {
            let answer = self.serve_or_forward(parsed, request, accept).await;
            // Without a view of leadership there is nothing to wait for: the client may reach a replica that has one.
            if !is_not_leading(&answer) || self.leadership.borrow().is_disconnected() {
                return answer;
            }
            tokio::select! {
                _ = leadership.changed() => {}
                _ = changes.changed() => {}
                () = sleep(RECHECK_INTERVAL) => {}
                () = &mut over => return answer,
            }
        }
    }

    async fn serve_or_forward(
        &self,
        parsed: &ApiRequest,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Answer, ErrorResponse> {
        let answer = self.serve(parsed);
        if is_not_leading(&answer) {
            return self.forward(request, accept, parsed.verb()).await;
        }
        answer
    }

    /// Whether these certificates belong to an API server or a replica.
    pub fn is_known_client(&self, certificates: &[CertificateDer<'static>]) -> bool {
        self.authenticator.is_proxy(certificates) || self.is_replica(certificates)
    }

    fn is_replica(&self, certificates: &[CertificateDer<'static>]) -> bool {
        self.tls
            .borrow()
            .as_ref()
            .is_some_and(|tls| tls.is_replica(certificates, clock::wall_time()))
    }

    async fn authorize(
        &self,
        headers: &HeaderMap,
        certificates: &[CertificateDer<'static>],
        parsed: &ApiRequest,
    ) -> Result<User, ErrorResponse> {
        let user = self.authenticator.identify(headers, certificates).await?;
        let access = Access {
            verb: parsed.verb(),
            name: parsed.name(),
        };
        self.authorizer.allow(&user, access).await?;
        Ok(user)
    }

    /// Completes when the API server has been unreachable for so long that requests to it are hopeless.
    fn disconnected(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut leadership = self.leadership.clone();
        async move {
            drop(leadership.wait_for(Leadership::is_disconnected).await);
            sleep(RECHECK_INTERVAL).await;
        }
    }

    async fn forward(
        &self,
        request: &Request<Incoming>,
        accept: &str,
        verb: &str,
    ) -> Result<Answer, ErrorResponse> {
        let leader = self.leadership.borrow().leader();
        let tls = self.tls.borrow().clone();
        let (Some(leader), Some(tls)) = (leader, tls) else {
            return Err(ErrorResponse::not_leading());
        };
        let path = request
            .uri()
            .path_and_query()
            .map_or("/", |path| path.as_str());
        let forwarded = forward::pass(
            leader,
            tls.client,
            &self.server_name,
            path,
            accept,
            None,
            ANSWER_TIMEOUT,
        );
        let forwarded = tokio::select! {
            forwarded = forwarded => forwarded,
            // The leader may be suspended: the next one is asked as soon as it leads.
            () = self.leadership_lost(leader, false) => return Err(ErrorResponse::not_leading()),
        };
        let answer = forwarded.map_err(|error| {
            tracing::debug!(%leader, why = crate::cluster::client::describe(&error), "failed to forward a request");
            ErrorResponse::not_leading()
        })?;
        if matches!(
            answer.status(),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::UNAUTHORIZED
        ) {
            // It lost leadership, is warming up, or does not trust our authority yet: the client waits as it would
            // there.
            return Err(ErrorResponse::not_leading());
        }
        Ok(answer.map(|body| until(body, self.leadership_lost(leader, verb == "watch"))))
    }

    /// Completes when this leader has lost leadership: it may be suspended, and a forwarded watch would hang.
    fn leadership_lost(
        &self,
        leader: SocketAddr,
        watches: bool,
    ) -> impl Future<Output = ()> + Send + use<> {
        let mut leadership = self.leadership.clone();
        let stopped = self.stopped();
        async move {
            tokio::select! {
                _ = leadership.wait_for(|leadership| leadership.leader() != Some(leader)) => {}
                () = stopped, if watches => {}
            }
        }
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut stop = self.stop.clone();
        async move { drop(stop.wait_for(|stop| *stop).await) }
    }

    fn serve(&self, parsed: &ApiRequest) -> Result<Answer, ErrorResponse> {
        let ApiRequest { what, writer, .. } = parsed;
        match what {
            Operation::Get(name) => {
                let found = self.data.read(|store| store.get(name)).and_then(Result::ok);
                let object = found.ok_or_else(ErrorResponse::not_leading)?;
                let object = object.ok_or_else(|| ErrorResponse::no_object(name))?;
                Ok(full_response(
                    StatusCode::OK,
                    JSON,
                    writer.object(&object, true).into(),
                ))
            }
            Operation::Options(options) => match &options.operation {
                ListOrWatch::List(list) => self.list(list, &options.filter, *writer),
                ListOrWatch::Watch(watch) => {
                    let (data, filter) = (Arc::clone(&self.data), options.filter.clone());
                    let lines = watch::stream(data, *watch, filter, *writer)?;
                    // Every part consists of whole events.
                    Ok(streamed(lines.take_until(self.stopped())))
                }
            },
        }
    }

    fn list(&self, list: &List, filter: &Filter, writer: Encoder) -> Result<Answer, ErrorResponse> {
        let List {
            freshness,
            limit,
            token,
        } = list;
        let page = self
            .data
            .read(|store| store.list(filter, *freshness, *limit, token.as_ref()));
        let page = page.unwrap_or(Err(Unavailable::NotLeading))?;
        let counts = filter.is_all();
        let data = Arc::clone(&self.data);
        let parts = writer.list(page, counts).map(move |text| data.part(text));
        Ok(streamed(stream::iter(parts)))
    }
}

fn is_not_leading(answer: &Result<Answer, ErrorResponse>) -> bool {
    answer.as_ref().is_err_and(ErrorResponse::is_not_leading)
}

pub(super) const JSON: &str = "application/json";

/// A parsed request.
struct ApiRequest {
    what: Operation,
    writer: Encoder,
}

enum Operation {
    Get(String),
    Options(Options),
}

impl ApiRequest {
    fn of(
        target: &Target<'_>,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Self, ErrorResponse> {
        if *request.method() != Method::GET {
            return Err(ErrorResponse::method());
        }
        let form = negotiate::form(accept).ok_or_else(ErrorResponse::not_acceptable)?;
        let mut options = Options::of(request.uri().query().unwrap_or_default())?;
        let writer = Encoder {
            form,
            include: options.include,
            now: clock::wall_time(),
        };
        let what = match (target, &options.operation) {
            (Target::One(name), ListOrWatch::List(_)) => Operation::Get((*name).to_owned()),
            (Target::One(name), ListOrWatch::Watch(_)) => {
                options.filter.names.push(((*name).to_owned(), true));
                Operation::Options(options)
            }
            (Target::All, _) => Operation::Options(options),
        };
        Ok(Self { what, writer })
    }

    const fn verb(&self) -> &'static str {
        match &self.what {
            Operation::Get(_) => "get",
            Operation::Options(Options {
                operation: ListOrWatch::List(_),
                ..
            }) => "list",
            Operation::Options(_) => "watch",
        }
    }

    fn name(&self) -> Option<&str> {
        match &self.what {
            Operation::Get(name) => Some(name),
            Operation::Options(options) => options.filter.only(),
        }
    }
}

fn accept(headers: &HeaderMap) -> String {
    let all = headers
        .get_all(ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok());
    all.collect::<Vec<_>>().join(",")
}

fn health(missing: Option<String>) -> Answer {
    let (status, text) = match missing {
        None => (StatusCode::OK, "ok".to_owned()),
        Some(missing) => (StatusCode::SERVICE_UNAVAILABLE, missing),
    };
    full_response(status, "text/plain", format!("{text}\n").into())
}

fn documented(document: &StaticDocument, headers: &HeaderMap) -> Answer {
    let matches = headers
        .get(IF_NONE_MATCH)
        .is_some_and(|tag| *tag == *document.etag);
    let mut answer = if matches {
        full_response(StatusCode::NOT_MODIFIED, document.media, Bytes::new())
    } else {
        full_response(StatusCode::OK, document.media, document.body.clone())
    };
    set(&mut answer, ETAG, &document.etag);
    set(&mut answer, VARY, "Accept");
    answer
}

fn refused(refusal: &ErrorResponse) -> Answer {
    let status = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = full_response(status, JSON, refusal.status().to_string().into());
    if let Some(seconds) = refusal.retry_after {
        set(&mut answer, RETRY_AFTER, &seconds.to_string());
    }
    if status == StatusCode::SERVICE_UNAVAILABLE {
        // The next connection may reach another replica.
        set(&mut answer, CONNECTION, "close");
    }
    answer
}

/// Reads a request body. `None`: it is too long, incomplete or late.
pub(super) async fn body_of(
    request: Request<Incoming>,
    max: usize,
    limit: Duration,
) -> Option<Bytes> {
    let body = Limited::new(request.into_body(), max).collect();
    let body = timeout(limit, body).await.ok()?.ok()?;
    Some(body.to_bytes())
}

pub(super) fn full_response(status: StatusCode, media: &str, body: Bytes) -> Answer {
    let body = Full::new(body).map_err(|never: Infallible| match never {});
    let mut answer = Response::new(body.boxed_unsync());
    *answer.status_mut() = status;
    set(&mut answer, CONTENT_TYPE, media);
    set(&mut answer, CACHE_CONTROL, "no-cache, private");
    answer
}

fn streamed(parts: impl futures::Stream<Item = Bytes> + Send + 'static) -> Answer {
    let frames = parts.map(|part| Ok(Frame::data(part)));
    let mut answer = Response::new(StreamBody::new(frames).boxed_unsync());
    set(&mut answer, CONTENT_TYPE, JSON);
    set(&mut answer, CACHE_CONTROL, "no-cache, private");
    answer
}

/// Holds the slot until the body is sent.
fn hold_slot(body: Body, slot: InFlightSlot) -> Body {
    let frames = BodyStream::new(body).map(move |frame| {
        let _held = &slot;
        frame
    });
    StreamBody::new(frames).boxed_unsync()
}

/// Ends the body at that point.
fn until(body: Body, over: impl Future<Output = ()> + Send + 'static) -> Body {
    StreamBody::new(BodyStream::new(body).take_until(over)).boxed_unsync()
}

fn set(answer: &mut Answer, name: HeaderName, value: &str) {
    if let Ok(value) = HeaderValue::from_str(value) {
        answer.headers_mut().insert(name, value);
    }
}
