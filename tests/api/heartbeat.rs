//! The agent's Lease on a real API server, also with failures of the server or the network.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::agent_support::{NODE, Node, closing, counted};
use crate::api_support::faults::{Fault, Proxy};
use crate::api_support::{ControlPlane, LEASES, lease_namespace, now};
use futures::future::join_all;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::{Api, Client};
use plimsoll::agent::heartbeat::metrics::Heartbeats;
use plimsoll::agent::heartbeat::{Heartbeat, HeartbeatInput, INTERVAL, Options};
use plimsoll::clock::boot_time;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::crd::Summary;
use plimsoll::crd::summary::{ANNOTATION, Percent};
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::sleep;

const TIMEOUT: Duration = Duration::from_mins(1);

/// One agent's heartbeat behind its own proxy.
struct Agent {
    node: &'static str,
    api: Api<Lease>,
    proxy: Proxy,
    /// The sampling loop runs while this is true.
    turns: watch::Sender<bool>,
    threshold: watch::Sender<Option<Percent>>,
    acknowledged: watch::Sender<bool>,
    registry: Registry,
    _heartbeat: Heartbeat,
}

impl Agent {
    async fn start(client: &Client, node: &'static str) -> Self {
        let proxy = Proxy::start(client.clone()).await;
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, proxy.kubeconfig().to_string()).unwrap();
        let own = connect(&ClusterSource::file(file.path())).await.unwrap();
        let (input, received) = watch::channel(HeartbeatInput::default());
        let (turns, turning) = watch::channel(true);
        let (threshold, threshold_changes) = watch::channel(None);
        tokio::spawn(async move {
            loop {
                if *turning.borrow() {
                    input.send_modify(|input| {
                        input.last_run = Some(boot_time());
                        input.summary.cpu = Percent::of(42.0);
                        input.summary.cpu_threshold = *threshold_changes.borrow();
                    });
                }
                sleep(Duration::from_millis(200)).await;
            }
        });
        let acknowledged = watch::Sender::new(false);
        let options = Options {
            namespace: LEASES.to_owned(),
            node: node.to_owned(),
            relaxed: Duration::from_mins(1),
            stuck_after: Duration::from_secs(2),
        };
        let metrics = Heartbeats::default();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let taken = acknowledged.subscribe();
        let heartbeat = Heartbeat::start(own, options, received, taken, metrics);
        Self {
            node,
            api: Api::namespaced(client.clone(), LEASES),
            proxy,
            turns,
            threshold,
            acknowledged,
            registry,
            _heartbeat: heartbeat,
        }
    }

    async fn lease(&self) -> Option<Lease> {
        self.api.get_opt(self.node).await.unwrap()
    }

    async fn spec(&self) -> LeaseSpec {
        self.lease().await.unwrap().spec.unwrap()
    }

    async fn sequence(&self) -> u64 {
        let Some(lease) = self.lease().await else {
            return 0;
        };
        let annotations = lease.metadata.annotations.unwrap();
        Summary::parse(&annotations[ANNOTATION]).sequence.unwrap()
    }

    /// Waits for the next renewal; returns how long it took.
    async fn renewed(&self) -> Duration {
        self.renewed_after(self.sequence().await).await
    }

    /// Waits for a renewal after the one with this sequence, read before the trigger.
    async fn renewed_after(&self, before: u64) -> Duration {
        let started = now();
        while self.sequence().await == before {
            assert!(started.elapsed() < TIMEOUT, "{} is not renewed", self.node);
            sleep(Duration::from_millis(50)).await;
        }
        started.elapsed()
    }

    /// The methods of the calls since the last check, such as `GET POST`.
    fn calls(&self) -> String {
        let seen = self.proxy.take_seen();
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{LEASES}/leases");
        assert!(seen.iter().all(|(_, at)| at.starts_with(&path)), "{seen:?}");
        let methods: Vec<String> = seen.into_iter().map(|(method, _)| method).collect();
        methods.join(" ")
    }

    /// The next PUTs get this fault.
    fn fail_puts(&self, times: usize, fault: Fault) {
        let seen = AtomicUsize::new(0);
        self.proxy.respond_with(move |method, _| {
            let befalls = method == "PUT" && seen.fetch_add(1, Ordering::Relaxed) < times;
            befalls.then(|| fault.clone())
        });
    }

    fn count(&self, result: &str) -> u64 {
        counted(&self.registry, "heartbeats_total", result)
    }
}

