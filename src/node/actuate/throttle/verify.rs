//! Checks every throttled file in each tick, and reacts to changes by other writers.

use std::sync::Arc;

use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::knob::{CpuDir, KnobError, Role};

use super::aim::micros;
use super::hold::{Entry, Hold, LIFETIME, Seen, Stage};
use super::outcome::Outcome;
use super::{CONTEST_PAUSE, Throttler};

/// A pod with files that hold a foreign value.
struct Disturbed {
    uid: PodUid,
    hold: Hold,
    /// Index of the entry, and its file's content.
    foreign: Vec<(usize, Box<str>)>,
}

impl Throttler {
    /// Reads every throttled file back. After a foreign change, the smaller of their value and ours is written in the
    /// same tick, and theirs becomes the original. A pod that another writer keeps changing is left alone for a while.
    ///
    /// Without changes it costs one `pread` per file and does not allocate.
    pub fn verify(&mut self, now: BootTime) -> Vec<Outcome> {
        let mut out = Vec::new();
        let undisturbed =
            |hold: &Hold| hold.deadline > now && !hold.is_due() && hold.is_undisturbed();
        if !self.stale && self.holds.values().all(undisturbed) {
            return out;
        }
        let before = self.holds.len();
        let disturbed = self.take_disturbed(now, &mut out);
        let swept =
            before > 1 && disturbed.len() == before && disturbed.iter().all(Disturbed::is_swept);
        if swept {
            self.sweeps.push(now);
            out.push(Outcome::Swept { pods: before });
        }
        for pod in disturbed {
            self.respond(now, pod, swept, &mut out);
        }
        let only_retried = out.is_empty();
        self.commit(now, &mut out);
        if only_retried {
            // A journal failure was already reported when it first occurred.
            out.retain(|outcome| !matches!(outcome, Outcome::JournalFailed { .. }));
        }
        out
    }

    /// Drops vanished cgroups, restores expired throttles, and takes out the pods with foreign values.
    fn take_disturbed(&mut self, now: BootTime, out: &mut Vec<Outcome>) -> Vec<Disturbed> {
        let mut disturbed = Vec::new();
        for (uid, mut hold) in std::mem::take(&mut self.holds) {
            let expired = hold.deadline <= now;
            if expired {
                out.push(Outcome::Expired { uid: uid.clone() });
                self.stale |= hold.release(&uid, |_| true, &mut self.effects, out);
                hold.deadline = now + LIFETIME;
            } else if self.drop_gone(&uid, &mut hold, out) {
                continue;
            }
            let foreign = foreign(&uid, &hold, out);
            if foreign.is_empty() || expired {
                self.holds.insert(uid, hold);
            } else {
                disturbed.push(Disturbed { uid, hold, foreign });
            }
        }
        disturbed
    }

    /// Drops the entries of vanished cgroups. Returns whether the pod itself is gone.
    fn drop_gone(&mut self, uid: &PodUid, hold: &mut Hold, out: &mut Vec<Outcome>) -> bool {
        let before = hold.entries.len();
        let gone = |entry: &Entry| entry.knob.read().is_err_and(|error| error.is_gone());
        hold.entries.retain(|entry| !gone(entry));
        if hold.entries.len() == before {
            return false;
        }
        self.stale = true;
        self.recheck_containers(uid);
        let pod_gone =
            CpuDir::open(&self.hierarchy, &hold.path).is_err_and(|error| error.is_gone());
        if pod_gone {
            self.folders.remove(uid);
            out.push(Outcome::Gone { uid: uid.clone() });
        }
        pod_gone
    }

    fn respond(&mut self, now: BootTime, pod: Disturbed, swept: bool, out: &mut Vec<Outcome>) {
        let Disturbed {
            uid,
            mut hold,
            foreign,
        } = pod;
        if !swept {
            hold.changes.push(now);
            out.extend(foreign.iter().map(|(index, theirs)| Outcome::Foreign {
                uid: uid.clone(),
                file: hold.entries[*index].knob.path().to_owned(),
                theirs: theirs.clone(),
            }));
        }
        if hold.changes.exceeds(&self.sweeps, now) {
            self.contest(now, uid, hold, out);
            return;
        }
        for (index, theirs) in foreign {
            if let Err(error) = self.reassert(&uid, &mut hold, index, theirs, out) {
                out.push(Outcome::Failed {
                    uid: uid.clone(),
                    throttling: true,
                    error,
                });
            }
        }
        hold.drop_unchanged();
        self.holds.insert(uid, hold);
    }

