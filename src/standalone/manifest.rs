//! Reading manifest files and directories of them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::crd::manifest::{self, ManifestError, ManifestObject, Position};

type Visit<'a> = &'a mut dyn FnMut(&Path, Result<ManifestObject, ManifestError>);

/// Reads `paths` (files, and the `*.yaml`, `*.yml`, `*.json` below directories) and passes on every object or parse error. A parse error
/// does not stop the other documents and files from being read.
pub fn read(
    paths: &[PathBuf],
    mut visit: impl FnMut(&Path, Result<ManifestObject, ManifestError>),
) {
    for path in paths {
        if path.is_dir() {
            read_directory(path, &mut visit);
        } else {
            read_file(path, &mut visit);
        }
    }
}

fn read_directory(directory: &Path, visit: Visit<'_>) {
    let entries = match entries(directory) {
        Ok(entries) => entries,
        Err(error) => return visit(directory, Err(unreadable(&error))),
    };
    for entry in entries {
        if is_directory(&entry) {
            read_directory(&entry, visit);
        } else if is_manifest(&entry) {
            read_file(&entry, visit);
        }
    }
}

fn read_file(file: &Path, visit: Visit<'_>) {
    match fs::read_to_string(file) {
        Ok(text) => {
            let manifest = manifest::read(&text);
            let objects = manifest.objects.into_iter().map(Ok);
            let parse_errors = manifest.parse_errors.into_iter().map(Err);
            objects
                .chain(parse_errors)
                .for_each(|object| visit(file, object));
        }
        Err(error) => visit(file, Err(unreadable(&error))),
    }
}

/// About the file as a whole.
fn unreadable(error: &io::Error) -> ManifestError {
    ManifestError {
        position: Position::default(),
        path: String::new(),
        message: format!("failed to read: {error}"),
    }
}

/// The entries of a directory by name, without hidden ones (such as `..data` in a mounted `ConfigMap`).
pub(super) fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
    entries.retain(|entry| {
        let name = entry.file_name().map(OsStr::as_encoded_bytes);
        name.is_some_and(|name| !name.starts_with(b"."))
    });
    entries.sort();
    Ok(entries)
}

/// Whether it is a directory. Links are not followed: they could form a cycle.
pub(super) fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

fn is_manifest(file: &Path) -> bool {
    let extension = file.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("yaml" | "yml" | "json")) && file.is_file()
}
