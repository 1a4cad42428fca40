//! What is unknown, what is saved, and what it costs.

use super::*;

#[test]
fn without_two_samples_the_load_is_unknown() {
    let mut node = Node::new();
    assert_eq!(node.engine.load(), Err(Unknown::Missing));
    node.start(pod("a", 1000), 3000);
    node.advance(1);
    assert_eq!(node.engine.load(), Err(Unknown::Rebased));
    node.advance(1);
    near(node.cpu(), 3000.0);
    // The machine was suspended: no counter has moved.
    node.now += 3600;
    node.step();
    assert_eq!(node.engine.load(), Err(Unknown::Rebased));
    node.advance(1);
    near(node.cpu(), 3000.0);
}

#[test]
fn idle_pools_of_huge_pages_are_no_load() {
    let mut node = Node::new();
    node.change = |sample| {
        sample.node.memory = Some(NodeMemory {
            total: Bytes(64 * GIB),
            available: Bytes(4 * GIB - GIB / 8),
            hugetlb: Bytes(60 * GIB),
            ..NodeMemory::default()
        });
    };
    node.advance(400);
    let load = node.load();
    near(load.memory.expected, 3.125);
    assert!(load.percent < 10.0, "{load:?}");
}

#[test]
fn missing_data_never_lower_the_load() {
    let changes: [fn(&mut Sample); 6] = [
        |sample| sample.node.cpu = None,
        |sample| sample.node.memory = None,
        |sample| sample.node.memory = Some(NodeMemory::default()),
        |sample| sample.pods.clear(),
        |sample| sample.node.cpu = sample.node.cpu.map(|cpu| CpuTimes { online: 0, ..cpu }),
        |sample| sample.pods.iter_mut().for_each(|pod| pod.cpu_nanos = None),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let mut node = Node::new();
        node.start(pod("a", 1000), 3000);
        node.advance(300);
        node.change = change;
        for second in 0..60 {
            node.advance(1);
            match node.engine.load() {
                Ok(load) => assert!(load.cpu.expected >= 29.9, "{number} {load:?}"),
                Err(reason) => {
                    assert_eq!(reason, Unknown::Stale, "{number}");
                    assert!(second >= 30, "{number}: {second}");
                }
            }
        }
        // Without counters of pods, all of their use is the system's.
        assert_eq!(node.engine.load().is_err(), number < 5, "{number}");
    }
}

#[test]
fn a_pod_that_cannot_be_read_counts_as_before() {
    let mut node = Node::new();
    for uid in ["a", "b"] {
        node.start(pod(uid, 1000), 3000);
    }
    node.advance(600);
    node.pod("a").readable = false;
    for _ in 0..20 {
        node.advance(1);
        assert!(node.cpu() >= 5990.0, "{}", node.cpu());
    }
    node.pod("a").readable = true;
    node.advance(1);
    near(node.cpu(), 6000.0);
}

#[test]
fn counters_that_start_over_or_jump() {
    let mut node = Node::new();
    node.start(pod("a", 1000), 3000);
    node.advance(600);
    node.pod("a").counter = 0;
    for _ in 0..400 {
        node.advance(1);
        near(node.cpu(), 3000.0);
    }
    node.pod("a").counter += 1_000_000_000_000_000;
    for _ in 0..400 {
        node.advance(1);
        near(node.cpu(), 3000.0);
    }
}

#[test]
fn a_pod_started_before_the_agent_counts_with_its_use() {
    let mut node = Node::new();
    let started = TODAY + 99_000;
    node.start(
        Pod {
            started,
            ..pod("old", 4000)
        },
        1000,
    );
    node.pod("old").counter = 1_000_000_000_000;
    node.advance(2);
    near(node.cpu(), 1000.0);
    // The wall clock is not known, or was set back.
    for (has_time, started) in [(false, 0), (true, TODAY + 900_000)] {
        let mut node = Node::new();
        node.has_time = has_time;
        node.start(
            Pod {
                started,
                ..pod("old", 4000)
            },
            1000,
        );
        node.advance(20);
        near(node.cpu(), 1000.0);
    }
}

#[test]
fn without_saved_state_the_peaks_of_the_windows_count_in_full() {
    let mut node = Node::new();
    node.start(pod("a", 1000), 5000);
    node.advance(3600);
    let windows = node.engine.windows().clone();
    node.engine = Engine::new();
    node.set_pods();
    node.engine.adopt_windows(windows);
    node.end("a");
    node.advance(100);
    near(node.history()[0].unwrap(), 0.9 * 50.0);
}

