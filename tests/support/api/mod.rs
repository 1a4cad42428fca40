//! An API server (etcd and kube-apiserver, from the test cluster's binaries), and controllers for it.
#![allow(dead_code, reason = "each test uses its part")]

pub mod aggregation;
pub mod caller;
mod client;
pub mod faults;
pub mod leader;
pub mod receiver;
pub mod reporter;
mod servers;

use std::fs;
use std::io::Write as _;
use std::mem;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::crd::KubernetesVersion;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::client::{ApiClient, path_of};
use self::servers::{CERTIFICATE, Servers};

/// Kills its process on drop.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// A control plane for one test. On drop it is restored to its first state, for the next test; one that was restarted or has
/// flags of its own, and that of a failed test, is stopped.
pub struct ControlPlane {
    pub kubeconfig: PathBuf,
    kubectl: PathBuf,
    client: ApiClient,
    /// For the test's files.
    dir: TempDir,
    /// None: the cluster of `PLIMSOLL_E2E_KUBECONFIG`.
    servers: Option<Servers>,
    bin: PathBuf,
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        if let Some(servers) = self.servers.take()
            && !std::thread::panicking()
        {
            servers.put_back();
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A free port, unique in this process. Outside the kernel's ephemeral range, so that no outgoing connection takes it
/// before it is listened on.
pub fn free_port() -> u16 {
    let count = PORTS.end - PORTS.start;
    let start = u16::try_from(process::id() % u32::from(count)).unwrap();
    let mut ports = (0..count).map(|index| PORTS.start + (start + index) % count);
    let is_ours = |port: &u16| {
        let any = Ipv4Addr::UNSPECIFIED;
        let Ok(claim) = UdpSocket::bind((any, *port)) else {
            return false;
        };
        let is_free = TcpListener::bind((any, *port)).is_ok();
        if is_free {
            mem::forget(claim);
        }
        is_free
    };
    ports.find(is_ours).expect("a free port")
}

/// Ports for tests, below the kernel's ephemeral range.
const PORTS: Range<u16> = 12_000..30_000;

/// Namespace of the agents' Leases.
pub const LEASES: &str = "plimsoll-node-lease";

pub fn lease_namespace() -> Value {
    json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASES}})
}

/// Names for this number of nodes, in order.
pub fn names(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("node{index:02}")).collect()
}

/// A policy of this kind.
pub fn policy(kind: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "ensurance.crane.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    })
}

/// Writes past the test harness, which captures the output of passing tests.
fn say(text: &str) {
    std::io::stderr().lock().write_all(text.as_bytes()).unwrap();
}

#[allow(clippy::disallowed_methods, reason = "settings of a test")]
fn setting(name: &str) -> Option<PathBuf> {
    std::env::var(name).ok().map(PathBuf::from)
}

#[allow(clippy::disallowed_methods, reason = "a deadline of a test")]
pub fn now() -> Instant {
    Instant::now()
}

impl ControlPlane {
    /// The cluster of `PLIMSOLL_E2E_KUBECONFIG`, or a new one. Prints a message and returns `None` if neither is
    /// possible.
    pub fn start() -> Option<Self> {
        Self::start_with(&[])
    }

