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

/// How much is remembered.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Events.
    pub events: usize,
    /// Bytes of the objects in them.
    pub bytes: usize,
}

impl Default for Limits {
    /// Half a minute of 5000 nodes that each report 4 kB every 10 s; a watcher that is further behind lists again.
    fn default() -> Self {
        Self {
            events: 1 << 16,
            bytes: 64 << 20,
        }
    }
}

/// The last events, each with the version after that of the one before it.
#[derive(Debug)]
pub(super) struct Ring {
    limits: Limits,
    events: VecDeque<Arc<Event>>,
    bytes: usize,
    /// The version before the oldest event; `None`: no term is on.
    start: Option<Version>,
}

impl Ring {
    pub(super) const fn new(limits: Limits) -> Self {
        Self {
            limits,
            events: VecDeque::new(),
            bytes: 0,
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

    pub(super) fn push(&mut self, event: Event) {
        self.bytes += event.object.content.bytes();
        self.events.push_back(Arc::new(event));
        while self.events.len() > self.limits.events || self.bytes > self.limits.bytes {
            let Some(oldest) = self.events.pop_front() else {
                break;
            };
            self.bytes -= oldest.object.content.bytes();
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
