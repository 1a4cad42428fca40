//! One throttled pod: the files that hold our value, and the state of each.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::plan::{CpuClass, PodThrottle};
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;
use crate::engine::units::MilliCpu;
use crate::node::cgroup::CgroupPath;
use crate::node::cgroup::control_file::{ControlFile, ControlFileError, Role};
use crate::node::journal::{Effects, JournalRecord};

use super::outcome::{ReleaseResult, ThrottleOutcome};

/// How long a throttle stays in force after the last request for it.
pub(super) const LIFETIME: Duration = Duration::from_mins(30);
/// More foreign changes than this within [`CONTEST_WINDOW`], or resets within [`RESET_WINDOW`], make a pod contested.
const CONTEST_LIMIT: usize = 3;
const CONTEST_WINDOW: Duration = Duration::from_mins(1);
const RESET_WINDOW: Duration = Duration::from_secs(5);

/// The throttle of a pod, as recorded in the journal.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ThrottleSpec {
    pub rule: RuleId,
    pub ratio: u8,
    pub idle: bool,
}

impl From<&PodThrottle> for ThrottleSpec {
    fn from(throttle: &PodThrottle) -> Self {
        Self {
            rule: throttle.rule.clone(),
            ratio: throttle.ratio,
            idle: throttle.is_lowest(),
        }
    }
}

/// One throttled pod.
#[derive(Debug)]
pub(super) struct ThrottledPod {
    pub path: CgroupPath,
    /// As in the journal on disk.
    pub spec: ThrottleSpec,
    /// As in the next journal.
    pub next: Option<ThrottleSpec>,
    /// As in the journal on disk; after it has expired, when the failure is reported again.
    pub deadline: BootTime,
    /// As in the next journal.
    pub next_deadline: BootTime,
    /// Sorted from the pod down: the order in which files are restored.
    pub entries: Vec<OwnedFile>,
    pub changes: RecentTimes,
    /// When its files were reset to their originals while no other pod had a quota.
    pub resets: RecentTimes,
    /// The class that is set, or was already set before.
    pub class: CpuClass,
    /// The burst that its cgroups were given when they were last listed.
    pub burst: MilliCpu,
}

/// The state of a file between journal and kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileStage {
    /// The file holds `ours`.
    Settled,
    /// The journal on disk has `ours`; the file must be written again.
    Reassert,
    /// The journal must be written before the file.
    Change,
    /// Neither journal nor file has it yet.
    Fresh,
}

/// One file that holds our value.
#[derive(Debug)]
pub(super) struct OwnedFile {
    /// Relative to the pod's; empty for the pod's own.
    pub cgroup: Arc<str>,
    pub inode: u64,
    pub file: ControlFile,
    pub base: MilliCpu,
    pub original: Box<str>,
    pub previous: Box<str>,
    pub ours: Box<str>,
    pub stage: FileStage,
    /// The weight of a cgroup that we made idle: the kernel sets it, and we only restore it.
    pub follows_idle: bool,
    /// The burst file of a quota, while it does not have to be lowered; the quota file of a burst that a `PodQOS` gives.
    pub partner: Option<ControlFile>,
}

/// The result of reading a file back.
#[derive(Debug)]
pub(super) enum ReadBack {
    Ours,
    Foreign(Box<str>),
    Failed(ControlFileError),
}

/// The result of a planned write.
pub(super) enum Written {
    /// The file holds our value.
    Done,
    /// Another writer changed the file first; the next check handles it.
    Overtaken,
}

impl OwnedFile {
    /// A file to change from `original` to `ours`.
    pub fn fresh(
        (cgroup, inode): (Arc<str>, u64),
        file: ControlFile,
        base: MilliCpu,
        original: &str,
        ours: Box<str>,
    ) -> Self {
        Self {
            cgroup,
            inode,
            file,
            base,
            original: original.into(),
            previous: original.into(),
            ours,
            stage: FileStage::Fresh,
            follows_idle: false,
            partner: None,
        }
    }

    pub fn role(&self) -> Role {
        self.file.kind().role()
    }

    /// Whether it sets the class, not the quota.
    pub fn is_of_class(&self) -> bool {
        matches!(self.role(), Role::Idle | Role::Weight)
    }

