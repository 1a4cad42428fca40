//! Certificates in files that another program renews, such as cert-manager: clients notice nothing.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::api_support::aggregation::NODE_METRICS;
use crate::api_support::{
    ControlPlane, Controller, Process, aggregation, free_port, lease_namespace, reporter,
};
use k8s_openapi::ByteString;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
};
use rustls::ClientConfig;
use serde_json::Value;
use time::OffsetDateTime;

const TIMEOUT: Duration = Duration::from_mins(2);
const API_SERVICE: &str = "v1alpha1.metrics.plimsoll.dev";
/// Name of the agents' CA bundle in the chart.
const BUNDLE: &str = "plimsoll-report-ca";
const ENDS: &str = "plimsoll_controller_certificate_expiration_timestamp_seconds";
const ERRORS: &str = "plimsoll_controller_certificate_errors_total";

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

/// A certificate, its key, and its expiry in seconds since 1970.
struct Pair {
    certificate: String,
    key: String,
    ends: i64,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        Self {
            pem: params.self_signed(&key).unwrap().pem(),
            issuer: Issuer::new(params, key),
        }
    }

    /// A replica's certificate like that of the chart, with this lifetime; its successor waits for a tenth of what
    /// remains.
    fn issue(&self, seconds: i64) -> Pair {
        let names = ["plimsoll-metrics", "plimsoll-report"];
        let names = names.map(|name| format!("{name}.default.svc")).to_vec();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        let now = wall();
        params.not_before = now - time::Duration::hours(1);
        params.not_after = now + time::Duration::seconds(seconds);
        let ends = params.not_after.unix_timestamp();
        let key = KeyPair::generate().unwrap();
        Pair {
            certificate: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key: key.serialize_pem(),
            ends,
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "certificates are of this time")]
fn wall() -> OffsetDateTime {
    std::time::SystemTime::now().into()
}

/// A Secret as the kubelet mounts it: one directory per version, and a symlink that is replaced.
struct Mounted(PathBuf);

impl Mounted {
    fn new(directory: PathBuf) -> Self {
        fs::create_dir(&directory).unwrap();
        Self(directory)
    }

    fn publish(&self, certificate: &str, key: &str, authority: &str) {
        let version = fs::read_dir(&self.0).unwrap().count();
        let data = self.0.join(format!("..{version}"));
        fs::create_dir(&data).unwrap();
        for (name, text) in [
            ("tls.crt", certificate),
            ("tls.key", key),
            ("ca.crt", authority),
        ] {
            fs::write(data.join(name), text).unwrap();
            let visible = self.0.join(name);
            if visible.symlink_metadata().is_err() {
                symlink(Path::new("..data").join(name), visible).unwrap();
            }
        }
        let (next, link) = (self.0.join("..data_tmp"), self.0.join("..data"));
        symlink(&data, &next).unwrap();
        fs::rename(next, link).unwrap();
    }
}

/// Ports of a replica.
#[derive(Clone, Copy)]
struct Ports {
    /// For API servers, if any.
    api: Option<u16>,
    /// For agents.
    reports: u16,
}

impl Ports {
    fn with_api(port: u16) -> Self {
        Self {
            api: Some(port),
            reports: free_port(),
        }
    }

    /// Without the aggregated API.
    fn without_api() -> Self {
        Self {
            api: None,
            reports: free_port(),
        }
    }
}

/// A replica with its certificate files.
struct Replica {
    controller: Controller,
    mounted: Mounted,
    name: String,
    ports: Ports,
}

impl Replica {
    /// With the rights that the chart grants when cert-manager issues certificates.
    fn start(plane: &ControlPlane, kubeconfig: &Path, name: &str, ports: Ports) -> Self {
        let mounted = Mounted::new(plane.kubeconfig.with_file_name(format!("{name}-tls")));
        Self {
            controller: run(plane, kubeconfig, name, ports, Some(&mounted)),
            mounted,
            name: name.to_owned(),
            ports,
        }
    }

    fn publish(&self, pair: &Pair, authority: &Authority) {
        self.mounted
            .publish(&pair.certificate, &pair.key, &authority.pem);
    }

