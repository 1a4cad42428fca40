//! Plans what may be written now. Pure.

pub mod cap;
mod conflicts;
pub mod liveness;
pub mod permit;
pub mod progress;
pub mod queue;
pub mod rollout;
pub mod rollouts;
mod targets;
pub mod tightening;
