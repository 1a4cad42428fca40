//! Builds a tree from YAML events. Aliases share their node, so that a chain of them takes no more memory than its text; a
//! tree that would be too large with its aliases expanded is rejected.

use std::collections::HashMap;
use std::rc::Rc;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Tag};
use serde_json::Number;

use super::position::Position;
use super::scalar;

/// The maximum number of values with aliases and merges expanded. Far more than any policy has.
pub(super) const MAX_NODES: usize = 200_000;
/// This many bytes of a string count as one more value: an expanded alias of a long string is a copy of it.
const BYTES_PER_VALUE: usize = 64;
/// The maximum depth. Far more than any policy has.
const MAX_DEPTH: usize = 64;

/// A value with its position in the text.
#[derive(Debug)]
pub(super) struct TreeNode {
    pub(super) position: Position,
    pub(super) content: NodeContent,
    /// The number of values in it with aliases expanded; at least 1.
    pub(super) size: usize,
    depth: usize,
}

/// The content of a node.
#[derive(Debug)]
pub(super) enum NodeContent {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    /// `.nan` or `.inf`.
    NotFinite(String),
    List(Vec<Rc<TreeNode>>),
    Map(Vec<MapEntry>),
}

/// One field of a map.
#[derive(Clone, Debug)]
pub(super) struct MapEntry {
    pub(super) key: String,
    /// Where the key is.
    pub(super) position: Position,
    pub(super) value: Rc<TreeNode>,
}

/// A syntax error.
#[derive(Debug)]
pub(super) struct SyntaxError {
    /// Where it is in the text.
    pub(super) position: Position,
    pub(super) message: String,
}

impl SyntaxError {
    fn new(position: Position, message: impl Into<String>) -> Self {
        Self {
            position,
            message: message.into(),
        }
    }
}

impl From<ScanError> for SyntaxError {
    fn from(error: ScanError) -> Self {
        Self::new(
            Position::from(*error.marker()),
            format!("is not valid YAML: {}", error.info()),
        )
    }
}

/// The documents in a text.
pub(super) fn parse(text: &str) -> Result<Vec<Rc<TreeNode>>, SyntaxError> {
    let mut builder = Builder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event?;
        builder.event(event, span.start.into())?;
    }
    Ok(builder.documents)
}

#[derive(Default)]
struct Builder {
    documents: Vec<Rc<TreeNode>>,
    open: Vec<Frame>,
    anchors: HashMap<usize, Rc<TreeNode>>,
    /// The number of fields of merged maps so far.
    merged: usize,
}

/// An open list or map.
struct Frame {
    position: Position,
    anchor: usize,
    collection: Collection,
}

enum Collection {
    List(Vec<Rc<TreeNode>>),
    Map(Fields),
}

#[derive(Default)]
struct Fields {
    entries: Vec<MapEntry>,
    seen: HashMap<String, Position>,
    merged: Vec<Rc<TreeNode>>,
    key: Option<Key>,
}

/// A key without its value yet.
enum Key {
    Field(String, Position),
    Merge,
}

