//! The result of a preview, as text and as JSON.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::standing::StandingPreview;
use super::table::Table;
use crate::crd::duration::format_duration;
use crate::crd::words::named;
use crate::engine::load::LoadLine;
use crate::engine::metric::Metric;
use crate::engine::plan::PlanChange;
use crate::engine::pod::QosClass;
use crate::engine::policy::{RuleId, Strategy, TaintEffect};
use crate::engine::units::{Bytes, MilliCpu};
use crate::engine::weight_share::HIGH_PERCENT;
use crate::messages::{count, format_seconds, format_value};

/// Maximum number of unmatched pods, and of load lines, that are shown; JSON has all.
pub(super) const MAX_NAMED: usize = 5;

/// What policies would do on the nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Preview {
    /// Nodes on which a policy acts, sorted by name.
    pub nodes: Vec<NodePreview>,
    /// Number of nodes on which no policy acts.
    pub untouched: usize,
    /// What could not be read.
    pub notes: Vec<String>,
}

/// What would be done on one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodePreview {
    /// Name of the node.
    pub node: String,
    /// The rules of the node, sorted by id.
    pub rules: Vec<RulePreview>,
    /// What `PodQOS` do to its pods at all times, sorted by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub standing: Vec<StandingPreview>,
    /// Where schedulers would see the node as full, with these rules.
    pub load_lines: LoadLines,
    /// The batch weight share on cgroup v2, in percent, beside `most_exposed`; `None` while it is not known, or there are no such
    /// pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub batch_weight_share: Option<f64>,
    /// `namespace/name` of the protected pod that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_exposed: Option<String>,
    /// Why its kubelet's summary is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kubelet_error: Option<String>,
}

/// The load lines of a node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LoadLines {
    /// Of CPU.
    pub cpu: LoadLinePreview,
    /// Of memory.
    pub memory: LoadLinePreview,
}

/// The load line of a resource.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LoadLinePreview {
    /// In percent of the node.
    pub percent: f64,
    /// The rule whose threshold it is; `None`: no rule is enforced over the resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<RuleId>,
}

impl From<LoadLine> for LoadLinePreview {
    fn from(LoadLine { percent, rule }: LoadLine) -> Self {
        Self { percent, rule }
    }
}

impl fmt::Display for LoadLinePreview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0} %", self.percent)?;
        match &self.rule {
            Some(rule) => write!(f, " ({rule})"),
            None => f.write_str(" (no rule)"),
        }
    }
}

impl fmt::Display for LoadLines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CPU {}, memory {}", self.cpu, self.memory)
    }
}

/// One rule on one node.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RulePreview {
    /// `<NodeQOS>/<rule>`.
    pub rule: RuleId,
    /// Enforce or Preview.
    pub strategy: Strategy,
    /// Name of the action.
    pub action: String,
    /// Name of the metric.
    pub metric: String,
    /// In the metric's unit.
    pub value: Option<f64>,
    /// Lower bound, if `value` is an upper bound: the kubelet measures memory differently.
    #[serde(rename = "valueAtLeast", skip_serializing_if = "Option::is_none")]
    pub at_least: Option<f64>,
    /// Why there is no value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// Where the value comes from.
    pub source: ValueSource,
    /// Threshold above which the rule acts.
    pub threshold: f64,
    /// Restore value: at or below it the rule restores.
    pub restore_value: f64,
    /// The value compared with the thresholds.
    pub state: ThresholdComparison,
    /// It is outside its hours, so it does nothing now; the rest shows what it would do within them.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub outside_hours: bool,
    /// Evaluations in a row above the threshold before the rule acts.
    pub evaluations: u32,
    /// Time between evaluations.
    #[serde(rename = "periodSeconds", serialize_with = "seconds")]
    pub period: Duration,
    /// Evaluations from the breach to the first possible eviction, if the breach lasts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evaluations_to_eviction: Option<u32>,
    /// Amount to release, in millicores or bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap: Option<u64>,
    /// Taint that would be set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<TaintEffect>,
    /// Number of pods that the agent already throttles for it.
    pub in_force: usize,
    /// The node's pods in victim order, if the rule is over its threshold and acts on pods.
    pub pods: Vec<PodPreview>,
}

