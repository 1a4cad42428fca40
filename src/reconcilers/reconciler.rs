//! The controller's decisions. Pure: objects and the time in, operations out.

mod agents;
mod cap;
mod conflicts;
mod events;
mod evictions;
mod label_filter;
mod rollouts;
mod statuses;
mod targets;
mod watermark;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::cap::Cap;
use super::catalog::{Affected, Catalog, Class, Key, selects};
use super::content::DesiredSpec;
use super::liveness::LivenessMonitor;
use super::rollout::Rollout;
use super::wire::{ObservedNode, Watermark};
use crate::cluster::backoff::jittered;
use crate::crd::Kind;
use crate::engine::policy::NodeFacts;
use crate::engine::time::BootTime;
use conflicts::EditConflicts;
use label_filter::{LabelFilter, SelectorFilter};
use targets::Targets;
use watermark::KnownWatermark;

pub use events::{PendingEvent, Subject};
pub use statuses::StatusWrite;

/// Settings of the controller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Nodes per second that an edit reaches after its canaries succeeded.
    pub rollout_nodes_per_second: f64,
    /// How many nodes may be unschedulable at a time, of those that any rule may make so.
    pub max_unschedulable: Cap,
    /// The taint of an agent that is unresponsive for this long is removed.
    pub silent_agent_after: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rollout_nodes_per_second: 100.0,
            max_unschedulable: Cap::Percent(30),
            silent_agent_after: Duration::from_mins(10),
        }
    }
}

/// An operation on the API server.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Apply the `NodeWatermark` of a node.
    Apply {
        /// Its node.
        node: String,
        /// The spec to apply.
        spec: DesiredSpec,
    },
    /// Delete the `NodeWatermark` of a deleted node.
    Delete {
        /// The node.
        node: String,
        /// The object's UID, as a precondition.
        uid: String,
    },
    /// Read the Lease of an agent that seems unresponsive.
    ReadLease {
        /// The node.
        node: String,
    },
    /// Remove our taint from a node whose agent is unresponsive.
    RemoveTaint {
        /// The node.
        node: String,
        /// Its UID, as a precondition.
        uid: String,
    },
}

/// One node.
struct Node {
    uid: String,
    facts: NodeFacts,
    label_filter: LabelFilter,
    class: Arc<Class>,
    zone: Arc<str>,
    ready: bool,
    tainted: bool,
    interferes: bool,
}

/// The state of the controller, and its decisions.
pub struct Reconciler {
    settings: Settings,
    catalog: Catalog,
    nodes: BTreeMap<String, Node>,
    watermarks: BTreeMap<String, KnownWatermark>,
    /// Nodes beyond the cap, which get `PreferNoSchedule`.
    prefer_no_schedule: BTreeSet<String>,
    /// Nodes whose taint was removed because their agent is unresponsive.
    taint_removed: BTreeSet<String>,
    liveness: LivenessMonitor,
    /// Nodes that a `NodeQOS` selects and that have no agent.
    without_agent: usize,
    /// Ages of heartbeats when the next one arrived.
    heartbeat_ages: Vec<Duration>,
    /// Nodes whose agent became unresponsive (true), or responds again.
    liveness_changes: Vec<(String, bool)>,
    rollouts: BTreeMap<Key, Rollout>,
    targets: Targets,
    /// Nodes whose `NodeWatermark` may have to be written.
    dirty: BTreeSet<String>,
    attempts: BTreeMap<String, Attempt>,
    conflicts: EditConflicts,
    events: Vec<PendingEvent>,
    statuses_dirty: bool,
    statuses_at: Option<BootTime>,
    /// When the status of each object was last written.
    status_written_at: BTreeMap<Key, BootTime>,
    /// The cap has to be checked.
    cap_dirty: bool,
    leading: bool,
}

