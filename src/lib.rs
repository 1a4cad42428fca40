//! Plimsoll: a `QoS` operator for Kubernetes nodes, and the same enforcement for a single Linux machine.
//!
//! Imports go one way; `tests/pure/layers.rs` has the layers and enforces them.

pub mod agent;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod crd;
pub mod demo;
pub mod engine;
pub mod evictions;
#[cfg(any(test, feature = "fuzz"))]
#[doc(hidden)]
pub mod fuzz;
pub mod messages;
pub mod metrics_api;
pub mod node;
pub mod polling;
pub mod preview;
pub mod reconcilers;
pub mod scene;
pub mod scheduler_api;
pub mod serve;
pub mod standalone;
pub mod trace;
