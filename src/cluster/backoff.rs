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

/// Waits so long; `None`: for ever.
pub async fn rest(pause: Option<Duration>) {
    match pause {
        Some(pause) => tokio::time::sleep(pause).await,
        None => std::future::pending().await,
    }
}
