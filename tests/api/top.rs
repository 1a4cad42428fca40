//! `plimsoll top` against a real API server.

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use crate::api_support::faults::{Fault, Proxy};
use crate::api_support::reporter::{Reporter, account, report, token, trust};
use crate::api_support::{
    ControlPlane, Controller, LEASES, Process, aggregation, free_port, lease_namespace,
};
use plimsoll::clock::wall_time;
use serde_json::{Value, json};

fn top(kubeconfig: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.arg("top").arg("--kubeconfig").arg(kubeconfig);
    command.args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn lease(node: &str, age: Duration, summary: &str) -> Value {
    json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": node, "namespace": LEASES, "annotations": {"plimsoll.dev/summary": summary}},
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": format!("{:.6}", wall_time() - age)},
    })
}

/// Three nodes: one hot, one with an unresponsive agent, one without an agent; and the Lease of a removed node.
fn cluster() -> Option<ControlPlane> {
    let plane = ControlPlane::start()?;
    plane.nodes(&["hot".to_owned(), "stale".to_owned(), "bare".to_owned()]);
    let hot = "cpu=91.0 mem=40.0 cpumark=75.0 psi=1.0/2.0/3.0 rules=1 throttled=2 scheduling=NoSchedule breached=1:q/cpu";
    plane.apply(&[
        lease_namespace(),
        lease("hot", Duration::from_secs(1), hot),
        lease("stale", Duration::from_mins(5), "cpu=1.0"),
        lease("gone", Duration::from_mins(5), "cpu=1.0"),
    ]);
    Some(plane)
}

#[test]
fn every_node_is_shown_once() {
    let Some(plane) = cluster() else { return };
    let shown = top(&plane.kubeconfig, &["nodes", "--sort", "cpu"]);
    let screen = text(&shown.stdout);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    let lines: Vec<&str> = screen.lines().collect();
    for word in ["hot", "|██", "91.0", "q/cpu", "NoSchedule, 2 throttled"] {
        assert!(lines[1].contains(word), "{word} is missing in\n{screen}");
    }
    assert!(
        lines[2].starts_with("stale") && lines[2].contains("LAST SEEN 5m"),
        "{screen}"
    );
    assert!(
        lines[3].starts_with("bare") && lines[3].ends_with("no agent"),
        "{screen}"
    );
    assert!(
        screen.ends_with("\n1 of 3 agents does not respond: stale\n"),
        "{screen}"
    );
    let json = top(&plane.kubeconfig, &["-o", "json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let agents = json["nodes"].as_array().unwrap().iter();
    let agents: Vec<&Value> = agents.map(|row| &row["agent"]).collect();
    assert_eq!(agents, ["alive", "unresponsive", "none"]);
    assert_eq!(json["nodes"][0]["cpuMark"], 75.0);
}

#[test]
fn missing_permissions_are_explained() {
    let Some(plane) = cluster() else { return };
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let forbid = |resource: &'static str| {
        let message = format!("{resource} is forbidden: User \"ann\" cannot list");
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "message": message});
        proxy.respond_with(move |_, path| {
            let matches = path.split('?').next().unwrap().ends_with(resource);
            matches.then(|| Fault::Answer(403, None, body.to_string()))
        });
    };
    forbid("nodes");
    let shown = top(&kubeconfig, &[]);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    let screen = text(&shown.stdout);
    assert!(
        screen.contains("note: nodes that never had an agent are not shown"),
        "{screen}"
    );
    assert!(
        screen.contains("nodes is forbidden") && screen.contains("hot"),
        "{screen}"
    );
    forbid("leases");
    let failed = top(&kubeconfig, &[]);
    assert_eq!(failed.status.code(), Some(2));
    let why = text(&failed.stderr);
    let words = "failed to list the Leases of the agents in namespace plimsoll-node-lease: leases is forbidden";
    assert!(why.contains(words), "{why}");
    proxy.respond_with(|_, _| None);
    let elsewhere = top(&kubeconfig, &["--lease-namespace", "default"]);
    let screen = text(&elsewhere.stdout);
    assert!(
        screen.contains("no agent has sent a heartbeat to namespace default"),
        "{screen}"
    );
    assert!(elsewhere.status.success());
}

