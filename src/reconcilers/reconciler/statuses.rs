//! The statuses of policy objects.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::catalog::{Class, Key};
use super::super::conditions::{self, Claim};
use super::super::rollout::{Phase, Rollout};
use super::super::tightening::source;
use super::agents::format_duration;
use super::{KnownWatermark, Node, Reconciler};
use crate::cluster::backoff::jittered;
use crate::crd::{Finding, Kind, Reason};
use crate::engine::policy::{Rule, RuleId, Strategy};
use crate::engine::time::BootTime;

/// Minimum interval between two status updates.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// Extra delay after a failure.
const STATUS_RETRY_DELAY: Duration = Duration::from_secs(3);
/// The condition about a roll-out, and its reason if it was stopped.
const ROLLED_OUT: &str = "RolledOut";
const STOPPED: &str = "CanariesAct";
/// Canaries to name in a message.
const MAX_NAMED: usize = 3;

/// The status of one policy object.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusWrite {
    /// Which object.
    pub key: Key,
    /// The new status.
    pub status: Value,
}

/// Minimum interval for statuses in which only counts changed: pods come and go.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
const COUNTS: [&str; 4] = [
    "matchedNodes",
    "breachedNodes",
    "previewNodes",
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
}

/// The nodes of a class.
struct ClassOfNodes<'a> {
    class: &'a Arc<Class>,
    /// The name of the first one.
    first: &'a str,
    nodes: usize,
}

impl Reconciler {
    /// The statuses that differ from the API server's. `timestamp` is the wall clock time for conditions.
    pub fn statuses(&mut self, now: BootTime, timestamp: &str) -> Vec<StatusWrite> {
        let is_recent = self
            .statuses_at
            .is_some_and(|at| now.since(at) < STATUS_INTERVAL);
        if !self.leading || !self.statuses_dirty || is_recent {
            return Vec::new();
        }
        self.statuses_at = Some(now);
        self.statuses_dirty = false;
        let any_node = self.catalog.compiled_for_any_node();
        let classes = self.classes();
        let findings = all_findings(&any_node.findings, &classes);
        let tallies = self.tallies(&any_node.policy.rules, &classes);
        let status = |(key, before): (&Key, &Value)| {
            let status = self.status_of(key, before, &findings, &tallies, timestamp);
            (status != *before).then(|| (key.clone(), status))
        };
        let changed: Vec<(Key, Value)> = self.catalog.statuses().filter_map(status).collect();
        let due = |(key, status): (Key, Value)| {
            self.is_due(&key, &status, now)
                .then_some(StatusWrite { key, status })
        };
        changed.into_iter().filter_map(due).collect()
    }

    /// Whether a changed status may be written now.
    fn is_due(&mut self, key: &Key, status: &Value, now: BootTime) -> bool {
        let before = self.catalog.status(key).cloned().unwrap_or_default();
        let is_recent = self
            .status_written_at
            .get(key)
            .is_some_and(|at| now.since(*at) < COUNT_INTERVAL);
        if is_recent && without_counts(before) == without_counts(status.clone()) {
            self.statuses_dirty = true;
            return false;
        }
        self.status_written_at.insert(key.clone(), now);
        true
    }

    /// A status could not be written: all are checked again after a delay.
    pub fn status_failed(&mut self, now: BootTime) {
        self.statuses_dirty = true;
        self.statuses_at = Some(now + jittered(STATUS_RETRY_DELAY));
    }

