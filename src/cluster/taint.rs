//! Our taints and our condition on a Node. Everything else there belongs to others.
//!
//! `spec.taints` is one atomic list, so server-side apply would own all of it. It is edited by a JSON patch that tests the
//! resourceVersion, and is read again after a conflict.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{DynamicObject, ObjectMeta, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::{Value, json};
use thiserror::Error;

use super::backoff::backoff;
use super::client::{CallError, call, stored};
use crate::clock;
use crate::crd::crane_annotations::CraneAnnotations;
use crate::crd::load_label;
use crate::engine::policy::TaintEffect;

/// The key of our taint: crane's, so that existing tolerations still match.
pub const KEY: &str = "interference.crane.io";
/// The key of the soft taint (`PreferNoSchedule`) of a busy node: its load is at least 95 % of its load line.
pub const BUSY_KEY: &str = "plimsoll.dev/busy";
/// The type of our condition.
pub const CONDITION: &str = "InterferenceIdentified";
/// The reason of the condition while it is False.
const NO_INTERFERENCE: &str = "NoInterference";

/// What failed, in errors.
const CHANGE_TAINTS: &str = "change the taints of";
const CHANGE_CONDITION: &str = "set the condition of";
/// Attempts to write before a conflict is reported.
const MAX_ATTEMPTS: usize = 10;
const MIN_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_millis(250);

/// The taint and condition of a node that new pods should avoid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeTaint {
    /// Effect of the taint.
    pub effect: TaintEffect,
    /// Reason of the condition: the rule that wants the taint.
    pub reason: String,
    /// Message of the condition.
    pub message: String,
}

/// The desired state of our taint and condition on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DesiredTaint<'a> {
    /// Taint and condition are set.
    Present(&'a NodeTaint),
    /// No taint; the condition is False if it exists.
    Absent,
    /// Neither taint nor condition.
    Removed,
}

impl DesiredTaint<'_> {
    const fn effect(self) -> Option<TaintEffect> {
        match self {
            Self::Present(taint) => Some(taint.effect),
            Self::Absent | Self::Removed => None,
        }
    }
}

/// The desired state of everything of ours on a node but its label and crane's annotations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desired<'a> {
    /// The taint and condition of rules that disable scheduling.
    pub taint: DesiredTaint<'a>,
    /// The taint [`BUSY_KEY`] is set.
    pub busy: bool,
}

impl<'a> From<DesiredTaint<'a>> for Desired<'a> {
    /// Not busy.
    fn from(taint: DesiredTaint<'a>) -> Self {
        Self { taint, busy: false }
    }
}

