//! The controller's decisions, without a cluster: any history of edits ends in the result of a full compilation.

use std::time::Duration;

use crate::reconciler_support::{
    Cluster, breached, node_qos, observed_node, ready, reconciler, seen,
};
use plimsoll::crd::Kind;
use plimsoll::crd::eviction::Objection;
use plimsoll::engine::policy::{NodeFacts, RuleId};
use plimsoll::evictions::{Denial, EvictionPermit, RuleQuery};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

#[derive(Clone, Debug)]
enum Edit {
    Node(usize, usize),
    DeleteNode(usize),
    NodeQos {
        name: usize,
        pool: usize,
        action: usize,
        value: u32,
        preview: bool,
        replaced: bool,
    },
    Action {
        name: usize,
        throttle: bool,
        effect: bool,
    },
    PodQos(usize, bool),
    Delete(usize, usize),
    Settle(usize),
    Pass(u64),
}

const POOLS: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 4] = ["one", "two", "three", "four"];

fn edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        (0usize..6, 0usize..3).prop_map(|(node, pool)| Edit::Node(node, pool)),
        (0usize..6).prop_map(Edit::DeleteNode),
        (
            0usize..4,
            0usize..4,
            0usize..4,
            100u32..7000,
            any::<[bool; 2]>()
        )
            .prop_map(
                |(name, pool, action, value, [preview, replaced])| Edit::NodeQos {
                    name,
                    pool,
                    action,
                    value,
                    preview,
                    replaced,
                }
            ),
        (0usize..4, any::<bool>(), any::<bool>()).prop_map(|(name, throttle, effect)| {
            Edit::Action {
                name,
                throttle,
                effect,
            }
        }),
        (0usize..4, any::<bool>()).prop_map(|(name, evict)| Edit::PodQos(name, evict)),
        (0usize..3, 0usize..4).prop_map(|(kind, name)| Edit::Delete(kind, name)),
        (0usize..4).prop_map(Edit::Settle),
        (1u64..100).prop_map(Edit::Pass),
    ]
}

