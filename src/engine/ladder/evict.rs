//! Evictions: each round settles before the next one starts, and evictions that do not lower the metric end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::round::Round;
use super::victim::{Skip, cpu_used, ranked_usage, unreclaimable_memory};
use crate::engine::ledger::MIN_QUOTA;
use crate::engine::metric::{ActionKind, RankBy};
use crate::engine::plan::{Evict, PlanChange, Skipped};
use crate::engine::pod::{PodUid, exit_time};
use crate::engine::policy::RuleId;
use crate::engine::run::Run;
use crate::engine::time::BootTime;
use crate::engine::track::{Tracked, TrackedPods, TrackedUsage};
use crate::engine::units::Bytes;
use crate::engine::values::Input;

const KIND: ActionKind = ActionKind::Eviction;
/// A pod that holds less is not evicted for memory: that would not help.
const MIN_MEMORY: Bytes = Bytes(16 << 20);
/// On a metric without a unit a victim uses at least this share of what the largest candidate uses: one of this many.
const MIN_SHARE: u64 = 10;
/// The evictions after which the input must have fallen.
const PAIR: u8 = 2;
/// By at least this share of what it was above the threshold.
const MIN_FALL: f64 = 0.1;
/// Evictions that did not help start again after this time, or eight cool-downs.
const RESTART: Duration = Duration::from_mins(30);
/// The owners that are remembered: more than a node has pods. Older ones leave, so that a breach that lasts takes no more memory.
const MAX_OWNERS: usize = 256;
/// A round that is asked for because memory runs out settles after this time.
const URGENT_SETTLING: Duration = Duration::from_secs(10);

/// A pod whose eviction was requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::engine) struct PendingEviction {
    uid: PodUid,
    /// Rules that rank victims by the same resource share their rounds.
    group: RankBy,
    until: BootTime,
    /// The rule that decided it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rule: Option<RuleId>,
    /// When its eviction was accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    accepted: Option<BootTime>,
}

/// The rounds that have not settled, and when the last one settled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::engine) struct Rounds {
    pending: Vec<PendingEviction>,
    /// Samples from before this time still include pods that have exited since.
    settled: Option<BootTime>,
}

impl Rounds {
    /// Restores the state returned by [`Self::pending`] and [`Self::settled`].
    pub(in crate::engine) fn resume(
        pending: &[PendingEviction],
        settled: Option<BootTime>,
    ) -> Self {
        Self {
            pending: pending.to_vec(),
            settled,
        }
    }

    pub(in crate::engine) fn pending(&self) -> &[PendingEviction] {
        &self.pending
    }

    pub(in crate::engine) const fn settled(&self) -> Option<BootTime> {
        self.settled
    }

    /// Drops the pods that are gone or timed out; a sample taken `at` no longer includes them.
    pub(in crate::engine) fn settle(&mut self, now: BootTime, at: BootTime, pods: &TrackedPods) {
        let settled = &mut self.settled;
        self.pending.retain(|it| {
            let stays = now < it.until && pods.get(&it.uid).is_some_and(|t| t.pod.running);
            if !stays {
                *settled = Some(at);
            }
            stays
        });
    }

    /// Whether the input was measured after the last round. An evicted pod may have contributed to the metrics of every group.
    fn is_after_last(&self, input: Input) -> bool {
        self.settled.is_none_or(|settled| input.from >= settled)
    }

    /// The pods that are still there although their evictions were accepted and have timed out, and the rules.
    pub(in crate::engine) fn timed_out(
        &self,
        now: BootTime,
    ) -> impl Iterator<Item = (&PodUid, &RuleId)> {
        let timed_out = self.pending.iter().filter(move |it| now >= it.until);
        timed_out.filter_map(|it| {
            it.accepted
                .and(it.rule.as_ref())
                .map(|rule| (&it.uid, rule))
        })
    }

    pub(in crate::engine) fn is_settling(&self, group: RankBy) -> bool {
        self.pending.iter().any(|it| it.group == group)
    }

    pub(in crate::engine) fn has(&self, uid: &PodUid) -> bool {
        self.pending.iter().any(|it| it.uid == *uid)
    }

    /// Marks the eviction of a pod as accepted.
    pub(in crate::engine) fn accept(&mut self, uid: &PodUid, now: BootTime) {
        for pending in self.pending.iter_mut().filter(|it| it.uid == *uid) {
            pending.accepted.get_or_insert(now);
        }
    }

