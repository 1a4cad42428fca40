//! Shutdown, suspension and load of a controller as clients see it: watches end cleanly, discovery never waits.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::api_support::reporter::{Reporter, account, report, token, trust};
use crate::api_support::{ControlPlane, Controller, LEASES, free_port, lease_namespace};
use http_body_util::BodyExt;
use hyper::{Request, StatusCode};
use kube::client::Body;
use kube::{Client, Config};
use nix::sys::signal::Signal;
use plimsoll::clock;
use plimsoll::cluster::client::Server;
use plimsoll::cluster::election::Leadership;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::metrics_api::{self, ApiObserver, CertificateSource, ObjectNames, Options};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

const TIMEOUT: Duration = Duration::from_mins(1);
const LIST: &str = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics";
const WATCH: &str = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics?watch=1";

/// A controller with a direct client.
struct Replica {
    controller: Controller,
    client: Client,
}

impl Replica {
    fn start(plane: &ControlPlane, name: &str) -> Self {
        Self::start_with(plane, name, &[])
    }

    fn start_with(plane: &ControlPlane, name: &str, more: &[&str]) -> Self {
        let port = free_port();
        let listen = format!("127.0.0.1:{port}");
        let args = ["--metrics-api-listen", &listen, "--pod-ip", "127.0.0.1"];
        let args = [&args, more].concat();
        let mut config = Config::new(format!("https://{listen}").parse().unwrap());
        config.accept_invalid_certs = true;
        config.default_retry = false;
        config.auth_info.token = Some("admin".to_owned().into());
        Self {
            controller: plane.controller(name, &args),
            client: Client::try_from(config).unwrap(),
        }
    }

