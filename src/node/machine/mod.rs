//! One machine managed by the engine: samples it, decides and acts.
//!
//! Shared by `plimsoll run` and the node agent; [`Backend`] is where they differ.

pub mod backend;
pub mod enforce;
mod engine_store;
pub mod ineffective;
mod previews;
mod problems;
mod restore;
pub mod saved_file;
pub mod state_dir;
pub mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use self::backend::Backend;
use self::enforce::{Actuators, Effect};
use self::engine_store::EngineStore;
use self::ineffective::attached_scheduler;
use self::previews::Previews;
use self::problems::{Faults, Probes};
use self::state_dir::{StateError, WriterProcess};
use self::workload::Workload;
use crate::clock::boot_time;
use crate::engine::load::NodeLoad;
use crate::engine::plan::{Plan, PlanChange, RuleState, Scheduling, Unknown};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{PolicySet, Rule, Strategy};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::weight_share::{CpuWeights, WeightShare};
use crate::engine::window::{CustomWindow, NodeWindows};
use crate::engine::{Demand, Engine, RuleReport};
use crate::messages::event::{Event, NamedDecision, NoticeKind, metric};
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::control_file::ControlFileKind;
use crate::node::cgroup::{Controller, Hierarchy};
use crate::node::collect::{SampledPod, Sampler};
use crate::node::journal::JournalRecord;

pub use self::restore::{Restored, restore, restore_expired};

/// Settings of a machine.
#[derive(Clone, Debug)]
pub struct MachineSettings {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// Where `/proc` is mounted.
    pub proc_root: PathBuf,
    /// Where `/sys` is mounted.
    pub sys_root: PathBuf,
    /// The host's `net/dev`, if `proc_root` is not the host's; absent: `1/net/dev` below `proc_root`.
    pub net_dev: Option<PathBuf>,
    /// The node's own address, used for probes without a host.
    pub node_address: IpAddr,
    /// Directory of the journal and other persistent files. Created if missing, but not its parents.
    pub state_dir: PathBuf,
    /// Maximum interval between samples of the node.
    pub sample_interval: Duration,
    /// Time between two evaluations of the rules, at least 100 ms.
    pub evaluation_period: Duration,
    /// Sample the pods and everything that any policy could use every time, for recordings.
    pub sample_everything: bool,
    /// The windows of the node's settings.
    pub windows: Arc<[CustomWindow]>,
}

