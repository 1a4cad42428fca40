//! Plimsoll's two ways, by its real code: when an agent writes the label and what it is worth, and the extender.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use plimsoll::agent::load_signs::WantedSigns;
use plimsoll::agent::load_signs::schedule::{SeenSigns, SignSchedule, SignStep};
use plimsoll::agent::report::node_metric;
use plimsoll::crd::NodeMetricStatus;
use plimsoll::crd::crane_annotations::CraneAnnotations;
use plimsoll::crd::load_label::{DEFAULT_HEADROOM, LoadLabel};
use plimsoll::engine::units::{Bytes, MilliCpu};
use plimsoll::metrics_api::loads::{ByNode, KnownLoad};
use plimsoll::scheduler_api::extender::{Extender, ExtenderRequest};
use serde::Deserialize;
use serde_json::json;

use super::in_tree::{base, normalized};
use super::node::{CAPACITY, Node};
use super::{Placing, Scheduler, TICK, boot_time};

/// The weight of `NodeAffinity` in kube-scheduler's default profile, which has the label's terms.
const LABEL_WEIGHT: i64 = 2;
/// The weight of the extender that docs/scheduling-integrations.md recommends. A point of an extender is ten of the scheduler's.
const EXTENDER_WEIGHT: i64 = 5;

/// What the label's terms add up to for a node.
pub fn headroom(label: Option<&str>) -> i64 {
    let label = label.and_then(LoadLabel::parse);
    i64::from(label.map_or(DEFAULT_HEADROOM, LoadLabel::headroom))
}

/// The points of the label beside those of requests, for nodes with these labels.
pub fn label_points<'a>(labels: impl Iterator<Item = Option<&'a str>>) -> Vec<i64> {
    let sums: Vec<i64> = labels.map(headroom).collect();
    let points = normalized(&sums).into_iter();
    points.map(|points| points * LABEL_WEIGHT).collect()
}

/// The label of a node, written when its agent would.
#[derive(Debug)]
pub struct Written {
    pub label: Option<String>,
    schedule: SignSchedule,
}

/// kube-scheduler with the label's terms.
#[derive(Debug)]
pub struct Label {
    nodes: Vec<Written>,
}

impl Label {
    pub fn new(nodes: usize) -> Self {
        Self {
            nodes: (0..nodes).map(Written::new).collect(),
        }
    }
}

impl Written {
    /// For the node of this number.
    pub fn new(index: usize) -> Self {
        Self {
            label: None,
            schedule: SignSchedule::new(Rng::with_seed(index as u64)),
        }
    }

    /// For a load in percent, if it is known, `now` seconds after boot.
    pub fn write(&mut self, now: f64, load: Option<f64>) {
        let wants = WantedSigns {
            load,
            ..WantedSigns::default()
        };
        let seen = SeenSigns {
            label: self.label.as_deref(),
            crane: &CraneAnnotations::default(),
        };
        let now = boot_time(now);
        if let SignStep::Write(parts) = self.schedule.step(now, &wants, seen) {
            if parts.label {
                self.label = load.and_then(LoadLabel::of).map(|it| it.to_string());
            }
            self.schedule.written(now, parts);
        }
    }
}

fn percent(node: &Node) -> Option<f64> {
    node.load.as_ref().map(|load| load.percent)
}

impl Scheduler for Label {
    /// docs/internals/scheduling-comparison.md: within 1.5 s.
    fn delay(&self) -> f64 {
        1.5
    }

    fn ticked(&mut self, now: f64, nodes: &[Node]) {
        for (node, written) in nodes.iter().zip(&mut self.nodes) {
            written.write(now, percent(node));
        }
    }

    fn refreshed(&mut self, now: f64, index: usize, node: &Node) {
        self.nodes[index].write(now, percent(node));
    }

    fn points(
        &mut self,
        _now: f64,
        pod: &Placing,
        feasible: &[usize],
        nodes: &[Node],
    ) -> Vec<Option<i64>> {
        let labels = feasible
            .iter()
            .map(|index| self.nodes[*index].label.as_deref());
        let points = label_points(labels).into_iter().zip(feasible);
        points
            .map(|(points, index)| Some(base(&nodes[*index], pod) + points))
            .collect()
    }
}

/// kube-scheduler with the extender.
#[derive(Debug, Default)]
pub struct ByExtender {
    extender: Extender,
    reports: ByNode,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct HostPriority {
    score: i64,
}

impl ByExtender {
    fn report(&mut self, now: f64, node: &Node) {
        let status = NodeMetricStatus {
            load: node.load.as_ref().map(node_metric::load),
            ..NodeMetricStatus::default()
        };
        let report = KnownLoad {
            polled: false,
            at: boot_time(now),
            interval: Duration::from_secs(TICK),
            cpu: MilliCpu(CAPACITY[0]),
            memory: Bytes(CAPACITY[1]),
            status: Arc::new(status),
        };
        self.reports.insert(Arc::clone(&node.name), Some(report));
    }
}

/// As kube-scheduler sends it with `nodeCacheCapable: true`.
fn body(pod: &Placing, names: &[&str]) -> Vec<u8> {
    let [cpu, memory] = pod.requests;
    let requests = json!({"cpu": format!("{cpu}m"), "memory": memory.to_string()});
    let container = json!({"name": "main", "resources": {"requests": requests}});
    let metadata = json!({"name": pod.uid(), "namespace": "batch", "uid": pod.uid()});
    json!({
        "Pod": {"metadata": metadata, "spec": {"containers": [container]}},
        "NodeNames": names,
    })
    .to_string()
    .into_bytes()
}

impl Scheduler for ByExtender {
    /// A report follows a change of the pods within a second.
    fn delay(&self) -> f64 {
        1.0
    }

    fn ticked(&mut self, now: f64, nodes: &[Node]) {
        for node in nodes {
            self.report(now, node);
        }
    }

    fn refreshed(&mut self, now: f64, _index: usize, node: &Node) {
        self.report(now, node);
    }

    fn points(
        &mut self,
        now: f64,
        pod: &Placing,
        feasible: &[usize],
        nodes: &[Node],
    ) -> Vec<Option<i64>> {
        let names: Vec<&str> = feasible.iter().map(|index| &*nodes[*index].name).collect();
        let body = body(pod, &names);
        let request = ExtenderRequest::read(&body).unwrap();
        let answer = self
            .extender
            .prioritize(&request, &self.reports, boot_time(now));
        let scores: Vec<HostPriority> = serde_json::from_slice(&answer.body).unwrap();
        let points = feasible.iter().zip(scores).map(|(index, extended)| {
            Some(base(&nodes[*index], pod) + extended.score * 10 * EXTENDER_WEIGHT)
        });
        points.collect()
    }
}
