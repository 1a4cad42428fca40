//! The demo: real cgroups and real load under the machine that `plimsoll run` runs.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::history::DemoHistory;
use super::leftovers::{DemoStateDir, PREFIX};
use super::phase::{Phase, PhaseSchedule, Timeline};
use super::pods::DemoPods;
use super::policy::{self, Adapted, PolicyError};
use super::renderer::Renderer;
use super::report::{DemoOutcome, DemoReport, PhaseFigures, PodFacts, ServiceFacts};
use super::usage::UsageTracker;
use super::view::{DemoView, PodView};
use crate::clock::{boot_id, boot_time, wall_time};
use crate::engine::Demand;
use crate::engine::plan::Transition;
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::MilliCpu;
use crate::engine::weight_share::shares;
use crate::messages::event::Event;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::collect::Sampler;
use crate::node::machine::workload::Workload;
use crate::node::machine::{MachineError, MachineSettings};
use crate::scene::cgroups::{CgroupError, FileChange, FileSnapshot, SceneCgroups};
use crate::scene::latency::{Latencies, TimeSpan};
use crate::scene::pod::ScenePod;
use crate::scene::process::{LoadError, LoadProcess, Worker};
use crate::standalone::host::{self, Machine};
use crate::standalone::wake::Wake;
use crate::trace::TraceHeader;
use crate::trace::record::{RecordError, TraceRecorder};

const FRAME_INTERVAL: Duration = Duration::from_millis(250);

/// Settings of a demo.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// The program that runs as worker and batch work: this one.
    pub program: PathBuf,
    /// About how long it runs.
    pub total: Duration,
    /// The CPUs that the demo may use, where not all that this process may.
    pub cpus: Option<Vec<u32>>,
    /// `cpu.shares` of the whole demo against the rest of the machine (on v2 the equivalent weight); `None`: 1024 a CPU,
    /// as Kubernetes gives all its pods together.
    pub shares: Option<u64>,
    /// Where to record the run.
    pub record: Option<PathBuf>,
}

