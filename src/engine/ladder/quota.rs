//! CPU quotas. A rule on the CPU in use throttles victims in order until what that releases covers its gap; any other throttles
//! every victim by a step, which is undone as easily.

use std::sync::Arc;
use std::time::Duration;

use super::Outcome;
use super::round::Round;
use super::victim::Skip;
use crate::engine::ledger::{
    Claim, Depth, FULL_RATIO, ThrottledCgroup, allowance, at_floor, min_quota, request,
};
use crate::engine::metric::{ActionKind, RankBy};
use crate::engine::plan::{PlanChange, Skipped};
use crate::engine::run::Run;
use crate::engine::sample::{PodSample, TargetCgroupSample};
use crate::engine::track::usage;
use crate::engine::units::MilliCpu;
use crate::engine::values::interval;

const KIND: ActionKind = ActionKind::CpuThrottle;

/// The predicted release of this evaluation's steps, per pod.
#[derive(Debug, Default)]
pub(in crate::engine) struct Released {
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

    pub(in crate::engine) fn copy(&mut self, other: &Self) {
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

impl Round<'_> {
    /// One step down for the victims of the rule.
    pub(super) fn lower_quotas(&mut self, run: &mut Run) -> Outcome {
        let Some(spec) = run.rule.action.throttle else {
            return Outcome::Empty;
        };
        if run.rule.metric.measured().is_some() {
            return self.cover_gap(run);
        }
        let next = run.ladder.depth.lower_ratio(spec).ratio;
        let outcome = self.each_victim(run, RankBy::Cpu, KIND, |round, run, pod_index| {
            round.lower(run, pod_index, next)
        });
        if outcome == Outcome::Stepped {
            run.ladder.depth.ratio = next;
        }
        outcome
    }

    /// Lowers quotas of victims in order until their release covers the gap.
    fn cover_gap(&mut self, run: &mut Run) -> Outcome {
        let mut shallowest = 0;
        let outcome = self.each_victim(run, RankBy::Cpu, KIND, |round, run, pod_index| {
            let from = round.depth(run, pod_index);
            let Some(spec) = run.rule.action.throttle else {
                return Err(None);
            };
            if run.gap <= round.buffers.released.total.0 {
                shallowest = shallowest.max(from.ratio);
                return Err(None);
            }
            round.lower(run, pod_index, from.lower_ratio(spec).ratio)?;
            shallowest = shallowest.max(round.depth(run, pod_index).ratio);
            Ok(())
        });
        if outcome == Outcome::Stepped {
            run.ladder.depth.ratio = run.ladder.depth.ratio.min(shallowest);
        } else if run.gap <= self.buffers.released.total.0 {
            // What other rules release this time is enough.
            return Outcome::Stepped;
        }
        outcome
    }

    /// Lowers the quotas of one victim to that ratio.
    pub(super) fn lower(&mut self, run: &mut Run, pod_index: usize, ratio: u8) -> Result<(), Skip> {
        let from = self.depth(run, pod_index);
        let uses = self.unblocked(run, pod_index)?;
        let tracked = self.pod(pod_index);
        if uses < min_quota(&tracked.pod) {
            return Err(Some(Skipped::UsesLittle));
        }
        if tracked.effect.exceeds_quota() {
            return Err(Some(Skipped::Ineffective));
        }
        // The base is what it uses when the first quota is set, not when it became idle class.
        let is_first = self.ratio_in_force(pod_index) == FULL_RATIO;
        if !(is_first && self.measure(pod_index, uses)) {
            self.find_cgroups(pod_index, uses)?;
        }
        let floor = run.rule.action.throttle.map_or(0, |spec| spec.min_ratio);
        let pod = &self.pod(pod_index).pod;
        let cgroups = &self.buffers.target_cgroups;
        if self.release(pod_index, uses, floor) == MilliCpu::ZERO
            || at_floor(cgroups, pod, from.ratio, floor)
        {
            return Err(Some(Skipped::AtFloor));
        }
        if ratio >= from.ratio {
            return Err(None);
        }
        self.claim(run, pod_index, Depth { ratio, ..from }, uses);
        Ok(())
    }

    /// The pod's usage, unless its throttle must not change now.
    pub(super) fn unblocked(&self, run: &Run, pod_index: usize) -> Result<MilliCpu, Skip> {
        let blocked = self.pod(pod_index).throttle_blocked;
        match blocked.filter(|(until, _)| self.ctx.now < *until) {
            Some((_, reason)) => Err(Some(reason)),
            None => self.cpu(run, pod_index),
        }
    }

    /// How far the rule throttles the pod.
    pub(super) fn depth(&self, run: &Run, pod_index: usize) -> Depth {
        let entry = self.ledger.get(&self.pod(pod_index).pod.uid);
        let claim = entry.and_then(|entry| entry.claim(&run.rule.id));
        let depth = claim.map_or(Depth::NONE, |claim| claim.depth);
        // A pod that a PodQOS holds in the idle class goes on from there.
        let standing = entry.is_some_and(|entry| entry.standing_claim().is_some());
        let idles = run.rule.action.throttle.is_some_and(|spec| spec.idle);
        Depth {
            idle: depth.idle || (standing && idles),
            ..depth
        }
    }

    /// The lowest ratio over all rules.
    fn ratio_in_force(&self, pod_index: usize) -> u8 {
        let uid = &self.pod(pod_index).pod.uid;
        let enforced = self.enforced.and_then(|it| it.ledger.get(uid));
        let entries = [self.ledger.get(uid), enforced];
        let ratios = entries.into_iter().flatten().map(|it| it.depth().ratio);
        ratios.min().unwrap_or(FULL_RATIO)
    }

    /// Why a pod with known usage has no quota to lower.
    pub(super) fn no_quota_reason(&self, pod_index: usize) -> Skipped {
        let sample = self.pod(pod_index).sample(self.ctx.sample);
        if sample.is_some_and(|sample| sample.target_cgroups.is_empty()) {
            Skipped::ContainerMissing
        } else {
            Skipped::NoSample
        }
    }

    /// The CPU that the pod uses now and could not use at that ratio. Computed per target cgroup, because they cannot use
    /// each other's unused quota.
    fn release(&self, pod_index: usize, uses: MilliCpu, ratio: u8) -> MilliCpu {
        let tracked = self.pod(pod_index);
        let cgroups = &self.buffers.target_cgroups;
        let samples = || {
            let baseline = tracked.baseline.as_ref()?;
            Some((baseline, tracked.sample(self.ctx.sample)?))
        };
        let measured = |cgroup: &ThrottledCgroup| {
            let (before, now) = samples()?;
            let mut all = now.target_cgroups.iter();
            let target_cgroup = all.find(|it| it.cgroup == cgroup.cgroup)?;
            target_usage(before, now, target_cgroup, self.ctx.period)
        };
        let is_only = cgroups.len() == 1;
        let release = |cgroup: &ThrottledCgroup| {
            let measured = if is_only {
                Some(uses)
            } else {
                measured(cgroup)
            };
            let uses = measured.unwrap_or(cgroup.base);
            uses.saturating_sub(cgroup.allowance(&tracked.pod, ratio).min_usage(uses))
        };
        cgroups.iter().map(release).sum()
    }

    /// Throttles the pod to that depth for the rule, by the target cgroups in the buffer.
    pub(super) fn claim(&mut self, run: &mut Run, pod_index: usize, to: Depth, uses: MilliCpu) {
        let from = self.depth(run, pod_index);
        let pod = Arc::clone(&self.pod(pod_index).pod);
        let step = run
            .rule
            .action
            .throttle
            .map_or(FULL_RATIO, |spec| spec.step);
        let cgroups = &self.buffers.target_cgroups;
        let entry = self.ledger.get_or_insert(&pod.uid, || cgroups.clone());
        if entry.depth().ratio == FULL_RATIO {
            entry.measure_again(cgroups);
        }
        entry.set_claim(Claim {
            rule: run.rule.id.clone(),
            depth: to,
            before: from,
            step,
            is_fast: false,
            retired: None,
        });
        let ratio = self.ratio_in_force(pod_index);
        let quota = allowance(&self.buffers.target_cgroups, &pod, ratio);
        let release = self.release(pod_index, uses, ratio);
        let change = PlanChange::Throttle {
            pod: pod.uid.clone(),
            from: from.ratio,
            to: to.ratio,
            idle: to.idle,
            quota,
            release: self.buffers.released.raise(pod_index, release),
        };
        run.clear_skip(&pod.uid, KIND);
        self.out.push(run.transition(self.ctx.now, change));
    }

    /// Fills the buffer with the target cgroups of a pod without a quota of ours, with base = min(quota, usage). Returns false
    /// if any of them is unknown.
    pub(super) fn measure(&mut self, pod_index: usize, uses: MilliCpu) -> bool {
        let (ctx, target_cgroups) = (self.ctx, &mut self.buffers.target_cgroups);
        let tracked = &ctx.pods.all()[pod_index];
        target_cgroups.clear();
        let Some(now) = tracked.sample(ctx.sample) else {
            return false;
        };
        let before = tracked.baseline.as_ref();
        let measured = |target_cgroup: &TargetCgroupSample| {
            if now.target_cgroups.len() == 1 {
                return Some(uses);
            }
            target_usage(before?, now, target_cgroup, ctx.period)
        };
        let known: MilliCpu = now.target_cgroups.iter().filter_map(measured).sum();
        for target_cgroup in &now.target_cgroups {
            let Some(original) = target_cgroup.quota else {
                target_cgroups.clear();
                return false;
            };
            let share = || {
                let rest = uses.saturating_sub(known);
                rest.max(request(&tracked.pod, &target_cgroup.cgroup))
            };
            let usage = measured(target_cgroup).unwrap_or_else(share);
            let cgroup = Arc::clone(&target_cgroup.cgroup);
            target_cgroups.push(ThrottledCgroup::new(cgroup, usage, original));
        }
        !target_cgroups.is_empty()
    }
}

fn target_usage(
    before: &PodSample,
    now: &PodSample,
    target_cgroup: &TargetCgroupSample,
    period: Duration,
) -> Option<MilliCpu> {
    let interval = interval(Some(before.at), now.at, period).ok()?;
    let mut all = before.target_cgroups.iter();
    let earlier = all.find(|it| it.cgroup == target_cgroup.cgroup)?;
    usage(earlier.cpu_nanos, target_cgroup.cpu_nanos, interval, None)
}
