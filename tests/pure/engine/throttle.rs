//! Throttling, as the actuators see it.

use std::sync::Arc;

use crate::engine_support::{
    Load, Node, PERIOD, SECOND, allow_all, idle_action, policy, rule, scenario, throttling,
};
use plimsoll::engine::plan::{Feedback, PlanChange, RuleState, Skipped};
use plimsoll::engine::pod::{PodUid, QosClass};
use plimsoll::engine::policy::{Action, PodPolicy, PolicySet, Rule, Strategy};
use plimsoll::engine::sample::TargetCgroupSample;
use plimsoll::engine::selector::{Requirement, Selector};
use plimsoll::engine::units::{MilliCpu, Quota};

fn cpu(threshold: f64, action: Action) -> Vec<Rule> {
    vec![rule("n/cpu", "cpu_total_usage", threshold, action)]
}

/// A node after its second sample of this load.
fn hot(rules: Vec<Rule>, pods: Vec<Load>, cpu: u64) -> Node {
    let mut node = Node::new(rules, pods);
    node.at(cpu);
    node.at(cpu);
    node
}

fn ratios(expected: &[(&str, u8)]) -> Vec<(String, u8)> {
    let owned = |(uid, ratio): &(&str, u8)| ((*uid).to_owned(), *ratio);
    expected.iter().map(owned).collect()
}

fn skipped(expected: &[(&str, Skipped)]) -> Vec<(String, Skipped)> {
    let owned = |(uid, why): &(&str, Skipped)| ((*uid).to_owned(), *why);
    expected.iter().map(owned).collect()
}

#[test]
fn an_overloaded_node_is_throttled_and_restored_step_by_step() {
    let rules = cpu(4000.0, throttling(40, 20));
    let mut node = Node::new(rules, vec![Load::new("a", 3000), Load::new("b", 500)]);
    node.at(6000);
    assert_eq!(
        node.state("n/cpu"),
        RuleState::Normal,
        "the first sample has no rate"
    );
    node.at(6000);
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    assert_eq!(node.ratios(), ratios(&[("a", 80), ("b", 80)]));
    assert_eq!(node.quotas("a"), [Some(2400)]);
    node.at(6000);
    node.at(6000);
    node.at(6000);
    assert_eq!(node.ratios(), ratios(&[("a", 40), ("b", 40)]));
    assert_eq!(
        node.skipped(),
        skipped(&[("a", Skipped::AtFloor), ("b", Skipped::AtFloor)])
    );
    node.at(3000);
    assert_eq!(node.state("n/cpu"), RuleState::Cooling);
    node.at(3000);
    assert_eq!(
        node.ratios(),
        ratios(&[("a", 40), ("b", 40)]),
        "no change while cooling"
    );
    node.at(3000);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    assert_eq!(node.ratios(), ratios(&[("a", 60), ("b", 60)]));
    node.at(3000);
    node.at(3000);
    assert!(node.plan.throttles.is_empty());
}

#[test]
fn victims_are_throttled_until_the_gap_is_covered() {
    let pods = vec![
        Load::new("a", 1000),
        Load::new("b", 2000),
        Load::new("c", 900),
    ];
    // The gap is 550: b releases 400, a 200, and c is not needed.
    let node = hot(cpu(4000.0, throttling(10, 20)), pods, 4500);
    assert_eq!(node.ratios(), ratios(&[("b", 80), ("a", 80)]));
    let releases = node.plan.transitions.iter().filter_map(|t| match t.change {
        PlanChange::Throttle { release, quota, .. } => Some((release.0, quota)),
        _ => None,
    });
    let limit = |millicores| Quota::Limit(MilliCpu(millicores));
    let expected = [(400, limit(1600)), (200, limit(800))];
    assert_eq!(releases.collect::<Vec<_>>(), expected);
}

#[test]
fn what_one_rule_releases_counts_for_the_others() {
    let mut rules = cpu(4000.0, throttling(10, 20));
    rules.push(rule(
        "n/late",
        "cpu_total_usage",
        4800.0,
        throttling(10, 50),
    ));
    let pods = vec![
        Load::new("a", 2000),
        Load::new("b", 1900),
        Load::new("c", 1800),
    ];
    // The gaps are 1100 and 220. The first rule releases 1140, which is enough for both.
    let node = hot(rules, pods, 5000);
    assert_eq!(node.ratios(), ratios(&[("a", 80), ("b", 80), ("c", 80)]));
}

