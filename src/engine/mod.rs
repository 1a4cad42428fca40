//! The decisions: samples and the time in, a [`plan::Plan`] out. Pure: no clock, no files, no threads.
//!
//! ```text
//!  PolicySet ─┐
//!  Pods ──────┼─► Engine::step(now, &Sample) ─► Plan ─► those who act ─┐
//!  Sample ────┘        ▲                                               │
//!                      └──────────────── Feedback ◄────────────────────┘
//! ```
//! The agent, `run`, `demo` and `replay` all call the same [`Engine::step`].

mod act;
mod eligibility;
mod evict;
mod gap;
mod group;
mod ledger;
pub mod metric;
pub mod plan;
pub mod pod;
pub mod policy;
mod preview;
pub mod protected;
pub mod quantity;
mod rank;
mod reclaim;
mod rule;
mod run;
pub mod sample;
mod scheduling;
pub mod selector;
mod state;
#[cfg(test)]
pub(crate) mod testing;
mod throttle;
pub mod time;
mod track;
pub mod units;
mod values;
mod walk;
pub mod window;

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use self::act::{Acting, Buffers, Scene, Under};
use self::evict::Rounds;
use self::group::Group;
use self::ledger::Ledger;
use self::metric::{ActionKind, Leverage, Metric, PressureKind, RankBy};
use self::plan::{Change, Feedback, Plan, RuleState, Spared, Throttle, Transition, Unknown};
use self::pod::{Pod, PodUid};
use self::policy::{PolicySet, Probe, Rule, RuleId, Strategy};
use self::preview::Previewing;
use self::protected::Guard;
pub use self::rank::compare as compare_victims;
use self::rule::Judgement;
use self::run::Run;
use self::sample::{CpuTimes, LeverSample, Sample};
pub use self::state::{AdoptedThrottle, EngineState};
use self::throttle::Raising;
use self::time::BootTime;
pub use self::track::usage;
use self::track::{Pods, Tracked};
use self::values::View;
use self::window::NodeWindows;

/// A metric Unknown for so long: what is in force for it is undone.
const UNKNOWN_LIMIT: Duration = Duration::from_mins(15);
/// A throttle that could not be put in force is not tried again before that.
const FAILED_BACKOFF: Duration = Duration::from_secs(30);

/// What the next samples have to hold: the sampler reads nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one flag for each file that may be left unread"
)]
pub struct Demand {
    /// `/proc/loadavg`
    pub load: bool,
    /// `/proc/pressure/{cpu,memory,io}`
    pub pressure: [bool; 3],
    /// `/proc/diskstats`
    pub disks: bool,
    /// `/proc/1/net/dev`
    pub interfaces: bool,
    /// `memory.stat` of every pod.
    pub pod_memory: bool,
    /// `cpu.pressure`, `memory.pressure` and `io.pressure` of every pod, where there are such files.
    pub pod_pressure: bool,
    /// `io.stat` of every pod, where there is such a file.
    pub pod_io: bool,
    /// `procs_running` and `procs_blocked` of `/proc/stat`.
    pub tasks: bool,
    /// The CPUs of `/proc/stat` that this process may use.
    pub unpinned: bool,
    /// The quota file of every pod's levers.
    pub pod_quota: bool,
    /// `schedstat` of every container's threads.
    pub run_delay: bool,
    /// `cpu.stat` of every container.
    pub throttled: bool,
    /// HTTP probes.
    pub probes: Vec<Probe>,
}

/// The rule machines, and what is in force for whom.
#[derive(Debug)]
pub struct Engine {
    policy: Option<Arc<PolicySet>>,
    /// Sorted by id.
    runs: Vec<Run>,
    /// Sorted by period.
    groups: Vec<Group>,
    pods: Pods,
    /// The throttles in force.
    ledger: Ledger,
    /// The evictions that have not settled.
    rounds: Rounds,
    /// Rules that kept new work away and are gone: still to be told.
    reopened: Vec<RuleId>,
    /// Every rule that can close the node has been judged once.
    settled: bool,
    /// The policies changed since the last evaluation.
    dirty: bool,
    /// The last evaluation.
    now: BootTime,
    /// The CPUs that pods may use which are not pinned, at the last sample.
    unpinned: Option<(BootTime, CpuTimes)>,
    unknown_limit: Duration,
    windows: NodeWindows,
    real: Buffers,
    shadow: Buffers,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            policy: None,
            runs: Vec::new(),
            groups: Vec::new(),
            pods: Pods::default(),
            ledger: Ledger::default(),
            rounds: Rounds::default(),
            reopened: Vec::new(),
            settled: false,
            dirty: false,
            now: BootTime::default(),
            unpinned: None,
            unknown_limit: UNKNOWN_LIMIT,
            windows: NodeWindows::default(),
            real: Buffers::default(),
            shadow: Buffers::default(),
        }
    }
}

