//! Writes the label `plimsoll.dev/load` of a Node.
//!
//! Labels are a map: a merge patch of one key conflicts with nobody, unlike the list of taints. The UID in it makes sure that
//! it is still the same node.

use k8s_openapi::api::core::v1::Node;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::{Value, json};

use super::client::{CallError, call, stored};
use super::taint::TaintSnapshot;
use crate::crd::load_label::{KEY, LoadLabel};

/// Sets the label of the node, or removes it. Returns the node as it is then, without its taints and our condition.
///
/// # Errors
/// The API server refused, or did not answer.
pub async fn write(
    client: &Client,
    node: &str,
    uid: &str,
    label: Option<LoadLabel>,
) -> Result<TaintSnapshot, CallError> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()));
    let value = label.map(|label| label.to_string());
    let patch = json!({"metadata": {"uid": uid, "labels": {KEY: value}}});
    let params = PatchParams::default();
    let patch = Patch::Merge(patch);
    let written = call(stored(api.patch_metadata(node, &params, &patch))).await?;
    let unread = Value::Null;
    Ok(TaintSnapshot::new(&written.metadata, &unread, &unread))
}
