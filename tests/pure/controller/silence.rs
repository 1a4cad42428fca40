//! Agents that fall silent while something is in force on their nodes.

use std::process::Command;
use std::time::Duration;

use plimsoll::engine::time::BootTime;
use plimsoll::reconcilers::wire::{NodeSeen, Watermark};
use plimsoll::reconcilers::world::{Note, Settings, Subject, World, Write};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_mins(1);

struct Fleet {
    world: World,
    now: BootTime,
    spoken: u32,
}

fn node(name: &str, ready: bool, tainted: bool) -> NodeSeen {
    NodeSeen {
        uid: name.to_owned(),
        ready,
        tainted,
        ..NodeSeen::default()
    }
}

impl Fleet {
    /// So many nodes, Ready and with our taint, whose agents have just spoken.
    fn tainted(nodes: usize) -> Self {
        let mut fleet = Self {
            world: World::new(Settings::default()),
            now: BootTime::from_nanos(1),
            spoken: 0,
        };
        fleet.world.lead();
        for name in names(nodes) {
            fleet.world.apply_node(&name, node(&name, true, true));
            fleet.says(&name, json!({"scheduling": {"state": "NoSchedule"}}));
        }
        fleet.look();
        fleet
    }

    /// Its agent writes.
    fn says(&mut self, name: &str, mut status: Value) {
        self.spoken += 1;
        status["agent"] = json!({"version": "1", "bootID": self.spoken.to_string()});
        let object =
            json!({"metadata": {"uid": "w", "generation": 1}, "spec": {}, "status": status});
        self.world
            .apply_live(name, &Watermark::of_value(&object).unwrap());
    }

    fn speak(&mut self, name: &str) {
        self.says(name, json!({"scheduling": {"state": "NoSchedule"}}));
    }

    /// The nodes that are opened now; every opening works.
    fn look(&mut self) -> Vec<String> {
        let mut opened = Vec::new();
        for write in self.world.plan(self.now, 100) {
            if let Write::Open { node, uid } = write {
                assert_eq!(node, uid);
                self.world.opened(&node, self.now, Ok(true));
                opened.push(node);
            }
        }
        opened
    }

    fn pass(&mut self, time: Duration) -> Vec<String> {
        self.now = self.now + time;
        self.look()
    }

    /// How many agents are silent, and how many of these left throttled pods.
    fn silent(&self) -> [usize; 2] {
        let figures = self.world.silence_figures();
        [figures.silent, figures.throttling]
    }

    fn notes(&mut self, reason: &str) -> Vec<Note> {
        let mut notes = self.world.take_notes();
        notes.retain(|note| note.reason == reason);
        notes
    }
}

fn names(nodes: usize) -> Vec<String> {
    (0..nodes).map(|node| format!("node{node:02}")).collect()
}

#[test]
fn the_taint_of_an_agent_that_is_silent_for_ten_minutes_is_taken_away_once_and_told() {
    let mut fleet = Fleet::tainted(2);
    for _ in 0..9 {
        assert_eq!(fleet.pass(MINUTE), [""; 0]);
        fleet.speak("node01");
    }
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
    let told = fleet.notes("TaintOfSilentAgentRemoved");
    assert_eq!(told.len(), 1);
    assert_eq!(told[0].about, Subject::Node("node00".to_owned()));
    assert!(told[0].message.contains("10 min"), "{}", told[0].message);
    // The watch shows it only later.
    fleet.speak("node01");
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    fleet
        .world
        .apply_node("node00", node("node00", true, false));
    fleet.speak("node01");
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    assert_eq!(fleet.silent(), [0, 0]);
}

#[test]
fn an_opening_that_fails_is_tried_again_after_a_pause() {
    let mut fleet = Fleet::tainted(1);
    fleet.now = fleet.now + 10 * MINUTE;
    let writes = fleet.world.plan(fleet.now, 100);
    assert!(matches!(&writes[..], [Write::Open { .. }]), "{writes:?}");
    assert!(
        fleet.world.plan(fleet.now, 100).is_empty(),
        "it is under way"
    );
    fleet.world.opened("node00", fleet.now, Err(()));
    assert_eq!(fleet.look(), [""; 0]);
    assert_eq!(fleet.pass(Duration::from_secs(2)), ["node00"]);
}

#[test]
fn an_opening_that_took_the_taint_alone_is_tried_again_for_the_condition() {
    let mut fleet = Fleet::tainted(1);
    fleet.now = fleet.now + 10 * MINUTE;
    let writes = fleet.world.plan(fleet.now, 100);
    assert!(matches!(&writes[..], [Write::Open { .. }]), "{writes:?}");
    // The watch shows that the taint is gone before it is known that the condition could not be written.
    fleet
        .world
        .apply_node("node00", node("node00", true, false));
    fleet.world.opened("node00", fleet.now, Err(()));
    assert_eq!(fleet.pass(Duration::from_secs(2)), ["node00"]);
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    assert_eq!(fleet.silent(), [0, 0]);
}

