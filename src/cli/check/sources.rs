//! The files to check.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::crd::manifest::{self, Manifest, ManifestError, Position};

/// Stops at directories that contain themselves.
const MAX_DEPTH: usize = 16;

/// The files that could be read, and errors for the others.
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

/// Reads files, directories and standard input (`-`).
pub(in crate::cli) fn read_all(paths: &[PathBuf]) -> Sources {
    let mut sources = Sources::default();
    for path in paths {
        if let Err(error) = sources.read(path, MAX_DEPTH) {
            sources.unreadable.push(error);
        }
    }
    sources
}

impl Sources {
    fn read(&mut self, path: &Path, depth: usize) -> anyhow::Result<()> {
        if path.as_os_str() == "-" {
            let mut bytes = Vec::new();
            std::io::stdin()
                .lock()
                .read_to_end(&mut bytes)
                .context("failed to read standard input")?;
            self.add("<stdin>".to_owned(), &bytes);
        } else if path.is_dir() {
            self.read_dir(path, depth)?;
        } else {
            let name = path.display().to_string();
            let bytes = fs::read(path).with_context(|| format!("failed to read {name}"))?;
            self.add(name, &bytes);
        }
        Ok(())
    }

    /// Reads the entries in order of name, without hidden ones.
    fn read_dir(&mut self, dir: &Path, depth: usize) -> anyhow::Result<()> {
        let failed = || format!("failed to read the directory {}", dir.display());
        if depth == 0 {
            anyhow::bail!("{} is nested too deep", dir.display());
        }
        let mut entries = fs::read_dir(dir)
            .with_context(failed)?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<Result<Vec<_>, _>>()
            .with_context(failed)?;
        entries.sort();
        for entry in entries.iter().filter(|entry| is_wanted(entry)) {
            if let Err(error) = self.read(entry, depth - 1) {
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

fn is_wanted(path: &Path) -> bool {
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
    let valid = String::from_utf8_lossy(&bytes[..valid]);
    let last = valid.rsplit('\n').next().unwrap_or_default();
    let position = Position {
        line: valid.split('\n').count(),
        column: last.chars().count() + 1,
    };
    Manifest {
        objects: Vec::new(),
        parse_errors: vec![ManifestError {
            position,
            path: String::new(),
            message: "is not UTF-8 text; save the file as UTF-8".to_owned(),
        }],
    }
}
