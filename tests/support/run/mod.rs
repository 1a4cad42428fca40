//! Shared by the tests of `plimsoll run`: real cgroups, processes that burn CPU in them, a fake `/proc` whose load the
//! test sets, and the real binary.
#![allow(dead_code, reason = "no test binary uses all of it")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod load;

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use plimsoll::clock::boot_time;
use plimsoll::engine::time::BootTime;
use plimsoll::node::cgroup::{CgroupPath, Controller, Hierarchy};
use serde_json::Value;
use tempfile::TempDir;

pub use load::Load;

/// Enough for every step on a busy machine.
pub const TIMEOUT: Duration = Duration::from_secs(30);
pub const BINARY: &str = env!("CARGO_BIN_EXE_plimsoll");

/// Polls until `poll` returns something.
pub fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let end = boot_time() + TIMEOUT;
    let (_keep, tick) = mpsc::channel::<()>();
    loop {
        if let Some(found) = poll() {
            return found;
        }
        assert!(boot_time() < end, "not within {TIMEOUT:?}: {what}");
        let _timeout = tick.recv_timeout(Duration::from_millis(10));
    }
}

/// A machine for one test: a cgroup parent of its own, directories for policies, pods and state, and a load.
pub struct Machine {
    pub dir: TempDir,
    pub hierarchy: Hierarchy,
    pub parent: String,
    pub load: Load,
    burners: Vec<Child>,
}

