//! Direct reports of an agent to replicas of the controller that answer well, badly or not at all, found by the
//! `EndpointSlice`s of a real API server.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_in_result,
    reason = "a test fails by panicking"
)]

mod agent_support;
mod api_support;
mod run_support;

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use agent_support::{HIGH, LOW, NODE, Node, closing, counted};
use api_support::aggregation::address;
use api_support::receiver::{
    Act, Authority, Receiver, Seen, acknowledge, arguments, publish, slice,
};
use api_support::{ControlPlane, lease_namespace, now};
use futures::future::join_all;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::{Api, Client};
use plimsoll::cluster::client::connect;
use plimsoll::cluster::watch::resource;
use plimsoll::crd::NodeMetric;
use plimsoll::crd::node_metric::ReportingAgent;
use plimsoll::crd::report::MOST_BYTES;
use plimsoll::node::clock::boot_time;
use plimsoll::node::direct_report::metrics::Reports;
use plimsoll::node::direct_report::{DirectReports, Links, Options};
use prometheus_client::registry::Registry;
use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// Whatever is waited for takes no longer, however busy the machine is.
const SOON: Duration = Duration::from_secs(90);

/// Not a test: what runs in the pods.
#[test]
#[ignore = "burns CPU until it is killed"]
fn burn() {
    loop {
        std::hint::spin_loop();
    }
}

