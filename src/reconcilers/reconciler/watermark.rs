//! What is kept in memory of one `NodeWatermark`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::super::catalog::Key;
use super::super::content::{Content, Contents};
use super::super::wire::{Watermark, sources_print};
use crate::crd::node_watermark::{Hash, RuleStatus, SchedulingStatus, condition, scheduling};
use crate::crd::{Kind, NodeWatermarkStatus};
use crate::engine::policy::{PolicySet, Rule, Strategy, TaintEffect};
use crate::ordered;

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
    /// Tells one `spec.sources` from another.
    sources: u64,
    /// Its agent says that it keeps this spec.
    pub(super) keeps: bool,
    status_print: u64,
    pub(super) status: Arc<Status>,
}

/// What is used of the status.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Status {
    /// The hash of the spec that the agent keeps; `None` where there is none, or it says that it is not Ready.
    observed: Option<Box<str>>,
    /// Our taint with effect `NoSchedule` is on the node.
    pub(super) closed: bool,
    /// Our taint is on the node, whatever its effect.
    pub(super) disabled: bool,
    /// Pods that are throttled.
    pub(super) throttled: usize,
    /// Pods are throttled, or were evicted in the last hour.
    pub(super) acts_on_pods: bool,
    /// The `NodeQOS` of which some Preview rule would act.
    pub(super) would: BTreeSet<String>,
    /// Each rule that is Breached or Cooling.
    pub(super) active: BTreeMap<String, Active>,
    /// How many pods each `PodQOS` matches; one that is not there is not known.
    pub(super) matched: BTreeMap<String, i64>,
}

/// A rule that is Breached or Cooling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Active {
    /// Its value over its mark: 1.2 is 20 % over.
    over: f64,
    /// It acts: its strategy, as its agent keeps it, is not `Preview`.
    acts: bool,
}

impl Live {
    /// Reads an object; what can't be read is as if somebody else wrote it. `before` is how it was seen before.
    pub(super) fn of(seen: &Watermark, contents: &mut Contents, before: Option<&Self>) -> Self {
        let known = contents.read(&seen.blocks);
        let hash = known.parts.hash(&seen.node_uid, seen.softened);
        let ours = hash.to_string() == seen.hash && !seen.more;
        let status_print = seen.status_print();
        let status = match before {
            Some(before) if before.status_print == status_print => Arc::clone(&before.status),
            _ => Arc::new(Status::of(seen.status())),
        };
        Self {
            uid: seen.uid.clone(),
            generation: seen.generation,
            hash: ours.then_some(hash),
            keeps: ours && status.observed.as_deref() == Some(&*seen.hash),
            softened: seen.softened,
            sources: seen.sources,
            node_uid: seen.node_uid.clone(),
            content: known.content.filter(|_| ours),
            status_print,
            status,
        }
    }

    /// What a node of this UID keeps by it.
    pub(super) fn content_for(&self, node_uid: &str) -> Option<&Arc<Content>> {
        let content = self.content.as_ref();
        content.filter(|_| self.node_uid == node_uid)
    }

    /// Whether it was written since each of these was edited last. An edit that changes nothing on the node is no reason
    /// to write.
    pub(super) fn was_written_from(&self, sources: &[String]) -> bool {
        self.sources == sources_print(sources)
    }

    /// Whether this was seen after `other`: a watch may lag behind the answer to a write.
    pub(super) fn is_newer_than(&self, other: &Watermark) -> bool {
        self.uid == other.uid && self.generation > other.generation
    }

    /// Whether the agent has written since.
    pub(super) const fn said_the_same(&self, now: &Self) -> bool {
        self.status_print == now.status_print
    }

    /// Whether somebody else has written since.
    pub(super) fn was_ours_before(&self, now: &Self) -> bool {
        self.uid == now.uid && self.hash.is_some() && now.hash.is_none()
    }

    /// Whether an agent tells what it does on the node.
    pub(super) fn speaks(&self) -> bool {
        self.status.observed.is_some()
    }

