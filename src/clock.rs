//! The only place that reads the kernel's clocks (timeouts of connections use tokio's). Decisions get the time as an argument.

use std::time::Duration;
use std::{fs, io};

use jiff::Timestamp;
use nix::time::{ClockId, clock_gettime};

use crate::engine::time::BootTime;

/// Counts from the boot, suspend included.
#[cfg(target_os = "linux")]
const BOOT_CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
/// Includes suspend as well: only Linux's stops there.
#[cfg(not(target_os = "linux"))]
const BOOT_CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

/// The time since boot, suspend included.
///
/// # Panics
/// Never on Linux 2.6.39 and later, which have `CLOCK_BOOTTIME`.
#[expect(
    clippy::expect_used,
    reason = "CLOCK_BOOTTIME exists on every kernel that Rust supports"
)]
pub fn boot_time() -> BootTime {
    let now = clock_gettime(BOOT_CLOCK).expect("the clock since boot");
    let nanos = now.tv_sec().unsigned_abs() * 1_000_000_000 + now.tv_nsec().unsigned_abs();
    BootTime::from_nanos(nanos)
}

/// Identifies the boot that [`boot_time`] counts from.
///
/// # Errors
/// If it cannot be read from `/proc`.
pub fn boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

/// The CPU time that the calling thread has used.
pub fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// The wall clock, for display, the hours of rules, and the validity of tokens and certificates; never for intervals.
#[expect(
    clippy::disallowed_methods,
    reason = "the only place that reads the wall clock"
)]
pub fn wall_time() -> Timestamp {
    Timestamp::now()
}
