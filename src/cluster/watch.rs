//! Watches that never end. Objects come as plain JSON, so that one bad object can't stop a watch.

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

/// A change to the objects of one kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Change<K = Value> {
    /// A new list starts: all objects follow, each as an `Apply`.
    Restarted,
    /// The list is complete.
    Complete,
    /// An object was added or changed.
    Apply(String, K),
    /// An object was deleted.
    Delete(String),
    /// The watch failed and is retried; the error message.
    Failed(String),
}

/// The API resource of a kind.
pub fn resource(group: &str, version: &str, kind: &str, plural: &str) -> ApiResource {
    ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural)
}

impl<K> Change<K> {
    /// The same change with another representation of the object.
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

/// Lists and watches the cluster-scoped objects of a kind, as plain JSON.
pub fn all(client: Client, resource: &ApiResource) -> BoxStream<'static, Change> {
    all_as::<DynamicObject>(client, resource, PAGE)
        .map(|change| change.map(to_json))
        .boxed()
}

/// Lists (in pages of `page` objects) and watches the cluster-scoped objects of a kind. `K` has to be lenient: one object that
/// can't be decoded makes the whole list fail.
pub fn all_as<K>(client: Client, resource: &ApiResource, page: u32) -> BoxStream<'static, Change<K>>
where
    K: Resource<DynamicType = ApiResource> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    objects(Api::all_with(client, resource), page)
}

/// As [`all_as`], for the objects with these labels.
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

/// As [`all_as`], for the objects of `api`.
pub fn objects<K>(api: Api<K>, page: u32) -> BoxStream<'static, Change<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    matching(api, watcher::Config::default().page_size(page))
}

/// Lists and watches the objects with these labels in a namespace, as plain JSON.
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

/// A watch that never ends, restarted with exponential backoff.
pub fn with_backoff<K>(
    api: Api<K>,
    config: watcher::Config,
) -> BoxStream<'static, watcher::Result<Event<K>>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    delay_init(watcher(api, config)).default_backoff().boxed()
}

/// Holds `Init` back until the first event of the list: any event resets kube's backoff, even `Init` before a list that is
/// refused.
fn delay_init<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
) -> impl Stream<Item = watcher::Result<Event<K>>> {
    let delayed = events.scan(false, |init, event| {
        let started = std::mem::take(init) && event.is_ok();
        let event = match event {
            Ok(Event::Init) => {
                *init = true;
                None
            }
            event => Some(event),
        };
        ready(Some([started.then_some(Ok(Event::Init)), event]))
    });
    delayed.flat_map(|events| stream::iter(events.into_iter().flatten()))
}

fn matching<K>(api: Api<K>, config: watcher::Config) -> BoxStream<'static, Change<K>>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    with_backoff(api, config)
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

/// The object without its managed fields, which are large and not used.
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
    fn a_refused_list_emits_no_init() {
        let refused = || Err(watcher::Error::NoResourceVersion);
        let events = stream::iter([
            Ok(Event::<()>::Init),
            refused(),
            Ok(Event::Init),
            refused(),
            Ok(Event::Init),
            Ok(Event::InitDone),
            Ok(Event::Apply(())),
            refused(),
        ]);
        let names = delay_init(events).map(|event| match event {
            Ok(Event::Init) => "init",
            Ok(_) => "event",
            Err(_) => "error",
        });
        let names: Option<Vec<_>> = names.collect::<Vec<_>>().now_or_never();
        let expected = ["error", "error", "init", "event", "event", "error"];
        assert_eq!(names.expect("the stream is ready"), expected);
    }
}
