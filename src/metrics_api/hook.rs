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
use ring::digest::{Context, SHA256, SHA256_OUTPUT_LEN};
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
/// Where they are asked for begins so.
const PATHS: &str = "/evictions/";
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

/// Where reviews are asked for by those who know this key: nobody guesses it.
pub fn path(key: &[u8]) -> String {
    let mut digest = Context::new(&SHA256);
    digest.update(b"plimsoll evictions ");
    digest.update(key);
    let digest = digest.finish();
    let hex = digest.as_ref().iter().map(|byte| format!("{byte:02x}"));
    format!("{PATHS}{}", hex.collect::<String>())
}

/// What API servers are told of us in a `ValidatingWebhookConfiguration`.
pub struct Hook {
    url: String,
    version: Value,
    /// `clientConfig`
    told: Value,
}

/// Finds it.
///
/// # Errors
/// It can't be read, or lacks the webhook.
pub async fn find(client: &Client, name: &str) -> Result<Hook, HookError> {
    let url =
        format!("/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations/{name}");
    let mut known = ask(client, Request::get(&url).body(Vec::new())).await?;
    let hooks = known["webhooks"].as_array_mut();
    let hook = hooks.and_then(|hooks| hooks.iter_mut().find(|hook| hook["name"] == WEBHOOK));
    let told = hook.ok_or(HookError::None)?["clientConfig"].take();
    let version = known["metadata"]["resourceVersion"].take();
    Ok(Hook { url, version, told })
}

impl Hook {
    /// Where API servers ask; `None`: nobody told them yet.
    pub fn path(&self) -> Option<&str> {
        let path = self.told["service"]["path"].as_str()?;
        let hex = path.strip_prefix(PATHS)?;
        (hex.len() == 2 * SHA256_OUTPUT_LEN).then_some(path)
    }

    /// Tells them to ask whoever `bundle` vouches for, at this path or else where they do already.
    ///
    /// # Errors
    /// It can't be written.
    pub async fn tell(
        &self,
        client: &Client,
        bundle: &str,
        path: Option<&String>,
    ) -> Result<(), HookError> {
        let bundle = STANDARD.encode(bundle);
        let is_there = path.is_none_or(|path| self.told["service"]["path"] == **path);
        if self.told["caBundle"] == *bundle && is_there {
            return Ok(());
        }
        let mut told = json!({"caBundle": bundle});
        if let Some(path) = path {
            told["service"] = json!({"path": path});
        }
        let change = json!({
            "metadata": {"resourceVersion": self.version},
            "webhooks": [{"name": WEBHOOK, "clientConfig": told}],
        });
        let request = Request::patch(&self.url)
            .header(CONTENT_TYPE, "application/strategic-merge-patch+json")
            .body(change.to_string().into_bytes());
        ask(client, request).await.map(drop)
    }
}

async fn ask(
    client: &Client,
    request: Result<Request<Vec<u8>>, hyper::http::Error>,
) -> Result<Value, HookError> {
    let request = request.map_err(kube::Error::HttpError);
    let request = request.map_err(CallError::Kube)?;
    Ok(call(client.request(request)).await?)
}
