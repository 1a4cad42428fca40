//! Limits a rate. Pure: takes the time.

use std::time::Duration;

use crate::engine::time::BootTime;

/// Holds at most `burst` tokens, and gains one every `interval`. Kept as the time when it is full again (the generic cell rate
/// algorithm), so that nothing has to refill it.
#[derive(Debug)]
pub struct TokenBucket {
    burst: u32,
    interval: Duration,
    full_at: BootTime,
}

impl TokenBucket {
    /// A full one.
    pub const fn new(burst: u32, interval: Duration) -> Self {
        Self {
            burst,
            interval,
            full_at: BootTime::from_nanos(0),
        }
    }

    /// Takes a token, also one that it does not hold yet; returns how long to wait for it.
    pub fn reserve(&mut self, now: BootTime) -> Duration {
        self.full_at = self.full_at.max(now) + self.interval;
        self.full_at.since(now + self.interval * self.burst)
    }

    /// Takes a token if it holds one.
    pub fn try_take(&mut self, now: BootTime) -> bool {
        let full_at = self.full_at.max(now) + self.interval;
        let has_token = full_at <= now + self.interval * self.burst;
        if has_token {
            self.full_at = full_at;
        }
        has_token
    }

    /// How long until it holds `tokens`, at most its burst.
    pub fn time_until(&self, now: BootTime, tokens: u32) -> Duration {
        let missing = self.burst.saturating_sub(tokens);
        self.full_at.since(now + self.interval * missing)
    }

    /// Changes the time in which it gains a token; those that it holds or owes stay as many as fit.
    pub const fn set_interval(&mut self, interval: Duration) {
        self.interval = interval;
    }

    /// Leaves a single token in it.
    pub fn empty_to_one(&mut self, now: BootTime) {
        self.full_at = now + self.interval * (self.burst - 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> BootTime {
        BootTime::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn a_burst_is_passed_at_once_and_then_one_per_interval() {
        let second = Duration::from_secs(1);
        let mut bucket = TokenBucket::new(50, second);
        for _ in 0..50 {
            assert_eq!(bucket.reserve(at(100_000)), Duration::ZERO);
        }
        assert_eq!(bucket.reserve(at(100_000)), second);
        assert_eq!(bucket.reserve(at(101_000)), second);
        assert_eq!(bucket.reserve(at(104_500)), Duration::ZERO);
        assert_eq!(bucket.reserve(at(104_500)), Duration::ZERO);
        assert_eq!(bucket.reserve(at(104_500)), second / 2);
        bucket.empty_to_one(at(900_000));
        assert_eq!(bucket.reserve(at(900_000)), Duration::ZERO);
        assert_eq!(bucket.reserve(at(900_000)), second);
    }

    #[test]
    fn no_more_than_a_burst_is_saved() {
        let mut bucket = TokenBucket::new(50, Duration::from_millis(20));
        let mut taken = |millis| (0..1000).filter(|_| bucket.try_take(at(millis))).count();
        assert_eq!(taken(0), 50);
        assert_eq!(taken(10), 0);
        assert_eq!(taken(100), 5);
        assert_eq!(taken(3_600_000), 50);
    }
}
