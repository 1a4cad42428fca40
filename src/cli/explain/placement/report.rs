//! What is said of each node. Pure.

use std::fmt;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as k8s;
use serde::Serialize;

use super::pod::ExplainedPod;
use super::scheduler_views::{CraneLine, SchedulerViews};
use crate::cluster::nodes::tolerates;
use crate::crd::NodeMetricStatus;
use crate::crd::load_label::{DEFAULT_HEADROOM, FULL, KEY, LoadLabel};
use crate::crd::node_metric::condition::HEALTHY;
use crate::crd::node_metric::{Load, PressureLoad, ResourceLoad};
use crate::crd::node_selector::{NodeView, selects};
use crate::metrics_api::table::{age, bytes, millicores};
use crate::preview::Table;

/// A node as the cluster has it.
pub struct ExplainedNode {
    pub node: k8s::Node,
    pub status: NodeMetricStatus,
}

/// The nodes, the best first.
#[derive(Debug, Serialize)]
pub struct Explanation {
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<PodLine>,
    nodes: Vec<NodeLine>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodLine {
    name: String,
    cpu_millicores: u64,
    memory_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    scheduler: Option<String>,
}

/// One node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct NodeLine {
    node: String,
    /// Percent of the load line.
    load: Option<f64>,
    with_pod: Option<f64>,
    label: Option<String>,
    /// What the terms of the label add up to.
    score: u8,
    #[serde(flatten)]
    views: SchedulerViews,
    age_seconds: Option<i64>,
    #[serde(flatten)]
    terms: Terms,
    /// The pod may run there, as far as its own spec says.
    candidate: bool,
    notes: Vec<String>,
}

#[derive(Debug, Default, Serialize)]
struct Terms {
    worst: Option<String>,
    cpu: Option<ResourceLoad>,
    memory: Option<ResourceLoad>,
    /// The rule over pressure, or over another metric and above its threshold, that is closest to acting.
    pressure: Option<PressureLoad>,
}

impl Explanation {
    /// Explains the nodes at `now`, for a pod if there is one.
    pub fn new(pod: Option<&ExplainedPod>, nodes: Vec<ExplainedNode>, now: Timestamp) -> Self {
        let mut nodes: Vec<NodeLine> = nodes
            .into_iter()
            .map(|node| NodeLine::new(pod, &node, now))
            .collect();
        nodes.sort_by(|a, b| {
            let load = |it: &NodeLine| it.with_pod.or(it.load).unwrap_or(f64::INFINITY);
            let order = b.candidate.cmp(&a.candidate).then(b.score.cmp(&a.score));
            order
                .then(load(a).total_cmp(&load(b)))
                .then_with(|| a.node.cmp(&b.node))
        });
        let pod = pod.map(|pod| PodLine {
            name: pod.name.clone(),
            cpu_millicores: pod.cpu.0,
            memory_bytes: pod.memory.0,
            scheduler: pod.scheduler.clone(),
        });
        Self { pod, nodes }
    }

    /// The first candidates only.
    pub fn best(mut self, number: usize) -> Self {
        self.nodes.retain(|node| node.candidate);
        self.nodes.truncate(number);
        self
    }

    /// The nodes, each in a line.
    pub fn lines(&self) -> Vec<String> {
        if self.nodes.is_empty() {
            return vec!["none: no node is a candidate (plimsoll explain placement)".to_owned()];
        }
        self.nodes.iter().map(NodeLine::sentence).collect()
    }
}

impl NodeLine {
    fn new(pod: Option<&ExplainedPod>, input: &ExplainedNode, now: Timestamp) -> Self {
        let ExplainedNode { node, status } = input;
        let name = node.metadata.name.clone().unwrap_or_default();
        let labels = node.metadata.labels.as_ref();
        let label = labels.and_then(|labels| labels.get(KEY).cloned());
        let read = label.as_deref().and_then(LoadLabel::parse);
        let healthy = is_healthy(status);
        let load = status.load.as_ref().filter(|_| healthy);
        let passed_over = pod.map_or_else(Vec::new, |pod| passed_over(pod, node, &name));
        let mut notes = passed_over.clone();
        let with_pod = load
            .zip(pod)
            .and_then(|(load, pod)| with_pod(load, pod, status, &name));
        let percent = load.map(|load| load.percent);
        let views = SchedulerViews::of(node, with_pod.or(percent));
        notes.extend(load.and_then(beside_columns));
        notes.extend(signs(&views, label.as_deref(), load, healthy));
        let age = status.timestamp.as_ref();
        let age = age.map(|time| (now.as_second() - time.0.as_second()).max(0));
        Self {
            load: percent,
            with_pod,
            views,
            score: read.map_or(DEFAULT_HEADROOM, LoadLabel::headroom),
            label,
            age_seconds: age,
            terms: load.map_or_else(Terms::default, |load| Terms {
                worst: Some(load.worst.clone()),
                cpu: Some(load.cpu.clone()),
                memory: Some(load.memory.clone()),
                pressure: load.pressure.clone(),
            }),
            candidate: passed_over.is_empty(),
            node: name,
            notes,
        }
    }

