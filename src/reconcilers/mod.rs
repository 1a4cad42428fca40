//! The controller: compiles policies into one `NodeWatermark` per node, and reports in the policies' statuses. It is a pipeline with a
//! directory for each stage, which imports earlier ones only:
//!
//! - `observe`: watches, and objects decoded as far as they are used
//! - `compile`: the index of nodes with their compiled policies and `NodeWatermarks`
//! - `plan`: what may be written now: rollouts, the cap on unschedulable nodes, unresponsive agents, the write queue
//! - `apply`: operations on the API server
//! - `status`: the statuses of policies
//!
//! [`reconciler::Reconciler`] holds the state of the pipeline and does no I/O; [`run`] feeds it from watches and carries out what it
//! plans.

mod apply;
mod compile;
mod events;
pub mod metrics;
mod observe;
mod plan;
pub mod reconciler;
mod retry;
pub mod run;
mod status;

pub use observe::wire;
pub use plan::{cap, liveness};

/// One series of every controller metric in the `OpenMetrics` text format, for the documentation.
pub fn metrics_example() -> String {
    metrics::ControllerMetrics::example()
}
