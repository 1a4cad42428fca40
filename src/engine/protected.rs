//! Stall times of the protected pods of a rule: those that its action may not act on, and that no other action delays.
//!
//! Tasks throttled by a quota count as stalled in their pod and in every parent, so our throttles raise the pressure of the
//! node; so do pods in the idle class, and pods that read back page cache that we reclaimed. The result of a rule that acts on
//! pods on such a metric therefore also depends on the stalls of protected pods.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metric::{ActionEffect, ActionKind, PressureKind, Protected};
use super::plan::Unknown;
use super::pod::PodUid;
use super::rank;
use super::rule::Evaluation;
use super::run::Run;
use super::sample::WaitCounters;
use super::track::Tracked;
use super::values::{EvalContext, difference, interval, percent};
use super::walk::ranked_usage;

/// A rule on pressure that acts on pods is only breached if a protected pod waits more than this percentage of the time. One
/// that only evicts: while other actions may have raised the pressure.
const MIN_WAIT_PERCENT: f64 = 5.0;
/// At or below this percentage it is quiet.
const QUIET_WAIT_PERCENT: f64 = 2.0;
/// Default CFS quota period of the kernel and the kubelet.
pub(super) const ENFORCEMENT_PERIOD: Duration = Duration::from_millis(100);
/// Without per-cgroup pressure: if less than this percentage of the CPUs is busy, a pod only waits for its own quota.
const SATURATED_CPU_PERCENT: f64 = 90.0;

/// How long protected cgroups waited in the last interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// Percentage of the time.
    pub percent: f64,
    /// An estimate: the pod's own quota made it wait as well, which was subtracted in whole enforcement periods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
}

/// The additional measurement that a rule's result depended on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Guard {
    /// How long protected pods waited.
    Waiting(Waiting),
    /// An estimate without per-cgroup pressure (cgroup v1): percentage of busy CPUs in the busiest sample.
    BusiestSample(f64),
}

impl Guard {
    /// How near it is to letting the rule act: 1 or more if it does.
    pub(super) fn nearness(self) -> f64 {
        match self {
            Self::Waiting(waiting) => waiting.percent / MIN_WAIT_PERCENT,
            Self::BusiestSample(percent) => percent / SATURATED_CPU_PERCENT,
        }
    }
}

/// Corrects the result of a rule on pressure that actions may have raised: if no protected pod waits, it is quiet.
pub(super) fn guard(
    run: &Run,
    ctx: &EvalContext<'_>,
    evaluation: Evaluation,
) -> (Evaluation, Option<Guard>) {
    let Evaluation::Known {
        value,
        breach,
        quiet,
        incomplete,
    } = evaluation
    else {
        return (evaluation, None);
    };
    let Some(kind) = guarded_pressure(run).filter(|kind| may_raise(run, ctx, *kind)) else {
        return (evaluation, None);
    };
    let known = |breach, quiet| Evaluation::Known {
        value,
        breach,
        quiet,
        incomplete,
    };
    if !ctx.sample.pressure_by_cgroup {
        // An average still includes for minutes what a throttle raised.
        let breach = breach && run.input.is_none_or(|input| input.above);
        let busiest = busiest(run, ctx, kind);
        let quiet = match busiest {
            Some(percent) if percent < SATURATED_CPU_PERCENT => incomplete.is_none(),
            _ => quiet,
        };
        return (
            known(breach && !quiet, quiet),
            busiest.map(Guard::BusiestSample),
        );
    }
    match waiting(run, ctx, kind) {
        Ok(waiting) => {
            let breach = breach && waiting.percent > MIN_WAIT_PERCENT;
            let quiet = quiet || (waiting.percent <= QUIET_WAIT_PERCENT && incomplete.is_none());
            (known(breach, quiet), Some(Guard::Waiting(waiting)))
        }
        Err(reason) if breach => (Evaluation::Unknown(reason), None),
        Err(_) => (evaluation, None),
    }
}

/// The pressure that throttles and reclaims raise together with the rule's metric, if the rule acts on pods.
pub(super) fn guarded_pressure(run: &Run) -> Option<PressureKind> {
    let kind = run.rule.metric.raised_by_throttles();
    kind.filter(|_| delays_pods(run) || run.rule.action.eviction.is_some())
}

/// Whether the rule throttles CPU or reclaims page cache, after which pods wait.
fn delays_pods(run: &Run) -> bool {
    run.rule.action.throttle.is_some()
        || run.action_effect(ActionKind::ForceGc) != ActionEffect::None
}

/// Whether actions may have raised the metric: those of this rule, or of others.
fn may_raise(run: &Run, ctx: &EvalContext<'_>, kind: PressureKind) -> bool {
    delays_pods(run)
        || !ctx.ledger.0.is_empty()
        || ctx.pods.iter().any(|it| reads_back(it, ctx, kind))
}

