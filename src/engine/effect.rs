//! Whether actions have an effect: a throttled pod stays within its quota, a victim can be measured, a reclaim frees
//! something, an evicted pod terminates.
//!
//! A written file proves nothing: an attached `sched_ext` scheduler ignores quotas, and a pod may run in another cgroup.

use std::time::Duration;

use super::ladder::Rounds;
use super::ledger::{ThrottleLedger, allowance};
use super::plan::{Ineffective, PlanChange, Skipped, Transition};
use super::pod::PodUid;
use super::policy::RuleId;
use super::protected::{ENFORCEMENT_PERIOD, may_act_on};
use super::run::Run;
use super::sample::Sample;
use super::time::BootTime;
use super::track::{Tracked, TrackedPods};
use super::units::{MilliCpu, Quota};

/// Consecutive evaluations that must show no effect.
const MIN_MISSES: u8 = 2;
/// A quota must be exceeded for this long: overruns are paid back in later enforcement periods, and a host that stalls this
/// machine makes them longer.
const MIN_EXCESS: Duration = Duration::from_secs(10);
/// A pod may exceed its quota by this factor.
const TOLERANCE: f64 = 1.1;
/// The kernel stops a thread at a timer tick, up to this much after its quota is used up, in each enforcement period. Emulated
/// kernels were up to 2.4 ms late.
const MAX_OVERRUN: Duration = Duration::from_millis(5);
/// The kernel hands quota out in slices; each CPU may use the rest of one (`sched_cfs_bandwidth_slice_us`).
const BANDWIDTH_SLICE: Duration = Duration::from_millis(5);
/// An evicted pod is seen terminating within this time: the API server sets its deletion timestamp with the answer.
const TERMINATION_NOTICE: Duration = Duration::from_secs(5);

/// The checks of one pod.
#[derive(Debug, Default)]
pub(super) struct EffectCheck {
    /// The quota in force, and the sample after which it was written.
    written: Option<(MilliCpu, BootTime)>,
    /// It used more than its quota in the last evaluations.
    excess: Option<Excess>,
    /// Consecutive evaluations in which a rule acted and its usage of CPU was unknown.
    unmeasured: u8,
    /// The rule whose reclaim freed nothing, until it is Normal.
    pub(super) not_reclaimed: Option<RuleId>,
    /// The rule whose eviction was accepted and did not terminate it, until it is Normal.
    pub(super) not_terminated: Option<RuleId>,
    /// What was reported.
    ineffective: Option<(RuleId, Ineffective)>,
}

/// Consecutive intervals in which a pod used more than its quota.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Excess {
    from: BootTime,
    to: BootTime,
    evaluations: u8,
    /// In the last one.
    observed: Ineffective,
}

impl EffectCheck {
    /// The rule whose last action has no effect, and what shows it.
    pub(super) fn ineffective(&self) -> Option<(&RuleId, Ineffective)> {
        let (rule, observed) = self.ineffective.as_ref()?;
        Some((rule, *observed))
    }

    /// Whether an eviction did not terminate it.
    pub(super) const fn not_terminated(&self) -> bool {
        self.not_terminated.is_some()
    }

    /// Forgets what had no effect for a rule that is not in force.
    fn forget(&mut self, in_force: impl Fn(&RuleId) -> bool) {
        let keep = |rule: &mut RuleId| in_force(rule);
        let _ = self.not_reclaimed.take_if(|rule| !keep(rule));
        let _ = self.not_terminated.take_if(|rule| !keep(rule));
    }

    /// Whether the pod does not keep to its quota, so that a lower one would not help.
    pub(super) fn exceeds_quota(&self) -> bool {
        self.excess.is_some_and(|excess| {
            excess.evaluations >= MIN_MISSES && excess.to.since(excess.from) >= MIN_EXCESS
        })
    }

    /// Another writer changed its quota, which was written again: its effect is verified from then on.
    pub(super) fn overwritten(&mut self) {
        self.written = None;
    }

    /// Adds an interval in which it used more than its quota.
    fn add_excess(&mut self, from: BootTime, to: BootTime, observed: Ineffective) {
        let before = self.excess;
        self.excess = Some(Excess {
            from: before.map_or(from, |before| before.from),
            to,
            evaluations: before.map_or(1, |before| before.evaluations.saturating_add(1)),
            observed,
        });
    }
}

