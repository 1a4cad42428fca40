use serde_json::{Value, json};

use super::*;
use crate::cluster::client::CallError;

fn at(seconds: u64) -> BootTime {
    BootTime::default() + Duration::from_secs(1000 + seconds)
}

/// The watch shows the Node, after one list.
fn observe_node(reconciler: &mut Reconciler, now: BootTime, node: Option<&NodeSnapshot>) {
    let node = node.cloned();
    reconciler.observe(now, &WatchedNode { node, lists: 0 });
}

fn disabled(message: &str) -> WantedTaint {
    WantedTaint {
        scheduling: Scheduling::Disabled {
            effect: TaintEffect::NoSchedule,
            rules: vec![RuleId::from("q/r")],
        },
        message: message.to_owned(),
        remove_condition: false,
        busy: false,
    }
}

fn enabled() -> WantedTaint {
    WantedTaint {
        scheduling: Scheduling::Enabled,
        ..WantedTaint::default()
    }
}

/// The Node at a version, with the taint and condition of `node_taint` or none.
fn node(version: u64, node_taint: Option<&NodeTaint>) -> NodeSnapshot {
    let taints: Vec<Value> = node_taint
        .map(|node_taint| json!({"key": taint::KEY, "effect": node_taint.effect.name()}))
        .into_iter()
        .collect();
    let condition = node_taint.map_or_else(|| json!({"type": taint::CONDITION, "status": "False"}), |node_taint| {
        json!({"type": taint::CONDITION, "status": "True", "reason": node_taint.reason, "message": node_taint.message})
    });
    NodeSnapshot::of(&json!({
        "metadata": {"name": "n", "uid": "u", "resourceVersion": version.to_string()},
        "spec": {"taints": taints},
        "status": {"conditions": [condition]},
    }))
}

fn writes(step: &Step) -> bool {
    matches!(step, Step::Write(_))
}

#[test]
fn the_node_is_unchanged_until_the_first_decision() {
    let node_taint = NodeTaint {
        effect: TaintEffect::NoSchedule,
        reason: "q/r".to_owned(),
        message: "m".to_owned(),
    };
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&WantedTaint::default());
    observe_node(&mut reconciler, at(0), Some(&node(1, Some(&node_taint))));
    assert_eq!(reconciler.step(at(0)), Step::Wait(None));
    assert_eq!(reconciler.state().effect, Some(TaintEffect::NoSchedule));
    reconciler.set_wanted(&enabled());
    assert!(
        writes(&reconciler.step(at(1))),
        "the taint of an earlier process is removed"
    );
    reconciler.written(at(1), Ok(node(2, None)));
    assert_eq!(reconciler.step(at(1)), Step::Wait(None));
    assert_eq!(
        reconciler.state(),
        TaintState {
            known: true,
            ..TaintState::default()
        }
    );
}

#[test]
fn a_changed_value_or_a_lagging_watch_causes_no_write() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("7000m over 4000m"));
    observe_node(&mut reconciler, at(0), Some(&node(1, None)));
    assert!(writes(&reconciler.step(at(0))));
    let ours = node(3, reconciler.node_taint.as_ref());
    reconciler.written(at(0), Ok(ours));
    reconciler.set_wanted(&disabled("7001m over 4000m"));
    observe_node(&mut reconciler, at(1), Some(&node(2, None)));
    assert_eq!(reconciler.step(at(1)), Step::Wait(None));
    assert!(reconciler.losses.is_empty());
}

#[test]
fn an_older_node_from_a_restored_backup_is_accepted() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("m"));
    let listed = |lists| WatchedNode {
        node: Some(node(3, reconciler.node_taint.as_ref())),
        lists,
    };
    let [first, second] = [1, 2].map(listed);
    reconciler.observe(at(0), &first);
    reconciler.set_wanted(&enabled());
    assert!(writes(&reconciler.step(at(0))));
    reconciler.written(at(0), Ok(node(4, None)));
    reconciler.observe(at(1), &first);
    assert_eq!(
        reconciler.step(at(1)),
        Step::Wait(None),
        "the watch lags behind"
    );
    reconciler.observe(at(2), &second);
    assert_eq!(reconciler.state().effect, Some(TaintEffect::NoSchedule));
    assert!(
        writes(&reconciler.step(at(2))),
        "the taint from the backup is removed"
    );
}

