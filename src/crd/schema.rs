//! The definitions of the kinds, as in `crds/*.yaml`.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use kube::core::schema::{OptionalEnum, StructuralSchemaRewriter};
use schemars::generate::SchemaSettings;
use schemars::transform::AddNullable;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::common::LabelSelector;
use super::objects::Kind;
use super::validate::metadata_schema;
use super::{AvoidanceAction, NodeQos, NodeWatermark, PodQos};

/// The restrictions of Kubernetes on labels.
const LABEL_KEY: &str =
    "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)$";
const LABEL_VALUE: &str = "^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$";

/// The definitions of all kinds, ready to be applied: the policies, then `NodeWatermark`.
pub fn definitions() -> [CustomResourceDefinition; 4] {
    [
        AvoidanceAction::crd(),
        NodeQos::crd(),
        PodQos::crd(),
        NodeWatermark::crd(),
    ]
    .map(finish)
}

/// The structural schema of a type with all types inlined, generated as kube does for definitions.
pub fn inlined_schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    let generator = settings
        .with_transform(AddNullable::default())
        .with_transform(StructuralSchemaRewriter)
        .with_transform(OptionalEnum)
        .into_generator();
    let mut schema = generator.into_root_schema_for::<T>().to_value();
    if let Some(fields) = schema.as_object_mut() {
        fields.remove("title");
    }
    schema
}

/// Removes what an API server would warn about or treat differently from our own validation.
fn finish(mut definition: CustomResourceDefinition) -> CustomResourceDefinition {
    edit(&mut definition, tidy);
    definition
}

/// Edits the schema of every version.
pub(super) fn edit(definition: &mut CustomResourceDefinition, edit: impl Fn(&mut Value)) {
    for version in &mut definition.spec.versions {
        let Some(schema) = version
            .schema
            .as_mut()
            .and_then(|schema| schema.open_api_v3_schema.as_mut())
        else {
            continue;
        };
        if let Ok(mut value) = serde_json::to_value(&*schema) {
            edit(&mut value);
            if let Ok(edited) = serde_json::from_value(value) {
                *schema = edited;
            }
        }
    }
}

/// - `nullable`: without it an API server drops a `null` before it validates.
/// - `format`: API servers know `int32`, `int64` and `date-time`, and neither `uint32` nor that an integer fits 32 bits.
/// - line breaks within paragraphs of descriptions: `kubectl explain` wraps the lines itself.
pub(super) fn tidy(schema: &mut Value) {
    let Value::Object(fields) = schema else {
        return;
    };
    fields.remove("nullable");
    match format(fields) {
        Some(format) => drop(fields.insert("format".to_owned(), json!(format))),
        None => drop(fields.remove("format")),
    }
    if let Some(Value::String(text)) = fields.get_mut("description") {
        *text = one_line(text);
    }
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.values_mut().for_each(tidy);
    }
    for key in ["items", "additionalProperties"] {
        if let Some(child) = fields.get_mut(key) {
            tidy(child);
        }
    }
}

/// The format of a field, if there is one by the API conventions.
fn format(fields: &Map<String, Value>) -> Option<&'static str> {
    let maximum = fields.get("maximum").and_then(Value::as_f64);
    match fields.get("type")?.as_str()? {
        "integer" if maximum.is_some_and(|maximum| maximum <= f64::from(i32::MAX)) => Some("int32"),
        "integer" => Some("int64"),
        "string" if fields.get("format")? == "date-time" => Some("date-time"),
        _ => None,
    }
}

fn one_line(text: &str) -> String {
    text.split("\n\n")
        .map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect::<Vec<_>>()
        .join("\n\n")
}

/// An int-or-string.
pub(super) fn int_or_string(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "maxLength": 64,
    })
}

/// `matchLabels` of a label selector.
pub(super) fn match_labels(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": {"type": "string", "maxLength": 253},
        "maxProperties": 32,
    })
}

