//! Attempts with a stolen agent or controller token, with the messages of their refusals.

use serde_json::{Value, json};

use super::{AGENT, APPLY, Attempt, CONTROLLER, JSON, MERGE, STRATEGIC, attempt};
use crate::api_support::LEASES;
use crate::chart_support::NAMESPACE;

/// The node of the stolen agent token, and another node.
pub const OWN: &str = "node00";
pub const OTHER: &str = "node01";

pub fn node_path(node: &str) -> String {
    format!("/api/v1/nodes/{node}")
}

pub fn status_path(node: &str) -> String {
    format!("/api/v1/nodes/{node}/status")
}

pub fn our_taint(effect: &str) -> Value {
    json!({"key": "interference.crane.io", "effect": effect})
}

pub fn condition(kind: &str) -> Value {
    json!({"status": {"conditions": [{"type": kind, "status": "True", "reason": "r", "message": "m"}]}})
}

/// Attempts against other nodes.
pub fn against_another_node() -> Vec<Attempt> {
    let of_node = "may update only its own Node, not node01";
    let node = node_path(OTHER);
    let status = status_path(OTHER);
    let watermark = format!(
        "/apis/plimsoll.dev/v1alpha1/nodewatermarks/{OTHER}/status?fieldManager=plimsoll-agent&force=true"
    );
    let body = json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": OTHER},
        "status": {"observedHash": "forged"},
    });
    let label = json!({"metadata": {"labels": {"pool": "mine"}}});
    let annotation = json!({"metadata": {"annotations": {"a": "b"}}});
    let taint = json!({"spec": {"taints": [our_taint("NoSchedule")]}});
    let patch = |what, path: &str, kind, body, words: &str| {
        attempt(what, ("PATCH", path), (kind, body), words)
    };
    vec![
        patch("taint", &node, MERGE, taint, of_node),
        patch(
            "cordon",
            &node,
            MERGE,
            json!({"spec": {"unschedulable": true}}),
            of_node,
        ),
        patch("label", &node, MERGE, label.clone(), of_node),
        patch("label by the status", &status, MERGE, label, of_node),
        patch("annotate", &node, MERGE, annotation, of_node),
        patch(
            "condition",
            &status,
            STRATEGIC,
            condition("InterferenceIdentified"),
            of_node,
        ),
        patch("not ready", &status, STRATEGIC, condition("Ready"), of_node),
        patch(
            "status",
            &watermark,
            APPLY,
            body,
            "may update only the status of its own NodeWatermark; the request is UPDATE of node01",
        ),
    ]
}

/// A change of the own Node beyond taint and condition; `changed` names it in the refusal.
fn forbidden_change(what: &'static str, path: &str, body: Value, changed: &str) -> Attempt {
    let words = format!("the condition InterferenceIdentified of its Node, not {changed}");
    attempt(what, ("PATCH", path), (MERGE, body), words)
}

/// Attempts against the metadata of its own Node.
pub fn against_its_own_metadata() -> Vec<Attempt> {
    let (node, status) = (node_path(OWN), status_path(OWN));
    let owners = json!([{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x"}]);
    let table = [
        ("label", &node, "labels", json!({"a": "b"})),
        ("unlabel", &node, "labels", Value::Null),
        ("relabel", &status, "labels", json!({"pool": "b"})),
        ("annotate", &node, "annotations", json!({"a": "b"})),
        ("keep", &node, "finalizers", json!(["a.b/c"])),
        ("own", &node, "ownerReferences", owners),
    ];
    let attempts = table.into_iter().map(|(what, path, field, value)| {
        let body = json!({"metadata": {field: value}});
        forbidden_change(what, path, body, &format!("metadata.{field}"))
    });
    attempts.collect()
}

/// Attempts against its own Node that are not allowed.
pub fn against_its_own_node() -> Vec<Attempt> {
    let (node, status) = (node_path(OWN), status_path(OWN));
    let foreign = "other taints";
    let taints = |what, taints: Value| {
        let body = json!({"spec": {"taints": taints}});
        forbidden_change(what, &node, body, foreign)
    };
    let elsewhere = json!([{"key": "example.com/mine", "effect": "NoExecute"}]);
    let cordon = json!({"spec": {"unschedulable": true}});
    let provider = json!({"spec": {"providerID": "a"}});
    let capacity = json!({"status": {"capacity": {"cpu": "999"}}});
    let mut not_ready =
        forbidden_change("not ready", &status, condition("Ready"), "other conditions");
    not_ready.kind = STRATEGIC;
    vec![
        forbidden_change("cordon", &node, cordon, "spec.unschedulable"),
        forbidden_change("move", &node, provider, "spec.providerID"),
        taints("another taint", elsewhere),
        taints("our taint that evicts", json!([our_taint("NoExecute")])),
        taints("no taint any more", Value::Null),
        forbidden_change("grow", &status, capacity, "status.capacity"),
        not_ready,
    ]
}

pub fn lease(name: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name},
        "spec": {"holderIdentity": name, "leaseDurationSeconds": 3600},
    })
}

