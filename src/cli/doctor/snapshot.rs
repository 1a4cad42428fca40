//! The state of a cluster, as far as the checks need it. A part that can't be read is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use jiff::Timestamp;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Pod, PodTemplateSpec, Taint};
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use k8s_openapi::apimachinery::pkg::version::Info;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::ListParams;
use kube::core::{ApiResource, Object, ObjectList};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::super::server_table::ServerTable;
use super::dry_runs::{self, DryRun};
use super::layout;
use super::permissions::{self, Review};
use super::placement::PlacementState;
use super::pods::AgentPod;
use crate::cli::progress::ProgressLine;
use crate::clock;
use crate::cluster::client::{CallError, call};
use crate::cluster::list::all;
use crate::cluster::nodes::{MANAGED_SELECTOR, tolerates};
use crate::crd::crane_annotations::CraneAnnotations;
use crate::crd::emergency_stop::OBJECT;
use crate::crd::{AvoidanceAction, NodeQos, NodeWatermark, PodQos, load_label};

/// Labels of everything in the chart.
pub(super) const OURS: &str = "app.kubernetes.io/name=plimsoll";
/// Label of a node's architecture.
const ARCHITECTURE: &str = "kubernetes.io/arch";
/// Architectures that the published image is for.
const ARCHITECTURES: [&str; 2] = ["amd64", "arm64"];
/// What `ClusterSnapshot::read` reads besides the agents: the calls of `Scope::full`.
const PARTS: usize = 15;
/// There may be many events about mounts, and the first ones say what is missing.
const MAX_EVENTS: u32 = 500;
/// The argument with the namespace of the agents' Leases.
const LEASE_NAMESPACE: &str = "--lease-namespace=";
/// The `ConfigMap` in which API servers publish how aggregated APIs can verify them.
const AUTHENTICATION: &str = "extension-apiserver-authentication";
pub(super) const API_SERVICE: &str = "v1alpha1.metrics.plimsoll.dev";

pub(in crate::cli) type Read<T> = Result<T, SnapshotError>;

/// Why something could not be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::cli) struct SnapshotError {
    /// The HTTP code of the response, if there was one.
    pub code: Option<u16>,
    pub why: String,
}

impl SnapshotError {
    pub(in crate::cli) fn is_missing(&self) -> bool {
        self.code == Some(404)
    }
}

impl From<CallError> for SnapshotError {
    fn from(error: CallError) -> Self {
        Self {
            code: error.code(),
            why: error.message(),
        }
    }
}

/// The state of a cluster. With `--only agents`, only the fields up to `agents` are read.
#[derive(Debug)]
pub(super) struct ClusterSnapshot {
    pub only_agents: bool,
    pub now: Timestamp,
    pub version: Read<Info>,
    pub daemon_sets: Read<Vec<DaemonSet>>,
    pub nodes: Read<Vec<AgentNode>>,
    pub agents: Vec<AgentNamespace>,
    pub lease_namespace: String,
    pub deployments: Read<Vec<Deployment>>,
    /// The leader election Lease of each controller.
    pub elections: Vec<Read<Lease>>,
    pub watermarks: Read<ServerTable>,
    pub leases: Read<Vec<Lease>>,
    pub stop: Read<ConfigMap>,
    /// How aggregated APIs can verify API servers.
    pub aggregation: Read<ConfigMap>,
    pub api_service: Read<APIService>,
    /// The `OpenAPI` documents of our two groups.
    pub schemas: [Read<Value>; 2],
    pub admission_policies: Read<Vec<ValidatingAdmissionPolicy>>,
    pub admission_bindings: Read<Vec<ValidatingAdmissionPolicyBinding>>,
    pub flow_schemas: Read<Vec<FlowSchema>>,
    pub priority_levels: Read<Vec<PriorityLevelConfiguration>>,
    pub node_qos: Read<Vec<Policy>>,
    pub pod_qos: Read<Vec<Policy>>,
    pub actions: Read<Vec<Policy>>,
    pub placement: PlacementState,
    pub reviews: Vec<Review>,
    pub dry_runs: Vec<DryRun>,
}

/// A node that can run an agent.
#[derive(Clone, Debug)]
pub(super) struct AgentNode {
    pub name: String,
    pub ready: bool,
    /// It is being deleted.
    pub deleted: bool,
    /// The image is not for its architecture.
    pub unsupported_architecture: bool,
    /// Its taints, except those that every pod of a `DaemonSet` tolerates, and those that only advise against it.
    pub taints: Vec<Taint>,
    /// Its label `plimsoll.dev/load`.
    pub load_label: Option<String>,
    /// Its annotations for crane-scheduler.
    pub crane: CraneAnnotations,
}

