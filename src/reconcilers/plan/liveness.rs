//! Agent liveness, by this process's own clock. Pure.
//!
//! An agent reports every 10 s or renews its Lease, and writes its status at least every five minutes while something is
//! in force. What counts is when this process sees a change; a node's clock is never read.

mod agent;
mod messages;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::lease::LeaseState;
use crate::engine::time::BootTime;
use crate::reconcilers::retry::Attempt;
use agent::{AgentLiveness, ReportLiveness};

pub(in crate::reconcilers) use messages::taint_removed;

/// If this part of a zone's agents, and at least this many, are unresponsive at once, the fault is probably the controller's
/// connection: the zone is frozen.
const FREEZE_PERCENT: usize = 55;
const MIN_TO_FREEZE: usize = 3;
/// Minimum interval between two checks.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Leases to read per check.
const MAX_LEASE_READS: usize = 16;

/// What Plimsoll has in force on a node, as far as it is known without the agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeEffects {
    /// One of our taints is on the node, or our condition is True.
    pub tainted: bool,
    /// It has the label that says its load.
    pub labelled: bool,
    /// Throttled pods, as last reported by the agent.
    pub throttled: usize,
    /// The node is Ready: its kubelet can run an agent.
    pub ready: bool,
}

impl NodeEffects {
    const fn any(self) -> bool {
        self.tainted || self.labelled || self.throttled > 0
    }
}

/// Which agents are unresponsive, and since when.
#[derive(Debug)]
pub struct LivenessMonitor {
    /// An agent that was not seen for this long is dead, if its node is Ready.
    dead_after: Duration,
    agents: BTreeMap<String, AgentLiveness>,
    /// Zones in which nothing is restored, because most agents are unresponsive there.
    frozen: BTreeSet<Arc<str>>,
    /// Agents that respond again after they were reported as unresponsive.
    recovered: BTreeSet<String>,
    /// Agents seen since the last check, which sets the time.
    just_seen: BTreeSet<String>,
    checked: Option<BootTime>,
    counts: LivenessCounts,
    /// Ages of heartbeats when the next one arrived.
    heartbeat_ages: Vec<Duration>,
    /// Nodes whose agent became unresponsive (true), or responds again.
    changes: Vec<(String, bool)>,
}

/// Agent counts at the last check.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LivenessCounts {
    /// Agents that hold a Lease.
    pub agents: usize,
    /// Unresponsive agents: by their Lease, or if they have none, by their status writes while something is in force.
    pub unresponsive: usize,
    /// Unresponsive agents that left throttled pods.
    pub throttling: usize,
    /// Zones in which nothing is restored.
    pub frozen_zones: usize,
    /// Nodes that a `NodeQOS` selects and that have no agent.
    pub without_agent: usize,
    /// The age of the oldest heartbeat.
    pub oldest_heartbeat: Duration,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LivenessCheck {
    /// Nodes whose Lease has to be read to confirm that it was not renewed.
    pub read_lease: Vec<String>,
    /// Nodes whose agent is newly unresponsive, with its grace period.
    pub unresponsive: Vec<(String, Duration)>,
    /// Nodes whose agent responds again.
    pub recovered: Vec<String>,
    /// Nodes whose load label has to be removed: an unresponsive agent must not call its node idle.
    pub remove_label: Vec<String>,
    /// Nodes whose taint has to be removed.
    pub remove_taint: Vec<String>,
    /// Nodes whose agent is newly dead, with the number of pods throttled there.
    pub throttled: Vec<(String, usize)>,
    /// Newly frozen zones, with the numbers of overdue and of all agents.
    pub frozen: Vec<(Arc<str>, usize, usize)>,
    /// Zones that are no longer frozen.
    pub unfrozen: Vec<Arc<str>>,
}

impl LivenessMonitor {
    /// A monitor without agents.
    pub fn new(dead_after: Duration) -> Self {
        Self {
            dead_after,
            agents: BTreeMap::new(),
            frozen: BTreeSet::new(),
            recovered: BTreeSet::new(),
            just_seen: BTreeSet::new(),
            checked: None,
            counts: LivenessCounts::default(),
            heartbeat_ages: Vec::new(),
            changes: Vec::new(),
        }
    }

    /// An agent that was not seen for this long is dead, if its node is Ready.
    pub const fn dead_after(&self) -> Duration {
        self.dead_after
    }

    /// Starts to report: every agent counts as just seen and as not reported. Lease reads in progress are forgotten.
    pub fn start(&mut self) {
        for agent in self.agents.values_mut() {
            agent.start();
            agent.lease_read = Attempt::default();
        }
        self.recovered.clear();
        self.frozen.clear();
        self.changes.clear();
        self.checked = None;
    }

