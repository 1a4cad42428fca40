#![allow(
    clippy::needless_pass_by_value,
    clippy::unnecessary_wraps,
    clippy::unwrap_in_result,
    reason = "helpers make what was read"
)]

use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::PodTemplateSpec;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::super::server_table::ServerTable;
use super::super::dry_runs::DryRun;
use super::super::permissions::{Actor, Review};
use super::super::placement::PlacementState;
use super::super::pods::AgentPod;
use super::super::snapshot::{AgentNamespace, AgentNode, Read, SnapshotError};
use super::*;
use crate::crd::crane_annotations::CraneAnnotations;
use crate::crd::definitions;
use crate::crd::emergency_stop::{ANNOTATION, OBJECT};

#[path = "admission_tests.rs"]
mod admission;
#[path = "agents_tests.rs"]
mod agents;
#[path = "flow_tests.rs"]
mod flow;
#[path = "nodes_tests.rs"]
mod nodes;
#[path = "placement_tests.rs"]
mod placement;
#[path = "policies_tests.rs"]
mod policies;

const OURS: &str = env!("CARGO_PKG_VERSION");
/// The columns of `NodeWatermark`s that are read.
const WATERMARK: [&str; 10] = [
    "Name",
    "Stopped",
    "Agent",
    "Ready",
    "Degraded",
    "Ineffective",
    "Unknown",
    "Reason",
    "Idle",
    "BatchWeight",
];

/// An object that was read.
fn read<T: DeserializeOwned>(object: Value) -> Read<T> {
    Ok(serde_json::from_value(object).expect("an object"))
}

/// A list that was read.
fn of<T: DeserializeOwned>(items: Vec<Value>) -> Read<Vec<T>> {
    read(items.into())
}

fn refused<T>(code: u16) -> Read<T> {
    let why = format!("refused ({code})");
    let code = Some(code);
    Err(SnapshotError { code, why })
}

fn table<const N: usize>(columns: [&str; N], rows: &[[&str; N]]) -> Read<ServerTable> {
    let columns = columns.map(|name| json!({"name": name})).to_vec();
    let row = |cells: &[&str; N]| json!({"cells": cells.to_vec()});
    let rows: Vec<Value> = rows.iter().map(row).collect();
    read(json!({"columnDefinitions": columns, "rows": rows}))
}

fn meta(name: &str) -> Value {
    json!({"name": name, "namespace": "plimsoll", "labels": {"app.kubernetes.io/instance": "plimsoll"}})
}

/// Pods as name, ready containers, status and node; the `DaemonSet` is in the name.
fn pods(rows: &[[&str; 4]]) -> Read<Vec<AgentPod>> {
    let pod = |[name, ready, status, node]: &[&str; 4]| AgentPod {
        name: (*name).to_owned(),
        set: name.rsplit_once('-').expect("a name").0.to_owned(),
        node: (*node != "<none>").then(|| (*node).to_owned()),
        status: (*status).to_owned(),
        ready: *ready == "1/1",
        deleted: *status == "Terminating",
    };
    Ok(rows.iter().map(pod).collect())
}

/// Nodes, and whether they are Ready.
fn nodes(rows: &[(&str, bool)]) -> Read<Vec<AgentNode>> {
    let node = |(name, ready): &(&str, bool)| AgentNode {
        name: (*name).to_owned(),
        ready: *ready,
        deleted: false,
        unsupported_architecture: false,
        taints: Vec::new(),
        load_label: Some("45".to_owned()),
        crane: CraneAnnotations::default(),
    };
    Ok(rows.iter().map(node).collect())
}

fn watermarks(rows: &[[&str; 10]]) -> Read<ServerTable> {
    table(WATERMARK, rows)
}

/// The row of a node whose agent has no problem.
fn healthy(node: &str) -> [&str; 10] {
    let [ready, degraded, ineffective] = ["RulesEnforced", "AllInOrder", "ActionsEffective"];
    [node, "", OURS, ready, degraded, ineffective, "", "", "", ""]
}

/// A `DaemonSet` with these numbers of created, ready and wanted pods.
fn set(name: &str, [created, ready, wanted]: [u32; 3]) -> Value {
    json!({
        "metadata": meta(name),
        "status": {"currentNumberScheduled": created, "numberReady": ready, "updatedNumberScheduled": created, "desiredNumberScheduled": wanted},
        "spec": {"template": {"spec": {"serviceAccountName": "agent", "containers": [{"args": ["agent", "--report-service=report"]}]}}},
    })
}

fn lease(node: &str, renewed: &str) -> Value {
    json!({"metadata": {"name": node}, "spec": {"renewTime": renewed, "leaseDurationSeconds": 40}})
}

