use super::*;
use crate::agent::report::conditions::{AgentHealth, Unready, conditions};
use crate::crd::node_watermark::NodeWatermark;
use crate::crd::node_watermark::condition::NONE_EVALUATED;
use crate::engine::plan::Unknown;
use crate::messages::unknown_reason;
use kube::CustomResourceExt as _;

/// Two healthy nodes, except for this cell of each.
fn with(column: &str, cell: &'static str) -> impl FnOnce(&mut ClusterSnapshot) {
    let index = WATERMARK.iter().position(|it| *it == column);
    let index = index.expect("a column");
    move |snapshot| {
        let rows = ["a", "b"].map(|node| {
            let mut row = healthy(node);
            row[index] = cell;
            row
        });
        snapshot.watermarks = watermarks(&rows);
    }
}

#[test]
fn conditions_of_nodes_are_reported() {
    assert_finding(
        with("Ready", "PreviousRulesEnforced"),
        &[
            "agents: PreviousRulesEnforced: the current rules are not enforced on 2 nodes: a, b",
            "kubectl describe nodewatermark a shows why",
        ],
    );
    assert_finding(
        with("Degraded", "NodeNotUpdated"),
        &["NodeNotUpdated: some actions fail on 2 nodes: a, b"],
    );
    assert_finding(
        with("Ineffective", "SchedExt"),
        &["SchedExt: actions have no effect on 2 nodes"],
    );
}

#[test]
fn nodes_where_the_idle_class_is_unsafe_are_named_with_the_feature_gate() {
    assert_finding(
        with("Idle", "IdleUnsafe"),
        &[
            "instead of the idle class, since the kubelet would reject new pods on 2 nodes: a, b",
            "--feature-gates=InPlacePodLevelResourcesVerticalScaling=false",
        ],
    );
}

#[test]
fn nodes_with_too_many_busy_batch_pods_are_named_with_what_helps() {
    assert_finding(
        with("BatchWeight", "TooManyBusyPods"),
        &[
            "TooManyBusyPods: too many busy batch pods for the idle class to protect on 2 nodes: a, b",
            "make batch pods BestEffort",
            "protected_cpu_delay_max",
        ],
    );
}

#[test]
fn nodes_without_evaluable_rules_have_their_own_cure() {
    let mut snapshot = healthy_snapshot();
    with("Ready", NONE_EVALUATED)(&mut snapshot);
    let [found] = &findings(&snapshot)[..] else {
        panic!("{:?}", findings(&snapshot));
    };
    assert_eq!(
        found.what,
        "NoRuleEvaluated: the rules are enforced, but none can be evaluated on 2 nodes: a, b"
    );
    assert!(found.fix.contains("check its metric or its probe"));
    assert!(!found.fix.contains("one version"), "{}", found.fix);
}

#[test]
fn each_reason_is_reported_with_its_own_nodes() {
    let mut snapshot = healthy_snapshot();
    let (mut first, mut second) = (healthy("a"), healthy("b"));
    (first[4], second[4]) = ("StateNotWritten", "NodeNotUpdated");
    snapshot.watermarks = watermarks(&[first, second]);
    let found: Vec<String> = findings(&snapshot).into_iter().map(|it| it.what).collect();
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("NodeNotUpdated") && found[0].ends_with("on 1 node: b"));
    assert!(found[1].starts_with("StateNotWritten") && found[1].ends_with("on 1 node: a"));
}

#[test]
fn an_unknown_rule_is_reported_but_not_while_its_window_fills() {
    let unjudged = |why: Unknown| {
        move |snapshot: &mut ClusterSnapshot| {
            let mut row = healthy("b");
            (row[6], row[7]) = ("q/cpu", unknown_reason(why));
            snapshot.watermarks = watermarks(&[healthy("a"), row]);
        }
    };
    for why in [Unknown::Missing, Unknown::Stale, Unknown::Impossible] {
        assert_finding(
            unjudged(why),
            &[
                "q/cpu: this rule can't be evaluated on 1 node: b",
                "nodewatermark b shows why",
            ],
        );
    }
    for why in [Unknown::Rebased, Unknown::Sparse] {
        let mut snapshot = healthy_snapshot();
        unjudged(why)(&mut snapshot);
        assert_eq!(findings(&snapshot), [], "{why:?}");
    }
}

/// The reasons of `Ready`, `Degraded` and `ActionIneffective` as an agent writes them.
fn reasons_of(health: &AgentHealth) -> [String; 3] {
    let all = conditions(health, None, &[], jiff::Timestamp::UNIX_EPOCH);
    ["Ready", "Degraded", "ActionIneffective"].map(|kind| {
        let found = all.iter().find(|it| it.type_ == kind);
        found.expect("a condition").reason.clone()
    })
}

#[test]
fn a_healthy_starting_ended_or_stopped_agent_is_not_reported() {
    let ended = Unready::Ended("its DaemonSet goes away".to_owned());
    for unready in [
        None,
        Some(Unready::Starting),
        Some(Unready::Stopped),
        Some(ended),
    ] {
        let health = AgentHealth {
            unready,
            ..AgentHealth::default()
        };
        let reasons = reasons_of(&health);
        let [ready, degraded, ineffective] = reasons.each_ref().map(String::as_str);
        let mut snapshot = healthy_snapshot();
        let row = ["a", "", OURS, ready, degraded, ineffective, "", "", "", ""];
        snapshot.watermarks = watermarks(&[row, healthy("b")]);
        assert_eq!(findings(&snapshot), [], "{health:?}");
    }
}

#[test]
fn a_table_without_the_columns_means_an_older_definition() {
    assert_finding(
        |it| it.watermarks = table(["Name", "Agent"], &[["a", OURS], ["b", OURS]]),
        &[
            "definition of NodeWatermark",
            "older version",
            "plimsoll crds",
        ],
    );
}

#[test]
fn the_definition_has_every_column_that_is_read() {
    let definition = NodeWatermark::crd();
    let columns = definition.spec.versions[0]
        .additional_printer_columns
        .iter()
        .flatten();
    let columns: Vec<&str> = columns.map(|it| it.name.as_str()).collect();
    for column in &WATERMARK[1..] {
        assert!(columns.contains(column), "{column}: {columns:?}");
    }
}
