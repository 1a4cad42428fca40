//! The engine on a node that answers: what its actions do to what it measures.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;
mod plant;

use std::time::Duration;

use engine_support::{action, evicting, idling, pod, rule, throttling};
use plant::{Plant, Worker};
use plimsoll::engine::plan::{Change, RuleState};
use plimsoll::engine::policy::{Action, Rule};
use proptest::prelude::*;

/// Of the rules here.
const PERIOD: u64 = 10;
const COOL_DOWN: u64 = 30;

fn batch(name: &str, demand: f64) -> Worker {
    let mut pod = pod(name);
    "batch".clone_into(&mut pod.namespace);
    Worker::new(pod, demand)
}

fn important(demand: f64) -> Worker {
    Worker::new(pod("important"), demand)
}

fn acting(metric: &str, threshold: f64, action: Action) -> Vec<Rule> {
    vec![rule("node/rule", metric, threshold, action)]
}

fn state(plant: &Plant) -> RuleState {
    plant.engine.reports().next().unwrap().state
}

/// How often the sum of all ratios turned from falling to rising or back.
#[derive(Default)]
struct Turns {
    last: Option<u64>,
    falling: Option<bool>,
    count: usize,
}

impl Turns {
    fn see(&mut self, plant: &Plant) {
        let held: u64 = plant
            .plan
            .throttles
            .iter()
            .map(|it| 101 - u64::from(it.ratio) + u64::from(it.idle))
            .sum();
        if let Some(last) = self.last
            && last != held
        {
            let falling = held < last;
            self.count += usize::from(self.falling != Some(falling));
            self.falling = Some(falling);
        }
        self.last = Some(held);
    }
}

// ---- Evictions --------------------------------------------------------------------------------------------------

#[test]
fn the_average_that_still_holds_the_victim_evicts_no_second_pod() {
    let workers = vec![
        batch("a", 3.0),
        batch("b", 2.0),
        batch("c", 1.0),
        important(2.0),
    ];
    // It leaves in the middle of an evaluation period.
    let mut plant = Plant::new(8, acting("cpu_total_usage", 6000.0, evicting(1)), workers);
    plant.worker("a").lingers = 5;
    plant.pass(300);
    let names: Vec<&str> = plant
        .evicted
        .iter()
        .map(|(_, name)| name.as_str())
        .collect();
    assert_eq!(names, ["a"], "8 of 6 CPUs, and 5 without it");
}

#[test]
fn a_slow_metric_evicts_until_its_input_is_below_the_threshold_and_no_longer() {
    let metrics = [
        ("cpu_load_1_min", 6.0),
        ("cpu_load_5_min", 6.0),
        ("cpu_load_15_min", 5.5),
        ("cpu_usage_avg_5m", 75.0),
        ("cpu_pressure_some_avg60", 20.0),
        ("cpu_pressure_some_avg300", 10.0),
    ];
    for (metric, threshold) in metrics {
        let mut workers: Vec<_> = (0..6).map(|i| batch(&format!("b{i}"), 0.5)).collect();
        workers.extend([batch("a", 4.5), important(2.0)]);
        let mut plant = Plant::new(8, acting(metric, threshold, evicting(1)), workers);
        plant.pass(3600);
        let names: Vec<&str> = plant
            .evicted
            .iter()
            .map(|(_, name)| name.as_str())
            .collect();
        assert_eq!(names, ["a"], "{metric}");
        assert_eq!(state(&plant), RuleState::Normal, "{metric} fell in the end");
    }
}

#[test]
fn memory_waits_for_nothing_but_a_sample_after_the_round() {
    let workers = ["a", "b", "c", "d"].map(|name| Worker {
        memory: 4 << 30,
        lingers: 3,
        ..batch(name, 0.1)
    });
    let threshold = (9_u64 << 30) as f64;
    let rules = acting("memory_total_usage", threshold, evicting(1));
    let mut plant = Plant::new(8, rules, workers.into());
    plant.pass(60);
    let times: Vec<u64> = plant
        .evicted
        .iter()
        .map(|(at, _)| at - plant.evicted[0].0)
        .collect();
    assert_eq!(
        times,
        [0, PERIOD],
        "the next evaluation after 3 s of leaving, and no third"
    );
}