/// What `plimsoll` tells of a rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleReport {
    /// Which rule.
    pub id: RuleId,
    /// Act or report.
    pub strategy: Strategy,
    /// State.
    pub state: RuleState,
    /// Since when it has been in that state; `None` before the first evaluation.
    pub since: Option<BootTime>,
    /// Last value judged (of several series the one that decided).
    pub value: Option<f64>,
    /// High mark.
    pub watermark: f64,
    /// Low mark.
    pub restore: f64,
    /// Consecutive breaches counted.
    pub breaches: u32,
    /// Consecutive quiet evaluations counted.
    pub quiets: u32,
    /// Why the last evaluation could not be judged.
    pub unknown: Option<Unknown>,
    /// By what it was judged besides its value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guard: Option<Guard>,
    /// How long what it does stays in force after its last breach, at least.
    pub cool_down: Duration,
}

impl Engine {
    /// An engine with no policy and no pods.
    pub fn new() -> Self {
        Self::default()
    }

    /// Undoes what is in force for a metric once it has been Unknown for `limit` (15 minutes unless told).
    #[must_use]
    pub const fn with_unknown_limit(mut self, limit: Duration) -> Self {
        self.unknown_limit = limit;
        self
    }

    /// Takes a new set of policies. What is in force for rules that are gone or no longer enforced is taken back
    /// step by step by the following evaluations.
    pub fn set_policy(&mut self, policy: Arc<PolicySet>) {
        if self.policy.as_ref() == Some(&policy) {
            return;
        }
        let mut rules = policy.rules.clone();
        rules.sort_by(|a, b| a.id.cmp(&b.id));
        rules.dedup_by(|a, b| a.id == b.id);
        let mut old = std::mem::take(&mut self.runs).into_iter().peekable();
        for rule in rules {
            while let Some(gone) = old.next_if(|run| run.rule.id < rule.id) {
                self.end(&gone);
            }
            let former = old.next_if(|run| run.rule.id == rule.id);
            let run = self.go_on(former, rule);
            self.runs.push(run);
        }
        old.for_each(|gone| self.end(&gone));
        self.regroup();
        self.policy = Some(policy);
        self.dirty = true;
        self.reconcile();
    }

    /// The rule goes on from its former self; one that begins or ceases to act begins anew.
    fn go_on(&mut self, former: Option<Run>, rule: Rule) -> Run {
        let index = self.runs.len();
        let mut run = match former {
            Some(mut run) if run.rule.strategy == rule.strategy => {
                run.edit(rule);
                run
            }
            other => {
                if let Some(run) = &other {
                    self.end(run);
                }
                Run::new(rule)
            }
        };
        run.index = index;
        run
    }

    fn end(&mut self, run: &Run) {
        if run.closes && !run.would() {
            self.reopened.push(run.rule.id.clone());
        }
    }

    fn regroup(&mut self) {
        let runs = &self.runs;
        let used = |period: Duration| runs.iter().any(|run| run.rule.period == period);
        self.groups.retain(|group| used(group.period));
        for run in runs {
            let period = run.rule.period;
            if let Err(place) = self.groups.binary_search_by_key(&period, |g| g.period) {
                self.groups.insert(place, Group::new(period));
            }
        }
        self.pods.reset(used);
    }

    /// Takes the pods of the node as they are now.
    pub fn set_pods(&mut self, pods: Vec<Arc<Pod>>) {
        self.pods.set(pods);
        self.reconcile();
    }

