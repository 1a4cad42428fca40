//! `plimsoll demo`.

use std::fmt::Write as _;
use std::io::{self, IsTerminal, stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, geteuid};

use super::{complain, print};
use crate::demo::access::Obstacle;
use crate::demo::live::{self, Options};
use crate::demo::plain::Plain;
use crate::demo::replay::{self, Replayed};
use crate::demo::report::Report;
use crate::demo::show::Show;
use crate::demo::terminal::{Photographer, Screen};
use crate::demo::{leftovers, load};
use crate::node::cgroup::Hierarchy;
use crate::standalone::wake::Wake;

/// The policies need so long to take effect before the picture is taken, as a part of the demo's length.
const PICTURE_DELAY: u32 = 4;

/// Exit status where the demo is not possible on this machine.
const NOT_HERE: u8 = 3;

const WHAT_IT_DOES: &str = "\
What it does to this machine, for about a minute:
  - makes cgroups below one named plimsoll-demo-<pid>, in which it runs an important worker that measures its own
    latency, and batch work that keeps all CPUs busy. The cgroups weigh as much as pods with their CPU requests would;
    to the rest of the machine all of it together weighs as much as the pods of a Kubernetes node.
  - applies examples/ensurance/throttle.yaml, with the load line set for this machine, to these cgroups and no others.
  - puts the originals back, removes everything it made, compares, and tells what it measured, whichever way it falls.
It leaves nothing: no cgroup, no process, no file; not when it is stopped (q, Ctrl-C, SIGTERM, SIGHUP) either. What \
`kill -9` leaves behind (empty cgroups, a directory in /tmp) the next demo removes.

Where cgroups cannot be written it says why and what to do, and replays a recording, which changes nothing.

Exit status: 0 played (or stopped) and everything put back, 1 something was not put back, 2 could not go on, \
3 not possible on this machine: a recording was shown.";

/// Arguments of `plimsoll demo`.
#[derive(Debug, clap::Args)]
#[command(after_help = WHAT_IT_DOES)]
pub struct Args {
    /// Lines of text instead of the live view; so it is too where standard output is no terminal
    #[arg(long)]
    plain: bool,

    /// About how long, at least 10; it may end a little earlier
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(10..=3600))]
    seconds: u32,

    /// How to write the summary; with json it is all that goes to standard output
    #[arg(long, value_enum, default_value_t)]
    output: Output,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// cpu.shares of the whole demo against the rest of the machine [default: 1024 a CPU, as Kubernetes gives all its
    /// pods together]. On a busy machine a greater value keeps the others out of the figures, and takes CPU from them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..=262_144))]
    shares: Option<u64>,

    /// Show the recording, as where cgroups cannot be written; changes nothing
    #[arg(long, conflicts_with = "record")]
    replay: bool,

    /// Record the run, for `plimsoll replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Save the screen in the midst of throttling as SVG
    #[arg(long, value_name = "FILE", hide = true)]
    picture: Option<PathBuf>,
}

/// How the summary is written.
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
    /// The demo's process, with which this one ends
    #[arg(long)]
    parent: i32,
    /// CPUs to keep busy
    #[arg(long, default_value_t = 1)]
    threads: usize,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Before any thread: a signal must not reach one that does not block it.
    let wake = Wake::new(&[Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP])
        .context("failed to take over the signals")?;
    if args.replay {
        args.replay(&wake)?;
        return Ok(ExitCode::SUCCESS);
    }
    let hierarchy = match Hierarchy::detect(Path::new("/proc"), args.cgroup_root.as_deref()) {
        Ok(hierarchy) => hierarchy,
        Err(error) => return args.show_recording(&Obstacle::from(&error), &wake),
    };
    for path in leftovers::sweep(&hierarchy) {
        complain(format_args!(
            "removed what a killed demo had left: {}",
            path.display()
        ));
    }
    let played = live::play(&args.options(hierarchy), &wake, || args.open_show());
    match played {
        Ok(report) => args.tell(&report),
        Err(error) => match Obstacle::behind(&error, geteuid().is_root()) {
            Some(obstacle) => args.show_recording(&obstacle, &wake),
            None => Err(error.into()),
        },
    }
}

impl Args {
    fn options(&self, hierarchy: Hierarchy) -> Options {
        Options {
            hierarchy,
            program: PathBuf::from("/proc/self/exe"),
            total: self.total(),
            shares: self.shares,
            record: self.record.clone(),
        }
    }

    fn total(&self) -> Duration {
        Duration::from_secs(u64::from(self.seconds))
    }

    /// Opened once the demo is ready to begin, so that an error before is told on a plain terminal.
    fn open_show(&self) -> io::Result<Box<dyn Show>> {
        let show: Box<dyn Show> = match self.output {
            Output::Json => Box::new(Plain::new(stderr())),
            Output::Text if self.plain || !stdout().is_terminal() => Box::new(Plain::new(stdout())),
            Output::Text => Box::new(Screen::open()?),
        };
        Ok(match &self.picture {
            None => show,
            Some(path) => Box::new(Photographer::new(
                show,
                path.clone(),
                self.total() / PICTURE_DELAY,
            )),
        })
    }

    fn tell(&self, report: &Report) -> anyhow::Result<ExitCode> {
        let text = match self.output {
            Output::Text => format!("\n{report}"),
            Output::Json => serde_json::to_string(report)? + "\n",
        };
        print(text.as_bytes())?;
        Ok(ExitCode::from(u8::from(!report.is_clean())))
    }

    fn show_recording(&self, obstacle: &Obstacle, wake: &Wake) -> anyhow::Result<ExitCode> {
        complain(format_args!(
            "{obstacle}\nHere are the same policies over a recording instead.\n"
        ));
        self.replay(wake)?;
        // On a terminal the live view has hidden it.
        complain(format_args!("\n{obstacle}"));
        Ok(ExitCode::from(NOT_HERE))
    }

    fn replay(&self, wake: &Wake) -> anyhow::Result<()> {
        let mut show = self.open_show()?;
        let replayed = replay::play(self.total(), wake, show.as_mut());
        drop(show);
        let replayed = replayed?;
        let text = match self.output {
            Output::Text => in_words(&replayed)?,
            Output::Json => {
                let json =
                    serde_json::json!({"replay": replayed.recorded, "summary": replayed.summary});
                format!("{json}\n")
            }
        };
        print(text.as_bytes()).map(drop)
    }
}

fn in_words(replayed: &Replayed) -> anyhow::Result<String> {
    let mut text = format!(
        "\nREPLAY of {}: what the policies would have done\n",
        replayed.recorded
    );
    for (id, rule) in &replayed.summary.rules {
        writeln!(
            text,
            "  {id}: {} steps down, {} steps up, in force for {:.1} s",
            rule.steps_down,
            rule.steps_up,
            rule.in_force.as_secs_f64()
        )?;
    }
    Ok(text)
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
