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

use crate::cluster::clock;
use crate::cluster::election::Standing;
use crate::crd::node_metric::{API_VERSION, PLURAL};
use crate::crd::report::RELAY_PATH;

use super::Observer;
use super::authn::{Authenticator, User};
use super::authz::{Authorizer, Deed};
use super::certificates::Tls;
use super::data::Data;
use super::documents::{Document, Documents};
use super::encode::Writer;
use super::evict;
use super::forward::{self, ANSWER_TIMEOUT};
use super::negotiate;
use super::options::{Ask, Filter, List, Options};
use super::readiness::Readiness;
use super::relay;
use super::reports::Reports;
use super::status::Refusal;
use super::store::Unavailable;
use super::under_way::{Turn, UnderWay};
use super::watch;

/// How long data requests wait for a leader: longer than a failover takes, shorter than API servers wait.
const LEADERLESS: Duration = Duration::from_secs(20);
/// The same while this replica shuts down: within the time that connections have.
const LAST: Duration = Duration::from_secs(4);
/// How often waiting requests check for a leader.
const LOOK: Duration = Duration::from_secs(1);
/// Limit of waiting requests. Others are refused with a retry delay.
pub const MOST_WAITING: usize = 256;

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
    pub standing: channel::Receiver<Standing>,
    /// TLS configuration for calls to the leader.
    pub tls: channel::Receiver<Option<Tls>>,
    /// The name in our certificate.
    pub server_name: String,
    /// Whether this replica shuts down.
    pub stop: channel::Receiver<bool>,
    /// Limits requests that wait for a leader.
    pub room: Semaphore,
    /// Limits lists and watches per user.
    pub under_way: Arc<UnderWay>,
    /// Readiness of this replica.
    pub readiness: Arc<Readiness>,
    /// Receives metrics of each response.
    pub observer: Arc<dyn Observer>,
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
    ) -> Result<Answer, Refusal> {
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
                _ => Err(Refusal::method()),
            };
        }
        let is_passed_on =
            forward::is_forwarded(request.headers()) && self.is_replica(certificates);
        if let (RELAY_PATH, true, Some(reports)) = (path, is_passed_on, &self.reports) {
            *what = "relay";
            return relay::take(reports, request).await;
        }
        if let (Some(node), Some(reports)) = (evict::node_of(path), &self.reports) {
            *what = "eviction";
            let node = Arc::from(node);
            return self
                .evict(reports, node, request, certificates, is_passed_on)
                .await;
        }
        let target = target(path).ok_or_else(Refusal::no_path)?;
        let asked = Asked::of(&target, &request, &accept)?;
        *what = asked.verb();
        if is_passed_on {
            // The forwarding replica has authenticated and authorized it already.
            return self.serve(&asked);
        }
        let user = tokio::select! {
            user = self.may(request.headers(), certificates, &asked) => user?,
            () = self.cut_off() => return Err(Refusal::unknown("to authenticate or authorize the request")),
        };
        if matches!(asked.what, What::Get(_)) {
            return self.serve_soon(&asked, &request, &accept).await;
        }
        let turn = self.under_way.begin(&user.name);
        let turn = turn.ok_or_else(|| Refusal::too_many_under_way(&user.name))?;
        let answer = self.serve_soon(&asked, &request, &accept).await?;
        Ok(answer.map(|body| during(body, turn)))
    }

    async fn serve_soon(
        &self,
        asked: &Asked,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Answer, Refusal> {
        let Ok(_room) = self.room.try_acquire() else {
            return self.serve_or_pass_on(asked, request, accept).await;
        };
        // A refused client backs off longer and longer; one that waits is answered as soon as there is a leader.
        let answer = self.serve_when_led(asked, request, accept);
        let answer = timeout(LEADERLESS, answer).await;
        answer.unwrap_or_else(|_| Err(Refusal::not_leading()))
    }

    async fn serve_when_led(
        &self,
        asked: &Asked,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Answer, Refusal> {
        let (mut standing, mut moved) = (self.standing.clone(), self.data.moved());
        standing.mark_unchanged();
        let over = async {
            self.stopped().await;
            sleep(LAST).await;
        };
        tokio::pin!(over);
        loop {
            let answer = self.serve_or_pass_on(asked, request, accept).await;
            // Without a view of leadership there is nothing to wait for: the client may reach a replica that has one.
            if !is_not_leading(&answer) || self.standing.borrow().is_blind() {
                return answer;
            }
            tokio::select! {
                _ = standing.changed() => {}
                _ = moved.changed() => {}
                () = sleep(LOOK) => {}
                () = &mut over => return answer,
            }
        }
    }

    async fn serve_or_pass_on(
        &self,
        asked: &Asked,
        request: &Request<Incoming>,
        accept: &str,
    ) -> Result<Answer, Refusal> {
        let answer = self.serve(asked);
        if is_not_leading(&answer) {
            return self.pass_on(request, accept, asked.verb()).await;
        }
        answer
    }

    /// Whether these certificates belong to an API server or a replica.
    pub fn knows(&self, certificates: &[CertificateDer<'static>]) -> bool {
        self.authenticator.is_proxy(certificates) || self.is_replica(certificates)
    }

    fn is_replica(&self, certificates: &[CertificateDer<'static>]) -> bool {
        self.tls
            .borrow()
            .as_ref()
            .is_some_and(|tls| tls.is_replica(certificates, clock::wall()))
    }

    async fn may(
        &self,
        headers: &HeaderMap,
        certificates: &[CertificateDer<'static>],
        asked: &Asked,
    ) -> Result<User, Refusal> {
        let user = self.authenticator.identify(headers, certificates).await?;
        let deed = Deed {
            verb: asked.verb(),
            name: asked.name(),
        };
        self.authorizer.allow(&user, deed).await?;
        Ok(user)
    }

    /// Completes when the API server has been unreachable for so long that requests to it are hopeless.
    fn cut_off(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut standing = self.standing.clone();
        async move {
            drop(standing.wait_for(Standing::is_blind).await);
            sleep(LOOK).await;
        }
    }

    async fn pass_on(
        &self,
        request: &Request<Incoming>,
        accept: &str,
        verb: &str,
    ) -> Result<Answer, Refusal> {
        let leader = self.standing.borrow().leader();
        let tls = self.tls.borrow().clone();
        let (Some(leader), Some(tls)) = (leader, tls) else {
            return Err(Refusal::not_leading());
        };
        let path = request
            .uri()
            .path_and_query()
            .map_or("/", |path| path.as_str());
        let passed = forward::pass(
            leader,
            tls.client,
            &self.server_name,
            path,
            accept,
            None,
            ANSWER_TIMEOUT,
        );
        let passed = tokio::select! {
            passed = passed => passed,
            // The leader may be suspended: the next one is asked as soon as it leads.
            () = self.leads_no_more(leader, false) => return Err(Refusal::not_leading()),
        };
        let answer = passed.map_err(|error| {
            tracing::debug!(%leader, why = crate::cluster::client::describe(&error), "failed to forward a request");
            Refusal::not_leading()
        })?;
        if matches!(
            answer.status(),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::UNAUTHORIZED
        ) {
            // It lost leadership, is warming up, or does not trust our authority yet: the client waits as it would
            // there.
            return Err(Refusal::not_leading());
        }
        Ok(answer.map(|body| until(body, self.leads_no_more(leader, verb == "watch"))))
    }

    /// Completes when this leader has lost leadership: it may be suspended, and a forwarded watch would hang.
    fn leads_no_more(
        &self,
        leader: SocketAddr,
        watches: bool,
    ) -> impl Future<Output = ()> + Send + use<> {
        let mut standing = self.standing.clone();
        let stopped = self.stopped();
        async move {
            tokio::select! {
                _ = standing.wait_for(|standing| standing.leader() != Some(leader)) => {}
                () = stopped, if watches => {}
            }
        }
    }

    fn stopped(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut stop = self.stop.clone();
        async move { drop(stop.wait_for(|stop| *stop).await) }
    }

    fn serve(&self, asked: &Asked) -> Result<Answer, Refusal> {
        let Asked { what, writer, .. } = asked;
        match what {
            What::Get(name) => {
                let found = self.data.read(|store| store.get(name)).and_then(Result::ok);
                let object = found.ok_or_else(Refusal::not_leading)?;
                let object = object.ok_or_else(|| Refusal::no_object(name))?;
                Ok(whole(
                    StatusCode::OK,
                    JSON,
                    writer.object(&object, true).into(),
                ))
            }
            What::Options(options) => match &options.ask {
                Ask::List(list) => self.list(list, &options.filter, *writer),
                Ask::Watch(watch) => {
                    let (data, filter) = (Arc::clone(&self.data), options.filter.clone());
                    let lines = watch::stream(data, *watch, filter, *writer)?;
                    // Every part consists of whole events.
                    Ok(streamed(lines.take_until(self.stopped())))
                }
            },
        }
    }

    fn list(&self, list: &List, filter: &Filter, writer: Writer) -> Result<Answer, Refusal> {
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

fn is_not_leading(answer: &Result<Answer, Refusal>) -> bool {
    answer.as_ref().is_err_and(Refusal::is_not_leading)
}

pub(super) const JSON: &str = "application/json";

/// A parsed request.
struct Asked {
    what: What,
    writer: Writer,
}

enum What {
    Get(String),
    Options(Options),
}

impl Asked {
    fn of(target: &Target<'_>, request: &Request<Incoming>, accept: &str) -> Result<Self, Refusal> {
        if *request.method() != Method::GET {
            return Err(Refusal::method());
        }
        let form = negotiate::form(accept).ok_or_else(Refusal::not_acceptable)?;
        let mut options = Options::of(request.uri().query().unwrap_or_default())?;
        let writer = Writer {
            form,
            include: options.include,
            now: clock::wall(),
        };
        let what = match (target, &options.ask) {
            (Target::One(name), Ask::List(_)) => What::Get((*name).to_owned()),
            (Target::One(name), Ask::Watch(_)) => {
                options.filter.names.push(((*name).to_owned(), true));
                What::Options(options)
            }
            (Target::All, _) => What::Options(options),
        };
        Ok(Self { what, writer })
    }

    const fn verb(&self) -> &'static str {
        match &self.what {
            What::Get(_) => "get",
            What::Options(Options {
                ask: Ask::List(_), ..
            }) => "list",
            What::Options(_) => "watch",
        }
    }

    fn name(&self) -> Option<&str> {
        match &self.what {
            What::Get(name) => Some(name),
            What::Options(options) => options.filter.only(),
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

fn health(lacks: Option<String>) -> Answer {
    let (status, text) = match lacks {
        None => (StatusCode::OK, "ok".to_owned()),
        Some(lacks) => (StatusCode::SERVICE_UNAVAILABLE, lacks),
    };
    whole(status, "text/plain", format!("{text}\n").into())
}

fn documented(document: &Document, headers: &HeaderMap) -> Answer {
    let matches = headers
        .get(IF_NONE_MATCH)
        .is_some_and(|tag| *tag == *document.etag);
    let mut answer = if matches {
        whole(StatusCode::NOT_MODIFIED, document.media, Bytes::new())
    } else {
        whole(StatusCode::OK, document.media, document.body.clone())
    };
    set(&mut answer, ETAG, &document.etag);
    set(&mut answer, VARY, "Accept");
    answer
}

fn refused(refusal: &Refusal) -> Answer {
    let status = StatusCode::from_u16(refusal.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut answer = whole(status, JSON, refusal.status().to_string().into());
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

pub(super) fn whole(status: StatusCode, media: &str, body: Bytes) -> Answer {
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
fn during(body: Body, turn: Turn) -> Body {
    let frames = BodyStream::new(body).map(move |frame| {
        let _held = &turn;
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
