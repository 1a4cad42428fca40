//! Preview: told as it would be done, and nothing done.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::Arc;

use engine_support::scenario::{Beat, Fault, beat, loads, play, rules, set};
use engine_support::{GIB, Load, Node, PERIOD, evicting, idling, policy, rule, throttling};
use plimsoll::engine::plan::{Change, Plan, Transition};
use plimsoll::engine::policy::{Rule, RuleId, Strategy as Acting};
use proptest::collection::vec;
use proptest::prelude::*;

fn preview(rule: Rule) -> Rule {
    Rule {
        strategy: Acting::Preview,
        ..rule
    }
}

fn as_if_done(transitions: &[Transition]) -> Vec<Transition> {
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
            Change::Throttle {
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
            Change::Evict { pod, .. } => Some(pod.to_string()),
            _ => None,
        })
        .collect()
}

fn does_something(transition: &Transition) -> bool {
    matches!(
        transition.change,
        Change::Throttle { .. } | Change::Evict { .. } | Change::Reclaim { .. }
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Up to and with the first round in which the rule acts, on a node with no other rule.
    #[test]
    fn the_first_round_is_exactly_what_acting_does(
        rules in rules(), loads in loads(), beats in vec(beat(), 1..20)
    ) {
        for rule in rules {
            let real = Rule { strategy: Acting::Enforce, ..rule.clone() };
            let mut node = Node::with(Arc::new(set(vec![real])), loads.clone());
            let mut shadow = Node::with(Arc::new(set(vec![preview(rule)])), loads.clone());
            for beat in &beats {
                play(&mut node, beat);
                play(&mut shadow, beat);
                prop_assert_eq!(&as_if_done(&shadow.plan.transitions), &node.plan.transitions);
                prop_assert!(shadow.plan.transitions.iter().all(|t| t.would));
                if node.plan.transitions.iter().any(does_something) {
                    break;
                }
            }
        }
    }

    /// Another rule's Preview changes nothing of what is done.
    #[test]
    fn a_preview_beside_them_changes_nothing_that_rules_do(
        rules in rules(), added in rules(), loads in loads(), beats in vec(beat(), 1..20)
    ) {
        let added = added.into_iter().map(|rule| {
            let id = RuleId::from(format!("p/{}", rule.id).as_str());
            preview(Rule { id, ..rule })
        });
        let real: Vec<_> =
            rules.into_iter().filter(|rule| rule.strategy == Acting::Enforce).collect();
        let both: Vec<_> = real.iter().cloned().chain(added).collect();
        let mut node = Node::with(Arc::new(set(real)), loads.clone());
        let mut other = Node::with(Arc::new(set(both)), loads);
        for beat in &beats {
            play(&mut node, beat);
            play(&mut other, beat);
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
fn what_it_would_have_saved_is_carried_from_round_to_round() {
    let rules = vec![preview(rule(
        "n/cpu",
        "cpu_total_usage",
        4000.0,
        throttling(10, 20),
    ))];
    let mut node = Node::new(rules, vec![Load::new("a", 1000), Load::new("b", 900)]);
    node.at(4400);
    node.at(4400);
    // The gap is 440: both would give a fifth, 380.
    assert_eq!(steps(&node.plan), owned(&[("a", 80, 200), ("b", 80, 180)]));
    node.at(4400);
    // 380 of the 400 above the mark are saved: the gap is 22, and one step of the larger pod covers it.
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
fn pods_that_it_would_have_evicted_stay_virtually_gone() {
    let rules = vec![preview(rule(
        "n/memory",
        "memory_total_usage",
        8.0 * GIB as f64,
        evicting(1),
    ))];
    let pods = ["a", "b", "c"].map(|uid| Load {
        held: GIB,
        ..Load::new(uid, 100)
    });
    let mut node = Node::new(rules, pods.into());
    let mut seen = Vec::new();
    for _ in 0..4 {
        node.holding(9 * GIB + GIB / 2);
        seen.push(would_evict(&node.plan).join(" "));
        assert!(node.plan.evictions.is_empty());
    }
    assert_eq!(
        seen,
        ["a", "b", "", ""],
        "two of them cover one and a half GiB"
    );
    for _ in 0..3 {
        node.holding(GIB);
    }
    node.holding(9 * GIB + GIB / 2);
    assert_eq!(
        would_evict(&node.plan),
        ["a"],
        "the next episode begins with all of them"
    );
}

#[test]
fn it_is_judged_beside_the_rules_in_force() {
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
    // The rule in force takes a down by 600, which covers both gaps.
    assert_eq!(node.ratios(), [("a".to_owned(), 80)]);
    assert_eq!(steps(&node.plan), []);
    node.at(4800);
    // a gives 1200 of the 880 by now.
    assert_eq!(node.ratios(), [("a".to_owned(), 60)]);
    assert_eq!(steps(&node.plan), []);
    node.at(7500);
    // The gap is 3850: a's 1800 and b's 200 of the rule in force leave room for more.
    assert_eq!(node.ratios(), [("a".to_owned(), 40), ("b".to_owned(), 80)]);
    assert_eq!(steps(&node.plan), owned(&[("a", 50, 0), ("b", 50, 300)]));
}

#[test]
fn it_waits_for_the_rounds_in_force_and_shares_their_cap() {
    let mark = 8.0 * GIB as f64;
    let rules = vec![
        rule("n/memory", "memory_total_usage", mark, evicting(1)),
        preview(rule("n/one", "memory_total_usage", mark, evicting(1))),
        preview(rule("n/two", "memory_total_usage", mark, evicting(2))),
    ];
    let pods = ["a", "b", "c"].map(|uid| Load {
        held: GIB,
        ..Load::new(uid, 100)
    });
    let mut node = Node::new(rules, pods.into());
    node.holding(12 * GIB);
    assert_eq!(node.evicted(), ["a"]);
    assert_eq!(
        would_evict(&node.plan),
        ["b"],
        "one more for the rule that takes two"
    );
    node.holding(12 * GIB);
    assert_eq!(
        would_evict(&node.plan),
        Vec::<String>::new(),
        "the round has not settled"
    );
}

#[test]
fn a_rule_that_turns_from_preview_to_acting_begins_anew() {
    let rule = rule("n/cpu", "cpu_total_usage", 4000.0, idling(10, 20));
    let twice = Rule {
        avoidance_threshold: 2,
        ..rule
    };
    let mut node = Node::new(vec![preview(twice.clone())], vec![Load::new("a", 3000)]);
    let hot = Beat {
        cpu: 6000,
        memory: 0,
        load: 0.0,
        fault: Fault::None,
    };
    for _ in 0..4 {
        play(&mut node, &hot);
    }
    assert_eq!(node.ratios(), []);
    node.engine.set_policy(policy(vec![twice]));
    play(&mut node, &hot);
    assert_eq!(node.ratios(), [], "one breach of two");
    node.pass(PERIOD);
    node.step();
    assert_eq!(node.ratios(), [("a".to_owned(), 100)]);
}
