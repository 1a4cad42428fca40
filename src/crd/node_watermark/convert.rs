//! Converts between the compiled policies of the engine and the spec of a `NodeWatermark`.

mod from_policy;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use super::{
    NodeWatermarkSpec, Part, WatermarkAction, WatermarkEviction, WatermarkPodPolicy,
    WatermarkProbe, WatermarkRequirement, WatermarkRule, WatermarkStanding, WatermarkThrottle,
    WatermarkWindow,
};
use crate::engine::metric::{CustomMetric, Metric};
use crate::engine::pod::QosClass;
use crate::engine::policy::{
    Action, CpuThrottle, EvictionSpec, Membership, PodPolicy, PolicySet, Probe, Rule, RuleId,
    ScopeRequirement, Standing, Strategy, TaintEffect,
};
use crate::engine::quantity::Quantity;
use crate::engine::selector::{Requirement, Selector};
use crate::engine::units::MilliCpu;
use crate::engine::window::Statistic;

/// The part of a spec that this version can enforce.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ParsedSpec {
    /// The rules and pod policies that this version fully supports. Leaving out the others is safe: rules are independent, and
    /// a pod policy only allows actions.
    pub policy: PolicySet,
    /// The other rules and pod policies.
    pub refused: Vec<UnenforcedEntry>,
}

/// A rule or pod policy that is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnenforcedEntry {
    /// `rule` or `podPolicy`.
    pub what: &'static str,
    /// Its id or name; its index if it has none.
    pub name: String,
    /// The reason.
    pub why: SpecError,
}

impl fmt::Display for UnenforcedEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.what, self.name, self.why)
    }
}

/// Why a spec or a part of it is not enforced.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SpecError {
    /// The spec has an unknown field, which may affect every rule.
    #[error("spec.{0} is not known to this version of plimsoll")]
    UnknownField(String),
    /// A field is missing, has the wrong type, or is unknown.
    #[error("{0}")]
    Shape(String),
    /// A value that this version does not know.
    #[error("{field} \"{value}\" is not known to this version of plimsoll")]
    UnknownValue {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
    },
    /// A number is out of range.
    #[error("{field} {value} is out of range")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// The value.
        value: String,
    },
    /// The action of the rule is invalid.
    #[error("action {name}: {why}")]
    Action {
        /// Its name.
        name: String,
        /// Why.
        why: Box<Self>,
    },
    /// The rule names an action that does not exist.
    #[error("action {0} does not exist")]
    NoSuchAction(String),
    /// Two rules have the same id, or two actions or pod policies the same name.
    #[error("is given more than once")]
    Duplicate,
}

impl NodeWatermarkSpec {
    /// Parses the spec; the result is sorted.
    ///
    /// # Errors
    /// The spec has a field that this version does not know.
    pub fn read(&self) -> Result<ParsedSpec, SpecError> {
        if let Some(field) = self.other.keys().next() {
            return Err(SpecError::UnknownField(field.clone()));
        }
        let mut parsed = ParsedSpec::default();
        let actions = self.actions();
        for (index, part) in self.rules.iter().enumerate() {
            match shape(part).and_then(|rule| to_rule(&rule, &actions)) {
                Ok(rule) => parsed.policy.rules.push(rule),
                Err(why) => parsed.refuse("rule", name_of(part, "id", index), why),
            }
        }
        for (index, part) in self.pod_policies.iter().enumerate() {
            match shape(part).and_then(|policy| to_pod_policy(&policy)) {
                Ok(policy) => parsed.policy.pods.push(policy),
                Err(why) => parsed.refuse("podPolicy", name_of(part, "name", index), why),
            }
        }
        parsed.sort();
        Ok(parsed)
    }
}

/// The actions by id, or why they are invalid.
type Actions = BTreeMap<String, Result<Arc<Action>, SpecError>>;

impl NodeWatermarkSpec {
    fn actions(&self) -> Actions {
        let mut actions = Actions::new();
        for (index, part) in self.actions.iter().enumerate() {
            let action = shape(part).and_then(|action| to_action(&action, self.soften_scheduling));
            let id = name_of(part, "name", index);
            let id = match part {
                Part::Known(action) => action.id.clone().unwrap_or(id),
                Part::Other(_) => id,
            };
            match actions.entry(id) {
                Entry::Vacant(entry) => drop(entry.insert(action.map(Arc::new))),
                Entry::Occupied(mut entry) => drop(entry.insert(Err(SpecError::Duplicate))),
            }
        }
        actions
    }
}

