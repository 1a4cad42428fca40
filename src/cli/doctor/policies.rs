//! Checks of policies without effect.

use super::finding::{DoctorFinding, finding, full_name};
use super::installation::message;
use super::snapshot::{ClusterSnapshot, Policy, PolicyStatus, Read, items};

/// A metric that agents can't see from their own PID namespace.
const UNMEASURABLE: &str = "container_sched_run_queue_time";

/// A policy, with its name in findings.
type Named<'a> = (String, &'a Policy);

fn named<'a>(
    kind: &'static str,
    policies: &'a Read<Vec<Policy>>,
) -> impl Iterator<Item = Named<'a>> {
    let policies = items(policies).iter();
    policies.map(move |it| (format!("{kind} {}", full_name(it)), it))
}

fn node_qos(snapshot: &ClusterSnapshot) -> impl Iterator<Item = Named<'_>> {
    named("NodeQOS", &snapshot.node_qos)
}

fn pod_qos(snapshot: &ClusterSnapshot) -> impl Iterator<Item = Named<'_>> {
    named("PodQOS", &snapshot.pod_qos)
}

fn actions(snapshot: &ClusterSnapshot) -> impl Iterator<Item = Named<'_>> {
    named("AvoidanceAction", &snapshot.actions)
}

fn all(snapshot: &ClusterSnapshot) -> impl Iterator<Item = Named<'_>> {
    node_qos(snapshot)
        .chain(pod_qos(snapshot))
        .chain(actions(snapshot))
}

/// The status of a policy, if it is about its current spec; else what it lacks.
fn evaluation(policy: &Policy) -> Result<&PolicyStatus, &'static str> {
    let status = policy.status.as_ref();
    let status = status.filter(|it| it.conditions.is_some());
    let status = status.ok_or("the controller has not evaluated it yet")?;
    if status.observed_generation < policy.metadata.generation {
        return Err("the controller has not evaluated its last edit yet");
    }
    Ok(status)
}

pub(super) fn unevaluated(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let fix = "check that the controller runs: it evaluates policies within seconds";
    let check = |(about, policy): Named<'_>| Some(finding(about, evaluation(policy).err()?, fix));
    all(snapshot).filter_map(check).collect()
}

/// Policies that are not in force, in part or as a whole, or not on all nodes.
pub(super) fn conditions(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let check = |(about, policy): Named<'_>| {
        let conditions = evaluation(policy).ok()?.conditions.as_ref()?;
        let find = |kind: &str, status: &str| {
            let mut conditions = conditions.iter();
            conditions.find(|it| it.kind == kind && it.status == status)
        };
        let stuck = find("RolledOut", "False");
        let stuck = stuck.filter(|it| ["CanariesAct", "NoCanary"].contains(&&*it.reason));
        let (condition, fix) = if let Some(invalid) = find("Ready", "False") {
            let fix = "correct it as the message says; plimsoll check shows line and field";
            (invalid, fix)
        } else if let Some(ignored) = find("FieldsNotEnforced", "True") {
            let fix = "remove the fields, or accept that they do nothing";
            (ignored, fix)
        } else {
            let fix = "follow the message; until then the nodes use the policy as it was before";
            (stuck?, fix)
        };
        let what = message(Some(&condition.message), Some(&condition.reason));
        Some(finding(about, what, fix))
    };
    all(snapshot).filter_map(check).collect()
}

/// Rules on a metric that no agent can measure.
pub(super) fn unmeasurable(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let check = |(about, policy): Named<'_>| {
        evaluation(policy).ok()?;
        let mut rules = policy.spec.as_ref()?["rules"].as_array()?.iter();
        let rule = rules.find(|it| it["metricRule"]["name"] == UNMEASURABLE)?;
        let name = rule["name"].as_str().unwrap_or("?");
        let what = format!("rule {name} never acts: no agent in a pod can measure {UNMEASURABLE}");
        let fix = "use another metric, such as protected_cpu_delay_max or cpu_total_utilization";
        Some(finding(about, what, fix))
    };
    node_qos(snapshot).filter_map(check).collect()
}

pub(super) fn without_nodes(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let unmatched =
        |(_, it): &Named<'_>| evaluation(it).is_ok_and(|it| it.matched_nodes == Some(0));
    let fix = "correct spec.selector, or delete it";
    let unmatched = node_qos(snapshot).filter(unmatched);
    let found = unmatched.map(|(about, _)| finding(about, "it matches no node", fix));
    found.collect()
}

pub(super) fn unused_actions(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let unused = |(_, it): &Named<'_>| evaluation(it).is_ok_and(|it| it.used_by.is_empty());
    let fix = "name it in a rule's actionName, or delete it";
    let unused = actions(snapshot).filter(unused);
    let found = unused.map(|(about, _)| finding(about, "no NodeQOS uses it", fix));
    found.collect()
}

/// A note: a policy may be there before its pods.
pub(super) fn without_pods(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let unmatched = |(_, it): &Named<'_>| {
        let status = it.status.as_ref();
        status.is_some_and(|it| it.matched_pods == Some(0))
    };
    let fix = "nothing, if such pods are created later; otherwise correct its selectors";
    let unmatched = pod_qos(snapshot).filter(unmatched);
    let found = unmatched.map(|(about, _)| finding(about, "it matches no pod", fix));
    found.collect()
}
