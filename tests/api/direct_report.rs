//! Direct reports of honest and malicious agents to controllers, with a real API server.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::api_support::reporter::{
    Forger, Reporter, account, connect, counted, full_body, in_parts, post, report, token, trust,
};
use crate::api_support::{ControlPlane, Controller, aggregation, caller, free_port, reporter};
use hyper::Request;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;
use rustls::ClientConfig;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const TIMEOUT: Duration = Duration::from_mins(1);

/// A control plane with nodes, whose aggregation layer reaches controllers at these ports.
fn plane(ports: &[u16]) -> Option<ControlPlane> {
    let plane = aggregation::plane(ports)?;
    plane.nodes(&["node00", "node01", "node02"].map(str::to_owned));
    account(&plane);
    Some(plane)
}

/// A controller that serves `NodeMetrics` at the first port, and takes reports at the second.
fn start(plane: &ControlPlane, kubeconfig: &Path, name: &str, ports: [u16; 2]) -> Controller {
    let [metrics, reports] = ports;
    let (metrics, reports) = (format!("0.0.0.0:{metrics}"), format!("127.0.0.1:{reports}"));
    let args = [
        "--metrics-api-listen",
        &metrics,
        "--pod-ip",
        "127.0.0.1",
        "--report-listen",
        &reports,
    ];
    plane.controller_by(kubeconfig, name, &args)
}

fn until_leads(plane: &ControlPlane, controller: &Controller) {
    plane.until("it leads", TIMEOUT, |_| controller.leads());
}

fn counts(controller: &Controller) -> BTreeMap<String, u64> {
    counted(&controller.http("/metrics").unwrap().1)
}

/// Sends a report until it is accepted, and returns the answer. Retries if it was too early, or nodes were not listed
/// yet.
fn until_accepted(plane: &ControlPlane, agent: &Reporter, token: &str, report: &Value) -> Value {
    let body = RefCell::new(Value::Null);
    plane.until("the report is accepted", TIMEOUT, |_| {
        let answer = agent.report(token, report);
        let is_accepted = answer.code == 200;
        assert!(
            is_accepted || [429, 503].contains(&answer.code),
            "{}",
            answer.body
        );
        assert_ne!(is_accepted, answer.headers.contains_key("retry-after"));
        body.replace(answer.body);
        is_accepted
    });
    body.into_inner()
}

/// The row printed by kubectl; empty if it fails: the next request may reach another replica.
fn row(plane: &ControlPlane, node: &str) -> Vec<String> {
    let row = plane.try_kubectl(&["get", "nm", node, "--no-headers"], "");
    let row = row.unwrap_or_default();
    row.split_whitespace().map(str::to_owned).collect()
}

fn has_cpu(plane: &ControlPlane, node: &str, cpu: &str) -> bool {
    row(plane, node).get(1).is_some_and(|shown| shown == cpu)
}

/// Two ready replicas, and an agent's connections to both.
struct Pair {
    leader: Controller,
    standby: Controller,
    to_leader: Reporter,
    to_standby: Reporter,
    /// API port of the leader.
    port: u16,
    /// Dropped last.
    plane: ControlPlane,
}

impl Pair {
    fn start() -> Option<Self> {
        let ports = [[free_port(), free_port()], [free_port(), free_port()]];
        let plane = plane(&[ports[0][0], ports[1][0]])?;
        let leader = start(&plane, &plane.kubeconfig, "leader", ports[0]);
        until_leads(&plane, &leader);
        let standby = start(&plane, &plane.kubeconfig, "standby", ports[1]);
        plane.until("the standby is ready", TIMEOUT, |_| {
            standby.http("/readyz").is_some_and(|(code, _)| code == 200)
        });
        // An API server checks availability once a minute, at one of the two addresses: it must have succeeded before
        // one replica is killed.
        aggregation::until_discovered(&plane);
        // The bundle has the standby's authority a moment after the leader's.
        let [to_leader, to_standby] = ports.map(|[_, reports]| {
            let connected = RefCell::new(None);
            plane.until("agents trust the replica", TIMEOUT, |plane| {
                connected.replace(Reporter::dial(&trust(plane), reports));
                connected.borrow().is_some()
            });
            connected.into_inner().unwrap()
        });
        Some(Self {
            leader,
            standby,
            to_leader,
            to_standby,
            port: ports[0][0],
            plane,
        })
    }
}

