//! Events: what `kubectl describe` tells of a node, of its `NodeWatermark` and of its pods. Transitions alone, never
//! a tick, never a step; and each once, about the object that people look at for it.
//!
//! | on | about |
//! |---|---|
//! | the Node | its rules: breached, cooling, ended; new pods: kept away, welcome; the emergency stop |
//! | the pod | its throttle: begins, floor, ends; its eviction: done, refused |
//! | the `NodeWatermark` | what keeps the agent from doing what the rules say |
//!
//! A Preview rule tells of its actions what it would tell with `strategy: None`, with a reason that begins with Would.

use std::collections::{BTreeMap, BTreeSet};

use crate::crd::emergency_stop;
use crate::engine::RuleReport;
use crate::engine::plan::{Change, RuleState, Spared, Transition, Unknown};
use crate::engine::pod::PodUid;
use crate::engine::policy::{PolicySet, Rule, RuleId, TaintEffect};
use crate::node::actuate::evict_api::{Fate, Outcome};
use crate::node::actuate::taint::Standing;
use crate::node::journal::Record;
use crate::node::machine::event::{Decision, Event, News};
use crate::node::machine::wording::{format_value, short, unknown_reason};

mod throttles;

use self::throttles::Throttles;

/// The object that an event regards.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum About {
    /// Our Node.
    Node,
    /// Our `NodeWatermark`.
    Watermark,
    /// A pod of ours.
    Pod {
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its UID.
        uid: PodUid,
    },
}

impl About {
    /// The pod of a `namespace/name`.
    fn pod(full_name: Option<&str>, uid: &PodUid) -> Option<Self> {
        let (namespace, name) = full_name?.split_once('/')?;
        Some(Self::Pod {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: uid.clone(),
        })
    }
}

/// One event to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What it regards.
    pub about: About,
    /// Somebody should look.
    pub warning: bool,
    /// One word.
    pub reason: &'static str,
    /// What happened.
    pub message: String,
}

/// What a decision is called, done and in Preview.
type Words = (&'static str, &'static str);

const THROTTLED: Words = ("PodThrottled", "WouldThrottle");
const AT_FLOOR: Words = ("PodAtThrottleFloor", "WouldThrottleToFloor");
const RESTORED: Words = ("PodRestored", "WouldRestore");
const RECLAIMED: Words = ("PageCacheReclaimed", "WouldReclaim");
const EVICTED: Words = ("PodEvicted", "WouldEvict");
const CLOSED: Words = ("SchedulingDisabled", "WouldDisableScheduling");
const OPENED: Words = ("SchedulingEnabled", "WouldEnableScheduling");

const fn of((done, would): Words, is_would: bool) -> &'static str {
    if is_would { would } else { done }
}

/// What the notes are written from besides the events.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The policies in force.
    pub policy: &'a PolicySet,
    /// The rules as they stand.
    pub reports: &'a [RuleReport],
}

fn rule<'a>(policy: &'a PolicySet, id: &RuleId) -> Option<&'a Rule> {
    policy.rules.iter().find(|rule| rule.id == *id)
}

/// The ratio that a rule's throttle does not go below.
fn floor(policy: &PolicySet, id: &RuleId) -> Option<u8> {
    let throttle = rule(policy, id)?.action.throttle?;
    Some(throttle.min_ratio)
}

impl Facts<'_> {
    fn rule(&self, id: &RuleId) -> Option<&Rule> {
        rule(self.policy, id)
    }

    /// `q/r: cpu_total_usage 7200m, mark 4000m`
    fn why(&self, id: &RuleId) -> String {
        let report = self.reports.iter().find(|report| report.id == *id);
        let metric = self.rule(id).map(|rule| rule.metric.to_string());
        let (Some(report), Some(metric)) = (report, metric) else {
            return id.to_string();
        };
        let value = |value| format_value(Some(&metric), value);
        let now = report.value.map_or_else(|| "unknown".to_owned(), value);
        format!("{id}: {metric} {now}, mark {}", value(report.watermark))
    }
}

/// Makes notes of what happens.
#[derive(Debug, Default)]
pub struct Teller {
    throttles: Throttles,
    /// Rules that were told to be unknown.
    unknown: BTreeSet<RuleId>,
    /// What stood on the Node, as it was last told.
    standing: Option<Standing>,
    /// Evictions that were decided, in words.
    evicting: BTreeMap<PodUid, String>,
}

impl Teller {
    /// Knows of what an earlier process throttled: it told of it.
    pub fn adopt(&mut self, records: impl Iterator<Item = Record>, policy: &PolicySet) {
        for record in records {
            let floor = floor(policy, &record.rule);
            self.throttles.adopt(record, floor);
        }
    }

