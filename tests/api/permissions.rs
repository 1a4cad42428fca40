//! What agents and controllers may do with the chart's roles and admission policies, on a real API server: everything in
//! docs/permissions.md, and nothing else.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::time::Duration;

use crate::actor_support::{
    AGENT, APPLY, Actor, CONTROLLER, HOOK_ACCOUNTS, JSON, MERGE, agent_pod, install, kubeconfig,
};
use crate::agent_support::{HIGH, NODE, closing, evicting, pod, throttling};
use crate::api_support::leader::Leader;
use crate::api_support::reporter::{Reporter, full_body, token, trust};
use crate::api_support::{ControlPlane, LEASES, free_port, names, now, policy};
use crate::chart_support::{NAMESPACE, Permission, ReceivedRequest, VERBS, permissions};
use futures::stream::{self, StreamExt as _};
use hyper::Request;
use plimsoll::crd::eviction::PATH;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(4);
/// Concurrent requests.
const MAX_CONCURRENT: usize = 8;

/// A resource as listed by discovery.
#[derive(Clone, Debug)]
struct Resource {
    group: String,
    base: String,
    /// Including the subresource.
    name: String,
    namespaced: bool,
    verbs: Vec<String>,
}

async fn discovered(actor: &Actor) -> Vec<Resource> {
    let groups = actor.get("/apis").await.body;
    let groups = groups["groups"].as_array().unwrap().iter();
    let versions = groups.map(|group| {
        let version = group["preferredVersion"]["groupVersion"].as_str().unwrap();
        (
            group["name"].as_str().unwrap().to_owned(),
            format!("/apis/{version}"),
        )
    });
    let core = (String::new(), "/api/v1".to_owned());
    let mut found = Vec::new();
    for (group, base) in std::iter::once(core).chain(versions.collect::<Vec<_>>()) {
        let list = actor.get(&base).await.body;
        for resource in list["resources"].as_array().into_iter().flatten() {
            let verbs = resource["verbs"].as_array().unwrap().iter();
            found.push(Resource {
                group: group.clone(),
                base: base.clone(),
                name: resource["name"].as_str().unwrap().to_owned(),
                namespaced: resource["namespaced"] == true,
                verbs: verbs
                    .map(|verb| verb.as_str().unwrap().to_owned())
                    .collect(),
            });
        }
    }
    found
}

/// One request to authorize.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Question {
    group: String,
    resource: String,
    namespace: String,
    name: &'static str,
    verb: &'static str,
    path: String,
}

impl Question {
    /// A verb on a resource in a namespace. An empty namespace: cluster-scoped, or all namespaces.
    fn new(resource: &Resource, namespace: &str, verb: &'static str) -> Self {
        let (plural, sub) = resource
            .name
            .split_once('/')
            .unwrap_or((&resource.name, ""));
        let of_many = matches!(verb, "list" | "watch" | "deletecollection");
        let name = if of_many || verb == "create" && sub.is_empty() {
            ""
        } else {
            "other"
        };
        let scope = if namespace.is_empty() {
            String::new()
        } else {
            format!("/namespaces/{namespace}")
        };
        let parts = [plural, name, sub]
            .into_iter()
            .filter(|part| !part.is_empty());
        let parts: Vec<_> = parts.collect();
        let query = if verb == "watch" {
            "?watch=true&timeoutSeconds=1"
        } else {
            ""
        };
        Self {
            path: format!("{}{scope}/{}{query}", resource.base, parts.join("/")),
            group: resource.group.clone(),
            resource: resource.name.clone(),
            namespace: namespace.to_owned(),
            name,
            verb,
        }
    }

    fn to_request(&self) -> ReceivedRequest<'_> {
        ReceivedRequest {
            namespace: &self.namespace,
            group: &self.group,
            resource: &self.resource,
            name: self.name,
            verb: self.verb,
        }
    }

    fn method(&self) -> &'static str {
        match self.verb {
            "create" => "POST",
            "update" => "PUT",
            "patch" => "PATCH",
            "delete" | "deletecollection" => "DELETE",
            _ => "GET",
        }
    }

    /// Sends it, without a body; returns the message if it is forbidden.
    async fn refusal(self, actor: &Actor) -> (Self, Option<String>) {
        let answer = actor
            .send(self.method(), &self.path, MERGE, &Value::Null)
            .await;
        let refusal = (answer.code == 403).then(|| answer.message().to_owned());
        (self, refusal)
    }
}