#[test]
fn the_state_survives_a_restart() {
    let mut node = Node::new();
    for uid in ["a", "b"] {
        node.start(owned(uid, 1000), 3000);
    }
    node.advance(1800);
    let before = node.load();
    let restart = |node: &mut Node| {
        let saved = serde_json::to_string(&node.engine.load_state()).unwrap();
        let windows = node.engine.windows().clone();
        node.engine = Engine::new();
        node.set_pods();
        node.engine.adopt_windows(windows);
        node.engine
            .adopt_load(serde_json::from_str(&saved).unwrap());
    };
    restart(&mut node);
    assert_eq!(node.engine.load(), Err(Unknown::Missing));
    node.now += 9;
    node.busy += 9 * 6_000_000_000;
    node.pods
        .iter_mut()
        .for_each(|load| load.counter += 9 * 3_000_000_000);
    node.advance(1);
    near(node.load().percent, before.percent);
    near(node.history()[0].unwrap(), 0.9 * 60.0);
    // A pod ends while there is no process.
    node.pods.pop();
    restart(&mut node);
    node.advance(1);
    near(node.cpu(), 3000.0);
    near(node.history()[0].unwrap(), 0.9 * 30.0);
    // After a longer time only the peaks are left.
    restart(&mut node);
    node.now += 100;
    node.advance(1);
    assert_eq!(node.engine.load(), Err(Unknown::Rebased));
    node.advance(1);
    near(node.cpu(), 3000.0);
    near(node.history()[0].unwrap(), 0.9 * 30.0);
}

#[test]
fn an_invalid_state_is_ignored() {
    let mut node = Node::new();
    node.advance(400);
    let mut state = node.engine.load_state();
    state.node.intervals = serde_json::from_value(serde_json::json!({
        "ends": [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        "closed": 3, "count": 7, "begin": 9, "start": 3, "at": 1,
    }))
    .unwrap();
    let mut other = Engine::new();
    other.adopt_load(state);
    assert_eq!(other.load_state(), LoadState::default());
}

#[test]
fn samples_are_needed_more_often_while_pods_are_young() {
    let mut node = Node::new();
    let seconds = |node: &Node, seconds| node.at() + Duration::from_secs(seconds);
    assert!(!node.engine.load_needs(node.at()).pods, "there are none");
    node.start(pod("a", 1000), 1000);
    node.advance(2);
    let needs = |node: &Node, later| node.engine.load_needs(seconds(node, later));
    assert!(!needs(&node, 0).pods);
    // It was there at the first sample.
    assert!(!needs(&node, 1).pods);
    assert!(needs(&node, 10).pods);
    assert!(!needs(&node, 59).memory);
    assert!(needs(&node, 60).memory);
    // One that waits for its image, and one that cannot be read, change nothing.
    let running = false;
    node.start(
        Pod {
            running,
            ..pod("waiting", 1000)
        },
        0,
    );
    node.start(pod("unreadable", 1000), 0);
    node.pod("unreadable").readable = false;
    node.advance(301);
    assert_eq!(needs(&node, 1), Needs::default());
    node.start(pod("b", 1000), 1000);
    assert!(needs(&node, 1).pods);
    node.advance(17);
    assert!(!needs(&node, 1).pods);
    assert!(needs(&node, 5).memory);
    node.advance(300);
    assert!(!needs(&node, 5).memory);
}

#[test]
fn it_takes_at_most_40_kb_for_110_pods() {
    let pods = 110 * size_of::<Track>();
    let owners = 128 * (size_of::<Arc<str>>() + 24);
    let total = pods + owners + size_of::<LoadTracker>();
    assert!(
        total <= 40_000,
        "{total} bytes, {} a pod",
        size_of::<Track>()
    );
    eprintln!("{total} bytes, {} a pod", size_of::<Track>());
}

#[test]
fn a_rule_without_a_value_counts_as_before_until_its_actions_are_restored() {
    let mut node = Node::with_rules(vec![
        rule("a", "memory_pressure_full_avg10", 10.0),
        rule("b", "cpu_total_utilization", 80.0),
    ]);
    let pressure = |sample: &mut Sample| {
        sample.node.pressure[1] = Some(Pressure {
            full: Some([15.0; 3]),
            ..Pressure::default()
        });
    };
    node.change = pressure;
    node.system = 4000;
    node.advance(400);
    near(node.load().percent, 150.0);
    node.change = |_| ();
    node.advance(890);
    near(node.load().percent, 150.0);
    node.advance(20);
    assert_eq!(node.load().pressure, None);
    // A short peak, which no mean shows, and then no counters of CPUs.
    node.system = 9000;
    node.advance(20);
    near(node.load().percent, 112.5);
    node.change = |sample| sample.node.cpu = None;
    node.advance(20);
    near(node.load().percent, 112.5);
}
