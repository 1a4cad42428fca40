//! The idle class: all victims at once, whatever they use, since it costs them no work while CPUs are free.

use super::Outcome;
use super::round::Round;
use super::victim::Skip;
use crate::engine::ledger::{Depth, ThrottledCgroup};
use crate::engine::metric::{ActionKind, RankBy};
use crate::engine::run::Run;
use crate::engine::units::MilliCpu;

impl Round<'_> {
    /// Moves every victim into the idle class.
    pub(super) fn idle_all(&mut self, run: &mut Run) -> Outcome {
        let mut is_done = true;
        let outcome = self.each_victim(
            run,
            RankBy::Cpu,
            ActionKind::CpuThrottle,
            |round, run, pod_index| {
                let result = round.idle(run, pod_index);
                is_done &= round.depth(run, pod_index).idle;
                result
            },
        );
        let is_new = !run.ladder.depth.idle;
        run.ladder.depth.idle |= is_done && outcome != Outcome::Empty;
        if is_new && is_done && outcome == Outcome::Stuck {
            // A PodQOS holds all of them there already.
            return Outcome::Empty;
        }
        if outcome == Outcome::Stepped {
            run.ladder.depth.idle = true;
        }
        outcome
    }

    /// Moves one victim into the idle class.
    pub(super) fn idle(&mut self, run: &mut Run, pod_index: usize) -> Result<(), Skip> {
        let from = self.depth(run, pod_index);
        if from.idle {
            return Err(None);
        }
        let uses = self.unblocked(run, pod_index)?;
        self.find_cgroups(pod_index, uses)?;
        let to = Depth { idle: true, ..from };
        self.claim(run, pod_index, to, MilliCpu::ZERO);
        Ok(())
    }

    /// Fills the buffer with the pod's target cgroups: those in the ledger, or else those in the sample.
    pub(super) fn find_cgroups(&mut self, pod_index: usize, uses: MilliCpu) -> Result<(), Skip> {
        if self.known_cgroups(pod_index) || self.measure(pod_index, uses) {
            return Ok(());
        }
        Err(Some(self.no_quota_reason(pod_index)))
    }

    fn known_cgroups(&mut self, pod_index: usize) -> bool {
        let uid = &self.ctx.pods.all()[pod_index].pod.uid;
        let enforced = self.enforced.and_then(|it| it.ledger.get(uid));
        let known: &[ThrottledCgroup] = match enforced.or_else(|| self.ledger.get(uid)) {
            Some(entry) => &entry.target_cgroups,
            None => &[],
        };
        self.buffers.target_cgroups.clear();
        self.buffers.target_cgroups.extend_from_slice(known);
        !known.is_empty()
    }
}
