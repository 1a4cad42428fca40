//! The state of the controller's pipeline. Pure: observations and the time in, operations out.

use std::sync::Arc;
use std::time::Duration;

use super::compile::catalog::{Affected, Key};
use super::compile::content::{DesiredSpec, SpecFields};
use super::compile::index::{Index, NodeChange, WatermarkChange};
use super::observe::wire::{ObservedNode, Watermark};
use super::plan::cap::CapEnforcement;
use super::plan::liveness::{self, LivenessCounts, LivenessMonitor, NodeEffects};
use super::plan::permit::permit;
use super::plan::queue::WriteQueue;
use super::plan::rollouts::{RolloutInput, Rollouts};
use super::status::policies::Statuses;
use crate::cluster::lease::LeaseState;
use crate::crd::Kind;
use crate::engine::time::BootTime;
use crate::evictions::{Denial, EvictionPermit, RuleQuery};

pub use super::events::{EventSubject, PendingEvent};
pub use super::plan::operations::{Operation, StatusWrite, WriteError};
pub use super::plan::settings::ControllerSettings;

/// Whether this replica acts for the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Standby,
    Leader,
}

/// The state of the pipeline.
pub struct Reconciler {
    role: Role,
    /// Nodes per second that an edit reaches.
    rollout_rate: f64,
    index: Index,
    liveness: LivenessMonitor,
    rollouts: Rollouts,
    cap: CapEnforcement,
    queue: WriteQueue,
    statuses: Statuses,
    events: Vec<PendingEvent>,
}

impl Reconciler {
    /// An empty state.
    pub fn new(settings: ControllerSettings) -> Self {
        Self {
            role: Role::Standby,
            rollout_rate: settings.rollout_nodes_per_second,
            index: Index::new(settings.windows),
            liveness: LivenessMonitor::new(settings.dead_agent_after),
            rollouts: Rollouts::new(settings.evaluation_period),
            cap: CapEnforcement::new(settings.max_unschedulable),
            queue: WriteQueue::default(),
            statuses: Statuses::default(),
            events: Vec::new(),
        }
    }

    /// Starts to lead: every difference is reconciled, tightenings by way of canaries.
    pub fn start_leading(&mut self) {
        self.role = Role::Leader;
        self.queue.reset_attempts();
        self.liveness.start();
        self.cap.start(&self.index);
        let view = RolloutInput {
            index: &self.index,
            liveness: &self.liveness,
            queue: &self.queue,
        };
        self.rollouts.resume(view);
        self.queue.extend(self.index.nodes.keys());
        self.queue.extend(self.index.watermarks.keys());
        self.statuses.invalidate();
    }

    /// Stops leading.
    pub fn stop_leading(&mut self) {
        self.role = Role::Standby;
        self.events.clear();
    }

    fn leads(&self) -> bool {
        self.role == Role::Leader
    }
}

/// Observations.
impl Reconciler {
    /// A node was added or changed.
    pub fn apply_node(&mut self, name: &str, node: ObservedNode) {
        match self.index.apply_node(name, node) {
            NodeChange::Nothing => {}
            NodeChange::State => self.update_effects(name),
            NodeChange::Taint => {
                self.cap.invalidate();
                self.update_effects(name);
            }
            NodeChange::Policies => self.node_changed(name),
        }
    }

    /// A node was deleted.
    pub fn delete_node(&mut self, name: &str) {
        self.index.nodes.remove(name);
        self.cap.agent_seen(name);
        self.node_changed(name);
    }

    fn node_changed(&mut self, name: &str) {
        // Rollouts that start again affect the cap, which is invalidated below.
        self.rollouts
            .remove_node(name, &self.index, &self.liveness, &mut self.queue);
        self.update_effects(name);
        self.enqueue(name);
    }

    fn enqueue(&mut self, node: &str) {
        self.queue.add(node);
        self.statuses.invalidate();
        self.cap.invalidate();
    }

