//! The objects, their versions, and recent events. Pure.
//!
//! Every replica keeps the objects, but they have versions only during a term of leadership. A version is the
//! resourceVersion of the Lease write that won the election, shifted, plus a sequence: it grows over restarts and
//! failovers, because etcd's revisions do. Each event increases it by exactly one, so that the position of a version
//! in the ring is a subtraction.

mod ring;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Bound, Deref};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::table::Cell;

use super::options::{ContinueToken, Filter};
use ring::Ring;
pub use ring::{EventKind, Limits, StoreEvent};

/// Bits of the sequence. Its versions must stay below those of the next etcd revision's term. The leader's renewals
/// advance etcd once a second, so this is safe below a million events per second.
const SEQUENCE_BITS: u32 = 20;

/// A `resourceVersion`. Never 0, which means "any" in the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(NonZeroU64);

impl Version {
    /// The first version of the term started by this Lease write. Revisions too large for a sequence, as storage other than etcd
    /// may have, advance by more than one for each write.
    fn first(epoch: u64) -> Self {
        let shifted = epoch.checked_mul(1 << SEQUENCE_BITS).unwrap_or(epoch);
        Self(NonZeroU64::MIN.saturating_add(shifted))
    }

    fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// Number of events after `earlier`; zero if `earlier` is later.
    fn since(self, earlier: Self) -> usize {
        usize::try_from(self.0.get().saturating_sub(earlier.0.get())).unwrap_or(usize::MAX)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Version {
    type Err = ();

    /// Decimal, without a sign or leading zeros.
    fn from_str(text: &str) -> Result<Self, ()> {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().map(Self).map_err(drop)?;
        (digits && !text.starts_with('0'))
            .then_some(number)
            .ok_or(())
    }
}

/// Content of an object except its version, encoded as JSON once. The parts that do not depend on the load are shared
/// between versions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ObjectContent {
    /// Labels.
    pub labels: Arc<BTreeMap<String, String>>,
    /// The fields of `metadata` without braces and version; at least one.
    pub metadata: Arc<str>,
    /// `status`, without spare capacity because many are kept.
    pub status: Box<str>,
    /// Row in a Table.
    pub cells: Vec<Cell>,
}

impl ObjectContent {
    /// Approximate size of the parts that depend on the load.
    fn load(&self) -> usize {
        // Approximate size of a cell besides its text.
        self.status.len() + 48 * self.cells.len()
    }

    /// Approximate size of the shareable parts.
    fn frame(&self) -> usize {
        let labels = self
            .labels
            .iter()
            .map(|(key, value)| key.len() + value.len() + 64);
        self.metadata.len() + labels.sum::<usize>()
    }
}

/// A content whose size counts as long as anything references it.
#[derive(Debug)]
pub struct Counted {
    content: ObjectContent,
    bytes: usize,
    /// Total size of all referenced contents.
    held: Arc<AtomicUsize>,
}

impl Counted {
    fn new(content: ObjectContent, held: &Arc<AtomicUsize>) -> Self {
        let bytes = content.load();
        held.fetch_add(bytes, Ordering::Relaxed);
        Self {
            content,
            bytes,
            held: Arc::clone(held),
        }
    }
}

impl Deref for Counted {
    type Target = ObjectContent;

    fn deref(&self) -> &ObjectContent {
        &self.content
    }
}

impl PartialEq for Counted {
    fn eq(&self, other: &Self) -> bool {
        self.content == other.content
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// An object at a version.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredObject {
    /// Name.
    pub name: Arc<str>,
    /// Version.
    pub version: Version,
    /// Content.
    pub content: Arc<Counted>,
}

/// This replica does not lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLeading;

/// Why a list or watch can't start from a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// This replica does not lead.
    NotLeading,
    /// The events since are not known any more, or the version is of another term.
    Expired,
    /// The version is in the future; this is the current one.
    Future(Version),
}

impl From<NotLeading> for Unavailable {
    fn from(NotLeading: NotLeading) -> Self {
        Self::NotLeading
    }
}

/// A page of a list.
#[derive(Clone, Debug)]
pub struct Page {
    /// The version of all pages of the list.
    pub version: Version,
    /// The objects in order of name.
    pub objects: Vec<StoredObject>,
    /// Start of the next page, and the number of remaining objects.
    pub next: Option<(ContinueToken, usize)>,
}

/// Required version of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Any version.
    Any,
    /// This or a later one.
    NotOlderThan(Version),
    /// Exactly this one.
    Exact(Version),
}

/// All objects, with recent events.
#[derive(Debug)]
pub struct Store {
    contents: BTreeMap<Arc<str>, (Option<Version>, Arc<Counted>)>,
    /// Total size of all referenced contents, including those in responses in progress.
    held: Arc<AtomicUsize>,
    /// Total size of the current contents.
    current: usize,
    ring: Ring,
    /// The last version that was issued in any term.
    last: Option<Version>,
    leading: Option<u64>,
}

impl Store {
    /// An empty store, not leading.
    pub fn new(limits: Limits) -> Self {
        Self {
            contents: BTreeMap::new(),
            held: Arc::default(),
            current: 0,
            ring: Ring::new(limits),
            last: None,
            leading: None,
        }
    }

    /// Number of objects.
    pub fn len(&self) -> usize {
        self.contents.len()
    }

    /// Whether there are no objects.
    pub fn is_empty(&self) -> bool {
        self.contents.is_empty()
    }

    /// Size of contents that are neither current nor in the ring: only responses in progress reference them.
    pub fn stale(&self) -> usize {
        let held = self.held.load(Ordering::Relaxed);
        held.saturating_sub(self.current + self.ring.replaced())
    }

