//! Cached reviews: requests to the API server whose answers are valid for a while, such as `TokenReview`. Few run at a time, and
//! none is repeated while its answer is cached.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ring::digest::{SHA256, digest};
use tokio::sync::Semaphore;

use crate::clock;
use crate::engine::time::BootTime;

/// Limits of the cache and of concurrent requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// How long an answer is valid, also a negative one.
    pub ttl: Duration,
    /// Size of the cache.
    pub max_entries: usize,
    /// Requests at a time; others wait.
    pub max_concurrent: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(10),
            max_entries: 4096,
            max_concurrent: 16,
        }
    }
}

/// The reviews of one kind.
pub struct Reviews<T> {
    answers: Mutex<Answers<T>>,
    permits: Semaphore,
}

impl<T: Clone> Reviews<T> {
    /// An empty cache.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            answers: Mutex::new(Answers {
                by_question: HashMap::new(),
                bounds,
            }),
            permits: Semaphore::new(bounds.max_concurrent),
        }
    }

    /// The cached answer to `question`, otherwise the result of `ask`. Failures are not cached.
    pub async fn answer<E>(
        &self,
        question: &[u8],
        ask: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let key = key(question);
        if let Some(known) = self.known(&key) {
            return Ok(known);
        }
        let _permit = self.permits.acquire().await;
        // Another caller may have asked the same in the meantime.
        if let Some(known) = self.known(&key) {
            return Ok(known);
        }
        let answer = ask.await?;
        let mut answers = self.answers();
        let until = clock::boot_time() + answers.bounds.ttl;
        answers.put(key, clock::boot_time(), until, answer.clone());
        Ok(answer)
    }

    /// The answer to `question`, if it is cached.
    pub fn cached(&self, question: &[u8]) -> Option<T> {
        self.known(&key(question))
    }

    /// Caches an answer that was found without a request.
    pub fn insert(&self, question: &[u8], ttl: Duration, answer: T) {
        let now = clock::boot_time();
        self.answers().put(key(question), now, now + ttl, answer);
    }

    fn known(&self, key: &Key) -> Option<T> {
        self.answers().get(key, clock::boot_time())
    }

    fn answers(&self) -> MutexGuard<'_, Answers<T>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A digest of the question, so that no secrets stay in memory.
type Key = [u8; 32];

fn key(question: &[u8]) -> Key {
    let mut key = [0; 32];
    key.copy_from_slice(digest(&SHA256, question).as_ref());
    key
}

/// The answers, each with its expiry.
struct Answers<T> {
    by_question: HashMap<Key, (BootTime, T)>,
    bounds: Bounds,
}

impl<T: Clone> Answers<T> {
    fn get(&self, key: &Key, now: BootTime) -> Option<T> {
        let (until, answer) = self.by_question.get(key)?;
        (now < *until).then(|| answer.clone())
    }

    /// Caches an answer until then. A full cache drops its expired answers, or all if none is expired.
    fn put(&mut self, key: Key, now: BootTime, until: BootTime, answer: T) {
        let max_entries = self.bounds.max_entries;
        if self.by_question.len() >= max_entries {
            self.by_question.retain(|_, (until, _)| now < *until);
        }
        if self.by_question.len() >= max_entries {
            self.by_question.clear();
        }
        self.by_question.insert(key, (until, answer));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::task::yield_now;

    use super::*;

    #[test]
    fn answers_expire_and_the_cache_is_bounded() {
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        let mut cache = Answers {
            by_question: HashMap::new(),
            bounds: Bounds {
                max_entries: 2,
                ..Bounds::default()
            },
        };
        cache.put(key(b"a"), at(0), at(10), 1);
        assert_eq!(cache.get(&key(b"a"), at(9)), Some(1));
        assert_eq!(cache.get(&key(b"a"), at(10)), None);
        assert_eq!(cache.get(&key(b"b"), at(0)), None);
        cache.put(key(b"b"), at(5), at(15), 2);
        cache.put(key(b"c"), at(11), at(21), 3);
        assert_eq!(
            cache.get(&key(b"b"), at(11)),
            Some(2),
            "only the expired one was dropped"
        );
        cache.put(key(b"d"), at(12), at(22), 4);
        assert_eq!(cache.get(&key(b"d"), at(12)), Some(4));
        assert!(cache.by_question.len() <= 2);
    }

    /// Reviews whose answers stay valid for the whole test, however slow it is.
    fn reviews(max_concurrent: usize) -> Reviews<u8> {
        Reviews::new(Bounds {
            ttl: Duration::from_hours(1),
            max_concurrent,
            ..Bounds::default()
        })
    }

    #[tokio::test]
    async fn requests_are_limited_and_not_repeated() {
        let reviews = reviews(1);
        let (asked, running) = (Cell::new(0), Cell::new(0));
        let ask = |answer| {
            let (asked, running) = (&asked, &running);
            async move {
                asked.set(asked.get() + 1);
                assert_eq!(running.replace(1), 0, "one at a time");
                yield_now().await;
                running.set(0);
                Ok::<u8, ()>(answer)
            }
        };
        let answers = futures::join!(
            reviews.answer(b"a", ask(1)),
            reviews.answer(b"a", ask(2)),
            reviews.answer(b"b", ask(3)),
        );
        assert_eq!(answers, (Ok(1), Ok(1), Ok(3)));
        assert_eq!(reviews.answer(b"b", ask(4)).await, Ok(3));
        assert_eq!(asked.get(), 2);
    }

    #[tokio::test]
    async fn a_failure_is_not_cached_and_frees_its_permit() {
        let reviews = reviews(1);
        assert_eq!(
            reviews.answer(b"a", async { Err("down") }).await,
            Err("down")
        );
        let answer = reviews.answer(b"a", async { Ok::<_, ()>(1) });
        assert_eq!(answer.await, Ok(1));
    }
}
