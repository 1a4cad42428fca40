//! Reviews: questions to an API server whose answers hold for a while, such as whose token this is. Few are asked at a
//! time, and none again while its answer holds.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ring::digest::{SHA256, digest};
use tokio::sync::Semaphore;

use super::clock;
use crate::engine::time::BootTime;

/// How much is kept, and asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// An answer is good for so long, also a bad one.
    pub lasts: Duration,
    /// At most so many answers are kept.
    pub most_kept: usize,
    /// At most so many questions are asked at a time; others wait.
    pub most_at_once: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            lasts: Duration::from_secs(10),
            most_kept: 4096,
            most_at_once: 16,
        }
    }
}

/// The reviews of one kind.
pub struct Reviews<T> {
    answers: Mutex<Answers<T>>,
    room: Semaphore,
}

impl<T: Clone> Reviews<T> {
    /// None yet.
    pub fn new(bounds: Bounds) -> Self {
        Self {
            answers: Mutex::new(Answers {
                by_question: HashMap::new(),
                bounds,
            }),
            room: Semaphore::new(bounds.most_at_once),
        }
    }

    /// The answer to `question`: the one that is kept, else what comes of `ask`, whose failures are not kept.
    pub async fn answer<E>(
        &self,
        question: &[u8],
        ask: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let key = key(question);
        if let Some(known) = self.known(&key) {
            return Ok(known);
        }
        let _room = self.room.acquire().await;
        // Somebody may have asked the same meanwhile.
        if let Some(known) = self.known(&key) {
            return Ok(known);
        }
        let answer = ask.await?;
        let mut answers = self.answers();
        let until = clock::now() + answers.bounds.lasts;
        answers.put(key, clock::now(), until, answer.clone());
        Ok(answer)
    }

    /// The answer to `question`, if one is kept.
    pub fn kept(&self, question: &[u8]) -> Option<T> {
        self.known(&key(question))
    }

    /// Keeps an answer that was found without asking, for as long as it holds.
    pub fn keep(&self, question: &[u8], lasts: Duration, answer: T) {
        let now = clock::now();
        self.answers().put(key(question), now, now + lasts, answer);
    }

    fn known(&self, key: &Key) -> Option<T> {
        self.answers().get(key, clock::now())
    }

    fn answers(&self) -> MutexGuard<'_, Answers<T>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What was asked, so that secrets are not kept.
type Key = [u8; 32];

fn key(question: &[u8]) -> Key {
    let mut key = [0; 32];
    key.copy_from_slice(digest(&SHA256, question).as_ref());
    key
}

/// Each with the time until which it is good.
struct Answers<T> {
    by_question: HashMap<Key, (BootTime, T)>,
    bounds: Bounds,
}

impl<T: Clone> Answers<T> {
    fn get(&self, key: &Key, now: BootTime) -> Option<T> {
        let (until, answer) = self.by_question.get(key)?;
        (now < *until).then(|| answer.clone())
    }

    /// Keeps an answer until then. Where there is no room, those that are no longer good go; else all.
    fn put(&mut self, key: Key, now: BootTime, until: BootTime, answer: T) {
        let most_kept = self.bounds.most_kept;
        if self.by_question.len() >= most_kept {
            self.by_question.retain(|_, (until, _)| now < *until);
        }
        if self.by_question.len() >= most_kept {
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
    fn an_answer_holds_for_its_time_and_memory_for_all_times() {
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        let mut cache = Answers {
            by_question: HashMap::new(),
            bounds: Bounds {
                most_kept: 2,
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
            "only the old one went"
        );
        cache.put(key(b"d"), at(12), at(22), 4);
        assert_eq!(cache.get(&key(b"d"), at(12)), Some(4));
        assert!(cache.by_question.len() <= 2);
    }

    /// Reviews whose answers hold for the whole test, however slow it is.
    fn reviews(most_at_once: usize) -> Reviews<u8> {
        Reviews::new(Bounds {
            lasts: Duration::from_hours(1),
            most_at_once,
            ..Bounds::default()
        })
    }

    #[tokio::test]
    async fn few_are_asked_at_a_time_and_none_twice() {
        let reviews = reviews(1);
        let (asked, under_way) = (Cell::new(0), Cell::new(0));
        let ask = |answer| {
            let (asked, under_way) = (&asked, &under_way);
            async move {
                asked.set(asked.get() + 1);
                assert_eq!(under_way.replace(1), 0, "one at a time");
                yield_now().await;
                under_way.set(0);
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
    async fn a_failure_is_asked_again_and_keeps_nobody_out() {
        let reviews = reviews(1);
        assert_eq!(
            reviews.answer(b"a", async { Err("down") }).await,
            Err("down")
        );
        let answer = reviews.answer(b"a", async { Ok::<_, ()>(1) });
        assert_eq!(answer.await, Ok(1));
    }
}
