//! What the API server tells: this node, what it has to keep, its pods, and whether everything is stopped. Watches as the
//! kubelet's: filtered by the server, begun anew with growing, jittered pauses.

use std::fmt::Debug;

use futures::stream::{BoxStream, SelectAll, StreamExt};
use kube::api::DynamicObject;
use kube::core::Status;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::objects::{SeenNode, SeenPod, SeenWatermark};
use super::rules::Seen;
use crate::cluster::client::describe;
use crate::cluster::watch::{patient, resource};
use crate::crd::emergency_stop;

/// What is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// Our Node.
    Node,
    /// Our `NodeWatermark`.
    Watermark,
    /// The pods of our node.
    Pods,
    /// The object that stops every agent.
    Stop,
}

impl Source {
    /// The kind, as people know it.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Watermark => "NodeWatermark",
            Self::Pods => "Pod",
            Self::Stop => "ConfigMap",
        }
    }
}

/// Something that the API server told.
#[derive(Debug)]
pub enum Change {
    /// Of our Node.
    Node(Event<SeenNode>),
    /// Of our `NodeWatermark`.
    Watermark(Event<SeenWatermark>),
    /// Of the pods of our node.
    Pods(Event<SeenPod>),
    /// Of the object that stops every agent.
    Stop(Event<DynamicObject>),
    /// A watch failed, and is begun anew.
    Failed(Source, Failure),
}

/// Why a watch failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The HTTP code, where there was an answer.
    pub code: Option<u16>,
    /// In words, with what to do where that is known.
    pub why: String,
}

/// All changes, from a full list on.
pub type Feed = SelectAll<BoxStream<'static, Change>>;

/// Watches everything about a node, and the object in the namespace of the Leases that stops every agent.
pub fn feed(client: &Client, node: &str, lease_namespace: &str) -> Feed {
    let all = || client.clone();
    let named = |name: &str| format!("metadata.name={name}");
    let this = named(node);
    let on_node = format!("spec.nodeName={node}");
    let stop = named(emergency_stop::OBJECT);
    let config_maps = resource("", "v1", "ConfigMap", "configmaps");
    let config_maps = Api::namespaced_with(all(), lease_namespace, &config_maps);
    let mut feed = Feed::new();
    feed.push(changes(Api::all(all()), Source::Node, &this, Change::Node));
    let watermarks = Api::all(all());
    feed.push(changes(
        watermarks,
        Source::Watermark,
        &this,
        Change::Watermark,
    ));
    let pods = Api::all(all());
    feed.push(changes(pods, Source::Pods, &on_node, Change::Pods));
    feed.push(changes(config_maps, Source::Stop, &stop, Change::Stop));
    feed
}

fn changes<T>(
    api: Api<T>,
    source: Source,
    fields: &str,
    change: fn(Event<T>) -> Change,
) -> BoxStream<'static, Change>
where
    T: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    // Listed whole: that an API server answers from its cache, as it is at this moment (consistent reads, since 1.31). Pages
    // after the first it takes from etcd before 1.34, which goes through all pods of the cluster for each.
    let config = watcher::Config {
        page_size: None,
        ..watcher::Config::default().fields(fields)
    };
    patient(api, config)
        .map(move |event| match event {
            Ok(event) => change(event),
            Err(error) => Change::Failed(source, Failure::of(source, &error)),
        })
        .boxed()
}

impl Failure {
    fn of(source: Source, error: &watcher::Error) -> Self {
        let status = status(error);
        let code = status.map(|status| status.code);
        let said = status.map_or_else(|| describe(error), |status| status.message.clone());
        let why = match (source, code) {
            (Source::Watermark, Some(404)) => format!(
                "the definition of NodeWatermark is not installed (`plimsoll crds | kubectl apply --server-side -f -`): {said}"
            ),
            (Source::Stop, Some(403)) => format!(
                "the emergency stop can't be read, so that the last that was known of it holds: {said}"
            ),
            (_, Some(401)) => format!("the API server does not know who we are: {said}"),
            _ => said,
        };
        Self { code, why }
    }

    /// The server answers, and will not give it: no rules of ours will come.
    pub const fn is_refusal(&self) -> bool {
        matches!(self.code, Some(401 | 403 | 404))
    }
}

/// What the server answered.
fn status(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status),
        _ => None,
    }
}

/// An object that is watched by its name.
#[derive(Debug)]
pub struct Named<T> {
    /// What is known of it.
    pub seen: Seen<T>,
    /// In how many full lists it was.
    pub lists: u64,
    /// It was in the list that is being read.
    listed: bool,
}

impl<T> Default for Named<T> {
    fn default() -> Self {
        Self {
            seen: Seen::Unknown,
            lists: 0,
            listed: false,
        }
    }
}

impl<T> Named<T> {
    /// Takes a change.
    pub fn take(&mut self, event: Event<T>) {
        match event {
            Event::Init => self.listed = false,
            Event::InitApply(object) => {
                self.listed = true;
                self.lists += 1;
                self.seen = Seen::Present(object);
            }
            Event::InitDone if !self.listed => self.seen = Seen::Absent,
            Event::InitDone => {}
            Event::Apply(object) => self.seen = Seen::Present(object),
            Event::Delete(_) => self.seen = Seen::Absent,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn watermark() -> SeenWatermark {
        let object = json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}});
        serde_json::from_value(object).expect("an object")
    }

    #[test]
    fn an_object_that_is_not_in_a_full_list_is_not_there() {
        let mut named = Named::default();
        named.take(Event::Init);
        assert!(!named.seen.is_known());
        named.take(Event::InitDone);
        assert!(matches!(named.seen, Seen::Absent));
        named.take(Event::Apply(watermark()));
        assert!(named.seen.present().is_some());
        // While it is listed anew it is not taken for gone.
        named.take(Event::Init);
        assert!(named.seen.present().is_some());
        assert_eq!(named.lists, 0, "what it shows is not of a new list yet");
        named.take(Event::InitApply(watermark()));
        assert_eq!(named.lists, 1);
        named.take(Event::InitDone);
        assert!(named.seen.present().is_some());
        named.take(Event::Init);
        named.take(Event::InitDone);
        assert!(matches!(named.seen, Seen::Absent));
    }
}
