//! Which parts of an edit go to every node at once, and which are tried on canaries first. Pure.

use std::collections::BTreeSet;

use crate::crd::Kind;
use crate::engine::policy::{
    Action, CpuThrottle, EvictionSpec, PodPolicy, PolicySet, Rule, Strategy, node_qos_of,
};
use crate::reconcilers::compile::catalog::Key;

/// The policies of a node while some edits are withheld from it.
#[derive(Debug, Default, PartialEq)]
pub struct Staged {
    /// All loosenings, and the tightenings of released sources.
    pub policy: PolicySet,
    /// The sources whose tightenings are left out.
    pub withheld: BTreeSet<Key>,
}

/// Applies `wanted` except for tightenings of sources that are not `released`: a new or stronger rule, or a pod policy that allows
/// more, stays as in `current`. Deletions and loosenings always apply. Both policy sets are sorted.
pub fn withhold(
    current: &PolicySet,
    wanted: &PolicySet,
    released: impl Fn(&Key) -> bool,
) -> Staged {
    let mut out = Staged::default();
    for rule in &wanted.rules {
        let before = current
            .rules
            .binary_search_by(|before| before.id.cmp(&rule.id));
        let before = before.ok().and_then(|index| current.rules.get(index));
        let source = source(rule);
        if !is_tighter(rule, before) || released(&source) {
            out.policy.rules.push(rule.clone());
            continue;
        }
        out.policy.rules.extend(before.cloned());
        out.withheld.insert(source);
    }
    for policy in &wanted.pods {
        let before = current
            .pods
            .iter()
            .find(|before| before.name == policy.name);
        let source = source_of_pods(policy);
        if !allows_more(policy, before) || released(&source) {
            out.policy.pods.push(policy.clone());
            continue;
        }
        out.policy.pods.extend(before.cloned());
        out.withheld.insert(source);
    }
    out
}

/// The `NodeQOS` of a rule.
pub fn source(rule: &Rule) -> Key {
    let id = &*rule.id.0;
    (Kind::NodeQos, node_qos_of(id).unwrap_or(id).to_owned())
}

/// The object of a pod policy: the `NodeQOS` whose rule has the pods itself, or a `PodQOS`.
pub fn source_of_pods(policy: &PodPolicy) -> Key {
    match node_qos_of(&policy.name) {
        Some(node_qos) => (Kind::NodeQos, node_qos.to_owned()),
        None => (Kind::PodQos, policy.name.clone()),
    }
}

/// Whether a rule acts where it did not before, or earlier or harder.
pub fn is_tighter(rule: &Rule, before: Option<&Rule>) -> bool {
    if rule.strategy == Strategy::Preview {
        return false;
    }
    let Some(before) = before.filter(|before| before.strategy == Strategy::Enforce) else {
        return true;
    };
    rule.metric != before.metric
        || rule.series != before.series
        || rule.probe != before.probe
        || rule.threshold < before.threshold
        || rule.restore_value < before.restore_value
        || rule.avoidance_threshold < before.avoidance_threshold
        || rule.restore_threshold > before.restore_threshold
        // Accepts samples that were too old before.
        || rule.sample_ttl > before.sample_ttl
        || is_active_longer(rule, before)
        || is_stronger(&rule.action, &before.action)
}

/// Whether a rule has hours that it did not have; without any it is always active.
fn is_active_longer(rule: &Rule, before: &Rule) -> bool {
    let (hours, before) = (&rule.active_during, &before.active_during);
    let new = |hours| !before.contains(hours);
    !before.is_empty() && (hours.is_empty() || hours.iter().any(new))
}

fn is_stronger(action: &Action, before: &Action) -> bool {
    action.scheduling > before.scheduling
        || action.cool_down > before.cool_down
        || (action.force_gc && !before.force_gc)
        || throttles_more(action.throttle, before.throttle)
        || evicts_more(action.eviction, before.eviction)
        // What throttling and reclaim free need not be evicted.
        || (action.eviction.is_some() && releases_less(action, before))
        || action.name != before.name
}

fn throttles_more(throttle: Option<CpuThrottle>, before: Option<CpuThrottle>) -> bool {
    match (throttle, before) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(now), Some(before)) => {
            now.min_ratio < before.min_ratio || now.step > before.step || (now.idle && !before.idle)
        }
    }
}

fn releases_less(action: &Action, before: &Action) -> bool {
    throttles_more(before.throttle, action.throttle) || (before.force_gc && !action.force_gc)
}

