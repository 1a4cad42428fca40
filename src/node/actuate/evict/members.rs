//! The processes of a cgroup and of those below it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::node::cgroup::{CgroupPath, Hierarchy};

use super::{EvictError, folder};

/// Descriptors that are open at once while signals are sent.
const BATCH: usize = 128;

/// Process ids, as one reading of a cgroup's `cgroup.procs` and of all below it has them. Process 0 stands for those
/// of another process id namespace.
#[derive(Debug, Default)]
pub(super) struct Members {
    folder: Option<PathBuf>,
    pids: BTreeSet<i32>,
}

impl Members {
    pub fn of(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Self {
        folder(hierarchy, cgroup).map_or_else(Self::default, Self::in_folder)
    }

    pub fn in_folder(folder: PathBuf) -> Self {
        let mut pids = BTreeSet::new();
        collect(&folder, &mut pids);
        Self {
            folder: Some(folder),
            pids,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.pids.is_empty()
    }

    pub fn pids(&self) -> &BTreeSet<i32> {
        &self.pids
    }

    /// The same cgroup, read again.
    pub fn again(&self) -> Self {
        self.folder
            .clone()
            .map_or_else(Self::default, Self::in_folder)
    }

    /// # Errors
    /// Where we or init are among them.
    pub fn all_may_end(&self, cgroup: &CgroupPath) -> Result<(), EvictError> {
        let ourselves = i32::try_from(std::process::id()).unwrap_or_default();
        if self.pids.contains(&ourselves) {
            return Err(EvictError::Ourselves(cgroup.clone()));
        }
        if self.pids.contains(&1) {
            return Err(EvictError::Init(cgroup.clone()));
        }
        Ok(())
    }

    /// Asks all of them to end; those that are stopped are continued, so that they can.
    pub fn terminate(&self) {
        self.signal(&[Signal::TERM, Signal::CONT]);
    }

    /// Ends all of them at once.
    pub fn kill(&self) {
        self.signal(&[Signal::KILL]);
    }

    /// A process id may have been taken over by a stranger since it was read. So each is pinned by a descriptor
    /// first, and signalled only if the cgroup still lists it after that.
    fn signal(&self, signals: &[Signal]) {
        let pids: Vec<i32> = self.pids.iter().copied().filter(|pid| *pid > 1).collect();
        for batch in pids.chunks(BATCH) {
            let pinned: Vec<_> = batch
                .iter()
                .filter_map(|pid| Pid::from_raw(*pid))
                .map(|pid| (pid, pidfd_open(pid, PidfdFlags::empty())))
                .collect();
            let still = self.again();
            for (pid, pin) in pinned {
                if !still.pids.contains(&pid.as_raw_nonzero().get()) {
                    continue;
                }
                for signal in signals {
                    let sent = match &pin {
                        Ok(pin) => pidfd_send_signal(pin, *signal),
                        // Linux before 5.3.
                        Err(Errno::NOSYS) => kill_process(pid, *signal),
                        Err(error) => Err(*error),
                    };
                    note(pid, sent);
                }
            }
        }
    }
}

fn note(pid: Pid, sent: Result<(), Errno>) {
    match sent {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => {
            let pid = pid.as_raw_nonzero();
            tracing::warn!(%pid, %error, "failed to signal a process");
        }
    }
}

/// A cgroup that vanishes meanwhile has no processes any more; a threaded one's are listed above it.
fn collect(folder: &Path, pids: &mut BTreeSet<i32>) {
    if let Ok(text) = fs::read_to_string(folder.join("cgroup.procs")) {
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    }
    let Ok(children) = fs::read_dir(folder) else {
        return;
    };
    for child in children.flatten() {
        if child.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&child.path(), pids);
        }
    }
}
