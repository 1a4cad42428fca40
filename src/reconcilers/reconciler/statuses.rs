//! What is said about each policy object.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::super::catalog::{Class, Key};
use super::super::conditions::{self, Claim};
use super::super::restrain::source;
use super::super::rollout::{Phase, Rollout};
use super::silent::words;
use super::{Live, Node, World};
use crate::cluster::backoff::jittered;
use crate::crd::{Finding, Kind, Reason};
use crate::engine::policy::{Rule, RuleId, Strategy};
use crate::engine::time::BootTime;

/// Statuses are not written more often.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// After a failure not for so much longer.
const STATUS_RETRY: Duration = Duration::from_secs(3);
/// The condition about a roll-out, and its reason where that was stopped.
const ROLLED_OUT: &str = "RolledOut";
const STOPPED: &str = "CanariesAct";
/// So many canaries are named.
const MOST_NAMED: usize = 3;

/// The status of one policy object.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusWrite {
    /// Which object.
    pub key: Key,
    /// Its status.
    pub status: Value,
}

/// Statuses in which only numbers changed are not written more often: pods come and go.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);
const COUNTS: [&str; 4] = [
    "matchedNodes",
    "breachedNodes",
    "previewNodes",
    "matchedPods",
];

/// How nodes take the policies.
#[derive(Default)]
struct Tallies {
    node_qos: BTreeMap<Arc<str>, Tally>,
    /// Matched pods by `PodQOS`; one of which no agent has told is not there.
    pods: BTreeMap<String, i64>,
}

/// How nodes take one `NodeQOS`.
#[derive(Clone, Default)]
struct Tally {
    /// The strategies of the rules that are in force on some node; where none is selected, that would be on any.
    rules: BTreeMap<RuleId, Strategy>,
    matched: usize,
    breached: usize,
    preview: usize,
}

/// Nodes that keep the same.
struct ClassOfNodes<'a> {
    class: &'a Arc<Class>,
    /// The first of them by name.
    first: &'a str,
    nodes: usize,
}

