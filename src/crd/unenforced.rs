//! Fields that crane declares and that are accepted here without being enforced: each one used is told in a
//! condition or finding with reason `FieldsNotEnforced`. The shapes are crane's.

use schemars::{Schema, SchemaGenerator};
use serde_json::{Value, json};

use super::schema::object;

fn integer() -> Value {
    json!({"type": "integer"})
}

fn boolean() -> Value {
    json!({"type": "boolean"})
}

fn text() -> Value {
    json!({"type": "string", "maxLength": 256})
}

fn list(item: &Value) -> Value {
    json!({"type": "array", "maxItems": 256, "items": item})
}

fn described(mut schema: Value, what: &str) -> Schema {
    schema["description"] = json!(format!(
        "{what} Accepted for crane's manifests and not enforced; the condition FieldsNotEnforced says so."
    ));
    Schema::try_from(schema).unwrap_or_default()
}

pub(super) fn elastic_cpu_limit(_: &mut SchemaGenerator) -> Schema {
    let node = object(&[("percent", integer())]);
    let core = object(&[("coreNum", text()), ("percent", integer())]);
    let period = object(&[
        ("offlineCpuLimit", text()),
        ("coreNum", text()),
        ("percent", integer()),
    ]);
    let schema = object(&[
        ("elasticNodeCpuLimit", node),
        ("elasticCoreCpuLimit", list(&core)),
        ("elasticCoreCpuLimitPeriod", list(&period)),
        ("elasticCpuAvoidance", object(&[("enable", boolean())])),
    ]);
    described(schema, "Limits of elastic CPU.")
}

pub(super) fn mem_limit(_: &mut SchemaGenerator) -> Schema {
    let schema = object(&[
        ("pageCacheLimitGlobal", boolean()),
        ("pageCacheLimitRetryTimes", integer()),
    ]);
    described(schema, "Limits of page cache.")
}

pub(super) fn net_limits(_: &mut SchemaGenerator) -> Schema {
    let names = ["rxBpsMin", "rxBpsMax", "txBpsMin", "txBpsMax"];
    let mut schema = object(&names.map(|name| (name, integer())));
    schema["required"] = json!(names);
    described(schema, "Limits of network bandwidth.")
}

pub(super) fn memory_compression(_: &mut SchemaGenerator) -> Schema {
    described(object(&[("enable", boolean())]), "Compression of memory.")
}

pub(super) fn resource_qos(_: &mut SchemaGenerator) -> Schema {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    described(schema, "Per-resource classes of service.")
}

pub(super) fn pod_quality_probe(_: &mut SchemaGenerator) -> Schema {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    described(schema, "A probe of the pod's own quality of service.")
}
