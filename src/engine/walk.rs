//! Walking over the victims in order, shared by all kinds of action.

use super::metric::ActionKind;
use super::plan::{Spared, Transition};
use super::pod::PodUid;
use super::rank::compare;
use super::run::Run;
use super::sample::{MemoryParts, Sample};
use super::time::BootTime;
use super::track::{Figures, Tracked};
use super::units::MilliCpu;

/// Why a candidate is skipped; `None` if that is not worth reporting.
pub(super) type Skip = Option<Spared>;

/// One walk: for the enforced rules, or for a Preview rule with its virtual usage.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    pub(super) pods: &'a [Tracked],
    /// Usage of each pod.
    pub(super) figures: &'a [Figures],
    /// Pod indexes in victim order.
    pub(super) order: &'a [usize],
    /// Pods that a Preview would have evicted, sorted.
    pub(super) removed: &'a [PodUid],
    /// For Preview.
    pub(super) would: bool,
}

impl Walk<'_> {
    /// Whether this walk covers the rule, and the rule acts in this evaluation.
    pub(super) fn takes(&self, run: &Run) -> bool {
        run.would() == self.would && run.acts()
    }

    /// Checks whether the rule may act on the pod at all.
    pub(super) fn standing(&self, run: &Run, place: usize, kind: ActionKind) -> Result<(), Skip> {
        let tracked = &self.pods[place];
        let permit = tracked.permit(run.index);
        let allowed = match kind {
            ActionKind::CpuThrottle | ActionKind::ForceGc => permit.throttle,
            ActionKind::Eviction => permit.evict,
        };
        if !permit.matched || self.removed.binary_search(&tracked.pod.uid).is_ok() {
            return Err(None);
        }
        if !allowed {
            return Err(Some(Spared::NotAllowed));
        }
        if tracked.pod.protected {
            return Err(Some(Spared::Protected));
        }
        if !tracked.pod.running || tracked.pod.terminating {
            return Err(Some(Spared::NotRunning));
        }
        Ok(())
    }

    fn fresh(&self, run: &Run, place: usize) -> Option<&Figures> {
        let figures = &self.figures[place];
        let at = figures.at?;
        (self.now.since(at) <= run.rule.sample_ttl).then_some(figures)
    }

    pub(super) fn cpu(&self, run: &Run, place: usize) -> Result<MilliCpu, Skip> {
        let cpu = self.fresh(run, place).and_then(|figures| figures.cpu);
        cpu.ok_or(Some(Spared::NoSample))
    }

    pub(super) fn memory(&self, run: &Run, place: usize) -> Result<MemoryParts, Skip> {
        let memory = self.fresh(run, place).and_then(|figures| figures.memory);
        memory.ok_or(Some(Spared::NoSample))
    }

    /// Reports why a pod was skipped.
    pub(super) fn spare(
        &self,
        run: &mut Run,
        place: usize,
        kind: ActionKind,
        skip: Skip,
        out: &mut Vec<Transition>,
    ) {
        if let Some(reason) = skip {
            run.spare(self.now, &self.pods[place].pod.uid, kind, reason, out);
        }
    }
}

/// Sorts all pods into victim order by their usage.
pub(super) fn sort(
    order: &mut Vec<usize>,
    pods: &[Tracked],
    figures: &[Figures],
    uses: fn(&Figures) -> u64,
) {
    order.clear();
    order.extend(0..pods.len());
    order.sort_unstable_by(|a, b| {
        let of = |place: usize| (&*pods[place].pod, uses(&figures[place]));
        compare(of(*a), of(*b))
    });
}

/// CPU usage, for ranking.
pub(super) fn cpu_used(figures: &Figures) -> u64 {
    figures.cpu.map_or(0, |cpu| cpu.0)
}

/// Bytes read and written, for ranking.
pub(super) fn io_done(figures: &Figures) -> u64 {
    figures.io.unwrap_or_default()
}

/// Unreclaimable memory, for ranking.
pub(super) fn memory_held(figures: &Figures) -> u64 {
    figures.memory.map_or(0, |memory| memory.held.0)
}
