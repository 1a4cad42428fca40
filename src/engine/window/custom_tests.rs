//! Windows of the node's settings.

use super::super::{NodeWindows, Statistic};
use super::*;
use crate::engine::sample::{
    CpuTimes, DiskSample, InterfaceSample, NodeMemory, Pressure, ProbeSample, Series,
};
use crate::engine::units::Bytes;

const URL: &str = "http://:9400/metrics";

fn window(name: &str, source: &str, statistic: &str) -> CustomWindow {
    let probe = Probe {
        url: URL.into(),
        headers: Vec::new(),
        timeout: Duration::from_secs(1),
    };
    let known = Metric::parse(source);
    CustomWindow {
        probe: known.is_none().then_some(probe),
        metric: Arc::new(CustomMetric {
            name: name.into(),
            source: known.unwrap_or_else(|| Metric::Probe(source.into())),
            statistic: Statistic::parse(statistic).unwrap(),
        }),
        series: None,
        period: Duration::from_secs(10),
    }
}

fn windows(definitions: &[CustomWindow]) -> NodeWindows {
    let mut windows = NodeWindows::default();
    windows.set_custom(definitions.into());
    windows
}

fn at(second: u64) -> BootTime {
    BootTime::from_nanos(second * 1_000_000_000)
}

fn sample(second: u64) -> Sample {
    Sample {
        at: at(second),
        ..Sample::default()
    }
}

/// A sample whose probe answered at `answered` with these series.
fn probed(second: u64, answered: u64, values: &[(&str, f64)]) -> Sample {
    let series = |(device, value): &(&str, f64)| Series {
        name: "gpu_usage".into(),
        labels: vec![("gpu".into(), (*device).into())],
        value: *value,
    };
    let mut sample = sample(second);
    sample.probes.push(ProbeSample {
        url: URL.into(),
        at: at(answered),
        series: values.iter().map(series).collect(),
    });
    sample
}

fn value(windows: &NodeWindows, definition: &CustomWindow) -> Result<f64, Unknown> {
    windows.custom_value(&definition.metric)
}

fn near(found: Result<f64, Unknown>, expected: f64) {
    let found = found.expect("a value");
    assert!((found - expected).abs() < 1e-3, "{found}, not {expected}");
}

#[test]
fn the_largest_series_of_a_probe_counts() {
    let gpu = window("gpu_usage_avg_5m", "gpu_usage", "avg_5m");
    let mut windows = windows(std::slice::from_ref(&gpu));
    for second in 0..140 {
        windows.add(&probed(
            second,
            second / 10 * 10,
            &[("0", 20.0), ("1", 80.0)],
        ));
    }
    assert_eq!(value(&windows, &gpu), Err(Unknown::Sparse));
    for second in 140..400 {
        windows.add(&probed(
            second,
            second / 10 * 10,
            &[("0", 20.0), ("1", 80.0)],
        ));
    }
    near(value(&windows, &gpu), 80.0);
    let unknown = window("other", "gpu_usage", "avg_5m");
    assert_eq!(value(&windows, &unknown), Err(Unknown::Missing));
}

#[test]
fn a_selector_chooses_series() {
    let mut gpu = window("gpu0", "gpu_usage", "avg_1m");
    gpu.series = Some(Selector {
        requirements: vec![crate::engine::selector::Requirement::In(
            "gpu".to_owned(),
            vec!["0".to_owned()],
        )],
    });
    let all = window("gpu", "gpu_usage", "avg_1m");
    let mut windows = windows(&[gpu.clone(), all.clone()]);
    for second in 0..100 {
        windows.add(&probed(second, second, &[("0", 20.0), ("1", 80.0)]));
    }
    near(value(&windows, &gpu), 20.0);
    near(value(&windows, &all), 80.0);
}

