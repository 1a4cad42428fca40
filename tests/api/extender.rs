//! The scheduler extender over HTTP: a real controller, to which agents report.

use std::cell::Cell;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api_support::reporter::{Reporter, account, report, token, trust};
use crate::api_support::{ControlPlane, Controller, free_port, lease_namespace};

const TIMEOUT: Duration = Duration::from_mins(1);

const POLICY: &str = "apiVersion: scheduler.policy.crane.io/v1alpha1\nkind: DynamicSchedulerPolicy\nspec:\n  predicate:\n  - name: \
                      cpu_usage_avg_5m\n    maxLimitPecent: 0.65\n  priority:\n  - name: cpu_usage_avg_5m\n    weight: 0.2\n";

/// Sends a request with this text as body, and returns code and body of the answer.
fn post(port: u16, verb: &str, body: &str) -> (u16, String) {
    send(port, verb, body.len(), body)
}

/// The same, with a Content-Length of its own.
fn send(port: u16, verb: &str, length: usize, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = format!(
        "POST /extender/{verb} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // It may answer, and disconnect, before the end.
    drop(stream.write_all(body.as_bytes()));
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let code = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    (code, body.to_owned())
}

fn args(names: &[&str]) -> String {
    let requests = json!({"requests": {"cpu": "100m", "memory": "64Mi"}});
    let spec = json!({"containers": [{"name": "c", "resources": requests}]});
    let pod =
        json!({"metadata": {"name": "web-0", "namespace": "shop", "uid": "uid-0"}, "spec": spec});
    json!({"Pod": pod, "Nodes": null, "NodeNames": names}).to_string()
}

/// The points of these nodes.
fn points(port: u16, names: &[&str]) -> Vec<u64> {
    let (code, body) = post(port, "prioritize", &args(names));
    assert_eq!(code, 200, "{body}");
    let answer: Vec<Value> = serde_json::from_str(&body).unwrap();
    let hosts: Vec<&str> = answer
        .iter()
        .map(|it| it["Host"].as_str().unwrap())
        .collect();
    assert_eq!(hosts, names);
    answer
        .iter()
        .map(|it| it["Score"].as_u64().unwrap())
        .collect()
}

/// A controller that serves the extender at the first port and accepts reports at the second.
fn served(ports: [u16; 2], more: &[&str]) -> Option<(ControlPlane, Controller)> {
    let plane = ControlPlane::start()?;
    plane.nodes(&["cool", "hot", "bare", "warm"].map(str::to_owned));
    account(&plane);
    plane.apply(&[lease_namespace()]);
    let [extender, reports] = ports.map(|port| format!("127.0.0.1:{port}"));
    let mut args = vec!["--pod-ip", "127.0.0.1", "--report-listen", &reports];
    args.extend(["--scheduler-listen", &extender]);
    args.extend(more);
    let controller = plane.controller("controller", &args);
    plane.until("it listens", TIMEOUT, |_| {
        TcpStream::connect(("127.0.0.1", ports[0])).is_ok()
    });
    Some((plane, controller))
}

/// Reports these loads until the extender knows them.
fn report_loads(
    plane: &ControlPlane,
    controller: &Controller,
    ports: [u16; 2],
    loads: &[(&str, f64)],
) {
    let trust = trust(plane);
    let agents: Vec<_> = loads
        .iter()
        .map(|(node, load)| {
            (
                Reporter::new(&trust, ports[1]),
                token(plane, node),
                *node,
                *load,
            )
        })
        .collect();
    let sequence = Cell::new(0);
    let names: Vec<&str> = loads.iter().map(|(node, _)| *node).collect();
    plane.until("the extender knows the loads", TIMEOUT, |_| {
        sequence.set(sequence.get() + 1);
        for (agent, token, node, load) in &agents {
            let mut report = report(node, sequence.get(), 1000);
            let resource = |percent: f64| {
                json!({"percent": percent, "expected": percent * 0.8, "newcomers": 0.0, "line": 80.0})
            };
            report["status"]["load"] =
                json!({"percent": load, "worst": "cpu", "cpu": resource(*load), "memory": resource(10.0)});
            report["status"]["windows"]["cpu"]["last5m"]["avg"] = json!(load * 0.8);
            agent.report(token, &report);
        }
        points(ports[0], &names);
        controller.metric("plimsoll_controller_scheduler_unknown_nodes ") < 0.5
    });
}

#[test]
fn nodes_are_scored_and_filtered_by_their_reports() {
    let ports = [free_port(), free_port()];
    let Some((plane, controller)) = served(ports, &[]) else {
        return;
    };
    // Before any report, all are alike.
    let before = points(ports[0], &["cool", "hot", "unknown"]);
    assert_eq!([before[0]; 3], before[..]);
    report_loads(
        &plane,
        &controller,
        ports,
        &[("cool", 20.0), ("warm", 60.0), ("hot", 120.0)],
    );
    let found = points(ports[0], &["cool", "warm", "hot", "bare", "unknown"]);
    assert!(found[0] > found[1] && found[1] > found[2], "{found:?}");
    assert_eq!(
        (found[2], found[3], found[4]),
        (0, found[1], found[1]),
        "{found:?}"
    );
    let names = ["cool", "warm", "hot", "bare"];
    let (code, body) = post(ports[0], "filter", &args(&names));
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (code, &answer["NodeNames"]),
        (200, &json!(["cool", "warm", "bare"]))
    );
    let reason = &answer["FailedAndUnresolvableNodes"]["hot"];
    assert_eq!(reason, "its load with the pod would reach its load line");
    // Half of these are unknown: no node is rejected, and the log says so once.
    for _ in 0..3 {
        let unknown = args(&["cool", "hot", "bare", "unknown"]);
        let (_, body) = post(ports[0], "filter", &unknown);
        let answer: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(answer["NodeNames"].as_array().unwrap().len(), 4);
    }
    let log = plane.log_of("controller");
    let said = log.matches("the extender's filter rejects no node").count();
    assert_eq!(said, 1, "{log}");
    let suspended = "plimsoll_controller_scheduler_filter_suspended ";
    assert!(controller.metric(suspended) > 0.5);
    bad_requests(ports[0], &controller);
}

