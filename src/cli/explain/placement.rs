//! `plimsoll explain placement`.

mod pod;
mod report;
mod scheduler_views;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, anyhow, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1 as k8s;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::{Api, Client};
use serde_json::Value;

use self::pod::ExplainedPod;
use self::report::ExplainedNode;
pub(super) use self::report::Explanation;
use crate::cli::cluster_args::ClusterArgs;
use crate::cli::output::Output;
use crate::cli::top::read;
use crate::cli::{print, runtime};
use crate::clock;
use crate::cluster::client::call;
use crate::cluster::list::all;
use crate::crd::node_metric::API_VERSION;

const HELP: &str = "\
LOAD is how near a node is to where its own rules act, which is at 100. It is the highest of CPU, memory and pressure; for CPU \
and memory it is what is expected to be used (or was, in lasting peaks) divided by the load line: the lowest threshold of an \
enforced rule, in percent of the node, or 90. With a pod, WITH POD is the load after its start, and NOTES say why the node is \
not a candidate. LABEL is what the node's agent wrote to plimsoll.dev/load; SCORE is what the terms of the label add up to \
for a scheduler that uses them, from 8 (60 and less) to 0 (100), and 4 for a node without the label. EXTENDER is what the \
controller's extender gives to it, from 9 to 0, as a mean over pods; the best node of a pod gets one more. CRANE is there if \
agents write the annotations of crane-scheduler: use of CPU and memory in percent, and the hot value, of which each 0.1 takes \
one of crane's 100 points. NOTES also name the soft taint.

This is not a scheduler: the resources that other pods request, volumes, topology spread, affinity to other pods and other \
scores are not considered. Events of the pod say why a scheduler could not place it.

Permissions: list nodes, list nodemetrics.metrics.plimsoll.dev; with a pod, get pods.

Examples:
  All nodes, the least loaded first:
    plimsoll explain placement
  For a pod of the cluster:
    plimsoll explain placement web-0 -n shop
  For a manifest, before it is applied (a Pod or anything with a pod template):
    plimsoll explain placement -f deployment.yaml

Exit status: 0 shown, 2 something could not be read.";

/// Arguments of `plimsoll explain placement`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Name of a pod
    #[arg(value_name = "POD", conflicts_with = "filename")]
    pod: Option<String>,

    /// Namespace of the pod [default: that of the context]
    #[arg(short = 'n', long, value_name = "NAME")]
    namespace: Option<String>,

    /// Manifest of a Pod, or of a workload with a pod template
    #[arg(short = 'f', long, value_name = "FILE")]
    filename: Option<PathBuf>,

    /// Output format; JSON and YAML have {pod, nodes: [{node, load, withPod, label, score, extender, softTaint,
    /// crane, ageSeconds, cpu, memory, notes, ...}]}
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
    let manifest = args
        .filename
        .as_deref()
        .map(pod::read_manifest)
        .transpose()?;
    let client = args.cluster.connect().await?;
    let pod = match (&args.pod, manifest) {
        (Some(name), _) => {
            let namespace = args.namespace.as_deref();
            let namespace = namespace.unwrap_or_else(|| client.default_namespace());
            Some(get_pod(&client, namespace, name).await?)
        }
        (None, manifest) => manifest,
    };
    let explanation = Explanation::new(pod.as_ref(), nodes(&client).await?, clock::wall_time());
    let structured = args.output.of(&explanation)?;
    Ok(structured.unwrap_or_else(|| explanation.to_string()))
}

/// How many nodes `plimsoll explain pod` names.
const BEST: usize = 3;

/// The least loaded nodes that the pod may run on.
pub(super) async fn best_for(
    client: &Client,
    pod: &Value,
    now: Timestamp,
) -> anyhow::Result<Explanation> {
    let pod = ExplainedPod::of(pod)?;
    let all = Explanation::new(Some(&pod), nodes(client).await?, now);
    Ok(all.best(BEST))
}

async fn get_pod(client: &Client, namespace: &str, name: &str) -> anyhow::Result<ExplainedPod> {
    let kind = ApiResource::erase::<k8s::Pod>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind);
    let object = call(api.get(name)).await;
    let object = object
        .map_err(|error| anyhow!("failed to read pod {namespace}/{name}: {}", error.message()))?;
    ExplainedPod::of(&serde_json::to_value(object)?)
        .with_context(|| format!("failed to read pod {namespace}/{name}"))
}

/// The nodes with what is known of their load.
async fn nodes(client: &Client) -> anyhow::Result<Vec<ExplainedNode>> {
    let api: Api<k8s::Node> = Api::all(client.clone());
    let list = all(ListParams::default(), async |page| api.list(&page).await);
    let (nodes, metrics) = tokio::join!(list, read::metrics(client));
    let nodes = nodes.map_err(|error| anyhow!("failed to list the nodes: {}", error.message()))?;
    let metrics = match metrics {
        Ok(metrics) => metrics,
        Err(error) if error.code() == Some(404) => bail!(
            "{API_VERSION} is not served in this cluster; install plimsoll with metricsAPI.enabled"
        ),
        Err(error) => bail!("failed to list NodeMetrics: {}", error.message()),
    };
    let mut metrics: std::collections::BTreeMap<_, _> = metrics
        .into_iter()
        .filter_map(|metric| Some((metric.metadata.name?, metric.status)))
        .collect();
    let with_load = |node: k8s::Node| {
        let status = metrics.remove(node.metadata.name.as_deref().unwrap_or_default());
        ExplainedNode {
            node,
            status: status.unwrap_or_default(),
        }
    };
    Ok(nodes.into_iter().map(with_load).collect())
}

/// The template of a workload, or the object itself.
fn template(object: &Value) -> &Value {
    let spec = &object["spec"];
    [&spec["jobTemplate"]["spec"]["template"], &spec["template"]]
        .into_iter()
        .find(|template| template.is_object())
        .unwrap_or(object)
}