/// A pod that uses CPU, and one that holds most of the memory.
fn busy_and_large(cpus: f64) -> [Worker; 2] {
    [
        Worker {
            memory: 1 << 30,
            ..batch("cpu", cpus)
        },
        Worker {
            memory: 8 << 30,
            ..batch("memory", 0.1)
        },
    ]
}

/// Files that are read push each other out of a memory that is full: the pod that holds most of it goes.
#[test]
fn memory_pressure_evicts_by_memory() {
    let reads = Worker {
        reads: 1 << 30,
        ..important(0.5)
    };
    let mut workers = Vec::from(busy_and_large(2.0));
    workers.push(reads);
    let rules = acting("memory_pressure_some_avg10", 10.0, evicting(1));
    let mut plant = Plant::new(8, rules, workers);
    plant.memory = 12 << 30;
    plant.pass(60);
    assert_eq!(plant.evicted[0].1, "memory");
}

#[test]
fn an_average_of_memory_evicts_by_memory() {
    let rules = acting("mem_usage_avg_5m", 10.0, evicting(1));
    let mut plant = Plant::new(8, rules, busy_and_large(4.0).into());
    plant.pass(400);
    assert_eq!(plant.evicted[0].1, "memory");
}

#[test]
fn a_pod_that_will_not_go_covers_the_gap_for_its_grace_and_a_minute() {
    let mut stuck = batch("stuck", 3.0);
    stuck.pod.terminating = true;
    stuck.ends = Some(u64::MAX);
    let workers = vec![stuck, batch("b", 2.0), important(2.0)];
    let mut plant = Plant::new(8, acting("cpu_total_usage", 6000.0, evicting(1)), workers);
    let begun = plant.now;
    plant.pass(30 + 60);
    assert_eq!(plant.evicted, [], "its end would be enough");
    plant.pass(2 * PERIOD);
    let (at, name) = plant.evicted[0].clone();
    assert_eq!(name, "b");
    assert!(at - begun >= 90, "{at}");
}

/// Reclaim lowers the pressure until the memory is full again; it ends with what fills it.
#[test]
fn page_cache_is_reclaimed_while_memory_is_short_and_no_longer() {
    let streams = Worker {
        reads: 1 << 30,
        ..batch("streams", 0.5)
    };
    let gc = Action {
        force_gc: true,
        ..action("gc")
    };
    let rules = acting("memory_pressure_some_avg10", 10.0, gc);
    let mut plant = Plant::new(4, rules, vec![streams, important(0.5)]);
    plant.pass(30);
    assert_eq!(plant.reclaimed, [], "memory is free");
    plant.pass(120);
    let reclaims = plant.reclaimed.len();
    assert!((2..=12).contains(&reclaims), "{:?}", plant.reclaimed);
    assert!(plant.reclaimed.iter().all(|(_, name, _)| name == "streams"));
    plant.worker("streams").reads = 0;
    plant.pass(40);
    let ended = plant.reclaimed.len();
    plant.pass(300);
    assert_eq!(plant.reclaimed.len(), ended, "the average has fallen");
    assert_eq!(state(&plant), RuleState::Normal);
}

