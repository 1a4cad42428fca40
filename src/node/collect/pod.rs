//! Samples one pod, from its cgroups.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::container::ContainerReader;
use super::refill::Refill;
use super::sampler::SampleContext;
use super::waits::{PERIODS, PressureFiles, io_bytes, own_limit_reclaims, periods};
use crate::crd::pod_facts::ContainerFacts;
use crate::engine::Demand;
use crate::engine::pod::PodUid;
use crate::engine::sample::{
    ContainerSample, MemoryParts, PodSample, TargetCgroupSample, WaitCounters,
};
use crate::engine::units::{Bytes, Quota};
use crate::node::cgroup::cached_file::{CachedFile, ReadError};
use crate::node::cgroup::kubepods::child_directories;
use crate::node::cgroup::parse::{Bandwidth, cfs_quota, cpu_max, keyed};
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

/// The pod's cgroup does not exist.
#[derive(Debug)]
pub struct Absence;

/// The open files of one pod.
#[derive(Debug)]
pub struct PodReader {
    uid: PodUid,
    cgroup: CgroupPath,
    files: PodFiles,
    containers: Containers,
    /// While a throttle is in force: whether it limits the containers instead of the pod.
    pin: Option<bool>,
    /// Container facts from the Pod object.
    facts: Option<ContainerFacts>,
}

#[derive(Debug)]
struct PodFiles {
    /// Directory in the CPU controller's tree. Its inode distinguishes the cgroup from a later one of the same name.
    directory: PathBuf,
    inode: Option<u64>,
    cpu: CpuUsage,
    memory: Option<CachedFile>,
    memory_stat: Option<CachedFile>,
    /// `None` on cgroup v1, which does not count these events.
    memory_events: Option<CachedFile>,
    /// Kernel memory, which is not in v1's `memory.stat`.
    kernel_memory: Option<CachedFile>,
    quota: QuotaFiles,
    /// `None` on cgroup v1.
    pressure: Option<PressureFiles>,
    /// v1's enforcement periods; on v2 they are read with the CPU time.
    periods: Option<CachedFile>,
    /// `None` on cgroup v1, which has no equivalent file.
    io: Option<CachedFile>,
}

/// The containers found by the last scan of the pod's directory.
#[derive(Debug, Default)]
struct Containers {
    list: Vec<ContainerReader>,
    /// Link count of the pod's directory at that scan: two, plus one per child.
    links: u64,
}

impl Containers {
    fn below(&mut self) -> impl Iterator<Item = &mut ContainerReader> {
        self.list.iter_mut().filter(|one| one.directory().is_some())
    }

    /// Whether the list is still current: the link count is unchanged and no container has vanished.
    fn is_complete(&self, links: u64) -> bool {
        // File systems that do not count links (overlayfs in tests) return 1.
        links >= 2 && links == self.links && !self.list.iter().any(ContainerReader::is_gone)
    }
}

impl PodReader {
    /// A reader of the pod's files; opens nothing yet.
    pub fn new(uid: PodUid, cgroup: CgroupPath, hierarchy: &Hierarchy) -> Self {
        let files = PodFiles::new(hierarchy, &cgroup);
        Self {
            uid,
            cgroup,
            files,
            containers: Containers::default(),
            pin: None,
            facts: None,
        }
    }

    /// Which pod.
    pub const fn uid(&self) -> &PodUid {
        &self.uid
    }

    /// Its cgroup.
    pub const fn cgroup(&self) -> &CgroupPath {
        &self.cgroup
    }

    /// Fixes the kind of target cgroup (by container or not), or lets it follow the quotas.
    pub const fn pin(&mut self, by_container: Option<bool>) {
        self.pin = by_container;
    }

    /// Sets the container facts from the Pod object, if there is one.
    pub const fn set_facts(&mut self, facts: Option<ContainerFacts>) {
        self.facts = facts;
    }

    /// Retries files that were absent.
    pub fn retry_absent(&mut self) {
        self.files.each(CachedFile::retry_absent);
    }

