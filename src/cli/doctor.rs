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
mod role;
mod scheduler_api;
pub(super) mod snapshot;

use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use serde_json::json;

use self::checks::{findings, notes, summary};
use self::finding::DoctorFinding;
use self::snapshot::ClusterSnapshot;
use super::cluster_args::ClusterArgs;
use super::output::Output;
use super::progress::ProgressLine;
use super::{LEASE_NAMESPACE, color, duration, print, print_text, runtime};
use crate::clock;

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
    plimsoll doctor --only agents --wait --timeout 4m
  List only what to do:
    plimsoll doctor -o json | jq -r '.findings[].fix'
  As an administrator, grant a user what doctor could not read as that user:
    plimsoll doctor -o json | jq '.roles[]' | kubectl apply -f -

Exit status: 0 no findings, 1 findings, 2 the API server could not be reached.";

/// Arguments of `plimsoll doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Output format; JSON and YAML have {findings: [{about, what, fix}], notes: [the same], roles: [...],
    /// summary}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    /// Check only this part [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    only: Option<Part>,

    /// Repeat the checks until there are no findings
    #[arg(long)]
    wait: bool,

    /// How long --wait repeats them
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = duration::positive,
        default_value = "60s",
        requires = "wait"
    )]
    timeout: Duration,

    /// Namespace of the Leases that agents renew, if it cannot be read from their `DaemonSets`
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    lease_namespace: Option<String>,

    #[command(flatten)]
    cluster: ClusterArgs,
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
        let client = args.cluster.connect().await?;
        let only_agents = args.only == Some(Part::Agents);
        let started = clock::boot_time();
        let progress = ProgressLine::new("reading the cluster", None);
        loop {
            let namespace = args.lease_namespace.as_deref();
            let snapshot = ClusterSnapshot::read(&client, only_agents, namespace, &progress);
            let snapshot = Box::pin(snapshot).await;
            let left = snapshot.as_ref().map_or(1, |it| findings(it).len());
            if left == 0 || !args.wait || clock::boot_time().since(started) >= args.timeout {
                return snapshot;
            }
            progress.next("waiting; findings left", None);
            progress.set(left);
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    })?;
    let (found, notes) = (findings(&snapshot), notes(&snapshot));
    let text = render(args.output, &found, &notes, &summary(&snapshot))?;
    match args.output {
        Output::Text => print_text(&text)?,
        Output::Json | Output::Yaml => print(text.as_bytes())?,
    };
    Ok(ExitCode::from(u8::from(!found.is_empty())))
}

fn render(
    output: Output,
    found: &[DoctorFinding],
    notes: &[DoctorFinding],
    summary: &str,
) -> anyhow::Result<String> {
    let roles = role::missing(found);
    let object = json!({"findings": found, "notes": notes, "roles": roles, "summary": summary});
    if let Some(text) = output.of(&object)? {
        return Ok(text);
    }
    let findings = found.iter().map(|finding| format!("{finding}\n\n"));
    let notes = notes
        .iter()
        .map(|note| color::message(&format!("note: {note}\n\n")));
    let all = match found.len() {
        0 => color::paint("nothing is wrong:", color::GOOD),
        1 => color::paint("1 finding:", color::ERROR),
        number => color::paint(&format!("{number} findings:"), color::ERROR),
    };
    let all = format!("{all} {summary}\n");
    let mut missing = String::new();
    if !roles.is_empty() {
        missing
            .push_str("An administrator can grant what could not be read, with kubectl apply:\n");
    }
    for role in roles {
        missing.extend(Output::Yaml.of(&role)?);
    }
    missing.push_str(if missing.is_empty() { "" } else { "---\n\n" });
    let parts = findings.chain(notes).chain([missing, all]);
    Ok(parts.collect())
}
