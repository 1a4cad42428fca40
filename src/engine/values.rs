//! The value of a rule's metric, from the current sample and the one of the previous evaluation.
//!
//! A value that cannot be determined is [`Unknown`] with a reason, never a guess.

mod node;

use std::sync::Arc;
use std::time::Duration;

use self::node::NodeValues;
pub(super) use self::node::{Interval, Query, largest};
use super::ledger::ThrottleLedger;
use super::metric::{Metric, PressureKind, Resource};
use super::plan::Unknown;
use super::pod::Pod;
use super::policy::Rule;
use super::protected;
use super::rule::Evaluation;
use super::run::Run;
use super::sample::{
    ContainerSample, CpuTimes, DiskSample, InterfaceSample, NodeSample, Sample, SystemService,
};
use super::selector::{Labels, Selector};
use super::time::BootTime;
use super::track::Tracked;
use super::units::Bytes;
use super::window::NodeWindows;

/// Values above this multiple of what the machine can do are rejected.
const MAX_PLAUSIBLE: f64 = 1.05;
/// The kernel counts node CPU and disk time in ticks, so this much may belong to the neighbouring interval.
const TICK_TOLERANCE: Duration = Duration::from_millis(20);
/// An interval longer than this many periods is a gap.
pub(super) const GAP_PERIODS: u32 = 3;

const NANOS_PER_SECOND: f64 = 1e9;
const KIB: f64 = 1024.0;

type Value = Result<f64, Unknown>;

/// The counters of the node at the previous evaluation. Its buffers are reused.
#[derive(Clone, Debug, Default)]
pub(super) struct Baseline {
    pub(super) at: Option<BootTime>,
    cpu: Option<CpuTimes>,
    pub(super) page_scans: Option<u64>,
    pub(super) system: Vec<SystemService>,
    /// Stall times `[some, full]` of each kind.
    stalled: [[Option<u64>; 2]; 3],
    disks: Vec<DiskSample>,
    interfaces: Vec<InterfaceSample>,
}

impl Baseline {
    pub(super) fn store(&mut self, sample: &Sample) {
        self.at = Some(sample.at);
        self.cpu = sample.node.cpu;
        self.page_scans = sample.node.page_scans;
        self.system.clone_from(&sample.node.system);
        let totals = |kind: usize| sample.node.pressure[kind].map_or([None; 2], |p| p.totals);
        self.stalled = [totals(0), totals(1), totals(2)];
        self.disks.clone_from(&sample.node.disks);
        self.interfaces.clone_from(&sample.node.interfaces);
    }
}

/// The input of a rule evaluation.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvalContext<'a> {
    pub(super) now: BootTime,
    pub(super) sample: &'a Sample,
    pub(super) baseline: &'a Baseline,
    pub(super) period: Duration,
    pub(super) pods: &'a [Tracked],
    pub(super) windows: &'a NodeWindows,
    /// The throttles in force.
    pub(super) ledger: &'a ThrottleLedger,
    /// Mean number of tasks in the samples since the previous evaluation.
    pub(super) tasks: Option<f64>,
}

/// The input of a rule's metric in the last interval. A slow metric stays above its threshold for minutes after the load
/// that raised it is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Input {
    /// In the metric's unit.
    pub(super) value: f64,
    /// Start of the interval.
    pub(super) from: BootTime,
    /// Above the rule's threshold.
    pub(super) above: bool,
}

/// Evaluates the metric of the rule.
pub(super) fn evaluate(run: &Run, ctx: &EvalContext<'_>) -> Evaluation {
    let mut fold = Fold::default();
    let rule = &run.rule;
    let evaluator = Evaluator::new(run, ctx);
    match &rule.metric {
        Metric::RunQueueTime | Metric::ThrottledRatio => evaluator.containers(&mut fold),
        Metric::PodStall(kind) => evaluator.pod_stalls(*kind, &mut fold),
        Metric::Window(..) | Metric::Custom(_) | Metric::Protected(_) => {
            if evaluator.node.stale(ctx.sample.at) {
                fold.add(Err(Unknown::Stale));
            } else if evaluator.selects::<[(&str, &str)]>(&[]) {
                fold.add(evaluator.node_value());
            }
        }
        _ => evaluator.node.add_to(&mut fold),
    }
    fold.evaluate(rule)
}

/// Evaluates an assumed value.
pub(super) fn assumed(rule: &Rule, value: f64) -> Evaluation {
    let mut fold = Fold::default();
    fold.add(finite(value));
    fold.evaluate(rule)
}

/// The input that goes with an assumed value.
pub(super) fn assumed_input(rule: &Rule, value: f64, at: BootTime) -> Input {
    Input {
        value,
        from: at,
        above: value > rule.threshold,
    }
}

