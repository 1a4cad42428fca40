//! Watches: each reads the store's ring at its own pace, and holds only its position in it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, Stream};
use hyper::body::Bytes;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::clock;

use super::data::Data;
use super::encode::{Encoder, event};
use super::negotiate::Form;
use super::options::{Filter, Since, WatchOptions};
use super::status::ErrorResponse;
use super::store::{EventKind, Freshness, StoreEvent, StoredObject, Unavailable, Version};

/// Events read from the store at a time: about 70 kB that wait for a slow watcher.
const BATCH: usize = 16;
/// Interval of bookmarks, and how long before the end the last one is sent.
const BOOKMARK_INTERVAL: Duration = Duration::from_mins(1);
const FINAL_BOOKMARK_LEAD: Duration = Duration::from_secs(2);
/// A watch without a timeout lasts for a random time, so that watches that start together do not end together: at least this.
const MIN_DURATION: Duration = Duration::from_mins(30);
/// The longest time that a watch without a timeout lasts.
pub const MAX_DURATION: Duration = Duration::from_hours(1);

struct Watcher {
    data: Arc<Data>,
    changes: watch::Receiver<u64>,
    writer: Encoder,
    filter: Filter,
    options: WatchOptions,
    /// Initial objects that are not sent yet, from before the cursor.
    initial: VecDeque<StoredObject>,
    /// Everything up to this version is sent once `initial` is empty.
    cursor: Version,
    initial_mark: bool,
    columns: bool,
    bookmark: Instant,
    last_bookmark: Instant,
    end: Instant,
    done: bool,
}

/// Streams a watch.
///
/// # Errors
/// This replica does not lead. Later errors are sent within the stream.
pub fn stream(
    data: Arc<Data>,
    options: WatchOptions,
    filter: Filter,
    writer: Encoder,
) -> Result<impl Stream<Item = Bytes> + Send, ErrorResponse> {
    let changes = data.changes();
    let (first, watcher) = match initial_state(&data, &options, &filter) {
        Ok(state) => {
            let watcher = Watcher::new(state, data, changes, options, filter, writer);
            // An empty first part sends the headers immediately.
            (Bytes::new(), Some(watcher))
        }
        Err(Unavailable::NotLeading) => return Err(ErrorResponse::not_leading()),
        // For any such version, the client lists again.
        Err(Unavailable::Expired | Unavailable::Future(_)) => {
            (error(&ErrorResponse::expired()), None)
        }
    };
    let rest = stream::unfold(watcher, |watcher| async move {
        let mut watcher = watcher?;
        let bytes = watcher.next().await?;
        Some((bytes, Some(watcher)))
    });
    Ok(futures::StreamExt::chain(stream::iter([first]), rest))
}

/// The initial objects of a watch, and the version that they are up to date with.
type InitialState = (VecDeque<StoredObject>, Version);

fn initial_state(
    data: &Data,
    options: &WatchOptions,
    filter: &Filter,
) -> Result<InitialState, Unavailable> {
    let state = data.read(|store| match options.since {
        Since::Now => Ok((VecDeque::new(), store.version()?)),
        Since::Version(version) => {
            store.events(version, 0)?;
            Ok((VecDeque::new(), version))
        }
        Since::Initial(not_older) => {
            let freshness = not_older.map_or(Freshness::Any, Freshness::NotOlderThan);
            let page = store.list(filter, freshness, None, None)?;
            Ok((page.objects.into(), page.version))
        }
    });
    state.unwrap_or(Err(Unavailable::NotLeading))
}

fn error(refusal: &ErrorResponse) -> Bytes {
    event("ERROR", &refusal.status().to_string()).into()
}

