//! Rolls edits out.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::catalog::Key;
use super::super::content::Content;
use super::super::restrain::{allows_more, is_tighter, restrain, source};
use super::super::rollout::{Phase, Rollout, Sight};
use super::notes::{Note, Subject};
use super::{Node, World, policies};
use crate::crd::Kind;
use crate::engine::policy::{PodPolicy, PolicySet, Strategy};
use crate::engine::time::BootTime;

/// What a node keeps and what it is to keep, each by its address: most nodes have both in common.
type Pair = (*const Content, *const Content);

/// What is tighter than what nodes keep, of one object.
#[derive(Default)]
pub(super) struct Edit {
    /// Where it is; true where nothing of the object is in force yet.
    pairs: HashMap<Pair, bool>,
    /// What the object amounts to where it is.
    before: PolicySet,
}

impl Edit {
    /// Where nodes keep different versions of the object, `before` becomes the loosest: a tighter one may be the canary's
    /// of an edit that was stopped.
    fn add(&mut self, key: &Key, pair: Pair, kept: &PolicySet) {
        let rules = kept.rules.iter().filter(|rule| source(rule) == *key);
        let rules: Vec<_> = rules.collect();
        let pod = |pod: &&PodPolicy| key.0 == Kind::PodQos && pod.name == key.1;
        let pod = kept.pods.iter().find(pod);
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

/// Why the roll-out of an edit begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The object was edited now: no node has this edit from before.
    Edited,
    /// It began before, and nodes may have it already.
    Resumed,
    /// As [`Origin::Resumed`], but the last leader stopped it.
    Stopped,
}

/// Whether what an object says may matter to a node.
fn concerns(key: &Key, node: &Node) -> bool {
    match key.0 {
        Kind::PodQos => !node.class.selected.is_empty(),
        _ => node.class.is_selected_by(&key.1),
    }
}

impl World {
    /// Each object that is now tighter than what these nodes keep goes to its canaries first.
    pub(super) fn begin_rollouts(&mut self, nodes: &[String]) {
        for (key, edit) in self.edits(nodes) {
            self.begin_rollout(key, &edit, Origin::Edited);
        }
    }

    /// Goes on with the edits that were on their way when this process led last, and begins with those that others
    /// left. What the last leader stopped stays so until the object is edited.
    pub(super) fn take_rollouts_up(&mut self) {
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
            self.begin_rollout(key, &edit, origin);
        }
    }

    /// What of each object is tighter than what these nodes keep.
    fn edits(&self, nodes: &[String]) -> BTreeMap<Key, Edit> {
        let mut seen = HashSet::new();
        let mut edits: BTreeMap<Key, Edit> = BTreeMap::new();
        for name in nodes {
            let Some((kept, wanted)) = self.kept_and_wanted(name) else {
                continue;
            };
            let pair = (Arc::as_ptr(kept), Arc::as_ptr(wanted));
            if !seen.insert(pair) {
                continue;
            }
            for key in restrain(&kept.policy, &wanted.policy, |_| false).held {
                let edit = edits.entry(key.clone()).or_default();
                edit.add(&key, pair, &kept.policy);
            }
        }
        edits
    }

