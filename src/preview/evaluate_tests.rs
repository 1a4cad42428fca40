use std::time::Duration;

use serde_json::json;

use super::super::report::Preview;
use super::*;
use crate::crd::{Objects, compile};
use crate::engine::DEFAULT_PERIOD;
use crate::engine::pod::{EvictionExemption, Pod, QosClass};
use crate::engine::testing::pod;
use crate::engine::units::{Bytes, Quota};

fn subject(pod: Pod) -> PodSubject {
    PodSubject {
        kubelet_uid: pod.uid.to_string(),
        quota: Quota::Unlimited,
        pod: Arc::new(pod),
    }
}

/// A node of 4 CPUs and 8 GiB.
struct TestNode {
    objects: Vec<serde_json::Value>,
    subjects: Vec<PodSubject>,
    summary: KubeletSummary,
    overrides: ValueOverrides,
}

fn object(kind: &str, name: &str, spec: &serde_json::Value) -> serde_json::Value {
    json!({
        "apiVersion": "ensurance.crane.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec,
    })
}

fn rule(metric: &str, value: u64, action: &str) -> serde_json::Value {
    json!({
        "name": "r", "avoidanceThreshold": 3, "actionName": action,
        "metricRule": {"name": metric, "value": value},
    })
}

fn best_effort() -> serde_json::Value {
    let scope = json!({"scopeName": "QOSClass", "operator": "In", "values": ["BestEffort"]});
    json!({"allowedActions": ["throttle", "eviction"], "scopeSelector": {"matchExpressions": [scope]}})
}

impl TestNode {
    /// The pods as name and millicores.
    fn new(
        metric: &str,
        threshold: u64,
        action: &serde_json::Value,
        node: u64,
        pods: &[(&str, u64)],
    ) -> Self {
        let stats = |(name, milli): &(&str, u64)| {
            json!({
                "podRef": {"uid": name}, "cpu": {"usageNanoCores": milli * 1_000_000},
                "memory": {"usageBytes": 60 << 20, "workingSetBytes": 50 << 20, "rssBytes": 40 << 20},
            })
        };
        let summary = json!({
            "node": {"cpu": {"usageNanoCores": node * 1_000_000}, "memory": {"workingSetBytes": 4_u64 << 30}},
            "pods": pods.iter().map(stats).collect::<Vec<_>>(),
        });
        Self {
            objects: vec![
                object(
                    "NodeQOS",
                    "q",
                    &json!({"rules": [rule(metric, threshold, "act")]}),
                ),
                object("AvoidanceAction", "act", action),
                object("PodQOS", "p", &best_effort()),
            ],
            subjects: pods.iter().map(|(name, _)| subject(pod(name))).collect(),
            summary: serde_json::from_value(summary).unwrap(),
            overrides: ValueOverrides::new(),
        }
    }

    fn edit(mut self, name: &str, edit: impl FnOnce(&mut Pod)) -> Self {
        let found = self
            .subjects
            .iter_mut()
            .find(|s| s.pod.name == name)
            .unwrap();
        edit(Arc::make_mut(&mut found.pod));
        self
    }

    fn node(&self, summary: Result<&KubeletSummary, &str>) -> NodePreview {
        let facts = NodeFacts {
            labels: BTreeMap::new(),
            cpus: 4,
            memory: Bytes(8 << 30),
            windows: None,
        };
        let compiled = compile(&Objects::from_values(self.objects.clone()), &facts);
        evaluate(&NodeInput {
            node: "a",
            facts: &facts,
            policy: &compiled.policy,
            subjects: &self.subjects,
            summary,
            earlier: None,
            agent_status: None,
            overrides: &self.overrides,
            evaluation_period: DEFAULT_PERIOD,
            now: Timestamp::UNIX_EPOCH,
        })
    }

    fn preview(&self) -> Preview {
        Preview {
            nodes: vec![self.node(Ok(&self.summary))],
            ..Preview::default()
        }
    }

