//! `plimsoll doctor`.

mod agents;
mod finding;
mod findings;
mod flow;
mod holding;
mod nodes;
mod permissions;
mod read;
mod tables;
mod trials;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueEnum;
use kube::Client;
use serde_json::json;

use self::finding::Finding;
use self::findings::{findings, notes, summary};
pub(super) use self::read::lease_namespaces;
use self::read::{Seen, agents_alone, read};
use super::{LEASE_NAMESPACE, duration, print, runtime};
use crate::cluster::client::connect;
use crate::cluster::clock;

/// How often it is looked again while it waits.
const LOOK: Duration = Duration::from_secs(2);

const HELP: &str = "\
Looks at Kubernetes' version and API aggregation, the definitions, the controller, the agents and their layouts, what each of \
both may do and what holds them to it, how agents ask for evictions, heartbeats and clocks, flow control of the API server, what \
agents say of their nodes (rules that can't be kept or judged, and others who undo what they do), the emergency stop, and \
policies that can do nothing. What you may not read is a finding. What may be intended is a note, and no finding. It writes nothing: it \
reads, asks the API server who may do what, and tries, as dry runs in the name of agents and controller (the right to \
impersonate), what admission policies have to refuse.

With --only agents it looks at the agents alone: whether all are ready, and of the last upgrade, on nodes that are Ready and not being \
deleted. Nodes that no layout selects are a note then.

Examples:
    plimsoll doctor
    plimsoll doctor --only agents --wait 4m
    plimsoll doctor -o json | jq -r '.findings[].do'

Exit status: 0 nothing was found, 1 something was, 2 there is no way to an API server.";

/// Arguments of `plimsoll doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// How to print it
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Text)]
    output: Output,

    /// What to look at [default: all]
    #[arg(long, value_enum, value_name = "PART")]
    only: Option<Part>,

    /// Look again for so long until nothing is wrong: an upgrade that has just ended settles
    #[arg(long, value_name = "DURATION", value_parser = duration::positive)]
    wait: Option<Duration>,

    /// Namespace of the Leases that agents renew [default: what the agents are told]
    #[arg(long, value_name = "NAME")]
    lease_namespace: Option<String>,

    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// The forms of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A paragraph for each finding.
    Text,
    /// A JSON object in a line: {findings: [{about, what, do}], notes: [the same], summary}.
    Json,
}

/// The parts of an installation that can be looked at alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Whether the agents are ready.
    Agents,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let seen = runtime::start()?.block_on(async {
        let client = connect(args.kubeconfig.as_deref()).await?;
        let (begun, wait) = (clock::now(), args.wait.unwrap_or_default());
        loop {
            let seen = look(&client, args).await;
            let is_well = seen.as_ref().is_ok_and(|seen| findings(seen).is_empty());
            if is_well || clock::now().since(begun) >= wait {
                return seen;
            }
            tokio::time::sleep(LOOK).await;
        }
    })?;
    let (found, notes, summary) = (findings(&seen), notes(&seen), summary(&seen));
    print(written(args.output, &found, &notes, &summary).as_bytes())?;
    Ok(ExitCode::from(u8::from(!found.is_empty())))
}

async fn look(client: &Client, args: &Args) -> anyhow::Result<Seen> {
    match args.only {
        None => read(client, args.lease_namespace.as_deref(), LEASE_NAMESPACE).await,
        Some(Part::Agents) => agents_alone(client).await,
    }
}

fn written(output: Output, found: &[Finding], notes: &[Finding], summary: &str) -> String {
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
