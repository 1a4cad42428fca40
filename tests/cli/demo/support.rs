//! Starts `plimsoll demo`, and finds what it leaves behind.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use plimsoll::clock::boot_time;
use plimsoll::node::cgroup::Hierarchy;

/// Enough for every step on a busy machine.
pub const TIMEOUT: Duration = Duration::from_mins(2);

/// Two demos at once would overload the machine twice.
pub fn serialize() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cgroup trees; `None` where this user may not write them, and the test is skipped.
pub fn writable_cgroups() -> Option<Hierarchy> {
    if !geteuid().is_root() {
        eprintln!("skipped: it makes cgroups, which needs root");
        return None;
    }
    Hierarchy::detect(Path::new("/proc"), None)
        .inspect_err(|error| eprintln!("skipped: {error}"))
        .ok()
}

/// `plimsoll demo` with these arguments.
pub fn demo(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.arg("demo").args(args);
    command
}

/// A running demo whose output lines can be waited for; killed on drop.
pub struct RunningDemo {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl RunningDemo {
    /// Starts it.
    pub fn start(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the demo starts");
        let (sender, lines) = mpsc::channel();
        let out: Box<dyn Read + Send> = Box::new(child.stdout.take().expect("a pipe"));
        let err: Box<dyn Read + Send> = Box::new(child.stderr.take().expect("a pipe"));
        for pipe in [out, err] {
            let sender = sender.clone();
            thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        return;
                    }
                }
            });
        }
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line with `text` in it.
    pub fn wait_for(&mut self, text: &str) {
        while let Ok(line) = self.lines.recv_timeout(TIMEOUT) {
            let found = line.contains(text);
            self.seen.push(line);
            if found {
                return;
            }
        }
        panic!("no line with {text:?}: {:#?}", self.seen);
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill(Pid::from_raw(pid), signal).expect("it runs");
    }

    /// Waits until it exits; all its lines and the exit code (`None`: killed by a signal).
    pub fn wait(mut self) -> (String, Option<i32>) {
        while let Ok(line) = self.lines.recv_timeout(TIMEOUT) {
            self.seen.push(line);
        }
        let status = self.child.wait().expect("it exits");
        (self.seen.join("\n"), status.code())
    }
}

impl Drop for RunningDemo {
    fn drop(&mut self) {
        let _exited = self.child.kill();
        let _exited = self.child.wait();
    }
}

/// Everything that the demo with this process id created and that still exists.
pub fn leftovers_of(pid: u32, hierarchy: &Hierarchy) -> Vec<PathBuf> {
    let mut left: Vec<PathBuf> = cgroups_of(pid, hierarchy);
    let state_dir = std::env::temp_dir().join(format!("plimsoll-demo-{pid}"));
    left.extend(state_dir.exists().then_some(state_dir));
    left.extend(processes_of(pid));
    left
}

/// The demo's top cgroup in each tree.
pub fn cgroups_of(pid: u32, hierarchy: &Hierarchy) -> Vec<PathBuf> {
    let top = format!("plimsoll-demo-{pid}").try_into().expect("a name");
    let mut dirs = hierarchy.dirs(&top);
    dirs.retain(|dir| dir.exists());
    dirs
}

/// Whether a thread is in this cgroup or below it. One that exits has no command line any more, and is still in it.
pub fn has_threads(cgroup: &Path) -> bool {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    let mut below = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir());
    let threads = ["tasks", "cgroup.threads"].map(|file| fs::read_to_string(cgroup.join(file)));
    threads.into_iter().flatten().any(|text| !text.is_empty()) || below.any(|it| has_threads(&it))
}

/// The processes that the demo with this process id started, by their command lines.
pub fn processes_of(pid: u32) -> Vec<PathBuf> {
    let parent = format!("--parent={pid}");
    let processes = fs::read_dir("/proc").expect("proc").flatten();
    processes
        .map(|entry| entry.path())
        .filter(|path| {
            let line = fs::read(path.join("cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0)
                .any(|arg| arg == parent.as_bytes())
        })
        .collect()
}

/// Waits until `holds` does.
pub fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let deadline = boot_time() + TIMEOUT;
    while !holds() {
        assert!(boot_time() < deadline, "not within {TIMEOUT:?}: {what}");
        thread::park_timeout(Duration::from_millis(20));
    }
}
