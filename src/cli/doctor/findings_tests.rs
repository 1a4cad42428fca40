#![allow(
    clippy::unnecessary_wraps,
    clippy::needless_pass_by_value,
    reason = "they stand for what was read"
)]

use serde_json::json;

use super::super::permissions::Actor;
use super::super::read::Review;
use super::*;

const OURS: &str = env!("CARGO_PKG_VERSION");

fn table(columns: [&str; 3], rows: &[[&str; 3]]) -> Answer {
    let columns = columns.map(|name| json!({"name": name}));
    let rows: Vec<Value> = rows.iter().map(|cells| json!({"cells": cells})).collect();
    Ok(json!({"columnDefinitions": columns, "rows": rows}))
}

fn of(items: Vec<Value>) -> Answer {
    Ok(json!({"items": items}))
}

fn refused(code: u16) -> Answer {
    let why = format!("refused ({code})");
    Err(Refused {
        code: Some(code),
        why,
    })
}

fn meta(name: &str) -> Value {
    json!({"name": name, "namespace": "plimsoll", "labels": {"app.kubernetes.io/instance": "plimsoll"}})
}

fn pods(rows: &[[&str; 3]]) -> Answer {
    table(["Name", "Ready", "Node"], rows)
}

fn lease(node: &str, renewed: &str) -> Value {
    json!({"metadata": {"name": node}, "spec": {"renewTime": renewed, "leaseDurationSeconds": 40}})
}

/// The document of an API server that has our definitions of this group.
fn schema(group: &str) -> Answer {
    let ours = definitions().into_iter();
    let ours = ours.filter(|it| it.spec.group == group).map(|it| {
        let schema = it.spec.versions[0].schema.as_ref().expect("a schema");
        let schema = schema.open_api_v3_schema.as_ref().expect("a schema");
        let mut schema = serde_json::to_value(schema).expect("JSON");
        let kind = &it.spec.names.kind;
        schema["x-kubernetes-group-version-kind"] = json!([{"group": group, "kind": kind}]);
        (kind.clone(), schema)
    });
    let schemas: serde_json::Map<String, Value> = ours.collect();
    Ok(json!({"components": {"schemas": schemas}}))
}

fn policy(name: &str, status: &Value) -> Value {
    let mut status = status.clone();
    status["conditions"] = json!([{"type": "Ready", "status": "True"}]);
    json!({"metadata": {"name": name}, "status": status})
}

/// Admission policies of the accounts `agent` and `controller`.
const HELD: [&str; 5] = [
    "agent-node",
    "agent-lease",
    "agent-watermark",
    "agent-event",
    "controller-node",
];

fn held(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"failurePolicy": "Fail"}})
}

fn binding(name: &str, action: &str) -> Value {
    json!({"metadata": {"name": "some"}, "spec": {"policyName": name, "validationActions": [action, "Audit"]}})
}

fn guard(failure: &str, bundle: &str) -> Value {
    let hook = json!({"failurePolicy": failure, "clientConfig": {"caBundle": bundle}});
    json!({"metadata": {"name": "guard"}, "webhooks": [hook]})
}

