//! The load line, and pressure rules.

use super::*;
use crate::engine::metric::Metric;

#[test]
fn the_lowest_threshold_of_an_enforced_rule_is_the_line() {
    let preview = |rule: Rule| Rule {
        strategy: Strategy::Preview,
        ..rule
    };
    let at_night = |rule: Rule| Rule {
        active_during: vec!["22:00-06:00 Etc/UTC".parse().unwrap()],
        ..rule
    };
    let by_device = |rule: Rule| Rule {
        series: Some(Selector {
            requirements: vec![Requirement::Exists("device".to_owned())],
        }),
        ..rule
    };
    let cases = [
        (vec![], (90.0, 90.0)),
        (vec![rule("a", "cpu_total_utilization", 70.0)], (70.0, 90.0)),
        (
            vec![
                rule("a", "cpu_total_utilization", 70.0),
                rule("b", "cpu_total_usage", 6000.0),
                rule("c", "cpu_usage_avg_5m", 65.0),
                rule("d", "memory_total_usage", (80 * GIB) as f64),
                rule("e", "mem_usage_max_avg_1h", 75.0),
            ],
            (60.0, 75.0),
        ),
        (
            vec![
                preview(rule("a", "cpu_total_utilization", 10.0)),
                by_device(rule("b", "cpu_total_utilization", 20.0)),
                // It is noon.
                at_night(rule("c", "memory_total_utilization", 30.0)),
                rule("d", "cpu_total_usage", 20_000.0),
                rule("e", "cpu_total_utilization", 95.0),
                rule("f", "disk_utilization", 20.0),
            ],
            (95.0, 90.0),
        ),
    ];
    for (rules, lines) in cases {
        let mut node = Node::with_rules(rules);
        node.memory = 45 * GIB;
        node.advance(30);
        let load = node.load();
        near(load.cpu.line, lines.0);
        near(load.memory.line, lines.1);
        assert_eq!(
            load.cpu.rule.is_none(),
            lines.0.total_cmp(&DEFAULT_LINE).is_eq()
        );
        near(load.percent, 45.0 / lines.1 * 100.0);
        assert_eq!(load.worst, LoadTerm::Resource(Resource::Memory));
        assert_eq!(load.worst.name(), "memory");
    }
}

#[test]
fn without_a_clock_a_rule_with_hours_is_in_force() {
    let mut node = Node::with_rules(vec![Rule {
        active_during: vec!["22:00-06:00 Etc/UTC".parse().unwrap()],
        ..rule("a", "cpu_total_utilization", 30.0)
    }]);
    node.advance(30);
    near(node.load().cpu.line, 90.0);
    node.has_time = false;
    node.advance(1);
    near(node.load().cpu.line, 30.0);
}

#[test]
fn pressure_rules_count_by_value_and_threshold() {
    let rules = vec![
        rule("a", "cpu_pressure_some_avg60", 20.0),
        rule("b", "memory_pressure_full_avg10", 5.0),
        rule("c", "io_pressure_some_avg10", 1.0),
        Rule {
            strategy: Strategy::Preview,
            ..rule("d", "cpu_pressure_some_avg10", 1.0)
        },
    ];
    let mut node = Node::with_rules(rules);
    node.change = |sample| {
        let pressure = |some: f64| Pressure {
            some: [some; 3],
            full: Some([some / 2.0; 3]),
            totals: [None; 2],
        };
        // The pressure of I/O is not known.
        sample.node.pressure = [Some(pressure(12.0)), Some(pressure(8.0)), None];
    };
    node.advance(30);
    let load = node.load();
    near(load.percent, 80.0);
    assert_eq!(load.worst, LoadTerm::Pressure);
    let pressure = load.pressure.unwrap();
    assert_eq!(pressure.rule, RuleId::from("b"));
    assert_eq!(
        Metric::parse("memory_pressure_full_avg10")
            .unwrap()
            .resource(),
        None
    );
}

#[test]
fn a_rule_above_its_threshold_counts_at_once() {
    let preview = Rule {
        strategy: Strategy::Preview,
        ..rule("c", "cpu_total_utilization", 10.0)
    };
    let mut node = Node::with_rules(vec![
        rule("a", "cpu_total_utilization", 80.0),
        rule("b", "cpu_load_1_min", 20.0),
        preview,
    ]);
    node.change = |sample| {
        let load = if sample.at.as_nanos() > 100_450 * 1_000_000_000 {
            30.0
        } else {
            15.0
        };
        sample.node.load = Some([load; 3]);
    };
    node.system = 4000;
    node.advance(400);
    near(node.load().percent, 50.0);
    assert_eq!(
        node.load().pressure,
        None,
        "a load average below its threshold is no pressure"
    );
    // A peak of less than a minute is hardly in a mean of five.
    node.system = 9000;
    node.advance(20);
    let load = node.load();
    near(load.cpu.breached.unwrap(), 90.0 / 80.0 * 100.0);
    near(load.percent, 112.5);
    assert_eq!(load.worst, LoadTerm::Resource(Resource::Cpu));
    assert!(load.cpu.expected < 50.0, "{load:?}");
    node.system = 4000;
    node.advance(60);
    let load = node.load();
    assert_eq!(load.cpu.breached, None);
    assert_eq!(load.worst, LoadTerm::Pressure);
    near(load.pressure.unwrap().percent, 150.0);
}
