use serde_json::{Value, json};

use super::*;
use crate::cluster::client::CallError;

fn at(seconds: u64) -> BootTime {
    BootTime::default() + Duration::from_secs(1000 + seconds)
}

fn disabled(message: &str) -> Wanted {
    Wanted {
        scheduling: Scheduling::Disabled {
            effect: TaintEffect::NoSchedule,
            rules: vec![RuleId::from("q/r")],
        },
        message: message.to_owned(),
        no_trace: false,
    }
}

fn enabled() -> Wanted {
    Wanted {
        scheduling: Scheduling::Enabled,
        ..Wanted::default()
    }
}

/// The Node at a version, bearing what `keeper` wants or nothing.
fn node(version: u64, mark: Option<&Mark>) -> Marked {
    let taints: Vec<Value> = mark
        .map(|mark| json!({"key": taint::KEY, "effect": mark.effect.name()}))
        .into_iter()
        .collect();
    let condition = mark.map_or_else(|| json!({"type": taint::CONDITION, "status": "False"}), |mark| {
        json!({"type": taint::CONDITION, "status": "True", "reason": mark.reason, "message": mark.message})
    });
    Marked::of(&json!({
        "metadata": {"name": "n", "uid": "u", "resourceVersion": version.to_string()},
        "spec": {"taints": taints},
        "status": {"conditions": [condition]},
    }))
}

fn keeps(step: &Step) -> bool {
    matches!(step, Step::Keep(_))
}

#[test]
fn after_a_start_the_node_is_left_alone_until_the_engine_has_spoken() {
    let mark = Mark {
        effect: TaintEffect::NoSchedule,
        reason: "q/r".to_owned(),
        message: "m".to_owned(),
    };
    let mut keeper = Keeper::default();
    keeper.want(&Wanted::default());
    keeper.see(at(0), Some(&node(1, Some(&mark))));
    assert_eq!(keeper.step(at(0)), Step::Rest(None));
    assert_eq!(keeper.standing().effect, Some(TaintEffect::NoSchedule));
    keeper.want(&enabled());
    assert!(
        keeps(&keeper.step(at(1))),
        "the taint of a dead process goes"
    );
    keeper.kept(at(1), Ok(node(2, None)));
    assert_eq!(keeper.step(at(1)), Step::Rest(None));
    assert_eq!(
        keeper.standing(),
        Standing {
            known: true,
            ..Standing::default()
        }
    );
}

#[test]
fn a_value_that_moves_is_no_reason_to_write_and_a_watch_that_lags_no_loss() {
    let mut keeper = Keeper::default();
    keeper.want(&disabled("7000m over 4000m"));
    keeper.see(at(0), Some(&node(1, None)));
    assert!(keeps(&keeper.step(at(0))));
    let ours = node(3, keeper.mark.as_ref());
    keeper.kept(at(0), Ok(ours));
    keeper.want(&disabled("7001m over 4000m"));
    keeper.see(at(1), Some(&node(2, None)));
    assert_eq!(keeper.step(at(1)), Step::Rest(None));
    assert!(keeper.losses.is_empty());
}

#[test]
fn a_node_of_a_backup_is_seen_though_it_is_older_than_what_was_known() {
    let mut keeper = Keeper::default();
    keeper.want(&disabled("m"));
    let listed = |lists| Watched {
        node: Some(node(3, keeper.mark.as_ref())),
        lists,
    };
    let [first, second] = [1, 2].map(listed);
    keeper.look(at(0), &first);
    keeper.want(&enabled());
    assert!(keeps(&keeper.step(at(0))));
    keeper.kept(at(0), Ok(node(4, None)));
    keeper.look(at(1), &first);
    assert_eq!(
        keeper.step(at(1)),
        Step::Rest(None),
        "the watch lags behind"
    );
    keeper.look(at(2), &second);
    assert_eq!(keeper.standing().effect, Some(TaintEffect::NoSchedule));
    assert!(keeps(&keeper.step(at(2))), "the taint of the backup goes");
}

/// Undoes what is held and lets the keeper put it back, `times` times from second `from` on; returns the last step.
fn undo(keeper: &mut Keeper, from: u64, times: u64) -> Step {
    let mut step = Step::Rest(None);
    for round in 0..times {
        let now = at(from + round);
        let version = 10 * (from + round);
        keeper.see(now, Some(&node(version + 1, None)));
        step = keeper.step(now);
        if keeps(&step) {
            let ours = node(version + 2, keeper.mark.as_ref());
            keeper.kept(now, Ok(ours));
            assert!(!keeps(&keeper.step(now)));
        }
    }
    step
}

