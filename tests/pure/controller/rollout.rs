//! Edits that make policies stricter go to canaries first, and to all others only when these did well.

use std::time::Duration;

use crate::world_support::{Cluster, breached, node_qos, ready};
use plimsoll::crd::Kind;
use serde_json::{Value, json};

#[test]
fn a_stricter_edit_goes_to_its_canaries_and_a_minute_later_to_the_others_at_the_given_rate() {
    let mut cluster = ready(300);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
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
    assert_eq!(cluster.condition(Kind::NodeQos, "q", "RolledOut"), None);
}

/// What `kubectl get` shows of the edit; `None`: the status has not changed.
fn shown(cluster: &mut Cluster) -> Option<String> {
    let statuses = cluster.world.statuses(cluster.now, "2026-11-21T00:00:00Z");
    let mut statuses = statuses.iter();
    let status = statuses.find(|it| it.key == (Kind::NodeQos, "q".into()))?;
    status.status["rollout"].as_str().map(str::to_owned)
}

#[test]
fn an_edit_that_waits_for_its_canary_says_so_and_for_how_long() {
    let mut cluster = ready(20);
    cluster.world.take_notes();
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.settle(0);
    cluster.settle(0);
    let notes = cluster.world.take_notes();
    let [started] = &notes[..] else {
        panic!("one event for one transition: {notes:?}")
    };
    assert_eq!((started.warning, started.reason), (false, "RolloutStarted"));
    let words = "first, for 1 min from when these keep it; ";
    assert!(started.message.contains(words), "{started:?}");
    cluster.pass(Duration::from_secs(20));
    cluster.settle(0);
    assert_eq!(shown(&mut cluster).unwrap(), "Canaries, 40 s left");
    cluster.pass(Duration::from_secs(15));
    cluster.settle(0);
    assert_eq!(shown(&mut cluster).unwrap(), "Canaries, 30 s left");
    assert!(rolled_out(&mut cluster).contains("first, for 30 s more; "));
    cluster.rest();
    assert_eq!(shown(&mut cluster), None);
    let notes = cluster.world.take_notes();
    let reasons: Vec<_> = notes.iter().map(|note| note.reason).collect();
    assert_eq!(reasons, ["RolledOut"]);
}

#[test]
fn an_edit_that_no_node_can_try_warns() {
    let mut cluster = ready(20);
    let silent: Vec<String> = cluster.watermarks.keys().cloned().collect();
    cluster.fall_silent(&silent);
    for name in &silent {
        cluster.report(name, json!({}));
    }
    cluster.world.take_notes();
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.settle(0);
    let notes = cluster.world.take_notes();
    let waits = notes.iter().find(|note| note.reason == "RolloutWaits");
    assert!(waits.is_some_and(|note| note.warning), "{notes:?}");
}

#[test]
fn an_edit_by_which_canaries_act_stops_there_until_it_is_edited_again() {
    let mut cluster = ready(20);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
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
    let notes = cluster.world.take_notes();
    assert!(
        notes
            .iter()
            .any(|note| note.warning && note.reason == "RolloutStopped"),
        "{notes:?}"
    );
    let stopped = cluster.condition(Kind::NodeQos, "q", "RolledOut").unwrap();
    assert_eq!(stopped, ("False".into(), "CanariesAct".into()));
    // What is looser goes to all nodes at once; so does the end of it all.
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

/// What a node says whose rule is over its mark and only reports.
fn would(value: f64) -> Value {
    json!({
        "rules": [{"id": "q/cpu", "strategy": "Preview", "state": "Breached", "value": value, "mark": 4000.0}],
        "scheduling": {"state": "Enabled"},
    })
}

#[test]
fn a_preview_rule_that_is_over_its_mark_does_not_act_and_its_edit_to_none_stops_at_the_canary() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.rest();
    let all: Vec<String> = cluster.nodes.keys().cloned().collect();
    for node in &all {
        cluster.report(node, would(4100.0));
    }
    cluster.world.take_notes();
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.settle(0);
    cluster.settle(0);
    let acting = |cluster: &Cluster| -> Vec<String> {
        let acting = cluster.watermarks.iter();
        let acting = acting.filter(|(_, w)| w["spec"]["rules"][0]["strategy"] == "None");
        acting.map(|(name, _)| name.clone()).collect()
    };
    let canary = acting(&cluster);
    assert_eq!(canary.len(), 1);
    // The others only report: none of them is told that it gets a softer taint.
    let notes = cluster.world.take_notes();
    let reasons: Vec<_> = notes.iter().map(|note| note.reason).collect();
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
fn a_preview_rule_that_breaches_while_canaries_are_watched_stops_no_edit() {
    let mut cluster = ready(20);
    let mut spec = node_qos(None, "close", 4000, "Preview");
    cluster.apply(Kind::NodeQos, "q", &spec);
    cluster.rest();
    let mut second = spec["rules"][0].clone();
    second["name"] = json!("other");
    second["strategy"] = json!("None");
    spec["rules"].as_array_mut().unwrap().push(second);
    cluster.apply(Kind::NodeQos, "q", &spec);
    cluster.settle(0);
    cluster.settle(0);
    let nodes: Vec<String> = cluster.nodes.keys().cloned().collect();
    for node in &nodes {
        cluster.report(node, would(4100.0));
    }
    cluster.rest();
    assert!(nodes.iter().all(|node| cluster.rules(node) == 2));
}

#[test]
fn a_loosening_passes_a_stopped_edit_of_another_policy() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "loose",
        &node_qos(None, "close", 5000, "Preview"),
    );
    cluster.settle(0);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
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

