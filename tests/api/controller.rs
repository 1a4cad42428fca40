//! `plimsoll controller` against a real API server.
#![allow(clippy::float_cmp, reason = "the values are exact")]

use std::time::Duration;

use crate::api_support::{ControlPlane, names, policy};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_secs(30);

fn node_qos(name: &str, value: u32) -> Value {
    let rule = json!({
        "name": "cpu", "avoidanceThreshold": 2, "actionName": "close", "strategy": "Enforce",
        "metricRule": {"name": "cpu_total_usage", "value": value},
    });
    policy("NodeQOS", name, &json!({"rules": [rule]}))
}

fn immediate(mut object: Value) -> Value {
    object["metadata"]["annotations"] = json!({"plimsoll.dev/rollout": "immediate"});
    object
}

fn condition(object: &Value, kind: &str) -> String {
    let conditions = object["status"]["conditions"].as_array();
    let found = conditions.into_iter().flatten().find(|c| c["type"] == kind);
    found.map_or(String::new(), |c| {
        format!(
            "{} {}",
            c["status"].as_str().unwrap(),
            c["reason"].as_str().unwrap()
        )
    })
}

fn with_rules(plane: &ControlPlane) -> usize {
    let watermarks = plane.list("nwm");
    watermarks
        .iter()
        .filter(|watermark| has_rules(watermark))
        .count()
}

fn has_rules(watermark: &Value) -> bool {
    watermark["spec"]["rules"] != json!([])
}

fn versions(plane: &ControlPlane) -> Vec<String> {
    let kinds = "nodeqoss,avoidanceactions,podqoss,nwm";
    let all = plane.list(kinds);
    all.iter()
        .map(|object| object["metadata"]["resourceVersion"].to_string())
        .collect()
}

#[test]
fn watermarks_and_conditions_are_written_once() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&names(2));
    let mut controller = plane.controller("controller", &[]);
    plane.until("both nodes have a watermark", TIMEOUT, |p| {
        p.list("nwm").len() == 2
    });
    plane.until("it is ready", TIMEOUT, |_| {
        controller
            .http("/readyz")
            .is_some_and(|(code, _)| code == 200)
    });
    assert_eq!(controller.http("/livez").unwrap().0, 200);
    // A rule whose action does not exist is not enforced, and the status says so; the action is created later.
    plane.apply(&[immediate(node_qos("q", 4000))]);
    plane.until("the missing action is reported", TIMEOUT, |p| {
        condition(&p.get("nodeqos", "q"), "ActionsResolved") == "False UnknownAction"
    });
    assert_eq!(with_rules(&plane), 0);
    plane.apply(&[policy("AvoidanceAction", "close", &json!({}))]);
    plane.until("the rule is on both nodes", TIMEOUT, |p| with_rules(p) == 2);
    plane.until("the policy is ready", TIMEOUT, |p| {
        let q = p.get("nodeqos", "q");
        condition(&q, "Ready") == "True Ready"
            && condition(&q, "ActionsResolved") == "True ActionsResolved"
            && q["status"]["matchedNodes"] == 2
            && q["status"]["observedGeneration"] == q["metadata"]["generation"]
    });
    plane.until("the action lists its users", TIMEOUT, |p| {
        p.get("avoid", "close")["status"]["usedBy"] == json!(["q"])
    });
    let watermark = plane.get("nwm", "node00");
    let node = plane.get("node", "node00");
    let owner = &watermark["metadata"]["ownerReferences"][0];
    assert_eq!(owner["uid"], node["metadata"]["uid"]);
    assert_eq!(watermark["spec"]["nodeUID"], node["metadata"]["uid"]);
    assert_eq!(watermark["spec"]["rules"][0]["id"], "q/cpu");
    assert_eq!(
        watermark["spec"]["actions"][0]["disableScheduling"],
        "NoSchedule"
    );
    // Without changes nothing is written, also after a restart.
    let before = versions(&plane);
    controller.signal(Signal::SIGTERM);
    assert!(controller.process.0.wait().unwrap().success());
    let controller = plane.controller("second", &[]);
    plane.until("it leads", TIMEOUT, |_| controller.leads());
    // An edit of another object proves that it works again.
    plane.apply(&[policy("AvoidanceAction", "other", &json!({}))]);
    plane.until("the new action has a status", TIMEOUT, |p| {
        condition(&p.get("avoid", "other"), "Ready") == "True Ready"
    });
    plane.kubectl(&["delete", "avoid", "other"]);
    assert_eq!(versions(&plane), before);
}

