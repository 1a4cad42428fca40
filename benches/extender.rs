//! The CPU time of a Prioritize request of kube-scheduler: from its body to the body of the answer, without HTTP.
//!
//! `cargo bench --bench extender --target x86_64-unknown-linux-musl [-- --assert]`
//!
//! A pod of 4.6 KB; names of 41 characters, of a cluster of 5000 nodes that all report; 50 pods are in flight. Each request is for
//! another pod.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot measure fails")]
#![allow(clippy::print_stdout, reason = "its output")]

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use plimsoll::clock;
use plimsoll::engine::units::{Bytes, MilliCpu};
use plimsoll::metrics_api::loads::{ByNode, KnownLoad};
use plimsoll::scheduler_api::extender::{Extender, ExtenderRequest};
use serde_json::json;

const NODES: usize = 5000;
const ROUNDS: usize = 400;
/// The number of candidates, and the bar of the median. The goal is 70 us at 812 names; reading them takes 43 us, the rest is looking
/// up and scoring nodes.
const SIZES: [(usize, Duration); 3] = [
    (100, Duration::from_micros(40)),
    (812, Duration::from_micros(300)),
    (5000, Duration::from_micros(2500)),
];

fn name(index: usize) -> String {
    format!(
        "ip-10-12-{:03}-{:03}.eu-central-1.compute.local",
        index / 250,
        index % 250
    )
}

fn node(index: usize) -> KnownLoad {
    let load = (index * 37 % 100) as f64;
    let resource = |load: f64| json!({"percent": load, "expected": load * 0.8, "newcomers": 0.0, "history": load * 0.7, "line": 80.0});
    let status = json!({"load": {"percent": load, "worst": "cpu", "cpu": resource(load), "memory": resource(load / 2.0)}});
    KnownLoad {
        at: clock::boot_time(),
        interval: Duration::from_mins(5),
        cpu: MilliCpu(16_000),
        memory: Bytes(64 << 30),
        status: Arc::new(serde_json::from_value(status).unwrap()),
        polled: false,
    }
}

fn body(pod: usize, names: &[String]) -> Vec<u8> {
    let container = |index: usize| {
        json!({
            "name": format!("c{index}"), "image": "registry.example/team/service:v1.2.3", "env": [{"name": "A", "value": "x".repeat(1000)}],
            "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": "512Mi"}},
        })
    };
    let annotations = json!({"example.com/config": "y".repeat(2000)});
    json!({
        "Pod": {
            "metadata": {"name": format!("web-{pod}"), "namespace": "shop", "uid": format!("uid-{pod}"), "annotations": annotations},
            "spec": {"containers": [container(0), container(1)], "priority": 0},
        },
        "Nodes": null, "NodeNames": names,
    })
    .to_string()
    .into_bytes()
}

fn main() -> ExitCode {
    let assert = std::env::args().any(|argument| argument == "--assert");
    let nodes: ByNode = (0..NODES)
        .map(|index| (name(index).into(), Some(node(index))))
        .collect();
    let mut extender = Extender::default();
    let mut missed = false;
    for (size, bar) in SIZES {
        // Spread over the cluster, in no order of names.
        let names: Vec<String> = (0..size).map(|index| name(index * 2503 % NODES)).collect();
        let mut times: Vec<Duration> = (0..ROUNDS)
            .map(|pod| {
                let body = body(pod % 50, &names);
                let start = clock::thread_time();
                let request = ExtenderRequest::read(&body).unwrap();
                let answer = extender.prioritize(&request, &nodes, clock::boot_time());
                let took = clock::thread_time().saturating_sub(start);
                assert!(answer.unknown == 0 && !answer.body.is_empty());
                took
            })
            .collect();
        times.sort();
        let (median, high) = (times[ROUNDS / 2], times[ROUNDS * 99 / 100]);
        println!("{size} names: p50 {median:?} (bar {bar:?}), p99 {high:?}");
        missed |= median > bar;
    }
    if assert && missed {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
