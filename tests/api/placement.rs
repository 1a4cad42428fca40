//! What agents and controllers may write for schedulers: the label `plimsoll.dev/load` and the taint `plimsoll.dev/busy`.

use std::time::Duration;

use crate::actor_support::attempts::{OTHER, OWN, node_path, our_taint, status_path};
use crate::actor_support::{
    AGENT, Actor, Attempt, CONTROLLER, JSON_PATCH, MERGE, agent_pod, attempt, install, pod_of,
};
use crate::api_support::{ControlPlane, names, now};
use crate::chart_support::NAMESPACE;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(4);
const LOAD: &str = "plimsoll.dev/load";

fn labels(labels: &Value) -> Value {
    json!({"metadata": {"labels": labels}})
}

fn taints(taints: &Value) -> Value {
    json!({"spec": {"taints": taints}})
}

fn busy(effect: &str) -> Value {
    json!({"key": "plimsoll.dev/busy", "effect": effect})
}

/// A merge patch of a Node that has to be refused.
fn refused(what: &'static str, path: &str, body: Value, words: &str) -> Attempt {
    attempt(what, ("PATCH", path), (MERGE, body), words)
}

/// A taint beside those of a Node, which has to be refused.
fn refused_taint(what: &'static str, path: &str, taint: &Value, words: &str) -> Attempt {
    let body = json!([{"op": "add", "path": "/spec/taints/-", "value": taint}]);
    attempt(what, ("PATCH", path), (JSON_PATCH, body), words)
}

/// Attempts of the agent of [`OWN`].
fn by_agent() -> Vec<Attempt> {
    let (own, other) = (node_path(OWN), node_path(OTHER));
    let of_node = "may update only its own Node, not node01";
    let only =
        |changed: &str| format!("the condition InterferenceIdentified of its Node, not {changed}");
    let (more_labels, more_taints) = (only("metadata.labels"), only("other taints"));
    let mut attempts = vec![
        refused("label", &other, labels(&json!({LOAD: "50"})), of_node),
        refused(
            "label by the status",
            &status_path(OTHER),
            labels(&json!({LOAD: "50"})),
            of_node,
        ),
        refused("unlabel", &other, labels(&json!({LOAD: null})), of_node),
        refused_taint("busy", &other, &busy("PreferNoSchedule"), of_node),
        refused(
            "another label",
            &own,
            labels(&json!({LOAD: "50", "pool": "mine"})),
            &more_labels,
        ),
        refused(
            "an empty label",
            &own,
            labels(&json!({"pool": ""})),
            &more_labels,
        ),
        refused(
            "a similar label",
            &own,
            labels(&json!({"plimsoll.dev/load2": "50"})),
            &more_labels,
        ),
        refused_taint("busy and closed", &own, &busy("NoSchedule"), &more_taints),
        refused_taint("busy and empty", &own, &busy("NoExecute"), &more_taints),
    ];
    for text in ["", "abc", "7", "05", "101", "105", "1000", "5.0"] {
        let words =
            format!("the label plimsoll.dev/load is one of 0, 5, ... 95, 100, not \"{text}\"");
        let body = labels(&json!({LOAD: text}));
        attempts.push(refused("garbage", &own, body, &words));
    }
    attempts
}

/// Attempts of the controller.
fn by_controller() -> Vec<Attempt> {
    let node = node_path(OTHER);
    let label = "may remove the label plimsoll.dev/load, but not set it";
    let taint =
        "may remove the taints interference.crane.io and plimsoll.dev/busy, but not set them";
    vec![
        refused(
            "change the label",
            &node,
            labels(&json!({LOAD: "0"})),
            label,
        ),
        refused("label", &node_path(OWN), labels(&json!({LOAD: "0"})), label),
        refused_taint("busy", &node_path(OWN), &busy("PreferNoSchedule"), taint),
        refused(
            "unlabel more",
            &node,
            labels(&json!({LOAD: null, "a": "b"})),
            "changes metadata.labels",
        ),
    ]
}