#[test]
fn the_lowest_ratio_is_in_force_and_each_rule_ends_on_its_own() {
    let mut rules = cpu(4000.0, throttling(10, 20));
    rules.push(rule(
        "n/high",
        "cpu_total_usage",
        6000.0,
        throttling(10, 45),
    ));
    let mut node = hot(rules, vec![Load::new("a", 4000)], 7000);
    assert_eq!(node.ratios(), ratios(&[("a", 55)]));
    for _ in 0..5 {
        node.at(5000);
    }
    assert_eq!(node.state("n/high"), RuleState::Normal);
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    assert_eq!(node.ratios(), ratios(&[("a", 10)]));
    assert_eq!(node.plan.throttles[0].rule.to_string(), "n/cpu");
}

#[test]
fn nothing_is_throttled_further_without_a_breach() {
    let mut rules = cpu(4000.0, throttling(10, 20));
    rules[0].restore_value = 2000.0;
    let mut node = hot(rules, vec![Load::new("a", 3000)], 6000);
    node.at(3000);
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    assert_eq!(node.ratios(), ratios(&[("a", 80)]));
}

#[test]
fn nothing_is_restored_above_the_restore_value_or_while_unknown() {
    let mut rules = cpu(4000.0, throttling(10, 20));
    rules[0].restore_value = 2000.0;
    rules[0].avoidance_threshold = 2;
    let mut node = hot(rules, vec![Load::new("a", 3000)], 6000);
    node.at(6000);
    node.at(6000);
    for _ in 0..3 {
        node.at(1000);
    }
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    assert_eq!(node.ratios(), ratios(&[("a", 80)]));
    node.at(3000);
    assert_eq!(
        node.ratios(),
        ratios(&[("a", 80)]),
        "between the thresholds"
    );
    node.at(5000);
    assert_eq!(node.ratios(), ratios(&[("a", 80)]), "one breach of two");
    node.advance(PERIOD);
    node.sample.node.cpu = None;
    node.step();
    assert_eq!(node.ratios(), ratios(&[("a", 80)]), "unknown");
    node.at(1000);
    assert_eq!(node.ratios(), ratios(&[("a", 80)]), "no baseline");
    node.at(1000);
    assert_eq!(node.ratios(), []);
}

#[test]
fn throttles_are_restored_if_the_metric_is_unknown_for_too_long() {
    let mut node = hot(
        cpu(4000.0, throttling(10, 30)),
        vec![Load::new("a", 3000)],
        6000,
    );
    node.engine = std::mem::take(&mut node.engine).with_unknown_limit(PERIOD * 3);
    node.at(6000);
    let mut seen = Vec::new();
    for _ in 0..6 {
        node.advance(PERIOD);
        node.sample.node.cpu = None;
        node.step();
        seen.push(node.ratios().first().map(|(_, ratio)| *ratio));
        let reported = node.plan.transitions.iter().any(|t| {
            matches!(
                t.change,
                PlanChange::State {
                    unknown_too_long: true,
                    ..
                }
            )
        });
        assert_eq!(reported, seen.len() == 4, "reported once");
    }
    let expected = [Some(40), Some(40), Some(40), Some(70), None, None];
    assert_eq!(seen, expected);
}

#[test]
fn skipped_pods_are_reported_once_with_the_reason() {
    let mut pods = vec![
        Load::new("busy", 2000),
        Load::new("little", 9),
        Load::new("request", 500),
        Load::new("kept", 700),
        Load::new("waiting", 700),
        Load::new("unseen", 700),
        Load::new("partial", 700),
    ];
    pods[2].pod.cpu_request = MilliCpu(500);
    pods[3].pod.protected = true;
    pods[4].pod.running = false;
    let mut node = Node::new(cpu(1000.0, throttling(50, 10)), pods);
    let evaluate = |node: &mut Node| {
        node.cpu = 6000;
        node.advance(PERIOD);
        node.sample
            .pods
            .retain(|pod| pod.uid.to_string() != "unseen");
        let partial = node
            .sample
            .pods
            .iter_mut()
            .find(|it| it.uid.to_string() == "partial");
        partial.expect("a pod").target_cgroups.clear();
        node.step();
    };
    evaluate(&mut node);
    evaluate(&mut node);
    assert_eq!(node.ratios(), ratios(&[("busy", 90)]));
    let expected = [
        ("kept", Skipped::Protected),
        ("partial", Skipped::ContainerMissing),
        ("waiting", Skipped::NotRunning),
        ("request", Skipped::AtFloor),
        ("little", Skipped::UsesLittle),
        ("unseen", Skipped::NoSample),
    ];
    assert_eq!(node.skipped(), skipped(&expected));
    evaluate(&mut node);
    assert_eq!(node.skipped(), [], "nothing new to report");
    node.pods[3].pod.protected = false;
    node.pods[3].pod.running = false;
    node.set_pods();
    evaluate(&mut node);
    assert_eq!(node.skipped(), skipped(&[("kept", Skipped::NotRunning)]));
}

