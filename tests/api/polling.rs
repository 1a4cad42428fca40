//! Nodes that are polled: a real controller with the chart's rights, `EndpointSlice`s, and an exporter with names and units of its own.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api_support::aggregation::{self, NODE_METRICS, address};
use crate::api_support::reporter::{Reporter, report, token, trust};
use crate::api_support::{ControlPlane, Controller, free_port};

const TIMEOUT: Duration = Duration::from_mins(2);
const SERVICE: &str = "node-exporter";
const PAGE: &str = "# TYPE node_cpu_busy gauge\nnode_cpu_busy{mode=\"all\",cluster=\"a\"} 0.25\nnode_cpu_busy{mode=\"user\"} 0.1\n\
                    node_memory_used_kibibytes 12582912\nother 1\n";

/// An exporter on all addresses of this machine. Returns its port and what it serves.
fn exporter() -> (u16, Arc<Mutex<String>>) {
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let page = Arc::new(Mutex::new(PAGE.to_owned()));
    let served = Arc::clone(&page);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            drop(stream.read(&mut [0; 4096]));
            let body = served.lock().unwrap().clone();
            let length = body.len();
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n");
            drop(stream.write_all((head + &body).as_bytes()));
        }
    });
    (port, page)
}

/// The slice of the exporter, for these nodes.
fn slice(address: IpAddr, port: u16, nodes: &[&str]) -> Value {
    let endpoint = |node: &&str| json!({"addresses": [address.to_string()], "nodeName": node, "conditions": {"ready": true}});
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {"name": SERVICE, "namespace": "default", "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": "other", "port": 9}, {"name": "metrics", "port": port}],
        "endpoints": nodes.iter().map(endpoint).collect::<Vec<_>>(),
    })
}

/// The Service for schedulers, at this port of this machine, and its Pod: API servers connect to Pods only.
fn scheduler_service(address: IpAddr, port: u16) -> [Value; 4] {
    const NAME: &str = "plimsoll-scheduler-api";
    let address = address.to_string();
    let pod = json!({"kind": "Pod", "namespace": "default", "name": NAME});
    [
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "namespace": "default"},
            "spec": {"nodeName": "bare", "containers": [{"name": "main", "image": "none"}]},
        }),
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME, "namespace": "default"},
            "spec": {"ports": [{"name": "http", "port": 80}]},
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": NAME, "namespace": "default", "labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4", "ports": [{"name": "http", "port": port}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": true}, "targetRef": pod}],
        }),
        // API servers before 1.34 use Endpoints.
        json!({
            "apiVersion": "v1", "kind": "Endpoints", "metadata": {"name": NAME, "namespace": "default"},
            "subsets": [{"addresses": [{"ip": address, "targetRef": pod}], "ports": [{"name": "http", "port": port}]}],
        }),
    ]
}

/// What `plimsoll explain metric` prints, or its error.
fn query(args: &[&str]) -> Result<String, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["explain", "metric"])
        .args(args)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    match output.status.code() {
        Some(0) => Ok(text(output.stdout)),
        Some(2) => Err(text(output.stderr)),
        code => panic!("{code:?}: {}", text(output.stderr)),
    }
}

/// Sends a request to the listener for schedulers; returns code and body.
fn ask(port: u16, method: &str, path: &str, body: &str) -> (u16, Value) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, serde_json::from_str(body).unwrap_or(Value::Null))
}

struct Scene {
    plane: ControlPlane,
    /// The listener for schedulers.
    schedulers: u16,
    /// The listener for agents.
    reports: u16,
    server: String,
}

impl Scene {
    /// The current value, or why there is none.
    fn query(&self, node: &str, metric: &str) -> Result<String, String> {
        query(&[node, metric, "--server", &self.server])
    }

    fn until_query(&self, what: &str, node: &str, is: impl Fn(&Result<String, String>) -> bool) {
        self.plane.until(what, TIMEOUT, |_| {
            TcpStream::connect(("127.0.0.1", self.schedulers)).is_ok()
                && is(&self.query(node, "cpu_usage_avg_5m"))
        });
    }