/// Every verb on every resource; in other namespaces, on each resource that some account has a right to somewhere.
fn questions(resources: &[Resource], matrix: &[Permission]) -> Vec<Question> {
    let mut questions = Vec::new();
    for resource in resources {
        let known = |it: &Permission| it.group == resource.group && it.resource == resource.name;
        let places: &[&str] = if !resource.namespaced {
            &[""]
        } else if matrix.iter().any(known) {
            &[NAMESPACE, LEASES, "kube-system", "default", ""]
        } else {
            &[NAMESPACE, ""]
        };
        for namespace in places {
            let verbs = VERBS.into_iter().filter(|verb| {
                let everywhere = resource.namespaced && namespace.is_empty();
                let served = resource.verbs.iter().any(|it| it == verb);
                served && (!everywhere || matches!(*verb, "list" | "watch"))
            });
            questions.extend(verbs.map(|verb| Question::new(resource, namespace, verb)));
        }
    }
    questions
}

/// The requests that are not forbidden. Checks that the others' messages name the account and the action.
async fn not_forbidden(actor: &Actor, questions: Vec<Question>) -> BTreeSet<Question> {
    let answers = stream::iter(questions).map(|question| question.refusal(actor));
    let answers: Vec<_> = answers.buffer_unordered(MAX_CONCURRENT).collect().await;
    let mut allowed = BTreeSet::new();
    for (question, refusal) in answers {
        let Some(message) = refusal else {
            allowed.insert(question);
            continue;
        };
        let (verb, resource) = (question.verb, &question.resource);
        let cannot = format!("cannot {verb} resource \"{resource}\"");
        assert!(message.contains(&cannot), "{question:?}: {message}");
    }
    allowed
}

