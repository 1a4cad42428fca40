//! Clients of an API server with the chart's roles: service accounts with tokens as the kubelet issues them.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

pub mod attempts;

use std::path::{Path, PathBuf};

use http_body_util::BodyExt as _;
use hyper::Request;
use hyper::header::CONTENT_TYPE;
use kube::Client;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use serde_json::{Value, json};

use crate::api_support::ControlPlane;
use crate::chart_support::{self, NAMESPACE, rendered_with_hooks};

pub const AGENT: &str = "plimsoll-agent";
pub const CONTROLLER: &str = "plimsoll-controller";
/// The accounts of `helm test` and of the uninstall hook, which stops all agents.
pub const HOOK_ACCOUNTS: [&str; 2] = ["plimsoll-test", "plimsoll-uninstall"];

/// Installs the parts of the chart that need no kubelet, including hooks. Returns the chart.
pub fn install(plane: &ControlPlane, namespace: &str) -> String {
    let chart = rendered_with_hooks(&plane.tool("helm"), namespace);
    let kinds = [
        "ServiceAccount",
        "Namespace",
        "Role",
        "RoleBinding",
        "ClusterRole",
        "ClusterRoleBinding",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "Secret",
        "ConfigMap",
        "APIService",
    ];
    let mut objects = chart_support::objects(&chart);
    objects.retain(|(object, _)| kinds.iter().any(|kind| object["kind"] == *kind));
    let mut list = vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}),
        json!({
            "apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": "nobody", "namespace": namespace},
        }),
    ];
    list.extend(objects.into_iter().map(|(object, _)| object));
    plane.apply(&list);
    chart
}

/// An agent pod as its `DaemonSet` would create it: its token names the node.
pub fn agent_pod(plane: &ControlPlane, node: &str) {
    pod_of(plane, AGENT, (NAMESPACE, &format!("agent-{node}")), node);
}

/// A pod with this account.
pub fn pod_of(plane: &ControlPlane, account: &str, (namespace, name): (&str, &str), node: &str) {
    plane.create(&[json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "nodeName": node, "serviceAccountName": account, "containers": [{"name": "main", "image": "none"}],
        },
    })]);
}

/// A kubeconfig with a token of this account, bound to this pod.
pub fn kubeconfig(
    plane: &ControlPlane,
    namespace: &str,
    account: &str,
    pod: Option<&str>,
) -> PathBuf {
    let bound = pod.map(|pod| format!("--bound-object-name={pod}"));
    let mut args = vec!["create", "token", account, "-n", namespace];
    if let Some(bound) = &bound {
        args.extend(["--bound-object-kind=Pod", bound]);
    }
    let token = plane.kubectl(&args);
    let text = std::fs::read_to_string(&plane.kubeconfig).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    config["users"][0]["user"]["token"] = token.trim().into();
    let name = format!("{account}-{}.kubeconfig", pod.unwrap_or("unbound"));
    plane.file(&name, &config.to_string())
}

/// A client of the API server.
pub struct Actor {
    pub client: Client,
}

/// Its answer.
#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    pub body: Value,
}

impl Answer {
    pub fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }
}

pub const MERGE: &str = "application/merge-patch+json";
pub const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub const APPLY: &str = "application/apply-patch+yaml";
pub const JSON: &str = "application/json";
pub const JSON_PATCH: &str = "application/json-patch+json";

impl Actor {
    pub async fn of(plane: &ControlPlane, account: &str, pod: Option<&str>) -> Self {
        Self::with_kubeconfig(&kubeconfig(plane, NAMESPACE, account, pod)).await
    }

    /// The user of this kubeconfig.
    pub async fn with_kubeconfig(kubeconfig: &Path) -> Self {
        let client = connect(&ClusterSource::file(kubeconfig)).await;
        Self {
            client: client.unwrap(),
        }
    }

    pub async fn send(&self, method: &str, path: &str, kind: &str, body: &Value) -> Answer {
        let bytes = match body {
            Value::Null => Vec::new(),
            body => body.to_string().into_bytes(),
        };
        let request = Request::builder().method(method).uri(path);
        let request = request.header(CONTENT_TYPE, kind).body(bytes.into());
        let answer = self.client.send(request.unwrap()).await.unwrap();
        let code = answer.status().as_u16();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        Answer { code, body }
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, JSON, &Value::Null).await
    }

    pub async fn may(&self, review: &Value) -> bool {
        let path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
        let answer = self.send("POST", path, JSON, review).await;
        assert_eq!(answer.code, 201, "{answer:?}");
        answer.body["status"]["allowed"] == true
    }

    /// Tries an attempt that has to be refused with its message.
    pub async fn is_refused(&self, attempt: &Attempt) {
        let Attempt {
            what, method, path, ..
        } = attempt;
        let answer = self.try_out(attempt).await;
        assert_eq!(answer.code, 403, "{what}: {method} {path}: {answer:?}");
        let message = answer.message();
        assert!(message.contains(&attempt.words), "{what}: {message}");
    }

    pub async fn try_out(&self, attempt: &Attempt) -> Answer {
        let Attempt { method, path, .. } = attempt;
        self.send(method, path, attempt.kind, &attempt.body).await
    }
}

/// A request that has to be refused, with the refusal's message.
pub struct Attempt {
    pub what: &'static str,
    pub method: &'static str,
    pub path: String,
    pub kind: &'static str,
    pub body: Value,
    pub words: String,
}

pub fn attempt(
    what: &'static str,
    (method, path): (&'static str, &str),
    (kind, body): (&'static str, Value),
    words: impl Into<String>,
) -> Attempt {
    Attempt {
        what,
        method,
        path: path.to_owned(),
        kind,
        body,
        words: words.into(),
    }
}
