//! Walking over the victims in order, shared by all kinds of action.

use super::metric::{ActionKind, RankBy};
use super::plan::{Skipped, Transition};
use super::pod::PodUid;
use super::rank::compare;
use super::run::Run;
use super::sample::{MemoryParts, Sample};
use super::time::BootTime;
use super::track::{Tracked, TrackedUsage};
use super::units::MilliCpu;

/// Why a candidate is skipped; `None` if that is not worth reporting.
pub(super) type Skip = Option<Skipped>;

/// One walk: for the enforced rules, or for a Preview rule with its virtual usage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    pub(super) pods: &'a [Tracked],
    /// Usage of each pod.
    pub(super) usage: &'a [TrackedUsage],
    /// Pod indexes in victim order.
    pub(super) order: &'a [usize],
    /// Pods that a Preview would have evicted, sorted.
    pub(super) removed: &'a [PodUid],
    /// For Preview.
    pub(super) preview: bool,
}

impl Walk<'_> {
    /// Whether this walk covers the rule, and the rule acts in this evaluation.
    pub(super) fn covers(&self, run: &Run) -> bool {
        run.is_preview() == self.preview && run.is_acting()
    }

    /// Checks whether the rule may act on the pod at all.
    pub(super) fn check_eligible(
        &self,
        run: &Run,
        pod_index: usize,
        kind: ActionKind,
    ) -> Result<(), Skip> {
        let tracked = &self.pods[pod_index];
        let permit = tracked.permit(run.index);
        let allowed = match kind {
            ActionKind::CpuThrottle | ActionKind::ForceGc => permit.throttle,
            ActionKind::Eviction => permit.evict,
        };
        if !permit.matched || self.removed.binary_search(&tracked.pod.uid).is_ok() {
            return Err(None);
        }
        if !allowed {
            return Err(Some(Skipped::NotAllowed));
        }
        if tracked.pod.protected {
            return Err(Some(Skipped::Protected));
        }
        if !tracked.pod.running || tracked.pod.terminating {
            return Err(Some(Skipped::NotRunning));
        }
        Ok(())
    }

    fn fresh_usage(&self, run: &Run, pod_index: usize) -> Option<&TrackedUsage> {
        let usage = &self.usage[pod_index];
        let at = usage.at?;
        (self.now.since(at) <= run.rule.sample_ttl).then_some(usage)
    }

    pub(super) fn cpu(&self, run: &Run, pod_index: usize) -> Result<MilliCpu, Skip> {
        let cpu = self.fresh_usage(run, pod_index).and_then(|usage| usage.cpu);
        cpu.ok_or(Some(Skipped::NoSample))
    }

    pub(super) fn memory(&self, run: &Run, pod_index: usize) -> Result<MemoryParts, Skip> {
        let memory = self
            .fresh_usage(run, pod_index)
            .and_then(|usage| usage.memory);
        memory.ok_or(Some(Skipped::NoSample))
    }

    /// Reports why a pod was skipped.
    pub(super) fn record_skip(
        &self,
        run: &mut Run,
        pod_index: usize,
        kind: ActionKind,
        skip: Skip,
        out: &mut Vec<Transition>,
    ) {
        if let Some(reason) = skip {
            run.record_skip(self.now, &self.pods[pod_index].pod.uid, kind, reason, out);
        }
    }
}

/// Sorts all pods into victim order by their usage.
pub(super) fn sort(
    order: &mut Vec<usize>,
    pods: &[Tracked],
    usage: &[TrackedUsage],
    uses: fn(&TrackedUsage) -> u64,
) {
    order.clear();
    order.extend(0..pods.len());
    order.sort_unstable_by(|a, b| {
        let of = |pod_index: usize| (&*pods[pod_index].pod, uses(&usage[pod_index]));
        compare(of(*a), of(*b))
    });
}

/// By what victims are ranked: by memory in place of I/O that the kernel does not count by cgroup.
pub(super) fn ranked_usage(rank_by: RankBy, io_is_known: bool) -> fn(&TrackedUsage) -> u64 {
    match rank_by {
        RankBy::Cpu => cpu_used,
        RankBy::Io if io_is_known => io_done,
        RankBy::Io | RankBy::Memory => unreclaimable_memory,
    }
}

/// CPU usage, for ranking.
pub(super) fn cpu_used(usage: &TrackedUsage) -> u64 {
    usage.cpu.map_or(0, |cpu| cpu.0)
}

/// Bytes read and written, for ranking.
pub(super) fn io_done(usage: &TrackedUsage) -> u64 {
    usage.io.unwrap_or_default()
}

/// Unreclaimable memory, for ranking.
pub(super) fn unreclaimable_memory(usage: &TrackedUsage) -> u64 {
    usage.memory.map_or(0, |memory| memory.unreclaimable.0)
}
