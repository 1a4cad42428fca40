//! Edits that make policies stricter go to canaries first, and to the other nodes only if these succeed.

use std::time::Duration;

use crate::reconciler_support::{Cluster, breached, node_qos, ready};
use plimsoll::crd::Kind;
use serde_json::{Value, json};

#[test]
fn a_stricter_edit_goes_to_canaries_then_to_the_others_at_the_given_rate() {
    let mut cluster = ready(300);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    assert_eq!(cluster.settle(0), 3);
    cluster.settle(0);
    let reason = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(reason, ("False".into(), "Canaries".into()));
    cluster.pass(Duration::from_secs(30));
    assert_eq!(cluster.settle(0), 0);
    cluster.pass(Duration::from_secs(20));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 3);
    cluster.pass(Duration::from_secs(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 103);
    cluster.pass(Duration::from_secs(5));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 300);
    for kind in ["RolledOut", "Reconciling", "Stalled"] {
        assert_eq!(cluster.condition(Kind::NodeQos, "q", kind), None, "{kind}");
    }
}

/// The column of `kubectl get`; `None`: the status has not changed.
fn shown(cluster: &mut Cluster) -> Option<String> {
    let statuses = cluster
        .reconciler
        .statuses(cluster.now, "2026-11-21T00:00:00Z");
    let mut statuses = statuses.iter();
    let status = statuses.find(|it| it.key == (Kind::NodeQos, "q".into()))?;
    status.status["rollout"].as_str().map(str::to_owned)
}

#[test]
fn the_status_says_how_long_an_edit_waits_for_its_canary() {
    let mut cluster = ready(20);
    cluster.reconciler.take_events();
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    cluster.settle(0);
    cluster.settle(0);
    let events = cluster.reconciler.take_events();
    let [started] = &events[..] else {
        panic!("one event for one transition: {events:?}")
    };
    assert_eq!((started.warning, started.reason), (false, "RolloutStarted"));
    let text = "first, for 1m after they enforce it; ";
    assert!(started.message.contains(text), "{started:?}");
    cluster.pass(Duration::from_secs(20));
    cluster.settle(0);
    assert_eq!(shown(&mut cluster).unwrap(), "Canaries, 40s left");
    cluster.pass(Duration::from_secs(15));
    cluster.settle(0);
    assert_eq!(shown(&mut cluster).unwrap(), "Canaries, 30s left");
    assert!(rolled_out(&mut cluster).contains("first, for 30s more; "));
    cluster.finish();
    assert_eq!(shown(&mut cluster), None);
    let events = cluster.reconciler.take_events();
    let reasons: Vec<_> = events.iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["RolledOut"]);
}

#[test]
fn an_edit_without_a_possible_canary_warns() {
    let mut cluster = ready(20);
    let names: Vec<String> = cluster.watermarks.keys().cloned().collect();
    cluster.stop_agents(&names);
    for name in &names {
        cluster.report(name, json!({}));
    }
    cluster.reconciler.take_events();
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    cluster.settle(0);
    let events = cluster.reconciler.take_events();
    let waits = events.iter().find(|event| event.reason == "RolloutWaits");
    assert!(waits.is_some_and(|event| event.warning), "{events:?}");
}

#[test]
fn an_edit_whose_canaries_act_stops_until_it_is_edited_again() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    cluster.settle(0);
    let canary = cluster
        .watermarks
        .keys()
        .find(|node| cluster.rules(node) > 0)
        .unwrap()
        .clone();
    cluster.settle(0);
    cluster.report(&canary, breached(4100.0));
    cluster.pass(Duration::from_secs(5));
    cluster.settle(0);
    cluster.pass(Duration::from_hours(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 1);
    let events = cluster.reconciler.take_events();
    assert!(
        events
            .iter()
            .any(|event| event.warning && event.reason == "RolloutStopped"),
        "{events:?}"
    );
    let stopped = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(stopped, ("False".into(), "CanariesAct".into()));
    let stalled = cluster.condition(Kind::NodeQos, "q", "Stalled");
    assert_eq!(stalled, Some(("True".into(), "CanariesAct".into())));
    // A looser edit goes to all nodes at once; so does a deletion.
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 20);
    cluster.delete(Kind::NodeQos, "q");
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 0);
}

