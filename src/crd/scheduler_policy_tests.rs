use serde_json::json;

use super::*;

/// crane-scheduler's `deploy/manifests/dynamic/policy.yaml`.
pub const CRANE: &str = "\
apiVersion: scheduler.policy.crane.io/v1alpha1
kind: DynamicSchedulerPolicy
spec:
  syncPolicy:
    ##cpu usage
    - name: cpu_usage_avg_5m
      period: 3m
    - name: cpu_usage_max_avg_1h
      period: 15m
    - name: cpu_usage_max_avg_1d
      period: 3h
    ##memory usage
    - name: mem_usage_avg_5m
      period: 3m
    - name: mem_usage_max_avg_1h
      period: 15m
    - name: mem_usage_max_avg_1d
      period: 3h
  predicate:
    ##cpu usage
    - name: cpu_usage_avg_5m
      maxLimitPecent: 0.65
    - name: cpu_usage_max_avg_1h
      maxLimitPecent: 0.75
    ##memory usage
    - name: mem_usage_avg_5m
      maxLimitPecent: 0.65
    - name: mem_usage_max_avg_1h
      maxLimitPecent: 0.75
  priority:
    ###score = sum(() * weight) / len,  0 <= score <= 10
    ##cpu usage
    - name: cpu_usage_avg_5m
      weight: 0.2
    - name: cpu_usage_max_avg_1h
      weight: 0.3
    - name: cpu_usage_max_avg_1d
      weight: 0.5
    ##memory usage
    - name: mem_usage_avg_5m
      weight: 0.2
    - name: mem_usage_max_avg_1h
      weight: 0.3
    - name: mem_usage_max_avg_1d
      weight: 0.5
  hotValue:
    - timeRange: 5m
      count: 5
    - timeRange: 1m
      count: 2
";

/// The errors of a file with this spec, as `line: path: message`.
fn errors(spec: &str) -> Vec<String> {
    let text = format!("apiVersion: {API_VERSION}\nkind: {KIND}\nspec:\n{spec}");
    let errors = read(&text, ["gpu_usage_avg_5m"]).expect_err("an invalid policy");
    let text = |error: &ManifestError| {
        format!("{}: {}: {}", error.position.line, error.path, error.message)
    };
    errors.iter().map(text).collect()
}

const WEIGHTS: &str = "  priority: [{name: cpu_usage_avg_5m, weight: 1}]\n";

#[test]
fn cranes_own_policy_is_read() {
    let policy = read(CRANE, []).unwrap();
    let limits: Vec<f64> = policy.thresholds.iter().map(|it| it.limit).collect();
    assert_eq!(limits, [0.65, 0.75, 0.65, 0.75]);
    let weights: f64 = policy.weights.iter().map(|it| it.weight).sum();
    assert!((weights - 2.0).abs() < 1e-9, "{weights}");
    assert_eq!(policy.weights[5].metric.name(), "mem_usage_max_avg_1d");
}

#[test]
fn values_are_fractions_of_the_reported_windows() {
    let peak = |max| json!({"value": max, "coverage": 1.0});
    let windows = json!({"windows": {
        "cpu": {"last5m": {"avg": 10.0, "coverage": 1.0}, "maxAvg1h": peak(20.0), "maxAvg1d": peak(30.0)},
        "memory": {"last5m": {"avg": 40.0, "coverage": 1.0}, "maxAvg1h": peak(50.0), "maxAvg1d": {"coverage": 0.2}},
        "custom": {"gpu_usage_avg_5m": 60.0},
    }});
    let status: NodeMetricStatus = serde_json::from_value(windows).unwrap();
    let values = USAGE.map(|name| PolicyMetric::Usage(name).value(&status));
    let wanted = [Some(0.1), Some(0.2), Some(0.3), Some(0.4), Some(0.5), None];
    assert_eq!(values, wanted);
    let custom = |name: &str| PolicyMetric::Custom(name.into()).value(&status);
    assert_eq!(custom("gpu_usage_avg_5m"), Some(0.6));
    assert_eq!(custom("gone"), None);
}