    fn serves(&self, pair: &Pair) -> bool {
        #[allow(clippy::cast_possible_truncation, reason = "seconds since 1970")]
        let ends = self.controller.metric(ENDS) as i64;
        ends == pair.ends
    }

    /// Whether an agent with these authorities trusts it.
    fn is_trusted(&self, trust: &Arc<ClientConfig>) -> bool {
        let connected = reporter::connect(Arc::clone(trust), self.ports.reports);
        reporter::runtime().block_on(connected).is_some()
    }
}

fn run(
    plane: &ControlPlane,
    kubeconfig: &Path,
    name: &str,
    ports: Ports,
    mounted: Option<&Mounted>,
) -> Controller {
    let mut args = vec![
        "--pod-ip=127.0.0.1".to_owned(),
        format!("--report-listen=127.0.0.1:{}", ports.reports),
    ];
    let api = ports.api;
    args.extend(api.map(|port| format!("--metrics-api-listen=0.0.0.0:{port}")));
    for (option, file) in [
        ("tls-cert-file", "tls.crt"),
        ("tls-private-key-file", "tls.key"),
        ("tls-ca-file", "ca.crt"),
    ] {
        let path = mounted.map(|mounted| mounted.0.join(file));
        args.extend(path.map(|path| format!("--{option}={}", path.display())));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    plane.controller_by(kubeconfig, name, &args)
}

/// The authorities published to API servers.
fn known_to_servers(plane: &ControlPlane) -> String {
    let bundle = plane.get("apiservice", API_SERVICE)["spec"]["caBundle"].clone();
    let bytes = serde_json::from_value::<ByteString>(bundle);
    bytes.map_or_else(
        |_| String::new(),
        |bytes| String::from_utf8(bytes.0).unwrap(),
    )
}

/// The authorities published to agents.
fn known_to_agents(plane: &ControlPlane) -> String {
    let bundle = plane.get("configmap", BUNDLE);
    let pem = bundle["data"]["ca.crt"].as_str();
    pem.unwrap_or_default().to_owned()
}

fn holds(bundle: &str, authorities: &[&str]) -> bool {
    let base64 = |pem: &str| {
        pem.lines()
            .filter(|line| !line.starts_with('-'))
            .collect::<String>()
    };
    let bundle = base64(bundle);
    authorities
        .iter()
        .all(|authority| bundle.contains(&base64(authority)))
}

/// Whether all these authorities are published to both API servers and agents.
fn are_all_known(plane: &ControlPlane, authorities: &[&str]) -> bool {
    let bundles = [known_to_servers(plane), known_to_agents(plane)];
    bundles.iter().all(|bundle| holds(bundle, authorities))
}

/// Lists continuously without retries, and counts answers.
#[derive(Default)]
struct Traffic {
    ends: AtomicBool,
    answers: AtomicUsize,
}

impl Traffic {
    fn run(&self, plane: &ControlPlane) -> Vec<String> {
        let mut failures = Vec::new();
        while !self.ends.load(Ordering::Relaxed) {
            match plane.get_raw(NODE_METRICS) {
                Ok(list) if list.contains("node00") => {
                    self.answers.fetch_add(1, Ordering::Relaxed);
                }
                Ok(list) => failures.push(list),
                Err(error) => failures.push(error.to_string()),
            }
            thread::park_timeout(Duration::from_millis(100));
        }
        failures
    }

    /// Waits for this many more answers.
    fn wait_for(&self, plane: &ControlPlane, answers: usize) {
        let wanted = self.answers.load(Ordering::Relaxed) + answers;
        plane.until("requests are answered", TIMEOUT, |_| {
            self.answers.load(Ordering::Relaxed) >= wanted
        });
    }
}

/// A watch, and the lines that it prints.
fn watch(plane: &ControlPlane) -> (Process, mpsc::Receiver<String>) {
    let mut child = Command::new(plane.tool("kubectl"))
        .arg("--kubeconfig")
        .arg(&plane.kubeconfig)
        .args(["get", "--raw", &format!("{NODE_METRICS}?watch=true")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let output = BufReader::new(child.stdout.take().unwrap()).lines();
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        output
            .map_while(Result::ok)
            .try_for_each(|line| sender.send(line))
    });
    (Process(child), lines)
}

/// Waits for a line that contains `part`. On a slow machine leadership may change after there were `changes`, which
/// ends a watch.
fn expect_line(plane: &ControlPlane, lines: &mpsc::Receiver<String>, part: &str, changes: usize) {
    let mut last_line = String::new();
    while !last_line.contains(part) {
        match lines.recv_timeout(TIMEOUT) {
            Ok(line) => last_line = line,
            Err(error) => {
                let logs = logs(plane);
                assert!(
                    changes_in(&logs) > changes,
                    "{error} after {last_line}\n{logs}"
                );
                return;
            }
        }
    }
}

fn logs(plane: &ControlPlane) -> String {
    plane.log_of("one") + &plane.log_of("two")
}

/// Number of leadership changes.
fn changes_in(logs: &str) -> usize {
    logs.matches("leadership changed").count()
}

fn is_available(plane: &ControlPlane) -> bool {
    let service = plane.get("apiservice", API_SERVICE);
    let conditions = service["status"]["conditions"].as_array().cloned();
    conditions
        .unwrap_or_default()
        .iter()
        .any(|c| c["type"] == "Available" && c["status"] == "True")
}

/// A control plane that reaches replicas at these ports, and their kubeconfig.
fn plane(ports: [u16; 2]) -> Option<(ControlPlane, PathBuf)> {
    let plane = aggregation::plane(&ports)?;
    plane.nodes(&["node00".to_owned()]);
    let kubeconfig = kubeconfig_with_rights(&plane, "--set=metricsAPI.enabled=true");
    Some((plane, kubeconfig))
}

/// The kubeconfig of a controller that issues no certificates.
fn kubeconfig_with_rights(plane: &ControlPlane, value: &str) -> PathBuf {
    plane.apply(&[lease_namespace()]);
    plane.install(&[
        value,
        "--set=metricsAPI.certManager.enabled=true",
        "--show-only=templates/rbac-controller.yaml",
    ])
}

/// Two replicas with the chart's rights, the leader first.
fn replicas(ports: [u16; 2]) -> Option<(ControlPlane, PathBuf, [Replica; 2])> {
    let (plane, kubeconfig) = plane(ports)?;
    let replicas = start_both(&plane, &kubeconfig, ports.map(Ports::with_api));
    Some((plane, kubeconfig, replicas))
}

fn start_both(plane: &ControlPlane, kubeconfig: &Path, ports: [Ports; 2]) -> [Replica; 2] {
    let leader = Replica::start(plane, kubeconfig, "one", ports[0]);
    plane.until("it leads", TIMEOUT, |_| leader.controller.leads());
    let standby = Replica::start(plane, kubeconfig, "two", ports[1]);
    plane.until("the other one is there", TIMEOUT, |_| {
        standby.controller.http("/metrics").is_some()
    });
    [leader, standby]
}

fn is_ready(replica: &Replica) -> bool {
    replica
        .controller
        .http("/readyz")
        .is_some_and(|(code, _)| code == 200)
}

#[test]
fn certificates_and_authorities_rotate_without_a_failed_request() {
    let Some((plane, kubeconfig, mut replicas)) = replicas([free_port(), free_port()]) else {
        return;
    };
    reports_missing_files(&plane, &replicas);
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let first = old.issue(180);
    publish(&replicas, &first, &old);
    plane.until("the API is available", TIMEOUT, is_available);
    plane.until("both are ready", TIMEOUT, |_| replicas.iter().all(is_ready));
    plane.until("the authority is published", TIMEOUT, |plane| {
        are_all_known(plane, &[&old.pem])
    });
    let changes = changes_in(&logs(&plane));
    let (watching, lines) = watch(&plane);
    expect_line(&plane, &lines, "node00", changes);
    let traffic = Traffic::default();
    let (failures, last) = thread::scope(|scope| {
        let traffic_thread = scope.spawn(|| traffic.run(&plane));
        traffic.wait_for(&plane, 5);
        let second = rotates_authority(&plane, &replicas, [&old, &new], &first);
        traffic.wait_for(&plane, 5);
        keeps_last_valid(&plane, &replicas, &second, &new);
        publish(&replicas, &second, &new);
        traffic.wait_for(&plane, 10);
        traffic.ends.store(true, Ordering::Relaxed);
        (traffic_thread.join().unwrap(), second)
    });
    assert_eq!(failures, Vec::<String>::new());
    plane.kubectl(&["label", "node", "node00", "rotated=yes"]);
    expect_line(&plane, &lines, "rotated", changes);
    drop(watching);
    restarts_leader(&plane, &kubeconfig, &mut replicas, &last);
    let secrets = plane.kubectl(&["get", "secrets", "-o", "name"]);
    assert_eq!(secrets, "", "no Secret is created or readable");
}

fn publish(replicas: &[Replica], pair: &Pair, authority: &Authority) {
    for replica in replicas {
        replica.publish(pair, authority);
    }
}

fn serve(plane: &ControlPlane, replicas: &[Replica], pair: &Pair) {
    plane.until("all serve the certificate", TIMEOUT, |_| {
        replicas.iter().all(|replica| replica.serves(pair))
    });
}

fn reports_missing_files(plane: &ControlPlane, replicas: &[Replica]) {
    for replica in replicas {
        plane.until("the missing file is reported", TIMEOUT, |_| {
            let (code, text) = replica.controller.http("/readyz").unwrap();
            code == 503 && text.contains("tls.crt: No such file or directory")
        });
    }
}

/// Rotates to another authority, while both are published.
fn rotates_authority(
    plane: &ControlPlane,
    replicas: &[Replica],
    [old, new]: [&Authority; 2],
    first: &Pair,
) -> Pair {
    let second = new.issue(7200);
    // The standby first: it publishes its authority as well.
    replicas[1].publish(&second, new);
    plane.until("both authorities are published", TIMEOUT, |plane| {
        are_all_known(plane, &[&old.pem, &new.pem])
    });
    assert!(replicas[0].serves(first));
    replicas[0].publish(&second, new);
    serve(plane, replicas, &second);
    assert!(are_all_known(plane, &[&old.pem, &new.pem]), "for an hour");
    second
}

fn keeps_last_valid(
    plane: &ControlPlane,
    replicas: &[Replica],
    good: &Pair,
    authority: &Authority,
) {
    let before = |replica: &Replica| replica.controller.metric(ERRORS);
    let before: Vec<f64> = replicas.iter().map(before).collect();
    let other = authority.issue(7200);
    for replica in replicas {
        let mounted = &replica.mounted;
        mounted.publish(&good.certificate, &other.key, &authority.pem);
    }
    for (replica, before) in replicas.iter().zip(before) {
        plane.until("the key mismatch is reported", TIMEOUT, |plane| {
            let log = plane.log_of(&replica.name);
            log.contains("does not match the certificate in")
                && replica.controller.metric(ERRORS) > before
        });
        assert!(replica.serves(good));
    }
}

/// Restarts the leader with a certificate already in place; the standby takes over.
fn restarts_leader(
    plane: &ControlPlane,
    kubeconfig: &Path,
    replicas: &mut [Replica; 2],
    last: &Pair,
) {
    let [leader, standby] = replicas;
    drop(leader.controller.process.0.kill());
    drop(leader.controller.process.0.wait());
    plane.until("the other one leads", TIMEOUT, |_| {
        standby.controller.leads()
    });
    leader.controller = run(
        plane,
        kubeconfig,
        "again",
        leader.ports,
        Some(&leader.mounted),
    );
    plane.until("it serves again", TIMEOUT, |_| {
        leader.controller.http("/metrics").is_some() && leader.serves(last) && is_ready(leader)
    });
    plane.until("NodeMetrics are there", TIMEOUT, |plane| {
        plane.get_raw(NODE_METRICS).is_ok()
    });
}

#[test]
fn an_installation_can_switch_to_files_one_replica_at_a_time() {
    let ports = [free_port(), free_port()];
    let Some((plane, _)) = plane(ports) else {
        return;
    };
    // First with the rights of replicas that issue their own certificates.
    let listens = ports.map(Ports::with_api);
    let mut before = run(&plane, &plane.kubeconfig, "before", listens[0], None);
    plane.until("the API is available", TIMEOUT, is_available);
    let own = plane.get("secret", "plimsoll-metrics-ca")["data"]["ca.crt"].clone();
    let own: ByteString = serde_json::from_value(own).unwrap();
    let own = String::from_utf8(own.0).unwrap();
    plane.until("its authority is published", TIMEOUT, |plane| {
        are_all_known(plane, &[&own])
    });
    let authority = Authority::new("new");
    let after = Replica::start(&plane, &plane.kubeconfig, "after", listens[1]);
    after.publish(&authority.issue(7200), &authority);
    plane.until("both authorities are published", TIMEOUT, |plane| {
        are_all_known(plane, &[&own, &authority.pem])
    });
    assert!(before.http("/livez").is_some() && !after.controller.leads());
    drop(before.process.0.kill());
    drop(before.process.0.wait());
    plane.until("the other one leads", TIMEOUT, |_| after.controller.leads());
    assert!(are_all_known(&plane, &[&own, &authority.pem]));
    plane.kubectl(&[
        "delete",
        "endpointslice",
        &format!("plimsoll-metrics-{}", ports[0]),
    ]);
    plane.until("NodeMetrics are there", TIMEOUT, |plane| {
        plane.get_raw(NODE_METRICS).is_ok()
    });
}

#[test]
fn without_the_api_the_agents_config_map_survives_a_rotation() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    let kubeconfig = kubeconfig_with_rights(&plane, "--set=metricsAPI.enabled=false");
    let ports = [Ports::without_api(), Ports::without_api()];
    let mut replicas = start_both(&plane, &kubeconfig, ports);
    reports_missing_files(&plane, &replicas);
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let first = old.issue(180);
    publish(&replicas, &first, &old);
    plane.until("both are ready", TIMEOUT, |_| replicas.iter().all(is_ready));
    let before = reporter::trust(&plane);
    let are_known = |plane: &ControlPlane| holds(&known_to_agents(plane), &[&old.pem, &new.pem]);
    assert!(!are_known(&plane));

    let second = new.issue(7200);
    // The standby publishes its authority as well.
    replicas[1].publish(&second, &new);
    plane.until("both authorities are published", TIMEOUT, are_known);
    assert!(replicas[0].serves(&first) && replicas[0].is_trusted(&before));
    let both = reporter::trust(&plane);
    replicas[0].publish(&second, &new);
    serve(&plane, &replicas, &second);
    for replica in &replicas {
        assert!(replica.is_trusted(&both), "{}", replica.name);
        assert!(!replica.is_trusted(&before), "{}", replica.name);
    }

    let [leader, standby] = &mut replicas;
    drop(leader.controller.process.0.kill());
    drop(leader.controller.process.0.wait());
    plane.until("the other one leads", TIMEOUT, |_| {
        standby.controller.leads()
    });
    assert!(are_known(&plane), "for an hour");
    assert!(standby.is_trusted(&both) && is_ready(standby));
    let service = plane.get("apiservice", API_SERVICE);
    assert_eq!(service, Value::Null, "it is not needed");
    assert_eq!(plane.kubectl(&["get", "secrets", "-o", "name"]), "");
}

#[test]
fn a_certificate_file_needs_its_key_and_authorities() {
    let program = || Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    for args in [
        &["--tls-cert-file=a", "--metrics-api-listen=127.0.0.1:0"][..],
        &[
            "--tls-private-key-file=a",
            "--metrics-api-listen=127.0.0.1:0",
        ],
        &["--tls-ca-file=a", "--report-listen=127.0.0.1:0"],
    ] {
        let output = program().arg("controller").args(args).output().unwrap();
        let complaint = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{complaint}");
        assert!(
            complaint.contains("required arguments were not provided"),
            "{complaint}"
        );
    }
}
