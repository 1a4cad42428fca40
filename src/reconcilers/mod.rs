//! The controller: compiles policies into one `NodeWatermark` a node, and says what it makes of them.
//!
//! [`world::World`] decides, and does no I/O; [`run`] feeds it from watches and carries out what it plans.

pub mod attempt;
pub mod cap;
pub mod catalog;
pub mod conditions;
pub mod content;
pub mod lease;
pub mod metrics;
pub mod restrain;
pub mod rollout;
pub mod run;
pub mod silence;
pub mod wire;
pub mod world;

/// One series of every metric of the controller, in the text format of `OpenMetrics`: for the documentation.
pub fn metrics_example() -> String {
    metrics::Metrics::example()
}
