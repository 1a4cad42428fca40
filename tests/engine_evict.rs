//! Evictions, reclaim of page cache, and closing the node to new work.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;

use std::sync::Arc;
use std::time::Duration;

use engine_support::{
    GIB, Load, Node, PERIOD, action, closing, evicting, policy, rule, throttling,
};
use plimsoll::engine::plan::{Change, Feedback, RuleState, Scheduling, Spared};
use plimsoll::engine::pod::{Kept, PodUid};
use plimsoll::engine::policy::{Action, EvictionSpec, Rule, RuleId, TaintEffect};
use plimsoll::engine::units::Bytes;

fn memory(watermark: u64, action: Action) -> Vec<Rule> {
    vec![rule(
        "n/memory",
        "memory_total_usage",
        (watermark * GIB) as f64,
        action,
    )]
}

fn holding(uid: &str, gib: u64) -> Load {
    Load {
        held: gib * GIB,
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
        holding("a", 1),
        holding("b", 3),
        holding("c", 2),
        holding("d", 1),
    ];
    let mut node = Node::new(memory(8, evicting(10)), pods);
    node.holding(12 * GIB);
    assert_eq!(names(&node), "b c", "4.4 GiB, judged at the first look");
    let evict = &node.plan.evictions[0];
    assert_eq!(evict.grace, Duration::from_secs(5));
    assert_eq!(evict.rule, RuleId::from("n/memory"));
}

#[test]
fn a_round_is_capped_and_settles_before_the_next_begins() {
    let pods = vec![
        holding("a", 1),
        holding("b", 1),
        holding("c", 1),
        holding("d", 1),
    ];
    let mut node = Node::new(memory(8, evicting(2)), pods);
    node.holding(12 * GIB);
    assert_eq!(names(&node), "a b");
    node.holding(12 * GIB);
    assert_eq!(names(&node), "", "they are on their way out");
    gone(&mut node, "a");
    node.holding(12 * GIB);
    assert_eq!(names(&node), "", "b is not gone yet");
    node.engine.feedback(&Feedback::Gone {
        uid: PodUid::from("b"),
    });
    node.pods.retain(|load| load.pod.name != "b");
    node.holding(12 * GIB);
    assert_eq!(names(&node), "c d");
}

#[test]
fn no_rule_takes_more_in_a_round_than_its_own_action_says() {
    let mut rules = memory(6, evicting(1));
    rules.push(rule(
        "n/other",
        "memory_total_usage",
        (11 * GIB) as f64,
        evicting(3),
    ));
    let pods = ["a", "b", "c", "d"].map(|uid| holding(uid, 1));
    let mut node = Node::new(rules, pods.into());
    node.holding(12 * GIB);
    let taken: Vec<_> = node
        .plan
        .evictions
        .iter()
        .map(|e| e.rule.to_string())
        .collect();
    assert_eq!(
        taken,
        ["n/memory", "n/other"],
        "the gaps are 6.6 and 1.1 GiB"
    );
}

#[test]
fn a_round_is_over_a_minute_after_the_grace_period_and_failed_victims_do_not_count() {
    let mut node = Node::new(
        memory(8, evicting(1)),
        vec![holding("a", 1), holding("b", 1)],
    );
    let mut seen = Vec::new();
    for _ in 0..9 {
        node.holding(12 * GIB);
        seen.push(names(&node));
    }
    assert_eq!(
        seen,
        ["a", "", "", "", "", "", "", "a", ""],
        "5 s of grace and 60 s"
    );
}

#[test]
fn a_finished_pod_settles_its_round() {
    let mut node = Node::new(
        memory(8, evicting(1)),
        vec![holding("a", 1), holding("b", 1)],
    );
    node.holding(12 * GIB);
    node.pods[0].pod.running = false;
    node.set_pods();
    node.holding(12 * GIB);
    assert_eq!(names(&node), "b");
}

#[test]
fn a_refused_eviction_makes_room_for_the_next_candidate() {
    let mut node = Node::new(
        memory(8, evicting(1)),
        vec![holding("a", 1), holding("b", 1)],
    );
    node.holding(12 * GIB);
    let (uid, until) = (PodUid::from("a"), node.now + PERIOD * 3);
    node.engine
        .feedback(&Feedback::EvictionRefused { uid, until });
    node.holding(12 * GIB);
    assert_eq!(names(&node), "b");
    assert_eq!(node.spared(), [("a".to_owned(), Spared::BackingOff)]);
    gone(&mut node, "b");
    node.holding(12 * GIB);
    assert_eq!(names(&node), "");
    node.holding(12 * GIB);
    assert_eq!(names(&node), "a");
}

