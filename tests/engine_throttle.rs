//! The throttle as those who act see it.

mod engine_support;

use engine_support::{Load, Node, rule, throttling};
use plimsoll::engine::plan::RuleState;

#[test]
fn an_overloaded_node_is_throttled_step_by_step_and_put_back() {
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, throttling(40, 20))];
    let mut node = Node::new(rules, vec![Load::new("a", 3000), Load::new("b", 500)]);
    node.at(6000);
    assert_eq!(
        node.state("n/cpu"),
        RuleState::Normal,
        "the first look has no rate"
    );
    node.at(6000);
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    assert_eq!(node.ratios(), [("a".into(), 80), ("b".into(), 80)]);
    assert_eq!(node.quotas("a"), [Some(2400)]);
    node.at(6000);
    node.at(6000);
    node.at(6000);
    assert_eq!(node.ratios(), [("a".into(), 40), ("b".into(), 40)]);
    node.at(3000);
    assert_eq!(node.state("n/cpu"), RuleState::Cooling);
    node.at(3000);
    node.at(3000);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    assert_eq!(node.ratios(), [("a".into(), 60), ("b".into(), 60)]);
    node.at(3000);
    node.at(3000);
    assert!(node.plan.throttles.is_empty());
}
