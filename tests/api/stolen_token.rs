//! A token stolen from one node's agent can't harm other nodes, and a real agent is refused nothing: the chart's roles and
//! admission policies on a real API server.

use std::path::PathBuf;
use std::time::Duration;

use crate::actor_support::attempts::{
    OTHER, OWN, against_another_node, against_its_own_api, against_its_own_metadata,
    against_its_own_node, as_the_leader_does, event, eviction, forbidden_evictions,
    in_names_of_others, lease, node_path, our_taint, to_evict, to_impersonate,
    to_remove_restrictions,
};
use crate::actor_support::{
    AGENT, Actor, Answer, CONTROLLER, JSON, MERGE, agent_pod, attempt, install, pod_of,
};
use crate::agent_support::pod;
use crate::api_support::{ControlPlane, Controller, LEASES, aggregation, free_port, names, policy};
use crate::chart_support::{NAMESPACE, objects, rendered_with};
use k8s_openapi::api::core::v1::ObjectReference;
use plimsoll::clock::boot_time;
use plimsoll::cluster::events::{EventSpec, Events, node_reference};
use plimsoll::cluster::taint::{self, DesiredTaint, NodeTaint, TaintError};
use plimsoll::crd::eviction::api_path;
use plimsoll::engine::policy::TaintEffect;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(4);

/// A control plane with two nodes, the pods of agents and controller, and the chart's roles and policies in force.
async fn two_nodes() -> Option<(ControlPlane, Actor, Actor)> {
    let plane = ControlPlane::start().filter(ControlPlane::is_own)?;
    install(&plane, NAMESPACE);
    plane.nodes(&names(2));
    agent_pod(&plane, OWN);
    agent_pod(&plane, OTHER);
    pod_of(&plane, CONTROLLER, (NAMESPACE, "controller"), OTHER);
    for node in [OWN, OTHER] {
        plane.apply(&[watermark(node)]);
    }
    let mut theirs = lease(OTHER);
    theirs["metadata"]["namespace"] = LEASES.into();
    plane.apply(&[theirs]);
    let agent = Actor::of(&plane, AGENT, Some("agent-node00")).await;
    let controller = Actor::of(&plane, CONTROLLER, Some("controller")).await;
    until_in_force(&plane, &agent, &controller).await;
    Some((plane, agent, controller))
}

fn watermark(node: &str) -> Value {
    json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": node},
        "spec": {"nodeUID": "u", "hash": "0123456789abcdef"},
    })
}

