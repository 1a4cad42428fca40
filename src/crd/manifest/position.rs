//! Positions in files, as messages name them.

use std::fmt;

use granit_parser::Marker;
use serde::{Deserialize, Serialize};

/// A position in a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// The line, from 1; 0 if only the file is known.
    pub line: usize,
    /// The column in characters, from 1; 0 if only the line is known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub column: usize,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
const fn is_zero(column: &usize) -> bool {
    *column == 0
}

impl Position {
    /// A line as a whole.
    pub const fn line(line: usize) -> Self {
        Self { line, column: 0 }
    }

    /// The same position after this many more lines.
    #[must_use]
    pub const fn after(self, lines: usize) -> Self {
        Self {
            line: self.line + lines,
            ..self
        }
    }
}

impl From<Marker> for Position {
    fn from(marker: Marker) -> Self {
        Self {
            line: marker.line().max(1),
            column: marker.col() + 1,
        }
    }
}

/// A position in a file, in the form that editors and CI systems find in messages: `file:line:column`, as far as it is known.
#[derive(Clone, Copy, Debug)]
pub struct Location<'a> {
    /// The file.
    pub file: &'a str,
    /// Where in it.
    pub position: Position,
}

impl fmt::Display for Location<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file)?;
        match (self.position.line, self.position.column) {
            (0, _) => Ok(()),
            (line, 0) => write!(f, ":{line}"),
            (line, column) => write!(f, ":{line}:{column}"),
        }
    }
}
