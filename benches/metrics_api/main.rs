//! What direct reports and `NodeMetrics` cost the controller: ingest, answers, watches and memory.
//!
//! `cargo bench --bench metrics_api --target x86_64-unknown-linux-musl [-- --nodes 5000,15000 --seconds 60 --binary FILE]`
//!
//! The real binary, over a real etcd and API server, with real connections: an agent for each node reports every 10 s by
//! TLS and HTTP/2 with a token of its own, and clients ask as the API server passes them on. `--quick` does with fewer nodes
//! and less time. It fails where a bar is missed; what a failover takes and how Leases are written at rest is shown by
//! `make scale`, with agents in a process of their own.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::unwrap_in_result,
    clippy::disallowed_methods,
    reason = "a benchmark that cannot measure fails"
)]
#![allow(clippy::print_stdout, reason = "its output")]

mod agents;
#[path = "../../tests/api_support/mod.rs"]
mod api_support;
mod clients;
mod figures;
mod fleet;
mod process;
mod report;
#[path = "../../tests/run_support/mod.rs"]
mod run_support;
mod store;

use std::process::ExitCode;
use std::time::Duration;

use api_support::ControlPlane;
use figures::Figures;
use fleet::Fleet;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use run_support::argument;

/// What is measured, and for how long.
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
    // Each agent is a connection.
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
        fleet.ask(scope.gets, scope.lists, &mut figures);
        if index == 0 {
            fleet.watch(scope.watchers, scope.time, &mut figures);
        }
    }
    println!("failover as clients see it, the age of data, Lease writes at rest: make scale");
    ExitCode::from(u8::from(!figures.are_good()))
}
