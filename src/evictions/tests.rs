//! Requests to the leader and its answers, with a fake API server.

use std::future::pending;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use futures::future::join_all;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tower::{BoxError, service_fn};

use super::budget::Budget;
use super::*;
use crate::clock;
use crate::cluster::election::Term;
use crate::crd::eviction::{Delay, EvictionTarget, Key};

/// Enough for a very slow machine.
const TIMEOUT: Duration = Duration::from_mins(2);
/// The budgets' window, longer than any test.
const WINDOW: Duration = Duration::from_hours(1);

/// Answer to the POST of an Eviction. `None`: the connection breaks.
type Posted = Option<(u16, &'static str)>;

/// Code and body.
type Found = (u16, String);

/// State and behaviour of the fake API server.
#[derive(Default)]
struct ApiServer {
    answer: Posted,
    /// The pods whose eviction was posted.
    posted: Vec<String>,
    /// Whether all pods are terminating.
    terminates: bool,
    is_stopped: bool,
    /// The only node that is stopped.
    stopped_node: Option<&'static str>,
    /// Whether an emergency stop is created when an eviction is recorded.
    stops_when_recorded: bool,
    record: String,
}

impl ApiServer {
    fn answer(&mut self, method: &Method, path: &str, body: &[u8]) -> Result<Found, BoxError> {
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        Ok(match parts[..] {
            [.., "pods", name, "eviction"] => {
                self.posted.push(name.to_owned());
                let (code, body) = self.answer.ok_or("the connection broke")?;
                (code, body.to_owned())
            }
            [.., "pods", name] => (200, self.pod(name).to_string()),
            [.., "configmaps", "plimsoll-stop"] if self.is_stopped => {
                let annotations = json!({"plimsoll.dev/stop": "true"});
                let stop =
                    json!({"metadata": {"name": "plimsoll-stop", "annotations": annotations}});
                (200, stop.to_string())
            }
            [.., "configmaps", "plimsoll-stop"] if self.stopped_node.is_some() => {
                let node = self.stopped_node.unwrap_or_default();
                let stop = json!({"metadata": {"name": "plimsoll-stop"}, "data": {node: "why"}});
                (200, stop.to_string())
            }
            [.., "configmaps", "plimsoll-evictions"] if *method == Method::PATCH => {
                let written: Value = serde_json::from_slice(body)?;
                let record = written["data"]["evictions.json"].as_str();
                record.unwrap_or_default().clone_into(&mut self.record);
                self.is_stopped |= self.stops_when_recorded && self.record.contains("uid");
                let stored = json!({"metadata": {"resourceVersion": "1"}});
                (200, stored.to_string())
            }
            _ => {
                let status = json!({
                    "kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404,
                });
                (404, status.to_string())
            }
        })
    }

    fn pod(&self, name: &str) -> Value {
        let deleted = self.terminates.then_some("2026-01-01T00:00:00Z");
        json!({"metadata": {
            "name": name, "namespace": "shop", "uid": name, "resourceVersion": "1", "deletionTimestamp": deleted,
        }})
    }
}

/// A leader whose rules allow every eviction.
struct Leader {
    api_server: Arc<Mutex<ApiServer>>,
    evictions: Evictions,
}

impl Leader {
    /// With a fleet budget of one eviction, and large budgets otherwise.
    fn start(api_server: ApiServer) -> Self {
        let api_server = Arc::new(Mutex::new(api_server));
        let of = |evictions| Budget {
            evictions,
            window: WINDOW,
        };
        let budgets = Budgets {
            fleet: of(1),
            zone: of(100),
            node: of(100),
            namespace: of(100),
            owner: of(100),
        };
        let options = Options {
            budgets: Some(budgets),
            ..Options::unconnected()
        };
        let term = Term {
            epoch: 1,
            until: clock::boot_time() + WINDOW,
        };
        let (elected, leadership) = watch::channel(Leadership::new(Some(term), None));
        let (rules, mut queries) = mpsc::channel::<RuleQuery>(1);
        let (evictions, run) = start(client(&api_server), options, rules, leadership);
        tokio::spawn(run);
        tokio::spawn(async move {
            while let Some(query) = queries.recv().await {
                let grace = Duration::from_secs(30);
                query
                    .reply
                    .send(Ok(EvictionPermit { grace, zone: None }))
                    .ok();
            }
            drop(elected);
        });
        Self {
            api_server,
            evictions,
        }
    }

    fn api_server(&self) -> MutexGuard<'_, ApiServer> {
        self.api_server.lock().unwrap()
    }

    /// Asks until the leader has read its record and answers in time.
    async fn send(&self, node: &str, pod: &str) -> EvictionAnswer {
        static SEQUENCE: AtomicU64 = AtomicU64::new(0);
        loop {
            let request = EvictionRequest {
                key: Key {
                    boot_id: "b".to_owned(),
                    sequence: SEQUENCE.fetch_add(1, Ordering::Relaxed),
                },
                target: EvictionTarget {
                    namespace: "shop".to_owned(),
                    name: pod.to_owned(),
                    uid: pod.to_owned(),
                },
                rule: "q/r".to_owned(),
                hash: "h".to_owned(),
            };
            let Reply::Answer(answer) = self.evictions.evict(Arc::from(node), request).await else {
                panic!("not leading");
            };
            let why = answer.why().unwrap_or_default();
            if !why.contains("has not read") && !why.contains("in time") {
                return answer;
            }
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether the record has this pod, with this confirmation.
    fn is_recorded(&self, pod: &str, confirmed: bool) -> bool {
        let record: Value = serde_json::from_str(&self.api_server().record).unwrap();
        let evictions = record["evictions"].as_array().unwrap();
        let mut evictions = evictions.iter();
        evictions.any(|it| it["victim"]["uid"] == pod && it["confirmed"] == confirmed)
    }
}

fn client(api_server: &Arc<Mutex<ApiServer>>) -> Client {
    let api_server = Arc::clone(api_server);
    let answer = move |request: Request<Body>| {
        let api_server = Arc::clone(&api_server);
        async move {
            let (request, body) = request.into_parts();
            // Watches of the record show nothing.
            if request
                .uri
                .query()
                .unwrap_or_default()
                .contains("fieldSelector")
            {
                return pending().await;
            }
            let body = body.collect().await?.to_bytes();
            let answer =
                api_server
                    .lock()
                    .unwrap()
                    .answer(&request.method, request.uri.path(), &body);
            let (code, body) = answer?;
            let answer = Response::builder().status(code);
            Ok::<_, BoxError>(answer.body(Full::new(Bytes::from(body)))?)
        }
    };
    Client::new(service_fn(answer), "default")
}

async fn wait_until(mut condition: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !condition().await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TIMEOUT, wait).await.unwrap();
}

fn is_unsettled(answer: &EvictionAnswer) -> bool {
    matches!(answer, EvictionAnswer::Wait { by: Delay::Leader, why, .. } if why.contains("is not known yet"))
}

fn is_refused_by_budget(answer: &EvictionAnswer) -> bool {
    matches!(answer, EvictionAnswer::Wait { by: Delay::Budget, why, .. } if why.contains("the fleet's budget"))
}

/// An eviction with an unclear answer counts, until the pod is seen terminating and afterwards.
async fn assert_counts(answer: Posted) {
    let leader = Leader::start(ApiServer {
        answer,
        ..ApiServer::default()
    });
    let unclear = leader.send("node-a", "first").await;
    assert!(
        matches!(
            unclear,
            EvictionAnswer::Unknown { .. }
                | EvictionAnswer::Wait {
                    by: Delay::Server,
                    ..
                }
        ),
        "{answer:?}: {unclear:?}"
    );
    assert!(leader.is_recorded("first", false), "{answer:?}");
    let same_node = leader.send("node-a", "second").await;
    assert!(is_unsettled(&same_node), "{answer:?}: {same_node:?}");
    let other_node = leader.send("node-b", "third").await;
    assert!(
        is_refused_by_budget(&other_node),
        "{answer:?}: {other_node:?}"
    );

    leader.api_server().terminates = true;
    wait_until(async || is_refused_by_budget(&leader.send("node-a", "second").await)).await;
    wait_until(async || leader.is_recorded("first", true)).await;
    assert_eq!(leader.api_server().posted, ["first"], "{answer:?}");
}

#[tokio::test]
async fn an_eviction_with_an_unclear_answer_counts_until_a_poll_settles_it() {
    let answers = [
        None,
        Some((200, "<html>Welcome</html>")),
        Some((500, "etcdserver: request timed out")),
        Some((503, "the server is overloaded")),
        Some((504, "gateway timeout")),
    ];
    join_all(answers.map(assert_counts)).await;
}

#[tokio::test]
async fn a_late_emergency_stop_prevents_the_eviction_and_costs_no_budget() {
    let success = r#"{"kind": "Status", "apiVersion": "v1", "status": "Success"}"#;
    let leader = Leader::start(ApiServer {
        answer: Some((201, success)),
        stops_when_recorded: true,
        ..ApiServer::default()
    });
    let EvictionAnswer::Wait { by, why, .. } = leader.send("node-a", "first").await else {
        panic!("evicted despite the emergency stop");
    };
    assert_eq!(
        (by, &*why),
        (Delay::Leader, "an emergency stop is in force")
    );
    {
        let mut api_server = leader.api_server();
        assert_eq!(api_server.posted, [""; 0]);
        (api_server.is_stopped, api_server.stops_when_recorded) = (false, false);
    }
    assert_eq!(
        leader.send("node-b", "second").await,
        EvictionAnswer::Accepted
    );
    assert_eq!(leader.api_server().posted, ["second"]);
}

#[tokio::test]
async fn a_stopped_node_gets_no_evictions_and_others_do() {
    let success = r#"{"kind": "Status", "apiVersion": "v1", "status": "Success"}"#;
    let leader = Leader::start(ApiServer {
        answer: Some((201, success)),
        stopped_node: Some("node-a"),
        ..ApiServer::default()
    });
    let EvictionAnswer::Wait { why, .. } = leader.send("node-a", "first").await else {
        panic!("evicted despite the emergency stop");
    };
    assert_eq!(&*why, "an emergency stop is in force");
    assert_eq!(
        leader.send("node-b", "second").await,
        EvictionAnswer::Accepted
    );
    assert_eq!(leader.api_server().posted, ["second"]);
}