    /// The classes that have nodes, ordered by their first node.
    fn classes(&self) -> Vec<ClassOfNodes<'_>> {
        let mut indexes: HashMap<usize, usize> = HashMap::new();
        let mut classes: Vec<ClassOfNodes<'_>> = Vec::new();
        for (name, node) in &self.nodes {
            let address = Arc::as_ptr(&node.class).addr();
            let index = *indexes.entry(address).or_insert(classes.len());
            match classes.get_mut(index) {
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

    fn tallies(&self, any_node: &[Rule], classes: &[ClassOfNodes<'_>]) -> Tallies {
        let mut tallies = Tallies::default();
        for (name, node) in &self.nodes {
            if let Some(watermark) = self.watermarks.get(name) {
                tallies.add(node, watermark);
            }
        }
        for ClassOfNodes { class, nodes, .. } in classes {
            for source in &class.selected {
                tallies.of(source).matched += nodes;
            }
            tallies.in_force(&class.content.policy.rules, |_| true);
        }
        let selected = tallies.node_qos.keys().cloned().collect::<BTreeSet<_>>();
        tallies.in_force(any_node, |source| !selected.contains(source));
        tallies
    }

    fn status_of(
        &self,
        key: &Key,
        before: &Value,
        findings: &BTreeMap<Key, BTreeSet<Finding>>,
        tallies: &Tallies,
        timestamp: &str,
    ) -> Value {
        let generation = self.catalog.generation(key);
        let none = BTreeSet::new();
        let about = findings.get(key).unwrap_or(&none);
        let mut claims = conditions::claims(key.0, about);
        if let Some(rollout) = self.rollouts.get(key) {
            claims.extend(rollout_claim(rollout));
        }
        let conditions =
            conditions::conditions(&before["conditions"], claims, generation, timestamp);
        let mut status = json!({"observedGeneration": generation, "conditions": conditions});
        if let Some(rollout) = self.rollouts.get(key).and_then(rollout_column) {
            status["rollout"] = json!(rollout);
        }
        match key.0 {
            Kind::NodeQos => {
                let tally = tallies.node_qos.get(key.1.as_str()).cloned();
                let tally = tally.unwrap_or_default();
                status["matchedNodes"] = json!(tally.matched);
                status["breachedNodes"] = json!(tally.breached);
                status["previewNodes"] = json!(tally.preview);
                status["rules"] = json!(tally.rules.len());
                status["strategy"] = json!(strategy(tally.rules.values()));
            }
            Kind::AvoidanceAction => {
                let users: Vec<_> = self.catalog.users(&key.1).into_iter().take(64).collect();
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
}

impl Tallies {
    fn of(&mut self, source: &Arc<str>) -> &mut Tally {
        self.node_qos.entry(Arc::clone(source)).or_default()
    }

    /// Counts rules that are in force.
    fn in_force(&mut self, rules: &[Rule], counts: impl Fn(&str) -> bool) {
        for rule in rules {
            let (_, source) = source(rule);
            if counts(&source) {
                let tally = self.of(&Arc::from(source));
                tally.rules.insert(rule.id.clone(), rule.strategy);
            }
        }
    }

    /// Counts what the agent of one node reports.
    fn add(&mut self, node: &Node, watermark: &KnownWatermark) {
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
            self.of(source).breached += 1;
        }
        for source in watermark
            .status
            .would
            .iter()
            .filter_map(|name| source(name))
        {
            self.of(source).preview += 1;
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
        _ if reason == Reason::WatermarkTooHigh => format!(
            "this holds for {nodes} of the {all} nodes that are selected, {first} for example; the other {others} can pass it"
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

/// The reason of the condition `RolledOut`; `None` when the roll-out is done.
const fn rollout_reason(rollout: &Rollout) -> Option<&'static str> {
    Some(match rollout.phase() {
        Phase::Stopped { .. } => STOPPED,
        Phase::Done => return None,
        Phase::Progressing { .. } => "Progressing",
        Phase::Canaries { stuck: 1.., .. } => "NoCanary",
        Phase::Canaries { .. } | Phase::Watching { .. } => "Canaries",
    })
}

fn rollout_claim(rollout: &Rollout) -> Option<Claim> {
    Some(Claim {
        kind: ROLLED_OUT,
        holds: false,
        reason: rollout_reason(rollout)?.to_owned(),
        message: rollout_message(rollout),
    })
}

/// The column of `kubectl get`: `Canaries, 40 s left`.
fn rollout_column(rollout: &Rollout) -> Option<String> {
    let reason = rollout_reason(rollout)?;
    Some(rollout.remaining().map_or_else(
        || reason.to_owned(),
        |left| format!("{reason}, {} left", format_duration(left)),
    ))
}

/// The progress of a roll-out, as a message.
pub(super) fn rollout_message(rollout: &Rollout) -> String {
    let canaries = canaries(rollout);
    let size = rollout.size();
    match rollout.phase() {
        Phase::Canaries { stuck, .. } if stuck > 0 && stuck < size => format!(
            "the edit waits: of the {stuck} nodes that have to try it too, none is Ready with an agent that enforces its \
             rules; check why agents do not run there, or, to send the edit to all {size} nodes without canaries, annotate \
             the object with plimsoll.dev/rollout=immediate"
        ),
        Phase::Canaries { stuck: 1.., .. } => format!(
            "the edit waits: of its {size} nodes none is Ready with an agent that enforces its rules, so that none can be a \
             canary; check why agents do not run there, or, to send the edit to all nodes without canaries, annotate the \
             object with plimsoll.dev/rollout=immediate"
        ),
        Phase::Canaries { .. } | Phase::Watching { .. } => {
            let left = rollout.remaining().map(format_duration).unwrap_or_default();
            let from = match rollout.phase() {
                Phase::Watching { .. } => "more",
                _ => "after they enforce it",
            };
            format!(
                "the edit is tried on {canaries} first, for {left} {from}; to skip that, annotate the object with \
                 plimsoll.dev/rollout=immediate"
            )
        }
        Phase::Progressing { .. } => format!("the edit is going to {size} nodes"),
        Phase::Stopped { acting } => {
            let acting = if acting == 0 {
                "too many".to_owned()
            } else {
                acting.to_string()
            };
            format!(
                "the edit stopped at {canaries}, because {acting} of these act since they enforce it; edit the object \
                 again, or annotate it with plimsoll.dev/rollout=immediate to continue"
            )
        }
        Phase::Done => format!("all {size} nodes may have the edit"),
    }
}

/// `1 of 20 nodes (node07)`.
fn canaries(rollout: &Rollout) -> String {
    let names: Vec<&str> = rollout.canaries().iter().map(String::as_str).collect();
    let of = format!("{} of {} nodes", names.len(), rollout.size());
    match &names[..] {
        few if few.len() <= MAX_NAMED => format!("{of} ({})", few.join(", ")),
        _ => of,
    }
}

/// Whether the last leader stopped the roll-out of this generation.
pub(super) fn stopped_before(status: Option<&Value>, generation: i64) -> bool {
    let conditions = status.and_then(|status| status["conditions"].as_array());
    conditions.into_iter().flatten().any(|condition| {
        condition["type"] == ROLLED_OUT
            && condition["reason"] == STOPPED
            && condition["observedGeneration"] == generation
    })
}
