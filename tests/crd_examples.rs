//! Every example says what it is meant to say: nothing is found in it, and exactly these rules come out.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::float_cmp, reason = "the values are exact")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use plimsoll::crd::{Objects, compile, manifest};
use plimsoll::engine::metric::{DiskRate, Metric, PressureKind, Protected};
use plimsoll::engine::pod::QosClass;
use plimsoll::engine::policy::{
    Action, CpuThrottle, EvictionSpec, Membership, NodeFacts, PolicySet, Probe, Rule, Scope,
    Strategy, TaintEffect,
};
use plimsoll::engine::selector::{Requirement, Selector};

fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(file)
}

fn compiled(file: &str, labels: &[(&str, &str)]) -> PolicySet {
    let text = std::fs::read_to_string(path(file)).unwrap();
    let manifest = manifest::read(&text);
    assert_eq!(manifest.flaws, []);
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

/// A rule as the defaults make it.
fn rule(id: &str, metric: Metric, watermark: f64, thresholds: (u32, u32), action: Action) -> Rule {
    Rule {
        id: id.into(),
        metric,
        series: None,
        watermark,
        restore: watermark,
        avoidance_threshold: thresholds.0,
        restore_threshold: thresholds.1,
        period: secs(10),
        sample_ttl: secs(60),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
    }
}

fn within(key: &str, values: &[&str]) -> Requirement {
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
fn nothing_is_found_in_any_example_nor_in_all_together() {
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
fn the_guides_documents_and_the_examples_with_comments_are_the_same_objects() {
    for file in ["disable-scheduling.yaml", "throttle.yaml", "eviction.yaml"] {
        let read = |folder: &str| {
            let text = std::fs::read_to_string(path(folder).join(file)).unwrap();
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
    let closes = Action {
        scheduling: Some(TaintEffect::NoSchedule),
        ..action("disablescheduling", 300)
    };
    for folder in ["tests/guide", "examples/ensurance"] {
        let policy = compiled(&format!("{folder}/disable-scheduling.yaml"), &[]);
        let expected = rule(
            "watermark1/cpu-usage",
            Metric::CpuUsage,
            4000.0,
            (2, 2),
            closes.clone(),
        );
        assert_eq!(policy.rules, [expected]);
    }
}

#[test]
fn throttling() {
    let slows = Action {
        throttle: Some(throttle(10, 10)),
        ..action("throttle", 300)
    };
    for folder in ["tests/guide", "examples/ensurance"] {
        let policy = compiled(&format!("{folder}/throttle.yaml"), &[]);
        let expected = rule(
            "watermark2/cpu-usage",
            Metric::CpuUsage,
            6000.0,
            (2, 2),
            slows.clone(),
        );
        assert_eq!(policy.rules, [expected]);
        assert_eq!(policy.pods[0].name, "all-be-pods");
        assert_eq!(policy.pods[0].labels, None);
        assert_eq!(
            policy.pods[0].scopes,
            [Scope::Qos(Membership::In(vec![QosClass::BestEffort]))]
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
    for folder in ["tests/guide", "examples/ensurance"] {
        let policy = compiled(&format!("{folder}/eviction.yaml"), &[]);
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
            requirements: vec![within("preemptible_job", &["true"])],
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
        restore: 80.0,
        ..rule(
            "memory/nearly-full",
            Metric::MemoryUtilization,
            90.0,
            (1, 3),
            evicts,
        )
    };
    let pressure = Metric::Pressure {
        kind: PressureKind::Memory,
        full: false,
        window: 1,
    };
    let tight = Rule {
        restore: 5.0,
        ..rule("memory/tight", pressure, 10.0, (2, 3), reclaims)
    };
    assert_eq!(policy.rules, [nearly_full, tight]);
    let namespaces = vec!["monitoring".to_owned(), "ingress".to_owned()];
    assert_eq!(
        policy.pods[0].scopes,
        [
            Scope::Priority(Membership::In(vec![(i32::MIN, -1)])),
            Scope::Namespace(Membership::NotIn(namespaces)),
        ]
    );
}

#[test]
fn pressure() {
    assert_eq!(compiled("examples/ensurance/pressure.yaml", &[]).rules, []);
    let policy = compiled("examples/ensurance/pressure.yaml", &[("pool", "batch")]);
    let squeezes = Action {
        throttle: Some(CpuThrottle {
            min_ratio: 20,
            step: 20,
            idle: true,
        }),
        ..action("squeeze-batch", 120)
    };
    let delay = Metric::Protected(Protected::CpuDelayMax);
    let expected = Rule {
        restore: 5.0,
        period: secs(5),
        ..rule("cpu-pressure/protected-wait", delay, 10.0, (3, 6), squeezes)
    };
    assert_eq!(policy.rules, [expected]);
}

#[test]
fn disk() {
    let policy = compiled("examples/ensurance/disk.yaml", &[]);
    let slows = Action {
        scheduling: Some(TaintEffect::NoSchedule),
        throttle: Some(throttle(25, 25)),
        ..action("slow-writers", 180)
    };
    let devices = Selector {
        requirements: vec![within("device", &["nvme0n1", "sda", "vda"])],
    };
    let busy = Rule {
        series: Some(devices),
        restore: 70.0,
        strategy: Strategy::Preview,
        ..rule(
            "disk/data-disk-busy",
            Metric::Disk(DiskRate::Utilization),
            95.0,
            (6, 6),
            slows.clone(),
        )
    };
    let storm = Rule {
        strategy: Strategy::Preview,
        ..rule(
            "disk/write_storm",
            Metric::Disk(DiskRate::WriteKib),
            200_000.0,
            (3, 3),
            slows,
        )
    };
    assert_eq!(policy.rules, [busy, storm]);
}

#[test]
fn node_probe() {
    let policy = compiled("examples/ensurance/node-probe.yaml", &[]);
    let cools = Action {
        throttle: Some(throttle(50, 5)),
        ..action("cool-the-node", 300)
    };
    let sensor = Selector {
        requirements: vec![
            within("chip", &["pci0000:00_0000:00:18_3", "platform_coretemp_0"]),
            within("sensor", &["temp1"]),
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
        restore: 75.0,
        period: secs(15),
        probe: Some(probe),
        ..rule("temperature/package-hot", metric, 82.5, (4, 8), cools)
    };
    assert_eq!(policy.rules, [expected]);
}

#[test]
fn the_charts_presets_only_look_or_are_gentle() {
    let looks = compiled("charts/plimsoll/files/policies/preview.yaml", &[]);
    assert_eq!(looks.rules.len(), 4);
    assert!(
        looks
            .rules
            .iter()
            .all(|it| it.strategy == Strategy::Preview)
    );

    let acts = compiled("charts/plimsoll/files/policies/conservative.yaml", &[]);
    assert_eq!(acts.rules.len(), 2);
    for rule in &acts.rules {
        let action = &rule.action;
        assert_eq!(rule.strategy, Strategy::Enforce);
        assert!(rule.watermark >= 90.0 && rule.restore < rule.watermark);
        assert!(
            rule.avoidance_threshold * 10 >= 60,
            "after a minute or more"
        );
        assert_eq!(action.eviction, None);
        assert_ne!(action.scheduling, Some(TaintEffect::NoSchedule));
        assert!(action.throttle.is_none_or(|it| it == throttle(50, 10)));
    }
}