/// API servers see policies a moment after they are created. Uses dry runs.
async fn until_in_force(plane: &ControlPlane, agent: &Actor, controller: &Actor) {
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    let node = format!("{}?dryRun=All", node_path(OTHER));
    let mut probes = vec![
        (
            agent,
            attempt("", ("PATCH", &node), (MERGE, label.clone()), ""),
        ),
        (
            controller,
            attempt("", ("PATCH", &node), (MERGE, label), ""),
        ),
    ];
    let others = against_another_node()
        .into_iter()
        .chain(in_names_of_others(&Value::Null));
    let others = others.filter(|it| it.path.contains("watermark") || it.method == "POST");
    let by_controller = against_its_own_api()
        .into_iter()
        .chain(forbidden_evictions());
    let by_controller = by_controller.map(|it| (controller, it));
    let refused = others.map(|it| (agent, it));
    for (actor, mut probe) in refused.chain(by_controller) {
        let separator = if probe.path.contains('?') { '&' } else { '?' };
        probe.path = format!("{}{separator}dryRun=All", probe.path);
        probes.push((actor, probe));
    }
    let begun = crate::api_support::now();
    for (actor, probe) in probes {
        // Refused by the policy and not by a role that is not in force yet.
        while !actor
            .try_out(&probe)
            .await
            .message()
            .contains("denied request")
        {
            let in_time = begun.elapsed() < TIMEOUT;
            assert!(
                in_time,
                "not in force: {} {}",
                probe.path,
                plane.log_of("kube-apiserver")
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
}

#[tokio::test]
async fn a_stolen_agent_token_cannot_harm_other_nodes() {
    let Some((plane, stolen, controller)) = two_nodes().await else {
        return;
    };
    on_node(&plane, "default", "mine", OWN);
    on_node(&plane, "default", "theirs", OTHER);
    let theirs = format!("/apis/coordination.k8s.io/v1/namespaces/{LEASES}/leases/{OTHER}");
    let theirs = stolen.get(&theirs).await.body;
    let attempts = [
        to_evict("mine"),
        to_evict("theirs"),
        against_another_node(),
        against_its_own_metadata(),
        against_its_own_node(),
        in_names_of_others(&theirs),
        to_remove_restrictions(),
        to_impersonate(),
    ];
    for attempt in attempts.iter().flatten() {
        stolen.is_refused(attempt).await;
    }
    documented_exposure(&plane, &stolen).await;
    without_a_node(&plane).await;
    a_stolen_controller(&plane, &controller).await;
    a_stolen_controller_evicts(&plane, &controller).await;
    others_are_not_affected(&plane).await;
}

/// What the holder of a stolen token can still do, as documented.
async fn documented_exposure(plane: &ControlPlane, holder: &Actor) {
    plane.create(&[pod("elsewhere", "web")]);
    for path in [
        "/api/v1/pods",
        "/api/v1/nodes",
        "/apis/plimsoll.dev/v1alpha1/nodewatermarks",
        "/api/v1/namespaces/default/pods/elsewhere",
    ] {
        assert_eq!(holder.get(path).await.code, 200, "{path}");
    }
    let theirs = format!("/apis/coordination.k8s.io/v1/namespaces/{LEASES}/leases/{OTHER}");
    assert_eq!(holder.get(&theirs).await.code, 200);
    let about =
        json!({"apiVersion": "v1", "kind": "Pod", "namespace": "default", "name": "elsewhere"});
    let events = "/api/v1/namespaces/default/events";
    let forged_event = event("default", OWN, &about);
    let answer = holder.send("POST", events, JSON, &forged_event).await;
    assert_eq!(answer.code, 201, "{answer:?}");
}

/// A token that is bound to no pod; the kubelet issues no such tokens.
async fn without_a_node(plane: &ControlPlane) {
    let unbound = Actor::of(plane, AGENT, None).await;
    let no_node = "the token is not bound to a node";
    let taint = json!({"spec": {"taints": [our_taint("NoSchedule")]}});
    let own = format!("/apis/coordination.k8s.io/v1/namespaces/{LEASES}/leases");
    let status = format!("/apis/plimsoll.dev/v1alpha1/nodewatermarks/{OWN}/status");
    let about = json!({"apiVersion": "v1", "kind": "Node", "name": OWN});
    let events = "/api/v1/namespaces/default/events";
    for attempt in [
        attempt("taint", ("PATCH", &node_path(OWN)), (MERGE, taint), no_node),
        attempt("Lease", ("POST", &own), (JSON, lease(OWN)), no_node),
        attempt(
            "status",
            ("PATCH", &status),
            (MERGE, json!({"status": {}})),
            no_node,
        ),
        attempt(
            "event",
            ("POST", events),
            (JSON, event("default", OWN, &about)),
            no_node,
        ),
    ] {
        unbound.is_refused(&attempt).await;
    }
}

/// With a controller's token, our taint can be removed from nodes, and nothing else changed on them.
async fn a_stolen_controller(plane: &ControlPlane, controller: &Actor) {
    let node = node_path(OTHER);
    let nothing = |what: &str| format!("the request changes {what}");
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    let cordon = json!({"spec": {"unschedulable": true}});
    for attempt in [
        attempt(
            "label",
            ("PATCH", &node),
            (MERGE, label),
            nothing("metadata.labels"),
        ),
        attempt(
            "cordon",
            ("PATCH", &node),
            (MERGE, cordon),
            nothing("spec.unschedulable"),
        ),
    ] {
        controller.is_refused(&attempt).await;
    }
    for attempt in against_its_own_api() {
        controller.is_refused(&attempt).await;
    }
    let closed = taint::read(&controller.client, OTHER).await.unwrap();
    let wanted = node_taint(TaintEffect::NoSchedule);
    let refused =
        taint::reconcile(&controller.client, closed, DesiredTaint::Present(&wanted)).await;
    let message = refused.unwrap_err().to_string();
    assert!(
        message.contains(
            "may remove the taints interference.crane.io and plimsoll.dev/busy, but not set them"
        ),
        "{message}"
    );
    // The taint left by an unresponsive agent.
    let taint = json!([{"op": "add", "path": "/spec/taints/-", "value": our_taint("NoSchedule")}]);
    plane.kubectl(&[
        "patch",
        "node",
        OTHER,
        "--type=json",
        "-p",
        &taint.to_string(),
    ]);
    let left = taint::read(&controller.client, OTHER).await.unwrap();
    assert_eq!(left.effect(), Some(TaintEffect::NoSchedule));
    let opened = taint::reconcile(&controller.client, left, DesiredTaint::Absent)
        .await
        .unwrap();
    assert_eq!(opened.effect(), None);
}

/// It can evict only as the leader does: with a UID and a grace period, not in kube-system, and only with a token bound to the
/// controller's pod. Disruption budgets apply, but neither rules nor our budgets: that exposure is documented.
async fn a_stolen_controller_evicts(plane: &ControlPlane, controller: &Actor) {
    for attempt in forbidden_evictions() {
        controller.is_refused(&attempt).await;
    }
    let theirs = uid_of(plane, "default", "theirs");
    let (path, body) = eviction("default", "theirs", &as_the_leader_does(&theirs));
    let unbound = Actor::of(plane, CONTROLLER, None).await;
    let no_pod = "the token is not bound to a pod";
    let by_unbound = attempt("evict", ("POST", &path), (JSON, body.clone()), no_pod);
    unbound.is_refused(&by_unbound).await;
    let delete = "/api/v1/namespaces/default/pods/theirs";
    let cannot = r#"cannot delete resource "pods""#;
    let delete = attempt("delete", ("DELETE", delete), (JSON, Value::Null), cannot);
    controller.is_refused(&delete).await;
    assert!(!is_ending(plane, "default", "theirs"));

    on_node(plane, "default", "needed", OTHER);
    plane.kubectl(&["label", "pod", "needed", "--overwrite", "app=needed"]);
    plane.apply(&[json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": {"name": "needed", "namespace": "default"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "needed"}}},
    })]);
    let needed = as_the_leader_does(&uid_of(plane, "default", "needed"));
    let (needed, options) = eviction("default", "needed", &needed);
    let answer = controller.send("POST", &needed, JSON, &options).await;
    assert_eq!(answer.code, 429, "{answer:?}");

    // The documented exposure, on any node.
    let (again, other) = eviction("default", "theirs", &as_the_leader_does("another"));
    let answer = controller.send("POST", &again, JSON, &other).await;
    assert_eq!(answer.code, 409, "of another UID: {answer:?}");
    assert!(!is_ending(plane, "default", "theirs"));
    let answer = controller.send("POST", &path, JSON, &body).await;
    assert_eq!(answer.code, 201, "{answer:?}");
    assert!(is_ending(plane, "default", "theirs"));
    evicts_in_kube_system(plane, controller).await;
}

/// If the chart's value allows it, pods of kube-system can be evicted too.
async fn evicts_in_kube_system(plane: &ControlPlane, controller: &Actor) {
    on_node(plane, "kube-system", "system", OTHER);
    let uid = uid_of(plane, "kube-system", "system");
    let (path, body) = eviction("kube-system", "system", &as_the_leader_does(&uid));
    let not_of_it = "evictionBudget.kubeSystem";
    let refused = attempt("evict", ("POST", &path), (JSON, body.clone()), not_of_it);
    controller.is_refused(&refused).await;
    let allowed = [
        "--set=evictionBudget.kubeSystem=true",
        "--show-only=templates/admission.yaml",
    ];
    let chart = rendered_with(&plane.tool("helm"), NAMESPACE, &allowed);
    let policies = objects(&chart).into_iter().map(|(object, _)| object);
    plane.apply(&policies.collect::<Vec<_>>());
    let begun = crate::api_support::now();
    let dry_run = format!("{path}?dryRun=All");
    while controller.send("POST", &dry_run, JSON, &body).await.code != 201 {
        assert!(begun.elapsed() < TIMEOUT, "it is still refused");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let answer = controller.send("POST", &path, JSON, &body).await;
    assert_eq!(answer.code, 201, "{answer:?}");
    let (path, body) = eviction("kube-system", "system", &json!({}));
    let by_uid = "an eviction by the controller must have the pod's UID";
    let unnamed = attempt("any", ("POST", &path), (JSON, body), by_uid);
    controller.is_refused(&unnamed).await;
}

/// A pod that a `ReplicaSet` owns, labelled `app: batch`, on this node.
fn on_node(plane: &ControlPlane, namespace: &str, name: &str, node: &str) {
    let mut pod = pod(name, "batch");
    pod["metadata"]["namespace"] = namespace.into();
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": name, "uid": "x", "controller": true,
    }]);
    pod["spec"]["nodeName"] = node.into();
    plane.create(&[pod]);
    let running = ["-p", r#"{"status":{"phase":"Running"}}"#];
    let how = ["--subresource=status", "--type=merge"];
    let patch = ["patch", "pod", name, "-n", namespace];
    plane.kubectl(&[&patch[..], &how, &running].concat());
}

