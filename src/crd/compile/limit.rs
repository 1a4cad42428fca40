//! What one node can keep at most: an API server would refuse a `NodeWatermark` of more, and with it every other edit.

use std::collections::BTreeMap;

use super::super::finding::Reason;
use super::super::node_watermark::{MOST_POD_POLICIES, MOST_RULES};
use super::super::objects::Kind;
use super::Findings;
use crate::engine::policy::{PodPolicy, Rule};

/// At most so many names stand in a message.
const MOST_NAMED: usize = 10;

/// Keeps the first rules in order of id: the others are off, and their objects say so.
pub(super) fn rules(rules: &mut Vec<Rule>, findings: &mut Findings) {
    let all = rules.len();
    let left_out = rules.split_off(all.min(MOST_RULES));
    let mut by_object: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for rule in &left_out {
        if let Some((object, name)) = rule.id.0.split_once('/') {
            by_object.entry(object).or_default().push(name);
        }
    }
    for (object, names) in by_object {
        let message = format!(
            "a node keeps at most {MOST_RULES} rules, in order of NodeQOS and rule, and {all} are meant for one: there \
             {} are off; narrow spec.selector of one of these NodeQOS, or remove rules",
            list(&names)
        );
        let mut about = findings.about(Kind::NodeQos, object);
        about.error(Reason::TooMany, "spec.rules", message);
    }
}

/// Keeps the first pod policies in order of name: the others allow nothing, and say so.
pub(super) fn pods(policies: &mut Vec<PodPolicy>, findings: &mut Findings) {
    let all = policies.len();
    for policy in policies.split_off(all.min(MOST_POD_POLICIES)) {
        let message = format!(
            "there are {all} PodQOS, and only the first {MOST_POD_POLICIES} in order of name are in force: this one \
             allows nothing; put several into one"
        );
        let mut about = findings.about(Kind::PodQos, &policy.name);
        about.error(Reason::TooMany, "", message);
    }
}

fn list(names: &[&str]) -> String {
    let first = &names[..names.len().min(MOST_NAMED)];
    match names.len() - first.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
