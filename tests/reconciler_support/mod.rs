//! The controller's decisions with an API server, agents and a clock that are only pretended.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::panic,
    reason = "each test file uses a part of it, and fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use plimsoll::crd::{Kind, NodeWatermarkSpec, Objects, compile};
use plimsoll::engine::policy::{NodeFacts, PolicySet};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::Bytes;
use plimsoll::reconcilers::wire::{NodeSeen, Watermark};
use plimsoll::reconcilers::world::{Failed, Settings, World, Write};
use serde_json::{Value, json};

pub fn world() -> World {
    World::new(Settings::default())
}

pub fn seen(object: &Value) -> Watermark {
    Watermark::of_value(object).unwrap()
}

pub fn node_seen(name: &str, facts: &NodeFacts) -> NodeSeen {
    NodeSeen {
        uid: name.to_owned(),
        facts: facts.clone(),
        ready: true,
        tainted: false,
        interferes: false,
    }
}

/// An API server that holds what the controller writes, and the clock.
pub struct Cluster {
    pub world: World,
    pub now: BootTime,
    pub objects: BTreeMap<(Kind, String), Value>,
    pub nodes: BTreeMap<String, NodeFacts>,
    pub watermarks: BTreeMap<String, Value>,
    pub generation: i64,
    replaced: usize,
    writes: usize,
    /// Nodes whose agents say nothing.
    mute: BTreeSet<String>,
    /// Nodes with our taint.
    tainted: BTreeSet<String>,
}

impl Cluster {
    pub fn new() -> Self {
        let mut world = world();
        world.lead();
        Self {
            world,
            now: BootTime::default(),
            objects: BTreeMap::new(),
            nodes: BTreeMap::new(),
            watermarks: BTreeMap::new(),
            generation: 0,
            replaced: 0,
            writes: 0,
            mute: BTreeSet::new(),
            tainted: BTreeSet::new(),
        }
    }

    pub fn node(&mut self, name: &str, pool: &str) {
        let facts = NodeFacts {
            labels: BTreeMap::from([("pool".to_owned(), pool.to_owned())]),
            cpus: 8,
            memory: Bytes(16 << 30),
        };
        self.world.apply_node(name, node_seen(name, &facts));
        self.nodes.insert(name.to_owned(), facts);
    }

    pub fn delete_node(&mut self, name: &str) {
        self.world.delete_node(name);
        self.nodes.remove(name);
    }

    pub fn apply(&mut self, kind: Kind, name: &str, spec: &Value) {
        self.generation += 1;
        let before = self.objects.get(&(kind, name.to_owned()));
        let uid = match before {
            Some(before) => before["metadata"]["uid"].clone(),
            None => json!(format!("made at {}", self.generation)),
        };
        self.take(kind, name, &uid, self.generation, spec);
    }

    /// Somebody deletes it and makes it anew while nobody watches: only the new object is seen, of the generation that
    /// the other had.
    pub fn replace(&mut self, kind: Kind, name: &str, spec: &Value) {
        self.replaced += 1;
        let before = self.objects.get(&(kind, name.to_owned()));
        let generation = before.map_or(1, |it| it["metadata"]["generation"].as_i64().unwrap());
        let uid = json!(format!("made anew, {}", self.replaced));
        self.take(kind, name, &uid, generation, spec);
    }

    fn take(&mut self, kind: Kind, name: &str, uid: &Value, generation: i64, spec: &Value) {
        let object = json!({
            "apiVersion": "ensurance.crane.io/v1alpha1",
            "kind": kind.name(),
            "metadata": {"name": name, "uid": uid, "generation": generation},
            "spec": spec,
        });
        self.world.apply_policy(kind, name, &object);
        self.objects.insert((kind, name.to_owned()), object);
    }

    pub fn delete(&mut self, kind: Kind, name: &str) {
        self.world.delete_policy(kind, name);
        self.objects.remove(&(kind, name.to_owned()));
    }

