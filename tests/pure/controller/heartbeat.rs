//! Agents whose Leases are not renewed.

use std::collections::BTreeMap;
use std::time::Duration;

use plimsoll::cluster::lease::LeaseState;
use plimsoll::crd::Kind;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::time::BootTime;
use plimsoll::reconcilers::liveness::LivenessCounts;
use plimsoll::reconcilers::reconciler::{ControllerSettings, EventSubject, Operation, Reconciler};
use plimsoll::reconcilers::wire::{LoadSigns, ObservedNode, Watermark};
use serde_json::json;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_mins(1);

/// A cluster and its controller.
struct Fleet {
    reconciler: Reconciler,
    now: BootTime,
    /// The Leases in the API server.
    leases: BTreeMap<String, LeaseState>,
    version: u32,
    /// The watch delivers nothing.
    watch_stalled: bool,
    /// The API server does not respond.
    api_server_down: bool,
    /// Nodes whose Lease was read.
    leases_read: Vec<String>,
    taints_removed: Vec<String>,
    labels_removed: Vec<String>,
}

fn node(zone: &str, tainted: bool) -> ObservedNode {
    let label =
        |name: &str, value: &str| (format!("topology.kubernetes.io/{name}"), value.to_owned());
    ObservedNode {
        uid: "u".to_owned(),
        ready: true,
        tainted,
        interference_identified: tainted,
        facts: NodeFacts {
            labels: [label("region", "r"), label("zone", zone)].into(),
            ..NodeFacts::default()
        },
        ..ObservedNode::default()
    }
}

impl Fleet {
    /// Nodes in these zones, named `<zone><number>`, whose agents have just renewed Leases of 40 s.
    fn of(zones: &[(&str, usize)]) -> Self {
        let mut fleet = Self {
            reconciler: Reconciler::new(ControllerSettings::default()),
            now: BootTime::default() + Duration::from_hours(1),
            leases: BTreeMap::new(),
            version: 0,
            watch_stalled: false,
            api_server_down: false,
            leases_read: Vec::new(),
            taints_removed: Vec::new(),
            labels_removed: Vec::new(),
        };
        fleet.reconciler.start_leading();
        for (zone, nodes) in zones {
            for number in 0..*nodes {
                let name = format!("{zone}{number}");
                fleet.reconciler.apply_node(&name, node(zone, false));
                fleet.renew(&name, 40);
            }
        }
        fleet.settle();
        fleet
    }

    /// The agent renews its Lease.
    fn renew(&mut self, name: &str, seconds: u64) {
        self.version += 1;
        let lease = LeaseState {
            uid: "l".to_owned(),
            version: self.version.to_string(),
            duration: Duration::from_secs(seconds),
            held: true,
        };
        self.leases.insert(name.to_owned(), lease);
        self.deliver(name);
    }

    /// The agent reports to the controller, and announces its next report.
    fn report(&mut self, name: &str, seconds: u64) {
        let interval = Duration::from_secs(seconds);
        self.reconciler.reported(name, interval, self.now);
    }

    /// The watch delivers its Lease.
    fn deliver(&mut self, name: &str) {
        if !self.watch_stalled {
            let lease = self.leases[name].clone();
            self.reconciler.apply_lease(name, lease, self.now);
        }
    }

