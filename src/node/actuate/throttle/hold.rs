//! What is held of one pod: the files that have our value, and how each goes on.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::plan::Throttle;
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;
use crate::engine::units::MilliCpu;
use crate::node::cgroup::CgroupPath;
use crate::node::cgroup::knob::{Knob, KnobError, Role};
use crate::node::journal::{Effects, Record};

use super::outcome::{Fate, Outcome};

/// How long a throttle stays when nobody asks for it any more.
pub(super) const LIFETIME: Duration = Duration::from_mins(30);
/// More foreign changes than this within [`CONTEST_WINDOW`] make a pod contested.
const CONTEST_LIMIT: usize = 3;
const CONTEST_WINDOW: Duration = Duration::from_mins(1);

/// Why a pod is throttled, as the journal tells it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Terms {
    pub rule: RuleId,
    pub ratio: u8,
    pub idle: bool,
}

impl From<&Throttle> for Terms {
    fn from(throttle: &Throttle) -> Self {
        Self {
            rule: throttle.rule.clone(),
            ratio: throttle.ratio,
            idle: throttle.idle,
        }
    }
}

/// One pod.
#[derive(Debug)]
pub(super) struct Hold {
    pub path: CgroupPath,
    /// As the journal on disk has them.
    pub terms: Terms,
    /// As the next journal will have them.
    pub next: Option<Terms>,
    /// As the journal on disk has it; where that has passed, when it is told anew.
    pub deadline: BootTime,
    /// As the next journal will have it.
    pub next_deadline: BootTime,
    /// Sorted from the pod down, in the order in which files are given back.
    pub entries: Vec<Entry>,
    pub changes: Window,
    /// The pod's class has been seen to: it is idle, or was already before we came.
    pub class_seen: bool,
}

/// Where a file stands between the journal and the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The file holds `ours`.
    Settled,
    /// The journal on disk has it, the file is to be written again.
    Reassert,
    /// The journal has to change first.
    Change,
    /// Neither has it yet.
    Fresh,
}

/// One file that holds our value.
#[derive(Debug)]
pub(super) struct Entry {
    pub lever: Arc<str>,
    pub inode: u64,
    pub knob: Knob,
    pub base: MilliCpu,
    pub original: Box<str>,
    pub previous: Box<str>,
    pub ours: Box<str>,
    pub stage: Stage,
    /// The weight of a cgroup that we made idle: the kernel sets it, we only put it back.
    pub follows_idle: bool,
    /// The burst of a quota that has not had to be lowered yet.
    pub burst: Option<Knob>,
}

/// What one look at a file shows.
#[derive(Debug)]
pub(super) enum Seen {
    Ours,
    Foreign(Box<str>),
    Failed(KnobError),
}

/// What became of a staged write.
pub(super) enum Written {
    /// It holds our value.
    Done,
    /// Somebody else was faster: the next look at the file deals with it.
    Overtaken,
}

impl Entry {
    /// A file that is to be changed from `original` to `ours`.
    pub fn fresh(
        (lever, inode): (Arc<str>, u64),
        knob: Knob,
        base: MilliCpu,
        original: &str,
        ours: Box<str>,
    ) -> Self {
        Self {
            lever,
            inode,
            knob,
            base,
            original: original.into(),
            previous: original.into(),
            ours,
            stage: Stage::Fresh,
            follows_idle: false,
            burst: None,
        }
    }

    pub fn role(&self) -> Role {
        self.knob.file().role()
    }

    pub fn is(&self, lever: &str, role: Role) -> bool {
        self.role() == role && *self.lever == *lever
    }

    fn depth(&self) -> usize {
        if self.lever.is_empty() {
            0
        } else {
            1 + self.lever.matches('/').count()
        }
    }

    /// Plans to write `value`; whether that is a change.
    pub fn aim(&mut self, value: Box<str>) -> bool {
        if self.ours == value {
            return false;
        }
        let held = std::mem::replace(&mut self.ours, value);
        if self.stage == Stage::Settled {
            self.previous = held;
            self.stage = Stage::Change;
        }
        true
    }

    /// Looks whether the file still holds our value, without an allocation where it does.
    pub fn look(&self) -> Seen {
        if self.follows_idle {
            return Seen::Ours;
        }
        match self.knob.read() {
            Ok(reading) if *reading.text() == *self.ours => Seen::Ours,
            Ok(reading) => Seen::Foreign(reading.text().into()),
            Err(error) => Seen::Failed(error),
        }
    }

