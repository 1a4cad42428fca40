//! The store as all tasks of the process share it, fenced by the leader's deadline.

use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use crate::cluster::clock;
use crate::cluster::election::Standing;

use super::store::{Limits, Store};

/// The shared store.
pub struct Data {
    store: Mutex<Store>,
    standing: watch::Receiver<Standing>,
    moved: watch::Sender<u64>,
}

impl Data {
    /// An empty one.
    pub fn new(limits: Limits, standing: watch::Receiver<Standing>) -> Self {
        Self {
            store: Mutex::new(Store::new(limits)),
            standing,
            moved: watch::Sender::new(0),
        }
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
