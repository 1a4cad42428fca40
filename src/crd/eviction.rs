//! What an agent asks the controller's leader for: the eviction of a pod of its node. `POST /v1/evict` where reports go, JSON over
//! HTTP/2 and TLS; or the same body through the API server, where that port cannot be reached.
//!
//! ```text
//! {"bootID": "0b7f...", "sequence": 93211004117, "namespace": "shop", "name": "web-1", "uid": "5f1c...",
//!  "rule": "node-pressure/cpu", "hash": "8f3a..."}
//! {"result": "accepted"}
//! ```
//! Unknown fields are ignored, so that agents and controllers of different versions understand each other.

mod check;

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::node_metric::{API_VERSION, PLURAL};

pub use check::{Objection, permit};

/// Where requests go, on the listener of reports.
pub const PATH: &str = "/v1/evict";
/// The subresource of a node's `NodeMetric` that takes the same requests in the aggregated API.
pub const SUBRESOURCE: &str = "evictions";
/// A request with more bytes is refused.
pub const MAX_BYTES: usize = 4 << 10;
/// A request that came so long ago is not carried out any more, and its agent no longer waits for the answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// An agent waits so long where no leader can be asked: longer than a failover takes.
pub const LEADERLESS_WAIT: Duration = Duration::from_secs(10);
/// The longest name that Kubernetes gives anything.
const MAX_NAME: usize = 253;
/// A rule's id is the name of its `NodeQOS`, a slash, and its own.
const MAX_RULE: usize = 2 * MAX_NAME + 1;

/// The path in the aggregated API for requests of the agent of `node`.
pub fn api_path(node: &str) -> String {
    format!("/apis/{API_VERSION}/{PLURAL}/{node}/{SUBRESOURCE}")
}

/// Which pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID; another pod of that name is left alone.
    pub uid: String,
}

/// What one request is known by: asked again, by whatever way, it is answered the same and done once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Key {
    /// `/proc/sys/kernel/random/boot_id` of the node.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// Grows with each request of one boot.
    pub sequence: u64,
}

/// A request to evict a pod. Grace period and strategy are not in it: the leader knows the rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EvictionRequest {
    /// What it is known by.
    #[serde(flatten)]
    pub key: Key,
    /// Which pod.
    #[serde(flatten)]
    pub target: Target,
    /// The rule that asks for it: `<nodeqos>/<rule>`.
    pub rule: String,
    /// `spec.hash` of the `NodeWatermark` that the agent enforces.
    pub hash: String,
}

/// Why a body is no request.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum InvalidRequest {
    /// It is no JSON of a request.
    #[error("failed to read the request to evict: {0}")]
    Json(String),
    /// A field is empty, too long, or has characters that no such name has.
    #[error("failed to read the request to evict: {0} is no valid name")]
    Name(&'static str),
}

impl EvictionRequest {
    /// Reads and checks a body.
    ///
    /// # Errors
    /// It is no request, or one with names that could lead to another resource.
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

/// Whether it can stand in a path of the API server and means nothing but itself there.
fn is_name(text: &str) -> bool {
    let fits = |it: char| it.is_ascii_alphanumeric() || it == '-' || it == '.';
    (1..=MAX_NAME).contains(&text.len()) && !text.starts_with('.') && text.chars().all(fits)
}

/// What a replica answers that does not lead (421).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Misdirected {
    /// Where the leader is, if that is known.
    pub leader: Option<IpAddr>,
}

/// What keeps all pods of a node from being evicted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Delay {
    /// The API server is busy, or a webhook that it has to ask does not answer.
    Server,
    /// No replica of the controller leads, none can be reached, or it does not know enough yet.
    Leader,
    /// The budget of evictions of the fleet, the zone or the node is spent.
    Budget,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "result",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Answer {
    /// The pod is being terminated.
    Accepted,
    /// It was being terminated already, for another reason.
    Terminating,
    /// There is no such pod any more.
    Gone,
    /// A `PodDisruptionBudget` does not allow it now, or the budget of evictions of its namespace or owner. Another pod may be
    /// evicted.
    Budget {
        /// Which budget, and why.
        why: String,
    },
    /// More than one `PodDisruptionBudget` selects the pod, which no API server can handle.
    ManyBudgets {
        /// What the API server says.
        why: String,
    },
    /// Nothing can be evicted for a while.
    Wait {
        /// For how long.
        #[serde(rename = "waitMillis", with = "millis")]
        wait: Duration,
        /// What it is that keeps all pods from being evicted.
        by: Delay,
        /// Why.
        why: String,
    },
    /// It must not be done.
    Refused {
        /// Why.
        why: String,
    },
    /// The request never reached a server.
    Away {
        /// Why.
        why: String,
    },
    /// It was sent to the API server, and what became of it is not known.
    Unknown {
        /// Why.
        why: String,
    },
}

impl Answer {
    /// Why nothing was done, or is known of it; `None`: the pod is being terminated, or is gone.
    pub fn why(&self) -> Option<&str> {
        match self {
            Self::Accepted | Self::Terminating | Self::Gone => None,
            Self::Budget { why }
            | Self::ManyBudgets { why }
            | Self::Wait { why, .. }
            | Self::Refused { why }
            | Self::Away { why }
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
    fn a_request_is_written_as_it_is_read() {
        let read = parse(&request()).unwrap();
        assert_eq!((read.key.sequence, &*read.target.name), (7, "web-1"));
        assert_eq!(serde_json::to_value(&read).unwrap(), request());
        let mut later = request();
        later["mood"] = json!("good");
        assert_eq!(parse(&later).unwrap(), read, "a later version says more");
    }

    #[test]
    fn no_name_leads_to_another_resource() {
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
    fn every_answer_is_read_as_it_is_written() {
        let why = || "w".to_owned();
        let wait = Answer::Wait {
            wait: Duration::from_millis(1500),
            by: Delay::Budget,
            why: why(),
        };
        let written = json!({"result": "wait", "waitMillis": 1500, "by": "budget", "why": "w"});
        assert_eq!(serde_json::to_value(&wait).unwrap(), written);
        for answer in [
            wait,
            Answer::Accepted,
            Answer::Terminating,
            Answer::Gone,
            Answer::Budget { why: why() },
            Answer::ManyBudgets { why: why() },
            Answer::Refused { why: why() },
            Answer::Away { why: why() },
            Answer::Unknown { why: why() },
        ] {
            let text = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<Answer>(&text).unwrap(), answer);
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
