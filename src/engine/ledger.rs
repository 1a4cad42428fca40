//! How far each pod is throttled and for which rules: the claims, and the quotas that follow from them.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::plan::{CpuClass, PodThrottle, TargetCgroup};
use super::pod::{Pod, PodUid};
use super::policy::{CpuThrottle, Rule, RuleId};
use super::sample::TargetCgroupSample;
use super::standing::Burst;
use super::time::BootTime;
use super::track::Tracked;
use super::units::{MilliCpu, Quota};

/// No quota is set below 2 ms of CPU per 100 ms, and a pod that uses less is not throttled: it would not help.
pub(super) const MIN_QUOTA: MilliCpu = MilliCpu(20);
/// The same for pods whose containers run commands as probes, which need CPU within their timeouts.
const MIN_QUOTA_WITH_PROBES: MilliCpu = MilliCpu(100);
/// The ratio at which the original quota stays in place.
pub(super) const FULL_RATIO: u8 = 100;
/// Time between two steps of an accelerated restore.
pub(super) const FAST_RESTORE_INTERVAL: Duration = Duration::from_secs(1);

/// The lowest quota for the pod, apart from its request.
pub(super) const fn min_quota(pod: &Pod) -> MilliCpu {
    if pod.exec_probes {
        MIN_QUOTA_WITH_PROBES
    } else {
        MIN_QUOTA
    }
}

/// How far one pod is throttled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Depth {
    /// Percent of the base.
    pub(super) ratio: u8,
    /// In the lowest class: idle, or the lowest weight where the idle class is unsafe.
    pub(super) idle: bool,
}

impl Default for Depth {
    fn default() -> Self {
        Self::NONE
    }
}

impl Depth {
    pub(super) const NONE: Self = Self {
        ratio: FULL_RATIO,
        idle: false,
    };

    /// The idle class alone.
    const IDLE: Self = Self {
        ratio: FULL_RATIO,
        idle: true,
    };

    /// The quota one step lower.
    pub(super) fn lower_ratio(self, spec: CpuThrottle) -> Self {
        let ratio = self.ratio.saturating_sub(spec.step).max(spec.min_ratio);
        Self {
            ratio: ratio.min(self.ratio),
            ..self
        }
    }

    /// As much of it as the action still has.
    pub(super) fn within(self, spec: CpuThrottle) -> Self {
        Self {
            ratio: self.ratio.max(spec.min_ratio),
            idle: self.idle && spec.idle,
        }
    }

    /// One step up: first the quota, then out of the idle class.
    pub(super) fn raise(self, step: u8) -> Self {
        if self.ratio < FULL_RATIO {
            let ratio = self.ratio.saturating_add(step).min(FULL_RATIO);
            return Self { ratio, ..self };
        }
        Self::NONE
    }

    pub(super) fn union(self, other: Self) -> Self {
        Self {
            ratio: self.ratio.min(other.ratio),
            idle: self.idle || other.idle,
        }
    }
}

/// How far one rule throttles a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) rule: RuleId,
    pub(super) depth: Depth,
    /// The depth before the last evaluation.
    pub(super) before: Depth,
    /// The step with which it is restored once its rule is gone.
    pub(super) step: u8,
    /// It is restored every second, faster than its rule would.
    pub(super) is_fast: bool,
    /// Set when no rule needs it any more: when its next step up is due, whatever the metric is.
    pub(super) retired: Option<BootTime>,
}

impl Claim {
    /// The claim of a `PodQOS`, which holds the pod in the idle class while it selects it.
    pub(super) const fn standing(rule: RuleId) -> Self {
        Self {
            rule,
            depth: Depth::IDLE,
            before: Depth::NONE,
            step: FULL_RATIO,
            is_fast: false,
            retired: None,
        }
    }

    /// Whether it is of a `PodQOS`, not of a rule.
    pub(super) fn is_standing(&self) -> bool {
        self.rule.pod_qos().is_some()
    }

