//! What an agent reports: the status of its `NodeWatermark`, events, and the `NodeMetric` of its node.

pub mod conditions;
pub mod events;
pub mod final_status;
pub mod node_metric;
mod obstacles;
pub mod pace;
pub mod publish;
pub mod status;
pub mod write;
