//! The hash of the content of a spec.

use std::fmt;

use ring::digest::{Context, SHA256};
use serde::Serialize;

use super::NodeWatermarkSpec;

/// The first 8 bytes of a SHA-256, which are enough to distinguish versions of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Hash(pub u64);

impl Hash {
    /// The hash of the JSON of a part. It is the same on every machine and in every run.
    pub fn of<T: Serialize>(part: &T) -> Self {
        // All types of the schema can be serialized.
        Self::of_bytes(&serde_json::to_vec(part).unwrap_or_default())
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(bytes);
        Self::finish(context)
    }

    fn finish(context: Context) -> Self {
        let digest = context.finish();
        let bytes = digest.as_ref().first_chunk().copied();
        Self(u64::from_be_bytes(bytes.unwrap_or_default()))
    }

    /// The hash of a whole spec, from the hashes of its parts, so that parts shared between nodes are hashed once.
    pub fn combine(
        node_uid: &str,
        soften_scheduling: bool,
        [rules, actions, pod_policies]: [&[Self]; 3],
    ) -> Self {
        let mut context = Context::new(&SHA256);
        context.update(node_uid.as_bytes());
        context.update(&[0, u8::from(soften_scheduling)]);
        for (tag, parts) in [(1, rules), (2, actions), (3, pod_policies)] {
            for part in parts {
                context.update(&[tag]);
                context.update(&part.0.to_be_bytes());
            }
        }
        Self::finish(context)
    }
}

impl fmt::Display for Hash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl NodeWatermarkSpec {
    /// The hash of the content of the spec; its field `hash` is not used.
    pub fn content_hash(&self) -> Hash {
        let rules: Vec<Hash> = self.rules.iter().map(Hash::of).collect();
        let actions: Vec<Hash> = self.actions.iter().map(Hash::of).collect();
        let pods: Vec<Hash> = self.pod_policies.iter().map(Hash::of).collect();
        let parts = [&rules[..], &actions, &pods];
        Hash::combine(&self.node_uid, self.soften_scheduling, parts)
    }
}
