//! `plimsoll doctor` against a real API server with what the chart installs.

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::api_support::aggregation::address;
use crate::api_support::{ControlPlane, free_port};
use crate::chart_support::{NAMESPACE, objects, rendered};
use serde_json::{Value, json};

/// How long the API server may take, even on a busy machine.
const TIMEOUT: Duration = Duration::from_mins(4);

/// Exit code, and the findings as (about, what).
fn doctor(kubeconfig: &Path) -> (Option<i32>, Vec<(String, String)>) {
    run(kubeconfig, "findings")
}

fn run(kubeconfig: &Path, which: &str) -> (Option<i32>, Vec<(String, String)>) {
    let (code, json) = printed(kubeconfig);
    let word = |it: &Value, field: &str| it[field].as_str().unwrap().to_owned();
    let found = json[which].as_array().unwrap().iter();
    let found = found.map(|it| (word(it, "about"), word(it, "what")));
    (code, found.collect())
}

/// Exit code, and what is printed.
fn printed(kubeconfig: &Path) -> (Option<i32>, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    let output = command
        .args(["doctor", "-o", "json", "--kubeconfig"])
        .arg(kubeconfig)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let json: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {text}"));
    (output.status.code(), json)
}

fn has(found: &[(String, String)], about: &str, what: &str) -> bool {
    found
        .iter()
        .any(|it| it.0.starts_with(about) && it.1.contains(what))
}

#[test]
fn problems_of_an_installation_are_found() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    nothing_is_installed(&plane);
    installed(&plane);
    no_pod_has_started(&plane);
    pods_could_not_be_created(&plane);
    an_agent_reports_problems(&plane);
    agents_cannot_request_evictions(&plane);
    no_scheduler_has_asked(&plane);
    admission_policies_are_not_in_force(&plane);
    the_agents_role_is_gone(&plane);
    stopped_and_without_rights(&plane);
    by_other_users(&plane);
    definitions_are_waited_for(&plane);
}

#[test]
fn disabled_admission_policies_are_reported() {
    let disabled = &["--disable-admission-plugins=ValidatingAdmissionPolicy"];
    let Some(plane) = ControlPlane::start_with(disabled).filter(ControlPlane::is_own) else {
        return;
    };
    installed(&plane);
    let all = "installed, but reject nothing: plimsoll-agent-lease, plimsoll-agent-event, plimsoll-agent-node, plimsoll-agent-watermark, \
               plimsoll-controller-node and 2 more;";
    plane.until("the policies reject nothing", TIMEOUT, |plane| {
        let (_, found) = doctor(&plane.kubeconfig);
        has(&found, "admission policies", all)
    });
    // The tests changed nothing.
    assert_eq!(plane.get("node", "a")["metadata"]["labels"]["pool"], "a");
    for (what, name) in [
        ("node", "a"),
        ("apiservice", "v1alpha1.metrics.plimsoll.dev"),
    ] {
        let labels = &plane.get(what, name)["metadata"]["labels"];
        assert!(labels["plimsoll.dev/doctor"].is_null(), "{what}: {labels}");
    }
    for what in ["leases", "events"] {
        let left = plane.kubectl(&["get", what, "--all-namespaces", "-o", "name"]);
        assert!(!left.contains("plimsoll-doctor"), "{left}");
    }
}

#[test]
fn disabled_aggregation_is_reported_and_the_controller_works() {
    let off = &[
        "--requestheader-client-ca-file=",
        "--proxy-client-cert-file=",
        "--proxy-client-key-file=",
    ];
    let Some(plane) = ControlPlane::start_with(off).filter(ControlPlane::is_own) else {
        return;
    };
    installed(&plane);
    let reported = |plane: &ControlPlane| {
        let (_, found) = doctor(&plane.kubeconfig);
        has(
            &found,
            "API aggregation",
            "no --requestheader-client-ca-file",
        )
    };
    plane.until("it is reported", TIMEOUT, reported);
    plane.apply(&[crate::api_support::lease_namespace()]);
    let listen = format!("127.0.0.1:{}", free_port());
    let mut controller = plane.controller("controller", &["--metrics-api-listen", &listen]);
    plane.until("it is ready", TIMEOUT, |_| {
        let ready = controller.http("/readyz");
        ready.is_some_and(|(code, _)| code == 200)
    });
    plane.nodes(&["b".to_owned()]);
    plane.until("it compiles for a node", TIMEOUT, |plane| {
        !plane.get("nwm", "b").is_null()
    });
    let log = plane.log_of("controller");
    assert!(
        log.contains("start kube-apiserver with --requestheader-client-ca-file"),
        "{log}"
    );
    assert!(controller.process.0.try_wait().unwrap().is_none());
}

