//! Samples one container, from its cgroup and its threads.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::pod::{CpuUsage, QuotaFiles, directory};
use super::sampler::SampleContext;
use super::waits::{own_limit_reclaims, periods};
use crate::engine::Demand;
use crate::engine::sample::ContainerSample;
use crate::engine::time::BootTime;
use crate::engine::units::Quota;
use crate::node::cgroup::cached_file::{CachedFile, ReadError};
use crate::node::cgroup::parse::{fields, lines, unsigned};
use crate::node::cgroup::{CgroupPath, Controller};

/// The open files of one container.
#[derive(Debug)]
pub struct ContainerReader {
    name: Arc<str>,
    /// Its cgroup is below the pod's, not the pod's own.
    below: bool,
    cpu: CpuUsage,
    quota_files: QuotaFiles,
    quota: Option<Quota>,
    stat: CachedFile,
    memory_events: CachedFile,
    threads: Threads,
    gone: bool,
}

impl ContainerReader {
    /// The container whose cgroup is `directory` below the pod's; `None` if that name is not a valid path.
    pub fn below(pod: &CgroupPath, directory: &str, reading: &SampleContext) -> Option<Self> {
        let cgroup = pod.join(directory).ok()?;
        Some(Self::new(directory.into(), true, &cgroup, reading))
    }

    /// For a pod that has no cgroup below its own.
    pub fn whole_pod(pod: &CgroupPath, reading: &SampleContext) -> Self {
        let name = pod.as_str().rsplit('/').next().unwrap_or_default();
        Self::new(name.into(), false, pod, reading)
    }

    fn new(name: Arc<str>, below: bool, cgroup: &CgroupPath, reading: &SampleContext) -> Self {
        let hierarchy = &reading.hierarchy;
        let directory = directory(hierarchy, Controller::Cpu, cgroup);
        let tasks = if hierarchy.is_v2() {
            "cgroup.threads"
        } else {
            "tasks"
        };
        Self {
            name,
            below,
            cpu: CpuUsage::new(hierarchy, cgroup),
            quota_files: QuotaFiles::new(hierarchy, cgroup),
            quota: None,
            stat: CachedFile::new(directory.join("cpu.stat")),
            memory_events: CachedFile::new(directory.join("memory.events")),
            threads: Threads::new(CachedFile::new(directory.join(tasks))),
            gone: false,
        }
    }

    /// Its cgroup's directory name.
    pub const fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Its cgroup's directory below the pod's; `None` if it is the pod's own cgroup.
    pub fn directory(&self) -> Option<&str> {
        self.below.then_some(&*self.name)
    }

    /// Whether the last read found its cgroup removed.
    pub const fn is_gone(&self) -> bool {
        self.gone
    }

    /// The quota that [`Self::read_quota`] read last.
    pub const fn quota(&self) -> Option<Quota> {
        self.quota
    }

    /// Updates [`Self::quota`].
    pub fn read_quota(&mut self, reading: &mut SampleContext) {
        let result = self.quota_files.read(reading);
        self.quota = self.record(reading, result);
    }

    /// CPU time used, in nanoseconds.
    pub fn cpu_nanos(&mut self, reading: &mut SampleContext) -> Option<u64> {
        let result = self.cpu.read(reading);
        Some(self.record(reading, result)?.nanos)
    }

    /// Enforcement periods of its own quota, and those in which that throttled it.
    pub fn periods(&mut self, reading: &mut SampleContext) -> [Option<u64>; 2] {
        let result = reading.try_text(&mut self.stat, |text| Some(periods(text)));
        self.record(reading, result).unwrap_or_default()
    }

    /// See [`own_limit_reclaims`]; cgroup v2 only.
    pub fn own_limit_reclaims(&mut self, reading: &mut SampleContext) -> Option<u64> {
        reading.text(&mut self.memory_events, own_limit_reclaims)
    }

