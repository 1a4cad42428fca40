//! Writes to the API server: server-side apply in the name of one field manager.

use kube::api::{
    DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, ValidationDirective,
};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::super::catalog::Key;
use super::super::content::Wanted;
use super::super::lease::{LeaseObject, Renewal};
use super::super::wire::{FIELD_MANAGER, Watermark, WatermarkObject};
use super::super::world::{StatusWrite, Write};
use super::store::{policy_resource, watermark_resource};
use crate::cluster::client::{CallError, call, found, stored};
use crate::cluster::taint::{self, Bearing, TaintError};
use crate::crd::API_VERSION;

/// A write came to its end.
pub(super) enum Done {
    Watermark {
        node: String,
        outcome: Result<Option<Box<Watermark>>, CallError>,
    },
    Status {
        key: Key,
        outcome: Result<(), CallError>,
    },
    /// The Lease of an agent that seemed silent.
    Asked {
        node: String,
        outcome: Result<Option<Renewal>, CallError>,
    },
    /// The marks of a silent agent on its node: whether there were any.
    Opened {
        node: String,
        outcome: Result<bool, TaintError>,
    },
}

/// A field that the definition does not have is refused: were it dropped, the object would never be as it should be.
fn params() -> PatchParams {
    PatchParams {
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::apply(FIELD_MANAGER).force()
    }
}

/// Carries out one write; `leases` are those of agents.
pub(super) async fn carry_out(client: Client, leases: Api<LeaseObject>, write: Write) -> Done {
    match write {
        Write::Apply { node, spec } => Done::Watermark {
            outcome: apply(client, &node, &spec).await.map(Some),
            node,
        },
        Write::Delete { node, uid } => Done::Watermark {
            outcome: delete(client, &node, uid).await.map(|()| None),
            node,
        },
        Write::Ask { node } => {
            let lease = found(call(leases.get(&node)).await);
            Done::Asked {
                outcome: lease.map(|lease| lease.map(LeaseObject::renewal)),
                node,
            }
        }
        Write::Open { node, uid } => Done::Opened {
            outcome: open(&client, &node, &uid).await,
            node,
        },
    }
}

async fn apply(client: Client, node: &str, spec: &Wanted) -> Result<Box<Watermark>, CallError> {
    let api: Api<WatermarkObject> = Api::all_with(client, &watermark_resource());
    let body = watermark(node, spec);
    let object = call(stored(api.patch(node, &params(), &Patch::Apply(&body)))).await?;
    Ok(Box::new(Watermark::of(object)))
}

/// Gone already, or made anew with another UID, is as good as deleted.
async fn delete(client: Client, node: &str, uid: String) -> Result<(), CallError> {
    let api: Api<DynamicObject> = Api::all_with(client, &watermark_resource());
    let params = DeleteParams::default().preconditions(Preconditions {
        uid: Some(uid),
        resource_version: None,
    });
    match call(api.delete(node, &params)).await {
        Err(error) if !matches!(error.code(), Some(404 | 409)) => Err(error),
        _ => Ok(()),
    }
}

/// Takes our marks away. A node that is gone, or another of its name, has none of ours.
async fn open(client: &Client, node: &str, uid: &str) -> Result<bool, TaintError> {
    let seen = match taint::read(client, node).await {
        Ok(seen) if seen.uid == uid => seen,
        Ok(_) | Err(TaintError::NoNode(_)) => return Ok(false),
        Err(error) => return Err(error),
    };
    let marked = seen.is_marked();
    // Where it is gone or another meanwhile, the next try finds that.
    taint::keep(client, seen, Bearing::Nothing).await?;
    Ok(marked)
}

#[derive(Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: Value,
    spec: &'a Wanted,
}

fn watermark<'a>(node: &str, spec: &'a Wanted) -> Body<'a> {
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": spec.node_uid});
    Body {
        api_version: "plimsoll.dev/v1alpha1",
        kind: "NodeWatermark",
        metadata: json!({"name": node, "ownerReferences": [owner]}),
        spec,
    }
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
    let outcome = call(stored(api.patch_status(&key.1, &params, &patch))).await;
    Done::Status {
        key,
        outcome: outcome.map(drop),
    }
}