impl From<Node> for AgentNode {
    fn from(node: Node) -> Self {
        let conditions = node.status.iter().flat_map(|it| &it.conditions).flatten();
        let mut ready = conditions.filter(|it| it.type_ == "Ready");
        Self {
            ready: ready.any(|it| it.status == "True"),
            deleted: node.metadata.deletion_timestamp.is_some(),
            unsupported_architecture: node
                .labels()
                .get(ARCHITECTURE)
                .is_some_and(|it| !ARCHITECTURES.contains(&it.as_str())),
            taints: taints(&node),
            load_label: node.labels().get(load_label::KEY).cloned(),
            crane: CraneAnnotations::of(node.metadata.annotations.as_ref()),
            name: node.name_any(),
        }
    }
}

fn taints(node: &Node) -> Vec<Taint> {
    let all = node.spec.iter().flat_map(|it| &it.taints).flatten();
    let hard = all.filter(|it| it.effect != "PreferNoSchedule");
    let others = hard.filter(|it| !it.key.starts_with("node.kubernetes.io/"));
    others.cloned().collect()
}

/// A namespace with agents.
#[derive(Debug)]
pub(super) struct AgentNamespace {
    pub name: String,
    pub object: Read<Namespace>,
    pub pods: Read<Vec<AgentPod>>,
    /// Events of `DaemonSet`s whose pods could not be created.
    pub failed_create: Read<Vec<Event>>,
    /// Events of pods whose volumes could not be mounted.
    pub failed_mount: Read<Vec<Event>>,
    /// Where the kubelets have the cgroups of their pods, by node; only of nodes where such a mount failed.
    pub kubepods: BTreeMap<String, String>,
}

/// A policy. Only its status is typed: an object that an older definition accepted must not hide the others.
pub(in crate::cli) type Policy = Object<Option<Value>, PolicyStatus>;

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::cli) struct PolicyStatus {
    pub conditions: Option<Vec<Condition>>,
    pub observed_generation: Option<i64>,
    pub matched_nodes: Option<u64>,
    pub matched_pods: Option<u64>,
    pub used_by: Vec<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(in crate::cli) struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub reason: String,
    pub message: String,
}

/// A workload with the pod template of agents or controllers.
pub(in crate::cli) trait InstalledWorkload: Resource<DynamicType = ()> {
    fn template(&self) -> Option<&PodTemplateSpec>;

    fn account(&self) -> Option<&str> {
        let pod = self.template()?.spec.as_ref()?;
        pod.service_account_name.as_deref()
    }

    fn tolerates(&self, taint: &Taint) -> bool {
        let pod = self.template().and_then(|it| it.spec.as_ref());
        let mut tolerations = pod.into_iter().flat_map(|it| &it.tolerations).flatten();
        tolerations.any(|it| tolerates(it, taint))
    }

    /// The values of a command line argument, such as `--lease-name=`.
    fn argument<'a>(&'a self, argument: &str) -> Vec<&'a str> {
        let pod = self.template().and_then(|it| it.spec.as_ref());
        let containers = pod.into_iter().flat_map(|it| &it.containers);
        let arguments = containers.flat_map(|it| &it.args).flatten();
        let values = arguments.filter_map(|it| it.strip_prefix(argument));
        values.collect()
    }
}

impl InstalledWorkload for DaemonSet {
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref().map(|spec| &spec.template)
    }
}

impl InstalledWorkload for Deployment {
    fn template(&self) -> Option<&PodTemplateSpec> {
        self.spec.as_ref().map(|spec| &spec.template)
    }
}

/// The objects of a list; none if it could not be read.
pub(in crate::cli) fn items<T>(list: &Read<Vec<T>>) -> &[T] {
    list.as_deref().unwrap_or_default()
}

/// The values of an argument of any of these workloads.
pub(super) fn arguments<'a, W: InstalledWorkload>(
    workloads: &'a Read<Vec<W>>,
    argument: &str,
) -> Vec<&'a str> {
    let all = items(workloads).iter();
    all.flat_map(|it| it.argument(argument)).collect()
}

