//! Evictions: each round settles before the next one starts.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ledger::LEAST;
use super::metric::{ActionKind, Leverage, RankBy};
use super::plan::{Change, Evict, Spared, Transition};
use super::pod::PodUid;
use super::run::Run;
use super::throttle::Released;
use super::time::BootTime;
use super::track::Pods;
use super::walk::{Skip, Walk, cpu_used, memory_held};

const KIND: ActionKind = ActionKind::Eviction;
/// A pod that still exists this long after its grace period no longer counts as released.
pub(super) const SETTLE_TIMEOUT: Duration = Duration::from_mins(1);

/// A pod whose eviction was requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Leaving {
    uid: PodUid,
    /// Rules that rank victims by the same resource share their rounds.
    group: RankBy,
    until: BootTime,
}

/// The rounds that have not settled, and when the last one settled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Rounds {
    leaving: Vec<Leaving>,
    /// Samples from before this time still include pods that have exited since.
    settled: Option<BootTime>,
}

impl Rounds {
    /// Restores the state returned by [`Self::pending`] and [`Self::settled`].
    pub(super) fn resume(leaving: &[Leaving], settled: Option<BootTime>) -> Self {
        Self {
            leaving: leaving.to_vec(),
            settled,
        }
    }

    pub(super) fn leaving(&self) -> &[Leaving] {
        &self.leaving
    }

    pub(super) const fn settled(&self) -> Option<BootTime> {
        self.settled
    }

    /// Drops the pods that are gone or timed out; a sample taken `at` no longer includes them.
    pub(super) fn settle(&mut self, now: BootTime, at: BootTime, pods: &Pods) {
        let settled = &mut self.settled;
        self.leaving.retain(|leaving| {
            let stays =
                now < leaving.until && pods.get(&leaving.uid).is_some_and(|t| t.pod.running);
            if !stays {
                *settled = Some(at);
            }
            stays
        });
    }

    /// Whether the rule's input, measured after the last round, is still above the threshold. An evicted pod may have
    /// contributed to the metrics of every group.
    fn shows_need(&self, run: &Run) -> bool {
        match (self.settled, run.input) {
            (None, None) => true,
            (None, Some(input)) => input.above,
            (Some(_), None) => false,
            (Some(settled), Some(input)) => input.above && input.from >= settled,
        }
    }

    pub(super) fn busy(&self, group: RankBy) -> bool {
        self.leaving.iter().any(|leaving| leaving.group == group)
    }

    pub(super) fn count(&self, group: RankBy) -> usize {
        let of = |leaving: &&Leaving| leaving.group == group;
        self.leaving.iter().filter(of).count()
    }

    pub(super) fn has(&self, uid: &PodUid) -> bool {
        self.leaving.iter().any(|leaving| leaving.uid == *uid)
    }

    /// Removes a pod whose eviction was refused from the round.
    pub(super) fn refuse(&mut self, uid: &PodUid) {
        self.leaving.retain(|leaving| leaving.uid != *uid);
    }

    pub(super) fn clear(&mut self) {
        self.leaving.clear();
        self.settled = None;
    }
}