    /// Reads the CPU time from the cgroup that has the name now: after a cgroup is removed, another may have taken
    /// its name (a restarted unit, a static pod).
    pub fn cpu(&mut self, reading: &mut SampleContext) -> Result<Option<CpuCounters>, Absence> {
        let known = self.files.inode.is_some();
        if known && !self.files.cpu.file.is_open() && self.is_replaced() {
            self.reset();
        }
        let mut result = self.files.cpu.read(reading);
        if known && matches!(result, Err(ReadError::Gone(_))) {
            self.reset();
            result = self.files.cpu.read(reading);
        }
        if matches!(result, Err(ReadError::Gone(_))) && !self.files.directory.exists() {
            return Err(Absence);
        }
        if self.files.inode.is_none() {
            self.files.inode = self.files.inode_now();
        }
        Ok(reading.record(result))
    }

    /// Reads memory usage and what else `demand` asks for. `cpu` is the result of [`Self::cpu`] just before.
    pub fn sample(
        &mut self,
        reading: &mut SampleContext,
        demand: &Demand,
        cpu: Option<CpuCounters>,
        out: &mut PodSample,
    ) {
        let files = &mut self.files;
        out.cpu_nanos = cpu.map(|cpu| cpu.nanos);
        out.memory = number(reading, files.memory.as_mut()).map(Bytes);
        out.memory_parts = if demand.pod_memory {
            files.memory_parts(reading)
        } else {
            None
        };
        (out.stalled, out.waits) = if demand.pod_pressure {
            files.waits(reading, cpu)
        } else {
            Default::default()
        };
        out.io_bytes = match &mut files.io {
            Some(io) => reading.text_if(demand.pod_io, io, io_bytes),
            None => None,
        };
        let by_container = demand.pod_quota && !reading.hierarchy.is_v2();
        let waits_by_cgroup = demand.pod_pressure && reading.hierarchy.is_v2();
        if by_container || demand.run_delay || demand.throttled || waits_by_cgroup {
            self.find_containers(reading);
        }
        if waits_by_cgroup {
            self.count_quotas_of_containers(reading, &mut out.waits);
        }
        if waits_by_cgroup && reading.local_events {
            self.count_limits_of_containers(reading, &mut out.waits);
        }
        self.target_samples(reading, demand, out);
        self.container_samples(reading, demand, &mut out.containers);
    }

    /// A pod's `cpu.stat` counts only throttling by its own quota, but its pressure includes throttling by its
    /// containers' quotas.
    fn count_quotas_of_containers(
        &mut self,
        reading: &mut SampleContext,
        waits: &mut WaitCounters,
    ) {
        let (mut passed, mut throttled) = (0, 0_u64);
        for container in self.containers.below() {
            let [periods, of_them] = container.periods(reading).map(Option::unwrap_or_default);
            passed = passed.max(periods);
            throttled = throttled.saturating_add(of_them);
        }
        waits.periods = waits.periods.map(|own| own.max(passed));
        waits.throttled_periods = waits.throttled_periods.map(|own| own.max(throttled));
    }

    /// Mounted with `memory_localevents`, a pod's `memory.events` leaves out its containers.
    fn count_limits_of_containers(
        &mut self,
        reading: &mut SampleContext,
        waits: &mut WaitCounters,
    ) {
        for container in self.containers.below() {
            let reclaims = container.own_limit_reclaims(reading).unwrap_or_default();
            let sum = |own: u64| own.saturating_add(reclaims);
            waits.own_limit_reclaims = waits.own_limit_reclaims.map(sum);
        }
    }

    fn is_replaced(&self) -> bool {
        self.files.inode_now() != self.files.inode
    }

    fn reset(&mut self) {
        self.files.each(CachedFile::close);
        self.files.inode = None;
        self.containers = Containers::default();
    }

