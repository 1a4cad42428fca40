//! Checks whether a rule can have the effect it describes: on this node, with this metric, action and set of pods.

use std::collections::BTreeMap;
use std::ops::{Range, RangeInclusive};

use super::super::finding::Reason;
use super::super::objects::Kind;
use super::super::words::{nearest, quoted};
use super::pods::{list, selects};
use super::{ObjectFindings, Scope};
use crate::engine::metric::{
    ActionEffect, ActionKind, DiskRate, Metric, PressureKind, Protected, Resource,
};
use crate::engine::policy::{Action, Allowed, Rule};
use crate::engine::quantity::RawQuantity;
use crate::engine::window::Statistic;

/// The result of the checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RuleVerdict {
    /// The rule is in force.
    On,
    /// The rule is left out.
    Off,
}

/// Checks a rule with this `metricRule.value`, and reports findings.
pub(super) fn check(
    rule: &Rule,
    value: &RawQuantity,
    scope: &Scope<'_>,
    path: &str,
    findings: &mut ObjectFindings<'_>,
) -> RuleVerdict {
    let mut check = RuleCheck {
        rule,
        value,
        scope,
        path,
        findings,
    };
    check.metric();
    let outcomes = [
        check.action_effect(),
        check.threshold(),
        check.restore_value(),
    ];
    check.permission();
    if outcomes.contains(&RuleVerdict::Off) {
        RuleVerdict::Off
    } else {
        RuleVerdict::On
    }
}

struct RuleCheck<'a, 'b> {
    rule: &'a Rule,
    value: &'a RawQuantity,
    scope: &'a Scope<'a>,
    path: &'a str,
    findings: &'a mut ObjectFindings<'b>,
}

impl RuleCheck<'_, '_> {
    fn error(&mut self, reason: Reason, field: &str, message: String) {
        let path = format!("{}.{field}", self.path);
        self.findings.error(reason, path, message);
    }

    fn warning(&mut self, reason: Reason, field: &str, message: String) {
        let path = format!("{}.{field}", self.path);
        self.findings.warning(reason, path, message);
    }

