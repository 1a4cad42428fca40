//! The last events of a term.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::{StoredObject, Unavailable, Version};

/// Type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The object was created.
    Added,
    /// The object was changed.
    Modified,
    /// The object was deleted.
    Deleted,
}

/// A change of one object.
#[derive(Clone, Debug)]
pub struct StoreEvent {
    /// Type.
    pub kind: EventKind,
    /// The object after the event. A deleted object has its last content, with the version of the deletion.
    pub object: StoredObject,
    /// The object before the event.
    pub before: Option<StoredObject>,
}

impl StoreEvent {
    /// Approximate size that is not shared with the previous object.
    fn bytes(&self) -> usize {
        let content = &self.object.content;
        let shares = |before: &StoredObject| Arc::ptr_eq(&before.content.labels, &content.labels);
        let frame = if self.before.as_ref().is_some_and(shares) {
            0
        } else {
            content.frame()
        };
        EVENT_OVERHEAD + content.load() + frame
    }

    /// Size of the content that it replaced.
    fn replaced(&self) -> usize {
        self.before
            .as_ref()
            .map_or(0, |before| before.content.bytes)
    }
}

/// Approximate size of an event besides the content of its object.
const EVENT_OVERHEAD: usize = 200;

/// Limits of the ring.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Number of events.
    pub events: usize,
    /// Size of their objects in bytes.
    pub bytes: usize,
}

impl Default for Limits {
    /// About 17 s of 5000 nodes that report 3 kB every 10 s each. A watcher that is further behind must list again.
    fn default() -> Self {
        Self {
            events: 1 << 16,
            bytes: 32 << 20,
        }
    }
}

/// The last events, with consecutive versions.
#[derive(Debug)]
pub(super) struct Ring {
    limits: Limits,
    events: VecDeque<Arc<StoreEvent>>,
    bytes: usize,
    /// Size of the contents that the events replaced.
    replaced: usize,
    /// The version before the oldest event. `None`: not leading.
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

    /// Size of contents that are only in events.
    pub(super) const fn replaced(&self) -> usize {
        self.replaced
    }

    pub(super) fn push(&mut self, event: StoreEvent) {
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
    ) -> Result<impl Iterator<Item = &Arc<StoreEvent>>, Unavailable> {
        let start = self.start.filter(|start| version >= *start);
        let skipped = version.since(start.ok_or(Unavailable::Expired)?);
        if skipped > self.events.len() {
            // A version that was never issued: of another term or cluster.
            return Err(Unavailable::Expired);
        }
        Ok(self.events.range(skipped..))
    }

    /// Each object that changed after a version, as it was then.
    pub(super) fn undo(
        &self,
        version: Version,
    ) -> Result<BTreeMap<Arc<str>, Option<StoredObject>>, Unavailable> {
        let mut undone = BTreeMap::new();
        for event in self.after(version)? {
            let name = Arc::clone(&event.object.name);
            undone.entry(name).or_insert_with(|| event.before.clone());
        }
        Ok(undone)
    }
}
