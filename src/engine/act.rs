//! One round of actions on pods: throttle, reclaim, evict. The real round and every Preview run this same code.

use std::time::Duration;

use super::evict::{Evicting, Group, PATIENCE, Rounds};
use super::ledger::{Held, Ledger};
use super::plan::{Evict, Reclaim, Transition};
use super::pod::PodUid;
use super::reclaim::Reclaiming;
use super::run::Run;
use super::sample::Sample;
use super::throttle::{Lowering, Released};
use super::time::BootTime;
use super::track::{Figures, Pods, Tracked};
use super::walk::{Walk, cpu_used, memory_held, sort};

/// What a round is decided on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scene<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    pub(super) pods: &'a Pods,
    /// Over which pod usage is taken.
    pub(super) period: Duration,
    pub(super) unknown_limit: Duration,
}

/// Buffers that are kept from round to round.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// What each pod uses, in the order of the pods.
    pub(super) figures: Vec<Figures>,
    /// Places of the pods in the order of victims, by CPU and by memory.
    pub(super) cpu_order: Vec<usize>,
    pub(super) memory_order: Vec<usize>,
    pub(super) released: Released,
    pub(super) levers: Vec<Held>,
    pub(super) reclaims: Vec<Reclaim>,
    pub(super) evictions: Vec<Evict>,
}

impl Buffers {
    /// Fills the figures from the sample and starts an empty round.
    pub(super) fn begin(&mut self, scene: &Scene<'_>) {
        let cpus = scene.sample.node.cpu.map(|cpu| cpu.online);
        let pods = scene.pods.all();
        self.figures.clear();
        let figures = |t: &Tracked| t.figures(scene.sample, scene.period, cpus);
        self.figures.extend(pods.iter().map(figures));
        self.released.clear(pods.len());
        self.sort(scene.pods);
    }

    /// Brings the victims into order.
    pub(super) fn sort(&mut self, pods: &Pods) {
        self.reclaims.clear();
        self.evictions.clear();
        sort(&mut self.cpu_order, pods.all(), &self.figures, cpu_used);
        sort(
            &mut self.memory_order,
            pods.all(),
            &self.figures,
            memory_held,
        );
    }
}

/// What is really in force, below a Preview round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Under<'a> {
    pub(super) ledger: &'a Ledger,
    pub(super) rounds: &'a Rounds,
    /// The groups whose real round had not settled when this evaluation began.
    pub(super) busy: [bool; 3],
}

/// The walk over the victims in one of the buffered orders; a macro, since it borrows single fields.
macro_rules! walk {
    ($acting:ident, $buffers:ident, $order:ident) => {
        Walk {
            now: $acting.scene.now,
            sample: $acting.scene.sample,
            pods: $acting.scene.pods.all(),
            figures: &$buffers.figures,
            order: &$buffers.$order,
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
    /// Pods that a Preview has removed.
    pub(super) removed: &'a [PodUid],
    /// `None` in the real round.
    pub(super) under: Option<Under<'a>>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Acting<'_> {
    /// Acts for those of `runs` that act in this evaluation; decisions go into the buffers, the ledger and the rounds.
    pub(super) fn run(mut self, runs: &mut [Run]) {
        self.lower(runs);
        self.reclaim(runs);
        for group in Group::ALL {
            let under = self.under;
            if !self.rounds.busy(group) && !under.is_some_and(|u| u.busy[group as usize]) {
                self.evict(group, runs);
            }
        }
    }

    fn lower(&mut self, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        let mut lowering = Lowering {
            walk: walk!(self, buffers, cpu_order),
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
            walk: walk!(self, buffers, memory_order),
            reclaims: &mut buffers.reclaims,
            out: self.out,
        };
        reclaiming.cover(runs);
        reclaiming.walk.order = &buffers.cpu_order;
        reclaiming.single(runs);
    }

    fn evict(&mut self, group: Group, runs: &mut [Run]) {
        let buffers = &mut *self.buffers;
        let mut walk = walk!(self, buffers, cpu_order);
        if group == Group::Memory {
            walk.order = &buffers.memory_order;
        }
        // A pod that would have been evicted is gone, virtually, once its grace is over.
        let patience = self.under.map_or(PATIENCE, |_| Duration::ZERO);
        let mut evicting = Evicting {
            walk,
            group,
            rounds: self.rounds,
            under: self.under.map(|under| under.rounds),
            begun: self.under.map_or(0, |under| under.rounds.count(group)),
            patience,
            released: &buffers.released,
            evictions: &mut buffers.evictions,
            out: self.out,
        };
        evicting.run(runs);
    }
}
