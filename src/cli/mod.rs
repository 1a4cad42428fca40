//! One module a subcommand: arguments in, an exit code out.

pub mod agent;
pub mod check;
pub mod controller;
pub mod crds;
pub mod demo;
pub mod doctor;
mod duration;
mod eviction_budgets;
mod logging;
pub mod metrics;
pub mod preview;
pub mod replay;
pub mod run;
mod runtime;
pub mod shell;
pub mod state;
pub mod stop;
pub mod top;

use std::fmt::Display;
use std::io::{self, ErrorKind, Write, stderr, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::cluster::client::describe;

/// Where the Leases are that agents renew.
const LEASE_NAMESPACE: &str = "plimsoll-node-lease";

/// Load a machine high and keep the important work safe when it goes over its line.
#[derive(Debug, Parser)]
#[command(
    name = "plimsoll",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Watch policies protect this machine for a minute, then put everything back.
    Demo(demo::Args),
    /// The important work of the demo; started by `plimsoll demo`.
    #[command(hide = true)]
    DemoWorker(demo::LoadArgs),
    /// The batch work of the demo; started by `plimsoll demo`.
    #[command(hide = true)]
    DemoBurner(demo::LoadArgs),
    /// Validate policy manifests without a cluster.
    Check(check::Args),
    /// Enforce policies on this machine, without Kubernetes.
    Run(Box<run::Args>),
    /// Ask a running (or stopped) `plimsoll run` what is in force.
    State(state::Args),
    /// Keep the policies on one node of a Kubernetes cluster.
    Agent(Box<agent::Args>),
    /// Compile the policies of a Kubernetes cluster for its nodes.
    Controller(Box<controller::Args>),
    /// Show what policies would do on a live Kubernetes cluster right now, before applying them.
    Preview(preview::Args),
    /// Show how loaded the nodes of a Kubernetes cluster are, against their marks, and which agents are silent.
    Top(top::Args),
    /// Make every agent of a Kubernetes cluster give back what is in force, and do nothing more.
    Stop(stop::StopArgs),
    /// Let every agent go on after `plimsoll stop`.
    Resume(stop::ResumeArgs),
    /// Look whether an installation on a Kubernetes cluster is whole, and say what to do where it is not.
    Doctor(doctor::Args),
    /// Run policies over a recorded trace and print what would have happened.
    Replay(replay::Args),
    /// Print the custom resource definitions.
    Crds(crds::Args),
    /// Print what agent and controller tell Prometheus, as the documentation has it.
    #[command(hide = true)]
    Metrics(metrics::Args),
    /// Print a completion script for a shell.
    Completions(shell::CompletionsArgs),
    /// Print the manual page.
    Man(shell::ManArgs),
}

impl Cli {
    /// Runs the subcommand.
    ///
    /// # Errors
    /// Whatever stops the subcommand, but for a reader of its output that has had enough; `main` prints it and exits with 2.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self.run_command() {
            Err(error) if is_closed_pipe(&error) => Ok(ExitCode::SUCCESS),
            ended => ended,
        }
    }

    fn run_command(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Demo(args) => demo::run(&args),
            Command::DemoWorker(args) => demo::worker(&args),
            Command::DemoBurner(args) => demo::burner(&args),
            Command::Check(args) => check::run(&args),
            Command::Run(args) => run::run(&args),
            Command::State(args) => state::run(&args),
            Command::Agent(args) => agent::run(&args),
            Command::Controller(args) => controller::run(&args),
            Command::Preview(args) => preview::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Stop(args) => stop::stop(&args),
            Command::Resume(args) => stop::resume(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Replay(args) => replay::run(&args),
            Command::Crds(args) => crds::run(&args),
            Command::Metrics(args) => metrics::run(&args),
            Command::Completions(args) => shell::completions(&args),
            Command::Man(args) => shell::man(&args),
        }
    }
}

/// An error with its causes, in a line; a cause that a message already has is left out.
pub fn one_line(error: &anyhow::Error) -> String {
    describe(error.as_ref())
}

/// Whether the reader of standard output has closed it. Connections break with the same error, so the output itself is polled.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
    let is_broken = causes.any(|cause: &io::Error| cause.kind() == ErrorKind::BrokenPipe);
    is_broken && has_no_reader(stdout().as_fd())
}

fn has_no_reader(output: BorrowedFd<'_>) -> bool {
    let mut asked = [PollFd::new(output, PollFlags::empty())];
    let answer = poll(&mut asked, PollTimeout::ZERO);
    let [output] = asked;
    let ended = PollFlags::POLLERR | PollFlags::POLLHUP;
    answer.is_ok() && output.revents().is_some_and(|is| is.intersects(ended))
}

/// A line on standard error. `eprintln` would panic where its reader has closed the pipe.
pub fn complain(line: impl Display) {
    let _unread = writeln!(stderr(), "{line}");
}

/// Prints all of it. Whoever reads it may have had enough, as `head` has.
fn print(text: &[u8]) -> anyhow::Result<ExitCode> {
    match stdout().lock().write_all(text) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(error).context("failed to write to standard output")
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[test]
    fn a_pipe_has_no_reader_once_that_end_is_closed() {
        let (reader, writer) = io::pipe().expect("a pipe");
        assert!(!has_no_reader(writer.as_fd()));
        drop(reader);
        assert!(has_no_reader(writer.as_fd()));
    }

    #[test]
    fn a_connection_that_breaks_is_a_failure() {
        let error = anyhow::Error::from(io::Error::from(ErrorKind::BrokenPipe));
        assert!(!is_closed_pipe(&error.context("failed to ask")));
    }

    #[test]
    fn help_is_wrapped_by_the_terminal_alone() {
        for command in <Cli as clap::CommandFactory>::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string);
            let help = help.unwrap_or_default();
            let lines: Vec<&str> = help.lines().collect();
            for pair in lines.windows(2) {
                let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
                let goes_on = is_text(pair[0]) && is_text(pair[1]);
                let name = command.get_name();
                assert!(pair[0].len() < 80 || !goes_on, "{name}: {}", pair[0]);
            }
        }
    }

    #[test]
    fn a_cause_is_named_once() {
        let error = anyhow!("no such file").context("failed to read x: no such file");
        assert_eq!(one_line(&error), "failed to read x: no such file");
        let error = anyhow!("no such file")
            .context("failed to read x")
            .context("failed to start");
        assert_eq!(
            one_line(&error),
            "failed to start: failed to read x: no such file"
        );
    }
}
