//! Compiled policies survive the round trip through a `NodeWatermark`; parts that the agent does not support are reported.

use std::sync::Arc;
use std::time::Duration;

use plimsoll::crd::node_watermark::{
    AgentStatus, Counts, NodeWatermarkSpec, NodeWatermarkStatus, RuleStatus, SpecError,
};
use plimsoll::engine::hours::Hours;
use plimsoll::engine::metric::{CustomMetric, Metric};
use plimsoll::engine::pod::QosClass;
use plimsoll::engine::policy::{
    Action, CpuThrottle, EvictionSpec, Membership, PodPolicy, PolicySet, Probe, Rule, RuleId,
    ScopeRequirement, Standing, Strategy as Mode, TaintEffect,
};
use plimsoll::engine::selector::{Requirement, Selector};
use plimsoll::engine::units::MilliCpu;
use plimsoll::engine::window::Statistic;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use serde_json::{Value, json};

fn seconds() -> impl Strategy<Value = Duration> {
    (1u64..100_000).prop_map(Duration::from_secs)
}

fn word() -> impl Strategy<Value = String> {
    "[a-z]{1,8}"
}

fn requirement() -> impl Strategy<Value = Requirement> {
    (0..4, word(), vec(word(), 0..3)).prop_map(|(kind, key, values)| match kind {
        0 => Requirement::In(key, values),
        1 => Requirement::NotIn(key, values),
        2 => Requirement::Exists(key),
        _ => Requirement::DoesNotExist(key),
    })
}

fn selector() -> impl Strategy<Value = Selector> {
    vec(requirement(), 0..3).prop_map(|requirements| Selector { requirements })
}

fn effect() -> impl Strategy<Value = TaintEffect> {
    prop_oneof![
        Just(TaintEffect::NoSchedule),
        Just(TaintEffect::PreferNoSchedule)
    ]
}

prop_compose! {
    fn throttle()(min_ratio in 0u8..=100, step in 1u8..=100, idle: bool) -> CpuThrottle {
        CpuThrottle { min_ratio, step, idle }
    }
}

prop_compose! {
    fn eviction()(grace in option::of(seconds()), max_pods_per_round in 1u32.., evict_unowned: bool) -> EvictionSpec {
        EvictionSpec { grace, max_pods_per_round, evict_unowned }
    }
}

prop_compose! {
    fn action()(
        name in word(), cool_down in seconds(), scheduling in option::of(effect()), throttle in option::of(throttle()),
        force_gc: bool, eviction in option::of(eviction()),
    ) -> Action {
        Action { name, cool_down, scheduling, throttle, force_gc, eviction }
    }
}

prop_compose! {
    fn probe()(path in word(), headers in vec((word(), word()), 0..3), timeout in seconds()) -> Probe {
        Probe { url: format!("http://127.0.0.1:9100/{path}").into(), headers, timeout }
    }
}

fn metric() -> impl Strategy<Value = Metric> {
    let names = Metric::names();
    prop_oneof![
        proptest::sample::select(names.clone()).prop_map(|name| Metric::parse(&name).unwrap()),
        word().prop_map(|name| Metric::Probe(name.as_str().into())),
        proptest::sample::select(names.clone())
            .prop_map(|name| Metric::Probe(name.as_str().into())),
        custom(proptest::sample::select(names).boxed()),
        custom(word().boxed()),
    ]
}

fn custom(source: BoxedStrategy<String>) -> impl Strategy<Value = Metric> {
    let statistics: Vec<Statistic> = Statistic::all().collect();
    let statistic = proptest::sample::select(statistics);
    (word(), source, statistic).prop_map(|(name, source, statistic)| {
        let known = Metric::parse(&source);
        Metric::Custom(Arc::new(CustomMetric {
            name: name.as_str().into(),
            source: known.unwrap_or_else(|| Metric::Probe(source.as_str().into())),
            statistic,
        }))
    })
}