fn apply(cluster: &mut Cluster, mark: u32) {
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", mark, "None"));
    cluster.settle(0);
    cluster.settle(0);
}

/// Twenty nodes that keep a mark of 4000, and an edit to 2000 that its canary was stopped by.
fn stopped() -> (Cluster, String) {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    cluster.rest();
    apply(&mut cluster, 2000);
    let canary = cluster.with("watermark", 2000.0);
    assert_eq!(canary.len(), 1);
    cluster.report(&canary[0], breached(3000.0));
    cluster.settle(0);
    assert_eq!(reason(&mut cluster), "CanariesAct");
    (cluster, canary[0].clone())
}

/// Twenty nodes whose agents say that they keep nothing, and then say no more; their names.
fn silent() -> (Cluster, Vec<String>) {
    let mut cluster = ready(20);
    let names = cluster.names();
    cluster.fall_silent(&names);
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
fn canaries_are_nodes_that_speak_and_where_none_does_the_edit_waits_and_says_so() {
    let (mut cluster, names) = silent();
    apply(&mut cluster, 4000);
    cluster.rest();
    assert_eq!(cluster.with_rules(), 0);
    cluster.world.status_failed(cluster.now);
    cluster.pass(Duration::from_secs(20));
    let statuses = cluster.world.statuses(cluster.now, "2026-11-21T00:00:00Z");
    let told = serde_json::to_string(&statuses.iter().map(|s| &s.status).collect::<Vec<_>>());
    let told = told.unwrap();
    assert!(
        told.contains("NoCanary") && told.contains("plimsoll.dev/rollout=immediate"),
        "{told}"
    );
    // One agent comes: it is the canary, and the edit goes on.
    cluster.speak(&names[7]);
    cluster.pass(Duration::from_secs(5));
    cluster.settle(0);
    assert_eq!(cluster.with("id", "q/cpu"), names[7..8]);
    cluster.rest();
    assert_eq!(cluster.with_rules(), 20);
}

#[test]
fn a_canary_whose_agent_falls_silent_is_joined_by_another_and_never_by_more_than_a_few() {
    let mut cluster = ready(20);
    let names = cluster.names();
    cluster.fall_silent(&names);
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
    let canary = cluster.with("id", "q/cpu").remove(2);
    cluster.speak(&canary);
    cluster.settle(0);
    cluster.pass(Duration::from_secs(59));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 4);
    cluster.pass(Duration::from_secs(2));
    cluster.rest();
    assert_eq!(cluster.with_rules(), 20);
}

#[test]
fn a_canary_that_goes_away_while_it_is_watched_proves_nothing() {
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
    cluster.rest();
    assert_eq!(cluster.with_rules(), 19);
}

#[test]
fn a_canary_whose_agent_dies_while_it_is_watched_proves_nothing() {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    let canary = cluster.with("id", "q/cpu").remove(0);
    let interval = Duration::from_secs(10);
    cluster.world.reported(&canary, interval, cluster.now);
    for second in (0..100).step_by(5) {
        if second < 30 {
            cluster.world.reported(&canary, interval, cluster.now);
        }
        cluster.pass(interval / 2);
        cluster.settle(0);
    }
    assert_eq!(cluster.with_rules(), 2, "another tries it");
    cluster.rest();
    assert_eq!(cluster.with_rules(), 20);
}

