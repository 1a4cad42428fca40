//! Values of metrics, and when they are unknown.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::{
    CPUS, GIB, Load, Node, PERIOD, SECOND, action, disabling_scheduling, rule,
};
use plimsoll::engine::RuleReport;
use plimsoll::engine::metric::Metric;
use plimsoll::engine::plan::{PlanChange, RuleState, Unknown};
use plimsoll::engine::policy::{Probe, Rule};
use plimsoll::engine::sample::{
    ContainerSample, CpuTimes, DiskSample, InterfaceSample, NodeMemory, Pressure, ProbeSample,
    Sample, Series, WaitCounters,
};
use plimsoll::engine::selector::{Requirement, Selector};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::Bytes;

type Edit<'a> = &'a dyn Fn(&mut Sample);

const NOTHING: Edit<'static> = &|_| {};

/// The report after evaluations ten seconds apart, each with an edited sample.
fn evaluate(rule: Rule, edits: &[Edit]) -> RuleReport {
    let mut node = Node::new(vec![rule], vec![Load::new("a", 100)]);
    for edit in edits {
        node.advance(PERIOD);
        edit(&mut node.sample);
        node.step();
        assert!(node.plan.evaluated);
    }
    node.engine.reports().next().unwrap()
}

fn value(rule: Rule, edits: &[Edit]) -> Result<f64, Unknown> {
    let report = evaluate(rule, edits);
    report.value.ok_or_else(|| report.unknown.unwrap())
}

fn watch(metric: &str) -> Rule {
    rule("n/rule", metric, 50.0, action("watch"))
}

fn selecting(metric: &str, key: &str, value: &str) -> Rule {
    let requirement = Requirement::In(key.to_owned(), vec![value.to_owned()]);
    Rule {
        series: Some(Selector {
            requirements: vec![requirement],
        }),
        ..watch(metric)
    }
}

fn cpu(busy_seconds: u64) -> impl Fn(&mut Sample) {
    move |sample| {
        sample.node.cpu = Some(CpuTimes {
            busy: busy_seconds * 1_000_000_000,
            idle: 0,
            online: CPUS,
        });
    }
}

#[test]
fn cpu_usage_is_the_busy_time_over_the_measured_interval() {
    let twelve = [&cpu(100) as Edit, &cpu(112)];
    assert_eq!(value(watch("cpu_total_usage"), &twelve), Ok(1200.0));
    assert_eq!(value(watch("cpu_total_utilization"), &twelve), Ok(15.0));
}

#[test]
fn cpu_usage_that_cannot_be_determined_is_unknown() {
    let none: Edit = &|sample| sample.node.cpu = None;
    let offline: Edit = &|sample| sample.node.cpu.as_mut().unwrap().online = 0;
    let table: [(&[Edit], Unknown); 7] = [
        (&[&cpu(100)], Unknown::Rebased),
        (&[none, &cpu(100)], Unknown::Rebased),
        (&[&cpu(100), none], Unknown::Missing),
        (&[&cpu(100), &cpu(99)], Unknown::Impossible),
        (&[&cpu(100), &cpu(186)], Unknown::Impossible),
        (&[&cpu(100), offline], Unknown::Impossible),
        (
            &[&cpu(100), &|sample| {
                sample.at = BootTime::from_nanos(900_000_000_000);
            }],
            Unknown::Stale,
        ),
    ];
    for (edits, reason) in table {
        assert_eq!(value(watch("cpu_total_usage"), edits), Err(reason));
    }
    let full = value(watch("cpu_total_usage"), &[&cpu(100), &cpu(184)]);
    assert_eq!(
        full,
        Ok(8400.0),
        "up to 105 % is within the resolution of the counters"
    );
}

#[test]
fn a_counter_that_went_back_is_the_next_baseline() {
    let samples = [&cpu(100) as Edit, &cpu(40), &cpu(60)];
    assert_eq!(value(watch("cpu_total_usage"), &samples), Ok(2000.0));
}

