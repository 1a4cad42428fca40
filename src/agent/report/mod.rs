//! What an agent reports: the status of its `NodeWatermark`, events, and the `NodeMetric` of its node.

pub mod conditions;
pub mod events;
pub mod final_status;
pub mod node_metric;
mod obstacles;
pub mod publish;
pub mod status;
pub mod status_schedule;
pub mod write;
