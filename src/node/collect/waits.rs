//! How long the threads of a cgroup wait for CPU, memory or I/O, or because of their own quota.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::proc::pressure;
use super::refill::Refill;
use super::sampler::SampleContext;
use crate::engine::sample::{SystemService, WaitCounters};
use crate::node::cgroup::CgroupPath;
use crate::node::cgroup::cached_file::{CachedFile, ReadError};
use crate::node::cgroup::kubepods::child_directories;
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
///
/// Its services are read one by one: its own stall time is the union of theirs, far above that of any of them.
#[derive(Debug)]
pub struct SystemSlice {
    directory: PathBuf,
    services: Vec<ServiceReader>,
    /// Link count of the directory at the last scan: two, plus one per child.
    links: u64,
    /// Pods are below it, so some of its children are no services.
    has_pods: bool,
}

/// Path below the root.
const SYSTEM_SLICE: &str = "system.slice";
/// The services that are read, in order of their names; a node has about 20.
const MAX_SERVICES: usize = 64;

impl SystemSlice {
    /// The slice below the root of the v2 tree; opens nothing yet.
    pub fn below(root: &Path) -> Self {
        Self {
            directory: root.join(SYSTEM_SLICE),
            services: Vec::new(),
            links: 0,
            has_pods: false,
        }
    }

    /// It is not sampled while one of the `pods` is below it.
    pub fn set_pods<'a>(&mut self, mut pods: impl Iterator<Item = &'a CgroupPath>) {
        self.has_pods = pods.any(|pod| pod.as_str().split('/').next() == Some(SYSTEM_SLICE));
    }

    /// Reads the wait counters of each service.
    pub fn read(&mut self, reading: &mut SampleContext, out: &mut Vec<SystemService>) {
        let mut services = Refill::new(out);
        if self.has_pods {
            return;
        }
        self.find_services(reading);
        for service in &mut self.services {
            let Some(waits) = service.read(reading) else {
                continue;
            };
            let name = &service.name;
            let entry = services.next(
                |entry| entry.name == *name,
                || SystemService {
                    name: Arc::clone(name),
                    waits,
                },
            );
            entry.waits = waits;
        }
    }

    /// Rescans only if services were added or removed, or one was restarted.
    fn find_services(&mut self, reading: &mut SampleContext) {
        let links = std::fs::metadata(&self.directory).map_or(0, |found| found.nlink());
        // File systems that do not count links (overlayfs in tests) return 1.
        let is_same = links != 1 && links == self.links;
        if is_same && !self.services.iter().any(|service| service.is_gone) {
            return;
        }
        let names = match child_directories(&self.directory) {
            Ok(names) => names,
            Err(source) => {
                let path = Arc::from(self.directory.as_path());
                reading.record::<()>(Err(ReadError::Io { path, source }));
                return;
            }
        };
        self.links = links;
        let mut before = std::mem::take(&mut self.services);
        let unit = |name: &str| Path::new(name).extension().map(OsStr::to_owned);
        let is_service =
            |name: &&String| unit(name).is_some_and(|unit| unit == "service" || unit == "scope");
        for name in names.iter().filter(is_service).take(MAX_SERVICES) {
            let known = |one: &ServiceReader| *one.name == **name && !one.is_gone;
            let service = match before.iter().position(known) {
                Some(index) => before.swap_remove(index),
                None => ServiceReader::new(name, &self.directory.join(name)),
            };
            self.services.push(service);
        }
    }
}

/// The open files of one system service.
#[derive(Debug)]
struct ServiceReader {
    name: Arc<str>,
    stat: CachedFile,
    events: CachedFile,
    pressure: PressureFiles,
    /// Its cgroup was removed; another may have taken its name.
    is_gone: bool,
}

impl ServiceReader {
    fn new(name: &str, directory: &Path) -> Self {
        Self {
            name: name.into(),
            stat: CachedFile::new(directory.join("cpu.stat")),
            events: CachedFile::new(directory.join("memory.events")),
            pressure: PressureFiles::new(directory),
            is_gone: false,
        }
    }

    fn read(&mut self, reading: &mut SampleContext) -> Option<WaitCounters> {
        let stat = reading.try_text(&mut self.stat, |text| Some(periods(text)));
        self.is_gone = matches!(stat, Err(ReadError::Gone(_)));
        let [periods, throttled_periods] = reading.record(stat)?;
        let (_, stalled) = self.pressure.read(reading);
        let counters = WaitCounters {
            stalled,
            periods,
            throttled_periods,
            own_limit_reclaims: reading.text(&mut self.events, own_limit_reclaims),
        };
        (counters != WaitCounters::default()).then_some(counters)
    }
}
