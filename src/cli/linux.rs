//! The commands of nodes and daemons. They need the kernel's cgroups, or serve a cluster of such nodes.

use std::process::ExitCode;

use clap::Subcommand;

use super::{agent, controller, demo, metrics, run};

// No doc comment: clap would print it instead of what the program is.
#[derive(Debug, Subcommand)]
pub(super) enum LinuxCommand {
    /// Show policies at work on this machine for about a minute, then restore everything.
    Demo(demo::Args),
    /// The important workload of the demo; started by `plimsoll demo`.
    #[command(hide = true)]
    DemoWorker(demo::LoadArgs),
    /// A stage of a chain of services; started by benches.
    #[command(hide = true)]
    DemoStage(demo::LoadArgs),
    /// The batch workload of the demo; started by `plimsoll demo`.
    #[command(hide = true)]
    DemoBurner(demo::LoadArgs),
    /// Enforce policies on this machine, without Kubernetes.
    Run(Box<run::Args>),
    /// Enforce policies on one node of a Kubernetes cluster.
    Agent(Box<agent::Args>),
    /// Compile the policies of a Kubernetes cluster for each of its nodes.
    Controller(Box<controller::Args>),
    /// Print the metrics of agent and controller as docs/metrics.md.
    #[command(hide = true)]
    Metrics(metrics::Args),
}

impl LinuxCommand {
    /// Runs the subcommand.
    pub(super) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Demo(args) => demo::run(&args),
            Self::DemoWorker(args) => demo::worker(&args),
            Self::DemoStage(args) => demo::stage(&args),
            Self::DemoBurner(args) => demo::burner(&args),
            Self::Run(args) => run::run(&args),
            Self::Agent(args) => agent::run(&args),
            Self::Controller(args) => controller::run(&args),
            Self::Metrics(args) => metrics::run(&args),
        }
    }
}
