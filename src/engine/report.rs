//! The reported state of a rule.

use std::time::Duration;

use serde::Serialize;

use super::plan::{RuleState, Unknown};
use super::policy::{RuleId, Strategy};
use super::protected::Guard;
use super::rule::Evaluation;
use super::run::Run;
use super::time::BootTime;

/// The state and the last result of a rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleReport {
    /// Rule ID.
    pub id: RuleId,
    /// Enforce or preview.
    pub strategy: Strategy,
    /// State.
    pub state: RuleState,
    /// When it entered that state; `None` before the first evaluation.
    pub since: Option<BootTime>,
    /// Last evaluated value; with several series, the one that decided.
    pub value: Option<f64>,
    /// A value above this is a breach.
    pub threshold: f64,
    /// A value at or below this is quiet.
    pub restore_value: f64,
    /// Consecutive breaches counted.
    pub breaches: u32,
    /// Consecutive quiet evaluations counted.
    pub quiet_evaluations: u32,
    /// Why the last evaluation gave no result.
    pub unknown: Option<Unknown>,
    /// The additional measurement that the result depended on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guard>,
    /// Outside the hours of its `activeDuring`: it is Normal, whatever its value.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub outside_hours: bool,
    /// Minimum time that its actions stay in force after the last breach.
    pub cool_down: Duration,
}

impl RuleReport {
    pub(super) fn of(run: &Run) -> Self {
        Self {
            id: run.rule.id.clone(),
            strategy: run.rule.strategy,
            state: run.machine.state,
            since: run.machine.since,
            value: run.evaluation.and_then(Evaluation::value),
            threshold: run.rule.threshold,
            restore_value: run.rule.restore_value,
            breaches: run.machine.breaches,
            quiet_evaluations: run.machine.quiet_evaluations,
            unknown: run.evaluation.and_then(Evaluation::unknown),
            guard: run.guard,
            outside_hours: run.evaluation.is_some_and(Evaluation::outside_hours),
            cool_down: run.machine.cool_down(run.rule.action.cool_down),
        }
    }
}
