//! Whether heartbeats and the election wait for nothing else that is asked: flow control of the API server.

use serde_json::Value;

use super::finding::{Finding, finding, items, list};
use super::read::{Answer, Seen, accounts};

/// The chart's flow schemas for these accounts; each has a priority level of its name.
fn wanted(seen: &Seen) -> Vec<String> {
    let of = |workloads: &Answer, suffixes: &[&str]| -> Vec<String> {
        let all = accounts(workloads).into_iter();
        all.flat_map(|(_, account)| suffixes.iter().map(move |it| format!("{account}{it}")))
            .collect()
    };
    let agents = of(&seen.daemon_sets, &["", "-leases"]);
    [agents, of(&seen.deployments, &["-election"])].concat()
}

fn is_known(seen: &Seen) -> bool {
    let unread = |answer: &Answer| answer.as_ref().is_err_and(|error| !error.is_missing());
    !seen.flow.iter().any(unread)
}

/// Flow schemas that are missing, or lead nowhere, while others are there.
pub(super) fn flow(seen: &Seen) -> Vec<Finding> {
    if !is_known(seen) || is_off(seen) {
        return Vec::new();
    }
    let wanted = wanted(seen).into_iter();
    let lacking: Vec<String> = wanted.filter(|name| !is_in_force(seen, name)).collect();
    if lacking.is_empty() {
        return Vec::new();
    }
    let what = format!(
        "no FlowSchema with a PriorityLevelConfiguration: {}; many other requests can delay heartbeats or the election",
        list(lacking.iter().map(String::as_str))
    );
    let cure = "reinstall the chart with helm upgrade";
    vec![finding("flow control", what, cure)]
}

/// Without any of them agents and controller have the share of all `ServiceAccount`s: flowControl.enabled=false.
pub(super) fn without_flow(seen: &Seen) -> Option<Finding> {
    let is_installed = !wanted(seen).is_empty();
    (is_installed && is_known(seen) && is_off(seen)).then(|| {
        let what = "there is no FlowSchema: heartbeats and the election share a queue with the requests of all ServiceAccounts";
        let cure = "nothing, if flowControl.enabled=false is intended; otherwise helm upgrade without it";
        finding("flow control", what, cure)
    })
}

fn is_off(seen: &Seen) -> bool {
    seen.flow.iter().all(|answer| items(answer).is_empty())
}

fn is_in_force(seen: &Seen, name: &str) -> bool {
    let [schemas, levels] = &seen.flow;
    let is_named = |it: &&Value| it["metadata"]["name"] == name;
    let leads_there = |it: &Value| it["spec"]["priorityLevelConfiguration"]["name"] == name;
    let schema = items(schemas).into_iter().find(is_named);
    schema.is_some_and(leads_there) && items(levels).iter().any(is_named)
}
