//! Publishes Kubernetes events. Equal ones are counted, not repeated.
//!
//! kube's own recorder treats two events with different messages as equal, and shows only the first. It also writes through
//! `events.k8s.io/v1`, which refuses `lastTimestamp` and `count`: `kubectl get events --sort-by=.lastTimestamp` can't sort such
//! events.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Event, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::client::{CallError, call, stored};
use crate::clock;
use crate::engine::time::BootTime;

/// Equal events within this time are counted as one.
const SERIES_WINDOW: Duration = Duration::from_mins(6);
/// The namespace of events about cluster-scoped objects.
const DEFAULT_NAMESPACE: &str = "default";

/// An event to publish.
#[derive(Clone, Debug, PartialEq)]
pub struct EventSpec {
    /// The object it is about.
    pub about: ObjectReference,
    /// Its type is `Warning`, otherwise `Normal`.
    pub warning: bool,
    /// CamelCase reason.
    pub reason: String,
    /// CamelCase action.
    pub action: String,
    /// Human-readable message.
    pub message: String,
}

/// A reference to a node, with its name as UID, as the kubelet writes it: `kubectl describe node` looks for that.
pub fn node_reference(name: &str) -> ObjectReference {
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

/// An event that was published.
#[derive(Clone, Debug)]
struct Written {
    name: String,
    count: i32,
    last: BootTime,
}

/// Publishes events.
#[derive(Clone)]
pub struct Events {
    client: Client,
    component: String,
    instance: String,
    written: Arc<Mutex<Vec<(Key, Written)>>>,
}

impl Events {
    /// A publisher for this component and instance.
    pub fn new(client: Client, component: &str, instance: &str) -> Self {
        Self {
            client,
            component: component.to_owned(),
            instance: instance.to_owned(),
            written: Arc::default(),
        }
    }

    /// Publishes an event with the current time.
    ///
    /// # Errors
    /// As [`Self::publish_at`].
    pub async fn publish(&self, event_spec: EventSpec) -> Result<(), CallError> {
        self.publish_at(event_spec, clock::wall_time()).await
    }

    /// Publishes an event of this time. Idempotent: a retry with the same time writes the same event.
    ///
    /// # Errors
    /// The API server refused it, or did not answer.
    pub async fn publish_at(&self, event_spec: EventSpec, at: Timestamp) -> Result<(), CallError> {
        let namespace = event_spec.about.namespace.clone();
        let namespace = namespace.unwrap_or_else(|| DEFAULT_NAMESPACE.to_owned());
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let key = (
            event_spec.about.clone(),
            event_spec.reason.clone(),
            event_spec.message.clone(),
        );
        if let Some(known) = self.known(&key) {
            match count(&api, &known, at).await {
                // It has expired, or was deleted.
                Err(error) if error.code() == Some(404) => {}
                counted => {
                    return counted.map(|()| self.remember(key, known.name, known.count + 1));
                }
            }
        }
        let by = [self.component.clone(), self.instance.clone()];
        let event = event(by, event_spec, at, &namespace);
        let name = event.metadata.name.clone().unwrap_or_default();
        match call(stored(api.create(&PostParams::default(), &event))).await {
            // An earlier attempt, whose response was lost, succeeded.
            Err(error) if error.code() == Some(409) => {}
            created => drop(created?),
        }
        self.remember(key, name, 1);
        Ok(())
    }

    /// The last equal event, if it is recent.
    fn known(&self, key: &Key) -> Option<Written> {
        let now = clock::boot_time();
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(_, known)| now.since(known.last) < SERIES_WINDOW);
        let found = written.iter().find(|(known, _)| known == key);
        found.map(|(_, known)| known.clone())
    }

    fn remember(&self, key: Key, name: String, count: i32) {
        let last = clock::boot_time();
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|(known, _)| *known != key);
        written.push((key, Written { name, count, last }));
    }
}

fn event(
    [component, instance]: [String; 2],
    event_spec: EventSpec,
    at: Timestamp,
    namespace: &str,
) -> Event {
    let about = event_spec.about.name.as_deref().unwrap_or(&component);
    let type_ = if event_spec.warning {
        "Warning"
    } else {
        "Normal"
    };
    Event {
        metadata: ObjectMeta {
            namespace: Some(namespace.to_owned()),
            name: Some(format!("{about}.{:x}", at.as_nanosecond())),
            ..ObjectMeta::default()
        },
        type_: Some(type_.to_owned()),
        event_time: Some(MicroTime(at)),
        first_timestamp: Some(Time(at)),
        last_timestamp: Some(Time(at)),
        count: Some(1),
        reporting_component: Some(component),
        reporting_instance: Some(instance),
        action: Some(event_spec.action),
        reason: Some(event_spec.reason),
        message: Some(event_spec.message),
        involved_object: event_spec.about,
        ..Event::default()
    }
}

/// The patch for one more occurrence.
fn recurrence(known: &Written, at: Timestamp) -> Value {
    json!({"count": known.count + 1, "lastTimestamp": Time(at)})
}

async fn count(api: &Api<Event>, known: &Written, at: Timestamp) -> Result<(), CallError> {
    let patch = Patch::Merge(recurrence(known, at));
    let params = PatchParams::default();
    call(stored(api.patch(&known.name, &params, &patch)))
        .await
        .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_its_first_and_last_time_and_count() {
        let event_spec = EventSpec {
            about: node_reference("worker"),
            warning: true,
            reason: "RuleBreached".to_owned(),
            action: "RuleBreached".to_owned(),
            message: "above its threshold".to_owned(),
        };
        let by = ["plimsoll-agent".to_owned(), "worker".to_owned()];
        let at = |text: &str| -> Timestamp { text.parse().expect("a time") };
        let first = "2026-01-01T00:00:00Z";
        let event = event(by, event_spec, at(first), "default");
        let event = serde_json::to_value(event).expect("JSON");
        assert_eq!(
            (&event["firstTimestamp"], &event["lastTimestamp"]),
            (&json!(first), &json!(first)),
            "kubectl sorts by lastTimestamp"
        );
        assert_eq!(event["count"], 1);
        let known = Written {
            name: String::new(),
            count: 1,
            last: BootTime::default(),
        };
        let last = "2026-01-01T00:05:00Z";
        let patch = json!({"count": 2, "lastTimestamp": last});
        assert_eq!(recurrence(&known, at(last)), patch);
    }
}