#[test]
fn only_pods_matched_by_a_policy_are_reported_as_not_allowed() {
    let mut evict_only = allow_all();
    evict_only.allowed = vec!["evict".to_owned()];
    evict_only.labels = Some(with_label("app", "a"));
    let set = PolicySet {
        rules: cpu(1000.0, throttling(10, 10)),
        pods: vec![evict_only],
    };
    let mut pods = vec![Load::new("a", 2000), Load::new("b", 2000)];
    pods[0].pod.labels.insert("app".to_owned(), "a".to_owned());
    let mut node = Node::with(Arc::new(set), pods);
    node.at(6000);
    node.at(6000);
    assert_eq!(node.ratios(), []);
    assert_eq!(node.skipped(), skipped(&[("a", Skipped::NotAllowed)]));
}

#[test]
fn a_pod_is_matched_again_when_its_labels_change() {
    let mut batch = allow_all();
    batch.labels = Some(with_label("app", "batch"));
    let set = PolicySet {
        rules: cpu(1000.0, throttling(10, 10)),
        pods: vec![batch],
    };
    let mut node = Node::with(Arc::new(set), vec![Load::new("a", 2000)]);
    node.at(6000);
    node.at(6000);
    assert_eq!(node.ratios(), []);
    let labels = &mut node.pods[0].pod.labels;
    labels.insert("app".to_owned(), "batch".to_owned());
    node.set_pods();
    node.at(6000);
    assert_eq!(node.ratios(), ratios(&[("a", 90)]));
}

#[test]
fn the_later_of_two_samples_of_a_pod_is_used() {
    for order in [[0, 1], [1, 0]] {
        let pods = vec![Load::new("a", 2000)];
        let mut node = Node::new(cpu(1000.0, throttling(10, 50)), pods);
        node.at(6000);
        node.cpu = 6000;
        node.advance(PERIOD);
        let later = node.sample.pods[0].clone();
        let mut earlier = later.clone();
        earlier.cpu_nanos = Some(later.cpu_nanos.unwrap() - 5_000_000_000);
        let both = [earlier, later];
        node.sample.pods = order.map(|index| both[index].clone()).into();
        node.step();
        assert_eq!(node.quotas("a"), [Some(1000)]);
    }
}

fn with_label(key: &str, value: &str) -> Selector {
    let requirement = Requirement::In(key.to_owned(), vec![value.to_owned()]);
    Selector {
        requirements: vec![requirement],
    }
}

#[test]
fn the_base_is_the_minimum_of_quota_and_usage() {
    let mut pods = vec![Load::new("a", 2000), Load::new("b", 2000)];
    pods[0].quota = Quota::Limit(MilliCpu(1500));
    pods[1].quota = Quota::Limit(MilliCpu(5000));
    let node = hot(cpu(1000.0, throttling(10, 50)), pods, 8000);
    assert_eq!(node.quotas("a"), [Some(750)]);
    assert_eq!(node.quotas("b"), [Some(1000)]);
}

#[test]
fn the_base_does_not_change_while_the_pod_is_throttled() {
    let mut node = hot(
        cpu(1000.0, throttling(10, 10)),
        vec![Load::new("a", 2000)],
        8000,
    );
    node.pods[0].cpu = 1800;
    node.at(8000);
    assert_eq!(
        node.plan.throttles[0].target_cgroups[0].base,
        MilliCpu(2000)
    );
    assert_eq!(node.quotas("a"), [Some(1600)]);
}

/// How the first pod is throttled.
fn level(node: &Node) -> Option<(u8, bool, Option<MilliCpu>)> {
    let throttle = node.plan.throttles.first();
    throttle.map(|t| (t.ratio, t.is_lowest(), t.target_cgroups[0].quota))
}

