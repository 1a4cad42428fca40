//! Reads the cluster. Sends nothing but GET and LIST.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use futures::stream::{self, StreamExt};
use kube::api::{DynamicObject, ListParams};
use kube::core::ApiResource;
use kube::{Api, Client, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thiserror::Error;

use super::{KubeletSummary, PodSubject, ReportedWatermark};
use crate::cluster::client::CallError;
use crate::cluster::list::all;
use crate::cluster::nodes::MANAGED_SELECTOR;
use crate::cluster::typed::Typed;
use crate::cluster::watch::resource;
use crate::crd::pod_facts::PodObject;
use crate::crd::{self, Kind, node_facts, node_watermark};
use crate::engine::policy::NodeFacts;

/// Concurrent requests to kubelets.
const MAX_CONCURRENT: usize = 64;
/// Timeout of a request to a kubelet.
const KUBELET_TIMEOUT: Duration = Duration::from_secs(5);
/// Up to this many nodes, pods are listed node by node; for more, all at once.
const MAX_LISTS_BY_NODE: usize = 10;

/// Why the cluster could not be read.
#[derive(Debug, Error)]
pub enum ClusterReadError {
    /// A list failed.
    #[error("failed to list {what}: {why}")]
    List {
        /// Plural of the objects.
        what: &'static str,
        /// The reason; for a missing permission, with verb and resource.
        why: String,
    },
    /// A node given by `--node` does not exist.
    #[error("there is no node {0} that can run an agent; see kubectl get nodes")]
    NoSuchNode(String),
    /// The cluster has no policies.
    #[error(
        "the cluster has no definition of NodeQOS, so it has no policies; pass some with -f FILE, or install the \
         definitions: plimsoll crds | kubectl apply --server-side -f - (on Kubernetes 1.33: plimsoll crds --kubernetes 1.33)"
    )]
    NoDefinitions,
}

/// The nodes to preview.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Names; all nodes if empty.
    pub names: Vec<String>,
    /// Label selector.
    pub labels: Option<String>,
}

impl Selection {
    /// Whether it selects all nodes.
    pub const fn is_all(&self) -> bool {
        self.names.is_empty() && self.labels.is_none()
    }
}

/// How to query kubelets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Include network and I/O, which makes the response longer.
    pub all: bool,
    /// Time between two queries, for rates.
    pub sample: Option<Duration>,
}

/// A node.
#[derive(Clone, Debug)]
pub struct ClusterNode {
    /// Name of the node.
    pub name: String,
    /// Labels and size.
    pub facts: NodeFacts,
}

/// The last summary of a kubelet, and the one before if it was queried twice.
pub type KubeletResult = Result<(KubeletSummary, Option<KubeletSummary>), KubeletError>;

/// Why a kubelet's summary is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KubeletError {
    /// `get` of `nodes/proxy` is not allowed.
    Forbidden(String),
    /// The request failed.
    NoAnswer(String),
}

/// Reads a cluster.
#[derive(Clone)]
pub struct Cluster(Client);

impl Cluster {
    /// Uses this client.
    pub const fn new(client: Client) -> Self {
        Self(client)
    }

    /// All policies.
    ///
    /// # Errors
    /// They can't be listed; [`ClusterReadError::NoDefinitions`] if the API server does not serve them.
    pub async fn policies(&self) -> Result<Vec<Value>, ClusterReadError> {
        let mut objects = Vec::new();
        for kind in Kind::ALL {
            let resource = resource(crd::GROUP, crd::VERSION, kind.name(), kind.plural());
            let found = match self.dynamic(&resource).await {
                Err(error) if error.code() == Some(404) => {
                    return Err(ClusterReadError::NoDefinitions);
                }
                found => found.map_err(failed(kind.plural()))?,
            };
            objects.extend(found.into_iter().map(|object| policy(kind, object)));
        }
        Ok(objects)
    }

