//! Evictions, page cache reclaim, and disabling scheduling.

use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::{
    GIB, Load, Node, PERIOD, SECOND, action, disabling_scheduling, eviction_action, policy, rule,
};
use plimsoll::engine::metric::Metric;
use plimsoll::engine::plan::{Feedback, PlanChange, RuleState, Scheduling, Skipped};
use plimsoll::engine::pod::{EvictionExemption, PodUid};
use plimsoll::engine::policy::{Action, EvictionSpec, Probe, Rule, RuleId, TaintEffect};
use plimsoll::engine::sample::{ProbeSample, Series};
use plimsoll::engine::units::Bytes;

fn memory(threshold: u64, action: Action) -> Vec<Rule> {
    vec![rule(
        "n/memory",
        "memory_total_usage",
        (threshold * GIB) as f64,
        action,
    )]
}

fn with_memory(uid: &str, gib: u64) -> Load {
    Load {
        unreclaimable: gib * GIB,
        ..Load::new(uid, 100)
    }
}

fn names(node: &Node) -> String {
    node.evicted().join(" ")
}

fn gone(node: &mut Node, uid: &str) {
    node.pods.retain(|load| load.pod.name != uid);
    node.set_pods();
}

#[test]
fn victims_are_evicted_until_the_gap_is_covered() {
    let pods = vec![
        with_memory("a", 1),
        with_memory("b", 3),
        with_memory("c", 2),
        with_memory("d", 1),
    ];
    let mut node = Node::new(memory(8, eviction_action(10)), pods);
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "b c", "4.4 GiB; known from the first sample");
    let evict = &node.plan.evictions[0];
    assert_eq!(evict.grace, Duration::from_secs(5));
    assert_eq!(evict.rule, RuleId::from("n/memory"));
}

#[test]
fn a_round_is_capped_and_settles_before_the_next_starts() {
    let pods = vec![
        with_memory("a", 1),
        with_memory("b", 1),
        with_memory("c", 1),
        with_memory("d", 1),
    ];
    let mut node = Node::new(memory(8, eviction_action(2)), pods);
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "a b");
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "", "both are terminating");
    gone(&mut node, "a");
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "", "b is not gone yet");
    node.engine.feedback(&Feedback::Gone {
        uid: PodUid::from("b"),
    });
    node.pods.retain(|load| load.pod.name != "b");
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "c d");
}

#[test]
fn the_rule_with_the_largest_gap_evicts() {
    let mut rules = memory(6, eviction_action(1));
    rules.push(rule(
        "n/other",
        "memory_total_usage",
        (11 * GIB) as f64,
        eviction_action(3),
    ));
    let pods = ["a", "b", "c", "d"].map(|uid| with_memory(uid, 1));
    let mut node = Node::new(rules, pods.into());
    node.at_memory(12 * GIB);
    let taken: Vec<_> = node
        .plan
        .evictions
        .iter()
        .map(|e| e.rule.to_string())
        .collect();
    assert_eq!(taken, ["n/memory"], "the gaps are 6.6 and 1.1 GiB");
}

#[test]
fn a_round_times_out_a_minute_after_the_grace_period() {
    let mut node = Node::new(
        memory(8, eviction_action(1)),
        vec![with_memory("a", 1), with_memory("b", 1)],
    );
    let mut seen = Vec::new();
    for _ in 0..9 {
        node.at_memory(12 * GIB);
        seen.push(names(&node));
    }
    assert_eq!(
        seen,
        ["a", "", "", "", "", "", "", "a", ""],
        "5 s of grace and 60 s"
    );
}

#[test]
fn a_round_settles_when_its_pod_has_finished() {
    let mut node = Node::new(
        memory(8, eviction_action(1)),
        vec![with_memory("a", 1), with_memory("b", 1)],
    );
    node.at_memory(12 * GIB);
    node.pods[0].pod.running = false;
    node.set_pods();
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "b");
}

#[test]
fn after_a_refused_eviction_the_next_candidate_is_tried() {
    let mut node = Node::new(
        memory(8, eviction_action(1)),
        vec![with_memory("a", 1), with_memory("b", 1)],
    );
    node.at_memory(12 * GIB);
    let (uid, until) = (PodUid::from("a"), node.now + PERIOD * 3);
    node.engine
        .feedback(&Feedback::EvictionRefused { uid, until });
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "b");
    assert_eq!(node.skipped(), [("a".to_owned(), Skipped::BackingOff)]);
    gone(&mut node, "b");
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "");
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "a");
}

#[test]
fn terminating_pods_count_as_released() {
    let mut pods = vec![with_memory("a", 1), with_memory("b", 4)];
    pods[1].pod.terminating = true;
    let mut node = Node::new(memory(8, eviction_action(9)), pods);
    node.at_memory(11 * GIB);
    assert_eq!(names(&node), "");
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "a", "the gap is 4.4 GiB");
}

