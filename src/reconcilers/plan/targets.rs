//! The target content of a node: the desired content without edits that are not released to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::rollout::Rollout;
use super::tightening::withhold;
use crate::engine::policy::PolicySet;
use crate::reconcilers::compile::catalog::{Catalog, Key};
use crate::reconcilers::compile::content::CompiledPolicy;
use crate::reconcilers::compile::index::IndexedNode;
use crate::reconcilers::compile::watermark::KnownWatermark;

/// Current and desired content (by address), and which edits are released: most nodes share these.
type Case = (usize, usize, Vec<bool>);

/// A cache of targets.
#[derive(Default)]
pub struct TargetCache(HashMap<Case, Arc<CompiledPolicy>>);

impl TargetCache {
    /// Clears the cache: addresses may be reused later.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The target of one node.
    pub fn of(
        &mut self,
        name: &str,
        node: &IndexedNode,
        watermark: Option<&KnownWatermark>,
        rollouts: &BTreeMap<Key, Rollout>,
        catalog: &mut Catalog,
    ) -> Arc<CompiledPolicy> {
        let desired = &node.class.content;
        if rollouts.is_empty() {
            return Arc::clone(desired);
        }
        let current = watermark.and_then(|watermark| watermark.content_for(&node.uid));
        let edits = rollouts.values().map(|rollout| rollout.releases(name));
        let address = |content: &Arc<CompiledPolicy>| Arc::as_ptr(content).addr();
        let case = (
            current.map_or(0, address),
            address(desired),
            edits.collect(),
        );
        let target = self.0.entry(case).or_insert_with(|| {
            let others = current.is_none().then(|| before(rollouts));
            let nothing = PolicySet::default();
            let current = current.map(|current| &current.policy);
            let before = current.or(others.as_ref()).unwrap_or(&nothing);
            let released = |key: &Key| {
                let rollout = rollouts.get(key);
                rollout.is_none_or(|rollout| rollout.releases(name))
            };
            let staged = withhold(before, &desired.policy, released);
            if staged.withheld.is_empty() {
                return Arc::clone(desired);
            }
            catalog.contents().of(staged.policy)
        });
        Arc::clone(target)
    }
}

/// The policies before the edits in progress, for a node without a `NodeWatermark`.
fn before(rollouts: &BTreeMap<Key, Rollout>) -> PolicySet {
    let mut policy = PolicySet::default();
    for rollout in rollouts.values() {
        policy.rules.extend(rollout.before().rules.iter().cloned());
        policy.pods.extend(rollout.before().pods.iter().cloned());
    }
    policy.rules.sort_by(|a, b| a.id.cmp(&b.id));
    policy
}
