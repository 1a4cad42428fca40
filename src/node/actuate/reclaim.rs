//! Reclaims page cache of pods through `memory.reclaim` (cgroup v2, Linux 5.19 and later).
//!
//! The write blocks until the kernel has finished scanning, which takes seconds if it has to wait for a disk. A tick
//! cannot wait for that, so a separate thread does it slice by slice. The thread does not notice decisions made
//! meanwhile (a stop, a rule that ends, a pod that becomes protected), so a request expires after [`LIMIT`], and runs
//! no longer than that; the next evaluation asks again for what is still wanted.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;

use crate::clock::boot_time;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::engine::units::Bytes;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

/// Bytes per write.
const SLICE: u64 = 32 << 20;
/// Maximum number of waiting pods.
const QUEUE: usize = 64;
/// How long a reclaim may wait, and how long it may run.
const LIMIT: Duration = Duration::from_secs(5);

/// The outcome of a reclaim.
#[derive(Debug)]
pub enum ReclaimOutcome {
    /// Page cache was reclaimed.
    Reclaimed {
        /// Which pod.
        uid: PodUid,
        /// How much the pod's memory usage fell, or what the kernel says that it reclaimed if that is more: the pod may
        /// have read as much again meanwhile.
        freed: Bytes,
    },
    /// This machine does not support it.
    Unsupported {
        /// Which pod.
        uid: PodUid,
        /// Why.
        reason: &'static str,
    },
    /// The previous reclaim of this pod or too many others are still pending, or the request expired while waiting. The
    /// next evaluation asks again.
    Busy {
        /// Which pod.
        uid: PodUid,
    },
    /// The pod is gone.
    Gone {
        /// Which pod.
        uid: PodUid,
    },
    /// It failed.
    Failed {
        /// Which pod.
        uid: PodUid,
        /// Why.
        error: ReclaimError,
    },
}

/// Why page cache could not be reclaimed.
#[derive(Debug, thiserror::Error)]
#[error("failed to {verb} {}: {source}", path.display())]
pub struct ReclaimError {
    verb: &'static str,
    path: PathBuf,
    source: io::Error,
}

struct Job {
    uid: PodUid,
    dir: PathBuf,
    amount: Bytes,
    /// It does not start after this time.
    until: BootTime,
}

/// Runs reclaims on a separate thread.
#[derive(Debug)]
pub struct Reclaimer {
    hierarchy: Hierarchy,
    worker: Option<(SyncSender<Job>, Receiver<ReclaimOutcome>)>,
    busy: BTreeSet<PodUid>,
}

impl Reclaimer {
    /// The thread starts with the first request.
    pub const fn new(hierarchy: Hierarchy) -> Self {
        Self {
            hierarchy,
            worker: None,
            busy: BTreeSet::new(),
        }
    }

    /// Requests up to `amount` of the page cache of the pod in `cgroup`. `None`: it was queued, and [`Self::poll`]
    /// returns the outcome.
    pub fn request(
        &mut self,
        uid: &PodUid,
        cgroup: &CgroupPath,
        amount: Bytes,
    ) -> Option<ReclaimOutcome> {
        let uid = uid.clone();
        if !self.hierarchy.is_v2() {
            let reason = "cgroup v1 has no memory.reclaim";
            return Some(ReclaimOutcome::Unsupported { uid, reason });
        }
        let dir = self.hierarchy.dir(Controller::Memory, cgroup)?;
        if self.busy.contains(&uid) {
            return Some(ReclaimOutcome::Busy { uid });
        }
        let job = Job {
            uid: uid.clone(),
            dir,
            amount,
            until: boot_time() + LIMIT,
        };
        match self.queue().map(|queue| queue.try_send(job)) {
            Ok(Ok(())) => {
                self.busy.insert(uid);
                None
            }
            Ok(Err(_)) => Some(ReclaimOutcome::Busy { uid }),
            Err(source) => {
                let path = PathBuf::from("the reclaiming thread");
                let error = failed("start", &path, source);
                Some(ReclaimOutcome::Failed { uid, error })
            }
        }
    }

    /// Outcomes since the last call.
    pub fn poll(&mut self) -> Vec<ReclaimOutcome> {
        let Some((_, done)) = &self.worker else {
            return Vec::new();
        };
        let done: Vec<_> = done.try_iter().collect();
        for outcome in &done {
            self.busy.remove(outcome.uid());
        }
        done
    }

    /// The thread ends when the queue is dropped.
    fn queue(&mut self) -> io::Result<&SyncSender<Job>> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => start()?,
        };
        let (queue, _) = self.worker.insert(worker);
        Ok(queue)
    }
}

fn start() -> io::Result<(SyncSender<Job>, Receiver<ReclaimOutcome>)> {
    let (queue, jobs) = mpsc::sync_channel::<Job>(QUEUE);
    let (outcomes, done) = mpsc::channel();
    let work = move || {
        for job in jobs {
            if outcomes.send(reclaim(job, LIMIT)).is_err() {
                break;
            }
        }
    };
    thread::Builder::new()
        .name("reclaim".to_owned())
        .spawn(work)?;
    Ok((queue, done))
}

