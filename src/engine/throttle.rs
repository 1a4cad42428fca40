//! Throttling: steps down for breached rules, steps up for rules that are back to normal.

use std::sync::Arc;
use std::time::Duration;

use super::act::Scene;
use super::ledger::{Claim, Depth, FULL, Held, LEAST, Ledger, allowance, at_floor, request};
use super::metric::{ActionKind, Leverage, RankBy, Resource};
use super::plan::{Change, Spared, Transition};
use super::policy::CpuThrottle;
use super::run::Run;
use super::sample::{LeverSample, PodSample, Sample};
use super::time::BootTime;
use super::track::{Tracked, usage};
use super::units::{MilliCpu, Quota};
use super::values::interval;
use super::walk::{Skip, Walk};

const KIND: ActionKind = ActionKind::CpuThrottle;

/// The predicted release of this evaluation's steps, per pod.
#[derive(Debug, Default)]
pub(super) struct Released {
    /// Sum over all pods.
    pub(super) total: MilliCpu,
    /// Indexed like the pods.
    pub(super) pods: Vec<MilliCpu>,
}

impl Released {
    pub(super) fn clear(&mut self, pods: usize) {
        self.total = MilliCpu::ZERO;
        self.pods.clear();
        self.pods.resize(pods, MilliCpu::ZERO);
    }

    pub(super) fn copy(&mut self, other: &Self) {
        self.total = other.total;
        self.pods.clone_from(&other.pods);
    }

    /// Raises the release of one pod to `release` and returns the difference.
    fn raise(&mut self, place: usize, release: MilliCpu) -> MilliCpu {
        let more = release.saturating_sub(self.pods[place]);
        self.pods[place] += more;
        self.total += more;
        more
    }
}

