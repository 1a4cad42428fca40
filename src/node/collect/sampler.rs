//! The sampler: which files are read when, and where their figures go.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::node::NodeReader;
use super::pod::PodReader;
use super::refill::Refill;
use crate::crd::pod_facts::ContainerFacts;
use crate::engine::Demand;
use crate::engine::pod::PodUid;
use crate::engine::sample::{LeverSample, PodSample, Sample};
use crate::engine::time::BootTime;
use crate::node::cgroup::gauge::{Buffer, FdBudget, Gauge, ReadError};
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::clock::boot_time;

/// Reads the node and its pods into a [`Sample`].
///
/// All files stay open and all memory is kept: a sample of the same pods with the same demand as the one before
/// opens nothing and allocates nothing. It never fails as a whole: what cannot be read is `None` in the sample.
#[derive(Debug)]
pub struct Sampler {
    node: NodeReader,
    pods: Vec<PodReader>,
    /// Entries that wait for the next evaluation, with their inner lists.
    spare: Vec<PodSample>,
    gone: Vec<PodUid>,
    /// What the clock said when the node's files began to be read.
    begun: Option<BootTime>,
    reading: Reading,
}

/// A pod that is to be read.
#[derive(Clone, Debug)]
pub struct Target {
    /// Which pod.
    pub uid: PodUid,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// What its object says of its containers; without it the cgroups decide alone.
    pub containers: Option<ContainerFacts>,
}

impl From<(PodUid, CgroupPath)> for Target {
    fn from((uid, cgroup): (PodUid, CgroupPath)) -> Self {
        Self {
            uid,
            cgroup,
            containers: None,
        }
    }
}

/// Problems kept of one sample; more of them would tell nothing new.
const MOST_FAULTS: usize = 64;

/// What every reading needs at hand.
#[derive(Debug)]
pub struct Reading {
    /// The cgroup trees.
    pub hierarchy: Hierarchy,
    /// Where `/proc` is mounted.
    pub proc_root: PathBuf,
    /// Descriptors that may still be kept.
    pub fds: FdBudget,
    /// The processes of all pods can be seen there.
    pub sees_processes: bool,
    /// When this sample is taken.
    pub now: BootTime,
    /// An empty name: the pod's own cgroup.
    pub own: Arc<str>,
    buffer: Buffer,
    faults: Vec<ReadError>,
}

impl Reading {
    /// The value, or `None` with the reason kept unless it is a normal one (gone, or no such file).
    pub fn noted<T>(&mut self, result: Result<T, ReadError>) -> Option<T> {
        match result {
            Ok(value) => return Some(value),
            Err(ReadError::Gone(_) | ReadError::Absent(_)) => {}
            Err(fault) if self.faults.len() < MOST_FAULTS => self.faults.push(fault),
            Err(_) => {}
        }
        None
    }