    /// Rescans the containers only if some were added or removed: the link count shows the number of children, and
    /// reads of a replaced container's files fail.
    fn find_containers(&mut self, reading: &mut SampleContext) {
        let links = std::fs::metadata(&self.files.directory).map_or(0, |found| found.nlink());
        let known = &mut self.containers;
        if known.is_complete(links) {
            return;
        }
        let names = match child_directories(&self.files.directory) {
            Ok(names) => names,
            Err(source) => {
                let path = Arc::from(self.files.directory.as_path());
                reading.record::<()>(Err(ReadError::Io { path, source }));
                return;
            }
        };
        known.links = links;
        let mut before = std::mem::take(&mut known.list);
        let mut reuse = |name: Option<&str>| {
            let same = |one: &ContainerReader| one.directory() == name && !one.is_gone();
            let index = before.iter().position(same)?;
            Some(before.swap_remove(index))
        };
        for name in &names {
            let new = || ContainerReader::below(&self.cgroup, name, reading);
            known.list.extend(reuse(Some(name)).or_else(new));
        }
        if known.list.is_empty() {
            // A unit without child cgroups holds its processes itself and counts as its own container.
            let new = || ContainerReader::whole_pod(&self.cgroup, reading);
            known.list.push(reuse(None).unwrap_or_else(new));
        }
    }

    /// The cgroups that carry the pod's quota: on v2 the pod's own; on v1 its containers', if any of these has a quota
    /// or should have one according to the Pod object.
    fn target_samples(
        &mut self,
        reading: &mut SampleContext,
        demand: &Demand,
        out: &mut PodSample,
    ) {
        let mut target_cgroups = Refill::new(&mut out.target_cgroups);
        if !demand.pod_quota || self.is_incomplete(reading) {
            return;
        }
        if self.detect_by_container(reading) {
            for container in self.containers.below() {
                let cpu_nanos = container.cpu_nanos(reading);
                if !container.is_gone() {
                    fill_target(
                        &mut target_cgroups,
                        container.name(),
                        cpu_nanos,
                        container.quota(),
                    );
                }
            }
        } else {
            let result = self.files.quota.read(reading);
            let quota = reading.record(result);
            fill_target(&mut target_cgroups, &reading.own, out.cpu_nanos, quota);
        }
    }

    /// On v1, throttling a pod does not start while a container is missing, since it is not known which cgroups have
    /// quotas.
    fn is_incomplete(&self, reading: &SampleContext) -> bool {
        let missing = self.facts.is_some_and(|facts| facts.missing);
        missing && self.pin.is_none() && !reading.hierarchy.is_v2()
    }

    fn detect_by_container(&mut self, reading: &mut SampleContext) -> bool {
        if reading.hierarchy.is_v2() {
            return false;
        }
        self.read_quotas(reading);
        if self.containers.below().any(|one| one.is_gone()) {
            // Another may have replaced it, which does not change the link count.
            self.find_containers(reading);
            self.read_quotas(reading);
        }
        let is_limited = |one: &mut ContainerReader| matches!(one.quota(), Some(Quota::Limit(_)));
        let any_limit = self.containers.below().any(is_limited);
        // A container that restarts with its limit is rejected if the pod's own limit is lower.
        self.facts.is_some_and(|facts| facts.limited) || self.pin.unwrap_or(any_limit)
    }

    fn read_quotas(&mut self, reading: &mut SampleContext) {
        for container in self.containers.below() {
            container.read_quota(reading);
        }
    }

    fn container_samples(
        &mut self,
        reading: &mut SampleContext,
        demand: &Demand,
        out: &mut Vec<ContainerSample>,
    ) {
        let mut samples = Refill::new(out);
        if !demand.run_delay && !demand.throttled {
            return;
        }
        for container in &mut self.containers.list {
            let sample = samples.next(
                |sample| sample.container == *container.name(),
                || blank(container.name()),
            );
            container.sample(reading, demand, sample);
            if container.is_gone() {
                samples.discard_last();
            }
        }
    }
}

fn blank(container: &Arc<str>) -> ContainerSample {
    ContainerSample {
        container: Arc::clone(container),
        run_delay_nanos: None,
        periods: None,
        throttled_periods: None,
    }
}

fn fill_target(
    target_cgroups: &mut Refill<'_, TargetCgroupSample>,
    cgroup: &Arc<str>,
    cpu_nanos: Option<u64>,
    quota: Option<Quota>,
) {
    let new = TargetCgroupSample {
        cgroup: Arc::clone(cgroup),
        cpu_nanos,
        quota,
    };
    // No allocation: the name is shared.
    *target_cgroups.next(|_| true, || new.clone()) = new.clone();
}

fn number(reading: &mut SampleContext, file: Option<&mut CachedFile>) -> Option<u64> {
    reading.number(file?)
}

