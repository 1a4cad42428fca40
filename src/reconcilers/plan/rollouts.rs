//! All rollouts: starts them for edits, advances them, and decides what each node may have.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use super::liveness::LivenessMonitor;
use super::progress;
use super::queue::WriteQueue;
use super::rollout::{NodeObservation, Rollout, RolloutPhase};
use super::targets::TargetCache;
use super::tightening::{allows_more, is_tighter, source, source_of_pods, withhold};
use crate::crd::Kind;
use crate::engine::policy::{PolicySet, Strategy};
use crate::engine::time::BootTime;
use crate::reconcilers::compile::catalog::{Affected, Catalog, Key};
use crate::reconcilers::compile::content::CompiledPolicy;
use crate::reconcilers::compile::index::Index;
use crate::reconcilers::events::{EventSubject, PendingEvent};

/// The current and the desired content of a node, by address: most nodes share both.
type Pair = (*const CompiledPolicy, *const CompiledPolicy);

/// A tightening edit of one object.
#[derive(Default)]
struct Edit {
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
        let pods = current.pods.iter();
        let pods: Vec<_> = pods.filter(|it| source_of_pods(it) == *key).collect();
        let in_force = match key.0 {
            Kind::PodQos => !pods.is_empty(),
            _ => rules.iter().any(|rule| rule.strategy == Strategy::Enforce),
        };
        self.pairs.insert(pair, !in_force);
        for rule in rules {
            let known = self.before.rules.iter_mut().find(|it| it.id == rule.id);
            match known {
                None => self.before.rules.push(rule.clone()),
                Some(known) if is_tighter(known, Some(rule)) => known.clone_from(rule),
                Some(_) => {}
            }
        }
        for pod in pods {
            let known = self.before.pods.iter_mut().find(|it| it.name == pod.name);
            match known {
                None => self.before.pods.push(pod.clone()),
                Some(known) if allows_more(known, Some(pod)) => known.clone_from(pod),
                Some(_) => {}
            }
        }
    }
}

/// Why a rollout starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// The object was edited now: no node has this edit yet.
    Edited,
    /// It started earlier, and nodes may have it already.
    Resumed,
    /// As [`Origin::Resumed`], but an earlier leader stopped it.
    Stopped,
}

/// What rollouts depend on.
#[derive(Clone, Copy)]
pub struct RolloutInput<'a> {
    pub index: &'a Index,
    pub liveness: &'a LivenessMonitor,
    pub queue: &'a WriteQueue,
}

/// What an advance has changed.
#[derive(Default)]
pub struct Advance {
    /// Nodes got an edit released.
    pub released: bool,
    /// A phase or remaining time changed.
    pub progressed: bool,
    /// Events about new phases.
    pub events: Vec<PendingEvent>,
}

/// All rollouts in progress.
pub struct Rollouts {
    by_object: BTreeMap<Key, Rollout>,
    targets: TargetCache,
    /// Time between two evaluations of the agents.
    evaluation_period: Duration,
}

impl Rollouts {
    /// No rollouts, of agents that evaluate their rules at this period.
    pub fn new(evaluation_period: Duration) -> Self {
        Self {
            evaluation_period,
            by_object: BTreeMap::new(),
            targets: TargetCache::default(),
        }
    }

    pub fn get(&self, key: &Key) -> Option<&Rollout> {
        self.by_object.get(key)
    }

    /// Whether a node may have the edits of an object.
    pub fn is_released(&self, key: &Key, node: &str) -> bool {
        let rollout = self.by_object.get(key);
        rollout.is_none_or(|rollout| rollout.releases(node))
    }

    /// The content that a node should have now: the desired one without edits that are not released to it.
    pub fn target(&mut self, name: &str, index: &mut Index) -> Option<Arc<CompiledPolicy>> {
        let Index {
            catalog,
            nodes,
            watermarks,
        } = index;
        let (node, watermark) = (nodes.get(name)?, watermarks.get(name));
        let rollouts = &self.by_object;
        Some(self.targets.of(name, node, watermark, rollouts, catalog))
    }

    /// Ends a pass over the nodes: the contents that targets are cached by may change now.
    pub fn clear_targets(&mut self) {
        self.targets.clear();
    }

    /// Ends the rollout of an object whose edits now go to all nodes at once. Returns whether there was one.
    pub fn cancel(&mut self, key: &Key) -> bool {
        self.by_object.remove(key).is_some()
    }

    /// An object was edited: its earlier rollout ends.
    pub fn remove_edited(&mut self, key: &Key, affected: &Affected) {
        self.by_object
            .retain(|rolling, _| rolling != key && !affected.edits(rolling));
    }

