//! Every example has no findings and compiles to the expected rules.
#![allow(clippy::float_cmp, reason = "the values are exact")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use plimsoll::crd::{Objects, compile, manifest};
use plimsoll::engine::metric::{DiskRate, Metric, Protected};
use plimsoll::engine::pod::QosClass;
use plimsoll::engine::policy::{
    Action, CpuThrottle, EvictionSpec, Membership, NodeFacts, PolicySet, Probe, Rule,
    ScopeRequirement, Standing, Strategy, TaintEffect,
};
use plimsoll::engine::selector::{Requirement, Selector};
use plimsoll::engine::units::MilliCpu;

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn compiled(file: &str, labels: &[(&str, &str)]) -> PolicySet {
    let text = std::fs::read_to_string(path(file)).unwrap();
    let manifest = manifest::read(&text);
    assert_eq!(manifest.parse_errors, []);
    let objects = Objects::from_values(manifest.objects.into_iter().map(|object| object.value));
    let node = NodeFacts {
        labels: labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect(),
        ..NodeFacts::default()
    };
    let compiled = compile(&objects, &node);
    assert_eq!(compiled.findings, [], "{file}");
    compiled.policy
}

const fn secs(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn action(name: &str, cool_down: u64) -> Action {
    Action {
        name: name.to_owned(),
        cool_down: secs(cool_down),
        scheduling: None,
        throttle: None,
        force_gc: false,
        eviction: None,
    }
}

/// A rule with default values.
fn rule(id: &str, metric: Metric, threshold: f64, thresholds: (u32, u32), action: Action) -> Rule {
    Rule {
        id: id.into(),
        metric,
        series: None,
        threshold,
        restore_value: threshold,
        avoidance_threshold: thresholds.0,
        restore_threshold: thresholds.1,
        sample_ttl: secs(60),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
        active_during: Vec::new(),
    }
}

fn is_in(key: &str, values: &[&str]) -> Requirement {
    Requirement::In(
        key.to_owned(),
        values.iter().map(|value| (*value).to_owned()).collect(),
    )
}

const fn throttle(min_ratio: u8, step: u8) -> CpuThrottle {
    CpuThrottle {
        min_ratio,
        step,
        idle: false,
    }
}

#[test]
fn no_example_has_findings() {
    for target in [
        "examples/ensurance",
        "tests/guide",
        "charts/plimsoll/files/policies",
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .arg("check")
            .arg(path(target))
            .output()
            .unwrap();
        assert!(output.status.success());
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "", "{target}");
    }
}

#[test]
fn the_guide_and_the_examples_have_the_same_objects() {
    for file in ["disable-scheduling.yaml", "throttle.yaml", "eviction.yaml"] {
        let read = |directory: &str| {
            let text = std::fs::read_to_string(path(directory).join(file)).unwrap();
            manifest::read(&text)
                .objects
                .into_iter()
                .map(|object| object.value)
                .collect::<Vec<_>>()
        };
        assert_eq!(read("tests/guide"), read("examples/ensurance"), "{file}");
    }
}

#[test]
fn disable_scheduling() {
    let disables_scheduling = Action {
        scheduling: Some(TaintEffect::NoSchedule),
        ..action("disablescheduling", 300)
    };
    for directory in ["tests/guide", "examples/ensurance"] {
        let policy = compiled(&format!("{directory}/disable-scheduling.yaml"), &[]);
        let expected = rule(
            "watermark1/cpu-usage",
            Metric::CpuUsage,
            4000.0,
            (2, 2),
            disables_scheduling.clone(),
        );
        assert_eq!(policy.rules, [expected]);
    }
}

#[test]
fn throttling() {
    let throttles = Action {
        throttle: Some(throttle(10, 10)),
        ..action("throttle", 300)
    };
    for directory in ["tests/guide", "examples/ensurance"] {
        let policy = compiled(&format!("{directory}/throttle.yaml"), &[]);
        let expected = rule(
            "watermark2/cpu-usage",
            Metric::CpuUsage,
            6000.0,
            (2, 2),
            throttles.clone(),
        );
        assert_eq!(policy.rules, [expected]);
        assert_eq!(policy.pods[0].name, "all-be-pods");
        assert_eq!(policy.pods[0].labels, None);
        assert_eq!(
            policy.pods[0].scopes,
            [ScopeRequirement::Qos(Membership::In(vec![
                QosClass::BestEffort
            ]))]
        );
        assert_eq!(policy.pods[0].allowed, ["throttle"]);
    }
}

