//! The screen of `plimsoll top pods`. Pure.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::{Deserialize, Serialize};

use super::view::{
    AgentState, Sort, agent_state, heartbeat, or_unknown, seconds, since, write_hidden,
    write_notes, write_table,
};
use crate::cli::color;
use crate::crd::NodeMetric;
use crate::crd::node_metric::{MAX_PODS, PodUsage};
use crate::crd::node_watermark::{BurstStatus, ThrottledStatus};
use crate::crd::summary::Percent;
use crate::crd::words::named;
use crate::engine::units::{Bytes, MilliCpu};
use crate::metrics_api::table;
use crate::preview::Table;

/// Maximum number of names in a note.
const MAX_NAMED: usize = 10;

/// What agents did to pods, by node.
pub(super) type Throttled = BTreeMap<String, HeldPods>;

/// What the agent of a node did to pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct HeldPods {
    pub(super) throttled: Vec<ThrottledStatus>,
    pub(super) bursts: Vec<BurstStatus>,
}

/// One pod.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PodRow {
    namespace: String,
    name: String,
    node: String,
    agent: AgentState,
    #[serde(rename = "ageSeconds", serialize_with = "seconds")]
    age: Option<Duration>,
    #[serde(rename = "cpuMillicores")]
    cpu: Option<MilliCpu>,
    #[serde(rename = "memoryBytes")]
    memory: Option<Bytes>,
    /// Percent of time in which some thread waited for CPU, memory or I/O.
    pressure: [Option<Percent>; 3],
    /// `None` if unknown.
    throttled: Option<bool>,
    /// The throttle, if it is throttled.
    throttle: Option<ThrottledStatus>,
    /// The burst that a `PodQOS` gives it.
    #[serde(rename = "burstMillicores", skip_serializing_if = "Option::is_none")]
    burst: Option<i64>,
}

impl PodRow {
    fn compare(&self, other: &Self, sort: Sort) -> Ordering {
        let largest_first = match sort {
            Sort::Name | Sort::Breached | Sort::Load => Ordering::Equal,
            Sort::Cpu => other.cpu.cmp(&self.cpu),
            Sort::Memory => other.memory.cmp(&self.memory),
            Sort::Pressure => other.pressure.iter().max().cmp(&self.pressure.iter().max()),
            Sort::Age => Reverse(self.age).cmp(&Reverse(other.age)),
        };
        self.agent
            .cmp(&other.agent)
            .then(largest_first)
            .then_with(|| self.namespace.cmp(&other.namespace))
            .then_with(|| self.name.cmp(&other.name))
    }

    fn cells(&self) -> Vec<String> {
        // Usage from an unresponsive agent is outdated, but its throttles are still in force.
        let is_alive = self.agent == AgentState::Alive;
        let cpu = self.cpu.filter(|_| is_alive);
        let memory = self.memory.filter(|_| is_alive);
        let unknown = || "?".to_owned();
        let pressure = self
            .pressure
            .map(|kind| or_unknown(kind.filter(|_| is_alive)));
        vec![
            self.namespace.clone(),
            self.name.clone(),
            self.node.clone(),
            cpu.map_or_else(unknown, |cpu| cpu.to_string()),
            memory.map_or_else(unknown, table::mebibytes),
            pressure.join("/"),
            self.throttling(),
            heartbeat(self.agent, self.age),
        ]
    }

    /// The cells that are only in wide output.
    fn more_cells(&self) -> [String; 2] {
        let Some(throttle) = &self.throttle else {
            let unknown = if self.throttled.is_some() { "-" } else { "?" };
            return [unknown, unknown].map(str::to_owned);
        };
        let before = throttle.from_millicores.map(|quota| format!("{quota}m"));
        let before = before.unwrap_or_else(|| "unlimited".to_owned());
        [before, throttle.rule.clone()]
    }

    fn throttling(&self) -> String {
        match (&self.throttle, self.throttled) {
            (Some(throttle), _) => match throttle.to_millicores {
                Some(to) => format!("to {to}m ({}%)", throttle.ratio),
                None => "idle class".to_owned(),
            },
            (None, Some(_)) => match self.burst {
                Some(burst) => format!("burst {burst}m"),
                None => "-".to_owned(),
            },
            (None, None) => "?".to_owned(),
        }
    }
}

/// The columns with the throttle and the age.
const THROTTLED: usize = 6;
const AGE: usize = 7;
/// Columns to hide on a narrow terminal, in this order.
const HIDE_FIRST: [usize; 6] = [7, 5, 0, 4, 6, 2];

/// The busiest pods of all nodes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PodsScreen {
    #[serde(skip)]
    is_wide: bool,
    pods: Vec<PodRow>,
    /// What is not shown or unknown.
    notes: Vec<String>,
}

impl PodsScreen {
    /// Sorted rows, those of agents that left or do not respond last. Without `throttled`, throttling is unknown.
    pub(super) fn new(
        metrics: &[NodeMetric],
        throttled: Option<&Throttled>,
        sort: Sort,
        now: Timestamp,
    ) -> Self {
        let mut pods: Vec<PodRow> = metrics
            .iter()
            .flat_map(|metric| rows(metric, throttled, now))
            .collect();
        pods.sort_by(|a, b| a.compare(b, sort));
        let mut notes = vec![busiest_only(metrics, pods.len())];
        notes.extend(not_reported(metrics));
        notes.extend(throttled_elsewhere(&pods, throttled));
        Self {
            is_wide: false,
            pods,
            notes,
        }
    }

