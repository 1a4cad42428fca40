//! The screen of `plimsoll top nodes`. Pure.

use std::cmp::{Ordering, Reverse};
use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::{Serialize, Serializer};

use crate::cli::color;
use crate::cluster::lease::LeaseObject;
use crate::crd::node_metric::Pressures;
use crate::crd::node_metric::condition::HEALTHY;
use crate::crd::summary::{Percent, ReportedScheduling};
use crate::crd::{NodeMetric, NodeMetricStatus, Summary};
use crate::engine::policy::RuleId;
use crate::metrics_api::table;
use crate::preview::{Table, wrapped};

/// Width of a bar in cells.
const BAR_WIDTH: usize = 20;

/// Sort orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Sort {
    /// Name of the node; namespace and name of the pod
    Name,
    /// CPU usage, of nodes in percent
    Cpu,
    /// Memory usage, of nodes in percent
    Memory,
    /// How near a node is to where its rules act; for nodes only
    Load,
    /// The largest of the three pressures
    Pressure,
    /// Rules over their threshold; for nodes only
    Breached,
    /// Age of the data
    Age,
}

/// The source of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum LoadSource {
    /// The aggregated API, as recent as the agents' reports.
    NodeMetrics,
    /// The summaries in the agents' Leases.
    Leases,
}

/// What an agent has in force on its node; `None` if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ActionsInForce {
    pub(super) scheduling: Option<ReportedScheduling>,
    /// Number of pods.
    pub(super) throttled: Option<u32>,
}

/// The state of a node's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum AgentState {
    /// It reports.
    Alive,
    /// It released its Lease and left for good.
    Left,
    /// Its Lease has expired.
    Unresponsive,
    /// There never was one.
    None,
}

/// One node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct NodeRow {
    /// Name of the node.
    pub(super) node: String,
    agent: AgentState,
    #[serde(rename = "ageSeconds", serialize_with = "seconds")]
    age: Option<Duration>,
    #[serde(flatten)]
    summary: Summary,
}

#[expect(clippy::ref_option, reason = "the signature that serde asks for")]
pub(super) fn seconds<S: Serializer>(
    age: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    age.map(|age| age.as_secs()).serialize(serializer)
}

impl NodeRow {
    /// A row from a Lease.
    pub(super) fn of(lease: LeaseObject, now: Timestamp) -> Self {
        let node = lease.name_any();
        let (renewed, summary) = (lease.renewed(), lease.summary());
        let renewal = lease.state();
        let age = renewed.map(|renewed| since(renewed, now));
        let agent = match age {
            _ if !renewal.held => AgentState::Left,
            Some(age) if age <= renewal.grace() => AgentState::Alive,
            _ => AgentState::Unresponsive,
        };
        Self {
            node,
            agent,
            age,
            summary,
        }
    }

    /// A row from a `NodeMetric`, with thresholds from the Lease, and with what is in force from the `NodeWatermark`, which
    /// is more recent than the Lease.
    pub(super) fn measured(
        metric: &NodeMetric,
        lease: Option<LeaseObject>,
        in_force: Option<ActionsInForce>,
        now: Timestamp,
    ) -> Self {
        let by_lease = match lease {
            Some(lease) => Self::of(lease, now),
            None => Self::without_agent(metric.name_any()),
        };
        let status = &metric.status;
        // The agent never reported; its Lease, if any, says whether it has left.
        let Some(agent) = agent_state(status) else {
            return by_lease;
        };
        Self {
            agent,
            age: status.timestamp.as_ref().map(|time| since(time.0, now)),
            summary: merge(status, by_lease.summary, in_force),
            node: by_lease.node,
        }
    }

    /// A row of a node that never had an agent.
    pub(super) fn without_agent(node: String) -> Self {
        Self {
            node,
            agent: AgentState::None,
            age: None,
            summary: Summary::default(),
        }
    }

    fn compare(&self, other: &Self, sort: Sort) -> Ordering {
        let (a, b) = (&self.summary, &other.summary);
        let largest_first = match sort {
            Sort::Name => Ordering::Equal,
            Sort::Cpu => b.cpu.cmp(&a.cpu),
            Sort::Memory => b.memory.cmp(&a.memory),
            Sort::Load => b.load.cmp(&a.load),
            Sort::Pressure => b.pressure.iter().max().cmp(&a.pressure.iter().max()),
            Sort::Breached => b.breached.cmp(&a.breached),
            Sort::Age => Reverse(self.age).cmp(&Reverse(other.age)),
        };
        self.agent
            .cmp(&other.agent)
            .then(largest_first)
            .then_with(|| self.node.cmp(&other.node))
    }

