//! Eviction on a machine without Kubernetes: SIGTERM to every process of a cgroup, its grace period, then the end
//! of what is left, through the cgroup.
//!
//! Nothing here waits: each [`Evictor::tick`] looks once and does what is due.

mod kill;
mod members;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::knob::{CpuDir, KnobError};
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

use self::members::Members;

/// A pod that outlives its kill by so much is told of: its processes hang in the kernel.
const STUCK_AFTER: Duration = Duration::from_secs(30);

/// An eviction that has begun; kept over a restart, so that the grace period ends when it was meant to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PendingEviction {
    /// Which pod.
    pub uid: PodUid,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Inode of the cgroup's folder: another cgroup of that name is left alone.
    pub inode: u64,
    /// When it was told to end.
    pub started: BootTime,
    /// When what is left of it is killed.
    pub kill_at: BootTime,
}

/// How an eviction went on.
#[derive(Debug)]
pub enum EvictOutcome {
    /// All its processes ended within the grace period.
    Ended {
        /// Which pod.
        uid: PodUid,
        /// From the first signal on.
        after: Duration,
    },
    /// What was left of it after the grace period was killed, and has ended.
    Killed {
        /// Which pod.
        uid: PodUid,
        /// From the first signal on.
        after: Duration,
    },
    /// It goes on, with trouble; told once a cause.
    Failed {
        /// Which pod.
        uid: PodUid,
        /// Why.
        error: EvictError,
    },
}

/// Why a pod could not be evicted, or not yet.
#[derive(Debug, thiserror::Error)]
pub enum EvictError {
    /// There is no such cgroup any more.
    #[error("failed to evict {0}: it is gone")]
    Gone(CgroupPath),
    /// It would be ourselves.
    #[error("failed to evict {0}: this process runs in it")]
    Ourselves(CgroupPath),
    /// It would be the machine.
    #[error("failed to evict {0}: process 1 runs in it")]
    Init(CgroupPath),
    /// Its processes do not die.
    #[error("failed to evict {0}: its processes were killed but hang in the kernel")]
    Stuck(CgroupPath),
    /// Its folder cannot be opened.
    #[error(transparent)]
    Open(#[from] KnobError),
    /// A file of it cannot be used.
    #[error("failed to {verb} {}: {source}", path.display())]
    Io {
        /// `read` or `write`.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
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
    pending: PendingEviction,
    killed: bool,
    /// The last failure has been told.
    told: bool,
}

/// Evicts pods through their cgroups.
#[derive(Debug)]
pub struct Evictor {
    hierarchy: Hierarchy,
    evictions: Vec<Eviction>,
}

impl Evictor {
    /// An evictor with nothing to do.
    pub const fn new(hierarchy: Hierarchy) -> Self {
        Self {
            hierarchy,
            evictions: Vec::new(),
        }
    }

    /// Goes on with what an earlier process began. Nobody is signalled a second time.
    pub fn resume(&mut self, pending: Vec<PendingEviction>) {
        self.evictions
            .extend(pending.into_iter().map(|pending| Eviction {
                pending,
                killed: false,
                told: false,
            }));
    }

    /// What has begun and not ended.
    pub fn pending(&self) -> impl Iterator<Item = &PendingEviction> {
        self.evictions.iter().map(|eviction| &eviction.pending)
    }

    /// Tells every process of `cgroup` and below to end. One that is being evicted already is left to that.
    ///
    /// Only the processes of this moment get the signal: what a shutdown starts to clean up is not disturbed.
    ///
    /// # Errors
    /// Where it is gone, or is ours or the machine's own; nobody was signalled then.
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
        let pending = PendingEviction {
            uid: uid.clone(),
            cgroup: cgroup.clone(),
            inode,
            started: now,
            kill_at: now + grace,
        };
        self.resume(vec![pending]);
        Ok(())
    }

    /// Looks at every eviction once: notes those that have ended, and kills where the grace period is over.
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
    /// Whether it is over.
    fn tick(&mut self, hierarchy: &Hierarchy, now: BootTime, out: &mut Vec<EvictOutcome>) -> bool {
        match self.advance(hierarchy, now) {
            Ok(false) => false,
            Ok(true) => {
                out.push(self.ended(now));
                true
            }
            Err(error) => {
                let hopeless = matches!(error, EvictError::Ourselves(_) | EvictError::Init(_));
                if !self.told || hopeless {
                    let uid = self.pending.uid.clone();
                    out.push(EvictOutcome::Failed { uid, error });
                    self.told = true;
                }
                hopeless
            }
        }
    }

    /// Whether nothing of the pod runs any more.
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
        // Somebody may have moved us or init in since.
        members.all_may_end(cgroup)?;
        self.killed = true;
        kill::kill(hierarchy, cgroup, &members)?;
        if now.since(self.pending.kill_at) >= STUCK_AFTER {
            return Err(EvictError::Stuck(cgroup.clone()));
        }
        Ok(false)
    }

    fn ended(&self, now: BootTime) -> EvictOutcome {
        let uid = self.pending.uid.clone();
        let after = now.since(self.pending.started);
        if self.killed {
            EvictOutcome::Killed { uid, after }
        } else {
            EvictOutcome::Ended { uid, after }
        }
    }
}

/// The folder of the cgroup in the tree that says which processes belong to it.
fn folder(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Option<PathBuf> {
    hierarchy.dir(Controller::Cpu, cgroup)
}