    /// The nodes, in order of name.
    ///
    /// # Errors
    /// They can't be listed, or a named node does not exist.
    pub async fn nodes(&self, selection: &Selection) -> Result<Vec<ClusterNode>, ClusterReadError> {
        let resource = resource("", "v1", "Node", "nodes");
        let api: Api<DynamicObject> = Api::all_with(self.0.clone(), &resource);
        let labels = selection.labels.iter().map(|it| it.trim());
        let labels = labels.filter(|it| !it.is_empty()).chain([MANAGED_SELECTOR]);
        let params = ListParams::default().labels(&labels.collect::<Vec<_>>().join(","));
        let mut found = Vec::new();
        if selection.names.is_empty() {
            found = list(&api, params.clone()).await.map_err(failed("nodes"))?;
        }
        for name in &selection.names {
            let params = params.clone().fields(&format!("metadata.name={name}"));
            let one = list(&api, params).await.map_err(failed("nodes"))?;
            if one.is_empty() && selection.labels.is_none() {
                return Err(ClusterReadError::NoSuchNode(name.clone()));
            }
            found.extend(one);
        }
        let mut nodes: Vec<ClusterNode> = found.into_iter().map(node).collect();
        nodes.sort_by(|a, b| a.name.cmp(&b.name));
        nodes.dedup_by(|a, b| a.name == b.name);
        Ok(nodes)
    }

    /// The pods that have not finished, by node.
    ///
    /// # Errors
    /// They can't be listed.
    pub async fn pods(
        &self,
        nodes: &[&str],
    ) -> Result<BTreeMap<String, Vec<PodObject>>, ClusterReadError> {
        const LIVE: &str = "status.phase!=Succeeded,status.phase!=Failed";
        let api: Api<Typed<PodObject>> = Api::all(self.0.clone());
        let fields: Vec<String> = if nodes.len() > MAX_LISTS_BY_NODE {
            vec![format!("spec.nodeName!=,{LIVE}")]
        } else {
            nodes
                .iter()
                .map(|node| format!("spec.nodeName={node},{LIVE}"))
                .collect()
        };
        let mut found: BTreeMap<String, Vec<PodObject>> = BTreeMap::new();
        for fields in fields {
            let params = ListParams::default().fields(&fields);
            for Typed(pod) in list(&api, params).await.map_err(failed("pods"))? {
                let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
                found.entry(node.unwrap_or_default()).or_default().push(pod);
            }
        }
        Ok(found)
    }

    /// The `NodeWatermark` of each node; empty if there is no definition.
    ///
    /// # Errors
    /// They can't be listed.
    pub async fn watermarks(&self) -> Result<Vec<DynamicObject>, ClusterReadError> {
        let resource = resource(
            node_watermark::GROUP,
            "v1alpha1",
            "NodeWatermark",
            "nodewatermarks",
        );
        match self.dynamic(&resource).await {
            Err(error) if error.code() == Some(404) => Ok(Vec::new()),
            found => found.map_err(failed("nodewatermarks")),
        }
    }

    /// The last status of each agent, by node, if it is of the current spec.
    ///
    /// # Errors
    /// They can't be listed.
    pub async fn agent_statuses(
        &self,
    ) -> Result<BTreeMap<String, ReportedWatermark>, ClusterReadError> {
        let watermarks = self.watermarks().await?.into_iter();
        Ok(watermarks
            .filter_map(|object| Some((object.name_any(), ReportedWatermark::of(&object)?)))
            .collect::<BTreeMap<_, _>>())
    }

