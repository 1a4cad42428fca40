//! Reads what `plimsoll doctor` judges: plain JSON, and tables where there may be thousands. What can't be read is kept as
//! the reason why.

use std::collections::BTreeSet;

use form_urlencoded::byte_serialize;
use jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};

use super::agents::waited_for;
use super::finding::items;
use super::permissions::{Actor, wanted};
use super::tables::{names, unique};
use super::trials::{Attempt, Objects, Trial, by_agent, by_controller};
use crate::cluster::client::{CallError, call};
use crate::cluster::clock;
use crate::cluster::nodes::KEPT;
use crate::crd::emergency_stop::OBJECT;
use crate::ordered::sort;

const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

/// What an API server answered.
pub(super) type Answer = Result<Value, Refused>;

/// Why it did not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Refused {
    /// The HTTP code, where there was an answer.
    pub code: Option<u16>,
    /// In words.
    pub why: String,
}

impl Refused {
    /// There is no such thing.
    pub(super) fn is_missing(&self) -> bool {
        self.code == Some(404)
    }
}

impl From<CallError> for Refused {
    fn from(error: CallError) -> Self {
        Self {
            code: error.code(),
            why: error.words(),
        }
    }
}

/// Something that an actor has to be allowed, and whether it is; `None`: nobody answered.
#[derive(Clone, Debug)]
pub(super) struct Review {
    pub actor: Actor,
    /// `system:serviceaccount:namespace:name`
    pub user: String,
    pub verb: &'static str,
    /// `nodes/status`
    pub what: String,
    pub allowed: Result<bool, Refused>,
}

/// All that was read.
#[derive(Debug)]
pub(super) struct Seen {
    /// Nothing was read but what agents need to be ready.
    pub agents_alone: bool,
    pub now: Timestamp,
    pub lease_namespace: String,
    pub version: Answer,
    /// What the API server says of itself to aggregated ones.
    pub aggregation: Answer,
    pub api_service: Answer,
    /// The documents of our two groups.
    pub schemas: [Answer; 2],
    pub daemon_sets: Answer,
    pub deployments: Answer,
    /// The Leases by which one replica leads.
    pub elections: Vec<Answer>,
    /// The namespaces that agents are in.
    pub namespaces: Vec<(String, Answer)>,
    /// Events of `DaemonSet`s there whose pods could not be made.
    pub refusals: Vec<Answer>,
    /// Events of agents' pods whose volumes could not be mounted.
    pub unmounted: Vec<Answer>,
    /// Nodes that are being deleted, of those whose agent is not ready; only where the agents alone are read.
    pub leaving: BTreeSet<String>,
    /// Table of the nodes.
    pub nodes: Answer,
    /// Table of those that the image is not for.
    pub foreign: Answer,
    /// Tables of the agents' pods.
    pub agents: Vec<Answer>,
    /// Table of the `NodeWatermark`s.
    pub watermarks: Answer,
    pub leases: Answer,
    /// Our `ValidatingAdmissionPolicy`s, and what puts them in force.
    pub admission: [Answer; 2],
    /// Our `FlowSchema`s and `PriorityLevelConfiguration`s.
    pub flow: [Answer; 2],
    pub stop: Answer,
    pub node_qos: Answer,
    pub pod_qos: Answer,
    pub actions: Answer,
    pub reviews: Vec<Review>,
    pub trials: Vec<Trial>,
}

/// Our objects of a component.
fn labels(component: &str) -> String {
    format!(
        "labelSelector=app.kubernetes.io/name%3Dplimsoll%2Capp.kubernetes.io/component%3D{component}"
    )
}

/// Those workloads of ours.
fn apps(plural: &str, component: &str) -> String {
    format!("/apis/apps/v1/{plural}?{}", labels(component))
}

/// The nodes that may have an agent.
fn nodes() -> String {
    let kept: String = byte_serialize(KEPT.as_bytes()).collect();
    format!("/api/v1/nodes?labelSelector={kept}")
}
/// Those of another architecture than the image's.
const FOREIGN: &str = "%2Ckubernetes.io/arch%2Ckubernetes.io/arch%20notin%20%28amd64%29";
/// What `DaemonSet`s were refused.
const REFUSALS: &str = "fieldSelector=involvedObject.kind%3DDaemonSet%2Creason%3DFailedCreate";
/// What agents' pods could not mount. The events of a fleet may be many, and the first name what is missing.
const UNMOUNTED: &str = "fieldSelector=involvedObject.kind%3DPod%2Creason%3DFailedMount&limit=500";
/// Of so many nodes at most it is asked, one by one, whether they are being deleted.
const MAX_ASKED: usize = 20;
/// Where agents have their Leases.
const LEASES: &str = "--lease-namespace=";

