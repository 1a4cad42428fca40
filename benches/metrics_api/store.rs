//! What a report costs behind its connection: to parse it, to make the `NodeMetric` of it, and to keep that.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plimsoll::cluster::clock;
use plimsoll::cluster::election::Standing;
use plimsoll::crd::report::Report;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::units::Bytes;
use plimsoll::metrics_api::Feed;
use plimsoll::metrics_api::compose::NodeKnown;
use plimsoll::metrics_api::data::Data;
use plimsoll::metrics_api::reports::Told;
use plimsoll::metrics_api::store::Limits;
use serde_json::Value;
use tokio::sync::watch;

use super::figures::{Figures, quantile, say};
use super::report;

/// The heap that a node takes, in kB.
const MOST_KB: f64 = 20.0;
/// Each node reports so often, so that no room is left for events.
const ROUNDS: u64 = 6;
const SPEED: usize = 4000;

fn known(index: usize) -> NodeKnown {
    NodeKnown {
        uid: report::node(index),
        created: None,
        boot_id: String::new(),
        facts: NodeFacts {
            labels: serde_json::from_value(report::labels(index)).unwrap(),
            cpus: 32,
            memory: Bytes(128 << 30),
        },
    }
}

fn told(body: &str) -> Told {
    let report = Report::parse(body.as_bytes()).unwrap();
    Told {
        node: report.node.as_str().into(),
        at: clock::now(),
        interval: report.interval(),
        status: report.status.into(),
    }
}

/// A leader's, with so many nodes that have reported that often.
fn feed(nodes: usize, rounds: u64) -> Feed {
    let (_elect, standing) = watch::channel(Standing::default());
    let data = Arc::new(Data::new(Limits::default(), standing));
    let mut feed = Feed::new(data, None);
    feed.lead(Some(7));
    for index in 0..nodes {
        feed.node(&report::node(index), Some(known(index)));
    }
    for round in 1..=rounds {
        for index in 0..nodes {
            feed.report(told(&report::body(&report::node(index), round)));
        }
    }
    feed
}

/// Heap of this thread that is left when it is made, in kB a node.
fn kilobytes(nodes: usize, rounds: u64) -> f64 {
    let mut kept = None;
    let info = allocation_counter::measure(|| kept = Some(feed(nodes, rounds)));
    info.bytes_current as f64 / nodes as f64 / 1000.0
}

/// Measures it.
pub fn measure(nodes: usize, figures: &mut Figures) {
    println!("the store of {nodes} nodes with 20 labels each, in this process:");
    let once = kilobytes(nodes, 1);
    say("heap of a node that reported once", once, "kB");
    let all = kilobytes(nodes, ROUNDS);
    let what = "heap of a node, the events that are kept included";
    figures.at_most(what, all, "kB", MOST_KB);
    speed();
}

/// In turn with what parsing alone costs, of the same bodies.
fn speed() {
    let mut feed = feed(100, 1);
    let (mut kept, mut parsed) = (Vec::new(), Vec::new());
    for round in 0..SPEED {
        let body = report::body(&report::node(round % 100), round as u64 + 2);
        let begun = Instant::now();
        feed.report(told(&body));
        kept.push(micros(begun.elapsed()));
        let begun = Instant::now();
        let value: Value = serde_json::from_str(&body).unwrap();
        parsed.push(micros(begun.elapsed()));
        drop(value);
    }
    let (kept, parsed) = (quantile(&mut kept, 0.5), quantile(&mut parsed, 0.5));
    say("a report parsed, composed and stored, median", kept, "us");
    let what = "times what parsing it as a JSON value takes";
    say(what, kept / parsed, "");
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}
