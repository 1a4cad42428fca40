//! The actions that Preview rules would have in force now, collected from their decisions.

use crate::engine::metric::ActionKind;
use crate::engine::plan::{PlanChange, RuleState};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{PolicySet, RuleId, Strategy};
use crate::engine::units::MilliCpu;
use crate::messages::event::NamedDecision;

/// The latest decision of each action that a Preview rule would take.
#[derive(Debug, Default)]
pub struct Previews(Vec<NamedDecision>);

impl Previews {
    /// Records a decision. A rule's actions end when it is Normal and its throttle steps are reverted.
    pub fn record(&mut self, decision: &NamedDecision) {
        let transition = &decision.transition;
        if !transition.would {
            return;
        }
        match &transition.change {
            PlanChange::State {
                to: RuleState::Normal,
                ..
            } => self.0.retain(|known| {
                known.transition.rule != transition.rule
                    || matches!(known.transition.change, PlanChange::Throttle { .. })
            }),
            PlanChange::Throttle {
                to: 100,
                idle: false,
                ..
            }
            | PlanChange::Burst {
                burst: MilliCpu::ZERO,
                ..
            }
            | PlanChange::SchedulingEnabled => self.forget(decision),
            PlanChange::Throttle { .. }
            | PlanChange::Burst { .. }
            | PlanChange::Reclaim { .. }
            | PlanChange::Evict { .. }
            | PlanChange::SchedulingDisabled { .. } => {
                self.forget(decision);
                self.0.push(decision.clone());
            }
            _ => {}
        }
    }

    /// Removes obsolete previews: their rule or action is gone or enforced, their pod is gone, or no policy allows the
    /// action on the pod any more. The engine drops these without a transition.
    pub fn retain<'a>(&mut self, policy: &PolicySet, pod: impl Fn(&PodUid) -> Option<&'a Pod>) {
        self.0.retain(|known| {
            let NamedDecision { transition, .. } = known;
            if let (Some(name), Some(uid)) = (transition.rule.pod_qos(), transition.change.pod()) {
                let mut policies = policy.pods.iter().filter(|it| it.name == name);
                return policies.any(|it| {
                    let is_burst = matches!(transition.change, PlanChange::Burst { .. });
                    let gives = |pod: &Pod| {
                        if is_burst {
                            it.standing.burst > MilliCpu::ZERO
                        } else {
                            it.standing.idle && !pod.protected
                        }
                    };
                    it.standing.preview && pod(uid).is_some_and(|pod| it.matches(pod) && gives(pod))
                });
            }
            let mut rules = policy.rules.iter();
            let Some(rule) = rules.find(|rule| rule.id == transition.rule) else {
                return false;
            };
            rule.strategy == Strategy::Preview
                && match (transition.change.action(), transition.change.pod()) {
                    (Some(kind), Some(uid)) => {
                        pod(uid).is_some_and(|pod| rule.may_act(&policy.pods, pod, kind))
                    }
                    _ => rule.action.scheduling.is_some(),
                }
        });
    }

    /// The actions that would be in force now.
    pub fn current(&self) -> &[NamedDecision] {
        &self.0
    }

    fn forget(&mut self, decision: &NamedDecision) {
        let subject = subject(decision);
        self.0.retain(|known| self::subject(known) != subject);
    }
}

