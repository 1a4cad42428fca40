//! Agents whose Leases are not renewed.

use std::collections::BTreeMap;
use std::time::Duration;

use plimsoll::crd::Kind;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::time::BootTime;
use plimsoll::reconcilers::lease::Renewal;
use plimsoll::reconcilers::silence::Figures;
use plimsoll::reconcilers::wire::{NodeSeen, Watermark};
use plimsoll::reconcilers::world::{Settings, Subject, World, Write};
use serde_json::json;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_mins(1);

/// A cluster, and a controller that watches it.
struct Fleet {
    world: World,
    now: BootTime,
    /// As the API server has them.
    leases: BTreeMap<String, Renewal>,
    version: u32,
    /// The watch shows nothing.
    blind: bool,
    /// The API server does not answer.
    away: bool,
    /// Whose Leases were read.
    asked: Vec<String>,
    opened: Vec<String>,
}

fn node(zone: &str, tainted: bool) -> NodeSeen {
    let label =
        |name: &str, value: &str| (format!("topology.kubernetes.io/{name}"), value.to_owned());
    NodeSeen {
        uid: "u".to_owned(),
        ready: true,
        tainted,
        interferes: tainted,
        facts: NodeFacts {
            labels: [label("region", "r"), label("zone", zone)].into(),
            ..NodeFacts::default()
        },
    }
}

impl Fleet {
    /// Nodes of these zones, named `<zone><number>`, whose agents hold Leases of 40 s that were just renewed.
    fn of(zones: &[(&str, usize)]) -> Self {
        let mut fleet = Self {
            world: World::new(Settings::default()),
            now: BootTime::default() + Duration::from_hours(1),
            leases: BTreeMap::new(),
            version: 0,
            blind: false,
            away: false,
            asked: Vec::new(),
            opened: Vec::new(),
        };
        fleet.world.lead();
        for (zone, nodes) in zones {
            for number in 0..*nodes {
                let name = format!("{zone}{number}");
                fleet.world.apply_node(&name, node(zone, false));
                fleet.renew(&name, 40);
            }
        }
        fleet.look();
        fleet
    }

    /// Its agent renews its Lease.
    fn renew(&mut self, name: &str, seconds: u64) {
        self.version += 1;
        let lease = Renewal {
            uid: "l".to_owned(),
            version: self.version.to_string(),
            holds: Duration::from_secs(seconds),
            held: true,
        };
        self.leases.insert(name.to_owned(), lease);
        self.show(name);
    }

    /// Its agent reports to the controller, and says when it will again.
    fn report(&mut self, name: &str, seconds: u64) {
        let interval = Duration::from_secs(seconds);
        self.world.reported(name, interval, self.now);
    }

    /// The watch shows its Lease.
    fn show(&mut self, name: &str) {
        if !self.blind {
            let lease = self.leases[name].clone();
            self.world.apply_lease(name, lease, self.now);
        }
    }

    /// Carries out what is planned, until nothing is.
    fn look(&mut self) {
        loop {
            let writes = self.world.plan(self.now, 100);
            let mut idle = true;
            for write in writes {
                match write {
                    Write::Ask { node } => {
                        idle = false;
                        let answer = self.leases.get(&node).cloned();
                        let answer = if self.away { Err(()) } else { Ok(answer) };
                        self.world.answered(&node, self.now, answer);
                        self.asked.push(node);
                    }
                    Write::Open { node, .. } => {
                        self.world.opened(&node, self.now, Ok(true));
                        self.opened.push(node);
                    }
                    _ => {}
                }
            }
            if idle {
                return;
            }
            self.now = self.now + SECOND;
        }
    }

    /// Time passes in which all but these agents renew every ten seconds.
    fn pass(&mut self, time: Duration, silent: &[&str]) {
        let until = self.now + time;
        while self.now < until {
            self.now = self.now + SECOND * 10;
            let names: Vec<String> = self.leases.keys().cloned().collect();
            for name in names.iter().filter(|name| !silent.contains(&name.as_str())) {
                let seconds = self.leases[name].holds.as_secs();
                self.renew(name, seconds);
            }
            self.look();
        }
    }

