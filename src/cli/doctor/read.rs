//! Reads what `plimsoll doctor` judges: plain JSON, and tables where there may be thousands. What can't be read is kept as
//! the reason why.

use form_urlencoded::byte_serialize;
use jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};

use super::permissions::{Actor, wanted};
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
    /// `patch nodes/status`
    pub what: String,
    pub allowed: Result<bool, Refused>,
}

/// All that was read.
#[derive(Debug)]
pub(super) struct Seen {
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
    /// The namespaces that agents are in.
    pub namespaces: Vec<(String, Answer)>,
    /// Table of the nodes.
    pub nodes: Answer,
    /// Tables of the agents' pods.
    pub agents: Vec<Answer>,
    /// Table of the `NodeWatermark`s.
    pub watermarks: Answer,
    pub leases: Answer,
    pub webhooks: Answer,
    /// Our `ValidatingAdmissionPolicy`s, and what puts them in force.
    pub admission: [Answer; 2],
    pub stop: Answer,
    pub node_qos: Answer,
    pub pod_qos: Answer,
    pub actions: Answer,
    pub reviews: Vec<Review>,
}

/// Our objects of a component.
fn labels(component: &str) -> String {
    format!(
        "labelSelector=app.kubernetes.io/name%3Dplimsoll%2Capp.kubernetes.io/component%3D{component}"
    )
}

/// The nodes that may have an agent.
fn nodes() -> String {
    let kept: String = byte_serialize(KEPT.as_bytes()).collect();
    format!("/api/v1/nodes?labelSelector={kept}")
}

/// Reads it all.
///
/// # Errors
/// The API server can't be reached at all.
pub(super) async fn read(client: &Client, lease_namespace: &str) -> anyhow::Result<Seen> {
    let version = get(client, "/version").await;
    if let Err(Refused { code: None, why }) = &version {
        anyhow::bail!("failed to reach the API server: {why}");
    }
    let list = async |path: &str| get(client, path).await;
    let apps = |plural: &str, of: &str| format!("/apis/apps/v1/{plural}?{}", labels(of));
    let daemon_sets = list(&apps("daemonsets", "agent")).await;
    let deployments = list(&apps("deployments", "controller")).await;
    let (namespaces, agents) = agents(client, &daemon_sets).await;
    let policies =
        async |plural: &str| list(&format!("/apis/ensurance.crane.io/v1alpha1/{plural}")).await;
    let reviews = reviews(client, lease_namespace, [&daemon_sets, &deployments]).await;
    let auth = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";
    let leases = format!("/apis/coordination.k8s.io/v1/namespaces/{lease_namespace}/leases");
    let stop = format!("/api/v1/namespaces/{lease_namespace}/configmaps/{OBJECT}");
    let admission = async |plural: &str| {
        let ours = "labelSelector=app.kubernetes.io/name%3Dplimsoll";
        list(&format!(
            "/apis/admissionregistration.k8s.io/v1/{plural}?{ours}"
        ))
        .await
    };
    Ok(Seen {
        now: clock::wall(),
        lease_namespace: lease_namespace.to_owned(),
        version,
        aggregation: list(auth).await,
        api_service: list(
            "/apis/apiregistration.k8s.io/v1/apiservices/v1alpha1.metrics.plimsoll.dev",
        )
        .await,
        schemas: [
            list("/openapi/v3/apis/ensurance.crane.io/v1alpha1").await,
            list("/openapi/v3/apis/plimsoll.dev/v1alpha1").await,
        ],
        daemon_sets,
        deployments,
        namespaces,
        nodes: table(client, &nodes()).await,
        agents,
        watermarks: table(client, "/apis/plimsoll.dev/v1alpha1/nodewatermarks").await,
        leases: list(&leases).await,
        webhooks: admission("validatingwebhookconfigurations").await,
        admission: [
            admission("validatingadmissionpolicies").await,
            admission("validatingadmissionpolicybindings").await,
        ],
        stop: list(&stop).await,
        node_qos: policies("nodeqoss").await,
        pod_qos: policies("podqoss").await,
        actions: policies("avoidanceactions").await,
        reviews,
    })
}

/// The namespaces of these workloads, and the agents' pods in each.
async fn agents(client: &Client, workloads: &Answer) -> (Vec<(String, Answer)>, Vec<Answer>) {
    let (mut namespaces, mut pods) = (Vec::new(), Vec::new());
    for namespace in namespaces_of(workloads) {
        let path = format!("/api/v1/namespaces/{namespace}");
        pods.push(table(client, &format!("{path}/pods?{}", labels("agent"))).await);
        namespaces.push((namespace, get(client, &path).await));
    }
    (namespaces, pods)
}

fn namespaces_of(list: &Answer) -> Vec<String> {
    let items = list.as_ref().ok().and_then(|list| list["items"].as_array());
    let names = items.into_iter().flatten();
    let names = names.filter_map(|it| it["metadata"]["namespace"].as_str());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    sort(&mut names);
    names.dedup();
    names
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
            let user = format!("system:serviceaccount:{namespace}:{account}");
            for attributes in wanted(actor, &namespace, leases) {
                reviews.push(Review {
                    actor,
                    user: user.clone(),
                    what: attributes.to_string(),
                    allowed: review(client, &namespace, &user, &attributes.body()).await,
                });
            }
        }
    }
    reviews
}

/// Namespace and service account of each workload, each once.
pub(super) fn accounts(workloads: &Answer) -> Vec<(String, String)> {
    let items = workloads
        .as_ref()
        .ok()
        .and_then(|list| list["items"].as_array());
    let account = |it: &Value| {
        let namespace = it["metadata"]["namespace"].as_str()?.to_owned();
        let account = it["spec"]["template"]["spec"]["serviceAccountName"].as_str()?;
        Some((namespace, account.to_owned()))
    };
    let mut accounts: Vec<_> = items.into_iter().flatten().filter_map(account).collect();
    sort(&mut accounts);
    accounts.dedup();
    accounts
}

async fn review(
    client: &Client,
    namespace: &str,
    user: &str,
    attributes: &Value,
) -> Result<bool, Refused> {
    let of_namespace = format!("system:serviceaccounts:{namespace}");
    let groups = [
        "system:serviceaccounts",
        &of_namespace,
        "system:authenticated",
    ];
    let body = json!({
        "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    });
    let request = hyper::Request::post("/apis/authorization.k8s.io/v1/subjectaccessreviews");
    let request = request.header("content-type", "application/json");
    let answer = ask(client, request, body.to_string().into_bytes()).await?;
    Ok(answer["status"]["allowed"] == true)
}