impl Machine {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = tempfile::tempdir().unwrap();
        for directory in ["policies", "pods", "proc"] {
            fs::create_dir(dir.path().join(directory)).unwrap();
        }
        let machine = Self {
            hierarchy: Hierarchy::detect(Path::new("/proc"), None).unwrap(),
            parent: format!("plimsoll-run-{}-{number}", std::process::id()),
            load: Load::start(&dir.path().join("proc")),
            burners: Vec::new(),
            dir,
        };
        machine.create(&machine.parent);
        machine
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, file: &str, text: &str) {
        // Replaces the file by a rename, as editors do.
        let new = self.path("new");
        fs::write(&new, text).unwrap();
        fs::rename(new, self.path(file)).unwrap();
    }

    fn directories(&self, cgroup: &str) -> Vec<PathBuf> {
        self.hierarchy.dirs(&CgroupPath::new(cgroup).unwrap())
    }

    fn create(&self, cgroup: &str) {
        for directory in self.directories(cgroup) {
            fs::create_dir_all(&directory).unwrap();
            if self.hierarchy.is_v2() {
                // Children need the controllers too. It fails for a leaf with processes, which needs none.
                let parent = directory.parent().unwrap();
                let _leaf = fs::write(parent.join("cgroup.subtree_control"), "+cpu +memory");
            }
        }
    }

    /// Creates a cgroup below the test's parent.
    pub fn cgroup(&self, name: &str) -> String {
        let cgroup = format!("{}/{name}", self.parent);
        self.create(&cgroup);
        cgroup
    }

    /// Creates a pod with a process that burns CPU.
    pub fn burning_pod(&mut self, name: &str) {
        let cgroup = self.cgroup(name);
        self.burn(&cgroup);
        self.write(&format!("pods/{name}.yaml"), &pod(name, &cgroup));
    }

    /// Starts a helper test of this binary in `cgroup`.
    pub fn burn(&mut self, cgroup: &str) -> Pid {
        let test = std::env::current_exe().unwrap();
        self.spawn(
            cgroup,
            Command::new(test).args([BURNER, "--exact", "--ignored", "--nocapture"]),
        )
    }

    /// As [`Self::burn`], but the process ignores SIGTERM.
    pub fn burn_ignoring_sigterm(&mut self, cgroup: &str) -> Pid {
        let mut shell = Command::new("sh");
        shell
            .args(["-c", "trap '' TERM; exec \"$0\" \"$@\""])
            .arg(std::env::current_exe().unwrap())
            .args([BURNER, "--exact", "--ignored", "--nocapture"]);
        self.spawn(cgroup, &mut shell)
    }

    fn spawn(&mut self, cgroup: &str, command: &mut Command) -> Pid {
        let child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let pid = child.id();
        self.burners.push(child);
        for directory in self.directories(cgroup) {
            fs::write(directory.join("cgroup.procs"), pid.to_string()).unwrap();
        }
        Pid::from_raw(pid.cast_signed())
    }

    /// Kills a helper, and removes its cgroup.
    pub fn remove(&mut self, cgroup: &str, pid: Pid) {
        kill(pid, Signal::SIGKILL).unwrap();
        eventually("it has exited", || self.poll_exit(pid).then_some(()));
        self.directories(cgroup).iter().for_each(|it| remove(it));
    }

    /// Whether a helper has exited.
    pub fn poll_exit(&mut self, pid: Pid) -> bool {
        let id = pid.as_raw().unsigned_abs();
        let burner = self.burners.iter_mut().find(|it| it.id() == id);
        burner.unwrap().try_wait().unwrap().is_some()
    }

    pub fn quota_file(&self, name: &str) -> PathBuf {
        let cgroup = CgroupPath::new(&format!("{}/{name}", self.parent)).unwrap();
        let file = if self.hierarchy.is_v2() {
            "cpu.max"
        } else {
            "cpu.cfs_quota_us"
        };
        let dir = self.hierarchy.dir(Controller::Cpu, &cgroup).unwrap();
        dir.join(file)
    }

    pub fn quota(&self, name: &str) -> String {
        let text = fs::read_to_string(self.quota_file(name)).unwrap();
        text.trim().to_owned()
    }

    pub fn command(&self, subcommand: &str) -> Command {
        self.command_of(BINARY, subcommand)
    }

    /// The same with another binary.
    pub fn command_of(&self, program: &str, subcommand: &str) -> Command {
        let mut command = Command::new(program);
        command
            .arg(subcommand)
            .arg("--state-dir")
            .arg(self.path("state"))
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC");
        command
    }

    /// `plimsoll run` over the directories of this machine, with its load.
    pub fn run_command(&self, more: &[&str]) -> Command {
        let mut command = self.command("run");
        command
            .arg("--policies")
            .arg(self.path("policies"))
            .arg("--pods")
            .arg(self.path("pods"))
            .arg("--proc-root")
            .arg(self.path("proc"))
            .args(["--cgroup-root", "/sys/fs/cgroup", "--period", "200ms"])
            .args(["--sample-interval", "200ms", "--output", "json"])
            .args(more);
        command
    }

    pub fn start(&self, more: &[&str]) -> Daemon {
        Daemon::start(self.run_command(more))
    }

    pub fn restore(&self) -> Output {
        let mut command = self.command("run");
        command.args(["--restore", "--output", "json"]);
        command.output().unwrap()
    }

    /// Waits until `plimsoll status --local` prints all these words; it lags behind the events.
    pub fn wait_for_state_output(&self, words: &[&str]) {
        eventually(&format!("{words:?} in the state"), || {
            let state = String::from_utf8(self.state(&[]).stdout).unwrap();
            words.iter().all(|it| state.contains(it)).then_some(())
        });
    }

    pub fn state(&self, more: &[&str]) -> Output {
        self.command("status")
            .arg("--local")
            .args(more)
            .output()
            .unwrap()
    }

    pub fn journal(&self) -> String {
        fs::read_to_string(self.path("state/journal")).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for burner in &mut self.burners {
            let _gone = burner.kill();
            let _gone = burner.wait();
        }
        for directory in self.directories(&self.parent) {
            remove(&directory);
        }
    }
}

/// Removes a cgroup and its children once their processes are reaped.
fn remove(directory: &Path) {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == ErrorKind::NotFound => return,
        entries => entries.unwrap(),
    };
    for entry in entries {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            remove(&entry.path());
        }
    }
    eventually("the cgroup is removed", || {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy => None,
            _ => Some(()),
        }
    });
}

pub fn pod(name: &str, cgroup: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  annotations:\n    plimsoll.dev/cgroup: {cgroup}\n\
         spec:\n  terminationGracePeriodSeconds: 1\n  containers:\n  - name: c\n"
    )
}

