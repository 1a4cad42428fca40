//! What holds over any history of any node.
#![allow(clippy::unwrap_used, reason = "a helper of a test may fail it")]

mod engine_support;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use engine_support::scenario::{Beat, Fault, beat, loads, play, prepare, rules, set};
use engine_support::{Load, Node, PERIOD, policy};
use plimsoll::engine::RuleReport;
use plimsoll::engine::plan::{Change, Plan, RuleState, Scheduling, Transition};
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::policy::{Rule, RuleId, Strategy as Acting};
use plimsoll::engine::units::{MilliCpu, Quota};
use proptest::collection::vec;
use proptest::prelude::*;

fn reports(node: &Node) -> BTreeMap<RuleId, RuleReport> {
    let reports = node.engine.reports();
    reports.map(|report| (report.id.clone(), report)).collect()
}

fn find<'a>(node: &'a Node, uid: &PodUid) -> &'a Load {
    node.pods.iter().find(|load| load.pod.uid == *uid).unwrap()
}

/// I2: floor <= ours <= original.
fn quotas_are_between_floor_and_original(node: &Node) {
    for throttle in &node.plan.throttles {
        let load = find(node, &throttle.uid);
        assert!(
            throttle.ratio < 100 || throttle.idle,
            "restored pods are not listed"
        );
        for lever in &throttle.levers {
            assert!(lever.base <= load.quota.min_usage(MilliCpu(u64::MAX)));
            let Some(ours) = lever.quota else { continue };
            assert!(ours >= MilliCpu(10), "{throttle:?}");
            assert!(ours >= load.pod.cpu_request, "{throttle:?}");
            assert!(ours >= lever.base.percent(throttle.ratio), "{throttle:?}");
            if let Quota::Limit(original) = load.quota {
                assert!(ours < original, "{throttle:?} {original}");
            }
        }
    }
}

/// The pod that a transition takes something from.
fn harmed(transition: &Transition) -> Option<&PodUid> {
    match &transition.change {
        Change::Throttle {
            pod,
            from,
            to,
            idle,
            ..
        } => (to < from || (*idle && to == from)).then_some(pod),
        Change::Evict { pod, .. } | Change::Reclaim { pod, .. } => Some(pod),
        _ => None,
    }
}

/// I5: nothing destructive rests on a sample that is missing, old or nonsense; nor is it done to the wrong pods.
fn harm_is_done_on_fresh_facts_only(node: &Node) {
    let reports = reports(node);
    for transition in &node.plan.transitions {
        let Some(uid) = harmed(transition) else {
            continue;
        };
        let report = &reports[&transition.rule];
        assert_eq!(report.unknown, None, "{transition:?}");
        assert!(report.value.unwrap() > report.watermark, "{transition:?}");
        assert_eq!(report.state, RuleState::Breached, "{transition:?}");
        let sample = node.sample.pods.iter().find(|pod| pod.uid == *uid).unwrap();
        assert!(node.now.since(sample.at) <= Duration::from_mins(1));
        let pod = &find(node, uid).pod;
        assert!(pod.running && !pod.protected, "{transition:?}");
        let owned = pod.owned || !matches!(transition.change, Change::Evict { .. });
        assert!(owned, "{transition:?}");
    }
}

/// I6: closed exactly while a rule in force needs it.
fn scheduling_is_closed_exactly_while_a_rule_needs_it(node: &Node, rules: &[Rule]) {
    let reports = reports(node);
    let needs = |rule: &&Rule| {
        rule.strategy == Acting::Enforce
            && rule.action.scheduling.is_some()
            && reports[&rule.id].state != RuleState::Normal
    };
    let needed: Vec<_> = rules.iter().filter(needs).map(|r| r.id.clone()).collect();
    match &node.plan.scheduling {
        Scheduling::Disabled { rules, .. } => assert_eq!(*rules, needed),
        Scheduling::Enabled | Scheduling::Hold => assert_eq!(needed, []),
    }
}

fn preview_touches_nothing(node: &Node, rules: &[Rule]) {
    let preview = |id: &RuleId| {
        let rule = rules.iter().find(|rule| rule.id == *id).unwrap();
        rule.strategy == Acting::Preview
    };
    assert!(node.plan.throttles.iter().all(|t| !preview(&t.rule)));
    assert!(node.plan.evictions.iter().all(|e| !preview(&e.rule)));
    assert!(node.plan.reclaims.iter().all(|r| !preview(&r.rule)));
    let transitions = &node.plan.transitions;
    assert!(transitions.iter().all(|t| t.would == preview(&t.rule)));
}