    /// Forgets the pods that are gone.
    pub fn forget(&mut self, is_there: impl Fn(&PodUid) -> bool) {
        self.throttles.forget(is_there);
    }

    /// Takes in what happened in a tick.
    pub fn hear(&mut self, events: &[Event], facts: Facts, out: &mut Vec<Note>) {
        for event in events {
            match event {
                Event::Decision(decision) => self.decided(decision, facts, out),
                Event::Notice(notice) => noticed(&notice.news, out),
            }
        }
    }

    fn decided(&mut self, decision: &Decision, facts: Facts, out: &mut Vec<Note>) {
        let Transition {
            rule,
            would,
            change,
            ..
        } = &decision.transition;
        match change {
            Change::State { from, to, .. } => {
                if (*from, *to) == (RuleState::Normal, RuleState::Breached) {
                    self.throttles.begin(rule, *would);
                }
                state(decision, facts, out);
            }
            Change::Unknown { reason } => self.lost(rule, *reason, decision, out),
            Change::Known { .. } if self.unknown.remove(rule) => {
                let message = format!("{} is known again", facts.why(rule));
                out.push(note(About::Watermark, false, "RuleKnown", message));
            }
            Change::Throttle { .. } => {
                let floor = floor(facts.policy, rule);
                let why = facts.why(rule);
                self.throttles.step(decision, floor, &why, out);
            }
            Change::Spared {
                reason: Spared::AtFloor,
                ..
            } => self.throttles.floor(decision, out),
            Change::Reclaim { pod, amount } => {
                let message = format!("{}; up to {amount} of page cache", facts.why(rule));
                let about = About::pod(decision.pod_name.as_deref(), pod);
                let reason = of(RECLAIMED, *would);
                out.extend(about.map(|about| note(about, false, reason, message)));
            }
            Change::Evict { .. } => self.evict(decision, facts, out),
            Change::SchedulingDisabled { effect } if *would => {
                let message = closed(*effect, &facts.why(rule));
                out.push(on_node(true, of(CLOSED, true), message));
            }
            Change::SchedulingEnabled if *would => {
                out.push(on_node(false, of(OPENED, true), facts.why(rule)));
            }
            _ => {}
        }
    }

    /// The first look after a start has nothing to compare with, which is nobody's news.
    fn lost(&mut self, rule: &RuleId, why: Unknown, decision: &Decision, out: &mut Vec<Note>) {
        if matches!(why, Unknown::Rebased | Unknown::Sparse) || !self.unknown.insert(rule.clone()) {
            return;
        }
        let metric = decision.metric.as_deref().unwrap_or("its metric");
        let why = unknown_reason(why);
        let message = format!("{rule}: {metric} cannot be judged: {why}; what is in force is held");
        out.push(note(About::Watermark, true, "RuleUnknown", message));
    }

    fn evict(&mut self, decision: &Decision, facts: Facts, out: &mut Vec<Note>) {
        let Change::Evict {
            pod,
            grace,
            release,
        } = &decision.transition.change
        else {
            return;
        };
        let metric = decision.metric.as_deref();
        let release = release.map_or_else(String::new, |release| {
            format!(", to release {}", format_value(metric, release as f64))
        });
        let why = facts.why(&decision.transition.rule);
        let words = format!("{why}; grace {}{release}", short(*grace));
        if decision.transition.would {
            let about = About::pod(decision.pod_name.as_deref(), pod);
            let reason = of(EVICTED, true);
            out.extend(about.map(|about| note(about, true, reason, words)));
        } else {
            self.evicting.insert(pod.clone(), words);
        }
    }

    /// Takes in what came of an eviction. What keeps every pod from being evicted is not the pod's: see [`held_up`].
    pub fn outcome(&mut self, outcome: &Outcome, out: &mut Vec<Note>) {
        let target = &outcome.request.target;
        let uid = outcome.request.uid();
        let about = About::Pod {
            namespace: target.namespace.clone(),
            name: target.name.clone(),
            uid: uid.clone(),
        };
        match &outcome.fate {
            Fate::Unsure(_) => {}
            Fate::Accepted => {
                let words = self.evicting.remove(&uid);
                let words = words.unwrap_or_else(|| outcome.request.rule.to_string());
                out.push(note(about, true, of(EVICTED, false), words));
            }
            Fate::Terminating | Fate::Gone => drop(self.evicting.remove(&uid)),
            Fate::Refused { why, .. } => {
                self.evicting.remove(&uid);
                if why.obstacle().is_none() {
                    let words = format!("{}: {why}", outcome.request.rule);
                    out.push(note(about, true, "EvictionRefused", words));
                }
            }
        }
    }