    /// Marks it as needed by its rule.
    pub(super) fn renew(&mut self, rule: &Rule) {
        self.retired = None;
        self.is_fast = false;
        self.step = rule.action.throttle.map_or(self.step, |spec| spec.step);
    }

    /// Marks it as no longer needed: it is restored from `due` on.
    pub(super) fn retire(&mut self, due: BootTime) {
        self.retired.get_or_insert(due);
    }

    /// The time between two steps up, where the rules are evaluated every `period`.
    pub(super) fn interval(&self, period: Duration) -> Duration {
        if self.is_fast {
            period.min(FAST_RESTORE_INTERVAL)
        } else {
            period
        }
    }

    /// Speeds up a retired claim: restores it from `earliest` at the latest, within `within`, including the last step out of
    /// the idle class.
    pub(super) fn speed_up(&mut self, within: Duration, earliest: BootTime) {
        let steps = within.as_secs().saturating_sub(1).max(1);
        let missing = u64::from(FULL_RATIO.saturating_sub(self.depth.ratio));
        let step = u8::try_from(missing.div_ceil(steps)).unwrap_or(FULL_RATIO);
        self.step = self.step.max(step);
        self.is_fast = true;
        self.retired = self.retired.map(|due| due.min(earliest));
    }
}

/// One cgroup under a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThrottledCgroup {
    pub(super) cgroup: Arc<str>,
    /// The CPU that a ratio of 100 % stands for.
    pub(super) base: MilliCpu,
    /// CPU usage when it was first throttled; the base is this unless the original quota is lower.
    usage: MilliCpu,
    /// It used its whole quota then, so it may need more.
    at_limit: bool,
    /// The value of the kernel's file before we changed it.
    pub(super) original: Quota,
    /// The part of the pod's request not assigned to known containers when this one appeared. Until the API server
    /// reports the ID of a container that was just started, all of it may be this container's request.
    pub(super) unassigned: MilliCpu,
}

impl ThrottledCgroup {
    /// A cgroup with a CPU usage of `usage` and a quota of `original`.
    pub(super) fn new(cgroup: Arc<str>, usage: MilliCpu, original: Quota) -> Self {
        let base = original.min_usage(usage);
        Self {
            cgroup,
            base,
            usage,
            at_limit: original == Quota::Limit(base),
            original,
            unassigned: MilliCpu::ZERO,
        }
    }

    /// The quota at that ratio, never below the request or [`min_quota`]; `None` if that is not below the original.
    pub(super) fn quota(&self, pod: &Pod, ratio: u8) -> Option<MilliCpu> {
        if ratio >= FULL_RATIO {
            return None;
        }
        let quota = self.base.percent(ratio).max(self.min_quota(pod));
        match self.original {
            Quota::Limit(limit) if quota >= limit => None,
            _ => Some(quota),
        }
    }

    fn min_quota(&self, pod: &Pod) -> MilliCpu {
        let request = known_request(pod, &self.cgroup).unwrap_or(self.unassigned);
        request.max(min_quota(pod))
    }

    /// The CPU allowed at that ratio.
    pub(super) fn allowance(&self, pod: &Pod, ratio: u8) -> Quota {
        self.quota(pod, ratio).map_or(self.original, Quota::Limit)
    }

    /// Sets a new original after an in-place resize or a change by another writer. If the base was the old limit, it
    /// becomes the new one.
    fn resize(&mut self, original: Quota) {
        self.base = match original {
            Quota::Limit(limit) if self.at_limit => limit,
            other => other.min_usage(self.usage),
        };
        self.original = original;
    }
}

/// The CPU request of a target cgroup: the pod's, or the container's.
pub(super) fn request(pod: &Pod, cgroup: &str) -> MilliCpu {
    known_request(pod, cgroup).unwrap_or_default()
}

fn known_request(pod: &Pod, cgroup: &str) -> Option<MilliCpu> {
    if cgroup.is_empty() {
        return Some(pod.cpu_request);
    }
    pod.container_requests.get(cgroup).copied()
}