const COORDINATION: &str = "/apis/coordination.k8s.io/v1";
const ADMISSION: &str = "/apis/admissionregistration.k8s.io/v1";
const FLOW: &str = "/apis/flowcontrol.apiserver.k8s.io/v1";
const OURS: &str = "labelSelector=app.kubernetes.io/name%3Dplimsoll";
/// The groups of our definitions.
const POLICIES: &str = "ensurance.crane.io/v1alpha1";
const RULES: &str = "plimsoll.dev/v1alpha1";
const API_SERVICE: &str =
    "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.metrics.plimsoll.dev";
/// What the API server says of itself to aggregated ones.
const AUTHENTICATION: &str =
    "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";

/// Reads it all. Where agents have their Leases they say themselves, unless it is given; `usual`: nobody does.
///
/// # Errors
/// The API server can't be reached at all.
pub(super) async fn read(
    client: &Client,
    given: Option<&str>,
    usual: &str,
) -> anyhow::Result<Seen> {
    let version = get(client, "/version").await;
    if let Err(Refused { code: None, why }) = &version {
        anyhow::bail!("failed to reach the API server: {why}");
    }
    let list = async |path: &str| get(client, path).await;
    let daemon_sets = list(&apps("daemonsets", "agent")).await;
    let deployments = list(&apps("deployments", "controller")).await;
    let said = arguments(&daemon_sets, LEASES).first().copied();
    let lease_namespace = given.or(said).unwrap_or(usual).to_owned();
    let leases = format!("{COORDINATION}/namespaces/{lease_namespace}/leases");
    let stop = format!("/api/v1/namespaces/{lease_namespace}/configmaps/{OBJECT}");
    let policies = async |plural: &str| list(&format!("/apis/{POLICIES}/{plural}")).await;
    let admission = async |plural: &str| list(&format!("{ADMISSION}/{plural}?{OURS}")).await;
    let flow = async |plural: &str| list(&format!("{FLOW}/{plural}?{OURS}")).await;
    let schema = async |group: &str| list(&format!("/openapi/v3/apis/{group}")).await;
    let mut seen = Seen {
        version,
        aggregation: list(AUTHENTICATION).await,
        api_service: list(API_SERVICE).await,
        schemas: [schema(POLICIES).await, schema(RULES).await],
        agents_alone: false,
        namespaces: Vec::new(),
        refusals: Vec::new(),
        unmounted: Vec::new(),
        leaving: BTreeSet::new(),
        nodes: table(client, &nodes()).await,
        foreign: table(client, &format!("{}{FOREIGN}", nodes())).await,
        agents: Vec::new(),
        watermarks: table(client, &format!("/apis/{RULES}/nodewatermarks")).await,
        elections: elections(client, &deployments).await,
        leases: list(&leases).await,
        // Of what was read this is compared with the clock.
        now: clock::wall(),
        admission: [
            admission("validatingadmissionpolicies").await,
            admission("validatingadmissionpolicybindings").await,
        ],
        flow: [
            flow("flowschemas").await,
            flow("prioritylevelconfigurations").await,
        ],
        stop: list(&stop).await,
        node_qos: policies("nodeqoss").await,
        pod_qos: policies("podqoss").await,
        actions: policies("avoidanceactions").await,
        reviews: reviews(client, &lease_namespace, [&daemon_sets, &deployments]).await,
        trials: Vec::new(),
        daemon_sets,
        deployments,
        lease_namespace,
    };
    seen.trials = trials(client, attempts(&seen)).await;
    of_agents(client, &mut seen).await;
    Ok(seen)
}