    fn rule(&self) -> RulePreview {
        self.node(Ok(&self.summary)).rules[0].clone()
    }
}

fn throttle() -> serde_json::Value {
    json!({"throttle": {"cpuThrottle": {"stepCPURatio": 10, "minCPURatio": 10}}})
}

fn describe(rule: &RulePreview, name: &str) -> String {
    let pod = rule.pods.iter().find(|pod| pod.name == name).unwrap();
    let steps = pod.would.iter().map(|change| match change {
        PlanChange::Throttle {
            from, to, release, ..
        } => format!("throttle {from}->{to} {release}"),
        PlanChange::Evict { release, .. } => format!("evict {release:?}"),
        other => format!("{other:?}"),
    });
    steps
        .chain(pod.reasons.iter().cloned())
        .collect::<Vec<_>>()
        .join("; ")
}

#[test]
fn victims_are_throttled_in_order_until_the_gap_is_covered() {
    let pods = [
        ("small", 300),
        ("big", 900),
        ("idle", 3),
        ("safe", 500),
        ("other", 800),
        ("tiny", 200),
    ];
    let node = TestNode::new("cpu_total_usage", 3000, &throttle(), 3100, &pods)
        .edit("safe", |pod| pod.protected = true)
        .edit("other", |pod| pod.qos = QosClass::Burstable);
    let rule = node.rule();
    assert_eq!(
        (rule.state, rule.value, rule.gap),
        (ThresholdComparison::Over, Some(3100.0), Some(110))
    );
    let order: Vec<_> = rule.pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(order, ["big", "safe", "small", "tiny", "idle", "other"]);
    assert_eq!(describe(&rule, "big"), "throttle 100->90 90m");
    assert_eq!(describe(&rule, "safe"), "it is protected");
    assert_eq!(describe(&rule, "small"), "throttle 100->90 30m");
    let enough = "not needed, actions on other pods release enough";
    assert_eq!(describe(&rule, "tiny"), enough);
    assert_eq!(
        describe(&rule, "idle"),
        "it uses so little that acting on it would not help"
    );
    assert_eq!(describe(&rule, "other"), "no PodQOS matches it");
}

#[test]
fn avoidance_thresholds_are_ignored_but_shown() {
    let node = TestNode::new("cpu_total_usage", 3000, &throttle(), 3100, &[("b", 900)]);
    let rule = node.rule();
    assert_eq!(
        (rule.evaluations, rule.period),
        (3, Duration::from_secs(10))
    );
    assert_eq!(describe(&rule, "b"), "throttle 100->90 90m");
}

#[test]
fn only_the_first_round_of_evictions_is_shown() {
    let action = json!({"eviction": {}});
    let node = TestNode::new(
        "memory_total_usage",
        1 << 30,
        &action,
        100,
        &[("b", 900), ("c", 800)],
    );
    let rule = node.rule();
    assert_eq!(rule.value, Some((4_u64 << 30) as f64));
    let evicted = rule.pods.iter().filter(|pod| !pod.would.is_empty()).count();
    assert_eq!(evicted, 1);
    assert_eq!(
        describe(&rule, "c"),
        "not its turn, at most 1 per round may be evicted"
    );
    assert!(rule.scheduling.is_some());
}

