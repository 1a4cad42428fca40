//! The newest report of each node. Pure.
//!
//! The last write wins, and nothing queues: what was not taken yet is replaced. Memory is bounded by the nodes there are.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::crd::report::{INTERVAL, Last, Missed, Relayed};
use crate::crd::{NodeMetricStatus, Report};
use crate::engine::time::BootTime;

/// A report is missed that did not come so long after its time.
const PATIENCE: Duration = Duration::from_secs(1);

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
    status: Arc<NodeMetricStatus>,
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
    pub status: Arc<NodeMetricStatus>,
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
    /// Since when all nodes are known.
    open: Option<BootTime>,
}

impl Latest {
    /// All nodes are known.
    pub fn open(&mut self, now: BootTime) {
        self.open.get_or_insert(now);
    }

    /// Whether all nodes are known.
    pub const fn is_open(&self) -> bool {
        self.open.is_some()
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

    /// Takes a report that came then, unless the node's last one is younger than `least`.
    pub fn put(&mut self, report: Report, least: Duration, came: BootTime) -> Outcome {
        if !self.is_open() {
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
            let passed = came.since(before.at);
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
            at: came,
            interval: report.interval(),
            boot: report.boot_id,
            status: Arc::new(report.status),
        });
        self.changed.insert(name);
        Outcome::Stored(age)
    }

    /// What came since the last call: the newest report of each node.
    pub fn take(&mut self) -> Vec<Told> {
        let changed = std::mem::take(&mut self.changed);
        let told = changed.into_iter().filter_map(|node| {
            let known = self.nodes.get(&node)?.as_ref()?;
            Some(Told {
                at: known.at,
                interval: known.interval,
                status: Arc::clone(&known.status),
                node,
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

    /// The nodes whose next report is late.
    pub fn missed(&self, now: BootTime) -> Vec<Missed> {
        let Some(open) = self.open else {
            return Vec::new();
        };
        let is_late = |known: Option<&Known>| {
            let due = known.map_or(open + INTERVAL, |known| known.at + known.interval);
            due + PATIENCE <= now
        };
        let late = self
            .nodes
            .iter()
            .filter(|(_, known)| is_late(known.as_ref()));
        let missed = late.map(|(node, known)| Missed {
            node: node.to_string(),
            last: known.as_ref().map(Known::last),
        });
        missed.collect()
    }

    /// The last report of a node of which another replica misses one, if that would be news there.
    pub fn relayed(
        &self,
        missed: &Missed,
        now: BootTime,
    ) -> Option<Relayed<Report<&NodeMetricStatus>>> {
        let known = self.nodes.get(missed.node.as_str())?.as_ref()?;
        let is_news = !missed
            .last
            .as_ref()
            .is_some_and(|last| known.is_within(last));
        let age = now.since(known.at).as_millis();
        (is_news && is_fresh(known.at, known.interval, now)).then(|| Relayed {
            age_millis: u64::try_from(age).unwrap_or(u64::MAX),
            report: Report {
                node: missed.node.clone(),
                boot_id: known.boot.clone(),
                agent_started_millis: known.place.agent_started_millis,
                sequence: known.place.sequence,
                interval_seconds: u32::try_from(known.interval.as_secs()).unwrap_or(u32::MAX),
                status: &*known.status,
            },
        })
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
    fn last(&self) -> Last {
        Last {
            boot_id: self.boot.clone(),
            agent_started_millis: self.place.agent_started_millis,
            sequence: self.place.sequence,
        }
    }

    /// Whether whoever has this one has all that is known here.
    fn is_within(&self, last: &Last) -> bool {
        let place = Place {
            agent_started_millis: last.agent_started_millis,
            sequence: last.sequence,
        };
        last.boot_id == self.boot && self.place <= place
    }

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
