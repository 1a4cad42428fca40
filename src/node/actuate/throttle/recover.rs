//! Adopts the throttles in the journal of an earlier process.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::engine::AdoptedThrottle;
use crate::engine::plan::CpuClass;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};
use crate::node::cgroup::CgroupPath;
use crate::node::cgroup::control_file::{ControlFileError, CpuDir, Role};
use crate::node::cgroup::parse::Bandwidth;
use crate::node::journal::JournalRecord;

use super::Throttler;
use super::outcome::{ReleaseResult, ThrottleOutcome};
use super::throttled_pod::{FileStage, OwnedFile, RecentTimes, ThrottleSpec, ThrottledPod};

/// The throttles found in force at the start.
#[derive(Debug, Default)]
pub struct Recovered {
    /// For the engine to take over.
    pub throttles: Vec<AdoptedThrottle>,
    /// The cgroups of their pods.
    pub pods: Vec<(PodUid, CgroupPath)>,
    /// Records that were dropped or restored immediately.
    pub outcomes: Vec<ThrottleOutcome>,
}

impl Throttler {
    pub(super) fn recover(&mut self, now: BootTime, records: Vec<JournalRecord>) -> Recovered {
        let mut out = Vec::new();
        let known = records.clone();
        self.adopt_all(records, &mut out);
        self.expire(now, &mut out);
        self.pods.retain(|_, pod| !pod.entries.is_empty());
        self.journal_stale = self.records().ne(known);
        self.save_recovered(now, &mut out);
        Recovered {
            throttles: self.pods.iter().filter_map(adopted).collect(),
            pods: self
                .pods
                .iter()
                .map(|(uid, pod)| (uid.clone(), pod.path.clone()))
                .collect(),
            outcomes: out,
        }
    }

    fn adopt_all(&mut self, records: Vec<JournalRecord>, out: &mut Vec<ThrottleOutcome>) {
        for (uid, records) in by_pod(records) {
            let Some(pod) = self.adopt(&uid, &records, out) else {
                continue;
            };
            match self.pods.get_mut(&uid) {
                Some(known) => pod
                    .entries
                    .into_iter()
                    .for_each(|entry| known.insert(entry)),
                None => drop(self.pods.insert(uid, pod)),
            }
        }
    }

    /// Retries files that could not be opened at the start. Until then their content is unknown, so their records stay.
    pub(super) fn retry_unopened(&mut self, out: &mut Vec<ThrottleOutcome>) {
        if self.unopened.is_empty() {
            return;
        }
        let before = self.unopened.len();
        let records = std::mem::take(&mut self.unopened);
        self.adopt_all(records, out);
        self.journal_stale |= self.unopened.len() < before;
    }

    /// Rewrites the journal if some records are obsolete; writes no cgroup.
    fn save_recovered(&mut self, now: BootTime, out: &mut Vec<ThrottleOutcome>) {
        if self.journal_stale
            && let Err(error) = self.save(now)
        {
            out.push(ThrottleOutcome::JournalFailed { error });
        }
    }

    fn expire(&mut self, now: BootTime, out: &mut Vec<ThrottleOutcome>) {
        for (uid, pod) in &mut self.pods {
            if pod.deadline <= now {
                out.push(ThrottleOutcome::Expired { uid: uid.clone() });
                pod.release(uid, |_| true, &mut self.effects, out);
            }
        }
    }

    fn adopt(
        &mut self,
        uid: &PodUid,
        records: &[JournalRecord],
        out: &mut Vec<ThrottleOutcome>,
    ) -> Option<ThrottledPod> {
        let first = records.first()?;
        let mut pod = ThrottledPod {
            path: first.cgroup.clone(),
            spec: spec(first),
            next: None,
            deadline: first.deadline,
            next_deadline: first.deadline,
            entries: Vec::new(),
            changes: RecentTimes::default(),
            resets: RecentTimes::default(),
            class: CpuClass::Normal,
            burst: MilliCpu::ZERO,
        };
        let mut weights = Vec::new();
        for record in records {
            let follows = record.file.role() == Role::Weight
                && records.iter().any(|other| {
                    other.target_cgroup == record.target_cgroup && other.file.role() == Role::Idle
                });
            match self.find(record) {
                Ok(Found::Gone) => out.push(released(uid, record, ReleaseResult::Gone)),
                Ok(Found::There(entry)) if follows => weights.push(entry),
                // A burst is restored only after its quota, whose record comes first.
                Ok(Found::There(_)) if self.awaits_quota(record) => {
                    self.unopened.push(record.clone());
                }
                Ok(Found::There(entry)) => adopt_entry(uid, &mut pod, entry, out),
                Err(error) => {
                    self.unopened.push(record.clone());
                    out.push(ThrottleOutcome::Failed {
                        uid: uid.clone(),
                        throttling: false,
                        error,
                    });
                }
            }
        }
        for weight in weights {
            self.adopt_weight(uid, &mut pod, weight, out);
        }
        pod.class = class(&pod);
        (!pod.entries.is_empty()).then_some(pod)
    }

    fn awaits_quota(&self, record: &JournalRecord) -> bool {
        let is_its_quota = |other: &JournalRecord| {
            other.file.role() == Role::Quota
                && (&other.uid, &other.target_cgroup) == (&record.uid, &record.target_cgroup)
        };
        record.file.role() == Role::Burst && self.unopened.iter().any(is_its_quota)
    }

