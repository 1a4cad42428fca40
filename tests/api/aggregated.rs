//! `NodeMetrics` through kubectl and a real API server's aggregation layer.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::api_support::aggregation::{NODE_METRICS, plane};
use crate::api_support::{ControlPlane, Controller, Process, free_port, names};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(1);

fn start(plane: &ControlPlane, name: &str, port: u16) -> Controller {
    let listen = format!("0.0.0.0:{port}");
    plane.controller(
        name,
        &["--metrics-api-listen", &listen, "--pod-ip", "127.0.0.1"],
    )
}

fn until_available(plane: &ControlPlane) {
    plane.until("the API is available", TIMEOUT, |plane| {
        let service = plane.get("apiservice", "v1alpha1.metrics.plimsoll.dev");
        let conditions = service["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions
            .iter()
            .any(|c| c["type"] == "Available" && c["status"] == "True")
    });
    // kubectl needs discovery before anything else.
    plane.until("the API is discovered", TIMEOUT, |plane| {
        plane.get_raw(NODE_METRICS).is_ok() && plane.try_kubectl(&["get", "nm"], "").is_ok()
    });
}

/// Agent status with these rule states.
fn status(states: &[(&str, &str)]) -> Value {
    let rule = |(id, state): &(&str, &str)| json!({"id": id, "state": state, "mark": 80.0});
    json!({
        "agent": {"version": "0.1.0", "bootID": "b"},
        "rules": states.iter().map(rule).collect::<Vec<_>>(),
    })
}

fn words(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[test]
fn kubectl_can_get_explain_describe_page_select_and_watch() {
    let port = free_port();
    let Some(plane) = plane(&[port]) else { return };
    plane.nodes(&names(3));
    let _controller = start(&plane, "controller", port);
    until_available(&plane);
    prints_a_table(&plane);
    prints_objects(&plane);
    shows_heartbeats(&plane);
    explains(&plane);
    refuses(&plane);
    follows(&plane);
    follows_raw(&plane);
}

fn prints_a_table(plane: &ControlPlane) {
    let table = plane.kubectl(&["get", "nodemetrics"]);
    let lines: Vec<&str> = table.lines().collect();
    let header = [
        "NAME", "CPU", "CPU%", "MEMORY", "MEM%", "LOAD", "PRESSURE", "BREACHED", "AGENT", "AGE",
    ];
    assert_eq!(words(lines[0]), header);
    assert_eq!(lines.len(), 4, "{table}");
    let unknown = "<unknown>";
    // Nothing was measured: no value is zero, and no node is missing.
    assert_eq!(
        words(lines[1])[..9],
        [
            "node00", unknown, unknown, unknown, unknown, unknown, unknown, unknown, "NoReport"
        ]
    );
    let wide = plane.kubectl(&["get", "nm", "-o", "wide"]);
    assert!(wide.lines().next().unwrap().contains("REPORTED"), "{wide}");
    let sorted = plane.kubectl(&["get", "nm", "--sort-by=.metadata.name", "--no-headers"]);
    assert_eq!(sorted.lines().count(), 3);
    let paged = plane.kubectl(&["get", "nm", "--chunk-size=1", "-o", "name"]);
    assert_eq!(
        paged,
        "nodemetric.metrics.plimsoll.dev/node00\nnodemetric.metrics.plimsoll.dev/node01\nnodemetric.metrics.plimsoll.dev/node02\n"
    );
    let one = plane.kubectl(&[
        "get",
        "nm",
        "--field-selector=metadata.name=node01",
        "-o",
        "name",
    ]);
    assert_eq!(one, "nodemetric.metrics.plimsoll.dev/node01\n");
    assert_eq!(
        plane
            .kubectl(&["get", "nm", "-l", "pool in (a,b)", "-o", "name"])
            .lines()
            .count(),
        3
    );
    assert_eq!(
        plane.kubectl(&["get", "nm", "-l", "pool!=a", "-o", "name"]),
        ""
    );
    let category = plane.kubectl(&["get", "plimsoll", "-o", "name"]);
    assert!(
        category.contains("nodemetric.metrics.plimsoll.dev/node02"),
        "{category}"
    );
}

fn prints_objects(plane: &ControlPlane) {
    let yaml = plane.kubectl(&["get", "nm", "node00", "-o", "yaml"]);
    assert!(
        yaml.starts_with("apiVersion: metrics.plimsoll.dev/v1alpha1\nkind: NodeMetric\n"),
        "{yaml}"
    );
    let (metric, node) = (plane.get("nm", "node00"), plane.get("node", "node00"));
    assert_eq!(
        metric["metadata"]["creationTimestamp"],
        node["metadata"]["creationTimestamp"]
    );
    assert_eq!(metric["metadata"]["labels"], json!({"pool": "a"}));
    assert_ne!(metric["metadata"]["uid"], node["metadata"]["uid"]);
    assert_eq!(
        metric["status"]["capacity"],
        json!({"cpu": "8", "memory": "16777216Ki"})
    );
    assert!(metric["status"]["usage"].is_null());
    let path = "jsonpath={.items[*].status.conditions[?(@.type==\"Healthy\")].reason}";
    assert_eq!(
        plane.kubectl(&["get", "nm", "-o", path]),
        "NoReport NoReport NoReport"
    );
    let described = plane.kubectl(&["describe", "nm", "node00"]);
    assert!(
        described.contains("Reason:                NoReport"),
        "{described}"
    );
    plane.kubectl(&[
        "wait",
        "--for=jsonpath={.status.capacity.cpu}=8",
        "nm/node00",
        "--timeout=5s",
    ]);
    plane.kubectl(&[
        "wait",
        "--for=condition=Healthy=Unknown",
        "nm",
        "--all",
        "--timeout=5s",
    ]);
    let raw = plane.kubectl(&[
        "get",
        "--raw",
        "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics?limit=2",
    ]);
    let raw: Value = serde_json::from_str(&raw).unwrap();
    assert_eq!(raw["kind"], "NodeMetricList");
    assert_eq!(raw["items"].as_array().unwrap().len(), 2);
    assert_eq!(raw["metadata"]["remainingItemCount"], 1);
}

fn shows_heartbeats(plane: &ControlPlane) {
    plane.apply(&[
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "plimsoll-node-lease"}}),
        json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {
                "name": "node00", "namespace": "plimsoll-node-lease",
                "annotations": {"plimsoll.dev/summary": "seq=1 cpu=73.4 mem=25.0"},
            },
            "spec": {
                "holderIdentity": "node00", "leaseDurationSeconds": 1,
                "renewTime": "2026-01-02T03:04:05.000000Z",
            },
        }),
    ]);
    plane.kubectl(&[
        "wait",
        "--for=condition=Healthy",
        "nm/node00",
        "--timeout=60s",
    ]);
    let row = || plane.kubectl(&["get", "nm", "node00", "--no-headers"]);
    assert_eq!(
        words(&row())[..9],
        [
            "node00",
            "5872m",
            "73%",
            "4096Mi",
            "25%",
            "<unknown>",
            "<unknown>",
            "<unknown>",
            "Healthy"
        ]
    );
    assert_eq!(
        plane.get("nm", "node00")["status"]["timestamp"],
        "2026-01-02T03:04:05Z"
    );
    // Renewals stop: the figures stay, and the status says so.
    plane.kubectl(&[
        "wait",
        "--for=condition=Healthy=False",
        "nm/node00",
        "--timeout=60s",
    ]);
    let unresponsive = row();
    assert_eq!(
        (words(&unresponsive)[2], words(&unresponsive)[8]),
        ("73%", "AgentUnresponsive")
    );
}