/// One pod, for one rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodPreview {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// `QoS` class.
    pub class: QosClass,
    /// Priority.
    pub priority: i32,
    /// Whether a `PodQOS` matches it.
    pub matched: bool,
    /// CPU usage.
    #[serde(rename = "cpuMillicores")]
    pub cpu: Option<MilliCpu>,
    /// Memory usage without page cache.
    #[serde(rename = "memoryBytes")]
    pub memory: Option<Bytes>,
    /// Actions that would be taken on it.
    pub would: Vec<PlanChange>,
    /// Why other actions are not taken on it.
    pub reasons: Vec<String>,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", tag = "from")]
pub enum ValueSource {
    /// `--value`.
    Given {
        /// The given value.
        value: f64,
    },
    /// The status of the node's `NodeWatermark`, if it has the same rule.
    Agent {
        /// The reported value.
        value: f64,
        /// Age of the status.
        #[serde(rename = "ageSeconds", serialize_with = "seconds")]
        age: Duration,
    },
    /// `/stats/summary` of the node's kubelet.
    Kubelet,
    /// There is no value.
    Unavailable {
        /// Why.
        why: String,
    },
}

/// A value compared with its thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ThresholdComparison {
    /// Above the threshold.
    Over,
    /// The upper bound of the value is above the threshold, the lower bound is not.
    Perhaps,
    /// Between the thresholds: what is in force stays.
    Between,
    /// At or below the restore value.
    Under,
    /// There is no value.
    Unknown,
}

fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

impl fmt::Display for ValueSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given { .. } => f.write_str("given"),
            Self::Agent { age, .. } => write!(f, "agent, {} ago", format_seconds(*age)),
            Self::Kubelet => f.write_str("kubelet"),
            Self::Unavailable { .. } => f.write_str("-"),
        }
    }
}

impl fmt::Display for ThresholdComparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Over => "OVER",
            Self::Perhaps => "PERHAPS",
            Self::Between => "between",
            Self::Under => "under",
            Self::Unknown => "UNKNOWN",
        })
    }
}

/// A pod by node, namespace and name.
type PodId<'a> = (&'a str, &'a str, &'a str);

/// The pods that each kind of action would be taken on. A pod counts once, even for several rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct AffectedPods<'a> {
    throttled: BTreeSet<PodId<'a>>,
    reclaimed: BTreeSet<PodId<'a>>,
    evicted: BTreeSet<PodId<'a>>,
}

impl<'a> AffectedPods<'a> {
    fn of(rules: impl IntoIterator<Item = (&'a str, &'a RulePreview)>) -> Self {
        let mut affected = Self::default();
        for (node, rule) in rules {
            for pod in &rule.pods {
                let id = (node, pod.namespace.as_str(), pod.name.as_str());
                pod.would.iter().for_each(|change| affected.add(id, change));
            }
        }
        affected
    }

    fn add(&mut self, pod: PodId<'a>, change: &PlanChange) {
        let pods = match change {
            PlanChange::Throttle { .. } => &mut self.throttled,
            PlanChange::Reclaim { .. } => &mut self.reclaimed,
            PlanChange::Evict { .. } => &mut self.evicted,
            _ => return,
        };
        pods.insert(pod);
    }

    fn describe(&self, [throttle, reclaim, evict]: [&str; 3]) -> Vec<String> {
        let kinds = [
            (throttle, &self.throttled),
            (reclaim, &self.reclaimed),
            (evict, &self.evicted),
        ];
        let some = kinds.into_iter().filter(|(_, pods)| !pods.is_empty());
        some.map(|(what, pods)| format!("{what} {}", count(pods.len(), "pod")))
            .collect()
    }
}

