//! Removes what a killed demo (`kill -9`) left behind.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use crate::node::cgroup::Hierarchy;

/// The names of the demo's top cgroup and state directory are this and the demo's process id.
pub const PREFIX: &str = "plimsoll-demo-";

/// The directory of the demo's journal; removed on drop.
#[derive(Debug)]
pub struct DemoStateDir {
    path: PathBuf,
}

impl DemoStateDir {
    /// Creates it in the temporary directory, readable by this user alone.
    ///
    /// # Errors
    /// Where it cannot be created, or exists already.
    pub fn create(owner: u32) -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("{PREFIX}{owner}"));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it with its content.
    ///
    /// # Errors
    /// Where it cannot be removed. No error if it is gone.
    pub fn remove(&mut self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for DemoStateDir {
    fn drop(&mut self) {
        // The next demo tries again.
        let _removed = self.remove();
    }
}

/// Removes the cgroups and state directories of demos whose process is gone, and returns their paths. The kernel
/// refuses to remove a cgroup that still has processes.
pub fn remove_all(hierarchy: &Hierarchy) -> Vec<PathBuf> {
    let mut removed = Vec::new();
    for root in roots(hierarchy) {
        removed.extend(leftovers(&root).filter(|dir| remove_cgroups(dir).is_ok()));
    }
    let own = geteuid().as_raw();
    let state_dirs = leftovers(&std::env::temp_dir()).filter(|dir| is_directory_of(dir, own));
    removed.extend(state_dirs.filter(|dir| fs::remove_dir_all(dir).is_ok()));
    removed
}

fn leftovers(parent: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_leftover(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
}

/// Whether the name is that of a demo whose process is gone. If its process id was reused, a later demo removes it.
fn is_leftover(name: &str) -> bool {
    let owner = name
        .strip_prefix(PREFIX)
        .and_then(|pid| pid.parse::<u32>().ok());
    owner.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

/// Another user may have created a link or directory of that name in the temporary directory.
fn is_directory_of(path: &Path, user: u32) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir() && meta.uid() == user)
}

fn roots(hierarchy: &Hierarchy) -> Vec<PathBuf> {
    match hierarchy {
        Hierarchy::V2 { root } => vec![root.clone()],
        Hierarchy::V1 {
            cpu,
            cpuacct,
            memory,
            freezer,
            ..
        } => [Some(cpu), Some(cpuacct), memory.as_ref(), freezer.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect(),
    }
}

/// Cgroups are removed with `rmdir`; their files cannot be unlinked.
fn remove_cgroups(dir: &Path) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_cgroups(&entry.path())?;
        }
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_dead_demos_are_leftovers() {
        assert!(!is_leftover(&format!("{PREFIX}{}", std::process::id())));
        assert!(!is_leftover(&format!("{PREFIX}1")), "another live process");
        // Above the largest process id of Linux.
        assert!(is_leftover(&format!("{PREFIX}99999999")));
        for other in ["plimsoll-demo-", "plimsoll-demo-12x", "kubepods", ""] {
            assert!(!is_leftover(other), "{other}");
        }
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        let own = geteuid().as_raw();
        assert!(!is_directory_of(&link, own));
        assert!(is_directory_of(dir.path(), own));
        assert!(!is_directory_of(dir.path(), own + 1));
    }

    #[test]
    fn a_state_directory_is_removed_with_its_content() {
        let state = DemoStateDir::create(99_999_998).unwrap();
        let path = state.path().to_owned();
        fs::write(path.join("journal"), "x").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        drop(state);
        assert!(!path.exists());
    }
}
