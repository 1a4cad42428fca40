//! Handles unresponsive agents.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::lease::LeaseState;
use super::super::liveness::{LivenessCheck, LivenessCounts, NodeEffects};
use super::{Operation, Reconciler};
use crate::engine::time::BootTime;

impl Reconciler {
    /// Updates what is in force on a node.
    pub(super) fn update_liveness(&mut self, name: &str) {
        let watermark = self.watermarks.get(name);
        let throttled = watermark.map_or(0, |watermark| watermark.status.throttled);
        let node = self.nodes.get(name).map(|node| {
            let effects = NodeEffects {
                tainted: node.tainted || node.interferes,
                ready: node.ready,
                throttled,
            };
            (&node.zone, effects)
        });
        self.liveness.node_changed(name, node);
    }

    /// The agent of a node wrote its status.
    pub(super) fn status_written(&mut self, name: &str) {
        self.taint_removed.remove(name);
        self.liveness.status_written(name);
    }

    /// The Lease of an agent was added or changed.
    pub fn apply_lease(&mut self, name: &str, lease: LeaseState, now: BootTime) {
        if let Some(age) = self.liveness.lease_changed(name, lease, now) {
            self.heartbeat_ages.push(age);
            self.cap_dirty |= self.taint_removed.remove(name);
        }
        // An agent that was unknown before may have a node.
        self.update_liveness(name);
    }

    /// An agent reported to this replica, and announced the next report within this interval.
    pub fn reported(&mut self, name: &str, interval: Duration, at: BootTime) {
        self.liveness.reported(name, interval, at);
        self.cap_dirty |= self.taint_removed.remove(name);
        self.update_liveness(name);
    }

    /// The Lease of an agent was deleted.
    pub fn delete_lease(&mut self, name: &str) {
        self.liveness.released(name);
    }

    /// Ages of heartbeats when the next one arrived, since the last call.
    pub fn take_heartbeat_ages(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.heartbeat_ages)
    }

    /// Nodes whose agent became unresponsive (true), or responds again, since the last call.
    pub fn take_liveness_changes(&mut self) -> Vec<(String, bool)> {
        std::mem::take(&mut self.liveness_changes)
    }

    /// Agent counts at the last check.
    pub const fn liveness_counts(&self) -> LivenessCounts {
        self.liveness.counts()
    }

    /// Nodes that a `NodeQOS` selects and that have no agent, at the last check.
    pub const fn nodes_without_agent(&self) -> usize {
        self.without_agent
    }

    /// Walks nodes and agents in parallel, both ordered by name: much faster than a lookup per node.
    fn count_without_agent(&self) -> usize {
        let mut with_agent = self.liveness.with_agent().peekable();
        let mut has_agent = |name: &String| {
            while with_agent.next_if(|other| *other < name).is_some() {}
            with_agent.peek() == Some(&name)
        };
        let nodes = self.nodes.iter();
        nodes
            .filter(|(name, node)| !node.class.selected.is_empty() && !has_agent(name))
            .count()
    }

    /// A watch was interrupted: updates that were missed make no agent unresponsive.
    pub fn watch_interrupted(&mut self) {
        self.liveness.restart();
    }

    /// As [`Self::watch_interrupted`], for the watch of Leases.
    pub fn lease_watch_interrupted(&mut self) {
        self.liveness.restart_leases();
    }

    /// The operations for unresponsive agents.
    pub(super) fn check_liveness(&mut self, now: BootTime) -> Vec<Operation> {
        let Some(mut check) = self.liveness.check(now) else {
            return Vec::new();
        };
        self.without_agent = self.count_without_agent();
        let remove_taint = std::mem::take(&mut check.remove_taint);
        let read_lease = std::mem::take(&mut check.read_lease);
        self.report_liveness(check);
        let uid = |node: &String| self.nodes.get(node).map(|node| node.uid.clone());
        let remove_taint = remove_taint.into_iter();
        let remove_taint = remove_taint
            .filter_map(|node| uid(&node).map(|uid| Operation::RemoveTaint { node, uid }));
        let read_lease = read_lease.into_iter();
        let read_lease = read_lease.map(|node| Operation::ReadLease { node });
        remove_taint.chain(read_lease).collect()
    }

    fn report_liveness(&mut self, check: LivenessCheck) {
        for (zone, overdue, all) in check.frozen {
            let message = format!(
                "{overdue} of {all} agents {} are unresponsive: more likely they can't reach the API server, or the \
                 controller can't see their updates, than that all of them died. What is in force there stays until most \
                 agents respond again",
                in_zone(&zone)
            );
            self.controller_event(true, "AgentsSilent", message);
        }
        for zone in check.unfrozen {
            let message = format!("most agents {} respond again", in_zone(&zone));
            self.controller_event(false, "AgentsHeard", message);
        }
        let unresponsive = check.unresponsive.iter();
        let unresponsive = unresponsive.map(|(node, _)| (node.clone(), true));
        let recovered = check.recovered.iter().map(|node| (node.clone(), false));
        self.liveness_changes.extend(unresponsive.chain(recovered));
        for (node, grace) in check.unresponsive {
            let message = format!(
                "its agent has been unresponsive for {}: neither a renewal of its Lease nor a report arrived. What is in \
                 force on the node stays; check why the agent's pod there is not running or not ready",
                format_duration(grace)
            );
            self.warn_node(&node, "AgentSilent", message);
        }
        for node in check.recovered {
            let message = "its agent responds again".to_owned();
            self.node_event(&node, false, "AgentBack", message);
        }
        let dead_after = format_duration(self.liveness.dead_after());
        for (node, pods) in check.throttled {
            let message = format!(
                "its agent has been unresponsive for {dead_after}, and {pods} pods were throttled at its last update: they \
                 stay throttled until an agent runs there again. To restore them by hand, have plimsoll agent --restore \
                 --node-name {node} run there; see docs/kubernetes.md about nodes without an agent"
            );
            self.warn_node(&node, "ThrottledBySilentAgent", message);
        }
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
        self.cap_dirty |= renewed && self.taint_removed.remove(node);
        renewed
    }

    /// An attempt to remove a taint finished; `Ok(true)`: there was one.
    pub fn taint_removed(&mut self, node: &str, now: BootTime, outcome: Result<bool, ()>) {
        self.liveness.taint_removed(node, now, outcome.is_ok());
        if outcome.is_ok() {
            self.taint_removed.insert(node.to_owned());
            self.cap_dirty = true;
        }
        if outcome == Ok(true) {
            let dead_after = format_duration(self.liveness.dead_after());
            let message = format!(
                "its agent has been unresponsive for {dead_after} while the node is Ready: its taint is removed, so that \
                 new pods may be scheduled here again; check why the agent's pod is not running"
            );
            self.warn_node(node, "TaintOfSilentAgentRemoved", message);
        }
    }
}

/// The region and zone labels of a node.
pub(super) fn zone(labels: &BTreeMap<String, String>) -> Arc<str> {
    let label = |name: &str| labels.get(&format!("topology.kubernetes.io/{name}"));
    let parts = ["region", "zone"].into_iter().filter_map(label);
    let parts: Vec<&str> = parts.map(String::as_str).collect();
    parts.join("/").into()
}

fn in_zone(zone: &str) -> String {
    if zone.is_empty() {
        "on nodes without a zone".to_owned()
    } else {
        format!("in zone {zone}")
    }
}

pub(super) fn format_duration(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}
