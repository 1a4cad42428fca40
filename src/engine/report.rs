//! The reported state of a rule.

use std::time::Duration;

use serde::Serialize;

use super::metric::{Rung, RungUse};
use super::plan::{RuleState, Unknown};
use super::policy::{RuleId, Strategy};
use super::rule::Evaluation;
use super::run::Run;
use super::time::BootTime;
use super::would::WouldReport;

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
    /// Limits of a protected pod's own made it wait as well, which is not counted.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
    /// The kind of action on pods that it takes now; `None` if it is not in force, or has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rung: Option<Rung>,
    /// The kind that follows if that does not help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_rung: Option<Rung>,
    /// It evicts no more: two evictions in a row did not lower its metric.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub evictions_ended: bool,
    /// When it evicts first, if its metric stays above the threshold; `None` if it comes to no eviction.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub earliest_eviction: Option<BootTime>,
    /// Outside the hours of its `activeDuring`: it is Normal, whatever its value.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub outside_hours: bool,
    /// Minimum time that its actions stay in force after the last breach.
    pub cool_down: Duration,
    /// How often it would have acted in the last day, if it is a Preview rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would: Option<WouldReport>,
}

impl RuleReport {
    pub(super) fn of(run: &Run, next_due: BootTime, period: Duration) -> Self {
        let in_force = run.machine.in_force();
        let left = run.ladder.evaluations_to_eviction(&run.rule);
        let earliest_eviction = left.map(|left| next_due + period * left.saturating_sub(1));
        let rungs = Rung::ALL.into_iter();
        let rung = rungs
            .filter(|rung| *rung >= run.ladder.rung)
            .find(|rung| in_force && run.rule.rung(*rung) != RungUse::Unused);
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
            limited: run.limited,
            rung,
            next_rung: rung.and_then(|rung| run.rule.rung_after(rung)),
            evictions_ended: run.ladder.evictions.have_ended(),
            earliest_eviction: earliest_eviction.filter(|_| in_force),
            outside_hours: run.evaluation.is_some_and(Evaluation::outside_hours),
            cool_down: run.machine.cool_down(run.rule.action.cool_down),
            would: run.would.report(),
        }
    }
}
