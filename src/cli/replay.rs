//! `plimsoll replay`.

use std::fs::File;
use std::io::{BufRead, BufReader, IsTerminal as _, Write, stdin, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};

use super::period;
use super::progress::ProgressLine;
use super::windows::WindowsFile;
use super::{FileErrors, print_error};
use crate::engine::policy::NodeFacts;
use crate::messages::event::{Event, NamedDecision, PolicyProblem, metric};
use crate::standalone::output::{EventFormat, EventOutput};
use crate::standalone::policies;
use crate::standalone::replay_summary::ReplaySummary;
use crate::trace::read::TraceError;
use crate::trace::replay::Replay;

const EXAMPLES: &str = "\
Examples:
  See what edited policies would have done yesterday:
    plimsoll replay day.trace -f edited/
  As JSON, one object per transition and a summary on the last line:
    plimsoll replay day.trace -f edited/ --output json

`plimsoll run --record FILE` writes a trace. Every rule runs as a Preview: what it would have throttled or evicted is \
subtracted from the recorded usage in later evaluations, as far as it is known.

Rules that cannot be enforced are named on standard error and skipped.

Exit status: 0 replayed to the end, 1 replayed, but the policies have errors, 2 the trace or the policies could not be read, or \
there is no rule to replay.";

/// Arguments of `plimsoll replay`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The trace; `-` is standard input
    trace: PathBuf,

    /// Policy manifests, or directories of them
    #[arg(
        short = 'f',
        long = "filename",
        alias = "policies",
        value_name = "FILE|DIR",
        num_args = 1..,
        required = true
    )]
    policies: Vec<PathBuf>,

    #[command(flatten)]
    windows: WindowsFile,

    /// Time between two evaluations of the rules [default: as recorded]
    #[arg(long, value_name = "DURATION", value_parser = period::parse)]
    period: Option<Duration>,

    /// Output format
    #[arg(long, value_enum, default_value_t)]
    output: EventFormat,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    for path in &args.policies {
        File::open(path)
            .with_context(|| format!("failed to open the policies {}", path.display()))?;
    }
    if args.trace == Path::new("-") {
        return replay(args, stdin().lock());
    }
    let file = File::open(&args.trace)
        .with_context(|| format!("failed to open the trace {}", args.trace.display()))?;
    replay(args, BufReader::new(file))
}

fn replay(args: &Args, input: impl BufRead) -> anyhow::Result<ExitCode> {
    let trace = args.trace.display().to_string();
    let failed = |error: TraceError| FileErrors::one(&trace, error.position(), &error);
    let mut problems = Vec::new();
    let windows = args.windows.read()?;
    let opened = Replay::open(input, Arc::clone(&windows), args.period, |header| {
        let node = NodeFacts {
            windows: Some(windows),
            ..NodeFacts::from(&header.node)
        };
        let loaded = policies::load(&args.policies, &node, true, &[]);
        problems = loaded.problems;
        loaded.policy
    });
    let (header, mut replay) = opened.map_err(failed)?;
    for problem in &problems {
        print_error(problem);
    }
    if replay.policy().rules.is_empty() {
        bail!("{}", no_rule(&args.policies));
    }
    let mut output = EventOutput::new(args.output, stdout().lock());
    // On a terminal, the events themselves show the progress.
    let progress = if stdout().is_terminal() {
        ProgressLine::hidden()
    } else {
        ProgressLine::new("replaying samples", None)
    };
    while replay.step().map_err(failed)? {
        progress.advance();
        let tick = replay.tick();
        let (now, time) = (tick.now, tick.sample.time);
        let time = time.unwrap_or_else(|| header.wall_time(now));
        output.write(&events(&replay), now, time)?;
    }
    drop(progress);
    let summary = ReplaySummary::new(&replay);
    match args.output {
        EventFormat::Text => write!(stdout(), "{summary}")?,
        EventFormat::Json => writeln!(stdout(), "{}", serde_json::to_string(&summary)?)?,
    }
    let failed = problems.iter().any(PolicyProblem::is_error);
    Ok(ExitCode::from(u8::from(failed)))
}

fn no_rule(policies: &[PathBuf]) -> String {
    let paths: Vec<_> = policies
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    format!(
        "there is no rule to replay in {}: it needs a NodeQOS that selects the recorded machine, and the AvoidanceAction that its \
         rule names; `plimsoll check` shows details",
        paths.join(", ")
    )
}

fn events<R: BufRead>(replay: &Replay<R>) -> Vec<Event> {
    let transitions = replay.transitions().iter();
    let decision = transitions.map(|transition| NamedDecision {
        cause: None,
        transition: transition.clone(),
        metric: metric(replay.policy(), &transition.rule),
        pod_name: transition
            .change
            .pod()
            .and_then(|uid| Some(replay.pod(uid)?.full_name().to_string())),
    });
    decision.map(Event::Decision).collect()
}