impl Builder {
    fn event(&mut self, event: Event<'_>, position: Position) -> Result<(), SyntaxError> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let is_merge = style == ScalarStyle::Plain && tag.is_none() && text == "<<";
                if is_merge && self.expects_key() {
                    return self.merge_key(position);
                }
                let content = scalar(&text, style, tag.as_deref(), position)?;
                self.node(position, anchor, content)
            }
            Event::SequenceStart(_, anchor, tag) => {
                refuse_tag(tag.as_deref(), "seq", position)?;
                self.open(position, anchor, Collection::List(Vec::new()))
            }
            Event::MappingStart(_, anchor, tag) => {
                refuse_tag(tag.as_deref(), "map", position)?;
                self.open(position, anchor, Collection::Map(Fields::default()))
            }
            Event::SequenceEnd | Event::MappingEnd => self.close(),
            Event::Alias(id) => match self.anchors.get(&id).cloned() {
                Some(node) => self.attach(node, position),
                None => Err(SyntaxError::new(
                    position,
                    "an alias is inside of the value that it refers to; write the value out",
                )),
            },
            _ => Ok(()),
        }
    }

    fn expects_key(&self) -> bool {
        matches!(self.open.last().map(|frame| &frame.collection), Some(Collection::Map(fields)) if fields.key.is_none())
    }

    fn merge_key(&mut self, position: Position) -> Result<(), SyntaxError> {
        match self.open.last_mut().map(|frame| &mut frame.collection) {
            Some(Collection::Map(fields)) => {
                fields.key = Some(Key::Merge);
                Ok(())
            }
            _ => Err(SyntaxError::new(position, "\"<<\" is not a key here")),
        }
    }

    fn open(
        &mut self,
        position: Position,
        anchor: usize,
        collection: Collection,
    ) -> Result<(), SyntaxError> {
        if self.expects_key() {
            return Err(SyntaxError::new(
                position,
                "a key must be a string, not a list or map; quote it if it begins with [ or {",
            ));
        }
        if self.open.len() >= MAX_DEPTH {
            return Err(too_deep(position));
        }
        self.open.push(Frame {
            position,
            anchor,
            collection,
        });
        Ok(())
    }

    fn close(&mut self) -> Result<(), SyntaxError> {
        let Some(frame) = self.open.pop() else {
            return Ok(());
        };
        let content = match frame.collection {
            Collection::List(items) => NodeContent::List(items),
            Collection::Map(fields) => {
                NodeContent::Map(fields.finish(frame.position, &mut self.merged)?)
            }
        };
        self.node(frame.position, frame.anchor, content)
    }

    fn node(
        &mut self,
        position: Position,
        anchor: usize,
        content: NodeContent,
    ) -> Result<(), SyntaxError> {
        let node = TreeNode::new(position, content)?;
        if anchor != 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        self.attach(node, position)
    }

    /// Adds a finished node to the innermost open list, map or document.
    fn attach(&mut self, node: Rc<TreeNode>, position: Position) -> Result<(), SyntaxError> {
        match self.open.last_mut().map(|frame| &mut frame.collection) {
            None => self.documents.push(node),
            Some(Collection::List(items)) => items.push(node),
            Some(Collection::Map(fields)) => fields.attach(node, position)?,
        }
        Ok(())
    }
}

impl Fields {
    fn attach(&mut self, node: Rc<TreeNode>, position: Position) -> Result<(), SyntaxError> {
        match self.key.take() {
            None => self.set_key(&node, position),
            Some(Key::Merge) => {
                self.merged.push(node);
                Ok(())
            }
            Some(Key::Field(key, position)) => {
                self.entries.push(MapEntry {
                    key,
                    position,
                    value: node,
                });
                Ok(())
            }
        }
    }

    fn set_key(&mut self, node: &TreeNode, position: Position) -> Result<(), SyntaxError> {
        let key = match &node.content {
            NodeContent::Text(text) | NodeContent::NotFinite(text) => text.clone(),
            NodeContent::Bool(value) => value.to_string(),
            NodeContent::Number(number) => number.to_string(),
            NodeContent::Null | NodeContent::List(_) | NodeContent::Map(_) => {
                return Err(SyntaxError::new(
                    position,
                    "a key is not a string; quote it",
                ));
            }
        };
        if let Some(first) = self.seen.insert(key.clone(), position) {
            return Err(SyntaxError::new(
                position,
                format!(
                    "key \"{key}\" is given twice (first {}); remove one of them",
                    lines_before(position, first)
                ),
            ));
        }
        self.key = Some(Key::Field(key, position));
        Ok(())
    }

