//! The metrics that a rule may name, their units, and which actions lower them.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::statistic::{PeakSpan, Span, Statistic};

/// A resource of the node that actions on pods release.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Resource {
    /// CPU, in millicores.
    Cpu,
    /// Memory, in bytes.
    Memory,
}

/// One kind of pressure stall information; the value is its index in [`super::sample::NodeSample::pressure`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PressureKind {
    /// `/proc/pressure/cpu`
    Cpu = 0,
    /// `/proc/pressure/memory`
    Memory = 1,
    /// `/proc/pressure/io`
    Io = 2,
}

/// A rate of one block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiskRate {
    /// KiB read a second.
    ReadKib,
    /// KiB written a second.
    WriteKib,
    /// Reads a second.
    Reads,
    /// Writes a second.
    Writes,
    /// Percent of time with a request in flight.
    Utilization,
}

/// A rate of one network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InterfaceRate {
    /// KiB received a second.
    ReceiveKib,
    /// KiB sent a second.
    SendKib,
    /// Packets received a second.
    ReceivePackets,
    /// Packets sent a second.
    SendPackets,
    /// Incoming packets dropped a second.
    ReceiveDrops,
    /// Outgoing packets dropped a second.
    SendDrops,
}

/// A statistic over the protected pods: those that the rule's action may not act on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protected {
    /// The 95th percentile of their CPU delay.
    CpuDelayP95,
    /// The highest CPU delay.
    CpuDelayMax,
    /// The highest memory stall.
    MemoryStallMax,
    /// The highest I/O stall.
    IoStallMax,
}

impl Protected {
    /// The kind of pressure that it is computed from.
    pub const fn pressure(self) -> PressureKind {
        match self {
            Self::CpuDelayP95 | Self::CpuDelayMax => PressureKind::Cpu,
            Self::MemoryStallMax => PressureKind::Memory,
            Self::IoStallMax => PressureKind::Io,
        }
    }
}

/// The resource whose usage ranks the victims of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RankBy {
    /// CPU used.
    #[serde(alias = "unmeasured")]
    Cpu,
    /// Unreclaimable memory.
    Memory,
    /// Bytes read and written; unreclaimable memory if I/O is not known for any pod.
    Io,
}

impl RankBy {
    /// All of them, indexed by value.
    pub const ALL: [Self; 3] = [Self::Cpu, Self::Memory, Self::Io];
}

/// A metric that a rule names.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Metric {
    /// `cpu_total_usage`, millicores.
    CpuUsage,
    /// `cpu_total_utilization`, percent of the online CPUs.
    CpuUtilization,
    /// `memory_total_usage`, bytes.
    MemoryUsage,
    /// `memory_total_utilization`, percent.
    MemoryUtilization,
    /// `cpu_load_{1,5,15}_min`; the index in [`super::sample::NodeSample::load`].
    Load(usize),
    /// `{cpu,memory,io}_pressure_{some,full}_avg{10,60,300}`, percent.
    Pressure {
        /// Which file.
        kind: PressureKind,
        /// The `full` line rather than `some`.
        full: bool,
        /// 0, 1, 2 for 10, 60, 300 s.
        window: usize,
    },
    /// `{cpu,mem}_usage_{avg_5m,max_avg_1h,max_avg_1d}`, percent of the node.
    Window(Resource, Statistic),
    /// A window over another metric, from the node's settings.
    Custom(Arc<CustomMetric>),
    /// `disk_*`, one series per device with label `device`.
    Disk(DiskRate),
    /// `network_*`, one series per interface with label `interface`.
    Interface(InterfaceRate),
    /// `container_sched_run_queue_time`: microseconds per second that runnable threads of a container waited;
    /// labels `namespace`, `pod`, `container`.
    RunQueueTime,
    /// `container_cpu_throttled_ratio`: percent of a container's enforcement periods that were throttled;
    /// labels `namespace`, `pod`, `container`.
    ThrottledRatio,
    /// `pod_{cpu_delay,memory_stall,io_stall}`: percent of time that some thread of a pod waited (cgroup v2); labels
    /// `namespace`, `pod` and the pod's own.
    PodStall(PressureKind),
    /// `protected_{cpu_delay_p95,cpu_delay_max,memory_stall_max,io_stall_max}`: percent of time that protected pods waited
    /// (cgroup v2).
    Protected(Protected),
    /// `ext_cpu_total_distribute`: percent of the node's `gocrane.io/cpu` that is requested.
    ElasticCpuRequested,
    /// A series of the `NodeQOS`'s HTTP probe.
    Probe(Arc<str>),
}

/// A window over another metric. It has one value per node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CustomMetric {
    /// Its own name, not that of a metric of every node.
    pub name: Arc<str>,
    /// The metric that it summarizes: the largest of its series.
    pub source: Metric,
    /// How.
    pub statistic: Statistic,
}

