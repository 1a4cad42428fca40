//! `plimsoll run` throttles real cgroups and restores them however it stops.

use std::fs;
use std::time::Duration;

use crate::run_support::{Machine, eventually, throttle};
use nix::sys::signal::Signal;

/// A machine with one burning pod under the throttle policy.
fn machine() -> Machine {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    machine
}

/// Starts a daemon and waits until it has throttled the pod.
fn throttled(machine: &Machine, more: &[&str]) -> crate::run_support::Daemon {
    let mut daemon = machine.start(more);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_state("Breached");
    daemon.wait_for_change("throttle");
    daemon.wait_for_change("fileSet");
    daemon
}

#[test]
fn an_overloaded_machine_is_throttled_in_steps_and_restored_exactly() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut daemon = throttled(&machine, &[]);
    let breach = daemon
        .events
        .iter()
        .find(|line| line["change"] == "state")
        .unwrap();
    assert_eq!(breach["rule"], "node/cpu");
    assert_eq!(breach["metric"], "cpu_total_usage");
    assert!(breach["value"].as_f64().unwrap() > 1000.0, "{breach}");
    assert_eq!(breach["threshold"], 1000.0);
    let step = daemon.changes("throttle")[0].clone();
    assert_eq!(step["podName"], "default/batch");
    assert_eq!((&step["from"], &step["to"]), (&100.into(), &70.into()));
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert_ne!(machine.quota("batch"), original);
    assert!(machine.journal().contains("batch"));

    machine.load.set(100);
    daemon.wait_for_state("Cooling");
    daemon.wait_for_state("Normal");
    daemon.wait_for("the original", |line| {
        line["change"] == "throttle" && line["to"] == 100
    });
    eventually("the original is restored", || {
        (machine.quota("batch") == original).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    assert!(!machine.journal().contains("batch"));
}

#[test]
fn an_interrupt_restores_everything() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut daemon = throttled(&machine, &[]);
    assert!(daemon.stop(Signal::SIGINT).success());
    assert_eq!(machine.quota("batch"), original);
    assert!(!machine.journal().contains("batch"));
    assert_eq!(daemon.changes("stopped")[0]["leftThrottled"], 0);
}

#[test]
fn sigterm_leaves_the_throttle_and_the_next_process_adopts_it() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut first = throttled(&machine, &[]);
    first.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert!(first.stop(Signal::SIGTERM).success());
    let left = machine.quota("batch");
    assert_ne!(left, original);
    assert_eq!(first.changes("stopped")[0]["leftThrottled"], 1);

    let mut second = machine.start(&[]);
    let started = second.wait_for_change("started");
    assert_eq!(started["adopted"], 1);
    assert_eq!(machine.quota("batch"), left);
    machine.load.set(100);
    let restored = second.wait_for("the original", |line| {
        line["change"] == "throttle" && line["to"] == 100
    });
    assert_eq!(restored["podName"], "default/batch");
    eventually("the original is restored", || {
        (machine.quota("batch") == original).then_some(())
    });
    assert!(second.stop(Signal::SIGINT).success());
    assert_eq!(machine.quota("batch"), original);
}

fn state_output(machine: &Machine) -> String {
    String::from_utf8(machine.state(&[]).stdout).unwrap()
}

#[test]
fn what_a_killed_process_left_is_restored_from_the_journal() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut daemon = throttled(&machine, &[]);
    machine.wait_for_state_output(&["THROTTLED"]);
    assert!(!daemon.stop(Signal::SIGKILL).success());
    assert_ne!(machine.quota("batch"), original);
    fs::remove_dir_all(machine.path("policies")).unwrap();
    fs::remove_dir_all(machine.path("pods")).unwrap();

    let restored = machine.restore();
    let output = String::from_utf8(restored.stdout).unwrap();
    assert!(restored.status.success(), "{output}");
    assert!(output.contains("restored to"), "{output}");
    assert_eq!(machine.quota("batch"), original);
    assert_eq!(state_output(&machine), "", "nothing is in force");
    let again = String::from_utf8(machine.restore().stdout).unwrap();
    assert!(again.contains("\"files\":0"), "{again}");
}

#[test]
fn a_restore_beside_a_running_process_is_refused() {
    let machine = machine();
    let _daemon = throttled(&machine, &[]);
    let refused = machine.restore();
    assert_eq!(refused.status.code(), Some(2));
    let why = String::from_utf8(refused.stderr).unwrap();
    assert!(why.contains("is in use by process"), "{why}");
}

#[test]
fn it_stops_after_the_given_time_and_restores_everything() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut daemon = throttled(&machine, &["--for", "3s"]);
    assert!(daemon.wait().success());
    assert_eq!(machine.quota("batch"), original);
    assert_eq!(daemon.changes("stopped").len(), 1);
}

