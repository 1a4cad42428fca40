//! Page cache reclaim: how much from which pods.

use super::metric::{ActionEffect, ActionKind, RankBy, Resource};
use super::plan::{PlanChange, Reclaim, Skipped, Transition};
use super::run::Run;
use super::units::Bytes;
use super::walk::{Skip, Walk};

const KIND: ActionKind = ActionKind::ForceGc;
/// Reclaiming less than this does not help the node and would use up the round's only victim.
const MIN_RECLAIM: Bytes = Bytes(4 << 20);

/// The reclaims of one round.
pub(super) struct ReclaimPass<'a> {
    pub(super) walk: Walk<'a>,
    /// The victims in order, per resource.
    pub(super) orders: &'a [Vec<usize>; RankBy::ALL.len()],
    pub(super) reclaims: &'a mut Vec<Reclaim>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl ReclaimPass<'_> {
    /// Reclaims from victims in order until the largest gap of the memory rules is covered.
    pub(super) fn cover(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        let mut covered = 0;
        for pod_index in walk.order {
            let mut largest: Option<(usize, Bytes)> = None;
            let mut open = false;
            for index in 0..runs.len() {
                let run = &mut runs[index];
                let measured = run.action_effect(KIND) == ActionEffect::Measured(Resource::Memory);
                if !measured || !walk.covers(run) || run.gap <= covered {
                    continue;
                }
                open = true;
                if let Some(cache) = self.cache(run, *pod_index)
                    && largest.is_none_or(|(other, _)| runs[other].gap < runs[index].gap)
                {
                    largest = Some((index, cache));
                }
            }
            if let Some((index, cache)) = largest {
                let amount = cache.min(Bytes(runs[index].gap - covered));
                covered += amount.0;
                self.reclaim(&mut runs[index], *pod_index, amount);
            }
            if !open {
                return;
            }
        }
    }

    /// Reclaims all cache of one victim for each rule whose metric has no unit of release, and moves on to the next
    /// victim in the next round, since the cache that remains may be in use.
    pub(super) fn one_per_rule(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        let single =
            |run: &&mut Run| walk.covers(run) && run.action_effect(KIND) == ActionEffect::OneVictim;
        for run in runs.iter_mut().filter(single) {
            let last = run.reclaimed.as_ref();
            let is_last = |pod_index: &usize| Some(&walk.pods[*pod_index].pod.uid) == last;
            let order = &self.orders[run.rule.metric.rank_by() as usize];
            let next = order.iter().position(is_last).map_or(0, |at| at + 1);
            let (before, after) = order.split_at(next);
            let found = after.iter().chain(before).find_map(|pod_index| {
                let cache = self.cache(run, *pod_index)?;
                (cache >= MIN_RECLAIM).then_some((*pod_index, cache))
            });
            if let Some((pod_index, cache)) = found {
                run.reclaimed = Some(walk.pods[pod_index].pod.uid.clone());
                self.reclaim(run, pod_index, cache);
            }
        }
    }

    /// The page cache that the rule may reclaim from the pod; `None` if there is none.
    fn cache(&mut self, run: &mut Run, pod_index: usize) -> Option<Bytes> {
        match self.candidate(run, pod_index) {
            Ok(cache) => Some(cache).filter(|cache| *cache > Bytes::ZERO),
            Err(skip) => {
                self.walk.record_skip(run, pod_index, KIND, skip, self.out);
                None
            }
        }
    }

    fn candidate(&self, run: &Run, pod_index: usize) -> Result<Bytes, Skip> {
        self.walk.check_eligible(run, pod_index, KIND)?;
        let pause = &self.walk.pods[pod_index].effect.reclaim_pause;
        if pause.rule(self.walk.now).is_some() {
            return Err(Some(Skipped::Ineffective));
        }
        Ok(self.walk.memory(run, pod_index)?.cache)
    }

    fn reclaim(&mut self, run: &mut Run, pod_index: usize, amount: Bytes) {
        let uid = &self.walk.pods[pod_index].pod.uid;
        self.reclaims.push(Reclaim {
            uid: uid.clone(),
            rule: run.rule.id.clone(),
            amount,
        });
        run.clear_skip(uid, KIND);
        let pod = uid.clone();
        let change = PlanChange::Reclaim { pod, amount };
        self.out.push(run.transition(self.walk.now, change));
    }
}