async fn is_created_and_renewed_by_put_alone(client: Client) {
    let agent = Agent::start(&client, "steady").await;
    agent.renewed().await;
    assert_eq!(agent.calls(), "GET POST");
    let spec = agent.spec().await;
    assert_eq!(spec.holder_identity.as_deref(), Some("steady"));
    assert_eq!(spec.lease_duration_seconds, Some(40));
    for _ in 0..2 {
        let period = agent.renewed().await;
        assert!(period > INTERVAL / 2, "{period:?}");
    }
    assert_eq!(agent.calls(), "PUT PUT");
    assert_eq!((agent.count("created"), agent.count("renewed")), (1, 2));
}

async fn is_recreated_after_it_was_deleted(client: Client) {
    let agent = Agent::start(&client, "deleted").await;
    agent.renewed().await;
    agent.calls();
    agent
        .api
        .delete(agent.node, &kube::api::DeleteParams::default())
        .await
        .unwrap();
    agent.renewed().await;
    // An API server answers 409 for the version of a deleted object.
    assert_eq!(agent.calls(), "PUT GET POST");
    assert_eq!(agent.count("missing"), 2, "at the start, and now");
}

async fn is_created_at_once_if_not_found(client: Client) {
    let agent = Agent::start(&client, "not-found").await;
    agent.renewed().await;
    agent.calls();
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "message": "gone"});
    agent.fail_puts(1, Fault::Answer(404, None, status.to_string()));
    agent.renewed().await;
    assert_eq!(agent.calls(), "PUT POST GET PUT", "it existed");
}

async fn is_read_again_after_another_write(client: Client) {
    let agent = Agent::start(&client, "edited").await;
    agent.renewed().await;
    agent.calls();
    let patch = json!({"metadata": {"labels": {"theirs": "1"}}});
    let patch = kube::api::Patch::Merge(&patch);
    agent
        .api
        .patch(agent.node, &kube::api::PatchParams::default(), &patch)
        .await
        .unwrap();
    agent.renewed().await;
    assert_eq!(agent.calls(), "PUT GET PUT");
    let labels = agent.lease().await.unwrap().metadata.labels.unwrap();
    assert_eq!(labels["theirs"], "1");
    assert_eq!(agent.count("conflict"), 1);
}

async fn respects_retry_after(client: Client) {
    let agent = Agent::start(&client, "throttled").await;
    agent.renewed().await;
    agent.calls();
    agent.fail_puts(1, Fault::Answer(429, Some(4), "too many".to_owned()));
    let started = now();
    while agent.count("throttled") == 0 {
        assert!(started.elapsed() < TIMEOUT, "not throttled");
        sleep(Duration::from_millis(20)).await;
    }
    let waited = agent.renewed().await;
    assert!(waited > Duration::from_secs(2), "{waited:?}");
    assert_eq!(agent.calls(), "PUT PUT");
}

async fn retries_within_the_period_with_growing_pauses(client: Client) {
    let agent = Agent::start(&client, "failing").await;
    agent.renewed().await;
    agent.calls();
    agent.fail_puts(3, Fault::Answer(500, None, "boom".to_owned()));
    agent.renewed().await;
    assert_eq!(agent.calls(), "PUT PUT PUT PUT");
    assert_eq!(agent.count("failed"), 3);
    agent.fail_puts(usize::MAX, Fault::Answer(503, None, "away".to_owned()));
    sleep(Duration::from_secs(30)).await;
    let calls = agent.calls().split(' ').count();
    assert!((2..=12).contains(&calls), "{calls} calls in 30 s");
    agent.proxy.respond_with(|_, _| None);
    agent.renewed().await;
}