#[test]
fn a_repeated_sample_has_no_value() {
    let first: Edit = &|sample| sample.at = BootTime::from_nanos(1_000_000_000_000);
    let found = value(watch("cpu_total_usage"), &[first, first]);
    assert_eq!(found, Err(Unknown::Impossible));
}

#[test]
fn memory_usage_is_total_minus_available() {
    let memory = |total, available| {
        move |sample: &mut Sample| {
            sample.node.memory = Some(NodeMemory {
                total: Bytes(total),
                available: Bytes(available),
                ..NodeMemory::default()
            });
        }
    };
    let sample = memory(16 * GIB, 12 * GIB);
    assert_eq!(
        value(watch("memory_total_usage"), &[&sample]),
        Ok(4.0 * GIB as f64)
    );
    assert_eq!(
        value(watch("memory_total_utilization"), &[&sample]),
        Ok(25.0)
    );
    for (total, available) in [(0, 0), (10, 11)] {
        let found = value(watch("memory_total_usage"), &[&memory(total, available)]);
        assert_eq!(found, Err(Unknown::Impossible));
    }
    let none: Edit = &|sample| sample.node.memory = None;
    assert_eq!(
        value(watch("memory_total_usage"), &[none]),
        Err(Unknown::Missing)
    );
}

#[test]
fn idle_pools_of_huge_pages_are_not_used() {
    let sample: Edit = &|sample| {
        sample.node.memory = Some(NodeMemory {
            total: Bytes(64 * GIB),
            available: Bytes(3 * GIB),
            hugetlb: Bytes(60 * GIB),
            ..NodeMemory::default()
        });
    };
    let of = |metric| value(watch(metric), &[sample]);
    assert_eq!(of("memory_total_usage"), Ok(GIB as f64));
    assert_eq!(of("memory_total_utilization"), Ok(25.0));
    let no_other_memory: Edit = &|sample| {
        sample.node.memory = Some(NodeMemory {
            total: Bytes(GIB),
            hugetlb: Bytes(GIB),
            ..NodeMemory::default()
        });
    };
    let found = value(watch("memory_total_usage"), &[no_other_memory]);
    assert_eq!(found, Err(Unknown::Impossible));
}

#[test]
fn load_and_pressure_are_used_unchanged() {
    let load: Edit = &|sample| sample.node.load = Some([1.0, 5.0, 15.0]);
    assert_eq!(value(watch("cpu_load_1_min"), &[load]), Ok(1.0));
    assert_eq!(value(watch("cpu_load_15_min"), &[load]), Ok(15.0));
    let pressure: Edit = &|sample| {
        sample.node.pressure[1] = Some(Pressure {
            some: [1.0, 2.0, 3.0],
            ..Pressure::default()
        });
    };
    assert_eq!(
        value(watch("memory_pressure_some_avg60"), &[pressure]),
        Ok(2.0)
    );
    for metric in ["memory_pressure_full_avg60", "cpu_pressure_some_avg10"] {
        assert_eq!(value(watch(metric), &[pressure]), Err(Unknown::Missing));
    }
    for invalid in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0] {
        let sample = |sample: &mut Sample| sample.node.load = Some([invalid; 3]);
        let found = value(watch("cpu_load_5_min"), &[&sample]);
        assert_eq!(found, Err(Unknown::Impossible), "{invalid}");
    }
}

#[test]
fn a_metric_that_is_not_provided_is_missing() {
    let metric = "ext_cpu_total_distribute";
    let found = value(watch(metric), &[NOTHING, NOTHING]);
    assert_eq!(found, Err(Unknown::Missing));
}

