//! Fields of crane that are accepted but not enforced. Each one used is reported in a condition or finding with reason
//! `FieldsNotEnforced`. The schemas are those of crane.

use schemars::{Schema, SchemaGenerator};
use serde_json::{Value, json};

use super::schema::object;

fn integer() -> Value {
    json!({"type": "integer"})
}

fn boolean() -> Value {
    json!({"type": "boolean"})
}

fn string() -> Value {
    json!({"type": "string", "maxLength": 256})
}

fn list(item: &Value) -> Value {
    json!({"type": "array", "maxItems": 256, "items": item, "x-kubernetes-list-type": "atomic"})
}

/// Gives every field in it a description, as the API conventions want.
fn describe_fields(schema: &mut Value) {
    for (_, field) in schema["properties"].as_object_mut().into_iter().flatten() {
        field["description"] = json!("Accepted, but not enforced.");
        describe_fields(field);
    }
    if let Some(items) = schema.get_mut("items") {
        describe_fields(items);
    }
}

fn described(mut schema: Value, description: &str) -> Schema {
    describe_fields(&mut schema);
    schema["description"] = json!(format!(
        "{description} Accepted for compatibility with crane, but not enforced: see the condition FieldsNotEnforced."
    ));
    Schema::try_from(schema).unwrap_or_default()
}

/// Of Plimsoll, not of crane: all rules of a node have one period.
pub(super) fn evaluation_period(_: &mut SchemaGenerator) -> Schema {
    let mut schema = integer();
    schema["format"] = json!("int64");
    schema["description"] = json!(
        "Not enforced: all rules of a node are evaluated at the period that its agent is started with. See the condition \
         FieldsNotEnforced."
    );
    Schema::try_from(schema).unwrap_or_default()
}

pub(super) fn elastic_cpu_limit(_: &mut SchemaGenerator) -> Schema {
    let node = object(&[("percent", integer())]);
    let core = object(&[("coreNum", string()), ("percent", integer())]);
    let period = object(&[
        ("offlineCpuLimit", string()),
        ("coreNum", string()),
        ("percent", integer()),
    ]);
    let schema = object(&[
        ("elasticNodeCpuLimit", node),
        ("elasticCoreCpuLimit", list(&core)),
        ("elasticCoreCpuLimitPeriod", list(&period)),
        ("elasticCpuAvoidance", object(&[("enable", boolean())])),
    ]);
    described(schema, "The limits of elastic CPU.")
}

pub(super) fn mem_limit(_: &mut SchemaGenerator) -> Schema {
    let schema = object(&[
        ("pageCacheLimitGlobal", boolean()),
        ("pageCacheLimitRetryTimes", integer()),
    ]);
    described(schema, "The limits of page cache.")
}

pub(super) fn net_limits(_: &mut SchemaGenerator) -> Schema {
    let names = ["rxBpsMin", "rxBpsMax", "txBpsMin", "txBpsMax"];
    let mut schema = object(&names.map(|name| (name, integer())));
    schema["required"] = json!(names);
    described(schema, "The limits of network bandwidth.")
}

pub(super) fn memory_compression(_: &mut SchemaGenerator) -> Schema {
    described(object(&[("enable", boolean())]), "The memory compression.")
}

pub(super) fn pod_quality_probe(_: &mut SchemaGenerator) -> Schema {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    described(schema, "The quality probe of the pods.")
}
