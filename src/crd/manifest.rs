//! Reads manifests: parses YAML or JSON into the objects that an API server would get, with the position of each value.
//!
//! Scalars are resolved as by `kubectl` (YAML 1.1: `yes` is true, `010` is 8). A document that cannot be read is reported as
//! a [`ManifestError`], and does not affect the others.

mod position;
mod scalar;
mod tree;

use std::fmt;

use serde_json::{Map, Value};

pub use self::position::{Location, Position};
use self::tree::{NodeContent, TreeNode};
use super::finding::Severity;
use super::path::{at_index, at_key};

/// The maximum size of an object in an API server.
const MAX_DOCUMENT_BYTES: usize = 1536 * 1024;
/// Far more than all objects of an installation in one file.
const MAX_FILE_BYTES: usize = 16 * 1024 * 1024;

/// The content of a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifest {
    /// The objects in order; the items of a `v1 List` are separate objects.
    pub objects: Vec<ManifestObject>,
    /// The errors.
    pub parse_errors: Vec<ManifestError>,
}

/// One object of a manifest.
#[derive(Clone, Debug, PartialEq)]
pub struct ManifestObject {
    /// The object as an API server would get it.
    pub value: Value,
    /// The positions of its fields.
    pub positions: Positions,
}

/// An error in a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestError {
    /// Where it is in the file.
    pub position: Position,
    /// The path of the field, if known; else empty.
    pub path: String,
    /// What is wrong, and how to fix it.
    pub message: String,
}

impl ManifestError {
    /// The message, with the name of the file.
    pub fn in_file(&self, file: &str) -> String {
        let location = Location {
            file,
            position: self.position,
        };
        format!("{location}: {}: {self}", Severity::Error)
    }
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

/// The positions of a value and of all values in it: those of their keys, or in a list those of the values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Positions {
    position: Position,
    children: Vec<(Segment, Self)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Key(String),
    Index(usize),
}

impl Positions {
    /// The position of the field at `path` (such as `spec.rules[0].name`), or of the closest existing parent.
    pub fn of(&self, path: &str) -> Position {
        let step = |(segment, positions): &(Segment, Self)| {
            let rest = segment.strip(path)?;
            Some((path.len() - rest.len(), positions.of(rest)))
        };
        let deepest = self
            .children
            .iter()
            .filter_map(step)
            .max_by_key(|(length, _)| *length);
        deepest.map_or(self.position, |(_, position)| position)
    }
}

impl Segment {
    /// The rest of `path` after this segment; `None` if the path does not begin with it.
    fn strip<'a>(&self, path: &'a str) -> Option<&'a str> {
        let path = path.strip_prefix('.').unwrap_or(path);
        let rest = match self {
            Self::Index(index) => path.strip_prefix(&format!("[{index}]"))?,
            Self::Key(key) => path
                .strip_prefix(key.as_str())
                .or_else(|| path.strip_prefix(&format!("[{key}]")))?,
        };
        (rest.is_empty() || rest.starts_with(['.', '['])).then_some(rest)
    }
}

/// Parses the text of a file.
pub fn read(text: &str) -> Manifest {
    let mut manifest = Manifest::default();
    if text.len() > MAX_FILE_BYTES {
        let size = text.len() / 1024 / 1024;
        manifest.add_error(
            Position::line(1),
            format!(
                "the file is {size} MiB long, and at most {} MiB are allowed; split it",
                MAX_FILE_BYTES / 1024 / 1024
            ),
        );
        return manifest;
    }
    let mut budget = tree::MAX_NODES;
    for (line, document) in documents(text.strip_prefix('\u{feff}').unwrap_or(text)) {
        manifest.read_document(line, document, &mut budget);
    }
    manifest
}

/// The documents of a text, each with its line offset. They are split before they are parsed, so that an error in one does
/// not affect the others.
fn documents(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let (mut start, mut start_line, mut offset) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let rest = line.strip_prefix("---");
        if rest.is_some_and(|rest| rest.trim_start() != rest || rest.is_empty()) && offset > start {
            found.push((start_line, &text[start..offset]));
            (start, start_line) = (offset, number);
        }
        offset += line.len();
    }
    found.push((start_line, &text[start..]));
    found
}

impl Manifest {
    fn add_error(&mut self, position: Position, message: impl Into<String>) {
        self.parse_errors.push(ManifestError {
            position,
            path: String::new(),
            message: message.into(),
        });
    }

