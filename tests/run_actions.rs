//! `plimsoll run` evicts through cgroups, keeps new work away through a state file, and takes units as pods.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod run_support;

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use nix::sys::signal::Signal;
use run_support::{Machine, eventually, policy, throttle};
use serde_json::Value;

#[test]
#[ignore = "a helper of the other tests: burns a CPU until it is killed"]
fn burn() {
    run_support::burn();
}

fn evict(more: &str) -> String {
    let eviction = format!("{{coolDownSeconds: 1, eviction: {{{more}}}}}");
    policy(&eviction, "evict", 2, 1000)
}

/// The pod has a controller, as one of a job launcher would.
fn owned(manifest: &str) -> String {
    let owner = "  ownerReferences: [{apiVersion: batch/v1, kind: Job, name: j, uid: u, controller: true}]\n";
    manifest.replace("spec:\n", &format!("{owner}spec:\n"))
}

fn line_of(daemon: &mut run_support::Daemon, words: &'static str) -> Value {
    daemon.wait_for(words, |line| {
        line["change"] == "eviction"
            && line["what"]
                .as_str()
                .is_some_and(|what| what.contains(words))
    })
}

#[test]
fn a_pod_is_told_to_end_and_new_work_kept_away_meanwhile() {
    let mut machine = Machine::new();
    let cgroup = machine.cgroup("batch");
    let process = machine.burn(&cgroup, "burn");
    machine.write(
        "pods/batch.yaml",
        &owned(&run_support::pod("batch", &cgroup)),
    );
    machine.write(
        "policies/evict.yaml",
        &evict("terminationGracePeriodSeconds: 20"),
    );
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    eventually("it is known that new work is welcome", || {
        (machine.state(&["--schedulable"]).status.code() == Some(0)).then_some(())
    });
    machine.load.set(1900);
    let evict = daemon.wait_for_change("evict");
    assert_eq!(evict["podName"], "default/batch");
    line_of(&mut daemon, "told to end");
    machine.shows(&["kept away (NoSchedule) by node/cpu"]);
    assert_eq!(machine.state(&["--schedulable"]).status.code(), Some(1));
    eventually("the process ends", || {
        machine.has_ended(process).then_some(())
    });
    line_of(&mut daemon, "it has ended");

    machine.load.set(100);
    daemon.wait_for_change("schedulingEnabled");
    eventually("new work is welcome again", || {
        (machine.state(&["--schedulable"]).status.code() == Some(0)).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    let gone = machine.state(&["--schedulable"]);
    assert_eq!(gone.status.code(), Some(2));
    let why = String::from_utf8(gone.stderr).unwrap();
    assert!(why.contains("no longer runs"), "{why}");
}

#[test]
fn what_does_not_end_within_the_grace_period_is_killed() {
    let mut machine = Machine::new();
    let cgroup = machine.cgroup("stubborn");
    let process = machine.burn_on(&cgroup, "burn");
    machine.write(
        "pods/stubborn.yaml",
        &owned(&run_support::pod("stubborn", &cgroup)),
    );
    machine.write(
        "policies/evict.yaml",
        &evict("terminationGracePeriodSeconds: 1"),
    );
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    let told = line_of(&mut daemon, "told to end")["at"].as_u64().unwrap();
    let killed = line_of(&mut daemon, "it was killed")["at"]
        .as_u64()
        .unwrap();
    assert!(Duration::from_nanos(killed - told) >= Duration::from_secs(1));
    eventually("the process is gone", || {
        machine.has_ended(process).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_pod_without_a_controller_is_left_alone() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write(
        "policies/evict.yaml",
        &evict("terminationGracePeriodSeconds: 1"),
    );
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    let spared = daemon.wait_for_change("spared");
    assert_eq!(spared["reason"], "unowned");
    assert!(daemon.stop(Signal::SIGINT).success());
    assert!(daemon.changes("evict").is_empty());
}

#[test]
fn units_are_pods_that_a_policy_has_to_name_and_those_of_the_system_are_protected() {
    let mut machine = Machine::new();
    for unit in ["batch.service", "ssh.service"] {
        let cgroup = machine.cgroup(unit);
        machine.burn(&cgroup, "burn");
    }
    machine.write("policies/throttle.yaml", &throttle());
    let parent = machine.parent.clone();
    let mut daemon = machine.start(&["--pods-under", &parent]);
    assert_eq!(daemon.wait_for_change("started")["pods"], 2);
    machine.load.set(1900);
    let batch = format!("{parent}/batch.service");
    daemon.wait_for_state("Breached");
    let named = throttle().replace(
        "labelSelector: {}",
        "labelSelector: {matchExpressions: [{key: plimsoll.dev/unit, operator: Exists}]}",
    );
    machine.write("policies/throttle.yaml", &named);
    daemon.wait_for_change("policiesTaken");
    // Breached for a while, and nobody was touched: no PodQOS had named them.
    assert_eq!(daemon.changes("throttle"), Vec::<&Value>::new());
    daemon.wait_for("the unit is throttled", |line| {
        line["change"] == "throttle" && line["podName"] == batch.as_str()
    });
    let ssh = format!("{parent}/ssh.service");
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    let throttles = daemon.changes("throttle");
    assert!(
        throttles.iter().all(|line| line["podName"] != ssh.as_str()),
        "{daemon}"
    );
}

#[test]
fn systemd_hears_when_it_is_up_that_it_lives_and_when_it_stops() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    let socket = UnixDatagram::bind(machine.path("notify")).unwrap();
    socket
        .set_read_timeout(Some(run_support::DEADLINE))
        .unwrap();
    let mut command = machine.run_command(&[]);
    command
        .env("NOTIFY_SOCKET", machine.path("notify"))
        .env("WATCHDOG_USEC", "400000");
    let mut daemon = run_support::Daemon::start(command);
    let mut heard = Vec::new();
    let mut listen = |what: &str| loop {
        let mut buffer = [0; 1024];
        let length = socket.recv(&mut buffer).unwrap();
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        heard.push(text.clone());
        if text.contains(what) {
            return heard.clone();
        }
    };
    let before = listen("READY=1");
    assert!(
        !before.iter().any(|text| text.contains("STOPPING")),
        "{before:?}"
    );
    listen("STATUS=1 rule over 1 pod");
    listen("WATCHDOG=1");
    listen("WATCHDOG=1");
    machine.load.set(1900);
    listen("1 throttled");
    daemon.signal(Signal::SIGTERM);
    listen("STOPPING=1");
    assert!(daemon.end().success());
    assert!(machine.restore().status.success());
}

#[test]
fn a_state_that_nobody_keeps_is_no_answer() {
    let machine = Machine::new();
    let none = machine.state(&["--schedulable"]);
    assert_eq!(none.status.code(), Some(2));
    let why = String::from_utf8(none.stderr).unwrap();
    assert!(
        why.contains("has `plimsoll run` been started with this --state-dir?"),
        "{why}"
    );
    fs::create_dir(machine.path("state")).unwrap();
    fs::write(
        machine.path("state/scheduling.json"),
        "{\"schedulable\": true",
    )
    .unwrap();
    assert_eq!(machine.state(&["--schedulable"]).status.code(), Some(2));
    let old = r#"{"schedulable":true,"since":"2026-01-01T00:00:00Z","writer":{"bootId":"other","pid":1,"started":0}}"#;
    fs::write(machine.path("state/scheduling.json"), old).unwrap();
    let old = machine.state(&["--schedulable"]);
    assert_eq!(old.status.code(), Some(2));
    let why = String::from_utf8(old.stderr).unwrap();
    assert!(why.contains("from before the machine started"), "{why}");
}
