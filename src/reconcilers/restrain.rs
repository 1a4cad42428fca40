//! What of an edit may go to every node at once, and what has to be tried on a few first. Pure.

use std::collections::BTreeSet;

use super::catalog::Key;
use crate::crd::Kind;
use crate::engine::policy::{
    Action, CpuThrottle, EvictionSpec, PodPolicy, PolicySet, Rule, Strategy,
};

/// What a node keeps while some sources of its policies are not released to it.
#[derive(Debug, Default, PartialEq)]
pub struct Restrained {
    /// Every loosening of the edit, and every tightening of the sources that are released.
    pub policy: PolicySet,
    /// The sources whose tightenings are left out.
    pub held: BTreeSet<Key>,
}

/// Leaves out of `wanted` what is tighter than what the node keeps now, where `released` does not allow it: a rule
/// that is new or stronger stays as it was, a pod policy that allows more too. What is deleted or looser is taken. Both are
/// sorted.
pub fn restrain(
    live: &PolicySet,
    wanted: &PolicySet,
    released: impl Fn(&Key) -> bool,
) -> Restrained {
    let mut out = Restrained::default();
    for rule in &wanted.rules {
        let before = live
            .rules
            .binary_search_by(|before| before.id.cmp(&rule.id));
        let before = before.ok().and_then(|index| live.rules.get(index));
        let source = source(rule);
        if !is_tighter(rule, before) || released(&source) {
            out.policy.rules.push(rule.clone());
            continue;
        }
        out.policy.rules.extend(before.cloned());
        out.held.insert(source);
    }
    for policy in &wanted.pods {
        let before = live.pods.iter().find(|before| before.name == policy.name);
        let source = (Kind::PodQos, policy.name.clone());
        if !allows_more(policy, before) || released(&source) {
            out.policy.pods.push(policy.clone());
            continue;
        }
        out.policy.pods.extend(before.cloned());
        out.held.insert(source);
    }
    out
}

/// The `NodeQOS` of a rule.
pub fn source(rule: &Rule) -> Key {
    let id = &*rule.id.0;
    let name = id.split_once('/').map_or(id, |(name, _)| name);
    (Kind::NodeQos, name.to_owned())
}

/// Whether a rule acts where, or earlier or harder than, it did not before.
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
        || rule.watermark < before.watermark
        || rule.restore < before.restore
        || rule.avoidance_threshold < before.avoidance_threshold
        || rule.restore_threshold > before.restore_threshold
        || rule.period < before.period
        || is_stronger(&rule.action, &before.action)
}

fn is_stronger(action: &Action, before: &Action) -> bool {
    action.scheduling > before.scheduling
        || action.cool_down > before.cool_down
        || (action.force_gc && !before.force_gc)
        || throttles_more(action.throttle, before.throttle)
        || evicts_more(action.eviction, before.eviction)
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

/// Whether a pod policy may allow what it did not before. Selectors are not compared: one that is not the same may select
/// more.
pub fn allows_more(policy: &PodPolicy, before: Option<&PodPolicy>) -> bool {
    let Some(before) = before else {
        return true;
    };
    let new = |entry: &String| !before.allowed.contains(entry);
    policy.labels != before.labels
        || policy.scopes != before.scopes
        || policy.allowed.iter().any(new)
}
