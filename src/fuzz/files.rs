//! Manifests, Kubernetes objects, and our own files.

use std::io::Cursor;
use std::path::{Component, Path};
use std::sync::{Arc, LazyLock};

use serde_json::Value;

use crate::crd::manifest::{self, ManifestObject};
use crate::crd::pod_facts::{PodObject, container_facts, cpu_quota, pod_facts};
use crate::crd::{NodeWatermarkSpec, Objects, compile};
use crate::engine::pod::Pod;
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::engine::quantity::Quantity;
use crate::engine::time::BootTime;
use crate::engine::units::Bytes;
use crate::node::cgroup::CgroupPath;
use crate::node::journal;
use crate::trace::read::Reader;
use crate::trace::replay::Replay;
use crate::trace::{LineRef, TickRef, TraceLine};

/// Policies in YAML or JSON, up to what a node enforces of them.
pub fn manifest(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let read = manifest::read(text);
    // A carriage return alone ends a YAML line as well.
    let lines = text.split(['\n', '\r']).count();
    assert!(
        read.parse_errors
            .iter()
            .all(|parse_error| parse_error.position.line <= lines + 1)
    );
    for object in &read.objects {
        assert!((1..=lines).contains(&object.positions.of("").line));
        assert!((1..=lines).contains(&object.positions.of("spec.rules[0].name").line));
        same_as_json(object);
    }
    let values = read.objects.into_iter().map(|object| object.value);
    check_compiled(values.collect());
}

/// JSON is YAML: an object reads the same in both.
fn same_as_json(object: &ManifestObject) {
    let text = object.value.to_string();
    // Aliases may expand to much more text; a list is read as its items.
    if text.len() > 1 << 20 || has_long_key(&object.value) || object.value["kind"] == "List" {
        return;
    }
    let again = manifest::read(&text);
    let values: Vec<&Value> = again.objects.iter().map(|object| &object.value).collect();
    assert_eq!(values, [&object.value], "{text}\n{:?}", again.parse_errors);
}

/// YAML allows at most 1024 characters in a key of a flow map.
fn has_long_key(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields
            .iter()
            .any(|(key, value)| key.len() > 1000 || has_long_key(value)),
        Value::Array(items) => items.iter().any(has_long_key),
        _ => false,
    }
}

/// The compiled policy does not depend on the order of objects, and survives the way to a node.
fn check_compiled(mut values: Vec<Value>) {
    let node = node();
    let forwards = compile(&Objects::from_values(values.clone()), &node);
    values.reverse();
    let backwards = compile(&Objects::from_values(values), &node);
    assert_eq!(forwards, backwards);
    check_round_trip(&forwards.policy);
}

fn check_round_trip(policy: &PolicySet) {
    let spec = NodeWatermarkSpec::new("uid", policy, false, Vec::new());
    let text = serde_json::to_string(&spec).expect("a spec has a JSON form");
    let spec: NodeWatermarkSpec = serde_json::from_str(&text).expect("the spec");
    let read = spec.read().expect("a spec of this version");
    assert_eq!(read.refused, []);
    assert_eq!(read.policy, *policy);
}

fn node() -> NodeFacts {
    NodeFacts {
        cpus: 8,
        memory: Bytes(16 << 30),
        ..NodeFacts::default()
    }
}

/// The spec of a `NodeWatermark`, as an agent reads it.
pub fn watermark(bytes: &[u8]) {
    let Ok(spec) = serde_json::from_slice::<NodeWatermarkSpec>(bytes) else {
        return;
    };
    let Ok(read) = spec.read() else {
        return;
    };
    assert!(read.policy.rules.len() <= spec.rules.len());
    assert!(read.policy.pods.len() <= spec.pod_policies.len());
    check_round_trip(&read.policy);
}

/// A Pod of the API server or a manifest.
pub fn pod(bytes: &[u8]) {
    let Ok(object) = serde_json::from_slice::<PodObject>(bytes) else {
        return;
    };
    let (_, _) = (container_facts(&object), cpu_quota(&object));
    let annotations = object.metadata.annotations.iter().flatten();
    for (_, value) in annotations {
        if let Ok(path) = CgroupPath::new(value) {
            let inside = |part| matches!(part, Component::Normal(_));
            assert!(Path::new(path.as_str()).components().all(inside));
        }
    }
    let Ok(facts) = pod_facts(&object) else {
        return;
    };
    let text = serde_json::to_string(&facts).expect("a pod has a JSON form");
    let again: Pod = serde_json::from_str(&text).expect("the pod");
    assert_eq!(again, facts);
    // The addition does not overflow.
    assert!(BootTime::default() + facts.grace >= BootTime::default());
}

