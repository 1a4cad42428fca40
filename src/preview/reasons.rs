//! Why an action is not taken on a pod. The engine stops at the last victim that it needs, so it is run again for each
//! pod after that one, as if it were the only pod of the node.

use std::sync::Arc;

use super::evaluate::NodeInput;
use super::summary::{BEFORE, PERIOD, Samples};
use super::{PodSubject, evaluate};
use crate::engine::metric::{ActionEffect, ActionKind};
use crate::engine::plan::{Plan, PlanChange, Skipped, Transition};
use crate::engine::pod::{EvictionExemption, Pod};
use crate::engine::policy::{Action, PolicySet, Rule};
use crate::engine::{Engine, EngineState};
use crate::messages::skip_reason;

/// The first round of a rule that is over its threshold.
pub(super) struct FirstRound<'a> {
    pub(super) input: &'a NodeInput<'a>,
    pub(super) samples: &'a Samples,
    pub(super) plan: &'a Plan,
    pub(super) rule: &'a Rule,
    /// The rule's value.
    pub(super) value: f64,
    /// Amount to release, in millicores or bytes; 0 if the metric has no unit of release.
    pub(super) gap: u64,
    /// The rule, once for each kind of its action.
    kinds: Vec<(ActionKind, Arc<PolicySet>)>,
}

impl<'a> FirstRound<'a> {
    pub(super) fn new(
        input: &'a NodeInput<'a>,
        samples: &'a Samples,
        plan: &'a Plan,
        rule: &'a Rule,
        value: f64,
        gap: u64,
    ) -> Self {
        let alone = |kind| {
            let rules = vec![with_kind(rule, kind)];
            let pods = input.policy.pods.clone();
            (kind, Arc::new(PolicySet { rules, pods }))
        };
        Self {
            input,
            samples,
            plan,
            rule,
            value,
            gap,
            kinds: kinds(rule).map(alone).collect(),
        }
    }

    /// Why actions other than `would` are not taken on the pod.
    pub(super) fn reasons(&self, subject: &PodSubject, would: &[PlanChange]) -> Vec<String> {
        let mut policies = self.input.policy.pods.iter();
        if !policies.any(|policy| policy.matches(&subject.pod)) {
            return vec!["no PodQOS matches it".to_owned()];
        }
        let done = |kind| would.iter().any(|change| change.action() == Some(kind));
        let others = self.kinds.iter().filter(|(kind, _)| !done(*kind));
        let reasons: Vec<_> = others
            .filter_map(|(kind, policy)| {
                let reason = self.reason(*kind, policy, subject, !would.is_empty())?;
                Some((*kind, reason))
            })
            .collect();
        let first = reasons.first().map(|(_, reason)| reason.clone());
        let same = reasons
            .iter()
            .all(|(_, reason)| Some(reason) == first.as_ref());
        if same && would.is_empty() {
            return first.into_iter().collect();
        }
        let named = |(kind, reason): (ActionKind, String)| format!("{}: {reason}", not_taken(kind));
        reasons.into_iter().map(named).collect()
    }

    /// `acted`: another action is taken on the pod, so "not needed" is not worth a message.
    fn reason(
        &self,
        kind: ActionKind,
        policy: &Arc<PolicySet>,
        subject: &PodSubject,
        acted: bool,
    ) -> Option<String> {
        let pod = &subject.pod;
        let mut changes = self.alone(policy, subject).into_iter();
        match changes.find(|change| change.pod() == Some(&pod.uid)) {
            Some(PlanChange::Skipped { reason, .. }) => Some(describe(reason, pod)),
            Some(_) => (!acted).then(|| self.not_reached(kind, pod)),
            None => Some(self.untouched(kind)),
        }
    }

    /// What the engine would do if this were the only pod of the node.
    fn alone(&self, policy: &Arc<PolicySet>, subject: &PodSubject) -> Vec<PlanChange> {
        let mut engine = Engine::new();
        let mut plan = Plan::default();
        engine.set_policy(Arc::clone(policy));
        engine.set_pods(vec![Arc::clone(&subject.pod)]);
        if let Some(agent_status) = self.input.agent_status {
            let mut throttles = agent_status.throttles(std::slice::from_ref(subject));
            throttles.retain(|throttle| throttle.rule == self.rule.id);
            engine.adopt(BEFORE, &EngineState::default(), &throttles);
        }
        engine.step(BEFORE, &self.samples.before, &mut plan);
        engine.assume(&self.rule.id, self.value);
        engine.step(BEFORE + PERIOD, &self.samples.now, &mut plan);
        plan.transitions.into_iter().map(|it| it.change).collect()
    }