/// Workloads by namespace and service account.
pub(super) fn accounts<W: InstalledWorkload>(
    workloads: &Read<Vec<W>>,
) -> BTreeMap<(String, String), &W> {
    let named = |it| Some(((W::namespace(it)?, W::account(it)?.to_owned()), it));
    items(workloads).iter().filter_map(named).collect()
}

/// The name of a service account as a user.
pub(super) fn user(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}

struct Scope<'a> {
    only_agents: bool,
    progress: &'a ProgressLine,
}

impl Scope<'_> {
    /// Reads something that is not needed for `--only agents`.
    async fn full<T>(&self, read: impl Future<Output = Read<T>>) -> Read<T> {
        if self.only_agents {
            return Err(SnapshotError::default());
        }
        let read = read.await;
        self.progress.advance();
        read
    }

    async fn placement(
        &self,
        client: &Client,
        deployments: &Read<Vec<Deployment>>,
    ) -> PlacementState {
        if self.only_agents {
            PlacementState::unread()
        } else {
            PlacementState::read(client, deployments).await
        }
    }
}

impl ClusterSnapshot {
    /// Reads the cluster. `lease_namespace` overrides the arguments of the agents.
    ///
    /// # Errors
    /// The API server can't be reached at all.
    pub(super) async fn read(
        client: &Client,
        only_agents: bool,
        lease_namespace: Option<&str>,
        progress: &ProgressLine,
    ) -> anyhow::Result<Self> {
        progress.next("reading the cluster", (!only_agents).then_some(PARTS));
        let it = Scope {
            only_agents,
            progress,
        };
        let version = version(client).await?;
        let daemon_sets: Read<Vec<DaemonSet>> = ours(client, "agent").await;
        let configured = arguments(&daemon_sets, LEASE_NAMESPACE).first().copied();
        let lease_namespace = lease_namespace.or(configured);
        let lease_namespace = lease_namespace.unwrap_or(super::LEASE_NAMESPACE).to_owned();
        let leases = Api::namespaced(client.clone(), &lease_namespace);
        let leases = it.full(list(leases, ListParams::default(), |it| it)).await;
        // Leases are compared with the clock.
        let now = clock::wall_time();
        let nodes: Api<Node> = Api::all(client.clone());
        let services: Api<APIService> = Api::all(client.clone());
        let namespaces = items(&daemon_sets).iter().filter_map(DaemonSet::namespace);
        let mut agents = Vec::new();
        for namespace in namespaces.collect::<BTreeSet<_>>() {
            agents.push(AgentNamespace::read(client, namespace).await);
        }
        let deployments: Read<Vec<Deployment>> = it.full(ours(client, "controller")).await;
        let watermarks = ServerTable::read(client, NodeWatermark::url_path(&(), None));
        let mut snapshot = Self {
            only_agents,
            nodes: list(nodes, labelled(MANAGED_SELECTOR), AgentNode::from).await,
            agents,
            elections: elections(client, &deployments).await,
            watermarks: it.full(read(watermarks)).await,
            leases,
            now,
            stop: it.full(get(client, &lease_namespace, OBJECT)).await,
            aggregation: it.full(get(client, "kube-system", AUTHENTICATION)).await,
            api_service: it.full(read(services.get(API_SERVICE))).await,
            schemas: [
                it.full(schema::<NodeQos>(client)).await,
                it.full(schema::<NodeWatermark>(client)).await,
            ],
            admission_policies: it.full(chart_objects(client)).await,
            admission_bindings: it.full(chart_objects(client)).await,
            flow_schemas: it.full(chart_objects(client)).await,
            priority_levels: it.full(chart_objects(client)).await,
            node_qos: it.full(policies::<NodeQos>(client)).await,
            pod_qos: it.full(policies::<PodQos>(client)).await,
            actions: it.full(policies::<AvoidanceAction>(client)).await,
            placement: it.placement(client, &deployments).await,
            reviews: Vec::new(),
            dry_runs: Vec::new(),
            version,
            daemon_sets,
            deployments,
            lease_namespace,
        };
        if !only_agents {
            snapshot.reviews = permissions::review_all(client, &snapshot, progress).await;
            snapshot.dry_runs = dry_runs::run_all(client, &snapshot, progress).await;
        }
        Ok(snapshot)
    }
}

/// The version of the API server. Without permission for it, other parts may be readable.
async fn version(client: &Client) -> anyhow::Result<Read<Info>> {
    let version = read(client.apiserver_version()).await;
    match version {
        Err(error) if error.code != Some(403) => {
            anyhow::bail!(
                "failed to read the version of the API server: {}",
                error.why
            )
        }
        version => Ok(version),
    }
}