/// Records the quotas of the last evaluation, which are written after the sample of time `at`.
pub(super) fn record_quotas(
    pods: &mut TrackedPods,
    ledger: &ThrottleLedger,
    now: BootTime,
    at: BootTime,
) {
    for tracked in pods.all_mut() {
        let entry = ledger.get(&tracked.pod.uid);
        let quota = entry.map_or(Quota::Unlimited, |entry| {
            let ratio = entry.depth_in_force(tracked, now).ratio;
            allowance(&entry.target_cgroups, &tracked.pod, ratio)
        });
        let written = &mut tracked.effect.written;
        *written = match quota {
            Quota::Unlimited => None,
            Quota::Limit(quota) => written
                .filter(|(known, _)| *known == quota)
                .or(Some((quota, at))),
        };
    }
}

/// The checks of one evaluation.
pub(super) struct Verification<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    /// The time between two evaluations.
    pub(super) period: Duration,
    pub(super) runs: &'a [Run],
    pub(super) ledger: &'a ThrottleLedger,
    pub(super) rounds: &'a Rounds,
}

impl Verification<'_> {
    /// Checks all pods and reports those whose result changed.
    pub(super) fn run(&self, pods: &mut TrackedPods, out: &mut Vec<Transition>) {
        for tracked in pods.all_mut() {
            tracked.effect.forget(|rule| self.is_in_force(rule));
            self.count(tracked);
            let found = self.find(tracked);
            let before = tracked.effect.ineffective.take();
            let kind = |it: &Option<(RuleId, Ineffective)>| {
                it.as_ref().map(|(_, it)| std::mem::discriminant(it))
            };
            if kind(&found) != kind(&before) {
                let pod = &tracked.pod.uid;
                out.extend(self.transition(pod, found.as_ref(), before));
            }
            tracked.effect.ineffective = found;
        }
    }

    fn transition(
        &self,
        pod: &PodUid,
        found: Option<&(RuleId, Ineffective)>,
        before: Option<(RuleId, Ineffective)>,
    ) -> Option<Transition> {
        let pod = pod.clone();
        let (rule, change) = match (found, before) {
            (Some((rule, observed)), _) => {
                let observed = *observed;
                (rule.clone(), PlanChange::Ineffective { pod, observed })
            }
            (None, Some((rule, _))) => (rule, PlanChange::Effective { pod }),
            (None, None) => return None,
        };
        Some(Transition {
            at: self.now,
            rule,
            would: false,
            change,
        })
    }

    fn is_in_force(&self, rule: &RuleId) -> bool {
        let mut runs = self.runs.iter();
        runs.any(|run| run.rule.id == *rule && run.machine.in_force())
    }

    fn is_contested(&self, tracked: &Tracked) -> bool {
        let blocked = tracked.throttle_blocked;
        blocked.is_some_and(|(until, why)| why == Skipped::Contested && self.now < until)
    }

    fn count(&self, tracked: &mut Tracked) {
        if self.is_contested(tracked) {
            // What is in its files is not ours.
            tracked.effect.written = None;
        }
        if tracked.effect.written.is_none() {
            tracked.effect.excess = None;
        }
        self.verify_quota(tracked);
        self.verify_eviction(tracked);
        let sample = tracked.sample(self.sample);
        let is_unmeasured = sample.is_none_or(|sample| sample.cpu_nanos.is_none())
            && self.acting_rule(tracked).is_some();
        tracked.effect.unmeasured = if is_unmeasured {
            tracked.effect.unmeasured.saturating_add(1)
        } else {
            0
        };
    }

    /// Compares usage and quota; `None` if the quota was not in force during the whole interval, or the usage is not known.
    fn verify_quota(&self, tracked: &mut Tracked) -> Option<()> {
        let (quota, since) = tracked.effect.written?;
        let from = tracked.baseline.as_ref()?.at;
        let to = tracked.sample(self.sample)?.at;
        let cpus = self.sample.node.cpu?.online;
        let uses = tracked.usage(self.sample, self.period, Some(cpus)).cpu?;
        if from < since {
            return None;
        }
        let quota = quota.max(self.quota_in_files(tracked)?);
        if uses.0 as f64 > max_usage(quota, to.since(from), cpus) {
            let observed = Ineffective::QuotaExceeded { uses, quota };
            tracked.effect.add_excess(from, to, observed);
        } else {
            tracked.effect.excess = None;
        }
        Some(())
    }

    /// The quota of its files. It may be above the one planned: the kernel accepts no less than 1 ms per enforcement period,
    /// which is a lot if that period is short. `None` if a file limits nothing.
    fn quota_in_files(&self, tracked: &Tracked) -> Option<MilliCpu> {
        let entry = self.ledger.get(&tracked.pod.uid)?;
        let files = &tracked.sample(self.sample)?.target_cgroups;
        let quota = |cgroup: &str| {
            let file = files.iter().find(|it| *it.cgroup == *cgroup);
            match file.and_then(|it| it.quota) {
                Some(Quota::Unlimited) => None,
                Some(Quota::Limit(limit)) => Some(limit),
                // What was planned counts.
                None => Some(MilliCpu::ZERO),
            }
        };
        let quotas = entry.target_cgroups.iter().map(|it| quota(&it.cgroup));
        quotas.sum()
    }

    fn verify_eviction(&self, tracked: &mut Tracked) {
        if tracked.pod.terminating || !tracked.pod.running {
            tracked.effect.not_terminated = None;
        } else if let Some((at, rule)) = self.rounds.accepted(&tracked.pod.uid)
            && self.now.since(at) >= TERMINATION_NOTICE.max(self.period * u32::from(MIN_MISSES))
        {
            tracked.effect.not_terminated = Some(rule.clone());
        }
    }

    /// A rule that acts, by its last evaluation, and may act on the pod.
    fn acting_rule(&self, tracked: &Tracked) -> Option<&RuleId> {
        if !tracked.pod.running || tracked.pod.terminating {
            return None;
        }
        let mut runs = self.runs.iter();
        let found = runs.find(|run| run.acts() && !run.is_preview() && may_act_on(run, tracked));
        found.map(|run| &run.rule.id)
    }

    fn find(&self, tracked: &Tracked) -> Option<(RuleId, Ineffective)> {
        let uid = &tracked.pod.uid;
        let entry = self.ledger.get(uid);
        if let Some(claim) = entry.and_then(|entry| entry.effective_claim()) {
            if self.is_contested(tracked) {
                return Some((claim.rule.clone(), Ineffective::Contested));
            }
            if let (true, Some(excess)) = (tracked.effect.exceeds_quota(), tracked.effect.excess) {
                return Some((claim.rule.clone(), excess.observed));
            }
        }
        if tracked.effect.unmeasured >= MIN_MISSES
            && let Some(rule) = self.acting_rule(tracked)
        {
            return Some((rule.clone(), Ineffective::NotMeasured));
        }
        let effect = &tracked.effect;
        let failed = [
            (&effect.not_terminated, Ineffective::NotTerminating),
            (&effect.not_reclaimed, Ineffective::NothingReclaimed),
        ];
        let mut failed = failed.into_iter();
        failed.find_map(|(rule, observed)| Some((rule.clone()?, observed)))
    }
}

