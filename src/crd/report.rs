//! The reports that agents send to the controller, and the answers: `POST /v1/report`, JSON over HTTP/2 and TLS.
//!
//! ```text
//! {"node": "node-a", "bootID": "0b7f...", "agentStartedMillis": 93211, "sequence": 17, "uptimeMillis": 263_211,
//!  "intervalSeconds": 10, "status": {...}}
//! {"epoch": 8812, "leading": true, "nextIntervalSeconds": 10}
//! ```
//! Unknown fields are ignored, so that agents and controllers of different versions are compatible.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::NodeMetricStatus;
use super::node_metric::{MAX_BREACHED, MAX_PODS};
use crate::engine::quantity;

/// The path of reports.
pub const PATH: &str = "/v1/report";
/// The path on which a replica relays to the leader the reports that the leader has missed.
pub const RELAY_PATH: &str = "/v1/relay";
/// The audience of the tokens of reports.
pub const AUDIENCE: &str = "plimsoll.dev/report";
/// The maximum size of a report that an agent sends.
pub const MAX_BYTES: usize = 4 << 10;
/// The maximum size of a report that the controller accepts.
pub const MAX_ACCEPTED_BYTES: usize = 16 << 10;
/// The default interval of reports.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// The maximum interval of reports.
pub const MAX_INTERVAL: Duration = Duration::from_mins(1);
/// The maximum length of the name of a Node; boot ids are shorter.
const MAX_NAME: usize = 253;

/// A report of an agent.
///
/// Within a boot, the report with the larger (`agent_started_millis`, `sequence`) is newer, so that the reports of a
/// restarted agent are not mistaken for replays. An earlier boot never follows a later one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report<S = NodeMetricStatus> {
    /// The name of the Node.
    pub node: String,
    /// `/proc/sys/kernel/random/boot_id` of the node.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// The start time of the agent process, in milliseconds since the boot of the node.
    pub agent_started_millis: u64,
    /// Increases with each report of the process.
    pub sequence: u64,
    /// The time when the report was sent, in milliseconds since the boot of the node; absent from agents of earlier versions. It
    /// bounds the start time that the leader accepts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime_millis: Option<u64>,
    /// The maximum time until the next report in seconds, from 1 to 60.
    pub interval_seconds: u32,
    /// The measurements, without conditions.
    pub status: S,
}

/// The answer to a report that was accepted, or already known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Acknowledgement {
    /// The election term, if known to the replica that answers.
    pub epoch: Option<u64>,
    /// Whether the replica that answers is the leader.
    pub leading: bool,
    /// The requested time until the next report in seconds, from 10 to 60.
    pub next_interval_seconds: u32,
    /// Minimum average interval between writes of the node's load label, in seconds, so that all nodes together stay
    /// within 20 writes a second; absent from earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label_interval_seconds: Option<u32>,
    /// Whether the node may have the soft taint while it is busy: at most 40 percent of a zone's nodes have it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub busy: bool,
}

impl Acknowledgement {
    /// Minimum average interval between writes of the load label; `None` if the controller asks for none.
    pub fn label_interval(&self) -> Option<Duration> {
        let seconds = self.label_interval_seconds?;
        Some(Duration::from_secs(seconds.into()))
    }

    /// The requested time until the next report, clamped to the valid range.
    pub fn next_interval(&self) -> Duration {
        Duration::from_secs(self.next_interval_seconds.into()).clamp(INTERVAL, MAX_INTERVAL)
    }
}

/// A report that a replica relays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RelayedReport<R> {
    /// The time since it was received, in milliseconds.
    pub age_millis: u64,
    /// The report as received.
    pub report: R,
}

/// An item of the answer to a relay: a node with overdue reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MissingReport {
    /// The name of the node.
    pub node: String,
    /// The last report that the leader has, if any.
    pub last: Option<ReportId>,
}

/// The identity of a report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ReportId {
    /// As in [`Report`].
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// As in [`Report`].
    pub agent_started_millis: u64,
    /// As in [`Report`].
    pub sequence: u64,
}

/// Why a report is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum InvalidReport {
    /// It is not JSON of a report.
    #[error("failed to read the report: {0}")]
    Json(String),
    /// A name is missing or too long.
    #[error("failed to read the report: {0} must have 1 to {MAX_NAME} bytes")]
    Name(&'static str),
    /// The interval is out of range.
    #[error("failed to read the report: intervalSeconds is {0}, and must be from 1 to 60")]
    Interval(u32),
    /// A quantity is invalid: clients could not read the object.
    #[error("failed to read the report: {0:?} is not a quantity")]
    Quantity(String),
}