fn field_of(plane: &ControlPlane, namespace: &str, pod: &str, field: &str) -> String {
    let path = format!("jsonpath={{.metadata.{field}}}");
    plane.kubectl(&["get", "pod", pod, "-n", namespace, "-o", &path])
}

fn uid_of(plane: &ControlPlane, namespace: &str, pod: &str) -> String {
    field_of(plane, namespace, pod, "uid")
}

fn is_ending(plane: &ControlPlane, namespace: &str, pod: &str) -> bool {
    !field_of(plane, namespace, pod, "deletionTimestamp").is_empty()
}

/// Pods on two nodes, a rule that evicts one in ten minutes, and a controller with its kubeconfig.
fn leader(plane: &ControlPlane, port: u16) -> (Controller, PathBuf) {
    plane.install_chart();
    plane.nodes(&names(2));
    pod_of(plane, CONTROLLER, ("default", "controller"), OTHER);
    let bound = ["--bound-object-kind=Pod", "--bound-object-name=controller"];
    let kubeconfig = plane.as_account(CONTROLLER, &bound);
    plane.apply(&policies());
    on_node(plane, "default", "theirs", OTHER);
    for name in ["mine", "next", "web"] {
        on_node(plane, "default", name, OWN);
    }
    plane.kubectl(&["label", "pod", "web", "--overwrite", "app=web"]);
    let (api, reports) = (
        format!("--metrics-api-listen=0.0.0.0:{port}"),
        format!("--report-listen=127.0.0.1:{}", free_port()),
    );
    let budget = "--eviction-budget-node=1/10m";
    let args = [&*api, &*reports, "--pod-ip=127.0.0.1", budget];
    let controller = plane.controller_by(&kubeconfig, "controller", &args);
    (controller, kubeconfig)
}

