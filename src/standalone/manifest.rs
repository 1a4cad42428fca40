//! Reading manifests: files, the documents in them, the objects in those.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// A manifest larger than this is not read: it is something else.
const MAX_BYTES: u64 = 16 << 20;

/// Where an object stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Its file.
    pub file: PathBuf,
    /// The line that its document starts at, from 1; 0: the file as a whole.
    pub line: usize,
}

/// Reads `paths` (files as they are, and the `*.yaml`, `*.yml`, `*.json` of folders) and hands over every object, or
/// what is wrong where there should be one. Whatever is wrong, the other documents and files are read.
pub fn read(paths: &[PathBuf], mut take: impl FnMut(&Place, Result<Value, String>)) {
    for path in paths {
        match expand(path) {
            Ok(files) => files.iter().for_each(|file| read_file(file, &mut take)),
            Err(error) => take(&whole(path), Err(format!("failed to read: {error}"))),
        }
    }
}

fn whole(path: &Path) -> Place {
    Place {
        file: path.to_owned(),
        line: 0,
    }
}

fn read_file(file: &Path, take: &mut impl FnMut(&Place, Result<Value, String>)) {
    let text = match read_text(file) {
        Ok(text) => text,
        Err(reason) => return take(&whole(file), Err(reason)),
    };
    for (line, document) in documents(&text) {
        let place = Place {
            line,
            ..whole(file)
        };
        match objects(document) {
            Ok(objects) => objects
                .into_iter()
                .for_each(|object| take(&place, Ok(object))),
            Err(reason) => take(&place, Err(reason)),
        }
    }
}

/// The files that `path` stands for.
fn expand(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        let extension = file.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("yaml" | "yml" | "json")) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn read_text(path: &Path) -> Result<String, String> {
    let failed = |error: io::Error| format!("failed to read: {error}");
    let file = fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    let bytes = read.map_err(failed)?;
    if bytes as u64 > MAX_BYTES {
        return Err(format!("larger than {} MiB: split it", MAX_BYTES >> 20));
    }
    Ok(text)
}

/// The documents of a YAML stream with the line that each starts at. Taken apart by hand, so that a syntax error in
/// one document leaves the others readable.
fn documents(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut first_line, mut offset) = (0, 1, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let bare = line.trim_end();
        if bare == "---" || bare.starts_with("--- ") {
            documents.push((first_line, &text[start..offset]));
            (start, first_line) = (offset + 3, number + 1);
        }
        offset += line.len();
    }
    documents.push((first_line, &text[start..]));
    documents
}

/// The objects of a document: itself, or the items of a list. An empty document has none.
fn objects(document: &str) -> Result<Vec<Value>, String> {
    let blank = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
    if document.lines().all(blank) {
        return Ok(Vec::new());
    }
    let value: Value = serde_saphyr::from_str(document)
        .map_err(|error| format!("not a YAML object: {}", first_line(&error.to_string())))?;
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(mut object) if is_list(&object) => match object.remove("items") {
            Some(Value::Array(items)) => Ok(items),
            _ => Ok(Vec::new()),
        },
        object @ Value::Object(_) => Ok(vec![object]),
        _ => Err("not a YAML object".to_owned()),
    }
}

fn is_list(object: &serde_json::Map<String, Value>) -> bool {
    let kind = object.get("kind").and_then(Value::as_str);
    matches!(kind, Some("List" | "PodList"))
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
