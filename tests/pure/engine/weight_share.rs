//! The batch weight share, from the pods, policies and samples that an engine has.

use std::sync::Arc;

use crate::engine_support::{
    CPUS, Load, Node, PERIOD, allow_all, idle_action, policy, rule, throttling,
};
use plimsoll::engine::pod::QosClass;
use plimsoll::engine::policy::{PodPolicy, PolicySet, Rule, Standing};
use plimsoll::engine::selector::Selector;
use plimsoll::engine::units::MilliCpu;
use plimsoll::engine::weight_share::CpuWeights;

const V2: CpuWeights = CpuWeights::V2;

fn load(uid: &str, request: u64, cpu: u64) -> Load {
    let mut load = Load::new(uid, cpu);
    load.pod.qos = QosClass::Burstable;
    load.pod.cpu_request = MilliCpu(request);
    load
}

/// A pod that requests 300m and needs 1.2 CPUs, which is protected, and two batch pods that request as much.
fn node(policy: Arc<PolicySet>) -> Node {
    let mut important = load("important", 300, 1200);
    important.pod.protected = true;
    let batch = ["a", "b"].map(|uid| load(uid, 300, 500));
    let mut node = Node::with(policy, [important].into_iter().chain(batch).collect());
    node.cpu = 2200;
    node
}

fn percent(node: &Node, weights: CpuWeights) -> Option<f64> {
    let share = node.engine.batch_weight_share(weights)?;
    assert_eq!(share.pod.name, "important");
    Some(share.percent)
}

/// Of batch pods with this weight each, beside the important pod's 123 on two of its threads.
fn expected(batch: f64) -> f64 {
    let batch = batch / f64::from(CPUS);
    batch * 100.0 / (batch + 123.0 / 2.0)
}

fn assert_near(percent: Option<f64>, batch: f64) {
    let (percent, expected) = (percent.expect("a share"), expected(batch));
    assert!(
        (percent - expected).abs() < 0.01,
        "{percent}, not {expected}"
    );
}

fn idle_rule() -> Vec<Rule> {
    // Its threshold is not reached.
    vec![rule(
        "n/cpu",
        "cpu_total_usage",
        30_000.0,
        idle_action(100, 10),
    )]
}

fn standing(preview: bool) -> Arc<PolicySet> {
    let pods = vec![PodPolicy {
        allowed: Vec::new(),
        standing: Standing {
            idle: true,
            preview,
            ..Standing::default()
        },
        ..allow_all()
    }];
    let rules = Vec::new();
    Arc::new(PolicySet { rules, pods })
}

#[test]
fn batch_pods_weigh_as_in_the_class_that_a_policy_gives_them_or_would_give_them() {
    let quotas = vec![rule(
        "n/cpu",
        "cpu_total_usage",
        30_000.0,
        throttling(20, 10),
    )];
    for (name, policy, weight) in [
        ("quotas only", policy(quotas), 123.0),
        ("idle class by a rule", policy(idle_rule()), 3.0),
        ("standing", standing(false), 3.0),
        ("standing, in Preview", standing(true), 3.0),
    ] {
        let mut node = node(policy);
        node.tick();
        assert_eq!(percent(&node, V2), None, "{name}: one sample");
        node.tick();
        assert_near(percent(&node, V2), 2.0 * weight);
    }
}

#[test]
fn the_lowest_weight_counts_where_it_takes_the_place_of_the_idle_class() {
    let mut node = node(policy(idle_rule()));
    node.tick();
    node.tick();
    let old = CpuWeights { idle: false, ..V2 };
    assert_near(percent(&node, old), 20.0);
    node.pods[1].pod.resizing = true;
    node.set_pods();
    assert_near(percent(&node, V2), 13.0);
    node.pods[1].pod.resources_reported = true;
    node.set_pods();
    node.tick();
    assert_near(percent(&node, V2), 20.0);
}

#[test]
fn pods_that_do_not_run_or_terminate_do_not_count() {
    let mut node = node(policy(idle_rule()));
    node.tick();
    node.tick();
    node.pods[1].pod.terminating = true;
    node.set_pods();
    assert_near(percent(&node, V2), 3.0);
    node.pods[1].pod.terminating = false;
    node.pods[1].pod.running = false;
    node.set_pods();
    assert_near(percent(&node, V2), 3.0);
}

#[test]
fn there_is_no_share_without_batch_pods_or_while_something_is_unknown() {
    let nothing = PodPolicy {
        labels: Some(Selector::default()),
        allowed: Vec::new(),
        ..allow_all()
    };
    let mut all_protected = node(Arc::new(PolicySet {
        rules: Vec::new(),
        pods: vec![nothing],
    }));
    all_protected.tick();
    all_protected.tick();
    assert_eq!(percent(&all_protected, V2), None);
    assert_eq!(all_protected.engine.batch_cpus(), Some(0.0));

    let mut node = node(policy(idle_rule()));
    node.tick();
    node.tick();
    // A pod whose counter cannot be read.
    node.pods.push(load("c", 300, 500));
    node.set_pods();
    for _ in 0..4 {
        node.advance(PERIOD);
        for pod in node.sample.pods.iter_mut().filter(|it| &*it.uid.0 == "c") {
            pod.cpu_nanos = None;
        }
        node.step();
    }
    assert_eq!(percent(&node, V2), None);
    assert_eq!(node.engine.batch_cpus(), None);
    node.tick();
    node.tick();
    assert!(percent(&node, V2).is_some());
}

#[test]
fn what_batch_pods_use_is_without_protected_pods_and_those_that_do_not_run() {
    let mut node = node(policy(idle_rule()));
    let used = |node: &Node, expected: f64| {
        let cpus = node.engine.batch_cpus().expect("it is known");
        assert!((cpus - expected).abs() < 0.01, "{cpus}, not {expected}");
    };
    node.tick();
    assert_eq!(node.engine.batch_cpus(), None, "one sample");
    node.tick();
    used(&node, 1.0);
    node.pods[1].pod.running = false;
    node.set_pods();
    used(&node, 0.5);
}

#[test]
fn a_pod_that_has_only_started_has_used_nothing() {
    let mut node = node(policy(idle_rule()));
    node.tick();
    node.tick();
    node.pods.push(load("c", 300, 500));
    node.set_pods();
    assert_near(percent(&node, V2), 6.0);
    node.tick();
    node.tick();
    assert_near(percent(&node, V2), 9.0);
}
