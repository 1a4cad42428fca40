//! Objects as the API server sends them, decoded only as far as they are used. Most bytes of a `NodeWatermark` are the same on many
//! nodes; they stay undecoded until it is known whether equal ones were decoded before.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ManagedFieldsEntry, ObjectMeta};
use kube::core::object::Object;
use ring::digest::{Context, SHA256};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::cluster::taint;
use crate::crd::{NodeWatermarkSpec, NodeWatermarkStatus, load_label};
use crate::engine::policy::{NodeFacts, TaintEffect};

/// The field manager of the controller's writes.
pub const FIELD_MANAGER: &str = "plimsoll-controller";

/// A `NodeWatermark` with every field of its spec undecoded.
pub type WatermarkObject = Object<Option<BTreeMap<String, Box<RawValue>>>, Box<RawValue>>;
/// The fields of a Node that are used.
pub type NodeObject = Object<Option<NodeSpec>, NodeStatus>;

/// The fields of a Node's spec that are used.
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

    fn is_busy(&self) -> bool {
        self.key == taint::BUSY_KEY && self.effect == TaintEffect::PreferNoSchedule.name()
    }
}

/// The fields of a Node's status that are used.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct NodeStatus {
    #[serde(default)]
    capacity: BTreeMap<String, String>,
    #[serde(default)]
    conditions: Vec<NodeCondition>,
    #[serde(default, rename = "nodeInfo")]
    node_info: NodeInfo,
    #[serde(default)]
    addresses: Vec<NodeAddress>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAddress {
    #[serde(rename = "type")]
    kind: String,
    address: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct NodeInfo {
    #[serde(default, rename = "bootID")]
    boot_id: String,
}

impl NodeStatus {
    /// `status.nodeInfo.bootID`; empty if absent.
    pub fn boot_id(&self) -> &str {
        &self.node_info.boot_id
    }

    /// The internal addresses in `status.addresses`.
    pub fn internal_addresses(&self) -> Vec<IpAddr> {
        let internal = self.addresses.iter().filter(|it| it.kind == "InternalIP");
        internal.filter_map(|it| it.address.parse().ok()).collect()
    }
}

#[derive(Clone, Debug, Deserialize)]
struct NodeCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
}

/// A node as last seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObservedNode {
    /// `metadata.uid`.
    pub uid: String,
    /// What compilation needs.
    pub facts: NodeFacts,
    /// Its condition Ready is True.
    pub ready: bool,
    /// It has our taint.
    pub tainted: bool,
    /// Our condition `InterferenceIdentified` is True.
    pub interference_identified: bool,
    /// What schedulers see of its load.
    pub load: LoadSigns,
}

/// What schedulers see of a node's load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadSigns {
    /// The node has the label `plimsoll.dev/load`.
    pub labelled: bool,
    /// It has the taint `plimsoll.dev/busy`.
    pub busy: bool,
}

impl ObservedNode {
    /// From an object of the API server.
    pub fn of(node: NodeObject) -> Self {
        let status = node.status.unwrap_or_default();
        let taints = node.spec.unwrap_or_default().taints;
        let is_true = |kind: &str| {
            let conditions = &mut status.conditions.iter();
            conditions.any(|it| it.kind == kind && it.status == "True")
        };
        let mut labels = node.metadata.labels.unwrap_or_default();
        // It changes often, and no policy may select by it.
        let labelled = labels.remove(load_label::KEY).is_some();
        let load = LoadSigns {
            labelled,
            busy: taints.iter().any(Taint::is_busy),
        };
        Self {
            load,
            uid: node.metadata.uid.unwrap_or_default(),
            ready: is_true("Ready"),
            tainted: taints.iter().any(Taint::is_ours),
            interference_identified: is_true(taint::CONDITION),
            facts: NodeFacts::of_capacity(
                labels,
                status
                    .capacity
                    .iter()
                    .map(|(name, amount)| (name.as_str(), amount.as_str())),
            ),
        }
    }
}

/// Rules, actions and pod policies of a spec, undecoded.
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

    /// A spec with only these blocks.
    pub fn spec(&self) -> NodeWatermarkSpec {
        NodeWatermarkSpec {
            rules: read(self.rules.as_deref()),
            actions: read(self.actions.as_deref()),
            pod_policies: read(self.pod_policies.as_deref()),
            ..NodeWatermarkSpec::default()
        }
    }
}

/// A fingerprint of a list of sources.
pub fn sources_fingerprint(sources: &[String]) -> u64 {
    let mut hasher = DefaultHasher::new();
    sources.hash(&mut hasher);
    hasher.finish()
}

fn read<T: DeserializeOwned + Default>(block: Option<&RawValue>) -> T {
    let read = block.and_then(|block| serde_json::from_str(block.get()).ok());
    read.unwrap_or_default()
}

/// A `NodeWatermark` as last seen.
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
    pub soften_scheduling: bool,
    /// The spec has fields unknown to this version.
    pub has_unknown_fields: bool,
    /// The last other field manager that wrote the spec.
    pub edited_by: Option<String>,
    /// Fingerprint of `spec.sources`.
    pub sources: u64,
    /// Rules, actions and pod policies.
    pub blocks: Blocks,
    status: Option<Box<RawValue>>,
    /// The status once it was decoded.
    decoded_status: OnceCell<NodeWatermarkStatus>,
}

impl Watermark {
    /// From an object of the API server.
    pub fn of(object: WatermarkObject) -> Self {
        let ObjectMeta {
            uid,
            generation,
            managed_fields,
            ..
        } = object.metadata;
        let mut watermark = Self {
            uid: uid.unwrap_or_default(),
            generation: generation.unwrap_or(0),
            edited_by: editor(managed_fields.unwrap_or_default()),
            status: object.status,
            ..Self::default()
        };
        for (field, value) in object.spec.unwrap_or_default() {
            watermark.set_field(&field, value);
        }
        watermark
    }

    /// From an object in JSON.
    ///
    /// # Errors
    /// It is not a valid object.
    pub fn of_value(object: &Value) -> serde_json::Result<Self> {
        WatermarkObject::deserialize(object).map(Self::of)
    }

    fn set_field(&mut self, field: &str, value: Box<RawValue>) {
        match field {
            "nodeUID" => self.node_uid = read(Some(&value)),
            "hash" => self.hash = read(Some(&value)),
            "softenScheduling" => self.soften_scheduling = read(Some(&value)),
            "rules" => self.blocks.rules = Some(value),
            "actions" => self.blocks.actions = Some(value),
            "podPolicies" => self.blocks.pod_policies = Some(value),
            "sources" => self.sources = sources_fingerprint(&read::<Vec<String>>(Some(&value))),
            _ => self.has_unknown_fields = true,
        }
    }

    /// Whether the object has a status.
    pub const fn has_status(&self) -> bool {
        self.status.is_some()
    }

    /// A fingerprint of the status.
    pub fn status_fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let text = self.status.as_ref().map(|status| status.get());
        text.hash(&mut hasher);
        hasher.finish()
    }

    /// The status, decoded on first use; empty if it can't be decoded.
    pub fn status(&self) -> &NodeWatermarkStatus {
        self.decoded_status
            .get_or_init(|| read(self.status.as_deref()))
    }
}

/// The field manager, except the controller, that last wrote anything but the status.
fn editor(entries: Vec<ManagedFieldsEntry>) -> Option<String> {
    let others = entries.into_iter().filter(|entry| {
        entry.subresource.is_none() && entry.manager.as_deref() != Some(FIELD_MANAGER)
    });
    others.max_by_key(|entry| entry.time.clone())?.manager
}