    pub fn is(&self, cgroup: &str, role: Role) -> bool {
        self.role() == role && *self.cgroup == *cgroup
    }

    /// Whether it is a burst above its original.
    pub fn is_raised_burst(&self) -> bool {
        let micros = |text: &str| text.parse::<u64>().ok();
        self.role() == Role::Burst && micros(&self.ours) > micros(&self.original)
    }

    fn depth(&self) -> usize {
        if self.cgroup.is_empty() {
            0
        } else {
            1 + self.cgroup.matches('/').count()
        }
    }

    /// Plans to write `value`. Returns whether that is a change.
    pub fn set_target(&mut self, value: Box<str>) -> bool {
        if self.ours == value {
            return false;
        }
        let current = std::mem::replace(&mut self.ours, value);
        if self.stage == FileStage::Settled {
            self.previous = current;
            self.stage = FileStage::Change;
        }
        true
    }

    /// Reads the file back. Does not allocate if it holds our value.
    pub fn check(&self) -> ReadBack {
        if self.follows_idle {
            return ReadBack::Ours;
        }
        match self.file.read() {
            Ok(reading) if *reading.text() == *self.ours => ReadBack::Ours,
            Ok(reading) => ReadBack::Foreign(reading.text().into()),
            Err(error) => ReadBack::Failed(error),
        }
    }

    /// Writes the planned value, if the file is unchanged since planning.
    pub fn write(&mut self, effects: &mut Effects) -> Result<Written, ControlFileError> {
        let reading = self.file.read()?;
        let current = reading.text();
        if *current == *self.ours {
            return Ok(Written::Done);
        }
        if *current != *self.previous {
            return Ok(Written::Overtaken);
        }
        let (file, ours) = (&self.file, &self.ours);
        effects.run(file.kind().name(), || file.write(ours))?;
        Ok(Written::Done)
    }

    /// Drops a planned write; the file holds `previous`.
    pub fn revert(&mut self) {
        self.ours = self.previous.clone();
        self.stage = FileStage::Settled;
    }

    /// Restores the exact original, unless another writer has changed the file since.
    pub fn release(&self, effects: &mut Effects) -> Result<ReleaseResult, ControlFileError> {
        let reading = match self.file.read() {
            Err(error) if error.is_gone() => return Ok(ReleaseResult::Gone),
            reading => reading?,
        };
        let current = reading.text();
        if *current == *self.original {
            // Both are equal if the file held a foreign value when it was adopted.
            let theirs = self.ours == self.original;
            let result = if theirs {
                ReleaseResult::Left
            } else {
                ReleaseResult::Original
            };
            return Ok(result(self.original.clone()));
        }
        if !self.is_ours(current) {
            return Ok(ReleaseResult::Left(current.into()));
        }
        let name = self.file.kind().name();
        match effects.run(name, || self.file.write(&self.original)) {
            Err(error) if error.is_gone() => Ok(ReleaseResult::Gone),
            Err(ControlFileError::Refused { .. }) if self.role() == Role::Burst => {
                Ok(ReleaseResult::Impossible(self.original.clone()))
            }
            written => written.map(|()| ReleaseResult::Restored(self.original.clone())),
        }
    }

    fn is_ours(&self, current: &str) -> bool {
        let by_kernel = self.follows_idle && self.file.kind().is_weight_around_idle(current);
        by_kernel || *current == *self.ours || *current == *self.previous
    }

    fn is_raised(&self) -> bool {
        if self.role() != Role::Quota {
            return false;
        }
        let bandwidth = |text| self.file.bandwidth(text).ok();
        match (bandwidth(&self.ours), bandwidth(&self.previous)) {
            (Some(ours), Some(previous)) => ours.allows_more_than(previous),
            _ => false,
        }
    }

    /// Order of raising limits: from the pod down, since v1 requires a parent to allow at least as much as its
    /// children. The burst comes after its quota, which it must not exceed; the weight after the class, which resets it.
    fn order_up(&self) -> (usize, Role) {
        (self.depth(), self.role())
    }

    fn order_down(&self) -> (Reverse<usize>, u8) {
        let rank = match self.role() {
            Role::Idle => 0,
            Role::Weight => 1,
            Role::Burst => 2,
            Role::Quota => 3,
        };
        (Reverse(self.depth()), rank)
    }
}