#[test]
fn the_idle_class_is_entered_first_and_left_last() {
    let mut node = hot(
        cpu(4000.0, idle_action(40, 60)),
        vec![Load::new("a", 3000)],
        6000,
    );
    assert_eq!(level(&node), Some((100, true, None)));
    for _ in 0..2 {
        node.at(6000);
        assert_eq!(level(&node), Some((100, true, None)), "it may be enough");
    }
    node.at(6000);
    assert_eq!(level(&node), Some((40, true, Some(MilliCpu(1200)))));
    node.at(3000);
    node.at(3000);
    node.at(3000);
    assert_eq!(level(&node), Some((100, true, None)));
    node.at(3000);
    assert_eq!(level(&node), None);
}

#[test]
fn a_floor_of_100_percent_only_uses_the_idle_class() {
    let mut node = hot(
        cpu(4000.0, idle_action(100, 30)),
        vec![Load::new("a", 3000)],
        6000,
    );
    for _ in 0..3 {
        assert_eq!(level(&node), Some((100, true, None)));
        node.at(6000);
    }
    for _ in 0..3 {
        node.at(3000);
    }
    assert_eq!(level(&node), None);
}

#[test]
fn a_metric_without_a_unit_of_release_throttles_every_victim() {
    let rules = vec![rule("n/load", "cpu_load_1_min", 4.0, throttling(40, 30))];
    let pods = vec![Load::new("a", 2000), Load::new("b", 1000)];
    let mut node = Node::new(rules, pods);
    let mut seen = Vec::new();
    for _ in 0..6 {
        node.advance(PERIOD);
        node.sample.node.load = Some([9.0; 3]);
        node.sample.node.tasks = Some(9);
        node.step();
        seen.push(node.ratios());
    }
    assert_eq!(
        seen[0],
        [],
        "the usage of pods is not known from the first sample"
    );
    assert_eq!(seen[1], ratios(&[("a", 70), ("b", 70)]));
    for later in &seen[2..] {
        assert_eq!(*later, ratios(&[("a", 40), ("b", 40)]));
    }
}

#[test]
fn containers_are_throttled_by_their_own_usage() {
    let mut pods = vec![Load::new("a", 1000)];
    pods[0].pod.container_requests = [("side".to_owned(), MilliCpu(150))].into();
    let mut node = Node::new(cpu(1000.0, throttling(10, 50)), pods);
    let evaluate = |node: &mut Node, names: [&str; 2]| {
        node.cpu = 8000;
        node.advance(PERIOD);
        let nanos = node.pods[0].nanos;
        let target_cgroup = |(index, name): (u64, &&str)| TargetCgroupSample {
            cgroup: Arc::from(*name),
            cpu_nanos: Some(nanos / 4 * (3 - 2 * index)),
            quota: Some(Quota::Limit(MilliCpu(4000))),
        };
        node.sample.pods[0].target_cgroups = (0..).zip(&names).map(target_cgroup).collect();
        node.step();
    };
    evaluate(&mut node, ["main", "side"]);
    evaluate(&mut node, ["main", "side"]);
    assert_eq!(node.quotas("a"), [Some(375), Some(150)]);
    evaluate(&mut node, ["again", "side"]);
    let throttle = &node.plan.throttles[0];
    let found: Vec<_> = throttle
        .target_cgroups
        .iter()
        .map(|l| (&*l.cgroup, l.base.0))
        .collect();
    assert_eq!(found, [("side", 250), ("again", 750)]);
}

#[test]
fn an_idle_sidecar_does_not_raise_the_floor_of_the_other_container() {
    let mut pods = vec![Load::new("a", 800)];
    pods[0].pod.cpu_request = MilliCpu(700);
    pods[0].pod.container_requests = [
        ("main".to_owned(), MilliCpu(500)),
        ("side".to_owned(), MilliCpu(200)),
    ]
    .into();
    let mut node = Node::new(cpu(1000.0, throttling(10, 30)), pods);
    let mut quotas = Vec::new();
    let mut skipped = Vec::new();
    for _ in 0..5 {
        // The main container uses its whole quota and the sidecar is idle.
        let quota = node.quotas("a").first().copied().flatten();
        node.pods[0].cpu = quota.unwrap_or(800);
        node.cpu = 8000;
        node.advance(PERIOD);
        let nanos = node.pods[0].nanos;
        let target_cgroup = |cgroup: &str, cpu_nanos, quota| TargetCgroupSample {
            cgroup: Arc::from(cgroup),
            cpu_nanos: Some(cpu_nanos),
            quota: Some(quota),
        };
        node.sample.pods[0].target_cgroups = vec![
            target_cgroup("main", nanos, Quota::Unlimited),
            target_cgroup("side", 0, Quota::Limit(MilliCpu(200))),
            target_cgroup("pause", 0, Quota::Unlimited),
        ];
        node.step();
        quotas.push(node.quotas("a").first().copied().flatten());
        skipped.extend(node.skipped());
    }
    assert_eq!(quotas, [None, Some(560), Some(500), Some(500), Some(500)]);
    // Then the reason for no further step is reported.
    assert_eq!(skipped.last(), Some(&("a".to_owned(), Skipped::AtFloor)));
}

