use k8s_openapi::api::core::v1::ConfigMap;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::cli::doctor::snapshot::SnapshotError;

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).expect("an object")
}

fn lease(name: &str, renewed: &str) -> Value {
    json!({
        "metadata": {"name": name},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": renewed},
    })
}

fn now() -> Timestamp {
    "2026-01-01T00:01:00.000000Z".parse().expect("a time")
}

const FRESH: &str = "2026-01-01T00:00:50.000000Z";
const EXPIRED: &str = "2026-01-01T00:00:00.000000Z";

/// Two nodes in order, and one policy of each kind.
fn installation() -> Installation {
    let columns = ["Name", "Breached", "Scheduling", "Throttled", "Agent"];
    let columns: Vec<Value> = columns.iter().map(|name| json!({"name": name})).collect();
    let row = |name: &str| json!({"cells": [name, 0, "Enabled", 0, "0.1.0"]});
    let ready = json!({
        "metadata": {"name": "batch", "generation": 1},
        "status": {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True", "reason": "Compiled"}]},
    });
    let policies = || Ok(read(json!([ready])));
    let labels = json!({"app.kubernetes.io/version": "0.1.0"});
    Installation {
        deployments: Ok(read(json!([{
            "metadata": {"name": "plimsoll-controller", "labels": labels},
            "spec": {"replicas": 2, "selector": {}, "template": {}}, "status": {"readyReplicas": 2},
        }]))),
        elections: vec![Ok(read(lease("plimsoll-controller-0_18ec61cd", FRESH)))],
        watermarks: Ok(read(
            json!({"columnDefinitions": columns, "rows": [row("worker-1"), row("worker-2")]}),
        )),
        leases: Ok(read(json!([
            lease("worker-1", FRESH),
            lease("worker-2", FRESH)
        ]))),
        policies: [
            ("NodeQOS", policies()),
            ("PodQOS", policies()),
            ("AvoidanceAction", policies()),
        ],
        stop: Ok(ConfigMap::default()),
    }
}

fn text(it: &Installation) -> (bool, String) {
    let summary = StatusSummary::new(it, now());
    let text = anstream::adapter::strip_str(&summary.to_string()).to_string();
    (summary.is_healthy(), text)
}

#[test]
fn an_installation_in_order_is_five_lines() {
    let (healthy, text) = text(&installation());
    assert!(healthy);
    assert_eq!(
        text,
        "Controller: 2 of 2 replicas ready, plimsoll-controller-0 leads (0.1.0)\n\
         Agents:     2 of 2 nodes respond (0.1.0)\n\
         Policies:   1 AvoidanceAction, 1 NodeQOS, 1 PodQOS\n\
         Nodes:      none over a threshold\n\
         Stopped:    no\n"
    );
}

/// Asserts that this makes the installation unhealthy, and is said.
fn assert_unhealthy(change: impl FnOnce(&mut Installation), words: &str) {
    let mut it = installation();
    change(&mut it);
    let (healthy, text) = text(&it);
    assert!(!healthy && text.contains(words), "{words}: {text}");
    assert!(text.ends_with("how to fix it\n"), "{text}");
}

#[test]
fn what_is_wrong_is_named() {
    assert_unhealthy(
        |it| it.elections = vec![Ok(read(lease("plimsoll-controller-0", EXPIRED)))],
        "none leads",
    );
    assert_unhealthy(
        |it| {
            it.leases = Ok(read(json!([
                lease("worker-1", FRESH),
                lease("worker-2", EXPIRED)
            ])));
        },
        "1 of 2 nodes respond (0.1.0); 1 without a response: worker-2",
    );
    let failed = json!([{
        "metadata": {"name": "wrong"},
        "status": {"conditions": [{"type": "Ready", "status": "False", "reason": "InvalidSpec"}]},
    }]);
    assert_unhealthy(
        |it| it.policies[0].1 = Ok(read(failed)),
        "1 not in force: NodeQOS wrong (InvalidSpec)",
    );
    let all = json!({"metadata": {"annotations": {"plimsoll.dev/stop": "thresholds"}}});
    assert_unhealthy(
        |it| it.stop = Ok(read(all)),
        "everything is stopped: thresholds",
    );
    let one = json!({"data": {"worker-2": "slow"}});
    assert_unhealthy(
        |it| it.stop = Ok(read(one)),
        "Stopped:    1 by name: worker-2",
    );
}

#[test]
fn a_busy_node_is_named_and_is_no_fault() {
    let mut it = installation();
    let columns = ["Name", "Breached", "Scheduling", "Throttled", "Agent"];
    let columns: Vec<Value> = columns.iter().map(|name| json!({"name": name})).collect();
    let rows = json!([
        {"cells": ["worker-1", 2, "NoSchedule", 3, "0.1.0"]},
        {"cells": ["worker-2", 0, "Enabled", null, "0.0.9"]},
    ]);
    it.watermarks = Ok(read(json!({"columnDefinitions": columns, "rows": rows})));
    let (healthy, text) = text(&it);
    assert!(healthy, "{text}");
    let words = "1 over a threshold: worker-1; 1 closed to new pods: worker-1; 3 throttled pods";
    assert!(text.contains(words), "{text}");
    assert!(text.contains("(0.0.9 (1), 0.1.0 (1))"), "{text}");
}

#[test]
fn what_could_not_be_read_is_no_good_news() {
    let refused = || SnapshotError {
        code: Some(403),
        why: "leases is forbidden".to_owned(),
    };
    assert_unhealthy(
        |it| it.leases = Err(refused()),
        "note: the agents' Leases could not be read: leases is forbidden",
    );
    let missing = SnapshotError {
        code: Some(404),
        why: "not found".to_owned(),
    };
    assert_unhealthy(
        |it| it.stop = Err(missing),
        "the ConfigMap of the emergency stop could not be read: not found",
    );
}

#[test]
fn agents_that_do_not_act_are_named_without_the_object_that_stopped_them() {
    let mut it = installation();
    let columns = ["Name", "Stopped", "Agent"];
    let columns: Vec<Value> = columns.iter().map(|name| json!({"name": name})).collect();
    let rows = json!([
        {"cells": ["worker-1", "Released", "0.1.0"]}, {"cells": ["worker-2", "", "0.1.0"]}, {"cells": ["arm", "", ""]},
    ]);
    it.watermarks = Ok(read(json!({"columnDefinitions": columns, "rows": rows})));
    let (healthy, text) = text(&it);
    assert!(
        !healthy && text.contains("Stopped:    1 not acting: worker-1"),
        "{text}"
    );
    assert!(
        text.contains("2 of 3 nodes respond (0.1.0); 1 without an agent: arm"),
        "{text}"
    );
}

#[test]
fn an_edit_that_is_not_evaluated_is_not_in_force() {
    let edited = json!([{
        "metadata": {"name": "batch", "generation": 2},
        "status": {"observedGeneration": 1, "conditions": [{"type": "Ready", "status": "True", "reason": "Compiled"}]},
    }]);
    assert_unhealthy(
        |it| it.policies[0].1 = Ok(read(edited)),
        "NodeQOS batch (its last edit is not evaluated yet)",
    );
}
