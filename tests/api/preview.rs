//! `plimsoll preview` through a real API server that proxies to a fake kubelet.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use crate::api_support::{ControlPlane, policy};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::{Value, json};

/// Serves `/stats/summary` over TLS as a kubelet does, at a non-loopback address: API servers do not connect to kubelets on
/// loopback.
struct Kubelet {
    address: IpAddr,
    port: u16,
}

/// The machine's source address for outgoing connections; nothing is sent.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

impl Kubelet {
    fn start(summary: &Value) -> Option<Self> {
        let address = own_address()?;
        let pair = rcgen::generate_simple_self_signed(vec!["kubelet".to_owned()]).unwrap();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(pair.signing_key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![pair.cert.der().clone()], key)
            .unwrap();
        let (config, body) = (Arc::new(config), summary.to_string());
        let listener = TcpListener::bind((address, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (config, body) = (Arc::clone(&config), body.clone());
                std::thread::spawn(move || answer(config, stream.unwrap(), &body));
            }
        });
        Some(Self { address, port })
    }

    /// The status of its Node.
    fn status(&self) -> Value {
        json!({
            "capacity": {"cpu": "2", "memory": "4Gi"},
            "addresses": [{"type": "InternalIP", "address": self.address.to_string()}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self.port}},
        })
    }
}

fn answer(config: Arc<rustls::ServerConfig>, stream: TcpStream, body: &str) {
    let connection = rustls::ServerConnection::new(config).unwrap();
    let mut stream = BufReader::new(rustls::StreamOwned::new(connection, stream));
    let mut first = String::new();
    stream.read_line(&mut first).unwrap_or_default();
    let mut line = first.clone();
    while !line.trim().is_empty() {
        line.clear();
        stream.read_line(&mut line).unwrap_or_default();
    }
    let known = first.starts_with("GET /stats/summary?only_cpu_and_memory=true ");
    let (code, body) = if known {
        ("200 OK", body)
    } else {
        ("404 Not Found", "no such thing")
    };
    let head = format!(
        "HTTP/1.1 {code}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let stream = stream.get_mut();
    drop(stream.write_all((head + body).as_bytes()));
    stream.conn.send_close_notify();
    drop(stream.flush());
}

fn summary() -> Value {
    let time = "2026-11-21T16:00:00Z";
    json!({
        "node": {
            "nodeName": "a",
            "cpu": {"time": time, "usageNanoCores": 1_800_000_000},
            "memory": {"time": time, "workingSetBytes": 1 << 30, "rssBytes": 1 << 29},
        },
        "pods": [{
            "podRef": {"name": "burner", "namespace": "default", "uid": "not known before"},
            "cpu": {"time": time, "usageNanoCores": 1_500_000_000},
            "memory": {"time": time, "usageBytes": 30, "workingSetBytes": 20, "rssBytes": 10},
        }],
    })
}

fn policies() -> [Value; 3] {
    let rule = json!({
        "name": "cpu", "actionName": "slow", "metricRule": {"name": "cpu_total_usage", "value": 1500},
    });
    [
        policy("NodeQOS", "hot", &json!({"rules": [rule]})),
        policy(
            "AvoidanceAction",
            "slow",
            &json!({"throttle": {"cpuThrottle": {"stepCPURatio": 10}}}),
        ),
        policy(
            "PodQOS",
            "all",
            &json!({"allowedActions": ["throttle"], "labelSelector": {}}),
        ),
    ]
}

fn burner() -> Value {
    let container = json!({"name": "c", "image": "i", "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "100m"}}});
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "burner", "namespace": "default"},
        "spec": {"nodeName": "a", "containers": [container]},
    })
}

fn status(plane: &ControlPlane, what: &str, name: &str, status: &Value) {
    let patch = json!({"status": status}).to_string();
    plane.kubectl(&[
        "patch",
        what,
        name,
        "--subresource=status",
        "--type=merge",
        "-p",
        &patch,
    ]);
}