/// The input of the rule's metric with this result; `None` if unknown.
pub(super) fn input(run: &Run, ctx: &EvalContext<'_>, evaluation: Evaluation) -> Option<Input> {
    let rule = &run.rule;
    let node = NodeValues::of(rule, ctx);
    let value = evaluation.value()?;
    let source = match &rule.metric {
        Metric::Custom(custom) => &custom.source,
        metric => metric,
    };
    let (value, from) = match source {
        Metric::Load(_) => (ctx.tasks?, ctx.baseline.at),
        Metric::Pressure { kind, full, .. } => (node.stalled(*kind, *full)?, ctx.baseline.at),
        _ if matches!(rule.metric, Metric::Window(..) | Metric::Custom(_)) => {
            window_input(rule, ctx, node)?
        }
        Metric::MemoryUsage | Metric::MemoryUtilization | Metric::ElasticCpuRequested => {
            (value, Some(ctx.sample.at))
        }
        Metric::Probe(_) => (value, node.probe_sample().map(|probe| probe.at)),
        _ => (value, ctx.baseline.at),
    };
    Some(Input {
        value,
        from: from?,
        above: value > rule.threshold,
    })
}

/// The last value of what a window is over, and since when it has been measured.
fn window_input(
    rule: &Rule,
    ctx: &EvalContext<'_>,
    node: NodeValues<'_>,
) -> Option<(f64, Option<BootTime>)> {
    match (rule.metric.resource(), &rule.metric) {
        (Some(Resource::Cpu), _) => {
            let (millicores, cpu) = node.cpu().ok()?;
            Some((cpu.percent(millicores), ctx.baseline.at))
        }
        (Some(Resource::Memory), _) => {
            let (used, total) = memory(&ctx.sample.node).ok()?;
            Some((used / total * 100.0, ctx.baseline.at))
        }
        (None, Metric::Custom(custom)) => ctx.windows.custom_input(custom),
        (None, _) => None,
    }
}

/// The time of the sample that [`evaluate`] uses; `None` if each series has its own time. Those are never evaluated
/// twice, since there would be no interval.
pub(super) fn sample_time(run: &Run, ctx: &EvalContext<'_>) -> Option<BootTime> {
    let rule = &run.rule;
    match &rule.metric {
        Metric::Probe(_) => NodeValues::of(rule, ctx)
            .probe_sample()
            .map(|probe| probe.at),
        Metric::RunQueueTime | Metric::ThrottledRatio | Metric::PodStall(_) => None,
        _ => Some(ctx.sample.at),
    }
}

/// The largest of the series, and why others are unknown.
#[derive(Debug, Default)]
struct Fold {
    largest: Option<f64>,
    /// Why a series has no value, so that it is not known to be quiet.
    incomplete: Option<Unknown>,
    /// A series seen for the first time.
    rebased: bool,
    /// A series of a pod that is throttled.
    throttled: bool,
}

impl Fold {
    fn add(&mut self, value: Value) {
        match value {
            Ok(value) => self.largest = Some(self.largest.map_or(value, |l| l.max(value))),
            Err(Unknown::Rebased) => self.rebased = true,
            Err(reason) => self.incomplete = Some(reason),
        }
    }

    fn largest(self) -> Value {
        let rebased = self.rebased.then_some(Unknown::Rebased);
        let reason = self.incomplete.or(rebased).unwrap_or(Unknown::Missing);
        self.largest.ok_or(reason)
    }

    fn evaluate(self, rule: &Rule) -> Evaluation {
        let rebased = self.rebased.then_some(Unknown::Rebased);
        match self.largest {
            Some(value) => {
                let breach = value > rule.threshold;
                Evaluation::Known {
                    value,
                    breach,
                    quiet: value <= rule.restore_value && self.incomplete.is_none(),
                    incomplete: self.incomplete.filter(|_| !breach),
                }
            }
            // All selected series are of throttled pods, which wait for our quotas.
            None if self.throttled && self.incomplete.is_none() && !self.rebased => {
                Evaluation::Known {
                    value: 0.0,
                    breach: false,
                    quiet: true,
                    incomplete: None,
                }
            }
            None => Evaluation::Unknown(self.incomplete.or(rebased).unwrap_or(Unknown::Missing)),
        }
    }
}

struct Evaluator<'a> {
    run: &'a Run,
    rule: &'a Rule,
    ctx: &'a EvalContext<'a>,
    node: NodeValues<'a>,
}