#[test]
fn an_edit_of_a_pod_qos_is_watched_for_as_long_as_the_slowest_rule_of_its_nodes_takes() {
    let mut cluster = ready(0);
    for node in ["a0", "a1", "b0", "b1"] {
        cluster.node(node, &node[..1]);
    }
    let throttle = json!({"throttle": {"cpuThrottle": {}}});
    cluster.apply(Kind::AvoidanceAction, "throttle", &throttle);
    let mut slow = node_qos(Some("b"), "throttle", 4000, "None");
    slow["rules"][0]["avoidanceThreshold"] = json!(30);
    slow["evaluationPeriodSeconds"] = json!(60);
    let fast = node_qos(Some("a"), "throttle", 4000, "None");
    cluster.apply(Kind::NodeQos, "fast", &fast);
    cluster.apply(Kind::NodeQos, "slow", &slow);
    cluster.rest();
    cluster.rest();
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
    cluster.rest();
    assert_eq!(with_pods(&cluster), 4);
}

#[test]
fn objects_that_are_applied_together_share_their_canary() {
    let mut cluster = ready(50);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    let pods = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "everything", &pods);
    cluster.settle(0);
    let keeps = |part: &str| -> Vec<&String> {
        let all = cluster.watermarks.iter();
        let all = all.filter(|(_, it)| it["spec"][part] != json!([]));
        all.map(|(name, _)| name).collect()
    };
    assert_eq!(keeps("rules").len(), 1);
    assert_eq!(keeps("rules"), keeps("podPolicies"));
}

#[test]
fn a_stopped_edit_stays_stopped_when_another_policy_is_edited() {
    let (mut cluster, canary) = stopped();
    let other = node_qos(None, "close", 5000, "Preview");
    cluster.apply(Kind::NodeQos, "other", &other);
    cluster.rest();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    cluster.delete(Kind::NodeQos, "other");
    cluster.rest();
    assert_eq!(cluster.with("watermark", 2000.0), [canary]);
    assert_eq!(cluster.with("watermark", 4000.0).len(), 19);
}

#[test]
fn a_canary_that_acts_since_an_edit_before_proves_nothing_for_the_next() {
    let (mut cluster, bad) = stopped();
    apply(&mut cluster, 2500);
    let mut has = cluster.with("watermark", 2500.0);
    has.retain(|node| *node != bad);
    assert_eq!(has.len(), 1);
    cluster.report(&has[0], breached(3000.0));
    cluster.rest();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(cluster.with("watermark", 4000.0).len(), 18);
}

#[test]
fn while_an_edit_is_stopped_a_node_without_a_watermark_keeps_what_held_before() {
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
    // So it is with another leader.
    cluster.fail_over();
    cluster.delete_watermark(&lost);
    cluster.settle(0);
    assert_eq!(cluster.with("watermark", 4000.0).len(), 20);
    assert_eq!(cluster.with("watermark", 2000.0), [canary]);
}

#[test]
fn an_edit_that_is_on_its_way_goes_on_where_it_was_after_a_short_loss_of_the_api_server() {
    let mut cluster = ready(300);
    apply(&mut cluster, 4000);
    cluster.pass(Duration::from_mins(1));
    cluster.settle(0);
    cluster.pass(Duration::from_secs(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 103);
    // Canaries that act by now are no reason to stop any more.
    cluster.world.follow();
    cluster.pass(Duration::from_mins(10));
    cluster.world.lead();
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 103);
    cluster.pass(Duration::from_secs(1));
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 203);
    cluster.rest();
    assert_eq!(cluster.with_rules(), 300);
}

/// Of 20 nodes, all of which act by a rule.
fn all_acting() -> Cluster {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    cluster.rest();
    for name in cluster.names() {
        cluster.report(&name, breached(5000.0));
    }
    cluster.settle(0);
    cluster
}

#[test]
fn canaries_that_acted_before_the_edit_do_not_stop_it_after_a_loss_of_the_api_server() {
    let mut cluster = all_acting();
    apply(&mut cluster, 3000);
    assert_eq!(cluster.with("watermark", 3000.0).len(), 1);
    cluster.world.follow();
    cluster.world.lead();
    cluster.rest();
    assert_eq!(reason(&mut cluster), "");
    assert_eq!(cluster.with("watermark", 3000.0).len(), 20);
}