fn scenario() -> impl Strategy<Value = (Vec<f64>, f64, u32, u64)> {
    let demands = proptest::collection::vec(0.05..3.0_f64, 1..8);
    (demands, 0.5..6.0_f64, 1..4_u32, 0..25_u64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// What goes had to go: the round before has left the node above its threshold.
    #[test]
    fn no_pod_is_evicted_beyond_what_is_needed(
        (demands, threshold, at_once, lingers) in scenario(),
        metric in 0..4_usize,
    ) {
        // Tasks are counted ten times a period, in whole numbers.
        let (metric, scale, error) = [
            ("cpu_total_usage", 1000.0, 0.02),
            ("cpu_load_1_min", 1.0, 0.12),
            ("cpu_usage_avg_5m", 12.5, 0.02),
            ("cpu_total_utilization", 12.5, 0.02),
        ][metric];
        let mut workers: Vec<_> = demands
            .iter()
            .enumerate()
            .map(|(i, demand)| Worker { lingers, ..batch(&format!("b{i}"), *demand) })
            .collect();
        workers.push(important(1.0));
        let rules = acting(metric, (threshold * scale).max(1.0), evicting(at_once));
        let mut plant = Plant::new(8, rules, workers);
        for _ in 0..900 {
            let stays = plant.tasks();
            let seen = plant.evicted.len();
            plant.tick();
            let goes = plant.evicted.len() - seen;
            if goes > 0 {
                // Before the last of the round went, the rest was above the threshold (or within the margin of a tenth).
                let victims = plant.evicted[seen..].iter();
                let last = victims.map(|(_, name)| name.clone()).next_back().unwrap();
                let last = plant.worker(&last).demand;
                let rest = plant.workers.iter().filter(|it| it.ends.is_none());
                let rest: f64 = rest.map(|it| it.demand).sum();
                let excess = (stays.min(8.0) - threshold).max(0.0);
                prop_assert!(
                    rest + last > threshold - 0.1 * excess - error,
                    "{last} went and {rest} stays, of {threshold}"
                );
            }
        }
        // And all that had to go went: what is left is below, or nothing can go.
        let batch_left = plant.workers.iter().any(|it| it.pod.namespace == "batch");
        prop_assert!(plant.remaining() <= threshold + error || !batch_left, "{}", plant.remaining());
    }
}

// ---- Throttles --------------------------------------------------------------------------------------------------

/// Protected work waits for 30 s; what was throttled wants more than its quota gives for ever.
fn spike(metric: &str, threshold: f64, action: Action, v2: bool) -> Plant {
    // Requests are equal, so that the important pod gets half and wants more.
    let workers = vec![batch("greedy", 1.7), important(0.2)];
    let plant = Plant::new(2, acting(metric, threshold, action), workers);
    let mut plant = if v2 { plant } else { plant.on_v1() };
    plant.pass(60);
    assert_eq!(plant.plan.throttles, [], "nothing waits for anybody");
    plant.worker("important").demand = 1.8;
    plant.pass(30);
    assert!(!plant.plan.throttles.is_empty(), "a throttle is in force");
    plant.worker("important").demand = 0.2;
    plant
}

#[test]
fn cpu_pressure_lets_go_although_the_throttled_pod_wants_more() {
    for metric in [
        "cpu_pressure_some_avg10",
        "protected_cpu_delay_max",
        "protected_cpu_delay_p95",
    ] {
        let mut plant = spike(metric, 10.0, throttling(10, 30), true);
        plant.pass(COOL_DOWN + 3 * PERIOD + 4 * PERIOD);
        assert_eq!(plant.plan.throttles, [], "{metric}");
        plant.pass(600);
        assert_eq!(plant.plan.throttles, [], "{metric}");
    }
}

/// Quotas of one rule raise the pressure that another evicts by.
#[test]
fn no_pod_is_evicted_for_what_another_rule_throttles() {
    for v2 in [true, false] {
        let workers = vec![batch("greedy", 4.0), batch("other", 0.5), important(0.3)];
        let rules = vec![
            rule("node/a", "cpu_total_utilization", 60.0, throttling(10, 20)),
            rule("node/b", "cpu_pressure_some_avg60", 30.0, evicting(1)),
        ];
        let plant = Plant::new(8, rules, workers);
        let mut plant = if v2 { plant } else { plant.on_v1() };
        plant.worker("important").demand = 3.0;
        plant.pass(400);
        assert!(!plant.plan.throttles.is_empty(), "a throttle is in force");
        assert_eq!(plant.evicted, [], "v2: {v2}");
    }
}

#[test]
fn without_pressure_by_cgroup_idle_cpus_end_a_throttle() {
    let mut plant = spike("cpu_pressure_some_avg10", 10.0, throttling(10, 30), false);
    plant.worker("greedy").demand = 1.0;
    plant.pass(COOL_DOWN + 8 * PERIOD);
    assert_eq!(plant.plan.throttles, []);
}

#[test]
fn while_nobody_is_there_to_protect_nothing_is_throttled() {
    let rules = acting("cpu_pressure_some_avg10", 10.0, idling(10, 10));
    let mut plant = Plant::new(2, rules, vec![batch("alone", 4.0)]);
    for _ in 0..300 {
        plant.tick();
        assert_eq!(plant.plan.throttles, []);
    }
    assert!(
        plant.stalls("alone") > 40.0,
        "it waits for nobody but itself"
    );
}

fn cool_down(plant: &Plant) -> Duration {
    plant.engine.reports().next().unwrap().cool_down
}

/// Ratios of the only throttle, one a second.
fn ratios(plant: &mut Plant, seconds: u64) -> Vec<u32> {
    let mut ratios = Vec::new();
    for _ in 0..seconds {
        plant.tick();
        let throttle = plant.plan.throttles.first();
        ratios.push(throttle.map_or(100, |it| it.ratio.into()));
    }
    ratios
}

#[test]
fn a_breach_right_after_a_release_goes_back_at_once_and_holds_twice_as_long() {
    let workers = vec![batch("greedy", 2.0), important(1.0)];
    let rules = acting("cpu_total_usage", 2000.0, throttling(10, 30));
    let mut plant = Plant::new(4, rules, workers);
    let down = ratios(&mut plant, 100);
    assert_eq!(down.iter().min(), Some(&40), "2.0 x 0.4 and 1.0");
    // The load goes for as long as it takes to release everything, and comes back within a cool-down.
    plant.worker("important").demand = 0.0;
    for _ in 0..200 {
        plant.tick();
        if plant.plan.throttles.is_empty() {
            break;
        }
    }
    assert_eq!(plant.plan.throttles, []);
    let before = cool_down(&plant);
    plant.worker("important").demand = 1.0;
    let again = ratios(&mut plant, 20);
    assert!(!again.contains(&70), "in one step: {again:?}");
    assert_eq!(again.last(), Some(&40));
    assert_eq!(cool_down(&plant), before * 2);
}

#[test]
fn a_load_that_stays_is_probed_less_and_less_often() {
    let workers = vec![batch("greedy", 3.0), important(1.0)];
    let rules = acting("cpu_total_usage", 1900.0, throttling(10, 20));
    let mut plant = Plant::new(2, rules, workers);
    plant.pass(1000);
    let ratios = ratios(&mut plant, 2400);
    let probes = ratios.windows(2).filter(|it| it[1] > it[0]).count();
    assert!(probes <= 10, "{probes} in 40 minutes: one in 8 cool-downs");
    let free = ratios.into_iter().filter(|ratio| *ratio == 100).count();
    assert!(free <= 10 * probes, "each lasts one period");
}

#[test]
fn a_square_wave_of_load_makes_two_transitions_a_change() {
    let workers = vec![batch("b", 2.0), important(1.0)];
    let rules = acting("cpu_total_usage", 4000.0, throttling(20, 40));
    let mut plant = Plant::new(8, rules, workers);
    let mut moves = 0;
    for change in 1..=10 {
        plant.worker("important").demand = if change % 2 == 1 { 4.0 } else { 1.0 };
        for _ in 0..200 {
            plant.tick();
            let states = plant.plan.transitions.iter();
            let is_state = |change: &Change| matches!(change, Change::State { .. });
            if plant.plan.evaluated {
                moves += states.filter(|it| is_state(&it.change)).count();
            }
        }
        assert!(
            moves <= 2 * change,
            "{moves} transitions after {change} changes"
        );
    }
    assert!(moves >= 10, "each change was seen");
}

fn mix() -> impl Strategy<Value = (Vec<f64>, Vec<f64>, usize)> {
    let batch = proptest::collection::vec(0.1..3.0_f64, 1..4);
    let phases = proptest::collection::vec(0.1..2.2_f64, 1..5);
    (batch, phases, 0..4_usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(120))]

    /// Over any course of demand: no throttle is left that nobody needs, nothing oscillates, and while protected pods wait
    /// something is done.
    #[test]
    fn throttles_come_and_go_with_the_need((batches, phases, which) in mix()) {
        let metrics = [
            ("cpu_pressure_some_avg10", 10.0, throttling(10, 30)),
            ("cpu_pressure_some_avg10", 10.0, idling(10, 30)),
            ("protected_cpu_delay_max", 10.0, throttling(10, 30)),
            ("protected_cpu_delay_p95", 10.0, idling(10, 30)),
        ];
        let (metric, threshold, mut action) = metrics[which].clone();
        // Longer than a phase: a release while the demand stays is a probe, not an answer to a change.
        action.cool_down = Duration::from_mins(2);
        let mut workers: Vec<_> = batches
            .iter()
            .enumerate()
            .map(|(i, demand)| batch(&format!("b{i}"), *demand))
            .collect();
        workers.push(important(0.1));
        let mut plant = Plant::new(2, acting(metric, threshold, action), workers);
        plant.pass(20);
        let mut turns = Turns::default();
        for (index, phase) in phases.iter().enumerate() {
            plant.worker("important").demand = *phase;
            let mut waited = 0;
            let mut acted_at = plant.now;
            for _ in 0..100 {
                plant.tick();
                turns.see(&plant);
                let waits = plant.stalls("important") > threshold + 1.0;
                let room = plant.workers.iter().any(|it| {
                    it.pod.namespace == "batch" && it.gets > 0.02 && it.quota.is_none_or(|q| q > 0.11 * it.demand)
                });
                let acts = plant.plan.transitions.iter().any(|it| matches!(it.change, Change::Throttle { .. }));
                if acts && plant.plan.evaluated {
                    acted_at = plant.now;
                }
                waited = if waits && room { waited + 1 } else { 0 };
                prop_assert!(
                    waited < 3 * PERIOD || plant.now - acted_at <= 2 * PERIOD,
                    "{waited} s of waiting, nothing done since {acted_at} ({})", plant.now
                );
            }
            prop_assert!(turns.count <= 2 * (index + 1), "{} turns in {} changes", turns.count, index + 1);
        }
        // The protected want little in the end: all is released within the longest hold and the steps, and stays so.
        plant.worker("important").demand = 0.05;
        plant.pass(8 * 120 + 8 * PERIOD);
        prop_assert_eq!(&plant.plan.throttles[..], &[]);
        plant.pass(200);
        prop_assert_eq!(&plant.plan.throttles[..], &[]);
    }
}

