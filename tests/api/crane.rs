//! crane-scheduler's annotations on a real API server, written by a real agent; and crane-scheduler's own code, which reads them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::agent_support::{Agent, NODE, Node, pod, throttling};
use crate::api_support::{LEASES, lease_namespace};
use crate::run_support::BINARY;
use jiff::Timestamp;
use plimsoll::clock;
use plimsoll::crd::crane_annotations::{CraneValues, HOT, KEYS, WRITTEN, Zone};
use plimsoll::crd::emergency_stop::{ANNOTATION, OBJECT};
use plimsoll::engine::sample::{CpuTimes, NodeMemory, Sample};
use plimsoll::engine::units::Bytes;
use plimsoll::engine::window::NodeWindows;
use plimsoll::node::machine::saved_file::{SavedFile, Validity};
use serde_json::{Value, json};

/// A minute and a write that waits for its token.
const SETTLED: Duration = Duration::from_mins(3);

fn annotations(node: &Node) -> BTreeMap<String, String> {
    let found = node.plane.get("node", NODE)["metadata"]["annotations"].clone();
    serde_json::from_value(found).unwrap_or_default()
}

/// Those of crane.
fn crane(node: &Node) -> BTreeMap<String, String> {
    let mut all = annotations(node);
    all.retain(|key, _| KEYS.contains(&&**key) || key == WRITTEN);
    all
}

/// Number and time of an annotation.
fn number(node: &Node, key: &str) -> Option<f64> {
    let all = annotations(node);
    let (number, time) = all.get(key)?.split_once(',')?;
    assert_eq!(Some(time), all.get(WRITTEN).map(String::as_str), "{all:?}");
    number.parse().ok()
}

/// Saves windows as an agent that has run for some minutes would: CPU at this percentage, memory at 25 %.
fn save_windows(node: &Node, percent: u64) {
    const STEP: Duration = Duration::from_secs(1);
    let now = clock::boot_time();
    let mut windows = NodeWindows::default();
    let mut busy = 0;
    let mut at = now.before(Duration::from_mins(4));
    while at < now {
        let mut sample = Sample {
            at,
            ..Sample::default()
        };
        sample.node.cpu = Some(CpuTimes {
            busy,
            idle: 0,
            online: 1,
        });
        sample.node.memory = Some(NodeMemory {
            total: Bytes(1 << 30),
            available: Bytes(3 << 28),
            ..NodeMemory::default()
        });
        windows.add(&sample);
        busy += percent * 10_000_000;
        at = at + STEP;
    }
    let state = node.machine.path("state");
    std::fs::create_dir_all(&state).unwrap();
    let file = SavedFile::new(&state, "windows.json", 2, Validity::ThisBoot);
    file.unwrap().save(&windows).unwrap();
}

fn set(node: &Node, key: &str, text: &str) {
    let annotation = format!("{key}={text}");
    node.plane
        .kubectl(&["annotate", "--overwrite", "node", NODE, &annotation]);
}

/// Creates a pod that has not started yet.
fn start_pod(node: &Node, cpu: &str) {
    let mut newcomer = pod("newcomer", "web");
    newcomer["spec"]["containers"][0]["resources"] = json!({"requests": {"cpu": cpu}});
    node.plane.create(&[newcomer]);
}

fn stop(node: &Node, agent: Agent) {
    node.plane.kubectl(&["delete", "daemonset", "agent"]);
    let (succeeded, output) = agent.terminate();
    assert!(succeeded, "{output}");
}

#[test]
fn annotations_follow_the_load_and_go_with_the_agent() {
    let Some(node) = Node::new() else { return };
    let own = node.with_daemon_set();
    node.set_rules(&throttling());
    save_windows(&node, 60);
    set(&node, "example.com/own", "1");
    let agent = node.agent(&[own.as_slice(), &["--crane-annotations=UTC"]].concat());
    agent.until("what is known is written", || {
        number(&node, KEYS[0]).is_some() && number(&node, HOT).is_some()
    });
    let written = crane(&node);
    let usage = number(&node, KEYS[0]).unwrap();
    assert!((0.1..=0.61).contains(&usage), "{written:?}");
    assert!(number(&node, KEYS[3]).is_some(), "{written:?}");
    assert_eq!(written.len(), 4, "hour and day are not known: {written:?}");
    let zone: Zone = "UTC".parse().unwrap();
    let time = zone.parse(&written[WRITTEN]).unwrap();
    let age = clock::wall_time().duration_since(time).as_secs();
    assert!((0..60).contains(&age), "{written:?}");

    let before = number(&node, HOT).unwrap();
    start_pod(&node, "1");
    agent.until("the hot value shows a pod that starts", || {
        number(&node, HOT) >= Some(before + 1.0)
    });

    set(&node, KEYS[0], "0.00000,2026-01-02T15:04:05Z");
    agent.until_within(SETTLED, "another writer's value is replaced", || {
        annotations(&node)[KEYS[0]].ends_with(&crane(&node)[WRITTEN])
    });
    let log = agent.output();
    assert_eq!(log.matches("another writer changes crane's").count(), 1);
    stop(&node, agent);
    assert_eq!(crane(&node), BTreeMap::new());
    assert_eq!(annotations(&node)["example.com/own"], "1");
}

