//! CPU throttling: applies the quotas of a plan to pods, and restores the exact originals.
//!
//! Each file goes through the same states. After a crash between any two of them, the journal has what is needed to
//! restore it:
//! ```text
//! original ─► journalled ─► ours ─► (journalled ─► ours)* ─► original ─► out of the journal
//! ```

mod containers;
mod outcome;
mod plan_files;
mod recover;
mod throttled_pod;
mod verify;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use crate::engine::plan::PodThrottle;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::journal::{Effects, Journal, JournalError, JournalRecord, LockError, StateLock};

use self::containers::{PodDirectory, needs_containers};
pub use self::outcome::{ReleaseResult, ThrottleOutcome};
pub use self::recover::Recovered;
use self::throttled_pod::{ThrottleSpec, ThrottledPod};

/// How long a contested pod is left alone.
const CONTEST_PAUSE: Duration = Duration::from_mins(5);

/// Enforces the quotas of a plan on pods.
#[derive(Debug)]
pub struct Throttler {
    hierarchy: Hierarchy,
    journal: Journal,
    _lock: StateLock,
    pods: BTreeMap<PodUid, ThrottledPod>,
    /// Directories of pods whose containers are throttled, or have a burst.
    directories: BTreeMap<PodUid, PodDirectory>,
    /// Records of an earlier process whose files cannot be opened now; kept until they can.
    unopened: Vec<JournalRecord>,
    /// Pods that are left alone, and until when.
    contested: BTreeMap<PodUid, BootTime>,
    /// The kernel has no burst, which was reported.
    burst_missing: bool,
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
        let lock = StateLock::acquire(state_dir)?;
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
            pods: BTreeMap::new(),
            directories: BTreeMap::new(),
            unopened: Vec::new(),
            contested: BTreeMap::new(),
            burst_missing: false,
            journal_stale: false,
            effects,
        };
        let recovered = throttler.recover(now, records);
        Ok((throttler, recovered))
    }

    /// Applies `throttles`, and restores all other pods. `pods` returns the cgroup of a pod that still exists.
    ///
    /// When lowering, the journal is written before a cgroup is; when restoring, it is updated afterwards.
    pub fn apply(
        &mut self,
        now: BootTime,
        throttles: &[PodThrottle],
        pods: &dyn Fn(&PodUid) -> Option<CgroupPath>,
    ) -> Vec<ThrottleOutcome> {
        let mut out = Vec::new();
        self.contested.retain(|_, until| *until > now);
        self.retry_unopened(&mut out);
        self.release(|uid| !is_throttled_in(throttles, uid), &mut out);
        let is_watched = |uid: &PodUid| {
            let mut throttles = throttles.iter();
            throttles.any(|throttle| throttle.uid == *uid && needs_containers(throttle))
        };
        self.directories.retain(|uid, _| is_watched(uid));
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
    pub fn extend(&mut self, now: BootTime, throttles: &[PodThrottle]) {
        for throttle in throttles {
            if let Some(pod) = self.pods.get_mut(&throttle.uid) {
                pod.extend(now);
            }
        }
    }

    /// Whether anything outside `throttles` is still throttled, because restoring or opening it failed.
    pub fn has_unrestored(&self, throttles: &[PodThrottle]) -> bool {
        !self.unopened.is_empty() || self.pods.keys().any(|uid| !is_throttled_in(throttles, uid))
    }

    /// Restores everything outside `throttles`, and leaves the rest unchanged.
    pub fn restore_except(
        &mut self,
        now: BootTime,
        throttles: &[PodThrottle],
    ) -> Vec<ThrottleOutcome> {
        let mut out = Vec::new();
        self.retry_unopened(&mut out);
        self.release(|uid| !is_throttled_in(throttles, uid), &mut out);
        self.commit(now, &mut out);
        out
    }

    /// Restores everything.
    pub fn restore_all(&mut self, now: BootTime) -> Vec<ThrottleOutcome> {
        self.directories.clear();
        self.restore_except(now, &[])
    }

    /// The pods with changed files, each once, including those whose files cannot be opened: they may still be throttled.
    pub fn throttled_pods(&self) -> impl Iterator<Item = &PodUid> {
        let mut unopened: Vec<&PodUid> = self.unopened.iter().map(|record| &record.uid).collect();
        unopened.sort();
        unopened.dedup();
        let others = unopened
            .into_iter()
            .filter(|uid| !self.pods.contains_key(*uid));
        self.pods.keys().chain(others)
    }

    /// How many pods are throttled, not only given a burst.
    pub fn count_lowered(&self) -> usize {
        let lowers = |uid: &&PodUid| self.pods.get(*uid).is_none_or(ThrottledPod::lowers);
        self.throttled_pods().filter(lowers).count()
    }

    /// The current journal records.
    pub fn records(&self) -> impl Iterator<Item = JournalRecord> + '_ {
        let records = self.pods.iter().flat_map(|(uid, pod)| pod.records(uid));
        records.chain(self.unopened.iter().cloned())
    }

    fn release(&mut self, which: impl Fn(&PodUid) -> bool, out: &mut Vec<ThrottleOutcome>) {
        for (uid, pod) in &mut self.pods {
            if which(uid) && pod.release(uid, |_| true, &mut self.effects, out) {
                self.journal_stale = true;
            }
        }
    }

    /// Plans one pod's files. Without a `path` (the pod is not known to exist now) an existing throttle stays unchanged.
    fn stage(
        &mut self,
        now: BootTime,
        throttle: &PodThrottle,
        path: Option<CgroupPath>,
        out: &mut Vec<ThrottleOutcome>,
    ) {
        let uid = &throttle.uid;
        let known = self.pods.remove(uid);
        let Some(path) = path else {
            match known {
                Some(pod) => drop(self.pods.insert(uid.clone(), pod)),
                None => out.push(ThrottleOutcome::Gone { uid: uid.clone() }),
            }
            return;
        };
        let mut pod = known
            .unwrap_or_else(|| ThrottledPod::new(path.clone(), ThrottleSpec::from(throttle), now));
        if pod.path != path {
            self.journal_stale |= pod.release(uid, |_| true, &mut self.effects, out);
            if !pod.entries.is_empty() {
                // Files in the old cgroup that could not be restored come first.
                self.pods.insert(uid.clone(), pod);
                return;
            }
            pod = ThrottledPod::new(path, ThrottleSpec::from(throttle), now);
        }
        self.watch_containers(throttle, &pod.path);
        pod.extend(now);
        if pod.spec != ThrottleSpec::from(throttle) {
            pod.next = Some(ThrottleSpec::from(throttle));
            self.journal_stale = true;
        }
        match self.plan_files(&mut pod, throttle, out) {
            Err(error) if error.is_gone() => {
                self.journal_stale = true;
                out.push(ThrottleOutcome::Gone { uid: uid.clone() });
                return;
            }
            Err(error) => out.push(ThrottleOutcome::Failed {
                uid: uid.clone(),
                throttling: true,
                error,
            }),
            Ok(()) => {}
        }
        self.pods.insert(uid.clone(), pod);
    }

    /// Writes the plan to the journal, then to the cgroups. Without a journal nothing is lowered further.
    fn commit(&mut self, now: BootTime, out: &mut Vec<ThrottleOutcome>) {
        self.pods.retain(|_, pod| !pod.entries.is_empty());
        if self.journal_stale || self.pods.values().any(ThrottledPod::is_due) {
            match self.save(now) {
                Ok(()) => self.pods.values_mut().for_each(ThrottledPod::journalled),
                Err(error) => self.revert_unsaved(error, out),
            }
        }
        for (uid, pod) in &mut self.pods {
            self.journal_stale |= pod.write(uid, &mut self.effects, out);
        }
        self.pods.retain(|_, pod| !pod.entries.is_empty());
    }

    fn save(&mut self, now: BootTime) -> Result<(), JournalError> {
        let mut effects = std::mem::take(&mut self.effects);
        let saved = self.journal.save(now, self.records(), &mut effects);
        self.effects = effects;
        saved?;
        self.journal_stale = false;
        Ok(())
    }

    fn revert_unsaved(&mut self, error: JournalError, out: &mut Vec<ThrottleOutcome>) {
        self.journal_stale = true;
        out.push(ThrottleOutcome::JournalFailed { error });
        for (uid, pod) in &mut self.pods {
            if pod.revert() {
                out.push(ThrottleOutcome::NotThrottled { uid: uid.clone() });
            }
        }
    }
}

fn is_throttled_in(throttles: &[PodThrottle], uid: &PodUid) -> bool {
    throttles.iter().any(|throttle| throttle.uid == *uid)
}
