//! What protected pods wait: those that no `PodQOS` lets any action touch, and that nothing of ours slows down.
//!
//! Tasks throttled by a quota count as stalled in their pod and in every parent, so our throttles raise the pressure of the
//! node; so do pods in the idle class, and pods that read back page cache that we reclaimed. A rule on protected pods measures
//! none of that.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metric::{ActionKind, PressureKind, Protected};
use super::plan::Unknown;
use super::run::Run;
use super::sample::{NodeSample, SystemService, WaitCounters};
use super::track::Tracked;
use super::values::{EvalContext, difference, interval, percent};

/// Default CFS quota period of the kernel and the kubelet.
pub(super) const ENFORCEMENT_PERIOD: Duration = Duration::from_millis(100);
/// With less than this percentage of its memory available, all waiting for memory counts, whatever limits pods have.
const SHORT_MEMORY_PERCENT: f64 = 10.0;

/// How long protected cgroups waited in the last interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// Percentage of the time.
    pub percent: f64,
    /// The pod's own limits made it wait as well, which is not counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
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
    let stalls = Stalls::of(ctx, kind);
    let is_max = metric != Protected::CpuDelayP95;
    let waiting = match (stalls.incomplete, metric) {
        // One cgroup above the threshold is enough.
        (Some(_), _) if is_max && stalls.highest.percent > run.rule.threshold => stalls.highest,
        (Some(reason), _) => return Err(reason),
        (None, Protected::CpuDelayP95) => p95(ctx, kind, stalls.count),
        (None, _) => stalls.highest,
    };
    Ok(Waiting {
        limited: stalls.limited,
        ..waiting
    })
}

/// The stalls of all protected cgroups in one interval.
#[derive(Debug, Default)]
struct Stalls {
    highest: Waiting,
    /// Number of known stalls.
    count: usize,
    /// Own limits made some wait as well.
    limited: bool,
    /// Why one is unknown.
    incomplete: Option<Unknown>,
}

impl Stalls {
    fn of(ctx: &EvalContext<'_>, kind: PressureKind) -> Self {
        let mut stalls = Self::default();
        let mut new = false;
        for_each_protected(ctx, kind, |stall| match stall {
            Ok(waiting) => {
                stalls.count += 1;
                stalls.limited |= waiting.limited;
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
fn p95(ctx: &EvalContext<'_>, kind: PressureKind, count: usize) -> Waiting {
    let mut above = count - (count * 95).div_ceil(100);
    let mut limit = f64::INFINITY;
    loop {
        let mut next = Waiting::default();
        let mut equal = 0;
        for_each_protected(ctx, kind, |stall| match stall {
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
    ctx: &EvalContext<'_>,
    kind: PressureKind,
    mut take: impl FnMut(Result<Waiting, Unknown>),
) {
    for tracked in ctx.pods.iter().filter(|it| is_protected(it, ctx)) {
        take(of_pod(tracked, ctx, kind));
    }
    if let Some(worst) = of_system(ctx, kind) {
        take(worst);
    }
}

/// Whether the pod is one that rules protect, and nothing of ours makes it wait.
fn is_protected(tracked: &Tracked, ctx: &EvalContext<'_>) -> bool {
    let is_held = ctx.ledger.get(&tracked.pod.uid).is_some();
    tracked.is_protected() && !is_held && !tracked.reads_back(ctx.now, ctx.period)
}

/// Whether a `PodQOS` allows the rule's action on the pod.
pub(super) fn may_act_on(run: &Run, tracked: &Tracked) -> bool {
    let permit = tracked.permit(run.index);
    let mut kinds = ActionKind::ALL.into_iter();
    !tracked.pod.protected && kinds.any(|kind| permit.allows(kind) && run.rule.uses(kind))
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
    let before = tracked.baseline.as_ref().ok_or(Unknown::Rebased)?;
    let nanos = interval(Some(before.at), now.at, ctx.period)?;
    Ok(without_own_limit(
        stall(&before.waits, &now.waits, nanos, kind)?,
        (&before.waits, &now.waits),
        ctx,
        kind,
    ))
}

/// The stall of the system service that waited longest in the last interval. All of them count as one, so that their number
/// does not move percentiles.
fn of_system(ctx: &EvalContext<'_>, kind: PressureKind) -> Option<Result<Waiting, Unknown>> {
    let of = |now: &SystemService| {
        let mut before = ctx.baseline.system.iter();
        let before = before.find(|before| before.name == now.name);
        let nanos = interval(ctx.baseline.at, ctx.sample.at, ctx.period)?;
        stall(
            &before.ok_or(Unknown::Rebased)?.waits,
            &now.waits,
            nanos,
            kind,
        )
    };
    ctx.sample.node.system.iter().map(of).reduce(longer)
}

/// The longer stall; a known one before an unknown one.
pub fn longer(
    a: Result<Waiting, Unknown>,
    b: Result<Waiting, Unknown>,
) -> Result<Waiting, Unknown> {
    match (&a, &b) {
        (Ok(known), Ok(other)) if known.percent >= other.percent => a,
        (Ok(_), Err(_)) => a,
        _ => b,
    }
}

/// A pod that reclaims at its own memory limit waits for itself, unless the node is short of memory, too.
fn without_own_limit(
    waiting: Waiting,
    (before, now): (&WaitCounters, &WaitCounters),
    ctx: &EvalContext<'_>,
    kind: PressureKind,
) -> Waiting {
    let grew =
        |from: Option<u64>, to: Option<u64>| from.zip(to).is_some_and(|(from, to)| to > from);
    let at_limit = grew(before.own_limit_reclaims, now.own_limit_reclaims);
    let node = &ctx.sample.node;
    let is_short = grew(ctx.baseline.page_scans, node.page_scans) || is_short_of_memory(node);
    if kind == PressureKind::Memory && at_limit && !is_short {
        return Waiting {
            percent: 0.0,
            limited: true,
        };
    }
    waiting
}

fn is_short_of_memory(node: &NodeSample) -> bool {
    node.memory.is_none_or(|memory| {
        memory.available.0 as f64 * 100.0 < memory.capacity().0 as f64 * SHORT_MEMORY_PERCENT
    })
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
