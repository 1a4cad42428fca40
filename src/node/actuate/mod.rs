//! Actuators: they carry out a plan.

pub mod evict;
pub mod reclaim;
pub mod throttle;
