//! Reports of busy nodes: 110 pods, ten of which are listed, and every figure present.

use serde_json::{Value, json};

/// Pods per node.
pub const PODS: usize = 110;
/// Interval between reports of a node, in seconds.
pub const INTERVAL: u64 = 10;

/// Name of a node.
pub fn node(index: usize) -> String {
    format!("node-{index:05}.example.internal")
}

/// Labels of a node, as many as in clouds.
pub fn labels(index: usize) -> Value {
    let label = |label: usize| {
        (
            format!("example.com/label-{label}"),
            format!("value-{label}"),
        )
    };
    let mut labels: serde_json::Map<_, _> = (0..17)
        .map(label)
        .map(|(name, value)| (name, value.into()))
        .collect();
    labels.insert("kubernetes.io/hostname".to_owned(), node(index).into());
    let zone = format!("zone-{}", index % 3);
    labels.insert("topology.kubernetes.io/zone".to_owned(), zone.into());
    labels.insert("pool".to_owned(), format!("pool{}", index % 50).into());
    labels.into()
}

/// A report with this sequence number and random figures.
pub fn body(node: &str, sequence: u64) -> String {
    let tenths = |max: u32| f64::from(fastrand::u32(1..max * 10)) / 10.0;
    let millicores = fastrand::u32(500..31_000);
    let window = || {
        json!({
            "avg": tenths(100), "p50": tenths(100), "p90": tenths(100), "p95": tenths(100),
            "p99": tenths(100), "max": tenths(100), "coverage": 0.99,
        })
    };
    let windows = || {
        json!({
            "last5m": window(), "last30m": window(), "last1h": window(),
            "maxAvg1h": {"value": tenths(100), "coverage": 0.99},
            "maxAvg1d": {"value": tenths(100), "coverage": 0.91},
        })
    };
    let averages = || json!({"avg10": tenths(100), "avg60": tenths(100), "avg300": tenths(100)});
    let pressure = || json!({"some": averages(), "full": averages()});
    let pods: Vec<Value> = (0..10)
        .map(|pod| {
            json!({
                "namespace": format!("team-{}", pod % 3), "name": format!("checkout-7c9f6d8b5{pod}-x{pod}k2p"),
                "cpu": format!("{}m", fastrand::u32(1..4000)), "memory": format!("{}Ki", fastrand::u32(1000..9_000_000)),
                "cpuDelay": tenths(10), "memoryPressure": tenths(10),
            })
        })
        .collect();
    let amounts = |millicores| json!({"cpu": format!("{millicores}m"), "memory": format!("{}Ki", 60_000_000 - millicores)});
    let boot = "0b7f2d7e-58c4-4a44-9d0f-3a7f3f1f0c11";
    json!({
        "node": node, "bootID": boot, "agentStartedMillis": 93211, "sequence": sequence, "intervalSeconds": INTERVAL,
        "status": {
            "timestamp": "2026-01-02T03:04:05Z", "window": "9.998s",
            "agent": {"version": "0.1.0", "bootID": boot, "sequence": sequence},
            "capacity": {"cpu": "32", "memory": "131072000Ki"},
            "usage": {
                "node": amounts(millicores), "pods": amounts(millicores * 9 / 10), "system": amounts(millicores / 10),
            },
            "pressure": {"cpu": pressure(), "memory": pressure(), "io": pressure()},
            "windows": {"cpu": windows(), "memory": windows()},
            "pods": PODS, "topPods": pods,
            "rules": {"total": 3, "breached": 1, "cooling": 0, "unknown": 0}, "breached": ["protect/cpu"],
        },
    })
    .to_string()
}
