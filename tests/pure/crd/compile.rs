//! Compilation of policy objects to the policies of a node.
#![allow(clippy::float_cmp, reason = "the values are exact")]

use std::time::Duration;

use plimsoll::crd::{Compiled, Objects, Reason, compile};
use plimsoll::engine::metric::Metric;
use plimsoll::engine::policy::{NodeFacts, Standing, Strategy, TaintEffect};
use plimsoll::engine::units::MilliCpu;
use proptest::prelude::*;
use proptest::strategy::Strategy as _;
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
        "actionName": "throttle", "strategy": "Enforce",
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
fn the_throttle_policy_of_the_guide_compiles_to_one_rule() {
    let compiled = compiled(guide_throttle());
    assert_eq!(compiled.findings, []);
    let [rule] = &compiled.policy.rules[..] else {
        panic!("{:?}", compiled.policy.rules)
    };
    assert_eq!(&*rule.id.0, "watermark2/cpu-usage");
    assert_eq!(rule.metric, Metric::CpuUsage);
    assert_eq!((rule.threshold, rule.restore_value), (6000.0, 6000.0));
    assert_eq!((rule.avoidance_threshold, rule.restore_threshold), (2, 2));
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

/// The policy of the guide in one object, with a node selector.
fn in_one_object() -> Value {
    let [action, mut node, _] = guide_throttle().try_into().unwrap();
    let rule = &mut node["spec"]["rules"][0];
    rule.as_object_mut().unwrap().remove("actionName");
    rule["action"] = action["spec"].clone();
    rule["pods"] = json!({"qosClasses": ["BestEffort"]});
    node["spec"]["selector"] = json!({"matchLabels": {"pool": "a"}});
    node
}

fn on_pool(values: Vec<Value>, pool: &str) -> Compiled {
    let node = NodeFacts {
        labels: [("pool".to_owned(), pool.to_owned())].into(),
        ..NodeFacts::default()
    };
    compile(&Objects::from_values(values), &node)
}

#[test]
fn the_action_and_the_pods_of_a_rule_are_as_those_of_other_objects() {
    let one = on_pool(vec![in_one_object()], "a");
    assert_eq!(one.findings, []);
    let three = compiled(guide_throttle());
    let (rule, expected) = (&one.policy.rules[0], &three.policy.rules[0]);
    assert_eq!(rule.action.name, "watermark2/cpu-usage");
    assert_eq!(rule.action.throttle, expected.action.throttle);
    assert_eq!(rule.action.cool_down, expected.action.cool_down);
    let [pods] = &one.policy.pods[..] else {
        panic!("{:?}", one.policy.pods)
    };
    assert_eq!(pods.name, "watermark2/cpu-usage");
    assert_eq!(pods.allowed, ["watermark2/cpu-usage"]);
    assert_eq!(pods.scopes, three.policy.pods[0].scopes);
    let elsewhere = on_pool(vec![in_one_object()], "b");
    assert_eq!(
        elsewhere.policy,
        plimsoll::engine::policy::PolicySet::default()
    );
    // A PodQOS may allow it on more pods.
    let more = json!({"allowedActions": ["watermark2/cpu-usage"], "labelSelector": {}});
    let both = on_pool(vec![in_one_object(), object("PodQOS", "more", &more)], "a");
    assert_eq!(both.findings, []);
    assert_eq!(both.policy.pods.len(), 2);
}

#[test]
fn what_is_wrong_with_the_action_or_the_pods_of_a_rule_is_found_there() {
    let found = |edit: &dyn Fn(&mut Value)| -> Vec<(String, String, Reason)> {
        let mut object = in_one_object();
        edit(&mut object["spec"]["rules"][0]);
        let findings = on_pool(vec![object], "a").findings.into_iter();
        let place = |it: plimsoll::crd::Finding| (it.object.to_string(), it.path, it.reason);
        findings.map(place).collect()
    };
    let at = |path: &str, reason| vec![("NodeQOS/watermark2".to_owned(), path.to_owned(), reason)];
    let nothing = found(&|rule| rule["pods"] = json!({}));
    assert!(
        nothing.contains(&at("spec.rules[0].pods", Reason::SelectsNothing)[0]),
        "{nothing:?}"
    );
    let invalid =
        found(&|rule| rule["action"]["throttle"]["cpuThrottle"]["stepCPURatio"] = json!(0));
    let step = "spec.rules[0].action.throttle.cpuThrottle.stepCPURatio";
    assert_eq!(invalid, at(step, Reason::Invalid));
    let both = found(&|rule| rule["actionName"] = json!("throttle"));
    assert_eq!(both, at("spec.rules[0].actionName", Reason::Invalid));
    let neither = found(&|rule| {
        rule.as_object_mut().unwrap().remove("action");
    });
    assert!(
        neither.iter().all(|(object, _, reason)| object == "NodeQOS/watermark2" && *reason == Reason::Invalid),
        "{neither:?}"
    );
}

#[test]
fn a_strategy_may_have_cranes_name() {
    let with = |strategy: &str| {
        let mut objects = guide_throttle();
        objects[1]["spec"]["rules"][0]["strategy"] = json!(strategy);
        compiled(objects)
    };
    assert_eq!(with("None"), with("Enforce"));
    assert_ne!(with("Preview"), with("Enforce"));
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
fn a_rule_with_an_unknown_action_does_not_affect_the_others() {
    let mut objects = guide_throttle();
    let mut misspelt = objects[1]["spec"]["rules"][0].clone();
    misspelt["name"] = json!("misspelt");
    misspelt["actionName"] = json!("thorttle");
    objects[1]["spec"]["rules"]
        .as_array_mut()
        .unwrap()
        .insert(0, misspelt);
    let compiled = compiled(objects);
    assert_eq!(compiled.policy.rules.len(), 1);
    let [finding] = &compiled.findings[..] else {
        panic!("{:?}", compiled.findings)
    };
    assert_eq!(finding.reason, Reason::UnknownAction);
    assert_eq!(finding.path, "spec.rules[0].actionName");
    assert!(finding.message.contains("did you mean throttle?"));
}

/// Valid and invalid objects, including two with the same name.
fn mixed() -> Vec<Value> {
    let mut objects = guide_throttle();
    let evict = json!({"eviction": {}});
    let rules = json!({"rules": [
        {"name": "b", "actionName": "evict", "metricRule": {"name": "memory_total_usage", "value": "5Gi"}},
        {"name": "a", "actionName": "evict", "metricRule": {"name": "no_such_metric", "value": 1}},
        {"name": "c", "actionName": "evict"},
    ]});
    objects.extend([
        object("AvoidanceAction", "evict", &evict),
        object("AvoidanceAction", "twice", &evict),
        object("AvoidanceAction", "twice", &json!({})),
        object("NodeQOS", "memory", &rules),
        object(
            "PodQOS",
            "everything",
            &json!({"allowedActions": ["Evict", "throttle"], "labelSelector": {}}),
        ),
        json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}),
        json!({"apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS"}),
        json!(null),
    ]);
    objects
}