fn carry_out(cluster: &mut Cluster, edit: &Edit) {
    match *edit {
        Edit::Node(node, pool) => cluster.node(&format!("node{node}"), POOLS[pool]),
        Edit::DeleteNode(node) => cluster.delete_node(&format!("node{node}")),
        Edit::NodeQos {
            name,
            pool,
            action,
            value,
            preview,
            replaced,
        } => {
            let strategy = if preview { "Preview" } else { "Enforce" };
            let spec = node_qos(POOLS.get(pool).copied(), NAMES[action], value, strategy);
            let edit = if replaced {
                Cluster::replace
            } else {
                Cluster::apply
            };
            edit(cluster, Kind::NodeQos, NAMES[name], &spec);
        }
        Edit::Action {
            name,
            throttle,
            effect,
        } => {
            let mut spec = json!({});
            if throttle {
                spec["throttle"] = json!({"cpuThrottle": {}});
            }
            if effect {
                spec["disableScheduling"] = json!({"effect": "PreferNoSchedule"});
            }
            cluster.apply(Kind::AvoidanceAction, NAMES[name], &spec);
        }
        Edit::PodQos(name, evict) => {
            let allowed = if evict {
                json!(["throttle", "eviction"])
            } else {
                json!(["throttle"])
            };
            let spec = json!({"labelSelector": {}, "allowedActions": allowed});
            cluster.apply(Kind::PodQos, NAMES[name], &spec);
        }
        Edit::Delete(kind, name) => cluster.delete(Kind::ALL[kind], NAMES[name]),
        Edit::Settle(fail) => drop(cluster.settle(if fail == 0 { 0 } else { fail + 1 })),
        Edit::Pass(seconds) => cluster.pass(Duration::from_secs(seconds)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_history_of_edits_ends_in_the_result_of_a_full_compilation(edits in vec(edit(), 0..40)) {
        let mut cluster = Cluster::new();
        for edit in &edits {
            carry_out(&mut cluster, edit);
        }
        cluster.finish();
        prop_assert_eq!(cluster.hashes(), cluster.compiled_in_full());
        // Once settled nothing is written, also by another replica that starts to lead.
        cluster.pass(Duration::from_mins(10));
        prop_assert_eq!(cluster.settle(0), 0);
        let mut other = reconciler();
        for ((kind, name), object) in &cluster.objects {
            other.apply_policy(*kind, name, object);
        }
        for (name, object) in &cluster.watermarks {
            other.apply_watermark(name, &seen(object));
        }
        for (name, facts) in &cluster.nodes {
            other.apply_node(name, observed_node(name, facts));
        }
        other.start_leading();
        prop_assert!(other.plan(cluster.now, 100).is_empty());
    }
}

#[test]
fn a_policy_recreated_during_a_watch_outage_is_compiled() {
    let mut cluster = ready(2);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.finish();
    cluster.replace(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.finish();
    assert_eq!(cluster.hashes(), cluster.compiled_in_full());
}

/// Nodes with `PreferNoSchedule` because of the cap.
fn beyond_cap(cluster: &Cluster) -> Vec<String> {
    let beyond = cluster.watermarks.iter();
    let beyond = beyond.filter(|(_, object)| object["spec"]["softenScheduling"] == true);
    beyond.map(|(name, _)| name.clone()).collect()
}

#[test]
fn a_node_whose_taint_was_removed_frees_a_slot_under_the_cap() {
    let mut cluster = ready(2);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.finish();
    cluster.report("node000", breached(5000.0));
    cluster.settle(0);
    cluster.report("node001", breached(4100.0));
    cluster.settle(0);
    assert_eq!(beyond_cap(&cluster), ["node001"]);
    // Its agent ended, and its taint was removed by hand: its last status stays forever.
    cluster.taint("node000", false);
    cluster.settle(0);
    assert_eq!(beyond_cap(&cluster), [""; 0]);
    cluster.fail_over();
    cluster.settle(0);
    assert_eq!(beyond_cap(&cluster), [""; 0]);
    // An agent runs there again and sets the taint: of the two nodes, the one furthest above its threshold keeps it.
    cluster.taint("node000", true);
    cluster.settle(0);
    assert_eq!(beyond_cap(&cluster), ["node001"]);
}

#[test]
fn the_cap_limits_unschedulable_nodes_and_the_worst_stay_so() {
    let mut cluster = ready(20);
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    cluster.finish();
    let names: Vec<String> = cluster.nodes.keys().cloned().collect();
    for (index, name) in names.iter().enumerate() {
        #[allow(clippy::cast_precision_loss, reason = "a small number")]
        let mut status = breached(4100.0 + index as f64);
        status["scheduling"]["state"] = json!("Enabled");
        cluster.report(name, status);
    }
    cluster.settle(0);
    assert_eq!(beyond_cap(&cluster), names[..14]);
    // Unschedulable nodes stay so, whatever the others do: no flapping.
    for name in &names[14..] {
        cluster.report(name, breached(4050.0));
    }
    assert_eq!(cluster.settle(0), 0);
    for name in &names {
        cluster.report(name, json!({"scheduling": {"state": "Enabled"}}));
    }
    cluster.settle(0);
    assert_eq!(beyond_cap(&cluster), Vec::<String>::new());
}

#[test]
fn an_edit_of_one_policy_writes_only_the_nodes_it_selects() {
    let mut cluster = Cluster::new();
    for index in 0..30 {
        cluster.node(&format!("node{index:03}"), POOLS[index % 3]);
    }
    cluster.apply(Kind::AvoidanceAction, "close", &json!({}));
    for pool in POOLS {
        cluster.apply(
            Kind::NodeQos,
            pool,
            &node_qos(Some(pool), "close", 4000, "None"),
        );
    }
    cluster.finish();
    cluster.apply(
        Kind::NodeQos,
        "b",
        &node_qos(Some("b"), "close", 5000, "None"),
    );
    assert_eq!(cluster.settle(0), 10);
}

#[test]
fn matched_pods_are_summed_over_agents_and_unknown_before_their_reports() {
    let mut cluster = ready(3);
    let spec = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "batch", &spec);
    cluster.settle(0);
    let matched = |cluster: &mut Cluster| {
        cluster.reconciler.status_failed(cluster.now);
        cluster.pass(Duration::from_secs(20));
        let statuses = cluster
            .reconciler
            .statuses(cluster.now, "2026-11-21T00:00:00Z");
        let mut of_pods = statuses.into_iter().filter(|s| s.key.0 == Kind::PodQos);
        of_pods.next().unwrap().status["matchedPods"].clone()
    };
    assert_eq!(matched(&mut cluster), Value::Null);
    let status = |pods: u32| json!({"podPolicies": [{"name": "batch", "matched": pods}, {"name": "other", "matched": 9}]});
    cluster.report("node000", status(0));
    assert_eq!(matched(&mut cluster), 0);
    cluster.report("node001", status(4));
    cluster.report("node002", status(7));
    assert_eq!(matched(&mut cluster), 11);
}

#[test]
fn a_fixed_finding_is_not_reported_by_nodes_the_object_does_not_affect() {
    let mut cluster = ready(1);
    cluster.node("unselected", "b");
    let spec = node_qos(Some("a"), "close", 4000, "None");
    cluster.apply(Kind::NodeQos, "q", &spec);
    let action = |ratio: u32| json!({"throttle": {"cpuThrottle": {"minCPURatio": ratio}}});
    cluster.apply(Kind::AvoidanceAction, "slow", &action(100));
    // This recompiles every node.
    let spec = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "batch", &spec);
    cluster.finish();
    let ready = |cluster: &mut Cluster| cluster.condition(Kind::AvoidanceAction, "slow", "Ready");
    assert_eq!(ready(&mut cluster).unwrap().1, "ActionWithoutEffect");
    cluster.apply(Kind::AvoidanceAction, "slow", &action(10));
    cluster.finish();
    assert_eq!(ready(&mut cluster).unwrap().1, "Ready");
}

#[test]
fn a_standby_forgets_deleted_nodes() {
    let mut cluster = ready(1);
    cluster.reconciler.stop_leading();
    for index in 0..100 {
        let name = format!("spot{index}");
        cluster.node(&name, "a");
        cluster.delete_node(&name);
    }
    assert_eq!(cluster.settle(0), 0);
    let [nodes, pending, _] = cluster.reconciler.counts();
    assert_eq!((nodes, pending), (1, 0));
}

#[test]
fn every_field_is_written_so_that_edits_of_others_are_reverted() {
    let mut cluster = ready(1);
    cluster.finish();
    let spec = &cluster.watermarks["node000"]["spec"];
    for list in ["rules", "actions", "podPolicies", "sources"] {
        assert_eq!(spec[list], json!([]), "{list}");
    }
    assert_eq!(spec["softenScheduling"], false);
}

#[test]
fn counts_alone_are_written_at_most_every_ten_seconds() {
    let mut cluster = ready(2);
    cluster.apply(
        Kind::PodQos,
        "batch",
        &json!({"labelSelector": {}, "allowedActions": ["throttle"]}),
    );
    cluster.finish();
    let mut writes = 0;
    for second in 0..60 {
        let status = json!({"podPolicies": [{"name": "batch", "matched": second}]});
        cluster.report("node000", status);
        cluster.pass(Duration::from_secs(1));
        for status in cluster
            .reconciler
            .statuses(cluster.now, "2026-11-21T00:00:00Z")
        {
            if status.key.0 == Kind::PodQos {
                writes += 1;
                cluster.generation += 1;
                // The watch shows it.
                let mut object = cluster.objects[&status.key].clone();
                object["status"] = status.status;
                cluster
                    .reconciler
                    .apply_policy(Kind::PodQos, "batch", &object);
            }
        }
    }
    assert!((5..=7).contains(&writes), "{writes} writes in a minute");
}

#[test]
fn rules_beyond_the_limit_of_a_node_are_reported_and_block_no_other_edit() {
    let mut cluster = ready(2);
    let mut spec = node_qos(None, "close", 4000, "Preview");
    let rule = spec["rules"][0].clone();
    let rules = (0..60).map(|index| {
        let mut rule = rule.clone();
        rule["name"] = json!(format!("rule{index:02}"));
        rule
    });
    spec["rules"] = rules.collect();
    for index in 0..5 {
        cluster.apply(Kind::NodeQos, &format!("q{index}"), &spec);
    }
    cluster.finish();
    assert_eq!(cluster.rules("node000"), 256);
    let ready = cluster.condition(Kind::NodeQos, "q4", "Ready").unwrap();
    assert_eq!(ready, ("False".into(), "TooMany".into()));
    let stalled = cluster.condition(Kind::NodeQos, "q4", "Stalled");
    assert_eq!(stalled, Some(("True".into(), "TooMany".into())));
    assert_eq!(cluster.condition(Kind::NodeQos, "q3", "Stalled"), None);
    let ready = cluster.condition(Kind::NodeQos, "q3", "Ready").unwrap();
    assert_eq!(ready.0, "True");
    cluster.delete(Kind::NodeQos, "q0");
    cluster.finish();
    assert_eq!(cluster.rules("node000"), 240);
    let ready = cluster.condition(Kind::NodeQos, "q4", "Ready").unwrap();
    assert_eq!(ready.0, "True");
}

/// The status of the `NodeQOS` `q`.
fn status_of_q(cluster: &mut Cluster) -> Value {
    cluster.reconciler.status_failed(cluster.now);
    cluster.pass(std::time::Duration::from_secs(20));
    let statuses = cluster
        .reconciler
        .statuses(cluster.now, "2026-11-21T00:00:00Z");
    let q = statuses
        .iter()
        .find(|it| it.key == (Kind::NodeQos, "q".into()));
    q.unwrap().status.clone()
}

/// A `NodeQOS` over all nodes: its rules in force, their strategies and the message of its condition Ready.
fn rules_in_force(cluster: &mut Cluster) -> (i64, String, String) {
    let status = status_of_q(cluster);
    let conditions = status["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|it| it["type"] == "Ready").unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    (
        status["rules"].as_i64().unwrap(),
        text(&status["strategy"]),
        text(&ready["message"]),
    )
}

#[test]
fn what_preview_rules_would_have_done_is_summed_over_rules_and_nodes() {
    let mut cluster = ready(3);
    cluster.apply(
        Kind::NodeQos,
        "q",
        &node_qos(None, "close", 4000, "Preview"),
    );
    cluster.finish();
    let rule = |id: &str, breaches: Option<i64>| {
        let would = breaches.map(|breaches| json!({"breaches": breaches, "activeMinutes": 5}));
        json!({"id": id, "strategy": "Preview", "state": "Normal", "mark": 4000.0, "wouldLastDay": would})
    };
    assert_eq!(status_of_q(&mut cluster)["wouldLastDay"], Value::Null);
    let reports = [
        vec![rule("q/cpu", Some(3)), rule("q/other", Some(1))],
        vec![rule("q/cpu", Some(0)), rule("another/cpu", Some(7))],
        vec![rule("q/cpu", None)],
    ];
    for (index, rules) in reports.into_iter().enumerate() {
        cluster.report(&format!("node{index:03}"), json!({"rules": rules}));
    }
    assert_eq!(status_of_q(&mut cluster)["wouldLastDay"], 4);
    cluster.report("node000", json!({"rules": [rule("q/cpu", Some(0))]}));
    assert_eq!(status_of_q(&mut cluster)["wouldLastDay"], 0);
}

#[test]
fn a_rule_with_an_unknown_action_does_not_count_as_in_force() {
    let mut cluster = ready(3);
    let mut spec = node_qos(None, "close", 4000, "Preview");
    let mut other = spec["rules"][0].clone();
    other["name"] = json!("other");
    other["actionName"] = json!("there-is-none");
    other["strategy"] = json!("Enforce");
    spec["rules"].as_array_mut().unwrap().push(other);
    cluster.apply(Kind::NodeQos, "q", &spec);
    let (rules, strategy, message) = rules_in_force(&mut cluster);
    assert_eq!((rules, &*strategy), (1, "Preview"));
    assert!(message.contains("there-is-none"), "{message}");
    // If no node is selected, the rules count that would be in force.
    spec["selector"] = json!({"matchLabels": {"pool": "none"}});
    cluster.apply(Kind::NodeQos, "q", &spec);
    let (rules, strategy, _) = rules_in_force(&mut cluster);
    assert_eq!((rules, &*strategy), (1, "Preview"));
    cluster.delete(Kind::AvoidanceAction, "close");
    let (rules, strategy, _) = rules_in_force(&mut cluster);
    assert_eq!((rules, &*strategy), (0, ""));
}

#[test]
fn a_finding_that_holds_on_some_nodes_says_on_which() {
    let mut cluster = ready(2);
    let facts = |cpus| NodeFacts {
        cpus,
        ..NodeFacts::default()
    };
    // The nodes of the cluster have 8 CPUs.
    for (name, cpus) in [("small0", 2), ("small1", 2), ("tiny", 1)] {
        cluster
            .reconciler
            .apply_node(name, observed_node(name, &facts(cpus)));
    }
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 4000, "None"));
    let (rules, _, message) = rules_in_force(&mut cluster);
    assert_eq!(rules, 1);
    assert!(
        message.contains(
            "4000 millicores can't be exceeded on a node with 2 CPUs: the maximum is 2000 millicores; write less, for \
             example 1600; this holds for 3 of the 5 nodes that are selected, small0 for example; the other 2 can exceed it"
        ),
        "{message}"
    );
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 9000, "None"));
    let (_, _, message) = rules_in_force(&mut cluster);
    assert!(
        message.contains("this holds for all 5 nodes that are selected, node000 for example"),
        "{message}"
    );
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "close", 15, "None"));
    let (rules, _, message) = rules_in_force(&mut cluster);
    assert_eq!(rules, 1, "on the tiny one");
    assert!(
        message.contains("this holds for 4 of the 5 nodes that are selected, node000 for example"),
        "{message}"
    );
}

