//! The statuses of policy objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::conditions::{self, ConditionState};
use crate::cluster::backoff::jittered;
use crate::crd::{Finding, Kind, Reason};
use crate::engine::policy::{Rule, RuleId, Strategy};
use crate::engine::time::BootTime;
use crate::reconcilers::compile::catalog::{Class, Key};
use crate::reconcilers::compile::index::{Index, IndexedNode};
use crate::reconcilers::compile::watermark::KnownWatermark;
use crate::reconcilers::plan::operations::StatusWrite;
use crate::reconcilers::plan::progress;
use crate::reconcilers::plan::rollout::{Rollout, RolloutPhase};
use crate::reconcilers::plan::rollouts::Rollouts;
use crate::reconcilers::plan::tightening::source;

/// Minimum interval between two status updates.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// Extra delay after a failure.
const STATUS_RETRY_DELAY: Duration = Duration::from_secs(3);

/// Minimum interval for statuses in which only counts changed: pods come and go.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
const COUNTS: [&str; 5] = [
    "matchedNodes",
    "breachedNodes",
    "previewNodes",
    "wouldLastDay",
    "matchedPods",
];

/// Node and pod counts of all policies.
#[derive(Default)]
struct Tallies {
    node_qos: BTreeMap<Arc<str>, Tally>,
    /// Matched pods by `PodQOS`; absent if no agent has reported any.
    pods: BTreeMap<String, i64>,
}

/// Node counts of one `NodeQOS`.
#[derive(Clone, Default)]
struct Tally {
    /// The strategies of the rules in force on some node; if no node is selected, of those that would be.
    rules: BTreeMap<RuleId, Strategy>,
    matched: usize,
    breached: usize,
    preview: usize,
    /// How often Preview rules would have begun to act in the last day; `None` if there are none.
    would_last_day: Option<i64>,
}

/// The nodes of a class.
struct ClassOfNodes<'a> {
    class: &'a Arc<Class>,
    /// The name of the first one.
    first: &'a str,
    nodes: usize,
}

/// Whether the written statuses are up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Current,
    Stale,
}

/// Which statuses have to be written, and when.
pub struct Statuses {
    state: State,
    /// The next check.
    not_before: Option<BootTime>,
    /// When the status of each object was last written.
    written: BTreeMap<Key, BootTime>,
}

impl Default for Statuses {
    fn default() -> Self {
        Self {
            state: State::Stale,
            not_before: None,
            written: BTreeMap::new(),
        }
    }
}

impl Statuses {
    /// Something changed that statuses show.
    pub const fn invalidate(&mut self) {
        self.state = State::Stale;
    }

    /// A status could not be written: all are checked again after a delay.
    pub fn failed(&mut self, now: BootTime) {
        self.state = State::Stale;
        self.not_before = Some(now + jittered(STATUS_RETRY_DELAY) + STATUS_INTERVAL);
    }

    /// An object was deleted.
    pub fn remove(&mut self, key: &Key) {
        self.written.remove(key);
    }

    /// The statuses that differ from the API server's. `timestamp` is the wall clock time for conditions.
    pub fn changed(
        &mut self,
        index: &Index,
        rollouts: &Rollouts,
        now: BootTime,
        timestamp: &str,
    ) -> Vec<StatusWrite> {
        let is_early = self.not_before.is_some_and(|at| now < at);
        if self.state == State::Current || is_early {
            return Vec::new();
        }
        self.not_before = Some(now + STATUS_INTERVAL);
        self.state = State::Current;
        let any_node = index.catalog.compiled_for_any_node();
        let classes = classes(index);
        let findings = all_findings(&any_node.findings, &classes);
        let tallies = Tallies::of(index, &any_node.policy.rules, &classes);
        let status = |(key, before): (&Key, &Value)| {
            let about = findings.get(key);
            let rollout = rollouts.get(key);
            let status = status_of(index, key, before, about, rollout, &tallies, timestamp);
            (status != *before).then(|| (key.clone(), status))
        };
        let changed: Vec<(Key, Value)> = index.catalog.statuses().filter_map(status).collect();
        let due = |(key, status): (Key, Value)| {
            self.claim_write(index, &key, &status, now)
                .then_some(StatusWrite { key, status })
        };
        changed.into_iter().filter_map(due).collect()
    }

