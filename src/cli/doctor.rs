//! `plimsoll doctor`.

mod admission;
mod agents;
mod checks;
mod dry_runs;
mod finding;
mod flow;
mod installation;
mod layout;
mod nodes;
mod permissions;
mod placement;
mod pods;
mod policies;
mod snapshot;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::json;

use self::checks::{findings, notes, summary};
use self::finding::Finding;
use self::snapshot::Snapshot;
pub(super) use self::snapshot::lease_namespaces;
use super::{LEASE_NAMESPACE, duration, print, runtime};
use crate::cluster::client::connect;
use crate::cluster::clock;

/// How often `--wait` repeats the checks.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

const HELP: &str = "\
Checks the Kubernetes version, API aggregation, definitions, controller, agents and their layouts, their permissions and \
admission policies, eviction requests, heartbeats and clocks, flow control, placement by load, what agents report about their nodes, the emergency \
stop, and policies without effect. Each finding says what to do. Anything that you may not read is a finding; anything that may \
be intended is only a note.

It writes nothing. To test admission policies it sends dry-run requests as agents and controller, which needs the permission \
to impersonate them. Where a layout does not fit a node it reads the kubelet's configuration, if you may get nodes/proxy.

With --only agents it checks only that all agents are ready and up to date, on nodes that are Ready and not being deleted. Nodes \
that no layout selects are then only a note.

Examples:
  Check the installation:
    plimsoll doctor
  Wait until all agents are upgraded:
    plimsoll doctor --only agents --wait 4m
  List only what to do:
    plimsoll doctor -o json | jq -r '.findings[].do'

Exit status: 0 no findings, 1 findings, 2 the API server could not be reached.";

/// Arguments of `plimsoll doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Text)]
    output: Output,

    /// Check only this part [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    only: Option<Part>,

    /// Repeat the checks for up to this long, until there are no findings
    #[arg(long, value_name = "DURATION", value_parser = duration::positive)]
    wait: Option<Duration>,

    /// Namespace of the Leases that agents renew [default: as configured for the agents]
    #[arg(long, value_name = "NAME")]
    lease_namespace: Option<String>,

    /// How to reach the API server [default: $KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A paragraph for each finding.
    Text,
    /// One JSON object: {findings: [{about, what, do}], notes: [the same], summary}.
    Json,
}

/// Parts of an installation that can be checked alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Whether the agents are ready
    Agents,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let snapshot = runtime::start()?.block_on(async {
        let client = connect(args.kubeconfig.as_deref()).await?;
        let only_agents = args.only == Some(Part::Agents);
        let (started, wait) = (clock::now(), args.wait.unwrap_or_default());
        loop {
            let namespace = args.lease_namespace.as_deref();
            let snapshot = Box::pin(Snapshot::read(&client, only_agents, namespace)).await;
            let is_healthy = snapshot.as_ref().is_ok_and(|it| findings(it).is_empty());
            if is_healthy || clock::now().since(started) >= wait {
                return snapshot;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    })?;
    let (found, notes) = (findings(&snapshot), notes(&snapshot));
    let text = render(args.output, &found, &notes, &summary(&snapshot));
    print(text.as_bytes())?;
    Ok(ExitCode::from(u8::from(!found.is_empty())))
}

fn render(output: Output, found: &[Finding], notes: &[Finding], summary: &str) -> String {
    if output == Output::Json {
        let json = json!({"findings": found, "notes": notes, "summary": summary});
        return format!("{json}\n");
    }
    let findings = found.iter().map(|finding| format!("{finding}\n\n"));
    let notes = notes.iter().map(|note| format!("note: {note}\n\n"));
    let all = match found.len() {
        0 => format!("nothing is wrong: {summary}\n"),
        1 => format!("1 finding: {summary}\n"),
        number => format!("{number} findings: {summary}\n"),
    };
    findings.chain(notes).chain([all]).collect()
}
