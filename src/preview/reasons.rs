//! Why an action is not taken on a pod. The engine stops at the last victim that it needs and says nothing of the pods
//! behind it, so it is asked again for each of them, as if it were the only pod of the node.

use std::sync::Arc;

use super::foresee::Scene;
use super::summary::{BEFORE, Looks, PERIOD};
use super::{Subject, foresee};
use crate::engine::metric::{ActionKind, Leverage};
use crate::engine::plan::{Change, Plan, Spared, Transition};
use crate::engine::pod::{Kept, Pod};
use crate::engine::policy::{Action, PolicySet, Rule};
use crate::engine::{Engine, EngineState};
use crate::node::machine::wording::spared_reason;

const KINDS: [ActionKind; 3] = [
    ActionKind::CpuThrottle,
    ActionKind::ForceGc,
    ActionKind::Eviction,
];

/// The first round of a rule that is over its threshold, and what else is asked about it.
pub(super) struct Round<'a> {
    pub(super) scene: &'a Scene<'a>,
    pub(super) looks: &'a Looks,
    pub(super) plan: &'a Plan,
    pub(super) rule: &'a Rule,
    /// What it is judged by.
    pub(super) value: f64,
    /// What it needs to have released, in millicores or bytes; 0 where that has no unit.
    pub(super) gap: u64,
    /// The rule with each kind of its action alone.
    kinds: Vec<(ActionKind, Arc<PolicySet>)>,
}

impl<'a> Round<'a> {
    pub(super) fn new(
        scene: &'a Scene<'a>,
        looks: &'a Looks,
        plan: &'a Plan,
        rule: &'a Rule,
        value: f64,
        gap: u64,
    ) -> Self {
        let alone = |kind| {
            let rules = vec![with_kind(rule, kind)];
            let pods = scene.policy.pods.clone();
            (kind, Arc::new(PolicySet { rules, pods }))
        };
        Self {
            scene,
            looks,
            plan,
            rule,
            value,
            gap,
            kinds: kinds(rule).map(alone).collect(),
        }
    }

    /// Why something, or all, is not done to the pod, where `would` is done to it.
    pub(super) fn reasons(&self, subject: &Subject, would: &[Change]) -> Vec<String> {
        let mut policies = self.scene.policy.pods.iter();
        if !policies.any(|policy| policy.matches(&subject.pod)) {
            return vec!["no PodQOS matches it".to_owned()];
        }
        let done = |kind| would.iter().any(|change| kind_of(change) == Some(kind));
        let left = self.kinds.iter().filter(|(kind, _)| !done(*kind));
        let reasons: Vec<_> = left
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
        let named = |(kind, reason): (ActionKind, String)| format!("{}: {reason}", no(kind));
        reasons.into_iter().map(named).collect()
    }

    /// `acted`: another kind is done to the pod, so that it is no news that this one is not needed.
    fn reason(
        &self,
        kind: ActionKind,
        policy: &Arc<PolicySet>,
        subject: &Subject,
        acted: bool,
    ) -> Option<String> {
        let pod = &subject.pod;
        let mut changes = self.alone(policy, subject).into_iter();
        match changes.find(|change| change.pod() == Some(&pod.uid)) {
            Some(Change::Spared { reason, .. }) => Some(words(reason, pod)),
            Some(_) => (!acted).then(|| self.not_reached(kind, pod)),
            None => Some(self.untouched(kind)),
        }
    }

    /// What the engine would do, were the pod the only one of the node.
    fn alone(&self, policy: &Arc<PolicySet>, subject: &Subject) -> Vec<Change> {
        let mut engine = Engine::new();
        let mut plan = Plan::default();
        engine.set_policy(Arc::clone(policy));
        engine.set_pods(vec![Arc::clone(&subject.pod)]);
        if let Some(kept) = self.scene.kept {
            let mut throttles = kept.throttles(std::slice::from_ref(subject));
            throttles.retain(|throttle| throttle.rule == self.rule.id);
            engine.adopt(&EngineState::default(), &throttles);
        }
        engine.step(BEFORE, &self.looks.before, &mut plan);
        engine.assume(&self.rule.id, self.value);
        engine.step(BEFORE + PERIOD, &self.looks.now, &mut plan);
        plan.transitions.into_iter().map(|it| it.change).collect()
    }

