//! The value of a rule's metric, from the current sample and the one of the previous evaluation.
//!
//! A value that cannot be determined is [`Unknown`] with a reason, never a guess.

use std::sync::Arc;
use std::time::Duration;

use super::ledger::Ledger;
use super::metric::{DiskRate, InterfaceRate, Metric, PressureKind, Resource};
use super::plan::Unknown;
use super::pod::Pod;
use super::policy::Rule;
use super::protected;
use super::rule::Evaluation;
use super::run::Run;
use super::sample::{
    ContainerSample, CpuTimes, DiskSample, InterfaceSample, NodeSample, ProbeSample, Sample,
    WaitCounters,
};
use super::selector::{Labels, Selector};
use super::time::BootTime;
use super::track::Tracked;
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
#[derive(Debug, Default)]
pub(super) struct Baseline {
    pub(super) at: Option<BootTime>,
    cpu: Option<CpuTimes>,
    pub(super) system: Option<WaitCounters>,
    /// Stall times `[some, full]` of each kind.
    stalled: [[Option<u64>; 2]; 3],
    disks: Vec<DiskSample>,
    interfaces: Vec<InterfaceSample>,
}

impl Baseline {
    pub(super) fn store(&mut self, sample: &Sample) {
        self.at = Some(sample.at);
        self.cpu = sample.node.cpu;
        self.system = sample.node.system;
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
    pub(super) ledger: &'a Ledger,
    /// Mean number of tasks in the samples since the previous evaluation.
    pub(super) tasks: Option<f64>,
    /// Percentage of busy CPUs in the busiest of these samples.
    pub(super) busiest: Option<f64>,
}

/// The input of a rule's metric in the last interval. A slow metric stays above its threshold for minutes after the load
/// that raised it is gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Input {
    /// Start of the interval.
    pub(super) from: BootTime,
    /// Above the rule's threshold.
    pub(super) above: bool,
}

/// Evaluates the metric of the rule.
pub(super) fn evaluate(run: &Run, ctx: &EvalContext<'_>) -> Evaluation {
    let mut fold = Fold::default();
    let rule = &run.rule;
    let evaluator = Evaluator { run, rule, ctx };
    match &rule.metric {
        Metric::Probe(name) => evaluator.probe(name, &mut fold),
        Metric::RunQueueTime | Metric::ThrottledRatio => evaluator.containers(&mut fold),
        Metric::PodStall(kind) => evaluator.pod_stalls(*kind, &mut fold),
        _ if evaluator.stale(ctx.sample.at) => fold.add(Err(Unknown::Stale)),
        Metric::Disk(rate) => evaluator.disks(*rate, &mut fold),
        Metric::Interface(rate) => evaluator.interfaces(*rate, &mut fold),
        _ if evaluator.selects::<[(&str, &str)]>(&[]) => fold.add(evaluator.node_value()),
        _ => {}
    }
    fold.evaluate(rule)
}

/// Evaluates an assumed value.
pub(super) fn assumed(rule: &Rule, value: f64) -> Evaluation {
    let mut fold = Fold::default();
    fold.add(finite(value));
    fold.evaluate(rule)
}

/// The input of the rule's metric with this result; `None` if unknown.
pub(super) fn input(run: &Run, ctx: &EvalContext<'_>, evaluation: Evaluation) -> Option<Input> {
    let rule = &run.rule;
    let evaluator = Evaluator { run, rule, ctx };
    let value = evaluation.value()?;
    let (value, from) = match &rule.metric {
        Metric::Load(_) => (ctx.tasks?, ctx.baseline.at),
        Metric::Pressure { kind, full, .. } => (evaluator.stalled(*kind, *full)?, ctx.baseline.at),
        Metric::Window(Resource::Cpu, _) => {
            let (millicores, cpu) = evaluator.cpu().ok()?;
            (cpu.percent(millicores), ctx.baseline.at)
        }
        Metric::Window(Resource::Memory, _) => {
            let (used, total) = memory(&ctx.sample.node).ok()?;
            (used / total * 100.0, ctx.baseline.at)
        }
        Metric::MemoryUsage | Metric::MemoryUtilization | Metric::ElasticCpuRequested => {
            (value, Some(ctx.sample.at))
        }
        Metric::Probe(_) => (value, evaluator.probe_sample().map(|probe| probe.at)),
        _ => (value, ctx.baseline.at),
    };
    Some(Input {
        from: from?,
        above: value > rule.threshold,
    })
}

