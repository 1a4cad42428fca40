//! Kills a cgroup's processes, even if they fork.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use rustix::process::{Pid, test_kill_process};

use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

use super::members::Members;
use super::{EvictError, directory};

/// Checks of a freezing cgroup within one tick. Freezing takes the kernel well under a millisecond.
const MAX_FREEZE_CHECKS: usize = 1000;
/// Maximum reads of the process list until no new process appears.
const KILL_ROUNDS: usize = 8;

/// Kills all processes of `cgroup`: with `cgroup.kill` if the kernel has it (v2 since 5.14); else frozen, so that
/// none can escape by forking; else one by one, and again in the next tick.
pub(super) fn kill(
    hierarchy: &Hierarchy,
    cgroup: &CgroupPath,
    members: &Members,
) -> Result<(), EvictError> {
    let Some(dir) = directory(hierarchy, cgroup) else {
        return Ok(());
    };
    if hierarchy.is_v2() {
        let switch = dir.join("cgroup.kill");
        match write(&switch, "1") {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            written => return written.map_err(|error| EvictError::io("write", &switch, error)),
        }
    }
    let frozen = Freezer::of(hierarchy, cgroup, members).and_then(Freezer::freeze);
    kill_each(members);
    if let Some(freezer) = frozen {
        freezer.thaw()?;
    }
    Ok(())
}

/// Kills until no new process appears.
fn kill_each(members: &Members) {
    let mut seen = BTreeSet::new();
    let mut round = members.again();
    for _ in 0..KILL_ROUNDS {
        if round.pids().is_subset(&seen) {
            return;
        }
        round.kill();
        seen.extend(round.pids());
        round = members.again();
    }
}

/// The file that freezes a cgroup's processes, and its values.
struct Freezer {
    switch: PathBuf,
    state: PathBuf,
    freeze: &'static str,
    is_frozen: fn(&str) -> bool,
    thaw: &'static str,
}

impl Freezer {
    /// `None` if the cgroup has no freezer, or the freezer's cgroup of that name contains other processes.
    fn of(hierarchy: &Hierarchy, cgroup: &CgroupPath, members: &Members) -> Option<Self> {
        let dir = hierarchy.dir(Controller::Freezer, cgroup)?;
        if hierarchy.is_v2() {
            return Some(Self {
                switch: dir.join("cgroup.freeze"),
                state: dir.join("cgroup.events"),
                freeze: "1",
                is_frozen: |text| text.lines().any(|line| line == "frozen 1"),
                thaw: "0",
            });
        }
        let inside = Members::in_directory(dir.clone());
        let known = members.again();
        let is_foreign = |pid: &&i32| !known.pids().contains(*pid) && is_alive(**pid);
        if inside.is_empty() || inside.pids().iter().any(|pid| is_foreign(&pid)) {
            return None;
        }
        let switch = dir.join("freezer.state");
        Some(Self {
            state: switch.clone(),
            switch,
            freeze: "FROZEN",
            is_frozen: |text| text.trim_end() == "FROZEN",
            thaw: "THAWED",
        })
    }

    /// If freezing fails, killing goes on without it.
    fn freeze(self) -> Option<Self> {
        if let Err(error) = write(&self.switch, self.freeze) {
            tracing::debug!(path = %self.switch.display(), %error, "failed to freeze");
            return None;
        }
        for _ in 0..MAX_FREEZE_CHECKS {
            let state = fs::read_to_string(&self.state).unwrap_or_default();
            if (self.is_frozen)(&state) {
                break;
            }
            std::thread::yield_now();
        }
        Some(self)
    }

    /// Processes in a v1 freezer die only after thawing.
    fn thaw(self) -> Result<(), EvictError> {
        match write(&self.switch, self.thaw) {
            Err(error) if !matches!(error.kind(), ErrorKind::NotFound) => {
                Err(EvictError::io("write", &self.switch, error))
            }
            _ => Ok(()),
        }
    }
}

fn is_alive(pid: i32) -> bool {
    Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid).is_ok())
}

fn write(path: &Path, value: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).open(path)?;
    match file.write_all(value.as_bytes()) {
        // The cgroup was removed in between.
        Err(error) if error.raw_os_error() == Some(nix::libc::ENODEV) => Ok(()),
        written => written,
    }
}