/// Checks that the API server grants a permission: all its verbs, for each of its names.
async fn check_granted(actor: &Actor, permission: &Permission) {
    let any = vec![String::new()];
    let names = if permission.names.is_empty() {
        &any
    } else {
        &permission.names
    };
    for verb in &permission.verbs {
        for name in names {
            let review = if permission.resource.starts_with('/') {
                let path = permission.resource.replace('*', "x");
                json!({
                    "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
                    "spec": {"nonResourceAttributes": {"path": path, "verb": verb}},
                })
            } else {
                crate::chart_support::access_review(&ReceivedRequest {
                    namespace: permission.namespace.as_deref().unwrap_or_default(),
                    group: &permission.group,
                    resource: &permission.resource,
                    name,
                    verb,
                })
            };
            let begun = now();
            // API servers see roles a moment after they are created.
            while !actor.may(&review).await {
                let in_time = begun.elapsed() < TIMEOUT;
                assert!(in_time, "{permission:?}: {verb} {name}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Checks that this account may do what the matrix grants it, and nothing else that unprivileged accounts may not do.
async fn check_account(
    account: &str,
    actor: &Actor,
    matrix: &[Permission],
    questions: &[Question],
    nobody: &Actor,
) {
    let own: Vec<_> = matrix.iter().filter(|it| it.actor == account).collect();
    assert!(!own.is_empty());
    for permission in &own {
        check_granted(actor, permission).await;
    }
    let allows = |question: &&Question| own.iter().any(|it| it.allows(&question.to_request()));
    let others = questions
        .iter()
        .filter(|question| !allows(question))
        .cloned();
    let allowed = not_forbidden(actor, others.collect()).await;
    let unprivileged = not_forbidden(nobody, allowed.iter().cloned().collect()).await;
    assert_eq!(
        allowed, unprivileged,
        "{account} may do more than an unprivileged account"
    );
    let harmless = |it: &Question| {
        it.resource.starts_with("selfsubject") || matches!(it.verb, "get" | "list" | "watch")
    };
    assert!(unprivileged.iter().all(harmless), "{unprivileged:#?}");
    for path in ["/metrics", "/logs/", "/debug/pprof/"] {
        assert_eq!(actor.get(path).await.code, 403, "{account} may read {path}");
    }
    for verb in ["impersonate", "bind", "escalate", "*"] {
        let asked = ReceivedRequest {
            namespace: "",
            group: "*",
            resource: "*",
            name: "",
            verb,
        };
        assert!(
            !actor
                .may(&crate::chart_support::access_review(&asked))
                .await,
            "{verb}"
        );
    }
}

/// No permission covers everything, all secrets, or a way to escalate.
fn check_least_privilege(permission: &Permission) {
    let any = |texts: &[String], of: &[&str]| texts.iter().any(|it| of.contains(&it.as_str()));
    let verbs = ["*", "bind", "escalate", "impersonate"];
    assert!(!any(&permission.verbs, &verbs), "{permission:?}");
    let (group, resource) = (&permission.group, &permission.resource);
    assert!(group != "*" && resource != "*", "{permission:?}");
    assert_ne!(resource, "serviceaccounts/token");
    let named = !permission.names.is_empty();
    assert!(named || resource != "secrets", "{permission:?}");
}

/// Each admission policy is bound, matches one account or the creation of its tokens, and fails closed.
fn check_policies(chart: &str) {
    let objects = crate::chart_support::objects(chart);
    let of = |kind: &str| {
        let found = objects.iter().filter(|(it, _)| it["kind"] == kind);
        found.map(|(it, _)| it["spec"].clone()).collect::<Vec<_>>()
    };
    let policies = of("ValidatingAdmissionPolicy");
    let bindings = of("ValidatingAdmissionPolicyBinding");
    assert!(!policies.is_empty() && policies.len() == bindings.len());
    for policy in &policies {
        assert_eq!(policy["failurePolicy"], "Fail", "{policy}");
        let account = policy["matchConditions"][0]["expression"].as_str();
        let resources = &policy["matchConstraints"]["resourceRules"][0]["resources"];
        let only = if resources[0] == "serviceaccounts/token" {
            "request.namespace == 'plimsoll' && "
        } else {
            "request.userInfo.username == 'system:serviceaccount:plimsoll:"
        };
        assert!(account.unwrap().starts_with(only), "{policy}");
    }
    for binding in &bindings {
        let actions = binding["validationActions"].as_array().unwrap();
        assert!(actions.contains(&"Deny".into()), "{binding}");
    }
}

#[tokio::test]
async fn each_account_may_do_only_what_the_matrix_says() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    let chart = install(&plane, NAMESPACE);
    check_policies(&chart);
    let matrix = permissions(&chart);
    matrix.iter().for_each(check_least_privilege);
    plane.nodes(&names(1));
    agent_pod(&plane, "node00");
    let nobody = Actor::of(&plane, "nobody", None).await;
    let questions = questions(&discovered(&nobody).await, &matrix);
    assert!(questions.len() > 500, "{} are too few", questions.len());
    let agent = Actor::of(&plane, AGENT, Some("agent-node00")).await;
    let controller = Actor::of(&plane, CONTROLLER, None).await;
    for (account, actor) in [(AGENT, &agent), (CONTROLLER, &controller)] {
        check_account(account, actor, &matrix, &questions, &nobody).await;
    }
    for account in HOOK_ACCOUNTS {
        let actor = Actor::of(&plane, account, None).await;
        check_account(account, &actor, &matrix, &questions, &nobody).await;
    }
    creates_only_its_own_objects(&controller).await;
}

/// The controller creates its objects by name, and may create no others.
async fn creates_only_its_own_objects(controller: &Actor) {
    for (kind, path, name) in [
        ("ConfigMap", "configmaps", "plimsoll-report-ca"),
        ("ConfigMap", "configmaps", "plimsoll-evictions"),
        ("Secret", "secrets", "plimsoll-metrics-ca"),
    ] {
        let all = format!("/api/v1/namespaces/{NAMESPACE}/{path}");
        let object =
            |name: &str| json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name}});
        let applied = async |name: &str| {
            let path = format!("{all}/{name}?fieldManager=plimsoll");
            controller.send("PATCH", &path, APPLY, &object(name)).await
        };
        assert_eq!(applied(name).await.code, 201);
        assert_eq!(applied("another").await.code, 403);
        let another = object("another");
        let created = controller.send("POST", &all, JSON, &another).await;
        assert_eq!(created.code, 403);
    }
}

/// The real controller with only the chart's rights.
#[test]
#[expect(clippy::too_many_lines, reason = "the lifecycle of a controller")]
fn the_controller_works_with_these_rights() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    let namespace = "default";
    install(&plane, namespace);
    plane.nodes(&names(2));
    plane.create(&[json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "controller", "namespace": namespace},
        "spec": {"serviceAccountName": CONTROLLER, "containers": [{"name": "controller", "image": "none"}]},
    })]);
    let rights = kubeconfig(&plane, namespace, CONTROLLER, Some("controller"));
    let port = free_port();
    let metrics = format!("127.0.0.1:{}", free_port());
    let reports = format!("127.0.0.1:{port}");
    let args = [
        "--metrics-api-listen",
        &metrics,
        "--report-listen",
        &reports,
    ];
    let args = [args.as_slice(), &["--pod-ip", "127.0.0.1"]].concat();
    let controller = plane.controller_by(&rights, "controller", &args);
    let rule = json!({
        "name": "cpu", "actionName": "close", "metricRule": {"name": "cpu_total_usage", "value": 4000},
    });
    let action = json!({"eviction": {"terminationGracePeriodSeconds": 7}});
    let pods = json!({
        "labelSelector": {"matchLabels": {"app": "batch"}}, "allowedActions": ["throttle", "eviction"],
    });
    let mut rules = policy("NodeQOS", "q", &json!({"rules": [rule]}));
    rules["metadata"]["annotations"] = json!({"plimsoll.dev/rollout": "immediate"});
    plane.apply(&[
        policy("AvoidanceAction", "close", &action),
        policy("PodQOS", "p", &pods),
        rules,
    ]);
    plane.until("every node has the rule", TIMEOUT, |plane| {
        let has_rules = |it: &&Value| it["spec"]["rules"] != json!([]);
        plane.list("nwm").iter().filter(has_rules).count() == 2
    });
    for (kind, name) in [("nodeqos", "q"), ("podqos", "p"), ("avoid", "close")] {
        plane.until("the policies have a status", TIMEOUT, |plane| {
            plane.get(kind, name)["status"]["conditions"].is_array()
        });
    }
    plane.until("its CA is published for agents", TIMEOUT, |plane| {
        plane.get("configmap", "plimsoll-report-ca")["data"]["ca.crt"].is_string()
    });
    plane.until("its CA is published for API servers", TIMEOUT, |plane| {
        plane.get("apiservice", "v1alpha1.metrics.plimsoll.dev")["spec"]["caBundle"].is_string()
    });
    let edit = r#"[{"op":"replace","path":"/spec/rules","value":[]}]"#;
    plane.kubectl(&["patch", "nwm", "node00", "--type=json", "-p", edit]);
    plane.until("an edit of another client has an event", TIMEOUT, |plane| {
        let events = plane.list("events");
        let is_from_controller = |it: &Value| it["reportingComponent"] == "plimsoll-controller";
        events.iter().any(is_from_controller)
    });
    plane.kubectl(&["delete", "node", "node01"]);
    plane.until(
        "the NodeWatermark of a deleted node is deleted",
        TIMEOUT,
        |plane| plane.get("nwm", "node01").is_null(),
    );
    plane.until("it is ready", TIMEOUT, |_| {
        let ready = controller.http("/readyz");
        ready.is_some_and(|(code, _)| code == 200)
    });
    evicts_for_an_agent(&plane, port);
    let output = plane.log_of("controller");
    assert!(!output.contains("forbidden"), "{output}");
}

