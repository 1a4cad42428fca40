//! Builds the `NodeMetric` of a node from all sources. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use ring::digest::{SHA256, digest};

use crate::cluster::lease::LeaseContent;
use crate::crd::node_metric::condition::{HEALTHY, reason};
use crate::crd::node_metric::{Amounts, MAX_BREACHED, ReportingAgent, RuleCounts, Usage};
use crate::crd::summary::Percent;
use crate::crd::{NodeMetricStatus, NodeWatermarkStatus, Summary};
use crate::engine::policy::NodeFacts;

use super::store::ObjectContent;
use super::table;

/// The fields of a Node that are used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeKnown {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.creationTimestamp`.
    pub created: Option<Time>,
    /// `status.nodeInfo.bootID`, set by the kubelet; may be empty.
    pub boot_id: String,
    /// The internal addresses of `status.addresses`.
    pub addresses: Vec<IpAddr>,
    /// Labels and capacity.
    pub facts: NodeFacts,
}

/// The parts of a node's object that do not depend on its load; built once, not per report.
#[derive(Clone, Debug, PartialEq)]
pub struct StaticFields {
    /// `metadata.uid` of the Node.
    pub uid: String,
    created: Option<Time>,
    /// Capacity. The labels are kept separately.
    facts: NodeFacts,
    labels: Arc<BTreeMap<String, String>>,
    /// As in [`ObjectContent`].
    metadata: Arc<str>,
}

impl StaticFields {
    /// Of this Node. The UID and age of the object are the same after every failover.
    ///
    /// # Errors
    /// It can't be encoded as JSON.
    pub fn of(name: &str, node: NodeKnown) -> serde_json::Result<Self> {
        let NodeKnown {
            uid,
            created,
            mut facts,
            ..
        } = node;
        let labels = std::mem::take(&mut facts.labels);
        let metadata = ObjectMeta {
            name: Some(name.to_owned()),
            uid: Some(own_uid(&uid)),
            creation_timestamp: created.clone(),
            labels: (!labels.is_empty()).then_some(labels),
            ..ObjectMeta::default()
        };
        let written = serde_json::to_string(&metadata)?;
        let fields = written
            .strip_prefix('{')
            .and_then(|rest| rest.strip_suffix('}'));
        Ok(Self {
            uid,
            created,
            facts,
            labels: Arc::new(metadata.labels.unwrap_or_default()),
            metadata: fields.unwrap_or_default().into(),
        })
    }

    /// Capacity of the Node.
    pub const fn facts(&self) -> &NodeFacts {
        &self.facts
    }
}

/// What the agent wrote about its rules and itself to the `NodeWatermark`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RulesKnown {
    counts: RuleCounts,
    breached: Vec<String>,
    version: String,
    boot_id: String,
}

impl RulesKnown {
    /// From a status. `None`: no agent wrote one.
    pub fn of(status: &NodeWatermarkStatus) -> Option<Self> {
        let agent = status.agent.as_ref()?;
        let count = |is: fn(&str) -> bool| {
            let rules = status.rules.iter().filter(|rule| is(&rule.state));
            i64::try_from(rules.count()).unwrap_or(i64::MAX)
        };
        let unknown = status.rules.iter().filter(|rule| rule.unknown.is_some());
        let breached = status.rules.iter().filter(|rule| rule.state == "Breached");
        Some(Self {
            counts: RuleCounts {
                total: count(|_| true),
                breached: count(|state| state == "Breached"),
                cooling: count(|state| state == "Cooling"),
                unknown: i64::try_from(unknown.count()).unwrap_or(i64::MAX),
            },
            breached: breached
                .map(|rule| rule.id.clone())
                .take(MAX_BREACHED)
                .collect(),
            version: agent.version.clone(),
            boot_id: agent.boot_id.clone(),
        })
    }
}

/// Health of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reachability {
    /// Never seen.
    #[default]
    Unknown,
    /// Reports in time.
    Reporting,
    /// Has not reported for longer than its grace period.
    Unresponsive,
}

/// All that is known about a node's load and agent.
#[derive(Clone, Debug, Default)]
pub struct NodeKnowledge {
    /// From the `NodeWatermark`.
    pub rules: Option<RulesKnown>,
    /// From the Lease.
    pub heartbeat: Option<LeaseContent>,
    /// When the heartbeat was seen, by this replica's clock.
    pub heartbeat_at: Option<Timestamp>,
    /// The last report, unless it is stale and the heartbeat is newer.
    pub report: Option<Arc<NodeMetricStatus>>,
    /// When the report was received, by this replica's clock.
    pub reported: Option<Timestamp>,
    /// What was polled, and when, by this replica's clock. Only without a recent report.
    pub polled: Option<(Arc<NodeMetricStatus>, Timestamp)>,
    /// Health of the agent.
    pub health: Reachability,
    /// Since when the agent has this health, as far as this replica knows.
    pub since: Option<Timestamp>,
}

