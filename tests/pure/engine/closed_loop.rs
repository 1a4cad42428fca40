//! The engine on a simulated node, where its actions affect what it measures.

use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::{action, eviction_action, idle_action, pod, rule, throttling};
use crate::simulation::{self, Simulation, Worker};
use plimsoll::engine::metric::ActionKind;
use plimsoll::engine::plan::{Ineffective, PlanChange, RuleState, Unknown};
use plimsoll::engine::policy::{Action, Membership, PodPolicy, PolicySet, Rule, ScopeRequirement};
use proptest::prelude::*;

/// Of the rules in these tests, in seconds.
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

/// Batch pods of these demands, and an important pod that hardly needs anything yet.
fn beside_important(batches: &[f64]) -> Vec<Worker> {
    let batches = batches.iter().enumerate();
    let workers = batches.map(|(i, demand)| batch(&format!("b{i}"), *demand));
    workers.chain([important(0.1)]).collect()
}

fn rules_for(metric: &str, threshold: f64, action: Action) -> Vec<Rule> {
    vec![rule("node/rule", metric, threshold, action)]
}

fn state(sim: &Simulation) -> RuleState {
    sim.engine.reports().next().unwrap().state
}

/// How often throttling changed direction.
#[derive(Default)]
struct Turns {
    last: Option<u64>,
    falling: Option<bool>,
    count: usize,
}

impl Turns {
    fn observe(&mut self, sim: &Simulation) {
        let throttled: u64 = sim
            .plan
            .throttles
            .iter()
            .map(|it| 101 - u64::from(it.ratio) + u64::from(it.is_lowest()))
            .sum();
        if let Some(last) = self.last
            && last != throttled
        {
            let falling = throttled < last;
            self.count += usize::from(self.falling != Some(falling));
            self.falling = Some(falling);
        }
        self.last = Some(throttled);
    }
}

// ---- Evictions --------------------------------------------------------------------------------------------------

#[test]
fn no_second_pod_is_evicted_while_the_average_includes_the_first() {
    let workers = vec![
        batch("a", 3.0),
        batch("b", 2.0),
        batch("c", 1.0),
        important(2.0),
    ];
    // It exits in the middle of an evaluation period.
    let mut sim = Simulation::new(
        8,
        rules_for("cpu_total_usage", 6000.0, eviction_action(1)),
        workers,
    );
    sim.worker("a").lingers = 5;
    sim.advance(300);
    let names: Vec<&str> = sim.evicted.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(names, ["a"], "8 of 6 CPUs, and 5 without it");
}

#[test]
fn a_slow_metric_stops_evicting_when_its_input_is_below_the_threshold() {
    let metrics = [
        ("cpu_load_1_min", 6.0),
        ("cpu_load_5_min", 6.0),
        ("cpu_load_15_min", 5.5),
        ("cpu_usage_avg_5m", 75.0),
    ];
    for (metric, threshold) in metrics {
        let mut workers: Vec<_> = (0..6).map(|i| batch(&format!("b{i}"), 0.5)).collect();
        workers.extend([batch("a", 4.5), important(2.0)]);
        let mut sim = Simulation::new(8, rules_for(metric, threshold, eviction_action(1)), workers);
        sim.advance(3600);
        let names: Vec<&str> = sim.evicted.iter().map(|(_, name)| name.as_str()).collect();
        assert_eq!(names, ["a"], "{metric}");
        assert_eq!(state(&sim), RuleState::Normal, "{metric} fell at the end");
    }
}

#[test]
fn memory_rounds_only_wait_for_a_sample_after_the_last_round() {
    let workers = ["a", "b", "c", "d"].map(|name| Worker {
        memory: 4 << 30,
        lingers: 3,
        ..batch(name, 0.1)
    });
    let threshold = (9_u64 << 30) as f64;
    let rules = rules_for("memory_total_usage", threshold, eviction_action(1));
    let mut sim = Simulation::new(8, rules, workers.into());
    sim.advance(60);
    let times: Vec<u64> = sim
        .evicted
        .iter()
        .map(|(at, _)| at - sim.evicted[0].0)
        .collect();
    assert_eq!(
        times,
        [0, PERIOD],
        "the next evaluation after an exit within 3 s, and no third"
    );
}

