//! The controller's decisions, without a cluster: any history of edits ends where a full compile begins.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeMap;
use std::time::Duration;

use plimsoll::crd::{Kind, NodeWatermarkSpec, Objects, compile};
use plimsoll::engine::policy::{NodeFacts, PolicySet};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::Bytes;
use plimsoll::reconcilers::wire::{NodeSeen, Watermark};
use plimsoll::reconcilers::world::{Failed, Settings, World, Write};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

fn world() -> World {
    World::new(Settings::default())
}

fn seen(object: &Value) -> Watermark {
    Watermark::of_value(object).unwrap()
}

fn node_seen(name: &str, facts: &NodeFacts) -> NodeSeen {
    NodeSeen {
        uid: name.to_owned(),
        facts: facts.clone(),
        ready: true,
        tainted: false,
    }
}

/// An API server that holds what the controller writes, and the clock.
struct Cluster {
    world: World,
    now: BootTime,
    objects: BTreeMap<(Kind, String), Value>,
    nodes: BTreeMap<String, NodeFacts>,
    watermarks: BTreeMap<String, Value>,
    generation: i64,
    writes: usize,
    /// Nodes whose taint was taken away.
    opened: Vec<String>,
}

impl Cluster {
    fn new() -> Self {
        let mut world = world();
        world.lead();
        Self {
            world,
            now: BootTime::default(),
            objects: BTreeMap::new(),
            nodes: BTreeMap::new(),
            watermarks: BTreeMap::new(),
            generation: 0,
            writes: 0,
            opened: Vec::new(),
        }
    }

    fn node(&mut self, name: &str, pool: &str) {
        let facts = NodeFacts {
            labels: BTreeMap::from([("pool".to_owned(), pool.to_owned())]),
            cpus: 8,
            memory: Bytes(16 << 30),
        };
        self.world.apply_node(name, node_seen(name, &facts));
        self.nodes.insert(name.to_owned(), facts);
    }

    fn delete_node(&mut self, name: &str) {
        self.world.delete_node(name);
        self.nodes.remove(name);
    }

    fn apply(&mut self, kind: Kind, name: &str, spec: &Value) {
        self.generation += 1;
        let object = json!({
            "apiVersion": "ensurance.crane.io/v1alpha1",
            "kind": kind.name(),
            "metadata": {"name": name, "generation": self.generation},
            "spec": spec,
        });
        self.world.apply_policy(kind, name, &object);
        self.objects.insert((kind, name.to_owned()), object);
    }

    fn delete(&mut self, kind: Kind, name: &str) {
        self.world.delete_policy(kind, name);
        self.objects.remove(&(kind, name.to_owned()));
    }

    /// Carries out what is planned until nothing is; every `fail`-th write fails.
    fn settle(&mut self, fail: usize) -> usize {
        let before = self.writes;
        for _ in 0..10_000 {
            let planned = self.world.plan(self.now, 7);
            if planned.is_empty() {
                return self.writes - before;
            }
            for write in planned {
                self.writes += 1;
                let failed = fail > 0 && self.writes.is_multiple_of(fail);
                self.carry_out(write, failed);
            }
        }
        panic!("the controller never comes to rest");
    }

