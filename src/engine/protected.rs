//! Stall times of the protected pods of a rule: those that its action may not act on.
//!
//! Tasks throttled by a quota count as stalled in their pod and in every parent, so our throttles raise the pressure of the
//! node. The result of a rule that throttles on such a metric therefore also depends on the stalls of protected pods.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metric::{PressureKind, Protected};
use super::plan::Unknown;
use super::rule::Judgement;
use super::run::Run;
use super::sample::WaitCounters;
use super::track::Tracked;
use super::values::{View, difference, interval, percent};

/// A throttling rule on pressure is only breached if a protected pod waits more than this percentage of the time.
const WAITING: f64 = 5.0;
/// At or below this percentage it is quiet.
const NOT_WAITING: f64 = 2.0;
/// Default CFS quota period of the kernel and the kubelet.
const ENFORCEMENT_PERIOD: Duration = Duration::from_millis(100);
/// Without per-cgroup pressure: if less than this percentage of the CPUs is busy, a pod only waits for its own quota.
const CPUS_BUSY: f64 = 90.0;

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

/// Corrects the result of a throttling rule on pressure: if no protected pod waits, it is quiet.
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
        // An average still includes for minutes what a throttle raised.
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

/// The pressure that throttles raise together with the rule's metric, if the rule throttles or evicts.
pub(super) fn guarded_by(run: &Run) -> Option<PressureKind> {
    let kind = run.rule.metric.raised_by_throttles();
    let action = &run.rule.action;
    kind.filter(|_| action.throttle.is_some() || action.eviction.is_some())
}

/// Whether throttles may have raised the metric: the rule's own, or those of other rules.
fn may_raise(run: &Run, view: &View<'_>) -> bool {
    run.rule.action.throttle.is_some() || !view.ledger.0.is_empty()
}

/// Percentage of busy CPUs in the busiest sample, while the rule has a throttle in force.
fn busiest(run: &Run, view: &View<'_>, kind: PressureKind) -> Option<f64> {
    let mut grips = view.ledger.0.iter();
    let throttles = run.rule.action.throttle.is_some();
    let holds = grips.any(|grip| !throttles || grip.claim(&run.rule.id).is_some());
    view.busiest.filter(|_| holds && kind == PressureKind::Cpu)
}

/// The highest share of the last interval that a protected cgroup waited.
///
/// # Errors
/// The reason, if it is unknown for one of them and no other waits.
fn waiting(run: &Run, view: &View<'_>, kind: PressureKind) -> Result<Waiting, Unknown> {
    let stalls = Stalls::of(run, view, kind);
    match stalls.doubt {
        Some(reason) if stalls.highest.percent <= WAITING => Err(reason),
        _ => Ok(stalls.highest),
    }
}

/// The value of a metric of protected pods.
///
/// # Errors
/// [`Unknown::Missing`] without per-cgroup pressure; else why a protected cgroup has no value.
pub(super) fn value(run: &Run, view: &View<'_>, metric: Protected) -> Result<Waiting, Unknown> {
    if !view.sample.pressure_by_cgroup {
        return Err(Unknown::Missing);
    }
    let kind = metric.pressure();
    let stalls = Stalls::of(run, view, kind);
    let is_max = metric != Protected::CpuDelayP95;
    match (stalls.doubt, metric) {
        // One cgroup above the threshold is enough.
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
    /// Number of known stalls.
    count: usize,
    /// Why one is unknown.
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

/// The 95th percentile of the known stalls, by nearest rank. Iterates once for each of the highest 5 percent instead of
/// building a list, since an evaluation must not allocate.
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

/// Calls `take` with the stall of every protected cgroup.
fn each(
    run: &Run,
    view: &View<'_>,
    kind: PressureKind,
    mut take: impl FnMut(Result<Waiting, Unknown>),
) {
    let is_running = |tracked: &&Tracked| tracked.pod.running && !tracked.pod.terminating;
    let running = || view.pods.iter().filter(is_running);
    let all_touched = running().all(|tracked| may_touch(run, tracked));
    // A single pod does not wait for others.
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

/// Whether a `PodQOS` allows the rule's action on the pod.
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

/// The share of an interval of `nanos` nanoseconds that a cgroup was stalled, minus 100 ms for each enforcement period in
/// which its own quota throttled it.
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
    let own = match kind {
        PressureKind::Cpu => own_quota(before, now) / nanos as f64 * 100.0,
        PressureKind::Memory | PressureKind::Io => 0.0,
    };
    Ok(Waiting {
        percent: (percent - own).clamp(0.0, 100.0),
        limited: own > 0.0,
    })
}

/// Nanoseconds of the enforcement periods in which the cgroup's own quota throttled it; 0 without a quota.
fn own_quota(before: &WaitCounters, now: &WaitCounters) -> f64 {
    let throttled = difference(before.throttled_periods, now.throttled_periods);
    throttled.unwrap_or(0.0) * ENFORCEMENT_PERIOD.as_nanos() as f64
}
