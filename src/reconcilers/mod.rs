//! The controller: compiles policies into one `NodeWatermark` per node, and reports in the policies' statuses.
//!
//! [`reconciler::Reconciler`] decides and does no I/O; [`run`] feeds it from watches and carries out what it plans.

pub mod attempt;
pub mod cap;
pub mod catalog;
pub mod conditions;
pub mod content;
pub mod lease;
pub mod liveness;
pub mod metrics;
pub mod reconciler;
pub mod rollout;
pub mod run;
pub mod tightening;
pub mod wire;

/// One series of every controller metric in the `OpenMetrics` text format, for the documentation.
pub fn metrics_example() -> String {
    metrics::Metrics::example()
}
