//! Events to publish.

use super::Reconciler;
use crate::crd::Kind;

/// The object of an event.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A node, by name.
    Node(String),
    /// A policy object.
    Policy {
        /// Its kind.
        kind: Kind,
        /// Its name.
        name: String,
        /// Its UID, by which `kubectl describe` finds the events.
        uid: String,
    },
    /// The controller itself.
    Controller,
}

/// An event to publish.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PendingEvent {
    /// The object.
    pub about: Subject,
    /// Its type is `Warning`, otherwise `Normal`.
    pub warning: bool,
    /// CamelCase reason.
    pub reason: &'static str,
    /// Human-readable message.
    pub message: String,
}

impl Reconciler {
    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<PendingEvent> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn warn_node(&mut self, node: &str, reason: &'static str, message: String) {
        self.node_event(node, true, reason, message);
    }

    pub(super) fn node_event(
        &mut self,
        node: &str,
        warning: bool,
        reason: &'static str,
        message: String,
    ) {
        self.events.push(PendingEvent {
            about: Subject::Node(node.to_owned()),
            warning,
            reason,
            message,
        });
    }

    pub(super) fn controller_event(
        &mut self,
        warning: bool,
        reason: &'static str,
        message: String,
    ) {
        self.events.push(PendingEvent {
            about: Subject::Controller,
            warning,
            reason,
            message,
        });
    }
}