#[test]
fn a_new_leader_tries_an_edit_on_a_node_of_which_it_knows_what_it_did_before() {
    let mut cluster = all_acting();
    apply(&mut cluster, 3000);
    cluster.fail_over();
    cluster.settle(0);
    // The canary of the last leader acts, and has since when nobody knows.
    assert_eq!(cluster.with("watermark", 3000.0).len(), 2);
    cluster.rest();
    assert_eq!(cluster.with("watermark", 3000.0).len(), 20);
}

#[test]
fn an_edit_whose_nodes_are_replaced_while_they_try_it_does_not_keep_from_those_that_come_after() {
    let (mut cluster, names) = silent();
    apply(&mut cluster, 4000);
    cluster.settle(0);
    assert_eq!(cluster.with_rules(), 0, "nobody can try it");
    for name in &names {
        cluster.delete_node(name);
    }
    cluster.node("new", "a");
    cluster.rest();
    assert_eq!(cluster.with("id", "q/cpu"), ["new"]);
}

/// What is selected, whatever else an edit says.
fn in_pools(pools: &[&str], mark: u32) -> Value {
    let mut spec = node_qos(None, "close", mark, "None");
    spec["selector"] = json!({
        "matchExpressions": [{"key": "pool", "operator": "In", "values": pools}],
    });
    spec
}

/// 450 nodes that have had a rule for long, and 50 that it does not select.
fn two_pools() -> Cluster {
    let mut cluster = ready(0);
    for index in 0..450 {
        cluster.node(&format!("old{index:03}"), "old");
    }
    for index in 0..50 {
        cluster.node(&format!("new{index:03}"), "new");
    }
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old"], 4000));
    cluster.rest();
    assert_eq!(cluster.with_rules(), 450);
    cluster
}

fn new_ones(mut nodes: Vec<String>) -> Vec<String> {
    nodes.retain(|node| node.starts_with("new"));
    nodes
}

fn rolled_out(cluster: &mut Cluster) -> String {
    cluster.world.status_failed(cluster.now);
    cluster.pass(Duration::from_secs(20));
    let statuses = cluster.world.statuses(cluster.now, "2026-11-21T00:00:00Z");
    let status = statuses
        .iter()
        .find(|it| it.key == (Kind::NodeQos, "q".into()));
    let conditions = status.unwrap().status["conditions"].as_array().unwrap();
    let found = conditions.iter().find(|it| it["type"] == "RolledOut");
    found.map_or_else(String::new, |it| it["message"].as_str().unwrap().to_owned())
}

#[test]
fn a_selector_that_is_widened_is_tried_on_the_nodes_that_it_newly_selects() {
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
    cluster.rest();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(cluster.with_rules(), 451);
}

#[test]
fn a_selector_that_moves_on_is_tried_where_it_moves_to() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["new"], 4000));
    cluster.settle(0);
    let canary = cluster.with("id", "q/cpu");
    assert_eq!(new_ones(canary.clone()), canary, "the old ones lose it");
    assert_eq!(canary.len(), 1);
    cluster.report(&canary[0], breached(4100.0));
    cluster.rest();
    assert_eq!(cluster.with("id", "q/cpu"), canary);
}

#[test]
fn an_edit_that_is_new_to_some_nodes_and_stricter_on_others_has_canaries_among_both() {
    let mut cluster = two_pools();
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 3000));
    cluster.settle(0);
    cluster.settle(0);
    let canaries = cluster.with("watermark", 3000.0);
    assert_eq!(canaries.len(), 6, "5 of 450 and 1 of 50");
    let new = new_ones(canaries);
    assert_eq!(new.len(), 1);
    // One of six is no more than a fifth of all, but it is all that shows what the edit does on new nodes.
    cluster.report(&new[0], breached(3100.0));
    cluster.rest();
    assert_eq!(reason(&mut cluster), "CanariesAct");
    assert_eq!(cluster.with("watermark", 3000.0).len(), 6);
}

#[test]
fn an_edit_that_no_new_node_can_try_says_how_many_it_waits_for() {
    let mut cluster = two_pools();
    let names = cluster.names();
    let new = new_ones(names);
    cluster.fall_silent(&new);
    for name in &new {
        cluster.report(name, json!({}));
    }
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.rest();
    assert_eq!(cluster.with_rules(), 450);
    assert_eq!(reason(&mut cluster), "NoCanary");
    let told = rolled_out(&mut cluster);
    assert!(told.contains("of its 50 nodes none is Ready"), "{told}");
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 3000));
    cluster.rest();
    assert_eq!(
        cluster.with("watermark", 3000.0).len(),
        5,
        "those of the old"
    );
    let told = rolled_out(&mut cluster);
    assert!(
        told.contains("of the 50 nodes that have to try it too"),
        "{told}"
    );
    cluster.speak(&new[7]);
    cluster.rest();
    assert_eq!(cluster.with("watermark", 3000.0).len(), 500);
}

