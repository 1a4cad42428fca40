//! The idle class, on nodes whose kubelet reports the cgroup values of pods and on others.

use std::time::Duration;

use crate::engine_support::{Load, Node, PERIOD, idle_action, rule};
use plimsoll::engine::plan::CpuClass;

/// A node of one pod that uses 3 CPUs, with a rule that puts it into the idle class and then throttles it to 40 %.
fn node(edit: impl Fn(&mut Load)) -> Node {
    let mut load = Load::new("a", 3000);
    edit(&mut load);
    let action = idle_action(40, 20);
    Node::new(
        vec![rule("n/cpu", "cpu_total_usage", 4000.0, action)],
        vec![load],
    )
}

/// One period above the threshold: the ratio and the class of the pod.
fn breached(node: &mut Node) -> Option<(u8, CpuClass)> {
    node.at(6000);
    let throttle = node.plan.throttles.first();
    throttle.map(|it| (it.ratio, it.class))
}

fn report_resources(node: &mut Node, reported: bool) {
    node.pods[0].pod.resources_reported = reported;
    node.set_pods();
}

#[test]
fn where_the_idle_class_is_unsafe_the_lowest_weight_comes_with_the_first_quota_step() {
    let mut node = node(|load| load.pod.resources_reported = true);
    assert_eq!(breached(&mut node), None);
    assert_eq!(breached(&mut node), Some((80, CpuClass::LowestWeight)));
    assert!(node.engine.is_idle_unsafe());
    assert_eq!(node.quotas("a"), [Some(2400)]);
    assert_eq!(breached(&mut node), Some((60, CpuClass::LowestWeight)));
}

#[test]
fn one_running_pod_that_reports_its_resources_is_enough() {
    let mut node = node(|_| {});
    let mut other = Load::new("other", 0);
    other.pod.resources_reported = true;
    other.pod.running = false;
    node.pods.push(other);
    node.set_pods();
    breached(&mut node);
    assert_eq!(breached(&mut node), Some((100, CpuClass::Idle)));
    node.pods[1].pod.running = true;
    node.set_pods();
    let class = breached(&mut node).unwrap().1;
    assert_eq!(class, CpuClass::LowestWeight);
}

#[test]
fn a_pod_in_the_idle_class_changes_over_with_the_kubelet_and_back_after_ten_minutes() {
    let mut node = node(|_| {});
    breached(&mut node);
    assert_eq!(breached(&mut node), Some((100, CpuClass::Idle)));
    report_resources(&mut node, true);
    assert_eq!(breached(&mut node).unwrap().1, CpuClass::LowestWeight);
    report_resources(&mut node, false);
    let ten_minutes = Duration::from_mins(10).as_secs() / PERIOD.as_secs();
    for _ in 1..ten_minutes {
        assert_eq!(breached(&mut node).unwrap().1, CpuClass::LowestWeight);
    }
    assert_eq!(breached(&mut node).unwrap().1, CpuClass::Idle);
    assert!(!node.engine.is_idle_unsafe());
}

#[test]
fn a_pod_leaves_the_idle_class_while_its_resize_is_pending() {
    let mut node = node(|_| {});
    for _ in 0..4 {
        breached(&mut node);
    }
    assert_eq!(breached(&mut node), Some((80, CpuClass::Idle)));
    let resizing = |node: &mut Node, resizing| {
        node.pods[0].pod.resizing = resizing;
        node.set_pods();
        breached(node).unwrap().1
    };
    assert_eq!(resizing(&mut node, true), CpuClass::LowestWeight);
    assert!(node.quotas("a")[0].is_some(), "the quota stays");
    assert!(!node.engine.is_idle_unsafe());
    assert_eq!(resizing(&mut node, false), CpuClass::Idle);
}

#[test]
fn a_preview_takes_the_same_steps() {
    let mut node = node(|load| load.pod.resources_reported = true);
    let mut preview = rule("n/cpu", "cpu_total_usage", 4000.0, idle_action(40, 20));
    preview.strategy = plimsoll::engine::policy::Strategy::Preview;
    node.engine
        .set_policy(crate::engine_support::policy(vec![preview]));
    breached(&mut node);
    node.at(6000);
    let to = node
        .plan
        .transitions
        .iter()
        .rev()
        .find_map(|it| match it.change {
            plimsoll::engine::plan::PlanChange::Throttle { to, idle, .. } => Some((to, idle)),
            _ => None,
        });
    assert_eq!(to, Some((80, true)));
}
