//! Evictions by agents, as a real API server lets them through that asks the controller: with the rights and the webhook that
//! the chart gives.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::unwrap_in_result,
    reason = "a test fails by panicking"
)]

mod api_support;

use std::path::Path;
use std::time::Duration;

use api_support::{ControlPlane, Controller, aggregation, free_port, names, now};
use hyper::Request;
use kube::Client;
use nix::sys::signal::Signal;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::eviction::{self, Answer, Delay, Target};
use serde_json::{Value, json};

/// Time enough on the busiest machine.
const SOON: Duration = Duration::from_mins(4);
const AGENT: &str = "plimsoll-agent";

/// A control plane with nodes and the chart's objects, which asks the controllers at these ports.
fn plane(ports: &[u16]) -> Option<(ControlPlane, std::path::PathBuf)> {
    let plane = aggregation::plane(ports)?;
    let kubeconfig = plane.install_chart();
    plane.nodes(&names(3));
    Some((plane, kubeconfig))
}

/// A controller with budgets of ten minutes: longer than any test.
fn start(
    plane: &ControlPlane,
    kubeconfig: &Path,
    name: &str,
    port: u16,
    budgets: &[(&str, u16)],
) -> Controller {
    let mut args = vec![
        format!("--metrics-api-listen=0.0.0.0:{port}"),
        "--pod-ip=127.0.0.1".to_owned(),
        "--eviction-webhook=plimsoll-evictions".to_owned(),
    ];
    for scope in ["fleet", "zone", "node", "namespace", "owner"] {
        let of = budgets.iter().find(|(known, _)| *known == scope);
        let pods = of.map_or(100, |(_, pods)| *pods);
        args.push(format!("--eviction-budget-{scope}={pods}/10m"));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    plane.controller_by(kubeconfig, name, &args)
}

/// A pod of a `ReplicaSet` on this node, as it was made.
fn pod(plane: &ControlPlane, name: &str, node: &str, set: &str) -> Target {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": "x", "controller": true});
    plane.create(&[json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "ownerReferences": [owner]},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
    })]);
    Target {
        namespace: "default".to_owned(),
        name: name.to_owned(),
        uid: plane.get("pod", name)["metadata"]["uid"]
            .as_str()
            .unwrap()
            .to_owned(),
    }
}

fn is_ending(plane: &ControlPlane, target: &Target) -> bool {
    plane.get("pod", &target.name)["metadata"]["deletionTimestamp"].is_string()
}

/// Who evicts with the token of the agent on a node.
async fn agent(plane: &ControlPlane, node: &str) -> Client {
    let bound = format!("--bound-object-name={node}");
    let kubeconfig = plane.as_account(AGENT, &["--bound-object-kind=Node", &bound]);
    connect(Some(&kubeconfig)).await.unwrap()
}

async fn evict(client: &Client, target: &Target) -> Answer {
    eviction::evict(client, target, Duration::from_secs(7)).await
}