impl ParsedSpec {
    fn refuse(&mut self, what: &'static str, name: String, why: SpecError) {
        self.refused.push(UnenforcedEntry { what, name, why });
    }

    /// Sorts, and refuses all rules with the same id: it is not clear which one is meant.
    fn sort(&mut self) {
        let PolicySet { rules, pods } = &mut self.policy;
        rules.sort_by(|a, b| a.id.cmp(&b.id));
        pods.sort_by(|a, b| a.name.cmp(&b.name));
        let duplicates = repeated(rules.iter().map(|rule| rule.id.to_string()));
        rules.retain(|rule| !duplicates.contains(&rule.id.to_string()));
        for name in duplicates {
            self.refuse("rule", name, SpecError::Duplicate);
        }
        let pods = &mut self.policy.pods;
        let duplicates = repeated(pods.iter().map(|policy| policy.name.clone()));
        pods.retain(|policy| !duplicates.contains(&policy.name));
        for name in duplicates {
            self.refuse("podPolicy", name, SpecError::Duplicate);
        }
    }
}

/// The names that occur more than once in a sorted list.
fn repeated(names: impl Iterator<Item = String>) -> Vec<String> {
    let names: Vec<String> = names.collect();
    let mut duplicates: Vec<String> = names
        .windows(2)
        .filter(|pair| pair[0] == pair[1])
        .map(|pair| pair[0].clone())
        .collect();
    duplicates.dedup();
    duplicates
}

fn shape<T: Clone + serde::de::DeserializeOwned>(part: &Part<T>) -> Result<T, SpecError> {
    part.known()
        .map(std::borrow::Cow::into_owned)
        .map_err(SpecError::Shape)
}

fn name_of<T: serde::Serialize>(part: &Part<T>, field: &str, index: usize) -> String {
    let value = serde_json::to_value(part).unwrap_or_default();
    let name = value[field].as_str().map(str::to_owned);
    name.unwrap_or_else(|| format!("[{index}]"))
}

fn unknown(field: &'static str, value: &str) -> SpecError {
    SpecError::UnknownValue {
        field,
        value: value.to_owned(),
    }
}

fn out_of_range(field: &'static str, value: impl fmt::Display) -> SpecError {
    SpecError::OutOfRange {
        field,
        value: value.to_string(),
    }
}

fn number<T: TryFrom<i64> + PartialOrd + Copy>(
    field: &'static str,
    value: i64,
    min: T,
) -> Result<T, SpecError> {
    match T::try_from(value) {
        Ok(number) if number >= min => Ok(number),
        _ => Err(out_of_range(field, value)),
    }
}

fn seconds(field: &'static str, value: i64) -> Result<Duration, SpecError> {
    number::<u64>(field, value, 1).map(Duration::from_secs)
}

fn to_rule(rule: &WatermarkRule, actions: &Actions) -> Result<Rule, SpecError> {
    let (threshold, restore) = to_threshold(rule)?;
    Ok(Rule {
        id: RuleId::from(rule.id.as_str()),
        metric: to_metric(rule)?,
        series: rule.series.as_deref().map(to_selector).transpose()?,
        threshold,
        restore_value: restore,
        avoidance_threshold: number("avoidanceThreshold", rule.avoidance_threshold, 1)?,
        restore_threshold: number("restoreThreshold", rule.restore_threshold, 1)?,
        sample_ttl: seconds("sampleTTLSeconds", rule.sample_ttl_seconds)?,
        probe: rule.probe.as_ref().map(to_probe).transpose()?,
        action: find_action(&rule.action, actions)?,
        strategy: Strategy::from_name(&rule.strategy)
            .ok_or_else(|| unknown("strategy", &rule.strategy))?,
        active_during: rule
            .active_during
            .iter()
            .map(|hours| hours.parse().map_err(|_| unknown("activeDuring", hours)))
            .collect::<Result<_, _>>()?,
    })
}