/// Through the API server, by which the holder of a stolen token reaches the leader from anywhere.
#[tokio::test]
async fn a_stolen_agent_token_evicts_only_what_its_nodes_rules_name() {
    let port = free_port();
    let Some(plane) = aggregation::plane(&[port]) else {
        return;
    };
    let (_controller, kubeconfig) = leader(&plane, port);
    let bound = [
        "--bound-object-kind=Node",
        &format!("--bound-object-name={OWN}"),
    ];
    let stolen = Actor::with_kubeconfig(&plane.as_account(AGENT, &bound)).await;

    for (pod, rule, why) in [
        ("theirs", "q/cpu", "it is not on this node any more"),
        ("mine", "p/cpu", "no rule asks for it any more"),
        ("mine", "q/none", "no rule asks for it any more"),
        ("web", "q/cpu", "no PodQOS allows it any more"),
    ] {
        let answer = answer_of_leader(&plane, &stolen, pod, rule).await;
        assert_eq!(answer, json!({"result": "refused", "why": why}), "{pod}");
    }
    let not_its_agent =
        |node| format!("only the agent of node {node:?} may request evictions of its pods");
    let unbound = Actor::with_kubeconfig(&plane.as_account(AGENT, &[])).await;
    let admin = Actor::with_kubeconfig(&plane.kubeconfig).await;
    let controller = Actor::with_kubeconfig(&kubeconfig).await;
    let no_right = r#"cannot create resource "nodemetrics/evictions""#.to_owned();
    for (actor, node, pod, words) in [
        (&stolen, OTHER, "theirs", not_its_agent(OTHER)),
        (&unbound, OWN, "mine", not_its_agent(OWN)),
        (&admin, OWN, "mine", not_its_agent(OWN)),
        (&controller, OWN, "mine", no_right),
    ] {
        let answer = request_eviction(&plane, actor, node, pod, "q/cpu").await;
        assert_eq!(answer.code, 403, "{answer:?}");
        assert!(answer.message().contains(&words), "{answer:?}");
    }
    for pod in ["mine", "next", "web", "theirs"] {
        assert!(!is_ending(&plane, "default", pod), "{pod}");
    }

    // The documented exposure: only the agent knows whether the rule's metric is above its threshold.
    let answer = answer_of_leader(&plane, &stolen, "mine", "q/cpu").await;
    assert_eq!(answer, json!({"result": "accepted"}));
    assert!(is_ending(&plane, "default", "mine"));
    let answer = answer_of_leader(&plane, &stolen, "next", "q/cpu").await;
    let spent = "the node's budget of evictions, 1 in 10m, is spent";
    assert_eq!(
        (&answer["by"], &answer["why"]),
        (&json!("budget"), &json!(spent))
    );
    assert!(!is_ending(&plane, "default", "next"));
}

