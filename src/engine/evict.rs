//! Evictions: each round settles before the next one starts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ledger::{Claim, MIN_QUOTA, ThrottleLedger};
use super::metric::{ActionEffect, ActionKind, RankBy};
use super::plan::{Evict, PlanChange, Skipped, Transition};
use super::pod::PodUid;
use super::policy::RuleId;
use super::run::Run;
use super::throttle::{EVALUATIONS_TO_SHOW, Released};
use super::time::BootTime;
use super::track::TrackedPods;
use super::walk::{Skip, Walk, cpu_used, unreclaimable_memory};

const KIND: ActionKind = ActionKind::Eviction;

/// A pod whose eviction was requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PendingEviction {
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
pub(super) struct Rounds {
    pending: Vec<PendingEviction>,
    /// Samples from before this time still include pods that have exited since.
    settled: Option<BootTime>,
}

impl Rounds {
    /// Restores the state returned by [`Self::pending`] and [`Self::settled`].
    pub(super) fn resume(pending: &[PendingEviction], settled: Option<BootTime>) -> Self {
        Self {
            pending: pending.to_vec(),
            settled,
        }
    }

    pub(super) fn pending(&self) -> &[PendingEviction] {
        &self.pending
    }

    pub(super) const fn settled(&self) -> Option<BootTime> {
        self.settled
    }

    /// Drops the pods that are gone or timed out; a sample taken `at` no longer includes them.
    pub(super) fn settle(&mut self, now: BootTime, at: BootTime, pods: &TrackedPods) {
        let settled = &mut self.settled;
        self.pending.retain(|it| {
            let stays = now < it.until && pods.get(&it.uid).is_some_and(|t| t.pod.running);
            if !stays {
                *settled = Some(at);
            }
            stays
        });
    }

    /// Whether the rule's input, measured after the last round, is still above the threshold. An evicted pod may have
    /// contributed to the metrics of every group.
    fn needs_more(&self, run: &Run) -> bool {
        match (self.settled, run.input) {
            (None, None) => true,
            (None, Some(input)) => input.above,
            (Some(_), None) => false,
            (Some(settled), Some(input)) => input.above && input.from >= settled,
        }
    }

    /// The pods that are still there although their evictions were accepted and have timed out, and the rules.
    pub(super) fn timed_out(&self, now: BootTime) -> impl Iterator<Item = (&PodUid, &RuleId)> {
        let timed_out = self.pending.iter().filter(move |it| now >= it.until);
        timed_out.filter_map(|it| {
            it.accepted
                .and(it.rule.as_ref())
                .map(|rule| (&it.uid, rule))
        })
    }

    pub(super) fn is_settling(&self, group: RankBy) -> bool {
        self.pending.iter().any(|it| it.group == group)
    }

    pub(super) fn count(&self, group: RankBy) -> usize {
        let of = |it: &&PendingEviction| it.group == group;
        self.pending.iter().filter(of).count()
    }

    pub(super) fn has(&self, uid: &PodUid) -> bool {
        self.pending.iter().any(|it| it.uid == *uid)
    }

    /// Marks the eviction of a pod as accepted.
    pub(super) fn accept(&mut self, uid: &PodUid, now: BootTime) {
        for pending in self.pending.iter_mut().filter(|it| it.uid == *uid) {
            pending.accepted.get_or_insert(now);
        }
    }

    /// When the eviction of the pod was accepted, and for which rule.
    pub(super) fn accepted(&self, uid: &PodUid) -> Option<(BootTime, &RuleId)> {
        let pending = self.pending.iter().find(|it| it.uid == *uid)?;
        Some((pending.accepted?, pending.rule.as_ref()?))
    }

    /// Removes a pod whose eviction was refused from the round.
    pub(super) fn remove(&mut self, uid: &PodUid) {
        self.pending.retain(|it| it.uid != *uid);
    }