/// The threshold and the value to restore at: the quantities, else the floating-point numbers of an older controller.
fn to_threshold(rule: &WatermarkRule) -> Result<(f64, f64), SpecError> {
    let (field, threshold) = match (&rule.value, rule.watermark) {
        (Some(value), _) => ("value", quantity("value", value)?),
        (None, Some(watermark)) => ("watermark", watermark),
        (None, None) => return Err(SpecError::Shape("missing field `value`".to_owned())),
    };
    let restore = match &rule.restore_value {
        Some(value) => quantity("restoreValue", value)?,
        None if rule.value.is_some() => threshold,
        None => rule.restore.unwrap_or(threshold),
    };
    if !(threshold.is_finite() && threshold > 0.0) {
        return Err(out_of_range(field, threshold));
    }
    if !(restore.is_finite() && (0.0..=threshold).contains(&restore)) {
        return Err(out_of_range("restoreValue", restore));
    }
    Ok((threshold, restore))
}

/// Decimal numbers, as this version writes them, are exact; any other quantity to 1 nano.
fn quantity(field: &'static str, text: &str) -> Result<f64, SpecError> {
    let decimal = text.parse::<f64>().ok();
    let number = decimal.or_else(|| Some(text.parse::<Quantity>().ok()?.as_f64()));
    number.ok_or_else(|| out_of_range(field, text))
}

fn find_action(name: &str, actions: &Actions) -> Result<Arc<Action>, SpecError> {
    match actions.get(name) {
        Some(Ok(action)) => Ok(Arc::clone(action)),
        Some(Err(why)) => Err(SpecError::Action {
            name: name.to_owned(),
            why: Box::new(why.clone()),
        }),
        None => Err(SpecError::NoSuchAction(name.to_owned())),
    }
}

fn to_metric(rule: &WatermarkRule) -> Result<Metric, SpecError> {
    if rule.from_probe {
        return Ok(Metric::Probe(rule.metric.as_str().into()));
    }
    if let Some(WatermarkWindow { source, statistic }) = &rule.window {
        let known = Metric::parse(source);
        return Ok(Metric::Custom(Arc::new(CustomMetric {
            name: rule.metric.as_str().into(),
            source: known.unwrap_or_else(|| Metric::Probe(source.as_str().into())),
            statistic: Statistic::parse(statistic)
                .ok_or_else(|| unknown("window.statistic", statistic))?,
        })));
    }
    Metric::parse(&rule.metric).ok_or_else(|| unknown("metric", &rule.metric))
}

fn to_probe(probe: &WatermarkProbe) -> Result<Probe, SpecError> {
    let headers = probe.headers.iter();
    Ok(Probe {
        url: probe.url.as_str().into(),
        headers: headers
            .map(|header| (header.name.clone(), header.value.clone()))
            .collect(),
        timeout: seconds("probe.timeoutSeconds", probe.timeout_seconds)?,
    })
}

fn to_action(action: &WatermarkAction, prefer_no_schedule: bool) -> Result<Action, SpecError> {
    let effect = action.disable_scheduling.as_deref().map(to_effect);
    let effect = effect.transpose()?;
    Ok(Action {
        name: action.name.clone(),
        cool_down: seconds("coolDownSeconds", action.cool_down_seconds)?,
        scheduling: effect.map(|effect| {
            if prefer_no_schedule {
                TaintEffect::PreferNoSchedule
            } else {
                effect
            }
        }),
        throttle: action.cpu_throttle.as_ref().map(to_throttle).transpose()?,
        force_gc: action.force_gc,
        eviction: action.eviction.as_ref().map(to_eviction).transpose()?,
    })
}

fn to_effect(effect: &str) -> Result<TaintEffect, SpecError> {
    match effect {
        "NoSchedule" => Ok(TaintEffect::NoSchedule),
        "PreferNoSchedule" => Ok(TaintEffect::PreferNoSchedule),
        other => Err(unknown("disableScheduling", other)),
    }
}