/// Pods labelled `app: batch` are evicted by q/cpu; p/cpu is a preview.
fn policies() -> Vec<Value> {
    let rules = |strategy: &str| {
        let metric = json!({"name": "cpu_total_usage", "value": 4000});
        json!({"rules": [{
            "name": "cpu", "avoidanceThreshold": 1, "actionName": "evict", "strategy": strategy,
            "metricRule": metric,
        }]})
    };
    let eviction = json!({"eviction": {"terminationGracePeriodSeconds": 7}});
    let batch = json!({
        "labelSelector": {"matchLabels": {"app": "batch"}}, "allowedActions": ["eviction"],
    });
    let mut policies = vec![
        policy("AvoidanceAction", "evict", &eviction),
        policy("PodQOS", "batch", &batch),
        policy("NodeQOS", "q", &rules("Enforce")),
        policy("NodeQOS", "p", &rules("Preview")),
    ];
    for policy in &mut policies {
        policy["metadata"]["annotations"] = json!({"plimsoll.dev/rollout": "immediate"});
    }
    policies
}

/// The leader's answer to the node's own agent, once it is ready and the node has its rules.
async fn answer_of_leader(plane: &ControlPlane, agent: &Actor, pod: &str, rule: &str) -> Value {
    let begun = crate::api_support::now();
    loop {
        let answer = request_eviction(plane, agent, OWN, pod, rule).await;
        let later = answer.body["result"] == "wait" && answer.body["by"] != "budget";
        if answer.code == 200 && !later {
            return answer.body;
        }
        assert!(begun.elapsed() < TIMEOUT, "{answer:?}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Requests an eviction once, as the agent of `node` does through the API server.
async fn request_eviction(
    plane: &ControlPlane,
    actor: &Actor,
    node: &str,
    pod: &str,
    rule: &str,
) -> Answer {
    let watermark = plane.get("nodewatermark", node);
    let hash = watermark["spec"]["hash"].as_str().unwrap_or("none");
    let body = json!({
        "bootID": "b", "sequence": boot_time().as_nanos(), "rule": rule, "hash": hash,
        "namespace": "default", "name": pod, "uid": uid_of(plane, "default", pod),
    });
    actor.send("POST", &api_path(node), JSON, &body).await
}

/// Our policies don't apply to other accounts.
async fn others_are_not_affected(plane: &ControlPlane) {
    plane.kubectl(&["label", "node", OTHER, "a=b"]);
    plane.kubectl(&["cordon", OTHER]);
    let account = format!("--serviceaccount={NAMESPACE}:nobody");
    let grant = [
        "create",
        "clusterrolebinding",
        "nobody",
        "--clusterrole=cluster-admin",
        &account,
    ];
    plane.kubectl(&grant);
    let other = Actor::of(plane, "nobody", None).await;
    let label = json!({"metadata": {"labels": {"a": "c"}}});
    let answer = other.send("PATCH", &node_path(OTHER), MERGE, &label).await;
    assert_eq!(answer.code, 200, "{answer:?}");
}

/// `kubectl` as a user of a group.
fn by(
    plane: &ControlPlane,
    (user, group): (&str, &str),
    args: &[&str],
    input: &str,
) -> Result<String, String> {
    let (user, group) = (format!("--as={user}"), format!("--as-group={group}"));
    let who = [&*user, &*group, "-n", NAMESPACE];
    plane.try_kubectl(&[args, &who].concat(), input)
}

/// A Secret that Kubernetes fills with a token of this account that never expires.
fn token_secret(account: &str) -> String {
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/service-account-token",
        "metadata": {"name": "token", "annotations": {"kubernetes.io/service-account.name": account}},
    });
    secret.to_string()
}

#[test]
fn only_kubelets_create_tokens_of_agents_and_controller() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    install(&plane, NAMESPACE);
    plane.nodes(&names(1));
    agent_pod(&plane, OWN);
    // An API server without the node authorizer.
    let kubelets = ["--clusterrole=system:node", "--group=system:nodes"];
    plane.kubectl(&[&["create", "clusterrolebinding", "kubelets"][..], &kubelets].concat());
    let pod = [
        "--bound-object-kind=Pod",
        "--bound-object-name=agent-node00",
    ];
    let of = |account| ["create", "token", account];
    let bound = [&of(AGENT)[..], &pod].concat();
    let is_refused = |who, args: &[&str], account: &str, input: &str| {
        let message = format!("may not create tokens for the ServiceAccount {account}:");
        by(&plane, who, args, input).is_err_and(|why| why.contains(&message))
    };
    let (root, kubelet) = (
        ("ann", "system:masters"),
        ("system:node:node00", "system:nodes"),
    );
    for account in [AGENT, CONTROLLER] {
        plane.until("an administrator is refused", TIMEOUT, |_| {
            is_refused(root, &of(account), account, "")
        });
        plane.until("a kubelet is, without a pod", TIMEOUT, |_| {
            is_refused(kubelet, &of(account), account, "")
        });
    }
    assert!(is_refused(root, &bound, AGENT, ""));
    let forged = ("system:node:node00", "system:masters");
    assert!(
        is_refused(forged, &bound, AGENT, ""),
        "a user who is no kubelet"
    );
    by(&plane, kubelet, &bound, "").expect("the kubelet's own");
    plane.kubectl(&[&bound[..], &["-n", NAMESPACE]].concat());
    // Tokens of other accounts are not restricted.
    by(&plane, root, &of("nobody"), "").expect("another account's");
    let create = ["create", "-f", "-"];
    for account in [AGENT, CONTROLLER] {
        assert!(is_refused(root, &create, account, &token_secret(account)));
    }
    by(&plane, root, &create, &token_secret("nobody")).expect("another account's");
    let to = format!("kubernetes.io/service-account.name={CONTROLLER}");
    let annotate = ["annotate", "--overwrite", "secret", "token", &to];
    assert!(is_refused(root, &annotate, CONTROLLER, ""));
    by(&plane, root, &["label", "secret", "token", "a=b"], "").expect("another account's");
}

