//! The runtime state of a rule: its state machine, its last result, and what was reported about it.

use std::time::Duration;

use jiff::Timestamp;

use super::ladder::Ladder;
use super::ledger::{Depth, ThrottleLedger};
use super::metric::{ActionKind, Rung, RungUse};
use super::plan::{PlanChange, RuleState, Skipped, Transition, Unknown};
use super::pod::PodUid;
use super::policy::{Rule, Strategy, TaintEffect};
use super::preview::Shadow;
use super::rule::{Evaluation, Params, RuleMachine};
use super::time::BootTime;
use super::values::Input;
use super::would::WouldHistory;

/// The last release of a rule's throttles.
#[derive(Debug, Default)]
pub(super) struct Release {
    /// How far each pod was throttled when the release started, sorted.
    depths: Vec<(PodUid, Depth)>,
    /// The position on the ladder then.
    pub(super) position: Option<(Rung, Depth)>,
    /// This evaluation restores these depths.
    pub(super) relapsed: bool,
}

/// One rule.
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts, each read by name"
)]
#[derive(Debug)]
pub(super) struct Run {
    pub(super) rule: Rule,
    /// Its index among the rules, and so in every pod's permits.
    pub(super) index: usize,
    pub(super) machine: RuleMachine,
    /// The last result; `None` before the first evaluation.
    pub(super) evaluation: Option<Evaluation>,
    /// The last known value over the threshold: above 1, the rule acts or will. `None` once that is too old.
    pub(super) nearness: Option<f64>,
    /// It is evaluated in the current step.
    pub(super) due: bool,
    /// It has had a known result since the start.
    pub(super) known: bool,
    /// The Unknown that was reported and has not ended.
    reported_unknown: Option<Unknown>,
    /// Time of the last sample that was counted.
    last_counted: Option<BootTime>,
    /// It disables scheduling, and this was reported.
    pub(super) disables_scheduling: bool,
    /// Limits of a protected pod's own made it wait as well, which is not counted.
    pub(super) limited: bool,
    /// The input of its metric over the last period.
    pub(super) input: Option<Input>,
    /// How much must be released, in millicores or bytes.
    pub(super) gap: u64,
    /// Its position among the actions on pods.
    pub(super) ladder: Ladder,
    /// It wants to evict in this evaluation.
    pub(super) evicts: bool,
    pub(super) release: Release,
    /// The skipped pods as reported, sorted.
    skipped: Vec<(PodUid, ActionKind, Skipped)>,
    /// The actions that a Preview rule would have in force.
    pub(super) shadow: Shadow,
    /// How often it would have acted, if it is a Preview rule.
    pub(super) would: WouldHistory,
    /// The value to use instead of the samples.
    pub(super) assumed: Option<f64>,
}

impl Run {
    pub(super) fn new(rule: Rule) -> Self {
        Self {
            rule,
            index: 0,
            machine: RuleMachine::default(),
            evaluation: None,
            nearness: None,
            due: false,
            known: false,
            reported_unknown: None,
            last_counted: None,
            disables_scheduling: false,
            limited: false,
            input: None,
            gap: 0,
            ladder: Ladder::default(),
            evicts: false,
            release: Release::default(),
            skipped: Vec::new(),
            shadow: Shadow::default(),
            would: WouldHistory::default(),
            assumed: None,
        }
    }

    /// Applies an edit of the rule. Resets the counters if the metric or the thresholds changed.
    pub(super) fn edit(&mut self, rule: Rule) {
        if counter_key(&self.rule) != counter_key(&rule) {
            self.start_over();
        } else if self.machine.breaches >= self.rule.avoidance_threshold {
            // A higher count is for the next time; what acts goes on.
            self.machine.breaches = self.machine.breaches.max(rule.avoidance_threshold);
        }
        self.rule = rule;
    }

    /// Forgets what was counted and learned with another metric or other thresholds. What is in force stays.
    pub(super) fn start_over(&mut self) {
        self.machine.reset_counters();
        self.machine.released = None;
        self.machine.doublings = 0;
        self.last_counted = None;
        self.nearness = None;
        self.ladder.start_over();
        self.would = WouldHistory::default();
    }

    /// Makes sure that a sample counts only once: if it is evaluated again, its value stays known but it is neither a
    /// breach nor quiet.
    pub(super) fn count_once(
        &mut self,
        sample_time: Option<BootTime>,
        evaluation: Evaluation,
    ) -> Evaluation {
        let Evaluation::Known {
            value, incomplete, ..
        } = evaluation
        else {
            return evaluation;
        };
        if sample_time.is_some() && self.last_counted == sample_time {
            return Evaluation::Known {
                value,
                breach: false,
                quiet: false,
                incomplete,
            };
        }
        self.last_counted = sample_time;
        evaluation
    }