#[test]
fn edits_of_watermarks_are_reverted_and_those_of_deleted_nodes_removed() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&names(2));
    plane.apply(&[
        policy("AvoidanceAction", "close", &json!({})),
        immediate(node_qos("q", 4000)),
    ]);
    let _controller = plane.controller("controller", &[]);
    plane.until("the rule is on both nodes", TIMEOUT, |p| with_rules(p) == 2);
    let hash = plane.get("nwm", "node00")["spec"]["hash"].clone();
    let edit = r#"[{"op":"replace","path":"/spec/rules","value":[]}]"#;
    let manager = "--field-manager=kubectl-edit";
    plane.kubectl(&["patch", "nwm", "node00", "--type=json", "-p", edit, manager]);
    plane.until("the edit is reverted", TIMEOUT, |p| with_rules(p) == 2);
    assert_eq!(plane.get("nwm", "node00")["spec"]["hash"], hash);
    // A field that was not there belongs to the field manager that added it.
    let edit = r#"{"spec":{"softenScheduling":true}}"#;
    plane.kubectl(&[
        "patch",
        "nwm",
        "node00",
        "--type=merge",
        "-p",
        edit,
        manager,
    ]);
    plane.until("the addition is reverted", TIMEOUT, |p| {
        p.get("nwm", "node00")["spec"]["softenScheduling"] == false
    });
    plane.kubectl(&["delete", "nwm", "node01"]);
    plane.until("it is created again", TIMEOUT, |p| with_rules(p) == 2);
    plane.until("both have events", TIMEOUT, |p| {
        let events = p.list("events");
        let has_event = |reason: &str, node: &str, what: &str| {
            events.iter().any(|e| {
                e["reason"] == reason
                    && e["involvedObject"]["name"] == node
                    && e["message"].as_str().unwrap().contains(what)
            })
        };
        has_event("WatermarkEdited", "node00", "edited by kubectl-edit")
            && has_event("WatermarkDeleted", "node01", "deleted")
    });
    plane.kubectl(&["delete", "node", "node01"]);
    plane.until("its watermark is deleted", TIMEOUT, |p| {
        p.list("nwm").len() == 1
    });
}

#[test]
fn windows_nodes_have_no_watermark_even_if_they_had_one() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&names(3));
    let watermarks = |plane: &ControlPlane| {
        let all = plane.list("nwm").into_iter();
        all.map(|object| object["metadata"]["name"].clone())
            .collect::<Vec<_>>()
    };
    let first = plane.controller("first", &[]);
    plane.until("every node has a watermark", TIMEOUT, |p| {
        watermarks(p) == ["node00", "node01", "node02"]
    });
    plane.kubectl(&["label", "node", "node01", "kubernetes.io/os=windows"]);
    plane.until("its watermark is deleted", TIMEOUT, |p| {
        watermarks(p) == ["node00", "node02"]
    });
    first.signal(Signal::SIGKILL);
    plane.kubectl(&["label", "node", "node02", "kubernetes.io/os=windows"]);
    plane.kubectl(&["label", "node", "node00", "kubernetes.io/os=linux"]);
    let second = plane.controller("second", &[]);
    plane.until(
        "the watermark of an earlier controller is deleted",
        TIMEOUT,
        |p| watermarks(p) == ["node00"],
    );
    plane.until("it counts one node", TIMEOUT, |_| {
        (0.5..1.5).contains(&second.metric("plimsoll_controller_nodes "))
    });
}