proptest! {
    #[test]
    fn order_duplication_and_replay_of_objects_change_nothing(
        order in Just((0..mixed().len()).collect::<Vec<usize>>()).prop_shuffle(),
        repeated in prop::collection::vec(0..mixed().len(), 0..20),
    ) {
        let objects = mixed();
        let expected = compiled(objects.clone());
        let shuffled = order.iter().chain(&repeated).map(|index| objects[*index].clone()).collect();
        prop_assert_eq!(compiled(shuffled), expected);
    }

    #[test]
    fn no_object_panics(
        text in "\\PC{0,40}",
        number in any::<f64>(),
        is_text in any::<bool>(),
        index in 0usize..8,
        spot in any::<prop::sample::Index>(),
    ) {
        let mut objects = mixed();
        let mut spots = Vec::new();
        collect(&objects[index], String::new(), &mut spots);
        let value = if is_text { json!(text) } else { json!(number) };
        *objects[index].pointer_mut(&spots[spot.index(spots.len())]).unwrap() = value;
        for rule in compiled(objects).policy.rules {
            prop_assert!(rule.threshold.is_finite() && rule.threshold > 0.0);
            prop_assert!(rule.restore_value.is_finite() && rule.restore_value <= rule.threshold);
            prop_assert!(rule.avoidance_threshold >= 1 && rule.restore_threshold >= 1);
        }
    }
}