    /// Why a pod that may be acted on is not.
    fn not_reached(&self, kind: ActionKind, pod: &Pod) -> String {
        let same =
            |t: &&Transition| t.change.pod() == Some(&pod.uid) && t.change.action() == Some(kind);
        if let Some(other) = self.done().find(same) {
            return format!("not again, already done for {}", other.rule);
        }
        if self.rule.metric.action_effect(kind) == ActionEffect::Unmeasured {
            return "not its turn, only one pod at a time as the metric has no unit of release"
                .to_owned();
        }
        let evicted = || {
            self.done()
                .any(|t| matches!(t.change, PlanChange::Evict { .. }))
        };
        if kind == ActionKind::Eviction && evicted() && self.released() < self.gap {
            let eviction = self.rule.action.eviction;
            let max = eviction.map_or(1, |eviction| eviction.max_pods_per_round);
            return format!("not its turn, at most {max} per round may be evicted");
        }
        "not needed, actions on other pods release enough".to_owned()
    }

    /// Why the engine has no transition for a pod that a policy matches.
    fn untouched(&self, kind: ActionKind) -> String {
        let measured = matches!(
            self.rule.metric.action_effect(kind),
            ActionEffect::Measured(_)
        );
        match kind {
            _ if measured && self.gap == 0 => "the amount to release is not known",
            ActionKind::ForceGc => "it has almost no page cache",
            _ => "not its turn",
        }
        .to_owned()
    }

    /// Actions of all rules on the same resource; of Preview rules, only of this one.
    fn done(&self) -> impl Iterator<Item = &Transition> {
        let resource = self.rule.metric.resource();
        let of = move |t: &&Transition| {
            let mut rules = self.input.policy.rules.iter();
            let theirs = rules.find(|other| other.id == t.rule);
            theirs.is_some_and(|theirs| theirs.metric.resource() == resource)
                && (!t.would || t.rule == self.rule.id)
        };
        self.plan.transitions.iter().filter(of)
    }

    /// Amount that throttles and evictions release, in the unit of `gap`.
    fn released(&self) -> u64 {
        let release = |t: &Transition| match &t.change {
            PlanChange::Throttle { release, .. } => Some(release.0),
            PlanChange::Evict { release, .. } => *release,
            _ => None,
        };
        self.done().filter_map(release).sum()
    }
}

/// The kinds of the rule's action that lower its metric.
pub(super) fn kinds(rule: &Rule) -> impl Iterator<Item = ActionKind> {
    ActionKind::ALL.into_iter().filter(|kind| {
        rule.action.includes(*kind) && rule.metric.action_effect(*kind) != ActionEffect::None
    })
}

/// The rule without `avoidanceThreshold`, and with only this kind of its action.
fn with_kind(rule: &Rule, kind: ActionKind) -> Rule {
    let action = &rule.action;
    let action = Action {
        throttle: action.throttle.filter(|_| kind == ActionKind::CpuThrottle),
        force_gc: kind == ActionKind::ForceGc,
        eviction: action.eviction.filter(|_| kind == ActionKind::Eviction),
        ..Action::clone(action)
    };
    Rule {
        action: Arc::new(action),
        ..evaluate::without_threshold(rule)
    }
}

const fn not_taken(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::CpuThrottle => "no throttle",
        ActionKind::ForceGc => "no reclaim",
        ActionKind::Eviction => "no eviction",
    }
}

fn describe(reason: Skipped, pod: &Pod) -> String {
    let exemption = pod
        .eviction_exemption
        .filter(|_| reason == Skipped::ExemptFromEviction);
    match exemption {
        Some(EvictionExemption::Static) => {
            "it is a static pod, which its kubelet would start again"
        }
        Some(EvictionExemption::DaemonSet) => {
            "it belongs to a DaemonSet, which would create it again"
        }
        Some(EvictionExemption::SystemCritical) => "its priority is system-critical",
        Some(EvictionExemption::DoNotDisrupt) => "it is annotated not to be disrupted",
        None => skip_reason(reason),
    }
    .to_owned()
}
