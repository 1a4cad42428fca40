//! Exponential backoff with jitter, so that a thousand nodes that lost the same server do not all come back at once.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// Endless pauses from `min` up to `max`; jitter makes each up to twice as long.
pub fn backoff(min: Duration, max: Duration) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(min)
        .with_max_delay(max)
        .without_max_times()
        .with_jitter()
        .build()
}

/// The pause after `failures` earlier failures, for what takes the time as an argument: `min`, doubled each time, up to `max`.
/// Without jitter.
pub fn exponential(min: Duration, max: Duration, failures: u32) -> Duration {
    min.saturating_mul(1 << failures.min(10)).min(max)
}

/// `pause`, longer by a random part of up to a quarter.
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + fastrand::f64() / 4.0)
}

/// The pause before the next attempt: at least what the server asked for, with jitter, because it asks all clients at once.
pub fn at_least(asked: Option<Duration>, pause: Duration) -> Duration {
    pause.max(asked.map_or(Duration::ZERO, jittered))
}

/// Sleeps for `pause`; `None`: forever.
pub async fn sleep(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_jittered_pause_is_never_shorter_and_varies() {
        let pause = Duration::from_secs(8);
        let pauses: BTreeSet<Duration> = (0..100).map(|_| jittered(pause)).collect();
        assert!(pauses.len() > 50, "{pauses:?}");
        let bounds = pause..=Duration::from_secs(10);
        assert!(pauses.iter().all(|it| bounds.contains(it)), "{pauses:?}");
    }

    #[test]
    fn clients_asked_to_wait_for_the_same_time_retry_at_different_times() {
        let (asked, pause) = (Duration::from_secs(8), Duration::from_secs(1));
        let pauses: BTreeSet<Duration> = (0..100).map(|_| at_least(Some(asked), pause)).collect();
        assert!(pauses.len() > 50, "{pauses:?}");
        assert!(pauses.first() >= Some(&asked), "{pauses:?}");
        assert_eq!(at_least(None, pause), pause);
        assert_eq!(at_least(Some(Duration::from_millis(10)), pause), pause);
    }
}