    /// When the eviction of the pod was accepted, and for which rule.
    pub(in crate::engine) fn accepted(&self, uid: &PodUid) -> Option<(BootTime, &RuleId)> {
        let pending = self.pending.iter().find(|it| it.uid == *uid)?;
        Some((pending.accepted?, pending.rule.as_ref()?))
    }

    /// Removes a pod whose eviction was refused from the round.
    pub(in crate::engine) fn remove(&mut self, uid: &PodUid) {
        self.pending.retain(|it| it.uid != *uid);
    }

    pub(in crate::engine) fn clear(&mut self) {
        self.pending.clear();
        self.settled = None;
    }
}

/// Whether the evictions of a rule lower the input of its metric. Only for metrics without a unit: in CPUs and bytes the use of
/// the victim is the effect.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::engine) struct Evictions {
    /// The last pair of evictions.
    pair: Option<Pair>,
    /// The last pair counted neither way, since other pods used more meanwhile. The next one counts: pods that want more than
    /// the node has always use what is left to them.
    was_hidden: bool,
    /// When two in a row had shown no effect.
    ended: Option<BootTime>,
    /// The owners of evicted pods, the last [`MAX_OWNERS`].
    owners: VecDeque<Arc<str>>,
}

/// Two evictions in a row, and what was measured before the first.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pair {
    evicted: u8,
    input: f64,
    /// What pods that are no victims used.
    others: u64,
    /// What the evicted pods used.
    used: u64,
}

impl Pair {
    fn has_fallen(self, input: f64, threshold: f64) -> bool {
        self.input - input >= MIN_FALL * (self.input - threshold)
    }

    /// Whether other pods use more since, by at least half of what the two used, which may hide an effect.
    fn is_hidden(self, others: u64) -> bool {
        self.used > 0 && others.saturating_sub(self.others) * 2 >= self.used
    }
}

impl Evictions {
    /// Whether they were given up.
    pub(in crate::engine) const fn have_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether the pod may still be evicted: after the end only one that came later, of an owner that has lost none.
    fn allow(&self, tracked: &Tracked) -> bool {
        let owner = tracked.pod.owner.as_ref();
        self.ended.is_none_or(|ended| {
            tracked.seen > ended && owner.is_some_and(|owner| !self.owners.contains(owner))
        })
    }

    fn record(&mut self, tracked: &Tracked, input: f64, others: u64, used: u64) {
        if let Some(owner) = &tracked.pod.owner
            && !self.owners.contains(owner)
        {
            if self.owners.len() >= MAX_OWNERS {
                self.owners.pop_front();
            }
            self.owners.push_back(Arc::clone(owner));
        }
        let pair = self.pair.filter(|pair| pair.evicted < PAIR);
        let pair = pair.unwrap_or(Pair {
            evicted: 0,
            input,
            others,
            used: 0,
        });
        self.pair = Some(Pair {
            evicted: pair.evicted + 1,
            used: pair.used.saturating_add(used),
            ..pair
        });
    }
}

