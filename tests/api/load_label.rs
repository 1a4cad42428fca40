//! The label `plimsoll.dev/load` on a real API server: an agent writes it, the controller removes that of a dead agent.

use std::time::Duration;

use crate::agent_support::{HIGH, NODE, Node, throttling};
use crate::api_support::aggregation::address;
use crate::api_support::receiver::{Act, Authority, Receiver, arguments, publish, slice};
use crate::api_support::{ControlPlane, LEASES, lease_namespace};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(1);

fn label(plane: &ControlPlane, node: &str) -> Option<String> {
    let node = plane.get("node", node);
    let label = node["metadata"]["labels"]["plimsoll.dev/load"].as_str();
    label.map(str::to_owned)
}

fn load(plane: &ControlPlane, node: &str) -> Option<u8> {
    label(plane, node)?.parse().ok()
}

#[test]
fn the_label_follows_the_load_and_goes_with_the_agent() {
    let Some(node) = Node::new() else { return };
    let own = node.with_daemon_set();
    node.set_rules(&throttling());
    let agent = node.agent(&own);
    agent.until("the idle node is labelled", || {
        load(&node.plane, NODE).is_some_and(|load| load <= 60)
    });
    node.machine.load.set(HIGH);
    agent.until("the hot node is labelled", || {
        load(&node.plane, NODE) >= Some(95)
    });
    agent.until("the metrics show it", || {
        let (_, text) = agent.http("/metrics").unwrap();
        text.contains(r#"plimsoll_agent_load_percent{term="worst"}"#)
    });
    let idle = ["label", "node", NODE, "plimsoll.dev/load=0", "--overwrite"];
    node.plane.kubectl(&idle);
    // At the latest with the next write that the limit permits.
    let limit = Duration::from_secs(90);
    agent.until_within(limit, "what another writer wrote is replaced", || {
        load(&node.plane, NODE) >= Some(95)
    });
    node.plane.kubectl(&["delete", "daemonset", "agent"]);
    let (succeeded, output) = agent.terminate();
    assert!(succeeded, "{output}");
    assert_eq!(label(&node.plane, NODE), None);
}

#[test]
fn an_agent_without_the_label_removes_it_and_other_labels_stay() {
    let Some(node) = Node::new() else { return };
    let labels = ["plimsoll.dev/load=5", "example.com/own=1"];
    node.plane
        .kubectl(&[["label", "node", NODE].as_slice(), &labels].concat());
    node.set_rules(&throttling());
    let agent = node.agent(&["--load-label=false"]);
    agent.until("the label is removed", || {
        label(&node.plane, NODE).is_none()
    });
    let labels = &node.plane.get("node", NODE)["metadata"]["labels"];
    assert_eq!(labels["example.com/own"], "1");
}

/// A leader that permits the soft taint, or not.
fn permits(busy: bool) -> Act {
    let answer = json!({
        "epoch": 7, "leading": true, "nextIntervalSeconds": 10, "labelIntervalSeconds": 60, "busy": busy,
    });
    Act::Answer(200, None, answer.to_string())
}

#[test]
fn a_busy_node_has_the_soft_taint_while_the_leader_permits_it() {
    let Some(address) = address() else { return };
    let Some(node) = Node::new() else { return };
    let (namespace, service) = ("default", "plimsoll-report");
    node.plane.apply(&[lease_namespace()]);
    node.set_rules(&throttling());
    let credentials = node.machine.path("credentials");
    std::fs::create_dir(&credentials).unwrap();
    let authority = Authority::make();
    publish(&credentials, &[("token", "t"), ("ca.crt", &authority.pem)]);
    let leader = Receiver::start(address, &authority, &format!("{service}.{namespace}.svc"));
    leader.respond_always(permits(false));
    node.plane
        .apply(&[slice(namespace, service, "a", leader.address, true)]);
    let report = arguments(namespace, service, &credentials);
    let agent = node.agent(&[["--soft-taint"].as_slice(), &report].concat());
    node.machine.load.set(HIGH);
    agent.until("the hot node is labelled", || {
        load(&node.plane, NODE) >= Some(95)
    });
    let busy = || taints(&node.plane, NODE).contains(&json!("plimsoll.dev/busy"));
    let reports = leader.seen().len();
    agent.until_within(TIMEOUT, "the leader answers once more", || {
        leader.seen().len() > reports
    });
    assert!(!busy(), "beyond the limit of its zone");
    leader.respond_always(permits(true));
    agent.until_within(TIMEOUT, "the node has the soft taint", busy);
    leader.respond_always(permits(false));
    agent.until_within(TIMEOUT, "the soft taint is removed", || !busy());
}

/// Renews an agent's Lease with a duration of one second.
fn renew(plane: &ControlPlane, node: &str, times: u32) {
    plane.apply(&[json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": node, "namespace": LEASES, "annotations": {"times": times.to_string()}},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 1},
    })]);
}

fn add_load_signs(plane: &ControlPlane, node: &str) {
    let taints = json!([
        {"key": "example.com/other", "effect": "PreferNoSchedule"},
        {"key": "plimsoll.dev/busy", "effect": "PreferNoSchedule"},
    ]);
    let signs =
        json!({"metadata": {"labels": {"plimsoll.dev/load": "5"}}, "spec": {"taints": taints}});
    plane.kubectl(&[
        "patch",
        "node",
        node,
        "--type=merge",
        "-p",
        &signs.to_string(),
    ]);
    let ready = json!([{"type": "Ready", "status": "True", "reason": "KubeletReady"}]);
    let status = json!({"status": {"conditions": ready}}).to_string();
    plane.kubectl(&["patch", "node", node, "--subresource=status", "-p", &status]);
}

fn taints(plane: &ControlPlane, node: &str) -> Vec<Value> {
    let node = plane.get("node", node);
    let taints = node["spec"]["taints"].as_array().into_iter().flatten();
    taints.map(|taint| taint["key"].clone()).collect()
}

#[test]
fn a_dead_agent_leaves_no_label_that_says_idle() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["alive".to_owned(), "dead".to_owned()]);
    plane.apply(&[lease_namespace()]);
    for node in ["alive", "dead"] {
        add_load_signs(&plane, node);
        renew(&plane, node, 0);
    }
    let _controller = plane.controller(
        "controller",
        &["--dead-agent-after", "25s", "--short-dead-agent-after"],
    );
    let times = std::cell::Cell::new(0);
    let beat = |plane: &ControlPlane| {
        times.set(times.get() + 1);
        renew(plane, "alive", times.get());
    };
    plane.until("the label of the dead agent is removed", TIMEOUT, |p| {
        beat(p);
        label(p, "dead").is_none()
    });
    assert!(
        taints(&plane, "dead").contains(&json!("plimsoll.dev/busy")),
        "its taint stays until the agent counts as dead"
    );
    plane.until("then its soft taint", TIMEOUT, |p| {
        beat(p);
        taints(p, "dead") == [json!("example.com/other")]
    });
    assert_eq!(label(&plane, "alive").as_deref(), Some("5"));
    assert!(taints(&plane, "alive").contains(&json!("plimsoll.dev/busy")));
}