#[test]
fn a_single_new_node_that_is_away_does_not_stop_an_edit() {
    let mut cluster = ready(20);
    apply(&mut cluster, 4000);
    cluster.rest();
    cluster.node("other", "b");
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(Some("a"), "close", 4000, "None"),
    );
    cluster.rest();
    cluster.fall_silent(&["other".to_owned()]);
    cluster.report("other", json!({}));
    apply(&mut cluster, 3000);
    cluster.rest();
    assert_eq!(cluster.with("watermark", 3000.0).len(), 21);
}

/// Nodes with a pod policy in force.
fn with_pods(cluster: &Cluster) -> Vec<String> {
    let all = cluster.watermarks.iter();
    let all = all.filter(|(_, it)| it["spec"]["podPolicies"] != json!([]));
    all.map(|(name, _)| name.clone()).collect()
}

/// A selector is widened by 50 nodes, beside 130 nodes of another `NodeQOS` that have had the same `PodQOS` for long and
/// begin to throttle now.
fn widened_beside_nodes_of_another_policy(is_failover: bool) {
    let mut cluster = two_pools();
    let others: Vec<String> = (0..130).map(|index| format!("other{index:03}")).collect();
    for name in &others {
        cluster.node(name, "other");
    }
    cluster.apply(Kind::NodeQos, "r", &in_pools(&["other"], 4000));
    let pods = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "everything", &pods);
    cluster.rest();
    cluster.rest();
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
    cluster.rest();
    assert_eq!(new_ones(with_pods(&cluster)).len(), 50);
    let rolled_out = cluster.condition(Kind::PodQos, "everything", "RolledOut");
    assert_eq!(rolled_out, None);
}

#[test]
fn nodes_that_an_edit_does_not_touch_neither_try_nor_stop_it() {
    widened_beside_nodes_of_another_policy(false);
}

#[test]
fn nodes_that_an_edit_does_not_touch_neither_try_nor_stop_it_after_a_failover() {
    widened_beside_nodes_of_another_policy(true);
}

#[test]
fn pod_policies_that_a_widened_selector_brings_along_are_tried_on_the_new_nodes() {
    let mut cluster = two_pools();
    let pods = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "everything", &pods);
    cluster.rest();
    assert_eq!(with_pods(&cluster).len(), 450);
    cluster.apply(Kind::NodeQos, "q", &in_pools(&["old", "new"], 4000));
    cluster.settle(0);
    let canary = new_ones(cluster.with("id", "q/cpu"));
    assert_eq!(canary.len(), 1);
    assert_eq!(new_ones(with_pods(&cluster)), canary);
}

#[test]
fn another_leader_goes_on_with_the_new_nodes_alone() {
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
    cluster.rest();
    assert_eq!(cluster.with_rules(), 451);
}

#[test]
fn another_leader_goes_on_where_all_new_nodes_that_have_the_edit_act() {
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
    cluster.rest();
    assert_eq!(reason(&mut cluster), "");
    assert_eq!(cluster.with_rules(), 500);
}

#[test]
fn a_canary_whose_labels_change_so_that_it_loses_the_rule_proves_nothing() {
    let mut cluster = ready(20);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(Some("a"), "close", 4000, "None"),
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
    cluster.rest();
    assert_eq!(cluster.with_rules(), 19);
}

#[test]
fn a_node_that_is_new_during_an_edit_gets_no_version_that_an_edit_before_was_stopped_with() {
    let (mut cluster, canary) = stopped();
    let names = cluster.names();
    for name in names.iter().filter(|name| **name < canary) {
        cluster.delete_node(name);
    }
    // Tighter than what any node has, so that the canary of the edit before is among the nodes that it changes.
    apply(&mut cluster, 1000);
    assert_eq!(cluster.with("watermark", 2000.0), [canary]);
    cluster.node("node999", "a");
    cluster.settle(0);
    let spec = &cluster.watermarks["node999"]["spec"];
    assert_eq!(spec["rules"][0]["watermark"], 4000.0);
}
