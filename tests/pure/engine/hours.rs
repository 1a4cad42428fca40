//! Rules that are only active in some hours of the day.

use crate::engine_support::{
    Load, Node, PERIOD, disabling_scheduling, eviction_action, restart, rule, scenario, throttling,
};
use plimsoll::engine::RuleReport;
use plimsoll::engine::plan::{PlanChange, RuleState, Scheduling, Unknown};
use plimsoll::engine::policy::{Action, Rule, Strategy};
use plimsoll::engine::units::Quota;

const NIGHT: &str = "22:00-06:00 Europe/Berlin";

fn at_night(rule: Rule) -> Rule {
    Rule {
        active_during: vec![NIGHT.parse().unwrap()],
        ..rule
    }
}

/// Throttles by 30 % per step and disables scheduling, at night.
fn night_rule() -> Rule {
    let action = Action {
        scheduling: disabling_scheduling("x").scheduling,
        ..throttling(10, 30)
    };
    at_night(rule("n/cpu", "cpu_total_usage", 4000.0, action))
}

/// A node whose clock shows `time` at the next evaluation.
fn node(rules: Vec<Rule>, time: &str) -> Node {
    let mut node = Node::new(rules, vec![Load::new("a", 3000)]);
    set_clock(&mut node, time);
    node
}

fn set_clock(node: &mut Node, time: &str) {
    let time: jiff::Timestamp = time.parse().unwrap();
    node.time = Some(time - PERIOD);
}

/// Overloaded until 05:59:50, throttled to 40 %.
fn overloaded_at_the_end_of_the_night() -> Node {
    let mut node = node(vec![night_rule()], "2026-01-15T05:59:30+01:00");
    for _ in 0..3 {
        node.at(6000);
    }
    assert_eq!(ratio(&node), Some(40));
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    assert!(matches!(node.plan.scheduling, Scheduling::Disabled { .. }));
    node
}

fn ratio(node: &Node) -> Option<u8> {
    node.ratios().first().map(|(_, ratio)| *ratio)
}

fn changes(node: &Node) -> Vec<&PlanChange> {
    node.plan.transitions.iter().map(|it| &it.change).collect()
}

fn report(node: &Node) -> RuleReport {
    node.engine.reports().next().unwrap()
}

#[test]
fn at_the_end_of_its_hours_a_rule_restores_step_by_step_despite_the_load() {
    let mut node = overloaded_at_the_end_of_the_night();
    node.at(6000);
    let changes = changes(&node);
    assert!(
        matches!(
            changes[..],
            [
                PlanChange::OutsideHours,
                PlanChange::State {
                    from: RuleState::Breached,
                    to: RuleState::Normal,
                    ..
                },
                PlanChange::Throttle {
                    from: 40,
                    to: 70,
                    ..
                },
                PlanChange::SchedulingEnabled,
            ]
        ),
        "{changes:?}"
    );
    assert_eq!(node.plan.scheduling, Scheduling::Enabled);
    let report = report(&node);
    assert!(report.outside_hours && report.unknown.is_none());
    assert_eq!((report.value, report.breaches), (Some(6000.0), 0));
    node.at(6000);
    assert_eq!(node.plan.throttles, [], "the original");
    for _ in 0..100 {
        node.at(8000);
        assert_eq!((node.plan.transitions.len(), ratio(&node)), (0, None));
    }
}

#[test]
fn at_the_start_of_its_hours_a_rule_begins_as_if_it_were_new() {
    let mut node = overloaded_at_the_end_of_the_night();
    for _ in 0..3 {
        node.at(6000);
    }
    // Its release was no sign that the load was over, so this is no relapse.
    set_clock(&mut node, "2026-01-15T22:00:00+01:00");
    node.at(6000);
    assert_eq!(changes(&node)[0], &PlanChange::WithinHours);
    assert_eq!(ratio(&node), Some(70), "one step");
    assert!(!report(&node).outside_hours);
    assert_eq!(report(&node).cool_down, night_rule().action.cool_down);
}

#[test]
fn a_rule_that_enters_its_hours_while_it_restores_goes_on_from_there() {
    let mut node = overloaded_at_the_end_of_the_night();
    node.at(6000);
    assert_eq!(ratio(&node), Some(70));
    set_clock(&mut node, "2026-01-15T23:00:00+01:00");
    node.at(6000);
    assert_eq!(ratio(&node), Some(40), "one step");
    assert_eq!(report(&node).cool_down, night_rule().action.cool_down);
}