#[test]
fn it_lists_more_than_one_page_of_nodes() {
    let Some(plane) = cluster() else { return };
    let leases: Vec<Value> = (0..520)
        .map(|node| lease(&format!("n{node:03}"), Duration::from_secs(1), "cpu=5.0"))
        .collect();
    plane.create(&leases);
    let nodes: Vec<Value> = (0..520)
        .map(|node| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": format!("n{node:03}")}}))
        .collect();
    plane.create(&nodes);
    let json = top(&plane.kubeconfig, &["-o", "json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(json["nodes"].as_array().unwrap().len(), 523);
}

/// Sends the lines of a stream as they arrive.
fn lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            drop(sender.send(line));
        }
    });
    receiver
}

/// Waits for a line that contains `text`.
fn wait_for(lines: &Receiver<String>, text: &str) {
    loop {
        let line = lines.recv_timeout(Duration::from_secs(30));
        if line
            .unwrap_or_else(|_| panic!("no line with {text}"))
            .contains(text)
        {
            return;
        }
    }
}

#[test]
fn watch_refreshes_and_survives_errors() {
    let Some(plane) = cluster() else { return };
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let mut top = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["top", "--watch", "--interval", "200ms", "--kubeconfig"])
        .arg(&kubeconfig)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let screens = lines(top.stdout.take().unwrap());
    let errors = lines(top.stderr.take().unwrap());
    let _top = Process(top);
    wait_for(&screens, "1 of 3 agents does not respond: stale");
    plane.apply(&[lease("stale", Duration::ZERO, "cpu=33.3")]);
    wait_for(&screens, "33.3");
    proxy.respond_with(|_, _| Some(Fault::Answer(500, None, "boom".to_owned())));
    wait_for(&errors, "trying again");
    proxy.respond_with(|_, _| None);
    while screens.try_recv().is_ok() {}
    wait_for(&screens, "33.3");
}

const TIMEOUT: Duration = Duration::from_mins(2);

/// A reporting node, a stale one, and a controller that serves `NodeMetrics` at the first port and accepts reports at the
/// second.
fn served(ports: [u16; 2]) -> Option<(ControlPlane, Controller)> {
    let plane = aggregation::plane(&ports[..1])?;
    plane.nodes(&["bare", "node00", "stale"].map(str::to_owned));
    account(&plane);
    let minute_ago = lease(
        "node00",
        Duration::from_mins(1),
        "cpu=1.0 mem=1.0 cpumark=75.0 throttled=0 scheduling=Enabled breached=0",
    );
    let mut stale = lease("stale", Duration::from_mins(5), "cpu=1.0");
    stale["spec"]["leaseDurationSeconds"] = json!(1);
    plane.apply(&[lease_namespace(), minute_ago, stale]);
    let (metrics, reports) = (
        format!("0.0.0.0:{}", ports[0]),
        format!("127.0.0.1:{}", ports[1]),
    );
    let args = [
        "--metrics-api-listen",
        &metrics,
        "--pod-ip",
        "127.0.0.1",
        "--report-listen",
        &reports,
    ];
    let controller = plane.controller("controller", &args);
    plane.until("the stale agent is detected", TIMEOUT, |plane| {
        let metric = plane.try_kubectl(&["get", "nm", "stale", "--no-headers"], "");
        metric.is_ok_and(|row| row.contains("AgentUnresponsive"))
    });
    plane.until("the node has a watermark", TIMEOUT, |plane| {
        !plane.get("nwm", "node00").is_null()
    });
    plane.report(
        "node00",
        &json!({
            "agent": {"version": "0.1.0", "bootID": "boot"},
            "counts": {"throttled": 1},
            "scheduling": {"state": "NoSchedule"},
            "throttled": [{
                "namespace": "shop", "pod": "cart-0", "uid": "u", "rule": "batch/cpu", "ratio": 50,
                "fromMillicores": 900, "toMillicores": 450,
            }],
        }),
    );
    Some((plane, controller))
}

/// Reports repeatedly, until a line of `top` contains all `words`.
fn until_line(plane: &ControlPlane, agent: &dyn Fn(), args: &[&str], words: &[&str]) -> String {
    let screen = RefCell::new(String::new());
    plane.until(&format!("{words:?} in {args:?}"), TIMEOUT, |plane| {
        agent();
        let shown = text(&top(&plane.kubeconfig, args).stdout);
        let found = shown
            .lines()
            .any(|line| words.iter().all(|word| line.contains(word)));
        screen.replace(shown);
        found
    });
    screen.into_inner()
}