/// A pod that uses CPU, and one that uses most of the memory.
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

/// Reads evict each other's page cache while memory is full; the pod with the most memory is evicted.
#[test]
fn waiting_for_memory_evicts_by_memory() {
    let reads = Worker {
        reads: 1 << 30,
        ..important(0.5)
    };
    let mut workers = Vec::from(busy_and_large(2.0));
    workers.push(reads);
    let rules = rules_for("protected_memory_stall_max", 10.0, eviction_action(1));
    let mut sim = Simulation::new(8, rules, workers);
    sim.memory = 12 << 30;
    sim.advance(60);
    assert_eq!(sim.evicted[0].1, "memory");
}

#[test]
fn average_memory_usage_evicts_by_memory() {
    let rules = rules_for("mem_usage_avg_5m", 10.0, eviction_action(1));
    let mut sim = Simulation::new(8, rules, busy_and_large(4.0).into());
    sim.advance(400);
    assert_eq!(sim.evicted[0].1, "memory");
}

#[test]
fn a_stuck_pod_covers_the_gap_for_its_grace_period_and_a_minute() {
    let mut stuck = batch("stuck", 3.0);
    stuck.pod.terminating = true;
    stuck.ends = Some(u64::MAX);
    let workers = vec![stuck, batch("b", 2.0), important(2.0)];
    let mut sim = Simulation::new(
        8,
        rules_for("cpu_total_usage", 6000.0, eviction_action(1)),
        workers,
    );
    let started = sim.now;
    sim.advance(30 + 60);
    assert_eq!(sim.evicted, [], "its exit would be enough");
    sim.advance(2 * PERIOD);
    let (at, name) = sim.evicted[0].clone();
    assert_eq!(name, "b");
    assert!(at - started >= 90, "{at}");
}

/// Reclaim lowers the pressure until the memory is full again; it ends when nothing fills the memory any more.
/// A pod that fills the page cache: the node has 32 GiB.
fn streams() -> Worker {
    Worker {
        reads: 1 << 30,
        ..batch("streams", 0.5)
    }
}

/// A pod that needs its page cache.
fn rereads(name: &str) -> Worker {
    Worker {
        cache: 6 << 30,
        working_set: 6 << 30,
        ..batch(name, 0.5)
    }
}

fn gc() -> Action {
    Action {
        force_gc: true,
        ..action("gc")
    }
}

/// The important pod reads, too. Page cache is reclaimed under memory pressure.
fn streaming() -> Simulation {
    let reads = Worker {
        reads: 1 << 20,
        ..important(0.5)
    };
    let rules = rules_for("protected_memory_stall_max", 10.0, gc());
    Simulation::new(4, rules, vec![streams(), reads])
}

#[test]
fn page_cache_is_reclaimed_only_while_memory_is_short() {
    let mut sim = streaming();
    sim.advance(30);
    assert_eq!(sim.reclaimed, [], "memory is free");
    sim.advance(120);
    let reclaims = sim.reclaimed.len();
    assert!((2..=12).contains(&reclaims), "{:?}", sim.reclaimed);
    assert!(sim.reclaimed.iter().all(|(_, name, _)| name == "streams"));
    sim.worker("streams").reads = 0;
    sim.advance(40);
    let ended = sim.reclaimed.len();
    sim.advance(300);
    assert_eq!(sim.reclaimed.len(), ended, "the average has fallen");
    assert_eq!(state(&sim), RuleState::Normal);
}

