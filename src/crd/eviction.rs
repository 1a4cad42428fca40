//! The eviction requests that agents send to the controller's leader: `POST /v1/evict` on the listener of reports, JSON over
//! HTTP/2 and TLS; or the same body through the API server, where that port cannot be reached.
//!
//! ```text
//! {"bootID": "0b7f...", "sequence": 93211004117, "namespace": "shop", "name": "web-1", "uid": "5f1c...",
//!  "rule": "node-pressure/cpu", "hash": "8f3a..."}
//! {"result": "accepted"}
//! ```
//! Unknown fields are ignored, so that agents and controllers of different versions are compatible.

mod check;

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::node_metric::{API_VERSION, PLURAL};

pub use check::{Objection, permit};

/// Where requests go, on the listener of reports.
pub const PATH: &str = "/v1/evict";
/// The subresource of a node's `NodeMetric` that accepts the same requests in the aggregated API.
pub const SUBRESOURCE: &str = "evictions";
/// The maximum size of a request.
pub const MAX_BYTES: usize = 4 << 10;
/// After this time a request expires, and its agent no longer waits for the answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// How long an agent waits when there is no leader: longer than a failover takes.
pub const LEADERLESS_WAIT: Duration = Duration::from_secs(10);
/// The maximum length of a name in Kubernetes.
const MAX_NAME: usize = 253;
/// The maximum length of a rule's id: `<nodeqos>/<rule>`.
const MAX_RULE: usize = 2 * MAX_NAME + 1;

/// The path in the aggregated API for requests of the agent of `node`.
pub fn api_path(node: &str) -> String {
    format!("/apis/{API_VERSION}/{PLURAL}/{node}/{SUBRESOURCE}")
}

/// The pod to evict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionTarget {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; another pod of that name is not evicted.
    pub uid: String,
}

/// Identifies a request: a repeated request gets the same answer and evicts once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Key {
    /// `/proc/sys/kernel/random/boot_id` of the node.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// Increases with each request within a boot.
    pub sequence: u64,
}

/// A request to evict a pod. It has no grace period and no strategy: the leader knows the rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EvictionRequest {
    /// Identifies the request.
    #[serde(flatten)]
    pub key: Key,
    /// The pod to evict.
    #[serde(flatten)]
    pub target: EvictionTarget,
    /// The id of the rule that requests it: `<nodeqos>/<rule>`.
    pub rule: String,
    /// `spec.hash` of the `NodeWatermark` that the agent enforces.
    pub hash: String,
}

/// Why a request is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum InvalidRequest {
    /// It is not JSON of a request.
    #[error("failed to read the eviction request: {0}")]
    Json(String),
    /// A field is empty, too long, or has characters that are not allowed in it.
    #[error("failed to read the eviction request: {0} is not a valid name")]
    Name(&'static str),
}

impl EvictionRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// It is not a request, or has names that could lead to another resource.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let request: Self = serde_json::from_slice(body)
            .map_err(|error| InvalidRequest::Json(error.to_string()))?;
        let Self {
            key, target, rule, ..
        } = &request;
        let names = [
            ("namespace", &target.namespace),
            ("name", &target.name),
            ("uid", &target.uid),
            ("bootID", &key.boot_id),
            ("hash", &request.hash),
        ];
        for (field, text) in names {
            if !is_name(text) {
                return Err(InvalidRequest::Name(field));
            }
        }
        if rule.is_empty() || rule.len() > MAX_RULE {
            return Err(InvalidRequest::Name("rule"));
        }
        Ok(request)
    }
}

/// Whether the text is safe as a segment of an API path.
fn is_name(text: &str) -> bool {
    let fits = |it: char| it.is_ascii_alphanumeric() || it == '-' || it == '.';
    (1..=MAX_NAME).contains(&text.len()) && !text.starts_with('.') && text.chars().all(fits)
}

/// The answer of a replica that is not the leader (421).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Misdirected {
    /// The address of the leader, if known.
    pub leader: Option<IpAddr>,
}

/// Why no pod of a node can be evicted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delay {
    /// The API server is overloaded, or a webhook that it calls does not answer.
    Server,
    /// There is no leader, it cannot be reached, or it is not ready yet.
    Leader,
    /// The eviction budget of the fleet, the zone or the node is exhausted, or which evictions count is not known.
    Budget,
}

