//! etcd and kube-apiserver. Starting them takes ten seconds of CPU time, so the tests of one process pass them on.

use std::collections::HashMap;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{LazyLock, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};
use std::{fs, io};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rcgen::{CertifiedKey, KeyPair};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::ApiClient;
use super::{Process, aggregation, free_port, log, now};

/// The processes, killed on drop.
pub struct Servers {
    pub port: u16,
    etcd_port: u16,
    etcd: Process,
    apiserver: Option<Process>,
    /// Additional flags of the API server.
    flags: &'static [&'static str],
    /// The first value of each key, in Base64 as etcd's JSON API has both; empty: not for another test.
    first: HashMap<String, String>,
    /// When the API server certainly goes by the restored values.
    settled: Instant,
    dir: TempDir,
}

/// The certificate of all API servers of this process, which clients trust.
pub static CERTIFICATE: LazyLock<CertifiedKey<KeyPair>> =
    LazyLock::new(|| rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap());

/// Those of finished tests.
static USED: Mutex<Vec<Servers>> = Mutex::new(Vec::new());

/// What API servers write themselves, some of it after they are ready.
const OF_API_SERVERS: [&str; 6] = [
    "/registry/ipaddresses/10.0.0.1",
    "/registry/masterleases/",
    "/registry/leases/kube-system/apiserver-",
    "/registry/services/endpoints/default/kubernetes",
    "/registry/endpointslices/default/kubernetes",
    "/registry/configmaps/kube-system/extension-apiserver-authentication",
];

/// API servers read admission policies each second.
const ADMISSION_INTERVAL: Duration = Duration::from_millis(1500);

impl Servers {
    pub fn start(bin: &Path, flags: &'static [&'static str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (etcd_port, peer) = (free_port(), free_port());
        let etcd = start_etcd(bin, dir.path(), etcd_port, peer);
        let port = free_port();
        let apiserver = start_apiserver(bin, dir.path(), etcd_port, port, flags);
        Self {
            port,
            etcd_port,
            etcd,
            apiserver: Some(apiserver),
            flags,
            first: HashMap::new(),
            settled: now(),
            dir,
        }
    }

    /// Those of a finished test, restored.
    pub fn used() -> Option<Self> {
        let servers = USED.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        std::thread::park_timeout(servers.settled.saturating_duration_since(now()));
        Some(servers)
    }

    /// Remembers the state that tests begin with: without the events of the start.
    pub fn remember(&mut self) {
        self.first = self.entries();
        self.first
            .retain(|key, _| !text(key).starts_with("/registry/events/"));
        self.restore();
    }

    /// Restores the first state, for the next test.
    pub fn put_back(mut self) {
        if self.first.is_empty() || !self.flags.is_empty() {
            return;
        }
        self.restore();
        let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
        used.push(self);
    }

    fn restore(&mut self) {
        let current = self.entries();
        let etcd = ApiClient::of_etcd(self.etcd_port);
        let mut has_admission = false;
        for key in current.keys().filter(|key| !self.first.contains_key(*key)) {
            has_admission |= text(key).contains("admission");
            etcd.post("/v3/kv/deleterange", &json!({"key": key}))
                .unwrap();
        }
        for (key, first) in &self.first {
            if current.get(key) != Some(first) {
                etcd.post("/v3/kv/put", &json!({"key": key, "value": first}))
                    .unwrap();
            }
        }
        self.settled = now();
        if has_admission {
            self.settled += ADMISSION_INTERVAL;
        }
    }

    /// All keys of Kubernetes in etcd.
    fn entries(&self) -> HashMap<String, String> {
        let range =
            json!({"key": BASE64.encode("/registry/"), "range_end": BASE64.encode("/registry0")});
        let etcd = ApiClient::of_etcd(self.etcd_port);
        let answer = etcd.post("/v3/kv/range", &range).unwrap();
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let entry = |entry: &Value| {
            let field = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
            (field("key"), field("value"))
        };
        let entries = answer["kvs"].as_array().unwrap().iter().map(entry);
        entries
            .filter(|(key, _)| {
                let key = text(key);
                !OF_API_SERVERS.iter().any(|own| key.starts_with(own))
            })
            .collect()
    }

