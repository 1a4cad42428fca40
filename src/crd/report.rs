//! What an agent tells the controller directly, and what it is answered: `POST /v1/report`, JSON over HTTP/2 and TLS.
//!
//! ```text
//! {"node": "node-a", "bootID": "0b7f...", "agentStartedMillis": 93211, "sequence": 17, "uptimeMillis": 263_211,
//!  "intervalSeconds": 10, "status": {...}}
//! {"epoch": 8812, "leading": true, "nextIntervalSeconds": 10}
//! ```
//! Unknown fields are passed over, so that agents and controllers of different versions understand each other.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::NodeMetricStatus;
use super::node_metric::{MOST_BREACHED, MOST_PODS};
use crate::engine::quantity;

/// Where reports go.
pub const PATH: &str = "/v1/report";
/// Where a replica passes on to the leader what agents told it and not the leader.
pub const RELAY_PATH: &str = "/v1/relay";
/// The audience of the tokens that come with them.
pub const AUDIENCE: &str = "plimsoll.dev/report";
/// An agent's body has at most so many bytes...
pub const MOST_BYTES: usize = 4 << 10;
/// ...and one with more than so many is refused.
pub const REFUSED_BYTES: usize = 16 << 10;
/// How often an agent reports that was told nothing else.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// No agent is asked to report less often, and none may say that it does.
pub const LONGEST_INTERVAL: Duration = Duration::from_mins(1);
/// Names of Nodes have at most 253 letters, and boot ids 36.
const LONGEST_NAME: usize = 253;

/// What an agent tells.
///
/// Of two reports of one boot the one with the larger (`agent_started_millis`, `sequence`) is the newer; so that an agent
/// that was restarted is never taken for a replay. Boots follow each other and never come back.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report<S = NodeMetricStatus> {
    /// Name of the Node.
    pub node: String,
    /// `/proc/sys/kernel/random/boot_id` of the node.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// When this agent's process started, in milliseconds since the node's boot.
    pub agent_started_millis: u64,
    /// Grows with each report of this process.
    pub sequence: u64,
    /// When this was sent, in milliseconds since the node's boot; agents of earlier versions don't say. By it the leader
    /// knows which start of an agent is possible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime_millis: Option<u64>,
    /// When the next report is to be expected at the latest, in seconds: 1 to 60.
    pub interval_seconds: u32,
    /// What was measured; without conditions.
    pub status: S,
}

/// What is said of a report that was taken, or was known before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Acknowledgement {
    /// The term of the leader, as far as the replica that answers knows it.
    pub epoch: Option<u64>,
    /// Whether the replica that answers leads.
    pub leading: bool,
    /// When the next report is wanted, in seconds: 10 to 60.
    pub next_interval_seconds: u32,
}

impl Acknowledgement {
    /// When the next report is wanted: within the bounds, whatever was answered.
    pub fn next_interval(&self) -> Duration {
        Duration::from_secs(self.next_interval_seconds.into()).clamp(INTERVAL, LONGEST_INTERVAL)
    }
}

/// A report that a replica passes on: what an agent told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Relayed<R> {
    /// How long ago it came, in milliseconds.
    pub age_millis: u64,
    /// As it came.
    pub report: R,
}

/// What the leader answers to that: a node of which it would hear more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Missed {
    /// Its name.
    pub node: String,
    /// The last that it has; `None`: none.
    pub last: Option<Last>,
}

/// A report, without what it tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Last {
    /// As in [`Report`].
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// As in [`Report`].
    pub agent_started_millis: u64,
    /// As in [`Report`].
    pub sequence: u64,
}

/// Why a report is none.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum InvalidReport {
    /// It is no JSON of a report.
    #[error("failed to read the report: {0}")]
    Json(String),
    /// A name is missing, or longer than names are.
    #[error("failed to read the report: {0} has to have 1 to {LONGEST_NAME} bytes")]
    Name(&'static str),
    /// The interval is out of range.
    #[error("failed to read the report: intervalSeconds is {0}, and has to be 1 to 60")]
    Interval(u32),
    /// Clients could not read an object with such an amount.
    #[error("failed to read the report: {0:?} is no quantity")]
    Quantity(String),
}

impl Report {
    /// Reads and checks a body. What no list of a `NodeMetric` has room for is left out, and conditions, which are the
    /// controller's, too.
    ///
    /// # Errors
    /// It is no report, or one that would make an object that clients can't read.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidReport> {
        let mut report: Self =
            serde_json::from_slice(body).map_err(|error| InvalidReport::Json(error.to_string()))?;
        for (field, text) in [("node", &report.node), ("bootID", &report.boot_id)] {
            if text.is_empty() || text.len() > LONGEST_NAME {
                return Err(InvalidReport::Name(field));
            }
        }
        if report.interval().is_zero() || report.interval() > LONGEST_INTERVAL {
            return Err(InvalidReport::Interval(report.interval_seconds));
        }
        let amount = |amount: &&Quantity| amount.0.parse::<quantity::Quantity>().is_err();
        if let Some(wrong) = amounts(&report.status).find(amount) {
            return Err(InvalidReport::Quantity(wrong.0.clone()));
        }
        report.status.top_pods.truncate(MOST_PODS);
        report.status.breached.truncate(MOST_BREACHED);
        report.status.conditions.clear();
        Ok(report)
    }

    /// When the next is to be expected at the latest.
    pub const fn interval(&self) -> Duration {
        Duration::from_secs(self.interval_seconds as u64)
    }
}

