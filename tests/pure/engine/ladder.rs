//! How the next action is chosen, on a simulated node: nothing is evicted that something milder could have made unnecessary.
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "sizes of memory, far below the limits"
)]

use std::time::Duration;

use crate::engine_support::{action, eviction_action, idle_action, pod, rule, throttling};
use crate::simulation::{Simulation, Worker};
use plimsoll::engine::RuleReport;
use plimsoll::engine::metric::{Metric, Rung, RungUse};
use plimsoll::engine::plan::{PlanChange, RuleState};
use plimsoll::engine::policy::{Action, EvictionSpec, Rule, Strategy as RuleStrategy};
use proptest::prelude::*;

const PERIOD: u64 = 10;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

fn batch(name: &str, demand: f64) -> Worker {
    let mut pod = pod(name);
    "batch".clone_into(&mut pod.namespace);
    Worker::new(pod, demand)
}

fn important(demand: f64) -> Worker {
    Worker::new(pod("important"), demand)
}

fn with_eviction(action: &Action) -> Action {
    Action {
        throttle: action.throttle,
        force_gc: action.force_gc,
        ..eviction_action(1)
    }
}

fn one_rule(metric: &str, threshold: f64, action: Action) -> Vec<Rule> {
    vec![rule("node/rule", metric, threshold, action)]
}

fn report(sim: &Simulation) -> RuleReport {
    sim.engine.reports().next().unwrap()
}

fn evicted(sim: &Simulation) -> Vec<&str> {
    sim.evicted.iter().map(|(_, name)| &**name).collect()
}

/// Ticks until the rule is Breached, and returns when.
fn breach(sim: &mut Simulation) -> u64 {
    for _ in 0..900 {
        if report(sim).state == RuleState::Breached {
            return sim.now;
        }
        sim.tick();
    }
    panic!("no breach");
}

// ---- The next rung ----------------------------------------------------------------------------------------------

#[test]
fn no_pod_is_evicted_where_quotas_suffice() {
    let workers = (0..10).map(|i| batch(&format!("b{i}"), 0.76)).collect();
    let rules = one_rule(
        "cpu_total_usage",
        6000.0,
        with_eviction(&throttling(10, 10)),
    );
    let mut sim = Simulation::new(16, rules, workers);
    sim.advance(300);
    assert_eq!(evicted(&sim), [""; 0], "7.6 CPUs, three steps of ten pods");
    assert!(sim.uses() <= 6.1, "{}", sim.uses());
}

#[test]
fn the_first_eviction_comes_140_s_after_the_breach() {
    let mut workers: Vec<_> = (0..6).map(|i| batch(&format!("b{i}"), 4.0)).collect();
    workers.push(important(4.0));
    let rules = one_rule(
        "cpu_total_usage",
        1000.0,
        with_eviction(&idle_action(10, 10)),
    );
    let mut sim = Simulation::new(12, rules.clone(), workers);
    let breached = breach(&mut sim);
    assert_eq!(sim.plan.throttles.len(), 6, "all are idle at once");
    let promised = report(&sim).earliest_eviction.unwrap().as_nanos() / 1_000_000_000;
    while sim.evicted.is_empty() {
        assert!(sim.now < breached + 200, "no eviction");
        sim.tick();
    }
    assert_eq!(sim.evicted[0].0 - breached, 14 * PERIOD);
    assert_eq!(promised, sim.evicted[0].0, "the status said so");
    let evaluations = rules[0].evaluations_to_eviction();
    assert_eq!(evaluations, Some(14), "and so does check");
    let throttles = sim.plan.throttles.iter();
    assert!(throttles.clone().all(|it| it.ratio == 10 && it.is_lowest()));
}

#[test]
fn a_rung_that_helps_is_the_last() {
    let workers = vec![batch("a", 4.0), batch("b", 4.0), important(1.2)];
    let rules = one_rule(
        "protected_cpu_delay_max",
        10.0,
        with_eviction(&idle_action(10, 10)),
    );
    let mut sim = Simulation::new(2, rules, workers);
    breach(&mut sim);
    assert_eq!(report(&sim).rung, Some(Rung::IdleClass));
    assert_eq!(report(&sim).next_rung, Some(Rung::CpuQuota));
    sim.advance(600);
    assert!(sim.plan.throttles.iter().all(|it| it.ratio == 100));
    assert_eq!(evicted(&sim), [""; 0]);
}