/// Evicts until there is an answer that says something about the eviction: on a busy machine a leader may be late, or lose
/// its lead.
async fn settle(client: &Client, target: &Target) -> Answer {
    let begun = now();
    loop {
        let answer = evict(client, target).await;
        let is_settled = match &answer {
            Answer::Wait(_, _, why) => why.contains("budget of evictions"),
            Answer::Away(_) | Answer::Unknown(_) => false,
            _ => true,
        };
        if is_settled {
            return answer;
        }
        assert!(begun.elapsed() < SOON, "{answer:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// POSTs an eviction with these options until that says something about it: with which code and words.
async fn post(client: &Client, target: &Target, query: &str, options: &Value) -> (u16, String) {
    let path = format!(
        "/api/v1/namespaces/default/pods/{}/eviction{query}",
        target.name
    );
    let body = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": target.name, "namespace": "default"}, "deleteOptions": options,
    });
    let begun = now();
    loop {
        let request = Request::post(&path).body(body.to_string().into_bytes());
        let why = match client.request::<Value>(request.unwrap()).await {
            Ok(_) => return (201, String::new()),
            Err(kube::Error::Api(status)) if ![429, 500, 503].contains(&status.code) => {
                return (status.code, status.message.clone());
            }
            Err(error) => error.to_string(),
        };
        assert!(begun.elapsed() < SOON * 2, "{why}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

async fn dry_run(client: &Client, target: &Target) -> (u16, String) {
    let options = json!({"preconditions": {"uid": target.uid}});
    post(client, target, "?dryRun=All", &options).await
}

/// Waits until the controller is asked, and knows what counts.
async fn until_guarded(plane: &ControlPlane, agent: &Client, target: &Target) {
    plane.until("API servers know whom to ask", SOON * 2, |plane| {
        let hook = plane.get("validatingwebhookconfiguration", "plimsoll-evictions");
        hook["webhooks"][0]["clientConfig"]["caBundle"].is_string()
    });
    assert_eq!(dry_run(agent, target).await.0, 201);
}

fn answers(controller: &Controller, result: &str) -> f64 {
    controller.metric(&format!(
        "plimsoll_controller_eviction_answers_total{{result=\"{result}\"}}"
    ))
}

#[tokio::test]
async fn agents_evict_pods_of_their_own_node_and_no_more_than_the_budgets_allow() {
    let port = free_port();
    let Some((plane, kubeconfig)) = plane(&[port]) else {
        return;
    };
    let on = |name: &str, node: &str| pod(&plane, name, node, name);
    let mine = ["a", "b", "c"].map(|name| on(name, "node00"));
    let others = ["d", "e", "f"].map(|name| on(name, "node01"));
    let budgets = [("fleet", 3), ("node", 2), ("owner", 1)];
    let controller = says_whether_it_is_asked(&plane, || {
        start(&plane, &kubeconfig, "controller", port, &budgets)
    });
    let (first, second) = (agent(&plane, "node00").await, agent(&plane, "node01").await);
    until_guarded(&plane, &first, &mine[0]).await;
    refuses_what_agents_must_not(&plane, &first, &mine[0], &others[0]).await;

    // However often something is tried out, nothing is spent.
    for target in mine.iter().chain(&mine) {
        assert_eq!(dry_run(&first, target).await.0, 201);
        let options = json!({"preconditions": {"uid": target.uid}, "dryRun": ["All"]});
        assert_eq!(post(&first, target, "", &options).await.0, 201);
    }
    assert!(!mine.iter().any(|pod| is_ending(&plane, pod)));

    assert_eq!(settle(&first, &mine[0]).await, Answer::Accepted);
    assert!(is_ending(&plane, &mine[0]));
    let sibling = pod(&plane, "sibling", "node00", "a");
    let Answer::Budget(why) = settle(&first, &sibling).await else {
        panic!("the owner's budget is spent, and another pod may be evicted");
    };
    assert_eq!(why, "the owner's budget of evictions, 1 in 10m, is spent");
    assert_eq!(settle(&first, &mine[1]).await, Answer::Accepted);
    refused(
        settle(&first, &mine[2]).await,
        "the node's budget of evictions, 2 in 10m, is spent",
    );
    assert_eq!(settle(&second, &others[0]).await, Answer::Accepted);
    refused(
        settle(&second, &others[1]).await,
        "the fleet's budget of evictions, 3 in 10m, is spent",
    );
    assert!(
        ![&mine[2], &others[1], &sibling]
            .into_iter()
            .any(|pod| is_ending(&plane, pod))
    );
    tells_of_it(&plane, &controller);
    // All that is allowed was done: nothing comes back before its ten minutes are over.
    let Answer::Wait(wait, ..) = settle(&second, &others[1]).await else {
        panic!("the budget is not spent any more");
    };
    assert!(wait > Duration::from_mins(1), "{wait:?}");

    // Nobody else has to do with it: neither while the budget is spent, nor while nobody can be asked.
    let admin = connect(Some(&plane.kubeconfig)).await.unwrap();
    assert_eq!(settle(&admin, &others[1]).await, Answer::Accepted);
    drop(controller);
    says_that_nobody_can_be_asked(&first, &mine[2]).await;
    assert!(!is_ending(&plane, &mine[2]));
    assert_eq!(settle(&admin, &others[2]).await, Answer::Accepted);
}

#[tokio::test]
async fn a_zone_and_a_namespace_have_budgets_whichever_nodes_spend_them() {
    let port = free_port();
    let Some((plane, kubeconfig)) = plane(&[port]) else {
        return;
    };
    for (node, zone) in [("node00", "a"), ("node01", "a"), ("node02", "b")] {
        let zone = format!("topology.kubernetes.io/zone={zone}");
        plane.kubectl(&["label", "node", node, &zone]);
    }
    let _controller = start(
        &plane,
        &kubeconfig,
        "controller",
        port,
        &[("zone", 2), ("namespace", 3)],
    );
    let nodes = names(3);
    let mut agents = Vec::new();
    for node in &nodes {
        agents.push(agent(&plane, node).await);
    }
    let on = |name: &str, index: usize| pod(&plane, name, &nodes[index], name);
    let [first, second, third] = ["a", "b", "c"].map(|name| on(name, usize::from(name != "a")));
    let [fourth, fifth] = ["d", "e"].map(|name| on(name, 2));
    until_guarded(&plane, &agents[0], &first).await;
    assert_eq!(settle(&agents[0], &first).await, Answer::Accepted);
    assert_eq!(settle(&agents[1], &second).await, Answer::Accepted);
    refused(
        settle(&agents[1], &third).await,
        "the zone's budget of evictions, 2 in 10m, is spent",
    );
    assert_eq!(settle(&agents[2], &fourth).await, Answer::Accepted);
    let Answer::Budget(why) = settle(&agents[2], &fifth).await else {
        panic!("the namespace's budget is spent, and a pod of another may be evicted");
    };
    assert_eq!(
        why,
        "the namespace's budget of evictions, 3 in 10m, is spent"
    );
    assert!(
        ![&third, &fifth]
            .into_iter()
            .any(|pod| is_ending(&plane, pod))
    );
}

async fn says_that_nobody_can_be_asked(agent: &Client, pod: &Target) {
    // No answer in time is none.
    let begun = now();
    let why = loop {
        match evict(agent, pod).await {
            Answer::Wait(_, Delay::Leader, why) => break why,
            Answer::Wait(..) | Answer::Away(_) | Answer::Unknown(_) if begun.elapsed() < SOON => {}
            answer => panic!("it is not told that nobody can be asked: {answer:?}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let down = r#"failed calling webhook "evictions.plimsoll.dev""#;
    assert!(why.contains(down), "{why}");
}

/// Starts it where somebody has removed the webhook, and installs that again.
fn says_whether_it_is_asked(plane: &ControlPlane, start: impl Fn() -> Controller) -> Controller {
    let webhook = ["validatingwebhookconfiguration", "plimsoll-evictions"];
    plane.kubectl(&[&["delete"], &webhook[..]].concat());
    let controller = start();
    let guarded = || controller.metric("plimsoll_controller_eviction_guarded ");
    plane.until("it says that evictions are not guarded", SOON, |_| {
        controller.leads() && guarded() < 0.5
    });
    plane.install_chart();
    plane.until("it says that they are", SOON, |_| guarded() > 0.5);
    controller
}

fn refused(answer: Answer, why: &str) {
    let Answer::Wait(wait, Delay::Budget, told) = answer else {
        panic!("not to be tried again: {answer:?}");
    };
    assert!(told.ends_with(why), "{told}");
    assert!(wait >= Duration::from_secs(1), "{wait:?}");
}

async fn refuses_what_agents_must_not(
    plane: &ControlPlane,
    agent: &Client,
    own: &Target,
    other: &Target,
) {
    let Answer::Refused(why) = settle(agent, other).await else {
        panic!("an agent evicted a pod of another node");
    };
    let expected =
        "the pod is on node01, and the agent on node00: agents evict pods of their own node only";
    assert!(why.ends_with(expected), "{why}");
    assert!(!is_ending(plane, other));
    let (code, why) = post(agent, own, "", &json!({})).await;
    assert_eq!(code, 403, "{why}");
    assert!(why.contains("deleteOptions.preconditions.uid"), "{why}");
    let (code, why) = post(agent, own, "", &json!({"preconditions": {"uid": "old"}})).await;
    assert_eq!(code, 409, "{why}");
    let forced = json!({"preconditions": {"uid": own.uid}, "gracePeriodSeconds": 0});
    let (code, why) = post(agent, own, "", &forced).await;
    assert_eq!(code, 403, "{why}");
    assert!(why.contains("may not force"), "{why}");
    let unbound = connect(Some(&plane.as_account(AGENT, &[]))).await.unwrap();
    let Answer::Refused(why) = settle(&unbound, own).await else {
        panic!("a token without a node evicted a pod");
    };
    assert!(why.contains("the token names no node"), "{why}");
    assert!(!is_ending(plane, own));
}

fn tells_of_it(plane: &ControlPlane, controller: &Controller) {
    let expected = [
        (
            "node00",
            "the agent may not evict default/d: the pod is on node01",
        ),
        (
            "node00",
            "an agent may not evict a pod now: the node's budget of evictions, 2 in 10m, is spent",
        ),
        (
            "node01",
            "an agent may not evict a pod now: the fleet's budget of evictions, 3 in 10m, is spent",
        ),
    ];
    plane.until("events tell of the refusals", SOON, |plane| {
        let events = plane.list("events");
        let told = |(node, why): &(&str, &str)| {
            events.iter().any(|event| {
                let message = event["message"].as_str().unwrap_or_default();
                event["reason"] == "EvictionRefused"
                    && event["involvedObject"]["name"] == *node
                    && message.starts_with(why)
            })
        };
        expected.iter().all(told)
    });
    for (result, count) in [
        ("fleet", 1.0),
        ("node", 1.0),
        ("owner", 1.0),
        ("other_node", 1.0),
        ("no_uid", 1.0),
        ("other_pod", 1.0),
        ("no_node", 1.0),
        ("dry_run", 12.0),
    ] {
        let counted = answers(controller, result);
        assert!(counted > count - 0.5, "{result}: {counted}");
    }
    plane.until("all evictions are seen", SOON, |_| {
        let ending = "plimsoll_controller_evictions{state=\"ending\"}";
        controller.metric(ending) > 2.5
    });
}

#[tokio::test]
async fn whoever_leads_next_counts_what_was_allowed_before() {
    let ports = [free_port(), free_port()];
    // API servers reach the standby alone: what it is asked it passes on.
    let Some((plane, kubeconfig)) = plane(&ports[1..]) else {
        return;
    };
    let budgets = [("fleet", 3)];
    let leader = start(&plane, &kubeconfig, "leader", ports[0], &budgets);
    plane.until("it leads", SOON, |_| leader.leads());
    let standby = start(&plane, &kubeconfig, "standby", ports[1], &budgets);
    let agent = agent(&plane, "node00").await;
    let on = |name: &str| pod(&plane, name, "node00", name);
    let pods = ["a", "b", "c", "d"].map(on);
    until_guarded(&plane, &agent, &pods[0]).await;
    for target in &pods[..2] {
        assert_eq!(settle(&agent, target).await, Answer::Accepted);
    }
    let asked = ["allowed", "again", "ending"].map(|result| answers(&leader, result));
    assert!(asked.iter().sum::<f64>() > 1.5, "the leader was asked");
    // One of them is long gone when the next one begins to lead.
    plane.kubectl(&["delete", "pod", "a", "--grace-period=0", "--force"]);

    leader.signal(Signal::SIGKILL);
    plane.until("the standby leads", SOON, |_| standby.leads());
    assert_eq!(settle(&agent, &pods[2]).await, Answer::Accepted);
    refused(
        settle(&agent, &pods[3]).await,
        "the fleet's budget of evictions, 3 in 10m, is spent",
    );
    // Somebody makes nonsense of the record: the leader knows better.
    let nonsense = json!({"data": {"evictions.json": "nonsense"}}).to_string();
    let args = [
        "patch",
        "configmap",
        "plimsoll-evictions",
        "--type=merge",
        "-p",
    ];
    plane.kubectl(&[&args[..], &[nonsense.as_str()]].concat());
    refused(
        settle(&agent, &pods[3]).await,
        "the fleet's budget of evictions, 3 in 10m, is spent",
    );
    assert!(!is_ending(&plane, &pods[3]));
}