/// Two nodes with rules that evict pods labelled `app: batch`: q/cpu acts, p/cpu is a preview.
fn evicting() -> Cluster {
    let mut cluster = ready(2);
    let eviction = json!({"eviction": {"terminationGracePeriodSeconds": 7}});
    cluster.apply(Kind::AvoidanceAction, "evict", &eviction);
    let batch =
        json!({"labelSelector": {"matchLabels": {"app": "batch"}}, "allowedActions": ["eviction"]});
    cluster.apply(Kind::PodQos, "batch", &batch);
    for (name, strategy) in [("q", "Enforce"), ("p", "Preview")] {
        cluster.apply(
            Kind::NodeQos,
            name,
            &node_qos(None, "evict", 4000, strategy),
        );
    }
    cluster.finish();
    cluster
}

fn hash_of(cluster: &Cluster, node: &str) -> String {
    cluster.hashes()[node].clone()
}

/// Whether a pod of node000 may be evicted, by the rule and the hash that the agent of `node` names.
fn permit(cluster: &Cluster, node: &str, rule: &str, hash: &str) -> Result<EvictionPermit, Denial> {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "x", "controller": true});
    let pod = json!({
        "metadata": {
            "name": "web", "namespace": "shop", "uid": "u", "labels": {"app": "batch"}, "ownerReferences": [owner],
        },
        "spec": {"nodeName": "node000", "containers": [{"name": "c"}]},
        "status": {"phase": "Running"},
    });
    let (reply, _) = tokio::sync::oneshot::channel();
    cluster.reconciler.permit(&RuleQuery {
        node: node.into(),
        hash: hash.to_owned(),
        rule: RuleId::from(rule),
        pod: Box::new(serde_json::from_value(pod).unwrap()),
        reply,
    })
}