pub fn event(namespace: &str, instance: &str, about: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"name": "forged", "namespace": namespace},
        "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning", "reason": "Forged", "action": "Forged",
        "reportingComponent": AGENT, "reportingInstance": instance, "message": "x", "involvedObject": about,
    })
}

/// Attempts against Leases and events of others; `lease_of_other` is the current Lease.
pub fn in_names_of_others(lease_of_other: &Value) -> Vec<Attempt> {
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{LEASES}/leases");
    let theirs = format!("{leases}/{OTHER}");
    let events = "/api/v1/namespaces/default/events";
    let node = json!({"apiVersion": "v1", "kind": "Node", "name": OTHER, "uid": OTHER});
    let own = json!({"apiVersion": "v1", "kind": "Node", "name": OWN, "uid": OWN});
    let policy =
        json!({"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS", "name": "q"});
    let only = format!("may write only the Lease {LEASES}/{OWN}, not {LEASES}/{OTHER}");
    let foreign = "only about pods, its own Node and its own NodeWatermark, not about";
    let mut kubelet = event("default", OWN, &own);
    kubelet["reportingComponent"] = "kubelet".into();
    let mut source = event("default", OWN, &own);
    source["source"] = json!({"component": "kubelet"});
    let post =
        |what, body: Value, words: &str| attempt(what, ("POST", events), (JSON, body), words);
    vec![
        attempt(
            "renew",
            ("PUT", &theirs),
            (JSON, lease_of_other.clone()),
            only,
        ),
        attempt(
            "a Lease of a node that will come",
            ("POST", &leases),
            (JSON, lease("node99")),
            format!("not {LEASES}/node99"),
        ),
        post(
            "another's event",
            event("default", OTHER, &own),
            "may write events only in its own name",
        ),
        post(
            "a kubelet's event",
            kubelet,
            "may write events only in its own name",
        ),
        post(
            "an event with a kubelet as its source",
            source,
            "may write events only in its own name",
        ),
        post(
            "about another node",
            event("default", OWN, &node),
            &format!("{foreign} Node {OTHER}"),
        ),
        post(
            "about a policy",
            event("default", OWN, &policy),
            &format!("{foreign} NodeQOS q"),
        ),
    ]
}

const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";

/// Attempts to remove its restrictions and to read secrets: refused by RBAC.
pub fn to_remove_restrictions() -> Vec<Attempt> {
    let of = |kind: &str| format!("{ADMISSION}/{kind}/plimsoll-agent-node");
    let record = &format!("/api/v1/namespaces/{NAMESPACE}/configmaps/plimsoll-evictions");
    let policy = &of("validatingadmissionpolicies");
    let binding = &of("validatingadmissionpolicybindings");
    let watermark = &format!("/apis/plimsoll.dev/v1alpha1/nodewatermarks/{OWN}");
    let secret = &format!("/api/v1/namespaces/{NAMESPACE}/secrets/plimsoll-metrics-ca");
    let (all, none) = (&"/api/v1/secrets".to_owned(), Value::Null);
    let weak = json!({"spec": {"failurePolicy": "Ignore"}});
    let rules = json!({"spec": {"rules": []}});
    let table = [
        (
            "remove its policy",
            "DELETE",
            policy,
            &none,
            "cannot delete",
        ),
        ("weaken its policy", "PATCH", policy, &weak, "cannot patch"),
        (
            "remove its binding",
            "DELETE",
            binding,
            &none,
            "cannot delete",
        ),
        (
            "forget the evictions that count",
            "PATCH",
            record,
            &json!({"data": null}),
            "cannot patch",
        ),
        ("its own rules", "PATCH", watermark, &rules, "cannot patch"),
        ("read a secret", "GET", secret, &none, "cannot get"),
        ("read secrets", "GET", all, &none, "cannot list"),
    ];
    let attempts = table.into_iter().map(|(what, method, path, body, words)| {
        attempt(what, (method, path), (MERGE, body.clone()), words)
    });
    attempts.collect()
}