/// Every step is told: whoever adds the transitions up knows what is in force.
fn transitions_add_up(node: &Node, told: &mut BTreeMap<PodUid, BTreeMap<RuleId, (u8, bool)>>) {
    for transition in node.plan.transitions.iter().filter(|t| !t.would) {
        if let Change::Throttle {
            pod,
            from,
            to,
            idle,
            ..
        } = &transition.change
        {
            let claims = told.entry(pod.clone()).or_default();
            let before = claims.insert(transition.rule.clone(), (*to, *idle));
            assert_eq!(before.unwrap_or((100, false)).0, *from, "{transition:?}");
        }
    }
    let listed = |uid: &PodUid| node.plan.throttles.iter().find(|t| t.uid == *uid);
    for load in &node.pods {
        let claims = told
            .get(&load.pod.uid)
            .into_iter()
            .flat_map(BTreeMap::values);
        let depth = claims.fold((100, false), |depth, claim| {
            (depth.0.min(claim.0), depth.1 || claim.1)
        });
        let throttle = listed(&load.pod.uid).map_or((100, false), |t| (t.ratio, t.idle));
        assert_eq!(throttle, depth, "{}", load.pod.uid);
    }
}

/// With quiet metrics, or without rules, everything is back and told within this time.
fn time_to_restore(rules: &[Rule]) -> Duration {
    let of = |rule: &Rule| {
        let step = rule.action.throttle.map_or(100, |spec| spec.step);
        let steps = 100_u32.div_ceil(u32::from(step)) + 1 + rule.restore_threshold;
        // A throttle that came right back is held up to 8 times as long.
        let doubled = if rule.action.throttle.is_some() { 8 } else { 1 };
        rule.period * (steps + 3) + rule.action.cool_down * doubled
    };
    rules.iter().map(of).max().unwrap_or_default()
}

fn quiet() -> Beat {
    Beat {
        cpu: 100,
        memory: 0,
        load: 0.0,
        fault: Fault::None,
    }
}

fn assert_calm(node: &mut Node) {
    for _ in 0..4 {
        play(node, &quiet());
        if node.plan.evaluated {
            assert_eq!(node.plan.throttles, []);
            assert_eq!(node.plan.scheduling, Scheduling::Enabled);
            assert_eq!(node.plan.transitions, []);
        }
    }
}

fn restored(node: &mut Node, rules: &[Rule]) {
    let periods = time_to_restore(rules).as_secs().div_ceil(PERIOD.as_secs());
    for _ in 0..periods {
        play(node, &quiet());
    }
    assert_calm(node);
}

