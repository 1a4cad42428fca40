use std::time::Duration;

use serde_json::json;

use super::super::report::Preview;
use super::*;
use crate::crd::{Objects, compile};
use crate::engine::pod::{Kept as NeverEvicted, Pod, QosClass};
use crate::engine::testing::pod;
use crate::engine::units::{Bytes, Quota};

fn subject(pod: Pod) -> Subject {
    Subject {
        kubelet_uid: pod.uid.to_string(),
        quota: Quota::Unlimited,
        pod: Arc::new(pod),
    }
}

/// A node of 4 CPUs and 8 GiB.
struct Bench {
    objects: Vec<serde_json::Value>,
    subjects: Vec<Subject>,
    summary: Summary,
    given: Given,
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

impl Bench {
    /// The pods as name and millicores.
    fn new(
        metric: &str,
        mark: u64,
        action: &serde_json::Value,
        node: u64,
        pods: &[(&str, u64)],
    ) -> Self {
        let stats = |(name, milli): &(&str, u64)| {
            json!({
                "podRef": {"uid": name}, "cpu": {"usageNanoCores": milli * 1_000_000},
                "memory": {"usageBytes": 30 << 20, "workingSetBytes": 20 << 20, "rssBytes": 10 << 20},
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
                    &json!({"rules": [rule(metric, mark, "act")]}),
                ),
                object("AvoidanceAction", "act", action),
                object("PodQOS", "p", &best_effort()),
            ],
            subjects: pods.iter().map(|(name, _)| subject(pod(name))).collect(),
            summary: serde_json::from_value(summary).unwrap(),
            given: Given::new(),
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

    fn node(&self, summary: Result<&Summary, &str>) -> NodePreview {
        let facts = NodeFacts {
            labels: BTreeMap::new(),
            cpus: 4,
            memory: Bytes(8 << 30),
        };
        let compiled = compile(&Objects::from_values(self.objects.clone()), &facts);
        foresee(&Scene {
            node: "a",
            facts: &facts,
            policy: &compiled.policy,
            subjects: &self.subjects,
            summary,
            earlier: None,
            kept: None,
            given: &self.given,
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

fn words(rule: &RulePreview, name: &str) -> String {
    let pod = rule.pods.iter().find(|pod| pod.name == name).unwrap();
    let steps = pod.would.iter().map(|change| match change {
        Change::Throttle {
            from, to, release, ..
        } => format!("throttle {from}->{to} {release}"),
        Change::Evict { release, .. } => format!("evict {release:?}"),
        other => format!("{other:?}"),
    });
    steps
        .chain(pod.reasons.iter().cloned())
        .collect::<Vec<_>>()
        .join("; ")
}

#[test]
fn victims_are_throttled_in_order_until_the_gap_is_covered_and_the_others_say_why_not() {
    let pods = [
        ("small", 300),
        ("big", 900),
        ("idle", 3),
        ("safe", 500),
        ("other", 800),
        ("tiny", 200),
    ];
    let bench = Bench::new("cpu_total_usage", 3000, &throttle(), 3100, &pods)
        .edit("safe", |pod| pod.protected = true)
        .edit("other", |pod| pod.qos = QosClass::Burstable);
    let rule = bench.rule();
    assert_eq!(
        (rule.standing, rule.value, rule.gap),
        (Standing::Over, Some(3100.0), Some(110))
    );
    let order: Vec<_> = rule.pods.iter().map(|pod| pod.name.as_str()).collect();
    assert_eq!(order, ["big", "safe", "small", "tiny", "idle", "other"]);
    assert_eq!(words(&rule, "big"), "throttle 100->90 90m");
    assert_eq!(words(&rule, "safe"), "it is protected");
    assert_eq!(words(&rule, "small"), "throttle 100->90 30m");
    let enough = "not needed, what is done to others releases enough";
    assert_eq!(words(&rule, "tiny"), enough);
    assert_eq!(words(&rule, "idle"), "it uses less than 10m of CPU");
    assert_eq!(words(&rule, "other"), "no PodQOS matches it");
}

#[test]
fn every_threshold_counts_as_met_and_is_told() {
    let bench = Bench::new("cpu_total_usage", 3000, &throttle(), 3100, &[("b", 900)]);
    let rule = bench.rule();
    assert_eq!(
        (rule.evaluations, rule.period),
        (3, Duration::from_secs(10))
    );
    assert_eq!(words(&rule, "b"), "throttle 100->90 90m");
}

#[test]
fn only_the_first_round_is_shown_also_for_gauges() {
    let action = json!({"eviction": {}});
    let bench = Bench::new(
        "memory_total_usage",
        1 << 30,
        &action,
        100,
        &[("b", 900), ("c", 800)],
    );
    let rule = bench.rule();
    assert_eq!(rule.value, Some((4_u64 << 30) as f64));
    let evicted = rule.pods.iter().filter(|pod| !pod.would.is_empty()).count();
    assert_eq!(evicted, 1);
    assert_eq!(
        words(&rule, "c"),
        "not its turn, at most 1 a round may be evicted"
    );
    assert!(rule.scheduling.is_some());
}

#[test]
fn pods_behind_the_last_victim_have_their_own_reasons() {
    let pods = [
        ("big", 900),
        ("safe", 500),
        ("static", 400),
        ("alone", 300),
        ("next", 200),
    ];
    let mut bench = Bench::new(
        "cpu_total_usage",
        1000,
        &json!({"eviction": {}}),
        3000,
        &pods,
    )
    .edit("safe", |pod| pod.protected = true)
    .edit("static", |pod| pod.kept = Some(NeverEvicted::Static))
    .edit("alone", |pod| pod.owned = false);
    let rule = bench.rule();
    assert_eq!(words(&rule, "big"), "evict Some(900)");
    assert_eq!(words(&rule, "safe"), "it is protected");
    let kept = "it is static, its kubelet would start it again";
    assert_eq!(words(&rule, "static"), kept);
    let unowned = "it has no controller, and the action has no evictUnowned";
    assert_eq!(words(&rule, "alone"), unowned);
    let waits = "not its turn, at most 1 a round may be evicted";
    assert_eq!(words(&rule, "next"), waits);
    // Throttling is allowed on all, and one kind has nothing to do with the other.
    bench.objects[1]["spec"] = json!({"throttle": {"cpuThrottle": {}}, "eviction": {}});
    bench.objects[2]["spec"]["allowedActions"] = json!(["throttle"]);
    let rule = bench.rule();
    let no = "no eviction: no PodQOS allows this action on it";
    assert_eq!(words(&rule, "next"), format!("throttle 100->90 20m; {no}"));
    assert_eq!(words(&rule, "safe"), {
        "no throttle: it is protected; no eviction: no PodQOS allows this action on it"
    });
    // One victim a round, as the metric has no unit of release.
    bench.objects[0]["spec"]["rules"][0]["metricRule"]["name"] = json!("cpu_load_1_min");
    bench.given.insert("cpu_load_1_min".to_owned(), 2000.0);
    let rule = bench.rule();
    let waits = "it is one pod a round as the metric has no unit of release";
    assert!(words(&rule, "next").starts_with(&format!("no throttle: not its turn, {waits}")));
    assert!(words(&rule, "safe").starts_with("no throttle: it is protected"));
}

#[test]
fn a_pod_counts_once_for_however_many_rules() {
    let pods = [("b", 900), ("c", 800)];
    let mut bench = Bench::new("cpu_total_usage", 1000, &throttle(), 3000, &pods);
    let second = object(
        "NodeQOS",
        "q2",
        &json!({"rules": [rule("cpu_total_usage", 900, "act")]}),
    );
    bench.objects.push(second);
    let text = bench.preview().summary();
    assert_eq!(text, "1 of 1 node over a mark; throttled: 2 pods");
}

#[test]
fn a_node_that_new_pods_may_still_come_to_is_not_closed() {
    let effect = |effect: &str| {
        let action = json!({"disableScheduling": {"effect": effect}});
        Bench::new("cpu_total_usage", 1000, &action, 3000, &[])
            .preview()
            .summary()
    };
    let over = "1 of 1 node over a mark";
    let closed = format!("{over}; closed to new pods: 1 node");
    assert_eq!(effect("NoSchedule"), closed);
    let avoided = format!("{over}; new pods preferred elsewhere: 1 node");
    assert_eq!(effect("PreferNoSchedule"), avoided);
}

#[test]
fn memory_by_the_kubelet_is_between_two_bounds() {
    let with_rss = |rss: u64, mark: u64| {
        let mut bench = Bench::new(
            "memory_total_usage",
            mark,
            &json!({"eviction": {}}),
            100,
            &[("b", 900)],
        );
        bench.summary = serde_json::from_value(json!({
            "node": {"memory": {"workingSetBytes": 4_u64 << 30, "rssBytes": rss}},
        }))
        .unwrap();
        (bench.rule().standing, bench.preview().to_string())
    };
    let (standing, text) = with_rss(1 << 30, 2 << 30);
    assert_eq!(standing, Standing::Perhaps);
    assert!(
        text.contains("1Gi .. 4Gi") && text.contains("at the most: disable scheduling"),
        "{text}"
    );
    assert!(
        text.contains("0 of 1 node over a mark; perhaps over one: 1 node"),
        "{text}"
    );
    assert_eq!(with_rss(3 << 30, 2 << 30).0, Standing::Over);
    assert_eq!(with_rss(1 << 30, 5 << 30).0, Standing::Under);
}

#[test]
fn a_calm_node_can_be_thought_busy() {
    let mut bench = Bench::new("cpu_total_usage", 3000, &throttle(), 100, &[("b", 90)]);
    assert_eq!(bench.rule().standing, Standing::Under);
    assert!(bench.rule().pods.is_empty());
    bench.given.insert("cpu_total_usage".to_owned(), 3500.0);
    let rule = bench.rule();
    assert_eq!((rule.standing, rule.value), (Standing::Over, Some(3500.0)));
    assert_eq!(words(&rule, "b"), "throttle 100->90 9m");
}

#[test]
fn a_metric_that_the_kubelet_does_not_tell_is_unknown_and_nothing_starts() {
    for metric in [
        "cpu_load_1_min",
        "disk_write_kibps",
        "network_receive_kibps",
        "memory_pressure_some_avg10",
    ] {
        let mut bench = Bench::new(metric, 3, &throttle(), 3900, &[("b", 900), ("c", 100)]);
        let rule = bench.rule();
        assert_eq!(
            (rule.standing, rule.value),
            (Standing::Unknown, None),
            "{metric}"
        );
        assert!(rule.unknown.is_some() && rule.pods.is_empty() && rule.scheduling.is_none());
        // What if: one victim, as such a metric has no unit of release.
        bench.given.insert(metric.to_owned(), 90.0);
        let rule = bench.rule();
        assert_eq!(words(&rule, "b"), "throttle 100->90 90m", "{metric}");
        assert!(words(&rule, "c").starts_with("not its turn"), "{metric}");
    }
}

#[test]
fn a_silent_kubelet_leaves_values_unknown_and_pods_alone() {
    let mut bench = Bench::new("cpu_total_usage", 3000, &throttle(), 3900, &[("b", 900)]);
    let rule = bench
        .node(Err("its kubelet does not answer"))
        .rules
        .remove(0);
    assert_eq!(rule.unknown.as_deref(), Some("its kubelet does not answer"));
    bench.given.insert("cpu_total_usage".to_owned(), 3500.0);
    let rule = bench
        .node(Err("its kubelet does not answer"))
        .rules
        .remove(0);
    assert_eq!(rule.standing, Standing::Over);
    assert_eq!(words(&rule, "b"), "it has no fresh sample");
}

#[test]
fn stale_figures_of_a_pod_are_none() {
    let mut bench = Bench::new("cpu_total_usage", 3000, &throttle(), 3500, &[]);
    bench.subjects.push(subject(pod("b")));
    bench.summary = serde_json::from_value(json!({
        "node": {"cpu": {"time": "2026-11-21T16:05:00Z", "usageNanoCores": 3_500_000_000_u64}},
        "pods": [{"podRef": {"uid": "b"}, "cpu": {"time": "2026-11-21T16:03:00Z", "usageNanoCores": 900_000_000}}],
    }))
    .unwrap();
    assert_eq!(words(&bench.rule(), "b"), "it has no fresh sample");
}

#[test]
fn a_preview_rule_is_shown_as_reporting_only() {
    let mut bench = Bench::new("cpu_total_usage", 3000, &throttle(), 3500, &[("b", 900)]);
    bench.objects[0]["spec"]["rules"][0]["strategy"] = json!("Preview");
    assert_eq!(words(&bench.rule(), "b"), "throttle 100->90 90m");
    let text = bench.preview().to_string();
    assert!(text.contains("only report: throttle 1 pod"), "{text}");
    assert!(
        text.contains("1 of 1 node over a mark; only reported: throttle of 1 pod"),
        "{text}"
    );
}

#[test]
fn the_table_says_who_is_over_and_what_would_be_done_to_whom() {
    let bench = Bench::new(
        "cpu_total_usage",
        3000,
        &throttle(),
        3100,
        &[("big", 900), ("dull", 700), ("fair", 100)],
    )
    .edit("dull", |pod| pod.protected = true)
    .edit("fair", |pod| pod.qos = QosClass::Guaranteed);
    let expected = "\
NODE  RULE  METRIC           VALUE   MARK  FROM     STATE  WOULD
a     q/r   cpu_total_usage  3100m  3000m  kubelet  OVER   throttle 1 pod

a: q/r (act), after 3 evaluations above the mark (30s); 110m to release in all:
  POD           CLASS       PRIORITY   CPU  MEMORY  FIRST ROUND
  default/big   BestEffort         0  900m    10Mi  throttle 100 % -> 90 % (810m), releases 90m
  default/dull  BestEffort         0  700m    10Mi  left alone: it is protected
  left alone, no PodQOS matches: 1 pod (default/fair)

1 of 1 node over a mark; throttled: 1 pod
";
    assert_eq!(bench.preview().to_string(), expected);
}

#[test]
fn what_an_agent_has_in_force_is_gone_on_from() {
    let bench = Bench::new("cpu_total_usage", 3000, &throttle(), 3500, &[("b", 400)]);
    let facts = NodeFacts {
        cpus: 4,
        memory: Bytes(8 << 30),
        ..NodeFacts::default()
    };
    let policy = compile(&Objects::from_values(bench.objects.clone()), &facts).policy;
    let spec = crate::crd::NodeWatermarkSpec::new("uid", &policy, false, Vec::new());
    let object = serde_json::from_value(json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark",
        "metadata": {"name": "a", "managedFields": [
            {"subresource": "status", "time": "2026-11-21T16:00:00Z", "manager": "agent"},
        ]},
        "spec": spec,
        "status": {
            "observedHash": spec.hash,
            "rules": [{"id": "q/r", "strategy": "None", "state": "Breached", "value": 3300.0, "mark": 3000.0}],
            "throttled": [{"namespace": "default", "pod": "b", "uid": "b", "rule": "q/r", "ratio": 50, "toMillicores": 400}],
        },
    }))
    .unwrap();
    let kept = Kept::of(&object).unwrap();
    let at = |now: &str| {
        foresee(&Scene {
            node: "a",
            facts: &facts,
            policy: &policy,
            subjects: &bench.subjects,
            summary: Ok(&bench.summary),
            earlier: None,
            kept: Some(&kept),
            given: &bench.given,
            now: now.parse().unwrap(),
        })
    };
    let rule = at("2026-11-21T16:00:20Z").rules.remove(0);
    let age = Duration::from_secs(20);
    assert_eq!(rule.source, Source::Agent { value: 3300.0, age });
    assert_eq!((rule.value, rule.in_force), (Some(3300.0), 1));
    assert_eq!(words(&rule, "b"), "throttle 50->40 80m");
    // An old word of the agent counts for less than the kubelet's.
    let rule = at("2026-11-21T16:02:00Z").rules.remove(0);
    assert_eq!((rule.source, rule.value), (Source::Kubelet, Some(3500.0)));
}