#[test]
fn an_emergency_stop_removes_annotations_until_it_ends() {
    let Some(node) = Node::new() else { return };
    node.set_rules(&throttling());
    save_windows(&node, 60);
    let object = |why: &str| {
        let metadata =
            json!({"name": OBJECT, "namespace": LEASES, "annotations": {ANNOTATION: why}});
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    };
    node.plane.apply(&[lease_namespace(), object("false")]);
    let agent = node.agent(&["--crane-annotations"]);
    let is_written = || number(&node, KEYS[0]).is_some();
    agent.until("what is known is written", is_written);
    node.plane.apply(&[object("true")]);
    agent.until_within(SETTLED, "they are removed", || crane(&node).is_empty());
    node.plane.apply(&[object("false")]);
    agent.until_within(SETTLED, "they are written again", is_written);
}

#[test]
fn an_agent_without_the_option_touches_only_what_an_agent_wrote() {
    let Some(node) = Node::new() else { return };
    let own = node.with_daemon_set();
    node.set_rules(&throttling());
    set(&node, KEYS[0], "0.50000,2026-01-02T15:04:05Z");
    set(&node, HOT, "0.5,2026-01-02T15:04:06Z");
    let others = crane(&node);
    let agent = node.agent(&own);
    agent.until("the node is labelled", || {
        node.plane.get("node", NODE)["metadata"]["labels"]["plimsoll.dev/load"].is_string()
    });
    assert_eq!(crane(&node), others, "crane's own");
    set(&node, WRITTEN, "2026-01-02T15:04:06Z");
    agent.until("what an earlier agent wrote is removed", || {
        !crane(&node).contains_key(WRITTEN)
    });
    let left = crane(&node);
    assert_eq!(left.keys().collect::<Vec<_>>(), [KEYS[0]]);
    stop(&node, agent);
    assert_eq!(crane(&node), left);
}

#[test]
fn an_unknown_zone_is_an_error_at_the_start() {
    let zone = "--crane-annotations=Asia/Nowhere";
    let output = Command::new(BINARY)
        .args(["agent", "--node-name", NODE, zone])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    let words = "write a name of the tz database, such as Asia/Shanghai or UTC";
    assert!(error.contains(words), "{error}");
}

/// What crane-scheduler makes of Nodes, with this TZ: why each is filtered out, and its score.
fn crane_scheduler(tz: Option<&str>, nodes: &[Value]) -> Vec<(String, i64)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let policy = "target/crane-scheduler/deploy/manifests/dynamic/policy.yaml";
    let mut command = Command::new(root.join("target/e2e/bin/crane-score"));
    command.arg(root.join(policy)).env_remove("TZ");
    command.envs(tz.map(|tz| ("TZ", tz)));
    let mut process = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // What it ignores.
        .stderr(Stdio::null())
        .spawn()
        .expect("make crane-score builds it");
    let mut nodes = nodes.to_vec();
    for (index, node) in nodes.iter_mut().enumerate() {
        node["metadata"]["name"] = format!("node{index}").into();
    }
    let list = json!({"apiVersion": "v1", "kind": "NodeList", "items": nodes});
    let mut input = process.stdin.take().unwrap();
    input.write_all(list.to_string().as_bytes()).unwrap();
    drop(input);
    let output = process.wait_with_output().unwrap();
    assert!(output.status.success());
    let verdicts: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    let verdict = |it: &Value| {
        let filtered = it["filtered"].as_str().unwrap().to_owned();
        (filtered, it["score"].as_i64().unwrap())
    };
    verdicts.iter().map(verdict).collect()
}