    /// With additional flags for a new API server.
    pub fn start_with(flags: &'static [&'static str]) -> Option<Self> {
        let bin = setting("PLIMSOLL_E2E_BIN").unwrap_or_else(|| root().join("target/e2e/bin"));
        let kubectl = bin.join("kubectl");
        let missing = ["etcd", "kube-apiserver", "kubectl"]
            .into_iter()
            .find(|name| !bin.join(name).is_file());
        let dir = tempfile::tempdir().unwrap();
        if let Some(kubeconfig) = setting("PLIMSOLL_E2E_KUBECONFIG") {
            let plane = Self {
                client: ApiClient::new(&kubeconfig),
                kubeconfig,
                kubectl,
                dir,
                servers: None,
                bin,
            };
            plane.install_definitions();
            return Some(plane);
        }
        if let Some(missing) = missing {
            say(&format!(
                "\nNOT TESTED: {missing} is not in {}: run `make cluster-build`, or set PLIMSOLL_E2E_BIN to a directory \
                 with etcd, kube-apiserver and kubectl, or PLIMSOLL_E2E_KUBECONFIG to a cluster for tests\n",
                bin.display()
            ));
            return None;
        }
        let used = flags.is_empty().then(Servers::used).flatten();
        let is_new = used.is_none();
        let servers = used.unwrap_or_else(|| Servers::start(&bin, flags));
        let kubeconfig = dir.path().join("kubeconfig");
        fs::write(&kubeconfig, kubeconfig_of(servers.port).to_string()).unwrap();
        let mut plane = Self {
            client: ApiClient::new(&kubeconfig),
            kubeconfig,
            kubectl,
            dir,
            servers: Some(servers),
            bin,
        };
        if is_new {
            plane.until_ready();
            plane.install_definitions();
            plane.servers.as_mut().unwrap().remember();
        } else {
            plane.until_definitions_are_served();
        }
        Some(plane)
    }

    /// Installs our CRDs for its version.
    pub fn install_definitions(&self) {
        let definitions = self
            .version()
            .parse::<KubernetesVersion>()
            .unwrap()
            .definitions();
        self.apply(&definitions.map(|definition| json!(definition)));
        self.until_definitions_are_served();
    }

    fn until_definitions_are_served(&self) {
        self.until(
            "the definitions are served",
            Duration::from_mins(5),
            |plane| {
                let mut kinds = ["nodeqos", "podqos", "avoid", "nwm"].into_iter();
                kinds.all(|kind| plane.get_raw(path_of(kind).unwrap()).is_ok())
            },
        );
    }

    /// For example `v1.34.4`.
    fn version(&self) -> String {
        let version = self.get_raw("/version").unwrap();
        let version: Value = serde_json::from_str(&version).unwrap();
        version["gitVersion"].as_str().unwrap().to_owned()
    }

    /// Installs the chart in namespace default as Helm would, and returns the kubeconfig of its controller, with
    /// exactly the chart's rights.
    pub fn install_chart(&self) -> PathBuf {
        self.install(&[])
    }

    /// The same with more arguments of `helm template`, such as values or templates to show.
    pub fn install(&self, args: &[&str]) -> PathBuf {
        let rendered = Command::new(self.tool("helm"))
            .args([
                "template",
                "plimsoll",
                "--namespace=default",
                "--kube-version",
            ])
            .arg(self.version())
            .arg(root().join("charts/plimsoll"))
            // The tests create tokens instead of kubelets.
            .arg("--set=tokens.creators={admin}")
            .args(args)
            .output()
            .unwrap();
        assert!(rendered.status.success(), "{rendered:?}");
        let objects = String::from_utf8(rendered.stdout).unwrap();
        let apply = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
        self.try_kubectl(&apply, &objects).unwrap();
        self.as_account("plimsoll-controller", &[])
    }

    /// A kubeconfig with a token of this `ServiceAccount`, which is created with these arguments.
    pub fn as_account(&self, account: &str, args: &[&str]) -> PathBuf {
        let token = self.kubectl(&[&["create", "token", account][..], args].concat());
        let kubeconfig = fs::read_to_string(&self.kubeconfig).unwrap();
        let mut kubeconfig: Value = serde_json::from_str(&kubeconfig).unwrap();
        kubeconfig["users"][0]["user"]["token"] = token.trim().into();
        let name = format!("{account}{}.kubeconfig", args.concat());
        self.file(&name, &kubeconfig.to_string())
    }

    /// The front-proxy CA, key and certificate of our own API server.
    pub fn front_proxy(&self) -> aggregation::FrontProxy {
        aggregation::FrontProxy::of(self.servers.as_ref().unwrap().dir())
    }

    /// A client of the product.
    pub async fn connect(&self) -> kube::Client {
        connect(&ClusterSource::file(&self.kubeconfig))
            .await
            .unwrap()
    }

    /// The private key with which our own API server signs tokens, as PEM.
    pub fn token_key(&self) -> Vec<u8> {
        fs::read(self.servers.as_ref().unwrap().dir().join("sa.key")).unwrap()
    }

    /// Path of Helm or kubectl.
    pub fn tool(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }

    /// Whether the API server is our own, and may be stopped.
    pub fn is_own(&self) -> bool {
        self.servers.is_some()
    }

    /// Kills the API server.
    pub fn stop(&mut self) {
        self.servers.as_mut().unwrap().stop();
    }

    /// Restarts it.
    pub fn start_again(&mut self) {
        self.servers.as_mut().unwrap().start_again(&self.bin);
        self.until_ready();
    }

    fn until_ready(&self) {
        self.until("the API server is ready", Duration::from_mins(5), |plane| {
            plane.get_raw("/readyz").is_ok()
        });
    }

    /// Runs kubectl with this input.
    pub fn try_kubectl(&self, args: &[&str], input: &str) -> Result<String, String> {
        let mut child = Command::new(&self.kubectl)
            .arg("--kubeconfig")
            .arg(&self.kubeconfig)
            .arg("--request-timeout=60s")
            .args(args)
            .env("HOME", self.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child
            .stdin
            .take()
            .unwrap()
            .write_all(input.as_bytes())
            .unwrap();
        let output = child.wait_with_output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    }

    pub fn kubectl(&self, args: &[&str]) -> String {
        self.try_kubectl(args, "").unwrap()
    }

    /// Server-side apply of objects.
    pub fn apply(&self, objects: &[Value]) {
        for object in objects {
            self.try_apply(object).unwrap();
        }
    }

    /// The same for an object that the API server may refuse.
    pub fn try_apply(&self, object: &Value) -> Result<(), kube::Error> {
        self.client.apply(object)
    }

    /// Creates objects.
    pub fn create(&self, objects: &[Value]) {
        for object in objects {
            self.client.create(object).unwrap();
        }
    }

    /// The body at this path, as `kubectl get --raw` prints it.
    pub fn get_raw(&self, path: &str) -> Result<String, kube::Error> {
        self.client.get(path)
    }

    /// Whether aggregated discovery, which clients ask first, lists a resource of this name.
    pub fn discovers(&self, resource: &str) -> bool {
        let groups = self.client.discovery().unwrap_or_default();
        groups.contains(&format!("\"resource\":\"{resource}\""))
    }

    /// The object, or null.
    pub fn get(&self, what: &str, name: &str) -> Value {
        let found = match path_of(what) {
            Some(path) => self.get_raw(&format!("{path}/{name}")).ok(),
            None => self
                .try_kubectl(&["get", what, name, "-o", "json"], "")
                .ok(),
        };
        found.map_or(Value::Null, |text| serde_json::from_str(&text).unwrap())
    }

    pub fn list(&self, what: &str) -> Vec<Value> {
        let text = match path_of(what) {
            Some(path) => self.get_raw(path).unwrap(),
            None => self.kubectl(&["get", what, "-o", "json"]),
        };
        let list: Value = serde_json::from_str(&text).unwrap();
        list["items"].as_array().unwrap().clone()
    }

    /// Ready nodes of 8 CPUs and 16 GiB.
    pub fn nodes(&self, names: &[String]) {
        let node = |name: &String| json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"pool": "a"}}});
        self.apply(&names.iter().map(node).collect::<Vec<_>>());
        let status = json!({"status": {
            "capacity": {"cpu": "8", "memory": "16Gi"},
            "conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}],
        }});
        for name in names {
            self.patch_status("node", name, &status);
        }
    }

    /// Writes an agent's status.
    pub fn report(&self, node: &str, status: &Value) {
        self.patch_status("nwm", node, &json!({"status": status}));
    }

    fn patch_status(&self, what: &str, name: &str, body: &Value) {
        self.merge_patch(&format!("{}/{name}/status", path_of(what).unwrap()), body);
    }

    /// Patches the object at this path, and returns it.
    pub fn merge_patch(&self, path: &str, body: &Value) -> Value {
        let patched = self.client.merge_patch(path, body).unwrap();
        serde_json::from_str(&patched).unwrap()
    }

    /// Writes the status of an agent that enforces the current rules.
    pub fn report_enforcing(&self, node: &str, mut status: Value) {
        status["observedHash"] = self.get("nwm", node)["spec"]["hash"].clone();
        self.report(node, &status);
    }

    /// Waits until the condition holds, with a deadline.
    pub fn until(
        &self,
        what: &str,
        timeout: Duration,
        condition: impl Fn(&Self) -> bool,
    ) -> Duration {
        let started = now();
        while !condition(self) {
            assert!(
                started.elapsed() < timeout,
                "not within {timeout:?}: {what}\n{}",
                self.logs()
            );
            std::thread::park_timeout(Duration::from_millis(150));
        }
        started.elapsed()
    }

    fn logs(&self) -> String {
        let servers = self.servers.iter().map(Servers::dir);
        let directories = servers.chain([self.dir.path()]);
        let files = directories.flat_map(|directory| {
            let entries = fs::read_dir(directory).unwrap();
            entries.map(|entry| entry.unwrap().path())
        });
        let logs = files.filter(|path| path.extension().is_some_and(|e| e == "log"));
        let tail = |path: PathBuf| {
            let text = fs::read_to_string(&path).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            format!(
                "{}:\n{}\n",
                path.display(),
                lines[lines.len().saturating_sub(12)..].join("\n")
            )
        };
        logs.map(tail).collect()
    }

    /// Starts a controller.
    pub fn controller(&self, name: &str, args: &[&str]) -> Controller {
        self.controller_by(&self.kubeconfig, name, args)
    }

    /// Creates a file in the control plane's directory.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    /// The log of a process.
    pub fn log_of(&self, name: &str) -> String {
        fs::read_to_string(self.dir.path().join(format!("{name}.log"))).unwrap_or_default()
    }

    /// Starts a controller with this kubeconfig.
    pub fn controller_by(&self, kubeconfig: &Path, name: &str, args: &[&str]) -> Controller {
        let mut program = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        program.env("RUST_LOG", "plimsoll=debug,info");
        self.controller_of(program, kubeconfig, name, args)
    }

    /// Starts a controller from this command.
    pub fn controller_of(
        &self,
        mut program: Command,
        kubeconfig: &Path,
        name: &str,
        args: &[&str],
    ) -> Controller {
        let port = free_port();
        let process = program
            .args(["controller", "--namespace", "default", "--listen"])
            .arg(format!("127.0.0.1:{port}"))
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .args(args)
            .stderr(log(self.dir.path(), name))
            .spawn();
        Controller {
            process: Process(process.unwrap()),
            port,
        }
    }

    /// Checks metrics in the default format with `promtool check metrics`.
    pub fn promtool_passes(&self, metrics: &str) {
        let mut promtool = Command::new(self.kubectl.with_file_name("promtool"))
            .args(["check", "metrics"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = promtool.stdin.take().unwrap();
        stdin.write_all(metrics.as_bytes()).unwrap();
        drop(stdin);
        let output = promtool.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert!(metrics.lines().count() > 20, "{metrics}");
    }

    /// The processes of our own etcd and API server.
    pub fn processes(&self) -> Vec<u32> {
        self.servers.iter().flat_map(Servers::processes).collect()
    }
}

/// A controller.
pub struct Controller {
    pub process: Process,
    port: u16,
}

impl Controller {
    /// Gets a path from its HTTP server: code and body.
    pub fn http(&self, path: &str) -> Option<(u16, String)> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        std::io::Read::read_to_string(&mut stream, &mut answer).ok()?;
        let code = answer.split(' ').nth(1)?.parse().ok()?;
        let body = answer
            .split_once("\r\n\r\n")
            .map(|(_, body)| body.to_owned());
        Some((code, body?))
    }

    pub fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.http("/metrics").unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    /// Resident memory of the process.
    pub fn resident_kb(&self) -> usize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.0.id())).unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("VmRSS"))
            .unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    pub fn leads(&self) -> bool {
        self.http("/metrics").is_some() && self.metric("plimsoll_controller_leader ") > 0.5
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = i32::try_from(self.process.0.id()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }
}

fn log(dir: &Path, name: &str) -> fs::File {
    fs::File::create(dir.join(format!("{name}.log"))).unwrap()
}

fn kubeconfig_of(port: u16) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "users": [{"name": "admin", "user": {"token": "admin"}}],
        "clusters": [{
            "name": "test",
            "cluster": {
                "server": format!("https://127.0.0.1:{port}"),
                "certificate-authority-data": BASE64.encode(CERTIFICATE.cert.pem()),
            },
        }],
    })
}
