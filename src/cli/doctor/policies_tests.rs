use super::*;

#[test]
fn a_pod_qos_without_pods_is_a_note() {
    let mut snapshot = healthy_snapshot();
    assert_eq!(notes(&snapshot), []);
    snapshot.pod_qos = of(vec![
        policy("p", &json!({"matchedPods": 0})),
        policy("used", &json!({"matchedPods": 2})),
    ]);
    assert_eq!(findings(&snapshot), []);
    let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert!(
        texts[0].starts_with("PodQOS p: it matches no pod\n"),
        "{texts:?}"
    );
}

#[test]
fn policies_without_effect_are_reported() {
    assert_finding(
        |it| it.node_qos = of(vec![policy("q", &json!({"matchedNodes": 0}))]),
        &["NodeQOS q", "no node"],
    );
    assert_finding(
        |it| it.actions = of(vec![policy("act", &json!({}))]),
        &["AvoidanceAction act", "no NodeQOS uses it"],
    );
    let with = |kind: &str, status: &str| {
        let condition = json!({"type": kind, "status": status, "reason": "UnknownAction", "message": "rules[0]: no such action"});
        of(vec![
            json!({"metadata": {"name": "q"}, "status": {"matchedNodes": 1, "conditions": [condition]}}),
        ])
    };
    assert_finding(
        |it| it.node_qos = with("Ready", "False"),
        &["rules[0]: no such action (UnknownAction)"],
    );
    assert_finding(
        |it| it.node_qos = with("FieldsNotEnforced", "True"),
        &["no such action", "do nothing"],
    );
    let mut waits = policy("q", &json!({"matchedNodes": 1}));
    waits["spec"] = json!({"rules": [
        {"name": "load", "metricRule": {"name": "cpu_load_1_min"}},
        {"name": "waits", "metricRule": {"name": "container_sched_run_queue_time"}},
    ]});
    assert_finding(
        |it| it.node_qos = of(vec![waits]),
        &[
            "NodeQOS q",
            "rule waits never acts",
            "protected_cpu_delay_max",
        ],
    );
}

#[test]
fn edits_that_do_not_reach_their_nodes_are_reported() {
    let stuck = json!([
        {"type": "Ready", "status": "True"},
        {"type": "RolledOut", "status": "False", "reason": "NoCanary", "message": "the edit waits"},
    ]);
    let stuck =
        json!({"metadata": {"name": "q"}, "status": {"matchedNodes": 1, "conditions": stuck}});
    let mut goes = stuck.clone();
    goes["status"]["conditions"][1]["reason"] = "Progressing".into();
    assert_finding(
        |it| it.node_qos = of(vec![stuck]),
        &["the edit waits (NoCanary)", "as it was before"],
    );
    let mut snapshot = healthy_snapshot();
    snapshot.node_qos = of(vec![goes]);
    assert_eq!(findings(&snapshot), [], "it is on its way");
    let unevaluated = |name: &str| of(vec![json!({"metadata": {"name": name}})]);
    assert_finding(
        |it| it.node_qos = unevaluated("q"),
        &["the controller has not evaluated it yet"],
    );
    assert_finding(
        |it| it.actions = unevaluated("act"),
        &["the controller has not evaluated it yet"],
    );
    let mut edited = policy("q", &json!({"matchedNodes": 2, "observedGeneration": 1}));
    edited["metadata"]["generation"] = 2.into();
    assert_finding(
        |it| it.node_qos = of(vec![edited]),
        &["evaluated its last edit"],
    );
}