impl<'a> NodeValues<'a> {
    fn of(rule: &'a Rule, ctx: &EvalContext<'a>) -> Self {
        Self {
            query: Query {
                metric: &rule.metric,
                series: rule.series.as_ref(),
                probe: rule.probe.as_ref(),
                sample_ttl: rule.sample_ttl,
            },
            interval: Interval {
                now: ctx.now,
                sample: ctx.sample,
                baseline: ctx.baseline,
                period: ctx.period,
            },
        }
    }
}

impl<'a> Evaluator<'a> {
    fn new(run: &'a Run, ctx: &'a EvalContext<'a>) -> Self {
        let rule = &run.rule;
        Self {
            run,
            rule,
            ctx,
            node: NodeValues::of(rule, ctx),
        }
    }

    fn stale(&self, at: BootTime) -> bool {
        self.node.stale(at)
    }

    fn selects<L: Labels + ?Sized>(&self, labels: &L) -> bool {
        self.node.selects(labels)
    }

    /// Metrics with one value per node that are not read from the sample alone.
    fn node_value(&self) -> Value {
        match &self.rule.metric {
            Metric::Window(resource, statistic) => self.ctx.windows.value(*resource, *statistic),
            Metric::Custom(custom) => self.ctx.windows.custom_value(custom),
            Metric::Protected(metric) => {
                protected::value(self.run, self.ctx, *metric).map(|waiting| waiting.percent)
            }
            _ => Err(Unknown::Missing),
        }
    }

    fn pod_stalls(&self, kind: PressureKind, fold: &mut Fold) {
        if !self.ctx.sample.pressure_by_cgroup {
            return;
        }
        let running = |tracked: &&Tracked| tracked.pod.running && !tracked.pod.terminating;
        for tracked in self.ctx.pods.iter().filter(running) {
            let labels = PodLabels {
                pod: &tracked.pod,
                container: None,
            };
            if !self.selects(&labels) {
                continue;
            }
            // Waiting caused by our own throttle must not cause more throttling.
            if self.ctx.ledger.get(&tracked.pod.uid).is_some() {
                fold.throttled = true;
                continue;
            }
            let sampled = tracked.sample(self.ctx.sample);
            if sampled.is_some_and(|sample| self.stale(sample.at)) {
                fold.add(Err(Unknown::Stale));
                continue;
            }
            let stall = protected::of_pod(tracked, self.ctx, kind);
            fold.add(stall.map(|waiting| waiting.percent));
        }
    }

    fn containers(&self, fold: &mut Fold) {
        for tracked in self.ctx.pods {
            let Some(sample) = tracked.sample(self.ctx.sample) else {
                continue;
            };
            // Waiting caused by our own throttle must not cause more throttling.
            let throttled = self.ctx.ledger.get(&tracked.pod.uid).is_some();
            let baseline = tracked.baseline.as_ref();
            for (index, container) in sample.containers.iter().enumerate() {
                let labels = PodLabels {
                    pod: &tracked.pod,
                    container: Some(&container.container),
                };
                let selected = self.selects(&labels);
                fold.throttled |= selected && throttled;
                if selected && !throttled {
                    let same = |b: &ContainerSample| b.container == container.container;
                    let before = baseline.and_then(|b| find_near(&b.containers, index, same));
                    let times = (baseline.map(|b| b.at), sample.at);
                    let value = self.container(times, before, container);
                    if let Some(value) = value {
                        fold.add(value);
                    }
                }
            }
        }
    }

    /// `None` if the container has no such value.
    fn container(
        &self,
        (from, to): (Option<BootTime>, BootTime),
        before: Option<&ContainerSample>,
        container: &ContainerSample,
    ) -> Option<Value> {
        let since = || {
            if self.stale(to) {
                return Err(Unknown::Stale);
            }
            let interval = self.interval(from, to)?;
            Ok((interval, before.ok_or(Unknown::Rebased)?))
        };
        let (interval, before) = match since() {
            Ok(since) => since,
            Err(reason) => return Some(Err(reason)),
        };
        match self.rule.metric {
            Metric::RunQueueTime => {
                let waited = difference(before.run_delay_nanos, container.run_delay_nanos);
                Some(waited.map(|nanos| nanos / 1000.0 / (interval / NANOS_PER_SECOND)))
            }
            _ => throttled_ratio(before, container).transpose(),
        }
    }

    /// Nanoseconds from one sample to the next.
    fn interval(&self, from: Option<BootTime>, to: BootTime) -> Value {
        interval(from, to, self.ctx.period).map(|nanos| nanos as f64)
    }
}

/// Nanoseconds from one sample to the next; a sample that is missing, later or older than three periods is no baseline.
pub(super) fn interval(
    from: Option<BootTime>,
    to: BootTime,
    period: Duration,
) -> Result<u64, Unknown> {
    let from = from.ok_or(Unknown::Rebased)?;
    if to < from || to.since(from) > period.saturating_mul(GAP_PERIODS) {
        return Err(Unknown::Rebased);
    }
    if to == from {
        return Err(Unknown::Impossible);
    }
    Ok(to.as_nanos() - from.as_nanos())
}