impl RulePreview {
    fn is_over(&self, strategy: Strategy) -> bool {
        self.strategy == strategy && self.state == ThresholdComparison::Over && !self.outside_hours
    }

    fn value_of(&self, value: f64) -> String {
        format_value(Some(&self.metric), value)
    }

    /// With its lower bound, if that is different.
    fn shown_value(&self) -> String {
        let shown = |value: Option<f64>| value.map(|value| self.value_of(value));
        match (shown(self.value), shown(self.at_least)) {
            (None, _) => "unknown".to_owned(),
            (Some(most), Some(least)) if least != most => format!("{least} .. {most}"),
            (Some(value), _) => value,
        }
    }

    fn would(&self) -> String {
        let would = self.would_within_hours();
        match (self.outside_hours, would.as_str()) {
            (false, _) => would,
            (true, "-") => "outside its hours".to_owned(),
            (true, _) => format!("outside its hours; within them: {would}"),
        }
    }

    fn would_within_hours(&self) -> String {
        match self.state {
            ThresholdComparison::Over => self.would_when_over(),
            ThresholdComparison::Perhaps => format!("at most: {}", self.would_when_over()),
            ThresholdComparison::Unknown => {
                let why = self.unknown.as_deref().unwrap_or("no value");
                format!("nothing starts: {why}")
            }
            ThresholdComparison::Between | ThresholdComparison::Under if self.in_force > 0 => {
                format!(
                    "keep throttling {}, then restore",
                    count(self.in_force, "pod")
                )
            }
            ThresholdComparison::Between | ThresholdComparison::Under => "-".to_owned(),
        }
    }

    fn would_when_over(&self) -> String {
        let mut acts = Vec::new();
        if let Some(effect) = self.scheduling {
            acts.push(format!("disable scheduling ({effect:?})"));
        }
        let pods = AffectedPods::of([("", self)]);
        acts.extend(pods.describe(["throttle", "reclaim page cache of", "evict"]));
        if acts.is_empty() {
            acts.push("nothing: no pod qualifies".to_owned());
        }
        let acts = acts.join(", ");
        match self.strategy {
            Strategy::Enforce => acts,
            Strategy::Preview => format!("only report: {acts}"),
        }
    }

    fn row(&self, node: &str) -> Vec<String> {
        vec![
            node.to_owned(),
            self.rule.to_string(),
            self.metric.clone(),
            self.shown_value(),
            self.value_of(self.threshold),
            self.source.to_string(),
            self.state.to_string(),
            self.would(),
        ]
    }

    /// The pods of the rule, if it is over its threshold and acts on pods.
    fn fmt_pods(&self, node: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.pods.is_empty() {
            return Ok(());
        }
        let delay = self.period.saturating_mul(self.evaluations);
        write!(
            f,
            "\n{node}: {} ({}), after {} above the threshold ({})",
            self.rule,
            self.action,
            count(self.evaluations as usize, "evaluation"),
            format_duration(delay)
        )?;
        if let Some(evaluations @ 1..) = self.evaluations_to_eviction {
            let after = format_duration(self.period.saturating_mul(evaluations));
            write!(f, "; evicts {after} later at the earliest")?;
        }
        match self.gap {
            Some(gap) => writeln!(f, "; {} to release in total:", self.amount(gap))?,
            None => writeln!(f, ":")?,
        }
        let mut table = Table::new(
            &["  POD", "CLASS", "PRIORITY", "CPU", "MEMORY", "FIRST ROUND"],
            &[2, 3, 4],
        );
        let matched = self.pods.iter().filter(|pod| pod.matched);
        matched.for_each(|pod| table.push(pod.row(self)));
        write!(f, "{table}")?;
        let others: Vec<_> = self.pods.iter().filter(|pod| !pod.matched).collect();
        match others.len() {
            0 => Ok(()),
            number => writeln!(
                f,
                "  left alone, no PodQOS matches: {} ({})",
                count(number, "pod"),
                names(&others)
            ),
        }
    }