/// Installs the chart's objects, without running pods, and a node of every kind.
fn installed(plane: &ControlPlane) {
    let labelled = [
        ("mainframe", "kubernetes.io/arch=s390x"),
        ("windows", "kubernetes.io/os=windows"),
        ("virtual", "type=virtual-kubelet"),
        ("fargate", "eks.amazonaws.com/compute-type=fargate"),
    ];
    plane.nodes(&["a".to_owned()]);
    plane.nodes(&labelled.map(|(node, _)| node.to_owned()));
    for (node, label) in labelled {
        plane.kubectl(&["label", "node", node, label]);
    }
    let namespace = |name: &str, level: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": {"pod-security.kubernetes.io/enforce": level}}});
    plane.apply(&[namespace("plimsoll", "baseline")]);
    let chart = rendered(&plane.tool("helm"), NAMESPACE);
    let (first, rest): (Vec<Value>, Vec<Value>) = objects(&chart)
        .into_iter()
        .map(|(object, _)| object)
        .filter(|it| it["kind"] != "CustomResourceDefinition")
        .partition(|it| it["kind"] == "Namespace");
    plane.apply(&first);
    plane.apply(&rest);
    // Helm creates it by a hook.
    plane.kubectl(&[
        "create",
        "configmap",
        "plimsoll-stop",
        "-n",
        "plimsoll-node-lease",
    ]);
    plane.apply(&[json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": "a"},
        "spec": {"nodeUID": "u", "hash": "0123456789abcdef"},
    })]);
}

fn definitions_are_waited_for(plane: &ControlPlane) {
    let wait = |plane: &ControlPlane, timeout: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command.env("KUBECONFIG", &plane.kubeconfig);
        command
            .args(["crds", "--wait", "--timeout", timeout])
            .output()
            .unwrap()
    };
    let output = wait(plane, "4m");
    assert!(
        output.status.success() && output.stdout.is_empty(),
        "{output:?}"
    );
    plane.kubectl(&["delete", "crd", "podqoss.ensurance.crane.io"]);
    plane.until("one is no longer served", TIMEOUT, |plane| {
        let output = wait(plane, "1ms");
        let log = String::from_utf8_lossy(&output.stderr);
        let missing = "failed to find podqoss.ensurance.crane.io within 1ms";
        output.status.code() == Some(2) && log.contains(missing)
    });
}

fn finds(found: &[(String, String)], about: &str, what: &str) {
    assert!(has(found, about, what), "{about}: {what}: {found:?}");
}

fn nothing_is_installed(plane: &ControlPlane) {
    // API servers publish the schema of a definition a while after they serve it.
    let published = |plane: &ControlPlane| {
        let (_, found) = doctor(&plane.kubeconfig);
        !found.iter().any(|it| it.0.starts_with("definition"))
    };
    plane.until("the schemas are published", TIMEOUT, published);
    let (code, found) = doctor(&plane.kubeconfig);
    assert_eq!(code, Some(1));
    finds(&found, "controller", "there is none");
    finds(&found, "agents", "no DaemonSet");
}

/// No controller-manager runs that would create pods.
fn no_pod_has_started(plane: &ControlPlane) {
    let unwanted = [
        "permissions",
        "definition",
        "installations",
        "ConfigMap",
        "plimsoll doctor",
        "API aggregation",
        "admission policies",
        "evictions",
    ];
    let is_unwanted = |it: &(String, String)| unwanted.iter().any(|about| it.0.starts_with(about));
    // New roles take effect after a moment.
    plane.until("nothing else is found", TIMEOUT, |plane| {
        let (_, found) = doctor(&plane.kubeconfig);
        !found.iter().any(is_unwanted)
    });
    let (code, found) = doctor(&plane.kubeconfig);
    assert_eq!(code, Some(1));
    let controller = "Deployment plimsoll/plimsoll-controller";
    finds(&found, controller, "0 of 2 replicas");
    let agents = "DaemonSet plimsoll/plimsoll-agent-v2";
    finds(&found, agents, "selects no node");
    finds(&found, "agents", "none runs on 1 node: a");
    assert!(
        !has(&found, "agents", "mainframe"),
        "the image does not fit: {found:?}"
    );
    finds(&found, "namespace plimsoll", "is baseline");
}

