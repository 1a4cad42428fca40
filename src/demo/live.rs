//! The demo on this machine: real cgroups, real load, the machine that `plimsoll run` runs.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::cast::{Cast, Role, shares};
use super::chronicle::Chronicle;
use super::latency::Latencies;
use super::leftovers::StateDir;
use super::policy::{self, Adapted, PolicyError};
use super::process::{Load, LoadError, Worker};
use super::recording::{Programme, Tape, TapeError};
use super::report::{Ended, FileChange, Report};
use super::scene::Scene;
use super::show::Show;
use super::stage::{KnobText, Stage, StageError};
use super::story::{Act, Schedule, Story};
use super::view::{PodView, Source, View};
use crate::engine::Demand;
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::node::cgroup::Hierarchy;
use crate::node::clock::boot_time;
use crate::node::collect::Sampler;
use crate::node::machine::event::Event;
use crate::node::machine::workload::Workload;
use crate::node::machine::{MachineError, Settings};
use crate::ordered;
use crate::standalone::host::{self, Machine};
use crate::standalone::wake::Wake;

/// The picture is drawn this often.
const FRAME: Duration = Duration::from_millis(250);

/// What a live demo needs.
#[derive(Clone, Debug)]
pub struct Options {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// The program that plays the worker and the batch work: this one.
    pub program: PathBuf,
    /// About how long.
    pub total: Duration,
    /// `cpu.shares` of the whole demo against the rest of the machine (on v2 the weight for it); `None`: 1024 a CPU, as
    /// Kubernetes gives all its pods together.
    pub shares: Option<u64>,
    /// Where to record the run.
    pub record: Option<PathBuf>,
}

