//! CPU throttling: applies the quotas of a plan to pods, and restores the exact originals.
//!
//! Each file goes through the same states. After a crash between any two of them, the journal has what is needed to
//! restore it:
//! ```text
//! original ─► journalled ─► ours ─► (journalled ─► ours)* ─► original ─► out of the journal
//! ```

mod aim;
mod containers;
mod hold;
mod outcome;
mod recover;
mod verify;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::engine::plan::Throttle;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::journal::{Effects, Journal, JournalError, LockError, Record, StateLock};
use crate::ordered;

use self::containers::{PodFolder, is_by_container};
use self::hold::{Hold, Terms, Window};
pub use self::outcome::{Fate, Outcome};
pub use self::recover::Recovered;

/// How long a contested pod is left alone.
const CONTEST_PAUSE: Duration = Duration::from_mins(5);

/// Enforces the quotas of a plan on pods.
#[derive(Debug)]
pub struct Throttler {
    hierarchy: Hierarchy,
    journal: Journal,
    _lock: StateLock,
    holds: BTreeMap<PodUid, Hold>,
    /// Folders of pods that are throttled by their containers.
    folders: BTreeMap<PodUid, PodFolder>,
    /// Records of an earlier process whose files cannot be opened now; kept until they can.
    unopened: Vec<Record>,
    /// Pods that are left alone, and until when.
    contested: BTreeMap<PodUid, BootTime>,
    /// When another writer reset all pods at once.
    sweeps: Window,
    /// The journal on disk is out of date.
    journal_stale: bool,
    effects: Effects,
}

