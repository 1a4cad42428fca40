//! Compiles the rules of a `NodeQOS`.

use std::sync::Arc;
use std::time::Duration;

use super::super::finding::Reason;
use super::super::node_qos::{HttpGet, MetricRule, NodeQosSpec, NodeRule};
use super::super::objects::{Kind, NodeRules};
use super::super::words::{self, quoted};
use super::action::seconds;
use super::rule_check::{RuleVerdict, check};
use super::{ObjectFindings, Scope};
use crate::engine::hours::{Hours, HoursError, time_zones};
use crate::engine::metric::Metric;
use crate::engine::policy::{Probe, Rule, RuleId, Strategy};
use crate::engine::quantity::{Quantity, RawQuantity};
use crate::engine::window::{CustomWindow, Statistic};

const LOCAL_CACHE_TTL_SECONDS: i64 = 60;
const PROBE_TIMEOUT_SECONDS: i64 = 10;
const THRESHOLD: i64 = 1;

/// The rules of one object that can have the effect they describe.
pub(super) fn compile_all(
    object: &str,
    rules: &NodeRules,
    scope: &Scope<'_>,
    findings: &mut ObjectFindings<'_>,
) -> Vec<Rule> {
    let probe = probe(&rules.spec);
    let context = RuleContext {
        object,
        spec: &rules.spec,
        probe: probe.as_ref(),
        scope,
    };
    let compile = |(index, rule): &(usize, NodeRule)| {
        let path = format!("spec.rules[{index}]");
        context.compile(rule, &path, findings)
    };
    rules.rules.iter().filter_map(compile).collect()
}

/// What the rules of one object share.
struct RuleContext<'a> {
    object: &'a str,
    spec: &'a NodeQosSpec,
    probe: Option<&'a Probe>,
    scope: &'a Scope<'a>,
}

impl RuleContext<'_> {
    fn compile(
        &self,
        rule: &NodeRule,
        path: &str,
        findings: &mut ObjectFindings<'_>,
    ) -> Option<Rule> {
        let Some(metric_rule) = &rule.metric_rule else {
            findings.error(
                Reason::Invalid,
                format!("{path}.metricRule"),
                "metricRule is missing",
            );
            return None;
        };
        let thresholds = Thresholds::of(rule, metric_rule, path, findings)?;
        let metric = self.metric(metric_rule, path, findings);
        let action = self.action(rule, path, findings);
        let active_during = active_during(rule, path, findings);
        let compiled = Rule {
            id: RuleId(format!("{}/{}", self.object, rule.name).into()),
            metric: metric?,
            series: metric_rule
                .selector
                .as_ref()
                .map(super::super::LabelSelector::compile),
            threshold: thresholds.value.as_f64(),
            restore_value: thresholds.restore_value.as_f64(),
            avoidance_threshold: threshold(rule.avoidance_threshold),
            restore_threshold: threshold(rule.restore_threshold.or(rule.restored_threshold)),
            sample_ttl: self.sample_ttl(),
            probe: self.probe.cloned(),
            action: action?,
            strategy: rule
                .strategy
                .as_deref()
                .and_then(Strategy::from_name)
                .unwrap_or(Strategy::Enforce),
            active_during: active_during?,
        };
        match check(&compiled, &metric_rule.value, self.scope, path, findings) {
            RuleVerdict::On => Some(compiled),
            RuleVerdict::Off => None,
        }
    }

    /// A name of both a metric of the node and a series of the probe means that of the node.
    fn metric(
        &self,
        rule: &MetricRule,
        path: &str,
        findings: &mut ObjectFindings<'_>,
    ) -> Option<Metric> {
        let name = rule.name.as_str();
        if let Some(known) = Metric::parse(name).or_else(|| self.window(name)) {
            return Some(known);
        }
        if self.probe.is_some() {
            return Some(Metric::Probe(name.into()));
        }
        let path = format!("{path}.metricRule.name");
        let windows = self.scope.node.windows.as_deref();
        let near = nearest(name, windows.unwrap_or_default());
        if windows.is_none() && Statistic::ends(name) {
            let message = format!(
                "\"{name}\" is not a metric of every node, so the rule is not checked; if the nodes' settings have such a window, \
                 name their file with --windows, else {near}"
            );
            findings.warning(Reason::UnknownMetric, path, message);
        } else {
            let window = if Statistic::ends(name) {
                "; or define it as a window of the nodes, with --windows"
            } else {
                ""
            };
            let message = format!(
                "\"{name}\" is not a known metric; {near} Or add nodeQualityProbe.httpGet to read it from an exporter{window}"
            );
            findings.error(Reason::UnknownMetric, path, message);
        }
        None
    }

    /// The window of that name in the node's settings.
    fn window(&self, name: &str) -> Option<Metric> {
        let mut windows = self
            .scope
            .node
            .windows
            .iter()
            .flat_map(|known| known.iter());
        let window = windows.find(|window| *window.metric.name == *name)?;
        Some(Metric::Custom(Arc::clone(&window.metric)))
    }

    fn action(
        &self,
        rule: &NodeRule,
        path: &str,
        findings: &mut ObjectFindings<'_>,
    ) -> Option<Arc<crate::engine::policy::Action>> {
        let named = rule.named_action();
        let action = self.scope.actions.get(named);
        if action.is_none() {
            let name = quoted(named);
            let path = format!("{path}.actionName");
            let rejected = self.scope.objects.rejected(Kind::AvoidanceAction);
            if rejected.contains(named) {
                let message = format!(
                    "the AvoidanceAction {name} is invalid, so the rule is off; correct the action"
                );
                findings.following(Reason::UnknownAction, path, message);
            } else {
                let actions = self.scope.actions.keys();
                let near = words::nearest(named, actions.clone().copied());
                let fix = near.map_or_else(
                    || format!("write the name of one of {}", super::pods::list(actions)),
                    |near| format!("did you mean {near}?"),
                );
                let message = format!("there is no AvoidanceAction named {name}; {fix}");
                findings.error(Reason::UnknownAction, path, message);
            }
        }
        action.cloned()
    }

    fn sample_ttl(&self) -> Duration {
        let probe = self.spec.node_quality_probe.as_ref();
        let local = probe.and_then(|probe| probe.node_local_get.as_ref());
        let given = local.and_then(|local| local.local_cache_ttl_seconds);
        seconds(given.unwrap_or(LOCAL_CACHE_TTL_SECONDS).max(1))
    }
}

