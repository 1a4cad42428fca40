//! Starts the main loop from the command line. Everything is checked before anything is changed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Stdout};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

use super::daemon::{Daemon, DaemonError, SIGNALS};
use super::discovery::{Discovery, Watched};
use super::host;
use super::inputs::Inputs;
use super::notify::Notifier;
use super::output::{EventFormat, EventOutput};
use super::pods::PodSources;
use super::pods::own::OwnCgroups;
use super::scheduling;
use super::status;
use super::wake::Wake;
use crate::clock;
use crate::engine::Demand;
use crate::engine::policy::NodeFacts;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::window::CustomWindow;
use crate::messages::count;
use crate::messages::event::{Event, NoticeKind};
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::layout::LayoutError;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::collect::Sampler;
use crate::node::journal::{Journal, StateLock};
use crate::node::machine::state_dir::{self, WriterProcess};
use crate::node::machine::workload::Workload;
use crate::node::machine::{self, MachineError, MachineSettings};
use crate::trace::TraceHeader;
use crate::trace::record::{RecordError, TraceRecorder};

/// Settings of the command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Policy files and directories.
    pub policies: Vec<PathBuf>,
    /// Sources of pods.
    pub pods: PodSources,
    /// Where the cgroup trees are mounted; detected if absent.
    pub cgroup_root: Option<PathBuf>,
    /// Where `/proc` is mounted.
    pub proc_root: PathBuf,
    /// Where `/sys` is mounted.
    pub sys_root: PathBuf,
    /// Directory of the files that survive a restart.
    pub state_dir: PathBuf,
    /// Labels that a `NodeQOS` selects this node by.
    pub node_labels: BTreeMap<String, String>,
    /// Longest interval between samples of the node.
    pub sample_interval: Duration,
    /// Time between two evaluations of the rules.
    pub evaluation_period: Duration,
    /// Every rule is a Preview.
    pub preview: bool,
    /// Stop after this time.
    pub duration: Option<Duration>,
    /// The format of events.
    pub format: EventFormat,
    /// The windows of the node's settings.
    pub windows: Arc<[CustomWindow]>,
    /// The path of the trace.
    pub record: Option<PathBuf>,
}

/// The start failed. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A policy path cannot be read.
    #[error(
        "failed to read the policies {}: {source}; name manifests, or directories of them, with -f",
        path.display()
    )]
    Policies {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// No cgroup trees.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No usable `/proc`.
    #[error(
        "failed to read CPU time or memory from {}: {reason}; name the directory that proc is mounted at with --proc-root, usually /proc",
        root.display()
    )]
    Proc {
        /// The directory.
        root: PathBuf,
        /// The first fault.
        reason: String,
    },
    /// No permission to write cgroups.
    #[error(
        "failed to get write access to {}: {source}; run as root, or delegate the cgroups to this user, or try the policies with --preview, which changes nothing",
        path.display()
    )]
    Permission {
        /// A cgroup file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The state directory or its journal cannot be used.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// A preview while something is in force.
    #[error(
        "failed to start a preview: {} by an earlier `plimsoll run`, and a preview changes nothing; restore with `plimsoll run --restore --state-dir {}` first, or name another --state-dir, which leaves them as they are",
        are_limited(*files), state_dir.display()
    )]
    InForce {
        /// The state directory.
        state_dir: PathBuf,
        /// Number of cgroup files that differ from their originals.
        files: usize,
    },
    /// The state directory to restore from does not exist.
    #[error(
        "failed to find the state directory {}: name the one that `plimsoll run` was started with, with --state-dir",
        .0.display()
    )]
    NoStateDir(PathBuf),
    /// The trace cannot be written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The kernel refused a descriptor or a thread.
    #[error("failed to start: {0}")]
    Start(#[from] io::Error),
    /// The main loop failed.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
}

fn are_limited(files: usize) -> String {
    let verb = if files == 1 { "is" } else { "are" };
    format!("{} {verb} limited", count(files, "cgroup file"))
}

/// Runs until a signal or the given time stops it; true if everything that had to be restored was.
///
/// # Errors
/// Where it cannot start (nothing was changed) or continue.
pub fn run(options: &Options) -> Result<bool, SetupError> {
    // Before any thread is started: a signal must not reach one that does not block it.
    let wake = Wake::new(&SIGNALS)?;
    let now = clock::boot_time();
    check_policies_exist(&options.policies)?;
    let hierarchy = Hierarchy::detect(&options.proc_root, options.cgroup_root.as_deref())?;
    let node = node_facts(options, &hierarchy, now)?;
    let watched = Watched {
        policies: options.policies.clone(),
        pods: options.pods.clone(),
        hierarchy: Arc::new(hierarchy.clone()),
        own: OwnCgroups::read(Path::new("/proc")),
        node: node.clone(),
        preview: options.preview,
    };
    let preview = options.preview;
    if preview {
        check_nothing_in_force(&options.state_dir, &hierarchy)?;
    }
    let mut inputs = Inputs::open(&options.state_dir, preview)?;
    let (snapshot, loaded, found) = watched.scan(&inputs);
    inputs.set_policies(loaded.sources);
    inputs.set_pods(found.declared());
    if !preview {
        check_access(&hierarchy, &found.workloads)?;
    }
    let settings = MachineSettings {
        hierarchy,
        proc_root: options.proc_root.clone(),
        sys_root: options.sys_root.clone(),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir: options.state_dir.clone(),
        sample_interval: options.sample_interval,
        evaluation_period: options.evaluation_period,
        sample_everything: options.record.is_some(),
        windows: Arc::clone(&options.windows),
    };
    let recorder = recorder(options, &node, now)?;
    let machine = host::open(settings, Arc::new(loaded.policy), found.workloads, now)?;
    let daemon = Daemon {
        machine,
        discovery: Discovery::start(watched, snapshot, wake.waker())?,
        wake,
        output: EventOutput::new(options.format, io::stdout()),
        recorder,
        notifier: Notifier::from_environment(now),
        end: options.duration.map(|duration| now + duration),
        status_file: options.state_dir.join(status::FILE),
        inputs,
        problems: loaded.problems,
        fallbacks: loaded.fallbacks,
        refused: found.refused,
        status_written: None,
    };
    Ok(daemon.run()?)
}