fn hours() -> impl Strategy<Value = Hours> {
    let written = [
        "22:00-06:00 Europe/Berlin",
        "Mon-Fri 08:00-18:00 UTC",
        "Sun 00:00-24:00 America/New_York",
    ];
    proptest::sample::select(written.to_vec()).prop_map(|hours| hours.parse().unwrap())
}

prop_compose! {
    fn rule()(
        id in "[a-z]{1,6}/[a-z]{1,6}", metric in metric(), series in option::of(selector()),
        (threshold, low) in (1e-3..1e15f64, 0.0..1.0f64), given: bool, avoidance_threshold in 1u32..,
        restore_threshold in 1u32.., sample_ttl in seconds(), probe in option::of(probe()),
        action in action(), preview: bool, active_during in vec(hours(), 0..3),
    ) -> Rule {
        Rule {
            id: RuleId::from(id.as_str()), metric, series, threshold,
            restore_value: if given { threshold * low } else { threshold },
            avoidance_threshold, restore_threshold, sample_ttl, probe, action: Arc::new(action),
            strategy: if preview { Mode::Preview } else { Mode::Enforce }, active_during,
        }
    }
}

fn membership<T: std::fmt::Debug + Clone + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Membership<T>> {
    (0..4, vec(value, 0..3)).prop_map(|(kind, values)| match kind {
        0 => Membership::In(values),
        1 => Membership::NotIn(values),
        2 => Membership::Exists,
        _ => Membership::DoesNotExist,
    })
}

fn scope() -> impl Strategy<Value = ScopeRequirement> {
    let class = prop_oneof![
        Just(QosClass::BestEffort),
        Just(QosClass::Burstable),
        Just(QosClass::Guaranteed)
    ];
    prop_oneof![
        membership(class).prop_map(ScopeRequirement::Qos),
        membership(any::<(i32, i32)>()).prop_map(ScopeRequirement::Priority),
        membership(word()).prop_map(ScopeRequirement::Namespace),
    ]
}

prop_compose! {
    fn standing()(idle in any::<bool>(), burst in 0..1_000_000_u64, preview in any::<bool>()) -> Standing {
        let standing = Standing { idle, burst: MilliCpu(burst), preview: false };
        // Without any effect there is nothing to preview.
        Standing { preview: preview && standing.acts(), ..standing }
    }
}

prop_compose! {
    fn pod_policy()(
        name in word(), labels in option::of(selector()), scopes in vec(scope(), 0..3), allowed in vec(word(), 0..3),
        standing in standing(),
    ) -> PodPolicy {
        PodPolicy { name, labels, scopes, allowed, standing }
    }
}

/// Sorted and without repetition, as the compiler makes them.
fn policy_set() -> impl Strategy<Value = PolicySet> {
    (vec(rule(), 0..6), vec(pod_policy(), 0..4)).prop_map(|(mut rules, mut pods)| {
        rules.sort_by(|a, b| a.id.cmp(&b.id));
        rules.dedup_by(|a, b| a.id == b.id);
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        pods.dedup_by(|a, b| a.name == b.name);
        PolicySet { rules, pods }
    })
}

/// The spec as an API server returns it: numbers without a fraction are integers.
fn over_the_wire(spec: &NodeWatermarkSpec) -> NodeWatermarkSpec {
    fn go(value: Value) -> Value {
        match value {
            Value::Number(number) => match number.as_f64() {
                #[allow(clippy::cast_possible_truncation, reason = "checked to be whole")]
                Some(float) if float.fract() == 0.0 && float.abs() < 1e15 => json!(float as i64),
                _ => Value::Number(number),
            },
            Value::Array(items) => items.into_iter().map(go).collect(),
            Value::Object(fields) => fields.into_iter().map(|(k, v)| (k, go(v))).collect(),
            other => other,
        }
    }
    serde_json::from_value(go(serde_json::to_value(spec).unwrap())).unwrap()
}

