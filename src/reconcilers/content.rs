//! What nodes keep, shared between the nodes that keep the same.

use std::sync::Arc;

use crate::crd::node_watermark::{Hash, NodeWatermarkSpec};
use crate::engine::policy::PolicySet;

/// A set of policies with the hashes of its parts. Immutable, shared by all nodes that keep it.
#[derive(Debug, Default)]
pub struct Content {
    /// The policies.
    pub policy: PolicySet,
    rules: Vec<Hash>,
    actions: Vec<Hash>,
    pods: Vec<Hash>,
}

impl Content {
    /// Hashes each part once.
    pub fn new(policy: PolicySet) -> Arc<Self> {
        let spec = NodeWatermarkSpec::new("", &policy, false, Vec::new());
        Arc::new(Self {
            policy,
            rules: spec.rules.iter().map(Hash::of).collect(),
            actions: spec.actions.iter().map(Hash::of).collect(),
            pods: spec.pod_policies.iter().map(Hash::of).collect(),
        })
    }

    /// The hash of the spec that carries this to a node.
    pub fn hash(&self, node_uid: &str, soften: bool) -> Hash {
        Hash::combine(node_uid, soften, [&self.rules, &self.actions, &self.pods])
    }
}
