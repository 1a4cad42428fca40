//! Preview: reports what a rule would do without doing it.

use std::sync::Arc;

use crate::engine_support::scenario::{
    Fault, PeriodInput, input, loads, policy_set, rules, run_period,
};
use crate::engine_support::{
    GIB, Load, Node, PERIOD, eviction_action, idle_action, policy, rule, throttling,
};
use plimsoll::engine::plan::{Plan, PlanChange, Transition};
use plimsoll::engine::policy::{Rule, RuleId, Strategy as RuleStrategy};
use proptest::collection::vec;
use proptest::prelude::*;

fn preview(rule: Rule) -> Rule {
    Rule {
        strategy: RuleStrategy::Preview,
        ..rule
    }
}

fn as_enforced(transitions: &[Transition]) -> Vec<Transition> {
    let done = |t: &Transition| Transition {
        would: false,
        ..t.clone()
    };
    transitions.iter().map(done).collect()
}

fn steps(plan: &Plan) -> Vec<(String, u8, u64)> {
    let transitions = plan.transitions.iter().filter(|t| t.would);
    transitions
        .filter_map(|t| match &t.change {
            PlanChange::Throttle {
                pod, to, release, ..
            } => Some((pod.to_string(), *to, release.0)),
            _ => None,
        })
        .collect()
}

fn would_evict(plan: &Plan) -> Vec<String> {
    let transitions = plan.transitions.iter().filter(|t| t.would);
    transitions
        .filter_map(|t| match &t.change {
            PlanChange::Evict { pod, .. } => Some(pod.to_string()),
            _ => None,
        })
        .collect()
}

fn is_action(transition: &Transition) -> bool {
    matches!(
        transition.change,
        PlanChange::Throttle { .. } | PlanChange::Evict { .. } | PlanChange::Reclaim { .. }
    )
}

