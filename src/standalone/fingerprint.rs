//! Detects changed files without reading them.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::manifest::{entries, is_directory};

/// A file with another inode, size or time has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// The files below some paths at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fingerprint(Vec<(PathBuf, Option<Stamp>)>);

impl Fingerprint {
    /// Takes the fingerprint of `paths` and everything below them.
    pub fn take(paths: &[PathBuf]) -> Self {
        let mut stamps = Vec::new();
        for path in paths {
            stamps.push((path.clone(), stamp(path)));
            stamp_directory(path, &mut stamps);
        }
        stamps.sort_by(|(a, _), (b, _)| a.cmp(b));
        Self(stamps)
    }
}

fn stamp_directory(directory: &Path, stamps: &mut Vec<(PathBuf, Option<Stamp>)>) {
    for entry in entries(directory).unwrap_or_default() {
        if is_directory(&entry) {
            stamp_directory(&entry, stamps);
        }
        let stamp = stamp(&entry);
        stamps.push((entry, stamp));
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = fs::metadata(path).ok()?;
    Some(Stamp {
        inode: meta.ino(),
        size: meta.size(),
        modified: (meta.mtime(), meta.mtime_nsec()),
        changed: (meta.ctime(), meta.ctime_nsec()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_replacements_and_new_files_are_detected() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let paths = [dir.path().to_owned(), dir.path().join("later/absent.yaml")];
        let file = dir.path().join("a.yaml");
        fs::write(&file, "1").expect("a file");
        let first = Fingerprint::take(&paths);
        assert_eq!(first, Fingerprint::take(&paths));
        fs::write(&file, "22").expect("an edit");
        let edited = Fingerprint::take(&paths);
        assert_ne!(first, edited);
        fs::write(dir.path().join("new"), "33").expect("a file");
        fs::rename(dir.path().join("new"), &file).expect("a replacement");
        let replaced = Fingerprint::take(&paths);
        assert_ne!(edited, replaced);
        fs::write(dir.path().join("b.yaml"), "").expect("a file");
        let more = Fingerprint::take(&paths);
        assert_ne!(replaced, more);
        fs::create_dir(dir.path().join("below")).expect("a directory");
        fs::write(dir.path().join("below/c.yaml"), "1").expect("a file");
        let below = Fingerprint::take(&paths);
        assert_ne!(more, below);
        fs::write(dir.path().join("below/c.yaml"), "22").expect("an edit");
        assert_ne!(below, Fingerprint::take(&paths));
    }
}
