//! The maximum number of rules and pod policies of a node: an API server would reject a larger `NodeWatermark`, and with it
//! every other edit.

use std::collections::BTreeMap;

use super::super::finding::Reason;
use super::super::node_watermark::{MAX_POD_POLICIES, MAX_RULES};
use super::super::objects::Kind;
use super::super::words::named;
use super::Findings;
use crate::engine::policy::{PodPolicy, Rule};

/// The maximum number of names in a message.
const MAX_NAMED: usize = 10;

/// Keeps the first rules by id. The others are off, with a finding for each object.
pub(super) fn rules(rules: &mut Vec<Rule>, findings: &mut Findings) {
    let all = rules.len();
    let left_out = rules.split_off(all.min(MAX_RULES));
    let mut by_object: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for rule in &left_out {
        if let Some((object, name)) = rule.id.0.split_once('/') {
            by_object.entry(object).or_default().push(name);
        }
    }
    for (object, names) in by_object {
        let message = format!(
            "a node has at most {MAX_RULES} rules, in order of NodeQOS and rule name, and {all} rules select the same node: \
             {} are off there; narrow spec.selector of one of these NodeQOS, or remove rules",
            named(&names, MAX_NAMED)
        );
        let mut findings = findings.for_object(Kind::NodeQos, object);
        findings.error(Reason::TooMany, "spec.rules", message);
    }
}

/// Keeps the first pod policies by name. The others allow nothing, with a finding for each.
pub(super) fn pods(policies: &mut Vec<PodPolicy>, findings: &mut Findings) {
    let all = policies.len();
    for policy in policies.split_off(all.min(MAX_POD_POLICIES)) {
        let message = format!(
            "there are {all} PodQOS, and only the first {MAX_POD_POLICIES} by name are in force: this one \
             allows nothing; merge several into one"
        );
        let mut findings = findings.for_object(Kind::PodQos, &policy.name);
        findings.error(Reason::TooMany, "", message);
    }
}