/// As in a cluster with another default Pod Security standard.
fn pods_could_not_be_created(plane: &ControlPlane) {
    let label = "pod-security.kubernetes.io/enforce-";
    plane.kubectl(&["label", "namespace", NAMESPACE, label]);
    let why = "pods \"x\" is forbidden: violates PodSecurity \"baseline:latest\"";
    let event = |name: &str, reason: &str, message: &str| {
        json!({
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": name, "namespace": NAMESPACE}, "reason": reason, "message": message,
            "type": "Warning", "lastTimestamp": "2026-01-01T00:00:00Z",
            "involvedObject": {"apiVersion": "apps/v1", "kind": "DaemonSet", "namespace": NAMESPACE, "name": "plimsoll-agent-v2"},
        })
    };
    plane.create(&[
        event("one", "FailedCreate", why),
        event("other", "SuccessfulDelete", "another"),
    ]);
    let status = json!({"status": {"currentNumberScheduled": 0, "desiredNumberScheduled": 1, "numberMisscheduled": 0, "numberReady": 0}});
    let patch = format!("--patch={status}");
    let set = "plimsoll-agent-v2";
    let merge = ["--subresource=status", "--type=merge", &patch];
    plane.kubectl(&[&["patch", "daemonset", "-n", NAMESPACE, set][..], &merge].concat());
    let (_, found) = doctor(&plane.kubeconfig);
    let what = format!("1 pod of 1 could not be created: {why}");
    finds(&found, "DaemonSet plimsoll/plimsoll-agent-v2", &what);
    let twice = has(&found, "agents", "none runs on 1 node: a");
    assert!(!twice, "{found:?}");
}

/// By the columns that a real API server prints.
fn an_agent_reports_problems(plane: &ControlPlane) {
    let condition = |kind: &str, status: &str, reason: &str| {
        json!({
            "type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    let rule = |id: &str| json!({"id": id, "state": "Normal", "mark": 80});
    let mut unknown = rule("q/probe");
    unknown["unknown"] = "no sample".into();
    let status = |degraded: Value, rules: Value| {
        let conditions = json!([condition("Ready", "True", "RulesEnforced"), degraded]);
        let status = json!({"status": {"conditions": conditions, "rules": rules}});
        let patch = format!("--patch={status}");
        let merge = ["--subresource=status", "--type=merge", &patch];
        plane.kubectl(&[&["patch", "nodewatermark", "a"][..], &merge].concat());
        doctor(&plane.kubeconfig).1
    };
    let failing = condition("Degraded", "True", "NodeNotUpdated");
    let found = status(failing, json!([rule("q/cpu"), unknown]));
    finds(
        &found,
        "agents",
        "NodeNotUpdated: some actions fail on 1 node: a",
    );
    finds(
        &found,
        "agents",
        "q/probe: this rule can't be evaluated on 1 node: a",
    );
    let healthy = condition("Degraded", "False", "AllInOrder");
    let found = status(healthy, json!([rule("q/cpu")]));
    assert!(
        !has(&found, "agents", "NodeNotUpdated") && !has(&found, "agents", "evaluated"),
        "{found:?}"
    );
}

/// Replaces the arguments of a workload's container.
fn replace_arguments(plane: &ControlPlane, workload: &str, arguments: &Value) {
    let args = "/spec/template/spec/containers/0/args";
    let patch = json!([{"op": "replace", "path": args, "value": arguments}]).to_string();
    let patch = ["--type=json", "-p", &patch];
    plane.kubectl(&[&["patch", "-n", NAMESPACE, workload][..], &patch].concat());
}

fn agents_cannot_request_evictions(plane: &ControlPlane) {
    let alone = "only through the API server";
    for (workload, argument, effect) in [
        (
            "deployment/plimsoll-controller",
            "--report-listen=",
            "no pod is evicted",
        ),
        ("daemonset/plimsoll-agent-v2", "--report-service=", alone),
    ] {
        let path = "jsonpath={.spec.template.spec.containers[0].args}";
        let before = plane.kubectl(&["get", "-n", NAMESPACE, workload, "-o", path]);
        let before: Value = serde_json::from_str(&before).unwrap();
        let (without, with): (Vec<Value>, Vec<Value>) = before
            .as_array()
            .unwrap()
            .iter()
            .cloned()
            .partition(|it| !it.as_str().unwrap().starts_with(argument));
        assert_eq!(with.len(), 1, "{workload}: {before}");
        replace_arguments(plane, workload, &without.into());
        let (_, found) = doctor(&plane.kubeconfig);
        let what = argument.trim_end_matches('=');
        finds(&found, "evictions", what);
        finds(&found, "evictions", effect);
        replace_arguments(plane, workload, &before);
    }
    let (_, found) = doctor(&plane.kubeconfig);
    assert!(!has(&found, "evictions", ""), "{found:?}");
}

/// Serves these metrics on all addresses of this machine.
fn metrics(text: &'static str) -> u16 {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            drop(stream.read(&mut [0; 4096]));
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", text.len());
            drop(stream.write_all((head + text).as_bytes()));
        }
    });
    port
}

