//! `plimsoll agent` against a real API server and real cgroups.

use std::time::Duration;

use crate::agent_support::{
    Agent, HIGH, LOW, NODE, Node, TIMEOUT, closing, evicting, pod, rule, throttling,
};
use crate::api_support::faults::{Fault, Proxy};
use crate::api_support::leader::{Leader, ReceivedRequest, RequestOutcome};
use crate::api_support::{free_port, policy};
use crate::run_support::eventually;
use plimsoll::clock::boot_time;
use plimsoll::crd::eviction::{PATH, api_path};
use plimsoll::engine::EngineState;
use plimsoll::node::machine::state_dir::WriterProcess;
use serde_json::{Value, json};

#[test]
fn pods_are_throttled_above_the_threshold_and_restored_below_it() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    let web = node.pod(&pod("web", "web"));
    node.machine
        .cgroup(&format!("kubepods/besteffort/pod{web}"));
    node.set_rules(&throttling());
    let agent = node.agent(&[]);
    agent.until("it is ready", || agent.is_ready());
    assert_eq!(node.quota(&batch), -1);
    node.machine.load.set(HIGH);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    assert_eq!(node.quota(&web), -1, "no policy allows that");
    agent.until("the metrics show it", || {
        let (_, text) = agent.http("/metrics").unwrap();
        let state = r#"rule_state{rule="q/cpu",strategy="Enforce",state="Breached"} 1"#;
        text.contains(state) && text.contains("plimsoll_agent_throttled_pods 1")
    });
    node.plane
        .promtool_passes(&agent.http("/metrics").unwrap().1);
    agent.until("the status shows it", || {
        let status = node.status();
        status["rules"][0]["state"] == "Breached"
            && status["throttled"][0]["pod"] == "batch"
            && status["counts"]["throttled"] == 1
    });
    let status = node.status();
    let there = node.plane.get("nwm", NODE);
    assert_eq!(status["observedHash"], there["spec"]["hash"]);
    assert_eq!(status["throttled"][0]["rule"], "q/cpu");
    assert_eq!(crate::agent_support::ready(&status), "True RulesEnforced");
    agent.until("events report it", || {
        let events = node.plane.list("events");
        let reported = |reason: &str, kind: &str| {
            events
                .iter()
                .any(|it| it["reason"] == reason && it["involvedObject"]["kind"] == kind)
        };
        reported("RuleBreached", "Node") && reported("PodThrottled", "Pod")
    });
    // The cgroup of a new pod appears after the pod.
    let late = node.burning_pod("late");
    agent.until("the new pod is throttled", || node.is_throttled(&late));
    node.machine.load.set(LOW);
    for uid in [&batch, &late] {
        agent.until("its CPU limit is restored", || node.quota(uid) == -1);
    }
    assert_eq!(agent.http("/livez").unwrap().0, 200);
}

/// The value of a gauge without labels.
fn gauge(agent: &Agent, name: &str) -> Option<f64> {
    let (_, text) = agent.http("/metrics")?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim()
        .parse()
        .ok()
        .filter(|value: &f64| !value.is_nan())
}

#[test]
fn a_window_of_the_settings_is_a_gauge_a_metric_of_rules_and_part_of_the_report() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    let file = "metrics: [{name: cpu_busy_avg_1m, source: cpu_total_usage, window: avg_1m}]\n";
    node.machine.write("windows.yaml", file);
    let mut spec = throttling();
    spec["rules"][0]["metric"] = "cpu_busy_avg_1m".into();
    spec["rules"][0]["window"] = json!({"source": "cpu_total_usage", "statistic": "avg_1m"});
    spec["rules"][0]["watermark"] = 60.into();
    node.set_rules(&spec);
    node.machine.load.set(HIGH);
    let path = node.machine.path("windows.yaml");
    let agent = node.agent(&["--windows", path.to_str().unwrap()]);
    agent.until("it is ready", || agent.is_ready());
    assert_eq!(gauge(&agent, "cpu_busy_avg_1m "), None, "not known yet");
    let after_half_a_minute = Duration::from_secs(90);
    agent.until_within(after_half_a_minute, "the pod is throttled", || {
        node.is_throttled(&batch)
    });
    agent.until("the gauge shows it", || {
        gauge(&agent, "cpu_busy_avg_1m ").is_some_and(|percent| (85.0..=100.0).contains(&percent))
    });
    let (_, text) = agent.http("/v1/node-metric").unwrap();
    let metric: Value = serde_json::from_str(&text).unwrap();
    let percent = metric["status"]["windows"]["custom"]["cpu_busy_avg_1m"].as_f64();
    assert!(percent.is_some_and(|percent| percent > 85.0), "{metric}");
    node.plane
        .promtool_passes(&agent.http("/metrics").unwrap().1);
}