impl ReclaimOutcome {
    /// The pod it is about.
    pub const fn uid(&self) -> &PodUid {
        match self {
            Self::Reclaimed { uid, .. }
            | Self::Unsupported { uid, .. }
            | Self::Busy { uid }
            | Self::Gone { uid }
            | Self::Failed { uid, .. } => uid,
        }
    }
}

fn reclaim(job: Job, limit: Duration) -> ReclaimOutcome {
    let Job {
        uid,
        dir,
        amount,
        until,
    } = job;
    let started = boot_time();
    if started >= until {
        return ReclaimOutcome::Busy { uid };
    }
    let more = || boot_time().since(started) < limit;
    let current = dir.join("memory.current");
    let before = match usage(&current) {
        Ok(before) => before,
        Err(source) if is_gone(&source) => return ReclaimOutcome::Gone { uid },
        Err(source) => {
            let error = failed("read", &current, source);
            return ReclaimOutcome::Failed { uid, error };
        }
    };
    match reclaim_slices(&dir.join("memory.reclaim"), amount.0, more) {
        Ok(reclaimed) => {
            let after = usage(&current).unwrap_or(before);
            // The pod may have read as much again in the meantime.
            let freed = before.saturating_sub(after).max(Bytes(reclaimed));
            ReclaimOutcome::Reclaimed { uid, freed }
        }
        Err(Stop::NotThere) if dir.exists() => ReclaimOutcome::Unsupported {
            uid,
            reason: "this kernel has no memory.reclaim (it needs Linux 5.19 or later)",
        },
        Err(Stop::NotThere) => ReclaimOutcome::Gone { uid },
        Err(Stop::WouldSwap) => ReclaimOutcome::Unsupported {
            uid,
            reason: "this machine has swap, and its kernel would swap the pod's memory out instead of reclaiming its \
            page cache (Linux 6.9 and later can avoid that)",
        },
        Err(Stop::Failed(error)) => ReclaimOutcome::Failed { uid, error },
    }
}

enum Stop {
    NotThere,
    WouldSwap,
    Failed(ReclaimError),
}

/// Reclaims page cache only. With swap, the kernel needs `swappiness=0` for that. Returns the bytes that the kernel says it
/// reclaimed: it fails where it reclaimed less than it was asked for.
fn reclaim_slices(path: &Path, amount: u64, more: impl Fn() -> bool) -> Result<u64, Stop> {
    let hint = if has_swap() { " swappiness=0" } else { "" };
    let mut left = amount;
    while left > 0 && more() {
        let slice = left.min(SLICE);
        match write(path, &format!("{slice}{hint}")) {
            Ok(()) => left -= slice,
            // Nothing more can be reclaimed.
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(stop(path, error, hint)),
        }
    }
    Ok(amount - left)
}

fn stop(path: &Path, error: io::Error, hint: &str) -> Stop {
    match errno(&error) {
        _ if is_gone(&error) => Stop::NotThere,
        Some(Errno::EINVAL) if !hint.is_empty() => Stop::WouldSwap,
        _ => Stop::Failed(failed("write", path, error)),
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw)
}

/// Whether the cgroup, or the file in it, does not exist.
fn is_gone(error: &io::Error) -> bool {
    matches!(errno(error), Some(Errno::ENOENT | Errno::ENODEV))
}

fn has_swap() -> bool {
    fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() > 1)
}

fn usage(path: &Path) -> io::Result<Bytes> {
    let text = fs::read_to_string(path)?;
    let bytes = text.trim_end().parse().map_err(io::Error::other)?;
    Ok(Bytes(bytes))
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    OpenOptions::new()
        .write(true)
        .open(path)?
        .write_all(value.as_bytes())
}

fn failed(verb: &'static str, path: &Path, source: io::Error) -> ReclaimError {
    ReclaimError {
        verb,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(dir: &Path, amount: u64, until: BootTime) -> Job {
        fs::write(dir.join("memory.current"), "4096").unwrap();
        Job {
            uid: PodUid::from("a"),
            dir: dir.to_owned(),
            amount: Bytes(amount),
            until,
        }
    }

    #[test]
    fn a_reclaim_neither_starts_nor_continues_after_its_deadline() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.reclaim");
        fs::write(&file, "").unwrap();
        let expired = reclaim(job(dir.path(), SLICE, boot_time()), LIMIT);
        assert!(
            matches!(expired, ReclaimOutcome::Busy { .. }),
            "{expired:?}"
        );
        assert_eq!(
            fs::read_to_string(&file).unwrap(),
            "",
            "nothing was requested"
        );

        let started = boot_time();
        let limit = Duration::from_millis(100);
        let outcome = reclaim(job(dir.path(), u64::MAX, started + LIMIT), limit);
        assert!((limit..LIMIT).contains(&boot_time().since(started)));
        // The file of its usage never changes, as if the pod read everything back at once.
        assert!(
            matches!(outcome, ReclaimOutcome::Reclaimed { freed, .. } if freed >= Bytes(SLICE)),
            "{outcome:?}"
        );
        // Followed by a swappiness hint if the machine has swap.
        let written = fs::read_to_string(&file).unwrap();
        assert!(written.starts_with(&SLICE.to_string()), "{written}");
    }
}
