//! From what is known of a node to its `NodeMetric`. Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use ring::digest::{SHA256, digest};

use crate::crd::node_metric::condition::{HEALTHY, reason};
use crate::crd::node_metric::{Amounts, MOST_BREACHED, ReportingAgent, RuleCounts, Usage};
use crate::crd::summary::Percent;
use crate::crd::{NodeMetricStatus, NodeWatermarkStatus, Summary};
use crate::engine::policy::NodeFacts;

use super::store::Content;
use super::table;

/// A Node, as far as it is used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeKnown {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.creationTimestamp`.
    pub created: Option<Time>,
    /// `status.nodeInfo.bootID`, which its kubelet writes; empty: it did not.
    pub boot_id: String,
    /// Labels and capacity.
    pub facts: NodeFacts,
}

/// A Node, with what its object says however loaded it is: made once, not with each report.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// `metadata.uid` of the Node.
    pub uid: String,
    created: Option<Time>,
    /// Capacity; the labels are beside.
    facts: NodeFacts,
    labels: Arc<BTreeMap<String, String>>,
    /// As [`Content`] has it.
    metadata: Arc<str>,
}

impl Frame {
    /// Of this Node. The UID and age of the object are the same after every failover.
    ///
    /// # Errors
    /// It can't be written as JSON.
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
}

/// What an agent said of its rules, and of itself, in the `NodeWatermark`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RulesKnown {
    counts: RuleCounts,
    breached: Vec<String>,
    version: String,
    boot_id: String,
}

impl RulesKnown {
    /// Of a status; `None`: no agent wrote one.
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
                .take(MOST_BREACHED)
                .collect(),
            version: agent.version.clone(),
            boot_id: agent.boot_id.clone(),
        })
    }
}

/// What an agent's Lease says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Heartbeat {
    /// When it was renewed, by the node's clock.
    pub time: Option<Time>,
    /// The node's load.
    pub summary: Summary,
}

/// What is known of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// Nothing.
    #[default]
    Unknown,
    /// It reports.
    Reporting,
    /// It did, but has not for longer than its grace.
    Silent,
}

/// All that is known of one node's load and agent.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// What its agent wrote of its rules.
    pub rules: Option<RulesKnown>,
    /// What its agent's Lease says.
    pub heartbeat: Option<Heartbeat>,
    /// When that was seen, by this replica's clock.
    pub beaten: Option<Timestamp>,
    /// What its agent reported, unless that is so old that the heartbeat says more.
    pub report: Option<Arc<NodeMetricStatus>>,
    /// When that came, by this replica's clock.
    pub reported: Option<Timestamp>,
    /// How its agent is.
    pub health: Health,
    /// Since when, as far as this replica knows.
    pub since: Option<Timestamp>,
}

/// The object of a node, as the store keeps it.
///
/// # Errors
/// It can't be written as JSON.
pub fn content(name: &str, node: &Frame, known: &Known) -> serde_json::Result<Content> {
    let (mut status, heard) = match &known.report {
        Some(report) => (NodeMetricStatus::clone(report), known.reported),
        None => (by_heartbeat(node, known), known.beaten),
    };
    status.conditions = vec![healthy(node, known)];
    Ok(Content {
        labels: Arc::clone(&node.labels),
        metadata: Arc::clone(&node.metadata),
        status: serde_json::to_string(&status)?.into(),
        cells: table::row(name, node.created.as_ref(), heard, &status),
    })
}

/// What the Lease and the `NodeWatermark` of an agent say that does not report.
fn by_heartbeat(node: &Frame, known: &Known) -> NodeMetricStatus {
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

/// From the percentages of a heartbeat, which has them to a tenth: amounts of what the Node says it has.
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

fn agent(known: &Known) -> Option<ReportingAgent> {
    let (rules, heartbeat) = (known.rules.as_ref()?, known.heartbeat.as_ref()?);
    Some(ReportingAgent {
        version: rules.version.clone(),
        boot_id: rules.boot_id.clone(),
        sequence: heartbeat.summary.sequence?.try_into().ok()?,
    })
}

fn healthy(node: &Frame, known: &Known) -> Condition {
    let (status, reason, message) = match known.health {
        Health::Unknown => (
            "Unknown",
            reason::NO_REPORT,
            "no measurement of this node has arrived: no agent holds its Lease, or reports",
        ),
        Health::Reporting if known.report.is_some() => (
            "True",
            reason::REPORTING,
            "the agent reports to the controller",
        ),
        Health::Reporting => (
            "True",
            reason::REPORTING,
            "the agent renews its Lease, whose summary the figures are from: it does not report to the controller",
        ),
        Health::Silent => (
            "False",
            reason::SILENT,
            "the agent has neither reported nor renewed its Lease for too long; the figures are its last",
        ),
    };
    // Where nothing ever was heard, it was so since the node is there.
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

/// Of the Node's, so that it is stable, and other than that.
fn own_uid(node: &str) -> String {
    let digest = digest(&SHA256, format!("NodeMetric of {node}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.as_ref()[..16]);
    // Version 8, "of one's own making", of RFC 9562.
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
