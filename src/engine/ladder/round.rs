//! One evaluation of the rules that act on pods. The enforced round and every Preview run this same code.

use std::time::Duration;

use super::evict::Rounds;
use super::quota::Released;
use super::victim::{Skip, sort};
use super::{MemoryForecast, Outcome};
use crate::engine::ledger::{Depth, ThrottleLedger, ThrottledCgroup};
use crate::engine::metric::{ActionKind, RankBy, Rung, RungUse};
use crate::engine::plan::{Evict, Reclaim, RuleState, Transition};
use crate::engine::pod::PodUid;
use crate::engine::run::Run;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::track::{Tracked, TrackedPods, TrackedUsage};
use crate::engine::values::Input;

use super::victim::ranked_usage;

/// The input of a round.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct RoundContext<'a> {
    pub(in crate::engine) now: BootTime,
    pub(in crate::engine) sample: &'a Sample,
    pub(in crate::engine) pods: &'a TrackedPods,
    /// The time between two evaluations.
    pub(in crate::engine) period: Duration,
    pub(in crate::engine) unknown_limit: Duration,
    pub(in crate::engine) forecast: &'a MemoryForecast,
    /// The idle class may be used on this node; if not, its place is taken by the lowest weight, which protects less.
    pub(in crate::engine) idle_is_safe: bool,
}

/// Buffers that are reused from round to round.
#[derive(Debug, Default)]
pub(in crate::engine) struct Buffers {
    /// What each pod uses, in the order of the pods.
    pub(in crate::engine) usage: Vec<TrackedUsage>,
    /// Pod indexes in victim order, one list per resource.
    pub(in crate::engine) orders: [Vec<usize>; RankBy::ALL.len()],
    pub(in crate::engine) released: Released,
    pub(super) target_cgroups: Vec<ThrottledCgroup>,
    pub(in crate::engine) reclaims: Vec<Reclaim>,
    pub(in crate::engine) evictions: Vec<Evict>,
}

impl Buffers {
    /// Computes pod usage from the sample and starts an empty round.
    pub(in crate::engine) fn begin(&mut self, ctx: &RoundContext<'_>) {
        let cpus = ctx.sample.node.cpu.map(|cpu| cpu.online);
        let pods = ctx.pods.all();
        self.usage.clear();
        let usage = |t: &Tracked| t.usage(ctx.sample, ctx.period, cpus);
        self.usage.extend(pods.iter().map(usage));
        self.released.clear(pods.len());
        self.sort(ctx.pods);
    }

    /// Sorts the victims.
    pub(in crate::engine) fn sort(&mut self, pods: &TrackedPods) {
        self.reclaims.clear();
        self.evictions.clear();
        let io_is_known = self.usage.iter().any(|usage| usage.io.is_some());
        for rank_by in RankBy::ALL {
            let uses = ranked_usage(rank_by, io_is_known);
            let order = &mut self.orders[rank_by as usize];
            sort(order, pods.all(), &self.usage, uses);
        }
    }
}

/// The enforced actions that a Preview round builds on.
#[derive(Clone, Copy, Debug)]
pub(in crate::engine) struct Enforced<'a> {
    pub(in crate::engine) ledger: &'a ThrottleLedger,
    pub(in crate::engine) rounds: &'a Rounds,
}

/// One round.
pub(in crate::engine) struct Round<'a> {
    pub(in crate::engine) ctx: RoundContext<'a>,
    pub(in crate::engine) buffers: &'a mut Buffers,
    pub(in crate::engine) ledger: &'a mut ThrottleLedger,
    pub(in crate::engine) rounds: &'a mut Rounds,
    /// Pods that the Preview would have evicted, sorted.
    pub(in crate::engine) removed: &'a [PodUid],
    /// `None` in the enforced round.
    pub(in crate::engine) enforced: Option<Enforced<'a>>,
    pub(in crate::engine) out: &'a mut Vec<Transition>,
}

