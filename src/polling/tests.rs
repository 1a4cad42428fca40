//! Rounds over many endpoints of this machine, of which some hang, some answer garbage, and some are gone.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use futures::stream::{self, StreamExt};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch as values};
use tokio::time::{sleep, timeout};

use super::{Options, PollMetrics, poller};
use crate::clock;
use crate::cluster::election::Leadership;
use crate::cluster::watch::Change;
use crate::crd::polling;
use crate::engine::policy::NodeFacts;
use crate::engine::units::Bytes;
use crate::metrics_api::StoreUpdater;
use crate::metrics_api::compose::NodeKnown;
use crate::metrics_api::data::Data;
use crate::metrics_api::loads::{ByNode, KnownLoad, NodeLoads};
use crate::metrics_api::store::Limits;

/// What an endpoint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Good,
    Hangs,
    Garbage,
    Gone,
}

/// 5 % of each kind but the first.
const fn mixed(index: usize) -> Kind {
    match index % 20 {
        3 => Kind::Hangs,
        9 => Kind::Garbage,
        15 => Kind::Gone,
        _ => Kind::Good,
    }
}

const fn hangs(_: usize) -> Kind {
    Kind::Hangs
}

/// Each endpoint has a loopback address of its own.
#[expect(clippy::cast_possible_truncation, reason = "there are fewer than 2^24")]
fn address(index: usize) -> IpAddr {
    let [_, a, b, c] = (index as u32).to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(127, 1 + a, b, c))
}

fn index_of(address: IpAddr) -> usize {
    let IpAddr::V4(address) = address else {
        return 0;
    };
    let [_, a, b, c] = address.octets();
    u32::from_be_bytes([0, a - 1, b, c]) as usize
}

fn name(index: usize) -> String {
    format!("node-{index:05}")
}

/// The requests in progress.
#[derive(Debug, Default)]
struct InProgress {
    by_endpoint: BTreeMap<usize, usize>,
    max_of_one: usize,
    max_of_all: usize,
}

#[derive(Clone, Debug, Default)]
struct Seen(Arc<Mutex<InProgress>>);

impl Seen {
    fn change(&self, endpoint: usize, started: bool) {
        let mut seen = self.0.lock().unwrap();
        let count = seen.by_endpoint.entry(endpoint).or_default();
        *count = if started { *count + 1 } else { *count - 1 };
        let count = *count;
        let all = seen.by_endpoint.values().sum();
        seen.max_of_one = seen.max_of_one.max(count);
        seen.max_of_all = seen.max_of_all.max(all);
    }
}

/// A page of 12 KB, as a small exporter has it.
fn page(index: usize) -> String {
    let filler =
        |line| format!("filler{{device=\"nvme{line}n1\",path=\"/dev/disk\"}} {index}.5e3\n");
    let mut page: String = (0..200).map(filler).collect();
    let cpu = (index % 100) as f64 / 100.0;
    let figures = format!("node:cpu{{mode=\"busy\"}} {cpu}\nnode:memory_used_bytes 4294967296\n");
    page.push_str(&figures);
    page
}

async fn answer(mut stream: TcpStream, kind: Kind, index: usize) {
    let mut request = [0; 1024];
    drop(stream.read(&mut request).await);
    let body = match kind {
        Kind::Hangs => {
            // Until the client disconnects.
            drop(stream.read(&mut request).await);
            return;
        }
        Kind::Garbage => "<html><body>hello</body></html>".to_owned(),
        Kind::Good | Kind::Gone => page(index),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
    drop(stream.write_all((head + &body).as_bytes()).await);
}

/// Exporters at one port of all loopback addresses, on a thread of their own. Returns the port.
fn exporters(kind: fn(usize) -> Kind, seen: Seen) -> u16 {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let serving = async move {
        let listener = TcpListener::from_std(listener).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let index = index_of(stream.local_addr().unwrap().ip());
            let seen = seen.clone();
            tokio::spawn(async move {
                seen.change(index, true);
                answer(stream, kind(index), index).await;
                seen.change(index, false);
            });
        }
    };
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    thread::spawn(move || runtime.block_on(serving));
    port
}