/// The object of a node, as kept in the store.
///
/// # Errors
/// It can't be encoded as JSON.
pub fn content(
    name: &str,
    node: &StaticFields,
    known: &NodeKnowledge,
) -> serde_json::Result<ObjectContent> {
    let (mut status, received_at) = match (&known.polled, &known.report) {
        (Some((polled, at)), _) => (by_poll(node, polled, *at), Some(*at)),
        (None, Some(report)) => (NodeMetricStatus::clone(report), known.reported),
        (None, None) => (by_heartbeat(node, known), known.heartbeat_at),
    };
    status.conditions = vec![healthy(node, known)];
    Ok(ObjectContent {
        labels: Arc::clone(&node.labels),
        metadata: Arc::clone(&node.metadata),
        status: serde_json::to_string(&status)?.into(),
        cells: table::row(name, node.created.as_ref(), received_at, &status),
    })
}

/// Status from the page of an exporter.
fn by_poll(node: &StaticFields, polled: &NodeMetricStatus, at: Timestamp) -> NodeMetricStatus {
    NodeMetricStatus {
        timestamp: Some(Time(at)),
        capacity: capacity(&node.facts),
        ..polled.clone()
    }
}

/// Status from the Lease and the `NodeWatermark`, for an agent that does not report.
fn by_heartbeat(node: &StaticFields, known: &NodeKnowledge) -> NodeMetricStatus {
    let (rules, heartbeat) = (known.rules.as_ref(), known.heartbeat.as_ref());
    let used = heartbeat.map(|heartbeat| used(&node.facts, &heartbeat.summary));
    NodeMetricStatus {
        timestamp: heartbeat.and_then(|heartbeat| heartbeat.time.clone()),
        agent: agent(known),
        capacity: capacity(&node.facts),
        usage: Usage {
            node: used.unwrap_or_default(),
            ..Usage::default()
        },
        rules: rules.map(|rules| rules.counts),
        breached: rules.map_or_else(Vec::new, |rules| rules.breached.clone()),
        ..NodeMetricStatus::default()
    }
}

fn capacity(facts: &NodeFacts) -> Amounts {
    let kibibytes = facts.memory.0 / 1024;
    Amounts {
        cpu: (facts.cpus > 0).then(|| Quantity(facts.cpus.to_string())),
        memory: (kibibytes > 0).then(|| Quantity(format!("{kibibytes}Ki"))),
    }
}

/// Usage from the percentages of a heartbeat (one decimal) and the Node's capacity.
fn used(facts: &NodeFacts, summary: &Summary) -> Amounts {
    let part = |of: f64, percent: Option<Percent>| {
        percent
            .filter(|_| of > 0.0)
            .map(|percent| of * percent.value() / 100.0)
    };
    let millicores = part(f64::from(facts.cpus) * 1000.0, summary.cpu);
    let mebibytes = part((facts.memory.0 >> 20) as f64, summary.memory);
    Amounts {
        cpu: millicores.map(|amount| Quantity(format!("{amount:.0}m"))),
        memory: mebibytes.map(|amount| Quantity(format!("{amount:.0}Mi"))),
    }
}

fn agent(known: &NodeKnowledge) -> Option<ReportingAgent> {
    let (rules, heartbeat) = (known.rules.as_ref()?, known.heartbeat.as_ref()?);
    Some(ReportingAgent {
        version: rules.version.clone(),
        boot_id: rules.boot_id.clone(),
        sequence: heartbeat.summary.sequence?.try_into().ok()?,
    })
}

fn healthy(node: &StaticFields, known: &NodeKnowledge) -> Condition {
    let (status, reason, message) = match known.health {
        Reachability::Unknown if known.polled.is_some() => (
            "Unknown",
            reason::POLLED,
            "no agent renews its Lease or reports; the figures are from an exporter that the controller polls",
        ),
        Reachability::Reporting if known.polled.is_some() => (
            "True",
            reason::REPORTING,
            "the agent renews its Lease but does not report to the controller; the figures are from an exporter that the controller polls",
        ),
        Reachability::Unresponsive if known.polled.is_some() => (
            "False",
            reason::UNRESPONSIVE,
            "the agent has neither reported nor renewed its Lease for too long; the figures are from an exporter that the controller polls",
        ),
        Reachability::Unknown => (
            "Unknown",
            reason::NO_REPORT,
            "no measurement of this node was received: no agent renews its Lease or reports",
        ),
        Reachability::Reporting if known.report.is_some() => (
            "True",
            reason::REPORTING,
            "the agent reports to the controller",
        ),
        Reachability::Reporting => (
            "True",
            reason::REPORTING,
            "the agent renews its Lease but does not report to the controller: the figures are from the summary in the Lease",
        ),
        Reachability::Unresponsive => (
            "False",
            reason::UNRESPONSIVE,
            "the agent has neither reported nor renewed its Lease for too long; the figures are the last it sent",
        ),
    };
    // If no agent was ever seen, the condition dates from the Node's creation.
    let since = known.since.map(Time).or_else(|| node.created.clone());
    Condition {
        type_: HEALTHY.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
        last_transition_time: since.unwrap_or(Time(Timestamp::UNIX_EPOCH)),
        observed_generation: None,
    }
}

/// Derived from the Node's name, so that it is stable.
fn own_uid(node: &str) -> String {
    let digest = digest(&SHA256, format!("NodeMetric of {node}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.as_ref()[..16]);
    // Version 8 of RFC 9562: custom.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = format!("{:032x}", u128::from_be_bytes(bytes));
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    parts.join("-")
}