    /// Starts a rollout for each object that is now tighter than what these nodes have.
    pub fn start(&mut self, nodes: &[String], view: RolloutInput<'_>) -> Vec<PendingEvent> {
        let mut events = Vec::new();
        for (key, edit) in view.edits(nodes) {
            events.extend(self.start_one(key, &edit, Origin::Edited, view));
        }
        events
    }

    /// Resumes the rollouts of this replica's last term, and takes over those of other leaders. What the last leader stopped stays
    /// stopped until the object is edited.
    pub fn resume(&mut self, view: RolloutInput<'_>) {
        let names: Vec<String> = view.index.nodes.keys().cloned().collect();
        let edits = view.edits(&names);
        self.by_object.retain(|key, _| edits.contains_key(key));
        for (key, rollout) in &mut self.by_object {
            rollout.resume();
            let stopped = matches!(rollout.phase(), RolloutPhase::Stopped { .. });
            if !stopped && view.is_stopped(key) {
                rollout.stop(|node| view.has_it(node, &edits[key]));
            }
        }
        for (key, edit) in edits {
            let origin = if view.is_stopped(&key) {
                Origin::Stopped
            } else {
                Origin::Resumed
            };
            self.start_one(key, &edit, origin, view);
        }
    }

    /// A rollout in progress continues: only an edit of the object itself restarts it.
    fn start_one(
        &mut self,
        key: Key,
        edit: &Edit,
        origin: Origin,
        view: RolloutInput<'_>,
    ) -> Option<PendingEvent> {
        let catalog = &view.index.catalog;
        if self.by_object.contains_key(&key) || catalog.is_immediate(&key) {
            return None;
        }
        let nodes = view.changed_by(&key, edit, origin);
        let slowest = view.slowest(&key, &nodes, self.evaluation_period);
        let has_it = |node: &str| view.has_it(node, edit);
        let mut rollout = Rollout::new(nodes, slowest, edit.before.clone());
        if rollout.phase() == RolloutPhase::Done {
            return None;
        }
        if origin == Origin::Stopped {
            rollout.stop(has_it);
        } else {
            rollout.start(has_it, |node| view.observe(node, &key));
        }
        let is_edit = origin == Origin::Edited;
        let started = is_edit.then(|| event(&key, &rollout, catalog));
        self.by_object.insert(key, rollout);
        started.flatten()
    }

    /// A node was deleted or changed: rollouts that no longer affect it continue without it, since a canary that lost the edit proves
    /// nothing. A rollout without nodes left to be canaries starts again; all nodes are then added to the queue.
    pub fn remove_node(
        &mut self,
        name: &str,
        index: &Index,
        liveness: &LivenessMonitor,
        queue: &mut WriteQueue,
    ) {
        let node = index.nodes.get(name);
        let rollouts = self.by_object.iter_mut();
        let rollouts =
            rollouts.filter(|(key, _)| !node.is_some_and(|node| node.is_affected_by(key)));
        let stranded = rollouts.filter_map(|(key, rollout)| {
            let is_stranded = rollout.remove_node(name);
            is_stranded.then(|| key.clone())
        });
        let stranded: Vec<Key> = stranded.collect();
        for key in &stranded {
            self.by_object.remove(key);
            let view = RolloutInput {
                index,
                liveness,
                queue,
            };
            let edits = view.edits(&index.nodes_of(key));
            if let Some(edit) = edits.get(key) {
                self.start_one(key.clone(), edit, Origin::Resumed, view);
            }
            queue.extend(index.nodes.keys());
        }
    }

    /// Advances all rollouts; `rate` is in nodes per second. Adds the nodes that may have more to the queue.
    pub fn advance(
        &mut self,
        now: BootTime,
        rate: f64,
        index: &Index,
        liveness: &LivenessMonitor,
        queue: &mut WriteQueue,
    ) -> Advance {
        let mut advance = Advance::default();
        for (key, rollout) in &mut self.by_object {
            let before = (rollout.phase(), rollout.remaining());
            let view = RolloutInput {
                index,
                liveness,
                queue,
            };
            let released = rollout.advance(now, rate, |node| view.observe(node, key));
            queue.extend(&released);
            let phase = rollout.phase();
            if std::mem::discriminant(&before.0) != std::mem::discriminant(&phase) {
                advance.events.extend(event(key, rollout, &index.catalog));
                if phase == RolloutPhase::Done {
                    queue.extend(index.nodes.keys());
                }
            }
            advance.released |= !released.is_empty();
            advance.progressed |= before != (phase, rollout.remaining());
        }
        self.by_object
            .retain(|_, rollout| rollout.phase() != RolloutPhase::Done);
        advance
    }