impl PodFiles {
    fn new(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Self {
        let memory = |v1: &str, v2: &str| {
            let name = if hierarchy.is_v2() { v2 } else { v1 };
            let directory = hierarchy.dir(Controller::Memory, cgroup)?;
            (!name.is_empty()).then(|| CachedFile::new(directory.join(name)))
        };
        let cpu = directory(hierarchy, Controller::Cpu, cgroup);
        Self {
            inode: None,
            cpu: CpuUsage::new(hierarchy, cgroup),
            memory: memory("memory.usage_in_bytes", "memory.current"),
            memory_stat: memory("memory.stat", "memory.stat"),
            memory_events: memory("", "memory.events"),
            kernel_memory: memory("memory.kmem.usage_in_bytes", ""),
            quota: QuotaFiles::new(hierarchy, cgroup),
            pressure: hierarchy.is_v2().then(|| PressureFiles::new(&cpu)),
            periods: (!hierarchy.is_v2()).then(|| CachedFile::new(cpu.join("cpu.stat"))),
            io: hierarchy
                .is_v2()
                .then(|| CachedFile::new(cpu.join("io.stat"))),
            directory: cpu,
        }
    }

    /// Percent of the last 10 s in which some thread waited, and the wait counters.
    fn waits(
        &mut self,
        reading: &mut SampleContext,
        cpu: Option<CpuCounters>,
    ) -> ([Option<f64>; 3], WaitCounters) {
        let pressure = self.pressure.as_mut();
        let (percent, stalled) = pressure.map_or_else(Default::default, |it| it.read(reading));
        let [periods, throttled_periods] = match &mut self.periods {
            Some(stat) => reading
                .text(stat, |text| Some(periods(text)))
                .unwrap_or_default(),
            None => cpu.map_or([None; 2], |cpu| cpu.periods),
        };
        let events = self.memory_events.as_mut();
        let counters = WaitCounters {
            stalled,
            periods,
            throttled_periods,
            own_limit_reclaims: events.and_then(|file| reading.text(file, own_limit_reclaims)),
        };
        (percent, counters)
    }

    fn inode_now(&self) -> Option<u64> {
        std::fs::metadata(&self.directory)
            .ok()
            .map(|found| found.ino())
    }

    fn each(&mut self, mut change: impl FnMut(&mut CachedFile)) {
        change(&mut self.cpu.file);
        self.memory.iter_mut().for_each(&mut change);
        self.memory_stat.iter_mut().for_each(&mut change);
        self.memory_events.iter_mut().for_each(&mut change);
        self.kernel_memory.iter_mut().for_each(&mut change);
        if let Some(pressure) = &mut self.pressure {
            pressure.each(&mut change);
        }
        self.periods.iter_mut().for_each(&mut change);
        self.io.iter_mut().for_each(&mut change);
        self.quota.each(change);
    }

    /// Reads `memory.stat`.
    fn memory_parts(&mut self, reading: &mut SampleContext) -> Option<MemoryParts> {
        let file = self.memory_stat.as_mut()?;
        if reading.hierarchy.is_v2() {
            return reading.text(file, memory_parts_v2);
        }
        let parts = reading.text(file, memory_parts_v1)?;
        let kernel = number(reading, self.kernel_memory.as_mut()).unwrap_or_default();
        let unreclaimable = parts.unreclaimable.0.checked_add(kernel)?;
        Some(MemoryParts {
            unreclaimable: Bytes(unreclaimable),
            ..parts
        })
    }
}

fn memory_parts_v2(text: &[u8]) -> Option<MemoryParts> {
    let keys: [&[u8]; 4] = [b"anon", b"shmem", b"slab_unreclaimable", b"file"];
    let [anon, shared, slab, cache] = all(keyed(text, keys))?;
    memory_parts(anon.checked_add(slab)?, shared, cache)
}

/// On v1 the sums over the pod's containers are named `total_*`. Kernel memory is in another file; it cannot be split
/// there and counts as unreclaimable.
fn memory_parts_v1(text: &[u8]) -> Option<MemoryParts> {
    let keys: [&[u8]; 3] = [b"total_rss", b"total_shmem", b"total_cache"];
    let [anon, shared, cache] = all(keyed(text, keys))?;
    memory_parts(anon, shared, cache)
}

/// Memory that is freed only when the pod ends, and page cache. The kernel counts shared memory as cache.
fn memory_parts(unreclaimable: u64, shared: u64, cache: u64) -> Option<MemoryParts> {
    Some(MemoryParts {
        unreclaimable: Bytes(unreclaimable.checked_add(shared)?),
        // The two counters are updated separately, so one may be briefly ahead.
        cache: Bytes(cache.saturating_sub(shared)),
    })
}

fn all<const N: usize>(values: [Option<u64>; N]) -> Option<[u64; N]> {
    let complete = values.iter().all(Option::is_some);
    complete.then(|| values.map(Option::unwrap_or_default))
}

/// The directory of a cgroup in a tree that every hierarchy has.
pub fn directory(hierarchy: &Hierarchy, controller: Controller, cgroup: &CgroupPath) -> PathBuf {
    hierarchy.dir(controller, cgroup).unwrap_or_default()
}

/// The file with a cgroup's CPU time.
#[derive(Debug)]
pub struct CpuUsage {
    /// `cpuacct.usage`, or on v2 `cpu.stat`.
    pub file: CachedFile,
}

impl CpuUsage {
    pub fn new(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Self {
        let name = if hierarchy.is_v2() {
            "cpu.stat"
        } else {
            "cpuacct.usage"
        };
        Self {
            file: CachedFile::new(directory(hierarchy, Controller::Cpuacct, cgroup).join(name)),
        }
    }

    /// Reads the counters.
    pub fn read(&mut self, reading: &mut SampleContext) -> Result<CpuCounters, ReadError> {
        if reading.hierarchy.is_v2() {
            return reading.try_text(&mut self.file, cpu_stat);
        }
        let nanos = self.file.read_number(&reading.fds)?;
        Ok(CpuCounters {
            nanos,
            periods: [None; 2],
        })
    }
}

/// The CPU counters of a cgroup.
#[derive(Clone, Copy, Debug)]
pub struct CpuCounters {
    /// CPU time used since the cgroup was created, in nanoseconds.
    pub nanos: u64,
    /// Elapsed enforcement periods, and throttled ones; v2 has them in the same file.
    pub periods: [Option<u64>; 2],
}

/// `cpu.stat` of cgroup v2.
fn cpu_stat(text: &[u8]) -> Option<CpuCounters> {
    let [periods, throttled] = PERIODS;
    let [micros, periods, throttled] = keyed(text, [b"usage_usec", periods, throttled]);
    Some(CpuCounters {
        nanos: micros?.checked_mul(1000)?,
        periods: [periods, throttled],
    })
}

/// The files that limit a cgroup's CPU time.
#[derive(Debug)]
pub enum QuotaFiles {
    /// `cpu.cfs_quota_us` and `cpu.cfs_period_us`
    V1(CachedFile, CachedFile),
    /// `cpu.max`
    V2(CachedFile),
}

impl QuotaFiles {
    pub fn new(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Self {
        let directory = directory(hierarchy, Controller::Cpu, cgroup);
        if hierarchy.is_v2() {
            Self::V2(CachedFile::new(directory.join("cpu.max")))
        } else {
            Self::V1(
                CachedFile::new(directory.join("cpu.cfs_quota_us")),
                CachedFile::new(directory.join("cpu.cfs_period_us")),
            )
        }
    }

    /// Reads the current quota.
    pub fn read(&mut self, reading: &mut SampleContext) -> Result<Quota, ReadError> {
        match self {
            Self::V2(max) => reading.try_text(max, cpu_max).map(Bandwidth::limit),
            Self::V1(quota, period) => {
                let Some(limit) = reading.try_text(quota, cfs_quota)? else {
                    return Ok(Quota::Unlimited);
                };
                let length = period.read_number(&reading.fds)?;
                let period = period.parsed((length > 0).then_some(length))?;
                let quota = Some(limit);
                Ok(Bandwidth { quota, period }.limit())
            }
        }
    }

    /// Applies `change` to each file.
    pub fn each(&mut self, mut change: impl FnMut(&mut CachedFile)) {
        match self {
            Self::V1(quota, period) => {
                change(quota);
                change(period);
            }
            Self::V2(max) => change(max),
        }
    }
}