fn collect(value: &Value, at: String, spots: &mut Vec<String>) {
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(name, value)| collect(value, format!("{at}/{name}"), spots)),
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, value)| collect(value, format!("{at}/{index}"), spots));
        }
        _ => {}
    }
    spots.push(at);
}

#[test]
fn two_different_objects_with_the_same_name_are_not_in_force() {
    let compiled = compiled(mixed());
    let finding = compiled
        .findings
        .iter()
        .find(|finding| finding.reason == Reason::DuplicateName)
        .unwrap();
    assert_eq!(finding.object.to_string(), "AvoidanceAction/twice");
    let ids: Vec<_> = compiled
        .policy
        .rules
        .iter()
        .map(|rule| rule.id.to_string())
        .collect();
    assert_eq!(ids, ["memory/b", "watermark2/cpu-usage"]);
}

#[test]
fn copies_that_differ_in_metadata_do_not_depend_on_order() {
    let mut labelled = guide_throttle();
    labelled[2]["metadata"]["labels"] = json!({"team": "shop"});
    let mut invalid = guide_throttle();
    invalid[2]["metadata"]["labels"] = json!({"team": 1});
    for (copy, in_force) in [(&labelled[2], 1), (&invalid[2], 0)] {
        let mut copied = guide_throttle();
        copied.push(copy.clone());
        let forwards = Objects::from_values(copied.clone());
        copied.reverse();
        assert_eq!(Objects::from_values(copied), forwards);
        let is_valid = forwards.findings().is_empty();
        assert_eq!(is_valid, in_force == 1, "{:?}", forwards.findings());
        assert_eq!(
            compile(&forwards, &NodeFacts::default()).policy.pods.len(),
            in_force
        );
    }
}

#[test]
fn a_keyword_that_is_also_the_name_of_an_action_is_a_warning() {
    let mut objects = guide_throttle();
    objects[0]["spec"]["eviction"] = json!({});
    let compiled = compiled(objects);
    let [finding] = &compiled.findings[..] else {
        panic!("{:?}", compiled.findings)
    };
    assert_eq!(
        (finding.reason, finding.path.as_str()),
        (Reason::AmbiguousAction, "spec.allowedActions[0]")
    );
}

#[test]
fn an_action_that_does_not_lower_the_metric_is_refused_with_what_to_write_instead() {
    let reclaim = json!({"memoryThrottle": {"forceGC": true}});
    let quota = json!({"cpuThrottle": {}});
    for (metric, throttle, instead) in [
        (
            "memory_total_utilization",
            &reclaim,
            Some("protected_memory_stall_max"),
        ),
        (
            "memory_pressure_some_avg60",
            &reclaim,
            Some("protected_memory_stall_max"),
        ),
        ("protected_memory_stall_max", &reclaim, None),
        (
            "cpu_pressure_some_avg10",
            &quota,
            Some("protected_cpu_delay_max"),
        ),
        (
            "io_pressure_full_avg60",
            &quota,
            Some("protected_io_stall_max"),
        ),
        ("pod_cpu_delay", &quota, Some("protected_cpu_delay_max")),
        (
            "container_sched_run_queue_time",
            &quota,
            Some("protected_cpu_delay_max"),
        ),
        (
            "container_cpu_throttled_ratio",
            &quota,
            Some("disableScheduling"),
        ),
        ("network_sent_kibps", &quota, Some("disableScheduling")),
        ("protected_io_stall_max", &quota, Some("eviction")),
        ("disk_utilization", &quota, Some("eviction")),
        ("cpu_usage_max_avg_1h", &quota, Some("past peak")),
        ("protected_cpu_delay_max", &quota, None),
        ("cpu_load_1_min", &quota, None),
    ] {
        let mut objects = guide_throttle();
        objects[0]["spec"]["throttle"] = throttle.clone();
        objects[1]["spec"]["rules"][0]["metricRule"] = json!({"name": metric, "value": 40});
        let compiled = compiled(objects);
        let mut found = compiled.findings.iter();
        let found = found.find(|finding| finding.reason == Reason::ActionDoesNotHelp);
        assert_eq!(found.is_some(), instead.is_some(), "{metric}: {found:?}");
        assert_eq!(
            compiled.policy.rules.is_empty(),
            instead.is_some(),
            "{metric}"
        );
        if let (Some(found), Some(instead)) = (found, instead) {
            assert!(found.message.contains(instead), "{}", found.message);
        }
    }
}