/// An action, a rule over the CPU use of the node, and a `PodQOS` that lets the action act on everything.
pub fn policy(action: &str, allowed: &str, threshold: u32, value: u32) -> String {
    let head = "apiVersion: ensurance.crane.io/v1alpha1";
    format!(
        "{head}\nkind: AvoidanceAction\nmetadata: {{name: act}}\nspec: {action}\n---\n\
         {head}\nkind: NodeQOS\nmetadata: {{name: node}}\nspec:\n  rules:\n  - name: cpu\n    \
         avoidanceThreshold: {threshold}\n    restoreThreshold: 2\n    actionName: act\n    \
         metricRule: {{name: cpu_total_usage, value: {value}}}\n---\n\
         {head}\nkind: PodQOS\nmetadata: {{name: all}}\nspec:\n  allowedActions: [{allowed}]\n  labelSelector: {{}}\n"
    )
}

pub fn throttle() -> String {
    let action =
        "{coolDownSeconds: 1, throttle: {cpuThrottle: {minCPURatio: 10, stepCPURatio: 30}}}";
    policy(action, "throttle", 2, 1000)
}

/// A running `plimsoll run`, and the events that it has written.
pub struct Daemon {
    child: Child,
    lines: Receiver<String>,
    pub events: Vec<Value>,
}

impl Daemon {
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            lines,
            events: Vec::new(),
        }
    }

    /// Waits for the next event that matches `wanted`.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let end = boot_time() + TIMEOUT;
        loop {
            let line = match self.lines.recv_timeout(end.since(boot_time())) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => panic!("no such event in time: {what}\n{self}"),
                Err(RecvTimeoutError::Disconnected) => panic!("it exited before: {what}\n{self}"),
            };
            let value: Value = serde_json::from_str(&line).unwrap_or_else(|error| {
                panic!("not a JSON line ({error}): {line}");
            });
            self.events.push(value.clone());
            if wanted(&value) {
                return value;
            }
        }
    }

    pub fn wait_for_change(&mut self, change: &str) -> Value {
        self.wait_for(change, |line| line["change"] == change)
    }

    pub fn wait_for_state(&mut self, to: &str) -> Value {
        self.wait_for(to, |line| line["change"] == "state" && line["to"] == to)
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed())
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits until it exits; then all its events are in `events`.
    pub fn wait(&mut self) -> ExitStatus {
        let status = eventually("the daemon exits", || self.child.try_wait().unwrap());
        let rest = self
            .lines
            .iter()
            .map(|line| serde_json::from_str(&line).unwrap());
        self.events.extend(rest);
        status
    }

    pub fn stop(&mut self, signal: Signal) -> ExitStatus {
        self.signal(signal);
        self.wait()
    }

    pub fn changes(&self, change: &str) -> Vec<&Value> {
        let lines = self.events.iter();
        lines.filter(|line| line["change"] == change).collect()
    }
}

impl std::fmt::Display for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.events
            .iter()
            .try_for_each(|line| writeln!(f, "{line}"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            // SIGINT, so that a failed test leaves nothing in force.
            let _gone = kill(self.pid(), Signal::SIGINT);
            let _gone = self.child.wait();
        }
    }
}

/// The test that [`Machine::burn`] starts as a process.
const BURNER: &str = "run_support::burn_cpu";

#[test]
#[ignore = "started by other tests as a process: uses half a CPU until it is killed"]
fn burn_cpu() {
    // Half, because tests run beside each other.
    burn(TURN, 4 * TIMEOUT);
}

const TURN: Duration = Duration::from_millis(5);

/// Uses a CPU for a [`TURN`], pauses, and so on until it is killed, at the latest after `longest`.
pub fn burn(pause: Duration, longest: Duration) {
    let end = boot_time() + longest;
    while boot_time() < end {
        let started = boot_time();
        while since(started) < TURN {
            std::hint::spin_loop();
        }
        std::thread::park_timeout(pause);
    }
}

pub fn since(earlier: BootTime) -> Duration {
    boot_time().since(earlier)
}

/// Whether this process was started by [`Machine::burn`], for benchmarks, which have no test harness.
pub fn is_helper() -> bool {
    std::env::args().nth(1).as_deref() == Some(BURNER)
}

/// The argument after `name`.
pub fn argument(name: &str) -> Option<String> {
    let mut args = std::env::args().skip_while(|arg| arg != name);
    args.nth(1)
}