/// The status of a node with a Preview rule above its threshold.
fn would(value: f64) -> Value {
    json!({
        "rules": [{"id": "q/cpu", "strategy": "Preview", "state": "Breached", "value": value, "mark": 4000.0}],
        "scheduling": {"state": "Enabled"},
    })
}

#[test]
fn enforcing_a_breached_preview_rule_stops_at_the_canary() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.finish();
    let all: Vec<String> = cluster.nodes.keys().cloned().collect();
    for node in &all {
        cluster.report(node, would(4100.0));
    }
    cluster.reconciler.take_events();
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    cluster.settle(0);
    cluster.settle(0);
    let acting = |cluster: &Cluster| -> Vec<String> {
        let acting = cluster.watermarks.iter();
        let acting = acting.filter(|(_, w)| w["spec"]["rules"][0]["strategy"] == "Enforce");
        acting.map(|(name, _)| name.clone()).collect()
    };
    let canary = acting(&cluster);
    assert_eq!(canary.len(), 1);
    // The others only preview: none of them gets an event about the cap.
    let events = cluster.reconciler.take_events();
    let reasons: Vec<_> = events.iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["RolloutStarted"]);
    cluster.report(&canary[0], breached(4100.0));
    cluster.settle(0);
    cluster.pass(Duration::from_hours(1));
    cluster.settle(0);
    assert_eq!(acting(&cluster), canary);
    let stopped = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(stopped, ("False".into(), "CanariesAct".into()));
}

#[test]
fn a_preview_rule_that_breaches_during_a_rollout_does_not_stop_it() {
    let mut cluster = ready(20);
    let mut spec = node_qos(None, "close", 4000, "Preview");
    cluster.apply(Kind::NodeQos, "q", &spec);
    cluster.finish();
    let mut second = spec["rules"][0].clone();
    second["name"] = json!("other");
    second["strategy"] = json!("Enforce");
    spec["rules"].as_array_mut().unwrap().push(second);
    cluster.apply(Kind::NodeQos, "q", &spec);
    cluster.settle(0);
    cluster.settle(0);
    let nodes: Vec<String> = cluster.nodes.keys().cloned().collect();
    for node in &nodes {
        cluster.report(node, would(4100.0));
    }
    cluster.finish();
    assert!(nodes.iter().all(|node| cluster.rules(node) == 2));
}

#[test]
fn a_loosening_is_not_blocked_by_a_stopped_edit_of_another_policy() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "loose",
        &node_qos(None, "close", 5000, "Preview"),
    );
    cluster.settle(0);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    cluster.settle(0);
    assert_eq!(
        cluster
            .watermarks
            .keys()
            .filter(|n| cluster.rules(n) == 2)
            .count(),
        1
    );
    cluster.delete(Kind::NodeQos, "loose");
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 1);
}

fn apply(cluster: &mut Cluster, threshold: u32) {
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", threshold, "None"),
    );
    cluster.settle(0);
    cluster.settle(0);
}

/// Twenty nodes with a threshold of 4000, and an edit to 2000 that stopped at its canary.
fn stopped() -> (Cluster, String) {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    cluster.finish();
    apply(&mut cluster, 2000);
    let canary = cluster.with("watermark", 2000.0);
    assert_eq!(canary.len(), 1);
    cluster.report(&canary[0], breached(3000.0));
    cluster.settle(0);
    assert_eq!(reason(&mut cluster), "CanariesAct");
    (cluster, canary[0].clone())
}

/// Twenty nodes whose agents have confirmed nothing and no longer report; their names.
fn unresponsive() -> (Cluster, Vec<String>) {
    let mut cluster = ready(20);
    let names = cluster.names();
    cluster.stop_agents(&names);
    for name in &names {
        cluster.report(name, json!({}));
    }
    (cluster, names)
}

fn reason(cluster: &mut Cluster) -> String {
    let rolled_out = cluster.condition(Kind::NodeQos, "q", "RolledOut");
    rolled_out.map_or_else(String::new, |(_, reason)| reason)
}