    /// Whether a changed status may be written now; if so, records the write, otherwise remembers that it is stale.
    fn claim_write(&mut self, index: &Index, key: &Key, status: &Value, now: BootTime) -> bool {
        let before = index.catalog.status(key).cloned().unwrap_or_default();
        let written = self.written.get(key);
        let is_recent = written.is_some_and(|at| now.since(*at) < COUNT_INTERVAL);
        if is_recent && without_counts(before) == without_counts(status.clone()) {
            self.state = State::Stale;
            return false;
        }
        self.written.insert(key.clone(), now);
        true
    }
}

/// The classes that have nodes, ordered by their first node.
fn classes(index: &Index) -> Vec<ClassOfNodes<'_>> {
    let mut positions: HashMap<usize, usize> = HashMap::new();
    let mut classes: Vec<ClassOfNodes<'_>> = Vec::new();
    for (name, node) in &index.nodes {
        let address = Arc::as_ptr(&node.class).addr();
        let position = *positions.entry(address).or_insert(classes.len());
        match classes.get_mut(position) {
            Some(known) => known.nodes += 1,
            None => classes.push(ClassOfNodes {
                class: &node.class,
                first: name,
                nodes: 1,
            }),
        }
    }
    classes
}

fn status_of(
    index: &Index,
    key: &Key,
    before: &Value,
    findings: Option<&BTreeSet<Finding>>,
    rollout: Option<&Rollout>,
    tallies: &Tallies,
    timestamp: &str,
) -> Value {
    let generation = index.catalog.generation(key);
    let none = BTreeSet::new();
    let mut claims = conditions::claims(key.0, findings.unwrap_or(&none));
    if let Some((rollout, is_stopped)) = rollout.and_then(rollout_claim) {
        claims.extend(conditions::progress(&claims, &rollout, is_stopped));
        claims.push(rollout);
    }
    let conditions = conditions::conditions(&before["conditions"], claims, generation, timestamp);
    let mut status = json!({"observedGeneration": generation, "conditions": conditions});
    if let Some(column) = rollout.and_then(progress::column) {
        status["rollout"] = json!(column);
    }
    match key.0 {
        Kind::NodeQos => {
            let tally = tallies.node_qos.get(key.1.as_str()).cloned();
            let tally = tally.unwrap_or_default();
            status["matchedNodes"] = json!(tally.matched);
            status["breachedNodes"] = json!(tally.breached);
            status["previewNodes"] = json!(tally.preview);
            if let Some(times) = tally.would_last_day {
                status["wouldLastDay"] = json!(times);
            }
            status["rules"] = json!(tally.rules.len());
            status["strategy"] = json!(strategy(tally.rules.values()));
        }
        Kind::AvoidanceAction => {
            let users: Vec<_> = index.catalog.users(&key.1).into_iter().take(64).collect();
            status["usedBy"] = json!(users.iter().map(|name| &**name).collect::<Vec<_>>());
        }
        Kind::PodQos => {
            if let Some(pods) = tallies.pods.get(&key.1) {
                status["matchedPods"] = json!(pods);
            }
        }
    }
    status
}