    /// What `parse` makes of the file's text.
    pub fn try_text<T>(
        &mut self,
        gauge: &mut Gauge,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Result<T, ReadError> {
        let value = parse(gauge.read(&self.fds, &mut self.buffer)?);
        gauge.understood(value)
    }

    /// As [`Self::try_text`], through [`Self::noted`].
    pub fn text<T>(
        &mut self,
        gauge: &mut Gauge,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Option<T> {
        let result = self.try_text(gauge, parse);
        self.noted(result)
    }

    /// As [`Self::text`], where it is `wanted`.
    pub fn text_if<T>(
        &mut self,
        wanted: bool,
        gauge: &mut Gauge,
        parse: impl FnOnce(&[u8]) -> Option<T>,
    ) -> Option<T> {
        wanted.then(|| self.text(gauge, parse)).flatten()
    }

    /// The file's only number.
    pub fn number(&mut self, gauge: &mut Gauge) -> Option<u64> {
        let result = gauge.read_number(&self.fds);
        self.noted(result)
    }

    /// The text of a file of records.
    pub fn try_records(&mut self, gauge: &mut Gauge) -> Result<&[u8], ReadError> {
        gauge.read_records(&self.fds, &mut self.buffer)
    }

    /// The text of a file of records; empty where it cannot be read.
    pub fn records(&mut self, gauge: &mut Gauge) -> &[u8] {
        match gauge.read_records(&self.fds, &mut self.buffer) {
            Ok(text) => text,
            Err(ReadError::Gone(_) | ReadError::Absent(_)) => &[],
            Err(fault) => {
                if self.faults.len() < MOST_FAULTS {
                    self.faults.push(fault);
                }
                &[]
            }
        }
    }
}

impl Sampler {
    /// A sampler of the machine whose `/proc` is at `proc_root`. Raises this process's soft limit of open files to its
    /// hard one; beyond it files are opened at each reading.
    pub fn new(proc_root: &Path, hierarchy: Hierarchy) -> Self {
        Self::with_budget(proc_root, hierarchy, FdBudget::raise())
    }

    /// As [`Self::new`], keeping no more files open than `fds` allows.
    pub fn with_budget(proc_root: &Path, hierarchy: Hierarchy, fds: FdBudget) -> Self {
        Self {
            node: NodeReader::new(proc_root, &hierarchy),
            pods: Vec::new(),
            spare: Vec::new(),
            gone: Vec::new(),
            begun: None,
            reading: Reading {
                sees_processes: true,
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

    /// Reads the network interfaces from `net_dev` instead of `1/net/dev` below the proc folder: in a container's own
    /// `/proc` that tells of the container's. Of others' processes such a one knows nothing; everything else in it that is
    /// read is the machine's.
    pub fn set_net_dev(&mut self, net_dev: &Path) {
        self.reading.sees_processes = false;
        self.node.set_net_dev(net_dev);
    }

    /// The pods to read from now on, in the order in which samples list them. Those that stay keep their open files.
    pub fn set_pods<T: Into<Target>>(&mut self, pods: impl Iterator<Item = T>) {
        let mut known: HashMap<PodUid, PodReader> = std::mem::take(&mut self.pods)
            .into_iter()
            .map(|reader| (reader.uid().clone(), reader))
            .collect();
        for pod in pods.map(T::into) {
            let mut reader = match known.remove(&pod.uid) {
                Some(mut reader) if *reader.cgroup() == pod.cgroup => {
                    reader.look_again();
                    reader
                }
                _ => PodReader::new(pod.uid, pod.cgroup, &self.reading.hierarchy),
            };
            reader.set_facts(pod.containers);
            self.pods.push(reader);
        }
        self.node
            .look_again(self.pods.iter().map(PodReader::cgroup));
    }

    /// While a pod is throttled, the same kind of cgroup stays its lever: its containers (`by_container`) or its own,
    /// whatever quotas come to stand there; but never its own where its object gives a container a limit. Of effect on
    /// cgroup v1 alone.
    pub fn pin_levers(&mut self, uid: &PodUid, by_container: bool) {
        self.set_pin(uid, Some(by_container));
    }

    /// The kind of lever follows the quotas again.
    pub fn unpin_levers(&mut self, uid: &PodUid) {
        self.set_pin(uid, None);
    }

    fn set_pin(&mut self, uid: &PodUid, pin: Option<bool>) {
        if let Some(pod) = self.pods.iter_mut().find(|pod| pod.uid() == uid) {
            pod.pin(pin);
        }
    }

    /// Reads the node's files: CPU and memory, and what is demanded besides. Leaves the sample without pods.
    pub fn sample_node(&mut self, now: BootTime, demand: &Demand, sample: &mut Sample) {
        self.begun = Some(boot_time());
        sample.at = now;
        sample.pressure_by_cgroup = self.reading.hierarchy.is_v2();
        self.reading.now = now;
        self.reading.faults.clear();
        self.put_by(&mut sample.pods);
        self.node
            .sample(&mut self.reading, demand, &mut sample.node);
    }

    /// Reads the pods' files: CPU and memory use, and what is demanded besides. Call it after
    /// [`Self::sample_node`], with the same time, when an evaluation is due: each pod's own time is later by what has
    /// passed since then.
    pub fn sample_pods(&mut self, now: BootTime, demand: &Demand, sample: &mut Sample) {
        self.reading.now = now;
        self.gone.clear();
        if sample.pods.is_empty() {
            std::mem::swap(&mut sample.pods, &mut self.spare);
        }
        let begun = self.begun.take().unwrap_or_else(boot_time);
        let mut refill = Refill::new(&mut sample.pods);
        for pod in &mut self.pods {
            let at = now + boot_time().since(begun);
            let Ok(cpu) = pod.cpu(&mut self.reading) else {
                self.gone.push(pod.uid().clone());
                continue;
            };
            let entry = refill.next(|entry| entry.uid == *pod.uid(), || blank(pod.uid()));
            entry.at = at;
            pod.sample(&mut self.reading, demand, cpu, entry);
        }
    }

    /// The cgroups by which a pod is limited now, and how far; none where it is not there. Between samples: it allocates.
    pub fn levers(&mut self, uid: &PodUid) -> Vec<LeverSample> {
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
        sample.levers
    }

    /// The pods whose cgroup did not exist at the last [`Self::sample_pods`]. They are looked for again each time.
    pub fn gone(&self) -> &[PodUid] {
        &self.gone
    }

    /// What could not be read or understood since the last [`Self::sample_node`] began, at most 64 entries. Cgroups
    /// that are gone and files that this kernel has not are no faults.
    pub fn faults(&self) -> &[ReadError] {
        &self.reading.faults
    }

    fn put_by(&mut self, pods: &mut Vec<PodSample>) {
        if !pods.is_empty() {
            std::mem::swap(pods, &mut self.spare);
            pods.clear();
        }
    }
}

fn blank(uid: &PodUid) -> PodSample {
    PodSample::new(uid.clone(), BootTime::default())
}