    /// One that is on its way already goes on: only an edit of the object itself begins anew.
    fn begin_rollout(&mut self, key: Key, edit: &Edit, origin: Origin) {
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
            rollout.begin(has_it, |node| self.sight(node, &key));
        }
        if origin == Origin::Edited {
            self.note_rollout(&key, &rollout);
        }
        self.rollouts.insert(key, rollout);
    }

    /// A node is gone, or is another than it was: edits that concern it no longer go on without it, since a canary that
    /// has lost the edit proves nothing. They start again where no node is left to try them.
    pub(super) fn roll_out_without(&mut self, name: &str) {
        let node = self.nodes.get(name);
        let rollouts = self.rollouts.iter_mut();
        let rollouts = rollouts.filter(|(key, _)| !node.is_some_and(|node| concerns(key, node)));
        let stranded = rollouts.filter_map(|(key, rollout)| {
            let is_stranded = rollout.forget(name);
            is_stranded.then(|| key.clone())
        });
        for key in stranded.collect::<Vec<_>>() {
            self.rollouts.remove(&key);
            let nodes = self.nodes_of(&key);
            let edits = self.edits(&nodes);
            if let Some(edit) = edits.get(&key) {
                self.begin_rollout(key, edit, Origin::Resumed);
            }
            self.dirty.extend(self.nodes.keys().cloned());
            self.cap_dirty = true;
        }
    }

    /// Whether the last leader stopped the roll-out of this object, which was not edited since.
    fn is_stopped(&self, key: &Key) -> bool {
        policies::stopped_before(self.catalog.status(key), self.catalog.generation(key))
    }

    fn has_it(&self, name: &str, edit: &Edit) -> bool {
        let pair = self.pair(name);
        pair.is_some_and(|pair| !edit.pairs.contains_key(&pair))
    }

    /// `None` where it is not known what the node keeps.
    fn pair(&self, name: &str) -> Option<Pair> {
        let node = self.nodes.get(name)?;
        let kept = self.live.get(name)?.content_for(&node.uid)?;
        Some((Arc::as_ptr(kept), Arc::as_ptr(&node.class.content)))
    }

    /// What is seen of a node while an object is rolled out.
    fn sight(&self, name: &str, key: &Key) -> Sight {
        let (Some(node), Some(live)) = (self.nodes.get(name), self.live.get(name)) else {
            return Sight::default();
        };
        Sight {
            speaks: node.ready && live.speaks() && !self.silence.is_quiet(name),
            keeps: live.keeps && !self.dirty.contains(name),
            acts: live.acts(key),
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
    fn nodes_of(&self, key: &Key) -> Vec<String> {
        let nodes = self.nodes.iter().filter(|(_, node)| concerns(key, node));
        let names = nodes.map(|(name, _)| name);
        names
            .filter(|name| self.live.contains_key(*name))
            .cloned()
            .collect()
    }

    /// The nodes whose content an edit changes; of one that began before, those included that have it since. True where
    /// nothing of the object was in force. Nodes that had as much of it before the edit can't show what it does.
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
        // What held before on a node that has the edit is not known: a kind of such nodes alone could stay without a canary.
        let usual = count(true) > count(false);
        let with_kind = with_kind.into_iter();
        with_kind
            .map(|(name, new)| (name, new.unwrap_or(usual)))
            .collect()
    }

    /// Whether a node that has an edit got it by this edit: it is up to date, and other nodes that are to get the same
    /// content wait for it.
    fn got_it(&self, name: &str, edit: &Edit) -> bool {
        let wanted = self.pair(name).map(|(_, wanted)| wanted);
        let is_changed = edit.pairs.keys().any(|(_, to)| Some(*to) == wanted);
        is_changed && self.is_up_to_date(name)
    }

    /// Whether what a node keeps was written since the last edit of any of its policies.
    fn is_up_to_date(&self, name: &str) -> bool {
        let (node, live) = (self.nodes.get(name), self.live.get(name));
        node.zip(live)
            .is_some_and(|(node, live)| live.was_written_from(&node.class.sources))
    }

    /// The longest threshold x period of an object's rules that act; of a `PodQOS` those of all its nodes.
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
            let before = (rollout.phase(), rollout.left());
            let rate = self.settings.rollout_nodes_per_second;
            let released = rollout.advance(now, rate, |node| self.sight(node, key));
            let reached = !released.is_empty();
            self.dirty.extend(released);
            self.cap_dirty |= reached;
            let phase = rollout.phase();
            if std::mem::discriminant(&before.0) != std::mem::discriminant(&phase) {
                self.note_rollout(key, rollout);
                if phase == Phase::Done {
                    self.dirty.extend(self.nodes.keys().cloned());
                }
            }
            self.statuses_dirty |= reached || before != (phase, rollout.left());
        }
        rollouts.retain(|_, rollout| rollout.phase() != Phase::Done);
        self.rollouts = rollouts;
    }

    fn note_rollout(&mut self, key: &Key, rollout: &Rollout) {
        let (warning, reason) = match rollout.phase() {
            Phase::Canaries { stuck: 1.., .. } => (true, "RolloutWaits"),
            Phase::Canaries { .. } => (false, "RolloutStarted"),
            Phase::Stopped { .. } => (true, "RolloutStopped"),
            Phase::Done => (false, "RolledOut"),
            _ => return,
        };
        self.notes.push(Note {
            about: Subject::Policy {
                kind: key.0,
                name: key.1.clone(),
                uid: self.catalog.uid(key).to_owned(),
            },
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
                Phase::Canaries { .. } | Phase::Watching { .. } => counts[0].1 += 1,
                Phase::Others { .. } => counts[1].1 += 1,
                Phase::Stopped { .. } => counts[2].1 += 1,
                Phase::Done => {}
            }
        }
        counts
    }
}