    /// Carries out planned operations until there are none.
    fn settle(&mut self) {
        loop {
            let operations = self.reconciler.plan(self.now, 100);
            let mut idle = true;
            for operation in operations {
                match operation {
                    Operation::ReadLease { node } => {
                        idle = false;
                        let answer = self.leases.get(&node).cloned();
                        let answer = if self.api_server_down {
                            Err(())
                        } else {
                            Ok(answer)
                        };
                        self.reconciler.lease_read(&node, self.now, answer);
                        self.leases_read.push(node);
                    }
                    Operation::RemoveLabel { node, .. } => {
                        self.reconciler.label_removed(&node, self.now, true);
                        self.labels_removed.push(node);
                    }
                    Operation::RemoveTaint { node, .. } => {
                        self.reconciler.taint_removed(&node, self.now, Ok(true));
                        self.taints_removed.push(node);
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

    /// Time passes while all agents but these renew every ten seconds.
    fn pass(&mut self, time: Duration, unresponsive: &[&str]) {
        let until = self.now + time;
        while self.now < until {
            self.now = self.now + SECOND * 10;
            let names: Vec<String> = self.leases.keys().cloned().collect();
            for name in names
                .iter()
                .filter(|name| !unresponsive.contains(&name.as_str()))
            {
                let seconds = self.leases[name].duration.as_secs();
                self.renew(name, seconds);
            }
            self.settle();
        }
    }

    /// The events since the last call: object and reason.
    fn events(&mut self) -> Vec<(String, &'static str)> {
        let events = self.reconciler.take_events().into_iter();
        events
            .map(|event| match event.about {
                EventSubject::Node(name) => (name, event.reason),
                other => (format!("{other:?}"), event.reason),
            })
            .collect()
    }

    fn counts(&self) -> LivenessCounts {
        self.reconciler.liveness_counts()
    }
}

fn event(node: &str, reason: &'static str) -> Vec<(String, &'static str)> {
    vec![(node.to_owned(), reason)]
}

#[test]
fn an_agent_is_unresponsive_ten_seconds_after_its_lease_expires() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.events(), []);
    assert_eq!(
        fleet.leases_read, [""; 0],
        "no Lease is read while all are renewed"
    );
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
    assert_eq!(fleet.leases_read, ["a1"]);
    assert_eq!((fleet.counts().agents, fleet.counts().unresponsive), (5, 1));
    assert!(fleet.counts().oldest_heartbeat > SECOND * 50);
    fleet.pass(MINUTE * 30, &["a1"]);
    assert_eq!(fleet.events(), [], "only once");
    assert_eq!(fleet.leases_read.len(), 1, "nothing more has to be done");
    fleet.pass(SECOND * 10, &[]);
    fleet.pass(SECOND * 10, &[]);
    assert_eq!(fleet.events(), event("a1", "AgentResponding"));
    assert_eq!(fleet.counts().unresponsive, 0);
    fleet.pass(MINUTE, &["a1"]);
    assert_eq!(
        fleet.events(),
        event("a1", "AgentUnresponsive"),
        "unresponsive again"
    );
}

#[test]
fn a_reporting_agent_is_unresponsive_50_seconds_after_its_last_report() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    for _ in 0..60 {
        fleet.report("a1", 10);
        fleet.pass(SECOND * 10, &["a1"]);
    }
    assert_eq!(fleet.events(), [], "reports are enough");
    fleet.pass(SECOND * 40, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
    assert_eq!(fleet.leases_read, ["a1"], "its Lease was read first");
    fleet.report("a1", 10);
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentResponding"));
}

#[test]
fn an_agent_whose_reports_are_lost_is_seen_by_its_lease() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    fleet.report("a1", 10);
    // Without responses to its reports, it renews every ten seconds again.
    fleet.renew("a1", 40);
    fleet.pass(MINUTE * 20, &[]);
    assert_eq!(fleet.events(), []);
}

#[test]
fn a_longer_report_interval_extends_the_grace_period() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    fleet.report("a1", 60);
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn after_rare_reports_the_grace_period_is_that_of_the_lease() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.report("a1", 60);
    fleet.pass(MINUTE * 5, &[]);
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn rare_reports_without_lease_renewals_are_enough() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for _ in 0..10 {
        fleet.report("a1", 60);
        fleet.pass(MINUTE, &["a1"]);
    }
    assert_eq!(fleet.events(), []);
    // Also with a new leader or an interrupted watch.
    fleet.reconciler.stop_leading();
    fleet.reconciler.start_leading();
    fleet.settle();
    fleet.pass(MINUTE, &["a1"]);
    fleet.reconciler.lease_watch_interrupted();
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn an_agent_whose_lease_was_deleted_is_not_unresponsive() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.report("a1", 10);
    fleet.leases.remove("a1");
    fleet.reconciler.delete_lease("a1");
    fleet.pass(MINUTE * 20, &[]);
    assert_eq!(fleet.events(), []);
}

#[test]
fn a_longer_lease_extends_the_grace_period() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.renew("a1", 240);
    fleet.pass(SECOND * 240, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn a_new_version_or_a_new_object_is_a_renewal() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for _ in 0..6 {
        fleet.pass(SECOND * 10, &["a1"]);
        // The watch restarts and lists what is there.
        fleet.deliver("a1");
    }
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
    let mut recreated = fleet.leases["a1"].clone();
    recreated.uid = "another".to_owned();
    fleet.leases.insert("a1".to_owned(), recreated);
    fleet.deliver("a1");
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentResponding"));
}

#[test]
fn a_stalled_watch_makes_no_agent_unresponsive() {
    // Too few to freeze a zone: the Leases are read.
    let mut fleet = Fleet::of(&[("a", 2)]);
    fleet.watch_stalled = true;
    fleet.pass(MINUTE * 10, &[]);
    assert_eq!(fleet.events(), []);
    assert!(
        fleet.leases_read.len() >= 2 && fleet.leases_read.len() <= 40,
        "{:?}",
        fleet.leases_read
    );
    // The API server is down.
    fleet.api_server_down = true;
    fleet.pass(MINUTE * 10, &[]);
    assert_eq!(fleet.events(), []);
    // It is back, and one agent is really dead.
    (fleet.api_server_down, fleet.watch_stalled) = (false, false);
    fleet.pass(MINUTE * 3, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn an_interrupted_lease_watch_restarts_the_timers() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for _ in 0..20 {
        fleet.pass(SECOND * 30, &["a1"]);
        fleet.reconciler.lease_watch_interrupted();
    }
    assert_eq!(fleet.events(), []);
    fleet.pass(MINUTE + SECOND * 10, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
    // Interrupted again while it is unresponsive: its recovery is reported all the same.
    fleet.reconciler.lease_watch_interrupted();
    fleet.pass(SECOND * 20, &[]);
    assert_eq!(fleet.events(), event("a1", "AgentResponding"));
}

#[test]
fn a_new_leader_gives_every_agent_its_full_grace_period() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
    fleet.reconciler.stop_leading();
    fleet.pass(MINUTE, &["a1"]);
    fleet.reconciler.start_leading();
    fleet.settle();
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn a_lease_read_that_was_cut_off_by_the_end_of_a_term_is_repeated() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.api_server_down = true;
    fleet.pass(SECOND * 50, &["a1"]);
    fleet.now = fleet.now + SECOND * 10;
    let asked = fleet.reconciler.plan(fleet.now, 100);
    let asks =
        |operation: &Operation| matches!(operation, Operation::ReadLease { node } if node == "a1");
    assert!(asked.iter().any(asks), "{asked:?}");
    // The term ends before the response.
    fleet.reconciler.stop_leading();
    fleet.api_server_down = false;
    fleet.reconciler.start_leading();
    fleet.settle();
    fleet.pass(SECOND * 70, &["a1"]);
    assert_eq!(fleet.events(), event("a1", "AgentUnresponsive"));
}

#[test]
fn a_mostly_unresponsive_zone_is_frozen_and_no_other() {
    let mut fleet = Fleet::of(&[("a", 5), ("b", 5)]);
    for name in ["a0", "b0"] {
        let zone = &name[..1];
        fleet.reconciler.apply_node(name, node(zone, true));
    }
    let unresponsive = ["a0", "a1", "a2", "b0"];
    fleet.pass(MINUTE * 30, &unresponsive);
    let controller = format!("{:?}", EventSubject::Controller);
    let reasons = fleet.events();
    assert_eq!(
        reasons
            .iter()
            .filter(|(_, reason)| *reason == "AgentsUnresponsive")
            .count(),
        1
    );
    assert!(
        reasons.contains(&(controller, "AgentsUnresponsive")),
        "{reasons:?}"
    );
    assert!(
        reasons.contains(&("b0".to_owned(), "AgentUnresponsive")),
        "{reasons:?}"
    );
    assert!(
        !reasons.iter().any(|(name, _)| name.starts_with('a')),
        "{reasons:?}"
    );
    assert_eq!(
        fleet.taints_removed,
        ["b0"],
        "nothing is restored in zone a"
    );
    assert_eq!(
        (fleet.counts().frozen_zones, fleet.counts().unresponsive),
        (1, 4)
    );
    // Two respond again: the third is really dead.
    fleet.pass(SECOND * 30, &["a0", "b0"]);
    assert_eq!(fleet.taints_removed, ["b0", "a0"]);
    assert_eq!(fleet.counts().frozen_zones, 0);
    assert!(
        fleet
            .events()
            .iter()
            .any(|(_, reason)| *reason == "AgentsResponding")
    );
}

#[test]
fn two_unresponsive_agents_of_a_zone_of_two_are_reported() {
    let mut fleet = Fleet::of(&[("a", 2), ("b", 9)]);
    fleet.pass(MINUTE, &["a0", "a1"]);
    assert_eq!(fleet.events().len(), 2);
    assert_eq!(fleet.counts().frozen_zones, 0);
}

#[test]
fn after_ten_minutes_the_taint_is_removed_once_the_lease_was_read_again() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.reconciler.apply_node("a1", node("a", true));
    fleet.pass(SECOND * 590, &["a1"]);
    assert_eq!(fleet.taints_removed, [""; 0]);
    assert_eq!(fleet.leases_read, ["a1"]);
    fleet.pass(SECOND * 20, &["a1"]);
    assert_eq!(fleet.taints_removed, ["a1"]);
    assert_eq!(fleet.leases_read, ["a1", "a1"]);
    let reasons: Vec<&str> = fleet
        .events()
        .into_iter()
        .map(|(_, reason)| reason)
        .collect();
    assert_eq!(reasons, ["AgentUnresponsive", "TaintOfDeadAgentRemoved"]);
}

/// A node with the load label and the soft taint.
fn labelled() -> ObservedNode {
    ObservedNode {
        load: LoadSigns {
            labelled: true,
            busy: true,
        },
        ..node("a", false)
    }
}

#[test]
fn the_label_of_an_unresponsive_agent_is_removed_at_once_and_its_soft_taint_after_ten_minutes() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.reconciler.apply_node("a1", labelled());
    fleet.pass(SECOND * 50, &["a1"]);
    assert_eq!(fleet.labels_removed, [""; 0]);
    fleet.pass(SECOND * 10, &["a1"]);
    assert_eq!(fleet.labels_removed, ["a1"]);
    assert_eq!(fleet.taints_removed, [""; 0]);
    fleet.pass(MINUTE * 10, &["a1"]);
    assert_eq!(fleet.labels_removed, ["a1"], "only once");
    assert_eq!(fleet.taints_removed, ["a1"]);
    // The agent writes it again when it is back.
    fleet.pass(MINUTE, &[]);
    fleet.pass(MINUTE, &["a1"]);
    assert_eq!(fleet.labels_removed, ["a1", "a1"]);
}