/// A preview changes nothing, so it could not restore what an earlier process left in force.
fn check_nothing_in_force(state_dir: &Path, hierarchy: &Hierarchy) -> Result<(), SetupError> {
    if !state_dir.is_dir() {
        return Ok(());
    }
    let machine = |error: OpenError| SetupError::Machine(error.into());
    let _lock = StateLock::acquire(state_dir).map_err(|error| machine(error.into()))?;
    let records = Journal::new(state_dir).and_then(|journal| journal.load());
    let records = records.map_err(|error| machine(error.into()))?;
    match records.iter().filter(|it| it.exists(hierarchy)).count() {
        0 => Ok(()),
        files => Err(SetupError::InForce {
            state_dir: state_dir.to_owned(),
            files,
        }),
    }
}

/// Missing policies (a typo, a disk that is not mounted yet) would restore everything that an earlier process left in
/// force. A broken manifest among others is only reported.
fn check_policies_exist(paths: &[PathBuf]) -> Result<(), SetupError> {
    paths.iter().try_for_each(|path| {
        File::open(path).map(drop).map_err(|source| {
            let path = path.clone();
            SetupError::Policies { path, source }
        })
    })
}

/// The facts that policies are compiled for; fails if `/proc` cannot be read.
fn node_facts(
    options: &Options,
    hierarchy: &Hierarchy,
    now: BootTime,
) -> Result<NodeFacts, SetupError> {
    let mut sampler = Sampler::new(&options.proc_root, hierarchy.clone());
    let mut sample = Sample::default();
    sampler.sample_node(now, &Demand::default(), &mut sample);
    let (Some(cpu), Some(memory)) = (sample.node.cpu, sample.node.memory) else {
        let fault = sampler.faults().first();
        return Err(SetupError::Proc {
            root: options.proc_root.clone(),
            reason: fault.map_or_else(
                || "there is no `stat` or no `meminfo` in it".to_owned(),
                ToString::to_string,
            ),
        });
    };
    Ok(NodeFacts {
        labels: options.node_labels.clone(),
        cpus: cpu.online,
        memory: memory.capacity(),
        windows: Some(Arc::clone(&options.windows)),
    })
}

/// Fails if no pod's quota can be written.
fn check_access(hierarchy: &Hierarchy, workloads: &[Workload]) -> Result<(), SetupError> {
    let file = if hierarchy.is_v2() {
        "cpu.max"
    } else {
        "cpu.cfs_quota_us"
    };
    let quota = |cgroup: &CgroupPath| Some(hierarchy.dir(Controller::Cpu, cgroup)?.join(file));
    let mut refused = None;
    for workload in workloads {
        let Some(path) = quota(&workload.cgroup) else {
            continue;
        };
        match access(&path, AccessFlags::W_OK) {
            Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EROFS)) => {
                refused.get_or_insert((path, errno));
            }
            _ => return Ok(()),
        }
    }
    match refused {
        None => Ok(()),
        Some((path, errno)) => Err(SetupError::Permission {
            path,
            source: errno.into(),
        }),
    }
}

fn recorder(
    options: &Options,
    node: &NodeFacts,
    now: BootTime,
) -> Result<Option<TraceRecorder>, SetupError> {
    let Some(path) = &options.record else {
        return Ok(None);
    };
    let boot_id = WriterProcess::this_process()?.boot_id;
    let period = options.evaluation_period;
    let header = TraceHeader::new(boot_id, now, clock::wall_time(), node, period);
    Ok(Some(TraceRecorder::create(path, header)?))
}

/// Restores from the journal what an earlier process left in force, and prints each file; true if nothing is left.
///
/// # Errors
/// Where a process still uses that state directory, or the journal is damaged. Nothing was changed then.
pub fn restore(options: &Options) -> Result<bool, SetupError> {
    let now = clock::boot_time();
    if !options.state_dir.is_dir() {
        return Err(SetupError::NoStateDir(options.state_dir.clone()));
    }
    let hierarchy = Hierarchy::detect(&options.proc_root, options.cgroup_root.as_deref())?;
    let other_files = [scheduling::FILE];
    let restored = machine::restore(&options.state_dir, hierarchy, &other_files, now)
        .map_err(SetupError::Machine)?;
    let mut events = restored.events;
    if restored.left == 0
        && let Err(error) = state_dir::remove(&options.state_dir.join(status::FILE))
    {
        let reason = error.to_string();
        events.push(Event::notice(now, NoticeKind::StateNotWritten { reason }));
    }
    let mut output: EventOutput<Stdout> = EventOutput::new(options.format, io::stdout());
    output.write(&events, now, clock::wall_time())?;
    Ok(restored.left == 0)
}
