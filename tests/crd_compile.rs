//! Policy objects compile to what one node has to keep.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "the values are exact")]

use std::time::Duration;

use plimsoll::crd::{Compiled, Objects, Reason, compile};
use plimsoll::engine::metric::Metric;
use plimsoll::engine::policy::{NodeFacts, Strategy, TaintEffect};
use serde_json::{Value, json};

fn object(kind: &str, name: &str, spec: &Value) -> Value {
    json!({
        "apiVersion": "ensurance.crane.io/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    })
}

fn guide_throttle() -> Vec<Value> {
    let throttle = json!({
        "coolDownSeconds": 300,
        "throttle": {"cpuThrottle": {"minCPURatio": 10, "stepCPURatio": 20}},
    });
    let rule = json!({
        "name": "cpu-usage", "avoidanceThreshold": 2, "restoredThreshold": 2,
        "actionName": "throttle", "strategy": "None",
        "metricRule": {"name": "cpu_total_usage", "value": 6000},
    });
    let best_effort = json!({"operator": "In", "scopeName": "QOSClass", "values": ["BestEffort"]});
    vec![
        object("AvoidanceAction", "throttle", &throttle),
        object("NodeQOS", "watermark2", &json!({"rules": [rule]})),
        object(
            "PodQOS",
            "all-be-pods",
            &json!({"allowedActions": ["throttle"], "scopeSelector": {"matchExpressions": [best_effort]}}),
        ),
    ]
}

fn compiled(values: Vec<Value>) -> Compiled {
    compile(&Objects::from_values(values), &NodeFacts::default())
}

#[test]
fn the_guides_throttle_policy_compiles_to_one_rule_with_its_alias_heeded() {
    let compiled = compiled(guide_throttle());
    assert_eq!(compiled.findings, []);
    let [rule] = &compiled.policy.rules[..] else {
        panic!("{:?}", compiled.policy.rules)
    };
    assert_eq!(&*rule.id.0, "watermark2/cpu-usage");
    assert_eq!(rule.metric, Metric::CpuUsage);
    assert_eq!((rule.watermark, rule.restore), (6000.0, 6000.0));
    assert_eq!((rule.avoidance_threshold, rule.restore_threshold), (2, 2));
    assert_eq!(rule.period, Duration::from_secs(10));
    assert_eq!(rule.sample_ttl, Duration::from_mins(1));
    assert_eq!(rule.strategy, Strategy::Enforce);
    assert_eq!(rule.action.scheduling, None);
    assert_eq!(rule.action.cool_down, Duration::from_mins(5));
    let throttle = rule.action.throttle.unwrap();
    assert_eq!(
        (throttle.min_ratio, throttle.step, throttle.idle),
        (10, 20, false)
    );
}

#[test]
fn an_action_without_throttle_and_eviction_disables_scheduling() {
    let mut objects = guide_throttle();
    objects[0]["spec"] = json!({});
    let compiled = compiled(objects);
    let action = &compiled.policy.rules[0].action;
    assert_eq!(action.scheduling, Some(TaintEffect::NoSchedule));
    assert_eq!(action.cool_down, Duration::from_mins(5));
}

#[test]
fn a_rule_that_names_no_action_is_off_and_the_others_are_not() {
    let mut objects = guide_throttle();
    let mut lost = objects[1]["spec"]["rules"][0].clone();
    lost["name"] = json!("lost");
    lost["actionName"] = json!("thorttle");
    objects[1]["spec"]["rules"]
        .as_array_mut()
        .unwrap()
        .insert(0, lost);
    let compiled = compiled(objects);
    assert_eq!(compiled.policy.rules.len(), 1);
    let [finding] = &compiled.findings[..] else {
        panic!("{:?}", compiled.findings)
    };
    assert_eq!(finding.reason, Reason::UnknownAction);
    assert_eq!(finding.path, "spec.rules[0].actionName");
    assert!(
        finding
            .message
            .contains("write the name of one of throttle")
    );
}
