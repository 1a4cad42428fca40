//! Checks of the API server's flow control: heartbeats and the election must not wait for other requests.

use k8s_openapi::api::flowcontrol::v1::FlowSchema;

use super::finding::{DoctorFinding, REINSTALL, finding, list};
use super::snapshot::{ClusterSnapshot, SnapshotError, accounts, items};

/// The chart's flow schemas; each has a priority level of the same name.
fn wanted(snapshot: &ClusterSnapshot) -> Vec<String> {
    let agents = accounts(&snapshot.daemon_sets).into_keys();
    let agents = agents.flat_map(|(_, account)| [format!("{account}-leases"), account]);
    let controllers = accounts(&snapshot.deployments).into_keys();
    let controllers = controllers.map(|(_, account)| format!("{account}-election"));
    agents.chain(controllers).collect()
}

fn is_known(snapshot: &ClusterSnapshot) -> bool {
    let schemas = snapshot.flow_schemas.as_ref().err();
    let levels = snapshot.priority_levels.as_ref().err();
    schemas
        .into_iter()
        .chain(levels)
        .all(SnapshotError::is_missing)
}

/// Whether the chart was installed without flow control.
fn is_off(snapshot: &ClusterSnapshot) -> bool {
    items(&snapshot.flow_schemas).is_empty() && items(&snapshot.priority_levels).is_empty()
}

fn has_priority(snapshot: &ClusterSnapshot, name: &str) -> bool {
    let leads_there = |schema: &FlowSchema| {
        let spec = schema.spec.as_ref();
        schema.metadata.name.as_deref() == Some(name)
            && spec.is_some_and(|it| it.priority_level_configuration.name == name)
    };
    let mut levels = items(&snapshot.priority_levels).iter();
    items(&snapshot.flow_schemas).iter().any(leads_there)
        && levels.any(|it| it.metadata.name.as_deref() == Some(name))
}

/// Missing or unbound flow schemas, while there are others.
pub(super) fn flow_schemas(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let mut missing = wanted(snapshot);
    missing.retain(|name| !has_priority(snapshot, name));
    if !is_known(snapshot) || is_off(snapshot) || missing.is_empty() {
        return None;
    }
    let what = format!(
        "no FlowSchema with a PriorityLevelConfiguration: {}; many other requests can delay heartbeats or the election",
        list(missing)
    );
    Some(finding("flow control", what, REINSTALL))
}

/// A note: `flowControl.enabled=false` is a choice.
pub(super) fn no_flow_control(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    if wanted(snapshot).is_empty() || !is_known(snapshot) || !is_off(snapshot) {
        return None;
    }
    let what = "there is no FlowSchema: heartbeats and the election share a queue with the requests of all ServiceAccounts";
    let fix =
        "nothing, if flowControl.enabled=false is intended; otherwise helm upgrade without it";
    Some(finding("flow control", what, fix))
}
