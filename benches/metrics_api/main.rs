//! Cost of direct reports and `NodeMetrics` for the controller: ingest, answers, watches and memory.
//!
//! `cargo bench --bench metrics_api --target x86_64-unknown-linux-musl [-- --nodes 5000,15000 --seconds 60 --binary FILE]`
//!
//! The real binary with a real etcd and API server and real connections: an agent for each node reports every 10 s over TLS
//! and HTTP/2 with its own token, and clients send requests as the API server proxies them. `--quick` takes fewer nodes and
//! less time. It fails if a bar is missed. `make scale` measures failover and idle Lease writes, with agents in a separate
//! process.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::unwrap_in_result,
    clippy::disallowed_methods,
    reason = "a benchmark that cannot measure fails"
)]
#![allow(clippy::print_stdout, reason = "its output")]

mod agents;
#[path = "../../tests/support/api/mod.rs"]
mod api_support;
mod clients;
mod figures;
mod fleet;
mod process;
mod report;
#[path = "../../tests/support/run/mod.rs"]
mod run_support;
mod store;

use std::process::ExitCode;
use std::time::Duration;

use api_support::ControlPlane;
use figures::Figures;
use fleet::Fleet;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use run_support::argument;

/// The sizes and length of the measurement.
struct Scope {
    nodes: Vec<usize>,
    time: Duration,
    watchers: usize,
    lists: usize,
    gets: usize,
}

impl Scope {
    fn of_arguments() -> Self {
        let quick = std::env::args().any(|argument| argument == "--quick");
        let (nodes, seconds) = if quick {
            ("200", 10)
        } else {
            ("5000,15000", 60)
        };
        let nodes = argument("--nodes").unwrap_or_else(|| nodes.to_owned());
        let seconds = argument("--seconds").map_or(seconds, |text| text.parse().unwrap());
        Self {
            nodes: nodes
                .split(',')
                .map(|count| count.parse().unwrap())
                .collect(),
            time: Duration::from_secs(seconds),
            watchers: 100,
            lists: if quick { 5 } else { 30 },
            gets: if quick { 500 } else { 3000 },
        }
    }
}

fn main() -> ExitCode {
    let scope = Scope::of_arguments();
    // Every agent has a connection.
    let hard = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let mut figures = Figures::default();
    store::measure(scope.nodes[0], &mut figures);
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return ExitCode::FAILURE;
    };
    let mut fleet = Fleet::of(&plane);
    for (index, nodes) in scope.nodes.iter().enumerate() {
        fleet.grow(*nodes);
        if index == 0 {
            fleet.renew();
        }
        fleet.report(scope.time, &mut figures);
        fleet.read(scope.gets, scope.lists, &mut figures);
        if index == 0 {
            fleet.watch(scope.watchers, scope.time, &mut figures);
        }
    }
    println!("failover as clients see it, age of data, idle Lease writes: make scale");
    ExitCode::from(u8::from(!figures.all_met()))
}
