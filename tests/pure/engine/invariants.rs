//! Invariants over random histories.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::scenario::{
    Fault, PeriodInput, input, loads, policy_set, rules, run_period, take_sample,
};
use crate::engine_support::{Load, Node, PERIOD, policy};
use plimsoll::engine::RuleReport;
use plimsoll::engine::plan::{Plan, PlanChange, RuleState, Scheduling, Transition};
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::policy::{Rule, RuleId, Strategy as RuleStrategy};
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
            throttle.ratio < 100 || throttle.is_lowest(),
            "restored pods are not listed"
        );
        for target_cgroup in &throttle.target_cgroups {
            assert!(target_cgroup.base <= load.quota.min_usage(MilliCpu(u64::MAX)));
            let Some(ours) = target_cgroup.quota else {
                continue;
            };
            assert!(ours >= MilliCpu(10), "{throttle:?}");
            assert!(ours >= load.pod.cpu_request, "{throttle:?}");
            assert!(
                ours >= target_cgroup.base.percent(throttle.ratio),
                "{throttle:?}"
            );
            if let Quota::Limit(original) = load.quota {
                assert!(ours < original, "{throttle:?} {original}");
            }
        }
    }
}

/// The pod that a transition takes resources from.
fn affected_pod(transition: &Transition) -> Option<&PodUid> {
    match &transition.change {
        PlanChange::Throttle {
            pod,
            from,
            to,
            idle,
            ..
        } => (to < from || (*idle && to == from)).then_some(pod),
        PlanChange::Evict { pod, .. } | PlanChange::Reclaim { pod, .. } => Some(pod),
        _ => None,
    }
}

/// I5: nothing destructive is based on a missing, stale or invalid sample, or done to a pod that may not be acted on.
fn destructive_actions_need_fresh_samples(node: &Node) {
    let reports = reports(node);
    for transition in &node.plan.transitions {
        let Some(uid) = affected_pod(transition) else {
            continue;
        };
        let report = &reports[&transition.rule];
        assert_eq!(report.unknown, None, "{transition:?}");
        // A newcomer joins at the depth of the others.
        let joins = matches!(transition.change, PlanChange::Throttle { .. });
        let is_above = report.value.unwrap() > report.threshold;
        assert!(is_above || joins, "{transition:?}");
        assert_eq!(report.state, RuleState::Breached, "{transition:?}");
        let sample = node.sample.pods.iter().find(|pod| pod.uid == *uid).unwrap();
        assert!(node.now.since(sample.at) <= Duration::from_mins(1));
        let pod = &find(node, uid).pod;
        assert!(pod.running && !pod.protected, "{transition:?}");
        let owned = pod.owned || !matches!(transition.change, PlanChange::Evict { .. });
        assert!(owned, "{transition:?}");
    }
}

/// I6: scheduling is disabled exactly while an enforced rule needs it.
fn scheduling_is_disabled_exactly_while_needed(node: &Node, rules: &[Rule]) {
    let reports = reports(node);
    let needs = |rule: &&Rule| {
        rule.strategy == RuleStrategy::Enforce
            && rule.action.scheduling.is_some()
            && reports[&rule.id].state != RuleState::Normal
    };
    let needed: Vec<_> = rules.iter().filter(needs).map(|r| r.id.clone()).collect();
    match &node.plan.scheduling {
        Scheduling::Disabled { rules, .. } => assert_eq!(*rules, needed),
        Scheduling::Enabled | Scheduling::Unchanged => assert_eq!(needed, []),
    }
}

fn preview_changes_nothing(node: &Node, rules: &[Rule]) {
    let preview = |id: &RuleId| {
        let rule = rules.iter().find(|rule| rule.id == *id).unwrap();
        rule.strategy == RuleStrategy::Preview
    };
    assert!(node.plan.throttles.iter().all(|t| !preview(&t.rule)));
    assert!(node.plan.evictions.iter().all(|e| !preview(&e.rule)));
    assert!(node.plan.reclaims.iter().all(|r| !preview(&r.rule)));
    let transitions = &node.plan.transitions;
    assert!(transitions.iter().all(|t| t.would == preview(&t.rule)));
}

fn outside_its_hours_a_rule_is_normal(node: &Node) {
    for report in node.engine.reports().filter(|report| report.outside_hours) {
        assert_eq!((report.state, report.unknown), (RuleState::Normal, None));
        let mut transitions = node.plan.transitions.iter();
        assert!(!transitions.any(|it| it.rule == report.id && affected_pod(it).is_some()));
    }
}