#[test]
fn at_most_40_percent_of_a_zone_may_have_the_soft_taint() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports[..1]) else {
        return;
    };
    let controller = start(&plane, &plane.kubeconfig, "controller", ports);
    until_leads(&plane, &controller);
    let trust = trust(&plane);
    let nodes = ["node00", "node01", "node02"];
    let tokens = nodes.map(|node| token(&plane, node));
    let agent = Reporter::new(&trust, ports[1]);
    let sequence = std::cell::Cell::new(0);
    // How many of the three nodes may have it; the load of each is in percent.
    let permitted = |loads: [f64; 3]| {
        sequence.set(sequence.get() + 1);
        let answers = nodes
            .iter()
            .zip(&tokens)
            .zip(loads)
            .map(|((node, token), load)| {
                let mut report = report(node, sequence.get(), 2000);
                report["status"]["load"]["percent"] = json!(load);
                let answer = until_accepted(&plane, &agent, token, &report);
                assert_eq!(answer["labelIntervalSeconds"], 5, "{answer}");
                answer["busy"] == true
            });
        answers.filter(|busy| *busy).count()
    };
    assert_eq!(permitted([99.5; 3]), 0, "nothing is known yet");
    plane.until("one of three may have it", TIMEOUT, |_| {
        let count = permitted([99.5; 3]);
        assert!(count <= 1, "{count} of 3");
        count == 1
    });
    // The controller decides again every second.
    for _ in 0..5 {
        thread::park_timeout(Duration::from_secs(1));
        assert_eq!(permitted([50.5; 3]), 1, "for five minutes");
    }
}

#[test]
fn kubectl_shows_what_an_agent_reports() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports[..1]) else {
        return;
    };
    let controller = start(&plane, &plane.kubeconfig, "controller", ports);
    until_leads(&plane, &controller);
    let (trust, token) = (trust(&plane), token(&plane, "node00"));
    let agent = Reporter::new(&trust, ports[1]);
    let acknowledged = until_accepted(&plane, &agent, &token, &report("node00", 1, 2000));
    assert_eq!(acknowledged["leading"], true);
    // A busy controller asks for reports less often.
    let seconds = acknowledged["nextIntervalSeconds"].as_u64().unwrap();
    assert!((10..=60).contains(&seconds), "{acknowledged}");
    assert!(acknowledged["epoch"].is_u64(), "{acknowledged}");
    aggregation::until_discovered(&plane);
    plane.until("the report is shown", TIMEOUT, |plane| {
        has_cpu(plane, "node00", "2000m")
    });
    let row = row(&plane, "node00").join(" ");
    assert!(row.starts_with("node00 2000m 25% 4096Mi 25% 32%"), "{row}");
    assert!(row.contains("Healthy") && !row.contains("unknown"), "{row}");
    let status = plane.get("nm", "node00")["status"].clone();
    let sent = report("node00", 1, 2000)["status"].clone();
    for part in [
        "timestamp",
        "windows",
        "load",
        "pressure",
        "topPods",
        "rules",
        "breached",
        "pods",
    ] {
        assert_eq!(status[part], sent[part], "{part}");
    }
    assert_eq!(status["conditions"][0]["reason"], "AgentReporting");
    // A replay is answered like the original, and changes nothing.
    let answer = agent.report(&token, &report("node00", 1, 2000));
    // The requested interval may have changed meanwhile.
    let [now, before] = [&answer.body, &acknowledged].map(|it| (&it["epoch"], &it["leading"]));
    assert_eq!((answer.code, now), (200, before), "{}", answer.body);
    // Older or conflicting reports are not acknowledged.
    for (sequence, millicores) in [(1, 7000), (0, 7000)] {
        let answer = agent.report(&token, &report("node00", sequence, millicores));
        assert_eq!(answer.code, 409, "{}", answer.body);
    }
    until_accepted(&plane, &agent, &token, &report("node00", 2, 4000));
    plane.until("the next report is shown", TIMEOUT, |plane| {
        has_cpu(plane, "node00", "4000m")
    });
    let counts = counts(&controller);
    let counted = ["stored", "replayed", "stale"].map(|result| counts[result]);
    assert_eq!(counted, [2, 1, 2]);
    // Nodes without reports are listed, with no invented values.
    assert_eq!(self::row(&plane, "node01")[8], "NoReport");
}

