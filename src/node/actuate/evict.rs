//! Eviction on a machine without Kubernetes: SIGTERM to every process of a cgroup, and after the grace period a kill
//! of the remaining ones through the cgroup.
//!
//! Nothing here waits: each [`CgroupEvictor::tick`] checks once and does what is due.

mod kill;
mod members;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::control_file::{ControlFileError, CpuDir};
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

use self::members::Members;

/// How long after the kill a pod counts as stuck: its processes hang in the kernel.
const STUCK_AFTER: Duration = Duration::from_secs(30);

/// A started eviction; saved across restarts, so that the grace period ends at the same time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartedEviction {
    /// Which pod.
    pub uid: PodUid,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Inode of the cgroup's directory, to leave a later cgroup of the same name alone.
    pub inode: u64,
    /// When SIGTERM was sent.
    pub started: BootTime,
    /// When the remaining processes are killed.
    pub kill_at: BootTime,
}

/// Progress of an eviction.
#[derive(Debug)]
pub enum EvictOutcome {
    /// All processes exited within the grace period.
    Exited {
        /// Which pod.
        uid: PodUid,
        /// Time since the first signal.
        after: Duration,
    },
    /// The processes left after the grace period were killed and have exited.
    Killed {
        /// Which pod.
        uid: PodUid,
        /// Time since the first signal.
        after: Duration,
    },
    /// A problem; the eviction goes on. Reported once.
    Failed {
        /// Which pod.
        uid: PodUid,
        /// Why.
        error: EvictError,
    },
}

/// Why a pod could not be evicted (yet).
#[derive(Debug, thiserror::Error)]
pub enum EvictError {
    /// The cgroup no longer exists.
    #[error("failed to evict {0}: it is gone")]
    Gone(CgroupPath),
    /// This process runs in the cgroup.
    #[error("failed to evict {0}: this process runs in it")]
    Ourselves(CgroupPath),
    /// Init runs in the cgroup.
    #[error("failed to evict {0}: process 1 runs in it")]
    Init(CgroupPath),
    /// Its processes do not exit after SIGKILL.
    #[error("failed to evict {0}: its processes were killed but hang in the kernel")]
    Stuck(CgroupPath),
    /// The cgroup's directory cannot be opened.
    #[error(transparent)]
    Open(#[from] ControlFileError),
    /// A file of the cgroup cannot be used.
    #[error("failed to {verb} {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}

impl EvictError {
    fn io(verb: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io {
            verb,
            path: path.to_owned(),
            source,
        }
    }
}

#[derive(Debug)]
struct Eviction {
    pending: StartedEviction,
    killed: bool,
    /// A failure has been reported.
    failure_reported: bool,
}

/// Evicts pods through their cgroups.
#[derive(Debug)]
pub struct CgroupEvictor {
    hierarchy: Hierarchy,
    evictions: Vec<Eviction>,
}

impl CgroupEvictor {
    /// An evictor with nothing to do.
    pub const fn new(hierarchy: Hierarchy) -> Self {
        Self {
            hierarchy,
            evictions: Vec::new(),
        }
    }

    /// Continues the evictions of an earlier process, without sending SIGTERM again.
    pub fn resume(&mut self, pending: Vec<StartedEviction>) {
        self.evictions
            .extend(pending.into_iter().map(|pending| Eviction {
                pending,
                killed: false,
                failure_reported: false,
            }));
    }

    /// Evictions that have not finished.
    pub fn pending(&self) -> impl Iterator<Item = &StartedEviction> {
        self.evictions.iter().map(|eviction| &eviction.pending)
    }

    /// Sends SIGTERM to every process in and below `cgroup`. Does nothing if the pod is already being evicted.
    ///
    /// Only current processes get the signal, so that cleanup processes started by a shutdown are not disturbed.
    ///
    /// # Errors
    /// If the cgroup is gone, or contains this process or init; no signal was sent then.
    pub fn start(
        &mut self,
        uid: &PodUid,
        cgroup: &CgroupPath,
        grace: Duration,
        now: BootTime,
    ) -> Result<(), EvictError> {
        if self.pending().any(|pending| pending.uid == *uid) {
            return Ok(());
        }
        let inode = open(&self.hierarchy, cgroup)?.inode();
        let members = Members::of(&self.hierarchy, cgroup);
        members.all_may_end(cgroup)?;
        members.terminate();
        let pending = StartedEviction {
            uid: uid.clone(),
            cgroup: cgroup.clone(),
            inode,
            started: now,
            kill_at: now + grace,
        };
        self.resume(vec![pending]);
        Ok(())
    }

    /// Checks every eviction once: removes finished ones and kills those whose grace period is over.
    pub fn tick(&mut self, now: BootTime) -> Vec<EvictOutcome> {
        let mut out = Vec::new();
        let hierarchy = &self.hierarchy;
        self.evictions
            .retain_mut(|eviction| !eviction.tick(hierarchy, now, &mut out));
        out
    }
}

fn open(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Result<CpuDir, EvictError> {
    CpuDir::open(hierarchy, cgroup).map_err(|error| {
        if error.is_gone() {
            EvictError::Gone(cgroup.clone())
        } else {
            error.into()
        }
    })
}

impl Eviction {
    /// Whether it has finished.
    fn tick(&mut self, hierarchy: &Hierarchy, now: BootTime, out: &mut Vec<EvictOutcome>) -> bool {
        match self.advance(hierarchy, now) {
            Ok(false) => false,
            Ok(true) => {
                out.push(self.finished(now));
                true
            }
            Err(error) => {
                let hopeless = matches!(error, EvictError::Ourselves(_) | EvictError::Init(_));
                if !self.failure_reported || hopeless {
                    let uid = self.pending.uid.clone();
                    out.push(EvictOutcome::Failed { uid, error });
                    self.failure_reported = true;
                }
                hopeless
            }
        }
    }

    /// Whether no process of the pod is left.
    fn advance(&mut self, hierarchy: &Hierarchy, now: BootTime) -> Result<bool, EvictError> {
        let cgroup = &self.pending.cgroup;
        match open(hierarchy, cgroup) {
            Ok(dir) if dir.inode() == self.pending.inode => {}
            Ok(_) | Err(EvictError::Gone(_)) => return Ok(true),
            Err(error) => return Err(error),
        }
        let members = Members::of(hierarchy, cgroup);
        if members.is_empty() {
            return Ok(true);
        }
        if now < self.pending.kill_at {
            return Ok(false);
        }
        // This process or init may have been moved into the cgroup since.
        members.all_may_end(cgroup)?;
        self.killed = true;
        kill::kill(hierarchy, cgroup, &members)?;
        if now.since(self.pending.kill_at) >= STUCK_AFTER {
            return Err(EvictError::Stuck(cgroup.clone()));
        }
        Ok(false)
    }

    fn finished(&self, now: BootTime) -> EvictOutcome {
        let uid = self.pending.uid.clone();
        let after = now.since(self.pending.started);
        if self.killed {
            EvictOutcome::Killed { uid, after }
        } else {
            EvictOutcome::Exited { uid, after }
        }
    }
}

/// The directory of the cgroup in the tree used for its process list.
fn directory(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Option<PathBuf> {
    hierarchy.dir(Controller::Cpu, cgroup)
}
