//! Whether a pod may be evicted, checked on the current Pod object right before the request.

use std::time::Duration;

use super::super::pod_facts::{PodObject, pod_facts};
use crate::engine::metric::ActionKind;
use crate::engine::pod::{EvictionExemption, Pod as Facts};
use crate::engine::policy::{Action, Allowed, EvictionSpec, PolicySet, RuleId, Strategy};

/// Why a pod may not be evicted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Objection {
    /// It is being terminated.
    #[error("it is already being terminated")]
    Terminating,
    /// It is on another node.
    #[error("it is not on this node any more")]
    OtherNode,
    /// Its phase is not Running.
    #[error("it is not running")]
    NotRunning,
    /// It has the annotation `plimsoll.dev/protected`.
    #[error("it is protected by its annotation")]
    Protected,
    /// It is of a kind that is never evicted.
    #[error("{}", why_never_evicted(*.0))]
    NeverEvicted(EvictionExemption),
    /// It has no controller that would replace it.
    #[error("it has no controller, and the action has no evictUnowned")]
    Unowned,
    /// The policies or the labels of the pod have changed.
    #[error("no PodQOS allows it any more")]
    NotAllowed,
    /// The rule was deleted, or no longer evicts.
    #[error("no rule asks for it any more")]
    NotWanted,
    /// The object is invalid.
    #[error("the pod can't be read: {0}")]
    Unreadable(String),
}

const fn why_never_evicted(exemption: EvictionExemption) -> &'static str {
    match exemption {
        EvictionExemption::Static => "it is a static pod, which the kubelet would restart",
        EvictionExemption::DaemonSet => "it belongs to a DaemonSet, which would recreate it",
        EvictionExemption::SystemCritical => "its priority is system-critical",
        EvictionExemption::DoNotDisrupt => "it is annotated not to be disrupted",
    }
}

/// The grace period with which `rule` of the policies of `node` may evict `pod`.
///
/// # Errors
/// The pod may not be evicted.
pub fn permit(
    pod: &PodObject,
    node: &str,
    rule: &RuleId,
    policy: &PolicySet,
) -> Result<Duration, Objection> {
    let facts = pod_facts(pod).map_err(|error| Objection::Unreadable(error.to_string()))?;
    let runs_on = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    if facts.terminating {
        return Err(Objection::Terminating);
    }
    if runs_on != Some(node) {
        return Err(Objection::OtherNode);
    }
    let (action, eviction) = requested_eviction(rule, policy).ok_or(Objection::NotWanted)?;
    if !facts.running {
        return Err(Objection::NotRunning);
    }
    if facts.protected {
        return Err(Objection::Protected);
    }
    if let Some(exemption) = facts.eviction_exemption {
        return Err(Objection::NeverEvicted(exemption));
    }
    if !facts.owned && !eviction.evict_unowned {
        return Err(Objection::Unowned);
    }
    if !allows(policy, &facts, action) {
        return Err(Objection::NotAllowed);
    }
    Ok(eviction.grace_of(&facts))
}

fn requested_eviction<'a>(
    rule: &RuleId,
    policy: &'a PolicySet,
) -> Option<(&'a Action, EvictionSpec)> {
    let mut rules = policy.rules.iter();
    let rule = rules.find(|known| known.id == *rule && known.strategy == Strategy::Enforce)?;
    let action = &*rule.action;
    Some((action, action.eviction?))
}