/// Only what was done can be verified.
fn is_verification(transition: &Transition) -> bool {
    matches!(
        transition.change,
        PlanChange::Ineffective { .. } | PlanChange::Effective { .. }
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// On a node with no other rule, up to and including the first round in which the rule acts.
    #[test]
    fn the_first_round_equals_that_of_an_enforced_rule(
        rules in rules(), loads in loads(), inputs in vec(input(), 1..20)
    ) {
        for rule in rules {
            let enforced = Rule { strategy: RuleStrategy::Enforce, ..rule.clone() };
            let mut node = Node::with(Arc::new(policy_set(vec![enforced])), loads.clone());
            let mut shadow = Node::with(Arc::new(policy_set(vec![preview(rule)])), loads.clone());
            for input in &inputs {
                run_period(&mut node, input);
                run_period(&mut shadow, input);
                let done: Vec<_> = node.plan.transitions.iter().filter(|t| !is_verification(t)).cloned().collect();
                prop_assert_eq!(&as_enforced(&shadow.plan.transitions), &done);
                prop_assert!(shadow.plan.transitions.iter().all(|t| t.would));
                if node.plan.transitions.iter().any(is_action) {
                    break;
                }
            }
        }
    }

    /// Preview rules do not change what enforced rules do.
    #[test]
    fn preview_rules_do_not_affect_enforced_rules(
        rules in rules(), added in rules(), loads in loads(), inputs in vec(input(), 1..20)
    ) {
        let added = added.into_iter().map(|rule| {
            let id = RuleId::from(format!("p/{}", rule.id).as_str());
            preview(Rule { id, ..rule })
        });
        let enforced: Vec<_> =
            rules.into_iter().filter(|rule| rule.strategy == RuleStrategy::Enforce).collect();
        let both: Vec<_> = enforced.iter().cloned().chain(added).collect();
        let mut node = Node::with(Arc::new(policy_set(enforced)), loads.clone());
        let mut other = Node::with(Arc::new(policy_set(both)), loads);
        for input in &inputs {
            run_period(&mut node, input);
            run_period(&mut other, input);
            if !node.plan.evaluated {
                continue;
            }
            let done: Vec<_> = other.plan.transitions.iter().filter(|t| !t.would).collect();
            prop_assert_eq!(done, node.plan.transitions.iter().collect::<Vec<_>>());
            prop_assert_eq!(&other.plan.evictions, &node.plan.evictions);
            prop_assert_eq!(&other.plan.reclaims, &node.plan.reclaims);
            prop_assert_eq!(&other.plan.scheduling, &node.plan.scheduling);
        }
    }
}

fn owned(expected: &[(&str, u8, u64)]) -> Vec<(String, u8, u64)> {
    let owned = |(uid, to, release): &(&str, u8, u64)| ((*uid).to_owned(), *to, *release);
    expected.iter().map(owned).collect()
}

#[test]
fn virtual_savings_are_carried_from_round_to_round() {
    let rules = vec![preview(rule(
        "n/cpu",
        "cpu_total_usage",
        4000.0,
        throttling(10, 20),
    ))];
    let mut node = Node::new(rules, vec![Load::new("a", 1000), Load::new("b", 900)]);
    node.at(4400);
    node.at(4400);
    // The gap is 440: both would release a fifth, 380 in total.
    assert_eq!(steps(&node.plan), owned(&[("a", 80, 200), ("b", 80, 180)]));
    node.at(4400);
    // 380 of the 400 above the threshold are saved: the gap is 22, and one step of the larger pod covers it.
    assert_eq!(steps(&node.plan), owned(&[("a", 60, 200)]));
    node.at(4400);
    assert_eq!(steps(&node.plan), [], "580 are saved");
    node.at(3000);
    node.at(3000);
    node.at(3000);
    assert_eq!(steps(&node.plan), owned(&[("a", 80, 0), ("b", 100, 0)]));
    assert!(node.plan.throttles.is_empty());
}

#[test]
fn virtually_evicted_pods_stay_gone() {
    let rules = vec![preview(rule(
        "n/memory",
        "memory_total_usage",
        8.0 * GIB as f64,
        eviction_action(1),
    ))];
    let pods = ["a", "b", "c"].map(|uid| Load {
        unreclaimable: GIB,
        ..Load::new(uid, 100)
    });
    let mut node = Node::new(rules, pods.into());
    let mut seen = Vec::new();
    for _ in 0..4 {
        node.at_memory(9 * GIB + GIB / 2);
        seen.push(would_evict(&node.plan).join(" "));
        assert!(node.plan.evictions.is_empty());
    }
    assert_eq!(seen, ["a", "b", "", ""], "two pods cover 1.5 GiB");
    for _ in 0..3 {
        node.at_memory(GIB);
    }
    node.at_memory(9 * GIB + GIB / 2);
    assert_eq!(
        would_evict(&node.plan),
        ["a"],
        "the next episode starts with all pods"
    );
}

#[test]
fn a_preview_builds_on_the_enforced_rules() {
    let rules = vec![
        rule("n/cpu", "cpu_total_usage", 4000.0, throttling(10, 20)),
        preview(rule(
            "n/would",
            "cpu_total_usage",
            4000.0,
            throttling(10, 50),
        )),
    ];
    let mut node = Node::new(rules, vec![Load::new("a", 3000), Load::new("b", 1000)]);
    node.at(4500);
    node.at(4500);
    // The enforced rule throttles a by 600, which covers both gaps.
    assert_eq!(node.ratios(), [("a".to_owned(), 80)]);
    assert_eq!(steps(&node.plan), []);
    node.at(4500);
    // a releases another 600.
    assert_eq!(node.ratios(), [("a".to_owned(), 60)]);
    assert_eq!(steps(&node.plan), []);
    node.at(7500);
    // The gap is 3850, more than the 600 of a and 200 of b released by the enforced rule.
    assert_eq!(node.ratios(), [("a".to_owned(), 40), ("b".to_owned(), 80)]);
    assert_eq!(steps(&node.plan), owned(&[("a", 50, 0), ("b", 50, 300)]));
}

#[test]
fn a_preview_waits_for_enforced_rounds() {
    let threshold = 8.0 * GIB as f64;
    let rules = vec![
        rule(
            "n/memory",
            "memory_total_usage",
            threshold,
            eviction_action(1),
        ),
        preview(rule(
            "n/one",
            "memory_total_usage",
            threshold,
            eviction_action(1),
        )),
        preview(rule(
            "n/two",
            "memory_total_usage",
            threshold,
            eviction_action(2),
        )),
    ];
    let pods = ["a", "b", "c"].map(|uid| Load {
        unreclaimable: GIB,
        ..Load::new(uid, 100)
    });
    let mut node = Node::new(rules, pods.into());
    node.at_memory(12 * GIB);
    assert_eq!(node.evicted(), ["a"]);
    for _ in 0..2 {
        assert_eq!(
            would_evict(&node.plan),
            Vec::<String>::new(),
            "the round has not settled"
        );
        node.at_memory(12 * GIB);
    }
}

#[test]
fn a_rule_switched_from_preview_to_enforced_starts_over() {
    let rule = rule("n/cpu", "cpu_total_usage", 4000.0, idle_action(10, 20));
    let twice = Rule {
        avoidance_threshold: 2,
        ..rule
    };
    let mut node = Node::new(vec![preview(twice.clone())], vec![Load::new("a", 3000)]);
    let hot = PeriodInput {
        cpu: 6000,
        memory: 0,
        load: 0.0,
        fault: Fault::None,
    };
    for _ in 0..4 {
        run_period(&mut node, &hot);
    }
    assert_eq!(node.ratios(), []);
    node.engine.set_policy(policy(vec![twice]));
    run_period(&mut node, &hot);
    assert_eq!(node.ratios(), [], "one breach of two");
    node.advance(PERIOD);
    node.step();
    assert_eq!(node.ratios(), [("a".to_owned(), 100)]);
}