    /// What was told since the last call: about what, and with which word.
    fn told(&mut self) -> Vec<(String, &'static str)> {
        let notes = self.world.take_notes().into_iter();
        notes
            .map(|note| match note.about {
                Subject::Node(name) => (name, note.reason),
                other => (format!("{other:?}"), note.reason),
            })
            .collect()
    }

    fn figures(&self) -> Figures {
        self.world.silence_figures()
    }
}

fn told(node: &str, reason: &'static str) -> Vec<(String, &'static str)> {
    vec![(node.to_owned(), reason)]
}

#[test]
fn an_agent_is_silent_ten_seconds_after_its_lease_ran_out_and_is_back_with_the_next_renewal() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.told(), []);
    assert_eq!(fleet.asked, [""; 0], "at rest nothing is read");
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
    assert_eq!(fleet.asked, ["a1"]);
    assert_eq!((fleet.figures().agents, fleet.figures().silent), (5, 1));
    assert!(fleet.figures().oldest > SECOND * 50);
    fleet.pass(MINUTE * 30, &["a1"]);
    assert_eq!(fleet.told(), [], "once");
    assert_eq!(fleet.asked.len(), 1, "there is nothing more to do about it");
    fleet.pass(SECOND * 10, &[]);
    fleet.pass(SECOND * 10, &[]);
    assert_eq!(fleet.told(), told("a1", "AgentBack"));
    assert_eq!(fleet.figures().silent, 0);
    fleet.pass(MINUTE, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"), "and silent again");
}

#[test]
fn an_agent_that_reports_is_silent_50_seconds_after_its_last_report_however_long_its_lease_holds() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    for _ in 0..60 {
        fleet.report("a1", 10);
        fleet.pass(SECOND * 10, &["a1"]);
    }
    assert_eq!(fleet.told(), [], "reports are enough");
    fleet.pass(SECOND * 40, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
    assert_eq!(fleet.asked, ["a1"], "not before its Lease was read");
    fleet.report("a1", 10);
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentBack"));
}

#[test]
fn an_agent_whose_reports_do_not_arrive_is_heard_by_its_lease() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    fleet.report("a1", 10);
    // It renews every ten seconds again, as all that are not answered do.
    fleet.renew("a1", 40);
    fleet.pass(MINUTE * 20, &[]);
    assert_eq!(fleet.told(), []);
}

#[test]
fn an_agent_that_was_asked_to_report_seldom_may() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    fleet.report("a1", 60);
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn an_agent_that_reported_seldom_and_goes_on_by_its_lease_is_missed_as_soon_as_others() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.report("a1", 60);
    fleet.pass(MINUTE * 5, &[]);
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn an_agent_that_reports_seldom_and_can_not_write_its_lease_is_not_missed_in_between() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for _ in 0..10 {
        fleet.report("a1", 60);
        fleet.pass(MINUTE, &["a1"]);
    }
    assert_eq!(fleet.told(), []);
    // Nor where another begins to lead, or a watch is cut.
    fleet.world.follow();
    fleet.world.lead();
    fleet.look();
    fleet.pass(MINUTE, &["a1"]);
    fleet.world.missed_leases();
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn an_agent_that_gave_its_lease_back_has_not_fallen_silent() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.report("a1", 10);
    fleet.leases.remove("a1");
    fleet.world.delete_lease("a1");
    fleet.pass(MINUTE * 20, &[]);
    assert_eq!(fleet.told(), []);
}

#[test]
fn a_relaxed_lease_leaves_its_agent_as_long_as_it_says() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    fleet.pass(SECOND * 240, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn only_another_version_is_a_renewal_and_another_object_is_one_too() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for _ in 0..6 {
        fleet.pass(SECOND * 10, &["a1"]);
        // The watch is begun anew, and lists what is there.
        fleet.show("a1");
    }
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
    let mut anew = fleet.leases["a1"].clone();
    anew.uid = "another".to_owned();
    fleet.leases.insert("a1".to_owned(), anew);
    fleet.show("a1");
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentBack"));
}

