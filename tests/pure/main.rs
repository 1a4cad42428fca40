//! What needs neither the kernel nor an API server: decisions, policies, controller, files.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

#[path = "../support/chart/mod.rs"]
mod chart_support;
#[path = "../support/collect/mod.rs"]
mod collect_support;
#[path = "../support/engine/mod.rs"]
mod engine_support;
#[path = "../support/placement/mod.rs"]
mod placement;
#[path = "../support/reconciler/mod.rs"]
mod reconciler_support;
#[path = "../support/simulation/mod.rs"]
mod simulation;

mod dockerfile;
mod docs;
mod layers;
mod preview;

mod controller {
    mod election;
    mod heartbeat;
    mod node_metric_store;
    mod reconciler;
    mod rollout;
    mod unresponsive;
}

mod crd {
    mod compile;
    mod definitions;
    mod examples;
    mod node_watermark;
}

mod engine {
    mod closed_loop;
    mod evict;
    mod hours;
    mod idle_class;
    mod invariants;
    mod ladder;
    mod load;
    mod load_of_throttled;
    mod placement;
    mod placement_comparison;
    mod preview;
    mod purity;
    mod release;
    mod restart;
    mod rule_model;
    mod standing;
    mod throttle;
    mod values;
    mod weight_share;
}

mod node {
    mod collect_files;
    mod collect_probe;
    mod layout_detect;
    mod layout_kubepods;
}
