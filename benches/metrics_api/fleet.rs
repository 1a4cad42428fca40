//! A controller with many nodes and reporting agents.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures::StreamExt;
use futures::stream;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::PostParams;
use kube::{Api, Client};
use plimsoll::clock;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::crd::report::MAX_BYTES;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::agents::{Agents, Tally};
use super::api_support::reporter::{Forger, account, runtime, token, trust};
use super::api_support::{ControlPlane, Controller, LEASES, caller, free_port, lease_namespace};
use super::clients::{JSON, METRICS, Reader, TABLE};
use super::figures::{Figures, print, quantile};
use super::process::{Cpu, resident};
use super::report;
use super::run_support::argument;

/// Bars on times hold up to this number of nodes.
const NODES_WITH_BARS: usize = 5000;
const MAX_MILLICORES: f64 = 0.15;
const MAX_ACK_MILLIS: f64 = 10.0;
const MAX_GET_MILLIS: f64 = 1.0;
const MAX_LIST_MILLIS: f64 = 50.0;
/// Per watcher, whether it reads or not: twice what it is sent at once.
const MAX_WATCHER_KB: f64 = 1024.0;

/// Maximum number of agents started per second.
const STARTS_PER_SECOND: usize = 500;
const TIMEOUT: Duration = Duration::from_mins(5);
const CONCURRENCY: usize = 16;
/// Renewals of each Lease.
const RENEWALS: usize = 3;
const MAX_LEASES: usize = 1000;
/// A user who may read `NodeMetrics` and nothing else.
const USER: &str = "ann";

/// A control plane, a controller, and agents.
pub struct Fleet<'a> {
    plane: &'a ControlPlane,
    runtime: Runtime,
    client: Client,
    controller: Controller,
    agents: Agents,
    forger: Forger,
    /// Reads `NodeMetrics` as the API server proxies requests.
    reader: Reader,
    nodes: usize,
    /// Nodes whose agents report.
    reporting: usize,
}