    /// Whether the node acts for an object. A rule that only reports does not.
    pub(super) fn acts(&self, key: &Key) -> bool {
        if key.0 == Kind::PodQos {
            return self.status.acts_on_pods;
        }
        let mut active = self.status.active.iter();
        active.any(|(rule, active)| active.acts && source(rule) == key.1)
    }

    /// The `NodeQOS` of which a rule is Breached or Cooling.
    pub(super) fn active_sources(&self) -> BTreeSet<&str> {
        self.status.active.keys().map(|rule| source(rule)).collect()
    }

    /// The largest value over mark of the rules of `policy` that want the node closed; `None` where none does. One that
    /// only reports so far is about to want it, where `released` says that the node may have the edit of its `NodeQOS`.
    pub(super) fn over(&self, policy: &PolicySet, released: impl Fn(&str) -> bool) -> Option<f64> {
        let over = |(id, active): (&String, &Active)| {
            let rule = policy.rules.binary_search_by(|rule| (*rule.id.0).cmp(id));
            let rule = policy.rules.get(rule.ok()?)?;
            (closes(rule) && (active.acts || released(source(id)))).then_some(active.over)
        };
        let active = self.status.active.iter();
        active.filter_map(over).max_by(f64::total_cmp)
    }
}

/// The `NodeQOS` of a rule.
fn source(rule: &str) -> &str {
    rule.split_once('/').map_or(rule, |(name, _)| name)
}

/// Whether a rule closes its node.
pub(super) fn closes(rule: &Rule) -> bool {
    rule.strategy == Strategy::Enforce && rule.action.scheduling == Some(TaintEffect::NoSchedule)
}

impl Active {
    fn of(rule: &RuleStatus) -> Self {
        Self {
            over: rule.value.unwrap_or(0.0) / rule.mark,
            acts: rule.strategy != "Preview",
        }
    }
}

impl Status {
    fn of(status: &NodeWatermarkStatus) -> Self {
        let active = status.rules.iter().filter(|rule| rule.state != "Normal");
        let counts = status.counts.clone().unwrap_or_default();
        let scheduling = status.scheduling.as_ref();
        let throttled = usize::try_from(counts.throttled).unwrap_or(0);
        let would = status.would.iter();
        let policies = status.pod_policies.iter();
        // Rules that can't be judged are kept all the same: an edit has to reach them.
        let ended = |it: &Condition| {
            it.type_ == condition::READY
                && it.status == "False"
                && it.reason != condition::NONE_JUDGED
        };
        let observed = status.observed_hash.as_deref();
        Self {
            observed: observed
                .filter(|_| !status.conditions.iter().any(ended))
                .map(Box::from),
            closed: scheduling.is_some_and(|it| it.state == scheduling::NO_SCHEDULE),
            disabled: scheduling.is_some_and(SchedulingStatus::is_disabled),
            throttled: throttled.max(status.throttled.len()),
            acts_on_pods: counts.throttled > 0 || counts.evicted_last_hour > 0,
            would: would.map(|would| source(&would.rule).to_owned()).collect(),
            active: ordered::map(active.map(|rule| (rule.id.clone(), Active::of(rule)))),
            matched: ordered::map(policies.map(|policy| (policy.name.clone(), policy.matched))),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_agent_that_can_judge_no_rule_has_taken_the_edit_and_one_that_keeps_others_has_not() {
        let observed = |status: &str, reason: &str| {
            let ready = json!({
                "type": "Ready", "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-11-21T16:00:00Z",
            });
            let status = json!({"observedHash": "abc", "conditions": [ready]});
            let status = serde_json::from_value(status).expect("a status");
            Status::of(&status).observed
        };
        assert_eq!(observed("True", "RulesKept").as_deref(), Some("abc"));
        let unjudged = observed("False", condition::NONE_JUDGED);
        assert_eq!(unjudged.as_deref(), Some("abc"));
        assert_eq!(observed("False", "LastRulesHeld"), None);
    }
}
