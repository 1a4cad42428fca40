#![allow(
    clippy::unnecessary_wraps,
    clippy::needless_pass_by_value,
    reason = "they stand for what was read"
)]

use serde_json::json;

use super::super::permissions::Actor;
use super::super::trials::Trial;
use super::*;

#[path = "agents_tests.rs"]
mod agents;
#[path = "flow_tests.rs"]
mod flow;
#[path = "nodes_tests.rs"]
mod nodes;
#[path = "policies_tests.rs"]
mod policies;

const OURS: &str = env!("CARGO_PKG_VERSION");
/// The columns of `NodeWatermark`s that are looked at.
const WATERMARK: [&str; 8] = [
    "Name",
    "Stopped",
    "Agent",
    "Ready",
    "Degraded",
    "Contested",
    "Unjudged",
    "Because",
];

fn table<const N: usize>(columns: [&str; N], rows: &[[&str; N]]) -> Answer {
    let columns = columns.map(|name| json!({"name": name})).to_vec();
    let row = |cells: &[&str; N]| json!({"cells": cells.to_vec()});
    let rows: Vec<Value> = rows.iter().map(row).collect();
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

fn pods(rows: &[[&str; 4]]) -> Answer {
    table(["Name", "Ready", "Status", "Node"], rows)
}

fn watermarks(rows: &[[&str; 8]]) -> Answer {
    table(WATERMARK, rows)
}

/// The row of a node whose agent finds nothing wrong.
fn kept(node: &str) -> [&str; 8] {
    let [ready, degraded, contested] = ["RulesKept", "AllInOrder", "NotContested"];
    [node, "", OURS, ready, degraded, contested, "", ""]
}

/// A `DaemonSet` of so many pods that were made, are ready and are wanted.
fn set(name: &str, [made, ready, wanted]: [u32; 3]) -> Value {
    json!({
        "metadata": meta(name),
        "status": {"currentNumberScheduled": made, "numberReady": ready, "updatedNumberScheduled": made, "desiredNumberScheduled": wanted},
        "spec": {"template": {"spec": {"serviceAccountName": "agent", "containers": [{"args": ["agent", "--report-service=report"]}]}}},
    })
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
const HELD: [&str; 9] = [
    "agent-node",
    "agent-lease",
    "agent-watermark",
    "agent-event",
    "controller-node",
    "controller-api",
    "controller-eviction",
    "agent-token",
    "controller-token",
];

/// Flow schemas, and priority levels, of these accounts.
const FLOW: [&str; 3] = ["agent", "agent-leases", "controller-election"];

/// A policy's answer, or another's.
fn forbidden(why: &str) -> Answer {
    Err(Refused {
        code: Some(403),
        why: why.to_owned(),
    })
}

fn trial(policy: &str) -> Trial {
    let why = format!(
        "nodes is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: no"
    );
    Trial {
        policy: policy.to_owned(),
        answer: forbidden(&why),
    }
}

fn held(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"failurePolicy": "Fail"}})
}

fn binding(name: &str, action: &str) -> Value {
    json!({"metadata": {"name": "some"}, "spec": {"policyName": name, "validationActions": [action, "Audit"]}})
}

fn schema_of_flow(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"priorityLevelConfiguration": {"name": name}}})
}

fn level(name: &str) -> Value {
    json!({"metadata": {"name": name}})
}

