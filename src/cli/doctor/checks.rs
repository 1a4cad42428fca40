//! All checks of `plimsoll doctor`.

use super::finding::DoctorFinding;
use super::pods::running;
use super::snapshot::{ClusterSnapshot, items};
use super::{admission, agents, flow, installation, nodes, placement, policies, scheduler_api};

/// How a check's results are reported.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Level {
    /// As findings, which make the command fail.
    Problem,
    /// As notes: they may be intended.
    Note,
    Off,
}

enum Check {
    /// Has one finding at most.
    One(fn(&ClusterSnapshot) -> Option<DoctorFinding>),
    /// Has a finding for each object.
    Each(fn(&ClusterSnapshot) -> Vec<DoctorFinding>),
}

use Check::{Each, One};
use Level::{Note, Off, Problem};

/// Each check with its level, and its level with `--only agents`; causes stand before their effects.
const CHECKS: &[(Check, Level, Level)] = &[
    (One(installation::kubernetes), Problem, Problem),
    (Each(installation::unread), Problem, Problem),
    (Each(installation::emergency_stop), Problem, Off),
    (Each(installation::crds), Problem, Off),
    (One(installation::no_controller), Problem, Off),
    (Each(installation::replicas), Problem, Off),
    (One(installation::leader), Problem, Off),
    (One(installation::installations), Problem, Off),
    (One(installation::aggregation), Problem, Off),
    (One(installation::api_service), Problem, Off),
    (Each(agents::pod_security), Problem, Problem),
    (One(agents::overlapping_layouts), Problem, Problem),
    (One(agents::no_agents), Problem, Problem),
    (Each(agents::unused_layouts), Problem, Off),
    (Each(agents::unobserved), Off, Problem),
    (Each(agents::uncreated), Problem, Problem),
    (Each(agents::unready), Problem, Problem),
    (Each(agents::outdated), Off, Problem),
    (One(agents::no_layout_used), Off, Problem),
    (One(agents::unselected_nodes), Problem, Note),
    (One(agents::skipped_nodes), Off, Note),
    (One(agents::versions), Problem, Off),
    (Each(installation::permissions), Problem, Off),
    (One(installation::unknown_permissions), Problem, Off),
    (One(agents::missing_leases), Problem, Off),
    (One(agents::unresponsive), Problem, Off),
    (One(agents::clocks), Problem, Off),
    (One(admission::unbound_policies), Problem, Off),
    (One(admission::ineffective_policies), Problem, Off),
    (One(admission::untested_policies), Problem, Off),
    (One(admission::evictions), Problem, Off),
    (One(flow::flow_schemas), Problem, Off),
    (One(placement::soft_taint_with_karpenter), Problem, Off),
    (One(placement::unlabelled_nodes), Problem, Off),
    (One(placement::low_labels), Problem, Off),
    (One(placement::other_crane_writers), Problem, Off),
    (One(placement::stale_crane_annotations), Problem, Off),
    (One(scheduler_api::invalid_policy), Problem, Off),
    (One(installation::missing_watermarks), Problem, Off),
    (Each(nodes::reported_problems), Problem, Off),
    (Each(policies::unevaluated), Problem, Off),
    (Each(policies::conditions), Problem, Off),
    (Each(policies::unmeasurable), Problem, Off),
    (Each(policies::without_nodes), Problem, Off),
    (Each(policies::unused_actions), Problem, Off),
    (Each(policies::without_pods), Note, Off),
    (One(agents::without_image), Note, Note),
    (One(agents::without_toleration), Note, Note),
    (One(admission::not_permitted_to_test), Note, Off),
    (One(flow::no_flow_control), Note, Off),
    (One(placement::unread_label), Note, Off),
    (One(placement::unread_polling), Note, Off),
    (One(scheduler_api::no_requests), Note, Off),
    (One(scheduler_api::suspended_filter), Note, Off),
    (One(placement::policy_without_namespaces), Note, Off),
];

fn run(snapshot: &ClusterSnapshot, wanted: Level) -> Vec<DoctorFinding> {
    let checks = CHECKS.iter().filter(|(_, level, only_agents)| {
        let level = if snapshot.only_agents {
            only_agents
        } else {
            level
        };
        *level == wanted
    });
    let found = checks.flat_map(|(check, ..)| match check {
        One(check) => check(snapshot).into_iter().collect(),
        Each(check) => check(snapshot),
    });
    found.collect()
}

/// The problems of an installation.
pub(super) fn findings(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    run(snapshot, Problem)
}

/// What may be intended.
pub(super) fn notes(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    run(snapshot, Note)
}

/// What was checked, in a line.
pub(super) fn summary(snapshot: &ClusterSnapshot) -> String {
    let version = installation::version_of(snapshot);
    let version = version.map_or_else(|| "?".to_owned(), |it| it.to_string());
    let (nodes, running) = (items(&snapshot.nodes).len(), running(snapshot).len());
    let agents = format!("Kubernetes {version}, {nodes} nodes, {running} agents running");
    if snapshot.only_agents {
        return agents;
    }
    let node_qos = items(&snapshot.node_qos).len();
    let placement = placement::in_effect(snapshot);
    let placement = placement.map_or_else(String::new, |it| format!("; {it}"));
    format!("{agents}, {node_qos} NodeQOS{placement}")
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
