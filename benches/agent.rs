//! What `plimsoll agent` costs a node while nothing happens: CPU, memory and requests at 100 pods, sampled each second.
//!
//! `cargo bench --bench agent --target x86_64-unknown-linux-musl [-- --pods 100 --seconds 120 --assert]`
//!
//! The real binary against a real API server, over real cgroups of this machine (two containers a pod) and the real
//! `/proc`; rules over CPU and memory, evaluated each 10 s, none of them ever breached. `--binary FILE` measures another
//! build of it.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    reason = "a benchmark that cannot measure fails"
)]
#![allow(clippy::print_stdout, reason = "its output")]

#[path = "../tests/agent_support/mod.rs"]
mod agent_support;
#[path = "../tests/api_support/mod.rs"]
mod api_support;
#[path = "../tests/run_support/mod.rs"]
mod run_support;

use std::fs;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use agent_support::{Agent, Node, pod, rule};
use plimsoll::node::clock::boot_time;
use run_support::{argument, since};
use serde_json::json;

const MOST_MILLICORES: f64 = 3.0;
const MOST_RESIDENT_KIB: u64 = 15 * 1024;
/// Besides the six renewals of its Lease.
const MOST_WRITES_PER_MINUTE: f64 = 1.0;

fn main() -> ExitCode {
    let pods = argument("--pods").map_or(100, |count| count.parse().unwrap());
    let seconds = argument("--seconds").map_or(120, |it| it.parse().unwrap());
    let Some(node) = Node::new() else {
        return ExitCode::FAILURE;
    };
    populate(&node, pods);
    node.plane.apply(&[json!({
        "apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "plimsoll-node-lease"},
    })]);
    let agent = node.agent(&["--proc-root", "/proc", "--sample-interval", "1s"]);
    agent.until("it is ready", || agent.is_ready());
    // The start, with its lists and its first evaluations, is not what is measured.
    wait(Duration::from_secs(25));
    let (begun, cpu, writes) = (boot_time(), cpu_nanos(&agent), writes(&agent));
    let mut resident = 0;
    for _ in 0..seconds {
        wait(Duration::from_secs(1));
        resident = resident.max(resident_kib(&agent));
    }
    let took = since(begun);
    let cpu = (cpu_nanos(&agent) - cpu) as f64 * 1000.0 / took.as_nanos() as f64;
    let writes = (self::writes(&agent) - writes) * 60.0 / took.as_secs_f64();
    println!(
        "plimsoll agent over {pods} pods of 2 containers, sampled each second, for {} s at rest:",
        took.as_secs()
    );
    println!(
        "CPU {cpu:.2} millicores (bar: {MOST_MILLICORES}), RSS {resident} KiB (bar: {MOST_RESIDENT_KIB}), \
         {writes:.2} API writes a minute besides heartbeats (bar: {MOST_WRITES_PER_MINUTE})"
    );
    let met =
        cpu <= MOST_MILLICORES && resident <= MOST_RESIDENT_KIB && writes <= MOST_WRITES_PER_MINUTE;
    let assert = std::env::args().any(|arg| arg == "--assert");
    ExitCode::from(u8::from(assert && !met))
}

fn populate(node: &Node, pods: usize) {
    let objects: Vec<_> = (0..pods)
        .map(|number| pod(&format!("pod-{number}"), "batch"))
        .collect();
    node.plane.create(&objects);
    for pod in node.plane.list("pods") {
        let uid = pod["metadata"]["uid"].as_str().unwrap();
        for container in ["main", "pause"] {
            let cgroup = format!("kubepods/besteffort/pod{uid}/{container}");
            node.machine.cgroup(&cgroup);
        }
    }
    let mut rules = [rule("q/cpu", "act"), rule("q/memory", "act")];
    for rule in &mut rules {
        rule["periodSeconds"] = 10.into();
        rule["watermark"] = 1_000_000.0.into();
    }
    rules[1]["metric"] = "memory_total_utilization".into();
    rules[1]["watermark"] = 99.9.into();
    node.keep(&json!({
        "rules": rules,
        "actions": [{
            "name": "act", "coolDownSeconds": 60,
            "cpuThrottle": {"minCPURatio": 10, "stepCPURatio": 30}, "eviction": {"maxPodsPerRound": 1},
        }],
        "podPolicies": [{"name": "all", "labels": [], "allowed": ["throttle", "eviction"]}],
    }));
}

fn wait(time: Duration) {
    let (_keep, never) = mpsc::channel::<()>();
    let _timeout = never.recv_timeout(time);
}

/// `schedstat` counts the CPU time of each thread to the nanosecond.
fn cpu_nanos(agent: &Agent) -> u128 {
    let pid = agent.process.0.id();
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("schedstat")).ok())
        .filter_map(|text| text.split(' ').next()?.parse::<u128>().ok())
        .sum()
}

fn resident_kib(agent: &Agent) -> u64 {
    let pid = agent.process.0.id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.unwrap().trim().trim_end_matches(" kB");
    resident.parse().unwrap()
}

/// Writes besides heartbeats.
fn writes(agent: &Agent) -> f64 {
    let (_, text) = agent.http("/metrics").unwrap();
    let sum = |name: &str, labels: &[&str]| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with(name));
        let lines = lines.filter(|line| labels.iter().any(|label| line.contains(label)));
        lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    };
    let verbs = ["create", "update", "patch", "delete"].map(|verb| format!(r#"verb="{verb}""#));
    let verbs: Vec<&str> = verbs.iter().map(String::as_str).collect();
    let heartbeats = ["created", "renewed"].map(|result| format!(r#"result="{result}""#));
    let heartbeats: Vec<&str> = heartbeats.iter().map(String::as_str).collect();
    sum("plimsoll_agent_api_requests_total", &verbs)
        - sum("plimsoll_agent_heartbeats_total", &heartbeats)
}