fn evicts_more(eviction: Option<EvictionSpec>, before: Option<EvictionSpec>) -> bool {
    match (eviction, before) {
        (None, _) => false,
        (Some(_), None) => true,
        (Some(now), Some(before)) => {
            now.max_pods_per_round > before.max_pods_per_round
                || (now.evict_unowned && !before.evict_unowned)
                || now.grace != before.grace
        }
    }
}

/// Whether a pod policy may do or allow what it did not before. Any change of a selector counts: it may select more.
pub fn allows_more(policy: &PodPolicy, before: Option<&PodPolicy>) -> bool {
    let Some(before) = before else {
        return true;
    };
    let new = |entry: &String| !before.allowed.contains(entry);
    policy.labels != before.labels
        || policy.scopes != before.scopes
        || policy.allowed.iter().any(new)
        || (policy.standing.lowers() && !before.standing.lowers())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::engine::metric::Metric;
    use crate::engine::policy::Standing;

    const THROTTLE: CpuThrottle = CpuThrottle {
        min_ratio: 20,
        step: 10,
        idle: false,
    };
    const EVICTION: EvictionSpec = EvictionSpec {
        grace: None,
        max_pods_per_round: 1,
        evict_unowned: false,
    };

    fn rule(throttle: Option<CpuThrottle>, eviction: Option<EvictionSpec>) -> Rule {
        Rule {
            id: "q/cpu".into(),
            metric: Metric::CpuUsage,
            series: None,
            threshold: 4000.0,
            restore_value: 4000.0,
            avoidance_threshold: 2,
            restore_threshold: 1,
            sample_ttl: Duration::from_mins(1),
            probe: None,
            action: Arc::new(Action {
                name: "act".to_owned(),
                cool_down: Duration::from_mins(5),
                scheduling: None,
                throttle,
                force_gc: false,
                eviction,
            }),
            strategy: Strategy::Enforce,
            active_during: Vec::new(),
        }
    }

    fn tightens(from: &Rule, to: &Rule) -> bool {
        is_tighter(to, Some(from))
    }

    #[test]
    fn throttling_less_is_tighter_if_the_action_also_evicts() {
        let gentle = CpuThrottle {
            min_ratio: 50,
            ..THROTTLE
        };
        let [both, less] = [THROTTLE, gentle].map(|it| rule(Some(it), Some(EVICTION)));
        let evicts = rule(None, Some(EVICTION));
        assert!(tightens(&both, &evicts) && tightens(&both, &less));
        assert!(!tightens(&evicts, &evicts));
        assert!(!tightens(&both, &rule(Some(THROTTLE), None)));
        assert!(!tightens(&both, &rule(None, None)));
        let throttles = rule(Some(THROTTLE), None);
        assert!(!tightens(&throttles, &rule(Some(gentle), None)));
    }

    #[test]
    fn more_hours_are_tighter() {
        let with = |hours: &[&str]| Rule {
            active_during: hours.iter().map(|hours| hours.parse().unwrap()).collect(),
            ..rule(Some(THROTTLE), None)
        };
        let [night, day] = ["22:00-06:00 UTC", "08:00-18:00 UTC"];
        let [always, nights, both] = [with(&[]), with(&[night]), with(&[day, night])];
        assert!(tightens(&nights, &both) && tightens(&nights, &always));
        assert!(tightens(&nights, &with(&[day])));
        assert!(!tightens(&both, &nights) && !tightens(&always, &nights));
        assert!(!tightens(&always, &always) && !tightens(&both, &both));
    }

    #[test]
    fn accepting_older_samples_is_tighter() {
        let before = rule(Some(THROTTLE), None);
        let with = |sample_ttl| Rule {
            sample_ttl,
            ..before.clone()
        };
        assert!(tightens(&before, &with(Duration::from_hours(1))));
        assert!(!tightens(&before, &with(Duration::from_secs(1))));
    }

    #[test]
    fn lowering_pods_at_all_times_is_tighter() {
        let with = |idle, preview| PodPolicy {
            name: "batch".to_owned(),
            labels: None,
            scopes: Vec::new(),
            allowed: Vec::new(),
            standing: Standing {
                idle,
                preview,
                ..Standing::default()
            },
        };
        let [none, preview, idle] = [with(false, false), with(true, true), with(true, false)];
        assert!(allows_more(&idle, Some(&none)) && allows_more(&idle, Some(&preview)));
        assert!(!allows_more(&preview, Some(&none)) && !allows_more(&none, Some(&idle)));
        assert!(!allows_more(&preview, Some(&idle)) && !allows_more(&idle, Some(&idle)));
    }
}
