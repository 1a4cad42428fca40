//! What the controller sees of the cluster, on its way into the store.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;

use crate::cluster::clock;
use crate::crd::NodeWatermarkStatus;

use super::compose::{Health, Heartbeat, Known, NodeKnown, RulesKnown, compose, content};
use super::data::Data;

/// Takes what is known of nodes. A node that is there has an object, whatever is known of it.
pub struct Feed {
    data: Arc<Data>,
    nodes: BTreeMap<String, Entry>,
    changed: bool,
}

/// One node, or what is told of it before it is there.
#[derive(Default)]
struct Entry {
    known: Known,
    /// Its agent was told of as silent.
    silent: bool,
}

impl Entry {
    /// Notes what its agent's health is, and since when.
    fn judge(&mut self, now: Timestamp) {
        let health = match (&self.known.heartbeat, self.silent) {
            (None, _) => Health::Unknown,
            (Some(_), true) => Health::Silent,
            (Some(_), false) => Health::Reporting,
        };
        if self.known.health != health {
            self.known.health = health;
            self.known.since = Some(now);
        }
    }
}

impl Feed {
    /// Into this store.
    pub const fn new(data: Arc<Data>) -> Self {
        Self {
            data,
            nodes: BTreeMap::new(),
            changed: false,
        }
    }

    /// A Node as it is now; `None`: it is gone.
    pub fn node(&mut self, name: &str, node: Option<NodeKnown>) {
        self.change(name, |entry| entry.known.node = node);
    }

    /// The status of a `NodeWatermark` as it is now; `None`: it is gone.
    pub fn watermark(&mut self, name: &str, status: Option<&NodeWatermarkStatus>) {
        let rules = status.and_then(RulesKnown::of);
        self.change(name, |entry| entry.known.rules = rules);
    }

    /// What an agent's Lease says now; `None`: nobody holds it.
    pub fn heartbeat(&mut self, name: &str, heartbeat: Option<Heartbeat>) {
        self.change(name, |entry| entry.known.heartbeat = heartbeat);
    }

    /// An agent fell silent, or is heard again.
    pub fn silent(&mut self, name: &str, silent: bool) {
        self.change(name, |entry| entry.silent = silent);
    }

    fn change(&mut self, name: &str, change: impl FnOnce(&mut Entry)) {
        if !self.nodes.contains_key(name) {
            self.nodes.insert(name.to_owned(), Entry::default());
        }
        let Some(entry) = self.nodes.get_mut(name) else {
            return;
        };
        let before = entry.known.clone();
        change(entry);
        entry.judge(clock::wall());
        if entry.known == before {
            return;
        }
        self.changed = true;
        let Some(node) = &entry.known.node else {
            self.data.change(|store| store.delete(name));
            if entry.known.rules.is_none() && entry.known.heartbeat.is_none() {
                self.nodes.remove(name);
            }
            return;
        };
        match content(compose(name, node, &entry.known)) {
            Ok(content) => self.data.change(|store| store.apply(name, content)),
            Err(error) => tracing::error!(name, %error, "failed to write a NodeMetric as JSON"),
        }
    }

    /// The term in which this replica knows all and leads; `None`: it doesn't.
    pub fn lead(&mut self, epoch: Option<u64>) {
        let before = self.data.change(|store| store.term());
        if before == epoch {
            return;
        }
        // In each term every agent counts as heard until it was not for its grace.
        let silent = self.nodes.iter().filter(|(_, entry)| entry.silent);
        let silent: Vec<String> = silent.map(|(name, _)| name.clone()).collect();
        for name in silent {
            self.silent(&name, false);
        }
        self.data.change(|store| match epoch {
            Some(epoch) => store.lead(epoch),
            None => store.follow(),
        });
        self.changed = true;
    }

    /// Lets watches see what changed.
    pub fn flush(&mut self) {
        if std::mem::take(&mut self.changed) {
            self.data.wake();
        }
    }
}

#[cfg(test)]
mod tests;