    /// The fields, and those of merged maps that they do not override. `visited` counts over the whole text, because each
    /// merge costs time and memory before the size of the tree is checked.
    fn finish(
        mut self,
        position: Position,
        visited: &mut usize,
    ) -> Result<Vec<MapEntry>, SyntaxError> {
        for merged in std::mem::take(&mut self.merged) {
            let maps = match &merged.content {
                NodeContent::List(maps) => maps.as_slice(),
                _ => std::slice::from_ref(&merged),
            };
            for map in maps {
                let NodeContent::Map(entries) = &map.content else {
                    return Err(no_map(position));
                };
                *visited += 1 + entries.len();
                if *visited > MAX_NODES {
                    return Err(too_large(position));
                }
                self.merge(entries);
            }
        }
        Ok(self.entries)
    }

    fn merge(&mut self, entries: &[MapEntry]) {
        for entry in entries {
            if !self.seen.contains_key(&entry.key) {
                self.seen.insert(entry.key.clone(), entry.position);
                self.entries.push(entry.clone());
            }
        }
    }
}

impl TreeNode {
    fn new(position: Position, content: NodeContent) -> Result<Rc<Self>, SyntaxError> {
        let (mut size, mut depth) = (1usize, 1);
        let mut add = |child: &Self, key: &str| {
            size = size.saturating_add(child.size + key.len() / BYTES_PER_VALUE);
            depth = depth.max(child.depth + 1);
        };
        match &content {
            NodeContent::List(items) => {
                for item in items {
                    add(item, "");
                }
            }
            NodeContent::Map(entries) => {
                for entry in entries {
                    add(&entry.value, &entry.key);
                }
            }
            NodeContent::Text(text) => size += text.len() / BYTES_PER_VALUE,
            NodeContent::Null
            | NodeContent::Bool(_)
            | NodeContent::Number(_)
            | NodeContent::NotFinite(_) => {}
        }
        if size > MAX_NODES {
            return Err(too_large(position));
        }
        if depth > MAX_DEPTH {
            return Err(too_deep(position));
        }
        Ok(Rc::new(Self {
            position,
            content,
            size,
            depth,
        }))
    }
}

fn too_large(position: Position) -> SyntaxError {
    SyntaxError::new(
        position,
        format!("has more than {MAX_NODES} values when its aliases are expanded; split it"),
    )
}

fn too_deep(position: Position) -> SyntaxError {
    SyntaxError::new(
        position,
        format!("is nested more than {MAX_DEPTH} levels deep; no policy is nested that deep"),
    )
}

fn no_map(position: Position) -> SyntaxError {
    SyntaxError::new(
        position,
        "\"<<\" merges a value that is not a map; write an alias of a map",
    )
}

fn lines_before(position: Position, first: Position) -> String {
    match position.line.saturating_sub(first.line) {
        0 => "on the same line".to_owned(),
        1 => "on the line before".to_owned(),
        lines => format!("{lines} lines before"),
    }
}

fn scalar(
    text: &str,
    style: ScalarStyle,
    tag: Option<&Tag>,
    position: Position,
) -> Result<NodeContent, SyntaxError> {
    let Some(tag) = tag else {
        return Ok(if style == ScalarStyle::Plain {
            scalar::resolve(text)
        } else {
            NodeContent::Text(text.to_owned())
        });
    };
    let resolved = || scalar::resolve(text);
    match (tag.core_suffix(), resolved()) {
        (Some("str"), _) => Ok(NodeContent::Text(text.to_owned())),
        (Some("bool"), content @ NodeContent::Bool(_))
        | (Some("null"), content @ NodeContent::Null)
        | (Some("int" | "float"), content @ (NodeContent::Number(_) | NodeContent::NotFinite(_))) => {
            Ok(content)
        }
        _ => Err(SyntaxError::new(
            position,
            format!(
                "tag {} does not match this value; remove it",
                tag.original()
            ),
        )),
    }
}

fn refuse_tag(tag: Option<&Tag>, expected: &str, position: Position) -> Result<(), SyntaxError> {
    match tag {
        Some(tag) if tag.core_suffix() != Some(expected) => Err(SyntaxError::new(
            position,
            format!("tag {} is not known; remove it", tag.original()),
        )),
        _ => Ok(()),
    }
}