#[test]
fn reports_of_another_boot_or_from_the_future_are_refused() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports[..1]) else {
        return;
    };
    let controller = start(&plane, &plane.kubeconfig, "controller", ports);
    until_leads(&plane, &controller);
    let (trust, token) = (trust(&plane), token(&plane, "node00"));
    let agent = Reporter::new(&trust, ports[1]);
    let sent = |sequence: u64, boot: &str, started: u64| {
        let mut report = report("node00", sequence, 2000);
        report["bootID"] = json!(boot);
        report["agentStartedMillis"] = json!(started);
        report["uptimeMillis"] = json!(started + 60_000);
        report
    };
    until_accepted(&plane, &agent, &token, &sent(1, "boot", 5000));
    let later = 5000 + 3_600_000;
    let answer = agent.report(&token, &sent(2, "boot", later));
    assert_eq!(answer.code, 409, "{}", answer.body);
    let info = json!({"status": {"nodeInfo": {"bootID": "next"}}}).to_string();
    plane.kubectl(&[
        "patch",
        "node",
        "node00",
        "--subresource=status",
        "--type=merge",
        "-p",
        &info,
    ]);
    plane.until("the previous boot is refused", TIMEOUT, |_| {
        agent.report(&token, &sent(2, "boot", 5000)).code == 409
    });
    until_accepted(&plane, &agent, &token, &sent(1, "next", later));
    let counts = counts(&controller);
    assert_eq!(counts["started_ahead"], 1);
    assert_eq!(counts["other_boot"], 1);
}

#[test]
fn a_new_leader_shows_earlier_reports_at_once() {
    let Some(pair) = Pair::start() else { return };
    let Pair {
        plane,
        leader,
        standby,
        to_leader,
        to_standby,
        ..
    } = &pair;
    let token = token(plane, "node00");
    let report = report("node00", 1, 2000);
    let acknowledged = until_accepted(plane, to_leader, &token, &report);
    assert_eq!(acknowledged["leading"], true);
    let first = acknowledged["epoch"].as_u64().unwrap();
    let acknowledged = until_accepted(plane, to_standby, &token, &report);
    assert_eq!(
        (&acknowledged["epoch"], &acknowledged["leading"]),
        (&json!(null), &json!(false))
    );
    leader.signal(Signal::SIGKILL);
    until_leads(plane, standby);
    aggregation::until_discovered(plane);
    plane.until("the new leader shows earlier reports", TIMEOUT, |plane| {
        has_cpu(plane, "node00", "2000m")
    });
    let acknowledged = to_standby.report(&token, &report).body;
    assert_eq!(acknowledged["leading"], true);
    assert!(
        acknowledged["epoch"].as_u64().unwrap() > first,
        "{acknowledged}"
    );
}

