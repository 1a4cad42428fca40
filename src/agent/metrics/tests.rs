//! The agent's metrics in the text format.

use super::*;
use crate::engine::plan::Unknown;

const ALL: PodData = PodData {
    series: true,
    node_metric: true,
};

fn report(value: Option<f64>, unknown: Option<Unknown>) -> RuleReport {
    RuleReport {
        id: RuleId::from("q/cpu"),
        strategy: Strategy::Enforce,
        outside_hours: false,
        state: RuleState::Breached,
        since: None,
        value,
        threshold: 4000.0,
        restore_value: 4000.0,
        breaches: 2,
        quiet_evaluations: 0,
        limited: false,
        rung: None,
        next_rung: None,
        evictions_ended: false,
        earliest_eviction: None,
        cool_down: std::time::Duration::ZERO,
        would: None,
        unknown,
    }
}

#[test]
fn a_rule_has_state_value_and_threshold() {
    let metrics = AgentMetrics::new(clock::boot_time(), ALL, &[]);
    let names = [(RuleId::from("q/cpu"), "cpu_total_usage".to_owned())];
    metrics.rules(names.into());
    metrics.figures(|figures| {
        figures.rules = vec![report(Some(4321.0), None)];
        figures.throttled = 3;
        figures.throttled_pods = vec![ThrottledSeries {
            percent: 30,
            namespace: "shop".to_owned(),
            pod: "batch".to_owned(),
            rule: "q/cpu".to_owned(),
        }];
        figures.dropped = 7;
        figures.batch_cpus = Some(1.25);
        figures.writes.done = 2;
        figures.scheduling = Scheduling::Disabled {
            effect: TaintEffect::NoSchedule,
            rules: Vec::new(),
        };
    });
    let text = ServedState::metrics(&metrics);
    for line in [
        r#"plimsoll_agent_rule_state{rule="q/cpu",strategy="Enforce",state="Breached"} 1"#,
        r#"plimsoll_agent_rule_state{rule="q/cpu",strategy="Enforce",state="Normal"} 0"#,
        r#"plimsoll_agent_rule_value{rule="q/cpu",metric="cpu_total_usage"} 4321.0"#,
        r#"plimsoll_agent_rule_threshold{rule="q/cpu",metric="cpu_total_usage"} 4000.0"#,
        "plimsoll_agent_throttled_pods 3",
        r#"plimsoll_agent_throttled_pod_cpu_percent{namespace="shop",pod="batch",rule="q/cpu"} 30"#,
        r#"plimsoll_agent_scheduling_disabled{effect="NoSchedule"} 1"#,
        "plimsoll_agent_batch_cpu_usage_cores 1.25",
        "plimsoll_agent_sample_age_seconds NaN",
        r#"plimsoll_agent_events_total{result="dropped"} 7"#,
        r#"plimsoll_agent_status_writes_total{result="done"} 2"#,
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    metrics.figures(|figures| figures.rules = vec![report(Some(1.0), Some(Unknown::Stale))]);
    let text = ServedState::metrics(&metrics);
    assert!(!text.contains("rule_value{"), "{text}");
}

#[test]
fn a_loop_that_does_not_run_is_not_alive() {
    let now = clock::boot_time();
    let metrics = AgentMetrics::new(now, ALL, &[]);
    metrics.livez().expect("alive");
    metrics.loop_ran(BootTime::default());
    let hangs = metrics.livez().expect_err("hangs");
    assert!(hangs.starts_with("the loop has not run for"), "{hangs}");
}

#[test]
fn readiness_says_what_the_agent_waits_for() {
    let metrics = AgentMetrics::new(clock::boot_time(), ALL, &[]);
    metrics.ready(Err("no rules"));
    assert_eq!(metrics.readyz(), Err("no rules".to_owned()));
    metrics.ready(Ok(()));
    assert_eq!(metrics.readyz(), Ok(()));
}

fn report_of(pod: &str) -> NodeMetric {
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "worker"},
        "status": {
            "usage": {"node": {"cpu": "1500m", "memory": "2Ki"}},
            "pressure": {"io": {"some": {"avg10": 1.5, "avg60": 1.0, "avg300": 0.5}}},
            "windows": {"cpu": {
                "last5m": {"avg": 12.5, "p99": 40.0, "coverage": 0.75},
                "maxAvg1h": {"value": 30.0, "coverage": 0.5},
                "maxAvg1d": {"coverage": 0.1},
            }},
            "topPods": [{"namespace": "shop", "name": pod, "cpu": "700m", "ioPressure": 2.5}],
        },
    }))
    .expect("a report")
}