impl Round<'_> {
    /// Evicts victims of the rule; returns whether any was.
    pub(super) fn evict(&mut self, run: &mut Run, input: Input) -> bool {
        let group = run.rule.metric.rank_by();
        if self.is_settling(group) || !self.is_after_last(input) {
            return false;
        }
        match run.rule.metric.measured() {
            Some(_) => {
                let gap = run.gap.saturating_sub(self.covered(group));
                let spec = run.rule.action.eviction;
                let max = spec.map_or(0, |spec| spec.max_pods_per_round);
                self.evict_until(run, gap, max, None)
            }
            None => self.evict_one(run, input),
        }
    }

    /// Evicts as many pods as cover `shortage`, whatever the position of the rule: memory does not wait.
    pub(super) fn evict_at_once(&mut self, run: &mut Run, shortage: Bytes) -> bool {
        if self.is_settling(RankBy::Memory) {
            return false;
        }
        let exiting = self.exiting(RankBy::Memory);
        let missing = shortage.0.max(1).saturating_sub(exiting);
        self.evict_until(run, missing, u32::MAX, Some(URGENT_SETTLING))
    }

    /// Evicts victims in order until what they use covers `gap`.
    fn evict_until(
        &mut self,
        run: &mut Run,
        gap: u64,
        max: u32,
        settling: Option<Duration>,
    ) -> bool {
        let group = run.rule.metric.rank_by();
        let (mut released, mut evicted) = (0, 0);
        self.each_victim(run, group, KIND, |round, run, pod_index| {
            if released >= gap || evicted >= max {
                return Err(None);
            }
            round.check_evictable(run, pod_index, 0)?;
            let release = round.use_of(group, pod_index);
            round.push_eviction(run, pod_index, Some(release), settling);
            released += release;
            evicted += 1;
            Ok(())
        });
        evicted > 0
    }

    /// Evicts one pod, if the last evictions had an effect.
    fn evict_one(&mut self, run: &mut Run, input: Input) -> bool {
        let group = run.rule.metric.rank_by();
        let others = self.used_by_others(run, group);
        self.judge(run, input, others);
        let min = self.largest_candidate(run, group).div_ceil(MIN_SHARE);
        let mut evicted = false;
        self.each_victim(run, group, KIND, |round, run, pod_index| {
            if evicted {
                return Err(None);
            }
            round.check_evictable(run, pod_index, min)?;
            if !run.ladder.evictions.allow(round.pod(pod_index)) {
                return Err(Some(Skipped::Ineffective));
            }
            let used = round.use_of(group, pod_index);
            let tracked = &round.ctx.pods.all()[pod_index];
            run.ladder
                .evictions
                .record(tracked, input.value, others, used);
            round.push_eviction(run, pod_index, None, None);
            evicted = true;
            Ok(())
        });
        evicted
    }

    /// Ends the rule's evictions after two without effect; starts them again after a long time.
    fn judge(&mut self, run: &mut Run, input: Input, others: u64) {
        let (threshold, cool_down) = (run.rule.threshold, run.rule.action.cool_down);
        let evictions = &mut run.ladder.evictions;
        let restart = RESTART.max(cool_down * 8);
        if evictions
            .ended
            .is_some_and(|ended| self.ctx.now.since(ended) >= restart)
        {
            *evictions = Evictions::default();
        }
        let Some(pair) = evictions.pair.filter(|pair| pair.evicted >= PAIR) else {
            return;
        };
        // What a pod used is the effect on an average of that use: it may hide behind the capacity of the node.
        if run.rule.metric.resource().is_some() {
            return;
        }
        evictions.pair = None;
        let has_fallen = pair.has_fallen(input.value, threshold);
        let was_hidden = evictions.was_hidden;
        evictions.was_hidden = !has_fallen && !was_hidden && pair.is_hidden(others);
        if evictions.ended.is_none() && !has_fallen && !evictions.was_hidden {
            evictions.ended = Some(self.ctx.now);
            let change = PlanChange::EvictionsEnded {
                before: pair.input,
                after: input.value,
            };
            self.out.push(run.transition(self.ctx.now, change));
        }
    }

    fn is_settling(&self, group: RankBy) -> bool {
        let enforced = self.enforced.is_some_and(|it| it.rounds.is_settling(group));
        enforced || self.rounds.is_settling(group)
    }

    fn is_after_last(&self, input: Input) -> bool {
        let enforced = self
            .enforced
            .is_none_or(|it| it.rounds.is_after_last(input));
        enforced && self.rounds.is_after_last(input)
    }

    /// What this evaluation's throttle steps and the exiting pods release.
    fn covered(&self, group: RankBy) -> u64 {
        let steps = match group {
            RankBy::Cpu => self.buffers.released.total.0,
            RankBy::Memory | RankBy::Io => 0,
        };
        self.exiting(group) + steps
    }

    fn exiting(&self, group: RankBy) -> u64 {
        let pods = (0..self.ctx.pods.all().len()).filter(|pod_index| self.is_exiting(*pod_index));
        pods.map(|pod_index| self.use_of(group, pod_index)).sum()
    }

    fn is_exiting(&self, pod_index: usize) -> bool {
        let tracked = self.pod(pod_index);
        let uid = &tracked.pod.uid;
        tracked.is_exiting(self.ctx.now)
            || self.rounds.has(uid)
            || self
                .enforced
                .is_some_and(|enforced| enforced.rounds.has(uid))
    }

    /// What evicting the pod releases beyond what its throttle does in this evaluation.
    fn use_of(&self, group: RankBy, pod_index: usize) -> u64 {
        let usage = &self.buffers.usage[pod_index];
        match group {
            RankBy::Cpu => cpu_used(usage).saturating_sub(self.buffers.released.pods[pod_index].0),
            RankBy::Memory => unreclaimable_memory(usage),
            RankBy::Io => self.ranked(group)(usage),
        }
    }

    fn ranked(&self, group: RankBy) -> fn(&TrackedUsage) -> u64 {
        let io_is_known = self.buffers.usage.iter().any(|usage| usage.io.is_some());
        ranked_usage(group, io_is_known)
    }

    /// What pods that the rule may not evict use of the resource.
    fn used_by_others(&self, run: &Run, group: RankBy) -> u64 {
        let pods = 0..self.ctx.pods.all().len();
        let others = pods.filter(|it| self.check_eligible(run, *it, KIND).is_err());
        others.map(|it| self.use_of(group, it)).sum()
    }

    fn largest_candidate(&self, run: &Run, group: RankBy) -> u64 {
        let pods = 0..self.ctx.pods.all().len();
        let candidates = pods.filter(|it| self.check_evictable(run, *it, 0).is_ok());
        candidates
            .map(|it| self.use_of(group, it))
            .max()
            .unwrap_or(0)
    }

    /// Checks whether the rule may evict the pod, which must use at least `min` of the resource.
    fn check_evictable(&self, run: &Run, pod_index: usize, min: u64) -> Result<(), Skip> {
        self.check_eligible(run, pod_index, KIND)?;
        let tracked = self.pod(pod_index);
        let unowned = run.rule.action.eviction.is_some_and(|e| e.evict_unowned);
        if tracked.pod.terminating || self.is_exiting(pod_index) {
            return Err(Some(Skipped::NotRunning));
        }
        if tracked.pod.eviction_exemption.is_some() {
            return Err(Some(Skipped::ExemptFromEviction));
        }
        if !tracked.pod.owned && !unowned {
            return Err(Some(Skipped::Unowned));
        }
        if tracked.effect.not_terminated() {
            return Err(Some(Skipped::Ineffective));
        }
        if tracked
            .eviction_blocked_until
            .is_some_and(|until| self.ctx.now < until)
        {
            return Err(Some(Skipped::BackingOff));
        }
        if self.uses_little(run, pod_index, min)? {
            return Err(Some(Skipped::UsesLittle));
        }
        Ok(())
    }

    /// Evicting a pod that releases next to nothing does not help.
    fn uses_little(&self, run: &Run, pod_index: usize, min: u64) -> Result<bool, Skip> {
        let group = run.rule.metric.rank_by();
        let least = match group {
            RankBy::Cpu => {
                self.cpu(run, pod_index)?;
                MIN_QUOTA.0
            }
            RankBy::Memory => {
                self.memory(run, pod_index)?;
                MIN_MEMORY.0
            }
            // Bytes of I/O if they are known, else of memory.
            RankBy::Io => self.cpu(run, pod_index).map(|_| 1)?,
        };
        Ok(self.use_of(group, pod_index) < least.max(min))
    }

    fn push_eviction(
        &mut self,
        run: &mut Run,
        pod_index: usize,
        release: Option<u64>,
        settling: Option<Duration>,
    ) {
        let pod = Arc::clone(&self.pod(pod_index).pod);
        let eviction = run.rule.action.eviction;
        let grace = eviction.map_or(pod.grace, |eviction| eviction.grace_of(&pod));
        // A pod that a Preview would have evicted counts as gone once its grace period is over.
        let usual = if self.enforced.is_some() {
            grace
        } else {
            exit_time(grace)
        };
        run.clear_skip(&pod.uid, KIND);
        self.buffers.evictions.push(Evict {
            uid: pod.uid.clone(),
            rule: run.rule.id.clone(),
            grace,
        });
        self.rounds.pending.push(PendingEviction {
            uid: pod.uid.clone(),
            group: run.rule.metric.rank_by(),
            until: self.ctx.now + settling.unwrap_or(usual),
            rule: Some(run.rule.id.clone()),
            accepted: None,
        });
        let change = PlanChange::Evict {
            pod: pod.uid.clone(),
            grace,
            release,
            urgent: settling.is_some(),
        };
        self.out.push(run.transition(self.ctx.now, change));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::testing::pod;

    fn of_owner(owner: usize, seen: BootTime) -> Tracked {
        let mut pod = pod("pod");
        pod.owner = Some(owner.to_string().into());
        Tracked::new(Arc::new(pod), seen)
    }

    #[test]
    fn as_many_owners_are_remembered_as_a_node_has_pods() {
        let start = BootTime::default();
        let mut evictions = Evictions::default();
        for owner in 0..10 * MAX_OWNERS {
            evictions.record(&of_owner(owner, start), 20.0, 0, 0);
            evictions.record(&of_owner(owner, start), 20.0, 0, 0);
        }
        assert_eq!(evictions.owners.len(), MAX_OWNERS);
        evictions.ended = Some(start);
        let newcomer = |owner| of_owner(owner, start + Duration::from_secs(1));
        let last = 10 * MAX_OWNERS - 1;
        assert!(!evictions.allow(&newcomer(last)), "it has lost a pod");
        assert!(evictions.allow(&newcomer(last + 1)));
    }
}
