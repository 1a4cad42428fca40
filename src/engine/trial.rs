//! Whether quotas lower the waiting that a rule measures.
//!
//! A pod with more busy threads than CPUs waits for itself, whatever other pods do: lower quotas would then only cost them
//! work. So a rule on waiting compares: once no step is left, the waiting must be a tenth lower than before its first quota
//! step. If it is not, the quotas are restored; the idle class stays. Not sooner: pressure has an upper limit, and half of
//! what is needed may not lower it at all.

use std::time::Duration;

use super::time::BootTime;

/// Waiting is averaged over this many evaluations.
const EVALUATIONS: usize = 3;
/// Quotas help if they lower the waiting to this part of what it was, or below.
const MAX_REMAINING: f64 = 0.9;
/// Quotas that did not help are tried again after this time...
const RETRY: Duration = Duration::from_mins(10);
/// ...or once the waiting is this many times as long.
const RETRY_GROWTH: f64 = 1.5;

/// The trial of a rule's quotas.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct QuotaTrial {
    /// The waits at the last evaluations, in the unit of the rule's metric; the latest is the last.
    waits: [Option<f64>; EVALUATIONS],
    stage: Stage,
}

#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    /// The rule has lowered no quota.
    #[default]
    NotStarted,
    /// It is lowering quotas.
    Running {
        /// The waiting before the first step.
        before: f64,
        /// Evaluations in a row without a step.
        without_step: usize,
    },
    /// Quotas help.
    Helped,
    /// They did not: none is lowered for now.
    Useless { wait: f64, until: BootTime },
}

impl QuotaTrial {
    /// Adds the mean wait of the last interval, `None` if unknown; `in_force` says whether the rule's action is.
    pub(super) fn observe(&mut self, now: BootTime, wait: Option<f64>, in_force: bool) {
        self.waits.rotate_left(1);
        self.waits[EVALUATIONS - 1] = wait;
        let retry = |before: f64, until| {
            let grew = |wait: f64| wait > before * RETRY_GROWTH;
            now >= until || self.wait().is_some_and(grew)
        };
        let ends = match self.stage {
            Stage::Useless { wait, until } => retry(wait, until),
            _ => false,
        };
        if ends || !in_force {
            self.stage = Stage::NotStarted;
        }
    }

    /// Whether quotas did not lower the waiting.
    pub(super) const fn is_useless(&self) -> bool {
        matches!(self.stage, Stage::Useless { .. })
    }

    /// Processes an evaluation in which the rule acted: `stepped` if it lowered a quota.
    pub(super) fn acted(&mut self, now: BootTime, stepped: bool) {
        let wait = self.wait();
        match (&mut self.stage, wait) {
            (Stage::NotStarted, Some(before)) if stepped => {
                self.stage = Stage::Running {
                    before,
                    without_step: 0,
                };
            }
            (
                Stage::Running {
                    before,
                    without_step,
                },
                wait,
            ) => {
                *without_step = if stepped { 0 } else { *without_step + 1 };
                if let Some(wait) = wait.filter(|_| *without_step >= EVALUATIONS) {
                    self.stage = Self::result(now, *before, wait);
                }
            }
            _ => {}
        }
    }

    fn result(now: BootTime, before: f64, wait: f64) -> Stage {
        if wait <= before * MAX_REMAINING {
            return Stage::Helped;
        }
        Stage::Useless {
            wait,
            until: now + RETRY,
        }
    }

    /// The mean of the known waits.
    fn wait(&self) -> Option<f64> {
        let known = || self.waits.iter().flatten();
        let count = known().count();
        (count > 0).then(|| known().sum::<f64>() / count as f64)
    }
}