/// The document of an API server with our definitions of this group.
fn schema(group: &str) -> Read<Value> {
    // Most tests ask for them, and an unoptimised build generates them slowly.
    static DEFINITIONS: LazyLock<[CustomResourceDefinition; 4]> = LazyLock::new(definitions);
    let ours = DEFINITIONS.iter();
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
const ADMISSION: [&str; 9] = [
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

fn forbidden<T>(why: &str) -> Read<T> {
    Err(SnapshotError {
        code: Some(403),
        why: why.to_owned(),
    })
}

/// A dry run that the policy rejected.
fn dry_run(policy: &str) -> DryRun {
    let why = format!(
        "nodes is forbidden: ValidatingAdmissionPolicy '{policy}' with binding '{policy}' denied request: no"
    );
    DryRun {
        policy: policy.to_owned(),
        result: forbidden(&why),
    }
}

fn admission_policy(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"failurePolicy": "Fail"}})
}

fn binding(name: &str, action: &str) -> Value {
    json!({"metadata": {"name": "some"}, "spec": {"policyName": name, "validationActions": [action, "Audit"]}})
}

fn flow_schema(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"priorityLevelConfiguration": {"name": name}}})
}

fn level(name: &str) -> Value {
    json!({"metadata": {"name": name}})
}

/// A `Deployment` of controllers.
fn deployment(replicas: u32, status: &Value) -> Value {
    let arguments = [
        "controller",
        "--report-listen=[::]:8444",
        "--metrics-api-listen=[::]:8443",
        "--lease-name=controller",
    ];
    let pod = json!({"serviceAccountName": "controller", "containers": [{"args": arguments}]});
    json!({
        "metadata": meta("controller"), "status": status,
        "spec": {"replicas": replicas, "template": {"spec": pod}},
    })
}

/// An installation without problems.
fn healthy_snapshot() -> ClusterSnapshot {
    ClusterSnapshot {
        only_agents: false,
        now: "2026-01-01T00:01:00Z".parse().expect("a time"),
        lease_namespace: "plimsoll-node-lease".to_owned(),
        version: read(json!({"major": "1", "minor": "34+"})),
        aggregation: read(json!({"data": {"requestheader-client-ca-file": "pem"}})),
        api_service: read(
            json!({"status": {"conditions": [{"type": "Available", "status": "True"}]}}),
        ),
        schemas: ["ensurance.crane.io", "plimsoll.dev"].map(schema),
        daemon_sets: of(vec![set("agent-v2", [2, 2, 2])]),
        deployments: of(vec![deployment(2, &json!({"readyReplicas": 2}))]),
        elections: vec![election("me", "2026-01-01T00:00:58Z")],
        agents: vec![AgentNamespace {
            name: "plimsoll".to_owned(),
            object: read(json!({"metadata": {"name": "plimsoll"}})),
            pods: pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "1/1", "Running", "b"],
            ]),
            failed_create: of(Vec::new()),
            failed_mount: of(Vec::new()),
            kubepods: BTreeMap::new(),
        }],
        nodes: nodes(&[("a", true), ("b", true)]),
        watermarks: watermarks(&[
            healthy("a"),
            healthy("b"),
            ["c", "", "", "", "", "", "", "", "", ""],
        ]),
        leases: of(vec![
            lease("a", "2026-01-01T00:00:55.000000Z"),
            lease("b", "2026-01-01T00:00:30.000000Z"),
        ]),
        admission_policies: of(ADMISSION.map(admission_policy).to_vec()),
        admission_bindings: of(ADMISSION.map(|name| binding(name, "Deny")).to_vec()),
        flow_schemas: of(FLOW.map(flow_schema).to_vec()),
        priority_levels: of(FLOW.map(level).to_vec()),
        stop: read(json!({"metadata": {"name": OBJECT}})),
        node_qos: of(vec![policy("q", &json!({"matchedNodes": 2}))]),
        pod_qos: of(vec![policy("p", &json!({"matchedPods": 1}))]),
        actions: of(vec![policy("act", &json!({"usedBy": ["q"]}))]),
        placement: PlacementState {
            loads: Ok(Vec::new()),
            policies: Ok(Vec::new()),
            namespaces: Ok(Vec::new()),
            schedulers: of(Vec::new()),
            groups: Ok(vec!["apps".to_owned()]),
            replicas: Vec::new(),
        },
        reviews: ["get", "list", "patch"].map(review).to_vec(),
        dry_runs: ADMISSION.map(dry_run).to_vec(),
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