/// Why a demo could not start or continue. Everything was restored.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// A cgroup cannot be created or configured.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// The load cannot be started.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The node's CPU time or memory cannot be read.
    #[error("failed to read CPU time and memory of this machine from /proc/stat and /proc/meminfo")]
    NoNodeMetrics,
    /// The important pod's process is gone.
    #[error("the important pod's process exited before the demo did: was it killed?")]
    WorkerExited,
    /// The demo cannot be confined to these CPUs.
    #[error("failed to run on the CPUs {cpus:?}: {source}; this process may use {may_use:?}")]
    Cpus {
        /// Those asked for.
        cpus: Vec<u32>,
        /// Those that there are.
        may_use: Vec<u32>,
        /// The cause.
        source: nix::Error,
    },
    /// The state directory or its journal cannot be used.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The policies cannot be applied.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The trace cannot be written.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The boot id cannot be read.
    #[error("failed to read the boot ID: {0}")]
    BootId(#[source] io::Error),
    /// The demo cannot be shown.
    #[error("failed to show the demo: {0}")]
    Render(#[source] io::Error),
    /// The wait for the next frame or a signal failed.
    #[error("failed to wait: {0}")]
    Wait(#[source] io::Error),
    /// The state directory cannot be created.
    #[error("failed to create a directory for the journal: {0}")]
    StateDir(#[source] io::Error),
}

/// Runs the demo and returns what it measured. Nothing of it is left when this returns, also on errors.
///
/// # Errors
/// Where it could not start or continue.
pub fn run(
    options: &Options,
    wake: &Wake,
    open_renderer: impl FnOnce() -> io::Result<Box<dyn Renderer>>,
) -> Result<DemoReport, LiveError> {
    let cpus = confine(options.cpus.as_deref())?;
    let node = node_facts(&options.hierarchy)?;
    let mut live = LiveDemo::start(options, &node, cpus)?;
    let mut renderer = open_renderer().map_err(LiveError::Render)?;
    let outcome = live.run(wake, renderer.as_mut());
    // Leaves the alternate screen: later messages have to be seen.
    drop(renderer);
    Ok(live.finish(outcome?))
}

/// Lets this process and those that it starts run on `cpus` alone, and returns how many CPUs they may use.
fn confine(cpus: Option<&[u32]>) -> Result<u32, LiveError> {
    let this_process = Pid::from_raw(0);
    let may_use = usable_cpus();
    let Some(cpus) = cpus else {
        return Ok(count(may_use.len()));
    };
    let mut set = CpuSet::new();
    let confined = cpus
        .iter()
        .try_for_each(|cpu| set.set(*cpu as usize))
        .and_then(|()| sched_setaffinity(this_process, &set));
    // The kernel ignores CPUs that do not exist, as long as one does.
    let all_usable = cpus.iter().all(|cpu| may_use.contains(cpu));
    let refused = confined
        .err()
        .or_else(|| (!all_usable).then_some(Errno::EINVAL));
    match refused {
        None => Ok(count(cpus.len())),
        Some(source) => Err(LiveError::Cpus {
            cpus: cpus.to_vec(),
            may_use,
            source,
        }),
    }
}

/// The CPUs that this process may use.
fn usable_cpus() -> Vec<u32> {
    let set = sched_getaffinity(Pid::from_raw(0)).unwrap_or_default();
    let numbers = 0..u32::try_from(CpuSet::count()).unwrap_or(0);
    numbers
        .filter(|cpu| set.is_set(*cpu as usize).unwrap_or(false))
        .collect()
}

fn count(cpus: usize) -> u32 {
    u32::try_from(cpus).unwrap_or(u32::MAX)
}

/// The facts that policies are compiled for.
fn node_facts(hierarchy: &Hierarchy) -> Result<NodeFacts, LiveError> {
    let mut sampler = Sampler::new(Path::new("/proc"), hierarchy.clone());
    let mut sample = Sample::default();
    sampler.sample_node(boot_time(), &Demand::default(), &mut sample);
    let (Some(cpu), Some(memory)) = (sample.node.cpu, sample.node.memory) else {
        return Err(LiveError::NoNodeMetrics);
    };
    Ok(NodeFacts {
        labels: BTreeMap::new(),
        cpus: cpu.online,
        memory: memory.capacity(),
        windows: None,
    })
}

/// Everything that has to be removed; dropped in this order.
struct Resources {
    batch: Vec<LoadProcess>,
    worker: Worker,
    machine: Machine,
    state_dir: DemoStateDir,
    cgroups: SceneCgroups,
}

/// A pod, and what samples do not have.
struct ShownPod {
    pod: Arc<Pod>,
    cgroup: CgroupPath,
    /// The content of its CPU weight file before the demo changed anything.
    weight: Option<String>,
}

/// A running demo.
struct LiveDemo {
    resources: Resources,
    program: PathBuf,
    demo_pods: DemoPods,
    top_shares: u64,
    machine_name: String,
    pods: Vec<ShownPod>,
    adapted: Adapted,
    originals: BTreeMap<PodUid, Vec<FileSnapshot>>,
    timeline: Timeline,
    usage: UsageTracker,
    latencies: Latencies,
    history: DemoHistory,
    recorder: Option<TraceRecorder>,
    /// The policies had not restored everything by the end.
    restored_by_demo: bool,
}

impl LiveDemo {
    fn start(options: &Options, node: &NodeFacts, cpus: u32) -> Result<Self, LiveError> {
        let demo_pods = DemoPods::for_cpus(cpus);
        let schedule = PhaseSchedule::lasting(options.total);
        let waits_measured = options.hierarchy.is_v2() && Path::new("/proc/pressure/cpu").exists();
        let adapted = policy::adapt(&demo_pods, &schedule, node, waits_measured)?;
        let state_dir = DemoStateDir::create(std::process::id()).map_err(LiveError::StateDir)?;
        let top_shares = options
            .shares
            .unwrap_or_else(|| shares(demo_pods.capacity()));
        let cgroups = SceneCgroups::create(
            options.hierarchy.clone(),
            &demo_pods.all().collect::<Vec<_>>(),
            &format!("{PREFIX}{}", std::process::id()),
            top_shares,
        )?;
        let workloads = workloads(&demo_pods, &cgroups);
        let now = boot_time();
        let machine = host::open(
            settings(options, &state_dir, schedule.period),
            Arc::new(PolicySet::default()),
            workloads.clone(),
            now,
        )?;
        let worker = Worker::start(
            &options.program,
            &demo_pods.important,
            demo_pods.service,
            &cgroups,
        )?;
        let snapshots = |workload: &Workload| {
            let files = cgroups.snapshots(&workload.cgroup);
            (workload.pod.uid.clone(), files)
        };
        let pods: Vec<Arc<Pod>> = workloads.iter().map(|w| Arc::clone(&w.pod)).collect();
        let recorder = options
            .record
            .as_ref()
            .map(|path| start_recording(path, node, schedule.period, &pods, now));
        Ok(Self {
            originals: workloads.iter().map(snapshots).collect::<BTreeMap<_, _>>(),
            pods: shown(workloads, &cgroups),
            machine_name: machine_name(node, cpus, &options.hierarchy),
            program: options.program.clone(),
            timeline: Timeline::start(schedule, now),
            usage: UsageTracker::new(MilliCpu(u64::from(node.cpus) * 1000), demo_pods.threshold()),
            latencies: Latencies::default(),
            history: DemoHistory::start(now),
            recorder: recorder.transpose()?,
            restored_by_demo: false,
            demo_pods,
            top_shares,
            adapted,
            resources: Resources {
                batch: Vec::new(),
                worker,
                machine,
                state_dir,
                cgroups,
            },
        })
    }

    /// Runs until the last phase is over or the user stops it.
    fn run(&mut self, wake: &Wake, renderer: &mut dyn Renderer) -> Result<DemoOutcome, LiveError> {
        let mut next_frame = boot_time();
        while self.timeline.phase() != Phase::Done {
            let next = next_frame.min(self.resources.machine.next_tick());
            if let Some(signal) = wake.wait_until(next).map_err(LiveError::Wait)? {
                return Ok(DemoOutcome::Stopped(name_of(signal)));
            }
            let now = boot_time();
            if now >= self.resources.machine.next_tick() {
                self.tick(now)?;
            }
            if now < next_frame {
                continue;
            }
            next_frame = now + FRAME_INTERVAL;
            self.latencies
                .extend(self.resources.worker.finished_requests());
            if !self.resources.worker.check_alive() {
                return Err(LiveError::WorkerExited);
            }
            self.advance(now)?;
            renderer
                .render(&self.view(now))
                .map_err(LiveError::Render)?;
            if renderer.stop_requested().map_err(LiveError::Render)? {
                return Ok(DemoOutcome::Stopped("a key".to_owned()));
            }
        }
        Ok(DemoOutcome::Completed)
    }

    fn tick(&mut self, now: BootTime) -> Result<(), LiveError> {
        let events = self.resources.machine.tick(now).to_vec();
        let sample = self.resources.machine.sample();
        self.usage.add_sample(sample);
        let important = &self.pods[0].pod.uid;
        self.history.add_sample(sample, important);
        if let Some(recorder) = &mut self.recorder {
            recorder.tick(now, sample, events.iter().filter_map(transition))?;
        }
        if self.timeline.phase() >= Phase::Enforced {
            let mut rules = self.resources.machine.reports();
            if rules.any(|rule| rule.breaches > 0) {
                self.history.add_breach(now);
            }
        }
        self.handle_events(&events);
        Ok(())
    }

    fn handle_events(&mut self, events: &[Event]) {
        // Read the clock again: a step counts once it is in the kernel's file.
        let done = boot_time();
        let changed = !self.changed_files().is_empty();
        self.history.add_events(done, events, changed);
        for view in self.pod_views() {
            if let (true, Some(quota)) = (view.has_lower_quota(), view.quota) {
                self.history.add_quota(&view.name, quota);
            }
            if view.idle {
                self.history.add_idle(&view.name);
            }
        }
    }

    fn advance(&mut self, now: BootTime) -> Result<(), LiveError> {
        let released = self.changed_files().is_empty();
        let Some(phase) = self.timeline.advance(now, released) else {
            return Ok(());
        };
        self.history.enter(phase, now);
        match phase {
            Phase::Overloaded => self.start_batch(now)?,
            Phase::Enforced => {
                let policy = Arc::new(self.adapted.policy.clone());
                self.resources.machine.set_policy(policy);
                let when = &self.adapted.when;
                self.history
                    .log(now, format!("policy applied: throttle batch pods {when}"));
            }
            Phase::Release => {
                self.resources.batch.clear();
                self.history.log(now, "batch pods stopped".to_owned());
            }
            Phase::Done => self.restore(now),
            Phase::Alone => {}
        }
        Ok(())
    }

    fn start_batch(&mut self, now: BootTime) -> Result<(), LiveError> {
        for demo_pod in &self.demo_pods.batch {
            let load = LoadProcess::batch(&self.program, demo_pod, &self.resources.cgroups)?;
            self.resources.batch.push(load);
            self.history.log(
                now,
                format!(
                    "{} started: {} busy threads",
                    demo_pod.name, demo_pod.threads
                ),
            );
        }
        Ok(())
    }

    fn changed_files(&self) -> Vec<FileChange> {
        let originals = self.originals.values().flatten();
        originals.filter_map(FileSnapshot::change).collect()
    }

    fn view(&self, now: BootTime) -> DemoView {
        let started = self.timeline.started();
        DemoView {
            machine: self.machine_name.clone(),
            phase: self.timeline.phase(),
            elapsed: now.since(started),
            left: self.timeline.left(now),
            node: self.usage.node(),
            pods: self.pod_views(),
            latency: self.history.seconds(&self.latencies, now),
            marks: self.history.marks(),
            events: self.history.entries().to_vec(),
        }
    }

    fn pod_views(&self) -> Vec<PodView> {
        let pods = self.pods.iter();
        pods.map(|shown| {
            let idle = self.resources.cgroups.is_idle(&shown.cgroup);
            self.usage.pod(&shown.pod, shown.weight.clone(), idle)
        })
        .collect()
    }

    /// Restores what the policies have not restored.
    fn restore(&mut self, now: BootTime) {
        if !self.changed_files().is_empty() {
            self.restored_by_demo = true;
            let events = self.resources.machine.restore(now).to_vec();
            self.history.add_events(now, &events, false);
        }
        if self.changed_files().is_empty() {
            self.usage.all_restored();
        }
    }

    /// Stops the load, restores what is still changed, compares, and removes everything.
    fn finish(mut self, outcome: DemoOutcome) -> DemoReport {
        let now = boot_time();
        self.history.finish(now);
        self.resources.batch.clear();
        self.restore(now);
        self.latencies
            .extend(self.resources.worker.finished_requests());
        let mut report = self.report(outcome);
        report.left_behind = self.resources.remove();
        report
    }

    fn report(&self, outcome: DemoOutcome) -> DemoReport {
        let weight_file = self.resources.cgroups.weight_file();
        let facts = |(demo_pod, shown): (&ScenePod, &ShownPod)| {
            let weight = shown.weight.as_deref().unwrap_or("?");
            let throttled = self.history.deepest_throttle(&demo_pod.name);
            PodFacts::new(demo_pod, format!("{weight_file} {weight}"), throttled)
        };
        let figures = |span: Option<TimeSpan>| {
            Some(PhaseFigures {
                latency: self.latencies.over(span?)?,
                mean_use: self.history.mean_use(span?),
            })
        };
        let [alone, unprotected, protected] = self.history.spans(&self.latencies).map(figures);
        let now = boot_time();
        DemoReport {
            machine: self.machine_name.clone(),
            outcome,
            shares: self.top_shares,
            pods: self.demo_pods.all().zip(&self.pods).map(facts).collect(),
            service: ServiceFacts::new(&self.demo_pods),
            policy: self.adapted.example.name,
            acts: self.adapted.when.clone(),
            policy_changes: self.adapted.changes.clone(),
            alone,
            unprotected,
            protected,
            steps_down: self.history.steps_down(),
            steps_up: self.history.steps_up(),
            breach_to_first_step_seconds: self.history.breach_to_first_step(),
            policy_to_first_step_seconds: self.history.policy_to_first_step(),
            first_step_to_recovery_seconds: self.history.first_step_to_recovery(&self.latencies),
            others_millicores: self.history.others_mean(),
            files_compared: self.originals.values().map(Vec::len).sum(),
            files_changed: self.changed_files(),
            released_by_policy: !self.restored_by_demo,
            left_behind: Vec::new(),
            seconds: self.history.seconds(&self.latencies, now),
            marks: self.history.marks(),
        }
    }
}

impl Resources {
    /// Kills the processes, and removes the cgroups and the state directory; returns what could not be removed.
    fn remove(self) -> Vec<String> {
        let Self {
            batch,
            worker,
            machine,
            mut state_dir,
            mut cgroups,
        } = self;
        drop(batch);
        drop(worker);
        drop(machine);
        let mut left: Vec<String> = cgroups.remove().iter().map(CgroupError::in_full).collect();
        if let Err(error) = state_dir.remove() {
            left.push(error.to_string());
        }
        left
    }
}

fn start_recording(
    path: &Path,
    node: &NodeFacts,
    period: Duration,
    pods: &[Arc<Pod>],
    now: BootTime,
) -> Result<TraceRecorder, LiveError> {
    let boot_id = boot_id().map_err(LiveError::BootId)?;
    let header = TraceHeader::new(boot_id, now, wall_time(), node, period);
    let mut recorder = TraceRecorder::create(path, header)?;
    recorder.pods(pods)?;
    Ok(recorder)
}

fn transition(event: &Event) -> Option<&Transition> {
    match event {
        Event::Decision(decision) => Some(&decision.transition),
        Event::Notice(_) => None,
    }
}

fn settings(
    options: &Options,
    state_dir: &DemoStateDir,
    evaluation_period: Duration,
) -> MachineSettings {
    MachineSettings {
        hierarchy: options.hierarchy.clone(),
        proc_root: PathBuf::from("/proc"),
        sys_root: PathBuf::from("/sys"),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir: state_dir.path().to_owned(),
        sample_interval: FRAME_INTERVAL,
        evaluation_period,
        sample_everything: true,
        windows: Arc::default(),
    }
}

fn workloads(demo_pods: &DemoPods, cgroups: &SceneCgroups) -> Vec<Workload> {
    let workload = |demo_pod: &ScenePod| Workload {
        pod: Arc::new(demo_pod.pod()),
        inode: cgroups.inode(&cgroups.cgroup(demo_pod)),
        cgroup: cgroups.cgroup(demo_pod),
        containers: None,
    };
    demo_pods.all().map(workload).collect()
}

fn shown(workloads: Vec<Workload>, cgroups: &SceneCgroups) -> Vec<ShownPod> {
    let shown = |workload: Workload| ShownPod {
        weight: cgroups.weight(&workload.cgroup),
        cgroup: workload.cgroup,
        pod: workload.pod,
    };
    workloads.into_iter().map(shown).collect()
}

fn machine_name(node: &NodeFacts, cpus: u32, hierarchy: &Hierarchy) -> String {
    let version = if hierarchy.is_v2() { "v2" } else { "v1" };
    let of = if cpus == node.cpus {
        String::new()
    } else {
        format!(" of {}", node.cpus)
    };
    format!("{}{of}, cgroup {version}", super::cpus(cpus))
}

fn name_of(signal: Signal) -> String {
    match signal {
        Signal::SIGINT => "Ctrl-C (SIGINT)".to_owned(),
        signal => signal.as_str().to_owned(),
    }
}