/// The CPU that the target cgroups together are allowed at that ratio; unlimited if there are none.
pub(super) fn allowance(target_cgroups: &[ThrottledCgroup], pod: &Pod, ratio: u8) -> Quota {
    if target_cgroups.is_empty() {
        return Quota::Unlimited;
    }
    let mut sum = MilliCpu::ZERO;
    for target_cgroup in target_cgroups {
        match target_cgroup.allowance(pod, ratio) {
            Quota::Unlimited => return Quota::Unlimited,
            Quota::Limit(limit) => sum += limit,
        }
    }
    Quota::Limit(sum)
}

/// Whether no further step changes a quota.
pub(super) fn at_floor(
    target_cgroups: &[ThrottledCgroup],
    pod: &Pod,
    ratio: u8,
    min_ratio: u8,
) -> bool {
    let lowest = min_ratio.min(ratio);
    target_cgroups
        .iter()
        .all(|target_cgroup| target_cgroup.quota(pod, ratio) == target_cgroup.quota(pod, lowest))
}

/// One pod under throttle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThrottleEntry {
    pub(super) uid: PodUid,
    /// The base of all target cgroups together when it was first throttled.
    pub(super) base: MilliCpu,
    /// Empty while no rule has throttled it.
    pub(super) target_cgroups: Vec<ThrottledCgroup>,
    /// Sorted by rule.
    pub(super) claims: Vec<Claim>,
}

impl ThrottleEntry {
    pub(super) fn new(uid: PodUid, target_cgroups: Vec<ThrottledCgroup>) -> Self {
        let base = target_cgroups
            .iter()
            .map(|target_cgroup| target_cgroup.base)
            .sum();
        Self {
            uid,
            base,
            target_cgroups,
            claims: Vec::new(),
        }
    }

    /// Whether its usage is known from when a rule first throttled it. A standing claim does not need it.
    pub(super) fn is_measured(&self) -> bool {
        self.base > MilliCpu::ZERO || !self.target_cgroups.is_empty()
    }

    /// Takes what its cgroups use now as their bases: no quota is in force, only perhaps the idle class.
    pub(super) fn measure_again(&mut self, target_cgroups: &[ThrottledCgroup]) {
        self.target_cgroups.clear();
        self.target_cgroups.extend_from_slice(target_cgroups);
        self.base = target_cgroups.iter().map(|it| it.base).sum();
    }

    /// The claim of a `PodQOS`.
    pub(super) fn standing_claim(&self) -> Option<&Claim> {
        self.claims.iter().find(|claim| claim.is_standing())
    }

    pub(super) fn claim(&self, rule: &RuleId) -> Option<&Claim> {
        self.claims.iter().find(|claim| claim.rule == *rule)
    }

    /// Inserts a claim, or replaces the rule's previous one.
    pub(super) fn set_claim(&mut self, claim: Claim) {
        match self.claims.binary_search_by(|c| c.rule.cmp(&claim.rule)) {
            Ok(index) => self.claims[index] = claim,
            Err(index) => self.claims.insert(index, claim),
        }
    }

    /// The union of all claims.
    pub(super) fn depth(&self) -> Depth {
        let depths = self.claims.iter().map(|claim| claim.depth);
        depths.fold(Depth::NONE, Depth::union)
    }

    /// What is in force of that: nothing while the pod terminates, until it is overdue, since it has to shut down within its grace period, also
    /// beside busy pods.
    pub(super) fn depth_in_force(&self, tracked: &Tracked, now: BootTime) -> Depth {
        if tracked.is_exiting(now) {
            Depth::NONE
        } else {
            self.depth()
        }
    }

    /// The claim in force: the lowest ratio; then idle before not idle; then the first by ID.
    pub(super) fn effective_claim(&self) -> Option<&Claim> {
        let rank = |c: &&Claim| (c.depth.ratio, !c.depth.idle);
        self.claims.iter().min_by_key(rank)
    }