#[test]
fn actions_without_effect_are_reported_with_their_cause() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    node.pod(&pod("lost", "batch"));
    // The first rule acts on no pod, and has nothing to choose from.
    let mut spec = throttling();
    let close = closing()["actions"][0].clone();
    spec["actions"].as_array_mut().unwrap().push(close);
    let first = rule("q/a", "close");
    spec["rules"].as_array_mut().unwrap().insert(0, first);
    node.set_rules(&spec);
    let agent = node.agent(&[]);
    agent.until("it is ready", || agent.is_ready());
    node.machine.load.set(HIGH);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    let ineffective = |node: &Node| {
        let status = node.status();
        let conditions = status["conditions"].as_array().cloned();
        let mut conditions = conditions.unwrap_or_default().into_iter();
        let found = conditions.find(|it| it["type"] == "ActionIneffective");
        let found = found.unwrap_or_default();
        (found["status"] == "True", found["message"].to_string())
    };
    let file = node
        .machine
        .quota_file(&format!("kubepods/besteffort/pod{batch}"));
    let unlimited = if node.machine.hierarchy.is_v2() {
        "max"
    } else {
        "-1"
    };
    let mut written = boot_time();
    agent.until("the status names both causes", || {
        if boot_time().since(written) >= Duration::from_secs(1) {
            written = boot_time();
            std::fs::write(&file, unlimited).unwrap();
        }
        let (is_ineffective, message) = ineffective(&node);
        is_ineffective
            && message.contains("default/batch: another writer keeps changing")
            && message.contains("q/cpu: default/lost: it has no cgroup")
    });
    agent.until("events and metrics show it", || {
        let events = node.plane.list("events");
        let reported = |pod: &str| {
            events.iter().any(|it| {
                it["reason"] == "ActionIneffective" && it["involvedObject"]["name"] == pod
            })
        };
        let (_, text) = agent.http("/metrics").unwrap();
        let count = |reason| format!("plimsoll_agent_ineffective_pods{{reason=\"{reason}\"}} 1");
        let counted = |reason| text.contains(&count(reason));
        reported("batch") && reported("lost") && counted("Contested") && counted("WrongLayout")
    });
    node.machine.load.set(LOW);
    agent.until("nothing is to be done any more", || !ineffective(&node).0);
}

#[test]
fn on_a_normal_node_the_status_says_that_rules_are_evaluated() {
    let Some(node) = Node::new() else { return };
    let mut spec = closing();
    node.set_rules(&spec);
    // Everything else is settled before the first evaluation.
    let agent = node.agent(&["--evaluation-period", "4s"]);
    agent.until("it begins", || {
        crate::agent_support::ready(&node.status()) == "False Starting"
    });
    agent.until("it is ready before the first evaluation", || {
        let status = node.status();
        crate::agent_support::ready(&status) == "True RulesEnforced"
            && status["rules"][0]["unknown"].is_null()
            && status["scheduling"]["state"] == "Enabled"
    });
    // Another rule does not change scheduling, which was decided before.
    let mut edited = spec["rules"][0].clone();
    edited["id"] = "q/more".into();
    edited["strategy"] = "Preview".into();
    spec["rules"].as_array_mut().unwrap().push(edited);
    node.set_rules(&spec);
    agent.until("the additional rule has a value", || {
        let status = node.status();
        status["rules"][1]["id"] == "q/more" && status["rules"][1]["value"].is_number()
    });
    // As after a restore of the API server's data from a backup.
    let backup = json!({"status": {
        "rules": [],
        "agent": {"reportTime": "2026-01-02T03:04:05Z"},
    }});
    node.plane.kubectl(&[
        "patch",
        "nwm",
        NODE,
        "--subresource=status",
        "--type=merge",
        "-p",
        &backup.to_string(),
    ]);
    assert_eq!(node.status()["rules"], json!([]));
    let limit = Duration::from_mins(2);
    agent.until_within(limit, "the status is written again", || {
        node.status()["rules"][1]["id"] == "q/more"
    });
}

#[test]
fn what_a_preview_rule_would_have_done_is_counted_over_a_crash() {
    let Some(node) = Node::new() else { return };
    let mut spec = closing();
    spec["rules"][0]["strategy"] = "Preview".into();
    node.set_rules(&spec);
    let would = || node.status()["rules"][0]["wouldLastDay"].clone();
    let agent = node.agent(&[]);
    agent.until("it counts", || would()["breaches"] == 0);
    let since = would()["since"].clone();
    assert!(since.is_string());
    node.machine.load.set(HIGH);
    agent.until("a breach is counted", || would()["breaches"] == 1);
    agent.kill();
    node.machine.load.set(LOW);
    let agent = node.agent(&[]);
    agent.until("it has ended", || {
        node.status()["rules"][0]["state"] == "Normal"
    });
    node.machine.load.set(HIGH);
    agent.until("another is counted", || would()["breaches"] == 2);
    let last = would();
    assert_eq!(last["since"], since, "{last}");
    assert!(last["activeMinutes"].as_i64() > Some(0), "{last}");
    let status = node.status();
    assert_eq!(status["counts"]["wouldLastDay"], 2);
    assert_eq!(status["scheduling"]["state"], "Enabled");
}