#[test]
fn an_exporter_that_stops_answering_leaves_a_gap() {
    let gpu = window("gpu", "gpu_usage", "avg_5m");
    let mut windows = windows(std::slice::from_ref(&gpu));
    for second in 0..400 {
        windows.add(&probed(second, second, &[("0", 50.0)]));
    }
    // The last response counts for 30 s.
    for second in 400..560 {
        windows.add(&probed(second, 399, &[("0", 50.0)]));
    }
    near(value(&windows, &gpu), 50.0);
    for second in 560..600 {
        windows.add(&probed(second, 399, &[("0", 50.0)]));
    }
    assert_eq!(value(&windows, &gpu), Err(Unknown::Sparse));
}

#[test]
fn values_that_are_no_numbers_are_gaps() {
    for bad in [f64::NAN, f64::INFINITY, 1e30] {
        let gpu = window("gpu", "gpu_usage", "avg_1m");
        let mut windows = windows(std::slice::from_ref(&gpu));
        for second in 0..100 {
            windows.add(&probed(second, second, &[("0", bad)]));
        }
        assert_eq!(value(&windows, &gpu), Err(Unknown::Sparse), "{bad}");
    }
    let temperature = window("temperature", "gpu_usage", "avg_1m");
    let mut windows = windows(std::slice::from_ref(&temperature));
    for second in 0..100 {
        windows.add(&probed(second, second, &[("0", -40.0)]));
    }
    near(value(&windows, &temperature), -40.0);
}

/// A node with half of its CPU, 30 % of its memory, 20 % of a disk and 100 KiB/s of an interface in use.
fn busy_node(second: u64) -> Sample {
    let mut sample = sample(second);
    sample.node.cpu = Some(CpuTimes {
        busy: second * 2_000_000_000,
        idle: second * 2_000_000_000,
        online: 4,
    });
    sample.node.memory = Some(NodeMemory {
        total: Bytes(1000),
        available: Bytes(700),
        ..NodeMemory::default()
    });
    sample.node.load = Some([1.5, 2.5, 3.5]);
    sample.node.pressure[2] = Some(Pressure {
        some: [7.0, 8.0, 9.0],
        ..Pressure::default()
    });
    let disk = |device: &str, share: u64| DiskSample {
        device: device.into(),
        io_ms: second * share,
        ..DiskSample::default()
    };
    sample.node.disks = vec![disk("sda", 100), disk("sdb", 200)];
    sample.node.interfaces.push(InterfaceSample {
        interface: "eth0".into(),
        receive_bytes: second * 102_400,
        ..InterfaceSample::default()
    });
    sample
}

#[test]
fn every_metric_of_the_node_may_be_a_source() {
    let sources = [
        ("cpu_total_usage", 50.0, "percent"),
        ("cpu_total_utilization", 50.0, "percent"),
        ("memory_total_usage", 30.0, "percent"),
        ("memory_total_utilization", 30.0, "percent"),
        ("cpu_load_5_min", 2.5, "load"),
        ("io_pressure_some_avg60", 8.0, "percent"),
        ("disk_utilization", 20.0, "percent"),
        ("network_receive_kibps", 100.0, "KiB/s"),
    ];
    let definitions: Vec<CustomWindow> = sources
        .iter()
        .enumerate()
        .map(|(number, (source, ..))| window(&format!("w{number}"), source, "avg_5m"))
        .collect();
    let mut windows = windows(&definitions);
    assert_eq!(
        windows.sources.len(),
        4,
        "CPU and memory need no own series"
    );
    let mut demand = Demand::default();
    windows.add_demand(&mut demand);
    assert!(demand.load && demand.disks && demand.interfaces && demand.pressure[2]);
    assert!(!demand.pressure[0]);
    for second in 0..400 {
        windows.add(&busy_node(second));
    }
    for (definition, (_, expected, unit)) in definitions.iter().zip(sources) {
        near(value(&windows, definition), expected);
        assert_eq!(definition.metric.unit(), unit);
    }
    // Reading stops: what is not read is a gap.
    for second in 400..700 {
        windows.add(&sample(second));
    }
    for definition in &definitions {
        assert_eq!(value(&windows, definition), Err(Unknown::Sparse));
    }
}