fn explains(plane: &ControlPlane) {
    let resources = plane.kubectl(&[
        "api-resources",
        "--api-group=metrics.plimsoll.dev",
        "-o",
        "wide",
    ]);
    let line = resources.lines().nth(1).unwrap();
    let wanted = [
        "nodemetrics",
        "nm",
        "metrics.plimsoll.dev/v1alpha1",
        "false",
        "NodeMetric",
        "get,list,watch",
        "plimsoll",
    ];
    assert_eq!(words(line), wanted);
    let explained = plane.kubectl(&["explain", "nm.status.windows.cpu.last5m.p99"]);
    assert!(explained.contains("99th percentile"), "{explained}");
    let metadata = plane.kubectl(&["explain", "nodemetrics.metadata.labels"]);
    assert!(metadata.contains("FIELD: labels"), "{metadata}");
    let old = plane.kubectl(&["get", "--raw", "/openapi/v2"]);
    let old: Value = serde_json::from_str(&old).unwrap();
    let definition = &old["definitions"]["dev.plimsoll.metrics.v1alpha1.NodeMetric"];
    assert_eq!(
        definition["x-kubernetes-group-version-kind"][0]["kind"],
        "NodeMetric"
    );
}

fn refuses(plane: &ControlPlane) {
    let refused = |args: &[&str]| plane.try_kubectl(args, "").unwrap_err();
    let missing = refused(&["get", "nm", "nobody"]);
    assert_eq!(
        missing.trim(),
        "Error from server (NotFound): nodemetrics.metrics.plimsoll.dev \"nobody\" not found"
    );
    let field = refused(&["get", "nm", "--field-selector=status.pods=3"]);
    assert!(
        field.contains("field label not supported: status.pods; only metadata.name is"),
        "{field}"
    );
    let delete = refused(&["delete", "nm", "node00"]);
    assert!(
        delete.contains("the server does not allow this method")
            || delete.contains("only get, list and watch"),
        "{delete}"
    );
    let forbidden = refused(&["get", "nm", "--as", "ann"]);
    assert!(
        forbidden.contains("User \"ann\" cannot list resource \"nodemetrics\""),
        "{forbidden}"
    );
}

