//! The newest report of each node. Pure.
//!
//! The last write wins, without queues: a report that was not processed yet is replaced. Memory is bounded by the
//! number of nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::busy::SoftTaintPermits;
use crate::crd::report::{INTERVAL, MissingReport, RelayedReport, ReportId};
use crate::crd::{NodeMetricStatus, Report};
use crate::engine::time::BootTime;

/// A report is missing if it is this much overdue.
const LATE_AFTER: Duration = Duration::from_secs(1);
/// Tolerance of an agent's start time: the earlier report may have been slower in transit.
const START_TOLERANCE: Duration = Duration::from_secs(10);
/// A node's clock may run faster than this replica's by one part in this many.
const MAX_DRIFT: u32 = 1000;

/// Order of reports within a boot: start of the agent, then sequence number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    agent_started_millis: u64,
    sequence: u64,
}

impl Position {
    const fn of(report: &Report) -> Self {
        Self {
            agent_started_millis: report.agent_started_millis,
            sequence: report.sequence,
        }
    }
}

/// The last report of a node.
#[derive(Debug)]
struct LastReport {
    boot: String,
    position: Position,
    /// The previous boot: its reports are not accepted again.
    boot_before: Option<String>,
    at: BootTime,
    interval: Duration,
    /// Upper bound of the node's uptime at that time. `None`: no agent of this boot reported it.
    uptime: Option<Duration>,
    status: Arc<NodeMetricStatus>,
}

/// An existing node.
#[derive(Debug, Default)]
struct Node {
    /// `status.nodeInfo.bootID`; may be empty.
    boot_id: String,
    /// Its region and zone.
    zone: Arc<str>,
    last: Option<LastReport>,
}

/// A report that was not processed before.
#[derive(Clone, Debug, PartialEq)]
pub struct ReceivedReport {
    /// Node of the report.
    pub node: Arc<str>,
    /// When it arrived.
    pub at: BootTime,
    /// Maximum time until the next one.
    pub interval: Duration,
    /// Content.
    pub status: Arc<NodeMetricStatus>,
}

/// Result of storing a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreOutcome {
    /// Stored; with the age of the previous report.
    Stored(Option<Duration>),
    /// This very report was received before.
    Replayed,
    /// A later report was received before.
    Stale,
    /// The Node has another boot ID.
    OtherBoot,
    /// Its agent can't have started that late, judging by earlier reports and the time since.
    StartedAhead,
    /// The node does not exist.
    UnknownNode,
    /// The nodes are not listed yet.
    NotOpen,
    /// The previous report is younger than the minimum interval.
    TooSoon,
}

/// The newest reports of all nodes.
#[derive(Debug, Default)]
pub struct Latest {
    nodes: BTreeMap<Arc<str>, Node>,
    changed: BTreeSet<Arc<str>>,
    soft_taint: SoftTaintPermits,
    /// When all nodes were known.
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

    /// A Node was added or changed (with its boot ID, or an empty string), or (`None`) deleted.
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
                    ..Node::default()
                },
            );
        }
    }

    /// The region and zone of a node.
    pub fn zone(&mut self, name: &str, zone: &Arc<str>) {
        if let Some(node) = self.nodes.get_mut(name) {
            node.zone = Arc::clone(zone);
        }
    }

    /// Decides again which nodes may have the soft taint.
    pub fn permit_soft_taints(&mut self, now: BootTime) {
        let nodes = self.nodes.iter().filter_map(|(name, node)| {
            let last = node.last.as_ref().filter(|last| last.is_fresh(now))?;
            Some((name, &node.zone, last.status.load.as_ref()?.percent))
        });
        self.soft_taint.update(now, nodes);
    }

    /// Whether the node may have the soft taint.
    pub fn may_have_soft_taint(&self, node: &str) -> bool {
        self.soft_taint.contains(node)
    }

    /// Stores a report that arrived at `arrived_at`, unless the previous one is younger than `min_age`.
    pub fn put(&mut self, report: Report, min_age: Duration, arrived_at: BootTime) -> StoreOutcome {
        if !self.is_open() {
            return StoreOutcome::NotOpen;
        }
        let Some((name, _)) = self.nodes.get_key_value(report.node.as_str()) else {
            return StoreOutcome::UnknownNode;
        };
        let name = Arc::clone(name);
        let Some(node) = self.nodes.get_mut(&name) else {
            return StoreOutcome::UnknownNode;
        };
        match node.check(&report, min_age, arrived_at) {
            Ok(age) => {
                node.store(report, arrived_at);
                self.changed.insert(name);
                StoreOutcome::Stored(age)
            }
            Err(outcome) => outcome,
        }
    }

    /// The newest report of each node since the last call.
    pub fn take(&mut self) -> Vec<ReceivedReport> {
        let changed = std::mem::take(&mut self.changed);
        let received = changed.into_iter().filter_map(|node| {
            let known = self.nodes.get(&node)?.last.as_ref()?;
            Some(ReceivedReport {
                at: known.at,
                interval: known.interval,
                status: Arc::clone(&known.status),
                node,
            })
        });
        received.collect()
    }

    /// When the oldest unprocessed report arrived.
    pub fn waiting_since(&self) -> Option<BootTime> {
        let known = self
            .changed
            .iter()
            .filter_map(|name| self.nodes.get(name)?.last.as_ref());
        known.map(|known| known.at).min()
    }

    /// The nodes whose reports are overdue.
    pub fn missed(&self, now: BootTime) -> Vec<MissingReport> {
        let Some(open) = self.open else {
            return Vec::new();
        };
        let is_late = |known: Option<&LastReport>| {
            let due = known.map_or(open + INTERVAL, |known| known.at + known.interval);
            due + LATE_AFTER <= now
        };
        let late = self
            .nodes
            .iter()
            .filter(|(_, node)| is_late(node.last.as_ref()));
        let missed = late.map(|(name, node)| MissingReport {
            node: name.to_string(),
            last: node.last.as_ref().map(LastReport::last),
        });
        missed.collect()
    }

    /// A node's last report, if it is newer than the replica's.
    pub fn relayed(
        &self,
        missed: &MissingReport,
        now: BootTime,
    ) -> Option<RelayedReport<Report<&NodeMetricStatus>>> {
        let known = self.nodes.get(missed.node.as_str())?.last.as_ref()?;
        let is_newer = !missed
            .last
            .as_ref()
            .is_some_and(|last| known.is_within(last));
        (is_newer && known.is_fresh(now)).then(|| RelayedReport {
            age_millis: millis(now.since(known.at)),
            report: Report {
                node: missed.node.clone(),
                boot_id: known.boot.clone(),
                agent_started_millis: known.position.agent_started_millis,
                sequence: known.position.sequence,
                uptime_millis: known.uptime.map(millis),
                interval_seconds: u32::try_from(known.interval.as_secs()).unwrap_or(u32::MAX),
                status: &*known.status,
            },
        })
    }

    /// Number of nodes whose last report is fresh.
    pub fn reporting(&self, now: BootTime) -> usize {
        let known = self.nodes.values().filter_map(|node| node.last.as_ref());
        known.filter(|known| known.is_fresh(now)).count()
    }
}

