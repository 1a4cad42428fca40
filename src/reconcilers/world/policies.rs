//! What is said about each policy object.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Value, json};

use super::super::catalog::Key;
use super::super::conditions::{self, Claim};
use super::super::rollout::{Phase, Rollout};
use super::World;
use crate::crd::{Finding, Kind};
use crate::engine::time::BootTime;

/// Statuses are not written more often.
const STATUS_INTERVAL: Duration = Duration::from_secs(2);
/// After a failure not for so much longer.
const STATUS_RETRY: Duration = Duration::from_secs(8);
/// The condition about a roll-out, and its reason where that was stopped.
const ROLLED_OUT: &str = "RolledOut";
const STOPPED: &str = "CanariesAct";

/// The status of one policy object.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusWrite {
    /// Which object.
    pub key: Key,
    /// Its status.
    pub status: Value,
}

/// How nodes take one `NodeQOS`.
#[derive(Default)]
struct Tally {
    matched: usize,
    breached: usize,
    preview: usize,
}

impl World {
    /// The statuses that differ from what the API server has. `timestamp` is the wall clock, as conditions have it.
    pub fn statuses(&mut self, now: BootTime, timestamp: &str) -> Vec<StatusWrite> {
        let lately = self
            .statuses_at
            .is_some_and(|at| now.since(at) < STATUS_INTERVAL);
        if !self.leading || !self.statuses_dirty || lately {
            return Vec::new();
        }
        self.statuses_at = Some(now);
        self.statuses_dirty = false;
        let findings = self.all_findings();
        let tallies = self.tallies();
        let status = |(key, before): (&Key, &Value)| {
            let status = self.status_of(key, before, &findings, &tallies, timestamp);
            (status != *before).then(|| StatusWrite {
                key: key.clone(),
                status,
            })
        };
        self.catalog.statuses().filter_map(status).collect()
    }

    /// A status could not be written: all are looked at again, but not at once.
    pub fn status_failed(&mut self, now: BootTime) {
        self.statuses_dirty = true;
        self.statuses_at = Some(now + STATUS_RETRY);
    }

    /// What holds on any node, and what holds on those that there are.
    fn all_findings(&self) -> BTreeMap<Key, BTreeSet<Finding>> {
        let mut found: BTreeMap<Key, BTreeSet<Finding>> = BTreeMap::new();
        let mut add = |finding: &Finding| {
            let kind = Kind::ALL
                .into_iter()
                .find(|kind| kind.name() == finding.object.kind);
            if let Some(kind) = kind {
                let about = found.entry((kind, finding.object.name.clone()));
                about.or_default().insert(finding.clone());
            }
        };
        self.catalog.findings().iter().for_each(&mut add);
        let mut seen = BTreeSet::new();
        for node in self.nodes.values() {
            if seen.insert(std::sync::Arc::as_ptr(&node.class)) {
                node.class.findings.iter().for_each(&mut add);
            }
        }
        found
    }

    fn tallies(&self) -> BTreeMap<&str, Tally> {
        let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
        for (name, node) in &self.nodes {
            let live = self.live.get(name);
            for source in &node.class.selected {
                let tally = tallies.entry(source).or_default();
                tally.matched += 1;
                let key = (Kind::NodeQos, source.to_string());
                tally.breached += usize::from(live.is_some_and(|live| live.acts(&key)));
                tally.preview += usize::from(live.is_some_and(|live| live.status.would));
            }
        }
        tallies
    }

    fn status_of(
        &self,
        key: &Key,
        before: &Value,
        findings: &BTreeMap<Key, BTreeSet<Finding>>,
        tallies: &BTreeMap<&str, Tally>,
        timestamp: &str,
    ) -> Value {
        let generation = self.catalog.generation(key);
        let none = BTreeSet::new();
        let about = findings.get(key).unwrap_or(&none);
        let mut claims = conditions::claims(key.0, about);
        if let Some(rollout) = self.rollouts.get(key) {
            claims.push(rollout_claim(rollout));
        }
        let conditions =
            conditions::conditions(&before["conditions"], claims, generation, timestamp);
        let mut status = json!({"observedGeneration": generation, "conditions": conditions});
        match key.0 {
            Kind::NodeQos => {
                let nothing = Tally::default();
                let tally = tallies.get(key.1.as_str()).unwrap_or(&nothing);
                status["matchedNodes"] = json!(tally.matched);
                status["breachedNodes"] = json!(tally.breached);
                status["previewNodes"] = json!(tally.preview);
            }
            Kind::AvoidanceAction => {
                let users: Vec<_> = self.catalog.users(&key.1).into_iter().take(64).collect();
                status["usedBy"] = json!(users.iter().map(|name| &**name).collect::<Vec<_>>());
            }
            Kind::PodQos => {}
        }
        status
    }
}

fn rollout_claim(rollout: &Rollout) -> Claim {
    let (holds, reason) = match rollout.phase() {
        Phase::Stopped { .. } => (false, STOPPED),
        Phase::Done => (true, "Done"),
        Phase::Others { .. } => (false, "Progressing"),
        Phase::Canaries | Phase::Watching { .. } => (false, "Canaries"),
    };
    Claim {
        kind: ROLLED_OUT,
        holds,
        reason: reason.to_owned(),
        message: rollout_message(rollout),
    }
}

/// How far an edit is, in words.
pub(super) fn rollout_message(rollout: &Rollout) -> String {
    let canaries = rollout.canaries().len();
    let size = rollout.size();
    match rollout.phase() {
        Phase::Canaries | Phase::Watching { .. } => format!(
            "the edit is tried on {canaries} of {size} nodes first; to skip that, annotate the object with \
             plimsoll.dev/rollout=immediate"
        ),
        Phase::Others { .. } => format!("the edit goes to {size} nodes"),
        Phase::Stopped { acting } => {
            let acting = if acting == 0 {
                "too many".to_owned()
            } else {
                acting.to_string()
            };
            format!(
                "the edit stops at {canaries} of {size} nodes, because {acting} of these act since they have it; edit \
                 the object again, or annotate it with plimsoll.dev/rollout=immediate to go on"
            )
        }
        Phase::Done => format!("all {size} nodes may have the edit"),
    }
}

/// Whether the last leader stopped the roll-out of this generation.
pub(super) fn stopped_before(status: Option<&Value>, generation: i64) -> bool {
    let conditions = status.and_then(|status| status["conditions"].as_array());
    conditions.into_iter().flatten().any(|condition| {
        condition["type"] == ROLLED_OUT
            && condition["reason"] == STOPPED
            && condition["observedGeneration"] == generation
    })
}
