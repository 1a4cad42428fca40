//! What agents say of their nodes: rules that they don't keep or can't judge, and whoever undoes what they do.

use std::collections::BTreeMap;

use serde_json::Value;

use super::finding::{Finding, define, finding, list};
use super::read::Seen;
use super::tables::cells;
use crate::crd::node_watermark::condition;
use crate::engine::plan::Unknown;
use crate::node::machine::wording::{count, unknown_reason};

/// What a column of the table may tell.
struct Check {
    /// What is told of a node.
    column: &'static str,
    /// The column that says whether it is wrong.
    why: &'static str,
    /// Whether what it says is wrong. What another check reports, or what passes by itself, is not.
    is_wrong: fn(&str) -> bool,
    what: &'static str,
    cure: &'static str,
}

const CHECKS: [Check; 5] = [
    Check {
        column: "Ready",
        why: "Ready",
        is_wrong: |why| {
            let well = ["", "RulesKept", "Starting", "Stopped", "AgentEnded"];
            !well.contains(&why) && why != condition::NONE_JUDGED
        },
        what: "the current rules are not enforced",
        cure: "shows why; if it is not clear, use one version of agents and controller",
    },
    Check {
        column: "Ready",
        why: "Ready",
        is_wrong: |why| why == condition::NONE_JUDGED,
        what: "the rules are enforced, but none can be evaluated",
        cure: "shows why for each rule; check its metric or its probe",
    },
    Check {
        column: "Degraded",
        why: "Degraded",
        is_wrong: |why| !["", "AllInOrder"].contains(&why),
        what: "some actions fail",
        cure: "shows what, and why",
    },
    Check {
        column: "Contested",
        why: "Contested",
        is_wrong: |why| !["", "NotContested"].contains(&why),
        what: "another writer reverts what the agent does",
        cure: "shows what; stop the other writer, for example an agent of crane",
    },
    Check {
        column: LAST,
        why: "Because",
        is_wrong: |why| {
            let passing = [Unknown::Rebased, Unknown::Sparse].map(unknown_reason);
            !why.is_empty() && !passing.contains(&why)
        },
        what: "this rule can't be evaluated",
        cure: "shows why, and whether there are more; check the name of its metric, or its probe",
    },
];
/// A definition that has it has the others too.
const LAST: &str = "Unjudged";

/// One finding for each thing that is wrong, with its nodes.
pub(super) fn nodes(seen: &Seen) -> Vec<Finding> {
    let Ok(table) = &seen.watermarks else {
        return Vec::new();
    };
    let mut columns = table["columnDefinitions"].as_array().into_iter().flatten();
    if !columns.any(|it: &Value| it["name"] == LAST) {
        let what = "it is from an older version, and does not show the state of agents";
        return vec![finding("definition of NodeWatermark", what, define(seen))];
    }
    CHECKS
        .iter()
        .flat_map(|check| check.findings(seen))
        .collect()
}

impl Check {
    fn findings(&self, seen: &Seen) -> Vec<Finding> {
        let mut told: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for [node, said, why] in cells(&seen.watermarks, ["Name", self.column, self.why]) {
            if (self.is_wrong)(why) {
                told.entry(said).or_default().push(node);
            }
        }
        let findings = told.into_iter().map(|(said, nodes)| {
            let cure = format!("kubectl describe nodewatermark {} {}", nodes[0], self.cure);
            let on = count(nodes.len(), "node");
            let what = format!("{said}: {} on {on}: {}", self.what, list(nodes));
            finding("agents", what, cure)
        });
        findings.collect()
    }
}