#[test]
fn unknown_values_of_the_last_report_are_not_zero() {
    let metrics = AgentMetrics::new(clock::boot_time(), ALL, &[]);
    metrics.reported(report_of("old").into(), String::new());
    ServedState::metrics(&metrics);
    metrics.reported(report_of("web").into(), String::new());
    let text = ServedState::metrics(&metrics);
    for line in [
        r#"plimsoll_agent_node_cpu_usage_cores{part="node"} 1.5"#,
        r#"plimsoll_agent_node_memory_usage_bytes{part="node"} 2048.0"#,
        "plimsoll_agent_node_cpu_capacity_cores NaN",
        r#"plimsoll_agent_node_pressure_percent{resource="io",tasks="some",window="60s"} 1.0"#,
        r#"plimsoll_agent_node_usage_percent{resource="cpu",window="5m",stat="p99"} 40.0"#,
        r#"plimsoll_agent_node_window_coverage_ratio{resource="cpu",window="1d"} 0.1"#,
        "\ncpu_usage_avg_5m 12.5\n",
        "\ncpu_usage_max_avg_1h 30.0\n",
        "\ncpu_usage_max_avg_1d NaN\n",
        r#"plimsoll_agent_pod_cpu_usage_cores{namespace="shop",pod="web"} 0.7"#,
        r#"plimsoll_agent_pod_stalled_percent{namespace="shop",pod="web",resource="io"} 2.5"#,
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    for absent in [
        r#"pod="old""#,
        r#"part="pods""#,
        r#"stat="p50""#,
        "pod_memory_usage_bytes{",
    ] {
        assert!(!text.contains(absent), "{absent} is in\n{text}");
    }
    assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1);
}