    /// The CPU of each node on the page of load-watcher.
    fn watched(&self) -> Value {
        let (code, page) = ask(self.schedulers, "GET", "/watcher", "");
        assert_eq!(code, 200, "{page}");
        let nodes = page["data"]["NodeMetricsMap"].as_object().unwrap();
        let value = |metrics: &Value| metrics["metrics"][0]["value"].clone();
        nodes
            .iter()
            .map(|(name, metrics)| (name.clone(), value(metrics)))
            .collect()
    }
}

fn patch_status(plane: &ControlPlane, kind: &str, name: &str, status: &Value) {
    let how = ["--subresource=status", "--type=merge", "-p"];
    let patch = status.to_string();
    plane.kubectl(&[&["patch", kind, name], &how[..], &[&patch]].concat());
}

/// Starts a controller that polls the exporter at this port, with the chart's rights.
fn scene(exporter_port: u16) -> Option<(Scene, Controller)> {
    let [api, reports, schedulers] = [free_port(), free_port(), free_port()];
    let plane = aggregation::plane(&[api])?;
    let own = address()?;
    plane.nodes(&["bare", "both", "polled"].map(str::to_owned));
    let addresses =
        json!({"status": {"addresses": [{"type": "InternalIP", "address": "10.9.9.9"}]}});
    patch_status(&plane, "node", "polled", &addresses);
    let services = json!([{"namespace": "default", "name": SERVICE, "port": "metrics", "metrics": [
        {"name": "cpu_usage_avg_5m", "series": "node_cpu_busy", "labels": {"mode": "all"}, "unit": "ratio"},
        {"name": "mem_usage_avg_5m", "series": "node_memory_used_kibibytes", "unit": "bytes", "scale": 1024},
    ]}]);
    let kubeconfig = plane.install(&[
        "--set=placement.polling.enabled=true",
        &format!("--set-json=placement.polling.services={services}"),
    ]);
    plane.apply(&scheduler_service(own, schedulers));
    let own_pod = json!({"status": {"podIP": own, "podIPs": [{"ip": own}]}});
    patch_status(&plane, "pod", "plimsoll-scheduler-api", &own_pod);
    plane.apply(&[slice(
        own,
        exporter_port,
        &["both", "polled", "deleted-long-ago"],
    )]);
    let settings = json!({"interval": "1s", "services": services});
    let file = plane.file("polling.yaml", &settings.to_string());
    let api = format!("{own}:{api}");
    let reports_at = format!("127.0.0.1:{reports}");
    let listen = format!("0.0.0.0:{schedulers}");
    let args = [
        "--metrics-api-listen",
        &api,
        "--pod-ip",
        "127.0.0.1",
        "--report-listen",
        &reports_at,
        "--scheduler-listen",
        &listen,
        "--poll",
        file.to_str()?,
    ];
    let controller = plane.controller_by(&kubeconfig, "controller", &args);
    let server = format!("http://127.0.0.1:{schedulers}");
    let scene = Scene {
        plane,
        schedulers,
        reports,
        server,
    };
    scene.until_query("it is polled", "polled", Result::is_ok);
    Some((scene, controller))
}

#[test]
fn an_exporter_with_other_names_and_units_feeds_what_schedulers_ask_for() {
    let (port, page) = exporter();
    let Some((scene, controller)) = scene(port) else {
        return;
    };
    for node in ["polled", "10.9.9.9"] {
        let found = scene.query(node, "cpu_usage_avg_5m").unwrap();
        assert!(
            found.starts_with("25.00 percent, ") && found.ends_with(" s old, polled\n"),
            "{found}"
        );
    }
    let memory = scene.query("polled", "mem_expected").unwrap();
    assert!(
        memory.starts_with("75.00 percent"),
        "12 of 16 GiB: {memory}"
    );
    assert_eq!(scene.watched()["polled"], 25.0);
    assert_eq!(scene.watched()["bare"], 25.0, "the median");
    let path = "/api/v1/query?query=instance:plimsoll_memory:ratio";
    let (_, load) = ask(scene.schedulers, "GET", path, "");
    assert_eq!(load["data"]["result"][2]["value"][1], "0.750001", "{load}");
    prioritizes(&scene);
    asks_through_the_api_server(&scene);
    is_a_node_metric(&scene);
    assert!(controller.metric("plimsoll_controller_poll_nodes{state=\"unknown\"}") >= 1.0);
    assert!(controller.metric("plimsoll_controller_poll_round_seconds_count") >= 1.0);
    an_agents_report_wins(&scene);
    refuses_what_cannot_be_right(&scene, &controller, &page);
    forgets_deleted_endpoints(&scene, &controller);
}

