//! How a rule's next action on pods is chosen: a rule that is Breached has one position on the ladder of [`Rung`]s, and goes on
//! to the next rung only when nothing more can be done on this one and that did not help.
//!
//! ```text
//!  input above the threshold? ── no ──► nothing is stepped
//!        │ yes
//!  step on the rung possible? ── yes ─► one step; its effect must show in later evaluations
//!        │ no, twice in a row
//!  input above in two evaluations that began after the last step? ── yes ──► next rung
//! ```
//! One file for each rung; [`round`] walks them.

mod evict;
mod forecast;
mod idle;
mod quota;
mod reclaim;
mod restore;
mod round;
mod victim;

use serde::{Deserialize, Serialize};

pub(super) use self::evict::{Evictions, PendingEviction, Rounds};
pub(super) use self::forecast::MemoryForecast;
pub(super) use self::restore::{RestorePass, next_due_after};
pub(super) use self::round::{Buffers, Enforced, Round, RoundContext};
pub(super) use self::victim::{cpu_used, unreclaimable_memory};

use super::ledger::{Depth, FULL_RATIO};
use super::metric::{ActionKind, Metric, Protected, Resource, Rung, RungUse};
use super::pod::PodUid;
use super::policy::Rule;
use super::time::BootTime;
use super::values::Input;

/// Evaluations in a row without a possible step, after which a rung is exhausted.
const STUCK_LIMIT: u8 = 2;
/// Evaluations, measured after the last step, that must still be above the threshold before the next rung.
const ABOVE_LIMIT: u8 = 2;
/// Reclaims end after this many evaluations.
const MAX_RECLAIMS: u8 = 3;

/// What a rung did in one evaluation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// At least one step was taken.
    Stepped,
    /// No step was possible on any pod.
    Stuck,
    /// There is nothing more to do on it, whatever comes.
    Exhausted,
    /// It has no victims at all.
    Empty,
}

/// The position of one rule. Saved over restarts; the default is the start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Ladder {
    pub(super) rung: Rung,
    /// How far its victims are throttled: newcomers join there.
    pub(super) depth: Depth,
    /// The time of the sample after which its last step was taken.
    pub(super) stepped: Option<BootTime>,
    /// Evaluations in a row in which no step was possible on the rung.
    stuck: u8,
    /// Evaluations in a row with an input above the threshold, measured after the last step.
    above: u8,
    /// The pods reclaimed from since the rung was entered.
    reclaimed: Vec<PodUid>,
    /// Evaluations with a reclaim.
    reclaims: u8,
    /// Whether evictions lower the input.
    pub(super) evictions: Evictions,
}

impl Ladder {
    /// The position after a relapse: where it was before the release, but evictions have to be reached again.
    pub(super) fn resume(&mut self, rule: &Rule, before: (Rung, Depth), now: BootTime) {
        let reversible = Rung::ALL.into_iter().rev();
        let last = reversible
            .skip_while(|rung| *rung == Rung::Eviction)
            .find(|rung| rule.rung(*rung) != RungUse::Unused);
        *self = Self {
            rung: last.map_or(before.0, |last| before.0.min(last)),
            depth: before.1,
            stepped: Some(now),
            ..Self::default()
        };
    }

    /// Back to the first rung; what is in force stays.
    pub(super) fn start_over(&mut self) {
        *self = Self {
            depth: self.depth,
            ..Self::default()
        };
    }

    /// Whether the input was measured after the last step.
    fn is_shown(&self, input: Input) -> bool {
        self.stepped.is_none_or(|stepped| input.from > stepped)
    }

    /// Counts an evaluation of the input.
    fn observe(&mut self, input: Input) {
        if !input.above {
            self.above = 0;
        } else if self.is_shown(input) {
            self.above = self.above.saturating_add(1);
        }
    }

    /// Records a step, whose effect has to show before the next rung.
    fn step(&mut self, at: BootTime) {
        self.stepped = Some(at);
        self.stuck = 0;
        self.above = 0;
    }

