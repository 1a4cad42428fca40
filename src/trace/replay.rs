//! Runs policies over a trace: the same [`Engine::step`] over the samples that were taken, every rule as a Preview,
//! so that each carries the effects that it would have had from round to round.

use std::collections::{BTreeMap, BTreeSet};
use std::io::BufRead;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::read::{Reader, TraceError};
use super::{Header, Line, Tick};
use crate::engine::Engine;
use crate::engine::plan::{Change, Plan, RuleState, Transition};
use crate::engine::pod::{Pod, PodUid};
use crate::engine::policy::{PolicySet, RuleId, Strategy};
use crate::engine::time::BootTime;
use crate::ordered;

/// A replay under way.
#[derive(Debug)]
pub struct Replay<R> {
    reader: Reader<R>,
    engine: Engine,
    policy: Arc<PolicySet>,
    pods: BTreeMap<PodUid, Arc<Pod>>,
    tick: Tick,
    plan: Plan,
    summary: Summary,
}

/// The same set with every rule as a Preview.
pub fn as_preview(mut policy: PolicySet) -> PolicySet {
    for rule in &mut policy.rules {
        rule.strategy = Strategy::Preview;
    }
    policy
}

impl<R: BufRead> Replay<R> {
    /// Opens a trace and runs the policies that `compile` makes for its node, none of them in earnest.
    ///
    /// # Errors
    /// Where `input` is no trace.
    pub fn open(
        input: R,
        compile: impl FnOnce(&Header) -> PolicySet,
    ) -> Result<(Header, Self), TraceError> {
        let (header, reader) = Reader::open(input)?;
        let policy = Arc::new(as_preview(compile(&header)));
        let mut engine = Engine::new();
        engine.set_policy(Arc::clone(&policy));
        let replay = Self {
            reader,
            engine,
            summary: Summary::of(&policy),
            policy,
            pods: BTreeMap::new(),
            tick: Tick::default(),
            plan: Plan::default(),
        };
        Ok((header, replay))
    }

    /// Goes on to the next sample; false at the end.
    ///
    /// # Errors
    /// Where the trace is broken from here on.
    pub fn step(&mut self) -> Result<bool, TraceError> {
        loop {
            match self.reader.read()? {
                None => return Ok(false),
                Some(Line::Pods(pods)) => self.set_pods(pods),
                Some(Line::Tick(tick)) => {
                    self.take(*tick);
                    return Ok(true);
                }
                Some(Line::Header(_) | Line::Transition(_)) => {}
            }
        }
    }

    fn set_pods(&mut self, pods: Vec<Arc<Pod>>) {
        self.pods = ordered::map(pods.iter().map(|pod| (pod.uid.clone(), Arc::clone(pod))));
        self.engine.set_pods(pods);
    }

    fn take(&mut self, tick: Tick) {
        self.tick = tick;
        self.engine
            .step(self.tick.now, &self.tick.sample, &mut self.plan);
        let told = if self.plan.evaluated {
            self.plan.transitions.as_slice()
        } else {
            &[]
        };
        self.summary.count(self.tick.now, told);
    }

    /// The last sample and its time.
    pub const fn tick(&self) -> &Tick {
        &self.tick
    }

    /// What the engine made of it.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What changed at the last sample.
    pub fn transitions(&self) -> &[Transition] {
        if self.plan.evaluated {
            &self.plan.transitions
        } else {
            &[]
        }
    }

    /// The policies that are run.
    pub fn policy(&self) -> &PolicySet {
        &self.policy
    }

    /// A pod of the trace, as it was last.
    pub fn pod(&self, uid: &PodUid) -> Option<&Pod> {
        self.pods.get(uid).map(AsRef::as_ref)
    }

    /// What has come of it so far.
    pub fn summary(&self) -> Summary {
        let mut summary = self.summary.clone();
        for rule in summary.rules.values_mut() {
            rule.close(self.tick.now);
        }
        summary
    }
}

/// What would have happened over a whole trace.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
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
    /// How often it went over its mark for long enough to act.
    pub breaches: u64,
    /// Time in Breached and Cooling.
    pub in_force: Duration,
    /// Throttle steps down.
    pub steps_down: u64,
    /// Throttle steps up.
    pub steps_up: u64,
    /// The pods that would have been throttled, evicted or reclaimed from.
    pub pods: BTreeSet<PodUid>,
    /// Evictions wanted.
    pub evictions: u64,
    /// Reclaims of page cache wanted.
    pub reclaims: u64,
    /// Time in which it would have kept new work away.
    pub scheduling_disabled: Duration,
    /// Its state at the end.
    pub state: RuleState,
    #[serde(skip)]
    in_force_since: Option<BootTime>,
    #[serde(skip)]
    disabled_since: Option<BootTime>,
}

impl Summary {
    fn of(policy: &PolicySet) -> Self {
        let rules = policy.rules.iter();
        Self {
            rules: ordered::map(rules.map(|rule| (rule.id.clone(), RuleSummary::default()))),
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
    fn count(&mut self, at: BootTime, change: &Change) {
        match change {
            Change::State { from, to, .. } => self.enter(at, *from, *to),
            Change::Throttle { pod, from, to, .. } => {
                self.pods.insert(pod.clone());
                self.steps_down += u64::from(to < from);
                self.steps_up += u64::from(to > from);
            }
            Change::Evict { pod, .. } => {
                self.pods.insert(pod.clone());
                self.evictions += 1;
            }
            Change::Reclaim { pod, .. } => {
                self.pods.insert(pod.clone());
                self.reclaims += 1;
            }
            Change::SchedulingDisabled { .. } => {
                self.disabled_since.get_or_insert(at);
            }
            Change::SchedulingEnabled => {
                let since = self.disabled_since.take();
                self.scheduling_disabled += since.map_or(Duration::ZERO, |since| at.since(since));
            }
            Change::Unknown { .. } | Change::Known { .. } | Change::Spared { .. } => {}
        }
    }

    fn enter(&mut self, at: BootTime, from: RuleState, to: RuleState) {
        self.state = to;
        self.breaches += u64::from(from == RuleState::Normal && to == RuleState::Breached);
        if to == RuleState::Normal {
            let since = self.in_force_since.take();
            self.in_force += since.map_or(Duration::ZERO, |since| at.since(since));
        } else {
            self.in_force_since.get_or_insert(at);
        }
    }

    /// Counts what is still going on, up to `now`.
    fn close(&mut self, now: BootTime) {
        for (since, total) in [
            (self.in_force_since.take(), &mut self.in_force),
            (self.disabled_since.take(), &mut self.scheduling_disabled),
        ] {
            *total += since.map_or(Duration::ZERO, |since| now.since(since));
        }
    }
}