/// A port at which nothing listens.
fn closed_port() -> u16 {
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// The slices of these endpoints, with at most 100 each.
fn slices(endpoints: &[usize], port: u16) -> Vec<Change> {
    let slice = |endpoints: &[usize]| {
        let endpoint =
            |index: &usize| json!({"addresses": [address(*index)], "nodeName": name(*index)});
        let endpoints: Vec<_> = endpoints.iter().map(endpoint).collect();
        let object = json!({"ports": [{"name": "metrics", "port": port}], "endpoints": endpoints});
        (object["endpoints"][0]["nodeName"].to_string(), object)
    };
    let slices = endpoints.chunks(100).map(slice);
    slices
        .map(|(name, slice)| Change::Apply(name, slice))
        .collect()
}

/// Keeps the loads of these nodes from what is polled, as the controller does.
struct Controller {
    updater: StoreUpdater,
    leadership: values::Sender<Leadership>,
}

impl Controller {
    fn of(nodes: usize) -> Self {
        let (leadership, seen) = values::channel(Leadership::default());
        let data = Arc::new(Data::new(Limits::default(), seen));
        let mut updater = StoreUpdater::new(data, None);
        for index in 0..nodes {
            let node = NodeKnown {
                uid: name(index),
                facts: NodeFacts {
                    cpus: 8,
                    memory: Bytes(16 << 30),
                    ..NodeFacts::default()
                },
                ..NodeKnown::default()
            };
            updater.node(&name(index), Some(node));
        }
        Self {
            updater,
            leadership,
        }
    }
}

fn options(interval: Duration, limit: Duration) -> Options {
    let (interval, limit) = (interval.as_millis(), limit.as_millis());
    let file = format!(
        "{{interval: {interval}ms, timeout: {limit}ms, services: [{{namespace: a, name: b, port: metrics, metrics: [\
         {{name: cpu_usage_avg_5m, series: 'node:cpu', labels: {{mode: busy}}, unit: ratio}}, \
         {{name: mem_usage_avg_5m, series: 'node:memory_used_bytes', unit: bytes}}]}}]}}"
    );
    Options {
        settings: polling::read(&file).unwrap(),
        metrics: PollMetrics::default(),
    }
}

fn sorted(loads: &ByNode) -> BTreeMap<&str, Option<&KnownLoad>> {
    let loads = loads.iter();
    loads.map(|(name, load)| (&**name, load.as_ref())).collect()
}

/// The ages of the values of the good nodes, sorted, and how many of them have none.
fn ages(loads: &NodeLoads, kind: fn(usize) -> Kind) -> (Vec<Duration>, usize) {
    let now = clock::boot_time();
    let all = loads.read();
    let good = sorted(&all).into_iter().enumerate();
    let good = good.filter(|(index, _)| kind(*index) == Kind::Good);
    let ages = good.map(|(_, (_, load))| load.map(|load| now.since(load.at)));
    let (known, unknown): (Vec<_>, Vec<_>) = ages.partition(Option::is_some);
    let mut known: Vec<Duration> = known.into_iter().flatten().collect();
    known.sort();
    (known, unknown.len())
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:"));
    let mut words = line.unwrap().split_whitespace();
    words.nth(1).unwrap().parse().unwrap()
}

/// What a run has shown.
#[derive(Debug)]
struct Figures {
    /// 99th percentile and maximum of the ages of good nodes, over all samples after the first two rounds.
    p99: Duration,
    max: Duration,
    /// CPU time of the poller and of what keeps its values, as a share of one CPU.
    cpu: f64,
    /// Tasks of the poller's runtime at the middle and the end.
    tasks: [usize; 2],
    /// Memory of the process, exporters included, above what it had before there were any nodes: with the nodes, at the middle and
    /// at the end.
    resident_kib: [u64; 3],
    in_progress: (usize, usize),
}

/// The slices of these nodes.
fn listed(nodes: usize, kind: fn(usize) -> Kind, open: u16) -> poller::Changes {
    let (gone, there): (Vec<usize>, Vec<usize>) =
        (0..nodes).partition(|index| kind(*index) == Kind::Gone);
    let mut changes = vec![Change::Restarted];
    changes.extend(slices(&there, open));
    changes.extend(slices(&gone, closed_port()));
    changes.push(Change::Complete);
    let changes = stream::iter(changes.into_iter().map(|change| (0, change)));
    changes.chain(stream::pending()).boxed()
}

/// Polls for this time on a thread of its own, which returns its CPU time: of the poller, and of what keeps its values.
fn start(
    runtime: Runtime,
    mut controller: Controller,
    options: Options,
    changes: poller::Changes,
    time: Duration,
) -> JoinHandle<Duration> {
    thread::spawn(move || {
        let loads = controller.updater.loads();
        let (sender, mut found) = mpsc::channel(8192);
        let before = clock::thread_time();
        runtime.block_on(async {
            let rounds = poller::run(options, loads, changes, sender);
            let keep = async {
                while let Some(polled) = found.recv().await {
                    controller.updater.polled(polled);
                }
            };
            drop(timeout(time, futures::future::join(rounds, keep)).await);
        });
        drop(controller.leadership);
        clock::thread_time().saturating_sub(before)
    })
}

/// Polls this number of nodes for some rounds.
fn poll(nodes: usize, kind: fn(usize) -> Kind, options: Options, rounds: u32) -> Figures {
    let before = resident_kib();
    let seen = Seen::default();
    let open = exporters(kind, seen.clone());
    let controller = Controller::of(nodes);
    let loads = controller.updater.loads();
    let interval = options.settings.interval;
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let tasks_now = runtime.handle().metrics();
    let changes = listed(nodes, kind, open);
    let polling = start(runtime, controller, options, changes, interval * rounds);
    let mut all = Vec::new();
    let (mut tasks, mut resident) = ([0; 2], [resident_kib(); 3]);
    let waiting = Builder::new_current_thread().enable_all().build().unwrap();
    let samples = rounds * 4;
    for sample in 1..samples {
        waiting.block_on(async { sleep(interval / 4).await });
        if sample == samples / 2 {
            (tasks[0], resident[1]) = (tasks_now.num_alive_tasks(), resident_kib());
        }
        if sample > 8 {
            let (ages, unknown) = ages(&loads, kind);
            assert_eq!(unknown, 0, "good nodes without a value at sample {sample}");
            all.extend(ages);
        }
    }
    (tasks[1], resident[2]) = (tasks_now.num_alive_tasks(), resident_kib());
    let cpu = polling.join().unwrap().as_secs_f64() / (interval * rounds).as_secs_f64();
    for (index, load) in sorted(&loads.read()).values().enumerate() {
        assert_eq!(load.is_some(), kind(index) == Kind::Good, "{index}");
    }
    all.sort();
    let seen = seen.0.lock().unwrap();
    Figures {
        p99: all.get(all.len() * 99 / 100).copied().unwrap_or_default(),
        max: all.last().copied().unwrap_or_default(),
        cpu,
        tasks,
        resident_kib: resident.map(|kib| kib.saturating_sub(before)),
        in_progress: (seen.max_of_one, seen.max_of_all),
    }
}

#[test]
fn bad_endpoints_delay_no_others_and_nothing_grows() {
    // Long enough for the exporters, which share the CPUs with other tests.
    let interval = Duration::from_secs(3);
    let figures = poll(500, mixed, options(interval, Duration::from_secs(1)), 6);
    // Twice the interval, as promised.
    assert!(figures.p99 <= 2 * interval, "{figures:?}");
    assert!(figures.max <= 3 * interval, "{figures:?}");
    let (of_one, of_all) = figures.in_progress;
    assert_eq!(of_one, 1, "{figures:?}");
    assert!(of_all <= 2 * 64, "{figures:?}");
    // Connections of requests in progress at most.
    assert!(figures.tasks[1] <= figures.tasks[0] + 64, "{figures:?}");
}

#[test]
fn a_round_that_takes_longer_than_the_interval_is_finished_and_no_other_begins() {
    // 200 endpoints that hang for 0.9 s, 64 at a time: 3.6 s.
    let options = options(Duration::from_secs(1), Duration::from_millis(900));
    let figures = poll(200, hangs, options, 9);
    let (of_one, of_all) = figures.in_progress;
    assert_eq!(of_one, 1, "{figures:?}");
    // The exporters notice late that a request has ended.
    assert!((50..=2 * 64).contains(&of_all), "{figures:?}");
    assert!(figures.tasks[1] <= 64 + 8, "{figures:?}");
}

/// `make scale`.
#[test]
#[ignore = "takes two minutes, and needs a quiet machine"]
fn five_thousand_endpoints_in_fifteen_seconds() {
    let options = options(Duration::from_secs(15), Duration::from_secs(1));
    let metrics = options.metrics.clone();
    let figures = poll(5000, mixed, options, 8);
    let mut registry = prometheus_client::registry::Registry::default();
    metrics.register(&mut registry);
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
    let rounds = text.lines().filter(|line| line.starts_with("poll_"));
    let rounds: Vec<&str> = rounds.collect();
    println!("{figures:?}\n{}", rounds.join("\n"));
    assert!(figures.p99 <= Duration::from_secs(30), "{figures:?}");
    assert!(figures.cpu <= 0.5, "{figures:?}");
    let [_, middle, end] = figures.resident_kib;
    assert!(end <= 100 << 10 && end <= middle + (8 << 10), "{figures:?}");
    assert_eq!(figures.in_progress.0, 1, "{figures:?}");
}
