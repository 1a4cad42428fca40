//! `plimsoll top`.

mod pods;
pub(super) mod read;
mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stdout};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::ValueEnum;
use jiff::Timestamp;
use kube::{Client, ResourceExt as _};
use serde::Serialize;

pub(super) use self::view::since;
use self::view::{LoadSource, NodeRow, NodesScreen, Sort};
use super::cluster_args::ClusterArgs;
use super::doctor::snapshot::lease_namespaces;
use super::output::{Output, TableOutput};
use super::{
    LEASE_NAMESPACE, duration, one_line, print_error, runtime, terminal_width, write_text,
};
use crate::clock;
use crate::cluster::client::CallError;
use crate::cluster::lease::LeaseObject;
use crate::crd::NodeMetric;
use crate::crd::node_metric::{API_VERSION, GROUP, VERSION};

/// HTTP status if the API is not served.
const NOT_SERVED: u16 = 404;
/// Moves the cursor home and clears the terminal.
const CLEAR: &str = "\x1b[H\x1b[2J";

const HELP: &str = "\
nodes: one line per node, with CPU as a bar that shows the lowest CPU threshold of its rules, CPU and memory in percent, \
pressure (percent of the last 10 s in which tasks were stalled on CPU, memory or I/O), rules over their threshold, what is in \
force, and the age of the data. Nodes whose agent has left or does not respond come after the others, and nodes that \
never had an agent last.

pods: the busiest pods of each node, at most 10 per node, with CPU and memory usage, pressure (for CPU: scheduling delay), and \
the CPU limit of throttled pods.

Load comes from NodeMetrics (metrics.plimsoll.dev/v1alpha1), what is in force from the status of NodeWatermarks, and \
thresholds from the agents' Leases. If NodeMetrics are not available, `top nodes` uses only the Leases, which are renewed every \
10 s, or every 60 s by agents that report directly; an agent then counts as unresponsive 10 s after its Lease expired. Ages \
compare the clocks of this machine and of the nodes. ? means unknown.

Permissions: list nodemetrics.metrics.plimsoll.dev, nodewatermarks.plimsoll.dev, leases in the namespace of the Leases, and \
daemonsets to find it. Without NodeMetrics also list nodes, or nodes that never had an agent are not shown.

Examples:
  Watch the busiest nodes, until Ctrl-C:
    plimsoll top --sort cpu --watch
  See the pods under most pressure:
    plimsoll top pods --sort pressure
  See those of one namespace:
    plimsoll top pods -n shop
  List nodes without a responding agent:
    plimsoll top -o json | jq -r '.nodes[] | select(.agent != \"alive\") | .node'
  See the status of each rule on one node:
    kubectl describe nodewatermark worker-1

Exit status: 0 shown, 2 neither NodeMetrics nor the Leases could be read (pods: NodeMetrics).";

/// Arguments of `plimsoll top`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// What to show
    #[arg(value_enum, default_value_t = What::Nodes)]
    what: What,

    /// Sort order: largest first, names alphabetically
    #[arg(long, visible_alias = "sort-by", value_enum, default_value_t = Sort::Name)]
    sort: Sort,

    /// Refresh until Ctrl-C
    #[arg(short = 'w', long)]
    watch: bool,

    /// Refresh interval of --watch
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "5s")]
    interval: Duration,

    /// Only pods of this namespace [default: all]
    #[arg(short = 'n', long, value_name = "NAME")]
    namespace: Option<String>,

    /// Pods of all namespaces, which is the default
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    all_namespaces: bool,

    /// Output format; wide has more columns. JSON and YAML have {source, nodes: [{node, agent, ageSeconds, cpu, memory, breachedRules, ...}], notes}, or
    /// {pods: [{namespace, name, node, cpuMillicores, memoryBytes, throttled, ...}], notes}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: TableOutput,

    /// Namespace of the agents' Leases, if it cannot be read from their `DaemonSets`; for nodes only
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    lease_namespace: Option<String>,

    #[command(flatten)]
    cluster: ClusterArgs,
}

impl Args {
    fn is_wide(&self) -> bool {
        self.output == TableOutput::Wide
    }
}

