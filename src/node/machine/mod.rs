//! One machine under the engine: what samples it, what decides, and what acts.
//!
//! `plimsoll run` and the agent of a node are both this, with [`Outside`] for what they do differently.

pub mod enforce;
pub mod event;
mod keep;
pub mod kept;
pub mod outside;
mod previews;
mod restore;
pub mod state_dir;
mod troubles;
pub mod wording;
pub mod workload;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use self::enforce::{Actuators, Effect};
use self::event::{Decision, Event, News};
use self::keep::Keeper;
use self::outside::Outside;
use self::previews::Previews;
use self::state_dir::{StateError, Writer};
use self::troubles::{Faults, Probes};
use self::workload::Workload;
use crate::engine::plan::{Plan, RuleState, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::policy::{PolicySet, Rule, RuleId, Strategy};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::window::NodeWindows;
use crate::engine::{Demand, Engine, RuleReport};
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::Hierarchy;
use crate::node::clock::boot_time;
use crate::node::collect::{Sampler, Target};
use crate::node::journal::Record;
use crate::ordered;

pub use self::restore::{Restored, restore, restore_expired};

/// How a machine is run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// Where `/proc` is mounted.
    pub proc_root: PathBuf,
    /// The host's `net/dev`, where `proc_root` is not the host's; absent: `1/net/dev` below it.
    pub net_dev: Option<PathBuf>,
    /// The node's own address, where probes that name no host are asked.
    pub node_address: IpAddr,
    /// The journal and the other files that outlive the process. Made where it is missing, but not its parents.
    pub state_dir: PathBuf,
    /// The node's files are read at least this often.
    pub sample_interval: Duration,
    /// Every sample holds the pods and all that any policy could ask for, as a recording needs it.
    pub sample_everything: bool,
}

