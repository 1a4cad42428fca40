//! What an agent tells the API server: the status of its `NodeWatermark`, and events.

pub mod conditions;
pub mod events;
pub mod farewell;
pub mod pace;
pub mod publish;
pub mod status;
pub mod write;
