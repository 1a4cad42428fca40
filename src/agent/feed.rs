//! Watches of the Node, its `NodeWatermark`, its pods and the emergency stop: filtered by the server and restarted with
//! a jittered backoff, as the kubelet's.

use std::fmt::Debug;

use futures::stream::{BoxStream, SelectAll, StreamExt};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::core::Status;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;

use super::objects::{SeenNode, SeenPod, SeenWatermark};
use super::rules::Seen;
use crate::cluster::client::describe;
use crate::cluster::watch::with_backoff;
use crate::crd::emergency_stop;

/// A watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AgentWatch {
    /// Our Node.
    Node,
    /// Our `NodeWatermark`.
    Watermark,
    /// The pods of our node.
    Pods,
    /// The emergency stop.
    Stop,
}

impl AgentWatch {
    /// The kind of the objects.
    pub const fn kind(self) -> &'static str {
        match self {
            Self::Node => "Node",
            Self::Watermark => "NodeWatermark",
            Self::Pods => "Pod",
            Self::Stop => "ConfigMap",
        }
    }
}

/// A change seen by a watch.
#[derive(Debug)]
pub enum WatchChange {
    /// Of our Node.
    Node(Event<SeenNode>),
    /// Of our `NodeWatermark`.
    Watermark(Event<SeenWatermark>),
    /// Of the pods of our node.
    Pods(Event<SeenPod>),
    /// Of the emergency stop.
    Stop(Event<ConfigMap>),
    /// A watch failed and is restarted.
    Failed(AgentWatch, Failure),
}

/// Why a watch failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The HTTP code, if there was an answer.
    pub code: Option<u16>,
    /// The reason, with what to do where that is known.
    pub why: String,
}

/// All changes, starting from a full list.
pub type Feed = SelectAll<BoxStream<'static, WatchChange>>;

/// Watches everything about a node, and the emergency stop in the namespace of the Leases.
pub fn feed(client: &Client, node: &str, lease_namespace: &str) -> Feed {
    let all = || client.clone();
    let by_name = |name: &str| format!("metadata.name={name}");
    let this = by_name(node);
    let on_node = format!("spec.nodeName={node}");
    let stop = by_name(emergency_stop::OBJECT);
    let config_maps = Api::namespaced(all(), lease_namespace);
    let mut feed = Feed::new();
    feed.push(changes(
        Api::all(all()),
        AgentWatch::Node,
        &this,
        WatchChange::Node,
    ));
    let watermarks = Api::all(all());
    feed.push(changes(
        watermarks,
        AgentWatch::Watermark,
        &this,
        WatchChange::Watermark,
    ));
    let pods = Api::all(all());
    feed.push(changes(pods, AgentWatch::Pods, &on_node, WatchChange::Pods));
    feed.push(changes(
        config_maps,
        AgentWatch::Stop,
        &stop,
        WatchChange::Stop,
    ));
    feed
}

fn changes<T>(
    api: Api<T>,
    source: AgentWatch,
    fields: &str,
    change: fn(Event<T>) -> WatchChange,
) -> BoxStream<'static, WatchChange>
where
    T: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    // Unpaged: the API server answers from its cache (consistent reads, since 1.31). Before 1.34 it reads later pages from
    // etcd, scanning all pods of the cluster for each.
    let config = watcher::Config {
        page_size: None,
        ..watcher::Config::default().fields(fields)
    };
    with_backoff(api, config)
        .map(move |event| match event {
            Ok(event) => change(event),
            Err(error) => WatchChange::Failed(source, Failure::of(source, &error)),
        })
        .boxed()
}

impl Failure {
    fn of(source: AgentWatch, error: &watcher::Error) -> Self {
        let status = status(error);
        let code = status.map(|status| status.code);
        let message = status.map_or_else(|| describe(error), |status| status.message.clone());
        let why = match (source, code) {
            (AgentWatch::Watermark, Some(404)) => format!(
                "the CRD of NodeWatermark is not installed (`plimsoll crds | kubectl apply --server-side -f -`): {message}"
            ),
            (AgentWatch::Stop, Some(403)) => format!(
                "failed to read the emergency stop; its last known state applies: {message}"
            ),
            (_, Some(401)) => {
                format!("the API server does not accept the agent's credentials: {message}")
            }
            _ => message,
        };
        Self { code, why }
    }

    /// The server answers and refuses: no rules will come.
    pub const fn is_refusal(&self) -> bool {
        matches!(self.code, Some(401 | 403 | 404))
    }
}

/// The server's answer.
fn status(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status),
        _ => None,
    }
}

/// An object watched by name.
#[derive(Debug)]
pub struct WatchedObject<T> {
    /// Its last known state.
    pub seen: Seen<T>,
    /// How many full lists contained it.
    pub lists: u64,
    /// It was in the list being read.
    listed: bool,
}

impl<T> Default for WatchedObject<T> {
    fn default() -> Self {
        Self {
            seen: Seen::Unknown,
            lists: 0,
            listed: false,
        }
    }
}

impl<T> WatchedObject<T> {
    /// Handles a watch event.
    pub fn apply(&mut self, event: Event<T>) {
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
    fn an_object_missing_from_a_full_list_is_absent() {
        let mut object = WatchedObject::default();
        object.apply(Event::Init);
        assert!(!object.seen.is_known());
        object.apply(Event::InitDone);
        assert!(matches!(object.seen, Seen::Absent));
        object.apply(Event::Apply(watermark()));
        assert!(object.seen.present().is_some());
        // It stays present while it is listed again.
        object.apply(Event::Init);
        assert!(object.seen.present().is_some());
        assert_eq!(object.lists, 0, "the new list is not read yet");
        object.apply(Event::InitApply(watermark()));
        assert_eq!(object.lists, 1);
        object.apply(Event::InitDone);
        assert!(object.seen.present().is_some());
        object.apply(Event::Init);
        object.apply(Event::InitDone);
        assert!(matches!(object.seen, Seen::Absent));
    }
}
