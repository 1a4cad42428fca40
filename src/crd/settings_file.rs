//! Files of settings with a schema, in one document: of `--windows`, `--poll` and `--scheduler-policy`. Pure.

use serde::de::DeserializeOwned;

use super::manifest::{self, ManifestError, Position, Positions};
use super::validate::Definition;

/// What is wrong in a file, by position.
pub(super) struct Errors {
    positions: Positions,
    found: Vec<ManifestError>,
}

impl Errors {
    /// The field at this path is wrong.
    pub(super) fn push(&mut self, path: String, message: String) {
        self.found.push(ManifestError {
            position: self.positions.of(&path),
            path,
            message,
        });
    }
}

/// Reads a text whose document has this definition. `compile` makes the result, and reports what a schema cannot say. `second` is
/// what to do about a second document. `None`: there is no document.
///
/// # Errors
/// All that is wrong, by position.
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
        let position = other.positions.of("");
        let message = format!("is a second document; {second}");
        return Err(error(position, &message));
    }
    let mut errors = Errors {
        positions: object.positions,
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
    errors.found.sort_by_key(|error| error.position);
    match result {
        Some(result) if errors.found.is_empty() => Ok(Some(result)),
        _ => Err(errors.found),
    }
}

/// One error about a whole document.
pub(super) fn error(position: Position, message: &str) -> Vec<ManifestError> {
    vec![ManifestError {
        position,
        path: String::new(),
        message: message.to_owned(),
    }]
}
