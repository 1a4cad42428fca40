//! `plimsoll run` evicts by signals, disallows new work in a state file, and manages units as pods.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use crate::run_support::{Machine, eventually, policy, throttle};
use nix::sys::signal::Signal;
use plimsoll::clock::wall_time;
use serde_json::Value;

fn evict(more: &str) -> String {
    let eviction = format!("{{coolDownSeconds: 1, eviction: {{{more}}}}}");
    policy(&eviction, "evict", 2, 1000)
}

/// Gives the pod a controller, as a job launcher would.
fn owned(manifest: &str) -> String {
    let owner = "  ownerReferences: [{apiVersion: batch/v1, kind: Job, name: j, uid: u, controller: true}]\n";
    manifest.replace("spec:\n", &format!("{owner}spec:\n"))
}

fn wait_for_eviction(daemon: &mut crate::run_support::Daemon, words: &'static str) -> Value {
    daemon.wait_for(words, |line| {
        line["change"] == "eviction"
            && line["what"]
                .as_str()
                .is_some_and(|what| what.contains(words))
    })
}

#[test]
fn a_pod_is_evicted_and_new_work_is_not_allowed_meanwhile() {
    let mut machine = Machine::new();
    let cgroup = machine.cgroup("batch");
    let process = machine.burn(&cgroup);
    machine.write(
        "pods/batch.yaml",
        &owned(&crate::run_support::pod("batch", &cgroup)),
    );
    machine.write(
        "policies/evict.yaml",
        &evict("terminationGracePeriodSeconds: 20"),
    );
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    eventually("new work is allowed", || {
        (machine.state(&["--schedulable"]).status.code() == Some(0)).then_some(())
    });
    machine.load.set(1900);
    let evict = daemon.wait_for_change("evict");
    assert_eq!(evict["podName"], "default/batch");
    wait_for_eviction(&mut daemon, "sent SIGTERM");
    machine.wait_for_state_output(&["not allowed (NoSchedule) by node/cpu"]);
    assert_eq!(machine.state(&["--schedulable"]).status.code(), Some(1));
    eventually("the process exits", || {
        machine.poll_exit(process).then_some(())
    });
    wait_for_eviction(&mut daemon, "processes exited");

    machine.load.set(100);
    daemon.wait_for_change("schedulingEnabled");
    eventually("new work is allowed again", || {
        (machine.state(&["--schedulable"]).status.code() == Some(0)).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
    let gone = machine.state(&["--schedulable"]);
    assert_eq!(gone.status.code(), Some(2));
    let why = String::from_utf8(gone.stderr).unwrap();
    assert!(why.contains("no longer runs"), "{why}");
}

#[test]
fn processes_that_outlast_the_grace_period_are_killed() {
    let mut machine = Machine::new();
    let cgroup = machine.cgroup("stubborn");
    let process = machine.burn_ignoring_sigterm(&cgroup);
    machine.write(
        "pods/stubborn.yaml",
        &owned(&crate::run_support::pod("stubborn", &cgroup)),
    );
    machine.write(
        "policies/evict.yaml",
        &evict("terminationGracePeriodSeconds: 1"),
    );
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    let signalled = wait_for_eviction(&mut daemon, "sent SIGTERM")["at"]
        .as_u64()
        .unwrap();
    let killed = wait_for_eviction(&mut daemon, "it was killed")["at"]
        .as_u64()
        .unwrap();
    assert!(Duration::from_nanos(killed - signalled) >= Duration::from_secs(1));
    eventually("the process is gone", || {
        machine.poll_exit(process).then_some(())
    });
    assert!(daemon.stop(Signal::SIGINT).success());
}

#[test]
fn a_pod_without_a_controller_is_not_evicted() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write(
        "policies/evict.yaml",
        &evict("terminationGracePeriodSeconds: 1"),
    );
    let mut daemon = machine.start(&[]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    let skipped = daemon.wait_for_change("skipped");
    assert_eq!(skipped["reason"], "unowned");
    assert!(daemon.stop(Signal::SIGINT).success());
    assert!(daemon.changes("evict").is_empty());
}

/// Hours that are the current one and its neighbours, and hours that are not.
fn now_and_later() -> [String; 2] {
    let hour = wall_time().to_zoned(jiff::tz::TimeZone::UTC).hour();
    [-1, 11].map(|from| {
        let [start, end] = [from, from + 3].map(|it| (hour + it + 24) % 24);
        format!("{start:02}:00-{end:02}:00 UTC")
    })
}

#[test]
fn a_rule_outside_its_hours_restores_what_it_did() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    let original = machine.quota("batch");
    let [now, later] = now_and_later();
    let during = |hours: &str| {
        let field = format!("    activeDuring: [{hours}]\n    actionName");
        throttle().replacen("    actionName", &field, 1)
    };
    machine.write("policies/throttle.yaml", &during(&now));
    let trace = machine.path("trace");
    let mut daemon = machine.start(&["--record", trace.to_str().unwrap()]);
    daemon.wait_for_change("started");
    machine.load.set(1900);
    daemon.wait_for_state("Breached");
    daemon.wait_for("the floor", |line| {
        line["change"] == "throttle" && line["to"] == 10
    });
    machine.write("policies/throttle.yaml", &during(&later));
    daemon.wait_for_change("outsideHours");
    daemon.wait_for("the original", |line| {
        line["change"] == "throttle" && line["to"] == 100
    });
    assert_eq!(machine.quota("batch"), original, "despite the load");
    let steps = daemon.changes("throttle");
    assert!(steps.iter().any(|line| line["to"] == 40), "step by step");
    machine.wait_for_state_output(&["Normal", "outside its hours"]);
    assert!(daemon.stop(Signal::SIGINT).success());
    let text = fs::read_to_string(&trace).unwrap();
    let tick = text
        .lines()
        .find(|line| line.starts_with("{\"tick\""))
        .unwrap();
    let tick: Value = serde_json::from_str(tick).unwrap();
    let time: jiff::Timestamp = tick["tick"]["sample"]["time"]
        .as_str()
        .unwrap()
        .parse()
        .unwrap();
    let age = wall_time().duration_since(time);
    assert!((0..600).contains(&age.as_secs()), "{age}");
}

#[test]
fn units_have_to_be_named_by_a_policy_and_system_units_are_protected() {
    let mut machine = Machine::new();
    for unit in ["batch.service", "ssh.service"] {
        let cgroup = machine.cgroup(unit);
        machine.burn(&cgroup);
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
    daemon.wait_for_change("policiesApplied");
    // No unit was throttled during the breach: no PodQOS named one.
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
fn systemd_is_notified_of_start_liveness_and_stop() {
    let mut machine = Machine::new();
    machine.burning_pod("batch");
    machine.write("policies/throttle.yaml", &throttle());
    let socket = UnixDatagram::bind(machine.path("notify")).unwrap();
    socket
        .set_read_timeout(Some(crate::run_support::TIMEOUT))
        .unwrap();
    let mut command = machine.run_command(&[]);
    command
        .env("NOTIFY_SOCKET", machine.path("notify"))
        .env("WATCHDOG_USEC", "400000");
    let mut daemon = crate::run_support::Daemon::start(command);
    let mut received = Vec::new();
    let mut receive = |what: &str| loop {
        let mut buffer = [0; 1024];
        let length = socket.recv(&mut buffer).unwrap();
        let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
        received.push(text.clone());
        if text.contains(what) {
            return received.clone();
        }
    };
    let before = receive("READY=1");
    assert!(
        !before.iter().any(|text| text.contains("STOPPING")),
        "{before:?}"
    );
    receive("STATUS=1 rule over 1 pod");
    receive("WATCHDOG=1");
    receive("WATCHDOG=1");
    machine.load.set(1900);
    receive("1 throttled");
    daemon.signal(Signal::SIGTERM);
    receive("STOPPING=1");
    assert!(daemon.wait().success());
    assert!(machine.restore().status.success());
}

#[test]
fn a_stale_or_broken_state_is_no_answer() {
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
