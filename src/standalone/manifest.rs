//! Reading manifest files and folders of them.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::crd::manifest::{self, Flaw, Object};

/// Reads `paths` (files as they are, and the `*.yaml`, `*.yml`, `*.json` of folders) and hands over every object, or
/// what is wrong where there should be one. Whatever is wrong, the other documents and files are read.
pub fn read(paths: &[PathBuf], mut take: impl FnMut(&Path, Result<Object, Flaw>)) {
    for path in paths {
        match expand(path) {
            Ok(files) => files.iter().for_each(|file| read_file(file, &mut take)),
            Err(error) => take(path, Err(unreadable(&error))),
        }
    }
}

fn read_file(file: &Path, take: &mut impl FnMut(&Path, Result<Object, Flaw>)) {
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

/// The files that `path` stands for, in order of name; hidden ones are left out.
fn expand(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        if is_manifest(&file) {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn is_manifest(file: &Path) -> bool {
    let extension = file.extension().and_then(|extension| extension.to_str());
    let name = file.file_name().map(OsStr::as_encoded_bytes);
    matches!(extension, Some("yaml" | "yml" | "json"))
        && name.is_some_and(|name| !name.starts_with(b"."))
        && file.is_file()
}
