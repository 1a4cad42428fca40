//! Agent, controller and commands against a real API server and etcd.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/actor/mod.rs"]
mod actor_support;
#[path = "../support/agent/mod.rs"]
mod agent_support;
#[path = "../support/api/mod.rs"]
mod api_support;
#[path = "../support/bad_input/mod.rs"]
mod bad_input;
#[path = "../support/chart/mod.rs"]
mod chart_support;
#[path = "../support/run/mod.rs"]
mod run_support;

mod agent;
mod agent_faults;
mod agent_report;
mod aggregated;
mod aggregated_access;
mod aggregated_end;
mod aggregated_watcher;
mod certificates;
mod controller;
mod crane;
mod crane_permissions;
mod dead_agent;
mod definitions;
mod direct_report;
mod doctor;
mod evict;
mod eviction;
mod extender;
mod faults;
mod flow_control;
mod heartbeat;
mod load_label;
mod node_metric;
mod permissions;
mod placement;
mod polling;
mod preview;
mod report;
mod scheduler_api;
mod stolen_token;
mod stop;
mod taint;
mod top;