    /// Reads what `demand` asks for.
    pub fn sample(
        &mut self,
        reading: &mut SampleContext,
        demand: &Demand,
        out: &mut ContainerSample,
    ) {
        [out.periods, out.throttled_periods] = if demand.throttled {
            let result = reading.try_text(&mut self.stat, |text| Some(periods(text)));
            self.record(reading, result).unwrap_or_default()
        } else {
            [None; 2]
        };
        out.run_delay_nanos = if demand.run_delay && reading.sees_processes {
            let result = self.threads.run_delay(reading);
            self.record(reading, result).flatten()
        } else {
            None
        };
    }

    fn record<T>(
        &mut self,
        reading: &mut SampleContext,
        result: Result<T, ReadError>,
    ) -> Option<T> {
        if matches!(result, Err(ReadError::Gone(_))) {
            self.gone = true;
        }
        reading.record(result)
    }
}

/// The threads of a container and how long they have waited for a CPU.
#[derive(Debug)]
struct Threads {
    tasks: CachedFile,
    known: HashMap<u32, Thread>,
    /// Nanoseconds, summed over all threads ever seen: an exited thread's time stays included.
    waited: u64,
    /// When the threads were last read.
    last: Option<BootTime>,
    ids: Vec<u32>,
}

#[derive(Debug)]
struct Thread {
    schedstat: CachedFile,
    waited: u64,
    seen: BootTime,
}

impl Threads {
    fn new(tasks: CachedFile) -> Self {
        Self {
            tasks,
            known: HashMap::new(),
            waited: 0,
            last: None,
            ids: Vec::new(),
        }
    }

    /// Time that the threads were runnable but not running, in nanoseconds since the container was first sampled.
    /// `None` if some threads are not visible because this process is in its own PID namespace.
    fn run_delay(&mut self, reading: &mut SampleContext) -> Result<Option<u64>, ReadError> {
        if !self.list(reading)? {
            return Ok(None);
        }
        let now = reading.now;
        // A thread that was moved into the cgroup must not bring its earlier waiting time along.
        let max = self.last.map_or(0, |last| nanos(now.since(last)));
        for id in &self.ids {
            let thread = self
                .known
                .entry(*id)
                .or_insert_with(|| Thread::new(*id, reading));
            match thread.growth(reading) {
                Ok(growth) => self.waited = self.waited.saturating_add(growth.min(max)),
                Err(ReadError::Gone(_)) => continue,
                Err(fault) => return Err(fault),
            }
            thread.seen = now;
        }
        self.known.retain(|_, thread| thread.seen == now);
        self.last = Some(now);
        Ok(Some(self.waited))
    }

    /// Whether all threads are visible. v2 lists an invisible thread as 0, v1 omits it.
    fn list(&mut self, reading: &mut SampleContext) -> Result<bool, ReadError> {
        let text = reading.try_records(&mut self.tasks)?;
        self.ids.clear();
        let ids = lines(text)
            .filter_map(unsigned)
            .filter_map(|id| u32::try_from(id).ok());
        self.ids.extend(ids);
        Ok(!self.ids.contains(&0))
    }
}

impl Thread {
    fn new(id: u32, reading: &SampleContext) -> Self {
        let path = reading.proc_root.join(id.to_string()).join("schedstat");
        Self {
            schedstat: CachedFile::new(path),
            waited: 0,
            seen: reading.now,
        }
    }

    /// Growth of the waiting time. The ID of an exited thread may be reused by another, which starts at 0.
    fn growth(&mut self, reading: &mut SampleContext) -> Result<u64, ReadError> {
        let mut result = reading.try_text(&mut self.schedstat, run_delay);
        if matches!(result, Err(ReadError::Gone(_))) {
            self.schedstat.close();
            self.waited = 0;
            result = reading.try_text(&mut self.schedstat, run_delay);
        }
        let waited = result?;
        let before = if waited < self.waited { 0 } else { self.waited };
        self.waited = waited;
        Ok(waited - before)
    }
}

/// `/proc/<id>/schedstat`: nanoseconds on a CPU, nanoseconds of waiting for one, time slices.
fn run_delay(text: &[u8]) -> Option<u64> {
    let mut fields = fields(lines(text).next()?);
    let (_on_cpu, waited, _slices) = (fields.next()?, fields.next()?, fields.next()?);
    unsigned(waited)
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
