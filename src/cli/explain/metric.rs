//! `plimsoll explain metric`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hyper::{Request, Uri};
use serde_json::Value;

use crate::cli::cluster_args::ClusterArgs;
use crate::cli::output::Output;
use crate::cli::{duration, print, runtime};
use crate::cluster::client::{CallError, Server, call};

const HELP: &str = "\
METRIC is one of these, in percent of the node: cpu_usage_avg_5m, cpu_usage_max_avg_1h, cpu_usage_max_avg_1d, \
cpu_usage_stddev_5m, cpu_expected (with pods that have just started), cpu_load_line (where its rules act), the same with mem_, \
and load, in percent of the load line; or a name of the nodes' windows.

It asks a replica of the controller, at the Service of placement.schedulerAPI (controller --scheduler-listen): through the API \
server, or directly with --server. The value is from the last report of the node's agent, or from the page of an exporter \
(controller --poll). One that is older than three intervals is an error, and so is one that is not known.

The controller keeps the last 10 minutes for --offset, a value each half minute. The age says when a value was measured.

Permissions: get services/proxy in the namespace of the Service; none with --server.

Examples:
  plimsoll explain metric worker-1 cpu_usage_avg_5m
  plimsoll explain metric 10.0.0.7 load
  plimsoll explain metric worker-1 load --offset 5m
  plimsoll explain metric worker-1 load --server http://plimsoll-scheduler-api.plimsoll

Exit status: 0 shown, 2 not known, or nothing could be asked.";

/// Arguments of `plimsoll explain metric`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Name or internal address of a node
    #[arg(value_name = "NODE")]
    node: String,

    /// Name of a metric
    #[arg(value_name = "METRIC")]
    metric: String,

    /// How long ago, up to 10m [default: now]
    #[arg(long, value_name = "TIME", value_parser = duration::positive)]
    offset: Option<Duration>,

    /// Output format; JSON and YAML have {node, value, ageSeconds, source}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    /// Namespace of the controller
    #[arg(short = 'n', long, value_name = "NAME", default_value = "plimsoll")]
    namespace: String,

    /// Service of the controller for schedulers
    #[arg(long, value_name = "NAME", default_value = "plimsoll-scheduler-api")]
    service: String,

    /// Address of a replica or its Service, such as http://10.0.0.3:8085 [default: through the API server]
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "URL", conflicts_with_all = ["kubeconfig", "context"])]
    server: Option<Uri>,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let text = runtime::start()?.block_on(query(args))?;
    print(text.as_bytes())
}

async fn query(args: &Args) -> anyhow::Result<String> {
    let (server, base) = if let Some(server) = &args.server {
        (Server::at(server.clone()), String::new())
    } else {
        let (namespace, service) = (&args.namespace, &args.service);
        let path = format!("/api/v1/namespaces/{namespace}/services/{service}:http/proxy");
        (Server::find(&args.cluster.source()).await?, path)
    };
    let mut form = form_urlencoded::Serializer::new(String::new());
    form.append_pair("node", &args.node)
        .append_pair("metric", &args.metric);
    if let Some(offset) = args.offset {
        form.append_pair("offset", &offset.as_secs().to_string());
    }
    let request = Request::get(format!("{base}/value?{}", form.finish())).body(Vec::new())?;
    let client = server.client(Arc::new(()))?;
    let answer = match call(client.request_text(request)).await {
        Ok(answer) => answer,
        Err(error) => bail!("{}", message(&error)),
    };
    let answer: Value = serde_json::from_str(&answer).context("the answer is not JSON")?;
    if let Some(text) = args.output.of(&answer)? {
        return Ok(text);
    }
    let number = |name: &str| answer[name].as_f64().unwrap_or(f64::NAN);
    let (value, age) = (number("value"), number("ageSeconds"));
    let source = match answer["source"].as_str() {
        Some("poll") => ", polled",
        Some(_) => ", reported",
        None => "",
    };
    Ok(format!("{value:.2} percent, {age:.0} s old{source}\n"))
}

/// What the controller, or the API server, says is wrong.
fn message(error: &CallError) -> String {
    match error {
        CallError::Kube(kube::Error::Api(status)) if !status.message.is_empty() => {
            status.message.clone()
        }
        error => error.message(),
    }
}
