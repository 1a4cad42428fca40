//! Objects as API servers send them, read only as far as they are used: of a `NodeWatermark` most bytes are the same on
//! many nodes, and are left as they stand until it is known whether equal ones were read before.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use kube::core::object::Object;
use ring::digest::{Context, SHA256};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::cluster::taint;
use crate::crd::{NodeWatermarkSpec, NodeWatermarkStatus};
use crate::engine::policy::{NodeFacts, TaintEffect};

/// In whose name the controller writes.
pub const FIELD_MANAGER: &str = "plimsoll-controller";

/// A `NodeWatermark` with every field of its spec as it stands.
pub type WatermarkObject = Object<Option<BTreeMap<String, Box<RawValue>>>, Box<RawValue>>;
/// A Node, as far as it is used.
pub type NodeObject = Object<Option<NodeSpec>, NodeStatus>;

/// What is used of a Node's spec.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeSpec {
    #[serde(default)]
    taints: Vec<Taint>,
}

#[derive(Clone, Debug, Deserialize)]
struct Taint {
    key: String,
    effect: String,
}

impl Taint {
    fn is_ours(&self) -> bool {
        let effects =
            [TaintEffect::NoSchedule, TaintEffect::PreferNoSchedule].map(TaintEffect::name);
        self.key == taint::KEY && effects.contains(&self.effect.as_str())
    }
}

/// What is used of a Node's status.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeStatus {
    #[serde(default)]
    capacity: BTreeMap<String, String>,
    #[serde(default)]
    conditions: Vec<NodeCondition>,
    #[serde(default, rename = "nodeInfo")]
    node_info: NodeInfo,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct NodeInfo {
    #[serde(default, rename = "bootID")]
    boot_id: String,
}

impl NodeStatus {
    /// Of the boot that its kubelet runs in; empty: it does not say.
    pub fn boot_id(&self) -> &str {
        &self.node_info.boot_id
    }
}

#[derive(Clone, Debug, Deserialize)]
struct NodeCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

/// A node as it is now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeSeen {
    /// `metadata.uid`.
    pub uid: String,
    /// What compiling has to know.
    pub facts: NodeFacts,
    /// Its kubelet says that it is Ready.
    pub ready: bool,
    /// A taint of our key is on it.
    pub tainted: bool,
    /// Its condition says that it is over a mark.
    pub interferes: bool,
}

impl NodeSeen {
    /// Of an object as an API server sends it.
    pub fn of(node: NodeObject) -> Self {
        let status = node.status.unwrap_or_default();
        let taints = node.spec.unwrap_or_default().taints;
        let is_true = |kind: &str| {
            let conditions = &mut status.conditions.iter();
            conditions.any(|it| it.kind == kind && it.status == "True")
        };
        Self {
            uid: node.metadata.uid.unwrap_or_default(),
            ready: is_true("Ready"),
            tainted: taints.iter().any(Taint::is_ours),
            interferes: is_true(taint::CONDITION),
            facts: NodeFacts::of_capacity(node.metadata.labels.unwrap_or_default(), |name| {
                status.capacity.get(name).map(String::as_str)
            }),
        }
    }
}

/// Rules, actions and pod policies of a spec, as they stand.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    rules: Option<Box<RawValue>>,
    actions: Option<Box<RawValue>>,
    pod_policies: Option<Box<RawValue>>,
}

impl Blocks {
    /// The SHA-256 of the bytes.
    pub fn digest(&self) -> [u8; 32] {
        let mut context = Context::new(&SHA256);
        for block in [&self.rules, &self.actions, &self.pod_policies] {
            let text = block.as_ref().map_or("", |block| block.get());
            context.update(&text.len().to_le_bytes());
            context.update(text.as_bytes());
        }
        let mut digest = [0; 32];
        digest.copy_from_slice(context.finish().as_ref());
        digest
    }

    /// A spec of these blocks and nothing else.
    pub fn spec(&self) -> NodeWatermarkSpec {
        NodeWatermarkSpec {
            rules: read(self.rules.as_deref()),
            actions: read(self.actions.as_deref()),
            pod_policies: read(self.pod_policies.as_deref()),
            ..NodeWatermarkSpec::default()
        }
    }
}

/// Tells one list of sources from another.
pub fn sources_print(sources: &[String]) -> u64 {
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    hasher.finish()
}

fn read<T: DeserializeOwned + Default>(block: Option<&RawValue>) -> T {
    let read = block.and_then(|block| serde_json::from_str(block.get()).ok());
    read.unwrap_or_default()
}

/// A `NodeWatermark` as it is now.
#[derive(Clone, Debug, Default)]
pub struct Watermark {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.generation`.
    pub generation: i64,
    /// `spec.nodeUID`.
    pub node_uid: String,
    /// `spec.hash`.
    pub hash: String,
    /// `spec.softenScheduling`.
    pub softened: bool,
    /// The spec says more than this version understands.
    pub more: bool,
    /// Who else wrote the spec last, as far as the API server knows.
    pub edited_by: Option<String>,
    /// Tells one `spec.sources` from another.
    pub sources: u64,
    /// The rest of the spec.
    pub blocks: Blocks,
    status: Option<Box<RawValue>>,
    /// The status once it was read.
    said: OnceCell<NodeWatermarkStatus>,
}

impl Watermark {
    /// Of an object as an API server sends it.
    pub fn of(object: WatermarkObject) -> Self {
        let ObjectMeta {
            uid,
            generation,
            managed_fields,
            ..
        } = object.metadata;
        let mut seen = Self {
            uid: uid.unwrap_or_default(),
            generation: generation.unwrap_or(0),
            edited_by: editor(managed_fields.unwrap_or_default()),
            status: object.status,
            ..Self::default()
        };
        for (field, value) in object.spec.unwrap_or_default() {
            seen.take(&field, value);
        }
        seen
    }

    /// Of an object in JSON.
    ///
    /// # Errors
    /// It is no object of the API.
    pub fn of_value(object: &Value) -> serde_json::Result<Self> {
        WatermarkObject::deserialize(object).map(Self::of)
    }

    fn take(&mut self, field: &str, value: Box<RawValue>) {
        match field {
            "nodeUID" => self.node_uid = read(Some(&value)),
            "hash" => self.hash = read(Some(&value)),
            "softenScheduling" => self.softened = read(Some(&value)),
            "rules" => self.blocks.rules = Some(value),
            "actions" => self.blocks.actions = Some(value),
            "podPolicies" => self.blocks.pod_policies = Some(value),
            "sources" => self.sources = sources_print(&read::<Vec<String>>(Some(&value))),
            _ => self.more = true,
        }
    }

    /// Whether anybody has said anything about the node.
    pub const fn has_status(&self) -> bool {
        self.status.is_some()
    }

    /// Tells one status from another.
    pub fn status_print(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let text = self.status.as_ref().map(|status| status.get());
        text.hash(&mut hasher);
        hasher.finish()
    }

    /// What the agent says, read when it is first asked for; what can't be read is as if it said nothing.
    pub fn status(&self) -> &NodeWatermarkStatus {
        self.said.get_or_init(|| read(self.status.as_deref()))
    }
}

/// Who, the controller aside, wrote anything but the status last.
fn editor(entries: Vec<ManagedFieldsEntry>) -> Option<String> {
    let others = entries.into_iter().filter(|entry| {
        entry.subresource.is_none() && entry.manager.as_deref() != Some(FIELD_MANAGER)
    });
    others.max_by_key(|entry| entry.time.clone())?.manager
}
