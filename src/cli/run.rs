//! `plimsoll run`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::check::label;
use super::duration;
use super::logging::{self, LogFormat};
use super::period;
use super::windows::WindowsFile;
use crate::node::cgroup::CgroupPath;
use crate::standalone::output::EventFormat;
use crate::standalone::pods::PodSources;
use crate::standalone::setup::{self, Options};

const EXAMPLES: &str = "\
Examples:
  See what policies would do to the services of this machine:
    plimsoll run -f policies/ --pods-under system.slice --preview
  Enforce policies on the pods in a directory, until Ctrl-C:
    plimsoll run -f policies/ --pods pods/
  Run for ten minutes, and record a trace for `plimsoll replay`:
    plimsoll run -f policies/ --pods pods/ --for 10m --record day.trace
  Restore what a killed process left in force:
    plimsoll run --restore

Pods are `v1` Pod manifests whose annotation `plimsoll.dev/cgroup` names their cgroup below the cgroup root \
(such as `batch.slice/import.service`). With --pods-under, each child of a cgroup is a BestEffort pod in a namespace named \
after the parent, with the label `plimsoll.dev/unit: <directory>`; a PodQOS must name that namespace or that label to \
select it. systemd, dbus, ssh, login and plimsoll's own units are never throttled or evicted.

Signals: SIGINT (Ctrl-C) and SIGHUP restore everything and exit. SIGTERM exits and leaves limits in force, for the \
next `plimsoll run` with the same --state-dir to take over. Policies and pods are read again when they change; after an \
invalid edit the last valid policies stay in use, even after a restart.

Exit status: 0 stopped as requested, 1 something could not be restored, 2 could not start or continue.";

/// Arguments of `plimsoll run`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Policy manifests, or directories of them (*.yaml, *.yml and *.json, recursively)
    #[arg(
        short = 'f',
        long = "filename",
        alias = "policies",
        value_name = "FILE|DIR",
        num_args = 1..,
        required_unless_present = "restore"
    )]
    policies: Vec<PathBuf>,

    /// Pod manifests, or directories of them
    #[arg(long, value_name = "FILE|DIR", num_args = 1..)]
    pods: Vec<PathBuf>,

    /// Treat every child of this cgroup as a pod, for example system.slice
    #[arg(long, value_name = "PARENT", value_parser = cgroup, num_args = 1..)]
    pods_under: Vec<CgroupPath>,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// Where proc is mounted
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc_root: PathBuf,

    /// Where sys is mounted, to see whether a `sched_ext` scheduler is attached
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    sys_root: PathBuf,

    #[command(flatten)]
    state_dir: StateDirArgs,

    /// Labels of this node, for the selectors of a `NodeQOS`
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = label, value_delimiter = ',')]
    node_labels: Vec<(String, String)>,

    #[command(flatten)]
    windows: WindowsFile,

    /// Read the node's metrics, and the limits in force, at least this often
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "1s")]
    sample_interval: Duration,

    /// Time between two evaluations of the rules, at least 100ms
    #[arg(long, value_name = "DURATION", value_parser = period::parse, default_value = "10s")]
    period: Duration,

    /// Stop after this time and restore everything, as Ctrl-C does
    #[arg(long = "for", value_name = "DURATION", value_parser = duration::positive)]
    duration: Option<Duration>,

    /// Treat every rule as `strategy: Preview`: report what would be done, and change nothing
    #[arg(long)]
    preview: bool,

    /// Restore everything that the journal lists, list each file, and exit
    #[arg(long, conflicts_with_all = ["policies", "pods", "pods_under", "preview", "duration", "record"])]
    restore: bool,

    /// Format of events on standard output
    #[arg(long, value_enum, default_value_t)]
    output: EventFormat,

    /// Write a trace of all samples and transitions, for `plimsoll replay`
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
}

/// The directory of files that outlive the process.
#[derive(Clone, Debug, clap::Args)]
pub struct StateDirArgs {
    /// Directory of the journal and state files; created if missing, but its parents are not
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
    logging::init(LogFormat::Text);
    if args.pods.is_empty() && args.pods_under.is_empty() && !args.restore {
        tracing::warn!("no --pods or --pods-under given: rules can only keep new work away");
    }
    let options = args.options()?;
    let restored = if args.restore {
        setup::restore(&options)?
    } else {
        setup::run(&options)?
    };
    Ok(ExitCode::from(u8::from(!restored)))
}

impl Args {
    fn options(&self) -> anyhow::Result<Options> {
        Ok(Options {
            policies: self.policies.clone(),
            pods: PodSources {
                manifests: self.pods.clone(),
                parents: self.pods_under.clone(),
            },
            cgroup_root: self.cgroup_root.clone(),
            proc_root: self.proc_root.clone(),
            sys_root: self.sys_root.clone(),
            state_dir: self.state_dir.state_dir.clone(),
            node_labels: self.node_labels.iter().cloned().collect::<BTreeMap<_, _>>(),
            sample_interval: self.sample_interval,
            evaluation_period: self.period,
            preview: self.preview,
            duration: self.duration,
            format: self.output,
            windows: self.windows.read()?,
            record: self.record.clone(),
        })
    }
}

fn cgroup(text: &str) -> Result<CgroupPath, String> {
    CgroupPath::new(text).map_err(|error| error.to_string())
}
