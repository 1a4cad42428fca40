//! Validates the structural schema: types, required and unknown fields, ranges, lengths, enums, list maps.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::super::path::{at_index, at_key};
use super::{Problem, hint};

/// Limits the memory that a hostile object can take.
const MAX_PROBLEMS: usize = 100;

/// The result of the validation.
#[derive(Default)]
pub(super) struct Structure {
    pub(super) problems: Vec<Problem>,
    /// Whether there is a problem because of which an API server skips the CEL rules.
    pub(super) blocking: bool,
    /// The paths of the objects with a misspelt field, without which CEL rules about them may be violated.
    pub(super) misspelt: HashSet<String>,
}

pub(super) fn check(schema: &Value, object: &Value) -> Structure {
    let mut structure = Structure::default();
    structure.check(schema, object, "");
    structure
}

impl Structure {
    fn problem(&mut self, path: &str, message: String) {
        if self.problems.len() < MAX_PROBLEMS {
            self.problems.push(Problem {
                path: path.to_owned(),
                message,
            });
        }
    }

    fn blocking(&mut self, path: &str, message: String) {
        self.blocking = true;
        self.problem(path, message);
    }

    fn check(&mut self, schema: &Value, value: &Value, path: &str) {
        if self.problems.len() >= MAX_PROBLEMS {
            return;
        }
        if !hint::has_type(schema, value) {
            return self.blocking(path, hint::wrong_type(schema, value, path));
        }
        match value {
            Value::Object(fields) => self.object(schema, fields, path),
            Value::Array(items) => self.list(schema, items, path),
            Value::String(text) => self.text(schema, text, path),
            Value::Number(number) => self.range(schema, number.as_f64().unwrap_or(0.0), path),
            _ => {}
        }
        self.one_of(schema, value, path);
    }

    fn object(&mut self, schema: &Value, fields: &Map<String, Value>, path: &str) {
        let known = schema["properties"].as_object();
        let others = schema.get("additionalProperties");
        for name in strings(&schema["required"]) {
            if fields.contains_key(name) {
                continue;
            }
            let mut unknown = fields.keys().filter(|name| hint::is_unknown(known, name));
            if unknown.any(|unknown| hint::meant(known, unknown) == Some(name)) {
                // The misspelt field is reported.
                self.blocking = true;
            } else {
                let field = at_key(path, name);
                self.blocking(&field, hint::missing(schema, name));
            }
        }
        let preserves_unknown = schema["x-kubernetes-preserve-unknown-fields"] == true;
        for (name, value) in fields {
            let field = at_key(path, name);
            match known.and_then(|known| known.get(name)).or(others) {
                Some(schema) => self.check(schema, value, &field),
                None if preserves_unknown => {}
                None => {
                    if hint::meant(known, name).is_some() {
                        self.misspelt.insert(path.to_owned());
                    }
                    self.problem(&field, hint::unknown(known, name, path));
                }
            }
        }
        if let Some(max) = schema["maxProperties"].as_u64()
            && fields.len() as u64 > max
        {
            self.blocking(path, too_many(fields.len(), max, path));
        }
    }

    fn list(&mut self, schema: &Value, items: &[Value], path: &str) {
        if let Some(max) = schema["maxItems"].as_u64()
            && items.len() as u64 > max
        {
            return self.blocking(path, too_many(items.len(), max, path));
        }
        if let Some(min) = schema["minItems"].as_u64()
            && (items.len() as u64) < min
        {
            let name = hint::name_of(path);
            self.problem(
                path,
                format!("{name} is empty, and needs at least {min} entry; add one"),
            );
        }
        for (index, item) in items.iter().enumerate() {
            self.check(&schema["items"], item, &at_index(path, index));
        }
        let keys: Vec<&str> = strings(&schema["x-kubernetes-list-map-keys"]).collect();
        if !keys.is_empty() {
            self.unique(&keys, items, path);
        }
    }

    /// The items of a list map must differ in their keys.
    fn unique(&mut self, keys: &[&str], items: &[Value], path: &str) {
        let mut seen = HashSet::new();
        for (index, item) in items.iter().enumerate() {
            let values: Vec<String> = keys.iter().map(|key| item[*key].to_string()).collect();
            if !seen.insert(values.clone()) {
                let message = format!(
                    "{} is given twice in {path}; give each a unique {}",
                    values.join(", "),
                    keys.join(", ")
                );
                self.problem(&at_index(path, index), message);
            }
        }
    }

    fn text(&mut self, schema: &Value, text: &str, path: &str) {
        let length = text.chars().count() as u64;
        let name = hint::name_of(path);
        if let Some(max) = schema["maxLength"].as_u64()
            && length > max
        {
            let message = format!(
                "{name} is {length} characters long, and may have at most {max}; shorten it"
            );
            self.blocking(path, message);
        }
        if let Some(min) = schema["minLength"].as_u64()
            && length < min
        {
            self.problem(
                path,
                format!("{name} is empty; write {}", hint::example(schema)),
            );
        }
    }

    fn range(&mut self, schema: &Value, number: f64, path: &str) {
        let min = schema["minimum"].as_f64();
        let max = schema["maximum"].as_f64();
        if min.is_some_and(|min| number < min) || max.is_some_and(|max| number > max) {
            let message = hint::out_of_range(schema, number, path);
            self.problem(path, message);
        }
    }

    fn one_of(&mut self, schema: &Value, value: &Value, path: &str) {
        let Some(known) = schema["enum"].as_array() else {
            return;
        };
        if known.contains(value) {
            return;
        }
        let known: Vec<&str> = known.iter().filter_map(Value::as_str).collect();
        self.blocking(path, hint::not_among(&known, value, path));
    }
}

fn too_many(count: usize, max: u64, path: &str) -> String {
    let name = hint::name_of(path);
    format!(
        "{name} has {count} entries, and may have at most {max}; remove some, or use several objects"
    )
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
}
