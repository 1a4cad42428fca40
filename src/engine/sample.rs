//! One sample of a node: raw counters and gauges.
//!
//! A value that could not be read is `None`, never 0. The engine takes differences of counters over the measured time
//! between two samples.

use std::sync::Arc;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::pod::PodUid;
use super::time::BootTime;
use super::units::{Bytes, Quota};

/// Everything that was read at one time. The sampler reuses its buffers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Sample {
    /// When the node's files were read.
    pub at: BootTime,
    /// The wall clock at that moment, for the hours of rules; never for intervals, since it may be set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Timestamp>,
    /// Values of the whole node.
    pub node: NodeSample,
    /// The kernel has per-cgroup pressure (cgroup v2), so [`PodSample::waits`] has stall times.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pressure_by_cgroup: bool,
    /// One entry per pod that could be read, in any order. Empty between evaluations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<PodSample>,
    /// The last responses of HTTP probes, one per [`super::policy::Probe`] URL.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub probes: Vec<ProbeSample>,
}

/// Values of the whole node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSample {
    /// CPU time, from `/proc/stat`.
    pub cpu: Option<CpuTimes>,
    /// Memory, from `/proc/meminfo`.
    pub memory: Option<NodeMemory>,
    /// Load averages over 1, 5 and 15 minutes, from `/proc/loadavg`.
    pub load: Option<[f64; 3]>,
    /// Tasks that are running, runnable or waiting for I/O (`procs_running` + `procs_blocked` of `/proc/stat`). Read only if
    /// [`super::Demand::tasks`] is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tasks: Option<u64>,
    /// Pages that the kernel scanned to reclaim memory of the node, since boot (`pgscan_*` of `/proc/vmstat`; reclaim at a
    /// cgroup's own limit is not in it). Read only if [`super::Demand::pod_pressure`] is set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_scans: Option<u64>,
    /// The services of `system.slice`, sorted by name. Read only if [`super::Demand::pod_pressure`] is set, with the pods.
    #[serde(skip_serializing_if = "Vec::is_empty", with = "system_services")]
    pub system: Vec<SystemService>,
    /// Pressure stall information of `[cpu, memory, io]`, from `/proc/pressure`.
    pub pressure: [Option<Pressure>; 3],
    /// Block devices, from `/proc/diskstats`.
    pub disks: Vec<DiskSample>,
    /// Network interfaces of the host, from `/proc/1/net/dev`.
    pub interfaces: Vec<InterfaceSample>,
}

/// CPU time of the node, summed over all its CPUs since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuTimes {
    /// Busy time in nanoseconds: user, nice, system, irq, softirq and steal. Waiting for I/O is not busy;
    /// guest time is already in user.
    pub busy: u64,
    /// Idle and I/O wait time in nanoseconds.
    pub idle: u64,
    /// CPUs online.
    pub online: u32,
}

impl CpuTimes {
    /// Converts millicores to percent of the online CPUs.
    pub fn percent(self, millicores: f64) -> f64 {
        millicores / f64::from(self.online) / 10.0
    }
}

/// Memory of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeMemory {
    /// `MemTotal`.
    pub total: Bytes,
    /// `MemAvailable`.
    pub available: Bytes,
    /// `Hugetlb`: the pools of huge pages, used or not. 0 on kernels that do not report it.
    #[serde(default, skip_serializing_if = "is_none_at_all")]
    pub hugetlb: Bytes,
    /// `AnonPages`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anon: Option<Bytes>,
    /// `Shmem`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shmem: Option<Bytes>,
    /// `Active(file)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub active_file: Option<Bytes>,
}

impl NodeMemory {
    /// Memory without the pools of huge pages, which only programs that ask for them can use. The kubelet's allocatable
    /// leaves them out, too.
    pub const fn capacity(self) -> Bytes {
        self.total.saturating_sub(self.hugetlb)
    }

