//! `plimsoll demo` on this machine's cgroups. Nothing here rests on how fast the machine is.

use std::io::{self, Read, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use plimsoll::demo::live::{self, Options};
use plimsoll::demo::show::Show;
use plimsoll::demo::story::Act;
use plimsoll::demo::view::View;
use plimsoll::standalone::wake::Wake;
use serde_json::Value;

use crate::support::{
    Running, cgroups_of, demo, left_by, loads_of, one_at_a_time, wait_until, writable_cgroups,
};

#[test]
fn a_whole_demo_throttles_measures_puts_back_and_leaves_nothing() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    let _alone = one_at_a_time();
    let running = Running::start(demo(&["--plain", "--seconds", "12", "--output", "json"]));
    let pid = running.pid();
    let (told, code) = running.end();
    assert_eq!(code, Some(0), "{told}");
    let json = told.lines().find(|line| line.starts_with('{'));
    let report: Value = serde_json::from_str(json.expect("a report")).expect("JSON");
    assert_eq!(report["ended"], "byItself", "{report}");
    for act in ["before", "overloaded"] {
        assert!(
            report[act]["requests"].as_u64() > Some(0),
            "{act}: {report}"
        );
    }
    assert!(
        report["policyToFirstStepSeconds"].is_number(),
        "{report}\n{told}"
    );
    assert!(report["filesCompared"].as_u64() >= Some(12), "{report}");
    assert_eq!(report["filesChanged"], Value::Array(Vec::new()), "{report}");
    assert_eq!(report["leftBehind"], Value::Array(Vec::new()), "{report}");
    assert!(report["ownLimitPeriods"].is_number(), "{report}");
    assert!(told.contains("idle class"), "{told}");
    assert_eq!(left_by(pid, &hierarchy), Vec::<PathBuf>::new());
}

#[test]
fn every_signal_that_means_stop_puts_everything_back() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let _alone = one_at_a_time();
        let mut running = Running::start(demo(&["--plain", "--seconds", "10"]));
        let pid = running.pid();
        running.wait_for("policy applied");
        assert_eq!(loads_of(pid).len(), 3, "a worker and two burners");
        running.signal(signal);
        let (told, code) = running.end();
        assert_eq!(code, Some(0), "{signal}: {told}");
        assert!(told.contains("(stopped by"), "{signal}: {told}");
        assert!(told.contains("restored byte for byte"), "{signal}: {told}");
        assert_eq!(left_by(pid, &hierarchy), Vec::<PathBuf>::new(), "{signal}");
    }
}

#[test]
fn what_a_killed_demo_leaves_the_next_one_removes() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    let _alone = one_at_a_time();
    let mut killed = Running::start(demo(&["--plain", "--seconds", "10"]));
    let pid = killed.pid();
    killed.wait_for("batch-b started");
    killed.signal(Signal::SIGKILL);
    let (_, code) = killed.end();
    assert_eq!(code, None, "killed");
    wait_until("its processes die with it", || loads_of(pid).is_empty());
    assert!(
        !cgroups_of(pid, &hierarchy).is_empty(),
        "kill -9 leaves cgroups"
    );

    let mut next = Running::start(demo(&["--plain", "--seconds", "10"]));
    next.wait_for("the important worker runs alone");
    next.signal(Signal::SIGINT);
    let (told, code) = next.end();
    assert_eq!(code, Some(0), "{told}");
    assert!(
        told.contains("removed what a killed demo had left"),
        "{told}"
    );
    assert_eq!(left_by(pid, &hierarchy), Vec::<PathBuf>::new());
}

/// Panics while the batch work runs.
struct Breaking;

impl Show for Breaking {
    fn show(&mut self, view: &View) -> io::Result<()> {
        assert!(view.act < Act::Enforced, "broken on purpose");
        Ok(())
    }

    fn is_stop_asked(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

#[test]
fn a_panic_leaves_nothing() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    let _alone = one_at_a_time();
    let options = Options {
        hierarchy: hierarchy.clone(),
        program: PathBuf::from(env!("CARGO_BIN_EXE_plimsoll")),
        total: Duration::from_secs(10),
        shares: None,
        record: None,
    };
    let wake = Wake::new(&[]).expect("descriptors");
    let played = panic::catch_unwind(AssertUnwindSafe(|| {
        live::play(&options, &wake, || Ok(Box::new(Breaking)))
    }));
    assert!(played.is_err(), "it has panicked");
    assert_eq!(
        left_by(std::process::id(), &hierarchy),
        Vec::<PathBuf>::new()
    );
}

#[test]
fn on_a_terminal_q_stops_it_and_the_terminal_is_given_back() {
    let Some(_) = writable_cgroups() else {
        return;
    };
    let _alone = one_at_a_time();
    let program = env!("CARGO_BIN_EXE_plimsoll");
    let mut script = Command::new("script")
        .args([
            "-qefc",
            &format!("stty cols 80 rows 24; {program} demo --seconds 30"),
            "/dev/null",
        ])
        .env("TERM", "xterm-256color")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script, of util-linux");
    let mut out = script.stdout.take().expect("a pipe");
    let mut keys = script.stdin.take().expect("a pipe");
    let mut seen = Vec::new();
    let mut chunk = [0; 4096];
    let mut stopped = false;
    while let Ok(read @ 1..) = out.read(&mut chunk) {
        seen.extend_from_slice(&chunk[..read]);
        if !stopped && String::from_utf8_lossy(&seen).contains("load line") {
            keys.write_all(b"q").expect("it listens");
            stopped = true;
        }
    }
    assert!(script.wait().expect("it ends").success());
    let seen = String::from_utf8_lossy(&seen);
    let entered = seen.find("\x1b[?1049h").expect("the alternate screen");
    let left = seen.rfind("\x1b[?1049l").expect("and back");
    let summary = seen.find("(stopped by a key").expect("a summary");
    assert!(entered < left && left < summary, "{seen}");
}
