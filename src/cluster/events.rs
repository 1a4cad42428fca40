//! Events: what people see in `kubectl describe`. Equal ones are counted, not repeated.
//!
//! The recorder of the client library takes two events for equal whose messages differ, and shows the first alone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use super::client::{CallError, call, stored};
use super::clock;
use crate::engine::time::BootTime;

/// Equal events within so long are one.
const SERIES: Duration = Duration::from_mins(6);
/// Where events about objects of no namespace are.
const DEFAULT_NAMESPACE: &str = "default";

/// Something that happened to an object.
#[derive(Clone, Debug, PartialEq)]
pub struct Happening {
    /// The object.
    pub about: ObjectReference,
    /// Something is wrong.
    pub warning: bool,
    /// One word for it.
    pub reason: String,
    /// What was done, one word.
    pub action: String,
    /// What happened.
    pub message: String,
}

/// A node, as events are about it: with its name as UID, as the kubelet's are, since `kubectl describe node` looks for it.
pub fn about_node(name: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Node".to_owned()),
        name: Some(name.to_owned()),
        uid: Some(name.to_owned()),
        ..ObjectReference::default()
    }
}

/// What makes events equal: object, reason and message.
type Key = (ObjectReference, String, String);

/// An event that was written.
#[derive(Clone, Debug)]
struct Written {
    name: String,
    count: i32,
    last: BootTime,
}

/// Writes events.
#[derive(Clone)]
pub struct Events {
    client: Client,
    component: String,
    instance: String,
    written: Arc<Mutex<Vec<(Key, Written)>>>,
}

impl Events {
    /// In the name of this component, on this instance.
    pub fn new(client: Client, component: &str, instance: &str) -> Self {
        Self {
            client,
            component: component.to_owned(),
            instance: instance.to_owned(),
            written: Arc::default(),
        }
    }

    /// Writes one that happened just now.
    ///
    /// # Errors
    /// As [`Self::publish_of`].
    pub async fn publish(&self, happening: Happening) -> Result<(), CallError> {
        self.publish_of(happening, clock::wall()).await
    }

    /// Writes one that happened at this time. Written again with the same time it is the same event.
    ///
    /// # Errors
    /// The API server refused it, or did not answer.
    pub async fn publish_of(&self, happening: Happening, at: Timestamp) -> Result<(), CallError> {
        let namespace = happening.about.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let key = (
            happening.about.clone(),
            happening.reason.clone(),
            happening.message.clone(),
        );
        if let Some(known) = self.known(&key) {
            match count(&api, &known, at).await {
                // It has expired, or somebody deleted it.
                Err(error) if error.code() == Some(404) => {}
                counted => {
                    return counted.map(|()| self.remember(key, known.name, known.count + 1));
                }
            }
        }
        let event = self.event(happening, at, &namespace);
        let name = event.metadata.name.clone().unwrap_or_default();
        match call(stored(api.create(&PostParams::default(), &event))).await {
            // An earlier try, whose answer was lost, was carried out.
            Err(error) if error.code() == Some(409) => {}
            created => drop(created?),
        }
        self.remember(key, name, 1);
        Ok(())
    }

    /// An equal one of a short while ago.
    fn known(&self, key: &Key) -> Option<Written> {
        let now = clock::now();
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(_, known)| now.since(known.last) < SERIES);
        let found = written.iter().find(|(known, _)| known == key);
        found.map(|(_, known)| known.clone())
    }

    fn remember(&self, key: Key, name: String, count: i32) {
        let last = clock::now();
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(known, _)| *known != key);
        written.push((key, Written { name, count, last }));
    }

    fn event(&self, happening: Happening, at: Timestamp, namespace: &str) -> Event {
        let about = happening.about.name.as_deref().unwrap_or(&self.component);
        Event {
            metadata: ObjectMeta {
                namespace: Some(namespace.to_owned()),
                name: Some(format!("{about}.{:x}", at.as_nanosecond())),
                ..ObjectMeta::default()
            },
            type_: Some(
                if happening.warning {
                    "Warning"
                } else {
                    "Normal"
                }
                .to_owned(),
            ),
            event_time: Some(MicroTime(at)),
            reporting_controller: Some(self.component.clone()),
            reporting_instance: Some(self.instance.clone()),
            action: Some(happening.action),
            reason: Some(happening.reason),
            note: Some(happening.message),
            regarding: Some(happening.about),
            ..Event::default()
        }
    }
}

async fn count(api: &Api<Event>, known: &Written, at: Timestamp) -> Result<(), CallError> {
    let series = EventSeries {
        count: known.count + 1,
        last_observed_time: MicroTime(at),
    };
    let patch = Patch::Merge(json!({"series": series}));
    let params = PatchParams::default();
    call(stored(api.patch(&known.name, &params, &patch)))
        .await
        .map(drop)
}
