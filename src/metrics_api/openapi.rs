//! The `OpenAPI` documents, generated from the type, for `kubectl explain` and validating clients.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use serde_json::{Value, json};

use crate::crd::node_metric::{GROUP, KIND, PLURAL, VERSION};
use crate::crd::{NodeMetric, inlined_schema};

/// Path of the version 3 document, below `/openapi/v3/`.
pub const V3_PATH: &str = "apis/metrics.plimsoll.dev/v1alpha1";

const OBJECT: &str = "dev.plimsoll.metrics.v1alpha1.NodeMetric";
const LIST: &str = "dev.plimsoll.metrics.v1alpha1.NodeMetricList";
const OBJECT_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta";
const LIST_META: &str = "io.k8s.apimachinery.pkg.apis.meta.v1.ListMeta";

fn kinds(kind: &str) -> Value {
    json!([{"group": GROUP, "version": VERSION, "kind": kind}])
}

/// All schemas by name. `reference` builds a reference to a named schema.
fn schemas(reference: impl Fn(&str) -> Value) -> Value {
    let mut object = NodeMetric::schema();
    let description = object["properties"]["metadata"]["description"].clone();
    let mut metadata = reference(OBJECT_META);
    if metadata.get("$ref").is_some() {
        // In version 3.0 a reference can't have siblings.
        metadata = json!({"allOf": [metadata], "default": {}});
    }
    metadata["description"] = description;
    object["properties"]["metadata"] = metadata;
    object["x-kubernetes-group-version-kind"] = kinds(KIND);
    let list = json!({
        "type": "object",
        "description": "NodeMetricList is a list of NodeMetric.",
        "required": ["items"],
        "properties": {
            "apiVersion": {"type": "string", "description": "metrics.plimsoll.dev/v1alpha1."},
            "kind": {"type": "string", "description": "NodeMetricList."},
            "metadata": reference(LIST_META),
            "items": {
                "type": "array",
                "description": "In order of name.",
                "items": reference(OBJECT),
            },
        },
        "x-kubernetes-group-version-kind": kinds("NodeMetricList"),
    });
    json!({OBJECT: object, LIST: list})
}

fn operation(action: &str, kind: &str, summary: &str, ok: &Value) -> Value {
    json!({
        "operationId": format!("{action}Metrics{VERSION}{kind}"),
        "tags": ["metrics_v1alpha1"],
        "description": summary,
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": {"group": GROUP, "version": VERSION, "kind": KIND},
        "responses": {"200": ok, "401": {"description": "Unauthorized"}},
    })
}

/// The paths. `answer` builds a response from a schema name, `name` declares the path parameter.
fn paths(answer: impl Fn(&str) -> Value, name: &Value) -> Value {
    let base = format!("/apis/{GROUP}/{VERSION}/{PLURAL}");
    let list = operation(
        "list",
        KIND,
        "list or watch objects of kind NodeMetric",
        &answer(LIST),
    );
    let get = operation(
        "get",
        KIND,
        "read the specified NodeMetric",
        &answer(OBJECT),
    );
    json!({
        (base.clone()): {"get": list},
        (format!("{base}/{{name}}")): {"get": get, "parameters": [name]},
    })
}

fn info() -> Value {
    json!({"title": "Plimsoll", "version": env!("CARGO_PKG_VERSION")})
}

/// The version 3 document.
pub fn v3() -> Value {
    let reference = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let mut schemas = schemas(reference);
    schemas[OBJECT_META] = inlined_schema::<ObjectMeta>();
    schemas[LIST_META] = inlined_schema::<ListMeta>();
    let answer = |name: &str| {
        json!({
            "description": "OK",
            "content": {"application/json": {"schema": reference(name)}},
        })
    };
    let name = json!({
        "name": "name", "in": "path", "required": true,
        "description": "name of the NodeMetric: that of its Node", "schema": {"type": "string"},
    });
    json!({
        "openapi": "3.0.0",
        "info": info(),
        "paths": paths(answer, &name),
        "components": {"schemas": schemas},
    })
}

/// The index of version 3 documents. `hash` changes with the document.
pub fn v3_index(hash: &str) -> Value {
    json!({"paths": {V3_PATH: {"serverRelativeURL": format!("/openapi/v3/{V3_PATH}?hash={hash}")}}})
}

/// The version 2 document. The API server merges it with others; Kubernetes' own types are left to Kubernetes.
pub fn v2() -> Value {
    let reference = |name: &str| {
        if name == OBJECT {
            json!({"$ref": format!("#/definitions/{name}")})
        } else {
            json!({"type": "object", "description": "Standard metadata."})
        }
    };
    let answer = |name: &str| json!({"description": "OK", "schema": {"$ref": format!("#/definitions/{name}")}});
    let name = json!({
        "name": "name", "in": "path", "required": true, "type": "string",
        "description": "name of the NodeMetric: that of its Node",
    });
    json!({
        "swagger": "2.0",
        "info": info(),
        "paths": paths(answer, &name),
        "definitions": schemas(reference),
    })
}