#[test]
fn a_permitted_eviction_has_the_actions_grace_period_and_the_nodes_zone() {
    let mut cluster = evicting();
    let hash = hash_of(&cluster, "node000");
    let grace = Duration::from_secs(7);
    let permitted = permit(&cluster, "node000", "q/cpu", &hash);
    assert_eq!(permitted, Ok(EvictionPermit { grace, zone: None }));
    let mut facts = cluster.nodes["node000"].clone();
    let zone = "topology.kubernetes.io/zone".to_owned();
    facts.labels.insert(zone, "a".to_owned());
    cluster
        .reconciler
        .apply_node("node000", observed_node("node000", &facts));
    cluster.finish();
    let permitted = permit(&cluster, "node000", "q/cpu", &hash);
    let zone = Some("a".to_owned());
    assert_eq!(permitted, Ok(EvictionPermit { grace, zone }));
}

#[test]
fn an_eviction_that_no_rule_of_the_node_asks_for_is_denied() {
    let cluster = evicting();
    let hashes = ["node000", "node001"].map(|node| hash_of(&cluster, node));
    let not_wanted = Denial::Objection(Objection::NotWanted);
    for (node, rule, hash, denial) in [
        ("node000", "q/cpu", "0123456789abcdef", Denial::OtherRules),
        ("node000", "q/cpu", &*hashes[1], Denial::OtherRules),
        ("unknown", "q/cpu", &*hashes[0], Denial::OtherRules),
        ("node000", "p/cpu", &*hashes[0], not_wanted.clone()),
        ("node000", "q/none", &*hashes[0], not_wanted),
        (
            "node001",
            "q/cpu",
            &*hashes[1],
            Denial::Objection(Objection::OtherNode),
        ),
    ] {
        let denied = permit(&cluster, node, rule, hash);
        assert_eq!(denied, Err(denial), "{node} {rule} {hash}");
    }
}

