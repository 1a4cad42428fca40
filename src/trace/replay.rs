//! Runs policies over the samples of a trace with [`Engine::step`]. Every rule is a Preview, so that its estimated
//! effects carry over from round to round.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::read::{Reader, TraceError};
use super::{Tick, TraceHeader, TraceLine};
use crate::engine::Engine;
use crate::engine::plan::{Plan, PlanChange, RuleState, Transition};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{PolicySet, RuleId};
use crate::engine::time::BootTime;
use crate::engine::window::CustomWindow;

/// A running replay.
#[derive(Debug)]
pub struct Replay<R> {
    header: TraceHeader,
    reader: Reader<R>,
    engine: Engine,
    policy: Arc<PolicySet>,
    pods: BTreeMap<PodUid, Arc<Pod>>,
    tick: Tick,
    plan: Plan,
    summary: TraceSummary,
}

impl<R: BufRead> Replay<R> {
    /// Opens a trace to run the policies that `compile` returns for its node, as previews, with these windows, and evaluated every
    /// `period` or as they were.
    ///
    /// # Errors
    /// Where `input` is not a trace.
    pub fn open(
        input: R,
        windows: Arc<[CustomWindow]>,
        period: Option<Duration>,
        compile: impl FnOnce(&TraceHeader) -> PolicySet,
    ) -> Result<(TraceHeader, Self), TraceError> {
        let (header, reader) = Reader::open(input)?;
        let policy = Arc::new(compile(&header).as_preview());
        let period = period.unwrap_or_else(|| header.period());
        let mut engine = Engine::new().with_period(period);
        engine.set_windows(windows);
        engine.set_policy(Arc::clone(&policy));
        let replay = Self {
            header: header.clone(),
            reader,
            engine,
            summary: TraceSummary::of(&policy),
            policy,
            pods: BTreeMap::new(),
            tick: Tick::default(),
            plan: Plan::default(),
        };
        Ok((header, replay))
    }

    /// Evaluates the next sample; false at the end.
    ///
    /// # Errors
    /// Where the rest of the trace cannot be read.
    pub fn step(&mut self) -> Result<bool, TraceError> {
        loop {
            match self.reader.read()? {
                None => return Ok(false),
                Some(TraceLine::Pods(pods)) => self.set_pods(pods),
                Some(TraceLine::Tick(tick)) => {
                    self.evaluate(*tick);
                    return Ok(true);
                }
                Some(TraceLine::Header(_) | TraceLine::Transition(_)) => {}
            }
        }
    }

    fn set_pods(&mut self, pods: Vec<Arc<Pod>>) {
        self.pods = pods
            .iter()
            .map(|pod| (pod.uid.clone(), Arc::clone(pod)))
            .collect::<BTreeMap<_, _>>();
        self.engine.set_pods(pods);
    }

    fn evaluate(&mut self, mut tick: Tick) {
        // Traces of versions before `activeDuring` have no time in their samples.
        let time = self.header.wall_time(tick.now);
        tick.sample.time.get_or_insert(time);
        self.tick = tick;
        self.engine
            .step(self.tick.now, &self.tick.sample, &mut self.plan);
        let transitions = if self.plan.evaluated {
            self.plan.transitions.as_slice()
        } else {
            &[]
        };
        self.summary.count(self.tick.now, transitions);
    }

    /// The last sample and its time.
    pub const fn tick(&self) -> &Tick {
        &self.tick
    }

    /// The engine's plan for it.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The transitions at the last sample.
    pub fn transitions(&self) -> &[Transition] {
        if self.plan.evaluated {
            &self.plan.transitions
        } else {
            &[]
        }
    }

    /// The replayed policies.
    pub fn policy(&self) -> &PolicySet {
        &self.policy
    }

    /// A pod of the trace in its latest version.
    pub fn pod(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.get(uid).map(AsRef::as_ref)
    }

    /// The summary so far.
    pub fn summary(&self) -> TraceSummary {
        let mut summary = self.summary.clone();
        for rule in summary.rules.values_mut() {
            rule.close(self.tick.now);
        }
        summary
    }
}

