//! What outlives a process of `plimsoll run`: rules whose manifests turned broken, and how loaded the node was.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod run_support;

use std::fs;
use std::time::Duration;

use nix::sys::signal::Signal;
use plimsoll::engine::metric::Resource;
use plimsoll::engine::sample::{CpuTimes, Sample};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::window::{NodeWindows, Span};
use plimsoll::node::clock::boot_time;
use plimsoll::node::machine::kept::{Kept, Worth};
use run_support::{Daemon, Machine, eventually, pod, policy, throttle};
use serde_json::Value;

#[test]
#[ignore = "a helper of the other tests: burns a CPU until it is killed"]
fn burn() {
    run_support::burn();
}

/// A machine whose pod is at its floor, and whose `plimsoll run` was stopped.
fn stopped_at_the_floor() -> (Machine, String) {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    let original = machine.quota("batch");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert!(daemon.stop(Signal::SIGTERM).success());
    assert_ne!(machine.quota("batch"), original);
    (machine, original)
}

/// The load ends, and what is in force is taken back by the rule that it is for.
fn ends_by_its_rule(machine: &Machine, daemon: &mut Daemon, original: &str) {
    machine.load.set(100);
    daemon.wait_for_state("Cooling");
    daemon.wait_for_state("Normal");
    eventually("the original", || {
        (machine.quota("batch") == original).then_some(())
    });
}

fn messages(kept: &Value) -> String {
    let findings = kept["findings"].as_array().unwrap().iter();
    findings
        .map(|finding| finding["message"].to_string())
        .collect()
}

#[test]
fn a_policy_file_that_turned_broken_loses_no_rule() {
    for broken in [
        "a: [".to_owned(),
        throttle().replace("stepCPURatio: 30", "stepCPURatio: 0"),
        throttle().replace("value: 1000", "value: -1"),
        throttle().replace("kind: NodeQOS", "kind: NodeQos"),
    ] {
        let (machine, original) = stopped_at_the_floor();
        let floor = machine.quota("batch");
        machine.write("policies/throttle.yaml", &broken);
        let mut daemon = machine.start(&[]);
        let kept = daemon.wait_for_change("policiesKept");
        assert!(messages(&kept).contains("in force"), "{kept}");
        let started = daemon.wait_for_change("started");
        assert_eq!(
            (&started["rules"], &started["adopted"]),
            (&1.into(), &1.into()),
            "{broken}"
        );
        assert_eq!(daemon.changes("policyProblem"), Vec::<&Value>::new());
        machine.shows(&["in force", "node/cpu"]);
        assert_eq!(machine.quota("batch"), floor);
        ends_by_its_rule(&machine, &mut daemon, &original);
        assert!(daemon.stop(Signal::SIGINT).success());
    }
}