    fn carry_out(&mut self, write: Write, failed: bool) {
        let node = match &write {
            Write::Apply { node, .. }
            | Write::Delete { node, .. }
            | Write::Open { node, .. }
            | Write::Ask { node } => node.clone(),
        };
        if failed {
            return self.world.written(&node, self.now, Err(Failed::default()));
        }
        let live = match write {
            Write::Apply { node, spec } => {
                let before = self.watermarks.get(&node);
                let generation =
                    before.map_or(1, |b| b["metadata"]["generation"].as_i64().unwrap() + 1);
                let status = before.map_or(Value::Null, |before| before["status"].clone());
                let object = json!({
                    "metadata": {"name": node, "uid": "nwm", "generation": generation},
                    "spec": spec,
                    "status": status,
                });
                let live = seen(&object);
                self.watermarks.insert(node, object);
                Some(live)
            }
            Write::Delete { node, .. } => {
                self.watermarks.remove(&node);
                None
            }
            Write::Ask { .. } => {
                self.world.answered(&node, self.now, Ok(None));
                return;
            }
            Write::Open { .. } => {
                self.opened.push(node.clone());
                return self.world.opened(&node, self.now, Ok(true));
            }
        };
        self.world.written(&node, self.now, Ok(live));
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Lets roll-outs and retries come to their ends.
    fn rest(&mut self) {
        for _ in 0..8 {
            self.settle(0);
            self.pass(Duration::from_mins(5));
        }
        self.settle(0);
    }

    fn report(&mut self, node: &str, status: Value) {
        let object = self.watermarks.get_mut(node).unwrap();
        object["status"] = status;
        let live = seen(object);
        self.world.apply_live(node, &live);
    }

    fn rules(&self, node: &str) -> usize {
        self.watermarks[node]["spec"]["rules"]
            .as_array()
            .map_or(0, Vec::len)
    }

    fn with_rules(&self) -> usize {
        self.watermarks
            .keys()
            .filter(|node| self.rules(node) > 0)
            .count()
    }

    fn condition(&mut self, kind: Kind, name: &str, condition: &str) -> Option<(String, String)> {
        self.world.status_failed(self.now);
        self.pass(Duration::from_secs(20));
        let statuses = self.world.statuses(self.now, "2026-11-21T00:00:00Z");
        let status = statuses
            .into_iter()
            .find(|s| s.key == (kind, name.to_owned()))?;
        let conditions = status.status["conditions"].as_array()?.clone();
        let found = conditions.into_iter().find(|c| c["type"] == condition)?;
        let text = |field: &str| found[field].as_str().unwrap().to_owned();
        Some((text("status"), text("reason")))
    }

    /// What a compile of everything, from nothing, gives each node.
    fn compiled_in_full(&self) -> BTreeMap<String, String> {
        let objects = Objects::from_values(self.objects.values().cloned());
        let hash = |(name, facts): (&String, &NodeFacts)| {
            let selected = objects
                .node_selectors()
                .any(|(_, selector)| selector.is_none_or(|s| s.matches(&facts.labels)));
            let policy = if selected {
                compile(&objects, facts).policy
            } else {
                PolicySet::default()
            };
            (
                name.clone(),
                NodeWatermarkSpec::new(name, &policy, false, Vec::new()).hash,
            )
        };
        self.nodes.iter().map(hash).collect()
    }

    fn hashes(&self) -> BTreeMap<String, String> {
        let hash = |(name, object): (&String, &Value)| {
            (
                name.clone(),
                object["spec"]["hash"].as_str().unwrap().to_owned(),
            )
        };
        self.watermarks.iter().map(hash).collect()
    }
}

fn node_qos(pool: Option<&str>, action: &str, value: u32, strategy: &str) -> Value {
    let selector = pool.map(|pool| json!({"matchLabels": {"pool": pool}}));
    json!({
        "selector": selector,
        "rules": [{
            "name": "cpu", "avoidanceThreshold": 2, "actionName": action, "strategy": strategy,
            "metricRule": {"name": "cpu_total_usage", "value": value},
        }],
    })
}

#[derive(Clone, Debug)]
enum Edit {
    Node(usize, usize),
    DeleteNode(usize),
    NodeQos {
        name: usize,
        pool: usize,
        action: usize,
        value: u32,
        preview: bool,
    },
    Action {
        name: usize,
        throttle: bool,
        effect: bool,
    },
    PodQos(usize, bool),
    Delete(usize, usize),
    Settle(usize),
    Pass(u64),
}

const POOLS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 4] = ["one", "two", "three", "four"];

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        (0usize..6, 0usize..3).prop_map(|(node, pool)| Edit::Node(node, pool)),
        (0usize..6).prop_map(Edit::DeleteNode),
        (0usize..4, 0usize..4, 0usize..4, 100u32..7000, any::<bool>()).prop_map(
            |(name, pool, action, value, preview)| Edit::NodeQos {
                name,
                pool,
                action,
                value,
                preview
            }
        ),
        (0usize..4, any::<bool>(), any::<bool>()).prop_map(|(name, throttle, effect)| {
            Edit::Action {
                name,
                throttle,
                effect,
            }
        }),
        (0usize..4, any::<bool>()).prop_map(|(name, evict)| Edit::PodQos(name, evict)),
        (0usize..3, 0usize..4).prop_map(|(kind, name)| Edit::Delete(kind, name)),
        (0usize..4).prop_map(Edit::Settle),
        (1u64..100).prop_map(Edit::Pass),
    ]
}