/// An installation with nothing wrong.
fn well() -> Seen {
    Seen {
        now: "2026-01-01T00:01:00Z".parse().expect("a time"),
        lease_namespace: "plimsoll-node-lease".to_owned(),
        version: Ok(json!({"major": "1", "minor": "34+"})),
        aggregation: Ok(json!({"data": {"requestheader-client-ca-file": "pem"}})),
        api_service: Ok(
            json!({"status": {"conditions": [{"type": "Available", "status": "True"}]}}),
        ),
        schemas: ["ensurance.crane.io", "plimsoll.dev"].map(schema),
        daemon_sets: of(vec![json!({
            "metadata": meta("agent-v2"), "status": {"numberReady": 2, "desiredNumberScheduled": 2},
            "spec": {"template": {"spec": {"serviceAccountName": "agent"}}},
        })]),
        deployments: of(vec![json!({
            "metadata": meta("controller"), "status": {"readyReplicas": 2},
            "spec": {"replicas": 2, "template": {"spec": {
                "serviceAccountName": "controller", "containers": [{"args": ["controller", "--eviction-webhook=guard"]}],
            }}},
        })]),
        namespaces: vec![(
            "plimsoll".to_owned(),
            Ok(json!({"metadata": {"name": "plimsoll"}})),
        )],
        nodes: table(
            ["Name", "Status", "Roles"],
            &[["a", "Ready", ""], ["b", "Ready", ""]],
        ),
        agents: vec![pods(&[["x", "1/1", "a"], ["y", "1/1", "b"]])],
        watermarks: table(
            ["Name", "Stopped", "Agent"],
            &[["a", "", OURS], ["b", "", OURS], ["c", "", ""]],
        ),
        leases: of(vec![
            lease("a", "2026-01-01T00:00:55.000000Z"),
            lease("b", "2026-01-01T00:00:30.000000Z"),
        ]),
        webhooks: of(vec![guard("Fail", "pem")]),
        admission: [
            of(HELD.map(held).to_vec()),
            of(HELD.map(|name| binding(name, "Deny")).to_vec()),
        ],
        stop: Ok(json!({"metadata": {"name": OBJECT}})),
        node_qos: of(vec![policy("q", &json!({"matchedNodes": 2}))]),
        pod_qos: of(vec![policy("p", &json!({"matchedPods": 1}))]),
        actions: of(vec![policy("act", &json!({"usedBy": ["q"]}))]),
        reviews: vec![Review {
            actor: Actor::Agent,
            user: "system:serviceaccount:plimsoll:agent".to_owned(),
            what: "patch nodes".to_owned(),
            allowed: Ok(true),
        }],
    }
}

/// The one finding about an installation that is well but for this.
fn but(change: impl FnOnce(&mut Seen)) -> String {
    let mut seen = well();
    change(&mut seen);
    let found = findings(&seen);
    let [finding] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert!(!finding.cure.is_empty());
    finding.to_string()
}

fn says(change: impl FnOnce(&mut Seen), words: &[&str]) {
    let said = but(change);
    for word in words {
        assert!(said.contains(word), "{word} is not in {said}");
    }
}

#[test]
fn nothing_is_found_where_nothing_is_wrong() {
    assert_eq!(findings(&well()), []);
    let summary = summary(&well());
    assert_eq!(
        summary,
        "Kubernetes 1.34, 2 nodes, 2 agents running, 1 NodeQOS"
    );
    // Without the API of node metrics nobody needs what it needs.
    let mut without = well();
    (without.api_service, without.aggregation) = (refused(404), Ok(json!({"data": {}})));
    assert_eq!(findings(&without), []);
}

#[test]
fn an_old_kubernetes_is_told() {
    says(
        |it| it.version = Ok(json!({"major": "1", "minor": "32"})),
        &["1.32", "1.33 or later"],
    );
}

#[test]
fn what_may_not_be_read_is_told_and_nothing_is_concluded_from_it() {
    says(
        |it| it.nodes = refused(403),
        &["nodes could not be read: refused (403)"],
    );
    says(
        |it| it.agents = vec![refused(403)],
        &["pods of agents could not be read"],
    );
    says(|it| it.leases = refused(500), &["Leases could not be read"]);
    says(
        |it| it.schemas[1] = refused(403),
        &["definition of NodeWatermark", "could not be read"],
    );
    let unknown = Err(Refused::default());
    says(
        |it| it.reviews[0].allowed = unknown,
        &["could not be asked", "subjectaccessreviews"],
    );
}

#[test]
fn definitions_that_are_missing_or_of_another_version_are_told() {
    says(
        |it| it.schemas[1] = refused(404),
        &[
            "definition of NodeWatermark",
            "not installed",
            "plimsoll crds",
        ],
    );
    let older = |seen: &mut Seen| {
        let document = seen.schemas[1].as_mut().expect("there");
        let status = "/components/schemas/NodeWatermark/properties/status/properties";
        let fields = document.pointer_mut(status).and_then(Value::as_object_mut);
        fields.expect("fields").remove("would");
    };
    says(
        older,
        &["of another version", "lacks status.would", "plimsoll crds"],
    );
}

#[test]
fn a_stop_and_the_lack_of_its_object_are_told() {
    let annotated = json!({"metadata": {"annotations": {ANNOTATION: "why"}}});
    says(
        |it| it.stop = Ok(annotated),
        &["everything is stopped: why", "plimsoll resume"],
    );
    says(
        |it| it.stop = refused(404),
        &["ConfigMap plimsoll-node-lease/plimsoll-stop", "missing"],
    );
}

