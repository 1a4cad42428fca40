//! What the pods wait for that a rule protects: those that its action may not touch.
//!
//! Tasks held back by a quota count as stalled, in their pod and in every parent, so a throttle of ours raises the pressure
//! of the node. A rule that throttles by such a metric is therefore judged by the waiting of others as well.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metric::{PressureKind, Protected};
use super::plan::Unknown;
use super::rule::Judgement;
use super::run::Run;
use super::sample::WaitCounters;
use super::track::Tracked;
use super::values::{View, difference, interval, percent};

/// More than so many percent of waiting, and a rule on pressure whose action throttles may be breached.
const WAITING: f64 = 5.0;
/// So many or less, and it is quiet.
const NOT_WAITING: f64 = 2.0;
/// Of CPU quotas, as the kernel and the kubelet have it where they are not told otherwise.
const ENFORCEMENT_PERIOD: Duration = Duration::from_millis(100);
/// Where the kernel keeps no pressure by cgroup: with less of the CPUs busy in percent, a pod waits for nothing but its
/// own quota.
const CPUS_BUSY: f64 = 90.0;

/// How long protected cgroups waited in the last interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// The share of the time, in percent.
    pub percent: f64,
    /// An estimate: a quota of the pod's own made it wait as well, which is taken off by whole enforcement periods.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
}

/// By what a rule was judged besides its own metric.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Guard {
    /// How long the protected waited.
    Waiting(Waiting),
    /// An estimate, where the kernel keeps no pressure by cgroup (cgroup v1): percent of the CPUs that were busy in the
    /// busiest sample.
    BusiestSample(f64),
}

/// Judges a rule on pressure whose action throttles by the waiting of the protected too: without any it is quiet, since
/// there is none to throttle for.
pub(super) fn guard(run: &Run, view: &View<'_>, judged: Judgement) -> (Judgement, Option<Guard>) {
    let Judgement::Known {
        value,
        breach,
        quiet,
        doubt,
    } = judged
    else {
        return (judged, None);
    };
    let Some(kind) = guarded_by(run).filter(|_| may_raise(run, view)) else {
        return (judged, None);
    };
    let judge = |breach, quiet| Judgement::Known {
        value,
        breach,
        quiet,
        doubt,
    };
    if !view.sample.pressure_by_cgroup {
        // An average holds what a throttle raised for minutes after its end.
        let breach = breach && run.input.is_none_or(|input| input.above);
        let busiest = busiest(run, view, kind);
        let quiet = match busiest {
            Some(percent) if percent < CPUS_BUSY => doubt.is_none(),
            _ => quiet,
        };
        return (
            judge(breach && !quiet, quiet),
            busiest.map(Guard::BusiestSample),
        );
    }
    match waiting(run, view, kind) {
        Ok(waiting) => {
            let breach = breach && waiting.percent > WAITING;
            let quiet = quiet || (waiting.percent <= NOT_WAITING && doubt.is_none());
            (judge(breach, quiet), Some(Guard::Waiting(waiting)))
        }
        Err(reason) if breach => (Judgement::Unknown(reason), None),
        Err(_) => (judged, None),
    }
}

/// The kind of waiting that throttles would raise together with the rule's metric, where it throttles or evicts.
pub(super) fn guarded_by(run: &Run) -> Option<PressureKind> {
    let kind = run.rule.metric.raised_by_throttles();
    let action = &run.rule.action;
    kind.filter(|_| action.throttle.is_some() || action.eviction.is_some())
}

/// Whether a throttle is in question: the rule's own, or for one that evicts those that others have in force.
fn may_raise(run: &Run, view: &View<'_>) -> bool {
    run.rule.action.throttle.is_some() || !view.ledger.0.is_empty()
}

/// Percent of the CPUs that were busy in the busiest sample, while the rule holds a pod's CPU down.
fn busiest(run: &Run, view: &View<'_>, kind: PressureKind) -> Option<f64> {
    let mut grips = view.ledger.0.iter();
    let throttles = run.rule.action.throttle.is_some();
    let holds = grips.any(|grip| !throttles || grip.claim(&run.rule.id).is_some());
    view.busiest.filter(|_| holds && kind == PressureKind::Cpu)
}

/// The highest share of the last interval in which a protected cgroup waited.
///
/// # Errors
/// Where it is not known of all of them, and no other waits: why.
fn waiting(run: &Run, view: &View<'_>, kind: PressureKind) -> Result<Waiting, Unknown> {
    let stalls = Stalls::of(run, view, kind);
    match stalls.doubt {
        Some(reason) if stalls.highest.percent <= WAITING => Err(reason),
        _ => Ok(stalls.highest),
    }
}

/// The value of a metric of the protected.
///
/// # Errors
/// [`Unknown::Missing`] where the kernel keeps no pressure by cgroup; else why a protected cgroup has no value.
pub(super) fn value(run: &Run, view: &View<'_>, metric: Protected) -> Result<Waiting, Unknown> {
    if !view.sample.pressure_by_cgroup {
        return Err(Unknown::Missing);
    }
    let kind = metric.pressure();
    let stalls = Stalls::of(run, view, kind);
    let is_max = metric != Protected::CpuDelayP95;
    match (stalls.doubt, metric) {
        // One that waits is enough.
        (Some(_), _) if is_max && stalls.highest.percent > run.rule.watermark => Ok(stalls.highest),
        (Some(reason), _) => Err(reason),
        (None, Protected::CpuDelayP95) => Ok(p95(run, view, kind, stalls.count)),
        (None, _) => Ok(stalls.highest),
    }
}

