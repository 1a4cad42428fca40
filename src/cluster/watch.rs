//! Watches that never end and that one bad object can't stop: objects come as plain JSON.

use std::fmt::Debug;
use std::future::ready;

use futures::stream::{self, BoxStream, Stream, StreamExt};
use kube::api::DynamicObject;
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::client::describe;

/// Objects in one page of a list.
const PAGE: u32 = 500;

/// Something happened to the objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Change<K = Value> {
    /// All objects follow, each in an `Apply`.
    Restarted,
    /// All objects were there.
    Complete,
    /// An object as it is now.
    Apply(String, K),
    /// An object is gone.
    Delete(String),
    /// The watch failed and is tried again: in words.
    Failed(String),
}

/// What identifies a kind to an API server.
pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

impl<K> Change<K> {
    /// The same, of objects in another form.
    pub fn map<T>(self, into: impl FnOnce(K) -> T) -> Change<T> {
        match self {
            Self::Restarted => Change::Restarted,
            Self::Complete => Change::Complete,
            Self::Apply(name, object) => Change::Apply(name, into(object)),
            Self::Delete(name) => Change::Delete(name),
            Self::Failed(why) => Change::Failed(why),
        }
    }
}

/// All changes of the cluster-scoped objects of a kind, from a full list on, as plain JSON.
pub fn all(client: Client, resource: &ApiResource) -> BoxStream<'static, Change> {
    all_as::<DynamicObject>(client, resource, PAGE)
        .map(|change| change.map(to_json))
        .boxed()
}

/// All changes of the cluster-scoped objects of a kind, from a full list on in pages of so many objects. `K` has to be
/// lenient: one object that can't be read makes the whole list fail.
pub fn all_as<K>(client: Client, resource: &ApiResource, page: u32) -> BoxStream<'static, Change<K>>
where
    K: Resource<DynamicType = ApiResource> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    objects(Api::all_with(client, resource), page)
}

/// The same, of the objects with these labels.
pub fn labelled_as<K>(
    client: Client,
    resource: &ApiResource,
    page: u32,
    labels: &str,
) -> BoxStream<'static, Change<K>>
where
    K: Resource<DynamicType = ApiResource> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let config = watcher::Config::default().page_size(page).labels(labels);
    matching(Api::all_with(client, resource), config)
}

/// The same, of the objects that `api` is about.
pub fn objects<K>(api: Api<K>, page: u32) -> BoxStream<'static, Change<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    matching(api, watcher::Config::default().page_size(page))
}

/// All changes of the objects of a kind with these labels in a namespace, as plain JSON.
pub fn labelled(
    client: Client,
    resource: &ApiResource,
    namespace: &str,
    labels: &str,
) -> BoxStream<'static, Change> {
    let api: Api<DynamicObject> = Api::namespaced_with(client, namespace, resource);
    let config = watcher::Config::default().page_size(PAGE).labels(labels);
    matching(api, config)
        .map(|change| change.map(to_json))
        .boxed()
}

/// A watch that never ends, begun anew the more seldom the longer it fails.
pub fn patient<K>(
    api: Api<K>,
    config: watcher::Config,
) -> BoxStream<'static, watcher::Result<Event<K>>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    begun_late(watcher(api, config)).default_backoff().boxed()
}

/// That a list begins is told with what is heard of it first: whatever is told has kube begin with the shortest pause again,
/// also before a list that is refused.
fn begun_late<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
) -> impl Stream<Item = watcher::Result<Event<K>>> {
    let told = events.scan(false, |begins, event| {
        let begun = std::mem::take(begins) && event.is_ok();
        let event = match event {
            Ok(Event::Init) => {
                *begins = true;
                None
            }
            event => Some(event),
        };
        ready(Some([begun.then_some(Ok(Event::Init)), event]))
    });
    told.flat_map(|events| stream::iter(events.into_iter().flatten()))
}

fn matching<K>(api: Api<K>, config: watcher::Config) -> BoxStream<'static, Change<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    patient(api, config)
        .map(|event| match event {
            Ok(Event::Init) => Change::Restarted,
            Ok(Event::InitDone) => Change::Complete,
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                Change::Apply(object.name_any(), object)
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

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[test]
    fn a_list_that_is_refused_has_not_begun() {
        let refused = || Err(watcher::Error::NoResourceVersion);
        let heard = stream::iter([
            Ok(Event::<()>::Init),
            refused(),
            Ok(Event::Init),
            refused(),
            Ok(Event::Init),
            Ok(Event::InitDone),
            Ok(Event::Apply(())),
            refused(),
        ]);
        let told = begun_late(heard).map(|event| match event {
            Ok(Event::Init) => "begins",
            Ok(_) => "tells",
            Err(_) => "fails",
        });
        let told: Option<Vec<_>> = told.collect::<Vec<_>>().now_or_never();
        let expected = ["fails", "fails", "begins", "tells", "tells", "fails"];
        assert_eq!(told.expect("all is there"), expected);
    }
}
