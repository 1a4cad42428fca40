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
use plimsoll::cluster::clock::wall;
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
        "spec": {"holderIdentity": node, "leaseDurationSeconds": 40, "renewTime": format!("{:.6}", wall() - age)},
    })
}

/// Nodes of which one is hot, one silent and one without an agent; the Lease of a node that is gone.
fn cluster() -> Option<ControlPlane> {
    let plane = ControlPlane::start()?;
    plane.nodes(&["hot".to_owned(), "quiet".to_owned(), "bare".to_owned()]);
    let hot = "cpu=91.0 mem=40.0 cpumark=75.0 psi=1.0/2.0/3.0 rules=1 throttled=2 scheduling=NoSchedule breached=1:q/cpu";
    plane.apply(&[
        lease_namespace(),
        lease("hot", Duration::from_secs(1), hot),
        lease("quiet", Duration::from_mins(5), "cpu=1.0"),
        lease("gone", Duration::from_mins(5), "cpu=1.0"),
    ]);
    Some(plane)
}

#[test]
fn every_node_is_shown_once_and_who_is_silent_is_named() {
    let Some(plane) = cluster() else { return };
    let shown = top(&plane.kubeconfig, &["nodes", "--sort", "cpu"]);
    let screen = text(&shown.stdout);
    assert!(shown.status.success(), "{}", text(&shown.stderr));
    let lines: Vec<&str> = screen.lines().collect();
    for word in ["hot", "|██", "91.0", "q/cpu", "NoSchedule, 2 throttled"] {
        assert!(lines[1].contains(word), "{word} is missing in\n{screen}");
    }
    assert!(
        lines[2].starts_with("quiet") && lines[2].contains("SILENT for 5m"),
        "{screen}"
    );
    assert!(
        lines[3].starts_with("bare") && lines[3].ends_with("no agent"),
        "{screen}"
    );
    assert!(
        screen.ends_with("\n1 of 3 agents are silent: quiet\n"),
        "{screen}"
    );
    let json = top(&plane.kubeconfig, &["-o", "json"]);
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    let agents = json["nodes"].as_array().unwrap().iter();
    let agents: Vec<&Value> = agents.map(|row| &row["agent"]).collect();
    assert_eq!(agents, ["alive", "silent", "none"]);
    assert_eq!(json["nodes"][0]["cpuMark"], 75.0);
}

#[test]
fn what_can_not_be_read_is_said_with_the_cure() {
    let Some(plane) = cluster() else { return };
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let forbid = |resource: &'static str| {
        let message = format!("{resource} is forbidden: User \"ann\" cannot list");
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 403, "message": message});
        proxy.judge(move |_, path| {
            let meant = path.split('?').next().unwrap().ends_with(resource);
            meant.then(|| Fault::Answer(403, None, body.to_string()))
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
    let refused = top(&kubeconfig, &[]);
    assert_eq!(refused.status.code(), Some(2));
    let why = text(&refused.stderr);
    let words = "failed to list the Leases of the agents in namespace plimsoll-node-lease: leases is forbidden";
    assert!(why.contains(words), "{why}");
    proxy.judge(|_, _| None);
    let elsewhere = top(&kubeconfig, &["--lease-namespace", "default"]);
    let screen = text(&elsewhere.stdout);
    assert!(
        screen.contains("no agent has sent a heartbeat to namespace default"),
        "{screen}"
    );
    assert!(elsewhere.status.success());
}

#[test]
fn it_shows_more_than_a_page_of_nodes() {
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

/// The lines of a stream as they come.
fn lines(stream: impl Read + Send + 'static) -> Receiver<String> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            drop(tell.send(line));
        }
    });
    told
}

/// Waits for a line with this in it.
fn wait_for(lines: &Receiver<String>, text: &str) {
    loop {
        let line = lines.recv_timeout(Duration::from_secs(30));
        if line
            .unwrap_or_else(|_| panic!("{text} is not said"))
            .contains(text)
        {
            return;
        }
    }
}

