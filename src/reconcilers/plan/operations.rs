//! Operations on the API server: what the plan orders and `apply` carries out.

use std::time::Duration;

use serde_json::Value;

use crate::reconcilers::compile::catalog::Key;
use crate::reconcilers::compile::content::DesiredSpec;

/// An operation on the API server.
#[derive(Clone, Debug)]
pub enum Operation {
    /// Apply the `NodeWatermark` of a node.
    Apply {
        /// Its node.
        node: String,
        /// The spec to apply.
        spec: DesiredSpec,
    },
    /// Delete the `NodeWatermark` of a deleted node.
    Delete {
        /// The node.
        node: String,
        /// The object's UID, as a precondition.
        uid: String,
    },
    /// Read the Lease of an agent that seems unresponsive.
    ReadLease {
        /// The node.
        node: String,
    },
    /// Remove the load label of a node whose agent is unresponsive.
    RemoveLabel {
        /// The node.
        node: String,
        /// Its UID, as a precondition.
        uid: String,
    },
    /// Remove our taint from a node whose agent is unresponsive.
    RemoveTaint {
        /// The node.
        node: String,
        /// Its UID, as a precondition.
        uid: String,
    },
}

/// Why a write failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteError {
    /// The delay that the API server asks for.
    pub retry_after: Option<Duration>,
}

/// The status of one policy object.
#[derive(Clone, Debug, PartialEq)]
pub struct StatusWrite {
    /// Which object.
    pub key: Key,
    /// The new status.
    pub status: Value,
}