    fn sentence(&self) -> String {
        let percent = |percent: Option<f64>| or_unknown(percent.map(|it| format!("{it:.0} %")));
        let (load, with_pod) = (percent(self.load), percent(self.with_pod));
        let mut parts = vec![format!("{}: load {load}, with it {with_pod}", self.node)];
        parts.extend(self.notes.iter().cloned());
        parts.join("; ")
    }

    fn cells(&self, pod: bool, crane: bool) -> Vec<String> {
        let percent = |percent: Option<f64>| or_unknown(percent.map(|it| format!("{it:.0}")));
        let resource = |of: Option<&ResourceLoad>| {
            or_unknown(of.map(|of| {
                let peak = of.history.unwrap_or_default();
                let basis = if peak > of.expected { " (peak)" } else { "" };
                format!("{:.0}{basis} of {:.0}", of.expected.max(peak), of.line)
            }))
        };
        let mut cells = vec![self.node.clone(), percent(self.load)];
        if pod {
            cells.push(percent(self.with_pod));
        }
        cells.extend([
            self.label.clone().unwrap_or_else(|| "-".to_owned()),
            self.score.to_string(),
            or_unknown(self.views.extender.map(|it| format!("{it:.1}"))),
        ]);
        if crane {
            let cell = self.views.crane.as_ref().map(CraneLine::cell);
            cells.push(cell.unwrap_or_else(|| "-".to_owned()));
        }
        cells.extend([
            resource(self.terms.cpu.as_ref()),
            resource(self.terms.memory.as_ref()),
            or_unknown(self.age_seconds.map(age)),
            self.notes.join("; "),
        ]);
        cells
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pod) = &self.pod {
            writeln!(
                f,
                "{} is expected to use {}m CPU and {} MiB memory\n",
                pod.name,
                pod.cpu_millicores,
                pod.memory_bytes >> 20
            )?;
        }
        let mut header = vec!["NODE", "LOAD"];
        if self.pod.is_some() {
            header.push("WITH POD");
        }
        header.extend(["LABEL", "SCORE", "EXTENDER"]);
        let right: &[usize] = if self.pod.is_some() {
            &[1, 2, 3, 4, 5]
        } else {
            &[1, 2, 3, 4]
        };
        let crane = self.nodes.iter().any(|node| node.views.crane.is_some());
        if crane {
            header.push("CRANE");
        }
        header.extend(["CPU% OF LINE", "MEM% OF LINE", "MEASURED", "NOTES"]);
        let mut table = Table::new(&header, right);
        for node in &self.nodes {
            table.push(node.cells(self.pod.is_some(), crane));
        }
        write!(f, "{table}")
    }
}

fn or_unknown(text: Option<String>) -> String {
    text.unwrap_or_else(|| "?".to_owned())
}

fn is_healthy(status: &NodeMetricStatus) -> bool {
    let mut conditions = status.conditions.iter();
    let healthy = conditions.find(|condition| condition.type_ == HEALTHY);
    healthy.is_some_and(|condition| condition.status == "True")
}

/// The load after the start of the pod; unchanged where it runs already.
fn with_pod(load: &Load, pod: &ExplainedPod, status: &NodeMetricStatus, node: &str) -> Option<f64> {
    if pod.node.as_deref() == Some(node) {
        return Some(load.percent);
    }
    let capacity = &status.capacity;
    let cpus = millicores(capacity.cpu.as_ref())?.0 as f64;
    let total = bytes(capacity.memory.as_ref())?.0 as f64;
    let after = |of: &ResourceLoad, share: f64| {
        let used = of.expected.max(of.history.unwrap_or_default());
        (used + share * 100.0) / of.line * 100.0
    };
    let cpu = after(&load.cpu, pod.cpu.0 as f64 / cpus);
    let memory = after(&load.memory, pod.memory.0 as f64 / total);
    Some(load.percent.max(cpu).max(memory))
}