/// A selector over the labels of Kubernetes objects: keys and values must be valid for labels.
pub(super) fn label_selector(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = generator.subschema_for::<LabelSelector>();
    let rules = [
        (
            format!("!has(self.matchLabels) || self.matchLabels.all(k, k.matches('{LABEL_KEY}'))"),
            "matchLabels has a key that is not a valid label key; write for example app, or example.com/tier",
            ".matchLabels",
        ),
        (
            format!(
                "!has(self.matchLabels) || self.matchLabels.all(k, self.matchLabels[k].matches('{LABEL_VALUE}'))"
            ),
            "matchLabels has a value that is not a valid label value; write at most 63 letters, digits, '-', '_' and '.'",
            ".matchLabels",
        ),
        (
            format!(
                "!has(self.matchExpressions) || self.matchExpressions.all(e, e.key.matches('{LABEL_KEY}') && \
                 (!has(e.values) || e.values.all(v, v.matches('{LABEL_VALUE}'))))"
            ),
            "matchExpressions has a key or value that is not valid for a label; write for example key: example.com/tier, \
             values: [batch]",
            ".matchExpressions",
        ),
    ];
    let rules = rules
        .map(|(rule, message, path)| json!({"rule": rule, "message": message, "fieldPath": path}));
    schema.insert("x-kubernetes-validations".to_owned(), json!(rules));
    schema
}

/// Classes of pods.
pub(super) fn qos_classes(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 3,
        "items": {"type": "string", "enum": ["BestEffort", "Burstable", "Guaranteed"]},
        "x-kubernetes-list-type": "atomic",
    })
}

/// Labels that a pod has. Only a few: an API server adds up the costs of the checks of all rules of an object.
pub(super) fn few_labels(_: &mut SchemaGenerator) -> Schema {
    let rules = [
        (
            format!("self.all(k, k.matches('{LABEL_KEY}'))"),
            "matchLabels has a key that is not a valid label key; write for example app, or example.com/tier",
        ),
        (
            format!("self.all(k, self[k].matches('{LABEL_VALUE}'))"),
            "matchLabels has a value that is not a valid label value; write at most 63 letters, digits, '-', '_' and '.'",
        ),
    ];
    let rules = rules.map(|(rule, message)| json!({"rule": rule, "message": message}));
    json_schema!({
        "type": "object",
        "maxProperties": 8,
        "additionalProperties": {"type": "string", "maxLength": 63},
        "x-kubernetes-validations": rules,
    })
}

/// The schema of a whole object of a kind, including metadata, for [`super::validate`].
pub(super) fn object_schema(kind: Kind) -> Value {
    let definition = match kind {
        Kind::AvoidanceAction => AvoidanceAction::crd(),
        Kind::NodeQos => NodeQos::crd(),
        Kind::PodQos => PodQos::crd(),
    };
    let version = finish(definition).spec.versions.into_iter().next();
    let schema = version.and_then(|version| version.schema?.open_api_v3_schema);
    let mut schema = serde_json::to_value(schema).unwrap_or_default();
    schema["properties"]["apiVersion"] = json!({"type": "string"});
    schema["properties"]["kind"] = json!({"type": "string"});
    schema["properties"]["metadata"] = metadata_schema();
    schema["required"] = json!(["metadata", "spec"]);
    schema
}

/// Labels of an object.
pub(super) fn labels(name: &str) -> Value {
    json!({
        "type": "object",
        "additionalProperties": {"type": "string"},
        "x-kubernetes-validations": [
            {
                "rule": format!("self.all(k, k.matches('{LABEL_KEY}'))"),
                "message": format!("{name} has a key that is not a valid label key; write for example app, or example.com/tier"),
            },
            {
                "rule": format!("self.all(k, self[k].matches('{LABEL_VALUE}'))"),
                "message": format!(
                    "{name} has a value that is not a valid label value; write at most 63 letters, digits, '-', '_' and '.'"
                ),
            },
        ],
    })
}

/// Annotations of an object.
pub(super) fn annotations() -> Value {
    json!({
        "type": "object",
        "additionalProperties": {"type": "string"},
        "x-kubernetes-validations": [{
            "rule": format!("self.all(k, k.lowerAscii().matches('{LABEL_KEY}'))"),
            "message": "annotations has a key that is not a valid annotation key; write for example example.com/note",
        }],
    })
}

/// An object schema with these properties.
pub(super) fn object(properties: &[(&str, Value)]) -> Value {
    let properties: Map<_, _> = properties
        .iter()
        .map(|(name, schema)| ((*name).to_owned(), schema.clone()))
        .collect();
    json!({"type": "object", "properties": properties})
}
