//! The state machine of one rule.
//!
//! ```text
//! Normal ──avoidance threshold consecutive breaches──► Breached ──restore threshold consecutive quiet──► Cooling
//!   ▲                                                    ▲                                                  │
//!   └──────── cool-down after the last breach ◄──────────┬──────────────────────────────────────────────────┘
//!                                                        └── a breach while Cooling ┘
//! ```
//! Outside its hours it is Normal at once.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::plan::{RuleState, Unknown};
use super::policy::Rule;
use super::time::BootTime;

/// The result of evaluating a rule's metric once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Evaluation {
    /// No usable value.
    Unknown(Unknown),
    /// The value; with several series, the largest.
    Known {
        value: f64,
        /// Above the threshold.
        breach: bool,
        /// Every series is known to be at or below the restore value.
        quiet: bool,
        /// Why one series has no value, if no other is above the threshold.
        incomplete: Option<Unknown>,
    },
    /// Outside the hours of the rule, with its value if known.
    OutsideHours(Option<f64>),
}

impl Evaluation {
    pub(super) const fn value(self) -> Option<f64> {
        match self {
            Self::Known { value, .. } => Some(value),
            Self::Unknown(_) => None,
            Self::OutsideHours(value) => value,
        }
    }

    pub(super) const fn unknown(self) -> Option<Unknown> {
        match self {
            Self::Unknown(reason) => Some(reason),
            Self::Known { .. } | Self::OutsideHours(_) => None,
        }
    }

    pub(super) const fn breach(self) -> bool {
        matches!(self, Self::Known { breach: true, .. })
    }

    pub(super) const fn quiet(self) -> bool {
        matches!(self, Self::Known { quiet: true, .. })
    }

    pub(super) const fn outside_hours(self) -> bool {
        matches!(self, Self::OutsideHours(_))
    }
}

/// The counts and times that drive the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Params {
    pub(super) avoidance_threshold: u32,
    pub(super) restore_threshold: u32,
    pub(super) cool_down: Duration,
    /// A breach within this time of a release is a relapse: the cool-down, but at least two evaluations.
    pub(super) relapse_window: Duration,
    /// After being Unknown this long, what its actions changed is restored.
    pub(super) unknown_limit: Duration,
}

/// The cool-down grows to at most 8 times its length.
const MAX_DOUBLINGS: u8 = 3;

impl Params {
    pub(super) fn of(rule: &Rule, period: Duration, unknown_limit: Duration) -> Self {
        Self {
            avoidance_threshold: rule.avoidance_threshold,
            restore_threshold: rule.restore_threshold,
            cool_down: rule.action.cool_down,
            relapse_window: rule.action.cool_down.max(period * 2),
            unknown_limit,
        }
    }
}

/// One state change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StateChange {
    pub(super) from: RuleState,
    pub(super) to: RuleState,
    pub(super) unknown_too_long: bool,
    /// A breach shortly after a release: what was released is throttled again immediately.
    pub(super) relapse: bool,
}

/// State and counters. Persisted across restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct RuleMachine {
    pub(super) state: RuleState,
    pub(super) since: Option<BootTime>,
    pub(super) breaches: u32,
    #[serde(rename = "quiets")]
    pub(super) quiet_evaluations: u32,
    pub(super) last_breach: Option<BootTime>,
    pub(super) unknown_since: Option<BootTime>,
    /// When a throttle of the rule was last released by a step.
    pub(super) released: Option<BootTime>,
    /// How many times the cool-down is doubled, because the breach returned right after earlier releases.
    pub(super) doublings: u8,
    /// In force since before a long absence of the agent, and not breached again yet: it says nothing about scheduling.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(super) outdated: bool,
}

impl RuleMachine {
    /// Processes one evaluation and calls `on_change` for each state change: at most two, since Cooling ends in the
    /// same evaluation if the cool-down has already expired.
    pub(super) fn observe(
        &mut self,
        now: BootTime,
        evaluation: Evaluation,
        params: &Params,
        mut on_change: impl FnMut(StateChange),
    ) {
        self.since.get_or_insert(now);
        if evaluation.outside_hours() {
            return self.leave_hours(now, on_change);
        }
        let Evaluation::Known {
            breach,
            quiet,
            incomplete: None,
            ..
        } = evaluation
        else {
            return self.observe_unknown(now, params, on_change);
        };
        self.unknown_since = None;
        if breach {
            return self.breach(now, params, on_change);
        }
        if quiet {
            self.quiet(now, params, &mut on_change);
        }
        let cool_down = self.cool_down(params.cool_down);
        let has_cooled_down = |at: BootTime| now.since(at) >= cool_down;
        if self.state == RuleState::Cooling && self.last_breach.is_none_or(has_cooled_down) {
            self.reset_counters();
            on_change(self.enter(now, RuleState::Normal));
        }
    }