impl CustomMetric {
    /// The unit of its value: percent where the source has a capacity.
    pub fn unit(&self) -> &'static str {
        match self.source.resource() {
            Some(_) => "percent",
            None => self.source.unit(),
        }
    }
}

/// How an action of some kind affects a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActionEffect {
    /// Releases are measured in the metric's resource: act on victims until the gap is covered.
    Measured(Resource),
    /// The metric has no unit of release: throttle every victim by a step, reclaim from or evict one.
    Unmeasured,
    /// The action does not lower the metric.
    None,
}

/// One step after the other of what an action does to pods, mildest first. Its order is the ladder's.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub enum Rung {
    /// `cpuThrottle.idle`: every victim runs only while no other pod wants the CPU.
    #[default]
    IdleClass,
    /// `cpuThrottle`: quotas, lowered step by step.
    CpuQuota,
    /// `memoryThrottle.forceGC`: page cache is reclaimed, from one victim after the other.
    PageCache,
    /// `eviction`.
    Eviction,
}

impl Rung {
    /// All of them, in the order in which they are taken.
    pub const ALL: [Self; 4] = [
        Self::IdleClass,
        Self::CpuQuota,
        Self::PageCache,
        Self::Eviction,
    ];

    /// The kind of action that it is part of.
    pub const fn kind(self) -> ActionKind {
        match self {
            Self::IdleClass | Self::CpuQuota => ActionKind::CpuThrottle,
            Self::PageCache => ActionKind::ForceGc,
            Self::Eviction => ActionKind::Eviction,
        }
    }

    /// The name in status and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Self::IdleClass => "idle class",
            Self::CpuQuota => "CPU quota",
            Self::PageCache => "page cache",
            Self::Eviction => "eviction",
        }
    }
}

/// The kinds of action on pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ActionKind {
    /// The CPU quota is lowered.
    CpuThrottle,
    /// Page cache is reclaimed.
    ForceGc,
    /// The pod is evicted.
    Eviction,
}

impl ActionKind {
    /// All of them, mildest first.
    pub const ALL: [Self; 3] = [Self::CpuThrottle, Self::ForceGc, Self::Eviction];
}

const PRESSURE_KINDS: [(&str, PressureKind); 3] = [
    ("cpu", PressureKind::Cpu),
    ("memory", PressureKind::Memory),
    ("io", PressureKind::Io),
];
const PRESSURE_WINDOWS: [&str; 3] = ["avg10", "avg60", "avg300"];
const WINDOWS: [(&str, Statistic); 3] = [
    ("usage_avg_5m", Statistic::Average(Span::FiveMinutes)),
    ("usage_max_avg_1h", Statistic::Peak(PeakSpan::Hour)),
    ("usage_max_avg_1d", Statistic::Peak(PeakSpan::Day)),
];

/// The metrics with a fixed name; names of pressure and window metrics are composed.
const NAMED: [(&str, Metric); 28] = [
    ("cpu_total_usage", Metric::CpuUsage),
    ("cpu_total_utilization", Metric::CpuUtilization),
    ("memory_total_usage", Metric::MemoryUsage),
    ("memory_total_utilization", Metric::MemoryUtilization),
    ("cpu_load_1_min", Metric::Load(0)),
    ("cpu_load_5_min", Metric::Load(1)),
    ("cpu_load_15_min", Metric::Load(2)),
    ("disk_read_kibps", Metric::Disk(DiskRate::ReadKib)),
    ("disk_write_kibps", Metric::Disk(DiskRate::WriteKib)),
    ("disk_read_iops", Metric::Disk(DiskRate::Reads)),
    ("disk_write_iops", Metric::Disk(DiskRate::Writes)),
    ("disk_utilization", Metric::Disk(DiskRate::Utilization)),
    (
        "network_receive_kibps",
        Metric::Interface(InterfaceRate::ReceiveKib),
    ),
    (
        "network_sent_kibps",
        Metric::Interface(InterfaceRate::SendKib),
    ),
    (
        "network_receive_pckps",
        Metric::Interface(InterfaceRate::ReceivePackets),
    ),
    (
        "network_sent_pckps",
        Metric::Interface(InterfaceRate::SendPackets),
    ),
    (
        "network_drop_in",
        Metric::Interface(InterfaceRate::ReceiveDrops),
    ),
    (
        "network_drop_out",
        Metric::Interface(InterfaceRate::SendDrops),
    ),
    ("container_sched_run_queue_time", Metric::RunQueueTime),
    ("container_cpu_throttled_ratio", Metric::ThrottledRatio),
    ("pod_cpu_delay", Metric::PodStall(PressureKind::Cpu)),
    ("pod_memory_stall", Metric::PodStall(PressureKind::Memory)),
    ("pod_io_stall", Metric::PodStall(PressureKind::Io)),
    (
        "protected_cpu_delay_p95",
        Metric::Protected(Protected::CpuDelayP95),
    ),
    (
        "protected_cpu_delay_max",
        Metric::Protected(Protected::CpuDelayMax),
    ),
    (
        "protected_memory_stall_max",
        Metric::Protected(Protected::MemoryStallMax),
    ),
    (
        "protected_io_stall_max",
        Metric::Protected(Protected::IoStallMax),
    ),
    ("ext_cpu_total_distribute", Metric::ElasticCpuRequested),
];

