//! Page cache: reclaimed from one victim an evaluation, that with the most first, and from none twice.

use super::round::Round;
use super::victim::Skip;
use super::{MAX_RECLAIMS, Outcome};
use crate::engine::metric::{ActionKind, RankBy, Rung};
use crate::engine::plan::{PlanChange, Reclaim, Skipped};
use crate::engine::run::Run;
use crate::engine::units::Bytes;

const KIND: ActionKind = ActionKind::ForceGc;
/// Reclaiming less than this does not help the node and would use up the evaluation's only victim.
const MIN_RECLAIM: Bytes = Bytes(4 << 20);

impl Round<'_> {
    /// Reclaims all page cache of the next victim.
    pub(super) fn reclaim_next(&mut self, run: &mut Run) -> Outcome {
        if run.ladder.reclaims >= MAX_RECLAIMS {
            return end_of_reclaims(run);
        }
        let mut largest: Option<(usize, Bytes)> = None;
        let found = self.each_victim(run, RankBy::Memory, KIND, |round, run, pod_index| {
            let cache = round.cache(run, pod_index)?;
            if cache >= MIN_RECLAIM && largest.is_none_or(|(_, most)| cache > most) {
                largest = Some((pod_index, cache));
            }
            Err(None)
        });
        match largest {
            Some((pod_index, amount)) => {
                self.reclaim(run, pod_index, amount);
                Outcome::Stepped
            }
            None if run.ladder.reclaims == 0 => Outcome::Empty,
            None if found == Outcome::Empty => Outcome::Empty,
            None => end_of_reclaims(run),
        }
    }

    /// The page cache that the rule may reclaim from the pod.
    fn cache(&self, run: &Run, pod_index: usize) -> Result<Bytes, Skip> {
        let uid = &self.pod(pod_index).pod.uid;
        if run.ladder.reclaimed.contains(uid) {
            return Err(None);
        }
        // It freed nothing, or this kernel can't reclaim.
        if self.pod(pod_index).effect.not_reclaimed.is_some() {
            return Err(Some(Skipped::Ineffective));
        }
        Ok(self.memory(run, pod_index)?.cache)
    }

    fn reclaim(&mut self, run: &mut Run, pod_index: usize, amount: Bytes) {
        let uid = self.pod(pod_index).pod.uid.clone();
        run.ladder.reclaims += 1;
        run.ladder.reclaimed.push(uid.clone());
        run.clear_skip(&uid, KIND);
        self.buffers.reclaims.push(Reclaim {
            uid: uid.clone(),
            rule: run.rule.id.clone(),
            amount,
        });
        let change = PlanChange::Reclaim { pod: uid, amount };
        self.out.push(run.transition(self.ctx.now, change));
    }
}

/// Nothing is left to reclaim: where no rung follows, it starts again.
fn end_of_reclaims(run: &mut Run) -> Outcome {
    if run.rule.rung_after(Rung::PageCache).is_none() && run.ladder.is_finished(Outcome::Exhausted)
    {
        run.ladder.enter(Rung::PageCache);
    }
    Outcome::Exhausted
}
