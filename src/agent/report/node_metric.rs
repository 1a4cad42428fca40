//! Builds the `NodeMetric` of this node and decides when a report is due. Pure.
//!
//! A report is due within 10 s, and sooner after a change of a rule's state, of the pods, or of the node's use by more
//! than 5 % of its capacity. It takes at most 4 KiB, however long the names are. The interval is jittered, so that nodes
//! that reported the same change do not stay in step.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use fastrand::Rng;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Serialize;

use crate::crd::NodeMetric;
use crate::crd::load_label::LoadLabel;
use crate::crd::node_metric::{
    Amounts, Load, MAX_BREACHED, MAX_PODS, NodeMetricStatus, PeakStats, PodUsage, Pressure,
    PressureLoad, Pressures, ProtectedStalls, ReportingAgent, ResourceLoad, ResourceWindows,
    RuleCounts, Stalled, Usage, WindowStats, Windows,
};
use crate::crd::report::{INTERVAL, MAX_BYTES};
use crate::engine::load::NodeLoad;
use crate::engine::metric::{PressureKind, Resource};
use crate::engine::plan::RuleState;
use crate::engine::pod::PodUid;
use crate::engine::protected::{longer, stall};
use crate::engine::sample::{
    CpuTimes, NodeMemory, NodeSample, PodSample, Sample, SystemService, WaitCounters,
};
use crate::engine::time::BootTime;
use crate::engine::units::{Bytes, MilliCpu};
use crate::engine::window::{NodeWindows, PeakSpan, Span, TimeSeries, Window};
use crate::engine::{RuleReport, usage};
use crate::node::machine::workload::Workload;

/// A report is due at most [`INTERVAL`] after the previous one, and at the earliest after this part of it.
const MIN_INTERVAL_PART: f64 = 0.9;
/// The same if the previous one reported a change, as many nodes may have done at once.
const MIN_INTERVAL_PART_AFTER_CHANGE: f64 = 0.5;
/// Shorter changes of use are noise. The second report, the first with rates, follows after this time.
const MIN_INTERVAL: Duration = Duration::from_secs(3);
/// A change of use is reported when it exceeds this, in percent of the capacity.
const MIN_CHANGE_PERCENT: f64 = 5.0;

/// A snapshot of the machine.
#[derive(Clone, Debug)]
pub struct MetricView<'a> {
    /// The wall clock.
    pub time: Timestamp,
    /// The node and its pods.
    pub sample: &'a Sample,
    /// Statistics over longer times.
    pub windows: &'a NodeWindows,
    /// The node's load; `None` if unknown.
    pub load: Option<NodeLoad>,
    /// The pods with a cgroup.
    pub pods: &'a BTreeMap<PodUid, Workload>,
    /// The pods that no rule may act on.
    pub protected: BTreeSet<&'a PodUid>,
    /// The state of the rules, by id.
    pub reports: &'a [RuleReport],
}

/// Builds the reports of one node.
#[derive(Debug)]
pub struct Builder {
    node: String,
    agent: ReportingAgent,
    random: Rng,
    last: Option<Snapshot>,
    /// The load in the last report, as it counts for schedulers.
    load: Option<u8>,
    due: Option<BootTime>,
}

/// The counters that the next report is compared with.
#[derive(Debug)]
struct Snapshot {
    at: BootTime,
    cpu: Option<CpuTimes>,
    pods: BTreeMap<PodUid, Counters>,
    system: Vec<SystemService>,
    /// Reported use of CPU and memory, in percent.
    reported: [Option<f64>; 2],
}

/// The counters of a pod.
#[derive(Clone, Copy, Debug)]
struct Counters {
    at: BootTime,
    cpu_nanos: Option<u64>,
    waits: WaitCounters,
}

impl Builder {
    /// The reports of `node` by this process, which started at `now`; `boot_id` is the kernel's.
    ///
    /// Sequence numbers start at the milliseconds since boot. There is never more than one report in a millisecond, so a
    /// later process of the same boot always starts higher.
    pub fn new(node: &str, boot_id: &str, now: BootTime, random: Rng) -> Self {
        let started = now.as_nanos() / 1_000_000;
        Self {
            node: node.to_owned(),
            agent: ReportingAgent {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                boot_id: boot_id.to_owned(),
                sequence: i64::try_from(started).unwrap_or(i64::MAX),
            },
            random,
            last: None,
            load: None,
            due: None,
        }
    }