    /// Brings permits and claims in line with the policies and pods: claims that no rule needs any more are retired.
    fn reconcile(&mut self) {
        let policies = self.policy.as_ref().map_or(&[][..], |policy| &policy.pods);
        self.pods.permit(policies, &self.runs);
        let (pods, runs, now) = (&self.pods, &self.runs, self.now);
        let may = |run: &Run, uid: &PodUid| {
            pods.get(uid)
                .is_some_and(|t| t.permit(run.index).throttle && !t.pod.protected)
                && run.leverage(ActionKind::CpuThrottle) != Leverage::None
        };
        let due = |period: Duration| {
            let group = self.groups.iter().find(|group| group.period == period);
            let due = group.and_then(|group| group.next_due);
            due.unwrap_or(now + period)
        };
        let held = self.ledger.0.len();
        self.ledger.0.retain(|grip| pods.get(&grip.uid).is_some());
        // The plan lists it until the next evaluation, which nothing else may call for.
        self.dirty |= self.ledger.0.len() < held;
        for grip in &mut self.ledger.0 {
            for claim in &mut grip.claims {
                let run = runs.iter().find(|run| run.rule.id == claim.rule);
                match run.filter(|run| !run.would() && may(run, &grip.uid)) {
                    Some(run) => claim.renew(&run.rule),
                    None => claim.retire(due(claim.period)),
                }
            }
        }
        for run in &mut self.runs {
            let mut shadow = std::mem::take(&mut run.shadow);
            shadow.follow(|uid| pods.get(uid).is_none(), |uid| may(run, uid));
            run.shadow = shadow;
            run.forget_pods(|uid| pods.get(uid).is_none());
        }
    }

    /// Takes back what is in force for rules that are gone within `within` (at least 2 s, in whole seconds), in equal
    /// steps a second, where their actions would take longer.
    pub fn release_within(&mut self, within: Duration) {
        let soonest = self.now + ledger::HURRIED;
        let claims = self.ledger.0.iter_mut().flat_map(|grip| &mut grip.claims);
        for claim in claims.filter(|claim| claim.retired.is_some()) {
            claim.hurry(within, soonest);
        }
    }

    /// Judges a rule by `value`, in its metric's unit, instead of by the samples: what if it were so. For questions only;
    /// ends with the next change of the rule's strategy.
    pub fn assume(&mut self, rule: &RuleId, value: f64) {
        if let Some(run) = self.runs.iter_mut().find(|run| run.rule.id == *rule) {
            run.assumed = Some(value);
        }
    }

    /// What a rule needs to have released by its last judgement, in millicores or bytes: 1.1 x (value - mark). 0 where
    /// it is not above its mark, and where the metric has no such unit.
    pub fn gap(&self, rule: &RuleId) -> u64 {
        let run = self.runs.iter().find(|run| run.rule.id == *rule);
        run.map_or(0, |run| run.gap)
    }

    /// What the next samples have to hold.
    pub fn demand(&self) -> Demand {
        let mut demand = Demand {
            pod_quota: !self.ledger.0.is_empty(),
            ..Demand::default()
        };
        self.runs.iter().for_each(|run| demand.add(run));
        demand
    }

    /// When the next evaluation is due; `None` without rules and with nothing left to take back (a change of the
    /// policies is followed by one evaluation in any case). A sample at or after this time has to hold the pods.
    pub fn next_due(&self) -> Option<BootTime> {
        if self.dirty {
            return Some(self.now);
        }
        let groups = self.groups.iter().map(|g| g.next_due.unwrap_or(self.now));
        let claims = self.ledger.0.iter().flat_map(|grip| &grip.claims);
        groups.chain(claims.filter_map(|claim| claim.retired)).min()
    }

    /// Takes in what became of the last plan. Like the pods, it has to be older than the sample of the next step.
    pub fn feedback(&mut self, feedback: &Feedback) {
        match feedback {
            Feedback::ThrottleFailed { uid } => {
                self.ledger.revert(uid);
                self.spare(uid, self.now + FAILED_BACKOFF, Spared::BackingOff);
            }
            Feedback::Contested { uid, until } => self.spare(uid, *until, Spared::Contested),
            Feedback::Resized {
                uid,
                cgroup,
                original,
            } => {
                if let Some(grip) = self.ledger.get_mut(uid) {
                    grip.resize(cgroup, *original);
                }
            }
            Feedback::EvictionRefused { uid, until } => {
                self.rounds.refuse(uid);
                if let Some(tracked) = self.pods.get_mut(uid) {
                    tracked.refused = Some(*until);
                }
            }
            Feedback::Gone { uid } => {
                self.pods.remove(uid);
                self.reconcile();
            }
        }
    }

    /// Between two evaluations: the cgroups of a pod are now these. The throttle that is in force for it, spread over them;
    /// `None` where there is none.
    pub fn follow(&mut self, uid: &PodUid, levers: &[LeverSample]) -> Option<Throttle> {
        let pod = &self.pods.get(uid)?.pod;
        self.ledger.get_mut(uid)?.follow(pod, levers);
        self.ledger.throttle(pod)
    }

