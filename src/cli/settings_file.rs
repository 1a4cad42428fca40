//! YAML files of settings, read once at the start.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

use crate::crd::manifest::ManifestError;

/// Reads a file with `parse`. The error has all that is wrong, by line.
pub(super) fn read<T>(
    path: &Path,
    parse: impl Fn(&str) -> Result<T, Vec<ManifestError>>,
) -> anyhow::Result<T> {
    let file = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("failed to read {file}"))?;
    match parse(&text) {
        Ok(settings) => Ok(settings),
        Err(errors) => {
            let problems = errors.iter().map(|error| match error.path.as_str() {
                "" => format!("line {}: {}", error.line, error.message),
                path => format!("line {}: {path}: {}", error.line, error.message),
            });
            let problems: Vec<String> = problems.collect();
            bail!("failed to use {file}: {}", problems.join("; "))
        }
    }
}