#[test]
fn without_a_reporting_agent_the_edit_waits_and_says_so() {
    let (mut cluster, names) = unresponsive();
    apply(&mut cluster, 4000);
    cluster.finish();
    assert_eq!(cluster.with_rules(), 0);
    cluster.reconciler.status_failed(cluster.now);
    cluster.pass(Duration::from_secs(20));
    let statuses = cluster
        .reconciler
        .statuses(cluster.now, "2026-11-21T00:00:00Z");
    let statuses = serde_json::to_string(&statuses.iter().map(|s| &s.status).collect::<Vec<_>>());
    let statuses = statuses.unwrap();
    assert!(
        statuses.contains("NoCanary") && statuses.contains("plimsoll.dev/rollout=immediate"),
        "{statuses}"
    );
    // One agent starts: it is the canary, and the edit continues.
    cluster.start_agent(&names[7]);
    cluster.pass(Duration::from_secs(5));
    cluster.settle(0);
    assert_eq!(cluster.with("id", "q/cpu"), names[7..8]);
    cluster.finish();
    assert_eq!(cluster.with_rules(), 20);
}

#[test]
fn an_unresponsive_canary_is_joined_by_only_a_few_others() {
    let mut cluster = ready(20);
    let names = cluster.names();
    cluster.stop_agents(&names);
    apply(&mut cluster, 4000);
    assert_eq!(cluster.with_rules(), 1);
    cluster.pass(Duration::from_secs(30));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 2);
    for _ in 0..100 {
        cluster.pass(Duration::from_secs(30));
        cluster.settle(0);
    }
    assert_eq!(cluster.with_rules(), 4);
    assert_eq!(reason(&mut cluster), "NoCanary");
    let reconciling = cluster.condition(Kind::NodeQos, "q", "Reconciling");
    assert_eq!(reconciling, Some(("True".into(), "NoCanary".into())));
    let canary = cluster.with("id", "q/cpu").remove(2);
    cluster.start_agent(&canary);
    cluster.settle(0);
    cluster.pass(Duration::from_secs(59));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 4);
    cluster.pass(Duration::from_secs(2));
    cluster.finish();
    assert_eq!(cluster.with_rules(), 20);
}

#[test]
fn a_canary_that_is_deleted_while_watched_proves_nothing() {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    let canary = cluster.with("id", "q/cpu").remove(0);
    cluster.settle(0);
    cluster.pass(Duration::from_secs(50));
    cluster.delete_node(&canary);
    cluster.settle(0);
    cluster.pass(Duration::from_secs(30));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 1);
    cluster.settle(0);
    cluster.pass(Duration::from_secs(59));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 1);
    cluster.finish();
    assert_eq!(cluster.with_rules(), 19);
}

#[test]
fn a_canary_whose_agent_dies_while_watched_proves_nothing() {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    let canary = cluster.with("id", "q/cpu").remove(0);
    let interval = Duration::from_secs(10);
    cluster.reconciler.reported(&canary, interval, cluster.now);
    for second in (0..100).step_by(5) {
        if second < 30 {
            cluster.reconciler.reported(&canary, interval, cluster.now);
        }
        cluster.pass(interval / 2);
        cluster.settle(0);
    }
    assert_eq!(cluster.with_rules(), 2, "another tries it");
    cluster.finish();
    assert_eq!(cluster.with_rules(), 20);
}

#[test]
fn a_pod_qos_edit_is_watched_as_long_as_the_slowest_rule_of_its_nodes() {
    let mut cluster = ready(0);
    for node in ["a0", "a1", "b0", "b1"] {
        cluster.node(node, &node[..1]);
    }
    let throttle = json!({"throttle": {"cpuThrottle": {}}});
    cluster.apply(Kind::AvoidanceAction, "throttle", &throttle);
    let mut slow = node_qos(Some("b"), "throttle", 4000, "Enforce");
    slow["rules"][0]["avoidanceThreshold"] = json!(180);
    let fast = node_qos(Some("a"), "throttle", 4000, "Enforce");
    cluster.apply(Kind::NodeQos, "fast", &fast);
    cluster.apply(Kind::NodeQos, "slow", &slow);
    cluster.finish();
    cluster.finish();
    assert_eq!(cluster.with_rules(), 4);
    let spec = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "batch", &spec);
    let with_pods = |cluster: &Cluster| {
        let specs = cluster.watermarks.values().map(|it| &it["spec"]);
        let pods = specs.filter_map(|spec| spec["podPolicies"].as_array());
        pods.filter(|pods| !pods.is_empty()).count()
    };
    for _ in 0..59 {
        cluster.settle(0);
        cluster.pass(Duration::from_mins(1));
        assert_eq!(with_pods(&cluster), 1);
    }
    cluster.finish();
    assert_eq!(with_pods(&cluster), 4);
}