/// The taints of a Node, our label, crane's annotations and our condition on it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeSnapshot {
    /// `metadata.name`
    pub name: String,
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.resourceVersion`
    pub version: String,
    /// `spec.taints`, including fields that we don't know.
    taints: Option<Vec<Value>>,
    condition: Option<Value>,
    load_label: Option<String>,
    crane: CraneAnnotations,
}

/// Why taint or condition could not be changed. The node is as before.
#[derive(Debug, Error)]
pub enum TaintError {
    /// The node is gone.
    #[error("failed to {0} node {1}: there is no such node")]
    NoNode(&'static str, String),
    /// The node was deleted and created again.
    #[error("failed to {0} node {1}: another node has its name now")]
    Replaced(&'static str, String),
    /// Every attempt conflicted with another writer.
    #[error(
        "failed to {CHANGE_TAINTS} node {0}: {MAX_ATTEMPTS} attempts conflicted with other writers"
    )]
    Contended(String),
    /// The API server refused, or did not answer.
    #[error("failed to {verb} node {node}: {}", source.message())]
    Call {
        /// What was tried.
        verb: &'static str,
        /// Which node.
        node: String,
        /// Why.
        source: CallError,
    },
}

impl TaintError {
    /// The delay before a retry that the server asks for.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Call { source, .. } => source.retry_after(),
            _ => None,
        }
    }

    fn call(verb: &'static str, node: &str, source: CallError) -> Self {
        let node = node.to_owned();
        if source.is_not_found() {
            return Self::NoNode(verb, node);
        }
        Self::Call { verb, node, source }
    }
}

impl NodeSnapshot {
    /// From a Node in JSON.
    #[cfg(test)]
    pub(crate) fn of(node: &Value) -> Self {
        let meta = serde_json::from_value(node["metadata"].clone()).unwrap_or_default();
        Self::new(
            &meta,
            &node["spec"]["taints"],
            &node["status"]["conditions"],
        )
    }

    /// From a Node's `metadata`, `spec.taints` and `status.conditions`.
    pub fn new(meta: &ObjectMeta, taints: &Value, conditions: &Value) -> Self {
        let mut conditions = conditions.as_array().into_iter().flatten();
        let labels = meta.labels.as_ref();
        Self {
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
            version: meta.resource_version.clone().unwrap_or_default(),
            taints: taints.as_array().cloned(),
            condition: conditions.find(|it| it["type"] == CONDITION).cloned(),
            load_label: labels.and_then(|labels| labels.get(load_label::KEY).cloned()),
            crane: CraneAnnotations::of(meta.annotations.as_ref()),
        }
    }

    /// The text of the label `plimsoll.dev/load`, whoever wrote it.
    pub fn load_label(&self) -> Option<&str> {
        self.load_label.as_deref()
    }

    /// crane's annotations, whoever wrote them.
    pub const fn crane(&self) -> &CraneAnnotations {
        &self.crane
    }

    /// Whether it has the taint [`BUSY_KEY`].
    pub fn is_busy(&self) -> bool {
        self.taints.iter().flatten().any(is_busy)
    }

    /// The effect of our taint; the strongest one if there are two.
    pub fn effect(&self) -> Option<TaintEffect> {
        self.taints.iter().flatten().filter_map(ours).max()
    }

    /// Whether one of our taints or our label is there, or our condition is not False.
    pub fn needs_cleanup(&self) -> bool {
        !self.matches(DesiredTaint::Absent) || self.load_label.is_some()
    }

    /// Whether the node is in the desired state already.
    pub fn matches<'a>(&self, wanted: impl Into<Desired<'a>>) -> bool {
        let wanted = wanted.into();
        self.edited(wanted.taint.effect(), wanted.busy).is_none()
            && self.has_condition(wanted.taint)
    }

    /// Whether this is a later state of the node than `other`.
    pub fn is_newer_than(&self, other: &Self) -> bool {
        let order = |it: &Self| it.version.parse::<u64>();
        match (order(self), order(other)) {
            (Ok(own), Ok(others)) if self.uid == other.uid => own > others,
            _ => true,
        }
    }

    /// The desired taints; `None` if nothing changes. Other taints keep their order and fields.
    fn edited(&self, mut effect: Option<TaintEffect>, mut busy: bool) -> Option<Vec<Value>> {
        let before = self.taints.as_deref().unwrap_or_default();
        let mut after = Vec::with_capacity(before.len() + 1);
        for taint in before {
            let stays = if is_busy(taint) {
                std::mem::take(&mut busy)
            } else {
                match ours(taint) {
                    Some(there) if Some(there) == effect => effect.take().is_some(),
                    there => there.is_none(),
                }
            };
            if stays {
                after.push(taint.clone());
            }
        }
        if let Some(effect) = effect {
            after.push(json!({"key": KEY, "effect": effect.name()}));
        }
        if busy {
            let effect = TaintEffect::PreferNoSchedule.name();
            after.push(json!({"key": BUSY_KEY, "effect": effect}));
        }
        (after != before).then_some(after)
    }

    /// The patch, which applies only to the version that was read.
    fn patch(&self, effect: Option<TaintEffect>, busy: bool) -> Option<Value> {
        let taints = self.edited(effect, busy)?;
        let edit = if taints.is_empty() {
            json!({"op": "remove", "path": "/spec/taints"})
        } else {
            json!({"op": "add", "path": "/spec/taints", "value": taints})
        };
        let test = |path, value| json!({"op": "test", "path": path, "value": value});
        Some(json!([
            test("/metadata/uid", &self.uid),
            test("/metadata/resourceVersion", &self.version),
            edit,
        ]))
    }

    /// Whether the condition is as desired. None is created just to be False.
    fn has_condition(&self, wanted: DesiredTaint<'_>) -> bool {
        match (&self.condition, wanted) {
            (None, DesiredTaint::Absent | DesiredTaint::Removed) => true,
            (None, DesiredTaint::Present(_)) | (Some(_), DesiredTaint::Removed) => false,
            (Some(condition), DesiredTaint::Absent) => condition["status"] == "False",
            (Some(condition), DesiredTaint::Present(taint)) => {
                condition["status"] == "True"
                    && condition["reason"] == taint.reason.as_str()
                    && condition["message"] == taint.message.as_str()
            }
        }
    }

    /// A strategic merge patch of the status: conditions are merged by type, so others are left alone.
    fn condition_patch(&self, wanted: DesiredTaint<'_>, now: &str) -> Value {
        let (status, reason, message) = match wanted {
            DesiredTaint::Present(taint) => ("True", &*taint.reason, &*taint.message),
            DesiredTaint::Absent => ("False", NO_INTERFERENCE, "no rule keeps new pods away"),
            DesiredTaint::Removed => {
                let condition = json!({"type": CONDITION, "$patch": "delete"});
                return self.status_patch(&condition);
            }
        };
        let before = self.condition.as_ref().filter(|it| it["status"] == status);
        let since = before.and_then(|it| it["lastTransitionTime"].as_str());
        self.status_patch(&json!({
            "type": CONDITION,
            "status": status,
            "reason": reason,
            "message": message,
            "lastHeartbeatTime": now,
            "lastTransitionTime": since.unwrap_or(now),
        }))
    }

    fn status_patch(&self, condition: &Value) -> Value {
        json!({"metadata": {"uid": self.uid}, "status": {"conditions": [condition]}})
    }
}

/// The effect of a taint that is ours: it has our key and an effect that we use.
fn ours(taint: &Value) -> Option<TaintEffect> {
    if taint["key"] != KEY {
        return None;
    }
    [TaintEffect::NoSchedule, TaintEffect::PreferNoSchedule]
        .into_iter()
        .find(|effect| taint["effect"] == effect.name())
}

/// Whether it is the taint of a busy node.
fn is_busy(taint: &Value) -> bool {
    taint["key"] == BUSY_KEY && taint["effect"] == TaintEffect::PreferNoSchedule.name()
}

/// Reads a node.
///
/// # Errors
/// There is no such node, or it can't be read.
pub async fn read(client: &Client, node: &str) -> Result<NodeSnapshot, TaintError> {
    let api = nodes(client);
    let object = call(stored(api.get(node))).await;
    object
        .map(|object| snapshot(&object))
        .map_err(|source| TaintError::call("read", node, source))
}

/// Brings the node to the desired state: first the taint, then the condition. Writes only what differs. `seen` may be outdated: the
/// node is read again after a conflict. Returns the node as it is then.
///
/// # Errors
/// Something could not be written: the caller has to retry.
pub async fn reconcile(
    client: &Client,
    seen: NodeSnapshot,
    wanted: impl Into<Desired<'_>>,
) -> Result<NodeSnapshot, TaintError> {
    let wanted = wanted.into();
    let seen = apply_taint(client, seen, wanted).await?;
    let wanted = wanted.taint;
    if seen.has_condition(wanted) {
        return Ok(seen);
    }
    let now = format!("{:.0}", clock::wall_time());
    let patch = Patch::Strategic(seen.condition_patch(wanted, &now));
    let api = nodes(client);
    let patched = call(stored(api.patch_status(
        &seen.name,
        &PatchParams::default(),
        &patch,
    )))
    .await;
    match patched {
        Ok(object) => Ok(snapshot(&object)),
        Err(error) if error.code() == Some(409) => {
            Err(TaintError::Replaced(CHANGE_CONDITION, seen.name))
        }
        Err(source) => Err(TaintError::call(CHANGE_CONDITION, &seen.name, source)),
    }
}

async fn apply_taint(
    client: &Client,
    mut seen: NodeSnapshot,
    wanted: Desired<'_>,
) -> Result<NodeSnapshot, TaintError> {
    let api = nodes(client);
    for pause in backoff(MIN_PAUSE, MAX_PAUSE).take(MAX_ATTEMPTS) {
        let Some(patch) = seen.patch(wanted.taint.effect(), wanted.busy) else {
            return Ok(seen);
        };
        let refusal = match call(patch_taints(&api, &seen.name, patch)).await {
            Ok(object) => return Ok(snapshot(&object)),
            // The object has changed, or an admission policy refuses this.
            Err(refusal) if matches!(refusal.code(), Some(409 | 422)) => refusal,
            Err(source) => return Err(TaintError::call(CHANGE_TAINTS, &seen.name, source)),
        };
        tokio::time::sleep(pause).await;
        let now = read(client, &seen.name).await?;
        if now.uid != seen.uid {
            return Err(TaintError::Replaced(CHANGE_TAINTS, seen.name));
        }
        if now.version == seen.version {
            return Err(TaintError::call(CHANGE_TAINTS, &seen.name, refusal));
        }
        seen = now;
    }
    Err(TaintError::Contended(seen.name))
}

async fn patch_taints(
    api: &Api<DynamicObject>,
    node: &str,
    patch: Value,
) -> kube::Result<DynamicObject> {
    let patch = serde_json::from_value(patch).map_err(kube::Error::SerdeError)?;
    let patch = Patch::<()>::Json(patch);
    stored(api.patch(node, &PatchParams::default(), &patch)).await
}

fn nodes(client: &Client) -> Api<DynamicObject> {
    Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()))
}

fn snapshot(object: &DynamicObject) -> NodeSnapshot {
    let data = &object.data;
    NodeSnapshot::new(
        &object.metadata,
        &data["spec"]["taints"],
        &data["status"]["conditions"],
    )
}

#[cfg(test)]
mod tests;
