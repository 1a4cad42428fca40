//! A fake leader for agents' eviction requests, by the connection of their reports or through the API server. It posts
//! what the node's rules allow, without budgets.
#![allow(dead_code, reason = "each test uses its part")]

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use kube::{Api, Client};
use plimsoll::cluster::client::connect;
use plimsoll::cluster::eviction;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::crd::NodeWatermark;
use plimsoll::crd::eviction::{EvictionAnswer, EvictionRequest, Key, PATH, permit};
use plimsoll::crd::pod_facts::PodObject;
use plimsoll::engine::policy::RuleId;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::ControlPlane;
use super::aggregation::{self, GROUP_VERSION};
use super::receiver::{Authority, Lost, Receiver, acknowledge, arguments, publish, slice};

/// The Service that agents report to, and its namespace.
const SERVICE: &str = "plimsoll-report";
const NAMESPACE: &str = "default";

/// A received request.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub path: String,
    /// User and node, if the API server forwarded it.
    pub user: Option<(String, String)>,
    pub request: EvictionRequest,
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// It is carried out and answered.
    Answered,
    /// It is carried out, but the answer is lost.
    Lost,
    /// It is refused.
    Refused,
}

type Responder = Box<dyn Fn(&str) -> RequestOutcome + Send>;

/// Carries out requests, each once.
#[derive(Clone)]
pub(super) struct Evicting {
    kubeconfig: PathBuf,
    node: String,
    responder: Arc<Mutex<Responder>>,
    requests: Arc<Mutex<Vec<ReceivedRequest>>>,
    answers: Arc<Mutex<Vec<(Key, EvictionAnswer)>>>,
}

impl Evicting {
    /// Answers an eviction request, or a discovery request of the API server.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Result<Response<Full<Bytes>>, Lost> {
        let path = request.uri().path().to_owned();
        if request.method() != Method::POST {
            return Ok(discovery(&path));
        }
        let user = passed_on(&request);
        let body = request.into_body().collect().await.map_err(|_| Lost)?;
        let request = EvictionRequest::parse(&body.to_bytes()).unwrap();
        let outcome = self.responder.lock().unwrap()(&path);
        self.requests.lock().unwrap().push(ReceivedRequest {
            path,
            user,
            request: request.clone(),
        });
        if outcome == RequestOutcome::Refused {
            return Ok(respond(503, &json!({"message": "not now"})));
        }
        let answer = self.evict_once(&request).await;
        match outcome {
            RequestOutcome::Lost => Err(Lost),
            _ => Ok(respond(200, &json!(answer))),
        }
    }

    async fn evict_once(&self, request: &EvictionRequest) -> EvictionAnswer {
        let answers = self.answers.lock().unwrap().clone();
        if let Some((_, answer)) = answers.into_iter().find(|(key, _)| *key == request.key) {
            return answer;
        }
        let client = connect(&ClusterSource::file(&self.kubeconfig))
            .await
            .unwrap();
        let answer = self.evict(&client, request).await;
        let mut answers = self.answers.lock().unwrap();
        answers.push((request.key.clone(), answer.clone()));
        answer
    }

    async fn evict(&self, client: &Client, request: &EvictionRequest) -> EvictionAnswer {
        let refused = |why: String| EvictionAnswer::Refused { why };
        let rules = Api::<NodeWatermark>::all(client.clone())
            .get(&self.node)
            .await;
        let rules = rules.unwrap().spec;
        if rules.hash != request.hash {
            return refused(format!("the rules are {}", rules.hash));
        }
        let target = &request.target;
        let Some(pod) = eviction::read_pod::<PodObject>(client, target)
            .await
            .unwrap()
        else {
            return EvictionAnswer::Gone;
        };
        let rule = RuleId::from(request.rule.as_str());
        match permit(&pod, &self.node, &rule, &rules.read().unwrap().policy) {
            Ok(grace) => eviction::evict(client, target, grace).await,
            Err(objection) => refused(objection.to_string()),
        }
    }
}

/// The user and node for which the API server forwarded it.
fn passed_on(request: &Request<Incoming>) -> Option<(String, String)> {
    let header = |name: &str| {
        let value = request.headers().get(name)?.to_str().ok()?;
        Some(value.to_owned())
    };
    let node = header("x-remote-extra-authentication.kubernetes.io%2fnode-name");
    Some((header("x-remote-user")?, node.unwrap_or_default()))
}

