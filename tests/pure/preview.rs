//! `plimsoll preview` as a user runs it, against an API server that records every request.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

const SUMMARY: &str = "/proxy/stats/summary";

/// Responses by path; `None` is 404.
type Responses = Arc<dyn Fn(&str) -> Option<(u16, Value)> + Send + Sync>;

struct Server {
    dir: tempfile::TempDir,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Server {
    fn start(responses: impl Fn(&str) -> Option<(u16, Value)> + Send + Sync + 'static) -> Self {
        let responses: Responses = Arc::new(responses);
        let requests = Arc::new(Mutex::new(Vec::new()));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let config = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        fs::write(dir.path().join("config"), config.to_string()).unwrap();
        let recorded = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (responses, recorded) = (Arc::clone(&responses), Arc::clone(&recorded));
                std::thread::spawn(move || serve(&stream.unwrap(), &responses, &recorded));
            }
        });
        Self { dir, requests }
    }

    fn preview(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .arg("preview")
            .arg("--kubeconfig")
            .arg(self.dir.path().join("config"))
            .args(args)
            .output()
            .unwrap()
    }

    /// A file with this policy.
    fn file(&self, objects: &[Value]) -> String {
        let path = self.dir.path().join("policy.json");
        let list = json!({"apiVersion": "v1", "kind": "List", "items": objects});
        fs::write(&path, list.to_string()).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

/// Serves requests until the client closes the connection.
fn serve(stream: &TcpStream, responses: &Responses, recorded: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut first = String::new();
        if reader.read_line(&mut first).unwrap_or(0) == 0 {
            return;
        }
        let mut length = 0;
        loop {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            if let Some(given) = line.to_lowercase().strip_prefix("content-length:") {
                length = given.trim().parse().unwrap();
            }
            if line.trim().is_empty() {
                break;
            }
        }
        reader.read_exact(&mut vec![0; length]).unwrap();
        let mut words = first.split(' ');
        let (verb, path) = (words.next().unwrap(), words.next().unwrap().to_owned());
        recorded.lock().unwrap().push(format!("{verb} {path}"));
        let gone = || {
            (
                404,
                failure(404, "the server could not find the requested resource"),
            )
        };
        let (code, body) = responses(&path).unwrap_or_else(gone);
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {code} x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let mut writer = stream;
        if writer.write_all((head + &body).as_bytes()).is_err() {
            return;
        }
    }
}

fn failure(code: u16, message: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code, "message": message, "reason": "x"})
}

fn list(items: &[Value]) -> (u16, Value) {
    let list = json!({"apiVersion": "v1", "kind": "List", "metadata": {}, "items": items});
    (200, list)
}

fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "ensurance.crane.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec})
}

fn rule(value: u32, action: &str) -> Value {
    let metric = json!({"name": "cpu_total_usage", "value": value});
    object(
        "NodeQOS",
        "hot",
        &json!({"rules": [{"name": "cpu", "actionName": action, "metricRule": metric}]}),
    )
}

fn policies() -> [Value; 3] {
    let throttle = json!({"throttle": {"cpuThrottle": {"stepCPURatio": 10, "minCPURatio": 10}}});
    [
        rule(1500, "slow"),
        object("AvoidanceAction", "slow", &throttle),
        object(
            "PodQOS",
            "all",
            &json!({"allowedActions": ["throttle"], "labelSelector": {}}),
        ),
    ]
}

fn node(name: &str) -> Value {
    json!({
        "metadata": {"name": name, "uid": name, "labels": {"pool": "batch"}},
        "status": {"capacity": {"cpu": "2", "memory": "4Gi"}},
    })
}

fn pod(name: &str, node: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"nodeName": node, "containers": [{"name": "c"}]},
        "status": {"phase": "Running"},
    })
}

fn summary(milli: u64, pods: &[(&str, u64)]) -> Value {
    let pod = |(uid, milli): &(&str, u64)| json!({"podRef": {"uid": uid}, "cpu": {"usageNanoCores": milli * 1_000_000}});
    json!({
        "node": {"cpu": {"usageNanoCores": milli * 1_000_000}, "memory": {"workingSetBytes": 1 << 30}},
        "pods": pods.iter().map(pod).collect::<Vec<_>>(),
    })
}

