//! The store, shared by all tasks of the process and fenced by the leader's deadline.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hyper::body::Bytes;
use tokio::sync::watch;

use crate::clock;
use crate::cluster::election::Leadership;

use super::store::{Limits, Store};

/// The shared store.
pub struct Data {
    store: Mutex<Store>,
    leadership: watch::Receiver<Leadership>,
    changes: watch::Sender<u64>,
    /// Bytes of response parts that are not sent yet.
    unsent: Arc<AtomicUsize>,
}

/// A part of a response; its size counts until it is sent.
struct Part {
    text: String,
    unsent: Arc<AtomicUsize>,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.unsent.fetch_sub(self.text.len(), Ordering::Relaxed);
    }
}

impl Data {
    /// An empty store.
    pub fn new(limits: Limits, leadership: watch::Receiver<Leadership>) -> Self {
        Self {
            store: Mutex::new(Store::new(limits)),
            leadership,
            changes: watch::Sender::new(0),
            unsent: Arc::default(),
        }
    }

    /// Bytes held only by responses in progress: replaced contents, and unsent parts.
    pub fn pinned(&self) -> usize {
        let stale = self.change(|store| store.stale());
        stale + self.unsent.load(Ordering::Relaxed)
    }

    /// A response part.
    pub fn part(&self, text: String) -> Bytes {
        self.unsent.fetch_add(text.len(), Ordering::Relaxed);
        let unsent = Arc::clone(&self.unsent);
        Bytes::from_owner(Part { text, unsent })
    }

    /// Reads the store. `None`: this replica is not the leader, or no longer.
    pub fn read<T>(&self, read: impl FnOnce(&Store) -> T) -> Option<T> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        // Checked after the lock is acquired: the process may have been suspended while it waited.
        let term = self.leadership.borrow().term(clock::boot_time())?;
        (store.term() == Some(term.epoch)).then(|| read(&store))
    }

    /// Changes objects. Watches are notified by [`Self::notify_watches`].
    pub fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        change(&mut self.store.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notifies watches.
    pub fn notify_watches(&self) {
        self.changes
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Changes whenever watches are notified.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }
}