/// The steps down of one round.
pub(super) struct Lowering<'a> {
    pub(super) walk: Walk<'a>,
    /// The victims in order, per resource.
    pub(super) orders: &'a [Vec<usize>; RankBy::ALL.len()],
    /// The period over which pod usage is measured.
    pub(super) period: Duration,
    /// The claims to change.
    pub(super) own: &'a mut Ledger,
    /// The enforced claims, in a Preview.
    pub(super) under: Option<&'a Ledger>,
    pub(super) released: &'a mut Released,
    /// Buffer for the target cgroups of a pod that is not throttled yet.
    pub(super) levers: &'a mut Vec<Held>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Lowering<'_> {
    /// Throttles victims in order, one step each, until their release covers every rule's gap; then one victim for each
    /// rule whose metric has no unit of release.
    pub(super) fn run(&mut self, runs: &mut [Run]) {
        self.put_back(runs);
        self.cover(runs);
        let walk = self.walk;
        let single = |run: &&mut Run| {
            walk.takes(run) && !run.release.returns && run.leverage(KIND) == Leverage::OneVictim
        };
        for run in runs.iter_mut().filter(single) {
            let order = &self.orders[run.rule.metric.rank_by() as usize];
            let _found = order.iter().any(|place| self.step(run, *place));
        }
    }

    /// Throttles the pods of rules that relapsed after a release as far as before the release.
    fn put_back(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        for run in runs
            .iter_mut()
            .filter(|run| run.release.returns && walk.takes(run))
        {
            let mut returned = false;
            for place in walk.order {
                if run.return_to(&walk.pods[*place].pod.uid).is_some() {
                    returned |= self.step(run, *place);
                }
            }
            // If none of these pods is left, the rule takes normal steps.
            run.release.returns = returned;
        }
    }

    fn cover(&mut self, runs: &mut [Run]) {
        let walk = self.walk;
        let measured = Leverage::Measured(Resource::Cpu);
        let takes = |run: &Run| walk.takes(run) && run.leverage(KIND) == measured;
        for place in walk.order {
            let covered = self.released.total.0;
            let mut open = false;
            for run in runs.iter_mut().filter(|r| takes(r) && r.gap > covered) {
                open = true;
                if run.return_to(&walk.pods[*place].pod.uid).is_some() {
                    continue;
                }
                self.step(run, *place);
            }
            if !open {
                return;
            }
        }
    }

    /// Throttles one pod one step further for one rule. Returns false if the pod was skipped.
    fn step(&mut self, run: &mut Run, place: usize) -> bool {
        let Some(spec) = run.rule.action.throttle else {
            return false;
        };
        match self.candidate(run, spec, place) {
            Err(skip) => {
                self.walk.spare(run, place, KIND, skip, self.out);
                false
            }
            Ok((from, uses)) => {
                self.claim(run, spec, place, from, uses);
                true
            }
        }
    }

    /// How far the rule has throttled the pod so far, and the pod's usage.
    fn candidate(
        &mut self,
        run: &Run,
        spec: CpuThrottle,
        place: usize,
    ) -> Result<(Depth, MilliCpu), Skip> {
        self.walk.standing(run, place, KIND)?;
        let tracked = &self.walk.pods[place];
        if let Some((_, reason)) = tracked.spared.filter(|(until, _)| self.walk.now < *until) {
            return Err(Some(reason));
        }
        let uses = self.walk.cpu(run, place)?;
        if uses < LEAST {
            return Err(Some(Spared::UsesLittle));
        }
        let from = self.depth(run, tracked);
        if !self.grasp(tracked, uses) {
            return Err(Some(self.unmeasured(tracked)));
        }
        let down = self.release(tracked, uses, spec.min_ratio) > MilliCpu::ZERO;
        let stuck = at_floor(self.levers, &tracked.pod, from.ratio, spec.min_ratio);
        let idles = from.lower(spec).idle != from.idle;
        // With a minimum ratio of 100 % only the idle class applies.
        let idle_alone = idles && spec.min_ratio == FULL;
        if (!down && !idle_alone) || (stuck && !idles) {
            return Err(Some(Spared::AtFloor));
        }
        Ok((from, uses))
    }

    /// Why a pod with known usage has no quota to lower.
    fn unmeasured(&self, tracked: &Tracked) -> Spared {
        let sample = tracked.sample(self.walk.sample);
        if sample.is_some_and(|sample| sample.levers.is_empty()) {
            Spared::ContainerMissing
        } else {
            Spared::NoSample
        }
    }

    fn depth(&self, run: &Run, tracked: &Tracked) -> Depth {
        let grip = self.own.get(&tracked.pod.uid);
        let claim = grip.and_then(|grip| grip.claim(&run.rule.id));
        claim.map_or(Depth::NONE, |claim| claim.depth)
    }

    /// Fills the buffer with the pod's target cgroups: those in the ledger, or else those in the sample.
    fn grasp(&mut self, tracked: &Tracked, uses: MilliCpu) -> bool {
        let uid = &tracked.pod.uid;
        let real = self.under.and_then(|under| under.get(uid));
        self.levers.clear();
        if let Some(grip) = real.or_else(|| self.own.get(uid)) {
            self.levers.extend_from_slice(&grip.levers);
            return !self.levers.is_empty();
        }
        measure(tracked, self.walk.sample, self.period, uses, self.levers)
    }

    /// The CPU that the pod uses now and could not use at that ratio. Computed per target cgroup, because they cannot use
    /// each other's unused quota.
    fn release(&self, tracked: &Tracked, uses: MilliCpu, ratio: u8) -> MilliCpu {
        let look = || {
            Some((
                tracked.look(self.period)?,
                tracked.sample(self.walk.sample)?,
            ))
        };
        let measured = |held: &Held| {
            let (before, now) = look()?;
            let lever = now.levers.iter().find(|it| it.cgroup == held.cgroup)?;
            lever_usage(before, now, lever, self.period)
        };
        let is_only = self.levers.len() == 1;
        let release = |held: &Held| {
            let measured = if is_only { Some(uses) } else { measured(held) };
            let uses = measured.unwrap_or(held.base);
            uses.saturating_sub(held.allowance(&tracked.pod, ratio).min_usage(uses))
        };
        self.levers.iter().map(release).sum()
    }

    fn claim(
        &mut self,
        run: &mut Run,
        spec: CpuThrottle,
        place: usize,
        from: Depth,
        uses: MilliCpu,
    ) {
        let pod = &self.walk.pods[place].pod;
        let further = from.lower(spec);
        let to = run
            .return_to(&pod.uid)
            .map_or(further, |depth| further.union(depth));
        let grip = self.own.hold(&pod.uid, || self.levers.clone());
        grip.put(Claim {
            rule: run.rule.id.clone(),
            depth: to,
            before: from,
            step: spec.step,
            period: run.rule.period,
            retired: None,
        });
        let real = self.under.and_then(|under| under.get(&pod.uid));
        let ratio = grip
            .depth()
            .ratio
            .min(real.map_or(100, |grip| grip.depth().ratio));
        let quota = allowance(self.levers, pod, ratio);
        let release = self.release(&self.walk.pods[place], uses, ratio);
        let change = Change::Throttle {
            pod: pod.uid.clone(),
            from: from.ratio,
            to: to.ratio,
            idle: to.idle,
            quota,
            release: self.released.raise(place, release),
        };
        run.act(&pod.uid, KIND);
        self.out.push(run.transition(self.walk.now, change));
    }
}

