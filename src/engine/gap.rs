//! How much has to be released for a metric to come back under its mark.

use super::metric::{Metric, Resource};
use super::policy::Rule;
use super::rule::Judgement;
use super::sample::NodeSample;

/// Releases fall a little short of what is predicted; this much more is taken.
const MARGIN: f64 = 1.1;
/// Millicores in one percent of one CPU.
const MILLICORES_PER_PERCENT: f64 = 10.0;

/// `1.1 x (value - watermark)` in millicores or bytes, less what is `saved` already; 0 where the value is not above
/// the mark, or where the metric has no unit of release.
pub(super) fn gap(rule: &Rule, judgement: Option<Judgement>, saved: u64, node: &NodeSample) -> u64 {
    let Some(value) = judgement.and_then(Judgement::value) else {
        return 0;
    };
    let excess = unit(&rule.metric, node).map_or(0.0, |unit| (value - rule.watermark) * unit);
    let left = excess - saved as f64;
    if left <= 0.0 {
        return 0;
    }
    whole((MARGIN * left).round().max(1.0))
}

/// What one unit of the metric is in millicores or bytes.
fn unit(metric: &Metric, node: &NodeSample) -> Option<f64> {
    match metric {
        Metric::CpuUsage | Metric::MemoryUsage => Some(1.0),
        Metric::CpuUtilization | Metric::Window(Resource::Cpu, _) => node
            .cpu
            .map(|cpu| f64::from(cpu.online) * MILLICORES_PER_PERCENT),
        Metric::MemoryUtilization | Metric::Window(Resource::Memory, _) => {
            node.memory.map(|memory| memory.total.0 as f64 / 100.0)
        }
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