/// The highest usage over `interval` that a quota explains, in millicores: 10 % more than the quota, an overrun in each
/// enforcement period, one such period that began before the interval, and the unused slices of all CPUs.
fn max_usage(quota: MilliCpu, interval: Duration, cpus: u32) -> f64 {
    let quota = quota.0 as f64;
    let interval = interval.as_secs_f64();
    let period = ENFORCEMENT_PERIOD.as_secs_f64();
    let slices = BANDWIDTH_SLICE.as_secs_f64() * f64::from(cpus) * 1000.0;
    let overrun = MAX_OVERRUN.as_secs_f64() / period * 1000.0;
    quota * TOLERANCE + overrun + (quota * period + slices) / interval
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_overrun_is_no_excess() {
        let at = |seconds: u64| BootTime::from_nanos(seconds * 1_000_000_000);
        let observed = Ineffective::QuotaExceeded {
            uses: MilliCpu(200),
            quota: MilliCpu(100),
        };
        let mut check = EffectCheck::default();
        for second in 1..10 {
            check.add_excess(at(second - 1), at(second), observed);
            assert!(!check.exceeds_quota(), "after {second} s");
        }
        check.add_excess(at(9), at(10), observed);
        assert!(check.exceeds_quota());
        check.excess = None;
        check.add_excess(at(10), at(30), observed);
        assert!(!check.exceeds_quota(), "one evaluation, however long");
    }

    #[test]
    fn short_intervals_have_more_tolerance() {
        let quota = MilliCpu(500);
        let at = |millis| max_usage(quota, Duration::from_millis(millis), 2);
        assert!((at(10_000) - 606.0).abs() < 0.1, "{}", at(10_000));
        assert!((at(200) - 900.0).abs() < 0.1, "{}", at(200));
    }
}
