use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::engine::pod::PodUid;
use crate::engine::testing::pod;
use crate::engine::units::Quota;

const SIZE: Size = Size {
    cpus: 4,
    memory: Bytes(8 << 30),
};

fn read(summary: Value) -> KubeletSummary {
    serde_json::from_value(summary).unwrap()
}

fn subject(uid: &str) -> PodSubject {
    PodSubject {
        pod: Arc::new(pod(uid)),
        quota: Quota::Limit(MilliCpu(500)),
        kubelet_uid: uid.to_owned(),
    }
}

fn samples(summary: Value, pods: &[PodSubject]) -> Samples {
    Samples::of(SIZE, None, Some(&read(summary)), pods)
}

fn busy_node() -> Value {
    json!({
        "node": {
            "nodeName": "a",
            "cpu": {"time": "2026-11-21T16:00:00Z", "usageNanoCores": 1_500_000_000, "usageCoreNanoSeconds": 9},
            "memory": {"time": "2026-11-21T16:00:00Z", "availableBytes": 1, "workingSetBytes": 2_u64 << 30},
        },
        "pods": [{
            "podRef": {"name": "p", "namespace": "d", "uid": "u1"},
            "cpu": {"time": "2026-11-21T15:59:55Z", "usageNanoCores": 250_000_000},
            "memory": {"time": "2026-11-21T15:59:55Z", "usageBytes": 100, "workingSetBytes": 70, "rssBytes": 40},
        }],
    })
}

#[test]
fn rates_become_counters_over_one_period() {
    let samples = samples(busy_node(), &[subject("u1")]);
    assert_eq!(samples.now.at.since(samples.before.at), PERIOD);
    assert_eq!(samples.before.node.cpu.unwrap().busy, 0);
    let cpu = samples.now.node.cpu.unwrap();
    assert_eq!((cpu.busy, cpu.online), (15_000_000_000, 4));
    let pod = &samples.now.pods[0];
    assert_eq!(pod.at.since(samples.before.pods[0].at), PERIOD);
    assert_eq!(pod.cpu_nanos, Some(2_500_000_000));
    assert_eq!(
        pod.target_cgroups[0].quota,
        Some(Quota::Limit(MilliCpu(500)))
    );
    assert_eq!(uses(pod), (Some(MilliCpu(250)), Some(Bytes(40))));
}

#[test]
fn only_the_second_sample_has_gauges() {
    let samples = samples(busy_node(), &[]);
    assert_eq!(samples.before.node.memory, None);
    let memory = samples.now.node.memory.unwrap();
    assert_eq!(
        (memory.total, memory.available),
        (Bytes(8 << 30), Bytes(6 << 30))
    );
}

#[test]
fn page_cache_to_reclaim_is_the_inactive_part() {
    let samples = samples(busy_node(), &[subject("u1")]);
    let parts = samples.now.pods[0].memory_parts.unwrap();
    assert_eq!((parts.unreclaimable, parts.cache), (Bytes(40), Bytes(30)));
}

#[test]
fn age_is_relative_to_the_newest_timestamp() {
    let samples = samples(busy_node(), &[subject("u1")]);
    let age = (BEFORE + PERIOD).since(samples.now.pods[0].at);
    assert_eq!(age, Duration::from_secs(5));
    assert_eq!(samples.now.at, BEFORE + PERIOD);
}

#[test]
fn missing_statistics_stay_missing() {
    let empty = samples(
        json!({"node": {}, "pods": [{"podRef": {"uid": "u1"}}]}),
        &[subject("u1")],
    );
    assert_eq!(empty.before.node.cpu, None);
    assert_eq!(empty.now.node.memory, None);
    assert_eq!(empty.now.node.pressure, [None; 3]);
    let pod = &empty.now.pods[0];
    assert_eq!((pod.cpu_nanos, pod.memory_parts), (None, None));
    // A kubelet reports 0 after its first sample.
    let first = samples(
        json!({"node": {"cpu": {"usageNanoCores": 0}, "memory": {"workingSetBytes": 0}}}),
        &[],
    );
    assert_eq!((first.before.node.cpu, first.now.node.memory), (None, None));
}

