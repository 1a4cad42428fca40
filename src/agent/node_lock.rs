//! One agent per node, whatever its state directory and container: a lock on the `kubepods` directory itself.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

/// The lock; the kernel releases it when the process dies.
#[derive(Debug)]
pub struct NodeLock {
    _directory: Flock<File>,
}

/// Why the lock cannot be acquired.
#[derive(Debug, thiserror::Error)]
pub enum NodeLockError {
    /// Another agent holds it.
    #[error(
        "another agent runs on this node: it has locked {}; run one agent per node, and stop the other one first", .0.display()
    )]
    Busy(PathBuf),
    /// The directory cannot be locked.
    #[error("failed to lock {}: {source}", path.display())]
    Io {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl NodeLock {
    /// Locks the directory of `kubepods`.
    ///
    /// # Errors
    /// If another process holds it, or the directory cannot be opened.
    pub fn acquire(hierarchy: &Hierarchy, kubepods: &CgroupPath) -> Result<Self, NodeLockError> {
        let path = hierarchy.dir(Controller::Cpu, kubepods);
        Self::lock(&path.unwrap_or_default())
    }

    fn lock(path: &Path) -> Result<Self, NodeLockError> {
        let failed = |source| NodeLockError::Io {
            path: path.to_owned(),
            source,
        };
        let directory = File::open(path).map_err(failed)?;
        match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
            Ok(directory) => Ok(Self {
                _directory: directory,
            }),
            Err((_, Errno::EWOULDBLOCK)) => Err(NodeLockError::Busy(path.to_owned())),
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lock_is_refused_until_the_first_is_released() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let first = NodeLock::lock(dir.path()).expect("locked");
        let error = NodeLock::lock(dir.path()).expect_err("refused");
        assert!(matches!(error, NodeLockError::Busy(_)), "{error}");
        drop(first);
        NodeLock::lock(dir.path()).expect("free again");
    }
}
