//! Standing quality of service: what a `PodQOS` does to its pods at all times, without a rule.

use std::cmp::Reverse;

use super::ladder::RoundContext;
use super::ledger::{Claim, ThrottleLedger};
use super::plan::{PlanChange, Transition};
use super::pod::{Pod, PodUid};
use super::policy::{PodPolicy, RuleId};
use super::time::BootTime;
use super::track::{Tracked, TrackedPods};
use super::units::{MilliCpu, Quota};

/// What `PodQOS` objects do to a pod at all times, all of them enforced or all in Preview.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StandingQos {
    /// The one that keeps it in the idle class: the first by name.
    pub(super) idle: Option<RuleId>,
    /// The largest burst.
    pub(super) burst: Option<Burst>,
}

/// A burst, and the `PodQOS` that gives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Burst {
    pub(super) rule: RuleId,
    /// Above 0.
    pub(super) amount: MilliCpu,
}

impl StandingQos {
    /// What is enforced, and what Previews would add to it.
    pub(super) fn of(policies: &[PodPolicy], pod: &Pod) -> [Self; 2] {
        let of = |preview| Self::with(policies, pod, preview);
        let [enforced, mut preview] = [false, true].map(of);
        preview.idle = preview.idle.filter(|_| enforced.idle.is_none());
        let amount = |it: &Option<Burst>| it.as_ref().map(|burst| burst.amount);
        if amount(&preview.burst) <= amount(&enforced.burst) {
            preview.burst = None;
        }
        [enforced, preview]
    }

    fn with(policies: &[PodPolicy], pod: &Pod, preview: bool) -> Self {
        let matches = |it: &&PodPolicy| it.standing.preview == preview && it.matches(pod);
        let matching = || policies.iter().filter(matches);
        let id = |policy: &PodPolicy| RuleId::standing(&policy.name);
        let idle = matching().filter(|it| it.standing.idle && !pod.protected);
        // A burst only helps a pod, so protected ones get it, too.
        let burst = matching().filter(|it| it.standing.burst > MilliCpu::ZERO);
        let largest = burst.min_by_key(|it| (Reverse(it.standing.burst), &it.name));
        Self {
            idle: idle.min_by_key(|it| &it.name).map(id),
            burst: largest.map(|it| Burst {
                rule: id(it),
                amount: it.standing.burst,
            }),
        }
    }
}

/// The `PodQOS` that holds the pod in the idle class now.
fn held<'a>(tracked: &Tracked, ledger: &'a ThrottleLedger) -> Option<&'a RuleId> {
    let claim = ledger.get(&tracked.pod.uid)?.standing_claim()?;
    claim.depth.idle.then_some(&claim.rule)
}

/// When the pod next needs an evaluation after the one at `last`: now if it does not have its class and burst, or not any more
/// of them; at the end of a back-off. `ledgers` are the enforced one and that of Previews.
pub(super) fn due(
    tracked: &Tracked,
    ledgers: [&ThrottleLedger; 2],
    last: BootTime,
) -> Option<BootTime> {
    let blocked = blocked(tracked, last);
    let due = |wanted: bool, changed: bool| match blocked {
        // What is no longer wanted is restored in any case.
        Some(until) if wanted => Some(until),
        _ => changed.then_some(last),
    };
    let class = [false, true].map(|preview| tracked.standing_in(preview));
    let [held, would] = ledgers.map(|ledger| held(tracked, ledger));
    let [burst, preview] = &tracked.standing;
    let previews = class[1] != would || preview.burst != tracked.bursts[1];
    let times = [
        due(class[0].is_some(), class[0] != held),
        due(burst.burst.is_some(), burst.burst != tracked.bursts[0]),
        previews.then_some(last),
    ];
    times.into_iter().flatten().min()
}

/// Makes the bursts in force those that the policies want.
pub(super) fn give_bursts(pods: &mut TrackedPods, now: BootTime, out: &mut Vec<Transition>) {
    for tracked in pods.all_mut() {
        for preview in [false, true] {
            let index = usize::from(preview);
            let wanted = &tracked.standing[index].burst;
            let waits = !preview && wanted.is_some() && blocked(tracked, now).is_some();
            if *wanted == tracked.bursts[index] || waits {
                continue;
            }
            let wanted = wanted.clone();
            let before = std::mem::replace(&mut tracked.bursts[index], wanted.clone());
            let rule = wanted.as_ref().or(before.as_ref()).map(|it| &it.rule);
            out.extend(rule.map(|rule| Transition {
                at: now,
                rule: rule.clone(),
                would: preview,
                change: PlanChange::Burst {
                    pod: tracked.pod.uid.clone(),
                    burst: wanted.as_ref().map_or(MilliCpu::ZERO, |it| it.amount),
                },
            }));
        }
    }
}

/// The held pods that have to be restored, at least in part: which terminate, and which are resized.
pub(super) fn yielding(pods: &TrackedPods, ledger: &ThrottleLedger) -> Vec<(PodUid, bool, bool)> {
    let is_held = |it: &&Tracked| ledger.get(&it.pod.uid).is_some() || it.bursts[0].is_some();
    let held = pods.all().iter().filter(is_held).map(|it| &it.pod);
    let yields = held.filter(|pod| pod.terminating || pod.resizing);
    yields
        .map(|pod| (pod.uid.clone(), pod.terminating, pod.resizing))
        .collect()
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
