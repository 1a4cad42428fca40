//! Resuming from the state of the previous process.

use std::sync::Arc;

use crate::engine_support::{
    GIB, Load, Node, PERIOD, disabling_scheduling, eviction_action, policy, restart, rule,
    scenario, throttling,
};
use jiff::Timestamp;
use plimsoll::engine::metric::Metric;
use plimsoll::engine::plan::{PlanChange, RuleState, Scheduling, Transition};
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::policy::{Action, Rule, RuleId, Strategy};
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::engine::{AdoptedThrottle, Engine, EngineState};

fn rules() -> Vec<Rule> {
    let action = Action {
        scheduling: disabling_scheduling("x").scheduling,
        ..throttling(10, 30)
    };
    vec![rule("n/cpu", "cpu_total_usage", 4000.0, action)]
}

fn hot() -> Node {
    let mut node = Node::new(rules(), vec![Load::new("a", 3000)]);
    for _ in 0..3 {
        node.at(6000);
    }
    assert_eq!(node.ratios(), [("a".to_owned(), 40)]);
    node
}

fn throttle(rule: &str) -> AdoptedThrottle {
    AdoptedThrottle {
        uid: PodUid::from("a"),
        rule: RuleId::from(rule),
        ratio: 40,
        idle: false,
        burst: MilliCpu::ZERO,
        target_cgroups: vec![(Arc::from(""), MilliCpu(3000), Quota::Unlimited)],
    }
}

fn ratio(node: &Node) -> Option<u8> {
    node.ratios().first().map(|(_, ratio)| *ratio)
}

#[test]
fn a_breached_rule_resumes_where_it_was() {
    let mut node = hot();
    restart(&mut node, scenario::policy_set(rules()));
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    node.at(6000);
    assert_eq!(node.plan.transitions, [], "resuming is not reported");
    assert_eq!(ratio(&node), Some(40), "the first sample has no rate");
    assert!(
        matches!(node.plan.scheduling, Scheduling::Disabled { .. }),
        "at once"
    );
    node.at(6000);
    assert_eq!(ratio(&node), Some(10));
    assert_eq!(node.quotas("a"), [Some(300)], "from the journal's base");
    assert_eq!(node.plan.transitions.len(), 1, "only the step is reported");
}

/// The actions of a Preview are not persisted.
#[test]
fn a_preview_reports_disabled_scheduling_again_after_a_restart() {
    let preview = || {
        let mut rules = rules();
        rules[0].strategy = Strategy::Preview;
        rules
    };
    let mut node = Node::new(preview(), vec![Load::new("a", 3000)]);
    for _ in 0..3 {
        node.at(6000);
    }
    restart(&mut node, scenario::policy_set(preview()));
    node.at(6000);
    let disables_scheduling =
        |it: &Transition| matches!(it.change, PlanChange::SchedulingDisabled { .. });
    assert!(
        node.plan
            .transitions
            .iter()
            .any(|it| it.would && disables_scheduling(it))
    );
}

/// Two breaches are counted, and a reboot forgets only what was in force.
#[test]
fn what_a_preview_would_have_done_is_resumed_for_the_same_thresholds() {
    let preview = |threshold: f64| {
        let mut rules = rules();
        rules[0].strategy = Strategy::Preview;
        (rules[0].threshold, rules[0].restore_value) = (threshold, threshold);
        rules
    };
    let would = |engine: &Engine| engine.reports().next().unwrap().would;
    let mut node = Node::new(preview(4000.0), vec![Load::new("a", 3000)]);
    let start: Timestamp = "2026-11-21T16:00:00Z".parse().unwrap();
    node.time = Some(start);
    let mut active = 0;
    for breach in 1..=2 {
        for cpu in [6000; 3].into_iter().chain([1000; 12]) {
            node.at(cpu);
            active += u32::from(node.state("n/cpu") != RuleState::Normal);
        }
        assert_eq!(node.state("n/cpu"), RuleState::Normal);
        assert_eq!(would(&node.engine).unwrap().counts.breaches, breach);
    }
    let report = would(&node.engine).unwrap();
    assert_eq!(report.since, start + PERIOD);
    assert_eq!(report.counts.active, PERIOD * active);
    assert!(report.counts.throttle_rounds >= 2, "{report:?}");
    restart(&mut node, scenario::policy_set(preview(4000.0)));
    assert_eq!(would(&node.engine), Some(report));
    node.at(6000);
    node.at(6000);
    let report = would(&node.engine);
    assert_eq!(report.unwrap().counts.breaches, 3);
    let mut rebooted = Engine::new();
    rebooted.set_policy(policy(preview(4000.0)));
    rebooted.adopt(node.now, &node.engine.state().after_reboot(), &[]);
    assert_eq!(would(&rebooted), report);
    let states = rebooted.reports().map(|report| report.state);
    assert_eq!(states.collect::<Vec<_>>(), [RuleState::Normal]);
    restart(&mut node, scenario::policy_set(preview(5000.0)));
    assert_eq!(would(&node.engine), None, "an edit starts over");
    rebooted.set_policy(policy(preview(5000.0)));
    assert_eq!(would(&rebooted), None);
}