    /// Directory of the logs and certificates.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Kills the API server. These processes are for no other test.
    pub fn stop(&mut self) {
        self.first.clear();
        self.apiserver = None;
    }

    /// Restarts it.
    pub fn start_again(&mut self, bin: &Path) {
        let apiserver =
            start_apiserver(bin, self.dir.path(), self.etcd_port, self.port, self.flags);
        self.apiserver = Some(apiserver);
    }

    pub fn processes(&self) -> Vec<u32> {
        let own = [Some(&self.etcd), self.apiserver.as_ref()];
        own.into_iter()
            .flatten()
            .map(|process| process.0.id())
            .collect()
    }
}

fn text(key: &str) -> String {
    String::from_utf8(BASE64.decode(key).unwrap()).unwrap()
}

type Spawn = (Command, mpsc::Sender<io::Result<Child>>);

/// Starts processes that the kernel kills when this process ends: no destructor of a static runs then. The signal comes with the
/// end of the thread that started them, so one thread does that for all tests.
static SPAWNER: LazyLock<mpsc::Sender<Spawn>> = LazyLock::new(|| {
    let (sender, receiver) = mpsc::channel::<Spawn>();
    std::thread::spawn(move || {
        for (mut command, answer) in receiver {
            drop(answer.send(command.spawn()));
        }
    });
    sender
});

fn spawn(command: Command) -> Process {
    let (sender, receiver) = mpsc::channel();
    SPAWNER.send((command, sender)).unwrap();
    Process(receiver.recv().unwrap().unwrap())
}

/// The program, with its log in this directory.
fn command(bin: &Path, dir: &Path, name: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(bin.join(name));
    command.stdout(Stdio::null()).stderr(log(dir, name));
    command
}

fn start_etcd(bin: &Path, dir: &Path, client: u16, peer: u16) -> Process {
    let client = format!("http://127.0.0.1:{client}");
    let peer = format!("http://127.0.0.1:{peer}");
    let mut etcd = command(bin, dir, "etcd");
    etcd.args(["--name", "test", "--unsafe-no-fsync", "--data-dir"])
        .arg(dir.join("etcd"))
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("test={peer}")]);
    spawn(etcd)
}

fn start_apiserver(bin: &Path, dir: &Path, etcd: u16, port: u16, flags: &[&str]) -> Process {
    let (certificate, own_key) = (dir.join("apiserver.crt"), dir.join("apiserver.key"));
    fs::write(&certificate, CERTIFICATE.cert.pem()).unwrap();
    fs::write(&own_key, CERTIFICATE.signing_key.serialize_pem()).unwrap();
    let pair = KeyPair::generate().unwrap();
    let (key, public) = (dir.join("sa.key"), dir.join("sa.pub"));
    fs::write(&key, pair.serialize_pem()).unwrap();
    fs::write(&public, pair.public_key_pem()).unwrap();
    let tokens = dir.join("tokens.csv");
    fs::write(&tokens, "admin,admin,admin,system:masters\nann,ann,ann\n").unwrap();
    let mut apiserver = command(bin, dir, "kube-apiserver");
    apiserver
        // A fifth of its CPU time went into collecting garbage.
        .env("GOGC", "400")
        .arg(format!("--etcd-servers=http://127.0.0.1:{etcd}"))
        .args(["--bind-address=127.0.0.1", "--authorization-mode=RBAC"])
        .args([
            "--service-cluster-ip-range=10.0.0.0/24",
            "--disable-admission-plugins=ServiceAccount",
        ])
        .arg("--service-account-issuer=https://kubernetes.default.svc")
        .arg(format!("--secure-port={port}"))
        .arg(format!("--tls-cert-file={}", certificate.display()))
        .arg(format!("--tls-private-key-file={}", own_key.display()))
        .arg(format!("--token-auth-file={}", tokens.display()))
        .arg(format!("--service-account-key-file={}", public.display()))
        .arg(format!(
            "--service-account-signing-key-file={}",
            key.display()
        ))
        .args(aggregation::flags(dir))
        .args(flags);
    spawn(apiserver)
}