#[test]
fn reports_to_a_standby_are_relayed_to_the_leader() {
    let Some(pair) = Pair::start() else { return };
    let Pair {
        plane,
        leader,
        to_leader,
        to_standby,
        ..
    } = &pair;
    let tokens = ["node00", "node01"].map(|node| token(plane, node));
    // One node that reported to the leader before, and one that never did.
    until_accepted(plane, to_leader, &tokens[0], &report("node00", 1, 2000));
    plane.until("the report is shown", TIMEOUT, |plane| {
        has_cpu(plane, "node00", "2000m")
    });
    for (node, token, sequence) in [("node00", &tokens[0], 2), ("node01", &tokens[1], 1)] {
        let acknowledged = until_accepted(plane, to_standby, token, &report(node, sequence, 3000));
        assert_eq!(acknowledged["leading"], false);
    }
    for node in ["node00", "node01"] {
        plane.until(
            "the leader shows the report of the standby",
            TIMEOUT,
            |plane| has_cpu(plane, node, "3000m"),
        );
    }
    assert!(leader.leads() && counts(leader)["relayed"] >= 2);
    assert!(plane.log_of("standby").contains("relaying them"));
    // Only replicas can relay reports: neither unknown clients nor API servers.
    let forged = json!([{"ageMillis": 0, "report": report("node02", 1, 9000)}]);
    let api_server = plane.front_proxy().issue("front-proxy-client");
    for certificate in [None, Some(api_server)] {
        let answer = relayed(pair.port, certificate, &forged);
        assert_eq!(answer, 404);
    }
    assert_eq!(row(plane, "node02")[8], "NoReport");
}

/// How a controller answers a client with this certificate that claims to be a relaying replica.
fn relayed(port: u16, certificate: Option<(String, String)>, reports: &Value) -> u16 {
    let request = Request::post("/v1/relay").header("x-plimsoll-forwarded", "1");
    let request = request.body(kube::client::Body::from(reports.to_string().into_bytes()));
    let asked = async {
        let client = caller::client(port, certificate);
        client.send(request.unwrap()).await.unwrap().status()
    };
    reporter::runtime().block_on(asked).as_u16()
}

#[test]
fn only_the_nodes_agent_can_report() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports[..1]) else {
        return;
    };
    let controller = start(&plane, &plane.kubeconfig, "controller", ports);
    until_leads(&plane, &controller);
    let (trust, valid_token) = (trust(&plane), token(&plane, "node00"));
    let agent = Reporter::new(&trust, ports[1]);
    until_accepted(&plane, &agent, &valid_token, &report("node00", 1, 2000));
    refuses_tokens(&plane, &agent, &valid_token, &controller);
    refuses_requests(&agent, &valid_token, &controller);
    until_accepted(&plane, &agent, &valid_token, &report("node00", 2, 3000));
    assert_eq!(counts(&controller)["stored"], 2);
    // Only the one token with an unknown key was reviewed by the API server.
    assert!(controller.metric("plimsoll_controller_report_token_reviews_total") < 1.5);
}

fn refuses_tokens(
    plane: &ControlPlane,
    agent: &Reporter,
    valid_token: &str,
    controller: &Controller,
) {
    let forger = Forger::new(plane, valid_token);
    let signed = |path: &str, value: Value| forger.token(&[(path, value)]);
    let (start, _) = valid_token.rsplit_once('.').unwrap();
    let other = signed("/claims/sub", json!("system:serviceaccount:default:other"));
    let (_, signature) = other.rsplit_once('.').unwrap();
    let no_node = signed("/claims/kubernetes.io", json!({"namespace": "default"}));
    let elsewhere = json!(["https://kubernetes.default.svc"]);
    let cases = [
        (
            401,
            "token_expired",
            signed("/claims/exp", json!(1_700_000_000)),
        ),
        (
            401,
            "token_not_yet",
            signed("/claims/nbf", json!(4_000_000_000_u32)),
        ),
        (401, "token_audience", signed("/claims/aud", elsewhere)),
        (
            401,
            "token_long_lived",
            signed("/claims/exp", json!(4_000_000_000_u32)),
        ),
        (401, "token_signature", format!("{start}.{signature}")),
        (
            401,
            "token_signature",
            signed("/header/kid", json!("another")),
        ),
        (401, "token_malformed", "admin".to_owned()),
        (401, "no_token", String::new()),
        (403, "other_account", other.clone()),
        (403, "no_node", no_node),
        (403, "other_node", token(plane, "node01")),
    ];
    for (code, result, token) in cases {
        let before = counts(controller).get(result).copied().unwrap_or(0);
        let answer = agent.report(&token, &report("node00", 9, 1));
        assert_eq!(answer.code, code, "{result}: {}", answer.body);
        assert_eq!(answer.body["kind"], "Status", "{result}");
        let message = answer.body["message"].as_str().unwrap();
        let by_the_clock = ["token_expired", "token_not_yet"].contains(&result);
        let names_the_cause = message.contains("the clock of the controller");
        assert_eq!(names_the_cause, by_the_clock, "{message}");
        assert_eq!(
            answer.headers.contains_key("www-authenticate"),
            code == 401,
            "{result}"
        );
        assert_eq!(counts(controller)[result], before + 1, "{result}");
    }
    let ghost = signed("/claims/kubernetes.io/node/name", json!("ghost"));
    let answer = agent.report(&ghost, &report("ghost", 1, 1));
    assert_eq!(answer.code, 404, "{}", answer.body);
    assert_eq!(counts(controller)["unknown_node"], 1);
}