    /// Updates the pod's cgroups: drops those that vanished and gives a new one (a restarted container) a share of what
    /// the vanished ones had.
    pub(super) fn sync_cgroups(&mut self, pod: &Pod, now: &[TargetCgroupSample]) {
        let known = |it: &ThrottledCgroup| {
            now.iter()
                .any(|target_cgroup| target_cgroup.cgroup == it.cgroup)
        };
        if now.is_empty()
            || !self.is_measured()
            || (self.target_cgroups.len() == now.len() && self.target_cgroups.iter().all(known))
        {
            return;
        }
        self.target_cgroups.retain(known);
        let assigned = now
            .iter()
            .map(|target_cgroup| request(pod, &target_cgroup.cgroup))
            .sum();
        let new = |cgroups: &[ThrottledCgroup], target_cgroup: &TargetCgroupSample| {
            !cgroups.iter().any(|it| it.cgroup == target_cgroup.cgroup)
        };
        let mut appeared = now.iter().filter(|l| new(&self.target_cgroups, l)).count() as u64;
        for target_cgroup in now {
            let Some(original) = target_cgroup
                .quota
                .filter(|_| new(&self.target_cgroups, target_cgroup))
            else {
                continue;
            };
            let alive: MilliCpu = self.target_cgroups.iter().map(|it| it.base).sum();
            let share = MilliCpu(self.base.saturating_sub(alive).0 / appeared.max(1));
            let usage = share.max(request(pod, &target_cgroup.cgroup));
            self.target_cgroups.push(ThrottledCgroup {
                unassigned: pod.cpu_request.saturating_sub(assigned),
                ..ThrottledCgroup::new(Arc::clone(&target_cgroup.cgroup), usage, original)
            });
            appeared = appeared.saturating_sub(1);
        }
    }

    pub(super) fn resize(&mut self, cgroup: &str, original: Quota) {
        for target_cgroup in self
            .target_cgroups
            .iter_mut()
            .filter(|l| *l.cgroup == *cgroup)
        {
            target_cgroup.resize(original);
        }
        self.base = self
            .target_cgroups
            .iter()
            .map(|target_cgroup| target_cgroup.base)
            .sum();
    }

    /// Writes the throttle in force into `to`, reusing its buffers.
    fn write(&self, view: &InForce<'_>, to: &mut PodThrottle) {
        let depth = self.depth_in_force(view.tracked, view.now);
        to.ratio = depth.ratio;
        to.class = view.class(depth);
        to.target_cgroups
            .extend(self.target_cgroups.iter().map(|it| TargetCgroup {
                cgroup: Arc::clone(&it.cgroup),
                base: it.base,
                quota: it.quota(&view.tracked.pod, depth.ratio),
            }));
    }
}

/// What decides about a pod's throttle beside its claims.
#[derive(Clone, Copy, Debug)]
pub(super) struct InForce<'a> {
    pub(super) tracked: &'a Tracked,
    pub(super) now: BootTime,
    /// The kubelet of this node would reject new pods.
    pub(super) idle_unsafe: bool,
}

impl InForce<'_> {
    /// The burst at that ratio: none beside a quota of ours, nor during a resize, which the kernel refuses while the burst is
    /// above the new quota.
    fn burst(&self, ratio: u8) -> Option<&Burst> {
        let yields = ratio < FULL_RATIO || self.tracked.pod.resizing;
        let [burst, _] = &self.tracked.bursts;
        burst.as_ref().filter(|_| !yields)
    }

    fn class(&self, depth: Depth) -> CpuClass {
        match depth.idle {
            false => CpuClass::Normal,
            // A resize cannot write the weight of an idle cgroup.
            true if self.idle_unsafe || self.tracked.pod.resizing => CpuClass::LowestWeight,
            true => CpuClass::Idle,
        }
    }
}

/// All throttled pods, sorted by UID.
#[derive(Debug, Default)]
pub(super) struct ThrottleLedger(pub(super) Vec<ThrottleEntry>);