#[test]
fn a_node_is_tainted_above_the_threshold_until_the_cool_down_ends() {
    let Some(node) = Node::new() else { return };
    let other =
        r#"[{"op":"add","path":"/spec/taints","value":[{"key":"others","effect":"NoExecute"}]}]"#;
    node.plane
        .kubectl(&["patch", "node", NODE, "--type=json", "-p", other]);
    node.set_rules(&closing());
    let agent = node.agent(&[]);
    agent.until("it is ready", || agent.is_ready());
    assert_eq!(node.taints(), ["others:NoExecute"]);
    node.machine.load.set(HIGH);
    let tainted = ["others:NoExecute", "interference.crane.io:NoSchedule"];
    agent.until("the node is tainted", || node.taints() == tainted);
    // It is written after the taint.
    agent.until("the condition is set", || {
        node.condition()["status"] == "True"
    });
    let condition = node.condition();
    assert_eq!(condition["reason"], "q/cpu");
    let message = condition["message"].as_str().unwrap();
    assert!(message.contains("cpu_total_usage"), "{message}");
    // The successor of a dead agent neither flaps the taint nor leaves it.
    agent.kill();
    let before = node.condition()["lastTransitionTime"].clone();
    let agent = node.agent(&[]);
    agent.until("it has evaluated the rules", || agent.is_ready());
    assert_eq!(node.taints(), tainted);
    assert_eq!(node.condition()["lastTransitionTime"], before);
    // Another writer removes it: it is set again.
    node.plane
        .kubectl(&["taint", "node", NODE, "interference.crane.io-"]);
    agent.until("the taint is set again", || node.taints() == tainted);
    agent.kill();
    node.machine.load.set(LOW);
    let agent = node.agent(&[]);
    agent.until("the taint of a dead agent is removed", || {
        node.taints() == ["others:NoExecute"]
    });
    agent.until("the condition says so", || {
        node.condition()["status"] == "False"
    });
}

