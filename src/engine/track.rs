//! The pods of the node as tracked by the engine: facts, permits, and usage since the last evaluation.

use std::sync::Arc;
use std::time::Duration;

use super::effect::EffectCheck;
use super::eligibility::Permit;
use super::plan::Skipped;
use super::pod::{Pod, PodUid, exit_time};
use super::policy::{PodPolicy, RuleId};
use super::run::Run;
use super::sample::{MemoryParts, PodSample, Sample};
use super::standing::{Burst, StandingQos};
use super::time::BootTime;
use super::units::MilliCpu;
use super::values::{check_plausible, interval};

/// One pod.
#[derive(Debug)]
pub(super) struct Tracked {
    pub(super) pod: Arc<Pod>,
    /// What each rule's action may do to it, indexed like the rules.
    permits: Vec<Permit>,
    /// A `PodQOS` lets some action touch it.
    pub(super) touchable: bool,
    /// When it was first seen.
    pub(super) seen: BootTime,
    /// What `PodQOS` objects do to it at all times, enforced and in Preview.
    pub(super) standing: [StandingQos; 2],
    /// The bursts in force of these two.
    pub(super) bursts: [Option<Burst>; 2],
    /// `touchable` and `standing` are up to date.
    is_classified: bool,
    /// Its index in the current sample.
    sample_index: Option<usize>,
    /// Its sample at the last evaluation.
    pub(super) baseline: Option<PodSample>,
    /// No new throttle step before this time, and why.
    pub(super) throttle_blocked: Option<(BootTime, Skipped)>,
    /// No eviction before this time, because the last one was refused.
    pub(super) eviction_blocked_until: Option<BootTime>,
    /// When it was first seen terminating.
    terminating_since: Option<BootTime>,
    /// Whether the last action on it has an effect.
    pub(super) effect: EffectCheck,
    /// When page cache was last reclaimed from it.
    pub(super) reclaimed: Option<BootTime>,
}

/// The resource usage of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct TrackedUsage {
    /// Time of the sample; `None` without one.
    pub(super) at: Option<BootTime>,
    /// CPU over the interval.
    pub(super) cpu: Option<MilliCpu>,
    /// Current memory.
    pub(super) memory: Option<MemoryParts>,
    /// Bytes read and written over the interval.
    pub(super) io: Option<u64>,
}

impl Tracked {
    pub(super) fn new(pod: Arc<Pod>, seen: BootTime) -> Self {
        Self {
            pod,
            permits: Vec::new(),
            touchable: false,
            seen,
            standing: Default::default(),
            bursts: [const { None }; 2],
            is_classified: false,
            sample_index: None,
            baseline: None,
            throttle_blocked: None,
            eviction_blocked_until: None,
            terminating_since: None,
            effect: EffectCheck::default(),
            reclaimed: None,
        }
    }

    /// Whether a `PodQOS` keeps it in the idle class.
    pub(super) fn is_held(&self) -> bool {
        self.standing_in(false).is_some()
    }

    /// The `PodQOS` that keeps it in the idle class, enforced or in Preview. A pod that terminates gets its CPU back.
    pub(super) fn standing_in(&self, preview: bool) -> Option<&RuleId> {
        let idle = self.standing[usize::from(preview)].idle.as_ref();
        idle.filter(|_| !self.pod.terminating)
    }

    /// Whether it is one of the pods that rules protect: no `PodQOS` lets any action touch it.
    pub(super) fn is_protected(&self) -> bool {
        let pod = &self.pod;
        let is_batch = pod.elastic || self.is_held() || (self.touchable && !pod.protected);
        pod.running && !pod.terminating && !is_batch
    }

    /// Whether page cache was reclaimed from it in the last two evaluations: it may read that back, and wait for it.
    pub(super) fn reads_back(&self, now: BootTime, period: Duration) -> bool {
        // Evaluations are not exactly one period apart.
        let recent = period * 2 + period / 2;
        self.reclaimed.is_some_and(|at| now.since(at) <= recent)
    }

    /// Whether it is terminating, and is not overdue.
    pub(super) fn is_exiting(&self, now: BootTime) -> bool {
        let limit = exit_time(self.pod.grace);
        let is_due = |since| now.since(since) < limit;
        self.pod.terminating && self.terminating_since.is_none_or(is_due)
    }

    pub(super) fn permit(&self, rule: usize) -> Permit {
        self.permits.get(rule).copied().unwrap_or_default()
    }

    pub(super) fn sample<'a>(&self, sample: &'a Sample) -> Option<&'a PodSample> {
        self.sample_index.and_then(|index| sample.pods.get(index))
    }

    /// Its usage over the evaluation period; a value that exceeds the node's `cpus` is dropped.
    pub(super) fn usage(
        &self,
        sample: &Sample,
        period: Duration,
        cpus: Option<u32>,
    ) -> TrackedUsage {
        let Some(now) = self.sample(sample) else {
            return TrackedUsage::default();
        };
        let before = self.baseline.as_ref();
        let since = before.and_then(|it| Some((it, interval(Some(it.at), now.at, period).ok()?)));
        let cpu = |(before, nanos): (&PodSample, u64)| {
            usage(before.cpu_nanos, now.cpu_nanos, nanos, cpus)
        };
        let io = |(before, _): (&PodSample, u64)| now.io_bytes?.checked_sub(before.io_bytes?);
        TrackedUsage {
            at: Some(now.at),
            cpu: since.and_then(cpu),
            memory: now.memory_parts,
            io: since.and_then(io),
        }
    }

    fn save_baseline(&mut self, sample: &Sample) {
        let Some(now) = self.sample_index.and_then(|index| sample.pods.get(index)) else {
            return;
        };
        match &mut self.baseline {
            Some(baseline) => copy(baseline, now),
            None => self.baseline = Some(now.clone()),
        }
    }
}

