//! A layer around the client's HTTP service: reports every request to an observer, turns plain-text responses with
//! `Retry-After` into a `Status` that the client understands, and names the address in errors.

use std::cell::OnceCell;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes};
use hyper::header::{CONTENT_TYPE, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::task_local;
use tokio::time::timeout;
use tower::{BoxError, Layer, Service};

/// Limit for the response headers, of watches too.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(15);
/// Maximum size of a refusal, in bytes.
const MAX_REFUSAL: u64 = 64 * 1024;

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// Observes the requests of a client.
pub trait RequestObserver: Send + Sync {
    /// A request with this verb of the Kubernetes API finished; `None`: without a response, or it was cancelled.
    fn requested(&self, verb: &'static str, code: Option<u16>);
}

/// Ignores all requests.
impl RequestObserver for () {
    fn requested(&self, _: &'static str, _: Option<u16>) {}
}

task_local! {
    /// The address to which a call has sent its request.
    static PEER: OnceCell<Arc<str>>;
}

/// Runs a call so that `peer` knows where its request was sent.
pub(super) async fn with_peer<T>(call: impl Future<Output = T>) -> T {
    PEER.scope(OnceCell::new(), call).await
}

/// The address of the API server to which this call has sent its request.
pub(super) fn peer() -> String {
    let address = PEER.try_with(|peer| peer.get().map(ToString::to_string));
    let address = address.ok().flatten();
    address.unwrap_or_else(|| "the API server".to_owned())
}

/// Wraps a client's service.
#[derive(Clone)]
pub(super) struct Requests {
    pub(super) observer: Arc<dyn RequestObserver>,
    pub(super) address: Arc<str>,
}

impl<S> Layer<S> for Requests {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed {
            inner,
            observer: Arc::clone(&self.observer),
            address: Arc::clone(&self.address),
        }
    }
}

/// The wrapped service.
#[derive(Clone)]
pub(super) struct Observed<S> {
    inner: S,
    observer: Arc<dyn RequestObserver>,
    address: Arc<str>,
}

impl<S, B> Service<Request<Body>> for Observed<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError>,
    S::Future: Send + 'static,
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Answer;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Answer, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let mut report = ReportOnDrop {
            verb: verb(request.method(), request.uri().query().unwrap_or_default()),
            code: None,
            observer: Arc::clone(&self.observer),
        };
        let answer = self.inner.call(request);
        let address = Arc::clone(&self.address);
        Box::pin(async move {
            // Without a call, nothing needs it.
            PEER.try_with(|peer| peer.set(Arc::clone(&address)).ok())
                .ok();
            let answer = timeout(HEADERS_TIMEOUT, answer).await;
            let response = answer.map_err(|_| AnswerTimeout {
                address: Arc::clone(&address),
            })??;
            report.answered(response.status());
            let response = response.map(|body| body.map_err(Into::into).boxed_unsync());
            understood(response, &address).await
        })
    }
}

/// The API server sent no response headers in time.
#[derive(Debug, Error)]
#[error("no answer from {address} within {} s", HEADERS_TIMEOUT.as_secs())]
struct AnswerTimeout {
    address: Arc<str>,
}

/// Another server answered.
#[derive(Debug, Error)]
#[error("{address} is not an API server: it answered with a web page ({code})")]
struct NotAnApiServer {
    address: Arc<str>,
    code: u16,
}

/// Reports a request when it ends, in whatever way.
struct ReportOnDrop {
    verb: &'static str,
    code: Option<u16>,
    observer: Arc<dyn RequestObserver>,
}

impl ReportOnDrop {
    const fn answered(&mut self, code: StatusCode) {
        self.code = Some(code.as_u16());
    }
}

impl Drop for ReportOnDrop {
    fn drop(&mut self) {
        self.observer.requested(self.verb, self.code);
    }
}

fn verb(method: &Method, query: &str) -> &'static str {
    match *method {
        Method::GET if query.contains("watch=true") => "watch",
        Method::GET if query.contains("limit=") || query.contains("fieldSelector=") => "list",
        Method::GET => "get",
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        _ => "other",
    }
}

/// The response as an answer that the client understands.
async fn understood(response: Answer, address: &Arc<str>) -> Result<Answer, BoxError> {
    let status = response.status();
    let is_error = status.is_client_error() || status.is_server_error();
    if let Some(waiting) = asks_to_wait(&response) {
        return Ok(with_status(response, &waiting));
    }
    if is_web_page(&response) {
        if !is_error {
            return Err(BoxError::from(NotAnApiServer {
                address: Arc::clone(address),
                code: status.as_u16(),
            }));
        }
        let message = format!("{address} answered with a web page, as a proxy does");
        let error = failure(status, &message);
        return Ok(with_status(response, &error));
    }
    if status == StatusCode::UNAUTHORIZED {
        return unauthorized(response, address).await;
    }
    Ok(response)
}

/// An API server sends none. (Plain text it does send: what it passes on from a kubelet may have that type.)
fn is_web_page(response: &Answer) -> bool {
    let kind = response.headers().get(CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"))
}

/// API priority and fairness answers with a header and plain text, which the client would treat as any other failure.
fn asks_to_wait(response: &Answer) -> Option<Value> {
    let headers = response.headers();
    let is_json = headers
        .get(CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
    let seconds = headers.get(RETRY_AFTER).and_then(|wait| wait.to_str().ok());
    let seconds: Option<u32> = seconds.and_then(|seconds| seconds.trim().parse().ok());
    let status = response.status();
    let asks = matches!(
        status,
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    let seconds = seconds.filter(|_| asks && !is_json)?;
    let message = format!("the API server asks to wait for {seconds} s");
    let mut status = failure(status, &message);
    status["details"] = json!({"retryAfterSeconds": seconds});
    Some(status)
}

/// An API server refuses credentials with a single word.
async fn unauthorized(response: Answer, address: &str) -> Result<Answer, BoxError> {
    if response
        .body()
        .size_hint()
        .upper()
        .is_none_or(|size| size > MAX_REFUSAL)
    {
        return Ok(response);
    }
    let (head, body) = response.into_parts();
    let body = timeout(HEADERS_TIMEOUT, body.collect()).await??.to_bytes();
    let refusal: Value = serde_json::from_slice(&body).unwrap_or_default();
    let response = |body: Bytes| Response::from_parts(head.clone(), full(body));
    if refusal["message"] != "Unauthorized" {
        return Ok(response(body));
    }
    let message = format!("{address} does not accept the credentials");
    let refusal = failure(head.status, &message);
    Ok(response(refusal.to_string().into()))
}

fn failure(status: StatusCode, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status.as_u16(),
        "reason": status.canonical_reason().unwrap_or_default(), "message": message,
    })
}

fn with_status(response: Answer, status: &Value) -> Answer {
    response.map(|_| full(status.to_string().into()))
}

fn full(body: Bytes) -> UnsyncBoxBody<Bytes, BoxError> {
    Full::new(body)
        .map_err(|never| match never {})
        .boxed_unsync()
}
