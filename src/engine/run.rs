//! The runtime state of a rule: its state machine, its last result, and what was reported about it.

use std::time::Duration;

use super::ledger::{Depth, Ledger};
use super::metric::{ActionKind, Leverage};
use super::plan::{Change, RuleState, Spared, Transition, Unknown};
use super::pod::PodUid;
use super::policy::{Rule, Strategy, TaintEffect};
use super::preview::Shadow;
use super::protected::Guard;
use super::rule::{Judgement, Machine, Terms};
use super::time::BootTime;
use super::values::Input;

/// The last release of a rule's throttles.
#[derive(Debug, Default)]
pub(super) struct Release {
    /// How far each pod was throttled when the release started, sorted.
    depths: Vec<(PodUid, Depth)>,
    /// This evaluation restores these depths.
    pub(super) returns: bool,
}

/// One rule.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) rule: Rule,
    /// Its index among the rules, and so in every pod's permits.
    pub(super) index: usize,
    pub(super) machine: Machine,
    /// The last result; `None` before the first evaluation.
    pub(super) judgement: Option<Judgement>,
    /// It is evaluated in the current step.
    pub(super) due: bool,
    /// It has had a known result since the start.
    pub(super) known: bool,
    /// The Unknown that was reported and has not ended.
    told: Option<Unknown>,
    /// Time of the last sample that was counted.
    counted: Option<BootTime>,
    /// It disables scheduling, and this was reported.
    pub(super) closes: bool,
    /// The additional measurement that the result depended on.
    pub(super) guard: Option<Guard>,
    /// The input of its metric over the last period.
    pub(super) input: Option<Input>,
    /// How much must be released, in millicores or bytes.
    pub(super) gap: u64,
    /// Pods evicted for it in the current round.
    pub(super) evicted: u32,
    /// The pod whose page cache it reclaimed last, if it acts on one pod per round.
    pub(super) reclaimed: Option<PodUid>,
    pub(super) release: Release,
    /// The skipped pods as reported, sorted.
    spared: Vec<(PodUid, ActionKind, Spared)>,
    /// The actions that a Preview rule would have in force.
    pub(super) shadow: Shadow,
    /// The value to use instead of the samples.
    pub(super) assumed: Option<f64>,
}

impl Run {
    pub(super) fn new(rule: Rule) -> Self {
        Self {
            rule,
            index: 0,
            machine: Machine::default(),
            judgement: None,
            due: false,
            known: false,
            told: None,
            counted: None,
            closes: false,
            guard: None,
            input: None,
            gap: 0,
            evicted: 0,
            reclaimed: None,
            release: Release::default(),
            spared: Vec::new(),
            shadow: Shadow::default(),
            assumed: None,
        }
    }

    /// Applies an edit of the rule. Resets the counters if the metric or the thresholds changed.
    pub(super) fn edit(&mut self, rule: Rule) {
        let same = self.rule.metric == rule.metric
            && self.rule.series == rule.series
            && self.rule.watermark.total_cmp(&rule.watermark).is_eq()
            && self.rule.restore.total_cmp(&rule.restore).is_eq();
        if !same {
            self.machine.forget();
            self.machine.released = None;
            self.machine.doublings = 0;
            self.counted = None;
        }
        self.rule = rule;
    }

    /// Identifies what the counters count, so that after a restart they are only used for the same thresholds.
    pub(super) fn marks(&self) -> String {
        let rule = &self.rule;
        let (metric, series) = (&rule.metric, &rule.series);
        let (high, low) = (rule.watermark, rule.restore);
        format!("{metric:?} {series:?} > {high} <= {low}")
    }

    /// Makes sure that a sample counts only once: if it is evaluated again, its value stays known but it is neither a
    /// breach nor quiet.
    pub(super) fn once(&mut self, taken: Option<BootTime>, judgement: Judgement) -> Judgement {
        let Judgement::Known { value, doubt, .. } = judgement else {
            return judgement;
        };
        if taken.is_some() && self.counted == taken {
            return Judgement::Known {
                value,
                breach: false,
                quiet: false,
                doubt,
            };
        }
        self.counted = taken;
        judgement
    }

    pub(super) fn would(&self) -> bool {
        self.rule.strategy == Strategy::Preview
    }

    pub(super) fn transition(&self, at: BootTime, change: Change) -> Transition {
        Transition {
            at,
            rule: self.rule.id.clone(),
            would: self.would(),
            change,
        }
    }

    /// Processes a result and reports what it changed.
    pub(super) fn observe(
        &mut self,
        now: BootTime,
        judgement: Judgement,
        unknown_limit: Duration,
        out: &mut Vec<Transition>,
    ) {
        self.tell_unknown(now, judgement, out);
        self.due = true;
        self.judgement = Some(judgement);
        let terms = Terms::of(&self.rule, unknown_limit);
        let mut machine = self.machine;
        let mut returns = false;
        machine.observe(now, judgement, &terms, |edge| {
            returns = edge.returns;
            let change = Change::State {
                from: edge.from,
                to: edge.to,
                value: judgement.value(),
                watermark: self.rule.watermark,
                unknown_too_long: edge.unknown_too_long,
            };
            out.push(self.transition(now, change));
        });
        self.machine = machine;
        self.release.returns = returns;
        self.known |= judgement.unknown().is_none() || machine.unknown_too_long(now, unknown_limit);
        if !machine.in_force() {
            self.spared.clear();
            self.reclaimed = None;
        }
    }