#[test]
fn pods_are_evicted_in_order_one_per_round() {
    let Some(mut node) = Node::new() else { return };
    let Some(leader) = Leader::published(&node.plane, NODE) else {
        return;
    };
    let owned = |kind: &str| json!([{"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "x", "controller": true}]);
    for (name, owner) in [
        ("daemon", Some("DaemonSet")),
        ("single", None),
        ("one", Some("ReplicaSet")),
        ("two", Some("ReplicaSet")),
    ] {
        let mut pod = pod(name, "batch");
        if let Some(kind) = owner {
            pod["metadata"]["ownerReferences"] = owned(kind);
        }
        node.burn_in(&pod);
    }
    node.set_rules(&evicting());
    let agent = node.agent(&leader.args());
    agent.until("it is ready", || agent.is_ready());
    agent.until("it reports to the leader", || leader.has_reporting_agent());
    let terminating = || terminating(&node);
    node.machine.load.set(HIGH);
    agent.until("one pod is evicted", || !terminating().is_empty());
    let first = terminating();
    assert!(first == ["one"] || first == ["two"], "{first:?}");
    let evicted = node.plane.get("pod", &first[0]);
    assert_eq!(evicted["metadata"]["deletionGracePeriodSeconds"], 7);
    agent.until("scheduling is disabled meanwhile", || {
        !node.taints().is_empty()
    });
    // No further eviction before the round has settled.
    let evaluations = |agent: &Agent| agent.output().matches("Breached").count();
    assert!(evaluations(&agent) >= 1);
    assert_eq!(terminating(), first);
    node.plane
        .kubectl(&["delete", "pod", &first[0], "--force", "--grace-period=0"]);
    agent.until("the other follows", || {
        terminating().len() == 1 && terminating() != first
    });
    let left = node.plane.list("pods").len();
    assert_eq!(left, 3, "daemon, single, and the one that is ending");
    agent.until("the metrics count both", || {
        let (_, text) = agent.http("/metrics").unwrap();
        text.contains(r#"plimsoll_agent_evictions_total{outcome="accepted"} 2"#)
    });
    agent.until("the status shows both", || {
        let status = node.status();
        status["counts"]["evictedLastHour"] == 2
            && status["evictions"][1]["pod"] == first[0].as_str()
            && status["evictions"][1]["outcome"] == "Gone"
    });
    // Only these were requested, each once.
    let sent = leader.requests();
    assert!(sent.iter().all(ReceivedRequest::is_direct), "{sent:?}");
    let sent = sent.iter().map(|it| it.request.target.name.clone());
    assert_eq!(sent.collect::<Vec<_>>(), leader.evicted());
    assert_eq!(
        leader.evicted(),
        [first[0].clone(), terminating()[0].clone()]
    );
}

/// The names of the pods that are being terminated, in order.
fn terminating(node: &Node) -> Vec<String> {
    let pods = node.plane.list("pods").into_iter();
    let ending = pods.filter(|pod| !pod["metadata"]["deletionTimestamp"].is_null());
    let mut names: Vec<String> = ending
        .map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

/// Three evictable pods owned by a `ReplicaSet`.
fn replicas(node: &mut Node) {
    let owner = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "x", "controller": true}]);
    for name in ["one", "two", "three"] {
        let mut pod = pod(name, "batch");
        pod["metadata"]["ownerReferences"] = owner.clone();
        node.burn_in(&pod);
    }
}

/// The refusals in the status that contain `words`.
fn refused(node: &Node, words: &str) -> Vec<Value> {
    let refused = node.status()["refused"].as_array().cloned();
    let refused = refused.unwrap_or_default().into_iter();
    refused
        .filter(|it| field_contains(it, "reason", words))
        .collect()
}

/// The events of refused evictions on the `NodeWatermark` that contain `words`.
fn refusal_events(node: &Node, words: &str) -> Vec<Value> {
    let is_one = |event: &Value| {
        event["reason"] == "EvictionRefused"
            && event["involvedObject"]["kind"] == "NodeWatermark"
            && field_contains(event, "message", words)
    };
    let events = node.plane.list("events").into_iter();
    events.filter(is_one).collect()
}

fn field_contains(object: &Value, field: &str, words: &str) -> bool {
    let text = object[field].as_str();
    text.is_some_and(|text| text.contains(words))
}

fn counted(agent: &Agent, series: &str) -> Option<u64> {
    let (_, text) = agent.http("/metrics")?;
    let value = text.lines().find_map(|line| line.strip_prefix(series));
    value?.trim().parse().ok()
}

/// Series of accepted evictions.
const EVICTED: &str = r#"plimsoll_agent_actions_total{action="evict",strategy="Enforce"}"#;
const REFUSED: &str = r#"plimsoll_agent_evictions_total{outcome="refused"}"#;

/// Registers a webhook for evictions that has no server; returns once the API server calls it.
fn webhook_that_is_down(node: &Node, pod: &str) {
    let webhook = json!({
        "name": "evictions.example.dev", "clientConfig": {"url": "https://127.0.0.1:1/"}, "failurePolicy": "Fail",
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods/eviction"], "operations": ["CREATE"]}],
        "sideEffects": "None", "admissionReviewVersions": ["v1"],
    });
    node.plane.create(&[json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": "guard"}, "webhooks": [webhook],
    })]);
    let path = format!("/api/v1/namespaces/default/pods/{pod}/eviction?dryRun=All");
    let eviction =
        json!({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}});
    eventually("the API server asks it", || {
        let tried = node.plane.try_kubectl(
            &["create", "--raw", &path, "-f", "-"],
            &eviction.to_string(),
        );
        tried
            .is_err_and(|why| why.contains("calling webhook"))
            .then_some(())
    });
}

#[test]
fn an_obstacle_to_all_evictions_is_reported_once_until_it_is_over() {
    let Some(mut node) = Node::new() else { return };
    let Some(leader) = Leader::published(&node.plane, NODE) else {
        return;
    };
    replicas(&mut node);
    webhook_that_is_down(&node, "one");
    node.set_rules(&evicting());
    let agent = node.agent(&leader.args());
    agent.until("it is ready", || agent.is_ready());
    agent.until("it reports to the leader", || leader.has_reporting_agent());
    node.machine.load.set(HIGH);
    // On a busy machine there may be other refusals, too.
    let down = r#"failed calling webhook "evictions.example.dev""#;
    let refused = || refused(&node, down);
    agent.until_within(TIMEOUT * 4, "it is in the status", || !refused().is_empty());
    let first = refused();
    let [entry] = first.as_slice() else {
        panic!("one entry for all pods: {first:?}");
    };
    assert_eq!(
        (&entry["what"], &entry["rule"], &entry["pod"]),
        (&json!("evict"), &json!("q/cpu"), &Value::Null)
    );
    // Three pods are refused in the first round and again in later ones.
    agent.until_within(TIMEOUT * 4, "it goes on", || {
        counted(&agent, REFUSED) >= Some(4)
    });
    assert_eq!(refused(), first);
    assert_eq!(counted(&agent, EVICTED), Some(0), "nothing was evicted");
    let events = || refusal_events(&node, down);
    agent.until_within(TIMEOUT * 4, "an event reports it", || !events().is_empty());
    let events = events();
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0]["count"], 1, "{events:?}");
    node.plane
        .kubectl(&["delete", "validatingwebhookconfiguration", "guard"]);
    agent.until_within(
        TIMEOUT * 4,
        "a pod is evicted and the refusal is gone",
        || refused().is_empty() && counted(&agent, EVICTED) >= Some(1),
    );
}