async fn gives_up_an_unanswered_call(client: Client) {
    let agent = Agent::start(&client, "hanging").await;
    agent.renewed().await;
    agent.calls();
    // The call succeeds, which shows only in the version of the next one.
    agent.fail_puts(1, Fault::NeverAnswer);
    agent.renewed().await;
    let waited = agent.renewed().await;
    assert!(waited > INTERVAL / 2, "{waited:?}");
    assert_eq!(agent.calls(), "PUT PUT GET PUT");
    assert_eq!(agent.count("timeout"), 1);
}

async fn stops_with_the_sampling_loop(client: Client) {
    let agent = Agent::start(&client, "stuck").await;
    agent.renewed().await;
    agent.turns.send_replace(false);
    sleep(Duration::from_secs(3)).await;
    agent.calls();
    sleep(Duration::from_secs(15)).await;
    assert_eq!(agent.calls(), "", "a stuck agent does not renew");
    let before = agent.sequence().await;
    agent.turns.send_replace(true);
    agent.renewed_after(before).await;
    assert_eq!(agent.calls(), "PUT");
}

async fn is_relaxed_only_while_reports_are_acknowledged(client: Client) {
    let agent = Agent::start(&client, "relaxed").await;
    agent.renewed().await;
    agent.acknowledged.send_replace(true);
    agent.renewed().await;
    assert_eq!(agent.spec().await.lease_duration_seconds, Some(240));
    agent.calls();
    // The first comes after a random 10 to 70 s, the next a minute later. Otherwise there would be two.
    sleep(Duration::from_secs(25)).await;
    let calls = agent.calls();
    assert!(calls.is_empty() || calls == "PUT", "once a minute: {calls}");
    let before = agent.sequence().await;
    agent.threshold.send_replace(Percent::of(75.0));
    let took = agent.renewed_after(before).await;
    assert!(
        took < Duration::from_secs(10),
        "a new threshold took {took:?}"
    );
    assert_eq!(agent.calls(), "PUT");
    let before = agent.sequence().await;
    agent.acknowledged.send_replace(false);
    let took = agent.renewed_after(before).await;
    assert!(took < Duration::from_secs(30), "not in a minute: {took:?}");
    assert_eq!(agent.spec().await.lease_duration_seconds, Some(40));
    agent.renewed().await;
    assert_eq!(agent.calls(), "PUT PUT");
}

#[tokio::test]
async fn a_lease_is_renewed_despite_failing_calls() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.apply(&[lease_namespace()]);
    let client = plane.connect().await;
    let it = || client.clone();
    let stories: Vec<futures::future::BoxFuture<'_, ()>> = vec![
        Box::pin(is_created_and_renewed_by_put_alone(it())),
        Box::pin(is_recreated_after_it_was_deleted(it())),
        Box::pin(is_created_at_once_if_not_found(it())),
        Box::pin(is_read_again_after_another_write(it())),
        Box::pin(respects_retry_after(it())),
        Box::pin(retries_within_the_period_with_growing_pauses(it())),
        Box::pin(gives_up_an_unanswered_call(it())),
        Box::pin(stops_with_the_sampling_loop(it())),
        Box::pin(is_relaxed_only_while_reports_are_acknowledged(it())),
    ];
    join_all(stories).await;
}

fn summary(lease: &Value) -> Summary {
    let text = lease["metadata"]["annotations"][ANNOTATION].as_str();
    Summary::parse(text.unwrap_or_default())
}

