//! What the controller knows of the cluster, and what it makes of it. Pure: objects and the time in, writes out.

mod live;
mod policies;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use super::cap::{self, Closing};
use super::catalog::{Affected, Catalog, Class, Key};
use super::content::Content;
use super::restrain::restrain;
use super::rollout::{Phase, Rollout};
use crate::crd::node_watermark::{Hash, NodeWatermarkSpec};
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::engine::time::BootTime;

pub use live::Live;
pub use policies::StatusWrite;

/// A failed write is tried again after this, doubled at each failure...
const RETRY: Duration = Duration::from_secs(1);
/// ...up to this.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// What an administrator chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Nodes a second that an edit reaches once its canaries did well.
    pub rollout_nodes_per_second: f64,
    /// Percent of the matched nodes that may be closed at once.
    pub max_unschedulable_percent: u8,
}

/// Something to tell people of, once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Note {
    /// Which object it is about: kind (`Node` or a policy kind) and name.
    pub about: (&'static str, String),
    /// Something is wrong.
    pub warning: bool,
    /// One word for it.
    pub reason: &'static str,
    /// What happened.
    pub message: String,
}

/// Something to write.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// Apply the `NodeWatermark` of a node.
    Apply {
        /// Its node.
        node: String,
        /// What to apply.
        spec: Box<NodeWatermarkSpec>,
    },
    /// Delete the `NodeWatermark` of a node that is gone.
    Delete {
        /// The node.
        node: String,
        /// The object's UID: another of that name is left alone.
        uid: String,
    },
}

/// One node.
struct Node {
    uid: String,
    facts: NodeFacts,
    class: Arc<Class>,
}

/// A write that is under way, or failed and waits.
#[derive(Clone, Copy, Debug, Default)]
struct Attempt {
    running: bool,
    failures: u32,
    not_before: Option<BootTime>,
}

impl Attempt {
    fn is_due(&self, now: BootTime) -> bool {
        !self.running && self.not_before.is_none_or(|at| now >= at)
    }
}

/// What the controller knows of the cluster.
pub struct World {
    settings: Settings,
    catalog: Catalog,
    nodes: BTreeMap<String, Node>,
    live: BTreeMap<String, Live>,
    softened: BTreeSet<String>,
    rollouts: BTreeMap<Key, Rollout>,
    /// Nodes whose `NodeWatermark` may have to be written.
    dirty: BTreeSet<String>,
    attempts: BTreeMap<String, Attempt>,
    notes: Vec<Note>,
    statuses_dirty: bool,
    /// The cap has to be looked at.
    cap_dirty: bool,
    statuses_at: Option<BootTime>,
    leading: bool,
    empty: Arc<Content>,
}