    /// Millicores or bytes.
    fn amount(&self, amount: u64) -> String {
        match Metric::parse(&self.metric).and_then(|metric| metric.resource()) {
            Some(crate::engine::metric::Resource::Cpu) => MilliCpu(amount).to_string(),
            _ => Bytes(amount).to_string(),
        }
    }
}

fn names(pods: &[&PodPreview]) -> String {
    let names = pods
        .iter()
        .map(|pod| format!("{}/{}", pod.namespace, pod.name));
    named(names, MAX_NAMED)
}

impl PodPreview {
    fn row(&self, rule: &RulePreview) -> Vec<String> {
        let unknown = || "unknown".to_owned();
        vec![
            format!("  {}/{}", self.namespace, self.name),
            self.class.to_string(),
            self.priority.to_string(),
            self.cpu.map_or_else(unknown, |cpu| cpu.to_string()),
            self.memory
                .map_or_else(unknown, |memory| memory.to_string()),
            self.describe(rule),
        ]
    }

    fn describe(&self, rule: &RulePreview) -> String {
        let acts = self.would.iter().map(|change| act(change, rule));
        let reasons = self.reasons.iter().cloned();
        let text = acts.chain(reasons).collect::<Vec<_>>().join("; ");
        if self.would.is_empty() {
            format!("left alone: {text}")
        } else {
            text
        }
    }
}

fn act(change: &PlanChange, rule: &RulePreview) -> String {
    match change {
        PlanChange::Throttle {
            from,
            to,
            idle,
            quota,
            release,
            ..
        } => {
            let idle = if *idle { ", idle class" } else { "" };
            format!("throttle {from} % -> {to} % ({quota}{idle}), releases {release}")
        }
        PlanChange::Reclaim { amount, .. } => format!("reclaim up to {amount} of page cache"),
        PlanChange::Evict { grace, release, .. } => {
            let release = release.map(|release| format!(", releases {}", rule.amount(release)));
            format!(
                "evict (grace {}){}",
                format_duration(*grace),
                release.unwrap_or_default()
            )
        }
        _ => String::new(),
    }
}

impl Preview {
    fn rules(&self) -> impl Iterator<Item = (&str, &RulePreview)> {
        let nodes = self.nodes.iter();
        nodes.flat_map(|node| {
            node.rules
                .iter()
                .map(move |rule| (node.node.as_str(), rule))
        })
    }

    fn table(&self) -> Table {
        let header = [
            "NODE",
            "RULE",
            "METRIC",
            "VALUE",
            "THRESHOLD",
            "FROM",
            "STATE",
            "WOULD",
        ];
        let mut table = Table::new(&header, &[3, 4]);
        self.rules()
            .for_each(|(node, rule)| table.push(rule.row(node)));
        table
    }

    fn nodes_with(&self, is: impl Fn(&RulePreview) -> bool) -> usize {
        let nodes = self.nodes.iter();
        nodes.filter(|node| node.rules.iter().any(&is)).count()
    }

    /// What each `PodQOS` does to pods of all nodes at all times.
    fn standing(&self) -> Vec<StandingPreview> {
        let mut policies: BTreeMap<&str, StandingPreview> = BTreeMap::new();
        for standing in self.nodes.iter().flat_map(|node| &node.standing) {
            match policies.get_mut(standing.policy.as_str()) {
                Some(known) => known.add(standing),
                None => drop(policies.insert(&standing.policy, standing.clone())),
            }
        }
        policies.into_values().collect()
    }

    /// The load lines, each with the number of nodes that have it; those of most nodes first.
    fn load_lines(&self) -> Vec<String> {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for node in self.nodes.iter().filter(|node| !node.rules.is_empty()) {
            *counts.entry(node.load_lines.to_string()).or_default() += 1;
        }
        let mut lines: Vec<_> = counts.into_iter().collect();
        lines.sort_by_key(|(_, nodes)| Reverse(*nodes));
        let more = lines.len().saturating_sub(MAX_NAMED);
        let shown = lines.into_iter().take(MAX_NAMED);
        let mut shown: Vec<String> = shown
            .map(|(line, nodes)| format!("load line of {}: {line}", count(nodes, "node")))
            .collect();
        if more > 0 {
            shown.push(format!("{more} other load lines: see --output json"));
        }
        shown
    }

