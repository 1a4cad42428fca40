//! Throttling: steps down for breached rules, steps up for rules that are back to normal.

use std::sync::Arc;
use std::time::Duration;

use super::ledger::{
    Claim, Depth, FULL_RATIO, MIN_QUOTA, ThrottleLedger, ThrottledCgroup, allowance, at_floor,
    request,
};
use super::metric::{ActionEffect, ActionKind, RankBy, Resource};
use super::plan::{PlanChange, Skipped, Transition};
use super::policy::CpuThrottle;
use super::round::RoundContext;
use super::run::Run;
use super::sample::{PodSample, Sample, TargetCgroupSample};
use super::time::BootTime;
use super::track::{Tracked, usage};
use super::units::{MilliCpu, Quota};
use super::values::interval;
use super::walk::{Skip, Walk};

const KIND: ActionKind = ActionKind::CpuThrottle;
/// The effect of a step whose release can't be predicted shows after this many evaluations, on any metric; the next kind of
/// action waits for it. Such a step is the idle class, which does not lower the usage of CPU, and every step on a metric that is
/// not in CPUs. From the idle class to quotas, pressure shows the effect in the next evaluation already.
pub(super) const EVALUATIONS_TO_SHOW: u32 = 2;

/// The predicted release of this evaluation's steps, per pod.
#[derive(Debug, Default)]
pub(super) struct Released {
    /// Sum over all pods.
    pub(super) total: MilliCpu,
    /// Indexed like the pods.
    pub(super) pods: Vec<MilliCpu>,
}

impl Released {
    pub(super) fn clear(&mut self, pods: usize) {
        self.total = MilliCpu::ZERO;
        self.pods.clear();
        self.pods.resize(pods, MilliCpu::ZERO);
    }

    pub(super) fn copy(&mut self, other: &Self) {
        self.total = other.total;
        self.pods.clone_from(&other.pods);
    }

    /// Raises the release of one pod to `release` and returns the difference.
    fn raise(&mut self, pod_index: usize, release: MilliCpu) -> MilliCpu {
        let more = release.saturating_sub(self.pods[pod_index]);
        self.pods[pod_index] += more;
        self.total += more;
        more
    }
}