impl ThrottledPod {
    pub fn new(path: CgroupPath, spec: ThrottleSpec, now: BootTime) -> Self {
        Self {
            path,
            spec: spec.clone(),
            next: Some(spec),
            deadline: now + LIFETIME,
            next_deadline: now + LIFETIME,
            entries: Vec::new(),
            changes: RecentTimes::default(),
            resets: RecentTimes::default(),
            class: CpuClass::Normal,
            burst: MilliCpu::ZERO,
        }
    }

    pub fn entry(&mut self, cgroup: &str, role: Role) -> Option<&mut OwnedFile> {
        self.entries.iter_mut().find(|entry| entry.is(cgroup, role))
    }

    /// Whether it is throttled, not only given a burst.
    pub fn lowers(&self) -> bool {
        let spec = self.next.as_ref().unwrap_or(&self.spec);
        spec.ratio < 100 || spec.idle
    }

    /// Whether a file of the class holds our value.
    pub fn owns_class(&self) -> bool {
        self.entries.iter().any(OwnedFile::is_of_class)
    }

    pub fn insert(&mut self, entry: OwnedFile) {
        self.entries.push(entry);
        self.entries.sort_by_key(OwnedFile::order_up);
    }

    /// Whether another writer keeps changing its files.
    pub fn is_contested(&self, now: BootTime) -> bool {
        self.changes.exceeds_limit(CONTEST_WINDOW, now)
            || self.resets.exceeds_limit(RESET_WINDOW, now)
    }

    /// The engine still asks for the throttle.
    pub fn extend(&mut self, now: BootTime) {
        self.next_deadline = now + LIFETIME;
    }

    /// Whether the extended deadline has to be saved: after half of the lifetime.
    pub fn is_due(&self) -> bool {
        self.next_deadline.since(self.deadline) >= LIFETIME / 2
    }

    pub fn records<'a>(&'a self, uid: &'a PodUid) -> impl Iterator<Item = JournalRecord> + 'a {
        let spec = self.next.as_ref().unwrap_or(&self.spec);
        self.entries.iter().map(|entry| JournalRecord {
            uid: uid.clone(),
            cgroup: self.path.clone(),
            target_cgroup: Arc::clone(&entry.cgroup),
            inode: entry.inode,
            file: entry.file.kind(),
            original: entry.original.clone(),
            previous: entry.previous.clone(),
            ours: entry.ours.clone(),
            base: entry.base,
            ratio: spec.ratio,
            idle: spec.idle,
            rule: spec.rule.clone(),
            deadline: self.next_deadline,
        })
    }

    /// The journal on disk has the planned values.
    pub fn journalled(&mut self) {
        self.deadline = self.next_deadline;
        if let Some(next) = self.next.take() {
            self.spec = next;
        }
    }

    /// The journal could not be written: drops planned changes. Returns whether there were any.
    pub fn revert(&mut self) -> bool {
        self.next = None;
        let before = self.entries.len();
        self.drop_fresh();
        let mut reverted = self.entries.len() < before;
        for entry in &mut self.entries {
            if entry.stage == FileStage::Change {
                entry.revert();
                reverted = true;
            }
        }
        self.drop_unchanged();
        reverted
    }

    /// Writes the planned values: first raises limits from the pod down, then lowers them from the containers up.
    /// Returns whether the journal now has entries that were not written.
    pub fn write(
        &mut self,
        uid: &PodUid,
        effects: &mut Effects,
        out: &mut Vec<ThrottleOutcome>,
    ) -> bool {
        let mut order: Vec<usize> = (0..self.entries.len())
            .filter(|index| self.entries[*index].stage != FileStage::Settled)
            .collect();
        order.sort_by_key(|index| {
            let entry = &self.entries[*index];
            let raised = entry.is_raised();
            let up = raised.then(|| entry.order_up());
            let down = (!raised).then(|| entry.order_down());
            (!raised, up, down)
        });
        let mut failed = Vec::new();
        for index in order {
            if !self.write_entry(uid, index, effects, out) {
                failed.push(index);
            }
        }
        self.drop_failed(&failed)
    }

