//! Discovery documents: the unaggregated ones and the aggregated one.

use serde_json::{Value, json};

use crate::crd::node_metric::{API_VERSION, GROUP, KIND, PLURAL, SHORT_NAME, VERSION};

/// The media type of [`aggregated`].
pub const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

const SINGULAR: &str = "nodemetric";
const CATEGORY: &str = "plimsoll";
/// Without `delete` the garbage collector never lists us, and there is nothing that a quota could count.
pub const VERBS: [&str; 3] = ["get", "list", "watch"];

fn versions() -> Value {
    json!({"groupVersion": API_VERSION, "version": VERSION})
}

fn group_fields() -> Value {
    json!({
        "name": GROUP,
        "versions": [versions()],
        "preferredVersion": versions(),
    })
}

/// `APIGroup`, at `/apis/GROUP`.
pub fn group() -> Value {
    let mut group = group_fields();
    group["kind"] = json!("APIGroup");
    group["apiVersion"] = json!("v1");
    group
}

/// `APIGroupList`, at `/apis`.
pub fn groups() -> Value {
    json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": [group_fields()]})
}

/// `APIResourceList`, at `/apis/GROUP/VERSION`.
pub fn resources() -> Value {
    json!({
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": API_VERSION,
        "resources": [{
            "name": PLURAL,
            "singularName": SINGULAR,
            "namespaced": false,
            "kind": KIND,
            "verbs": VERBS,
            "shortNames": [SHORT_NAME],
            "categories": [CATEGORY],
        }],
    })
}

/// `APIGroupDiscoveryList`, at `/apis` for clients that accept it.
pub fn aggregated() -> Value {
    json!({
        "kind": "APIGroupDiscoveryList",
        "apiVersion": "apidiscovery.k8s.io/v2",
        "metadata": {},
        "items": [{
            "metadata": {"name": GROUP},
            "versions": [{
                "version": VERSION,
                "freshness": "Current",
                "resources": [{
                    "resource": PLURAL,
                    "responseKind": {"group": GROUP, "version": VERSION, "kind": KIND},
                    "scope": "Cluster",
                    "singularResource": SINGULAR,
                    "verbs": VERBS,
                    "shortNames": [SHORT_NAME],
                    "categories": [CATEGORY],
                }],
            }],
        }],
    })
}