impl<'a> Fleet<'a> {
    /// Starts a controller without nodes.
    pub fn of(plane: &'a ControlPlane) -> Self {
        let runtime = runtime();
        account(plane);
        let first = report::node(0);
        let may_read = [
            lease_namespace(),
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": first}}),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "reader"},
                "rules": [{"apiGroups": ["metrics.plimsoll.dev"], "resources": ["nodemetrics"], "verbs": ["get", "list", "watch"]}],
            }),
            json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "reader"},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"},
                "subjects": [{"kind": "User", "name": USER}],
            }),
        ];
        plane.apply(&may_read);
        let forger = Forger::new(plane, &token(plane, &first));
        plane.kubectl(&["delete", "node", &first]);
        let [metrics, reports] = [free_port(), free_port()];
        let controller = start(plane, metrics, reports);
        plane.until("it leads", TIMEOUT, |_| controller.leads());
        let proxy = plane.front_proxy();
        let certificate = (proxy.certificate, proxy.key);
        let client = runtime
            .block_on(connect(&ClusterSource::file(&plane.kubeconfig)))
            .unwrap();
        let reader = Reader {
            client: runtime.block_on(async { caller::client(metrics, Some(certificate)) }),
            user: Some(USER),
        };
        Self {
            plane,
            client,
            controller,
            agents: Agents::of(trust(plane), reports),
            forger,
            reader,
            runtime,
            nodes: 0,
            reporting: 0,
        }
    }

    /// Creates nodes up to this number, and waits until the controller has written a `NodeWatermark` for each.
    pub fn grow(&mut self, nodes: usize) {
        let api: Api<Node> = Api::all(self.client.clone());
        let new = self.nodes..nodes;
        self.runtime.block_on(create(&api, new.map(node)));
        self.nodes = nodes;
        let wanted = nodes as f64;
        self.plane
            .until("all nodes have their watermark", TIMEOUT, |_| {
                let of = |name| self.controller.metric(name);
                let written = of("plimsoll_controller_nodes ") >= wanted;
                written && of("plimsoll_controller_pending_nodes ") < 0.5
            });
    }

    fn process(&self) -> u32 {
        self.controller.process.0.id()
    }

    /// Measures heartbeats by Lease, which direct reports make rare.
    pub fn renew(&self) {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), LEASES);
        let leases = self.nodes.min(MAX_LEASES);
        let (servers, controller) = (self.plane.processes(), [self.process()]);
        let [servers, controller] = self.runtime.block_on(async {
            let created = create(&api, (0..leases).map(lease)).await;
            let before = [Cpu::of(&servers), Cpu::of(&controller)];
            let renewed = stream::iter(created.into_iter().map(|lease| renew(&api, lease)));
            renewed.buffer_unordered(4).collect::<()>().await;
            [
                Cpu::of(&servers).since(&before[0]),
                Cpu::of(&controller).since(&before[1]),
            ]
        });
        let renewals = (leases * RENEWALS) as f64;
        println!("{renewals} renewals of Leases, as a baseline:");
        let each = |cpu: &Cpu| cpu.seconds() * 1e6 / renewals;
        print(
            "CPU of the API server and etcd for one",
            each(&servers),
            "us",
        );
        print("CPU of the controller for one", each(&controller), "us");
    }

    /// Lets an agent for each node report for this time.
    pub fn report(&mut self, time: Duration, figures: &mut Figures) {
        let new = self.new_agents();
        let within = Duration::from_secs_f64(new.len() as f64 / STARTS_PER_SECOND as f64);
        let within = within.max(Duration::from_secs(report::INTERVAL));
        self.agents.start(new, within);
        self.reporting = self.nodes;
        // By then all are connected and have reported once.
        let settled = within + Duration::from_secs(report::INTERVAL + 5);
        let (tally, used) = self.runtime.block_on(async {
            sleep(settled).await;
            drop(self.agents.take());
            let before = Cpu::of(&[self.process()]);
            sleep(time).await;
            let used = Cpu::of(&[self.process()]).since(&before);
            (self.agents.take(), used)
        });
        println!(
            "{} agents that report every {} s:",
            self.nodes,
            report::INTERVAL
        );
        self.print_ingest(tally, &used, time, figures);
    }

    fn new_agents(&self) -> Vec<(String, String)> {
        let agents = self.reporting..self.nodes;
        let token = |index| {
            let node = report::node(index);
            let bound = json!({"name": node, "uid": node});
            let token = self.forger.token(&[("/claims/kubernetes.io/node", bound)]);
            (node, token)
        };
        agents.map(token).collect()
    }

    fn print_ingest(&self, mut tally: Tally, used: &Cpu, time: Duration, figures: &mut Figures) {
        let (nodes, reports) = (self.nodes as f64, tally.latencies.len() as f64);
        let cores = used.seconds() / time.as_secs_f64();
        let what = "CPU of the controller for a node";
        figures.at_most(what, cores * 1000.0 / nodes, "millicores", MAX_MILLICORES);
        for (thread, seconds) in used.threads().filter(|(_, seconds)| *seconds > 0.01) {
            let what = format!("  of which its thread {thread:?}, for one report");
            print(&what, seconds * 1e6 / reports, "us");
        }
        let due = nodes * time.as_secs_f64() / report::INTERVAL as f64;
        let taken = tally.answers.get("200").copied().unwrap_or(0) as f64;
        println!("  answers: {:?}", tally.answers);
        let lost = (due - taken).max(0.0) * 100.0 / due;
        figures.at_most("reports that were due and not accepted", lost, "%", 1.0);
        let latencies = &mut tally.latencies;
        print("acknowledged, p50", quantile(latencies, 0.5), "ms");
        let p99 = quantile(latencies, 0.99);
        if self.nodes <= NODES_WITH_BARS {
            figures.at_most("acknowledged, p99", p99, "ms", MAX_ACK_MILLIS);
        } else {
            print("acknowledged, p99", p99, "ms");
        }
        print("acknowledged, slowest", quantile(latencies, 1.0), "ms");
        let largest = tally.largest as f64;
        let what = format!("body of a report of {} pods, largest", report::PODS);
        figures.at_most(&what, largest, "bytes", MAX_BYTES as f64);
        let memory = resident(self.process());
        print("resident memory of the controller", memory / 1000.0, "MB");
        print(
            "  for a node, its connection included",
            memory / nodes,
            "kB",
        );
    }

    /// Measures reads while agents report.
    pub fn read(&self, gets: usize, lists: usize, figures: &mut Figures) {
        println!(
            "answers of the controller at {} nodes, while all report:",
            self.nodes
        );
        let some = self.nodes.min(10);
        let one = |of: &str| -> Vec<String> {
            let paths = (0..some).map(|index| format!("{of}/{}", report::node(index)));
            paths.collect()
        };
        let server = Reader {
            client: self.client.clone(),
            user: None,
        };
        let (ours, theirs) = (one(METRICS), one("/api/v1/nodes"));
        let all = [METRICS.to_owned()];
        let cached = ["/api/v1/nodes?resourceVersion=0".to_owned()];
        let (at_once, pause) = (Duration::ZERO, Duration::from_millis(200));
        let reads = async {
            // The first reads include a SubjectAccessReview, whose result is cached.
            let first = self
                .reader
                .read_repeatedly(&ours, JSON, some, at_once)
                .await;
            let get = self
                .reader
                .read_repeatedly(&ours, JSON, gets, at_once)
                .await;
            let node = server.read_repeatedly(&theirs, JSON, gets, at_once).await;
            let list = self.reader.read_repeatedly(&all, JSON, lists, pause).await;
            let table = self.reader.read_repeatedly(&all, TABLE, lists, pause).await;
            let nodes = server.read_repeatedly(&cached, JSON, lists, pause).await;
            [first, get, node, list, table, nodes]
        };
        let [first, get, node, list, table, nodes] = self.runtime.block_on(reads);
        print_times("get, with a SubjectAccessReview", first, None, figures);
        print_times("get", get, Some((0.99, MAX_GET_MILLIS)), figures);
        print_times(
            "get of a Node, from the API server, as a baseline",
            node,
            None,
            figures,
        );
        let bar = (self.nodes <= NODES_WITH_BARS).then_some((0.5, MAX_LIST_MILLIS));
        print_times("list as JSON", list, bar, figures);
        print_times("list as a Table", table, bar, figures);
        print_times(
            "list of Nodes, from the API server's cache, as a baseline",
            nodes,
            None,
            figures,
        );
    }

    /// Measures this number of watchers, a fifth of which do not read.
    pub fn watch(&self, watchers: usize, time: Duration, figures: &mut Figures) {
        println!(
            "{watchers} watchers of {} nodes, {} of which do not read:",
            self.nodes,
            watchers / 5
        );
        let events: Vec<Arc<AtomicUsize>> = (0..watchers - watchers / 5)
            .map(|_| Arc::default())
            .collect();
        let received = || -> Vec<usize> {
            events
                .iter()
                .map(|events| events.load(Ordering::Relaxed))
                .collect()
        };
        let watching = async {
            let baseline = resident(self.process());
            let mut connections = JoinSet::new();
            for events in &events {
                let version = self.reader.version().await;
                connections.spawn(self.reader.clone().watch(version, Arc::clone(events)));
            }
            for _ in 0..watchers / 5 {
                connections.spawn(self.reader.clone().watch_without_reading());
            }
            sleep(Duration::from_secs(5)).await;
            drop(self.agents.take());
            let (cpu, before) = (Cpu::of(&[self.process()]), received());
            let mut max = 0.0_f64;
            for _ in 0..time.as_secs() {
                sleep(Duration::from_secs(1)).await;
                max = max.max(resident(self.process()));
            }
            let used = Cpu::of(&[self.process()]).since(&cpu).seconds() / time.as_secs_f64();
            let reported = self.agents.take().latencies.len() as f64;
            let after = received();
            let received = after
                .iter()
                .zip(&before)
                .map(|(after, before)| after - before);
            let fewest = received.min().unwrap_or(0) as f64;
            drop(connections);
            sleep(Duration::from_secs(5)).await;
            (baseline, max, used, 100.0 - fewest * 100.0 / reported)
        };
        let (baseline, max, used, missed) = self.runtime.block_on(watching);
        let each = (max - baseline).max(0.0) / watchers as f64;
        figures.at_most("memory of a watcher, at most", each, "kB", MAX_WATCHER_KB);
        let left = resident(self.process()) - baseline;
        print("memory that remains after they disconnect", left, "kB");
        let what = "events missed by the slowest watcher";
        figures.at_most(what, missed.max(0.0), "%", 5.0);
        print("cores of the controller, ingest included", used, "");
    }
}

