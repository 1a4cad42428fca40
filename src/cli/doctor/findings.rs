//! What is wrong with an installation, and what to do about it: pure, from what was read.

use std::collections::BTreeSet;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

use super::finding::{Finding, finding, items, list};
use super::holding::{guard, held};
use super::read::{Answer, Refused, Seen};
use crate::crd::emergency_stop::{self, ANNOTATION, OBJECT};
use crate::crd::{definitions, missing_fields, node_watermark};
use crate::node::machine::wording::count;

/// The oldest Kubernetes that is supported, 1.33.
const OLDEST: (u64, u64) = (1, 33);
/// A node's clock that is ahead of ours by more is wrong, or ours is.
const AHEAD: SignedDuration = SignedDuration::from_secs(5);
/// A Lease that ran out so long ago is a silent agent's.
const GRACE: Duration = Duration::from_secs(10);

const DEFINE: &str = "plimsoll crds | kubectl apply --server-side --force-conflicts -f -";
const INSTALL: &str = "install the chart: charts/plimsoll/README.md";

/// All that is wrong, the roots of others first.
pub(super) fn findings(seen: &Seen) -> Vec<Finding> {
    let checks = [
        version,
        unread,
        stopped,
        defined,
        controller,
        installations,
        aggregation,
        layouts,
        privileged,
        agents,
        versions,
        permissions,
        heartbeats,
        held,
        guard,
        policies,
    ];
    checks.iter().flat_map(|check| check(seen)).collect()
}

/// What may well be meant so, and is for somebody to know: a policy can be there before the pods that it is for.
pub(super) fn notes(seen: &Seen) -> Vec<Finding> {
    let idle = items(&seen.pod_qos).into_iter();
    let idle = idle.filter(|it| it["status"]["matchedPods"] == 0);
    let note = |it| {
        let cure = "nothing, if such pods are to come; correct its selectors otherwise";
        finding(
            format!("PodQOS {}", full_name(it)),
            "it matches no pod",
            cure,
        )
    };
    idle.map(note).collect()
}

/// What was looked at, in a line.
pub(super) fn summary(seen: &Seen) -> String {
    let version = version_of(seen).map_or_else(|| "?".to_owned(), |(a, b)| format!("{a}.{b}"));
    let nodes = names(&seen.nodes).len();
    let running: usize = seen.agents.iter().map(|pods| running(pods).len()).sum();
    let policies = items(&seen.node_qos).len();
    format!("Kubernetes {version}, {nodes} nodes, {running} agents running, {policies} NodeQOS")
}

/// The cells of a table's columns, row by row; empty where it can't be read.
fn cells<'a, const N: usize>(table: &'a Answer, columns: [&str; N]) -> Vec<[&'a str; N]> {
    let Ok(table) = table else { return Vec::new() };
    let defined = table["columnDefinitions"].as_array();
    let place = |name: &str| defined?.iter().position(|column| column["name"] == name);
    let places = columns.map(place);
    let rows = table["rows"].as_array().into_iter().flatten();
    let cell =
        |row: &'a Value, place: Option<usize>| place.and_then(|place| row["cells"][place].as_str());
    rows.map(|row| places.map(|place| cell(row, place).unwrap_or_default()))
        .collect()
}

fn names(table: &Answer) -> BTreeSet<&str> {
    cells(table, ["Name"])
        .into_iter()
        .map(|[name]| name)
        .collect()
}

/// Nodes with an agent whose containers all are ready.
fn running(pods: &Answer) -> BTreeSet<&str> {
    let pods = cells(pods, ["Ready", "Node"]).into_iter();
    let ready = |ready: &str| {
        ready
            .split_once('/')
            .is_some_and(|(is, of)| is == of && is != "0")
    };
    pods.filter(|[is, _]| ready(is))
        .map(|[_, node]| node)
        .collect()
}

fn full_name(object: &Value) -> String {
    let word = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    match word("namespace") {
        "" => word("name").to_owned(),
        namespace => format!("{namespace}/{}", word("name")),
    }
}

fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    let mut conditions = object["status"]["conditions"].as_array()?.iter();
    conditions.find(|it| it["type"] == kind)
}

fn message(condition: Option<&Value>) -> String {
    let word = |field: &str| condition.and_then(|it| it[field].as_str()).unwrap_or("?");
    format!("{} ({})", word("message"), word("reason"))
}

fn version_of(seen: &Seen) -> Option<(u64, u64)> {
    let version = seen.version.as_ref().ok()?;
    let number = |field: &str| {
        let text = version[field].as_str()?;
        text.trim_end_matches(|it: char| !it.is_ascii_digit())
            .parse()
            .ok()
    };
    Some((number("major")?, number("minor")?))
}

fn version(seen: &Seen) -> Vec<Finding> {
    let old = version_of(seen).filter(|version| *version < OLDEST);
    let old = old.map(|(major, minor)| {
        let what = format!("it is {major}.{minor}: plimsoll needs 1.33 or later");
        finding(
            "Kubernetes",
            what,
            "upgrade the cluster, the control plane first",
        )
    });
    old.into_iter().collect()
}

/// What you may not read is not known to be well.
fn unread(seen: &Seen) -> Vec<Finding> {
    let all = [
        ("the version", &seen.version),
        ("nodes", &seen.nodes),
        ("DaemonSets", &seen.daemon_sets),
        ("Deployments", &seen.deployments),
        ("NodeWatermarks", &seen.watermarks),
        ("Leases", &seen.leases),
        ("webhooks", &seen.webhooks),
        ("admission policies", &seen.admission[0]),
        ("their bindings", &seen.admission[1]),
        ("the emergency stop", &seen.stop),
        ("the APIService", &seen.api_service),
        ("NodeQOS", &seen.node_qos),
        ("PodQOS", &seen.pod_qos),
        ("AvoidanceActions", &seen.actions),
    ];
    let pods = seen.agents.iter().map(|pods| ("pods of agents", pods));
    let unread = |(what, answer): (&str, &Answer)| {
        let why = &answer
            .as_ref()
            .err()
            .filter(|error| !error.is_missing())?
            .why;
        let what = format!("{what} could not be read: {why}");
        Some(finding(
            "plimsoll doctor",
            what,
            "run it as somebody who may read that",
        ))
    };
    all.into_iter().chain(pods).filter_map(unread).collect()
}

fn stopped(seen: &Seen) -> Vec<Finding> {
    let about = format!("ConfigMap {}/{OBJECT}", seen.lease_namespace);
    let object = match &seen.stop {
        Err(error) if error.is_missing() => {
            let what = "it is missing: kubectl annotate has nothing to annotate in an emergency";
            return vec![finding(
                about,
                what,
                "install the chart anew, with helm upgrade",
            )];
        }
        Err(_) => return Vec::new(),
        Ok(object) => object,
    };
    let annotations = &object["metadata"]["annotations"];
    let annotations = serde_json::from_value(annotations.clone()).ok();
    let order = emergency_stop::order(annotations.as_ref());
    let order = order.map(|reason| {
        let words = emergency_stop::words(&reason);
        let what = format!("everything is {words}: no agent acts ({ANNOTATION})");
        finding(about, what, "plimsoll resume, when the reason is gone")
    });
    order.into_iter().collect()
}

fn defined(seen: &Seen) -> Vec<Finding> {
    let check = |definition: &CustomResourceDefinition| {
        let [policies, ours] = &seen.schemas;
        let answer = if definition.spec.group == node_watermark::GROUP {
            ours
        } else {
            policies
        };
        let about = format!("definition of {}", definition.spec.names.kind);
        let document = match answer {
            Ok(document) => document,
            Err(error) if error.is_missing() => &Value::Null,
            Err(error) => {
                let what = format!("it could not be read: {}", error.why);
                return Some(finding(about, what, "run it as somebody who may read that"));
            }
        };
        match missing_fields(definition, document) {
            None => Some(finding(about, "it is not installed", DEFINE)),
            Some(missing) if missing.is_empty() => None,
            Some(missing) => {
                let missing = list(missing.iter().map(String::as_str));
                let what = format!("it is of another version of plimsoll, and lacks {missing}");
                Some(finding(about, what, DEFINE))
            }
        }
    };
    definitions().iter().filter_map(check).collect()
}