    /// A policy object was added or changed.
    pub fn apply_policy(&mut self, kind: Kind, name: &str, object: &serde_json::Value) {
        let affected = self.index.catalog.apply(kind, name, object);
        let key = (kind, name.to_owned());
        if self.index.catalog.is_immediate(&key) && self.rollouts.cancel(&key) {
            self.queue.extend(self.index.nodes.keys());
        }
        self.policy_changed(&key, &affected);
    }

    /// A policy object was deleted.
    pub fn delete_policy(&mut self, kind: Kind, name: &str) {
        let affected = self.index.catalog.delete(kind, name);
        let key = (kind, name.to_owned());
        self.statuses.remove(&key);
        self.policy_changed(&key, &affected);
    }

    /// Recompiles what an edit affects, and starts to roll it out.
    fn policy_changed(&mut self, key: &Key, affected: &Affected) {
        self.statuses.invalidate();
        self.cap.invalidate();
        if *affected == Affected::None {
            return;
        }
        self.rollouts.remove_edited(key, affected);
        let recompiled = self.index.recompile(affected);
        if self.leads() {
            let view = RolloutInput {
                index: &self.index,
                liveness: &self.liveness,
                queue: &self.queue,
            };
            self.events.extend(self.rollouts.start(&recompiled, view));
        }
        self.queue.extend(&recompiled);
    }

    /// A `NodeWatermark` from a watch. Ignored if a newer one is known.
    pub fn apply_watermark(&mut self, name: &str, seen: &Watermark) {
        let change = self.index.apply_watermark(name, seen);
        self.watermark_changed(name, seen, change);
    }

    /// A `NodeWatermark` from a full list, which may be older than the known one.
    pub fn apply_listed_watermark(&mut self, name: &str, seen: &Watermark) {
        let change = self.index.apply_listed_watermark(name, seen);
        self.watermark_changed(name, seen, change);
    }

    fn watermark_changed(&mut self, name: &str, seen: &Watermark, change: WatermarkChange) {
        if change.spec {
            self.queue.add(name);
        }
        if change.status {
            self.statuses.invalidate();
            self.cap.invalidate();
            self.update_effects(name);
        }
        // Without a status it is the controller's own write.
        if change.status && seen.has_status() {
            self.cap.agent_seen(name);
            self.liveness.status_written(name);
        }
        if change.edited && self.leads() {
            let by = seen.edited_by.as_deref().unwrap_or("another client");
            let message = format!(
                "its NodeWatermark was edited by {by} and is reverted; edit NodeQOS, PodQOS and AvoidanceAction instead"
            );
            let event = PendingEvent::node_warning(name, "WatermarkEdited", message);
            self.events.push(event);
            self.queue.add_conflict(name);
        }
    }

    /// A `NodeWatermark` was deleted.
    pub fn delete_watermark(&mut self, name: &str) {
        let known = self.index.watermarks.remove(name).is_some();
        if known && self.leads() && self.index.nodes.contains_key(name) {
            let message = "its NodeWatermark was deleted by an unknown client and is created again";
            let event = PendingEvent::node_warning(name, "WatermarkDeleted", message.to_owned());
            self.events.push(event);
        }
        self.update_effects(name);
        self.enqueue(name);
    }

    /// The Lease of an agent was added or changed.
    pub fn apply_lease(&mut self, name: &str, lease: LeaseState, now: BootTime) {
        if self.liveness.lease_changed(name, lease, now) {
            self.cap.agent_seen(name);
        }
        // An agent that was unknown before may have a node.
        self.update_effects(name);
    }

    /// The Lease of an agent was deleted.
    pub fn delete_lease(&mut self, name: &str) {
        self.liveness.released(name);
    }

    /// An agent reported to this replica, and announced the next report within this interval.
    pub fn reported(&mut self, name: &str, interval: Duration, at: BootTime) {
        self.liveness.reported(name, interval, at);
        self.cap.agent_seen(name);
        self.update_effects(name);
    }

    /// A watch was interrupted: updates that were missed make no agent unresponsive.
    pub fn watch_interrupted(&mut self) {
        self.liveness.restart();
    }

    /// As [`Self::watch_interrupted`], for the watch of Leases.
    pub fn lease_watch_interrupted(&mut self) {
        self.liveness.restart_leases();
    }