/// The result of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "result",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum EvictionAnswer {
    /// The pod is being terminated.
    Accepted,
    /// The pod was already being terminated for another reason.
    Terminating,
    /// The pod no longer exists.
    Gone,
    /// A `PodDisruptionBudget`, or the eviction budget of the pod's namespace or owner, does not allow it now. Other pods may
    /// be evicted.
    Budget {
        /// Which budget, and why.
        why: String,
    },
    /// More than one `PodDisruptionBudget` selects the pod, which the API server does not support.
    ManyBudgets {
        /// What the API server says.
        why: String,
    },
    /// No pod of the node can be evicted for a while.
    Wait {
        /// For how long.
        #[serde(rename = "waitMillis", with = "millis")]
        wait: Duration,
        /// Why no pod can be evicted.
        by: Delay,
        /// Why.
        why: String,
    },
    /// The eviction is not allowed.
    Refused {
        /// Why.
        why: String,
    },
    /// The request did not reach a server. `away` in JSON, which agents and controllers of different versions exchange.
    #[serde(rename = "away")]
    NotSent {
        /// Why.
        why: String,
    },
    /// The request was sent to the API server, but its result is not known.
    Unknown {
        /// Why.
        why: String,
    },
}

impl EvictionAnswer {
    /// Why the pod was not evicted, or may not have been; `None`: it is being terminated, or is gone.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Accepted | Self::Terminating | Self::Gone => None,
            Self::Budget { why }
            | Self::ManyBudgets { why }
            | Self::Wait { why, .. }
            | Self::Refused { why }
            | Self::NotSent { why }
            | Self::Unknown { why } => Some(why),
        }
    }
}

mod millis {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(wait: &Duration, to: S) -> Result<S::Ok, S::Error> {
        u64::try_from(wait.as_millis())
            .unwrap_or(u64::MAX)
            .serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        u64::deserialize(from).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn request() -> Value {
        json!({
            "bootID": "0b7f", "sequence": 7, "namespace": "shop", "name": "web-1", "uid": "5f1c",
            "rule": "node-pressure/cpu", "hash": "8f3a",
        })
    }

    fn parse(request: &Value) -> Result<EvictionRequest, InvalidRequest> {
        EvictionRequest::parse(request.to_string().as_bytes())
    }

    #[test]
    fn a_request_survives_a_round_trip() {
        let read = parse(&request()).unwrap();
        assert_eq!((read.key.sequence, &*read.target.name), (7, "web-1"));
        assert_eq!(serde_json::to_value(&read).unwrap(), request());
        let mut later = request();
        later["newField"] = json!("x");
        assert_eq!(parse(&later).unwrap(), read, "unknown fields are ignored");
    }

    #[test]
    fn a_name_that_could_change_the_path_is_rejected() {
        for field in ["namespace", "name", "uid", "bootID", "hash"] {
            for name in [
                "../nodes",
                "a/b",
                "",
                ".",
                "a b",
                "a%2fb",
                "x?y",
                &"a".repeat(254),
            ] {
                let mut request = request();
                request[field] = json!(name);
                assert_eq!(
                    parse(&request).unwrap_err(),
                    InvalidRequest::Name(field),
                    "{name}"
                );
            }
        }
        let mut unnamed = request();
        unnamed["rule"] = json!("");
        assert_eq!(parse(&unnamed).unwrap_err(), InvalidRequest::Name("rule"));
        for garbage in [&b""[..], b"{}", b"\xff", b"null", b"[1"] {
            let error = EvictionRequest::parse(garbage).unwrap_err();
            assert!(matches!(error, InvalidRequest::Json(_)), "{error}");
        }
    }

    #[test]
    fn every_answer_survives_a_round_trip() {
        let why = || "w".to_owned();
        let wait = EvictionAnswer::Wait {
            wait: Duration::from_millis(1500),
            by: Delay::Budget,
            why: why(),
        };
        let written = json!({"result": "wait", "waitMillis": 1500, "by": "budget", "why": "w"});
        assert_eq!(serde_json::to_value(&wait).unwrap(), written);
        for answer in [
            wait,
            EvictionAnswer::Accepted,
            EvictionAnswer::Terminating,
            EvictionAnswer::Gone,
            EvictionAnswer::Budget { why: why() },
            EvictionAnswer::ManyBudgets { why: why() },
            EvictionAnswer::Refused { why: why() },
            EvictionAnswer::NotSent { why: why() },
            EvictionAnswer::Unknown { why: why() },
        ] {
            let text = serde_json::to_string(&answer).unwrap();
            assert_eq!(
                serde_json::from_str::<EvictionAnswer>(&text).unwrap(),
                answer
            );
        }
    }

    #[test]
    fn the_path_names_the_node() {
        assert_eq!(
            api_path("node-a"),
            "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics/node-a/evictions"
        );
    }
}