fn no_scheduler_has_asked(plane: &ControlPlane) {
    let Some(address) = address().filter(|_| plane.is_own()) else {
        return;
    };
    let workload = "deployment/plimsoll-controller";
    let args_of = "jsonpath={.spec.template.spec.containers[0].args}";
    let before = plane.kubectl(&["get", "-n", NAMESPACE, workload, "-o", args_of]);
    let before: Value = serde_json::from_str(&before).unwrap();
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "replica", "namespace": NAMESPACE, "labels": {
            "app.kubernetes.io/name": "plimsoll", "app.kubernetes.io/component": "controller",
        }},
        "spec": {"nodeName": "a", "containers": [{"name": "main", "image": "none"}]},
    });
    plane.apply(&[pod]);
    let status =
        json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}})
            .to_string();
    let patch = [
        "patch",
        "pod",
        "replica",
        "--subresource=status",
        "-p",
        &status,
    ];
    plane.kubectl(&[&patch[..], &["-n", NAMESPACE]].concat());
    let notes = |metrics_of_replica: &'static str| {
        let port = metrics(metrics_of_replica);
        let of_others = |it: &&Value| !it.as_str().unwrap().starts_with("--listen=");
        let all = before.as_array().unwrap().iter().filter(of_others).cloned();
        let own = [
            format!("--listen=[::]:{port}"),
            "--scheduler-listen=[::]:8094".to_owned(),
        ];
        let arguments: Vec<Value> = all.chain(own.map(Value::from)).collect();
        replace_arguments(plane, workload, &arguments.into());
        run(&plane.kubeconfig, "notes").1
    };
    let quiet = notes("plimsoll_controller_scheduler_filter_suspended 0\n");
    finds(&quiet, "scheduler API", "none has asked");
    let asked =
        notes("plimsoll_controller_scheduler_answers_total{page=\"prioritize\",code=\"200\"} 3\n");
    assert!(!has(&asked, "scheduler API", ""), "{asked:?}");
    replace_arguments(plane, workload, &before);
    plane.kubectl(&["delete", "pod", "replica", "-n", NAMESPACE, "--force"]);
}

fn admission_policies_are_not_in_force(plane: &ControlPlane) {
    // Two policies that match no request.
    let never = r#"{"spec":{"matchConditions":[{"name":"never","expression":"false"}]}}"#;
    for policy in ["plimsoll-controller-api", "plimsoll-controller-eviction"] {
        let policy = ["validatingadmissionpolicy", policy];
        plane.kubectl(&[&["patch", "--type=merge", "-p", never][..], &policy].concat());
    }
    plane.until("they reject nothing", TIMEOUT, |plane| {
        let (_, found) = doctor(&plane.kubeconfig);
        let through =
            "installed, but reject nothing: plimsoll-controller-api, plimsoll-controller-eviction;";
        has(&found, "admission policies", through)
    });
    for (kind, name) in [
        ("validatingadmissionpolicybinding", "plimsoll-agent-lease"),
        ("validatingadmissionpolicy", "plimsoll-controller-token"),
        ("flowschema", "plimsoll-agent-leases"),
    ] {
        plane.kubectl(&["delete", kind, name]);
    }
    let (_, found) = doctor(&plane.kubeconfig);
    let bound = "not in force: plimsoll-agent-lease, plimsoll-controller-token;";
    finds(&found, "admission policies", bound);
    finds(&found, "flow control", ": plimsoll-agent-leases;");
}

