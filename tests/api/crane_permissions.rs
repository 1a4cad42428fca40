//! What agents may write of crane-scheduler's annotations, by the chart's admission policies.

use std::time::Duration;

use crate::actor_support::attempts::{OTHER, OWN, node_path};
use crate::actor_support::{AGENT, Actor, CONTROLLER, MERGE, agent_pod, install, pod_of};
use crate::api_support::{ControlPlane, names, now};
use crate::chart_support::{NAMESPACE, objects, rendered_with};
use plimsoll::crd::crane_annotations::{CraneValues, HOT, KEYS, WRITTEN};
use serde_json::{Map, Value, json};

const TIMEOUT: Duration = Duration::from_mins(4);
const TIME: &str = "2026-11-26T04:05:06Z";
const OTHER_TIME: &str = "2026-11-26T04:05:07Z";

fn annotations(annotations: &Value) -> Value {
    json!({"metadata": {"annotations": annotations}})
}

/// All that an agent writes.
fn all() -> Value {
    let values = CraneValues::of([Some(63.012); 6], Some(12.0));
    let mut all: Map<_, _> = values
        .annotations(TIME)
        .map(|(key, text)| (key.to_owned(), text.into()))
        .collect();
    all.insert(WRITTEN.to_owned(), TIME.into());
    annotations(&all.into())
}

/// Why an API server refuses this; `None`: it accepts it.
async fn refusal(actor: &Actor, path: &str, body: &Value) -> Option<String> {
    let answer = actor.send("PATCH", path, MERGE, body).await;
    assert!(matches!(answer.code, 200 | 403), "{body}: {answer:?}");
    (answer.code == 403).then(|| answer.message().to_owned())
}

async fn is_accepted(actor: &Actor, body: &Value) {
    assert_eq!(refusal(actor, &node_path(OWN), body).await, None, "{body}");
}

async fn is_refused(actor: &Actor, path: &str, body: &Value, words: &str) {
    let why = refusal(actor, path, body).await;
    let why = why.unwrap_or_else(|| panic!("accepted: {body}"));
    assert!(why.contains(words), "{body}: {why}");
}

/// Waits until API servers see the policies: they accept this, or not.
async fn until(actor: &Actor, path: &str, body: &Value, accepted: bool) {
    let path = format!("{path}?dryRun=All");
    let begun = now();
    while refusal(actor, &path, body).await.is_none() != accepted {
        assert!(begun.elapsed() < TIMEOUT, "the policies are not in force");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn annotate(plane: &ControlPlane, key: &str, text: &str) {
    let text = format!("{key}={text}");
    plane.kubectl(&["annotate", "--overwrite", "node", OWN, &text]);
}

fn turn_on(plane: &ControlPlane) {
    let on = [
        "--set",
        "placement.craneAnnotations.enabled=true",
        "--show-only",
        "templates/admission.yaml",
    ];
    let chart = rendered_with(&plane.tool("helm"), NAMESPACE, &on);
    let policies: Vec<_> = objects(&chart)
        .into_iter()
        .map(|(object, _)| object)
        .collect();
    plane.apply(&policies);
}

#[tokio::test]
async fn agents_write_cranes_annotations_only_where_that_is_on() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    install(&plane, NAMESPACE);
    plane.nodes(&names(2));
    agent_pod(&plane, OWN);
    pod_of(&plane, CONTROLLER, (NAMESPACE, "controller"), OTHER);
    let agent = Actor::of(&plane, AGENT, Some("agent-node00")).await;
    let controller = Actor::of(&plane, CONTROLLER, Some("controller")).await;
    until(&agent, &node_path(OWN), &all(), false).await;
    until(&controller, &node_path(OWN), &all(), false).await;
    off(&plane, &agent).await;
    turn_on(&plane);
    until(&agent, &node_path(OWN), &all(), true).await;
    on(&agent).await;
    for node in [OWN, OTHER] {
        let body = annotations(&json!({HOT: format!("0.0,{TIME}")}));
        let words = "changes metadata.annotations";
        is_refused(&controller, &node_path(node), &body, words).await;
    }
}

/// Only what an agent wrote before may be removed.
async fn off(plane: &ControlPlane, agent: &Actor) {
    let own = node_path(OWN);
    let words = "InterferenceIdentified of its Node, not metadata.annotations";
    is_refused(agent, &own, &all(), words).await;
    annotate(plane, KEYS[0], &format!("0.50000,{TIME}"));
    annotate(plane, KEYS[1], &format!("0.50000,{OTHER_TIME}"));
    let removed = |keys: &[&str]| {
        let keys = keys.iter().map(|key| ((*key).to_owned(), Value::Null));
        annotations(&keys.collect::<Map<_, _>>().into())
    };
    for key in [KEYS[0], KEYS[1]] {
        is_refused(agent, &own, &removed(&[key]), words).await;
    }
    annotate(plane, WRITTEN, TIME);
    is_refused(agent, &own, &removed(&[KEYS[1]]), words).await;
    let changed = annotations(&json!({KEYS[0]: format!("0.00000,{TIME}")}));
    is_refused(agent, &own, &changed, words).await;
    is_accepted(agent, &removed(&[KEYS[0], WRITTEN])).await;
    let node = plane.get("node", OWN);
    let left = &node["metadata"]["annotations"];
    assert_eq!(left[KEYS[1]], format!("0.50000,{OTHER_TIME}"));
    assert_eq!(left[WRITTEN], Value::Null);
}

async fn on(agent: &Actor) {
    let own = node_path(OWN);
    is_accepted(agent, &all()).await;
    is_accepted(agent, &annotations(&json!({HOT: null, KEYS[1]: null}))).await;
    is_accepted(agent, &annotations(&json!({HOT: format!("10.0,{TIME}")}))).await;
    let of_node = "may update only its own Node, not node01";
    is_refused(agent, &node_path(OTHER), &all(), of_node).await;
    for key in ["cpu_usage_avg_10m", "a", "plimsoll.dev/crane"] {
        let body = annotations(&json!({HOT: null, key: format!("0.00000,{TIME}")}));
        let words = "the annotations of crane-scheduler and the condition InterferenceIdentified of its Node, not metadata.annotations";
        is_refused(agent, &own, &body, words).await;
    }
    let words = "have the form 0.12345,2026-01-02T15:04:05Z";
    for number in ["", "-0.5", "0.5", "1.00001", "NaN", "00.50000", "0.500000"] {
        let body = annotations(&json!({KEYS[3]: format!("{number},{TIME}")}));
        is_refused(agent, &own, &body, words).await;
    }
    for number in ["1", "-1.0", "10.1", "0.75", "100.0"] {
        let body = annotations(&json!({HOT: format!("{number},{TIME}")}));
        is_refused(agent, &own, &body, words).await;
    }
    for time in ["", "2026-11-26T04:05:06+08:00", "2026-11-26T04:05:06.1Z"] {
        for (key, text) in [(KEYS[0], "0.50000,"), (HOT, "0.5,"), (WRITTEN, "")] {
            let body = annotations(&json!({key: format!("{text}{time}")}));
            is_refused(agent, &own, &body, words).await;
        }
    }
}