#[test]
fn a_taint_that_admission_removes_is_not_written_in_a_loop() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("m"));
    observe_node(&mut reconciler, at(0), Some(&node(1, None)));
    let mut writes_seen = 0;
    for version in 2..100 {
        if !writes(&reconciler.step(at(0))) {
            break;
        }
        writes_seen += 1;
        reconciler.written(at(0), Ok(node(version, None)));
    }
    assert_eq!(writes_seen, MAX_LOSSES + 1);
    assert!(reconciler.state().contested);
}

/// Removes the taint and lets the reconciler restore it, `times` times from second `from` on. Returns the last step.
fn remove(reconciler: &mut Reconciler, from: u64, times: u64) -> Step {
    let mut step = Step::Wait(None);
    for round in 0..times {
        let now = at(from + round);
        let version = 10 * (from + round);
        observe_node(reconciler, now, Some(&node(version + 1, None)));
        step = reconciler.step(now);
        if writes(&step) {
            let ours = node(version + 2, reconciler.node_taint.as_ref());
            reconciler.written(now, Ok(ours));
            assert!(!writes(&reconciler.step(now)));
        }
    }
    step
}

#[test]
fn a_removed_taint_is_restored_a_limited_number_of_times() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("m"));
    observe_node(&mut reconciler, at(0), Some(&node(1, None)));
    assert!(writes(&reconciler.step(at(0))));
    let ours = node(2, reconciler.node_taint.as_ref());
    reconciler.written(at(0), Ok(ours));
    assert!(!writes(&reconciler.step(at(0))));
    assert!(
        writes(&remove(&mut reconciler, 1, 3)),
        "it is restored three times"
    );
    assert!(!reconciler.state().contested);
    let Step::Wait(Some(pause)) = remove(&mut reconciler, 4, 1) else {
        panic!("it must pause")
    };
    assert!((30..=60).contains(&pause.as_secs()), "{pause:?}");
    assert!(reconciler.state().contested);
    // After the pause it is restored once, and the next loss is too many.
    assert!(writes(&reconciler.step(at(70))));
    let ours = node(700, reconciler.node_taint.as_ref());
    reconciler.written(at(70), Ok(ours));
    assert!(matches!(reconciler.step(at(70)), Step::Wait(Some(_))));
    let Step::Wait(Some(longer)) = remove(&mut reconciler, 71, 1) else {
        panic!("it must pause")
    };
    assert!((60..=120).contains(&longer.as_secs()), "{longer:?}");
    // Without further losses, the history is cleared.
    let over = 73 + longer.as_secs();
    assert!(writes(&reconciler.step(at(over))));
    let ours = node(2000, reconciler.node_taint.as_ref());
    reconciler.written(at(over), Ok(ours));
    assert!(matches!(reconciler.step(at(over)), Step::Wait(Some(_))));
    assert_eq!(reconciler.step(at(over + 100)), Step::Wait(None));
    assert!(!reconciler.state().contested);
    assert!(writes(&remove(&mut reconciler, over + 101, 1)));
}

#[test]
fn an_unwanted_taint_is_not_contested() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("m"));
    observe_node(&mut reconciler, at(0), Some(&node(1, None)));
    assert!(writes(&reconciler.step(at(0))));
    let ours = node(2, reconciler.node_taint.as_ref());
    reconciler.written(at(0), Ok(ours));
    assert!(!writes(&reconciler.step(at(0))));
    assert!(!writes(&remove(&mut reconciler, 1, 4)));
    reconciler.set_wanted(&enabled());
    let left = node(100, reconciler.node_taint.as_ref());
    observe_node(&mut reconciler, at(6), Some(&left));
    assert_eq!(reconciler.step(at(6)), Step::Wait(None));
    assert!(!reconciler.state().contested);
}

