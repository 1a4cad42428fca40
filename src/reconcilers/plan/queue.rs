//! The nodes whose `NodeWatermark` may have to be written, with their retries.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use super::conflicts::EditConflicts;
use crate::cluster::backoff::jittered;
use crate::crd::node_watermark::Hash;
use crate::engine::time::BootTime;
use crate::reconcilers::retry::Attempt;

#[derive(Default)]
pub struct WriteQueue {
    pending: BTreeSet<String>,
    attempts: BTreeMap<String, Attempt>,
    conflicts: EditConflicts,
}

impl WriteQueue {
    pub fn extend<'a>(&mut self, nodes: impl IntoIterator<Item = &'a String>) {
        self.pending.extend(nodes.into_iter().cloned());
    }

    pub fn add(&mut self, node: &str) {
        self.pending.insert(node.to_owned());
    }

    /// Removes a node that has nothing to write.
    pub fn remove(&mut self, node: &str) {
        self.pending.remove(node);
    }

    pub fn clear(&mut self) {
        self.pending.clear();
    }

    /// Forgets writes in progress and failures.
    pub fn reset_attempts(&mut self) {
        self.attempts.clear();
    }

    /// Whether a node may have to be written.
    pub fn contains(&self, node: &str) -> bool {
        self.pending.contains(node)
    }

    pub fn count(&self) -> usize {
        self.pending.len()
    }

    /// The first node after `node` (`None`: of all) that may be written now.
    pub fn next_due(&self, node: Option<&str>, now: BootTime) -> Option<String> {
        let after = node.map_or(Bound::Unbounded, Bound::Excluded);
        let mut later = self.pending.range::<str, _>((after, Bound::Unbounded));
        let is_due = |node: &&String| {
            let attempt = self.attempts.get(*node);
            attempt.is_none_or(|attempt| attempt.is_due(now))
        };
        later.find(is_due).cloned()
    }

    /// A write starts; `hash` is that of the spec.
    pub fn start(&mut self, node: &str, hash: Option<Hash>) {
        let attempt = self.attempts.entry(node.to_owned()).or_default();
        attempt.start();
        attempt.hash = hash;
    }

    /// The hash of the spec in the current write.
    pub fn hash_in_progress(&self, node: &str) -> Option<Hash> {
        self.attempts.get(node).and_then(|attempt| attempt.hash)
    }

    /// A write succeeded. The node stays pending until its spec was compared.
    pub fn succeeded(&mut self, node: &str) {
        self.attempts.remove(node);
    }

    /// A write failed; `retry_after` is the delay that the API server asks for.
    pub fn failed(&mut self, node: &str, now: BootTime, retry_after: Option<Duration>) {
        let attempt = self.attempts.entry(node.to_owned()).or_default();
        attempt.failed(now);
        if let Some(delay) = retry_after {
            attempt.wait(now + jittered(delay));
        }
    }

    /// Another writer edited the `NodeWatermark` of a node.
    pub fn add_conflict(&mut self, node: &str) {
        self.conflicts.add(node);
    }

    /// Delays the writes that revert repeated edits.
    pub fn delay_conflicts(&mut self, now: BootTime) {
        for (node, until) in self.conflicts.take_delays(now) {
            self.attempts.entry(node).or_default().wait(until);
        }
    }
}
