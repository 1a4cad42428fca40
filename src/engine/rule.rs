//! The state machine of one rule.
//!
//! ```text
//! Normal ──avoidance threshold consecutive breaches──► Breached ──restore threshold consecutive quiet──► Cooling
//!   ▲                                                    ▲                                                  │
//!   └──────── cool-down after the last breach ◄──────────┬──────────────────────────────────────────────────┘
//!                                                        └── a breach while Cooling ┘
//! ```

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::plan::{RuleState, Unknown};
use super::policy::Rule;
use super::time::BootTime;

/// The result of evaluating a rule's metric once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Judgement {
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
        doubt: Option<Unknown>,
    },
}

impl Judgement {
    pub(super) const fn value(self) -> Option<f64> {
        match self {
            Self::Known { value, .. } => Some(value),
            Self::Unknown(_) => None,
        }
    }

    pub(super) const fn unknown(self) -> Option<Unknown> {
        match self {
            Self::Unknown(reason) => Some(reason),
            Self::Known { .. } => None,
        }
    }

    pub(super) const fn breach(self) -> bool {
        matches!(self, Self::Known { breach: true, .. })
    }

    pub(super) const fn quiet(self) -> bool {
        matches!(self, Self::Known { quiet: true, .. })
    }
}

/// The counts and times that drive the state machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    pub(super) avoidance_threshold: u32,
    pub(super) restore_threshold: u32,
    pub(super) cool_down: Duration,
    /// A breach within this time of a release is a relapse: the cool-down, but at least two evaluations.
    pub(super) soon: Duration,
    /// After being Unknown this long, its actions are undone.
    pub(super) unknown_limit: Duration,
}

/// The cool-down grows to at most 8 times its length.
const MAX_DOUBLINGS: u8 = 3;

impl Terms {
    pub(super) fn of(rule: &Rule, unknown_limit: Duration) -> Self {
        Self {
            avoidance_threshold: rule.avoidance_threshold,
            restore_threshold: rule.restore_threshold,
            cool_down: rule.action.cool_down,
            soon: rule.action.cool_down.max(rule.period * 2),
            unknown_limit,
        }
    }
}

/// One state change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Move {
    pub(super) from: RuleState,
    pub(super) to: RuleState,
    pub(super) unknown_too_long: bool,
    /// A breach shortly after a release: what was released is throttled again immediately.
    pub(super) returns: bool,
}

/// State and counters. Persisted across restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Machine {
    pub(super) state: RuleState,
    pub(super) since: Option<BootTime>,
    pub(super) breaches: u32,
    pub(super) quiets: u32,
    pub(super) last_breach: Option<BootTime>,
    pub(super) unknown_since: Option<BootTime>,
    /// When a throttle of the rule was last released by a step.
    pub(super) released: Option<BootTime>,
    /// How many times the cool-down is doubled, because the breach returned right after earlier releases.
    pub(super) doublings: u8,
}

impl Machine {
    /// Processes one evaluation and calls `on_change` for each state change: at most two, since Cooling ends in the
    /// same evaluation if the cool-down has already expired.
    pub(super) fn observe(
        &mut self,
        now: BootTime,
        judgement: Judgement,
        terms: &Terms,
        mut tell: impl FnMut(Move),
    ) {
        self.since.get_or_insert(now);
        let Judgement::Known {
            breach,
            quiet,
            doubt: None,
            ..
        } = judgement
        else {
            return self.wait(now, terms, tell);
        };
        self.unknown_since = None;
        if breach {
            return self.breach(now, terms, tell);
        }
        if quiet {
            self.quiet(now, terms, &mut tell);
        }
        let cool_down = self.cool_down(terms.cool_down);
        let rested = |at: BootTime| now.since(at) >= cool_down;
        if self.state == RuleState::Cooling && self.last_breach.is_none_or(rested) {
            self.forget();
            tell(self.go(now, RuleState::Normal));
        }
    }

    /// The effective cool-down, for an action with this `cool_down`.
    pub(super) const fn cool_down(&self, cool_down: Duration) -> Duration {
        cool_down.saturating_mul(1 << self.doublings)
    }

    /// Whether the metric has been Unknown for so long that its actions must be undone.
    pub(super) fn unknown_too_long(&self, now: BootTime, limit: Duration) -> bool {
        self.unknown_since
            .is_some_and(|since| now.since(since) >= limit)
    }

    /// Whether the rule's actions are in force: Breached or Cooling.
    pub(super) fn in_force(&self) -> bool {
        self.state != RuleState::Normal
    }

    /// Resets the counters; the state stays.
    pub(super) const fn forget(&mut self) {
        self.breaches = 0;
        self.quiets = 0;
    }

    fn wait(&mut self, now: BootTime, terms: &Terms, mut tell: impl FnMut(Move)) {
        self.unknown_since.get_or_insert(now);
        if self.in_force() && self.unknown_too_long(now, terms.unknown_limit) {
            self.forget();
            let mut edge = self.go(now, RuleState::Normal);
            edge.unknown_too_long = true;
            tell(edge);
        }
    }

    fn breach(&mut self, now: BootTime, terms: &Terms, mut tell: impl FnMut(Move)) {
        self.last_breach = Some(now);
        self.quiets = 0;
        self.breaches = self.breaches.saturating_add(1);
        if self.state == RuleState::Normal && self.breaches == 1 {
            // A relapse is measured to the first of the consecutive breaches.
            self.released = self.released.filter(|at| now.since(*at) <= terms.soon);
        }
        let starts = match self.state {
            RuleState::Normal => self.breaches >= terms.avoidance_threshold,
            RuleState::Cooling => true,
            RuleState::Breached => false,
        };
        if starts {
            let returns = self.returns();
            let mut edge = self.go(now, RuleState::Breached);
            edge.returns = returns;
            tell(edge);
        }
    }

    /// Whether a breach follows right after a release. If so, doubles the cool-down; otherwise a constant load would make
    /// the rule throttle and release forever.
    fn returns(&mut self) -> bool {
        if self.state != RuleState::Normal {
            return false;
        }
        let returns = self.released.take().is_some();
        self.doublings = if returns {
            MAX_DOUBLINGS.min(self.doublings + 1)
        } else {
            0
        };
        returns
    }

    fn quiet(&mut self, now: BootTime, terms: &Terms, mut tell: impl FnMut(Move)) {
        match self.state {
            RuleState::Normal => self.breaches = 0,
            RuleState::Breached => {
                self.quiets = self.quiets.saturating_add(1);
                if self.quiets >= terms.restore_threshold {
                    tell(self.go(now, RuleState::Cooling));
                }
            }
            RuleState::Cooling => {}
        }
    }

    const fn go(&mut self, now: BootTime, to: RuleState) -> Move {
        let from = self.state;
        self.state = to;
        self.since = Some(now);
        Move {
            from,
            to,
            unknown_too_long: false,
            returns: false,
        }
    }
}