proptest! {
    #[test]
    fn a_policy_survives_the_round_trip(policy in policy_set()) {
        let spec = NodeWatermarkSpec::new("uid", &policy, false, Vec::new());
        let received = over_the_wire(&spec);
        prop_assert_eq!(&received, &spec);
        prop_assert_eq!(received.content_hash().to_string(), spec.hash);
        let read = received.read().unwrap();
        prop_assert_eq!(read.refused, vec![]);
        prop_assert_eq!(read.policy, policy);
    }

    /// A field that it does not know makes an agent refuse the rule.
    #[test]
    fn an_agent_of_the_release_before_knows_every_field_of_its_rules(policy in policy_set()) {
        let spec = NodeWatermarkSpec::new("uid", &policy, false, Vec::new()).for_old_agent();
        prop_assert_eq!(spec.content_hash().to_string(), spec.hash.clone());
        let value = serde_json::to_value(over_the_wire(&spec)).unwrap();
        for (rule, wanted) in value["rules"].as_array().into_iter().flatten().zip(&policy.rules) {
            let fields = rule.as_object().unwrap();
            prop_assert!(fields.keys().all(|field| FIELDS_BEFORE.contains(&&**field)), "{}", rule);
            let threshold = rule["watermark"].as_f64();
            prop_assert_eq!(threshold, Some(wanted.threshold));
            let restore = rule["restore"].as_f64().or(threshold);
            prop_assert_eq!(restore, Some(wanted.restore_value));
        }
    }

    /// Its objects have only floating-point numbers, those of this release both, and later ones only quantities.
    #[test]
    fn an_agent_reads_rules_of_controllers_before_and_after(policy in policy_set()) {
        let new = NodeWatermarkSpec::new("uid", &policy, false, Vec::new());
        let mut later = serde_json::to_value(&new).unwrap();
        let rules = later.get_mut("rules").and_then(Value::as_array_mut);
        for rule in rules.into_iter().flatten() {
            let rule = rule.as_object_mut().unwrap();
            prop_assert!(rule.remove("watermark").is_some(), "the old field is beside the new one");
            let restore = rule.remove("restore");
            prop_assert_eq!(restore.is_some(), rule.contains_key("restoreValue"));
        }
        let later: NodeWatermarkSpec = serde_json::from_value(later).unwrap();
        for spec in [later, new.for_old_agent()] {
            let read = over_the_wire(&spec).read().unwrap();
            prop_assert_eq!(read.refused, vec![]);
            prop_assert_eq!(&read.policy, &policy);
        }
    }

    #[test]
    fn soften_scheduling_only_changes_the_taint_effect(policy in policy_set()) {
        let spec = NodeWatermarkSpec::new("uid", &policy, true, Vec::new());
        let unchanged = NodeWatermarkSpec::new("uid", &policy, false, Vec::new());
        prop_assert_ne!(&spec.hash, &unchanged.hash);
        let mut read = over_the_wire(&spec).read().unwrap().policy;
        for (rule, before) in read.rules.iter_mut().zip(&policy.rules) {
            prop_assert_ne!(rule.action.scheduling, Some(TaintEffect::NoSchedule));
            prop_assert_eq!(rule.action.scheduling.is_some(), before.action.scheduling.is_some());
            rule.action = Arc::clone(&before.action);
        }
        prop_assert_eq!(read, policy);
    }

    #[test]
    fn any_change_of_a_rule_changes_the_hash(policy in policy_set(), other in rule()) {
        prop_assume!(!policy.rules.is_empty());
        let mut other = other;
        other.action = Arc::clone(&policy.rules[0].action);
        prop_assume!(policy.rules[0] != other);
        let mut changed = policy.clone();
        changed.rules[0] = other;
        let hash = |policy: &PolicySet| NodeWatermarkSpec::new("uid", policy, false, Vec::new()).hash;
        prop_assert_ne!(hash(&policy), hash(&changed));
    }
}

/// The fields of rules that agents know which do not read `value` and `restoreValue`.
const FIELDS_BEFORE: [&str; 14] = [
    "id",
    "metric",
    "fromProbe",
    "window",
    "series",
    "watermark",
    "restore",
    "avoidanceThreshold",
    "restoreThreshold",
    "sampleTTLSeconds",
    "probe",
    "action",
    "strategy",
    "activeDuring",
];