    /// When the next report is due; `None`: with the next sample.
    pub const fn due(&self) -> Option<BootTime> {
        self.due
    }

    /// The use of CPU and memory in the last report, in percent of the node.
    pub fn reported_usage(&self) -> [Option<f64>; 2] {
        self.last.as_ref().map_or([None; 2], |last| last.reported)
    }

    /// Whether the next sample needs the data of a report.
    pub fn is_due(&self, now: BootTime) -> bool {
        self.due.is_none_or(|due| due <= now)
    }

    /// Whether a sample has to be taken just for a report. A change is reported with the next regular sample, so that
    /// frequent changes cause no extra samples.
    pub fn needs_sample(&self, now: BootTime) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// Something changed: the next sample is reported.
    pub const fn changed(&mut self) {
        self.due = None;
    }

    /// Checks whether the node's use differs enough from the last report. Allocates nothing.
    pub fn observe(&mut self, sample: &Sample) {
        let Some(last) = &self.last else { return };
        if sample.at.since(last.at) < MIN_INTERVAL {
            return;
        }
        let now = percents(&sample.node, cpu(last, sample));
        let moved = |(reported, now): (Option<f64>, Option<f64>)| {
            reported
                .zip(now)
                .is_some_and(|(reported, now)| (reported - now).abs() > MIN_CHANGE_PERCENT)
        };
        if last.reported.into_iter().zip(now).any(moved) {
            self.changed();
        }
    }

    /// Checks whether the node's load, in percent of its load line, counts differently for schedulers than that in the last
    /// report.
    pub fn observe_load(&mut self, percent: Option<f64>) {
        if self.last.is_some() && headroom(percent) != self.load {
            self.changed();
        }
    }

    /// Builds the report, also as JSON.
    pub fn build(&mut self, view: &MetricView<'_>) -> (NodeMetric, String) {
        let sample = view.sample;
        let last = self.last.take();
        let node_cpu = last.as_ref().and_then(|last| cpu(last, sample));
        let mut pods: Vec<Used<'_>> = sample
            .pods
            .iter()
            .filter_map(|pod| Used::of(pod, view.pods, last.as_ref(), &sample.node))
            .collect();
        self.agent.sequence += 1;
        let since = last.as_ref().map(|last| sample.at.since(last.at));
        let mut metric = NodeMetric::default();
        metric.metadata.name = Some(self.node.clone());
        metric.status = NodeMetricStatus {
            timestamp: Some(Time(view.time)),
            window: since.filter(|since| !since.is_zero()).map(seconds),
            agent: Some(self.agent.clone()),
            capacity: capacity(&sample.node),
            usage: total(&sample.node, node_cpu, &pods),
            pressure: pressures(&sample.node),
            protected: last.as_ref().map_or_else(ProtectedStalls::default, |last| {
                protected_stalls(last, sample, &view.protected)
            }),
            windows: windows(view.windows),
            load: view.load.as_ref().map(load),
            pods: i64::try_from(view.pods.len()).ok(),
            top_pods: top(&mut pods, &sample.node),
            rules: Some(counts(view.reports)),
            breached: breached(view.reports),
            conditions: Vec::new(),
        };
        self.due = Some(sample.at + self.pause(last.is_none()));
        self.load = headroom(view.load.as_ref().map(|load| load.percent));
        self.last = Some(snapshot(sample, percents(&sample.node, node_cpu)));
        let text = fit(&mut metric, |metric| &mut metric.status);
        (metric, text)
    }

    /// Time until the next report.
    fn pause(&mut self, first: bool) -> Duration {
        if first {
            return MIN_INTERVAL;
        }
        let earliest = match self.due {
            Some(_) => MIN_INTERVAL_PART,
            None => MIN_INTERVAL_PART_AFTER_CHANGE,
        };
        INTERVAL.mul_f64(1.0 - (1.0 - earliest) * self.random.f64())
    }
}

/// The use of one pod.
struct Used<'a> {
    pod: &'a Workload,
    sample: &'a PodSample,
    cpu: Option<MilliCpu>,
}

