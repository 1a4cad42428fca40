//! Real cgroups for a test, below a parent of its own that is removed on drop.
#![allow(dead_code, reason = "each test file uses only a part")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::missing_panics_doc,
    missing_docs,
    reason = "tests may panic"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use plimsoll::clock::boot_time;
use plimsoll::engine::plan::{CpuClass, PodThrottle, TargetCgroup};
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::policy::RuleId;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::MilliCpu;
use plimsoll::node::actuate::throttle::{Recovered, ThrottleOutcome, Throttler};
use plimsoll::node::cgroup::{CgroupPath, Controller, Hierarchy};
use tempfile::TempDir;

/// A parent cgroup in every tree of the machine, with a state directory.
pub struct TestCgroups {
    pub hierarchy: Hierarchy,
    pub parent: CgroupPath,
    pub state: TempDir,
    children: Vec<Child>,
}

static CREATED: AtomicU32 = AtomicU32::new(0);

/// The test's cgroups; `None`, with the reason printed, if cgroups cannot be created.
pub fn test_cgroups() -> Option<TestCgroups> {
    let number = CREATED.fetch_add(1, Ordering::Relaxed);
    match TestCgroups::named(&format!("plimsoll-kernel-{}-{number}", std::process::id())) {
        Ok(cgroups) => Some(cgroups),
        Err(reason) => {
            eprintln!("skipped: {reason}");
            None
        }
    }
}

impl TestCgroups {
    fn named(name: &str) -> Result<Self, String> {
        if !Uid::effective().is_root() {
            return Err("creating cgroups needs root".to_owned());
        }
        let hierarchy =
            Hierarchy::detect(Path::new("/proc"), None).map_err(|error| error.to_string())?;
        let parent = CgroupPath::new(name).map_err(|error| error.to_string())?;
        let state = tempfile::tempdir().map_err(|error| error.to_string())?;
        let cgroups = Self {
            hierarchy,
            parent: parent.clone(),
            state,
            children: Vec::new(),
        };
        if let Hierarchy::V2 { root } = &cgroups.hierarchy {
            delegate(root)?;
        }
        cgroups.mkdir(&parent)?;
        Ok(cgroups)
    }

    /// Gives the test a high CPU weight, so that other work on a busy machine does not disturb measurements.
    pub fn prefer(&self) {
        let weight = if self.is_v2() { "10000" } else { "262144" };
        self.write(&self.parent, self.weight_file(), weight);
    }

    pub fn is_v2(&self) -> bool {
        self.hierarchy.is_v2()
    }

    /// Creates the cgroup of a pod.
    pub fn pod(&self, name: &str) -> CgroupPath {
        let path = self.parent.join(name).unwrap();
        self.mkdir(&path).unwrap();
        path
    }

    /// Creates the cgroup of a container.
    pub fn container(&self, pod: &CgroupPath, name: &str) -> CgroupPath {
        let path = pod.join(name).unwrap();
        self.mkdir(&path).unwrap();
        path
    }

    /// Creates the cgroup in every tree; on v2 the parent delegates its controllers.
    fn mkdir(&self, path: &CgroupPath) -> Result<(), String> {
        for directory in self.hierarchy.dirs(path) {
            if let (true, Some(parent)) = (self.is_v2(), directory.parent()) {
                delegate(parent)?;
            }
            fs::create_dir(&directory)
                .map_err(|error| format!("failed to create {}: {error}", directory.display()))?;
        }
        Ok(())
    }

    /// Kills the processes of a cgroup and removes it and its descendants.
    pub fn remove(&self, path: &CgroupPath) {
        let directories = self.hierarchy.dirs(path);
        let gone = wait_for(Duration::from_secs(20), || {
            for directory in &directories {
                kill_all(directory);
                remove_tree(directory);
            }
            directories.iter().all(|directory| !directory.exists())
        });
        assert!(gone || std::thread::panicking(), "{path} cannot be removed");
    }