/// What the policies would have done over a trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceSummary {
    /// Samples replayed.
    pub samples: u64,
    /// From the first sample to the last.
    pub span: Duration,
    /// By rule.
    pub rules: BTreeMap<RuleId, RuleSummary>,
    #[serde(skip)]
    first: Option<BootTime>,
}

/// What one rule would have done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleSummary {
    /// How often it was above its threshold for long enough to act.
    pub breaches: u64,
    /// Time in Breached and Cooling.
    pub in_force: Duration,
    /// Throttle steps down.
    pub steps_down: u64,
    /// Throttle steps up.
    pub steps_up: u64,
    /// The pods that would have been throttled, evicted or reclaimed from.
    pub pods: BTreeSet<PodUid>,
    /// Evictions requested.
    pub evictions: u64,
    /// Reclaims of page cache requested.
    pub reclaims: u64,
    /// Time in which it would not have allowed new work.
    pub scheduling_disabled: Duration,
    /// Its state at the end.
    pub state: RuleState,
    #[serde(skip)]
    in_force_since: Option<BootTime>,
    #[serde(skip)]
    disabled_since: Option<BootTime>,
}

impl TraceSummary {
    fn of(policy: &PolicySet) -> Self {
        let rules = policy.rules.iter();
        Self {
            rules: rules
                .map(|rule| (rule.id.clone(), RuleSummary::default()))
                .collect::<BTreeMap<_, _>>(),
            ..Self::default()
        }
    }

    fn count(&mut self, now: BootTime, transitions: &[Transition]) {
        let first = *self.first.get_or_insert(now);
        self.samples += 1;
        self.span = now.since(first);
        for transition in transitions {
            let rule = self.rules.entry(transition.rule.clone()).or_default();
            rule.count(transition.at, &transition.change);
        }
    }
}

impl RuleSummary {
    fn count(&mut self, at: BootTime, change: &PlanChange) {
        match change {
            PlanChange::State { from, to, .. } => self.enter_state(at, *from, *to),
            PlanChange::Throttle { pod, from, to, .. } => {
                self.pods.insert(pod.clone());
                self.steps_down += u64::from(to < from);
                self.steps_up += u64::from(to > from);
            }
            PlanChange::Evict { pod, .. } => {
                self.pods.insert(pod.clone());
                self.evictions += 1;
            }
            PlanChange::Reclaim { pod, .. } => {
                self.pods.insert(pod.clone());
                self.reclaims += 1;
            }
            PlanChange::SchedulingDisabled { .. } => {
                self.disabled_since.get_or_insert(at);
            }
            PlanChange::SchedulingEnabled => {
                let since = self.disabled_since.take();
                self.scheduling_disabled += since.map_or(Duration::ZERO, |since| at.since(since));
            }
            PlanChange::Burst { .. }
            | PlanChange::Unknown { .. }
            | PlanChange::Known { .. }
            | PlanChange::Ineffective { .. }
            | PlanChange::Effective { .. }
            | PlanChange::OutsideHours
            | PlanChange::WithinHours
            | PlanChange::EvictionsEnded { .. }
            | PlanChange::Skipped { .. } => {}
        }
    }

    fn enter_state(&mut self, at: BootTime, from: RuleState, to: RuleState) {
        self.state = to;
        self.breaches += u64::from(from == RuleState::Normal && to == RuleState::Breached);
        if to == RuleState::Normal {
            let since = self.in_force_since.take();
            self.in_force += since.map_or(Duration::ZERO, |since| at.since(since));
        } else {
            self.in_force_since.get_or_insert(at);
        }
    }

    /// Adds what is still in force, up to `now`.
    fn close(&mut self, now: BootTime) {
        for (since, total) in [
            (self.in_force_since.take(), &mut self.in_force),
            (self.disabled_since.take(), &mut self.scheduling_disabled),
        ] {
            *total += since.map_or(Duration::ZERO, |since| now.since(since));
        }
    }
}
