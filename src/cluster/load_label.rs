//! Writes the label `plimsoll.dev/load` of a Node.
//!
//! Labels are a map: a merge patch of one key conflicts with nobody, unlike the list of taints. The UID in it makes sure that
//! it is still the same node.

use k8s_openapi::api::core::v1::Node;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::json;

use super::client::{CallError, call};
use crate::crd::load_label::{KEY, LoadLabel};

/// Sets the label of the node, or removes it.
///
/// # Errors
/// The API server refused, or did not answer.
pub async fn write(
    client: &Client,
    node: &str,
    uid: &str,
    label: Option<LoadLabel>,
) -> Result<(), CallError> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()));
    let value = label.map(|label| label.to_string());
    let patch = json!({"metadata": {"uid": uid, "labels": {KEY: value}}});
    let params = PatchParams::default();
    call(api.patch_metadata(node, &params, &Patch::Merge(patch)))
        .await
        .map(drop)
}