/// A cluster of two nodes, one of them over 1500m.
fn cluster(path: &str) -> Option<(u16, Value)> {
    let [node_qos, action, pods] = policies();
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    match path.rsplit('/').next()? {
        "nodeqoss" => Some(list(&[node_qos])),
        "avoidanceactions" => Some(list(&[action])),
        "podqoss" => Some(list(&[pods])),
        "nodes" => Some(list(&[node("normal"), node("busy")])),
        "pods" if query.contains("busy") => {
            Some(list(&[pod("burner", "busy"), pod("idle", "busy")]))
        }
        "pods" => Some(list(&[])),
        _ if path.ends_with(&format!("/busy{SUMMARY}")) => {
            Some((200, summary(1800, &[("burner", 1700), ("idle", 1)])))
        }
        _ if path.ends_with(SUMMARY) => Some((200, summary(100, &[]))),
        _ => None,
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn it_shows_planned_actions_and_sends_only_get() {
    let server = Server::start(cluster);
    let output = server.preview(&[]);
    let shown = text(&output.stdout);
    let row = |node: &str| {
        shown
            .lines()
            .find(|line| line.starts_with(node))
            .unwrap()
            .to_owned()
    };
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        row("busy").ends_with("1800m      1500m  kubelet  OVER   throttle 1 pod"),
        "{shown}"
    );
    assert!(
        row("normal").ends_with("100m      1500m  kubelet  under  -"),
        "{shown}"
    );
    assert!(
        shown.contains("throttle 100 % -> 90 % (1530m), releases 170m"),
        "{shown}"
    );
    assert!(
        shown.contains("left alone: it uses so little that acting"),
        "{shown}"
    );
    assert!(
        shown.ends_with("1 of 2 nodes over a threshold; throttled: 1 pod\n"),
        "{shown}"
    );
    for request in server.requests() {
        assert!(
            request.starts_with("GET /") && !request.contains("watch"),
            "{request}"
        );
    }
    assert!(
        server
            .requests()
            .iter()
            .any(|request| request.contains(SUMMARY))
    );
}

#[test]
fn a_policy_of_the_cluster_that_only_reports_is_shown_as_such() {
    let server = Server::start(|path| {
        let [_, _, mut pods] = policies();
        pods["spec"] = json!({"labelSelector": {}, "resourceQOS": {"cpuQOS": {"cpuPriority": 7}}});
        pods["metadata"]["annotations"] = json!({"plimsoll.dev/strategy": "Preview"});
        match path.split('?').next()?.rsplit('/').next()? {
            "podqoss" => Some(list(&[pods])),
            _ => cluster(path),
        }
    });
    let shown = text(&server.preview(&[]).stdout);
    assert!(
        shown.contains("PodQOS/all: only report: idle class at all times"),
        "{shown}"
    );
}

/// A cluster whose rule only reports, and what two of its agents counted.
fn counted(path: &str) -> Option<(u16, Value)> {
    let watermark = |node: &str, breaches: u32| {
        let would =
            json!({"breaches": breaches, "activeMinutes": 9, "since": "2020-01-01T00:00:00Z"});
        let rule = json!({"id": "hot/cpu", "strategy": "Preview", "state": "Normal", "mark": 1500, "wouldLastDay": would});
        json!({"metadata": {"name": node}, "status": {"rules": [rule]}})
    };
    let [mut node_qos, ..] = policies();
    node_qos["spec"]["rules"][0]["strategy"] = json!("Preview");
    match path.split('?').next()?.rsplit('/').next()? {
        "nodeqoss" => Some(list(&[node_qos])),
        "nodewatermarks" => Some(list(&[watermark("normal", 0), watermark("busy", 2)])),
        "nodes" if path.contains("metadata.name") => Some(list(&[node("normal")])),
        _ => cluster(path),
    }
}

#[test]
fn the_history_is_what_agents_have_counted() {
    let server = Server::start(counted);
    let output = server.preview(&["--history"]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(
        shown.contains("hot/cpu  1 of 2              2     18m          0          0  -"),
        "{shown}"
    );
    let summary = "1 of 1 rule with strategy Preview would have acted in the last 24 hours\n";
    assert!(shown.ends_with(summary), "{shown}");
    let asked = |what: &str| server.requests().iter().any(|it| it.contains(what));
    assert!(
        !asked("/nodes") && !asked("/pods"),
        "{:?}",
        server.requests()
    );
    let one = server.preview(&["--history", "--node", "normal", "-o", "json"]);
    let one: Value = serde_json::from_slice(&one.stdout).unwrap();
    assert_eq!(one["rules"][0]["total"]["breaches"], 0);
    assert_eq!(one["rules"][0]["nodes"].as_array().unwrap().len(), 1);
    let output = server.preview(&["--history", "--value", "cpu_total_usage=1"]);
    assert_eq!(output.status.code(), Some(2));
    let none = text(&Server::start(cluster).preview(&["--history"]).stdout);
    assert_eq!(
        none,
        "no rule has strategy Preview, so nothing is counted\n"
    );
}

#[test]
fn files_replace_policies_of_the_cluster() {
    let server = Server::start(cluster);
    let file = server.file(&[rule(50, "slow")]);
    let output = server.preview(&["-f", &file, "--output", "json"]);
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let thresholds: Vec<_> = shown["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| &node["rules"][0]["threshold"])
        .collect();
    assert_eq!(thresholds, [50.0, 50.0]);
    assert_eq!(shown["nodes"][0]["rules"][0]["state"], "over");
    assert_eq!(
        shown["nodes"][0]["rules"][0]["pods"][0]["would"][0]["change"],
        "throttle"
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn an_invalid_policy_is_reported_as_by_check() {
    let server = Server::start(cluster);
    let mut bad = rule(50, "slow");
    bad["spec"]["rules"][0]["metricRule"]["value"] = json!("many");
    let file = server.file(&[bad]);
    let output = server.preview(&["-f", &file]);
    let check = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["check", &file])
        .output()
        .unwrap();
    let findings = text(&check.stdout);
    let expected = findings
        .lines()
        .find(|line| line.contains("metricRule.value"))
        .unwrap();
    assert!(
        text(&output.stderr).lines().any(|line| line == expected),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(
        (output.status.code(), text(&output.stdout)),
        (Some(1), String::new())
    );
}

#[test]
fn a_rule_without_effect_on_a_node_is_reported() {
    let server = Server::start(cluster);
    let file = server.file(&[rule(4000, "slow"), rule(1, "nothing")]);
    assert_eq!(
        server.preview(&["-f", &file]).status.code(),
        Some(1),
        "two of one name"
    );
    let file = server.file(&[rule(4000, "slow")]);
    let output = server.preview(&["-f", &file]);
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("4000 millicores can't be exceeded")
            && stderr.contains("(on busy, normal)"),
        "{stderr}"
    );
    assert!(
        text(&output.stdout).contains("4000m"),
        "{}",
        text(&output.stdout)
    );
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn without_definitions_only_files_are_previewed() {
    let server = Server::start(|path| {
        if path.contains("crane") {
            None
        } else {
            cluster(path)
        }
    });
    let file = server.file(&policies());
    let output = server.preview(&["-f", &file]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("throttle 1 pod"));
    let output = server.preview(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("plimsoll crds | kubectl apply"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn an_unreachable_kubelet_is_noted_and_other_nodes_are_shown() {
    let server = Server::start(|path| {
        let unreachable = path.contains("/normal/proxy");
        if unreachable {
            Some((503, failure(503, "dial tcp: connection refused")))
        } else {
            cluster(path)
        }
    });
    let output = server.preview(&[]);
    let shown = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0));
    assert!(
        shown.contains("note: usage of node normal is unknown: dial tcp: connection refused (503)"),
        "{shown}"
    );
    assert!(
        shown.contains("UNKNOWN  nothing starts: its kubelet does not answer"),
        "{shown}"
    );
    assert!(shown.contains("throttle 1 pod"), "{shown}");
}

#[test]
fn a_missing_permission_is_named_once() {
    let forbidden = "nodes \"busy\" is forbidden: User \"ann\" cannot get resource \"nodes/proxy\" in API group \"\"";
    let server = Server::start(move |path| {
        if path.contains(SUMMARY) {
            Some((403, failure(403, forbidden)))
        } else {
            cluster(path)
        }
    });
    let shown = text(&server.preview(&["--value", "cpu_total_usage=1700"]).stdout);
    assert_eq!(shown.matches("cannot get resource").count(), 1, "{shown}");
    assert_eq!(
        shown.matches("left alone: it has no fresh sample").count(),
        2,
        "{shown}"
    );
    let server = Server::start(|path| {
        let pods = path.contains("/api/v1/pods");
        if pods {
            Some((
                403,
                failure(403, "User \"ann\" cannot list resource \"pods\""),
            ))
        } else {
            cluster(path)
        }
    });
    let output = server.preview(&[]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr)
            .contains("failed to list pods: User \"ann\" cannot list resource \"pods\" (403)")
    );
}

#[test]
fn wrong_arguments_are_explained() {
    let server = Server::start(|path| {
        let named = path.contains("metadata.name");
        if named {
            Some(list(&[]))
        } else {
            cluster(path)
        }
    });
    let errors = |args: &[&str]| {
        let output = server.preview(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        text(&output.stderr)
    };
    let other = errors(&["--node", "other"]);
    assert!(
        other.contains("there is no node other that can run an agent"),
        "{other}"
    );
    assert!(errors(&["--value", "cpu_load_1_min=3"]).contains("their rules use cpu_total_usage"));
    assert!(errors(&["-f", "/no/such/file"]).contains("failed to read /no/such/file"));
    fs::write(server.dir.path().join("config"), "{}").unwrap();
    assert!(errors(&[]).contains("kubeconfig"));
    let gone = Path::new("/no/such/config");
    assert!(errors(&["--kubeconfig", gone.to_str().unwrap()]).contains("kubeconfig"));
}

#[test]
fn five_hundred_kubelets_are_queried_concurrently() {
    let server = Server::start(|path| {
        if path.contains(SUMMARY) {
            std::thread::park_timeout(std::time::Duration::from_millis(200));
        }
        let many: Vec<_> = (0..500)
            .map(|index| node(&format!("node{index:03}")))
            .collect();
        if path.contains("/api/v1/nodes?") {
            assert!(
                path.contains("windows"),
                "as the controller lists them: {path}"
            );
            Some(list(&many))
        } else {
            cluster(path)
        }
    });
    #[expect(clippy::disallowed_methods, reason = "a deadline of a test")]
    let started = std::time::Instant::now();
    let shown = text(&server.preview(&[]).stdout);
    assert!(
        started.elapsed() < std::time::Duration::from_secs(20),
        "{:?}",
        started.elapsed()
    );
    assert!(
        shown.ends_with("0 of 500 nodes over a threshold\n"),
        "{shown}"
    );
}