#[test]
fn an_eviction_is_denied_if_the_agent_enforces_other_rules() {
    let mut cluster = evicting();
    let before = hash_of(&cluster, "node000");
    cluster.apply(Kind::NodeQos, "q", &node_qos(None, "evict", 6000, "None"));
    let planned = permit(&cluster, "node000", "q/cpu", &before);
    assert_eq!(planned, Err(Denial::OtherRules), "a write is pending");
    cluster.finish();
    let denied = permit(&cluster, "node000", "q/cpu", &before);
    assert_eq!(denied, Err(Denial::OtherRules));
    let after = hash_of(&cluster, "node000");
    assert!(permit(&cluster, "node000", "q/cpu", &after).is_ok());

    // Another writer edits the NodeWatermark, and leaves the hash as it is.
    let mut edited = cluster.watermarks["node000"].clone();
    edited["spec"]["rules"][0]["watermark"] = json!(1.0);
    cluster
        .reconciler
        .apply_watermark("node000", &seen(&edited));
    let denied = permit(&cluster, "node000", "q/cpu", &after);
    assert_eq!(denied, Err(Denial::OtherRules));
    cluster.reconciler.delete_watermark("node000");
    let denied = permit(&cluster, "node000", "q/cpu", &after);
    assert_eq!(denied, Err(Denial::OtherRules));
}