    pub(super) fn clear(&mut self) {
        self.pending.clear();
        self.settled = None;
    }
}

/// The evictions of one walk, for one group.
pub(super) struct EvictionPass<'a> {
    pub(super) walk: Walk<'a>,
    pub(super) group: RankBy,
    pub(super) rounds: &'a mut Rounds,
    /// The enforced rounds, in a Preview.
    pub(super) enforced: Option<&'a Rounds>,
    /// How many pods of this round were already evicted for other rules.
    pub(super) already_evicted: usize,
    /// How long to wait for a round after the grace period.
    pub(super) settle_timeout: Duration,
    pub(super) released: &'a Released,
    /// The throttles of this round's rules.
    pub(super) ledger: &'a ThrottleLedger,
    pub(super) evictions: &'a mut Vec<Evict>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl EvictionPass<'_> {
    /// Evicts victims in order until the gaps are covered, counting what is already being released.
    pub(super) fn run(&mut self, runs: &mut [Run]) {
        let max_pods = runs
            .iter()
            .filter(|run| self.covers(run))
            .map(max_per_round)
            .max();
        let Some(max_pods) = max_pods else { return };
        let mut left = (max_pods as usize).saturating_sub(self.already_evicted);
        for run in runs.iter_mut() {
            run.evicted = 0;
        }
        let mut covered = self.covered();
        for pod_index in self.walk.order {
            if left == 0 || !runs.iter().any(|run| self.needs_victim(run, covered)) {
                return;
            }
            if let Some(release) = self.try_victim(runs, *pod_index, covered) {
                covered += release;
                left -= 1;
            }
        }
    }

    fn covers(&self, run: &Run) -> bool {
        let enforced = self.enforced;
        self.walk.covers(run)
            && run.action_effect(KIND) != ActionEffect::None
            && run.rule.metric.rank_by() == self.group
            && self.rounds.needs_more(run)
            && enforced.is_none_or(|rounds| rounds.needs_more(run))
            && !self.throttle_may_suffice(run)
    }

    /// Whether the rule has just begun to throttle, and what that releases shows only in the next evaluations.
    fn throttle_may_suffice(&self, run: &Run) -> bool {
        let period = run.rule.period;
        let has_begun = run.machine.since.is_some_and(|since| {
            // Evaluations are not exactly one period apart.
            self.walk.now.since(since) + period / 2 < period * EVALUATIONS_TO_SHOW
        });
        let is_measured = is_measured(run);
        let is_open = |claim: &Claim| {
            claim.evaluations < EVALUATIONS_TO_SHOW && (!is_measured || claim.depth.is_idle_only())
        };
        let mut claims = self.ledger.0.iter().filter_map(|it| it.claim(&run.rule.id));
        has_begun && claims.any(is_open)
    }

    fn needs_victim(&self, run: &Run, covered: u64) -> bool {
        let needs = if is_measured(run) {
            run.gap > covered
        } else {
            // One victim per round, whichever rule selects it.
            self.already_evicted == 0 && self.evictions.is_empty()
        };
        needs && run.evicted < max_per_round(run) && self.covers(run)
    }

    /// What this evaluation's throttle steps and the exiting pods release.
    fn covered(&self) -> u64 {
        let pods = (0..self.walk.pods.len()).filter(|pod_index| self.is_exiting(*pod_index));
        let exiting: u64 = pods.map(|pod_index| self.release_of(pod_index)).sum();
        match self.group {
            RankBy::Cpu => exiting + self.released.total.0,
            RankBy::Memory => exiting,
            RankBy::Io => 0,
        }
    }

    fn is_exiting(&self, pod_index: usize) -> bool {
        let tracked = &self.walk.pods[pod_index];
        let pod = &tracked.pod;
        tracked.is_exiting(self.walk.now)
            || self.rounds.has(&pod.uid)
            || self.enforced.is_some_and(|enforced| enforced.has(&pod.uid))
    }

    /// What evicting the pod releases beyond what its throttle does.
    fn release_of(&self, pod_index: usize) -> u64 {
        let usage = &self.walk.usage[pod_index];
        match self.group {
            RankBy::Cpu => cpu_used(usage).saturating_sub(self.released.pods[pod_index].0),
            RankBy::Memory => unreclaimable_memory(usage),
            RankBy::Io => 0,
        }
    }

    /// Evicts the pod for the first rule that may do so; returns how much that releases.
    fn try_victim(&mut self, runs: &mut [Run], pod_index: usize, covered: u64) -> Option<u64> {
        for run in runs.iter_mut() {
            if !self.needs_victim(run, covered) {
                continue;
            }
            match self.candidate(run, pod_index) {
                Ok(()) => {
                    self.evict(run, pod_index);
                    return Some(self.release_of(pod_index));
                }
                Err(skip) => self.walk.record_skip(run, pod_index, KIND, skip, self.out),
            }
        }
        None
    }

    fn candidate(&self, run: &Run, pod_index: usize) -> Result<(), Skip> {
        self.walk.check_eligible(run, pod_index, KIND)?;
        let tracked = &self.walk.pods[pod_index];
        let unowned = run.rule.action.eviction.is_some_and(|e| e.evict_unowned);
        if self.is_exiting(pod_index) {
            return Err(Some(Skipped::NotRunning));
        }
        if tracked.pod.eviction_exemption.is_some() {
            return Err(Some(Skipped::ExemptFromEviction));
        }
        if !tracked.pod.owned && !unowned {
            return Err(Some(Skipped::Unowned));
        }
        if tracked.effect.eviction_pause.rule(self.walk.now).is_some() {
            return Err(Some(Skipped::Ineffective));
        }
        if tracked
            .eviction_blocked_until
            .is_some_and(|until| self.walk.now < until)
        {
            return Err(Some(Skipped::BackingOff));
        }
        // Evicting a pod that releases next to nothing does not help.
        let uses_little = match self.group {
            RankBy::Cpu | RankBy::Io => {
                let uses_little = self.walk.cpu(run, pod_index)? < MIN_QUOTA;
                uses_little && is_measured(run)
            }
            RankBy::Memory => self.walk.memory(run, pod_index)?.unreclaimable.0 == 0,
        };
        if uses_little {
            return Err(Some(Skipped::UsesLittle));
        }
        Ok(())
    }

    fn evict(&mut self, run: &mut Run, pod_index: usize) {
        let pod = &self.walk.pods[pod_index].pod;
        let eviction = run.rule.action.eviction;
        let grace = eviction.map_or(pod.grace, |eviction| eviction.grace_of(pod));
        let release = is_measured(run).then(|| self.release_of(pod_index));
        run.evicted += 1;
        run.clear_skip(&pod.uid, KIND);
        self.evictions.push(Evict {
            uid: pod.uid.clone(),
            rule: run.rule.id.clone(),
            grace,
        });
        self.rounds.pending.push(PendingEviction {
            uid: pod.uid.clone(),
            group: self.group,
            until: self.walk.now + grace + self.settle_timeout,
            rule: Some(run.rule.id.clone()),
            accepted: None,
        });
        let pod = pod.uid.clone();
        let change = PlanChange::Evict {
            pod,
            grace,
            release,
        };
        self.out.push(run.transition(self.walk.now, change));
    }
}

/// Maximum number of pods to evict in one round for this rule.
fn max_per_round(run: &Run) -> u32 {
    if is_measured(run) {
        let spec = run.rule.action.eviction;
        return spec.map_or(0, |spec| spec.max_pods_per_round);
    }
    1
}

/// Whether what evictions release can be measured in the unit of the rule's metric.
fn is_measured(run: &Run) -> bool {
    matches!(run.action_effect(KIND), ActionEffect::Measured(_))
}
