//! A steady evaluation does not allocate.

use crate::engine_support::{
    GIB, Load, Node, PERIOD, disabling_scheduling, eviction_action, idle_action, pod, rule,
    throttling,
};
use plimsoll::engine::policy::{Action, Rule, Strategy};
use plimsoll::engine::sample::{ContainerSample, DiskSample, InterfaceSample};
use plimsoll::engine::units::MilliCpu;

fn rules() -> Vec<Rule> {
    let gc = Action {
        force_gc: true,
        ..eviction_action(2)
    };
    vec![
        rule("n/cpu", "cpu_total_usage", 4000.0, throttling(40, 20)),
        rule(
            "n/cpu-idle",
            "cpu_total_utilization",
            60.0,
            idle_action(30, 30),
        ),
        rule("n/memory", "memory_total_usage", 8e9, gc),
        rule(
            "n/close",
            "cpu_load_1_min",
            4.0,
            disabling_scheduling("close"),
        ),
        rule(
            "n/disk",
            "disk_read_kibps",
            1e6,
            disabling_scheduling("close"),
        ),
        rule("n/net", "network_sent_kibps", 1e6, throttling(10, 10)),
        rule(
            "n/queue",
            "container_sched_run_queue_time",
            1e6,
            disabling_scheduling("close"),
        ),
        rule(
            "n/window",
            "cpu_usage_avg_5m",
            99.0,
            disabling_scheduling("close"),
        ),
        Rule {
            active_during: vec!["00:00-24:00 Europe/Berlin".parse().unwrap()],
            ..rule("n/always", "cpu_total_usage", 4000.0, throttling(40, 20))
        },
        Rule {
            active_during: vec!["Mon-Fri 22:00-06:00 Australia/Lord_Howe".parse().unwrap()],
            ..rule("n/night", "cpu_total_usage", 4000.0, throttling(10, 20))
        },
        Rule {
            strategy: Strategy::Preview,
            ..rule("n/preview", "cpu_total_usage", 3000.0, throttling(40, 20))
        },
    ]
}

fn node(pods: usize) -> Node {
    let mut loads: Vec<_> = (0..pods)
        .map(|index| Load::new(&format!("pod-{index:03}"), 100))
        .collect();
    loads[0].pod.protected = true;
    loads[1].pod.running = false;
    for load in &mut loads {
        load.unreclaimable = GIB / 64;
        load.pod.owned = false;
    }
    let mut node = Node::new(rules(), loads);
    // A Sunday in Australia.
    node.time = Some("2026-11-22T00:00:00Z".parse().unwrap());
    node
}

fn tick(node: &mut Node, load: f64) -> allocation_counter::AllocationInfo {
    node.advance(PERIOD);
    node.sample.node.load = Some([load; 3]);
    node.sample.node.disks = vec![DiskSample {
        device: "vda".into(),
        read_bytes: node.now.as_nanos() / 1000,
        ..DiskSample::default()
    }];
    node.sample.node.interfaces = vec![InterfaceSample {
        interface: "eth0".into(),
        send_bytes: node.now.as_nanos() / 1000,
        ..InterfaceSample::default()
    }];
    for pod in &mut node.sample.pods {
        pod.containers = vec![ContainerSample {
            container: "main".into(),
            run_delay_nanos: Some(node.now.as_nanos() / 1000),
            periods: None,
            throttled_periods: None,
        }];
    }
    let info = allocation_counter::measure(|| {
        node.engine.step(node.now, &node.sample, &mut node.plan);
        std::hint::black_box(node.engine.next_due());
        std::hint::black_box(node.engine.load().is_ok());
        std::hint::black_box(node.engine.load_needs(node.now));
    });
    assert!(node.plan.evaluated);
    info
}

#[test]
fn an_evaluation_without_a_breach_allocates_nothing() {
    let mut node = node(110);
    node.cpu = 1000;
    for _ in 0..3 {
        tick(&mut node, 1.0);
    }
    for _ in 0..5 {
        assert_eq!(tick(&mut node, 1.0).count_total, 0);
        assert_eq!(node.plan.transitions, []);
    }
}

#[test]
fn the_load_allocates_nothing_while_it_learns() {
    let mut node = node(110);
    node.cpu = 1000;
    for (number, load) in node.pods.iter_mut().enumerate() {
        load.pod.owner = Some(format!("owner-{number}").into());
    }
    node.set_pods();
    for _ in 0..3 {
        tick(&mut node, 1.0);
    }
    // Longer than it takes to learn what pods of an owner use, and than a bucket of peaks.
    for _ in 0..70 {
        assert_eq!(tick(&mut node, 1.0).count_total, 0);
    }
    let load = node.engine.load().unwrap();
    assert!(load.cpu.history.is_some() && load.memory.history.is_some());
}

#[test]
fn an_evaluation_without_changes_to_throttles_allocates_nothing() {
    let mut node = node(110);
    node.cpu = 7000;
    node.memory = 9_000_000_000;
    for _ in 0..12 {
        tick(&mut node, 5.0);
    }
    assert!(node.plan.throttles.len() > 100, "most pods are throttled");
    for _ in 0..5 {
        assert_eq!(tick(&mut node, 5.0).count_total, 0);
        assert_eq!(node.plan.transitions, []);
    }
}

#[test]
fn a_sample_between_evaluations_allocates_nothing() {
    let mut node = node(110);
    tick(&mut node, 1.0);
    node.advance(PERIOD / 10);
    let info = allocation_counter::measure(|| {
        node.engine.step(node.now, &node.sample, &mut node.plan);
    });
    assert!(!node.plan.evaluated);
    assert_eq!(info.count_total, 0);
}

#[test]
fn the_allocation_counter_works() {
    let info = allocation_counter::measure(|| {
        std::hint::black_box(pod("a"));
        std::hint::black_box(vec![MilliCpu(1)]);
    });
    assert!(info.count_total > 0);
}