/// Checks that `capacity` CPUs (or disks) can have `nanos` of run time in `interval`.
pub(super) fn check_plausible(nanos: f64, interval: f64, capacity: f64) -> Result<(), Unknown> {
    let max = capacity * (interval * MAX_PLAUSIBLE + TICK_TOLERANCE.as_nanos() as f64);
    if nanos > max {
        return Err(Unknown::Impossible);
    }
    Ok(())
}

impl CpuTimes {
    /// Millicores that were busy since `before`, `interval` ago; `None` if the counter went back or grew by more than the
    /// machine can do.
    pub fn busy_since(self, before: Self, interval: Duration) -> Option<f64> {
        busy(before, self, interval.as_nanos() as f64).ok()
    }
}

/// Millicores that were busy over `interval` nanoseconds.
fn busy(before: CpuTimes, now: CpuTimes, interval: f64) -> Value {
    if now.online == 0 || interval <= 0.0 {
        return Err(Unknown::Impossible);
    }
    let busy = increase(before.busy, now.busy)?;
    let idle = now.idle.saturating_sub(before.idle);
    if busy + idle as f64 <= 0.0 && interval > TICK_TOLERANCE.as_nanos() as f64 {
        // A CPU is either busy or idle, so counters that do not change are not live.
        return Err(Unknown::Impossible);
    }
    check_plausible(busy, interval, f64::from(now.online.max(before.online)))?;
    Ok(busy * 1000.0 / interval)
}

fn selects<L: Labels + ?Sized>(selector: Option<&Selector>, labels: &L) -> bool {
    selector.is_none_or(|selector| selector.matches(labels))
}

/// The labels of a series of a pod or container: `namespace`, `pod`, `container`, and the pod's own.
struct PodLabels<'a> {
    pod: &'a Pod,
    container: Option<&'a str>,
}

impl Labels for PodLabels<'_> {
    fn label(&self, key: &str) -> Option<&str> {
        match key {
            "namespace" => Some(&self.pod.namespace),
            "pod" => Some(&self.pod.name),
            "container" if self.container.is_some() => self.container,
            _ => self.pod.labels.label(key),
        }
    }
}

struct SeriesLabels<'a>(&'a [(Arc<str>, Arc<str>)]);

impl Labels for SeriesLabels<'_> {
    fn label(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().find(|(name, _)| **name == *key);
        found.map(|(_, value)| &**value)
    }
}

/// The entry that satisfies `same`, checked at `index` first, since lists rarely change between samples.
fn find_near<T>(list: &[T], index: usize, same: impl Fn(&T) -> bool) -> Option<&T> {
    match list.get(index) {
        Some(entry) if same(entry) => Some(entry),
        _ => list.iter().find(|entry| same(entry)),
    }
}

fn increase(from: u64, to: u64) -> Value {
    to.checked_sub(from)
        .map(|n| n as f64)
        .ok_or(Unknown::Impossible)
}

pub(super) fn difference(from: Option<u64>, to: Option<u64>) -> Value {
    let to = to.ok_or(Unknown::Missing)?;
    increase(from.ok_or(Unknown::Rebased)?, to)
}

/// Percent of the enforcement periods; `None` if no period passed.
fn throttled_ratio(
    before: &ContainerSample,
    container: &ContainerSample,
) -> Result<Option<f64>, Unknown> {
    let periods = difference(before.periods, container.periods)?;
    let throttled = difference(before.throttled_periods, container.throttled_periods)?;
    if periods == 0.0 {
        return Ok(None);
    }
    percent(throttled / periods * 100.0).map(Some)
}

/// Bytes in use and the capacity, both without the pools of huge pages.
pub(super) fn memory(node: &NodeSample) -> Result<(f64, f64), Unknown> {
    let memory = node.memory.ok_or(Unknown::Missing)?;
    let capacity = memory.capacity();
    match memory.used() {
        Some(used) if capacity > Bytes::ZERO => Ok((used.0 as f64, capacity.0 as f64)),
        _ => Err(Unknown::Impossible),
    }
}

fn finite(value: f64) -> Value {
    if value.is_finite() {
        Ok(value)
    } else {
        Err(Unknown::Impossible)
    }
}

fn non_negative(value: f64) -> Value {
    if value < 0.0 {
        return Err(Unknown::Impossible);
    }
    finite(value)
}

pub(super) fn percent(value: f64) -> Value {
    if value > 100.0 * MAX_PLAUSIBLE {
        return Err(Unknown::Impossible);
    }
    non_negative(value)
}
