//! Preview: what a rule would do if it were enforced.
//!
//! Each Preview rule has shadow state: claims that are not applied and pods that are not evicted, carried from round to
//! round. It uses the same code as an enforced rule, with pod usage reduced by what it would have done so far.

use super::gap::gap;
use super::ladder::{
    Buffers, Enforced, RestorePass, Round, RoundContext, Rounds, cpu_used, unreclaimable_memory,
};
use super::ledger::{ThrottleEntry, ThrottleLedger, allowance};
use super::metric::{Metric, Resource};
use super::plan::Transition;
use super::pod::{Pod, PodUid};
use super::run::Run;
use super::track::{TrackedPods, TrackedUsage};
use super::units::Quota;

/// The actions that a Preview rule would have in force.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    pub(super) ledger: ThrottleLedger,
    rounds: Rounds,
    /// Pods that it would have evicted, sorted.
    removed: Vec<PodUid>,
}

impl Shadow {
    /// Drops pods that are gone and pods that it may no longer throttle.
    pub(super) fn retain_pods(
        &mut self,
        gone: impl Fn(&PodUid) -> bool,
        may: impl Fn(&PodUid) -> bool,
    ) {
        self.ledger.0.retain(|entry| may(&entry.uid));
        self.removed.retain(|uid| !gone(uid));
    }

    /// Reduces pod usage by what the rule would have saved so far, and returns the total per resource.
    fn cap(
        &self,
        pods: &TrackedPods,
        enforced: &ThrottleLedger,
        usage: &mut [TrackedUsage],
    ) -> Saved {
        let mut saved = Saved::default();
        for uid in &self.removed {
            if let Some(index) = pods.find(uid) {
                saved.cpu += cpu_used(&usage[index]);
                saved.memory += unreclaimable_memory(&usage[index]);
                usage[index] = TrackedUsage::default();
            }
        }
        for entry in &self.ledger.0 {
            let Some(index) = pods.find(&entry.uid) else {
                continue;
            };
            let allowed =
                union_allowance(entry, enforced.measured(&entry.uid), &pods.all()[index].pod);
            if let Some(cpu) = &mut usage[index].cpu {
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
    fn of(self, metric: &Metric) -> u64 {
        match metric.resource() {
            Some(Resource::Cpu) => self.cpu,
            Some(Resource::Memory) => self.memory,
            None => 0,
        }
    }
}

fn union_allowance(shadow: &ThrottleEntry, enforced: Option<&ThrottleEntry>, pod: &Pod) -> Quota {
    let ratio = shadow.depth().ratio;
    match enforced {
        Some(enforced) => allowance(
            &enforced.target_cgroups,
            pod,
            ratio.min(enforced.depth().ratio),
        ),
        None => allowance(&shadow.target_cgroups, pod, ratio),
    }
}

/// One evaluation of the Preview rules, after the enforced ones.
pub(super) struct PreviewPass<'a> {
    pub(super) ctx: RoundContext<'a>,
    pub(super) enforced: Enforced<'a>,
    /// The buffers of the enforced round.
    pub(super) enforced_buffers: &'a Buffers,
    pub(super) buffers: &'a mut Buffers,
    pub(super) out: &'a mut Vec<Transition>,
}

impl PreviewPass<'_> {
    /// Evaluates one Preview rule on its shadow state.
    pub(super) fn run(&mut self, run: &mut Run) {
        let mut shadow = std::mem::take(&mut run.shadow);
        let mut restore = RestorePass {
            ctx: self.ctx,
            out: self.out,
        };
        restore.run(std::slice::from_ref(run), &mut shadow.ledger);
        let (now, at) = (self.ctx.now, self.ctx.sample.at);
        shadow.rounds.settle(now, at, self.ctx.pods);
        if !run.machine.in_force() {
            shadow.removed.clear();
            shadow.rounds.clear();
        }
        if run.due && run.machine.in_force() {
            self.act(run, &mut shadow);
        }
        run.shadow = shadow;
    }

    fn act(&mut self, run: &mut Run, shadow: &mut Shadow) {
        let RoundContext { pods, sample, .. } = self.ctx;
        let buffers = &mut *self.buffers;
        buffers.usage.clone_from(&self.enforced_buffers.usage);
        buffers.released.copy(&self.enforced_buffers.released);
        let saved = shadow.cap(pods, self.enforced.ledger, &mut buffers.usage);
        run.gap = gap(
            &run.rule,
            run.evaluation,
            saved.of(&run.rule.metric),
            &sample.node,
        );
        buffers.sort(pods);
        let round = Round {
            ctx: self.ctx,
            buffers: &mut *buffers,
            ledger: &mut shadow.ledger,
            rounds: &mut shadow.rounds,
            removed: &shadow.removed,
            enforced: Some(self.enforced),
            out: self.out,
        };
        round.run(std::slice::from_mut(run));
        for evict in buffers.evictions.drain(..) {
            if let Err(index) = shadow.removed.binary_search(&evict.uid) {
                shadow.removed.insert(index, evict.uid);
            }
        }
    }
}
