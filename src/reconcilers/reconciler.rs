//! What the controller knows of the cluster, and what it makes of it. Pure: objects and the time in, writes out.

mod closing;
mod contest;
mod edits;
mod evictions;
mod glance;
mod live;
mod notes;
mod policies;
mod silent;
mod targets;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::cap::Cap;
use super::catalog::{Affected, Catalog, Class, Key, takes};
use super::content::Wanted;
use super::rollout::Rollout;
use super::silence::Silence;
use super::wire::{NodeSeen, Watermark};
use crate::cluster::backoff::jittered;
use crate::crd::Kind;
use crate::engine::policy::NodeFacts;
use crate::engine::time::BootTime;
use contest::Contests;
use glance::{Asked, Glance};
use live::Live;
use targets::Targets;

pub use notes::{Note, Subject};
pub use policies::StatusWrite;

/// What an administrator chooses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Nodes a second that an edit reaches once its canaries did well.
    pub rollout_nodes_per_second: f64,
    /// How many of the nodes that any rule may close, those of all policies together, may be closed at once.
    pub max_unschedulable: Cap,
    /// The taint of an agent that was not heard for so long is taken away.
    pub silent_agent_after: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            rollout_nodes_per_second: 100.0,
            max_unschedulable: Cap::Percent(30),
            silent_agent_after: Duration::from_mins(10),
        }
    }
}

/// Something to write.
#[derive(Clone, Debug)]
pub enum Write {
    /// Apply the `NodeWatermark` of a node.
    Apply {
        /// Its node.
        node: String,
        /// What to apply.
        spec: Wanted,
    },
    /// Delete the `NodeWatermark` of a node that is gone.
    Delete {
        /// The node.
        node: String,
        /// The object's UID: another of that name is left alone.
        uid: String,
    },
    /// Read the Lease of an agent that seems to be silent.
    Ask {
        /// The node.
        node: String,
    },
    /// Take our taint away from a node whose agent is silent.
    Open {
        /// The node.
        node: String,
        /// Its UID: another of that name is left alone.
        uid: String,
    },
}

/// One node.
struct Node {
    uid: String,
    facts: NodeFacts,
    glance: Glance,
    class: Arc<Class>,
    zone: Arc<str>,
    ready: bool,
    tainted: bool,
    interferes: bool,
}