fn carry_out(cluster: &mut Cluster, edit: &Edit) {
    match *edit {
        Edit::Node(node, pool) => cluster.node(&format!("node{node}"), POOLS[pool]),
        Edit::DeleteNode(node) => cluster.delete_node(&format!("node{node}")),
        Edit::NodeQos {
            name,
            pool,
            action,
            value,
            preview,
        } => {
            let strategy = if preview { "Preview" } else { "None" };
            let spec = node_qos(POOLS.get(pool).copied(), NAMES[action], value, strategy);
            cluster.apply(Kind::NodeQos, NAMES[name], &spec);
        }
        Edit::Action {
            name,
            throttle,
            effect,
        } => {
            let mut spec = json!({});
            if throttle {
                spec["throttle"] = json!({"cpuThrottle": {}});
            }
            if effect {
                spec["disableScheduling"] = json!({"effect": "PreferNoSchedule"});
            }
            cluster.apply(Kind::AvoidanceAction, NAMES[name], &spec);
        }
        Edit::PodQos(name, evict) => {
            let allowed = if evict {
                json!(["throttle", "eviction"])
            } else {
                json!(["throttle"])
            };
            let spec = json!({"labelSelector": {}, "allowedActions": allowed});
            cluster.apply(Kind::PodQos, NAMES[name], &spec);
        }
        Edit::Delete(kind, name) => cluster.delete(Kind::ALL[kind], NAMES[name]),
        Edit::Settle(fail) => drop(cluster.settle(if fail == 0 { 0 } else { fail + 1 })),
        Edit::Pass(seconds) => cluster.pass(Duration::from_secs(seconds)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_history_of_edits_ends_where_a_full_compile_begins(edits in vec(edit(), 0..40)) {
        let mut cluster = Cluster::new();
        for edit in &edits {
            carry_out(&mut cluster, edit);
        }
        cluster.rest();
        prop_assert_eq!(cluster.hashes(), cluster.compiled_in_full());
        // At rest nothing is written, also by another replica that begins to lead.
        cluster.pass(Duration::from_mins(10));
        prop_assert_eq!(cluster.settle(0), 0);
        let mut other = world();
        for ((kind, name), object) in &cluster.objects {
            other.apply_policy(*kind, name, object);
        }
        for (name, object) in &cluster.watermarks {
            other.apply_live(name, &seen(object));
        }
        for (name, facts) in &cluster.nodes {
            other.apply_node(name, node_seen(name, facts));
        }
        other.lead();
        prop_assert!(other.plan(cluster.now, 100).is_empty());
    }
}

fn ready(nodes: usize) -> Cluster {
    let mut cluster = Cluster::new();
    for index in 0..nodes {
        cluster.node(&format!("node{index:03}"), "a");
    }
    cluster.apply(
        Kind::AvoidanceAction,
        "close",
        &json!({"coolDownSeconds": 30}),
    );
    cluster.settle(0);
    cluster
}

fn breached(value: f64) -> Value {
    json!({
        "rules": [{"id": "q/cpu", "strategy": "None", "state": "Breached", "value": value, "mark": 4000.0}],
        "scheduling": {"state": "NoSchedule"},
    })
}

#[test]
fn a_stricter_edit_goes_to_its_canaries_and_a_minute_later_to_the_others_at_the_given_rate() {
    let mut cluster = ready(300);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    assert_eq!(cluster.settle(0), 3);
    cluster.settle(0);
    let reason = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(reason, ("False".into(), "Canaries".into()));
    cluster.pass(Duration::from_secs(30));
    assert_eq!(cluster.settle(0), 0);
    cluster.pass(Duration::from_secs(20));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 3);
    cluster.pass(Duration::from_secs(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 103);
    cluster.pass(Duration::from_secs(5));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 300);
    assert_eq!(cluster.condition(Kind::NodeQos, "q", "RolledOut"), None);
}

#[test]
fn an_edit_by_which_canaries_act_stops_there_until_it_is_edited_again() {
    let mut cluster = ready(20);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.settle(0);
    let canary = cluster
        .watermarks
        .keys()
        .find(|node| cluster.rules(node) > 0)
        .unwrap()
        .clone();
    cluster.settle(0);
    cluster.report(&canary, breached(4100.0));
    cluster.pass(Duration::from_secs(5));
    cluster.settle(0);
    cluster.pass(Duration::from_hours(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 1);
    let notes = cluster.world.take_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.warning && note.reason == "RolloutStopped"),
        "{notes:?}"
    );
    let stopped = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(stopped, ("False".into(), "CanariesAct".into()));
    // What is looser goes to all nodes at once; so does the end of it all.
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 20);
    cluster.delete(Kind::NodeQos, "q");
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 0);
}