/// Every step is reported: the sum of the transitions is what is in force.
fn transitions_add_up(node: &Node, reported: &mut BTreeMap<PodUid, BTreeMap<RuleId, (u8, bool)>>) {
    for transition in node.plan.transitions.iter().filter(|t| !t.would) {
        if let PlanChange::Throttle {
            pod,
            from,
            to,
            idle,
            ..
        } = &transition.change
        {
            let claims = reported.entry(pod.clone()).or_default();
            let before = claims.insert(transition.rule.clone(), (*to, *idle));
            assert_eq!(before.unwrap_or((100, false)).0, *from, "{transition:?}");
        }
    }
    let listed = |uid: &PodUid| node.plan.throttles.iter().find(|t| t.uid == *uid);
    for load in &node.pods {
        let claims = reported
            .get(&load.pod.uid)
            .into_iter()
            .flat_map(BTreeMap::values);
        let depth = claims.fold((100, false), |depth, claim| {
            (depth.0.min(claim.0), depth.1 || claim.1)
        });
        let throttle = listed(&load.pod.uid).map_or((100, false), |t| (t.ratio, t.is_lowest()));
        assert_eq!(throttle, depth, "{}", load.pod.uid);
    }
}

/// With quiet metrics, or without rules, everything is restored within this time.
fn time_to_restore(rules: &[Rule]) -> Duration {
    let of = |rule: &Rule| {
        let step = rule.action.throttle.map_or(100, |spec| spec.step);
        let steps = 100_u32.div_ceil(u32::from(step)) + 1 + rule.restore_threshold;
        // After relapses the cool-down is up to 8 times as long.
        let doubled = if rule.action.throttle.is_some() { 8 } else { 1 };
        PERIOD * (steps + 3) + rule.action.cool_down * doubled
    };
    rules.iter().map(of).max().unwrap_or_default()
}

fn quiet() -> PeriodInput {
    PeriodInput {
        cpu: 100,
        memory: 0,
        load: 0.0,
        fault: Fault::None,
    }
}

fn hot() -> PeriodInput {
    PeriodInput {
        cpu: 8000,
        memory: 0,
        load: 50.0,
        fault: Fault::None,
    }
}

fn assert_steady(node: &mut Node) {
    for _ in 0..4 {
        run_period(node, &quiet());
        if node.plan.evaluated {
            assert_eq!(node.plan.throttles, []);
            assert_eq!(node.plan.scheduling, Scheduling::Enabled);
            assert_eq!(node.plan.transitions, []);
        }
    }
}

fn assert_restored(node: &mut Node, rules: &[Rule]) {
    let periods = time_to_restore(rules).as_secs().div_ceil(PERIOD.as_secs());
    for _ in 0..periods {
        run_period(node, &quiet());
    }
    assert_steady(node);
}