/// Deletes the pod of the last round and waits for the next eviction; returns the requests for it.
fn next_eviction(
    node: &Node,
    agent: &Agent,
    leader: &Leader,
    round: usize,
) -> Vec<ReceivedRequest> {
    for name in leader.evicted().iter().take(round - 1) {
        let force = ["--force", "--grace-period=0", "--ignore-not-found"];
        let delete = [&["delete", "pod", name][..], &force].concat();
        node.plane.kubectl(&delete);
    }
    agent.until_within(TIMEOUT * 4, "one more pod is evicted", || {
        counted(agent, EVICTED) >= Some(round as u64)
    });
    let evicted = leader.evicted();
    assert_eq!(evicted.len(), round, "one per round");
    let name = &evicted[round - 1];
    assert_eq!(terminating(node), std::slice::from_ref(name));
    let mut requests = leader.requests();
    requests.retain(|it| it.request.target.name == *name);
    requests
}

/// The path of each request: the connection of reports, or the API server.
fn paths(requests: &[ReceivedRequest]) -> Vec<&str> {
    requests.iter().map(|it| &*it.path).collect()
}

#[test]
fn without_a_reachable_replica_the_api_server_forwards_the_request() {
    let Some(mut node) = Node::new() else { return };
    let Some(leader) = Leader::start(&node.plane, NODE) else {
        return;
    };
    replicas(&mut node);
    node.set_rules(&evicting());
    let agent = node.agent(&leader.args());
    agent.until("it is ready", || agent.is_ready());
    node.machine.load.set(HIGH);
    // No endpoint, and no controller behind the API server.
    let unreachable = "the controller cannot be reached: no connection to the controller; \
                       the controller accepts no requests through the API server";
    let is_refused = || refused(&node, unreachable).len();
    agent.until_within(TIMEOUT * 4, "the status says so", || is_refused() == 1);
    agent.until_within(TIMEOUT * 4, "it goes on", || {
        counted(&agent, REFUSED) >= Some(4)
    });
    assert_eq!(is_refused(), 1, "one entry for all pods");
    agent.until_within(TIMEOUT * 4, "an event says so", || {
        refusal_events(&node, unreachable).len() == 1
    });
    assert_eq!(
        (leader.requests().len(), counted(&agent, EVICTED)),
        (0, Some(0))
    );
    leader.serve_through_api_server(&node.plane, "default");
    let by_api_server = api_path(NODE);
    let first = next_eviction(&node, &agent, &leader, 1);
    assert_eq!(paths(&first), [&by_api_server]);
    agent.until("it is over", || is_refused() == 0);
    leader.publish(&node.plane);
    agent.until("it reports to the leader", || leader.has_reporting_agent());
    let second = next_eviction(&node, &agent, &leader, 2);
    assert_eq!(paths(&second), [PATH]);
    // No process listens at the replica's address, as with a firewall that closes the port.
    leader.publish_port(&node.plane, free_port());
    agent.until("it cannot report any more", || {
        agent.output().contains("failed to send a direct report")
    });
    let third = next_eviction(&node, &agent, &leader, 3);
    assert_eq!(paths(&third), [&by_api_server]);
    let keys = [first, second, third].map(|requests| requests[0].request.key.clone());
    let boot_id = WriterProcess::this_process().unwrap().boot_id;
    assert!(keys.iter().all(|key| key.boot_id == boot_id), "{keys:?}");
    let grow = keys.is_sorted_by(|before, next| before.sequence < next.sequence);
    assert!(grow, "over either path: {keys:?}");
    assert_eq!(
        refusal_events(&node, unreachable).len(),
        1,
        "published once"
    );
}

