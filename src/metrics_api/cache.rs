//! Answers that hold for a while.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ring::digest::{SHA256, digest};

use crate::engine::time::BootTime;

/// What was asked, so that secrets are not kept.
pub type Key = [u8; 32];

/// The key of a question.
pub fn key(question: &[u8]) -> Key {
    let mut key = [0; 32];
    key.copy_from_slice(digest(&SHA256, question).as_ref());
    key
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    let digits = bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
    digits.collect()
}

/// Answers by their questions; at most so many.
pub struct Cache<T> {
    answers: Mutex<HashMap<Key, (BootTime, T)>>,
    most: usize,
    lasts: Duration,
}

impl<T: Clone> Cache<T> {
    /// An empty one of `most` answers, each good for a time.
    pub fn new(most: usize, lasts: Duration) -> Self {
        Self {
            answers: Mutex::default(),
            most,
            lasts,
        }
    }

    /// The answer, if it is still good.
    pub fn get(&self, key: &Key, now: BootTime) -> Option<T> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let (until, answer) = answers.get(key)?;
        (now < *until).then(|| answer.clone())
    }

    /// Keeps an answer. Where there is no room, those that are no longer good go; else all.
    pub fn put(&self, key: Key, now: BootTime, answer: T) {
        let mut answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if answers.len() >= self.most {
            answers.retain(|_, (until, _)| now < *until);
        }
        if answers.len() >= self.most {
            answers.clear();
        }
        answers.insert(key, (now + self.lasts, answer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_holds_for_its_time_and_memory_for_all_times() {
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        let cache = Cache::new(2, Duration::from_secs(10));
        cache.put(key(b"a"), at(0), 1);
        assert_eq!(cache.get(&key(b"a"), at(9)), Some(1));
        assert_eq!(cache.get(&key(b"a"), at(10)), None);
        assert_eq!(cache.get(&key(b"b"), at(0)), None);
        cache.put(key(b"b"), at(5), 2);
        cache.put(key(b"c"), at(11), 3);
        assert_eq!(
            cache.get(&key(b"b"), at(11)),
            Some(2),
            "only the old one went"
        );
        cache.put(key(b"d"), at(12), 4);
        assert_eq!(cache.get(&key(b"d"), at(12)), Some(4));
        assert!(cache.answers.lock().unwrap().len() <= 2);
    }
}