#[test]
fn pods_after_the_last_victim_have_their_own_reasons() {
    let pods = [
        ("big", 900),
        ("safe", 500),
        ("static", 400),
        ("alone", 300),
        ("next", 200),
    ];
    let mut node = TestNode::new(
        "cpu_total_usage",
        1000,
        &json!({"eviction": {}}),
        3000,
        &pods,
    )
    .edit("safe", |pod| pod.protected = true)
    .edit("static", |pod| {
        pod.eviction_exemption = Some(EvictionExemption::Static);
    })
    .edit("alone", |pod| pod.owned = false);
    let rule = node.rule();
    assert_eq!(describe(&rule, "big"), "evict Some(900)");
    assert_eq!(describe(&rule, "safe"), "it is protected");
    let never_evicted = "it is a static pod, which its kubelet would start again";
    assert_eq!(describe(&rule, "static"), never_evicted);
    let unowned = "it has no controller, and the action has no evictUnowned";
    assert_eq!(describe(&rule, "alone"), unowned);
    let not_yet = "not its turn, at most 1 per round may be evicted";
    assert_eq!(describe(&rule, "next"), not_yet);
    // Each kind of action has its own reason.
    node.objects[1]["spec"] = json!({"throttle": {"cpuThrottle": {}}, "eviction": {}});
    node.objects[2]["spec"]["allowedActions"] = json!(["throttle"]);
    let rule = node.rule();
    let no = "no eviction: no PodQOS allows this action on it";
    assert_eq!(
        describe(&rule, "next"),
        format!("throttle 100->90 20m; {no}")
    );
    assert_eq!(describe(&rule, "safe"), {
        "no throttle: it is protected; no eviction: no PodQOS allows this action on it"
    });
    // Every victim, as the metric has no unit of release.
    node.objects[0]["spec"]["rules"][0]["metricRule"]["name"] = json!("cpu_load_1_min");
    node.overrides.insert("cpu_load_1_min".to_owned(), 2000.0);
    let rule = node.rule();
    assert!(describe(&rule, "next").starts_with("throttle 100->90 20m"));
    assert!(describe(&rule, "safe").starts_with("no throttle: it is protected"));
}

#[test]
fn the_heading_says_when_a_rule_evicts_at_the_earliest() {
    let pods = [("b", 900)];
    let mut action = throttle();
    let text = |action| {
        TestNode::new("cpu_total_usage", 1000, &action, 3000, &pods)
            .preview()
            .to_string()
    };
    assert!(!text(action.clone()).contains("evicts"));
    action["eviction"] = json!({});
    let text = text(action);
    assert!(
        text.contains("3 evaluations above the threshold (30s); evicts 1m 50s later at the earliest; 2200m to release"),
        "{text}"
    );
}

#[test]
fn a_pod_with_several_rules_counts_once() {
    let pods = [("b", 900), ("c", 800)];
    let mut node = TestNode::new("cpu_total_usage", 1000, &throttle(), 3000, &pods);
    let second = object(
        "NodeQOS",
        "q2",
        &json!({"rules": [rule("cpu_total_usage", 900, "act")]}),
    );
    node.objects.push(second);
    let text = node.preview().summary();
    assert_eq!(text, "1 of 1 node over a threshold; throttled: 2 pods");
}

#[test]
fn a_prefer_no_schedule_node_is_not_counted_as_closed() {
    let effect = |effect: &str| {
        let action = json!({"disableScheduling": {"effect": effect}});
        TestNode::new("cpu_total_usage", 1000, &action, 3000, &[])
            .preview()
            .summary()
    };
    let over = "1 of 1 node over a threshold";
    let closed = format!("{over}; closed to new pods: 1 node");
    assert_eq!(effect("NoSchedule"), closed);
    let avoided = format!("{over}; PreferNoSchedule: 1 node");
    assert_eq!(effect("PreferNoSchedule"), avoided);
}

#[test]
fn the_kubelets_memory_is_given_as_two_bounds() {
    let with_rss = |rss: u64, threshold: u64| {
        let mut node = TestNode::new(
            "memory_total_usage",
            threshold,
            &json!({"eviction": {}}),
            100,
            &[("b", 900)],
        );
        node.summary = serde_json::from_value(json!({
            "node": {"memory": {"workingSetBytes": 4_u64 << 30, "rssBytes": rss}},
        }))
        .unwrap();
        (node.rule().state, node.preview().to_string())
    };
    let (state, text) = with_rss(1 << 30, 2 << 30);
    assert_eq!(state, ThresholdComparison::Perhaps);
    assert!(
        text.contains("1Gi .. 4Gi") && text.contains("at most: disable scheduling"),
        "{text}"
    );
    assert!(
        text.contains("0 of 1 node over a threshold; perhaps over one: 1 node"),
        "{text}"
    );
    assert_eq!(with_rss(3 << 30, 2 << 30).0, ThresholdComparison::Over);
    assert_eq!(with_rss(1 << 30, 5 << 30).0, ThresholdComparison::Under);
}

