//! The two programs in the demo's cgroups: an important worker that measures its own latency, and batch work that
//! takes all the CPU it can get.

use std::hint::black_box;
use std::io::{self, BufWriter, Read, Write};
use std::thread;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::time::{ClockId, ClockNanosleepFlags, clock_gettime, clock_nanosleep};
use nix::unistd::{Pid, getppid};

use crate::engine::time::BootTime;
use crate::node::clock::boot_time;

/// CPU time of one request of the important worker on an idle CPU.
pub const REQUEST_WORK: Duration = Duration::from_micros(850);
/// Minimum time between the scheduled starts of two requests: longer than a request takes, so that an undisturbed
/// worker never queues.
pub const MIN_GAP: Duration = Duration::from_millis(2);
/// Maximum time between the scheduled starts of two requests.
pub const MAX_GAP: Duration = Duration::from_millis(5);

/// Interval at which the worker reports finished requests.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);

/// Serves requests until the parent exits, and writes a line for each one to `out`: its scheduled start in
/// nanoseconds since boot, and its latency in nanoseconds.
///
/// The loop is open: requests are due at scheduled times whether or not the previous one has finished, and latency
/// counts from the scheduled start, including time behind a slow request.
///
/// # Errors
/// Where `out` cannot be written: the parent has exited.
pub fn serve(parent: Pid, out: impl Write) -> io::Result<()> {
    die_with(parent)?;
    wait_for_start()?;
    let rounds = calibrate();
    let mut out = BufWriter::with_capacity(1 << 16, out);
    let mut gaps = Gaps::default();
    let mut due = boot_time() + MIN_GAP;
    let mut reported = due;
    loop {
        sleep_until(due);
        burn_rounds(rounds);
        let done = boot_time();
        writeln!(out, "{} {}", due.as_nanos(), done.since(due).as_nanos())?;
        if done.since(reported) >= REPORT_INTERVAL {
            out.flush()?;
            reported = done;
        }
        due = due + gaps.next();
    }
}

/// Keeps `threads` CPUs busy until the parent exits.
///
/// # Errors
/// Where the parent has exited already.
pub fn burn(parent: Pid, threads: usize) -> io::Result<()> {
    die_with(parent)?;
    wait_for_start()?;
    for _ in 1..threads {
        thread::spawn(|| -> ! { burn_forever() });
    }
    burn_forever()
}

/// Makes the kernel kill this process when `parent` exits.
fn die_with(parent: Pid) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // It may have exited before prctl.
    if getppid() == parent {
        Ok(())
    } else {
        Err(io::Error::other(
            "the demo that started this process has exited",
        ))
    }
}

/// The parent writes a byte once this process is in its cgroup.
fn wait_for_start() -> io::Result<()> {
    io::stdin().read_exact(&mut [0])
}

fn burn_forever() -> ! {
    loop {
        burn_rounds(100_000);
    }
}

/// `rounds` rounds of arithmetic that the compiler cannot optimize away.
fn burn_rounds(rounds: u64) {
    let mut state = black_box(0x9e37_79b9_7f4a_7c15_u64);
    for _ in 0..rounds {
        state = xorshift(state);
    }
    black_box(state);
}

/// Marsaglia's xorshift64: <https://www.jstatsoft.org/article/view/v008i14>.
const fn xorshift(mut state: u64) -> u64 {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    state
}

/// How many rounds take [`REQUEST_WORK`] on this CPU. Takes the fastest CPU time of several tries, so that other load
/// does not make the requests smaller.
fn calibrate() -> u64 {
    const ROUNDS: u64 = 200_000;
    let fastest = (0..20)
        .map(|_| {
            let before = thread_cpu_nanos();
            burn_rounds(ROUNDS);
            thread_cpu_nanos().saturating_sub(before)
        })
        .min()
        .unwrap_or(0);
    let rounds = REQUEST_WORK.as_nanos() * u128::from(ROUNDS) / u128::from(fastest.max(1));
    u64::try_from(rounds).unwrap_or(u64::MAX).max(1)
}

#[expect(
    clippy::expect_used,
    reason = "CLOCK_THREAD_CPUTIME_ID exists on every kernel that Rust supports"
)]
fn thread_cpu_nanos() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("CLOCK_THREAD_CPUTIME_ID");
    time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs()
}

/// Returns at once if `due` has passed. A signal makes the request early, never late.
fn sleep_until(due: BootTime) {
    let at = Duration::from_nanos(due.as_nanos()).into();
    let _ = clock_nanosleep(
        ClockId::CLOCK_BOOTTIME,
        ClockNanosleepFlags::TIMER_ABSTIME,
        &at,
    );
}

/// The times between requests: uniform between minimum and maximum, the same in every run.
struct Gaps(u64);

impl Default for Gaps {
    fn default() -> Self {
        Self(0x2545_f491_4f6c_dd1d)
    }
}

impl Gaps {
    fn next(&mut self) -> Duration {
        self.0 = xorshift(self.0);
        let spread = MAX_GAP.saturating_sub(MIN_GAP).as_micros();
        let part = u128::from(self.0) % (spread + 1);
        MIN_GAP + Duration::from_micros(u64::try_from(part).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_within_bounds_and_average_to_the_middle() {
        let mut gaps = Gaps::default();
        let drawn: Vec<Duration> = (0..10_000).map(|_| gaps.next()).collect();
        assert!(drawn.iter().all(|gap| (MIN_GAP..=MAX_GAP).contains(gap)));
        let mean = drawn.iter().sum::<Duration>() / 10_000;
        let middle = (MIN_GAP + MAX_GAP) / 2;
        assert!(
            mean.abs_diff(middle) < Duration::from_micros(50),
            "{mean:?}"
        );
    }

    #[test]
    fn a_request_takes_about_its_nominal_cpu_time() {
        let rounds = calibrate();
        let fastest = (0..20)
            .map(|_| {
                let before = thread_cpu_nanos();
                burn_rounds(rounds);
                Duration::from_nanos(thread_cpu_nanos() - before)
            })
            .min()
            .unwrap();
        assert!(
            fastest > REQUEST_WORK / 2 && fastest < REQUEST_WORK * 2,
            "{fastest:?}"
        );
    }
}