#[test]
fn naming_kube_system_is_a_warning() {
    let mut objects = guide_throttle();
    objects[2]["spec"]["scopeSelector"]["matchExpressions"][0] =
        json!({"scopeName": "Namespace", "operator": "In", "values": ["kube-system"]});
    let compiled = compiled(objects);
    let [finding] = &compiled.findings[..] else {
        panic!("{:?}", compiled.findings)
    };
    assert_eq!(finding.reason, Reason::SystemPods);
    assert_eq!(compiled.policy.rules.len(), 1);
}

#[test]
fn a_threshold_is_checked_against_the_capacity_of_the_node() {
    let on = |cpus: u32| {
        let node = NodeFacts {
            cpus,
            ..NodeFacts::default()
        };
        let compiled = compile(&Objects::from_values(guide_throttle()), &node);
        let reasons: Vec<_> = compiled
            .findings
            .iter()
            .map(|finding| finding.reason)
            .collect();
        (compiled.policy.rules.len(), reasons)
    };
    assert_eq!(on(0), (1, vec![]));
    assert_eq!(on(8), (1, vec![]));
    assert_eq!(on(6), (1, vec![Reason::ThresholdTooHigh]));
    assert_eq!(on(600), (1, vec![]));
    assert_eq!(on(601), (0, vec![Reason::ThresholdTooLow]));
}

#[test]
fn a_node_selector_matches_labels_of_the_node() {
    let mut objects = guide_throttle();
    objects[1]["spec"]["selector"] = json!({"matchLabels": {"pool": "batch"}});
    let objects = Objects::from_values(objects);
    let rules = |labels: &[(&str, &str)]| {
        let labels = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        let node = NodeFacts {
            labels: labels.collect(),
            ..NodeFacts::default()
        };
        compile(&objects, &node).policy.rules.len()
    };
    assert_eq!(
        (
            rules(&[]),
            rules(&[("pool", "web")]),
            rules(&[("pool", "batch")])
        ),
        (0, 0, 1)
    );
    let every = compile(&objects.clone().for_every_node(), &NodeFacts::default());
    assert_eq!(every.policy.rules.len(), 1);
}

#[test]
fn zero_grace_is_one_second_and_zero_timeout_is_ten() {
    let mut objects = guide_throttle();
    objects[0]["spec"] = json!({"eviction": {"terminationGracePeriodSeconds": 0}});
    objects[1]["spec"]["nodeQualityProbe"] =
        json!({"timeoutSeconds": 0, "httpGet": {"host": "::1", "port": "9100", "scheme": "HTTPS"}});
    let compiled = compiled(objects);
    let rule = &compiled.policy.rules[0];
    assert_eq!(
        rule.action.eviction.unwrap().grace,
        Some(Duration::from_secs(1))
    );
    assert_eq!(rule.action.scheduling, Some(TaintEffect::NoSchedule));
    let probe = rule.probe.as_ref().unwrap();
    assert_eq!(
        (&*probe.url, probe.timeout),
        ("https://[::1]:9100/metrics", Duration::from_secs(10))
    );
}

