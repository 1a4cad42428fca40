//! Observes the cluster: watches, and objects decoded as far as they are used.

pub mod watches;
pub mod wire;
