//! A fake `/proc` whose CPU usage the test sets.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use plimsoll::clock::boot_time;

const CPUS: u64 = 2;
const GARBAGE: u64 = u64::MAX;

/// Writes `stat` and `meminfo` until it is dropped.
pub struct Load {
    milli: Arc<AtomicU64>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    pub fn start(proc_root: &Path) -> Self {
        fs::write(
            proc_root.join("meminfo"),
            "MemTotal:        8000000 kB\nMemFree:         6000000 kB\nMemAvailable:    6000000 kB\n",
        )
        .unwrap();
        let stat = File::create(proc_root.join("stat")).unwrap();
        let milli = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = mpsc::channel();
        let shared = Arc::clone(&milli);
        let mut counters = Counters::default();
        counters.write(&stat);
        let thread = thread::spawn(move || {
            while stopped.recv_timeout(Duration::from_millis(10))
                == Err(mpsc::RecvTimeoutError::Timeout)
            {
                match shared.load(Ordering::Relaxed) {
                    GARBAGE => stat.write_all_at(b"cpu  garbage", 0).unwrap(),
                    milli => {
                        counters.advance(milli);
                        counters.write(&stat);
                    }
                }
            }
        });
        Self {
            milli,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Writes garbage from now on.
    pub fn write_garbage(&self) {
        self.set(GARBAGE);
    }

    /// Sets the node's CPU usage in millicores, of two CPUs.
    pub fn set(&self, milli: u64) {
        self.milli.store(milli, Ordering::Relaxed);
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop = None;
        self.thread.take().unwrap().join().unwrap();
    }
}

/// CPU time in nanoseconds.
struct Counters {
    busy: u64,
    idle: u64,
    at: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            busy: 3_600_000_000_000,
            idle: 7_200_000_000_000,
            at: boot_time().as_nanos(),
        }
    }
}

impl Counters {
    fn advance(&mut self, milli: u64) {
        let now = boot_time().as_nanos();
        let elapsed = now - self.at;
        let busy = elapsed * milli / 1000;
        self.busy += busy;
        self.idle += elapsed * CPUS - busy;
        self.at = now;
    }

    /// In place and with constant length, so that no reader finds a partial file.
    fn write(&self, stat: &File) {
        const TICK: u64 = 10_000_000;
        let line = |name: &str, share: u64| {
            let (busy, idle) = (self.busy / TICK / share, self.idle / TICK / share);
            format!("{name} {busy:012} 0 0 {idle:012} 0 0 0 0 0 0\n")
        };
        let cpus: String = (0..CPUS)
            .map(|cpu| line(&format!("cpu{cpu}"), CPUS))
            .collect();
        let text = format!("{}{cpus}", line("cpu ", 1));
        stat.write_all_at(text.as_bytes(), 0).unwrap();
    }
}
