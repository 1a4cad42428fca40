//! What an agent tells: the status of its `NodeWatermark`, events, and the `NodeMetric` of its node.

pub mod conditions;
pub mod events;
pub mod farewell;
pub mod node_metric;
mod obstacles;
pub mod pace;
pub mod publish;
pub mod status;
pub mod write;
