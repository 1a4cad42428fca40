//! `plimsoll explain`: one answer each about a pod, where pods go, and a node's load.

mod metric;
mod placement;
mod pod;

use std::process::ExitCode;

/// Arguments of `plimsoll explain`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// Show what policies may do to a pod, what they do to it now, and where it would be placed.
    Pod(pod::Args),
    /// Show how loaded each node is for a pod, and what schedulers see of it.
    Placement(placement::Args),
    /// Show a figure of a node's load, as the controller knows it now or knew it some minutes ago.
    Metric(metric::Args),
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.what {
        What::Pod(args) => pod::run(args),
        What::Placement(args) => placement::run(args),
        What::Metric(args) => metric::run(args),
    }
}