impl<'a> Used<'a> {
    fn of(
        sample: &'a PodSample,
        pods: &'a BTreeMap<PodUid, Workload>,
        last: Option<&Snapshot>,
        node: &NodeSample,
    ) -> Option<Self> {
        let before = last.and_then(|last| last.pods.get(&sample.uid));
        let cpu = before.and_then(|before| {
            let interval = sample.at.as_nanos().checked_sub(before.at.as_nanos())?;
            let cpus = node.cpu.map(|cpu| cpu.online);
            usage(before.cpu_nanos, sample.cpu_nanos, interval, cpus)
        });
        Some(Self {
            pod: pods.get(&sample.uid)?,
            sample,
            cpu,
        })
    }

    /// The larger of its shares of the node's CPU and memory.
    fn share(&self, node: &NodeSample) -> f64 {
        let share = |part: Option<u64>, whole: Option<u64>| match (part, whole) {
            (Some(part), Some(whole)) if whole > 0 => part as f64 / whole as f64,
            _ => 0.0,
        };
        let cpu = share(
            self.cpu.map(|cpu| cpu.0),
            node.cpu.map(|cpu| u64::from(cpu.online) * 1000),
        );
        let memory = share(
            self.sample.memory.map(|memory| memory.0),
            node.memory.map(|memory| memory.capacity().0),
        );
        cpu.max(memory)
    }

    fn report(&self) -> PodUsage {
        let [cpu_delay, memory_pressure, io_pressure] = self.sample.stalled;
        PodUsage {
            namespace: self.pod.pod.namespace.clone(),
            name: self.pod.pod.name.clone(),
            cpu: self.cpu.map(cores),
            memory: self.sample.memory.map(bytes),
            cpu_delay,
            memory_pressure,
            io_pressure,
        }
    }
}

fn snapshot(sample: &Sample, reported: [Option<f64>; 2]) -> Snapshot {
    let counters = |pod: &PodSample| Counters {
        at: pod.at,
        cpu_nanos: pod.cpu_nanos,
        waits: pod.waits,
    };
    let pods = sample.pods.iter();
    let pods = pods.map(|pod| (pod.uid.clone(), counters(pod)));
    Snapshot {
        system: sample.node.system.clone(),
        at: sample.at,
        cpu: sample.node.cpu,
        pods: pods.collect(),
        reported,
    }
}

/// Millicores used by the node since `last`.
fn cpu(last: &Snapshot, sample: &Sample) -> Option<f64> {
    let interval = sample.at.since(last.at);
    sample.node.cpu?.busy_since(last.cpu?, interval)
}

/// CPU and memory in percent of the capacity.
fn percents(node: &NodeSample, cpu: Option<f64>) -> [Option<f64>; 2] {
    let memory = |memory: NodeMemory| {
        let used = memory.used()?;
        Some(used.0 as f64 / memory.capacity().0 as f64 * 100.0)
    };
    [
        node.cpu.zip(cpu).map(|(cpus, busy)| cpus.percent(busy)),
        node.memory.and_then(memory),
    ]
}

fn capacity(node: &NodeSample) -> Amounts {
    Amounts {
        cpu: node.cpu.map(|cpu| Quantity(cpu.online.to_string())),
        memory: node.memory.map(|memory| bytes(memory.capacity())),
    }
}

