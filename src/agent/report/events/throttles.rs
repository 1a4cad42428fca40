//! Events of throttles: only for the first step, the floor and the end.

use std::collections::{BTreeMap, BTreeSet};

use super::{AT_FLOOR, NewEvent, RESTORED, Reasons, Regarding, THROTTLED, new_event, reason_of};
use crate::engine::plan::PlanChange;
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;
use crate::engine::units::Quota;
use crate::messages::event::NamedDecision;
use crate::node::journal::JournalRecord;

/// A pod that is throttled, or would be in Preview.
#[derive(Debug, Default)]
struct Throttled {
    rules: BTreeSet<RuleId>,
    floor: bool,
}

/// The reported throttles.
#[derive(Debug, Default)]
pub(super) struct Throttles {
    throttled: BTreeMap<(bool, PodUid), Throttled>,
}

impl Throttles {
    /// Adopts a throttle that an earlier process reported. `floor` is the lowest ratio of the rule's action.
    pub(super) fn adopt(&mut self, record: JournalRecord, floor: Option<u8>) {
        let throttled = self.throttled.entry((false, record.uid)).or_default();
        throttled.rules.insert(record.rule);
        throttled.floor |= floor.is_some_and(|floor| record.ratio <= floor);
    }

    /// A step, up or down. `floor` is the lowest ratio of the action.
    pub(super) fn step(
        &mut self,
        decision: &NamedDecision,
        floor: Option<u8>,
        why: &str,
        out: &mut Vec<NewEvent>,
    ) {
        let transition = &decision.transition;
        let PlanChange::Throttle {
            pod,
            to,
            idle,
            quota,
            ..
        } = &transition.change
        else {
            return;
        };
        let key = (transition.would, pod.clone());
        if *to == 100 && !*idle {
            return self.end(decision, pod, why, out);
        }
        let throttled = self.throttled.entry(key).or_default();
        let first = throttled.rules.is_empty();
        throttled.rules.insert(transition.rule.clone());
        if first {
            let message = format!("{why}; {}", limit(*to, *idle, *quota));
            out.extend(of_pod(decision, pod, THROTTLED, message));
        } else if Some(*to) == floor && !throttled.floor {
            throttled.floor = true;
            let message = format!("{why}; {}, its floor", limit(*to, *idle, *quota));
            out.extend(of_pod(decision, pod, AT_FLOOR, message));
        }
    }

    /// The rule is breached again: forgets what it throttled before, as those pods may be deleted.
    pub(super) fn start(&mut self, rule: &RuleId, would: bool) {
        self.throttled.retain(|(is_would, _), throttled| {
            *is_would != would || !throttled.rules.remove(rule) || !throttled.rules.is_empty()
        });
    }

    /// Forgets deleted pods.
    pub(super) fn forget(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        self.throttled.retain(|(_, uid), _| is_there(uid));
    }

    /// The pod cannot be throttled further.
    pub(super) fn floor(&mut self, decision: &NamedDecision, out: &mut Vec<NewEvent>) {
        let transition = &decision.transition;
        let Some(pod) = transition.change.pod() else {
            return;
        };
        let Some(throttled) = self.throttled.get_mut(&(transition.would, pod.clone())) else {
            return;
        };
        if std::mem::replace(&mut throttled.floor, true) {
            return;
        }
        let message = format!("{}: it cannot be throttled further", transition.rule);
        out.extend(of_pod(decision, pod, AT_FLOOR, message));
    }

    /// One rule stops throttling the pod; reported if no other rule throttles it.
    fn end(&mut self, decision: &NamedDecision, pod: &PodUid, why: &str, out: &mut Vec<NewEvent>) {
        let transition = &decision.transition;
        let key = (transition.would, pod.clone());
        if let Some(throttled) = self.throttled.get_mut(&key) {
            throttled.rules.remove(&transition.rule);
            if !throttled.rules.is_empty() {
                return;
            }
        }
        self.throttled.remove(&key);
        let message = format!("{why}; its CPU limit is restored");
        out.extend(of_pod(decision, pod, RESTORED, message));
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.throttled.len()
    }
}

/// An event on a pod; `None` if its name is not known.
fn of_pod(
    decision: &NamedDecision,
    pod: &PodUid,
    words: Reasons,
    message: String,
) -> Option<NewEvent> {
    let regarding = Regarding::pod(decision.pod_name.as_deref(), pod)?;
    let reason = reason_of(words, decision.transition.would);
    Some(new_event(regarding, false, reason, message))
}

fn limit(ratio: u8, idle: bool, quota: Quota) -> String {
    let idle = if idle { ", idle class" } else { "" };
    match quota {
        Quota::Unlimited => format!("CPU unlimited{idle}"),
        Quota::Limit(cpu) => format!("CPU limit {cpu} ({ratio} %){idle}"),
    }
}
