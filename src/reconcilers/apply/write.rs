//! Carries out operations on the API server; writes use server-side apply with one field manager.

use kube::api::{
    DeleteParams, DynamicObject, Patch, PatchParams, Preconditions, ValidationDirective,
};
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::cluster::client::{CallError, call, found, stored};
use crate::cluster::lease::{LeaseObject, LeaseState};
use crate::cluster::load_signs::{self, LoadSignsPatch};
use crate::cluster::taint::{self, DesiredTaint, TaintError};
use crate::crd::API_VERSION;
use crate::reconcilers::compile::catalog::Key;
use crate::reconcilers::compile::content::DesiredSpec;
use crate::reconcilers::observe::watches::{policy_resource, watermark_resource};
use crate::reconcilers::observe::wire::{FIELD_MANAGER, Watermark, WatermarkObject};
use crate::reconcilers::plan::operations::{Operation, StatusWrite};

/// The outcome of an operation.
pub enum WriteOutcome {
    Watermark {
        node: String,
        outcome: Result<Option<Box<Watermark>>, CallError>,
    },
    Status {
        key: Key,
        outcome: Result<(), CallError>,
    },
    /// The Lease of an agent that seemed unresponsive.
    LeaseRead {
        node: String,
        outcome: Result<Option<LeaseState>, CallError>,
    },
    /// The load label of an unresponsive agent's node.
    LabelRemoved {
        node: String,
        outcome: Result<(), CallError>,
    },
    /// Whether the node had our taint or condition.
    TaintRemoved {
        node: String,
        outcome: Result<bool, TaintError>,
    },
}

/// Strict: if the API server dropped unknown fields, the object would never match.
fn params() -> PatchParams {
    PatchParams {
        field_validation: Some(ValidationDirective::Strict),
        ..PatchParams::apply(FIELD_MANAGER).force()
    }
}

/// Carries out one operation; `leases` are the agents'.
pub async fn carry_out(
    client: Client,
    leases: Api<LeaseObject>,
    operation: Operation,
) -> WriteOutcome {
    match operation {
        Operation::Apply { node, spec } => WriteOutcome::Watermark {
            outcome: apply(client, &node, &spec).await.map(Some),
            node,
        },
        Operation::Delete { node, uid } => WriteOutcome::Watermark {
            outcome: delete(client, &node, uid).await.map(|()| None),
            node,
        },
        Operation::ReadLease { node } => {
            let lease = found(call(leases.get(&node)).await);
            WriteOutcome::LeaseRead {
                outcome: lease.map(|lease| lease.map(LeaseObject::state)),
                node,
            }
        }
        Operation::RemoveLabel { node, uid } => WriteOutcome::LabelRemoved {
            outcome: remove_label(&client, &node, &uid).await,
            node,
        },
        Operation::RemoveTaint { node, uid } => WriteOutcome::TaintRemoved {
            outcome: remove_taint(&client, &node, &uid).await,
            node,
        },
    }
}

async fn apply(
    client: Client,
    node: &str,
    spec: &DesiredSpec,
) -> Result<Box<Watermark>, CallError> {
    let api: Api<WatermarkObject> = Api::all_with(client, &watermark_resource());
    let body = watermark(node, spec);
    let object = call(stored(api.patch(node, &params(), &Patch::Apply(&body)))).await?;
    Ok(Box::new(Watermark::of(object)))
}

/// Succeeds also if the object is gone or was created again with another UID.
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

/// Succeeds also if the node is gone or was replaced.
async fn remove_label(client: &Client, node: &str, uid: &str) -> Result<(), CallError> {
    let removed = LoadSignsPatch::default().label(None);
    match load_signs::write(client, node, uid, &removed).await {
        Err(error) if !matches!(error.code(), Some(404 | 409)) => Err(error),
        _ => Ok(()),
    }
}

/// Removes our taints and condition. Does nothing if the node is gone or was replaced.
async fn remove_taint(client: &Client, node: &str, uid: &str) -> Result<bool, TaintError> {
    let node = match taint::read(client, node).await {
        Ok(node) if node.uid == uid => node,
        Ok(_) | Err(TaintError::NoNode(..)) => return Ok(false),
        Err(error) => return Err(error),
    };
    let was_tainted = node.needs_cleanup();
    // If it was deleted or replaced in the meantime, the next attempt finds that.
    taint::reconcile(client, node, DesiredTaint::Absent).await?;
    Ok(was_tainted)
}

#[derive(Debug, serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: Value,
    spec: &'a DesiredSpec,
}

fn watermark<'a>(node: &str, spec: &'a DesiredSpec) -> Body<'a> {
    let owner = json!({"apiVersion": "v1", "kind": "Node", "name": node, "uid": spec.node_uid});
    Body {
        api_version: "plimsoll.dev/v1alpha1",
        kind: "NodeWatermark",
        metadata: json!({"name": node, "ownerReferences": [owner]}),
        spec,
    }
}

/// Writes the status of one policy object.
pub async fn status(client: Client, write: StatusWrite) -> WriteOutcome {
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
    WriteOutcome::Status {
        key,
        outcome: outcome.map(drop),
    }
}
