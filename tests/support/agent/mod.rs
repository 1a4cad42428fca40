//! A node on a real API server: pods with real cgroups below the test's own parent, a `/proc` whose load the test sets,
//! and real agents.
#![allow(dead_code, reason = "each test uses its part")]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::api_support::{ControlPlane, LEASES, Process, free_port};
use crate::run_support::{BINARY, Machine, argument, eventually};

pub const NODE: &str = "worker";
/// Timeout of waits, long enough for a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Loads above and below the threshold of [`throttling`].
pub const HIGH: u64 = 1900;
pub const LOW: u64 = 100;

/// A node.
pub struct Node {
    pub plane: ControlPlane,
    pub machine: Machine,
    pub uid: String,
}

impl Node {
    /// A registered node; `None` without API server binaries.
    pub fn new() -> Option<Self> {
        let node = Self::unregistered()?;
        Some(node.register())
    }

    pub fn unregistered() -> Option<Self> {
        let plane = ControlPlane::start()?;
        let machine = Machine::new();
        machine.load.set(LOW);
        machine.cgroup("kubepods/besteffort");
        Some(Self {
            plane,
            machine,
            uid: String::new(),
        })
    }

    pub fn register(mut self) -> Self {
        self.plane.nodes(&[NODE.to_owned()]);
        let node = self.plane.get("node", NODE);
        node["metadata"]["uid"]
            .as_str()
            .unwrap()
            .clone_into(&mut self.uid);
        self
    }

    /// Creates a pod of this node that burns CPU; returns its UID.
    pub fn burning_pod(&mut self, name: &str) -> String {
        self.burn_in(&pod(name, "batch"))
    }

    /// Creates the given pod and burns CPU in it; returns its UID.
    pub fn burn_in(&mut self, pod: &Value) -> String {
        let uid = self.pod(pod);
        let cgroup = self.machine.cgroup(&cgroup(&uid));
        self.machine.burn(&cgroup);
        uid
    }