/// The hours of a rule; `None` if an entry is invalid: without it the rule would be inactive when it is meant to act.
fn active_during(
    rule: &NodeRule,
    path: &str,
    findings: &mut ObjectFindings<'_>,
) -> Option<Vec<Hours>> {
    let mut parse = |(index, text): (usize, &String)| {
        let report = |error| {
            let path = format!("{path}.activeDuring[{index}]");
            findings.error(reason_of(&error), path, describe(&error));
        };
        text.parse().map_err(report).ok()
    };
    let hours: Vec<Option<Hours>> = rule
        .active_during
        .iter()
        .enumerate()
        .map(&mut parse)
        .collect();
    hours.into_iter().collect()
}

const fn reason_of(error: &HoursError) -> Reason {
    match error {
        HoursError::UnknownZone(_) => Reason::UnknownTimeZone,
        // Validation has already rejected it.
        HoursError::Form(_) | HoursError::Empty(_) => Reason::Invalid,
    }
}

fn describe(error: &HoursError) -> String {
    let HoursError::UnknownZone(zone) = error else {
        return error.to_string();
    };
    let zones = time_zones();
    let fix = words::nearest(zone, zones.iter().map(String::as_str)).map_or_else(
        || "write UTC, or a name of the IANA time zone database such as Europe/Berlin".to_owned(),
        |near| format!("did you mean {near}?"),
    );
    format!("{error}, so the rule is off; {fix}")
}

/// `metricRule.value`, and `restoreValue` or its default.
struct Thresholds {
    value: Quantity,
    restore_value: Quantity,
}

impl Thresholds {
    fn of(
        rule: &NodeRule,
        metric: &MetricRule,
        path: &str,
        findings: &mut ObjectFindings<'_>,
    ) -> Option<Self> {
        let value = quantity(&metric.value, &format!("{path}.metricRule.value"), findings)?;
        let restore = match &rule.restore_value {
            None => value,
            Some(restore) => quantity(restore, &format!("{path}.restoreValue"), findings)?,
        };
        Some(Self {
            value,
            restore_value: restore,
        })
    }
}

/// Fails only for a value that validation has already rejected.
fn quantity(
    value: &RawQuantity,
    path: &str,
    findings: &mut ObjectFindings<'_>,
) -> Option<Quantity> {
    value
        .parse()
        .map_err(|error| findings.error(Reason::Invalid, path, error.to_string()))
        .ok()
}

fn threshold(given: Option<i64>) -> u32 {
    u32::try_from(given.unwrap_or(THRESHOLD).max(1)).unwrap_or(u32::MAX)
}

fn probe(spec: &NodeQosSpec) -> Option<Probe> {
    let probe = spec.node_quality_probe.as_ref()?;
    http_probe(probe.http_get.as_ref()?, probe.timeout_seconds)
}

/// A probe with its default timeout.
pub(in crate::crd) fn http_probe(get: &HttpGet, timeout_seconds: Option<i64>) -> Option<Probe> {
    let timeout = match timeout_seconds {
        None | Some(..=0) => PROBE_TIMEOUT_SECONDS,
        Some(timeout) => timeout,
    };
    Some(Probe {
        url: url(get)?.into(),
        headers: get
            .http_headers
            .iter()
            .map(|header| (header.name.clone(), header.value.clone()))
            .collect(),
        timeout: seconds(timeout),
    })
}

fn url(get: &HttpGet) -> Option<String> {
    let port = get.port.parse().ok()?;
    // An empty host stands for the node itself: only its agent knows the address.
    let host = get.host.as_deref().unwrap_or_default();
    let path = get.path.as_deref().unwrap_or("/metrics");
    let scheme = match get.scheme.as_deref() {
        Some("HTTPS") => "https",
        _ => "http",
    };
    Some(if host.contains(':') {
        format!("{scheme}://[{host}]:{port}{path}")
    } else {
        format!("{scheme}://{host}:{port}{path}")
    })
}

/// `did you mean cpu_total_usage?`, or some of the names.
fn nearest(name: &str, windows: &[CustomWindow]) -> String {
    let names = Metric::names();
    let windows = windows.iter().map(|window| &*window.metric.name);
    let near = words::nearest(name, names.iter().map(String::as_str).chain(windows));
    match near.or_else(|| usage_of(name)) {
        Some(near) => format!("did you mean {near}?"),
        None => "write for example cpu_total_usage or memory_total_utilization.".to_owned(),
    }
}

/// The usage of a resource that is named only by its first letters.
fn usage_of(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase();
    let mut usages = ["cpu_total_usage", "memory_total_usage"].into_iter();
    usages.find(|usage| name.len() >= 3 && usage.starts_with(&name))
}
