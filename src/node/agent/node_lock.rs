//! One agent a node, whatever state directory and container it has: a lock on the very folder that it works in.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

/// Held while this process keeps the node; the kernel gives it up when the process dies.
#[derive(Debug)]
pub struct NodeLock {
    _folder: Flock<File>,
}

/// Why the node can't be kept.
#[derive(Debug, thiserror::Error)]
pub enum NodeLockError {
    /// Another agent has it.
    #[error(
        "another agent keeps this node: it has locked {}; run one agent a node, and end the other first", .0.display()
    )]
    Busy(PathBuf),
    /// The folder can't be locked.
    #[error("failed to lock {}: {source}", path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

impl NodeLock {
    /// Locks the folder of `kubepods`.
    ///
    /// # Errors
    /// Where another process has it, or it can't be opened.
    pub fn take(hierarchy: &Hierarchy, kubepods: &CgroupPath) -> Result<Self, NodeLockError> {
        let path = hierarchy.dir(Controller::Cpu, kubepods);
        Self::lock(&path.unwrap_or_default())
    }

    fn lock(path: &Path) -> Result<Self, NodeLockError> {
        let failed = |source| NodeLockError::Io {
            path: path.to_owned(),
            source,
        };
        let folder = File::open(path).map_err(failed)?;
        match Flock::lock(folder, FlockArg::LockExclusiveNonblock) {
            Ok(folder) => Ok(Self { _folder: folder }),
            Err((_, Errno::EWOULDBLOCK)) => Err(NodeLockError::Busy(path.to_owned())),
            Err((_, errno)) => Err(failed(errno.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_lock_on_the_same_folder_is_refused_until_the_first_is_gone() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let first = NodeLock::lock(dir.path()).expect("locked");
        let error = NodeLock::lock(dir.path()).expect_err("refused");
        assert!(matches!(error, NodeLockError::Busy(_)), "{error}");
        drop(first);
        NodeLock::lock(dir.path()).expect("free again");
    }
}
