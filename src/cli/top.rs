//! `plimsoll top`.

mod pods;
mod read;
mod view;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use clap::ValueEnum;
use jiff::Timestamp;
use kube::{Client, ResourceExt as _};
use ratatui::crossterm::terminal;
use serde::Serialize;

use self::view::{Row, Screen, Sort, Source};
use super::{LEASE_NAMESPACE, complain, duration, one_line, runtime};
use crate::cluster::client::{CallError, connect};
use crate::cluster::clock;
use crate::crd::NodeMetric;
use crate::crd::node_metric::{API_VERSION, GROUP, VERSION};
use crate::ordered;
use crate::reconcilers::lease::LeaseObject;

/// The code of an answer where there is no such API.
const NOT_SERVED: u16 = 404;
/// Moves to the corner of the terminal and wipes it.
const WIPE: &str = "\x1b[H\x1b[2J";

const HELP: &str = "\
nodes: a line per node: CPU as a bar with the lowest mark of a rule over CPU in it, CPU and memory in percent of the \
node, pressure (percent of the last 10 s in which something was stalled for want of CPU, memory or I/O), the rules that \
are over their mark, what is in force, and how old the figures are. Nodes whose agent is silent come last.

pods: the busiest pods of each node, by what its agent reports: no more than 10 a node, so that this is no list of all \
pods. CPU and memory in use, pressure likewise (CPU: the scheduling delay), and what CPU those are throttled to that are.

Figures come from NodeMetrics (metrics.plimsoll.dev/v1alpha1), what is in force from the status of NodeWatermarks, marks \
from the Leases that agents renew. Where NodeMetrics are not served, or can't be read, which is said, `top nodes` shows \
the summaries in the Leases alone: renewed every 10 s, and every 60 s by agents that report directly. Ages are by the \
clock of this machine and those of the nodes: where these differ, ages do. ? is not known; a node that never had an \
agent is shown as such. By its Lease alone an agent is silent 10 s after that ran out.

Permissions: list of nodemetrics.metrics.plimsoll.dev, of nodewatermarks.plimsoll.dev, and of leases in the namespace of \
the Leases; without NodeMetrics list of nodes too, or nodes that never had an agent are not shown.

Examples:
  The busiest nodes first, until Ctrl-C:
    plimsoll top --sort cpu --watch
  The pods that wait most:
    plimsoll top pods --sort pressure
  Nodes whose agent is silent:
    plimsoll top -o json | jq -r '.nodes[] | select(.agent != \"alive\") | .node'
  What the agent of one node says, rule by rule:
    kubectl describe nodewatermark worker-1

Exit status: 0 shown, 2 neither NodeMetrics nor the Leases could be read (pods: NodeMetrics).";

/// Arguments of `plimsoll top`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// What to show
    #[arg(value_enum, default_value_t = What::Nodes)]
    what: What,

    /// By what to order them; the largest first, but names as in the alphabet
    #[arg(long, value_enum, default_value_t = Sort::Name)]
    sort: Sort,

    /// Show it again and again, until Ctrl-C
    #[arg(short = 'w', long)]
    watch: bool,

    /// How often, with --watch
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "5s")]
    interval: Duration,

    /// How to print it
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Text)]
    output: Output,

    /// Namespace of the Leases that agents renew; for nodes only
    #[arg(long, value_name = "NAME", default_value = LEASE_NAMESPACE)]
    lease_namespace: String,

    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// What can be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Every node
    Nodes,
    /// The busiest pods of each node
    Pods,
}

/// The forms of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A table.
    Text,
    /// A JSON object in a line: {source, nodes: [{node, agent, ageSeconds, cpu, memory, breachedRules, ...}], notes}, or
    /// {pods: [{namespace, name, node, cpuMillicores, memoryBytes, throttled, ...}], notes}.
    Json,
}

