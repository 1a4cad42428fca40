//! Those who act on a plan, and what came of it.

use std::collections::BTreeMap;
use std::path::Path;

use super::event::News;
use crate::engine::plan::{Feedback, Plan};
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::actuate::throttle::{OpenError, Outcome, Recovered, Throttler};
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::collect::Sampler;
use crate::node::journal::Record;

/// The throttler and the evictor.
#[derive(Debug)]
pub struct Actuators {
    throttler: Throttler,
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
}

impl Effect {
    /// What the throttler tells.
    pub fn from_outcomes(outcomes: Vec<Outcome>) -> impl Iterator<Item = Self> {
        outcomes.into_iter().map(Self::from)
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
        let (throttler, recovered) = Throttler::open(state_dir, hierarchy, now)?;
        let actuators = Self {
            throttler,
            pinned: BTreeMap::new(),
        };
        Ok((actuators, recovered))
    }

    /// Reads back what is in force.
    pub fn check(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        effects.extend(Effect::from_outcomes(self.throttler.verify(now)));
    }

    /// Does what the plan says. `pods` tells the cgroup of a pod that is there.
    pub fn apply(
        &mut self,
        now: BootTime,
        plan: &Plan,
        pods: &dyn Fn(&PodUid) -> Option<CgroupPath>,
        effects: &mut Vec<Effect>,
    ) {
        let outcomes = self.throttler.apply(now, &plan.throttles, pods);
        effects.extend(Effect::from_outcomes(outcomes));
    }

    /// Gives everything back.
    pub fn restore_all(&mut self, now: BootTime, effects: &mut Vec<Effect>) {
        effects.extend(Effect::from_outcomes(self.throttler.restore_all(now)));
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

    /// Something is being done to that pod.
    pub fn is_busy_with(&self, uid: &PodUid) -> bool {
        self.throttler.held().any(|held| held == uid)
    }
}
