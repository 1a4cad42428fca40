//! Page cache reclaim: how much from which pods.

use super::metric::{ActionKind, Leverage, RankBy, Resource};
use super::plan::{Change, Reclaim, Transition};
use super::run::Run;
use super::units::Bytes;
use super::walk::{Skip, Walk};

const KIND: ActionKind = ActionKind::ForceGc;
/// Reclaiming less than this does not help the node and would use up the round's only victim.
const WORTHWHILE: Bytes = Bytes(4 << 20);

/// The reclaims of one round.
pub(super) struct Reclaiming<'a> {
    pub(super) walk: Walk<'a>,
    /// The victims in order, per resource.
    pub(super) orders: &'a [Vec<usize>; RankBy::ALL.len()],
    pub(super) reclaims: &'a mut Vec<Reclaim>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Reclaiming<'_> {
    /// Reclaims from victims in order until the largest gap of the memory rules is covered.
    pub(super) fn cover(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        let mut covered = 0;
        for place in walk.order {
            let mut widest: Option<(usize, Bytes)> = None;
            let mut open = false;
            for index in 0..runs.len() {
                let run = &mut runs[index];
                let measured = run.leverage(KIND) == Leverage::Measured(Resource::Memory);
                if !measured || !walk.takes(run) || run.gap <= covered {
                    continue;
                }
                open = true;
                if let Some(cache) = self.cache(run, *place)
                    && widest.is_none_or(|(other, _)| runs[other].gap < runs[index].gap)
                {
                    widest = Some((index, cache));
                }
            }
            if let Some((index, cache)) = widest {
                let amount = cache.min(Bytes(runs[index].gap - covered));
                covered += amount.0;
                self.take(&mut runs[index], *place, amount);
            }
            if !open {
                return;
            }
        }
    }

    /// Reclaims all cache of one victim for each rule whose metric has no unit of release, and moves on to the next
    /// victim in the next round, since the cache that remains may be in use.
    pub(super) fn single(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        let single = |run: &&mut Run| walk.takes(run) && run.leverage(KIND) == Leverage::OneVictim;
        for run in runs.iter_mut().filter(single) {
            let last = run.reclaimed.as_ref();
            let is_last = |place: &usize| Some(&walk.pods[*place].pod.uid) == last;
            let order = &self.orders[run.rule.metric.rank_by() as usize];
            let next = order.iter().position(is_last).map_or(0, |at| at + 1);
            let (before, after) = order.split_at(next);
            let found = after.iter().chain(before).find_map(|place| {
                let cache = self.cache(run, *place)?;
                (cache >= WORTHWHILE).then_some((*place, cache))
            });
            if let Some((place, cache)) = found {
                run.reclaimed = Some(walk.pods[place].pod.uid.clone());
                self.take(run, place, cache);
            }
        }
    }

    /// The page cache that the rule may reclaim from the pod; `None` if there is none.
    fn cache(&mut self, run: &mut Run, place: usize) -> Option<Bytes> {
        match self.candidate(run, place) {
            Ok(cache) => Some(cache).filter(|cache| *cache > Bytes::ZERO),
            Err(skip) => {
                self.walk.spare(run, place, KIND, skip, self.out);
                None
            }
        }
    }

    fn candidate(&self, run: &Run, place: usize) -> Result<Bytes, Skip> {
        self.walk.standing(run, place, KIND)?;
        Ok(self.walk.memory(run, place)?.cache)
    }

    fn take(&mut self, run: &mut Run, place: usize, amount: Bytes) {
        let uid = &self.walk.pods[place].pod.uid;
        self.reclaims.push(Reclaim {
            uid: uid.clone(),
            rule: run.rule.id.clone(),
            amount,
        });
        run.act(uid, KIND);
        let pod = uid.clone();
        let change = Change::Reclaim { pod, amount };
        self.out.push(run.transition(self.walk.now, change));
    }
}