#[test]
fn an_average_that_lags_takes_no_step() {
    let workers = vec![batch("a", 6.0), important(1.0)];
    let rules = one_rule("cpu_load_15_min", 3.0, throttling(10, 10));
    let mut sim = Simulation::new(8, rules, workers);
    breach(&mut sim);
    sim.worker("a").demand = 0.5;
    sim.advance(2 * PERIOD);
    let depth = sim.plan.throttles[0].ratio;
    for _ in 0..30 {
        sim.advance(PERIOD);
        if report(&sim).state != RuleState::Breached {
            break;
        }
        assert_eq!(sim.plan.throttles[0].ratio, depth, "the load is gone");
    }
}

#[test]
fn newcomers_join_at_the_present_depth_and_hold_nothing_back() {
    let workers = vec![batch("first", 4.0), important(4.0)];
    let rules = one_rule(
        "cpu_total_usage",
        1000.0,
        with_eviction(&idle_action(10, 10)),
    );
    let mut sim = Simulation::new(12, rules, workers);
    let breached = breach(&mut sim);
    // Every 20 s a job ends and another one starts.
    for job in 0..20_u64 {
        let name = format!("job{job}");
        let before = sim.plan.throttles.iter().map(|it| it.ratio).max();
        sim.workers.retain(|it| !it.pod.name.starts_with("job"));
        sim.start(batch(&name, 4.0));
        sim.advance(2 * PERIOD);
        let joined = sim.plan.throttles.iter().find(|it| *it.uid.0 == *name);
        if sim.evicted.is_empty() {
            let joined = joined.expect("it joins");
            assert!(joined.is_lowest() && Some(joined.ratio) <= before);
        }
    }
    let first = sim.evicted[0].0 - breached;
    assert!(first <= 16 * PERIOD, "{first}");
}

#[test]
fn a_throttle_without_effect_leads_to_the_next_rung() {
    use plimsoll::engine::metric::ActionKind;
    let workers = vec![batch("a", 3.0), important(2.0)];
    let rules = one_rule(
        "cpu_total_usage",
        4800.0,
        with_eviction(&throttling(10, 10)),
    );
    let mut sim = Simulation::new(8, rules.clone(), workers.clone());
    breach(&mut sim);
    sim.advance(120);
    assert_eq!(evicted(&sim), [""; 0], "the first step is enough");
    let mut sim = Simulation::new(8, rules, workers);
    sim.ineffective = Some(ActionKind::CpuThrottle);
    let breached = breach(&mut sim);
    sim.advance(12 * PERIOD);
    let first = sim.evicted[0].0 - breached;
    assert!(first <= 8 * PERIOD, "not nine steps later: {first}");
}

#[test]
fn the_lowest_weight_alone_is_not_waited_for() {
    let mut batch = batch("a", 4.0);
    batch.pod.resources_reported = true;
    let rules = one_rule("protected_cpu_delay_max", 10.0, idle_action(10, 10));
    let mut sim = Simulation::new(2, rules, vec![batch, important(1.5)]);
    breach(&mut sim);
    assert!(sim.engine.is_idle_unsafe());
    assert_eq!(sim.plan.throttles[0].ratio, 90, "a quota at once");
}

// ---- Victims that matter ----------------------------------------------------------------------------------------

#[test]
fn pods_that_use_nothing_are_not_evicted() {
    for metric in ["cpu_load_1_min", "cpu_usage_avg_5m", "cpu_total_usage"] {
        let threshold = match metric {
            "cpu_load_1_min" => 5.0,
            "cpu_usage_avg_5m" => 60.0,
            _ => 5000.0,
        };
        let mut workers: Vec<_> = (0..5).map(|i| batch(&format!("sleeper{i}"), 0.0)).collect();
        for worker in &mut workers {
            worker.pod.priority = -10;
        }
        workers.extend([batch("hog", 6.0), important(1.0)]);
        let rules = one_rule(metric, threshold, eviction_action(1));
        let mut sim = Simulation::new(8, rules, workers);
        sim.advance(1200);
        assert_eq!(evicted(&sim), ["hog"], "{metric}");
    }
}

