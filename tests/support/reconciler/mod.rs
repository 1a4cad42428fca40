//! A simulated cluster for the reconciler: API server, agents and clock.
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
use plimsoll::reconcilers::reconciler::{ControllerSettings, Operation, Reconciler, WriteError};
use plimsoll::reconcilers::wire::{ObservedNode, Watermark};
use serde_json::{Value, json};

pub fn reconciler() -> Reconciler {
    Reconciler::new(ControllerSettings::default())
}

pub fn seen(object: &Value) -> Watermark {
    Watermark::of_value(object).unwrap()
}

pub fn observed_node(name: &str, facts: &NodeFacts) -> ObservedNode {
    ObservedNode {
        uid: name.to_owned(),
        facts: facts.clone(),
        ready: true,
        tainted: false,
        interference_identified: false,
        ..ObservedNode::default()
    }
}

/// An API server with the controller's writes, and the clock.
pub struct Cluster {
    pub reconciler: Reconciler,
    pub now: BootTime,
    pub objects: BTreeMap<(Kind, String), Value>,
    pub nodes: BTreeMap<String, NodeFacts>,
    pub watermarks: BTreeMap<String, Value>,
    pub generation: i64,
    replaced: usize,
    writes: usize,
    /// Nodes whose agents do not report.
    unresponsive: BTreeSet<String>,
    /// Nodes with our taint.
    tainted: BTreeSet<String>,
}

impl Cluster {
    pub fn new() -> Self {
        let mut reconciler = reconciler();
        reconciler.start_leading();
        Self {
            reconciler,
            now: BootTime::default(),
            objects: BTreeMap::new(),
            nodes: BTreeMap::new(),
            watermarks: BTreeMap::new(),
            generation: 0,
            replaced: 0,
            writes: 0,
            unresponsive: BTreeSet::new(),
            tainted: BTreeSet::new(),
        }
    }

    pub fn node(&mut self, name: &str, pool: &str) {
        let facts = NodeFacts {
            labels: BTreeMap::from([("pool".to_owned(), pool.to_owned())]),
            cpus: 8,
            memory: Bytes(16 << 30),
            windows: None,
        };
        self.reconciler
            .apply_node(name, observed_node(name, &facts));
        self.nodes.insert(name.to_owned(), facts);
    }

    pub fn delete_node(&mut self, name: &str) {
        self.reconciler.delete_node(name);
        self.nodes.remove(name);
    }

    pub fn apply(&mut self, kind: Kind, name: &str, spec: &Value) {
        self.generation += 1;
        let before = self.objects.get(&(kind, name.to_owned()));
        let uid = match before {
            Some(before) => before["metadata"]["uid"].clone(),
            None => json!(format!("created at {}", self.generation)),
        };
        self.take(kind, name, &uid, self.generation, spec);
    }

    /// The object is deleted and created again while the watch is interrupted: only the new object is seen, with the same
    /// generation.
    pub fn replace(&mut self, kind: Kind, name: &str, spec: &Value) {
        self.replaced += 1;
        let before = self.objects.get(&(kind, name.to_owned()));
        let generation = before.map_or(1, |it| it["metadata"]["generation"].as_i64().unwrap());
        let uid = json!(format!("created again, {}", self.replaced));
        self.take(kind, name, &uid, generation, spec);
    }

    fn take(&mut self, kind: Kind, name: &str, uid: &Value, generation: i64, spec: &Value) {
        let object = json!({
            "apiVersion": "ensurance.crane.io/v1alpha1",
            "kind": kind.name(),
            "metadata": {"name": name, "uid": uid, "generation": generation},
            "spec": spec,
        });
        self.reconciler.apply_policy(kind, name, &object);
        self.objects.insert((kind, name.to_owned()), object);
    }

    pub fn delete(&mut self, kind: Kind, name: &str) {
        self.reconciler.delete_policy(kind, name);
        self.objects.remove(&(kind, name.to_owned()));
    }

    /// Carries out planned operations until there are none; every `fail`-th one fails.
    pub fn settle(&mut self, fail: usize) -> usize {
        let before = self.writes;
        for _ in 0..10_000 {
            let planned = self.reconciler.plan(self.now, 7);
            if planned.is_empty() {
                return self.writes - before;
            }
            for operation in planned {
                self.writes += 1;
                let failed = fail > 0 && self.writes.is_multiple_of(fail);
                self.carry_out(operation, failed);
            }
        }
        panic!("the controller never settles");
    }

