//! Files of settings with a schema, in one document: of `--windows`, `--poll` and `--scheduler-policy`. Pure.

use serde::de::DeserializeOwned;

use super::manifest::{self, Lines, ManifestError};
use super::validate::Definition;

/// What is wrong in a file, by line.
pub(super) struct Errors {
    lines: Lines,
    found: Vec<ManifestError>,
}

impl Errors {
    /// The field at this path is wrong.
    pub(super) fn push(&mut self, path: String, message: String) {
        self.found.push(ManifestError {
            line: self.lines.line(&path),
            path,
            message,
        });
    }
}

/// Reads a text whose document has this definition. `compile` makes the result, and reports what a schema cannot say. `second` is
/// what to do about a second document. `None`: there is no document.
///
/// # Errors
/// All that is wrong, by line.
pub(super) fn read<File: DeserializeOwned, T>(
    text: &str,
    definition: &Definition,
    second: &str,
    compile: impl FnOnce(&File, &mut Errors) -> T,
) -> Result<Option<T>, Vec<ManifestError>> {
    let manifest = manifest::read(text);
    if !manifest.parse_errors.is_empty() {
        return Err(manifest.parse_errors);
    }
    let mut objects = manifest.objects.into_iter();
    let Some(object) = objects.next() else {
        return Ok(None);
    };
    if let Some(other) = objects.next() {
        let line = other.lines.line("");
        let message = format!("is a second document; {second}");
        return Err(error(line, &message));
    }
    let mut errors = Errors {
        lines: object.lines,
        found: Vec::new(),
    };
    let validation = definition.validate(object.value);
    let mut result = None;
    if validation.problems.is_empty() {
        match serde_json::from_value(validation.object) {
            Ok(file) => result = Some(compile(&file, &mut errors)),
            Err(error) => errors.push(String::new(), error.to_string()),
        }
    }
    for problem in validation.problems {
        errors.push(problem.path, problem.message);
    }
    errors.found.sort_by_key(|error| error.line);
    match result {
        Some(result) if errors.found.is_empty() => Ok(Some(result)),
        _ => Err(errors.found),
    }
}

/// One error about a whole document.
pub(super) fn error(line: usize, message: &str) -> Vec<ManifestError> {
    vec![ManifestError {
        line,
        path: String::new(),
        message: message.to_owned(),
    }]
}
