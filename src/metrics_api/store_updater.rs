//! Feeds the store with what the controller observes in the cluster.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::clock;
use crate::cluster::lease::LeaseContent;
use crate::cluster::nodes::zone;
use crate::crd::NodeWatermarkStatus;
use crate::engine::policy::NodeFacts;
use crate::engine::time::BootTime;
use crate::engine::units::MilliCpu;

use super::compose::{NodeKnowledge, NodeKnown, Reachability, RulesKnown, StaticFields, content};
use super::data::Data;
use super::loads::{KnownLoad, NodeLoads, Polled, PolledLoad};
use super::reports::warm_up::{WarmUp, WarmUpProgress};
use super::reports::{ReceivedReport, Reports, is_fresh};

/// Applies observations of nodes to the store. Every existing Node has an object, whatever else is known about it.
pub struct StoreUpdater {
    data: Arc<Data>,
    loads: NodeLoads,
    nodes: BTreeMap<String, Entry>,
    changed: bool,
    /// Where agents report.
    reports: Option<Reports>,
    /// Current term of this replica, warmed up or not.
    term: Option<u64>,
    /// Starts when all Nodes are known.
    warm_up: WarmUp,
    /// All Nodes are known.
    is_open: bool,
    /// All Leases of agents are known.
    leases: bool,
}

/// One node. An entry may exist before its Node.
#[derive(Default)]
struct Entry {
    /// The Node. `None`: it does not exist.
    node: Option<StaticFields>,
    known: NodeKnowledge,
    /// Its agent is unresponsive.
    unresponsive: bool,
    /// When its agent last reported, and the interval to its next report.
    reported: Option<(BootTime, Duration)>,
    /// What was polled. Only without a fresh report.
    polled: Option<PolledLoad>,
}

/// Both clocks of this replica.
#[derive(Clone, Copy)]
struct Now {
    boot: BootTime,
    wall: Timestamp,
}

impl Now {
    fn read() -> Self {
        Self {
            boot: clock::boot_time(),
            wall: clock::wall_time(),
        }
    }
}

/// Replaces a value. Returns whether it changed.
fn set<T: PartialEq>(known: &mut T, now: T) -> bool {
    let is_new = *known != now;
    *known = now;
    is_new
}

fn cpu(facts: &NodeFacts) -> MilliCpu {
    MilliCpu(u64::from(facts.cpus) * 1000)
}

impl Entry {
    /// Updates the agent's health and its start time. Returns whether it changed.
    fn update_health(&mut self, now: Timestamp) -> bool {
        let is_known = self.known.heartbeat.is_some() || self.known.report.is_some();
        // An agent that was removed is not unresponsive, and neither is its successor.
        self.unresponsive &= is_known;
        let health = match (is_known, self.unresponsive) {
            (false, _) => Reachability::Unknown,
            (true, true) => Reachability::Unresponsive,
            (true, false) => Reachability::Reporting,
        };
        let is_new = set(&mut self.known.health, health);
        if is_new {
            self.known.since = Some(now);
        }
        is_new
    }

    /// Applies a heartbeat, which replaces a stale report. An agent without a Lease was removed. Returns whether
    /// anything changed. The renewal time of the Lease is only used if it was `listed`; otherwise the heartbeat was
    /// observed just now.
    fn observe_heartbeat(
        &mut self,
        heartbeat: Option<LeaseContent>,
        listed: bool,
        now: Now,
    ) -> bool {
        let fresh = |(at, interval)| is_fresh(at, interval, now.boot);
        let is_stale = !self.reported.is_some_and(fresh);
        let mut is_new = false;
        if heartbeat.is_none() || (is_stale && heartbeat != self.known.heartbeat) {
            is_new = self.forget_report();
        }
        let listed = listed && self.known.heartbeat.is_none();
        let since = match &heartbeat {
            Some(heartbeat) if listed => heartbeat.time.as_ref().map(|time| time.0.min(now.wall)),
            Some(_) => Some(now.wall),
            None => None,
        };
        if set(&mut self.known.heartbeat, heartbeat) {
            self.known.heartbeat_at = since;
            is_new = true;
        }
        is_new
    }