    /// With more columns.
    pub(super) fn wide(mut self, is_wide: bool) -> Self {
        self.is_wide = is_wide;
        self
    }

    /// Only the pods of this namespace.
    pub(super) fn of_namespace(mut self, namespace: Option<&str>) -> Self {
        if let Some(namespace) = namespace {
            self.pods.retain(|pod| pod.namespace == namespace);
            let note = format!("of them in namespace {namespace}: {}", self.pods.len());
            self.notes.insert(1, note);
        }
        self
    }

    /// Adds a note.
    pub(super) fn with_note(mut self, note: Option<String>) -> Self {
        self.notes.extend(note);
        self
    }
}

fn rows(
    metric: &NodeMetric,
    throttled: Option<&Throttled>,
    now: Timestamp,
) -> impl Iterator<Item = PodRow> {
    let (node, status) = (metric.name_any(), &metric.status);
    let agent = agent_state(status).unwrap_or(AgentState::None);
    let age = status.timestamp.as_ref().map(|time| since(time.0, now));
    let throttled = throttled.and_then(|known| known.get(&node));
    status.top_pods.iter().map(move |pod| PodRow {
        throttled: throttled.map(|known| throttle(known, pod).is_some()),
        throttle: throttled.and_then(|known| throttle(known, pod)).cloned(),
        burst: throttled.and_then(|known| burst(known, pod)),
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        node: node.clone(),
        agent,
        age,
        cpu: table::millicores(pod.cpu.as_ref()),
        memory: table::bytes(pod.memory.as_ref()),
        pressure: [pod.cpu_delay, pod.memory_pressure, pod.io_pressure]
            .map(|percent| percent.and_then(Percent::of)),
    })
}

fn burst(known: &HeldPods, pod: &PodUsage) -> Option<i64> {
    let mut bursts = known.bursts.iter();
    let found = bursts.find(|it| it.namespace == pod.namespace && it.pod == pod.name);
    found.map(|it| it.millicores)
}

fn throttle<'a>(known: &'a HeldPods, pod: &PodUsage) -> Option<&'a ThrottledStatus> {
    let mut throttled = known.throttled.iter();
    throttled.find(|it| it.namespace == pod.namespace && it.pod == pod.name)
}

fn busiest_only(metrics: &[NodeMetric], shown: usize) -> String {
    let all: i64 = metrics.iter().filter_map(|it| it.status.pods).sum();
    format!(
        "these are the busiest pods of each reporting node, at most {MAX_PODS} of each: {shown} of {all}"
    )
}

fn not_reported(metrics: &[NodeMetric]) -> Option<String> {
    let unknown = metrics.iter().filter(|it| it.status.pods.is_none());
    let nodes: Vec<String> = unknown.map(NodeMetric::name_any).collect();
    (!nodes.is_empty()).then(|| {
        let (unknown, of) = (nodes.len(), metrics.len());
        let names = named(&nodes, MAX_NAMED);
        format!("the pods of {unknown} of {of} nodes are unknown, because their agents do not report to the controller: {names}")
    })
}

fn throttled_elsewhere(shown: &[PodRow], throttled: Option<&Throttled>) -> Option<String> {
    let name = |row: &PodRow| (row.node.clone(), row.namespace.clone(), row.name.clone());
    let shown = shown.iter().map(name).collect::<BTreeSet<_>>();
    let all = throttled.into_iter().flatten().flat_map(|(node, pods)| {
        let name = |it: &ThrottledStatus| (node.clone(), it.namespace.clone(), it.pod.clone());
        pods.throttled.iter().map(name)
    });
    let others = all.filter(|name| !shown.contains(name));
    let others: Vec<String> = others
        .map(|(node, namespace, pod)| format!("{namespace}/{pod} on {node}"))
        .collect();
    let (count, names) = (others.len(), named(&others, MAX_NAMED));
    (count > 0).then(|| format!("throttled, but not among the busiest ({count}): {names}"))
}

/// The formatter's width is the width of the terminal, if any. The alternate form has colours.
impl fmt::Display for PodsScreen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut header = vec![
            "NAMESPACE",
            "POD",
            "NODE",
            "CPU",
            "MEMORY",
            "PSI CPU/MEM/IO",
            "THROTTLED",
            "MEASURED",
        ];
        if self.is_wide {
            header.extend(["QUOTA BEFORE", "RULE"]);
        }
        let mut table = Table::new(&header, &[3, 4]);
        for row in &self.pods {
            let mut cells = row.cells();
            if self.is_wide {
                cells.extend(row.more_cells());
            }
            table.push(cells);
            match (row.agent, &row.throttle) {
                (AgentState::Unresponsive, _) => table.style(AGE, color::ERROR),
                (_, Some(_)) => table.style(THROTTLED, color::WARNING),
                _ => {}
            }
        }
        let hidden = f.width().map(|width| table.fit(width, &HIDE_FIRST));
        write_table(f, &table)?;
        write_hidden(f, hidden)?;
        write_notes(f, &self.notes)
    }
}

#[cfg(test)]
#[path = "pods_tests.rs"]
mod tests;