/// A kubectl that prints lines as they arrive.
fn printing(plane: &ControlPlane, args: &[&str]) -> (Process, mpsc::Receiver<String>) {
    let mut child = Command::new(plane.tool("kubectl"))
        .arg("--kubeconfig")
        .arg(&plane.kubeconfig)
        .args(args)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap()).lines();
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        output
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    (Process(child), lines)
}

fn line(lines: &mpsc::Receiver<String>, condition: impl Fn(&str) -> bool) -> String {
    loop {
        let line = lines.recv_timeout(TIMEOUT).expect("kubectl prints a line");
        if condition(&line) {
            return line;
        }
    }
}

fn follows(plane: &ControlPlane) {
    let (_kubectl, lines) = printing(plane, &["get", "nm", "--watch"]);
    line(&lines, |line| line.starts_with("node02"));
    plane.until("the node has a watermark", TIMEOUT, |plane| {
        !plane.get("nwm", "node01").is_null()
    });
    plane.report(
        "node01",
        &status(&[
            ("q/cpu", "Breached"),
            ("q/mem", "Cooling"),
            ("q/io", "Normal"),
        ]),
    );
    let changed = line(&lines, |line| line.starts_with("node01"));
    assert_eq!(words(&changed)[7..9], ["1", "NoReport"]);
    let metric = plane.get("nm", "node01");
    assert_eq!(
        metric["status"]["rules"],
        json!({"total": 3, "breached": 1, "cooling": 1, "unknown": 0})
    );
    assert_eq!(metric["status"]["breached"], json!(["q/cpu"]));
    let (mut waiting, _) = printing(
        plane,
        &["wait", "--for=delete", "nm/node02", "--timeout=30s"],
    );
    plane.kubectl(&["delete", "node", "node02"]);
    assert!(waiting.0.wait().unwrap().success());
    plane.until("it is not listed", TIMEOUT, |plane| {
        plane.list("nm").len() == 2
    });
    plane.nodes(&["node03".to_owned()]);
    line(&lines, |line| line.starts_with("node03"));
}

