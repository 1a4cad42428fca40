//! CPU and memory of an idle `plimsoll run` with 110 pods, sampled every second.
//!
//! `cargo bench --bench daemon --target x86_64-unknown-linux-musl [-- --pods 110 --seconds 60 --protected --program FILE --assert]`
//!
//! `--protected` adds a rule on what the pods wait, which needs cgroup v2. `--program` measures another binary.
//!
//! The real binary on real cgroups of this machine, two containers a pod, and the real `/proc`; rules on CPU and memory,
//! evaluated every 10 s and never breached. CPU time and resident memory are the kernel's figures for the process, read
//! once a second. Raw figures go to `target/bench/daemon.csv`.
#![allow(clippy::unwrap_used, reason = "a benchmark that cannot measure fails")]
#![allow(clippy::print_stdout, reason = "its output")]

#[path = "../tests/support/run/mod.rs"]
mod run_support;

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::Pid;
use plimsoll::clock::boot_time;
use run_support::{Daemon, Machine, policy, since};

const MAX_MILLICORES: f64 = 2.0;
const MAX_RESIDENT_KIB: u64 = 15 * 1024;

/// Microseconds since the first reading, CPU time so far in microseconds, resident KiB.
struct Reading {
    at: u128,
    cpu: u128,
    resident: u64,
}

fn main() -> ExitCode {
    let pods = run_support::argument("--pods").map_or(110, |count| count.parse().unwrap());
    let seconds: usize = run_support::argument("--seconds").map_or(60, |it| it.parse().unwrap());
    let has = |option: &str| std::env::args().any(|arg| arg == option);
    let (assert, protected) = (has("--assert"), has("--protected"));
    let machine = Machine::new();
    for number in 0..pods {
        for container in ["main", "pause"] {
            machine.cgroup(&format!("unit-{number}/{container}"));
        }
    }
    let action = "{throttle: {cpuThrottle: {minCPURatio: 10, stepCPURatio: 30}}, eviction: {}}";
    let cpu = "metricRule: {name: cpu_total_usage, value: 1000000}\n";
    let memory = "metricRule: {name: memory_total_utilization, value: 99.9}\n";
    let rules = policy(action, "throttle, evict", 2, 1_000_000);
    let mut all = format!("{cpu}  - name: memory\n    actionName: act\n    {memory}");
    if protected {
        let wait = "metricRule: {name: protected_cpu_delay_max, value: 99.9}\n";
        write!(all, "  - name: wait\n    actionName: act\n    {wait}").unwrap();
    }
    machine.write("policies/idle.yaml", &rules.replace(cpu, &all));
    let program = run_support::argument("--program");
    let program = program.unwrap_or_else(|| run_support::BINARY.to_owned());
    let mut command = machine.command_of(&program, "run");
    command
        .args([
            "--output",
            "json",
            "--pods-under",
            &machine.parent,
            "--policies",
        ])
        .arg(machine.path("policies"));
    let mut daemon = Daemon::start(command);
    let started = daemon.wait_for_change("started");
    assert_eq!(started["pods"], pods, "{started}");
    let readings = watch(daemon.pid(), seconds);
    daemon.stop(Signal::SIGINT);
    drop(machine);
    report(pods, &readings, assert)
}

fn watch(pid: Pid, seconds: usize) -> Vec<Reading> {
    let (_keep, never) = mpsc::channel::<()>();
    // The start-up is not measured.
    let _timeout = never.recv_timeout(Duration::from_secs(3));
    let start = boot_time();
    let mut readings = Vec::new();
    for _ in 0..=seconds {
        readings.push(read(pid, since(start).as_micros()));
        let _timeout = never.recv_timeout(Duration::from_secs(1));
    }
    readings
}

/// `schedstat` has the CPU time of each thread in nanoseconds.
fn read(pid: Pid, at: u128) -> Reading {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nanos: u128 = threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("schedstat")).ok())
        .filter_map(|text| text.split(' ').next()?.parse::<u128>().ok())
        .sum();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let resident = resident.unwrap().trim().trim_end_matches(" kB");
    Reading {
        at,
        cpu: nanos / 1000,
        resident: resident.parse().unwrap(),
    }
}

fn report(pods: usize, readings: &[Reading], assert: bool) -> ExitCode {
    let mut csv = String::from("microseconds,cpu_microseconds,resident_kib\n");
    for reading in readings {
        writeln!(csv, "{},{},{}", reading.at, reading.cpu, reading.resident).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/daemon.csv");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, csv).unwrap();
    let (first, last) = (readings.first().unwrap(), readings.last().unwrap());
    let millicores = (last.cpu - first.cpu) as f64 * 1000.0 / (last.at - first.at) as f64;
    let resident = readings
        .iter()
        .map(|reading| reading.resident)
        .max()
        .unwrap();
    println!(
        "plimsoll run over {pods} pods of 2 containers, sampled every second, for {} s:",
        last.at / 1_000_000
    );
    println!(
        "CPU {millicores:.2} millicores (bar: {MAX_MILLICORES}), RSS {resident} KiB (bar: {MAX_RESIDENT_KIB})"
    );
    println!("raw: {}", path.display());
    let met = millicores <= MAX_MILLICORES && resident <= MAX_RESIDENT_KIB;
    ExitCode::from(u8::from(assert && !met))
}