#[test]
fn the_quota_of_a_pod_leaves_room_for_its_exec_probes() {
    for (exec_probes, lowest) in [(true, 100), (false, 20)] {
        let mut small = batch("small", 0.15);
        small.pod.exec_probes = exec_probes;
        let rules = one_rule("cpu_total_usage", 1000.0, throttling(0, 50));
        let mut sim = Simulation::new(2, rules, vec![small, important(1.5)]);
        sim.advance(120);
        let quota = sim.plan.throttles[0].target_cgroups[0].quota.unwrap();
        assert_eq!(quota.0, lowest);
    }
}

// ---- Evictions must show an effect ------------------------------------------------------------------------------

/// The important pod waits for itself; small pods run beside it.
fn waits_for_itself() -> Simulation {
    let mut workers: Vec<_> = (0..8)
        .map(|i| {
            let mut worker = batch(&format!("b{i}"), 0.05);
            worker.pod.owner = Some(format!("owner{i}").as_str().into());
            worker
        })
        .collect();
    workers.push(important(6.0));
    let rules = one_rule("protected_cpu_delay_max", 10.0, eviction_action(1));
    Simulation::new(2, rules, workers)
}

#[test]
fn evictions_without_effect_end() {
    let mut sim = waits_for_itself();
    sim.advance(900);
    // The first pair counts neither way: the important pod used what the two left.
    assert_eq!(sim.evicted.len(), 4);
    assert!(report(&sim).evictions_ended);
    assert_eq!(report(&sim).earliest_eviction, None);
    // A newcomer of another owner may be the cause; it is tried.
    let mut late = batch("late", 0.5);
    late.pod.owner = Some("late".into());
    sim.start(late);
    sim.advance(120);
    assert_eq!(sim.evicted.len(), 5);
    assert_eq!(sim.evicted[4].1, "late");
    sim.advance(600);
    assert_eq!(sim.evicted.len(), 5, "until half an hour has passed");
}

#[test]
fn the_end_of_evictions_is_reported_once() {
    let mut sim = waits_for_itself();
    let mut ended = 0;
    for _ in 0..900 {
        sim.tick();
        let transitions = sim.plan.transitions.iter();
        let is_end = |change: &PlanChange| matches!(change, PlanChange::EvictionsEnded { .. });
        ended += transitions
            .filter(|it| sim.plan.evaluated && is_end(&it.change))
            .count();
    }
    assert_eq!(ended, 1);
}

// ---- Harm by others ---------------------------------------------------------------------------------------------

#[test]
fn a_pod_at_its_own_memory_limit_has_nobody_evicted() {
    for is_short in [false, true] {
        let mut web = important(0.5);
        web.limit_stalls = 0.4;
        let workers = ["b0", "b1"].map(|name| Worker {
            memory: 4 * GIB,
            ..batch(name, 0.1)
        });
        let workers = workers.into_iter().chain([web]).collect();
        let rules = one_rule("protected_memory_stall_max", 10.0, eviction_action(1));
        let mut sim = Simulation::new(4, rules, workers);
        if is_short {
            sim.memory = 17 * GIB / 2;
        }
        sim.advance(60);
        assert_eq!(
            !sim.evicted.is_empty(),
            is_short,
            "short of memory: {is_short}"
        );
        assert!(is_short || report(&sim).limited);
    }
}

#[test]
fn metrics_that_no_action_lowers_drive_no_rung() {
    let names = [
        "container_cpu_throttled_ratio",
        "container_sched_run_queue_time",
        "network_receive_kibps",
        "cpu_pressure_some_avg10",
        "memory_pressure_some_avg10",
        "pod_cpu_delay",
        "cpu_usage_max_avg_1h",
        "mem_usage_max_avg_1d",
    ];
    for name in names {
        let metric = Metric::parse(name).unwrap();
        let rungs = Rung::ALL.map(|rung| metric.rung(rung));
        assert_eq!(rungs, [RungUse::Unused; 4], "{name}");
    }
}