#[test]
fn a_given_value_replaces_the_live_one() {
    let mut node = TestNode::new("cpu_total_usage", 3000, &throttle(), 100, &[("b", 90)]);
    assert_eq!(node.rule().state, ThresholdComparison::Under);
    assert!(node.rule().pods.is_empty());
    node.overrides.insert("cpu_total_usage".to_owned(), 3500.0);
    let rule = node.rule();
    assert_eq!(
        (rule.state, rule.value),
        (ThresholdComparison::Over, Some(3500.0))
    );
    assert_eq!(describe(&rule, "b"), "throttle 100->90 9m");
}

#[test]
fn a_rule_on_an_unreported_metric_is_unknown_and_does_nothing() {
    let metric = "cpu_load_1_min";
    let mut node = TestNode::new(metric, 3, &throttle(), 3900, &[("b", 900), ("c", 100)]);
    let rule = node.rule();
    assert_eq!(
        (rule.state, rule.value),
        (ThresholdComparison::Unknown, None)
    );
    assert!(rule.unknown.is_some() && rule.pods.is_empty() && rule.scheduling.is_none());
    // With a given value: every victim, as such a metric has no unit of release.
    node.overrides.insert(metric.to_owned(), 90.0);
    let rule = node.rule();
    assert_eq!(describe(&rule, "b"), "throttle 100->90 90m");
    assert_eq!(describe(&rule, "c"), "throttle 100->90 10m");
}

#[test]
fn without_a_kubelet_values_are_unknown_and_pods_are_left_alone() {
    let mut node = TestNode::new("cpu_total_usage", 3000, &throttle(), 3900, &[("b", 900)]);
    let rule = node
        .node(Err("its kubelet does not answer"))
        .rules
        .remove(0);
    assert_eq!(rule.unknown.as_deref(), Some("its kubelet does not answer"));
    node.overrides.insert("cpu_total_usage".to_owned(), 3500.0);
    let rule = node
        .node(Err("its kubelet does not answer"))
        .rules
        .remove(0);
    assert_eq!(rule.state, ThresholdComparison::Over);
    assert_eq!(describe(&rule, "b"), "it has no fresh sample");
}

#[test]
fn stale_pod_statistics_are_ignored() {
    let mut node = TestNode::new("cpu_total_usage", 3000, &throttle(), 3500, &[]);
    node.subjects.push(subject(pod("b")));
    node.summary = serde_json::from_value(json!({
        "node": {"cpu": {"time": "2026-11-21T16:05:00Z", "usageNanoCores": 3_500_000_000_u64}},
        "pods": [{"podRef": {"uid": "b"}, "cpu": {"time": "2026-11-21T16:03:00Z", "usageNanoCores": 900_000_000}}],
    }))
    .unwrap();
    assert_eq!(describe(&node.rule(), "b"), "it has no fresh sample");
}

