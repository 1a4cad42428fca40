//! Time from a machine exceeding its threshold to the first quota write.
//!
//! `cargo bench --bench reaction --target x86_64-unknown-linux-musl [-- --phases 50 --assert]`
//!
//! The real binary runs with `--period 200ms` and `avoidanceThreshold: 2` on a real cgroup with a busy process. The node's
//! CPU counters are fake, so that the breach starts at a known moment, at a random phase of the period. The quota file is
//! read every millisecond. After each breach the load falls, and the file has to be restored byte for byte. Raw figures go
//! to `target/bench/reaction.csv`.
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
use plimsoll::clock::boot_time;
use run_support::{Machine, TIMEOUT, since, throttle};

/// The bar for the 99th percentile.
const MAX_P99: Duration = Duration::from_millis(700);
const PERIOD_MICROS: u64 = 200_000;

fn main() -> ExitCode {
    if run_support::is_helper() {
        run_support::burn(Duration::ZERO, Duration::from_mins(15));
        return ExitCode::SUCCESS;
    }
    let assert = std::env::args().any(|arg| arg == "--assert");
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    let original = machine.quota("batch");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");

    let phases = run_support::argument("--phases").map_or(50, |count| count.parse().unwrap());
    let mut random = 0x9e37_79b9_7f4a_7c15_u64 ^ u64::from(std::process::id());
    let (mut reactions, mut restored) = (Vec::new(), 0);
    for _ in 0..phases {
        wait(Duration::from_micros(next(&mut random) % PERIOD_MICROS));
        let breach = boot_time();
        machine.load.set(1900);
        let reacted = quota_becomes(&machine, |quota| quota != original);
        reactions.push(since(breach));
        machine.load.set(100);
        assert!(reacted, "no reaction within {TIMEOUT:?}");
        restored += u32::from(quota_becomes(&machine, |quota| quota == original));
    }
    daemon.stop(Signal::SIGINT);
    drop(machine);
    report(&mut reactions, restored, assert)
}

/// Xorshift: good enough for random phases.
const fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn wait(time: Duration) {
    let (_keep, never) = mpsc::channel::<()>();
    let _timeout = never.recv_timeout(time);
}

fn quota_becomes(machine: &Machine, wanted: impl Fn(&str) -> bool) -> bool {
    let start = boot_time();
    while since(start) < TIMEOUT {
        if wanted(&machine.quota("batch")) {
            return true;
        }
        wait(Duration::from_millis(1));
    }
    false
}

fn report(reactions: &mut [Duration], restored: u32, assert: bool) -> ExitCode {
    let mut csv = String::from("phase,microseconds\n");
    for (phase, reaction) in reactions.iter().enumerate() {
        writeln!(csv, "{phase},{}", reaction.as_micros()).unwrap();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench/reaction.csv");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, csv).unwrap();
    reactions.sort();
    let at = |percent: usize| reactions[(reactions.len() * percent).div_ceil(100).max(1) - 1];
    let count = reactions.len();
    println!(
        "breach to first quota write over {count} random phases, --period 200ms, threshold 2:"
    );
    println!(
        "p50 {} ms, p99 {} ms, max {} ms (bar: p99 <= {} ms)",
        at(50).as_millis(),
        at(99).as_millis(),
        at(100).as_millis(),
        MAX_P99.as_millis()
    );
    println!("restored to the original: {restored} of {count}");
    println!("raw: {}", path.display());
    let met = at(99) <= MAX_P99 && restored as usize == count;
    ExitCode::from(u8::from(assert && !met))
}