/// What the controller knows of the cluster.
pub struct World {
    settings: Settings,
    catalog: Catalog,
    nodes: BTreeMap<String, Node>,
    live: BTreeMap<String, Live>,
    softened: BTreeSet<String>,
    /// Nodes whose taint was taken away because their agent is silent.
    silent: BTreeSet<String>,
    silence: Silence,
    /// Nodes that a `NodeQOS` selects and that have no agent.
    unkept: usize,
    /// How old heartbeats were when the next was seen.
    ages: Vec<Duration>,
    /// Whose agents fell silent (true), or are heard again.
    silences: Vec<(String, bool)>,
    rollouts: BTreeMap<Key, Rollout>,
    targets: Targets,
    /// Nodes whose `NodeWatermark` may have to be written.
    dirty: BTreeSet<String>,
    attempts: BTreeMap<String, Attempt>,
    contests: Contests,
    notes: Vec<Note>,
    statuses_dirty: bool,
    statuses_at: Option<BootTime>,
    /// When the status of each object was written last.
    counted_at: BTreeMap<Key, BootTime>,
    /// The cap has to be looked at.
    cap_dirty: bool,
    leading: bool,
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
            silent: BTreeSet::new(),
            silence: Silence::new(settings.silent_agent_after),
            unkept: 0,
            ages: Vec::new(),
            silences: Vec::new(),
            rollouts: BTreeMap::new(),
            targets: Targets::default(),
            dirty: BTreeSet::new(),
            attempts: BTreeMap::new(),
            contests: Contests::default(),
            notes: Vec::new(),
            statuses_dirty: true,
            statuses_at: None,
            counted_at: BTreeMap::new(),
            cap_dirty: true,
            leading: false,
        }
    }

    /// A node as it is now.
    pub fn apply_node(&mut self, name: &str, seen: NodeSeen) {
        let NodeSeen {
            uid,
            facts,
            ready,
            tainted,
            interferes,
        } = seen;
        if let Some(node) = self.nodes.get_mut(name)
            && node.uid == uid
            && node.facts == facts
        {
            if (node.ready, node.tainted, node.interferes) != (ready, tainted, interferes) {
                self.cap_dirty |= node.tainted != tainted;
                (node.ready, node.tainted, node.interferes) = (ready, tainted, interferes);
                self.watch_over(name);
            }
            return;
        }
        let class = self.catalog.class(&facts);
        let node = Node {
            uid,
            zone: silent::zone(&facts.labels),
            glance: Glance::of(&facts.labels),
            facts,
            class,
            ready,
            tainted,
            interferes,
        };
        self.nodes.insert(name.to_owned(), node);
        self.roll_out_without(name);
        self.watch_over(name);
        self.touch(name);
    }

    /// A node is gone.
    pub fn delete_node(&mut self, name: &str) {
        self.nodes.remove(name);
        self.silent.remove(name);
        self.roll_out_without(name);
        self.watch_over(name);
        self.touch(name);
    }

    fn touch(&mut self, node: &str) {
        self.dirty.insert(node.to_owned());
        self.statuses_dirty = true;
        self.cap_dirty = true;
    }

    /// A policy object as it is now.
    pub fn apply_policy(&mut self, kind: Kind, name: &str, object: &serde_json::Value) {
        let affected = self.catalog.apply(kind, name, object);
        let key = (kind, name.to_owned());
        if self.catalog.is_immediate(&key) && self.rollouts.remove(&key).is_some() {
            self.dirty.extend(self.nodes.keys().cloned());
        }
        self.recompile(&key, &affected);
    }

    /// A policy object is gone.
    pub fn delete_policy(&mut self, kind: Kind, name: &str) {
        let affected = self.catalog.delete(kind, name);
        let key = (kind, name.to_owned());
        self.counted_at.remove(&key);
        self.recompile(&key, &affected);
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
        let selectors = self.catalog.selectors_of(affected);
        let selectors = selectors.iter().map(|it| (Asked::by(it.as_ref()), it));
        let selectors: Vec<_> = selectors.collect();
        let mut touched = Vec::new();
        for (name, node) in &mut self.nodes {
            let selected_now = selectors.iter().any(|(asked, selector)| {
                asked.may_take(node.glance) && takes(selector.as_ref(), &node.facts)
            });
            if !selected_now && !affected.concerns(&node.class.selected) {
                continue;
            }
            node.class = self.catalog.class(&node.facts);
            touched.push(name.clone());
        }
        if self.leading {
            self.begin_rollouts(&touched);
        }
        self.dirty.extend(touched);
    }

    /// A `NodeWatermark` as a watch or the answer to a write shows it; one that is older than what is known is passed over.
    pub fn apply_live(&mut self, name: &str, seen: &Watermark) {
        let before = self.live.get(name);
        if !before.is_some_and(|before| before.is_newer_than(seen)) {
            self.list_live(name, seen);
        }
    }

    /// A `NodeWatermark` as a full list has it. Generations begin anew where an API server is put back from a backup.
    pub fn list_live(&mut self, name: &str, seen: &Watermark) {
        let before = self.live.get(name);
        let live = Live::of(seen, self.catalog.contents(), before);
        let said_more = before.is_none_or(|before| !before.said_the_same(&live));
        let by_hand = before.is_some_and(|before| before.was_ours_before(&live));
        if before.is_none_or(|before| before.hash != live.hash || before.uid != live.uid) {
            self.dirty.insert(name.to_owned());
        }
        self.live.insert(name.to_owned(), live);
        if said_more {
            self.statuses_dirty = true;
            self.cap_dirty = true;
            self.watch_over(name);
        }
        // Without a status it is what this controller itself made.
        if said_more && seen.has_status() {
            self.heard(name);
        }
        if by_hand && self.leading {
            self.edited_by(name, seen.edited_by.as_deref());
        }
    }

    /// A `NodeWatermark` is gone.
    pub fn delete_live(&mut self, name: &str) {
        let known = self.live.remove(name).is_some();
        if known && self.leading && self.nodes.contains_key(name) {
            let message =
                "its NodeWatermark was deleted, by whom is not known, and is made anew".to_owned();
            self.warn_node(name, "WatermarkDeleted", message);
        }
        self.watch_over(name);
        self.touch(name);
    }

    /// Begins to lead: whatever is not as it should be is put right, tightenings by way of their canaries.
    pub fn lead(&mut self) {
        self.leading = true;
        self.attempts.clear();
        self.silent.clear();
        self.silences.clear();
        self.silence.begin();
        let soft = self.live.iter().filter(|(_, live)| live.softened);
        self.softened = soft.map(|(name, _)| name.clone()).collect();
        let names: Vec<String> = self.nodes.keys().cloned().collect();
        self.take_rollouts_up();
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

    /// What has to be written now, at most `room` writes of `NodeWatermarks`. Each is under way until
    /// [`Self::written`], [`Self::opened`] or [`Self::answered`] is told.
    pub fn plan(&mut self, now: BootTime, room: usize) -> Vec<Write> {
        if !self.leading {
            // Who leads next begins with all of them.
            self.dirty.clear();
            return Vec::new();
        }
        self.advance_rollouts(now);
        if std::mem::take(&mut self.cap_dirty) {
            self.advance_cap();
        }
        self.pace_contests(now);
        let mut writes = self.plan_openings(now);
        let room = room + writes.len();
        let mut next = self.dirty.first().cloned();
        while let Some(name) = next {
            if writes.len() >= room {
                break;
            }
            let later = (Bound::Excluded(name.as_str()), Bound::Unbounded);
            next = self.dirty.range::<str, _>(later).next().cloned();
            let attempt = self.attempts.get(&name);
            if !attempt.is_none_or(|attempt| attempt.is_due(now)) {
                continue;
            }
            match self.write_for(&name) {
                Some(write) => {
                    self.begin(&name, &write);
                    writes.push(write);
                }
                None => drop(self.dirty.remove(&name)),
            }
        }
        self.targets.clear();
        writes
    }

    fn begin(&mut self, name: &str, write: &Write) {
        let attempt = self.attempts.entry(name.to_owned()).or_default();
        attempt.begin();
        attempt.asked = match write {
            Write::Apply { spec, .. } => Some(spec.hash()),
            _ => None,
        };
    }

    fn write_for(&mut self, name: &str) -> Option<Write> {
        let live = self.live.get(name);
        let Some(node) = self.nodes.get(name) else {
            return live.map(|live| Write::Delete {
                node: name.to_owned(),
                uid: live.uid.clone(),
            });
        };
        let content = self
            .targets
            .of(name, node, live, &self.rollouts, &mut self.catalog);
        let soften = self.softened.contains(name);
        if live.is_some_and(|live| live.hash == Some(content.hash(&node.uid, soften))) {
            return None;
        }
        Some(Write::Apply {
            node: name.to_owned(),
            spec: Wanted {
                node_uid: node.uid.clone(),
                content,
                soften,
                sources: Arc::clone(&node.class.sources),
            },
        })
    }

    /// A write came to its end. `seen` is the object as the API server has it now.
    pub fn written(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<Watermark>, Failed>,
    ) {
        self.dirty.insert(node.to_owned());
        match outcome {
            Ok(Some(seen)) => {
                let asked = self.attempts.get(node).and_then(|attempt| attempt.asked);
                self.apply_live(node, &seen);
                let live = self.live.get(node);
                // An API server that drops fields would be written to for ever.
                if live.is_some_and(|live| asked.is_some() && live.hash.is_none()) {
                    return self.failed(node, now, Failed::default());
                }
            }
            Ok(None) => drop(self.live.remove(node)),
            Err(failed) => return self.failed(node, now, failed),
        }
        self.attempts.remove(node);
    }

    fn failed(&mut self, node: &str, now: BootTime, failed: Failed) {
        let attempt = self.attempts.entry(node.to_owned()).or_default();
        attempt.failed(now);
        if let Some(wait) = failed.wait {
            attempt.wait(now + jittered(wait));
        }
    }

    /// How many nodes there are, how many wait to be written, and how many are softened.
    pub fn counts(&self) -> [usize; 3] {
        [self.nodes.len(), self.dirty.len(), self.softened.len()]
    }
}

/// A write failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Failed {
    /// The API server said how long to wait.
    pub wait: Option<Duration>,
}
