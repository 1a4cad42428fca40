//! What a node is to keep, as far as edits are released to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::super::catalog::{Catalog, Key};
use super::super::content::Content;
use super::super::restrain::restrain;
use super::super::rollout::Rollout;
use super::{Live, Node};
use crate::engine::policy::PolicySet;
use crate::ordered;

/// What is kept, what is wanted (each by its address), and which edits are released: most nodes have these in common.
type Case = (usize, usize, Vec<bool>);

/// The targets of nodes, each worked out once.
#[derive(Default)]
pub(super) struct Targets(HashMap<Case, Arc<Content>>);

impl Targets {
    /// Forgets all: an address may soon be another's.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Of one node.
    pub(super) fn of(
        &mut self,
        name: &str,
        node: &Node,
        live: Option<&Live>,
        rollouts: &BTreeMap<Key, Rollout>,
        catalog: &mut Catalog,
    ) -> Arc<Content> {
        let wanted = &node.class.content;
        if rollouts.is_empty() {
            return Arc::clone(wanted);
        }
        let kept = live.and_then(|live| live.content_for(&node.uid));
        let edits = rollouts.values().map(|rollout| rollout.releases(name));
        let address = |content: &Arc<Content>| Arc::as_ptr(content).addr();
        let case = (kept.map_or(0, address), address(wanted), edits.collect());
        let target = self.0.entry(case).or_insert_with(|| {
            let others = kept.is_none().then(|| before(rollouts));
            let nothing = PolicySet::default();
            let kept = kept.map(|kept| &kept.policy);
            let before = kept.or(others.as_ref()).unwrap_or(&nothing);
            let released = |key: &Key| {
                let rollout = rollouts.get(key);
                rollout.is_none_or(|rollout| rollout.releases(name))
            };
            let restrained = restrain(before, &wanted.policy, released);
            if restrained.held.is_empty() {
                return Arc::clone(wanted);
            }
            catalog.contents().of(restrained.policy)
        });
        Arc::clone(target)
    }
}

/// What others keep of the objects whose edits are on their way: a node that keeps nothing yet, or nothing any more, is
/// to keep that too.
fn before(rollouts: &BTreeMap<Key, Rollout>) -> PolicySet {
    let mut policy = PolicySet::default();
    for rollout in rollouts.values() {
        policy.rules.extend(rollout.before().rules.iter().cloned());
        policy.pods.extend(rollout.before().pods.iter().cloned());
    }
    ordered::sort_by(&mut policy.rules, |a, b| a.id.cmp(&b.id));
    policy
}
