//! Starts and advances the roll-outs of edits.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::catalog::Key;
use super::super::content::Content;
use super::super::rollout::{NodeObservation, Phase, Rollout};
use super::super::tightening::{allows_more, is_tighter, source, withhold};
use super::events::{PendingEvent, Subject};
use super::{Node, Reconciler, statuses};
use crate::crd::Kind;
use crate::engine::policy::{PodPolicy, PolicySet, Strategy};
use crate::engine::time::BootTime;

/// The current and the desired content of a node, by address: most nodes share both.
type Pair = (*const Content, *const Content);

/// A tightening edit of one object.
#[derive(Default)]
pub(super) struct Edit {
    /// The nodes that it changes, by content; true if nothing of the object is in force there.
    pairs: HashMap<Pair, bool>,
    /// The object's policies on these nodes before the edit.
    before: PolicySet,
}

impl Edit {
    /// If nodes have different versions of the object, `before` becomes the loosest: a tighter one may be that of a canary of a stopped
    /// edit.
    fn add(&mut self, key: &Key, pair: Pair, current: &PolicySet) {
        let rules = current.rules.iter().filter(|rule| source(rule) == *key);
        let rules: Vec<_> = rules.collect();
        let pod = |pod: &&PodPolicy| key.0 == Kind::PodQos && pod.name == key.1;
        let pod = current.pods.iter().find(pod);
        let acts = rules.iter().any(|rule| rule.strategy == Strategy::Enforce);
        self.pairs.insert(pair, pod.is_none() && !acts);
        for rule in rules {
            let known = self.before.rules.iter_mut().find(|it| it.id == rule.id);
            match known {
                None => self.before.rules.push(rule.clone()),
                Some(known) if is_tighter(known, Some(rule)) => known.clone_from(rule),
                Some(_) => {}
            }
        }
        match (self.before.pods.first_mut(), pod) {
            (None, Some(pod)) => self.before.pods.push(pod.clone()),
            (Some(known), Some(pod)) if allows_more(known, Some(pod)) => known.clone_from(pod),
            _ => {}
        }
    }
}

/// Why a roll-out starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The object was edited now: no node has this edit yet.
    Edited,
    /// It started earlier, and nodes may have it already.
    Resumed,
    /// As [`Origin::Resumed`], but an earlier leader stopped it.
    Stopped,
}

/// Whether an object may affect a node.
fn affects(key: &Key, node: &Node) -> bool {
    match key.0 {
        Kind::PodQos => !node.class.selected.is_empty(),
        _ => node.class.is_selected_by(&key.1),
    }
}

impl Reconciler {
    /// Starts a roll-out for each object that is now tighter than what these nodes have.
    pub(super) fn start_rollouts(&mut self, nodes: &[String]) {
        for (key, edit) in self.edits(nodes) {
            self.start_rollout(key, &edit, Origin::Edited);
        }
    }

    /// Resumes the roll-outs of this replica's last term, and takes over those of other leaders. What the last leader stopped stays
    /// stopped until the object is edited.
    pub(super) fn resume_rollouts(&mut self) {
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        let edits = self.edits(&names);
        let mut rollouts = std::mem::take(&mut self.rollouts);
        rollouts.retain(|key, _| edits.contains_key(key));
        for (key, rollout) in &mut rollouts {
            rollout.resume();
            let stopped = matches!(rollout.phase(), Phase::Stopped { .. });
            if !stopped && self.is_stopped(key) {
                rollout.stop(|node| self.has_it(node, &edits[key]));
            }
        }
        self.rollouts = rollouts;
        for (key, edit) in edits {
            let origin = if self.is_stopped(&key) {
                Origin::Stopped
            } else {
                Origin::Resumed
            };
            self.start_rollout(key, &edit, origin);
        }
    }

    /// The tightening edits on these nodes, by object.
    fn edits(&self, nodes: &[String]) -> BTreeMap<Key, Edit> {
        let mut seen = HashSet::new();
        let mut edits: BTreeMap<Key, Edit> = BTreeMap::new();
        for name in nodes {
            let Some((current, desired)) = self.current_and_desired(name) else {
                continue;
            };
            let pair = (Arc::as_ptr(current), Arc::as_ptr(desired));
            if !seen.insert(pair) {
                continue;
            }
            for key in withhold(&current.policy, &desired.policy, |_| false).withheld {
                let edit = edits.entry(key.clone()).or_default();
                edit.add(&key, pair, &current.policy);
            }
        }
        edits
    }