    /// `budget` limits how much the aliases of the whole file may add, so that many small documents are limited like a large one.
    fn read_document(&mut self, base: usize, text: &str, budget: &mut usize) {
        if text.len() > MAX_DOCUMENT_BYTES {
            let size = text.len() / 1024;
            self.add_error(
                Position::line(base + 1),
                format!("the document is {size} KiB long, and an API server accepts at most 1536 KiB; split it"),
            );
            return;
        }
        let nodes = match tree::parse(text) {
            Ok(nodes) => nodes,
            Err(error) => return self.add_error(error.position.after(base), explain(&error, text)),
        };
        let size: usize = nodes.iter().map(|node| node.size).sum();
        let Some(left) = budget.checked_sub(size.saturating_sub(text.len())) else {
            let message = "the file is too large when its aliases are expanded; split it";
            return self.add_error(Position::line(base + 1), message);
        };
        *budget = left;
        for node in nodes {
            self.add_root(base, &node);
        }
    }

    fn add_root(&mut self, base: usize, node: &TreeNode) {
        if matches!(node.content, NodeContent::Null) {
            return;
        }
        let mut reader = Reader {
            base,
            parse_errors: Vec::new(),
        };
        let (value, positions) = reader.value("", node);
        if !reader.parse_errors.is_empty() {
            self.parse_errors.extend(reader.parse_errors);
            return;
        }
        if value.is_object() {
            self.add_object(value, positions);
        } else {
            self.add_error(
                positions.position,
                "this is not an object; an object has apiVersion, kind, metadata and spec",
            );
        }
    }

    /// Adds an object, or the items of a list of objects.
    fn add_object(&mut self, mut value: Value, positions: Positions) {
        let is_list = value["kind"] == "List" && value["apiVersion"] == "v1";
        let items = match value.get_mut("items").map(Value::take) {
            Some(Value::Array(items)) if is_list => items,
            Some(other) => {
                value["items"] = other;
                return self.objects.push(ManifestObject { value, positions });
            }
            None => return self.objects.push(ManifestObject { value, positions }),
        };
        let positions = positions
            .children
            .into_iter()
            .find_map(|(segment, positions)| {
                (segment == Segment::Key("items".to_owned())).then_some(positions.children)
            });
        for (value, (_, positions)) in items.into_iter().zip(positions.unwrap_or_default()) {
            if value.is_object() {
                self.objects.push(ManifestObject { value, positions });
            } else {
                self.add_error(
                    positions.position,
                    "an item of the list is not an object; remove it",
                );
            }
        }
    }
}

/// The message of a syntax error, with a fix for the most common one.
fn explain(error: &tree::SyntaxError, text: &str) -> String {
    let line = text.lines().nth(error.position.line.saturating_sub(1));
    let line = line.unwrap_or("");
    let indentation = line.len() - line.trim_start().len();
    if line[..indentation].contains('\t') {
        return "the indentation contains a tab, and YAML allows only spaces; replace it with spaces".to_owned();
    }
    error.message.clone()
}

/// Converts nodes to values and positions.
struct Reader {
    base: usize,
    parse_errors: Vec<ManifestError>,
}

impl Reader {
    fn value(&mut self, path: &str, node: &TreeNode) -> (Value, Positions) {
        let mut positions = Positions {
            position: node.position.after(self.base),
            children: Vec::new(),
        };
        let value = match &node.content {
            NodeContent::Null => Value::Null,
            NodeContent::Bool(value) => Value::Bool(*value),
            NodeContent::Number(number) => Value::Number(number.clone()),
            NodeContent::Text(text) => Value::String(text.clone()),
            NodeContent::NotFinite(text) => {
                self.parse_errors.push(ManifestError {
                    position: positions.position,
                    path: path.to_owned(),
                    message: format!(
                        "{text} is not a finite number; write a number, for example 4000"
                    ),
                });
                Value::Null
            }
            NodeContent::List(items) => self.list(path, items, &mut positions),
            NodeContent::Map(entries) => self.map(path, entries, &mut positions),
        };
        (value, positions)
    }

    fn list(
        &mut self,
        path: &str,
        items: &[std::rc::Rc<TreeNode>],
        positions: &mut Positions,
    ) -> Value {
        let mut values = Vec::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            let (value, child) = self.value(&at_index(path, index), item);
            values.push(value);
            positions.children.push((Segment::Index(index), child));
        }
        Value::Array(values)
    }

    fn map(&mut self, path: &str, entries: &[tree::MapEntry], positions: &mut Positions) -> Value {
        let mut fields = Map::new();
        for entry in entries {
            let (value, mut child) = self.value(&at_key(path, &entry.key), &entry.value);
            child.position = entry.position.after(self.base);
            fields.insert(entry.key.clone(), value);
            positions
                .children
                .push((Segment::Key(entry.key.clone()), child));
        }
        Value::Object(fields)
    }
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