/// Reading back what was reclaimed is memory pressure, too: the reclaim would be the reason for the next one.
#[test]
fn pods_that_read_their_cache_back_are_not_reclaimed_from_for_ever() {
    let mut sim = streaming();
    sim.start(rereads("rereads"));
    sim.advance(150);
    let mut names = sim.reclaimed.iter().map(|(_, name, _)| name);
    assert!(names.any(|name| name == "rereads"), "{:?}", sim.reclaimed);
    sim.worker("streams").reads = 0;
    sim.worker("important").reads = 0;
    sim.advance(60);
    let ended = sim.reclaimed.len();
    sim.advance(600);
    assert_eq!(sim.reclaimed.len(), ended, "no important pod waits");
    assert_eq!(state(&sim), RuleState::Normal);
}

#[test]
fn nothing_is_reclaimed_while_only_batch_pods_wait_for_memory() {
    let mut sim = streaming();
    sim.worker("important").reads = 0;
    sim.advance(300);
    assert_eq!(sim.reclaimed, []);
}

fn scenario() -> impl Strategy<Value = (Vec<f64>, f64, u32, u64)> {
    let demands = proptest::collection::vec(0.05..3.0_f64, 1..8);
    (demands, 0.5..6.0_f64, 1..4_u32, 0..25_u64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Every eviction is needed: after the previous round the node was still above its threshold.
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
        let rules = rules_for(metric, (threshold * scale).max(1.0), eviction_action(at_once));
        let mut sim = Simulation::new(8, rules, workers);
        for _ in 0..900 {
            let stays = sim.tasks();
            let seen = sim.evicted.len();
            sim.tick();
            let goes = sim.evicted.len() - seen;
            if goes > 0 {
                // Without the last eviction of the round, the rest would be above the threshold, give or take the margin.
                let victims = sim.evicted[seen..].iter();
                let last = victims.map(|(_, name)| name.clone()).next_back().unwrap();
                let last = sim.worker(&last).demand;
                let rest = sim.workers.iter().filter(|it| it.ends.is_none());
                let rest: f64 = rest.map(|it| it.demand).sum();
                let excess = (stays.min(8.0) - threshold).max(0.0);
                prop_assert!(
                    rest + last > threshold - 0.1 * excess - error,
                    "{last} was evicted and {rest} remains, threshold {threshold}"
                );
            }
        }
        // All needed evictions happened: the rest is below the threshold, or no pod may be evicted.
        let batch_left = sim.workers.iter().any(|it| it.pod.namespace == "batch");
        prop_assert!(sim.remaining() <= threshold + error || !batch_left, "{}", sim.remaining());
    }
}

// ---- Throttles --------------------------------------------------------------------------------------------------

/// Protected pods wait for 30 s; the throttled pod demands more than its quota forever.
fn spike(metric: &str, threshold: f64, action: Action) -> Simulation {
    // Requests are equal, so that the important pod gets half and wants more.
    let workers = vec![batch("greedy", 1.7), important(0.2)];
    let mut sim = Simulation::new(2, rules_for(metric, threshold, action), workers);
    sim.advance(60);
    assert_eq!(sim.plan.throttles, [], "no pod waits");
    sim.worker("important").demand = 1.8;
    sim.advance(30);
    assert!(!sim.plan.throttles.is_empty(), "a throttle is in force");
    sim.worker("important").demand = 0.2;
    sim
}

#[test]
fn a_throttle_is_released_although_the_throttled_pod_wants_more() {
    for metric in ["protected_cpu_delay_max", "protected_cpu_delay_p95"] {
        let mut sim = spike(metric, 10.0, throttling(10, 30));
        sim.advance(COOL_DOWN + 3 * PERIOD + 4 * PERIOD);
        assert_eq!(sim.plan.throttles, [], "{metric}");
        sim.advance(600);
        assert_eq!(sim.plan.throttles, [], "{metric}");
    }
}

#[test]
fn nothing_is_throttled_without_pods_to_protect() {
    let rules = rules_for("protected_cpu_delay_max", 10.0, idle_action(10, 10));
    let mut sim = Simulation::new(2, rules, vec![batch("a", 4.0), batch("b", 4.0)]);
    for _ in 0..300 {
        sim.tick();
        assert_eq!(sim.plan.throttles, []);
    }
    assert!(sim.stalls("a") > 40.0, "they only wait for each other");
}