    fn cells(&self) -> Vec<String> {
        let Summary {
            cpu,
            memory,
            load,
            cpu_threshold,
            pressure,
            ..
        } = &self.summary;
        let is_alive = self.agent == AgentState::Alive;
        // Load from an unresponsive agent is outdated, but its limits are still in force.
        let current = |percent: Option<Percent>| or_unknown(percent.filter(|_| is_alive));
        vec![
            self.node.clone(),
            if is_alive {
                bar(*cpu, *cpu_threshold)
            } else {
                String::new()
            },
            current(*cpu),
            current(*memory),
            current(*load),
            pressure.map(current).join("/"),
            if is_alive {
                self.breached()
            } else {
                "?".to_owned()
            },
            self.in_force(),
            heartbeat(self.agent, self.age),
        ]
    }

    /// The cells that are only in wide output.
    fn more_cells(&self) -> [String; 2] {
        let Summary { rules, version, .. } = &self.summary;
        let unknown = || "?".to_owned();
        let rules = rules.map_or_else(unknown, |rules| rules.to_string());
        [rules, version.clone().unwrap_or_else(unknown)]
    }

    fn breached(&self) -> String {
        let named = &self.summary.breached_rules;
        let words: Vec<String> = named.iter().map(ToString::to_string).collect();
        let (words, named) = (words.join(","), named.len());
        match self.summary.breached.map(|all| all as usize) {
            None => "?".to_owned(),
            Some(0) => "-".to_owned(),
            Some(all) if named == 0 => all.to_string(),
            Some(all) if all > named => format!("{words} +{}", all - named),
            Some(_) => words,
        }
    }

    fn in_force(&self) -> String {
        let Summary {
            scheduling,
            throttled,
            ..
        } = self.summary;
        if self.agent == AgentState::Left {
            return "-".to_owned();
        }
        let closed = match scheduling {
            None => Some("?".to_owned()),
            Some(ReportedScheduling::Enabled) => None,
            Some(closed) => Some(closed.name().to_owned()),
        };
        let throttled = match throttled {
            None => Some("?".to_owned()),
            Some(0) => None,
            Some(pods) => Some(format!("{pods} throttled")),
        };
        let parts: Vec<String> = closed.into_iter().chain(throttled).collect();
        match parts.join(", ").as_str() {
            "" => "-".to_owned(),
            "?, ?" => "?".to_owned(),
            parts => parts.to_owned(),
        }
    }
}

/// The age of the data, or the state of an agent that does not report.
pub(super) fn heartbeat(agent: AgentState, age: Option<Duration>) -> String {
    let seconds = |age: Duration| i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
    let age = age.map(seconds);
    let age = age.map_or_else(|| "?".to_owned(), table::age);
    match agent {
        AgentState::Alive => age,
        AgentState::Left => format!("left {age} ago"),
        AgentState::Unresponsive => format!("LAST SEEN {age} ago"),
        AgentState::None => "no agent".to_owned(),
    }
}

