//! `plimsoll status` and `plimsoll version`.

mod installation;
#[cfg(target_os = "linux")]
mod local;
mod report;

use std::process::ExitCode;

use serde::Serialize;

use self::installation::{Installation, Versions};
use self::report::StatusSummary;
use super::cluster_args::ClusterArgs;
use super::output::Output;
use super::{print, print_text, runtime};
use crate::clock;

const STATUS_HELP: &str = "\
One summary of an installation: which replica of the controller leads, how many agents respond, which policies are not in \
force, which nodes are over a threshold, what is in force on them, and whether something is stopped. `plimsoll doctor` says \
what is wrong and how to fix it; `plimsoll top` shows each node.

With --local it shows what `plimsoll run` has in force on this machine, without Kubernetes.

Permissions: list deployments, daemonsets, nodewatermarks, nodeqoss, podqoss and avoidanceactions; get and list leases, and get \
the ConfigMap plimsoll-stop.

Examples:
  plimsoll status
  Start a job only if this machine accepts new work:
    plimsoll status --local --schedulable && ./start-job

Exit status: 0 the controller leads, all agents respond, all policies are in force, and nothing is stopped; 1 not so; 2 the \
cluster could not be read. With --local: 0 shown, 2 not. With --schedulable nothing is printed: 0 new work may start, 1 a rule \
keeps it away, 2 unknown (no `plimsoll run` uses this state directory, or it has not evaluated every rule since the machine \
started): treat it as no.";

/// Arguments of `plimsoll status`.
#[derive(Debug, clap::Args)]
#[command(after_help = STATUS_HELP)]
pub struct StatusArgs {
    #[cfg(target_os = "linux")]
    #[command(flatten)]
    local: local::LocalArgs,

    /// Output format; JSON and YAML have {controller, agents, policies, nodes, stopped, healthy, notes}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Arguments of `plimsoll version`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Permissions: list deployments and nodewatermarks; none with --client.

Exit status: 0 shown, 2 the cluster could not be read.")]
pub struct VersionArgs {
    /// Only of this command, without a cluster
    #[arg(long)]
    client: bool,

    /// Output format; JSON and YAML have {client, controllers: [...], agents: {VERSION: NODES}}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Runs `plimsoll status`.
pub(super) fn status(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    #[cfg(target_os = "linux")]
    if let Some(answer) = args.local.run(args.output)? {
        return Ok(answer);
    }
    let summary = runtime::start()?.block_on(async {
        let client = args.cluster.connect().await?;
        let installation = Installation::read(&client).await?;
        anyhow::Ok(StatusSummary::new(&installation, clock::wall_time()))
    })?;
    match args.output.of(&summary)? {
        Some(text) => print(text.as_bytes())?,
        None => print_text(&summary.to_string())?,
    };
    Ok(ExitCode::from(u8::from(!summary.is_healthy())))
}

/// What `plimsoll version` prints.
#[derive(Debug, Serialize)]
struct AllVersions {
    client: &'static str,
    #[serde(flatten)]
    cluster: Option<Versions>,
}

/// Runs `plimsoll version`.
pub(super) fn version(args: &VersionArgs) -> anyhow::Result<ExitCode> {
    let client = env!("CARGO_PKG_VERSION");
    let read = || {
        runtime::start()?.block_on(async {
            let client = args.cluster.connect().await?;
            Versions::read(&client).await
        })
    };
    let mut unread = None;
    let cluster = if args.client {
        None
    } else {
        // As kubectl: the own version is shown in any case.
        read().map_err(|error| unread = Some(error)).ok()
    };
    let all = AllVersions { client, cluster };
    if let Some(text) = args.output.of(&all)? {
        print(text.as_bytes())?;
    } else {
        let cluster = all.cluster.as_ref().map(ToString::to_string);
        print(format!("client      {client}\n{}", cluster.unwrap_or_default()).as_bytes())?;
    }
    unread.map_or(Ok(ExitCode::SUCCESS), Err)
}