    /// The summaries of these nodes' kubelets. `on_answer` is called for each of their answers.
    pub async fn kubelet_summaries(
        &self,
        nodes: &[&str],
        options: Options,
        on_answer: impl Fn(),
    ) -> BTreeMap<String, KubeletResult> {
        let mut earlier = BTreeMap::new();
        if let Some(sample) = options.sample {
            earlier = self.summaries(nodes, options.all, &on_answer).await;
            tokio::time::sleep(sample).await;
        }
        let now = self.summaries(nodes, options.all, &on_answer).await;
        let pair = |(name, summary): (String, Result<KubeletSummary, KubeletError>)| {
            let before = earlier.remove(&name).and_then(Result::ok);
            (name, summary.map(|summary| (summary, before)))
        };
        now.into_iter().map(pair).collect::<BTreeMap<_, _>>()
    }

    async fn summaries(
        &self,
        nodes: &[&str],
        all: bool,
        on_answer: impl Fn(),
    ) -> BTreeMap<String, Result<KubeletSummary, KubeletError>> {
        let request = |node: &str| {
            let (cluster, node) = (self.clone(), node.to_owned());
            async move {
                let summary = cluster.summary(&node, all).await;
                (node, summary)
            }
        };
        let requests: Vec<_> = nodes.iter().map(|node| request(node)).collect();
        stream::iter(requests)
            .buffer_unordered(MAX_CONCURRENT)
            .inspect(|_| on_answer())
            .collect()
            .await
    }

    async fn summary(&self, node: &str, all: bool) -> Result<KubeletSummary, KubeletError> {
        let only = if all { "" } else { "?only_cpu_and_memory=true" };
        let path = format!("/api/v1/nodes/{node}/proxy/stats/summary{only}");
        let request = hyper::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| KubeletError::NoAnswer(error.to_string()))?;
        let answer =
            tokio::time::timeout(KUBELET_TIMEOUT, self.0.request::<KubeletSummary>(request)).await;
        let no_answer = || format!("no answer within {} s", KUBELET_TIMEOUT.as_secs());
        let answer = answer.map_err(|_| KubeletError::NoAnswer(no_answer()))?;
        answer
            .map_err(CallError::Kube)
            .map_err(|error| match error.code() {
                Some(401 | 403) => KubeletError::Forbidden(error.message()),
                _ => KubeletError::NoAnswer(error.message()),
            })
    }

    async fn dynamic(&self, resource: &ApiResource) -> Result<Vec<DynamicObject>, CallError> {
        let api: Api<DynamicObject> = Api::all_with(self.0.clone(), resource);
        list(&api, ListParams::default()).await
    }
}

fn failed(what: &'static str) -> impl Fn(CallError) -> ClusterReadError {
    move |error| ClusterReadError::List {
        what,
        why: error.message(),
    }
}

async fn list<K>(api: &Api<K>, params: ListParams) -> Result<Vec<K>, CallError>
where
    K: Clone + DeserializeOwned + Debug,
{
    all(params, async |page| api.list(&page).await).await
}

/// Adds apiVersion and kind, which items of a list lack.
fn policy(kind: Kind, object: DynamicObject) -> Value {
    let mut value = object.data;
    value["apiVersion"] = crd::API_VERSION.into();
    value["kind"] = kind.name().into();
    // An annotation says whether a `PodQOS` only reports.
    let metadata = object.metadata;
    value["metadata"] = json!({"name": metadata.name, "annotations": metadata.annotations});
    value
}

fn node(object: DynamicObject) -> ClusterNode {
    let name = object.name_any();
    let mut value = object.data;
    value["metadata"] = json!({"labels": object.metadata.labels});
    ClusterNode {
        name,
        facts: node_facts(&value),
    }
}

/// The pods of one node, and a message for each pod that is invalid.
pub fn subjects(pods: &[PodObject]) -> (Vec<PodSubject>, Vec<String>) {
    let mut subjects = Vec::new();
    let mut unreadable = Vec::new();
    for pod in pods {
        match PodSubject::of(pod) {
            Ok(subject) => subjects.push(subject),
            Err(error) => unreadable.push(format!("pod {} is skipped: {error}", pod.name_any())),
        }
    }
    (subjects, unreadable)
}
