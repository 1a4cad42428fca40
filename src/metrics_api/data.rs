//! The store as all tasks of the process share it, fenced by the leader's deadline.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use hyper::body::Bytes;
use tokio::sync::watch;

use crate::cluster::clock;
use crate::cluster::election::Standing;

use super::store::{Limits, Store};

/// The shared store.
pub struct Data {
    store: Mutex<Store>,
    standing: watch::Receiver<Standing>,
    moved: watch::Sender<u64>,
    /// The bytes of parts of answers that are not sent.
    unsent: Arc<AtomicUsize>,
}

/// A part of an answer, which counts until it is sent.
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
    /// An empty one.
    pub fn new(limits: Limits, standing: watch::Receiver<Standing>) -> Self {
        Self {
            store: Mutex::new(Store::new(limits)),
            standing,
            moved: watch::Sender::new(0),
            unsent: Arc::default(),
        }
    }

    /// The bytes that are there for answers under way alone: contents that were replaced meanwhile, and what is not sent.
    pub fn pinned(&self) -> usize {
        let stale = self.change(|store| store.stale());
        stale + self.unsent.load(Ordering::Relaxed)
    }

    /// A part of an answer.
    pub fn part(&self, text: String) -> Bytes {
        self.unsent.fetch_add(text.len(), Ordering::Relaxed);
        let unsent = Arc::clone(&self.unsent);
        Bytes::from_owner(Part { text, unsent })
    }

    /// Reads; `None`: this replica may not answer for the cluster, or not any more.
    pub fn read<T>(&self, read: impl FnOnce(&Store) -> T) -> Option<T> {
        let store = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        // Looked at after the lock was waited for: a process that was stopped in between is late.
        let term = self.standing.borrow().term(clock::now())?;
        (store.term() == Some(term.epoch)).then(|| read(&store))
    }

    /// Changes objects. Watches see it after [`Self::wake`].
    pub fn change<T>(&self, change: impl FnOnce(&mut Store) -> T) -> T {
        change(&mut self.store.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Lets watches look.
    pub fn wake(&self) {
        self.moved
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Changes whenever watches should look.
    pub fn moved(&self) -> watch::Receiver<u64> {
        self.moved.subscribe()
    }
}
