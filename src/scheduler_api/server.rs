//! The listener, on a thread of its own, so that schedulers never wait for the rest of the controller.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::extender_requests::{ExtenderRequests, Verb};
use super::load_watcher;
use super::metrics::SchedulerApiMetrics;
use super::policy_file::PolicyFile;
use super::prometheus::{self, PrometheusError};
use super::query;
use crate::clock;
use crate::crd::scheduler_policy::SchedulerPolicy;
use crate::metrics_api::loads::NodeLoads;
use crate::serve::{self, ServeError};

/// Limit of connections. More wait.
const MAX_CONNECTIONS: usize = 64;
/// Time limit for the headers of the next request on a connection.
const IDLE_TIMEOUT: Duration = Duration::from_mins(2);
/// Time limit for the body of a request.
pub(super) const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// Size limit of a query.
const MAX_QUERY_BYTES: usize = 16 << 10;

pub(super) const JSON: &str = "application/json";
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
/// The answer to any other path.
const PATHS: &str =
    "/extender/prioritize, /extender/filter, /watcher, /watcher/health, /api/v1/query, /value\n";

/// Settings.
#[derive(Clone, Debug)]
pub struct Options {
    /// Listen address.
    pub listen: SocketAddr,
    /// crane's policy file, with what it says; `None`: the extender goes by load line.
    pub policy: Option<(PolicyFile, SchedulerPolicy)>,
    /// Prometheus metrics.
    pub metrics: SchedulerApiMetrics,
}

/// Why it did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// The address can't be listened on.
    #[error(transparent)]
    Listen(#[from] ServeError),
    /// The thread can't be started.
    #[error("failed to start the thread for schedulers")]
    Thread(#[from] std::io::Error),
}

pub(super) type Answer = Response<Full<Bytes>>;

struct Server {
    loads: NodeLoads,
    metrics: SchedulerApiMetrics,
    extender: Arc<ExtenderRequests>,
}

/// Starts to serve, until the process ends.
///
/// # Errors
/// The address can't be listened on, or the thread can't be started.
pub fn start(options: Options, loads: NodeLoads) -> Result<(), StartError> {
    let listener = serve::listen(options.listen)?.into_std()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let metrics = options.metrics;
    let (file, policy) = options.policy.unzip();
    let extender = ExtenderRequests::new(policy, loads.clone(), metrics.clone());
    let extender = Arc::new(extender);
    let server = Arc::new(Server {
        loads,
        metrics,
        extender: Arc::clone(&extender),
    });
    let serving = async move {
        if let Some(file) = file {
            tokio::spawn(async move { extender.follow(file).await });
        }
        match TcpListener::from_std(listener) {
            Ok(listener) => accept_all(listener, &server).await,
            Err(error) => tracing::error!(%error, "failed to serve schedulers"),
        }
    };
    let thread = thread::Builder::new().name("scheduler-api".to_owned());
    thread.spawn(move || runtime.block_on(serving))?;
    Ok(())
}

async fn accept_all(listener: TcpListener, server: &Arc<Server>) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
        let stream = serve::accept(&listener).await;
        let server = Arc::clone(server);
        tokio::spawn(async move {
            server.serve(stream).await;
            drop(slot);
        });
    }
}