#[test]
fn a_pod_with_an_unreadable_quota_is_skipped() {
    let mut node = Node::new(cpu(1000.0, throttling(10, 50)), vec![Load::new("a", 1000)]);
    node.at(8000);
    node.cpu = 8000;
    node.advance(PERIOD);
    node.sample.pods[0].target_cgroups[0].quota = None;
    node.step();
    assert_eq!(node.skipped(), skipped(&[("a", Skipped::NoSample)]));
    node.advance(PERIOD);
    node.sample.pods[0].target_cgroups.clear();
    node.step();
    assert_eq!(node.ratios(), []);
}

fn ratios_after(edit: impl Fn(&mut Node)) -> Vec<Option<u8>> {
    let mut node = hot(
        cpu(4000.0, throttling(10, 30)),
        vec![Load::new("a", 3000)],
        6000,
    );
    node.at(6000);
    node.at(6000);
    edit(&mut node);
    let mut seen = Vec::new();
    for _ in 0..5 {
        node.at(6000);
        seen.push(node.ratios().first().map(|(_, ratio)| *ratio));
    }
    seen
}

#[test]
fn throttles_no_longer_wanted_are_restored_whatever_the_metric_is() {
    let restored = [Some(40), Some(70), None, None, None];
    let preview = |node: &mut Node| {
        let mut rules = cpu(4000.0, throttling(10, 30));
        rules[0].strategy = Strategy::Preview;
        node.engine.set_policy(policy(rules));
    };
    let disallow = |node: &mut Node| {
        let mut set = scenario::policy_set(cpu(4000.0, throttling(10, 30)));
        set.pods[0].allowed = vec!["evict".to_owned()];
        node.engine.set_policy(Arc::new(set));
    };
    let no_policies = |node: &mut Node| {
        let mut set = scenario::policy_set(cpu(4000.0, throttling(10, 30)));
        set.pods = Vec::<PodPolicy>::new();
        node.engine.set_policy(Arc::new(set));
    };
    let protect = |node: &mut Node| {
        node.pods[0].pod.protected = true;
        node.set_pods();
    };
    let watch = |node: &mut Node| {
        let rules = cpu(4000.0, crate::engine_support::action("watch"));
        node.engine.set_policy(policy(rules));
    };
    let remove = |node: &mut Node| node.engine.set_policy(policy(Vec::new()));
    assert_eq!(ratios_after(preview), restored);
    assert_eq!(ratios_after(disallow), restored);
    assert_eq!(ratios_after(no_policies), restored);
    assert_eq!(ratios_after(protect), restored);
    assert_eq!(ratios_after(watch), restored);
    assert_eq!(ratios_after(remove), restored);
}

#[test]
fn a_throttle_of_a_removed_rule_is_restored_by_a_step_in_each_evaluation() {
    let throttle = cpu(4000.0, throttling(10, 30)).remove(0);
    let other = rule(
        "n/other",
        "cpu_load_1_min",
        5.0,
        crate::engine_support::disabling_scheduling("x"),
    );
    let mut node = Node::new(vec![throttle, other.clone()], vec![Load::new("a", 3000)]);
    for _ in 0..7 {
        node.at(6000);
    }
    assert_eq!(node.ratios(), ratios(&[("a", 10)]));
    node.engine.set_policy(policy(vec![other]));
    let mut seen = Vec::new();
    for _ in 0..3 {
        node.at(6000);
        seen.push(node.ratios().first().map(|(_, ratio)| *ratio));
    }
    let expected = [Some(40), Some(70), None];
    assert_eq!(seen, expected);
}