fn bad_requests(port: u16, controller: &Controller) {
    for garbage in ["", "{}", "[", "{\"Pod\": 7}", "\u{0}"] {
        for verb in ["prioritize", "filter"] {
            let (code, body) = post(port, verb, garbage);
            assert_eq!(code, 400, "{body}");
            assert!(body.starts_with("the body is no ExtenderArgs"), "{body}");
        }
    }
    // 20 MB, announced and sent without a length.
    let (code, body) = send(port, "prioritize", 20 << 20, "{\"Pod\": {");
    assert_eq!(code, 413);
    assert!(body.contains("set nodeCacheCapable: true"), "{body}");
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let head = "POST /extender/filter HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let chunk = format!("100000\r\n{}\r\n", " ".repeat(1 << 20));
    let sent = (0..20).take_while(|_| stream.write_all(chunk.as_bytes()).is_ok());
    assert!(sent.count() <= 20);
    let mut start = [0; 12];
    if stream.read_exact(&mut start).is_ok() {
        assert_eq!(&start, b"HTTP/1.1 413");
    }
    let (code, _) = post(port, "bind", "{}");
    assert_eq!(code, 404);
    let answers = |labels: &str| {
        controller.metric(&format!(
            "plimsoll_controller_scheduler_answers_total{{{labels}}}"
        ))
    };
    assert!(answers("page=\"prioritize\",code=\"200\"") >= 1.0);
    assert!((answers("page=\"filter\",code=\"400\"") - 5.0).abs() < 0.5);
    assert!(
        controller.resident_kb() < 120_000,
        "{}",
        controller.resident_kb()
    );
}

#[test]
fn the_policy_file_is_followed() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("policy.yaml");
    fs::write(&file, POLICY).unwrap();
    let ports = [free_port(), free_port()];
    let flag = file.to_str().unwrap();
    let Some((plane, controller)) = served(ports, &["--scheduler-policy", flag]) else {
        return;
    };
    report_loads(
        &plane,
        &controller,
        ports,
        // 80 % and 40 % of their CPUs.
        &[
            ("cool", 20.0),
            ("warm", 50.0),
            ("hot", 100.0),
            ("bare", 50.0),
        ],
    );
    let passed = || {
        let (_, body) = post(ports[0], "filter", &args(&["cool", "warm", "hot", "bare"]));
        let answer: Value = serde_json::from_str(&body).unwrap();
        answer["NodeNames"].as_array().unwrap().len()
    };
    assert_eq!(passed(), 3);
    let metric =
        |name: &str| controller.metric(&format!("plimsoll_controller_scheduler_policy_{name} "));
    assert!(metric("loaded") > 0.5 && metric("invalid") < 0.5);
    fs::write(&file, POLICY.replace("0.65", "65")).unwrap();
    plane.until("the mistake is found", TIMEOUT, |_| metric("invalid") > 0.5);
    assert_eq!(passed(), 3, "the last valid policy stays");
    let log = plane.log_of("controller");
    assert!(
        log.contains("maxLimitPecent is 65; write a fraction from 0 to 1"),
        "{log}"
    );
    fs::write(&file, POLICY.replace("0.65", "0.9")).unwrap();
    plane.until("the change is in use", TIMEOUT, |_| passed() == 4);
    assert!(metric("invalid") < 0.5);
}

#[test]
fn an_invalid_policy_file_is_an_error_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("policy.yaml");
    fs::write(&file, POLICY.replace("0.2", "0")).unwrap();
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["controller", "--kubeconfig"])
        .arg(&plane.kubeconfig)
        .args([
            "--report-listen",
            "127.0.0.1:0",
            "--scheduler-listen",
            "127.0.0.1:0",
        ])
        .arg("--scheduler-policy")
        .arg(&file)
        .output()
        .unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let wanted = "policy.yaml:7:3: error: spec.priority: the weights add up to 0";
    assert!(stderr.contains(wanted), "{stderr}");
}
