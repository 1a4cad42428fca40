//! Rolls edits out.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::catalog::Key;
use super::super::content::Content;
use super::super::restrain::restrain;
use super::super::rollout::{Phase, Rollout};
use super::notes::{Note, Subject};
use super::{Node, World, policies};
use crate::crd::Kind;
use crate::engine::time::BootTime;

impl World {
    /// Each object that is tighter than what nodes keep goes to its canaries first. With `acting_is_old` those that act for
    /// it already don't count as acting because of the edit; who has just begun to lead can't tell, and holds.
    pub(super) fn begin_rollouts(&mut self, nodes: &[String], acting_is_old: bool) {
        // Most nodes keep, and are to keep, the same.
        let mut pairs = HashSet::new();
        let mut keys = BTreeSet::new();
        for name in nodes {
            if let Some((kept, wanted)) = self.kept_and_wanted(name)
                && pairs.insert((Arc::as_ptr(kept), Arc::as_ptr(wanted)))
            {
                keys.extend(restrain(&kept.policy, &wanted.policy, |_| false).held);
            }
        }
        for key in keys {
            if self.catalog.is_immediate(&key) {
                continue;
            }
            let nodes = self.nodes_of(&key);
            let slowest = self.slowest(&key, &nodes);
            let mut rollout = Rollout::new(&key, nodes, slowest);
            if acting_is_old {
                rollout.remember_acting(|node| self.acts(node, &key));
            }
            let generation = self.catalog.generation(&key);
            let status = self.catalog.status(&key);
            // Only who has just begun to lead goes by what the last leader said: an edit since begins anew.
            if !acting_is_old && policies::stopped_before(status, generation) {
                rollout = rollout.stopped(0);
            }
            if rollout.phase() != Phase::Done {
                self.rollouts.insert(key, rollout);
            }
        }
    }

    /// What a node keeps, and what it is to keep, where that is not the same.
    fn kept_and_wanted(&self, name: &str) -> Option<(&Arc<Content>, &Arc<Content>)> {
        let node = self.nodes.get(name)?;
        let kept = self.live.get(name)?.content_for(&node.uid)?;
        let wanted = &node.class.content;
        (!Arc::ptr_eq(kept, wanted)).then_some((kept, wanted))
    }

    /// All nodes that an object concerns, and that keep something already.
    fn nodes_of(&self, key: &Key) -> BTreeSet<String> {
        let concerns = |node: &Node| match key.0 {
            Kind::PodQos => !node.class.selected.is_empty(),
            _ => node.class.is_selected_by(&key.1),
        };
        let nodes = self.nodes.iter().filter(|(_, node)| concerns(node));
        let names = nodes.map(|(name, _)| name);
        names
            .filter(|name| self.live.contains_key(*name))
            .cloned()
            .collect()
    }

    /// The longest threshold x period of an object's rules.
    fn slowest(&self, key: &Key, nodes: &BTreeSet<String>) -> Duration {
        let prefix = format!("{}/", key.1);
        let rules = nodes
            .iter()
            .take(1)
            .filter_map(|node| self.nodes.get(node))
            .flat_map(|node| &node.class.content.policy.rules);
        rules
            .filter(|rule| key.0 == Kind::PodQos || rule.id.0.starts_with(&prefix))
            .map(|rule| rule.period.saturating_mul(rule.avoidance_threshold))
            .max()
            .unwrap_or_default()
    }

    fn acts(&self, node: &str, key: &Key) -> bool {
        self.live.get(node).is_some_and(|live| live.acts(key))
    }

    pub(super) fn advance_rollouts(&mut self, now: BootTime) {
        let mut rollouts = std::mem::take(&mut self.rollouts);
        for (key, rollout) in &mut rollouts {
            let before = rollout.phase();
            let rate = self.settings.rollout_nodes_per_second;
            let has_it = |name: &str| self.keeps_all(name);
            let released = rollout.advance(now, rate, has_it, |node| self.acts(node, key));
            self.cap_dirty |= !released.is_empty();
            self.dirty.extend(released);
            if std::mem::discriminant(&before) != std::mem::discriminant(&rollout.phase()) {
                self.statuses_dirty = true;
                self.note_rollout(key, rollout);
                if rollout.phase() == Phase::Done {
                    self.dirty.extend(self.nodes.keys().cloned());
                }
            }
        }
        rollouts.retain(|_, rollout| rollout.phase() != Phase::Done);
        self.rollouts = rollouts;
    }

    /// Whether a canary keeps what it may have; one that is gone is not waited for.
    fn keeps_all(&self, name: &str) -> bool {
        !self.dirty.contains(name) || !self.nodes.contains_key(name)
    }

    fn note_rollout(&mut self, key: &Key, rollout: &Rollout) {
        let (warning, reason) = match rollout.phase() {
            Phase::Stopped { .. } => (true, "RolloutStopped"),
            Phase::Done => (false, "RolledOut"),
            _ => return,
        };
        self.notes.push(Note {
            about: Subject::Policy(key.0, key.1.clone()),
            warning,
            reason,
            message: policies::rollout_message(rollout),
        });
    }

    /// How many edits are on their way, by how far they are.
    pub fn rollout_counts(&self) -> [(&'static str, usize); 3] {
        let mut counts = [("canaries", 0), ("progressing", 0), ("stopped", 0)];
        for rollout in self.rollouts.values() {
            match rollout.phase() {
                Phase::Canaries | Phase::Watching { .. } => counts[0].1 += 1,
                Phase::Others { .. } => counts[1].1 += 1,
                Phase::Stopped { .. } => counts[2].1 += 1,
                Phase::Done => {}
            }
        }
        counts
    }
}