    /// Every agent counts as just seen, because updates may have been missed.
    pub fn restart(&mut self) {
        self.restart_where(|_| true);
    }

    /// As [`Self::restart`], for the agents that hold Leases.
    pub fn restart_leases(&mut self) {
        self.restart_where(AgentLiveness::has_lease);
    }

    fn restart_where(&mut self, matches: impl Fn(&AgentLiveness) -> bool) {
        for agent in self.agents.values_mut().filter(|agent| matches(agent)) {
            agent.restart();
        }
        self.checked = None;
    }

    /// The zone of a node and what is in force on it; `None`: the node is gone.
    pub fn node_changed(&mut self, name: &str, node: Option<(&Arc<str>, NodeEffects)>) {
        let node = node.map(|(zone, effects)| (Arc::clone(zone), effects));
        if let Some(agent) = self.agents.get_mut(name) {
            if node.is_none() {
                // Reports of deleted nodes are not accepted.
                agent.reports = None;
            }
            agent.node = node;
            self.drop_if_idle(name);
        } else if node.as_ref().is_some_and(|(_, effects)| effects.any()) {
            self.agents.insert(name.to_owned(), AgentLiveness::on(node));
            self.just_seen.insert(name.to_owned());
        }
    }

    /// Forgets an agent from which nothing is expected.
    fn drop_if_idle(&mut self, node: &str) {
        if self.agents.get(node).is_some_and(AgentLiveness::is_idle) {
            self.agents.remove(node);
            self.recovered.remove(node);
            self.just_seen.remove(node);
        }
    }

    /// The agent wrote its status.
    pub fn status_written(&mut self, node: &str) {
        self.seen(node, None);
    }

    fn seen(&mut self, node: &str, at: Option<BootTime>) {
        let Some(agent) = self.agents.get_mut(node) else {
            return;
        };
        if agent.seen(at) {
            self.recovered.insert(node.to_owned());
        }
        if at.is_none() {
            self.just_seen.insert(node.to_owned());
        }
    }

    /// The agent reported directly, and announced the next report within this interval.
    pub fn reported(&mut self, node: &str, interval: Duration, at: BootTime) {
        let agent = self.agents.entry(node.to_owned()).or_default();
        agent.reports = Some(ReportLiveness {
            interval,
            last: Some(at),
        });
        self.seen(node, Some(at));
    }

    /// The Lease of an agent was added or changed. Returns whether it was renewed.
    pub fn lease_changed(&mut self, node: &str, lease: LeaseState, now: BootTime) -> bool {
        let age = self.renewed(node, lease, now);
        self.heartbeat_ages.extend(age);
        age.is_some()
    }

    /// If the Lease was renewed, returns the time since its agent was last seen.
    fn renewed(&mut self, node: &str, lease: LeaseState, now: BootTime) -> Option<Duration> {
        if !lease.held {
            self.released(node);
            return None;
        }
        let agent = self.agents.entry(node.to_owned()).or_default();
        let before = agent.lease.replace(lease);
        if before == agent.lease {
            return None;
        }
        let age = agent.last_seen.map(|seen| now.since(seen));
        self.seen(node, Some(now));
        age.filter(|_| before.is_some())
    }

    /// The Lease was released or deleted: no renewals are expected any more.
    pub fn released(&mut self, node: &str) {
        if let Some(agent) = self.agents.get_mut(node) {
            agent.lease = None;
            agent.reports = None;
            agent.reported = false;
            self.drop_if_idle(node);
        }
    }

    /// The Lease of an agent that seemed unresponsive was read (`None`: there is none). Returns whether it had been renewed.
    pub fn lease_read(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<LeaseState>, ()>,
    ) -> bool {
        let Some(agent) = self.agents.get_mut(node) else {
            return false;
        };
        let Ok(lease) = outcome else {
            agent.lease_read.failed(now);
            return false;
        };
        agent.lease_read = Attempt::default();
        match lease {
            Some(lease) if agent.lease.as_ref() == Some(&lease) => agent.confirmed = Some(now),
            Some(lease) => return self.renewed(node, lease, now).is_some(),
            None => self.released(node),
        }
        false
    }

