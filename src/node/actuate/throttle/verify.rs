//! The look at every held file in each tick, and what follows when somebody else has written one.

use std::sync::Arc;

use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::knob::{CpuDir, KnobError, Role};

use super::aim::micros;
use super::hold::{Entry, Hold, LIFETIME, Seen, Stage};
use super::outcome::Outcome;
use super::{CONTEST_PAUSE, Throttler};

/// A pod some of whose files hold somebody else's value.
struct Disturbed {
    uid: PodUid,
    hold: Hold,
    /// Index of the entry, and what its file holds.
    foreign: Vec<(usize, Box<str>)>,
}

impl Throttler {
    /// Reads every held file back. A foreign change is answered in the same tick with the smaller of theirs and
    /// ours, and theirs is the new original; a pod that somebody else keeps writing is left to them for a while.
    ///
    /// Costs one `pread` a file and no allocation while nothing has changed.
    pub fn verify(&mut self, now: BootTime) -> Vec<Outcome> {
        let mut out = Vec::new();
        let undisturbed =
            |hold: &Hold| hold.deadline > now && !hold.is_due() && hold.is_undisturbed();
        if !self.stale && self.holds.values().all(undisturbed) {
            return out;
        }
        let before = self.holds.len();
        let disturbed = self.sort_out(now, &mut out);
        let swept =
            before > 1 && disturbed.len() == before && disturbed.iter().all(Disturbed::is_swept);
        if swept {
            self.sweeps.push(now);
            out.push(Outcome::Swept { pods: before });
        }
        for pod in disturbed {
            self.answer(now, pod, swept, &mut out);
        }
        let only_retried = out.is_empty();
        self.commit(now, &mut out);
        if only_retried {
            // That the journal cannot be written was told when it was first needed.
            out.retain(|outcome| !matches!(outcome, Outcome::JournalFailed { .. }));
        }
        out
    }

    /// Drops what is gone, gives back what has expired, and takes out the pods with foreign values.
    fn sort_out(&mut self, now: BootTime, out: &mut Vec<Outcome>) -> Vec<Disturbed> {
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

    /// Drops the entries of vanished cgroups; whether the pod itself is gone.
    fn drop_gone(&mut self, uid: &PodUid, hold: &mut Hold, out: &mut Vec<Outcome>) -> bool {
        let before = hold.entries.len();
        let gone = |entry: &Entry| entry.knob.read().is_err_and(|error| error.is_gone());
        hold.entries.retain(|entry| !gone(entry));
        if hold.entries.len() == before {
            return false;
        }
        self.stale = true;
        self.look_again(uid);
        let pod_gone =
            CpuDir::open(&self.hierarchy, &hold.path).is_err_and(|error| error.is_gone());
        if pod_gone {
            self.folders.remove(uid);
            out.push(Outcome::Gone { uid: uid.clone() });
        }
        pod_gone
    }

    fn answer(&mut self, now: BootTime, pod: Disturbed, swept: bool, out: &mut Vec<Outcome>) {
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

    /// Leaves the pod to whoever keeps writing it; the files that still hold our value go back to their originals.
    fn contest(&mut self, now: BootTime, uid: PodUid, mut hold: Hold, out: &mut Vec<Outcome>) {
        let until = now + CONTEST_PAUSE;
        hold.release(&uid, |_| true, &mut self.effects, out);
        self.stale = true;
        out.push(Outcome::Contested {
            uid: uid.clone(),
            until,
        });
        self.contested.insert(uid.clone(), until);
        // What could not be given back stays in the journal and is tried again.
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

    /// Whoever takes the class back gives the cgroup the default weight by that, and perhaps a new one after it.
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
    /// Every file that is not ours any more is back at its original.
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
            .all(|entry| matches!(entry.look(), Seen::Ours))
    }
}

fn foreign(uid: &PodUid, hold: &Hold, out: &mut Vec<Outcome>) -> Vec<(usize, Box<str>)> {
    let mut foreign = Vec::new();
    for (index, entry) in hold.entries.iter().enumerate() {
        match entry.look() {
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

/// What a file has to hold after somebody else wrote `theirs`.
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
