//! `plimsoll controller` and agents that died while actions were in force on their nodes, on a real API server.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use crate::api_support::faults::{Fault, Proxy, of_calls};
use crate::api_support::{ControlPlane, LEASES, lease_namespace};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(1);

/// A Ready node with our taint and condition, and another writer's taint.
fn add_taint_and_condition(plane: &ControlPlane, node: &str) {
    let taints = json!([
        {"key": "example.com/other", "effect": "NoSchedule"},
        {"key": "interference.crane.io", "effect": "NoSchedule"},
    ]);
    let spec = json!({"spec": {"taints": taints}}).to_string();
    plane.kubectl(&["patch", "node", node, "--type=merge", "-p", &spec]);
    let conditions = json!([
        {"type": "Ready", "status": "True", "reason": "KubeletReady"},
        {"type": "InterferenceIdentified", "status": "True", "reason": "q/cpu"},
    ]);
    let status = json!({"status": {"conditions": conditions}}).to_string();
    plane.kubectl(&["patch", "node", node, "--subresource=status", "-p", &status]);
}

fn taints(plane: &ControlPlane, node: &str) -> Vec<String> {
    taints_of(&plane.get("node", node))
}

fn taints_of(node: &Value) -> Vec<String> {
    let taints = node["spec"]["taints"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    taints
        .iter()
        .map(|taint| taint["key"].as_str().unwrap().to_owned())
        .collect()
}

fn condition(plane: &ControlPlane, node: &str) -> Value {
    condition_of(&plane.get("node", node))
}

fn condition_of(node: &Value) -> Value {
    let conditions = node["status"]["conditions"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let ours = conditions
        .iter()
        .find(|it| it["type"] == "InterferenceIdentified");
    ours.map_or(Value::Null, |it| it["status"].clone())
}

#[test]
fn the_taint_of_a_dead_agent_is_removed_and_that_of_a_live_one_stays() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["alive".to_owned(), "dead".to_owned()]);
    let controller = plane.controller(
        "controller",
        &["--dead-agent-after", "5s", "--short-dead-agent-after"],
    );
    plane.until("both nodes have a watermark", TIMEOUT, |p| {
        p.list("nwm").len() == 2
    });
    let status = |spoken: u32| {
        json!({
            "agent": {"version": "1", "bootID": spoken.to_string(), "readsQuantities": true},
            "counts": {"throttled": 2},
            "scheduling": {"state": "NoSchedule"},
        })
    };
    for node in ["alive", "dead"] {
        plane.report(node, &status(0));
        add_taint_and_condition(&plane, node);
    }
    let spoken = std::cell::Cell::new(0);
    plane.until("the dead agent's taint is removed", TIMEOUT, |p| {
        spoken.set(spoken.get() + 1);
        p.report("alive", &status(spoken.get()));
        taints(p, "dead") == ["example.com/other"] && condition(p, "dead") == "False"
    });
    assert_eq!(taints(&plane, "alive").len(), 2);
    assert_eq!(condition(&plane, "alive"), "True");
    let reported = |p: &ControlPlane, reason: &str, text: &str| {
        let events = p.list("events");
        events.iter().any(|event| {
            event["reason"] == reason
                && event["involvedObject"]["name"] == "dead"
                && event["message"].as_str().unwrap().contains(text)
        })
    };
    plane.until("events report it and what is left to do", TIMEOUT, |p| {
        p.report("alive", &status(spoken.replace(spoken.get() + 1)));
        reported(p, "TaintOfDeadAgentRemoved", "5s ago")
            && reported(p, "ThrottledByDeadAgent", "plimsoll agent --restore")
    });
    let removed = controller.metric("plimsoll_controller_taints_removed_total");
    assert!((removed - 1.0).abs() < 0.5, "{removed} taints were removed");
    assert!(controller.metric("plimsoll_controller_unresponsive_agents_throttling") > 0.5);
}

/// Renews an agent's Lease with a duration of one second.
fn renew(plane: &ControlPlane, node: &str, times: u32) {
    plane.apply(&[json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": node, "namespace": LEASES, "annotations": {"times": times.to_string()}},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 1},
    })]);
}

fn was_reported(plane: &ControlPlane, reason: &str, node: &str) -> bool {
    let events = plane.list("events");
    let about = |it: &Value| it["reason"] == reason && it["involvedObject"]["name"] == node;
    events.iter().any(about)
}

#[test]
fn an_agent_without_renewals_is_reported_and_its_taint_removed() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["alive".to_owned(), "dead".to_owned()]);
    plane.apply(&[lease_namespace()]);
    for node in ["alive", "dead"] {
        add_taint_and_condition(&plane, node);
        renew(&plane, node, 0);
    }
    let controller = plane.controller(
        "controller",
        &["--dead-agent-after", "20s", "--short-dead-agent-after"],
    );
    let times = std::cell::Cell::new(0);
    let beat = |plane: &ControlPlane, node: &str| {
        times.set(times.get() + 1);
        renew(plane, node, times.get());
    };
    plane.until("both are seen", TIMEOUT, |_| {
        controller.leads() && controller.metric("plimsoll_controller_agents ") > 1.5
    });
    plane.until("the unresponsive agent is reported", TIMEOUT, |p| {
        beat(p, "alive");
        was_reported(p, "AgentUnresponsive", "dead")
    });
    assert_eq!(taints(&plane, "dead").len(), 2, "it is not dead yet");
    assert!(controller.metric("plimsoll_controller_unresponsive_agents ") > 0.5);
    assert!(controller.metric("plimsoll_controller_heartbeat_age_max_seconds ") > 10.0);
    plane.until("the dead agent's taint is removed", TIMEOUT, |p| {
        beat(p, "alive");
        taints(p, "dead") == ["example.com/other"]
    });
    plane.until("its return is reported", TIMEOUT, |p| {
        beat(p, "alive");
        beat(p, "dead");
        was_reported(p, "AgentResponding", "dead")
    });
    assert_eq!(taints(&plane, "alive").len(), 2);
    assert!(!was_reported(&plane, "AgentUnresponsive", "alive"));
    assert!(controller.metric("plimsoll_controller_heartbeat_age_seconds_count ") > 1.5);
}

