//! `plimsoll status --local`.

use std::io::ErrorKind;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};

use crate::cli::output::Output;
use crate::cli::print;
use crate::cli::run::StateDirArgs;
use crate::clock;
use crate::node::machine::state_dir;
use crate::standalone::report;
use crate::standalone::scheduling::{self, SchedulingState};
use crate::standalone::status::{self, MachineStatus};

/// What `plimsoll run` has in force on this machine.
#[derive(Debug, clap::Args)]
pub(super) struct LocalArgs {
    /// What `plimsoll run` has in force on this machine, without Kubernetes
    #[arg(long, conflicts_with_all = ["kubeconfig", "context"])]
    local: bool,

    /// Answer by exit status whether new work may start on this machine: 0 yes, 1 no, 2 unknown
    #[arg(long, requires = "local", conflicts_with = "output")]
    schedulable: bool,

    #[command(flatten)]
    state_dir: StateDirArgs,
}

impl LocalArgs {
    /// Answers, if it is asked about this machine.
    pub(super) fn run(&self, output: Output) -> anyhow::Result<Option<ExitCode>> {
        if !self.local {
            return Ok(None);
        }
        let dir = &self.state_dir.state_dir;
        if self.schedulable {
            let state = schedulable(dir)?;
            return Ok(Some(ExitCode::from(u8::from(!state.schedulable))));
        }
        let status: MachineStatus = read(&dir.join(status::FILE))?;
        let structured = output.of(&status)?;
        let text = structured.unwrap_or_else(|| {
            let report = report::StatusText::new(&status, clock::wall_time());
            report.to_string()
        });
        print(text.as_bytes()).map(Some)
    }
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
