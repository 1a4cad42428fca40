//! What nodes keep, once for all nodes that keep the same: compiled, hashed, written and read back once.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use serde::ser::{Serialize, SerializeStruct, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use super::wire::Blocks;
use crate::crd::NodeWatermarkSpec;
use crate::crd::node_watermark::Hash;
use crate::engine::policy::PolicySet;

/// Entries that nobody keeps any more are looked for when there are so many more than after the last look.
const MANY: usize = 64;

/// A set of policies with the hashes of its parts. Immutable, shared by all nodes that keep it.
#[derive(Debug, Default)]
pub struct Content {
    /// The policies.
    pub policy: PolicySet,
    parts: Parts,
    encoded: OnceLock<Encoded>,
}

/// The hashes of rules, actions and pod policies.
#[derive(Clone, Debug, Default)]
pub struct Parts([Vec<Hash>; 3]);

/// A spec's rules, actions and pod policies in JSON.
pub type Encoded = [Option<Box<RawValue>>; 3];

impl Parts {
    fn of(spec: &NodeWatermarkSpec) -> Self {
        Self([
            spec.rules.iter().map(Hash::of).collect(),
            spec.actions.iter().map(Hash::of).collect(),
            spec.pod_policies.iter().map(Hash::of).collect(),
        ])
    }

    /// The hash of the spec that carries these to a node.
    pub fn hash(&self, node_uid: &str, soften: bool) -> Hash {
        let [rules, actions, pods] = &self.0;
        Hash::combine(node_uid, soften, [rules, actions, pods])
    }
}

impl Content {
    fn new(policy: PolicySet, parts: Parts) -> Self {
        Self {
            policy,
            parts,
            encoded: OnceLock::new(),
        }
    }

    /// The hash of the spec that carries this to a node.
    pub fn hash(&self, node_uid: &str, soften: bool) -> Hash {
        self.parts.hash(node_uid, soften)
    }

    /// The blocks of a spec that carries this.
    pub fn encoded(&self) -> &Encoded {
        self.encoded.get_or_init(|| {
            let spec = NodeWatermarkSpec::new("", &self.policy, false, Vec::new());
            [
                block(&spec.rules),
                block(&spec.actions),
                block(&spec.pod_policies),
            ]
        })
    }
}

/// A type that can't be written as JSON is not in the schema.
fn block<T: serde::Serialize>(parts: &[T]) -> Option<Box<RawValue>> {
    to_raw_value(parts).ok()
}

/// Blocks as they stood in an object, read.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Their hashes.
    pub parts: Arc<Parts>,
    /// What they mean; `None` where something in them is not understood.
    pub content: Option<Arc<Content>>,
}

/// Blocks as they were read before.
struct Remembered {
    parts: Arc<Parts>,
    content: Weak<Content>,
}

/// All contents that some node keeps or is to keep, each once.
#[derive(Default)]
pub struct Contents {
    all: HashMap<Hash, Weak<Content>>,
    /// By the SHA-256 of the bytes: API servers write equal objects in equal bytes.
    read: HashMap<[u8; 32], Remembered>,
    swept: usize,
}

impl Contents {
    /// The one content that carries this policy.
    pub fn of(&mut self, policy: PolicySet) -> Arc<Content> {
        let spec = NodeWatermarkSpec::new("", &policy, false, Vec::new());
        self.share(policy, Parts::of(&spec))
    }

    fn share(&mut self, policy: PolicySet, parts: Parts) -> Arc<Content> {
        self.sweep();
        let hash = parts.hash("", false);
        if let Some(known) = self.all.get(&hash).and_then(Weak::upgrade) {
            return known;
        }
        let content = Arc::new(Content::new(policy, parts));
        self.all.insert(hash, Arc::downgrade(&content));
        content
    }

    /// Reads the blocks of an object, if equal ones were not read before.
    pub fn read(&mut self, blocks: &Blocks) -> Known {
        let key = blocks.digest();
        let known = self.read.get(&key);
        let known =
            known.and_then(|known| Some((Arc::clone(&known.parts), known.content.upgrade()?)));
        if let Some((parts, content)) = known {
            let content = Some(content);
            return Known { parts, content };
        }
        let known = self.read_anew(blocks);
        if let Some(content) = &known.content {
            let parts = Arc::clone(&known.parts);
            let content = Arc::downgrade(content);
            self.read.insert(key, Remembered { parts, content });
        }
        known
    }

    fn read_anew(&mut self, blocks: &Blocks) -> Known {
        let spec = blocks.spec();
        let parts = Parts::of(&spec);
        let read = spec.read().ok().filter(|read| read.refused.is_empty());
        // What is read may be written in another order than we write: the hash is of what stands there.
        let content = read.map(|read| self.of(read.policy));
        Known {
            parts: Arc::new(parts),
            content,
        }
    }

    fn sweep(&mut self) {
        if self.all.len() + self.read.len() < self.swept + MANY {
            return;
        }
        self.all.retain(|_, content| content.strong_count() > 0);
        self.read
            .retain(|_, known| known.content.strong_count() > 0);
        self.swept = self.all.len() + self.read.len();
    }
}

/// The spec that one node is to have.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// UID of the Node.
    pub node_uid: String,
    /// What it keeps.
    pub content: Arc<Content>,
    /// `spec.softenScheduling`.
    pub soften: bool,
    /// `spec.sources`.
    pub sources: Arc<[String]>,
}

impl Wanted {
    /// `spec.hash`.
    pub fn hash(&self) -> Hash {
        self.content.hash(&self.node_uid, self.soften)
    }
}

impl Serialize for Wanted {
    /// As [`NodeWatermarkSpec`] does, from blocks that are written once for all nodes; also what is empty, since of a field
    /// that is not applied the API server leaves what others wrote.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut spec = serializer.serialize_struct("NodeWatermarkSpec", 7)?;
        spec.serialize_field("nodeUID", &self.node_uid)?;
        spec.serialize_field("hash", &self.hash().to_string())?;
        let [rules, actions, pods] = self.content.encoded();
        for (name, block) in [
            ("rules", rules),
            ("actions", actions),
            ("podPolicies", pods),
        ] {
            if let Some(block) = block {
                spec.serialize_field(name, block)?;
            }
        }
        spec.serialize_field("softenScheduling", &self.soften)?;
        spec.serialize_field("sources", &self.sources)?;
        spec.end()
    }
}