#[test]
fn a_standby_takes_over_within_ten_seconds_and_repeats_no_writes() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&names(3));
    plane.apply(&[
        policy("AvoidanceAction", "close", &json!({})),
        immediate(node_qos("q", 4000)),
    ]);
    let first = plane.controller("first", &[]);
    plane.until("the first leads", TIMEOUT, |_| first.leads());
    let second = plane.controller("second", &[]);
    plane.until("the second is ready", TIMEOUT, |_| {
        second.http("/readyz").is_some_and(|(code, _)| code == 200)
    });
    plane.until("the rule is everywhere", TIMEOUT, |p| with_rules(p) == 3);
    plane.until("the policy is ready", TIMEOUT, |p| {
        p.get("nodeqos", "q")["status"]["matchedNodes"] == 3
    });
    assert!(!second.leads());
    let before = versions(&plane);
    first.signal(Signal::SIGKILL);
    let took = plane.until("the second leads", TIMEOUT, |_| second.leads());
    assert!(took < Duration::from_secs(10), "{took:?}");
    plane.apply(&[policy("AvoidanceAction", "other", &json!({}))]);
    plane.until("it works", TIMEOUT, |p| {
        condition(&p.get("avoid", "other"), "Ready") == "True Ready"
    });
    plane.kubectl(&["delete", "avoid", "other"]);
    assert_eq!(versions(&plane), before);
    // A leader that shuts down releases its Lease at once.
    let third = plane.controller("third", &[]);
    plane.until("the third is ready", TIMEOUT, |_| {
        third.http("/readyz").is_some_and(|(code, _)| code == 200)
    });
    second.signal(Signal::SIGTERM);
    let took = plane.until("the third leads", TIMEOUT, |_| third.leads());
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn the_time_left_of_a_rollout_is_in_a_column_and_in_an_event() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&names(3));
    plane.apply(&[policy("AvoidanceAction", "close", &json!({}))]);
    let _controller = plane.controller("controller", &[]);
    plane.until("all nodes have a watermark", TIMEOUT, |p| {
        p.list("nwm").len() == 3
    });
    plane.report_enforcing("node01", json!({}));
    // The report and the policy come by different watches: without the report no node could be a canary.
    std::thread::park_timeout(Duration::from_secs(2));
    plane.apply(&[node_qos("q", 4000)]);
    plane.until("kubectl get shows the time left", TIMEOUT, |p| {
        let table = p.kubectl(&["get", "nodeqos", "q"]);
        let row = table.lines().nth(1).unwrap_or_default();
        table.contains("ROLLOUT") && row.contains("Canaries, ") && row.contains(" left")
    });
    plane.until("an event names the canary and the time", TIMEOUT, |p| {
        let started = "the edit is tried on 1 of 3 nodes (node01) first, for ";
        p.list("events").iter().any(|event| {
            let message = event["message"].as_str().unwrap_or_default();
            event["reason"] == "RolloutStarted" && message.starts_with(started)
        })
    });
}

#[test]
fn a_bad_edit_stops_at_its_canary_and_the_cap_limits_unschedulable_nodes() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let nodes = names(20);
    plane.nodes(&nodes);
    plane.apply(&[policy("AvoidanceAction", "close", &json!({}))]);
    let _controller = plane.controller("controller", &[]);
    plane.until("all nodes have a watermark", TIMEOUT, |p| {
        p.list("nwm").len() == 20
    });
    plane.apply(&[node_qos("q", 4000)]);
    plane.until("no node can be a canary", TIMEOUT, |p| {
        condition(&p.get("nodeqos", "q"), "RolledOut") == "False NoCanary"
    });
    assert_eq!(with_rules(&plane), 0);
    let canary = "node07";
    plane.report_enforcing(canary, json!({}));
    plane.until("the only node with an agent has it", TIMEOUT, |p| {
        with_rules(p) == 1 && has_rules(&p.get("nwm", canary))
    });
    let breached = |value: u32| {
        json!({
            "rules": [{"id": "q/cpu", "strategy": "Enforce", "state": "Breached", "value": value, "mark": 4000}],
            "scheduling": {"state": "Enabled"},
        })
    };
    plane.report_enforcing(canary, breached(5000));
    plane.until("the edit stops", TIMEOUT, |p| {
        condition(&p.get("nodeqos", "q"), "RolledOut") == "False CanariesAct"
    });
    plane.until("an event says so", TIMEOUT, |p| {
        p.list("events")
            .iter()
            .any(|event| event["reason"] == "RolloutStopped")
    });
    let described = plane.kubectl(&["describe", "nodeqos", "q"]);
    let (_, events) = described.split_once("Events:").unwrap();
    assert!(events.contains("RolloutStopped"), "{described}");
    assert_eq!(with_rules(&plane), 1);
    plane.kubectl(&["annotate", "nodeqos", "q", "plimsoll.dev/rollout=immediate"]);
    plane.until("the edit continues", TIMEOUT, |p| with_rules(p) == 20);
    for (index, node) in (0..).zip(&nodes) {
        plane.report(node, &breached(5000 + index));
    }
    plane.until("14 of 20 get PreferNoSchedule", TIMEOUT, |p| {
        let soft = p.list("nwm");
        soft.iter()
            .filter(|w| w["spec"]["softenScheduling"] == true)
            .count()
            == 14
    });
}