    /// Where the rule says what it does.
    fn action_field(&self) -> &'static str {
        if *self.rule.action.name == *self.rule.id.to_string() {
            "action"
        } else {
            "actionName"
        }
    }

    fn metric(&mut self) {
        let metric = &self.rule.metric;
        if let Metric::ElasticCpuRequested = metric {
            let message = format!(
                "\"{metric}\" is not measured yet, so the rule is never evaluated; write for example \
                 cpu_total_utilization"
            );
            self.error(Reason::MetricNotMeasured, "metricRule.name", message);
        }
        let unlabelled = BTreeMap::new();
        let selector = self.rule.series.as_ref();
        if has_one_series(metric) && selector.is_some_and(|selector| !selector.matches(&unlabelled))
        {
            let message = format!(
                "\"{metric}\" has one series without labels, which this selector does not match, so the rule is \
                 never evaluated; remove selector"
            );
            self.error(Reason::NoSuchSeries, "metricRule.selector", message);
        }
    }

    /// A rule whose action does not lower the metric would act without effect, and never end.
    fn action_effect(&mut self) -> RuleVerdict {
        let (able, unable): (Vec<_>, Vec<_>) = kinds(&self.rule.action)
            .into_iter()
            .partition(|kind| self.rule.metric.action_effect(*kind) != ActionEffect::None);
        let Some(kind) = unable.first().copied() else {
            return RuleVerdict::On;
        };
        let metric = &self.rule.metric;
        let (unable, fix) = (describe(kind), instead(metric, kind));
        if able.is_empty() && self.rule.action.scheduling.is_none() {
            let message = format!("{unable} does not lower \"{metric}\"; {fix}");
            self.error(Reason::ActionDoesNotHelp, self.action_field(), message);
            return RuleVerdict::Off;
        }
        let message = format!(
            "{unable} does not lower \"{metric}\" and is skipped; the rest of the action is taken: {fix}"
        );
        self.warning(Reason::ActionPartlyHelps, self.action_field(), message);
        RuleVerdict::On
    }

    /// A threshold under 1 % of the node is a wrong unit: usually `4` for 4 CPUs.
    fn threshold(&mut self) -> RuleVerdict {
        let (threshold, metric) = (self.rule.threshold, &self.rule.metric);
        let unit = metric.unit();
        let Some(capacity) = capacity(metric, self.scope) else {
            self.threshold_of_any_node();
            return RuleVerdict::On;
        };
        if is_usage(metric) && threshold * 100.0 < capacity {
            let fix = guess(metric, threshold, capacity / 100.0..capacity);
            let fix = fix.unwrap_or_else(|| {
                let example = suggestion(metric, capacity * 0.8);
                format!("write for example {example}")
            });
            let message = format!(
                "{} is less than 1 % of the {capacity} {unit} of the node, so the rule is off; {fix}",
                self.threshold_as_written()
            );
            self.error(Reason::ThresholdTooLow, "metricRule.value", message);
            return RuleVerdict::Off;
        }
        if threshold >= capacity {
            let message = format!(
                "{threshold} {unit} can't be exceeded{}: the maximum is {capacity} {unit}; write less, for example {}",
                self.on_the_node(),
                suggestion(metric, capacity * 0.8)
            );
            self.error(Reason::ThresholdTooHigh, "metricRule.value", message);
        }
        RuleVerdict::On
    }

    /// Where the size of the node is not known, less than the usage of an idle node is suspect.
    fn threshold_of_any_node(&mut self) {
        let (threshold, metric) = (self.rule.threshold, &self.rule.metric);
        let (range, example) = match metric {
            Metric::CpuUsage => (100.0..256_000.0, "4000"),
            Metric::MemoryUsage => (100.0 * MEBIBYTE..512.0 * GIBIBYTE, "6Gi"),
            _ => return,
        };
        if threshold >= range.start {
            return;
        }
        let fix = guess(metric, threshold, range);
        let message = format!(
            "{} is less than an idle node uses, so it is probably a mistake; {}",
            self.threshold_as_written(),
            fix.unwrap_or_else(|| format!("write for example {example}"))
        );
        self.warning(Reason::ThresholdTooLow, "metricRule.value", message);
    }

    /// `85 millicores`, or `6m (0.006 millicores)`.
    fn threshold_as_written(&self) -> String {
        let (threshold, unit) = (self.rule.threshold, self.rule.metric.unit());
        match self.value {
            RawQuantity::Text(text) if *text != threshold.to_string() => {
                format!("{text} ({threshold} {unit})")
            }
            _ => format!("{threshold} {unit}"),
        }
    }

    /// ` on a node with 4 CPUs`, where the capacity of the node decides.
    fn on_the_node(&self) -> String {
        match self.rule.metric {
            Metric::CpuUsage => format!(" on a node with {} CPUs", self.scope.node.cpus),
            Metric::MemoryUsage => format!(" on a node with {}", self.scope.node.memory),
            _ => String::new(),
        }
    }

    /// With a `restoreValue` near 0 the rule would never end.
    fn restore_value(&mut self) -> RuleVerdict {
        let (low, metric) = (self.rule.restore_value, &self.rule.metric);
        let min = capacity(metric, self.scope).map_or(0.0, |capacity| capacity / 100.0);
        let given = low < self.rule.threshold;
        if given && is_usage(metric) && (low == 0.0 || low < min) {
            let suggested = self.rule.threshold * 0.8;
            let fix = if suggested > min {
                format!(
                    "write for example {}, or leave",
                    suggestion(metric, suggested)
                )
            } else {
                "leave".to_owned()
            };
            let message = format!(
                "the value never falls to {low} {}, so the rule would never end and is off; {fix} restoreValue out",
                metric.unit(),
            );
            self.error(Reason::RestoreNeverReached, "restoreValue", message);
            return RuleVerdict::Off;
        }
        RuleVerdict::On
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
        let path = format!("{}.{}", self.path, self.action_field());
        let problem = format!(
            "no valid PodQOS allows the action \"{}\" on any pod, so the rule can act on no pod",
            action.name
        );
        let rejected = self.scope.objects.rejected(Kind::PodQos);
        let rejected: Vec<&str> = rejected.into_iter().collect();
        if !rejected.is_empty() {
            let fix = format!("correct the invalid PodQOS {}", list(rejected.iter()));
            let message = format!("{problem}; {fix}");
            self.findings
                .following(Reason::ActionNotAllowed, path, message);
        } else if let Some(entry) = self.misspelt_entry() {
            let message = format!("{problem}; correct {} in allowedActions", quoted(entry));
            self.findings
                .following(Reason::ActionNotAllowed, path, message);
        } else {
            let message = format!("{problem}; add one with allowedActions: [{}]", action.name);
            self.findings.error(Reason::ActionNotAllowed, path, message);
        }
    }

    /// An allowed action that does not exist, and probably means this rule's action.
    fn misspelt_entry(&self) -> Option<&str> {
        let scope = self.scope;
        let mut entries = scope.pods.iter().flat_map(|policy| &policy.allowed);
        let words = Allowed::WORDS.map(|(word, _)| word);
        let known = || scope.actions.keys().copied().chain(words);
        let kinds = kinds(&self.rule.action);
        let means_it = |entry: &&String| {
            !known().any(|known| known == entry.as_str())
                && nearest(entry, known()).is_some_and(|meant| {
                    let meant = Allowed::of(meant);
                    let mut kinds = kinds.iter();
                    kinds.any(|kind| meant.permits(&self.rule.action.name, *kind))
                })
        };
        entries.find(means_it).map(String::as_str)
    }
}