fn start(plane: &ControlPlane, metrics: u16, reports: u16) -> Controller {
    let binary = argument("--binary");
    let binary = binary.unwrap_or_else(|| env!("CARGO_BIN_EXE_plimsoll").to_owned());
    let listen = |port| format!("127.0.0.1:{port}");
    let (metrics, reports) = (listen(metrics), listen(reports));
    let args = [
        "--metrics-api-listen",
        &metrics,
        "--pod-ip",
        "127.0.0.1",
        "--report-listen",
        &reports,
    ];
    plane.controller_of(Command::new(binary), &plane.kubeconfig, "controller", &args)
}

fn node(index: usize) -> Node {
    let node = json!({
        "metadata": {"name": report::node(index), "labels": report::labels(index)},
        "status": {
            "capacity": {"cpu": "32", "memory": "131072000Ki", "pods": "110"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        },
    });
    serde_json::from_value(node).unwrap()
}

fn lease(index: usize) -> Lease {
    let node = report::node(index);
    let summary = "seq=17 cpu=61.5 mem=50.0 cpumark=80.0 psi=12.5/1.2/0.4 rules=3 throttled=4 v=0.1.0 breached=1:protect/cpu";
    let lease = json!({
        "metadata": {"name": node, "annotations": {"plimsoll.dev/summary": summary}},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": "2026-01-02T03:04:05.000000Z"},
    });
    serde_json::from_value(lease).unwrap()
}

/// Renews a Lease repeatedly, as an agent does: by a PUT of the last answer.
async fn renew(api: &Api<Lease>, mut lease: Lease) {
    for _ in 0..RENEWALS {
        let name = lease.metadata.name.clone().unwrap();
        if let Some(spec) = &mut lease.spec {
            spec.renew_time = Some(MicroTime(clock::wall_time()));
        }
        let renewed = api.replace(&name, &PostParams::default(), &lease).await;
        lease = renewed.unwrap();
    }
}

/// Creates objects concurrently; returns the answers.
async fn create<K>(api: &Api<K>, objects: impl Iterator<Item = K>) -> Vec<K>
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let params = PostParams::default();
    let created = stream::iter(objects.map(|object| {
        let params = &params;
        async move { api.create(params, &object).await.unwrap() }
    }));
    created.buffer_unordered(CONCURRENCY).collect().await
}

/// Prints how long answers took, with a bar on one quantile.
fn print_times(
    what: &str,
    (mut times, bytes): (Vec<f64>, usize),
    bar: Option<(f64, f64)>,
    figures: &mut Figures,
) {
    let kilobytes = bytes as f64 / 1000.0;
    println!("  {what}: {} times, {kilobytes:.1} kB", times.len());
    for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
        let value = quantile(&mut times, share);
        let name = format!("  {what}, {name}");
        match bar.filter(|(of, _)| (of - share).abs() < 0.001) {
            Some((_, max)) => figures.at_most(&name, value, "ms", max),
            None => print(&name, value, "ms"),
        }
    }
}
