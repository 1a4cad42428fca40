//! Why a pod is not evicted, or not now.

use std::time::Duration;

use super::budget::Scope;
use super::ledger::BudgetExhausted;
use crate::crd::eviction::{Answer, Delay, Objection};

/// Retry delay when the leader will soon know more.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Why a pod is not evicted, without asking the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Metric label.
    pub label: &'static str,
    /// Answer to the agent.
    pub answer: Answer,
}

impl Refusal {
    /// To be retried, for a reason that is not about the pod.
    pub fn later(label: &'static str, why: impl Into<String>) -> Self {
        let answer = Answer::Wait {
            wait: RETRY_INTERVAL,
            by: Delay::Leader,
            why: why.into(),
        };
        Self { label, answer }
    }

    const fn of_pod(label: &'static str, answer: Answer) -> Self {
        Self { label, answer }
    }

    /// The checks took too long, and the agent has timed out.
    pub fn late() -> Self {
        Self::later("late", "the eviction could not be checked in time")
    }

    /// The pod is gone, or another one has its name.
    pub fn gone() -> Self {
        Self::of_pod("gone", Answer::Gone)
    }

    /// The pod must not be evicted.
    pub fn objection(objection: &Objection) -> Self {
        let label = match objection {
            Objection::Terminating => return Self::of_pod("terminating", Answer::Terminating),
            Objection::OtherNode => "other_node",
            Objection::NotWanted => "no_rule",
            Objection::NotAllowed => "not_allowed",
            _ => "protected",
        };
        let why = objection.to_string();
        Self::of_pod(label, Answer::Refused { why })
    }

    /// A request older than the last one.
    pub fn outdated() -> Self {
        let why = "the node's agent has sent a later request since".to_owned();
        Self::of_pod("outdated", Answer::Refused { why })
    }

    /// A budget is spent. The message is stable between attempts.
    pub fn exhausted(exhausted: &BudgetExhausted) -> Self {
        let whose = match exhausted.scope {
            Scope::Fleet => "the fleet's budget of evictions",
            Scope::Zone => "the zone's budget of evictions",
            Scope::Node => "the node's budget of evictions",
            Scope::Namespace => "the namespace's budget of evictions",
            Scope::Owner => "the owner's budget of evictions",
        };
        let why = format!("{whose}, {}, is spent", exhausted.budget);
        let answer = match exhausted.scope {
            // Another pod of the node may belong to neither.
            Scope::Namespace | Scope::Owner => Answer::Budget { why },
            Scope::Fleet | Scope::Zone | Scope::Node => Answer::Wait {
                wait: exhausted.retry_after,
                by: Delay::Budget,
                why,
            },
        };
        Self {
            label: exhausted.scope.name(),
            answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::Budget;
    use super::*;

    #[test]
    fn a_refusal_names_the_budget_and_whether_another_pod_may_be_tried() {
        let of = |scope| {
            let budget = Budget {
                evictions: 10,
                window: Duration::from_mins(1),
            };
            let retry_after = Duration::from_millis(6100);
            Refusal::exhausted(&BudgetExhausted {
                scope,
                budget,
                retry_after,
            })
        };
        let fleet = of(Scope::Fleet);
        let why = "the fleet's budget of evictions, 10 in 1m, is spent";
        let wait = Answer::Wait {
            wait: Duration::from_millis(6100),
            by: Delay::Budget,
            why: why.to_owned(),
        };
        assert_eq!((fleet.label, fleet.answer), ("fleet", wait));
        for scope in [Scope::Namespace, Scope::Owner] {
            let refusal = of(scope);
            assert!(matches!(refusal.answer, Answer::Budget { .. }), "{scope:?}");
        }
    }
}
