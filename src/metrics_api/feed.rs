//! What the controller sees of the cluster, on its way into the store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;

use crate::cluster::clock;
use crate::crd::NodeWatermarkStatus;
use crate::engine::time::BootTime;

use super::compose::{Frame, Health, Heartbeat, Known, NodeKnown, RulesKnown, content};
use super::data::Data;
use super::reports::warm_up::{Heard, WarmUp};
use super::reports::{Reports, Told, is_fresh};

/// Takes what is known of nodes. A node that is there has an object, whatever is known of it.
pub struct Feed {
    data: Arc<Data>,
    nodes: BTreeMap<String, Entry>,
    changed: bool,
    /// Where agents report.
    reports: Option<Reports>,
    /// The term of this replica, warmed up or not.
    term: Option<u64>,
    /// Begins when all Nodes are known.
    warm_up: WarmUp,
    /// All Nodes are known.
    is_open: bool,
    /// All Leases of agents are known.
    leases: bool,
}

/// One node, or what is told of it before it is there.
#[derive(Default)]
struct Entry {
    /// The Node; `None`: there is none.
    node: Option<Frame>,
    known: Known,
    /// Its agent was told of as silent.
    silent: bool,
    /// When its agent reported last, and when it was to do so again.
    reported: Option<(BootTime, Duration)>,
}

/// On both clocks of this replica.
#[derive(Clone, Copy)]
struct Now {
    boot: BootTime,
    wall: Timestamp,
}

impl Now {
    fn read() -> Self {
        Self {
            boot: clock::now(),
            wall: clock::wall(),
        }
    }
}

/// Whether that is something new.
fn set<T: PartialEq>(known: &mut T, now: T) -> bool {
    let is_new = *known != now;
    *known = now;
    is_new
}

impl Entry {
    /// Notes what its agent's health is, and since when; whether that is something new.
    fn judge(&mut self, now: Timestamp) -> bool {
        let heard = self.known.heartbeat.is_some() || self.known.report.is_some();
        // Who has left is not silent, nor is whoever comes next.
        self.silent &= heard;
        let health = match (heard, self.silent) {
            (false, _) => Health::Unknown,
            (true, true) => Health::Silent,
            (true, false) => Health::Reporting,
        };
        let is_new = set(&mut self.known.health, health);
        if is_new {
            self.known.since = Some(now);
        }
        is_new
    }

    /// A heartbeat takes the place of a report that is too old, and with the Lease an agent gives all back. Whether that
    /// is something new. It is as old as it says only where it was `listed`, and not seen to be renewed.
    fn hear(&mut self, heartbeat: Option<Heartbeat>, listed: bool, now: Now) -> bool {
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
            self.known.beaten = since;
            is_new = true;
        }
        is_new
    }

    /// Whether there was one.
    fn forget_report(&mut self) -> bool {
        self.reported = None;
        self.known.report.take().is_some()
    }
}

