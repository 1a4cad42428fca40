//! Those who act on a plan.

pub mod api;
pub mod evict;
pub mod evict_api;
pub mod reclaim;
pub mod taint;
pub mod throttle;
