//! What is valid and in force, and still not what protects best: for people who write policies, not for the conditions of objects.

use serde_json::Value;

use super::avoidance_action::{AvoidanceActionSpec, CpuThrottle};
use super::finding::{Finding, ObjectRef, Reason, Severity};
use super::node_qos::NodeRule;
use super::objects::{Kind, NodeRules, Objects};
use super::pod_qos::PodQosSpec;
use super::resource_qos::ResourceQos;
use crate::engine::policy::Strategy;

const STRATEGY_LEFT_OUT: &str = "strategy is left out, so the rule acts; write strategy: Enforce, or Preview to see first what it would do";
const ON_ALL_NODES: &str = "without a selector its rules act on all nodes, those of the control plane included; to leave these out, write selector: \
{matchExpressions: [{key: node-role.kubernetes.io/control-plane, operator: DoesNotExist}]}";
const EVICTS_AT_ONCE: &str = "the action has no throttle, so the first evaluation above the threshold evicts; write 3 or more";
const QUOTAS_ALONE: &str = "quota steps alone protect least of all ways that were measured; write idle: true, or a PodQOS with resourceQOS: {cpuQOS: \
{cpuPriority: 7}} for these pods";
const BEST_EFFORT_ALONE: &str = "the idle class of BestEffort pods only protects other BestEffort pods: Burstable and Guaranteed pods are ahead of them \
already; for these, give batch pods with requests the idle class";

/// Notes on objects that are in force.
pub fn advice(objects: &Objects) -> Vec<Finding> {
    let mut notes = Vec::new();
    for (name, node) in &objects.nodes {
        of_rules(&object(Kind::NodeQos, name), node, objects, &mut notes);
    }
    let standing = objects.pods.values().any(is_idle);
    for (name, action) in &objects.actions {
        if cpu_throttle(action).is_some() && !gives_idle(action) && !standing {
            let path = "spec.throttle.cpuThrottle".to_owned();
            let object = object(Kind::AvoidanceAction, name);
            notes.push(note(object, path, Reason::ProtectsLittle, QUOTAS_ALONE));
        }
    }
    if objects.pods.values().all(selects_best_effort_only) {
        for (name, pods) in &objects.pods {
            let mut actions = pods.allowed_actions.iter();
            let path = if is_idle(pods) {
                "spec.resourceQOS.cpuQOS.cpuPriority"
            } else if actions.any(|it| objects.actions.get(it).is_some_and(gives_idle)) {
                "spec.allowedActions"
            } else {
                continue;
            };
            let (object, path) = (object(Kind::PodQos, name), path.to_owned());
            notes.push(note(
                object,
                path,
                Reason::ProtectsLittle,
                BEST_EFFORT_ALONE,
            ));
        }
    }
    notes.into_iter().map(|it| objects.locate(it)).collect()
}

/// Whether some action or `PodQOS` puts pods into the idle class.
pub fn uses_idle_class(objects: &Objects) -> bool {
    objects.actions.values().any(gives_idle) || objects.pods.values().any(is_idle)
}

fn of_rules(object: &ObjectRef, node: &NodeRules, objects: &Objects, notes: &mut Vec<Finding>) {
    let mut add = |path: String, reason, message: &str| {
        notes.push(note(object.clone(), path, reason, message));
    };
    let acting = |rule: &NodeRule| {
        let strategy = rule.strategy.as_deref().and_then(Strategy::from_name);
        strategy != Some(Strategy::Preview)
    };
    let acts = node.rules.iter().any(|(_, rule)| acting(rule));
    if acts && node.spec.selector.is_none() {
        add("spec".to_owned(), Reason::ActsOnAllNodes, ON_ALL_NODES);
    }
    for (index, rule) in node.rules.iter().filter(|(_, rule)| acting(rule)) {
        let path = format!("spec.rules[{index}]");
        let action = objects.actions.get(rule.named_action());
        let evicts_only = |it: &AvoidanceActionSpec| it.eviction.is_some() && it.throttle.is_none();
        if action.is_some_and(evicts_only) && rule.avoidance_threshold.unwrap_or(1) == 1 {
            add(
                format!("{path}.avoidanceThreshold"),
                Reason::EvictsAtOnce,
                EVICTS_AT_ONCE,
            );
        }
    }
}

/// Notes on the rules of a `NodeQOS` as written, since a default is there once it is validated.
pub fn strategies_left_out(node_qos: &Value) -> Vec<Finding> {
    let rules = node_qos["spec"]["rules"].as_array();
    let rules = rules.into_iter().flatten().enumerate();
    let left_out = rules.filter(|(_, rule)| rule["strategy"].is_null());
    let object = object(Kind::NodeQos, super::objects::name(node_qos));
    left_out
        .map(|(index, _)| {
            let path = format!("spec.rules[{index}]");
            note(
                object.clone(),
                path,
                Reason::StrategyLeftOut,
                STRATEGY_LEFT_OUT,
            )
        })
        .collect()
}

fn object(kind: Kind, name: &str) -> ObjectRef {
    ObjectRef {
        kind: kind.name().to_owned(),
        name: name.to_owned(),
    }
}

fn note(object: ObjectRef, path: String, reason: Reason, message: &str) -> Finding {
    Finding {
        object,
        path,
        severity: Severity::Note,
        reason,
        message: message.to_owned(),
        follows: false,
    }
}

fn is_idle(pods: &PodQosSpec) -> bool {
    pods.resource_qos.as_ref().is_some_and(ResourceQos::is_idle)
}

fn gives_idle(action: &AvoidanceActionSpec) -> bool {
    cpu_throttle(action).is_some_and(|it| it.idle == Some(true))
}

fn cpu_throttle(action: &AvoidanceActionSpec) -> Option<&CpuThrottle> {
    action.throttle.as_ref()?.cpu_throttle.as_ref()
}

fn selects_best_effort_only(pods: &PodQosSpec) -> bool {
    let scopes = pods
        .scope_selector
        .iter()
        .flat_map(|it| &it.match_expressions);
    scopes
        .into_iter()
        .any(|it| it.scope_name == "QOSClass" && it.operator == "In" && it.values == ["BestEffort"])
}
