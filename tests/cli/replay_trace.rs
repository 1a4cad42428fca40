//! `plimsoll replay` of recorded and of broken traces.

use std::fs;
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use crate::run_support::{BINARY, Machine, throttle};
use nix::sys::signal::Signal;
use plimsoll::engine::Engine;
use plimsoll::engine::plan::{Plan, PlanChange, Transition};
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::sample::{CpuTimes, NodeMemory, Sample};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::Bytes;
use plimsoll::standalone::policies;
use plimsoll::trace::TraceHeader;
use plimsoll::trace::record::TraceRecorder;
use plimsoll::trace::replay::Replay;
use proptest::prelude::*;
use serde_json::{Value, json};

fn replay(trace: &Path, policies: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(BINARY);
    command
        .arg("replay")
        .arg(trace)
        .arg("--policies")
        .arg(policies);
    command.args(more).output().unwrap()
}

/// State transitions as (from, to, nanoseconds since boot).
fn states<'a>(lines: impl IntoIterator<Item = &'a Value>) -> Vec<(String, String, u64)> {
    let states = lines.into_iter().filter(|line| line["change"] == "state");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    states
        .map(|line| {
            (
                text(&line["from"]),
                text(&line["to"]),
                line["at"].as_u64().unwrap(),
            )
        })
        .collect()
}

#[test]
fn a_replay_gives_the_recorded_states_and_the_throttled_pods() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    let trace = machine.path("trace");
    let mut daemon = machine.start(&["--record", trace.to_str().unwrap()]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_state("Breached");
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    machine.load.set(100);
    daemon.wait_for_state("Normal");
    assert!(daemon.stop(Signal::SIGINT).success());

    let replayed = replay(&trace, &machine.path("policies"), &["--output", "json"]);
    assert!(replayed.status.success(), "{replayed:?}");
    let text = String::from_utf8(replayed.stdout.clone()).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(states(&lines), states(&daemon.events));
    assert!(
        lines[..lines.len() - 1]
            .iter()
            .all(|line| line["would"] == true)
    );
    let summary = &lines.last().unwrap()["summary"]["rules"]["node/cpu"];
    assert_eq!(summary["breaches"], 1);
    assert!(summary["stepsDown"].as_u64().unwrap() >= 3, "{summary}");

    let again = replay(&trace, &machine.path("policies"), &["--output", "json"]);
    assert_eq!(again.stdout, replayed.stdout, "a replay is deterministic");
    let text = replay(&trace, &machine.path("policies"), &[]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("nothing of this was done") && text.contains("pods: default/batch"),
        "{text}"
    );
    assert_eq!(machine.journal().lines().count(), 2, "nothing is in force");

    // A truncated trace is replayed up to the incomplete line, which is named.
    let whole = fs::read_to_string(&trace).unwrap();
    let cut = &whole[..whole.trim_end().len() - 20];
    fs::write(&trace, cut).unwrap();
    let broken = replay(&trace, &machine.path("policies"), &[]);
    let why = String::from_utf8(broken.stderr).unwrap();
    assert_eq!(broken.status.code(), Some(2));
    assert!(
        why.contains(&format!(
            "{}:{}: error: this line is cut off",
            trace.display(),
            cut.lines().count()
        )),
        "{why}"
    );
}

#[test]
fn policies_without_a_rule_are_refused_and_errors_give_exit_code_1() {
    let dir = tempfile::tempdir().unwrap();
    let (policies, trace) = (dir.path().join("p.yaml"), dir.path().join("trace"));
    let header = r#"{"header":{"version":1,"plimsoll":"0","bootId":"b","at":0,"time":"2026-01-01T00:00:00Z","node":{"cpus":2,"memory":1}}}"#;
    fs::write(&trace, format!("{header}\n")).unwrap();
    let flawed = throttle() + "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: Nonsense\n";
    let without_kind = throttle() + "---\napiVersion: ensurance.crane.io/v1alpha1\n";
    let table = [
        ("", 2, "there is no rule to replay in "),
        ("spec: [", 2, "is not valid YAML"),
        (flawed.as_str(), 1, "there is no kind Nonsense"),
        (
            without_kind.as_str(),
            1,
            "kind is missing; write one of AvoidanceAction, NodeQOS, PodQOS",
        ),
    ];
    for (text, code, why) in table {
        fs::write(&policies, text).unwrap();
        let replayed = replay(&trace, &policies, &[]);
        let errors = String::from_utf8(replayed.stderr).unwrap();
        assert_eq!(replayed.status.code(), Some(code), "{text}: {errors}");
        assert!(errors.contains(why), "{text}: {errors}");
    }
}

