//! Restoring throttles: one step up for each pod and evaluation, in the reverse order of the ladder.

use std::time::Duration;

use super::round::RoundContext;
use crate::engine::ledger::{Claim, Depth, ThrottleLedger, allowance};
use crate::engine::plan::{PlanChange, Transition};
use crate::engine::run::Run;
use crate::engine::time::BootTime;
use crate::engine::track::Tracked;
use crate::engine::units::{MilliCpu, Quota};

/// The steps up of one evaluation.
pub(in crate::engine) struct RestorePass<'a> {
    pub(in crate::engine) ctx: RoundContext<'a>,
    pub(in crate::engine) out: &'a mut Vec<Transition>,
}

impl RestorePass<'_> {
    /// Restores every claim whose rule is back to normal by one step, and removes those that are back at their original.
    pub(in crate::engine) fn run(&mut self, runs: &[Run], ledger: &mut ThrottleLedger) {
        for entry in &mut ledger.0 {
            let Some(tracked) = self.ctx.pods.get(&entry.uid) else {
                entry.claims.clear();
                continue;
            };
            if let Some(now) = tracked.sample(self.ctx.sample) {
                entry.sync_cgroups(&tracked.pod, &now.target_cgroups);
            }
            for index in 0..entry.claims.len() {
                let claim = &mut entry.claims[index];
                claim.before = claim.depth;
                let Some(to) = self.next_depth(runs, claim) else {
                    continue;
                };
                claim.depth = to;
                let ratio = entry.depth().ratio;
                let quota = allowance(&entry.target_cgroups, &tracked.pod, ratio);
                self.report(runs, &entry.claims[index], tracked, quota);
            }
        }
        ledger.prune();
    }

    /// The next depth of the claim; `None` if it does not change.
    fn next_depth(&self, runs: &[Run], claim: &mut Claim) -> Option<Depth> {
        let to = match claim.retired {
            Some(due) if due > self.ctx.now => return None,
            Some(due) => {
                claim.retired = Some(next_due_after(
                    due,
                    claim.interval(self.ctx.period),
                    self.ctx.now,
                ));
                claim.depth.raise(claim.step)
            }
            None => self.depth_for_rule(find(runs, claim)?, claim.depth),
        };
        (to != claim.depth).then_some(to)
    }

    fn depth_for_rule(&self, run: &Run, depth: Depth) -> Depth {
        let Some(spec) = run.rule.action.throttle else {
            return depth;
        };
        let bounded = depth.within(spec);
        if bounded == depth && run.is_releasing(self.ctx.now, self.ctx.unknown_limit) {
            return depth.raise(spec.step);
        }
        bounded
    }

    fn report(&mut self, runs: &[Run], claim: &Claim, tracked: &Tracked, quota: Quota) {
        self.out.push(Transition {
            at: self.ctx.now,
            rule: claim.rule.clone(),
            would: find(runs, claim).is_some_and(Run::is_preview) && claim.retired.is_none(),
            change: PlanChange::Throttle {
                pod: tracked.pod.uid.clone(),
                from: claim.before.ratio,
                to: claim.depth.ratio,
                idle: claim.depth.idle,
                quota,
                release: MilliCpu::ZERO,
            },
        });
    }
}

fn find<'a>(runs: &'a [Run], claim: &Claim) -> Option<&'a Run> {
    let found = runs.binary_search_by(|run| run.rule.id.cmp(&claim.rule));
    found.ok().map(|index| &runs[index])
}

/// The next time `due + k x period` that is at least half a period away; missed times are skipped.
pub(in crate::engine) fn next_due_after(
    due: BootTime,
    period: Duration,
    now: BootTime,
) -> BootTime {
    let step = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX).max(1);
    let missed = now.since(due).as_nanos() + period.as_nanos() / 2;
    let steps = u64::try_from(missed / u128::from(step)).unwrap_or(u64::MAX);
    due + Duration::from_nanos(step.saturating_mul(steps.saturating_add(1)))
}
