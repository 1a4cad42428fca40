//! Decides which files are read when, and fills the sample.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::node::NodeReader;
use super::pod::PodReader;
use super::refill::Refill;
use crate::clock::{boot_time, wall_time};
use crate::crd::pod_facts::ContainerFacts;
use crate::engine::Demand;
use crate::engine::pod::PodUid;
use crate::engine::sample::{PodSample, Sample, SystemService, TargetCgroupSample};
use crate::engine::time::BootTime;
use crate::node::cgroup::cached_file::{Buffer, CachedFile, FdBudget, ReadError};
use crate::node::cgroup::{CgroupPath, Hierarchy};

/// Reads the node and its pods into a [`Sample`].
///
/// Files stay open and allocations are reused: a sample of the same pods with the same demand as the previous one
/// opens and allocates nothing. It never fails as a whole: values that cannot be read are `None` in the sample.
#[derive(Debug)]
pub struct Sampler {
    node: NodeReader,
    pods: Vec<PodReader>,
    /// Entries to reuse at the next evaluation, with their inner lists.
    spare: Vec<PodSample>,
    spare_services: Vec<SystemService>,
    gone: Vec<PodUid>,
    /// When reading the node's files started.
    started: Option<BootTime>,
    reading: SampleContext,
}

/// A pod to sample.
#[derive(Clone, Debug)]
pub struct SampledPod {
    /// Which pod.
    pub uid: PodUid,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Container facts from the Pod object, if there is one.
    pub containers: Option<ContainerFacts>,
}

impl From<(PodUid, CgroupPath)> for SampledPod {
    fn from((uid, cgroup): (PodUid, CgroupPath)) -> Self {
        Self {
            uid,
            cgroup,
            containers: None,
        }
    }
}

/// Maximum number of read errors recorded per sample.
const MAX_FAULTS: usize = 64;

/// State shared by all reads of a sample.
#[derive(Debug)]
pub struct SampleContext {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// Where `/proc` is mounted.
    pub proc_root: PathBuf,
    /// Descriptors that may stay open.
    pub fds: FdBudget,
    /// Whether all pods' processes are visible in `proc_root`.
    pub sees_processes: bool,
    /// The cgroup v2 tree is mounted with `memory_localevents`.
    pub local_events: bool,
    /// Time of this sample.
    pub now: BootTime,
    /// The empty name, for the pod's own cgroup.
    pub own: Arc<str>,
    buffer: Buffer,
    faults: Vec<ReadError>,
}

impl SampleContext {
    /// The value, or `None` after recording the error, unless it is a normal one (gone, or no such file).
    pub fn record<T>(&mut self, result: Result<T, ReadError>) -> Option<T> {
        match result {
            Ok(value) => return Some(value),
            Err(ReadError::Gone(_) | ReadError::Absent(_)) => {}
            Err(fault) if self.faults.len() < MAX_FAULTS => self.faults.push(fault),
            Err(_) => {}
        }
        None
    }

