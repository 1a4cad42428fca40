//! Actuators: they carry out a plan.

pub mod api;
pub mod evict;
pub mod evict_api;
pub mod reclaim;
pub mod taint;
pub mod throttle;
