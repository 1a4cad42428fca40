//! Whether new pods may be scheduled to the node: the union over all rules.

use super::plan::{PlanChange, Scheduling, Transition};
use super::policy::{RuleId, TaintEffect};
use super::run::Run;
use super::time::BootTime;

/// Reports which rules started or stopped disabling scheduling.
pub(super) fn report_changes(now: BootTime, runs: &mut [Run], out: &mut Vec<Transition>) {
    for run in runs {
        let effect = effect(run);
        if effect.is_some() == run.disables_scheduling {
            continue;
        }
        run.disables_scheduling = effect.is_some();
        let change = effect.map_or(PlanChange::SchedulingEnabled, |effect| {
            PlanChange::SchedulingDisabled { effect }
        });
        out.push(run.transition(now, change));
    }
}

/// The effect of a rule. None while it is outdated: whoever removed the taint meanwhile had a reason.
pub(super) fn effect(run: &Run) -> Option<TaintEffect> {
    run.effect().filter(|_| !run.machine.outdated)
}

/// Whether every enforced rule that can disable scheduling has been evaluated once.
pub(super) fn all_known(runs: &[Run]) -> bool {
    let mut disabling = runs
        .iter()
        .filter(|run| !run.is_preview() && run.rule.action.scheduling.is_some());
    disabling.all(|run| run.known)
}

/// Writes the desired state, reusing the buffer of the list of rules.
pub(super) fn write_desired(runs: &[Run], all_known: bool, scheduling: &mut Scheduling) {
    let Some(strongest) = disabling(runs).map(|(effect, _)| effect).max() else {
        let undecided = |run: &Run| !run.is_preview() && run.effect().is_some();
        *scheduling = if all_known && !runs.iter().any(undecided) {
            Scheduling::Enabled
        } else {
            Scheduling::Unchanged
        };
        return;
    };
    let ids = || disabling(runs).map(|(_, id)| id);
    match scheduling {
        Scheduling::Disabled { effect, rules } => {
            *effect = strongest;
            if !rules.iter().eq(ids()) {
                rules.clear();
                rules.extend(ids().cloned());
            }
        }
        _ => {
            *scheduling = Scheduling::Disabled {
                effect: strongest,
                rules: ids().cloned().collect(),
            }
        }
    }
}

fn disabling(runs: &[Run]) -> impl Iterator<Item = (TaintEffect, &RuleId)> {
    runs.iter()
        .filter(|run| !run.is_preview())
        .filter_map(|run| effect(run).map(|effect| (effect, &run.rule.id)))
}