#[test]
fn a_tiny_threshold_is_a_warning_if_the_capacity_is_unknown() {
    for (metric, value, fix) in [
        ("cpu_total_usage", json!(6), Some("did you mean 6000?")),
        ("cpu_total_usage", json!("0.5"), Some("did you mean 500?")),
        (
            "cpu_total_usage",
            json!("6m"),
            Some("6m (0.006 millicores)"),
        ),
        (
            "cpu_total_usage",
            json!(85),
            Some("did you mean 85 % (name: cpu_total_utilization), or 85000?"),
        ),
        ("cpu_total_usage", json!(100), None),
        ("memory_total_usage", json!(6), Some("did you mean 6Gi?")),
        ("memory_total_usage", json!("100Mi"), None),
    ] {
        let mut objects = guide_throttle();
        let rule = &mut objects[1]["spec"]["rules"][0]["metricRule"];
        *rule = json!({"name": metric, "value": value});
        let compiled = compiled(objects);
        assert_eq!(
            compiled.policy.rules.len(),
            usize::from(metric.starts_with("cpu"))
        );
        let warnings = compiled.findings.iter();
        let warnings = warnings.filter(|finding| finding.reason == Reason::ThresholdTooLow);
        let warnings: Vec<_> = warnings.map(|finding| &*finding.message).collect();
        assert_eq!(
            warnings.len(),
            usize::from(fix.is_some()),
            "{metric} {value}: {warnings:?}"
        );
        assert!(
            warnings
                .iter()
                .all(|warning| fix.is_some_and(|fix| warning.contains(fix))),
            "{warnings:?}"
        );
    }
}

#[test]
fn a_rule_without_pods_names_the_invalid_pod_qos() {
    let mut objects = guide_throttle();
    objects[2]["spec"]["scopeSelector"] =
        json!({"matchExpressions": [{"scopeName": "QOSClass", "operator": "In"}]});
    let findings = compiled(objects).findings;
    let finding = findings
        .iter()
        .find(|finding| finding.reason == Reason::ActionNotAllowed);
    let message = &finding.unwrap().message;
    assert!(
        message.contains("correct the invalid PodQOS all-be-pods"),
        "{message}"
    );
}

#[test]
fn a_probe_without_a_host_has_no_host_in_its_url() {
    let mut objects = guide_throttle();
    objects[1]["spec"]["nodeQualityProbe"] = json!({"httpGet": {"port": 9100, "path": "/m"}});
    let compiled = compiled(objects);
    let probe = compiled.policy.rules[0].probe.as_ref().unwrap();
    assert_eq!(&*probe.url, "http://:9100/m");
}

#[test]
fn a_period_of_one_node_qos_is_not_enforced() {
    let mut objects = guide_throttle();
    objects[1]["spec"]["evaluationPeriodSeconds"] = json!(120);
    let compiled = compile(&Objects::from_values(objects), &NodeFacts::default());
    assert_eq!(compiled.policy.rules.len(), 1);
    let mut findings = compiled.findings.iter();
    let found = findings
        .find(|it| it.reason == Reason::FieldsNotEnforced)
        .unwrap();
    assert_eq!(found.path, "spec.evaluationPeriodSeconds");
    assert!(
        found.message.contains("agent.evaluationPeriod"),
        "{}",
        found.message
    );
}

/// This many `NodeQOS` objects with 60 rules each.
fn many(objects: usize) -> Vec<Value> {
    let rule = |index: usize| {
        json!({
            "name": format!("rule{index:02}"), "avoidanceThreshold": 1, "actionName": "throttle",
            "metricRule": {"name": "cpu_total_usage", "value": 6000},
        })
    };
    let rules: Vec<Value> = (0..60).map(rule).collect();
    let mut all = guide_throttle();
    all.remove(1);
    let node_qos =
        (0..objects).map(|index| object("NodeQOS", &format!("q{index}"), &json!({"rules": rules})));
    all.extend(node_qos);
    all
}

#[test]
fn a_node_has_at_most_256_rules() {
    assert_eq!(compiled(many(4)).findings, []);
    let five = compiled(many(5));
    assert_eq!(five.policy.rules.len(), 256);
    let [finding] = &five.findings[..] else {
        panic!("{:?}", five.findings)
    };
    assert_eq!(
        (&*finding.object.name, finding.reason),
        ("q4", Reason::TooMany)
    );
    let message = &finding.message;
    assert!(
        message.contains("300 rules select the same node")
            && message.contains("rule16")
            && message.contains("34 more"),
        "{message}"
    );
    // Without a node it is not known how many objects select the same one.
    let every = Objects::from_values(many(5)).for_every_node();
    assert_eq!(compile(&every, &NodeFacts::default()).findings, []);
}