#[test]
fn an_api_server_outage_causes_no_repeated_writes() {
    let Some(mut plane) = ControlPlane::start() else {
        return;
    };
    if !plane.is_own() {
        return;
    }
    plane.nodes(&names(3));
    plane.apply(&[
        policy("AvoidanceAction", "close", &json!({})),
        immediate(node_qos("q", 4000)),
    ]);
    let controller = plane.controller("controller", &[]);
    plane.until("the rule is everywhere", TIMEOUT, |p| with_rules(p) == 3);
    plane.until("the policy is ready", TIMEOUT, |p| {
        p.get("nodeqos", "q")["status"]["matchedNodes"] == 3
    });
    let before = versions(&plane);
    plane.stop();
    plane.until(
        "it stops leading before its Lease ends",
        Duration::from_secs(6),
        |_| !controller.leads(),
    );
    assert_eq!(controller.http("/livez").unwrap().0, 200);
    plane.start_again();
    plane.until("it leads again", TIMEOUT, |_| controller.leads());
    plane.apply(&[immediate(node_qos("q", 5000))]);
    plane.until("an edit reaches all nodes", Duration::from_mins(1), |p| {
        let watermarks = p.list("nwm");
        watermarks
            .iter()
            .all(|w| w["spec"]["rules"][0]["watermark"] == 5000)
    });
    plane.apply(&[immediate(node_qos("q", 4000))]);
    plane.until("and back", TIMEOUT, |p| {
        let watermarks = p.list("nwm");
        watermarks
            .iter()
            .all(|w| w["spec"]["rules"][0]["watermark"] == 4000)
    });
    // Two edits: two writes of each watermark and at least as many of the policy; none of the action.
    let action = plane.get("avoid", "close")["metadata"]["resourceVersion"].to_string();
    assert!(before.contains(&action));
    let generations = plane.list("nwm");
    assert!(
        generations
            .iter()
            .all(|w| w["metadata"]["generation"].as_i64() <= Some(4))
    );
}

#[test]
fn a_thousand_nodes_and_fifty_policies_are_written_once() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let nodes: Vec<Value> = (0..1000)
        .map(|index| {
            let labels = json!({"pool": format!("pool{}", index % 50)});
            json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("node{index:04}"), "labels": labels}})
        })
        .collect();
    plane.create(&nodes);
    let policies = (0..50).map(|index| {
        let mut object = immediate(node_qos(&format!("q{index:02}"), 4000 + index));
        object["spec"]["selector"] = json!({"matchLabels": {"pool": format!("pool{index}")}});
        object
    });
    plane.create(&policies.collect::<Vec<_>>());
    plane.apply(&[policy("AvoidanceAction", "close", &json!({}))]);
    let controller = plane.controller("controller", &[]);
    let wrote = plane.until("all nodes have their rule", Duration::from_mins(2), |_| {
        controller.http("/metrics").is_some()
            && controller
                .metric("plimsoll_controller_writes_total{object=\"NodeWatermark\",result=\"ok\"}")
                >= 1000.0
            && controller.metric("plimsoll_controller_pending_nodes") < 0.5
    });
    plane.promtool_passes(&controller.http("/metrics").unwrap().1);
    assert_eq!(with_rules(&plane), 1000);
    let memory = controller.resident_kb();
    let writes = |object: &str| {
        controller.metric(&format!(
            "plimsoll_controller_writes_total{{object=\"{object}\""
        ))
    };
    assert!(
        (writes("NodeWatermark") - 1000.0).abs() < 0.5,
        "each is written once"
    );
    // Twenty nodes are in the pool of the policy that is edited: twenty writes.
    let mut edited = immediate(node_qos("q07", 4500));
    edited["spec"]["selector"] = json!({"matchLabels": {"pool": "pool7"}});
    plane.apply(&[edited]);
    let edit = plane.until("the edit reaches its nodes", TIMEOUT, |_| {
        writes("NodeWatermark") > 1019.5
    });
    plane.until("statuses settle", TIMEOUT, |p| {
        let is_current = |q: &Value| {
            q["status"]["matchedNodes"] == 20
                && q["status"]["observedGeneration"] == q["metadata"]["generation"]
        };
        p.list("nodeqoss").iter().all(is_current)
    });
    let before = (writes("NodeWatermark"), writes("status"));
    plane.apply(&[policy("AvoidanceAction", "other", &json!({}))]);
    plane.until("it still works", TIMEOUT, |p| {
        condition(&p.get("avoid", "other"), "Ready") == "True Ready"
    });
    let after = (writes("NodeWatermark"), writes("status"));
    assert_eq!((after.0 - before.0, after.1 - before.1), (0.0, 1.0));
    println!("1000 nodes written in {wrote:?}, an edit of 20 in {edit:?}, {memory} kB resident");
}
