//! What people are told of, once.

use super::World;
use crate::crd::Kind;

/// What something is about.
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
        /// Its UID: `kubectl describe` shows the events that bear it.
        uid: String,
    },
    /// The controller and all nodes.
    Fleet,
}

/// Something to tell people of, once.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Note {
    /// What it is about.
    pub about: Subject,
    /// Something is wrong.
    pub warning: bool,
    /// One word for it.
    pub reason: &'static str,
    /// What happened.
    pub message: String,
}

impl World {
    /// What happened since the last call.
    pub fn take_notes(&mut self) -> Vec<Note> {
        std::mem::take(&mut self.notes)
    }

    pub(super) fn warn_node(&mut self, node: &str, reason: &'static str, message: String) {
        self.note_node(node, true, reason, message);
    }

    pub(super) fn note_node(
        &mut self,
        node: &str,
        warning: bool,
        reason: &'static str,
        message: String,
    ) {
        self.notes.push(Note {
            about: Subject::Node(node.to_owned()),
            warning,
            reason,
            message,
        });
    }

    pub(super) fn note_fleet(&mut self, warning: bool, reason: &'static str, message: String) {
        self.notes.push(Note {
            about: Subject::Fleet,
            warning,
            reason,
            message,
        });
    }
}
