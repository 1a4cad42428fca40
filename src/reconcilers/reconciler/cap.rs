//! Enforces the cap on unschedulable nodes.

use std::collections::BTreeSet;

use super::super::cap::{self, Candidate};
use super::{Node, Reconciler, watermark};
use crate::crd::Kind;

impl Reconciler {
    /// Decides which nodes get `PreferNoSchedule` because of the cap.
    pub(super) fn update_cap(&mut self) {
        let may_taint =
            |node: &&Node| (node.class.content.policy.rules.iter()).any(watermark::is_no_schedule);
        let matched = self.nodes.values().filter(may_taint).count();
        let limit = self.settings.max_unschedulable.limit(matched);
        let candidates = self.cap_candidates();
        let wanted = candidates.len();
        let beyond: BTreeSet<String> = cap::beyond_limit(candidates, limit);
        let changed: Vec<String> = beyond
            .symmetric_difference(&self.prefer_no_schedule)
            .cloned()
            .collect();
        for node in changed.iter().filter(|node| beyond.contains(*node)) {
            let message = format!(
                "{wanted} of {matched} nodes are above their thresholds and at most {limit} may be unschedulable \
                 (--max-unschedulable): this one gets PreferNoSchedule only"
            );
            self.warn_node(node, "SchedulingSoftened", message);
        }
        self.dirty.extend(changed);
        self.prefer_no_schedule = beyond;
    }

    /// The nodes whose rules want them unschedulable. The last status of an unresponsive agent does not count if the taint is gone.
    fn cap_candidates(&self) -> Vec<Candidate> {
        let candidate = |(name, node): (&String, &Node)| {
            let current = self.watermarks.get(name)?;
            let opened = self.taint_removed.contains(name)
                || current.status.scheduling_disabled && !node.tainted;
            if current.status.active.is_empty() || opened {
                return None;
            }
            let released = |node_qos: &str| {
                let rollout = self.rollouts.get(&(Kind::NodeQos, node_qos.to_owned()));
                rollout.is_none_or(|rollout| rollout.releases(name))
            };
            Some(Candidate {
                node: name.clone(),
                unschedulable: current.status.no_schedule
                    && !self.prefer_no_schedule.contains(name),
                ratio: current.threshold_ratio(&node.class.content.policy, released)?,
            })
        };
        self.nodes.iter().filter_map(candidate).collect()
    }
}