impl Server {
    async fn serve(&self, stream: TcpStream) {
        // Answers are small; schedulers wait for each.
        drop(stream.set_nodelay(true));
        let service = service_fn(async |request| Ok::<_, Infallible>(self.answer(request).await));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new())
            .header_read_timeout(IDLE_TIMEOUT);
        // Clients may disconnect at any time.
        drop(http.serve_connection(TokioIo::new(stream), service).await);
    }

    async fn answer(&self, request: Request<Incoming>) -> Answer {
        let begin = clock::boot_time();
        let (page, answer) = match request.uri().path() {
            "/watcher" => ("load_watcher", self.load_watcher(&request)),
            "/watcher/health" => ("load_watcher", text(StatusCode::OK, TEXT, "ok\n")),
            "/api/v1/query" => ("query", self.query(request).await),
            "/value" => ("value", self.value(&request)),
            "/extender/prioritize" => {
                let answer = self.extender.answer(Verb::Prioritize, request).await;
                ("prioritize", answer)
            }
            "/extender/filter" => {
                let answer = self.extender.answer(Verb::Filter, request).await;
                ("filter", answer)
            }
            _ => ("other", text(StatusCode::NOT_FOUND, TEXT, PATHS)),
        };
        let took = clock::boot_time().since(begin);
        self.metrics.answered(page, answer.status().as_u16(), took);
        answer
    }

    fn load_watcher(&self, request: &Request<Incoming>) -> Answer {
        if *request.method() != Method::GET {
            let message = "only GET is allowed\n";
            return text(StatusCode::METHOD_NOT_ALLOWED, TEXT, message);
        }
        let host = parameter(request.uri().query().unwrap_or_default(), "host");
        let (now, wall) = (clock::boot_time(), clock::wall_time());
        let page = load_watcher::page(&self.loads.read(), host.as_deref(), now, wall);
        match page {
            Ok(page) => text(StatusCode::OK, JSON, page),
            Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{error}\n")),
        }
    }

    /// `GET /value?node=NAME-OR-ADDRESS&metric=NAME&offset=SECONDS`: a [`query::NodeValue`], or a `Status`.
    fn value(&self, request: &Request<Incoming>) -> Answer {
        let form = request.uri().query().unwrap_or_default();
        let text_of = |name| parameter(form, name).unwrap_or_default();
        let offset =
            parameter(form, "offset").map(|offset| offset.parse().map(Duration::from_secs));
        let Ok(offset) = offset.transpose() else {
            let message = "offset is not a whole number of seconds";
            return status(400, "BadRequest", message);
        };
        let (node, metric, now) = (text_of("node"), text_of("metric"), clock::boot_time());
        match query::any(&self.loads, &node, &metric, offset, now) {
            // It consists of numbers and strings, which serialize.
            Ok(value) => text(
                StatusCode::OK,
                JSON,
                serde_json::to_string(&value).unwrap_or_default(),
            ),
            Err(error) => {
                let (code, reason) = error.code();
                status(code, reason, &error.to_string())
            }
        }
    }

    async fn query(&self, request: Request<Incoming>) -> Answer {
        let in_path = request.uri().query().and_then(|it| parameter(it, "query"));
        let query = match in_path {
            None if *request.method() == Method::POST => {
                let Some(form) = form(request).await else {
                    let message = "the request is too long or incomplete\n";
                    return text(StatusCode::BAD_REQUEST, TEXT, message);
                };
                parameter(&form, "query")
            }
            query => query,
        };
        let query = query.unwrap_or_default();
        let (now, wall) = (clock::boot_time(), clock::wall_time());
        match prometheus::query(&self.loads.read(), &query, now, wall) {
            Ok(answer) => text(StatusCode::OK, JSON, answer),
            Err(error @ PrometheusError::Unknown(_)) => {
                text(StatusCode::BAD_REQUEST, JSON, error.body())
            }
            Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, JSON, error.body()),
        }
    }
}

/// The form in the body of a request; `None` if it is too long, incomplete or not UTF-8.
async fn form(request: Request<Incoming>) -> Option<String> {
    let body = Limited::new(request.into_body(), MAX_QUERY_BYTES).collect();
    let body = timeout(BODY_TIMEOUT, body).await.ok()?.ok()?;
    String::from_utf8(body.to_bytes().into()).ok()
}

/// A parameter of a query string or form.
fn parameter(text: &str, name: &str) -> Option<String> {
    let mut pairs = form_urlencoded::parse(text.as_bytes());
    let (_, value) = pairs.find(|(key, _)| key == name)?;
    Some(value.into_owned())
}

/// An error as API servers write it, which clients of Kubernetes read.
fn status(code: u16, reason: &str, message: &str) -> Answer {
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code,
    });
    let code = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    text(code, JSON, body.to_string())
}

pub(super) fn text(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