fn node_taint(effect: TaintEffect) -> NodeTaint {
    NodeTaint {
        effect,
        reason: "q/cpu".to_owned(),
        message: format!("cpu_total_usage is above 4000m: {effect:?}"),
    }
}

/// The writes of an agent, on Nodes of every shape.
#[tokio::test]
async fn a_real_agent_is_refused_nothing() {
    let Some((plane, agent, _)) = two_nodes().await else {
        return;
    };
    let client = &agent.client;
    let taints = || plane.get("node", OWN)["spec"]["taints"].clone();
    let reconcile = async |taint: Option<&NodeTaint>| -> Result<(), TaintError> {
        let seen = taint::read(client, OWN).await?;
        let wanted = taint.map_or(DesiredTaint::Absent, DesiredTaint::Present);
        taint::reconcile(client, seen, wanted).await.map(drop)
    };
    // Beside the taint of every new node, and the kubelet's conditions.
    reconcile(Some(&node_taint(TaintEffect::NoSchedule)))
        .await
        .unwrap();
    assert_eq!(taints().as_array().unwrap().len(), 2);
    reconcile(None).await.unwrap();
    // Adding the first taint, changing its effect, and removing the last one.
    plane.kubectl(&[
        "patch",
        "node",
        OWN,
        "--type=merge",
        "-p",
        r#"{"spec":{"taints":null}}"#,
    ]);
    reconcile(Some(&node_taint(TaintEffect::PreferNoSchedule)))
        .await
        .unwrap();
    assert_eq!(taints(), json!([our_taint("PreferNoSchedule")]));
    reconcile(Some(&node_taint(TaintEffect::NoSchedule)))
        .await
        .unwrap();
    assert_eq!(taints(), json!([our_taint("NoSchedule")]));
    // A restarted agent finds the desired state and writes nothing.
    let version = || plane.get("node", OWN)["metadata"]["resourceVersion"].clone();
    let before = version();
    reconcile(Some(&node_taint(TaintEffect::NoSchedule)))
        .await
        .unwrap();
    assert_eq!(version(), before);
    reconcile(None).await.unwrap();
    assert_eq!(taints(), Value::Null);
    among_others(&plane, &agent).await;
    publishes_events(&agent).await;
}