#[test]
fn terminating_pods_count_as_released() {
    let mut pods = vec![holding("a", 1), holding("b", 4)];
    pods[1].pod.terminating = true;
    let mut node = Node::new(memory(8, evicting(9)), pods);
    node.holding(11 * GIB);
    assert_eq!(names(&node), "");
    node.holding(12 * GIB);
    assert_eq!(names(&node), "a", "the gap is 4.4 GiB");
}

#[test]
fn what_the_throttle_releases_need_not_be_evicted() {
    let both = |gap: f64| {
        let action = Action {
            throttle: throttling(10, 50).throttle,
            ..evicting(9)
        };
        let rules = vec![rule("n/cpu", "cpu_total_usage", 6000.0 - gap / 1.1, action)];
        let mut node = Node::new(rules, vec![Load::new("a", 2000), Load::new("b", 1000)]);
        node.at(6000);
        node.at(6000);
        (node.ratios().len(), names(&node))
    };
    assert_eq!(both(1400.0), (2, String::new()));
    assert_eq!(both(1600.0), (2, "a".to_owned()));
    assert_eq!(
        both(2600.0),
        (2, "a b".to_owned()),
        "a gives 1000 more, and that is too little"
    );
}

#[test]
fn the_pods_that_are_never_evicted_are_told_with_the_reason() {
    let mut pods: Vec<_> = ["a", "b", "c", "d", "e", "f"]
        .map(|uid| holding(uid, 1))
        .into();
    pods[0].pod.kept = Some(Kept::DaemonSet);
    pods[1].pod.owned = false;
    pods[2].pod.protected = true;
    pods[3].pod.terminating = true;
    pods[4].held = 0;
    let mut node = Node::new(memory(8, evicting(9)), pods);
    node.holding(30 * GIB);
    assert_eq!(names(&node), "f");
    let expected = [
        ("a", Spared::Kept),
        ("b", Spared::Unowned),
        ("c", Spared::Protected),
        ("d", Spared::NotRunning),
        ("e", Spared::UsesLittle),
    ];
    assert_eq!(
        node.spared(),
        expected.map(|(uid, why)| (uid.to_owned(), why))
    );
}

#[test]
fn unowned_pods_are_evicted_where_the_action_says_so() {
    let mut pods = vec![holding("a", 1)];
    pods[0].pod.owned = false;
    let spec = EvictionSpec {
        grace: None,
        max_pods_per_round: 1,
        evict_unowned: true,
    };
    let action = Action {
        eviction: Some(spec),
        ..evicting(1)
    };
    let mut node = Node::new(memory(8, action), pods);
    node.holding(12 * GIB);
    assert_eq!(names(&node), "a");
    assert_eq!(
        node.plan.evictions[0].grace,
        Duration::from_secs(30),
        "the pod's own"
    );
}

#[test]
fn a_grace_of_nothing_is_a_second() {
    let mut pods = vec![holding("a", 1)];
    pods[0].pod.grace = Duration::ZERO;
    let mut action = evicting(1);
    action.eviction.as_mut().unwrap().grace = None;
    let mut node = Node::new(memory(8, action), pods);
    node.holding(12 * GIB);
    assert_eq!(node.plan.evictions[0].grace, Duration::from_secs(1));
}

#[test]
fn a_metric_without_a_unit_of_release_evicts_one_pod_a_round() {
    let rules = vec![
        rule("n/load", "cpu_load_1_min", 4.0, evicting(5)),
        rule("n/load-5", "cpu_load_5_min", 4.0, evicting(5)),
    ];
    let mut node = Node::new(rules, vec![Load::new("a", 500), Load::new("b", 900)]);
    let mut seen = Vec::new();
    for _ in 0..3 {
        node.pass(PERIOD);
        node.sample.node.load = Some([9.0; 3]);
        node.step();
        seen.push(names(&node));
    }
    assert_eq!(seen, ["", "b", ""]);
}

#[test]
fn groups_of_rules_have_rounds_of_their_own_and_never_take_one_pod_twice() {
    let mut rules = memory(8, evicting(1));
    rules.push(rule("n/cpu", "cpu_total_usage", 1000.0, evicting(1)));
    let mut node = Node::new(rules, vec![holding("a", 1), holding("b", 1)]);
    node.cpu = 4000;
    node.memory = 12 * GIB;
    node.tick();
    assert_eq!(
        names(&node),
        "a",
        "only memory can be judged at the first look"
    );
    node.tick();
    assert_eq!(names(&node), "b");
}