    /// The version of a list, once there is one.
    async fn version(&self) -> u64 {
        let listed = async {
            loop {
                let request = Request::get(LIST).body(Body::empty()).unwrap();
                if let Ok(answer) = self.client.send(request).await
                    && answer.status() == StatusCode::OK
                    && let Ok(body) = answer.into_body().collect().await
                {
                    let list: Value = serde_json::from_slice(&body.to_bytes()).unwrap();
                    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
                    return version.parse().unwrap();
                }
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(TIMEOUT, listed).await.expect("it answers")
    }

    /// A watch that has sent the first node.
    async fn watch(&self) -> Pin<Box<Body>> {
        let request = Request::get(WATCH).body(Body::empty()).unwrap();
        let answer = self.client.send(request).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let mut body = Box::pin(answer.into_body());
        let mut received = Vec::new();
        while !received.ends_with(b"\n") {
            let frame = timeout(TIMEOUT, body.frame())
                .await
                .expect("the watch starts");
            received.extend_from_slice(frame.unwrap().unwrap().data_ref().unwrap());
        }
        let event: Value = serde_json::from_slice(&received).unwrap();
        assert_eq!(event["object"]["metadata"]["name"], "node00");
        body
    }

    fn signal(&self, signal: Signal) {
        self.controller.signal(signal);
    }
}

/// A clean end has the last chunk; a broken connection is an error.
async fn ends_cleanly(watch: Pin<Box<Body>>) {
    let rest = timeout(TIMEOUT, watch.collect())
        .await
        .expect("the watch ends");
    let rest = rest.expect("it ends cleanly").to_bytes();
    assert!(
        rest.is_empty() || rest.ends_with(b"\n"),
        "it ended within an event: {rest:?}"
    );
}

/// Two replicas that serve one node, the leader first.
async fn replicas() -> Option<(ControlPlane, Replica, Replica)> {
    let plane = ControlPlane::start().filter(ControlPlane::is_own)?;
    plane.nodes(&["node00".to_owned()]);
    let leader = Replica::start(&plane, "leader");
    plane.until("it leads", TIMEOUT, |_| leader.controller.leads());
    let standby = Replica::start(&plane, "standby");
    leader.version().await;
    standby.version().await;
    // An API server serves a new CRD a moment after it lists it: a standby that is not ready takes over late.
    plane.until("both are ready", TIMEOUT, |_| {
        let ready = |replica: &Replica| {
            let answer = replica.controller.http("/readyz");
            answer.is_some_and(|(code, _)| code == 200)
        };
        ready(&leader) && ready(&standby)
    });
    Some((plane, leader, standby))
}

#[tokio::test]
async fn watches_end_cleanly_when_their_replica_shuts_down() {
    let Some((plane, mut leader, mut standby)) = replicas().await else {
        return;
    };
    let (own, passed_on) = (leader.watch().await, standby.watch().await);
    standby.signal(Signal::SIGTERM);
    ends_cleanly(passed_on).await;
    leader.signal(Signal::SIGTERM);
    ends_cleanly(own).await;
    for (name, replica) in [("leader", &mut leader), ("standby", &mut standby)] {
        let status = replica.controller.process.0.wait().unwrap();
        assert!(status.success(), "{status:?}\n{}", plane.log_of(name));
    }
}

#[tokio::test]
async fn forwarded_watches_end_when_the_leader_is_suspended() {
    let Some((plane, leader, standby)) = replicas().await else {
        return;
    };
    let before = standby.version().await;
    let watch = standby.watch().await;
    leader.signal(Signal::SIGSTOP);
    ends_cleanly(watch).await;
    let after = standby.version().await;
    assert!(after > before, "{after} after {before}");
    leader.signal(Signal::SIGCONT);
    // From its first answer on it forwards to the new leader.
    assert!(leader.version().await >= after);
    plane.until("it lost leadership", TIMEOUT, |_| {
        !leader.controller.leads()
    });
    assert!(standby.controller.leads());
}

#[tokio::test]
async fn a_list_without_a_leader_waits_for_the_next_one() {
    let Some((_plane, mut leader, standby)) = replicas().await else {
        return;
    };
    let before = standby.version().await;
    leader.controller.process.0.kill().unwrap();
    leader.controller.process.0.wait().unwrap();
    let request = Request::get(LIST).body(Body::empty()).unwrap();
    let answer = timeout(TIMEOUT, standby.client.send(request))
        .await
        .unwrap();
    assert_eq!(answer.unwrap().status(), StatusCode::OK);
    assert!(standby.version().await > before);
}

/// Waits until this replica answers at all.
async fn until_serving(replica: &Replica) {
    let answers = async {
        loop {
            let request = Request::get("/healthz").body(Body::empty()).unwrap();
            if replica.client.send(request).await.is_ok() {
                return;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(TIMEOUT, answers).await.expect("it serves");
}

#[tokio::test]
async fn a_forwarded_list_waits_for_the_leaders_warm_up() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    plane.nodes(&["node00".to_owned()]);
    account(&plane);
    let renewed = format!("{:.6}", clock::wall_time());
    let lease = json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": {"name": "node00", "namespace": LEASES},
        "spec": {"holderIdentity": "node00", "leaseDurationSeconds": 240, "renewTime": renewed},
    });
    plane.apply(&[lease_namespace(), lease]);
    let (token, port) = (token(&plane, "node00"), free_port());
    let reports = format!("127.0.0.1:{port}");
    let leader = Replica::start_with(&plane, "leader", &["--report-listen", &reports]);
    plane.until("it leads", TIMEOUT, |_| leader.controller.leads());
    let standby = Replica::start(&plane, "standby");
    until_serving(&standby).await;
    let request = Request::get(LIST).body(Body::empty()).unwrap();
    let mut asked = Box::pin(standby.client.send(request));
    // No report of the live agent has arrived.
    let early = timeout(Duration::from_secs(2), &mut asked).await;
    let answer = if let Ok(answer) = early {
        answer
    } else {
        let agent = Reporter::new(&trust(&plane), port);
        let acknowledged = agent.report(&token, &report("node00", 1, 2000));
        assert_eq!(acknowledged.code, 200, "{}", acknowledged.body);
        timeout(TIMEOUT, asked).await.expect("it answers")
    };
    assert_eq!(answer.unwrap().status(), StatusCode::OK);
}

struct IgnoreAll;

impl ApiObserver for IgnoreAll {
    fn answered(&self, _: &'static str, _: u16) {}
    fn certified(&self, _: Result<(), &str>) {}
    fn certificates_reconciled(&self, _: Option<jiff::Timestamp>, _: bool) {}
    fn front_proxy_loaded(&self, _: Result<(), &str>) {}
    fn ready(&self) -> Result<(), String> {
        Ok(())
    }
}

#[tokio::test]
async fn discovery_answers_while_the_controller_is_busy() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    let server = Server::find(&ClusterSource::file(&plane.kubeconfig))
        .await
        .unwrap();
    let port = free_port();
    let options = Options {
        listen: Some(format!("127.0.0.1:{port}").parse().unwrap()),
        names: ObjectNames {
            namespace: "default".to_owned(),
            service: "plimsoll-metrics".to_owned(),
            certificate: CertificateSource::Secret("plimsoll-metrics-ca".to_owned()),
            reports: None,
            api: true,
        },
        reports: None,
    };
    let (_leadership, elected) = watch::channel(Leadership::default());
    let rules = tokio::sync::mpsc::channel(1).0;
    let started = metrics_api::start(
        server,
        Arc::new(()),
        options,
        rules,
        elected,
        Arc::new(IgnoreAll),
    );
    let (_feed, serving) = started.unwrap();
    // From here on this thread, the controller's only one, does nothing but wait for kubectl.
    let address = format!("--server=https://127.0.0.1:{port}");
    let ask = [
        "get",
        "--raw",
        "/apis",
        "--insecure-skip-tls-verify",
        &address,
    ];
    plane.until("discovery answers", TIMEOUT, |plane| {
        let answer = plane.try_kubectl(&[&ask[..], &["--request-timeout=2s"]].concat(), "");
        answer.is_ok_and(|groups| groups.contains("metrics.plimsoll.dev"))
    });
    serving.end().await.unwrap();
}
