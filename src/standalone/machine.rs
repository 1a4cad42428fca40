//! One machine under the engine: what samples it, what decides, and what acts.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::enforce::{Actuators, Effect};
use super::event::{Decision, Event, News};
use super::pods::Workload;
use super::previews::Previews;
use super::scheduling::SchedulingFile;
use super::state_dir::{self, Writer};
use super::status::{self, RuleStatus, Status, ThrottledFile};
use super::troubles::{Faults, Probes};
use crate::engine::plan::{Plan, RuleState, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::policy::{PolicySet, Rule, RuleId, Strategy};
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::{Demand, Engine, EngineState, RuleReport};
use crate::node::actuate::evict::PendingEviction;
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::Hierarchy;
use crate::node::clock;
use crate::node::collect::Sampler;
use crate::node::journal::Record;

/// Rule states and counters, in the state directory.
pub(super) const ENGINE_FILE: &str = "engine.json";
/// While nothing changes but counters, they are kept this often.
const KEEP_INTERVAL: Duration = Duration::from_secs(5);

/// How a machine is run.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// Where `/proc` is mounted.
    pub proc_root: PathBuf,
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
        "failed to use the state directory {}: {source}; make it writable for this user, or name another with --state-dir",
        path.display()
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
pub struct Machine {
    engine: Engine,
    policy: Arc<PolicySet>,
    demand: Demand,
    sampler: Sampler,
    prober: Probes,
    actuators: Actuators,
    scheduling: SchedulingFile,
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
    writer: Writer,
    faults: Faults,
    next_sample: BootTime,
    kept: BootTime,
    adopted: usize,
}

impl Machine {
    /// Takes the state directory and goes on from what an earlier process of this boot left in force there.
    ///
    /// # Errors
    /// Where another process has the state directory, or it, or what it holds, cannot be used.
    pub fn open(
        settings: Settings,
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
            sampler: Sampler::new(&settings.proc_root, hierarchy),
            prober: Probes::default(),
            actuators,
            scheduling: SchedulingFile::open(&settings.state_dir, &writer),
            previews: Previews::default(),
            pods: BTreeMap::new(),
            ended: BTreeSet::new(),
            names: BTreeMap::new(),
            sample: Sample::default(),
            plan: Plan::default(),
            events: Vec::new(),
            effects: Vec::new(),
            settings,
            writer,
            faults: Faults::default(),
            next_sample: now,
            kept: now,
            adopted: recovered.throttles.len(),
        };
        machine.set_policy(policy);
        machine.set_pods(workloads);
        let kept = machine.kept_state();
        machine.engine.adopt(&kept.state, &recovered.throttles);
        if machine.policy.rules.iter().any(is_enforced) {
            machine.actuators.resume(kept.evictions);
        }
        let outcomes = recovered.outcomes.into_iter();
        machine.effects.extend(outcomes.map(Effect::from));
        machine.refresh();
        Ok(machine)
    }

    /// Takes over a set of policies. What is in force for rules that stay, stays.
    pub fn set_policy(&mut self, policy: Arc<PolicySet>) {
        self.engine.set_policy(Arc::clone(&policy));
        self.previews.retain(|rule| has_rule(&policy, rule));
        self.prober.set_policy(&policy);
        self.policy = policy;
        self.refresh();
    }

    /// Takes over the pods of the machine as they are now.
    pub fn set_pods(&mut self, workloads: Vec<Workload>) {
        let actuators = &self.actuators;
        self.names.retain(|uid, _| actuators.is_busy_with(uid));
        for workload in &workloads {
            let name = workload.pod.full_name().to_string();
            self.names.insert(workload.pod.uid.clone(), name.into());
        }
        let uid = |workload: Workload| (workload.pod.uid.clone(), workload);
        self.pods = workloads.into_iter().map(uid).collect();
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
        let pods = self.pods.values();
        let cgroups = pods.map(|known| (known.pod.uid.clone(), known.cgroup.clone()));
        self.sampler.set_pods(cgroups);
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
                pod_quota: true,
                throttled: true,
                ..std::mem::take(&mut self.demand)
            };
        }
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
        let due = self.engine.next_due().is_some_and(|due| due <= now);
        self.sampler
            .sample_node(now, &self.demand, &mut self.sample);
        if due || self.settings.sample_everything {
            self.sampler
                .sample_pods(now, &self.demand, &mut self.sample);
        }
        self.prober.fill(&mut self.sample);
        self.next_sample = now + self.settings.sample_interval;
        self.actuators.check(now, &mut self.effects);
        self.tell_effects(now);
        if due && !self.ended.is_empty() {
            self.look_for_restarts();
        }
        self.engine.step(now, &self.sample, &mut self.plan);
        if self.plan.evaluated {
            self.act(now);
        }
        &self.events
    }

    fn act(&mut self, now: BootTime) {
        if !self.plan.evictions.is_empty() {
            // Nobody takes a SIGTERM back: whoever comes after a crash has to know that this round has begun.
            self.keep_state(now, true);
        }
        // Before all else, which can wait for it.
        self.actuators
            .apply(now, &self.plan, &self.pods, &mut self.effects);
        self.tell_plan();
        self.tell_effects(now);
        self.keep_scheduling(now);
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
    }

    fn keep_scheduling(&mut self, now: BootTime) {
        if let Err(error) = self
            .scheduling
            .keep(&self.plan.scheduling, clock::wall_time())
        {
            self.tell_unwritten(now, error.to_string());
        }
    }

    fn keep_state(&mut self, now: BootTime, changed: bool) {
        let counting = self
            .engine
            .reports()
            .any(|rule| rule.breaches + rule.quiets > 0);
        let stale = now.since(self.kept) >= KEEP_INTERVAL && (counting || self.is_acting());
        if !changed && !stale {
            return;
        }
        self.kept = now;
        let kept = Kept {
            boot_id: self.writer.boot_id.clone(),
            state: self.engine.state(),
            evictions: self.actuators.evicting().cloned().collect(),
        };
        let path = self.settings.state_dir.join(ENGINE_FILE);
        if let Err(error) = state_dir::replace(&path, &kept) {
            self.tell_unwritten(now, error.to_string());
        }
    }

    fn kept_state(&self) -> Kept {
        let path = self.settings.state_dir.join(ENGINE_FILE);
        let kept = state_dir::read::<Kept>(&path);
        if let Err(error) = &kept
            && error.kind() != io::ErrorKind::NotFound
        {
            let path = path.display();
            tracing::warn!(%path, %error, "failed to read the rule states: every rule begins anew, from the journal alone");
        }
        // Where nothing was kept, or in another boot, the journal alone says what is in force.
        kept.ok()
            .filter(|kept| kept.boot_id == self.writer.boot_id)
            .unwrap_or_default()
    }

    fn tell_unwritten(&mut self, now: BootTime, reason: String) {
        let news = News::StateNotWritten { reason };
        self.events.push(Event::notice(now, news));
    }

    /// Puts everything back as it was and opens the machine to new work; returns what was done.
    pub fn restore(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        self.actuators.restore_all(now, &mut self.effects);
        self.tell_effects(now);
        self.plan.scheduling = Scheduling::Enabled;
        self.keep_scheduling(now);
        // What was in force for the rules is not any more: the next process begins anew.
        let path = self.settings.state_dir.join(ENGINE_FILE);
        if let Err(error) = state_dir::remove(&path) {
            self.tell_unwritten(now, error.to_string());
        }
        &self.events
    }

    /// Keeps what the next process goes on from; everything in force stays so.
    pub fn leave(&mut self, now: BootTime) -> &[Event] {
        self.events.clear();
        self.keep_state(now, true);
        &self.events
    }

    /// Anything is in force, or a rule is not Normal.
    pub fn is_acting(&self) -> bool {
        let mut reports = self.engine.reports();
        self.actuators.held().next().is_some()
            || self.actuators.evicting().next().is_some()
            || reports.any(|rule| rule.state != RuleState::Normal)
    }

    /// What is in force. Leaves what only the caller knows (problems, refusals) empty.
    pub fn status(&self, now: BootTime, time: Timestamp) -> Status {
        let rules = self.engine.reports();
        let files = self.actuators.records();
        Status {
            version: status::VERSION,
            writer: self.writer.clone(),
            at: now,
            time,
            pods: self.pods.len(),
            scheduling: self.scheduling.current().cloned(),
            rules: rules.map(|rule| self.rule_status(rule, now)).collect(),
            throttled: files.map(|file| self.throttled_file(file)).collect(),
            evicting: self.evicting(),
            would: self.previews.current().to_vec(),
            problems: Vec::new(),
            refused: Vec::new(),
        }
    }

    fn evicting(&self) -> Vec<String> {
        let pending = self.actuators.evicting();
        pending
            .map(|it| name(&self.names, &it.uid).unwrap_or_else(|| it.uid.to_string()))
            .collect()
    }

    fn rule_status(&self, report: RuleReport, now: BootTime) -> RuleStatus {
        RuleStatus {
            metric: metric(&self.policy, &report.id),
            rule: report.id,
            strategy: report.strategy,
            state: report.state,
            lasts: report.since.map(|since| now.since(since)),
            value: report.value,
            watermark: report.watermark,
            restore: report.restore,
            breaches: report.breaches,
            quiets: report.quiets,
            unknown: report.unknown,
        }
    }

    fn throttled_file(&self, record: Record) -> ThrottledFile {
        ThrottledFile {
            pod_name: name(&self.names, &record.uid).unwrap_or_else(|| record.uid.to_string()),
            lever: record.lever.to_string(),
            file: record.file.to_string(),
            original: record.original.into(),
            now: record.ours.into(),
            ratio: record.ratio,
            rule: record.rule,
        }
    }

    /// The last sample; it holds the pods only where an evaluation was due.
    pub const fn sample(&self) -> &Sample {
        &self.sample
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

    /// How many throttles of an earlier process were taken over at the start.
    pub const fn adopted(&self) -> usize {
        self.adopted
    }

    /// How many pods have cgroup files that are not as they were.
    pub fn throttled_pods(&self) -> usize {
        self.actuators.held().count()
    }
}

/// What is kept of the engine over a restart.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    boot_id: String,
    state: EngineState,
    #[serde(default)]
    evictions: Vec<PendingEviction>,
}

/// Where no rule is, nobody is killed for what an earlier process began.
fn is_enforced(rule: &Rule) -> bool {
    rule.strategy == Strategy::Enforce
}

fn has_rule(policy: &PolicySet, rule: &RuleId) -> bool {
    policy.rules.iter().any(|known| known.id == *rule)
}

/// The name of a rule's metric.
pub fn metric(policy: &PolicySet, rule: &RuleId) -> Option<String> {
    let rule = policy.rules.iter().find(|known| known.id == *rule)?;
    Some(rule.metric.to_string())
}

fn name(names: &BTreeMap<PodUid, Arc<str>>, uid: &PodUid) -> Option<String> {
    names.get(uid).map(ToString::to_string)
}