/// Why a machine cannot be run. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// The state directory cannot be used.
    #[error(
        "failed to use the state directory {}: {source}; make {}, or name another with --state-dir",
        path.display(),
        if source.kind() == io::ErrorKind::NotFound { "the folder that it is to be in" } else { "it writable for this user" }
    )]
    StateDir {
        /// The directory.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is in use, or its journal cannot be trusted.
    #[error(transparent)]
    Open(#[from] OpenError),
}

/// The engine, the sampler and those who act, on one machine.
#[derive(Debug)]
pub struct Machine<O> {
    engine: Engine,
    policy: Arc<PolicySet>,
    demand: Demand,
    /// The same, and what a report needs besides.
    report_demand: Demand,
    /// The next sample is for a report, too.
    reports: bool,
    sampler: Sampler,
    prober: Probes,
    actuators: Actuators,
    outside: O,
    previews: Previews,
    pods: BTreeMap<PodUid, Workload>,
    /// Those of them that were seen to have ended.
    ended: BTreeSet<PodUid>,
    /// Names of pods, those that just went away too: what is told of them comes later.
    names: BTreeMap<PodUid, Arc<str>>,
    sample: Sample,
    plan: Plan,
    events: Vec<Event>,
    effects: Vec<Effect>,
    settings: Settings,
    keeper: Keeper,
    faults: Faults,
    next_sample: BootTime,
    adopted: usize,
}

fn sampler(settings: &Settings, hierarchy: Hierarchy) -> Sampler {
    let mut sampler = Sampler::new(&settings.proc_root, hierarchy);
    if let Some(net_dev) = &settings.net_dev {
        sampler.set_net_dev(net_dev);
    }
    sampler
}

impl<O: Outside> Machine<O> {
    /// Takes the state directory and goes on from what an earlier process of this boot left in force there. What
    /// `outside` makes may use the directory: it is this process's own by then.
    ///
    /// # Errors
    /// Where another process has the state directory, or it, or what it holds, cannot be used.
    pub fn open(
        settings: Settings,
        outside: impl FnOnce(&Writer) -> O,
        policy: Arc<PolicySet>,
        workloads: Vec<Workload>,
        now: BootTime,
    ) -> Result<Self, MachineError> {
        let state_dir = |source| MachineError::StateDir {
            path: settings.state_dir.clone(),
            source,
        };
        state_dir::make(&settings.state_dir).map_err(state_dir)?;
        let writer = Writer::this_process().map_err(state_dir)?;
        let hierarchy = settings.hierarchy.clone();
        let (actuators, recovered) = Actuators::open(&settings.state_dir, hierarchy.clone(), now)?;
        let mut machine = Self {
            engine: Engine::new(),
            policy: Arc::default(),
            demand: Demand::default(),
            report_demand: Demand::default(),
            reports: false,
            sampler: sampler(&settings, hierarchy),
            prober: Probes::new(settings.node_address),
            actuators,
            outside: outside(&writer),
            previews: Previews::default(),
            pods: BTreeMap::new(),
            ended: BTreeSet::new(),
            names: BTreeMap::new(),
            sample: Sample::default(),
            plan: Plan::default(),
            events: Vec::new(),
            effects: Vec::new(),
            keeper: Keeper::new(&settings.state_dir, writer, now),
            settings,
            faults: Faults::default(),
            next_sample: now,
            adopted: recovered.throttles.len(),
        };
        machine.set_policy(policy);
        machine.set_pods(workloads);
        let kept = machine.keeper.states();
        machine.engine.adopt_windows(machine.keeper.windows());
        machine.engine.adopt(&kept.state, &recovered.throttles);
        if machine.policy.rules.iter().any(is_enforced) {
            machine.outside.resume(kept.evictions);
        }
        let outcomes = recovered.outcomes.into_iter();
        machine.effects.extend(outcomes.map(Effect::from));
        machine.refresh();
        Ok(machine)
    }

    /// Takes over a set of policies. What is in force for rules that stay, stays.
    pub fn set_policy(&mut self, policy: Arc<PolicySet>) {
        self.engine.set_policy(Arc::clone(&policy));
        self.prober.set_policy(&policy);
        self.policy = policy;
        self.prune_previews();
        self.refresh();
    }

    /// Gives back what is in force for rules that are gone within `within`, where their actions would take longer.
    pub fn release_within(&mut self, within: Duration) {
        self.engine.release_within(within);
    }

    /// Takes over the pods of the machine as they are now.
    pub fn set_pods(&mut self, workloads: Vec<Workload>) {
        let (actuators, outside) = (&self.actuators, &self.outside);
        let evicted = |uid: &PodUid| outside.evicting().any(|evicted| evicted == uid);
        self.names
            .retain(|uid, _| actuators.is_holding(uid) || evicted(uid));
        for workload in &workloads {
            let name = workload.pod.full_name().to_string();
            self.names.insert(workload.pod.uid.clone(), name.into());
        }
        let uid = |workload: Workload| (workload.pod.uid.clone(), workload);
        self.pods = ordered::map(workloads.into_iter().map(uid));
        self.ended.retain(|uid| self.pods.contains_key(uid));
        self.give_pods();
        self.refresh();
    }

    /// The engine gets the pods that run: one that has ended may still have its cgroup.
    fn give_pods(&mut self) {
        let running = self
            .pods
            .values()
            .filter(|known| !self.ended.contains(&known.pod.uid));
        self.engine
            .set_pods(running.map(|known| Arc::clone(&known.pod)).collect());
        self.prune_previews();
    }

    fn prune_previews(&mut self) {
        let (pods, ended) = (&self.pods, &self.ended);
        let running = |uid: &PodUid| {
            let known = pods.get(uid).filter(|_| !ended.contains(uid));
            known.map(|known| &*known.pod)
        };
        self.previews.retain(&self.policy, running);
    }

    /// A pod that had ended runs again where its cgroup has processes again.
    fn look_for_restarts(&mut self) {
        let before = self.ended.len();
        let (pods, actuators) = (&self.pods, &self.actuators);
        self.ended.retain(|uid| {
            pods.get(uid)
                .is_some_and(|known| !actuators.is_populated(&known.cgroup))
        });
        if self.ended.len() != before {
            self.give_pods();
        }
    }

    /// What the next samples have to hold may have changed.
    fn refresh(&mut self) {
        let targets = self.pods.values().map(|known| Target {
            uid: known.pod.uid.clone(),
            cgroup: known.cgroup.clone(),
            containers: known.containers,
        });
        self.sampler.set_pods(targets);
        self.actuators.pin_levers(&mut self.sampler);
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
                unpinned: true,
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

    /// The sample of the next tick holds what a report of the node tells: its pods, and all pressure.
    pub const fn sample_for_report(&mut self) {
        self.reports = true;
    }

    /// When [`Self::tick`] has to be called next.
    pub fn next_tick(&self) -> BootTime {
        let due = self.engine.next_due();
        due.map_or(self.next_sample, |due| due.min(self.next_sample))
    }

    /// Samples, and where an evaluation is due decides and acts; returns what happened. While nothing happens it
    /// allocates nothing.
    pub fn tick(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        let entered = boot_time();
        let due = self.engine.next_due().is_some_and(|due| due <= now);
        // Before the sample, which then shows what came of it.
        self.actuators.check(now, &self.plan, &mut self.effects);
        self.outside.poll(now, &mut self.effects);
        self.tell_effects(now);
        self.follow_containers(now);
        if due && !self.ended.is_empty() {
            self.look_for_restarts();
        }
        let reports = std::mem::take(&mut self.reports);
        let demand = if reports {
            &self.report_demand
        } else {
            &self.demand
        };
        let read = now + boot_time().since(entered);
        self.sampler.sample_node(read, demand, &mut self.sample);
        if due || reports || self.settings.sample_everything {
            self.sampler.sample_pods(read, demand, &mut self.sample);
        }
        self.prober.fill(&mut self.sample);
        self.next_sample = now + self.settings.sample_interval;
        self.engine.step(now, &self.sample, &mut self.plan);
        if self.plan.evaluated {
            self.act(now);
        }
        if self.keeper.is_owing(now) {
            self.keep_state(now, true);
        }
        if self.keeper.are_windows_due(now) {
            self.keep_windows(now);
        }
        &self.events
    }

    /// A container that was started anew is throttled as it was, before the next evaluation.
    fn follow_containers(&mut self, now: BootTime) {
        for uid in self.actuators.take_changed() {
            let levers = self.sampler.levers(&uid);
            if let Some(throttle) = self.engine.follow(&uid, &levers) {
                let (pods, effects) = (&self.pods, &mut self.effects);
                self.actuators.follow(now, &throttle, pods, effects);
            }
        }
        self.tell_effects(now);
    }

    fn act(&mut self, now: BootTime) {
        if !self.plan.evictions.is_empty() {
            // Nobody takes a SIGTERM back: whoever comes after a crash has to know that this round has begun.
            self.keep_state(now, true);
        }
        // Before all else, which can wait for it.
        self.actuators
            .apply(now, &self.plan, &self.pods, &mut self.effects);
        let (outside, effects) = (&mut self.outside, &mut self.effects);
        // Before evictions: a pod that is evicted must not come straight back.
        outside.keep_scheduling(&self.plan.scheduling, now, effects);
        self.actuators
            .evict(now, &self.plan, &self.pods, outside, effects);
        self.tell_plan();
        self.tell_effects(now);
        let changed = !self.plan.transitions.is_empty();
        if changed {
            self.actuators.pin_levers(&mut self.sampler);
            self.refresh_demand();
        }
        self.keep_state(now, changed);
        self.prober.ask(&self.demand);
        self.prober.tell(now, &mut self.events);
        self.faults.tell(self.sampler.faults());
    }

    fn tell_plan(&mut self) {
        for transition in &self.plan.transitions {
            let decision = Decision {
                transition: transition.clone(),
                metric: metric(&self.policy, &transition.rule),
                pod_name: transition
                    .change
                    .pod()
                    .and_then(|uid| name(&self.names, uid)),
            };
            self.previews.hear(&decision);
            self.events.push(Event::Decision(decision));
        }
    }

    fn tell_effects(&mut self, now: BootTime) {
        let ended = self.ended.len();
        for effect in self.effects.drain(..) {
            if let Some(feedback) = &effect.feedback {
                self.engine.feedback(feedback);
            }
            if let (true, Some(uid)) = (effect.is_end(), &effect.pod) {
                self.ended.insert(uid.clone());
            }
            let name = effect.pod.as_ref().and_then(|uid| name(&self.names, uid));
            self.events.push(Event::notice(now, effect.news(name)));
        }
        if self.ended.len() != ended {
            self.prune_previews();
        }
    }

    fn keep_state(&mut self, now: BootTime, changed: bool) {
        let counts = |rule: RuleReport| rule.breaches + rule.quiets > 0;
        let moving = self.engine.reports().any(counts) || self.is_acting();
        if changed || (moving && self.keeper.is_due(now)) {
            let kept = self
                .keeper
                .keep(now, self.engine.state(), self.outside.pending());
            self.tell_unwritten(now, kept);
        }
    }

    fn keep_windows(&mut self, now: BootTime) {
        let kept = self.keeper.keep_windows(now, self.engine.windows());
        self.tell_unwritten(now, kept);
    }

    fn tell_unwritten(&mut self, now: BootTime, kept: Result<(), StateError>) {
        if let Err(error) = kept {
            let reason = error.to_string();
            let news = News::StateNotWritten { reason };
            self.events.push(Event::notice(now, news));
        }
    }

    /// Puts everything back as it was and welcomes new work; returns what was done. Evictions that have begun go on.
    pub fn restore(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        self.actuators.restore_all(now, &mut self.effects);
        self.plan.scheduling = Scheduling::Enabled;
        self.outside
            .keep_scheduling(&self.plan.scheduling, now, &mut self.effects);
        self.tell_effects(now);
        // What was in force for the rules is not any more: the next process begins anew.
        let forgotten = self.keeper.forget();
        self.tell_unwritten(now, forgotten);
        &self.events
    }

    /// Keeps what the next process goes on from; everything in force stays so.
    pub fn leave(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        self.keep_state(now, true);
        self.keep_windows(now);
        &self.events
    }

    /// Anything is in force, or a rule is not Normal.
    pub fn is_acting(&self) -> bool {
        let mut reports = self.engine.reports();
        self.actuators.held().next().is_some()
            || self.outside.evicting().next().is_some()
            || reports.any(|rule| rule.state != RuleState::Normal)
    }

    /// The last sample; it holds the pods only where an evaluation was due, or it was for a report.
    pub const fn sample(&self) -> &Sample {
        &self.sample
    }

    /// The use of the node over longer times.
    pub const fn windows(&self) -> &NodeWindows {
        self.engine.windows()
    }

    /// The plan in force.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The policies in force.
    pub fn policy(&self) -> &PolicySet {
        &self.policy
    }

    /// The pods that are looked after, by UID.
    pub const fn pods(&self) -> &BTreeMap<PodUid, Workload> {
        &self.pods
    }

    /// The rules as they stand, in order of id.
    pub fn reports(&self) -> impl Iterator<Item = RuleReport> {
        self.engine.reports()
    }

    /// The running pods that no rule's action may touch.
    pub fn protected_pods(&self) -> impl Iterator<Item = &PodUid> {
        self.engine.protected_pods()
    }

    /// Every cgroup file that is not as it was.
    pub fn records(&self) -> impl Iterator<Item = Record> + '_ {
        self.actuators.records()
    }

    /// What the Preview rules would have in force now.
    pub fn previews(&self) -> &[Decision] {
        self.previews.current()
    }

    /// What happened at the last call that returned events.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// What reaches beyond the cgroups.
    pub const fn outside(&self) -> &O {
        &self.outside
    }

    /// The same, to tell it what only the caller knows.
    pub const fn outside_mut(&mut self) -> &mut O {
        &mut self.outside
    }

    /// This process, as the files of the state directory name it.
    pub const fn writer(&self) -> &Writer {
        self.keeper.writer()
    }

    /// `namespace/name` of a pod, of one that just went away too.
    pub fn name(&self, uid: &PodUid) -> Option<String> {
        name(&self.names, uid)
    }

    /// How many throttles of an earlier process were taken over at the start.
    pub const fn adopted(&self) -> usize {
        self.adopted
    }

    /// How many pods have cgroup files that are not as they were.
    pub fn throttled_pods(&self) -> usize {
        self.actuators.held().count()
    }
}

/// Where no rule is, nobody is killed for what an earlier process began.
fn is_enforced(rule: &Rule) -> bool {
    rule.strategy == Strategy::Enforce
}

/// The name of a rule's metric.
pub fn metric(policy: &PolicySet, rule: &RuleId) -> Option<String> {
    let rule = policy.rules.iter().find(|known| known.id == *rule)?;
    Some(rule.metric.to_string())
}

fn name(names: &BTreeMap<PodUid, Arc<str>>, uid: &PodUid) -> Option<String> {
    names.get(uid).map(ToString::to_string)
}
