//! How long the threads of a cgroup wait for CPU, memory or I/O, or because of their own quota.

use std::path::Path;

use super::proc::pressure;
use super::sampler::SampleContext;
use crate::engine::sample::WaitCounters;
use crate::node::cgroup::CgroupPath;
use crate::node::cgroup::cached_file::{CachedFile, ReadError};
use crate::node::cgroup::parse::{fields, keyed, lines, unsigned};

/// The keys of `cpu.stat` for all enforcement periods and the throttled ones.
pub const PERIODS: [&[u8]; 2] = [b"nr_periods", b"nr_throttled"];

/// `cpu.stat`: elapsed enforcement periods, and those in which the cgroup was throttled.
pub fn periods(text: &[u8]) -> [Option<u64>; 2] {
    keyed(text, PERIODS)
}

/// `memory.events`: how often the cgroup or, unless the tree is mounted with `memory_localevents`, one below it reached
/// its own limit and had to reclaim.
pub fn own_limit_reclaims(text: &[u8]) -> Option<u64> {
    let [high, max] = keyed(text, [b"high", b"max"]);
    high?.checked_add(max?)
}

/// `io.stat` of cgroup v2: bytes read and written on all devices. An empty file means no I/O.
pub fn io_bytes(text: &[u8]) -> Option<u64> {
    if !text.is_empty() && !text.ends_with(b"\n") {
        return None;
    }
    let fields = lines(text).flat_map(fields);
    let counts = fields.filter_map(|field| {
        let bytes = field.strip_prefix(b"rbytes=");
        bytes.or_else(|| field.strip_prefix(b"wbytes="))
    });
    counts
        .map(unsigned)
        .try_fold(0_u64, |sum, bytes| sum.checked_add(bytes?))
}

/// The pressure files of a v2 cgroup.
#[derive(Debug)]
pub struct PressureFiles([CachedFile; 3]);

impl PressureFiles {
    pub fn new(directory: &Path) -> Self {
        let names = ["cpu.pressure", "memory.pressure", "io.pressure"];
        Self(names.map(|name| CachedFile::new(directory.join(name))))
    }

    /// Percent of the last 10 s in which some thread waited for `[CPU, memory, I/O]`, and nanoseconds since the
    /// cgroup was created.
    pub fn read(&mut self, reading: &mut SampleContext) -> ([Option<f64>; 3], [Option<u64>; 3]) {
        let read = |file: &mut CachedFile| reading.text(file, pressure);
        let lines = self.0.each_mut().map(read);
        (
            lines.map(|lines| Some(lines?.some[0])),
            lines.map(|lines| lines?.totals[0]),
        )
    }

    /// Applies `change` to each file.
    pub fn each(&mut self, change: impl FnMut(&mut CachedFile)) {
        self.0.iter_mut().for_each(change);
    }
}

/// `system.slice`, the cgroup of the system services under systemd, on cgroup v2.
#[derive(Debug)]
pub struct SystemSlice {
    stat: CachedFile,
    pressure: PressureFiles,
    /// It did not exist at the last read.
    absent: bool,
    /// Pods are below it, so its pressure includes theirs.
    has_pods: bool,
}

/// Path below the root.
const SYSTEM_SLICE: &str = "system.slice";

impl SystemSlice {
    /// The slice below the root of the v2 tree; opens nothing yet.
    pub fn below(root: &Path) -> Self {
        let directory = root.join(SYSTEM_SLICE);
        Self {
            stat: CachedFile::new(directory.join("cpu.stat")),
            pressure: PressureFiles::new(&directory),
            absent: false,
            has_pods: false,
        }
    }

    /// Retries it if it was absent. It is not sampled while one of the `pods` is below it.
    pub fn retry_absent<'a>(&mut self, mut pods: impl Iterator<Item = &'a CgroupPath>) {
        self.absent = false;
        self.has_pods = pods.any(|pod| pod.as_str().split('/').next() == Some(SYSTEM_SLICE));
        self.stat.retry_absent();
        self.pressure.each(CachedFile::retry_absent);
    }

    /// Reads the wait counters; `None` if it does not exist or cannot be read.
    pub fn read(&mut self, reading: &mut SampleContext) -> Option<WaitCounters> {
        if self.absent || self.has_pods {
            return None;
        }
        let stat = reading.try_text(&mut self.stat, |text| Some(periods(text)));
        self.absent = matches!(stat, Err(ReadError::Gone(_)));
        let [periods, throttled_periods] = reading.record(stat)?;
        let (_, stalled) = self.pressure.read(reading);
        let counters = WaitCounters {
            stalled,
            periods,
            throttled_periods,
            ..WaitCounters::default()
        };
        (counters != WaitCounters::default()).then_some(counters)
    }
}