/// Why the pod does not run on the node, by its own spec.
fn passed_over(pod: &ExplainedPod, node: &k8s::Node, name: &str) -> Vec<String> {
    let spec = node.spec.as_ref();
    let mut why = Vec::new();
    let view = NodeView {
        name,
        labels: node.metadata.labels.as_ref(),
    };
    if selects(&pod.placement, view) == Some(false) {
        why.push("not selected by the pod's nodeSelector or node affinity".to_owned());
    }
    let taints = spec.and_then(|spec| spec.taints.as_ref());
    for it in taints.into_iter().flatten() {
        let hard = matches!(&*it.effect, "NoSchedule" | "NoExecute");
        if hard
            && !pod
                .tolerations
                .iter()
                .any(|toleration| tolerates(toleration, it))
        {
            why.push(format!("taint {}:{} is not tolerated", it.key, it.effect));
        }
    }
    why
}

/// What decides the load, where that is not in the columns of CPU and memory.
fn beside_columns(load: &Load) -> Option<String> {
    let resource = match load.worst.as_str() {
        "cpu" => &load.cpu,
        "memory" => &load.memory,
        _ => {
            let pressure = load.pressure.as_ref()?;
            let (rule, percent) = (&pressure.rule, pressure.percent);
            return Some(format!("rule {rule} is at {percent:.0} % of its threshold"));
        }
    };
    let used = resource.expected.max(resource.history.unwrap_or_default());
    let shown = used / resource.line * 100.0;
    (resource.percent > shown + 1.0).then(|| {
        format!(
            "a rule over {} is, or was last, above its threshold",
            load.worst
        )
    })
}