#[test]
fn page_cache_is_reclaimed_until_the_gap_is_covered() {
    let gc = Action {
        force_gc: true,
        ..action("gc")
    };
    let cached = |uid: &str, held, cache| Load {
        cache: cache * GIB,
        ..holding(uid, held)
    };
    let pods = vec![
        cached("a", 3, 2),
        cached("b", 2, 9),
        cached("c", 1, 1),
        cached("d", 9, 0),
    ];
    let mut node = Node::new(memory(8, gc), pods);
    node.holding(12 * GIB);
    let amounts: Vec<_> = node
        .plan
        .reclaims
        .iter()
        .map(|reclaim| (reclaim.uid.to_string(), reclaim.amount))
        .collect();
    // The gap is 4.4 GiB.
    let rest = Bytes(4_724_464_026 - 2 * GIB);
    assert_eq!(
        amounts,
        [("a".to_owned(), Bytes(2 * GIB)), ("b".to_owned(), rest)]
    );
    assert!(
        node.plan
            .transitions
            .iter()
            .any(|t| matches!(t.change, Change::Reclaim { .. }))
    );
    node.holding(7 * GIB);
    assert_eq!(node.plan.reclaims, []);
}

#[test]
fn a_metric_without_a_unit_of_release_reclaims_from_one_pod_a_round_in_turn() {
    let gc = Action {
        force_gc: true,
        ..action("gc")
    };
    let rules = vec![rule("n/io", "disk_read_iops", 4.0, gc)];
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
    let mut reads = 0;
    let loads = [1000, 1000, 1000, 1000, 0, 0, 0, 1000, 1000];
    for load in loads {
        node.pass(PERIOD);
        reads += load;
        node.sample.node.disks = vec![plimsoll::engine::sample::DiskSample {
            device: "vda".into(),
            reads,
            ..Default::default()
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
    let [(first, busy), (calm, again)] = [taken[..4].split_at(1), taken[4..].split_at(3)];
    assert!(first.iter().chain(calm).all(Vec::is_empty), "{taken:?}");
    assert_eq!(busy, [a(), d(), a()]);
    assert_eq!(
        again,
        [a(), d()],
        "from the first of the order once the rule was calm"
    );
}

fn scheduling(node: &Node) -> (Option<TaintEffect>, String) {
    match &node.plan.scheduling {
        Scheduling::Disabled { effect, rules } => {
            let ids: Vec<_> = rules.iter().map(ToString::to_string).collect();
            (Some(*effect), ids.join(" "))
        }
        Scheduling::Enabled => (None, "enabled".to_owned()),
        Scheduling::Hold => (None, "hold".to_owned()),
    }
}

#[test]
fn the_node_is_closed_while_any_rule_needs_it_with_the_strongest_effect() {
    let soft = Action {
        scheduling: Some(TaintEffect::PreferNoSchedule),
        ..closing("soft")
    };
    let rules = vec![
        rule("n/high", "cpu_total_usage", 6000.0, closing("hard")),
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
    assert!(changes.contains(&&Change::SchedulingEnabled));
}

#[test]
fn an_edited_mark_starts_the_counters_anew_and_leaves_the_state() {
    let rules = |watermark| {
        vec![Rule {
            avoidance_threshold: 3,
            ..rule("n/cpu", "cpu_total_usage", watermark, closing("close"))
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
fn the_end_of_a_rule_opens_the_node_at_once_and_is_told() {
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, closing("close"))];
    let mut node = Node::new(rules, Vec::new());
    node.at(5000);
    node.at(5000);
    assert_eq!(scheduling(&node).1, "n/cpu");
    node.engine.set_policy(policy(Vec::new()));
    node.step();
    assert_eq!(scheduling(&node).1, "enabled");
    let told: Vec<_> = node
        .plan
        .transitions
        .iter()
        .map(|t| t.change.clone())
        .collect();
    assert_eq!(told, [Change::SchedulingEnabled]);
}

#[test]
fn a_metric_that_is_not_known_holds_the_node_for_a_limited_time_only() {
    let rules = vec![rule("n/window", "cpu_usage_avg_5m", 40.0, closing("close"))];
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
fn the_order_of_evictions_is_by_the_resource_that_is_short() {
    let mut pods = vec![holding("memory", 3), holding("cpu", 1)];
    pods[1].cpu = 3000;
    let mut node = Node::new(memory(8, evicting(1)), pods.clone());
    node.holding(12 * GIB);
    assert_eq!(names(&node), "memory");
    let rules = vec![rule("n/cpu", "cpu_total_usage", 4000.0, evicting(1))];
    let mut node = Node::with(Arc::new(engine_support::scenario::set(rules)), pods);
    node.at(5000);
    node.at(5000);
    assert_eq!(names(&node), "cpu");
}