/// Why a live demo could not begin or go on. Everything was put back.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// The cgroups cannot be made.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The load cannot be started.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// No figures of the node.
    #[error("failed to read CPU time and memory of this machine from /proc/stat and /proc/meminfo")]
    NoFigures,
    /// The important worker has ended.
    #[error("the important worker has ended before the demo did: was it killed?")]
    WorkerEnded,
    /// The machine cannot be run.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The policies cannot be applied.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The recording cannot be written.
    #[error(transparent)]
    Tape(#[from] TapeError),
    /// The demo cannot be shown.
    #[error("failed to show the demo: {0}")]
    Show(#[source] io::Error),
    /// The state directory cannot be made.
    #[error("failed to make a directory for the journal: {0}")]
    StateDir(#[source] io::Error),
}

/// Plays the demo on what `open_show` gives, and returns what was measured. Whatever happens, nothing of it is left when this returns.
///
/// # Errors
/// Where it could not begin or go on.
pub fn play(
    options: &Options,
    wake: &Wake,
    open_show: impl FnOnce() -> io::Result<Box<dyn Show>>,
) -> Result<Report, LiveError> {
    let node = node_facts(&options.hierarchy)?;
    let mut live = Live::begin(options, &node)?;
    let mut show = open_show().map_err(LiveError::Show)?;
    let ended = live.run(wake, show.as_mut());
    // The terminal first: whatever is told from here on has to be seen.
    drop(show);
    live.finish(ended?)
}

/// What policies are compiled for.
fn node_facts(hierarchy: &Hierarchy) -> Result<NodeFacts, LiveError> {
    let mut sampler = Sampler::new(Path::new("/proc"), hierarchy.clone());
    let mut sample = Sample::default();
    sampler.sample_node(boot_time(), &Demand::default(), &mut sample);
    let (Some(cpu), Some(memory)) = (sample.node.cpu, sample.node.memory) else {
        return Err(LiveError::NoFigures);
    };
    Ok(NodeFacts {
        labels: BTreeMap::new(),
        cpus: cpu.online,
        memory: memory.total,
    })
}

/// All that has to be taken away again; dropped in this order.
struct Set {
    batch: Vec<Load>,
    worker: Worker,
    machine: Machine,
    state_dir: StateDir,
    stage: Stage,
}

/// A demo under way.
struct Live {
    set: Set,
    program: PathBuf,
    cast: Cast,
    top_shares: u64,
    machine_name: String,
    pods: Vec<(Arc<Pod>, Option<String>)>,
    adapted: Adapted,
    originals: BTreeMap<PodUid, Vec<KnobText>>,
    story: Story,
    scene: Scene,
    latencies: Latencies,
    chronicle: Chronicle,
    tape: Option<Tape>,
    /// The policies had not let go by the end.
    put_back_by_demo: bool,
}

impl Live {
    fn begin(options: &Options, node: &NodeFacts) -> Result<Self, LiveError> {
        let cast = Cast::for_cpus(node.cpus.max(1));
        let schedule = Schedule::lasting(options.total);
        let adapted = policy::adapt(&cast, &schedule, node)?;
        let state_dir = StateDir::make(std::process::id()).map_err(LiveError::StateDir)?;
        let top_shares = options.shares.unwrap_or_else(|| shares(cast.capacity()));
        let stage = Stage::set_up(
            options.hierarchy.clone(),
            &cast,
            std::process::id(),
            top_shares,
        )?;
        let workloads = workloads(&cast, &stage);
        let now = boot_time();
        let machine = host::open(
            settings(options, &state_dir),
            Arc::new(PolicySet::default()),
            workloads.clone(),
            now,
        )?;
        let worker = Worker::start(&options.program, &cast.important, &stage)?;
        let knobs = |workload: &Workload| {
            let files = stage.knobs(&workload.cgroup);
            (workload.pod.uid.clone(), files)
        };
        let tape = options.record.as_ref().map(|path| {
            let pods: Vec<Arc<Pod>> = workloads.iter().map(|w| Arc::clone(&w.pod)).collect();
            Tape::create(path, node, schedule.period, &pods, now)
        });
        Ok(Self {
            originals: ordered::map(workloads.iter().map(knobs)),
            pods: workloads
                .iter()
                .map(|workload| (Arc::clone(&workload.pod), stage.weight(&workload.cgroup)))
                .collect(),
            machine_name: machine_name(node, &options.hierarchy),
            program: options.program.clone(),
            story: Story::begin(schedule, now),
            scene: Scene::new(cast.capacity(), cast.line()),
            latencies: Latencies::default(),
            chronicle: Chronicle::begin(now),
            tape: tape.transpose()?,
            put_back_by_demo: false,
            cast,
            top_shares,
            adapted,
            set: Set {
                batch: Vec::new(),
                worker,
                machine,
                state_dir,
                stage,
            },
        })
    }

    /// Until the story is over or somebody stops it.
    fn run(&mut self, wake: &Wake, show: &mut dyn Show) -> Result<Ended, LiveError> {
        let mut frame = boot_time();
        while self.story.act() != Act::Over {
            let next = frame.min(self.set.machine.next_tick());
            if let Some(signal) = wake.wait_until(next).map_err(LiveError::Show)? {
                return Ok(Ended::Stopped(name_of(signal)));
            }
            let now = boot_time();
            if now >= self.set.machine.next_tick() {
                self.tick(now)?;
            }
            if now < frame {
                continue;
            }
            frame = now + FRAME;
            self.latencies.extend(self.set.worker.ended());
            if !self.set.worker.is_alive() {
                return Err(LiveError::WorkerEnded);
            }
            self.advance(now)?;
            show.show(&self.view(now)).map_err(LiveError::Show)?;
            if show.is_stop_asked().map_err(LiveError::Show)? {
                return Ok(Ended::Stopped("a key".to_owned()));
            }
        }
        Ok(Ended::ByItself)
    }

    /// One step of the machine, and what is to be noted of it.
    fn tick(&mut self, now: BootTime) -> Result<(), LiveError> {
        let events = self.set.machine.tick(now).to_vec();
        let sample = self.set.machine.sample();
        self.scene.see(sample);
        self.chronicle.see(sample);
        if let Some(tape) = &mut self.tape {
            tape.tick(now, sample, &events)?;
        }
        if self.story.act() >= Act::Enforced {
            let mut rules = self.set.machine.reports();
            let over = rules.any(|rule| rule.breaches > 0);
            let mut rules = self.set.machine.reports();
            let quiet = rules.any(|rule| rule.quiets > 0);
            self.chronicle.judge(now, over, quiet);
        }
        self.hear(&events);
        Ok(())
    }

    fn hear(&mut self, events: &[Event]) {
        // The clock again: a step counts as taken when it is in the kernel's file.
        let done = boot_time();
        let changed = self.files_that_differ() > 0;
        self.chronicle.hear(done, events, changed);
        for (pod, _) in &self.pods {
            let view = self.scene.pod(pod, None);
            if let (true, Some(quota)) = (view.is_throttled(), view.quota) {
                self.chronicle.note_quota(&pod.name, quota);
            }
        }
    }

    fn advance(&mut self, now: BootTime) -> Result<(), LiveError> {
        let released = self.files_that_differ() == 0;
        let Some(act) = self.story.advance(now, released) else {
            return Ok(());
        };
        self.chronicle.enter(act, now);
        match act {
            Act::Overloaded => self.start_batch(now)?,
            Act::Enforced => {
                let policy = Arc::new(self.adapted.policy.clone());
                self.set.machine.set_policy(policy);
                let line = self.cast.line();
                self.chronicle.tell(
                    now,
                    format!("policy applied: above {line}, throttle batch pods"),
                );
            }
            Act::Release => {
                self.set.batch.clear();
                self.chronicle.tell(now, "batch work stopped".to_owned());
            }
            Act::Over => self.put_back(now),
            Act::Alone => {}
        }
        Ok(())
    }

    fn start_batch(&mut self, now: BootTime) -> Result<(), LiveError> {
        for role in &self.cast.batch {
            let load = Load::batch(&self.program, role, &self.set.stage)?;
            self.set.batch.push(load);
            self.chronicle.tell(
                now,
                format!(
                    "{} started: {} threads that never rest",
                    role.name, role.threads
                ),
            );
        }
        Ok(())
    }

    fn files_that_differ(&self) -> usize {
        self.changed_files().len()
    }

    fn changed_files(&self) -> Vec<FileChange> {
        let originals = self.originals.values().flatten();
        originals.filter_map(KnobText::change).collect()
    }

    fn view(&self, now: BootTime) -> View {
        let begun = self.story.begun();
        View {
            source: Source::Live {
                machine: self.machine_name.clone(),
            },
            act: self.story.act(),
            elapsed: now.since(begun),
            left: self.story.left(now),
            node: self.scene.node(),
            pods: self.pod_views(),
            latency: self.chronicle.seconds(&self.latencies, now),
            events: self.chronicle.happenings().to_vec(),
        }
    }

    fn pod_views(&self) -> Vec<PodView> {
        let pods = self.pods.iter();
        pods.map(|(pod, weight)| self.scene.pod(pod, weight.clone()))
            .collect()
    }

    /// Puts back what the policies have not.
    fn put_back(&mut self, now: BootTime) {
        if self.files_that_differ() > 0 {
            self.put_back_by_demo = true;
            let events = self.set.machine.restore(now).to_vec();
            self.chronicle.hear(now, &events, false);
        }
        if self.files_that_differ() == 0 {
            self.scene.all_restored();
        }
    }

    /// Stops the load, puts back what is still changed, compares, takes everything away, and tells.
    fn finish(mut self, ended: Ended) -> Result<Report, LiveError> {
        let now = boot_time();
        self.chronicle.end(now);
        self.set.batch.clear();
        self.put_back(now);
        self.latencies.extend(self.set.worker.ended());
        if let Some(tape) = self.tape.take() {
            tape.finish(&self.programme(now))?;
        }
        let mut report = self.report(ended);
        report.left_behind = self.set.take_away();
        Ok(report)
    }

    fn programme(&self, now: BootTime) -> Programme {
        let weights = self.pods.iter().filter_map(|(pod, weight)| {
            let weight = weight.clone()?;
            Some((pod.name.clone(), weight))
        });
        Programme::of(
            self.machine_name.clone(),
            self.story.schedule().total(),
            weights.collect(),
            &self.chronicle,
            &self.latencies,
            now,
        )
    }

    fn report(&self, ended: Ended) -> Report {
        let facts = |role: &Role| {
            let file = self.set.stage.weight_file();
            let mut pods = self.pods.iter();
            let weight = pods.find_map(|(pod, weight)| {
                (pod.name == role.name)
                    .then_some(weight.as_deref())
                    .flatten()
            });
            role.facts(
                format!("{file} {}", weight.unwrap_or("?")),
                self.chronicle.lowest_quota(&role.name),
            )
        };
        let important = self.set.stage.cgroup(&self.cast.important);
        let spans = self.chronicle.spans();
        let [before, overloaded, throttled] =
            spans.map(|span| span.and_then(|span| self.latencies.over(span)));
        Report {
            machine: self.machine_name.clone(),
            ended,
            shares: self.top_shares,
            line_millicores: self.cast.line().0,
            pods: self.cast.roles().map(facts).collect(),
            policy_changes: self.adapted.changes.clone(),
            before,
            overloaded,
            throttled,
            steps_down: self.chronicle.steps_down(),
            steps_up: self.chronicle.steps_up(),
            breach_to_first_step_seconds: self.chronicle.breach_to_first_step(),
            policy_to_first_step_seconds: self.chronicle.policy_to_first_step(),
            node_millicores: spans.map(|span| span.and_then(|span| self.chronicle.node_mean(span))),
            others_millicores: self.chronicle.others_mean(),
            own_limit_periods: self.set.stage.throttled_periods(&important),
            files_compared: self.originals.values().map(Vec::len).sum(),
            files_changed: self.changed_files(),
            released_by_policy: !self.put_back_by_demo,
            left_behind: Vec::new(),
        }
    }
}

impl Set {
    /// Ends the processes, and removes the cgroups and the state directory; returns what is left.
    fn take_away(self) -> Vec<String> {
        let Self {
            batch,
            worker,
            machine,
            mut state_dir,
            mut stage,
        } = self;
        drop(batch);
        drop(worker);
        drop(machine);
        let mut left: Vec<String> = stage.tear_down().iter().map(StageError::in_full).collect();
        if let Err(error) = state_dir.remove() {
            left.push(error.to_string());
        }
        left
    }
}

fn settings(options: &Options, state_dir: &StateDir) -> Settings {
    Settings {
        hierarchy: options.hierarchy.clone(),
        proc_root: PathBuf::from("/proc"),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir: state_dir.path().to_owned(),
        sample_interval: FRAME,
        sample_everything: true,
    }
}

fn workloads(cast: &Cast, stage: &Stage) -> Vec<Workload> {
    let workload = |role: &Role| Workload {
        pod: Arc::new(role.pod()),
        inode: stage.inode(&stage.cgroup(role)),
        cgroup: stage.cgroup(role),
        containers: None,
    };
    cast.roles().map(workload).collect()
}

fn machine_name(node: &NodeFacts, hierarchy: &Hierarchy) -> String {
    let version = if hierarchy.is_v2() { "v2" } else { "v1" };
    format!("{}, cgroup {version}", super::cpus(node.cpus))
}

fn name_of(signal: Signal) -> String {
    match signal {
        Signal::SIGINT => "Ctrl-C (SIGINT)".to_owned(),
        signal => signal.as_str().to_owned(),
    }
}
