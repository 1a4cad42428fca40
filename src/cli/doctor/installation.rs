//! What is wrong with an installation, and what to do about it: pure, from what was read.

use std::collections::BTreeSet;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

use super::agents::{
    away, bare, doubled, heartbeats, layouts, privileged, rollout, versions, without_image,
};
use super::finding::{Finding, INSTALL, define, finding, full_name, items, list, version_of};
use super::flow::{flow, without_flow};
use super::holding::{evictions, held, not_tried};
use super::nodes::nodes;
use super::read::{Answer, Refused, Review, Seen, arguments};
use super::tables::{names, pods, running};
use crate::crd::emergency_stop::{self, ANNOTATION, OBJECT};
use crate::crd::{KubernetesVersion, definitions, missing_fields, node_watermark};
use crate::node::machine::wording::count;

/// A leader that has not said so for so long, after its Lease ran out, leads no more; it, or this machine, may be so much off.
const AWAY: SignedDuration = SignedDuration::from_secs(60);

const READ: &str = "run it as a user who may read that";
const RETRY: &str = "try again; if it persists, check the API server";

/// All that is wrong, the roots of others first.
pub(super) fn findings(seen: &Seen) -> Vec<Finding> {
    if seen.agents_alone {
        let checks = [version, unread_of_agents, privileged, doubled, rollout];
        return checks.iter().flat_map(|check| check(seen)).collect();
    }
    let checks = [
        version,
        unread,
        stopped,
        defined,
        controller,
        leader,
        installations,
        aggregation,
        privileged,
        doubled,
        layouts,
        bare,
        versions,
        permissions,
        heartbeats,
        held,
        evictions,
        flow,
        compiled,
        nodes,
        policies,
    ];
    checks.iter().flat_map(|check| check(seen)).collect()
}

/// What may well be meant so, and is for somebody to know: a policy can be there before the pods that it is for.
pub(super) fn notes(seen: &Seen) -> Vec<Finding> {
    if seen.agents_alone {
        let notes = bare(seen).into_iter().chain(away(seen));
        return notes.chain(without_image(seen)).collect();
    }
    let idle = items(&seen.pod_qos).into_iter();
    let idle = idle.filter(|it| it["status"]["matchedPods"] == 0);
    let note = |it| {
        let cure = "nothing, if such pods are created later; otherwise correct its selectors";
        finding(
            format!("PodQOS {}", full_name(it)),
            "it matches no pod",
            cure,
        )
    };
    let notes = idle.map(note).chain(without_image(seen));
    notes
        .chain(not_tried(seen))
        .chain(without_flow(seen))
        .collect()
}

/// What was looked at, in a line.
pub(super) fn summary(seen: &Seen) -> String {
    let version = version_of(seen).map_or_else(|| "?".to_owned(), |it| it.to_string());
    let nodes = names(&seen.nodes).len();
    let running = running(&pods(seen)).len();
    let agents = format!("Kubernetes {version}, {nodes} nodes, {running} agents running");
    if seen.agents_alone {
        return agents;
    }
    format!("{agents}, {} NodeQOS", items(&seen.node_qos).len())
}

fn condition<'a>(object: &'a Value, kind: &str) -> Option<&'a Value> {
    let mut conditions = object["status"]["conditions"].as_array()?.iter();
    conditions.find(|it| it["type"] == kind)
}

fn message(condition: Option<&Value>) -> String {
    let word = |field: &str| condition.and_then(|it| it[field].as_str()).unwrap_or("?");
    format!("{} ({})", word("message"), word("reason"))
}

fn version(seen: &Seen) -> Vec<Finding> {
    let oldest = KubernetesVersion::OLDEST;
    let old = version_of(seen).filter(|version| *version < oldest);
    let old = old.map(|version| {
        let what = format!("it is {version}: plimsoll needs {oldest} or later");
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
        ("admission policies", &seen.admission[0]),
        ("bindings of admission policies", &seen.admission[1]),
        ("flow schemas", &seen.flow[0]),
        ("priority levels", &seen.flow[1]),
        ("the emergency stop", &seen.stop),
        ("the APIService", &seen.api_service),
        ("NodeQOS", &seen.node_qos),
        ("PodQOS", &seen.pod_qos),
        ("AvoidanceActions", &seen.actions),
    ];
    let elections = seen.elections.iter();
    let elections = elections.map(|it| ("the Lease of the leader", it));
    let all = all
        .into_iter()
        .chain(where_agents_are(seen))
        .chain(elections);
    all.filter_map(not_known).collect()
}

/// The same where the agents alone are looked at.
fn unread_of_agents(seen: &Seen) -> Vec<Finding> {
    let all = [("nodes", &seen.nodes), ("DaemonSets", &seen.daemon_sets)];
    let all = all.into_iter().chain(where_agents_are(seen));
    all.filter_map(not_known).collect()
}

fn where_agents_are(seen: &Seen) -> impl Iterator<Item = (&'static str, &Answer)> {
    let pods = seen.agents.iter().map(|pods| ("pods of agents", pods));
    let namespaces = seen.namespaces.iter();
    pods.chain(namespaces.map(|(_, it)| ("the namespace of agents", it)))
}

fn not_known((what, answer): (&str, &Answer)) -> Option<Finding> {
    let error = answer.as_ref().err().filter(|it| !it.is_missing())?;
    let what = format!("{what} could not be read: {}", error.why);
    Some(finding("plimsoll doctor", what, to_read(error)))
}

fn to_read(error: &Refused) -> &'static str {
    if matches!(error.code, Some(401 | 403)) {
        READ
    } else {
        RETRY
    }
}