fn controller(seen: &Seen) -> Vec<Finding> {
    if seen.deployments.is_err() {
        return Vec::new();
    }
    let all = items(&seen.deployments);
    if all.is_empty() {
        return vec![finding(
            "controller",
            "there is none: no policy is compiled for any node",
            INSTALL,
        )];
    }
    let unready = all.into_iter().filter_map(|it| {
        let count = |of: &str, field: &str| it[of][field].as_u64().unwrap_or(0);
        let (ready, wanted) = (count("status", "readyReplicas"), count("spec", "replicas"));
        let cure = "kubectl describe pod, and kubectl logs, of those that are not ready say why";
        let what = format!("{ready} of {wanted} replicas are ready");
        (ready < wanted || wanted == 0)
            .then(|| finding(format!("Deployment {}", full_name(it)), what, cure))
    });
    unready.collect()
}

fn installations(seen: &Seen) -> Vec<Finding> {
    let instance = |it: &&Value| {
        let namespace = it["metadata"]["namespace"].as_str().unwrap_or_default();
        let label = &it["metadata"]["labels"]["app.kubernetes.io/instance"];
        format!("{namespace}/{}", label.as_str().unwrap_or_default())
    };
    let both = [&seen.deployments, &seen.daemon_sets];
    let found: BTreeSet<String> = both
        .iter()
        .flat_map(|list| items(list))
        .map(|it| instance(&it))
        .collect();
    if found.len() < 2 {
        return Vec::new();
    }
    let what = format!(
        "there are {}: {}; they would undo each other's work",
        found.len(),
        list(found.iter().map(String::as_str))
    );
    vec![finding("installations", what, "helm uninstall all but one")]
}

/// Only where the API of node metrics is installed.
fn aggregation(seen: &Seen) -> Vec<Finding> {
    let Ok(service) = &seen.api_service else {
        return Vec::new();
    };
    let mut found = Vec::new();
    let ca = seen
        .aggregation
        .as_ref()
        .map(|it| &it["data"]["requestheader-client-ca-file"]);
    if ca.is_ok_and(Value::is_null) {
        let what = "the API server has no --requestheader-client-ca-file, so that kubectl get nodemetrics can't work";
        let cure = "configure the aggregation layer, or install with metricsAPI.enabled=false";
        found.push(finding("API aggregation", what, cure));
    }
    let available = condition(service, "Available");
    if available.is_none_or(|it| it["status"] != "True") {
        let what = format!("it is not available: {}", message(available));
        let cure = "look at the controller's pods, and whether API servers reach them (NetworkPolicy, firewall)";
        found.push(finding(
            "APIService v1alpha1.metrics.plimsoll.dev",
            what,
            cure,
        ));
    }
    found
}

/// A `DaemonSet` whose pods do not come up: most often its layout does not fit the nodes.
fn layouts(seen: &Seen) -> Vec<Finding> {
    if seen.daemon_sets.is_err() {
        return Vec::new();
    }
    let all = items(&seen.daemon_sets);
    if all.is_empty() {
        return vec![finding("agents", "there is no DaemonSet of them", INSTALL)];
    }
    let unfit = all.into_iter().filter_map(|it| {
        let count = |field: &str| it["status"][field].as_u64().unwrap_or(0);
        let (ready, wanted) = (count("numberReady"), count("desiredNumberScheduled"));
        let about = format!("DaemonSet {}", full_name(it));
        if wanted == 0 {
            let cure = "label nodes as its layout's nodeSelector says, or take it out of agent.layouts";
            return Some(finding(about, "it selects no node", cure));
        }
        let cure = "kubectl describe pod of one that is not ready: where it names a folder below /sys/fs/cgroup, the layout \
                    does not fit the node (agent.layouts: cgroup v1 or v2, kubepods.slice or kubepods)";
        (ready < wanted).then(|| finding(about, format!("{ready} of {wanted} agents are ready"), cure))
    });
    unfit.collect()
}