fn election(holder: &str, renewed: &str) -> Read<Lease> {
    let spec = json!({"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 8});
    read(json!({"spec": spec}))
}

/// The only finding after this change to a healthy installation.
fn only_finding(change: impl FnOnce(&mut ClusterSnapshot)) -> String {
    let mut snapshot = healthy_snapshot();
    change(&mut snapshot);
    let found = findings(&snapshot);
    let [finding] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert!(!finding.fix.is_empty());
    finding.to_string()
}

fn assert_finding(change: impl FnOnce(&mut ClusterSnapshot), words: &[&str]) {
    let text = only_finding(change);
    for word in words {
        assert!(text.contains(word), "{word} is not in {text}");
    }
}

#[test]
fn a_healthy_installation_has_no_findings() {
    assert_eq!(findings(&healthy_snapshot()), []);
    let summary = summary(&healthy_snapshot());
    assert_eq!(
        summary,
        "Kubernetes 1.34, 2 nodes, 2 agents running, 1 NodeQOS"
    );
    // Without the metrics API its requirements do not matter.
    let mut snapshot = healthy_snapshot();
    (snapshot.api_service, snapshot.aggregation) = (refused(404), read(json!({"data": {}})));
    without(of_controller(&mut snapshot), "--metrics-api-listen=");
    assert_eq!(findings(&snapshot), []);
}

#[test]
fn an_old_kubernetes_is_reported() {
    assert_finding(
        |it| it.version = read(json!({"major": "1", "minor": "32"})),
        &["1.32", "1.33 or later"],
    );
}

#[test]
fn unreadable_objects_are_reported_and_cause_no_other_finding() {
    assert_finding(
        |it| it.nodes = refused(403),
        &["nodes could not be read: refused (403)"],
    );
    assert_finding(
        |it| it.agents[0].pods = refused(403),
        &["pods of agents could not be read"],
    );
    let rights = "run it as a user who may read that";
    assert_finding(|it| it.stop = refused(403), &["emergency stop", rights]);
    assert_finding(
        |it| it.leases = refused(500),
        &["Leases could not be read", "check the API server"],
    );
    assert_finding(
        |it| it.agents[0].object = refused(403),
        &["the namespace of agents could not be read"],
    );
    assert_finding(
        |it| it.elections = vec![refused(403)],
        &["the Lease of the leader could not be read"],
    );
    assert_finding(
        |it| it.schemas[1] = refused(403),
        &["definition of NodeWatermark", "could not be read"],
    );
    let unknown = Err(SnapshotError::default());
    assert_finding(
        |it| it.reviews[0].allowed = unknown,
        &["could not be checked", "subjectaccessreviews"],
    );
}

#[test]
fn missing_or_outdated_definitions_are_reported() {
    assert_finding(
        |it| it.schemas[1] = refused(404),
        &[
            "definition of NodeWatermark",
            "not installed",
            "plimsoll crds | kubectl apply",
        ],
    );
    let on_1_33 = |snapshot: &mut ClusterSnapshot| {
        snapshot.version = read(json!({"major": "1", "minor": "33"}));
        snapshot.schemas[1] = refused(404);
    };
    assert_finding(
        on_1_33,
        &[
            "not installed",
            "plimsoll crds --kubernetes 1.33 | kubectl apply",
        ],
    );
    let older = |snapshot: &mut ClusterSnapshot| {
        let document = snapshot.schemas[1].as_mut().expect("there");
        let status = "/components/schemas/NodeWatermark/properties/status/properties";
        let fields = document.pointer_mut(status).and_then(Value::as_object_mut);
        fields.expect("fields").remove("would");
    };
    assert_finding(
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
    assert_finding(
        |it| it.stop = read(annotated),
        &["everything is stopped: why", "plimsoll resume"],
    );
    let alone = json!({"metadata": {}, "data": {"worker-1": "slow"}});
    assert_finding(
        |it| it.stop = read(alone),
        &[
            "node worker-1 is stopped: slow",
            "plimsoll resume --node worker-1",
        ],
    );
    assert_finding(
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
    assert_finding(
        |it| it.deployments = of(Vec::new()),
        &["controller", "there is none"],
    );
    let down = deployment(2, &json!({"readyReplicas": 1}));
    assert_finding(
        |it| it.deployments = of(vec![down]),
        &["Deployment plimsoll/controller", "1 of 2 replicas"],
    );
    let none = deployment(0, &json!({}));
    assert_finding(
        |it| it.deployments = of(vec![none]),
        &["0 of 0 replicas are ready", "kubectl scale"],
    );
    let why = "insufficient quota to match these scopes";
    let failure = json!({"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": why});
    let rejected = deployment(2, &json!({"conditions": [failure]}));
    assert_finding(
        |it| it.deployments = of(vec![rejected]),
        &["0 of 2 replicas", why, "admit them"],
    );
}

#[test]
fn a_controller_without_a_leader_is_reported() {
    let none = "no replica leads";
    let of_old = election("me", "2026-01-01T00:59:51Z");
    assert_finding(
        |it| it.elections = vec![election("", "2026-01-01T00:00:58Z")],
        &[none],
    );
    assert_finding(|it| it.elections = vec![refused(404)], &[none]);
    let mut snapshot = healthy_snapshot();
    snapshot.elections = vec![of_old];
    snapshot.leases = of(Vec::new());
    snapshot.agents = Vec::new();
    snapshot.now = "2026-01-01T01:00:58Z".parse().expect("a time");
    assert_eq!(findings(&snapshot), [], "8 s, and a minute more");
    snapshot.now = "2026-01-01T01:01:00Z".parse().expect("a time");
    assert_eq!(findings(&snapshot).len(), 1);
    // A controller that is not ready is not expected to lead.
    snapshot.deployments.as_mut().expect("a list")[0].status = None;
    let found = findings(&snapshot);
    assert!(
        found[0].what.contains("0 of 2 replicas") && found.len() == 1,
        "{found:?}"
    );
}

#[test]
fn nodes_without_a_watermark_are_reported_while_a_controller_runs() {
    let one = |snapshot: &mut ClusterSnapshot| {
        snapshot.watermarks = watermarks(&[healthy("a")]);
    };
    assert_finding(one, &["NodeWatermarks: there is none for 1 node: b"]);
}

#[test]
fn two_installations_are_reported() {
    let second = json!({
        "metadata": {"name": "c", "namespace": "other", "labels": {"app.kubernetes.io/instance": "second"}},
        "spec": {"replicas": 1}, "status": {"readyReplicas": 1},
    });
    let add = |snapshot: &mut ClusterSnapshot| {
        let list = snapshot.deployments.as_mut().expect("a list");
        list.push(serde_json::from_value(second).expect("a Deployment"));
    };
    assert_finding(
        add,
        &[
            "there are 2: other/second, plimsoll/plimsoll",
            "all but one",
        ],
    );
}

#[test]
fn an_unavailable_metrics_api_is_reported() {
    assert_finding(
        |it| it.aggregation = read(json!({"data": {}})),
        &["API aggregation", "metricsAPI.enabled=false"],
    );
    assert_finding(
        |it| it.aggregation = refused(404),
        &["API aggregation", "metricsAPI.enabled=false"],
    );
    assert_finding(
        |it| it.aggregation = refused(403),
        &[
            "API aggregation could not be checked: refused (403)",
            "run it as a user who may read that",
        ],
    );
    assert_finding(
        |it| it.api_service = refused(404),
        &["APIService", "missing"],
    );
    let away = json!({"status": {"conditions": [
        {"type": "Available", "status": "False", "reason": "MissingEndpoints", "message": "no endpoints"},
    ]}});
    assert_finding(
        |it| it.api_service = read(away),
        &["APIService", "no endpoints (MissingEndpoints)"],
    );
}

#[test]
fn agents_of_another_version_are_reported() {
    let mut older = healthy("b");
    older[2] = "0.0.1";
    assert_finding(
        |it| it.watermarks = watermarks(&[healthy("a"), older]),
        &["some have version 0.0.1", OURS],
    );
}

#[test]
fn a_missing_permission_is_reported() {
    let words = [
        "permissions of agents",
        "system:serviceaccount:plimsoll:agent may not patch nodes",
    ];
    assert_finding(|it| it.reviews[2].allowed = Ok(false), &words);
    let none = |it: &mut ClusterSnapshot| {
        for review in &mut it.reviews {
            review.allowed = Ok(false);
        }
    };
    assert_finding(none, &["agent may not get, list, patch nodes\n"]);
}

/// Removes an argument of a container.
fn without(template: &mut PodTemplateSpec, argument: &str) {
    let pod = template.spec.as_mut().expect("a pod");
    let arguments = pod.containers[0].args.as_mut().expect("arguments");
    let before = arguments.len();
    arguments.retain(|it| !it.starts_with(argument));
    assert_eq!(arguments.len() + 1, before, "{argument}");
}

fn of_controller(snapshot: &mut ClusterSnapshot) -> &mut PodTemplateSpec {
    let deployment = &mut snapshot.deployments.as_mut().expect("a list")[0];
    &mut deployment.spec.as_mut().expect("a spec").template
}

fn of_agents(snapshot: &mut ClusterSnapshot) -> &mut PodTemplateSpec {
    let set = &mut snapshot.daemon_sets.as_mut().expect("a list")[0];
    &mut set.spec.as_mut().expect("a spec").template
}

#[test]
fn missing_arguments_for_evictions_are_reported() {
    assert_finding(
        |it| without(of_controller(it), "--report-listen="),
        &["evictions", "--report-listen", "no pod is evicted"],
    );
    assert_finding(
        |it| without(of_agents(it), "--report-service="),
        &[
            "evictions",
            "--report-service",
            "only through the API server",
        ],
    );
}