#[test]
fn a_pod_without_own_statistics_is_the_sum_of_its_containers() {
    let of = |second: Value| {
        let first = json!({
            "cpu": {"usageNanoCores": 100}, "memory": {"usageBytes": 9, "workingSetBytes": 7, "rssBytes": 5},
        });
        let samples = samples(
            json!({"pods": [{"podRef": {"uid": "u1"}, "containers": [first, second]}]}),
            &[subject("u1")],
        );
        samples.now.pods[0].clone()
    };
    let both = of(json!({
        "cpu": {"usageNanoCores": 20}, "memory": {"usageBytes": 3, "workingSetBytes": 2, "rssBytes": 1},
    }));
    assert_eq!(both.cpu_nanos, Some(1200));
    assert_eq!(
        both.memory_parts.unwrap(),
        MemoryParts {
            unreclaimable: Bytes(6),
            cache: Bytes(3)
        }
    );
    let one = of(json!({"cpu": {}}));
    assert_eq!((one.cpu_nanos, one.memory_parts), (None, None));
}

#[test]
fn pods_are_matched_by_their_kubelet_uid() {
    let mirror = PodSubject {
        kubelet_uid: "u1".to_owned(),
        ..subject("of-the-api")
    };
    let samples = samples(busy_node(), &[mirror, subject("u2")]);
    let uids: Vec<_> = samples.now.pods.iter().map(|pod| pod.uid.clone()).collect();
    assert_eq!(uids, [PodUid::from("of-the-api")]);
}

#[test]
fn pressure_without_any_stall_time_is_unknown() {
    let line = |avg10: f64, total: u64| json!({"total": total, "avg10": avg10, "avg60": 2.0, "avg300": 3.0});
    let measured = json!({"some": line(1.5, 7), "full": line(0.5, 1)});
    let none =
        json!({"some": {"total": 0, "avg10": 0, "avg60": 0, "avg300": 0}, "full": {"total": 0}});
    let samples = samples(
        json!({"node": {"cpu": {"psi": measured}, "memory": {"psi": none}, "io": {"psi": measured}}}),
        &[],
    );
    let [cpu, memory, io] = samples.now.node.pressure;
    let psi = |some, full| Pressure {
        some,
        full: Some(full),
        ..Pressure::default()
    };
    assert_eq!(cpu, Some(psi([1.5, 2.0, 3.0], [0.5, 2.0, 3.0])));
    assert_eq!(memory, None);
    assert_eq!(io, cpu);
}

#[test]
fn interface_rates_need_two_summaries() {
    let answer = |time: &str, bytes: u64| {
        read(json!({"node": {"network": {"time": time, "interfaces": [
            {"name": "eth0", "rxBytes": bytes, "txBytes": 2 * bytes}, {"name": "eth1"},
        ]}}}))
    };
    let (first, later) = (
        answer("2026-11-21T16:00:00Z", 1000),
        answer("2026-11-21T16:00:20Z", 5000),
    );
    let samples = Samples::of(SIZE, Some(&first), Some(&later), &[]);
    let link = &samples.now.node.interfaces[0];
    assert_eq!((link.receive_bytes, link.send_bytes), (2000, 4000));
    assert_eq!(samples.before.node.interfaces[0].receive_bytes, 0);
    assert_eq!(samples.now.node.interfaces.len(), 1);
    // The kubelet took no new sample.
    let same = Samples::of(SIZE, Some(&first), Some(&first), &[]);
    assert!(same.now.node.interfaces.is_empty());
    assert!(
        Samples::of(SIZE, None, Some(&later), &[])
            .now
            .node
            .interfaces
            .is_empty()
    );
}