/// What a node says whose rule is over its mark and only reports.
fn would(value: f64) -> Value {
    json!({
        "rules": [{"id": "q/cpu", "strategy": "Preview", "state": "Breached", "value": value, "mark": 4000.0}],
        "scheduling": {"state": "Enabled"},
    })
}

#[test]
fn a_preview_rule_that_is_over_its_mark_does_not_act_and_its_edit_to_none_stops_at_the_canary() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.rest();
    let nodes: Vec<String> = cluster.nodes.keys().cloned().collect();
    for node in &nodes {
        cluster.report(node, would(4100.0));
    }
    cluster.world.take_notes();
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.settle(0);
    cluster.settle(0);
    let acting = |cluster: &Cluster| -> Vec<String> {
        let acting = cluster.watermarks.iter();
        let acting = acting.filter(|(_, w)| w["spec"]["rules"][0]["strategy"] == "None");
        acting.map(|(name, _)| name.clone()).collect()
    };
    let canary = acting(&cluster);
    assert_eq!(canary.len(), 1);
    // The others only report: none of them is told that it gets a softer taint.
    assert_eq!(cluster.world.take_notes(), []);
    cluster.report(&canary[0], breached(4100.0));
    cluster.settle(0);
    cluster.pass(Duration::from_hours(1));
    cluster.settle(0);
    assert_eq!(acting(&cluster), canary);
    let stopped = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(stopped, ("False".into(), "CanariesAct".into()));
}

#[test]
fn a_preview_rule_that_breaches_while_canaries_are_watched_stops_no_edit() {
    let mut cluster = ready(20);
    let mut spec = node_qos(None, "close", 4000, "Preview");
    cluster.apply(Kind::NodeQos, "q", &spec);
    cluster.rest();
    let mut second = spec["rules"][0].clone();
    second["name"] = json!("other");
    second["strategy"] = json!("None");
    spec["rules"].as_array_mut().unwrap().push(second);
    cluster.apply(Kind::NodeQos, "q", &spec);
    cluster.settle(0);
    cluster.settle(0);
    let nodes: Vec<String> = cluster.nodes.keys().cloned().collect();
    for node in &nodes {
        cluster.report(node, would(4100.0));
    }
    cluster.rest();
    assert!(nodes.iter().all(|node| cluster.rules(node) == 2));
}

#[test]
fn a_loosening_passes_a_stopped_edit_of_another_policy() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "loose",
        &node_qos(None, "close", 5000, "Preview"),
    );
    cluster.settle(0);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.settle(0);
    assert_eq!(
        cluster
            .watermarks
            .keys()
            .filter(|n| cluster.rules(n) == 2)
            .count(),
        1
    );
    cluster.delete(Kind::NodeQos, "loose");
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 1);
}

