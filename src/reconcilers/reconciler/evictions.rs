//! Whether the rules that a node was given allow an eviction that its agent asks for.

use super::World;
use crate::crd::eviction::permit;
use crate::evictions::{Denial, Permit, RuleQuery};

impl World {
    /// By the `NodeWatermark` as the API server has it, which has to be the one that the agent enforces.
    ///
    /// # Errors
    /// They do not allow it.
    pub fn permit(&self, query: &RuleQuery) -> Result<Permit, Denial> {
        // What is to be written next may take away what the agent asks by.
        if self.dirty.contains(&*query.node) {
            return Err(Denial::OtherRules);
        }
        let node = self.nodes.get(&*query.node).ok_or(Denial::OtherRules)?;
        let live = self.live.get(&*query.node).ok_or(Denial::OtherRules)?;
        let hash = live.hash.as_ref().map(ToString::to_string);
        let content = live
            .content_for(&node.uid)
            .filter(|_| hash.as_deref() == Some(&*query.hash))
            .ok_or(Denial::OtherRules)?;
        let grace = permit(&query.pod, &query.node, &query.rule, &content.policy)
            .map_err(Denial::Objection)?;
        let zone = node.facts.labels.get("topology.kubernetes.io/zone");
        let zone = zone.filter(|zone| !zone.is_empty()).cloned();
        Ok(Permit { grace, zone })
    }
}