    /// Updates what is in force on a node, for its agent's liveness.
    fn update_effects(&mut self, name: &str) {
        let watermark = self.index.watermarks.get(name);
        let throttled = watermark.map_or(0, |watermark| watermark.status.throttled);
        let node = self.index.nodes.get(name).map(|node| {
            let effects = NodeEffects {
                tainted: node.tainted || node.interference_identified || node.load.busy,
                labelled: node.load.labelled,
                ready: node.ready,
                throttled,
            };
            (&node.zone, effects)
        });
        self.liveness.node_changed(name, node);
    }
}

/// Plans, and what became of them.
impl Reconciler {
    /// The operations to start now, with at most `room` writes of `NodeWatermarks`. Each is in progress until
    /// [`Self::written`], [`Self::taint_removed`], [`Self::label_removed`] or [`Self::lease_read`] is called.
    pub fn plan(&mut self, now: BootTime, room: usize) -> Vec<Operation> {
        if !self.leads() {
            // A new leader starts with all nodes.
            self.queue.clear();
            return Vec::new();
        }
        self.advance_rollouts(now);
        self.update_cap();
        self.queue.delay_conflicts(now);
        let mut operations = self.check_liveness(now);
        let room = room + operations.len();
        let mut next = self.queue.next_due(None, now);
        while let Some(node) = next.filter(|_| operations.len() < room) {
            match self.write_for(&node) {
                Some(operation) => {
                    let hash = match &operation {
                        Operation::Apply { spec, .. } => Some(spec.hash()),
                        _ => None,
                    };
                    self.queue.start(&node, hash);
                    operations.push(operation);
                }
                None => self.queue.remove(&node),
            }
            next = self.queue.next_due(Some(&node), now);
        }
        self.rollouts.clear_targets();
        operations
    }

    fn advance_rollouts(&mut self, now: BootTime) {
        let advance = self.rollouts.advance(
            now,
            self.rollout_rate,
            &self.index,
            &self.liveness,
            &mut self.queue,
        );
        if advance.released {
            self.cap.invalidate();
        }
        if advance.released || advance.progressed {
            self.statuses.invalidate();
        }
        self.events.extend(advance.events);
    }

    fn update_cap(&mut self) {
        let (changed, events) = self.cap.update(&self.index, &self.rollouts);
        self.queue.extend(&changed);
        self.events.extend(events);
    }

    fn check_liveness(&mut self, now: BootTime) -> Vec<Operation> {
        let Some(check) = self.liveness.check(now) else {
            return Vec::new();
        };
        let nodes = &self.index.nodes;
        let selected = nodes
            .iter()
            .filter(|(_, node)| !node.class.selected.is_empty());
        self.liveness
            .count_without_agent(selected.map(|(name, _)| name));
        self.events.extend(check.events(self.liveness.dead_after()));
        let remove_taint = check.remove_taint.into_iter().filter_map(|node| {
            let uid = nodes.get(&node)?.uid.clone();
            Some(Operation::RemoveTaint { node, uid })
        });
        let remove_label = check.remove_label.into_iter().filter_map(|node| {
            let uid = nodes.get(&node)?.uid.clone();
            Some(Operation::RemoveLabel { node, uid })
        });
        let read_lease = check.read_lease.into_iter();
        let read_lease = read_lease.map(|node| Operation::ReadLease { node });
        remove_taint.chain(remove_label).chain(read_lease).collect()
    }

    /// The write that a node needs, if any.
    fn write_for(&mut self, name: &str) -> Option<Operation> {
        let node = name.to_owned();
        let Some(content) = self.rollouts.target(name, &mut self.index) else {
            let current = self.index.watermarks.get(name)?;
            let uid = current.uid.clone();
            return Some(Operation::Delete { node, uid });
        };
        let known = self.index.nodes.get(name)?;
        let current = self.index.watermarks.get(name);
        let spec = DesiredSpec {
            node_uid: known.uid.clone(),
            content,
            soften: self.cap.is_beyond(name),
            fields: current.map_or_else(SpecFields::default, |current| current.status.reads),
            sources: Arc::clone(&known.class.sources),
        };
        let is_current = current.is_some_and(|current| current.hash == Some(spec.hash()));
        (!is_current).then_some(Operation::Apply { node, spec })
    }