impl Reconciler {
    /// An empty state.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            catalog: Catalog::default(),
            nodes: BTreeMap::new(),
            watermarks: BTreeMap::new(),
            prefer_no_schedule: BTreeSet::new(),
            taint_removed: BTreeSet::new(),
            liveness: LivenessMonitor::new(settings.silent_agent_after),
            without_agent: 0,
            heartbeat_ages: Vec::new(),
            liveness_changes: Vec::new(),
            rollouts: BTreeMap::new(),
            targets: Targets::default(),
            dirty: BTreeSet::new(),
            attempts: BTreeMap::new(),
            conflicts: EditConflicts::default(),
            events: Vec::new(),
            statuses_dirty: true,
            statuses_at: None,
            status_written_at: BTreeMap::new(),
            cap_dirty: true,
            leading: false,
        }
    }

    /// A node was added or changed.
    pub fn apply_node(&mut self, name: &str, node: ObservedNode) {
        let ObservedNode {
            uid,
            facts,
            ready,
            tainted,
            interferes,
        } = node;
        if let Some(node) = self.nodes.get_mut(name)
            && node.uid == uid
            && node.facts == facts
        {
            if (node.ready, node.tainted, node.interferes) != (ready, tainted, interferes) {
                self.cap_dirty |= node.tainted != tainted;
                (node.ready, node.tainted, node.interferes) = (ready, tainted, interferes);
                self.update_liveness(name);
            }
            return;
        }
        let class = self.catalog.class(&facts);
        let node = Node {
            uid,
            zone: agents::zone(&facts.labels),
            label_filter: LabelFilter::of(&facts.labels),
            facts,
            class,
            ready,
            tainted,
            interferes,
        };
        self.nodes.insert(name.to_owned(), node);
        self.remove_from_rollouts(name);
        self.update_liveness(name);
        self.touch(name);
    }

    /// A node was deleted.
    pub fn delete_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.taint_removed.remove(name);
        self.remove_from_rollouts(name);
        self.update_liveness(name);
        self.touch(name);
    }

    fn touch(&mut self, node: &str) {
        self.dirty.insert(node.to_owned());
        self.statuses_dirty = true;
        self.cap_dirty = true;
    }

    /// A policy object was added or changed.
    pub fn apply_policy(&mut self, kind: Kind, name: &str, object: &serde_json::Value) {
        let affected = self.catalog.apply(kind, name, object);
        let key = (kind, name.to_owned());
        if self.catalog.is_immediate(&key) && self.rollouts.remove(&key).is_some() {
            self.dirty.extend(self.nodes.keys().cloned());
        }
        self.recompile(&key, &affected);
    }

    /// A policy object was deleted.
    pub fn delete_policy(&mut self, kind: Kind, name: &str) {
        let affected = self.catalog.delete(kind, name);
        let key = (kind, name.to_owned());
        self.status_written_at.remove(&key);
        self.recompile(&key, &affected);
    }

    /// Recompiles what an edit affects, and starts to roll it out.
    fn recompile(&mut self, key: &Key, affected: &Affected) {
        self.statuses_dirty = true;
        self.cap_dirty = true;
        if *affected == Affected::None {
            return;
        }
        self.rollouts
            .retain(|rolling, _| rolling != key && !affected.edits(rolling));
        let selectors = self.catalog.selectors_of(affected);
        let selectors = selectors
            .iter()
            .map(|it| (SelectorFilter::of(it.as_ref()), it));
        let selectors: Vec<_> = selectors.collect();
        let mut touched = Vec::new();
        for (name, node) in &mut self.nodes {
            let selected_now = selectors.iter().any(|(filter, selector)| {
                filter.may_match(node.label_filter) && selects(selector.as_ref(), &node.facts)
            });
            if !selected_now && !affected.affects(&node.class.selected) {
                continue;
            }
            node.class = self.catalog.class(&node.facts);
            touched.push(name.clone());
        }
        if self.leading {
            self.start_rollouts(&touched);
        }
        self.dirty.extend(touched);
    }

    /// A `NodeWatermark` from a watch or the response to a write. Ignored if a newer one is known.
    pub fn apply_watermark(&mut self, name: &str, seen: &Watermark) {
        let before = self.watermarks.get(name);
        if !before.is_some_and(|before| before.is_newer_than(seen)) {
            self.apply_listed_watermark(name, seen);
        }
    }

    /// A `NodeWatermark` from a full list. It may be older than the known one: the API server may be restored from a backup.
    pub fn apply_listed_watermark(&mut self, name: &str, seen: &Watermark) {
        let before = self.watermarks.get(name);
        let known = KnownWatermark::of(seen, self.catalog.contents(), before);
        let status_changed = before.is_none_or(|before| !before.has_same_status(&known));
        let edited = before.is_some_and(|before| before.was_edited(&known));
        if before.is_none_or(|before| before.hash != known.hash || before.uid != known.uid) {
            self.dirty.insert(name.to_owned());
        }
        self.watermarks.insert(name.to_owned(), known);
        if status_changed {
            self.statuses_dirty = true;
            self.cap_dirty = true;
            self.update_liveness(name);
        }
        // Without a status it is the controller's own write.
        if status_changed && seen.has_status() {
            self.status_written(name);
        }
        if edited && self.leading {
            self.edited_by(name, seen.edited_by.as_deref());
        }
    }

    /// A `NodeWatermark` was deleted.
    pub fn delete_watermark(&mut self, name: &str) {
        let known = self.watermarks.remove(name).is_some();
        if known && self.leading && self.nodes.contains_key(name) {
            let message = "its NodeWatermark was deleted by an unknown client and is created again"
                .to_owned();
            self.warn_node(name, "WatermarkDeleted", message);
        }
        self.update_liveness(name);
        self.touch(name);
    }

    /// Starts to lead: every difference is reconciled, tightenings by way of canaries.
    pub fn start_leading(&mut self) {
        self.leading = true;
        self.attempts.clear();
        self.taint_removed.clear();
        self.liveness_changes.clear();
        self.liveness.start();
        let prefer = self.watermarks.iter();
        let prefer = prefer.filter(|(_, watermark)| watermark.soften_scheduling);
        self.prefer_no_schedule = prefer.map(|(name, _)| name.clone()).collect();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        self.resume_rollouts();
        self.dirty.extend(names);
        self.dirty.extend(self.watermarks.keys().cloned());
        self.statuses_dirty = true;
        self.cap_dirty = true;
    }

    /// Stops leading.
    pub fn stop_leading(&mut self) {
        self.leading = false;
        self.events.clear();
    }

    /// The operations to start now, with at most `room` writes of `NodeWatermarks`. Each is in progress until
    /// [`Self::written`], [`Self::taint_removed`] or [`Self::lease_read`] is called.
    pub fn plan(&mut self, now: BootTime, room: usize) -> Vec<Operation> {
        if !self.leading {
            // A new leader starts with all nodes.
            self.dirty.clear();
            return Vec::new();
        }
        self.advance_rollouts(now);
        if std::mem::take(&mut self.cap_dirty) {
            self.update_cap();
        }
        self.delay_conflicting_writes(now);
        let mut operations = self.check_liveness(now);
        let room = room + operations.len();
        let mut next = self.dirty.first().cloned();
        while let Some(name) = next {
            if operations.len() >= room {
                break;
            }
            let later = (Bound::Excluded(name.as_str()), Bound::Unbounded);
            next = self.dirty.range::<str, _>(later).next().cloned();
            let attempt = self.attempts.get(&name);
            if !attempt.is_none_or(|attempt| attempt.is_due(now)) {
                continue;
            }
            match self.operation_for(&name) {
                Some(operation) => {
                    self.start(&name, &operation);
                    operations.push(operation);
                }
                None => drop(self.dirty.remove(&name)),
            }
        }
        self.targets.clear();
        operations
    }

    fn start(&mut self, name: &str, operation: &Operation) {
        let attempt = self.attempts.entry(name.to_owned()).or_default();
        attempt.start();
        attempt.hash = match operation {
            Operation::Apply { spec, .. } => Some(spec.hash()),
            _ => None,
        };
    }

    fn operation_for(&mut self, name: &str) -> Option<Operation> {
        let current = self.watermarks.get(name);
        let Some(node) = self.nodes.get(name) else {
            return current.map(|current| Operation::Delete {
                node: name.to_owned(),
                uid: current.uid.clone(),
            });
        };
        let content = self
            .targets
            .of(name, node, current, &self.rollouts, &mut self.catalog);
        let soften = self.prefer_no_schedule.contains(name);
        if current.is_some_and(|current| current.hash == Some(content.hash(&node.uid, soften))) {
            return None;
        }
        Some(Operation::Apply {
            node: name.to_owned(),
            spec: DesiredSpec {
                node_uid: node.uid.clone(),
                content,
                soften,
                sources: Arc::clone(&node.class.sources),
            },
        })
    }

    /// A write finished; the object as the API server has it now, `None` if it was deleted.
    pub fn written(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<Watermark>, WriteError>,
    ) {
        self.dirty.insert(node.to_owned());
        match outcome {
            Ok(Some(seen)) => {
                let applied = self.attempts.get(node).and_then(|attempt| attempt.hash);
                self.apply_watermark(node, &seen);
                let current = self.watermarks.get(node);
                // Back off: an API server that drops fields would be written to in a loop.
                if current.is_some_and(|it| applied.is_some() && it.hash.is_none()) {
                    return self.failed(node, now, WriteError::default());
                }
            }
            Ok(None) => drop(self.watermarks.remove(node)),
            Err(error) => return self.failed(node, now, error),
        }
        self.attempts.remove(node);
    }

    fn failed(&mut self, node: &str, now: BootTime, error: WriteError) {
        let attempt = self.attempts.entry(node.to_owned()).or_default();
        attempt.failed(now);
        if let Some(delay) = error.retry_after {
            attempt.wait(now + jittered(delay));
        }
    }

    /// The numbers of nodes, of nodes waiting to be written, and of nodes beyond the cap.
    pub fn counts(&self) -> [usize; 3] {
        [
            self.nodes.len(),
            self.dirty.len(),
            self.prefer_no_schedule.len(),
        ]
    }
}

/// Why a write failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteError {
    /// The delay that the API server asks for.
    pub retry_after: Option<Duration>,
}
