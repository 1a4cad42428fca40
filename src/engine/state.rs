//! The engine state that is persisted across restarts.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Engine;
use super::ladder::{Ladder, PendingEviction, Rounds};
use super::ledger::{Claim, Depth, FULL_RATIO, ThrottleEntry, ThrottledCgroup};
use super::pod::PodUid;
use super::policy::RuleId;
use super::rule::RuleMachine;
use super::run::{Run, counter_key};
use super::scheduling;
use super::standing::Burst;
use super::time::BootTime;
use super::units::{MilliCpu, Quota};
use super::values::GAP_PERIODS;
use super::would::WouldHistory;

/// Restore step, in percent of the base, of a claim that is not in the saved state.
const DEFAULT_STEP: u8 = 10;

/// The state persisted across restarts, next to the journal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineState {
    saved_at: Option<BootTime>,
    rules: Vec<SavedRule>,
    claims: Vec<SavedClaim>,
    rounds: Vec<PendingEviction>,
    /// When the last round of evictions settled.
    settled: Option<BootTime>,
    /// Pods whose eviction was refused, and when it may be retried.
    refused: Vec<(PodUid, BootTime)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedRule {
    rule: RuleId,
    preview: bool,
    /// Identifies what the counters count.
    #[serde(default, rename = "marks")]
    counter_key: String,
    #[serde(flatten)]
    machine: RuleMachine,
    #[serde(default)]
    ladder: Ladder,
    #[serde(default, skip_serializing_if = "WouldHistory::is_new")]
    would: WouldHistory,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedClaim {
    pod: PodUid,
    rule: RuleId,
    ratio: u8,
    idle: bool,
    step: u8,
    #[serde(default, rename = "fast", skip_serializing_if = "std::ops::Not::not")]
    is_fast: bool,
    /// Set when no rule needs it any more: when its next step up is due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    retired: Option<BootTime>,
}

/// A throttle that the journal shows in force at the start.
#[derive(Clone, Debug, PartialEq)]
pub struct AdoptedThrottle {
    /// Pod UID.
    pub uid: PodUid,
    /// The rule that caused it.
    pub rule: RuleId,
    /// Percent of the base.
    pub ratio: u8,
    /// Idle class.
    pub idle: bool,
    /// The burst that it was given; 0: none.
    pub burst: MilliCpu,
    /// Each cgroup with its base and its original. Empty if it only has a burst.
    pub target_cgroups: Vec<(Arc<str>, MilliCpu, Quota)>,
}

impl EngineState {
    /// What is left of it after a reboot: only what Preview rules would have done.
    #[must_use]
    pub fn after_reboot(self) -> Self {
        let rule = |saved: SavedRule| SavedRule {
            machine: RuleMachine::default(),
            ladder: Ladder::default(),
            ..saved
        };
        Self {
            rules: self.rules.into_iter().map(rule).collect(),
            ..Self::default()
        }
    }
}

impl Engine {
    /// The state to persist across a restart.
    pub fn state(&self) -> EngineState {
        let rule = |run: &Run| SavedRule {
            rule: run.rule.id.clone(),
            preview: run.is_preview(),
            counter_key: counter_key(&run.rule),
            machine: run.machine,
            ladder: run.ladder.clone(),
            would: run.would.clone(),
        };
        let refused = self.pods.all().iter();
        let refused = refused.filter_map(|t| Some((t.pod.uid.clone(), t.eviction_blocked_until?)));
        EngineState {
            saved_at: Some(self.now),
            rules: self.runs.iter().map(rule).collect(),
            claims: self.ledger.0.iter().flat_map(saved_claims).collect(),
            rounds: self.rounds.pending().to_vec(),
            settled: self.rounds.settled(),
            refused: refused.collect(),
        }
    }

    /// Resumes from the state of the last process of the same boot. Call it after [`Self::set_policy`] and
    /// [`Self::set_pods`]. The journal is authoritative for bases and originals. Throttles of removed rules are restored;
    /// those of pods that are gone are not in the next plan. After an absence of more than three periods a rule disables
    /// scheduling again only once it is breached again.
    pub fn adopt(&mut self, now: BootTime, state: &EngineState, throttles: &[AdoptedThrottle]) {
        let absence = state.saved_at.map_or(Duration::ZERO, |at| now.since(at));
        self.schedule.resume(state.saved_at);
        let is_long = absence > self.schedule.period.saturating_mul(GAP_PERIODS);
        for saved in &state.rules {
            let same =
                |run: &&mut Run| run.rule.id == saved.rule && run.is_preview() == saved.preview;
            if let Some(run) = self.runs.iter_mut().find(same) {
                run.machine = saved.machine;
                run.ladder = saved.ladder.clone();
                run.would = saved.would.clone();
                run.machine.outdated |= is_long && run.machine.in_force();
                if counter_key(&run.rule) != saved.counter_key {
                    run.start_over();
                }
                // The actions of a Preview are not persisted, so they are reported again.
                run.disables_scheduling = !run.is_preview() && scheduling::effect(run).is_some();
            }
        }
        self.rounds = Rounds::resume(&state.rounds, state.settled);
        for (uid, until) in &state.refused {
            if let Some(tracked) = self.pods.get_mut(uid) {
                tracked.eviction_blocked_until = Some(*until);
            }
        }
        for throttle in throttles {
            self.adopt_burst(throttle);
            if throttle.idle || throttle.ratio < FULL_RATIO {
                self.adopt_throttle(state, throttle);
            }
        }
        self.scheduling_known = false;
        self.dirty = true;
        self.reconcile();
    }

    /// The journal does not say which `PodQOS` gave the burst, if a rule acts on the pod, too: it is the one that gives it now.
    fn adopt_burst(&mut self, throttle: &AdoptedThrottle) {
        let Some(tracked) = self.pods.get_mut(&throttle.uid) else {
            return;
        };
        let [enforced, _] = &tracked.standing;
        let same = enforced
            .burst
            .clone()
            .filter(|it| it.amount == throttle.burst);
        let other = (throttle.burst > MilliCpu::ZERO).then(|| Burst {
            rule: throttle.rule.clone(),
            amount: throttle.burst,
        });
        tracked.bursts[0] = same.or(other);
    }

    fn adopt_throttle(&mut self, state: &EngineState, throttle: &AdoptedThrottle) {
        let target_cgroups = || {
            // A standing idle class has no base.
            let measured = throttle.target_cgroups.iter();
            let measured = measured.filter(|(_, base, _)| *base > MilliCpu::ZERO);
            measured.map(throttled_cgroup).collect()
        };
        let entry = self.ledger.get_or_insert(&throttle.uid, target_cgroups);
        for saved in state.claims.iter().filter(|c| c.pod == throttle.uid) {
            entry.set_claim(saved.claim());
        }
        let known = entry.claim(&throttle.rule);
        entry.set_claim(Claim {
            rule: throttle.rule.clone(),
            depth: Depth {
                ratio: throttle.ratio.min(100),
                idle: throttle.idle,
            },
            before: Depth::NONE,
            step: known.map_or(DEFAULT_STEP, |claim| claim.step),
            is_fast: known.is_some_and(|claim| claim.is_fast),
            retired: known.and_then(|claim| claim.retired),
        });
        for claim in &mut entry.claims {
            claim.before = claim.depth;
        }
    }
}

fn throttled_cgroup((cgroup, base, original): &(Arc<str>, MilliCpu, Quota)) -> ThrottledCgroup {
    ThrottledCgroup::new(Arc::clone(cgroup), *base, *original)
}

fn saved_claims(entry: &ThrottleEntry) -> impl Iterator<Item = SavedClaim> {
    entry.claims.iter().map(|claim| SavedClaim {
        pod: entry.uid.clone(),
        rule: claim.rule.clone(),
        ratio: claim.depth.ratio,
        idle: claim.depth.idle,
        step: claim.step,
        is_fast: claim.is_fast,
        retired: claim.retired,
    })
}

impl SavedClaim {
    fn claim(&self) -> Claim {
        Claim {
            rule: self.rule.clone(),
            depth: Depth {
                ratio: self.ratio.min(100),
                idle: self.idle,
            },
            before: Depth::NONE,
            step: self.step.max(1),
            is_fast: self.is_fast,
            retired: self.retired,
        }
    }
}