#[test]
fn exempt_pods_are_not_evicted_and_the_reason_is_reported() {
    let mut pods: Vec<_> = ["a", "b", "c", "d", "e", "f"]
        .map(|uid| with_memory(uid, 1))
        .into();
    pods[0].pod.eviction_exemption = Some(EvictionExemption::DaemonSet);
    pods[1].pod.owned = false;
    pods[2].pod.protected = true;
    pods[3].pod.terminating = true;
    pods[4].unreclaimable = 0;
    let mut node = Node::new(memory(8, eviction_action(9)), pods);
    node.at_memory(30 * GIB);
    assert_eq!(names(&node), "f");
    let expected = [
        ("a", Skipped::ExemptFromEviction),
        ("b", Skipped::Unowned),
        ("c", Skipped::Protected),
        ("d", Skipped::NotRunning),
        ("e", Skipped::UsesLittle),
    ];
    assert_eq!(
        node.skipped(),
        expected.map(|(uid, why)| (uid.to_owned(), why))
    );
}

#[test]
fn unowned_pods_are_evicted_if_the_action_allows_it() {
    let mut pods = vec![with_memory("a", 1)];
    pods[0].pod.owned = false;
    let spec = EvictionSpec {
        grace: None,
        max_pods_per_round: 1,
        evict_unowned: true,
    };
    let action = Action {
        eviction: Some(spec),
        ..eviction_action(1)
    };
    let mut node = Node::new(memory(8, action), pods);
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "a");
    assert_eq!(
        node.plan.evictions[0].grace,
        Duration::from_secs(30),
        "the pod's own"
    );
}

#[test]
fn a_grace_period_of_zero_becomes_one_second() {
    let mut pods = vec![with_memory("a", 1)];
    pods[0].pod.grace = Duration::ZERO;
    let mut action = eviction_action(1);
    action.eviction.as_mut().unwrap().grace = None;
    let mut node = Node::new(memory(8, action), pods);
    node.at_memory(12 * GIB);
    assert_eq!(node.plan.evictions[0].grace, Duration::from_secs(1));
}

#[test]
fn a_metric_without_a_unit_of_release_evicts_one_pod_per_round() {
    let rules = vec![
        rule("n/load", "cpu_load_1_min", 4.0, eviction_action(5)),
        rule("n/load-5", "cpu_load_5_min", 4.0, eviction_action(5)),
    ];
    let mut node = Node::new(rules, vec![Load::new("a", 500), Load::new("b", 900)]);
    let mut seen = Vec::new();
    for _ in 0..3 {
        node.advance(PERIOD);
        node.sample.node.load = Some([9.0; 3]);
        node.sample.node.tasks = Some(9);
        node.step();
        seen.push(names(&node));
    }
    assert_eq!(seen, ["", "b", ""]);
}

#[test]
fn rounds_are_per_resource_and_never_evict_a_pod_twice() {
    let mut rules = memory(8, eviction_action(1));
    rules.push(rule("n/cpu", "cpu_total_usage", 1000.0, eviction_action(1)));
    let mut node = Node::new(rules, vec![with_memory("a", 1), with_memory("b", 1)]);
    node.cpu = 4000;
    node.memory = 12 * GIB;
    node.tick();
    assert_eq!(
        names(&node),
        "a",
        "only memory is known from the first sample"
    );
    node.tick();
    assert_eq!(names(&node), "b");
}

#[test]
fn page_cache_is_reclaimed_from_one_pod_at_a_time_the_largest_first() {
    let gc = Action {
        force_gc: true,
        ..action("gc")
    };
    let url = "http://localhost/metrics";
    let rules = vec![Rule {
        metric: Metric::Probe("latency".into()),
        probe: Some(Probe {
            url: url.into(),
            headers: Vec::new(),
            timeout: SECOND,
        }),
        ..rule("n/probe", "cpu_load_1_min", 4.0, gc)
    }];
    let cached = |uid: &str, cpu, cache| Load {
        cache,
        ..Load::new(uid, cpu)
    };
    let pods = vec![
        cached("a", 400, GIB),
        cached("b", 300, 0),
        cached("c", 200, 4096),
        cached("d", 100, 2 * GIB),
    ];
    let mut node = Node::new(rules, pods);
    let mut taken = Vec::new();
    for latency in [1.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 9.0, 9.0] {
        node.advance(PERIOD);
        let series = Series {
            name: "latency".into(),
            labels: Vec::new(),
            value: latency,
        };
        node.sample.probes = vec![ProbeSample {
            url: url.into(),
            at: node.sample.at,
            series: [series].into(),
        }];
        node.step();
        let reclaims = node.plan.reclaims.iter();
        taken.push(
            reclaims
                .map(|it| (it.uid.to_string(), it.amount))
                .collect::<Vec<_>>(),
        );
    }
    let one = |uid: &str, amount| vec![(uid.to_owned(), Bytes(amount))];
    let (a, d) = (|| one("a", GIB), || one("d", 2 * GIB));
    let [(first, busy), (normal, again)] = [taken[..4].split_at(1), taken[4..].split_at(3)];
    assert!(first.iter().chain(normal).all(Vec::is_empty), "{taken:?}");
    assert_eq!(busy, [d(), a(), Vec::new()], "from none twice");
    assert_eq!(again, [d(), a()], "starts again after the rule was Normal");
}