impl Node {
    /// Age of the previous report, or `Err`: why this one is not stored.
    fn check(
        &self,
        report: &Report,
        min_age: Duration,
        arrived_at: BootTime,
    ) -> Result<Option<Duration>, StoreOutcome> {
        if !self.boot_id.is_empty() && self.boot_id != report.boot_id {
            return Err(StoreOutcome::OtherBoot);
        }
        let Some(known) = &self.last else {
            return Ok(None);
        };
        // Only while the previous report is fresh: forged reports from the future block the agent's own no longer than
        // that.
        if known.is_fresh(arrived_at) {
            known.check(report, arrived_at)?;
        }
        let age = arrived_at.since(known.at);
        if age < min_age {
            return Err(StoreOutcome::TooSoon);
        }
        Ok(Some(age))
    }

    fn store(&mut self, report: Report, arrived_at: BootTime) {
        let last = self.last.take();
        let is_of_boot = |last: &&LastReport| last.boot == report.boot_id;
        let same_boot = last.as_ref().filter(is_of_boot);
        let max_uptime = same_boot
            .filter(|last| last.is_fresh(arrived_at))
            .and_then(|last| last.max_uptime_at(arrived_at));
        let reported = report.uptime_millis.map(Duration::from_millis);
        let uptime = reported.into_iter().chain(max_uptime).min();
        let boot_before = last.and_then(|last| {
            if last.boot == report.boot_id {
                last.boot_before
            } else {
                Some(last.boot)
            }
        });
        self.last = Some(LastReport {
            position: Position::of(&report),
            boot_before,
            at: arrived_at,
            interval: report.interval(),
            uptime,
            boot: report.boot_id,
            status: Arc::new(report.status),
        });
    }
}

impl LastReport {
    fn is_fresh(&self, now: BootTime) -> bool {
        is_fresh(self.at, self.interval, now)
    }

    /// Upper bound of the node's uptime.
    fn max_uptime_at(&self, now: BootTime) -> Option<Duration> {
        let passed = now.since(self.at);
        Some(self.uptime?.saturating_add(passed + passed / MAX_DRIFT))
    }

    /// `Err`: why a report is not stored after this one.
    fn check(&self, report: &Report, arrived_at: BootTime) -> Result<(), StoreOutcome> {
        let position = Position::of(report);
        if self.has(&report.boot_id, position) {
            let is_identical = self.boot == report.boot_id
                && self.position == position
                && *self.status == report.status;
            return Err(if is_identical {
                StoreOutcome::Replayed
            } else {
                StoreOutcome::Stale
            });
        }
        let max_uptime = self
            .max_uptime_at(arrived_at)
            .filter(|_| self.boot == report.boot_id);
        let started = Duration::from_millis(position.agent_started_millis);
        if max_uptime.is_some_and(|max_uptime| started > max_uptime.saturating_add(START_TOLERANCE))
        {
            return Err(StoreOutcome::StartedAhead);
        }
        Ok(())
    }

    fn last(&self) -> ReportId {
        ReportId {
            boot_id: self.boot.clone(),
            agent_started_millis: self.position.agent_started_millis,
            sequence: self.position.sequence,
        }
    }

    /// Whether a replica with `last` has everything known here.
    fn is_within(&self, last: &ReportId) -> bool {
        let position = Position {
            agent_started_millis: last.agent_started_millis,
            sequence: last.sequence,
        };
        last.boot_id == self.boot && self.position <= position
    }

    /// Whether this report, or a later one, was received.
    fn has(&self, boot: &str, position: Position) -> bool {
        if self.boot == boot {
            position <= self.position
        } else {
            self.boot_before.as_deref() == Some(boot)
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// How long a report counts that is sent at this interval.
pub fn lifetime(interval: Duration) -> Duration {
    interval * 3
}

/// Whether a report is younger than three of its intervals.
pub fn is_fresh(at: BootTime, interval: Duration, now: BootTime) -> bool {
    now.since(at) < lifetime(interval)
}

#[cfg(test)]
mod tests;
