//! Validates an object like an API server does on create, with the definition of its kind.
//!
//! In the same order: nulls are dropped, defaults are set, unknown fields are rejected (as `kubectl` requests), the schema is
//! checked, and then the CEL rules are.

mod hint;
mod structural;

use std::sync::LazyLock;

use kube_cel::{CompiledSchema, compile_schema};
use serde_json::{Value, json};

use super::objects::Kind;
use super::path::rule_index;
use super::schema;

/// A reason why an API server would reject an object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// The path of the field, such as `spec.rules[0].name`.
    pub path: String,
    /// What is wrong, and how to fix it.
    pub message: String,
}

/// The result of validating an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Validation {
    /// The object with defaults.
    pub object: Value,
    /// The problems; empty if an API server would accept the object.
    pub problems: Vec<Problem>,
}

/// A schema with its compiled CEL rules.
pub(super) struct Definition {
    schema: Value,
    rules: CompiledSchema,
}

static DEFINITIONS: LazyLock<[Definition; 3]> =
    LazyLock::new(|| Kind::ALL.map(|kind| Definition::new(schema::object_schema(kind))));

/// Validates an object of this kind.
pub fn validate(kind: Kind, object: &Value) -> Validation {
    let mut object = object.clone();
    // Status is a subresource: it is ignored on create.
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    DEFINITIONS[kind as usize].validate(object)
}

impl Definition {
    pub(super) fn new(schema: Value) -> Self {
        let rules = compile_schema(&schema);
        Self { schema, rules }
    }

    pub(super) fn validate(&self, mut object: Value) -> Validation {
        drop_nulls(&self.schema, &mut object);
        let object = kube_cel::apply_defaults(&self.schema, &object);
        let structure = structural::check(&self.schema, &object);
        let mut problems = structure.problems;
        if !structure.blocking {
            let violated = violated_rules(&self.rules, &object).into_iter();
            problems.extend(violated.filter(|it| !structure.misspelt.contains(&it.path)));
        }
        problems.sort();
        problems.dedup();
        Validation { object, problems }
    }
}

/// The CEL rules that are violated.
fn violated_rules(rules: &CompiledSchema, object: &Value) -> Vec<Problem> {
    let Err(errors) = kube_cel::validate_compiled(rules, object, None) else {
        return Vec::new();
    };
    let problem = |error: &kube_cel::ValidationError| Problem {
        path: error.field_path.clone(),
        message: hint::violated_rule(
            &error.message,
            at(object, &error.field_path),
            metric_of(object, &error.field_path),
        ),
    };
    errors.iter().map(problem).collect()
}

/// The value of the field at a path such as `spec.rules[0].name`.
fn at<'a>(object: &'a Value, path: &str) -> Option<&'a Value> {
    let pointer = path.replace(['.', '['], "/").replace(']', "");
    object.pointer(&format!("/{pointer}"))
}

/// The name of the metric of the rule that the path is in.
fn metric_of<'a>(object: &'a Value, path: &str) -> Option<&'a str> {
    let (index, _) = rule_index(path)?;
    let name = format!("spec.rules[{index}].metricRule.name");
    at(object, &name)?.as_str()
}

/// Drops the `null` of a known field, as an API server does: the field is absent.
fn drop_nulls(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, value| !(value.is_null() && field_schema(schema, name).is_some()));
            for (name, value) in fields {
                if let Some(schema) = field_schema(schema, name) {
                    drop_nulls(schema, value);
                }
            }
        }
        Value::Array(items) => {
            if let Some(schema) = schema.get("items") {
                for item in items {
                    drop_nulls(schema, item);
                }
            }
        }
        _ => {}
    }
}

/// The schema of a field of an object, or of the values of a map.
fn field_schema<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    let named = schema.get("properties").and_then(|fields| fields.get(name));
    named.or_else(|| schema.get("additionalProperties"))
}

/// The schema of the metadata of an object.
pub(super) fn metadata_schema() -> Value {
    let text = json!({"type": "string"});
    let any = json!({"x-kubernetes-preserve-unknown-fields": true});
    json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {
                "type": "string",
                "minLength": 1,
                "maxLength": 253,
                "x-kubernetes-validations": [{
                    "rule": "self.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$')",
                    "message": "name is not a valid object name; write lower-case letters, digits, '-' and '.', for example name: batch-pods",
                }],
            },
            "labels": schema::labels("labels"),
            "annotations": schema::annotations(),
            "generateName": text,
            "namespace": text,
            "uid": text,
            "resourceVersion": text,
            "selfLink": text,
            "creationTimestamp": text,
            "deletionTimestamp": text,
            "generation": {"type": "integer"},
            "deletionGracePeriodSeconds": {"type": "integer"},
            "finalizers": {"type": "array", "items": text},
            "managedFields": {"type": "array", "items": any},
            "ownerReferences": {"type": "array", "items": any},
        },
    })
}

#[cfg(test)]
#[path = "validate_tests.rs"]
mod tests;
