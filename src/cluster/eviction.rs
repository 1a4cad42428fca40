//! Requests an eviction from the API server and interprets the response.
//!
//! The request is built here because kube names the field with grace period and precondition `delete_options`, which API servers
//! don't know and silently ignore.

use std::fmt::Debug;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper_util::client::legacy;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{PostParams, Request};
use kube::core::Status;
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::client::{CallError, call, found, stored};
use super::typed::Typed;
use crate::crd::eviction::{Delay, EvictionAnswer, EvictionTarget};

/// Upper limit for a delay that the server asks for.
const MAX_WAIT: Duration = Duration::from_mins(5);
/// The delay if the server asks for one without saying how long, and the minimum.
const DEFAULT_WAIT: Duration = Duration::from_secs(1);
/// The delay if an admission webhook of the API server does not answer.
const WEBHOOK_WAIT: Duration = Duration::from_secs(10);

/// Requests the eviction of a pod. A `grace` period below one second is sent as one: 0 would be a forced deletion, which can start
/// a second instance of a `StatefulSet`'s pod beside the first.
pub async fn evict(client: &Client, target: &EvictionTarget, grace: Duration) -> EvictionAnswer {
    let body = body(target, grace);
    let outcome = call(async {
        let url = Pod::url_path(&(), Some(&target.namespace));
        let request = Request::new(url)
            .create_subresource("eviction", &target.name, &PostParams::default(), body)
            .map_err(kube::Error::BuildRequest)?;
        let response = client.send(request.map(Into::into)).await?;
        let code = response.status().as_u16();
        let wait = response.headers().get("retry-after").cloned();
        let body = response.into_body().collect().await?.to_bytes();
        let wait = wait.and_then(|wait| wait.to_str().ok()?.parse().ok());
        Ok(read(code, wait.map(Duration::from_secs), &body))
    });
    match outcome.await {
        Ok(answer) => answer,
        Err(error) => {
            let why = error.message();
            if was_not_sent(&error) {
                EvictionAnswer::NotSent { why }
            } else {
                EvictionAnswer::Unknown { why }
            }
        }
    }
}

fn body(target: &EvictionTarget, grace: Duration) -> Vec<u8> {
    let eviction = json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"namespace": target.namespace, "name": target.name},
        "deleteOptions": {
            "gracePeriodSeconds": grace.as_secs().max(1),
            "preconditions": {"uid": target.uid},
        },
    });
    eviction.to_string().into_bytes()
}

/// Reads the pod; `None` if it is gone or another pod has its name.
///
/// # Errors
/// The pod can't be read.
pub async fn read_pod<P>(client: &Client, target: &EvictionTarget) -> Result<Option<P>, CallError>
where
    P: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<Typed<P>> = Api::namespaced(client.clone(), &target.namespace);
    let pod = found(call(stored(api.get(&target.name))).await)?.map(|pod| pod.0);
    Ok(pod.filter(|pod| pod.meta().uid.as_deref() == Some(&target.uid)))
}

/// Interprets a response.
fn read(code: u16, wait: Option<Duration>, body: &[u8]) -> EvictionAnswer {
    let status = serde_json::from_slice::<Status>(body).unwrap_or_else(|_| {
        let text = String::from_utf8_lossy(body);
        Status::failure(text.trim(), "")
    });
    let why = status.message.clone();
    match code {
        200..=299 if status.is_success() => EvictionAnswer::Accepted,
        404 if status.reason == "NotFound" => EvictionAnswer::Gone,
        429 => match budget(&status) {
            Some(why) => EvictionAnswer::Budget { why },
            None => busy(waiting(wait, &status), why),
        },
        500 if why.contains("more than one PodDisruptionBudget") => {
            EvictionAnswer::ManyBudgets { why }
        }
        500 if why.contains("failed calling webhook") => busy(WEBHOOK_WAIT, why),
        502 | 503 => busy(waiting(wait, &status), why),
        // Not an answer of the API server itself, another UID, a concurrent write, or the server or etcd timed out: reading the pod
        // shows the outcome.
        200..=299 | 404 | 409 | 500 | 501 | 504..=599 => EvictionAnswer::Unknown { why },
        _ => EvictionAnswer::Refused { why },
    }
}

const fn busy(wait: Duration, why: String) -> EvictionAnswer {
    let by = Delay::Server;
    EvictionAnswer::Wait { wait, by, why }
}

fn waiting(header: Option<Duration>, status: &Status) -> Duration {
    let body = status.details.as_ref().map(|it| it.retry_after_seconds);
    let body = body.map(|seconds| Duration::from_secs(seconds.into()));
    let wait = header.or(body).unwrap_or_default();
    wait.clamp(DEFAULT_WAIT, MAX_WAIT)
}

/// The message of the `PodDisruptionBudget` that refused, which has its name.
fn budget(status: &Status) -> Option<String> {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    let cause = causes.find(|cause| cause.reason == "DisruptionBudget")?;
    Some(match cause.message.as_str() {
        "" => status.message.clone(),
        message => message.to_owned(),
    })
}

