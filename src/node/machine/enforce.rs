//! Those who act on a plan, and what came of it.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use super::event::News;
use super::outside::Outside;
use super::workload::Workload;
use crate::engine::plan::{Feedback, Lever, Plan, Throttle};
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::actuate::reclaim::{ReclaimOutcome, Reclaimer};
use crate::node::actuate::throttle::{OpenError, Outcome, Recovered, Throttler};
use crate::node::cgroup::knob::Role;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::collect::Sampler;
use crate::node::journal::Record;

/// What could not be given back is tried again this often.
const GIVE_BACK_AGAIN: Duration = Duration::from_secs(5);

/// The throttler and the reclaimer.
#[derive(Debug)]
pub struct Actuators {
    hierarchy: Hierarchy,
    throttler: Throttler,
    reclaimer: Reclaimer,
    /// Why page cache cannot be reclaimed here, as told.
    unsupported: Option<&'static str>,
    /// Which kind of cgroup the pods held are limited by: their containers', or their own.
    pinned: BTreeMap<PodUid, bool>,
    /// When the throttler last gave back what the plan does not ask for; `None`: there is no plan yet.
    gave_back: Option<BootTime>,
}

/// One thing that was done or seen, in the terms of the engine and of the user.
#[derive(Debug)]
pub struct Effect {
    /// The pod that it is about.
    pub pod: Option<PodUid>,
    /// What the engine has to hear before its next step.
    pub feedback: Option<Feedback>,
    told: Told,
}

#[derive(Debug)]
enum Told {
    FileSet {
        file: String,
        from: String,
        to: String,
    },
    Cgroup(String),
    ThrottleFailed(String),
    NotWritten(String),
    Eviction(String),
    News(News),
}

impl Effect {
    /// An eviction goes on; `words` say how.
    pub fn evicting(uid: &PodUid, words: impl Into<String>) -> Self {
        Self {
            pod: Some(uid.clone()),
            feedback: None,
            told: Told::Eviction(words.into()),
        }
    }

    /// An eviction was refused, and is not to be tried again before `until`; `words` say why.
    pub fn refused(uid: &PodUid, until: BootTime, words: impl Into<String>) -> Self {
        let uid = uid.clone();
        Self {
            pod: Some(uid.clone()),
            feedback: Some(Feedback::EvictionRefused { uid, until }),
            told: Told::Eviction(words.into()),
        }
    }

    /// Nothing of the pod runs any more; `words` say since when or why.
    pub fn gone(uid: &PodUid, words: impl Into<String>) -> Self {
        let uid = uid.clone();
        Self {
            pod: Some(uid.clone()),
            feedback: Some(Feedback::Gone { uid }),
            told: Told::Eviction(words.into()),
        }
    }

    /// Something else that the user has to be told, and that no pod is to be blamed for.
    pub const fn trouble(news: News) -> Self {
        Self {
            pod: None,
            feedback: None,
            told: Told::News(news),
        }
    }

    /// The pod is not there any more, which is nobody's news.
    fn vanished(uid: &PodUid) -> Self {
        Self::gone(uid, "it is gone")
    }

    /// Nothing of the pod runs any more.
    pub const fn is_end(&self) -> bool {
        matches!(self.feedback, Some(Feedback::Gone { .. }))
    }

    /// What the user is told; `name` is that of the pod.
    pub fn news(self, name: Option<String>) -> News {
        match self.told {
            Told::FileSet { file, from, to } => News::FileSet {
                pod_name: name,
                file,
                from,
                to,
            },
            Told::Cgroup(what) => News::Cgroup {
                pod_name: name,
                what,
            },
            Told::ThrottleFailed(reason) => News::ThrottleFailed {
                pod_name: name,
                reason,
            },
            Told::News(news) => news,
            Told::NotWritten(reason) => News::StateNotWritten { reason },
            Told::Eviction(what) => News::Eviction {
                pod_name: name,
                what,
            },
        }
    }
}

impl From<Outcome> for Effect {
    fn from(outcome: Outcome) -> Self {
        let feedback = outcome.feedback();
        let words = outcome.to_string();
        let pod = pod(&outcome).cloned();
        let told = match outcome {
            Outcome::Set { file, from, to, .. } => Told::FileSet {
                file: file.display().to_string(),
                from: from.into(),
                to: to.into(),
            },
            Outcome::Failed {
                throttling: true, ..
            }
            | Outcome::NotThrottled { .. } => Told::ThrottleFailed(words),
            Outcome::JournalFailed { .. } => Told::NotWritten(words),
            _ => Told::Cgroup(words),
        };
        Self {
            pod,
            feedback,
            told,
        }
    }
}

