//! `plimsoll demo` on this machine's cgroups. No assertion depends on the speed of the machine.

use std::fs;
use std::io::{self, Read, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;
use plimsoll::demo::live::{self, Options};
use plimsoll::demo::phase::Phase;
use plimsoll::demo::renderer::Renderer;
use plimsoll::demo::view::DemoView;
use plimsoll::standalone::wake::Wake;
use serde_json::Value;

use super::support::{
    RunningDemo, cgroups_of, demo, has_threads, leftovers_of, processes_of, serialize, wait_until,
    writable_cgroups,
};

#[test]
fn a_demo_throttles_measures_restores_and_leaves_nothing() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    let _serial = serialize();
    let running = RunningDemo::start(demo(&["--plain", "--seconds", "12", "--output", "json"]));
    let pid = running.pid();
    let (output, code) = running.wait();
    assert_eq!(code, Some(0), "{output}");
    let json = output.lines().find(|line| line.starts_with('{'));
    let report: Value = serde_json::from_str(json.expect("a report")).expect("JSON");
    assert_eq!(report["outcome"], "completed", "{report}");
    for phase in ["alone", "unprotected"] {
        assert!(
            report[phase]["requests"].as_u64() > Some(0),
            "{phase}: {report}"
        );
    }
    assert!(
        report["policyToFirstStepSeconds"].is_number(),
        "{report}\n{output}"
    );
    assert!(report["filesCompared"].as_u64() >= Some(12), "{report}");
    assert_eq!(report["filesChanged"], Value::Array(Vec::new()), "{report}");
    assert_eq!(report["leftBehind"], Value::Array(Vec::new()), "{report}");
    assert!(
        report["unprotected"]["millicores"]["batch"].as_u64() > Some(0),
        "{report}"
    );
    assert!(output.contains("idle class"), "{output}");
    assert_eq!(leftovers_of(pid, &hierarchy), Vec::<PathBuf>::new());
}

#[test]
fn a_demo_on_one_cpu_has_the_load_for_it_and_stays_there() {
    let Some(_) = writable_cgroups() else {
        return;
    };
    let _serial = serialize();
    let mut running = RunningDemo::start(demo(&["--plain", "--seconds", "10", "--cpus", "0"]));
    running.wait_for("batch-b started");
    for process in processes_of(running.pid()) {
        let status = fs::read_to_string(process.join("status")).expect("it runs");
        assert!(status.contains("Cpus_allowed_list:\t0\n"), "{status}");
    }
    running.signal(Signal::SIGINT);
    let (output, code) = running.wait();
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("request 150m"), "{output}");
    assert!(output.contains("it needs 600m"), "{output}");
}

#[test]
fn every_stop_signal_restores_everything() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let _serial = serialize();
        let mut running = RunningDemo::start(demo(&["--plain", "--seconds", "10"]));
        let pid = running.pid();
        running.wait_for("policy applied");
        assert_eq!(processes_of(pid).len(), 3, "a server and two burners");
        running.signal(signal);
        let (output, code) = running.wait();
        assert_eq!(code, Some(0), "{signal}: {output}");
        assert!(output.contains("(stopped by"), "{signal}: {output}");
        assert!(
            output.contains("restored byte for byte"),
            "{signal}: {output}"
        );
        assert_eq!(
            leftovers_of(pid, &hierarchy),
            Vec::<PathBuf>::new(),
            "{signal}"
        );
    }
}

#[test]
fn the_next_demo_removes_what_a_killed_one_left() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    let _serial = serialize();
    let mut killed = RunningDemo::start(demo(&["--plain", "--seconds", "10"]));
    let pid = killed.pid();
    killed.wait_for("batch-b started");
    killed.signal(Signal::SIGKILL);
    let (_, code) = killed.wait();
    assert_eq!(code, None, "killed");
    let cgroups = cgroups_of(pid, &hierarchy);
    assert!(!cgroups.is_empty(), "kill -9 leaves cgroups");
    wait_until("its processes die with it", || {
        processes_of(pid).is_empty() && !cgroups.iter().any(|cgroup| has_threads(cgroup))
    });

    let mut next = RunningDemo::start(demo(&["--plain", "--seconds", "10"]));
    next.wait_for("the important pod runs alone");
    next.signal(Signal::SIGINT);
    let (output, code) = next.wait();
    assert_eq!(code, Some(0), "{output}");
    assert!(
        output.contains("removed what a killed demo had left"),
        "{output}"
    );
    assert_eq!(leftovers_of(pid, &hierarchy), Vec::<PathBuf>::new());
}

/// Panics while the batch work runs.
struct PanickingRenderer;

impl Renderer for PanickingRenderer {
    fn render(&mut self, view: &DemoView) -> io::Result<()> {
        assert!(view.phase < Phase::Enforced, "panics on purpose");
        Ok(())
    }

    fn stop_requested(&mut self) -> io::Result<bool> {
        Ok(false)
    }
}

#[test]
fn a_panic_leaves_nothing() {
    let Some(hierarchy) = writable_cgroups() else {
        return;
    };
    let _serial = serialize();
    let options = Options {
        hierarchy: hierarchy.clone(),
        program: PathBuf::from(env!("CARGO_BIN_EXE_plimsoll")),
        total: Duration::from_secs(10),
        cpus: None,
        shares: None,
        record: None,
    };
    let wake = Wake::new(&[]).expect("descriptors");
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        live::run(&options, &wake, || Ok(Box::new(PanickingRenderer)))
    }));
    assert!(result.is_err(), "it has panicked");
    assert_eq!(
        leftovers_of(std::process::id(), &hierarchy),
        Vec::<PathBuf>::new()
    );
}

#[test]
fn q_stops_the_demo_and_the_terminal_is_restored() {
    let Some(_) = writable_cgroups() else {
        return;
    };
    let _serial = serialize();
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
        if !stopped && String::from_utf8_lossy(&seen).contains("threshold") {
            keys.write_all(b"q").expect("it reads keys");
            stopped = true;
        }
    }
    assert!(script.wait().expect("it exits").success());
    let seen = String::from_utf8_lossy(&seen);
    let entered = seen.find("\x1b[?1049h").expect("the alternate screen");
    let left = seen.rfind("\x1b[?1049l").expect("and back");
    let summary = seen.find("(stopped by a key").expect("a summary");
    assert!(entered < left && left < summary, "{seen}");
}