#[test]
fn windows_of_the_settings_are_gauges_under_their_own_names() {
    let file = "metrics: [{name: gpu_usage_avg_5m, source: gpu_usage, window: avg_5m, httpGet: {port: 1}}, \
                {name: disk_busy_p95_1d, source: disk_utilization, window: p95_1d}]";
    let windows = crate::crd::windows::read(file).expect("windows");
    let metrics = AgentMetrics::new(clock::boot_time(), ALL, &windows);
    let mut report = report_of("web");
    let custom = &mut report.status.windows.custom;
    custom.insert("gpu_usage_avg_5m".to_owned(), 63.25);
    metrics.reported(report.into(), String::new());
    let text = ServedState::metrics(&metrics);
    for line in [
        "# HELP gpu_usage_avg_5m gpu_usage in unit of the probe, avg_5m; NaN while not known.\n",
        "# TYPE gpu_usage_avg_5m gauge\n",
        "\ngpu_usage_avg_5m 63.25\n",
        "# HELP disk_busy_p95_1d disk_utilization in percent, p95_1d; NaN while not known.\n",
        "\ndisk_busy_p95_1d NaN\n",
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    metrics.reported(report_of("web").into(), String::new());
    assert!(ServedState::metrics(&metrics).contains("\ngpu_usage_avg_5m NaN\n"));
}

#[test]
fn by_default_pods_are_named_over_loopback_only() {
    let metrics = AgentMetrics::new(clock::boot_time(), PodData::default(), &[]);
    metrics.reported(report_of("web").into(), "{}".to_owned());
    metrics.figures(|figures| {
        figures.throttled_pods = vec![ThrottledSeries {
            percent: 30,
            namespace: "shop".to_owned(),
            pod: "web".to_owned(),
            rule: "q/cpu".to_owned(),
        }];
    });
    let text = ServedState::metrics(&metrics);
    assert!(
        !text.contains("\"web\"") && !text.contains("pod="),
        "{text}"
    );
    let node = r#"plimsoll_agent_node_cpu_usage_cores{part="node"} 1.5"#;
    assert!(text.contains(node), "{text}");
    let served_to = |metrics: &AgentMetrics, local| metrics.document(NODE_METRIC, local);
    let served = Some(JsonDocument::Json("{}".to_owned()));
    assert_eq!(served_to(&metrics, true), served);
    assert!(matches!(
        served_to(&metrics, false),
        Some(JsonDocument::Forbidden(_))
    ));
    assert_eq!(metrics.document("/v1/other", true), None);
    let open = AgentMetrics::new(clock::boot_time(), ALL, &[]);
    assert!(matches!(
        served_to(&open, false),
        Some(JsonDocument::Missing(_))
    ));
    open.reported(report_of("web").into(), "{}".to_owned());
    assert_eq!(served_to(&open, false), served);
}

#[test]
fn actions_and_previews_are_counted_from_zero() {
    let metrics = AgentMetrics::new(clock::boot_time(), ALL, &[]);
    let text = ServedState::metrics(&metrics);
    for line in [
        r#"plimsoll_agent_actions_total{action="evict",strategy="Enforce"} 0"#,
        r#"plimsoll_agent_actions_total{action="reclaim",strategy="Preview"} 0"#,
        r#"plimsoll_agent_evictions_total{outcome="accepted"} 0"#,
        r#"plimsoll_agent_evictions_total{outcome="refused"} 0"#,
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    let transition = |would, change| Transition {
        at: BootTime::default(),
        rule: RuleId::from("q/cpu"),
        would,
        change,
    };
    let throttle = |from, to| PlanChange::Throttle {
        pod: "p".into(),
        from,
        to,
        idle: false,
        quota: crate::engine::units::Quota::Unlimited,
        release: crate::engine::units::MilliCpu(1),
    };
    metrics.count(&[
        transition(false, throttle(100, 60)),
        transition(false, throttle(60, 20)),
        transition(false, throttle(20, 60)),
        transition(true, PlanChange::SchedulingEnabled),
        transition(
            true,
            PlanChange::Skipped {
                pod: "p".into(),
                reason: crate::engine::plan::Skipped::Protected,
            },
        ),
    ]);
    let text = ServedState::metrics(&metrics);
    for line in [
        r#"plimsoll_agent_actions_total{action="throttle",strategy="Enforce"} 2"#,
        r#"plimsoll_agent_actions_total{action="unthrottle",strategy="Enforce"} 1"#,
        r#"plimsoll_agent_actions_total{action="enableScheduling",strategy="Preview"} 1"#,
        r#"plimsoll_agent_skipped_pods_total{reason="protected",strategy="Preview"} 1"#,
    ] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
}

#[test]
fn an_eviction_counts_once_accepted_and_in_preview_once_decided() {
    use crate::agent::eviction::Refusal;
    use crate::engine::pod::PodUid;

    let metrics = AgentMetrics::new(clock::boot_time(), ALL, &[]);
    let decided = |would| Transition {
        at: BootTime::default(),
        rule: RuleId::from("q/cpu"),
        would,
        change: PlanChange::Evict {
            pod: PodUid::from("p"),
            grace: Duration::from_secs(30),
            release: None,
            urgent: false,
        },
    };
    let counted = || {
        let text = ServedState::metrics(&metrics);
        let count = |series: &str| {
            let mut lines = text.lines();
            let value =
                lines.find_map(|line| line.strip_prefix(series)?.trim().parse::<u64>().ok());
            value.unwrap_or_else(|| panic!("{series} is missing in\n{text}"))
        };
        [
            count(r#"plimsoll_agent_actions_total{action="evict",strategy="Enforce"}"#),
            count(r#"plimsoll_agent_actions_total{action="evict",strategy="Preview"}"#),
            count(r#"plimsoll_agent_evictions_total{outcome="accepted"}"#),
            count(r#"plimsoll_agent_evictions_total{outcome="refused"}"#),
        ]
    };
    metrics.count(&[decided(false), decided(false), decided(true)]);
    metrics.outcome(&EvictionResult::Refused {
        until: BootTime::default(),
        why: Refusal::ApiServerUnreachable("timed out".to_owned()),
    });
    assert_eq!(counted(), [0, 1, 0, 1]);
    metrics.outcome(&EvictionResult::ResultUnknown("timed out".to_owned()));
    metrics.outcome(&EvictionResult::Accepted);
    assert_eq!(counted(), [1, 1, 1, 1]);
}