/// The steps down of one round.
pub(super) struct ThrottlePass<'a> {
    pub(super) walk: Walk<'a>,
    /// The victims in order, per resource.
    pub(super) orders: &'a [Vec<usize>; RankBy::ALL.len()],
    /// The period over which pod usage is measured.
    pub(super) period: Duration,
    /// The claims to change.
    pub(super) ledger: &'a mut ThrottleLedger,
    /// The enforced claims, in a Preview.
    pub(super) enforced: Option<&'a ThrottleLedger>,
    pub(super) released: &'a mut Released,
    /// Buffer for the target cgroups of a pod that is not throttled yet.
    pub(super) target_cgroups: &'a mut Vec<ThrottledCgroup>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl ThrottlePass<'_> {
    /// Throttles victims in order, one step each, until their release covers every rule's gap; then one victim for each
    /// rule whose metric has no unit of release, the idle class first.
    pub(super) fn run(&mut self, runs: &mut [Run]) {
        self.reapply(runs);
        self.cover(runs);
        let walk = self.walk;
        let single = |run: &&mut Run| {
            walk.covers(run)
                && !run.release.relapsed
                && run.action_effect(KIND) == ActionEffect::OneVictim
        };
        for run in runs.iter_mut().filter(single) {
            let order = &self.orders[run.rule.metric.rank_by() as usize];
            // The idle class costs less than a quota, so every victim is moved there first.
            let idled = |pass: &mut Self, run: &mut Run| {
                order.iter().any(|pod_index| {
                    pass.is_next_idle(run, *pod_index) && pass.step(run, *pod_index)
                })
            };
            let _found = idled(self, run) || order.iter().any(|it| self.step(run, *it));
        }
    }

    /// Whether the rule's next step on the pod is the idle class.
    fn is_next_idle(&self, run: &Run, pod_index: usize) -> bool {
        let spec = run.rule.action.throttle;
        spec.is_some_and(|spec| spec.idle) && !self.depth(run, &self.walk.pods[pod_index]).idle
    }

    /// Throttles the pods of rules that relapsed after a release as far as before the release.
    fn reapply(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        for run in runs
            .iter_mut()
            .filter(|run| run.release.relapsed && walk.covers(run))
        {
            let mut reapplied = false;
            for pod_index in walk.order {
                if run.relapse_depth(&walk.pods[*pod_index].pod.uid).is_some() {
                    reapplied |= self.step(run, *pod_index);
                }
            }
            // If none of these pods is left, the rule takes normal steps.
            run.release.relapsed = reapplied;
        }
    }

    fn cover(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        let measured = ActionEffect::Measured(Resource::Cpu);
        let covers = |run: &Run| walk.covers(run) && run.action_effect(KIND) == measured;
        for pod_index in walk.order {
            let covered = self.released.total.0;
            let mut open = false;
            for run in runs.iter_mut().filter(|r| covers(r) && r.gap > covered) {
                open = true;
                if run.relapse_depth(&walk.pods[*pod_index].pod.uid).is_some() {
                    continue;
                }
                self.step(run, *pod_index);
            }
            if !open {
                return;
            }
        }
    }

    /// Throttles one pod one step further for one rule. Returns false if the pod was skipped.
    fn step(&mut self, run: &mut Run, pod_index: usize) -> bool {
        let Some(spec) = run.rule.action.throttle else {
            return false;
        };
        match self.candidate(run, spec, pod_index) {
            Err(skip) => {
                self.walk.record_skip(run, pod_index, KIND, skip, self.out);
                false
            }
            Ok((from, uses)) => {
                self.claim(run, spec, pod_index, from, uses);
                true
            }
        }
    }

    /// How far the rule has throttled the pod so far, and the pod's usage.
    fn candidate(
        &mut self,
        run: &Run,
        spec: CpuThrottle,
        pod_index: usize,
    ) -> Result<(Depth, MilliCpu), Skip> {
        self.walk.check_eligible(run, pod_index, KIND)?;
        let tracked = &self.walk.pods[pod_index];
        if let Some((_, reason)) = tracked
            .throttle_blocked
            .filter(|(until, _)| self.walk.now < *until)
        {
            return Err(Some(reason));
        }
        let uses = self.walk.cpu(run, pod_index)?;
        if uses < MIN_QUOTA {
            return Err(Some(Skipped::UsesLittle));
        }
        if tracked.effect.exceeds_quota() {
            return Err(Some(Skipped::Ineffective));
        }
        let from = self.depth(run, tracked);
        if self.may_suffice(run, spec, tracked) {
            return Err(None);
        }
        if !self.load_cgroups(tracked, uses) {
            return Err(Some(self.no_quota_reason(tracked)));
        }
        let down = self.release(tracked, uses, spec.min_ratio) > MilliCpu::ZERO;
        let stuck = at_floor(
            self.target_cgroups,
            &tracked.pod,
            from.ratio,
            spec.min_ratio,
        );
        let idles = from.lower(spec).idle != from.idle;
        // With a minimum ratio of 100 % only the idle class applies.
        let idle_alone = idles && spec.min_ratio == FULL_RATIO;
        if (!down && !idle_alone) || (stuck && !idles) {
            return Err(Some(Skipped::AtFloor));
        }
        Ok((from, uses))
    }

    /// Whether the idle class, which costs the pod no work while CPUs are idle, may be enough.
    fn may_suffice(&self, run: &Run, spec: CpuThrottle, tracked: &Tracked) -> bool {
        let entry = self.ledger.get(&tracked.pod.uid);
        let Some(claim) = entry.and_then(|pod| pod.claim(&run.rule.id)) else {
            return false;
        };
        spec.idle
            && claim.depth.is_idle_only()
            && run.relapse_depth(&tracked.pod.uid).is_none()
            && !run.rule.metric.is_pressure()
            && claim.evaluations < EVALUATIONS_TO_SHOW
    }

    /// Why a pod with known usage has no quota to lower.
    fn no_quota_reason(&self, tracked: &Tracked) -> Skipped {
        let sample = tracked.sample(self.walk.sample);
        if sample.is_some_and(|sample| sample.target_cgroups.is_empty()) {
            Skipped::ContainerMissing
        } else {
            Skipped::NoSample
        }
    }

    fn depth(&self, run: &Run, tracked: &Tracked) -> Depth {
        let entry = self.ledger.get(&tracked.pod.uid);
        let claim = entry.and_then(|pod| pod.claim(&run.rule.id));
        let depth = claim.map_or(Depth::NONE, |claim| claim.depth);
        // A pod that a PodQOS holds in the idle class goes on from there.
        let standing = entry.is_some_and(|entry| entry.standing_claim().is_some());
        let idles = run.rule.action.throttle.is_some_and(|spec| spec.idle);
        Depth {
            idle: depth.idle || (standing && idles),
            ..depth
        }
    }

    /// Fills the buffer with the pod's target cgroups: those in the ledger, or else those in the sample.
    fn load_cgroups(&mut self, tracked: &Tracked, uses: MilliCpu) -> bool {
        let uid = &tracked.pod.uid;
        let enforced_pod = self.enforced.and_then(|enforced| enforced.measured(uid));
        self.target_cgroups.clear();
        if let Some(entry) = enforced_pod.or_else(|| self.ledger.measured(uid)) {
            self.target_cgroups.extend_from_slice(&entry.target_cgroups);
            return !self.target_cgroups.is_empty();
        }
        measure(
            tracked,
            self.walk.sample,
            self.period,
            uses,
            self.target_cgroups,
        )
    }

    /// The CPU that the pod uses now and could not use at that ratio. Computed per target cgroup, because they cannot use
    /// each other's unused quota.
    fn release(&self, tracked: &Tracked, uses: MilliCpu, ratio: u8) -> MilliCpu {
        let samples = || {
            Some((
                tracked.baseline(self.period)?,
                tracked.sample(self.walk.sample)?,
            ))
        };
        let measured = |cgroup: &ThrottledCgroup| {
            let (before, now) = samples()?;
            let target_cgroup = now
                .target_cgroups
                .iter()
                .find(|it| it.cgroup == cgroup.cgroup)?;
            target_usage(before, now, target_cgroup, self.period)
        };
        let is_only = self.target_cgroups.len() == 1;
        let release = |cgroup: &ThrottledCgroup| {
            let measured = if is_only {
                Some(uses)
            } else {
                measured(cgroup)
            };
            let uses = measured.unwrap_or(cgroup.base);
            uses.saturating_sub(cgroup.allowance(&tracked.pod, ratio).min_usage(uses))
        };
        self.target_cgroups.iter().map(release).sum()
    }

    fn claim(
        &mut self,
        run: &mut Run,
        spec: CpuThrottle,
        pod_index: usize,
        from: Depth,
        uses: MilliCpu,
    ) {
        let pod = &self.walk.pods[pod_index].pod;
        let further = from.lower(spec);
        let to = run
            .relapse_depth(&pod.uid)
            .map_or(further, |depth| further.union(depth));
        let entry = self
            .ledger
            .get_or_insert(&pod.uid, || self.target_cgroups.clone());
        entry.measure(self.target_cgroups);
        entry.set_claim(Claim {
            rule: run.rule.id.clone(),
            depth: to,
            before: from,
            step: spec.step,
            period: run.rule.period,
            retired: None,
            evaluations: 0,
        });
        let enforced_pod = self.enforced.and_then(|enforced| enforced.get(&pod.uid));
        let ratio = entry
            .depth()
            .ratio
            .min(enforced_pod.map_or(100, |entry| entry.depth().ratio));
        let quota = allowance(self.target_cgroups, pod, ratio);
        let release = self.release(&self.walk.pods[pod_index], uses, ratio);
        let change = PlanChange::Throttle {
            pod: pod.uid.clone(),
            from: from.ratio,
            to: to.ratio,
            idle: to.idle,
            quota,
            release: self.released.raise(pod_index, release),
        };
        run.clear_skip(&pod.uid, KIND);
        self.out.push(run.transition(self.walk.now, change));
    }
}

