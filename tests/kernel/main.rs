//! Real cgroups of this machine: v1 or v2, whatever it has. The guest runs it on v2.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/collect/mod.rs"]
mod collect_support;
#[path = "../support/engine/mod.rs"]
mod engine_support;
#[path = "../support/kernel/mod.rs"]
mod kernel_support;
#[path = "../support/simulation/mod.rs"]
mod simulation;

mod closed_loop;
mod collect_real;
mod cpu;
mod crash;
mod evict;
mod journal;
mod load;
mod reclaim;
mod reference;
mod restore;
mod throttle;