#[test]
fn a_controller_that_is_missing_or_not_ready_is_told() {
    says(
        |it| it.deployments = of(Vec::new()),
        &["controller", "there is none"],
    );
    let down = json!({"metadata": meta("controller"), "spec": {"replicas": 2}, "status": {"readyReplicas": 1}});
    says(
        |it| it.deployments = of(vec![down]),
        &["Deployment plimsoll/controller", "1 of 2 replicas"],
    );
}

#[test]
fn two_installations_are_told() {
    let second = json!({
        "metadata": {"name": "c", "namespace": "other", "labels": {"app.kubernetes.io/instance": "second"}},
        "spec": {"replicas": 1}, "status": {"readyReplicas": 1},
    });
    let add = |seen: &mut Seen| {
        let list = seen.deployments.as_mut().expect("there");
        list["items"].as_array_mut().expect("a list").push(second);
    };
    says(
        add,
        &[
            "there are 2: other/second, plimsoll/plimsoll",
            "all but one",
        ],
    );
}

#[test]
fn an_api_of_node_metrics_that_is_not_served_is_told() {
    says(
        |it| it.aggregation = Ok(json!({"data": {}})),
        &["API aggregation", "metricsAPI.enabled=false"],
    );
    let away = json!({"status": {"conditions": [
        {"type": "Available", "status": "False", "reason": "MissingEndpoints", "message": "no endpoints"},
    ]}});
    says(
        |it| it.api_service = Ok(away),
        &["APIService", "no endpoints (MissingEndpoints)"],
    );
}

#[test]
fn agents_that_do_not_come_up_and_nodes_without_one_are_told() {
    let unfit = |ready: u32, wanted: u32| {
        let set = json!({"metadata": meta("agent-v2"), "status": {"numberReady": ready, "desiredNumberScheduled": wanted}});
        of(vec![set])
    };
    says(
        |it| it.daemon_sets = unfit(1, 2),
        &["1 of 2 agents", "agent.layouts"],
    );
    says(|it| it.daemon_sets = unfit(0, 0), &["selects no node"]);
    says(
        |it| it.agents = vec![pods(&[["x", "1/1", "a"], ["y", "0/1", "b"]])],
        &["on 1 node none runs: b"],
    );
    let twice = [["x", "1/1", "a"], ["y", "1/1", "b"]];
    says(
        |it| it.agents = vec![pods(&twice), pods(&twice[..1])],
        &["more than one: a", "exclude each other"],
    );
}

#[test]
fn a_namespace_that_admits_no_agent_is_told() {
    let label = "pod-security.kubernetes.io/enforce";
    let held = json!({"metadata": {"labels": {label: "baseline"}}});
    says(
        |it| it.namespaces[0].1 = Ok(held),
        &[
            "is baseline",
            "kubectl label namespace plimsoll --overwrite",
        ],
    );
    let open = json!({"metadata": {"labels": {label: "privileged"}}});
    let mut seen = well();
    seen.namespaces[0].1 = Ok(open);
    assert_eq!(findings(&seen), []);
}

#[test]
fn agents_of_another_version_are_told() {
    let rows = [["a", "", OURS], ["b", "", "0.0.1"]];
    let older = table(["Name", "Stopped", "Agent"], &rows);
    says(
        |it| it.watermarks = older,
        &["some are of version 0.0.1", OURS],
    );
}

#[test]
fn a_permission_that_lacks_is_told() {
    let words = [
        "permissions of agents",
        "system:serviceaccount:plimsoll:agent may not patch nodes",
    ];
    says(|it| it.reviews[0].allowed = Ok(false), &words);
}

#[test]
fn silent_agents_and_clocks_that_are_ahead_are_told_of_nodes_that_are_there() {
    let leases = |times: [&str; 2]| {
        of(vec![
            lease("a", times[0]),
            lease("b", times[1]),
            lease("gone", "2025-01-01T00:00:00Z"),
        ])
    };
    let fresh = "2026-01-01T00:00:59Z";
    says(
        |it| it.leases = leases([fresh, "2026-01-01T00:00:09Z"]),
        &["1 agent silent", ": b"],
    );
    says(
        |it| it.leases = leases(["2026-01-01T00:01:06Z", fresh]),
        &["1 clock ahead", ": a"],
    );
    let mut seen = well();
    seen.leases = leases(["2026-01-01T00:01:05Z", "2026-01-01T00:00:10Z"]);
    assert_eq!(findings(&seen), [], "5 s ahead, and 50 s after 40 s");
}

