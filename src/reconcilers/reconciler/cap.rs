//! Keeps the number of closed nodes under the cap.

use std::collections::BTreeSet;

use super::super::cap::{self, Closing};
use super::{Node, World, live};
use crate::crd::Kind;

impl World {
    /// Looks anew which nodes may be closed.
    pub(super) fn advance_cap(&mut self) {
        let closes = |node: &&Node| node.class.content.policy.rules.iter().any(live::closes);
        let matched = self.nodes.values().filter(closes).count();
        let most = self.settings.max_unschedulable.most(matched);
        let closing = self.closing();
        let wanted = closing.len();
        let softened: BTreeSet<String> = cap::soften(closing, most);
        let changed: Vec<String> = softened
            .symmetric_difference(&self.softened)
            .cloned()
            .collect();
        for node in changed.iter().filter(|node| softened.contains(*node)) {
            let message = format!(
                "{wanted} of {matched} nodes are over their marks and at most {most} are closed at once \
                 (--max-unschedulable): this one gets PreferNoSchedule only"
            );
            self.warn_node(node, "SchedulingSoftened", message);
        }
        self.dirty.extend(changed);
        self.softened = softened;
    }

    /// The nodes whose rules want them closed. What a silent agent said last does not count where its node was opened, by
    /// whomever.
    fn closing(&self) -> Vec<Closing> {
        let closing = |(name, node): (&String, &Node)| {
            let live = self.live.get(name)?;
            let opened = self.silent.contains(name) || live.status.disabled && !node.tainted;
            if live.status.active.is_empty() || opened {
                return None;
            }
            let released = |node_qos: &str| {
                let rollout = self.rollouts.get(&(Kind::NodeQos, node_qos.to_owned()));
                rollout.is_none_or(|rollout| rollout.releases(name))
            };
            Some(Closing {
                node: name.clone(),
                closed: live.status.closed && !self.softened.contains(name),
                over: live.over(&node.class.content.policy, released)?,
            })
        };
        self.nodes.iter().filter_map(closing).collect()
    }
}
