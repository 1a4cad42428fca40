//! Converts compiled policies to the spec of a `NodeWatermark`. Every compiled policy can be converted.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::{
    NodeWatermarkSpec, Part, WatermarkAction, WatermarkEviction, WatermarkHeader,
    WatermarkPodPolicy, WatermarkProbe, WatermarkRequirement, WatermarkRule, WatermarkStanding,
    WatermarkThrottle, WatermarkWindow,
};
use crate::engine::metric::{CustomMetric, Metric};
use crate::engine::policy::{
    Action, CpuThrottle, EvictionSpec, Membership, PodPolicy, PolicySet, Probe, Rule,
    ScopeRequirement, Standing, TaintEffect,
};
use crate::engine::selector::{Requirement, Selector};

impl NodeWatermarkSpec {
    /// The spec with these policies for one node, including its hash. Durations are in whole seconds, as in compiled policies.
    pub fn new(
        node_uid: &str,
        policy: &PolicySet,
        soften_scheduling: bool,
        sources: Vec<String>,
    ) -> Self {
        let actions = Actions::of(&policy.rules);
        let rules = policy.rules.iter().map(|rule| WatermarkRule {
            action: actions.id(&rule.action),
            ..WatermarkRule::from(rule)
        });
        let pods = policy.pods.iter().map(WatermarkPodPolicy::from);
        let mut spec = Self {
            node_uid: node_uid.to_owned(),
            rules: rules.map(Part::Known).collect(),
            actions: actions.parts().map(Part::Known).collect(),
            pod_policies: pods.map(Part::Known).collect(),
            soften_scheduling,
            sources,
            ..Self::default()
        };
        spec.hash = spec.content_hash().to_string();
        spec
    }

    /// The same for an agent that does not read the quantities of rules, and refuses rules that have them.
    #[must_use]
    pub fn for_old_agent(mut self) -> Self {
        for rule in &mut self.rules {
            if let Part::Known(rule) = rule {
                (rule.value, rule.restore_value) = (None, None);
            }
        }
        self.hash = self.content_hash().to_string();
        self
    }
}

/// The distinct actions of a set of rules by name; usually one per name.
struct Actions<'a>(BTreeMap<&'a str, Vec<&'a Action>>);

impl<'a> Actions<'a> {
    fn of(rules: &'a [Rule]) -> Self {
        let mut actions: BTreeMap<&str, Vec<&Action>> = BTreeMap::new();
        for rule in rules {
            let same_name = actions.entry(&rule.action.name).or_default();
            if !same_name.contains(&&*rule.action) {
                same_name.push(&rule.action);
            }
        }
        Self(actions)
    }

    fn id(&self, action: &Action) -> String {
        let same_name = self.0.get(action.name.as_str());
        let index = same_name.and_then(|all| all.iter().position(|other| *other == action));
        id(&action.name, index.unwrap_or(0))
    }

    fn parts(&self) -> impl Iterator<Item = WatermarkAction> {
        self.0.iter().flat_map(|(name, actions)| {
            actions
                .iter()
                .enumerate()
                .map(|(index, action)| WatermarkAction {
                    id: (index > 0).then(|| id(name, index)),
                    ..WatermarkAction::from(*action)
                })
        })
    }
}

/// `throttle`, `throttle#2`, ...: names of objects cannot contain a `#`.
fn id(name: &str, index: usize) -> String {
    match index {
        0 => name.to_owned(),
        _ => format!("{name}#{}", index + 1),
    }
}

fn seconds(duration: Duration) -> i64 {
    let whole = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    i64::try_from(whole.max(1)).unwrap_or(i64::MAX)
}

impl From<&Rule> for WatermarkRule {
    fn from(rule: &Rule) -> Self {
        let restore = (rule.restore_value < rule.threshold).then_some(rule.restore_value);
        Self {
            id: rule.id.to_string(),
            metric: rule.metric.to_string(),
            from_probe: matches!(rule.metric, Metric::Probe(_)),
            window: match &rule.metric {
                Metric::Custom(custom) => Some(window(custom)),
                _ => None,
            },
            series: rule.series.as_ref().map(selector),
            value: Some(rule.threshold.to_string()),
            restore_value: restore.map(|restore| restore.to_string()),
            watermark: Some(rule.threshold),
            restore,
            avoidance_threshold: i64::from(rule.avoidance_threshold),
            restore_threshold: i64::from(rule.restore_threshold),
            sample_ttl_seconds: seconds(rule.sample_ttl),
            probe: rule.probe.as_ref().map(probe),
            action: rule.action.name.clone(),
            strategy: rule.strategy.name().to_owned(),
            active_during: rule.active_during.iter().map(ToString::to_string).collect(),
        }
    }
}