#[test]
fn an_unanswered_request_is_repeated_with_the_same_key() {
    let Some(mut node) = Node::new() else { return };
    let Some(leader) = Leader::published(&node.plane, NODE) else {
        return;
    };
    replicas(&mut node);
    node.set_rules(&evicting());
    leader.respond_with(|_| RequestOutcome::Lost);
    let agent = node.agent(&leader.args());
    agent.until("it is ready", || agent.is_ready());
    agent.until("it reports to the leader", || leader.has_reporting_agent());
    node.machine.load.set(HIGH);
    // The API server has no controller to forward it to: the state of the pod decides.
    let alone = next_eviction(&node, &agent, &leader, 1);
    assert_eq!(paths(&alone), [PATH]);
    leader.serve_through_api_server(&node.plane, "default");
    // Then the answer to the API server is lost, too.
    let fates = [
        (RequestOutcome::Lost, RequestOutcome::Answered),
        (RequestOutcome::Refused, RequestOutcome::Lost),
    ];
    for (round, (direct, passed_on)) in (2..).zip(fates) {
        leader.respond_with(move |path| if path == PATH { direct } else { passed_on });
        let requests = next_eviction(&node, &agent, &leader, round);
        assert_eq!(paths(&requests), [PATH, &api_path(NODE)], "{direct:?}");
        assert_eq!(requests[0].request, requests[1].request, "{direct:?}");
    }
    agent.until("the metrics count each once", || {
        let accepted = r#"plimsoll_agent_evictions_total{outcome="accepted"}"#;
        counted(&agent, accepted) == Some(3)
    });
}

#[test]
fn an_eviction_is_shown_for_an_hour_on_an_idle_node() {
    let Some(node) = Node::new() else { return };
    node.set_rules(&evicting());
    // An eviction of an earlier agent, an hour less 25 s ago.
    let hour = Duration::from_hours(1) - Duration::from_secs(25);
    let now = json!(boot_time()).as_u64().unwrap();
    let Some(at) = now.checked_sub(u64::try_from(hour.as_nanos()).unwrap()) else {
        println!("NOT TESTED: this machine has been up for less than an hour");
        return;
    };
    let saved = json!({
        "bootId": WriterProcess::this_process().unwrap().boot_id,
        "state": EngineState::default(),
        "evictions": [{
            "uid": "u", "namespace": "default", "name": "gone", "rule": "q/cpu", "at": at,
            "time": "2026-01-01T00:00:00Z",
        }],
    });
    let state = node.machine.path("state");
    std::fs::create_dir_all(&state).unwrap();
    std::fs::write(state.join("engine.json"), saved.to_string()).unwrap();
    let agent = node.agent(&[]);
    let reported = || node.status()["counts"]["evictedLastHour"].clone();
    agent.until("it is shown", || reported() == 1);
    assert_eq!(node.status()["evictions"][0]["outcome"], "Gone");
    agent.until("it is not shown any more", || reported() == 0);
}

#[test]
fn changed_and_deleted_rules_are_followed_while_in_force() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    node.set_rules(&throttling());
    node.machine.load.set(HIGH);
    let agent = node.agent(&[]);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    // A rule that is not understood is left out and reported.
    node.plane.kubectl(&[
        "patch", "crd", "nodewatermarks.plimsoll.dev", "--type=json", "-p",
        r#"[{"op":"add","path":"/spec/versions/0/schema/openAPIV3Schema/properties/spec/x-kubernetes-preserve-unknown-fields","value":true},
            {"op":"add","path":"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/rules/items/x-kubernetes-preserve-unknown-fields","value":true}]"#,
    ]);
    let mut unknown_rule = rule("q/strange", "slow");
    unknown_rule["gravity"] = 7.into();
    let mut spec = throttling();
    spec["rules"].as_array_mut().unwrap().push(unknown_rule);
    eventually("the CRD accepts unknown fields", || {
        node.try_set_rules(&spec).ok()?;
        let there = node.plane.get("nwm", NODE);
        (there["spec"]["rules"][1]["gravity"] == 7).then_some(())
    });
    agent.until("it says which rule it leaves out", || {
        agent
            .output()
            .contains("rule q/strange: unknown field `gravity`")
    });
    assert!(node.is_throttled(&batch));
    // With a spec that is not understood the last rules stay in force.
    let mut later = throttling();
    later["rules"] = json!([]);
    later["moonPhase"] = "full".into();
    node.set_rules(&later);
    agent.until("it says that it does not understand", || {
        agent.output().contains("spec.moonPhase")
    });
    agent.until("the status says so", || {
        crate::agent_support::ready(&node.status()) == "False PreviousRulesEnforced"
    });
    assert!(node.is_throttled(&batch));
    node.set_rules(&json!({"rules": []}));
    agent.until("without rules everything is restored", || {
        node.quota(&batch) == -1
    });
    agent.until("it is ready without rules", || agent.is_ready());
}

#[test]
fn rules_of_another_node_are_ignored_and_a_missing_node_is_waited_for() {
    let Some(mut node) = Node::unregistered() else {
        return;
    };
    let agent = node.agent(&[]);
    agent.waits_for("node worker does not exist");
    node = node.register();
    agent.waits_for("there is no NodeWatermark for this node");
    let batch = node.burning_pod("batch");
    node.machine.load.set(HIGH);
    let mut spec = throttling();
    spec["nodeUID"] = "another".into();
    node.set_rules(&spec);
    agent.waits_for("is for a node with the UID another");
    agent.until("the status says so", || {
        crate::agent_support::ready(&node.status()) == "False PreviousRulesEnforced"
    });
    assert_eq!(node.quota(&batch), -1);
    node.set_rules(&throttling());
    agent.until("its own rules are enforced", || node.is_throttled(&batch));
}

