//! Which rules the agent keeps: what its `NodeWatermark` says, where that is meant for this node and understood; else
//! the last that were.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::objects::SeenWatermark;
use crate::crd::NodeWatermarkSpec;
use crate::crd::node_watermark::Refusal;
use crate::engine::policy::PolicySet;
use crate::engine::time::BootTime;

/// A `NodeWatermark` that is gone is made anew by the controller; rules that nobody made anew for so long are over.
const REMADE_WITHIN: Duration = Duration::from_mins(1);

/// What is known of an object that is watched by name.
#[derive(Clone, Debug, Default)]
pub enum Seen<T> {
    /// Nothing: it was never listed.
    #[default]
    Unknown,
    /// There is none.
    Absent,
    /// It is there.
    Present(T),
}

impl<T> Seen<T> {
    /// It, where it is there.
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

    /// Whether there is one is known.
    pub const fn is_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// Why not (all of) the `NodeWatermark` is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// There is none.
    Missing,
    /// It is for a node of another UID.
    OtherNode(String),
    /// It says what this version does not understand.
    Unreadable(String),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(
                f,
                "there is no NodeWatermark for this node: does the controller run?"
            ),
            Self::OtherNode(uid) => write!(
                f,
                "the NodeWatermark is for a node with the UID {uid}, which this is not"
            ),
            Self::Unreadable(why) => write!(f, "the NodeWatermark is not understood: {why}"),
        }
    }
}

/// The rules in force.
#[derive(Debug, Default)]
pub struct Rules {
    policy: Option<Arc<PolicySet>>,
    /// What they come from.
    spec: Option<Arc<NodeWatermarkSpec>>,
    refused: Vec<Refusal>,
    trouble: Option<Trouble>,
    /// Since when there is none for this node.
    missing: Option<BootTime>,
}

impl Rules {
    /// The rules that an earlier process kept, until the API server says otherwise.
    pub fn kept(spec: &Arc<NodeWatermarkSpec>) -> Self {
        let mut rules = Self::default();
        rules.take(spec);
        rules
    }

    /// What to keep; `None` where nothing is known yet: hold.
    pub const fn policy(&self) -> Option<&Arc<PolicySet>> {
        self.policy.as_ref()
    }

    /// What the rules come from; `None` where that is gone.
    pub const fn spec(&self) -> Option<&Arc<NodeWatermarkSpec>> {
        self.spec.as_ref()
    }

    /// What is left out of them.
    pub fn refused(&self) -> &[Refusal] {
        &self.refused
    }

    /// Why not the last `NodeWatermark` is kept.
    pub const fn trouble(&self) -> Option<&Trouble> {
        self.trouble.as_ref()
    }

    /// Looks at what was seen of the `NodeWatermark`, and of the node's UID; true where something else is kept now.
    pub fn judge(
        &mut self,
        seen: Seen<&SeenWatermark>,
        node_uid: Option<&str>,
        now: BootTime,
    ) -> bool {
        let watermark = match (seen, node_uid) {
            (Seen::Unknown, _) | (Seen::Present(_), None) => return false,
            (Seen::Absent, _) => return self.miss(Trouble::Missing, now),
            (Seen::Present(watermark), Some(_)) => watermark,
        };
        match &watermark.spec {
            Err(why) => self.hold(why),
            Ok(spec) if Some(&*spec.node_uid) != node_uid => {
                self.miss(Trouble::OtherNode(spec.node_uid.clone()), now)
            }
            Ok(spec) => {
                self.missing = None;
                self.take(spec)
            }
        }
    }

    fn take(&mut self, spec: &Arc<NodeWatermarkSpec>) -> bool {
        let known = self.spec.as_ref().is_some_and(|known| known == spec);
        if known {
            self.trouble = None;
            return false;
        }
        match spec.read() {
            Err(why) => self.hold(&why.to_string()),
            Ok(read) => {
                if self.policy.as_deref() != Some(&read.policy) {
                    self.policy = Some(Arc::new(read.policy));
                }
                self.refused = read.refused;
                self.trouble = None;
                self.spec = Some(Arc::clone(spec));
                true
            }
        }
    }

    /// What is not understood may concern every rule: the last that were understood stay.
    fn hold(&mut self, why: &str) -> bool {
        self.missing = None;
        if !matches!(&self.trouble, Some(Trouble::Unreadable(known)) if known == why) {
            self.trouble = Some(Trouble::Unreadable(why.to_owned()));
        }
        false
    }