    /// Memory in use, without the pools of huge pages; `None` if more is reported available than exists.
    pub fn used(self) -> Option<Bytes> {
        let used = self.capacity().0.checked_sub(self.available.0);
        used.map(Bytes)
    }
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde asks for"
)]
fn is_none_at_all(bytes: &Bytes) -> bool {
    *bytes == Bytes::ZERO
}

/// One pressure file: percent of time stalled, averaged over 10, 60 and 300 s.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pressure {
    /// Some task was stalled.
    pub some: [f64; 3],
    /// All tasks were stalled at once. `None` if the kernel has no such line.
    pub full: Option<[f64; 3]>,
    /// Nanoseconds since boot stalled, `[some, full]` (`total=`).
    #[serde(default)]
    pub totals: [Option<u64>; 2],
}

/// How long the threads of a cgroup waited, and how often its own limits made them wait: counters since it was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WaitCounters {
    /// Nanoseconds in which some thread waited for `[CPU, memory, I/O]` (`total=` of the `some` lines of `*.pressure`).
    /// Missing on cgroup v1.
    pub stalled: [Option<u64>; 3],
    /// Enforcement periods of the cgroup's own quota that passed (`nr_periods`), or of a container's if they are more.
    pub periods: Option<u64>,
    /// Those in which it was throttled (`nr_throttled`), or the sum over its containers if that is more.
    pub throttled_periods: Option<u64>,
    /// How often the cgroup or one below it reached its own memory limit and had to reclaim (`max` + `high` of
    /// `memory.events`). Missing on cgroup v1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own_limit_reclaims: Option<u64>,
}

impl WaitCounters {
    const NONE: Self = Self {
        stalled: [None; 3],
        periods: None,
        throttled_periods: None,
        own_limit_reclaims: None,
    };

    fn is_unread(&self) -> bool {
        *self == Self::NONE
    }
}

/// One service of `system.slice`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SystemService {
    /// The directory name of its cgroup, such as `containerd.service`.
    pub name: Arc<str>,
    /// Its counters.
    pub waits: WaitCounters,
}

/// Earlier traces have the counters of `system.slice` as a whole.
mod system_services {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::{SystemService, WaitCounters};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Services(Vec<SystemService>),
        Whole(WaitCounters),
    }

    pub fn serialize<S: Serializer>(list: &[SystemService], to: S) -> Result<S::Ok, S::Error> {
        list.serialize(to)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<SystemService>, D::Error> {
        Ok(match Written::deserialize(from)? {
            Written::Services(list) => list,
            Written::Whole(waits) => vec![SystemService {
                name: "system.slice".into(),
                waits,
            }],
        })
    }
}

/// Counters of one block device since boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DiskSample {
    /// Device name, such as `vda`.
    pub device: Arc<str>,
    /// Reads completed.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes completed.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Milliseconds in which at least one request was in flight.
    pub io_ms: u64,
}

/// Counters of one network interface since it was created.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct InterfaceSample {
    /// Interface name, such as `eth0`.
    pub interface: Arc<str>,
    /// Bytes received.
    pub receive_bytes: u64,
    /// Packets received.
    pub receive_packets: u64,
    /// Incoming packets dropped.
    pub receive_drops: u64,
    /// Bytes sent.
    pub send_bytes: u64,
    /// Packets sent.
    pub send_packets: u64,
    /// Outgoing packets dropped.
    pub send_drops: u64,
}

