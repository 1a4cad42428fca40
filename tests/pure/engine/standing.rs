//! What a `PodQOS` does to its pods at all times.

use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::{Load, Node, PERIOD, allow_all, policy, restart, rule, throttling};
use plimsoll::engine::plan::{CpuClass, Feedback, PlanChange, PodThrottle, Scheduling};
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::policy::{CpuThrottle, PodPolicy, PolicySet, Rule, Standing};
use plimsoll::engine::units::MilliCpu;

fn standing(preview: bool) -> PodPolicy {
    PodPolicy {
        name: "batch".to_owned(),
        allowed: Vec::new(),
        standing: Standing {
            idle: true,
            preview,
            ..Standing::default()
        },
        ..allow_all()
    }
}

fn policies(rules: Vec<Rule>, pods: Vec<PodPolicy>) -> Arc<PolicySet> {
    Arc::new(PolicySet { rules, pods })
}

fn alone() -> Arc<PolicySet> {
    policies(Vec::new(), vec![standing(false)])
}

/// Pod, rule, ratio and idle class of every throttle.
fn held(node: &Node) -> Vec<(String, String, u8, bool)> {
    let of = |it: &PodThrottle| {
        (
            it.uid.to_string(),
            it.rule.to_string(),
            it.ratio,
            it.is_lowest(),
        )
    };
    node.plan.throttles.iter().map(of).collect()
}

fn in_class(pods: &[&str]) -> Vec<(String, String, u8, bool)> {
    let of = |uid: &&str| ((*uid).to_owned(), "PodQOS/batch".to_owned(), 100, true);
    pods.iter().map(of).collect()
}

/// One evaluation, if one is due.
fn evaluate(node: &mut Node) {
    let due = node.engine.next_due();
    assert!(due.is_some_and(|due| due <= node.now), "{due:?}");
    node.step();
}

#[test]
fn a_new_pod_is_in_its_class_at_once_without_any_rule() {
    let mut node = Node::with(alone(), vec![Load::new("a", 0)]);
    node.tick();
    assert_eq!(held(&node), in_class(&["a"]));
    assert!(node.quotas("a").is_empty(), "it has no quota");
    assert_eq!(node.engine.next_due(), None, "nothing is left to do");
    node.pods.push(Load::new("b", 0));
    node.set_pods();
    evaluate(&mut node);
    assert_eq!(held(&node), in_class(&["a", "b"]));
    let change = PlanChange::Throttle {
        pod: PodUid::from("b"),
        from: 100,
        to: 100,
        idle: true,
        quota: plimsoll::engine::units::Quota::Unlimited,
        release: plimsoll::engine::units::MilliCpu::ZERO,
    };
    assert_eq!(node.plan.transitions.len(), 1);
    assert_eq!(node.plan.transitions[0].change, change);
    node.tick();
    assert_eq!(node.plan.transitions, [], "once");
}

/// The class of every throttle.
fn classes(node: &Node) -> Vec<CpuClass> {
    node.plan.throttles.iter().map(|it| it.class).collect()
}

#[test]
fn without_rules_it_changes_over_with_the_kubelet_at_once_and_back_after_ten_minutes() {
    let mut node = Node::with(alone(), vec![Load::new("a", 0), Load::new("other", 0)]);
    node.pods[1].pod.protected = true;
    node.set_pods();
    node.tick();
    assert_eq!(classes(&node), [CpuClass::Idle]);
    assert_eq!(node.engine.next_due(), None);
    node.pods[1].pod.resources_reported = true;
    node.set_pods();
    evaluate(&mut node);
    assert_eq!(classes(&node), [CpuClass::LowestWeight]);
    node.pods[1].pod.resources_reported = false;
    node.set_pods();
    let ten_minutes = Duration::from_mins(10);
    assert_eq!(node.engine.next_due(), Some(node.now + ten_minutes));
    node.now = node.now + ten_minutes;
    evaluate(&mut node);
    assert_eq!(classes(&node), [CpuClass::Idle]);
    assert_eq!(node.engine.next_due(), None);
}

#[test]
fn it_ends_with_the_policy_the_protection_and_the_pod() {
    let mut node = Node::with(alone(), vec![Load::new("a", 0), Load::new("b", 0)]);
    node.tick();
    node.pods[0].pod.protected = true;
    node.set_pods();
    evaluate(&mut node);
    assert_eq!(held(&node), in_class(&["b"]), "a protected pod never");
    node.pods[1].pod.terminating = true;
    node.set_pods();
    evaluate(&mut node);
    assert_eq!(held(&node), [], "it needs its CPU to end");
    node.pods[1].pod.terminating = false;
    node.set_pods();
    evaluate(&mut node);
    assert_eq!(held(&node), in_class(&["b"]));
    node.engine.set_policy(policies(Vec::new(), Vec::new()));
    evaluate(&mut node);
    assert_eq!(held(&node), []);
    assert_eq!(node.engine.next_due(), None);
}