/// A Node with the annotations that an agent would have written so many seconds ago.
fn written(zone: &str, age: i64, usage: f64, pending: f64) -> Value {
    let zone: Zone = zone.parse().unwrap();
    let time = zone.time(Timestamp::from_second(clock::wall_time().as_second() - age).unwrap());
    let values = CraneValues::of([Some(usage); 6], Some(pending));
    let annotations: BTreeMap<_, _> = values.annotations(&time).collect();
    json!({"metadata": {"annotations": annotations}})
}

fn scores(tz: Option<&str>, nodes: &[Value]) -> Vec<i64> {
    let verdicts = crane_scheduler(tz, nodes).into_iter();
    verdicts.map(|(_, score)| score).collect()
}

#[test]
#[ignore = "needs crane-scheduler: make schedulers"]
fn crane_scheduler_reads_what_the_agent_writes() {
    let here = |age, usage, pending| written("Asia/Shanghai", age, usage, pending);
    // Uses, and what each point of the hot value takes.
    let pending = [0.0, 0.4, 1.0, 7.0, 7.6, 30.0, 70.0, 500.0];
    let nodes = pending.map(|pending| here(0, 30.0, pending));
    assert_eq!(scores(None, &nodes), [70, 70, 69, 63, 62, 40, 0, 0]);
    let mut fractional = here(0, 30.0, 0.0);
    let time = fractional["metadata"]["annotations"][KEYS[0]].clone();
    let time = time.as_str().unwrap().split_once(',').unwrap().1;
    fractional["metadata"]["annotations"][HOT] = json!(format!("0.75,{time}"));
    assert_eq!(scores(None, &[fractional]), [63]);

    // The averages of 5 minutes weigh 0.4 of 2.0, those of an hour 0.6, those of a day 1.0.
    let ages = [
        4 * 60 + 50,
        5 * 60 + 10,
        7 * 60 + 50,
        8 * 60 + 10,
        20 * 60 + 10,
        4 * 3600,
    ];
    let nodes = ages.map(|age| here(age, 30.0, 10.0));
    assert_eq!(scores(None, &nodes), [60, 70, 70, 56, 35, 0]);

    // It filters by CPU and memory over 65 %, until that expires.
    let full = [
        here(0, 66.0, 0.0),
        here(0, 64.9, 0.0),
        here(30 * 60, 99.0, 0.0),
    ];
    let filtered: Vec<_> = crane_scheduler(None, &full)
        .into_iter()
        .map(|(why, _)| !why.is_empty())
        .collect();
    assert_eq!(filtered, [true, false, false]);
}

#[test]
#[ignore = "needs crane-scheduler: make schedulers"]
fn crane_scheduler_in_another_zone_ignores_or_trusts_them_silently() {
    let utc = [written("UTC", 0, 99.0, 50.0)];
    assert_eq!(crane_scheduler(Some("UTC"), &utc)[0].1, 0, "full, hot");
    assert_ne!(crane_scheduler(Some("UTC"), &utc)[0].0, "");
    // Eight hours behind: all expired. The node scores 0, and is not filtered.
    let idle = [written("UTC", 0, 10.0, 0.0)];
    assert_eq!(scores(Some("UTC"), &idle), [90]);
    assert_eq!(crane_scheduler(None, &idle), [(String::new(), 0)]);
    assert_eq!(crane_scheduler(None, &utc), [(String::new(), 0)]);
    // Eight hours ahead: what is two hours old counts.
    let old = [written("Asia/Shanghai", 2 * 3600, 10.0, 0.0)];
    assert_eq!(scores(Some("UTC"), &old), [90]);
}

#[test]
#[ignore = "needs crane-scheduler: make schedulers"]
fn crane_scheduler_sees_a_burst_on_the_node_of_a_real_agent() {
    let node = Node::new().expect("an API server");
    let own = node.with_daemon_set();
    node.set_rules(&throttling());
    save_windows(&node, 30);
    let agent = node.agent(&[own.as_slice(), &["--crane-annotations"]].concat());
    agent.until("what is known is written", || {
        number(&node, KEYS[0]).is_some() && number(&node, HOT).is_some()
    });
    let score = || scores(None, &[node.plane.get("node", NODE)])[0];
    // Two averages of 5 minutes are known, which weigh 0.4 of 2.0.
    let before = score();
    assert!((10..=20).contains(&before), "{before}");
    let hot = number(&node, HOT).unwrap();
    start_pod(&node, "1");
    agent.until("the hot value shows a pod that starts", || {
        number(&node, HOT) >= Some(hot + 1.0)
    });
    let after = score();
    assert!(after < before, "{after}, {before} before");
    stop(&node, agent);
    assert_eq!(score(), 0, "without annotations");
}
