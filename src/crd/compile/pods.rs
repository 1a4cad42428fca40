//! Compiles a `PodQOS`: which pods it selects, and which actions it allows on them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::finding::Reason;
use super::super::objects::{Kind, Objects};
use super::super::pod_qos::{PodQosSpec, ScopeExpression};
use super::super::resource_qos::ResourceQos;
use super::super::words::nearest;
use super::{Findings, ObjectFindings};
use crate::engine::pod::QosClass;
use crate::engine::policy::{Action, Allowed, Membership, PodPolicy, ScopeRequirement, Standing};

/// Every `PodQOS`, in order of name.
pub(super) fn compile_all(
    objects: &Objects,
    actions: &BTreeMap<&str, Arc<Action>>,
    findings: &mut Findings,
) -> Vec<PodPolicy> {
    let compile = |(name, spec): (&String, &PodQosSpec)| {
        let mut policy = compile(name, spec);
        policy.standing.preview = policy.standing.acts() && objects.previews(name);
        let mut findings = findings.for_object(Kind::PodQos, name);
        report(spec, &policy, &mut findings);
        report_allowed(spec, objects, actions, &mut findings);
        policy
    };
    objects.pods.iter().map(compile).collect()
}

fn compile(name: &str, spec: &PodQosSpec) -> PodPolicy {
    let scopes = spec.scope_selector.as_ref();
    let mut allowed: Vec<String> = spec
        .allowed_actions
        .iter()
        .map(|entry| entry.to_lowercase())
        .collect();
    allowed.sort();
    allowed.dedup();
    PodPolicy {
        name: name.to_owned(),
        labels: spec
            .label_selector
            .as_ref()
            .map(super::super::LabelSelector::compile),
        scopes: scopes.map_or_else(Vec::new, |scopes| {
            scopes.match_expressions.iter().map(scope).collect()
        }),
        allowed,
        standing: Standing {
            idle: spec.resource_qos.as_ref().is_some_and(ResourceQos::is_idle),
            burst: spec.resource_qos.iter().map(ResourceQos::burst).sum(),
            preview: false,
        },
    }
}

fn scope(expression: &ScopeExpression) -> ScopeRequirement {
    let ScopeExpression {
        scope_name,
        operator,
        values,
    } = expression;
    match scope_name.as_str() {
        "QOSClass" => ScopeRequirement::Qos(membership(operator, values, class)),
        "Priority" => ScopeRequirement::Priority(membership(operator, values, range)),
        _ => ScopeRequirement::Namespace(membership(operator, values, |value| {
            Some(value.to_owned())
        })),
    }
}

/// Values that cannot be parsed are skipped: validation has already rejected them.
fn membership<T>(
    operator: &str,
    values: &[String],
    parse: impl Fn(&str) -> Option<T>,
) -> Membership<T> {
    let parsed = || values.iter().filter_map(|value| parse(value)).collect();
    match operator {
        "In" => Membership::In(parsed()),
        "NotIn" => Membership::NotIn(parsed()),
        "Exists" => Membership::Exists,
        _ => Membership::DoesNotExist,
    }
}

fn class(value: &str) -> Option<QosClass> {
    match value {
        "BestEffort" => Some(QosClass::BestEffort),
        "Burstable" => Some(QosClass::Burstable),
        "Guaranteed" => Some(QosClass::Guaranteed),
        _ => None,
    }
}

/// `N` or `A-B`; either may be negative. Numbers beyond 32 bits are clamped.
fn range(value: &str) -> Option<(i32, i32)> {
    let sign = usize::from(value.starts_with('-'));
    let digits = value[sign..].find('-').map(|dash| dash + sign);
    let (low, high) = digits.map_or((value, value), |dash| (&value[..dash], &value[dash + 1..]));
    Some((bound(low)?, bound(high)?))
}

fn bound(value: &str) -> Option<i32> {
    let number: i64 = value.parse().ok()?;
    let clamped = number.clamp(i64::from(i32::MIN), i64::from(i32::MAX));
    i32::try_from(clamped).ok()
}