#[test]
fn a_preview_reports_and_does_nothing() {
    let preview = policies(Vec::new(), vec![standing(true)]);
    let mut node = Node::with(preview, vec![Load::new("a", 0)]);
    node.tick();
    assert_eq!(held(&node), []);
    let would: Vec<bool> = node.plan.transitions.iter().map(|it| it.would).collect();
    assert_eq!(would, [true]);
    assert_eq!(node.engine.next_due(), None);
    node.engine.set_policy(alone());
    evaluate(&mut node);
    assert_eq!(held(&node), in_class(&["a"]));
}

/// A node on which a rule throttles a standing pod.
fn with_rule(idle: bool) -> Node {
    let mut action = throttling(50, 30);
    action.throttle = action.throttle.map(|spec| CpuThrottle { idle, ..spec });
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, action)];
    let pods = vec![standing(false), allow_all()];
    Node::with(policies(rules, pods), vec![Load::new("a", 3000)])
}

#[test]
fn a_rule_goes_on_from_the_class_and_gives_back_only_its_quota() {
    for idle in [false, true] {
        let mut node = with_rule(idle);
        node.at(3000);
        node.at(3000);
        assert_eq!(held(&node), in_class(&["a"]));
        node.at(6000);
        let expected = ("a".to_owned(), "n/cpu".to_owned(), 70, true);
        assert_eq!(held(&node), [expected], "its first step is a quota");
        assert_eq!(node.quotas("a"), [Some(2100)], "of the use at that time");
        for _ in 0..60 {
            node.at(1000);
        }
        assert_eq!(held(&node), in_class(&["a"]), "the rule has ended");
    }
}

#[test]
fn a_throttle_of_a_rule_stays_when_the_policy_goes() {
    let mut node = with_rule(false);
    node.at(3000);
    node.at(6000);
    let rules = with_rule(false).engine.reports().count();
    assert_eq!(rules, 1);
    let mut action = throttling(50, 30);
    action.throttle = action.throttle.map(|spec| CpuThrottle {
        idle: false,
        ..spec
    });
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, action)];
    node.engine.set_policy(policy(rules));
    evaluate(&mut node);
    assert_eq!(
        held(&node),
        [("a".to_owned(), "n/cpu".to_owned(), 70, false)]
    );
}

#[test]
fn a_standing_pod_is_not_protected() {
    let mut node = with_rule(false);
    node.pods.push(Load::new("b", 100));
    node.pods[1].pod.protected = true;
    node.set_pods();
    node.at(3000);
    let protected: Vec<_> = node.engine.protected_pods().cloned().collect();
    assert_eq!(protected, [PodUid::from("b")]);
    let mut node = Node::with(alone(), vec![Load::new("a", 0)]);
    node.tick();
    assert_eq!(node.engine.protected_pods().count(), 0);
}

#[test]
fn after_a_failure_it_is_tried_again() {
    let mut node = Node::with(alone(), vec![Load::new("a", 0)]);
    node.tick();
    let uid = PodUid::from("a");
    node.engine.feedback(&Feedback::ThrottleFailed { uid });
    assert!(node.engine.next_due().is_some_and(|due| due > node.now));
    node.advance(PERIOD * 4);
    evaluate(&mut node);
    assert_eq!(held(&node), in_class(&["a"]));
}

#[test]
fn a_contested_pod_is_evaluated_again_when_the_pause_is_over() {
    let mut node = Node::with(alone(), vec![Load::new("a", 0)]);
    node.tick();
    let (uid, until) = (PodUid::from("a"), node.now + PERIOD * 30);
    node.engine.feedback(&Feedback::Contested { uid, until });
    assert_eq!(node.engine.next_due(), Some(until));
    node.advance(PERIOD * 30);
    evaluate(&mut node);
    assert_eq!(node.engine.next_due(), None);
    assert_eq!(held(&node), in_class(&["a"]));
}

#[test]
fn a_restart_changes_nothing_or_restores_what_is_no_longer_wanted() {
    let mut node = Node::with(alone(), vec![Load::new("a", 0)]);
    node.tick();
    restart(&mut node, PolicySet::clone(&alone()));
    node.tick();
    assert_eq!(held(&node), in_class(&["a"]));
    assert_eq!(node.plan.transitions, [], "resuming is not reported");
    restart(&mut node, PolicySet::default());
    evaluate(&mut node);
    assert_eq!(held(&node), []);
}

fn burst(name: &str, millicores: u64, preview: bool) -> PodPolicy {
    PodPolicy {
        name: name.to_owned(),
        standing: Standing {
            idle: false,
            burst: MilliCpu(millicores),
            preview,
        },
        ..standing(false)
    }
}

/// Pod, rule and burst of every throttle.
fn bursts(node: &Node) -> Vec<(String, String, u64)> {
    let of = |it: &PodThrottle| (it.uid.to_string(), it.rule.to_string(), it.burst.0);
    node.plan.throttles.iter().map(of).collect()
}

