//! The cap on unschedulable nodes, so that one bad threshold can't close a whole cluster. Pure.

use std::collections::BTreeSet;
use std::str::FromStr;

use super::rollouts::Rollouts;
use crate::crd::Kind;
use crate::reconcilers::compile::index::{Index, IndexedNode};
use crate::reconcilers::compile::watermark::is_no_schedule;
use crate::reconcilers::events::PendingEvent;

/// A node whose rules want it unschedulable.
#[derive(Clone, Debug, PartialEq)]
struct Candidate {
    node: String,
    /// It has the `NoSchedule` taint already.
    unschedulable: bool,
    /// The largest value/threshold of those rules: 1.2 is 20 % above.
    ratio: f64,
}

/// How many nodes may be unschedulable at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cap {
    /// A number of nodes.
    Nodes(usize),
    /// A percentage of the nodes that any rule may make unschedulable, from 1 to 100.
    Percent(usize),
}

impl Cap {
    /// The limit for `matched` nodes. At least one, otherwise a single node would never be protected.
    fn limit(self, matched: usize) -> usize {
        match self {
            Self::Nodes(nodes) => nodes,
            Self::Percent(percent) => (matched * percent / 100).max(1),
        }
    }
}

impl FromStr for Cap {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let cap = match text.strip_suffix('%') {
            Some(percent) => percent.parse().ok().map(Self::Percent),
            None => text.parse().ok().map(Self::Nodes),
        };
        cap.filter(|cap| matches!(cap, Self::Nodes(1..) | Self::Percent(1..=100)))
            .ok_or("write a number of nodes, such as 3, or a percentage from 1% to 100%")
    }
}

/// The nodes beyond the limit, which get `PreferNoSchedule` instead. Nodes that are unschedulable already stay so first, then those
/// furthest above their threshold.
fn beyond_limit(mut candidates: Vec<Candidate>, limit: usize) -> BTreeSet<String> {
    candidates.sort_by(|a, b| {
        let by_state = b.unschedulable.cmp(&a.unschedulable);
        let by_ratio = b.ratio.total_cmp(&a.ratio);
        by_state.then(by_ratio).then_with(|| a.node.cmp(&b.node))
    });
    candidates
        .into_iter()
        .skip(limit)
        .map(|it| it.node)
        .collect()
}

/// Whether the nodes beyond the cap are up to date.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Current,
    Stale,
}

/// The nodes beyond the cap.
pub(in crate::reconcilers) struct CapEnforcement {
    cap: Cap,
    state: State,
    /// Nodes that get `PreferNoSchedule`.
    beyond: BTreeSet<String>,
    /// Nodes whose taint was removed because their agent is unresponsive: they don't count.
    opened: BTreeSet<String>,
}

impl CapEnforcement {
    pub fn new(cap: Cap) -> Self {
        Self {
            cap,
            state: State::Stale,
            beyond: BTreeSet::new(),
            opened: BTreeSet::new(),
        }
    }

    /// A new leader starts with what the `NodeWatermarks` say.
    pub fn start(&mut self, index: &Index) {
        let watermarks = index.watermarks.iter();
        let beyond = watermarks.filter(|(_, watermark)| watermark.soften_scheduling);
        self.beyond = beyond.map(|(name, _)| name.clone()).collect();
        self.opened.clear();
        self.state = State::Stale;
    }

    /// Something changed that the cap depends on.
    pub const fn invalidate(&mut self) {
        self.state = State::Stale;
    }

    /// The taint of an unresponsive agent's node was removed.
    pub fn taint_removed(&mut self, node: &str) {
        self.opened.insert(node.to_owned());
        self.state = State::Stale;
    }

    /// The agent of a node was seen.
    pub fn agent_seen(&mut self, node: &str) {
        if self.opened.remove(node) {
            self.state = State::Stale;
        }
    }

    pub fn is_beyond(&self, node: &str) -> bool {
        self.beyond.contains(node)
    }

    pub fn count(&self) -> usize {
        self.beyond.len()
    }

    /// Decides again which nodes are beyond the cap, if something changed. Returns the nodes that changed, and events.
    pub fn update(
        &mut self,
        index: &Index,
        rollouts: &Rollouts,
    ) -> (Vec<String>, Vec<PendingEvent>) {
        if std::mem::replace(&mut self.state, State::Current) == State::Current {
            return (Vec::new(), Vec::new());
        }
        let may_taint =
            |node: &&IndexedNode| node.class.content.policy.rules.iter().any(is_no_schedule);
        let matched = index.nodes.values().filter(may_taint).count();
        let limit = self.cap.limit(matched);
        let candidates = self.candidates(index, rollouts);
        let wanted = candidates.len();
        let beyond = beyond_limit(candidates, limit);
        let changed = beyond.symmetric_difference(&self.beyond);
        let changed: Vec<String> = changed.cloned().collect();
        let event = |node: &String| {
            let message = format!(
                "the rules of {wanted} of {matched} nodes want them unschedulable, and at most {limit} may be \
                 (--max-unschedulable): this one gets PreferNoSchedule only"
            );
            PendingEvent::node_warning(node, "SchedulingSoftened", message)
        };
        let events = changed.iter().filter(|node| beyond.contains(*node));
        let events = events.map(event).collect();
        self.beyond = beyond;
        (changed, events)
    }

    /// The nodes whose rules want them unschedulable. The last status of an unresponsive agent does not count if the taint is gone.
    fn candidates(&self, index: &Index, rollouts: &Rollouts) -> Vec<Candidate> {
        let candidate = |(name, node): (&String, &IndexedNode)| {
            let current = index.watermarks.get(name)?;
            let opened =
                self.opened.contains(name) || current.status.scheduling_disabled && !node.tainted;
            if current.status.active.is_empty() || opened {
                return None;
            }
            let released =
                |node_qos: &str| rollouts.is_released(&(Kind::NodeQos, node_qos.to_owned()), name);
            Some(Candidate {
                node: name.clone(),
                unschedulable: current.status.no_schedule && !self.beyond.contains(name),
                ratio: current.threshold_ratio(&node.class.content.policy, released)?,
            })
        };
        index.nodes.iter().filter_map(candidate).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_is_a_number_of_nodes_or_a_percentage() {
        let limit = |text: &str, matched| text.parse::<Cap>().map(|cap| cap.limit(matched));
        assert_eq!(limit("3", 2), Ok(3));
        assert_eq!(limit("3", 1000), Ok(3));
        assert_eq!(limit("20%", 1000), Ok(200));
        assert_eq!(limit("20%", 2), Ok(1), "a single node is protected too");
        for wrong in ["0", "0%", "101%", "-1", "1.5", "%", "", "few", "3 %"] {
            assert!(wrong.parse::<Cap>().is_err(), "{wrong}");
        }
    }
}