/// Whether the request failed before it was sent.
pub fn was_not_sent(error: &CallError) -> bool {
    let CallError::Kube(error) = error else {
        return false;
    };
    if matches!(error, kube::Error::BuildRequest(_) | kube::Error::Auth(_)) {
        return true;
    }
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<legacy::Error>() {
            return error.is_connect();
        }
        cause = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn status(code: u16, message: &str, details: &Value) -> Vec<u8> {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message,
            "details": details,
        });
        status.to_string().into_bytes()
    }

    #[test]
    fn the_request_has_uid_and_grace_period_in_the_field_names_of_the_api() {
        let target = EvictionTarget {
            namespace: "shop".to_owned(),
            name: "web".to_owned(),
            uid: "u".to_owned(),
        };
        let of = |grace| -> Value { serde_json::from_slice(&body(&target, grace)).expect("JSON") };
        let thirty = of(Duration::from_secs(30));
        assert_eq!(thirty["deleteOptions"]["gracePeriodSeconds"], 30);
        assert_eq!(thirty["deleteOptions"]["preconditions"]["uid"], "u");
        assert_eq!(of(Duration::ZERO)["deleteOptions"]["gracePeriodSeconds"], 1);
    }

    #[test]
    fn a_refusal_by_a_budget_differs_from_a_busy_server() {
        let cause = "The disruption budget web needs 2 healthy pods and has 2 currently";
        let details = json!({"causes": [{"reason": "DisruptionBudget", "message": cause}]});
        let budget = status(
            429,
            "Cannot evict pod as it would violate the pod's disruption budget.",
            &details,
        );
        let of = |why: &str| EvictionAnswer::Budget {
            why: why.to_owned(),
        };
        assert_eq!(read(429, None, &budget), of(cause));
        let bare = status(
            429,
            "m",
            &json!({"causes": [{"reason": "DisruptionBudget"}]}),
        );
        assert_eq!(read(429, None, &bare), of("m"));
        let wait = |seconds, why: &str| busy(Duration::from_secs(seconds), why.to_owned());
        let webhook = "admission webhook \"pods.example.com\" denied the request: not now";
        let denied = status(429, webhook, &json!({"retryAfterSeconds": 7}));
        assert_eq!(read(429, None, &denied), wait(7, webhook));
        let down = "Internal error occurred: failed calling webhook \"pods.example.com\": failed to call webhook";
        let unanswered = status(500, down, &json!({}));
        assert_eq!(
            read(500, None, &unanswered),
            busy(WEBHOOK_WAIT, down.to_owned())
        );
        let flow = b"Too many requests, please try again later.\n";
        assert_eq!(
            read(429, Some(Duration::from_secs(2)), flow),
            wait(2, "Too many requests, please try again later.")
        );
        assert_eq!(
            read(503, Some(Duration::from_hours(9)), b"x"),
            wait(300, "x")
        );
    }

    #[test]
    fn a_proxy_can_neither_confirm_an_eviction_nor_say_that_a_pod_is_gone() {
        let from_server = |code, status: &str, reason: &str| {
            let status = json!({
                "kind": "Status", "apiVersion": "v1", "status": status, "reason": reason, "code": code,
            });
            read(code, None, status.to_string().as_bytes())
        };
        assert_eq!(from_server(201, "Success", ""), EvictionAnswer::Accepted);
        assert_eq!(
            from_server(404, "Failure", "NotFound"),
            EvictionAnswer::Gone
        );
        for (code, body) in [
            (200, "<html>Welcome</html>"),
            (201, ""),
            (404, "no such page"),
        ] {
            let answer = read(code, None, body.as_bytes());
            let why = body.to_owned();
            assert_eq!(answer, EvictionAnswer::Unknown { why }, "{code}");
        }
    }

    #[test]
    fn a_request_without_an_answer_may_have_been_sent() {
        let server = "https://127.0.0.1:6443".to_owned();
        assert!(!was_not_sent(&CallError::TimedOut { server }));
        let broken = kube::Error::Service("the connection broke".into());
        assert!(!was_not_sent(&CallError::Kube(broken)));
    }

    #[test]
    fn responses_are_interpreted() {
        let many = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support.";
        let read = |code, message: &str| read(code, None, &status(code, message, &json!({})));
        let refused = |why: &str| EvictionAnswer::Refused {
            why: why.to_owned(),
        };
        assert!(matches!(read(409, "uid"), EvictionAnswer::Unknown { .. }));
        assert!(matches!(read(500, many), EvictionAnswer::ManyBudgets { why } if why == many));
        let timed_out = "etcdserver: request timed out";
        assert!(
            matches!(read(500, timed_out), EvictionAnswer::Unknown { why } if why == timed_out)
        );
        assert_eq!(read(403, "denied"), refused("denied"));
        assert!(matches!(read(504, "late"), EvictionAnswer::Unknown { .. }));
    }
}
