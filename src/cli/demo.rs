//! `plimsoll demo`.

use std::io::{self, IsTerminal, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, geteuid};

use super::{print, print_error};
use crate::demo::live::{self, Options};
use crate::demo::obstacle::Obstacle;
use crate::demo::plain::TextRenderer;
use crate::demo::renderer::Renderer;
use crate::demo::report::Report;
use crate::demo::terminal::TerminalRenderer;
use crate::demo::{leftovers, load};
use crate::node::cgroup::Hierarchy;
use crate::standalone::wake::Wake;

/// Exit status where the demo cannot run on this machine.
const CANNOT_RUN: u8 = 3;

const AFTER_HELP: &str = "\
What it does to this machine, for about a minute:
  - makes cgroups below one named plimsoll-demo-<pid>. In them it runs an important worker, which measures its own \
latency, and batch work, which keeps all CPUs busy. The cgroups have the CPU weights that pods with the same CPU \
requests would have; together they weigh as much as all pods of a Kubernetes node.
  - applies examples/ensurance/throttle.yaml, with the threshold set for this machine, to these cgroups and no others.
  - restores the originals, removes everything it made, compares, and reports what it measured, good or bad.
It leaves no cgroup, process or file behind, also when it is stopped (q, Ctrl-C, SIGTERM, SIGHUP). What `kill -9` \
leaves (empty cgroups, a directory in /tmp) the next demo removes.

Where cgroups cannot be written it says why and what to do, and changes nothing.

Exit status: 0 finished (or stopped) and everything restored, 1 something was not restored, 2 failed, \
3 cannot run on this machine.";

/// Arguments of `plimsoll demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// Print lines of text instead of the live view [default where standard output is not a terminal]
    #[arg(long)]
    plain: bool,

    /// About how long to run, at least 10; it may finish a little earlier
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(10..=3600))]
    seconds: u32,

    /// Format of the summary; with json nothing else goes to standard output
    #[arg(long, value_enum, default_value_t)]
    output: Output,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// cpu.shares of the whole demo against the rest of the machine [default: 1024 a CPU, as Kubernetes gives all its
    /// pods together]. On a busy machine a greater value keeps the others out of the figures, and takes CPU from them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=262_144))]
    shares: Option<u64>,

    /// Record the run, for `plimsoll replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// Format of the summary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    /// For people.
    #[default]
    Text,
    /// One object.
    Json,
}

/// Arguments of the processes that `plimsoll demo` starts.
#[derive(Debug, clap::Args)]
pub struct LoadArgs {
    /// The demo's process; this one is killed when it ends
    #[arg(long)]
    parent: i32,
    /// CPUs to keep busy
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// Runs the demo.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Before any thread is started: a signal must not reach one that does not block it.
    let wake = Wake::new(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP])
        .context("failed to take over the signals")?;
    let hierarchy = match Hierarchy::detect(Path::new("/proc"), args.cgroup_root.as_deref()) {
        Ok(hierarchy) => hierarchy,
        Err(error) => return Ok(cannot_run(&Obstacle::from(&error))),
    };
    for path in leftovers::remove_all(&hierarchy) {
        print_error(format_args!(
            "removed what a killed demo had left: {}",
            path.display()
        ));
    }
    match live::run(&args.options(hierarchy), &wake, || args.open_renderer()) {
        Ok(report) => args.print_report(&report),
        Err(error) => match Obstacle::behind(&error, geteuid().is_root()) {
            Some(obstacle) => Ok(cannot_run(&obstacle)),
            None => Err(error.into()),
        },
    }
}

fn cannot_run(obstacle: &Obstacle) -> ExitCode {
    print_error(format_args!("{obstacle}"));
    ExitCode::from(CANNOT_RUN)
}

impl Args {
    fn options(&self, hierarchy: Hierarchy) -> Options {
        Options {
            hierarchy,
            program: PathBuf::from("/proc/self/exe"),
            total: Duration::from_secs(u64::from(self.seconds)),
            shares: self.shares,
            record: self.record.clone(),
        }
    }

    /// Called once the demo is ready to begin: errors before that go to a plain terminal.
    fn open_renderer(&self) -> io::Result<Box<dyn Renderer>> {
        Ok(match self.output {
            Output::Json => Box::new(TextRenderer::new(stderr())),
            Output::Text if self.plain || !stdout().is_terminal() => {
                Box::new(TextRenderer::new(stdout()))
            }
            Output::Text => Box::new(TerminalRenderer::open()?),
        })
    }

    fn print_report(&self, report: &Report) -> anyhow::Result<ExitCode> {
        let text = match self.output {
            Output::Text => format!("\n{report}"),
            Output::Json => serde_json::to_string(report)? + "\n",
        };
        print(text.as_bytes())?;
        Ok(ExitCode::from(u8::from(!report.is_clean())))
    }
}

/// Runs the important work until the demo ends.
pub(super) fn worker(args: &LoadArgs) -> anyhow::Result<ExitCode> {
    load::serve(Pid::from_raw(args.parent), stdout())?;
    Ok(ExitCode::SUCCESS)
}

/// Runs batch work until the demo ends.
pub(super) fn burner(args: &LoadArgs) -> anyhow::Result<ExitCode> {
    load::burn(Pid::from_raw(args.parent), args.threads)?;
    Ok(ExitCode::SUCCESS)
}
