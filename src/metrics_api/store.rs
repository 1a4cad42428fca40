//! The objects, their versions, and what happened to them. Pure.
//!
//! Every replica keeps the objects; only in a term of leadership do they have versions. A version is the resourceVersion
//! of the write that won the election, shifted, plus a sequence: it grows over restarts and failovers, because etcd's
//! revisions do. Each event grows it by exactly one, so that a version finds its event in the ring by subtraction.

mod ring;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU64;
use std::ops::{Bound, Deref};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::table::Cell;

use super::options::{Filter, Token};
use ring::Ring;
pub use ring::{Event, EventKind, Limits};

/// A term has room for so many events (as a power of two) before its versions meet those of the etcd revision that
/// follows its first one. The leader's own renewals move etcd on once a second: safe below a million events a second.
const SEQUENCE_BITS: u32 = 20;

/// A `resourceVersion`. Never 0, which means "any" in the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(NonZeroU64);

impl Version {
    /// The first of the term that this write of the Lease began.
    fn first(epoch: u64) -> Self {
        let shifted = epoch.checked_shl(SEQUENCE_BITS).unwrap_or(u64::MAX);
        Self(NonZeroU64::MIN.saturating_add(shifted))
    }

    fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// How many events lie between; zero where `earlier` is later.
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

/// What an object says, its version aside: written as JSON once, however often it is read. What does not change with
/// its load is shared by all that it ever said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Content {
    /// Its labels.
    pub labels: Arc<BTreeMap<String, String>>,
    /// The fields of `metadata` without the braces and the version; at least one.
    pub metadata: Arc<str>,
    /// `status`; as it is kept often, with no room to grow.
    pub status: Box<str>,
    /// Its row in a Table.
    pub cells: Vec<Cell>,
}

impl Content {
    /// The bytes of what its load changes, about.
    fn load(&self) -> usize {
        // A cell takes so much beside its text.
        self.status.len() + 48 * self.cells.len()
    }

    /// The bytes of what it may share, about.
    fn frame(&self) -> usize {
        let labels = self
            .labels
            .iter()
            .map(|(key, value)| key.len() + value.len() + 64);
        self.metadata.len() + labels.sum::<usize>()
    }
}

/// A content whose bytes count for as long as anything holds it.
#[derive(Debug)]
pub struct Counted {
    content: Content,
    bytes: usize,
    /// Those of all contents of the store that are held.
    held: Arc<AtomicUsize>,
}

impl Counted {
    fn new(content: Content, held: &Arc<AtomicUsize>) -> Self {
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
    type Target = Content;

    fn deref(&self) -> &Content {
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

/// An object of one version.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    /// Its name.
    pub name: Arc<str>,
    /// Its version.
    pub version: Version,
    /// What it says.
    pub content: Arc<Counted>,
}

/// This replica may not answer for the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotLeading;

/// Why a list or watch can't be had from a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// Another replica leads, or none.
    NotLeading,
    /// What happened since is not known any more, or never was: the version is of another term.
    Expired,
    /// The version is yet to come; this is the present one.
    Future(Version),
}

impl From<NotLeading> for Unavailable {
    fn from(NotLeading: NotLeading) -> Self {
        Self::NotLeading
    }
}

/// One page of a list.
#[derive(Clone, Debug)]
pub struct Page {
    /// The version that all pages of the list are of.
    pub version: Version,
    /// The objects, in order of name.
    pub objects: Vec<Object>,
    /// Where the next page begins, and how many objects it and those after it have.
    pub next: Option<(Token, usize)>,
}

/// Which version a list has to be of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Any: the newest is as good as any.
    Any,
    /// This or a later one.
    NotOlderThan(Version),
    /// This one.
    Exact(Version),
}

/// All objects.
#[derive(Debug)]
pub struct Store {
    contents: BTreeMap<Arc<str>, (Option<Version>, Arc<Counted>)>,
    /// The bytes of all contents that anything holds: an answer under way too.
    held: Arc<AtomicUsize>,
    /// The bytes of those that objects have now.
    current: usize,
    ring: Ring,
    /// The last version that was given away, in any term.
    last: Option<Version>,
    leading: Option<u64>,
}