/// Reads what says whether the agents are ready, and why not.
///
/// # Errors
/// The API server can't be reached at all.
pub(super) async fn agents_alone(client: &Client) -> anyhow::Result<Seen> {
    let version = get(client, "/version").await;
    if let Err(Refused { code: None, why }) = &version {
        anyhow::bail!("failed to reach the API server: {why}");
    }
    let mut seen = Seen {
        version,
        daemon_sets: get(client, &apps("daemonsets", "agent")).await,
        nodes: table(client, &nodes()).await,
        foreign: table(client, &format!("{}{FOREIGN}", nodes())).await,
        ..not_read()
    };
    of_agents(client, &mut seen).await;
    for node in waited_for(&seen).into_iter().take(MAX_ASKED) {
        let path = format!("/api/v1/nodes?fieldSelector=metadata.name%3D{node}");
        let is_leaving = |it: &&Value| !it["metadata"]["deletionTimestamp"].is_null();
        if items(&get(client, &path).await).iter().any(is_leaving) {
            seen.leaving.insert(node);
        }
    }
    Ok(seen)
}

/// What only the agents are looked at without.
pub(super) fn not_read() -> Seen {
    let none = || Err(Refused::default());
    Seen {
        agents_alone: true,
        now: clock::wall(),
        lease_namespace: String::new(),
        version: none(),
        aggregation: none(),
        api_service: none(),
        schemas: [none(), none()],
        daemon_sets: none(),
        deployments: none(),
        elections: Vec::new(),
        namespaces: Vec::new(),
        refusals: Vec::new(),
        unmounted: Vec::new(),
        leaving: BTreeSet::new(),
        nodes: none(),
        foreign: none(),
        agents: Vec::new(),
        watermarks: none(),
        leases: none(),
        admission: [none(), none()],
        flow: [none(), none()],
        stop: none(),
        node_qos: none(),
        pod_qos: none(),
        actions: none(),
        reviews: Vec::new(),
        trials: Vec::new(),
    }
}

/// Where agents have their Leases, as their `DaemonSet`s say; none where these can't be read.
pub(in crate::cli) async fn lease_namespaces(client: &Client) -> Vec<String> {
    let daemon_sets = get(client, &apps("daemonsets", "agent")).await;
    let told = unique(arguments(&daemon_sets, LEASES).into_iter());
    told.into_iter().map(str::to_owned).collect()
}

/// The namespaces of the agents, with their pods, and why some could not be made.
async fn of_agents(client: &Client, seen: &mut Seen) {
    for namespace in namespaces_of(&seen.daemon_sets) {
        let path = format!("/api/v1/namespaces/{namespace}");
        let pods = format!("{path}/pods?{}", labels("agent"));
        seen.agents.push(table(client, &pods).await);
        let refusals = format!("{path}/events?{REFUSALS}");
        seen.refusals.push(get(client, &refusals).await);
        let unmounted = format!("{path}/events?{UNMOUNTED}");
        seen.unmounted.push(get(client, &unmounted).await);
        seen.namespaces.push((namespace, get(client, &path).await));
    }
}

/// The Leases that the controllers are told to have.
async fn elections(client: &Client, deployments: &Answer) -> Vec<Answer> {
    let mut answers = Vec::new();
    for deployment in items(deployments) {
        let namespace = deployment["metadata"]["namespace"].as_str();
        for name in told(deployment, "--lease-name=") {
            let namespace = namespace.unwrap_or_default();
            let path = format!("{COORDINATION}/namespaces/{namespace}/leases/{name}");
            answers.push(get(client, &path).await);
        }
    }
    answers
}

fn namespaces_of(workloads: &Answer) -> Vec<String> {
    let all = items(workloads).into_iter();
    let names = all.filter_map(|it| it["metadata"]["namespace"].as_str());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    sort(&mut names);
    names.dedup();
    names
}

/// What these workloads are told by this argument.
pub(super) fn arguments<'a>(workloads: &'a Answer, argument: &str) -> Vec<&'a str> {
    let all = items(workloads).into_iter();
    all.flat_map(|it| told(it, argument)).collect()
}

/// What the containers of one are told.
pub(super) fn told<'a>(workload: &'a Value, argument: &str) -> Vec<&'a str> {
    let containers = items_in(workload, "/spec/template/spec/containers");
    let arguments = containers.into_iter().flat_map(|it| items_in(it, "/args"));
    arguments
        .filter_map(|it| it.as_str()?.strip_prefix(argument))
        .collect()
}

/// What is in the list there.
pub(super) fn items_in<'a>(value: &'a Value, path: &str) -> Vec<&'a Value> {
    let list = value.pointer(path).and_then(Value::as_array);
    list.into_iter().flatten().collect()
}

