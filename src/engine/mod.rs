//! The decisions: samples and the time in, a [`plan::Plan`] out. Pure: no clock, no files, no threads.
//!
//! ```text
//!  PolicySet ─┐
//!  Pods ──────┼─► Engine::step(now, &Sample) ─► Plan ─► actuators ─┐
//!  Sample ────┘        ▲                                           │
//!                      └────────────── Feedback ◄──────────────────┘
//! ```
//! The agent, `run`, `demo` and `replay` all call the same [`Engine::step`].

mod demand;
mod effect;
mod eligibility;
mod gap;
pub mod hours;
mod idle_class;
mod ladder;
mod ledger;
pub mod load;
pub mod metric;
pub mod plan;
pub mod pod;
pub mod policy;
mod preview;
pub mod protected;
pub mod quantity;
mod rank;
mod report;
mod rule;
mod run;
pub mod sample;
mod schedule;
mod scheduling;
pub mod selector;
mod standing;
mod state;
mod statistic;
#[cfg(test)]
pub(crate) mod testing;
pub mod time;
mod track;
pub mod units;
mod values;
pub mod weight_share;
pub mod window;
mod would;

use std::sync::Arc;
use std::time::Duration;

pub use self::demand::Demand;
use self::effect::Verification;
use self::idle_class::IdleClass;
use self::ladder::{Buffers, Enforced, MemoryForecast, RestorePass, Round, RoundContext, Rounds};
use self::ledger::{InForce, ThrottleLedger};
use self::load::LoadTracker;
use self::metric::{ActionKind, Metric, RankBy};
use self::plan::{
    Feedback, Ineffective, Plan, PlanChange, PodThrottle, Skipped, Transition, Unknown,
};
use self::pod::{Pod, PodUid};
use self::policy::{PolicySet, Rule, RuleId};
use self::preview::PreviewPass;
pub use self::rank::compare as compare_victims;
pub use self::report::RuleReport;
use self::rule::{Evaluation, Params};
use self::run::Run;
use self::sample::{Sample, TargetCgroupSample};
pub use self::schedule::DEFAULT_PERIOD;
use self::schedule::Schedule;
use self::standing::StandingPass;
pub use self::state::{AdoptedThrottle, EngineState};
use self::time::BootTime;
pub use self::track::usage;
use self::track::{Tracked, TrackedPods};
use self::values::EvalContext;
use self::window::{CustomWindow, NodeWindows};
pub use self::would::{WouldCounts, WouldReport};

/// After a metric has been Unknown for this long, its rule returns to Normal, and what is in force is restored step by
/// step.
const UNKNOWN_LIMIT: Duration = Duration::from_mins(15);
/// How long to wait before retrying a throttle that could not be applied.
const FAILED_BACKOFF: Duration = Duration::from_secs(30);

/// The rules with their state machines, and the actions in force for each pod.
#[derive(Debug)]
pub struct Engine {
    policy: Option<Arc<PolicySet>>,
    /// Sorted by id.
    runs: Vec<Run>,
    schedule: Schedule,
    pods: TrackedPods,
    /// The throttles in force.
    ledger: ThrottleLedger,
    /// The pods that a `PodQOS` in Preview would hold in the idle class.
    standing_preview: ThrottleLedger,
    /// Eviction rounds that have not settled.
    rounds: Rounds,
    /// Removed rules that had disabled scheduling; the transition is still to be reported.
    removed_disabling: Vec<RuleId>,
    /// Every rule that can disable scheduling has been evaluated once.
    scheduling_known: bool,
    /// The policies changed since the last evaluation.
    dirty: bool,
    /// The last evaluation.
    now: BootTime,
    unknown_limit: Duration,
    idle_class: IdleClass,
    windows: NodeWindows,
    load: LoadTracker,
    forecast: MemoryForecast,
    enforced_buffers: Buffers,
    preview_buffers: Buffers,
}

impl Default for Engine {
    fn default() -> Self {
        Self {
            policy: None,
            runs: Vec::new(),
            schedule: Schedule::default(),
            pods: TrackedPods::default(),
            ledger: ThrottleLedger::default(),
            standing_preview: ThrottleLedger::default(),
            rounds: Rounds::default(),
            removed_disabling: Vec::new(),
            scheduling_known: false,
            dirty: false,
            now: BootTime::default(),
            unknown_limit: UNKNOWN_LIMIT,
            idle_class: IdleClass::default(),
            windows: NodeWindows::default(),
            load: LoadTracker::default(),
            forecast: MemoryForecast::default(),
            enforced_buffers: Buffers::default(),
            preview_buffers: Buffers::default(),
        }
    }
}

