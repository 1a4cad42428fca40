//! Time from a node exceeding its threshold until the API server shows our taint.
//!
//! `cargo bench --bench taint --target x86_64-unknown-linux-musl [-- --phases 30 --binary FILE --assert]`
//!
//! The real binary, sampling every second, against a real API server, with a rule of period 1 s and `avoidanceThreshold` 2.
//! The node's CPU counters are fake, so that the breach starts at a known moment, at a random phase of the period. The Node
//! is read every few milliseconds. After each breach the load falls, and the taint has to be removed.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    reason = "a benchmark that cannot measure fails"
)]
#![allow(clippy::print_stdout, reason = "its output")]

#[path = "../tests/support/agent/mod.rs"]
mod agent_support;
#[path = "../tests/support/api/mod.rs"]
mod api_support;
#[path = "../tests/support/run/mod.rs"]
mod run_support;

use std::process::ExitCode;
use std::time::Duration;

use agent_support::{HIGH, LOW, NODE, Node, closing};
use k8s_openapi::api::core::v1;
use kube::Api;
use plimsoll::clock::boot_time;
use plimsoll::cluster::taint::KEY;
use run_support::{argument, since};

const PERIOD: Duration = Duration::from_secs(1);
const THRESHOLD: u32 = 2;
/// (threshold + 1) x period + 0.5 s
const MAX_DELAY: Duration = Duration::from_millis(3500);
const TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let phases = argument("--phases").map_or(30, |count| count.parse().unwrap());
    let Some(node) = Node::new() else {
        return ExitCode::FAILURE;
    };
    node.plane.apply(&[api_support::lease_namespace()]);
    let mut spec = closing();
    spec["rules"][0]["avoidanceThreshold"] = THRESHOLD.into();
    node.set_rules(&spec);
    let agent = node.agent(&["--sample-interval", "1s"]);
    agent.until("it is ready", || agent.is_ready());
    let client = node.plane.connect().await;
    let nodes: Api<v1::Node> = Api::all(client);

    let mut random = 0x9e37_79b9_7f4a_7c15_u64 ^ u64::from(std::process::id());
    let mut delays = Vec::new();
    for _ in 0..phases {
        let phase = Duration::from_micros(next(&mut random) % 1_000_000);
        tokio::time::sleep(2 * PERIOD + phase).await;
        let breach = boot_time();
        node.machine.load.set(HIGH);
        until(&nodes, true).await;
        delays.push(since(breach));
        node.machine.load.set(LOW);
        until(&nodes, false).await;
    }
    report(&mut delays)
}

/// Xorshift: good enough for random phases.
const fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Waits until our taint is on the node, or gone.
async fn until(nodes: &Api<v1::Node>, tainted: bool) {
    let start = boot_time();
    loop {
        let node = nodes.get(NODE).await.unwrap();
        let taints = node.spec.and_then(|spec| spec.taints).unwrap_or_default();
        if taints.iter().any(|taint| taint.key == KEY) == tainted {
            return;
        }
        assert!(since(start) < TIMEOUT, "tainted: {}", !tainted);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn report(delays: &mut [Duration]) -> ExitCode {
    delays.sort();
    let at = |percent: usize| delays[(delays.len() * percent).div_ceil(100).max(1) - 1];
    println!(
        "above the threshold to tainted, {} random phases, period {PERIOD:?}, avoidanceThreshold {THRESHOLD}, sampled every second:",
        delays.len()
    );
    println!(
        "p50 {} ms, max {} ms (bar: {} ms)",
        at(50).as_millis(),
        at(100).as_millis(),
        MAX_DELAY.as_millis()
    );
    let assert = std::env::args().any(|arg| arg == "--assert");
    ExitCode::from(u8::from(assert && at(100) > MAX_DELAY))
}