#[test]
fn a_file_that_is_repaired_is_taken_over_and_until_then_good_edits_of_others_are() {
    let (machine, _) = stopped_at_the_floor();
    machine.write("policies/throttle.yaml", "a: [");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    let other = "apiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: other}\nspec:\n  rules:\n  \
                 - {name: load, actionName: act, metricRule: {name: cpu_load_1_min, value: 5000}}\n";
    machine.write("policies/other.yaml", other);
    let taken = daemon.wait_for_change("policiesTaken");
    assert_eq!(taken["rules"], 2, "the kept rule and the new one");
    // Once more over a restart: what was kept once is kept again.
    assert!(daemon.stop(Signal::SIGTERM).success());
    let mut daemon = machine.start(&[]);
    assert_eq!(daemon.wait_for_change("started")["rules"], 2);
    machine.write(
        "policies/throttle.yaml",
        &throttle().replace("value: 1000", "value: 900"),
    );
    daemon.wait_for_change("policiesTaken");
    eventually(
        "the repaired file is in force, and nothing is wrong",
        || {
            let state = machine.state(&["--output", "json"]).stdout;
            let state: Value = serde_json::from_slice(&state).unwrap();
            let mark = &state["rules"][0]["watermark"];
            let problems = state["problems"].as_array().unwrap();
            (*mark == 900.0 && problems.is_empty()).then_some(())
        },
    );
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_policy_that_was_deleted_on_purpose_is_gone() {
    let (machine, original) = stopped_at_the_floor();
    fs::remove_file(machine.path("policies/throttle.yaml")).unwrap();
    machine.write("policies/garbage.yaml", "a: [");
    let mut daemon = machine.start(&[]);
    let started = daemon.wait_for_change("started");
    assert_eq!(started["rules"], 0, "{daemon}");
    daemon.wait_for("the original", |line| {
        line["change"] == "throttle" && line["to"] == 100
    });
    assert_eq!(machine.quota("batch"), original);
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn the_command_line_has_its_say_over_kept_policies_too() {
    let (machine, original) = stopped_at_the_floor();
    machine.write("policies/throttle.yaml", "a: [");
    assert!(machine.restore().status.success());
    let mut daemon = machine.start(&["--preview"]);
    assert_eq!(daemon.wait_for_change("started")["rules"], 1);
    let step = daemon.wait_for_change("throttle");
    assert_eq!(step["would"], true);
    assert_eq!(machine.quota("batch"), original);
    assert!(daemon.stop(Signal::SIGTERM).success());
    let selecting = throttle().replace(
        "spec:\n  rules:",
        "spec:\n  selector: {matchLabels: {role: batch}}\n  rules:",
    );
    machine.write("policies/throttle.yaml", &selecting);
    let mut daemon = machine.start(&["--node-labels", "role=batch"]);
    assert_eq!(daemon.wait_for_change("started")["rules"], 1);
    assert!(daemon.stop(Signal::SIGINT).success());
    machine.write("policies/throttle.yaml", "a: [");
    for (role, rules) in [("role=web", 0), ("role=batch", 1)] {
        let mut daemon = machine.start(&["--node-labels", role]);
        assert_eq!(daemon.wait_for_change("started")["rules"], rules, "{role}");
        assert!(daemon.stop(Signal::SIGINT).success());
    }
}

#[test]
fn a_pod_whose_manifest_turned_broken_stays_looked_after_while_its_cgroup_is_the_same() {
    for broken in ["a: [".to_owned(), pod("batch", "/no/such")] {
        let (machine, original) = stopped_at_the_floor();
        let floor = machine.quota("batch");
        machine.write("pods/batch.yaml", &broken);
        let mut daemon = machine.start(&[]);
        let refused = daemon.wait_for_change("podRefused");
        let reason = refused["reason"].as_str().unwrap();
        assert!(
            reason.contains("default/batch as it was stays looked after"),
            "{reason}"
        );
        let started = daemon.wait_for_change("started");
        assert_eq!(
            (&started["pods"], &started["adopted"]),
            (&1.into(), &1.into())
        );
        assert_eq!(machine.quota("batch"), floor);
        ends_by_its_rule(&machine, &mut daemon, &original);
        assert!(daemon.stop(Signal::SIGTERM).success());
    }
}

#[test]
fn a_pod_whose_cgroup_was_made_anew_is_not_taken_for_the_one_before() {
    let machine = Machine::new();
    let cgroup = machine.cgroup("batch");
    machine.write("pods/batch.yaml", &pod("batch", &cgroup));
    machine.write("policies/throttle.yaml", &throttle());
    let mut daemon = machine.start(&[]);
    assert_eq!(daemon.wait_for_change("started")["pods"], 1);
    assert!(daemon.stop(Signal::SIGTERM).success());
    machine.write("pods/batch.yaml", "a: [");
    fs::remove_dir(machine.quota_file("batch").parent().unwrap()).unwrap();
    machine.cgroup("batch");
    let mut daemon = machine.start(&[]);
    assert_eq!(daemon.wait_for_change("started")["pods"], 0);
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_pod_whose_manifest_breaks_while_it_is_throttled_is_not_let_go() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    let original = machine.quota("batch");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_change("fileSet");
    machine.write("pods/batch.yaml", "a: [");
    daemon.wait_for_change("podRefused");
    assert_eq!(daemon.changes("podsTaken").last().unwrap()["pods"], 1);
    machine.load.set(100);
    daemon.wait_for_state("Cooling");
    assert_ne!(machine.quota("batch"), original, "let go by its rule alone");
    daemon.wait_for_state("Normal");
    fs::remove_file(machine.path("pods/batch.yaml")).unwrap();
    daemon.wait_for("the pod is gone", |line| {
        line["change"] == "podsTaken" && line["pods"] == 0
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    assert_eq!(machine.quota("batch"), original);
}

#[test]
fn a_pod_that_was_only_in_the_idle_class_is_limited_by_its_containers_after_a_restart() {
    let mut machine = Machine::new();
    if machine.hierarchy.is_v2() {
        eprintln!("skipped: on cgroup v2 the pod's own quota holds every container");
        return;
    }
    let batch = machine.cgroup("batch");
    machine.write("pods/batch.yaml", &pod("batch", &batch));
    let container = machine.cgroup("batch/0");
    fs::write(machine.quota_file("batch/0"), "100000").unwrap();
    machine.burn(&container, "burn");
    let act = |least: u32| {
        let throttle = format!("cpuThrottle: {{minCPURatio: {least}, idle: true}}");
        let action = format!("{{coolDownSeconds: 1, throttle: {{{throttle}}}}}");
        machine.write("policies/act.yaml", &policy(&action, "throttle", 2, 1000));
    };
    act(100);
    machine.load.set(1900);
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("throttle");
    eventually("the pod is in the idle class, and no more", || {
        machine.journal().contains("cpu.idle").then_some(())
    });
    assert!(!machine.journal().contains("cfs_quota"));
    assert!(daemon.stop(Signal::SIGTERM).success());
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    act(10);
    eventually("its container is limited", || {
        (machine.quota("batch/0") != "100000").then_some(())
    });
    assert_eq!(machine.quota("batch"), "-1");
    machine.load.set(100);
    eventually("the original", || {
        (machine.quota("batch/0") == "100000").then_some(())
    });
    assert_eq!(machine.quota("batch"), "-1");
    assert!(daemon.stop(Signal::SIGTERM).success());
}

#[test]
fn what_another_version_kept_is_said_and_not_used() {
    let (machine, original) = stopped_at_the_floor();
    for file in ["policies.json", "pods.json"] {
        let path = machine.path("state").join(file);
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("{\"version\":1,"), "{text}");
        fs::write(&path, text.replacen(":1,", ":99,", 1)).unwrap();
    }
    machine.write("policies/throttle.yaml", "a: [");
    let output = machine.run_command(&["--for", "3s"]).output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    for file in ["policies.json", "pods.json"] {
        assert!(
            log.contains(&format!("{file}, which has format 99, not 1")),
            "{log}"
        );
    }
    let events = String::from_utf8(output.stdout).unwrap();
    assert!(events.contains("\"rules\":0"), "{events}");
    assert_eq!(machine.quota("batch"), original);
}

#[test]
fn a_preview_over_what_is_in_force_is_refused_and_changes_nothing() {
    let (machine, original) = stopped_at_the_floor();
    let (floor, journal) = (machine.quota("batch"), machine.journal());
    let output = machine.run_command(&["--preview"]).output().unwrap();
    let why = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{why}");
    for word in ["1 cgroup file is limited", "--restore", "--state-dir"] {
        assert!(why.contains(word), "{why}");
    }
    assert_eq!(
        (machine.quota("batch"), machine.journal()),
        (floor, journal)
    );
    assert!(machine.restore().status.success());
    let mut daemon = machine.start(&["--preview"]);
    daemon.wait_for("a step", |line| line["would"] == true);
    assert_eq!(machine.quota("batch"), original);
    assert!(daemon.stop(Signal::SIGINT).success());
}

/// Seven minutes with one of two CPUs busy.
fn half_busy() -> NodeWindows {
    let begin = BootTime::from_nanos(boot_time().as_nanos() - 420_000_000_000);
    let mut windows = NodeWindows::default();
    for second in 0..420 {
        let mut sample = Sample {
            at: begin + Duration::from_secs(second),
            ..Sample::default()
        };
        sample.node.cpu = Some(CpuTimes {
            busy: second * 1_000_000_000,
            idle: 0,
            online: 2,
        });
        windows.take(&sample);
    }
    windows
}

#[test]
fn a_restart_does_not_forget_how_loaded_the_node_was() {
    let machine = Machine::new();
    let window = policy("{disableScheduling: {}}", "throttle", 1, 40)
        .replace("cpu_total_usage", "cpu_usage_avg_5m");
    machine.write("policies/window.yaml", &window);
    fs::create_dir(machine.path("state")).unwrap();
    let kept = || Kept::new(&machine.path("state"), "windows.json", 1, Worth::ThisBoot).unwrap();
    kept().keep(&half_busy()).unwrap();
    let mut daemon = machine.start(&[]);
    let breached = daemon.wait_for_state("Breached");
    let value = breached["value"].as_f64().unwrap();
    assert!((45.0..51.0).contains(&value), "{breached}");
    let before: NodeWindows = kept().read().unwrap().unwrap();
    assert!(daemon.stop(Signal::SIGTERM).success());
    let after: NodeWindows = kept().read().unwrap().unwrap();
    assert_ne!(before, after, "what was seen since is kept at the end");
    let average = |windows: NodeWindows| {
        let windows = windows.resumed().unwrap();
        windows.of(Resource::Cpu).average(Span::FiveMinutes).figures
    };
    assert!(average(after).is_some());
}
