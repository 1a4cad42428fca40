//! CPU time and memory of the controller's decisions for 15 000 nodes: `cargo bench --bench controller [-- --assert]`.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a measurement"
)]

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use plimsoll::crd::Kind;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::Bytes;
use plimsoll::reconcilers::reconciler::{ControllerSettings, Operation, Reconciler};
use plimsoll::reconcilers::wire::{ObservedNode, Watermark, WatermarkObject};
use serde_json::{Value, json};

const NODES: usize = 15_000;
const POLICIES: usize = 50;
const RULES: usize = 2;
const MAX_FULL_COMPILE: Duration = Duration::from_millis(300);
/// Per node that an edit affects.
const MAX_PER_NODE: Duration = Duration::from_micros(50);
/// In kB.
const MAX_RESIDENT_PER_NODE: usize = 20;

fn facts(index: usize) -> NodeFacts {
    let labels = (0..20).map(|label| {
        (
            format!("example.com/label-{label}"),
            format!("value-{label}"),
        )
    });
    let mut labels: BTreeMap<String, String> = labels.collect();
    labels.insert("kubernetes.io/hostname".to_owned(), name(index));
    labels.insert("pool".to_owned(), format!("pool{}", index % 50));
    NodeFacts {
        labels,
        cpus: 32,
        // Every node has a different amount of memory.
        memory: Bytes((128 << 30) + index as u64 * 4096),
        windows: None,
    }
}

fn seen(index: usize, facts: NodeFacts) -> ObservedNode {
    ObservedNode {
        uid: name(index),
        facts,
        ready: true,
        tainted: false,
        interference_identified: false,
        ..ObservedNode::default()
    }
}

fn name(index: usize) -> String {
    format!("node-{index:05}.example.internal")
}

fn policy(index: usize, generation: i64, value: u32, pool: Option<usize>) -> Value {
    let rules: Vec<Value> = (0..RULES)
        .map(|rule| {
            json!({
                "name": format!("rule-{rule}"), "avoidanceThreshold": 2, "actionName": "close",
                "metricRule": {"name": "cpu_total_usage", "value": value},
            })
        })
        .collect();
    let selector = pool.map(|pool| json!({"matchLabels": {"pool": format!("pool{pool}")}}));
    json!({
        "apiVersion": "ensurance.crane.io/v1alpha1",
        "kind": "NodeQOS",
        "metadata": {
            "name": format!("policy-{index:02}"), "generation": generation,
            "annotations": {"plimsoll.dev/rollout": "immediate"},
        },
        "spec": {"selector": selector, "rules": rules},
    })
}

fn apply(reconciler: &mut Reconciler, policy: &Value) {
    let name = policy["metadata"]["name"].as_str().unwrap();
    reconciler.apply_policy(Kind::NodeQos, name, policy);
}

fn timed<T>(run: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let out = run();
    (out, start.elapsed())
}

/// Writes everything that is due; returns the number of writes.
fn settle(reconciler: &mut Reconciler) -> usize {
    let mut count = 0;
    loop {
        let writes = reconciler.plan(BootTime::from_nanos(1), 1000);
        if writes.is_empty() {
            return count;
        }
        for write in writes {
            let Operation::Apply { node, spec } = write else {
                panic!("no node was deleted");
            };
            let body = serde_json::to_string(&spec).unwrap();
            let answer = format!(
                r#"{{"metadata":{{"uid":"nwm","generation":1}},"spec":{body},"status":{{"observedHash":"{}"}}}}"#,
                spec.hash()
            );
            let answer: WatermarkObject = serde_json::from_str(&answer).unwrap();
            let now = BootTime::from_nanos(1);
            reconciler.written(&node, now, Ok(Some(Watermark::of(answer))));
            count += 1;
        }
    }
}

/// Resident memory of this process, in kB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Whether every bar was met.
struct Bars(bool);

impl Bars {
    fn check<T: Copy + PartialOrd + std::fmt::Debug>(&mut self, what: &str, measured: T, max: T) {
        println!("{what}: {measured:?} (bar: {max:?})");
        self.0 &= measured <= max;
    }
}

fn main() -> ExitCode {
    let before = resident();
    let mut bars = Bars(true);
    let mut reconciler = Reconciler::new(ControllerSettings::default());
    let close = json!({
        "apiVersion": "ensurance.crane.io/v1alpha1", "kind": "AvoidanceAction",
        "metadata": {"name": "close", "generation": 1}, "spec": {},
    });
    reconciler.apply_policy(Kind::AvoidanceAction, "close", &close);
    for index in 0..POLICIES {
        apply(&mut reconciler, &policy(index, 1, 20_000, None));
    }
    reconciler.start_leading();
    let nodes: Vec<NodeFacts> = (0..NODES).map(facts).collect();
    let ((), full) = timed(|| {
        for (index, facts) in nodes.into_iter().enumerate() {
            reconciler.apply_node(&name(index), seen(index, facts));
        }
    });
    let rules = POLICIES * RULES;
    let what = format!("compile {NODES} nodes x {rules} rules in full");
    bars.check(&what, full, MAX_FULL_COMPILE);
    let (count, wrote) = timed(|| settle(&mut reconciler));
    println!(
        "first writes: {count} in {wrote:?}, {:?} each, including the answers",
        wrote / u32::try_from(count).unwrap()
    );
    let per_node = (resident() - before) / NODES;
    bars.check("resident kB per node", per_node, MAX_RESIDENT_PER_NODE);
    let (count, none) = timed(|| settle(&mut reconciler));
    println!("a plan when nothing changed: {none:?}");
    bars.check("writes for it", count, 0);
    edits(&mut reconciler, &mut bars);
    let assert = std::env::args().any(|arg| arg == "--assert");
    ExitCode::from(u8::from(assert && !bars.0))
}

fn edits(reconciler: &mut Reconciler, bars: &mut Bars) {
    let edit = policy(7, 2, 21_000, None);
    let ((), all) = timed(|| apply(reconciler, &edit));
    let what = "edit of a policy of all nodes, per node";
    bars.check(what, all / 15_000, MAX_PER_NODE);
    println!("writes for it: {}", settle(reconciler));
    let mut stricter = policy(8, 2, 19_000, None);
    stricter["metadata"]["annotations"] = json!({});
    let ((), all) = timed(|| apply(reconciler, &stricter));
    let what = "stricter edit of another policy, canaries first, per node";
    bars.check(what, all / 15_000, MAX_PER_NODE);
    let (count, canaries) = timed(|| settle(reconciler));
    println!("writes for it: {count} in {canaries:?}");
    let narrow = policy(60, 1, 20_000, Some(3));
    let ((), few) = timed(|| apply(reconciler, &narrow));
    let what = format!("new policy of {} nodes, per node", NODES / 50);
    bars.check(&what, few / 300, MAX_PER_NODE);
    println!("writes for it: {}", settle(reconciler));
    let mut relabelled = facts(5);
    relabelled
        .labels
        .insert("pool".to_owned(), "pool3".to_owned());
    let ((), one) = timed(|| reconciler.apply_node(&name(5), seen(5, relabelled)));
    bars.check("one node relabelled", one, MAX_PER_NODE);
    println!("writes for it: {}", settle(reconciler));
}