    /// Starts a term; `epoch` is the resourceVersion of the Lease write that won it. All objects get its first
    /// version.
    pub fn lead(&mut self, epoch: u64) {
        if self.leading == Some(epoch) {
            return;
        }
        let first = Version::first(epoch);
        // An etcd restored from a backup goes back; our versions must not.
        let first = self.last.map_or(first, |last| first.max(last.next()));
        self.leading = Some(epoch);
        self.last = Some(first);
        self.ring.restart(first);
        for (version, _) in self.contents.values_mut() {
            *version = Some(first);
        }
    }

    /// Ends the term: nothing is served, and no version issued, until the next one.
    pub fn follow(&mut self) {
        self.leading = None;
        self.ring.clear();
    }

    /// The current term.
    pub const fn term(&self) -> Option<u64> {
        self.leading
    }

    /// The current version.
    pub fn version(&self) -> Result<Version, NotLeading> {
        self.leading.and(self.last).ok_or(NotLeading)
    }

    fn advance(&mut self) -> Option<Version> {
        self.leading?;
        let next = self.last?.next();
        self.last = Some(next);
        Some(next)
    }

    /// Creates or updates an object. Identical content is no event.
    pub fn apply(&mut self, name: &str, content: ObjectContent) {
        let before = self.contents.get_key_value(name);
        if before.is_some_and(|(_, (_, before))| before.content == content) {
            return;
        }
        let before = before
            .map(|(name, (version, content))| (Arc::clone(name), *version, Arc::clone(content)));
        let name = before
            .as_ref()
            .map_or_else(|| Arc::from(name), |(name, ..)| Arc::clone(name));
        let content = Arc::new(Counted::new(content, &self.held));
        self.current += content.bytes;
        self.current -= before.as_ref().map_or(0, |(.., before)| before.bytes);
        let version = self.advance();
        self.contents
            .insert(Arc::clone(&name), (version, Arc::clone(&content)));
        let Some(version) = version else { return };
        let before = before.and_then(|(name, version, content)| {
            Some(StoredObject {
                name,
                version: version?,
                content,
            })
        });
        let kind = if before.is_some() {
            EventKind::Modified
        } else {
            EventKind::Added
        };
        self.ring.push(StoreEvent {
            kind,
            object: StoredObject {
                name,
                version,
                content,
            },
            before,
        });
    }

    /// Deletes an object.
    pub fn delete(&mut self, name: &str) {
        let Some((name, (before, content))) = self.contents.remove_entry(name) else {
            return;
        };
        self.current -= content.bytes;
        let Some((before, version)) = before.and_then(|before| Some((before, self.advance()?)))
        else {
            return;
        };
        let object = |version| StoredObject {
            name: Arc::clone(&name),
            version,
            content: Arc::clone(&content),
        };
        let kind = EventKind::Deleted;
        self.ring.push(StoreEvent {
            kind,
            object: object(version),
            before: Some(object(before)),
        });
    }

    /// Gets an object.
    pub fn get(&self, name: &str) -> Result<Option<StoredObject>, NotLeading> {
        self.version()?;
        let found = self.contents.get_key_value(name);
        Ok(found.and_then(|(name, (version, content))| object(name, *version, content)))
    }

    /// A page of the objects selected by the filter.
    pub fn list(
        &self,
        filter: &Filter,
        freshness: Freshness,
        limit: Option<usize>,
        token: Option<&ContinueToken>,
    ) -> Result<Page, Unavailable> {
        let now = self.version()?;
        let version = match (freshness, token) {
            (_, Some(token)) => token.version,
            (Freshness::Exact(version), None) => version,
            (Freshness::NotOlderThan(version), None) if version > now => {
                return Err(Unavailable::Future(now));
            }
            _ => now,
        };
        let undone = self.ring.undo(version)?;
        let start = token.map(|token| token.start.as_str());
        let mut objects = self
            .at(&undone, start)
            .filter(|object| filter.matches(object));
        let page: Vec<StoredObject> = match limit {
            Some(limit) => objects.by_ref().take(limit).collect(),
            None => objects.by_ref().collect(),
        };
        let next = page.last().map(|last| ContinueToken {
            version,
            start: last.name.to_string(),
        });
        let next = next.zip(Some(objects.count()).filter(|more| *more > 0));
        Ok(Page {
            version,
            objects: page,
            next,
        })
    }

    /// The objects after this name as they were before these events.
    fn at<'a>(
        &'a self,
        undone: &'a BTreeMap<Arc<str>, Option<StoredObject>>,
        after: Option<&'a str>,
    ) -> impl Iterator<Item = StoredObject> + 'a {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        let range = (after, Bound::Unbounded);
        let live = self.contents.range::<str, _>(range);
        let live = live.filter(|(name, _)| !undone.contains_key(*name));
        let mut live = live
            .filter_map(|(name, (version, content))| object(name, *version, content))
            .peekable();
        let then = undone.range::<str, _>(range);
        let mut then = then.filter_map(|(_, object)| object.clone()).peekable();
        std::iter::from_fn(move || match (live.peek(), then.peek()) {
            (Some(a), Some(b)) if a.name > b.name => then.next(),
            (None, _) => then.next(),
            (Some(_), _) => live.next(),
        })
    }

    /// At most `most` events after this version, oldest first; empty if it is the current one.
    pub fn events(&self, after: Version, most: usize) -> Result<Vec<Arc<StoreEvent>>, Unavailable> {
        self.version()?;
        Ok(self.ring.after(after)?.take(most).cloned().collect())
    }
}

fn object(
    name: &Arc<str>,
    version: Option<Version>,
    content: &Arc<Counted>,
) -> Option<StoredObject> {
    Some(StoredObject {
        name: Arc::clone(name),
        version: version?,
        content: Arc::clone(content),
    })
}
