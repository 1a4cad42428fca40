//! Plimsoll: a `QoS` operator for Kubernetes nodes, and the same enforcement for a single Linux machine.
//!
//! Imports go one way; `tests/pure/layers.rs` has the layers and enforces them. Elsewhere than on Linux, the node side and the
//! daemons are left out, and the commands of clients remain: `scripts/check-macos`.

#[cfg(target_os = "linux")]
pub mod agent;
pub mod cli;
pub mod clock;
pub mod cluster;
pub mod crd;
#[cfg(target_os = "linux")]
pub mod demo;
pub mod engine;
pub mod evictions;
#[cfg(all(target_os = "linux", any(test, feature = "fuzz")))]
#[doc(hidden)]
pub mod fuzz;
pub mod messages;
pub mod metrics_api;
#[cfg(target_os = "linux")]
pub mod node;
#[cfg(target_os = "linux")]
pub mod polling;
pub mod preview;
#[cfg(target_os = "linux")]
pub mod reconcilers;
#[cfg(target_os = "linux")]
pub mod scene;
pub mod scheduler_api;
pub mod serve;
pub mod standalone;
pub mod trace;