    /// The result at `time` on the wall clock: outside the hours of the rule it neither acts nor reports what is unknown.
    pub(super) fn within_hours(
        &mut self,
        time: Option<Timestamp>,
        evaluation: Evaluation,
    ) -> Evaluation {
        if self.rule.active_during.is_empty() || self.assumed.is_some() {
            return evaluation;
        }
        match time {
            None => Evaluation::Unknown(Unknown::Missing),
            Some(time) if self.rule.is_active(time) => evaluation,
            Some(_) => {
                self.limited = false;
                self.input = None;
                Evaluation::OutsideHours(evaluation.value())
            }
        }
    }

    pub(super) fn is_preview(&self) -> bool {
        self.rule.strategy == Strategy::Preview
    }

    pub(super) fn transition(&self, at: BootTime, change: PlanChange) -> Transition {
        Transition {
            at,
            rule: self.rule.id.clone(),
            would: self.is_preview(),
            change,
        }
    }

    /// Processes a result and reports what it changed.
    pub(super) fn observe(
        &mut self,
        now: BootTime,
        evaluation: Evaluation,
        params: &Params,
        out: &mut Vec<Transition>,
    ) {
        self.report_hours(now, evaluation, out);
        self.report_unknown(now, evaluation, out);
        self.evaluation = Some(evaluation);
        let mut machine = self.machine;
        let mut relapsed = false;
        machine.observe(now, evaluation, params, |state_change| {
            relapsed = state_change.relapse;
            let change = PlanChange::State {
                from: state_change.from,
                to: state_change.to,
                value: evaluation.value(),
                threshold: self.rule.threshold,
                unknown_too_long: state_change.unknown_too_long,
            };
            out.push(self.transition(now, change));
        });
        self.machine = machine;
        let unknown_too_long = machine.unknown_too_long(now, params.unknown_limit);
        self.nearness = self.nearness_by(evaluation, unknown_too_long);
        self.release.relapsed = relapsed;
        self.known |= evaluation.unknown().is_none() || unknown_too_long;
        if !machine.in_force() {
            self.skipped.clear();
            self.leave_ladder();
        }
    }

    /// The nearness after this result. What is unknown or incomplete does not lower it before the time to restore.
    fn nearness_by(&self, evaluation: Evaluation, unknown_too_long: bool) -> Option<f64> {
        let near = evaluation.value();
        let near = near.map(|value| (value / self.rule.threshold).max(0.0));
        match evaluation {
            Evaluation::OutsideHours(_) => None,
            Evaluation::Known {
                incomplete: None, ..
            } => near,
            _ if unknown_too_long => near,
            _ => {
                // After a restart its actions may be in force without a value.
                let before = self
                    .nearness
                    .or_else(|| self.machine.in_force().then_some(1.0));
                near.into_iter().chain(before).reduce(f64::max)
            }
        }
    }

    /// Reports when the rule leaves or enters its hours.
    fn report_hours(&self, now: BootTime, evaluation: Evaluation, out: &mut Vec<Transition>) {
        let outside = evaluation.outside_hours();
        let before = self.evaluation.is_some_and(Evaluation::outside_hours);
        if outside == before {
            return;
        }
        let change = if outside {
            PlanChange::OutsideHours
        } else {
            PlanChange::WithinHours
        };
        out.push(self.transition(now, change));
    }

    /// Reports when the metric becomes Unknown or known. The first sample has no baseline, which is not worth reporting.
    fn report_unknown(&mut self, now: BootTime, evaluation: Evaluation, out: &mut Vec<Transition>) {
        let is_first =
            self.evaluation.is_none() || (self.reported_unknown.is_none() && !self.known);
        match evaluation {
            Evaluation::OutsideHours(_) => self.reported_unknown = None,
            Evaluation::Unknown(Unknown::Rebased | Unknown::Sparse) if is_first => {}
            Evaluation::Unknown(reason)
            | Evaluation::Known {
                incomplete: Some(reason),
                ..
            } if self.reported_unknown != Some(reason) => {
                self.reported_unknown = Some(reason);
                out.push(self.transition(now, PlanChange::Unknown { reason }));
            }
            Evaluation::Known {
                value,
                incomplete: None,
                ..
            } if self.reported_unknown.take().is_some() => {
                out.push(self.transition(now, PlanChange::Known { value }));
            }
            _ => {}
        }
    }

    /// Whether it acts on pods in this evaluation: Breached, above its threshold right now, and often enough since its
    /// counters were last reset (by an edit, or a time without evaluations).
    pub(super) fn is_acting(&self) -> bool {
        self.due && self.acts()
    }

    /// Whether every series of its last evaluation is known.
    pub(super) fn is_known(&self) -> bool {
        let last = self.evaluation;
        last.is_some_and(|last| {
            matches!(
                last,
                Evaluation::Known {
                    incomplete: None,
                    ..
                }
            )
        })
    }