#[test]
fn a_label_on_a_node_that_has_no_agent_is_removed_after_ten_minutes() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.reconciler.apply_node("bare", labelled());
    fleet.pass(MINUTE * 9, &[]);
    assert_eq!(fleet.labels_removed, [""; 0]);
    fleet.pass(MINUTE * 2, &[]);
    assert_eq!(fleet.labels_removed, ["bare"]);
}

#[test]
fn lease_renewals_alone_keep_the_taint() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.reconciler.apply_node("a1", node("a", true));
    fleet.pass(MINUTE * 60, &[]);
    assert_eq!((fleet.events(), fleet.taints_removed.len()), (vec![], 0));
}

#[test]
fn status_writes_alone_keep_an_agent_responsive() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    for update in 0..20 {
        fleet.pass(SECOND * 30, &["a1"]);
        let status = json!({"agent": {"version": "1", "bootID": update.to_string(), "readsQuantities": true}, "scheduling": {"state": "NoSchedule"}});
        let object =
            json!({"metadata": {"uid": "w", "generation": 1}, "spec": {}, "status": status});
        let watermark = Watermark::of_value(&object).unwrap();
        fleet.reconciler.apply_watermark("a1", &watermark);
    }
    assert_eq!(fleet.events(), []);
}

#[test]
fn an_agent_that_released_its_lease_is_not_unresponsive() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.leases.get_mut("a1").unwrap().held = false;
    fleet.deliver("a1");
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.events(), []);
    assert_eq!(fleet.counts().agents, 4);
}

