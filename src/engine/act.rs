//! One round of actions on pods: throttle, reclaim, evict. The real round and every Preview run this same code.

use std::time::Duration;

use super::evict::{Evicting, Rounds, SETTLE_TIMEOUT};
use super::ledger::{Held, Ledger};
use super::metric::RankBy;
use super::plan::{Evict, Reclaim, Transition};
use super::pod::PodUid;
use super::reclaim::Reclaiming;
use super::run::Run;
use super::sample::Sample;
use super::throttle::{Lowering, Released};
use super::time::BootTime;
use super::track::{Figures, Pods, Tracked};
use super::walk::{Walk, cpu_used, io_done, memory_held, sort};

/// The input of a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scene<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    pub(super) pods: &'a Pods,
    /// The period over which pod usage is measured.
    pub(super) period: Duration,
    pub(super) unknown_limit: Duration,
}

/// Buffers that are reused from round to round.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// What each pod uses, in the order of the pods.
    pub(super) figures: Vec<Figures>,
    /// Pod indexes in victim order, one list per resource.
    pub(super) orders: [Vec<usize>; RankBy::ALL.len()],
    pub(super) released: Released,
    pub(super) levers: Vec<Held>,
    pub(super) reclaims: Vec<Reclaim>,
    pub(super) evictions: Vec<Evict>,
    /// The evictions of one group.
    round: Vec<Evict>,
}

impl Buffers {
    /// Computes pod usage from the sample and starts an empty round.
    pub(super) fn begin(&mut self, scene: &Scene<'_>) {
        let cpus = scene.sample.node.cpu.map(|cpu| cpu.online);
        let pods = scene.pods.all();
        self.figures.clear();
        let figures = |t: &Tracked| t.figures(scene.sample, scene.period, cpus);
        self.figures.extend(pods.iter().map(figures));
        self.released.clear(pods.len());
        self.sort(scene.pods);
    }

    /// Sorts the victims.
    pub(super) fn sort(&mut self, pods: &Pods) {
        self.reclaims.clear();
        self.evictions.clear();
        let io_is_known = self.figures.iter().any(|figures| figures.io.is_some());
        for rank_by in RankBy::ALL {
            let uses = match rank_by {
                RankBy::Cpu => cpu_used,
                RankBy::Io if io_is_known => io_done,
                RankBy::Io | RankBy::Memory => memory_held,
            };
            let order = &mut self.orders[rank_by as usize];
            sort(order, pods.all(), &self.figures, uses);
        }
    }
}

/// The enforced actions that a Preview round builds on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Under<'a> {
    pub(super) ledger: &'a Ledger,
    pub(super) rounds: &'a Rounds,
    /// By group: its enforced round had not settled when this evaluation began.
    pub(super) busy: [bool; RankBy::ALL.len()],
}

/// A walk over the victims ranked by one resource; a macro, because it borrows individual fields.
macro_rules! walk {
    ($acting:ident, $buffers:ident, $rank_by:expr) => {
        Walk {
            now: $acting.scene.now,
            sample: $acting.scene.sample,
            pods: $acting.scene.pods.all(),
            figures: &$buffers.figures,
            order: &$buffers.orders[$rank_by as usize],
            removed: $acting.removed,
            would: $acting.under.is_some(),
        }
    };
}

/// One round.
pub(super) struct Acting<'a> {
    pub(super) scene: Scene<'a>,
    pub(super) buffers: &'a mut Buffers,
    pub(super) ledger: &'a mut Ledger,
    pub(super) rounds: &'a mut Rounds,
    /// Pods that the Preview would have evicted.
    pub(super) removed: &'a [PodUid],
    /// `None` in the enforced round.
    pub(super) under: Option<Under<'a>>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Acting<'_> {
    /// Decides for the rules that act in this evaluation; the results go into the buffers, the ledger and the rounds.
    pub(super) fn run(mut self, runs: &mut [Run]) {
        self.lower(runs);
        self.reclaim(runs);
        for group in RankBy::ALL {
            let under = self.under;
            if !self.rounds.busy(group) && !under.is_some_and(|u| u.busy[group as usize]) {
                self.evict(group, runs);
            }
        }
    }

    fn lower(&mut self, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        let mut lowering = Lowering {
            walk: walk!(self, buffers, RankBy::Cpu),
            orders: &buffers.orders,
            period: self.scene.period,
            own: self.ledger,
            under: self.under.map(|under| under.ledger),
            released: &mut buffers.released,
            levers: &mut buffers.levers,
            out: self.out,
        };
        lowering.run(runs);
    }

    fn reclaim(&mut self, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        let mut reclaiming = Reclaiming {
            walk: walk!(self, buffers, RankBy::Memory),
            orders: &buffers.orders,
            reclaims: &mut buffers.reclaims,
            out: self.out,
        };
        reclaiming.cover(runs);
        reclaiming.single(runs);
    }

    fn evict(&mut self, group: RankBy, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        buffers.round.clear();
        // A pod that a Preview would have evicted counts as gone once its grace period is over.
        let settle_timeout = self.under.map_or(SETTLE_TIMEOUT, |_| Duration::ZERO);
        let mut evicting = Evicting {
            walk: walk!(self, buffers, group),
            group,
            rounds: self.rounds,
            under: self.under.map(|under| under.rounds),
            begun: self.under.map_or(0, |under| under.rounds.count(group)),
            settle_timeout,
            released: &buffers.released,
            evictions: &mut buffers.round,
            out: self.out,
        };
        evicting.run(runs);
        buffers.evictions.append(&mut buffers.round);
    }
}
