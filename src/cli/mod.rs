//! One module per subcommand: arguments in, exit code out.

pub mod check;
mod cluster_args;
mod color;
pub mod crds;
pub mod doctor;
mod duration;
pub mod explain;
mod help;
mod man;
mod output;
mod period;
pub mod preview;
mod progress;
pub mod replay;
mod runtime;
mod server_table;
mod settings_file;
pub mod shell;
pub mod status;
pub mod stop;
pub mod top;
mod windows;

#[cfg(target_os = "linux")]
pub mod agent;
#[cfg(target_os = "linux")]
pub mod controller;
#[cfg(target_os = "linux")]
pub mod demo;
#[cfg(target_os = "linux")]
mod eviction_budgets;
#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
mod logging;
#[cfg(target_os = "linux")]
pub mod metrics;
#[cfg(target_os = "linux")]
pub mod run;

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal as _, Write, stdout};
use std::os::fd::{AsFd, BorrowedFd};
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use ratatui::crossterm::terminal;

use crate::cluster::client::describe;
use crate::crd::Severity;
use crate::crd::manifest::{Location, Position};

/// Namespace of the Leases that agents renew.
const LEASE_NAMESPACE: &str = "plimsoll-node-lease";

/// Run nodes at high load, and protect important workloads when a node exceeds its thresholds.
#[derive(Debug, Parser)]
#[command(
    name = "plimsoll",
    version,
    propagate_version = true,
    arg_required_else_help = true
)]
#[cfg_attr(
    not(target_os = "linux"),
    command(after_help = "The commands agent, controller, demo and run exist on Linux only.")
)]
pub struct Cli {
    /// Colour what is printed for people
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t)]
    color: color::Color,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    #[cfg(target_os = "linux")]
    #[command(flatten)]
    Linux(linux::LinuxCommand),
    /// Validate policy manifests without a cluster.
    Check(check::Args),
    /// Show what policies would do on a live Kubernetes cluster, before you apply them.
    Preview(preview::Args),
    /// Show the load of the nodes of a Kubernetes cluster, and which agents do not respond.
    Top(top::Args),
    /// Show an installation at a glance: leader, agents, policies, nodes over a threshold, stops.
    Status(status::StatusArgs),
    /// Say what is done to a pod and why, where a pod would be placed, or how loaded a node is.
    Explain(explain::Args),
    /// Emergency stop: make the agents of all nodes, or of some, restore what they changed, and do nothing more.
    Stop(stop::StopArgs),
    /// Let the agents act again after `plimsoll stop`.
    Resume(stop::ResumeArgs),
    /// Check an installation on a Kubernetes cluster, and say how to fix what is wrong.
    Doctor(doctor::Args),
    /// Run policies over a recorded trace and print what would have happened.
    Replay(replay::Args),
    /// Print the custom resource definitions.
    Crds(crds::Args),
    /// Print a completion script for a shell.
    #[command(alias = "completion")]
    Completions(shell::CompletionsArgs),
    /// Print the manual page.
    Man(shell::ManArgs),
    /// Print the versions of this command, the controller and the agents.
    Version(status::VersionArgs),
}

impl Cli {
    /// Parses the arguments of the process; prints help or what is wrong with them, and exits.
    pub fn from_arguments() -> Self {
        let matches = help::grouped(Self::command()).get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    /// Runs the subcommand.
    ///
    /// # Errors
    /// Any failure of the subcommand, except that the reader closed standard output. `main` prints it and exits with 2.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.color.apply();
        match self.run_command() {
            Err(error) if is_closed_pipe(&error) => Ok(ExitCode::SUCCESS),
            result => result,
        }
    }

    fn run_command(self) -> anyhow::Result<ExitCode> {
        match self.command {
            #[cfg(target_os = "linux")]
            Command::Linux(command) => command.run(),
            Command::Check(args) => check::run(&args),
            Command::Preview(args) => preview::run(&args),
            Command::Top(args) => top::run(&args),
            Command::Explain(args) => explain::run(&args),
            Command::Status(args) => status::status(&args),
            Command::Stop(args) => stop::stop(&args),
            Command::Resume(args) => stop::resume(&args),
            Command::Doctor(args) => doctor::run(&args),
            Command::Replay(args) => replay::run(&args),
            Command::Crds(args) => crds::run(&args),
            Command::Completions(args) => shell::completions(&args),
            Command::Man(args) => shell::man(&args),
            Command::Version(args) => status::version(&args),
        }
    }
}