fn stopped(seen: &Seen) -> Vec<Finding> {
    let about = format!("ConfigMap {}/{OBJECT}", seen.lease_namespace);
    let object = match &seen.stop {
        Err(error) if error.is_missing() => {
            let what = "it is missing, so kubectl annotate can't stop the agents in an emergency";
            let cure = format!(
                "kubectl create configmap {OBJECT} -n {}",
                seen.lease_namespace
            );
            return vec![finding(about, what, cure)];
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
        finding(
            about,
            what,
            "plimsoll resume, when the reason no longer applies",
        )
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
                return Some(finding(about, what, to_read(error)));
            }
        };
        match missing_fields(definition, document) {
            None => Some(finding(about, "it is not installed", define(seen))),
            Some(missing) if missing.is_empty() => None,
            Some(missing) => {
                let missing = list(missing.iter().map(String::as_str));
                let what = format!("it is from another version of plimsoll, and lacks {missing}");
                Some(finding(about, what, define(seen)))
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
        let refused = condition(it, "ReplicaFailure").filter(|it| it["status"] == "True");
        let (why, cure) = match refused {
            _ if wanted == 0 => (String::new(), "kubectl scale it to 2 replicas"),
            Some(_) => (
                format!("; {}", message(refused)),
                "make whatever rejects its pods admit them",
            ),
            None => (
                String::new(),
                "kubectl describe pod and kubectl logs of a replica that is not ready show why",
            ),
        };
        let what = format!("{ready} of {wanted} replicas are ready{why}");
        (ready < wanted || wanted == 0)
            .then(|| finding(format!("Deployment {}", full_name(it)), what, cure))
    });
    unready.collect()
}

/// Whether any replica of a controller is ready.
fn controllers_run(seen: &Seen) -> bool {
    let ready = |it: &&Value| it["status"]["readyReplicas"].as_u64() > Some(0);
    items(&seen.deployments).iter().any(ready)
}

/// Replicas that are ready, and none of which leads.
fn leader(seen: &Seen) -> Vec<Finding> {
    if !controllers_run(seen) {
        return Vec::new();
    }
    let leads = |lease: &Value| {
        let spec = &lease["spec"];
        let renewed: Option<Timestamp> = spec["renewTime"].as_str().and_then(|it| it.parse().ok());
        let lasts = SignedDuration::from_secs(spec["leaseDurationSeconds"].as_i64().unwrap_or(0));
        let is_fresh = renewed.is_some_and(|at| seen.now.duration_since(at) < lasts + AWAY);
        is_fresh
            && !spec["holderIdentity"]
                .as_str()
                .unwrap_or_default()
                .is_empty()
    };
    let is_lead = |answer: &&Answer| match answer {
        Ok(lease) => leads(lease),
        Err(error) => !error.is_missing(),
    };
    if seen.elections.iter().all(|it| is_lead(&it)) {
        return Vec::new();
    }
    let cure = "kubectl logs of its replicas show why they can't acquire the Lease";
    let what = "no replica leads: no policy is compiled for any node";
    vec![finding("controller", what, cure)]
}

/// Nodes that nobody has compiled policies for.
fn compiled(seen: &Seen) -> Vec<Finding> {
    if seen.watermarks.is_err() || !controllers_run(seen) {
        return Vec::new();
    }
    let there = names(&seen.watermarks);
    let lacks = |node: &&str| !there.contains(node);
    let without: Vec<&str> = names(&seen.nodes).into_iter().filter(lacks).collect();
    if without.is_empty() {
        return Vec::new();
    }
    let what = format!(
        "there is none for {}: {}",
        count(without.len(), "node"),
        list(without)
    );
    let cure = "kubectl logs of the leading controller shows why it does not write them";
    vec![finding("NodeWatermarks", what, cure)]
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
        "there are {}: {}; they interfere with each other",
        found.len(),
        list(found.iter().map(String::as_str))
    );
    vec![finding("installations", what, "helm uninstall all but one")]
}