    /// The effective cool-down, for an action with this `cool_down`.
    pub(super) const fn cool_down(&self, cool_down: Duration) -> Duration {
        cool_down.saturating_mul(1 << self.doublings)
    }

    /// Whether the metric has been Unknown for so long that what the actions changed must be restored.
    pub(super) fn unknown_too_long(&self, now: BootTime, limit: Duration) -> bool {
        self.unknown_since
            .is_some_and(|since| now.since(since) >= limit)
    }

    /// Whether the rule's actions are in force: Breached or Cooling.
    pub(super) fn in_force(&self) -> bool {
        self.state != RuleState::Normal
    }

    /// Resets the counters; the state stays.
    pub(super) const fn reset_counters(&mut self) {
        self.breaches = 0;
        self.quiet_evaluations = 0;
    }

    /// Its hours are over, which says nothing about the load: the next breach is no relapse.
    fn leave_hours(&mut self, now: BootTime, mut on_change: impl FnMut(StateChange)) {
        self.unknown_since = None;
        self.released = None;
        self.reset_counters();
        if self.in_force() {
            on_change(self.enter(now, RuleState::Normal));
        }
    }

    fn observe_unknown(
        &mut self,
        now: BootTime,
        params: &Params,
        mut on_change: impl FnMut(StateChange),
    ) {
        self.unknown_since.get_or_insert(now);
        if self.in_force() && self.unknown_too_long(now, params.unknown_limit) {
            self.reset_counters();
            let mut change = self.enter(now, RuleState::Normal);
            change.unknown_too_long = true;
            on_change(change);
        }
    }

    fn breach(&mut self, now: BootTime, params: &Params, mut on_change: impl FnMut(StateChange)) {
        self.last_breach = Some(now);
        self.quiet_evaluations = 0;
        self.breaches = self.breaches.saturating_add(1);
        self.outdated &= self.breaches < params.avoidance_threshold;
        if self.state == RuleState::Normal && self.breaches == 1 {
            // A relapse is measured to the first of the consecutive breaches.
            self.released = self
                .released
                .filter(|at| now.since(*at) <= params.relapse_window);
        }
        let starts = match self.state {
            RuleState::Normal => self.breaches >= params.avoidance_threshold,
            RuleState::Cooling => true,
            RuleState::Breached => false,
        };
        if starts {
            let relapse = self.detect_relapse();
            let mut change = self.enter(now, RuleState::Breached);
            change.relapse = relapse;
            on_change(change);
        }
    }

    /// Whether a breach follows right after a release. If so, doubles the cool-down; otherwise a constant load would make
    /// the rule throttle and release forever.
    fn detect_relapse(&mut self) -> bool {
        if self.state != RuleState::Normal {
            return false;
        }
        let relapse = self.released.take().is_some();
        self.doublings = if relapse {
            MAX_DOUBLINGS.min(self.doublings + 1)
        } else {
            0
        };
        relapse
    }

    fn quiet(&mut self, now: BootTime, params: &Params, mut on_change: impl FnMut(StateChange)) {
        // A rule in force with enough breaches acts again at the next one.
        if self.state == RuleState::Normal || self.breaches < params.avoidance_threshold {
            self.breaches = 0;
        }
        match self.state {
            RuleState::Breached => {
                self.quiet_evaluations = self.quiet_evaluations.saturating_add(1);
                if self.quiet_evaluations >= params.restore_threshold {
                    on_change(self.enter(now, RuleState::Cooling));
                }
            }
            RuleState::Normal | RuleState::Cooling => {}
        }
    }

    fn enter(&mut self, now: BootTime, to: RuleState) -> StateChange {
        let from = self.state;
        self.state = to;
        self.outdated &= self.in_force();
        self.since = Some(now);
        StateChange {
            from,
            to,
            unknown_too_long: false,
            relapse: false,
        }
    }
}