#[test]
fn a_rule_outside_its_hours_shows_what_it_would_do_within_them() {
    let mut node = TestNode::new("cpu_total_usage", 2000, &throttle(), 3000, &[("a", 2000)]);
    // It is midnight.
    for (hours, outside) in [("23:00-01:00 UTC", false), ("08:00-18:00 UTC", true)] {
        node.objects[0]["spec"]["rules"][0]["activeDuring"] = json!([hours]);
        let rule = node.rule();
        assert_eq!(rule.outside_hours, outside);
        assert_eq!(rule.state, ThresholdComparison::Over);
        let text = node.preview().to_string();
        let now = text.contains("throttle 1 pod") && !text.contains("outside its hours");
        let later = text.contains("outside its hours; within them: throttle 1 pod");
        assert_eq!((now, later), (!outside, outside), "{text}");
    }
    node.objects[0]["spec"]["rules"][0]["metricRule"]["value"] = json!(4000);
    assert!(
        node.preview()
            .to_string()
            .contains("under  outside its hours")
    );
}

#[test]
fn a_preview_rule_only_reports() {
    let mut node = TestNode::new("cpu_total_usage", 3000, &throttle(), 3500, &[("b", 900)]);
    node.objects[0]["spec"]["rules"][0]["strategy"] = json!("Preview");
    assert_eq!(describe(&node.rule(), "b"), "throttle 100->90 90m");
    let text = node.preview().to_string();
    assert!(text.contains("only report: throttle 1 pod"), "{text}");
    assert!(
        text.contains("1 of 1 node over a threshold; only reported: throttle of 1 pod"),
        "{text}"
    );
}

#[test]
fn the_table_shows_rules_over_their_threshold_and_affected_pods() {
    let node = TestNode::new(
        "cpu_total_usage",
        3000,
        &throttle(),
        3100,
        &[("big", 900), ("dull", 700), ("fair", 100)],
    )
    .edit("dull", |pod| pod.protected = true)
    .edit("fair", |pod| pod.qos = QosClass::Guaranteed);
    let expected = "\
NODE  RULE  METRIC           VALUE  THRESHOLD  FROM     STATE  WOULD
a     q/r   cpu_total_usage  3100m      3000m  kubelet  OVER   throttle 1 pod

a: q/r (act), after 3 evaluations above the threshold (30s); 110m to release in total:
  POD           CLASS       PRIORITY   CPU  MEMORY  FIRST ROUND
  default/big   BestEffort         0  900m    40Mi  throttle 100 % -> 90 % (810m), releases 90m
  default/dull  BestEffort         0  700m    40Mi  left alone: it is protected
  left alone, no PodQOS matches: 1 pod (default/fair)

load line of 1 node: CPU 75 % (q/r), memory 90 % (no rule)
1 of 1 node over a threshold; throttled: 1 pod
";
    assert_eq!(node.preview().to_string(), expected);
}

#[test]
fn throttles_in_force_are_continued() {
    let node = TestNode::new("cpu_total_usage", 3000, &throttle(), 3500, &[("b", 400)]);
    let facts = NodeFacts {
        cpus: 4,
        memory: Bytes(8 << 30),
        ..NodeFacts::default()
    };
    let policy = compile(&Objects::from_values(node.objects.clone()), &facts).policy;
    let spec = crate::crd::NodeWatermarkSpec::new("uid", &policy, false, Vec::new());
    let object = serde_json::from_value(json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark",
        "metadata": {"name": "a", "managedFields": [
            {"subresource": "status", "time": "2026-11-21T16:00:00Z", "manager": "agent"},
        ]},
        "spec": spec,
        "status": {
            "observedHash": spec.hash,
            "rules": [{"id": "q/r", "strategy": "Enforce", "state": "Breached", "value": 3300.0, "mark": 3000.0}],
            "throttled": [{"namespace": "default", "pod": "b", "uid": "b", "rule": "q/r", "ratio": 50, "toMillicores": 400}],
        },
    }))
    .unwrap();
    let agent_status = ReportedWatermark::of(&object).unwrap();
    let at = |now: &str| {
        evaluate(&NodeInput {
            node: "a",
            facts: &facts,
            policy: &policy,
            subjects: &node.subjects,
            summary: Ok(&node.summary),
            earlier: None,
            agent_status: Some(&agent_status),
            overrides: &node.overrides,
            evaluation_period: DEFAULT_PERIOD,
            now: now.parse().unwrap(),
        })
    };
    let rule = at("2026-11-21T16:00:20Z").rules.remove(0);
    let age = Duration::from_secs(20);
    assert_eq!(rule.source, ValueSource::Agent { value: 3300.0, age });
    assert_eq!((rule.value, rule.in_force), (Some(3300.0), 1));
    assert_eq!(describe(&rule, "b"), "throttle 50->40 80m");
    // The kubelet is preferred to an outdated agent status.
    let rule = at("2026-11-21T16:02:00Z").rules.remove(0);
    assert_eq!(
        (rule.source, rule.value),
        (ValueSource::Kubelet, Some(3500.0))
    );
}

