//! Checks every throttled file in each tick, and reacts to changes by other writers.

use std::sync::Arc;

use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::control_file::{ControlFileError, CpuDir, Role};

use super::outcome::ThrottleOutcome;
use super::plan_files::micros;
use super::throttled_pod::{FileStage, LIFETIME, OwnedFile, ReadBack, ThrottledPod};
use super::{CONTEST_PAUSE, Throttler};

/// A pod with files that hold a foreign value.
struct ModifiedPod {
    uid: PodUid,
    pod: ThrottledPod,
    /// Index of the entry, and its file's content.
    foreign: Vec<(usize, Box<str>)>,
}

impl Throttler {
    /// Reads every throttled file back. After a foreign change, the smaller of their value and ours (of a burst that we raised
    /// the larger) is written in the same tick, and theirs becomes the original. A pod that another writer keeps changing is
    /// left alone for a while.
    ///
    /// Without changes it costs one `pread` per file and does not allocate.
    pub fn verify(&mut self, now: BootTime) -> Vec<ThrottleOutcome> {
        let mut out = Vec::new();
        let unmodified =
            |pod: &ThrottledPod| pod.deadline > now && !pod.is_due() && pod.is_unmodified();
        if !self.journal_stale && self.pods.values().all(unmodified) {
            return out;
        }
        let mut modified = self.take_modified(now, &mut out);
        let swept = self.is_sweep(&modified);
        if swept {
            if let [pod] = &mut modified[..] {
                // A writer that only fights over this pod looks the same, but comes back at once.
                pod.pod.resets.push(now);
            }
            let uids = modified.iter().map(|pod| pod.uid.clone()).collect();
            out.push(ThrottleOutcome::Swept { uids });
        }
        for pod in modified {
            self.respond(now, pod, swept, &mut out);
        }
        let only_retried = out.is_empty();
        self.commit(now, &mut out);
        if only_retried {
            // A journal failure was already reported when it first occurred.
            out.retain(|outcome| !matches!(outcome, ThrottleOutcome::JournalFailed { .. }));
        }
        out
    }

    /// Whether every quota of ours was reset to its original, as `systemctl daemon-reload` does. Not every version of systemd
    /// resets the idle class.
    fn is_sweep(&self, modified: &[ModifiedPod]) -> bool {
        let has_quota = |pod: &ThrottledPod| pod.entries.iter().any(|it| it.role() == Role::Quota);
        !modified.is_empty()
            && modified.iter().all(ModifiedPod::is_reset)
            && !self.pods.values().any(has_quota)
    }

    /// Drops vanished cgroups, restores expired throttles, and takes out the pods with foreign values.
    fn take_modified(&mut self, now: BootTime, out: &mut Vec<ThrottleOutcome>) -> Vec<ModifiedPod> {
        let mut modified = Vec::new();
        for (uid, mut pod) in std::mem::take(&mut self.pods) {
            let expired = pod.deadline <= now;
            if expired {
                out.push(ThrottleOutcome::Expired { uid: uid.clone() });
                self.journal_stale |= pod.release(&uid, |_| true, &mut self.effects, out);
                pod.deadline = now + LIFETIME;
            } else if self.drop_removed(&uid, &mut pod, out) {
                continue;
            }
            let foreign = foreign(&uid, &pod, out);
            if foreign.is_empty() || expired {
                self.pods.insert(uid, pod);
            } else {
                modified.push(ModifiedPod { uid, pod, foreign });
            }
        }
        modified
    }

    /// Drops the entries of vanished cgroups. Returns whether the pod itself is gone.
    fn drop_removed(
        &mut self,
        uid: &PodUid,
        pod: &mut ThrottledPod,
        out: &mut Vec<ThrottleOutcome>,
    ) -> bool {
        let before = pod.entries.len();
        let gone = |entry: &OwnedFile| entry.file.read().is_err_and(|error| error.is_gone());
        pod.entries.retain(|entry| !gone(entry));
        if pod.entries.len() == before {
            return false;
        }
        self.journal_stale = true;
        self.recheck_containers(uid);
        let pod_gone = CpuDir::open(&self.hierarchy, &pod.path).is_err_and(|error| error.is_gone());
        if pod_gone {
            self.directories.remove(uid);
            out.push(ThrottleOutcome::Gone { uid: uid.clone() });
        }
        pod_gone
    }