    /// Why a pod that may be acted on is not.
    fn not_reached(&self, kind: ActionKind, pod: &Pod) -> String {
        let same =
            |t: &&Transition| t.change.pod() == Some(&pod.uid) && kind_of(&t.change) == Some(kind);
        if let Some(other) = self.done().find(same) {
            return format!("not again, it is done for {}", other.rule);
        }
        if self.rule.metric.leverage(kind) == Leverage::OneVictim {
            return "not its turn, it is one pod a round as the metric has no unit of release"
                .to_owned();
        }
        let evicted = || {
            self.done()
                .any(|t| matches!(t.change, Change::Evict { .. }))
        };
        if kind == ActionKind::Eviction && evicted() && self.released() < self.gap {
            let eviction = self.rule.action.eviction;
            let most = eviction.map_or(1, |eviction| eviction.max_pods_per_round);
            return format!("not its turn, at most {most} a round may be evicted");
        }
        "not needed, what is done to others releases enough".to_owned()
    }

    /// Why the engine says nothing about a pod that a policy matches.
    fn untouched(&self, kind: ActionKind) -> String {
        let measured = matches!(self.rule.metric.leverage(kind), Leverage::Measured(_));
        match kind {
            _ if measured && self.gap == 0 => "how much has to be released is not known",
            ActionKind::ForceGc => "it has next to no page cache",
            _ => "not its turn",
        }
        .to_owned()
    }

    /// What is done for all rules on the same resource, and of Preview rules for this one alone.
    fn done(&self) -> impl Iterator<Item = &Transition> {
        let resource = self.rule.metric.resource();
        let of = move |t: &&Transition| {
            let mut rules = self.scene.policy.rules.iter();
            let theirs = rules.find(|other| other.id == t.rule);
            theirs.is_some_and(|theirs| theirs.metric.resource() == resource)
                && (!t.would || t.rule == self.rule.id)
        };
        self.plan.transitions.iter().filter(of)
    }

    /// By throttles and evictions, in the unit of the gap.
    fn released(&self) -> u64 {
        let release = |t: &Transition| match &t.change {
            Change::Throttle { release, .. } => Some(release.0),
            Change::Evict { release, .. } => *release,
            _ => None,
        };
        self.done().filter_map(release).sum()
    }
}

/// The kinds of action that the rule takes on pods, and that lower its metric.
pub(super) fn kinds(rule: &Rule) -> impl Iterator<Item = ActionKind> {
    let action = &rule.action;
    KINDS.into_iter().filter(move |kind| {
        let has = match kind {
            ActionKind::CpuThrottle => action.throttle.is_some(),
            ActionKind::ForceGc => action.force_gc,
            ActionKind::Eviction => action.eviction.is_some(),
        };
        has && rule.metric.leverage(*kind) != Leverage::None
    })
}

/// The rule as its first round has it, with this kind of its action alone.
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
        ..foresee::at_once(rule)
    }
}

const fn kind_of(change: &Change) -> Option<ActionKind> {
    match change {
        Change::Throttle { .. } => Some(ActionKind::CpuThrottle),
        Change::Reclaim { .. } => Some(ActionKind::ForceGc),
        Change::Evict { .. } => Some(ActionKind::Eviction),
        _ => None,
    }
}

const fn no(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::CpuThrottle => "no throttle",
        ActionKind::ForceGc => "no reclaim",
        ActionKind::Eviction => "no eviction",
    }
}

fn words(reason: Spared, pod: &Pod) -> String {
    let kept = pod.kept.filter(|_| reason == Spared::Kept);
    match kept {
        Some(Kept::Static) => "it is static, its kubelet would start it again",
        Some(Kept::DaemonSet) => "it is a DaemonSet's and would come back",
        Some(Kept::SystemCritical) => "its priority is system-critical",
        Some(Kept::DoNotDisrupt) => "it is annotated not to be disrupted",
        None => spared_reason(reason),
    }
    .to_owned()
}
