//! Plans what may be written now. Pure.

pub mod cap;
mod conflicts;
pub mod liveness;
pub mod operations;
pub mod permit;
pub mod progress;
pub mod queue;
pub mod rollout;
pub mod rollouts;
pub mod settings;
mod targets;
pub mod tightening;