#[test]
fn breaches_outside_the_hours_do_not_count() {
    let rule = Rule {
        avoidance_threshold: 3,
        ..night_rule()
    };
    let mut node = node(vec![rule], "2026-01-15T21:59:30+01:00");
    for _ in 0..3 {
        node.at(6000);
    }
    for breaches in 1..=2 {
        node.at(6000);
        assert_eq!(report(&node).breaches, breaches);
        assert_eq!(report(&node).state, RuleState::Normal);
    }
    node.at(6000);
    assert_eq!(report(&node).state, RuleState::Breached);
}

#[test]
fn what_is_unknown_outside_the_hours_is_no_problem() {
    let mut node = node(vec![night_rule()], "2026-01-15T12:00:00+01:00");
    node.at(6000);
    assert_eq!(changes(&node), [&PlanChange::OutsideHours]);
    assert_eq!(
        node.plan.scheduling,
        Scheduling::Enabled,
        "every rule is evaluated"
    );
    for _ in 0..200 {
        node.advance(PERIOD);
        node.sample.node.cpu = None;
        node.step();
        assert_eq!(node.plan.transitions, []);
    }
    let report = report(&node);
    assert_eq!((report.value, report.unknown), (None, None));
    assert!(report.outside_hours);
}

#[test]
fn after_a_restart_outside_its_hours_a_rule_restores() {
    let mut node = overloaded_at_the_end_of_the_night();
    restart(&mut node, scenario::policy_set(vec![night_rule()]));
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    node.at(6000);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    assert_eq!(node.plan.scheduling, Scheduling::Enabled);
    assert_eq!(ratio(&node), Some(70));
    node.at(6000);
    assert_eq!(ratio(&node), None);
}

#[test]
fn a_rule_follows_a_clock_that_is_set() {
    let mut node = node(vec![night_rule()], "1970-01-01T12:00:00Z");
    node.at(6000);
    node.at(6000);
    assert!(report(&node).outside_hours);
    set_clock(&mut node, "2026-01-15T23:00:00+01:00");
    node.at(6000);
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    set_clock(&mut node, "2026-01-15T21:59:00+01:00");
    node.at(6000);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
}

#[test]
fn without_the_time_a_rule_with_hours_does_nothing() {
    let mut node = Node::new(vec![night_rule()], vec![Load::new("a", 3000)]);
    for _ in 0..5 {
        node.at(6000);
        assert_eq!(node.ratios(), []);
    }
    assert_eq!(report(&node).unknown, Some(Unknown::Missing));
}

#[test]
fn nothing_is_evicted_outside_the_hours() {
    let evicts = at_night(rule("n/cpu", "cpu_total_usage", 4000.0, eviction_action(1)));
    let mut day = node(vec![evicts.clone()], "2026-01-15T12:00:00+01:00");
    let mut night = node(vec![evicts], "2026-01-15T23:00:00+01:00");
    let mut evicted = Vec::new();
    for _ in 0..3 {
        assert_eq!(day.at(6000).evictions, []);
        night.at(6000);
        evicted.extend(night.evicted());
    }
    assert_eq!(evicted, ["a"]);
}

#[test]
fn a_preview_reports_its_hours_and_what_it_would_restore() {
    let preview = Rule {
        strategy: Strategy::Preview,
        ..night_rule()
    };
    let mut node = node(vec![preview], "2026-01-15T05:59:30+01:00");
    for _ in 0..3 {
        node.at(6000);
    }
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    node.at(6000);
    assert!(node.plan.transitions.iter().all(|it| it.would));
    assert_eq!(changes(&node)[0], &PlanChange::OutsideHours);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
}

#[test]
fn what_one_rule_restores_another_still_holds() {
    let always = rule("n/always", "cpu_total_usage", 4000.0, throttling(40, 30));
    let mut node = node(vec![night_rule(), always], "2026-01-15T05:59:20+01:00");
    for _ in 0..4 {
        node.at(6000);
    }
    assert_eq!(ratio(&node), Some(10));
    for _ in 0..5 {
        node.at(6000);
    }
    assert_eq!(ratio(&node), Some(40), "that of the other rule");
    assert_eq!(node.pods[0].quota, Quota::Unlimited);
    assert_eq!(node.plan.scheduling, Scheduling::Enabled);
}