#[test]
fn counters_for_other_thresholds_are_not_resumed() {
    let with = |edit: fn(&mut Rule)| {
        let mut rules = rules();
        rules[0].avoidance_threshold = 3;
        edit(&mut rules[0]);
        rules
    };
    let breaches = |edit: fn(&mut Rule)| {
        let mut node = Node::new(with(|_| {}), vec![Load::new("a", 3000)]);
        for _ in 0..3 {
            node.at(6000);
        }
        let report = node.engine.reports().next().unwrap();
        assert_eq!(report.breaches, 2, "the first sample has no rate");
        restart(&mut node, scenario::policy_set(with(edit)));
        node.engine.reports().next().unwrap().breaches
    };
    assert_eq!(breaches(|_| {}), 2, "the same rule resumes");
    assert_eq!(
        breaches(|rule| rule.restore_threshold = 7),
        2,
        "other counts, same thresholds"
    );
    assert_eq!(breaches(|rule| rule.threshold = 5000.0), 0);
    assert_eq!(breaches(|rule| rule.restore_value = 1.5), 0);
    assert_eq!(breaches(|rule| rule.metric = Metric::CpuUtilization), 0);
}

#[test]
fn a_breached_rule_with_edited_thresholds_stays_breached_over_a_restart() {
    let mut node = hot();
    let mut edited = rules();
    edited[0].threshold = 5000.0;
    edited[0].restore_value = 5000.0;
    restart(&mut node, scenario::policy_set(edited));
    assert_eq!(node.state("n/cpu"), RuleState::Breached);
    assert_eq!(ratio(&node), Some(40));
}

/// An edit while the agent is down is like one while it is up: a relapse is one of the same thresholds.
#[test]
fn what_was_learned_of_relapses_is_resumed_for_the_same_thresholds_only() {
    let doublings = |threshold: f64| {
        let node = hot();
        let mut state = serde_json::to_value(node.engine.state()).unwrap();
        state["rules"][0]["doublings"] = 3.into();
        let mut edited = rules();
        edited[0].threshold = threshold;
        let mut engine = Engine::new();
        engine.set_policy(Arc::new(scenario::policy_set(edited)));
        engine.adopt(node.now, &serde_json::from_value(state).unwrap(), &[]);
        let resumed = serde_json::to_value(engine.state()).unwrap();
        resumed["rules"][0]["doublings"].clone()
    };
    assert_eq!(doublings(rules()[0].threshold), 3);
    assert_eq!(doublings(5000.0), 0);
}

type Disturbance<'a> = &'a dyn Fn(&mut Node);

