//! What pods are expected to use, and the peaks without those that have ended.

use super::*;
use crate::engine::pod::Resources;

#[test]
fn a_new_pod_counts_with_its_prior_until_it_is_measured() {
    let mut node = Node::new();
    node.system = 500;
    node.advance(400);
    near(node.cpu(), 500.0);
    node.start(pod("a", 1000), 3000);
    near(node.cpu(), 500.0 + 850.0);
    // It is first sampled one second later.
    node.advance(1);
    near(node.cpu(), 500.0 + 850.0);
    for age in 1..=20_u64 {
        node.advance(1);
        let weight = (age as f64 / 15.0).min(1.0);
        near(node.cpu(), 500.0 + weight * 3000.0 + (1.0 - weight) * 850.0);
    }
    node.advance(600);
    near(node.cpu(), 3500.0);
}

#[test]
fn a_pod_that_has_ended_counts_no_more() {
    let mut node = Node::new();
    node.system = 500;
    for (uid, cpu) in [("a", 4000), ("b", 1000)] {
        node.start(pod(uid, 1000), cpu);
    }
    node.advance(1000);
    near(node.cpu(), 5500.0);
    node.end("a");
    near(node.cpu(), 1500.0);
    for _ in 0..400 {
        node.advance(1);
        near(node.cpu(), 1500.0);
    }
}

#[test]
fn priors_follow_request_and_limit() {
    let resources = |memory_request, cpu_limit, memory_limit| Resources {
        cpu_limit: Some(cpu_limit).filter(|it| *it > 0).map(MilliCpu),
        memory_request: Bytes(memory_request),
        memory_limit: Some(memory_limit).filter(|it| *it > 0).map(Bytes),
    };
    for (request, resources, cpu, memory) in [
        (0, resources(0, 0, 0), 250.0, f64::from(200 << 20)),
        (2000, resources(GIB, 0, 0), 1700.0, 0.7 * GIB as f64),
        (
            2000,
            resources(GIB, 1500, GIB / 2),
            1500.0,
            GIB as f64 / 2.0,
        ),
        (0, resources(0, 100, 1 << 20), 100.0, f64::from(1 << 20)),
        (
            2000,
            resources(GIB, 4000, 2 * GIB),
            1700.0,
            0.7 * GIB as f64,
        ),
    ] {
        let pod = Pod {
            resources,
            ..pod("a", request)
        };
        let mut node = Node::new();
        node.advance(2);
        node.engine.set_pending_pods(vec![Arc::new(pod.clone())]);
        near(node.cpu(), cpu);
        near(node.memory() * GIB as f64, memory);
        near(node.load().cpu.newcomers, cpu / 100.0);
        // It gets its cgroup: it does not count twice.
        let running = false;
        node.start(Pod { running, ..pod }, 0);
        near(node.cpu(), cpu);
        near(node.memory() * GIB as f64, memory);
        node.advance(30);
        near(node.cpu(), cpu);
    }
}

#[test]
fn a_pod_that_does_not_start_counts_for_five_minutes() {
    let stuck = |number: u64| {
        let mut pod = pod(&format!("{number:02}"), 1000);
        pod.resources.memory_request = Bytes(10 * GIB);
        Pod {
            running: false,
            ..pod
        }
    };
    let mut node = Node::new();
    node.system = 500;
    node.advance(400);
    // Half of them have no cgroup: no sandbox could be made for them.
    (0..10).for_each(|number| node.start(stuck(number), 0));
    let pending = (10..20).map(|number| Arc::new(stuck(number)));
    let pending: Vec<_> = pending.collect();
    node.engine.set_pending_pods(pending.clone());
    node.advance(200);
    // The same pods again, as after a change of another one.
    node.engine.set_pending_pods(pending);
    node.advance(100);
    near(node.cpu(), 500.0 + 20.0 * 850.0);
    near(node.memory(), 140.0);
    node.advance(1);
    near(node.cpu(), 500.0);
    near(node.memory(), 0.0);
    near(node.load().cpu.newcomers, 0.0);
    // Its image can be pulled after all: it is new.
    node.pod("03").pod.running = true;
    node.pod("03").cpu = 2000;
    node.set_pods();
    near(node.cpu(), 500.0 + 850.0);
    node.advance(60);
    near(node.cpu(), 500.0 + 2000.0);
}

#[test]
fn a_pod_that_gets_its_cgroup_late_does_not_count_for_another_five_minutes() {
    let stuck = Pod {
        running: false,
        ..pod("a", 1000)
    };
    let mut node = Node::new();
    node.advance(2);
    node.engine.set_pending_pods(vec![Arc::new(stuck.clone())]);
    node.advance(200);
    node.start(stuck, 0);
    node.engine.set_pending_pods(Vec::new());
    node.advance(100);
    near(node.cpu(), 850.0);
    node.advance(1);
    near(node.cpu(), 0.0);
}

#[test]
fn init_containers_count_if_they_use_more_than_the_pod_will() {
    let mut node = Node::new();
    node.advance(10);
    let running = false;
    node.start(
        Pod {
            running,
            ..pod("a", 1000)
        },
        3000,
    );
    node.advance(100);
    near(node.cpu(), 3000.0);
    // The pod itself uses much less.
    node.pod("a").pod.running = true;
    node.pod("a").cpu = 100;
    node.set_pods();
    node.advance(1);
    near(node.cpu(), 850.0);
    node.advance(15);
    near(node.cpu(), 100.0);
}

