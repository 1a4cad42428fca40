//! Pauses between tries: each twice the last, up to a cap, and each with jitter, so that a thousand nodes that lost
//! the same server do not all come back at once.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

/// Endless pauses from `least` up to `most`; each up to twice as long by chance.
pub fn backoff(least: Duration, most: Duration) -> ExponentialBackoff {
    ExponentialBuilder::new()
        .with_min_delay(least)
        .with_max_delay(most)
        .without_max_times()
        .with_jitter()
        .build()
}

/// A pause that is longer by up to a quarter, by chance: for those that are counted or given elsewhere.
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + fastrand::f64() / 4.0)
}

/// The pause before the next try: not shorter than what the server asked for, which it asks of every client at once.
pub fn at_least(asked: Option<Duration>, pause: Duration) -> Duration {
    pause.max(asked.map_or(Duration::ZERO, jittered))
}

/// Waits so long; `None`: for ever.
pub async fn rest(pause: Option<Duration>) {
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
    fn a_jittered_pause_is_never_shorter_and_differs_each_time() {
        let pause = Duration::from_secs(8);
        let pauses: BTreeSet<Duration> = (0..100).map(|_| jittered(pause)).collect();
        assert!(pauses.len() > 50, "{pauses:?}");
        let bounds = pause..=Duration::from_secs(10);
        assert!(pauses.iter().all(|it| bounds.contains(it)), "{pauses:?}");
    }

    #[test]
    fn clients_that_are_asked_to_wait_as_long_do_not_come_back_at_once() {
        let (asked, pause) = (Duration::from_secs(8), Duration::from_secs(1));
        let pauses: BTreeSet<Duration> = (0..100).map(|_| at_least(Some(asked), pause)).collect();
        assert!(pauses.len() > 50, "{pauses:?}");
        assert!(pauses.first() >= Some(&asked), "{pauses:?}");
        assert_eq!(at_least(None, pause), pause);
        assert_eq!(at_least(Some(Duration::from_millis(10)), pause), pause);
    }
}