    /// Carries out what is planned until nothing is; every `fail`-th write fails.
    pub fn settle(&mut self, fail: usize) -> usize {
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
                let mut object = json!({
                    "metadata": {"name": node, "uid": "nwm", "generation": generation},
                    "spec": spec,
                    "status": status,
                });
                self.keeps(&node, &mut object);
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
                return self.world.opened(&node, self.now, Ok(true));
            }
        };
        self.world.written(&node, self.now, Ok(live));
    }

    /// Its agent says that it keeps what it is to keep.
    fn keeps(&self, node: &str, object: &mut Value) {
        if !self.mute.contains(node) {
            let hash = object["spec"]["hash"].clone();
            object["status"]["observedHash"] = hash;
        }
    }

    /// Agents say nothing from now on.
    pub fn fall_silent(&mut self, nodes: &[String]) {
        self.mute.extend(nodes.iter().cloned());
    }

    /// An agent begins to speak.
    pub fn speak(&mut self, node: &str) {
        self.mute.remove(node);
        self.report(node, json!({}));
    }

    fn node_as_it_is(&self, name: &str, facts: &NodeFacts) -> NodeSeen {
        NodeSeen {
            tainted: self.tainted.contains(name),
            ..node_seen(name, facts)
        }
    }

    /// Our taint is put on a node, or taken away.
    pub fn taint(&mut self, node: &str, tainted: bool) {
        if tainted {
            self.tainted.insert(node.to_owned());
        } else {
            self.tainted.remove(node);
        }
        let seen = self.node_as_it_is(node, &self.nodes[node]);
        self.world.apply_node(node, seen);
    }

    /// Somebody deletes its `NodeWatermark`.
    pub fn delete_watermark(&mut self, node: &str) {
        self.watermarks.remove(node);
        self.world.delete_live(node);
    }

    /// All nodes.
    pub fn names(&self) -> Vec<String> {
        self.nodes.keys().cloned().collect()
    }

    /// Nodes whose first rule has this value in a field.
    pub fn with(&self, field: &str, value: impl Into<Value>) -> Vec<String> {
        let value = value.into();
        let nodes = self.watermarks.iter();
        let nodes = nodes.filter(|(_, it)| it["spec"]["rules"][0][field] == value);
        nodes.map(|(name, _)| name.clone()).collect()
    }

    /// Another replica takes over, that has seen nothing of what this one did.
    pub fn fail_over(&mut self) {
        self.world.status_failed(self.now);
        self.pass(Duration::from_secs(20));
        for status in self.world.statuses(self.now, "2026-11-21T00:00:00Z") {
            if let Some(object) = self.objects.get_mut(&status.key) {
                object["status"] = status.status;
            }
        }
        let mut other = world();
        for ((kind, name), object) in &self.objects {
            other.apply_policy(*kind, name, object);
        }
        for (name, object) in &self.watermarks {
            other.apply_live(name, &seen(object));
        }
        for (name, facts) in &self.nodes {
            other.apply_node(name, self.node_as_it_is(name, facts));
        }
        other.lead();
        self.world = other;
    }

    pub fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Lets roll-outs and retries come to their ends.
    pub fn rest(&mut self) {
        for _ in 0..8 {
            self.settle(0);
            self.pass(Duration::from_mins(5));
        }
        self.settle(0);
    }

    /// Its agent does what it says, and says it.
    pub fn report(&mut self, node: &str, status: Value) {
        let state = &status["scheduling"]["state"];
        self.taint(node, state.is_string() && state != "Enabled");
        let mut object = self.watermarks[node].clone();
        object["status"] = status;
        self.keeps(node, &mut object);
        self.world.apply_live(node, &seen(&object));
        self.watermarks.insert(node.to_owned(), object);
    }

    pub fn rules(&self, node: &str) -> usize {
        self.watermarks[node]["spec"]["rules"]
            .as_array()
            .map_or(0, Vec::len)
    }

    pub fn with_rules(&self) -> usize {
        self.watermarks
            .keys()
            .filter(|node| self.rules(node) > 0)
            .count()
    }

    pub fn condition(
        &mut self,
        kind: Kind,
        name: &str,
        condition: &str,
    ) -> Option<(String, String)> {
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
    pub fn compiled_in_full(&self) -> BTreeMap<String, String> {
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

    pub fn hashes(&self) -> BTreeMap<String, String> {
        let hash = |(name, object): (&String, &Value)| {
            (
                name.clone(),
                object["spec"]["hash"].as_str().unwrap().to_owned(),
            )
        };
        self.watermarks.iter().map(hash).collect()
    }
}

pub fn node_qos(pool: Option<&str>, action: &str, value: u32, strategy: &str) -> Value {
    let selector = pool.map(|pool| json!({"matchLabels": {"pool": pool}}));
    json!({
        "selector": selector,
        "rules": [{
            "name": "cpu", "avoidanceThreshold": 2, "actionName": action, "strategy": strategy,
            "metricRule": {"name": "cpu_total_usage", "value": value},
        }],
    })
}

pub fn ready(nodes: usize) -> Cluster {
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

pub fn breached(value: f64) -> Value {
    json!({
        "rules": [{"id": "q/cpu", "strategy": "None", "state": "Breached", "value": value, "mark": 4000.0}],
        "scheduling": {"state": "NoSchedule"},
    })
}