/// The types of action on pods that an action includes.
fn kinds(action: &Action) -> Vec<ActionKind> {
    let kinds = [
        (ActionKind::CpuThrottle, action.throttle.is_some()),
        (ActionKind::ForceGc, action.force_gc),
        (ActionKind::Eviction, action.eviction.is_some()),
    ];
    let included = kinds.into_iter().filter(|(_, included)| *included);
    included.map(|(kind, _)| kind).collect()
}

/// What to write so that an action on pods helps.
fn instead(metric: &Metric, kind: ActionKind) -> String {
    let direct = metric.pressure().map(|kind| match kind {
        PressureKind::Cpu => Protected::CpuDelayMax,
        PressureKind::Memory => Protected::MemoryStallMax,
        PressureKind::Io => Protected::IoStallMax,
    });
    let evicts = metric.action_effect(ActionKind::Eviction) != ActionEffect::None;
    let text = match (metric, direct) {
        (Metric::Protected(_), _) | (_, None) if evicts => {
            if kind == ActionKind::ForceGc && metric.resource() == Some(Resource::Memory) {
                "write protected_memory_stall_max, since page cache that can be reclaimed counts as free, or name an \
                 action with eviction"
            } else if metric.action_effect(ActionKind::CpuThrottle) == ActionEffect::None {
                "name an action with eviction"
            } else {
                "name an action with cpuThrottle or eviction"
            }
        }
        (Metric::Window(..), _) => {
            "no action lowers a past peak; name an action with disableScheduling"
        }
        (Metric::Custom(_), _) => {
            "of windows only averages follow an action, of metrics that it lowers; name an action with disableScheduling"
        }
        (_, Some(direct)) => {
            let direct = Metric::Protected(direct);
            return format!(
                "write \"{direct}\", which measures only what protected pods wait (cgroup v2), or name an action with \
                 disableScheduling"
            );
        }
        _ => "name an action with disableScheduling",
    };
    text.to_owned()
}

const fn describe(kind: ActionKind) -> &'static str {
    match kind {
        ActionKind::CpuThrottle => "throttling CPU",
        ActionKind::ForceGc => "reclaiming page cache",
        ActionKind::Eviction => "evicting",
    }
}

/// Whether a metric measures the usage of the node.
fn is_usage(metric: &Metric) -> bool {
    match metric {
        Metric::CpuUsage
        | Metric::CpuUtilization
        | Metric::MemoryUsage
        | Metric::MemoryUtilization
        | Metric::Window(..) => true,
        // A deviation may be small.
        Metric::Custom(custom) if !matches!(custom.statistic, Statistic::Deviation(_)) => {
            custom.source.resource().is_some()
        }
        _ => false,
    }
}

fn has_one_series(metric: &Metric) -> bool {
    is_usage(metric)
        || matches!(
            metric,
            Metric::Load(_)
                | Metric::Pressure { .. }
                | Metric::Protected(_)
                | Metric::Custom(_)
                | Metric::ElasticCpuRequested
        )
}