/// Only where the API of node metrics is installed.
fn aggregation(seen: &Seen) -> Vec<Finding> {
    let about = "APIService v1alpha1.metrics.plimsoll.dev";
    let service = match &seen.api_service {
        Ok(service) => service,
        Err(error) => {
            let is_wanted = !arguments(&seen.deployments, "--metrics-api-listen=").is_empty();
            let what = "it is missing, so kubectl get nodemetrics can't work";
            let cure = "reinstall the chart with helm upgrade";
            let is_gone = is_wanted && error.is_missing();
            return is_gone
                .then(|| finding(about, what, cure))
                .into_iter()
                .collect();
        }
    };
    let mut found = Vec::new();
    let is_off = match &seen.aggregation {
        Ok(config) => config["data"]["requestheader-client-ca-file"].is_null(),
        Err(error) if error.is_missing() => true,
        Err(error) => {
            let what = format!("API aggregation could not be checked: {}", error.why);
            found.push(finding("plimsoll doctor", what, to_read(error)));
            false
        }
    };
    if is_off {
        let what = "the API server has no --requestheader-client-ca-file, so kubectl get nodemetrics can't work";
        let cure = "configure the aggregation layer, or install with metricsAPI.enabled=false";
        found.push(finding("API aggregation", what, cure));
    }
    let available = condition(service, "Available");
    if available.is_none_or(|it| it["status"] != "True") {
        let what = format!("it is not available: {}", message(available));
        let cure = "check the controller's pods, and whether API servers can reach them (NetworkPolicy, firewall)";
        found.push(finding(about, what, cure));
    }
    found
}

fn permissions(seen: &Seen) -> Vec<Finding> {
    let mut refused: Vec<(&Review, String)> = Vec::new();
    for review in seen.reviews.iter().filter(|it| it.allowed == Ok(false)) {
        match refused.last_mut() {
            Some((last, verbs)) if (&last.user, &last.what) == (&review.user, &review.what) => {
                verbs.push_str(", ");
                verbs.push_str(review.verb);
            }
            _ => refused.push((review, review.verb.to_owned())),
        }
    }
    let mut found: Vec<Finding> = refused
        .into_iter()
        .map(|(it, verbs)| {
            let what = format!("{} may not {verbs} {}", it.user, it.what);
            let cure = "reinstall the chart's roles with helm upgrade";
            finding(format!("permissions of {}", it.actor.name()), what, cure)
        })
        .collect();
    let unknown = seen.reviews.iter().find_map(|it| it.allowed.as_ref().err());
    if let Some(Refused { why, .. }) = unknown {
        let what = format!("the permissions of agents and controller could not be checked: {why}");
        let cure = "run it as a user who may create subjectaccessreviews";
        found.push(finding("plimsoll doctor", what, cure));
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
            if let Some(unjudged) = unjudged(&about, object) {
                found.push(unjudged);
                continue;
            }
            found.extend(conditions(&about, object));
            found.extend(out_of_sight(&about, object));
            if object["status"][field] == 0 {
                let cure = "correct spec.selector, or delete it";
                found.push(finding(about, "it matches no node", cure));
            } else if kind == "AvoidanceAction" && items_of(&object["status"]["usedBy"]) == 0 {
                found.push(finding(
                    about,
                    "no NodeQOS uses it",
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
        "use another metric, such as cpu_pressure_some_avg10 or container_cpu_throttled_ratio";
    Some(finding(about, what, cure))
}

fn items_of(list: &Value) -> usize {
    list.as_array().map_or(0, Vec::len)
}

/// What nobody has judged as it is now.
fn unjudged(about: &str, object: &Value) -> Option<Finding> {
    let cure = "check that the controller runs: it evaluates policies within seconds";
    if object["status"]["conditions"].is_null() {
        return Some(finding(
            about,
            "the controller has not evaluated it yet",
            cure,
        ));
    }
    let judged = object["status"]["observedGeneration"].as_i64();
    let is_old = judged < object["metadata"]["generation"].as_i64();
    is_old.then(|| {
        finding(
            about,
            "the controller has not evaluated its last edit yet",
            cure,
        )
    })
}

/// What the controller says of it: not in force, in part or as a whole, or not on all nodes.
fn conditions(about: &str, object: &Value) -> Option<Finding> {
    let is = |kind: &str, status: &str| condition(object, kind).filter(|it| it["status"] == status);
    if let ready @ Some(_) = is("Ready", "False") {
        let cure = "correct it as the message says; plimsoll check shows line and field";
        return Some(finding(about, message(ready), cure));
    }
    if let ignored @ Some(_) = is("FieldsNotEnforced", "True") {
        let cure = "remove the fields, or accept that they do nothing";
        return Some(finding(about, message(ignored), cure));
    }
    let is_stuck = |it: &&Value| it["reason"] == "CanariesAct" || it["reason"] == "NoCanary";
    let stuck = is("RolledOut", "False").filter(is_stuck)?;
    let cure = "follow the message; until then the nodes use the policy as it was before";
    Some(finding(about, message(Some(stuck)), cure))
}

#[cfg(test)]
#[path = "findings_tests.rs"]
mod tests;