#[test]
fn a_window_is_unknown_until_it_is_half_full() {
    for metric in ["cpu_usage_avg_5m", "mem_usage_max_avg_1d"] {
        let found = value(watch(metric), &[NOTHING, NOTHING]);
        assert_eq!(found, Err(Unknown::Sparse), "{metric}");
    }
    let average = "cpu_usage_avg_5m";
    let rules = vec![rule(
        "n/window",
        average,
        40.0,
        disabling_scheduling("close"),
    )];
    let mut node = Node::new(rules, Vec::new());
    let report = |node: &Node| node.engine.reports().next().unwrap();
    // 6 of 8 CPUs.
    for _ in 0..15 {
        node.at(6000);
    }
    assert_eq!(report(&node).unknown, Some(Unknown::Sparse));
    for _ in 0..3 {
        node.at(6000);
    }
    assert!((report(&node).value.unwrap() - 75.0).abs() < 0.1);
    assert_eq!(node.state("n/window"), RuleState::Breached);
}

fn disk(device: &str, n: u64) -> DiskSample {
    DiskSample {
        device: device.into(),
        reads: 10 * n,
        read_bytes: 20_480 * n,
        writes: 30 * n,
        write_bytes: 40_960 * n,
        io_ms: 500 * n,
    }
}

fn disks(disks: Vec<DiskSample>) -> impl Fn(&mut Sample) {
    move |sample| sample.node.disks.clone_from(&disks)
}

#[test]
fn disk_rates_are_per_second_and_the_busiest_device_decides() {
    let before = disks(vec![disk("vda", 1), disk("vdb", 1)]);
    let after = disks(vec![disk("vdb", 11), disk("vda", 3)]);
    let table = [
        ("disk_read_iops", 10.0, 2.0),
        ("disk_read_kibps", 20.0, 4.0),
        ("disk_write_iops", 30.0, 6.0),
        ("disk_write_kibps", 40.0, 8.0),
        ("disk_utilization", 50.0, 10.0),
    ];
    for (metric, busiest, vda) in table {
        let samples = [&before as Edit, &after];
        assert_eq!(value(watch(metric), &samples), Ok(busiest), "{metric}");
        let rule = selecting(metric, "device", "vda");
        assert_eq!(value(rule, &samples), Ok(vda), "{metric}");
    }
}

#[test]
fn absent_series_are_missing_and_new_ones_have_no_rate_yet() {
    let one = disks(vec![disk("vda", 1)]);
    let two = disks(vec![disk("vda", 2), disk("vdb", 99)]);
    let samples = [&one as Edit, &two];
    assert_eq!(value(watch("disk_read_iops"), &samples), Ok(1.0));
    let new = selecting("disk_read_iops", "device", "vdb");
    assert_eq!(value(new, &samples), Err(Unknown::Rebased));
    let absent = selecting("disk_read_iops", "device", "sda");
    assert_eq!(value(absent, &samples), Err(Unknown::Missing));
    assert_eq!(
        value(watch("disk_read_iops"), &[NOTHING]),
        Err(Unknown::Missing)
    );
    let labelled = selecting("cpu_load_1_min", "device", "vda");
    assert_eq!(value(labelled, &[NOTHING]), Err(Unknown::Missing));
}

#[test]
fn a_disk_utilization_above_100_percent_is_rejected() {
    let before = disks(vec![disk("vda", 0)]);
    let after = disks(vec![disk("vda", 22)]);
    let found = value(watch("disk_utilization"), &[&before, &after]);
    assert_eq!(found, Err(Unknown::Impossible));
}

#[test]
fn network_rates_are_per_second_and_per_interface() {
    let link = |n: u64| {
        move |sample: &mut Sample| {
            sample.node.interfaces = vec![InterfaceSample {
                interface: "eth0".into(),
                receive_bytes: 10_240 * n,
                receive_packets: 20 * n,
                receive_drops: 30 * n,
                send_bytes: 40_960 * n,
                send_packets: 50 * n,
                send_drops: 60 * n,
            }];
        }
    };
    let table = [
        ("network_receive_kibps", 1.0),
        ("network_receive_pckps", 2.0),
        ("network_drop_in", 3.0),
        ("network_sent_kibps", 4.0),
        ("network_sent_pckps", 5.0),
        ("network_drop_out", 6.0),
    ];
    for (metric, expected) in table {
        let rule = selecting(metric, "interface", "eth0");
        assert_eq!(value(rule, &[&link(1), &link(2)]), Ok(expected), "{metric}");
    }
}

