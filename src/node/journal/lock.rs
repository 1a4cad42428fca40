//! One process a state directory.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Held while this process uses the state directory; the kernel gives it up when the process dies.
#[derive(Debug)]
pub struct StateLock {
    _file: Flock<File>,
}

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// It is not there and cannot be made.
    #[error(
        "failed to make the state directory {}: {source}: make it, or name another with --state-dir",
        path.display()
    )]
    Missing {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The lock file cannot be opened.
    #[error(
        "failed to open {}: {source}: the state directory must be writable, name another with --state-dir",
        path.display()
    )]
    Open {
        /// The lock file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Another process has it.
    #[error(
        "the state directory {} is in use by {holder}: stop that first, or name another with --state-dir",
        path.display()
    )]
    Busy {
        /// The directory.
        path: PathBuf,
        /// `process 123`, or `another process` where it is not known.
        holder: String,
    },
}

impl StateLock {
    /// Takes the lock of `state_dir`, making the directory (but not its parents) where it is missing.
    ///
    /// # Errors
    /// Where another process has it, or the directory cannot be used.
    pub fn take(state_dir: &Path) -> Result<Self, LockError> {
        make(state_dir)?;
        let path = state_dir.join("lock");
        let file = open(&path).map_err(|source| LockError::Open {
            path: path.clone(),
            source,
        })?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => {
                sign(&path);
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

fn make(state_dir: &Path) -> Result<(), LockError> {
    match DirBuilder::new().mode(0o700).create(state_dir) {
        Err(source) if !state_dir.is_dir() => Err(LockError::Missing {
            path: state_dir.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Held read-only: so the disk can be remounted read-only under us, and on a disk that was, the lock can still be
/// taken and restores run.
fn open(path: &Path) -> io::Result<File> {
    let made = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path);
    match made {
        Err(error) if error.kind() != ErrorKind::ReadOnlyFilesystem => Err(error),
        _ => File::open(path),
    }
}

/// For the message of whoever comes second; a full disk is no reason to stop.
fn sign(path: &Path) {
    if let Err(error) = fs::write(path, format!("{}\n", std::process::id())) {
        tracing::debug!(%error, "failed to write our process id into the lock file");
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