impl AgentNamespace {
    async fn read(client: &Client, name: String) -> Self {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let pods: Api<Pod> = Api::namespaced(client.clone(), &name);
        let events: Api<Event> = Api::namespaced(client.clone(), &name);
        let about = |kind: &str, reason: &str| {
            let fields = format!("involvedObject.kind={kind},reason={reason}");
            ListParams::default().fields(&fields)
        };
        let failed_mount = about("Pod", "FailedMount").limit(MAX_EVENTS);
        let failed_mount = read(events.list(&failed_mount)).await;
        let failed_mount = failed_mount.map(|page| page.items);
        let failed_create = about("DaemonSet", "FailedCreate");
        let pods = list(pods, labelled(&component("agent")), AgentPod::from).await;
        Self {
            object: read(namespaces.get(&name)).await,
            failed_create: list(events, failed_create, |it| it).await,
            kubepods: layout::kubepods(client, items(&failed_mount), items(&pods)).await,
            failed_mount,
            pods,
            name,
        }
    }
}

/// The namespaces of the agents' Leases, as the arguments of the agents say; empty if these can't be read.
pub(in crate::cli) async fn lease_namespaces(client: &Client) -> Vec<String> {
    let daemon_sets: Read<Vec<DaemonSet>> = ours(client, "agent").await;
    let namespaces: BTreeSet<_> = arguments(&daemon_sets, LEASE_NAMESPACE)
        .into_iter()
        .collect();
    namespaces.into_iter().map(str::to_owned).collect()
}

fn labelled(labels: &str) -> ListParams {
    ListParams::default().labels(labels)
}

pub(super) fn component(name: &str) -> String {
    format!("{OURS},app.kubernetes.io/component={name}")
}

pub(in crate::cli) async fn read<T>(request: impl Future<Output = kube::Result<T>>) -> Read<T> {
    Ok(call(request).await?)
}

/// The objects of a component, in all namespaces.
pub(in crate::cli) async fn ours<K>(client: &Client, name: &str) -> Read<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    list(Api::all(client.clone()), labelled(&component(name)), |it| {
        it
    })
    .await
}

/// The Leases that the controllers are configured to use.
pub(in crate::cli) async fn elections(
    client: &Client,
    deployments: &Read<Vec<Deployment>>,
) -> Vec<Read<Lease>> {
    let mut leases = Vec::new();
    for deployment in items(deployments) {
        let namespace = deployment.namespace().unwrap_or_default();
        for name in deployment.argument("--lease-name=") {
            leases.push(get(client, &namespace, name).await);
        }
    }
    leases
}

/// The chart's objects of a kind.
async fn chart_objects<K>(client: &Client) -> Read<Vec<K>>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    list(Api::all(client.clone()), labelled(OURS), |it| it).await
}

pub(in crate::cli) async fn policies<K: Resource<DynamicType = ()>>(
    client: &Client,
) -> Read<Vec<Policy>> {
    let resource = ApiResource::erase::<K>(&());
    let api: Api<Policy> = Api::all_with(client.clone(), &resource);
    list(api, ListParams::default(), |it| it).await
}

/// The `OpenAPI` document of the kind's group.
async fn schema<K: Resource<DynamicType = ()>>(client: &Client) -> Read<Value> {
    let path = format!("/openapi/v3/apis/{}", K::api_version(&()));
    let request = async {
        let request = hyper::Request::get(path).body(Vec::new());
        let request = request.map_err(kube::Error::HttpError)?;
        client.request(request).await
    };
    read(request).await
}

pub(in crate::cli) async fn get<K>(client: &Client, namespace: &str, name: &str) -> Read<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned,
{
    let api: Api<K> = Api::namespaced(client.clone(), namespace);
    read(api.get(name)).await
}

/// Lists objects page by page, each reduced by `reduce`.
pub(in crate::cli) async fn list<K, T>(
    api: Api<K>,
    params: ListParams,
    reduce: impl Fn(K) -> T,
) -> Read<Vec<T>>
where
    K: Clone + Debug + DeserializeOwned,
    T: Clone,
{
    let page = async |params: ListParams| {
        let page = api.list(&params).await?;
        Ok(ObjectList {
            types: page.types,
            metadata: page.metadata,
            items: page.items.into_iter().map(&reduce).collect(),
        })
    };
    Ok(all(params, page).await?)
}