/// What is to be printed.
struct Shown {
    screen: String,
    /// What is said of it beside.
    warning: Option<String>,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.what == What::Pods && args.sort == Sort::Breached {
        bail!("--sort breached is for nodes; pods go by name, cpu, memory, pressure or age");
    }
    runtime::start()?.block_on(show(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn show(args: &Args) -> anyhow::Result<()> {
    let client = connect(args.kubeconfig.as_deref()).await?;
    print(args, &look(args, &client).await?)?;
    if !args.watch {
        return Ok(());
    }
    loop {
        tokio::time::sleep(args.interval).await;
        match look(args, &client).await {
            Ok(shown) => print(args, &shown)?,
            // The last screen stays.
            Err(error) => complain(format_args!("{}; trying again", one_line(&error))),
        }
    }
}

async fn look(args: &Args, client: &Client) -> anyhow::Result<Shown> {
    let metrics = read::metrics(client).await;
    match (args.what, metrics) {
        (What::Pods, metrics) => Ok(Shown {
            screen: write(args, &pods(args, client, metrics).await?)?,
            warning: None,
        }),
        (What::Nodes, Ok(metrics)) => Ok(Shown {
            screen: write(args, &measured(args, client, metrics).await)?,
            warning: None,
        }),
        (What::Nodes, Err(error)) => Ok(Shown {
            screen: write(args, &by_leases(args, client).await?)?,
            warning: (error.code() != Some(NOT_SERVED)).then(|| {
                format!(
                    "failed to list NodeMetrics: {}; shown is what the Leases say, which may be a minute old",
                    error.words()
                )
            }),
        }),
    }
}

/// The pods by what was measured.
async fn pods(
    args: &Args,
    client: &Client,
    metrics: Result<Vec<NodeMetric>, CallError>,
) -> anyhow::Result<pods::Screen> {
    let metrics = metrics.map_err(|error| match error.code() {
        Some(NOT_SERVED) => anyhow!(
            "failed to list NodeMetrics, which pods are shown by: {API_VERSION} is not served in this cluster; install \
             plimsoll with metricsAPI.enabled (`plimsoll top nodes` does without)"
        ),
        _ => anyhow!(
            "failed to list NodeMetrics, which pods are shown by: {}; `kubectl get apiservice {VERSION}.{GROUP} -o yaml` \
             says whether it is available",
            error.words()
        ),
    })?;
    let throttled = read::throttled(client).await;
    let (throttled, note) = or_note(throttled, "which pods are throttled is not known");
    let screen = pods::Screen::new(&metrics, throttled.as_ref(), args.sort, clock::wall());
    Ok(screen.noted(note))
}

/// The nodes by what was measured.
async fn measured(args: &Args, client: &Client, metrics: Vec<NodeMetric>) -> Screen {
    let namespace = &args.lease_namespace;
    let (leases, in_force) = tokio::join!(read::leases(client, namespace), read::in_force(client));
    let (in_force, gap) = or_note(in_force, "what is in force may be a minute old");
    let mut notes = Vec::from_iter(gap);
    notes.extend(match &leases {
        Err(error) => Some(format!(
            "marks are not known: {}",
            no_leases(namespace, error)
        )),
        Ok(leases) => leases.is_empty().then(|| no_heartbeat(namespace)),
    });
    let leases = leases.unwrap_or_default();
    let named = |lease: LeaseObject| (lease.name_any(), lease);
    let mut leases = ordered::map(leases.into_iter().map(named));
    let now = clock::wall();
    let row = |metric: &NodeMetric| {
        let node = metric.name_any();
        let in_force = in_force
            .as_ref()
            .and_then(|known| known.get(&node).copied());
        Row::measured(metric, leases.remove(&node), in_force, now)
    };
    let rows = metrics.iter().map(row).collect();
    Screen::new(Source::NodeMetrics, rows, args.sort, notes)
}

/// What was read of the `NodeWatermarks`; else a note, which begins with what follows from that.
fn or_note<T>(read: Result<T, CallError>, without: &str) -> (Option<T>, Option<String>) {
    match read {
        Ok(known) => (Some(known), None),
        Err(error) => {
            let why = error.words();
            let note = format!("{without}: failed to list the NodeWatermarks: {why}");
            (None, Some(note))
        }
    }
}

fn no_leases(namespace: &str, error: &CallError) -> String {
    let why = error.words();
    format!("failed to list the Leases of the agents in namespace {namespace}: {why}")
}

fn no_heartbeat(namespace: &str) -> String {
    format!(
        "no agent has sent a heartbeat to namespace {namespace}: is plimsoll installed, or are its Leases elsewhere \
         (--lease-namespace)?"
    )
}

/// The nodes by what the Leases say.
async fn by_leases(args: &Args, client: &Client) -> anyhow::Result<Screen> {
    let namespace = &args.lease_namespace;
    let (leases, known) = tokio::join!(read::leases(client, namespace), read::nodes(client));
    let leases = leases.map_err(|error| anyhow!(no_leases(namespace, &error)))?;
    let mut notes = Vec::new();
    if leases.is_empty() {
        notes.push(no_heartbeat(namespace));
    }
    let known = known.map_err(|error| {
        let why = error.words();
        notes.push(format!(
            "nodes that never had an agent are not shown: failed to list the nodes: {why}"
        ));
    });
    let rows = rows(leases, known.ok(), clock::wall());
    Ok(Screen::new(Source::Leases, rows, args.sort, notes))
}

/// One for each node; where nodes are not known, one for each Lease.
fn rows(leases: Vec<LeaseObject>, nodes: Option<BTreeSet<String>>, now: Timestamp) -> Vec<Row> {
    let there = leases.into_iter().map(|lease| Row::of(lease, now));
    let Some(mut nodes) = nodes else {
        return there.collect();
    };
    let mut rows: Vec<Row> = there.filter(|row| nodes.remove(&row.node)).collect();
    rows.extend(nodes.into_iter().map(Row::without_agent));
    rows
}

fn write(args: &Args, screen: &(impl Display + Serialize)) -> anyhow::Result<String> {
    Ok(match args.output {
        Output::Json => serde_json::to_string(screen).context("failed to write JSON")? + "\n",
        Output::Text => match terminal_width() {
            Some(width) => format!("{screen:width$}"),
            None => screen.to_string(),
        },
    })
}

/// Columns of the terminal, where that is what is written to.
fn terminal_width() -> Option<usize> {
    let is_terminal = stdout().is_terminal();
    let (columns, _) = is_terminal.then(terminal::size)?.ok()?;
    (columns > 0).then_some(columns.into())
}

fn print(args: &Args, Shown { screen, warning }: &Shown) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    let screen = match args.output {
        Output::Text if args.watch && out.is_terminal() => format!("{WIPE}{screen}"),
        Output::Text if args.watch => format!("{screen}\n"),
        Output::Text | Output::Json => screen.clone(),
    };
    out.write_all(screen.as_bytes())
        .and_then(|()| out.flush())
        .context("failed to write to standard output")?;
    // After the screen, which wipes what was there before.
    if let Some(warning) = warning {
        complain(format_args!("warning: {warning}"));
    }
    Ok(())
}
