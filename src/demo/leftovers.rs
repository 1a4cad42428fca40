//! What a demo leaves behind when it is killed outright (`kill -9`), and how the next one removes it.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use crate::node::cgroup::Hierarchy;

/// The demo's top cgroup and its state directory are this and the demo's process id.
pub const PREFIX: &str = "plimsoll-demo-";

/// The directory of the demo's journal: removed when this is dropped.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
}

impl StateDir {
    /// Makes it among the temporary files, for this user alone.
    ///
    /// # Errors
    /// Where it cannot be made, or is there already.
    pub fn make(owner: u32) -> io::Result<Self> {
        let path = std::env::temp_dir().join(format!("{PREFIX}{owner}"));
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes it and all in it.
    ///
    /// # Errors
    /// Where it cannot be removed. It being gone is none.
    pub fn remove(&mut self) -> io::Result<()> {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        // Nobody is left to be told; the next demo tries again.
        let _tried = self.remove();
    }
}

/// Removes the cgroups and state directories of demos whose process is gone, and says which. Their processes died
/// with them; a cgroup that still holds one is left alone, since the kernel does not remove it.
pub fn sweep(hierarchy: &Hierarchy) -> Vec<PathBuf> {
    let mut removed = Vec::new();
    for root in roots(hierarchy) {
        removed.extend(leftovers(&root).filter(|dir| remove_cgroups(dir).is_ok()));
    }
    let own = geteuid().as_raw();
    let state_dirs = leftovers(&std::env::temp_dir()).filter(|dir| is_folder_of(dir, own));
    removed.extend(state_dirs.filter(|dir| fs::remove_dir_all(dir).is_ok()));
    removed
}

fn leftovers(parent: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .filter(|entry| is_leftover(&entry.file_name().to_string_lossy()))
        .map(|entry| entry.path())
}

/// Whether a folder of this name belongs to a demo whose process is gone. Where its process id is another's by now,
/// it waits for a later demo.
fn is_leftover(name: &str) -> bool {
    let owner = name
        .strip_prefix(PREFIX)
        .and_then(|pid| pid.parse::<u32>().ok());
    owner.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists())
}

/// Anybody may have put a link or a folder of that name among the temporary files.
fn is_folder_of(path: &Path, user: u32) -> bool {
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

/// Only folders can be removed from a cgroup tree; its files go with them.
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
    fn only_folders_of_demos_that_are_gone_are_leftovers() {
        assert!(!is_leftover(&format!("{PREFIX}{}", std::process::id())));
        assert!(
            !is_leftover(&format!("{PREFIX}1")),
            "somebody else's, alive"
        );
        // Above the largest process id that Linux gives.
        assert!(is_leftover(&format!("{PREFIX}99999999")));
        for other in ["plimsoll-demo-", "plimsoll-demo-12x", "kubepods", ""] {
            assert!(!is_leftover(other), "{other}");
        }
    }

    #[test]
    fn a_link_of_that_name_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        let own = geteuid().as_raw();
        assert!(!is_folder_of(&link, own));
        assert!(is_folder_of(dir.path(), own));
        assert!(!is_folder_of(dir.path(), own + 1));
    }

    #[test]
    fn a_state_directory_goes_with_all_that_is_in_it() {
        let state = StateDir::make(99_999_998).unwrap();
        let path = state.path().to_owned();
        fs::write(path.join("journal"), "x").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        drop(state);
        assert!(!path.exists());
    }
}