    /// The running pods that no rule's action may touch.
    pub fn protected_pods(&self) -> impl Iterator<Item = &PodUid> {
        let touched = |tracked: &Tracked| {
            let mut runs = self.runs.iter();
            runs.any(|run| protected::may_touch(run, tracked))
        };
        let pods = self.pods.all().iter();
        let running = pods.filter(|it| it.pod.running && !it.pod.terminating);
        running.filter(move |it| !touched(it)).map(|it| &it.pod.uid)
    }

    fn spare(&mut self, uid: &PodUid, until: BootTime, why: Spared) {
        if let Some(tracked) = self.pods.get_mut(uid) {
            tracked.spared = Some((until, why));
        }
    }

    /// The use of the node over longer times, from the samples of all steps.
    pub const fn windows(&self) -> &NodeWindows {
        &self.windows
    }

    /// Goes on from the windows of an earlier process of this boot.
    pub fn adopt_windows(&mut self, windows: NodeWindows) {
        self.windows = windows.resumed().unwrap_or_default();
    }

    /// Evaluates the rules that are due at `now`. Every sample goes into the windows, whether an evaluation is due or not.
    pub fn step(&mut self, now: BootTime, sample: &Sample, plan: &mut Plan) {
        plan.reclaims.clear();
        plan.evictions.clear();
        plan.transitions.clear();
        let busy = self.windows.take(sample);
        let busy = self.unpinned_busy(sample).or(busy);
        for group in &mut self.groups {
            group.between.take(&sample.node, busy);
        }
        self.rounds.settle(now, sample.at, &self.pods);
        plan.evaluated = self.next_due().is_some_and(|due| due <= now);
        if !plan.evaluated {
            return;
        }
        self.now = now;
        self.dirty = false;
        self.pods.see(now, sample);
        self.groups.iter_mut().for_each(|group| group.begin(now));
        self.judge(sample, &mut plan.transitions);
        self.act(sample, plan);
        self.close(plan);
        for group in self.groups.iter_mut().filter(|group| group.due) {
            group.end(now, sample);
            self.pods.keep(group.period, sample);
        }
    }

    /// Percent of the CPUs that were busy since the last sample, of those that pods may use which are not pinned.
    fn unpinned_busy(&mut self, sample: &Sample) -> Option<f64> {
        let now = sample.node.unpinned.map(|cpus| (sample.at, cpus));
        let (at, before) = std::mem::replace(&mut self.unpinned, now)?;
        let (_, cpus) = now?;
        let busy = cpus.busy_since(before, sample.at.since(at))?;
        Some(cpus.percent(busy))
    }

    /// Judges the rules that are due.
    fn judge(&mut self, sample: &Sample, out: &mut Vec<Transition>) {
        for run in &mut self.runs {
            let group = self.groups.iter().find(|g| g.period == run.rule.period);
            let Some(group) = group.filter(|group| group.due) else {
                run.due = false;
                continue;
            };
            let view = View {
                now: self.now,
                sample,
                base: &group.base,
                period: group.period,
                pods: self.pods.all(),
                windows: &self.windows,
                ledger: &self.ledger,
                tasks: group.between.tasks(),
                busiest: group.between.busiest,
            };
            run.guard = None;
            run.input = None;
            let judgement = match run.assumed {
                Some(value) => values::assumed(&run.rule, value),
                None if group.gap => {
                    run.machine.forget();
                    Judgement::Unknown(Unknown::Rebased)
                }
                None => {
                    let taken = values::taken(run, &view);
                    let judgement = values::judge(run, &view);
                    run.input = values::input(run, &view, judgement);
                    let (judgement, guard) = protected::guard(run, &view, judgement);
                    run.guard = guard;
                    run.once(taken, judgement)
                }
            };
            run.observe(self.now, judgement, self.unknown_limit, out);
            run.gap = gap::gap(&run.rule, run.judgement, 0, &sample.node);
        }
    }

