//! `plimsoll run` keeps its inputs and the node's load over a restart.

use std::fs;
use std::time::Duration;

use crate::run_support::{Daemon, Machine, eventually, pod, policy, throttle};
use nix::sys::signal::Signal;
use plimsoll::clock::boot_time;
use plimsoll::engine::metric::Resource;
use plimsoll::engine::sample::{CpuTimes, Sample};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::window::{NodeWindows, Span};
use plimsoll::node::machine::saved_file::{SavedFile, Validity};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// A machine whose pod is throttled to its floor, after `plimsoll run` was terminated.
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

/// Ends the load and waits until the rule restores the pod.
fn restored_by_its_rule(machine: &Machine, daemon: &mut Daemon, original: &str) {
    machine.load.set(100);
    daemon.wait_for_state("Cooling");
    daemon.wait_for_state("Normal");
    eventually("the original is restored", || {
        (machine.quota("batch") == original).then_some(())
    });
}

fn messages(event: &Value) -> String {
    let findings = event["findings"].as_array().unwrap().iter();
    findings
        .map(|finding| finding["message"].to_string())
        .collect()
}

#[test]
fn a_policy_file_that_is_broken_at_a_restart_loses_no_rule() {
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
        let event = daemon.wait_for_change("policiesRejected");
        assert!(messages(&event).contains("in force"), "{event}");
        let started = daemon.wait_for_change("started");
        assert_eq!(
            (&started["rules"], &started["adopted"]),
            (&1.into(), &1.into()),
            "{broken}"
        );
        assert_eq!(daemon.changes("policyProblem"), Vec::<&Value>::new());
        machine.wait_for_state_output(&["in force", "node/cpu"]);
        assert_eq!(machine.quota("batch"), floor);
        restored_by_its_rule(&machine, &mut daemon, &original);
        assert!(daemon.stop(Signal::SIGINT).success());
    }
}