impl Store {
    /// An empty one, of a replica that doesn't lead.
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

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.contents.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.contents.is_empty()
    }

    /// The bytes of contents that neither an object has now nor an event tells of: answers under way alone hold them.
    pub fn stale(&self) -> usize {
        let held = self.held.load(Ordering::Relaxed);
        held.saturating_sub(self.current + self.ring.replaced())
    }

    /// Begins a term; `epoch` is the resourceVersion of the write that won it. All objects get its first version.
    pub fn lead(&mut self, epoch: u64) {
        if self.leading == Some(epoch) {
            return;
        }
        let first = Version::first(epoch);
        // An etcd that was restored from a backup goes back; we do not.
        let first = self.last.map_or(first, |last| first.max(last.next()));
        self.leading = Some(epoch);
        self.last = Some(first);
        self.ring.restart(first);
        for (version, _) in self.contents.values_mut() {
            *version = Some(first);
        }
    }

    /// Ends the term: nothing is served, and no version given, until the next one.
    pub fn follow(&mut self) {
        self.leading = None;
        self.ring.clear();
    }

    /// The term that is on.
    pub const fn term(&self) -> Option<u64> {
        self.leading
    }

    /// The present version.
    pub fn version(&self) -> Result<Version, NotLeading> {
        self.leading.and(self.last).ok_or(NotLeading)
    }

    fn advance(&mut self) -> Option<Version> {
        self.leading?;
        let next = self.last?.next();
        self.last = Some(next);
        Some(next)
    }

    /// An object as it is now. What says the same as before is no event.
    pub fn apply(&mut self, name: &str, content: Content) {
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
            Some(Object {
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
        self.ring.push(Event {
            kind,
            object: Object {
                name,
                version,
                content,
            },
            before,
        });
    }

    /// An object is gone.
    pub fn delete(&mut self, name: &str) {
        let Some((name, (before, content))) = self.contents.remove_entry(name) else {
            return;
        };
        self.current -= content.bytes;
        let Some((before, version)) = before.and_then(|before| Some((before, self.advance()?)))
        else {
            return;
        };
        let object = |version| Object {
            name: Arc::clone(&name),
            version,
            content: Arc::clone(&content),
        };
        let kind = EventKind::Deleted;
        self.ring.push(Event {
            kind,
            object: object(version),
            before: Some(object(before)),
        });
    }

    /// One object.
    pub fn get(&self, name: &str) -> Result<Option<Object>, NotLeading> {
        self.version()?;
        let found = self.contents.get_key_value(name);
        Ok(found.and_then(|(name, (version, content))| object(name, *version, content)))
    }

    /// A page of the objects that the filter takes.
    pub fn list(
        &self,
        filter: &Filter,
        freshness: Freshness,
        limit: Option<usize>,
        token: Option<&Token>,
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
            .filter(|object| filter.takes(object));
        let page: Vec<Object> = match limit {
            Some(limit) => objects.by_ref().take(limit).collect(),
            None => objects.by_ref().collect(),
        };
        let next = page.last().map(|last| Token {
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

    /// The objects as they were before these events, after this name.
    fn at<'a>(
        &'a self,
        undone: &'a BTreeMap<Arc<str>, Option<Object>>,
        after: Option<&'a str>,
    ) -> impl Iterator<Item = Object> + 'a {
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

    /// At most `most` events after this version, oldest first; none: it is the present one.
    pub fn events(&self, after: Version, most: usize) -> Result<Vec<Arc<Event>>, Unavailable> {
        self.version()?;
        Ok(self.ring.after(after)?.take(most).cloned().collect())
    }
}

fn object(name: &Arc<str>, version: Option<Version>, content: &Arc<Counted>) -> Option<Object> {
    Some(Object {
        name: Arc::clone(name),
        version: version?,
        content: Arc::clone(content),
    })
}