#[test]
fn the_pods_of_a_rule_are_an_edit_of_its_node_qos() {
    let mut cluster = ready(20);
    let with_pods = |pods: Value| {
        json!({"rules": [{
            "name": "cpu", "avoidanceThreshold": 2, "strategy": "Enforce", "pods": pods,
            "action": {"throttle": {"cpuThrottle": {}}},
            "metricRule": {"name": "cpu_total_usage", "value": 4000},
        }]})
    };
    let selecting = |cluster: &Cluster, part: &str| -> Vec<String> {
        let all = cluster.watermarks.iter();
        let all = all.filter(|(_, it)| it["spec"]["podPolicies"][0][part] != Value::Null);
        all.map(|(name, _)| name.clone()).collect()
    };
    let few = with_pods(json!({"matchLabels": {"workload": "batch"}}));
    cluster.apply(Kind::NodeQos, "q", &few);
    cluster.finish();
    cluster.finish();
    assert_eq!(selecting(&cluster, "labels").len(), 20);
    for watermark in cluster.watermarks.values() {
        let sources = watermark["spec"]["sources"].as_array().unwrap();
        let from = |it: &Value| it.as_str().unwrap().starts_with("NodeQOS/q@");
        assert!(sources.iter().all(from), "{sources:?}");
    }
    let more = with_pods(json!({"qosClasses": ["BestEffort", "Burstable"]}));
    cluster.apply(Kind::NodeQos, "q", &more);
    cluster.settle(0);
    let canary = selecting(&cluster, "scopes");
    assert_eq!(canary.len(), 1);
    cluster.report(&canary[0], breached(4100.0));
    cluster.finish();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(selecting(&cluster, "scopes"), canary);
    cluster.apply(Kind::NodeQos, "q", &few);
    cluster.finish();
    assert_eq!(selecting(&cluster, "scopes"), [""; 0]);
}

#[test]
fn objects_applied_together_share_their_canary() {
    let mut cluster = ready(50);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Enforce"),
    );
    let pods = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "everything", &pods);
    cluster.settle(0);
    let nodes_with = |part: &str| -> Vec<&String> {
        let all = cluster.watermarks.iter();
        let all = all.filter(|(_, it)| it["spec"][part] != json!([]));
        all.map(|(name, _)| name).collect()
    };
    assert_eq!(nodes_with("rules").len(), 1);
    assert_eq!(nodes_with("rules"), nodes_with("podPolicies"));
}

#[test]
fn a_stopped_edit_stays_stopped_when_another_policy_is_edited() {
    let (mut cluster, canary) = stopped();
    let other = node_qos(None, "close", 5000, "Preview");
    cluster.apply(Kind::NodeQos, "other", &other);
    cluster.finish();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    cluster.delete(Kind::NodeQos, "other");
    cluster.finish();
    assert_eq!(cluster.with("watermark", 2000.0), [canary]);
    assert_eq!(cluster.with("watermark", 4000.0).len(), 19);
}

#[test]
fn a_canary_that_acts_since_an_earlier_edit_proves_nothing() {
    let (mut cluster, bad) = stopped();
    apply(&mut cluster, 2500);
    let mut has = cluster.with("watermark", 2500.0);
    has.retain(|node| *node != bad);
    assert_eq!(has.len(), 1);
    cluster.report(&has[0], breached(3000.0));
    cluster.finish();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(cluster.with("watermark", 4000.0).len(), 18);
}

#[test]
fn during_a_stopped_edit_a_node_without_a_watermark_gets_the_old_policy() {
    let (mut cluster, canary) = stopped();
    let names = cluster.names();
    let lost = names.iter().find(|name| **name != canary).unwrap().clone();
    cluster.delete_watermark(&lost);
    cluster.node("node999", "a");
    cluster.settle(0);
    for node in [lost.as_str(), "node999"] {
        assert_eq!(
            cluster.watermarks[node]["spec"]["rules"][0]["watermark"], 4000.0,
            "{node}"
        );
    }
    // The same with another leader.
    cluster.fail_over();
    cluster.delete_watermark(&lost);
    cluster.settle(0);
    assert_eq!(cluster.with("watermark", 4000.0).len(), 20);
    assert_eq!(cluster.with("watermark", 2000.0), [canary]);
}

