//! The statuses of policies. Pure.

mod conditions;
pub mod policies;