#[test]
fn a_terminating_pod_gets_its_cpu_back_on_a_saturated_node() {
    let workers = vec![batch("greedy", 3.0), important(2.0)];
    let rules = rules_for("cpu_total_usage", 1500.0, idle_action(10, 90));
    let mut sim = Simulation::new(2, rules, workers);
    while sim.plan.throttles.is_empty() {
        sim.tick();
    }
    sim.advance(PERIOD / 2);
    sim.worker("greedy").pod.terminating = true;
    sim.set_pods();
    sim.advance(2);
    assert_eq!(depths(&sim), [], "at once");
    assert!(sim.worker("greedy").allocated > 0.9, "it can shut down");
    sim.advance(PERIOD * 3);
    assert_eq!(depths(&sim), [], "it stays restored");
}

fn cool_down(sim: &Simulation) -> Duration {
    sim.engine.reports().next().unwrap().cool_down
}

/// Ratios of the only throttle, one per second.
fn ratios(sim: &mut Simulation, seconds: u64) -> Vec<u32> {
    let mut ratios = Vec::new();
    for _ in 0..seconds {
        sim.tick();
        let throttle = sim.plan.throttles.first();
        ratios.push(throttle.map_or(100, |it| it.ratio.into()));
    }
    ratios
}

#[test]
fn a_relapse_throttles_at_once_and_doubles_the_cool_down() {
    let workers = vec![batch("greedy", 2.0), important(1.0)];
    let rules = rules_for("cpu_total_usage", 2000.0, throttling(10, 30));
    let mut sim = Simulation::new(4, rules, workers);
    let down = ratios(&mut sim, 100);
    assert_eq!(down.iter().min(), Some(&40), "2.0 x 0.4 and 1.0");
    // The load stops until everything is released, and returns within a cool-down.
    sim.worker("important").demand = 0.0;
    for _ in 0..200 {
        sim.tick();
        if sim.plan.throttles.is_empty() {
            break;
        }
    }
    assert_eq!(sim.plan.throttles, []);
    let before = cool_down(&sim);
    sim.worker("important").demand = 1.0;
    let again = ratios(&mut sim, 20);
    assert!(!again.contains(&70), "in one step: {again:?}");
    assert_eq!(again.last(), Some(&40));
    assert_eq!(cool_down(&sim), before * 2);
}

#[test]
fn a_constant_load_is_probed_less_and_less_often() {
    let workers = vec![batch("greedy", 3.0), important(1.0)];
    let rules = rules_for("cpu_total_usage", 1900.0, throttling(10, 20));
    let mut sim = Simulation::new(2, rules, workers);
    sim.advance(1000);
    let ratios = ratios(&mut sim, 2400);
    let probes = ratios.windows(2).filter(|it| it[1] > it[0]).count();
    assert!(probes <= 10, "{probes} in 40 minutes: one in 8 cool-downs");
    let free = ratios.into_iter().filter(|ratio| *ratio == 100).count();
    assert!(free <= 10 * probes, "each lasts one period");
}