impl Tallies {
    fn of(index: &Index, any_node: &[Rule], classes: &[ClassOfNodes<'_>]) -> Self {
        let mut tallies = Self::default();
        for (name, node) in &index.nodes {
            if let Some(watermark) = index.watermarks.get(name) {
                tallies.add(node, watermark);
            }
        }
        for ClassOfNodes { class, nodes, .. } in classes {
            for source in &class.selected {
                tallies.tally(source).matched += nodes;
            }
            tallies.in_force(&class.content.policy.rules, |_| true);
        }
        let selected = tallies.node_qos.keys().cloned().collect::<BTreeSet<_>>();
        tallies.in_force(any_node, |source| !selected.contains(source));
        tallies
    }

    fn tally(&mut self, source: &Arc<str>) -> &mut Tally {
        self.node_qos.entry(Arc::clone(source)).or_default()
    }

    /// Counts rules that are in force.
    fn in_force(&mut self, rules: &[Rule], counts: impl Fn(&str) -> bool) {
        for rule in rules {
            let (_, source) = source(rule);
            if counts(&source) {
                let tally = self.tally(&Arc::from(source));
                tally.rules.insert(rule.id.clone(), rule.strategy);
            }
        }
    }

    /// Counts what the agent of one node reports.
    fn add(&mut self, node: &IndexedNode, watermark: &KnownWatermark) {
        for (policy, pods) in &watermark.status.matched {
            let sum = self.pods.entry(policy.clone()).or_default();
            *sum = sum.saturating_add(*pods);
        }
        let selected = |name: &str| {
            node.class
                .selected
                .binary_search_by(|known| (**known).cmp(name))
                .ok()
        };
        let source = |name: &str| node.class.selected.get(selected(name)?);
        for source in watermark.active_sources().into_iter().filter_map(source) {
            self.tally(source).breached += 1;
        }
        for source in watermark
            .status
            .would
            .iter()
            .filter_map(|name| source(name))
        {
            self.tally(source).preview += 1;
        }
        for (name, times) in &watermark.status.would_last_day {
            if let Some(source) = source(name) {
                let sum = &mut self.tally(source).would_last_day;
                *sum = Some(sum.unwrap_or(0).saturating_add(*times));
            }
        }
    }
}

/// The findings that hold on any node, and those that hold on some nodes, with the nodes.
fn all_findings(
    any_node: &[Finding],
    classes: &[ClassOfNodes<'_>],
) -> BTreeMap<Key, BTreeSet<Finding>> {
    let mut found: BTreeMap<Key, BTreeSet<Finding>> = BTreeMap::new();
    let mut add = |finding: Finding| {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| kind.name() == finding.object.kind);
        if let Some(kind) = kind {
            let about = found.entry((kind, finding.object.name.clone()));
            about.or_default().insert(finding);
        }
    };
    any_node.iter().cloned().for_each(&mut add);
    let any_node: BTreeSet<&Finding> = any_node.iter().collect();
    // Sizes in the messages differ between classes; the first one is used.
    let mut some_nodes: BTreeMap<_, (&Finding, &str, usize)> = BTreeMap::new();
    for ClassOfNodes {
        class,
        first,
        nodes,
    } in classes
    {
        let here = class.findings.iter();
        for finding in here.filter(|finding| !any_node.contains(finding)) {
            let same = (&finding.object, &finding.path, finding.reason);
            some_nodes.entry(same).or_insert((finding, first, 0)).2 += nodes;
        }
    }
    for (finding, first, nodes) in some_nodes.into_values() {
        let selected = classes
            .iter()
            .filter(|it| it.class.is_selected_by(&finding.object.name));
        let all: usize = selected.map(|it| it.nodes).sum();
        let message = format!(
            "{}; {}",
            finding.message,
            on_which(finding.reason, first, nodes, all)
        );
        add(Finding {
            message,
            ..finding.clone()
        });
    }
    found
}

/// On how many of the nodes selected by a `NodeQOS` a finding holds.
fn on_which(reason: Reason, first: &str, nodes: usize, all: usize) -> String {
    let others = all.saturating_sub(nodes);
    match (all, others) {
        (1, _) => format!("this holds for {first}, the only node that is selected"),
        (_, 0) => format!("this holds for all {all} nodes that are selected, {first} for example"),
        _ if reason == Reason::ThresholdTooHigh => format!(
            "this holds for {nodes} of the {all} nodes that are selected, {first} for example; the other {others} can exceed it"
        ),
        _ => format!(
            "this holds for {nodes} of the {all} nodes that are selected, {first} for example"
        ),
    }
}

/// `None` where rules act, `Preview` where they only report; both where there are both.
fn strategy<'a>(strategies: impl Iterator<Item = &'a Strategy>) -> String {
    let different: BTreeSet<&str> = strategies.map(|strategy| strategy.name()).collect();
    different.into_iter().collect::<Vec<_>>().join(",")
}

fn without_counts(mut status: Value) -> Value {
    if let Some(fields) = status.as_object_mut() {
        fields.retain(|field, _| !COUNTS.contains(&field.as_str()));
    }
    status
}

/// The condition about the rollout, and whether it has stopped.
fn rollout_claim(rollout: &Rollout) -> Option<(ConditionState, bool)> {
    let claim = ConditionState {
        kind: progress::ROLLED_OUT,
        holds: false,
        reason: progress::reason(rollout)?.to_owned(),
        message: progress::message(rollout),
    };
    let is_stopped = matches!(rollout.phase(), RolloutPhase::Stopped { .. });
    Some((claim, is_stopped))
}
