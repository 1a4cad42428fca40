//! The clocks of the controller. Nothing else in it reads the time.

use std::time::Duration;

use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

use crate::engine::time::BootTime;

/// `CLOCK_BOOTTIME`: never jumps, and includes suspend.
pub fn now() -> BootTime {
    // Every kernel that Rust supports has it.
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

/// The wall clock, for display in events, conditions and Leases; never used in a decision.
#[expect(clippy::disallowed_methods, reason = "the only place that reads it")]
pub fn wall() -> Timestamp {
    Timestamp::now()
}