#[test]
fn no_more_nodes_are_closed_than_the_cap_and_the_worst_stay_closed() {
    let mut cluster = ready(20);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.rest();
    let names: Vec<String> = cluster.nodes.keys().cloned().collect();
    for (index, name) in names.iter().enumerate() {
        #[allow(clippy::cast_precision_loss, reason = "a small number")]
        let mut status = breached(4100.0 + index as f64);
        status["scheduling"]["state"] = json!("Enabled");
        cluster.report(name, status);
    }
    cluster.settle(0);
    let soft = |cluster: &Cluster| -> Vec<String> {
        let soft = cluster.watermarks.iter();
        let soft = soft.filter(|(_, object)| object["spec"]["softenScheduling"] == true);
        soft.map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(soft(&cluster), names[..14]);
    // Those that are closed stay closed, whatever the others do: no flapping.
    for name in &names[14..] {
        cluster.report(name, breached(4050.0));
    }
    assert_eq!(cluster.settle(0), 0);
    for name in &names {
        cluster.report(name, json!({"scheduling": {"state": "Enabled"}}));
    }
    cluster.settle(0);
    assert_eq!(soft(&cluster), Vec::<String>::new());
}

#[test]
fn an_edit_of_one_policy_writes_only_the_nodes_that_it_selects() {
    let mut cluster = Cluster::new();
    for index in 0..30 {
        cluster.node(&format!("node{index:03}"), POOLS[index % 3]);
    }
    cluster.apply(Kind::AvoidanceAction, "close", &json!({}));
    for pool in POOLS {
        cluster.apply(
            Kind::NodeQos,
            pool,
            &node_qos(Some(pool), "close", 4000, "None"),
        );
    }
    cluster.rest();
    cluster.apply(
        Kind::NodeQos,
        "b",
        &node_qos(Some("b"), "close", 5000, "None"),
    );
    assert_eq!(cluster.settle(0), 10);
}

#[test]
fn the_pods_that_a_pod_qos_matches_are_summed_from_what_agents_tell_and_unknown_before() {
    let mut cluster = ready(3);
    let spec = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "batch", &spec);
    cluster.settle(0);
    let matched = |cluster: &mut Cluster| {
        cluster.world.status_failed(cluster.now);
        cluster.pass(Duration::from_secs(20));
        let statuses = cluster.world.statuses(cluster.now, "2026-11-21T00:00:00Z");
        let mut of_pods = statuses.into_iter().filter(|s| s.key.0 == Kind::PodQos);
        of_pods.next().unwrap().status["matchedPods"].clone()
    };
    assert_eq!(matched(&mut cluster), Value::Null);
    let tells = |pods: u32| json!({"podPolicies": [{"name": "batch", "matched": pods}, {"name": "other", "matched": 9}]});
    cluster.report("node000", tells(0));
    assert_eq!(matched(&mut cluster), 0);
    cluster.report("node001", tells(4));
    cluster.report("node002", tells(7));
    assert_eq!(matched(&mut cluster), 11);
}

#[test]
fn numbers_alone_are_not_written_more_often_than_every_ten_seconds() {
    let mut cluster = ready(2);
    cluster.apply(
        Kind::PodQos,
        "batch",
        &json!({"labelSelector": {}, "allowedActions": ["throttle"]}),
    );
    cluster.rest();
    let mut writes = 0;
    for second in 0..60 {
        let tells = json!({"podPolicies": [{"name": "batch", "matched": second}]});
        cluster.report("node000", tells);
        cluster.pass(Duration::from_secs(1));
        for status in cluster.world.statuses(cluster.now, "2026-11-21T00:00:00Z") {
            if status.key.0 == Kind::PodQos {
                writes += 1;
                cluster.generation += 1;
                // The watch shows it.
                let mut object = cluster.objects[&status.key].clone();
                object["status"] = status.status;
                cluster.world.apply_policy(Kind::PodQos, "batch", &object);
            }
        }
    }
    assert!((5..=7).contains(&writes), "{writes} writes in a minute");
}

#[test]
fn more_rules_than_a_node_can_keep_are_left_out_and_told_and_block_no_other_edit() {
    let mut cluster = ready(2);
    let mut spec = node_qos(None, "close", 4000, "Preview");
    let rule = spec["rules"][0].clone();
    let rules = (0..60).map(|index| {
        let mut rule = rule.clone();
        rule["name"] = json!(format!("rule{index:02}"));
        rule
    });
    spec["rules"] = rules.collect();
    for index in 0..5 {
        cluster.apply(Kind::NodeQos, &format!("q{index}"), &spec);
    }
    cluster.rest();
    assert_eq!(cluster.rules("node000"), 256);
    let ready = cluster.condition(Kind::NodeQos, "q4", "Ready").unwrap();
    assert_eq!(ready, ("False".into(), "TooMany".into()));
    let ready = cluster.condition(Kind::NodeQos, "q3", "Ready").unwrap();
    assert_eq!(ready.0, "True");
    cluster.delete(Kind::NodeQos, "q0");
    cluster.rest();
    assert_eq!(cluster.rules("node000"), 240);
    let ready = cluster.condition(Kind::NodeQos, "q4", "Ready").unwrap();
    assert_eq!(ready.0, "True");
}