impl Metric {
    /// The locally measured metric of that name; `None` for any other name, which only an HTTP probe can provide.
    pub fn parse(name: &str) -> Option<Self> {
        NAMED
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, metric)| metric.clone())
            .or_else(|| Self::parse_pressure(name))
            .or_else(|| Self::parse_window(name))
    }

    fn parse_pressure(name: &str) -> Option<Self> {
        let (kind, rest) = name.split_once("_pressure_")?;
        let (line, window) = rest.split_once('_')?;
        let (_, kind) = PRESSURE_KINDS.iter().find(|(known, _)| *known == kind)?;
        let full = match line {
            "some" => false,
            "full" => true,
            _ => return None,
        };
        let window = PRESSURE_WINDOWS.iter().position(|known| *known == window)?;
        Some(Self::Pressure {
            kind: *kind,
            full,
            window,
        })
    }

    fn parse_window(name: &str) -> Option<Self> {
        let (resource, window) = name.split_once('_')?;
        let resource = match resource {
            "cpu" => Resource::Cpu,
            "mem" => Resource::Memory,
            _ => return None,
        };
        let (_, statistic) = WINDOWS.iter().find(|(known, _)| *known == window)?;
        Some(Self::Window(resource, *statistic))
    }

    /// Every name that [`Self::parse`] knows, for messages and completions.
    pub fn names() -> Vec<String> {
        let pressure = PRESSURE_KINDS.iter().flat_map(|(kind, _)| {
            ["some", "full"].into_iter().flat_map(move |line| {
                PRESSURE_WINDOWS
                    .iter()
                    .map(move |window| format!("{kind}_pressure_{line}_{window}"))
            })
        });
        let windows = ["cpu", "mem"].into_iter().flat_map(|resource| {
            WINDOWS
                .iter()
                .map(move |(window, _)| format!("{resource}_{window}"))
        });
        let named = NAMED.iter().map(|(name, _)| (*name).to_owned());
        named.chain(pressure).chain(windows).collect()
    }

    /// The unit of `value` in a `metricRule`.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::CpuUsage => "millicores",
            Self::MemoryUsage => "bytes",
            Self::CpuUtilization
            | Self::MemoryUtilization
            | Self::Pressure { .. }
            | Self::Window(..)
            | Self::Disk(DiskRate::Utilization)
            | Self::ThrottledRatio
            | Self::PodStall(_)
            | Self::Protected(_)
            | Self::ElasticCpuRequested => "percent",
            Self::Load(_) => "load",
            Self::Disk(DiskRate::ReadKib | DiskRate::WriteKib)
            | Self::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib) => "KiB/s",
            Self::Disk(DiskRate::Reads | DiskRate::Writes) => "operations/s",
            Self::Interface(_) => "packets/s",
            Self::RunQueueTime => "µs/s",
            Self::Probe(_) => "unit of the probe",
            Self::Custom(custom) => custom.unit(),
        }
    }

    /// The resource whose release can be measured in this metric's unit.
    pub fn resource(&self) -> Option<Resource> {
        match self {
            Self::CpuUsage | Self::CpuUtilization => Some(Resource::Cpu),
            Self::MemoryUsage | Self::MemoryUtilization => Some(Resource::Memory),
            Self::Window(resource, _) => Some(*resource),
            Self::Custom(custom) => custom.source.resource(),
            _ => None,
        }
    }

    /// The resource whose usage ranks the victims.
    pub fn rank_by(&self) -> RankBy {
        match self {
            Self::MemoryUsage | Self::MemoryUtilization | Self::Window(Resource::Memory, _) => {
                RankBy::Memory
            }
            Self::Disk(_) => RankBy::Io,
            Self::Custom(custom) => custom.source.rank_by(),
            _ => match self.pressure() {
                Some(PressureKind::Memory) => RankBy::Memory,
                Some(PressureKind::Io) => RankBy::Io,
                Some(PressureKind::Cpu) | None => RankBy::Cpu,
            },
        }
    }

    /// Whether it says how long tasks wait.
    pub(super) fn is_pressure(&self) -> bool {
        self.pressure().is_some()
    }

    /// The pressure that it is or is computed from.
    pub fn pressure(&self) -> Option<PressureKind> {
        match self {
            Self::Pressure { kind, .. } | Self::PodStall(kind) => Some(*kind),
            Self::RunQueueTime => Some(PressureKind::Cpu),
            Self::Protected(protected) => Some(protected.pressure()),
            Self::Custom(custom) => custom.source.pressure(),
            _ => None,
        }
    }

    /// Whether actions are chosen by it on that rung, and whether they can lower it: the one table of both.
    ///
    /// The idle class is also taken on the CPU in use and on load averages, which it cannot lower. Node-wide pressure, what
    /// single pods and containers wait, networks, and past peaks drive no rung: throttles raise them themselves, or nothing
    /// lowers them. An average of the node's settings drives what its source does.
    pub fn rung(&self, rung: Rung) -> RungUse {
        use RungUse::{Drives, Taken, Unused};
        if let Self::Custom(custom) = self {
            return match custom.statistic {
                Statistic::Average(_) => custom.source.rung(rung),
                _ => Unused,
            };
        }
        let cpu_delay = matches!(
            self,
            Self::Protected(Protected::CpuDelayP95 | Protected::CpuDelayMax) | Self::Probe(_)
        );
        let drives = match rung {
            Rung::IdleClass if self.is_cpu_usage() => return Taken,
            Rung::IdleClass => cpu_delay,
            Rung::CpuQuota => cpu_delay || self.is_cpu_usage(),
            Rung::PageCache => matches!(
                self,
                Self::Protected(Protected::MemoryStallMax) | Self::Probe(_)
            ),
            Rung::Eviction => {
                let other = matches!(
                    self,
                    Self::Protected(_) | Self::Probe(_) | Self::Disk(_) | Self::ElasticCpuRequested
                );
                other || self.is_cpu_usage() || self.is_memory_usage()
            }
        };
        if drives { Drives } else { Unused }
    }

    /// CPU in use or wanted, now or on average.
    const fn is_cpu_usage(&self) -> bool {
        matches!(
            self,
            Self::CpuUsage
                | Self::CpuUtilization
                | Self::Load(_)
                | Self::Window(Resource::Cpu, Statistic::Average(_))
        )
    }

    const fn is_memory_usage(&self) -> bool {
        matches!(
            self,
            Self::MemoryUsage
                | Self::MemoryUtilization
                | Self::Window(Resource::Memory, Statistic::Average(_))
        )
    }

    /// The resource in whose unit releases can be predicted: usage now, not an average, which lags behind.
    pub const fn measured(&self) -> Option<Resource> {
        match self {
            Self::CpuUsage | Self::CpuUtilization => Some(Resource::Cpu),
            Self::MemoryUsage | Self::MemoryUtilization => Some(Resource::Memory),
            _ => None,
        }
    }

    /// How actions of `kind` affect this metric.
    pub fn action_effect(&self, kind: ActionKind) -> ActionEffect {
        let mut rungs = Rung::ALL.into_iter();
        let is_used = rungs.any(|rung| rung.kind() == kind && self.rung(rung) == RungUse::Drives);
        match self.measured() {
            _ if !is_used => ActionEffect::None,
            Some(resource) => ActionEffect::Measured(resource),
            None => ActionEffect::Unmeasured,
        }
    }
}

