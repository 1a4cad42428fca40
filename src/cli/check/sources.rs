//! The files to check.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::crd::manifest::{self, Flaw, Manifest};
use crate::ordered;

/// Deep enough for any folder of manifests, and an end to folders that contain themselves.
const MAX_FOLDERS: usize = 16;

/// What was read.
#[derive(Default)]
pub(in crate::cli) struct Sources {
    pub(in crate::cli) files: Vec<Source>,
    pub(in crate::cli) unreadable: Vec<anyhow::Error>,
}

/// One file.
pub(in crate::cli) struct Source {
    pub(in crate::cli) name: String,
    pub(in crate::cli) manifest: Manifest,
}

/// Reads files, folders and standard input (`-`).
pub(in crate::cli) fn read_all(paths: &[PathBuf]) -> Sources {
    let mut sources = Sources::default();
    for path in paths {
        if let Err(error) = sources.read(path, MAX_FOLDERS) {
            sources.unreadable.push(error);
        }
    }
    sources
}

impl Sources {
    fn read(&mut self, path: &Path, folders: usize) -> anyhow::Result<()> {
        if path.as_os_str() == "-" {
            let mut bytes = Vec::new();
            std::io::stdin()
                .lock()
                .read_to_end(&mut bytes)
                .context("failed to read standard input")?;
            self.add("<stdin>".to_owned(), &bytes);
        } else if path.is_dir() {
            self.read_folder(path, folders)?;
        } else {
            let name = path.display().to_string();
            let bytes = fs::read(path).with_context(|| format!("failed to read {name}"))?;
            self.add(name, &bytes);
        }
        Ok(())
    }

    /// In order of name; hidden entries are left out.
    fn read_folder(&mut self, folder: &Path, folders: usize) -> anyhow::Result<()> {
        let failed = || format!("failed to read the folder {}", folder.display());
        if folders == 0 {
            anyhow::bail!("{} is too deep a folder", folder.display());
        }
        let mut entries = fs::read_dir(folder)
            .with_context(failed)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<Vec<_>, _>>()
            .with_context(failed)?;
        ordered::sort(&mut entries);
        for entry in entries.iter().filter(|entry| wanted(entry)) {
            if let Err(error) = self.read(entry, folders - 1) {
                self.unreadable.push(error);
            }
        }
        Ok(())
    }

    fn add(&mut self, name: String, bytes: &[u8]) {
        let manifest = match std::str::from_utf8(bytes) {
            Ok(text) => manifest::read(text),
            Err(error) => not_text(bytes, error.valid_up_to()),
        };
        self.files.push(Source { name, manifest });
    }
}

fn wanted(path: &Path) -> bool {
    let hidden = path
        .file_name()
        .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
    let manifest = path.extension().is_some_and(|extension| {
        ["yaml", "yml", "json"]
            .iter()
            .any(|known| extension == *known)
    });
    !hidden && (manifest || path.is_dir())
}

fn not_text(bytes: &[u8], valid: usize) -> Manifest {
    let line = bytes[..valid].split(|byte| *byte == b'\n').count();
    Manifest {
        objects: Vec::new(),
        flaws: vec![Flaw {
            line,
            path: String::new(),
            message: "is no UTF-8 text; save the file as UTF-8".to_owned(),
        }],
    }
}