impl World {
    /// The statuses that differ from what the API server has. `timestamp` is the wall clock, as conditions have it.
    pub fn statuses(&mut self, now: BootTime, timestamp: &str) -> Vec<StatusWrite> {
        let lately = self
            .statuses_at
            .is_some_and(|at| now.since(at) < STATUS_INTERVAL);
        if !self.leading || !self.statuses_dirty || lately {
            return Vec::new();
        }
        self.statuses_at = Some(now);
        self.statuses_dirty = false;
        let anywhere = self.catalog.compiled_for_any_node();
        let classes = self.classes();
        let findings = all_findings(&anywhere.findings, &classes);
        let tallies = self.tallies(&anywhere.policy.rules, &classes);
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

    /// Whether a changed status may be written already.
    fn is_due(&mut self, key: &Key, status: &Value, now: BootTime) -> bool {
        let before = self.catalog.status(key).cloned().unwrap_or_default();
        let lately = self
            .counted_at
            .get(key)
            .is_some_and(|at| now.since(*at) < COUNT_INTERVAL);
        if lately && without_counts(before) == without_counts(status.clone()) {
            self.statuses_dirty = true;
            return false;
        }
        self.counted_at.insert(key.clone(), now);
        true
    }

    /// A status could not be written: all are looked at again, but not at once.
    pub fn status_failed(&mut self, now: BootTime) {
        self.statuses_dirty = true;
        self.statuses_at = Some(now + jittered(STATUS_RETRY));
    }

    /// The classes that there are nodes of, in the order of their first nodes.
    fn classes(&self) -> Vec<ClassOfNodes<'_>> {
        let mut places: HashMap<usize, usize> = HashMap::new();
        let mut classes: Vec<ClassOfNodes<'_>> = Vec::new();
        for (name, node) in &self.nodes {
            let address = Arc::as_ptr(&node.class).addr();
            let place = *places.entry(address).or_insert(classes.len());
            match classes.get_mut(place) {
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

    fn tallies(&self, anywhere: &[Rule], classes: &[ClassOfNodes<'_>]) -> Tallies {
        let mut tallies = Tallies::default();
        for (name, node) in &self.nodes {
            if let Some(live) = self.live.get(name) {
                tallies.add(node, live);
            }
        }
        for ClassOfNodes { class, nodes, .. } in classes {
            for source in &class.selected {
                tallies.of(source).matched += nodes;
            }
            tallies.in_force(&class.content.policy.rules, |_| true);
        }
        let selected = tallies.node_qos.keys().cloned().collect::<BTreeSet<_>>();
        tallies.in_force(anywhere, |source| !selected.contains(source));
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

    /// These rules are in force somewhere.
    fn in_force(&mut self, rules: &[Rule], counts: impl Fn(&str) -> bool) {
        for rule in rules {
            let (_, source) = source(rule);
            if counts(&source) {
                let tally = self.of(&Arc::from(source));
                tally.rules.insert(rule.id.clone(), rule.strategy);
            }
        }
    }

    /// What the agent of one node says.
    fn add(&mut self, node: &Node, live: &Live) {
        for (policy, pods) in &live.status.matched {
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
        for source in live.active_sources().into_iter().filter_map(source) {
            self.of(source).breached += 1;
        }
        for source in live.status.would.iter().filter_map(|name| source(name)) {
            self.of(source).preview += 1;
        }
    }
}

/// What holds on any node, and what holds on some of those that there are: of that, on which.
fn all_findings(
    anywhere: &[Finding],
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
    anywhere.iter().cloned().for_each(&mut add);
    let anywhere: BTreeSet<&Finding> = anywhere.iter().collect();
    // The sizes in a message differ from class to class: one is as good as the other.
    let mut somewhere: BTreeMap<_, (&Finding, &str, usize)> = BTreeMap::new();
    for ClassOfNodes {
        class,
        first,
        nodes,
    } in classes
    {
        let here = class.findings.iter();
        for finding in here.filter(|finding| !anywhere.contains(finding)) {
            let same = (&finding.object, &finding.path, finding.reason);
            somewhere.entry(same).or_insert((finding, first, 0)).2 += nodes;
        }
    }
    for (finding, first, nodes) in somewhere.into_values() {
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

/// On how many of the nodes that a `NodeQOS` selects something holds.
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

/// One word for how far an edit is; `None`: it is where it should be.
const fn rollout_reason(rollout: &Rollout) -> Option<&'static str> {
    Some(match rollout.phase() {
        Phase::Stopped { .. } => STOPPED,
        Phase::Done => return None,
        Phase::Others { .. } => "Progressing",
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

/// What `kubectl get` shows: `Canaries, 40 s left`.
fn rollout_column(rollout: &Rollout) -> Option<String> {
    let reason = rollout_reason(rollout)?;
    Some(rollout.left().map_or_else(
        || reason.to_owned(),
        |left| format!("{reason}, {} left", words(left)),
    ))
}

/// How far an edit is, in words.
pub(super) fn rollout_message(rollout: &Rollout) -> String {
    let canaries = canaries(rollout);
    let size = rollout.size();
    match rollout.phase() {
        Phase::Canaries { stuck, .. } if stuck > 0 && stuck < size => format!(
            "the edit waits: of the {stuck} nodes that have to try it too, none is Ready with an agent that says it keeps its \
             rules; see why agents do not run there, or, to send the edit to all {size} nodes untried, annotate the object \
             with plimsoll.dev/rollout=immediate"
        ),
        Phase::Canaries { stuck: 1.., .. } => format!(
            "the edit waits: of its {size} nodes none is Ready with an agent that says it keeps its rules, so that none \
             can try it first; see why agents do not run there, or, to send the edit to all nodes untried, annotate \
             the object with plimsoll.dev/rollout=immediate"
        ),
        Phase::Canaries { .. } | Phase::Watching { .. } => {
            let left = rollout.left().map(words).unwrap_or_default();
            let from = match rollout.phase() {
                Phase::Watching { .. } => "more",
                _ => "from when these keep it",
            };
            format!(
                "the edit is tried on {canaries} first, for {left} {from}; to skip that, annotate the object with \
                 plimsoll.dev/rollout=immediate"
            )
        }
        Phase::Others { .. } => format!("the edit goes to {size} nodes"),
        Phase::Stopped { acting } => {
            let acting = if acting == 0 {
                "too many".to_owned()
            } else {
                acting.to_string()
            };
            format!(
                "the edit stops at {canaries}, because {acting} of these act since they have it; edit \
                 the object again, or annotate it with plimsoll.dev/rollout=immediate to go on"
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
        few if few.len() <= MOST_NAMED => format!("{of} ({})", few.join(", ")),
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