    fn write_entry(
        &mut self,
        uid: &PodUid,
        index: usize,
        effects: &mut Effects,
        out: &mut Vec<ThrottleOutcome>,
    ) -> bool {
        if self.entries[index].follows_idle {
            return self.adopt_idle_weight(index);
        }
        let entry = &mut self.entries[index];
        match entry.write(effects) {
            Ok(Written::Overtaken) => true,
            Ok(Written::Done) => {
                out.push(ThrottleOutcome::Set {
                    uid: uid.clone(),
                    file: entry.file.path().to_owned(),
                    from: entry.previous.clone(),
                    to: entry.ours.clone(),
                });
                true
            }
            Err(error) if error.is_gone() => false,
            Err(error) => {
                out.push(ThrottleOutcome::Failed {
                    uid: uid.clone(),
                    throttling: true,
                    error,
                });
                false
            }
        }
    }

    /// Takes over the weight that the kernel set when the cgroup became idle.
    fn adopt_idle_weight(&mut self, index: usize) -> bool {
        let weight = &self.entries[index];
        let idle = self
            .entries
            .iter()
            .any(|entry| entry.is(&weight.cgroup, Role::Idle) && &*entry.ours == "1");
        match weight.file.read() {
            Ok(reading) if idle => {
                self.entries[index].ours = reading.text().into();
                true
            }
            _ => false,
        }
    }

    fn drop_failed(&mut self, failed: &[usize]) -> bool {
        for (index, entry) in self.entries.iter_mut().enumerate() {
            match (failed.contains(&index), entry.stage) {
                (true, FileStage::Change | FileStage::Reassert) => entry.revert(),
                (true, _) => {}
                (false, _) => entry.stage = FileStage::Settled,
            }
        }
        self.drop_fresh();
        self.drop_unchanged();
        !failed.is_empty()
    }

    /// Drops entries that were never written. A class without its files is planned again.
    fn drop_fresh(&mut self) {
        let fresh = |entry: &OwnedFile| entry.stage == FileStage::Fresh;
        if self
            .entries
            .iter()
            .any(|entry| fresh(entry) && entry.is_of_class())
        {
            self.class = CpuClass::Normal;
        }
        self.entries.retain(|entry| !fresh(entry));
    }

    /// Drops entries whose value is the original: they are not throttled.
    pub fn drop_unchanged(&mut self) {
        self.entries
            .retain(|entry| entry.follows_idle || entry.ours != entry.original);
    }

    /// Restores the files that `which` selects; entries that could not be restored stay. Returns whether any was restored.
    pub fn release(
        &mut self,
        uid: &PodUid,
        which: impl Fn(&OwnedFile) -> bool,
        effects: &mut Effects,
        out: &mut Vec<ThrottleOutcome>,
    ) -> bool {
        let before = self.entries.len();
        let mut class_failed = false;
        let mut failed_quotas: Vec<Arc<str>> = Vec::new();
        self.entries.retain(|entry| {
            // The kernel rejects a burst above the quota, so it waits until the quota is restored.
            let waits = entry.role() == Role::Burst && failed_quotas.contains(&entry.cgroup);
            if !which(entry) || (entry.follows_idle && class_failed) || waits {
                return true;
            }
            match entry.release(effects) {
                Ok(result) => {
                    out.push(ThrottleOutcome::Released {
                        uid: uid.clone(),
                        file: entry.file.path().to_owned(),
                        result,
                    });
                    false
                }
                Err(error) => {
                    class_failed |= entry.role() == Role::Idle;
                    if entry.role() == Role::Quota {
                        failed_quotas.push(Arc::clone(&entry.cgroup));
                    }
                    out.push(ThrottleOutcome::Failed {
                        uid: uid.clone(),
                        throttling: false,
                        error,
                    });
                    true
                }
            }
        });
        self.entries.len() < before
    }
}

/// Times of the last few occurrences of an event.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RecentTimes {
    times: [Option<BootTime>; CONTEST_LIMIT + 1],
}

impl RecentTimes {
    pub fn push(&mut self, now: BootTime) {
        self.times.rotate_right(1);
        self.times[0] = Some(now);
    }

    /// Whether there were more than [`CONTEST_LIMIT`] within `window`.
    pub fn exceeds_limit(&self, window: Duration, now: BootTime) -> bool {
        let recent = |time: &&BootTime| now.since(**time) <= window;
        self.times.iter().flatten().filter(recent).count() > CONTEST_LIMIT
    }
}
