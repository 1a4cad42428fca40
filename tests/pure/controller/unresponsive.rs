//! Agents that become unresponsive while something is in force on their nodes.

use std::process::Command;
use std::time::Duration;

use plimsoll::engine::time::BootTime;
use plimsoll::reconcilers::reconciler::{
    ControllerSettings, EventSubject, Operation, PendingEvent, Reconciler,
};
use plimsoll::reconcilers::wire::{ObservedNode, Watermark};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_mins(1);

struct Fleet {
    reconciler: Reconciler,
    now: BootTime,
    updates: u32,
}

fn node(name: &str, ready: bool, tainted: bool) -> ObservedNode {
    ObservedNode {
        uid: name.to_owned(),
        ready,
        tainted,
        ..ObservedNode::default()
    }
}

impl Fleet {
    /// Ready nodes with our taint, whose agents have just written their status.
    fn tainted(nodes: usize) -> Self {
        let mut fleet = Self {
            reconciler: Reconciler::new(ControllerSettings::default()),
            now: BootTime::from_nanos(1),
            updates: 0,
        };
        fleet.reconciler.start_leading();
        for name in names(nodes) {
            fleet.reconciler.apply_node(&name, node(&name, true, true));
            fleet.write_status(&name, json!({"scheduling": {"state": "NoSchedule"}}));
        }
        fleet.plan();
        fleet
    }

    /// The agent writes its status.
    fn write_status(&mut self, name: &str, mut status: Value) {
        self.updates += 1;
        status["agent"] =
            json!({"version": "1", "bootID": self.updates.to_string(), "readsQuantities": true});
        let object =
            json!({"metadata": {"uid": "w", "generation": 1}, "spec": {}, "status": status});
        self.reconciler
            .apply_watermark(name, &Watermark::of_value(&object).unwrap());
    }

    fn respond(&mut self, name: &str) {
        self.write_status(name, json!({"scheduling": {"state": "NoSchedule"}}));
    }

    /// Carries out what is planned; returns the nodes whose taint was removed.
    fn plan(&mut self) -> Vec<String> {
        let mut removed = Vec::new();
        for operation in self.reconciler.plan(self.now, 100) {
            if let Operation::RemoveTaint { node, uid } = operation {
                assert_eq!(node, uid);
                self.reconciler.taint_removed(&node, self.now, Ok(true));
                removed.push(node);
            }
        }
        removed
    }

    fn pass(&mut self, time: Duration) -> Vec<String> {
        self.now = self.now + time;
        self.plan()
    }

    /// The numbers of unresponsive agents, and of those that left throttled pods.
    fn unresponsive(&self) -> [usize; 2] {
        let counts = self.reconciler.liveness_counts();
        [counts.unresponsive, counts.throttling]
    }

    fn events(&mut self, reason: &str) -> Vec<PendingEvent> {
        let mut events = self.reconciler.take_events();
        events.retain(|event| event.reason == reason);
        events
    }
}

fn names(nodes: usize) -> Vec<String> {
    (0..nodes).map(|node| format!("node{node:02}")).collect()
}

#[test]
fn the_taint_is_removed_once_after_ten_unresponsive_minutes() {
    let mut fleet = Fleet::tainted(2);
    for _ in 0..9 {
        assert_eq!(fleet.pass(MINUTE), [""; 0]);
        fleet.respond("node01");
    }
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
    let events = fleet.events("TaintOfDeadAgentRemoved");
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].about, EventSubject::Node("node00".to_owned()));
    assert!(
        events[0].message.contains("10m ago"),
        "{}",
        events[0].message
    );
    // The watch shows it only later.
    fleet.respond("node01");
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    fleet
        .reconciler
        .apply_node("node00", node("node00", true, false));
    fleet.respond("node01");
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    assert_eq!(fleet.unresponsive(), [0, 0]);
}

#[test]
fn a_failed_taint_removal_is_retried() {
    let mut fleet = Fleet::tainted(1);
    fleet.now = fleet.now + 10 * MINUTE;
    let operations = fleet.reconciler.plan(fleet.now, 100);
    assert!(
        matches!(&operations[..], [Operation::RemoveTaint { .. }]),
        "{operations:?}"
    );
    assert!(
        fleet.reconciler.plan(fleet.now, 100).is_empty(),
        "it is in progress"
    );
    fleet.reconciler.taint_removed("node00", fleet.now, Err(()));
    assert_eq!(fleet.plan(), [""; 0]);
    assert_eq!(fleet.pass(Duration::from_secs(2)), ["node00"]);
}

#[test]
fn a_removal_without_the_condition_is_retried() {
    let mut fleet = Fleet::tainted(1);
    fleet.now = fleet.now + 10 * MINUTE;
    let operations = fleet.reconciler.plan(fleet.now, 100);
    assert!(
        matches!(&operations[..], [Operation::RemoveTaint { .. }]),
        "{operations:?}"
    );
    // The watch shows that the taint is gone before it is known that the condition could not be written.
    fleet
        .reconciler
        .apply_node("node00", node("node00", true, false));
    fleet.reconciler.taint_removed("node00", fleet.now, Err(()));
    assert_eq!(fleet.pass(Duration::from_secs(2)), ["node00"]);
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    assert_eq!(fleet.unresponsive(), [0, 0]);
}