    /// Records that no step was possible; whether the rule goes on.
    fn is_finished(&mut self, outcome: Outcome) -> bool {
        self.stuck = match outcome {
            Outcome::Exhausted => STUCK_LIMIT,
            _ => self.stuck.saturating_add(1),
        };
        self.stuck >= STUCK_LIMIT && self.above >= ABOVE_LIMIT
    }

    fn enter(&mut self, rung: Rung) {
        self.rung = rung;
        self.stuck = 0;
        self.reclaimed.clear();
        self.reclaims = 0;
    }

    /// Evaluations until the first eviction, if the input stays above the threshold: the next evaluation is 1. `None` if it
    /// does not come to evictions.
    pub(super) fn evaluations_to_eviction(&self, rule: &Rule) -> Option<u32> {
        if rule.rung(Rung::Eviction) == RungUse::Unused || self.evictions.have_ended() {
            return None;
        }
        let rungs = Rung::ALL.into_iter().filter(|rung| *rung >= self.rung);
        let left = rungs.map(|rung| self.evaluations_on(rule, rung)).sum();
        Some(left)
    }

    fn evaluations_on(&self, rule: &Rule, rung: Rung) -> u32 {
        // The step itself, one evaluation that measures it only in part, and two that began after it.
        const SETTLING: u32 = 2;
        if rung == Rung::Eviction || rule.rung(rung) == RungUse::Unused {
            return u32::from(rung == Rung::Eviction);
        }
        let steps = match (rung, rule.action.throttle) {
            (Rung::CpuQuota, Some(spec)) => {
                let missing = self.depth.ratio.saturating_sub(spec.min_ratio);
                u32::from(missing.div_ceil(spec.step.max(1)))
            }
            (Rung::IdleClass, _) => u32::from(!self.depth.idle),
            _ => u32::from(self.reclaims == 0),
        };
        let waited = if rung == self.rung && steps == 0 {
            u32::from(self.stuck)
        } else {
            0
        };
        (steps + SETTLING).saturating_sub(waited)
    }
}

impl Rule {
    /// How the rule uses the rung: as its metric does, where its action has it.
    pub fn rung(&self, rung: Rung) -> RungUse {
        let throttle = self.action.throttle;
        let has = match rung {
            Rung::IdleClass => throttle.is_some_and(|spec| spec.idle),
            Rung::CpuQuota => throttle.is_some_and(|spec| spec.min_ratio < FULL_RATIO),
            Rung::PageCache => self.action.force_gc,
            Rung::Eviction => self.action.eviction.is_some(),
        };
        if has {
            self.metric.rung(rung)
        } else {
            RungUse::Unused
        }
    }

    /// The first rung after `rung` that the rule uses.
    pub fn rung_after(&self, rung: Rung) -> Option<Rung> {
        let mut later = Rung::ALL.into_iter().filter(|it| *it > rung);
        later.find(|it| self.rung(*it) != RungUse::Unused)
    }

    /// Whether the rule does anything of that kind to pods.
    pub fn uses(&self, kind: ActionKind) -> bool {
        let mut rungs = Rung::ALL.into_iter().filter(|rung| rung.kind() == kind);
        rungs.any(|rung| self.rung(rung) != RungUse::Unused)
    }

    /// Evaluations from the one at which it is Breached to the first possible eviction, if the input stays above the
    /// threshold; 0 if it evicts at that one, `None` if it never evicts.
    pub fn evaluations_to_eviction(&self) -> Option<u32> {
        let left = Ladder::default().evaluations_to_eviction(self)?;
        Some(left.saturating_sub(1))
    }

    /// Whether it may evict before its position says so, where memory is about to run out.
    pub fn may_be_urgent(&self) -> bool {
        let is_memory = self.metric.resource() == Some(Resource::Memory)
            || self.metric == Metric::Protected(Protected::MemoryStallMax);
        is_memory && self.uses(ActionKind::Eviction)
    }
}