impl Report {
    /// Reads and checks a body. Lists are truncated to the maximums of a `NodeMetric`, and conditions are removed, because the
    /// controller sets them.
    ///
    /// # Errors
    /// It is not a report, or clients could not read the resulting object.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidReport> {
        let mut report: Self =
            serde_json::from_slice(body).map_err(|error| InvalidReport::Json(error.to_string()))?;
        for (field, text) in [("node", &report.node), ("bootID", &report.boot_id)] {
            if text.is_empty() || text.len() > MAX_NAME {
                return Err(InvalidReport::Name(field));
            }
        }
        if report.interval().is_zero() || report.interval() > MAX_INTERVAL {
            return Err(InvalidReport::Interval(report.interval_seconds));
        }
        let is_invalid = |amount: &&Quantity| amount.0.parse::<quantity::Quantity>().is_err();
        if let Some(wrong) = amounts(&report.status).find(is_invalid) {
            return Err(InvalidReport::Quantity(wrong.0.clone()));
        }
        report.status.top_pods.truncate(MAX_PODS);
        report.status.breached.truncate(MAX_BREACHED);
        report.status.conditions.clear();
        Ok(report)
    }

    /// The maximum time until the next report.
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
    fn a_report_survives_a_round_trip() {
        let read = parse(&report()).unwrap();
        assert_eq!(
            (read.node.as_str(), read.boot_id.as_str()),
            ("node-a", "0b7f")
        );
        assert_eq!((read.agent_started_millis, read.sequence), (93211, 17));
        assert_eq!(read.uptime_millis, Some(263_211));
        assert_eq!(read.interval(), Duration::from_secs(10));
        assert_eq!(serde_json::to_value(&read).unwrap(), report());
        // A report can borrow its status.
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
    fn an_acknowledgement_of_an_earlier_version_has_three_fields() {
        let answer = Acknowledgement {
            epoch: None,
            leading: false,
            next_interval_seconds: 10,
            label_interval_seconds: None,
            busy: false,
        };
        let text = r#"{"epoch":null,"leading":false,"nextIntervalSeconds":10}"#;
        assert_eq!(serde_json::to_string(&answer).unwrap(), text);
        assert_eq!(
            serde_json::from_str::<Acknowledgement>(text).unwrap(),
            answer
        );
        assert_eq!(answer.label_interval(), None);
        let now = r#"{"epoch":7,"leading":true,"nextIntervalSeconds":10,"labelIntervalSeconds":250,"busy":true}"#;
        let answer: Acknowledgement = serde_json::from_str(now).unwrap();
        assert_eq!(
            (answer.label_interval(), answer.busy),
            (Some(Duration::from_secs(250)), true)
        );
        assert_eq!(serde_json::to_string(&answer).unwrap(), now);
    }

    #[test]
    fn the_uptime_is_absent_in_reports_of_earlier_versions() {
        let mut earlier = report();
        earlier.as_object_mut().unwrap().remove("uptimeMillis");
        let read = parse(&earlier).unwrap();
        assert_eq!(read.uptime_millis, None);
        assert_eq!(serde_json::to_value(&read).unwrap(), earlier);
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let mut more = report();
        more["newField"] = json!("x");
        more["status"]["newField"] = json!({"a": true});
        assert_eq!(parse(&more), parse(&report()));
    }

    #[test]
    fn an_invalid_report_is_rejected() {
        let wrong = |path: &str, value: Value| {
            let mut report = report();
            *report.pointer_mut(path).unwrap() = value;
            parse(&report).unwrap_err().to_string()
        };
        let no_quantity = "failed to read the report: \"much\" is not a quantity";
        assert_eq!(wrong("/status/usage/node/cpu", json!("much")), no_quantity);
        assert_eq!(wrong("/status/topPods/0/cpu", json!("much")), no_quantity);
        let name = wrong("/node", json!(""));
        assert!(name.contains("node must have 1 to 253 bytes"), "{name}");
        let name = wrong("/bootID", json!("b".repeat(254)));
        assert!(name.contains("bootID must have"), "{name}");
        for seconds in [0, 61] {
            let interval = wrong("/intervalSeconds", json!(seconds));
            assert!(interval.ends_with("must be from 1 to 60"), "{interval}");
        }
        assert!(wrong("/sequence", json!(-1)).contains("invalid value"));
        assert!(wrong("/status", json!(7)).contains("invalid type"));
        for garbage in [&b""[..], b"{}", b"\xff\xfe", b"[1", b"null"] {
            let error = Report::parse(garbage).unwrap_err();
            assert!(matches!(error, InvalidReport::Json(_)), "{error}");
        }
    }

    #[test]
    fn lists_are_truncated_to_their_maximum() {
        let pod = PodUsage::default;
        let long = Report {
            node: "n".to_owned(),
            boot_id: "b".to_owned(),
            interval_seconds: 10,
            status: NodeMetricStatus {
                usage: Usage::default(),
                top_pods: std::iter::repeat_with(pod).take(MAX_PODS + 1).collect(),
                breached: vec!["q/r".to_owned(); MAX_BREACHED + 1],
                conditions: vec![serde_json::from_value(condition()).unwrap()],
                ..NodeMetricStatus::default()
            },
            ..Report::default()
        };
        let parsed = parse(&serde_json::to_value(long).unwrap()).unwrap().status;
        assert_eq!(parsed.top_pods.len(), MAX_PODS);
        assert_eq!(parsed.breached.len(), MAX_BREACHED);
        assert_eq!(parsed.conditions, []);
    }

    fn condition() -> Value {
        json!({"type": "Healthy", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-11-21T10:00:00Z"})
    }
}
