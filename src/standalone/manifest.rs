//! Reading manifest files and folders of them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::crd::manifest::{self, Flaw, Object};
use crate::ordered;

type Take<'a> = &'a mut dyn FnMut(&Path, Result<Object, Flaw>);

/// Reads `paths` (files as they are, and the `*.yaml`, `*.yml`, `*.json` of folders and below) and hands over every
/// object, or what is wrong where there should be one. Whatever is wrong, the other documents and files are read.
pub fn read(paths: &[PathBuf], mut take: impl FnMut(&Path, Result<Object, Flaw>)) {
    for path in paths {
        if path.is_dir() {
            read_folder(path, &mut take);
        } else {
            read_file(path, &mut take);
        }
    }
}

fn read_folder(folder: &Path, take: Take<'_>) {
    let entries = match entries(folder) {
        Ok(entries) => entries,
        Err(error) => return take(folder, Err(unreadable(&error))),
    };
    for entry in entries {
        if is_folder(&entry) {
            read_folder(&entry, take);
        } else if is_manifest(&entry) {
            read_file(&entry, take);
        }
    }
}

fn read_file(file: &Path, take: Take<'_>) {
    match fs::read_to_string(file) {
        Ok(text) => {
            let manifest = manifest::read(&text);
            let objects = manifest.objects.into_iter().map(Ok);
            let flaws = manifest.flaws.into_iter().map(Err);
            objects.chain(flaws).for_each(|object| take(file, object));
        }
        Err(error) => take(file, Err(unreadable(&error))),
    }
}

/// Line 0: the file as a whole.
fn unreadable(error: &io::Error) -> Flaw {
    Flaw {
        line: 0,
        path: String::new(),
        message: format!("failed to read: {error}"),
    }
}

/// What lies in a folder, in order of name; hidden entries (as `..data`, where the kubelet mounts a `ConfigMap`) are
/// left out.
pub(super) fn entries(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| entry.map(|entry| entry.path()));
    let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
    entries.retain(|entry| {
        let name = entry.file_name().map(OsStr::as_encoded_bytes);
        name.is_some_and(|name| !name.starts_with(b"."))
    });
    ordered::sort(&mut entries);
    Ok(entries)
}

/// A folder below one that was named; a link to one could lead around in a circle.
pub(super) fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

fn is_manifest(file: &Path) -> bool {
    let extension = file.extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("yaml" | "yml" | "json")) && file.is_file()
}
