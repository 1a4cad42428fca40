//! Agents that fell silent while something is in force on their node, by this process's own clock. Pure.
//!
//! An agent writes its status at least every five minutes while something is in force. Only *that* it changed counts,
//! and when it was seen: no clock of a node is ever read.

use std::collections::BTreeMap;
use std::time::Duration;

use super::attempt::Attempt;
use crate::engine::time::BootTime;

/// So many silent agents of a hundred at once, and at least so many in all, are our fault rather than theirs.
const MOST_PERCENT: usize = 55;
const LEAST_SILENT: usize = 3;

/// One node on which something is in force.
#[derive(Clone, Debug, Default)]
struct Watched {
    /// When its agent was heard last; `None`: since the last look.
    heard: Option<BootTime>,
    /// What is in force there.
    state: InForce,
    /// Its silence was told of.
    told: bool,
    /// Its taint was taken away in this silence.
    opened: bool,
    attempt: Attempt,
}

/// What is in force on a node, as far as it is known without its agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InForce {
    /// A taint of ours is on it.
    pub tainted: bool,
    /// Pods that were throttled when its agent last said anything.
    pub throttled: usize,
    /// Its kubelet says that it is Ready: there is somebody to run an agent, or a command.
    pub ready: bool,
}

impl InForce {
    const fn is_anything(self) -> bool {
        self.tainted || self.throttled > 0
    }
}

/// Who is silent, and since when.
#[derive(Debug)]
pub struct Silence {
    /// An agent that was not heard for so long is silent.
    after: Duration,
    nodes: BTreeMap<String, Watched>,
    held: bool,
}

/// What is to be done about silence.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// Nodes whose taint is to be taken away.
    pub open: Vec<String>,
    /// Nodes that are newly silent while this many pods are throttled there.
    pub throttled: Vec<(String, usize)>,
    /// So many are silent that nothing is undone, of how many: where that began with this look.
    pub held: Option<(usize, usize)>,
    /// That ended with this look.
    pub resumed: bool,
}

impl Silence {
    /// Knows of no node yet.
    pub const fn new(after: Duration) -> Self {
        Self {
            after,
            nodes: BTreeMap::new(),
            held: false,
        }
    }

    /// An agent that was not heard for so long is silent.
    pub const fn after(&self) -> Duration {
        self.after
    }

    /// Every agent counts as just heard: what was missed is not known.
    pub fn restart(&mut self) {
        self.held = false;
        for node in self.nodes.values_mut() {
            *node = Watched {
                state: node.state,
                ..Watched::default()
            };
        }
    }

    /// What is in force on a node now.
    pub fn is_in_force(&mut self, node: &str, state: InForce) {
        if !state.is_anything() {
            self.nodes.remove(node);
        } else if let Some(known) = self.nodes.get_mut(node) {
            known.state = state;
        } else {
            let watched = Watched {
                state,
                ..Watched::default()
            };
            self.nodes.insert(node.to_owned(), watched);
        }
    }

    /// Its agent wrote.
    pub fn heard(&mut self, node: &str) {
        if let Some(known) = self.nodes.get_mut(node) {
            *known = Watched {
                state: known.state,
                ..Watched::default()
            };
        }
    }

    /// Looks who is silent now.
    pub fn look(&mut self, now: BootTime) -> Look {
        let mut look = Look::default();
        let [overdue, all] = self.overdue(now);
        let held = overdue >= LEAST_SILENT && overdue * 100 >= all * MOST_PERCENT;
        look.held = (held && !self.held).then_some((overdue, all));
        look.resumed = self.held && !held;
        self.held = held;
        if held {
            return look;
        }
        for (name, node) in &mut self.nodes {
            if node.silent_for(now) < self.after || !node.state.ready {
                continue;
            }
            if node.state.throttled > 0 && !std::mem::replace(&mut node.told, true) {
                look.throttled.push((name.clone(), node.state.throttled));
            }
            if node.state.tainted && !node.opened && node.attempt.is_due(now) {
                node.attempt.begin();
                look.open.push(name.clone());
            }
        }
        look
    }

    /// Those that should have written by now: they may write as seldom as twice in the time after which they count as
    /// silent, and a write takes its way. And how many there are. Whose taint was taken away is not counted again.
    fn overdue(&mut self, now: BootTime) -> [usize; 2] {
        let [mut overdue, mut all] = [0, 0];
        let allowed = self.after / 2 + self.after / 10;
        for node in self.nodes.values_mut() {
            node.heard.get_or_insert(now);
            if !node.opened {
                all += 1;
                overdue += usize::from(node.silent_for(now) > allowed);
            }
        }
        [overdue, all]
    }

    /// Taking a taint away came to its end.
    pub fn opened(&mut self, node: &str, now: BootTime, done: bool) {
        let Some(node) = self.nodes.get_mut(node) else {
            return;
        };
        if done {
            node.opened = true;
            node.attempt = Attempt::default();
        } else {
            node.attempt.failed(now);
        }
    }

    /// Whether nothing is undone, because so many are silent.
    pub const fn is_held(&self) -> bool {
        self.held
    }

    /// How many agents are silent, and how many of these left throttled pods.
    pub fn counts(&self, now: BootTime) -> [usize; 2] {
        let silent = || {
            self.nodes
                .values()
                .filter(|node| node.silent_for(now) >= self.after)
        };
        [
            silent().count(),
            silent().filter(|node| node.state.throttled > 0).count(),
        ]
    }
}

impl Watched {
    fn silent_for(&self, now: BootTime) -> Duration {
        self.heard.map_or(Duration::ZERO, |heard| now.since(heard))
    }
}