/// The mean of the waits that a breached throttling rule measures, in its metric's unit; `None` if it measures none, or
/// node pressure without pressure by cgroup, which quotas raise.
pub(super) fn mean_wait(run: &Run, ctx: &EvalContext<'_>, evaluation: Evaluation) -> Option<f64> {
    if run.is_preview() || run.rule.action.throttle.is_none() || !evaluation.breach() {
        return None;
    }
    let rule = &run.rule;
    let evaluator = Evaluator { run, rule, ctx };
    let mut fold = Fold::default();
    match &rule.metric {
        Metric::RunQueueTime => evaluator.containers(&mut fold),
        Metric::PodStall(kind) => evaluator.pod_stalls(*kind, &mut fold),
        Metric::Protected(protected) => return protected::mean(run, ctx, protected.pressure()),
        Metric::Pressure { kind, .. } => return protected::mean(run, ctx, *kind),
        _ => {}
    }
    mean(fold.sum, fold.count)
}

/// The mean of `count` values with that sum.
pub(super) fn mean(sum: f64, count: usize) -> Option<f64> {
    (count > 0).then(|| sum / count as f64)
}

/// The time of the sample that [`evaluate`] uses; `None` if each series has its own time. Those are never evaluated
/// twice, since there would be no interval.
pub(super) fn sample_time(run: &Run, ctx: &EvalContext<'_>) -> Option<BootTime> {
    let rule = &run.rule;
    match &rule.metric {
        Metric::Probe(_) => Evaluator { run, rule, ctx }
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
    /// Sum and number of the known values.
    sum: f64,
    count: usize,
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
            Ok(value) => {
                self.largest = Some(self.largest.map_or(value, |l| l.max(value)));
                self.sum += value;
                self.count += 1;
            }
            Err(Unknown::Rebased) => self.rebased = true,
            Err(reason) => self.incomplete = Some(reason),
        }
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
}

