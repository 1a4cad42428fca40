//! The parts of a `NodeWatermark` that stay in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::catalog::Key;
use super::content::{CompiledPolicy, Contents, SpecFields};
use crate::crd::node_watermark::{Hash, RuleStatus, SchedulingStatus, condition, scheduling};
use crate::crd::{Kind, NodeWatermarkStatus};
use crate::engine::policy::{PolicySet, Rule, Strategy, TaintEffect, node_qos_of};
use crate::reconcilers::observe::wire::{Watermark, sources_fingerprint};

/// One `NodeWatermark` as last seen.
#[derive(Clone, Debug, Default)]
pub struct KnownWatermark {
    /// UID of the object.
    pub uid: String,
    generation: i64,
    /// The hash of the spec; `None` if it differs from the field `hash`, because another writer changed the spec.
    pub hash: Option<Hash>,
    /// `spec.softenScheduling`.
    pub soften_scheduling: bool,
    node_uid: String,
    content: Option<Arc<CompiledPolicy>>,
    /// Fingerprint of `spec.sources`.
    sources: u64,
    /// Its agent enforces this spec.
    pub enforced: bool,
    status_fingerprint: u64,
    pub status: Arc<SeenStatus>,
}

/// The parts of the status that are used.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeenStatus {
    /// The hash of the spec that the agent enforces; `None` if there is no agent or it is not Ready.
    observed: Option<Box<str>>,
    /// What the agent reads.
    pub reads: SpecFields,
    /// The node has our taint with effect `NoSchedule`.
    pub no_schedule: bool,
    /// The node has our taint, with any effect.
    pub scheduling_disabled: bool,
    /// Throttled pods.
    pub throttled: usize,
    /// Pods are throttled, or were evicted in the last hour.
    pub acts_on_pods: bool,
    /// The `NodeQOS` with a Preview rule that would act.
    pub would: BTreeSet<String>,
    /// How often Preview rules would have begun to act in the last day, by `NodeQOS` that has any.
    pub would_last_day: BTreeMap<String, i64>,
    /// The rules that are Breached or Cooling.
    pub active: BTreeMap<String, Active>,
    /// Matched pods by `PodQOS`; absent if unknown.
    pub matched: BTreeMap<String, i64>,
}

/// A rule that is Breached or Cooling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Active {
    /// Its value/threshold: 1.2 is 20 % above.
    ratio: f64,
    /// It acts: the agent enforces it with another strategy than `Preview`.
    acts: bool,
}

impl KnownWatermark {
    /// From an object; one that can't be decoded counts as written by another writer. `before` is the previous version.
    pub fn of(seen: &Watermark, contents: &mut Contents, before: Option<&Self>) -> Self {
        let decoded = contents.decode(&seen.blocks);
        let hash = decoded.parts.hash(&seen.node_uid, seen.soften_scheduling);
        let ours = hash.to_string() == seen.hash && !seen.has_unknown_fields;
        let status_fingerprint = seen.status_fingerprint();
        let status = match before {
            Some(before) if before.status_fingerprint == status_fingerprint => {
                Arc::clone(&before.status)
            }
            _ => Arc::new(SeenStatus::of(seen.status())),
        };
        Self {
            uid: seen.uid.clone(),
            generation: seen.generation,
            hash: ours.then_some(hash),
            enforced: ours && status.observed.as_deref() == Some(&*seen.hash),
            soften_scheduling: seen.soften_scheduling,
            sources: seen.sources,
            node_uid: seen.node_uid.clone(),
            content: decoded.content.filter(|_| ours),
            status_fingerprint,
            status,
        }
    }

    /// The content, if it is for a node with this UID.
    pub fn content_for(&self, node_uid: &str) -> Option<&Arc<CompiledPolicy>> {
        let content = self.content.as_ref();
        content.filter(|_| self.node_uid == node_uid)
    }

    /// Whether it was written from these versions of the sources. (An edit that changes nothing on the node causes no write.)
    pub fn was_written_from(&self, sources: &[String]) -> bool {
        self.sources == sources_fingerprint(sources)
    }

    /// Whether this is newer than `other`: a watch may lag behind the response to a write.
    pub fn is_newer_than(&self, other: &Watermark) -> bool {
        self.uid == other.uid && self.generation > other.generation
    }

    /// Whether the agent has not written since.
    pub const fn has_same_status(&self, now: &Self) -> bool {
        self.status_fingerprint == now.status_fingerprint
    }

    /// Whether the spec may have to be written again.
    pub fn needs_other_spec_than(&self, now: &Self) -> bool {
        self.hash != now.hash || self.uid != now.uid || self.status.reads != now.status.reads
    }

    /// Whether another writer has changed the spec since.
    pub fn was_edited(&self, now: &Self) -> bool {
        self.uid == now.uid && self.hash.is_some() && now.hash.is_none()
    }

