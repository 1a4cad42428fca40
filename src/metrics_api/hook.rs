//! How API servers ask whether an agent may evict a pod: at a path that they are told with the certificate authorities, since
//! they bring no certificate to a webhook. A standby passes the question on to the leader.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request, StatusCode};
use kube::Client;
use serde_json::{Value, json};
use thiserror::Error;
use tokio::time::timeout;

use crate::cluster::client::{CallError, call};
use crate::guard::{Guard, Judged};

use super::forward;
use super::server::{Answer, Api, JSON, whole};
use super::status::Refusal;

/// The webhook in the `ValidatingWebhookConfiguration`.
const WEBHOOK: &str = "evictions.plimsoll.dev";
/// A review has to be here by then, and is not longer.
const BODY: Duration = Duration::from_secs(2);
const LONGEST: usize = 64 << 10;

/// Why API servers don't know where to ask.
#[derive(Debug, Error)]
pub enum HookError {
    /// It can't be read or written.
    #[error("{words}", words = .0.words())]
    Call(#[from] CallError),
    /// Somebody has changed it.
    #[error("it has no webhook {WEBHOOK}: install the chart's again")]
    None,
}

impl Api {
    /// The guard, where this is a path at which it is asked.
    pub(super) fn guard_at(&self, path: &str) -> Option<&Guard> {
        let tls = self.tls.borrow();
        let is_hook = tls.as_ref()?.hooks.iter().any(|hook| hook == path);
        self.guard.as_ref().filter(|_| is_hook)
    }

    /// Answers a review.
    pub(super) async fn review(
        &self,
        guard: &Guard,
        request: Request<Incoming>,
    ) -> Result<Answer, Refusal> {
        if *request.method() != Method::POST {
            let message = "reviews are sent by POST";
            return Err(Refusal::new(405, "MethodNotAllowed", message));
        }
        let was_passed_on = forward::is_forwarded(request.headers());
        let path = request.uri().path().to_owned();
        let body = timeout(BODY, Limited::new(request.into_body(), LONGEST).collect()).await;
        let body = body.ok().and_then(Result::ok);
        let body = body.ok_or_else(|| Refusal::bad_request("the review is too long, or broke off"));
        let body = body?.to_bytes();
        let judged = guard.judge(&body).await;
        let review = match judged {
            None => return Err(Refusal::bad_request("this is no AdmissionReview")),
            Some(Judged::Said(review)) => review,
            Some(Judged::Elsewhere(asked)) => {
                // What was passed on is not passed on again.
                if !was_passed_on && let Some(answer) = self.pass_review_on(&path, body).await {
                    return Ok(answer);
                }
                guard.leaderless(&asked)
            }
        };
        Ok(whole(StatusCode::OK, JSON, review.into()))
    }

    /// The leader's answer; `None`: there is none.
    async fn pass_review_on(&self, path: &str, body: Bytes) -> Option<Answer> {
        let leader = self.standing.borrow().leader()?;
        let tls = self.tls.borrow().clone()?;
        let (client, name) = (tls.client, &self.server_name);
        let passed = forward::pass(leader, client, name, path, JSON, Some(body)).await;
        passed
            .ok()
            .filter(|answer| answer.status() == StatusCode::OK)
    }
}

/// Tells API servers, by this `ValidatingWebhookConfiguration`, to ask at `path` whoever `bundle` vouches for.
///
/// # Errors
/// It can't be read or written, or lacks the webhook.
pub async fn tell(client: &Client, name: &str, bundle: &str, path: &str) -> Result<(), HookError> {
    let url =
        format!("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{name}");
    let request = Request::get(&url).body(Vec::new());
    let known: Value = ask(client, request).await?;
    let hooks = known["webhooks"].as_array();
    let hook = hooks.and_then(|hooks| hooks.iter().find(|hook| hook["name"] == WEBHOOK));
    let told = &hook.ok_or(HookError::None)?["clientConfig"];
    let bundle = STANDARD.encode(bundle);
    if told["caBundle"] == *bundle && told["service"]["path"] == *path {
        return Ok(());
    }
    let told = json!({"caBundle": bundle, "service": {"path": path}});
    let change = json!({
        "metadata": {"resourceVersion": known["metadata"]["resourceVersion"]},
        "webhooks": [{"name": WEBHOOK, "clientConfig": told}],
    });
    let request = Request::patch(&url)
        .header(CONTENT_TYPE, "application/strategic-merge-patch+json")
        .body(change.to_string().into_bytes());
    ask(client, request).await.map(drop)
}

async fn ask(
    client: &Client,
    request: Result<Request<Vec<u8>>, hyper::http::Error>,
) -> Result<Value, HookError> {
    let request = request.map_err(kube::Error::HttpError);
    let request = request.map_err(CallError::Kube)?;
    Ok(call(client.request(request)).await?)
}