fn case() -> impl Strategy<Value = (Vec<Rule>, Vec<Load>, Vec<Beat>)> {
    (rules(), loads(), vec(beat(), 1..30))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn every_step_keeps_the_invariants((rules, loads, beats) in case()) {
        let mut node = Node::with(Arc::new(set(rules.clone())), loads);
        let mut told = BTreeMap::new();
        for beat in &beats {
            play(&mut node, beat);
            if !node.plan.evaluated {
                continue;
            }
            quotas_are_between_floor_and_original(&node);
            harm_is_done_on_fresh_facts_only(&node);
            scheduling_is_closed_exactly_while_a_rule_needs_it(&node, &rules);
            preview_touches_nothing(&node, &rules);
            transitions_add_up(&node, &mut told);
        }
    }

    #[test]
    fn quiet_metrics_put_everything_back((rules, loads, beats) in case()) {
        let mut node = Node::with(Arc::new(set(rules.clone())), loads);
        for beat in &beats {
            play(&mut node, beat);
        }
        restored(&mut node, &rules);
    }

    #[test]
    fn without_rules_everything_is_put_back_whatever_the_metrics_say(
        (rules, loads, beats) in case()
    ) {
        let mut node = Node::with(Arc::new(set(rules.clone())), loads);
        for beat in &beats {
            play(&mut node, beat);
        }
        node.engine.set_policy(policy(Vec::new()));
        let periods = time_to_restore(&rules).as_secs().div_ceil(PERIOD.as_secs());
        let hot = Beat { cpu: 8000, memory: 0, load: 50.0, fault: Fault::None };
        for _ in 0..periods {
            play(&mut node, &hot);
        }
        prop_assert_eq!(node.engine.next_due(), None);
        prop_assert_eq!(&node.plan.throttles, &[]);
        prop_assert_eq!(&node.plan.scheduling, &Scheduling::Enabled);
    }

    #[test]
    fn the_order_and_duplication_of_objects_changes_nothing(
        (rules, loads, beats) in case(), seed in any::<u64>()
    ) {
        let mut node = Node::with(Arc::new(set(rules.clone())), loads.clone());
        let mut shuffled_rules = [rules.clone(), rules].concat();
        shuffle(&mut shuffled_rules, seed);
        let mut other = Node::with(Arc::new(set(shuffled_rules)), loads);
        for (round, beat) in beats.iter().enumerate() {
            prepare(&mut node, beat);
            prepare(&mut other, beat);
            let pods = other.sample.pods.clone();
            other.sample.pods.extend(pods);
            shuffle(&mut other.sample.pods, seed ^ round as u64);
            let mut facts: Vec<_> = [&other.pods[..], &other.pods[..]].concat();
            shuffle(&mut facts, seed ^ round as u64);
            let facts = facts.into_iter().map(|load| Arc::new(load.pod));
            other.engine.set_pods(facts.collect());
            prop_assert_eq!(node.step(), other.step());
        }
    }

    #[test]
    fn a_gap_is_never_covered_by_more_victims_than_it_takes(
        loads in loads(), cpu in 4001_u64..8000, min in 0_u8..60, step in 1_u8..60
    ) {
        let rule = engine_support::rule(
            "n/cpu", "cpu_total_usage", 4000.0, engine_support::throttling(min, step),
        );
        let mut node = Node::with(Arc::new(set(vec![rule])), loads);
        let gap = ((cpu - 4000) as f64 * 1.1).round();
        let mut passed_over = BTreeSet::new();
        node.at(cpu);
        for _ in 0..6 {
            node.at(cpu);
            let (stepped, releases) = steps(&node.plan);
            if let Some((_, others)) = releases.split_last() {
                prop_assert!((others.iter().sum::<u64>() as f64) < gap, "one victim too many");
            }
            passed_over.extend(node.spared().into_iter().map(|(uid, _)| uid));
            let covered = releases.iter().sum::<u64>() as f64 >= gap;
            let tried = |uid: &String| stepped.contains(uid) || passed_over.contains(uid);
            prop_assert!(covered || node.pods.iter().all(|load| tried(&load.pod.name)));
        }
    }

    #[test]
    fn a_restart_between_any_two_steps_changes_nothing_that_is_in_force(
        (rules, loads, beats) in case(), at in 0_usize..30
    ) {
        let mut node = Node::with(Arc::new(set(rules.clone())), loads);
        for beat in beats.iter().take(at) {
            play(&mut node, beat);
        }
        engine_support::restart(&mut node, set(rules.clone()));
        let mut before = node.plan.clone();
        let alive = |uid: &PodUid| node.pods.iter().any(|load| load.pod.uid == *uid);
        before.throttles.retain(|throttle| alive(&throttle.uid));
        node.pass(Duration::from_millis(10));
        node.sample.node = plimsoll::engine::sample::NodeSample::default();
        node.step();
        prop_assert!(node.plan.evaluated);
        prop_assert_eq!(&node.plan.evictions, &[]);
        prop_assert_eq!(sorted(&node.plan), sorted(&before));
        if let Scheduling::Disabled { .. } = before.scheduling {
            prop_assert_eq!(&node.plan.scheduling, &before.scheduling);
        }
        restored(&mut node, &rules);
    }
}

/// The pods that went a step down, and what that releases, in order.
fn steps(plan: &Plan) -> (Vec<String>, Vec<u64>) {
    let steps = plan.transitions.iter().filter_map(|t| match &t.change {
        Change::Throttle { pod, release, .. } => Some((pod.to_string(), release.0)),
        _ => None,
    });
    steps.unzip()
}

/// The throttles by UID: without usage there is no other order.
fn sorted(plan: &Plan) -> Vec<(PodUid, u8, bool)> {
    let throttles = plan.throttles.iter();
    let mut sorted: Vec<_> = throttles
        .map(|t| (t.uid.clone(), t.ratio, t.idle))
        .collect();
    sorted.sort();
    sorted
}

fn shuffle<T>(list: &mut [T], mut seed: u64) {
    for index in (1..list.len()).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let other = usize::try_from(seed >> 33).unwrap() % (index + 1);
        list.swap(index, other);
    }
}