#[test]
fn a_value_is_renewed_after_its_period_and_as_soon_as_it_is_known() {
    let mut slow = window("slow", "gpu_usage", "avg_5m");
    slow.period = Duration::from_mins(3);
    let quick = window("quick", "gpu_usage", "avg_1m");
    let mut windows = windows(&[slow, quick]);
    let mut slow_values = Vec::new();
    for second in 0..1000_u32 {
        let probe = [("0", f64::from(second))];
        windows.add(&probed(second.into(), second.into(), &probe));
        let values: Vec<Option<f64>> = windows.custom_values().map(|(_, value)| value).collect();
        if slow_values.last() != Some(&values[0]) {
            slow_values.push(values[0]);
        }
        assert_eq!(values[1].is_some(), second >= 30, "{second}");
    }
    // Unknown, then at 150 s (half of 5 min), and every 3 min.
    assert_eq!(slow_values.len(), 6, "{slow_values:?}");
}

#[test]
fn windows_over_one_source_share_its_series_and_a_restart_keeps_it() {
    let average = window("gpu_avg", "gpu_usage", "avg_5m");
    let peak = window("gpu_peak", "gpu_usage", "max_avg_1h");
    let load = window("load", "cpu_load_1_min", "avg_5m");
    let mut before = windows(&[average.clone(), peak, load]);
    assert_eq!(before.sources.len(), 2);
    for second in 0..400 {
        before.add(&probed(second, second, &[("0", 50.0)]));
    }
    let text = serde_json::to_string(&before).unwrap();
    let saved: NodeWindows = serde_json::from_str(&text).unwrap();
    let mut after = saved.resumed().unwrap();
    let renamed = window("gpu_usage_avg_5m", "gpu_usage", "avg_5m");
    after.set_custom([renamed.clone()].into());
    assert_eq!(
        after.sources.len(),
        1,
        "a source without a window is dropped"
    );
    near(value(&after, &renamed), 50.0);
    assert_eq!(value(&after, &average), Err(Unknown::Missing));
    let mut other = renamed;
    other.probe.as_mut().unwrap().url = "http://:1/metrics".into();
    after.set_custom([other.clone()].into());
    assert_eq!(
        value(&after, &other),
        Err(Unknown::Sparse),
        "another exporter starts over"
    );
}

#[test]
fn an_invalid_saved_source_is_dropped_alone() {
    let gpu = window("gpu", "gpu_usage", "avg_5m");
    let mut saved = serde_json::to_value(windows(std::slice::from_ref(&gpu))).unwrap();
    saved["sources"][0]["series"]["slots"] = serde_json::json!([1]);
    let windows: NodeWindows = serde_json::from_value(saved).unwrap();
    let windows = windows.resumed().expect("the node's own are valid");
    assert!(windows.sources.is_empty());
}

#[test]
fn sixteen_windows_have_a_fixed_size_and_a_sample_allocates_nothing() {
    let sources = [
        "gpu_usage",
        "cpu_load_1_min",
        "disk_utilization",
        "network_receive_kibps",
    ];
    let definitions: Vec<CustomWindow> = (0..MAX_WINDOWS)
        .map(|number| window(&format!("w{number}"), sources[number % 4], "p95_1h"))
        .collect();
    let mut node = windows(&definitions);
    node.add(&busy_node(1));
    node.add(&busy_node(2));
    let mut samples: Vec<Sample> = (3..2000).map(busy_node).collect();
    for sample in &mut samples {
        sample.probes = probed(0, sample.at.as_nanos() / 1_000_000_000, &[("0", 5.0)]).probes;
    }
    let steady = allocation_counter::measure(|| {
        for sample in &samples {
            node.add(sample);
        }
    });
    assert_eq!(steady.count_total, 0);
}