/// The stalls of all protected cgroups in one interval.
#[derive(Debug, Default)]
struct Stalls {
    highest: Waiting,
    /// How many are known.
    count: usize,
    /// Why one is not.
    doubt: Option<Unknown>,
}

impl Stalls {
    fn of(run: &Run, view: &View<'_>, kind: PressureKind) -> Self {
        let mut stalls = Self::default();
        let mut new = false;
        each(run, view, kind, |stall| match stall {
            Ok(waiting) => {
                stalls.count += 1;
                if waiting.percent >= stalls.highest.percent {
                    stalls.highest = waiting;
                }
            }
            Err(Unknown::Rebased) => new = true,
            Err(reason) => stalls.doubt = Some(reason),
        });
        if new && stalls.count == 0 {
            stalls.doubt.get_or_insert(Unknown::Rebased);
        }
        stalls
    }
}

/// The 95th percentile of the known stalls, by nearest rank. They are gone through again for each of the highest 5 percent
/// rather than put into a list: an evaluation allocates nothing.
fn p95(run: &Run, view: &View<'_>, kind: PressureKind, count: usize) -> Waiting {
    let mut above = count - (count * 95).div_ceil(100);
    let mut limit = f64::INFINITY;
    loop {
        let mut next = Waiting::default();
        let mut equal = 0;
        each(run, view, kind, |stall| match stall {
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

/// Hands over the stall of every protected cgroup.
fn each(
    run: &Run,
    view: &View<'_>,
    kind: PressureKind,
    mut take: impl FnMut(Result<Waiting, Unknown>),
) {
    let is_running = |tracked: &&Tracked| tracked.pod.running && !tracked.pod.terminating;
    let running = || view.pods.iter().filter(is_running);
    let all_touched = running().all(|tracked| may_touch(run, tracked));
    // A pod alone waits for no other.
    let alone = all_touched && running().count() == 1;
    for tracked in running() {
        let is_protected = if all_touched {
            !alone && view.ledger.get(&tracked.pod.uid).is_none()
        } else {
            !may_touch(run, tracked)
        };
        if is_protected {
            take(of_pod(tracked, view, kind));
        }
    }
    if let Some(now) = &view.sample.node.system {
        take(of_system(now, view, kind));
    }
}

/// Whether some `PodQOS` lets the rule's action touch the pod.
pub(super) fn may_touch(run: &Run, tracked: &Tracked) -> bool {
    let permit = tracked.permit(run.index);
    let action = &run.rule.action;
    let throttles = action.throttle.is_some() || action.force_gc;
    let touches = (permit.throttle && throttles) || (permit.evict && action.eviction.is_some());
    touches && !tracked.pod.protected
}

fn of_pod(tracked: &Tracked, view: &View<'_>, kind: PressureKind) -> Result<Waiting, Unknown> {
    let now = tracked.sample(view.sample).ok_or(Unknown::Missing)?;
    let before = tracked.look(view.period).ok_or(Unknown::Rebased)?;
    let nanos = interval(Some(before.at), now.at, view.period)?;
    stall(&before.waits, &now.waits, nanos, kind)
}

fn of_system(now: &WaitCounters, view: &View<'_>, kind: PressureKind) -> Result<Waiting, Unknown> {
    let before = view.base.system.ok_or(Unknown::Rebased)?;
    let nanos = interval(view.base.at, view.sample.at, view.period)?;
    stall(&before, now, nanos, kind)
}

/// The share of an interval of so many nanoseconds in which a cgroup was stalled. Enforcement periods in which its own quota
/// throttled it are taken off, each with its usual 100 ms: it did not wait for others then.
///
/// # Errors
/// Where a counter could not be read, was not there before, or counts what cannot be.
pub fn stall(
    before: &WaitCounters,
    now: &WaitCounters,
    nanos: u64,
    kind: PressureKind,
) -> Result<Waiting, Unknown> {
    let of = kind as usize;
    let stalled = difference(before.stalled[of], now.stalled[of])?;
    let percent = percent(stalled / nanos as f64 * 100.0)?;
    let own = match kind {
        PressureKind::Cpu => own_quota(before, now) / nanos as f64 * 100.0,
        PressureKind::Memory | PressureKind::Io => 0.0,
    };
    Ok(Waiting {
        percent: (percent - own).clamp(0.0, 100.0),
        limited: own > 0.0,
    })
}

/// Nanoseconds of the enforcement periods in which the cgroup's own quota throttled it; 0 without one.
fn own_quota(before: &WaitCounters, now: &WaitCounters) -> f64 {
    let throttled = difference(before.throttled_periods, now.throttled_periods);
    throttled.unwrap_or(0.0) * ENFORCEMENT_PERIOD.as_nanos() as f64
}
