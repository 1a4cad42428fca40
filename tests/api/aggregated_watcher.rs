//! `NodeMetrics` through kube's watcher, across failovers and a restart of the API server.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::api_support::aggregation::{self, NODE_METRICS};
use crate::api_support::{ControlPlane, Controller, free_port};
use futures::StreamExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use kube::{Api, ResourceExt};
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::crd::NodeMetric;
use serde_json::{Value, json};
use tokio::runtime::Builder;

/// A watcher that is refused repeatedly waits for up to 30 s.
const TIMEOUT: Duration = Duration::from_mins(4);
const LEASES: &str = "plimsoll-node-lease";
const NODES: [&str; 3] = ["node00", "node01", "node02"];

/// Events of a watcher, each checked as it arrives.
#[derive(Default)]
struct Observed {
    versions: BTreeMap<String, u64>,
    /// CPU in use, in millicores.
    used: BTreeMap<String, String>,
    listed: BTreeSet<String>,
    lists: usize,
}

impl Observed {
    fn event(&mut self, event: Event<NodeMetric>) {
        match event {
            Event::Init => self.listed.clear(),
            Event::InitApply(metric) => {
                self.listed.insert(metric.name_any());
                self.metric(&metric);
            }
            Event::InitDone => {
                self.lists += 1;
                let all = NODES.map(str::to_owned).into();
                assert_eq!(self.listed, all, "no node is missing in any list");
            }
            Event::Apply(metric) => self.metric(&metric),
            Event::Delete(metric) => panic!("{} is not gone", metric.name_any()),
        }
    }

    fn metric(&mut self, metric: &NodeMetric) {
        let name = metric.name_any();
        let version: u64 = metric.resource_version().unwrap().parse().unwrap();
        let before = self.versions.insert(name.clone(), version);
        assert!(
            before <= Some(version),
            "{name}: {version} after {before:?}"
        );
        let used = metric.status.usage.node.cpu.clone();
        let used = used.expect("a measured value stays").0;
        assert_ne!(used, "0m", "{name} was never idle");
        self.used.insert(name, used);
    }
}

/// A watcher on its own thread, until the test ends.
fn follow(kubeconfig: PathBuf, config: Config) -> Arc<Mutex<Observed>> {
    let observed = Arc::new(Mutex::new(Observed::default()));
    let sink = Arc::clone(&observed);
    let following = async move {
        let client = connect(&ClusterSource::file(&kubeconfig)).await.unwrap();
        let mut events = watcher(Api::<NodeMetric>::all(client), config)
            .default_backoff()
            .boxed();
        while let Some(event) = events.next().await {
            // Errors are retried; events must be correct.
            if let Ok(event) = event {
                sink.lock().unwrap().event(event);
            }
        }
    };
    thread::spawn(move || {
        let runtime = Builder::new_current_thread().enable_all().build();
        runtime.unwrap().block_on(following);
    });
    observed
}

/// Writes heartbeats like the agents': CPU in percent of 8.
fn write_heartbeats(plane: &ControlPlane, percent: u32) {
    let lease = |name: &&str| {
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": name, "namespace": LEASES,
                "annotations": {"plimsoll.dev/summary": format!("seq={percent} cpu={percent}.0 mem=25.0")},
            },
            "spec": {
                "holderIdentity": name, "leaseDurationSeconds": 3600,
                "renewTime": "2026-01-02T03:04:05.000000Z",
            },
        })
    };
    let leases: Vec<Value> = NODES.iter().map(lease).collect();
    plane.apply(&leases);
}

/// Waits until all watchers have received this.
fn until_received(
    plane: &ControlPlane,
    watchers: &[Arc<Mutex<Observed>>],
    percent: u32,
    when: &str,
) {
    let used = format!("{}m", percent * 80);
    let waited = plane.until("all watchers are up to date", TIMEOUT, |_| {
        watchers.iter().all(|observed| {
            let observed = observed
                .lock()
                .expect("all events of the watcher are correct");
            NODES
                .iter()
                .all(|node| observed.used.get(*node) == Some(&used))
        })
    });
    eprintln!("{when}: received after {waited:?}");
}

struct Replica {
    name: &'static str,
    port: u16,
    controller: Controller,
}

fn start(plane: &ControlPlane, name: &str, port: u16) -> Controller {
    let listen = format!("0.0.0.0:{port}");
    plane.controller(
        name,
        &["--metrics-api-listen", &listen, "--pod-ip", "127.0.0.1"],
    )
}

/// A control plane with two replicas that serve the load of all nodes.
fn start_all() -> Option<(ControlPlane, [Replica; 2])> {
    let ports = [free_port(), free_port()];
    let plane = aggregation::plane(&ports)?;
    plane.nodes(&NODES.map(str::to_owned));
    plane.apply(&[json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASES}})]);
    write_heartbeats(&plane, 10);
    let replicas = [("first", ports[0]), ("second", ports[1])];
    let replicas = replicas.map(|(name, port)| Replica {
        name,
        port,
        controller: start(&plane, name, port),
    });
    plane.until("the load is served", TIMEOUT, |plane| {
        let list = plane.get_raw(NODE_METRICS).unwrap_or_default();
        let list: Value = serde_json::from_str(&list).unwrap_or_default();
        let shows = |metric: &Value| metric["status"]["usage"]["node"]["cpu"] == "800m";
        let metrics = list["items"].as_array();
        metrics.is_some_and(|metrics| metrics.len() == 3 && metrics.iter().all(shows))
    });
    Some((plane, replicas))
}

/// Kills the leader, and restarts it as the kubelet would.
fn kill_leader(plane: &ControlPlane, replicas: &mut [Replica; 2], meanwhile: impl FnOnce()) {
    let leader = replicas
        .iter_mut()
        .find(|replica| replica.controller.leads());
    let leader = leader.unwrap();
    leader.controller.process.0.kill().unwrap();
    leader.controller.process.0.wait().unwrap();
    leader.controller = start(plane, leader.name, leader.port);
    meanwhile();
    plane.until("one leads and both are ready", TIMEOUT, |_| {
        let ready = |replica: &Replica| {
            let answer = replica.controller.http("/readyz");
            answer.is_some_and(|(code, _)| code == 200)
        };
        let leads = |replica: &Replica| replica.controller.leads();
        replicas.iter().any(leads) && replicas.iter().all(ready)
    });
}

#[test]
fn a_watcher_is_correct_across_failovers_and_an_api_server_restart() {
    let Some((mut plane, mut replicas)) = start_all() else {
        return;
    };
    let watchers = [
        Config::default(),
        Config::default().page_size(1),
        Config::default().streaming_lists(),
    ]
    .map(|config| follow(plane.kubeconfig.clone(), config));
    until_received(&plane, &watchers, 10, "at first");
    write_heartbeats(&plane, 20);
    until_received(&plane, &watchers, 20, "a heartbeat");
    for percent in [30, 40] {
        kill_leader(&plane, &mut replicas, || {
            write_heartbeats(&plane, percent);
            until_received(&plane, &watchers, percent, "after the leader was killed");
        });
    }
    plane.stop();
    plane.start_again();
    plane.until("Leases can be written", TIMEOUT, |plane| {
        let leases = ["get", "leases", "-n", LEASES];
        plane.try_kubectl(&leases, "").is_ok()
    });
    write_heartbeats(&plane, 50);
    until_received(&plane, &watchers, 50, "after the API server was restarted");
    for observed in &watchers {
        let lists = observed.lock().unwrap().lists;
        assert!(lists >= 3, "each failover shows as a new list: {lists}");
    }
}