#[test]
fn an_invalid_trace_is_refused_with_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let policies = dir.path().join("p.yaml");
    fs::write(&policies, throttle()).unwrap();
    let header = r#"{"header":{"version":1,"plimsoll":"0","bootId":"b","at":0,"time":"2026-01-01T00:00:00Z","node":{"cpus":2,"memory":1}}}"#;
    let tick =
        |now: u64| format!(r#"{{"tick":{{"now":{now},"sample":{{"at":{now},"node":{{}}}}}}}}"#);
    let table = [
        (String::new(), "trace: error: the trace is empty"),
        (
            "garbage\n".to_owned(),
            "trace:1: error: this is not the header",
        ),
        (
            format!("{}\n", tick(1)),
            "trace:1: error: this is not the header",
        ),
        (
            header.replace("\"version\":1", "\"version\":9"),
            "trace:1: error: the trace has format version 9",
        ),
        (
            format!("{header}\n{}\n{{\"tick\":3}}\n", tick(1)),
            "trace:3:9: error: this is not a line of a trace",
        ),
        (
            format!("{header}\n\u{0}\u{0}\n"),
            "trace:2:1: error: this is not a line of a trace",
        ),
        (
            format!("{header}\n{header}\n"),
            "trace:2: error: this is not a line of a trace: a second header",
        ),
        (
            format!("{header}\n{}\n{}\n", tick(5), tick(4)),
            "trace:3: error: this line is earlier",
        ),
        (
            format!("{header}\n{}\n{{\"tick\":{{\"no", tick(5)),
            "trace:3: error: this line is cut off",
        ),
    ];
    let trace = dir.path().join("trace");
    for (text, words) in table {
        fs::write(&trace, &text).unwrap();
        let output = replay(&trace, &policies, &[]);
        let why = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(why.contains(words), "`{words}` is not in: {why}");
    }
    fs::write(&trace, format!("{header}\n{}\n", tick(5))).unwrap();
    assert!(replay(&trace, &policies, &[]).status.success());
    let output = replay(&trace, &dir.path().join("none.yaml"), &[]);
    let why = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{why}");
    assert!(why.contains("none.yaml"), "{why}");
    let absent = replay(Path::new("/no/such/trace"), &policies, &[]);
    assert_eq!(absent.status.code(), Some(2));
}

#[test]
fn a_replay_follows_the_recorded_clock() {
    let dir = tempfile::tempdir().unwrap();
    let (policies, trace) = (dir.path().join("p.yaml"), dir.path().join("trace"));
    let field = "    activeDuring: [22:00-06:00 Europe/Berlin]\n    actionName";
    fs::write(&policies, throttle().replacen("    actionName", field, 1)).unwrap();
    // The clock is set from 05:59 to 12:00 and back to 22:00 between samples that are one second apart; then a recording of a
    // version without the time in its samples.
    let clocks = [
        [
            "04:58:58Z",
            "04:58:59Z",
            "11:00:00Z",
            "11:00:01Z",
            "21:00:00Z",
        ]
        .map(Some),
        [None; 5],
    ];
    let expected = [
        vec![("outsideHours", "11:00:00Z"), ("withinHours", "21:00:00Z")],
        vec![("outsideHours", "05:00:00Z")],
    ];
    for (clocks, expected) in clocks.into_iter().zip(expected) {
        let header = r#"{"header":{"version":1,"plimsoll":"0","bootId":"b","at":0,"time":"2026-01-15T04:59:57Z","node":{"cpus":2,"memory":1}}}"#;
        let mut text = format!("{header}\n");
        for (second, clock) in (1_u64..).zip(clocks) {
            let at = second * 1_000_000_000;
            let mut sample =
                json!({"at": at, "node": {"cpu": {"busy": at, "idle": at, "online": 2}}});
            if let Some(clock) = clock {
                sample["time"] = json!(format!("2026-01-15T{clock}"));
            }
            let tick = json!({"tick": {"now": at, "sample": sample}});
            text.push_str(&tick.to_string());
            text.push('\n');
        }
        fs::write(&trace, text).unwrap();
        let output = replay(&trace, &policies, &["--output", "json", "--period", "1s"]);
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let lines = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        let hours = lines.filter_map(|line| {
            let change = line["change"].as_str()?.to_owned();
            let time = line["time"]
                .as_str()?
                .strip_prefix("2026-01-15T")?
                .to_owned();
            change.ends_with("Hours").then_some((change, time))
        });
        let hours: Vec<_> = hours.collect();
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(change, time)| (change.to_owned(), time.to_owned()))
            .collect();
        assert_eq!(hours, expected, "{text}");
    }
}

