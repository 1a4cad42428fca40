//! Work that is sent out so much at a time; what comes meanwhile waits for its turn.

use std::collections::VecDeque;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};

/// At most so much is under way.
const MOST_RUNNING: usize = 64;
/// At most so much waits.
const MOST_WAITING: usize = 4096;

/// Work that comes to its end with a `T`.
pub(super) struct Outbox<T> {
    running: FuturesUnordered<BoxFuture<'static, T>>,
    waiting: VecDeque<BoxFuture<'static, T>>,
}

impl<T> Outbox<T> {
    /// Nothing to do yet.
    pub(super) fn new() -> Self {
        Self {
            running: FuturesUnordered::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Takes more work; false: too much waits already, and it is dropped.
    pub(super) fn push(&mut self, work: BoxFuture<'static, T>) -> bool {
        if self.waiting.len() >= MOST_WAITING {
            return false;
        }
        self.waiting.push_back(work);
        self.begin();
        true
    }

    /// Gives up all that has not come to its end.
    pub(super) fn clear(&mut self) {
        self.running.clear();
        self.waiting.clear();
    }

    fn begin(&mut self) {
        while self.running.len() < MOST_RUNNING {
            let Some(work) = self.waiting.pop_front() else {
                return;
            };
            self.running.push(work);
        }
    }

    /// What comes to its end next; `None` where nothing is under way.
    pub(super) async fn next(&mut self) -> Option<T> {
        let done = self.running.next().await;
        self.begin();
        done
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use futures::future::FutureExt;

    use super::*;

    #[tokio::test]
    async fn what_comes_at_once_is_all_done_64_at_a_time() {
        let mut outbox = Outbox::new();
        let running = Arc::new(AtomicUsize::new(0));
        for number in 0..200 {
            let running = Arc::clone(&running);
            let work = async move {
                let most = running.fetch_add(1, Relaxed) + 1;
                tokio::task::yield_now().await;
                running.fetch_sub(1, Relaxed);
                (number, most)
            };
            assert!(outbox.push(work.boxed()));
        }
        let mut done = Vec::new();
        while let Some((number, most)) = outbox.next().await {
            assert!(most <= MOST_RUNNING, "{most} at a time");
            done.push(number);
        }
        done.sort_unstable();
        assert_eq!(done, (0..200).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn what_is_given_up_never_comes_to_its_end() {
        let mut outbox = Outbox::new();
        for number in 0..200 {
            assert!(outbox.push(std::future::ready(number).boxed()));
        }
        outbox.clear();
        assert_eq!(outbox.next().await, None);
        assert!(outbox.push(std::future::ready(200).boxed()));
        assert_eq!(outbox.next().await, Some(200));
    }

    #[test]
    fn what_waits_is_bounded() {
        let mut outbox = Outbox::new();
        let all = MOST_RUNNING + MOST_WAITING;
        assert!((0..all).all(|_| outbox.push(std::future::ready(()).boxed())));
        assert!(!outbox.push(std::future::ready(()).boxed()));
    }
}
