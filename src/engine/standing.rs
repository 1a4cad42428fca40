//! Standing quality of service: what a `PodQOS` does to its pods at all times, without a rule.

use super::ladder::RoundContext;
use super::ledger::{Claim, ThrottleLedger};
use super::plan::{PlanChange, Transition};
use super::pod::Pod;
use super::policy::{PodPolicy, RuleId};
use super::time::BootTime;
use super::track::Tracked;
use super::units::{MilliCpu, Quota};

/// The `PodQOS` that keeps a pod in the idle class.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StandingQos {
    /// It, in place of a rule.
    pub(super) rule: RuleId,
    /// Report only.
    pub(super) preview: bool,
}

impl StandingQos {
    /// Of several policies the first one by name that lowers the pod, else the first in Preview.
    pub(super) fn of(policies: &[PodPolicy], pod: &Pod) -> Option<Self> {
        let idles = |policy: &&PodPolicy| policy.standing.idle && policy.matches(pod);
        let found = policies.iter().filter(idles);
        let policy = found.min_by_key(|policy| (policy.standing.preview, &policy.name))?;
        (!pod.protected).then(|| Self {
            rule: RuleId::standing(&policy.name),
            preview: policy.standing.preview,
        })
    }
}

/// The `PodQOS` that holds the pod in the idle class now.
fn held<'a>(tracked: &Tracked, ledger: &'a ThrottleLedger) -> Option<&'a RuleId> {
    let claim = ledger.get(&tracked.pod.uid)?.standing_claim()?;
    claim.depth.idle.then_some(&claim.rule)
}

/// When the pod next needs an evaluation after the one at `last`: now if it is not in its class, or not any more of it; at the
/// end of a back-off. `ledgers` are the enforced one and that of Previews.
pub(super) fn due(
    tracked: &Tracked,
    ledgers: [&ThrottleLedger; 2],
    last: BootTime,
) -> Option<BootTime> {
    let [enforced, preview] = ledgers;
    let blocked = blocked(tracked, last);
    let wanted = tracked.standing_in(false);
    if wanted == held(tracked, enforced) {
        let changed = tracked.standing_in(true) != held(tracked, preview);
        let retry = blocked.filter(|_| wanted.is_some());
        return if changed { Some(last) } else { retry };
    }
    // What is no longer wanted is restored in any case.
    Some(blocked.filter(|_| wanted.is_some()).unwrap_or(last))
}

/// Until when the pod is left alone, after a failure or a contest.
fn blocked(tracked: &Tracked, now: BootTime) -> Option<BootTime> {
    let until = tracked.throttle_blocked.map(|(until, _)| until);
    until.filter(|until| *until > now)
}

/// Makes the standing claims of a ledger those that the policies want.
pub(super) struct StandingPass<'a> {
    pub(super) ctx: RoundContext<'a>,
    /// For the policies in Preview.
    pub(super) preview: bool,
    pub(super) out: &'a mut Vec<Transition>,
}

impl StandingPass<'_> {
    pub(super) fn run(&mut self, ledger: &mut ThrottleLedger) {
        for tracked in self.ctx.pods.all() {
            let wanted = tracked.standing_in(self.preview);
            let held = held(tracked, ledger).cloned();
            if wanted == held.as_ref() {
                continue;
            }
            if wanted.is_some() && blocked(tracked, self.ctx.now).is_some() && !self.preview {
                continue;
            }
            let entry = ledger.get_or_insert(&tracked.pod.uid, Vec::new);
            entry.claims.retain(|claim| !claim.is_standing());
            if let Some(rule) = held {
                self.report(tracked, rule, false);
            }
            if let Some(rule) = wanted {
                entry.set_claim(Claim::standing(rule.clone()));
                self.report(tracked, rule.clone(), true);
            }
        }
        ledger.0.retain(|it| self.ctx.pods.get(&it.uid).is_some());
        ledger.prune();
    }

    fn report(&mut self, tracked: &Tracked, rule: RuleId, idle: bool) {
        self.out.push(Transition {
            at: self.ctx.now,
            rule,
            would: self.preview,
            change: PlanChange::Throttle {
                pod: tracked.pod.uid.clone(),
                from: 100,
                to: 100,
                idle,
                quota: Quota::Unlimited,
                release: MilliCpu::ZERO,
            },
        });
    }
}