    fn respond(
        &mut self,
        now: BootTime,
        pod: ModifiedPod,
        swept: bool,
        out: &mut Vec<ThrottleOutcome>,
    ) {
        let ModifiedPod {
            uid,
            mut pod,
            foreign,
        } = pod;
        if !swept {
            pod.changes.push(now);
            out.extend(
                foreign
                    .iter()
                    .map(|(index, theirs)| ThrottleOutcome::Foreign {
                        uid: uid.clone(),
                        file: pod.entries[*index].file.path().to_owned(),
                        theirs: theirs.clone(),
                    }),
            );
        }
        if pod.is_contested(now) {
            self.contest(now, uid, pod, out);
            return;
        }
        for (index, theirs) in foreign {
            if let Err(error) = self.reassert(&uid, &mut pod, index, theirs, out) {
                out.push(ThrottleOutcome::Failed {
                    uid: uid.clone(),
                    throttling: true,
                    error,
                });
            }
        }
        pod.drop_unchanged();
        self.pods.insert(uid, pod);
    }

    /// Stops throttling a pod that another writer keeps changing; files that still hold our value are restored.
    fn contest(
        &mut self,
        now: BootTime,
        uid: PodUid,
        mut pod: ThrottledPod,
        out: &mut Vec<ThrottleOutcome>,
    ) {
        let until = now + CONTEST_PAUSE;
        pod.release(&uid, |_| true, &mut self.effects, out);
        self.journal_stale = true;
        out.push(ThrottleOutcome::Contested {
            uid: uid.clone(),
            until,
        });
        self.contested.insert(uid.clone(), until);
        // Files that could not be restored stay in the journal and are retried.
        self.pods.insert(uid, pod);
    }

    fn reassert(
        &mut self,
        uid: &PodUid,
        pod: &mut ThrottledPod,
        index: usize,
        theirs: Box<str>,
        out: &mut Vec<ThrottleOutcome>,
    ) -> Result<(), ControlFileError> {
        let entry = &mut pod.entries[index];
        let ours = combined(entry, &theirs)?;
        entry.ours = ours;
        entry.previous = theirs.clone();
        if entry.original == theirs {
            entry.stage = FileStage::Reassert;
        } else {
            entry.stage = FileStage::Change;
            self.journal_stale = true;
            if entry.role() == Role::Quota {
                out.push(ThrottleOutcome::Resized {
                    uid: uid.clone(),
                    cgroup: Arc::clone(&entry.cgroup),
                    original: entry.file.bandwidth(&theirs)?.limit(),
                });
            }
            entry.original = theirs;
        }
        if entry.role() == Role::Idle {
            let target_cgroup = Arc::clone(&entry.cgroup);
            self.reassert_weight(pod, &target_cgroup)?;
        }
        Ok(())
    }

    /// A writer that unsets the idle class thereby resets the weight to the default, and may set a new one afterwards.
    fn reassert_weight(
        &mut self,
        pod: &mut ThrottledPod,
        target_cgroup: &str,
    ) -> Result<(), ControlFileError> {
        let Some(weight) = pod.entry(target_cgroup, Role::Weight) else {
            return Ok(());
        };
        let reading = weight.file.read()?;
        let text = reading.text();
        weight.stage = FileStage::Reassert;
        if *text != *weight.original && !weight.file.kind().is_weight_around_idle(text) {
            weight.original = text.into();
            self.journal_stale = true;
        }
        Ok(())
    }
}

impl ModifiedPod {
    /// Whether every foreign value is the original.
    fn is_reset(&self) -> bool {
        self.foreign.iter().all(|(index, theirs)| {
            let entry = &self.pod.entries[*index];
            // systemd leaves bursts alone.
            entry.original == *theirs && !entry.is_raised_burst()
        })
    }
}

impl ThrottledPod {
    fn is_unmodified(&self) -> bool {
        self.entries
            .iter()
            .all(|entry| matches!(entry.check(), ReadBack::Ours))
    }
}

fn foreign(
    uid: &PodUid,
    pod: &ThrottledPod,
    out: &mut Vec<ThrottleOutcome>,
) -> Vec<(usize, Box<str>)> {
    let mut foreign = Vec::new();
    for (index, entry) in pod.entries.iter().enumerate() {
        match entry.check() {
            ReadBack::Ours => {}
            ReadBack::Foreign(theirs) => foreign.push((index, theirs)),
            ReadBack::Failed(error) if error.is_gone() => {}
            ReadBack::Failed(error) => out.push(ThrottleOutcome::Failed {
                uid: uid.clone(),
                throttling: false,
                error,
            }),
        }
    }
    foreign
}

/// The value to write after another writer set `theirs`.
fn combined(entry: &OwnedFile, theirs: &str) -> Result<Box<str>, ControlFileError> {
    let file = &entry.file;
    Ok(match entry.role() {
        Role::Quota => {
            let both = file.bandwidth(theirs)?.min(file.bandwidth(&entry.ours)?);
            file.text(both)
        }
        Role::Burst if entry.is_raised_burst() => micros(file, theirs)?
            .max(micros(file, &entry.ours)?)
            .to_string()
            .into(),
        Role::Burst => micros(file, theirs)?
            .min(micros(file, &entry.ours)?)
            .to_string()
            .into(),
        Role::Idle | Role::Weight => entry.ours.clone(),
    })
}