fn privileged(seen: &Seen) -> Vec<Finding> {
    let label = "pod-security.kubernetes.io/enforce";
    let held = seen.namespaces.iter().filter_map(|(name, object)| {
        let level = object.as_ref().ok()?["metadata"]["labels"][label].as_str()?;
        (level != "privileged").then(|| {
            let what = format!("{label} is {level}: it admits no pod that mounts cgroups");
            let cure = format!("kubectl label namespace {name} --overwrite {label}=privileged");
            finding(format!("namespace {name}"), what, cure)
        })
    });
    held.collect()
}

/// Nodes without a running agent, and such with two.
fn agents(seen: &Seen) -> Vec<Finding> {
    if seen.agents.is_empty() || seen.agents.iter().any(Result::is_err) || seen.nodes.is_err() {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut there = BTreeSet::new();
    let mut twice = BTreeSet::new();
    for node in seen.agents.iter().flat_map(running) {
        if !there.insert(node) {
            twice.insert(node);
        }
    }
    let without: Vec<&str> = names(&seen.nodes).difference(&there).copied().collect();
    if !without.is_empty() {
        let what = format!(
            "on {} none runs: {}",
            count(without.len(), "node"),
            list(without.iter().copied())
        );
        let cure = "give agent.layouts an entry that fits them; where a pod is there, kubectl describe says why it does not run";
        found.push(finding("agents", what, cure));
    }
    if !twice.is_empty() {
        let what = format!(
            "on {} there is more than one: {}",
            count(twice.len(), "node"),
            list(twice.iter().copied())
        );
        found.push(finding(
            "agents",
            what,
            "make the nodeSelectors of agent.layouts exclude each other",
        ));
    }
    found
}

/// Agents of another version than this program, of which alone can be said what is right for them.
fn versions(seen: &Seen) -> Vec<Finding> {
    let ours = env!("CARGO_PKG_VERSION");
    let agents = cells(&seen.watermarks, ["Agent"]).into_iter();
    let others: BTreeSet<&str> = agents
        .map(|[version]| version)
        .filter(|version| !version.is_empty() && *version != ours)
        .collect();
    if others.is_empty() {
        return Vec::new();
    }
    let what = format!("some are of version {}, and this is {ours}", list(others));
    let cure =
        "run the plimsoll of their version, or upgrade them; within an upgrade wait for its end";
    vec![finding("agents", what, cure)]
}

fn permissions(seen: &Seen) -> Vec<Finding> {
    let refused = seen.reviews.iter().filter(|it| it.allowed == Ok(false));
    let mut found: Vec<Finding> = refused
        .map(|it| {
            let what = format!("{} may not {}", it.user, it.what);
            let cure = "install the chart's roles anew, with helm upgrade";
            finding(format!("permissions of {}", it.actor.name()), what, cure)
        })
        .collect();
    let unknown = seen.reviews.iter().find_map(|it| it.allowed.as_ref().err());
    if let Some(Refused { why, .. }) = unknown {
        let what =
            format!("whether agents and controller have what they need could not be asked: {why}");
        let cure = "run it as somebody who may create subjectaccessreviews";
        found.push(finding("plimsoll doctor", what, cure));
    }
    found
}

/// Leases that are renewed no more, and clocks that are ahead.
fn heartbeats(seen: &Seen) -> Vec<Finding> {
    let known = names(&seen.nodes);
    let leases = items(&seen.leases).into_iter().filter_map(|it| {
        let renewed: Timestamp = it["spec"]["renewTime"].as_str()?.parse().ok()?;
        let lasts = it["spec"]["leaseDurationSeconds"].as_u64().unwrap_or(0);
        let node = it["metadata"]["name"]
            .as_str()
            .filter(|node| known.contains(node))?;
        Some((
            node,
            seen.now.duration_since(renewed),
            Duration::from_secs(lasts),
        ))
    });
    let (mut silent, mut ahead) = (Vec::new(), Vec::new());
    for (node, age, lasts) in leases {
        if age < -AHEAD {
            ahead.push(node);
        } else if age > SignedDuration::try_from(lasts + GRACE).unwrap_or(SignedDuration::MAX) {
            silent.push(node);
        }
    }
    let mut found = Vec::new();
    if !silent.is_empty() {
        let what = format!(
            "{} silent, or their clocks behind: {}",
            count(silent.len(), "agent"),
            list(silent)
        );
        let cure = "plimsoll top says since when; kubectl logs of the agent says why; compare `date` there and here";
        found.push(finding("heartbeats", what, cure));
    }
    if !ahead.is_empty() {
        let what = format!(
            "{} ahead of this machine by more than 5 s: {}",
            count(ahead.len(), "clock"),
            list(ahead)
        );
        let cure = "compare `date` there and here, and let NTP set what is wrong";
        found.push(finding("clocks", what, cure));
    }
    found
}

/// Policies that can do nothing.
fn policies(seen: &Seen) -> Vec<Finding> {
    let kinds = [
        ("NodeQOS", &seen.node_qos, "matchedNodes"),
        // One without pods is a note.
        ("PodQOS", &seen.pod_qos, ""),
        ("AvoidanceAction", &seen.actions, ""),
    ];
    let mut found = Vec::new();
    for (kind, answer, field) in kinds {
        for object in items(answer) {
            let about = format!("{kind} {}", full_name(object));
            found.extend(conditions(&about, object));
            found.extend(out_of_sight(&about, object));
            if object["status"][field] == 0 {
                let cure = "correct spec.selector, or delete it";
                found.push(finding(about, "it matches no node", cure));
            } else if kind == "AvoidanceAction" && items_of(&object["status"]["usedBy"]) == 0 {
                found.push(finding(
                    about,
                    "no NodeQOS names it",
                    "name it in a rule's actionName, or delete it",
                ));
            }
        }
    }
    found
}

/// A rule on what an agent in a pod can't see, since it is in a PID namespace of its own.
fn out_of_sight(about: &str, object: &Value) -> Option<Finding> {
    const METRIC: &str = "container_sched_run_queue_time";
    let mut rules = object["spec"]["rules"].as_array()?.iter();
    let rule = rules.find(|it| it["metricRule"]["name"] == METRIC)?;
    let name = rule["name"].as_str().unwrap_or("?");
    let what = format!("rule {name} never acts: no agent in a pod can measure {METRIC}");
    let cure =
        "name another metric, such as cpu_pressure_some_avg10 or container_cpu_throttled_ratio";
    Some(finding(about, what, cure))
}

fn items_of(list: &Value) -> usize {
    list.as_array().map_or(0, Vec::len)
}

/// What the controller says of it: not in force, in part or as a whole.
fn conditions(about: &str, object: &Value) -> Option<Finding> {
    if object["status"]["conditions"].is_null() {
        let cure = "the controller judges it within seconds: does it run?";
        return Some(finding(about, "nobody has judged it yet", cure));
    }
    let ready = condition(object, "Ready").filter(|it| it["status"] == "False");
    let ignored = condition(object, "FieldsNotEnforced").filter(|it| it["status"] == "True");
    let cure = "correct it as the message says; plimsoll check names line and field";
    match (ready, ignored) {
        (Some(_), _) => Some(finding(about, message(ready), cure)),
        (None, Some(_)) => {
            let cure = "take the fields out, or know that they do nothing";
            Some(finding(about, message(ignored), cure))
        }
        (None, None) => None,
    }
}

#[cfg(test)]
#[path = "findings_tests.rs"]
mod tests;
