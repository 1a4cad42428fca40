//! Plimsoll: a `QoS` operator for Kubernetes nodes, and the same enforcement for a single Linux machine.
//!
//! Imports go one way: `cli -> {demo, standalone} -> {node, trace} -> crd -> engine`.

pub mod cli;
pub mod crd;
pub mod demo;
pub mod engine;
pub mod node;
pub mod standalone;
pub mod trace;
