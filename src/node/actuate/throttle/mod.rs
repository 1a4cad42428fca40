//! CPU throttling: brings pods to the quotas of a plan, and back to exactly what was before.
//!
//! Each file goes through the same states, and a crash between any two of them leaves what the journal tells how
//! to undo:
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

use self::containers::{Folder, is_by_container};
use self::hold::{Hold, Terms, Window};
pub use self::outcome::{Fate, Outcome};
pub use self::recover::Recovered;

/// How long a contested pod is left alone.
const CONTEST_PAUSE: Duration = Duration::from_mins(5);

/// Holds pods at the quotas that a plan asks for.
#[derive(Debug)]
pub struct Throttler {
    hierarchy: Hierarchy,
    journal: Journal,
    _lock: StateLock,
    holds: BTreeMap<PodUid, Hold>,
    /// Of pods that are throttled by their containers.
    folders: BTreeMap<PodUid, Folder>,
    /// Records of an earlier process whose files cannot be opened now: kept until they can.
    unopened: Vec<Record>,
    /// Pods that are left alone until then.
    contested: BTreeMap<PodUid, BootTime>,
    /// When somebody else put everything back at once.
    sweeps: Window,
    /// The journal on disk no longer says what is held here.
    stale: bool,
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
    /// Takes the state directory, reads its journal and takes up what it says is in force. Records of vanished
    /// cgroups are dropped, expired ones restored. The first [`Self::apply`] restores what it does not list.
    ///
    /// # Errors
    /// Where another process has the directory, or the journal cannot be used; nothing was changed then.
    pub fn open(
        state_dir: &Path,
        hierarchy: Hierarchy,
        now: BootTime,
    ) -> Result<(Self, Recovered), OpenError> {
        Self::open_with(state_dir, hierarchy, now, Effects::default())
    }

    /// As [`Self::open`], with every effect through `effects`.
    ///
    /// # Errors
    /// As [`Self::open`].
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
                tracing::warn!(%why, "set the journal aside as {aside}: it cannot be read, and is from before this boot, which took its cgroups with it");
            }
            Err(error) => {
                tracing::warn!(%error, "failed to set the damaged journal of an earlier boot aside");
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

    /// Brings the pods to what `throttles` asks for, and restores all others. `pods` tells the cgroup of a pod
    /// that is still there.
    ///
    /// The journal is durable before a cgroup is written on the way down; on the way back it is the other way
    /// round.
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
            let mut asked = throttles.iter();
            asked.any(|throttle| throttle.uid == *uid && is_by_container(throttle))
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

    /// The `throttles` of the last [`Self::apply`] are still asked for: evaluations may lie further apart than a throttle
    /// lasts by itself. The next [`Self::verify`] makes it durable where it has to be.
    pub fn extend(&mut self, now: BootTime, throttles: &[Throttle]) {
        for throttle in throttles {
            if let Some(hold) = self.holds.get_mut(&throttle.uid) {
                hold.extend(now);
            }
        }
    }

    /// Whether something is held that `throttles` do not ask for: it could not be given back, or not even be opened.
    pub fn owes(&self, throttles: &[Throttle]) -> bool {
        !self.unopened.is_empty() || self.holds.keys().any(|uid| !asks(throttles, uid))
    }

    /// Gives back what `throttles` do not ask for, and leaves the others as they are.
    pub fn give_back(&mut self, now: BootTime, throttles: &[Throttle]) -> Vec<Outcome> {
        let mut out = Vec::new();
        self.retry_unopened(&mut out);
        self.release(|uid| !asks(throttles, uid), &mut out);
        self.commit(now, &mut out);
        out
    }

    /// Gives everything back.
    pub fn restore_all(&mut self, now: BootTime) -> Vec<Outcome> {
        self.folders.clear();
        self.give_back(now, &[])
    }

    /// The pods that are held at something now, each once; those whose files cannot be opened too: nobody knows
    /// that these are back at what they were.
    pub fn held(&self) -> impl Iterator<Item = &PodUid> {
        let mut unopened: Vec<&PodUid> = self.unopened.iter().map(|record| &record.uid).collect();
        ordered::sort(&mut unopened);
        unopened.dedup();
        let others = unopened
            .into_iter()
            .filter(|uid| !self.holds.contains_key(*uid));
        self.holds.keys().chain(others)
    }

    /// What the journal has to say now.
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

    /// Plans one pod's files. Its cgroup is found by the path of a pod that is known to be there now; one whose
    /// pod is not known stays as it is.
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
                // What could not be given back there is tried again first.
                self.holds.insert(uid.clone(), hold);
                return;
            }
            hold = Hold::new(path, Terms::from(throttle), now);
        }
        self.watch(throttle, &hold.path);
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

    /// Makes the plan durable, then real. Without a journal nothing goes down any further.
    fn commit(&mut self, now: BootTime, out: &mut Vec<Outcome>) {
        self.holds.retain(|_, hold| !hold.entries.is_empty());
        if self.stale || self.holds.values().any(Hold::is_due) {
            match self.save(now) {
                Ok(()) => self.holds.values_mut().for_each(Hold::journalled),
                Err(error) => self.give_up(error, out),
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

    fn give_up(&mut self, error: JournalError, out: &mut Vec<Outcome>) {
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