/// One sample says little about a load of which nothing was known for a while, or that is compared with another value.
#[test]
fn after_a_pause_or_an_edit_a_rule_in_force_acts_on_pods_only_after_breaches_in_a_row() {
    let with_threshold = |threshold: f64| {
        let mut rules = rules();
        rules[0].avoidance_threshold = 2;
        rules[0].threshold = threshold;
        rules[0].restore_value = threshold;
        rules[0].restore_threshold = 6;
        rules
    };
    let edit = |node: &mut Node| node.engine.set_policy(policy(with_threshold(4500.0)));
    let suspend = |node: &mut Node| node.now = node.now + PERIOD * 360;
    let stop_for_an_hour = |node: &mut Node| {
        node.now = node.now + PERIOD * 360;
        restart(node, scenario::policy_set(with_threshold(4000.0)));
    };
    let stop_for_a_moment =
        |node: &mut Node| restart(node, scenario::policy_set(with_threshold(4000.0)));
    let interrupt = |node: &mut Node| {
        edit(node);
        node.at(6000);
        node.at(1000);
    };
    let edit_the_count = |node: &mut Node| {
        let mut rules = with_threshold(4000.0);
        rules[0].avoidance_threshold = 9;
        node.engine.set_policy(policy(rules));
    };
    // How many evaluations above the threshold until the next step.
    let cases: [(Disturbance<'_>, usize); 7] = [
        (&|_| {}, 1),
        (&edit, 2),
        (&suspend, 2),
        (&stop_for_an_hour, 2),
        (&stop_for_a_moment, 1),
        (&interrupt, 2),
        (&edit_the_count, 1),
    ];
    for (index, (disturb, expected)) in cases.into_iter().enumerate() {
        let mut node = Node::new(with_threshold(4000.0), vec![Load::new("a", 3000)]);
        for _ in 0..3 {
            node.at(6000);
        }
        assert_eq!(ratio(&node), Some(70));
        disturb(&mut node);
        let mut evaluations = 0;
        while ratio(&node) != Some(40) {
            node.at(6000);
            assert_eq!(node.state("n/cpu"), RuleState::Breached, "case {index}");
            let report = node.engine.reports().next().unwrap();
            evaluations += usize::from(report.value.is_some());
        }
        assert_eq!(evaluations, expected, "case {index}");
    }
}

/// Restarts after `absence` periods, and returns whether scheduling is disabled after each evaluation with these usages.
fn scheduling_after(absence: u32, usages: &[u64]) -> (Node, Vec<Option<bool>>) {
    let mut rules = rules();
    rules[0].avoidance_threshold = 2;
    let mut node = Node::new(rules.clone(), vec![Load::new("a", 3000)]);
    for _ in 0..3 {
        node.at(6000);
    }
    node.now = node.now + PERIOD * absence;
    restart(&mut node, scenario::policy_set(rules.clone()));
    let mut seen = Vec::new();
    for (index, usage) in usages.iter().enumerate() {
        node.at(*usage);
        seen.push(match node.plan.scheduling {
            Scheduling::Unchanged => None,
            Scheduling::Enabled => Some(false),
            Scheduling::Disabled { .. } => Some(true),
        });
        if index == 0 {
            // It is outdated after a second restart as well.
            restart(&mut node, scenario::policy_set(rules.clone()));
        }
    }
    (node, seen)
}

/// The controller removes the taint of a node whose agent is away; an old state must not set it again.
#[test]
fn after_a_long_absence_only_a_new_breach_disables_scheduling() {
    let hot = [6000; 5];
    let (node, seen) = scheduling_after(360, &hot);
    // The first two have no rate, and two breaches are needed.
    assert_eq!(seen, [None, None, None, Some(true), Some(true)]);
    assert_eq!(ratio(&node), Some(10), "it is throttled further");
    let (node, seen) = scheduling_after(360, &[1000, 1000, 1000, 1000]);
    assert_eq!(seen, [None, None, Some(false), Some(false)]);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    assert_eq!(ratio(&node), None, "what was in force is restored");
    let (_, seen) = scheduling_after(1, &hot);
    assert_eq!(seen, [Some(true); 5], "a short absence");
}

#[test]
fn quiet_evaluations_are_counted_on_over_a_restart() {
    let mut rules = rules();
    rules[0].restore_threshold = 6;
    let mut node = Node::new(rules.clone(), vec![Load::new("a", 3000)]);
    for _ in 0..2 {
        node.at(6000);
    }
    for _ in 0..5 {
        node.at(1000);
    }
    restart(&mut node, scenario::policy_set(rules));
    node.at(1000);
    assert_eq!(node.state("n/cpu"), RuleState::Breached, "no rate yet");
    node.at(1000);
    let message = "after six quiet evaluations, and its cool-down";
    assert_eq!(node.state("n/cpu"), RuleState::Normal, "{message}");
}

#[test]
fn a_cool_down_continues_over_a_restart() {
    let mut node = hot();
    node.at(1000);
    restart(&mut node, scenario::policy_set(rules()));
    node.at(1000);
    assert_eq!(node.state("n/cpu"), RuleState::Cooling);
    node.at(1000);
    assert_eq!(node.state("n/cpu"), RuleState::Normal);
    assert_eq!(ratio(&node), Some(70));
}

#[test]
fn a_throttle_of_a_removed_rule_is_restored_step_by_step() {
    for set in [
        policy(Vec::new()),
        policy(vec![Rule {
            strategy: Strategy::Preview,
            ..rules().remove(0)
        }]),
    ] {
        let mut node = hot();
        restart(&mut node, (*set).clone());
        let steps: Vec<_> = (0..4)
            .map(|_| {
                node.at(6000);
                ratio(&node)
            })
            .collect();
        assert_eq!(steps, [Some(70), None, None, None]);
    }
}

#[test]
fn a_restore_keeps_its_pace_over_a_restart() {
    let mut node = hot();
    node.engine.set_policy(policy(Vec::new()));
    node.advance(PERIOD / 2);
    node.step();
    restart(&mut node, (*policy(Vec::new())).clone());
    node.step();
    assert_eq!(ratio(&node), Some(40), "not due yet");
    node.advance(PERIOD / 2);
    node.step();
    assert_eq!(ratio(&node), Some(70));
}

#[test]
fn a_throttle_missing_in_the_state_stays_until_the_metric_is_quiet() {
    let mut node = Node::new(rules(), vec![Load::new("a", 3000)]);
    node.engine
        .adopt(node.now, &EngineState::default(), &[throttle("n/cpu")]);
    node.at(3000);
    assert_eq!(ratio(&node), Some(40), "not evaluated yet");
    assert_eq!(node.plan.scheduling, Scheduling::Unchanged);
    node.at(3000);
    assert_eq!(ratio(&node), Some(70));
    assert_eq!(node.plan.scheduling, Scheduling::Enabled);
    node.at(6000);
    assert_eq!(ratio(&node), Some(40));
}

#[test]
fn a_throttle_of_a_pod_that_is_gone_is_dropped() {
    let mut node = Node::new(rules(), vec![Load::new("b", 3000)]);
    node.engine
        .adopt(node.now, &EngineState::default(), &[throttle("n/cpu")]);
    node.at(3000);
    assert_eq!(ratio(&node), None);
}

#[test]
fn a_claim_that_was_never_applied_is_dropped() {
    let mut node = hot();
    let state = node.engine.state();
    node.engine = Engine::new();
    node.engine.set_policy(policy(rules()));
    node.set_pods();
    node.engine.adopt(node.now, &state, &[]);
    node.at(6000);
    assert_eq!(ratio(&node), None);
}

#[test]
fn the_claims_of_all_rules_on_a_pod_are_resumed() {
    let mut both = rules();
    both.push(rule(
        "n/other",
        "cpu_total_usage",
        5000.0,
        throttling(10, 20),
    ));
    let mut node = Node::new(both.clone(), vec![Load::new("a", 3000)]);
    node.at(6000);
    node.at(6000);
    restart(&mut node, scenario::policy_set(both[1..].to_vec()));
    let mut seen = Vec::new();
    for _ in 0..4 {
        node.at(6000);
        seen.push(ratio(&node));
    }
    assert_eq!(
        seen.last(),
        Some(&Some(20)),
        "only the removed rule is restored: {seen:?}"
    );
}

#[test]
fn a_round_of_evictions_settles_over_a_restart() {
    let rules = || {
        vec![rule(
            "n/memory",
            "memory_total_usage",
            8.0 * GIB as f64,
            eviction_action(1),
        )]
    };
    let pods = ["a", "b"].map(|uid| Load {
        unreclaimable: GIB,
        ..Load::new(uid, 100)
    });
    let mut node = Node::new(rules(), pods.into());
    node.at_memory(12 * GIB);
    assert_eq!(node.evicted(), ["a"]);
    restart(&mut node, scenario::policy_set(rules()));
    node.at_memory(12 * GIB);
    assert_eq!(node.evicted(), Vec::<String>::new());
    node.advance(PERIOD * 6);
    node.step();
    assert_eq!(
        node.evicted(),
        Vec::<String>::new(),
        "a gap: the sample is not counted"
    );
    node.at_memory(12 * GIB);
    assert_eq!(node.evicted(), ["a"], "65 s have passed");
}

#[test]
fn a_refused_eviction_is_remembered_over_a_restart() {
    use plimsoll::engine::plan::Feedback;
    let rules = || {
        vec![rule(
            "n/memory",
            "memory_total_usage",
            8.0 * GIB as f64,
            eviction_action(1),
        )]
    };
    let pod = Load {
        unreclaimable: GIB,
        ..Load::new("a", 100)
    };
    let mut node = Node::new(rules(), vec![pod]);
    node.at_memory(12 * GIB);
    let (uid, until) = (PodUid::from("a"), node.now + PERIOD * 2);
    node.engine
        .feedback(&Feedback::EvictionRefused { uid, until });
    restart(&mut node, scenario::policy_set(rules()));
    node.at_memory(12 * GIB);
    assert_eq!(node.evicted(), Vec::<String>::new());
    node.at_memory(12 * GIB);
    assert_eq!(node.evicted(), ["a"]);
}

#[test]
fn a_state_with_missing_and_unknown_fields_is_accepted() {
    let state: EngineState = serde_json::from_str(r#"{"later": 1}"#).unwrap();
    assert_eq!(state, EngineState::default());
}

#[test]
fn a_claim_of_an_earlier_state_resumes_without_its_period() {
    let state = hot().engine.state();
    let mut earlier = serde_json::to_value(&state).unwrap();
    earlier["claims"][0]["period"] = serde_json::json!({"secs": 10, "nanos": 0});
    assert_eq!(
        serde_json::from_value::<EngineState>(earlier).unwrap(),
        state
    );
}