impl Watcher {
    fn new(
        (initial, cursor): InitialState,
        data: Arc<Data>,
        changes: watch::Receiver<u64>,
        options: WatchOptions,
        filter: Filter,
        writer: Encoder,
    ) -> Self {
        let now = Instant::now();
        let duration = options
            .timeout
            .unwrap_or_else(|| MIN_DURATION.mul_f64(1.0 + fastrand::f64()));
        let end = now + duration.min(MAX_DURATION);
        let last_bookmark = end
            .checked_sub(FINAL_BOOKMARK_LEAD)
            .filter(|last| *last > now);
        Self {
            data,
            changes,
            writer,
            filter,
            options,
            initial,
            cursor,
            initial_mark: options.marks_initial,
            columns: matches!(writer.form, Form::Table(_)),
            bookmark: now + BOOKMARK_INTERVAL,
            last_bookmark: last_bookmark.unwrap_or(end),
            end,
            done: false,
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if self.done {
                return None;
            }
            self.writer.now = clock::wall_time();
            if let Some(events) = self.next_events() {
                return Some(events);
            }
            if self.done {
                return None;
            }
            tokio::select! {
                biased;
                () = sleep_until(self.end) => return None,
                () = sleep_until(self.bookmark.min(self.last_bookmark)), if self.options.bookmarks => {
                    return Some(self.bookmark_event());
                }
                changed = self.changes.changed() => if changed.is_err() { return None },
            }
        }
    }

    /// The events to send now.
    fn next_events(&mut self) -> Option<Bytes> {
        if !self.initial.is_empty() {
            let batch = self.initial.drain(..self.initial.len().min(BATCH));
            let batch: Vec<_> = batch.map(|object| ("ADDED", object)).collect();
            return Some(self.lines(&batch));
        }
        if std::mem::take(&mut self.initial_mark) {
            return Some(event("BOOKMARK", &self.writer.bookmark(self.cursor, true)).into());
        }
        self.changes.mark_unchanged();
        loop {
            let cursor = self.cursor;
            let events = match self.data.read(|store| store.events(cursor, BATCH)) {
                Some(Ok(events)) => events,
                Some(Err(Unavailable::Expired)) => {
                    // It lagged behind further than the ring reaches, or a new term started.
                    self.done = true;
                    return Some(error(&ErrorResponse::expired()));
                }
                // This replica lost leadership: the client asks again and finds the leader.
                Some(Err(_)) | None => {
                    self.done = true;
                    return None;
                }
            };
            self.cursor = events.last()?.object.version;
            let events: Vec<_> = events
                .iter()
                .filter_map(|event| self.visible(event))
                .collect();
            if !events.is_empty() {
                return Some(self.lines(&events));
            }
        }
    }

    /// An event as seen through the filter: objects that start to match are added, those that stop matching are
    /// deleted.
    fn visible(&self, event: &StoreEvent) -> Option<(&'static str, StoredObject)> {
        let was = event
            .before
            .as_ref()
            .is_some_and(|before| self.filter.matches(before));
        let is = event.kind != EventKind::Deleted && self.filter.matches(&event.object);
        let kind = match (was, is) {
            (false, true) => "ADDED",
            (true, true) => "MODIFIED",
            (true, false) => "DELETED",
            (false, false) => return None,
        };
        if kind == "DELETED" && event.kind != EventKind::Deleted {
            // The last matching object, with the version of the event.
            let before = event.before.clone()?;
            let gone = StoredObject {
                version: event.object.version,
                ..before
            };
            return Some((kind, gone));
        }
        Some((kind, event.object.clone()))
    }

    fn lines(&mut self, events: &[(&str, StoredObject)]) -> Bytes {
        let columns = std::mem::take(&mut self.columns);
        self.data.part(self.writer.lines(events, columns))
    }

    fn bookmark_event(&mut self) -> Bytes {
        let now = Instant::now();
        self.bookmark = now + BOOKMARK_INTERVAL;
        if now >= self.last_bookmark {
            self.last_bookmark = self.end;
            self.bookmark = self.end;
        }
        event("BOOKMARK", &self.writer.bookmark(self.cursor, false)).into()
    }
}

#[cfg(test)]
mod tests;
