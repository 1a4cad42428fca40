//! `plimsoll controller --watchdog`: what becomes of two processes, one of which watches the other.

use std::fs;
use std::io::Read as _;
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use crate::api_support::{Process, free_port, now};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use tempfile::TempDir;

const SOON: Duration = Duration::from_mins(3);
/// Longer than a watchdog is patient.
const LONG: Duration = Duration::from_secs(6);

/// Looks until `found` gives something.
fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < SOON, "not within {SOON:?}: {what}");
        thread::park_timeout(Duration::from_millis(20));
    }
}

/// A controller that reaches no API server, and the process that watches it.
struct Watched {
    watchdog: Process,
    port: u16,
    dir: TempDir,
}

impl Watched {
    fn start(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = format!("https://127.0.0.1:{}", free_port());
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
            "clusters": [{"name": "test", "cluster": {"server": server}}],
        });
        fs::write(dir.path().join("kubeconfig"), kubeconfig.to_string()).unwrap();
        let port = free_port();
        let watchdog = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(["controller", "--watchdog", "--listen"])
            .arg(format!("127.0.0.1:{port}"))
            .arg("--kubeconfig")
            .arg(dir.path().join("kubeconfig"))
            .args(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(dir.path().join("log")).unwrap())
            .spawn();
        Self {
            watchdog: Process(watchdog.unwrap()),
            port,
            dir,
        }
    }

    /// One that serves, and which process that is.
    fn serving() -> (Self, Pid) {
        let watched = Self::start(&[]);
        drop(watched.connected());
        let controller = watched.controller();
        (watched, controller)
    }

    /// A connection to the controller, once it takes any.
    fn connected(&self) -> TcpStream {
        eventually("it serves", || {
            TcpStream::connect(("127.0.0.1", self.port)).ok()
        })
    }

    fn controller(&self) -> Pid {
        let parent = format!("PPid:\t{}\n", self.watchdog.0.id());
        let is_child = |pid: &i32| status_of(*pid).is_some_and(|status| status.contains(&parent));
        let processes = fs::read_dir("/proc").unwrap();
        let pids = processes.filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
        let mut children: Vec<i32> = pids.filter(is_child).collect();
        assert_eq!(children.len(), 1);
        Pid::from_raw(children.remove(0))
    }

    fn watchdog(&self) -> Pid {
        Pid::from_raw(self.watchdog.0.id().cast_signed())
    }

    fn ends(mut self) -> (ExitStatus, String) {
        let child: &mut Child = &mut self.watchdog.0;
        let status = eventually("the watchdog ends", || child.try_wait().unwrap());
        let log = fs::read_to_string(self.dir.path().join("log")).unwrap();
        (status, log)
    }
}

fn status_of(pid: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/status")).ok()
}

/// Whoever inherits it may not wait for it.
fn is_gone(pid: Pid) -> bool {
    status_of(pid.as_raw()).is_none_or(|status| status.contains("State:\tZ"))
}

/// How often it has waited for something.
fn waits(pid: Pid) -> Option<u64> {
    let status = status_of(pid.as_raw())?;
    let mut lines = status.lines();
    lines.find_map(|line| {
        line.strip_prefix("voluntary_ctxt_switches:\t")?
            .parse()
            .ok()
    })
}

#[test]
fn what_would_end_the_controller_ends_both_and_its_exit_status_comes_back() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let (watched, controller) = Watched::serving();
        kill(watched.watchdog(), signal).unwrap();
        let (status, log) = watched.ends();
        assert_eq!(status.code(), Some(0), "{signal}: {log}");
        assert!(is_gone(controller));
    }
    let (status, log) = Watched::start(&["--silent-agent-after=1m"]).ends();
    assert_eq!(status.code(), Some(2), "{log}");
    assert!(
        log.contains("--silent-agent-after 60s is too short"),
        "{log}"
    );
}

#[test]
fn a_controller_that_dies_of_a_signal_is_told_as_a_shell_tells_it() {
    let (watched, controller) = Watched::serving();
    kill(controller, Signal::SIGKILL).unwrap();
    let (status, log) = watched.ends();
    assert_eq!(status.code(), Some(137), "{log}");
}

#[test]
fn a_controller_that_stands_still_is_ended_and_with_it_its_connections() {
    let (watched, controller) = Watched::serving();
    let mut connection = watched.connected();
    connection.set_read_timeout(Some(SOON)).unwrap();
    kill(controller, Signal::SIGSTOP).unwrap();
    let ended = connection.read(&mut [0]);
    let reset = |error: &std::io::Error| error.kind() == std::io::ErrorKind::ConnectionReset;
    assert!(
        matches!(ended, Ok(0)) || ended.as_ref().is_err_and(reset),
        "{ended:?}"
    );
    let (status, log) = watched.ends();
    assert_eq!(status.code(), Some(3), "{log}");
    assert!(log.contains("the controller did nothing for 4.5s"), "{log}");
    assert!(is_gone(controller));
}

#[test]
fn the_controller_ends_with_its_watchdog_even_where_it_stands_still() {
    for stands_still in [false, true] {
        let (watched, controller) = Watched::serving();
        if stands_still {
            kill(controller, Signal::SIGSTOP).unwrap();
        }
        kill(watched.watchdog(), Signal::SIGKILL).unwrap();
        eventually("it is gone", || is_gone(controller).then_some(()));
        let (status, _) = watched.ends();
        assert_eq!(status.signal(), Some(Signal::SIGKILL as i32));
    }
}

#[test]
fn nothing_is_ended_after_a_pause_of_both() {
    let (watched, controller) = Watched::serving();
    kill(watched.watchdog(), Signal::SIGSTOP).unwrap();
    kill(controller, Signal::SIGSTOP).unwrap();
    thread::park_timeout(LONG);
    let waited = waits(watched.watchdog());
    kill(watched.watchdog(), Signal::SIGCONT).unwrap();
    eventually("it looks and waits again", || {
        (waits(watched.watchdog()) > waited).then_some(())
    });
    kill(controller, Signal::SIGCONT).unwrap();
    kill(watched.watchdog(), Signal::SIGTERM).unwrap();
    let (status, log) = watched.ends();
    assert_eq!(status.code(), Some(0), "{log}");
}