fn window(custom: &CustomMetric) -> WatermarkWindow {
    WatermarkWindow {
        source: custom.source.to_string(),
        statistic: custom.statistic.to_string(),
    }
}

fn probe(probe: &Probe) -> WatermarkProbe {
    let header = |(name, value): &(String, String)| WatermarkHeader {
        name: name.clone(),
        value: value.clone(),
    };
    WatermarkProbe {
        url: probe.url.to_string(),
        headers: probe.headers.iter().map(header).collect(),
        timeout_seconds: seconds(probe.timeout),
    }
}

impl From<&Action> for WatermarkAction {
    fn from(action: &Action) -> Self {
        let effect = action.scheduling.map(TaintEffect::name);
        Self {
            id: None,
            name: action.name.clone(),
            cool_down_seconds: seconds(action.cool_down),
            disable_scheduling: effect.map(str::to_owned),
            cpu_throttle: action.throttle.map(throttle),
            force_gc: action.force_gc,
            eviction: action.eviction.as_ref().map(eviction),
        }
    }
}

fn throttle(throttle: CpuThrottle) -> WatermarkThrottle {
    WatermarkThrottle {
        min_cpu_ratio: i64::from(throttle.min_ratio),
        step_cpu_ratio: i64::from(throttle.step),
        idle: throttle.idle,
    }
}

fn eviction(eviction: &EvictionSpec) -> WatermarkEviction {
    WatermarkEviction {
        grace_seconds: eviction.grace.map(seconds),
        max_pods_per_round: i64::from(eviction.max_pods_per_round),
        evict_unowned: eviction.evict_unowned,
    }
}

impl From<&PodPolicy> for WatermarkPodPolicy {
    fn from(policy: &PodPolicy) -> Self {
        Self {
            name: policy.name.clone(),
            labels: policy.labels.as_ref().map(selector),
            scopes: policy.scopes.iter().map(scope).collect(),
            allowed: policy.allowed.clone(),
            standing: (policy.standing != Standing::default()).then_some(WatermarkStanding {
                idle: policy.standing.idle,
                burst_millicores: i64::try_from(policy.standing.burst.0).unwrap_or(i64::MAX),
                preview: policy.standing.preview,
            }),
        }
    }
}

fn selector(selector: &Selector) -> Vec<WatermarkRequirement> {
    selector.requirements.iter().map(requirement).collect()
}

fn requirement(requirement: &Requirement) -> WatermarkRequirement {
    let (operator, values) = match requirement {
        Requirement::In(_, values) => ("In", values.clone()),
        Requirement::NotIn(_, values) => ("NotIn", values.clone()),
        Requirement::Exists(_) => ("Exists", Vec::new()),
        Requirement::DoesNotExist(_) => ("DoesNotExist", Vec::new()),
    };
    WatermarkRequirement {
        key: requirement.key().to_owned(),
        operator: operator.to_owned(),
        values,
    }
}

fn scope(scope: &ScopeRequirement) -> WatermarkRequirement {
    match scope {
        ScopeRequirement::Qos(classes) => membership("QOSClass", classes, ToString::to_string),
        ScopeRequirement::Priority(ranges) => {
            membership("Priority", ranges, |(low, high)| format!("{low}..{high}"))
        }
        ScopeRequirement::Namespace(names) => membership("Namespace", names, Clone::clone),
    }
}

fn membership<T>(
    key: &str,
    membership: &Membership<T>,
    print: impl Fn(&T) -> String,
) -> WatermarkRequirement {
    let (operator, values): (_, &[T]) = match membership {
        Membership::In(values) => ("In", values),
        Membership::NotIn(values) => ("NotIn", values),
        Membership::Exists => ("Exists", &[]),
        Membership::DoesNotExist => ("DoesNotExist", &[]),
    };
    WatermarkRequirement {
        key: key.to_owned(),
        operator: operator.to_owned(),
        values: values.iter().map(print).collect(),
    }
}