    fn find(&self, record: &JournalRecord) -> Result<Found, ControlFileError> {
        let Ok(cgroup) = record.cgroup.join(&record.target_cgroup) else {
            return Ok(Found::Gone);
        };
        let dir = match CpuDir::open(&self.hierarchy, &cgroup) {
            Err(error) if error.is_gone() => return Ok(Found::Gone),
            dir => dir?,
        };
        if dir.inode() != record.inode {
            return Ok(Found::Gone);
        }
        let Some(file) = dir.control_file(record.file.role())? else {
            return Ok(Found::Gone);
        };
        if file.kind() != record.file {
            return Ok(Found::Gone);
        }
        let location = (Arc::clone(&record.target_cgroup), record.inode);
        let ours = record.ours.clone();
        let mut entry = OwnedFile::fresh(location, file, record.base, &record.original, ours);
        entry.previous = record.previous.clone();
        entry.stage = FileStage::Settled;
        entry.partner = match record.file.role() {
            Role::Quota => dir.control_file(Role::Burst)?,
            Role::Burst => dir.control_file(Role::Quota)?,
            Role::Idle | Role::Weight => None,
        };
        Ok(Found::There(entry))
    }

    /// Adopts the weight of a cgroup that we made idle. If the class is already restored, a crash came between the two,
    /// and the original weight is restored immediately.
    fn adopt_weight(
        &mut self,
        uid: &PodUid,
        pod: &mut ThrottledPod,
        mut weight: OwnedFile,
        out: &mut Vec<ThrottleOutcome>,
    ) {
        weight.follows_idle = true;
        if pod.entry(&weight.cgroup, Role::Idle).is_some() {
            if let Ok(reading) = weight.file.read() {
                weight.ours = reading.text().into();
            }
            pod.insert(weight);
            return;
        }
        pod.entries.push(weight);
        let is_weight = |entry: &OwnedFile| entry.follows_idle;
        pod.release(uid, is_weight, &mut self.effects, out);
    }
}

enum Found {
    There(OwnedFile),
    Gone,
}

/// The class that the files show.
fn class(pod: &ThrottledPod) -> CpuClass {
    let is_idle = |entry: &OwnedFile| entry.role() == Role::Idle;
    if pod.entries.iter().any(is_idle) {
        CpuClass::Idle
    } else if pod.owns_class() {
        CpuClass::LowestWeight
    } else {
        CpuClass::Normal
    }
}

fn spec(record: &JournalRecord) -> ThrottleSpec {
    ThrottleSpec {
        rule: record.rule.clone(),
        ratio: record.ratio,
        idle: record.idle,
    }
}

fn by_pod(records: Vec<JournalRecord>) -> BTreeMap<PodUid, Vec<JournalRecord>> {
    let mut pods: BTreeMap<PodUid, Vec<JournalRecord>> = BTreeMap::new();
    for record in records {
        pods.entry(record.uid.clone()).or_default().push(record);
    }
    pods
}

fn released(uid: &PodUid, record: &JournalRecord, result: ReleaseResult) -> ThrottleOutcome {
    ThrottleOutcome::Released {
        uid: uid.clone(),
        file: format!("{}/{}/{}", record.cgroup, record.target_cgroup, record.file).into(),
        result,
    }
}

/// Adopts an entry according to its file's content: the original (removing the record was lost, or the write never
/// happened), our value, the value before ours, or a foreign value, which becomes the original.
fn adopt_entry(
    uid: &PodUid,
    pod: &mut ThrottledPod,
    mut entry: OwnedFile,
    out: &mut Vec<ThrottleOutcome>,
) {
    let found: Box<str> = match entry.file.read() {
        Ok(reading) => reading.text().into(),
        Err(error) if error.is_gone() => {
            out.push(entry_released(uid, &entry, ReleaseResult::Gone));
            return;
        }
        Err(error) => {
            out.push(ThrottleOutcome::Failed {
                uid: uid.clone(),
                throttling: false,
                error,
            });
            entry.ours.clone()
        }
    };
    if found == entry.original {
        out.push(entry_released(uid, &entry, ReleaseResult::Original(found)));
        return;
    }
    if found != entry.ours {
        let foreign = found != entry.previous;
        entry.ours = found.clone();
        entry.previous = found.clone();
        if foreign {
            entry.original = found;
        }
    }
    pod.insert(entry);
}

fn entry_released(uid: &PodUid, entry: &OwnedFile, result: ReleaseResult) -> ThrottleOutcome {
    ThrottleOutcome::Released {
        uid: uid.clone(),
        file: entry.file.path().to_owned(),
        result,
    }
}

fn adopted((uid, pod): (&PodUid, &ThrottledPod)) -> Option<AdoptedThrottle> {
    let quotas = pod
        .entries
        .iter()
        .filter(|entry| entry.role() == Role::Quota);
    let mut target_cgroups: Vec<_> = quotas
        .map(|entry| (Arc::clone(&entry.cgroup), entry.base, original(entry)))
        .collect();
    let class = pod.entries.iter().find(|entry| entry.is_of_class());
    if target_cgroups.is_empty()
        && let Some(entry) = class
    {
        target_cgroups.push((Arc::clone(&entry.cgroup), entry.base, Quota::Unlimited));
    }
    let bursts = pod.entries.iter().filter(|entry| entry.is_raised_burst());
    let burst = bursts.map(|entry| entry.base).max().unwrap_or_default();
    (!target_cgroups.is_empty() || burst > MilliCpu::ZERO).then(|| AdoptedThrottle {
        uid: uid.clone(),
        burst,
        rule: pod.spec.rule.clone(),
        ratio: pod.spec.ratio,
        idle: class.is_some(),
        target_cgroups,
    })
}

fn original(entry: &OwnedFile) -> Quota {
    entry
        .file
        .bandwidth(&entry.original)
        .map_or(Quota::Unlimited, Bandwidth::limit)
}