/// An Eviction of a pod with these delete options.
pub fn eviction(namespace: &str, pod: &str, options: &Value) -> (String, Value) {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/eviction");
    let body = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace}, "deleteOptions": options,
    });
    (path, body)
}

/// The delete options that the controller uses.
pub fn as_the_leader_does(uid: &str) -> Value {
    json!({"gracePeriodSeconds": 30, "preconditions": {"uid": uid}})
}

/// Attempts of an agent to evict or delete a pod on any node: refused by RBAC.
pub fn to_evict(pod: &str) -> Vec<Attempt> {
    let (path, body) = eviction("default", pod, &as_the_leader_does("u"));
    let gone = format!("/api/v1/namespaces/default/pods/{pod}");
    vec![
        attempt(
            "evict",
            ("POST", &path),
            (JSON, body),
            r#"cannot create resource "pods/eviction""#,
        ),
        attempt(
            "delete",
            ("DELETE", &gone),
            (JSON, Value::Null),
            r#"cannot delete resource "pods""#,
        ),
    ]
}

/// Evictions with the controller's token that differ from the leader's.
pub fn forbidden_evictions() -> Vec<Attempt> {
    let attempt = |what, namespace: &str, options: Value, words: &str| {
        let (path, body) = eviction(namespace, "theirs", &options);
        attempt(what, ("POST", &path), (JSON, body), words)
    };
    let by_uid = json!({"uid": "u"});
    let uid = "an eviction by the controller must have the pod's UID";
    let forced = "an eviction by the controller must have a grace period";
    vec![
        attempt(
            "any pod of that name",
            "default",
            json!({"gracePeriodSeconds": 30}),
            uid,
        ),
        attempt(
            "an empty UID",
            "default",
            json!({"gracePeriodSeconds": 30, "preconditions": {"uid": ""}}),
            uid,
        ),
        attempt(
            "at once",
            "default",
            json!({"gracePeriodSeconds": 0, "preconditions": by_uid}),
            forced,
        ),
        attempt(
            "without a grace period",
            "default",
            json!({"preconditions": by_uid}),
            forced,
        ),
        attempt(
            "a pod of the system",
            "kube-system",
            as_the_leader_does("u"),
            "the controller may not evict pods of kube-system",
        ),
    ]
}

/// Attempts of the controller to change more of the `APIService` than its CA.
pub fn against_its_own_api() -> Vec<Attempt> {
    let api = "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.metrics.plimsoll.dev";
    let elsewhere = json!({"spec": {"service": {"namespace": "default"}}});
    let trusting = json!({"spec": {"insecureSkipTLSVerify": true}});
    let of_api = |what, body: Value| {
        let words = "may change only spec.caBundle of its APIService";
        attempt(what, ("PATCH", api), (MERGE, body), words)
    };
    vec![
        of_api("another service", elsewhere),
        of_api("trust anybody", trusting),
    ]
}

/// Attempts to impersonate another account: refused by RBAC.
pub fn to_impersonate() -> Vec<Attempt> {
    let token =
        |account: &str| format!("/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token");
    let kubelet = format!("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{OTHER}");
    let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings".to_owned();
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"audiences": []},
    });
    let group = "rbac.authorization.k8s.io";
    let grant = json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "x"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": AGENT, "namespace": NAMESPACE}],
    });
    let table = [
        ("the controller", "POST", token(CONTROLLER), request.clone()),
        ("an agent without a node", "POST", token(AGENT), request),
        ("cluster-admin", "POST", bindings, grant),
        ("a kubelet", "PUT", kubelet, lease(OTHER)),
    ];
    let attempts = table
        .into_iter()
        .map(|(what, method, path, body)| attempt(what, (method, &path), (JSON, body), "cannot "));
    attempts.collect()
}