fn to_throttle(throttle: &WatermarkThrottle) -> Result<CpuThrottle, SpecError> {
    let percent = |field, value, min| match number::<u8>(field, value, min)? {
        ratio @ ..=100 => Ok(ratio),
        ratio => Err(out_of_range(field, ratio)),
    };
    Ok(CpuThrottle {
        min_ratio: percent("cpuThrottle.minCPURatio", throttle.min_cpu_ratio, 0)?,
        step: percent("cpuThrottle.stepCPURatio", throttle.step_cpu_ratio, 1)?,
        idle: throttle.idle,
    })
}

fn to_eviction(eviction: &WatermarkEviction) -> Result<EvictionSpec, SpecError> {
    let grace = eviction.grace_seconds;
    let grace = grace.map(|grace| seconds("eviction.graceSeconds", grace));
    let pods = eviction.max_pods_per_round;
    Ok(EvictionSpec {
        grace: grace.transpose()?,
        max_pods_per_round: number("eviction.maxPodsPerRound", pods, 1)?,
        evict_unowned: eviction.evict_unowned,
    })
}

fn to_pod_policy(policy: &WatermarkPodPolicy) -> Result<PodPolicy, SpecError> {
    Ok(PodPolicy {
        name: policy.name.clone(),
        labels: policy.labels.as_deref().map(to_selector).transpose()?,
        scopes: policy
            .scopes
            .iter()
            .map(to_scope)
            .collect::<Result<_, _>>()?,
        allowed: policy.allowed.clone(),
        standing: policy
            .standing
            .as_ref()
            .map_or_else(|| Ok(Standing::default()), to_standing)?,
    })
}

fn to_standing(standing: &WatermarkStanding) -> Result<Standing, SpecError> {
    let burst = number("standing.burstMillicores", standing.burst_millicores, 0)?;
    Ok(Standing {
        idle: standing.idle,
        burst: MilliCpu(burst),
        preview: standing.preview,
    })
}

fn to_selector(requirements: &[WatermarkRequirement]) -> Result<Selector, SpecError> {
    let requirements = requirements.iter().map(to_requirement);
    requirements
        .collect::<Result<_, _>>()
        .map(|requirements| Selector { requirements })
}

fn to_requirement(requirement: &WatermarkRequirement) -> Result<Requirement, SpecError> {
    let key = requirement.key.clone();
    let values = || requirement.values.clone();
    match requirement.operator.as_str() {
        "In" => Ok(Requirement::In(key, values())),
        "NotIn" => Ok(Requirement::NotIn(key, values())),
        "Exists" => Ok(Requirement::Exists(key)),
        "DoesNotExist" => Ok(Requirement::DoesNotExist(key)),
        other => Err(unknown("operator", other)),
    }
}

fn to_scope(scope: &WatermarkRequirement) -> Result<ScopeRequirement, SpecError> {
    match scope.key.as_str() {
        "QOSClass" => to_membership(scope, class).map(ScopeRequirement::Qos),
        "Priority" => to_membership(scope, range).map(ScopeRequirement::Priority),
        "Namespace" => {
            to_membership(scope, |name| Some(name.to_owned())).map(ScopeRequirement::Namespace)
        }
        other => Err(unknown("scopes.key", other)),
    }
}

fn to_membership<T>(
    scope: &WatermarkRequirement,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Membership<T>, SpecError> {
    let parse = |value: &String| parse(value).ok_or_else(|| unknown("scopes.values", value));
    let values = || {
        let values = scope.values.iter().map(parse);
        values.collect::<Result<Vec<T>, _>>()
    };
    match scope.operator.as_str() {
        "In" => values().map(Membership::In),
        "NotIn" => values().map(Membership::NotIn),
        "Exists" => Ok(Membership::Exists),
        "DoesNotExist" => Ok(Membership::DoesNotExist),
        other => Err(unknown("scopes.operator", other)),
    }
}

fn class(value: &str) -> Option<QosClass> {
    [
        QosClass::BestEffort,
        QosClass::Burstable,
        QosClass::Guaranteed,
    ]
    .into_iter()
    .find(|class| class.to_string() == value)
}

/// `<low>..<high>`, as [`from_policy`] writes it.
fn range(value: &str) -> Option<(i32, i32)> {
    let (low, high) = value.split_once("..")?;
    Some((i32::from_str(low).ok()?, i32::from_str(high).ok()?))
}