#[test]
fn the_batch_weight_share_says_whether_the_idle_class_would_protect() {
    let shown = |class: QosClass| {
        let names: Vec<String> = (0..40).map(|number| format!("batch-{number}")).collect();
        let mut pods = vec![("web", 1200)];
        pods.extend(names.iter().map(|name| (name.as_str(), 60)));
        let idle = json!({"throttle": {"cpuThrottle": {"idle": true}}});
        let mut node = TestNode::new("cpu_total_usage", 3900, &idle, 3800, &pods);
        let spec = json!({
            "allowedActions": ["throttle"], "labelSelector": {"matchLabels": {"workload": "batch"}},
        });
        node.objects[2] = object("PodQOS", "p", &spec);
        for subject in &mut node.subjects {
            let pod = Arc::make_mut(&mut subject.pod);
            if pod.name == "web" {
                (pod.qos, pod.cpu_request) = (QosClass::Burstable, MilliCpu(300));
            } else {
                pod.qos = class;
                pod.labels = [("workload".to_owned(), "batch".to_owned())].into();
            }
        }
        node.preview().to_string()
    };
    // BestEffort pods weigh 10 together, whatever their number, and the service 123 on two of the four CPUs.
    let held = shown(QosClass::BestEffort);
    let expected = "batch weight share (on cgroup v2): at most 4 %, on a beside default/web\n";
    assert!(held.contains(expected), "{held}");
    // In the idle class beside the service each weighs 3.
    let too_many = shown(QosClass::Burstable);
    let expected = "at most 33 %, on a beside default/web; above 10 % on 1 node: too many busy batch pods for the idle class; \
                    make them BestEffort, or add a rule on protected_cpu_delay_max with quotas\n";
    assert!(too_many.contains(expected), "{too_many}");
}

#[test]
fn what_a_policy_does_at_all_times_is_shown_without_any_rule() {
    let mut node = TestNode::new(
        "cpu_total_usage",
        3000,
        &json!({}),
        0,
        &[("b", 0), ("a", 0)],
    );
    let pods = json!({
        "labelSelector": {},
        "resourceQOS": {"cpuQOS": {"cpuPriority": 7, "cpuBurst": {"burstQuota": "500m"}}},
    });
    node.objects = vec![object("PodQOS", "batch", &pods)];
    let mut protected = pod("c");
    protected.protected = true;
    node.subjects.push(subject(protected));
    let shown = node.node(Err("no answer"));
    assert_eq!(shown.rules, []);
    assert_eq!(shown.kubelet_error, None);
    assert_eq!(shown.standing[0].idle, ["default/a", "default/b"]);
    assert_eq!(
        shown.standing[0].burst,
        ["default/a", "default/b", "default/c"]
    );
    let text = Preview {
        nodes: vec![shown],
        ..Preview::default()
    };
    let text = text.to_string();
    let line = "PodQOS/batch: idle class at all times: 2 pods (default/a, default/b); \
                burst of 500m above the CPU limit: 3 pods (default/a, default/b, default/c)";
    assert!(text.contains(line), "{text}");
    assert!(text.contains("selected by no rule: 1 node"), "{text}");
}