/// Whether the pod may wait for page cache that was reclaimed from it.
fn reads_back(tracked: &Tracked, ctx: &EvalContext<'_>, kind: PressureKind) -> bool {
    kind != PressureKind::Cpu && tracked.reads_back(ctx.now)
}

/// Percentage of busy CPUs in the busiest sample, while the rule has a throttle in force.
fn busiest(run: &Run, ctx: &EvalContext<'_>, kind: PressureKind) -> Option<f64> {
    let mut throttled_pods = ctx.ledger.0.iter();
    let throttles = run.rule.action.throttle.is_some();
    let throttles_pod = throttled_pods.any(|pod| !throttles || pod.claim(&run.rule.id).is_some());
    ctx.busiest
        .filter(|_| throttles_pod && kind == PressureKind::Cpu)
}

/// The highest share of the last interval that a protected cgroup waited.
///
/// # Errors
/// The reason, if it is unknown for one of them and no other waits.
fn waiting(run: &Run, ctx: &EvalContext<'_>, kind: PressureKind) -> Result<Waiting, Unknown> {
    let stalls = Stalls::of(run, ctx, kind);
    match stalls.incomplete {
        Some(reason) if stalls.highest.percent <= MIN_WAIT_PERCENT => Err(reason),
        _ => Ok(stalls.highest),
    }
}

/// The value of a metric of protected pods.
///
/// # Errors
/// [`Unknown::Missing`] without per-cgroup pressure; else why a protected cgroup has no value.
pub(super) fn value(
    run: &Run,
    ctx: &EvalContext<'_>,
    metric: Protected,
) -> Result<Waiting, Unknown> {
    if !ctx.sample.pressure_by_cgroup {
        return Err(Unknown::Missing);
    }
    let kind = metric.pressure();
    let stalls = Stalls::of(run, ctx, kind);
    let is_max = metric != Protected::CpuDelayP95;
    match (stalls.incomplete, metric) {
        // One cgroup above the threshold is enough.
        (Some(_), _) if is_max && stalls.highest.percent > run.rule.threshold => Ok(stalls.highest),
        (Some(reason), _) => Err(reason),
        (None, Protected::CpuDelayP95) => Ok(p95(run, ctx, kind, stalls.count)),
        (None, _) => Ok(stalls.highest),
    }
}

/// The stalls of all protected cgroups in one interval.
#[derive(Debug, Default)]
struct Stalls {
    highest: Waiting,
    /// Number of known stalls.
    count: usize,
    /// Why one is unknown.
    incomplete: Option<Unknown>,
}

impl Stalls {
    fn of(run: &Run, ctx: &EvalContext<'_>, kind: PressureKind) -> Self {
        let mut stalls = Self::default();
        let mut new = false;
        for_each_protected(run, ctx, kind, |stall| match stall {
            Ok(waiting) => {
                stalls.count += 1;
                if waiting.percent >= stalls.highest.percent {
                    stalls.highest = waiting;
                }
            }
            Err(Unknown::Rebased) => new = true,
            Err(reason) => stalls.incomplete = Some(reason),
        });
        if new && stalls.count == 0 {
            stalls.incomplete.get_or_insert(Unknown::Rebased);
        }
        stalls
    }
}

/// The 95th percentile of the known stalls, by nearest rank. Iterates once for each of the highest 5 percent instead of
/// building a list, since an evaluation must not allocate.
fn p95(run: &Run, ctx: &EvalContext<'_>, kind: PressureKind, count: usize) -> Waiting {
    let mut above = count - (count * 95).div_ceil(100);
    let mut limit = f64::INFINITY;
    loop {
        let mut next = Waiting::default();
        let mut equal = 0;
        for_each_protected(run, ctx, kind, |stall| match stall {
            Ok(it) if it.percent < limit && (equal == 0 || it.percent > next.percent) => {
                (next, equal) = (it, 1);
            }
            Ok(it) if it.percent < limit && it.percent >= next.percent => equal += 1,
            _ => {}
        });
        if equal == 0 || equal > above {
            return next;
        }
        above -= equal;
        limit = next.percent;
    }
}

/// Calls `take` with the stall of every protected cgroup.
fn for_each_protected(
    run: &Run,
    ctx: &EvalContext<'_>,
    kind: PressureKind,
    mut take: impl FnMut(Result<Waiting, Unknown>),
) {
    let is_running = |tracked: &&Tracked| tracked.pod.running && !tracked.pod.terminating;
    let running = || ctx.pods.iter().filter(is_running);
    let affected = |tracked: &Tracked| tracked.is_held() || may_act_on(run, tracked);
    let all_affected = running().all(affected);
    let first_victim = if all_affected {
        first_victim(run, ctx, running())
    } else {
        None
    };
    for tracked in running() {
        let uid = &tracked.pod.uid;
        let is_throttled = ctx.ledger.get(uid).is_some();
        let is_protected = if all_affected {
            !is_throttled && first_victim != Some(uid)
        } else {
            let waits_for_throttle = is_throttled && kind == PressureKind::Cpu;
            !affected(tracked) && !waits_for_throttle
        } && !reads_back(tracked, ctx, kind);
        if is_protected {
            take(of_pod(tracked, ctx, kind));
        }
    }
    if let Some(now) = &ctx.sample.node.system {
        take(of_system(now, ctx, kind));
    }
}