#[test]
fn a_rollout_continues_where_it_was_after_a_short_api_server_outage() {
    let mut cluster = ready(300);
    apply(&mut cluster, 4000);
    cluster.pass(Duration::from_mins(1));
    cluster.settle(0);
    cluster.pass(Duration::from_secs(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 103);
    // Canaries that act by now no longer stop the edit.
    cluster.reconciler.stop_leading();
    cluster.pass(Duration::from_mins(10));
    cluster.reconciler.start_leading();
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 103);
    cluster.pass(Duration::from_secs(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 203);
    cluster.finish();
    assert_eq!(cluster.with_rules(), 300);
}

/// 20 nodes, all of which act by a rule.
fn all_acting() -> Cluster {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    cluster.finish();
    for name in cluster.names() {
        cluster.report(&name, breached(5000.0));
    }
    cluster.settle(0);
    cluster
}

#[test]
fn canaries_that_acted_before_the_edit_do_not_stop_it_after_an_outage() {
    let mut cluster = all_acting();
    apply(&mut cluster, 3000);
    assert_eq!(cluster.with("watermark", 3000.0).len(), 1);
    cluster.reconciler.stop_leading();
    cluster.reconciler.start_leading();
    cluster.finish();
    assert_eq!(reason(&mut cluster), "");
    assert_eq!(cluster.with("watermark", 3000.0).len(), 20);
}

#[test]
fn a_new_leader_picks_a_canary_whose_earlier_state_it_knows() {
    let mut cluster = all_acting();
    apply(&mut cluster, 3000);
    cluster.fail_over();
    cluster.settle(0);
    // The canary of the last leader acts, and it is unknown since when.
    assert_eq!(cluster.with("watermark", 3000.0).len(), 2);
    cluster.finish();
    assert_eq!(cluster.with("watermark", 3000.0).len(), 20);
}

#[test]
fn an_edit_reaches_new_nodes_after_all_its_nodes_were_replaced() {
    let (mut cluster, names) = unresponsive();
    apply(&mut cluster, 4000);
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 0, "no node can be a canary");
    for name in &names {
        cluster.delete_node(name);
    }
    cluster.node("new", "a");
    cluster.finish();
    assert_eq!(cluster.with("id", "q/cpu"), ["new"]);
}

/// A `NodeQOS` for these pools.
fn in_pools(pools: &[&str], threshold: u32) -> Value {
    let mut spec = node_qos(None, "close", threshold, "None");
    spec["selector"] = json!({
        "matchExpressions": [{"key": "pool", "operator": "In", "values": pools}],
    });
    spec
}

/// 450 nodes with a rule in force, and 50 that it does not select.
fn two_pools() -> Cluster {
    let mut cluster = ready(0);
    for index in 0..450 {
        cluster.node(&format!("old{index:03}"), "old");
    }
    for index in 0..50 {
        cluster.node(&format!("new{index:03}"), "new");
    }
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old"], 4000));
    cluster.finish();
    assert_eq!(cluster.with_rules(), 450);
    cluster
}

fn new_ones(mut nodes: Vec<String>) -> Vec<String> {
    nodes.retain(|node| node.starts_with("new"));
    nodes
}

fn rolled_out(cluster: &mut Cluster) -> String {
    cluster.reconciler.status_failed(cluster.now);
    cluster.pass(Duration::from_secs(20));
    let statuses = cluster
        .reconciler
        .statuses(cluster.now, "2026-11-21T00:00:00Z");
    let status = statuses
        .iter()
        .find(|it| it.key == (Kind::NodeQos, "q".into()));
    let conditions = status.unwrap().status["conditions"].as_array().unwrap();
    let found = conditions.iter().find(|it| it["type"] == "RolledOut");
    found.map_or_else(String::new, |it| it["message"].as_str().unwrap().to_owned())
}

#[test]
fn a_widened_selector_is_tried_on_the_newly_selected_nodes() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.settle(0);
    let canary = new_ones(cluster.with("id", "q/cpu"));
    assert_eq!(canary.len(), 1);
    assert!(
        rolled_out(&mut cluster).contains(&format!("1 of 50 nodes ({})", canary[0])),
        "{}",
        rolled_out(&mut cluster)
    );
    cluster.report(&canary[0], breached(4100.0));
    cluster.finish();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(cluster.with_rules(), 451);
}