/// Our taint and our condition between those of others.
async fn among_others(plane: &ControlPlane, agent: &Actor) {
    let taints = json!({"spec": {"taints": [
        {"key": "a.example/first", "effect": "NoExecute", "value": "1"}, our_taint("NoSchedule"),
        {"key": "z.example/last", "effect": "PreferNoSchedule"},
    ]}});
    plane.kubectl(&[
        "patch",
        "node",
        OWN,
        "--type=merge",
        "-p",
        &taints.to_string(),
    ]);
    let conditions = json!({"status": {"conditions": [
        {"type": "DiskPressure", "status": "False"}, {"type": "InterferenceIdentified", "status": "True"},
        {"type": "Ready", "status": "True"}, {"type": "ZZZ", "status": "Unknown"},
    ], "images": [{"names": ["a@sha256:0", "a:1"], "sizeBytes": 1}]}});
    let conditions = conditions.to_string();
    let how = ["--subresource=status", "--type=merge", "-p", &conditions];
    plane.kubectl(&[["patch", "node", OWN].as_slice(), &how].concat());
    for wanted in [Some(node_taint(TaintEffect::PreferNoSchedule)), None] {
        let seen = taint::read(&agent.client, OWN).await.unwrap();
        taint::reconcile(
            &agent.client,
            seen,
            wanted
                .as_ref()
                .map_or(DesiredTaint::Absent, DesiredTaint::Present),
        )
        .await
        .unwrap();
    }
    let node = plane.get("node", OWN);
    let taints = node["spec"]["taints"].as_array().unwrap();
    assert_eq!(taints.len(), 2, "{taints:?}");
    assert_eq!(node["status"]["conditions"].as_array().unwrap().len(), 4);
}

/// Events about everything an agent reports, each written and then counted.
async fn publishes_events(agent: &Actor) {
    let events = Events::new(agent.client.clone(), AGENT, OWN);
    let about = |version: &str, kind: &str, namespace: Option<&str>, name: &str| ObjectReference {
        api_version: Some(version.to_owned()),
        kind: Some(kind.to_owned()),
        namespace: namespace.map(str::to_owned),
        name: Some(name.to_owned()),
        uid: Some("u".to_owned()),
        ..ObjectReference::default()
    };
    for about in [
        node_reference(OWN),
        about("plimsoll.dev/v1alpha1", "NodeWatermark", None, OWN),
        about("v1", "Pod", Some("kube-system"), "some"),
    ] {
        let event_spec = EventSpec {
            about,
            warning: true,
            reason: "RuleBreached".to_owned(),
            action: "RuleBreached".to_owned(),
            message: "above the threshold".to_owned(),
        };
        for _ in 0..2 {
            events.publish(event_spec.clone()).await.unwrap();
        }
    }
}