impl World {
    /// Knows nothing yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            catalog: Catalog::default(),
            nodes: BTreeMap::new(),
            live: BTreeMap::new(),
            softened: BTreeSet::new(),
            rollouts: BTreeMap::new(),
            dirty: BTreeSet::new(),
            attempts: BTreeMap::new(),
            notes: Vec::new(),
            statuses_dirty: true,
            cap_dirty: true,
            statuses_at: None,
            leading: false,
            empty: Content::new(PolicySet::default()),
        }
    }

    /// A node as it is now.
    pub fn apply_node(&mut self, name: &str, uid: &str, facts: NodeFacts) {
        let known = self.nodes.get(name);
        if known.is_some_and(|node| node.uid == uid && node.facts == facts) {
            return;
        }
        let class = self.catalog.class(&facts);
        let node = Node {
            uid: uid.to_owned(),
            facts,
            class,
        };
        self.nodes.insert(name.to_owned(), node);
        self.touch(name);
    }

    /// A node is gone.
    pub fn delete_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.touch(name);
    }

    /// Names of all nodes.
    pub fn node_names(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Names of all nodes that have a `NodeWatermark`.
    pub fn live_names(&self) -> impl Iterator<Item = &str> {
        self.live.keys().map(String::as_str)
    }

    fn touch(&mut self, node: &str) {
        self.dirty.insert(node.to_owned());
        self.statuses_dirty = true;
        self.cap_dirty = true;
    }

    /// A policy object as it is now.
    pub fn apply_policy(&mut self, kind: crate::crd::Kind, name: &str, object: &serde_json::Value) {
        let affected = self.catalog.apply(kind, name, object);
        let key = (kind, name.to_owned());
        if self.catalog.is_immediate(&key) && self.rollouts.remove(&key).is_some() {
            self.dirty.extend(self.nodes.keys().cloned());
        }
        self.recompile(&key, &affected);
    }

    /// A policy object is gone.
    pub fn delete_policy(&mut self, kind: crate::crd::Kind, name: &str) {
        let affected = self.catalog.delete(kind, name);
        self.recompile(&(kind, name.to_owned()), &affected);
    }

    /// Compiles anew what an edit concerns, and begins to roll it out.
    fn recompile(&mut self, key: &Key, affected: &Affected) {
        self.statuses_dirty = true;
        self.cap_dirty = true;
        if *affected == Affected::None {
            return;
        }
        self.rollouts
            .retain(|rolling, _| rolling != key && !affected.edits(rolling));
        let mut touched = Vec::new();
        for (name, node) in &mut self.nodes {
            let selected_now = self.catalog.selects_any(affected, &node.facts);
            if !affected.concerns(&node.class.selected) && !selected_now {
                continue;
            }
            let class = self.catalog.class(&node.facts);
            node.class = class;
            touched.push(name.clone());
        }
        if self.leading {
            self.begin_rollouts(&touched, true);
        }
        self.dirty.extend(touched);
    }

    /// Each object that is tighter than what nodes keep goes to its canaries first. With `acting_is_old` those that act for
    /// it already don't count as acting because of the edit; who has just begun to lead can't tell, and holds.
    fn begin_rollouts(&mut self, nodes: &[String], acting_is_old: bool) {
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
            crate::crd::Kind::PodQos => !node.class.selected.is_empty(),
            _ => node.class.selected.iter().any(|name| **name == *key.1),
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
            .filter(|rule| key.0 == crate::crd::Kind::PodQos || rule.id.0.starts_with(&prefix))
            .map(|rule| rule.period.saturating_mul(rule.avoidance_threshold))
            .max()
            .unwrap_or_default()
    }

    fn acts(&self, node: &str, key: &Key) -> bool {
        self.live.get(node).is_some_and(|live| live.acts(key))
    }

    /// A `NodeWatermark` as it is now.
    pub fn apply_live(&mut self, name: &str, live: Live) {
        let before = self.live.get(name);
        if before.is_some_and(|before| before.is_newer_than(&live)) {
            return;
        }
        let by_hand = before.is_some_and(|before| before.was_ours_before(&live));
        self.statuses_dirty |= before.is_none_or(|before| before.status != live.status);
        if before.is_none_or(|before| before.hash != live.hash || before.uid != live.uid) {
            self.dirty.insert(name.to_owned());
        }
        self.cap_dirty |= self.statuses_dirty;
        let live = live.sharing(self.nodes.get(name).map(|node| &node.class.content));
        self.live.insert(name.to_owned(), live);
        if by_hand && self.leading {
            let message = "its NodeWatermark was edited by somebody else and is made anew; edit NodeQOS, PodQOS and \
                           AvoidanceAction instead";
            self.note_node(name, true, "WatermarkEdited", message.to_owned());
        }
    }

    /// A `NodeWatermark` is gone.
    pub fn delete_live(&mut self, name: &str) {
        let known = self.live.remove(name).is_some();
        if known && self.leading && self.nodes.contains_key(name) {
            self.note_node(
                name,
                true,
                "WatermarkDeleted",
                "its NodeWatermark was deleted and is made anew".to_owned(),
            );
        }
        self.touch(name);
    }

    fn note_node(&mut self, node: &str, warning: bool, reason: &'static str, message: String) {
        self.notes.push(Note {
            about: ("Node", node.to_owned()),
            warning,
            reason,
            message,
        });
    }

    /// Begins to lead: whatever is not as it should be is put right, tightenings by way of their canaries.
    pub fn lead(&mut self) {
        self.leading = true;
        self.rollouts.clear();
        self.attempts.clear();
        let soft = self.live.iter().filter(|(_, live)| live.softened);
        self.softened = soft.map(|(name, _)| name.clone()).collect();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        self.begin_rollouts(&names, false);
        self.dirty.extend(names);
        self.dirty.extend(self.live.keys().cloned());
        self.statuses_dirty = true;
        self.cap_dirty = true;
    }

    /// Stops leading.
    pub fn follow(&mut self) {
        self.leading = false;
        self.notes.clear();
    }

    /// What has to be written now, at most `room` writes. Each is under way until [`Self::written`] is told.
    pub fn plan(&mut self, now: BootTime, room: usize) -> Vec<Write> {
        if !self.leading {
            return Vec::new();
        }
        self.advance_rollouts(now);
        if std::mem::take(&mut self.cap_dirty) {
            self.advance_cap();
        }
        let mut writes = Vec::new();
        let mut next = self.dirty.first().cloned();
        while let Some(name) = next {
            if writes.len() >= room {
                break;
            }
            let later = (Bound::Excluded(name.as_str()), Bound::Unbounded);
            next = self.dirty.range::<str, _>(later).next().cloned();
            if !self
                .attempts
                .get(&name)
                .is_none_or(|attempt| attempt.is_due(now))
            {
                continue;
            }
            match self.write_for(&name) {
                Some(write) => {
                    self.attempts.entry(name).or_default().running = true;
                    writes.push(write);
                }
                None => drop(self.dirty.remove(&name)),
            }
        }
        writes
    }

    fn write_for(&self, name: &str) -> Option<Write> {
        let live = self.live.get(name);
        let Some(node) = self.nodes.get(name) else {
            return live.map(|live| Write::Delete {
                node: name.to_owned(),
                uid: live.uid.clone(),
            });
        };
        let soften = self.softened.contains(name);
        let wanted = self.target(name, node);
        if live.is_some_and(|live| live.hash == Some(wanted.hash(&node.uid, soften))) {
            return None;
        }
        let sources = node.class.sources.clone();
        let spec = NodeWatermarkSpec::new(&node.uid, &wanted.policy, soften, sources);
        Some(Write::Apply {
            node: name.to_owned(),
            spec: Box::new(spec),
        })
    }

    /// What a node is to keep, as far as edits are released to it.
    fn target(&self, name: &str, node: &Node) -> Arc<Content> {
        if self.rollouts.is_empty() {
            return Arc::clone(&node.class.content);
        }
        let kept = self.live.get(name);
        let kept = kept.and_then(|live| live.content_for(&node.uid));
        let kept = kept.unwrap_or(&self.empty);
        let released = |key: &Key| {
            let rollout = self.rollouts.get(key);
            rollout.is_none_or(|rollout| rollout.releases(name))
        };
        let restrained = restrain(&kept.policy, &node.class.content.policy, released);
        if restrained.held.is_empty() {
            return Arc::clone(&node.class.content);
        }
        if restrained.policy == kept.policy {
            return Arc::clone(kept);
        }
        Content::new(restrained.policy)
    }

    /// A write came to its end. `live` is the object as the API server has it now.
    pub fn written(&mut self, node: &str, now: BootTime, outcome: Result<Option<Live>, ()>) {
        self.dirty.insert(node.to_owned());
        if let Ok(live) = outcome {
            self.attempts.remove(node);
            match live {
                Some(live) => self.apply_live(node, live),
                None => drop(self.live.remove(node)),
            }
            return;
        }
        let attempt = self.attempts.entry(node.to_owned()).or_default();
        let wait = RETRY.saturating_mul(1 << attempt.failures.min(10));
        *attempt = Attempt {
            running: false,
            failures: attempt.failures.saturating_add(1),
            not_before: Some(now + wait.min(LONGEST_RETRY)),
        };
    }

    fn advance_rollouts(&mut self, now: BootTime) {
        let mut rollouts = std::mem::take(&mut self.rollouts);
        for (key, rollout) in &mut rollouts {
            let before = rollout.phase();
            let rate = self.settings.rollout_nodes_per_second;
            let has_it = |name: &str| self.keeps_all(name);
            let released = rollout.advance(now, rate, has_it, |node| self.acts(node, key));
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
            about: (key.0.name(), key.1.clone()),
            warning,
            reason,
            message: policies::rollout_message(rollout),
        });
    }

    /// Keeps the number of closed nodes under the cap.
    fn advance_cap(&mut self) {
        let closes = |node: &&Node| node.class.content.policy.rules.iter().any(live::closes);
        let matched = self.nodes.values().filter(closes).count();
        let closing = |(name, node): (&String, &Node)| {
            let live = self.live.get(name)?;
            Some(Closing {
                node: name.clone(),
                closed: live.status.closed && !self.softened.contains(name),
                over: live.over(&node.class.content.policy)?,
            })
        };
        let closing: Vec<Closing> = self.nodes.iter().filter_map(closing).collect();
        let most = cap::most(matched, self.settings.max_unschedulable_percent);
        let wanted = closing.len();
        let softened = cap::soften(closing, most);
        let changed: Vec<String> = softened
            .symmetric_difference(&self.softened)
            .cloned()
            .collect();
        for node in &changed {
            if softened.contains(node) {
                let message = format!(
                    "{wanted} of {matched} nodes are over their marks and at most {most} are closed at once \
                     (--max-unschedulable): this one gets PreferNoSchedule only"
                );
                self.note_node(node, true, "SchedulingSoftened", message);
            }
        }
        self.dirty.extend(changed);
        self.softened = softened;
    }

    /// What happened since the last call.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    /// How many nodes there are, how many wait to be written, and how many are softened.
    pub fn counts(&self) -> [usize; 3] {
        [self.nodes.len(), self.dirty.len(), self.softened.len()]
    }

    /// The hash that each node is to keep once every edit is released; for tests of the laws.
    pub fn wanted_hashes(&self) -> BTreeMap<&str, Hash> {
        let nodes = self.nodes.iter();
        nodes
            .map(|(name, node)| {
                let soften = self.softened.contains(name);
                let hash = node.class.content.hash(&node.uid, soften);
                (name.as_str(), hash)
            })
            .collect()
    }
}