    /// Whether an agent reports its state in the status.
    pub fn has_agent(&self) -> bool {
        self.status.observed.is_some()
    }

    /// Whether the node acts for an object. A Preview rule does not act.
    pub fn acts(&self, key: &Key) -> bool {
        if key.0 == Kind::PodQos {
            return self.status.acts_on_pods;
        }
        let mut active = self.status.active.iter();
        active.any(|(rule, active)| active.acts && source(rule) == key.1)
    }

    /// The `NodeQOS` of which a rule is Breached or Cooling.
    pub fn active_sources(&self) -> BTreeSet<&str> {
        self.status.active.keys().map(|rule| source(rule)).collect()
    }

    /// The largest value/threshold of the rules of `policy` that want the node unschedulable; `None` if none does. A Preview rule counts
    /// if the node is about to enforce it: `released` says whether the node may have the edit of its `NodeQOS`.
    pub fn threshold_ratio(
        &self,
        policy: &PolicySet,
        released: impl Fn(&str) -> bool,
    ) -> Option<f64> {
        let ratio = |(id, active): (&String, &Active)| {
            let rule = policy.rules.binary_search_by(|rule| (*rule.id.0).cmp(id));
            let rule = policy.rules.get(rule.ok()?)?;
            (is_no_schedule(rule) && (active.acts || released(source(id)))).then_some(active.ratio)
        };
        let active = self.status.active.iter();
        active.filter_map(ratio).max_by(f64::total_cmp)
    }
}

/// The `NodeQOS` of a rule.
fn source(rule: &str) -> &str {
    node_qos_of(rule).unwrap_or(rule)
}

/// Whether a rule makes its node unschedulable.
pub fn is_no_schedule(rule: &Rule) -> bool {
    rule.strategy == Strategy::Enforce && rule.action.scheduling == Some(TaintEffect::NoSchedule)
}

impl Active {
    fn of(rule: &RuleStatus) -> Self {
        Self {
            ratio: rule.value.unwrap_or(0.0) / rule.threshold,
            acts: rule.strategy != "Preview",
        }
    }
}

impl SeenStatus {
    fn of(status: &NodeWatermarkStatus) -> Self {
        let active = status.rules.iter().filter(|rule| rule.state != "Normal");
        let counts = status.counts.clone().unwrap_or_default();
        let scheduling = status.scheduling.as_ref();
        let throttled = usize::try_from(counts.throttled).unwrap_or(0);
        let would = status.would.iter();
        let mut would_last_day: BTreeMap<String, i64> = BTreeMap::new();
        for rule in &status.rules {
            if let Some(would) = &rule.would_last_day {
                let sum = would_last_day
                    .entry(source(&rule.id).to_owned())
                    .or_default();
                *sum = sum.saturating_add(would.breaches);
            }
        }
        let policies = status.pod_policies.iter();
        // Rules that can't be evaluated are enforced all the same: an edit has to reach them.
        let not_ready = |it: &Condition| {
            it.type_ == condition::READY
                && it.status == "False"
                && it.reason != condition::NONE_EVALUATED
        };
        let observed = status.observed_hash.as_deref();
        let agent = status.agent.as_ref();
        Self {
            observed: observed
                .filter(|_| !status.conditions.iter().any(not_ready))
                .map(Box::from),
            reads: match agent {
                Some(agent) if !agent.reads_quantities => SpecFields::WithoutQuantities,
                _ => SpecFields::All,
            },
            no_schedule: scheduling.is_some_and(|it| it.state == scheduling::NO_SCHEDULE),
            scheduling_disabled: scheduling.is_some_and(SchedulingStatus::is_disabled),
            throttled: throttled.max(status.throttled.len()),
            acts_on_pods: counts.throttled > 0 || counts.evicted_last_hour > 0,
            would: would.map(|would| source(&would.rule).to_owned()).collect(),
            would_last_day,
            active: active
                .map(|rule| (rule.id.clone(), Active::of(rule)))
                .collect::<BTreeMap<_, _>>(),
            matched: policies
                .map(|policy| (policy.name.clone(), policy.matched))
                .collect::<BTreeMap<_, _>>(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_agent_that_cannot_evaluate_rules_has_the_edit_unlike_one_with_old_rules() {
        let observed = |status: &str, reason: &str| {
            let ready = json!({
                "type": "Ready", "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-11-21T16:00:00Z",
            });
            let status = json!({"observedHash": "abc", "conditions": [ready]});
            let status = serde_json::from_value(status).expect("a status");
            SeenStatus::of(&status).observed
        };
        assert_eq!(observed("True", "RulesEnforced").as_deref(), Some("abc"));
        let unevaluated = observed("False", condition::NONE_EVALUATED);
        assert_eq!(unevaluated.as_deref(), Some("abc"));
        assert_eq!(observed("False", "PreviousRulesEnforced"), None);
    }
}
