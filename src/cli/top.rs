//! `plimsoll top`.

mod view;

use std::collections::BTreeSet;
use std::io::{IsTerminal as _, Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use clap::ValueEnum;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::core::PartialObjectMeta;
use kube::{Api, Client, ResourceExt as _};

use self::view::{Row, Screen, Sort};
use super::{LEASE_NAMESPACE, duration, runtime};
use crate::cluster::client::connect;
use crate::cluster::clock;
use crate::cluster::list::all;
use crate::reconcilers::lease::LeaseObject;

/// Moves to the corner of the terminal and wipes it.
const WIPE: &str = "\x1b[H\x1b[2J";

const HELP: &str = "\
A line per node: CPU as a bar with the lowest mark of a rule over CPU in it, CPU and memory in percent of the node,
pressure (percent of the last 10 s in which something was stalled for want of CPU, memory or I/O), the rules that are
over their mark, what is in force, and how old the agent's heartbeat is. Nodes whose agent is silent come last.

It comes from the Leases that agents renew every 10 s (60 s while they report directly), each with a summary of at most
256 bytes in the annotation plimsoll.dev/summary: figures are as old as the heartbeat. Ages are by the clock of this
machine and those of the nodes: where these differ, ages do. ? is not known; a node that never had an agent is shown as
such. One is silent 10 s after its Lease ran out.

Permissions: list of leases in the namespace of the Leases, and list of nodes, without which nodes that never had an agent
are not shown.

Examples:
  The busiest nodes first, until Ctrl-C:
    plimsoll top --sort cpu --watch
  Nodes whose agent is silent:
    plimsoll top -o json | jq -r '.nodes[] | select(.agent != \"alive\") | .node'
  What the agent of one node says, rule by rule:
    kubectl describe nodewatermark worker-1

Exit status: 0 shown, 2 the Leases could not be read.";

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

    /// Namespace of the Leases that agents renew
    #[arg(long, value_name = "NAME", default_value = LEASE_NAMESPACE)]
    lease_namespace: String,

    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// What can be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Every node.
    Nodes,
}

/// The forms of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A table.
    Text,
    /// A JSON object in a line: {nodes: [{node, agent, ageSeconds, cpu, memory, breachedRules, ...}], notes}.
    Json,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let What::Nodes = args.what;
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
            Ok(screen) => print(args, &screen)?,
            // The last screen stays.
            Err(error) => eprintln!("{error:#}; trying again"),
        }
    }
}

async fn look(args: &Args, client: &Client) -> anyhow::Result<Screen> {
    let namespace = &args.lease_namespace;
    let leases: Api<LeaseObject> = Api::namespaced(client.clone(), namespace);
    let leases = all(ListParams::default(), async |page| leases.list(&page).await).await;
    let leases = leases.map_err(|error| {
        anyhow!(
            "failed to list the Leases of the agents in namespace {namespace}: {}",
            error.words()
        )
    })?;
    let api: Api<Node> = Api::all(client.clone());
    let known = all(ListParams::default(), async |page| {
        api.list_metadata(&page).await
    })
    .await;
    let mut notes = Vec::new();
    if leases.is_empty() {
        notes.push(format!(
            "no agent has sent a heartbeat to namespace {namespace}: is plimsoll installed, or are its Leases elsewhere \
             (--lease-namespace)?"
        ));
    }
    let known: Option<BTreeSet<String>> = match known {
        Ok(known) => Some(known.iter().map(PartialObjectMeta::name_any).collect()),
        Err(error) => {
            let why = error.words();
            notes.push(format!(
                "nodes that never had an agent are not shown: failed to list the nodes: {why}"
            ));
            None
        }
    };
    let rows = rows(leases, known, clock::wall());
    Ok(Screen::new(rows, args.sort, notes))
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

fn print(args: &Args, screen: &Screen) -> anyhow::Result<()> {
    let mut out = stdout().lock();
    let text = match args.output {
        Output::Json => serde_json::to_string(screen).context("failed to write JSON")? + "\n",
        Output::Text if args.watch && out.is_terminal() => format!("{WIPE}{screen}"),
        Output::Text if args.watch => format!("{screen}\n"),
        Output::Text => screen.to_string(),
    };
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .context("failed to write to standard output")
}
