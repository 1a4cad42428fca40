//! The load: how near a node is to where its rules act. 100 means the same on every node, whatever its size and rules.
//!
//! ```text
//! line of a resource = lowest threshold of an enforced rule over it, in percent of the node; 90 without one
//! load of a resource = max(expected, history) / line x 100
//! load of a pressure = value / threshold x 100, of each enforced rule over one
//! load               = the highest of these
//! ```
//! A rule over any metric whose last value is above its threshold counts with value / threshold x 100 as well: it acts, or
//! will, although a mean over 5 minutes may not show it yet. So what it evicts is not sent back.

use jiff::Timestamp;

use super::history::RESOURCES;
use crate::engine::metric::{Metric, Resource};
use crate::engine::policy::{Rule, RuleId, Strategy};
use crate::engine::run::Run;
use crate::engine::time::BootTime;
use crate::engine::units::{Bytes, MilliCpu};

/// The line of a resource over which no rule is enforced, in percent of the node. A rule whose threshold the node cannot
/// exceed counts as none.
pub const DEFAULT_LINE: f64 = 90.0;

/// The load of a node, with its terms.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeLoad {
    /// The sample that it was computed from.
    pub at: BootTime,
    /// Percent of the load line: 0 for an idle node, 100 where a rule would act, more beyond that. Finite.
    pub percent: f64,
    /// The term that decides.
    pub worst: LoadTerm,
    /// CPU.
    pub cpu: ResourceLoad,
    /// Memory.
    pub memory: ResourceLoad,
    /// The enforced rule that is closest to acting, of those over a pressure and those over other metrics that are above
    /// their threshold; `None` without one whose value is known.
    pub pressure: Option<PressureLoad>,
}

/// A term of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadTerm {
    /// A resource.
    Resource(Resource),
    /// Pressure, how long protected pods wait, or a metric of neither resource.
    Pressure,
}

impl LoadTerm {
    /// `cpu`, `memory` or `pressure`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Resource(Resource::Cpu) => "cpu",
            Self::Resource(Resource::Memory) => "memory",
            Self::Pressure => "pressure",
        }
    }
}

/// The load of one resource. Percentages are of the node's capacity.
#[derive(Clone, Debug, PartialEq)]
pub struct ResourceLoad {
    /// What is expected to be used, in percent; above 100 if more is expected than the node has.
    pub expected: f64,
    /// The part of it that a 5-minute average (of CPU) or the memory in use does not show yet: that of pods that started
    /// within 5 minutes or will start. In percent.
    pub newcomers: f64,
    /// The lasting peaks without the pods that have ended since, in percent; `None` after less than half of 5 minutes.
    pub history: Option<f64>,
    /// The load line, in percent: above 0, and below 100.
    pub line: f64,
    /// The rule whose threshold is the line; `None`: no rule is enforced over the resource, and the line is 90.
    pub rule: Option<RuleId>,
    /// The last value of an enforced rule over the resource in percent of its threshold, if that is above 100.
    pub breached: Option<f64>,
}

impl ResourceLoad {
    /// Percent of the load line, or of the threshold of a rule that is above it.
    pub fn percent(&self) -> f64 {
        let used = self
            .history
            .map_or(self.expected, |history| history.max(self.expected));
        let used = used / self.line * 100.0;
        self.breached.map_or(used, |breached| breached.max(used))
    }
}

/// The load line of a resource: where a node counts as full.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadLine {
    /// In percent of the node: above 0, and below 100.
    pub percent: f64,
    /// The rule whose threshold it is; `None`: no rule is enforced over the resource.
    pub rule: Option<RuleId>,
}

/// How near a pressure rule is to acting.
#[derive(Clone, Debug, PartialEq)]
pub struct PressureLoad {
    /// The rule.
    pub rule: RuleId,
    /// Its value in percent of its threshold. Where the rule acts only while protected pods wait, the lower of this and of
    /// how long they wait in percent of what lets it act.
    pub percent: f64,
}

/// The capacity of a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Capacity {
    /// Millicores.
    pub(super) cpu: f64,
    /// Bytes.
    pub(super) memory: f64,
}

/// The expected use of a resource, in percent of the node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ResourceUse {
    pub(super) expected: f64,
    pub(super) newcomers: f64,
    pub(super) history: Option<f64>,
}