fn container(delay: u64, periods: u64, throttled: u64) -> impl Fn(&mut Sample) {
    move |sample| {
        sample.pods[0].containers = vec![ContainerSample {
            container: "main".into(),
            run_delay_nanos: Some(delay),
            periods: Some(periods),
            throttled_periods: Some(throttled),
        }];
    }
}

#[test]
fn containers_have_a_run_queue_time_and_a_throttled_ratio() {
    let samples = [
        &container(0, 100, 10) as Edit,
        &container(5_000_000, 200, 35),
    ];
    let queue = "container_sched_run_queue_time";
    let ratio = "container_cpu_throttled_ratio";
    assert_eq!(value(watch(queue), &samples), Ok(500.0), "5 ms in 10 s");
    assert_eq!(value(watch(ratio), &samples), Ok(25.0));
    for (key, taken, other) in [("pod", "a", "b"), ("container", "main", "x")] {
        assert_eq!(value(selecting(queue, key, taken), &samples), Ok(500.0));
        assert_eq!(
            value(selecting(queue, key, other), &samples),
            Err(Unknown::Missing)
        );
    }
    let idle = [&container(0, 100, 10) as Edit, &container(0, 100, 10)];
    assert_eq!(
        value(watch(ratio), &idle),
        Err(Unknown::Missing),
        "no period passed"
    );
    let back = [&container(9, 100, 10) as Edit, &container(0, 90, 10)];
    for metric in [queue, ratio] {
        assert_eq!(value(watch(metric), &back), Err(Unknown::Impossible));
        assert_eq!(value(watch(metric), &back[..1]), Err(Unknown::Rebased));
    }
}

fn probe(values: &[(&str, f64)]) -> impl Fn(&mut Sample) {
    let series: Arc<[Series]> = values
        .iter()
        .map(|(zone, value)| Series {
            name: "queue_depth".into(),
            labels: vec![("zone".into(), (*zone).into())],
            value: *value,
        })
        .collect();
    move |sample| {
        sample.probes = vec![ProbeSample {
            url: "http://localhost/metrics".into(),
            at: sample.at,
            series: Arc::clone(&series),
        }];
    }
}

fn probing() -> Rule {
    Rule {
        metric: Metric::Probe("queue_depth".into()),
        probe: Some(Probe {
            url: "http://localhost/metrics".into(),
            headers: Vec::new(),
            timeout: SECOND,
        }),
        ..watch("cpu_load_1_min")
    }
}

#[test]
fn the_value_of_a_probe_is_the_largest_selected_series() {
    let answer = probe(&[("a", 7.0), ("b", -3.0)]);
    assert_eq!(value(probing(), &[&answer]), Ok(7.0));
    let other = Rule {
        series: selecting("cpu_load_1_min", "zone", "b").series,
        ..probing()
    };
    assert_eq!(value(other, &[&answer]), Ok(-3.0));
    assert_eq!(value(probing(), &[NOTHING]), Err(Unknown::Missing));
    let old = |sample: &mut Sample| {
        answer(sample);
        sample.probes[0].at = BootTime::default();
    };
    assert_eq!(value(probing(), &[&old]), Err(Unknown::Stale));
}

#[test]
fn a_repeated_probe_response_counts_as_one_breach() {
    let rule = || Rule {
        avoidance_threshold: 2,
        ..probing()
    };
    let hot = probe(&[("a", 60.0)]);
    let first = Cell::new(None);
    let repeated = |sample: &mut Sample| {
        hot(sample);
        first.set(first.get().or(Some(sample.at)));
        sample.probes[0].at = first.get().unwrap();
    };
    let report = evaluate(rule(), &[&repeated, &repeated, &repeated]);
    assert_eq!((report.state, report.breaches), (RuleState::Normal, 1));
    assert_eq!(report.value, Some(60.0), "it stays known");
    first.set(None);
    let report = evaluate(rule(), &[&repeated, &repeated, &hot]);
    assert_eq!(
        report.state,
        RuleState::Breached,
        "the next response counts"
    );
}

