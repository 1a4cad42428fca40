//! Writes to the API server: server-side apply in the name of one field manager.

use kube::api::{DeleteParams, DynamicObject, Patch, PatchParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::super::catalog::Key;
use super::super::world::{Live, StatusWrite, Write};
use super::store::{policy_resource, watermark_resource};
use crate::cluster::client::{CallError, call};
use crate::crd::{API_VERSION, NodeWatermarkSpec};

/// Who owns the fields that the controller writes.
const FIELD_MANAGER: &str = "plimsoll-controller";

/// A write came to its end.
pub(super) enum Done {
    Watermark {
        node: String,
        outcome: Result<Option<Live>, CallError>,
    },
    Status {
        key: Key,
        outcome: Result<(), CallError>,
    },
}

fn params() -> PatchParams {
    PatchParams::apply(FIELD_MANAGER).force()
}

/// Writes or deletes one `NodeWatermark`.
pub(super) async fn carry_out(client: Client, write: Write) -> Done {
    let api: Api<DynamicObject> = Api::all_with(client, &watermark_resource());
    match write {
        Write::Apply { node, spec } => {
            let body = watermark(&node, &spec);
            let outcome = call(api.patch(&node, &params(), &Patch::Apply(&body))).await;
            Done::Watermark {
                outcome: outcome.map(|object| Some(Live::of(&to_value(&object)))),
                node,
            }
        }
        Write::Delete { node, uid } => Done::Watermark {
            outcome: delete(&api, &node, uid).await,
            node,
        },
    }
}

/// Gone already, or made anew with another UID, is as good as deleted.
async fn delete(
    api: &Api<DynamicObject>,
    node: &str,
    uid: String,
) -> Result<Option<Live>, CallError> {
    let params = DeleteParams::default().preconditions(Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    match call(api.delete(node, &params)).await {
        Err(error) if !matches!(error.code(), Some(404 | 409)) => Err(error),
        _ => Ok(None),
    }
}

fn watermark(node: &str, spec: &NodeWatermarkSpec) -> Value {
    json!({
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "NodeWatermark",
        "metadata": {
            "name": node,
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": node, "uid": spec.node_uid}],
        },
        "spec": spec,
    })
}

fn to_value(object: &DynamicObject) -> Value {
    let mut value = object.data.clone();
    value["metadata"] = json!({
        "name": object.name_any(),
        "uid": object.metadata.uid,
        "generation": object.metadata.generation,
    });
    value
}

/// Writes the status of one policy object.
pub(super) async fn status(client: Client, write: StatusWrite) -> Done {
    let StatusWrite { key, status } = write;
    let api: Api<DynamicObject> = Api::all_with(client, &policy_resource(key.0));
    let body = json!({
        "apiVersion": API_VERSION,
        "kind": key.0.name(),
        "metadata": {"name": key.1},
        "status": status,
    });
    let patch = Patch::Apply(&body);
    let params = params();
    let outcome = match call(api.patch_status(&key.1, &params, &patch)).await {
        // Deleted in the meantime: nothing is left to say.
        Err(error) if error.code() != Some(404) => Err(error),
        _ => Ok(()),
    };
    Done::Status { key, outcome }
}
