//! A controller with many nodes whose agents report to it.

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
use plimsoll::cluster::client::connect;
use plimsoll::cluster::clock;
use plimsoll::crd::report::MOST_BYTES;
use serde_json::json;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::agents::{Agents, Tally};
use super::api_support::reporter::{Forger, account, runtime, token, trust};
use super::api_support::{ControlPlane, Controller, LEASES, caller, free_port, lease_namespace};
use super::clients::{JSON, METRICS, Reader, TABLE};
use super::figures::{Figures, quantile, say};
use super::process::{Cpu, resident};
use super::report;
use super::run_support::argument;

/// The size at which the bars of times hold.
const SIZE: usize = 5000;
const MILLICORES: f64 = 0.15;
const ACK_MILLIS: f64 = 10.0;
const GET_MILLIS: f64 = 1.0;
const LIST_MILLIS: f64 = 50.0;
/// Of one watcher, whether it reads or not: what it is sent at a time, twice.
const WATCHER_KB: f64 = 1024.0;

/// Agents that begin in a second, at most.
const BEGIN: usize = 500;
const SOON: Duration = Duration::from_mins(5);
const AT_ONCE: usize = 16;
/// Each Lease is renewed so often.
const RENEWALS: usize = 3;
const MOST_LEASES: usize = 1000;
/// Who may read `NodeMetrics`, and nothing else.
const USER: &str = "ann";

/// All of it.
pub struct Fleet<'a> {
    plane: &'a ControlPlane,
    runtime: Runtime,
    client: Client,
    controller: Controller,
    agents: Agents,
    forger: Forger,
    /// Reads `NodeMetrics` as the API server passes it on.
    reader: Reader,
    nodes: usize,
    /// Those of them whose agents report.
    reporting: usize,
}

impl<'a> Fleet<'a> {
    /// One without nodes.
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
        plane.until("it leads", SOON, |_| controller.leads());
        let proxy = plane.front_proxy();
        let certificate = (proxy.certificate, proxy.key);
        let client = runtime.block_on(connect(Some(&plane.kubeconfig))).unwrap();
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

    /// Makes as many nodes as are wanted. It returns when the controller has done what new nodes need.
    pub fn grow(&mut self, nodes: usize) {
        let api: Api<Node> = Api::all(self.client.clone());
        let new = self.nodes..nodes;
        self.runtime.block_on(create(&api, new.map(node)));
        self.nodes = nodes;
        let wanted = nodes as f64;
        self.plane
            .until("all nodes have their watermark", SOON, |_| {
                let of = |name| self.controller.metric(name);
                let written = of("plimsoll_controller_nodes ") >= wanted;
                written && of("plimsoll_controller_pending_nodes ") < 0.5
            });
    }

    fn process(&self) -> u32 {
        self.controller.process.0.id()
    }