fn follows_raw(plane: &ControlPlane) {
    // Like informers since 1.35: initial objects, a bookmark, then events.
    let query = "watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let path = format!("/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics?{query}");
    let (_kubectl, lines) = printing(plane, &["get", "--raw", &path]);
    let event =
        || -> Value { serde_json::from_str(&lines.recv_timeout(TIMEOUT).unwrap()).unwrap() };
    for name in ["node00", "node01", "node03"] {
        let event = event();
        assert_eq!(
            (&event["type"], &event["object"]["metadata"]["name"]),
            (&json!("ADDED"), &json!(name))
        );
    }
    let bookmark = event();
    assert_eq!(bookmark["type"], "BOOKMARK");
    assert_eq!(bookmark["object"]["kind"], "NodeMetric");
    assert_eq!(
        bookmark["object"]["metadata"]["annotations"]["k8s.io/initial-events-end"],
        "true"
    );
    let version = bookmark["object"]["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .to_owned();
    plane.kubectl(&["label", "node", "node00", "pool=b", "--overwrite"]);
    let event = event();
    assert_eq!(event["type"], "MODIFIED");
    assert_eq!(event["object"]["metadata"]["labels"]["pool"], "b");
    let next: u64 = event["object"]["metadata"]["resourceVersion"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(next, version.parse::<u64>().unwrap() + 1);
    // Versions too old or in the future are an error within the stream: client libraries list again only then.
    for version in ["17", "99999999999999999"] {
        let path = format!(
            "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics?watch=1&resourceVersion={version}"
        );
        let text = plane.kubectl(&["get", "--raw", &path]);
        let event: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(event["type"], "ERROR");
        assert_eq!(event["object"]["kind"], "Status");
        assert_eq!(event["object"]["code"], 410);
    }
}

fn is_ready(controller: &Controller) -> bool {
    let answer = controller.http("/readyz");
    answer.is_some_and(|(code, _)| code == 200)
}

#[test]
fn a_failover_is_a_pause_and_versions_never_go_back() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports) else { return };
    plane.nodes(&names(2));
    let kubeconfig = plane.install_chart();
    let controllers = [("first", ports[0]), ("second", ports[1])];
    let mut controllers = controllers.map(|(name, port)| {
        let listen = format!("0.0.0.0:{port}");
        let args = ["--metrics-api-listen", &listen, "--pod-ip", "127.0.0.1"];
        plane.controller_by(&kubeconfig, name, &args)
    });
    until_available(&plane);
    let versions = || -> Option<u64> {
        let text = plane.get_raw(NODE_METRICS).ok()?;
        let list: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            list["items"].as_array().unwrap().len(),
            2,
            "no node is missing at any time"
        );
        list["metadata"]["resourceVersion"]
            .as_str()
            .unwrap()
            .parse()
            .ok()
    };
    // An API server serves a new CRD a moment after it lists it: a standby that is not ready takes over late.
    plane.until("a replica leads and both are ready", TIMEOUT, |_| {
        controllers.iter().any(Controller::leads) && controllers.iter().all(is_ready)
    });
    // Both replicas must answer, the standby by forwarding: each request picks a replica at random.
    plane.until("both replicas answer", TIMEOUT, |_| {
        (0..12).all(|_| versions().is_some())
    });
    let before = versions().unwrap();
    let leader = controllers.iter().position(Controller::leads).unwrap();
    controllers[leader].process.0.kill().unwrap();
    controllers[leader].process.0.wait().unwrap();
    let after = Cell::new(None);
    let paused = plane.until("the other one answers", Duration::from_secs(30), |_| {
        after.set(versions());
        after.get().is_some()
    });
    assert!(after.get() > Some(before), "{after:?} after {before}");
    assert!(paused < Duration::from_secs(12), "{paused:?}");
    for name in ["first", "second"] {
        let log = plane.log_of(name);
        assert!(
            !log.to_lowercase().contains("forbidden"),
            "{name} lacks a right:\n{log}"
        );
    }
    eprintln!("a client was paused by the failover for {paused:?}");
}