#[test]
fn a_guard_that_guards_nothing_is_told() {
    let about = "ValidatingWebhookConfiguration guard";
    says(
        |it| it.webhooks = of(vec![guard("Fail", "")]),
        &[about, "caBundle"],
    );
    says(
        |it| it.webhooks = of(vec![guard("Ignore", "pem")]),
        &[about, "failurePolicy"],
    );
    says(|it| it.webhooks = of(Vec::new()), &[about, "is missing"]);
    says(
        |it| it.webhooks = refused(403),
        &["webhooks could not be read"],
    );
    let mut seen = well();
    seen.webhooks = of(Vec::new());
    seen.deployments.as_mut().expect("a list")["items"][0]["spec"]["template"] = json!({});
    assert_eq!(findings(&seen), [], "nobody wants it");
}

#[test]
fn admission_policies_that_are_not_in_force_are_told() {
    let only =
        |which: usize, items: Vec<Value>| move |it: &mut Seen| it.admission[which] = of(items);
    let all_but_one = HELD[1..].iter().map(|name| held(name)).collect();
    says(only(0, all_but_one), &["not in force: agent-node;"]);
    let weak = HELD.map(|name| {
        binding(
            name,
            if name == "agent-lease" {
                "Warn"
            } else {
                "Deny"
            },
        )
    });
    says(only(1, weak.to_vec()), &["not in force: agent-lease;"]);
    let loose = HELD.map(|name| {
        let mut policy = held(name);
        if name == "controller-node" {
            policy["spec"]["failurePolicy"] = "Ignore".into();
        }
        policy
    });
    says(only(0, loose.to_vec()), &["not in force: controller-node;"]);
    says(
        |it| it.admission = [refused(404), refused(404)],
        &["agent-node, agent-lease", "ValidatingAdmissionPolicy"],
    );
    says(
        |it| it.admission[1] = refused(403),
        &["their bindings could not be read"],
    );
}

#[test]
fn that_no_pod_is_there_yet_is_a_note_and_nothing_wrong() {
    let mut seen = well();
    assert_eq!(notes(&seen), []);
    seen.pod_qos = of(vec![
        policy("p", &json!({"matchedPods": 0})),
        policy("used", &json!({"matchedPods": 2})),
    ]);
    assert_eq!(findings(&seen), []);
    let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(
        said[0].starts_with("PodQOS p: it matches no pod\n"),
        "{said:?}"
    );
}

#[test]
fn policies_that_can_do_nothing_are_told() {
    says(
        |it| it.node_qos = of(vec![policy("q", &json!({"matchedNodes": 0}))]),
        &["NodeQOS q", "no node"],
    );
    says(
        |it| it.actions = of(vec![policy("act", &json!({}))]),
        &["AvoidanceAction act", "no NodeQOS names it"],
    );
    let with = |kind: &str, status: &str| {
        let condition = json!({"type": kind, "status": status, "reason": "UnknownAction", "message": "rules[0]: no such action"});
        of(vec![
            json!({"metadata": {"name": "q"}, "status": {"matchedNodes": 1, "conditions": [condition]}}),
        ])
    };
    says(
        |it| it.node_qos = with("Ready", "False"),
        &["rules[0]: no such action (UnknownAction)"],
    );
    says(
        |it| it.node_qos = with("FieldsNotEnforced", "True"),
        &["no such action", "do nothing"],
    );
    let mut waits = policy("q", &json!({"matchedNodes": 1}));
    waits["spec"] = json!({"rules": [
        {"name": "load", "metricRule": {"name": "cpu_load_1_min"}},
        {"name": "waits", "metricRule": {"name": "container_sched_run_queue_time"}},
    ]});
    says(
        |it| it.node_qos = of(vec![waits]),
        &["NodeQOS q", "rule waits never acts", "cpu_pressure"],
    );
    let unseen = of(vec![json!({"metadata": {"name": "q"}})]);
    says(|it| it.node_qos = unseen, &["nobody has judged it yet"]);
}