/// All that is wrong in a file, each as `file:line:column: error: message`.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("; "))]
struct FileErrors(Vec<String>);

impl FileErrors {
    /// One error.
    fn one(file: &str, position: Position, message: impl Display) -> Self {
        let location = Location { file, position };
        Self(vec![format!("{location}: {}: {message}", Severity::Error)])
    }
}

/// Prints why a command failed: what is wrong in a file as it is, one a line, and all else with the program's name before it.
pub fn print_failure(error: &anyhow::Error) {
    match error.downcast_ref() {
        Some(FileErrors(errors)) => errors.iter().for_each(print_error),
        None => print_error(format_args!("plimsoll: error: {}", one_line(error))),
    }
}

/// An error with its causes on one line, without causes that a message already includes.
fn one_line(error: &anyhow::Error) -> String {
    describe(error.as_ref())
}

/// Whether the reader has closed standard output. A broken connection gives the same error, so the output itself is polled.
fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
    let is_broken = causes.any(|cause: &io::Error| cause.kind() == ErrorKind::BrokenPipe);
    is_broken && has_no_reader(stdout().as_fd())
}

fn has_no_reader(output: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::new(output, PollFlags::empty())];
    let result = poll(&mut polled, PollTimeout::ZERO);
    let [output] = polled;
    let closed = PollFlags::POLLERR | PollFlags::POLLHUP;
    result.is_ok() && output.revents().is_some_and(|it| it.intersects(closed))
}

/// Width of the terminal, if standard output is one.
fn terminal_width() -> Option<usize> {
    let is_terminal = stdout().is_terminal();
    let (columns, _) = is_terminal.then(terminal::size)?.ok()?;
    (columns > 0).then_some(columns.into())
}

/// Prints a message to standard error, its severity in colour. `eprintln` would panic if the pipe is closed.
pub fn print_error(line: impl Display) {
    let line = color::message(&line.to_string());
    let _unread = writeln!(anstream::stderr(), "{line}");
}

/// Prints a text for people, with colours. A closed pipe, as by `head`, is no error.
fn print_text(text: &str) -> anyhow::Result<ExitCode> {
    finish(write_text(text))
}

/// Writes a text to standard output, with its colours if there are any there.
fn write_text(text: &str) -> io::Result<()> {
    anstream::stdout().lock().write_all(text.as_bytes())
}

/// Prints to standard output. A closed pipe, as by `head`, is no error.
fn print(text: &[u8]) -> anyhow::Result<ExitCode> {
    finish(stdout().lock().write_all(text))
}

fn finish(written: io::Result<()>) -> anyhow::Result<ExitCode> {
    match written {
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
    fn a_pipe_whose_reader_is_closed_has_no_reader() {
        let (reader, writer) = io::pipe().expect("a pipe");
        assert!(!has_no_reader(writer.as_fd()));
        drop(reader);
        assert!(has_no_reader(writer.as_fd()));
    }

    #[test]
    fn a_broken_connection_is_not_a_closed_pipe() {
        let error = anyhow::Error::from(io::Error::from(ErrorKind::BrokenPipe));
        assert!(!is_closed_pipe(&error.context("failed to ask")));
    }

    /// A terminal breaks longer lines of examples a second time. Items of a list are paragraphs.
    #[test]
    fn examples_in_help_texts_fit_80_columns() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string);
            let help = help.unwrap_or_default();
            let examples = help.lines().filter(|line| line.starts_with(' '));
            for line in examples.filter(|line| !line.starts_with("  - ")) {
                assert!(line.len() <= 80, "{}: {line}", command.get_name());
            }
        }
    }

    #[test]
    fn help_texts_have_no_hard_line_breaks() {
        for command in Cli::command().get_subcommands() {
            let help = command.get_after_help().map(ToString::to_string);
            let help = help.unwrap_or_default();
            let lines: Vec<&str> = help.lines().collect();
            for pair in lines.windows(2) {
                let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
                let same_paragraph = is_text(pair[0]) && is_text(pair[1]);
                let name = command.get_name();
                assert!(pair[0].len() < 80 || !same_paragraph, "{name}: {}", pair[0]);
            }
        }
    }

    #[test]
    fn a_cause_is_printed_once() {
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