#[test]
fn a_watch_that_shows_nothing_is_our_blindness_and_not_their_silence() {
    // Too few for a zone: the Leases themselves tell.
    let mut fleet = Fleet::of(&[("a", 2)]);
    fleet.blind = true;
    fleet.pass(MINUTE * 10, &[]);
    assert_eq!(fleet.told(), []);
    assert!(
        fleet.asked.len() >= 2 && fleet.asked.len() <= 40,
        "{:?}",
        fleet.asked
    );
    // The API server is away altogether.
    fleet.away = true;
    fleet.pass(MINUTE * 10, &[]);
    assert_eq!(fleet.told(), []);
    // It is back, and one agent indeed gone.
    (fleet.away, fleet.blind) = (false, false);
    fleet.pass(MINUTE * 2, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn a_watch_of_leases_that_was_cut_begins_the_clocks_anew() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for _ in 0..20 {
        fleet.pass(SECOND * 30, &["a1"]);
        fleet.world.missed_leases();
    }
    assert_eq!(fleet.told(), []);
    fleet.pass(MINUTE + SECOND * 10, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
    // Cut again while it is silent: its return is told of all the same.
    fleet.world.missed_leases();
    fleet.pass(SECOND * 20, &[]);
    assert_eq!(fleet.told(), told("a1", "AgentBack"));
}

#[test]
fn who_begins_to_lead_gives_every_agent_its_full_time() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
    fleet.world.follow();
    fleet.pass(MINUTE, &["a1"]);
    fleet.world.lead();
    fleet.look();
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn a_lease_that_was_being_read_when_a_term_ended_is_read_again_in_the_next() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.away = true;
    fleet.pass(SECOND * 50, &["a1"]);
    fleet.now = fleet.now + SECOND * 10;
    let asked = fleet.world.plan(fleet.now, 100);
    let asks = |write: &Write| matches!(write, Write::Ask { node } if node == "a1");
    assert!(asked.iter().any(asks), "{asked:?}");
    // No answer comes before the term ends, and nobody waits for it then.
    fleet.world.follow();
    fleet.away = false;
    fleet.world.lead();
    fleet.look();
    fleet.pass(SECOND * 70, &["a1"]);
    assert_eq!(fleet.told(), told("a1", "AgentSilent"));
}

#[test]
fn most_of_a_zone_silent_at_once_freezes_that_zone_and_no_other() {
    let mut fleet = Fleet::of(&[("a", 5), ("b", 5)]);
    for name in ["a0", "b0"] {
        let zone = &name[..1];
        fleet.world.apply_node(name, node(zone, true));
    }
    let silent = ["a0", "a1", "a2", "b0"];
    fleet.pass(MINUTE * 30, &silent);
    let about_fleet = format!("{:?}", Subject::Fleet);
    let reasons = fleet.told();
    assert_eq!(
        reasons
            .iter()
            .filter(|(_, reason)| *reason == "AgentsSilent")
            .count(),
        1
    );
    assert!(
        reasons.contains(&(about_fleet, "AgentsSilent")),
        "{reasons:?}"
    );
    assert!(
        reasons.contains(&("b0".to_owned(), "AgentSilent")),
        "{reasons:?}"
    );
    assert!(
        !reasons.iter().any(|(name, _)| name.starts_with('a')),
        "{reasons:?}"
    );
    assert_eq!(fleet.opened, ["b0"], "nothing is undone in zone a");
    assert_eq!((fleet.figures().held, fleet.figures().silent), (1, 4));
    // Two come back: the third is dead indeed.
    fleet.pass(SECOND * 30, &["a0", "b0"]);
    assert_eq!(fleet.opened, ["b0", "a0"]);
    assert_eq!(fleet.figures().held, 0);
    assert!(
        fleet
            .told()
            .iter()
            .any(|(_, reason)| *reason == "AgentsHeard")
    );
}

#[test]
fn two_silent_agents_of_a_zone_of_two_are_told_of() {
    let mut fleet = Fleet::of(&[("a", 2), ("b", 9)]);
    fleet.pass(MINUTE, &["a0", "a1"]);
    assert_eq!(fleet.told().len(), 2);
    assert_eq!(fleet.figures().held, 0);
}

#[test]
fn after_ten_minutes_of_silence_the_taint_goes_once_the_lease_was_read_again() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.world.apply_node("a1", node("a", true));
    fleet.pass(SECOND * 590, &["a1"]);
    assert_eq!(fleet.opened, [""; 0]);
    assert_eq!(fleet.asked, ["a1"]);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.opened, ["a1"]);
    assert_eq!(fleet.asked, ["a1", "a1"]);
    let reasons: Vec<&str> = fleet.told().into_iter().map(|(_, reason)| reason).collect();
    assert_eq!(reasons, ["AgentSilent", "TaintOfSilentAgentRemoved"]);
}

