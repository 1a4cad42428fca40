//! Preview: what a rule would do if it were enforced.
//!
//! Each Preview rule has shadow state: claims that are not applied and pods that are not evicted, carried from round to
//! round. It uses the same code as an enforced rule, with pod usage reduced by what it would have done so far.

use super::act::{Acting, Buffers, Scene, Under};
use super::evict::Rounds;
use super::gap::gap;
use super::ledger::{Grip, Ledger, allowance};
use super::metric::{Metric, Resource};
use super::plan::Transition;
use super::pod::{Pod, PodUid};
use super::run::Run;
use super::throttle::Raising;
use super::track::{Figures, Pods};
use super::units::Quota;
use super::walk::{cpu_used, memory_held};

/// The actions that a Preview rule would have in force.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    pub(super) ledger: Ledger,
    rounds: Rounds,
    /// Pods that it would have evicted, sorted.
    removed: Vec<PodUid>,
}

impl Shadow {
    /// Drops pods that are gone and pods that it may no longer throttle.
    pub(super) fn follow(&mut self, gone: impl Fn(&PodUid) -> bool, may: impl Fn(&PodUid) -> bool) {
        self.ledger.0.retain(|grip| may(&grip.uid));
        self.removed.retain(|uid| !gone(uid));
    }

    /// Reduces pod usage by what the rule would have saved so far, and returns the total per resource.
    fn cap(&self, pods: &Pods, real: &Ledger, figures: &mut [Figures]) -> Saved {
        let mut saved = Saved::default();
        for uid in &self.removed {
            if let Some(place) = pods.find(uid) {
                saved.cpu += cpu_used(&figures[place]);
                saved.memory += memory_held(&figures[place]);
                figures[place] = Figures::default();
            }
        }
        for grip in &self.ledger.0 {
            let Some(place) = pods.find(&grip.uid) else {
                continue;
            };
            let allowed = union_allowance(grip, real.get(&grip.uid), &pods.all()[place].pod);
            if let Some(cpu) = &mut figures[place].cpu {
                let capped = allowed.min_usage(*cpu);
                saved.cpu += cpu.saturating_sub(capped).0;
                *cpu = capped;
            }
        }
        saved
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Saved {
    cpu: u64,
    memory: u64,
}

impl Saved {
    const fn of(self, metric: &Metric) -> u64 {
        match metric.resource() {
            Some(Resource::Cpu) => self.cpu,
            Some(Resource::Memory) => self.memory,
            None => 0,
        }
    }
}

fn union_allowance(shadow: &Grip, real: Option<&Grip>, pod: &Pod) -> Quota {
    let ratio = shadow.depth().ratio;
    match real {
        Some(real) => allowance(&real.levers, pod, ratio.min(real.depth().ratio)),
        None => allowance(&shadow.levers, pod, ratio),
    }
}

/// One evaluation of the Preview rules, after the enforced ones.
pub(super) struct Previewing<'a> {
    pub(super) scene: Scene<'a>,
    pub(super) under: Under<'a>,
    /// The buffers of the enforced round.
    pub(super) real: &'a Buffers,
    pub(super) buffers: &'a mut Buffers,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Previewing<'_> {
    /// Evaluates one Preview rule on its shadow state.
    pub(super) fn run(&mut self, run: &mut Run) {
        let mut shadow = std::mem::take(&mut run.shadow);
        let mut raising = Raising {
            scene: self.scene,
            out: self.out,
        };
        raising.run(std::slice::from_ref(run), &mut shadow.ledger);
        let (now, at) = (self.scene.now, self.scene.sample.at);
        shadow.rounds.settle(now, at, self.scene.pods);
        if !run.machine.in_force() {
            shadow.removed.clear();
            shadow.rounds.clear();
        }
        if run.acts() {
            self.act(run, &mut shadow);
        }
        run.shadow = shadow;
    }

    fn act(&mut self, run: &mut Run, shadow: &mut Shadow) {
        let Scene { pods, sample, .. } = self.scene;
        let buffers = &mut *self.buffers;
        buffers.figures.clone_from(&self.real.figures);
        buffers.released.copy(&self.real.released);
        let saved = shadow.cap(pods, self.under.ledger, &mut buffers.figures);
        run.gap = gap(
            &run.rule,
            run.judgement,
            saved.of(&run.rule.metric),
            &sample.node,
        );
        buffers.sort(pods);
        let acting = Acting {
            scene: self.scene,
            buffers: &mut *buffers,
            ledger: &mut shadow.ledger,
            rounds: &mut shadow.rounds,
            removed: &shadow.removed,
            under: Some(self.under),
            out: self.out,
        };
        acting.run(std::slice::from_mut(run));
        for evict in buffers.evictions.drain(..) {
            if let Err(place) = shadow.removed.binary_search(&evict.uid) {
                shadow.removed.insert(place, evict.uid);
            }
        }
    }
}
