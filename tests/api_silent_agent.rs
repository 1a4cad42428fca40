//! `plimsoll controller` and agents that ended while something was in force on their nodes, on a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod api_support;

use std::time::Duration;

use api_support::ControlPlane;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_mins(1);

/// A Ready node with our taint and condition, and a taint of somebody else.
fn marked(plane: &ControlPlane, node: &str) {
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
    let node = plane.get("node", node);
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
    let node = plane.get("node", node);
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
fn the_taint_of_a_dead_agent_goes_and_that_of_a_living_one_stays() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["alive".to_owned(), "dead".to_owned()]);
    let controller = plane.controller("controller", &["--silent-agent-after", "5s"]);
    plane.until("both nodes have a watermark", SOON, |p| {
        p.list("nwm").len() == 2
    });
    let status = |spoken: u32| {
        json!({
            "agent": {"version": "1", "bootID": spoken.to_string()},
            "counts": {"throttled": 2},
            "scheduling": {"state": "NoSchedule"},
        })
    };
    for node in ["alive", "dead"] {
        plane.report(node, &status(0));
        marked(&plane, node);
    }
    let spoken = std::cell::Cell::new(0);
    plane.until("the dead one's taint goes", SOON, |p| {
        spoken.set(spoken.get() + 1);
        p.report("alive", &status(spoken.get()));
        taints(p, "dead") == ["example.com/other"] && condition(p, "dead") == "False"
    });
    assert_eq!(taints(&plane, "alive").len(), 2);
    assert_eq!(condition(&plane, "alive"), "True");
    let told = |p: &ControlPlane, reason: &str, text: &str| {
        let events = p.list("events");
        events.iter().any(|event| {
            event["reason"] == reason
                && event["involvedObject"]["name"] == "dead"
                && event["message"].as_str().unwrap().contains(text)
        })
    };
    plane.until("events tell of it, and of what is left to do", SOON, |p| {
        p.report("alive", &status(spoken.replace(spoken.get() + 1)));
        told(p, "TaintOfSilentAgentRemoved", "5 s")
            && told(p, "ThrottledBySilentAgent", "plimsoll agent --restore")
    });
    let removed = controller.metric("plimsoll_controller_taints_removed_total");
    assert!((removed - 1.0).abs() < 0.5, "{removed} taints were removed");
    assert!(controller.metric("plimsoll_controller_silent_agents_throttling") > 0.5);
}