impl Round<'_> {
    /// Takes the next steps of the rules; the results go into the buffers, the ledger and the rounds.
    pub(in crate::engine) fn run(mut self, runs: &mut [Run]) {
        for run in runs.iter_mut() {
            run.evicts = self.covers(run) && self.climb(run);
        }
        for group in RankBy::ALL {
            self.evict_for_largest_gap(group, runs);
        }
    }

    fn covers(&self, run: &Run) -> bool {
        run.due && run.is_preview() == self.enforced.is_some() && run.machine.in_force()
    }

    /// One evaluation of a rule in force: newcomers join, and a step is taken. Returns whether it wants to evict.
    fn climb(&mut self, run: &mut Run) -> bool {
        if run.release.relapsed
            && let Some(before) = run.release.position.take()
        {
            run.ladder.resume(&run.rule, before, self.ctx.sample.at);
        }
        let may_join = run.machine.state == RuleState::Breached && run.is_known();
        let joined = may_join && self.join(run) == Outcome::Stepped;
        let Some(input) = run.input.filter(|_| run.is_acting()) else {
            return false;
        };
        let input = effective(run, input);
        run.ladder.observe(input);
        // What was in force before a relapse comes first.
        let resumes = run.release.relapsed && joined;
        input.above && !resumes && self.next_step(run, input)
    }

    /// Takes a step on the rung of the rule, or on the first later one where there is something to do.
    fn next_step(&mut self, run: &mut Run, input: Input) -> bool {
        loop {
            let rung = run.ladder.rung;
            let outcome = match (run.rule.rung(rung), rung) {
                (RungUse::Unused, Rung::Eviction) => return false,
                (RungUse::Unused, _) => Outcome::Empty,
                (_, Rung::IdleClass) => self.idle_all(run),
                (_, Rung::CpuQuota) => self.lower_quotas(run),
                (_, Rung::PageCache) => self.reclaim_next(run),
                (_, Rung::Eviction) => return self.may_evict(run, input),
            };
            let goes_on = match outcome {
                Outcome::Stepped => {
                    run.ladder.step(self.ctx.sample.at);
                    // The lowest weight alone protects too little to wait for its effect.
                    rung == Rung::IdleClass && !self.ctx.idle_is_safe
                }
                Outcome::Empty => true,
                Outcome::Stuck | Outcome::Exhausted => run.ladder.is_finished(outcome),
            };
            match run.rule.rung_after(rung) {
                Some(next) if goes_on && !self.stops_before(run, next) => run.ladder.enter(next),
                _ => return false,
            }
        }
    }

    /// Whether nothing milder can be done by now, and the last step did not help. Pods that used too little before may be
    /// throttled when others are gone.
    fn may_evict(&mut self, run: &mut Run, input: Input) -> bool {
        let throttles = run.rule.rung(Rung::CpuQuota) != RungUse::Unused;
        if throttles && self.lower_quotas(run) == Outcome::Stepped {
            run.ladder.step(self.ctx.sample.at);
            return false;
        }
        run.ladder.is_shown(input)
    }

    /// Whether a Preview stops before that rung: on a metric without a unit nothing that it does changes the input, so it
    /// cannot know whether the breach would last.
    fn stops_before(&self, run: &Run, next: Rung) -> bool {
        self.enforced.is_some()
            && next == Rung::Eviction
            && run.rule.metric.measured().is_none()
            && run.is_reversible()
    }

    /// Throttles pods that came, or came back, as far as the rule throttles the others, or did before a relapse.
    fn join(&mut self, run: &mut Run) -> Outcome {
        let kind = ActionKind::CpuThrottle;
        let Some(spec) = run.rule.action.throttle else {
            return Outcome::Empty;
        };
        run.ladder.depth = run.ladder.depth.within(spec);
        if run.ladder.depth == Depth::NONE && !run.release.relapsed {
            return Outcome::Empty;
        }
        self.each_victim(run, RankBy::Cpu, kind, |round, run, pod_index| {
            let uid = &round.pod(pod_index).pod.uid;
            let to = run.relapse_depth(uid).unwrap_or(run.ladder.depth);
            let to = to.within(spec);
            let from = round.depth(run, pod_index);
            if to.idle && !from.idle {
                round.idle(run, pod_index)?;
            }
            if to.ratio < from.ratio {
                round.lower(run, pod_index, to.ratio)?;
            }
            if round.depth(run, pod_index) == from {
                return Err(None);
            }
            Ok(())
        })
    }

    /// Calls `act` with every pod that the rule may act on in that way, in victim order, and reports why others are skipped.
    pub(super) fn each_victim(
        &mut self,
        run: &mut Run,
        rank_by: RankBy,
        kind: ActionKind,
        mut act: impl FnMut(&mut Self, &mut Run, usize) -> Result<(), Skip>,
    ) -> Outcome {
        let mut outcome = Outcome::Empty;
        for position in 0..self.ctx.pods.all().len() {
            let pod_index = self.victim(rank_by, position);
            if let Err(skip) = self.check_eligible(run, pod_index, kind) {
                self.record_skip(run, pod_index, kind, skip);
                continue;
            }
            match act(self, run, pod_index) {
                Ok(()) => outcome = Outcome::Stepped,
                Err(skip) => {
                    self.record_skip(run, pod_index, kind, skip);
                    if outcome == Outcome::Empty {
                        outcome = Outcome::Stuck;
                    }
                }
            }
        }
        outcome
    }

    /// Evicts for one of the rules that want to: the one with the largest gap that finds a victim.
    fn evict_for_largest_gap(&mut self, group: RankBy, runs: &mut [Run]) {
        if self.evict_urgently(group, runs) {
            return;
        }
        let of_group = |run: &&mut Run| run.evicts && run.rule.metric.rank_by() == group;
        while let Some(run) = runs.iter_mut().filter(of_group).max_by_key(|run| run.gap) {
            run.evicts = false;
            let Some(input) = run.input else { continue };
            if self.evict(run, input) {
                return;
            }
        }
    }

    /// Evicts at once where memory runs out; returns whether it did.
    fn evict_urgently(&mut self, group: RankBy, runs: &mut [Run]) -> bool {
        if group != RankBy::Memory {
            return false;
        }
        for run in runs {
            if !(self.covers(run) && run.is_acting() && run.rule.may_be_urgent()) {
                continue;
            }
            let grace = run.rule.action.eviction.and_then(|it| it.grace);
            let grace = grace.unwrap_or_else(|| self.longest_grace(run));
            if let Some(shortage) = self.ctx.forecast.shortage(grace)
                && self.evict_at_once(run, shortage)
            {
                return true;
            }
        }
        false
    }

    /// The longest grace period of a pod that the rule may evict.
    fn longest_grace(&self, run: &Run) -> Duration {
        let pods = 0..self.ctx.pods.all().len();
        let may = pods.filter(|it| self.check_eligible(run, *it, ActionKind::Eviction).is_ok());
        may.map(|it| self.pod(it).pod.grace)
            .max()
            .unwrap_or_default()
    }
}

/// A Preview changes nothing that is measured: what it would have released is taken from the gap instead.
fn effective(run: &Run, input: Input) -> Input {
    let is_covered = run.rule.metric.measured().is_some() && run.gap == 0;
    Input {
        above: input.above && !is_covered,
        ..input
    }
}