    /// Writes what was planned, if the file still holds what it held then.
    pub fn write(&mut self, effects: &mut Effects) -> Result<Written, KnobError> {
        let reading = self.knob.read()?;
        let held = reading.text();
        if *held == *self.ours {
            return Ok(Written::Done);
        }
        if *held != *self.previous {
            return Ok(Written::Overtaken);
        }
        let (knob, ours) = (&self.knob, &self.ours);
        effects.run(knob.file().name(), || knob.write(ours))?;
        Ok(Written::Done)
    }

    /// Takes a plan back; the file holds `previous`.
    pub fn revert(&mut self) {
        self.ours = self.previous.clone();
        self.stage = Stage::Settled;
    }

    /// Gives the file back: the exact original, unless somebody else has written it since.
    pub fn release(&self, effects: &mut Effects) -> Result<Fate, KnobError> {
        let reading = match self.knob.read() {
            Err(error) if error.is_gone() => return Ok(Fate::Gone),
            reading => reading?,
        };
        let held = reading.text();
        if *held == *self.original {
            // A value that was somebody else's when it was taken up is both.
            let theirs = self.ours == self.original;
            let fate = if theirs { Fate::Left } else { Fate::Original };
            return Ok(fate(self.original.clone()));
        }
        if !self.is_ours(held) {
            return Ok(Fate::Left(held.into()));
        }
        let name = self.knob.file().name();
        match effects.run(name, || self.knob.write(&self.original)) {
            Err(error) if error.is_gone() => Ok(Fate::Gone),
            Err(KnobError::Refused { .. }) if self.role() == Role::Burst => {
                Ok(Fate::Impossible(self.original.clone()))
            }
            written => written.map(|()| Fate::Restored(self.original.clone())),
        }
    }

    fn is_ours(&self, held: &str) -> bool {
        let by_kernel = self.follows_idle && self.knob.file().is_weight_around_idle(held);
        by_kernel || *held == *self.ours || *held == *self.previous
    }

    fn is_raised(&self) -> bool {
        if self.role() != Role::Quota {
            return false;
        }
        let bandwidth = |text| self.knob.bandwidth(text).ok();
        match (bandwidth(&self.ours), bandwidth(&self.previous)) {
            (Some(ours), Some(previous)) => ours.allows_more_than(previous),
            _ => false,
        }
    }

    /// From the pod down: v1 wants a parent to allow at least what its children may have. The burst comes
    /// after its quota, which it must not exceed; the weight after the class, which resets it.
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

impl Hold {
    pub fn new(path: CgroupPath, terms: Terms, now: BootTime) -> Self {
        Self {
            path,
            terms: terms.clone(),
            next: Some(terms),
            deadline: now + LIFETIME,
            next_deadline: now + LIFETIME,
            entries: Vec::new(),
            changes: Window::default(),
            class_seen: false,
        }
    }

