//! `plimsoll demo`.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, IsTerminal, stderr, stdin, stdout};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, geteuid};

use super::output::Output;
use super::{print, print_error, print_text, terminal_width};
use crate::demo::leftovers;
use crate::demo::live::{self, Options};
use crate::demo::obstacle::Obstacle;
use crate::demo::plain::TextRenderer;
use crate::demo::renderer::Renderer;
use crate::demo::report::DemoReport;
use crate::demo::terminal::TerminalRenderer;
use crate::node::cgroup::Hierarchy;
use crate::scene::load::{self, Service};
use crate::standalone::wake::Wake;

/// The kernel's own limit.
const MAX_CPUS: u32 = 8192;
/// Exit status where the demo cannot run on this machine.
const CANNOT_RUN: u8 = 3;

const AFTER_HELP: &str = "\
What it does to this machine, for about a minute:
  - makes cgroups below one named plimsoll-demo-<pid>. In them it runs an important pod, which serves requests and \
measures their latency, and two batch pods, which keep all CPUs busy. The cgroups have the CPU weights that pods with \
the same CPU requests would have; together they weigh as much as all pods of a Kubernetes node. The important pod \
needs more CPU than it requested, as many services do: equal weights do not protect it.
  - applies an example policy (cgroup v2: examples/ensurance/pressure.yaml; v1: examples/ensurance/idle-class.yaml), \
with thresholds for this machine, to these cgroups and no others.
  - restores the originals, removes everything it made, compares, and reports what it measured, good or bad.
It leaves no cgroup, process or file behind, also when it is stopped (q, Ctrl-C, SIGTERM, SIGHUP). After `kill -9`, \
empty cgroups and a directory in /tmp are left; the next demo removes them.

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

    /// Format of the summary; with json and yaml nothing else goes to standard output
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// Run only on these CPUs, such as 0-1 or 0,2. The load fits their number, so that a machine with many CPUs is not
    /// overloaded and figures of different machines can be compared [default: all that this process may use]
    #[arg(long, value_name = "LIST", value_parser = parse_cpus)]
    cpus: Option<Cpus>,

    /// cpu.shares of the whole demo against the rest of the machine [default: 1024 a CPU, as Kubernetes gives all its
    /// pods together]. On a busy machine, with a greater value other processes disturb the measurement less, and get less CPU
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=262_144))]
    shares: Option<u64>,

    /// Record the run, for `plimsoll replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// Arguments of the processes that `plimsoll demo` starts.
#[derive(Debug, clap::Args)]
pub struct LoadArgs {
    /// The demo's process; this one is killed when it ends
    #[arg(long)]
    parent: i32,
    /// Threads that are busy, or that serve requests
    #[arg(long, default_value_t = 1)]
    threads: usize,
    /// Requests per second
    #[arg(long, default_value_t = 1)]
    rate: u32,
    /// CPU time of a request
    #[arg(long, default_value_t = 1000)]
    work_micros: u64,
    /// Time after which a request that no thread has begun to serve is given up
    #[arg(long, default_value_t = 1000)]
    request_timeout_millis: u64,
    /// Pass each request on at once
    #[arg(long)]
    first_of_chain: bool,
}

/// CPU numbers, ascending.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Cpus(Vec<u32>);

/// Parses a list as the kernel and `taskset` write it: `0-1,4`.
fn parse_cpus(text: &str) -> Result<Cpus, String> {
    let error = |part: &str| format!("`{part}` is neither a CPU nor a range of CPUs such as 0-1");
    let mut cpus = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| error(part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last || last >= MAX_CPUS {
            return Err(error(part));
        }
        cpus.extend(first..=last);
    }
    Ok(Cpus(cpus.into_iter().collect()))
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
            cpus: self.cpus.as_ref().map(|cpus| cpus.0.clone()),
            shares: self.shares,
            record: self.record.clone(),
        }
    }

    /// Called once the demo is ready to begin: errors before that go to a plain terminal.
    fn open_renderer(&self) -> io::Result<Box<dyn Renderer>> {
        Ok(match self.output {
            Output::Json | Output::Yaml => Box::new(TextRenderer::new(stderr())),
            Output::Text if self.plain || !stdout().is_terminal() => {
                Box::new(TextRenderer::new(stdout()))
            }
            Output::Text => Box::new(TerminalRenderer::open()?),
        })
    }

    fn print_report(&self, report: &DemoReport) -> anyhow::Result<ExitCode> {
        match (self.output.of(report)?, terminal_width()) {
            (Some(structured), _) => print(structured.as_bytes())?,
            (None, Some(width)) => print_text(&format!("\n{report:#width$}"))?,
            (None, None) => print_text(&format!("\n{report:#}"))?,
        };
        Ok(ExitCode::from(u8::from(!report.is_clean())))
    }
}

/// Runs the important pod until the demo ends.
pub(super) fn worker(args: &LoadArgs) -> anyhow::Result<ExitCode> {
    let service = Service {
        threads: args.threads,
        rate: args.rate,
        work: Duration::from_micros(args.work_micros),
        request_timeout: Duration::from_millis(args.request_timeout_millis),
        first_of_chain: args.first_of_chain,
    };
    load::serve(Pid::from_raw(args.parent), service, &unbuffered_stdout()?)?;
    Ok(ExitCode::SUCCESS)
}

/// Runs a stage of a chain of services until the one before ends.
pub(super) fn stage(args: &LoadArgs) -> anyhow::Result<ExitCode> {
    let work = Duration::from_micros(args.work_micros);
    let out = unbuffered_stdout()?;
    load::pass_on(Pid::from_raw(args.parent), work, stdin().lock(), &out)?;
    Ok(ExitCode::SUCCESS)
}

fn unbuffered_stdout() -> io::Result<File> {
    Ok(File::from(stdout().as_fd().try_clone_to_owned()?))
}

/// Runs batch work until the demo ends.
pub(super) fn burner(args: &LoadArgs) -> anyhow::Result<ExitCode> {
    load::burn(Pid::from_raw(args.parent), args.threads)?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_listed_as_the_kernel_does() {
        assert_eq!(parse_cpus("0-1,4").unwrap().0, [0, 1, 4]);
        assert_eq!(parse_cpus("3,1,1").unwrap().0, [1, 3]);
        for wrong in ["", "a", "2-1", "0-", "-1", "0,,1", "0-99999"] {
            let error = parse_cpus(wrong).unwrap_err();
            assert!(error.contains("range of CPUs"), "{wrong}: {error}");
        }
    }
}
