//! Events to publish.

use crate::crd::Kind;

/// The object of an event.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EventSubject {
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
    pub about: EventSubject,
    /// Its type is `Warning`, otherwise `Normal`.
    pub warning: bool,
    /// CamelCase reason.
    pub reason: &'static str,
    /// Human-readable message.
    pub message: String,
}

impl PendingEvent {
    /// A warning about a node.
    pub fn node_warning(node: &str, reason: &'static str, message: String) -> Self {
        Self {
            about: EventSubject::Node(node.to_owned()),
            warning: true,
            reason,
            message,
        }
    }

    /// A normal event about a node.
    pub fn node(node: &str, reason: &'static str, message: String) -> Self {
        Self {
            warning: false,
            ..Self::node_warning(node, reason, message)
        }
    }

    /// An event about the controller.
    pub const fn controller(warning: bool, reason: &'static str, message: String) -> Self {
        Self {
            about: EventSubject::Controller,
            warning,
            reason,
            message,
        }
    }
}
