//! Windows over any metric: `--windows` of `plimsoll run`, `check` and `replay`.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crate::run_support::{BINARY, Machine, policy};
use nix::sys::signal::Signal;
use plimsoll::clock::boot_time;
use plimsoll::crd::windows;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::sample::{ProbeSample, Sample, Series};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::Bytes;
use plimsoll::engine::window::NodeWindows;
use plimsoll::node::machine::saved_file::{SavedFile, Validity};
use plimsoll::trace::TraceHeader;
use plimsoll::trace::record::TraceRecorder;

/// Serves the use of two GPUs, of which the busier one has the use that the test sets.
struct Exporter {
    port: u16,
    requests: Arc<AtomicU64>,
}

impl Exporter {
    fn start(percent: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let requests = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&requests);
        // Ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                while lines.next().is_some_and(|line| !line.unwrap().is_empty()) {}
                let body = format!("gpu_usage{{gpu=\"0\"}} 1\ngpu_usage{{gpu=\"1\"}} {percent}\n");
                let length = body.len();
                write!(
                    stream,
                    "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}"
                )
                .unwrap();
                counter.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { port, requests }
    }
}

fn file_of_windows(port: u16, window: &str) -> String {
    format!(
        "metrics:\n- name: gpu_usage_{window}\n  source: gpu_usage\n  window: {window}\n  httpGet: {{port: {port}}}\n"
    )
}

/// Windows to which the last `seconds` were added, in which the exporter said `percent`.
fn history(file: &str, port: u16, seconds: u64, percent: f64) -> NodeWindows {
    let mut node = NodeWindows::default();
    node.set_custom(windows::read(file).unwrap().into());
    let start = BootTime::from_nanos(boot_time().as_nanos() - seconds * 1_000_000_000);
    for second in 0..seconds {
        let at = start + Duration::from_secs(second);
        node.add(&probed(at, port, percent));
    }
    node
}

fn probed(at: BootTime, port: u16, percent: f64) -> Sample {
    Sample {
        at,
        probes: vec![ProbeSample {
            url: format!("http://:{port}/metrics").into(),
            at,
            series: [Series {
                name: "gpu_usage".into(),
                labels: Vec::new(),
                value: percent,
            }]
            .into(),
        }],
        ..Sample::default()
    }
}

fn saved(machine: &Machine) -> SavedFile<NodeWindows> {
    SavedFile::new(
        &machine.path("state"),
        "windows.json",
        2,
        Validity::ThisBoot,
    )
    .unwrap()
}

/// A rule that throttles above `value` of the window.
fn rule(window: &str, value: u32) -> String {
    let action =
        "{coolDownSeconds: 1, throttle: {cpuThrottle: {minCPURatio: 10, stepCPURatio: 30}}}";
    policy(action, "throttle", 1, value).replace("cpu_total_usage", &format!("gpu_usage_{window}"))
}