#[test]
fn the_value_of_a_rule_is_any_quantity() {
    let mut spec = two_rules();
    spec["rules"][0]["value"] = json!("1500m");
    spec["rules"][0]["restoreValue"] = json!("1");
    let spec: NodeWatermarkSpec = serde_json::from_value(spec).unwrap();
    let rule = spec.read().unwrap().policy.rules.remove(0);
    assert_eq!((rule.threshold, rule.restore_value), (1.5, 1.0));
}

fn scheduling_rule(name: &str) -> Rule {
    Rule {
        id: RuleId::from(format!("watermark1/{name}").as_str()),
        metric: Metric::CpuUsage,
        series: None,
        threshold: 4000.0,
        restore_value: 3000.0,
        avoidance_threshold: 2,
        restore_threshold: 2,
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(Action {
            name: "disablescheduling".into(),
            cool_down: Duration::from_mins(5),
            scheduling: Some(TaintEffect::NoSchedule),
            throttle: Some(CpuThrottle {
                min_ratio: 10,
                step: 10,
                idle: false,
            }),
            force_gc: false,
            eviction: None,
        }),
        strategy: Mode::Enforce,
        active_during: Vec::new(),
    }
}

fn two_rules() -> Value {
    let policy = PolicySet {
        rules: vec![scheduling_rule("a"), scheduling_rule("b")],
        pods: vec![PodPolicy {
            name: "batch".into(),
            labels: None,
            scopes: vec![ScopeRequirement::Qos(Membership::In(vec![
                QosClass::BestEffort,
            ]))],
            allowed: vec!["throttle".into()],
            standing: Standing::default(),
        }],
    };
    serde_json::to_value(NodeWatermarkSpec::new("uid", &policy, false, Vec::new())).unwrap()
}

fn refused(spec: Value) -> Vec<String> {
    let spec: NodeWatermarkSpec = serde_json::from_value(spec).unwrap();
    let read = spec.read().unwrap();
    assert_eq!(
        read.policy.rules.len() + read.policy.pods.len() + read.refused.len(),
        3
    );
    read.refused.iter().map(ToString::to_string).collect()
}

/// The path, the value, and a part of the reported error.
fn later_versions() -> Vec<(&'static str, Value, &'static str)> {
    vec![
        ("/rules/0/onlyAtNight", json!(true), "onlyAtNight"),
        ("/actions/0/migrate", json!({}), "migrate"),
        (
            "/rules/0/metric",
            json!("gpu_temperature"),
            "metric \"gpu_temperature\" is not known",
        ),
        (
            "/rules/0/strategy",
            json!("Canary"),
            "strategy \"Canary\" is not known",
        ),
        (
            "/actions/0/disableScheduling",
            json!("NoExecute"),
            "\"NoExecute\" is not known",
        ),
        ("/rules/0/value", json!("-1"), "value -1 is out of range"),
        ("/rules/0/value", json!("hot"), "value hot is out of range"),
        ("/rules/0/value", json!("NaN"), "value NaN is out of range"),
        ("/rules/0/value", json!(4000), "invalid type"),
        ("/rules/0/watermark", json!({"cpu": 1}), "invalid type"),
        (
            "/rules/0/restoreValue",
            json!("4001"),
            "restoreValue 4001 is out of range",
        ),
        (
            "/rules/0/avoidanceThreshold",
            json!(0),
            "avoidanceThreshold 0 is out of range",
        ),
        (
            "/actions/0/cpuThrottle/stepCPURatio",
            json!(101),
            "stepCPURatio 101 is out of range",
        ),
        (
            "/rules/0/series",
            json!([{"key": "device", "operator": "Like"}]),
            "operator \"Like\" is not known",
        ),
        (
            "/podPolicies/0/scopes/0/key",
            json!("Owner"),
            "scopes.key \"Owner\" is not known",
        ),
        (
            "/podPolicies/0/scopes/0/values/0",
            json!("Idle"),
            "scopes.values \"Idle\" is not known",
        ),
        ("/podPolicies/0/unless", json!([]), "unless"),
    ]
}