fn refuses_what_cannot_be_right(scene: &Scene, controller: &Controller, page: &Mutex<String>) {
    *page.lock().unwrap() = PAGE.replace("0.25", "25");
    scene.until_query("2500 percent are refused", "polled", |found| {
        let error = found.as_ref().err();
        let wanted = "cpu_usage_avg_5m is 2500 percent on the page: check unit and scale";
        error.is_some_and(|why| why.contains(wanted))
    });
    let failures = "plimsoll_controller_poll_failures_total{reason=\"implausible\"}";
    assert!(controller.metric(failures) >= 1.0);
    PAGE.clone_into(&mut page.lock().unwrap());
    scene.until_query("it is polled again", "polled", Result::is_ok);
}

fn forgets_deleted_endpoints(scene: &Scene, controller: &Controller) {
    let plane = &scene.plane;
    plane.kubectl(&["delete", "endpointslice", SERVICE, "-n", "default"]);
    scene.until_query("nothing is left", "polled", |found| {
        let error = found.as_ref().err();
        error.is_some_and(|why| why.contains("no load of polled is known"))
    });
    let metric = plane.get("nm", "polled");
    assert_eq!(
        metric["status"]["conditions"][0]["reason"], "NoReport",
        "{metric}"
    );
    assert!(metric["status"]["load"].is_null() && metric["status"]["windows"].is_null());
    plane.until("no node is polled", TIMEOUT, |_| {
        let states = ["current", "failed", "reporting", "unknown"];
        let count = |state| {
            let series = format!("plimsoll_controller_poll_nodes{{state=\"{state}\"}}");
            controller.metric(&series)
        };
        states.into_iter().map(count).sum::<f64>() < 0.5
    });
}

/// The extender ranks by what was polled: less headroom on the node with 75 % of memory in use.
fn prioritizes(scene: &Scene) {
    let pod = json!({"metadata": {"name": "web-0", "namespace": "shop", "uid": "u"}, "spec": {"containers": [{"name": "c"}]}});
    let body = json!({"Pod": pod, "NodeNames": ["polled"]}).to_string();
    let (code, answer) = ask(scene.schedulers, "POST", "/extender/prioritize", &body);
    assert_eq!(
        (code, &answer[0]["Host"]),
        (200, &json!("polled")),
        "{answer}"
    );
    let score = answer[0]["Score"].as_u64().unwrap();
    // 75 of a line of 90 is a load of 83: little headroom, and one point for the best.
    assert!((1..=3).contains(&score), "{answer}");
}

fn asks_through_the_api_server(scene: &Scene) {
    let kubeconfig = &scene.plane.kubeconfig;
    let args = [
        "-n",
        "default",
        "--kubeconfig",
        kubeconfig.to_str().unwrap(),
    ];
    let ask = |args_of: &[&str]| query(&[args_of, &args[..]].concat());
    scene
        .plane
        .until("the API server passes requests on", TIMEOUT, |_| {
            ask(&["polled", "load"]).is_ok()
        });
    let found = ask(&["polled", "load", "-o", "json"]).unwrap();
    let found: Value = serde_json::from_str(&found).unwrap();
    assert_eq!(
        (&found["node"], &found["source"]),
        (&json!("polled"), &json!("poll"))
    );
    assert!(
        (found["value"].as_f64().unwrap() - 83.333).abs() < 0.01,
        "{found}"
    );
    let unknown = ask(&["nowhere", "load"]).unwrap_err();
    assert!(
        unknown.contains("there is no node \"nowhere\", and none with that internal address"),
        "{unknown}"
    );
    let metric = ask(&["polled", "up"]).unwrap_err();
    assert!(
        metric.contains("unknown metric \"up\"; use one of cpu_usage_avg_5m"),
        "{metric}"
    );
    let bare = ask(&["bare", "load"]).unwrap_err();
    assert!(
        bare.contains("no load of bare is known: no agent reports from it"),
        "{bare}"
    );
    let past = ["polled", "load", "--offset", "1s"];
    scene
        .plane
        .until("a second has passed", TIMEOUT, |_| ask(&past).is_ok());
    let past = ask(&past).unwrap();
    assert!(past.starts_with("83.33 percent"), "{past}");
    let long = ask(&["polled", "load", "--offset", "1h"]).unwrap_err();
    assert!(
        long.contains("the controller has values of the last 10m only"),
        "{long}"
    );
}

