//! Files that a kubelet mounts, and replaces by way of a symbolic link.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fs, io};

/// Which file it is: device, inode, size, and the time of the last change in seconds and nanoseconds.
pub type Stamp = (u64, u64, u64, i64, i64);

/// Which file stands at a path. The files are in memory (`tmpfs`): to ask takes microseconds.
///
/// # Errors
/// There is none, or it can't be looked at.
pub fn stamp(path: &Path) -> io::Result<Stamp> {
    let found = fs::metadata(path)?;
    Ok((
        found.dev(),
        found.ino(),
        found.size(),
        found.ctime(),
        found.ctime_nsec(),
    ))
}
