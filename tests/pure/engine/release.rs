//! Throttles of removed rules are restored step by step within the given time.

use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::{Load, Node, SECOND, idle_action, restart, rule, throttling};
use plimsoll::engine::plan::{PlanChange, Scheduling};
use plimsoll::engine::policy::{Action, PolicySet, TaintEffect};
use proptest::prelude::*;

const WITHIN: Duration = Duration::from_secs(10);

fn hot(action: Action, periods: u32) -> Node {
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, action)];
    let mut node = Node::new(rules, vec![Load::new("a", 3000), Load::new("b", 2000)]);
    for _ in 0..periods {
        node.at(7900);
    }
    node
}

/// Removes all rules and restores what is in force.
fn stop(node: &mut Node) {
    node.engine.set_policy(Arc::new(PolicySet::default()));
    node.engine.release_within(WITHIN);
}

fn second(node: &mut Node) {
    node.advance(SECOND);
    node.step();
}

proptest! {
    #[test]
    fn everything_is_restored_in_time_and_nothing_is_throttled_further(
        (min_ratio, step, idle, periods) in (0_u8..=90, 1_u8..=100, any::<bool>(), 2_u32..14),
        again in 1_u32..9,
    ) {
        let action = if idle { idle_action(min_ratio, step) } else { throttling(min_ratio, step) };
        let mut node = hot(action, periods);
        prop_assert!(!node.plan.throttles.is_empty());
        let mut before = node.ratios();
        stop(&mut node);
        for passed in 0..10 {
            if passed == again {
                // A restart in between does not restart the time.
                restart(&mut node, PolicySet::default());
                node.engine.release_within(WITHIN);
            }
            second(&mut node);
            let ratios = node.ratios();
            for (pod, ratio) in &ratios {
                let previous = before.iter().find(|(known, _)| known == pod);
                let (_, previous) = previous.expect("no other pod is throttled");
                prop_assert!(ratio >= previous, "{pod} went from {previous} to {ratio}");
            }
            before = ratios;
        }
        prop_assert_eq!(node.ratios(), []);
        prop_assert_eq!(&node.plan.scheduling, &Scheduling::Enabled);
        prop_assert_eq!(node.engine.next_due(), None, "nothing is left to do");
    }
}

#[test]
fn a_slow_action_is_restored_in_equal_steps() {
    let mut node = hot(throttling(10, 10), 12);
    assert_eq!(node.ratios()[0], ("a".to_owned(), 10));
    stop(&mut node);
    let mut seen = Vec::new();
    while !node.plan.throttles.is_empty() {
        second(&mut node);
        seen.extend(node.ratios().first().map(|(_, ratio)| *ratio));
        seen.dedup();
    }
    assert_eq!(seen, [20, 30, 40, 50, 60, 70, 80, 90]);
}

#[test]
fn rules_that_are_added_again_start_over() {
    let action = Action {
        scheduling: Some(TaintEffect::NoSchedule),
        ..throttling(10, 30)
    };
    let mut edited = rule("n/cpu", "cpu_total_usage", 4000.0, action);
    edited.avoidance_threshold = 3;
    let policy = crate::engine_support::policy(vec![edited]);
    let mut node = Node::with(Arc::clone(&policy), vec![Load::new("a", 3000)]);
    for _ in 0..5 {
        node.at(7900);
    }
    assert!(matches!(node.plan.scheduling, Scheduling::Disabled { .. }));
    stop(&mut node);
    for _ in 0..20 {
        second(&mut node);
        let acted = |change: &PlanChange| matches!(change, PlanChange::Throttle { from, to, .. } if to < from);
        assert!(!node.plan.transitions.iter().any(|it| acted(&it.change)));
    }
    assert_eq!(node.plan.scheduling, Scheduling::Enabled);
    node.engine.set_policy(policy);
    // The first sample has no baseline, and three breaches are needed.
    for _ in 0..3 {
        node.at(7900);
        assert_eq!(node.ratios(), []);
        assert!(!matches!(node.plan.scheduling, Scheduling::Disabled { .. }));
    }
    node.at(7900);
    assert_eq!(node.ratios(), [("a".to_owned(), 70)]);
    assert!(matches!(node.plan.scheduling, Scheduling::Disabled { .. }));
}

#[test]
fn rules_added_and_removed_again_are_restored_at_their_own_pace() {
    let slow = rule("n/cpu", "cpu_total_usage", 4000.0, throttling(10, 5));
    let policy = crate::engine_support::policy(vec![slow]);
    let mut node = Node::with(Arc::clone(&policy), vec![Load::new("a", 3000)]);
    for _ in 0..22 {
        node.at(7900);
    }
    assert_eq!(node.ratios(), [("a".to_owned(), 10)]);
    stop(&mut node);
    for _ in 0..3 {
        second(&mut node);
    }
    node.engine.set_policy(policy);
    second(&mut node);
    let back = node.ratios()[0].1;
    assert!(
        (11..=50).contains(&back),
        "{back} % in the middle of the restore"
    );
    node.engine.set_policy(Arc::new(PolicySet::default()));
    let ratios = (0..25).map(|_| {
        second(&mut node);
        node.ratios()[0].1
    });
    let ratios: Vec<_> = ratios.collect();
    let expected = [vec![back; 9], vec![back + 5; 10], vec![back + 10; 6]];
    assert_eq!(ratios, expected.concat());
}
