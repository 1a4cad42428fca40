//! `plimsoll run`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::{duration, logging};
use crate::node::cgroup::CgroupPath;
use crate::standalone::output::Format;
use crate::standalone::pods::Sources;
use crate::standalone::policies::Overrides;
use crate::standalone::setup::{self, Options};

/// The shortest period that `--period` takes.
const LEAST_PERIOD: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Examples:
  See what policies would do to the services of this machine, changing nothing:
    plimsoll run --policies policies/ --pods-under system.slice --preview
  Enforce them over the pods of a folder of manifests, until Ctrl-C puts everything back:
    plimsoll run --policies policies/ --pods pods/
  Ten minutes, as JSON, with a recording to replay other policies over later:
    plimsoll run --policies policies/ --pods pods/ --for 10m --output json --record day.trace
  Put back what a process that was killed left in force:
    plimsoll run --restore

Pods are `v1` Pod manifests whose annotation `plimsoll.dev/cgroup` names their cgroup below the cgroup root \
(such as `batch.slice/import.service`), or, with --pods-under, all children of a cgroup: these are BestEffort, \
in a namespace named as the parent, labelled `plimsoll.dev/unit: <folder>`, and a PodQOS has to name one of these \
two to select them. systemd, dbus, ssh, login and our own units are never acted on.

Signals: SIGINT (Ctrl-C) and SIGHUP put everything back and end; SIGTERM ends and leaves what is in force, for the \
next `plimsoll run` with the same --state-dir to take over. Policies and pods are read again when they change; a bad \
edit keeps the last good policies, also over a restart.

Exit status: 0 ended as asked, 1 something could not be put back, 2 could not start or go on.";

/// Arguments of `plimsoll run`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Policy manifests, or folders of them (*.yaml, *.yml, *.json, and those below)
    #[arg(long, value_name = "FILE|DIR", num_args = 1.., required_unless_present = "restore")]
    policies: Vec<PathBuf>,

    /// Pod manifests, or folders of them
    #[arg(long, value_name = "FILE|DIR", num_args = 1..)]
    pods: Vec<PathBuf>,

    /// Take every child of this cgroup as a pod, such as system.slice
    #[arg(long, value_name = "PARENT", value_parser = cgroup, num_args = 1..)]
    pods_under: Vec<CgroupPath>,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// Where proc is mounted
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc_root: PathBuf,

    #[command(flatten)]
    state_dir: StateDir,

    /// Labels that a `NodeQOS` may select this node by
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = label, value_delimiter = ',')]
    node_labels: Vec<(String, String)>,

    /// Read the node's files, and what is in force, at least this often
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "1s")]
    sample_interval: Duration,

    /// Evaluate every rule at this period instead of its own (at least 100ms)
    #[arg(long, value_name = "DURATION", value_parser = period)]
    period: Option<Duration>,

    /// End after this time and put everything back, as Ctrl-C does
    #[arg(long = "for", value_name = "DURATION", value_parser = duration::positive)]
    duration: Option<Duration>,

    /// Take every rule as `strategy: Preview`: tell what would be done, and change nothing
    #[arg(long)]
    preview: bool,

    /// Put back what the journal says is in force, tell each file, and leave
    #[arg(long, conflicts_with_all = ["policies", "pods", "pods_under", "preview", "duration", "record"])]
    restore: bool,

    /// How to write what happens to standard output
    #[arg(long, value_enum, default_value_t)]
    output: Format,

    /// Write a trace of all samples and transitions, for `plimsoll replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// Where the files live that outlive the process.
#[derive(Clone, Debug, clap::Args)]
pub struct StateDir {
    /// Where the journal and the state files are kept; whoever enforces makes it where it is missing, but not its parents
    #[arg(
        long,
        value_name = "DIR",
        env = "STATE_DIRECTORY",
        hide_env_values = true,
        default_value = "/var/lib/plimsoll"
    )]
    pub state_dir: PathBuf,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    logging::init();
    if args.pods.is_empty() && args.pods_under.is_empty() && !args.restore {
        tracing::warn!(
            "no pods are named by --pods or --pods-under: rules can do no more than keep new work away"
        );
    }
    let options = args.options();
    let whole = if args.restore {
        setup::restore(&options)?
    } else {
        setup::run(&options)?
    };
    Ok(ExitCode::from(u8::from(!whole)))
}

impl Args {
    fn options(&self) -> Options {
        Options {
            policies: self.policies.clone(),
            pods: Sources {
                manifests: self.pods.clone(),
                parents: self.pods_under.clone(),
            },
            cgroup_root: self.cgroup_root.clone(),
            proc_root: self.proc_root.clone(),
            state_dir: self.state_dir.state_dir.clone(),
            node_labels: self.node_labels.iter().cloned().collect::<BTreeMap<_, _>>(),
            sample_interval: self.sample_interval,
            overrides: Overrides {
                period: self.period,
                preview: self.preview,
            },
            duration: self.duration,
            format: self.output,
            record: self.record.clone(),
        }
    }
}

fn cgroup(text: &str) -> Result<CgroupPath, String> {
    CgroupPath::new(text).map_err(|error| error.to_string())
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE".to_owned()),
    }
}

pub(super) fn period(text: &str) -> Result<Duration, String> {
    let period = duration::positive(text)?;
    if period < LEAST_PERIOD {
        return Err("the shortest period is 100ms".to_owned());
    }
    Ok(period)
}