#[test]
fn skip_reasons_are_reported_again_in_the_next_episode() {
    let mut pods = vec![Load::new("a", 3000)];
    pods[0].pod.protected = true;
    let mut node = hot(cpu(4000.0, throttling(10, 30)), pods, 6000);
    let protected = skipped(&[("a", Skipped::Protected)]);
    assert_eq!(node.skipped(), protected);
    for _ in 0..3 {
        node.at(1000);
    }
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    node.at(6000);
    assert_eq!(node.skipped(), protected);
}

#[test]
fn a_raised_minimum_ratio_raises_throttles_at_the_next_step() {
    let edit = |node: &mut Node| {
        node.engine
            .set_policy(policy(cpu(4000.0, throttling(60, 30))));
    };
    assert_eq!(ratios_after(edit), [Some(60); 5]);
}

#[test]
fn a_rule_that_is_added_again_resumes_its_claims() {
    let edit = |node: &mut Node| {
        node.engine.set_policy(policy(Vec::new()));
        node.at(6000);
        assert_eq!(node.ratios(), ratios(&[("a", 40)]));
        node.engine
            .set_policy(policy(cpu(4000.0, throttling(10, 30))));
    };
    assert_eq!(ratios_after(edit)[1..], [Some(10); 4]);
}

#[test]
fn a_gone_pod_is_dropped_and_a_policy_change_triggers_an_evaluation() {
    let mut node = hot(
        cpu(4000.0, throttling(10, 30)),
        vec![Load::new("a", 3000)],
        6000,
    );
    let uid = PodUid::from("a");
    node.engine.feedback(&Feedback::Gone { uid });
    node.at(6000);
    assert_eq!(node.ratios(), []);
    node.engine.set_policy(policy(Vec::new()));
    assert!(node.engine.next_due().unwrap() <= node.now);
    assert!(node.step().evaluated);
    assert_eq!(node.engine.next_due(), None);
}

#[test]
fn a_failed_throttle_is_reverted_and_retried_later() {
    let pods = vec![Load::new("a", 3000), Load::new("b", 100)];
    let mut node = hot(cpu(4000.0, throttling(10, 30)), pods, 4100);
    assert_eq!(node.ratios(), ratios(&[("a", 70)]));
    let uid = PodUid::from("a");
    node.engine.feedback(&Feedback::ThrottleFailed { uid });
    node.at(4100);
    assert_eq!(node.ratios(), ratios(&[("b", 70)]));
    assert_eq!(node.skipped(), skipped(&[("a", Skipped::BackingOff)]));
    node.at(4100);
    node.at(4100);
    assert_eq!(
        node.ratios(),
        ratios(&[("a", 40), ("b", 40)]),
        "it joins the others"
    );
}

#[test]
fn a_contested_pod_stays_unchanged_until_the_backoff_ends() {
    let mut node = hot(
        cpu(4000.0, throttling(10, 30)),
        vec![Load::new("a", 3000)],
        6000,
    );
    let until = node.now + PERIOD + SECOND;
    let uid = PodUid::from("a");
    node.engine.feedback(&Feedback::Contested { uid, until });
    node.at(6000);
    assert_eq!(node.ratios(), ratios(&[("a", 70)]));
    assert_eq!(node.skipped(), skipped(&[("a", Skipped::Contested)]));
    node.at(6000);
    assert_eq!(node.ratios(), ratios(&[("a", 40)]));
}

#[test]
fn a_resize_updates_base_and_original() {
    let mut pods = vec![Load::new("a", 3000)];
    pods[0].quota = Quota::Limit(MilliCpu(2000));
    let mut node = hot(cpu(4000.0, throttling(10, 50)), pods, 6000);
    assert_eq!(node.quotas("a"), [Some(1000)]);
    node.engine.feedback(&Feedback::Resized {
        uid: PodUid::from("a"),
        cgroup: Arc::from(""),
        original: Quota::Limit(MilliCpu(1200)),
    });
    node.at(3000);
    assert_eq!(node.quotas("a"), [Some(600)]);
}

#[test]
fn guaranteed_pods_come_last() {
    let mut pods = vec![Load::new("a", 3000), Load::new("b", 100)];
    pods[0].pod.qos = QosClass::Guaranteed;
    pods[1].pod.qos = QosClass::Burstable;
    let node = hot(cpu(4000.0, throttling(10, 30)), pods, 6000);
    assert_eq!(node.ratios(), ratios(&[("b", 70), ("a", 70)]));
}
