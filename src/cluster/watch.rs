//! Watches that never end and that one bad object can't stop: objects come as plain JSON.

use futures::stream::{BoxStream, StreamExt};
use kube::api::DynamicObject;
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use super::client::describe;

/// Something happened to the objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// All objects follow, each in an `Apply`.
    Restarted,
    /// All objects were there.
    Complete,
    /// An object as it is now.
    Apply(String, Value),
    /// An object is gone.
    Delete(String),
    /// The watch failed and is tried again: in words.
    Failed(String),
}

/// What identifies a kind to an API server.
pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

/// All changes of the cluster-scoped objects of a kind, from a full list on.
pub fn all(client: Client, resource: &ApiResource) -> BoxStream<'static, Change> {
    let api: Api<DynamicObject> = Api::all_with(client, resource);
    watcher(api, watcher::Config::default())
        .default_backoff()
        .map(|event| match event {
            Ok(Event::Init) => Change::Restarted,
            Ok(Event::InitDone) => Change::Complete,
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                Change::Apply(object.name_any(), to_json(object))
            }
            Ok(Event::Delete(object)) => Change::Delete(object.name_any()),
            Err(error) => Change::Failed(describe(&error)),
        })
        .boxed()
}

/// The object without what is large and not used.
fn to_json(mut object: DynamicObject) -> Value {
    object.metadata.managed_fields = None;
    let mut value = object.data;
    value["metadata"] = json!(object.metadata);
    if let Some(types) = object.types {
        value["apiVersion"] = json!(types.api_version);
        value["kind"] = json!(types.kind);
    }
    value
}