#[test]
fn a_square_wave_of_load_makes_two_transitions_per_change() {
    let workers = vec![batch("b", 2.0), important(1.0)];
    let rules = rules_for("cpu_total_usage", 4000.0, throttling(20, 40));
    let mut sim = Simulation::new(8, rules, workers);
    let mut moves = 0;
    for change in 1..=10 {
        sim.worker("important").demand = if change % 2 == 1 { 4.0 } else { 1.0 };
        for _ in 0..200 {
            sim.tick();
            let states = sim.plan.transitions.iter();
            let is_state = |change: &PlanChange| matches!(change, PlanChange::State { .. });
            if sim.plan.evaluated {
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

#[allow(clippy::disallowed_methods, reason = "a setting of a test")]
fn config() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES");
    ProptestConfig::with_cases(cases.map_or(120, |cases| cases.parse().unwrap()))
}

proptest! {
    #![proptest_config(config())]

    /// For any demand over time: no unneeded throttle remains, nothing oscillates, and while protected pods wait the engine
    /// acts.
    #[test]
    fn throttles_follow_the_demand((batches, phases, which) in mix()) {
        let metrics = [
            ("protected_cpu_delay_max", 10.0, throttling(10, 30)),
            ("protected_cpu_delay_max", 10.0, idle_action(10, 30)),
            ("protected_cpu_delay_p95", 10.0, throttling(10, 30)),
            ("protected_cpu_delay_p95", 10.0, idle_action(10, 30)),
        ];
        let (metric, threshold, mut action) = metrics[which].clone();
        // Longer than a phase: a release under constant demand is a probe, not a response to a change.
        action.cool_down = Duration::from_mins(2);
        let workers = beside_important(&batches);
        let mut sim = Simulation::new(2, rules_for(metric, threshold, action), workers);
        sim.advance(20);
        let mut turns = Turns::default();
        for (index, phase) in phases.iter().enumerate() {
            sim.worker("important").demand = *phase;
            let mut waited = 0;
            let mut acted_at = sim.now;
            for _ in 0..100 {
                sim.tick();
                turns.observe(&sim);
                let waits = sim.stalls("important") > threshold + 1.0;
                let can_throttle = sim.workers.iter().any(|it| {
                    it.pod.namespace == "batch" && it.allocated > 0.02 && it.quota.is_none_or(|q| q > 0.11 * it.demand)
                });
                let acts = sim.plan.transitions.iter().any(|it| matches!(it.change, PlanChange::Throttle { .. }));
                if acts && sim.plan.evaluated {
                    acted_at = sim.now;
                }
                waited = if waits && can_throttle { waited + 1 } else { 0 };
                // The idle class is given three evaluations to show an effect.
                prop_assert!(
                    waited < 4 * PERIOD || sim.now - acted_at <= 3 * PERIOD,
                    "{waited} s of waiting, nothing done since {acted_at} ({})", sim.now
                );
            }
            prop_assert!(turns.count <= 2 * (index + 1), "{} turns in {} changes", turns.count, index + 1);
        }
        // In the end protected pods demand nothing: everything is released within the cool-down and a minute, and stays so.
        sim.worker("important").demand = 0.0;
        let ended = sim.now;
        // A last step follows from the last period.
        sim.advance(3 * PERIOD);
        while !sim.plan.throttles.is_empty() {
            sim.tick();
            let limit = cool_down(&sim).as_secs() + 60;
            prop_assert!(sim.now - ended <= limit, "after {limit} s: {:?}", sim.plan.throttles);
        }
        sim.advance(200);
        prop_assert_eq!(&sim.plan.throttles[..], &[]);
    }
}

// ---- The idle class before quotas -------------------------------------------------------------------------------

/// How far the pods are throttled: ratio and idle class, by name.
fn depths(sim: &Simulation) -> Vec<(String, u8, bool)> {
    let name = |uid| {
        let mut workers = sim.workers.iter();
        let worker = workers.find(|it| it.pod.uid == uid);
        worker.map_or_else(String::new, |it| it.pod.name.clone())
    };
    let throttles = sim.plan.throttles.iter();
    let mut depths: Vec<_> = throttles
        .map(|it| (name(it.uid.clone()), it.ratio, it.is_lowest()))
        .collect();
    depths.sort();
    depths
}

fn idle(name: &str) -> (String, u8, bool) {
    (name.to_owned(), 100, true)
}

/// Equal requests leave the important pod half of the node; it wants more.
fn burst(rules: Vec<Rule>) -> Simulation {
    let workers = vec![batch("a", 4.0), batch("b", 4.0), important(1.2)];
    Simulation::new(2, rules, workers)
}

#[test]
fn quotas_stay_as_they_are_where_the_idle_class_is_enough() {
    for metric in ["protected_cpu_delay_max", "protected_cpu_delay_p95"] {
        let mut sim = burst(rules_for(metric, 10.0, idle_action(10, 30)));
        sim.advance(10 * PERIOD);
        assert_eq!(depths(&sim), [idle("a"), idle("b")], "{metric}");
        assert!(sim.stalls("important") < 1.0, "{metric}");
        let batch: f64 = ["a", "b"].map(|it| sim.worker(it).allocated).iter().sum();
        assert!(
            batch > 0.79,
            "{metric}: all that the important pod leaves: {batch}"
        );
    }
}

#[test]
fn a_usage_above_its_threshold_gets_quotas_three_evaluations_after_the_idle_class() {
    let mut sim = burst(rules_for("cpu_total_usage", 1000.0, idle_action(10, 30)));
    let mut changes = Vec::new();
    for _ in 0..6 * PERIOD {
        sim.tick();
        let depths = depths(&sim);
        if !depths.is_empty() && changes.last().is_none_or(|(_, last)| *last != depths) {
            changes.push((sim.now, depths));
        }
    }
    assert_eq!(changes[0].1, [idle("a"), idle("b")]);
    assert_eq!(changes[1].0 - changes[0].0, 3 * PERIOD, "{changes:?}");
    assert!(changes[1].1[0].1 < 100, "{changes:?}");
}

fn idle_then_evict() -> Action {
    Action {
        throttle: idle_action(10, 30).throttle,
        ..eviction_action(1)
    }
}

#[test]
fn no_pod_is_evicted_where_the_idle_class_is_enough() {
    for metric in ["protected_cpu_delay_max", "protected_cpu_delay_p95"] {
        let mut sim = burst(rules_for(metric, 10.0, idle_then_evict()));
        sim.advance(10 * PERIOD);
        assert_eq!(depths(&sim), [idle("a"), idle("b")], "{metric}");
        assert_eq!(sim.evicted, [], "{metric}");
    }
}

#[test]
fn no_pod_is_evicted_because_another_rule_made_a_pod_wait() {
    let rules = vec![
        rule(
            "node/a",
            "protected_cpu_delay_max",
            20.0,
            idle_action(10, 30),
        ),
        rule(
            "node/b",
            "protected_cpu_delay_max",
            35.0,
            eviction_action(1),
        ),
    ];
    let evictable = |name| {
        let mut worker = batch(name, 0.2);
        "evictable".clone_into(&mut worker.pod.namespace);
        worker
    };
    let workers = vec![batch("batch", 1.0), evictable("evictable"), important(1.2)];
    let mut sim = Simulation::new(2, rules.clone(), workers);
    let of = |namespace: &str, allowed: &str| PodPolicy {
        name: namespace.to_owned(),
        scopes: vec![ScopeRequirement::Namespace(Membership::In(vec![
            namespace.to_owned(),
        ]))],
        allowed: vec![allowed.to_owned()],
        ..simulation::batch()
    };
    sim.engine.set_policy(Arc::new(PolicySet {
        rules,
        pods: vec![of("batch", "throttle"), of("evictable", "evict")],
    }));
    sim.advance(6 * PERIOD);
    assert_eq!(depths(&sim), [idle("batch")]);
    assert!(sim.stalls("batch") > 35.0, "so the important pod runs");
    assert_eq!(sim.evicted, [], "the important pod waits no more");
}

// ---- Effects ----------------------------------------------------------------------------------------------------

/// What shows that actions have no effect, by pod.
fn ineffective(sim: &Simulation) -> Vec<(String, Ineffective)> {
    let actions = sim.engine.ineffective();
    actions
        .map(|(uid, _, observed)| (uid.0.to_string(), observed))
        .collect()
}

/// Advances until an action has no effect, for less than `limit` seconds.
fn until_ineffective(sim: &mut Simulation, limit: u64) {
    let started = sim.now;
    while ineffective(sim).is_empty() {
        assert!(sim.now - started < limit, "every action has an effect");
        sim.tick();
    }
}

fn quota_exceeded(sim: &Simulation) -> bool {
    let mut actions = sim.engine.ineffective();
    actions.any(|(_, _, observed)| matches!(observed, Ineffective::QuotaExceeded { .. }))
}

#[test]
fn an_ignored_quota_is_seen_within_30_s_and_not_lowered_further() {
    let workers = vec![batch("a", 3.0), important(2.0)];
    let rules = rules_for("cpu_total_usage", 3000.0, throttling(10, 10));
    let mut sim = Simulation::new(8, rules.clone(), workers);
    sim.ineffective = Some(ActionKind::CpuThrottle);
    while sim.plan.throttles.is_empty() {
        sim.tick();
    }
    until_ineffective(&mut sim, 31);
    assert!(quota_exceeded(&sim), "{:?}", ineffective(&sim));
    let mut preview = rules_for("cpu_total_usage", 3000.0, throttling(10, 10));
    preview[0].strategy = plimsoll::engine::policy::Strategy::Preview;
    for (rules, count) in [(preview, 0), (Vec::new(), 0), (rules, 1)] {
        sim.engine.set_policy(Arc::new(PolicySet {
            rules,
            pods: vec![simulation::batch()],
        }));
        assert_eq!(ineffective(&sim).len(), count, "of an enforced rule only");
    }
    let depth = depths(&sim);
    sim.advance(10 * PERIOD);
    assert_eq!(depths(&sim), depth, "the same step again would not help");
    sim.ineffective = None;
    sim.advance(4 * PERIOD);
    assert_eq!(ineffective(&sim), [], "it has an effect again");
    sim.advance(10 * PERIOD);
    assert!(sim.uses() <= 3.0 + 0.1, "and steps go on: {}", sim.uses());
}

/// With an enforcement period of 5 ms, the smallest quota is 200m.
#[test]
fn a_quota_that_the_kernel_raised_to_its_minimum_has_an_effect() {
    let workers = vec![batch("a", 0.5), important(2.0)];
    let rules = rules_for("cpu_total_usage", 1000.0, throttling(10, 10));
    let mut sim = Simulation::new(8, rules, workers);
    sim.worker("a").min_quota = 0.2;
    sim.advance(20 * PERIOD);
    assert!(depths(&sim)[0].1 < 40, "less than the minimum is planned");
    assert!(sim.worker("a").allocated > 0.19);
    assert_eq!(ineffective(&sim), []);
}

#[test]
fn an_enforced_quota_is_effective_whatever_the_steps() {
    for metric in ["cpu_total_usage", "protected_cpu_delay_max"] {
        let threshold = if metric == "cpu_total_usage" {
            1500.0
        } else {
            10.0
        };
        let mut sim = burst(rules_for(metric, threshold, idle_action(10, 10)));
        for second in 0..1800 {
            sim.worker("important").demand = if second / 300 % 2 == 0 { 2.4 } else { 0.2 };
            sim.tick();
            assert_eq!(ineffective(&sim), [], "{metric} after {second} s");
        }
    }
}

#[test]
fn a_reclaim_that_frees_nothing_is_reported_until_the_rule_is_normal() {
    let mut sim = streaming();
    sim.ineffective = Some(ActionKind::ForceGc);
    until_ineffective(&mut sim, 300);
    let observed = ineffective(&sim).remove(0).1;
    assert_eq!(observed, Ineffective::NothingReclaimed);
    sim.advance(30 * PERIOD);
    assert_eq!(sim.reclaimed.len(), 1, "and not repeated");
    sim.worker("streams").reads = 0;
    sim.worker("important").reads = 0;
    sim.advance(COOL_DOWN + 3 * PERIOD);
    assert_eq!(state(&sim), RuleState::Normal);
    assert_eq!(ineffective(&sim), []);
}

#[test]
fn after_an_evicted_pod_that_does_not_terminate_another_one_is_evicted() {
    let workers = vec![batch("a", 3.0), batch("b", 1.0), important(2.0)];
    let rules = rules_for("cpu_total_usage", 3000.0, eviction_action(1));
    let mut sim = Simulation::new(8, rules, workers);
    sim.ineffective = Some(ActionKind::Eviction);
    while sim.evicted.is_empty() {
        sim.tick();
    }
    until_ineffective(&mut sim, 31);
    assert_eq!(ineffective(&sim).remove(0).1, Ineffective::NotTerminating);
    let next = |sim: &mut Simulation| {
        while sim.evicted.len() == 1 {
            sim.tick();
            assert_eq!(ineffective(sim).len(), 1, "it is not terminating yet");
        }
        sim.evicted[1].1.clone()
    };
    assert_eq!(next(&mut sim), "b");
    sim.advance(600);
    let names: Vec<&str> = sim.evicted.iter().map(|(_, name)| &**name).collect();
    assert_eq!(names, ["a", "b"], "neither is asked again in this breach");
}

/// The round ends before the second evaluation after it.
#[test]
fn with_a_long_period_too_another_pod_is_evicted_next() {
    let workers = vec![batch("a", 3.0), batch("b", 1.0), important(2.0)];
    let rules = rules_for("cpu_total_usage", 3000.0, eviction_action(1));
    let mut sim = Simulation::new(8, rules, workers);
    sim.engine = std::mem::take(&mut sim.engine).with_period(Duration::from_mins(2));
    sim.ineffective = Some(ActionKind::Eviction);
    while sim.evicted.len() < 2 {
        sim.tick();
        assert!(sim.now < 10_000, "{:?}", sim.evicted);
    }
    let names: Vec<&str> = sim.evicted.iter().map(|(_, name)| &**name).collect();
    assert_eq!(names, ["a", "b"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever the demands, an enforced quota has an effect, and an ignored one is seen.
    #[test]
    fn only_ignored_quotas_have_no_effect((batches, phases, which) in mix(), enforced in proptest::bool::ANY) {
        let action = if which % 2 == 0 { throttling(10, 30) } else { idle_action(10, 30) };
        let workers = beside_important(&batches);
        let mut sim = Simulation::new(2, rules_for("cpu_total_usage", 900.0, action), workers);
        sim.ineffective = (!enforced).then_some(ActionKind::CpuThrottle);
        for phase in &phases {
            sim.worker("important").demand = *phase;
            for _ in 0..60 {
                sim.tick();
                prop_assert!(!enforced || ineffective(&sim).is_empty(), "{:?}", ineffective(&sim));
            }
        }
    }
}

#[test]
fn consecutive_breaches_are_counted_from_zero_after_a_gap() {
    use crate::engine_support::Node;
    let rules = vec![Rule {
        avoidance_threshold: 3,
        ..rule("node/rule", "cpu_total_usage", 4000.0, action("watch"))
    }];
    let mut node = Node::new(rules, Vec::new());
    for cpu in [1000, 5000, 5000] {
        node.at(cpu);
    }
    assert_eq!(node.engine.reports().next().unwrap().breaches, 2);
    node.advance(Duration::from_secs(4 * PERIOD));
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
fn a_frozen_counter_is_unknown_and_changes_nothing_in_force() {
    use crate::engine_support::{Load, Node};
    let rules = rules_for("cpu_total_usage", 4000.0, action_with_throttle());
    let mut node = Node::new(rules, vec![Load::new("a", 4000)]);
    node.at(6000);
    node.at(6000);
    assert_eq!(node.ratios().len(), 1);
    let frozen = node.sample.node.cpu;
    for _ in 0..4 {
        node.advance(Duration::from_secs(PERIOD));
        node.sample.node.cpu = frozen;
        node.step();
    }
    let report = node.engine.reports().next().unwrap();
    assert_eq!(report.unknown, Some(Unknown::Impossible));
    assert_eq!(report.state, RuleState::Breached);
    assert_eq!(node.ratios(), [("a".to_owned(), 90)]);
}

fn action_with_throttle() -> Action {
    Action {
        throttle: throttling(10, 10).throttle,
        ..action("slow")
    }
}