    /// The same of its last evaluation.
    pub(super) fn acts(&self) -> bool {
        self.machine.state == RuleState::Breached
            && self.machine.breaches >= self.rule.avoidance_threshold
            && self.evaluation.is_some_and(Evaluation::breach)
    }

    /// Whether it acts on pods in any way that is undone.
    pub(super) fn is_reversible(&self) -> bool {
        let mut rungs = Rung::ALL.into_iter().filter(|it| *it != Rung::Eviction);
        rungs.any(|rung| self.rule.rung(rung) != RungUse::Unused)
    }

    /// It is Normal: the next breach starts at the first rung, or after a relapse where this one was.
    fn leave_ladder(&mut self) {
        if self.ladder != Ladder::default() {
            let before = std::mem::take(&mut self.ladder);
            self.release.position = Some((before.rung, before.depth));
        }
    }

    /// Whether its throttles are restored by a step in this evaluation.
    pub(super) fn is_releasing(&self, now: BootTime, unknown_limit: Duration) -> bool {
        self.due
            && self.machine.state == RuleState::Normal
            && (self
                .evaluation
                .is_some_and(|last| last.quiet() || last.outside_hours())
                || self.machine.unknown_too_long(now, unknown_limit))
    }

    /// Tracks the release of its throttles (enforced, or of a Preview): the depths when it started, and when it was last
    /// in progress.
    pub(super) fn track_release(&mut self, now: BootTime, enforced: &ThrottleLedger) {
        if !self.due || self.machine.state != RuleState::Normal {
            return;
        }
        if self.evaluation.is_some_and(Evaluation::outside_hours) {
            self.release.depths.clear();
            return;
        }
        let ledger = if self.is_preview() {
            &self.shadow.ledger
        } else {
            enforced
        };
        let starts = self.machine.since == Some(now);
        if starts {
            self.release.depths.clear();
        }
        for entry in &ledger.0 {
            if let Some(claim) = entry.claim(&self.rule.id) {
                self.machine.released = Some(now);
                if starts {
                    self.release.depths.push((entry.uid.clone(), claim.depth));
                }
            }
        }
    }

    /// How far to throttle the pod again in this evaluation, after a relapse.
    pub(super) fn relapse_depth(&self, pod: &PodUid) -> Option<Depth> {
        let Release {
            depths, relapsed, ..
        } = &self.release;
        let index = depths.binary_search_by(|(uid, _)| uid.cmp(pod));
        let index = index.ok().filter(|_| *relapsed)?;
        Some(depths[index].1)
    }

    /// The taint effect with which it disables scheduling now.
    pub(super) fn effect(&self) -> Option<TaintEffect> {
        let effect = self.rule.action.scheduling;
        effect.filter(|_| self.machine.in_force())
    }

    /// Reports that a pod was skipped, unless that was already reported.
    pub(super) fn record_skip(
        &mut self,
        now: BootTime,
        pod: &PodUid,
        kind: ActionKind,
        reason: Skipped,
        out: &mut Vec<Transition>,
    ) {
        match self.find_skip(pod, kind) {
            Ok(index) if self.skipped[index].2 == reason => return,
            Ok(index) => self.skipped[index].2 = reason,
            Err(index) => self.skipped.insert(index, (pod.clone(), kind, reason)),
        }
        let is_reported =
            |(p, k, r): &(PodUid, ActionKind, Skipped)| p == pod && *k != kind && *r == reason;
        if !self.skipped.iter().any(is_reported) {
            let pod = pod.clone();
            out.push(self.transition(now, PlanChange::Skipped { pod, reason }));
        }
    }

    /// Records that the pod was acted on, so that skipping it again is reported.
    pub(super) fn clear_skip(&mut self, pod: &PodUid, kind: ActionKind) {
        if let Ok(index) = self.find_skip(pod, kind) {
            self.skipped.remove(index);
        }
    }

    /// Drops pods that are gone.
    pub(super) fn drop_pods(&mut self, gone: impl Fn(&PodUid) -> bool) {
        self.skipped.retain(|(pod, _, _)| !gone(pod));
        self.release.depths.retain(|(pod, _)| !gone(pod));
    }

    fn find_skip(&self, pod: &PodUid, kind: ActionKind) -> Result<usize, usize> {
        self.skipped
            .binary_search_by(|(p, k, _)| p.cmp(pod).then(k.cmp(&kind)))
    }
}

/// Identifies what a rule's counters count: they are kept over an edit or a restart only while it is the same.
pub(super) fn counter_key(rule: &Rule) -> String {
    let (metric, series) = (&rule.metric, &rule.series);
    let (high, low) = (rule.threshold, rule.restore_value);
    format!("{metric:?} {series:?} > {high} <= {low}")
}