/// An agent that has something new to tell every 300 ms.
struct Agent {
    client: Client,
    service: &'static str,
    address: IpAddr,
    authority: Authority,
    credentials: TempDir,
    acknowledged: watch::Receiver<bool>,
    /// It was not, since the last look.
    was_silent: Arc<AtomicBool>,
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
        let metrics = Reports::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let reports = DirectReports::start(
            client.clone(),
            options,
            boot_time(),
            leader_hears,
            metrics,
            Links::default(),
        );
        let (sequence, was_silent) = (
            Arc::new(AtomicI64::new(0)),
            Arc::new(AtomicBool::new(false)),
        );
        let measuring = tokio::spawn(measure(reports, Arc::clone(&sequence)));
        let watching = tokio::spawn(notice(acknowledged.clone(), Arc::clone(&was_silent)));
        Self {
            client: client.clone(),
            service,
            address: address().unwrap(),
            authority: Authority::make(),
            credentials,
            acknowledged,
            was_silent,
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

    /// One more replica, which is no endpoint yet.
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

    /// One more ready replica.
    async fn ready(&self) -> Receiver {
        let receiver = self.replica();
        self.endpoint(&receiver, true).await;
        receiver
    }

    async fn until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let begun = now();
        while !holds() {
            let service = self.service;
            assert!(
                begun.elapsed() < SOON,
                "{service}: not within {SOON:?}: {what}"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for so many more reports; these.
    async fn hears(&self, receiver: &Receiver, count: usize) -> Vec<Seen> {
        let before = receiver.seen().len();
        let enough = || receiver.seen().len() >= before + count;
        self.until("the replica hears of the node", enough).await;
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

async fn measure(reports: DirectReports, sequence: Arc<AtomicI64>) {
    loop {
        let mut metric = NodeMetric::default();
        metric.status.agent = Some(ReportingAgent {
            version: "1".to_owned(),
            boot_id: "boot".to_owned(),
            sequence: sequence.fetch_add(1, Ordering::Relaxed) + 1,
        });
        reports.tell(boot_time(), Arc::new(metric), true);
        sleep(Duration::from_millis(300)).await;
    }
}

async fn notice(mut acknowledged: watch::Receiver<bool>, was_silent: Arc<AtomicBool>) {
    while acknowledged.changed().await.is_ok() {
        if !*acknowledged.borrow_and_update() {
            was_silent.store(true, Ordering::Relaxed);
        }
    }
}

fn sequences(seen: &[Seen]) -> Vec<u64> {
    seen.iter().map(|seen| seen.report.sequence).collect()
}

async fn every_ready_replica_hears_all_over_one_connection(client: Client) {
    let agent = Agent::start(&client, "all");
    let (first, second) = (agent.ready().await, agent.ready().await);
    let unready = agent.replica();
    agent.endpoint(&unready, false).await;
    let (heard, also) = (agent.hears(&first, 4).await, agent.hears(&second, 4).await);
    for seen in heard.iter().chain(&also) {
        assert_eq!(seen.authorization, "Bearer one");
        let report = &seen.report;
        assert_eq!((&*report.node, &*report.boot_id), (NODE, "boot"));
        assert_eq!(report.interval_seconds, 10);
        assert!(report.agent_started_millis > 0);
    }
    assert!(sequences(&heard).is_sorted_by(|a, b| a < b), "{heard:?}");
    assert!(!*agent.acknowledged.borrow(), "no standby leader_hears");
    assert_eq!((first.connections(), second.connections()), (1, 1));
    assert_eq!((unready.connections(), agent.count("acknowledged")), (0, 0));
    assert!(agent.count("standby") >= 8);
    second.says(acknowledge(1, true));
    agent.is_acknowledged(true).await;
    assert!(agent.count("acknowledged") > 0);
    // One that is ready no more is told nothing more, and one that becomes so is.
    agent.endpoint(&first, false).await;
    agent.endpoint(&unready, true).await;
    agent.hears(&unready, 1).await;
    let before = first.seen().len();
    agent.hears(&second, 3).await;
    assert_eq!(first.seen().len(), before);
}

async fn a_failover_is_not_noticed_by_the_lease_but_a_lost_leader_is(client: Client) {
    let agent = Agent::start(&client, "failover");
    let (first, second) = (agent.ready().await, agent.ready().await);
    first.says(acknowledge(1, true));
    agent.is_acknowledged(true).await;
    agent.hears(&second, 1).await;
    // The leader hangs, as one that is stopped; soon the other leads.
    first.says(Act::Hang);
    agent.hears(&second, 2).await;
    second.says(acknowledge(2, true));
    agent.hears(&second, 2).await;
    first.says(acknowledge(1, true));
    agent.hears(&first, 2).await;
    let (acknowledged, standby) = (agent.count("acknowledged"), agent.count("standby"));
    agent.hears(&first, 2).await;
    assert!(agent.count("standby") > standby, "its term is over");
    assert!(agent.count("acknowledged") > acknowledged);
    assert!(!agent.was_silent.load(Ordering::Relaxed));
    // Nobody leads.
    first.says(acknowledge(2, false));
    second.says(acknowledge(2, false));
    agent.is_acknowledged(false).await;
    first.says(acknowledge(3, true));
    agent.is_acknowledged(true).await;
}

async fn who_asks_to_wait_is_left_alone(client: Client) {
    for (code, result, service) in [(429, "throttled", "busy"), (503, "unready", "cold")] {
        let agent = Agent::start(&client, service);
        let replica = agent.ready().await;
        agent.hears(&replica, 1).await;
        replica.says(Act::Answer(code, Some(4), "not now".to_owned()));
        agent
            .until("it is told to wait", || agent.count(result) >= 1)
            .await;
        let waiting = replica.seen().len();
        replica.says(acknowledge(1, true));
        agent.is_acknowledged(true).await;
        let seen = replica.seen();
        let apart = seen[waiting].at.duration_since(seen[waiting - 1].at);
        assert!(apart >= Duration::from_secs(4), "{apart:?}");
        // What was not taken is not told later: a newer one is.
        assert!(seen[waiting].report.sequence > seen[waiting - 1].report.sequence);
        assert_eq!(replica.connections(), 1, "an answer breaks no connection");
    }
}

async fn one_that_never_answers_is_given_up_and_holds_nobody_up(client: Client) {
    let agent = Agent::start(&client, "hanging");
    let (hanging, well) = (agent.ready().await, agent.ready().await);
    hanging.says(Act::Hang);
    agent.hears(&hanging, 1).await;
    agent.hears(&well, 4).await;
    agent
        .until("it is given up", || agent.count("timeout") >= 1)
        .await;
    hanging.says(acknowledge(1, true));
    agent.is_acknowledged(true).await;
    let seen = hanging.seen();
    let last = seen.last().unwrap();
    assert!(
        last.report.sequence > seen[0].report.sequence,
        "a newer one"
    );
    assert_eq!(hanging.most_under_way(), 1);
    assert!(hanging.connections() >= 2);
}

async fn a_rotated_token_and_authority_are_taken_up(client: Client) {
    let agent = Agent::start(&client, "rotating");
    let replica = agent.ready().await;
    agent.hears(&replica, 1).await;
    agent.publish("two", &agent.authority.pem);
    let has = |token: &'static str| {
        move |seen: &[Seen]| seen.last().is_some_and(|seen| seen.authorization == token)
    };
    let two = has("Bearer two");
    agent
        .until("the token is new", || two(&replica.seen()))
        .await;
    assert_eq!(replica.connections(), 1, "for a token none is broken");
    // The next authority is believed beside the old one before any certificate is its own.
    let next = Authority::make();
    let both = format!("{}{}", agent.authority.pem, next.pem);
    agent.publish("two", &both);
    agent
        .until("it connects anew", || replica.connections() >= 2)
        .await;
    replica.shows(&next, &agent.name());
    agent.publish("three", &next.pem);
    let three = has("Bearer three");
    agent
        .until("the authority is new", || three(&replica.seen()))
        .await;
    assert_eq!(agent.count("failed"), 0);
}

async fn nobody_is_told_who_can_not_prove_to_be_the_controller(client: Client) {
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

async fn what_is_no_acknowledgement_is_none(client: Client) {
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
        replica.says(Act::Answer(code, None, body));
        agent
            .until("it is counted", || agent.count(result) > before)
            .await;
        assert!(!*agent.acknowledged.borrow());
    }
    let odd = json!({"epoch": null, "leading": true, "nextIntervalSeconds": 4_000_000_000_u32, "mood": "good"});
    replica.says(Act::Answer(200, None, odd.to_string()));
    agent.is_acknowledged(true).await;
    let seen = agent.hears(&replica, 1).await;
    assert_eq!(
        seen[0].report.interval_seconds, 60,
        "no replica can silence it"
    );
}

async fn without_token_or_service_nothing_is_sent_until_they_are_there(client: Client) {
    let agent = Agent::without_credentials(&client, "later");
    let replica = agent.replica();
    sleep(Duration::from_secs(3)).await;
    assert_eq!(replica.connections(), 0, "there is no Service");
    agent.endpoint(&replica, true).await;
    agent
        .until("it misses the token", || agent.count("unconfigured") > 0)
        .await;
    assert_eq!(replica.connections(), 0);
    agent.publish("one", &agent.authority.pem);
    agent.hears(&replica, 2).await;
    assert_eq!(agent.count("failed"), 0);
    assert!(agent.sequence.load(Ordering::Relaxed) > 2);
}

#[tokio::test]
async fn reports_reach_who_should_hear_them_whatever_becomes_of_the_others() {
    if address().is_none() {
        return;
    }
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let client = connect(Some(&plane.kubeconfig)).await.unwrap();
    let it = || client.clone();
    let stories: Vec<futures::future::BoxFuture<'_, ()>> = vec![
        Box::pin(every_ready_replica_hears_all_over_one_connection(it())),
        Box::pin(a_failover_is_not_noticed_by_the_lease_but_a_lost_leader_is(
            it(),
        )),
        Box::pin(who_asks_to_wait_is_left_alone(it())),
        Box::pin(one_that_never_answers_is_given_up_and_holds_nobody_up(it())),
        Box::pin(a_rotated_token_and_authority_are_taken_up(it())),
        Box::pin(nobody_is_told_who_can_not_prove_to_be_the_controller(it())),
        Box::pin(what_is_no_acknowledgement_is_none(it())),
        Box::pin(without_token_or_service_nothing_is_sent_until_they_are_there(it())),
    ];
    join_all(stories).await;
}

const SERVICE: &str = "plimsoll-report";
const NAMESPACE: &str = "plimsoll-system";

/// Waits for something to hold, also for what takes several intervals of reports.
fn until(agent: &agent_support::Agent, what: &str, holds: impl FnMut() -> bool) {
    agent.until_within(SOON, what, holds);
}

fn lease_holds(node: &Node) -> Option<i64> {
    node.lease()["spec"]["leaseDurationSeconds"].as_i64()
}

/// A real agent that reports to `SERVICE`.
fn start(node: &Node, credentials: &Path) -> agent_support::Agent {
    node.agent(&arguments(NAMESPACE, SERVICE, credentials))
}

/// Until there are a Service and credentials it says so once, and goes on with its Lease.
fn waits_for_what_is_missing(
    node: &Node,
    agent: &agent_support::Agent,
    credentials: &Path,
    address: IpAddr,
) -> Receiver {
    until(agent, "there is a Lease", || lease_holds(node) == Some(40));
    let nobody = "no replica takes direct reports: the Lease tells of this node";
    until(agent, "it says that nobody takes reports", || {
        agent.said().contains(nobody)
    });
    let authority = Authority::make();
    let leader = Receiver::start(address, &authority, &format!("{SERVICE}.{NAMESPACE}.svc"));
    leader.says(acknowledge(7, true));
    node.plane
        .apply(&[slice(NAMESPACE, SERVICE, "a", leader.address, true)]);
    let missing = "mount a token of audience plimsoll.dev/report";
    until(agent, "it says what is missing", || {
        agent.said().contains(missing)
    });
    publish(credentials, &[("token", "t"), ("ca.crt", &authority.pem)]);
    until(agent, "the leader hears of it", || {
        !leader.seen().is_empty()
    });
    assert_eq!(agent.said().matches(missing).count(), 1, "said once");
    leader
}

fn tells_what_it_measured(node: &Node, agent: &agent_support::Agent, leader: &Receiver) {
    let first = leader.seen().remove(0);
    assert!(first.bytes <= MOST_BYTES, "{} bytes", first.bytes);
    let report = &first.report;
    assert_eq!(report.node, NODE);
    let status = &report.status;
    assert_eq!(status.agent.as_ref().unwrap().boot_id, report.boot_id);
    assert!(status.timestamp.is_some());
    until(agent, "the metrics tell it", || {
        let (_, text) = agent.http("/metrics").unwrap();
        let figures = [
            "plimsoll_agent_report_replicas 1",
            "plimsoll_agent_report_interval_seconds 10.0",
            r#"plimsoll_agent_reports_total{result="acknowledged"} "#,
        ];
        figures.iter().all(|figure| text.contains(figure))
    });
    // A change is told as it happens.
    node.machine.load.set(HIGH);
    let breached = |seen: &Seen| seen.report.status.breached == ["q/cpu"];
    until(agent, "it tells of the rule", || {
        leader.seen().iter().any(breached)
    });
    node.machine.load.set(LOW);
}

/// A later agent on the same boot is no replay of an earlier one.
fn counts_on_in_the_next_agent(node: &Node, credentials: &Path, leader: &Receiver) {
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
fn an_agent_renews_its_lease_seldom_while_the_leader_hears_of_it_directly() {
    let Some(address) = address() else { return };
    let Some(node) = Node::new() else { return };
    let namespace =
        |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    node.plane.apply(&[lease_namespace(), namespace(NAMESPACE)]);
    node.keep(&closing());
    let credentials = node.machine.path("credentials");
    std::fs::create_dir(&credentials).unwrap();
    let agent = start(&node, &credentials);
    let leader = waits_for_what_is_missing(&node, &agent, &credentials, address);
    until(&agent, "the Lease is relaxed", || {
        lease_holds(&node) == Some(240)
    });
    tells_what_it_measured(&node, &agent, &leader);
    // Nobody leads: the Lease is renewed as usual again, within the time after which the agent would count as silent.
    leader.says(acknowledge(7, false));
    until(&agent, "the Lease is as usual", || {
        lease_holds(&node) == Some(40)
    });
    leader.says(acknowledge(8, true));
    until(&agent, "the Lease is relaxed again", || {
        lease_holds(&node) == Some(240)
    });
    agent.kill();
    counts_on_in_the_next_agent(&node, &credentials, &leader);
}