#[test]
fn no_agent_is_expected_on_a_deleted_node() {
    let mut fleet = Fleet::of(&[("a", 5)]);
    fleet.reconciler.delete_node("a1");
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(fleet.events(), []);
    fleet.reconciler.delete_lease("a1");
    fleet.leases.remove("a1");
    fleet.pass(MINUTE, &[]);
    assert_eq!((fleet.events(), fleet.counts().agents), (vec![], 4));
}

#[test]
fn selected_nodes_without_an_agent_are_counted() {
    let mut fleet = Fleet::of(&[("a", 3), ("b", 2)]);
    let without_agent = |fleet: &mut Fleet| {
        fleet.pass(SECOND * 10, &["a1"]);
        fleet.reconciler.nodes_without_agent()
    };
    for name in ["a", "a9", "b9"] {
        fleet.reconciler.apply_node(name, node(&name[..1], false));
    }
    assert_eq!(without_agent(&mut fleet), 0, "there is no policy");
    let zone = json!({"matchLabels": {"topology.kubernetes.io/zone": "a"}});
    let policy = json!({
        "apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS",
        "metadata": {"name": "q"},
        "spec": {"selector": zone, "rules": [{
            "name": "cpu", "avoidanceThreshold": 2, "actionName": "close",
            "metricRule": {"name": "cpu_total_usage", "value": 4000},
        }]},
    });
    fleet.reconciler.apply_policy(Kind::NodeQos, "q", &policy);
    assert_eq!(without_agent(&mut fleet), 2, "a and a9");
    fleet.report("a9", 10);
    assert_eq!(without_agent(&mut fleet), 1, "it reports");
    fleet.pass(MINUTE * 5, &["a1"]);
    assert_eq!(
        without_agent(&mut fleet),
        1,
        "an unresponsive agent is counted elsewhere"
    );
    fleet.leases.remove("a0");
    fleet.reconciler.delete_lease("a0");
    assert_eq!(without_agent(&mut fleet), 2, "its agent left");
    fleet.reconciler.delete_node("a");
    fleet.reconciler.delete_policy(Kind::NodeQos, "q");
    assert_eq!(without_agent(&mut fleet), 0);
}

#[test]
fn the_age_of_a_heartbeat_is_recorded_when_the_next_arrives() {
    let mut fleet = Fleet::of(&[("a", 1)]);
    assert!(
        fleet.reconciler.take_heartbeat_ages().is_empty(),
        "there is none before the first"
    );
    fleet.pass(SECOND * 10, &[]);
    assert_eq!(fleet.reconciler.take_heartbeat_ages(), [SECOND * 10]);
}