/// Values of one pod.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodSample {
    /// Pod UID.
    pub uid: PodUid,
    /// When its files were read.
    pub at: BootTime,
    /// CPU time used since the cgroup was created, in nanoseconds.
    pub cpu_nanos: Option<u64>,
    /// Memory charged to the cgroup (`memory.current`, `memory.usage_in_bytes`), page cache included.
    pub memory: Option<Bytes>,
    /// Breakdown of the memory. Read only if [`super::Demand::pod_memory`] is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_parts: Option<MemoryParts>,
    /// Percent of the last 10 s in which some thread waited for `[CPU, memory, I/O]`, from the `*.pressure` files of the
    /// pod's cgroup. Read only if [`super::Demand::pod_pressure`] is set; missing on cgroup v1.
    #[serde(default, skip_serializing_if = "is_unread")]
    pub stalled: [Option<f64>; 3],
    /// The counters of the same files.
    #[serde(default, skip_serializing_if = "WaitCounters::is_unread")]
    pub waits: WaitCounters,
    /// Bytes read from and written to disks since the cgroup was created (`io.stat`). Read only if
    /// [`super::Demand::pod_io`] is set; missing on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_bytes: Option<u64>,
    /// The target cgroups, whose CPU quota is changed to throttle this pod: the pod's own, or on cgroup v1 its containers'
    /// if any of them has a quota. Read only if [`super::Demand::pod_quota`] is set.
    #[serde(default, rename = "levers", skip_serializing_if = "Vec::is_empty")]
    pub target_cgroups: Vec<TargetCgroupSample>,
    /// Its containers. Read only if [`super::Demand::run_delay`] or [`super::Demand::throttled`] is set.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub containers: Vec<ContainerSample>,
}

impl PodSample {
    /// A pod with no values read yet.
    pub const fn new(uid: PodUid, at: BootTime) -> Self {
        Self {
            uid,
            at,
            cpu_nanos: None,
            memory: None,
            memory_parts: None,
            stalled: [None; 3],
            waits: WaitCounters::NONE,
            io_bytes: None,
            target_cgroups: Vec::new(),
            containers: Vec::new(),
        }
    }
}

fn is_unread(stalled: &[Option<f64>; 3]) -> bool {
    stalled.iter().all(Option::is_none)
}

/// Breakdown of a pod's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryParts {
    /// Anonymous, shared and unreclaimable slab memory, which is only released when the pod exits.
    #[serde(rename = "held")]
    pub unreclaimable: Bytes,
    /// Page cache of files, excluding shared memory, which can be reclaimed.
    pub cache: Bytes,
}

/// One target cgroup: its CPU quota is changed to throttle the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetCgroupSample {
    /// Path below the pod's cgroup: empty for the pod itself, else the container's directory name.
    pub cgroup: Arc<str>,
    /// CPU time used since the cgroup was created, in nanoseconds.
    pub cpu_nanos: Option<u64>,
    /// Current value of the quota file. `None` if it could not be read.
    pub quota: Option<Quota>,
}

/// Counters of one container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ContainerSample {
    /// The container's name, or its cgroup's directory name if the name is not known.
    pub container: Arc<str>,
    /// Counter of the time that its threads were runnable but not running, in nanoseconds.
    pub run_delay_nanos: Option<u64>,
    /// Enforcement periods that passed (`nr_periods`).
    pub periods: Option<u64>,
    /// Enforcement periods in which it was throttled (`nr_throttled`).
    pub throttled_periods: Option<u64>,
}

/// The last response of one HTTP probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProbeSample {
    /// The probe's URL, equal to [`super::policy::Probe::url`].
    pub url: Arc<str>,
    /// When the response arrived.
    pub at: BootTime,
    /// The series that rules refer to; shared with the prober to avoid copies.
    pub series: Arc<[Series]>,
}

/// One series of a Prometheus text response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Series {
    /// Metric name.
    pub name: Arc<str>,
    /// Labels, sorted by name.
    pub labels: Vec<(Arc<str>, Arc<str>)>,
    /// Value; NaN and infinities are treated as Unknown.
    #[serde(with = "any_number")]
    pub value: f64,
}

/// JSON has no NaN and no infinities, so they are written as in the Prometheus text format.
mod any_number {
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Word(String),
    }

    #[expect(
        clippy::trivially_copy_pass_by_ref,
        reason = "the signature that serde asks for"
    )]
    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() {
            Written::Number(*value).serialize(serializer)
        } else {
            Written::Word(value.to_string()).serialize(serializer)
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(value) => Ok(value),
            Written::Word(word) => word.parse().map_err(de::Error::custom),
        }
    }
}