    /// What was polled, or the last report; `None` if there is neither.
    fn load(&self) -> Option<KnownLoad> {
        let facts = self.node.as_ref()?.facts();
        let polled = self.polled.as_ref();
        let (at, interval, status) = if let Some(polled) = polled {
            (polled.at, polled.interval, &polled.status)
        } else {
            let (at, interval) = self.reported?;
            (at, interval, self.known.report.as_ref()?)
        };
        Some(KnownLoad {
            at,
            interval,
            cpu: cpu(facts),
            memory: facts.memory,
            status: Arc::clone(status),
            polled: polled.is_some(),
        })
    }

    /// What was polled, or (`None`) that it is too old. A fresh report has more, and is kept. Returns whether anything changed.
    fn poll(&mut self, load: Option<PolledLoad>, now: Now) -> bool {
        let reports = self.reported;
        let reports = reports.is_some_and(|(at, interval)| is_fresh(at, interval, now.boot));
        let load = load.filter(|_| !reports);
        self.known.polled = load.as_ref().map(|load| {
            let age = now.boot.since(load.at);
            (Arc::clone(&load.status), now.wall - age)
        });
        let is_new = load.is_some() || self.polled.is_some();
        self.polled = load;
        is_new
    }

    /// Returns whether there was a report.
    fn forget_report(&mut self) -> bool {
        self.reported = None;
        self.known.report.take().is_some()
    }
}

impl StoreUpdater {
    /// Writes to `data`, and takes reports from `reports`.
    pub fn new(data: Arc<Data>, reports: Option<Reports>) -> Self {
        let warm_up = reports
            .as_ref()
            .map_or_else(WarmUp::none, |_| WarmUp::default());
        Self {
            data,
            loads: NodeLoads::default(),
            nodes: BTreeMap::new(),
            changed: false,
            reports,
            term: None,
            warm_up,
            is_open: false,
            leases: false,
        }
    }

    /// Where agents report.
    pub fn reports(&self) -> Option<Reports> {
        self.reports.clone()
    }

    /// The loads of all nodes.
    pub fn loads(&self) -> NodeLoads {
        self.loads.clone()
    }

    /// All Nodes are known.
    pub fn nodes_known(&mut self) {
        self.is_open = true;
        if let Some(reports) = &self.reports {
            reports.open();
        }
    }

    /// All Leases of agents are known.
    pub const fn leases_known(&mut self) {
        self.leases = true;
    }

    /// A Node was created, changed or (`None`) deleted.
    pub fn node(&mut self, name: &str, node: Option<NodeKnown>) {
        if self.is_another(name, node.as_ref()) {
            // The deletion was missed.
            self.node(name, None);
        }
        if let Some(reports) = &self.reports {
            reports.node(name, node.as_ref().map(|node| node.boot_id.as_str()));
            if let Some(node) = &node {
                reports.zone(name, &zone(&node.facts.labels).into());
            }
        }
        if let Some(node) = &node {
            let facts = &node.facts;
            self.loads
                .set_node(name, &node.addresses, cpu(facts), facts.memory);
        }
        match node.map(|node| StaticFields::of(name, node)).transpose() {
            Ok(node) => self.change(name, |entry| set(&mut entry.node, node)),
            Err(error) => log_encode_error(name, &error),
        }
    }

    /// Whether this is a different Node of the same name.
    fn is_another(&self, name: &str, node: Option<&NodeKnown>) -> bool {
        let known = self.nodes.get(name).and_then(|entry| entry.node.as_ref());
        known
            .zip(node)
            .is_some_and(|(known, node)| known.uid != node.uid)
    }

    /// The status of a `NodeWatermark` changed. `None`: it was deleted.
    pub fn watermark(&mut self, name: &str, status: Option<&NodeWatermarkStatus>) {
        let rules = status.and_then(RulesKnown::of);
        self.change(name, |entry| set(&mut entry.known.rules, rules));
    }

    /// An agent's Lease changed. `None`: it has no holder.
    pub fn heartbeat(&mut self, name: &str, heartbeat: Option<LeaseContent>) {
        let (listed, now) = (!self.leases, Now::read());
        self.change(name, |entry| {
            entry.observe_heartbeat(heartbeat, listed, now)
        });
    }

