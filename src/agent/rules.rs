//! The rules that the agent enforces: those of its `NodeWatermark` if it is for this node and understood, else the last
//! valid ones.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::objects::SeenWatermark;
use crate::crd::NodeWatermarkSpec;
use crate::crd::node_watermark::UnenforcedEntry;
use crate::engine::policy::PolicySet;
use crate::engine::time::BootTime;

/// The controller recreates a deleted `NodeWatermark`; after this time without one the rules end.
const RECREATE_TIMEOUT: Duration = Duration::from_mins(1);

/// The known state of an object that is watched by name.
#[derive(Clone, Debug, Default)]
pub enum Seen<T> {
    /// It was never listed.
    #[default]
    Unknown,
    /// It does not exist.
    Absent,
    /// It exists.
    Present(T),
}

impl<T> Seen<T> {
    /// The object, if it exists.
    pub const fn present(&self) -> Option<&T> {
        match self {
            Self::Present(object) => Some(object),
            Self::Unknown | Self::Absent => None,
        }
    }

    /// The same, by reference.
    pub const fn as_ref(&self) -> Seen<&T> {
        match self {
            Self::Unknown => Seen::Unknown,
            Self::Absent => Seen::Absent,
            Self::Present(object) => Seen::Present(object),
        }
    }

    /// Whether it was listed.
    pub const fn is_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// Why the current `NodeWatermark` is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RulesProblem {
    /// It does not exist.
    Missing,
    /// It is for a node of another UID.
    OtherNode(String),
    /// This version does not understand it.
    Unreadable(String),
}

impl fmt::Display for RulesProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(
                f,
                "there is no NodeWatermark for this node: is the controller running?"
            ),
            Self::OtherNode(uid) => write!(
                f,
                "the NodeWatermark is for a node with the UID {uid}, not for this one"
            ),
            Self::Unreadable(why) => write!(f, "the NodeWatermark is not understood: {why}"),
        }
    }
}

/// The rules in force.
#[derive(Debug, Default)]
pub struct Rules {
    policy: Option<Arc<PolicySet>>,
    /// The spec that they come from.
    spec: Option<Arc<NodeWatermarkSpec>>,
    refused: Vec<UnenforcedEntry>,
    problem: Option<RulesProblem>,
    /// Since when there is no `NodeWatermark` for this node.
    missing: Option<BootTime>,
}

impl Rules {
    /// Starts from the rules that an earlier process saved.
    pub fn from_saved(spec: &Arc<NodeWatermarkSpec>) -> Self {
        let mut rules = Self::default();
        rules.apply(spec);
        rules
    }

    /// The rules to enforce; `None` if none are known yet.
    pub const fn policy(&self) -> Option<&Arc<PolicySet>> {
        self.policy.as_ref()
    }

    /// The spec that the rules come from; `None` if it is deleted.
    pub const fn spec(&self) -> Option<&Arc<NodeWatermarkSpec>> {
        self.spec.as_ref()
    }

    /// The parts that are not enforced.
    pub fn refused(&self) -> &[UnenforcedEntry] {
        &self.refused
    }

    /// Why the current `NodeWatermark` is not enforced.
    pub const fn problem(&self) -> Option<&RulesProblem> {
        self.problem.as_ref()
    }

    /// Evaluates the current `NodeWatermark` and the node's UID; true if the rules changed.
    pub fn evaluate(
        &mut self,
        seen: Seen<&SeenWatermark>,
        node_uid: Option<&str>,
        now: BootTime,
    ) -> bool {
        let watermark = match (seen, node_uid) {
            (Seen::Unknown, _) | (Seen::Present(_), None) => return false,
            (Seen::Absent, _) => return self.keep_while_missing(RulesProblem::Missing, now),
            (Seen::Present(watermark), Some(_)) => watermark,
        };
        match &watermark.spec {
            Err(why) => self.keep_last(why),
            Ok(spec) if Some(&*spec.node_uid) != node_uid => {
                self.keep_while_missing(RulesProblem::OtherNode(spec.node_uid.clone()), now)
            }
            Ok(spec) => {
                self.missing = None;
                self.apply(spec)
            }
        }
    }