fn discovery(path: &str) -> Response<Full<Bytes>> {
    if path != GROUP_VERSION {
        return respond(404, &json!({}));
    }
    let group = path.trim_start_matches("/apis/");
    let list = json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [],
    });
    respond(200, &list)
}

fn respond(code: u16, body: &Value) -> Response<Full<Bytes>> {
    let answer = Response::builder()
        .status(code)
        .header("content-type", "application/json");
    let body = Full::new(Bytes::from(body.to_string()));
    answer.body(body).unwrap()
}

/// The leader; agents find it once it is published.
pub struct Leader {
    receiver: Receiver,
    evicting: Evicting,
    credentials: TempDir,
}

impl Leader {
    /// Evicts pods of this node. Prints a message and returns `None` if this machine can't run it.
    pub fn start(plane: &ControlPlane, node: &str) -> Option<Self> {
        let Some(address) = aggregation::address() else {
            eprintln!(
                "NOT TESTED: this machine has no address but loopback ones, which no endpoint may have"
            );
            return None;
        };
        let evicting = Evicting {
            kubeconfig: plane.kubeconfig.clone(),
            node: node.to_owned(),
            responder: Arc::new(Mutex::new(Box::new(|_| RequestOutcome::Answered))),
            requests: Arc::default(),
            answers: Arc::default(),
        };
        Some(Self::at(address, evicting))
    }

    fn at(address: IpAddr, evicting: Evicting) -> Self {
        let authority = Authority::make();
        let name = format!("{SERVICE}.{NAMESPACE}.svc");
        let receiver = Receiver::start(address, &authority, &name);
        receiver.respond_always(acknowledge(1, true));
        receiver.evicts(evicting.clone());
        let credentials = tempfile::tempdir().unwrap();
        let files = [("token", "t"), ("ca.crt", &*authority.pem)];
        publish(credentials.path(), &files);
        Self {
            receiver,
            evicting,
            credentials,
        }
    }

    /// Published for agents with [these arguments](Self::args).
    pub fn published(plane: &ControlPlane, node: &str) -> Option<Self> {
        let leader = Self::start(plane, node)?;
        leader.publish(plane);
        Some(leader)
    }

    /// Arguments of an agent that reports to it.
    pub fn args(&self) -> [&str; 8] {
        arguments(NAMESPACE, SERVICE, self.credentials.path())
    }

    /// Publishes its address to agents.
    pub fn publish(&self, plane: &ControlPlane) {
        self.publish_port(plane, self.receiver.address.port());
    }

    /// Publishes this port to agents.
    pub fn publish_port(&self, plane: &ControlPlane, port: u16) {
        let address = SocketAddr::new(self.receiver.address.ip(), port);
        plane.apply(&[slice(NAMESPACE, SERVICE, SERVICE, address, true)]);
    }

    /// Registers it with the API server, as a server in this namespace.
    pub fn serve_through_api_server(&self, plane: &ControlPlane, namespace: &str) {
        let (ip, port) = (self.receiver.address.ip(), self.receiver.address.port());
        let mut objects = aggregation::objects(namespace, "plimsoll-metrics", ip, &[port]);
        let mut services = objects.iter_mut();
        let service = services.find(|object| object["kind"] == "APIService");
        service.unwrap()["spec"]["insecureSkipTLSVerify"] = true.into();
        plane.apply(&objects);
        aggregation::until_served(plane, GROUP_VERSION);
    }

    /// Whether an agent reports to it, so that requests can use the same connection.
    pub fn has_reporting_agent(&self) -> bool {
        !self.receiver.seen().is_empty()
    }

    /// Sets what happens to requests, by their path.
    pub fn respond_with(&self, responder: impl Fn(&str) -> RequestOutcome + Send + 'static) {
        *self.evicting.responder.lock().unwrap() = Box::new(responder);
    }

    /// All received requests.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.evicting.requests.lock().unwrap().clone()
    }

    /// The evicted pods in order.
    pub fn evicted(&self) -> Vec<String> {
        let answers = self.evicting.answers.lock().unwrap().clone();
        let accepted = answers
            .into_iter()
            .filter(|(_, it)| *it == EvictionAnswer::Accepted);
        let requests = self.requests();
        let name = |key: &Key| {
            let request = requests.iter().find(|it| it.request.key == *key).unwrap();
            request.request.target.name.clone()
        };
        accepted.map(|(key, _)| name(&key)).collect()
    }
}

impl ReceivedRequest {
    /// Whether it arrived by the connection of reports.
    pub fn is_direct(&self) -> bool {
        self.path == PATH
    }
}