    /// An agent reported.
    pub fn report(&mut self, report: ReceivedReport) {
        let ReceivedReport {
            node,
            at,
            interval,
            status,
        } = report;
        let received_at = clock::wall_time() - clock::boot_time().since(at);
        self.change(&node, |entry| {
            (entry.polled, entry.known.polled) = (None, None);
            entry.reported = Some((at, interval));
            entry.known.report = Some(status);
            entry.known.reported = Some(received_at);
            true
        });
    }

    /// A node was polled, or what was polled is to be forgotten.
    pub fn polled(&mut self, polled: Polled) {
        let Polled { node, load } = polled;
        let now = Now::read();
        // A deleted Node may still have an endpoint.
        if self.nodes.contains_key(&*node) {
            self.change(&node, |entry| entry.poll(load, now));
        }
    }

    /// An agent became unresponsive, or responsive again.
    pub fn set_agent_unresponsive(&mut self, name: &str, unresponsive: bool) {
        self.change(name, |entry| {
            entry.unresponsive = unresponsive;
            false
        });
    }

    /// Applies a change to an entry, and updates its object if `change` returns true or the agent's health changed.
    fn change(&mut self, name: &str, change: impl FnOnce(&mut Entry) -> bool) {
        if !self.nodes.contains_key(name) {
            self.nodes.insert(name.to_owned(), Entry::default());
        }
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let was_there = entry.node.is_some();
        let is_new = change(entry);
        let health_changed = entry.update_health(clock::wall_time());
        let Some(node) = &entry.node else {
            entry.forget_report();
            (entry.polled, entry.known.polled) = (None, None);
            if entry.known.rules.is_none() && entry.known.heartbeat.is_none() {
                self.nodes.remove(name);
            }
            if was_there {
                self.changed = true;
                self.loads.remove(name);
                self.data.change(|store| store.delete(name));
            }
            return;
        };
        if !is_new && !health_changed {
            return;
        }
        self.changed = true;
        self.loads.set(name, entry.load());
        match content(name, node, &entry.known) {
            Ok(content) => self.data.change(|store| store.apply(name, content)),
            Err(error) => log_encode_error(name, &error),
        }
    }

    /// Updates the term. `None`: this replica does not lead. Nothing is served during the warm-up.
    pub fn lead(&mut self, epoch: Option<u64>) {
        // In a new term, every agent is considered live until its grace period has passed.
        if std::mem::replace(&mut self.term, epoch) != epoch {
            self.reset_health();
        }
        // A standby warms up too, so that it has all reports when it takes over.
        let is_warm = self.advance_warm_up();
        let epoch = epoch.filter(|_| is_warm);
        let before = self.data.change(|store| store.term());
        if before == epoch {
            return;
        }
        self.data.change(|store| match epoch {
            Some(epoch) => store.lead(epoch),
            None => store.follow(),
        });
        self.changed = true;
    }

    fn reset_health(&mut self) {
        let unresponsive = self.nodes.iter().filter(|(_, entry)| entry.unresponsive);
        let unresponsive: Vec<String> = unresponsive.map(|(name, _)| name.clone()).collect();
        for name in unresponsive {
            self.set_agent_unresponsive(&name, false);
        }
    }

    fn advance_warm_up(&mut self) -> bool {
        if !self.is_open {
            return self.reports.is_none();
        }
        let (nodes, leases) = (&self.nodes, self.leases);
        self.warm_up.advance(clock::boot_time(), || {
            let existing = nodes.values().filter(|entry| entry.node.is_some());
            let live = existing.filter(|entry| entry.known.heartbeat.is_some());
            let (mut all, mut reported) = (0, 0);
            for entry in live {
                all += 1;
                reported += usize::from(entry.reported.is_some());
            }
            WarmUpProgress {
                live: leases.then_some(all),
                reported,
            }
        })
    }

    /// Notifies watches of changes.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.changed) {
            self.data.notify_watches();
        }
    }
}

fn log_encode_error(name: &str, error: &serde_json::Error) {
    tracing::error!(name, %error, "failed to encode a NodeMetric as JSON");
}

#[cfg(test)]
mod tests;