/// The subject of a decision: a later decision with the same subject replaces it.
fn subject(decision: &NamedDecision) -> (&RuleId, Option<ActionKind>, Option<&PodUid>) {
    let NamedDecision { transition, .. } = decision;
    let change = &transition.change;
    (&transition.rule, change.action(), change.pod())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::engine::plan::Transition;
    use crate::engine::policy::{
        Action, CpuThrottle, EvictionSpec, Membership, PodPolicy, ScopeRequirement, Standing,
        TaintEffect,
    };
    use crate::engine::testing::{pod, rule};
    use crate::engine::time::BootTime;
    use crate::engine::units::Quota;

    fn throttle(uid: &str) -> PlanChange {
        PlanChange::Throttle {
            pod: PodUid::from(uid),
            from: 100,
            to: 90,
            idle: false,
            quota: Quota::Limit(MilliCpu(900)),
            release: MilliCpu(100),
        }
    }

    fn evict(uid: &str) -> PlanChange {
        PlanChange::Evict {
            pod: PodUid::from(uid),
            grace: Duration::from_secs(30),
            release: None,
            urgent: false,
        }
    }

    /// A Preview rule that throttles and evicts all pods and disables scheduling, with its previews.
    fn scene() -> (PolicySet, Previews) {
        let mut rule = rule("cpu_total_usage", 1000.0);
        rule.strategy = Strategy::Preview;
        rule.action = Arc::new(Action {
            scheduling: Some(TaintEffect::NoSchedule),
            throttle: Some(CpuThrottle {
                min_ratio: 10,
                step: 10,
                idle: false,
            }),
            eviction: Some(EvictionSpec {
                grace: None,
                max_pods_per_round: 1,
                evict_unowned: false,
            }),
            ..Action::clone(&rule.action)
        });
        let pods = PodPolicy {
            name: "all".to_owned(),
            labels: None,
            scopes: vec![ScopeRequirement::Namespace(Membership::Exists)],
            allowed: vec!["throttle".to_owned(), "eviction".to_owned()],
            standing: Standing::default(),
        };
        let effect = TaintEffect::NoSchedule;
        let mut previews = Previews::default();
        for change in [
            PlanChange::SchedulingDisabled { effect },
            throttle("a"),
            evict("a"),
            throttle("b"),
        ] {
            previews.record(&NamedDecision {
                cause: None,
                transition: Transition {
                    at: BootTime::default(),
                    rule: rule.id.clone(),
                    would: true,
                    change,
                },
                metric: None,
                pod_name: None,
            });
        }
        let policy = PolicySet {
            rules: vec![rule],
            pods: vec![pods],
        };
        (policy, previews)
    }

    /// The previews left after an edit of the policies, with these pods on the node.
    fn left(edit: impl FnOnce(&mut PolicySet), pods: &[Pod]) -> Vec<&'static str> {
        let (mut policy, mut previews) = scene();
        edit(&mut policy);
        previews.retain(&policy, |uid| pods.iter().find(|pod| pod.uid == *uid));
        let shown = previews.current().iter();
        let shown = shown.map(|decision| match &decision.transition.change {
            PlanChange::Throttle { pod, .. } if *pod.0 == *"a" => "throttle a",
            PlanChange::Throttle { .. } => "throttle b",
            PlanChange::Evict { .. } => "evict a",
            _ => "scheduling",
        });
        shown.collect()
    }

    fn action(policy: &mut PolicySet) -> &mut Action {
        Arc::make_mut(&mut policy.rules[0].action)
    }

    #[test]
    fn previews_of_removed_rules_or_actions_are_dropped() {
        let both = [pod("a"), pod("b")];
        let all = ["scheduling", "throttle a", "evict a", "throttle b"];
        assert_eq!(left(|_| {}, &both), all);
        let gone = left(|policy| policy.rules.clear(), &both);
        assert_eq!(gone, [""; 0]);
        let enforced = left(|policy| policy.rules[0].strategy = Strategy::Enforce, &both);
        assert_eq!(enforced, [""; 0]);
        let no_taint = left(|policy| action(policy).scheduling = None, &both);
        assert_eq!(no_taint, all[1..]);
        let no_throttle = left(|policy| action(policy).throttle = None, &both);
        assert_eq!(no_throttle, ["scheduling", "evict a"]);
    }

    #[test]
    fn previews_of_removed_or_excluded_pods_are_dropped() {
        let both = [pod("a"), pod("b")];
        assert_eq!(left(|_| {}, &both[1..]), ["scheduling", "throttle b"]);
        let evict_only = left(|policy| drop(policy.pods[0].allowed.remove(0)), &both);
        assert_eq!(evict_only, ["scheduling", "evict a"]);
        let protected = Pod {
            protected: true,
            ..pod("a")
        };
        let pods = [protected, pod("b")];
        assert_eq!(left(|_| {}, &pods), ["scheduling", "throttle b"]);
    }
}