    pub fn entry(&mut self, lever: &str, role: Role) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.is(lever, role))
    }

    pub fn insert(&mut self, entry: Entry) {
        self.entries.push(entry);
        self.entries.sort_by_key(Entry::order_up);
    }

    /// The engine asks for it still.
    pub fn extend(&mut self, now: BootTime) {
        self.next_deadline = now + LIFETIME;
    }

    /// Whether the engine's asking has to be made durable: at half of the lifetime.
    pub fn is_due(&self) -> bool {
        self.next_deadline.since(self.deadline) >= LIFETIME / 2
    }

    pub fn records<'a>(&'a self, uid: &'a PodUid) -> impl Iterator<Item = Record> + 'a {
        let terms = self.next.as_ref().unwrap_or(&self.terms);
        self.entries.iter().map(|entry| Record {
            uid: uid.clone(),
            cgroup: self.path.clone(),
            lever: Arc::clone(&entry.lever),
            inode: entry.inode,
            file: entry.knob.file(),
            original: entry.original.clone(),
            previous: entry.previous.clone(),
            ours: entry.ours.clone(),
            base: entry.base,
            ratio: terms.ratio,
            idle: terms.idle,
            rule: terms.rule.clone(),
            deadline: self.next_deadline,
        })
    }

    /// The journal on disk has what was planned.
    pub fn journalled(&mut self) {
        self.deadline = self.next_deadline;
        if let Some(next) = self.next.take() {
            self.terms = next;
        }
    }

    /// The journal could not be written: takes back what is not in it. Whether anything was.
    pub fn revert(&mut self) -> bool {
        self.next = None;
        let before = self.entries.len();
        self.entries.retain(|entry| entry.stage != Stage::Fresh);
        let mut reverted = self.entries.len() < before;
        for entry in &mut self.entries {
            if entry.stage == Stage::Change {
                entry.revert();
                reverted = true;
            }
        }
        self.drop_unchanged();
        reverted
    }

    /// Writes what was planned: first up from the pod down, then down from the containers up. Whether the journal
    /// now says more than is true.
    pub fn write(&mut self, uid: &PodUid, effects: &mut Effects, out: &mut Vec<Outcome>) -> bool {
        let mut order: Vec<usize> = (0..self.entries.len())
            .filter(|index| self.entries[*index].stage != Stage::Settled)
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
        out: &mut Vec<Outcome>,
    ) -> bool {
        if self.entries[index].follows_idle {
            return self.follow(index);
        }
        let entry = &mut self.entries[index];
        match entry.write(effects) {
            Ok(Written::Overtaken) => true,
            Ok(Written::Done) => {
                out.push(Outcome::Set {
                    uid: uid.clone(),
                    file: entry.knob.path().to_owned(),
                    from: entry.previous.clone(),
                    to: entry.ours.clone(),
                });
                true
            }
            Err(error) if error.is_gone() => false,
            Err(error) => {
                out.push(Outcome::Failed {
                    uid: uid.clone(),
                    throttling: true,
                    error,
                });
                false
            }
        }
    }

    /// The weight of a cgroup that has just become idle is what the kernel made it.
    fn follow(&mut self, index: usize) -> bool {
        let weight = &self.entries[index];
        let idle = self
            .entries
            .iter()
            .any(|entry| entry.is(&weight.lever, Role::Idle) && &*entry.ours == "1");
        match weight.knob.read() {
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
                (true, Stage::Change | Stage::Reassert) => entry.revert(),
                (true, _) => {}
                (false, _) => entry.stage = Stage::Settled,
            }
        }
        self.entries.retain(|entry| entry.stage != Stage::Fresh);
        self.drop_unchanged();
        !failed.is_empty()
    }

    /// A file that holds its original is not held by us.
    pub fn drop_unchanged(&mut self) {
        self.entries
            .retain(|entry| entry.follows_idle || entry.ours != entry.original);
    }

    /// Gives back the files that `which` selects, and keeps those that could not be. Whether any was given back.
    pub fn release(
        &mut self,
        uid: &PodUid,
        which: impl Fn(&Entry) -> bool,
        effects: &mut Effects,
        out: &mut Vec<Outcome>,
    ) -> bool {
        let before = self.entries.len();
        let mut class_kept = false;
        let mut quotas_kept: Vec<Arc<str>> = Vec::new();
        self.entries.retain(|entry| {
            // The kernel takes no burst above the quota: it waits until that is back.
            let waits = entry.role() == Role::Burst && quotas_kept.contains(&entry.lever);
            if !which(entry) || (entry.follows_idle && class_kept) || waits {
                return true;
            }
            match entry.release(effects) {
                Ok(fate) => {
                    out.push(Outcome::Released {
                        uid: uid.clone(),
                        file: entry.knob.path().to_owned(),
                        fate,
                    });
                    false
                }
                Err(error) => {
                    class_kept |= entry.role() == Role::Idle;
                    if entry.role() == Role::Quota {
                        quotas_kept.push(Arc::clone(&entry.lever));
                    }
                    out.push(Outcome::Failed {
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

/// The last few moments of something that happens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Window {
    times: [Option<BootTime>; CONTEST_LIMIT + 1],
}

impl Window {
    pub fn push(&mut self, now: BootTime) {
        self.times.rotate_right(1);
        self.times[0] = Some(now);
    }

    fn count(&self, now: BootTime) -> usize {
        let recent = |time: &BootTime| now.since(*time) <= CONTEST_WINDOW;
        self.times
            .iter()
            .flatten()
            .filter(|time| recent(time))
            .count()
    }

    /// Whether the two together are more than one has to put up with.
    pub fn exceeds(&self, other: &Self, now: BootTime) -> bool {
        self.count(now) + other.count(now) > CONTEST_LIMIT
    }
}
