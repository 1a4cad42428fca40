//! The two programs that run inside the demo's cgroups: an important worker that measures its own latency, and
//! batch work that takes all the CPU it can get.

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

/// CPU time that one request of the important worker takes on an undisturbed CPU.
pub const REQUEST_WORK: Duration = Duration::from_micros(850);
/// Shortest time between the scheduled starts of two requests: longer than a request takes, so that a worker
/// that gets the CPU when it wants it never queues.
pub const SHORTEST_GAP: Duration = Duration::from_millis(2);
/// Longest time between the scheduled starts of two requests.
pub const LONGEST_GAP: Duration = Duration::from_millis(5);

/// What the worker has finished is told this often.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Serves requests until the parent goes away, and writes a line for each one to `out`: its scheduled start in
/// nanoseconds since boot, and its latency in nanoseconds.
///
/// The loop is open: requests fall due at their own times, whether or not the one before has ended, and latency
/// counts from the scheduled start. Time spent waiting behind a slow request is latency too.
///
/// # Errors
/// Where `out` can no longer be written: the parent is gone.
pub fn serve(parent: Pid, out: impl Write) -> io::Result<()> {
    die_with(parent)?;
    wait_for_go()?;
    let rounds = calibrate();
    let mut out = BufWriter::with_capacity(1 << 16, out);
    let mut gaps = Gaps::default();
    let mut due = boot_time() + SHORTEST_GAP;
    let mut reported = due;
    loop {
        sleep_until(due);
        churn(rounds);
        let done = boot_time();
        writeln!(out, "{} {}", due.as_nanos(), done.since(due).as_nanos())?;
        if done.since(reported) >= REPORT_EVERY {
            out.flush()?;
            reported = done;
        }
        due = due + gaps.next();
    }
}

/// Keeps `threads` CPUs busy until the parent goes away.
///
/// # Errors
/// Where the parent is gone already.
pub fn burn(parent: Pid, threads: usize) -> io::Result<()> {
    die_with(parent)?;
    wait_for_go()?;
    for _ in 1..threads {
        thread::spawn(|| -> ! { churn_forever() });
    }
    churn_forever()
}

/// Asks the kernel to kill this process when `parent` ends, however it ends.
fn die_with(parent: Pid) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    // It may have ended before the kernel was asked.
    if getppid() == parent {
        Ok(())
    } else {
        Err(io::Error::other("the demo that started this has ended"))
    }
}

/// The parent says so once this process is in its cgroup.
fn wait_for_go() -> io::Result<()> {
    io::stdin().read_exact(&mut [0])
}

fn churn_forever() -> ! {
    loop {
        churn(100_000);
    }
}

/// `rounds` rounds of arithmetic that the compiler cannot leave out.
fn churn(rounds: u64) {
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

/// How many rounds take [`REQUEST_WORK`] on this CPU. It counts CPU time, and takes the fastest of several tries,
/// so that other work on the machine does not shrink the requests.
fn calibrate() -> u64 {
    const ROUNDS: u64 = 200_000;
    let fastest = (0..20)
        .map(|_| {
            let before = thread_cpu_nanos();
            churn(ROUNDS);
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

/// Returns at once where `due` has passed. A signal that ends the sleep early makes the request early, never late.
fn sleep_until(due: BootTime) {
    let at = Duration::from_nanos(due.as_nanos()).into();
    let _ = clock_nanosleep(
        ClockId::CLOCK_BOOTTIME,
        ClockNanosleepFlags::TIMER_ABSTIME,
        &at,
    );
}

/// The times between requests: spread evenly from the shortest to the longest, the same in every run.
struct Gaps(u64);

impl Default for Gaps {
    fn default() -> Self {
        Self(0x2545_f491_4f6c_dd1d)
    }
}

impl Gaps {
    fn next(&mut self) -> Duration {
        self.0 = xorshift(self.0);
        let spread = LONGEST_GAP.saturating_sub(SHORTEST_GAP).as_micros();
        let part = u128::from(self.0) % (spread + 1);
        SHORTEST_GAP + Duration::from_micros(u64::try_from(part).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_keep_their_bounds_and_average_to_the_middle() {
        let mut gaps = Gaps::default();
        let drawn: Vec<Duration> = (0..10_000).map(|_| gaps.next()).collect();
        assert!(
            drawn
                .iter()
                .all(|gap| (SHORTEST_GAP..=LONGEST_GAP).contains(gap))
        );
        let mean = drawn.iter().sum::<Duration>() / 10_000;
        let middle = (SHORTEST_GAP + LONGEST_GAP) / 2;
        assert!(
            mean.abs_diff(middle) < Duration::from_micros(50),
            "{mean:?}"
        );
    }

    #[test]
    fn a_request_takes_about_the_cpu_time_that_it_claims() {
        let rounds = calibrate();
        let fastest = (0..20)
            .map(|_| {
                let before = thread_cpu_nanos();
                churn(rounds);
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