#[test]
fn a_moved_selector_is_tried_on_the_newly_selected_nodes() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["new"], 4000));
    cluster.settle(0);
    let canary = cluster.with("id", "q/cpu");
    assert_eq!(new_ones(canary.clone()), canary, "the old ones lose it");
    assert_eq!(canary.len(), 1);
    cluster.report(&canary[0], breached(4100.0));
    cluster.finish();
    assert_eq!(cluster.with("id", "q/cpu"), canary);
}

#[test]
fn an_edit_new_to_some_nodes_and_stricter_on_others_has_canaries_in_both() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 3000));
    cluster.settle(0);
    cluster.settle(0);
    let canaries = cluster.with("watermark", 3000.0);
    assert_eq!(canaries.len(), 6, "5 of 450 and 1 of 50");
    let new = new_ones(canaries);
    assert_eq!(new.len(), 1);
    // One of six is less than 20 %, but it is the only one that shows what the edit does on new nodes.
    cluster.report(&new[0], breached(3100.0));
    cluster.finish();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(cluster.with("watermark", 3000.0).len(), 6);
}

#[test]
fn an_edit_without_a_canary_among_new_nodes_says_how_many_it_waits_for() {
    let mut cluster = two_pools();
    let names = cluster.names();
    let new = new_ones(names);
    cluster.stop_agents(&new);
    for name in &new {
        cluster.report(name, json!({}));
    }
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.finish();
    assert_eq!(cluster.with_rules(), 450);
    assert_eq!(reason(&mut cluster), "NoCanary");
    let message = rolled_out(&mut cluster);
    assert!(
        message.contains("none of its 50 nodes is Ready"),
        "{message}"
    );
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 3000));
    cluster.finish();
    assert_eq!(
        cluster.with("watermark", 3000.0).len(),
        5,
        "those of the old"
    );
    let message = rolled_out(&mut cluster);
    assert!(
        message.contains("the edit waits for a canary among 50 of its"),
        "{message}"
    );
    cluster.start_agent(&new[7]);
    cluster.finish();
    assert_eq!(cluster.with("watermark", 3000.0).len(), 500);
}

#[test]
fn a_single_unavailable_new_node_does_not_block_an_edit() {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    cluster.finish();
    cluster.node("other", "b");
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(Some("a"), "close", 4000, "Enforce"),
    );
    cluster.finish();
    cluster.stop_agents(&["other".to_owned()]);
    cluster.report("other", json!({}));
    apply(&mut cluster, 3000);
    cluster.finish();
    assert_eq!(cluster.with("watermark", 3000.0).len(), 21);
}

/// Nodes with a pod policy in force.
fn with_pods(cluster: &Cluster) -> Vec<String> {
    let all = cluster.watermarks.iter();
    let all = all.filter(|(_, it)| it["spec"]["podPolicies"] != json!([]));
    all.map(|(name, _)| name.clone()).collect()
}

/// A selector is widened by 50 nodes, while 130 nodes of another `NodeQOS`, which already have the same `PodQOS`, start to throttle.
fn widened_beside_nodes_of_another_policy(is_failover: bool) {
    let mut cluster = two_pools();
    let others: Vec<String> = (0..130).map(|index| format!("other{index:03}")).collect();
    for name in &others {
        cluster.node(name, "other");
    }
    cluster.apply(Kind::NodeQos, "r", &in_pools(&["other"], 4000));
    let pods = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "everything", &pods);
    cluster.finish();
    cluster.finish();
    assert_eq!(with_pods(&cluster).len(), 580);
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.settle(0);
    if is_failover {
        cluster.fail_over();
    }
    cluster.settle(0);
    cluster.settle(0);
    for name in &others {
        cluster.report(name, json!({"counts": {"throttled": 3}}));
    }
    cluster.finish();
    assert_eq!(new_ones(with_pods(&cluster)).len(), 50);
    let rolled_out = cluster.condition(Kind::PodQos, "everything", "RolledOut");
    assert_eq!(rolled_out, None);
}

#[test]
fn nodes_an_edit_does_not_change_neither_try_nor_stop_it() {
    widened_beside_nodes_of_another_policy(false);
}

#[test]
fn nodes_an_edit_does_not_change_neither_try_nor_stop_it_after_a_failover() {
    widened_beside_nodes_of_another_policy(true);
}