/// Requests an eviction as a node's agent does, by a rule of that node.
fn evicts_for_an_agent(plane: &ControlPlane, port: u16) {
    let mut batch = pod("batch", "batch");
    batch["spec"]["nodeName"] = "node00".into();
    batch["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "batch", "uid": "u", "controller": true,
    }]);
    plane.create(&[batch]);
    let running = r#"{"status":{"phase":"Running"}}"#;
    let how = ["--subresource=status", "--type=merge", "-p", running];
    plane.kubectl(&[&["patch", "pod", "batch"][..], &how].concat());
    let uid = plane.get("pod", "batch")["metadata"]["uid"].clone();
    let (agent, token) = (Reporter::new(&trust(plane), port), token(plane, "node00"));
    let sequence = Cell::new(0);
    plane.until("the pod is evicted", TIMEOUT, |plane| {
        sequence.set(sequence.get() + 1);
        let request = json!({
            "bootID": "boot", "sequence": sequence.get(), "namespace": "default", "name": "batch", "uid": uid,
            "rule": "q/cpu", "hash": plane.get("nwm", "node00")["spec"]["hash"],
        });
        let request = Request::post(format!("https://plimsoll-report.default.svc{PATH}"))
            .header("authorization", format!("Bearer {token}"))
            .header("content-type", "application/json")
            .body(full_body(request.to_string()));
        let answer = agent.send(request.unwrap()).unwrap();
        answer.body["result"] == "accepted"
    });
    let pod = plane.get("pod", "batch");
    assert_eq!(pod["metadata"]["deletionGracePeriodSeconds"], 7, "{pod}");
}