#[test]
fn with_watch_it_is_shown_again_and_again_and_a_failure_ends_nothing() {
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
    wait_for(&screens, "1 of 3 agents are silent: quiet");
    plane.apply(&[lease("quiet", Duration::ZERO, "cpu=33.3")]);
    wait_for(&screens, "33.3");
    proxy.judge(|_, _| Some(Fault::Answer(500, None, "boom".to_owned())));
    wait_for(&errors, "trying again");
    proxy.judge(|_, _| None);
    while screens.try_recv().is_ok() {}
    wait_for(&screens, "33.3");
}

const SOON: Duration = Duration::from_mins(2);

/// Nodes of which one reports and one is silent, and a controller that serves `NodeMetrics`: at the first port, and takes
/// reports at the second.
fn served(ports: [u16; 2]) -> Option<(ControlPlane, Controller)> {
    let plane = aggregation::plane(&ports[..1])?;
    plane.nodes(&["bare", "node00", "quiet"].map(str::to_owned));
    account(&plane);
    let minute_ago = lease(
        "node00",
        Duration::from_mins(1),
        "cpu=1.0 mem=1.0 cpumark=75.0 throttled=0 scheduling=Enabled breached=0",
    );
    let mut quiet = lease("quiet", Duration::from_mins(5), "cpu=1.0");
    quiet["spec"]["leaseDurationSeconds"] = json!(1);
    plane.apply(&[lease_namespace(), minute_ago, quiet]);
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
    plane.until("the quiet agent is missed", SOON, |plane| {
        let metric = plane.try_kubectl(&["get", "nm", "quiet", "--no-headers"], "");
        metric.is_ok_and(|row| row.contains("AgentSilent"))
    });
    plane.until("the node has a watermark", SOON, |plane| {
        plane.try_kubectl(&["get", "nwm", "node00"], "").is_ok()
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

/// Reports, as an agent does again and again, until `top` shows this in one line of its screen.
fn until_line(plane: &ControlPlane, agent: &dyn Fn(), args: &[&str], words: &[&str]) -> String {
    let screen = RefCell::new(String::new());
    plane.until(&format!("{words:?} in {args:?}"), SOON, |plane| {
        agent();
        let shown = text(&top(&plane.kubeconfig, args).stdout);
        let is_there = shown
            .lines()
            .any(|line| words.iter().all(|word| line.contains(word)));
        screen.replace(shown);
        is_there
    });
    screen.into_inner()
}

#[test]
fn nodes_and_pods_are_shown_as_their_agents_reported_them_last() {
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
        report["status"]["timestamp"] = json!(format!("{:.0}", wall()));
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
        lines[2].starts_with("quiet") && lines[2].contains("SILENT for"),
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
    where_the_api_does_not_answer(&plane);
}

/// The nodes are shown by their Leases, and why is said beside; the pods can't be.
fn where_the_api_does_not_answer(plane: &ControlPlane) {
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    proxy.judge(|_, path| {
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
    let said = text(&shown.stderr);
    let words = "warning: failed to list NodeMetrics: service unavailable (503); shown is what the Leases say";
    assert!(said.contains(words), "{said}");
    let refused = top(&kubeconfig, &["pods"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(
        said.contains("service unavailable (503)") && said.contains("kubectl get apiservice"),
        "{said}"
    );
}

#[test]
fn pods_are_not_shown_where_node_metrics_are_not_served_and_the_cure_is_said() {
    let Some(plane) = cluster() else { return };
    let nodes = top(&plane.kubeconfig, &["nodes"]);
    assert_eq!(text(&nodes.stderr), "", "a cluster may do without");
    let pods = top(&plane.kubeconfig, &["pods"]);
    assert_eq!(pods.status.code(), Some(2));
    let said = text(&pods.stderr);
    let words = "metrics.plimsoll.dev/v1alpha1 is not served in this cluster; install plimsoll with metricsAPI.enabled";
    assert!(said.contains(words), "{said}");
    let refused = top(&plane.kubeconfig, &["pods", "--sort", "breached"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--sort breached is for nodes"));
}
