//! Checks whether a node's rules allow an eviction that its agent requests.

use super::queue::WriteQueue;
use crate::crd::eviction;
use crate::evictions::{Denial, EvictionPermit, RuleQuery};
use crate::reconcilers::compile::index::Index;

/// Checks against the `NodeWatermark` in the API server, which has to be the one that the agent enforces.
///
/// # Errors
/// The rules don't allow it.
pub fn permit(
    index: &Index,
    queue: &WriteQueue,
    query: &RuleQuery,
) -> Result<EvictionPermit, Denial> {
    // A pending write may remove the rule.
    if queue.contains(&query.node) {
        return Err(Denial::OtherRules);
    }
    let node = index.nodes.get(&*query.node).ok_or(Denial::OtherRules)?;
    let current = index
        .watermarks
        .get(&*query.node)
        .ok_or(Denial::OtherRules)?;
    let hash = current.hash.as_ref().map(ToString::to_string);
    let content = current
        .content_for(&node.uid)
        .filter(|_| hash.as_deref() == Some(&*query.hash))
        .ok_or(Denial::OtherRules)?;
    let grace = eviction::permit(&query.pod, &query.node, &query.rule, &content.policy)
        .map_err(Denial::Objection)?;
    let zone = node.facts.labels.get("topology.kubernetes.io/zone");
    let zone = zone.filter(|zone| !zone.is_empty()).cloned();
    Ok(EvictionPermit { grace, zone })
}