    /// A roll-out in progress continues: only an edit of the object itself restarts it.
    fn start_rollout(&mut self, key: Key, edit: &Edit, origin: Origin) {
        if self.rollouts.contains_key(&key) || self.catalog.is_immediate(&key) {
            return;
        }
        let nodes = self.changed_by(&key, edit, origin);
        let slowest = self.slowest(&key, &nodes);
        let has_it = |node: &str| self.has_it(node, edit);
        let mut rollout = Rollout::new(nodes, slowest, edit.before.clone());
        if rollout.phase() == Phase::Done {
            return;
        }
        if origin == Origin::Stopped {
            rollout.stop(has_it);
        } else {
            rollout.start(has_it, |node| self.observe(node, &key));
        }
        if origin == Origin::Edited {
            self.publish_rollout(&key, &rollout);
        }
        self.rollouts.insert(key, rollout);
    }

    /// A node was deleted or changed: roll-outs that no longer affect it continue without it, since a canary that lost the edit proves
    /// nothing. A roll-out without nodes left to be canaries starts again.
    pub(super) fn remove_from_rollouts(&mut self, name: &str) {
        let node = self.nodes.get(name);
        let rollouts = self.rollouts.iter_mut();
        let rollouts = rollouts.filter(|(key, _)| !node.is_some_and(|node| affects(key, node)));
        let stranded = rollouts.filter_map(|(key, rollout)| {
            let is_stranded = rollout.remove_node(name);
            is_stranded.then(|| key.clone())
        });
        for key in stranded.collect::<Vec<_>>() {
            self.rollouts.remove(&key);
            let nodes = self.nodes_of(&key);
            let edits = self.edits(&nodes);
            if let Some(edit) = edits.get(&key) {
                self.start_rollout(key, edit, Origin::Resumed);
            }
            self.dirty.extend(self.nodes.keys().cloned());
            self.cap_dirty = true;
        }
    }

    /// Whether the last leader stopped the roll-out of this object, and it was not edited since.
    fn is_stopped(&self, key: &Key) -> bool {
        statuses::stopped_before(self.catalog.status(key), self.catalog.generation(key))
    }

    fn has_it(&self, name: &str, edit: &Edit) -> bool {
        let pair = self.pair(name);
        pair.is_some_and(|pair| !edit.pairs.contains_key(&pair))
    }

    /// `None` if the node's current content is unknown.
    fn pair(&self, name: &str) -> Option<Pair> {
        let node = self.nodes.get(name)?;
        let current = self.watermarks.get(name)?.content_for(&node.uid)?;
        Some((Arc::as_ptr(current), Arc::as_ptr(&node.class.content)))
    }

    /// What is known of a node during the roll-out of an object.
    fn observe(&self, name: &str, key: &Key) -> NodeObservation {
        let (Some(node), Some(watermark)) = (self.nodes.get(name), self.watermarks.get(name))
        else {
            return NodeObservation::default();
        };
        NodeObservation {
            reporting: node.ready && watermark.has_agent() && !self.liveness.is_late(name),
            up_to_date: watermark.enforced && !self.dirty.contains(name),
            acting: watermark.acts(key),
        }
    }

    /// The current and the desired content of a node, if they differ.
    fn current_and_desired(&self, name: &str) -> Option<(&Arc<Content>, &Arc<Content>)> {
        let node = self.nodes.get(name)?;
        let current = self.watermarks.get(name)?.content_for(&node.uid)?;
        let desired = &node.class.content;
        (!Arc::ptr_eq(current, desired)).then_some((current, desired))
    }

    /// All nodes that an object affects and that have a `NodeWatermark`.
    fn nodes_of(&self, key: &Key) -> Vec<String> {
        let nodes = self.nodes.iter().filter(|(_, node)| affects(key, node));
        let names = nodes.map(|(name, _)| name);
        names
            .filter(|name| self.watermarks.contains_key(*name))
            .cloned()
            .collect()
    }