#[test]
fn page_cache_is_not_reclaimed_for_memory_in_use() {
    let workers = vec![Worker {
        memory: 20 * GIB,
        cache: 8 * GIB,
        ..batch("a", 0.1)
    }];
    let gc = Action {
        force_gc: true,
        ..action("gc")
    };
    let mut sim = Simulation::new(4, one_rule("memory_total_utilization", 50.0, gc), workers);
    sim.advance(120);
    assert_eq!(report(&sim).state, RuleState::Breached);
    assert_eq!(sim.reclaimed, []);
}

// ---- Memory does not wait ---------------------------------------------------------------------------------------

#[test]
fn memory_that_runs_out_is_not_waited_for() {
    let workers = (0..4).map(|i| Worker {
        memory: 2 * GIB,
        ..batch(&format!("b{i}"), 0.1)
    });
    let workers = workers.chain([important(0.1)]).collect();
    let rules = one_rule("memory_total_utilization", 25.0, eviction_action(1));
    let mut sim = Simulation::new(4, rules, workers);
    sim.memory = 16 * GIB;
    sim.tick();
    let mut urgent = 0;
    for _ in 0..60 {
        sim.worker("important").memory += 400 * MIB;
        sim.tick();
        let used: u64 = sim.workers.iter().map(|it| it.memory).sum();
        assert!(
            used + 100 * MIB < sim.memory,
            "out of memory at {}",
            sim.now
        );
        let is_urgent =
            |change: &PlanChange| matches!(change, PlanChange::Evict { urgent: true, .. });
        if sim.plan.evaluated {
            let transitions = sim.plan.transitions.iter();
            urgent = urgent.max(transitions.filter(|it| is_urgent(&it.change)).count());
        }
        if sim.evicted.len() == 4 {
            break;
        }
    }
    assert!(urgent >= 2, "several pods at once");
}

#[test]
fn memory_that_grows_slowly_is_evicted_for_one_pod_at_a_time() {
    let workers = (0..3).map(|i| Worker {
        memory: 2 * GIB,
        ..batch(&format!("b{i}"), 0.1)
    });
    let workers = workers.chain([important(0.1)]).collect();
    let rules = one_rule("memory_total_utilization", 60.0, eviction_action(1));
    let mut sim = Simulation::new(4, rules, workers);
    sim.memory = 16 * GIB;
    for _ in 0..300 {
        sim.worker("important").memory += 20 * MIB;
        sim.tick();
        let urgent = sim.plan.transitions.iter();
        let is_urgent =
            |change: &PlanChange| matches!(change, PlanChange::Evict { urgent: true, .. });
        assert_eq!(urgent.filter(|it| is_urgent(&it.change)).count(), 0);
    }
}

/// A node whose important pod grows steadily, beside equal batch pods.
#[derive(Clone, Copy, Debug)]
struct Growth {
    /// The node's memory in bytes.
    node: u64,
    /// Share of it by which the important pod grows in a second.
    share: f64,
    /// Of the rule, in percent.
    threshold: f64,
    victims: u64,
    /// Grace period of the batch pods in seconds.
    grace: u64,
    /// Memory in use at the start, as a share of the threshold.
    used: f64,
}

impl Growth {
    fn each_second(self) -> u64 {
        (self.node as f64 * self.share) as u64
    }

    /// Each batch pod holds twice what grows in a minute, where all of them then fit below the threshold.
    fn simulation(self) -> Simulation {
        let fits = self.node as f64 * self.threshold / 100.0 / self.victims as f64;
        let held = (self.each_second() * 120).min(fits as u64);
        let mut workers: Vec<_> = (0..self.victims)
            .map(|i| {
                let mut worker = batch(&format!("b{i}"), 0.1);
                worker.memory = held;
                worker.lingers = self.grace;
                worker.pod.grace = Duration::from_secs(self.grace);
                worker
            })
            .collect();
        let used = self.node as f64 * self.threshold / 100.0 * self.used;
        workers.push(Worker {
            memory: (used as u64).saturating_sub(held * self.victims),
            ..important(0.1)
        });
        let rules = one_rule(
            "memory_total_utilization",
            self.threshold,
            eviction_action(1),
        );
        let mut sim = Simulation::new(4, rules, workers);
        sim.memory = self.node;
        sim
    }

