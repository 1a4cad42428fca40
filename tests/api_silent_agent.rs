//! `plimsoll controller` and agents that ended while something was in force on their nodes, on a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod api_support;

use std::time::Duration;

use api_support::faults::{Fault, Proxy};
use api_support::{ControlPlane, LEASES, lease_namespace};
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
    let controller = plane.controller(
        "controller",
        &["--silent-agent-after", "5s", "--short-silence"],
    );
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

/// What an agent writes that renews its Lease, which holds for a second.
fn renew(plane: &ControlPlane, node: &str, times: u32) {
    plane.apply(&[json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": node, "namespace": LEASES, "annotations": {"times": times.to_string()}},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 1},
    })]);
}

fn was_told(plane: &ControlPlane, reason: &str, node: &str) -> bool {
    let events = plane.list("events");
    let about = |it: &Value| it["reason"] == reason && it["involvedObject"]["name"] == node;
    events.iter().any(about)
}

#[test]
fn an_agent_that_renews_its_lease_no_more_is_told_of_and_its_taint_goes_in_time() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["alive".to_owned(), "dead".to_owned()]);
    plane.apply(&[lease_namespace()]);
    for node in ["alive", "dead"] {
        marked(&plane, node);
        renew(&plane, node, 0);
    }
    let controller = plane.controller(
        "controller",
        &["--silent-agent-after", "20s", "--short-silence"],
    );
    let times = std::cell::Cell::new(0);
    let beat = |plane: &ControlPlane, node: &str| {
        times.set(times.get() + 1);
        renew(plane, node, times.get());
    };
    plane.until("both are heard", SOON, |_| {
        controller.leads() && controller.metric("plimsoll_controller_agents ") > 1.5
    });
    plane.until("the silent one is told of", SOON, |p| {
        beat(p, "alive");
        was_told(p, "AgentSilent", "dead")
    });
    assert_eq!(taints(&plane, "dead").len(), 2, "it is not dead yet");
    assert!(controller.metric("plimsoll_controller_silent_agents ") > 0.5);
    assert!(controller.metric("plimsoll_controller_heartbeat_age_max_seconds ") > 10.0);
    plane.until("the dead one's taint goes", SOON, |p| {
        beat(p, "alive");
        taints(p, "dead") == ["example.com/other"]
    });
    plane.until("its return is told of", SOON, |p| {
        beat(p, "alive");
        beat(p, "dead");
        was_told(p, "AgentBack", "dead")
    });
    assert_eq!(taints(&plane, "alive").len(), 2);
    assert!(!was_told(&plane, "AgentSilent", "alive"));
    assert!(controller.metric("plimsoll_controller_heartbeat_age_seconds_count ") > 1.5);
}

#[test]
fn a_controller_that_may_not_see_leases_says_so_and_does_the_rest() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&["node".to_owned()]);
    let proxy = Proxy::beside(&plane.kubeconfig);
    proxy.judge(|_, path| {
        let text = "leases is forbidden";
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "message": text});
        path.contains(LEASES)
            .then(|| Fault::Answer(403, None, body.to_string()))
    });
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let controller = plane.controller_by(&kubeconfig, "controller", &[]);
    plane.until("the node has a watermark", SOON, |p| {
        p.list("nwm").len() == 1
    });
    let (code, body) = controller.http("/readyz").unwrap();
    assert_eq!((code, body.contains("Lease: ")), (503, true), "{body}");
    assert!(body.contains("leases is forbidden"), "{body}");
    proxy.judge(|_, _| None);
    plane.until("all is well then", SOON, |_| {
        controller
            .http("/readyz")
            .is_some_and(|(code, _)| code == 200)
    });
}
