//! Why a pod is not evicted, or not now.

use std::time::Duration;

use super::budget::BudgetScope;
use super::ledger::{Exhausted, Limit};
use crate::crd::eviction::{Delay, EvictionAnswer, Objection};

/// Retry delay when the leader will soon know more.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

const UNKNOWN_HISTORY: &str =
    "it is not known which earlier evictions count, so none is allowed for a while";
const FULL_RECORD: &str = "the record of evictions is full";

/// Why a pod is not evicted, without asking the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaderRefusal {
    /// Metric label.
    pub label: &'static str,
    /// Answer to the agent.
    pub answer: EvictionAnswer,
}

impl LeaderRefusal {
    /// To be retried, for a reason that is not about the pod.
    pub fn later(label: &'static str, why: impl Into<String>) -> Self {
        let answer = EvictionAnswer::Wait {
            wait: RETRY_INTERVAL,
            by: Delay::Leader,
            why: why.into(),
        };
        Self { label, answer }
    }

    const fn of_pod(label: &'static str, answer: EvictionAnswer) -> Self {
        Self { label, answer }
    }

    /// The checks took too long, and the agent has timed out.
    pub fn late() -> Self {
        Self::later("late", "the eviction could not be checked in time")
    }

    /// The pod is gone, or another one has its name.
    pub fn gone() -> Self {
        Self::of_pod("gone", EvictionAnswer::Gone)
    }

    /// The pod must not be evicted.
    pub fn objection(objection: &Objection) -> Self {
        let label = match objection {
            Objection::Terminating => {
                return Self::of_pod("terminating", EvictionAnswer::Terminating);
            }
            Objection::OtherNode => "other_node",
            Objection::NotWanted => "no_rule",
            Objection::NotAllowed => "not_allowed",
            _ => "protected",
        };
        let why = objection.to_string();
        Self::of_pod(label, EvictionAnswer::Refused { why })
    }

    /// A request older than the last one.
    pub fn outdated() -> Self {
        let why = "the node's agent has sent a later request since".to_owned();
        Self::of_pod("outdated", EvictionAnswer::Refused { why })
    }

    /// No more evictions are allowed now. The message is stable between attempts.
    pub fn exhausted(exhausted: &Exhausted) -> Self {
        let (label, why) = match exhausted.limit {
            Limit::Budget(scope, budget) => {
                let whose = scope.name();
                let why = format!("the {whose}'s budget of evictions, {budget}, is spent");
                (whose, why)
            }
            Limit::UnknownHistory => ("unknown_history", UNKNOWN_HISTORY.to_owned()),
            Limit::FullRecord => ("record_full", FULL_RECORD.to_owned()),
        };
        let answer = match exhausted.limit {
            // Another pod of the node may belong to neither.
            Limit::Budget(BudgetScope::Namespace | BudgetScope::Owner, _) => {
                EvictionAnswer::Budget { why }
            }
            _ => EvictionAnswer::Wait {
                wait: exhausted.retry_after,
                by: Delay::Budget,
                why,
            },
        };
        Self { label, answer }
    }
}

#[cfg(test)]
mod tests {
    use super::super::budget::Budget;
    use super::*;

    #[test]
    fn a_refusal_names_the_budget_and_whether_another_pod_may_be_tried() {
        let budget = Budget {
            evictions: 10,
            window: Duration::from_mins(1),
        };
        let retry_after = Duration::from_millis(6100);
        let of = |limit| LeaderRefusal::exhausted(&Exhausted { limit, retry_after });
        let fleet = "the fleet's budget of evictions, 10 in 1m, is spent";
        for (limit, label, why) in [
            (Limit::Budget(BudgetScope::Fleet, budget), "fleet", fleet),
            (Limit::UnknownHistory, "unknown_history", UNKNOWN_HISTORY),
            (Limit::FullRecord, "record_full", FULL_RECORD),
        ] {
            let wait = EvictionAnswer::Wait {
                wait: retry_after,
                by: Delay::Budget,
                why: why.to_owned(),
            };
            let refusal = of(limit);
            assert_eq!((refusal.label, refusal.answer), (label, wait));
        }
        for scope in [BudgetScope::Namespace, BudgetScope::Owner] {
            let refusal = of(Limit::Budget(scope, budget));
            assert!(
                matches!(refusal.answer, EvictionAnswer::Budget { .. }),
                "{scope:?}"
            );
        }
    }
}
