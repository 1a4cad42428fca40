//! Our files in the state directory, except the journal.
//!
//! | file | content |
//! |---|---|
//! | `lock` | held by the one process that uses the directory |
//! | `journal` | every changed cgroup file, and its original value |
//! | `engine.json` | rule states and counters, to continue from after a restart |
//! | `policies.json` | source of the rules in force, for a start without the API server |
//! | `pods.json` | the pods that they act on, with cgroup and inode, for the same |
//! | `stop.json` | whether everything is stopped, and why, for the same |
//! | `windows.json` | averages and peaks of the node, up to a day |
//! | `load.json` | what the load is computed from: CPU time and peaks by pod |
//! | `scheduling.json` | whether new work may be started |
//! | `status.json` | what `plimsoll status --local` prints |
//!
//! All but `policies.json`, `stop.json`, and in `engine.json` what Preview rules would have done, are valid within one boot only.
//! All are replaced atomically, so that a reader never sees half a file. Only the first two are synced, in the background: a power
//! loss ends the boot anyway, and on an overloaded disk a sync takes longer than a decision may wait.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::clock::boot_id;

/// A file of the state directory could not be written or removed; the old one is intact.
#[derive(Debug, thiserror::Error)]
#[error("failed to {verb} {}: {source}", path.display())]
pub struct StateError {
    verb: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl StateError {
    pub(super) fn write(path: &Path, source: io::Error) -> Self {
        Self {
            verb: "write",
            path: path.to_owned(),
            source,
        }
    }
}

/// Creates the directory if it is missing, but not its parents. It is readable for others, such as job launchers.
///
/// # Errors
/// If it cannot be created.
pub fn make(dir: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o755).create(dir) {
        Err(error) if !dir.is_dir() => Err(error),
        _ => Ok(()),
    }
}

/// Replaces `path` with `value` as one JSON line.
///
/// # Errors
/// If it cannot be written.
pub fn replace(path: &Path, value: &impl Serialize) -> Result<(), StateError> {
    let text = line(value).map_err(|error| StateError::write(path, error))?;
    replace_by(path, |temporary| fs::write(temporary, text))
}

/// Replaces `path` with a file that only its owner may read. If `sync` syncs, it is the old or the new one after a power loss.
///
/// # Errors
/// If it cannot be written.
pub(super) fn replace_private(
    path: &Path,
    bytes: &[u8],
    sync: impl FnOnce(&File) -> io::Result<()>,
) -> Result<(), StateError> {
    replace_by(path, |temporary| {
        // A leftover file might be readable for others.
        match fs::remove_file(temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(temporary)?;
        file.write_all(bytes)?;
        sync(&file)
    })
}

fn replace_by(path: &Path, write: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), StateError> {
    let temporary = path.with_extension("new");
    let replaced = write(&temporary).and_then(|()| fs::rename(&temporary, path));
    if replaced.is_err() {
        // A half-written file on a full disk: free the space.
        let _removed = fs::remove_file(&temporary);
    }
    replaced.map_err(|error| StateError::write(path, error))
}

/// `value` as one line of JSON.
pub(super) fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(text)
}

/// Removes `path` if it exists.
///
/// # Errors
/// If it cannot be removed.
pub fn remove(path: &Path) -> Result<(), StateError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(StateError {
            verb: "remove",
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Reads a file written by [`replace`].
///
/// # Errors
/// If it cannot be read or parsed (`InvalidData`).
pub fn read<T: for<'a> Deserialize<'a>>(path: &Path) -> io::Result<T> {
    let text = fs::read(path)?;
    serde_json::from_slice(&text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// The process that wrote a file, so that a reader can check whether it still runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WriterProcess {
    /// The kernel's boot ID.
    pub boot_id: String,
    /// Process ID.
    pub pid: u32,
    /// Start time of the process in clock ticks since boot (`starttime` of `/proc/PID/stat`): process IDs are reused.
    pub started: u64,
}

impl WriterProcess {
    /// This process. Always reads the real `/proc`, whatever the configured proc root is.
    ///
    /// # Errors
    /// If `/proc` cannot be read.
    pub fn this_process() -> io::Result<Self> {
        let pid = std::process::id();
        Ok(Self {
            boot_id: boot_id()?,
            pid,
            started: started(pid)?,
        })
    }

    /// Whether it is from this boot.
    pub fn is_of_this_boot(&self) -> bool {
        boot_id().is_ok_and(|boot_id| boot_id == self.boot_id)
    }

    /// Whether it still runs.
    pub fn is_alive(&self) -> bool {
        self.is_of_this_boot() && started(self.pid).is_ok_and(|started| started == self.started)
    }
}

fn started(pid: u32) -> io::Result<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the command's name, which may hold blanks and brackets; `starttime` is the 22nd.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let field = after_name.split_whitespace().nth(19);
    field
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_identified_by_start_time_and_boot() {
        let this = WriterProcess::this_process().expect("/proc");
        assert!(this.is_alive());
        let recycled = WriterProcess {
            started: this.started + 1,
            ..this.clone()
        };
        assert!(!recycled.is_alive() && recycled.is_of_this_boot());
        let rebooted = WriterProcess {
            boot_id: "other".to_owned(),
            ..this
        };
        assert!(!rebooted.is_alive() && !rebooted.is_of_this_boot());
    }

    #[test]
    fn a_file_is_replaced_completely_or_not_at_all() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let path = dir.path().join("status.json");
        replace(&path, &1).expect("written");
        replace(&path, &2).expect("replaced");
        assert_eq!(read::<u32>(&path).expect("readable"), 2);
        fs::create_dir(dir.path().join("status.new")).expect("in the way");
        let error = replace(&path, &3).expect_err("refused");
        assert!(error.to_string().starts_with("failed to write "), "{error}");
        assert_eq!(read::<u32>(&path).expect("untouched"), 2);
        fs::write(&path, "{").expect("broken");
        let error = read::<u32>(&path).expect_err("broken");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
