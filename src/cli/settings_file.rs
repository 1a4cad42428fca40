//! YAML files of settings, read once at the start.

use std::fs;
use std::path::Path;

use anyhow::Context;

use super::FileErrors;
use crate::crd::manifest::ManifestError;

/// Reads a file with `parse`. The error has all that is wrong in it, as [`FileErrors`].
pub(super) fn read<T>(
    path: &Path,
    parse: impl Fn(&str) -> Result<T, Vec<ManifestError>>,
) -> anyhow::Result<T> {
    let file = path.display();
    let text = fs::read_to_string(path).with_context(|| format!("failed to read {file}"))?;
    let settings = parse(&text);
    Ok(settings.map_err(|errors| {
        let file = file.to_string();
        FileErrors(errors.iter().map(|error| error.in_file(&file)).collect())
    })?)
}