    /// What a heartbeat by Lease costs, which direct reports make rare.
    pub fn renew(&self) {
        let api: Api<Lease> = Api::namespaced(self.client.clone(), LEASES);
        let leases = self.nodes.min(MOST_LEASES);
        let (servers, controller) = (self.plane.processes(), [self.process()]);
        let [used, heard] = self.runtime.block_on(async {
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
        say("CPU of the API server and etcd for one", each(&used), "us");
        say("CPU of the controller for one", each(&heard), "us");
    }

    /// Lets an agent for each node report for so long.
    pub fn report(&mut self, time: Duration, figures: &mut Figures) {
        let new = self.new_agents();
        let within = Duration::from_secs_f64(new.len() as f64 / BEGIN as f64);
        let within = within.max(Duration::from_secs(report::EVERY));
        self.agents.begin(new, within);
        self.reporting = self.nodes;
        // All are connected then, and have reported once.
        let settled = within + Duration::from_secs(report::EVERY + 5);
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
            report::EVERY
        );
        self.say_ingest(tally, &used, time, figures);
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

    fn say_ingest(&self, mut tally: Tally, used: &Cpu, time: Duration, figures: &mut Figures) {
        let (nodes, reports) = (self.nodes as f64, tally.waits.len() as f64);
        let cores = used.seconds() / time.as_secs_f64();
        let what = "CPU of the controller for a node";
        figures.at_most(what, cores * 1000.0 / nodes, "millicores", MILLICORES);
        for (thread, seconds) in used.threads().filter(|(_, seconds)| *seconds > 0.01) {
            let what = format!("  of which its thread {thread:?}, for one report");
            say(&what, seconds * 1e6 / reports, "us");
        }
        let due = nodes * time.as_secs_f64() / report::EVERY as f64;
        let taken = tally.answers.get("200").copied().unwrap_or(0) as f64;
        println!("  answers: {:?}", tally.answers);
        let lost = (due - taken).max(0.0) * 100.0 / due;
        figures.at_most("reports that were due and not taken", lost, "%", 1.0);
        let waits = &mut tally.waits;
        say("acknowledged, p50", quantile(waits, 0.5), "ms");
        let p99 = quantile(waits, 0.99);
        if self.nodes <= SIZE {
            figures.at_most("acknowledged, p99", p99, "ms", ACK_MILLIS);
        } else {
            say("acknowledged, p99", p99, "ms");
        }
        say("acknowledged, slowest", quantile(waits, 1.0), "ms");
        let largest = tally.largest as f64;
        let what = format!("body of a report of {} pods, largest", report::PODS);
        figures.at_most(&what, largest, "bytes", MOST_BYTES as f64);
        let memory = resident(self.process());
        say("resident memory of the controller", memory / 1000.0, "MB");
        say(
            "  for a node, its connection included",
            memory / nodes,
            "kB",
        );
    }

    /// Asks for objects while agents go on to report.
    pub fn ask(&self, gets: usize, lists: usize, figures: &mut Figures) {
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
        let asked = async {
            // Whether the user may is asked of the API server at first, and known then for a while.
            let first = self.reader.ask_often(&ours, JSON, some, at_once).await;
            let get = self.reader.ask_often(&ours, JSON, gets, at_once).await;
            let node = server.ask_often(&theirs, JSON, gets, at_once).await;
            let list = self.reader.ask_often(&all, JSON, lists, pause).await;
            let table = self.reader.ask_often(&all, TABLE, lists, pause).await;
            let nodes = server.ask_often(&cached, JSON, lists, pause).await;
            [first, get, node, list, table, nodes]
        };
        let [first, get, node, list, table, nodes] = self.runtime.block_on(asked);
        say_times(
            "get, where the API server has to be asked who may",
            first,
            None,
            figures,
        );
        say_times("get", get, Some((0.99, GET_MILLIS)), figures);
        say_times(
            "get of a Node, from the API server, as a baseline",
            node,
            None,
            figures,
        );
        let bar = (self.nodes <= SIZE).then_some((0.5, LIST_MILLIS));
        say_times("list as JSON", list, bar, figures);
        say_times("list as a Table", table, bar, figures);
        say_times(
            "list of Nodes, from the API server's cache, as a baseline",
            nodes,
            None,
            figures,
        );
    }

    /// Lets so many follow what all agents report: a fifth of them takes nothing of what it is sent.
    pub fn watch(&self, watchers: usize, time: Duration, figures: &mut Figures) {
        println!(
            "{watchers} watchers of {} nodes, of whom {} do not read:",
            self.nodes,
            watchers / 5
        );
        let told: Vec<Arc<AtomicUsize>> = (0..watchers - watchers / 5)
            .map(|_| Arc::default())
            .collect();
        let told_so_far = || -> Vec<usize> {
            told.iter()
                .map(|told| told.load(Ordering::Relaxed))
                .collect()
        };
        let watching = async {
            let calm = resident(self.process());
            let mut following = JoinSet::new();
            for told in &told {
                let version = self.reader.version().await;
                following.spawn(self.reader.clone().follow(version, Arc::clone(told)));
            }
            for _ in 0..watchers / 5 {
                following.spawn(self.reader.clone().ignore());
            }
            sleep(Duration::from_secs(5)).await;
            drop(self.agents.take());
            let (cpu, before) = (Cpu::of(&[self.process()]), told_so_far());
            let mut most = 0.0_f64;
            for _ in 0..time.as_secs() {
                sleep(Duration::from_secs(1)).await;
                most = most.max(resident(self.process()));
            }
            let used = Cpu::of(&[self.process()]).since(&cpu).seconds() / time.as_secs_f64();
            let happened = self.agents.take().waits.len() as f64;
            let after = told_so_far();
            let new = after
                .iter()
                .zip(&before)
                .map(|(after, before)| after - before);
            let least = new.min().unwrap_or(0) as f64;
            drop(following);
            sleep(Duration::from_secs(5)).await;
            (calm, most, used, 100.0 - least * 100.0 / happened)
        };
        let (calm, most, used, missed) = self.runtime.block_on(watching);
        let each = (most - calm).max(0.0) / watchers as f64;
        figures.at_most("memory of a watcher, at most", each, "kB", WATCHER_KB);
        let left = resident(self.process()) - calm;
        say("memory that is left once they are gone", left, "kB");
        let what = "events that the watcher was not told in time that was told fewest";
        figures.at_most(what, missed.max(0.0), "%", 5.0);
        say("cores of the controller, ingest included", used, "");
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

/// Renews a Lease again and again, as an agent does: by a PUT of what was answered last.
async fn renew(api: &Api<Lease>, mut lease: Lease) {
    for _ in 0..RENEWALS {
        let name = lease.metadata.name.clone().unwrap();
        if let Some(spec) = &mut lease.spec {
            spec.renew_time = Some(MicroTime(clock::wall()));
        }
        let renewed = api.replace(&name, &PostParams::default(), &lease).await;
        lease = renewed.unwrap();
    }
}

/// Creates objects, some at a time; what was answered.
async fn create<K>(api: &Api<K>, objects: impl Iterator<Item = K>) -> Vec<K>
where
    K: Clone + std::fmt::Debug + serde::Serialize + serde::de::DeserializeOwned,
{
    let params = PostParams::default();
    let created = stream::iter(objects.map(|object| {
        let params = &params;
        async move { api.create(params, &object).await.unwrap() }
    }));
    created.buffer_unordered(AT_ONCE).collect().await
}

/// How long answers took, and the bar of one share of them.
fn say_times(
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
            Some((_, most)) => figures.at_most(&name, value, "ms", most),
            None => say(&name, value, "ms"),
        }
    }
}