#[test]
fn a_nan_series_is_ignored_but_prevents_quiet() {
    let hot = probe(&[("a", 60.0), ("b", f64::NAN)]);
    let incomplete = probe(&[("a", 1.0), ("b", f64::NAN)]);
    let quiet = probe(&[("a", 1.0), ("b", 2.0)]);
    let invalid = probe(&[("a", f64::NAN), ("b", f64::INFINITY)]);
    let state = |edits: &[Edit]| evaluate(probing(), edits).state;
    assert_eq!(value(probing(), &[&invalid]), Err(Unknown::Impossible));
    assert_eq!(value(probing(), &[&incomplete]), Ok(1.0));
    assert_eq!(state(&[&hot]), RuleState::Breached);
    assert_eq!(state(&[&hot, &incomplete]), RuleState::Breached);
    assert_eq!(state(&[&hot, &quiet]), RuleState::Cooling);
}

#[test]
fn actions_end_after_fifteen_minutes_with_a_nan_series() {
    let hot = probe(&[("a", 60.0), ("b", 1.0)]);
    let incomplete = probe(&[("a", 1.0), ("b", f64::NAN)]);
    let state = |count: usize| {
        let mut edits: Vec<Edit> = vec![&incomplete; count];
        edits.insert(0, &hot);
        evaluate(probing(), &edits).state
    };
    assert_eq!(state(90), RuleState::Breached);
    assert_eq!(state(91), RuleState::Normal);
}

#[test]
fn a_sample_after_a_gap_of_three_periods_is_not_counted() {
    for (gap, unknown) in [
        (PERIOD * 3, None),
        (PERIOD * 3 + SECOND, Some(Unknown::Rebased)),
    ] {
        let rules = vec![
            watch("cpu_total_usage"),
            rule("n/load", "cpu_load_1_min", 5.0, action("x")),
        ];
        let mut node = Node::new(rules, Vec::new());
        node.tick();
        node.tick();
        node.advance(gap);
        node.sample.node.load = Some([1.0; 3]);
        node.step();
        assert!(
            node.engine
                .reports()
                .all(|report| report.unknown == unknown)
        );
        assert_eq!(
            node.engine.next_due(),
            Some(node.now + PERIOD),
            "the schedule starts over"
        );
        node.advance(PERIOD);
        node.sample.node.load = Some([1.0; 3]);
        node.step();
        assert!(node.engine.reports().all(|report| report.unknown.is_none()));
    }
}

#[test]
fn a_baseline_older_than_three_periods_is_not_used() {
    let mut node = Node::new(vec![watch("cpu_total_usage")], Vec::new());
    node.tick();
    let stuck = node.sample.clone();
    for _ in 0..4 {
        node.advance(PERIOD);
        node.sample = stuck.clone();
        node.step();
    }
    node.tick();
    let report = node.engine.reports().next().unwrap();
    assert_eq!(report.unknown, Some(Unknown::Rebased));
}

#[test]
fn evaluations_have_a_fixed_schedule() {
    let mut node = Node::new(vec![watch("cpu_total_usage")], Vec::new());
    node.tick();
    let first = node.now;
    let due = |node: &Node| node.engine.next_due().unwrap().since(first);
    assert_eq!(due(&node), PERIOD);
    node.advance(SECOND * 9);
    assert!(!node.step().evaluated);
    node.advance(SECOND * 3);
    assert!(node.step().evaluated);
    assert_eq!(
        due(&node),
        PERIOD * 2,
        "a delay of two seconds does not shift the schedule"
    );
    node.advance(SECOND * 17);
    assert!(node.step().evaluated);
    assert_eq!(
        due(&node),
        PERIOD * 4,
        "a second before the next is too close"
    );
    node.advance(Duration::from_millis(1));
    assert!(!node.step().evaluated);
}