/// An installation with nothing wrong.
fn well() -> Seen {
    Seen {
        agents_alone: false,
        unmounted: Vec::new(),
        leaving: std::collections::BTreeSet::new(),
        now: "2026-01-01T00:01:00Z".parse().expect("a time"),
        lease_namespace: "plimsoll-node-lease".to_owned(),
        version: Ok(json!({"major": "1", "minor": "34+"})),
        aggregation: Ok(json!({"data": {"requestheader-client-ca-file": "pem"}})),
        api_service: Ok(
            json!({"status": {"conditions": [{"type": "Available", "status": "True"}]}}),
        ),
        schemas: ["ensurance.crane.io", "plimsoll.dev"].map(schema),
        daemon_sets: of(vec![set("agent-v2", [2, 2, 2])]),
        deployments: of(vec![json!({
            "metadata": meta("controller"), "status": {"readyReplicas": 2},
            "spec": {"replicas": 2, "template": {"spec": {
                "serviceAccountName": "controller", "containers": [{"args": ["controller", "--report-listen=[::]:8444",
                    "--metrics-api-listen=[::]:8443", "--lease-name=controller"]}],
            }}},
        })]),
        elections: vec![Ok(election("me", "2026-01-01T00:00:58Z"))],
        namespaces: vec![(
            "plimsoll".to_owned(),
            Ok(json!({"metadata": {"name": "plimsoll"}})),
        )],
        refusals: vec![of(Vec::new())],
        nodes: table(
            ["Name", "Status", "Roles"],
            &[["a", "Ready", ""], ["b", "Ready", ""]],
        ),
        foreign: table(["Name"], &[]),
        agents: vec![pods(&[
            ["agent-v2-x", "1/1", "Running", "a"],
            ["agent-v2-y", "1/1", "Running", "b"],
        ])],
        watermarks: watermarks(&[kept("a"), kept("b"), ["c", "", "", "", "", "", "", ""]]),
        leases: of(vec![
            lease("a", "2026-01-01T00:00:55.000000Z"),
            lease("b", "2026-01-01T00:00:30.000000Z"),
        ]),
        admission: [
            of(HELD.map(held).to_vec()),
            of(HELD.map(|name| binding(name, "Deny")).to_vec()),
        ],
        flow: [
            of(FLOW.map(schema_of_flow).to_vec()),
            of(FLOW.map(level).to_vec()),
        ],
        stop: Ok(json!({"metadata": {"name": OBJECT}})),
        node_qos: of(vec![policy("q", &json!({"matchedNodes": 2}))]),
        pod_qos: of(vec![policy("p", &json!({"matchedPods": 1}))]),
        actions: of(vec![policy("act", &json!({"usedBy": ["q"]}))]),
        reviews: ["get", "list", "patch"].map(review).to_vec(),
        trials: HELD.map(trial).to_vec(),
    }
}

fn review(verb: &'static str) -> Review {
    Review {
        actor: Actor::Agent,
        user: "system:serviceaccount:plimsoll:agent".to_owned(),
        verb,
        what: "nodes".to_owned(),
        allowed: Ok(true),
    }
}