    fn apply(&mut self, spec: &Arc<NodeWatermarkSpec>) -> bool {
        let known = self.spec.as_ref().is_some_and(|known| known == spec);
        if known {
            self.problem = None;
            return false;
        }
        match spec.read() {
            Err(why) => self.keep_last(&why.to_string()),
            Ok(read) => {
                if self.policy.as_deref() != Some(&read.policy) {
                    self.policy = Some(Arc::new(read.policy));
                }
                self.refused = read.refused;
                self.problem = None;
                self.spec = Some(Arc::clone(spec));
                true
            }
        }
    }

    /// Keeps the last valid rules: what is not understood may concern every rule.
    fn keep_last(&mut self, why: &str) -> bool {
        self.missing = None;
        if !matches!(&self.problem, Some(RulesProblem::Unreadable(known)) if known == why) {
            self.problem = Some(RulesProblem::Unreadable(why.to_owned()));
        }
        false
    }

    fn keep_while_missing(&mut self, problem: RulesProblem, now: BootTime) -> bool {
        let since = *self.missing.get_or_insert(now);
        if self.problem.as_ref() != Some(&problem) {
            self.problem = Some(problem);
        }
        if now.since(since) < RECREATE_TIMEOUT {
            return false;
        }
        self.refused.clear();
        let ended = self.policy.as_deref() != Some(&PolicySet::default());
        let ended = self.spec.take().is_some() || ended;
        if ended {
            self.policy = Some(Arc::default());
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const NODE: Option<&str> = Some("node-uid");

    fn spec(changes: &Value) -> SeenWatermark {
        let mut spec = json!({
            "nodeUID": "node-uid",
            "hash": "h",
            "rules": [{
                "id": "q/cpu", "metric": "cpu_total_usage", "watermark": 4000.0, "avoidanceThreshold": 1,
                "restoreThreshold": 1, "sampleTTLSeconds": 60, "action": "close",
                "strategy": "Enforce",
            }],
            "actions": [{"name": "close", "coolDownSeconds": 300, "disableScheduling": "NoSchedule"}],
        });
        for (key, value) in changes.as_object().expect("fields") {
            spec[key] = value.clone();
        }
        watermark(&spec)
    }

    fn watermark(spec: &Value) -> SeenWatermark {
        let object = json!({"metadata": {"name": "n", "generation": 1}, "spec": spec});
        serde_json::from_value(object).expect("an object")
    }

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    fn count(rules: &Rules) -> Option<usize> {
        rules.policy().map(|policy| policy.rules.len())
    }

    #[test]
    fn the_rules_of_this_node_are_taken_once() {
        let mut rules = Rules::default();
        assert!(!rules.evaluate(Seen::Unknown, NODE, at(0)));
        assert_eq!(count(&rules), None, "not known yet");
        let seen = Seen::Present(spec(&json!({})));
        assert!(
            !rules.evaluate(seen.as_ref(), None, at(1)),
            "the node is not known"
        );
        assert!(rules.evaluate(seen.as_ref(), NODE, at(2)));
        assert!(!rules.evaluate(seen.as_ref(), NODE, at(3)));
        assert_eq!(count(&rules), Some(1));
        let action = &rules.policy().expect("rules").rules[0].action;
        let no_schedule = crate::engine::policy::TaintEffect::NoSchedule;
        assert_eq!(action.scheduling, Some(no_schedule));
        let soft = Seen::Present(spec(&json!({"softenScheduling": true})));
        assert!(rules.evaluate(soft.as_ref(), NODE, at(4)));
        let action = &rules.policy().expect("rules").rules[0].action;
        assert!(action.scheduling < Some(no_schedule));
    }

    #[test]
    fn the_last_rules_stay_when_a_spec_is_not_understood() {
        let mut rules = Rules::default();
        rules.evaluate(Seen::Present(&spec(&json!({}))), NODE, at(0));
        let newer = Seen::Present(spec(&json!({"moonPhase": "full"})));
        assert!(!rules.evaluate(newer.as_ref(), NODE, at(1)));
        assert_eq!(count(&rules), Some(1));
        let problem = rules.problem().expect("a problem");
        assert!(problem.to_string().contains("spec.moonPhase"), "{problem}");
        let broken = watermark(&json!({"rules": 7}));
        assert!(!rules.evaluate(Seen::Present(&broken), NODE, at(999)));
        assert_eq!(count(&rules), Some(1));
        rules.evaluate(Seen::Present(&spec(&json!({}))), NODE, at(1000));
        assert_eq!(rules.problem(), None);
    }

    #[test]
    fn a_rule_of_a_later_version_is_left_out_alone() {
        let mut seen = json!({"rules": []});
        let known = spec(&json!({}));
        let known = serde_json::to_value(&*known.spec.expect("spec")).expect("JSON");
        seen["rules"] = known["rules"].clone();
        let mut strange = known["rules"][0].clone();
        strange["id"] = "q/strange".into();
        strange["gravity"] = 7.into();
        seen["rules"].as_array_mut().expect("a list").push(strange);
        let mut rules = Rules::default();
        assert!(rules.evaluate(Seen::Present(&spec(&seen)), NODE, at(0)));
        assert_eq!(count(&rules), Some(1));
        assert_eq!(rules.refused()[0].name, "q/strange");
    }

    #[test]
    fn deleted_rules_end_after_a_minute() {
        let mut rules = Rules::default();
        rules.evaluate(Seen::Present(&spec(&json!({}))), NODE, at(0));
        assert!(!rules.evaluate(Seen::Absent, NODE, at(100)));
        assert!(!rules.evaluate(Seen::Absent, NODE, at(159)));
        assert_eq!(count(&rules), Some(1));
        // Created again in time: the minute starts again next time.
        rules.evaluate(Seen::Present(&spec(&json!({}))), NODE, at(159));
        assert!(!rules.evaluate(Seen::Absent, NODE, at(200)));
        assert!(rules.evaluate(Seen::Absent, NODE, at(260)));
        assert_eq!(count(&rules), Some(0));
        assert_eq!(rules.problem(), Some(&RulesProblem::Missing));
        assert!(rules.evaluate(Seen::Present(&spec(&json!({}))), NODE, at(300)));
        assert_eq!(count(&rules), Some(1));
    }

    #[test]
    fn an_unreadable_watermark_restarts_the_minute() {
        let mut rules = Rules::default();
        rules.evaluate(Seen::Present(&spec(&json!({}))), NODE, at(0));
        assert!(!rules.evaluate(Seen::Absent, NODE, at(100)));
        let broken = watermark(&json!({"rules": 7}));
        assert!(!rules.evaluate(Seen::Present(&broken), NODE, at(150)));
        assert!(!rules.evaluate(Seen::Absent, NODE, at(200)));
        assert!(!rules.evaluate(Seen::Absent, NODE, at(259)));
        assert_eq!(count(&rules), Some(1));
        assert!(rules.evaluate(Seen::Absent, NODE, at(260)));
    }

    #[test]
    fn the_watermark_of_a_former_node_is_not_enforced() {
        let mut rules = Rules::default();
        let other = Seen::Present(spec(&json!({"nodeUID": "former"})));
        assert!(!rules.evaluate(other.as_ref(), NODE, at(0)));
        assert_eq!(count(&rules), None);
        assert!(rules.evaluate(other.as_ref(), NODE, at(61)));
        assert_eq!(count(&rules), Some(0));
        let problem = rules.problem().expect("a problem");
        assert!(problem.to_string().contains("former"), "{problem}");
    }
}
