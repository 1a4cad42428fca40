//! Those who act on a plan.

pub mod evict;
pub mod reclaim;
pub mod taint;
pub mod throttle;