fn refuses_requests(agent: &Reporter, valid_token: &str, controller: &Controller) {
    const MIB: usize = 1 << 20;
    let wrong = |value: Value| {
        let mut report = report("node00", 9, 1);
        report["status"]["usage"]["node"]["cpu"] = value;
        full_body(report.to_string())
    };
    let cases = [
        (
            400,
            "invalid",
            post(valid_token).body(full_body("garbage")).unwrap(),
        ),
        (
            400,
            "invalid",
            post(valid_token).body(wrong(json!("much"))).unwrap(),
        ),
        (
            413,
            "too_large",
            post(valid_token)
                .body(full_body(vec![b' '; 10 * MIB]))
                .unwrap(),
        ),
        (
            413,
            "too_large",
            post(valid_token).body(in_parts(10, MIB)).unwrap(),
        ),
        (
            404,
            "path",
            Request::post("https://c/v2/report")
                .body(full_body(""))
                .unwrap(),
        ),
        (
            405,
            "method",
            Request::get("https://c/v1/report")
                .body(full_body(""))
                .unwrap(),
        ),
    ];
    for (code, result, request) in cases {
        let before = counts(controller).get(result).copied().unwrap_or(0);
        let answer = agent.send(request).unwrap();
        assert_eq!(answer.code, code, "{result}: {}", answer.body);
        assert_eq!(counts(controller)[result], before + 1, "{result}");
    }
    // A body that is announced but never sent.
    let never = http_body_util::StreamBody::new(futures::stream::pending());
    let slow = post(valid_token).header("content-length", "100");
    let slow = slow
        .body(http_body_util::BodyExt::boxed_unsync(never))
        .unwrap();
    let answer = agent.send(slow).unwrap();
    assert_eq!((answer.code, counts(controller)["too_slow"]), (408, 1));
}

#[test]
fn without_the_keys_tokens_are_reviewed_by_the_api_server() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports[..1]) else {
        return;
    };
    // All rights except non-resource paths such as the keys.
    let all = json!([{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]);
    plane.apply(&[
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "all"}, "rules": all}),
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "all"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "all"},
            "subjects": [{"kind": "User", "name": "ann"}],
        }),
    ]);
    let text = std::fs::read_to_string(&plane.kubeconfig).unwrap();
    let kubeconfig = plane.file(
        "ann.kubeconfig",
        &text.replace("\"token\":\"admin\"", "\"token\":\"ann\""),
    );
    let controller = start(&plane, &kubeconfig, "controller", ports);
    until_leads(&plane, &controller);
    let (trust, valid_token) = (trust(&plane), token(&plane, "node00"));
    let agent = Reporter::new(&trust, ports[1]);
    until_accepted(&plane, &agent, &valid_token, &report("node00", 1, 2000));
    assert_eq!(
        agent.report(&valid_token, &report("node00", 1, 2000)).code,
        200
    );
    let reviews = "plimsoll_controller_report_token_reviews_total{result=\"ok\"}";
    assert!((controller.metric(reviews) - 1.0).abs() < 0.1, "once");
    assert!(
        controller.metric("plimsoll_controller_report_key_reads_total{result=\"error\"}") > 0.5
    );
    // Invalid tokens are refused there as well.
    let other = token(&plane, "node01");
    assert_eq!(agent.report(&other, &report("node00", 2, 1)).code, 403);
    let for_another = plane.kubectl(&["create", "token", "plimsoll-agent"]);
    let answer = agent.report(for_another.trim(), &report("node00", 2, 1));
    assert_eq!(
        (answer.code, counts(&controller)["token_audience"]),
        (401, 1)
    );
}

