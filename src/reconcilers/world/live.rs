//! What is kept in memory of one `NodeWatermark`.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::super::catalog::Key;
use super::super::content::Content;
use crate::crd::node_watermark::{Hash, scheduling};
use crate::crd::{Kind, NodeWatermarkSpec, NodeWatermarkStatus};
use crate::engine::policy::{PolicySet, Rule, Strategy, TaintEffect};

/// One `NodeWatermark` as it was last seen.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// UID of the object.
    pub uid: String,
    generation: i64,
    /// Of what stands in the spec; `None` where it is not what the field `hash` says: somebody else wrote it.
    pub hash: Option<Hash>,
    /// `spec.softenScheduling`.
    pub softened: bool,
    node_uid: String,
    content: Option<Arc<Content>>,
    pub(super) status: Status,
}

/// What is used of the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Status {
    /// Our taint with effect `NoSchedule` is on the node.
    pub(super) closed: bool,
    /// Pods are throttled, or were evicted in the last hour.
    pub(super) acts_on_pods: bool,
    /// Some Preview rule would act.
    pub(super) would: bool,
    /// Each rule that is Breached or Cooling, with its value over its mark.
    pub(super) active: BTreeMap<String, f64>,
}

impl Live {
    /// Reads an object as an API server gives it; what can't be read is as if somebody else wrote it.
    pub fn of(object: &Value) -> Self {
        let metadata = &object["metadata"];
        let spec: NodeWatermarkSpec =
            serde_json::from_value(object["spec"].clone()).unwrap_or_default();
        let status: NodeWatermarkStatus =
            serde_json::from_value(object["status"].clone()).unwrap_or_default();
        let hash = spec.content_hash();
        let ours = hash.to_string() == spec.hash && spec.other.is_empty();
        let read = if ours { spec.read().ok() } else { None };
        let content = read.filter(|read| read.refused.is_empty());
        Self {
            uid: metadata["uid"].as_str().unwrap_or_default().to_owned(),
            generation: metadata["generation"].as_i64().unwrap_or(0),
            hash: ours.then_some(hash),
            softened: spec.soften_scheduling,
            content: content.map(|read| Content::new(hard(&spec, read.policy))),
            node_uid: spec.node_uid,
            status: Status::of(&status),
        }
    }

    /// Drops its content for an equal one that other nodes have too.
    pub(super) fn sharing(mut self, content: Option<&Arc<Content>>) -> Self {
        if let (Some(own), Some(shared)) = (&mut self.content, content)
            && own.policy == shared.policy
        {
            *own = Arc::clone(shared);
        }
        self
    }

    /// What a node of this UID keeps by it.
    pub(super) fn content_for(&self, node_uid: &str) -> Option<&Arc<Content>> {
        let content = self.content.as_ref();
        content.filter(|_| self.node_uid == node_uid)
    }

    /// Whether this was seen after `other`: a watch may lag behind the answer to a write.
    pub(super) fn is_newer_than(&self, other: &Self) -> bool {
        self.uid == other.uid && self.generation > other.generation
    }

    /// Whether somebody else has written since.
    pub(super) fn was_ours_before(&self, now: &Self) -> bool {
        self.uid == now.uid && self.hash.is_some() && now.hash.is_none()
    }

    /// Whether the node acts for an object.
    pub(super) fn acts(&self, key: &Key) -> bool {
        if key.0 == Kind::PodQos {
            return self.status.acts_on_pods;
        }
        let prefix = format!("{}/", key.1);
        let mut active = self.status.active.keys();
        active.any(|rule| rule.starts_with(&prefix))
    }

    /// The largest value over mark of the rules that want the node closed; `None` where none does.
    pub(super) fn over(&self, policy: &PolicySet) -> Option<f64> {
        let wants = policy.rules.iter().filter(|rule| closes(rule));
        let over = wants.filter_map(|rule| self.status.active.get(&*rule.id.0));
        over.copied().max_by(f64::total_cmp)
    }
}

/// The policy without the softening: it was read with it.
fn hard(spec: &NodeWatermarkSpec, policy: PolicySet) -> PolicySet {
    if !spec.soften_scheduling {
        return policy;
    }
    let hard = NodeWatermarkSpec {
        soften_scheduling: false,
        ..spec.clone()
    };
    hard.read().map_or(policy, |read| read.policy)
}

/// Whether a rule closes its node.
pub(super) fn closes(rule: &Rule) -> bool {
    rule.strategy == Strategy::Enforce && rule.action.scheduling == Some(TaintEffect::NoSchedule)
}

impl Status {
    fn of(status: &NodeWatermarkStatus) -> Self {
        let active = status.rules.iter().filter(|rule| rule.state != "Normal");
        let counts = status.counts.clone().unwrap_or_default();
        let state = status.scheduling.as_ref().map(|s| s.state.as_str());
        Self {
            closed: state == Some(scheduling::NO_SCHEDULE),
            acts_on_pods: counts.throttled > 0 || counts.evicted_last_hour > 0,
            would: counts.would > 0 || !status.would.is_empty(),
            active: active
                .map(|rule| (rule.id.clone(), rule.value.unwrap_or(0.0) / rule.mark))
                .collect(),
        }
    }
}
