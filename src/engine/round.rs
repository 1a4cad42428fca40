//! One round of actions on pods: throttle, reclaim, evict. The real round and every Preview run this same code.

use std::time::Duration;

use super::evict::{EvictionPass, Rounds};
use super::ledger::{ThrottleLedger, ThrottledCgroup};
use super::metric::RankBy;
use super::plan::{Evict, Reclaim, Transition};
use super::pod::{PodUid, SETTLE_TIMEOUT};
use super::reclaim::ReclaimPass;
use super::run::Run;
use super::sample::Sample;
use super::throttle::{Released, ThrottlePass};
use super::time::BootTime;
use super::track::{Tracked, TrackedPods, TrackedUsage};
use super::walk::{Walk, ranked_usage, sort};

/// The input of a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct RoundContext<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    pub(super) pods: &'a TrackedPods,
    /// The period over which pod usage is measured.
    pub(super) period: Duration,
    pub(super) unknown_limit: Duration,
}

/// Buffers that are reused from round to round.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// What each pod uses, in the order of the pods.
    pub(super) usage: Vec<TrackedUsage>,
    /// Pod indexes in victim order, one list per resource.
    pub(super) orders: [Vec<usize>; RankBy::ALL.len()],
    pub(super) released: Released,
    pub(super) target_cgroups: Vec<ThrottledCgroup>,
    pub(super) reclaims: Vec<Reclaim>,
    pub(super) evictions: Vec<Evict>,
    /// The evictions of one group.
    round: Vec<Evict>,
}

impl Buffers {
    /// Computes pod usage from the sample and starts an empty round.
    pub(super) fn begin(&mut self, ctx: &RoundContext<'_>) {
        let cpus = ctx.sample.node.cpu.map(|cpu| cpu.online);
        let pods = ctx.pods.all();
        self.usage.clear();
        let usage = |t: &Tracked| t.usage(ctx.sample, ctx.period, cpus);
        self.usage.extend(pods.iter().map(usage));
        self.released.clear(pods.len());
        self.sort(ctx.pods);
    }

    /// Sorts the victims.
    pub(super) fn sort(&mut self, pods: &TrackedPods) {
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
pub(super) struct Enforced<'a> {
    pub(super) ledger: &'a ThrottleLedger,
    pub(super) rounds: &'a Rounds,
    /// By group: its enforced round had not settled when this evaluation began.
    pub(super) settling: [bool; RankBy::ALL.len()],
}

/// A walk over the victims ranked by one resource; a macro, because it borrows individual fields.
macro_rules! walk {
    ($round:ident, $buffers:ident, $rank_by:expr) => {
        Walk {
            now: $round.ctx.now,
            sample: $round.ctx.sample,
            pods: $round.ctx.pods.all(),
            usage: &$buffers.usage,
            order: &$buffers.orders[$rank_by as usize],
            removed: $round.removed,
            preview: $round.enforced.is_some(),
        }
    };
}

/// One round.
pub(super) struct ActionRound<'a> {
    pub(super) ctx: RoundContext<'a>,
    pub(super) buffers: &'a mut Buffers,
    pub(super) ledger: &'a mut ThrottleLedger,
    pub(super) rounds: &'a mut Rounds,
    /// Pods that the Preview would have evicted.
    pub(super) removed: &'a [PodUid],
    /// `None` in the enforced round.
    pub(super) enforced: Option<Enforced<'a>>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl ActionRound<'_> {
    /// Decides for the rules that act in this evaluation; the results go into the buffers, the ledger and the rounds.
    pub(super) fn run(mut self, runs: &mut [Run]) {
        self.throttle(runs);
        self.reclaim(runs);
        for group in RankBy::ALL {
            let enforced = self.enforced;
            if !self.rounds.is_settling(group)
                && !enforced.is_some_and(|e| e.settling[group as usize])
            {
                self.evict(group, runs);
            }
        }
    }

    fn throttle(&mut self, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        let mut pass = ThrottlePass {
            walk: walk!(self, buffers, RankBy::Cpu),
            orders: &buffers.orders,
            period: self.ctx.period,
            ledger: self.ledger,
            enforced: self.enforced.map(|enforced| enforced.ledger),
            released: &mut buffers.released,
            target_cgroups: &mut buffers.target_cgroups,
            out: self.out,
        };
        pass.run(runs);
    }

    fn reclaim(&mut self, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        let mut pass = ReclaimPass {
            walk: walk!(self, buffers, RankBy::Memory),
            orders: &buffers.orders,
            reclaims: &mut buffers.reclaims,
            out: self.out,
        };
        pass.cover(runs);
        pass.one_per_rule(runs);
    }

    fn evict(&mut self, group: RankBy, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        buffers.round.clear();
        // A pod that a Preview would have evicted counts as gone once its grace period is over.
        let settle_timeout = self.enforced.map_or(SETTLE_TIMEOUT, |_| Duration::ZERO);
        let mut pass = EvictionPass {
            walk: walk!(self, buffers, group),
            group,
            rounds: self.rounds,
            enforced: self.enforced.map(|enforced| enforced.rounds),
            already_evicted: self
                .enforced
                .map_or(0, |enforced| enforced.rounds.count(group)),
            settle_timeout,
            released: &buffers.released,
            ledger: self.ledger,
            evictions: &mut buffers.round,
            out: self.out,
        };
        pass.run(runs);
        buffers.evictions.append(&mut buffers.round);
    }
}