#[test]
fn a_lease_that_is_renewed_keeps_a_taint_whose_agent_writes_nothing_else() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.world.apply_node("a1", node("a", true));
    fleet.pass(MINUTE * 60, &[]);
    assert_eq!((fleet.told(), fleet.opened.len()), (vec![], 0));
}

#[test]
fn an_agent_that_writes_its_status_is_not_silent_whatever_becomes_of_its_lease() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for spoken in 0..20 {
        fleet.pass(SECOND * 30, &["a1"]);
        let status = json!({"agent": {"version": "1", "bootID": spoken.to_string()}, "scheduling": {"state": "NoSchedule"}});
        let object =
            json!({"metadata": {"uid": "w", "generation": 1}, "spec": {}, "status": status});
        let watermark = Watermark::of_value(&object).unwrap();
        fleet.world.apply_live("a1", &watermark);
    }
    assert_eq!(fleet.told(), []);
}

#[test]
fn an_agent_that_gave_its_lease_back_is_not_missed() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.leases.get_mut("a1").unwrap().held = false;
    fleet.show("a1");
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.told(), []);
    assert_eq!(fleet.figures().agents, 4);
}

#[test]
fn nobody_is_missed_on_a_node_that_is_gone() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.world.delete_node("a1");
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.told(), []);
    fleet.world.delete_lease("a1");
    fleet.leases.remove("a1");
    fleet.pass(MINUTE, &[]);
    assert_eq!((fleet.told(), fleet.figures().agents), (vec![], 4));
}

#[test]
fn only_nodes_that_a_policy_selects_and_that_have_no_agent_are_unkept() {
    let mut fleet = Fleet::of(&[("a", 3), ("b", 2)]);
    let unkept = |fleet: &mut Fleet| {
        fleet.pass(SECOND * 10, &["a1"]);
        fleet.world.unkept()
    };
    for name in ["a", "a9", "b9"] {
        fleet.world.apply_node(name, node(&name[..1], false));
    }
    assert_eq!(unkept(&mut fleet), 0, "there is no policy");
    let zone = json!({"matchLabels": {"topology.kubernetes.io/zone": "a"}});
    let policy = json!({
        "apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS",
        "metadata": {"name": "q"},
        "spec": {"selector": zone, "rules": [{
            "name": "cpu", "avoidanceThreshold": 2, "actionName": "close",
            "metricRule": {"name": "cpu_total_usage", "value": 4000},
        }]},
    });
    fleet.world.apply_policy(Kind::NodeQos, "q", &policy);
    assert_eq!(unkept(&mut fleet), 2, "a and a9");
    fleet.report("a9", 10);
    assert_eq!(unkept(&mut fleet), 1, "who reports is there");
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(
        unkept(&mut fleet),
        1,
        "a silent agent is missed in other words"
    );
    fleet.leases.remove("a0");
    fleet.world.delete_lease("a0");
    assert_eq!(unkept(&mut fleet), 2, "its agent left");
    fleet.world.delete_node("a");
    fleet.world.delete_policy(Kind::NodeQos, "q");
    assert_eq!(unkept(&mut fleet), 0);
}

#[test]
fn the_age_of_each_heartbeat_is_told_when_the_next_is_seen() {
    let mut fleet = Fleet::of(&[("a", 1)]);
    assert!(
        fleet.world.take_ages().is_empty(),
        "the first has none before it"
    );
    fleet.pass(SECOND * 10, &[]);
    assert_eq!(fleet.world.take_ages(), [SECOND * 10]);
}
