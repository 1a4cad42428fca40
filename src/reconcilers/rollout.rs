//! A tightening edit goes to a few nodes first, and to the others when it does no harm there. Pure.

use std::collections::{BTreeSet, HashMap};
use std::time::Duration;

use super::catalog::Key;
use crate::crd::node_watermark::Hash;
use crate::engine::time::BootTime;

/// The canaries are watched at least for so long.
const LEAST_WATCH: Duration = Duration::from_mins(1);
/// More of them than this newly acting stops the edit.
const MOST_ACTING_PERCENT: usize = 20;

/// How far an edit of one object has come.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollout {
    /// The nodes that it concerns, in an order that only the object and their names decide.
    members: Vec<String>,
    /// Where each stands in it.
    places: HashMap<String, usize>,
    canaries: usize,
    /// Canaries that acted for the object before the edit.
    acting_before: BTreeSet<String>,
    watch: Duration,
    phase: Phase,
}

/// What the edit waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// For the canaries to have it.
    Canaries,
    /// For the time to pass in which the canaries are watched.
    Watching {
        /// When the last canary had it.
        since: BootTime,
    },
    /// It goes to the others, so many a second.
    Others {
        /// When that began.
        since: BootTime,
        /// Nodes that may have it, canaries included.
        released: usize,
    },
    /// Too many canaries act: it goes no further.
    Stopped {
        /// Canaries that newly act.
        acting: usize,
    },
    /// Every node may have it.
    Done,
}

impl Rollout {
    /// Begins to roll an edit out to nodes. `slowest` is the longest threshold x period of the object's rules.
    pub fn new(key: &Key, nodes: BTreeSet<String>, slowest: Duration) -> Self {
        let mut members: Vec<String> = nodes.into_iter().collect();
        members.sort_by_cached_key(|node| Hash::of(&(key.0.name(), &key.1, node)));
        let canaries = members.len().div_ceil(100).max(1);
        // With nobody left to protect there is nothing to wait for.
        let phase = if members.len() <= 1 {
            Phase::Done
        } else {
            Phase::Canaries
        };
        let places = members.iter().cloned().zip(0..).collect();
        Self {
            members,
            places,
            canaries,
            acting_before: BTreeSet::new(),
            watch: LEAST_WATCH.max(slowest.saturating_mul(2)),
            phase,
        }
    }

    /// It was stopped before this process began, and the object was not edited since.
    #[must_use]
    pub fn stopped(mut self, acting: usize) -> Self {
        self.phase = Phase::Stopped { acting };
        self
    }

    /// Those that have the edit first.
    pub fn canaries(&self) -> &[String] {
        &self.members[..self.canaries.min(self.members.len())]
    }

    /// How many nodes it concerns.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// How far it is.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// Remembers which canaries act already.
    pub fn remember_acting(&mut self, acts: impl Fn(&str) -> bool) {
        let acting = self.canaries().iter().filter(|node| acts(node));
        self.acting_before = acting.cloned().collect();
    }

    /// Whether a node may have the edit. One that came later waits for the canaries too.
    pub fn releases(&self, node: &str) -> bool {
        let place = self.places.get(node).copied();
        match self.phase {
            Phase::Done => true,
            Phase::Others { released, .. } => place.is_none_or(|place| place < released),
            _ => place.is_some_and(|place| place < self.canaries),
        }
    }

    /// Goes on, given which nodes have what they may have, and which act for the object. Gives the nodes that may have
    /// the edit from now on.
    pub fn advance(
        &mut self,
        now: BootTime,
        rate: f64,
        has_it: impl Fn(&str) -> bool,
        acts: impl Fn(&str) -> bool,
    ) -> Vec<String> {
        match self.phase {
            Phase::Canaries if self.canaries().iter().all(|node| has_it(node)) => {
                self.phase = Phase::Watching { since: now };
            }
            Phase::Watching { since } => self.watch(now, since, acts),
            Phase::Others { since, released } => return self.release(now, since, released, rate),
            _ => {}
        }
        Vec::new()
    }

    fn watch(&mut self, now: BootTime, since: BootTime, acts: impl Fn(&str) -> bool) {
        let newly = |node: &&String| acts(node) && !self.acting_before.contains(*node);
        let acting = self.canaries().iter().filter(newly).count();
        if acting * 100 > self.canaries * MOST_ACTING_PERCENT {
            self.phase = Phase::Stopped { acting };
        } else if now.since(since) >= self.watch {
            self.phase = Phase::Others {
                since: now,
                released: self.canaries,
            };
        }
    }

    fn release(&mut self, now: BootTime, since: BootTime, had: usize, rate: f64) -> Vec<String> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of nodes; `as` saturates"
        )]
        let more = (now.since(since).as_secs_f64() * rate) as usize;
        let released = self.canaries.saturating_add(more).min(self.members.len());
        self.phase = if released == self.members.len() {
            Phase::Done
        } else {
            Phase::Others { since, released }
        };
        self.members[had.min(released)..released].to_vec()
    }
}
