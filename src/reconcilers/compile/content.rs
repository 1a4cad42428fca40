//! Compiled policies, shared by all nodes that have the same: compiled, hashed, encoded and decoded once.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use serde::ser::{Serialize, SerializeStruct, Serializer};
use serde_json::value::{RawValue, to_raw_value};

use crate::crd::NodeWatermarkSpec;
use crate::crd::node_watermark::Hash;
use crate::engine::policy::PolicySet;
use crate::reconcilers::observe::wire::Blocks;

/// Unused entries are removed after this many new ones.
const SWEEP_AFTER: usize = 64;

/// A policy set with the hashes of its parts. Immutable, shared between nodes.
#[derive(Debug, Default)]
pub struct CompiledPolicy {
    /// The policies.
    pub policy: PolicySet,
    form: Form,
    /// For agents that do not read quantities.
    old_form: Form,
}

/// Which fields the rules of a spec have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecFields {
    /// Those of this version.
    #[default]
    All,
    /// Those without quantities, for an agent that does not read them.
    WithoutQuantities,
}

/// What is written of a content.
#[derive(Debug, Default)]
struct Form {
    parts: PartHashes,
    encoded: OnceLock<Encoded>,
}

/// The hashes of rules, actions and pod policies.
#[derive(Clone, Debug, Default)]
pub struct PartHashes([Vec<Hash>; 3]);

/// A spec's rules, actions and pod policies in JSON.
pub type Encoded = [Option<Box<RawValue>>; 3];

impl PartHashes {
    fn of(spec: &NodeWatermarkSpec) -> Self {
        Self([
            spec.rules.iter().map(Hash::of).collect(),
            spec.actions.iter().map(Hash::of).collect(),
            spec.pod_policies.iter().map(Hash::of).collect(),
        ])
    }

    /// The hash of a node's spec with these parts.
    pub fn hash(&self, node_uid: &str, soften: bool) -> Hash {
        let [rules, actions, pods] = &self.0;
        Hash::combine(node_uid, soften, [rules, actions, pods])
    }
}

impl CompiledPolicy {
    const fn form(&self, fields: SpecFields) -> &Form {
        match fields {
            SpecFields::All => &self.form,
            SpecFields::WithoutQuantities => &self.old_form,
        }
    }

    /// The JSON blocks of a spec with this content.
    fn encoded(&self, fields: SpecFields) -> &Encoded {
        self.form(fields).encoded.get_or_init(|| {
            let spec = spec(&self.policy, fields);
            [
                block(&spec.rules),
                block(&spec.actions),
                block(&spec.pod_policies),
            ]
        })
    }
}

fn spec(policy: &PolicySet, fields: SpecFields) -> NodeWatermarkSpec {
    let spec = NodeWatermarkSpec::new("", policy, false, Vec::new());
    match fields {
        SpecFields::All => spec,
        SpecFields::WithoutQuantities => spec.for_old_agent(),
    }
}

/// All types of the schema can be encoded.
fn block<T: serde::Serialize>(parts: &[T]) -> Option<Box<RawValue>> {
    to_raw_value(parts).ok()
}

/// The decoded blocks of an object.
#[derive(Clone, Debug, Default)]
pub struct Decoded {
    /// Their hashes.
    pub parts: Arc<PartHashes>,
    /// Their content; `None` if something in them is not understood.
    pub content: Option<Arc<CompiledPolicy>>,
}

/// Blocks that were decoded before.
struct CachedBlocks {
    parts: Arc<PartHashes>,
    content: Weak<CompiledPolicy>,
}

/// All contents in use, each once.
#[derive(Default)]
pub struct Contents {
    all: HashMap<Hash, Weak<CompiledPolicy>>,
    /// By the SHA-256 of the bytes: API servers write equal objects in equal bytes.
    decoded: HashMap<[u8; 32], CachedBlocks>,
    swept: usize,
}

impl Contents {
    /// The shared content with this policy.
    pub fn of(&mut self, policy: PolicySet) -> Arc<CompiledPolicy> {
        self.sweep();
        let form = |fields| Form {
            parts: PartHashes::of(&spec(&policy, fields)),
            encoded: OnceLock::new(),
        };
        let current = form(SpecFields::All);
        let hash = current.parts.hash("", false);
        if let Some(known) = self.all.get(&hash).and_then(Weak::upgrade) {
            return known;
        }
        let content = Arc::new(CompiledPolicy {
            form: current,
            old_form: form(SpecFields::WithoutQuantities),
            policy,
        });
        self.all.insert(hash, Arc::downgrade(&content));
        content
    }

    /// Decodes the blocks of an object, unless equal ones are cached.
    pub fn decode(&mut self, blocks: &Blocks) -> Decoded {
        let key = blocks.digest();
        let known = self.decoded.get(&key);
        let known =
            known.and_then(|known| Some((Arc::clone(&known.parts), known.content.upgrade()?)));
        if let Some((parts, content)) = known {
            let content = Some(content);
            return Decoded { parts, content };
        }
        let known = self.decode_uncached(blocks);
        if let Some(content) = &known.content {
            let parts = Arc::clone(&known.parts);
            let content = Arc::downgrade(content);
            self.decoded.insert(key, CachedBlocks { parts, content });
        }
        known
    }

    fn decode_uncached(&mut self, blocks: &Blocks) -> Decoded {
        let spec = blocks.spec();
        let parts = PartHashes::of(&spec);
        let read = spec.read().ok().filter(|read| read.refused.is_empty());
        // The object may have another order than we write; the hash is of what it contains.
        let content = read.map(|read| self.of(read.policy));
        Decoded {
            parts: Arc::new(parts),
            content,
        }
    }

    fn sweep(&mut self) {
        if self.all.len() + self.decoded.len() < self.swept + SWEEP_AFTER {
            return;
        }
        self.all.retain(|_, content| content.strong_count() > 0);
        self.decoded
            .retain(|_, known| known.content.strong_count() > 0);
        self.swept = self.all.len() + self.decoded.len();
    }
}

/// The desired spec of one node's `NodeWatermark`.
#[derive(Clone, Debug)]
pub struct DesiredSpec {
    /// UID of the Node.
    pub node_uid: String,
    /// Rules, actions and pod policies.
    pub content: Arc<CompiledPolicy>,
    /// `spec.softenScheduling`.
    pub soften: bool,
    /// What the node's agent reads.
    pub fields: SpecFields,
    /// `spec.sources`.
    pub sources: Arc<[String]>,
}

impl DesiredSpec {
    /// `spec.hash`.
    pub fn hash(&self) -> Hash {
        let parts = &self.content.form(self.fields).parts;
        parts.hash(&self.node_uid, self.soften)
    }
}

impl Serialize for DesiredSpec {
    /// As [`NodeWatermarkSpec`], from blocks that are encoded once for all nodes. Includes empty fields: the API server would leave
    /// what others wrote in a field that is not applied.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut spec = serializer.serialize_struct("NodeWatermarkSpec", 7)?;
        spec.serialize_field("nodeUID", &self.node_uid)?;
        spec.serialize_field("hash", &self.hash().to_string())?;
        let [rules, actions, pods] = self.content.encoded(self.fields);
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