fn election(holder: &str, renewed: &str) -> Value {
    json!({"spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 8}})
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
fn a_healthy_installation_has_no_findings() {
    assert_eq!(findings(&well()), []);
    let summary = summary(&well());
    assert_eq!(
        summary,
        "Kubernetes 1.34, 2 nodes, 2 agents running, 1 NodeQOS"
    );
    // Without the metrics API its requirements do not matter.
    let mut seen = well();
    (seen.api_service, seen.aggregation) = (refused(404), Ok(json!({"data": {}})));
    without(&mut seen.deployments, "--metrics-api-listen=");
    assert_eq!(findings(&seen), []);
}

#[test]
fn an_old_kubernetes_is_reported() {
    says(
        |it| it.version = Ok(json!({"major": "1", "minor": "32"})),
        &["1.32", "1.33 or later"],
    );
}

#[test]
fn unreadable_objects_are_reported_and_cause_no_other_finding() {
    says(
        |it| it.nodes = refused(403),
        &["nodes could not be read: refused (403)"],
    );
    says(
        |it| it.agents = vec![refused(403)],
        &["pods of agents could not be read"],
    );
    let rights = "run it as a user who may read that";
    says(|it| it.stop = refused(403), &["emergency stop", rights]);
    says(
        |it| it.leases = refused(500),
        &["Leases could not be read", "check the API server"],
    );
    says(
        |it| it.namespaces[0].1 = refused(403),
        &["the namespace of agents could not be read"],
    );
    says(
        |it| it.elections = vec![refused(403)],
        &["the Lease of the leader could not be read"],
    );
    says(
        |it| it.schemas[1] = refused(403),
        &["definition of NodeWatermark", "could not be read"],
    );
    let unknown = Err(Refused::default());
    says(
        |it| it.reviews[0].allowed = unknown,
        &["could not be checked", "subjectaccessreviews"],
    );
}

#[test]
fn missing_or_outdated_definitions_are_reported() {
    says(
        |it| it.schemas[1] = refused(404),
        &[
            "definition of NodeWatermark",
            "not installed",
            "plimsoll crds | kubectl apply",
        ],
    );
    let on_1_33 = |seen: &mut Seen| {
        seen.version = Ok(json!({"major": "1", "minor": "33"}));
        seen.schemas[1] = refused(404);
    };
    says(
        on_1_33,
        &[
            "not installed",
            "plimsoll crds --kubernetes 1.33 | kubectl apply",
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
        &[
            "from another version",
            "lacks status.would",
            "plimsoll crds",
        ],
    );
}

#[test]
fn an_emergency_stop_and_its_missing_object_are_reported() {
    let annotated = json!({"metadata": {"annotations": {ANNOTATION: "why"}}});
    says(
        |it| it.stop = Ok(annotated),
        &["everything is stopped: why", "plimsoll resume"],
    );
    says(
        |it| it.stop = refused(404),
        &[
            "ConfigMap plimsoll-node-lease/plimsoll-stop",
            "missing",
            "kubectl create configmap plimsoll-stop -n plimsoll-node-lease",
        ],
    );
}

#[test]
fn a_missing_or_unready_controller_is_reported() {
    says(
        |it| it.deployments = of(Vec::new()),
        &["controller", "there is none"],
    );
    let spec = |replicas: u32| {
        let containers = json!([{"args": ["controller", "--report-listen=[::]:8444"]}]);
        json!({"replicas": replicas, "template": {"spec": {"containers": containers}}})
    };
    let down =
        json!({"metadata": meta("controller"), "spec": spec(2), "status": {"readyReplicas": 1}});
    says(
        |it| it.deployments = of(vec![down]),
        &["Deployment plimsoll/controller", "1 of 2 replicas"],
    );
    let none = json!({"metadata": meta("controller"), "spec": spec(0), "status": {}});
    says(
        |it| it.deployments = of(vec![none]),
        &["0 of 0 replicas are ready", "kubectl scale"],
    );
    let why = "insufficient quota to match these scopes";
    let refused = json!({"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": why});
    let unmade = json!({"metadata": meta("controller"), "spec": spec(2), "status": {"conditions": [refused]}});
    says(
        |it| it.deployments = of(vec![unmade]),
        &["0 of 2 replicas", why, "admit them"],
    );
}

#[test]
fn a_controller_without_a_leader_is_reported() {
    let none = "no replica leads";
    let of_old = election("me", "2026-01-01T00:59:51Z");
    says(
        |it| it.elections = vec![Ok(election("", "2026-01-01T00:00:58Z"))],
        &[none],
    );
    says(|it| it.elections = vec![refused(404)], &[none]);
    let mut seen = well();
    seen.elections = vec![Ok(of_old.clone())];
    seen.leases = of(Vec::new());
    seen.agents = Vec::new();
    seen.now = "2026-01-01T01:00:58Z".parse().expect("a time");
    assert_eq!(findings(&seen), [], "8 s, and a minute more");
    seen.now = "2026-01-01T01:01:00Z".parse().expect("a time");
    assert_eq!(findings(&seen).len(), 1);
    // A controller that is not ready is not expected to lead.
    seen.deployments.as_mut().expect("a list")["items"][0]["status"] = json!({});
    let found = findings(&seen);
    assert!(
        found[0].what.contains("0 of 2 replicas") && found.len() == 1,
        "{found:?}"
    );
}

#[test]
fn nodes_without_a_watermark_are_reported_while_a_controller_runs() {
    let one = |seen: &mut Seen| {
        seen.watermarks = watermarks(&[kept("a")]);
    };
    says(one, &["NodeWatermarks: there is none for 1 node: b"]);
}

#[test]
fn two_installations_are_reported() {
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
fn an_unavailable_metrics_api_is_reported() {
    says(
        |it| it.aggregation = Ok(json!({"data": {}})),
        &["API aggregation", "metricsAPI.enabled=false"],
    );
    says(
        |it| it.aggregation = refused(404),
        &["API aggregation", "metricsAPI.enabled=false"],
    );
    says(
        |it| it.aggregation = refused(403),
        &[
            "API aggregation could not be checked: refused (403)",
            "run it as a user who may read that",
        ],
    );
    says(
        |it| it.api_service = refused(404),
        &["APIService", "missing"],
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
fn agents_of_another_version_are_reported() {
    let mut older = kept("b");
    older[2] = "0.0.1";
    says(
        |it| it.watermarks = watermarks(&[kept("a"), older]),
        &["some have version 0.0.1", OURS],
    );
}

#[test]
fn a_missing_permission_is_reported() {
    let words = [
        "permissions of agents",
        "system:serviceaccount:plimsoll:agent may not patch nodes",
    ];
    says(|it| it.reviews[2].allowed = Ok(false), &words);
    let none = |it: &mut Seen| {
        for review in &mut it.reviews {
            review.allowed = Ok(false);
        }
    };
    says(none, &["agent may not get, list, patch nodes\n"]);
}

/// Takes the argument from the first workload of the list.
fn without(list: &mut Answer, argument: &str) {
    let workload = &mut list.as_mut().expect("a list")["items"][0];
    let args = &mut workload["spec"]["template"]["spec"]["containers"][0]["args"];
    let args = args.as_array_mut().expect("arguments");
    let before = args.len();
    args.retain(|it| !it.as_str().unwrap_or_default().starts_with(argument));
    assert_eq!(args.len() + 1, before, "{argument}");
}

#[test]
fn missing_arguments_for_evictions_are_reported() {
    says(
        |it| without(&mut it.deployments, "--report-listen="),
        &["evictions", "--report-listen", "no pod is evicted"],
    );
    says(
        |it| without(&mut it.daemon_sets, "--report-service="),
        &[
            "evictions",
            "--report-service",
            "only through the API server",
        ],
    );
}

#[test]
fn admission_policies_not_in_force_are_reported() {
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
    for weak in [
        "controller-node",
        "controller-api",
        "controller-eviction",
        "agent-token",
        "controller-token",
    ] {
        let loose = HELD.map(|name| {
            let mut policy = held(name);
            if name == weak {
                policy["spec"]["failurePolicy"] = "Ignore".into();
            }
            policy
        });
        let not = format!("not in force: {weak};");
        says(only(0, loose.to_vec()), &[&not]);
    }
    says(
        |it| it.admission = [refused(404), refused(404)],
        &["agent-node, agent-lease", "helm upgrade"],
    );
    says(
        |it| it.admission[1] = refused(403),
        &["bindings of admission policies could not be read"],
    );
}

#[test]
fn admission_policies_that_reject_nothing_are_reported() {
    let through = |it: &mut Seen| it.trials[6].answer = Ok(json!({}));
    says(
        through,
        &[
            "installed, but reject nothing: controller-eviction;",
            "--disable-admission-plugins",
        ],
    );
    // A missing pod is only noticed after all policies have allowed the request.
    let why = r#"pods "plimsoll-doctor" not found (404)"#.to_owned();
    let code = Some(404);
    says(
        |it| it.trials[6].answer = Err(Refused { code, why }),
        &["installed, but reject nothing: controller-eviction;"],
    );
    // Reported once: a policy that is not bound rejects nothing.
    let unbound = |it: &mut Seen| {
        it.trials[0].answer = Ok(json!({}));
        it.admission[1] = of(HELD[1..].iter().map(|name| binding(name, "Deny")).collect());
    };
    says(unbound, &["not in force: agent-node;"]);
    let denied = r#"serviceaccounts "agent" is forbidden: User "ann" cannot impersonate resource "serviceaccounts""#;
    let mut seen = well();
    seen.trials[0].answer = forbidden(denied);
    assert_eq!(findings(&seen), [], "the user has too few permissions");
    let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    for words in ["agent-node could", "could not be tested", "may impersonate"] {
        assert!(said[0].contains(words), "{said:?}");
    }
    let other = |it: &mut Seen| it.trials[1].answer = refused(500);
    says(
        other,
        &[
            "agent-lease could",
            "could not be tested",
            "follow the message",
        ],
    );
    let mut seen = well();
    seen.trials[2].answer = refused(404);
    assert_eq!(findings(&seen), [], "there was no object to test with");
}