#[test]
fn without_crds_or_permissions_it_says_so_and_waits() {
    let Some(node) = Node::new() else { return };
    node.plane
        .kubectl(&["delete", "crd", "nodewatermarks.plimsoll.dev"]);
    let agent = node.agent(&[]);
    agent.waits_for("the CRD of NodeWatermark is not installed");
    let config = std::fs::read_to_string(&node.plane.kubeconfig).unwrap();
    let with = |name: &str, user: &str| {
        let path = node.machine.path(name);
        let user = format!(r#""user":{{{user}}}"#);
        let config = config.replace(r#""user":{"token":"admin"}"#, &user);
        std::fs::write(&path, config).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let unknown = with("unknown", r#""token":"nobody""#);
    let unknown = node.agent_in("other", &["--kubeconfig", &unknown]);
    unknown.waits_for("the API server does not accept the agent's credentials");
    let guest = with("guest", r#""token":"admin","as":"guest""#);
    let guest = node.agent_in("third", &["--kubeconfig", &guest]);
    guest.waits_for(r#"User "guest" cannot list resource"#);
}

#[test]
fn a_second_agent_waits_and_takes_over_from_the_first() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    node.set_rules(&throttling());
    let first = node.agent(&[]);
    first.until("the first is ready", || first.is_ready());
    let second = node.agent_in("other", &[]);
    second.waits_for("another agent runs on this node");
    let third = node.agent(&[]);
    third.waits_for("another agent runs on this node");
    third.kill();
    first.kill();
    node.machine.load.set(HIGH);
    second.until("the second agent enforces the rules", || {
        node.is_throttled(&batch)
    });
}

#[test]
fn without_an_api_server_it_works_on_and_catches_up_afterwards() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    node.set_rules(&throttling());
    let agent = node.agent(&[]);
    agent.until("it is ready", || agent.is_ready());
    node.plane.stop();
    node.machine.load.set(HIGH);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    agent.until("the failing watch is logged", || {
        agent.output().contains("failed to watch")
    });
    node.machine.load.set(LOW);
    agent.until("its CPU limit is restored", || node.quota(&batch) == -1);
    assert!(agent.is_ready());
    node.plane.start_again();
    node.set_rules(&json!({"rules": []}));
    let within = Duration::from_mins(1);
    node.plane.until("the new rules are applied", within, |_| {
        agent.output().contains("rules=0")
    });
}

#[test]
fn an_agent_that_starts_without_an_api_server_uses_the_saved_state() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    node.set_rules(&throttling());
    node.machine.load.set(HIGH);
    let agent = node.agent(&[]);
    agent.until("the pod is throttled to its floor", || {
        agent.output().contains("-> 20 %")
    });
    let floor = node.quota(&batch);
    node.plane.stop();
    agent.kill();
    let successor = node.agent(&[]);
    successor.until("it uses the saved state", || {
        successor.output().contains("adopted=1")
    });
    successor.until("it evaluates the rules", || successor.is_ready());
    assert_eq!(node.quota(&batch), floor);
    node.machine.load.set(LOW);
    successor.until("its CPU limit is restored", || node.quota(&batch) == -1);
    node.machine.load.set(HIGH);
    successor.until("it throttles again", || node.is_throttled(&batch));
    node.plane.start_again();
    node.set_rules(&json!({"rules": []}));
    node.plane
        .until("it catches up", Duration::from_mins(1), |_| {
            node.quota(&batch) == -1
        });
}

#[test]
fn sigterm_leaves_everything_to_the_successor_while_the_daemonset_exists() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    let own = node.with_daemon_set();
    node.set_rules(&throttling());
    node.machine.load.set(HIGH);
    let agent = node.agent(&own);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    let (succeeded, output) = agent.terminate();
    assert!(
        succeeded && output.contains("what is in force stays in force"),
        "{output}"
    );
    let left = node.quota(&batch);
    assert!(left > 0);
    let successor = node.agent(&own);
    successor.until("it adopts", || successor.output().contains("adopted=1"));
    assert!(node.is_throttled(&batch));
    node.machine.load.set(LOW);
    successor.until("the exact original is back", || node.quota(&batch) == -1);
}

fn assert_status_shows_nothing_in_force(node: &Node) {
    let status = node.status();
    assert_eq!(crate::agent_support::ready(&status), "False AgentEnded");
    assert!(status["agent"].is_null(), "{status}");
    assert_eq!(status["counts"]["throttled"], 0, "{status}");
    assert_eq!(status["counts"]["breached"], 0, "{status}");
    assert_eq!(status["scheduling"]["state"], "Enabled");
    let is_empty = |field: &str| status[field].as_array().is_none_or(Vec::is_empty);
    assert!(is_empty("throttled") && is_empty("rules"), "{status}");
}

#[test]
fn sigterm_restores_everything_without_a_daemonset_and_restore_does_it_later() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    let own = node.with_daemon_set();
    node.set_rules(&throttling());
    node.machine.load.set(HIGH);
    let agent = node.agent(&own);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    node.plane.kubectl(&["delete", "daemonset", "agent"]);
    let (succeeded, output) = agent.terminate();
    assert!(
        succeeded && output.contains("DaemonSet agent is deleted"),
        "{output}"
    );
    assert_eq!(node.quota(&batch), -1);
    assert_status_shows_nothing_in_force(&node);
    // A killed agent leaves everything in force; --restore restores it and reports that.
    let agent = node.agent(&[]);
    agent.until("the status shows that the pod is throttled", || {
        node.is_throttled(&batch) && node.status()["counts"]["throttled"] == 1
    });
    agent.kill();
    let mut restore = node.agent(&["--restore"]);
    assert!(restore.process.0.wait().unwrap().success());
    assert_eq!(node.quota(&batch), -1);
    assert_status_shows_nothing_in_force(&node);
    // Without any API server.
    let agent = node.agent(&[]);
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    agent.kill();
    assert!(node.is_throttled(&batch));
    node.plane.stop();
    let mut restore = node.agent(&["--restore"]);
    assert!(
        restore.process.0.wait().unwrap().success(),
        "{}",
        restore.output()
    );
    assert_eq!(node.quota(&batch), -1);
}

#[test]
fn sigterm_restores_cgroups_when_the_account_has_no_rights() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    let own = node.with_daemon_set();
    let proxy = Proxy::beside(&node.plane.kubeconfig);
    let config = proxy.kubeconfig().to_string();
    let config = node.plane.file("proxy.kubeconfig", &config);
    let with_config = ["--kubeconfig", config.to_str().unwrap()];
    node.set_rules(&throttling());
    node.machine.load.set(HIGH);
    let agent = node.agent(&[&own[..], &with_config].concat());
    agent.until("the pod is throttled", || node.is_throttled(&batch));
    // As when its account, roles and DaemonSet are deleted one after the other.
    proxy.respond_with(|_, _| Some(Fault::Answer(403, None, "forbidden".to_owned())));
    let (_, output) = agent.terminate();
    assert!(
        output.contains("failed to read DaemonSet agent"),
        "{output}"
    );
    assert_eq!(node.quota(&batch), -1, "{output}");
}

