//! Agents that fell silent, by this process's own clock. Pure.
//!
//! An agent renews its Lease and reports every few seconds, and writes its status at least every five minutes while
//! something is in force. Only *that* one of them changed counts, and when it was seen: no clock of a node is ever read.

mod watched;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::attempt::Attempt;
use super::lease::Renewal;
use crate::engine::time::BootTime;
use watched::{Reporting, Watched};

/// So many silent agents of a hundred in a zone at once, and at least so many, are our fault rather than theirs.
const MOST_PERCENT: usize = 55;
const LEAST_SILENT: usize = 3;
/// It is not looked more often who is silent.
const LOOK: Duration = Duration::from_secs(1);
/// At one look no more Leases are asked for.
const MOST_ASKED: usize = 16;

/// What is in force on a node, as far as it is known without its agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// A taint of ours is on it, or its condition says that it is over a mark.
    pub marked: bool,
    /// Pods that were throttled when its agent last said anything.
    pub throttled: usize,
    /// Its kubelet says that it is Ready: there is somebody to run an agent, or a command.
    pub ready: bool,
}

impl InForce {
    const fn is_anything(self) -> bool {
        self.marked || self.throttled > 0
    }
}

/// Who is silent, and since when.
#[derive(Debug)]
pub struct Silence {
    /// An agent that was not heard for so long is dead.
    after: Duration,
    nodes: BTreeMap<String, Watched>,
    /// Zones in which nothing is undone, because so many are silent there.
    held: BTreeSet<Arc<str>>,
    /// Agents that are heard again, and were told of as silent.
    back: BTreeSet<String>,
    /// Nodes that were heard since the last call, which will say when that was.
    just_heard: BTreeSet<String>,
    looked: Option<BootTime>,
    figures: Figures,
}

/// How many agents are how silent, as of the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Agents that hold a Lease.
    pub agents: usize,
    /// Agents that are silent: by their Lease, or where they have none by what they write while something is in force.
    pub silent: usize,
    /// Those of them that left throttled pods.
    pub throttling: usize,
    /// Zones in which nothing is undone.
    pub held: usize,
    /// Since when the Lease was not renewed that was not renewed for longest.
    pub oldest: Duration,
}

/// What is to be done about silence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Nodes whose Lease is to be read: it seems that it was not renewed.
    pub ask: Vec<String>,
    /// Nodes whose agent is newly silent, and for how long it may be before it counts as that.
    pub silent: Vec<(String, Duration)>,
    /// Nodes whose agent is heard again.
    pub back: Vec<String>,
    /// Nodes whose taint is to be taken away.
    pub open: Vec<String>,
    /// Nodes that are newly silent while this many pods are throttled there.
    pub throttled: Vec<(String, usize)>,
    /// Zones in which so many are silent that nothing is undone, of how many: where that began with this look.
    pub held: Vec<(Arc<str>, usize, usize)>,
    /// Zones in which that ended with this look.
    pub resumed: Vec<Arc<str>>,
}

impl Silence {
    /// Knows of no node yet.
    pub fn new(after: Duration) -> Self {
        Self {
            after,
            nodes: BTreeMap::new(),
            held: BTreeSet::new(),
            back: BTreeSet::new(),
            just_heard: BTreeSet::new(),
            looked: None,
            figures: Figures::default(),
        }
    }

    /// An agent that was not heard for so long is dead.
    pub const fn after(&self) -> Duration {
        self.after
    }

    /// Begins to tell: every agent counts as just heard, and nothing as told. No answer comes to what was asked before.
    pub fn begin(&mut self) {
        for node in self.nodes.values_mut() {
            node.begin();
            node.asking = Attempt::default();
        }
        self.back.clear();
        self.held.clear();
        self.looked = None;
    }

    /// Every agent counts as just heard: what was missed is not known.
    pub fn restart(&mut self) {
        self.restart_where(|_| true);
    }

    /// The same for the agents that hold Leases, which could not be seen.
    pub fn restart_leases(&mut self) {
        self.restart_where(Watched::has_lease);
    }

    fn restart_where(&mut self, counts: impl Fn(&Watched) -> bool) {
        for node in self.nodes.values_mut().filter(|node| counts(node)) {
            node.restart();
        }
        self.looked = None;
    }

    /// A node of this zone is there, and this is in force on it; `None`: it is gone.
    pub fn stands(&mut self, node: &str, place: Option<(&Arc<str>, InForce)>) {
        let place = place.map(|(zone, state)| (Arc::clone(zone), state));
        if let Some(known) = self.nodes.get_mut(node) {
            if place.is_none() {
                // No report of a node that is gone is taken.
                known.reports = None;
            }
            known.place = place;
            self.drop_if_idle(node);
        } else if place.as_ref().is_some_and(|(_, state)| state.is_anything()) {
            let watched = Watched::at(place);
            self.nodes.insert(node.to_owned(), watched);
            self.just_heard.insert(node.to_owned());
        }
    }

    /// Nobody can be silent where nothing is expected.
    fn drop_if_idle(&mut self, node: &str) {
        if self.nodes.get(node).is_some_and(Watched::is_idle) {
            self.nodes.remove(node);
            self.back.remove(node);
            self.just_heard.remove(node);
        }
    }

    /// Its agent wrote.
    pub fn heard(&mut self, node: &str) {
        self.hear(node, None);
    }

    fn hear(&mut self, node: &str, at: Option<BootTime>) {
        let Some(known) = self.nodes.get_mut(node) else {
            return;
        };
        if known.is_heard(at) {
            self.back.insert(node.to_owned());
        }
        if at.is_none() {
            self.just_heard.insert(node.to_owned());
        }
    }