    /// Counts the selected nodes, which are ordered by name, that have no agent. An unresponsive agent counts as one.
    pub fn count_without_agent<'a>(&mut self, selected: impl Iterator<Item = &'a String>) {
        let agents = self.agents.iter().filter(|(_, agent)| agent.exists());
        // Walks both in parallel: much faster than a lookup per node.
        let mut with_agent = agents.map(|(name, _)| name).peekable();
        let without = selected.filter(|name| {
            while with_agent.next_if(|other| *other < *name).is_some() {}
            with_agent.peek() != Some(name)
        });
        self.counts.without_agent = without.count();
    }

    /// Ages of heartbeats when the next one arrived, since the last call.
    pub fn take_heartbeat_ages(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.heartbeat_ages)
    }

    /// Nodes whose agent became unresponsive (true), or responds again, since the last call.
    pub fn take_changes(&mut self) -> Vec<(String, bool)> {
        std::mem::take(&mut self.changes)
    }

    /// Checks all agents; `None`: the last check was less than a second ago.
    pub fn check(&mut self, now: BootTime) -> Option<LivenessCheck> {
        for name in std::mem::take(&mut self.just_seen) {
            if let Some(agent) = self.agents.get_mut(&name) {
                agent.last_seen.get_or_insert(now);
            }
        }
        if self
            .checked
            .is_some_and(|checked| now.since(checked) < CHECK_INTERVAL)
        {
            return None;
        }
        self.checked = Some(now);
        let mut check = LivenessCheck {
            recovered: std::mem::take(&mut self.recovered).into_iter().collect(),
            ..LivenessCheck::default()
        };
        self.update_frozen_zones(now, &mut check);
        for (name, agent) in &mut self.agents {
            if agent.zone().is_some_and(|zone| !self.frozen.contains(zone)) {
                agent.check(name, now, self.dead_after, &mut check);
            }
        }
        let unresponsive = check.unresponsive.iter();
        let unresponsive = unresponsive.map(|(node, _)| (node.clone(), true));
        let recovered = check.recovered.iter().map(|node| (node.clone(), false));
        self.changes.extend(unresponsive.chain(recovered));
        Some(check)
    }

    /// Finds the zones to freeze, and counts agents.
    fn update_frozen_zones(&mut self, now: BootTime, check: &mut LivenessCheck) {
        let mut zones = BTreeMap::<Arc<str>, [usize; 2]>::new();
        let mut counts = LivenessCounts::default();
        for agent in self.agents.values_mut() {
            let last_seen = agent.last_seen_by(now);
            let Some(zone) = agent.zone().map(Arc::clone) else {
                continue;
            };
            if !agent.taint.done {
                let [overdue, all] = zones.entry(zone).or_default();
                *all += 1;
                *overdue += usize::from(agent.is_overdue(now, self.dead_after));
            }
            let unresponsive = agent.is_unresponsive(now, self.dead_after);
            counts.unresponsive += usize::from(unresponsive);
            counts.throttling += usize::from(unresponsive && agent.throttled() > 0);
            if agent.has_lease() {
                counts.agents += 1;
                counts.oldest_heartbeat = counts.oldest_heartbeat.max(now.since(last_seen));
            }
        }
        let too_many = |[overdue, all]: [usize; 2]| {
            overdue >= MIN_TO_FREEZE && overdue * 100 >= all * FREEZE_PERCENT
        };
        zones.retain(|_, zone| too_many(*zone));
        let newly = zones
            .iter()
            .filter(|(zone, _)| !self.frozen.contains(*zone));
        check.frozen = newly
            .map(|(zone, [overdue, all])| (Arc::clone(zone), *overdue, *all))
            .collect();
        let frozen: BTreeSet<Arc<str>> = zones.into_keys().collect();
        check.unfrozen = self.frozen.difference(&frozen).cloned().collect();
        counts.frozen_zones = frozen.len();
        self.frozen = frozen;
        self.counts = counts;
    }

    /// An attempt to remove a taint finished.
    pub fn taint_removed(&mut self, node: &str, now: BootTime, done: bool) {
        let Some(agent) = self.agents.get_mut(node) else {
            return;
        };
        agent.taint.finished(now, done);
        self.drop_if_idle(node);
    }

    /// An attempt to remove a load label finished.
    pub fn label_removed(&mut self, node: &str, now: BootTime, done: bool) {
        if let Some(agent) = self.agents.get_mut(node) {
            agent.label.finished(now, done);
        }
    }

    /// Whether an update of the agent was late at the last check, well before it counts as unresponsive. Not in frozen zones.
    pub fn is_late(&self, node: &str) -> bool {
        let agent = self.agents.get(node).zip(self.checked);
        agent.is_some_and(|(agent, now)| {
            let frozen = agent.zone().is_some_and(|zone| self.frozen.contains(zone));
            !frozen && agent.is_late(now, self.dead_after)
        })
    }

    /// Agent counts at the last check.
    pub const fn counts(&self) -> LivenessCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_forgets_deleted_nodes() {
        let mut standby = LivenessMonitor::new(Duration::from_mins(10));
        let zone = Arc::from("a");
        let effects = NodeEffects {
            throttled: 1,
            ..NodeEffects::default()
        };
        standby.node_changed("spot", Some((&zone, effects)));
        assert_eq!(standby.just_seen.len(), 1);
        standby.node_changed("spot", None);
        assert!(standby.just_seen.is_empty());
    }
}
