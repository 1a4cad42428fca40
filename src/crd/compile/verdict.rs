//! Whether a rule can do what it says: on this node, with this metric, action and set of pods.

use std::collections::BTreeMap;
use std::ops::Range;

use super::super::finding::Reason;
use super::super::objects::Kind;
use super::pods::{list, selects};
use super::{About, Scope};
use crate::engine::metric::{
    ActionKind, DiskRate, Leverage, Metric, PressureKind, Protected, Resource,
};
use crate::engine::policy::{Action, Allowed, Rule};

/// Whether the rule is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is.
    On,
    /// It can't do what it says: it is left out.
    Off,
}

/// Judges a rule, and reports what is found.
pub(super) fn judge(
    rule: &Rule,
    scope: &Scope<'_>,
    path: &str,
    findings: &mut About<'_>,
) -> Verdict {
    let mut judge = Judge {
        rule,
        scope,
        path,
        findings,
    };
    judge.metric();
    let off = [judge.leverage(), judge.watermark(), judge.restore()];
    judge.pressure();
    judge.permission();
    if off.contains(&Verdict::Off) {
        Verdict::Off
    } else {
        Verdict::On
    }
}

struct Judge<'a, 'b> {
    rule: &'a Rule,
    scope: &'a Scope<'a>,
    path: &'a str,
    findings: &'a mut About<'b>,
}

impl Judge<'_, '_> {
    fn error(&mut self, reason: Reason, field: &str, message: String) {
        let path = format!("{}.{field}", self.path);
        self.findings.error(reason, path, message);
    }

    fn warning(&mut self, reason: Reason, field: &str, message: String) {
        let path = format!("{}.{field}", self.path);
        self.findings.warning(reason, path, message);
    }

    fn metric(&mut self) {
        let metric = &self.rule.metric;
        if let Metric::ElasticCpuRequested = metric {
            let message = format!(
                "\"{metric}\" is not kept yet, so that the rule is never judged; write for example \
                 cpu_total_utilization"
            );
            self.error(Reason::MetricNotKept, "metricRule.name", message);
        }
        let unlabelled = BTreeMap::new();
        let selector = self.rule.series.as_ref();
        if has_one_series(metric) && selector.is_some_and(|selector| !selector.matches(&unlabelled))
        {
            let message = format!(
                "\"{metric}\" has one series without labels, which this selector does not match, so that the rule is \
                 never judged; remove selector"
            );
            self.error(Reason::NoSuchSeries, "metricRule.selector", message);
        }
    }

    /// A rule nothing of whose action lowers the metric would act for nothing, and never end.
    fn leverage(&mut self) -> Verdict {
        let (able, unable): (Vec<_>, Vec<_>) = kinds(&self.rule.action)
            .into_iter()
            .partition(|kind| self.rule.metric.leverage(*kind) != Leverage::None);
        let metric = &self.rule.metric;
        if able.contains(&ActionKind::ForceGc) && metric.resource() == Some(Resource::Memory) {
            let message = format!(
                "reclaiming page cache hardly lowers \"{metric}\", which counts page cache that can be dropped as free; \
                 write for example memory_pressure_some_avg60, or name an action with eviction"
            );
            self.warning(Reason::PartialLeverage, "actionName", message);
        }
        let Some(unable) = unable.first().copied() else {
            return Verdict::On;
        };
        let what = describe(unable);
        if able.is_empty() && self.rule.action.scheduling.is_none() {
            let cure = match metric {
                Metric::Window(..) if metric.leverage(ActionKind::Eviction) == Leverage::None => {
                    "nothing lowers a peak that has been; name an action with disableScheduling"
                }
                _ => "name an action with eviction",
            };
            let message = format!("{what} does not lower \"{metric}\"; {cure}");
            self.error(Reason::NoLeverage, "actionName", message);
            return Verdict::Off;
        }
        let message = format!(
            "{what} does not lower \"{metric}\", and is left out; the rest of the action is taken"
        );
        self.warning(Reason::PartialLeverage, "actionName", message);
        Verdict::On
    }

    /// A rule on what its own throttles raise is not judged by its value alone.
    fn pressure(&mut self) {
        let Rule { metric, action, .. } = self.rule;
        let throttles = action.throttle.is_some();
        let Some(kind) = metric.raised_by_throttles().filter(|_| throttles) else {
            return;
        };
        let direct = match kind {
            PressureKind::Cpu => Protected::CpuDelayMax,
            PressureKind::Memory => Protected::MemoryStallMax,
            PressureKind::Io => Protected::IoStallMax,
        };
        let message = format!(
            "pods that are throttled raise \"{metric}\" themselves, so the rule acts only while protected pods wait as well: \
             for more than 5 % of the time, pods that no PodQOS lets \"{}\" touch; on cgroup v2 write \"{}\", which is \
             their waiting alone",
            action.name,
            Metric::Protected(direct)
        );
        self.warning(Reason::JudgedByProtected, "metricRule.name", message);
    }