#[test]
fn newcomers_are_what_an_average_does_not_show() {
    let mut node = Node::new();
    node.start(pod("old", 1000), 2000);
    node.advance(1000);
    near(node.load().cpu.newcomers, 0.0);
    node.start(pod("new", 1000), 3000);
    node.advance(61);
    // A fifth of it is in the mean of 5 minutes.
    near(node.load().cpu.newcomers, 30.0 * 0.8);
    near(node.load().cpu.expected, 50.0);
    node.advance(300);
    near(node.load().cpu.newcomers, 0.0);
}

#[test]
fn newcomers_lack_memory_for_five_minutes() {
    let mut node = Node::new();
    node.memory = 10 * GIB;
    node.advance(10);
    let mut new = pod("a", 0);
    new.resources.memory_request = Bytes(10 * GIB);
    node.start(new, 0);
    node.advance(1);
    near(node.memory(), 17.0);
    node.pod("a").memory = 4 * GIB;
    node.advance(10);
    near(node.memory(), 17.0);
    near(node.load().memory.newcomers, 3.0);
    node.pod("a").memory = 9 * GIB;
    node.advance(10);
    near(node.memory(), 19.0);
    node.pod("a").memory = GIB;
    node.advance(200);
    near(node.memory(), 17.0);
    node.advance(100);
    near(node.memory(), 11.0);
}

#[test]
fn memory_that_cannot_be_split_counts_as_not_used_yet() {
    let mut node = Node::new();
    node.change = |sample| {
        sample
            .pods
            .iter_mut()
            .for_each(|pod| pod.memory_parts = None);
    };
    node.advance(10);
    let mut new = pod("a", 0);
    new.resources.memory_request = Bytes(10 * GIB);
    node.start(new, 0);
    node.pod("a").memory = 2 * GIB;
    node.advance(10);
    near(node.memory(), 9.0);
}

#[test]
fn the_ratio_of_the_owner_replaces_the_usual_share() {
    let mut node = Node::new();
    let mut first = owned("a", 1000);
    first.resources.memory_request = Bytes(10 * GIB);
    node.start(first.clone(), 2000);
    node.pod("a").memory = 5 * GIB;
    node.advance(400);
    near(node.memory(), 5.0);
    let second = Pod {
        uid: "b".into(),
        cpu_request: MilliCpu(500),
        ..first
    };
    node.engine.set_pending_pods(vec![Arc::new(second.clone())]);
    near(node.cpu(), 2000.0 + 1000.0);
    near(node.memory(), 5.0 + 5.0);
    // Its limit holds all the same.
    let mut third = second;
    third.resources.cpu_limit = Some(MilliCpu(700));
    node.engine.set_pending_pods(vec![Arc::new(third)]);
    near(node.cpu(), 2000.0 + 700.0);
}

#[test]
fn a_throttled_pod_counts_with_what_it_used_while_it_wants_more() {
    let action = Arc::new(throttling());
    let mut node = Node::with_rules(vec![Rule {
        action,
        ..rule("n/cpu", "cpu_total_usage", 5000.0)
    }]);
    node.start(owned("a", 0), 4000);
    node.advance(600);
    let ratio = node.engine.load.node.owners.of(Some(&"owner".into()));
    near(ratio.cpu(), 4000.0 / 250.0);
    node.system = 4000;
    node.advance(100);
    assert!(!node.plan.throttles.is_empty());
    node.advance(500);
    // It uses all of its quota, which is half of what it used.
    near(node.load().cpu.expected, 80.0);
    assert_eq!(
        node.engine.load.node.owners.of(Some(&"owner".into())),
        ratio,
        "a throttled pod teaches nothing"
    );
    // It wants less than its quota.
    node.system = 5500;
    node.pod("a").cpu = 200;
    node.advance(400);
    assert!(!node.plan.throttles.is_empty());
    near(node.load().cpu.expected, 57.0);
}

#[test]
fn history_is_the_peak_without_pods_that_have_ended() {
    let mut node = Node::new();
    node.memory = 5 * GIB;
    node.system = 500;
    for (uid, cpu, memory) in [("a", 4000, 30), ("b", 2000, 20)] {
        node.start(pod(uid, 1000), cpu);
        node.pod(uid).memory = memory * GIB;
    }
    node.advance(100);
    assert_eq!(node.history(), [None; 2]);
    node.advance(300);
    near(node.history()[0].unwrap(), 0.9 * 65.0);
    near(node.history()[1].unwrap(), 0.9 * 55.0);
    // The pods become idle, which is not the end of them.
    node.pod("a").cpu = 0;
    node.pod("b").cpu = 0;
    node.advance(1000);
    near(node.cpu(), 500.0);
    near(node.history()[0].unwrap(), 0.9 * 65.0);
    near(node.load().percent, 65.0);
    node.end("a");
    near(node.history()[0].unwrap(), 0.9 * 25.0);
    near(node.history()[1].unwrap(), 0.9 * 25.0);
    node.advance(400);
    near(node.history()[0].unwrap(), 0.9 * 25.0);
    node.advance(3600);
    near(node.history()[0].unwrap(), 0.8 * 25.0);
    node.advance(26 * 3600);
    near(node.history()[0].unwrap(), 0.9 * 5.0);
    near(node.history()[1].unwrap(), 0.9 * 25.0);
}