/// The object to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Every node
    Nodes,
    /// The busiest pods of each node
    Pods,
}

/// The text to print.
struct Rendered {
    screen: String,
    /// Printed to standard error.
    warning: Option<String>,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.what == What::Pods && matches!(args.sort, Sort::Breached | Sort::Load) {
        let sort = args.sort.to_possible_value();
        let sort = sort.as_ref().map_or("", |it| it.get_name());
        bail!("--sort {sort} is for nodes; sort pods by name, cpu, memory, pressure or age");
    }
    if args.what == What::Nodes && (args.namespace.is_some() || args.all_namespaces) {
        bail!("nodes have no namespace: -n and -A are for top pods");
    }
    runtime::start()?.block_on(show(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn show(args: &Args) -> anyhow::Result<()> {
    let client = args.cluster.connect().await?;
    let namespace = match (&args.lease_namespace, args.what) {
        (Some(given), _) => given.clone(),
        (None, What::Pods) => LEASE_NAMESPACE.to_owned(),
        (None, What::Nodes) => {
            let watched = lease_namespaces(&client).await.into_iter().next();
            watched.unwrap_or_else(|| LEASE_NAMESPACE.to_owned())
        }
    };
    print(args, &screen(args, &client, &namespace).await?)?;
    if !args.watch {
        return Ok(());
    }
    loop {
        tokio::time::sleep(args.interval).await;
        match screen(args, &client, &namespace).await {
            Ok(shown) => print(args, &shown)?,
            // Keep the last screen.
            Err(error) => print_error(format_args!(
                "plimsoll: warning: {}; trying again",
                one_line(&error)
            )),
        }
    }
}

async fn screen(args: &Args, client: &Client, namespace: &str) -> anyhow::Result<Rendered> {
    let metrics = read::metrics(client).await;
    match (args.what, metrics) {
        (What::Pods, metrics) => Ok(Rendered {
            screen: write(args, &pods(args, client, metrics).await?)?,
            warning: None,
        }),
        (What::Nodes, Ok(metrics)) => Ok(Rendered {
            screen: write(args, &measured(args, client, namespace, metrics).await)?,
            warning: None,
        }),
        (What::Nodes, Err(error)) => Ok(Rendered {
            screen: write(args, &by_leases(args, client, namespace).await?)?,
            warning: (error.code() != Some(NOT_SERVED)).then(|| {
                format!(
                    "failed to list NodeMetrics: {}; showing the agents' Leases, which may be a minute old",
                    error.message()
                )
            }),
        }),
    }
}

/// The pods, from `NodeMetric`s.
async fn pods(
    args: &Args,
    client: &Client,
    metrics: Result<Vec<NodeMetric>, CallError>,
) -> anyhow::Result<pods::PodsScreen> {
    let metrics = metrics.map_err(|error| match error.code() {
        Some(NOT_SERVED) => anyhow!(
            "failed to list NodeMetrics, which `top pods` needs: {API_VERSION} is not served in this cluster; install \
             plimsoll with metricsAPI.enabled (`plimsoll top nodes` works without)"
        ),
        _ => anyhow!(
            "failed to list NodeMetrics, which `top pods` needs: {}; `kubectl get apiservice {VERSION}.{GROUP} -o yaml` \
             shows whether it is available",
            error.message()
        ),
    })?;
    let throttled = read::throttled(client).await;
    let (throttled, note) = or_note(throttled, "throttled pods are unknown");
    let screen = pods::PodsScreen::new(&metrics, throttled.as_ref(), args.sort, clock::wall_time());
    let screen = screen.of_namespace(args.namespace.as_deref());
    Ok(screen.with_note(note).wide(args.is_wide()))
}

/// The nodes, from `NodeMetric`s.
async fn measured(
    args: &Args,
    client: &Client,
    namespace: &str,
    metrics: Vec<NodeMetric>,
) -> NodesScreen {
    let (leases, in_force) = tokio::join!(read::leases(client, namespace), read::in_force(client));
    let (in_force, note) = or_note(in_force, "what is in force may be a minute old");
    let mut notes = Vec::from_iter(note);
    notes.extend(match &leases {
        Err(error) => Some(format!(
            "thresholds are unknown: {}",
            no_leases(namespace, error)
        )),
        Ok(leases) => leases.is_empty().then(|| no_heartbeat(namespace)),
    });
    let leases = leases.unwrap_or_default();
    let named = |lease: LeaseObject| (lease.name_any(), lease);
    let mut leases = leases.into_iter().map(named).collect::<BTreeMap<_, _>>();
    let now = clock::wall_time();
    let row = |metric: &NodeMetric| {
        let name = metric.name_any();
        let in_force = in_force
            .as_ref()
            .and_then(|known| known.get(&name).copied());
        NodeRow::measured(metric, leases.remove(&name), in_force, now)
    };
    let rows = metrics.iter().map(row).collect();
    NodesScreen::new(LoadSource::NodeMetrics, rows, args.sort, notes).wide(args.is_wide())
}

/// The value, or a note that begins with the consequence.
fn or_note<T>(read: Result<T, CallError>, consequence: &str) -> (Option<T>, Option<String>) {
    match read {
        Ok(known) => (Some(known), None),
        Err(error) => {
            let why = error.message();
            let note = format!("{consequence}: failed to list the NodeWatermarks: {why}");
            (None, Some(note))
        }
    }
}

fn no_leases(namespace: &str, error: &CallError) -> String {
    let why = error.message();
    format!("failed to list the Leases of the agents in namespace {namespace}: {why}")
}

fn no_heartbeat(namespace: &str) -> String {
    format!(
        "no agent has sent a heartbeat to namespace {namespace}: is plimsoll installed, or are its Leases elsewhere \
         (--lease-namespace)?"
    )
}

/// The nodes, from Leases.
async fn by_leases(args: &Args, client: &Client, namespace: &str) -> anyhow::Result<NodesScreen> {
    let (leases, known) = tokio::join!(read::leases(client, namespace), read::nodes(client));
    let leases = leases.map_err(|error| anyhow!(no_leases(namespace, &error)))?;
    let mut notes = Vec::new();
    if leases.is_empty() {
        notes.push(no_heartbeat(namespace));
    }
    let known = known.map_err(|error| {
        let why = error.message();
        notes.push(format!(
            "nodes that never had an agent are not shown: failed to list the nodes: {why}"
        ));
    });
    let rows = rows(leases, known.ok(), clock::wall_time());
    Ok(NodesScreen::new(LoadSource::Leases, rows, args.sort, notes).wide(args.is_wide()))
}

/// One row per node; if nodes are unknown, one per Lease.
fn rows(leases: Vec<LeaseObject>, nodes: Option<BTreeSet<String>>, now: Timestamp) -> Vec<NodeRow> {
    let by_lease = leases.into_iter().map(|lease| NodeRow::of(lease, now));
    let Some(mut nodes) = nodes else {
        return by_lease.collect();
    };
    let mut rows: Vec<NodeRow> = by_lease.filter(|row| nodes.remove(&row.node)).collect();
    rows.extend(nodes.into_iter().map(NodeRow::without_agent));
    rows
}

fn write(args: &Args, screen: &(impl Display + Serialize)) -> anyhow::Result<String> {
    let structured = Output::from(args.output).of(screen)?;
    let width = terminal_width().filter(|_| !args.is_wide());
    Ok(structured.unwrap_or_else(|| match width {
        Some(width) => format!("{screen:#width$}"),
        None => format!("{screen:#}"),
    }))
}

fn print(args: &Args, Rendered { screen, warning }: &Rendered) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    let written = match args.output.into() {
        Output::Text if args.watch && out.is_terminal() => out
            .write_all(CLEAR.as_bytes())
            .and_then(|()| write_text(screen)),
        Output::Text if args.watch => write_text(&format!("{screen}\n")),
        Output::Text => write_text(screen),
        Output::Json | Output::Yaml => out.write_all(screen.as_bytes()),
    };
    written
        .and_then(|()| out.flush())
        .context("failed to write to standard output")?;
    // After the screen, which clears the terminal.
    if let Some(warning) = warning {
        print_error(format_args!("plimsoll: warning: {warning}"));
    }
    Ok(())
}