#[test]
fn the_latest_reports_of_nodes_and_pods_are_shown() {
    let ports = [free_port(), free_port()];
    let Some((plane, _controller)) = served(ports) else {
        return;
    };
    let token = token(&plane, "node00");
    let reporter = Reporter::new(&trust(&plane), ports[1]);
    let sequence = std::cell::Cell::new(0);
    let agent = || {
        sequence.set(sequence.get() + 1);
        let mut report = report("node00", sequence.get(), 6000);
        report["status"]["timestamp"] = json!(format!("{:.0}", wall_time()));
        let code = reporter.report(&token, &report).code;
        assert!([200, 429, 503].contains(&code), "{code}");
    };
    let node = [
        "node00",
        "75.0",
        "25.0",
        "?/12.5/?",
        "batch/cpu",
        "NoSchedule, 1 throttled",
    ];
    let screen = until_line(&plane, &agent, &["nodes"], &node);
    assert!(screen.contains("███████████████|····"), "{screen}");
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines[0].ends_with("MEASURED"), "{screen}");
    assert!(lines[1].starts_with("node00"), "{screen}");
    assert!(
        lines[2].starts_with("stale") && lines[2].contains("LAST SEEN"),
        "{screen}"
    );
    assert!(
        lines[3].starts_with("bare") && lines[3].ends_with("no agent"),
        "{screen}"
    );
    let pod = [
        "shop",
        "cart-0",
        "node00",
        "900m",
        "1024Mi",
        "to 450m (50%)",
    ];
    let screen = until_line(&plane, &agent, &["pods", "--sort", "cpu"], &pod);
    assert!(screen.contains("at most 10 of each: 1 of 2"), "{screen}");
    let json = until_line(&plane, &agent, &["pods", "-o", "json"], &["cart-0"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["pods"][0]["cpuMillicores"], 900);
    assert_eq!(json["pods"][0]["throttle"]["toMillicores"], 450);
    without_the_metrics_api(&plane);
}

/// Nodes are shown by their Leases, with a warning; pods can't be shown.
fn without_the_metrics_api(plane: &ControlPlane) {
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    proxy.respond_with(|_, path| {
        let unavailable = || Fault::Answer(503, None, "service unavailable\n".to_owned());
        path.contains("/nodemetrics").then(unavailable)
    });
    let shown = top(&kubeconfig, &["-o", "json"]);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    let json: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(
        (&json["source"], &json["nodes"][0]["cpu"]),
        (&json!("leases"), &json!(1.0))
    );
    let stderr = text(&shown.stderr);
    let words = "warning: failed to list NodeMetrics: service unavailable (503); showing the agents' Leases";
    assert!(stderr.contains(words), "{stderr}");
    let failed = top(&kubeconfig, &["pods"]);
    assert_eq!(failed.status.code(), Some(2));
    let stderr = text(&failed.stderr);
    assert!(
        stderr.contains("service unavailable (503)") && stderr.contains("kubectl get apiservice"),
        "{stderr}"
    );
}

#[test]
fn pods_need_node_metrics() {
    let Some(plane) = cluster() else { return };
    let nodes = top(&plane.kubeconfig, &["nodes"]);
    assert_eq!(text(&nodes.stderr), "", "NodeMetrics are optional");
    let pods = top(&plane.kubeconfig, &["pods"]);
    assert_eq!(pods.status.code(), Some(2));
    let stderr = text(&pods.stderr);
    let words = "metrics.plimsoll.dev/v1alpha1 is not served in this cluster; install plimsoll with metricsAPI.enabled";
    assert!(stderr.contains(words), "{stderr}");
    for sort in ["breached", "load"] {
        let failed = top(&plane.kubeconfig, &["pods", "--sort", sort]);
        assert_eq!(failed.status.code(), Some(2));
        let expected = format!("--sort {sort} is for nodes");
        assert!(text(&failed.stderr).contains(&expected), "{sort}");
    }
}

