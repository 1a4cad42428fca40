//! Durations in messages.

use std::time::Duration;

use jiff::SignedDuration;

/// A duration to the millisecond, without needless digits: `30s`, `1m 30s`, `200ms`.
pub fn format_duration(duration: Duration) -> String {
    let millis = i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
    format!("{:#}", SignedDuration::from_millis(millis))
}
