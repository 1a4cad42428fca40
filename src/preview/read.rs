//! Reads the cluster. GET and LIST are all it ever sends.

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

use super::{Kept, Subject, Summary};
use crate::cluster::client::CallError;
use crate::cluster::list::all;
use crate::cluster::nodes::KEPT;
use crate::cluster::typed::Typed;
use crate::cluster::watch::resource;
use crate::crd::pod_facts::PodObject;
use crate::crd::{self, Kind, node_facts, node_watermark};
use crate::engine::policy::NodeFacts;
use crate::ordered;

/// So many kubelets are asked at a time...
const AT_ONCE: usize = 64;
/// ...and each is given so long.
const ANSWER: Duration = Duration::from_secs(5);
/// For so many nodes pods are listed node by node, for more all at once.
const FEW: usize = 10;

/// Why the cluster could not be read.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The list was refused or not answered.
    #[error("failed to list {what}: {why}")]
    List {
        /// Which objects.
        what: &'static str,
        /// In words, with verb and resource where it is forbidden.
        why: String,
    },
    /// `--node` names it.
    #[error("there is no node {0} that an agent could keep; see kubectl get nodes")]
    NoSuchNode(String),
    /// Nothing to preview.
    #[error(
        "the cluster has no definition of NodeQOS, and so no policies; give some with -f FILE, or install the \
         definitions: plimsoll crds | kubectl apply --server-side -f - (on Kubernetes 1.33: plimsoll crds --kubernetes 1.33)"
    )]
    NoDefinitions,
}

/// Which nodes are asked for.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// These; all where empty.
    pub names: Vec<String>,
    /// With these labels.
    pub labels: Option<String>,
}

/// How kubelets are asked.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Network and I/O are asked for as well, which makes the answer longer.
    pub all: bool,
    /// Ask twice, so long apart.
    pub sample: Option<Duration>,
}

/// A node.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Labels and size.
    pub facts: NodeFacts,
}

/// What a kubelet told: the last answer, and the one before where it was asked twice.
pub type Answer = Result<(Summary, Option<Summary>), Silence>;

/// Why a kubelet's figures are not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Silence {
    /// `get` of `nodes/proxy` is not allowed.
    Forbidden(String),
    /// It did not answer.
    NoAnswer(String),
}

/// A cluster that is read.
#[derive(Clone)]
pub struct Cluster(Client);

impl Cluster {
    /// By this client.
    pub const fn new(client: Client) -> Self {
        Self(client)
    }

    /// All policies.
    ///
    /// # Errors
    /// They can't be listed; [`ReadError::NoDefinitions`] where the API server does not know of them.
    pub async fn policies(&self) -> Result<Vec<Value>, ReadError> {
        let mut objects = Vec::new();
        for kind in Kind::ALL {
            let resource = resource(crd::GROUP, crd::VERSION, kind.name(), kind.plural());
            let found = match self.dynamic(&resource).await {
                Err(error) if error.code() == Some(404) => return Err(ReadError::NoDefinitions),
                found => found.map_err(failed(kind.name()))?,
            };
            objects.extend(found.into_iter().map(|object| policy(kind, object)));
        }
        Ok(objects)
    }

    /// The nodes, in order of name.
    ///
    /// # Errors
    /// They can't be listed, or one that is named is not there.
    pub async fn nodes(&self, selection: &Selection) -> Result<Vec<Node>, ReadError> {
        let resource = resource("", "v1", "Node", "nodes");
        let api: Api<DynamicObject> = Api::all_with(self.0.clone(), &resource);
        let labels = selection.labels.iter().map(|it| it.trim());
        let labels = labels.filter(|it| !it.is_empty()).chain([KEPT]);
        let params = ListParams::default().labels(&labels.collect::<Vec<_>>().join(","));
        let mut found = Vec::new();
        if selection.names.is_empty() {
            found = list(&api, params.clone()).await.map_err(failed("nodes"))?;
        }
        for name in &selection.names {
            let params = params.clone().fields(&format!("metadata.name={name}"));
            let one = list(&api, params).await.map_err(failed("nodes"))?;
            if one.is_empty() && selection.labels.is_none() {
                return Err(ReadError::NoSuchNode(name.clone()));
            }
            found.extend(one);
        }
        let mut nodes: Vec<Node> = found.into_iter().map(node).collect();
        ordered::sort_by(&mut nodes, |a, b| a.name.cmp(&b.name));
        nodes.dedup_by(|a, b| a.name == b.name);
        Ok(nodes)
    }

