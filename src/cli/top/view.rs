//! What `plimsoll top` shows. Pure.

use std::cmp::{Ordering, Reverse};
use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use jiff::Timestamp;
use kube::ResourceExt as _;
use serde::{Serialize, Serializer};

use crate::crd::node_metric::Pressures;
use crate::crd::node_metric::condition::HEALTHY;
use crate::crd::summary::{Percent, Scheduling};
use crate::crd::{NodeMetric, NodeMetricStatus, Summary};
use crate::engine::policy::RuleId;
use crate::metrics_api::table;
use crate::ordered;
use crate::preview::Table;
use crate::reconcilers::lease::LeaseObject;

/// Cells of a bar.
const WIDTH: usize = 20;

/// By what rows are ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Sort {
    /// Name of the node; of pods, with their namespaces.
    Name,
    /// CPU: of nodes in percent, of pods as an amount.
    Cpu,
    /// Memory, likewise.
    Memory,
    /// The largest of the three pressures.
    Pressure,
    /// Rules over their mark; for nodes only.
    Breached,
    /// Age of the figures.
    Age,
}

/// Where figures are from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Source {
    /// The aggregated API: as young as the agents' reports.
    NodeMetrics,
    /// The summaries in the agents' Leases.
    Leases,
}

/// What an agent says that it has in force on its node; `None`: it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct InForce {
    pub(super) scheduling: Option<Scheduling>,
    /// Pods.
    pub(super) throttled: Option<u32>,
}

/// What is known of a node's agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Agent {
    /// It is heard.
    Alive,
    /// It gave its Lease back: it left for good.
    Left,
    /// Its Lease has run out.
    Silent,
    /// There never was one.
    None,
}

/// One node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Row {
    /// Its name.
    pub(super) node: String,
    agent: Agent,
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

impl Row {
    /// By a Lease.
    pub(super) fn of(lease: LeaseObject, now: Timestamp) -> Self {
        let node = lease.name_any();
        let (renewed, summary) = (lease.renewed(), lease.summary());
        let renewal = lease.state();
        let age = renewed.map(|renewed| since(renewed, now));
        let agent = match age {
            _ if !renewal.held => Agent::Left,
            Some(age) if age <= renewal.grace() => Agent::Alive,
            _ => Agent::Silent,
        };
        Self {
            node,
            agent,
            age,
            summary,
        }
    }

    /// By what its agent measured; marks, and what only they tell, by its Lease; what is in force by the status of its
    /// `NodeWatermark`, which is younger.
    pub(super) fn measured(
        metric: &NodeMetric,
        lease: Option<LeaseObject>,
        in_force: Option<InForce>,
        now: Timestamp,
    ) -> Self {
        let by_lease = match lease {
            Some(lease) => Self::of(lease, now),
            None => Self::without_agent(metric.name_any()),
        };
        let status = &metric.status;
        // Where nothing came from an agent there is its Lease, if any: it may have left.
        let Some(agent) = heard(status) else {
            return by_lease;
        };
        Self {
            agent,
            age: status.timestamp.as_ref().map(|time| since(time.0, now)),
            summary: figures(status, by_lease.summary, in_force),
            node: by_lease.node,
        }
    }

