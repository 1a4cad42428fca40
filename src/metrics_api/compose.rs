//! From what is known of a node to its `NodeMetric`. Pure.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use ring::digest::{SHA256, digest};

use crate::crd::node_metric::condition::{HEALTHY, reason};
use crate::crd::node_metric::{Amounts, MOST_BREACHED, RuleCounts};
use crate::crd::{NodeMetric, NodeMetricStatus, NodeWatermarkStatus};
use crate::engine::policy::NodeFacts;

use super::cache::hex;
use super::store::Content;
use super::table;

/// A Node, as far as it is used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeKnown {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.creationTimestamp`.
    pub created: Option<Time>,
    /// Labels and capacity.
    pub facts: NodeFacts,
}

/// What an agent said of its rules in the `NodeWatermark`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RulesKnown {
    counts: RuleCounts,
    breached: Vec<String>,
}

impl RulesKnown {
    /// Of a status; `None`: no agent wrote one.
    pub fn of(status: &NodeWatermarkStatus) -> Option<Self> {
        status.agent.as_ref()?;
        let count = |is: fn(&str) -> bool| {
            let rules = status.rules.iter().filter(|rule| is(&rule.state));
            i64::try_from(rules.count()).unwrap_or(i64::MAX)
        };
        let unknown = status
            .rules
            .iter()
            .filter(|rule| rule.unknown.is_some())
            .count();
        let breached = status.rules.iter().filter(|rule| rule.state == "Breached");
        Some(Self {
            counts: RuleCounts {
                total: count(|_| true),
                breached: count(|state| state == "Breached"),
                cooling: count(|state| state == "Cooling"),
                unknown: i64::try_from(unknown).unwrap_or(i64::MAX),
            },
            breached: breached
                .map(|rule| rule.id.clone())
                .take(MOST_BREACHED)
                .collect(),
        })
    }
}

/// The object of a node. Its UID and age are the same after every failover.
pub fn compose(name: &str, node: &NodeKnown, rules: Option<&RulesKnown>) -> NodeMetric {
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        uid: Some(uid(&node.uid)),
        creation_timestamp: node.created.clone(),
        labels: Some(node.facts.labels.clone()).filter(|labels| !labels.is_empty()),
        ..ObjectMeta::default()
    };
    let status = NodeMetricStatus {
        capacity: capacity(&node.facts),
        rules: rules.map(|rules| rules.counts),
        breached: rules.map_or_else(Vec::new, |rules| rules.breached.clone()),
        conditions: vec![unreported(node)],
        ..NodeMetricStatus::default()
    };
    NodeMetric { metadata, status }
}

fn capacity(facts: &NodeFacts) -> Amounts {
    let kibibytes = facts.memory.0 / 1024;
    Amounts {
        cpu: (facts.cpus > 0).then(|| Quantity(facts.cpus.to_string())),
        memory: (kibibytes > 0).then(|| Quantity(format!("{kibibytes}Ki"))),
    }
}

/// Since when nothing was heard is not known: at least since the node is there.
fn unreported(node: &NodeKnown) -> Condition {
    Condition {
        type_: HEALTHY.to_owned(),
        status: "Unknown".to_owned(),
        reason: reason::NO_REPORT.to_owned(),
        message: "no measurement of this node has arrived".to_owned(),
        last_transition_time: node
            .created
            .clone()
            .unwrap_or(Time(jiff::Timestamp::UNIX_EPOCH)),
        observed_generation: None,
    }
}

/// Of the Node's, so that it is stable, and other than that.
fn uid(node: &str) -> String {
    let digest = digest(&SHA256, format!("NodeMetric of {node}").as_bytes());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest.as_ref()[..16]);
    // Version 8, "of one's own making", of RFC 9562.
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = hex(&bytes);
    let parts = [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ];
    parts.join("-")
}

/// As the store keeps it.
///
/// # Errors
/// It can't be written as JSON.
pub fn content(metric: NodeMetric) -> serde_json::Result<Content> {
    let metadata = serde_json::to_string(&metric.metadata)?;
    let metadata = metadata
        .strip_prefix('{')
        .and_then(|rest| rest.strip_suffix('}'));
    Ok(Content {
        metadata: metadata.unwrap_or_default().to_owned(),
        status: serde_json::to_string(&metric.status)?,
        cells: table::row(&metric),
        labels: metric.metadata.labels.unwrap_or_default(),
    })
}
