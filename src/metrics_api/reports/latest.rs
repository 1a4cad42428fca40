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
/// An agent's start may seem so much later than it can be: the report before came by a slower way.
const SLACK: Duration = Duration::from_secs(10);
/// A node's clock may run faster than this replica's by one part in so many.
const DRIFT: u32 = 1000;

/// Which of two reports of a boot is the newer: when the agent started, and how many it had sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    agent_started_millis: u64,
    sequence: u64,
}

impl Place {
    const fn of(report: &Report) -> Self {
        Self {
            agent_started_millis: report.agent_started_millis,
            sequence: report.sequence,
        }
    }
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
    /// For how long the node can have been up then at most; `None`: no agent of this boot said for how long it was.
    uptime: Option<Duration>,
    status: Arc<NodeMetricStatus>,
}

/// A node that is there.
#[derive(Debug, Default)]
struct Node {
    /// `status.nodeInfo.bootID` of the Node; empty: it does not say.
    boot_id: String,
    last: Option<Known>,
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
    /// This very report was known.
    Replayed,
    /// A later one is known: by it this one changes nothing.
    Superseded,
    /// The Node says that the machine runs since another boot.
    OtherBoot,
    /// Its agent can't have started so late, by the reports before and the time since.
    StartedAhead,
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
    nodes: BTreeMap<Arc<str>, Node>,
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

    /// A node is there, whose Node has this boot id, if any; `None`: it is gone.
    pub fn node(&mut self, name: &str, boot_id: Option<&str>) {
        let Some(boot_id) = boot_id else {
            self.nodes.remove(name);
            self.changed.remove(name);
            return;
        };
        if let Some(node) = self.nodes.get_mut(name) {
            boot_id.clone_into(&mut node.boot_id);
        } else {
            let boot_id = boot_id.to_owned();
            self.nodes.insert(
                Arc::from(name),
                Node {
                    boot_id,
                    last: None,
                },
            );
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
        let Some(node) = self.nodes.get_mut(&name) else {
            return Outcome::UnknownNode;
        };
        match node.judge(&report, least, came) {
            Ok(age) => {
                node.store(report, came);
                self.changed.insert(name);
                Outcome::Stored(age)
            }
            Err(outcome) => outcome,
        }
    }

    /// What came since the last call: the newest report of each node.
    pub fn take(&mut self) -> Vec<Told> {
        let changed = std::mem::take(&mut self.changed);
        let told = changed.into_iter().filter_map(|node| {
            let known = self.nodes.get(&node)?.last.as_ref()?;
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
            .filter_map(|name| self.nodes.get(name)?.last.as_ref());
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
            .filter(|(_, node)| is_late(node.last.as_ref()));
        let missed = late.map(|(name, node)| Missed {
            node: name.to_string(),
            last: node.last.as_ref().map(Known::last),
        });
        missed.collect()
    }

    /// The last report of a node of which another replica misses one, if that would be news there.
    pub fn relayed(
        &self,
        missed: &Missed,
        now: BootTime,
    ) -> Option<Relayed<Report<&NodeMetricStatus>>> {
        let known = self.nodes.get(missed.node.as_str())?.last.as_ref()?;
        let is_news = !missed
            .last
            .as_ref()
            .is_some_and(|last| known.is_within(last));
        (is_news && known.is_fresh(now)).then(|| Relayed {
            age_millis: millis(now.since(known.at)),
            report: Report {
                node: missed.node.clone(),
                boot_id: known.boot.clone(),
                agent_started_millis: known.place.agent_started_millis,
                sequence: known.place.sequence,
                uptime_millis: known.uptime.map(millis),
                interval_seconds: u32::try_from(known.interval.as_secs()).unwrap_or(u32::MAX),
                status: &*known.status,
            },
        })
    }

    /// How many nodes report: their last one is younger than three of its intervals.
    pub fn reporting(&self, now: BootTime) -> usize {
        let known = self.nodes.values().filter_map(|node| node.last.as_ref());
        known.filter(|known| known.is_fresh(now)).count()
    }
}

impl Node {
    /// How old the last report was when this one came; `Err`: why this one is not stored.
    fn judge(
        &self,
        report: &Report,
        least: Duration,
        came: BootTime,
    ) -> Result<Option<Duration>, Outcome> {
        if !self.boot_id.is_empty() && self.boot_id != report.boot_id {
            return Err(Outcome::OtherBoot);
        }
        let Some(known) = &self.last else {
            return Ok(None);
        };
        // A stale one is no measure: whoever sent reports ahead of the agent's own keeps those out for no longer.
        if known.is_fresh(came) {
            known.judge(report, came)?;
        }
        let age = came.since(known.at);
        if age < least {
            return Err(Outcome::TooSoon);
        }
        Ok(Some(age))
    }

    fn store(&mut self, report: Report, came: BootTime) {
        let last = self.last.take();
        let is_of_boot = |last: &&Known| last.boot == report.boot_id;
        let same_boot = last.as_ref().filter(is_of_boot);
        let most = same_boot
            .filter(|last| last.is_fresh(came))
            .and_then(|last| last.most_uptime(came));
        let said = report.uptime_millis.map(Duration::from_millis);
        let uptime = said.into_iter().chain(most).min();
        let boot_before = last.and_then(|last| {
            if last.boot == report.boot_id {
                last.boot_before
            } else {
                Some(last.boot)
            }
        });
        self.last = Some(Known {
            place: Place::of(&report),
            boot_before,
            at: came,
            interval: report.interval(),
            uptime,
            boot: report.boot_id,
            status: Arc::new(report.status),
        });
    }
}

impl Known {
    fn is_fresh(&self, now: BootTime) -> bool {
        is_fresh(self.at, self.interval, now)
    }

    /// For how long the node can have been up at most.
    fn most_uptime(&self, now: BootTime) -> Option<Duration> {
        let passed = now.since(self.at);
        Some(self.uptime?.saturating_add(passed + passed / DRIFT))
    }

    /// `Err`: why a report that comes after this one is not stored.
    fn judge(&self, report: &Report, came: BootTime) -> Result<(), Outcome> {
        let place = Place::of(report);
        if self.has(&report.boot_id, place) {
            let is_this =
                self.boot == report.boot_id && self.place == place && *self.status == report.status;
            return Err(if is_this {
                Outcome::Replayed
            } else {
                Outcome::Superseded
            });
        }
        let most = self
            .most_uptime(came)
            .filter(|_| self.boot == report.boot_id);
        let started = Duration::from_millis(place.agent_started_millis);
        if most.is_some_and(|most| started > most.saturating_add(SLACK)) {
            return Err(Outcome::StartedAhead);
        }
        Ok(())
    }

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

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Whether a report of then still tells how a node is: it is younger than three of its intervals.
pub fn is_fresh(at: BootTime, interval: Duration, now: BootTime) -> bool {
    now.since(at) < interval * 3
}

#[cfg(test)]
mod tests;