    /// Of a node that never had an agent.
    pub(super) fn without_agent(node: String) -> Self {
        Self {
            node,
            agent: Agent::None,
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
            cpu_mark,
            pressure,
            ..
        } = &self.summary;
        let heard = self.agent == Agent::Alive;
        // What a silent agent said of the load is not so any more; what it put in force still is.
        let current = |percent: Option<Percent>| or_unknown(percent.filter(|_| heard));
        vec![
            self.node.clone(),
            if heard {
                bar(*cpu, *cpu_mark)
            } else {
                String::new()
            },
            current(*cpu),
            current(*memory),
            pressure.map(current).join("/"),
            if heard {
                self.breached()
            } else {
                "?".to_owned()
            },
            self.in_force(),
            heartbeat(self.agent, self.age),
        ]
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
        if self.agent == Agent::Left {
            return "-".to_owned();
        }
        let closed = match scheduling {
            None => Some("?".to_owned()),
            Some(Scheduling::Enabled) => None,
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

/// How old the figures are, or that they are old.
pub(super) fn heartbeat(agent: Agent, age: Option<Duration>) -> String {
    let seconds = |age: Duration| i64::try_from(age.as_secs()).unwrap_or(i64::MAX);
    let age = age.map(seconds);
    let age = age.map_or_else(|| "?".to_owned(), table::age);
    match agent {
        Agent::Alive => age,
        Agent::Left => format!("left {age} ago"),
        Agent::Silent => format!("SILENT for {age}"),
        Agent::None => "no agent".to_owned(),
    }
}

/// The time since then; none where the clock of the node is ahead.
pub(super) fn since(then: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// Whether the agent is; `None`: nothing has come from it.
pub(super) fn heard(status: &NodeMetricStatus) -> Option<Agent> {
    let mut conditions = status.conditions.iter();
    let healthy = conditions.find(|condition| condition.type_ == HEALTHY)?;
    match healthy.status.as_str() {
        "True" => Some(Agent::Alive),
        "False" => Some(Agent::Silent),
        _ => None,
    }
}

/// What was measured, with what only the Lease says.
fn figures(status: &NodeMetricStatus, said: Summary, in_force: Option<InForce>) -> Summary {
    let [cpu, memory] = table::used_percent(status).map(|percent| percent.and_then(Percent::of));
    // An agent that does not report directly says it in its Lease alone.
    let pressure = match status.pods {
        Some(_) => pressure(&status.pressure),
        None => said.pressure,
    };
    let count = |number: i64| u32::try_from(number).ok();
    let names = status.breached.iter().map(|id| RuleId::from(id.as_str()));
    let (rules, breached, breached_rules) = match status.rules {
        Some(rules) => (count(rules.total), count(rules.breached), names.collect()),
        None => (said.rules, said.breached, said.breached_rules),
    };
    let InForce {
        scheduling,
        throttled,
    } = in_force.unwrap_or(InForce {
        scheduling: said.scheduling,
        throttled: said.throttled,
    });
    let version = status.agent.as_ref().map(|agent| agent.version.clone());
    Summary {
        version: version.or(said.version),
        cpu,
        memory,
        pressure,
        rules,
        breached,
        breached_rules,
        throttled,
        scheduling,
        ..said
    }
}

fn pressure(pressure: &Pressures) -> [Option<Percent>; 3] {
    let all = [&pressure.cpu, &pressure.memory, &pressure.io];
    all.map(|kind| Percent::of(kind.as_ref()?.some.avg10))
}

pub(super) fn or_unknown(percent: Option<Percent>) -> String {
    percent.map_or_else(|| "?".to_owned(), |percent| percent.to_string())
}

/// `███████████████|····`: filled as far as the node is, with its mark.
fn bar(percent: Option<Percent>, mark: Option<Percent>) -> String {
    let Some(percent) = percent else {
        return String::new();
    };
    let cell = |percent: Percent| cells(percent.value());
    let mark = mark.map(|mark| cell(mark).min(WIDTH - 1));
    let letter = |at| match at {
        at if Some(at) == mark => '|',
        at if at < cell(percent) => '█',
        _ => '·',
    };
    (0..WIDTH).map(letter).collect()
}

/// Whole cells of a bar, to the nearest.
fn cells(percent: f64) -> usize {
    let cell = 100.0 / WIDTH as f64;
    (1..=WIDTH)
        .take_while(|at| *at as f64 * cell - cell / 2.0 <= percent)
        .count()
}

/// Columns that a terminal shows only where it is wide enough, the least important first.
const LEAST: [usize; 5] = [4, 7, 1, 3, 6];

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Screen {
    source: Source,
    nodes: Vec<Row>,
    /// What could not be told.
    notes: Vec<String>,
}

impl Screen {
    /// In order; silent agents last.
    pub(super) fn new(source: Source, mut rows: Vec<Row>, sort: Sort, notes: Vec<String>) -> Self {
        ordered::sort_by(&mut rows, |a, b| a.compare(b, sort));
        Self {
            source,
            nodes: rows,
            notes,
        }
    }

    fn of(&self, agent: Agent) -> Vec<&str> {
        let rows = self.nodes.iter().filter(|row| row.agent == agent);
        rows.map(|row| row.node.as_str()).collect()
    }
}

/// The width of the formatter is that of the terminal, if there is one.
impl fmt::Display for Screen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let header = [
            "NODE",
            "CPU (| MARK)",
            "CPU%",
            "MEM%",
            "PSI CPU/MEM/IO",
            "BREACHED",
            "IN FORCE",
            match self.source {
                Source::NodeMetrics => "MEASURED",
                Source::Leases => "HEARTBEAT",
            },
        ];
        let mut table = Table::new(&header, &[2, 3]);
        for row in &self.nodes {
            table.push(row.cells());
        }
        let left_out = f.width().map(|width| table.fit(width, &LEAST));
        write!(f, "{table}")?;
        if let Some(left_out) = left_out.filter(|titles| !titles.is_empty()) {
            writeln!(f, "note: too narrow for {}", left_out.join(", "))?;
        }
        let silent = self.of(Agent::Silent);
        if !silent.is_empty() {
            let of = self.nodes.len();
            let names = silent.join(", ");
            writeln!(f, "\n{} of {of} agents are silent: {names}", silent.len())?;
        }
        self.notes
            .iter()
            .try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

#[cfg(test)]
#[path = "view_tests.rs"]
mod tests;