fn amounts(status: &NodeMetricStatus) -> impl Iterator<Item = &Quantity> {
    let usage = &status.usage;
    let whole = [&status.capacity, &usage.node, &usage.pods, &usage.system];
    let whole = whole.map(|amounts| [&amounts.cpu, &amounts.memory]);
    let pods = status.top_pods.iter().map(|pod| [&pod.cpu, &pod.memory]);
    whole.into_iter().chain(pods).flatten().flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::crd::node_metric::{PodUsage, Usage};

    fn report() -> Value {
        json!({
            "node": "node-a",
            "bootID": "0b7f",
            "agentStartedMillis": 93211,
            "sequence": 17,
            "uptimeMillis": 263_211,
            "intervalSeconds": 10,
            "status": {
                "timestamp": "2026-11-21T10:00:00Z",
                "usage": {"node": {"cpu": "1250m", "memory": "512Mi"}},
                "topPods": [{"namespace": "a", "name": "b", "cpu": "3m"}],
            },
        })
    }

    fn parse(report: &Value) -> Result<Report, InvalidReport> {
        Report::parse(report.to_string().as_bytes())
    }

    #[test]
    fn a_report_is_written_as_it_is_read() {
        let read = parse(&report()).unwrap();
        assert_eq!(
            (read.node.as_str(), read.boot_id.as_str()),
            ("node-a", "0b7f")
        );
        assert_eq!((read.agent_started_millis, read.sequence), (93211, 17));
        assert_eq!(read.uptime_millis, Some(263_211));
        assert_eq!(read.interval(), Duration::from_secs(10));
        assert_eq!(serde_json::to_value(&read).unwrap(), report());
        // An agent need not give its status away to send it.
        let borrowed = Report {
            node: read.node.clone(),
            boot_id: read.boot_id.clone(),
            agent_started_millis: read.agent_started_millis,
            sequence: read.sequence,
            uptime_millis: read.uptime_millis,
            interval_seconds: read.interval_seconds,
            status: &read.status,
        };
        assert_eq!(serde_json::to_value(borrowed).unwrap(), report());
    }

    #[test]
    fn an_acknowledgement_is_three_words() {
        let said = Acknowledgement {
            epoch: None,
            leading: false,
            next_interval_seconds: 10,
        };
        let text = r#"{"epoch":null,"leading":false,"nextIntervalSeconds":10}"#;
        assert_eq!(serde_json::to_string(&said).unwrap(), text);
        assert_eq!(serde_json::from_str::<Acknowledgement>(text).unwrap(), said);
    }

    #[test]
    fn an_agent_of_an_earlier_version_does_not_say_for_how_long_its_node_is_up() {
        let mut earlier = report();
        earlier.as_object_mut().unwrap().remove("uptimeMillis");
        let read = parse(&earlier).unwrap();
        assert_eq!(read.uptime_millis, None);
        assert_eq!(serde_json::to_value(&read).unwrap(), earlier);
    }

    #[test]
    fn what_a_later_version_says_more_is_passed_over() {
        let mut more = report();
        more["mood"] = json!("good");
        more["status"]["weather"] = json!({"sun": true});
        assert_eq!(parse(&more), parse(&report()));
    }

    #[test]
    fn a_report_that_would_spoil_the_list_of_all_nodes_is_refused() {
        let wrong = |path: &str, value: Value| {
            let mut report = report();
            *report.pointer_mut(path).unwrap() = value;
            parse(&report).unwrap_err().to_string()
        };
        let no_quantity = "failed to read the report: \"much\" is no quantity";
        assert_eq!(wrong("/status/usage/node/cpu", json!("much")), no_quantity);
        assert_eq!(wrong("/status/topPods/0/cpu", json!("much")), no_quantity);
        let name = wrong("/node", json!(""));
        assert!(name.contains("node has to have 1 to 253 bytes"), "{name}");
        let name = wrong("/bootID", json!("b".repeat(254)));
        assert!(name.contains("bootID has to have"), "{name}");
        for seconds in [0, 61] {
            let interval = wrong("/intervalSeconds", json!(seconds));
            assert!(interval.ends_with("has to be 1 to 60"), "{interval}");
        }
        assert!(wrong("/sequence", json!(-1)).contains("invalid value"));
        assert!(wrong("/status", json!(7)).contains("invalid type"));
        for garbage in [&b""[..], b"{}", b"\xff\xfe", b"[1", b"null"] {
            let refused = Report::parse(garbage).unwrap_err();
            assert!(matches!(refused, InvalidReport::Json(_)), "{refused}");
        }
    }

    #[test]
    fn no_more_is_kept_than_a_node_metric_has_room_for() {
        let pod = PodUsage::default;
        let long = Report {
            node: "n".to_owned(),
            boot_id: "b".to_owned(),
            interval_seconds: 10,
            status: NodeMetricStatus {
                usage: Usage::default(),
                top_pods: std::iter::repeat_with(pod).take(MOST_PODS + 1).collect(),
                breached: vec!["q/r".to_owned(); MOST_BREACHED + 1],
                conditions: vec![serde_json::from_value(condition()).unwrap()],
                ..NodeMetricStatus::default()
            },
            ..Report::default()
        };
        let kept = parse(&serde_json::to_value(long).unwrap()).unwrap().status;
        assert_eq!(kept.top_pods.len(), MOST_PODS);
        assert_eq!(kept.breached.len(), MOST_BREACHED);
        assert_eq!(kept.conditions, []);
    }

    fn condition() -> Value {
        json!({"type": "Healthy", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-11-21T10:00:00Z"})
    }
}