/// Idle connections.
fn idle_connections(port: u16, count: usize) -> Vec<TcpStream> {
    let connect = |_| TcpStream::connect(("127.0.0.1", port)).ok();
    (0..count).filter_map(connect).collect()
}

/// Incomplete HTTP/2 preambles. Returns when all were disconnected.
fn incomplete_preambles(trust: &Arc<ClientConfig>, port: u16) {
    let one = || async {
        let mut stream = connect(Arc::clone(trust), port).await?;
        let half = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00";
        stream.write_all(half).await.ok()?;
        stream.read_to_end(&mut Vec::new()).await.ok()
    };
    let all = futures::future::join_all((0..20).map(|_| one()));
    reporter::runtime().block_on(all);
}

#[test]
fn ten_thousand_connections_do_not_exhaust_memory_or_block_agents() {
    let ports = [free_port(), free_port()];
    let Some(plane) = plane(&ports[..1]) else {
        return;
    };
    let hard = getrlimit(Resource::RLIMIT_NOFILE).unwrap().1;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let controller = start(&plane, &plane.kubeconfig, "controller", ports);
    until_leads(&plane, &controller);
    let (trust, valid_token) = (trust(&plane), token(&plane, "node00"));
    let agent = Reporter::new(&trust, ports[1]);
    until_accepted(&plane, &agent, &valid_token, &report("node00", 1, 2000));
    let before = controller.resident_kb();
    let count = usize::try_from(hard)
        .unwrap_or(usize::MAX)
        .saturating_sub(1000)
        .min(10_000);
    let idle = thread::spawn(move || idle_connections(ports[1], count));
    // A connected agent can report all the time, and a new connection is accepted.
    let mut sequence = 2;
    while !idle.is_finished() {
        until_accepted(
            &plane,
            &agent,
            &valid_token,
            &report("node00", sequence, 2000),
        );
        sequence += 1;
        thread::park_timeout(Duration::from_millis(100));
    }
    let idle_connections = idle.join().unwrap();
    connects(&plane, &trust, ports[1]);
    until_accepted(
        &plane,
        &agent,
        &valid_token,
        &report("node00", sequence, 2000),
    );
    let grown = controller.resident_kb().saturating_sub(before);
    println!("{} connections: {grown} kB more", idle_connections.len());
    assert!(
        grown < 48 << 10,
        "{grown} kB for {} connections",
        idle_connections.len()
    );
    incomplete_preambles(&trust, ports[1]);
    plane.until("idle connections are closed", TIMEOUT, |_| {
        controller.metric("plimsoll_controller_report_connections{state=\"new\"}") < 0.5
    });
    for reason in ["too_many_new", "no_handshake", "too_slow"] {
        let name =
            format!("plimsoll_controller_report_connections_cut_total{{reason=\"{reason}\"}}");
        assert!(controller.metric(&name) > 0.5, "{reason}");
    }
    drop(idle_connections);
}

/// It may have to retry during the flood.
fn connects(plane: &ControlPlane, trust: &Arc<ClientConfig>, port: u16) {
    let token = token(plane, "node01");
    let report = report("node01", 1, 1000).to_string();
    plane.until("an honest agent gets in", TIMEOUT, |_| {
        let agent = Reporter::dial(trust, port);
        let request = || post(&token).body(full_body(report.clone())).unwrap();
        let answer = agent.map(|agent| agent.send(request()));
        matches!(answer, Some(Ok(answer)) if answer.code == 200)
    });
}