#[test]
fn an_agent_renews_its_lease_and_releases_it_when_removed() {
    let Some(node) = Node::new() else { return };
    node.set_rules(&closing());
    let agent = node.agent(&[]);
    agent.until("it is ready", || agent.is_ready());
    let expected =
        "create the namespace plimsoll-node-lease, or name another with --lease-namespace";
    agent.until("it says what is missing", || {
        agent.output().contains(expected)
    });
    node.plane.apply(&[lease_namespace()]);
    agent.until("there is a Lease", || !node.lease().is_null());
    agent.until("the metrics show it", || {
        let (_, text) = agent.http("/metrics").unwrap();
        text.contains(r#"plimsoll_agent_heartbeats_total{result="created"} 1"#)
            && text.contains("plimsoll_agent_heartbeat_interval_seconds 10.0")
            && !text.contains("plimsoll_agent_heartbeat_age_seconds NaN")
    });
    agent.until("the summary shows the node's state", || {
        let shown = summary(&node.lease());
        shown.cpu.is_some() && shown.memory.is_some() && shown.rules == Some(1)
    });
    let there = node.lease();
    let owner = &there["metadata"]["ownerReferences"][0];
    assert_eq!(
        (&owner["kind"], &owner["name"]),
        (&json!("Node"), &json!(NODE))
    );
    assert_eq!(owner["uid"], json!(node.uid));
    assert_eq!(there["spec"]["holderIdentity"], NODE);
    // A successor continues with the same Lease.
    let before = summary(&there).sequence.unwrap();
    agent.kill();
    let agent = node.agent(&[]);
    agent.until("the next agent continues the sequence", || {
        summary(&node.lease()).sequence > Some(before)
    });
    agent.signal(nix::sys::signal::Signal::SIGINT);
    agent.until("it releases the Lease", || {
        let there = node.lease();
        !there.is_null() && there["spec"]["holderIdentity"].is_null()
    });
}

/// User and request of each write in the API server's audit log.
fn audited(log: &std::path::Path) -> Vec<(String, String)> {
    let text = std::fs::read_to_string(log).unwrap();
    let events = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let event = |event: Value| {
        let object = &event["objectRef"];
        let what = format!("{} {}", word(&event["verb"]), word(&object["resource"]));
        (word(&event["user"]["username"]), what)
    };
    events.map(event).collect()
}

#[test]
fn the_sample_audit_policy_logs_no_heartbeats_but_other_writers() {
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("audit.log");
    let policy = concat!(
        "--audit-policy-file=",
        env!("CARGO_MANIFEST_DIR"),
        "/examples/audit-policy.yaml"
    );
    let to: &'static str = format!("--audit-log-path={}", log.display()).leak();
    let Some(plane) = ControlPlane::start_with(vec![policy, to].leak()) else {
        return;
    };
    if !plane.is_own() {
        return;
    }
    let namespace =
        |name| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    let namespaces = [namespace("plimsoll"), lease_namespace()];
    plane.apply(&namespaces);
    plane.kubectl(&["create", "serviceaccount", "-n=plimsoll", "plimsoll-agent"]);
    let grant = "--serviceaccount=plimsoll:plimsoll-agent";
    let role = "--clusterrole=cluster-admin";
    plane.kubectl(&["create", "clusterrolebinding", "agent", role, grant]);
    let agent = plane.as_account("plimsoll-agent", &["-n=plimsoll"]);
    let agent = format!("--kubeconfig={}", agent.display());
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "worker", "namespace": LEASES},
    });
    let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "worker"}});
    plane.create(&[lease.clone(), node]);
    for _ in 0..3 {
        plane
            .try_kubectl(&["replace", "-f=-", &agent], &lease.to_string())
            .unwrap();
    }
    plane.kubectl(&["taint", "node", "worker", "key=value:NoSchedule", &agent]);
    plane
        .try_kubectl(&["replace", "-f=-"], &lease.to_string())
        .unwrap();
    plane.create(&[crate::api_support::policy(
        "PodQOS",
        "batch",
        &json!({"labelSelector": {}, "allowedActions": ["throttle"]}),
    )]);
    let all = audited(&log);
    let by = |user: &str| -> Vec<&str> {
        let events = all.iter().filter(|(who, _)| who == user);
        events.map(|(_, what)| &**what).collect()
    };
    let account = "system:serviceaccount:plimsoll:plimsoll-agent";
    assert_eq!(by(account), ["patch nodes"], "{all:?}");
    let admin = by("admin");
    for what in ["create leases", "update leases", "create podqoss"] {
        assert!(admin.contains(&what), "{what}: {all:?}");
    }
}