    /// The nodes whose content an edit changes (true: nothing of the object was in force there). A resumed edit includes the nodes that
    /// have got it. Nodes that had the same before the edit can't show what it does.
    fn changed_by(&self, key: &Key, edit: &Edit, origin: Origin) -> BTreeMap<String, bool> {
        let nodes = self.nodes_of(key).into_iter();
        let changed = nodes.filter(|name| {
            !self.has_it(name, edit) || (origin != Origin::Edited && self.got_it(name, edit))
        });
        let with_kind = changed.map(|name| {
            let pair = self.pair(&name);
            let new = pair.and_then(|pair| edit.pairs.get(&pair).copied());
            (name, new)
        });
        let with_kind: Vec<_> = with_kind.collect();
        let count = |kind| {
            with_kind
                .iter()
                .filter(|(_, new)| *new == Some(kind))
                .count()
        };
        // It is unknown what was in force before on a node that has the edit: assume the more common kind.
        let usual = count(true) > count(false);
        let with_kind = with_kind.into_iter();
        with_kind
            .map(|(name, new)| (name, new.unwrap_or(usual)))
            .collect()
    }

    /// Whether a node got its content by this edit: it is up to date, and other nodes wait for the same content.
    fn got_it(&self, name: &str, edit: &Edit) -> bool {
        let desired = self.pair(name).map(|(_, desired)| desired);
        let is_changed = edit.pairs.keys().any(|(_, to)| Some(*to) == desired);
        is_changed && self.is_up_to_date(name)
    }

    /// Whether a node's spec was written after the last edit of any of its policies.
    fn is_up_to_date(&self, name: &str) -> bool {
        let (node, watermark) = (self.nodes.get(name), self.watermarks.get(name));
        node.zip(watermark)
            .is_some_and(|(node, watermark)| watermark.was_written_from(&node.class.sources))
    }

    /// The longest threshold x period of an object's enforced rules; for a `PodQOS` of all rules of its nodes.
    fn slowest(&self, key: &Key, nodes: &BTreeMap<String, bool>) -> Duration {
        let prefix = format!("{}/", key.1);
        let contents = nodes
            .keys()
            .filter_map(|node| self.nodes.get(node))
            .map(|node| (Arc::as_ptr(&node.class.content), &node.class.content));
        let contents: BTreeMap<_, _> = contents.collect();
        let rules = contents
            .into_values()
            .flat_map(|content| &content.policy.rules);
        rules
            .filter(|rule| rule.strategy == Strategy::Enforce)
            .filter(|rule| key.0 == Kind::PodQos || rule.id.0.starts_with(&prefix))
            .map(|rule| rule.period.saturating_mul(rule.avoidance_threshold))
            .max()
            .unwrap_or_default()
    }

    pub(super) fn advance_rollouts(&mut self, now: BootTime) {
        let mut rollouts = std::mem::take(&mut self.rollouts);
        for (key, rollout) in &mut rollouts {
            let before = (rollout.phase(), rollout.remaining());
            let rate = self.settings.rollout_nodes_per_second;
            let released = rollout.advance(now, rate, |node| self.observe(node, key));
            let reached = !released.is_empty();
            self.dirty.extend(released);
            self.cap_dirty |= reached;
            let phase = rollout.phase();
            if std::mem::discriminant(&before.0) != std::mem::discriminant(&phase) {
                self.publish_rollout(key, rollout);
                if phase == Phase::Done {
                    self.dirty.extend(self.nodes.keys().cloned());
                }
            }
            self.statuses_dirty |= reached || before != (phase, rollout.remaining());
        }
        rollouts.retain(|_, rollout| rollout.phase() != Phase::Done);
        self.rollouts = rollouts;
    }

    fn publish_rollout(&mut self, key: &Key, rollout: &Rollout) {
        let (warning, reason) = match rollout.phase() {
            Phase::Canaries { stuck: 1.., .. } => (true, "RolloutWaits"),
            Phase::Canaries { .. } => (false, "RolloutStarted"),
            Phase::Stopped { .. } => (true, "RolloutStopped"),
            Phase::Done => (false, "RolledOut"),
            _ => return,
        };
        self.events.push(PendingEvent {
            about: Subject::Policy {
                kind: key.0,
                name: key.1.clone(),
                uid: self.catalog.uid(key).to_owned(),
            },
            warning,
            reason,
            message: statuses::rollout_message(rollout),
        });
    }

    /// The number of roll-outs by phase.
    pub fn rollout_counts(&self) -> [(&'static str, usize); 3] {
        let mut counts = [("canaries", 0), ("progressing", 0), ("stopped", 0)];
        for rollout in self.rollouts.values() {
            match rollout.phase() {
                Phase::Canaries { .. } | Phase::Watching { .. } => counts[0].1 += 1,
                Phase::Progressing { .. } => counts[1].1 += 1,
                Phase::Stopped { .. } => counts[2].1 += 1,
                Phase::Done => {}
            }
        }
        counts
    }
}