/// Runs `plimsoll explain placement`.
fn explain(plane: &ControlPlane, args: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(["explain", "placement", "--kubeconfig"]);
    let output = command.arg(&plane.kubeconfig).args(args).output().unwrap();
    let shown = text(&output.stdout) + &text(&output.stderr);
    (output.status.code(), shown)
}

#[test]
fn explain_placement_shows_what_schedulers_see_of_each_node() {
    let ports = [free_port(), free_port()];
    let Some((plane, _controller)) = served(ports) else {
        return;
    };
    let token = token(&plane, "node00");
    let reporter = Reporter::new(&trust(&plane), ports[1]);
    plane.kubectl(&["label", "node", "node00", "plimsoll.dev/load=35"]);
    let taint = json!({"spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}}).to_string();
    plane.kubectl(&["patch", "node", "bare", "--type=merge", "-p", &taint]);
    let sequence = std::cell::Cell::new(0);
    plane.until("the load is shown", TIMEOUT, |plane| {
        sequence.set(sequence.get() + 1);
        drop(reporter.report(&token, &report("node00", sequence.get(), 2000)));
        explain(plane, &[]).1.contains("25 of 80")
    });
    let line = |shown: &str, node: &str| {
        let line = shown.lines().find(|line| line.starts_with(node));
        line.unwrap_or_else(|| panic!("{node} is not in\n{shown}"))
            .to_owned()
    };
    let (code, all) = explain(&plane, &[]);
    assert_eq!(code, Some(0), "{all}");
    assert!(line(&all, "stale").contains("its agent does not report; no label: counts as 80"));
    // A pod of the cluster: 2 of 8 CPUs are 21 percent more, of a line of 80.5.
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web-0", "namespace": "default"},
        "spec": {"containers": [{"name": "c", "image": "none", "resources": {"requests": {"cpu": "2"}}}]},
    });
    plane.create(std::slice::from_ref(&pod));
    let (code, of_pod) = explain(&plane, &["web-0"]);
    assert_eq!(code, Some(0), "{of_pod}");
    assert!(
        of_pod.starts_with("default/web-0 is expected to use 1700m CPU"),
        "{of_pod}"
    );
    let row = line(&of_pod, "node00");
    let words: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(words[..5], ["node00", "32", "58", "35", "8"], "{of_pod}");
    assert!(line(&of_pod, "bare").contains("taint gpu:NoSchedule is not tolerated"));
    // A manifest that was not applied gives the same.
    let template = json!({"spec": pod["spec"]});
    let workload = json!({"kind": "Deployment", "metadata": {"name": "web-0"}, "spec": {"template": template}});
    let file = plane.file("workload.yaml", &workload.to_string());
    let (code, of_file) = explain(&plane, &["-f", file.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{of_file}");
    assert_eq!(
        line(&of_file, "node00")
            .split_whitespace()
            .take(5)
            .collect::<Vec<_>>(),
        words[..5]
    );
    explain_placement_names_what_it_cannot_read(&plane);
    let (_, json) = explain(&plane, &["web-0", "-o", "json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["nodes"][0]["node"], "node00");
    assert_eq!(json["nodes"][0]["cpu"]["line"], 80.5);
    explain_pod_names_the_best_of_them(&plane);
}

/// Without kubelets all nodes have the taint of nodes that are not ready.
fn explain_pod_names_the_best_of_them(plane: &ControlPlane) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(["explain", "pod", "web-0", "--kubeconfig"]);
    let output = command.arg(&plane.kubeconfig).output().unwrap();
    let shown = text(&output.stdout) + &text(&output.stderr);
    assert!(
        shown.contains("The least loaded nodes for it\n  none: no node is a candidate"),
        "{shown}"
    );
}

/// What cannot be read is an error, not a node without load.
fn explain_placement_names_what_it_cannot_read(plane: &ControlPlane) {
    for (args, reason) in [
        (
            ["web-9", "-n", "default"].as_slice(),
            "failed to read pod default/web-9",
        ),
        (
            ["-f", "/nonexistent"].as_slice(),
            "failed to read /nonexistent",
        ),
    ] {
        let (code, shown) = explain(plane, args);
        assert_eq!(code, Some(2), "{shown}");
        assert!(shown.contains(reason), "{shown}");
    }
}