/// Grants exactly the permissions that the command's help lists.
fn reader(plane: &ControlPlane, nodes_proxy: bool) {
    let policies = json!(["nodeqoss", "podqoss", "avoidanceactions", "nodewatermarks"]);
    let mut rules = vec![
        json!({"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]}),
        json!({"apiGroups": ["ensurance.crane.io", "plimsoll.dev"], "resources": policies, "verbs": ["list"]}),
    ];
    if nodes_proxy {
        rules.push(json!({"apiGroups": [""], "resources": ["nodes/proxy"], "verbs": ["get"]}));
    }
    let rbac = "rbac.authorization.k8s.io";
    plane.apply(&[
        json!({
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRole", "metadata": {"name": "reader"}, "rules": rules,
        }),
        json!({
            "apiVersion": format!("{rbac}/v1"), "kind": "ClusterRoleBinding", "metadata": {"name": "reader"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "reader"},
            "subjects": [{"apiGroup": rbac, "kind": "User", "name": "ann"}],
        }),
    ]);
}

/// Runs the command as the user with that role.
fn preview(plane: &ControlPlane, args: &[&str]) -> Output {
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(&plane.kubeconfig).unwrap()).unwrap();
    config["users"][0]["user"] = json!({"token": "ann"});
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("config");
    std::fs::write(&file, config.to_string()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command
        .arg("preview")
        .arg("--kubeconfig")
        .arg(&file)
        .args(args);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A node with one busy pod, and policies.
fn busy_node(plane: &ControlPlane) -> Option<()> {
    plane.apply(&[
        json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "a"}}),
        burner(),
    ]);
    plane.apply(&policies());
    let mut summary = summary();
    summary["pods"][0]["podRef"]["uid"] = plane.get("pod", "burner")["metadata"]["uid"].clone();
    let kubelet = Kubelet::start(&summary)?;
    status(plane, "node", "a", &kubelet.status());
    status(plane, "pod", "burner", &json!({"phase": "Running"}));
    Some(())
}

/// Exit code and output.
fn run(plane: &ControlPlane, args: &[&str]) -> (Option<i32>, String) {
    let output = preview(plane, args);
    let all = text(&output.stdout) + &text(&output.stderr);
    (output.status.code(), all)
}

const TIMEOUT: Duration = Duration::from_secs(20);
const ALL: &str = "nodeqoss,podqoss,avoidanceactions,nodes,pods";

#[test]
fn kubelet_statistics_need_the_nodes_proxy_permission() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    if busy_node(&plane).is_none() {
        eprintln!("NOT TESTED: this machine has no address but loopback");
        return;
    }
    reader(&plane, true);
    let before = plane.list(ALL);
    plane.until("the role is in force", TIMEOUT, |p| {
        run(p, &[]).0 == Some(0)
    });
    let (_, shown) = run(&plane, &[]);
    let over = "1800m      1500m  kubelet  OVER   throttle 1 pod";
    assert!(shown.contains(over), "{shown}");
    let step = "throttle 100 % -> 90 % (900m), releases 600m";
    assert!(shown.contains(step), "{shown}");
    reader(&plane, false);
    plane.until("the permission is gone", TIMEOUT, |p| {
        let forbidden = "cannot get resource \"nodes/proxy\"";
        run(p, &[]).1.contains(forbidden)
    });
    let (code, shown) = run(&plane, &["--value", "cpu_total_usage=1900"]);
    assert_eq!(code, Some(0), "{shown}");
    let alone = "left alone: it has no fresh sample";
    assert!(shown.contains("given") && shown.contains(alone), "{shown}");
    plane.kubectl(&["delete", "clusterrolebinding", "reader"]);
    plane.until("nothing may be read", TIMEOUT, |p| {
        let (code, shown) = run(p, &[]);
        code == Some(2) && shown.contains("User \"ann\" cannot list resource")
    });
    assert_eq!(plane.list(ALL), before, "something was written");
}

#[test]
fn what_preview_rules_would_have_done_is_a_column_and_the_history() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    let [mut node_qos, others @ ..] = policies();
    node_qos["spec"]["rules"][0]["strategy"] = json!("Preview");
    let watermark = json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": "a"},
        "spec": {"nodeUID": "u", "hash": "h"},
    });
    plane.apply(&[node_qos, watermark]);
    plane.apply(&others);
    let would = json!({"breaches": 2, "activeMinutes": 9, "throttleRounds": 5, "since": "2020-01-01T00:00:00Z"});
    let rule = json!({"id": "hot/cpu", "strategy": "Preview", "state": "Normal", "mark": 1500, "wouldLastDay": would});
    plane.report(
        "a",
        &json!({"rules": [rule], "counts": {"wouldLastDay": 2}}),
    );
    status(&plane, "nodeqos", "hot", &json!({"wouldLastDay": 3}));
    for (what, times) in [("nodewatermarks", "2"), ("nodeqoss", "3")] {
        let table = plane.kubectl(&["get", what]);
        let column = table.find("WOULD(24H)").expect(&table);
        let row = table.lines().nth(1).unwrap();
        assert!(row[column..].starts_with(times), "{table}");
    }
    reader(&plane, false);
    plane.until("the role is in force", TIMEOUT, |p| {
        run(p, &["--history"]).0 == Some(0)
    });
    let (_, shown) = run(&plane, &["--history"]);
    let row = "hot/cpu  1 of 1              2      9m          5          0  -";
    assert!(shown.contains(row), "{shown}");
}