/// A write that has to be accepted.
async fn writes(actor: &Actor, path: &str, kind: &str, body: Value) {
    let answer = actor.send("PATCH", path, kind, &body).await;
    assert_eq!(answer.code, 200, "{path}: {body}: {answer:?}");
}

/// API servers see policies a moment after they are created.
async fn until_in_force(actors: [&Actor; 2]) {
    let path = format!("{}?dryRun=All", node_path(OTHER));
    let begun = now();
    for actor in actors {
        let probe = refused("", &path, labels(&json!({"a": "b"})), "");
        while !actor
            .try_out(&probe)
            .await
            .message()
            .contains("denied request")
        {
            assert!(begun.elapsed() < TIMEOUT, "the policies are not in force");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

#[tokio::test]
async fn agents_mark_their_own_node_and_controllers_remove_marks() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    install(&plane, NAMESPACE);
    plane.nodes(&names(2));
    agent_pod(&plane, OWN);
    pod_of(&plane, CONTROLLER, (NAMESPACE, "controller"), OTHER);
    plane.kubectl(&["label", "node", OTHER, &format!("{LOAD}=100")]);
    let agent = Actor::of(&plane, AGENT, Some("agent-node00")).await;
    let controller = Actor::of(&plane, CONTROLLER, Some("controller")).await;
    until_in_force([&agent, &controller]).await;
    for attempt in by_agent() {
        agent.is_refused(&attempt).await;
    }
    for attempt in by_controller() {
        controller.is_refused(&attempt).await;
    }
    the_agent_marks(&plane, &agent).await;
    the_controller_removes(&plane, &controller).await;
}

async fn the_agent_marks(plane: &ControlPlane, agent: &Actor) {
    let own = node_path(OWN);
    for load in (0..=100).step_by(5) {
        writes(agent, &own, MERGE, labels(&json!({LOAD: load.to_string()}))).await;
    }
    writes(agent, &own, MERGE, labels(&json!({LOAD: null}))).await;
    // With a test of the version, as agents write their taint.
    let version = plane.get("node", OWN)["metadata"]["resourceVersion"].clone();
    let patch = json!([
        {"op": "test", "path": "/metadata/resourceVersion", "value": version},
        {"op": "add", "path": "/metadata/labels/plimsoll.dev~1load", "value": "95"},
    ]);
    writes(agent, &own, JSON_PATCH, patch).await;
    plane.kubectl(&[
        "patch",
        "node",
        OWN,
        "--type=merge",
        "-p",
        r#"{"spec":{"taints":null}}"#,
    ]);
    for wanted in [
        json!([busy("PreferNoSchedule")]),
        json!([busy("PreferNoSchedule"), our_taint("NoSchedule")]),
        json!([our_taint("NoSchedule")]),
        Value::Null,
    ] {
        writes(agent, &own, MERGE, taints(&wanted)).await;
        assert_eq!(plane.get("node", OWN)["spec"]["taints"], wanted);
    }
    // Garbage of another writer keeps the agent from nothing, and it may replace that.
    plane.kubectl(&["label", "node", OWN, "--overwrite", &format!("{LOAD}=abc")]);
    writes(
        agent,
        &own,
        MERGE,
        taints(&json!([busy("PreferNoSchedule")])),
    )
    .await;
    writes(agent, &own, MERGE, labels(&json!({LOAD: "100"}))).await;
    let node = plane.get("node", OWN);
    assert_eq!(node["metadata"]["labels"][LOAD], "100", "{node}");
}

/// What the agent of a node left that does not respond any more.
async fn the_controller_removes(plane: &ControlPlane, controller: &Actor) {
    let own = node_path(OWN);
    writes(controller, &own, MERGE, taints(&Value::Null)).await;
    writes(controller, &own, MERGE, labels(&json!({LOAD: null}))).await;
    let node = plane.get("node", OWN);
    assert_eq!(node["spec"]["taints"], Value::Null, "{node}");
    assert_eq!(node["metadata"]["labels"][LOAD], Value::Null, "{node}");
}