    /// A write finished; the object as the API server has it now, `None` if it was deleted.
    pub fn written(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<Watermark>, WriteError>,
    ) {
        self.queue.add(node);
        match outcome {
            Ok(Some(seen)) => {
                let applied = self.queue.hash_in_progress(node);
                self.apply_watermark(node, &seen);
                let current = self.index.watermarks.get(node);
                // Back off: an API server that drops fields would be written to in a loop.
                if current.is_some_and(|it| applied.is_some() && it.hash.is_none()) {
                    return self.queue.failed(node, now, None);
                }
            }
            Ok(None) => drop(self.index.watermarks.remove(node)),
            Err(error) => return self.queue.failed(node, now, error.retry_after),
        }
        self.queue.succeeded(node);
    }

    /// The Lease of an agent that seemed unresponsive was read (`None`: there is none). Returns whether it had been
    /// renewed without the watch showing it.
    pub fn lease_read(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<LeaseState>, ()>,
    ) -> bool {
        let renewed = self.liveness.lease_read(node, now, outcome);
        if renewed {
            self.cap.agent_seen(node);
        }
        renewed
    }

    /// An attempt to remove the load label of an unresponsive agent's node finished.
    pub fn label_removed(&mut self, node: &str, now: BootTime, done: bool) {
        self.liveness.label_removed(node, now, done);
    }

    /// An attempt to remove a taint finished; `Ok(true)`: there was one.
    pub fn taint_removed(&mut self, node: &str, now: BootTime, outcome: Result<bool, ()>) {
        self.liveness.taint_removed(node, now, outcome.is_ok());
        if outcome.is_ok() {
            self.cap.taint_removed(node);
        }
        if outcome == Ok(true) {
            let dead_after = self.liveness.dead_after();
            self.events.push(liveness::taint_removed(node, dead_after));
        }
    }

    /// Whether the rules of a node allow an eviction that its agent requests.
    ///
    /// # Errors
    /// The rules don't allow it.
    pub fn permit(&self, query: &RuleQuery) -> Result<EvictionPermit, Denial> {
        permit(&self.index, &self.queue, query)
    }
}

/// Statuses, events and metrics.
impl Reconciler {
    /// The statuses that differ from the API server's. `timestamp` is the wall clock time for conditions.
    pub fn statuses(&mut self, now: BootTime, timestamp: &str) -> Vec<StatusWrite> {
        if !self.leads() {
            return Vec::new();
        }
        self.statuses
            .changed(&self.index, &self.rollouts, now, timestamp)
    }

    /// A status could not be written: all are checked again after a delay.
    pub fn status_failed(&mut self, now: BootTime) {
        self.statuses.failed(now);
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<PendingEvent> {
        std::mem::take(&mut self.events)
    }

    /// Ages of heartbeats when the next one arrived, since the last call.
    pub fn take_heartbeat_ages(&mut self) -> Vec<Duration> {
        self.liveness.take_heartbeat_ages()
    }

    /// Nodes whose agent became unresponsive (true), or responds again, since the last call.
    pub fn take_liveness_changes(&mut self) -> Vec<(String, bool)> {
        self.liveness.take_changes()
    }

    /// Agent counts at the last check.
    pub const fn liveness_counts(&self) -> LivenessCounts {
        self.liveness.counts()
    }

    /// Nodes that a `NodeQOS` selects and that have no agent, at the last check.
    pub const fn nodes_without_agent(&self) -> usize {
        self.liveness.counts().without_agent
    }

    /// The number of rollouts by phase.
    pub fn rollout_counts(&self) -> [(&'static str, usize); 3] {
        self.rollouts.counts()
    }

    /// The numbers of nodes, of nodes waiting to be written, and of nodes beyond the cap.
    pub fn counts(&self) -> [usize; 3] {
        [self.index.nodes.len(), self.queue.count(), self.cap.count()]
    }
}