/// The purpose of a request about an unresponsive agent's node, and the node.
fn call_about_node(method: &str, path: &str) -> Option<(&'static str, String)> {
    let path = path.split('?').next()?;
    let (rest, last) = path.rsplit_once('/')?;
    let (rest, node) = match last {
        "status" => rest.rsplit_once('/')?,
        node => (rest, node),
    };
    let call = match (method, rest.rsplit('/').next()?, last) {
        ("GET", "leases", _) => "ask",
        ("GET", "nodes", _) => "read",
        ("PATCH", "nodes", "status") => "condition",
        ("PATCH", "nodes", _) => "taint",
        _ => return None,
    };
    Some((call, node.to_owned()))
}

/// A Ready node with our taint and condition, another writer's taint, and the Lease of its agent. Each node has its own
/// zone: many unresponsive agents in one zone would be treated as an outage.
fn leftovers(name: &str) -> [Value; 2] {
    let node = json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": name}},
        "spec": {"taints": [
            {"key": "example.com/other", "effect": "NoSchedule"},
            {"key": "interference.crane.io", "effect": "NoSchedule"},
        ]},
        "status": {"conditions": [
            {"type": "Ready", "status": "True", "reason": "KubeletReady"},
            {"type": "InterferenceIdentified", "status": "True", "reason": "q/cpu"},
        ]},
    });
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": name, "namespace": LEASES},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 1},
    });
    [node, lease]
}

/// No node has our taint or condition, and each of these nodes has the event of the removal.
fn is_cleaned_and_reported(plane: &ControlPlane, names: &[String]) -> bool {
    let is_open = |node: &Value| {
        let keys = taints_of(node);
        let has = |key: &str| keys.iter().any(|it| it == key);
        has("example.com/other") && !has("interference.crane.io") && condition_of(node) == "False"
    };
    let events = plane.list("events");
    let is_reported = |name: &String| {
        let about = |it: &&Value| it["involvedObject"]["name"] == name.as_str();
        let mut about = events.iter().filter(about);
        about.any(|it| it["reason"] == "TaintOfDeadAgentRemoved")
    };
    plane.list("nodes").iter().all(is_open) && names.iter().all(is_reported)
}

#[test]
fn taints_of_dead_agents_are_removed_despite_failing_calls() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let faults = of_calls();
    let names = (0..faults.len()).map(|index| format!("dead{index:02}"));
    let dead: Vec<String> = names.collect();
    plane.create(&[lease_namespace()]);
    let left = dead.iter().flat_map(|name| leftovers(name));
    plane.create(&left.collect::<Vec<_>>());
    // The first call of each kind about each node gets one of these faults.
    let proxy = Proxy::beside(&plane.kubeconfig);
    let (seen, order) = (Mutex::new(BTreeSet::new()), dead.clone());
    proxy.respond_with(move |method, path| {
        let (call, node) = call_about_node(method, path)?;
        let index = order.iter().position(|known| *known == node)?;
        let is_first = seen.lock().unwrap().insert((call, index));
        is_first.then(|| match &faults[index].1 {
            // A write without an answer may have succeeded: then there is no event.
            Fault::CutAfter | Fault::CutWithin | Fault::NeverAnswer if call == "condition" => {
                Fault::CutBefore
            }
            fault => fault.clone(),
        })
    });
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let args = ["--dead-agent-after", "5s", "--short-dead-agent-after"];
    let mut controller = plane.controller_by(&kubeconfig, "controller", &args);
    let most = Duration::from_mins(5);
    let what = "taints and conditions are gone, and that is reported";
    plane.until(what, most, |p| is_cleaned_and_reported(p, &dead));
    let met: BTreeSet<_> = proxy
        .take_seen()
        .into_iter()
        .filter_map(|(method, path)| call_about_node(&method, &path))
        .collect();
    for node in &dead {
        for call in ["ask", "read", "taint", "condition"] {
            assert!(met.contains(&(call, node.clone())), "{call} of {node}");
        }
    }
    assert!(
        controller.process.0.try_wait().unwrap().is_none(),
        "it ended"
    );
    assert!(!plane.log_of("controller").contains("panicked"));
}

#[test]
fn a_controller_without_access_to_leases_says_so_and_works_on() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["node".to_owned()]);
    let proxy = Proxy::beside(&plane.kubeconfig);
    proxy.respond_with(|_, path| {
        let text = "leases is forbidden";
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "message": text});
        path.contains(LEASES)
            .then(|| Fault::Answer(403, None, body.to_string()))
    });
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let controller = plane.controller_by(&kubeconfig, "controller", &[]);
    plane.until("the node has a watermark", TIMEOUT, |p| {
        p.list("nwm").len() == 1
    });
    let (code, body) = controller.http("/readyz").unwrap();
    assert_eq!((code, body.contains("Lease: ")), (503, true), "{body}");
    assert!(body.contains("leases is forbidden"), "{body}");
    proxy.respond_with(|_, _| None);
    plane.until("it works again", TIMEOUT, |_| {
        controller
            .http("/readyz")
            .is_some_and(|(code, _)| code == 200)
    });
}