/// Kubernetes quantities.
pub fn quantity(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(quantity) = text.parse::<Quantity>() else {
        return;
    };
    assert!(quantity.as_f64().is_finite());
    assert_eq!(quantity.to_string().parse(), Ok(quantity), "{quantity}");
    let (bytes, cpu) = (quantity.as_bytes(), quantity.as_milli_cpu());
    assert_eq!(bytes.is_some(), quantity > Quantity::from_integer(-1));
    assert!(cpu.is_none_or(|cpu| bytes.is_some_and(|bytes| cpu.0 >= bytes.0.saturating_sub(1))));
}

/// The journal: as given, and with a correct checksum.
pub fn journal(bytes: &[u8]) {
    check_journal(bytes);
    let body = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let mut whole = [body, b"\n"].concat();
    let sum = crc32fast::hash(&whole);
    whole.extend_from_slice(format!("crc32 {sum:08x}\n").as_bytes());
    check_journal(&whole);
}

fn check_journal(bytes: &[u8]) {
    let Ok((boot, records)) = journal::parse(bytes) else {
        return;
    };
    for record in &records {
        let path = record.cgroup.join(&record.target_cgroup);
        let climbs = |path: &CgroupPath| path.as_str().split('/').any(|part| part == "..");
        assert!(!climbs(&record.cgroup) && path.map_or(true, |path| !climbs(&path)));
    }
    if boot.contains(char::is_whitespace) {
        return;
    }
    let text = journal::format(&boot, BootTime::default(), records.clone());
    let again = journal::parse(text.as_bytes());
    assert!(again.is_ok_and(|again| again == (boot, records.clone())));
    // A flipped bit is detected.
    let mut damaged = bytes.to_vec();
    let bit = crc32fast::hash(bytes) as usize % (damaged.len() * 8);
    damaged[bit / 8] ^= 1 << (bit % 8);
    assert!(journal::parse(&damaged).map_or(true, |(_, read)| read == records));
}

/// A trace, read and replayed.
pub fn trace(bytes: &[u8]) {
    let Ok((header, mut reader)) = Reader::open(Cursor::new(bytes)) else {
        return;
    };
    let written = |line: &TraceLine| {
        let line = match line {
            TraceLine::Header(header) => LineRef::Header(header),
            TraceLine::Pods(pods) => LineRef::Pods(pods),
            TraceLine::Tick(tick) => LineRef::Tick(TickRef {
                now: tick.now,
                sample: &tick.sample,
            }),
            TraceLine::Transition(transition) => LineRef::Transition(transition),
        };
        serde_json::to_string(&line).expect("a line has a JSON form")
    };
    let mut lines = vec![TraceLine::Header(header)];
    while let Ok(Some(line)) = reader.read() {
        lines.push(line);
    }
    assert!(lines.len() <= bytes.len());
    for line in &lines {
        let text = written(line);
        let again: TraceLine = serde_json::from_str(&text).expect("the line");
        assert_eq!(written(&again), text);
    }
    replay(bytes);
}

fn replay(bytes: &[u8]) {
    let opened = Replay::open(Cursor::new(bytes), Arc::default(), None, |_| {
        POLICIES.clone()
    });
    let Ok((_, mut replay)) = opened else {
        return;
    };
    while let Ok(true) = replay.step() {}
    let summary = replay.summary();
    assert_eq!(summary.rules.len(), POLICIES.rules.len());
}

/// The policies of all examples.
static POLICIES: LazyLock<PolicySet> = LazyLock::new(|| {
    let texts = [
        include_str!("../../examples/ensurance/disable-scheduling.yaml"),
        include_str!("../../examples/ensurance/disk.yaml"),
        include_str!("../../examples/ensurance/eviction.yaml"),
        include_str!("../../examples/ensurance/idle-class.yaml"),
        include_str!("../../examples/ensurance/memory.yaml"),
        include_str!("../../examples/ensurance/node-probe.yaml"),
        include_str!("../../examples/ensurance/pressure.yaml"),
        include_str!("../../examples/ensurance/services.yaml"),
        include_str!("../../examples/ensurance/standing.yaml"),
        include_str!("../../examples/ensurance/throttle.yaml"),
    ];
    let objects = texts.iter().flat_map(|text| manifest::read(text).objects);
    let values = objects.map(|object| object.value);
    compile(&Objects::from_values(values), &node()).policy
});