#[test]
fn what_others_take_off_is_put_back_but_not_for_ever() {
    let mut keeper = Keeper::default();
    keeper.want(&disabled("m"));
    keeper.see(at(0), Some(&node(1, None)));
    assert!(keeps(&keeper.step(at(0))));
    let ours = node(2, keeper.mark.as_ref());
    keeper.kept(at(0), Ok(ours));
    assert!(!keeps(&keeper.step(at(0))));
    assert!(
        keeps(&undo(&mut keeper, 1, 3)),
        "three times it is put back"
    );
    assert!(!keeper.standing().contested);
    let Step::Rest(Some(pause)) = undo(&mut keeper, 4, 1) else {
        panic!("it goes on")
    };
    assert!((30..=60).contains(&pause.as_secs()), "{pause:?}");
    assert!(keeper.standing().contested);
    // After the pause it is put back once, and the next loss is one too many.
    assert!(keeps(&keeper.step(at(70))));
    let ours = node(700, keeper.mark.as_ref());
    keeper.kept(at(70), Ok(ours));
    assert!(matches!(keeper.step(at(70)), Step::Rest(Some(_))));
    let Step::Rest(Some(longer)) = undo(&mut keeper, 71, 1) else {
        panic!("it goes on")
    };
    assert!((60..=120).contains(&longer.as_secs()), "{longer:?}");
    // Left alone for a while, all is forgotten.
    let over = 73 + longer.as_secs();
    assert!(keeps(&keeper.step(at(over))));
    let ours = node(2000, keeper.mark.as_ref());
    keeper.kept(at(over), Ok(ours));
    assert!(matches!(keeper.step(at(over)), Step::Rest(Some(_))));
    assert_eq!(keeper.step(at(over + 100)), Step::Rest(None));
    assert!(!keeper.standing().contested);
    assert!(keeps(&undo(&mut keeper, over + 101, 1)));
}

#[test]
fn who_no_longer_wants_it_is_not_held_up_by_a_contest() {
    let mut keeper = Keeper::default();
    keeper.want(&disabled("m"));
    keeper.see(at(0), Some(&node(1, None)));
    assert!(keeps(&keeper.step(at(0))));
    let ours = node(2, keeper.mark.as_ref());
    keeper.kept(at(0), Ok(ours));
    assert!(!keeps(&keeper.step(at(0))));
    assert!(!keeps(&undo(&mut keeper, 1, 4)));
    keeper.want(&enabled());
    let left = node(100, keeper.mark.as_ref());
    keeper.see(at(6), Some(&left));
    assert_eq!(keeper.step(at(6)), Step::Rest(None));
    assert!(!keeper.standing().contested);
}

#[test]
fn while_the_api_server_is_away_it_is_tried_ever_more_seldom_and_told() {
    let mut keeper = Keeper::default();
    keeper.want(&disabled("m"));
    keeper.see(at(0), Some(&node(1, None)));
    let mut now = at(0);
    let mut pauses = Vec::new();
    for _ in 0..8 {
        assert!(keeps(&keeper.step(now)));
        let source = CallError::TimedOut;
        let node = "n".to_owned();
        let verb = "taint";
        keeper.kept(now, Err(TaintError::Call { verb, node, source }));
        let Step::Rest(Some(pause)) = keeper.step(now) else {
            panic!("it must pause")
        };
        pauses.push(pause);
        now = now + pause;
    }
    assert!(pauses[0] >= Duration::from_secs(1) && pauses[0] <= Duration::from_secs(2));
    assert!(pauses[7] >= Duration::from_mins(1), "{pauses:?}");
    assert!(keeper.standing().failing.is_some());
    let ours = node(2, keeper.mark.as_ref());
    keeper.kept(now, Ok(ours));
    assert_eq!(keeper.step(now), Step::Rest(None));
    assert_eq!(keeper.standing().failing, None);
}

#[test]
fn without_a_node_nothing_is_done() {
    let mut keeper = Keeper::default();
    keeper.want(&disabled("m"));
    keeper.see(at(0), None);
    assert_eq!(keeper.step(at(0)), Step::Rest(None));
}

#[test]
fn where_no_trace_is_to_be_left_the_condition_goes_after_the_taint_and_comes_back_with_it() {
    let mut keeper = Keeper::default();
    let no_trace = |wanted| Wanted {
        no_trace: true,
        ..wanted
    };
    keeper.want(&disabled("m"));
    let marked = node(1, keeper.mark.as_ref());
    keeper.see(at(0), Some(&marked));
    keeper.want(&no_trace(disabled("m")));
    assert_eq!(keeper.step(at(0)), Step::Rest(None), "it is in force still");
    keeper.want(&no_trace(enabled()));
    assert!(keeps(&keeper.step(at(1))));
    assert_eq!(keeper.bearing(), Bearing::NoTrace);
    keeper.kept(at(1), Ok(node(2, None)));
    assert!(keeps(&keeper.step(at(1))), "a condition is left");
    let bare = json!({"metadata": {"name": "n", "uid": "u", "resourceVersion": "3"}});
    keeper.kept(at(1), Ok(Marked::of(&bare)));
    assert_eq!(keeper.step(at(1)), Step::Rest(None));
    keeper.want(&enabled());
    assert_eq!(keeper.step(at(2)), Step::Rest(None));
    keeper.want(&disabled("m"));
    assert!(keeps(&keeper.step(at(3))));
}