/// Why a machine cannot be started. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The state directory cannot be used.
    #[error(
        "failed to use the state directory {}: {source}; {}, or name another with --state-dir",
        path.display(),
        if source.kind() == io::ErrorKind::NotFound { "create its parent directory" } else { "make it writable for this user" }
    )]
    StateDir {
        /// The directory.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// It is in use, or its journal is damaged.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// The engine, sampler and actuators of one machine.
#[derive(Debug)]
pub struct Machine<O> {
    engine: Engine,
    policy: Arc<PolicySet>,
    demand: Demand,
    /// `demand` plus what a report needs.
    report_demand: Demand,
    /// The next sample is also for a report.
    reports: bool,
    sampler: Sampler,
    prober: Probes,
    actuators: Actuators,
    backend: O,
    previews: Previews,
    pods: BTreeMap<PodUid, Workload>,
    /// The pods that have ended.
    finished: BTreeSet<PodUid>,
    /// Names of pods, including removed ones that later events may be about.
    names: BTreeMap<PodUid, Arc<str>>,
    sample: Sample,
    plan: Plan,
    events: Vec<Event>,
    effects: Vec<Effect>,
    settings: MachineSettings,
    store: EngineStore,
    faults: Faults,
    next_sample: BootTime,
    adopted: usize,
    weights: CpuWeights,
}

fn sampler(settings: &MachineSettings, hierarchy: Hierarchy) -> Sampler {
    let mut sampler = Sampler::new(&settings.proc_root, hierarchy);
    if let Some(net_dev) = &settings.net_dev {
        sampler.set_net_dev(net_dev);
    }
    sampler
}

impl<O: Backend> Machine<O> {
    /// Locks the state directory and continues from the state that an earlier process of this boot left in force.
    /// `backend` is called with the lock held, so the backend may use the directory.
    ///
    /// # Errors
    /// If another process has the state directory, or the directory or its files cannot be used.
    pub fn open(
        settings: MachineSettings,
        backend: impl FnOnce(&WriterProcess) -> O,
        policy: Arc<PolicySet>,
        workloads: Vec<Workload>,
        now: BootTime,
    ) -> Result<Self, MachineError> {
        let state_dir = |source| MachineError::StateDir {
            path: settings.state_dir.clone(),
            source,
        };
        state_dir::make(&settings.state_dir).map_err(state_dir)?;
        let writer = WriterProcess::this_process().map_err(state_dir)?;
        let hierarchy = settings.hierarchy.clone();
        let (actuators, recovered) = Actuators::open(&settings.state_dir, hierarchy.clone(), now)?;
        let mut machine = Self {
            engine: Engine::new().with_period(settings.evaluation_period),
            policy: Arc::default(),
            demand: Demand::default(),
            report_demand: Demand::default(),
            reports: false,
            sampler: sampler(&settings, hierarchy),
            prober: Probes::new(settings.node_address, Arc::clone(&settings.windows)),
            actuators,
            backend: backend(&writer),
            previews: Previews::default(),
            pods: BTreeMap::new(),
            finished: BTreeSet::new(),
            names: BTreeMap::new(),
            sample: Sample::default(),
            plan: Plan::default(),
            events: Vec::new(),
            effects: Vec::new(),
            store: EngineStore::new(&settings.state_dir, writer, now),
            weights: CpuWeights {
                v2: settings.hierarchy.is_v2(),
                idle: false,
            },
            settings,
            faults: Faults::default(),
            next_sample: now,
            adopted: recovered.throttles.len(),
        };
        machine
            .engine
            .set_windows(Arc::clone(&machine.settings.windows));
        machine.set_policy(policy);
        machine.set_pods(workloads);
        let saved = machine.store.load();
        machine.engine.adopt_windows(machine.store.load_windows());
        machine.engine.adopt_load(machine.store.load_load());
        machine
            .engine
            .adopt(now, &saved.state, &recovered.throttles);
        // Without an enforced rule, evictions of an earlier process are not continued.
        if machine.policy.rules.iter().any(is_enforced) {
            machine.backend.resume(saved.evictions);
        }
        let outcomes = recovered.outcomes.into_iter();
        machine.effects.extend(outcomes.map(Effect::from));
        machine.refresh();
        Ok(machine)
    }

    /// Replaces the policies. Actions of rules that stay remain in force.
    pub fn set_policy(&mut self, policy: Arc<PolicySet>) {
        self.engine.set_policy(Arc::clone(&policy));
        self.prober.set_policy(&policy);
        self.policy = policy;
        self.prune_previews();
        self.refresh();
    }

    /// Restores the actions of removed rules within `within`, if their own pace would take longer.
    pub fn release_within(&mut self, within: Duration) {
        self.engine.release_within(within);
    }

    /// Replaces the pods with the current ones.
    pub fn set_pods(&mut self, workloads: Vec<Workload>) {
        let (actuators, backend) = (&self.actuators, &self.backend);
        let evicted = |uid: &PodUid| backend.evicting().any(|evicted| evicted == uid);
        self.names
            .retain(|uid, _| actuators.is_throttled(uid) || evicted(uid));
        for workload in &workloads {
            let name = workload.pod.full_name().to_string();
            self.names.insert(workload.pod.uid.clone(), name.into());
        }
        let uid = |workload: Workload| (workload.pod.uid.clone(), workload);
        self.pods = workloads.into_iter().map(uid).collect::<BTreeMap<_, _>>();
        self.finished.retain(|uid| self.pods.contains_key(uid));
        self.weights.idle = self.weights.idle || self.has_idle_class();
        self.update_engine_pods();
        self.refresh();
    }

    /// Whether the kernel has the idle class: only cgroups of pods have the file, not the root.
    fn has_idle_class(&self) -> bool {
        let mut cgroups = self.pods.values().map(|known| &known.cgroup);
        let hierarchy = &self.settings.hierarchy;
        cgroups.any(|cgroup| {
            let dir = hierarchy.dir(Controller::Cpu, cgroup);
            dir.is_some_and(|dir| dir.join(ControlFileKind::CpuIdle.name()).exists())
        })
    }

    /// Replaces the pods that are bound to this node but have no cgroup yet.
    pub fn set_pending_pods(&mut self, pods: Vec<Arc<Pod>>) {
        self.engine.set_pending_pods(pods);
    }

    /// Passes the running pods to the engine: one that has ended may still have its cgroup.
    fn update_engine_pods(&mut self) {
        let running = self
            .pods
            .values()
            .filter(|known| !self.finished.contains(&known.pod.uid));
        self.engine
            .set_pods(running.map(|known| Arc::clone(&known.pod)).collect());
        self.prune_previews();
    }

    fn prune_previews(&mut self) {
        let (pods, finished) = (&self.pods, &self.finished);
        let running = |uid: &PodUid| {
            let known = pods.get(uid).filter(|_| !finished.contains(uid));
            known.map(|known| &*known.pod)
        };
        self.previews.retain(&self.policy, running);
    }

    /// Pods that had ended run again if their cgroup has processes again.
    fn detect_restarts(&mut self) {
        let before = self.finished.len();
        let (pods, actuators) = (&self.pods, &self.actuators);
        self.finished.retain(|uid| {
            pods.get(uid)
                .is_some_and(|known| !actuators.is_populated(&known.cgroup))
        });
        if self.finished.len() != before {
            self.update_engine_pods();
        }
    }

    /// Updates what the next samples must contain.
    fn refresh(&mut self) {
        let targets = self.pods.values().map(|known| SampledPod {
            uid: known.pod.uid.clone(),
            cgroup: known.cgroup.clone(),
            containers: known.containers,
        });
        self.sampler.set_pods(targets);
        self.actuators.pin_targets(&mut self.sampler);
        self.refresh_demand();
    }

    fn refresh_demand(&mut self) {
        self.demand = self.engine.demand();
        if self.settings.sample_everything {
            self.demand = Demand {
                load: true,
                pressure: [true; 3],
                disks: true,
                interfaces: true,
                pod_memory: true,
                pod_pressure: true,
                pod_io: true,
                tasks: true,
                pod_quota: true,
                throttled: true,
                ..std::mem::take(&mut self.demand)
            };
        }
        self.report_demand = Demand {
            pressure: [true; 3],
            pod_pressure: true,
            ..self.demand.clone()
        };
    }

    /// Makes the next tick sample what a node report needs: the pods, and all pressure.
    pub const fn sample_for_report(&mut self) {
        self.reports = true;
    }

    /// When [`Self::tick`] must be called next.
    pub fn next_tick(&self) -> BootTime {
        let due = self.engine.next_due();
        due.map_or(self.next_sample, |due| due.min(self.next_sample))
    }

    /// Samples, and when an evaluation is due decides and acts. Returns the events. Does not allocate when nothing
    /// happens.
    pub fn tick(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        let start = boot_time();
        let due = self.engine.next_due().is_some_and(|due| due <= now);
        // Before the sample, so that it shows the effect.
        self.actuators.check(now, &self.plan, &mut self.effects);
        self.backend.poll(now, &mut self.effects);
        self.process_effects(now);
        self.throttle_new_containers(now);
        if due && !self.finished.is_empty() {
            self.detect_restarts();
        }
        let reports = std::mem::take(&mut self.reports);
        let demand = if reports {
            &mut self.report_demand
        } else {
            &mut self.demand
        };
        let read = now + boot_time().since(start);
        self.sampler.sample_node(read, demand, &mut self.sample);
        let needs = self.engine.load_needs(read);
        if due || reports || needs.pods || self.settings.sample_everything {
            let for_rules = demand.pod_memory;
            demand.pod_memory |= needs.memory;
            self.sampler.sample_pods(read, demand, &mut self.sample);
            demand.pod_memory = for_rules;
        }
        if self.prober.poll_windows(now) {
            self.prober.report_changes(now, &mut self.events);
        }
        self.prober.fill(&mut self.sample);
        self.next_sample = now + self.settings.sample_interval;
        self.engine.step(now, &self.sample, &mut self.plan);
        if self.plan.evaluated {
            self.act(now);
        }
        if self.store.needs_retry(now) {
            self.save_state(now, true);
        }
        if self.store.are_windows_due(now) {
            // It says how long Preview rules have been counted.
            self.save_state(now, true);
            self.save_windows(now);
        }
        &self.events
    }

    /// Throttles restarted containers as before, without waiting for the next evaluation.
    fn throttle_new_containers(&mut self, now: BootTime) {
        for uid in self.actuators.take_changed() {
            let target_cgroups = self.sampler.targets(&uid);
            if let Some(throttle) = self.engine.sync_cgroups(&uid, &target_cgroups) {
                let (pods, effects) = (&self.pods, &mut self.effects);
                self.actuators.reapply(now, &throttle, pods, effects);
            }
        }
        self.process_effects(now);
    }

    fn act(&mut self, now: BootTime) {
        if !self.plan.evictions.is_empty() {
            // A SIGTERM cannot be undone: after a crash, the next process must know that this round has started.
            self.save_state(now, true);
        }
        self.actuators
            .apply(now, &self.plan, &self.pods, &mut self.effects);
        let (backend, effects) = (&mut self.backend, &mut self.effects);
        // Before evictions: a pod that is evicted must not come straight back.
        backend.set_scheduling(&self.plan.scheduling, now, effects);
        self.actuators
            .evict(now, &self.plan, &self.pods, backend, effects);
        self.record_transitions();
        self.process_effects(now);
        let changed = !self.plan.transitions.is_empty();
        if changed {
            self.actuators.pin_targets(&mut self.sampler);
            self.refresh_demand();
        }
        self.save_state(now, changed);
        self.prober.set_demand(&self.demand);
        self.prober.report_changes(now, &mut self.events);
        self.faults.log_new(self.sampler.faults());
    }

    fn record_transitions(&mut self) {
        for transition in &self.plan.transitions {
            let cause = match &transition.change {
                PlanChange::Ineffective { pod, observed } => {
                    let scheduler = attached_scheduler(&self.settings.sys_root);
                    Some(self.cause(pod, *observed, scheduler).message)
                }
                _ => None,
            };
            let decision = NamedDecision {
                cause,
                transition: transition.clone(),
                metric: metric(&self.policy, &transition.rule),
                pod_name: transition
                    .change
                    .pod()
                    .and_then(|uid| name(&self.names, uid)),
            };
            self.previews.record(&decision);
            self.events.push(Event::Decision(decision));
        }
    }

    fn process_effects(&mut self, now: BootTime) {
        let finished = self.finished.len();
        for effect in self.effects.drain(..) {
            if let Some(feedback) = &effect.feedback {
                self.engine.feedback(feedback);
            }
            if let (true, Some(uid)) = (effect.is_end(), &effect.pod) {
                self.finished.insert(uid.clone());
            }
            let name = effect.pod.as_ref().and_then(|uid| name(&self.names, uid));
            self.events
                .push(Event::notice(now, effect.into_notice(name)));
        }
        if self.finished.len() != finished {
            self.prune_previews();
        }
    }

    fn save_state(&mut self, now: BootTime, changed: bool) {
        let counts = |rule: RuleReport| rule.breaches + rule.quiet_evaluations > 0;
        let moving = self.engine.reports().any(counts) || self.is_acting();
        if changed || (moving && self.store.is_due(now)) {
            let saved = self
                .store
                .save(now, self.engine.state(), self.backend.pending());
            self.report_save(now, saved);
        }
    }

    fn save_windows(&mut self, now: BootTime) {
        let load = self.engine.load_state();
        let saved = self.store.save_windows(now, self.engine.windows(), &load);
        self.report_save(now, saved);
    }

    fn report_save(&mut self, now: BootTime, saved: Result<(), StateError>) {
        if let Err(error) = saved {
            let reason = error.to_string();
            let kind = NoticeKind::StateNotWritten { reason };
            self.events.push(Event::notice(now, kind));
        }
    }

    /// Restores everything and enables scheduling; returns the events. Started evictions go on.
    pub fn restore(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        self.actuators.restore_all(now, &mut self.effects);
        self.plan.scheduling = Scheduling::Enabled;
        self.backend
            .set_scheduling(&self.plan.scheduling, now, &mut self.effects);
        self.process_effects(now);
        // Nothing is in force any more, so the next process starts over.
        let removed = self.store.forget();
        self.report_save(now, removed);
        &self.events
    }

    /// Saves the state for the next process; everything stays in force.
    pub fn save_for_restart(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        self.save_state(now, true);
        self.save_windows(now);
        &self.events
    }

    /// Whether anything is in force, or a rule is not Normal.
    pub fn is_acting(&self) -> bool {
        let mut reports = self.engine.reports();
        self.actuators.throttled_pods().next().is_some()
            || self.backend.evicting().next().is_some()
            || reports.any(|rule| rule.state != RuleState::Normal)
    }

    /// The last sample. It has pods only if an evaluation was due, or a report or the load needed them.
    pub const fn sample(&self) -> &Sample {
        &self.sample
    }

    /// The node's usage over longer windows.
    pub const fn windows(&self) -> &NodeWindows {
        self.engine.windows()
    }

    /// The node's load at the last sample.
    ///
    /// # Errors
    /// Why it is unknown: see [`Engine::load`].
    pub fn load(&self) -> Result<NodeLoad, Unknown> {
        self.engine.load()
    }

    /// The plan in force.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The policies in force.
    pub fn policy(&self) -> &PolicySet {
        &self.policy
    }

    /// Whether pods get the lowest weight instead of the idle class, because the kubelet would reject new pods.
    pub fn is_idle_unsafe(&self) -> bool {
        self.engine.is_idle_unsafe()
    }

    /// The CPUs that batch pods use: see [`Engine::batch_cpus`].
    pub fn batch_cpus(&self) -> Option<f64> {
        self.engine.batch_cpus()
    }

    /// The batch weight share at the last sample of the pods: see [`Engine::batch_weight_share`].
    pub fn batch_weight_share(&self) -> Option<WeightShare<'_>> {
        self.engine.batch_weight_share(self.weights)
    }

    /// The managed pods, by UID.
    pub const fn pods(&self) -> &BTreeMap<PodUid, Workload> {
        &self.pods
    }

    /// The state of each rule, sorted by ID.
    pub fn reports(&self) -> impl Iterator<Item = RuleReport> {
        self.engine.reports()
    }

    /// The running pods that no rule's action may touch.
    pub fn protected_pods(&self) -> impl Iterator<Item = &PodUid> {
        self.engine.protected_pods()
    }

    /// Every changed cgroup file.
    pub fn records(&self) -> impl Iterator<Item = JournalRecord> + '_ {
        self.actuators.records()
    }

    /// The actions that Preview rules would have in force now.
    pub fn previews(&self) -> &[NamedDecision] {
        self.previews.current()
    }

    /// The events of the last call that returned events.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// The backend.
    pub const fn backend(&self) -> &O {
        &self.backend
    }

    /// The backend, mutable.
    pub const fn backend_mut(&mut self) -> &mut O {
        &mut self.backend
    }

    /// This process, as recorded in the files of the state directory.
    pub const fn writer(&self) -> &WriterProcess {
        self.store.writer()
    }

    /// `namespace/name` of a pod, including recently removed ones.
    pub fn name(&self, uid: &PodUid) -> Option<String> {
        name(&self.names, uid)
    }

    /// How many throttles of an earlier process were adopted at the start.
    pub const fn adopted(&self) -> usize {
        self.adopted
    }

    /// How many pods have changed cgroup files.
    pub fn changed_pods(&self) -> usize {
        self.actuators.throttled_pods().count()
    }

    /// How many pods are throttled.
    pub fn throttled_pods(&self) -> usize {
        self.actuators.count_lowered()
    }
}

/// Whether the rule is enforced, not only previewed.
fn is_enforced(rule: &Rule) -> bool {
    rule.strategy == Strategy::Enforce
}

fn name(names: &BTreeMap<PodUid, Arc<str>>, uid: &PodUid) -> Option<String> {
    names.get(uid).map(ToString::to_string)
}