fn scheduling(node: &Node) -> (Option<TaintEffect>, String) {
    match &node.plan.scheduling {
        Scheduling::Disabled { effect, rules } => {
            let ids: Vec<_> = rules.iter().map(ToString::to_string).collect();
            (Some(*effect), ids.join(" "))
        }
        Scheduling::Enabled => (None, "enabled".to_owned()),
        Scheduling::Unchanged => (None, "hold".to_owned()),
    }
}

#[test]
fn scheduling_is_disabled_with_the_strongest_effect_of_all_rules() {
    let soft = Action {
        scheduling: Some(TaintEffect::PreferNoSchedule),
        ..disabling_scheduling("soft")
    };
    let rules = vec![
        rule(
            "n/high",
            "cpu_total_usage",
            6000.0,
            disabling_scheduling("hard"),
        ),
        rule("n/low", "cpu_total_usage", 4000.0, soft),
    ];
    let mut node = Node::new(rules, Vec::new());
    let hold = (None, "hold".to_owned());
    let enabled = (None, "enabled".to_owned());
    let both = (Some(TaintEffect::NoSchedule), "n/high n/low".to_owned());
    let low = (Some(TaintEffect::PreferNoSchedule), "n/low".to_owned());
    let loads = [1000, 1000, 7000, 5000, 5000, 5000, 1000, 1000, 1000];
    let expected = [
        hold,
        enabled.clone(),
        both.clone(),
        both.clone(),
        both,
        low.clone(),
        low.clone(),
        low,
        enabled,
    ];
    for (round, (load, expected)) in loads.into_iter().zip(expected).enumerate() {
        node.at(load);
        assert_eq!(scheduling(&node), expected, "round {round}");
    }
    let changes: Vec<_> = node.plan.transitions.iter().map(|t| &t.change).collect();
    assert!(changes.contains(&&PlanChange::SchedulingEnabled));
}

#[test]
fn an_edited_threshold_resets_the_counters_but_not_the_state() {
    let rules = |threshold| {
        vec![Rule {
            avoidance_threshold: 3,
            ..rule(
                "n/cpu",
                "cpu_total_usage",
                threshold,
                disabling_scheduling("close"),
            )
        }]
    };
    let mut node = Node::new(rules(4000.0), Vec::new());
    for _ in 0..4 {
        node.at(5000);
    }
    node.at(1000);
    assert_eq!(node.state("n/cpu"), RuleState::Cooling);
    node.engine.set_policy(policy(rules(3000.0)));
    node.at(3500);
    assert_eq!(
        node.state("n/cpu"),
        RuleState::Breached,
        "one breach while cooling"
    );
    assert_eq!(node.engine.reports().next().unwrap().breaches, 1);
}

#[test]
fn removing_a_rule_enables_scheduling_at_once_and_is_reported() {
    let rules = vec![rule(
        "n/cpu",
        "cpu_total_usage",
        4000.0,
        disabling_scheduling("close"),
    )];
    let mut node = Node::new(rules, Vec::new());
    node.at(5000);
    node.at(5000);
    assert_eq!(scheduling(&node).1, "n/cpu");
    node.engine.set_policy(policy(Vec::new()));
    node.step();
    assert_eq!(scheduling(&node).1, "enabled");
    let changes: Vec<_> = node
        .plan
        .transitions
        .iter()
        .map(|t| t.change.clone())
        .collect();
    assert_eq!(changes, [PlanChange::SchedulingEnabled]);
}

#[test]
fn an_unknown_metric_keeps_the_scheduling_state_for_a_limited_time() {
    let rules = vec![rule(
        "n/window",
        "cpu_usage_avg_5m",
        40.0,
        disabling_scheduling("close"),
    )];
    let mut node = Node::new(rules, Vec::new());
    node.engine = std::mem::take(&mut node.engine).with_unknown_limit(PERIOD * 2);
    let seen: Vec<_> = (0..4)
        .map(|_| {
            node.tick();
            scheduling(&node).1
        })
        .collect();
    assert_eq!(seen, ["hold", "hold", "enabled", "enabled"]);
}

#[test]
fn victims_are_ranked_by_the_resource_of_the_metric() {
    let mut pods = vec![with_memory("memory", 3), with_memory("cpu", 1)];
    pods[1].cpu = 3000;
    let mut node = Node::new(memory(8, eviction_action(1)), pods.clone());
    node.at_memory(12 * GIB);
    assert_eq!(names(&node), "memory");
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, eviction_action(1))];
    let mut node = Node::with(
        Arc::new(crate::engine_support::scenario::policy_set(rules)),
        pods,
    );
    node.at(5000);
    node.at(5000);
    assert_eq!(names(&node), "cpu");
}
