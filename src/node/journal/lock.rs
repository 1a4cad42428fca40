//! Lock of a state directory, for one process at a time.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Held while this process uses the state directory; the kernel releases it when the process exits.
#[derive(Debug)]
pub struct StateLock {
    _file: Flock<File>,
}

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// It does not exist and cannot be created.
    #[error(
        "failed to create the state directory {}: {source}: create it, or name another with --state-dir",
        path.display()
    )]
    Missing {
        /// The directory.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// The lock file cannot be opened.
    #[error(
        "failed to open {}: {source}: make the state directory writable, or name another with --state-dir",
        path.display()
    )]
    Open {
        /// The lock file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// Another process holds the lock.
    #[error(
        "the state directory {} is in use by {holder}: stop that process first, or name another with --state-dir",
        path.display()
    )]
    Busy {
        /// The directory.
        path: PathBuf,
        /// `process 123`, or `another process` if unknown.
        holder: String,
    },
}

impl StateLock {
    /// Locks `state_dir`, creating the directory (but not its parents) if it is missing.
    ///
    /// # Errors
    /// If another process holds the lock, or the directory cannot be used.
    pub fn acquire(state_dir: &Path) -> Result<Self, LockError> {
        create(state_dir)?;
        let path = state_dir.join("lock");
        let file = open(&path).map_err(|source| LockError::Open {
            path: path.clone(),
            source,
        })?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => {
                write_pid(&path);
                Ok(Self { _file: file })
            }
            Err((_, Errno::EWOULDBLOCK)) => Err(LockError::Busy {
                path: state_dir.to_owned(),
                holder: holder(&path),
            }),
            Err((_, errno)) => Err(LockError::Open {
                path,
                source: errno.into(),
            }),
        }
    }
}

fn create(state_dir: &Path) -> Result<(), LockError> {
    match DirBuilder::new().mode(0o700).create(state_dir) {
        Err(source) if !state_dir.is_dir() => Err(LockError::Missing {
            path: state_dir.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Opened read-only, so that the disk can be remounted read-only while the lock is held, and the lock can still be
/// taken (and restores run) on a read-only disk.
fn open(path: &Path) -> io::Result<File> {
    let created = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path);
    match created {
        Err(error) if error.kind() != ErrorKind::ReadOnlyFilesystem => Err(error),
        _ => File::open(path),
    }
}

/// For the error message of a second process; a failed write (full disk) is ignored.
fn write_pid(path: &Path) {
    if let Err(error) = fs::write(path, format!("{}\n", std::process::id())) {
        tracing::debug!(%error, "failed to write the process ID to the lock file");
    }
}

fn holder(path: &Path) -> String {
    let pid = fs::read_to_string(path)
        .ok()
        .and_then(|text| text.trim().parse::<u32>().ok());
    pid.map_or_else(
        || "another process".to_owned(),
        |pid| format!("process {pid}"),
    )
}