#[test]
fn the_period_of_the_node_is_the_interval_of_all_rules() {
    let other = rule("n/other", "cpu_total_usage", 5000.0, action("x"));
    let mut node = Node::new(vec![watch("cpu_total_usage"), other], Vec::new());
    node.engine = std::mem::take(&mut node.engine).with_period(PERIOD * 3);
    let evaluated = [0, 1000, 2000, 6000].map(|cpu| node.at(cpu).evaluated);
    assert_eq!(evaluated, [true, false, false, true]);
    let values: Vec<_> = node.engine.reports().map(|report| report.value).collect();
    assert_eq!(values, [Some(3000.0), Some(3000.0)]);
}

#[test]
fn answers_of_a_probe_are_valid_until_the_next_evaluation() {
    for (age, value) in [(PERIOD * 12, Some(7.0)), (PERIOD * 13, None)] {
        let mut node = Node::new(vec![probing()], Vec::new());
        node.engine = std::mem::take(&mut node.engine).with_period(PERIOD * 12);
        node.advance(PERIOD * 13);
        probe(&[("a", 7.0)])(&mut node.sample);
        node.sample.probes[0].at = node.now.before(age);
        node.step();
        let report = node.engine.reports().next().unwrap();
        assert_eq!(report.value, value, "{age:?} old");
    }
}

#[test]
fn unknown_and_its_end_are_reported_once_but_not_at_the_start() {
    let mut node = Node::new(vec![watch("cpu_total_usage")], Vec::new());
    let mut reported = Vec::new();
    for round in 0..7 {
        node.advance(PERIOD);
        if (3..5).contains(&round) {
            node.sample.node.cpu = None;
        }
        node.step();
        for transition in &node.plan.transitions {
            reported.push((round, transition.change.clone()));
        }
    }
    let missing = PlanChange::Unknown {
        reason: Unknown::Missing,
    };
    let rebased = PlanChange::Unknown {
        reason: Unknown::Rebased,
    };
    let known = PlanChange::Known { value: 0.0 };
    assert_eq!(reported, [(3, missing), (5, rebased), (6, known)]);
}

/// A container whose counter cannot be read may be the one that waits.
#[test]
fn an_unreadable_series_is_never_quiet() {
    let two = |delay: Option<u64>| {
        move |sample: &mut Sample| {
            let one = |container: &str, run_delay_nanos| ContainerSample {
                container: container.into(),
                run_delay_nanos,
                periods: None,
                throttled_periods: None,
            };
            sample.pods[0].containers = vec![one("main", Some(0)), one("side", delay)];
        }
    };
    let queue = || Rule {
        avoidance_threshold: 1,
        ..watch("container_sched_run_queue_time")
    };
    let read = evaluate(queue(), &[&two(Some(0)), &two(Some(0))]);
    assert_eq!((read.value, read.unknown), (Some(0.0), None));
    let mut node = Node::new(vec![queue()], vec![Load::new("a", 100)]);
    let edits: [(Option<u64>, u32); 3] = [(Some(0), 0), (Some(1_000_000_000), 0), (None, 0)];
    for (delay, quiet_evaluations) in edits {
        node.advance(PERIOD);
        two(delay)(&mut node.sample);
        node.step();
        assert_eq!(
            node.engine.reports().next().unwrap().quiet_evaluations,
            quiet_evaluations
        );
    }
    let state = node.engine.reports().next().unwrap().state;
    assert_eq!(state, plimsoll::engine::plan::RuleState::Breached);
}

fn waits(stalled: u64, periods: u64, throttled: u64) -> WaitCounters {
    WaitCounters {
        stalled: [Some(stalled * 1_000_000_000); 3],
        periods: Some(periods),
        throttled_periods: Some(throttled),
        ..WaitCounters::default()
    }
}