    /// Creates a running pod; returns its UID.
    pub fn pod(&self, pod: &Value) -> String {
        self.plane.create(std::slice::from_ref(pod));
        let namespace = pod["metadata"]["namespace"].as_str().unwrap();
        let name = pod["metadata"]["name"].as_str().unwrap();
        let running = json!({"status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"}});
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/status");
        let patched = self.plane.merge_patch(&path, &running);
        patched["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    /// Creates the agent's own pod and its `DaemonSet`; returns the agent's arguments for them.
    pub fn with_daemon_set(&self) -> [&'static str; 4] {
        let template = json!({
            "metadata": {"labels": {"app": "agent"}},
            "spec": {"containers": [{"name": "agent", "image": "none"}]},
        });
        self.plane.create(&[json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"name": "agent", "namespace": "default"},
            "spec": {"selector": {"matchLabels": {"app": "agent"}}, "template": template},
        })]);
        let there = self.plane.get("daemonset", "agent");
        let mut own = pod("agent-x", "batch");
        own["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "apps/v1", "kind": "DaemonSet", "name": "agent", "controller": true,
            "uid": there["metadata"]["uid"],
        }]);
        self.pod(&own);
        ["--namespace", "default", "--pod-name", "agent-x"]
    }

    /// Writes the node's rules as the controller would.
    pub fn set_rules(&self, spec: &Value) {
        self.try_set_rules(spec).unwrap();
    }

    /// The same, if the API server may refuse it.
    pub fn try_set_rules(&self, spec: &Value) -> Result<(), kube::Error> {
        let mut spec = spec.clone();
        if spec["nodeUID"].is_null() {
            spec["nodeUID"] = self.uid.clone().into();
        }
        let mut hasher = DefaultHasher::new();
        spec.to_string().hash(&mut hasher);
        spec["hash"] = format!("{:016x}", hasher.finish()).into();
        let watermark = json!({
            "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark",
            "metadata": {"name": NODE}, "spec": spec,
        });
        self.plane.try_apply(&watermark)
    }

    /// The agent's Lease, or null.
    pub fn lease(&self) -> Value {
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{LEASES}/leases/{NODE}");
        let found = self.plane.get_raw(&path);
        found.map_or(Value::Null, |text| serde_json::from_str(&text).unwrap())
    }

    pub fn quota(&self, uid: &str) -> i64 {
        let text = self.machine.quota(&cgroup(uid));
        let first = text.split(' ').next().unwrap();
        if first == "max" {
            return -1;
        }
        first.parse().unwrap()
    }

    /// The node's taints as `key:effect`.
    pub fn taints(&self) -> Vec<String> {
        let node = self.plane.get("node", NODE);
        let taints = node["spec"]["taints"].as_array().cloned();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let taints = taints.unwrap_or_default().into_iter();
        taints
            .map(|taint| format!("{}:{}", text(&taint["key"]), text(&taint["effect"])))
            .collect()
    }

    /// The status of the `NodeWatermark`.
    pub fn status(&self) -> Value {
        self.plane.get("nwm", NODE)["status"].clone()
    }

    /// Our condition on the node.
    pub fn condition(&self) -> Value {
        let node = self.plane.get("node", NODE);
        let conditions = node["status"]["conditions"].as_array().cloned();
        let mut conditions = conditions.unwrap_or_default().into_iter();
        conditions
            .find(|it| it["type"] == "InterferenceIdentified")
            .unwrap_or_default()
    }

    pub fn is_throttled(&self, uid: &str) -> bool {
        self.quota(uid) > 0
    }

    /// An agent with the node's state directory.
    pub fn agent(&self, more: &[&str]) -> Agent {
        self.agent_in("state", more)
    }

    /// An agent with another state directory. Arguments in `more` replace the default ones.
    pub fn agent_in(&self, state: &str, more: &[&str]) -> Agent {
        let port = free_port();
        let log = self.machine.path(&format!("agent-{port}.log"));
        let mut command = Command::new(argument("--binary").unwrap_or_else(|| BINARY.to_owned()));
        command.args(["agent", "--node-name", NODE]);
        for (name, value) in [
            ("--sample-interval", PathBuf::from("200ms")),
            ("--evaluation-period", "1s".into()),
            ("--cgroup-root", "/sys/fs/cgroup".into()),
            ("--kubelet-cgroup-root", self.machine.parent.clone().into()),
            ("--proc-root", self.machine.path("proc")),
            ("--state-dir", self.machine.path(state)),
            ("--kubeconfig", self.plane.kubeconfig.clone()),
            ("--listen", format!("127.0.0.1:{port}").into()),
        ] {
            if !more.contains(&name) {
                command.arg(name).arg(value);
            }
        }
        let process = command
            .args(more)
            .env("RUST_LOG", "plimsoll=debug,info")
            .stderr(File::create(&log).unwrap())
            .spawn();
        Agent {
            process: Process(process.unwrap()),
            port,
            log,
        }
    }
}

/// Status and reason of the condition `Ready`.
pub fn ready(status: &Value) -> String {
    let conditions = status["conditions"].as_array().cloned();
    let mut conditions = conditions.unwrap_or_default().into_iter();
    let ready = conditions.find(|it| it["type"] == "Ready");
    let ready = ready.unwrap_or_default();
    let word = |field: &str| ready[field].as_str().unwrap_or_default().to_owned();
    format!("{} {}", word("status"), word("reason"))
}

fn cgroup(uid: &str) -> String {
    format!("kubepods/besteffort/pod{uid}")
}

/// A `BestEffort` pod of this node.
pub fn pod(name: &str, app: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "labels": {"app": app}},
        "spec": {"nodeName": NODE, "containers": [{"name": "main", "image": "none"}]},
    })
}

