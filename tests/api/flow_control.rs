//! The chart's priority levels on a real, small API server: an agent that floods it with lists does not delay the heartbeat of
//! another.

use std::path::PathBuf;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::actor_support::attempts::{OTHER, OWN, lease};
use crate::actor_support::{
    AGENT, Actor, Answer, CONTROLLER, JSON, agent_pod, install, kubeconfig,
};
use crate::api_support::reporter::runtime;
use crate::api_support::{ControlPlane, LEASES, names, now};
use crate::chart_support::{NAMESPACE, objects};
use futures::future::join_all;
use http_body_util::BodyExt as _;
use hyper::Request;
use kube::Client;
use kube::client::Body;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use serde_json::{Value, json};
use tokio::sync::oneshot::{Sender, channel};

const TIMEOUT: Duration = Duration::from_mins(4);
/// Longest allowed heartbeat.
const DELAY: Duration = Duration::from_secs(2);
/// Concurrent lists: more than any level of a server of this size runs at once.
const LISTS: usize = 200;
/// At least this many of them have to wait; a connection carries at most a hundred requests.
const MANY: f64 = 50.0;
const SMALL: &[&str] = &[
    "--max-requests-inflight=10",
    "--max-mutating-requests-inflight=10",
];

/// A large pod, for long lists.
fn large(index: usize) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": format!("large-{index}"), "namespace": "default", "annotations": {"a": "x".repeat(50_000)}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    })
}

/// The number of requests waiting in this priority level.
fn waiting(plane: &ControlPlane, level: &str) -> f64 {
    let text = plane.kubectl(&["get", "--raw", "/metrics"]);
    let wanted = format!("priority_level=\"{level}\"");
    let lines = text.lines().filter(|line| {
        line.starts_with("apiserver_flowcontrol_current_inqueue_requests{")
            && line.contains(&wanted)
    });
    let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
    values.sum()
}

/// Creates or renews a Lease.
async fn renew(actor: &Actor, namespace: &str, name: &str) -> Answer {
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
    let path = format!("{leases}/{name}");
    let mut known = actor.get(&path).await.body;
    if known["kind"] == "Status" {
        return actor.send("POST", &leases, JSON, &lease(name)).await;
    }
    let transitions = known["spec"]["leaseTransitions"].as_i64().unwrap_or(0);
    known["spec"]["leaseTransitions"] = (transitions + 1).into();
    actor.send("PUT", &path, JSON, &known).await
}

async fn until_renewed(actor: &Actor, namespace: &str, name: &str) {
    let started = now();
    while renew(actor, namespace, name).await.code != 200 {
        assert!(started.elapsed() < TIMEOUT, "{name} cannot be renewed");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The longest of several renewals.
async fn slowest(actor: &Actor, namespace: &str, name: &str) -> Duration {
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        let started = now();
        let renewed = renew(actor, namespace, name).await;
        longest = longest.max(started.elapsed());
        assert_eq!(renewed.code, 200, "{renewed:?}");
        tokio::time::sleep(Duration::from_millis(250)).await;
    }
    longest
}

/// Requests one list after the other.
async fn request_lists(client: &Client) {
    loop {
        let request = Request::get("/api/v1/pods").body(Body::empty()).unwrap();
        if let Ok(answer) = client.send(request).await {
            drop(answer.into_body().collect().await);
        }
    }
}

/// Floods the server with lists as an agent, on a separate thread, until the sender is dropped.
fn flood(kubeconfig: PathBuf) -> (Sender<()>, JoinHandle<()>) {
    let (end, ended) = channel();
    let asking = thread::spawn(move || {
        runtime().block_on(async {
            let client = connect(&ClusterSource::file(&kubeconfig)).await.unwrap();
            let asking = (0..LISTS).map(|_| request_lists(&client));
            tokio::select! {
                _ = join_all(asking) => {}
                _ = ended => {}
            }
        });
    });
    (end, asking)
}

#[test]
fn an_agent_that_floods_lists_delays_no_heartbeat_and_no_election() {
    let Some(plane) = ControlPlane::start_with(SMALL).filter(ControlPlane::is_own) else {
        return;
    };
    let chart = install(&plane, NAMESPACE);
    let flow = objects(&chart).into_iter().map(|(object, _)| object);
    let flow = flow.filter(|it| it["apiVersion"] == "flowcontrol.apiserver.k8s.io/v1");
    let flow: Vec<_> = flow.collect();
    assert_eq!(flow.len(), 6, "three levels, each with a schema");
    plane.apply(&flow);
    plane.nodes(&names(2));
    agent_pod(&plane, OWN);
    agent_pod(&plane, OTHER);
    plane.create(&(0..200).map(large).collect::<Vec<_>>());
    let others = runtime();
    let other_agent = others.block_on(Actor::of(&plane, AGENT, Some("agent-node01")));
    let controller = others.block_on(Actor::of(&plane, CONTROLLER, None));
    // API servers see new roles, policies and schemas with a delay.
    others.block_on(until_renewed(&other_agent, LEASES, OTHER));
    others.block_on(until_renewed(&controller, NAMESPACE, CONTROLLER));
    let (end, asking) = flood(kubeconfig(&plane, NAMESPACE, AGENT, Some("agent-node00")));
    plane.until("lists of agents wait", TIMEOUT, |plane| {
        waiting(plane, AGENT) > MANY
    });
    let heartbeat = others.block_on(slowest(&other_agent, LEASES, OTHER));
    let election = others.block_on(slowest(&controller, NAMESPACE, CONTROLLER));
    let still = waiting(&plane, AGENT);
    drop(end);
    asking.join().unwrap();
    assert!(still > MANY, "only {still} lists wait");
    assert!(heartbeat <= DELAY, "a heartbeat took {heartbeat:?}");
    assert!(
        election <= DELAY,
        "a renewal of the election took {election:?}"
    );
}