#[test]
fn failed_writes_are_retried_with_backoff_and_reported() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("m"));
    observe_node(&mut reconciler, at(0), Some(&node(1, None)));
    let mut now = at(0);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        assert!(writes(&reconciler.step(now)));
        let server = "https://127.0.0.1:6443".to_owned();
        let source = CallError::TimedOut { server };
        let node = "n".to_owned();
        let verb = "taint";
        reconciler.written(now, Err(TaintError::Call { verb, node, source }));
        let Step::Wait(Some(pause)) = reconciler.step(now) else {
            panic!("it must pause")
        };
        pauses.push(pause);
        now = now + pause;
    }
    assert!(pauses[0] >= Duration::from_secs(1) && pauses[0] <= Duration::from_secs(2));
    assert!(pauses[7] >= Duration::from_mins(1), "{pauses:?}");
    assert!(reconciler.state().failing.is_some());
    let ours = node(2, reconciler.node_taint.as_ref());
    reconciler.written(now, Ok(ours));
    assert_eq!(reconciler.step(now), Step::Wait(None));
    assert_eq!(reconciler.state().failing, None);
}

#[test]
fn without_a_node_nothing_is_written() {
    let mut reconciler = Reconciler::default();
    reconciler.set_wanted(&disabled("m"));
    observe_node(&mut reconciler, at(0), None);
    assert_eq!(reconciler.step(at(0)), Step::Wait(None));
}

#[test]
fn no_trace_removes_the_condition_until_the_next_taint() {
    let mut reconciler = Reconciler::default();
    let remove_condition = |wanted| WantedTaint {
        remove_condition: true,
        ..wanted
    };
    reconciler.set_wanted(&disabled("m"));
    let tainted = node(1, reconciler.node_taint.as_ref());
    observe_node(&mut reconciler, at(0), Some(&tainted));
    reconciler.set_wanted(&remove_condition(disabled("m")));
    assert_eq!(
        reconciler.step(at(0)),
        Step::Wait(None),
        "it is still in force"
    );
    reconciler.set_wanted(&remove_condition(enabled()));
    assert!(writes(&reconciler.step(at(1))));
    assert_eq!(reconciler.desired(), DesiredTaint::Removed.into());
    reconciler.written(at(1), Ok(node(2, None)));
    assert!(writes(&reconciler.step(at(1))), "a condition remains");
    let bare = json!({"metadata": {"name": "n", "uid": "u", "resourceVersion": "3"}});
    reconciler.written(at(1), Ok(NodeSnapshot::of(&bare)));
    assert_eq!(reconciler.step(at(1)), Step::Wait(None));
    reconciler.set_wanted(&enabled());
    assert_eq!(reconciler.step(at(2)), Step::Wait(None));
    reconciler.set_wanted(&disabled("m"));
    assert!(writes(&reconciler.step(at(3))));
}

#[test]
fn a_busy_node_is_tainted_and_its_end_is_no_loss() {
    let mut reconciler = Reconciler::default();
    let busy = |busy| WantedTaint { busy, ..enabled() };
    reconciler.set_wanted(&busy(true));
    observe_node(&mut reconciler, at(0), Some(&node(1, None)));
    assert!(matches!(reconciler.step(at(0)), Step::Write(_)));
    assert!(reconciler.desired().busy);
    let mut tainted = node(2, None);
    tainted = NodeSnapshot::of(&json!({
        "metadata": {"name": tainted.name, "uid": tainted.uid, "resourceVersion": "2"},
        "spec": {"taints": [{"key": taint::BUSY_KEY, "effect": "PreferNoSchedule"}]},
    }));
    reconciler.written(at(0), Ok(tainted));
    assert_eq!(reconciler.step(at(0)), Step::Wait(None));
    reconciler.set_wanted(&busy(false));
    assert!(matches!(reconciler.step(at(1)), Step::Write(_)));
    assert_eq!(reconciler.losses.len(), 0);
}

#[test]
fn an_older_node_from_the_watch_is_ignored_after_a_write() {
    let mut newest = NewestNode::default();
    let seen = |version, lists| WatchedNode {
        node: Some(node(version, None)),
        lists,
    };
    let version = |newest: &NewestNode| newest.get().map(|node| node.version.clone());
    assert!(newest.observe(&seen(1, 0)));
    newest.written(node(5, None));
    assert!(!newest.observe(&seen(4, 0)));
    assert_eq!(version(&newest).as_deref(), Some("5"));
    assert!(newest.observe(&seen(6, 0)), "another writer");
    assert!(newest.observe(&seen(3, 1)), "restored from a backup");
    assert_eq!(version(&newest).as_deref(), Some("3"));
}