/// The evictions of one walk, for one group.
pub(super) struct Evicting<'a> {
    pub(super) walk: Walk<'a>,
    pub(super) group: RankBy,
    pub(super) rounds: &'a mut Rounds,
    /// The enforced rounds, in a Preview.
    pub(super) under: Option<&'a Rounds>,
    /// How many pods of this round were already evicted for other rules.
    pub(super) begun: usize,
    /// How long to wait for a round after the grace period.
    pub(super) settle_timeout: Duration,
    pub(super) released: &'a Released,
    pub(super) evictions: &'a mut Vec<Evict>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Evicting<'_> {
    /// Evicts victims in order until the gaps are covered, counting what is already being released.
    pub(super) fn run(&mut self, runs: &mut [Run]) {
        let most = runs.iter().filter(|run| self.takes(run)).map(cap).max();
        let Some(most) = most else { return };
        let mut left = (most as usize).saturating_sub(self.begun);
        for run in runs.iter_mut() {
            run.evicted = 0;
        }
        let mut covered = self.covered();
        for place in self.walk.order {
            if left == 0 || !runs.iter().any(|run| self.open(run, covered)) {
                return;
            }
            if let Some(release) = self.victim(runs, *place, covered) {
                covered += release;
                left -= 1;
            }
        }
    }

    fn takes(&self, run: &Run) -> bool {
        let under = self.under;
        self.walk.takes(run)
            && run.leverage(KIND) != Leverage::None
            && run.rule.metric.rank_by() == self.group
            && self.rounds.shows_need(run)
            && under.is_none_or(|rounds| rounds.shows_need(run))
    }

    fn open(&self, run: &Run, covered: u64) -> bool {
        let needs = if is_measured(run) {
            run.gap > covered
        } else {
            // One victim per round, whichever rule selects it.
            self.begun == 0 && self.evictions.is_empty()
        };
        needs && run.evicted < cap(run) && self.takes(run)
    }

    /// What this evaluation's throttle steps and the exiting pods release.
    fn covered(&self) -> u64 {
        let pods = (0..self.walk.pods.len()).filter(|place| self.leaving(*place));
        let leaving: u64 = pods.map(|place| self.worth(place)).sum();
        match self.group {
            RankBy::Cpu => leaving + self.released.total.0,
            RankBy::Memory => leaving,
            RankBy::Io => 0,
        }
    }

    fn leaving(&self, place: usize) -> bool {
        let tracked = &self.walk.pods[place];
        let pod = &tracked.pod;
        tracked.is_leaving(self.walk.now)
            || self.rounds.has(&pod.uid)
            || self.under.is_some_and(|under| under.has(&pod.uid))
    }

    /// What evicting the pod releases beyond what its throttle does.
    fn worth(&self, place: usize) -> u64 {
        let figures = &self.walk.figures[place];
        match self.group {
            RankBy::Cpu => cpu_used(figures).saturating_sub(self.released.pods[place].0),
            RankBy::Memory => memory_held(figures),
            RankBy::Io => 0,
        }
    }

    /// Evicts the pod for the first rule that may do so; returns how much that releases.
    fn victim(&mut self, runs: &mut [Run], place: usize, covered: u64) -> Option<u64> {
        for run in runs.iter_mut() {
            if !self.open(run, covered) {
                continue;
            }
            match self.candidate(run, place) {
                Ok(()) => {
                    self.evict(run, place);
                    return Some(self.worth(place));
                }
                Err(skip) => self.walk.spare(run, place, KIND, skip, self.out),
            }
        }
        None
    }

    fn candidate(&self, run: &Run, place: usize) -> Result<(), Skip> {
        self.walk.standing(run, place, KIND)?;
        let tracked = &self.walk.pods[place];
        let unowned = run.rule.action.eviction.is_some_and(|e| e.evict_unowned);
        if self.leaving(place) {
            return Err(Some(Spared::NotRunning));
        }
        if tracked.pod.kept.is_some() {
            return Err(Some(Spared::Kept));
        }
        if !tracked.pod.owned && !unowned {
            return Err(Some(Spared::Unowned));
        }
        if tracked.refused.is_some_and(|until| self.walk.now < until) {
            return Err(Some(Spared::BackingOff));
        }
        // Evicting a pod that releases next to nothing does not help.
        let little = match self.group {
            RankBy::Cpu | RankBy::Io => {
                let little = self.walk.cpu(run, place)? < LEAST;
                little && is_measured(run)
            }
            RankBy::Memory => self.walk.memory(run, place)?.held.0 == 0,
        };
        if little {
            return Err(Some(Spared::UsesLittle));
        }
        Ok(())
    }

    fn evict(&mut self, run: &mut Run, place: usize) {
        let pod = &self.walk.pods[place].pod;
        let eviction = run.rule.action.eviction;
        let grace = eviction.map_or(pod.grace, |eviction| eviction.grace_of(pod));
        let release = is_measured(run).then(|| self.worth(place));
        run.evicted += 1;
        run.act(&pod.uid, KIND);
        self.evictions.push(Evict {
            uid: pod.uid.clone(),
            rule: run.rule.id.clone(),
            grace,
        });
        self.rounds.leaving.push(Leaving {
            uid: pod.uid.clone(),
            group: self.group,
            until: self.walk.now + grace + self.settle_timeout,
        });
        let pod = pod.uid.clone();
        let change = Change::Evict {
            pod,
            grace,
            release,
        };
        self.out.push(run.transition(self.walk.now, change));
    }
}

/// Maximum number of pods to evict in one round for this rule.
fn cap(run: &Run) -> u32 {
    if is_measured(run) {
        let spec = run.rule.action.eviction;
        return spec.map_or(0, |spec| spec.max_pods_per_round);
    }
    1
}

/// Whether what evictions release can be measured in the unit of the rule's metric.
fn is_measured(run: &Run) -> bool {
    matches!(run.leverage(KIND), Leverage::Measured(_))
}
