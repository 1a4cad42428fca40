//! The programs in a scene's cgroups: a server that measures the latency of its own requests, a stage of a chain of
//! services, and batch work that takes all the CPU it can get.

use std::fs::File;
use std::hint::black_box;
use std::io::{self, BufRead, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::signal::Signal;
use nix::time::{ClockId, ClockNanosleepFlags, clock_gettime, clock_nanosleep};
use nix::unistd::{Pid, getppid};

use crate::clock::boot_time;
use crate::engine::time::BootTime;

/// The arrivals repeat after this time, so that any two phases get the same ones.
const ARRIVALS_REPEAT: Duration = Duration::from_secs(3);
/// Interval at which a thread reports its finished requests.
const REPORT_INTERVAL: Duration = Duration::from_millis(100);
/// A thread's report is one write: the kernel keeps writes of up to `PIPE_BUF` bytes apart.
const MAX_REPORT: usize = 4096 - 64;

/// What a server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Threads that serve requests.
    pub threads: usize,
    /// Requests that arrive in a second, on average.
    pub rate: u32,
    /// CPU time of a request on an idle CPU.
    pub work: Duration,
    /// A request that no thread has begun to serve by then is given up, as clients and proxies do.
    pub request_timeout: Duration,
    /// Reports each request at once: to the next stage of a chain.
    pub first_of_chain: bool,
}

/// Serves requests until the parent exits, and writes a line for each one to `out`: its scheduled arrival in nanoseconds
/// since boot, and its latency in nanoseconds, or `-` if it was given up.
///
/// The loop is open: requests arrive at scheduled times whether or not earlier ones have finished, wait in one queue, and
/// their latency counts from the scheduled arrival.
///
/// # Errors
/// Where `out` cannot be written: the parent has exited.
pub fn serve(parent: Pid, service: Service, out: &File) -> io::Result<()> {
    die_with(parent)?;
    wait_for_start(parent)?;
    let server = Server {
        rounds: calibrate(service.work),
        arrivals: Arrivals::new(service.rate),
        started: boot_time(),
        next: AtomicU64::new(0),
        service,
    };
    thread::scope(|scope| {
        let server = &server;
        let threads: Vec<_> = (0..service.threads)
            .map(|_| scope.spawn(move || server.serve(out)))
            .collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().unwrap_or(Ok(())))
    })
}

/// The state that a server's threads share.
struct Server {
    service: Service,
    rounds: u64,
    arrivals: Arrivals,
    started: BootTime,
    /// The first request that no thread has taken.
    next: AtomicU64,
}

impl Server {
    /// A thread takes the next request before it is due, and waits for it: a queue without a lock.
    fn serve(&self, mut out: &File) -> io::Result<()> {
        let mut lines = Vec::with_capacity(MAX_REPORT + 64);
        let mut reported = self.started;
        loop {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let due = self.started + self.arrivals.after(number);
            sleep_until(due);
            if boot_time().since(due) > self.service.request_timeout {
                writeln!(lines, "{} -", due.as_nanos())?;
            } else {
                burn_rounds(self.rounds);
                let latency = boot_time().since(due);
                writeln!(lines, "{} {}", due.as_nanos(), latency.as_nanos())?;
            }
            let now = boot_time();
            let due = self.service.first_of_chain || now.since(reported) >= REPORT_INTERVAL;
            if due || lines.len() >= MAX_REPORT {
                out.write_all(&lines)?;
                lines.clear();
                reported = now;
            }
        }
    }
}

/// Passes on the requests of the stage before, after `work` for each, until the parent exits. Its lines are those of
/// [`serve`], with the latency so far.
///
/// # Errors
/// Where the stage before or after has exited.
pub fn pass_on(
    parent: Pid,
    work: Duration,
    requests: impl BufRead,
    mut out: &File,
) -> io::Result<()> {
    die_with(parent)?;
    let rounds = calibrate(work);
    for line in requests.lines() {
        let line = line?;
        let due = line.split_once(' ').filter(|(_, latency)| *latency != "-");
        let due = due.and_then(|(due, _)| due.parse().ok());
        let passed_on = due.map_or(line, |nanos| {
            burn_rounds(rounds);
            let latency = boot_time().since(BootTime::from_nanos(nanos));
            format!("{nanos} {}", latency.as_nanos())
        });
        out.write_all((passed_on + "\n").as_bytes())?;
    }
    Ok(())
}