    /// A watermark under 1 % of the node is a mistake in the unit: nearly always `4` for 4 CPUs.
    fn watermark(&mut self) -> Verdict {
        let (mark, metric) = (self.rule.watermark, &self.rule.metric);
        let unit = metric.unit();
        let Some(capacity) = capacity(metric, self.scope) else {
            self.watermark_of_any_node();
            return Verdict::On;
        };
        if is_usage(metric) && mark * 100.0 < capacity {
            let cure = guess(metric, mark, capacity / 100.0..capacity);
            let cure = cure.unwrap_or_else(|| {
                let example = suggestion(metric, capacity * 0.8);
                format!("write for example {example}")
            });
            let message = format!(
                "{mark} {unit} is less than 1 % of the {capacity} {unit} of the node, and the rule is off; {cure}"
            );
            self.error(Reason::WatermarkTooLow, "metricRule.value", message);
            return Verdict::Off;
        }
        if mark >= capacity {
            let message = format!(
                "{mark} {unit} can't be passed{}: the most there is are {capacity} {unit}; write less, for example {}",
                self.on_the_node(),
                suggestion(metric, capacity * 0.8)
            );
            self.error(Reason::WatermarkTooHigh, "metricRule.value", message);
        }
        Verdict::On
    }

    /// The size of the node is not known: less than an idle one uses can hardly be meant.
    fn watermark_of_any_node(&mut self) {
        let (mark, metric) = (self.rule.watermark, &self.rule.metric);
        let (range, example) = match metric {
            Metric::CpuUsage => (100.0..256_000.0, "4000"),
            Metric::MemoryUsage => (100.0 * MEBIBYTE..512.0 * GIBIBYTE, "6Gi"),
            _ => return,
        };
        if mark >= range.start {
            return;
        }
        let cure = guess(metric, mark, range);
        let message = format!(
            "{mark} {} is less than an idle node uses, and can hardly be meant; {}",
            metric.unit(),
            cure.unwrap_or_else(|| format!("write for example {example}"))
        );
        self.warning(Reason::WatermarkTooLow, "metricRule.value", message);
    }

    /// ` on a node of 4 CPUs`, where that is what decides.
    fn on_the_node(&self) -> String {
        match self.rule.metric {
            Metric::CpuUsage => format!(" on a node of {} CPUs", self.scope.node.cpus),
            Metric::MemoryUsage => format!(" on a node of {}", self.scope.node.memory),
            _ => String::new(),
        }
    }

    /// A low mark next to nothing is never reached, and what is in force would stay for ever.
    fn restore(&mut self) -> Verdict {
        let (low, metric) = (self.rule.restore, &self.rule.metric);
        let least = capacity(metric, self.scope).map_or(0.0, |capacity| capacity / 100.0);
        let given = low < self.rule.watermark;
        if given && is_usage(metric) && (low == 0.0 || low < least) {
            let meant = self.rule.watermark * 0.8;
            let cure = if meant > least {
                format!("write for example {}, or leave", suggestion(metric, meant))
            } else {
                "leave".to_owned()
            };
            let message = format!(
                "the node never falls to {low} {}, so that the rule would never end, and it is off; {cure} restoreValue out",
                metric.unit(),
            );
            self.error(Reason::RestoreNeverReached, "restoreValue", message);
            return Verdict::Off;
        }
        Verdict::On
    }

    fn permission(&mut self) {
        let action = &self.rule.action;
        let kinds = kinds(action);
        let allowed = |kind: &ActionKind| {
            let policies = self.scope.pods.iter().filter(|policy| selects(policy));
            let mut entries = policies.flat_map(|policy| &policy.allowed);
            entries.any(|entry| Allowed::of(entry).permits(&action.name, *kind))
        };
        if kinds.is_empty() || kinds.iter().any(allowed) {
            return;
        }
        let refused: Vec<&str> = self.scope.objects.refused(Kind::PodQos).collect();
        let cure = if refused.is_empty() {
            format!("add one with allowedActions: [{}]", action.name)
        } else {
            format!(
                "of those that are not in force, correct {}",
                list(refused.iter())
            )
        };
        let message = format!(
            "no PodQOS in force allows the action \"{}\" on any pod, so that the rule has nobody to act on; {cure}",
            action.name
        );
        self.error(Reason::NobodyToActOn, "actionName", message);
    }
}

/// The kinds of action on pods that an action takes.
fn kinds(action: &Action) -> Vec<ActionKind> {
    let kinds = [
        (ActionKind::CpuThrottle, action.throttle.is_some()),
        (ActionKind::ForceGc, action.force_gc),
        (ActionKind::Eviction, action.eviction.is_some()),
    ];
    let taken = kinds.into_iter().filter(|(_, taken)| *taken);
    taken.map(|(kind, _)| kind).collect()
}

const fn describe(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::CpuThrottle => "throttling CPU",
        ActionKind::ForceGc => "reclaiming page cache",
        ActionKind::Eviction => "evicting",
    }
}

/// How much of the node a metric measures.
const fn is_usage(metric: &Metric) -> bool {
    matches!(
        metric,
        Metric::CpuUsage
            | Metric::CpuUtilization
            | Metric::MemoryUsage
            | Metric::MemoryUtilization
            | Metric::Window(..)
    )
}