fn case() -> impl Strategy<Value = (Vec<Rule>, Vec<Load>, Vec<PeriodInput>)> {
    (rules(), loads(), vec(input(), 1..30))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn every_step_satisfies_the_invariants((rules, loads, inputs) in case()) {
        let mut node = Node::with(Arc::new(policy_set(rules.clone())), loads);
        let mut reported = BTreeMap::new();
        for input in &inputs {
            run_period(&mut node, input);
            if !node.plan.evaluated {
                continue;
            }
            quotas_are_between_floor_and_original(&node);
            destructive_actions_need_fresh_samples(&node);
            scheduling_is_disabled_exactly_while_needed(&node, &rules);
            preview_changes_nothing(&node, &rules);
            transitions_add_up(&node, &mut reported);
        }
    }

    #[test]
    fn quiet_metrics_restore_everything((rules, loads, inputs) in case()) {
        let mut node = Node::with(Arc::new(policy_set(rules.clone())), loads);
        for input in &inputs {
            run_period(&mut node, input);
        }
        assert_restored(&mut node, &rules);
    }

    #[test]
    fn without_rules_everything_is_restored_whatever_the_metrics_are(
        (rules, loads, inputs) in case()
    ) {
        let mut node = Node::with(Arc::new(policy_set(rules.clone())), loads);
        for input in &inputs {
            run_period(&mut node, input);
        }
        node.engine.set_policy(policy(Vec::new()));
        let periods = time_to_restore(&rules).as_secs().div_ceil(PERIOD.as_secs());
        for _ in 0..periods {
            run_period(&mut node, &hot());
        }
        prop_assert_eq!(node.engine.next_due(), None);
        prop_assert_eq!(&node.plan.throttles, &[]);
        prop_assert_eq!(&node.plan.scheduling, &Scheduling::Enabled);
    }

    #[test]
    fn outside_their_hours_rules_restore_everything_whatever_the_metrics_are(
        (mut rules, loads, inputs) in case(), minutes in 0_i64..6
    ) {
        for rule in &mut rules {
            rule.active_during = vec!["22:00-22:03 UTC".parse().unwrap()];
        }
        let mut node = Node::with(Arc::new(policy_set(rules.clone())), loads);
        let time: jiff::Timestamp = "2026-01-15T21:58:00Z".parse().unwrap();
        node.time = Some(time + jiff::SignedDuration::from_mins(minutes));
        let mut reported = BTreeMap::new();
        for input in &inputs {
            run_period(&mut node, input);
            if !node.plan.evaluated {
                continue;
            }
            outside_its_hours_a_rule_is_normal(&node);
            quotas_are_between_floor_and_original(&node);
            destructive_actions_need_fresh_samples(&node);
            scheduling_is_disabled_exactly_while_needed(&node, &rules);
            preview_changes_nothing(&node, &rules);
            transitions_add_up(&node, &mut reported);
        }
        node.time = Some("2026-01-16T12:00:00Z".parse().unwrap());
        let periods = time_to_restore(&rules).as_secs().div_ceil(PERIOD.as_secs());
        for _ in 0..periods {
            run_period(&mut node, &hot());
        }
        prop_assert_eq!(&node.plan.throttles, &[]);
        prop_assert_eq!(&node.plan.scheduling, &Scheduling::Enabled);
        prop_assert!(node.engine.reports().all(|report| report.outside_hours));
    }

    #[test]
    fn order_and_duplication_of_objects_change_nothing(
        (rules, loads, inputs) in case(), seed in any::<u64>()
    ) {
        let mut node = Node::with(Arc::new(policy_set(rules.clone())), loads.clone());
        let mut shuffled = [rules.clone(), rules].concat();
        shuffle(&mut shuffled, seed);
        let mut other = Node::with(Arc::new(policy_set(shuffled)), loads);
        for (round, input) in inputs.iter().enumerate() {
            take_sample(&mut node, input);
            take_sample(&mut other, input);
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
    fn a_gap_is_never_covered_by_more_victims_than_needed(
        loads in loads(), cpu in 4001_u64..8000, min in 0_u8..60, step in 1_u8..60
    ) {
        let rule = crate::engine_support::rule(
            "n/cpu", "cpu_total_usage", 4000.0, crate::engine_support::throttling(min, step),
        );
        let mut node = Node::with(Arc::new(policy_set(vec![rule])), loads);
        let gap = ((cpu - 4000) as f64 * 1.1).round();
        let mut skipped = BTreeSet::new();
        node.at(cpu);
        for _ in 0..6 {
            node.at(cpu);
            let (stepped, releases) = steps(&node.plan);
            if let Some((_, others)) = releases.split_last() {
                prop_assert!((others.iter().sum::<u64>() as f64) < gap, "one victim too many");
            }
            skipped.extend(node.skipped().into_iter().map(|(uid, _)| uid));
            let covered = releases.iter().sum::<u64>() as f64 >= gap;
            let tried = |uid: &String| stepped.contains(uid) || skipped.contains(uid);
            prop_assert!(covered || node.pods.iter().all(|load| tried(&load.pod.name)));
        }
    }

    #[test]
    fn a_restart_between_steps_does_not_change_what_is_in_force(
        (rules, loads, inputs) in case(), at in 0_usize..30
    ) {
        let mut node = Node::with(Arc::new(policy_set(rules.clone())), loads);
        for input in inputs.iter().take(at) {
            run_period(&mut node, input);
        }
        crate::engine_support::restart(&mut node, policy_set(rules.clone()));
        let mut before = node.plan.clone();
        let alive = |uid: &PodUid| node.pods.iter().any(|load| load.pod.uid == *uid);
        before.throttles.retain(|throttle| alive(&throttle.uid));
        node.advance(Duration::from_millis(10));
        node.sample.node = plimsoll::engine::sample::NodeSample::default();
        node.step();
        prop_assert!(node.plan.evaluated);
        prop_assert_eq!(&node.plan.evictions, &[]);
        prop_assert_eq!(sorted(&node.plan), sorted(&before));
        if let Scheduling::Disabled { .. } = before.scheduling {
            prop_assert_eq!(&node.plan.scheduling, &before.scheduling);
        }
        assert_restored(&mut node, &rules);
    }
}

/// The pods that were throttled further and the predicted releases, in order.
fn steps(plan: &Plan) -> (Vec<String>, Vec<u64>) {
    let steps = plan.transitions.iter().filter_map(|t| match &t.change {
        PlanChange::Throttle { pod, release, .. } => Some((pod.to_string(), release.0)),
        _ => None,
    });
    steps.unzip()
}

/// The throttles by UID, since there is no other order without usage.
fn sorted(plan: &Plan) -> Vec<(PodUid, u8, bool)> {
    let throttles = plan.throttles.iter();
    let mut sorted: Vec<_> = throttles
        .map(|t| (t.uid.clone(), t.ratio, t.is_lowest()))
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
