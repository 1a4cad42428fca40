//! Files that the kubelet mounts, and replaces through a symbolic link.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fs, io};

/// Identifies a version of a file: device, inode, size, and ctime in seconds and nanoseconds.
pub type Stamp = (u64, u64, u64, i64, i64);

/// The version of the file at a path. The files are on `tmpfs`: this takes microseconds.
///
/// # Errors
/// The file does not exist or can't be read.
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