/// The real agent with only the chart's rights, from its first rule to its shutdown.
#[test]
fn the_agent_works_with_these_rights() {
    let Some(mut node) = crate::agent_support::Node::new() else {
        return;
    };
    if !node.plane.is_own() {
        return;
    }
    install(&node.plane, NAMESPACE);
    let daemon_set = daemon_set(&node);
    let kubeconfig = kubeconfig(&node.plane, NAMESPACE, AGENT, Some("agent"));
    let own = ["--namespace", NAMESPACE, "--pod-name", "agent"];
    let rights = ["--kubeconfig", kubeconfig.to_str().unwrap()];
    until_in_force(&node.plane, &rights);
    // It sends requests through the API server, which knows its account and its node.
    let Some(leader) = Leader::start(&node.plane, NODE) else {
        return;
    };
    leader.serve_through_api_server(&node.plane, NAMESPACE);
    let agent = node.agent(&[rights.as_slice(), &own].concat());
    let batch = node.burn_in(&owned_pod());
    node.set_rules(&throttling());
    agent.until("it is ready", || agent.is_ready());
    agent.until("its Lease is renewed", || {
        let lease = ["-n", LEASES, "get", "lease", NODE, "-o", "json"];
        let lease = node.plane.try_kubectl(&lease, "").unwrap_or_default();
        lease.contains("plimsoll.dev/summary") && lease.contains(&node.uid)
    });
    node.machine.load.set(HIGH);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    agent.until("the status reports it", || {
        node.status()["throttled"][0]["pod"] == "batch"
    });
    node.set_rules(&closing());
    agent.until("the node is tainted", || {
        node.taints()
            .contains(&"interference.crane.io:NoSchedule".to_owned())
            && node.condition()["status"] == "True"
    });
    node.set_rules(&evicting());
    agent.until("the pod is evicted", || {
        node.plane.get("pod", "batch")["metadata"]["deletionTimestamp"].is_string()
    });
    let account = format!("system:serviceaccount:{NAMESPACE}:{AGENT}");
    let sent = leader.requests();
    assert_eq!(sent[0].user, Some((account, NODE.to_owned())), "{sent:?}");
    agent.until("events report it", || {
        let events = node.plane.list("events");
        let has_event = |reason: &str| events.iter().any(|it| it["reason"] == reason);
        has_event("RuleBreached") && has_event("PodThrottled")
    });
    node.plane
        .kubectl(&["delete", "daemonset", &daemon_set, "-n", NAMESPACE]);
    let (succeeded, output) = agent.terminate();
    assert!(succeeded && output.contains("is deleted"), "{output}");
    assert!(!output.contains("forbidden"), "{output}");
    let ours = |taint: &String| taint.starts_with("interference");
    assert!(!node.taints().iter().any(ours));
    assert_eq!(node.condition(), Value::Null);
    assert_eq!(
        crate::agent_support::ready(&node.status()),
        "False AgentEnded"
    );
}

/// A pod with an owner that would replace it.
fn owned_pod() -> Value {
    let mut pod = pod("batch", "batch");
    pod["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "batch", "uid": "u", "controller": true,
    }]);
    pod
}

/// Waits until the admission policies are in force for the agent.
fn until_in_force(plane: &ControlPlane, rights: &[&str]) {
    plane.until("the policies are in force", TIMEOUT, |plane| {
        let more = ["label", "node", NODE, "a=b", "--dry-run=server"];
        let refused = plane.try_kubectl(&[rights, &more].concat(), "");
        refused.is_err_and(|why| why.contains("plimsoll-agent-node"))
    });
}

/// The `DaemonSet` of the agent and its pod on the node.
fn daemon_set(node: &crate::agent_support::Node) -> String {
    let name = "plimsoll-agent-v2";
    let labels = json!({"app": "agent"});
    let containers = json!([{"name": "agent", "image": "none"}]);
    node.plane.create(&[json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": containers}},
        },
    })]);
    let get = [
        "-n",
        NAMESPACE,
        "get",
        "daemonset",
        name,
        "-o",
        "jsonpath={.metadata.uid}",
    ];
    let uid = node.plane.kubectl(&get);
    node.pod(&json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "agent", "namespace": NAMESPACE, "ownerReferences": [{
            "apiVersion": "apps/v1", "kind": "DaemonSet", "name": name, "uid": uid, "controller": true,
        }]},
        "spec": {"nodeName": NODE, "serviceAccountName": AGENT, "containers": containers},
    }));
    name.to_owned()
}
