//! The only place of the controller that reads clocks.

use std::time::Duration;

use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

use crate::engine::time::BootTime;

/// Now, on the clock that never jumps and counts suspend.
pub fn now() -> BootTime {
    // It exists on every kernel that Rust supports; if it could not be read, no time would pass, and nothing be done.
    let Ok(now) = clock_gettime(ClockId::CLOCK_BOOTTIME) else {
        return BootTime::default();
    };
    let nanos = now
        .tv_sec()
        .saturating_mul(1_000_000_000)
        .saturating_add(now.tv_nsec());
    BootTime::from_nanos(u64::try_from(nanos).unwrap_or(0))
}

/// The CPU time that the calling thread has used.
pub fn thread() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// The wall clock, for people: in events, conditions and Leases, never in a decision.
#[expect(clippy::disallowed_methods, reason = "this is where it is read")]
pub fn wall() -> Timestamp {
    Timestamp::now()
}