/// Throttles pods labelled `app: batch` each second above 1 CPU.
pub fn throttling() -> Value {
    json!({
        "rules": [rule("q/cpu", "slow")],
        "actions": [{
            "name": "slow", "coolDownSeconds": 1,
            "cpuThrottle": {"minCPURatio": 20, "stepCPURatio": 40},
        }],
        "podPolicies": [{
            "name": "batch",
            "labels": [{"key": "app", "operator": "In", "values": ["batch"]}],
            "allowed": ["throttle"],
        }],
    })
}

/// Disables scheduling above 1 CPU.
pub fn closing() -> Value {
    json!({
        "rules": [rule("q/cpu", "close")],
        "actions": [{"name": "close", "coolDownSeconds": 2, "disableScheduling": "NoSchedule"}],
    })
}

/// Evicts pods labelled `app: batch` above 1 CPU.
pub fn evicting() -> Value {
    json!({
        "rules": [rule("q/cpu", "drain")],
        "actions": [{
            "name": "drain", "coolDownSeconds": 2, "disableScheduling": "NoSchedule",
            "eviction": {"graceSeconds": 7, "maxPodsPerRound": 1},
        }],
        "podPolicies": [{
            "name": "batch",
            "labels": [{"key": "app", "operator": "In", "values": ["batch"]}],
            "allowed": ["eviction"],
        }],
    })
}

pub fn rule(id: &str, action: &str) -> Value {
    json!({
        "id": id, "metric": "cpu_total_usage", "watermark": 1000.0, "avoidanceThreshold": 1,
        "restoreThreshold": 1, "sampleTTLSeconds": 60, "action": action, "strategy": "Enforce",
    })
}

/// An agent.
pub struct Agent {
    pub process: Process,
    port: u16,
    log: PathBuf,
}

impl Agent {
    /// GETs a path of the agent's server; returns code and body.
    pub fn http(&self, path: &str) -> Option<(u16, String)> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let code = answer.split(' ').nth(1)?.parse().ok()?;
        let (_, body) = answer.split_once("\r\n\r\n")?;
        Some((code, body.to_owned()))
    }

    /// Waits for a condition.
    pub fn until(&self, what: &str, holds: impl FnMut() -> bool) {
        self.until_within(TIMEOUT, what, holds);
    }

    /// The same with another timeout.
    pub fn until_within(&self, most: Duration, what: &str, mut holds: impl FnMut() -> bool) {
        let begun = crate::api_support::now();
        while !holds() {
            assert!(
                begun.elapsed() < most,
                "not within {most:?}: {what}\n{}",
                self.output()
            );
            std::thread::park_timeout(Duration::from_millis(20));
        }
    }

    pub fn is_ready(&self) -> bool {
        self.http("/readyz").is_some_and(|(code, _)| code == 200)
    }

    /// Waits until `/readyz` says that the agent waits for something containing `words`.
    pub fn waits_for(&self, words: &str) {
        eventually(&format!("it waits for {words}"), || {
            let (code, body) = self.http("/readyz")?;
            (code == 503 && body.contains(words)).then_some(())
        });
    }

    pub fn output(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.process.0.id().cast_signed());
        kill(pid, signal).unwrap();
    }

    /// Ends it with SIGTERM; returns whether it succeeded, and its log.
    pub fn terminate(mut self) -> (bool, String) {
        self.signal(Signal::SIGTERM);
        let status = self.process.0.wait().unwrap();
        (status.success(), self.output())
    }

    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        self.process.0.wait().unwrap();
    }
}

/// The value of a counter for this result.
pub fn counted(registry: &Registry, counter: &str, result: &str) -> u64 {
    let mut text = String::new();
    encode(&mut text, registry).unwrap();
    let name = format!("{counter}{{result=\"{result}\"}} ");
    let mut lines = text.lines();
    let line = lines.find_map(|line| line.strip_prefix(&name));
    line.map_or(0, |count| count.parse().unwrap())
}
