//! Those who act on a plan, and what came of it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::event::News;
use super::pods::Workload;
use super::wording::short;
use crate::engine::plan::{Feedback, Plan};
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::actuate::evict::{EvictError, EvictOutcome, Evictor, PendingEviction};
use crate::node::actuate::reclaim::{ReclaimOutcome, Reclaimer};
use crate::node::actuate::throttle::{OpenError, Outcome, Recovered, Throttler};
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::collect::Sampler;
use crate::node::journal::Record;

/// A pod that could not be told to end is not tried again before that.
const REFUSAL_PAUSE: Duration = Duration::from_mins(1);

/// The throttler, the evictor and the reclaimer.
#[derive(Debug)]
pub struct Actuators {
    hierarchy: Hierarchy,
    throttler: Throttler,
    evictor: Evictor,
    reclaimer: Reclaimer,
    /// Why page cache cannot be reclaimed here, as told.
    unsupported: Option<&'static str>,
    /// Which kind of cgroup the pods held are limited by: their containers', or their own.
    pinned: BTreeMap<PodUid, bool>,
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
}

impl Effect {
    /// The pod is not there any more, which is nobody's news.
    fn gone(uid: &PodUid) -> Self {
        Self {
            pod: Some(uid.clone()),
            feedback: Some(Feedback::Gone { uid: uid.clone() }),
            told: Told::Eviction("it is gone".to_owned()),
        }
    }

    fn of_start(uid: &PodUid, started: Result<(), EvictError>, now: BootTime) -> Self {
        let (feedback, words) = match started {
            Ok(()) => (None, "its processes were told to end".to_owned()),
            Err(EvictError::Gone(_)) => return Self::gone(uid),
            Err(error) => {
                let refused = Feedback::EvictionRefused {
                    uid: uid.clone(),
                    until: now + REFUSAL_PAUSE,
                };
                (Some(refused), error.to_string())
            }
        };
        Self {
            pod: Some(uid.clone()),
            feedback,
            told: Told::Eviction(words),
        }
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

impl From<EvictOutcome> for Effect {
    fn from(outcome: EvictOutcome) -> Self {
        let (uid, over, words) = match outcome {
            EvictOutcome::Ended { uid, after } => {
                (uid, true, format!("it has ended, after {}", short(after)))
            }
            EvictOutcome::Killed { uid, after } => {
                (uid, true, format!("it was killed, after {}", short(after)))
            }
            EvictOutcome::Failed { uid, error } => (uid, false, error.to_string()),
        };
        Self {
            feedback: over.then(|| Feedback::Gone { uid: uid.clone() }),
            pod: Some(uid),
            told: Told::Eviction(words),
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
            evictor: Evictor::new(hierarchy.clone()),
            reclaimer: Reclaimer::new(hierarchy.clone()),
            unsupported: None,
            hierarchy,
            pinned: BTreeMap::new(),
        };
        Ok((actuators, recovered))
    }

    /// Goes on with the evictions that an earlier process began.
    pub fn resume(&mut self, pending: Vec<PendingEviction>) {
        self.evictor.resume(pending);
    }

    /// Reads back what is in force, which the last plan still asks for, and goes on with what was begun. Allocates
    /// nothing while there is nothing to tell.
    pub fn check(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        self.throttler.extend(now);
        effects.extend(self.throttler.verify(now).into_iter().map(Effect::from));
        effects.extend(self.evictor.tick(now).into_iter().map(Effect::from));
        for outcome in self.reclaimer.poll() {
            effects.extend(self.reclaimed(outcome));
        }
    }

    /// Does what the plan says to the pods that are there: those whose cgroup is the one that was found.
    pub fn apply(
        &mut self,
        now: BootTime,
        plan: &Plan,
        pods: &BTreeMap<PodUid, Workload>,
        effects: &mut Vec<Effect>,
    ) {
        let there = There(&self.hierarchy, pods);
        let lookup = |uid: &PodUid| there.cgroup(uid);
        let outcomes = self.throttler.apply(now, &plan.throttles, &lookup);
        effects.extend(outcomes.into_iter().map(Effect::from));
        for evict in &plan.evictions {
            let started = there
                .cgroup(&evict.uid)
                .map(|cgroup| self.evictor.start(&evict.uid, &cgroup, evict.grace, now));
            effects.push(match started {
                Some(started) => Effect::of_start(&evict.uid, started, now),
                None => Effect::gone(&evict.uid),
            });
        }
        let reclaims = plan.reclaims.iter().filter_map(|reclaim| {
            let cgroup = there.cgroup(&reclaim.uid)?;
            self.reclaimer
                .request(&reclaim.uid, &cgroup, reclaim.amount)
        });
        let reclaims: Vec<_> = reclaims.collect();
        let told = reclaims.into_iter().filter_map(|it| self.reclaimed(it));
        effects.extend(told);
    }

    fn reclaimed(&mut self, outcome: ReclaimOutcome) -> Option<Effect> {
        let uid = outcome.uid().clone();
        let told = match outcome {
            ReclaimOutcome::Busy { .. } => return None,
            ReclaimOutcome::Gone { .. } => return Some(Effect::gone(&uid)),
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
        for record in self.throttler.records() {
            let by_container = wanted.entry(record.uid).or_insert(false);
            *by_container |= !record.lever.is_empty();
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

    /// The evictions that have begun and not ended.
    pub fn evicting(&self) -> impl Iterator<Item = &PendingEviction> {
        self.evictor.pending()
    }

    /// Something is being done to that pod.
    pub fn is_busy_with(&self, uid: &PodUid) -> bool {
        self.throttler.held().any(|held| held == uid)
            || self.evictor.pending().any(|pending| pending.uid == *uid)
    }

    /// Whether any process runs in `cgroup` or below it.
    pub fn is_populated(&self, cgroup: &CgroupPath) -> bool {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup);
        dir.is_some_and(|dir| has_processes(&dir))
    }
}

/// The pods that were found, and whether they still are there.
struct There<'a>(&'a Hierarchy, &'a BTreeMap<PodUid, Workload>);

impl There<'_> {
    /// The pod's cgroup, where the one that has the name now is the one that was found: another pod may have taken
    /// the name since.
    fn cgroup(&self, uid: &PodUid) -> Option<CgroupPath> {
        let workload = self.1.get(uid)?;
        let dir = self.0.dir(Controller::Cpu, &workload.cgroup)?;
        let meta = fs::symlink_metadata(dir).ok()?;
        let same = workload.inode == 0 || meta.ino() == workload.inode;
        same.then(|| workload.cgroup.clone())
    }
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
