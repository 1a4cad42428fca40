//! CPU, memory and API requests of an idle `plimsoll agent` with 110 pods, sampled every second.
//!
//! `cargo bench --bench agent --target x86_64-unknown-linux-musl [-- --pods 110 --seconds 120 --assert]`
//!
//! The real binary against a real API server, on real cgroups of this machine (two containers a pod) and the real `/proc`;
//! rules on CPU and memory, evaluated every 10 s and never breached. It reports directly to two replicas, one of which is
//! the leader. `--binary FILE` measures another build.
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

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use agent_support::{Agent, Node, pod, rule};
use api_support::aggregation::address;
use api_support::lease_namespace;
use api_support::receiver::{Authority, Receiver, acknowledge, publish, slice};
use plimsoll::clock::boot_time;
use plimsoll::crd::report::MAX_BYTES;
use run_support::{argument, since};
use serde_json::{Value, json};

const MAX_MILLICORES: f64 = 2.0;
const MAX_RESIDENT_KIB: u64 = 15 * 1024;
/// Including renewals of its Lease, while the leader acknowledges reports.
const MAX_WRITES_PER_MINUTE: f64 = 1.0;
const SERVICE: &str = "plimsoll-report";

fn main() -> ExitCode {
    let pods = argument("--pods").map_or(110, |count| count.parse().unwrap());
    let seconds = argument("--seconds").map_or(120, |it| it.parse().unwrap());
    let Some(node) = Node::new() else {
        return ExitCode::FAILURE;
    };
    populate(&node, pods);
    node.plane.apply(&[lease_namespace()]);
    let credentials = tempfile::tempdir().unwrap();
    let replicas = replicas(&node, credentials.path());
    let directory = credentials.path().display().to_string();
    let own = ["--namespace", "default", "--pod-name", "agent"];
    let reports = [
        "--report-service",
        SERVICE,
        "--report-credentials",
        &directory,
    ];
    let sampling = [
        "--proc-root",
        "/proc",
        "--sample-interval",
        "1s",
        "--evaluation-period",
        "10s",
    ];
    let agent = node.agent(&[&own[..], &reports, &sampling].concat());
    agent.until("it is ready", || agent.is_ready());
    agent.until("it reports", || {
        replicas.iter().all(|replica| replica.seen().len() > 1)
    });
    // The start-up is not measured.
    wait(Duration::from_secs(25));
    println!("plimsoll agent over {pods} pods of 2 containers, sampled every second, idle:");
    let met = Measured::of(&node, &agent, &replicas[0], seconds).meets_bars();
    let assert = std::env::args().any(|arg| arg == "--assert");
    ExitCode::from(u8::from(assert && !met))
}

/// The agent's costs.
struct Measured {
    millicores: f64,
    resident_kib: u64,
    /// In bytes.
    largest_report: usize,
    /// Per minute, as are writes and heartbeats.
    reports: f64,
    writes: f64,
    heartbeats: f64,
    /// Total count, including the one that the rate leaves out.
    renewals: f64,
    /// Published in total.
    events: usize,
}

impl Measured {
    fn of(node: &Node, agent: &Agent, leader: &Receiver, seconds: u64) -> Self {
        let events_before = events(node);
        let (start, cpu, before) = (boot_time(), cpu_nanos(agent), Writes::of(agent));
        let reports_before = leader.seen().len();
        let mut resident = 0;
        for _ in 0..seconds {
            wait(Duration::from_secs(1));
            resident = resident.max(resident_kib(agent));
        }
        let (took, after, seen) = (since(start), Writes::of(agent), leader.seen());
        let minutes = took.as_secs_f64() / 60.0;
        let renewals = after.heartbeats - before.heartbeats;
        // A short measurement may contain one more than the long-term rate.
        let heartbeats = (renewals - 1.0).max(0.0);
        Self {
            millicores: (cpu_nanos(agent) - cpu) as f64 * 1000.0 / took.as_nanos() as f64,
            resident_kib: resident,
            largest_report: seen.iter().map(|seen| seen.bytes).max().unwrap_or(0),
            reports: (seen.len() - reports_before) as f64 / minutes,
            writes: (after.others - before.others) / minutes,
            heartbeats: heartbeats / minutes,
            renewals,
            events: events(node) - events_before,
        }
    }

    /// Prints the figures; whether all bars are met.
    fn meets_bars(&self) -> bool {
        let Self {
            millicores,
            resident_kib,
            largest_report,
            reports,
            writes,
            heartbeats,
            renewals,
            events,
        } = self;
        println!(
            "CPU {millicores:.2} millicores (bar: {MAX_MILLICORES}), RSS {resident_kib} KiB (bar: {MAX_RESIDENT_KIB})"
        );
        println!(
            "to each of two replicas {reports:.1} reports a minute of at most {largest_report} bytes (bar: {MAX_BYTES})"
        );
        println!(
            "a minute {heartbeats:.2} heartbeats ({renewals} counted, of which one is left out) and {writes:.2} other \
             API writes (bar, for both: {MAX_WRITES_PER_MINUTE}), in all {events} events (bar: 0)"
        );
        *millicores <= MAX_MILLICORES
            && *resident_kib <= MAX_RESIDENT_KIB
            && *largest_report <= MAX_BYTES
            && *reports > 0.0
            && *heartbeats + *writes <= MAX_WRITES_PER_MINUTE
            && *events == 0
    }
}

/// The number of events that agents published, with repetitions.
fn events(node: &Node) -> usize {
    let from = |event: &Value| event["reportingComponent"] == "plimsoll-agent";
    let text = node
        .plane
        .kubectl(&["get", "events", "--all-namespaces", "-o", "json"]);
    let list: Value = serde_json::from_str(&text).unwrap();
    let events = list["items"].as_array().unwrap();
    let times = |event: &Value| event["series"]["count"].as_u64().unwrap_or(1);
    let counts = events.iter().filter(|event| from(event)).map(times);
    usize::try_from(counts.sum::<u64>()).unwrap()
}

/// Two ready replicas, the first of which leads. The agent's credentials are written to the directory.
fn replicas(node: &Node, credentials: &Path) -> [Receiver; 2] {
    let authority = Authority::make();
    publish(credentials, &[("token", "one"), ("ca.crt", &authority.pem)]);
    let address = address().unwrap();
    let replica = |leads: bool| {
        let replica = Receiver::start(address, &authority, &format!("{SERVICE}.default.svc"));
        replica.respond_always(acknowledge(1, leads));
        let name = format!("{SERVICE}-{}", replica.address.port());
        let slice = slice("default", SERVICE, &name, replica.address, true);
        node.plane.apply(&[slice]);
        replica
    };
    [replica(true), replica(false)]
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
        rule["watermark"] = 1_000_000.0.into();
    }
    rules[1]["metric"] = "memory_total_utilization".into();
    rules[1]["watermark"] = 99.9.into();
    node.set_rules(&json!({
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

/// `schedstat` has the CPU time of each thread in nanoseconds.
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

/// Writes to the API server so far.
struct Writes {
    heartbeats: f64,
    others: f64,
}

impl Writes {
    fn of(agent: &Agent) -> Self {
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
        let results = ["created", "renewed"].map(|result| format!(r#"result="{result}""#));
        let results: Vec<&str> = results.iter().map(String::as_str).collect();
        let heartbeats = sum("plimsoll_agent_heartbeats_total", &results);
        Self {
            heartbeats,
            others: sum("plimsoll_agent_api_requests_total", &verbs) - heartbeats,
        }
    }
}
