//! Victims: in which order, and whether a rule may act on one at all.

use super::round::Round;
use crate::engine::metric::{ActionKind, RankBy};
use crate::engine::plan::Skipped;
use crate::engine::rank::compare;
use crate::engine::run::Run;
use crate::engine::sample::MemoryParts;
use crate::engine::track::{Tracked, TrackedUsage};
use crate::engine::units::MilliCpu;

/// Why a candidate is skipped; `None` if that is not worth reporting.
pub(super) type Skip = Option<Skipped>;

impl Round<'_> {
    /// The index of the pod that is `position`th in the order of victims of that resource.
    pub(super) fn victim(&self, rank_by: RankBy, position: usize) -> usize {
        self.buffers.orders[rank_by as usize][position]
    }

    /// Checks whether the rule may act on the pod at all.
    pub(super) fn check_eligible(
        &self,
        run: &Run,
        pod_index: usize,
        kind: ActionKind,
    ) -> Result<(), Skip> {
        let tracked = self.pod(pod_index);
        let permit = tracked.permit(run.index);
        if !permit.matched || self.removed.binary_search(&tracked.pod.uid).is_ok() {
            return Err(None);
        }
        if !permit.allows(kind) {
            return Err(Some(Skipped::NotAllowed));
        }
        if tracked.pod.protected {
            return Err(Some(Skipped::Protected));
        }
        if !tracked.pod.running || tracked.is_exiting(self.ctx.now) {
            return Err(Some(Skipped::NotRunning));
        }
        Ok(())
    }

    pub(super) fn pod(&self, pod_index: usize) -> &Tracked {
        &self.ctx.pods.all()[pod_index]
    }

    fn fresh_usage(&self, run: &Run, pod_index: usize) -> Option<&TrackedUsage> {
        let usage = &self.buffers.usage[pod_index];
        let at = usage.at?;
        (self.ctx.now.since(at) <= run.rule.sample_ttl).then_some(usage)
    }

    pub(super) fn cpu(&self, run: &Run, pod_index: usize) -> Result<MilliCpu, Skip> {
        let usage = self.fresh_usage(run, pod_index);
        usage
            .and_then(|usage| usage.cpu)
            .ok_or(Some(Skipped::NoSample))
    }

    pub(super) fn memory(&self, run: &Run, pod_index: usize) -> Result<MemoryParts, Skip> {
        let usage = self.fresh_usage(run, pod_index);
        usage
            .and_then(|usage| usage.memory)
            .ok_or(Some(Skipped::NoSample))
    }

    /// Reports why a pod was skipped.
    pub(super) fn record_skip(
        &mut self,
        run: &mut Run,
        pod_index: usize,
        kind: ActionKind,
        skip: Skip,
    ) {
        if let Some(reason) = skip {
            let uid = &self.ctx.pods.all()[pod_index].pod.uid;
            run.record_skip(self.ctx.now, uid, kind, reason, self.out);
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
pub(in crate::engine) fn ranked_usage(
    rank_by: RankBy,
    io_is_known: bool,
) -> fn(&TrackedUsage) -> u64 {
    match rank_by {
        RankBy::Cpu => cpu_used,
        RankBy::Io if io_is_known => io_done,
        RankBy::Io | RankBy::Memory => unreclaimable_memory,
    }
}

/// CPU usage, for ranking.
pub(in crate::engine) fn cpu_used(usage: &TrackedUsage) -> u64 {
    usage.cpu.map_or(0, |cpu| cpu.0)
}

/// Bytes read and written, for ranking.
fn io_done(usage: &TrackedUsage) -> u64 {
    usage.io.unwrap_or_default()
}

/// Unreclaimable memory, for ranking.
pub(in crate::engine) fn unreclaimable_memory(usage: &TrackedUsage) -> u64 {
    usage.memory.map_or(0, |memory| memory.unreclaimable.0)
}