#[test]
fn eviction() {
    let evicts = Action {
        scheduling: Some(TaintEffect::NoSchedule),
        eviction: Some(EvictionSpec {
            grace: Some(secs(30)),
            max_pods_per_round: 1,
            evict_unowned: false,
        }),
        ..action("eviction", 300)
    };
    for directory in ["tests/guide", "examples/ensurance"] {
        let policy = compiled(&format!("{directory}/eviction.yaml"), &[]);
        let expected = Rule {
            strategy: Strategy::Preview,
            ..rule(
                "watermark3/cpu-usage",
                Metric::CpuUsage,
                6000.0,
                (2, 2),
                evicts.clone(),
            )
        };
        assert_eq!(policy.rules, [expected]);
        let labels = Selector {
            requirements: vec![is_in("preemptible_job", &["true"])],
        };
        assert_eq!(policy.pods[0].labels, Some(labels));
        assert_eq!(policy.pods[0].scopes, []);
    }
}

#[test]
fn memory() {
    let policy = compiled("examples/ensurance/memory.yaml", &[]);
    let evicts = Action {
        scheduling: Some(TaintEffect::PreferNoSchedule),
        eviction: Some(EvictionSpec {
            grace: Some(secs(60)),
            max_pods_per_round: 2,
            evict_unowned: false,
        }),
        ..action("evict-for-memory", 600)
    };
    let reclaims = Action {
        force_gc: true,
        ..action("reclaim-page-cache", 60)
    };
    let nearly_full = Rule {
        restore_value: 80.0,
        ..rule(
            "memory/nearly-full",
            Metric::MemoryUtilization,
            90.0,
            (1, 3),
            evicts,
        )
    };
    let stalls = Metric::Protected(Protected::MemoryStallMax);
    let tight = Rule {
        restore_value: 5.0,
        ..rule("memory/tight", stalls, 10.0, (2, 3), reclaims)
    };
    assert_eq!(policy.rules, [nearly_full, tight]);
    let namespaces = vec!["monitoring".to_owned(), "ingress".to_owned()];
    assert_eq!(
        policy.pods[0].scopes,
        [
            ScopeRequirement::Priority(Membership::In(vec![(i32::MIN, -1)])),
            ScopeRequirement::Namespace(Membership::NotIn(namespaces)),
        ]
    );
}

#[test]
fn pressure() {
    assert_eq!(compiled("examples/ensurance/pressure.yaml", &[]).rules, []);
    let policy = compiled("examples/ensurance/pressure.yaml", &[("pool", "batch")]);
    let throttles = Action {
        throttle: Some(CpuThrottle {
            min_ratio: 20,
            step: 20,
            idle: true,
        }),
        ..action("squeeze-batch", 120)
    };
    let delay = Metric::Protected(Protected::CpuDelayMax);
    let expected = Rule {
        restore_value: 5.0,
        ..rule(
            "cpu-pressure/protected-wait",
            delay,
            10.0,
            (2, 3),
            throttles,
        )
    };
    assert_eq!(policy.rules, [expected]);
}

#[test]
fn night_and_day() {
    let policy = compiled("examples/ensurance/night-and-day.yaml", &[]);
    let throttles = Action {
        throttle: Some(throttle(20, 20)),
        ..action("slow-batch", 300)
    };
    let expected = |name: &str, [threshold, restore_value]: [f64; 2], hours: &[&str]| Rule {
        restore_value,
        active_during: hours.iter().map(|hours| hours.parse().unwrap()).collect(),
        ..rule(
            &format!("night-and-day/{name}"),
            Metric::CpuUtilization,
            threshold,
            (2, 2),
            throttles.clone(),
        )
    };
    let nights = [
        "20:00-07:00 Europe/Berlin",
        "Sat-Sun 00:00-24:00 Europe/Berlin",
    ];
    let rules = [
        expected("day", [60.0, 50.0], &["Mon-Fri 07:00-20:00 Europe/Berlin"]),
        expected("night", [90.0, 80.0], &nights),
    ];
    assert_eq!(policy.rules, rules);
    for minute in 0..i64::from(366 * 24 * 60) {
        let time = Timestamp::from_second(1_767_225_600 + minute * 60).unwrap();
        let active = policy.rules.iter().filter(|rule| rule.is_active(time));
        assert_eq!(active.count(), 1, "{time}");
    }
}

#[test]
fn idle_class() {
    let throttles = Action {
        throttle: Some(CpuThrottle {
            idle: true,
            ..throttle(100, 10)
        }),
        ..action("idle-class", 300)
    };
    let policy = compiled("examples/ensurance/idle-class.yaml", &[]);
    let usage = Metric::CpuUsage;
    let expected = rule("idle-class/cpu-usage", usage, 6000.0, (2, 2), throttles);
    assert_eq!(policy.rules, [expected]);
    let requirements = vec![is_in("workload", &["batch", "ci"])];
    assert_eq!(policy.pods[0].labels, Some(Selector { requirements }));
}

