//! Direct reports of an agent to replicas that answer, fail or hang, found by the `EndpointSlice`s of a real API server.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use crate::agent_support::{HIGH, LOW, NODE, Node, closing, counted};
use crate::api_support::aggregation::address;
use crate::api_support::receiver::{
    Act, Authority, Receiver, Seen, acknowledge, arguments, publish, slice,
};
use crate::api_support::{ControlPlane, lease_namespace, now};
use futures::future::join_all;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use plimsoll::agent::direct_report::metrics::DirectReportMetrics;
use plimsoll::agent::direct_report::{Links, Options, ReportTasks};
use plimsoll::clock::boot_time;
use plimsoll::cluster::watch::resource;
use plimsoll::crd::NodeMetric;
use plimsoll::crd::node_metric::ReportingAgent;
use plimsoll::crd::report::MAX_BYTES;
use prometheus_client::registry::Registry;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Timeout of waits, long enough for a busy machine.
const TIMEOUT: Duration = Duration::from_secs(90);

/// An agent with a new report every 300 ms.
struct Agent {
    client: Client,
    service: &'static str,
    address: IpAddr,
    authority: Authority,
    credentials: TempDir,
    acknowledged: watch::Receiver<bool>,
    /// It was not acknowledged at some time since the last check.
    was_unacknowledged: Arc<AtomicBool>,
    sequence: Arc<AtomicI64>,
    registry: Registry,
    tasks: [JoinHandle<()>; 2],
}

impl Agent {
    fn start(client: &Client, service: &'static str) -> Self {
        let agent = Self::without_credentials(client, service);
        agent.publish("one", &agent.authority.pem);
        agent
    }

    fn without_credentials(client: &Client, service: &'static str) -> Self {
        let credentials = tempfile::tempdir().unwrap();
        let (leader_hears, acknowledged) = watch::channel(false);
        let options = Options {
            service: service.to_owned(),
            namespace: "default".to_owned(),
            credentials: credentials.path().to_owned(),
            node: NODE.to_owned(),
        };
        let metrics = DirectReportMetrics::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let reports = ReportTasks::start(
            client.clone(),
            options,
            boot_time(),
            leader_hears,
            metrics,
            Links::default(),
        );
        let (sequence, was_unacknowledged) = (
            Arc::new(AtomicI64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let measuring = tokio::spawn(measure(reports, Arc::clone(&sequence)));
        let watching = tokio::spawn(watch_acknowledged(
            acknowledged.clone(),
            Arc::clone(&was_unacknowledged),
        ));
        Self {
            client: client.clone(),
            service,
            address: address().unwrap(),
            authority: Authority::make(),
            credentials,
            acknowledged,
            was_unacknowledged,
            sequence,
            registry,
            tasks: [measuring, watching],
        }
    }

    fn publish(&self, token: &str, authorities: &str) {
        let files = [("token", token), ("ca.crt", authorities)];
        publish(self.credentials.path(), &files);
    }

    fn name(&self) -> String {
        format!("{}.default.svc", self.service)
    }

    /// A new replica that is not an endpoint yet.
    fn replica(&self) -> Receiver {
        Receiver::start(self.address, &self.authority, &self.name())
    }

    async fn endpoint(&self, receiver: &Receiver, ready: bool) {
        let kind = resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices");
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), "default", &kind);
        let name = format!("{}-{}", self.service, receiver.address.port());
        let slice = slice("default", self.service, &name, receiver.address, ready);
        let params = PatchParams::apply("test").force();
        api.patch(&name, &params, &Patch::Apply(slice))
            .await
            .unwrap();
    }

    /// A new ready replica.
    async fn ready(&self) -> Receiver {
        let receiver = self.replica();
        self.endpoint(&receiver, true).await;
        receiver
    }

