//! Score and Filter of crane-scheduler by its policy file. Pure.
//!
//! Score is crane's: the mean of what is free, by weight, less the hot value. The hot value is not counted from events: it is the part
//! of the load that averages do not show yet, which agents report, with the pods in flight. A metric that a node lacks is the
//! median of the others there, where crane counts the node as full.

use super::in_flight::Shares;
use super::score::neutral;
use crate::crd::NodeMetricStatus;
use crate::crd::node_metric::Load;
use crate::crd::scheduler_policy::SchedulerPolicy;

/// The headroom of each node, from 0 to 1, before its hot value. `None` for unknown nodes, and for all if no metric is known.
pub fn free(policy: &SchedulerPolicy, nodes: &[Option<&NodeMetricStatus>]) -> Vec<Option<f64>> {
    let mut sums = vec![0.0; nodes.len()];
    let mut weights = 0.0;
    for entry in &policy.weights {
        let value = |status: &NodeMetricStatus| entry.metric.value(status);
        let values: Vec<Option<f64>> = nodes.iter().map(|node| node.and_then(value)).collect();
        if values.iter().all(Option::is_none) {
            continue;
        }
        weights += entry.weight;
        for (sum, value) in sums.iter_mut().zip(neutral(&values)) {
            *sum += (1.0 - value.clamp(0.0, 1.0)) * entry.weight;
        }
    }
    let all = nodes.iter().zip(sums);
    all.map(|(node, sum)| (node.is_some() && weights > 0.0).then_some(sum / weights))
        .collect()
}

/// What newcomers are expected to use, in percent of the node.
pub fn newcomers(load: &Load) -> Shares {
    [load.cpu.newcomers, load.memory.newcomers]
}

/// The hot value, as a part of the headroom: one point of crane's 100 for each percent that newcomers use.
pub fn hot(newcomers: Shares, floor: Option<Shares>) -> f64 {
    let floor = floor.unwrap_or(newcomers);
    let most = newcomers[0].max(floor[0]).max(newcomers[1].max(floor[1]));
    (most / 100.0).clamp(0.0, 1.0)
}

/// Why Filter rejects a node: the metric that is over its limit. Metrics that the node lacks pass, as in crane.
pub fn rejection(policy: &SchedulerPolicy, status: &NodeMetricStatus) -> Option<String> {
    let mut thresholds = policy.thresholds.iter();
    let over = thresholds.find(|threshold| {
        let value = threshold.metric.value(status);
        value.is_some_and(|value| value > threshold.limit)
    })?;
    let name = over.metric.name();
    Some(format!(
        "its {name} is over the limit of the scheduler policy"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::crd::scheduler_policy::read;

    const POLICY: &str = "{apiVersion: scheduler.policy.crane.io/v1alpha1, kind: DynamicSchedulerPolicy, spec: {predicate: \
        [{name: cpu_usage_avg_5m, maxLimitPecent: 0.65}], priority: [{name: cpu_usage_avg_5m, weight: 1}, \
        {name: cpu_usage_max_avg_1h, weight: 3}]}}";

    fn status(avg: f64, peak: Option<f64>) -> NodeMetricStatus {
        let peak = peak.map(|value| json!({"value": value, "coverage": 1.0}));
        let cpu = json!({"last5m": {"avg": avg, "coverage": 1.0}, "maxAvg1h": peak});
        serde_json::from_value(json!({"windows": {"cpu": cpu}})).unwrap()
    }

    #[test]
    fn it_is_cranes_formula_with_medians_for_what_is_missing() {
        let policy = read(POLICY, []).unwrap();
        let nodes = [
            status(20.0, Some(60.0)),
            status(40.0, None),
            status(40.0, Some(80.0)),
        ];
        let free = free(
            &policy,
            &[Some(&nodes[0]), Some(&nodes[1]), None, Some(&nodes[2])],
        );
        let close = |found: Option<f64>, wanted: f64| (found.unwrap() - wanted).abs() < 1e-9;
        assert!(close(free[0], (0.8 + 3.0 * 0.4) / 4.0), "{free:?}");
        // The lower median of 0.6 and 0.8.
        assert!(close(free[1], (0.6 + 3.0 * 0.4) / 4.0), "{free:?}");
        assert_eq!(free[2], None);
        assert!(close(free[3], (0.6 + 3.0 * 0.2) / 4.0), "{free:?}");
    }

    #[test]
    fn without_any_metric_all_nodes_are_unknown() {
        let policy = read(POLICY, []).unwrap();
        let empty = NodeMetricStatus::default();
        assert_eq!(free(&policy, &[Some(&empty), None]), [None, None]);
    }

    #[test]
    fn newcomers_and_pods_in_flight_are_the_hot_value() {
        let part = |found: f64, wanted: f64| assert!((found - wanted).abs() < 1e-9, "{found}");
        part(hot([7.5, 3.0], None), 0.075);
        part(hot([7.5, 3.0], Some([5.0, 10.0])), 0.1);
        part(hot([500.0, 0.0], None), 1.0);
    }

    #[test]
    fn filter_rejects_above_a_limit() {
        let policy = read(POLICY, []).unwrap();
        assert_eq!(rejection(&policy, &status(65.0, None)), None);
        let why = "its cpu_usage_avg_5m is over the limit of the scheduler policy";
        let found = rejection(&policy, &status(65.1, None));
        assert_eq!(found.as_deref(), Some(why));
        assert_eq!(rejection(&policy, &NodeMetricStatus::default()), None);
    }
}
