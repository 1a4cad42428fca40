//! What a policy does, in one sentence for each rule and each `PodQOS` that does something at all times.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::crd::duration::format_duration;
use crate::crd::words::named;
use crate::engine::metric::ActionKind;
use crate::engine::policy::{Allowed, PodPolicy, PolicySet, Rule, Strategy, node_qos_of};

/// At most this many names of `PodQOS` in a sentence.
const MAX_NAMES: usize = 3;

/// The sentences of rules that are evaluated at this period. `selective` are the `NodeQOS` that select nodes.
pub(super) fn all(
    policy: &PolicySet,
    selective: &BTreeSet<String>,
    period: Duration,
) -> Vec<String> {
    let rules = policy.rules.iter().map(|rule| {
        let selects = node_qos_of(&rule.id.0).is_some_and(|it| selective.contains(it));
        of_rule(rule, selects, &policy.pods, period)
    });
    let standing = policy.pods.iter().filter_map(of_pods);
    rules.chain(standing).collect()
}

fn of_rule(rule: &Rule, selects: bool, pods: &[PodPolicy], period: Duration) -> String {
    let nodes = if selects {
        "on the nodes that it selects"
    } else {
        "on all nodes"
    };
    let after = match rule.avoidance_threshold {
        1 => "as soon as".to_owned(),
        evaluations => format!(
            "after {} in which",
            format_duration(period.saturating_mul(evaluations - 1))
        ),
    };
    let hours = if rule.active_during.is_empty() {
        ""
    } else {
        " (in its hours)"
    };
    format!(
        "{}: {nodes}, {after} {} is above {} {}{hours}: {}. {}",
        rule.id,
        rule.metric,
        rule.threshold,
        rule.metric.unit(),
        steps(rule, pods).join(", then "),
        verb(rule.strategy == Strategy::Preview),
    )
}

/// What its action does, the mildest first.
fn steps(rule: &Rule, pods: &[PodPolicy]) -> Vec<String> {
    let action = &rule.action;
    let on = |kind: ActionKind| {
        let allow = |it: &&PodPolicy| {
            let mut allowed = it.allowed.iter().map(|entry| Allowed::of(entry));
            allowed.any(|allowed| allowed.permits(&action.name, kind))
        };
        let names = pods.iter().filter(allow).map(|it| it.name.as_str());
        let (own, others): (Vec<&str>, Vec<&str>) = names.partition(|it| node_qos_of(it).is_some());
        let mut parts = Vec::new();
        if !own.is_empty() {
            parts.push("its pods".to_owned());
        }
        if !others.is_empty() {
            parts.push(format!("pods of PodQOS {}", named(others, MAX_NAMES)));
        }
        if parts.is_empty() {
            parts.push("no pods".to_owned());
        }
        parts.join(" and ")
    };
    let mut steps = Vec::new();
    if let Some(effect) = action.scheduling {
        steps.push(format!("taints the node ({})", effect.name()));
    }
    if action.force_gc {
        steps.push(format!(
            "reclaims page cache of {}",
            on(ActionKind::ForceGc)
        ));
    }
    if let Some(throttle) = action.throttle {
        let pods = on(ActionKind::CpuThrottle);
        if throttle.idle {
            steps.push(format!("puts {pods} into the idle class"));
        }
        if throttle.min_ratio < 100 {
            let floor = throttle.min_ratio;
            let whose = if throttle.idle {
                "their CPU quota".to_owned()
            } else {
                format!("the CPU quota of {pods}")
            };
            steps.push(format!("lowers {whose} step by step to {floor} %"));
        }
    }
    if let Some(eviction) = action.eviction {
        let most = eviction.max_pods_per_round;
        steps.push(format!(
            "evicts {}, {most} at a time",
            on(ActionKind::Eviction)
        ));
    }
    steps
}

fn of_pods(pods: &PodPolicy) -> Option<String> {
    let standing = pods.standing;
    let mut parts = Vec::new();
    if standing.idle {
        parts.push("its pods are in the idle class".to_owned());
    }
    if standing.burst.0 > 0 {
        let burst = standing.burst;
        parts.push(format!(
            "its pods may burst above their CPU limit by {burst}"
        ));
    }
    (!parts.is_empty()).then(|| {
        let what = parts.join(", ");
        format!(
            "PodQOS/{}: at all times, {what}. {}",
            pods.name,
            verb(standing.preview)
        )
    })
}

const fn verb(preview: bool) -> &'static str {
    if preview { "ONLY REPORTS." } else { "ACTS." }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::{Objects, compile};
    use crate::engine::policy::NodeFacts;

    fn sentences(example: &str, selective: &[&str]) -> Vec<String> {
        let objects: Vec<serde_json::Value> = serde_saphyr::from_multiple(example).expect("YAML");
        let objects = Objects::from_values(objects).for_every_node();
        let compiled = compile(&objects, &NodeFacts::default());
        let selective = selective.iter().map(|it| (*it).to_owned()).collect();
        all(&compiled.policy, &selective, Duration::from_secs(10))
    }

    #[test]
    fn each_rule_and_each_standing_pod_policy_has_a_sentence() {
        let services = include_str!("../../../examples/ensurance/services.yaml");
        let [rule] = sentences(services, &[]).try_into().expect("one");
        assert_eq!(
            rule,
            "services/services-wait: on all nodes, as soon as protected_cpu_delay_p95 is above 5 percent: puts pods of PodQOS \
             batch-behind-services, best-effort-behind-services into the idle class, then lowers their CPU quota step by \
             step to 30 %. ACTS."
        );
        let preview = services.replace("strategy: Enforce", "strategy: Preview");
        let twice = preview.replace("avoidanceThreshold: 1", "avoidanceThreshold: 3");
        let [rule] = sentences(&twice, &["services"]).try_into().expect("one");
        assert!(
            rule.contains("on the nodes that it selects, after 20s in which"),
            "{rule}"
        );
        assert!(rule.ends_with("ONLY REPORTS."), "{rule}");
        let standing = include_str!("../../../examples/ensurance/standing.yaml");
        assert_eq!(
            sentences(standing, &[]),
            [
                "PodQOS/standing: at all times, its pods are in the idle class. ACTS.",
                "PodQOS/standing-services: at all times, its pods may burst above their CPU limit by 500m. ACTS.",
            ]
        );
    }
}