    /// Takes in what stands on the Node; `words` say which rules want it, by which values.
    pub fn stands(&mut self, standing: &Standing, words: &str, out: &mut Vec<Note>) {
        if !standing.known {
            return;
        }
        let Some(before) = self.standing.replace(standing.clone()) else {
            return;
        };
        if before.effect != standing.effect {
            if let Some(effect) = standing.effect {
                out.push(on_node(true, of(CLOSED, false), closed(effect, words)));
            } else {
                let message = "no rule keeps new pods away any more: our taint is gone".to_owned();
                out.push(on_node(false, of(OPENED, false), message));
            }
        }
        if standing.contested && !before.contested {
            let message =
                "somebody keeps undoing our taint and condition: left alone for a while".to_owned();
            out.push(on_node(true, "TaintContested", message));
        }
    }
}

/// A rule met what keeps every pod from being evicted.
pub fn held_up(outcome: &Outcome) -> Note {
    let message = format!(
        "{}: no pod is evicted: {}",
        outcome.request.rule, outcome.fate
    );
    note(About::Watermark, true, "EvictionRefused", message)
}

/// The emergency stop began, for this reason, or is over.
pub fn stopped(reason: Option<&str>) -> Note {
    let message = match reason {
        Some(reason) => format!(
            "{}; what is in force is given back, and nothing more is done",
            emergency_stop::words(reason)
        ),
        None => "the emergency stop is over: the rules are judged anew".to_owned(),
    };
    let word = reason.map_or("EmergencyStopEnded", |_| "EmergencyStop");
    note(About::Node, reason.is_some(), word, message)
}

fn state(decision: &Decision, facts: Facts, out: &mut Vec<Note>) {
    let Change::State {
        to,
        value,
        watermark,
        unknown_too_long,
        ..
    } = &decision.transition.change
    else {
        return;
    };
    let id = &decision.transition.rule;
    let metric = decision.metric.as_deref();
    let rule = facts.rule(id);
    let named = metric.unwrap_or("its metric");
    let now = value.map_or_else(|| "unknown".to_owned(), |it| format_value(metric, it));
    let mark = format_value(metric, *watermark);
    let preview = if decision.transition.would {
        " (Preview: nothing is done)"
    } else {
        ""
    };
    match to {
        RuleState::Breached => {
            let action = rule.map_or("", |rule| rule.action.name.as_str());
            let message =
                format!("{id}: {named} {now} is above its mark {mark}; action {action}{preview}");
            out.push(on_node(true, "RuleBreached", message));
        }
        RuleState::Cooling => {
            let cool = rule.map_or_else(String::new, |rule| short(rule.action.cool_down));
            let message = format!(
                "{id}: {named} {now}, mark {mark}: what is in force is held for {cool} after the last breach{preview}"
            );
            out.push(on_node(false, "RuleCooling", message));
        }
        RuleState::Normal => {
            let why = if *unknown_too_long {
                format!("{named} has been unknown for too long")
            } else {
                format!("{named} {now}, mark {mark}")
            };
            let message = format!("{id}: {why}: what is in force is undone{preview}");
            out.push(on_node(*unknown_too_long, "RuleEnded", message));
        }
    }
}

fn closed(effect: TaintEffect, why: &str) -> String {
    let taint = format!("taint {}:{}", crate::cluster::taint::KEY, effect.name());
    if why.is_empty() {
        return taint;
    }
    format!("{why}; {taint}")
}

const fn note(about: About, warning: bool, reason: &'static str, message: String) -> Note {
    Note {
        about,
        warning,
        reason,
        message,
    }
}

const fn on_node(warning: bool, reason: &'static str, message: String) -> Note {
    note(About::Node, warning, reason, message)
}

fn noticed(news: &News, out: &mut Vec<Note>) {
    let (reason, message) = match news {
        News::ThrottleFailed { pod_name, reason } => {
            let pod = pod_name.as_deref().unwrap_or("a pod");
            ("ThrottleFailed", format!("{pod}: {reason}"))
        }
        News::StateNotWritten { reason } => ("StateNotWritten", reason.clone()),
        News::Probe {
            url,
            failure: Some(failure),
        } => ("ProbeFailed", format!("{url}: {failure}")),
        News::Probe { url, failure: None } => {
            let message = format!("{url} answers again");
            return out.push(note(About::Watermark, false, "ProbeAnswers", message));
        }
        _ => return,
    };
    out.push(note(About::Watermark, true, reason, message));
}

#[cfg(test)]
mod tests;
