//! Those who act on a plan.