fn report(spec: &PodQosSpec, policy: &PodPolicy, findings: &mut ObjectFindings<'_>) {
    let resources = spec.resource_qos.iter().flat_map(ResourceQos::unenforced);
    findings.not_enforced(resources.map(|field| format!("resourceQOS.{field}")));
    let probe = spec.pod_quality_probe.as_ref();
    findings.not_enforced(probe.map(|_| "podQualityProbe"));
    if !selects(policy) {
        findings.error(
            Reason::SelectsNothing,
            "spec",
            "has neither labelSelector nor an expression in scopeSelector, so it matches no pod; write for \
             example labelSelector: {matchLabels: {app: batch}}, or labelSelector: {} for every pod",
        );
    }
    if policy.allowed.is_empty() && !policy.standing.acts() {
        findings.error(
            Reason::AllowsNothing,
            "spec.allowedActions",
            "allowedActions is empty, so no action is allowed on these pods; write for example \
             allowedActions: [throttle]",
        );
    }
    report_system_pods(spec, findings);
}

/// Whether the policy can match any pod.
pub(super) fn selects(policy: &PodPolicy) -> bool {
    policy.labels.is_some() || !policy.scopes.is_empty()
}

fn report_system_pods(spec: &PodQosSpec, findings: &mut ObjectFindings<'_>) {
    let Some(scopes) = &spec.scope_selector else {
        return;
    };
    for (index, scope) in scopes.match_expressions.iter().enumerate() {
        let named = scope.values.iter().any(|value| value == "kube-system");
        if scope.scope_name == "Namespace" && scope.operator == "In" && named {
            findings.warning(
                Reason::SystemPods,
                format!("spec.scopeSelector.matchExpressions[{index}].values"),
                "names kube-system, so actions are allowed on pods that the cluster itself needs; remove kube-system \
                 unless this is intended",
            );
        }
    }
}

fn report_allowed(
    spec: &PodQosSpec,
    objects: &Objects,
    actions: &BTreeMap<&str, Arc<Action>>,
    findings: &mut ObjectFindings<'_>,
) {
    for (index, entry) in spec.allowed_actions.iter().enumerate() {
        let path = format!("spec.allowedActions[{index}]");
        let lower = entry.to_lowercase();
        let action = actions.get(lower.as_str());
        match (Allowed::of(&lower), action) {
            (allowed, Some(action)) if does_more(action, allowed) => findings.warning(
                Reason::AmbiguousAction,
                path,
                format!(
                    "\"{entry}\" allows only that type of action, and the AvoidanceAction named {lower} does more; \
                     give the AvoidanceAction another name and allow that name too"
                ),
            ),
            // A name of a rejected action is correct.
            (Allowed::Action(name), None) if !objects.is_rejected(Kind::AvoidanceAction, name) => {
                let words = Allowed::WORDS.map(|(word, _)| word);
                let known = actions.keys().copied().chain(words);
                let fix = nearest(name, known).map_or_else(
                    || {
                        let names = list(actions.keys());
                        format!("write one of {names}, or one of the keywords {}", words.join(", "))
                    },
                    |near| format!("did you mean {near}?"),
                );
                let message = format!("there is no AvoidanceAction named \"{entry}\"; {fix}");
                findings.warning(Reason::AllowsUnknownAction, path, message);
            }
            _ => {}
        }
    }
}

/// Whether the action does more than the keyword allows.
fn does_more(action: &Action, allowed: Allowed<'_>) -> bool {
    let throttles = action.throttle.is_some() || action.force_gc;
    match allowed {
        Allowed::Throttle => action.eviction.is_some(),
        Allowed::Eviction => throttles,
        Allowed::Scheduling => throttles || action.eviction.is_some(),
        Allowed::Action(_) => false,
    }
}

/// `a, b, c`, at most ten.
pub(super) fn list<'a>(names: impl ExactSizeIterator<Item = &'a &'a str>) -> String {
    if names.len() == 0 {
        return "the AvoidanceActions that you create".to_owned();
    }
    let names: Vec<&str> = names.take(10).copied().collect();
    names.join(", ")
}
