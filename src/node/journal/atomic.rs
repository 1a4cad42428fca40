//! Atomic file replacement.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

type Hook = Box<dyn FnMut(&str) + Send>;

/// Runs every effect that outlives the process: on disk and in the kernel. Tests install a hook to crash before or
/// after any of them.
#[derive(Default)]
pub struct Effects {
    hook: Option<Hook>,
}

impl Effects {
    /// Calls `hook` with the effect's name before and after each effect.
    pub fn watched(hook: impl FnMut(&str) + Send + 'static) -> Self {
        Self {
            hook: Some(Box::new(hook)),
        }
    }

    /// Runs `effect`.
    pub fn run<T>(&mut self, name: &str, effect: impl FnOnce() -> T) -> T {
        self.call_hook(name);
        let done = effect();
        self.call_hook(name);
        done
    }

    fn call_hook(&mut self, name: &str) {
        if let Some(hook) = &mut self.hook {
            hook(name);
        }
    }
}

impl std::fmt::Debug for Effects {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Effects")
    }
}

/// Why a file could not be replaced; the old one is intact.
#[derive(Debug, thiserror::Error)]
#[error("failed to {step} {}: {source}", path.display())]
pub struct ReplaceError {
    /// The failed step.
    pub step: &'static str,
    /// The file.
    pub path: PathBuf,
    /// The system error.
    pub source: io::Error,
}

/// Replaces the content of `path` with `bytes`: a reader sees the old bytes or the new ones, even after a crash of this
/// process at any point. It is not synced, so after a power loss the file may be damaged.
///
/// # Errors
/// If a step fails: full disk, read-only or missing directory.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), ReplaceError> {
    write_atomic_with(&mut Effects::default(), path, bytes)
}

/// Like [`write_atomic`], with each step run through `effects`.
///
/// # Errors
/// See [`write_atomic`].
pub fn write_atomic_with(
    effects: &mut Effects,
    path: &Path,
    bytes: &[u8],
) -> Result<(), ReplaceError> {
    let temporary = path.with_extension("tmp");
    let replaced = replace(effects, path, &temporary, bytes);
    if replaced.is_err() {
        // A half-written file on a full disk: free the space.
        fs::remove_file(&temporary).ok();
    }
    replaced
}

fn replace(
    effects: &mut Effects,
    path: &Path,
    temporary: &Path,
    bytes: &[u8],
) -> Result<(), ReplaceError> {
    let mut file = effects
        .run("create", || create(temporary))
        .map_err(failed("create", temporary))?;
    effects
        .run("write", || file.write_all(bytes))
        .map_err(failed("write", temporary))?;
    effects
        .run("rename", || fs::rename(temporary, path))
        .map_err(failed("replace", path))
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

fn failed<'a>(step: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> ReplaceError + 'a {
    move |source| ReplaceError {
        step,
        path: path.to_owned(),
        source,
    }
}