#[test]
fn services() {
    let throttles = Action {
        throttle: Some(CpuThrottle {
            idle: true,
            ..throttle(30, 10)
        }),
        ..action("batch-behind-services", 300)
    };
    let policy = compiled("examples/ensurance/services.yaml", &[]);
    let delay = Metric::Protected(Protected::CpuDelayP95);
    let expected = Rule {
        restore_value: 2.0,
        ..rule("services/services-wait", delay, 5.0, (1, 3), throttles)
    };
    assert_eq!(policy.rules, [expected]);
    assert_eq!(policy.pods.len(), 2);
}

#[test]
fn disk() {
    let policy = compiled("examples/ensurance/disk.yaml", &[]);
    let evicts = Action {
        scheduling: Some(TaintEffect::NoSchedule),
        eviction: Some(EvictionSpec {
            grace: Some(secs(30)),
            max_pods_per_round: 1,
            evict_unowned: false,
        }),
        ..action("writers-away", 180)
    };
    let devices = Selector {
        requirements: vec![is_in("device", &["nvme0n1", "sda", "vda"])],
    };
    let busy = Rule {
        series: Some(devices),
        restore_value: 70.0,
        strategy: Strategy::Preview,
        ..rule(
            "disk/data-disk-busy",
            Metric::Disk(DiskRate::Utilization),
            95.0,
            (6, 6),
            evicts.clone(),
        )
    };
    let storm = Rule {
        strategy: Strategy::Preview,
        ..rule(
            "disk/write_storm",
            Metric::Disk(DiskRate::WriteKib),
            200_000.0,
            (3, 3),
            evicts,
        )
    };
    assert_eq!(policy.rules, [busy, storm]);
}

#[test]
fn node_probe() {
    let policy = compiled("examples/ensurance/node-probe.yaml", &[]);
    let throttles = Action {
        throttle: Some(throttle(50, 5)),
        ..action("cool-the-node", 300)
    };
    let sensor = Selector {
        requirements: vec![
            is_in("chip", &["pci0000:00_0000:00:18_3", "platform_coretemp_0"]),
            is_in("sensor", &["temp1"]),
        ],
    };
    let probe = Probe {
        url: "http://:9100/metrics".into(),
        headers: Vec::new(),
        timeout: secs(2),
    };
    let metric = Metric::Probe("node_hwmon_temp_celsius".into());
    let expected = Rule {
        series: Some(sensor),
        restore_value: 75.0,
        probe: Some(probe),
        ..rule("temperature/package-hot", metric, 82.5, (6, 12), throttles)
    };
    assert_eq!(policy.rules, [expected]);
}

#[test]
fn the_presets_of_the_chart_preview_or_act_conservatively() {
    let preview = compiled("charts/plimsoll/files/policies/preview.yaml", &[]);
    assert_eq!(preview.rules.len(), 4);
    assert!(
        preview
            .rules
            .iter()
            .all(|it| it.strategy == Strategy::Preview)
    );

    let conservative = compiled("charts/plimsoll/files/policies/conservative.yaml", &[]);
    assert_eq!(conservative.rules.len(), 2);
    for rule in &conservative.rules {
        let action = &rule.action;
        assert_eq!(rule.strategy, Strategy::Enforce);
        assert!(rule.threshold >= 90.0 && rule.restore_value < rule.threshold);
        assert!(
            rule.avoidance_threshold * 10 >= 60,
            "after at least a minute"
        );
        assert_eq!(action.eviction, None);
        assert_ne!(action.scheduling, Some(TaintEffect::NoSchedule));
        let to_half = CpuThrottle {
            idle: true,
            ..throttle(50, 10)
        };
        assert!(action.throttle.is_none_or(|it| it == to_half));
    }

    let protect = compiled("charts/plimsoll/files/policies/protect.yaml", &[]);
    let [rule] = protect.rules.as_slice() else {
        panic!("{:?}", protect.rules)
    };
    assert_eq!(rule.strategy, Strategy::Enforce);
    assert_eq!(rule.action.eviction, None);
    assert_eq!(rule.action.scheduling, None);
    assert!(rule.action.throttle.is_some_and(|it| it.idle));
    assert_eq!(protect.pods.len(), 2);
    assert!(protect.pods.iter().all(|it| it.standing.idle));

    let standing = compiled("charts/plimsoll/files/policies/standing.yaml", &[]);
    assert_eq!(standing.rules, []);
    assert!(standing.pods[0].standing.idle && standing.pods[0].labels.is_none());
    let negative = ScopeRequirement::Priority(Membership::In(vec![(i32::MIN, -1)]));
    assert_eq!(standing.pods[0].scopes, [negative]);
}

#[test]
fn standing() {
    let policy = compiled("examples/ensurance/standing.yaml", &[]);
    assert_eq!(policy.rules, []);
    let idle = Standing {
        idle: true,
        ..Standing::default()
    };
    let burst = Standing {
        burst: MilliCpu(500),
        ..Standing::default()
    };
    let standing: Vec<_> = policy.pods.iter().map(|it| it.standing).collect();
    assert_eq!(standing, [idle, burst]);
}