/// What schedulers see of the node's load, and what is wrong with it.
fn signs(
    views: &SchedulerViews,
    label: Option<&str>,
    load: Option<&Load>,
    healthy: bool,
) -> Vec<String> {
    let mut notes = Vec::new();
    if views.soft_taint {
        notes.push("busy: avoided if another node is free".to_owned());
    }
    if !healthy {
        notes.push("its agent does not report".to_owned());
    }
    if !views.crane_of_others.is_empty() {
        notes.push("another writer sets crane's annotations".to_owned());
    }
    let read = label.and_then(LoadLabel::parse);
    match (label, read, load) {
        (Some(text), None, _) => notes.push(format!(
            "the label {text:?} is not a valid load: counts as 80"
        )),
        (None, ..) => notes.push("no label: counts as 80".to_owned()),
        (_, Some(label), Some(load)) => {
            let measured = LoadLabel::of(load.percent);
            if measured.is_some_and(|it| it.headroom() != label.headroom()) {
                notes.push("the label lags behind, or is not its agent's".to_owned());
            }
        }
        _ => {}
    }
    if read.is_some_and(|label| label >= FULL) {
        notes.push("above 90 % of its load line: avoided".to_owned());
    }
    notes
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn now() -> Timestamp {
        "2026-01-01T12:00:00Z".parse().expect("a time")
    }

    fn input(name: &str, label: Option<&str>, percent: Option<f64>, spec: &Value) -> ExplainedNode {
        let node = json!({"metadata": {"name": name, "labels": {KEY: label}}, "spec": spec});
        let mut node: k8s::Node = {
            let mut node = node;
            if label.is_none() {
                node["metadata"]["labels"] = json!({});
            }
            serde_json::from_value(node).expect("a node")
        };
        node.status = None;
        let load = percent.map(|percent| {
            json!({"percent": percent, "worst": "cpu", "cpu": {"percent": percent, "expected": percent * 0.8, "newcomers": 0.0, "line": 80.0},
                "memory": {"percent": 27.8, "expected": 20.0, "newcomers": 0.0, "line": 90.0}})
        });
        let status = json!({
            "timestamp": "2026-01-01T11:59:57Z", "capacity": {"cpu": "4", "memory": "8Gi"}, "load": load,
            "conditions": [{"type": "Healthy", "status": if percent.is_some() {"True"} else {"Unknown"}, "reason": "r",
                "message": "", "lastTransitionTime": "2026-01-01T11:00:00Z"}],
        });
        ExplainedNode {
            node,
            status: serde_json::from_value(status).expect("a status"),
        }
    }

    fn cluster() -> Vec<ExplainedNode> {
        let taint = json!({"taints": [{"key": "gpu", "effect": "NoSchedule"}]});
        let busy = json!({"taints": [{"key": "plimsoll.dev/busy", "effect": "PreferNoSchedule"}]});
        vec![
            input("hot", Some("100"), Some(97.0), &busy),
            input("normal", Some("50"), Some(50.0), &json!({})),
            input("gpu", Some("10"), Some(10.0), &taint),
            input("lost", None, None, &json!({})),
            input("odd", Some("idle"), Some(30.0), &json!({})),
        ]
    }

    fn pod() -> ExplainedPod {
        let spec = json!({"containers": [{"name": "c", "resources": {"requests": {"cpu": "2", "memory": "1Gi"}}}]});
        ExplainedPod::of(&json!({"metadata": {"name": "p", "namespace": "n"}, "spec": spec}))
            .expect("a pod")
    }

    #[test]
    fn nodes_are_ordered_as_a_scheduler_sees_them() {
        let shown = Explanation::new(Some(&pod()), cluster(), now());
        let names: Vec<&str> = shown.nodes.iter().map(|it| it.node.as_str()).collect();
        assert_eq!(names, ["normal", "odd", "lost", "hot", "gpu"], "{shown}");
        let scores: Vec<u8> = shown.nodes.iter().map(|it| it.score).collect();
        assert_eq!(scores, [8, 4, 4, 0, 8]);
        // 0.85 of 2 of 4 CPUs is 42.5 percent, of a line of 80.
        assert_eq!(shown.nodes[0].with_pod, Some((40.0 + 42.5) / 80.0 * 100.0));
        assert!(!shown.nodes[4].candidate, "{shown}");
        let best = shown.best(2).lines();
        let first = "normal: load 50 %, with it 103 %";
        assert!(best.len() == 2 && best[0].starts_with(first), "{best:?}");
        let none = Explanation::new(Some(&pod()), Vec::new(), now()).best(2);
        assert!(none.lines()[0].starts_with("none: "), "no candidates");
    }

    #[test]
    fn what_is_wrong_is_in_the_notes() {
        let text = Explanation::new(Some(&pod()), cluster(), now()).to_string();
        for part in [
            "n/p is expected to use 1700m CPU and 716 MiB memory",
            "taint gpu:NoSchedule is not tolerated",
            "its agent does not report; no label: counts as 80",
            "the label \"idle\" is not a valid load: counts as 80",
            "busy: avoided if another node is free; above 90 % of its load line",
            "40 of 80",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        let without = Explanation::new(None, cluster(), now()).to_string();
        assert!(!without.contains("WITH POD"), "{without}");
        assert!(!text.contains("CRANE"), "no agent writes them: {text}");
    }

    #[test]
    fn a_load_that_no_column_shows_is_explained() {
        let text = |change: fn(&mut Load)| {
            let mut node = input("n", Some("50"), Some(50.0), &json!({}));
            change(node.status.load.as_mut().expect("a load"));
            Explanation::new(None, vec![node], now()).to_string()
        };
        assert!(!text(|_| ()).contains("threshold"), "40 of 80");
        let over = text(|load| load.cpu.percent = 112.5);
        assert!(
            over.contains("a rule over cpu is, or was last, above its threshold"),
            "{over}"
        );
        let waiting = text(|load| {
            load.worst = "pressure".to_owned();
            load.pressure = Some(PressureLoad {
                rule: "q/wait".to_owned(),
                percent: 150.0,
            });
        });
        assert!(
            waiting.contains("rule q/wait is at 150 % of its threshold"),
            "{waiting}"
        );
    }

    #[test]
    fn each_view_has_its_column() {
        let mut nodes = cluster();
        let time = "2026-01-01T12:00:00Z";
        let annotations = [
            ("plimsoll.dev/crane-annotations", time.to_owned()),
            ("cpu_usage_avg_5m", format!("0.50000,{time}")),
            ("node_hot_value", format!("1.2,{time}")),
        ];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value));
        nodes[1].node.metadata.annotations = Some(annotations.into_iter().collect());
        let shown = Explanation::new(None, nodes, now());
        let text = shown.to_string();
        let normal = text.lines().find(|line| line.starts_with("normal"));
        let words: Vec<&str> = normal.expect("its line").split_whitespace().collect();
        // (95 - 50) / 95 of 9 points.
        assert_eq!(
            words[..7],
            ["normal", "50", "50", "8", "4.3", "50/?", "hot"],
            "{text}"
        );
        let json = serde_json::to_value(&shown).expect("JSON");
        assert_eq!(json["nodes"][1]["crane"]["hot"], 1.2);
        assert_eq!(json["nodes"][1]["extender"], 4.3);
        let hot = json["nodes"].as_array().expect("nodes").iter();
        let busy: Vec<bool> = hot.map(|node| node["softTaint"] == true).collect();
        assert_eq!(busy.iter().filter(|it| **it).count(), 1, "{text}");
    }

    #[test]
    fn a_label_that_the_load_does_not_bear_out_is_noted() {
        let lying = vec![input("n", Some("0"), Some(97.0), &json!({}))];
        let text = Explanation::new(None, lying, now()).to_string();
        assert!(text.contains("not its agent's"), "{text}");
        let same = vec![input("n", Some("0"), Some(55.0), &json!({}))];
        let text = Explanation::new(None, same, now()).to_string();
        assert!(
            !text.contains("not its agent's"),
            "loads up to 60 count alike: {text}"
        );
    }
}
