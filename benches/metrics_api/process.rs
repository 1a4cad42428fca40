//! CPU time and memory of processes.

use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// CPU time of each thread, by its name.
pub struct Cpu(BTreeMap<String, Duration>);

impl Cpu {
    /// CPU time so far; `schedstat` has it in nanoseconds.
    pub fn of(processes: &[u32]) -> Self {
        let mut threads = BTreeMap::new();
        for process in processes {
            let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
            for task in tasks.flatten().map(|task| task.path()) {
                let read = |file| fs::read_to_string(task.join(file)).unwrap_or_default();
                let nanos = read("schedstat")
                    .split(' ')
                    .next()
                    .and_then(|it| it.parse().ok());
                let used = threads
                    .entry(read("comm").trim().to_owned())
                    .or_insert(Duration::ZERO);
                *used += Duration::from_nanos(nanos.unwrap_or(0));
            }
        }
        Self(threads)
    }

    /// CPU time since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let used = self.0.iter().map(|(name, now)| {
            let before = before.0.get(name).copied().unwrap_or_default();
            (name.clone(), now.saturating_sub(before))
        });
        Self(used.collect())
    }

    /// Of all threads, in seconds.
    pub fn seconds(&self) -> f64 {
        self.0.values().sum::<Duration>().as_secs_f64()
    }

    /// Of each thread, in seconds.
    pub fn threads(&self) -> impl Iterator<Item = (&str, f64)> {
        let threads = self.0.iter();
        threads.map(|(name, used)| (name.as_str(), used.as_secs_f64()))
    }
}

/// Resident memory of a process, in kB.
pub fn resident(process: u32) -> f64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let line = line.unwrap().trim().trim_end_matches(" kB");
    line.parse().unwrap()
}
