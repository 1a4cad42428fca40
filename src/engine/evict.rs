//! Evictions: rounds that settle before the next begins, and who goes in each.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ledger::LEAST;
use super::metric::{ActionKind, Leverage, Resource};
use super::plan::{Change, Evict, Spared, Transition};
use super::pod::PodUid;
use super::run::Run;
use super::throttle::Released;
use super::time::BootTime;
use super::track::Pods;
use super::walk::{Skip, Walk, cpu_used, memory_held};

const KIND: ActionKind = ActionKind::Eviction;
/// A round that has not emptied by so long after the grace period is over all the same.
pub(super) const PATIENCE: Duration = Duration::from_secs(30);
const LEAST_GRACE: Duration = Duration::from_secs(1);

/// Rules on one resource share their rounds; so do all rules whose metrics have no unit of release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Group {
    Cpu,
    Memory,
    Unmeasured,
}

impl Group {
    pub(super) const ALL: [Self; 3] = [Self::Cpu, Self::Memory, Self::Unmeasured];

    fn of(run: &Run) -> Option<Self> {
        match run.leverage(KIND) {
            Leverage::Measured(Resource::Cpu) => Some(Self::Cpu),
            Leverage::Measured(Resource::Memory) => Some(Self::Memory),
            Leverage::OneVictim => Some(Self::Unmeasured),
            Leverage::None => None,
        }
    }
}

/// A pod that was told to go.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Leaving {
    uid: PodUid,
    group: Group,
    until: BootTime,
}

/// The rounds that have not settled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Rounds(Vec<Leaving>);

impl Rounds {
    /// Drops the pods that are gone or have had their time.
    pub(super) fn settle(&mut self, now: BootTime, pods: &Pods) {
        self.0.retain(|leaving| {
            now < leaving.until && pods.get(&leaving.uid).is_some_and(|t| t.pod.running)
        });
    }

    pub(super) fn busy(&self, group: Group) -> bool {
        self.0.iter().any(|leaving| leaving.group == group)
    }

    pub(super) fn count(&self, group: Group) -> usize {
        let of = |leaving: &&Leaving| leaving.group == group;
        self.0.iter().filter(of).count()
    }

    pub(super) fn has(&self, uid: &PodUid) -> bool {
        self.0.iter().any(|leaving| leaving.uid == *uid)
    }

    /// The pod is gone, or will not go.
    pub(super) fn drop(&mut self, uid: &PodUid) {
        self.0.retain(|leaving| leaving.uid != *uid);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// The evictions of one walk, for one group.
pub(super) struct Evicting<'a> {
    pub(super) walk: Walk<'a>,
    pub(super) group: Group,
    pub(super) rounds: &'a mut Rounds,
    /// The real rounds beside a Preview rule's.
    pub(super) under: Option<&'a Rounds>,
    /// So many pods of this round were evicted already, for other rules.
    pub(super) begun: usize,
    /// How long after the grace period a round is waited for.
    pub(super) patience: Duration,
    pub(super) released: &'a Released,
    pub(super) evictions: &'a mut Vec<Evict>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Evicting<'_> {
    /// Takes victims in order until what they release, with what is released already, covers the gaps.
    pub(super) fn run(&mut self, runs: &mut [Run]) {
        let most = runs
            .iter()
            .filter(|run| self.takes(run))
            .map(|run| self.cap(run))
            .max();
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
        self.walk.takes(run) && Group::of(run) == Some(self.group)
    }

    /// At most so many pods in one round for this rule.
    fn cap(&self, run: &Run) -> u32 {
        let spec = run.rule.action.eviction;
        match self.group {
            Group::Unmeasured => 1,
            _ => spec.map_or(0, |spec| spec.max_pods_per_round),
        }
    }

    fn open(&self, run: &Run, covered: u64) -> bool {
        let gap = self.group == Group::Unmeasured || run.gap > covered;
        self.takes(run) && gap && run.evicted < self.cap(run)
    }

    /// What this evaluation's throttle steps and the pods on their way out release.
    fn covered(&self) -> u64 {
        let pods = (0..self.walk.pods.len()).filter(|place| self.leaving(*place));
        let leaving: u64 = pods.map(|place| self.worth(place)).sum();
        match self.group {
            Group::Cpu => leaving + self.released.total.0,
            Group::Memory => leaving,
            Group::Unmeasured => 0,
        }
    }

    fn leaving(&self, place: usize) -> bool {
        let pod = &self.walk.pods[place].pod;
        pod.terminating
            || self.rounds.has(&pod.uid)
            || self.under.is_some_and(|under| under.has(&pod.uid))
    }

    /// What the pod's end releases beyond what its throttle does.
    fn worth(&self, place: usize) -> u64 {
        let figures = &self.walk.figures[place];
        match self.group {
            Group::Cpu => cpu_used(figures).saturating_sub(self.released.pods[place].0),
            Group::Memory => memory_held(figures),
            Group::Unmeasured => 0,
        }
    }

    /// Evicts the pod for the first rule that may; returns what that releases.
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
        // A pod whose end releases next to nothing would be lost for nothing.
        let little = match self.group {
            Group::Cpu => self.walk.cpu(run, place)? < LEAST,
            Group::Memory => self.walk.memory(run, place)?.held.0 == 0,
            Group::Unmeasured => {
                self.walk.cpu(run, place)?;
                false
            }
        };
        if little {
            return Err(Some(Spared::UsesLittle));
        }
        Ok(())
    }

    fn evict(&mut self, run: &mut Run, place: usize) {
        let pod = &self.walk.pods[place].pod;
        let asked = run.rule.action.eviction.and_then(|spec| spec.grace);
        let grace = asked.unwrap_or(pod.grace).max(LEAST_GRACE);
        let measured = self.group != Group::Unmeasured;
        let release = measured.then(|| self.worth(place));
        run.evicted += 1;
        run.act(&pod.uid, KIND);
        self.evictions.push(Evict {
            uid: pod.uid.clone(),
            rule: run.rule.id.clone(),
            grace,
        });
        self.rounds.0.push(Leaving {
            uid: pod.uid.clone(),
            group: self.group,
            until: self.walk.now + grace + self.patience,
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