    /// Its agent reported, and will again within this interval.
    pub fn reported(&mut self, node: &str, interval: Duration, at: BootTime) {
        let known = self.nodes.entry(node.to_owned()).or_default();
        known.reports = Some(Reporting {
            interval,
            last: Some(at),
        });
        self.hear(node, Some(at));
    }

    /// A Lease as it is now. Where it was renewed since it was last seen: how long after its agent was last heard.
    pub fn renewed(&mut self, node: &str, lease: Renewal, now: BootTime) -> Option<Duration> {
        if !lease.held {
            self.released(node);
            return None;
        }
        let known = self.nodes.entry(node.to_owned()).or_default();
        let before = known.lease.replace(lease);
        if before == known.lease {
            return None;
        }
        let age = known.heard.map(|heard| now.since(heard));
        self.hear(node, Some(now));
        age.filter(|_| before.is_some())
    }

    /// Its agent gave the Lease back, or the Lease is gone: none is expected any more.
    pub fn released(&mut self, node: &str) {
        if let Some(known) = self.nodes.get_mut(node) {
            known.lease = None;
            known.reports = None;
            known.told = false;
            self.drop_if_idle(node);
        }
    }

    /// The Lease of an agent that seemed silent was read: as it is now, `None` where there is none. Whether the agent was
    /// heard by that.
    pub fn answered(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<Renewal>, ()>,
    ) -> bool {
        let Some(known) = self.nodes.get_mut(node) else {
            return false;
        };
        let Ok(seen) = outcome else {
            known.asking.failed(now);
            return false;
        };
        known.asking = Attempt::default();
        match seen {
            Some(seen) if known.lease.as_ref() == Some(&seen) => known.confirmed = Some(now),
            Some(seen) => return self.renewed(node, seen, now).is_some(),
            None => self.released(node),
        }
        false
    }

    /// The nodes on which an agent holds its Lease or reports, silent ones too, in order of name.
    pub fn with_agent(&self) -> impl Iterator<Item = &String> {
        let nodes = self.nodes.iter();
        nodes.filter(|(_, node)| node.has_agent()).map(|it| it.0)
    }

    /// Looks who is silent now; `None`: that was done a moment ago.
    pub fn look(&mut self, now: BootTime) -> Option<Look> {
        for name in std::mem::take(&mut self.just_heard) {
            if let Some(node) = self.nodes.get_mut(&name) {
                node.heard.get_or_insert(now);
            }
        }
        if self.looked.is_some_and(|looked| now.since(looked) < LOOK) {
            return None;
        }
        self.looked = Some(now);
        let mut look = Look {
            back: std::mem::take(&mut self.back).into_iter().collect(),
            ..Look::default()
        };
        self.hold(now, &mut look);
        for (name, node) in &mut self.nodes {
            if node.zone().is_some_and(|zone| !self.held.contains(zone)) {
                node.look(name, now, self.after, &mut look);
            }
        }
        Some(look)
    }

    /// Finds the zones in which nothing is undone, and counts.
    fn hold(&mut self, now: BootTime, look: &mut Look) {
        let mut zones = BTreeMap::<Arc<str>, [usize; 2]>::new();
        let mut figures = Figures::default();
        for node in self.nodes.values_mut() {
            let heard = node.heard_by(now);
            let Some(zone) = node.zone().map(Arc::clone) else {
                continue;
            };
            if !node.opened {
                let [overdue, all] = zones.entry(zone).or_default();
                *all += 1;
                *overdue += usize::from(node.is_overdue(now, self.after));
            }
            let silent = node.is_silent(now, self.after);
            figures.silent += usize::from(silent);
            figures.throttling += usize::from(silent && node.throttled() > 0);
            if node.has_lease() {
                figures.agents += 1;
                figures.oldest = figures.oldest.max(now.since(heard));
            }
        }
        let too_many = |[overdue, all]: [usize; 2]| {
            overdue >= LEAST_SILENT && overdue * 100 >= all * MOST_PERCENT
        };
        zones.retain(|_, counts| too_many(*counts));
        let begun = zones.iter().filter(|(zone, _)| !self.held.contains(*zone));
        look.held = begun
            .map(|(zone, [overdue, all])| (Arc::clone(zone), *overdue, *all))
            .collect();
        let held: BTreeSet<Arc<str>> = zones.into_keys().collect();
        look.resumed = self.held.difference(&held).cloned().collect();
        figures.held = held.len();
        self.held = held;
        self.figures = figures;
    }

    /// Taking a taint away came to its end.
    pub fn opened(&mut self, node: &str, now: BootTime, done: bool) {
        let Some(known) = self.nodes.get_mut(node) else {
            return;
        };
        if done {
            known.opened = true;
            known.opening = Attempt::default();
        } else {
            known.opening.failed(now);
        }
        self.drop_if_idle(node);
    }

    /// Whether its agent lacked a word at the last look, long before it counts as silent. Where most are silent it is not they that are.
    pub fn is_quiet(&self, node: &str) -> bool {
        let known = self.nodes.get(node).zip(self.looked);
        known.is_some_and(|(known, now)| {
            let held = known.zone().is_some_and(|zone| self.held.contains(zone));
            !held && known.is_quiet(now, self.after)
        })
    }

    /// How many agents are how silent, as of the last look.
    pub const fn figures(&self) -> Figures {
        self.figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_never_looks_remembers_no_node_that_is_gone() {
        let mut standby = Silence::new(Duration::from_mins(10));
        let zone = Arc::from("a");
        let throttles = InForce {
            throttled: 1,
            ..InForce::default()
        };
        standby.stands("spot", Some((&zone, throttles)));
        assert_eq!(standby.just_heard.len(), 1);
        standby.stands("spot", None);
        assert!(standby.just_heard.is_empty());
    }
}
