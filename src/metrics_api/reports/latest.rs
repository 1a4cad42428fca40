//! The newest report of each node. Pure.
//!
//! The last write wins, and nothing queues: what was not taken yet is replaced. Memory is bounded by the nodes there are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::crd::{NodeMetricStatus, Report};
use crate::engine::time::BootTime;

/// Which of two reports of a boot is the newer: when the agent started, and how many it had sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    agent_started_millis: u64,
    sequence: u64,
}

/// What is remembered of a node's reports.
#[derive(Debug)]
struct Known {
    boot: String,
    place: Place,
    /// The boot before: a boot that ended does not come back.
    boot_before: Option<String>,
    at: BootTime,
    interval: Duration,
    /// Until it is taken: in a place of its own, for it is large.
    status: Option<Box<NodeMetricStatus>>,
}

/// A report that was not taken before.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Whose.
    pub node: Arc<str>,
    /// When it came.
    pub at: BootTime,
    /// When the next one will, at the latest.
    pub interval: Duration,
    /// What it says.
    pub status: NodeMetricStatus,
}

/// What became of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is kept; so old was the one before it.
    Stored(Option<Duration>),
    /// It, or a later one, was known.
    Replayed,
    /// There is no such node.
    UnknownNode,
    /// It is not known yet which nodes there are.
    NotOpen,
    /// The node's last one is this young.
    TooSoon,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Latest {
    nodes: BTreeMap<Arc<str>, Option<Known>>,
    changed: BTreeSet<Arc<str>>,
    open: bool,
}

impl Latest {
    /// All nodes are known.
    pub const fn open(&mut self) {
        self.open = true;
    }

    /// Whether all nodes are known.
    pub const fn is_open(&self) -> bool {
        self.open
    }

    /// A node is there, or is gone.
    pub fn node(&mut self, name: &str, there: bool) {
        if !there {
            self.nodes.remove(name);
            self.changed.remove(name);
        } else if !self.nodes.contains_key(name) {
            self.nodes.insert(Arc::from(name), None);
        }
    }

    /// Takes a report, unless the node's last one is younger than `least`.
    pub fn put(&mut self, report: Report, least: Duration, now: BootTime) -> Outcome {
        if !self.open {
            return Outcome::NotOpen;
        }
        let Some((name, _)) = self.nodes.get_key_value(report.node.as_str()) else {
            return Outcome::UnknownNode;
        };
        let name = Arc::clone(name);
        let Some(known) = self.nodes.get_mut(&name) else {
            return Outcome::UnknownNode;
        };
        let place = Place {
            agent_started_millis: report.agent_started_millis,
            sequence: report.sequence,
        };
        let (mut boot_before, mut age) = (None, None);
        if let Some(before) = known {
            if before.has(&report.boot_id, place) {
                return Outcome::Replayed;
            }
            let passed = now.since(before.at);
            if passed < least {
                return Outcome::TooSoon;
            }
            age = Some(passed);
            boot_before = if before.boot == report.boot_id {
                before.boot_before.take()
            } else {
                Some(std::mem::take(&mut before.boot))
            };
        }
        *known = Some(Known {
            place,
            boot_before,
            at: now,
            interval: report.interval(),
            boot: report.boot_id,
            status: Some(Box::new(report.status)),
        });
        self.changed.insert(name);
        Outcome::Stored(age)
    }

    /// What came since the last call: the newest report of each node.
    pub fn take(&mut self) -> Vec<Told> {
        let changed = std::mem::take(&mut self.changed);
        let told = changed.into_iter().filter_map(|node| {
            let known = self.nodes.get_mut(&node)?.as_mut()?;
            let status = known.status.take()?;
            Some(Told {
                node,
                at: known.at,
                interval: known.interval,
                status: *status,
            })
        });
        told.collect()
    }

    /// When the oldest came of those that nobody took.
    pub fn waiting_since(&self) -> Option<BootTime> {
        let known = self
            .changed
            .iter()
            .filter_map(|name| self.nodes.get(name)?.as_ref());
        known.map(|known| known.at).min()
    }

    /// How many nodes report: their last one is younger than three of its intervals.
    pub fn reporting(&self, now: BootTime) -> usize {
        let known = self.nodes.values().flatten();
        known
            .filter(|known| is_fresh(known.at, known.interval, now))
            .count()
    }
}

impl Known {
    /// Whether this report, or a later one, is known.
    fn has(&self, boot: &str, place: Place) -> bool {
        if self.boot == boot {
            place <= self.place
        } else {
            self.boot_before.as_deref() == Some(boot)
        }
    }
}

/// Whether a report of then still tells how a node is: it is younger than three of its intervals.
pub fn is_fresh(at: BootTime, interval: Duration, now: BootTime) -> bool {
    now.since(at) < interval * 3
}

#[cfg(test)]
mod tests;