/// The pod on which the rule would act first, if it throttles none: a throttle would not end what that pod waits for.
fn first_victim<'a>(
    run: &Run,
    ctx: &EvalContext<'_>,
    pods: impl Iterator<Item = &'a Tracked> + Clone,
) -> Option<&'a PodUid> {
    let claim = |it: &Tracked| ctx.ledger.get(&it.pod.uid)?.claim(&run.rule.id);
    if pods.clone().any(|it| claim(it).is_some()) {
        return None;
    }
    let usage = |it: &Tracked| it.usage(ctx.sample, ctx.period, None);
    let io_is_known = pods.clone().any(|it| usage(it).io.is_some());
    let ranked = ranked_usage(run.rule.metric.rank_by(), io_is_known);
    let uses = |it: &Tracked| ranked(&usage(it));
    let first = pods.min_by(|a, b| rank::compare((&a.pod, uses(a)), (&b.pod, uses(b))));
    first.map(|it| &it.pod.uid)
}

/// Whether a `PodQOS` allows the rule's action on the pod.
pub(super) fn may_act_on(run: &Run, tracked: &Tracked) -> bool {
    let permit = tracked.permit(run.index);
    let evicts = run.rule.action.eviction.is_some();
    let touches = (permit.throttle && delays_pods(run)) || (permit.evict && evicts);
    touches && !tracked.pod.protected
}

/// The stall of a pod in the last interval.
///
/// # Errors
/// If it has no sample, no earlier one, or no such file.
pub(super) fn of_pod(
    tracked: &Tracked,
    ctx: &EvalContext<'_>,
    kind: PressureKind,
) -> Result<Waiting, Unknown> {
    let now = tracked.sample(ctx.sample).ok_or(Unknown::Missing)?;
    let before = tracked.baseline(ctx.period).ok_or(Unknown::Rebased)?;
    let nanos = interval(Some(before.at), now.at, ctx.period)?;
    stall(&before.waits, &now.waits, nanos, kind)
}

fn of_system(
    now: &WaitCounters,
    ctx: &EvalContext<'_>,
    kind: PressureKind,
) -> Result<Waiting, Unknown> {
    let before = ctx.baseline.system.ok_or(Unknown::Rebased)?;
    let nanos = interval(ctx.baseline.at, ctx.sample.at, ctx.period)?;
    stall(&before, now, nanos, kind)
}

/// The share of an interval of `nanos` nanoseconds that a cgroup was stalled, minus the enforcement periods in which its own
/// quota throttled it.
///
/// # Errors
/// If a counter could not be read, is new, or has an impossible value.
pub fn stall(
    before: &WaitCounters,
    now: &WaitCounters,
    nanos: u64,
    kind: PressureKind,
) -> Result<Waiting, Unknown> {
    let of = kind as usize;
    let stalled = difference(before.stalled[of], now.stalled[of])?;
    let percent = percent(stalled / nanos as f64 * 100.0)?;
    let own_percent = match kind {
        PressureKind::Cpu => own_quota(before, now, nanos)? / nanos as f64 * 100.0,
        PressureKind::Memory | PressureKind::Io => 0.0,
    };
    Ok(Waiting {
        percent: (percent - own_percent).clamp(0.0, 100.0),
        limited: own_percent > 0.0,
    })
}

/// Nanoseconds of the enforcement periods in which the cgroup's own quota throttled it; 0 without a quota.
///
/// # Errors
/// [`Unknown::Rebased`] if the counter is new, gone, or lower than before: a container was restarted.
fn own_quota(before: &WaitCounters, now: &WaitCounters, nanos: u64) -> Result<f64, Unknown> {
    let counters = (before.throttled_periods, now.throttled_periods);
    let throttled = match counters {
        (None, None) => 0.0,
        (before, now) => difference(before, now).map_err(|_| Unknown::Rebased)?,
    };
    Ok(throttled * longest_period(before, now, nanos))
}

/// The longest that an enforcement period can be, in nanoseconds: the kubelet's `cpuCFSQuotaPeriod` may be shorter than the
/// kernel's default, so that more periods fit in the interval. A period that began before it counts, too.
fn longest_period(before: &WaitCounters, now: &WaitCounters, nanos: u64) -> f64 {
    let passed = difference(before.periods, now.periods).unwrap_or(0.0);
    let default = ENFORCEMENT_PERIOD.as_nanos() as f64;
    if passed >= 2.0 {
        default.min(nanos as f64 / (passed - 1.0))
    } else {
        default
    }
}
