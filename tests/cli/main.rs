//! The commands as processes, without a cluster.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/bad_input/mod.rs"]
mod bad_input;
#[path = "../support/run/mod.rs"]
mod run_support;

mod check_bad_input;
mod connection;
mod demo;
mod replay_trace;
mod run_actions;
mod run_daemon;
mod run_fake_clock;
mod run_inputs;
mod run_restart;
mod run_windows;
