//! A layer around the client's HTTP service: reports every request to an observer, and turns plain-text responses with
//! `Retry-After` into a `Status` that the client understands.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use kube::client::Body;
use serde_json::json;
use thiserror::Error;
use tower::{BoxError, Layer, Service};

/// Limit for the response headers, of watches too.
const HEADERS_TIMEOUT: Duration = Duration::from_secs(15);

type Answer = Response<UnsyncBoxBody<Bytes, BoxError>>;

/// Observes the requests of a client.
pub trait Observer: Send + Sync {
    /// A request with this verb of the Kubernetes API finished; `None`: without a response, or it was cancelled.
    fn requested(&self, verb: &'static str, code: Option<u16>);
}

/// Ignores all requests.
impl Observer for () {
    fn requested(&self, _: &'static str, _: Option<u16>) {}
}

/// Wraps a client's service.
#[derive(Clone)]
pub(super) struct Requests(pub(super) Arc<dyn Observer>);

impl<S> Layer<S> for Requests {
    type Service = Observed<S>;

    fn layer(&self, inner: S) -> Observed<S> {
        Observed {
            inner,
            observer: Arc::clone(&self.0),
        }
    }
}

/// The wrapped service.
#[derive(Clone)]
pub(super) struct Observed<S> {
    inner: S,
    observer: Arc<dyn Observer>,
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
        Box::pin(async move {
            let answer = tokio::time::timeout(HEADERS_TIMEOUT, answer).await;
            let response = answer.map_err(|_| AnswerTimeout)??;
            report.answered(response.status());
            Ok(with_status(
                response.map(|body| body.map_err(Into::into).boxed_unsync()),
            ))
        })
    }
}

/// The API server sent no response headers in time.
#[derive(Debug, Error)]
#[error("no answer within {} s", HEADERS_TIMEOUT.as_secs())]
struct AnswerTimeout;

/// Reports a request when it ends, in whatever way.
struct ReportOnDrop {
    verb: &'static str,
    code: Option<u16>,
    observer: Arc<dyn Observer>,
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

/// API priority and fairness answers with a header and plain text, which the client would treat as any other failure.
fn with_status(response: Answer) -> Answer {
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
    let Some(seconds) = seconds.filter(|_| asks && !is_json) else {
        return response;
    };
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": status.as_u16(),
        "reason": status.canonical_reason().unwrap_or_default(),
        "message": format!("the API server asks to wait for {seconds} s"),
        "details": {"retryAfterSeconds": seconds},
    });
    let body = Full::new(Bytes::from(body.to_string()));
    response.map(|_| body.map_err(|never| match never {}).boxed_unsync())
}