#[test]
fn a_stall_excludes_throttling_by_the_own_quota() {
    use plimsoll::engine::metric::PressureKind::{Cpu, Memory};
    use plimsoll::engine::protected::{Waiting, stall};
    let ten = 10_000_000_000;
    let of = |to: WaitCounters, kind| stall(&waits(1, 0, 0), &to, ten, kind);
    let known = |percent, limited| Ok(Waiting { percent, limited });
    assert_eq!(of(waits(5, 0, 0), Cpu), known(40.0, false));
    assert_eq!(of(waits(5, 100, 0), Cpu), known(40.0, false));
    assert_eq!(of(waits(5, 100, 30), Cpu), known(10.0, true));
    assert_eq!(
        of(waits(5, 20, 10), Cpu),
        known(30.0, true),
        "of the interval, not of the periods in which it ran"
    );
    assert_eq!(
        of(waits(5, 1001, 200), Cpu),
        known(20.0, true),
        "enforcement periods of 10 ms"
    );
    assert_eq!(
        of(waits(5, 100, 90), Cpu),
        known(0.0, true),
        "never negative"
    );
    assert_eq!(of(waits(5, 100, 90), Memory), known(40.0, false));
    assert_eq!(
        stall(&waits(1, 100, 90), &waits(5, 10, 9), ten, Cpu),
        Err(Unknown::Rebased),
        "a container was restarted"
    );
    assert_eq!(
        of(waits(0, 0, 0), Cpu),
        Err(Unknown::Impossible),
        "it went back"
    );
    assert_eq!(of(waits(20, 0, 0), Cpu), Err(Unknown::Impossible));
    assert_eq!(of(WaitCounters::default(), Cpu), Err(Unknown::Missing));
    let none = WaitCounters::default();
    assert_eq!(
        stall(&none, &waits(1, 0, 0), ten, Cpu),
        Err(Unknown::Rebased)
    );
}

/// Twenty protected pods that wait 1 to 20 percent of the time, and a victim that waits half of the time.
#[test]
fn protected_metrics_only_count_protected_pods() {
    let named = |index: usize| format!("p{index:02}");
    let run = |metric: &str, edit: &dyn Fn(&mut Sample)| {
        let mut loads: Vec<_> = (1..=20).map(|i| Load::new(&named(i), 100)).collect();
        for load in &mut loads {
            load.pod.protected = true;
        }
        loads.push(Load::new("victim", 100));
        let rule = rule(
            "n/rule",
            metric,
            90.0,
            crate::engine_support::throttling(10, 10),
        );
        let mut node = Node::new(vec![rule], loads);
        for round in 0..2_u64 {
            node.advance(PERIOD);
            node.sample.pressure_by_cgroup = true;
            for (index, pod) in (1_u64..).zip(&mut node.sample.pods) {
                let percent = if index == 21 { 50 } else { index };
                pod.waits.stalled = [Some(round * percent * 100_000_000); 3];
            }
            edit(&mut node.sample);
            node.step();
        }
        let report = node.engine.reports().next().unwrap();
        report.value.ok_or_else(|| report.unknown.unwrap())
    };
    let plain = |_: &mut Sample| {};
    assert_eq!(run("protected_cpu_delay_max", &plain), Ok(20.0));
    assert_eq!(run("protected_cpu_delay_p95", &plain), Ok(19.0));
    assert_eq!(run("protected_memory_stall_max", &plain), Ok(20.0));
    assert_eq!(run("protected_io_stall_max", &plain), Ok(20.0));
    let v1 = |sample: &mut Sample| sample.pressure_by_cgroup = false;
    assert_eq!(run("protected_cpu_delay_max", &v1), Err(Unknown::Missing));
    let unread = |sample: &mut Sample| sample.pods[3].waits = WaitCounters::default();
    assert_eq!(
        run("protected_cpu_delay_p95", &unread),
        Err(Unknown::Missing)
    );
}