impl Feed {
    /// Into this store, from these reports.
    pub fn new(data: Arc<Data>, reports: Option<Reports>) -> Self {
        let warm_up = reports
            .as_ref()
            .map_or_else(WarmUp::none, |_| WarmUp::default());
        Self {
            data,
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

    /// A Node as it is now; `None`: it is gone.
    pub fn node(&mut self, name: &str, node: Option<NodeKnown>) {
        if self.is_another(name, node.as_ref()) {
            // Nobody saw it go.
            self.node(name, None);
        }
        if let Some(reports) = &self.reports {
            reports.node(name, node.as_ref().map(|node| node.boot_id.as_str()));
        }
        match node.map(|node| Frame::of(name, node)).transpose() {
            Ok(node) => self.change(name, |entry| set(&mut entry.node, node)),
            Err(error) => not_written(name, &error),
        }
    }

    /// Whether this is not the Node that is known by its name.
    fn is_another(&self, name: &str, node: Option<&NodeKnown>) -> bool {
        let known = self.nodes.get(name).and_then(|entry| entry.node.as_ref());
        known
            .zip(node)
            .is_some_and(|(known, node)| known.uid != node.uid)
    }

    /// The status of a `NodeWatermark` as it is now; `None`: it is gone.
    pub fn watermark(&mut self, name: &str, status: Option<&NodeWatermarkStatus>) {
        let rules = status.and_then(RulesKnown::of);
        self.change(name, |entry| set(&mut entry.known.rules, rules));
    }

    /// What an agent's Lease says now; `None`: nobody holds it.
    pub fn heartbeat(&mut self, name: &str, heartbeat: Option<Heartbeat>) {
        let (listed, now) = (!self.leases, Now::read());
        self.change(name, |entry| entry.hear(heartbeat, listed, now));
    }

    /// What an agent reported.
    pub fn report(&mut self, told: Told) {
        let Told {
            node,
            at,
            interval,
            status,
        } = told;
        let came = clock::wall() - clock::now().since(at);
        self.change(&node, |entry| {
            entry.reported = Some((at, interval));
            entry.known.report = Some(status);
            entry.known.reported = Some(came);
            true
        });
    }

    /// An agent fell silent, or is heard again.
    pub fn silent(&mut self, name: &str, silent: bool) {
        self.change(name, |entry| {
            entry.silent = silent;
            false
        });
    }

    /// Changes an entry, and where `change` says that it is something new, or its agent's health is, its object.
    fn change(&mut self, name: &str, change: impl FnOnce(&mut Entry) -> bool) {
        if !self.nodes.contains_key(name) {
            self.nodes.insert(name.to_owned(), Entry::default());
        }
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let was_there = entry.node.is_some();
        let is_new = change(entry);
        let is_judged_anew = entry.judge(clock::wall());
        let Some(node) = &entry.node else {
            entry.forget_report();
            if entry.known.rules.is_none() && entry.known.heartbeat.is_none() {
                self.nodes.remove(name);
            }
            if was_there {
                self.changed = true;
                self.data.change(|store| store.delete(name));
            }
            return;
        };
        if !is_new && !is_judged_anew {
            return;
        }
        self.changed = true;
        match content(name, node, &entry.known) {
            Ok(content) => self.data.change(|store| store.apply(name, content)),
            Err(error) => not_written(name, &error),
        }
    }

    /// The term in which this replica knows all and leads; `None`: it doesn't. Nothing is told during the warm-up.
    pub fn lead(&mut self, epoch: Option<u64>) {
        // In each term every agent counts as heard until it was not for its grace.
        if std::mem::replace(&mut self.term, epoch) != epoch {
            self.forget_silences();
        }
        // Also while another replica leads: this one has all reports when it is its turn.
        let is_warm = self.is_warm();
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

    fn forget_silences(&mut self) {
        let silent = self.nodes.iter().filter(|(_, entry)| entry.silent);
        let silent: Vec<String> = silent.map(|(name, _)| name.clone()).collect();
        for name in silent {
            self.silent(&name, false);
        }
    }

    fn is_warm(&mut self) -> bool {
        if !self.is_open {
            return self.reports.is_none();
        }
        let (nodes, leases) = (&self.nodes, self.leases);
        self.warm_up.is_over(clock::now(), || {
            let there = nodes.values().filter(|entry| entry.node.is_some());
            let living = there.filter(|entry| entry.known.heartbeat.is_some());
            let (mut all, mut reported) = (0, 0);
            for entry in living {
                all += 1;
                reported += usize::from(entry.reported.is_some());
            }
            Heard {
                living: leases.then_some(all),
                reported,
            }
        })
    }

    /// Lets watches see what changed.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.changed) {
            self.data.wake();
        }
    }
}

fn not_written(name: &str, error: &serde_json::Error) {
    tracing::error!(name, %error, "failed to write a NodeMetric as JSON");
}

#[cfg(test)]
mod tests;
