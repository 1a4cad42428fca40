//! Dry runs, as agents and controllers, of requests that the chart's admission policies have to reject. Nothing is written,
//! whatever the response.

use hyper::Request;
use hyper::header::HeaderValue;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::request::{self, Error};
use kube::{Client, Resource};
use serde_json::{Value, json};

use super::snapshot::{
    API_SERVICE, ClusterSnapshot, Read, SnapshotError, accounts, arguments, items, user,
};
use crate::cli::progress::ProgressLine;
use crate::cluster::client::call;
use crate::crd::NodeWatermark;

/// The name of objects in dry runs.
const NAME: &str = "plimsoll-doctor";

/// A dry run, and its result.
#[derive(Clone, Debug)]
pub(super) struct DryRun {
    /// The policy that has to reject it.
    pub policy: String,
    pub result: Read<()>,
}

/// What a dry run says about its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DryRunVerdict<'a> {
    /// A policy rejected it.
    Rejected,
    /// No policy rejected it.
    Allowed,
    /// There is no such object to test with.
    NoObject,
    /// It failed before policies were evaluated.
    Failed(&'a str),
}

impl DryRun {
    pub(super) fn verdict(&self) -> DryRunVerdict<'_> {
        match &self.result {
            Ok(()) => DryRunVerdict::Allowed,
            Err(SnapshotError {
                code: Some(403),
                why,
            }) if why.contains("ValidatingAdmissionPolicy '") => DryRunVerdict::Rejected,
            // The pod to evict, which does not exist, is looked up after all policies have allowed the request.
            Err(error) if error.is_missing() && error.why.contains(NAME) => DryRunVerdict::Allowed,
            Err(error) if error.is_missing() => DryRunVerdict::NoObject,
            Err(error) => DryRunVerdict::Failed(&error.why),
        }
    }
}

/// A request for a dry run.
type Attempt = (&'static str, Result<Request<Vec<u8>>, Error>);

/// Runs all dry runs for which there are objects.
pub(super) async fn run_all(
    client: &Client,
    snapshot: &ClusterSnapshot,
    progress: &ProgressLine,
) -> Vec<DryRun> {
    let agents = accounts(&snapshot.daemon_sets).into_keys();
    let agents = agents.map(|it| (it, by_agent(snapshot)));
    let controllers = accounts(&snapshot.deployments).into_keys();
    let controllers = controllers.map(|it| (it, by_controller(snapshot)));
    progress.next("testing admission policies", None);
    let mut runs = Vec::new();
    for ((namespace, account), attempts) in agents.chain(controllers) {
        let user = user(&namespace, &account);
        for (kind, request) in attempts {
            runs.push(DryRun {
                policy: format!("{account}-{kind}"),
                result: run(client, &user, request).await,
            });
            progress.advance();
        }
    }
    runs
}

async fn run(client: &Client, user: &str, request: Result<Request<Vec<u8>>, Error>) -> Read<()> {
    let response = call(async {
        let mut request = request.map_err(kube::Error::BuildRequest)?;
        let user = HeaderValue::from_str(user);
        let user = user.map_err(|error| kube::Error::HttpError(error.into()))?;
        request.headers_mut().insert("impersonate-user", user);
        client.request::<Value>(request).await
    });
    Ok(response.await.map(drop)?)
}

/// Requests that no agent may make. Impersonated, it is bound to no node, so all its writes are rejected.
fn by_agent(snapshot: &ClusterSnapshot) -> Vec<Attempt> {
    let lease = json!({"metadata": {"name": NAME}});
    let leases = &snapshot.lease_namespace;
    let mut attempts = vec![
        ("lease", create::<Lease>(leases, &lease)),
        ("event", create::<Event>("default", &event())),
    ];
    if let Some(node) = items(&snapshot.nodes).first() {
        attempts.push(("node", label::<Node>(&node.name)));
    }
    let watermarks = snapshot.watermarks.as_ref().ok();
    let watermark = watermarks.and_then(|it| it.cells(["Name"]).first().copied());
    if let Some([name]) = watermark {
        let request = request::Request::new(NodeWatermark::url_path(&(), None));
        let request = request.patch_subresource("status", name, &dry_patch(), &labels());
        attempts.push(("watermark", request));
    }
    attempts
}

/// Requests that no controller may make: labelling what it writes otherwise, and evicting a pod without its UID.
fn by_controller(snapshot: &ClusterSnapshot) -> Vec<Attempt> {
    let has = |argument: &str| !arguments(&snapshot.deployments, argument).is_empty();
    let mut attempts = Vec::new();
    if let Some(node) = items(&snapshot.nodes).first() {
        attempts.push(("node", label::<Node>(&node.name)));
    }
    if has("--metrics-api-listen=") {
        attempts.push(("api", label::<APIService>(API_SERVICE)));
    }
    if has("--report-listen=") {
        let eviction = json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": NAME, "namespace": "kube-system"}});
        let pods = request::Request::new(Pod::url_path(&(), Some("kube-system")));
        let request = pods.create_subresource("eviction", NAME, &dry_post(), bytes(&eviction));
        attempts.push(("eviction", request));
    }
    attempts
}

fn dry_post() -> PostParams {
    PostParams {
        dry_run: true,
        ..PostParams::default()
    }
}

fn dry_patch() -> PatchParams {
    PatchParams {
        dry_run: true,
        ..PatchParams::default()
    }
}

fn bytes(object: &Value) -> Vec<u8> {
    object.to_string().into_bytes()
}

fn create<K>(namespace: &str, object: &Value) -> Result<Request<Vec<u8>>, Error>
where
    K: Resource<DynamicType = ()>,
{
    let request = request::Request::new(K::url_path(&(), Some(namespace)));
    request.create(&dry_post(), bytes(object))
}

fn label<K: Resource<DynamicType = ()>>(name: &str) -> Result<Request<Vec<u8>>, Error> {
    let request = request::Request::new(K::url_path(&(), None));
    request.patch(name, &dry_patch(), &labels())
}

fn labels() -> Patch<Value> {
    Patch::Merge(json!({"metadata": {"labels": {"plimsoll.dev/doctor": "forbidden"}}}))
}

/// A valid event, reported by another component than the agent.
fn event() -> Value {
    json!({
        "metadata": {"name": NAME, "namespace": "default"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Normal", "reason": "Forbidden", "action": "Try", "message": "a dry run",
        "reportingComponent": NAME, "reportingInstance": NAME, "involvedObject": {"kind": "Node", "name": NAME, "namespace": "default"},
    })
}