impl Engine {
    /// An engine with no policy and no pods.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how long a metric may be Unknown before what its rules changed is restored (default 15 minutes).
    #[must_use]
    pub const fn with_unknown_limit(mut self, limit: Duration) -> Self {
        self.unknown_limit = limit;
        self
    }

    /// Sets the time between two evaluations, at least 100 ms (default [`DEFAULT_PERIOD`]).
    #[must_use]
    pub const fn with_period(mut self, period: Duration) -> Self {
        self.schedule.period = period;
        self
    }

    /// Replaces the policies. The following evaluations restore, step by step, what was in force for rules that were
    /// removed or are no longer enforced.
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
                self.on_rule_removed(&gone);
            }
            let previous = old.next_if(|run| run.rule.id == rule.id);
            let run = self.carry_over(previous, rule);
            self.runs.push(run);
        }
        old.for_each(|gone| self.on_rule_removed(&gone));
        if self.runs.is_empty() {
            self.schedule.reset();
        }
        self.pods.reset_permits();
        self.policy = Some(policy);
        self.dirty = true;
        self.reconcile();
    }

    /// Carries the state of the previous version of the rule over, unless its strategy changed.
    fn carry_over(&mut self, previous: Option<Run>, rule: Rule) -> Run {
        let index = self.runs.len();
        let mut run = match previous {
            Some(mut run) if run.rule.strategy == rule.strategy => {
                run.edit(rule);
                run
            }
            other => {
                if let Some(run) = &other {
                    self.on_rule_removed(run);
                }
                Run::new(rule)
            }
        };
        run.index = index;
        run
    }

    fn on_rule_removed(&mut self, run: &Run) {
        if run.disables_scheduling && !run.is_preview() {
            self.removed_disabling.push(run.rule.id.clone());
        }
    }

    /// Replaces the pods of the node.
    pub fn set_pods(&mut self, pods: Vec<Arc<Pod>>) {
        let before = standing::yielding(&self.pods, &self.ledger);
        self.pods.set(pods, self.now);
        self.load.set_pods(self.pods.all().iter().map(|it| &it.pod));
        self.reconcile();
        // Their grace period may be shorter than the time until the next evaluation, and a resize waits for us.
        self.dirty |= standing::yielding(&self.pods, &self.ledger) != before;
        self.dirty |= self.idle_class.became_unsafe(self.now, &self.pods);
    }

    /// Updates permits and claims to the policies and pods; retires claims that no rule needs any more.
    fn reconcile(&mut self) {
        let policies = self.policy.as_ref().map_or(&[][..], |policy| &policy.pods);
        self.pods.compute_permits(policies, &self.runs);
        let (pods, runs, now) = (&self.pods, &self.runs, self.now);
        let may = |run: &Run, uid: &PodUid| {
            pods.get(uid)
                .is_some_and(|t| t.permit(run.index).throttle && !t.pod.protected)
                && run.rule.uses(ActionKind::CpuThrottle)
        };
        let Schedule {
            next_due, period, ..
        } = self.schedule;
        let due = next_due.unwrap_or(now + period);
        let before = self.ledger.0.len();
        self.ledger.0.retain(|entry| pods.get(&entry.uid).is_some());
        // The plan lists removed pods until the next evaluation, and there may be no other reason for one.
        self.dirty |= self.ledger.0.len() < before;
        for entry in &mut self.ledger.0 {
            for claim in entry.claims.iter_mut().filter(|it| !it.is_standing()) {
                let run = runs.iter().find(|run| run.rule.id == claim.rule);
                match run.filter(|run| !run.is_preview() && may(run, &entry.uid)) {
                    Some(run) => claim.renew(&run.rule),
                    None => claim.retire(due),
                }
            }
        }
        for run in &mut self.runs {
            let mut shadow = std::mem::take(&mut run.shadow);
            shadow.retain_pods(|uid| pods.get(uid).is_none(), |uid| may(run, uid));
            run.shadow = shadow;
            run.drop_pods(|uid| pods.get(uid).is_none());
        }
    }

    /// Restores what is in force for removed rules within `within` (at least 2 s, whole seconds), in equal steps every
    /// second, where their actions would take longer.
    pub fn release_within(&mut self, within: Duration) {
        let earliest = self.now + ledger::FAST_RESTORE_INTERVAL;
        let claims = self.ledger.0.iter_mut().flat_map(|entry| &mut entry.claims);
        for claim in claims.filter(|claim| claim.retired.is_some()) {
            claim.speed_up(within, earliest);
        }
    }

    /// Evaluates a rule with `value`, in its metric's unit, instead of the samples, until the rule's strategy changes. For
    /// what-if previews only.
    pub fn assume(&mut self, rule: &RuleId, value: f64) {
        if let Some(run) = self.runs.iter_mut().find(|run| run.rule.id == *rule) {
            run.assumed = Some(value);
        }
    }

    /// How much a rule needs released as of its last evaluation, in millicores or bytes: 1.1 x (value - threshold). 0 if
    /// the value is not above the threshold or the metric has no such unit.
    pub fn gap(&self, rule: &RuleId) -> u64 {
        let run = self.runs.iter().find(|run| run.rule.id == *rule);
        run.map_or(0, |run| run.gap)
    }

    /// What the next samples must contain.
    pub fn demand(&self) -> Demand {
        let mut demand = Demand {
            pod_quota: !self.ledger.0.is_empty(),
            ..Demand::default()
        };
        self.runs.iter().for_each(|run| demand.add(run));
        self.windows.add_demand(&mut demand);
        demand
    }

    /// When the next evaluation is due; `None` without rules, with nothing left to restore and every standing pod in the class
    /// that it stays in (a policy change is always followed by one evaluation). A sample at or after this time must contain the pods.
    pub fn next_due(&self) -> Option<BootTime> {
        if self.dirty {
            return Some(self.now);
        }
        let rules = (!self.runs.is_empty()).then(|| self.schedule.next_due.unwrap_or(self.now));
        let claims = self.ledger.0.iter().flat_map(|entry| &entry.claims);
        let claims = claims.filter_map(|claim| claim.retired);
        let standing = self.pods.all().iter();
        let standing = standing.filter_map(|it| standing::due(it, self.ledgers(), self.now));
        let idle_class = self.idle_class.due(self.now);
        rules
            .into_iter()
            .chain(claims)
            .chain(standing)
            .chain(idle_class)
            .min()
    }

    /// The throttles in force, and the standing ones of Previews.
    const fn ledgers(&self) -> [&ThrottleLedger; 2] {
        [&self.ledger, &self.standing_preview]
    }

    /// Records the outcome of the last plan. Like the pods, it must be older than the sample of the next step.
    pub fn feedback(&mut self, feedback: &Feedback) {
        match feedback {
            Feedback::ThrottleFailed { uid } => {
                self.ledger.revert(uid);
                if let Some(tracked) = self.pods.get_mut(uid) {
                    tracked.bursts[0] = None;
                }
                self.block_throttle(uid, self.now + FAILED_BACKOFF, Skipped::BackingOff);
            }
            Feedback::Overwritten { uids } => {
                for uid in uids {
                    if let Some(tracked) = self.pods.get_mut(uid) {
                        tracked.effect.overwritten();
                    }
                }
            }
            Feedback::Contested { uid, until } => {
                self.block_throttle(uid, *until, Skipped::Contested);
            }
            Feedback::Resized {
                uid,
                cgroup,
                original,
            } => {
                if let Some(entry) = self.ledger.get_mut(uid) {
                    entry.resize(cgroup, *original);
                }
            }
            Feedback::NothingReclaimed { uid, rule } => {
                if let Some(tracked) = self.pods.get_mut(uid) {
                    // It has nothing to read back.
                    tracked.reclaimed = None;
                    tracked.effect.not_reclaimed = Some(rule.clone());
                }
            }
            Feedback::EvictionAccepted { uid } => self.rounds.accept(uid, self.now),
            Feedback::EvictionRefused { uid, until } => {
                self.rounds.remove(uid);
                if let Some(tracked) = self.pods.get_mut(uid) {
                    tracked.eviction_blocked_until = Some(*until);
                }
            }
            Feedback::Gone { uid } => {
                self.pods.remove(uid);
                self.load.remove(uid);
                self.reconcile();
            }
        }
    }

    /// Updates the cgroups of a pod between two evaluations. Returns its throttle spread over them, or its burst; `None` if it
    /// has neither.
    pub fn sync_cgroups(
        &mut self,
        uid: &PodUid,
        target_cgroups: &[TargetCgroupSample],
    ) -> Option<PodThrottle> {
        let tracked = self.pods.get(uid)?;
        if let Some(entry) = self.ledger.get_mut(uid) {
            entry.sync_cgroups(&tracked.pod, target_cgroups);
        }
        self.ledger.throttle(&InForce {
            tracked,
            now: self.now,
            idle_unsafe: self.is_idle_unsafe(),
        })
    }

    /// Whether pods get the lowest weight instead of the idle class, as of the last evaluation, because the kubelet of this
    /// node would reject new pods.
    pub fn is_idle_unsafe(&self) -> bool {
        self.idle_class.is_unsafe(self.now)
    }

    /// The running pods that no `PodQOS` lets any action touch.
    pub fn protected_pods(&self) -> impl Iterator<Item = &PodUid> {
        let pods = self.pods.all().iter();
        let protected = pods.filter(|it| it.is_protected());
        protected.map(|it| &it.pod.uid)
    }

    fn block_throttle(&mut self, uid: &PodUid, until: BootTime, why: Skipped) {
        if let Some(tracked) = self.pods.get_mut(uid) {
            tracked.throttle_blocked = Some((until, why));
        }
    }

    /// The node's usage over longer windows, from the samples of all steps.
    pub const fn windows(&self) -> &NodeWindows {
        &self.windows
    }

    /// Sets the windows of the node's settings.
    pub fn set_windows(&mut self, windows: Arc<[CustomWindow]>) {
        self.windows.set_custom(windows);
    }

    /// Continues with the windows of an earlier process of the same boot.
    pub fn adopt_windows(&mut self, windows: NodeWindows) {
        let custom = Arc::clone(self.windows.custom());
        self.windows = windows.resumed().unwrap_or_default();
        self.windows.set_custom(custom);
    }

    /// Evaluates the rules that are due at `now`. Every sample is added to the windows, even if no rule is due.
    pub fn step(&mut self, now: BootTime, sample: &Sample, plan: &mut Plan) {
        plan.reclaims.clear();
        plan.evictions.clear();
        plan.transitions.clear();
        self.windows.add(sample);
        self.load.add(sample, &self.windows, &self.ledger);
        self.forecast.add(sample);
        self.schedule.stats.add(&sample.node);
        for (uid, rule) in self.rounds.timed_out(now) {
            let tracked = self.pods.get_mut(uid);
            if let Some(tracked) = tracked.filter(|it| it.pod.running && !it.pod.terminating) {
                tracked.effect.not_terminated = Some(rule.clone());
            }
        }
        self.rounds.settle(now, sample.at, &self.pods);
        plan.evaluated = self.next_due().is_some_and(|due| due <= now);
        if !plan.evaluated {
            return;
        }
        self.now = now;
        self.dirty = false;
        self.idle_class.observe(now, &self.pods);
        self.pods.locate(now, sample);
        self.schedule.start(now, !self.runs.is_empty());
        self.evaluate_rules(sample, &mut plan.transitions);
        self.verify_effects(sample, &mut plan.transitions);
        self.act(sample, plan);
        self.count_would(sample.time, &plan.transitions);
        effect::record_quotas(&mut self.pods, &self.ledger, now, sample.at);
        self.write_desired_state(plan);
        if self.schedule.due {
            self.schedule.finish(now, sample);
            self.pods.save_baseline(sample);
        }
    }

    /// Evaluates the rules that are due.
    fn evaluate_rules(&mut self, sample: &Sample, out: &mut Vec<Transition>) {
        for run in &mut self.runs {
            run.due = self.schedule.due;
            if !run.due {
                continue;
            }
            let ctx = EvalContext {
                now: self.now,
                sample,
                baseline: &self.schedule.baseline,
                period: self.schedule.period,
                pods: self.pods.all(),
                windows: &self.windows,
                ledger: &self.ledger,
                tasks: self.schedule.stats.tasks(),
            };
            run.limited = false;
            run.input = None;
            let evaluation = match run.assumed {
                Some(value) => {
                    run.input = Some(values::assumed_input(&run.rule, value, sample.at));
                    values::assumed(&run.rule, value)
                }
                None if self.schedule.gap => {
                    run.machine.reset_counters();
                    Evaluation::Unknown(Unknown::Rebased)
                }
                None => {
                    let sample_time = values::sample_time(run, &ctx);
                    let evaluation = values::evaluate(run, &ctx);
                    run.input = values::input(run, &ctx, evaluation);
                    if let Metric::Protected(metric) = run.rule.metric {
                        let waiting = protected::value(run, &ctx, metric);
                        run.limited = waiting.is_ok_and(|waiting| waiting.limited);
                    }
                    run.count_once(sample_time, evaluation)
                }
            };
            let evaluation = run.within_hours(sample.time, evaluation);
            let params = Params::of(&run.rule, self.schedule.period, self.unknown_limit);
            run.observe(self.now, evaluation, &params, out);
            run.gap = gap::gap(&run.rule, run.evaluation, 0, &sample.node);
        }
    }

    /// Checks whether the actions of earlier evaluations have an effect.
    fn verify_effects(&mut self, sample: &Sample, out: &mut Vec<Transition>) {
        if !self.runs.iter().any(|run| run.due && !run.is_preview()) {
            return;
        }
        let verification = Verification {
            now: self.now,
            sample,
            period: self.schedule.period,
            runs: &self.runs,
            ledger: &self.ledger,
            rounds: &self.rounds,
        };
        verification.run(&mut self.pods, out);
    }

    /// The pods on which the last action has no effect, with the enforced rule that decided it.
    pub fn ineffective(&self) -> impl Iterator<Item = (&PodUid, &RuleId, Ineffective)> {
        let is_enforced = |rule: &RuleId| {
            let mut runs = self.runs.iter();
            runs.any(|run| run.rule.id == *rule && !run.is_preview())
        };
        let pods = self.pods.all().iter();
        pods.filter_map(move |tracked| {
            // Without enforced rules nothing is verified any more.
            let found = tracked.effect.ineffective();
            let (rule, observed) = found.filter(|(rule, _)| is_enforced(rule))?;
            Some((&tracked.pod.uid, rule, observed))
        })
    }

    /// Restores throttles step by step, acts for breached rules, and works out what Preview rules would do.
    fn act(&mut self, sample: &Sample, plan: &mut Plan) {
        standing::give_bursts(&mut self.pods, self.now, &mut plan.transitions);
        let ctx = RoundContext {
            now: self.now,
            sample,
            pods: &self.pods,
            period: self.schedule.period,
            unknown_limit: self.unknown_limit,
            forecast: &self.forecast,
            idle_is_safe: !self.is_idle_unsafe(),
        };
        let out = &mut plan.transitions;
        self.enforced_buffers.begin(&ctx);
        for run in &mut self.runs {
            run.track_release(self.now, &self.ledger);
        }
        for (preview, ledger) in [
            (false, &mut self.ledger),
            (true, &mut self.standing_preview),
        ] {
            StandingPass { ctx, preview, out }.run(ledger);
        }
        RestorePass { ctx, out }.run(&self.runs, &mut self.ledger);
        let round = Round {
            ctx,
            buffers: &mut self.enforced_buffers,
            ledger: &mut self.ledger,
            rounds: &mut self.rounds,
            removed: &[],
            enforced: None,
            out,
        };
        round.run(&mut self.runs);
        plan.reclaims.append(&mut self.enforced_buffers.reclaims);
        plan.evictions.append(&mut self.enforced_buffers.evictions);
        let mut pass = PreviewPass {
            ctx,
            enforced: Enforced {
                ledger: &self.ledger,
                rounds: &self.rounds,
            },
            enforced_buffers: &self.enforced_buffers,
            buffers: &mut self.preview_buffers,
            out,
        };
        for run in self.runs.iter_mut().filter(|run| run.is_preview()) {
            pass.run(run);
        }
        for reclaim in &plan.reclaims {
            if let Some(tracked) = self.pods.get_mut(&reclaim.uid) {
                tracked.reclaimed = Some(self.now);
            }
        }
    }

    /// Writes the desired scheduling state and throttles.
    fn write_desired_state(&mut self, plan: &mut Plan) {
        let out = &mut plan.transitions;
        out.extend(self.removed_disabling.drain(..).map(|rule| Transition {
            at: self.now,
            rule,
            would: false,
            change: PlanChange::SchedulingEnabled,
        }));
        scheduling::report_changes(self.now, &mut self.runs, out);
        self.scheduling_known |= scheduling::all_known(&self.runs);
        scheduling::write_desired(&self.runs, self.scheduling_known, &mut plan.scheduling);
        let mut count = 0;
        let idle_unsafe = self.is_idle_unsafe();
        let has_burst = |it: &Tracked| it.bursts[0].is_some();
        if !self.ledger.0.is_empty() || self.pods.all().iter().any(has_burst) {
            for index in &self.enforced_buffers.orders[RankBy::Cpu as usize] {
                let view = InForce {
                    tracked: &self.pods.all()[*index],
                    now: self.now,
                    idle_unsafe,
                };
                count += usize::from(self.ledger.write(&view, count, &mut plan.throttles));
            }
        }
        plan.throttles.truncate(count);
    }

    /// The current state of the rules, ordered by ID.
    pub fn reports(&self) -> impl Iterator<Item = RuleReport> {
        let next_due = self.schedule.next_due.unwrap_or(self.now);
        let of = move |run| RuleReport::of(run, next_due, self.schedule.period);
        self.runs.iter().map(of)
    }
}