    fn carry_out(&mut self, operation: Operation, failed: bool) {
        let node = match &operation {
            Operation::Apply { node, .. }
            | Operation::Delete { node, .. }
            | Operation::RemoveTaint { node, .. }
            | Operation::RemoveLabel { node, .. }
            | Operation::ReadLease { node } => node.clone(),
        };
        if failed {
            return self
                .reconciler
                .written(&node, self.now, Err(WriteError::default()));
        }
        let written = match operation {
            Operation::Apply { node, spec } => {
                let before = self.watermarks.get(&node);
                let generation =
                    before.map_or(1, |b| b["metadata"]["generation"].as_i64().unwrap() + 1);
                let status = before.map_or(Value::Null, |before| before["status"].clone());
                let mut object = json!({
                    "metadata": {"name": node, "uid": "nwm", "generation": generation},
                    "spec": spec,
                    "status": status,
                });
                self.confirm(&node, &mut object);
                let watermark = seen(&object);
                self.watermarks.insert(node, object);
                Some(watermark)
            }
            Operation::Delete { node, .. } => {
                self.watermarks.remove(&node);
                None
            }
            Operation::ReadLease { .. } => {
                self.reconciler.lease_read(&node, self.now, Ok(None));
                return;
            }
            Operation::RemoveLabel { .. } => {
                return self.reconciler.label_removed(&node, self.now, true);
            }
            Operation::RemoveTaint { .. } => {
                return self.reconciler.taint_removed(&node, self.now, Ok(true));
            }
        };
        self.reconciler.written(&node, self.now, Ok(written));
    }

    /// The agent confirms that it enforces the spec.
    fn confirm(&self, node: &str, object: &mut Value) {
        if !self.unresponsive.contains(node) {
            let hash = object["spec"]["hash"].clone();
            object["status"]["observedHash"] = hash;
        }
    }

    /// These agents stop reporting.
    pub fn stop_agents(&mut self, nodes: &[String]) {
        self.unresponsive.extend(nodes.iter().cloned());
    }

    /// An agent starts to report.
    pub fn start_agent(&mut self, node: &str) {
        self.unresponsive.remove(node);
        self.report(node, json!({}));
    }

    fn current_node(&self, name: &str, facts: &NodeFacts) -> ObservedNode {
        ObservedNode {
            tainted: self.tainted.contains(name),
            ..observed_node(name, facts)
        }
    }

    /// Adds or removes our taint.
    pub fn taint(&mut self, node: &str, tainted: bool) {
        if tainted {
            self.tainted.insert(node.to_owned());
        } else {
            self.tainted.remove(node);
        }
        let seen = self.current_node(node, &self.nodes[node]);
        self.reconciler.apply_node(node, seen);
    }

    /// Another client deletes the `NodeWatermark`.
    pub fn delete_watermark(&mut self, node: &str) {
        self.watermarks.remove(node);
        self.reconciler.delete_watermark(node);
    }

    /// The names of all nodes.
    pub fn names(&self) -> Vec<String> {
        self.nodes.keys().cloned().collect()
    }

    /// The nodes whose first rule has this value in a field.
    pub fn with(&self, field: &str, value: impl Into<Value>) -> Vec<String> {
        let value = value.into();
        let nodes = self.watermarks.iter();
        let nodes = nodes.filter(|(_, it)| it["spec"]["rules"][0][field] == value);
        nodes.map(|(name, _)| name.clone()).collect()
    }

    /// Another replica takes over, with no state of this one.
    pub fn fail_over(&mut self) {
        self.reconciler.status_failed(self.now);
        self.pass(Duration::from_secs(20));
        for status in self.reconciler.statuses(self.now, "2026-11-21T00:00:00Z") {
            if let Some(object) = self.objects.get_mut(&status.key) {
                object["status"] = status.status;
            }
        }
        let mut other = reconciler();
        for ((kind, name), object) in &self.objects {
            other.apply_policy(*kind, name, object);
        }
        for (name, object) in &self.watermarks {
            other.apply_watermark(name, &seen(object));
        }
        for (name, facts) in &self.nodes {
            other.apply_node(name, self.current_node(name, facts));
        }
        other.start_leading();
        self.reconciler = other;
    }

    pub fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// Waits until rollouts and retries are finished.
    pub fn finish(&mut self) {
        for _ in 0..8 {
            self.settle(0);
            self.pass(Duration::from_mins(5));
        }
        self.settle(0);
    }

    /// The agent reports a status, and sets the taint accordingly.
    pub fn report(&mut self, node: &str, status: Value) {
        let state = &status["scheduling"]["state"];
        self.taint(node, state.is_string() && state != "Enabled");
        let mut object = self.watermarks[node].clone();
        object["status"] = status;
        self.confirm(node, &mut object);
        self.reconciler.apply_watermark(node, &seen(&object));
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
        self.reconciler.status_failed(self.now);
        self.pass(Duration::from_secs(20));
        let statuses = self.reconciler.statuses(self.now, "2026-11-21T00:00:00Z");
        let status = statuses
            .into_iter()
            .find(|s| s.key == (kind, name.to_owned()))?;
        let conditions = status.status["conditions"].as_array()?.clone();
        let found = conditions.into_iter().find(|c| c["type"] == condition)?;
        let text = |field: &str| found[field].as_str().unwrap().to_owned();
        Some((text("status"), text("reason")))
    }

    /// The hashes of a full compilation, by node.
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
        "rules": [{"id": "q/cpu", "strategy": "Enforce", "state": "Breached", "value": value, "mark": 4000.0}],
        "scheduling": {"state": "NoSchedule"},
    })
}