#[test]
fn a_preview_reports_what_it_would_do_and_changes_nothing() {
    let machine = machine();
    let original = machine.quota("batch");
    let before = fs::metadata(machine.quota_file("batch"))
        .unwrap()
        .modified()
        .unwrap();
    let mut daemon = machine.start(&["--preview"]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    let step = daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert_eq!(step["would"], true);
    machine.wait_for_state_output(&["WOULD BE IN FORCE (Preview)"]);
    assert_eq!(machine.quota("batch"), original);
    assert!(daemon.changes("fileSet").is_empty());
    assert!(daemon.stop(Signal::SIGINT).success());
    let after = fs::metadata(machine.quota_file("batch"))
        .unwrap()
        .modified()
        .unwrap();
    assert_eq!(before, after);
}

#[test]
fn a_preview_of_standing_quality_of_service_changes_nothing() {
    let machine = machine();
    let standing = "apiVersion: ensurance.crane.io/v1alpha1\nkind: PodQOS\nmetadata: {name: standing}\nspec:\n  \
                    labelSelector: {}\n  resourceQOS: {cpuQOS: {cpuPriority: 7}}\n";
    machine.write("policies/throttle.yaml", standing);
    let mut daemon = machine.start(&["--preview"]);
    let step = daemon.wait_for_change("throttle");
    assert_eq!(step["would"], true, "{step}");
    assert!(daemon.stop(Signal::SIGINT).success());
    assert!(daemon.changes("fileSet").is_empty());
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("fileSet");
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_bad_edit_keeps_the_last_good_policies_and_a_good_one_is_applied() {
    let machine = machine();
    let original = machine.quota("batch");
    let mut daemon = throttled(&machine, &[]);
    let bad = throttle().replace("stepCPURatio: 30", "stepCPURatio: 0");
    machine.write("policies/throttle.yaml", &bad);
    let event = daemon.wait_for_change("policiesRejected");
    let finding = &event["findings"][0];
    assert!(
        finding["file"].as_str().unwrap().ends_with("throttle.yaml"),
        "{event}"
    );
    assert!(finding["line"].as_u64().unwrap() > 0, "{event}");
    assert!(
        finding["message"]
            .as_str()
            .unwrap()
            .contains("stepCPURatio"),
        "{event}"
    );
    machine.write("policies/throttle.yaml", "a: [");
    daemon.wait_for_change("policiesRejected");
    assert!(
        daemon
            .changes("state")
            .iter()
            .all(|line| line["to"] != "Normal")
    );

    // The throttle of a rule that stays is not released.
    let good = throttle().replace("name: cpu_total_usage", "\n      name: cpu_total_usage");
    let good = good.replace("restoreThreshold: 2", "restoreThreshold: 3");
    machine.write("policies/throttle.yaml", &good);
    daemon.wait_for_change("policiesApplied");
    assert_ne!(machine.quota("batch"), original);
    let states = |daemon: &crate::run_support::Daemon| -> Vec<String> {
        let states = daemon.changes("state").into_iter();
        states.map(|line| line["to"].to_string()).collect()
    };
    assert_eq!(states(&daemon), ["\"Breached\""]);
    machine.load.set(100);
    daemon.wait_for_state("Normal");
    assert_eq!(
        states(&daemon),
        ["\"Breached\"", "\"Cooling\"", "\"Normal\""]
    );
    daemon.wait_for("the original", |line| {
        line["change"] == "throttle" && line["to"] == 100
    });
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_new_pod_is_managed_and_a_deleted_one_is_restored() {
    let mut machine = machine();
    let mut daemon = throttled(&machine, &[]);
    machine.burning_pod("late");
    let taken = daemon.wait_for_change("podsChanged");
    assert_eq!(taken["pods"], 2);
    daemon.wait_for("the late pod", |line| {
        line["change"] == "throttle" && line["podName"] == "default/late"
    });
    fs::remove_file(machine.path("pods/late.yaml")).unwrap();
    let taken = daemon.wait_for_change("podsChanged");
    assert_eq!(taken["pods"], 1);
    // No rule throttles it any more.
    let original = if machine.hierarchy.is_v2() {
        "max 100000"
    } else {
        "-1"
    };
    eventually("it is restored", || {
        (machine.quota("late") == original).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    assert_eq!(machine.quota("batch"), original);
}

#[test]
fn every_event_has_time_and_change_and_a_breach_is_handled_in_time() {
    let machine = machine();
    let mut daemon = throttled(&machine, &[]);
    assert!(daemon.stop(Signal::SIGINT).success());
    for line in &daemon.events {
        assert!(
            line["time"]
                .as_str()
                .unwrap()
                .parse::<jiff::Timestamp>()
                .is_ok(),
            "{line}"
        );
        assert!(
            line["at"].as_u64().is_some() && line["change"].is_string(),
            "{line}"
        );
    }
    let breach = daemon.changes("state")[0]["at"].as_u64().unwrap();
    let write = daemon.changes("fileSet")[0]["at"].as_u64().unwrap();
    assert!(Duration::from_nanos(write - breach) < Duration::from_millis(600));
}