/// The elapsed time; zero if the node's clock is ahead.
pub(in crate::cli) fn since(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// The state of a node's agent; `None` if it never reported.
pub(super) fn agent_state(status: &NodeMetricStatus) -> Option<AgentState> {
    let mut conditions = status.conditions.iter();
    let healthy = conditions.find(|condition| condition.type_ == HEALTHY)?;
    match healthy.status.as_str() {
        "True" => Some(AgentState::Alive),
        "False" => Some(AgentState::Unresponsive),
        _ => None,
    }
}

/// Merges a `NodeMetric` with the summary of a Lease.
fn merge(status: &NodeMetricStatus, lease: Summary, in_force: Option<ActionsInForce>) -> Summary {
    let [cpu, memory] = table::used_percent(status).map(|percent| percent.and_then(Percent::of));
    // An agent without direct reports has pressure only in its Lease.
    let pressure = match status.pods {
        Some(_) => pressure(&status.pressure),
        None => lease.pressure,
    };
    let count = |number: i64| u32::try_from(number).ok();
    let names = status.breached.iter().map(|id| RuleId::from(id.as_str()));
    let (rules, breached, breached_rules) = match status.rules {
        Some(rules) => (count(rules.total), count(rules.breached), names.collect()),
        None => (lease.rules, lease.breached, lease.breached_rules),
    };
    let ActionsInForce {
        scheduling,
        throttled,
    } = in_force.unwrap_or(ActionsInForce {
        scheduling: lease.scheduling,
        throttled: lease.throttled,
    });
    let version = status.agent.as_ref().map(|agent| agent.version.clone());
    Summary {
        version: version.or(lease.version),
        cpu,
        memory,
        load: status
            .load
            .as_ref()
            .map_or(lease.load, |load| Percent::of(load.percent)),
        pressure,
        rules,
        breached,
        breached_rules,
        throttled,
        scheduling,
        ..lease
    }
}

fn pressure(pressure: &Pressures) -> [Option<Percent>; 3] {
    let all = [&pressure.cpu, &pressure.memory, &pressure.io];
    all.map(|kind| Percent::of(kind.as_ref()?.some.avg10))
}

pub(super) fn or_unknown(percent: Option<Percent>) -> String {
    percent.map_or_else(|| "?".to_owned(), |percent| percent.to_string())
}

/// `███████████████|····`: filled up to the usage, with the threshold.
fn bar(percent: Option<Percent>, threshold: Option<Percent>) -> String {
    let Some(percent) = percent else {
        return String::new();
    };
    let cell = |percent: Percent| cells(percent.value());
    let threshold = threshold.map(|threshold| cell(threshold).min(BAR_WIDTH - 1));
    let letter = |at| match at {
        at if Some(at) == threshold => '|',
        at if at < cell(percent) => '█',
        _ => '·',
    };
    (0..BAR_WIDTH).map(letter).collect()
}

/// Filled cells of a bar, rounded.
fn cells(percent: f64) -> usize {
    let cell = 100.0 / BAR_WIDTH as f64;
    (1..=BAR_WIDTH)
        .take_while(|at| *at as f64 * cell - cell / 2.0 <= percent)
        .count()
}

/// The columns with the breached rules and the age.
const BREACHED: usize = 6;
const AGE: usize = 8;
/// Columns to hide on a narrow terminal, in this order.
const HIDE_FIRST: [usize; 6] = [5, 8, 3, 1, 4, 7];

/// The rows, with their source and notes.
#[derive(Clone, Debug, Serialize)]
pub(super) struct NodesScreen {
    #[serde(skip)]
    is_wide: bool,
    source: LoadSource,
    nodes: Vec<NodeRow>,
    /// What is unknown.
    notes: Vec<String>,
}

impl NodesScreen {
    /// Sorted rows; those of agents that left or do not respond come after the others, and nodes that never had an agent last.
    pub(super) fn new(
        source: LoadSource,
        mut rows: Vec<NodeRow>,
        sort: Sort,
        notes: Vec<String>,
    ) -> Self {
        rows.sort_by(|a, b| a.compare(b, sort));
        Self {
            is_wide: false,
            source,
            nodes: rows,
            notes,
        }
    }

    /// With more columns.
    pub(super) fn wide(mut self, is_wide: bool) -> Self {
        self.is_wide = is_wide;
        self
    }

    fn of(&self, agent: AgentState) -> Vec<&str> {
        let rows = self.nodes.iter().filter(|row| row.agent == agent);
        rows.map(|row| row.node.as_str()).collect()
    }
}

/// The formatter's width is the width of the terminal, if any. The alternate form has colours.
impl fmt::Display for NodesScreen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = self.table();
        let hidden = f.width().map(|width| table.fit(width, &HIDE_FIRST));
        write_table(f, &table)?;
        write_hidden(f, hidden)?;
        let unresponsive = self.of(AgentState::Unresponsive);
        if !unresponsive.is_empty() {
            let of = self.nodes.len();
            let names = unresponsive.join(", ");
            let (number, verb) = match unresponsive.len() {
                1 => (1, "does"),
                number => (number, "do"),
            };
            let text = format!("{number} of {of} agents {verb} not respond: {names}");
            writeln!(f, "\n{}", wrapped(&text, f.width()))?;
        }
        write_notes(f, &self.notes)
    }
}

impl NodesScreen {
    fn table(&self) -> Table {
        let mut header = vec![
            "NODE",
            "CPU (| THRESHOLD)",
            "CPU%",
            "MEM%",
            "LOAD",
            "PSI CPU/MEM/IO",
            "BREACHED",
            "IN FORCE",
            match self.source {
                LoadSource::NodeMetrics => "MEASURED",
                LoadSource::Leases => "HEARTBEAT",
            },
        ];
        if self.is_wide {
            header.extend(["RULES", "VERSION"]);
        }
        let mut table = Table::new(&header, &[2, 3, 4]);
        for row in &self.nodes {
            let mut cells = row.cells();
            if self.is_wide {
                cells.extend(row.more_cells());
            }
            table.push(cells);
            match row.agent {
                AgentState::Alive if row.summary.breached > Some(0) => {
                    table.style(BREACHED, color::WARNING);
                }
                AgentState::Unresponsive => table.style(AGE, color::ERROR),
                AgentState::Alive | AgentState::Left | AgentState::None => {}
            }
        }
        table
    }
}

/// The table, with colours if the formatter has the alternate form.
pub(super) fn write_table(f: &mut fmt::Formatter<'_>, table: &Table) -> fmt::Result {
    if f.alternate() {
        write!(f, "{table:#}")
    } else {
        write!(f, "{table}")
    }
}

/// Says which columns are hidden.
pub(super) fn write_hidden(f: &mut fmt::Formatter<'_>, hidden: Option<Vec<String>>) -> fmt::Result {
    match hidden.filter(|titles| !titles.is_empty()) {
        Some(titles) => write_notes(f, &[format!("too narrow for {}", titles.join(", "))]),
        None => Ok(()),
    }
}

/// Notes, within the width of the terminal.
pub(super) fn write_notes(f: &mut fmt::Formatter<'_>, notes: &[String]) -> fmt::Result {
    let width = f.width();
    notes
        .iter()
        .try_for_each(|note| writeln!(f, "{}", wrapped(&format!("note: {note}"), width)))
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
