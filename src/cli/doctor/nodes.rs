//! Checks of what agents report about their nodes, from the columns of `NodeWatermark`s.

use std::collections::BTreeMap;

use super::super::server_table::ServerTable;
use super::finding::{DoctorFinding, finding, list};
use super::installation::install_command;
use super::snapshot::ClusterSnapshot;
use crate::crd::node_watermark::condition;
use crate::engine::plan::Unknown;
use crate::messages::{count, unknown_reason};

/// A check of a column.
struct ColumnCheck {
    /// The column that a finding starts with.
    column: &'static str,
    /// The column with the reason.
    reason: &'static str,
    /// Whether the reason is a problem, neither temporary nor reported by another check.
    is_problem: fn(&str) -> bool,
    what: &'static str,
    fix: &'static str,
}

const CHECKS: [ColumnCheck; 7] = [
    ColumnCheck {
        column: "Ready",
        reason: "Ready",
        is_problem: |reason| {
            let healthy = [
                "",
                condition::RULES_ENFORCED,
                condition::STARTING,
                condition::STOPPED,
                condition::AGENT_ENDED,
            ];
            !healthy.contains(&reason) && reason != condition::NONE_EVALUATED
        },
        what: "the current rules are not enforced",
        fix: "shows why; if it is not clear, use one version of agents and controller",
    },
    ColumnCheck {
        column: "Ready",
        reason: "Ready",
        is_problem: |reason| reason == condition::NONE_EVALUATED,
        what: "the rules are enforced, but none can be evaluated",
        fix: "shows why for each rule; check its metric or its probe",
    },
    ColumnCheck {
        column: "Degraded",
        reason: "Degraded",
        is_problem: |reason| !["", condition::ALL_IN_ORDER].contains(&reason),
        what: "some actions fail",
        fix: "shows what, and why",
    },
    ColumnCheck {
        column: "Ineffective",
        reason: "Ineffective",
        is_problem: |reason| !["", condition::ACTIONS_EFFECTIVE].contains(&reason),
        what: "actions have no effect",
        fix: "shows on which pods, and why: another writer (such as an agent of crane), a sched_ext scheduler, a wrong layout",
    },
    ColumnCheck {
        column: "Idle",
        reason: "Idle",
        is_problem: |reason| reason == condition::IDLE_UNSAFE,
        what: "pods get the lowest CPU weight instead of the idle class, since the kubelet would reject new pods",
        fix: "shows more; to have the idle class there, start the kubelet with --feature-gates=InPlacePodLevelResourcesVerticalScaling=false",
    },
    ColumnCheck {
        column: "BatchWeight",
        reason: "BatchWeight",
        is_problem: |reason| reason == condition::TOO_MANY_BUSY_PODS,
        what: "too many busy batch pods for the idle class to protect",
        fix: "shows more; make batch pods BestEffort, which holds for any number, or add a rule on protected_cpu_delay_max with CPU quotas",
    },
    ColumnCheck {
        column: "Unknown",
        reason: "Reason",
        is_problem: |reason| {
            let temporary = [Unknown::Rebased, Unknown::Sparse].map(unknown_reason);
            !reason.is_empty() && !temporary.contains(&reason)
        },
        what: "this rule can't be evaluated",
        fix: "shows why, and whether there are more; check the name of its metric, or its probe",
    },
];
/// The newest column: a definition with it has the others too.
const NEWEST: &str = "BatchWeight";

/// One finding for each problem, with its nodes.
pub(super) fn reported_problems(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let Ok(table) = &snapshot.watermarks else {
        return Vec::new();
    };
    if !table.has(NEWEST) {
        let what = "it is from an older version, and does not show the state of agents";
        let about = "definition of NodeWatermark";
        return vec![finding(about, what, install_command(snapshot))];
    }
    let checks = CHECKS.iter();
    checks.flat_map(|check| check.findings(table)).collect()
}

impl ColumnCheck {
    fn findings(&self, table: &ServerTable) -> Vec<DoctorFinding> {
        let mut problems: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for [node, problem, reason] in table.cells(["Name", self.column, self.reason]) {
            if (self.is_problem)(reason) {
                problems.entry(problem).or_default().push(node);
            }
        }
        let findings = problems.into_iter().map(|(problem, nodes)| {
            let fix = format!("kubectl describe nodewatermark {} {}", nodes[0], self.fix);
            let on = count(nodes.len(), "node");
            let what = format!("{problem}: {} on {on}: {}", self.what, list(nodes));
            finding("agents", what, fix)
        });
        findings.collect()
    }
}