/// Collects the target cgroups of a pod that is not throttled yet, with base = min(quota, usage). Returns false if any
/// of them is unknown.
fn measure(
    tracked: &Tracked,
    sample: &Sample,
    period: Duration,
    uses: MilliCpu,
    target_cgroups: &mut Vec<ThrottledCgroup>,
) -> bool {
    let Some(now) = tracked.sample(sample) else {
        return false;
    };
    let before = tracked.baseline(period);
    let measured = |target_cgroup: &TargetCgroupSample| {
        if now.target_cgroups.len() == 1 {
            return Some(uses);
        }
        target_usage(before?, now, target_cgroup, period)
    };
    let known: MilliCpu = now.target_cgroups.iter().filter_map(measured).sum();
    for target_cgroup in &now.target_cgroups {
        let Some(original) = target_cgroup.quota else {
            return false;
        };
        let share = || {
            uses.saturating_sub(known)
                .max(request(&tracked.pod, &target_cgroup.cgroup))
        };
        let usage = measured(target_cgroup).unwrap_or_else(share);
        target_cgroups.push(ThrottledCgroup::new(
            Arc::clone(&target_cgroup.cgroup),
            usage,
            original,
        ));
    }
    !target_cgroups.is_empty()
}

fn target_usage(
    before: &PodSample,
    now: &PodSample,
    target_cgroup: &TargetCgroupSample,
    period: Duration,
) -> Option<MilliCpu> {
    let interval = interval(Some(before.at), now.at, period).ok()?;
    let earlier = before
        .target_cgroups
        .iter()
        .find(|b| b.cgroup == target_cgroup.cgroup)?;
    usage(earlier.cpu_nanos, target_cgroup.cpu_nanos, interval, None)
}

/// The steps up of one evaluation.
pub(super) struct RestorePass<'a> {
    pub(super) ctx: RoundContext<'a>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl RestorePass<'_> {
    /// Restores every claim whose rule is back to normal by one step, and removes those that are back at their original.
    pub(super) fn run(&mut self, runs: &[Run], ledger: &mut ThrottleLedger) {
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
                claim.evaluations += u32::from(find(runs, claim).is_some_and(|run| run.due));
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
                claim.retired = Some(next_due_after(due, claim.period, self.ctx.now));
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
        let bounded = Depth {
            ratio: depth.ratio.max(spec.min_ratio),
            idle: depth.idle && spec.idle,
        };
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
pub(super) fn next_due_after(due: BootTime, period: Duration, now: BootTime) -> BootTime {
    let step = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX).max(1);
    let missed = now.since(due).as_nanos() + period.as_nanos() / 2;
    let steps = u64::try_from(missed / u128::from(step)).unwrap_or(u64::MAX);
    due + Duration::from_nanos(step.saturating_mul(steps.saturating_add(1)))
}