#[test]
fn a_condition_left_without_its_taint_is_removed_by_any_leader() {
    let mut fleet = Fleet::tainted(1);
    let half = ObservedNode {
        interference_identified: true,
        ..node("node00", true, false)
    };
    fleet.now = fleet.now + 10 * MINUTE;
    let operations = fleet.reconciler.plan(fleet.now, 100);
    assert!(
        matches!(&operations[..], [Operation::RemoveTaint { .. }]),
        "{operations:?}"
    );
    fleet.reconciler.apply_node("node00", half);
    fleet.reconciler.taint_removed("node00", fleet.now, Err(()));
    // The same outage interrupts the watch, and another replica leads.
    fleet.reconciler.watch_interrupted();
    fleet.reconciler.stop_leading();
    fleet.reconciler.start_leading();
    fleet.plan();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
}

#[test]
fn the_controllers_own_write_does_not_count_as_an_update_of_the_agent() {
    let mut fleet = Fleet::tainted(1);
    fleet.pass(9 * MINUTE);
    fleet.reconciler.delete_watermark("node00");
    let made = json!({"metadata": {"uid": "new", "generation": 1}, "spec": {}});
    fleet
        .reconciler
        .apply_watermark("node00", &Watermark::of_value(&made).unwrap());
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
}

#[test]
fn nothing_is_restored_on_a_node_that_is_not_ready() {
    let mut fleet = Fleet::tainted(1);
    fleet
        .reconciler
        .apply_node("node00", node("node00", false, true));
    assert_eq!(fleet.pass(30 * MINUTE), [""; 0]);
    fleet
        .reconciler
        .apply_node("node00", node("node00", true, true));
    assert_eq!(fleet.pass(Duration::from_secs(1)), ["node00"]);
}

#[test]
fn timers_restart_with_a_new_term_and_after_an_outage() {
    let mut fleet = Fleet::tainted(1);
    fleet.pass(9 * MINUTE);
    fleet.reconciler.stop_leading();
    fleet.reconciler.start_leading();
    fleet.plan();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    fleet.reconciler.watch_interrupted();
    fleet.plan();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
}

#[test]
fn throttled_pods_are_reported_once_with_the_restore_command() {
    let mut fleet = Fleet::tainted(1);
    fleet
        .reconciler
        .apply_node("node00", node("node00", true, false));
    fleet.write_status("node00", json!({"counts": {"throttled": 3}}));
    fleet.plan();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    assert_eq!(fleet.events("ThrottledByDeadAgent"), []);
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    let events = fleet.events("ThrottledByDeadAgent");
    assert_eq!(events.len(), 1);
    assert!(events[0].warning && events[0].message.contains("3 of its pods"));
    let command = "plimsoll agent --restore --node-name node00";
    assert!(events[0].message.contains(command), "{}", events[0].message);
    assert_eq!(fleet.unresponsive(), [1, 1]);
    fleet.pass(MINUTE);
    assert_eq!(fleet.events("ThrottledByDeadAgent"), []);
    // It responds and becomes unresponsive again: reported again.
    fleet.write_status("node00", json!({"counts": {"throttled": 2}}));
    fleet.plan();
    fleet.pass(10 * MINUTE);
    assert_eq!(fleet.events("ThrottledByDeadAgent").len(), 1);
}

#[test]
fn nothing_is_restored_while_most_agents_are_unresponsive() {
    let mut fleet = Fleet::tainted(10);
    // They last wrote at different times within five minutes.
    for (minute, name) in names(10).into_iter().enumerate().take(5) {
        let names = names(10);
        assert_eq!(fleet.pass(MINUTE), [""; 0], "minute {minute}");
        fleet.respond(&name);
        fleet.respond(&names[minute + 5]);
    }
    for _ in 0..60 {
        assert_eq!(fleet.pass(MINUTE), [""; 0]);
    }
    let events = fleet.events("AgentsUnresponsive");
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(events[0].warning && events[0].about == EventSubject::Controller);
    assert_eq!(fleet.reconciler.liveness_counts().frozen_zones, 1);
    // Most respond again: the others are really dead.
    for name in &names(10)[..8] {
        fleet.respond(name);
    }
    assert_eq!(fleet.pass(Duration::from_secs(1)), ["node08", "node09"]);
    assert_eq!(fleet.events("AgentsResponding").len(), 1);
}

#[test]
fn agents_that_write_together_every_five_minutes_are_not_unresponsive() {
    let mut fleet = Fleet::tainted(10);
    for _ in 0..5 {
        // Some seconds late.
        assert_eq!(fleet.pass(5 * MINUTE + Duration::from_secs(5)), [""; 0]);
        assert_eq!(fleet.reconciler.liveness_counts().frozen_zones, 0);
        for name in &names(10) {
            fleet.respond(name);
        }
    }
    assert_eq!(fleet.events("AgentsUnresponsive"), []);
}

#[test]
fn two_unresponsive_agents_of_two_are_dead() {
    let mut fleet = Fleet::tainted(2);
    assert_eq!(fleet.pass(10 * MINUTE), ["node00", "node01"]);
}

#[test]
fn a_timeout_shorter_than_the_agents_write_interval_is_rejected() {
    let started = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["controller", "--dead-agent-after", "5m59s"])
        .env("KUBECONFIG", "/nowhere")
        .output()
        .unwrap();
    assert_eq!(started.status.code(), Some(2));
    let why = String::from_utf8(started.stderr).unwrap();
    assert!(why.contains("use 6m or more"), "{why}");
}