/// Collects the target cgroups of a pod that is not throttled yet, with base = min(quota, usage). Returns false if any
/// of them is unknown.
fn measure(
    tracked: &Tracked,
    sample: &Sample,
    period: Duration,
    uses: MilliCpu,
    levers: &mut Vec<Held>,
) -> bool {
    let Some(now) = tracked.sample(sample) else {
        return false;
    };
    let before = tracked.look(period);
    let measured = |lever: &LeverSample| {
        if now.levers.len() == 1 {
            return Some(uses);
        }
        lever_usage(before?, now, lever, period)
    };
    let known: MilliCpu = now.levers.iter().filter_map(measured).sum();
    for lever in &now.levers {
        let Some(original) = lever.quota else {
            return false;
        };
        let share = || {
            uses.saturating_sub(known)
                .max(request(&tracked.pod, &lever.cgroup))
        };
        let wanted = measured(lever).unwrap_or_else(share);
        levers.push(Held::new(Arc::clone(&lever.cgroup), wanted, original));
    }
    !levers.is_empty()
}

fn lever_usage(
    before: &PodSample,
    now: &PodSample,
    lever: &LeverSample,
    period: Duration,
) -> Option<MilliCpu> {
    let interval = interval(Some(before.at), now.at, period).ok()?;
    let earlier = before.levers.iter().find(|b| b.cgroup == lever.cgroup)?;
    usage(earlier.cpu_nanos, lever.cpu_nanos, interval, None)
}

/// The steps up of one evaluation.
pub(super) struct Raising<'a> {
    pub(super) scene: Scene<'a>,
    pub(super) out: &'a mut Vec<Transition>,
}

impl Raising<'_> {
    /// Restores every claim whose rule is back to normal by one step, and removes those that are back at their original.
    pub(super) fn run(&mut self, runs: &[Run], ledger: &mut Ledger) {
        for grip in &mut ledger.0 {
            let Some(tracked) = self.scene.pods.get(&grip.uid) else {
                grip.claims.clear();
                continue;
            };
            if let Some(now) = tracked.sample(self.scene.sample) {
                grip.follow(&tracked.pod, &now.levers);
            }
            for index in 0..grip.claims.len() {
                let claim = &mut grip.claims[index];
                claim.before = claim.depth;
                let Some(to) = self.next(runs, claim) else {
                    continue;
                };
                claim.depth = to;
                let ratio = grip.depth().ratio;
                let quota = allowance(&grip.levers, &tracked.pod, ratio);
                self.tell(runs, &grip.claims[index], tracked, quota);
            }
        }
        ledger.prune();
    }

    /// The next depth of the claim; `None` if it does not change.
    fn next(&self, runs: &[Run], claim: &mut Claim) -> Option<Depth> {
        let to = match claim.retired {
            Some(due) if due > self.scene.now => return None,
            Some(due) => {
                claim.retired = Some(following(due, claim.period, self.scene.now));
                claim.depth.raise(claim.step)
            }
            None => self.live(find(runs, claim)?, claim.depth),
        };
        (to != claim.depth).then_some(to)
    }

    fn live(&self, run: &Run, depth: Depth) -> Depth {
        let Some(spec) = run.rule.action.throttle else {
            return depth;
        };
        let kept = Depth {
            ratio: depth.ratio.max(spec.min_ratio),
            idle: depth.idle && spec.idle,
        };
        if kept == depth && run.releases(self.scene.now, self.scene.unknown_limit) {
            return depth.raise(spec.step);
        }
        kept
    }

    fn tell(&mut self, runs: &[Run], claim: &Claim, tracked: &Tracked, quota: Quota) {
        self.out.push(Transition {
            at: self.scene.now,
            rule: claim.rule.clone(),
            would: find(runs, claim).is_some_and(Run::would) && claim.retired.is_none(),
            change: Change::Throttle {
                pod: tracked.pod.uid.clone(),
                from: claim.before.ratio,
                to: claim.depth.ratio,
                idle: claim.depth.idle,
                quota,
                release: MilliCpu::ZERO,
            },
        });
    }
}

fn find<'a>(runs: &'a [Run], claim: &Claim) -> Option<&'a Run> {
    let found = runs.binary_search_by(|run| run.rule.id.cmp(&claim.rule));
    found.ok().map(|index| &runs[index])
}

/// The next time `due + k x period` that is at least half a period away; missed times are skipped.
pub(super) fn following(due: BootTime, period: Duration, now: BootTime) -> BootTime {
    let step = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX).max(1);
    let missed = now.since(due).as_nanos() + period.as_nanos() / 2;
    let steps = u64::try_from(missed / u128::from(step)).unwrap_or(u64::MAX);
    due + Duration::from_nanos(step.saturating_mul(steps.saturating_add(1)))
}