#[test]
fn an_unsupported_rule_does_not_affect_the_others() {
    for (path, value, expected) in later_versions() {
        let mut spec = two_rules();
        let (parent, field) = path.rsplit_once('/').unwrap();
        let parent = spec.pointer_mut(parent).unwrap();
        match parent {
            Value::Array(items) => items[field.parse::<usize>().unwrap()] = value,
            other => other[field] = value,
        }
        let refused = refused(spec);
        let rules = if path.starts_with("/actions") { 2 } else { 1 };
        assert_eq!(refused.len(), rules, "{path}: {refused:?}");
        assert!(refused[0].contains(expected), "{path}: {refused:?}");
    }
}

#[test]
fn a_rule_in_an_unknown_time_zone_is_refused() {
    let mut spec = two_rules();
    spec["rules"][0]["activeDuring"] = json!(["22:00-06:00 Mars/Olympus_Mons"]);
    let why =
        "activeDuring \"22:00-06:00 Mars/Olympus_Mons\" is not known to this version of plimsoll";
    assert_eq!(refused(spec), [format!("rule watermark1/a: {why}")]);
}

#[test]
fn a_spec_with_an_unknown_field_is_rejected() {
    let mut spec = two_rules();
    spec["suspended"] = json!(true);
    let spec: NodeWatermarkSpec = serde_json::from_value(spec).unwrap();
    assert_eq!(
        spec.read(),
        Err(SpecError::UnknownField("suspended".to_owned()))
    );
}

#[test]
fn two_rules_with_the_same_id_are_both_refused() {
    let mut spec = two_rules();
    spec["rules"][1]["id"] = spec["rules"][0]["id"].clone();
    let spec: NodeWatermarkSpec = serde_json::from_value(spec).unwrap();
    let read = spec.read().unwrap();
    assert_eq!(read.policy.rules, []);
    assert_eq!(read.refused[0].why, SpecError::Duplicate);
}

#[test]
fn the_spec_and_status_of_20_rules_take_at_most_8_kib() {
    let rules: Vec<Rule> = (0..20)
        .map(|index| scheduling_rule(&format!("cpu-usage-{index:02}")))
        .collect();
    let rule_status = |rule: &Rule| RuleStatus {
        id: rule.id.to_string(),
        metric: Some(rule.metric.to_string()),
        strategy: "Enforce".into(),
        state: "Breached".into(),
        value: Some(4321.5),
        threshold: rule.threshold,
        limited: false,
        rung: None,
        next_rung: None,
        earliest_eviction_time: None,
        evictions_ended: false,
        cool_down_seconds: None,
        outside_hours: false,
        since: Some(serde_json::from_value(json!("2026-11-21T13:50:01Z")).unwrap()),
        unknown: None,
        would_last_day: None,
    };
    let status = NodeWatermarkStatus {
        observed_hash: Some("0123456789abcdef".into()),
        agent: Some(AgentStatus {
            version: "0.1.0".into(),
            boot_id: "8c1a3f5e-5b1e-4a57-b8f5-5d0b0a3ad111".into(),
            report_time: None,
            reads_quantities: true,
        }),
        counts: Some(Counts::default()),
        rules: rules.iter().map(rule_status).collect(),
        ..NodeWatermarkStatus::default()
    };
    let policy = PolicySet {
        rules,
        pods: Vec::new(),
    };
    let sources = vec![
        "NodeQOS/watermark1@3".into(),
        "AvoidanceAction/disablescheduling@1".into(),
    ];
    let spec = NodeWatermarkSpec::new(
        "8c1a3f5e-5b1e-4a57-b8f5-5d0b0a3ad111",
        &policy,
        false,
        sources,
    );
    let size = |spec: &NodeWatermarkSpec| serde_json::to_vec(spec).unwrap().len();
    let status = serde_json::to_vec(&status).unwrap().len();
    // With both forms of the thresholds, which stay for one release, it is a little more.
    let both = size(&spec) + status;
    assert!(both <= 9 * 1024, "{both} bytes");
    let one = size(&spec.for_old_agent()) + status;
    assert!(one <= 8192, "{one} bytes");
}