    /// Returns a function that removes the empty cgroup of a pod.
    pub fn removal(&self, path: &CgroupPath) -> impl FnMut() + Send + 'static {
        let directories = self.hierarchy.dirs(path);
        move || {
            for directory in &directories {
                fs::remove_dir(directory).ok();
            }
        }
    }

    pub fn dir(&self, path: &CgroupPath) -> PathBuf {
        self.hierarchy.dir(Controller::Cpu, path).unwrap()
    }

    pub fn read(&self, path: &CgroupPath, file: &str) -> String {
        let path = self.dir(path).join(file);
        fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
            .trim_end()
            .to_owned()
    }

    pub fn write(&self, path: &CgroupPath, file: &str, value: &str) {
        let path = self.dir(path).join(file);
        fs::write(&path, value).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }

    /// The name of the quota file on this machine.
    pub fn quota_file(&self) -> &'static str {
        if self.is_v2() {
            "cpu.max"
        } else {
            "cpu.cfs_quota_us"
        }
    }

    pub fn burst_file(&self) -> &'static str {
        if self.is_v2() {
            "cpu.max.burst"
        } else {
            "cpu.cfs_burst_us"
        }
    }

    pub fn weight_file(&self) -> &'static str {
        if self.is_v2() {
            "cpu.weight"
        } else {
            "cpu.shares"
        }
    }

    /// The quota file's text for a quota of `micros` per 100 ms; `None`: no limit.
    pub fn quota_text(&self, micros: Option<u64>) -> String {
        match (self.is_v2(), micros) {
            (true, None) => "max 100000".to_owned(),
            (true, Some(micros)) => format!("{micros} 100000"),
            (false, None) => "-1".to_owned(),
            (false, Some(micros)) => micros.to_string(),
        }
    }

    pub fn quota(&self, path: &CgroupPath) -> String {
        self.read(path, self.quota_file())
    }

    pub fn set_quota(&self, path: &CgroupPath, micros: Option<u64>) {
        self.write(path, self.quota_file(), &self.quota_text(micros));
    }

    pub fn has(&self, path: &CgroupPath, file: &str) -> bool {
        self.dir(path).join(file).exists()
    }

    /// Runs a shell script inside a cgroup, in every tree.
    pub fn spawn(&mut self, path: &CgroupPath, script: &str) -> u32 {
        let enter = self
            .existing(path)
            .iter()
            .fold(String::new(), |script, directory| {
                script + &format!("echo $$ > {}/cgroup.procs && ", directory.display())
            });
        let child = Command::new("sh")
            .args(["-c", &format!("{enter} {{ {script}\n}}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        self.children.push(child);
        let inside = wait_for(Duration::from_secs(20), || self.contains(path, pid));
        assert!(inside, "the process did not enter {path}");
        pid
    }

    /// Keeps `count` CPUs busy.
    pub fn burn(&mut self, path: &CgroupPath, count: usize) {
        for _ in 0..count {
            self.spawn(path, "while :; do :; done");
        }
    }

    fn contains(&self, path: &CgroupPath, pid: u32) -> bool {
        self.existing(path).iter().all(|directory| {
            fs::read_to_string(directory.join("cgroup.procs"))
                .is_ok_and(|text| text.lines().any(|line| line == pid.to_string()))
        })
    }

    /// Process IDs in a cgroup.
    pub fn procs(&self, path: &CgroupPath) -> Vec<i32> {
        procs(&self.dir(path))
    }

    /// Kills all but `count` processes of a cgroup.
    pub fn end_all_but(&self, count: usize, path: &CgroupPath) {
        for pid in self
            .procs(path)
            .into_iter()
            .skip(count)
            .filter(|pid| *pid > 1)
        {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }

    /// Reaps exited child processes.
    pub fn reap(&mut self) {
        self.children
            .retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
    }

    fn cpu_nanos(&self, path: &CgroupPath) -> u64 {
        let directory = self.hierarchy.dir(Controller::Cpuacct, path).unwrap();
        if self.is_v2() {
            let text = fs::read_to_string(directory.join("cpu.stat")).unwrap();
            let usage = text
                .lines()
                .find_map(|line| line.strip_prefix("usage_usec "));
            usage.unwrap().parse::<u64>().unwrap() * 1000
        } else {
            let text = fs::read_to_string(directory.join("cpuacct.usage")).unwrap();
            text.trim_end().parse().unwrap()
        }
    }

    /// Measures the CPU usage of a cgroup over `window`, in millicores.
    pub fn measure(&self, path: &CgroupPath, window: Duration) -> f64 {
        let (start, before) = (boot_time(), self.cpu_nanos(path));
        wait_for(window, || false);
        let (end, after) = (boot_time(), self.cpu_nanos(path));
        (after - before) as f64 * 1000.0 / end.since(start).as_nanos() as f64
    }

    pub fn open(&self) -> (Throttler, Recovered) {
        Throttler::open(self.state.path(), self.hierarchy.clone(), boot_time()).unwrap()
    }

    pub fn throttler(&self) -> Throttler {
        self.open().0
    }

    /// Records in the journal on disk.
    pub fn journal_lines(&self) -> Vec<String> {
        let text = fs::read_to_string(self.state.path().join("journal")).unwrap_or_default();
        text.lines()
            .filter(|line| line.starts_with('{'))
            .map(str::to_owned)
            .collect()
    }

    /// A lookup of pods by name.
    pub fn find(&self) -> impl Fn(&PodUid) -> Option<CgroupPath> + use<> {
        let parent = self.parent.clone();
        move |uid| parent.join(&uid.0).ok()
    }

    /// The cgroup's directories that exist: it need not be in every tree.
    fn existing(&self, path: &CgroupPath) -> Vec<PathBuf> {
        let mut directories = self.hierarchy.dirs(path);
        directories.retain(|directory| directory.exists());
        directories
    }
}

impl Drop for TestCgroups {
    fn drop(&mut self) {
        self.remove(&self.parent.clone());
        for child in &mut self.children {
            child.wait().ok();
        }
    }
}

fn delegate(directory: &Path) -> Result<(), String> {
    let file = directory.join("cgroup.subtree_control");
    fs::write(&file, "+cpu +memory").map_err(|error| format!("{}: {error}", file.display()))
}

fn procs(directory: &Path) -> Vec<i32> {
    let text = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).collect()
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

/// Kills only processes below this test's own parent.
fn kill_all(directory: &Path) {
    for child in children(directory) {
        kill_all(&child);
    }
    fs::write(directory.join("freezer.state"), "THAWED").ok();
    for pid in procs(directory).into_iter().filter(|pid| *pid > 1) {
        kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
    }
}

fn remove_tree(directory: &Path) {
    for child in children(directory) {
        remove_tree(&child);
    }
    fs::remove_dir(directory).ok();
}

/// Waits until `condition` is true; false after the deadline.
#[allow(
    clippy::disallowed_methods,
    reason = "kernel state can only be polled; spinning would use the CPU that is measured"
)]
pub fn wait_for(deadline: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition() {
        if start.elapsed() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    true
}

pub fn uid(name: &str) -> PodUid {
    PodUid::from(name)
}

pub fn at(seconds: u64) -> BootTime {
    BootTime::from_nanos(boot_time().as_nanos() + seconds * 1_000_000_000)
}

/// A throttle of the pod's own cgroup.
pub fn throttle(name: &str, quota: u64) -> PodThrottle {
    throttle_of_cgroups(name, &[("", Some(quota))])
}

/// A throttle of several cgroups of a pod.
pub fn throttle_of_cgroups(name: &str, target_cgroups: &[(&str, Option<u64>)]) -> PodThrottle {
    PodThrottle {
        uid: uid(name),
        rule: RuleId::from("test/cpu"),
        ratio: 50,
        class: CpuClass::Normal,
        burst: MilliCpu::ZERO,
        target_cgroups: target_cgroups
            .iter()
            .map(|(cgroup, quota)| TargetCgroup {
                cgroup: (*cgroup).into(),
                base: MilliCpu(1000),
                quota: quota.map(MilliCpu),
            })
            .collect(),
    }
}

/// What a `PodQOS` does to a pod at all times: the idle class, and no quota.
pub fn standing(name: &str) -> PodThrottle {
    PodThrottle {
        rule: RuleId::standing("batch"),
        ratio: 100,
        class: plimsoll::engine::plan::CpuClass::Idle,
        ..throttle_of_cgroups(name, &[])
    }
}

/// A burst of a `PodQOS` in millicores, and nothing else.
pub fn bursting(name: &str, burst: u64) -> PodThrottle {
    PodThrottle {
        burst: MilliCpu(burst),
        class: CpuClass::Normal,
        ..standing(name)
    }
}

/// The throttle with idle class.
pub fn idle(throttle: PodThrottle) -> PodThrottle {
    PodThrottle {
        class: CpuClass::Idle,
        ..throttle
    }
}

/// Asserts that no outcome is a failure.
pub fn assert_fine(outcomes: &[ThrottleOutcome]) {
    let failed = outcomes.iter().find(|outcome| {
        matches!(
            outcome,
            ThrottleOutcome::Failed { .. }
                | ThrottleOutcome::JournalFailed { .. }
                | ThrottleOutcome::NotThrottled { .. }
        )
    });
    assert!(failed.is_none(), "{failed:?}");
}