#[test]
fn rules_of_a_deleted_node_permit_nothing_on_its_replacement() {
    let mut cluster = evicting();
    let hash = hash_of(&cluster, "node000");
    let facts = cluster.nodes["node000"].clone();
    cluster.reconciler.delete_node("node000");
    let denied = permit(&cluster, "node000", "q/cpu", &hash);
    assert_eq!(denied, Err(Denial::OtherRules));
    let mut other = observed_node("node000", &facts);
    other.uid = "another".to_owned();
    cluster.reconciler.apply_node("node000", other);
    let denied = permit(&cluster, "node000", "q/cpu", &hash);
    assert_eq!(
        denied,
        Err(Denial::OtherRules),
        "its NodeWatermark is not written yet"
    );
}

/// An agent refuses rules with fields that it does not know.
#[test]
fn an_agent_that_reads_no_quantities_gets_none_until_it_is_upgraded() {
    let mut cluster = evicting();
    assert_eq!(cluster.with("value", "4000").len(), cluster.names().len());
    let status =
        |reads: Value| json!({"agent": {"version": "1", "bootID": "b", "readsQuantities": reads}});
    cluster.report("node000", json!({"agent": {"version": "1", "bootID": "b"}}));
    assert_eq!(cluster.settle(0), 1, "only the node of the old agent");
    assert_eq!(cluster.with("value", Value::Null), ["node000"]);
    let all = cluster.names().len();
    assert_eq!(cluster.with("watermark", 4000.0).len(), all);
    cluster.report("node000", status(json!(false)));
    assert_eq!(cluster.settle(0), 0, "a write changes nothing more");

    // Its controller is replaced: nothing is written again.
    cluster.fail_over();
    assert_eq!(cluster.settle(0), 0);

    cluster.report("node000", status(json!(true)));
    assert_eq!(cluster.settle(0), 1);
    assert_eq!(cluster.with("value", "4000").len(), all);
}

#[test]
fn a_node_that_no_rule_selects_gets_the_pods_to_hold_and_no_others() {
    let mut cluster = Cluster::new();
    cluster.node("node000", "a");
    let allows = json!({"labelSelector": {}, "allowedActions": ["throttle"]});
    cluster.apply(Kind::PodQos, "allows", &allows);
    let mut holds = json!({"labelSelector": {}, "resourceQOS": {"cpuQOS": {"cpuPriority": 7}}});
    cluster.apply(Kind::PodQos, "holds", &holds);
    cluster.finish();
    let written = |cluster: &Cluster| {
        let policies = cluster.watermarks["node000"]["spec"]["podPolicies"].as_array();
        let policies = policies.cloned().unwrap_or_default();
        let of = |it: Value| (it["name"].clone(), it["standing"].clone());
        policies.into_iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(written(&cluster), [(json!("holds"), json!({"idle": true}))]);
    holds["resourceQOS"]["cpuQOS"]["cpuPriority"] = json!(3);
    cluster.apply(Kind::PodQos, "holds", &holds);
    cluster.finish();
    assert_eq!(written(&cluster), []);
}