/// CPU usage from two readings of a run time counter over an interval, all in nanoseconds; `None` if the counter went
/// back or grew by more than `cpus` can do.
pub fn usage(
    before: Option<u64>,
    now: Option<u64>,
    interval: u64,
    cpus: Option<u32>,
) -> Option<MilliCpu> {
    let nanos = now?.checked_sub(before?)?;
    if let Some(cpus) = cpus {
        check_plausible(nanos as f64, interval as f64, f64::from(cpus)).ok()?;
    }
    MilliCpu::from_usage(nanos, interval)
}

/// Like `clone_from`, but reuses the buffers of the fields.
fn copy(to: &mut PodSample, from: &PodSample) {
    to.uid.clone_from(&from.uid);
    to.at = from.at;
    to.cpu_nanos = from.cpu_nanos;
    to.memory = from.memory;
    to.memory_parts = from.memory_parts;
    to.stalled = from.stalled;
    to.waits = from.waits;
    to.io_bytes = from.io_bytes;
    to.target_cgroups.clone_from(&from.target_cgroups);
    to.containers.clone_from(&from.containers);
}

/// The pods of the node, sorted by UID.
#[derive(Debug, Default)]
pub(super) struct TrackedPods(Vec<Tracked>);

impl TrackedPods {
    pub(super) fn all(&self) -> &[Tracked] {
        &self.0
    }

    pub(super) fn all_mut(&mut self) -> &mut [Tracked] {
        &mut self.0
    }

    pub(super) fn get(&self, uid: &PodUid) -> Option<&Tracked> {
        self.find(uid).map(|index| &self.0[index])
    }

    pub(super) fn get_mut(&mut self, uid: &PodUid) -> Option<&mut Tracked> {
        self.find(uid).map(|index| &mut self.0[index])
    }

    pub(super) fn find(&self, uid: &PodUid) -> Option<usize> {
        self.0.binary_search_by(|t| t.pod.uid.cmp(uid)).ok()
    }

    pub(super) fn remove(&mut self, uid: &PodUid) {
        if let Some(index) = self.find(uid) {
            self.0.remove(index);
        }
    }

    /// Replaces the pods and keeps the state of those that remain.
    pub(super) fn set(&mut self, mut pods: Vec<Arc<Pod>>, now: BootTime) {
        pods.sort_by(|a, b| a.uid.cmp(&b.uid));
        pods.dedup_by(|a, b| a.uid == b.uid);
        let mut old = std::mem::take(&mut self.0).into_iter().peekable();
        for pod in pods {
            while old.next_if(|t| t.pod.uid < pod.uid).is_some() {}
            let tracked = match old.next_if(|t| t.pod.uid == pod.uid) {
                Some(mut tracked) => {
                    if tracked.pod != pod {
                        tracked.pod = pod;
                        tracked.is_classified = false;
                    }
                    tracked
                }
                None => Tracked::new(pod, now),
            };
            self.0.push(tracked);
        }
    }

    /// Computes the permits of pods that have none yet, and what stands for them.
    pub(super) fn compute_permits(&mut self, policies: &[PodPolicy], runs: &[Run]) {
        for tracked in self.0.iter_mut().filter(|t| !t.is_classified) {
            let pod = &tracked.pod;
            tracked.standing = StandingQos::of(policies, pod);
            tracked.is_classified = true;
            let permits = runs
                .iter()
                .map(|run| Permit::of(policies, pod, &run.rule.action));
            tracked.permits = permits.collect();
            let mut matching = policies.iter().filter(|policy| policy.matches(pod));
            tracked.touchable = matching.any(PodPolicy::touches_pods);
        }
    }

    /// Clears the permits.
    pub(super) fn reset_permits(&mut self) {
        for tracked in &mut self.0 {
            tracked.is_classified = false;
        }
    }

    /// Finds the index of every pod in the sample. If a pod has two entries, the later one is used.
    pub(super) fn locate(&mut self, now: BootTime, sample: &Sample) {
        for tracked in &mut self.0 {
            tracked.sample_index = None;
            if tracked.pod.terminating {
                tracked.terminating_since.get_or_insert(now);
            }
        }
        for (index, entry) in sample.pods.iter().enumerate() {
            let Some(tracked) = self.get_mut(&entry.uid) else {
                continue;
            };
            let later =
                |other: &PodSample| (entry.at, entry.cpu_nanos) > (other.at, other.cpu_nanos);
            if tracked.sample(sample).is_none_or(later) {
                tracked.sample_index = Some(index);
            }
        }
    }

    /// Stores the sample as the baseline of the next evaluation.
    pub(super) fn save_baseline(&mut self, sample: &Sample) {
        for tracked in &mut self.0 {
            tracked.save_baseline(sample);
        }
    }
}