    async fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let started = now();
        while !holds() {
            let service = self.service;
            assert!(
                started.elapsed() < TIMEOUT,
                "{service}: not within {TIMEOUT:?}: {what}"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for `count` more reports and returns them.
    async fn receives(&self, receiver: &Receiver, count: usize) -> Vec<Seen> {
        let before = receiver.seen().len();
        let enough = || receiver.seen().len() >= before + count;
        self.until("the replica gets reports", enough).await;
        receiver.seen().split_off(before)
    }

    async fn is_acknowledged(&self, wanted: bool) {
        let acknowledged = || *self.acknowledged.borrow() == wanted;
        self.until(&format!("acknowledged is {wanted}"), acknowledged)
            .await;
    }

    fn count(&self, result: &str) -> u64 {
        counted(&self.registry, "reports_total", result)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn measure(reports: ReportTasks, sequence: Arc<AtomicI64>) {
    loop {
        let mut metric = NodeMetric::default();
        metric.status.agent = Some(ReportingAgent {
            version: "1".to_owned(),
            boot_id: "boot".to_owned(),
            sequence: sequence.fetch_add(1, Ordering::Relaxed) + 1,
        });
        reports.submit(boot_time(), Arc::new(metric), true);
        sleep(Duration::from_millis(300)).await;
    }
}

async fn watch_acknowledged(
    mut acknowledged: watch::Receiver<bool>,
    was_unacknowledged: Arc<AtomicBool>,
) {
    while acknowledged.changed().await.is_ok() {
        if !*acknowledged.borrow_and_update() {
            was_unacknowledged.store(true, Ordering::Relaxed);
        }
    }
}

fn sequences(seen: &[Seen]) -> Vec<u64> {
    seen.iter().map(|seen| seen.report.sequence).collect()
}

async fn every_ready_replica_gets_all_reports_over_one_connection(client: Client) {
    let agent = Agent::start(&client, "all");
    let (first, second) = (agent.ready().await, agent.ready().await);
    let unready = agent.replica();
    agent.endpoint(&unready, false).await;
    let (by_first, by_second) = (
        agent.receives(&first, 4).await,
        agent.receives(&second, 4).await,
    );
    for seen in by_first.iter().chain(&by_second) {
        assert_eq!(seen.authorization, "Bearer one");
        let report = &seen.report;
        assert_eq!((&*report.node, &*report.boot_id), (NODE, "boot"));
        assert_eq!(report.interval_seconds, 10);
        assert!(report.agent_started_millis > 0);
    }
    assert!(
        sequences(&by_first).is_sorted_by(|a, b| a < b),
        "{by_first:?}"
    );
    assert!(
        !*agent.acknowledged.borrow(),
        "a standby acknowledges nothing"
    );
    assert_eq!((first.connections(), second.connections()), (1, 1));
    assert_eq!((unready.connections(), agent.count("acknowledged")), (0, 0));
    assert!(agent.count("standby") >= 8);
    second.respond_always(acknowledge(1, true));
    agent.is_acknowledged(true).await;
    assert!(agent.count("acknowledged") > 0);
    // A replica that is not ready any more gets no reports, and one that becomes ready does.
    agent.endpoint(&first, false).await;
    agent.endpoint(&unready, true).await;
    agent.receives(&unready, 1).await;
    let before = first.seen().len();
    agent.receives(&second, 3).await;
    assert_eq!(first.seen().len(), before);
}

async fn a_failover_does_not_change_the_lease_but_a_lost_leader_does(client: Client) {
    let agent = Agent::start(&client, "failover");
    let (first, second) = (agent.ready().await, agent.ready().await);
    first.respond_always(acknowledge(1, true));
    agent.is_acknowledged(true).await;
    agent.receives(&second, 1).await;
    // The leader hangs like a stopped process; then the other one leads.
    first.respond_always(Act::Hang);
    agent.receives(&second, 2).await;
    second.respond_always(acknowledge(2, true));
    agent.receives(&second, 2).await;
    first.respond_always(acknowledge(1, true));
    agent.receives(&first, 2).await;
    let (acknowledged, standby) = (agent.count("acknowledged"), agent.count("standby"));
    agent.receives(&first, 2).await;
    assert!(agent.count("standby") > standby, "it is a standby now");
    assert!(agent.count("acknowledged") > acknowledged);
    assert!(!agent.was_unacknowledged.load(Ordering::Relaxed));
    // No replica leads.
    first.respond_always(acknowledge(2, false));
    second.respond_always(acknowledge(2, false));
    agent.is_acknowledged(false).await;
    first.respond_always(acknowledge(3, true));
    agent.is_acknowledged(true).await;
}

async fn a_retry_after_is_respected(client: Client) {
    for (code, result, service) in [(429, "throttled", "busy"), (503, "unready", "cold")] {
        let agent = Agent::start(&client, service);
        let replica = agent.ready().await;
        agent.receives(&replica, 1).await;
        replica.respond_always(Act::Answer(code, Some(4), "not now".to_owned()));
        agent
            .until("it is asked to wait", || agent.count(result) >= 1)
            .await;
        let waiting = replica.seen().len();
        replica.respond_always(acknowledge(1, true));
        agent.is_acknowledged(true).await;
        let seen = replica.seen();
        let apart = seen[waiting].at.duration_since(seen[waiting - 1].at);
        assert!(apart >= Duration::from_secs(4), "{apart:?}");
        // A refused report is not sent later: a newer one is.
        assert!(seen[waiting].report.sequence > seen[waiting - 1].report.sequence);
        assert_eq!(replica.connections(), 1, "an answer breaks no connection");
    }
}

async fn a_replica_that_never_answers_blocks_no_other(client: Client) {
    let agent = Agent::start(&client, "hanging");
    let (hanging, working) = (agent.ready().await, agent.ready().await);
    hanging.respond_always(Act::Hang);
    agent.receives(&hanging, 1).await;
    agent.receives(&working, 4).await;
    agent
        .until("it is given up", || agent.count("timeout") >= 1)
        .await;
    hanging.respond_always(acknowledge(1, true));
    agent.is_acknowledged(true).await;
    let seen = hanging.seen();
    let last = seen.last().unwrap();
    assert!(
        last.report.sequence > seen[0].report.sequence,
        "a newer report"
    );
    assert_eq!(hanging.max_in_flight(), 1);
    assert!(hanging.connections() >= 2);
}

async fn a_rotated_token_and_ca_are_used(client: Client) {
    let agent = Agent::start(&client, "rotating");
    let replica = agent.ready().await;
    agent.receives(&replica, 1).await;
    agent.publish("two", &agent.authority.pem);
    let has = |token: &'static str| {
        move |seen: &[Seen]| seen.last().is_some_and(|seen| seen.authorization == token)
    };
    let two = has("Bearer two");
    agent
        .until("the token is new", || two(&replica.seen()))
        .await;
    assert_eq!(
        replica.connections(),
        1,
        "a new token needs no new connection"
    );
    // The next CA is trusted beside the old one before it issues certificates.
    let next = Authority::make();
    let both = format!("{}{}", agent.authority.pem, next.pem);
    agent.publish("two", &both);
    agent
        .until("it reconnects", || replica.connections() >= 2)
        .await;
    replica.set_certificate(&next, &agent.name());
    agent.publish("three", &next.pem);
    let three = has("Bearer three");
    agent
        .until("the CA is new", || three(&replica.seen()))
        .await;
    assert_eq!(agent.count("failed"), 0);
}

async fn no_report_goes_to_an_unauthenticated_replica(client: Client) {
    let agent = Agent::start(&client, "proven");
    let other_name = Receiver::start(agent.address, &agent.authority, "other.default.svc");
    let other_authority = Receiver::start(agent.address, &Authority::make(), &agent.name());
    agent.endpoint(&other_name, true).await;
    agent.endpoint(&other_authority, true).await;
    agent
        .until("both are tried", || {
            other_name.connections() > 1 && other_authority.connections() > 1
        })
        .await;
    assert!(agent.count("failed") >= 2);
    assert!(other_name.seen().is_empty() && other_authority.seen().is_empty());
}

async fn an_invalid_answer_is_no_acknowledgement(client: Client) {
    let agent = Agent::start(&client, "garbage");
    let replica = agent.ready().await;
    let long = format!("{{\"epoch\": 1, \"leading\": true{}}}", " ".repeat(1 << 20));
    let status =
        json!({"kind": "Status", "apiVersion": "v1", "code": 403, "message": "of another node"});
    for (code, body, result) in [
        (200, "<html>well</html>".to_owned(), "failed"),
        (200, String::new(), "failed"),
        (200, r#"{"leading": true}"#.to_owned(), "failed"),
        (200, long, "failed"),
        (403, status.to_string(), "refused"),
        (400, "\u{fffd}".to_owned(), "refused"),
        (302, String::new(), "refused"),
    ] {
        let before = agent.count(result);
        replica.respond_always(Act::Answer(code, None, body));
        agent
            .until("it is counted", || agent.count(result) > before)
            .await;
        assert!(!*agent.acknowledged.borrow());
    }
    let odd = json!({"epoch": null, "leading": true, "nextIntervalSeconds": 4_000_000_000_u32, "mood": "good"});
    replica.respond_always(Act::Answer(200, None, odd.to_string()));
    agent.is_acknowledged(true).await;
    let seen = agent.receives(&replica, 1).await;
    assert_eq!(
        seen[0].report.interval_seconds, 60,
        "the interval is limited"
    );
}

async fn nothing_is_sent_without_a_token_and_a_service(client: Client) {
    let agent = Agent::without_credentials(&client, "later");
    let replica = agent.replica();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(replica.connections(), 0, "there is no Service");
    agent.endpoint(&replica, true).await;
    agent
        .until("it has no token", || agent.count("unconfigured") > 0)
        .await;
    assert_eq!(replica.connections(), 0);
    agent.publish("one", &agent.authority.pem);
    agent.receives(&replica, 2).await;
    assert_eq!(agent.count("failed"), 0);
    assert!(agent.sequence.load(Ordering::Relaxed) > 2);
}

#[tokio::test]
async fn reports_reach_healthy_replicas_despite_failing_ones() {
    if address().is_none() {
        return;
    }
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let client = plane.connect().await;
    let it = || client.clone();
    let stories: Vec<futures::future::BoxFuture<'_, ()>> = vec![
        Box::pin(every_ready_replica_gets_all_reports_over_one_connection(
            it(),
        )),
        Box::pin(a_failover_does_not_change_the_lease_but_a_lost_leader_does(
            it(),
        )),
        Box::pin(a_retry_after_is_respected(it())),
        Box::pin(a_replica_that_never_answers_blocks_no_other(it())),
        Box::pin(a_rotated_token_and_ca_are_used(it())),
        Box::pin(no_report_goes_to_an_unauthenticated_replica(it())),
        Box::pin(an_invalid_answer_is_no_acknowledgement(it())),
        Box::pin(nothing_is_sent_without_a_token_and_a_service(it())),
    ];
    join_all(stories).await;
}

const SERVICE: &str = "plimsoll-report";
const NAMESPACE: &str = "plimsoll-system";

/// Waits for a condition, long enough for several report intervals.
fn until(agent: &crate::agent_support::Agent, what: &str, holds: impl FnMut() -> bool) {
    agent.until_within(TIMEOUT, what, holds);
}

fn lease_holds(node: &Node) -> Option<i64> {
    node.lease()["spec"]["leaseDurationSeconds"].as_i64()
}

/// A real agent that reports to `SERVICE`.
fn start(node: &Node, credentials: &Path) -> crate::agent_support::Agent {
    node.agent(&arguments(NAMESPACE, SERVICE, credentials))
}

/// Without a Service and credentials it logs that once and renews its Lease.
fn logs_what_is_missing(
    node: &Node,
    agent: &crate::agent_support::Agent,
    credentials: &Path,
    address: IpAddr,
) -> Receiver {
    until(agent, "there is a Lease", || lease_holds(node) == Some(40));
    let no_replica = "no replica accepts direct reports: only the Lease is renewed";
    until(agent, "it says that no replica accepts reports", || {
        agent.output().contains(no_replica)
    });
    let authority = Authority::make();
    let leader = Receiver::start(address, &authority, &format!("{SERVICE}.{NAMESPACE}.svc"));
    leader.respond_always(acknowledge(7, true));
    node.plane
        .apply(&[slice(NAMESPACE, SERVICE, "a", leader.address, true)]);
    let missing = "mount a token of audience plimsoll.dev/report";
    until(agent, "it says what is missing", || {
        agent.output().contains(missing)
    });
    publish(credentials, &[("token", "t"), ("ca.crt", &authority.pem)]);
    until(agent, "the leader gets its reports", || {
        !leader.seen().is_empty()
    });
    assert_eq!(agent.output().matches(missing).count(), 1, "said once");
    leader
}

fn reports_what_it_measured(node: &Node, agent: &crate::agent_support::Agent, leader: &Receiver) {
    let first = leader.seen().remove(0);
    assert!(first.bytes <= MAX_BYTES, "{} bytes", first.bytes);
    let report = &first.report;
    assert_eq!(report.node, NODE);
    let status = &report.status;
    assert_eq!(status.agent.as_ref().unwrap().boot_id, report.boot_id);
    assert!(status.timestamp.is_some());
    until(agent, "the metrics show it", || {
        let (_, text) = agent.http("/metrics").unwrap();
        let figures = [
            "plimsoll_agent_report_replicas 1",
            "plimsoll_agent_report_interval_seconds 10.0",
            r#"plimsoll_agent_reports_total{result="acknowledged"} "#,
        ];
        figures.iter().all(|figure| text.contains(figure))
    });
    // A change is reported as it happens.
    node.machine.load.set(HIGH);
    let breached = |seen: &Seen| seen.report.status.breached == ["q/cpu"];
    until(agent, "it reports the rule", || {
        leader.seen().iter().any(breached)
    });
    node.machine.load.set(LOW);
}

/// A later agent on the same boot continues the sequence.
fn continues_the_sequence_in_the_next_agent(node: &Node, credentials: &Path, leader: &Receiver) {
    let seen = leader.seen();
    let sequences = sequences(&seen);
    assert!(sequences.is_sorted(), "{sequences:?}");
    let last = &seen.last().unwrap().report;
    let next = start(node, credentials);
    until(&next, "the next agent reports", || {
        let report = leader.seen().pop().unwrap().report;
        report.agent_started_millis > last.agent_started_millis
            && report.sequence > last.sequence
            && report.boot_id == last.boot_id
    });
}

#[test]
fn the_lease_interval_is_longer_while_reports_are_acknowledged() {
    let Some(address) = address() else { return };
    let Some(node) = Node::new() else { return };
    let namespace =
        |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    node.plane.apply(&[lease_namespace(), namespace(NAMESPACE)]);
    node.set_rules(&closing());
    let credentials = node.machine.path("credentials");
    std::fs::create_dir(&credentials).unwrap();
    let agent = start(&node, &credentials);
    let leader = logs_what_is_missing(&node, &agent, &credentials, address);
    until(&agent, "the Lease is relaxed", || {
        lease_holds(&node) == Some(240)
    });
    reports_what_it_measured(&node, &agent, &leader);
    // No replica leads: the Lease is renewed as usual again, before the agent would count as unresponsive.
    leader.respond_always(acknowledge(7, false));
    until(&agent, "the Lease is as usual", || {
        lease_holds(&node) == Some(40)
    });
    leader.respond_always(acknowledge(8, true));
    until(&agent, "the Lease is relaxed again", || {
        lease_holds(&node) == Some(240)
    });
    agent.kill();
    continues_the_sequence_in_the_next_agent(&node, &credentials, &leader);
}