#[test]
fn a_rule_on_a_window_over_an_exporter_acts_and_a_restart_keeps_the_window() {
    let exporter = Exporter::start(95);
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/gpu.yaml", &rule("avg_5m", 80));
    let file = file_of_windows(exporter.port, "avg_5m");
    machine.write("windows.yaml", &file);
    fs::create_dir(machine.path("state")).unwrap();
    let before = history(&file, exporter.port, 400, 90.0);
    saved(&machine).save(&before).unwrap();
    let path = machine.path("windows.yaml");
    let arguments = ["--windows", path.to_str().unwrap()];
    let mut daemon = machine.start(&arguments);
    let breached = daemon.wait_for_state("Breached");
    let value = breached["value"].as_f64().unwrap();
    assert!((89.0..91.0).contains(&value), "{breached}");
    assert_eq!(breached["metric"], "gpu_usage_avg_5m");
    daemon.wait_for("a throttle to the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert!(exporter.requests.load(Ordering::Relaxed) > 0);
    assert!(daemon.stop(Signal::SIGTERM).success());
    let window = windows::read(&file).unwrap().remove(0);
    let mut after = saved(&machine).read().unwrap().unwrap().resumed().unwrap();
    after.set_custom([window.clone()].into());
    let kept = after.custom_value(&window.metric).unwrap();
    assert!((89.0..92.0).contains(&kept), "{kept}");
    assert!(machine.restore().status.success());
}

#[test]
fn responses_of_the_exporter_enter_the_window() {
    let exporter = Exporter::start(95);
    let machine = Machine::new();
    machine.write("policies/gpu.yaml", &rule("avg_1m", 30));
    let file = file_of_windows(exporter.port, "avg_1m");
    machine.write("windows.yaml", &file);
    fs::create_dir(machine.path("state")).unwrap();
    // Less than half of the minute: without more samples there is no value.
    saved(&machine)
        .save(&history(&file, exporter.port, 20, 10.0))
        .unwrap();
    let path = machine.path("windows.yaml");
    let mut daemon = machine.start(&["--windows", path.to_str().unwrap()]);
    let breached = daemon.wait_for_state("Breached");
    let value = breached["value"].as_f64().unwrap();
    assert!((30.0..60.0).contains(&value), "{breached}");
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn windows_that_cannot_be_used_are_refused_with_every_line() {
    let machine = Machine::new();
    machine.write("policies/gpu.yaml", &rule("avg_5m", 80));
    machine.write(
        "windows.yaml",
        "metrics:\n- {name: a, source: disk_utilisation, window: avg_5m}\n- {name: b, source: cpu_load_1_min, window: avg_2m}\n",
    );
    let path = machine.path("windows.yaml");
    let output = machine
        .run_command(&["--windows", path.to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).unwrap();
    for expected in [
        "windows.yaml:2:13: error: metrics[0].source: \"disk_utilisation\" is not a known metric; did you mean disk_utilization?",
        "windows.yaml:3:37: error: metrics[1].window: window is \"avg_2m\"",
    ] {
        assert!(error.contains(expected), "{expected} is missing in {error}");
    }
    let missing = machine
        .run_command(&["--windows", "/nowhere"])
        .output()
        .unwrap();
    assert_eq!(missing.status.code(), Some(2));
    let error = String::from_utf8(missing.stderr).unwrap();
    assert!(error.contains("failed to read /nowhere"), "{error}");
}

fn check(machine: &Machine, more: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(BINARY);
    command
        .arg("check")
        .arg(machine.path("policies"))
        .args(more);
    let Output { status, stdout, .. } = command.output().unwrap();
    (status.code(), String::from_utf8(stdout).unwrap())
}

#[test]
fn check_knows_the_windows_of_the_node_only_with_their_file() {
    let machine = Machine::new();
    machine.write("policies/gpu.yaml", &rule("avg_5m", 80));
    machine.write("windows.yaml", &file_of_windows(9400, "avg_5m"));
    let path = machine.path("windows.yaml");
    let file = ["--windows", path.to_str().unwrap()];
    let (code, text) = check(&machine, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("warning") && text.contains("name their file with --windows"),
        "{text}"
    );
    assert_eq!(check(&machine, &["--allow-warnings"]).0, Some(0));
    assert_eq!(check(&machine, &file), (Some(0), String::new()));
    // A name that is not among the windows is an error, with the nearest one.
    machine.write(
        "policies/gpu.yaml",
        &rule("avg_5m", 80).replace("gpu_usage", "gpu_usge"),
    );
    let (code, text) = check(&machine, &[file[0], file[1], "--allow-warnings"]);
    assert_eq!(code, Some(1));
    assert!(
        text.contains("error") && text.contains("did you mean gpu_usage_avg_5m?"),
        "{text}"
    );
    // What no window could be called is an error in any case.
    machine.write(
        "policies/gpu.yaml",
        &rule("avg_5m", 80).replace("gpu_usage_avg_5m", "gpu_usage"),
    );
    assert_eq!(check(&machine, &["--allow-warnings"]).0, Some(1));
}

#[test]
fn a_replay_evaluates_rules_on_windows() {
    let machine = Machine::new();
    machine.write("policies/gpu.yaml", &rule("avg_1m", 30));
    machine.write("windows.yaml", &file_of_windows(9400, "avg_1m"));
    let node = NodeFacts {
        cpus: 2,
        memory: Bytes(8 << 30),
        ..NodeFacts::default()
    };
    let time = jiff::Timestamp::UNIX_EPOCH;
    let period = Duration::from_secs(10);
    let header = TraceHeader::new("boot".to_owned(), BootTime::default(), time, &node, period);
    let trace = machine.path("trace");
    let mut recorder = TraceRecorder::create(&trace, header).unwrap();
    for second in 0..60 {
        let now = BootTime::from_nanos(second * 1_000_000_000);
        recorder
            .tick(now, &probed(now, 9400, 95.0), [].iter())
            .unwrap();
    }
    drop(recorder);
    let replay = |more: &[&str]| {
        let mut command = Command::new(BINARY);
        command
            .arg("replay")
            .arg(&trace)
            .arg("--policies")
            .arg(machine.path("policies"));
        command
            .args(more)
            .args(["--output", "json"])
            .output()
            .unwrap()
    };
    let path = machine.path("windows.yaml");
    let output = replay(&["--windows", path.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(
        text.contains("\"to\":\"Breached\",\"value\":95.0"),
        "{text}"
    );
    let without = replay(&[]);
    assert_eq!(without.status.code(), Some(2), "there is no rule to replay");
}