const PERIOD: Duration = Duration::from_secs(1);

/// A node of two CPUs that used `busy` millicores in each second; `None`: no sample of it.
fn samples(busy: &[Option<u16>]) -> Vec<(BootTime, Sample)> {
    let mut now = BootTime::from_nanos(1_000_000_000_000);
    let mut cpu = CpuTimes {
        online: 2,
        ..CpuTimes::default()
    };
    let mut samples = Vec::new();
    for milli in busy {
        now = now + PERIOD;
        let used = u64::from(milli.unwrap_or(0)) * 1_000_000;
        cpu.busy += used;
        cpu.idle += 2_000_000_000 - used;
        let mut sample = Sample {
            at: now,
            ..Sample::default()
        };
        sample.node.memory = Some(NodeMemory {
            total: Bytes(8 << 30),
            available: Bytes(6 << 30),
            ..NodeMemory::default()
        });
        sample.node.cpu = milli.is_some().then_some(cpu);
        samples.push((now, sample));
    }
    samples
}

fn state_changes(transitions: &[Transition]) -> Vec<Transition> {
    let state = |it: &&Transition| matches!(it.change, PlanChange::State { .. });
    let real = |it: &Transition| Transition {
        would: false,
        ..it.clone()
    };
    transitions.iter().filter(state).map(real).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_replay_of_any_load_gives_the_recorded_states(
        busy in prop::collection::vec(prop::option::weighted(0.9, 0_u16..2000), 1..60)
    ) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p.yaml");
        fs::write(&file, throttle()).unwrap();
        let load = |node: &NodeFacts| policies::load(std::slice::from_ref(&file), node, false, &[]).policy;

        let path = dir.path().join("trace");
        let node = NodeFacts { cpus: 2, memory: Bytes(8 << 30), ..NodeFacts::default() };
        let time = jiff::Timestamp::UNIX_EPOCH;
        let header = TraceHeader::new("boot".to_owned(), BootTime::default(), time, &node, PERIOD);
        let mut recorder = TraceRecorder::create(&path, header).unwrap();
        let mut engine = Engine::new().with_period(PERIOD);
        engine.set_policy(Arc::new(load(&node)));
        let (mut plan, mut recorded) = (Plan::default(), Vec::new());
        for (now, sample) in samples(&busy) {
            engine.step(now, &sample, &mut plan);
            recorder.tick(now, &sample, plan.transitions.iter()).unwrap();
            recorded.extend(state_changes(&plan.transitions));
        }

        let trace = BufReader::new(fs::File::open(&path).unwrap());
        let (_, mut replay) = Replay::open(trace, std::sync::Arc::default(), None, |header| load(&NodeFacts::from(&header.node))).unwrap();
        let mut replayed = Vec::new();
        while replay.step().unwrap() {
            replayed.extend(state_changes(replay.transitions()));
        }
        prop_assert_eq!(replayed, recorded);
    }
}
