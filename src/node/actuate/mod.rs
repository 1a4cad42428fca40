//! Those who act on a plan.

pub mod throttle;