#[test]
fn consecutive_breaches_are_counted_from_zero_after_a_gap() {
    use engine_support::Node;
    let rules = vec![Rule {
        avoidance_threshold: 3,
        ..rule("node/rule", "cpu_total_usage", 4000.0, action("watch"))
    }];
    let mut node = Node::new(rules, Vec::new());
    for cpu in [1000, 5000, 5000] {
        node.at(cpu);
    }
    assert_eq!(node.engine.reports().next().unwrap().breaches, 2);
    node.pass(Duration::from_secs(4 * PERIOD));
    node.step();
    assert_eq!(node.engine.reports().next().unwrap().breaches, 0);
    for _ in 0..2 {
        node.at(5000);
    }
    assert_eq!(node.state("node/rule"), RuleState::Normal);
    node.at(5000);
    assert_eq!(node.state("node/rule"), RuleState::Breached);
}

#[test]
fn a_counter_that_freezes_is_unknown_and_holds_what_is_in_force() {
    use engine_support::{Load, Node};
    use plimsoll::engine::plan::Unknown;
    let rules = acting("cpu_total_usage", 4000.0, action_with_throttle());
    let mut node = Node::new(rules, vec![Load::new("a", 4000)]);
    node.at(6000);
    node.at(6000);
    assert_eq!(node.ratios().len(), 1);
    let frozen = node.sample.node.cpu;
    for _ in 0..4 {
        node.pass(Duration::from_secs(PERIOD));
        node.sample.node.cpu = frozen;
        node.step();
    }
    let report = node.engine.reports().next().unwrap();
    assert_eq!(report.unknown, Some(Unknown::Impossible));
    assert_eq!(report.state, RuleState::Breached);
    assert_eq!(node.ratios(), [("a".to_owned(), 90)], "held");
}

fn action_with_throttle() -> Action {
    Action {
        throttle: throttling(10, 10).throttle,
        ..action("slow")
    }
}
