//! What agents and controllers must not do, tried in their name: an API server that holds them to their due refuses it. All
//! are dry runs: nothing is written, whatever the answer.

use serde_json::{Value, json};

use super::read::{Answer, Refused, arguments};

/// Something that one of the chart's admission policies has to refuse.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Attempt {
    /// The policy.
    pub policy: String,
    /// `system:serviceaccount:namespace:name`
    pub user: String,
    pub method: &'static str,
    pub path: String,
    pub body: Value,
}

/// What came of an attempt.
#[derive(Clone, Debug)]
pub(super) struct Trial {
    pub policy: String,
    pub answer: Answer,
}

/// What an answer says of the policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict<'a> {
    /// A policy refused it: they are in force.
    Held,
    /// Nobody did.
    LetThrough,
    /// What it is about is not there.
    Missing,
    /// It came to no policy.
    Untried(&'a str),
}

impl Trial {
    pub(super) fn verdict(&self) -> Verdict<'_> {
        match &self.answer {
            Ok(_) => Verdict::LetThrough,
            Err(Refused {
                code: Some(403),
                why,
            }) if why.contains("ValidatingAdmissionPolicy '") => Verdict::Held,
            // The pod to evict is looked for after all policies were asked, and there is none of this name.
            Err(refused) if refused.is_missing() && refused.why.contains(NAME) => {
                Verdict::LetThrough
            }
            Err(refused) if refused.is_missing() => Verdict::Missing,
            Err(refused) => Verdict::Untried(&refused.why),
        }
    }
}

/// Objects that there are, to try it with; empty: there is none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Objects<'a> {
    pub node: &'a str,
    pub watermark: &'a str,
    pub leases: &'a str,
}

/// What no agent may do with this account. Impersonated, it is bound to no node: all writes are refused.
pub(super) fn by_agent(user: &str, account: &str, objects: Objects<'_>) -> Vec<Attempt> {
    let Objects {
        node,
        watermark,
        leases,
    } = objects;
    let attempt = |kind: &str, method, path: String, body| Attempt {
        policy: format!("{account}-{kind}"),
        user: user.to_owned(),
        method,
        path: format!("{path}?dryRun=All"),
        body,
    };
    let mut attempts = vec![
        attempt(
            "lease",
            "POST",
            format!("/apis/coordination.k8s.io/v1/namespaces/{leases}/leases"),
            json!({"metadata": {"name": NAME}}),
        ),
        attempt(
            "event",
            "POST",
            "/api/v1/namespaces/default/events".to_owned(),
            event(),
        ),
    ];
    if !node.is_empty() {
        let path = format!("/api/v1/nodes/{node}");
        attempts.push(attempt("node", "PATCH", path, labelled()));
    }
    if !watermark.is_empty() {
        let path = format!("/apis/plimsoll.dev/v1alpha1/nodewatermarks/{watermark}/status");
        attempts.push(attempt("watermark", "PATCH", path, labelled()));
    }
    attempts
}

/// What no controller of this Deployment may do: label what it has to keep, and evict a pod of the system without naming its UID.
pub(super) fn by_controller(
    user: &str,
    account: &str,
    deployments: &Answer,
    node: &str,
) -> Vec<Attempt> {
    let mut places = Vec::new();
    if !node.is_empty() {
        places.push(("node", format!("/api/v1/nodes/{node}")));
    }
    if !arguments(deployments, "--metrics-api-listen=").is_empty() {
        let path = "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.metrics.plimsoll.dev";
        places.push(("api", path.to_owned()));
    }
    let attempt = |policy, method, path: String, body| Attempt {
        policy: format!("{account}-{policy}"),
        user: user.to_owned(),
        method,
        path: format!("{path}?dryRun=All"),
        body,
    };
    let labels = places.into_iter();
    let labels = labels.map(|(policy, path)| attempt(policy, "PATCH", path, labelled()));
    let mut attempts: Vec<_> = labels.collect();
    if !arguments(deployments, "--report-listen=").is_empty() {
        let path = format!("/api/v1/namespaces/kube-system/pods/{NAME}/eviction");
        attempts.push(attempt("eviction", "POST", path, eviction()));
    }
    attempts
}

/// What is created and labelled, if nobody minds.
const NAME: &str = "plimsoll-doctor";

fn eviction() -> Value {
    json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": NAME, "namespace": "kube-system"}})
}

fn labelled() -> Value {
    json!({"metadata": {"labels": {"plimsoll.dev/doctor": "forbidden"}}})
}

/// A valid one, in a name that is not the agent's.
fn event() -> Value {
    json!({
        "metadata": {"name": NAME, "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Normal", "reason": "Forbidden", "action": "Try", "message": "a dry run",
        "reportingComponent": NAME, "reportingInstance": NAME, "involvedObject": {"kind": "Node", "name": NAME, "namespace": "default"},
    })
}