const fn pod(outcome: &Outcome) -> Option<&PodUid> {
    match outcome {
        Outcome::Set { uid, .. }
        | Outcome::Released { uid, .. }
        | Outcome::Foreign { uid, .. }
        | Outcome::Resized { uid, .. }
        | Outcome::Contested { uid, .. }
        | Outcome::Expired { uid }
        | Outcome::Gone { uid }
        | Outcome::Failed { uid, .. }
        | Outcome::NotThrottled { uid } => Some(uid),
        Outcome::Swept { .. } | Outcome::JournalFailed { .. } => None,
    }
}

impl Actuators {
    /// Takes the state directory and takes up what its journal says is in force.
    ///
    /// # Errors
    /// As [`Throttler::open`].
    pub fn open(
        state_dir: &Path,
        hierarchy: Hierarchy,
        now: BootTime,
    ) -> Result<(Self, Recovered), OpenError> {
        let (throttler, recovered) = Throttler::open(state_dir, hierarchy.clone(), now)?;
        let actuators = Self {
            throttler,
            reclaimer: Reclaimer::new(hierarchy.clone()),
            unsupported: None,
            hierarchy,
            pinned: BTreeMap::new(),
            gave_back: None,
        };
        Ok((actuators, recovered))
    }

    /// Reads back what is in force, which the last `plan` still asks for, and goes on with what was begun. Allocates
    /// nothing while there is nothing to tell.
    pub fn check(&mut self, now: BootTime, plan: &Plan, effects: &mut Vec<Effect>) {
        let throttles = &plan.throttles;
        self.throttler.extend(now, throttles);
        effects.extend(self.throttler.verify(now).into_iter().map(Effect::from));
        // Without rules there may be no other plan.
        let is_due = |last| now.since(last) >= GIVE_BACK_AGAIN;
        if self.gave_back.is_some_and(is_due) && self.throttler.owes(throttles) {
            self.gave_back = Some(now);
            let outcomes = self.throttler.give_back(now, throttles);
            effects.extend(outcomes.into_iter().map(Effect::from));
        }
        for outcome in self.reclaimer.poll() {
            effects.extend(self.reclaimed(outcome));
        }
    }

    /// Throttles and reclaims what the plan says, from the pods that are there: those whose cgroup is the one that
    /// was found.
    pub fn apply(
        &mut self,
        now: BootTime,
        plan: &Plan,
        pods: &BTreeMap<PodUid, Workload>,
        effects: &mut Vec<Effect>,
    ) {
        self.gave_back = Some(now);
        let hierarchy = &self.hierarchy;
        let lookup = |uid: &PodUid| there(hierarchy, pods, uid).map(|known| known.cgroup.clone());
        let throttles = self.startable(&plan.throttles, pods);
        let outcomes = self.throttler.apply(now, &throttles, &lookup);
        effects.extend(outcomes.into_iter().map(Effect::from));
        let reclaims = plan.reclaims.iter().filter_map(|reclaim| {
            let cgroup = lookup(&reclaim.uid)?;
            self.reclaimer
                .request(&reclaim.uid, &cgroup, reclaim.amount)
        });
        let reclaims: Vec<_> = reclaims.collect();
        let told = reclaims.into_iter().filter_map(|it| self.reclaimed(it));
        effects.extend(told);
    }

