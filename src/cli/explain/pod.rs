//! `plimsoll explain pod`.

mod report;

use std::process::ExitCode;

use anyhow::{Context as _, anyhow};
use k8s_openapi::api::core::v1 as k8s;
use kube::api::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde::Deserialize as _;
use serde_json::Value;

use self::report::{OnItsNode, PodExplanation};
use super::placement;
use crate::cli::cluster_args::ClusterArgs;
use crate::cli::output::Output;
use crate::cli::{print, runtime};
use crate::clock;
use crate::cluster::client::{CallError, call};
use crate::crd::pod_facts::{PodObject, pod_facts};
use crate::crd::{NodeMetric, NodeWatermark, Objects, compile, node_facts};
use crate::preview::{Cluster, ClusterReadError};

const HELP: &str = "\
Says which policies may act on the pod and how, what is done to it now, by which rule and since when, how long it waits for a CPU, \
how to exempt it, and the least loaded nodes for it. What is done to it now comes from the agent's status in the NodeWatermark of \
its node.

Permissions: get pods, nodes, nodewatermarks and nodemetrics; list nodeqoss, podqoss and avoidanceactions, and for the placement \
nodes and nodemetrics.

Examples:
  plimsoll explain pod web-0 -n shop

Exit status: 0 shown, 2 the pod or the policies could not be read.";

/// Arguments of `plimsoll explain pod`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Name of the pod
    #[arg(value_name = "POD")]
    name: String,

    /// Namespace of the pod [default: that of the context]
    #[arg(short = 'n', long, value_name = "NAME")]
    namespace: Option<String>,

    /// Output format; JSON and YAML have {pod, node, protected, policies: [{podQOS, allowedActions, standing}], rules: [{rule,
    /// strategy, may, state}], now: {throttled, bursts, evictions, would}, cpuDelay, placement: {nodes: [{node, load, withPod}]}, notes}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let text = runtime::start()?.block_on(explain(args))?;
    print(text.as_bytes())
}

async fn explain(args: &Args) -> anyhow::Result<String> {
    let client = args.cluster.connect().await?;
    let namespace = args.namespace.as_deref();
    let namespace = namespace.unwrap_or_else(|| client.default_namespace());
    let name = &args.name;
    let pod = get::<k8s::Pod>(&client, Some(namespace), name).await;
    let pod =
        pod.map_err(|error| anyhow!("failed to read pod {namespace}/{name}: {}", error.message()))?;
    let facts = pod_facts(&PodObject::deserialize(&pod)?)
        .with_context(|| format!("failed to read pod {namespace}/{name}"))?;
    let policies = match Cluster::new(client.clone()).policies().await {
        Err(ClusterReadError::NoDefinitions) => Vec::new(),
        found => found?,
    };
    let node = pod["spec"]["nodeName"].as_str().map(str::to_owned);
    let at = match &node {
        Some(node) => on_its_node(&client, node).await?,
        None => OnItsNode::default(),
    };
    let compiled = compile(&Objects::from_values(policies), &at.facts);
    let now = clock::wall_time();
    let mut explanation = PodExplanation::new(&facts, node, &compiled.policy, at, now);
    if !is_bound_to_a_node(&pod) {
        let best = placement::best_for(&client, &pod, now).await;
        explanation.placed(best.map_err(|error| error.to_string()));
    }
    let structured = args.output.of(&explanation)?;
    Ok(structured.unwrap_or_else(|| explanation.to_string()))
}

/// No scheduler chooses the node of a `DaemonSet`'s pod, or of a static one.
fn is_bound_to_a_node(pod: &Value) -> bool {
    let owners = pod["metadata"]["ownerReferences"].as_array();
    let mut kinds = owners.into_iter().flatten().map(|owner| &owner["kind"]);
    kinds.any(|kind| kind == "DaemonSet" || kind == "Node")
}

async fn get<K>(client: &Client, namespace: Option<&str>, name: &str) -> Result<Value, CallError>
where
    K: kube::Resource<DynamicType = ()>,
{
    let kind = ApiResource::erase::<K>(&());
    let api: Api<DynamicObject> = match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &kind),
        None => Api::all_with(client.clone(), &kind),
    };
    let object = call(api.get(name)).await?;
    Ok(serde_json::to_value(object).unwrap_or_default())
}

/// What is known of a node; a part that is not served, or that the user may not read, is a note.
async fn on_its_node(client: &Client, name: &str) -> anyhow::Result<OnItsNode> {
    let (node, watermark, metric) = tokio::join!(
        get::<k8s::Node>(client, None, name),
        get::<NodeWatermark>(client, None, name),
        get::<NodeMetric>(client, None, name),
    );
    let node = node.map_err(|error| anyhow!("failed to read node {name}: {}", error.message()))?;
    let mut notes = Vec::new();
    let watermark = match watermark {
        Ok(object) => NodeWatermark::deserialize(&object)?.status,
        Err(error) if error.code() == Some(404) => None,
        Err(error) => {
            let why = error.message();
            notes.push(format!(
                "what is done to it now is unknown: failed to read NodeWatermark {name}: {why}"
            ));
            None
        }
    };
    let metric = metric.ok().and_then(|it| NodeMetric::deserialize(&it).ok());
    Ok(OnItsNode {
        facts: node_facts(&node),
        watermark,
        metric: metric.map(|it| it.status),
        notes,
    })
}