/// What is to be tried, with objects that there are.
fn attempts(seen: &Seen) -> Vec<Attempt> {
    let first = |table| names(table).into_iter().next().unwrap_or_default();
    let objects = Objects {
        node: first(&seen.nodes),
        watermark: first(&seen.watermarks),
        leases: &seen.lease_namespace,
    };
    let mut attempts = Vec::new();
    for (namespace, account) in accounts(&seen.daemon_sets) {
        attempts.extend(by_agent(&user(&namespace, &account), &account, objects));
    }
    for (namespace, account) in accounts(&seen.deployments) {
        let user = user(&namespace, &account);
        let all = by_controller(&user, &account, &seen.deployments, objects.node);
        attempts.extend(all);
    }
    attempts
}

/// Tries it all, in the names of others.
async fn trials(client: &Client, attempts: Vec<Attempt>) -> Vec<Trial> {
    let mut trials = Vec::new();
    for attempt in attempts {
        let kind = match attempt.method {
            "PATCH" => "application/merge-patch+json",
            _ => "application/json",
        };
        let request = hyper::Request::builder()
            .method(attempt.method)
            .uri(&attempt.path)
            .header("impersonate-user", &attempt.user)
            .header("content-type", kind);
        let answer = ask(client, request, attempt.body.to_string().into_bytes()).await;
        let policy = attempt.policy;
        trials.push(Trial { policy, answer });
    }
    trials
}

async fn get(client: &Client, path: &str) -> Answer {
    ask(client, hyper::Request::get(path), Vec::new()).await
}

async fn table(client: &Client, path: &str) -> Answer {
    let sign = if path.contains('?') { '&' } else { '?' };
    let request = hyper::Request::get(format!("{path}{sign}includeObject=None"));
    ask(client, request.header("accept", TABLE), Vec::new()).await
}

async fn ask(client: &Client, request: hyper::http::request::Builder, body: Vec<u8>) -> Answer {
    let answer = call(async {
        let request = request.body(body).map_err(kube::Error::HttpError)?;
        client.request::<Value>(request).await
    });
    answer.await.map_err(Refused::from)
}

/// Asks whether agents and controllers may do what they have to.
async fn reviews(
    client: &Client,
    leases: &str,
    [agents, controllers]: [&Answer; 2],
) -> Vec<Review> {
    let mut reviews = Vec::new();
    for (actor, workloads) in [(Actor::Agent, agents), (Actor::Controller, controllers)] {
        for (namespace, account) in accounts(workloads) {
            let is_its = |it: &&Value| {
                it["metadata"]["namespace"] == namespace && self::account(it) == Some(&account)
            };
            let Some(workload) = items(workloads).into_iter().find(is_its) else {
                continue;
            };
            let user = user(&namespace, &account);
            for attributes in wanted(actor, workload, [&namespace, leases]) {
                reviews.push(Review {
                    actor,
                    user: user.clone(),
                    verb: attributes.verb,
                    what: attributes.to_string(),
                    allowed: review(client, &namespace, &user, attributes.spec()).await,
                });
            }
        }
    }
    reviews
}

/// As an API server knows it.
fn user(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}

/// The service account of a workload's pods.
pub(super) fn account(workload: &Value) -> Option<&str> {
    workload["spec"]["template"]["spec"]["serviceAccountName"].as_str()
}

/// Namespace and service account of each workload, each once.
pub(super) fn accounts(workloads: &Answer) -> Vec<(String, String)> {
    let all = items(workloads);
    let named = |it: &Value| {
        let namespace = it["metadata"]["namespace"].as_str()?.to_owned();
        Some((namespace, account(it)?.to_owned()))
    };
    let mut accounts: Vec<_> = all.into_iter().filter_map(named).collect();
    sort(&mut accounts);
    accounts.dedup();
    accounts
}

async fn review(
    client: &Client,
    namespace: &str,
    user: &str,
    mut spec: Value,
) -> Result<bool, Refused> {
    let of_namespace = format!("system:serviceaccounts:{namespace}");
    let groups = [
        "system:serviceaccounts",
        &of_namespace,
        "system:authenticated",
    ];
    (spec["user"], spec["groups"]) = (user.into(), json!(groups));
    let body = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec,
    });
    let request = hyper::Request::post("/apis/authorization.k8s.io/v1/subjectaccessreviews");
    let request = request.header("content-type", "application/json");
    let answer = ask(client, request, body.to_string().into_bytes()).await?;
    Ok(answer["status"]["allowed"] == true)
}