impl Evaluator<'_> {
    fn stale(&self, at: BootTime) -> bool {
        self.ctx.now.since(at) > self.rule.sample_ttl
    }

    fn selects<L: Labels + ?Sized>(&self, labels: &L) -> bool {
        selects(self.rule.series.as_ref(), labels)
    }

    /// Metrics with one value per node.
    fn node_value(&self) -> Value {
        let node = &self.ctx.sample.node;
        match &self.rule.metric {
            Metric::CpuUsage => self.cpu().map(|(millicores, _)| millicores),
            Metric::CpuUtilization => self.cpu().map(|(millicores, cpu)| cpu.percent(millicores)),
            Metric::MemoryUsage => memory(node).map(|(used, _)| used),
            Metric::MemoryUtilization => memory(node).map(|(used, total)| used / total * 100.0),
            Metric::Load(index) => node
                .load
                .and_then(|load| load.get(*index).copied())
                .map_or(Err(Unknown::Missing), non_negative),
            Metric::Pressure { kind, full, window } => {
                let lines = node.pressure[*kind as usize];
                let line = lines.and_then(|p| if *full { p.full } else { Some(p.some) });
                line.and_then(|averages| averages.get(*window).copied())
                    .map_or(Err(Unknown::Missing), percent)
            }
            Metric::Window(resource, windowed) => self.ctx.windows.value(*resource, *windowed),
            Metric::Protected(metric) => {
                protected::value(self.run, self.ctx, *metric).map(|waiting| waiting.percent)
            }
            _ => Err(Unknown::Missing),
        }
    }

    /// Busy millicores over the interval, and the current CPU times.
    fn cpu(&self) -> Result<(f64, CpuTimes), Unknown> {
        let now = self.ctx.sample.node.cpu.ok_or(Unknown::Missing)?;
        let interval = self.interval(self.ctx.baseline.at, self.ctx.sample.at)?;
        let before = self.ctx.baseline.cpu.ok_or(Unknown::Rebased)?;
        Ok((busy(before, now, interval)?, now))
    }

    /// Percent of the interval in which tasks were stalled.
    fn stalled(&self, kind: PressureKind, full: bool) -> Option<f64> {
        let index = usize::from(full);
        let now = self.ctx.sample.node.pressure[kind as usize]?.totals[index];
        let before = self.ctx.baseline.stalled[kind as usize][index];
        let interval = self
            .interval(self.ctx.baseline.at, self.ctx.sample.at)
            .ok()?;
        let stalled = difference(before, now).ok()?;
        Some(stalled / interval * 100.0)
    }

    fn disks(&self, rate: DiskRate, fold: &mut Fold) {
        for (index, disk) in self.ctx.sample.node.disks.iter().enumerate() {
            if self.selects(&[("device", &*disk.device)][..]) {
                let before =
                    find_near(&self.ctx.baseline.disks, index, |b| b.device == disk.device);
                fold.add(self.disk(rate, before, disk));
            }
        }
    }

    fn disk(&self, rate: DiskRate, before: Option<&DiskSample>, disk: &DiskSample) -> Value {
        let interval = self.interval(self.ctx.baseline.at, self.ctx.sample.at)?;
        let before = before.ok_or(Unknown::Rebased)?;
        let seconds = interval / NANOS_PER_SECOND;
        let per_second = |from: u64, to: u64| increase(from, to).map(|n| n / seconds);
        match rate {
            DiskRate::ReadKib => per_second(before.read_bytes, disk.read_bytes).map(|n| n / KIB),
            DiskRate::WriteKib => per_second(before.write_bytes, disk.write_bytes).map(|n| n / KIB),
            DiskRate::Reads => per_second(before.reads, disk.reads),
            DiskRate::Writes => per_second(before.writes, disk.writes),
            DiskRate::Utilization => {
                let busy = increase(before.io_ms, disk.io_ms)? * 1e6;
                check_plausible(busy, interval, 1.0)?;
                Ok(busy / interval * 100.0)
            }
        }
    }

    fn interfaces(&self, rate: InterfaceRate, fold: &mut Fold) {
        for (index, link) in self.ctx.sample.node.interfaces.iter().enumerate() {
            if self.selects(&[("interface", &*link.interface)][..]) {
                let same = |b: &InterfaceSample| b.interface == link.interface;
                let before = find_near(&self.ctx.baseline.interfaces, index, same);
                fold.add(self.interface(rate, before, link));
            }
        }
    }

    fn interface(
        &self,
        rate: InterfaceRate,
        before: Option<&InterfaceSample>,
        link: &InterfaceSample,
    ) -> Value {
        let interval = self.interval(self.ctx.baseline.at, self.ctx.sample.at)?;
        let before = before.ok_or(Unknown::Rebased)?;
        let count = |of: fn(&InterfaceSample) -> u64| {
            increase(of(before), of(link)).map(|n| n / (interval / NANOS_PER_SECOND))
        };
        match rate {
            InterfaceRate::ReceiveKib => count(|l| l.receive_bytes).map(|n| n / KIB),
            InterfaceRate::SendKib => count(|l| l.send_bytes).map(|n| n / KIB),
            InterfaceRate::ReceivePackets => count(|l| l.receive_packets),
            InterfaceRate::SendPackets => count(|l| l.send_packets),
            InterfaceRate::ReceiveDrops => count(|l| l.receive_drops),
            InterfaceRate::SendDrops => count(|l| l.send_drops),
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
            let baseline = tracked.baseline(self.ctx.period);
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

    fn probe(&self, name: &Arc<str>, fold: &mut Fold) {
        let Some(answer) = self.probe_sample() else {
            return;
        };
        for series in answer.series.iter().filter(|series| series.name == *name) {
            if self.selects(&SeriesLabels(&series.labels)) {
                fold.add(if self.stale(answer.at) {
                    Err(Unknown::Stale)
                } else {
                    finite(series.value)
                });
            }
        }
    }

    fn probe_sample(&self) -> Option<&ProbeSample> {
        let probe = self.rule.probe.as_ref()?;
        let answers = self.ctx.sample.probes.iter();
        answers
            .filter(|answer| answer.url == probe.url)
            .max_by_key(|answer| answer.at)
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

/// Used and total bytes.
pub(super) fn memory(node: &NodeSample) -> Result<(f64, f64), Unknown> {
    let memory = node.memory.ok_or(Unknown::Missing)?;
    match memory.used() {
        Some(used) if memory.total.0 > 0 => Ok((used.0 as f64, memory.total.0 as f64)),
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