fn is_a_node_metric(scene: &Scene) {
    scene
        .plane
        .until("the API is discovered", TIMEOUT, |plane| {
            plane.get_raw(NODE_METRICS).is_ok()
        });
    let metric = scene.plane.get("nm", "polled");
    let status = &metric["status"];
    assert_eq!(status["conditions"][0]["reason"], "Polled", "{metric}");
    assert_eq!(status["windows"]["cpu"]["last5m"]["avg"], 25.0);
    assert_eq!(status["load"]["worst"], "memory");
}

/// A node that is polled and reports has the values of its report.
fn an_agents_report_wins(scene: &Scene) {
    let plane = &scene.plane;
    let reported = |value: &Result<String, String>| {
        value
            .as_ref()
            .is_ok_and(|it| it.ends_with(" s old, reported\n"))
    };
    scene.until_query("it is polled until then", "both", |found| {
        found.as_ref().is_ok_and(|it| it.ends_with(", polled\n"))
    });
    let (trust, token) = (trust(plane), token(plane, "both"));
    let agent = Reporter::new(&trust, scene.reports);
    let sequence = Cell::new(0);
    plane.until("the report counts", TIMEOUT, |_| {
        sequence.set(sequence.get() + 1);
        drop(agent.report(&token, &report("both", sequence.get(), 2000)));
        reported(&scene.query("both", "cpu_usage_avg_5m"))
    });
    assert_eq!(scene.watched()["both"], 25.2);
    assert_eq!(
        plane.get("nm", "both")["status"]["conditions"][0]["reason"],
        "AgentReporting"
    );
    thread::park_timeout(Duration::from_secs(3));
    let value = scene.query("both", "cpu_usage_avg_5m");
    assert!(reported(&value), "polling does not replace it: {value:?}");
}

#[test]
fn the_controller_may_read_slices_where_they_are_polled_only() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let account = "--as=system:serviceaccount:default:plimsoll-controller";
    let may = |verb: &str, namespace: &str| {
        let what = [
            "auth",
            "can-i",
            verb,
            "endpointslices.discovery.k8s.io",
            account,
            "-n",
            namespace,
        ];
        plane.try_kubectl(&what, "").is_ok()
    };
    plane.install(&[]);
    assert!(!may("list", "default") && !may("list", "kube-system"));
    let services = r#"[{"namespace": "kube-system", "name": "node-exporter"}]"#;
    plane.install(&[
        "--set=placement.polling.enabled=true",
        &format!("--set-json=placement.polling.services={services}"),
    ]);
    assert!(may("list", "kube-system") && may("watch", "kube-system"));
    assert!(!may("list", "default") && !may("get", "kube-system"));
}

#[test]
fn a_file_that_is_not_valid_is_an_error_at_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("polling.yaml");
    std::fs::write(
        &file,
        "services:\n- {namespace: a, name: b, metrics: [{name: cpu, series: x}]}\n",
    )
    .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args([
            "controller",
            "--report-listen",
            "127.0.0.1:0",
            "--kubeconfig",
        ])
        .arg(plimsoll_kubeconfig(&directory))
        .arg("--poll")
        .arg(&file)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains(
            "polling.yaml:2:38: error: services[0].metrics[0].name: \"cpu\" is not a known metric"
        ),
        "{stderr}"
    );
}

/// A kubeconfig of a cluster that does not exist.
fn plimsoll_kubeconfig(directory: &tempfile::TempDir) -> std::path::PathBuf {
    let path = directory.path().join("kubeconfig");
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "users": [{"name": "u", "user": {}}],
    });
    std::fs::write(&path, config.to_string()).unwrap();
    path
}