fn allows(policy: &PolicySet, pod: &Facts, action: &Action) -> bool {
    let matching = policy.pods.iter().filter(|policy| policy.matches(pod));
    matching
        .flat_map(|policy| &policy.allowed)
        .any(|entry| Allowed::of(entry).permits(&action.name, ActionKind::Eviction))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::engine::metric::Metric;
    use crate::engine::policy::{PodPolicy, Rule, Standing};
    use crate::engine::selector::Selector;

    fn policy() -> PolicySet {
        let action = Action {
            name: "drain".to_owned(),
            cool_down: Duration::from_mins(5),
            scheduling: None,
            throttle: None,
            force_gc: false,
            eviction: Some(EvictionSpec {
                grace: None,
                max_pods_per_round: 1,
                evict_unowned: false,
            }),
        };
        let rule = Rule {
            id: RuleId::from("q/r"),
            metric: Metric::CpuUsage,
            series: None,
            threshold: 4000.0,
            restore_value: 4000.0,
            avoidance_threshold: 1,
            restore_threshold: 1,
            sample_ttl: Duration::from_mins(1),
            probe: None,
            action: Arc::new(action),
            strategy: Strategy::Enforce,
            active_during: Vec::new(),
        };
        let pods = PodPolicy {
            name: "all".to_owned(),
            labels: Some(Selector::default()),
            scopes: Vec::new(),
            allowed: vec!["eviction".to_owned()],
            standing: Standing::default(),
        };
        PolicySet {
            rules: vec![rule],
            pods: vec![pods],
        }
    }

    fn pod(change: impl FnOnce(&mut Value)) -> PodObject {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "x", "controller": true});
        let mut pod = json!({
            "metadata": {"name": "p", "namespace": "shop", "uid": "u", "ownerReferences": [owner]},
            "spec": {"nodeName": "n", "containers": [{"name": "c"}]},
            "status": {"phase": "Running"},
        });
        change(&mut pod);
        serde_json::from_value(pod).expect("a pod")
    }

    fn permitted(pod: &PodObject, policy: &PolicySet) -> Result<Duration, Objection> {
        permit(pod, "n", &RuleId::from("q/r"), policy)
    }

    fn objection_to(pod: &PodObject, policy: &PolicySet) -> Option<Objection> {
        permitted(pod, policy).err()
    }

    #[test]
    fn the_grace_period_is_that_of_the_action_or_else_of_the_pod() {
        let seconds = |grace| permitted(&pod(|_| {}), &grace).map(|grace| grace.as_secs());
        assert_eq!(seconds(policy()), Ok(30), "Kubernetes' default");
        let mut own = policy();
        let action = Arc::make_mut(&mut own.rules[0].action);
        let eviction = action.eviction.as_mut().expect("it evicts");
        eviction.grace = Some(Duration::from_secs(7));
        assert_eq!(seconds(own.clone()), Ok(7));
        let action = Arc::make_mut(&mut own.rules[0].action);
        action.eviction.as_mut().expect("it evicts").grace = Some(Duration::ZERO);
        assert_eq!(seconds(own), Ok(1), "never a force delete");
        let slow_pod = pod(|pod| pod["spec"]["terminationGracePeriodSeconds"] = json!(90));
        assert_eq!(permitted(&slow_pod, &policy()), Ok(Duration::from_secs(90)));
    }

    #[test]
    fn a_change_of_the_pod_since_the_decision_is_an_objection() {
        let changed = |change: fn(&mut Value)| objection_to(&pod(change), &policy());
        let annotate = |pod: &mut Value, key: &str, value: &str| {
            pod["metadata"]["annotations"] = json!({key: value});
        };
        assert_eq!(
            changed(|pod| pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z")),
            Some(Objection::Terminating)
        );
        assert_eq!(
            changed(|pod| pod["spec"]["nodeName"] = json!("other")),
            Some(Objection::OtherNode)
        );
        assert_eq!(
            changed(|pod| pod["status"]["phase"] = json!("Succeeded")),
            Some(Objection::NotRunning)
        );
        assert_eq!(
            changed(|pod| pod["metadata"]["ownerReferences"] = json!([])),
            Some(Objection::Unowned)
        );
        assert_eq!(
            changed(|pod| pod["metadata"]["ownerReferences"][0]["kind"] = json!("DaemonSet")),
            Some(Objection::NeverEvicted(EvictionExemption::DaemonSet))
        );
        assert_eq!(
            changed(|pod| pod["spec"]["priority"] = json!(2_000_000_000)),
            Some(Objection::NeverEvicted(EvictionExemption::SystemCritical))
        );
        assert_eq!(
            changed(|pod| pod["metadata"]["namespace"] = json!("kube-system")),
            Some(Objection::NotAllowed)
        );
        let protected = pod(|pod| annotate(pod, "plimsoll.dev/protected", "true"));
        assert_eq!(
            objection_to(&protected, &policy()),
            Some(Objection::Protected)
        );
        let mirror = pod(|pod| annotate(pod, "kubernetes.io/config.mirror", "x"));
        assert_eq!(
            objection_to(&mirror, &policy()),
            Some(Objection::NeverEvicted(EvictionExemption::Static))
        );
    }

    #[test]
    fn an_edited_or_deleted_policy_is_an_objection() {
        let mut previewed = policy();
        previewed.rules[0].strategy = Strategy::Preview;
        assert_eq!(
            objection_to(&pod(|_| {}), &previewed),
            Some(Objection::NotWanted)
        );
        let mut harmless = policy();
        Arc::make_mut(&mut harmless.rules[0].action).eviction = None;
        assert_eq!(
            objection_to(&pod(|_| {}), &harmless),
            Some(Objection::NotWanted)
        );
        let mut forbidden = policy();
        forbidden.pods[0].allowed = vec!["throttle".to_owned()];
        assert_eq!(
            objection_to(&pod(|_| {}), &forbidden),
            Some(Objection::NotAllowed)
        );
        assert_eq!(
            objection_to(&pod(|_| {}), &PolicySet::default()),
            Some(Objection::NotWanted)
        );
    }
}