fn total(node: &NodeSample, cpu: Option<f64>, pods: &[Used<'_>]) -> Usage {
    let cpu = cpu.map(millicores);
    let memory = node.memory.and_then(NodeMemory::used);
    let pod_cpu: Option<MilliCpu> = sum(pods.iter().map(|pod| pod.cpu));
    let pod_memory: Option<Bytes> = sum(pods.iter().map(|pod| pod.sample.memory));
    let rest = memory.zip(pod_memory);
    let rest = rest.and_then(|(all, pods)| all.0.checked_sub(pods.0));
    Usage {
        node: Amounts {
            cpu: cpu.map(cores),
            memory: memory.map(bytes),
        },
        pods: Amounts {
            cpu: pod_cpu.map(cores),
            memory: pod_memory.map(bytes),
        },
        system: Amounts {
            // They are read at different moments, so the sum of the pods may be ahead.
            cpu: cpu
                .zip(pod_cpu)
                .map(|(all, pods)| cores(all.saturating_sub(pods))),
            memory: rest.map(Bytes).map(bytes),
        },
    }
}

/// The sum of the known parts; `None` if there are parts but none is known.
fn sum<T: std::iter::Sum>(parts: impl Iterator<Item = Option<T>>) -> Option<T> {
    let (mut any, mut known) = (false, false);
    let sum = parts
        .inspect(|part| {
            any = true;
            known |= part.is_some();
        })
        .flatten()
        .sum();
    (known || !any).then_some(sum)
}

fn top(pods: &mut [Used<'_>], node: &NodeSample) -> Vec<PodUsage> {
    pods.sort_by(|a, b| {
        let name = |used: &Used<'_>| used.pod.pod.full_name().to_string();
        let larger = b.share(node).total_cmp(&a.share(node));
        larger.then_with(|| name(a).cmp(&name(b)))
    });
    pods.iter().take(MAX_PODS).map(Used::report).collect()
}

fn pressures(node: &NodeSample) -> Pressures {
    let stalled = |[avg10, avg60, avg300]: [f64; 3]| Stalled {
        avg10,
        avg60,
        avg300,
    };
    let pressure = |kind: PressureKind| {
        node.pressure[kind as usize].map(|lines| Pressure {
            some: stalled(lines.some),
            full: lines.full.map(stalled),
        })
    };
    Pressures {
        cpu: pressure(PressureKind::Cpu),
        memory: pressure(PressureKind::Memory),
        io: pressure(PressureKind::Io),
    }
}

/// Stall times of the protected pods and `system.slice` since the last report; empty without PSI per cgroup.
fn protected_stalls(
    last: &Snapshot,
    sample: &Sample,
    protected: &BTreeSet<&PodUid>,
) -> ProtectedStalls {
    let stalls = |kind: PressureKind| {
        let between = |from: BootTime, to: BootTime| u64::try_from(to.since(from).as_nanos()).ok();
        let pods = sample
            .pods
            .iter()
            .filter(|pod| protected.contains(&pod.uid));
        let pods = pods.filter_map(|pod| {
            let before = last.pods.get(&pod.uid)?;
            stall(&before.waits, &pod.waits, between(before.at, pod.at)?, kind).ok()
        });
        let system = sample.node.system.iter().filter_map(|now| {
            let before = last.system.iter().find(|before| before.name == now.name)?;
            let nanos = between(last.at, sample.at)?;
            Some(stall(&before.waits, &now.waits, nanos, kind))
        });
        let system = system.reduce(longer).and_then(Result::ok);
        let mut stalls: Vec<f64> = pods.chain(system).map(|waiting| waiting.percent).collect();
        stalls.sort_by(f64::total_cmp);
        stalls
    };
    // Nearest-rank percentile.
    let at = |stalls: &[f64], hundredths: usize| {
        let rank = (stalls.len() * hundredths).div_ceil(100);
        let found = rank.checked_sub(1).map(|index| stalls[index]);
        found.map(|percent| (percent * 100.0).round() / 100.0)
    };
    let cpu = stalls(PressureKind::Cpu);
    ProtectedStalls {
        cpu_delay_p95: at(&cpu, 95),
        cpu_delay_max: at(&cpu, 100),
        memory_stall_max: at(&stalls(PressureKind::Memory), 100),
        io_stall_max: at(&stalls(PressureKind::Io), 100),
    }
}

fn headroom(percent: Option<f64>) -> Option<u8> {
    percent.and_then(LoadLabel::of).map(LoadLabel::headroom)
}

/// The load as it is reported.
pub fn load(load: &NodeLoad) -> Load {
    Load {
        percent: tenth(load.percent),
        worst: load.worst.name().to_owned(),
        cpu: resource_load(&load.cpu),
        memory: resource_load(&load.memory),
        pressure: load.pressure.as_ref().map(|pressure| PressureLoad {
            rule: pressure.rule.to_string(),
            percent: tenth(pressure.percent),
        }),
    }
}

fn resource_load(load: &crate::engine::load::ResourceLoad) -> ResourceLoad {
    ResourceLoad {
        percent: tenth(load.percent()),
        expected: tenth(load.expected),
        newcomers: tenth(load.newcomers),
        history: load.history.map(tenth),
        line: tenth(load.line),
        rule: load.rule.as_ref().map(ToString::to_string),
    }
}

fn windows(windows: &NodeWindows) -> Windows {
    Windows {
        cpu: Some(resource_windows(windows.of(Resource::Cpu))),
        memory: Some(resource_windows(windows.of(Resource::Memory))),
        custom: windows
            .custom_values()
            .filter_map(|(window, value)| {
                Some((window.metric.name.to_string(), six_digits(value?)))
            })
            .collect(),
    }
}

fn resource_windows(series: &TimeSeries) -> ResourceWindows {
    let stats = |span: Span| {
        let window = series.spread(span);
        let figure = |of: fn(&crate::engine::window::Spread) -> f64| {
            window.value.as_ref().map(|spread| tenth(of(spread)))
        };
        Some(WindowStats {
            avg: figure(|spread| spread.average),
            stddev: series.deviation(span).value.map(tenth),
            p50: figure(|spread| spread.p50),
            p90: figure(|spread| spread.p90),
            p95: figure(|spread| spread.p95),
            p99: figure(|spread| spread.p99),
            max: figure(|spread| spread.max),
            coverage: hundredth(window.coverage),
        })
    };
    let peak = |span: PeakSpan| {
        let Window { coverage, value } = series.peak(span);
        Some(PeakStats {
            value: value.map(tenth),
            coverage: hundredth(coverage),
        })
    };
    ResourceWindows {
        last5m: stats(Span::FiveMinutes),
        last30m: stats(Span::HalfHour),
        last1h: stats(Span::Hour),
        max_avg1h: peak(PeakSpan::Hour),
        max_avg1d: peak(PeakSpan::Day),
    }
}

fn counts(reports: &[RuleReport]) -> RuleCounts {
    let count = |wanted: fn(&&RuleReport) -> bool| {
        i64::try_from(reports.iter().filter(wanted).count()).unwrap_or(i64::MAX)
    };
    RuleCounts {
        total: count(|_| true),
        breached: count(|rule| rule.state == RuleState::Breached),
        cooling: count(|rule| rule.state == RuleState::Cooling),
        unknown: count(|rule| rule.unknown.is_some()),
    }
}

fn breached(reports: &[RuleReport]) -> Vec<String> {
    let breached = reports
        .iter()
        .filter(|rule| rule.state == RuleState::Breached);
    breached
        .take(MAX_BREACHED)
        .map(|rule| rule.id.to_string())
        .collect()
}

/// Serializes `whole` into at most [`MAX_BYTES`]: if it is too large, the least busy pods are dropped first, then
/// breached rules and windows of the node's settings. `status` returns the status inside.
pub fn fit<T: Serialize>(
    whole: &mut T,
    mut status: impl FnMut(&mut T) -> &mut NodeMetricStatus,
) -> String {
    loop {
        let text = serde_json::to_string(whole).unwrap_or_default();
        if text.len() <= MAX_BYTES {
            return text;
        }
        let status = status(whole);
        if status.top_pods.pop().is_none()
            && status.breached.pop().is_none()
            && status.windows.custom.pop_last().is_none()
        {
            return text;
        }
    }
}

/// As Kubernetes writes durations: `9.998s`.
fn seconds(time: Duration) -> String {
    let text = format!("{:.3}", time.as_secs_f64());
    format!("{}s", text.trim_end_matches('0').trim_end_matches('.'))
}

fn cores(cpu: MilliCpu) -> Quantity {
    Quantity(cpu.to_string())
}

/// In KiB, as metrics-server does.
fn bytes(bytes: Bytes) -> Quantity {
    Quantity(format!("{}Ki", bytes.0 / 1024))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positive, and `as` saturates"
)]
const fn millicores(cpu: f64) -> MilliCpu {
    MilliCpu(cpu as u64)
}

fn tenth(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// Seven digits are stored, and the last one is a rounding error.
fn six_digits(value: f64) -> f64 {
    format!("{value:.5e}").parse().unwrap_or(value)
}

fn hundredth(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

#[cfg(test)]
#[path = "node_metric_tests.rs"]
mod tests;