fn given(uid: &str, name: &str, millicores: u64) -> (String, String, u64) {
    (uid.to_owned(), format!("PodQOS/{name}"), millicores)
}

fn only_burst() -> Arc<PolicySet> {
    policies(Vec::new(), vec![burst("b", 500, false)])
}

#[test]
fn the_larger_burst_is_given_and_its_pod_stays_protected() {
    let both = vec![burst("a", 200, false), burst("b", 500, false)];
    let mut node = Node::with(policies(Vec::new(), both), vec![Load::new("a", 0)]);
    node.pods[0].pod.protected = true;
    node.set_pods();
    node.tick();
    assert_eq!(bursts(&node), [given("a", "b", 500)]);
    assert!(!node.plan.throttles[0].is_lowest() && node.quotas("a").is_empty());
    assert_eq!(node.engine.protected_pods().count(), 1);
    let change = PlanChange::Burst {
        pod: PodUid::from("a"),
        burst: MilliCpu(500),
    };
    assert_eq!(node.plan.transitions[0].change, change);
    assert_eq!(node.engine.next_due(), None);
    node.engine
        .set_policy(policies(Vec::new(), vec![burst("a", 200, false)]));
    evaluate(&mut node);
    assert_eq!(bursts(&node), [given("a", "a", 200)]);
    node.engine.set_policy(Arc::default());
    evaluate(&mut node);
    assert_eq!(bursts(&node), []);
    assert_eq!(node.engine.next_due(), None);
}

#[test]
fn a_burst_comes_beside_the_idle_class_and_yields_to_a_quota() {
    let mut node = with_rule(false);
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, throttling(50, 30))];
    let pods = vec![standing(false), burst("b", 500, false), allow_all()];
    node.engine.set_policy(policies(rules, pods));
    node.at(3000);
    assert_eq!(bursts(&node), [given("a", "batch", 500)]);
    assert!(node.plan.throttles[0].is_lowest());
    node.at(6000);
    assert_eq!(
        bursts(&node)[0].2,
        0,
        "the kernel refuses a quota below the burst"
    );
    assert_eq!(node.quotas("a"), [Some(2100)]);
    for _ in 0..60 {
        node.at(1000);
    }
    assert_eq!(bursts(&node), [given("a", "batch", 500)]);
}

#[test]
fn a_burst_yields_to_a_resize_at_once() {
    let mut node = Node::with(only_burst(), vec![Load::new("a", 0), Load::new("b", 0)]);
    node.tick();
    for (resizing, pods) in [(true, 1), (false, 2)] {
        node.pods[0].pod.resizing = resizing;
        node.set_pods();
        evaluate(&mut node);
        assert_eq!(bursts(&node).len(), pods);
        assert_eq!(node.plan.transitions, [], "it is still given");
        assert_eq!(node.engine.next_due(), None);
    }
}

#[test]
fn a_burst_in_preview_is_reported_if_it_would_be_more() {
    let preview = burst("a", 400, true);
    let mut node = Node::with(
        policies(Vec::new(), vec![preview.clone()]),
        vec![Load::new("a", 0)],
    );
    node.tick();
    assert_eq!(bursts(&node), []);
    let would: Vec<bool> = node.plan.transitions.iter().map(|it| it.would).collect();
    assert_eq!(would, [true]);
    let both = vec![preview, burst("b", 500, false)];
    node.engine.set_policy(policies(Vec::new(), both));
    evaluate(&mut node);
    assert_eq!(bursts(&node), [given("a", "b", 500)]);
    let would: Vec<bool> = node.plan.transitions.iter().map(|it| it.would).collect();
    assert_eq!(would, [false, true], "the preview ends");
}

#[test]
fn a_burst_that_fails_is_tried_again_and_a_restart_reports_nothing() {
    let mut node = Node::with(only_burst(), vec![Load::new("a", 0)]);
    node.tick();
    let uid = PodUid::from("a");
    node.engine.feedback(&Feedback::ThrottleFailed { uid });
    assert!(node.engine.next_due().is_some_and(|due| due > node.now));
    node.advance(PERIOD * 4);
    evaluate(&mut node);
    assert_eq!(bursts(&node), [given("a", "b", 500)]);
    restart(&mut node, PolicySet::clone(&only_burst()));
    node.tick();
    assert_eq!(bursts(&node), [given("a", "b", 500)]);
    assert_eq!(node.plan.transitions, []);
    assert_eq!(node.engine.protected_pods().count(), 1);
    restart(&mut node, PolicySet::default());
    evaluate(&mut node);
    assert_eq!(bursts(&node), []);
}

#[test]
fn a_node_without_rules_is_decided_after_its_first_evaluation() {
    // The agent is Ready once it knows whether scheduling is disabled.
    let mut node = Node::with(alone(), vec![Load::new("a", 0)]);
    assert_eq!(node.plan.scheduling, Scheduling::Unchanged);
    node.tick();
    assert_eq!(node.plan.scheduling, Scheduling::Enabled);
}