#[test]
fn both_spellings_and_windows_of_the_nodes_settings_are_read() {
    let text = format!(
        "apiVersion: {API_VERSION}\nkind: {KIND}\nspec:\n  predicate:\n  - {{name: gpu_usage_avg_5m, maxLimitPercent: 0.5}}\n  \
         - {{name: cpu_usage_avg_5m, maxLimitPecent: 0}}\n{WEIGHTS}"
    );
    let policy = read(&text, ["gpu_usage_avg_5m"]).unwrap();
    let metric = PolicyMetric::Custom("gpu_usage_avg_5m".into());
    // The limit of 0 is off.
    assert_eq!(policy.thresholds, [Threshold { metric, limit: 0.5 }]);
}

#[test]
fn mistakes_are_refused_with_their_place() {
    let predicate = |entry: &str| format!("{WEIGHTS}  predicate:\n  - {entry}\n");
    for (spec, wanted) in [
        (
            predicate("{name: cpu_usage_avg_5, maxLimitPecent: 0.5}"),
            "6: spec.predicate[0].name: \"cpu_usage_avg_5\" is not a known metric; did you mean cpu_usage_avg_5m?",
        ),
        (
            predicate("{name: load, maxLimitPecent: 0.5}"),
            "or a name of --windows",
        ),
        (
            predicate("{name: cpu_usage_avg_5m, maxLimitPecent: 65}"),
            "6: spec.predicate[0].maxLimitPecent: maxLimitPecent is 65; write a fraction from 0 to 1, such as 0.65",
        ),
        (
            predicate("{name: cpu_usage_avg_5m, maxLimitPercent: -0.1}"),
            "spec.predicate[0].maxLimitPercent: maxLimitPercent is -0.1",
        ),
        (
            predicate("{name: cpu_usage_avg_5m}"),
            "spec.predicate[0]: has no maxLimitPecent",
        ),
        (
            predicate("{name: cpu_usage_avg_5m, maxLimitPecent: 1, maxLimitPercent: 1}"),
            "has both spellings of maxLimitPecent",
        ),
        (
            predicate("{name: cpu_usage_avg_5m, maxlimit: 1}"),
            "spec.predicate[0].maxlimit",
        ),
        (
            "  priority: [{name: cpu_usage_avg_5m, weight: 0}]\n".to_owned(),
            "4: spec.priority: the weights add up to 0",
        ),
        ("  priority: []\n".to_owned(), "the weights add up to 0"),
        (
            "  priority:\n  - {name: cpu_usage_avg_5m, weight: -1}\n".to_owned(),
            "5: spec.priority[0].weight: weight is -1",
        ),
        (
            format!("{WEIGHTS}  hotValue: [{{timeRange: 5m, count: 0}}]\n"),
            "5: spec.hotValue[0].count: count is 0; write a number of pods from 1",
        ),
        (
            format!("{WEIGHTS}  hotValue: [{{timeRange: often, count: 1}}]\n"),
            "\"often\" is not a time above 0",
        ),
        (
            format!("{WEIGHTS}  syncPolicy: [{{name: cpu_usage_avg_5m, period: 0s}}]\n"),
            "spec.syncPolicy[0].period: \"0s\" is not a time above 0",
        ),
    ] {
        let errors = errors(&spec);
        let found = errors.iter().any(|error| error.contains(wanted));
        assert!(found, "{spec}{errors:?}");
    }
}

#[test]
fn other_files_are_refused() {
    for (text, wanted) in [
        ("", "the file is empty"),
        ("a: [", "line"),
        (
            "kind: ConfigMap\napiVersion: v1\nspec: {priority: []}\n",
            "write DynamicSchedulerPolicy",
        ),
        (&format!("{CRANE}---\n{CRANE}"), "is a second document"),
    ] {
        let errors = read(text, []).expect_err("an invalid file");
        let found = format!("line {errors:?}");
        assert!(found.contains(wanted), "{text}: {found}");
    }
}