#[test]
fn a_node_has_at_most_1024_pod_policies() {
    let mut objects = guide_throttle();
    let pods = objects.pop().unwrap();
    objects.extend((0..1025).map(|index| {
        let mut pods = pods.clone();
        pods["metadata"]["name"] = json!(format!("pods{index:04}"));
        pods
    }));
    let compiled = compiled(objects);
    assert_eq!(compiled.policy.pods.len(), 1024);
    let [finding] = &compiled.findings[..] else {
        panic!("{:?}", compiled.findings)
    };
    assert_eq!(
        (&*finding.object.name, finding.reason),
        ("pods1024", Reason::TooMany)
    );
}

/// The findings on the throttling policy with a rule on this metric, on nodes with these windows.
fn findings(metric: &str, value: i64, windows: Option<&str>) -> Vec<(Reason, String)> {
    let mut objects = guide_throttle();
    objects[1]["spec"]["rules"][0]["metricRule"] = json!({"name": metric, "value": value});
    let windows = windows.map(|entries| {
        let text = format!("metrics: [{entries}]");
        plimsoll::crd::windows::read(&text).unwrap().into()
    });
    let node = NodeFacts {
        windows,
        ..NodeFacts::default()
    };
    let compiled = compile(&Objects::from_values(objects), &node);
    let findings = compiled.findings.into_iter();
    findings.map(|it| (it.reason, it.message)).collect()
}

#[test]
fn a_window_of_the_settings_is_a_metric() {
    let gpu = "{name: gpu_avg, source: gpu, window: avg_5m, httpGet: {port: 1}}";
    let cpu = "{name: cpu_slow, source: cpu_total_usage, window: avg_1h}";
    assert_eq!(findings("gpu_avg", 5000, Some(gpu)), []);
    assert_eq!(findings("cpu_slow", 80, Some(cpu)), []);
    let cases = [
        (
            "gpu_av",
            80,
            Some(gpu),
            Reason::UnknownMetric,
            "did you mean gpu_avg?",
        ),
        (
            "gpu_usage_avg_5m",
            80,
            Some(""),
            Reason::UnknownMetric,
            "define it as a window",
        ),
        (
            "gpu_usage_avg_5m",
            80,
            None,
            Reason::UnknownMetric,
            "name their file with --windows",
        ),
        (
            "gpu_usage",
            80,
            None,
            Reason::UnknownMetric,
            "is not a known metric",
        ),
        (
            "cpu_slow",
            5000,
            Some(cpu),
            Reason::ThresholdTooHigh,
            "can't be exceeded",
        ),
    ];
    for (metric, value, windows, reason, message) in cases {
        let found = findings(metric, value, windows);
        let [(found_reason, text)] = &found[..] else {
            panic!("{metric}: {found:?}");
        };
        assert_eq!(*found_reason, reason, "{text}");
        assert!(text.contains(message), "{text}");
    }
}

#[test]
fn only_averages_follow_an_action() {
    for statistic in ["max_avg_1h", "p95_5m", "stddev_5m"] {
        let window = format!("{{name: w, source: gpu, window: {statistic}, httpGet: {{port: 1}}}}");
        let found = findings("w", 80, Some(&window));
        assert_eq!(found[0].0, Reason::ActionDoesNotHelp, "{found:?}");
        assert!(
            found[0].1.contains("only averages follow an action"),
            "{found:?}"
        );
    }
    // Memory is not freed by throttling CPU, whatever the window.
    let memory = "{name: w, source: memory_total_usage, window: avg_1h}";
    assert_eq!(
        findings("w", 80, Some(memory))[0].0,
        Reason::ActionDoesNotHelp
    );
    // Throttles raise what a window over CPU pressure shows.
    let pressure = "{name: w, source: cpu_pressure_some_avg10, window: avg_5m}";
    assert_eq!(
        findings("w", 80, Some(pressure))[0].0,
        Reason::ActionDoesNotHelp
    );
}