    /// The throttles, without those that would keep a container of cgroup v1 from starting: a pod's own quota below its
    /// container's. They are of an earlier process, or from before a container got its limit.
    fn startable<'a>(
        &self,
        throttles: &'a [Throttle],
        pods: &BTreeMap<PodUid, Workload>,
    ) -> Cow<'a, [Throttle]> {
        let is_limited = |uid: &PodUid| {
            let facts = pods.get(uid).and_then(|known| known.containers);
            facts.is_some_and(|facts| facts.limited)
        };
        let is_own = |lever: &Lever| lever.cgroup.is_empty() && lever.quota.is_some();
        let refuses =
            |throttle: &Throttle| throttle.levers.iter().any(is_own) && is_limited(&throttle.uid);
        if self.hierarchy.is_v2() || !throttles.iter().any(refuses) {
            return Cow::Borrowed(throttles);
        }
        let mut throttles = throttles.to_vec();
        for throttle in throttles.iter_mut().filter(|throttle| refuses(throttle)) {
            let own = throttle.levers.iter_mut().filter(|lever| is_own(lever));
            own.for_each(|lever| lever.quota = None);
        }
        Cow::Owned(throttles)
    }

    /// The pods throttled by their containers whose containers are others now. Allocates nothing while there are none.
    pub fn take_changed(&mut self) -> Vec<PodUid> {
        self.throttler.take_changed()
    }

    /// Throttles the containers that one of these pods has now.
    pub fn follow(
        &mut self,
        now: BootTime,
        throttle: &Throttle,
        pods: &BTreeMap<PodUid, Workload>,
        effects: &mut Vec<Effect>,
    ) {
        let path = there(&self.hierarchy, pods, &throttle.uid).map(|known| known.cgroup.clone());
        let outcomes = self.throttler.follow(now, throttle, path);
        effects.extend(outcomes.into_iter().map(Effect::from));
    }

    fn reclaimed(&mut self, outcome: ReclaimOutcome) -> Option<Effect> {
        let uid = outcome.uid().clone();
        let told = match outcome {
            ReclaimOutcome::Busy { .. } => return None,
            ReclaimOutcome::Gone { .. } => return Some(Effect::vanished(&uid)),
            ReclaimOutcome::Reclaimed { freed, .. } => {
                Told::Cgroup(format!("{freed} of page cache reclaimed"))
            }
            ReclaimOutcome::Unsupported { reason, .. } => {
                if self.unsupported.replace(reason) == Some(reason) {
                    return None;
                }
                Told::Cgroup(format!("no page cache can be reclaimed: {reason}"))
            }
            ReclaimOutcome::Failed { error, .. } => Told::Cgroup(error.to_string()),
        };
        Some(Effect {
            pod: Some(uid),
            feedback: None,
            told,
        })
    }

    /// Gives everything back.
    pub fn restore_all(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        effects.extend(
            self.throttler
                .restore_all(now)
                .into_iter()
                .map(Effect::from),
        );
    }

    /// Keeps the sampler at the cgroups that are limited, whatever quotas come to stand in them.
    pub fn pin_levers(&mut self, sampler: &mut Sampler) {
        let mut wanted = BTreeMap::new();
        // Idle class and weight are the pod's own, however it is limited.
        let limits = |record: &Record| record.file.role() == Role::Quota;
        for record in self.throttler.records().filter(limits) {
            let by_container = wanted.entry(record.uid).or_insert(false);
            *by_container |= !record.lever.is_empty();
        }
        // Also while it has no container that could be limited: one that comes back is refused by a kernel that finds the pod
        // limited to less.
        for uid in self.throttler.by_container() {
            wanted.insert(uid.clone(), true);
        }
        for uid in self.pinned.keys().filter(|uid| !wanted.contains_key(*uid)) {
            sampler.unpin_levers(uid);
        }
        for (uid, by_container) in &wanted {
            sampler.pin_levers(uid, *by_container);
        }
        self.pinned = wanted;
    }

    /// The pods whose cgroups are not as they were.
    pub fn held(&self) -> impl Iterator<Item = &PodUid> {
        self.throttler.held()
    }

    /// Every cgroup file that is not as it was.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        self.throttler.records()
    }

    /// Has `outside` evict the pods that the plan says and that are there.
    pub fn evict(
        &self,
        now: BootTime,
        plan: &Plan,
        pods: &BTreeMap<PodUid, Workload>,
        outside: &mut impl Outside,
        effects: &mut Vec<Effect>,
    ) {
        for evict in &plan.evictions {
            match there(&self.hierarchy, pods, &evict.uid) {
                Some(workload) => outside.evict(evict, workload, now, effects),
                None => effects.push(Effect::vanished(&evict.uid)),
            }
        }
    }

    /// Some file of that pod is not as it was.
    pub fn is_holding(&self, uid: &PodUid) -> bool {
        self.throttler.held().any(|held| held == uid)
    }

    /// Whether any process runs in `cgroup` or below it.
    pub fn is_populated(&self, cgroup: &CgroupPath) -> bool {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup);
        dir.is_some_and(|dir| has_processes(&dir))
    }
}

/// The pod, where its cgroup still is the one that was found.
fn there<'a>(
    hierarchy: &Hierarchy,
    pods: &'a BTreeMap<PodUid, Workload>,
    uid: &PodUid,
) -> Option<&'a Workload> {
    let workload = pods.get(uid)?;
    workload.is_there(hierarchy).then_some(workload)
}

fn has_processes(dir: &Path) -> bool {
    let own = fs::read_to_string(dir.join("cgroup.procs"));
    if own.is_ok_and(|processes| !processes.is_empty()) {
        return true;
    }
    let Ok(entries) = fs::read_dir(dir) else {
        return false;
    };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .any(|entry| has_processes(&entry.path()))
}
