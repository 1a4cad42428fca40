//! The processes of a cgroup and its descendants.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::node::cgroup::{CgroupPath, Hierarchy};

use super::{EvictError, directory};

/// Maximum number of pidfds open at once while sending signals.
const BATCH: usize = 128;

/// Process IDs from one read of `cgroup.procs` of a cgroup and its descendants. Process 0 stands for processes of
/// another PID namespace.
#[derive(Debug, Default)]
pub(super) struct Members {
    directory: Option<PathBuf>,
    pids: BTreeSet<i32>,
}

impl Members {
    pub fn of(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Self {
        directory(hierarchy, cgroup).map_or_else(Self::default, Self::in_directory)
    }

    pub fn in_directory(directory: PathBuf) -> Self {
        let mut pids = BTreeSet::new();
        collect(&directory, &mut pids);
        Self {
            directory: Some(directory),
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
        self.directory
            .clone()
            .map_or_else(Self::default, Self::in_directory)
    }

    /// # Errors
    /// If this process or init is among them.
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

    /// Sends SIGTERM to all, and SIGCONT so that stopped processes can exit.
    pub fn terminate(&self) {
        self.signal(&[Signal::TERM, Signal::CONT]);
    }

    /// Sends SIGKILL to all.
    pub fn kill(&self) {
        self.signal(&[Signal::KILL]);
    }

    /// A process ID may have been reused since it was read. So each is pinned by a pidfd first, and signalled only if
    /// the cgroup still lists it afterwards.
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
                    log_failure(pid, sent);
                }
            }
        }
    }
}

fn log_failure(pid: Pid, sent: Result<(), Errno>) {
    match sent {
        Ok(()) | Err(Errno::SRCH) => {}
        Err(error) => {
            let pid = pid.as_raw_nonzero();
            tracing::warn!(%pid, %error, "failed to signal a process");
        }
    }
}

/// A cgroup that vanishes meanwhile has no processes; those of a threaded cgroup are listed in its parent.
fn collect(directory: &Path, pids: &mut BTreeSet<i32>) {
    if let Ok(text) = fs::read_to_string(directory.join("cgroup.procs")) {
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    }
    let Ok(children) = fs::read_dir(directory) else {
        return;
    };
    for child in children.flatten() {
        if child.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&child.path(), pids);
        }
    }
}