    /// Takes throttles back, acts for the rules that are breached, and shows what the Preview rules would do.
    fn act(&mut self, sample: &Sample, plan: &mut Plan) {
        let scene = Scene {
            now: self.now,
            sample,
            pods: &self.pods,
            period: self.period(),
            unknown_limit: self.unknown_limit,
        };
        let out = &mut plan.transitions;
        self.real.begin(&scene);
        for run in &mut self.runs {
            run.follow_release(self.now, &self.ledger);
        }
        Raising { scene, out }.run(&self.runs, &mut self.ledger);
        let busy = RankBy::ALL.map(|group| self.rounds.busy(group));
        let acting = Acting {
            scene,
            buffers: &mut self.real,
            ledger: &mut self.ledger,
            rounds: &mut self.rounds,
            removed: &[],
            under: None,
            out,
        };
        acting.run(&mut self.runs);
        plan.reclaims.append(&mut self.real.reclaims);
        plan.evictions.append(&mut self.real.evictions);
        let mut previewing = Previewing {
            scene,
            under: Under {
                ledger: &self.ledger,
                rounds: &self.rounds,
                busy,
            },
            real: &self.real,
            buffers: &mut self.shadow,
            out,
        };
        for run in self.runs.iter_mut().filter(|run| run.would()) {
            previewing.run(run);
        }
    }

    /// Over which period the use of pods is taken: that of the most frequent rules that are due and not at a gap. A
    /// Preview has no say in it where a rule that acts is due.
    fn period(&self) -> Duration {
        let due = |group: &&Group| group.due && !group.gap;
        let acts = |group: &&Group| {
            let mut runs = self.runs.iter();
            runs.any(|run| !run.would() && run.rule.period == group.period)
        };
        let groups = || self.groups.iter().filter(due);
        let group = groups().find(acts).or_else(|| groups().next());
        group.map_or(Duration::ZERO, |group| group.period)
    }

    /// Writes the levels that have to be in force.
    fn close(&mut self, plan: &mut Plan) {
        let out = &mut plan.transitions;
        out.extend(self.reopened.drain(..).map(|rule| Transition {
            at: self.now,
            rule,
            would: false,
            change: Change::SchedulingEnabled,
        }));
        scheduling::tell(self.now, &mut self.runs, out);
        self.settled |= scheduling::judged(&self.runs);
        scheduling::level(&self.runs, self.settled, &mut plan.scheduling);
        let mut place = 0;
        if !self.ledger.0.is_empty() {
            for index in &self.real.orders[RankBy::Cpu as usize] {
                let pod = &self.pods.all()[*index].pod;
                place += usize::from(self.ledger.write(pod, place, &mut plan.throttles));
            }
        }
        plan.throttles.truncate(place);
    }

    /// The rules as they stand, in order of id.
    pub fn reports(&self) -> impl Iterator<Item = RuleReport> {
        self.runs.iter().map(RuleReport::of)
    }
}

impl Demand {
    fn add(&mut self, run: &Run) {
        match run.rule.metric {
            Metric::Load(_) => (self.load, self.tasks) = (true, true),
            Metric::Pressure { kind, .. } => self.pressure[kind as usize] = true,
            Metric::Disk(_) => self.disks = true,
            Metric::Interface(_) => self.interfaces = true,
            Metric::RunQueueTime => self.run_delay = true,
            Metric::ThrottledRatio => self.throttled = true,
            Metric::Protected(_) => self.pod_pressure = true,
            _ => {}
        }
        let acts = |kind: ActionKind| run.leverage(kind) != Leverage::None;
        let ranks = acts(ActionKind::CpuThrottle) || acts(ActionKind::Eviction);
        let rank_by = run.rule.metric.rank_by();
        self.pod_memory |= acts(ActionKind::ForceGc) || (ranks && rank_by != RankBy::Cpu);
        self.pod_io |= ranks && rank_by == RankBy::Io;
        let guarded_by = protected::guarded_by(run);
        self.pod_pressure |= guarded_by.is_some();
        self.unpinned |= guarded_by == Some(PressureKind::Cpu);
        self.pod_quota |= acts(ActionKind::CpuThrottle);
        if let (Metric::Probe(_), Some(probe)) = (&run.rule.metric, &run.rule.probe)
            && !self.probes.contains(probe)
        {
            self.probes.push(probe.clone());
        }
    }
}

impl RuleReport {
    fn of(run: &Run) -> Self {
        Self {
            id: run.rule.id.clone(),
            strategy: run.rule.strategy,
            state: run.machine.state,
            since: run.machine.since,
            value: run.judgement.and_then(Judgement::value),
            watermark: run.rule.watermark,
            restore: run.rule.restore,
            breaches: run.machine.breaches,
            quiets: run.machine.quiets,
            unknown: run.judgement.and_then(Judgement::unknown),
            guard: run.guard,
            cool_down: run.machine.cool_down(run.rule.action.cool_down),
        }
    }
}