#[test]
fn a_node_that_is_no_longer_selected_is_restored() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    let action = json!({
        "coolDownSeconds": 600, "disableScheduling": {},
        "throttle": {"cpuThrottle": {"minCPURatio": 20, "stepCPURatio": 40}},
    });
    let pods =
        json!({"labelSelector": {"matchLabels": {"app": "batch"}}, "allowedActions": ["throttle"]});
    let rules = json!({
        "selector": {"matchLabels": {"pool": "a"}},
        "rules": [{
            "name": "cpu", "actionName": "slow", "strategy": "Enforce",
            "metricRule": {"name": "cpu_total_usage", "value": 1000},
        }],
    });
    node.plane.apply(&[
        policy("AvoidanceAction", "slow", &action),
        policy("PodQOS", "batch", &pods),
        policy("NodeQOS", "q", &rules),
    ]);
    let _controller = node
        .plane
        .controller("controller", &["--max-unschedulable=100"]);
    let agent = node.agent(&[]);
    let is_closed = |node: &Node| {
        let taint = "interference.crane.io:NoSchedule".to_owned();
        node.taints().contains(&taint)
    };
    node.machine.load.set(HIGH);
    agent.until("the pod is throttled and the node tainted", || {
        node.is_throttled(&batch) && is_closed(&node)
    });
    // The node is as busy as before, and the cool-down is far from over.
    node.plane
        .kubectl(&["label", "node", NODE, "pool=b", "--overwrite"]);
    agent.until("the rule leaves the NodeWatermark", || {
        node.plane.get("nwm", NODE)["spec"]["rules"] == json!([])
    });
    agent.until("everything is restored", || {
        node.quota(&batch) == -1 && !is_closed(&node)
    });
    agent.until("the status says so", || {
        let status = node.status();
        status["counts"]["throttled"] == 0 && status["scheduling"]["state"] == "Enabled"
    });
    assert_eq!(node.condition()["status"], "False");
    node.plane
        .kubectl(&["label", "node", NODE, "pool=a", "--overwrite"]);
    agent.until("selected again, the rule acts again", || {
        node.is_throttled(&batch) && is_closed(&node)
    });
}