    fn miss(&mut self, trouble: Trouble, now: BootTime) -> bool {
        let since = *self.missing.get_or_insert(now);
        if self.trouble.as_ref() != Some(&trouble) {
            self.trouble = Some(trouble);
        }
        if now.since(since) < REMADE_WITHIN {
            return false;
        }
        self.refused.clear();
        let over = self.policy.as_deref() != Some(&PolicySet::default());
        let over = self.spec.take().is_some() || over;
        if over {
            self.policy = Some(Arc::default());
        }
        over
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
                "restoreThreshold": 1, "periodSeconds": 10, "sampleTTLSeconds": 60, "action": "close",
                "strategy": "None",
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
    fn the_rules_of_this_node_are_kept_and_told_once() {
        let mut rules = Rules::default();
        assert!(!rules.judge(Seen::Unknown, NODE, at(0)));
        assert_eq!(count(&rules), None, "not known: hold");
        let seen = Seen::Present(spec(&json!({})));
        assert!(
            !rules.judge(seen.as_ref(), None, at(1)),
            "the node is not known"
        );
        assert!(rules.judge(seen.as_ref(), NODE, at(2)));
        assert!(!rules.judge(seen.as_ref(), NODE, at(3)));
        assert_eq!(count(&rules), Some(1));
        let action = &rules.policy().expect("rules").rules[0].action;
        let no_schedule = crate::engine::policy::TaintEffect::NoSchedule;
        assert_eq!(action.scheduling, Some(no_schedule));
        let soft = Seen::Present(spec(&json!({"softenScheduling": true})));
        assert!(rules.judge(soft.as_ref(), NODE, at(4)));
        let action = &rules.policy().expect("rules").rules[0].action;
        assert!(action.scheduling < Some(no_schedule));
    }

    #[test]
    fn what_is_not_understood_holds_the_last_rules_and_says_so() {
        let mut rules = Rules::default();
        rules.judge(Seen::Present(&spec(&json!({}))), NODE, at(0));
        let later = Seen::Present(spec(&json!({"moonPhase": "full"})));
        assert!(!rules.judge(later.as_ref(), NODE, at(1)));
        assert_eq!(count(&rules), Some(1));
        let trouble = rules.trouble().expect("told");
        assert!(trouble.to_string().contains("spec.moonPhase"), "{trouble}");
        let broken = watermark(&json!({"rules": 7}));
        assert!(!rules.judge(Seen::Present(&broken), NODE, at(999)));
        assert_eq!(count(&rules), Some(1));
        rules.judge(Seen::Present(&spec(&json!({}))), NODE, at(1000));
        assert_eq!(rules.trouble(), None);
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
        assert!(rules.judge(Seen::Present(&spec(&seen)), NODE, at(0)));
        assert_eq!(count(&rules), Some(1));
        assert_eq!(rules.refused()[0].name, "q/strange");
    }

    #[test]
    fn rules_that_are_gone_are_held_for_a_minute_and_then_over() {
        let mut rules = Rules::default();
        rules.judge(Seen::Present(&spec(&json!({}))), NODE, at(0));
        assert!(!rules.judge(Seen::Absent, NODE, at(100)));
        assert!(!rules.judge(Seen::Absent, NODE, at(159)));
        assert_eq!(count(&rules), Some(1));
        // Made anew in time: the minute begins anew next time.
        rules.judge(Seen::Present(&spec(&json!({}))), NODE, at(159));
        assert!(!rules.judge(Seen::Absent, NODE, at(200)));
        assert!(rules.judge(Seen::Absent, NODE, at(260)));
        assert_eq!(count(&rules), Some(0));
        assert_eq!(rules.trouble(), Some(&Trouble::Missing));
        assert!(rules.judge(Seen::Present(&spec(&json!({}))), NODE, at(300)));
        assert_eq!(count(&rules), Some(1));
    }

    #[test]
    fn what_is_not_understood_is_there_all_the_same_so_that_the_minute_begins_anew() {
        let mut rules = Rules::default();
        rules.judge(Seen::Present(&spec(&json!({}))), NODE, at(0));
        assert!(!rules.judge(Seen::Absent, NODE, at(100)));
        let broken = watermark(&json!({"rules": 7}));
        assert!(!rules.judge(Seen::Present(&broken), NODE, at(150)));
        assert!(!rules.judge(Seen::Absent, NODE, at(200)));
        assert!(!rules.judge(Seen::Absent, NODE, at(259)));
        assert_eq!(count(&rules), Some(1));
        assert!(rules.judge(Seen::Absent, NODE, at(260)));
    }

    #[test]
    fn the_watermark_of_another_node_of_the_same_name_is_not_kept() {
        let mut rules = Rules::default();
        let other = Seen::Present(spec(&json!({"nodeUID": "former"})));
        assert!(!rules.judge(other.as_ref(), NODE, at(0)));
        assert_eq!(count(&rules), None);
        assert!(rules.judge(other.as_ref(), NODE, at(61)));
        assert_eq!(count(&rules), Some(0));
        let trouble = rules.trouble().expect("told");
        assert!(trouble.to_string().contains("former"), "{trouble}");
    }
}