/// Why throttling cannot start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The state directory cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The journal cannot be used.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl Throttler {
    /// Locks the state directory, reads its journal and adopts the throttles in it. Records of vanished cgroups are
    /// dropped, expired ones restored. The first [`Self::apply`] restores throttles that it does not list.
    ///
    /// # Errors
    /// If another process has the directory, or the journal cannot be used; nothing was changed then.
    pub fn open(
        state_dir: &Path,
        hierarchy: Hierarchy,
        now: BootTime,
    ) -> Result<(Self, Recovered), OpenError> {
        Self::open_with(state_dir, hierarchy, now, Effects::default())
    }

    /// Like [`Self::open`], with every effect run through `effects`.
    ///
    /// # Errors
    /// See [`Self::open`].
    pub fn open_with(
        state_dir: &Path,
        hierarchy: Hierarchy,
        now: BootTime,
        effects: Effects,
    ) -> Result<(Self, Recovered), OpenError> {
        let lock = StateLock::take(state_dir)?;
        let journal = Journal::new(state_dir)?;
        match journal.set_aside() {
            Ok(None) => {}
            Ok(Some((why, aside))) => {
                let aside = aside.display();
                tracing::warn!(%why, "moved the journal to {aside}: it cannot be read, and is from an earlier boot, whose cgroups no longer exist");
            }
            Err(error) => {
                tracing::warn!(%error, "failed to move the damaged journal of an earlier boot away");
            }
        }
        let records = journal.load()?;
        let mut throttler = Self {
            hierarchy,
            journal,
            _lock: lock,
            holds: BTreeMap::new(),
            folders: BTreeMap::new(),
            unopened: Vec::new(),
            contested: BTreeMap::new(),
            sweeps: Window::default(),
            stale: false,
            effects,
        };
        let recovered = throttler.recover(now, records);
        Ok((throttler, recovered))
    }

    /// Applies `throttles`, and restores all other pods. `pods` returns the cgroup of a pod that still exists.
    ///
    /// When lowering, the journal is durable before a cgroup is written; when restoring, it is updated afterwards.
    pub fn apply(
        &mut self,
        now: BootTime,
        throttles: &[Throttle],
        pods: &dyn Fn(&PodUid) -> Option<CgroupPath>,
    ) -> Vec<Outcome> {
        let mut out = Vec::new();
        self.contested.retain(|_, until| *until > now);
        self.retry_unopened(&mut out);
        self.release(|uid| !asks(throttles, uid), &mut out);
        let by_container = |uid: &PodUid| {
            let mut throttles = throttles.iter();
            throttles.any(|throttle| throttle.uid == *uid && is_by_container(throttle))
        };
        self.folders.retain(|uid, _| by_container(uid));
        for throttle in throttles {
            if !self.contested.contains_key(&throttle.uid) {
                self.stage(now, throttle, pods(&throttle.uid), &mut out);
            }
        }
        self.commit(now, &mut out);
        out
    }

    /// Extends the deadlines of the `throttles` of the last [`Self::apply`]: evaluations may be further apart than a
    /// throttle's lifetime. The next [`Self::verify`] saves the deadlines if needed.
    pub fn extend(&mut self, now: BootTime, throttles: &[Throttle]) {
        for throttle in throttles {
            if let Some(hold) = self.holds.get_mut(&throttle.uid) {
                hold.extend(now);
            }
        }
    }

    /// Whether anything outside `throttles` is still throttled, because restoring or opening it failed.
    pub fn owes(&self, throttles: &[Throttle]) -> bool {
        !self.unopened.is_empty() || self.holds.keys().any(|uid| !asks(throttles, uid))
    }

    /// Restores everything outside `throttles`, and leaves the rest unchanged.
    pub fn give_back(&mut self, now: BootTime, throttles: &[Throttle]) -> Vec<Outcome> {
        let mut out = Vec::new();
        self.retry_unopened(&mut out);
        self.release(|uid| !asks(throttles, uid), &mut out);
        self.commit(now, &mut out);
        out
    }

    /// Restores everything.
    pub fn restore_all(&mut self, now: BootTime) -> Vec<Outcome> {
        self.folders.clear();
        self.give_back(now, &[])
    }

    /// The throttled pods, each once, including those whose files cannot be opened: they may still be throttled.
    pub fn held(&self) -> impl Iterator<Item = &PodUid> {
        let mut unopened: Vec<&PodUid> = self.unopened.iter().map(|record| &record.uid).collect();
        ordered::sort(&mut unopened);
        unopened.dedup();
        let others = unopened
            .into_iter()
            .filter(|uid| !self.holds.contains_key(*uid));
        self.holds.keys().chain(others)
    }

    /// The current journal records.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        let held = self.holds.iter().flat_map(|(uid, hold)| hold.records(uid));
        held.chain(self.unopened.iter().cloned())
    }

    fn release(&mut self, which: impl Fn(&PodUid) -> bool, out: &mut Vec<Outcome>) {
        for (uid, hold) in &mut self.holds {
            if which(uid) && hold.release(uid, |_| true, &mut self.effects, out) {
                self.stale = true;
            }
        }
    }

    /// Plans one pod's files. Without a `path` (the pod is not known to exist now) an existing throttle stays unchanged.
    fn stage(
        &mut self,
        now: BootTime,
        throttle: &Throttle,
        path: Option<CgroupPath>,
        out: &mut Vec<Outcome>,
    ) {
        let uid = &throttle.uid;
        let known = self.holds.remove(uid);
        let Some(path) = path else {
            match known {
                Some(hold) => drop(self.holds.insert(uid.clone(), hold)),
                None => out.push(Outcome::Gone { uid: uid.clone() }),
            }
            return;
        };
        let mut hold = known.unwrap_or_else(|| Hold::new(path.clone(), Terms::from(throttle), now));
        if hold.path != path {
            self.stale |= hold.release(uid, |_| true, &mut self.effects, out);
            if !hold.entries.is_empty() {
                // Files in the old cgroup that could not be restored come first.
                self.holds.insert(uid.clone(), hold);
                return;
            }
            hold = Hold::new(path, Terms::from(throttle), now);
        }
        self.watch_containers(throttle, &hold.path);
        hold.extend(now);
        if hold.terms != Terms::from(throttle) {
            hold.next = Some(Terms::from(throttle));
            self.stale = true;
        }
        match self.aim(&mut hold, throttle, out) {
            Err(error) if error.is_gone() => {
                self.stale = true;
                out.push(Outcome::Gone { uid: uid.clone() });
                return;
            }
            Err(error) => out.push(Outcome::Failed {
                uid: uid.clone(),
                throttling: true,
                error,
            }),
            Ok(()) => {}
        }
        self.holds.insert(uid.clone(), hold);
    }

    /// Writes the plan to the journal, then to the cgroups. Without a journal nothing is lowered further.
    fn commit(&mut self, now: BootTime, out: &mut Vec<Outcome>) {
        self.holds.retain(|_, hold| !hold.entries.is_empty());
        if self.stale || self.holds.values().any(Hold::is_due) {
            match self.save(now) {
                Ok(()) => self.holds.values_mut().for_each(Hold::journalled),
                Err(error) => self.revert_unsaved(error, out),
            }
        }
        for (uid, hold) in &mut self.holds {
            self.stale |= hold.write(uid, &mut self.effects, out);
        }
        self.holds.retain(|_, hold| !hold.entries.is_empty());
    }

    fn save(&mut self, now: BootTime) -> Result<(), JournalError> {
        let mut effects = std::mem::take(&mut self.effects);
        let saved = self.journal.save(now, self.records(), &mut effects);
        self.effects = effects;
        saved?;
        self.stale = false;
        Ok(())
    }

    fn revert_unsaved(&mut self, error: JournalError, out: &mut Vec<Outcome>) {
        self.stale = true;
        out.push(Outcome::JournalFailed { error });
        for (uid, hold) in &mut self.holds {
            if hold.revert() {
                out.push(Outcome::NotThrottled { uid: uid.clone() });
            }
        }
    }
}

fn asks(throttles: &[Throttle], uid: &PodUid) -> bool {
    throttles.iter().any(|throttle| throttle.uid == *uid)
}
