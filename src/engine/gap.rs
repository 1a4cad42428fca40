//! How much must be released for a metric to fall below its threshold.

use super::metric::{Metric, Resource};
use super::policy::Rule;
use super::rule::Evaluation;
use super::sample::NodeSample;

/// Actual releases fall a little short of the prediction, so plan for more.
const MARGIN: f64 = 1.1;
/// Millicores in one percent of one CPU.
const MILLICORES_PER_PERCENT: f64 = 10.0;

/// `1.1 x (value - threshold)` in millicores or bytes, minus what is already `saved`; 0 if the value is not above the
/// threshold or the metric has no unit of release.
pub(super) fn gap(
    rule: &Rule,
    evaluation: Option<Evaluation>,
    saved: u64,
    node: &NodeSample,
) -> u64 {
    let Some(value) = evaluation.and_then(Evaluation::value) else {
        return 0;
    };
    let excess = unit(&rule.metric, node).map_or(0.0, |unit| (value - rule.threshold) * unit);
    let left = excess - saved as f64;
    if left <= 0.0 {
        return 0;
    }
    whole((MARGIN * left).round().max(1.0))
}

/// One unit of the metric in millicores or bytes.
fn unit(metric: &Metric, node: &NodeSample) -> Option<f64> {
    match metric {
        Metric::CpuUsage | Metric::MemoryUsage => Some(1.0),
        Metric::CpuUtilization | Metric::Window(Resource::Cpu, _) => node
            .cpu
            .map(|cpu| f64::from(cpu.online) * MILLICORES_PER_PERCENT),
        Metric::MemoryUtilization | Metric::Window(Resource::Memory, _) => {
            node.memory.map(|memory| memory.capacity().0 as f64 / 100.0)
        }
        Metric::Custom(custom) => match custom.source.resource()? {
            Resource::Cpu => unit(&Metric::CpuUtilization, node),
            Resource::Memory => unit(&Metric::MemoryUtilization, node),
        },
        _ => None,
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positive, and `as` saturates"
)]
const fn whole(value: f64) -> u64 {
    value as u64
}

#[cfg(test)]
mod tests {
    use super::super::sample::{CpuTimes, NodeMemory};
    use super::super::testing::rule;
    use super::super::units::Bytes;
    use super::*;

    fn node() -> NodeSample {
        NodeSample {
            cpu: Some(CpuTimes {
                online: 4,
                ..CpuTimes::default()
            }),
            memory: Some(NodeMemory {
                total: Bytes(5_000_000),
                available: Bytes(0),
                hugetlb: Bytes(3_000_000),
                ..NodeMemory::default()
            }),
            ..NodeSample::default()
        }
    }

    fn known(value: f64) -> Evaluation {
        Evaluation::Known {
            value,
            breach: true,
            quiet: false,
            incomplete: None,
        }
    }

    #[test]
    fn a_gap_is_the_excess_plus_ten_percent_in_the_unit_of_the_resource() {
        let table = [
            ("cpu_total_usage", 4000.0, 5000.0, 0, 1100),
            ("cpu_total_usage", 4000.0, 5000.0, 400, 660),
            ("cpu_total_usage", 4000.0, 5000.0, 1000, 0),
            ("cpu_total_usage", 4000.0, 4000.01, 0, 1),
            ("cpu_total_usage", 4000.0, 4000.0, 0, 0),
            ("cpu_total_usage", 4000.0, 3000.0, 0, 0),
            ("cpu_total_utilization", 50.0, 75.0, 0, 1100),
            ("memory_total_usage", 100.0, 300.0, 0, 220),
            ("memory_total_utilization", 50.0, 60.0, 0, 220_000),
            ("cpu_load_1_min", 1.0, 10.0, 0, 0),
            ("disk_read_iops", 1.0, 10.0, 0, 0),
        ];
        for (metric, threshold, value, saved, expected) in table {
            let rule = rule(metric, threshold);
            let found = gap(&rule, Some(known(value)), saved, &node());
            assert_eq!(found, expected, "{metric} at {value}");
        }
    }

    #[test]
    fn an_unknown_value_has_no_gap() {
        let unknown = Evaluation::Unknown(super::super::plan::Unknown::Stale);
        let rule = rule("cpu_total_usage", 1.0);
        assert_eq!(gap(&rule, None, 0, &node()), 0);
        assert_eq!(gap(&rule, Some(unknown), 0, &node()), 0);
    }
}