#[test]
fn good_edits_apply_beside_a_broken_file_and_so_does_its_repair() {
    let (machine, _) = stopped_at_the_floor();
    machine.write("policies/throttle.yaml", "a: [");
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    let other = "apiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: other}\nspec:\n  rules:\n  \
                 - {name: load, actionName: act, metricRule: {name: cpu_load_1_min, value: 5000}}\n";
    machine.write("policies/other.yaml", other);
    let taken = daemon.wait_for_change("policiesApplied");
    assert_eq!(taken["rules"], 2, "the former rule and the new one");
    // The former rule survives a second restart.
    assert!(daemon.stop(Signal::SIGTERM).success());
    let mut daemon = machine.start(&[]);
    assert_eq!(daemon.wait_for_change("started")["rules"], 2);
    machine.write(
        "policies/throttle.yaml",
        &throttle().replace("value: 1000", "value: 900"),
    );
    daemon.wait_for_change("policiesApplied");
    eventually("the repaired file is in force without problems", || {
        let state = machine.state(&["--output", "json"]).stdout;
        let state: Value = serde_json::from_slice(&state).unwrap();
        let threshold = &state["rules"][0]["threshold"];
        let problems = state["problems"].as_array().unwrap();
        (*threshold == 900.0 && problems.is_empty()).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_deleted_policy_is_not_restored_from_the_saved_ones() {
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
fn the_command_line_overrides_saved_policies() {
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
fn a_pod_with_a_broken_manifest_stays_managed_in_the_same_cgroup() {
    for broken in ["a: [".to_owned(), pod("batch", "/no/such")] {
        let (machine, original) = stopped_at_the_floor();
        let floor = machine.quota("batch");
        machine.write("pods/batch.yaml", &broken);
        let mut daemon = machine.start(&[]);
        let refused = daemon.wait_for_change("podRefused");
        let reason = refused["reason"].as_str().unwrap();
        assert!(
            reason.contains("the former default/batch stays managed"),
            "{reason}"
        );
        let started = daemon.wait_for_change("started");
        assert_eq!(
            (&started["pods"], &started["adopted"]),
            (&1.into(), &1.into())
        );
        assert_eq!(machine.quota("batch"), floor);
        restored_by_its_rule(&machine, &mut daemon, &original);
        assert!(daemon.stop(Signal::SIGTERM).success());
    }
}

#[test]
fn a_recreated_cgroup_is_not_the_former_pod() {
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
fn a_throttled_pod_whose_manifest_breaks_stays_throttled() {
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
    assert_eq!(daemon.changes("podsChanged").last().unwrap()["pods"], 1);
    machine.load.set(100);
    daemon.wait_for_state("Cooling");
    assert_ne!(
        machine.quota("batch"),
        original,
        "only its rule restores it"
    );
    daemon.wait_for_state("Normal");
    fs::remove_file(machine.path("pods/batch.yaml")).unwrap();
    daemon.wait_for("the pod is gone", |line| {
        line["change"] == "podsChanged" && line["pods"] == 0
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    assert_eq!(machine.quota("batch"), original);
}

#[test]
fn an_idle_class_pod_is_limited_by_its_containers_after_a_restart() {
    let mut machine = Machine::new();
    if machine.hierarchy.is_v2() {
        eprintln!("skipped: on cgroup v2 the pod's own quota limits every container");
        return;
    }
    let batch = machine.cgroup("batch");
    machine.write("pods/batch.yaml", &pod("batch", &batch));
    let container = machine.cgroup("batch/0");
    fs::write(machine.quota_file("batch/0"), "100000").unwrap();
    machine.burn(&container);
    let set_action = |min_ratio: u32| {
        let throttle = format!("cpuThrottle: {{minCPURatio: {min_ratio}, idle: true}}");
        let action = format!("{{coolDownSeconds: 1, throttle: {{{throttle}}}}}");
        machine.write("policies/act.yaml", &policy(&action, "throttle", 2, 1000));
    };
    set_action(100);
    machine.load.set(1900);
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("throttle");
    eventually("the pod is in the idle class only", || {
        machine.journal().contains("cpu.idle").then_some(())
    });
    assert!(!machine.journal().contains("cfs_quota"));
    assert!(daemon.stop(Signal::SIGTERM).success());
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    set_action(10);
    eventually("its container is limited", || {
        (machine.quota("batch/0") != "100000").then_some(())
    });
    assert_eq!(machine.quota("batch"), "-1");
    machine.load.set(100);
    eventually("the original is restored", || {
        (machine.quota("batch/0") == "100000").then_some(())
    });
    assert_eq!(machine.quota("batch"), "-1");
    assert!(daemon.stop(Signal::SIGTERM).success());
}

#[test]
fn files_of_another_format_version_are_logged_and_ignored() {
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
fn a_preview_while_something_is_in_force_is_refused() {
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
    let start = BootTime::from_nanos(boot_time().as_nanos() - 420_000_000_000);
    let mut windows = NodeWindows::default();
    for second in 0..420 {
        let mut sample = Sample {
            at: start + Duration::from_secs(second),
            ..Sample::default()
        };
        sample.node.cpu = Some(CpuTimes {
            busy: second * 1_000_000_000,
            idle: 0,
            online: 2,
        });
        windows.add(&sample);
    }
    windows
}

fn windows_file<T: Serialize + DeserializeOwned>(machine: &Machine, format: u32) -> SavedFile<T> {
    let dir = machine.path("state");
    SavedFile::new(&dir, "windows.json", format, Validity::ThisBoot).unwrap()
}

#[test]
fn windows_saved_in_an_earlier_format_start_over() {
    let machine = Machine::new();
    let window = policy("{disableScheduling: {}}", "throttle", 1, 40)
        .replace("cpu_total_usage", "cpu_usage_avg_5m");
    machine.write("policies/window.yaml", &window);
    fs::create_dir(machine.path("state")).unwrap();
    let slots = json!({"last": null, "cpu": {"slots": [1, 2]}, "memory": {"slots": [1, 2]}});
    windows_file(&machine, 1).save(&slots).unwrap();
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    assert!(daemon.stop(Signal::SIGTERM).success());
    let after = windows_file::<NodeWindows>(&machine, 2).read().unwrap();
    assert!(after.unwrap().resumed().is_some());
}

#[test]
fn a_restart_keeps_the_load_windows() {
    let machine = Machine::new();
    let window = policy("{disableScheduling: {}}", "throttle", 1, 40)
        .replace("cpu_total_usage", "cpu_usage_avg_5m");
    machine.write("policies/window.yaml", &window);
    fs::create_dir(machine.path("state")).unwrap();
    let saved = || windows_file(&machine, 2);
    saved().save(&half_busy()).unwrap();
    let mut daemon = machine.start(&[]);
    let breached = daemon.wait_for_state("Breached");
    let value = breached["value"].as_f64().unwrap();
    assert!((45.0..51.0).contains(&value), "{breached}");
    let before: NodeWindows = saved().read().unwrap().unwrap();
    assert!(daemon.stop(Signal::SIGTERM).success());
    let after: NodeWindows = saved().read().unwrap().unwrap();
    let text = |windows: &NodeWindows| serde_json::to_string(windows).unwrap();
    assert_ne!(
        text(&before),
        text(&after),
        "newer samples are saved at the end"
    );
    let average = |windows: NodeWindows| {
        let windows = windows.resumed().unwrap();
        windows.of(Resource::Cpu).average(Span::FiveMinutes).value
    };
    assert!(average(after).is_some());
}