/// Keeps `threads` CPUs busy until the parent exits.
///
/// # Errors
/// Where the parent has exited already.
pub fn burn(parent: Pid, threads: usize) -> io::Result<()> {
    die_with(parent)?;
    wait_for_start(parent)?;
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
            "the process that started this one has exited",
        ))
    }
}

/// The parent writes a byte once this process is in its cgroup. In a pod there is no parent, and it starts at once.
fn wait_for_start(parent: Pid) -> io::Result<()> {
    if parent == Pid::from_raw(0) {
        return Ok(());
    }
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

/// How many rounds take `work` on this CPU. Takes the fastest CPU time of several tries, so that other load does not make
/// the requests smaller.
fn calibrate(work: Duration) -> u64 {
    const ROUNDS: u64 = 200_000;
    let fastest = (0..20)
        .map(|_| {
            let before = thread_cpu_nanos();
            burn_rounds(ROUNDS);
            thread_cpu_nanos().saturating_sub(before)
        })
        .min()
        .unwrap_or(0);
    let rounds = work.as_nanos() * u128::from(ROUNDS) / u128::from(fastest.max(1));
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

/// When requests arrive: at random, independently of each other (exponential gaps), the same in every run.
struct Arrivals {
    /// Within one repetition, ascending.
    offsets: Vec<Duration>,
}

impl Arrivals {
    fn new(rate: u32) -> Self {
        let count = (u64::from(rate) * ARRIVALS_REPEAT.as_secs()).max(1);
        let mut state = 0x2545_f491_4f6c_dd1d;
        let mut sum = 0.0;
        let sums: Vec<f64> = (0..count)
            .map(|_| {
                state = xorshift(state);
                sum -= (((state >> 11) + 1) as f64 / (1_u64 << 53) as f64).ln();
                sum
            })
            .collect();
        // Scaled, so that the rate is exact.
        let scale = ARRIVALS_REPEAT.as_secs_f64() / sum;
        let offsets = sums
            .into_iter()
            .map(|sum| Duration::from_secs_f64(sum * scale));
        Self {
            offsets: offsets.collect(),
        }
    }

    /// From the start until request `number` is due.
    fn after(&self, number: u64) -> Duration {
        let count = self.offsets.len() as u64;
        let repetitions = u32::try_from(number / count).unwrap_or(u32::MAX);
        let index = usize::try_from(number % count).unwrap_or(0);
        ARRIVALS_REPEAT * repetitions + self.offsets[index]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_arrive_in_order_at_exactly_the_rate_and_repeat() {
        let arrivals = Arrivals::new(150);
        let due: Vec<Duration> = (0..900).map(|number| arrivals.after(number)).collect();
        assert!(due.is_sorted());
        assert!(due[449].abs_diff(ARRIVALS_REPEAT) < Duration::from_micros(1));
        assert_eq!(due[450 + 17], ARRIVALS_REPEAT + due[17]);
    }

    #[test]
    fn arrivals_are_bursty() {
        let arrivals = Arrivals::new(1000);
        let due: Vec<Duration> = (0..3000).map(|number| arrivals.after(number)).collect();
        let gaps = due.windows(2).map(|pair| pair[1].abs_diff(pair[0]));
        let short = gaps.filter(|gap| *gap < Duration::from_micros(500)).count();
        // Of exponential gaps with a mean of 1 ms, 39 % are shorter than half of it.
        assert!((1050..1300).contains(&short), "{short}");
    }

    #[test]
    fn a_stage_passes_on_every_request_with_its_latency_so_far() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let arrived = boot_time().as_nanos();
        let lines = format!("{arrived} 5\n7 -\n");
        let out = File::create(&path).unwrap();
        pass_on(
            getppid(),
            Duration::from_micros(100),
            lines.as_bytes(),
            &out,
        )
        .unwrap();
        let text = std::fs::read_to_string(path).unwrap();
        let (served, given_up) = text.split_once('\n').unwrap();
        let latency = served.strip_prefix(&format!("{arrived} ")).unwrap();
        assert!(latency.parse::<u64>().unwrap() > 50_000, "{latency}");
        assert_eq!(given_up, "7 -\n");
    }

    #[test]
    fn a_request_takes_about_its_nominal_cpu_time() {
        const WORK: Duration = Duration::from_millis(1);
        let rounds = calibrate(WORK);
        let fastest = (0..20)
            .map(|_| {
                let before = thread_cpu_nanos();
                burn_rounds(rounds);
                Duration::from_nanos(thread_cpu_nanos() - before)
            })
            .min()
            .unwrap();
        assert!(fastest > WORK / 2 && fastest < WORK * 2, "{fastest:?}");
    }
}