    /// The pods that have not ended, by node.
    ///
    /// # Errors
    /// They can't be listed.
    pub async fn pods(
        &self,
        nodes: &[&str],
    ) -> Result<BTreeMap<String, Vec<PodObject>>, ReadError> {
        const LIVE: &str = "status.phase!=Succeeded,status.phase!=Failed";
        let api: Api<Typed<PodObject>> = Api::all(self.0.clone());
        let fields: Vec<String> = if nodes.len() > FEW {
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

    /// What agents said last, by node; none where there is no definition.
    ///
    /// # Errors
    /// They can't be listed.
    pub async fn kept(&self) -> Result<BTreeMap<String, Kept>, ReadError> {
        let resource = resource(
            node_watermark::GROUP,
            "v1alpha1",
            "NodeWatermark",
            "nodewatermarks",
        );
        let found = match self.dynamic(&resource).await {
            Err(error) if error.code() == Some(404) => return Ok(BTreeMap::new()),
            found => found.map_err(failed("nodewatermarks"))?,
        };
        let kept = found.into_iter();
        Ok(ordered::map(kept.filter_map(|object| {
            Some((object.name_any(), Kept::of(&object)?))
        })))
    }

    /// What the kubelets of these nodes tell.
    pub async fn answers(&self, nodes: &[&str], options: Options) -> BTreeMap<String, Answer> {
        let mut earlier = BTreeMap::new();
        if let Some(sample) = options.sample {
            earlier = self.summaries(nodes, options.all).await;
            tokio::time::sleep(sample).await;
        }
        let now = self.summaries(nodes, options.all).await;
        let pair = |(name, answer): (String, Result<Summary, Silence>)| {
            let before = earlier.remove(&name).and_then(Result::ok);
            (name, answer.map(|summary| (summary, before)))
        };
        ordered::map(now.into_iter().map(pair))
    }

    async fn summaries(
        &self,
        nodes: &[&str],
        all: bool,
    ) -> BTreeMap<String, Result<Summary, Silence>> {
        let ask = |node: &str| {
            let (cluster, node) = (self.clone(), node.to_owned());
            async move {
                let answer = cluster.summary(&node, all).await;
                (node, answer)
            }
        };
        let asked: Vec<_> = nodes.iter().map(|node| ask(node)).collect();
        stream::iter(asked)
            .buffer_unordered(AT_ONCE)
            .collect()
            .await
    }

    async fn summary(&self, node: &str, all: bool) -> Result<Summary, Silence> {
        let only = if all { "" } else { "?only_cpu_and_memory=true" };
        let path = format!("/api/v1/nodes/{node}/proxy/stats/summary{only}");
        let request = hyper::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| Silence::NoAnswer(error.to_string()))?;
        let answer = tokio::time::timeout(ANSWER, self.0.request::<Summary>(request)).await;
        let answer = answer.map_or(Err(CallError::TimedOut), |answer| {
            answer.map_err(CallError::Kube)
        });
        answer.map_err(|error| match error.code() {
            Some(401 | 403) => Silence::Forbidden(error.words()),
            _ => Silence::NoAnswer(error.words()),
        })
    }

    async fn dynamic(&self, resource: &ApiResource) -> Result<Vec<DynamicObject>, CallError> {
        let api: Api<DynamicObject> = Api::all_with(self.0.clone(), resource);
        list(&api, ListParams::default()).await
    }
}

fn failed(what: &'static str) -> impl Fn(CallError) -> ReadError {
    move |error| ReadError::List {
        what,
        why: error.words(),
    }
}

async fn list<K>(api: &Api<K>, params: ListParams) -> Result<Vec<K>, CallError>
where
    K: Clone + DeserializeOwned + Debug,
{
    all(params, async |page| api.list(&page).await).await
}

/// As a manifest has it: the items of a list come without kind.
fn policy(kind: Kind, object: DynamicObject) -> Value {
    let mut value = object.data;
    value["apiVersion"] = crd::API_VERSION.into();
    value["kind"] = kind.name().into();
    value["metadata"] = json!({"name": object.metadata.name});
    value
}

fn node(object: DynamicObject) -> Node {
    let name = object.name_any();
    let mut value = object.data;
    value["metadata"] = json!({"labels": object.metadata.labels});
    Node {
        name,
        facts: node_facts(&value),
    }
}

/// The pods of one node as decisions see them, and those that can't be read, in words.
pub fn subjects(pods: &[PodObject]) -> (Vec<Subject>, Vec<String>) {
    let mut subjects = Vec::new();
    let mut unreadable = Vec::new();
    for pod in pods {
        match Subject::of(pod) {
            Ok(subject) => subjects.push(subject),
            Err(error) => unreadable.push(format!("pod {} is left out: {error}", pod.name_any())),
        }
    }
    (subjects, unreadable)
}
