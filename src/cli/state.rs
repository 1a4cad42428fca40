//! `plimsoll state`.

use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};

use super::output::Output;
use super::print;
use super::run::StateDirArgs;
use crate::clock;
use crate::node::machine::state_dir;
use crate::standalone::report;
use crate::standalone::scheduling::{self, SchedulingState};
use crate::standalone::status::{self, MachineStatus};

const EXAMPLES: &str = "\
Examples:
  See what is in force, and what Preview rules would do:
    plimsoll state
  Start a job only if the machine accepts new work:
    plimsoll state --schedulable && ./start-job

With --schedulable nothing is printed, and the exit status is the answer:
  0  yes: no rule keeps new work away
  1  no: a rule keeps new work away
  2  unknown; treat it as no

It is unknown if no `plimsoll run` uses this state directory, if it has not evaluated every rule since the machine started, \
or if its file cannot be read.";

/// Arguments of `plimsoll state`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    state_dir: StateDirArgs,

    /// Answer by exit status whether new work may start: 0 yes, 1 no, 2 unknown
    #[arg(long, conflicts_with = "output")]
    schedulable: bool,

    /// Output format
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let dir = &args.state_dir.state_dir;
    if args.schedulable {
        let state = schedulable(dir)?;
        return Ok(ExitCode::from(u8::from(!state.schedulable)));
    }
    let status: MachineStatus = read(&dir.join(status::FILE))?;
    let structured = args.output.of(&status)?;
    let text = structured.unwrap_or_else(|| {
        let report = report::StatusText::new(&status, clock::wall_time());
        report.to_string()
    });
    print(text.as_bytes())
}

fn schedulable(dir: &Path) -> anyhow::Result<SchedulingState> {
    let path = dir.join(scheduling::FILE);
    let state: SchedulingState = read(&path)?;
    if !state.writer.is_of_this_boot() {
        bail!(
            "cannot tell: {} is from before the machine started",
            path.display()
        );
    }
    if !state.writer.is_alive() {
        bail!(
            "cannot tell: `plimsoll run` (process {}), which wrote {}, no longer runs",
            state.writer.pid,
            path.display()
        );
    }
    Ok(state)
}

fn read<T: for<'a> serde::Deserialize<'a>>(path: &Path) -> anyhow::Result<T> {
    match state_dir::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(anyhow!(
            "{} does not exist: has `plimsoll run` been started with this --state-dir?",
            path.display()
        )),
        read => read.with_context(|| format!("failed to read {}", path.display())),
    }
}