    /// The highest batch weight share, and what helps where it is too high.
    fn batch_weight(&self) -> Option<String> {
        let shares = self.nodes.iter().filter_map(|node| {
            let pod = node.most_exposed.as_deref()?;
            Some((node.batch_weight_share?, node.node.as_str(), pod))
        });
        let high = shares
            .clone()
            .filter(|(percent, ..)| *percent > HIGH_PERCENT);
        let advice = match high.count() {
            0 => String::new(),
            high => format!(
                "; above {HIGH_PERCENT:.0} % on {}: too many busy batch pods for the idle class; make them BestEffort, or add a rule on \
                 protected_cpu_delay_max with quotas",
                count(high, "node")
            ),
        };
        let (percent, node, pod) = shares.max_by(|(a, ..), (b, ..)| a.total_cmp(b))?;
        Some(format!(
            "batch weight share (on cgroup v2): at most {percent:.0} %, on {node} beside {pod}{advice}"
        ))
    }

    /// The totals, for example `1 of 2 nodes over a threshold; throttled: 1 pod`.
    pub fn summary(&self) -> String {
        let some = |number: usize, before: &str, what: &str| {
            (number > 0).then(|| format!("{before}: {}", count(number, what)))
        };
        let nodes_in = |state| self.nodes_with(|rule| rule.state == state);
        let acts =
            |strategy| AffectedPods::of(self.rules().filter(|(_, rule)| rule.is_over(strategy)));
        let tainted = |effect| {
            let is = |rule: &RulePreview| {
                rule.scheduling == Some(effect) && rule.is_over(Strategy::Enforce)
            };
            self.nodes_with(is)
        };
        let (closed, avoided) = (
            tainted(TaintEffect::NoSchedule),
            tainted(TaintEffect::PreferNoSchedule),
        );
        let unknown = self
            .rules()
            .filter(|(_, rule)| rule.state == ThresholdComparison::Unknown);
        let reported =
            acts(Strategy::Preview).describe(["throttle of", "reclaim of", "eviction of"]);
        let all = count(self.nodes.len() + self.untouched, "node");
        let mut parts = vec![format!(
            "{} of {all} over a threshold",
            nodes_in(ThresholdComparison::Over)
        )];
        parts.extend(some(
            nodes_in(ThresholdComparison::Perhaps),
            "perhaps over one",
            "node",
        ));
        parts.extend(acts(Strategy::Enforce).describe([
            "throttled:",
            "page cache reclaimed:",
            "evicted:",
        ]));
        parts.extend(some(closed, "closed to new pods", "node"));
        parts.extend(some(avoided, "PreferNoSchedule", "node"));
        if !reported.is_empty() {
            parts.push(format!("only reported: {}", reported.join(", ")));
        }
        parts.extend(some(unknown.count(), "unknown", "value"));
        let without_rules = self.nodes.iter().filter(|node| node.rules.is_empty());
        let without_rules = self.untouched + without_rules.count();
        parts.extend(some(without_rules, "selected by no rule", "node"));
        parts.join("; ")
    }
}

impl fmt::Display for Preview {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rules().next().is_some() {
            write!(f, "{}", self.table())?;
        }
        for (node, rule) in self.rules() {
            rule.fmt_pods(node, f)?;
        }
        if self.rules().next().is_some() {
            writeln!(f)?;
        }
        for line in self.load_lines() {
            writeln!(f, "{line}")?;
        }
        if let Some(line) = self.batch_weight() {
            writeln!(f, "{line}")?;
        }
        for standing in self.standing() {
            writeln!(f, "{}", standing.line())?;
        }
        self.notes
            .iter()
            .try_for_each(|note| writeln!(f, "note: {note}"))?;
        writeln!(f, "{}", self.summary())
    }
}
