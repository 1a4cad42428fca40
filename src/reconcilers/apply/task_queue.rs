//! A bounded queue of tasks with limited concurrency.

use std::collections::VecDeque;

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};

/// Tasks running at a time.
const MAX_RUNNING: usize = 64;
/// Tasks waiting.
const MAX_WAITING: usize = 4096;

/// Tasks that return a `T`.
pub struct TaskQueue<T> {
    running: FuturesUnordered<BoxFuture<'static, T>>,
    waiting: VecDeque<BoxFuture<'static, T>>,
}

impl<T> TaskQueue<T> {
    /// An empty queue.
    pub fn new() -> Self {
        Self {
            running: FuturesUnordered::new(),
            waiting: VecDeque::new(),
        }
    }

    /// Adds a task; `false`: the queue is full and the task was dropped.
    pub fn push(&mut self, task: BoxFuture<'static, T>) -> bool {
        if self.waiting.len() >= MAX_WAITING {
            return false;
        }
        self.waiting.push_back(task);
        self.start();
        true
    }

    /// Cancels all tasks.
    pub fn clear(&mut self) {
        self.running.clear();
        self.waiting.clear();
    }

    fn start(&mut self) {
        while self.running.len() < MAX_RUNNING {
            let Some(task) = self.waiting.pop_front() else {
                return;
            };
            self.running.push(task);
        }
    }

    /// The result of the next finished task; `None` if none is running.
    pub async fn next(&mut self) -> Option<T> {
        let done = self.running.next().await;
        self.start();
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
    async fn a_burst_is_processed_64_at_a_time() {
        let mut queue = TaskQueue::new();
        let running = Arc::new(AtomicUsize::new(0));
        for number in 0..200 {
            let running = Arc::clone(&running);
            let work = async move {
                let concurrent = running.fetch_add(1, Relaxed) + 1;
                tokio::task::yield_now().await;
                running.fetch_sub(1, Relaxed);
                (number, concurrent)
            };
            assert!(queue.push(work.boxed()));
        }
        let mut done = Vec::new();
        while let Some((number, concurrent)) = queue.next().await {
            assert!(concurrent <= MAX_RUNNING, "{concurrent} at a time");
            done.push(number);
        }
        done.sort_unstable();
        assert_eq!(done, (0..200).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn cancelled_tasks_never_finish() {
        let mut queue = TaskQueue::new();
        for number in 0..200 {
            assert!(queue.push(std::future::ready(number).boxed()));
        }
        queue.clear();
        assert_eq!(queue.next().await, None);
        assert!(queue.push(std::future::ready(200).boxed()));
        assert_eq!(queue.next().await, Some(200));
    }

    #[test]
    fn the_queue_is_bounded() {
        let mut queue = TaskQueue::new();
        let all = MAX_RUNNING + MAX_WAITING;
        assert!((0..all).all(|_| queue.push(std::future::ready(()).boxed())));
        assert!(!queue.push(std::future::ready(()).boxed()));
    }
}