/// The maximum of a metric; `None` where it has none, or it is not known.
fn capacity(metric: &Metric, scope: &Scope<'_>) -> Option<f64> {
    let known = |amount: f64| (amount > 0.0).then_some(amount);
    match metric {
        Metric::CpuUsage => known(f64::from(scope.node.cpus) * 1000.0),
        Metric::MemoryUsage => known(scope.node.memory.0 as f64),
        Metric::CpuUtilization
        | Metric::MemoryUtilization
        | Metric::Pressure { .. }
        | Metric::PodStall(_)
        | Metric::Protected(_)
        | Metric::Window(..)
        | Metric::Disk(DiskRate::Utilization)
        | Metric::ThrottledRatio => Some(100.0),
        Metric::Custom(custom) if custom.unit() == "percent" => Some(100.0),
        _ => None,
    }
}

const GIBIBYTE: f64 = 1_073_741_824.0;
const MEBIBYTE: f64 = 1_048_576.0;
/// The units in which people write amounts of memory.
const BINARY: [(f64, &str); 2] = [(GIBIBYTE, "Gi"), (MEBIBYTE, "Mi")];

/// A suggestion with the same number in another unit, if it is within the range.
fn guess(metric: &Metric, threshold: f64, range: Range<f64>) -> Option<String> {
    let factors: &[(f64, &str)] = match metric {
        Metric::CpuUsage => &[(1000.0, "")],
        Metric::MemoryUsage => &BINARY,
        _ => &[(100.0, "")],
    };
    let is_meant = |(factor, _): &&(f64, &str)| range.contains(&(threshold * factor));
    let same_number = factors.iter().find(is_meant).map(|(factor, suffix)| {
        let meant = (threshold * factor * 1e6).round() / 1e6;
        match *suffix {
            "" => written(meant),
            suffix => format!("{threshold}{suffix}"),
        }
    });
    let percentage = percentage(metric, threshold).into_iter();
    let meant: Vec<String> = percentage.chain(same_number).collect();
    (!meant.is_empty()).then(|| format!("did you mean {}?", meant.join(", or ")))
}

/// A number that is more likely a percentage than a number of CPUs or bytes.
fn percentage(metric: &Metric, threshold: f64) -> Option<String> {
    const LIKELY: RangeInclusive<f64> = 10.0..=99.0;
    let utilization = match metric {
        Metric::CpuUsage => Metric::CpuUtilization,
        Metric::MemoryUsage => Metric::MemoryUtilization,
        _ => return None,
    };
    let percentage = format!("{threshold} % (name: {utilization})");
    LIKELY.contains(&threshold).then_some(percentage)
}

/// A value of at most `max` as it is written in a manifest, with two significant digits.
fn suggestion(metric: &Metric, max: f64) -> String {
    let suffixes: &[(f64, &str)] = match metric {
        Metric::MemoryUsage => &BINARY,
        _ => &[],
    };
    let suffix = suffixes.iter().find(|(unit, _)| max >= *unit);
    let (unit, suffix) = suffix.copied().unwrap_or((1.0, ""));
    let number = two_digits(max / unit);
    if suffix.is_empty() {
        return written(number);
    }
    format!("{number}{suffix}")
}

/// An API server rejects a bare number with a fraction.
fn written(number: f64) -> String {
    if number.fract() == 0.0 {
        number.to_string()
    } else {
        format!("\"{number}\"")
    }
}

/// Rounded down to two significant digits. The tolerance is for products such as 0.8 * 0.7, which is just below 0.56.
fn two_digits(number: f64) -> f64 {
    const TOLERANCE: f64 = 1e-9;
    let [mut up, mut down] = [1.0, 1.0];
    while number * up < 10.0 && up < 1e9 {
        up *= 10.0;
    }
    while number / down >= 100.0 {
        down *= 10.0;
    }
    (number * up / down + TOLERANCE).floor() * down / up
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suggestion_has_two_digits_and_a_unit() {
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
        for (metric, max, written) in cases {
            assert_eq!(suggestion(&metric, max), written, "{max}");
        }
    }

    #[test]
    fn a_guess_is_the_same_number_in_another_unit() {
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
        for (metric, threshold, capacity, expected) in cases {
            let guess = guess(&metric, threshold, capacity / 100.0..capacity);
            assert_eq!(guess.as_deref(), expected);
        }
    }
}
