//! CPU time and memory to parse a report, compose its `NodeMetric`, and store it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll::clock;
use plimsoll::cluster::election::Leadership;
use plimsoll::crd::report::Report;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::units::Bytes;
use plimsoll::metrics_api::StoreUpdater;
use plimsoll::metrics_api::compose::NodeKnown;
use plimsoll::metrics_api::data::Data;
use plimsoll::metrics_api::reports::ReceivedReport;
use plimsoll::metrics_api::store::Limits;
use serde_json::Value;
use tokio::sync::watch;

use super::figures::{Figures, print, quantile};
use super::report;

/// Heap per node, in kB.
const MAX_KB: f64 = 20.0;
/// Reports per node: enough to fill the history of events.
const ROUNDS: u64 = 6;
const TIMED_REPORTS: usize = 4000;

fn known(index: usize) -> NodeKnown {
    NodeKnown {
        uid: report::node(index),
        created: None,
        boot_id: String::new(),
        addresses: Vec::new(),
        facts: NodeFacts {
            labels: serde_json::from_value(report::labels(index)).unwrap(),
            cpus: 32,
            memory: Bytes(128 << 30),
            windows: None,
        },
    }
}

fn received(body: &str) -> ReceivedReport {
    let report = Report::parse(body.as_bytes()).unwrap();
    ReceivedReport {
        node: report.node.as_str().into(),
        at: clock::boot_time(),
        interval: report.interval(),
        status: report.status.into(),
    }
}

/// The leader's store updater after `rounds` reports of each node.
fn updater(nodes: usize, rounds: u64) -> StoreUpdater {
    let (_elect, leadership) = watch::channel(Leadership::default());
    let data = Arc::new(Data::new(Limits::default(), leadership));
    let mut updater = StoreUpdater::new(data, None);
    updater.lead(Some(7));
    for index in 0..nodes {
        updater.node(&report::node(index), Some(known(index)));
    }
    for round in 1..=rounds {
        for index in 0..nodes {
            updater.report(received(&report::body(&report::node(index), round)));
        }
    }
    updater
}

/// Heap allocated by the store updater, in kB per node.
fn kilobytes(nodes: usize, rounds: u64) -> f64 {
    let mut result = None;
    let info = allocation_counter::measure(|| result = Some(updater(nodes, rounds)));
    info.bytes_current as f64 / nodes as f64 / 1000.0
}

/// Measures memory and CPU time.
pub fn measure(nodes: usize, figures: &mut Figures) {
    println!("the store of {nodes} nodes with 20 labels each, in this process:");
    let once = kilobytes(nodes, 1);
    print("heap per node after one report", once, "kB");
    let all = kilobytes(nodes, ROUNDS);
    let what = "heap per node, including stored events";
    figures.at_most(what, all, "kB", MAX_KB);
    speed();
}

/// Alternates with parsing alone, of the same bodies.
fn speed() {
    let mut updater = updater(100, 1);
    let (mut stored, mut parsed) = (Vec::new(), Vec::new());
    for round in 0..TIMED_REPORTS {
        let body = report::body(&report::node(round % 100), round as u64 + 2);
        let start = Instant::now();
        updater.report(received(&body));
        stored.push(micros(start.elapsed()));
        let start = Instant::now();
        let value: Value = serde_json::from_str(&body).unwrap();
        parsed.push(micros(start.elapsed()));
        drop(value);
    }
    let (stored, parsed) = (quantile(&mut stored, 0.5), quantile(&mut parsed, 0.5));
    print("a report parsed, composed and stored, median", stored, "us");
    let what = "relative to parsing it as a JSON value";
    print(what, stored / parsed, "");
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
