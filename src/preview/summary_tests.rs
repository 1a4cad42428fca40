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

fn read(summary: Value) -> Summary {
    serde_json::from_value(summary).unwrap()
}

fn subject(uid: &str) -> Subject {
    Subject {
        pod: Arc::new(pod(uid)),
        quota: Quota::Limit(MilliCpu(500)),
        kubelet_uid: uid.to_owned(),
    }
}

fn looks(summary: Value, pods: &[Subject]) -> Looks {
    Looks::of(SIZE, None, Some(&read(summary)), pods)
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
    let looks = looks(busy_node(), &[subject("u1")]);
    assert_eq!(looks.now.at.since(looks.before.at), PERIOD);
    assert_eq!(looks.before.node.cpu.unwrap().busy, 0);
    let cpu = looks.now.node.cpu.unwrap();
    assert_eq!((cpu.busy, cpu.online), (15_000_000_000, 4));
    let pod = &looks.now.pods[0];
    assert_eq!(pod.at.since(looks.before.pods[0].at), PERIOD);
    assert_eq!(pod.cpu_nanos, Some(2_500_000_000));
    assert_eq!(pod.levers[0].quota, Some(Quota::Limit(MilliCpu(500))));
    assert_eq!(uses(pod), (Some(MilliCpu(250)), Some(Bytes(40))));
}

#[test]
fn gauges_are_in_the_second_look_alone() {
    let looks = looks(busy_node(), &[]);
    assert_eq!(looks.before.node.memory, None);
    let memory = looks.now.node.memory.unwrap();
    assert_eq!(
        (memory.total, memory.available),
        (Bytes(8 << 30), Bytes(6 << 30))
    );
}

#[test]
fn page_cache_to_reclaim_is_the_inactive_part() {
    let looks = looks(busy_node(), &[subject("u1")]);
    let parts = looks.now.pods[0].memory_parts.unwrap();
    assert_eq!((parts.held, parts.cache), (Bytes(40), Bytes(30)));
}

#[test]
fn figures_are_as_old_as_the_newest_of_the_answer_says() {
    let looks = looks(busy_node(), &[subject("u1")]);
    let age = (BEFORE + PERIOD).since(looks.now.pods[0].at);
    assert_eq!(age, Duration::from_secs(5));
    assert_eq!(looks.now.at, BEFORE + PERIOD);
}

#[test]
fn what_the_kubelet_leaves_out_is_left_out() {
    let empty = looks(
        json!({"node": {}, "pods": [{"podRef": {"uid": "u1"}}]}),
        &[subject("u1")],
    );
    assert_eq!(empty.before.node.cpu, None);
    assert_eq!(empty.now.node.memory, None);
    assert_eq!(empty.now.node.pressure, [None; 3]);
    let pod = &empty.now.pods[0];
    assert_eq!((pod.cpu_nanos, pod.memory_parts), (None, None));
    // A kubelet that has looked at the machine only once tells of 0.
    let first = looks(
        json!({"node": {"cpu": {"usageNanoCores": 0}, "memory": {"workingSetBytes": 0}}}),
        &[],
    );
    assert_eq!((first.before.node.cpu, first.now.node.memory), (None, None));
}

#[test]
fn a_pod_without_figures_of_its_own_is_the_sum_of_its_containers() {
    let of = |second: Value| {
        let first = json!({
            "cpu": {"usageNanoCores": 100}, "memory": {"usageBytes": 9, "workingSetBytes": 7, "rssBytes": 5},
        });
        let looks = looks(
            json!({"pods": [{"podRef": {"uid": "u1"}, "containers": [first, second]}]}),
            &[subject("u1")],
        );
        looks.now.pods[0].clone()
    };
    let both = of(json!({
        "cpu": {"usageNanoCores": 20}, "memory": {"usageBytes": 3, "workingSetBytes": 2, "rssBytes": 1},
    }));
    assert_eq!(both.cpu_nanos, Some(1200));
    assert_eq!(
        both.memory_parts.unwrap(),
        MemoryParts {
            held: Bytes(6),
            cache: Bytes(3)
        }
    );
    let one = of(json!({"cpu": {}}));
    assert_eq!((one.cpu_nanos, one.memory_parts), (None, None));
}

#[test]
fn pods_are_found_by_the_uid_that_their_kubelet_knows() {
    let mirror = Subject {
        kubelet_uid: "u1".to_owned(),
        ..subject("of-the-api")
    };
    let looks = looks(busy_node(), &[mirror, subject("u2")]);
    let uids: Vec<_> = looks.now.pods.iter().map(|pod| pod.uid.clone()).collect();
    assert_eq!(uids, [PodUid::from("of-the-api")]);
}

#[test]
fn pressure_is_taken_where_the_kernel_keeps_it() {
    let line = |avg10: f64, total: u64| json!({"total": total, "avg10": avg10, "avg60": 2.0, "avg300": 3.0});
    let kept = json!({"some": line(1.5, 7), "full": line(0.5, 1)});
    let none =
        json!({"some": {"total": 0, "avg10": 0, "avg60": 0, "avg300": 0}, "full": {"total": 0}});
    let looks = looks(
        json!({"node": {"cpu": {"psi": kept}, "memory": {"psi": none}, "io": {"psi": kept}}}),
        &[],
    );
    let [cpu, memory, io] = looks.now.node.pressure;
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
fn rates_of_interfaces_take_two_answers() {
    let answer = |time: &str, bytes: u64| {
        read(json!({"node": {"network": {"time": time, "interfaces": [
            {"name": "eth0", "rxBytes": bytes, "txBytes": 2 * bytes}, {"name": "eth1"},
        ]}}}))
    };
    let (first, later) = (
        answer("2026-11-21T16:00:00Z", 1000),
        answer("2026-11-21T16:00:20Z", 5000),
    );
    let looks = Looks::of(SIZE, Some(&first), Some(&later), &[]);
    let link = &looks.now.node.interfaces[0];
    assert_eq!((link.receive_bytes, link.send_bytes), (2000, 4000));
    assert_eq!(looks.before.node.interfaces[0].receive_bytes, 0);
    assert_eq!(looks.now.node.interfaces.len(), 1);
    // The kubelet did not look anew.
    let same = Looks::of(SIZE, Some(&first), Some(&first), &[]);
    assert!(same.now.node.interfaces.is_empty());
    assert!(
        Looks::of(SIZE, None, Some(&later), &[])
            .now
            .node
            .interfaces
            .is_empty()
    );
}