    /// Reports when the metric becomes Unknown or known. The first sample has no baseline, which is not worth reporting.
    fn tell_unknown(&mut self, now: BootTime, judgement: Judgement, out: &mut Vec<Transition>) {
        let first = self.judgement.is_none() || (self.told.is_none() && !self.known);
        match judgement {
            Judgement::Unknown(Unknown::Rebased | Unknown::Sparse) if first => {}
            Judgement::Unknown(reason)
            | Judgement::Known {
                doubt: Some(reason),
                ..
            } if self.told != Some(reason) => {
                self.told = Some(reason);
                out.push(self.transition(now, Change::Unknown { reason }));
            }
            Judgement::Known {
                value, doubt: None, ..
            } if self.told.take().is_some() => {
                out.push(self.transition(now, Change::Known { value }));
            }
            _ => {}
        }
    }

    /// Whether it acts on pods in this evaluation: Breached, and above its threshold right now.
    pub(super) fn acts(&self) -> bool {
        self.due
            && self.machine.state == RuleState::Breached
            && self.judgement.is_some_and(Judgement::breach)
    }

    /// How its action of that kind affects its metric.
    pub(super) fn leverage(&self, kind: ActionKind) -> Leverage {
        let action = &self.rule.action;
        let has = match kind {
            ActionKind::CpuThrottle => action.throttle.is_some(),
            ActionKind::ForceGc => action.force_gc,
            ActionKind::Eviction => action.eviction.is_some(),
        };
        if has {
            self.rule.metric.leverage(kind)
        } else {
            Leverage::None
        }
    }

    /// Whether its throttles are restored by a step in this evaluation.
    pub(super) fn releases(&self, now: BootTime, unknown_limit: Duration) -> bool {
        self.due
            && self.machine.state == RuleState::Normal
            && (self.judgement.is_some_and(Judgement::quiet)
                || self.machine.unknown_too_long(now, unknown_limit))
    }

    /// Tracks the release of its throttles (enforced, or of a Preview): the depths when it started, and when it was last
    /// in progress.
    pub(super) fn follow_release(&mut self, now: BootTime, real: &Ledger) {
        if !self.due || self.machine.state != RuleState::Normal {
            return;
        }
        let ledger = if self.would() {
            &self.shadow.ledger
        } else {
            real
        };
        let begins = self.machine.since == Some(now);
        if begins {
            self.release.depths.clear();
        }
        for grip in &ledger.0 {
            if let Some(claim) = grip.claim(&self.rule.id) {
                self.machine.released = Some(now);
                if begins {
                    self.release.depths.push((grip.uid.clone(), claim.depth));
                }
            }
        }
    }

    /// How far to throttle the pod again in this evaluation, after a relapse.
    pub(super) fn return_to(&self, pod: &PodUid) -> Option<Depth> {
        let Release { depths, returns } = &self.release;
        let place = depths.binary_search_by(|(uid, _)| uid.cmp(pod));
        let place = place.ok().filter(|_| *returns)?;
        Some(depths[place].1)
    }

    /// The taint effect with which it disables scheduling now.
    pub(super) fn effect(&self) -> Option<TaintEffect> {
        let effect = self.rule.action.scheduling;
        effect.filter(|_| self.machine.in_force())
    }

    /// Reports that a pod was skipped, unless that was already reported.
    pub(super) fn spare(
        &mut self,
        now: BootTime,
        pod: &PodUid,
        kind: ActionKind,
        reason: Spared,
        out: &mut Vec<Transition>,
    ) {
        match self.place(pod, kind) {
            Ok(index) if self.spared[index].2 == reason => return,
            Ok(index) => self.spared[index].2 = reason,
            Err(index) => self.spared.insert(index, (pod.clone(), kind, reason)),
        }
        let told =
            |(p, k, r): &(PodUid, ActionKind, Spared)| p == pod && *k != kind && *r == reason;
        if !self.spared.iter().any(told) {
            let pod = pod.clone();
            out.push(self.transition(now, Change::Spared { pod, reason }));
        }
    }

    /// Records that the pod was acted on, so that skipping it again is reported.
    pub(super) fn act(&mut self, pod: &PodUid, kind: ActionKind) {
        if let Ok(index) = self.place(pod, kind) {
            self.spared.remove(index);
        }
    }

    /// Drops pods that are gone.
    pub(super) fn forget_pods(&mut self, gone: impl Fn(&PodUid) -> bool) {
        self.spared.retain(|(pod, _, _)| !gone(pod));
        self.release.depths.retain(|(pod, _)| !gone(pod));
    }

    fn place(&self, pod: &PodUid, kind: ActionKind) -> Result<usize, usize> {
        self.spared
            .binary_search_by(|(p, k, _)| p.cmp(pod).then(k.cmp(&kind)))
    }
}