/// A `PodQOS` for every pod with this `resourceQOS`.
fn with_resources(resources: &Value, strategy: Option<&str>) -> Value {
    let spec = json!({"labelSelector": {}, "resourceQOS": resources});
    let mut object = object("PodQOS", "batch", &spec);
    if let Some(strategy) = strategy {
        object["metadata"]["annotations"] = json!({"plimsoll.dev/strategy": strategy});
    }
    object
}

#[test]
fn the_lowest_priority_is_the_idle_class_without_any_rule() {
    let lowest = json!({"cpuQOS": {"cpuPriority": 7}});
    for (strategy, preview) in [
        (None, false),
        (Some("Preview"), true),
        (Some("None"), false),
    ] {
        let compiled = compiled(vec![with_resources(&lowest, strategy)]);
        assert_eq!(compiled.findings, [], "nothing has to be allowed");
        let standing = Standing {
            idle: true,
            preview,
            ..Standing::default()
        };
        assert_eq!(compiled.policy.pods[0].standing, standing);
    }
}

#[test]
fn a_burst_is_in_cpus_and_needs_nothing_else() {
    for (given, millicores) in [("500m", 500), ("1", 1000), ("0.25", 250)] {
        let resources = json!({"cpuQOS": {"cpuBurst": {"burstQuota": given}}});
        let compiled = compiled(vec![with_resources(&resources, Some("Preview"))]);
        assert_eq!(compiled.findings, [], "{given}");
        let standing = Standing {
            burst: MilliCpu(millicores),
            preview: true,
            ..Standing::default()
        };
        assert_eq!(compiled.policy.pods[0].standing, standing);
    }
}

#[test]
fn a_burst_that_is_no_number_of_cpus_is_rejected() {
    for given in ["", "50%", "-1", "100Mi", "1e3", "2 CPUs"] {
        let resources = json!({"cpuQOS": {"cpuBurst": {"burstQuota": given}}});
        let compiled = compiled(vec![with_resources(&resources, None)]);
        let finding = &compiled.findings[0];
        assert_eq!(finding.reason, Reason::Invalid, "{given}");
        assert!(finding.message.contains("500m"), "{}", finding.message);
        assert_eq!(compiled.policy.pods, []);
    }
}

#[test]
fn each_other_field_of_resource_qos_is_reported_as_not_enforced() {
    let resources = json!({
        "cpuQOS": {"cpuPriority": 3, "cpuBurst": {"burstQuota": "0"}, "htIsolation": {"enable": true}},
        "memoryQOS": {"memWatermark": {"watermarkRatio": 80}},
        "diskIOQOS": {"diskIOLimit": {"readBps": 1}, "diskIOWeight": {"weight": 10}},
        "netIOQOS": {"netIOPriority": 1},
    });
    let compiled = compiled(vec![with_resources(&resources, None)]);
    let findings = compiled.findings.iter();
    let paths = findings.filter(|it| it.reason == Reason::FieldsNotEnforced);
    let mut paths: Vec<&str> = paths.map(|it| it.path.as_str()).collect();
    paths.sort_unstable();
    assert_eq!(
        paths,
        [
            "spec.resourceQOS.cpuQOS.cpuBurst",
            "spec.resourceQOS.cpuQOS.cpuPriority",
            "spec.resourceQOS.cpuQOS.htIsolation",
            "spec.resourceQOS.diskIOQOS.diskIOLimit",
            "spec.resourceQOS.diskIOQOS.diskIOWeight",
            "spec.resourceQOS.memoryQOS.memWatermark",
            "spec.resourceQOS.netIOQOS.netIOPriority",
        ]
    );
    assert_eq!(compiled.policy.pods[0].standing, Standing::default());
}

#[test]
fn a_priority_outside_of_0_to_7_is_rejected() {
    for priority in [-1, 8] {
        let resources = json!({"cpuQOS": {"cpuPriority": priority}});
        let compiled = compiled(vec![with_resources(&resources, None)]);
        assert_eq!(compiled.findings[0].reason, Reason::Invalid);
        assert_eq!(compiled.policy.pods, []);
    }
}