    /// The number of rollouts by phase.
    pub fn counts(&self) -> [(&'static str, usize); 3] {
        let mut counts = [("canaries", 0), ("progressing", 0), ("stopped", 0)];
        for rollout in self.by_object.values() {
            match rollout.phase() {
                RolloutPhase::Canaries { .. } | RolloutPhase::Watching { .. } => counts[0].1 += 1,
                RolloutPhase::Progressing { .. } => counts[1].1 += 1,
                RolloutPhase::Stopped { .. } => counts[2].1 += 1,
                RolloutPhase::Done => {}
            }
        }
        counts
    }
}

impl RolloutInput<'_> {
    /// The tightening edits on these nodes, by object.
    fn edits(&self, nodes: &[String]) -> BTreeMap<Key, Edit> {
        let mut seen = HashSet::new();
        let mut edits: BTreeMap<Key, Edit> = BTreeMap::new();
        for name in nodes {
            let Some((current, desired)) = self.index.contents_of(name) else {
                continue;
            };
            let pair = (Arc::as_ptr(current), Arc::as_ptr(desired));
            if Arc::ptr_eq(current, desired) || !seen.insert(pair) {
                continue;
            }
            for key in withhold(&current.policy, &desired.policy, |_| false).withheld {
                let edit = edits.entry(key.clone()).or_default();
                edit.add(&key, pair, &current.policy);
            }
        }
        edits
    }

    /// Whether the last leader stopped the rollout of this object, and it was not edited since.
    fn is_stopped(&self, key: &Key) -> bool {
        let catalog = &self.index.catalog;
        progress::stopped_before(catalog.status(key), catalog.generation(key))
    }

    fn has_it(&self, name: &str, edit: &Edit) -> bool {
        let pair = self.pair(name);
        pair.is_some_and(|pair| !edit.pairs.contains_key(&pair))
    }

    /// `None` if the node's current content is unknown.
    fn pair(&self, name: &str) -> Option<Pair> {
        let (current, desired) = self.index.contents_of(name)?;
        Some((Arc::as_ptr(current), Arc::as_ptr(desired)))
    }

    /// What is known of a node during the rollout of an object.
    fn observe(&self, name: &str, key: &Key) -> NodeObservation {
        let Index {
            nodes, watermarks, ..
        } = self.index;
        let (Some(node), Some(watermark)) = (nodes.get(name), watermarks.get(name)) else {
            return NodeObservation::default();
        };
        NodeObservation {
            reporting: node.ready && watermark.has_agent() && !self.liveness.is_late(name),
            up_to_date: watermark.enforced && !self.queue.contains(name),
            acting: watermark.acts(key),
        }
    }

    /// The nodes whose content an edit changes (true: nothing of the object was in force there). A resumed edit includes the nodes that
    /// have got it. Nodes that had the same before the edit can't show what it does.
    fn changed_by(&self, key: &Key, edit: &Edit, origin: Origin) -> BTreeMap<String, bool> {
        let nodes = self.index.nodes_of(key).into_iter();
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
        let node = self.index.nodes.get(name);
        node.zip(self.index.watermarks.get(name))
            .is_some_and(|(node, watermark)| watermark.was_written_from(&node.class.sources))
    }

    /// The longest threshold x period of an object's enforced rules; for a `PodQOS` of all rules of its nodes.
    fn slowest(&self, key: &Key, nodes: &BTreeMap<String, bool>, period: Duration) -> Duration {
        let prefix = format!("{}/", key.1);
        let contents = nodes
            .keys()
            .filter_map(|node| self.index.nodes.get(node))
            .map(|node| (Arc::as_ptr(&node.class.content), &node.class.content));
        let contents: BTreeMap<_, _> = contents.collect();
        let rules = contents
            .into_values()
            .flat_map(|content| &content.policy.rules);
        rules
            .filter(|rule| rule.strategy == Strategy::Enforce)
            .filter(|rule| key.0 == Kind::PodQos || rule.id.0.starts_with(&prefix))
            .map(|rule| period.saturating_mul(rule.avoidance_threshold))
            .max()
            .unwrap_or_default()
    }
}

/// The event about a new phase; `None` if the phase has none.
fn event(key: &Key, rollout: &Rollout, catalog: &Catalog) -> Option<PendingEvent> {
    let (warning, reason) = match rollout.phase() {
        RolloutPhase::Canaries { stuck: 1.., .. } => (true, "RolloutWaits"),
        RolloutPhase::Canaries { .. } => (false, "RolloutStarted"),
        RolloutPhase::Stopped { .. } => (true, "RolloutStopped"),
        RolloutPhase::Done => (false, "RolledOut"),
        _ => return None,
    };
    Some(PendingEvent {
        about: EventSubject::Policy {
            kind: key.0,
            name: key.1.clone(),
            uid: catalog.uid(key).to_owned(),
        },
        warning,
        reason,
        message: progress::message(rollout),
    })
}
