//! Events: what people see in `kubectl describe`. Equal ones are counted, not repeated.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};

use super::client::{CallError, call};

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

/// Writes events.
#[derive(Clone)]
pub struct Events(Recorder);

impl Events {
    /// In the name of this component, on this instance.
    pub fn new(client: Client, component: &str, instance: &str) -> Self {
        let reporter = Reporter {
            controller: component.to_owned(),
            instance: Some(instance.to_owned()),
        };
        Self(Recorder::new(client, reporter))
    }

    /// Writes one.
    ///
    /// # Errors
    /// The API server refused it, or did not answer. Nothing rests on an event: it is not tried again.
    pub async fn publish(&self, happening: Happening) -> Result<(), CallError> {
        let event = Event {
            type_: if happening.warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: happening.reason,
            note: Some(happening.message),
            action: happening.action,
            secondary: None,
        };
        call(self.0.publish(&event, &happening.about)).await
    }
}