/// The role in its own namespace: an agent that may not get its `DaemonSet` restores everything whenever it stops.
fn the_agents_role_is_gone(plane: &ControlPlane) {
    plane.kubectl(&["delete", "rolebinding", "plimsoll-agent", "-n", NAMESPACE]);
    plane.until("the change takes effect", TIMEOUT, |plane| {
        let (_, found) = doctor(&plane.kubeconfig);
        let may_not = "system:serviceaccount:plimsoll:plimsoll-agent may not";
        let sets = format!("{may_not} get daemonsets.apps in plimsoll");
        let replicas = format!("{may_not} list, watch endpointslices.discovery.k8s.io in plimsoll");
        let about = "permissions of agents";
        has(&found, about, &sets) && has(&found, about, &replicas)
    });
}

fn stopped_and_without_rights(plane: &ControlPlane) {
    plane.kubectl(&["delete", "clusterrolebinding", "plimsoll-agent"]);
    let stop = [
        "annotate",
        "configmap",
        "plimsoll-stop",
        "plimsoll.dev/stop=why",
    ];
    plane.kubectl(&[&["-n", "plimsoll-node-lease"][..], &stop].concat());
    plane.until("the change takes effect", TIMEOUT, |plane| {
        let (_, found) = doctor(&plane.kubeconfig);
        let agent = "system:serviceaccount:plimsoll:plimsoll-agent may not patch nodes/status";
        let object = "ConfigMap plimsoll-node-lease/plimsoll-stop";
        has(&found, "permissions of agents", agent) && has(&found, object, "stopped: why")
    });
}

fn by_other_users(plane: &ControlPlane) {
    let config = std::fs::read_to_string(&plane.kubeconfig).unwrap();
    let ann = config.replace(r#""token":"admin""#, r#""token":"ann""#);
    let ann = plane.file("ann", &ann);
    // A user who may read little.
    let (code, found) = doctor(&ann);
    assert_eq!(code, Some(1));
    finds(&found, "plimsoll doctor", "nodes could not be read");
    what_it_prints_is_enough(plane, &ann);
    // A user who may read everything, and nothing else.
    let all = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list"]}]);
    let kind = |kind: &str| json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind, "metadata": {"name": "reader"}});
    let (mut role, mut binding) = (kind("ClusterRole"), kind("ClusterRoleBinding"));
    role["rules"] = all;
    binding["roleRef"] =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "reader"});
    binding["subjects"] =
        json!([{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}]);
    plane.apply(&[role, binding]);
    plane.until("she may read all", TIMEOUT, |_| {
        let found = run(&ann, "notes").1;
        // The exact words differ between versions.
        let untested = |(about, what): &(String, String)| {
            about.starts_with("plimsoll doctor")
                && what.contains("could not be tested: ")
                && what.contains("User \"ann\" cannot impersonate")
        };
        found.iter().any(untested)
    });
}

/// An administrator applies the roles that it prints, until it prints none.
fn what_it_prints_is_enough(plane: &ControlPlane, kubeconfig: &Path) {
    let roles = || printed(kubeconfig).1["roles"].as_array().unwrap().clone();
    let mut missing = roles();
    assert!(!missing.is_empty());
    for _ in 0..4 {
        plane.apply(&missing);
        let before = missing;
        plane.until("the roles take effect", TIMEOUT, |_| roles() != before);
        missing = roles();
        if missing.is_empty() {
            let (_, found) = doctor(kubeconfig);
            let is_refused = |(_, what): &(String, String)| what.contains("User \"ann\" cannot");
            assert!(!found.iter().any(is_refused), "{found:?}");
            return;
        }
    }
    panic!("still missing: {missing:?}");
}
