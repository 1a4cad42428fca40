//! Throttles: of the many steps of one only the first, the floor and the end are told.

use std::collections::{BTreeMap, BTreeSet};

use super::{AT_FLOOR, About, Note, RESTORED, THROTTLED, Words, note, of};
use crate::engine::plan::Change;
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;
use crate::engine::units::Quota;
use crate::node::journal::Record;
use crate::node::machine::event::Decision;

/// A pod that is throttled, or would be.
#[derive(Debug, Default)]
struct Held {
    rules: BTreeSet<RuleId>,
    floor: bool,
}

/// What is told of throttles.
#[derive(Debug, Default)]
pub(super) struct Throttles {
    held: BTreeMap<(bool, PodUid), Held>,
}

impl Throttles {
    /// What an earlier process throttled, and told. `floor` is the ratio that the rule's action does not go below.
    pub(super) fn adopt(&mut self, record: Record, floor: Option<u8>) {
        let held = self.held.entry((false, record.uid)).or_default();
        held.rules.insert(record.rule);
        held.floor |= floor.is_some_and(|floor| record.ratio <= floor);
    }

    /// A step, up or down. `floor` is the ratio that the action does not go below.
    pub(super) fn step(
        &mut self,
        decision: &Decision,
        floor: Option<u8>,
        why: &str,
        out: &mut Vec<Note>,
    ) {
        let transition = &decision.transition;
        let Change::Throttle {
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
        let held = self.held.entry(key).or_default();
        let first = held.rules.is_empty();
        held.rules.insert(transition.rule.clone());
        if first {
            let message = format!("{why}; {}", now(*to, *idle, *quota));
            out.extend(of_pod(decision, pod, THROTTLED, message));
        } else if Some(*to) == floor && !held.floor {
            held.floor = true;
            let message = format!("{why}; {}, the lowest", now(*to, *idle, *quota));
            out.extend(of_pod(decision, pod, AT_FLOOR, message));
        }
    }

    /// The rule begins anew: of what it held before, pods that are gone are left alone.
    pub(super) fn begin(&mut self, rule: &RuleId, would: bool) {
        self.held.retain(|(is_would, _), held| {
            *is_would != would || !held.rules.remove(rule) || !held.rules.is_empty()
        });
    }

    /// Forgets the pods that are gone: nothing more is reported of them.
    pub(super) fn forget(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        self.held.retain(|(_, uid), _| is_there(uid));
    }

    /// The pod can't be brought lower.
    pub(super) fn floor(&mut self, decision: &Decision, out: &mut Vec<Note>) {
        let transition = &decision.transition;
        let Some(pod) = transition.change.pod() else {
            return;
        };
        let Some(held) = self.held.get_mut(&(transition.would, pod.clone())) else {
            return;
        };
        if std::mem::replace(&mut held.floor, true) {
            return;
        }
        let message = format!("{}: it can't be brought lower", transition.rule);
        out.extend(of_pod(decision, pod, AT_FLOOR, message));
    }

    /// One rule lets go of the pod; it is told where no other holds it.
    fn end(&mut self, decision: &Decision, pod: &PodUid, why: &str, out: &mut Vec<Note>) {
        let transition = &decision.transition;
        let key = (transition.would, pod.clone());
        if let Some(held) = self.held.get_mut(&key) {
            held.rules.remove(&transition.rule);
            if !held.rules.is_empty() {
                return;
            }
        }
        self.held.remove(&key);
        let message = format!("{why}; it has its own CPU limit again");
        out.extend(of_pod(decision, pod, RESTORED, message));
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.held.len()
    }
}

/// What happened to a pod; `None` where its name is not known.
fn of_pod(decision: &Decision, pod: &PodUid, words: Words, message: String) -> Option<Note> {
    let about = About::pod(decision.pod_name.as_deref(), pod)?;
    let reason = of(words, decision.transition.would);
    Some(note(about, false, reason, message))
}

fn now(ratio: u8, idle: bool, quota: Quota) -> String {
    let idle = if idle { ", idle class" } else { "" };
    match quota {
        Quota::Unlimited => format!("CPU unlimited{idle}"),
        Quota::Limit(cpu) => format!("CPU at most {cpu} from now on ({ratio} %){idle}"),
    }
}