    /// Lets it grow for a second; returns what is left.
    fn tick(self, sim: &mut Simulation) -> u64 {
        sim.worker("important").memory += self.each_second();
        sim.tick();
        let used: u64 = sim.workers.iter().map(|it| it.memory).sum();
        self.node.saturating_sub(used)
    }
}

fn growth(share: std::ops::Range<f64>) -> impl Strategy<Value = Growth> {
    let size = (8..128_u64, share, 40.0..85.0_f64);
    (size, 1..8_u64, 1..6_u64, 0.5..1.0_f64).prop_map(
        |((gib, share, threshold), victims, grace, used)| Growth {
            node: gib * GIB,
            share,
            threshold,
            victims: victims
                .min((threshold / 100.0 / (share * 120.0)) as u64)
                .max(1),
            grace,
            used,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The kubelet evicts no pod while there is a pod that the rule may evict.
    #[test]
    fn memory_that_grows_slowly_never_reaches_the_threshold_of_the_kubelet(growth in growth(0.0003..0.003)) {
        let mut sim = growth.simulation();
        for _ in 0..900 {
            let left = growth.tick(&mut sim);
            if sim.evicted.len() as u64 == growth.victims {
                break;
            }
            prop_assert!(left > 100 * MIB, "{left} bytes at {}", sim.now);
        }
    }

    /// The request does not wait for a rung or a round.
    #[test]
    fn memory_that_grows_fast_is_evicted_for_in_the_first_evaluation_that_foresees_it(growth in growth(0.003..0.03)) {
        let mut sim = growth.simulation();
        let ahead = growth.each_second() * (30 + growth.grace);
        for second in 0..300 {
            let left = growth.tick(&mut sim);
            let foreseen = second > 10 && left < ahead + 90 * MIB;
            let is_breached = report(&sim).state == RuleState::Breached;
            if sim.plan.evaluated && is_breached && foreseen {
                prop_assert!(!sim.evicted.is_empty(), "{left} bytes at {}", sim.now);
            }
            if !sim.evicted.is_empty() {
                break;
            }
        }
    }
}

// ---- Rounds and terminating pods --------------------------------------------------------------------------------

#[test]
fn a_long_grace_period_does_not_end_evictions() {
    let workers = ["a", "b"].map(|name| {
        let mut worker = Worker {
            memory: 4 * GIB,
            lingers: 6 * 3600,
            ..batch(name, 0.1)
        };
        worker.pod.grace = Duration::from_hours(6);
        worker
    });
    let mut action = eviction_action(1);
    action.eviction = Some(EvictionSpec {
        grace: None,
        max_pods_per_round: 1,
        evict_unowned: false,
    });
    let rules = one_rule("memory_total_usage", (5 * GIB) as f64, action);
    let mut sim = Simulation::new(4, rules, workers.into());
    sim.advance(360);
    assert_eq!(evicted(&sim), ["a", "b"], "the second after five minutes");
    assert!(sim.evicted[1].0 - sim.evicted[0].0 >= 300);
}

#[test]
fn a_pod_that_does_not_exit_is_throttled_again() {
    let workers = vec![batch("greedy", 3.0), important(1.0)];
    let rules = one_rule("cpu_total_usage", 1500.0, throttling(10, 90));
    let mut sim = Simulation::new(2, rules, workers);
    breach(&mut sim);
    sim.worker("greedy").pod.terminating = true;
    sim.worker("greedy").ends = Some(u64::MAX);
    sim.set_pods();
    sim.advance(30);
    assert_eq!(sim.plan.throttles, [], "it has its CPU to shut down");
    sim.advance(90);
    assert!(
        !sim.plan.throttles.is_empty(),
        "a minute after its grace period"
    );
}

// ---- Preview ----------------------------------------------------------------------------------------------------

#[test]
fn a_preview_on_a_metric_without_a_unit_stops_before_evictions() {
    let workers = vec![batch("a", 4.0), batch("b", 4.0), important(4.0)];
    let mut rules = one_rule(
        "protected_cpu_delay_max",
        10.0,
        with_eviction(&idle_action(10, 10)),
    );
    rules[0].strategy = RuleStrategy::Preview;
    let mut sim = Simulation::new(2, rules, workers);
    let mut evictions = 0;
    for _ in 0..600 {
        sim.tick();
        let transitions = sim.plan.transitions.iter();
        let evicts = transitions.filter(|it| matches!(it.change, PlanChange::Evict { .. }));
        evictions += evicts.count();
    }
    assert_eq!(evictions, 0);
    assert_eq!(report(&sim).rung, Some(Rung::CpuQuota));
    assert_eq!(
        report(&sim).next_rung,
        Some(Rung::Eviction),
        "if the breach lasts"
    );
}

// ---- Any mix ----------------------------------------------------------------------------------------------------

/// A batch pod: demand, priority, limit, seconds of life.
type Job = (f64, i32, Option<f64>, u64);

fn job() -> impl Strategy<Value = Job> {
    let demand = prop_oneof![1 => Just(0.0), 4 => 0.005..6.0_f64];
    let limit = prop_oneof![3 => Just(None), 1 => (0.1..2.0_f64).prop_map(Some)];
    let life = prop_oneof![3 => Just(u64::MAX), 1 => 15..200_u64];
    (demand, -3..3_i32, limit, life)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Nothing is evicted while a victim that could be throttled is not at its lowest, nor what uses nothing, nor more than
    /// two without effect.
    #[test]
    fn evictions_are_the_last_rung_in_any_mix(
        jobs in proptest::collection::vec(job(), 1..14),
        cpus in prop_oneof![Just(2_u32), Just(8), Just(32), Just(128)],
        load in 0.3..2.5_f64,
        which in 0..3_usize,
        idle in any::<bool>(),
    ) {
        let (metric, threshold) = [
            ("cpu_total_usage", f64::from(cpus) * 600.0),
            ("cpu_load_1_min", f64::from(cpus) * 0.7),
            ("protected_cpu_delay_max", 10.0),
        ][which];
        let throttle = if idle { idle_action(20, 20) } else { throttling(20, 20) };
        let rules = one_rule(metric, threshold, with_eviction(&throttle));
        let scale = f64::from(cpus) / 8.0;
        let mut workers: Vec<Worker> = jobs.iter().enumerate().map(|(i, (demand, priority, limit, _))| {
            let mut worker = batch(&format!("b{i}"), demand * scale);
            worker.pod.priority = *priority;
            worker.limit = limit.map(|limit| limit * scale);
            worker
        }).collect();
        workers.push(important(f64::from(cpus) * load / 2.0));
        let mut sim = Simulation::new(cpus, rules, workers);
        let mut ended = None;
        for second in 0..600_u64 {
            for (i, (_, _, _, life)) in jobs.iter().enumerate() {
                if *life != u64::MAX && second > 0 && second % life == 0 {
                    let name = format!("b{i}");
                    if let Some(worker) = sim.workers.iter_mut().find(|it| it.pod.name == name) {
                        worker.ends = Some(sim.now + 1);
                        worker.pod.terminating = true;
                    }
                    sim.set_pods();
                }
            }
            let seen = sim.evicted.len();
            sim.tick();
            for (_, name) in &sim.evicted[seen..] {
                let victim = sim.workers.iter().find(|it| it.pod.name == *name).unwrap();
                prop_assert!(victim.allocated >= 0.02, "{name} uses {}", victim.allocated);
                for other in sim.workers.iter().filter(|it| it.pod.namespace == "batch" && !it.pod.terminating) {
                    // At its lowest, or so small that nothing can be taken.
                    let lowest = sim.plan.throttles.iter().any(|it| it.uid == other.pod.uid && it.ratio <= 20);
                    // The engine sees the mean of ten seconds.
                    let small = other.allocated < 0.05;
                    prop_assert!(lowest || small, "{} has {} and was not throttled", other.pod.name, other.allocated);
                }
            }
            // Six hundred seconds are less than the time after which they start again.
            let in_breach = report(&sim).state == RuleState::Breached;
            let has_ended = report(&sim).evictions_ended && in_breach;
            prop_assert!(!has_ended || ended.is_none_or(|count| count == sim.evicted.len()));
            ended = has_ended.then_some(sim.evicted.len());
        }
    }
}