const fn has_one_series(metric: &Metric) -> bool {
    is_usage(metric)
        || matches!(
            metric,
            Metric::Load(_)
                | Metric::Pressure { .. }
                | Metric::Protected(_)
                | Metric::ElasticCpuRequested
        )
}

/// The most that a metric can be; `None` where there is no such limit, or it is not known.
fn capacity(metric: &Metric, scope: &Scope<'_>) -> Option<f64> {
    let known = |amount: f64| (amount > 0.0).then_some(amount);
    match metric {
        Metric::CpuUsage => known(f64::from(scope.node.cpus) * 1000.0),
        Metric::MemoryUsage => known(scope.node.memory.0 as f64),
        Metric::CpuUtilization
        | Metric::MemoryUtilization
        | Metric::Pressure { .. }
        | Metric::Protected(_)
        | Metric::Window(..)
        | Metric::Disk(DiskRate::Utilization)
        | Metric::ThrottledRatio => Some(100.0),
        _ => None,
    }
}

const GIBIBYTE: f64 = 1_073_741_824.0;
const MEBIBYTE: f64 = 1_048_576.0;
/// In which a person writes an amount of memory.
const BINARY: [(f64, &str); 2] = [(GIBIBYTE, "Gi"), (MEBIBYTE, "Mi")];

/// What was probably meant: the same number in another unit, if that is within the range.
fn guess(metric: &Metric, mark: f64, range: Range<f64>) -> Option<String> {
    let factors: &[(f64, &str)] = match metric {
        Metric::CpuUsage => &[(1000.0, "")],
        Metric::MemoryUsage => &BINARY,
        _ => &[(100.0, "")],
    };
    let is_meant = |(factor, _): &&(f64, &str)| range.contains(&(mark * factor));
    let (factor, suffix) = factors.iter().find(is_meant)?;
    let meant = (mark * factor * 1e6).round() / 1e6;
    Some(match *suffix {
        "" => format!("did you mean {}?", written(meant)),
        suffix => format!("did you mean {mark}{suffix}?"),
    })
}

/// A value as a person would write it in a manifest: two digits that count, at most this much.
fn suggestion(metric: &Metric, most: f64) -> String {
    let suffixes: &[(f64, &str)] = match metric {
        Metric::MemoryUsage => &BINARY,
        _ => &[],
    };
    let suffix = suffixes.iter().find(|(unit, _)| most >= *unit);
    let (unit, suffix) = suffix.copied().unwrap_or((1.0, ""));
    let number = two_digits(most / unit);
    if suffix.is_empty() {
        return written(number);
    }
    format!("{number}{suffix}")
}

/// An API server refuses a bare number that is not whole.
fn written(number: f64) -> String {
    if number.fract() == 0.0 {
        number.to_string()
    } else {
        format!("\"{number}\"")
    }
}

/// Rounded down to two digits that count; 0.8 times 0.7 is a hair less than 0.56.
fn two_digits(number: f64) -> f64 {
    const HAIR: f64 = 1e-9;
    let [mut up, mut down] = [1.0, 1.0];
    while number * up < 10.0 && up < 1e9 {
        up *= 10.0;
    }
    while number / down >= 100.0 {
        down *= 10.0;
    }
    (number * up / down + HAIR).floor() * down / up
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suggestion_is_a_value_that_a_person_would_write() {
        let cases = [
            (Metric::MemoryUsage, 1_637_456_281.600_000_1, "1.5Gi"),
            (Metric::MemoryUsage, 0.8 * 68_719_476_736.0, "51Gi"),
            (Metric::MemoryUsage, 0.8 * 536_870_912.0, "400Mi"),
            (Metric::CpuUsage, 0.8 * 4000.0, "3200"),
            (Metric::CpuUsage, 0.8 * 96_000.0, "76000"),
            (Metric::CpuUtilization, 80.0, "80"),
            (Metric::CpuUtilization, 0.8 * 1.5, "\"1.2\""),
            (Metric::CpuUtilization, 0.8 * 0.7, "\"0.56\""),
            (Metric::CpuUtilization, 0.07 * 100.0, "7"),
        ];
        for (metric, most, written) in cases {
            assert_eq!(suggestion(&metric, most), written, "{most}");
        }
    }

    #[test]
    fn what_was_probably_meant_is_what_was_written_in_another_unit() {
        let node = 16.0 * 1_073_741_824.0;
        let cases = [
            (Metric::CpuUsage, 1.23, 8000.0, Some("did you mean 1230?")),
            (Metric::MemoryUsage, 4.0, node, Some("did you mean 4Gi?")),
            (
                Metric::MemoryUsage,
                900.0,
                node,
                Some("did you mean 900Mi?"),
            ),
            (Metric::CpuUtilization, 0.07, 100.0, Some("did you mean 7?")),
            (Metric::MemoryUsage, 0.001, node, None),
        ];
        for (metric, mark, capacity, words) in cases {
            let guess = guess(&metric, mark, capacity / 100.0..capacity);
            assert_eq!(guess.as_deref(), words);
        }
    }
}
