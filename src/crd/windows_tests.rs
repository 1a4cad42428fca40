use super::*;
use crate::engine::window::Span;

/// The errors of a file with these entries, as `line: path: message`.
fn errors(entries: &str) -> Vec<String> {
    let errors = read(&format!("metrics:\n{entries}")).unwrap_err();
    errors
        .iter()
        .map(|error| format!("{}: {}: {}", error.position.line, error.path, error.message))
        .collect()
}

fn entry(name: &str, source: &str, window: &str) -> String {
    format!("- {{name: {name}, source: {source}, window: {window}}}\n")
}

#[test]
fn the_windows_of_a_file_are_read() {
    let windows = read(
        "metrics:\n- name: gpu_usage_avg_5m\n  source: DCGM_FI_DEV_GPU_UTIL\n  window: avg_5m\n  period: 3m\n  \
         httpGet: {port: 9400}\n- name: sda_p95_1d\n  source: disk_utilization\n  window: p95_1d\n  \
         selector: {matchLabels: {device: sda}}\n",
    )
    .unwrap();
    let [gpu, disk] = &windows[..] else {
        panic!("{windows:?}");
    };
    assert_eq!(
        gpu.metric.source,
        Metric::Probe("DCGM_FI_DEV_GPU_UTIL".into())
    );
    assert_eq!(gpu.metric.statistic, Statistic::Average(Span::FiveMinutes));
    assert_eq!(gpu.period, Duration::from_mins(3));
    assert_eq!(&*gpu.probe.as_ref().unwrap().url, "http://:9400/metrics");
    assert_eq!(disk.period, Duration::from_secs(10));
    assert!(disk.series.is_some() && disk.probe.is_none());
}

#[test]
fn an_empty_file_and_an_empty_list_have_no_windows() {
    for text in ["", "# none\n", "metrics: []\n", "---\nmetrics: []\n"] {
        assert_eq!(read(text), Ok(Vec::new()), "{text}");
    }
}

/// Every entry has a mistake, and no other line has one.
fn assert_refused(cases: &[(String, &str)]) {
    for (entry, expected) in cases {
        let errors = errors(entry);
        let found = errors.iter().any(|error| error.contains(expected));
        assert!(found, "{entry}{errors:?}");
        let of_entry = |error: &String| error.starts_with("2: metrics[0]");
        assert!(errors.iter().all(of_entry), "{errors:?}");
    }
}

#[test]
fn a_source_that_is_not_measured_is_refused_with_a_fix() {
    assert_refused(&[
        (
            entry("a", "disk_utilisation", "avg_5m"),
            "did you mean disk_utilization? Or add httpGet",
        ),
        (
            entry("a", "gpu_usage", "avg_5m"),
            "\"gpu_usage\" is not a known metric",
        ),
        (entry("a", "pod_cpu_delay", "avg_5m"), "is a metric of pods"),
        (
            entry("a", "cpu_usage_avg_5m", "avg_1h"),
            "is a window itself",
        ),
        (
            entry("a", "protected_cpu_delay_max", "avg_5m"),
            "depends on the action of a rule",
        ),
        (
            entry("a", "ext_cpu_total_distribute", "avg_5m"),
            "is not measured yet",
        ),
        (
            entry("a", "\"disk utilization\"", "avg_5m"),
            "source is not a metric name",
        ),
    ]);
}

#[test]
fn a_wrong_name_or_field_is_refused_with_a_fix() {
    let with = |fields: &str| format!("- {{name: a, {fields}}}\n");
    let disk = "source: disk_utilization, window: avg_5m";
    assert_refused(&[
        (
            entry("a", "disk_utilization", "avg_2m"),
            "window is \"avg_2m\"",
        ),
        (
            entry("a", "disk_utilization", "av_5m"),
            "did you mean avg_5m?",
        ),
        (
            entry("cpu_usage_avg_5m", "disk_utilization", "avg_5m"),
            "is a metric of every node already",
        ),
        (
            entry("plimsoll_agent_pods", "disk_utilization", "avg_5m"),
            "starts like the names",
        ),
        (
            entry("a-b", "disk_utilization", "avg_5m"),
            "name is not a metric name",
        ),
        (with("source: disk_utilization"), "window is missing"),
        (
            with("source: disk_utilization, windw: avg_5m"),
            "did you mean window?",
        ),
        (with("source: disk_utilization, window: 5"), "window is 5"),
        (
            with("source: cpu_load_1_min, window: avg_5m, selector: {}"),
            "remove selector",
        ),
        (
            with(&format!("{disk}, httpGet: {{port: 9400}}")),
            "remove httpGet",
        ),
        (
            with("source: x, window: avg_5m, httpGet: {port: 0}"),
            "port is not a port number",
        ),
    ]);
}

#[test]
fn a_period_is_from_ten_seconds_to_the_length_of_the_window() {
    let period = |window: &str, period: &str| {
        read(&format!(
            "metrics: [{{name: a, source: disk_utilization, window: {window}, period: {period}}}]"
        ))
    };
    for (window, given, seconds) in [
        ("avg_1m", "10s", 10),
        ("avg_5m", "5m", 300),
        ("max_avg_1d", "3h", 10_800),
    ] {
        assert_eq!(period(window, given).unwrap()[0].period.as_secs(), seconds);
    }
    for (window, given) in [
        ("avg_5m", "9s"),
        ("avg_5m", "301s"),
        ("avg_1m", "2m"),
        ("avg_5m", "-1m"),
        ("avg_5m", "soon"),
        ("avg_5m", "\"10\""),
    ] {
        let errors = period(window, given).unwrap_err();
        assert!(errors[0].message.starts_with("period is "), "{errors:?}");
    }
}

#[test]
fn names_are_unique_and_their_number_is_bounded() {
    let twice = entry("a", "disk_utilization", "avg_5m") + &entry("a", "cpu_load_1_min", "avg_5m");
    let errors_of_twice = errors(&twice);
    assert_eq!(errors_of_twice.len(), 1);
    assert!(
        errors_of_twice[0]
            .starts_with("3: metrics[1].name: \"a\" is already the name of metrics[0]")
    );
    let many: String = (0..17)
        .map(|n| entry(&format!("a{n}"), "disk_utilization", "avg_5m"))
        .collect();
    assert!(
        errors(&many)[0].contains("at most 16"),
        "{:?}",
        errors(&many)
    );
    assert_eq!(crate::engine::window::MAX_WINDOWS, 16);
}

#[test]
fn what_is_no_list_of_windows_is_refused() {
    for text in [
        "metrics: 5",
        "metrics: {a: b}",
        "[]",
        "windows: []",
        "metrics: []\nperiod: 3m",
        "metrics: []\n---\nmetrics: []\n",
        "metrics: [",
        "metrics: [null]",
    ] {
        assert!(read(text).is_err(), "{text}");
    }
}
