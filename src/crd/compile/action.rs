//! Compiles an `AvoidanceAction`, with its defaults.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::avoidance_action::{AvoidanceActionSpec, CpuThrottle, Eviction};
use super::super::finding::Reason;
use super::super::objects::{Kind, Objects};
use super::{Findings, ObjectFindings};
use crate::engine::policy::{self, Action, EvictionSpec, TaintEffect};

const COOL_DOWN_SECONDS: i64 = 300;
const RATIO: i64 = 10;
const MAX_PODS_PER_ROUND: i64 = 1;

/// Every action, by name.
pub(super) fn compile_all<'a>(
    objects: &'a Objects,
    findings: &mut Findings,
) -> BTreeMap<&'a str, Arc<Action>> {
    let compile = |(name, spec): (&'a String, &AvoidanceActionSpec)| {
        let action = compile(name, spec);
        report(
            &action,
            &mut findings.for_object(Kind::AvoidanceAction, name),
        );
        (name.as_str(), Arc::new(action))
    };
    objects.actions.iter().map(compile).collect()
}

fn compile(name: &str, spec: &AvoidanceActionSpec) -> Action {
    let throttle = spec.throttle.as_ref();
    let memory = throttle.and_then(|throttle| throttle.memory_throttle.as_ref());
    Action {
        name: name.to_owned(),
        cool_down: seconds(spec.cool_down_seconds.unwrap_or(COOL_DOWN_SECONDS).max(1)),
        scheduling: scheduling(spec),
        throttle: throttle
            .and_then(|throttle| throttle.cpu_throttle.as_ref())
            .map(cpu_throttle),
        force_gc: memory.and_then(|memory| memory.force_gc) == Some(true),
        eviction: spec.eviction.as_ref().map(eviction),
    }
}

/// An action that only throttles leaves the node schedulable.
fn scheduling(spec: &AvoidanceActionSpec) -> Option<TaintEffect> {
    let given = spec.disable_scheduling.as_ref();
    let only_throttles = spec.throttle.is_some() && spec.eviction.is_none();
    if given.is_none() && only_throttles {
        return None;
    }
    match given.and_then(|given| given.effect.as_deref()) {
        Some("PreferNoSchedule") => Some(TaintEffect::PreferNoSchedule),
        _ => Some(TaintEffect::NoSchedule),
    }
}

fn cpu_throttle(spec: &CpuThrottle) -> policy::CpuThrottle {
    policy::CpuThrottle {
        min_ratio: percent(spec.min_cpu_ratio, 0),
        step: percent(spec.step_cpu_ratio, 1),
        idle: spec.idle == Some(true),
    }
}

fn percent(given: Option<i64>, min: i64) -> u8 {
    u8::try_from(given.unwrap_or(RATIO).clamp(min, 100)).unwrap_or(100)
}

fn eviction(spec: &Eviction) -> EvictionSpec {
    let pods = spec.max_pods_per_round.unwrap_or(MAX_PODS_PER_ROUND).max(1);
    EvictionSpec {
        grace: spec
            .termination_grace_period_seconds
            .map(|grace| seconds(grace.max(1))),
        max_pods_per_round: u32::try_from(pods).unwrap_or(u32::MAX),
        evict_unowned: spec.evict_unowned == Some(true),
    }
}

pub(super) fn seconds(count: i64) -> Duration {
    Duration::from_secs(u64::try_from(count).unwrap_or(0))
}

fn report(action: &Action, findings: &mut ObjectFindings<'_>) {
    let has_no_effect =
        |throttle: &policy::CpuThrottle| throttle.min_ratio == 100 && !throttle.idle;
    if action.throttle.as_ref().is_some_and(has_no_effect) {
        findings.error(
            Reason::ActionWithoutEffect,
            "spec.throttle.cpuThrottle.minCPURatio",
            "minCPURatio 100 leaves every pod all of its CPU, so nothing is throttled; write for example minCPURatio: 10",
        );
    }
}
