//! The kubelet's `/stats/summary`, converted to samples for the engine.
//!
//! The kubelet measures differently from the node's agent:
//! - CPU of the node is that of the root cgroup over the kubelet's window of about 10 s, without steal.
//! - Memory in use is the kubelet's working set. It includes active page cache, which `MemAvailable` counts as free, so it
//!   is an upper bound of `MemTotal` - `MemAvailable`; anonymous memory is a lower bound.
//! - Memory that a pod holds is its anonymous memory; shared memory and slab cannot be told apart from page cache.
//!   Reclaimable page cache is what the kubelet counts as inactive, a lower bound.

use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;

use super::PodSubject;
use crate::engine::sample::{
    CpuTimes, InterfaceSample, MemoryParts, NodeMemory, NodeSample, PodSample, Pressure, Sample,
    TargetCgroupSample,
};
use crate::engine::time::BootTime;
use crate::engine::units::{Bytes, MilliCpu};

/// Time of the first of the two samples; its value is arbitrary.
pub(super) const BEFORE: BootTime = BootTime::from_nanos(1_000_000_000_000_000);
/// Time between the two samples.
pub(super) const PERIOD: Duration = Duration::from_secs(10);
const SECONDS: u64 = PERIOD.as_secs();

/// The fields of `/stats/summary` that are used.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct KubeletSummary {
    node: NodeStats,
    pods: Vec<PodStats>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct NodeStats {
    cpu: Option<Cpu>,
    memory: Option<Memory>,
    io: Option<Io>,
    network: Option<Network>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Cpu {
    time: Option<Timestamp>,
    usage_nano_cores: Option<u64>,
    psi: Option<Psi>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Memory {
    time: Option<Timestamp>,
    usage_bytes: Option<u64>,
    working_set_bytes: Option<u64>,
    rss_bytes: Option<u64>,
    psi: Option<Psi>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Io {
    psi: Option<Psi>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Psi {
    full: PsiLine,
    some: PsiLine,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct PsiLine {
    total: u64,
    avg10: f64,
    avg60: f64,
    avg300: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Network {
    time: Option<Timestamp>,
    interfaces: Vec<Interface>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Interface {
    name: String,
    rx_bytes: Option<u64>,
    tx_bytes: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PodStats {
    pod_ref: PodRef,
    cpu: Option<Cpu>,
    memory: Option<Memory>,
    containers: Vec<ContainerStats>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct PodRef {
    uid: String,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct ContainerStats {
    cpu: Option<Cpu>,
    memory: Option<Memory>,
}

/// The size of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) cpus: u32,
    pub(super) memory: Bytes,
}

/// Two samples for the engine, one [`PERIOD`] apart. Counters start at 0. Only the second has gauges, so that no rule acts
/// at the first.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Samples {
    pub(super) before: Sample,
    pub(super) now: Sample,
}

impl Samples {
    /// Converts the summaries of a node's kubelet; there is an earlier one only with `--sample`.
    pub(super) fn of(
        size: Size,
        earlier: Option<&KubeletSummary>,
        summary: Option<&KubeletSummary>,
        pods: &[PodSubject],
    ) -> Self {
        let summary = summary.cloned().unwrap_or_default();
        let newest = summary.newest();
        let age = |time: Option<Timestamp>| match (time, newest) {
            (Some(time), Some(newest)) => newest.duration_since(time).unsigned_abs(),
            _ => Duration::ZERO,
        };
        let node = &summary.node;
        let taken = node.cpu.as_ref().map(|cpu| age(cpu.time));
        let (before, now) = node.samples(size, earlier.map(|earlier| &earlier.node));
        let mut samples = Self {
            before: sample(BEFORE, taken, before),
            now: sample(BEFORE + PERIOD, taken, now),
        };
        for stats in &summary.pods {
            let uid = stats.pod_ref.uid.as_str();
            let Some(subject) = pods.iter().find(|subject| subject.kubelet_uid == uid) else {
                continue;
            };
            let age = age(stats.cpu.as_ref().and_then(|cpu| cpu.time));
            samples
                .before
                .pods
                .push(stats.sample(subject, back(BEFORE, age), 0));
            samples
                .now
                .pods
                .push(stats.sample(subject, back(BEFORE + PERIOD, age), SECONDS));
        }
        samples
    }
}

fn sample(at: BootTime, age: Option<Duration>, node: NodeSample) -> Sample {
    Sample {
        at: back(at, age.unwrap_or_default()),
        node,
        ..Sample::default()
    }
}

fn back(at: BootTime, age: Duration) -> BootTime {
    let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
    BootTime::from_nanos(at.as_nanos().saturating_sub(age))
}

impl KubeletSummary {
    /// Lower bound of `MemTotal` - `MemAvailable`.
    pub(super) fn min_memory(&self) -> Option<Bytes> {
        self.node.memory.as_ref()?.rss_bytes.map(Bytes)
    }

    /// The newest timestamp of the summary.
    fn newest(&self) -> Option<Timestamp> {
        let pods = self.pods.iter().map(|pod| (&pod.cpu, &pod.memory));
        let all = pods.chain([(&self.node.cpu, &self.node.memory)]);
        let times = all.flat_map(|(cpu, memory)| {
            let cpu = cpu.as_ref().and_then(|cpu| cpu.time);
            [cpu, memory.as_ref().and_then(|memory| memory.time)]
        });
        times.flatten().max()
    }
}

impl NodeStats {
    fn samples(&self, size: Size, earlier: Option<&Self>) -> (NodeSample, NodeSample) {
        let cpu = |busy| CpuTimes {
            busy,
            idle: 0,
            online: size.cpus,
        };
        let busy = self.cpu.as_ref().and_then(|cpu| cpu.usage_nano_cores);
        // A kubelet reports 0 after its first sample.
        let busy = busy.filter(|busy| *busy > 0 && size.cpus > 0);
        let (interfaces_before, interfaces) = self.interfaces(earlier);
        let before = NodeSample {
            cpu: busy.map(|_| cpu(0)),
            interfaces: interfaces_before,
            ..NodeSample::default()
        };
        let now = NodeSample {
            // Without usage no rate results, but the CPU count is needed to convert percentages.
            cpu: (size.cpus > 0).then(|| cpu(busy.unwrap_or(0).saturating_mul(SECONDS))),
            memory: self.memory(size),
            pressure: self.pressure(),
            interfaces,
            ..NodeSample::default()
        };
        (before, now)
    }

    fn memory(&self, size: Size) -> Option<NodeMemory> {
        let memory = self.memory.as_ref();
        let used = memory.and_then(|memory| memory.working_set_bytes);
        let used = used.filter(|used| *used > 0 && size.memory > Bytes::ZERO)?;
        Some(NodeMemory {
            total: size.memory,
            available: size.memory.saturating_sub(Bytes(used)),
            ..NodeMemory::default()
        })
    }

    fn pressure(&self) -> [Option<Pressure>; 3] {
        let cpu = self.cpu.as_ref().and_then(|cpu| cpu.psi.as_ref());
        let memory = self.memory.as_ref().and_then(|memory| memory.psi.as_ref());
        let io = self.io.as_ref().and_then(|io| io.psi.as_ref());
        [cpu, memory, io].map(|psi| psi.and_then(Psi::pressure))
    }

    /// Rates between two summaries, as counters over the period. An interface that only one has is skipped.
    fn interfaces(&self, earlier: Option<&Self>) -> (Vec<InterfaceSample>, Vec<InterfaceSample>) {
        let rates = || {
            let (before, now) = (earlier?.network.as_ref()?, self.network.as_ref()?);
            let elapsed = now.time?.duration_since(before.time?);
            let millis = u64::try_from(elapsed.as_millis())
                .ok()
                .filter(|ms| *ms > 0)?;
            Some(now.rates(before, millis))
        };
        let now = rates().unwrap_or_default();
        let zero = |link: &InterfaceSample| InterfaceSample {
            interface: link.interface.clone(),
            ..InterfaceSample::default()
        };
        (now.iter().map(zero).collect(), now)
    }
}

impl Network {
    fn rates(&self, before: &Self, millis: u64) -> Vec<InterfaceSample> {
        let grown = |from: Option<u64>, to: Option<u64>| {
            let grown = to?.checked_sub(from?)?;
            Some(grown.saturating_mul(SECONDS * 1000) / millis)
        };
        let rate = |link: &Interface| {
            let before = before.interfaces.iter().find(|b| b.name == link.name)?;
            Some(InterfaceSample {
                interface: link.name.as_str().into(),
                receive_bytes: grown(before.rx_bytes, link.rx_bytes)?,
                send_bytes: grown(before.tx_bytes, link.tx_bytes)?,
                ..InterfaceSample::default()
            })
        };
        self.interfaces.iter().filter_map(rate).collect()
    }
}

impl Psi {
    /// The kubelet reports all zeros if the kernel has no pressure files.
    fn pressure(&self) -> Option<Pressure> {
        let measured = self.some.total > 0 || self.full.total > 0;
        measured.then(|| Pressure {
            some: self.some.averages(),
            full: Some(self.full.averages()),
            ..Pressure::default()
        })
    }
}

impl PsiLine {
    const fn averages(self) -> [f64; 3] {
        [self.avg10, self.avg60, self.avg300]
    }
}

impl PodStats {
    /// The pod's sample, `seconds` after its counters were 0.
    fn sample(&self, subject: &PodSubject, at: BootTime, seconds: u64) -> PodSample {
        let cpu_nanos = self.cpu_nanos().map(|rate| rate.saturating_mul(seconds));
        let memory = self.memory();
        PodSample {
            cpu_nanos,
            memory: memory.map(|memory| memory.usage),
            memory_parts: memory.map(|memory| memory.parts),
            target_cgroups: vec![TargetCgroupSample {
                cgroup: "".into(),
                cpu_nanos,
                quota: Some(subject.quota),
            }],
            ..PodSample::new(subject.pod.uid.clone(), at)
        }
    }

    /// CPU usage of the pod, or the sum of its containers.
    fn cpu_nanos(&self) -> Option<u64> {
        let of = |cpu: &Option<Cpu>| cpu.as_ref()?.usage_nano_cores;
        of(&self.cpu).or_else(|| {
            let containers = self.containers.iter();
            let all: Option<u64> = containers.map(|container| of(&container.cpu)).sum();
            all.filter(|_| !self.containers.is_empty())
        })
    }

    fn memory(&self) -> Option<PodMemory> {
        self.memory.as_ref().and_then(Memory::of_pod).or_else(|| {
            let containers = self.containers.iter();
            let parts = containers.map(|container| container.memory.as_ref()?.of_pod());
            let parts: Option<Vec<_>> = parts.collect();
            parts?.into_iter().reduce(PodMemory::and)
        })
    }
}

#[derive(Clone, Copy)]
struct PodMemory {
    usage: Bytes,
    parts: MemoryParts,
}

impl PodMemory {
    fn and(self, other: Self) -> Self {
        Self {
            usage: self.usage + other.usage,
            parts: MemoryParts {
                unreclaimable: self.parts.unreclaimable + other.parts.unreclaimable,
                cache: self.parts.cache + other.parts.cache,
            },
        }
    }
}

impl Memory {
    fn of_pod(&self) -> Option<PodMemory> {
        let usage = Bytes(self.usage_bytes?);
        Some(PodMemory {
            usage,
            parts: MemoryParts {
                unreclaimable: Bytes(self.rss_bytes?),
                cache: usage.saturating_sub(Bytes(self.working_set_bytes?)),
            },
        })
    }
}

/// CPU and memory usage of a pod.
pub(super) fn uses(now: &PodSample) -> (Option<MilliCpu>, Option<Bytes>) {
    let cpu = now.cpu_nanos.and_then(|nanos| {
        let period = u64::try_from(PERIOD.as_nanos()).ok()?;
        MilliCpu::from_usage(nanos, period)
    });
    (cpu, now.memory_parts.map(|parts| parts.unreclaimable))
}

#[cfg(test)]
#[path = "summary_tests.rs"]
mod tests;