/// How a metric uses a rung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RungUse {
    /// It chooses steps on it, and they lower it.
    Drives,
    /// It chooses steps on it, which do not lower it.
    Taken,
    /// It chooses none.
    Unused,
}

impl fmt::Display for Metric {
    /// The name as written in manifests.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Probe(name) => f.write_str(name),
            Self::Custom(custom) => f.write_str(&custom.name),
            Self::Pressure { kind, full, window } => {
                let (kind, _) = PRESSURE_KINDS[*kind as usize];
                let line = if *full { "full" } else { "some" };
                write!(f, "{kind}_pressure_{line}_{}", PRESSURE_WINDOWS[*window])
            }
            Self::Window(resource, statistic) => {
                let resource = match resource {
                    Resource::Cpu => "cpu",
                    Resource::Memory => "mem",
                };
                let known = WINDOWS.iter().find(|(_, known)| known == statistic);
                write!(
                    f,
                    "{resource}_{}",
                    known.map_or("unnamed", |(name, _)| name)
                )
            }
            named => {
                let known = NAMED.iter().find(|(_, metric)| metric == named);
                f.write_str(known.map_or("unnamed", |(name, _)| name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_parses_to_a_metric_that_prints_it() {
        for name in Metric::names() {
            assert_eq!(Metric::parse(&name).map(|m| m.to_string()), Some(name));
        }
    }

    #[test]
    fn an_unknown_name_is_not_a_metric() {
        for name in [
            "",
            "cpu",
            "cpu_pressure_some",
            "net_pressure_some_avg10",
            "gpu_usage_avg_5m",
        ] {
            assert_eq!(Metric::parse(name), None, "{name}");
        }
    }
}