/// The load of a node with this use, by resource.
pub(super) fn load(
    at: BootTime,
    used: [ResourceUse; 2],
    capacity: Capacity,
    runs: &[Run],
    time: Option<Timestamp>,
) -> NodeLoad {
    let [cpu, memory] = RESOURCES.map(|resource| {
        let ResourceUse {
            expected,
            newcomers,
            history,
        } = used[resource as usize];
        let rules = runs.iter().map(|run| &run.rule);
        let line = load_line(rules, resource, capacity, time);
        ResourceLoad {
            expected,
            newcomers,
            history,
            line: line.percent,
            rule: line.rule,
            breached: breached(runs, resource, time),
        }
    });
    let pressure = pressure(runs, time);
    let terms = [
        (cpu.percent(), LoadTerm::Resource(Resource::Cpu)),
        (memory.percent(), LoadTerm::Resource(Resource::Memory)),
        (
            pressure.as_ref().map_or(0.0, |it| it.percent),
            LoadTerm::Pressure,
        ),
    ];
    let (percent, worst) = terms
        .into_iter()
        .rev()
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .unwrap_or(terms[0]);
    NodeLoad {
        at,
        percent,
        worst,
        cpu,
        memory,
        pressure,
    }
}

/// The load lines of CPU and memory for a node of this size with these rules.
pub fn load_lines(rules: &[Rule], cpu: MilliCpu, memory: Bytes, time: Timestamp) -> [LoadLine; 2] {
    let capacity = Capacity {
        cpu: cpu.0 as f64,
        memory: memory.0 as f64,
    };
    RESOURCES.map(|resource| load_line(rules.iter(), resource, capacity, Some(time)))
}

fn load_line<'a>(
    rules: impl Iterator<Item = &'a Rule>,
    resource: Resource,
    capacity: Capacity,
    time: Option<Timestamp>,
) -> LoadLine {
    let in_force = rules.filter(|rule| is_in_force(rule, time));
    let thresholds = in_force.filter_map(|rule| {
        let threshold = threshold(rule, resource, capacity)?;
        (threshold > 0.0 && threshold < 100.0).then_some((threshold, rule))
    });
    match thresholds.min_by(|a, b| a.0.total_cmp(&b.0)) {
        Some((percent, rule)) => LoadLine {
            percent,
            rule: Some(rule.id.clone()),
        },
        None => LoadLine {
            percent: DEFAULT_LINE,
            rule: None,
        },
    }
}

/// The threshold of a rule over the resource, in percent of the node.
fn threshold(rule: &Rule, resource: Resource, capacity: Capacity) -> Option<f64> {
    let has_value = rule
        .series
        .as_ref()
        .is_none_or(|series| series.matches::<[(&str, &str)]>(&[]));
    if rule.metric.resource() != Some(resource) || !has_value {
        return None;
    }
    Some(match rule.metric {
        Metric::CpuUsage => rule.threshold / capacity.cpu * 100.0,
        Metric::MemoryUsage => rule.threshold / capacity.memory * 100.0,
        _ => rule.threshold,
    })
}

/// The highest value of a rule over the resource that is above its threshold, in percent of that.
fn breached(runs: &[Run], resource: Resource, time: Option<Timestamp>) -> Option<f64> {
    let over =
        |run: &&Run| run.rule.metric.resource() == Some(resource) && is_in_force(&run.rule, time);
    let nearness = runs.iter().filter(over).filter_map(|run| run.nearness);
    let highest = nearness.filter(|near| *near > 1.0).reduce(f64::max);
    highest.map(|near| near * 100.0)
}

/// The rule that is closest to acting, of those over a pressure and those over other metrics that are above their threshold.
/// One without a value for so long that what its actions changed is restored does not count.
fn pressure(runs: &[Run], time: Option<Timestamp>) -> Option<PressureLoad> {
    let in_force = runs
        .iter()
        .filter(|run| run.rule.metric.resource().is_none() && is_in_force(&run.rule, time));
    let loads = in_force.filter_map(|run| {
        let near = run.nearness?;
        let counts = run.rule.metric.is_pressure() || near > 1.0;
        counts.then_some((near * 100.0, run))
    });
    let (percent, run) = loads.max_by(|a, b| a.0.total_cmp(&b.0))?;
    Some(PressureLoad {
        rule: run.rule.id.clone(),
        percent,
    })
}

/// Enforced, and within its hours. Without a wall clock it counts: the load is then too high rather than too low.
fn is_in_force(rule: &Rule, time: Option<Timestamp>) -> bool {
    rule.strategy == Strategy::Enforce && time.is_none_or(|time| rule.is_active(time))
}
