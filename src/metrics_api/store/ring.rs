//! The last events of a term.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{Object, Unavailable, Version};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The object is new.
    Added,
    /// It says something else.
    Modified,
    /// It is gone.
    Deleted,
}

/// What happened to one object.
#[derive(Clone, Debug)]
pub struct Event {
    /// What.
    pub kind: EventKind,
    /// The object since; of one that is gone, its last words with the version of its end.
    pub object: Object,
    /// The object before.
    pub before: Option<Object>,
}

impl Event {
    /// The bytes that are there for it alone, about: an object shares with the one before what its load does not change.
    fn bytes(&self) -> usize {
        let content = &self.object.content;
        let shares = |before: &Object| Arc::ptr_eq(&before.content.labels, &content.labels);
        let frame = if self.before.as_ref().is_some_and(shares) {
            0
        } else {
            content.frame()
        };
        BESIDE + content.load() + frame
    }

    /// The bytes of the content that it replaced.
    fn replaced(&self) -> usize {
        self.before
            .as_ref()
            .map_or(0, |before| before.content.bytes)
    }
}

/// An event takes so much beside what its object says.
const BESIDE: usize = 200;

/// How much is remembered.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Events.
    pub events: usize,
    /// Bytes of the objects in them.
    pub bytes: usize,
}

impl Default for Limits {
    /// Some 17 s of 5000 nodes that each report 3 kB every 10 s; a watcher that is further behind lists again.
    fn default() -> Self {
        Self {
            events: 1 << 16,
            bytes: 32 << 20,
        }
    }
}

/// The last events, each with the version after that of the one before it.
#[derive(Debug)]
pub(super) struct Ring {
    limits: Limits,
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// The bytes of what the events replaced: no object has those contents any more.
    replaced: usize,
    /// The version before the oldest event; `None`: no term is on.
    start: Option<Version>,
}

impl Ring {
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            limits,
            events: VecDeque::new(),
            bytes: 0,
            replaced: 0,
            start: None,
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Self::new(self.limits);
    }

    pub(super) fn restart(&mut self, start: Version) {
        self.clear();
        self.start = Some(start);
    }

    /// The bytes of contents that events alone have.
    pub(super) const fn replaced(&self) -> usize {
        self.replaced
    }

    pub(super) fn push(&mut self, event: Event) {
        self.bytes += event.bytes();
        self.replaced += event.replaced();
        self.events.push_back(Arc::new(event));
        while self.events.len() > self.limits.events || self.bytes > self.limits.bytes {
            let Some(oldest) = self.events.pop_front() else {
                break;
            };
            self.bytes -= oldest.bytes();
            self.replaced -= oldest.replaced();
            self.start = Some(oldest.object.version);
        }
    }

    /// All events after a version.
    pub(super) fn after(
        &self,
        version: Version,
    ) -> Result<impl Iterator<Item = &Arc<Event>>, Unavailable> {
        let start = self.start.filter(|start| version >= *start);
        let skipped = version.since(start.ok_or(Unavailable::Expired)?);
        if skipped > self.events.len() {
            // No version of ours: of a term that never was, or of another cluster.
            return Err(Unavailable::Expired);
        }
        Ok(self.events.range(skipped..))
    }

    /// Each object that changed after a version, as it was then.
    pub(super) fn undo(
        &self,
        version: Version,
    ) -> Result<BTreeMap<Arc<str>, Option<Object>>, Unavailable> {
        let mut undone = BTreeMap::new();
        for event in self.after(version)? {
            let name = Arc::clone(&event.object.name);
            undone.entry(name).or_insert_with(|| event.before.clone());
        }
        Ok(undone)
    }
}