    /// Stops throttling a pod that another writer keeps changing; files that still hold our value are restored.
    fn contest(&mut self, now: BootTime, uid: PodUid, mut hold: Hold, out: &mut Vec<Outcome>) {
        let until = now + CONTEST_PAUSE;
        hold.release(&uid, |_| true, &mut self.effects, out);
        self.stale = true;
        out.push(Outcome::Contested {
            uid: uid.clone(),
            until,
        });
        self.contested.insert(uid.clone(), until);
        // Files that could not be restored stay in the journal and are retried.
        self.holds.insert(uid, hold);
    }

    fn reassert(
        &mut self,
        uid: &PodUid,
        hold: &mut Hold,
        index: usize,
        theirs: Box<str>,
        out: &mut Vec<Outcome>,
    ) -> Result<(), KnobError> {
        let entry = &mut hold.entries[index];
        let ours = smaller(entry, &theirs)?;
        entry.ours = ours;
        entry.previous = theirs.clone();
        if entry.original == theirs {
            entry.stage = Stage::Reassert;
        } else {
            entry.stage = Stage::Change;
            self.stale = true;
            if entry.role() == Role::Quota {
                out.push(Outcome::Resized {
                    uid: uid.clone(),
                    cgroup: Arc::clone(&entry.lever),
                    original: entry.knob.bandwidth(&theirs)?.limit(),
                });
            }
            entry.original = theirs;
        }
        if entry.role() == Role::Idle {
            let lever = Arc::clone(&entry.lever);
            self.reassert_weight(hold, &lever)?;
        }
        Ok(())
    }

    /// A writer that unsets the idle class thereby resets the weight to the default, and may set a new one afterwards.
    fn reassert_weight(&mut self, hold: &mut Hold, lever: &str) -> Result<(), KnobError> {
        let Some(weight) = hold.entry(lever, Role::Weight) else {
            return Ok(());
        };
        let reading = weight.knob.read()?;
        let text = reading.text();
        weight.stage = Stage::Reassert;
        if *text != *weight.original && !weight.knob.file().is_weight_around_idle(text) {
            weight.original = text.into();
            self.stale = true;
        }
        Ok(())
    }
}

impl Disturbed {
    /// Whether every foreign value is the original.
    fn is_swept(&self) -> bool {
        self.foreign
            .iter()
            .all(|(index, theirs)| self.hold.entries[*index].original == *theirs)
    }
}

impl Hold {
    fn is_undisturbed(&self) -> bool {
        self.entries
            .iter()
            .all(|entry| matches!(entry.check(), Seen::Ours))
    }
}

fn foreign(uid: &PodUid, hold: &Hold, out: &mut Vec<Outcome>) -> Vec<(usize, Box<str>)> {
    let mut foreign = Vec::new();
    for (index, entry) in hold.entries.iter().enumerate() {
        match entry.check() {
            Seen::Ours => {}
            Seen::Foreign(theirs) => foreign.push((index, theirs)),
            Seen::Failed(error) if error.is_gone() => {}
            Seen::Failed(error) => out.push(Outcome::Failed {
                uid: uid.clone(),
                throttling: false,
                error,
            }),
        }
    }
    foreign
}

/// The value to write after another writer set `theirs`.
fn smaller(entry: &Entry, theirs: &str) -> Result<Box<str>, KnobError> {
    let knob = &entry.knob;
    Ok(match entry.role() {
        Role::Quota => {
            let both = knob.bandwidth(theirs)?.min(knob.bandwidth(&entry.ours)?);
            knob.text(both)
        }
        Role::Burst => micros(knob, theirs)?
            .min(micros(knob, &entry.ours)?)
            .to_string()
            .into(),
        Role::Idle | Role::Weight => entry.ours.clone(),
    })
}