#[test]
fn a_condition_that_outlived_its_taint_goes_too_whoever_leads() {
    let mut fleet = Fleet::tainted(1);
    let half = NodeSeen {
        interferes: true,
        ..node("node00", true, false)
    };
    fleet.now = fleet.now + 10 * MINUTE;
    let writes = fleet.world.plan(fleet.now, 100);
    assert!(matches!(&writes[..], [Write::Open { .. }]), "{writes:?}");
    fleet.world.apply_node("node00", half);
    fleet.world.opened("node00", fleet.now, Err(()));
    // The same outage ends the watch, and another replica leads.
    fleet.world.missed();
    fleet.world.follow();
    fleet.world.lead();
    fleet.look();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
}

#[test]
fn what_the_controller_itself_makes_is_no_sign_of_life() {
    let mut fleet = Fleet::tainted(1);
    fleet.pass(9 * MINUTE);
    fleet.world.delete_live("node00");
    let made = json!({"metadata": {"uid": "new", "generation": 1}, "spec": {}});
    fleet
        .world
        .apply_live("node00", &Watermark::of_value(&made).unwrap());
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
}

#[test]
fn on_a_node_that_is_not_ready_nothing_is_undone_until_it_is() {
    let mut fleet = Fleet::tainted(1);
    fleet
        .world
        .apply_node("node00", node("node00", false, true));
    assert_eq!(fleet.pass(30 * MINUTE), [""; 0]);
    fleet.world.apply_node("node00", node("node00", true, true));
    assert_eq!(fleet.pass(Duration::from_secs(1)), ["node00"]);
}

#[test]
fn who_begins_to_lead_or_was_cut_off_counts_from_anew() {
    let mut fleet = Fleet::tainted(1);
    fleet.pass(9 * MINUTE);
    fleet.world.follow();
    fleet.world.lead();
    fleet.look();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    fleet.world.missed();
    fleet.look();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    assert_eq!(fleet.pass(MINUTE), ["node00"]);
}

#[test]
fn throttled_pods_of_a_silent_agent_are_told_of_once_with_the_command_that_restores_them() {
    let mut fleet = Fleet::tainted(1);
    fleet
        .world
        .apply_node("node00", node("node00", true, false));
    fleet.says("node00", json!({"counts": {"throttled": 3}}));
    fleet.look();
    assert_eq!(fleet.pass(9 * MINUTE), [""; 0]);
    assert_eq!(fleet.notes("ThrottledBySilentAgent"), []);
    assert_eq!(fleet.pass(MINUTE), [""; 0]);
    let told = fleet.notes("ThrottledBySilentAgent");
    assert_eq!(told.len(), 1);
    assert!(told[0].warning && told[0].message.contains("3 pods"));
    let command = "plimsoll agent --restore --node-name node00";
    assert!(told[0].message.contains(command), "{}", told[0].message);
    assert_eq!(fleet.silent(), [1, 1]);
    fleet.pass(MINUTE);
    assert_eq!(fleet.notes("ThrottledBySilentAgent"), []);
    // Heard again and silent again: told again.
    fleet.says("node00", json!({"counts": {"throttled": 2}}));
    fleet.look();
    fleet.pass(10 * MINUTE);
    assert_eq!(fleet.notes("ThrottledBySilentAgent").len(), 1);
}

#[test]
fn most_agents_silent_at_once_are_our_fault_and_nothing_is_undone() {
    let mut fleet = Fleet::tainted(10);
    // They wrote last at different times within five minutes, and then nothing came any more.
    for (minute, name) in names(10).into_iter().enumerate().take(5) {
        let names = names(10);
        assert_eq!(fleet.pass(MINUTE), [""; 0], "minute {minute}");
        fleet.speak(&name);
        fleet.speak(&names[minute + 5]);
    }
    for _ in 0..60 {
        assert_eq!(fleet.pass(MINUTE), [""; 0]);
    }
    let told = fleet.notes("AgentsSilent");
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].warning && told[0].about == Subject::Fleet);
    assert_eq!(fleet.world.silence_figures().held, 1);
    // Most come back: the others are dead indeed.
    for name in &names(10)[..8] {
        fleet.speak(name);
    }
    assert_eq!(fleet.pass(Duration::from_secs(1)), ["node08", "node09"]);
    assert_eq!(fleet.notes("AgentsHeard").len(), 1);
}

#[test]
fn agents_that_write_together_every_five_minutes_are_never_taken_for_silent() {
    let mut fleet = Fleet::tainted(10);
    for _ in 0..5 {
        // A quarter of a second before the controller's next look, and some seconds late.
        assert_eq!(fleet.pass(5 * MINUTE + Duration::from_secs(5)), [""; 0]);
        assert_eq!(fleet.world.silence_figures().held, 0);
        for name in &names(10) {
            fleet.speak(name);
        }
    }
    assert_eq!(fleet.notes("AgentsSilent"), []);
}

#[test]
fn two_silent_agents_of_two_are_taken_for_dead() {
    let mut fleet = Fleet::tainted(2);
    assert_eq!(fleet.pass(10 * MINUTE), ["node00", "node01"]);
}

#[test]
fn a_silence_that_living_agents_keep_too_is_refused() {
    let started = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["controller", "--silent-agent-after", "5m59s"])
        .env("KUBECONFIG", "/nowhere")
        .output()
        .unwrap();
    assert_eq!(started.status.code(), Some(2));
    let why = String::from_utf8(started.stderr).unwrap();
    assert!(why.contains("use 6m or more"), "{why}");
}