    /// Reads and parses a file.
    pub fn try_text<T>(
        &mut self,
        file: &mut CachedFile,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T, ReadError> {
        let value = parse(file.read(&self.fds, &mut self.buffer)?);
        file.parsed(value)
    }

    /// Like [`Self::try_text`], with errors recorded.
    pub fn text<T>(
        &mut self,
        file: &mut CachedFile,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Option<T> {
        let result = self.try_text(file, parse);
        self.record(result)
    }

    /// Like [`Self::text`], if `wanted`.
    pub fn text_if<T>(
        &mut self,
        wanted: bool,
        file: &mut CachedFile,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Option<T> {
        wanted.then(|| self.text(file, parse)).flatten()
    }

    /// Reads a file with a single number.
    pub fn number(&mut self, file: &mut CachedFile) -> Option<u64> {
        let result = file.read_number(&self.fds);
        self.record(result)
    }

    /// Reads a file that the kernel returns record by record.
    pub fn try_records(&mut self, file: &mut CachedFile) -> Result<&[u8], ReadError> {
        file.read_records(&self.fds, &mut self.buffer)
    }

    /// Like [`Self::try_records`], with errors recorded; empty if it cannot be read.
    pub fn records(&mut self, file: &mut CachedFile) -> &[u8] {
        match file.read_records(&self.fds, &mut self.buffer) {
            Ok(text) => text,
            Err(ReadError::Gone(_) | ReadError::Absent(_)) => &[],
            Err(fault) => {
                if self.faults.len() < MAX_FAULTS {
                    self.faults.push(fault);
                }
                &[]
            }
        }
    }
}

impl Sampler {
    /// A sampler of the machine whose `/proc` is at `proc_root`. Raises this process's soft limit of open files to the
    /// hard limit; files beyond it are opened at each read.
    pub fn new(proc_root: &Path, hierarchy: Hierarchy) -> Self {
        Self::with_budget(proc_root, hierarchy, FdBudget::raise())
    }

    /// Like [`Self::new`], with at most as many open files as `fds` allows.
    pub fn with_budget(proc_root: &Path, hierarchy: Hierarchy, fds: FdBudget) -> Self {
        Self {
            node: NodeReader::new(proc_root, &hierarchy),
            pods: Vec::new(),
            spare: Vec::new(),
            spare_services: Vec::new(),
            gone: Vec::new(),
            started: None,
            reading: SampleContext {
                sees_processes: true,
                local_events: hierarchy.is_v2() && has_local_events(proc_root),
                hierarchy,
                proc_root: proc_root.to_owned(),
                fds,
                now: BootTime::default(),
                own: Arc::from(""),
                buffer: Buffer::default(),
                faults: Vec::new(),
            },
        }
    }

    /// Reads the network interfaces from `net_dev` instead of `1/net/dev` below the proc directory. For a container's own
    /// `/proc`, where that file shows the container's interfaces, and other processes are not visible; all other files
    /// read there show the machine.
    pub fn set_net_dev(&mut self, net_dev: &Path) {
        self.reading.sees_processes = false;
        self.node.set_net_dev(net_dev);
    }

    /// Sets the pods to sample, in sample order. Pods that stay keep their open files.
    pub fn set_pods<T: Into<SampledPod>>(&mut self, pods: impl Iterator<Item = T>) {
        let mut known: HashMap<PodUid, PodReader> = std::mem::take(&mut self.pods)
            .into_iter()
            .map(|reader| (reader.uid().clone(), reader))
            .collect();
        for pod in pods.map(T::into) {
            let mut reader = match known.remove(&pod.uid) {
                Some(mut reader) if *reader.cgroup() == pod.cgroup => {
                    reader.retry_absent();
                    reader
                }
                _ => PodReader::new(pod.uid, pod.cgroup, &self.reading.hierarchy),
            };
            reader.set_facts(pod.containers);
            self.pods.push(reader);
        }
        self.node.set_pods(self.pods.iter().map(PodReader::cgroup));
    }

    /// Fixes the kind of target cgroup while a pod is throttled: its containers (`by_container`) or its own, whatever
    /// quotas appear there; but never its own if its object gives a container a limit. Only has an effect on cgroup v1.
    pub fn pin_targets(&mut self, uid: &PodUid, by_container: bool) {
        self.set_pin(uid, Some(by_container));
    }

    /// Lets the kind of target cgroup follow the quotas again.
    pub fn unpin_targets(&mut self, uid: &PodUid) {
        self.set_pin(uid, None);
    }

    fn set_pin(&mut self, uid: &PodUid, pin: Option<bool>) {
        if let Some(pod) = self.pods.iter_mut().find(|pod| pod.uid() == uid) {
            pod.pin(pin);
        }
    }

    /// Reads the node's CPU and memory, and what else `demand` asks for. Leaves the sample without pods.
    pub fn sample_node(&mut self, now: BootTime, demand: &Demand, sample: &mut Sample) {
        self.started = Some(boot_time());
        sample.at = now;
        sample.time = Some(wall_time());
        sample.pressure_by_cgroup = self.reading.hierarchy.is_v2();
        self.reading.now = now;
        self.reading.faults.clear();
        stash(&mut sample.pods, &mut self.spare);
        stash(&mut sample.node.system, &mut self.spare_services);
        self.node
            .sample(&mut self.reading, demand, &mut sample.node);
    }

    /// Reads the pods' CPU and memory, and what else `demand` asks for. Call it after [`Self::sample_node`] with the
    /// same time, when an evaluation is due: each pod's sample time adds the time that has passed since then.
    pub fn sample_pods(&mut self, now: BootTime, demand: &Demand, sample: &mut Sample) {
        self.reading.now = now;
        self.gone.clear();
        let services = &mut sample.node.system;
        stash(&mut self.spare, &mut sample.pods);
        stash(&mut self.spare_services, services);
        self.node.sample_system(&mut self.reading, demand, services);
        let started = self.started.take().unwrap_or_else(boot_time);
        let mut refill = Refill::new(&mut sample.pods);
        for pod in &mut self.pods {
            let at = now + boot_time().since(started);
            let Ok(cpu) = pod.cpu(&mut self.reading) else {
                self.gone.push(pod.uid().clone());
                continue;
            };
            let entry = refill.next(|entry| entry.uid == *pod.uid(), || blank(pod.uid()));
            entry.at = at;
            pod.sample(&mut self.reading, demand, cpu, entry);
        }
    }

    /// The cgroups that limit a pod now, and their quotas; empty if the pod is gone. Allocates; call it between samples.
    pub fn targets(&mut self, uid: &PodUid) -> Vec<TargetCgroupSample> {
        let mut sample = blank(uid);
        let demand = Demand {
            pod_quota: true,
            ..Demand::default()
        };
        if let Some(pod) = self.pods.iter_mut().find(|pod| pod.uid() == uid)
            && let Ok(cpu) = pod.cpu(&mut self.reading)
        {
            pod.sample(&mut self.reading, &demand, cpu, &mut sample);
        }
        sample.target_cgroups
    }

    /// The pods whose cgroup did not exist at the last [`Self::sample_pods`]. Each sample looks for them again.
    pub fn gone(&self) -> &[PodUid] {
        &self.gone
    }

    /// Read and parse errors since the start of the last [`Self::sample_node`], at most 64. Removed cgroups and files
    /// that this kernel does not have are not errors.
    pub fn faults(&self) -> &[ReadError] {
        &self.reading.faults
    }
}

/// Empties a list and keeps its allocations in `spare`.
fn stash<T>(list: &mut Vec<T>, spare: &mut Vec<T>) {
    if !list.is_empty() {
        std::mem::swap(list, spare);
        list.clear();
    }
}

/// Mount options are the same wherever a cgroup v2 tree is mounted, since there is only one.
fn has_local_events(proc_root: &Path) -> bool {
    let mounts = std::fs::read_to_string(proc_root.join("self/mounts")).unwrap_or_default();
    mounts.lines().any(|mount| {
        let mut fields = mount.split(' ').skip(2);
        let is_v2 = fields.next() == Some("cgroup2");
        let mut options = fields.next().unwrap_or_default().split(',');
        is_v2 && options.any(|option| option == "memory_localevents")
    })
}

fn blank(uid: &PodUid) -> PodSample {
    PodSample::new(uid.clone(), BootTime::default())
}