#[test]
fn pod_policies_of_a_widened_selector_are_tried_on_the_new_nodes() {
    let mut cluster = two_pools();
    let pods = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "everything", &pods);
    cluster.finish();
    assert_eq!(with_pods(&cluster).len(), 450);
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.settle(0);
    let canary = new_ones(cluster.with("id", "q/cpu"));
    assert_eq!(canary.len(), 1);
    assert_eq!(new_ones(with_pods(&cluster)), canary);
}

#[test]
fn another_leader_continues_with_the_new_nodes_only() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.settle(0);
    let canary = new_ones(cluster.with("id", "q/cpu"));
    cluster.fail_over();
    cluster.settle(0);
    cluster.settle(0);
    assert_eq!(
        new_ones(cluster.with("id", "q/cpu")),
        canary,
        "no more try it"
    );
    cluster.report(&canary[0], breached(4100.0));
    cluster.finish();
    assert_eq!(cluster.with_rules(), 451);
}

#[test]
fn another_leader_continues_even_if_all_new_nodes_with_the_edit_act() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.settle(0);
    cluster.settle(0);
    cluster.pass(Duration::from_mins(1));
    cluster.settle(0);
    cluster.pass(Duration::from_millis(100));
    cluster.settle(0);
    let reached = new_ones(cluster.with("id", "q/cpu"));
    assert!((2..50).contains(&reached.len()), "{reached:?}");
    for name in &reached {
        cluster.report(name, breached(4100.0));
    }
    cluster.fail_over();
    cluster.finish();
    assert_eq!(reason(&mut cluster), "");
    assert_eq!(cluster.with_rules(), 500);
}

#[test]
fn a_canary_that_loses_the_rule_by_a_label_change_proves_nothing() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(Some("a"), "close", 4000, "Enforce"),
    );
    cluster.settle(0);
    cluster.settle(0);
    let canary = cluster.with("id", "q/cpu").remove(0);
    cluster.pass(Duration::from_secs(50));
    cluster.node(&canary, "b");
    cluster.settle(0);
    cluster.pass(Duration::from_secs(30));
    cluster.settle(0);
    let next = cluster.with("id", "q/cpu");
    assert_eq!(next.len(), 1, "another tries it");
    assert_ne!(next[0], canary);
    cluster.finish();
    assert_eq!(cluster.with_rules(), 19);
}

#[test]
fn a_node_added_during_an_edit_does_not_get_an_earlier_stopped_version() {
    let (mut cluster, canary) = stopped();
    let names = cluster.names();
    for name in names.iter().filter(|name| **name < canary) {
        cluster.delete_node(name);
    }
    // Tighter than on any node, so that the canary of the earlier edit is among the changed nodes.
    apply(&mut cluster, 1000);
    assert_eq!(cluster.with("watermark", 2000.0), [canary]);
    cluster.node("node999", "a");
    cluster.settle(0);
    let spec = &cluster.watermarks["node999"]["spec"];
    assert_eq!(spec["rules"][0]["watermark"], 4000.0);
}

/// The nodes whose pods a `PodQOS` holds in the idle class.
fn holding(cluster: &Cluster) -> usize {
    let specs = cluster.watermarks.values().map(|it| &it["spec"]);
    let holds = |spec: &&Value| spec["podPolicies"][0]["standing"]["idle"] == json!(true);
    specs.filter(holds).count()
}

#[test]
fn the_first_policy_that_lowers_pods_goes_to_canaries_too_and_ends_everywhere_at_once() {
    let mut cluster = ready(20);
    let mut holds = json!({"labelSelector": {}, "resourceQOS": {"cpuQOS": {"cpuPriority": 7}}});
    cluster.apply(Kind::PodQos, "holds", &holds);
    cluster.settle(0);
    cluster.settle(0);
    assert_eq!(holding(&cluster), 1);
    let reason = cluster
        .condition(Kind::PodQos, "holds", "RolledOut")
        .unwrap();
    assert_eq!(reason, ("False".into(), "Canaries".into()));
    cluster.finish();
    assert_eq!(holding(&cluster), 20);
    holds["resourceQOS"]["cpuQOS"]["cpuPriority"] = json!(3);
    cluster.apply(Kind::PodQos, "holds", &holds);
    cluster.settle(0);
    assert_eq!(holding(&cluster), 0);
}