impl ThrottleLedger {
    pub(super) fn get(&self, uid: &PodUid) -> Option<&ThrottleEntry> {
        self.find(uid).ok().map(|index| &self.0[index])
    }

    pub(super) fn get_mut(&mut self, uid: &PodUid) -> Option<&mut ThrottleEntry> {
        self.find(uid).ok().map(|index| &mut self.0[index])
    }

    /// The pod's entry, if a rule throttles it.
    pub(super) fn measured(&self, uid: &PodUid) -> Option<&ThrottleEntry> {
        self.get(uid).filter(|entry| entry.is_measured())
    }

    /// The pod's entry, inserted with these target cgroups if it has none yet.
    pub(super) fn get_or_insert(
        &mut self,
        uid: &PodUid,
        target_cgroups: impl FnOnce() -> Vec<ThrottledCgroup>,
    ) -> &mut ThrottleEntry {
        let index = match self.find(uid) {
            Ok(index) => index,
            Err(index) => {
                self.0
                    .insert(index, ThrottleEntry::new(uid.clone(), target_cgroups()));
                index
            }
        };
        &mut self.0[index]
    }

    /// Reverts the last evaluation's steps down on the pod, which could not be applied.
    pub(super) fn revert(&mut self, uid: &PodUid) {
        if let Some(entry) = self.get_mut(uid) {
            for claim in &mut entry.claims {
                claim.depth = Depth {
                    ratio: claim.depth.ratio.max(claim.before.ratio),
                    idle: claim.depth.idle && claim.before.idle,
                };
            }
        }
        self.prune();
    }

    /// Removes the pods that are no longer throttled.
    pub(super) fn prune(&mut self) {
        for entry in &mut self.0 {
            entry.claims.retain(|claim| claim.depth != Depth::NONE);
            if entry.claims.iter().all(Claim::is_standing) {
                // The next rule measures it again.
                entry.base = MilliCpu::ZERO;
                entry.target_cgroups.clear();
            }
        }
        self.0.retain(|entry| !entry.claims.is_empty());
    }

    /// The throttle or burst in force for the pod.
    pub(super) fn throttle(&self, view: &InForce<'_>) -> Option<PodThrottle> {
        let mut written = Vec::new();
        self.write(view, 0, &mut written);
        written.pop()
    }

    /// Writes the throttle or burst of the pod to `throttles[index]`, and returns whether there is one in force.
    pub(super) fn write(
        &self,
        view: &InForce<'_>,
        index: usize,
        throttles: &mut Vec<PodThrottle>,
    ) -> bool {
        let uid = &view.tracked.pod.uid;
        let depth = |entry: &ThrottleEntry| entry.depth_in_force(view.tracked, view.now);
        let entry = self.get(uid).filter(|entry| depth(entry) != Depth::NONE);
        let burst = view.burst(entry.map_or(FULL_RATIO, |entry| depth(entry).ratio));
        let claim = entry.and_then(ThrottleEntry::effective_claim);
        let rule = claim.map(|it| &it.rule);
        let rule = rule.or_else(|| burst.map(|it| &it.rule));
        let Some(rule) = rule else {
            return false;
        };
        if index == throttles.len() {
            throttles.push(PodThrottle {
                uid: uid.clone(),
                rule: rule.clone(),
                ratio: FULL_RATIO,
                class: CpuClass::Normal,
                burst: MilliCpu::ZERO,
                target_cgroups: Vec::new(),
            });
        }
        let to = &mut throttles[index];
        to.uid.clone_from(uid);
        to.rule.clone_from(rule);
        (to.ratio, to.class) = (FULL_RATIO, CpuClass::Normal);
        to.burst = burst.map_or(MilliCpu::ZERO, |it| it.amount);
        to.target_cgroups.clear();
        if let Some(entry) = entry {
            entry.write(view, to);
        }
        true
    }

    fn find(&self, uid: &PodUid) -> Result<usize, usize> {
        self.0.binary_search_by(|entry| entry.uid.cmp(uid))
    }
}

#[cfg(test)]
mod tests;
