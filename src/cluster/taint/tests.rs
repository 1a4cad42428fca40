use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn node(taints: &Value, condition: Option<&str>) -> Marked {
    let conditions = condition.map(|status| {
        json!({"type": CONDITION, "status": status, "reason": "q/r", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"})
    });
    let ready = json!({"type": "Ready", "status": "True"});
    let conditions: Vec<Value> = [ready].into_iter().chain(conditions).collect();
    Marked::of(&json!({
        "metadata": {"name": "n", "uid": "u", "resourceVersion": "7"},
        "spec": {"taints": taints},
        "status": {"conditions": conditions},
    }))
}

fn mark() -> Mark {
    Mark {
        effect: TaintEffect::NoSchedule,
        reason: "q/r".to_owned(),
        message: "m".to_owned(),
    }
}

const NO: Option<TaintEffect> = Some(TaintEffect::NoSchedule);
const PREFER: Option<TaintEffect> = Some(TaintEffect::PreferNoSchedule);

#[test]
fn the_first_taint_of_a_node_makes_the_list_and_the_last_takes_it_away() {
    let bare = node(&Value::Null, None);
    let patch = bare.patch(NO).expect("an edit");
    assert_eq!(
        patch,
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "add", "path": "/spec/taints", "value": [{"key": KEY, "effect": "NoSchedule"}]},
        ])
    );
    let tainted = node(&json!([{"key": KEY, "effect": "NoSchedule"}]), None);
    let patch = tainted.patch(None).expect("an edit");
    assert_eq!(patch[2], json!({"op": "remove", "path": "/spec/taints"}));
    assert_eq!(bare.patch(None), None);
    assert_eq!(tainted.patch(NO), None);
}

#[test]
fn the_strongest_effect_replaces_the_other_and_strangers_keep_their_fields_and_order() {
    let others = [
        json!({"key": "a", "value": "x", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z", "later": 1}),
        json!({"key": "b", "effect": "NoSchedule"}),
    ];
    let taints =
        json!([others[0], {"key": KEY, "effect": "PreferNoSchedule", "value": "v"}, others[1]]);
    let seen = node(&taints, None);
    assert_eq!(seen.effect(), PREFER);
    assert_eq!(seen.edited(PREFER), None, "it is there, whatever its value");
    let edited = seen.edited(NO).expect("an edit");
    assert_eq!(
        edited,
        [
            others[0].clone(),
            others[1].clone(),
            json!({"key": KEY, "effect": "NoSchedule"})
        ]
    );
    assert_eq!(seen.edited(None).expect("an edit"), others);
}

#[test]
fn a_taint_of_our_key_whose_effect_we_never_use_is_somebody_elses() {
    let taints = json!([{"key": KEY, "effect": "NoExecute"}]);
    let seen = node(&taints, None);
    assert_eq!(seen.effect(), None);
    assert_eq!(seen.edited(None), None);
    assert_eq!(seen.edited(NO).expect("an edit").len(), 2);
}

#[test]
fn the_condition_keeps_its_transition_time_while_its_status_stays() {
    let now = "2026-02-02T00:00:00Z";
    let since = |seen: &Marked, mark: Option<&Mark>| {
        seen.condition_patch(mark, now)["status"]["conditions"][0]["lastTransitionTime"].clone()
    };
    let before = "2026-01-01T00:00:00Z";
    assert_eq!(
        since(&node(&Value::Null, Some("True")), Some(&mark())),
        before
    );
    assert_eq!(since(&node(&Value::Null, Some("True")), None), now);
    assert_eq!(since(&node(&Value::Null, Some("False")), None), before);
    assert_eq!(since(&node(&Value::Null, None), Some(&mark())), now);
}

#[test]
fn nothing_is_written_where_all_is_said_and_no_condition_is_made_to_say_that_all_is_well() {
    let tainted = json!([{"key": KEY, "effect": "NoSchedule"}]);
    assert!(node(&Value::Null, None).bears(None));
    assert!(node(&Value::Null, Some("False")).bears(None));
    assert!(!node(&Value::Null, Some("True")).bears(None));
    assert!(!node(&Value::Null, Some("Unknown")).bears(None));
    assert!(!node(&tainted, Some("False")).bears(None));
    assert!(node(&tainted, Some("True")).bears(Some(&mark())));
    assert!(!node(&tainted, None).bears(Some(&mark())));
    let other = Mark {
        reason: "q/other".to_owned(),
        ..mark()
    };
    assert!(!node(&tainted, Some("True")).bears(Some(&other)));
}

#[test]
fn an_object_that_makes_no_sense_is_a_node_without_marks() {
    for odd in [
        json!(null),
        json!([]),
        json!({"spec": {"taints": "x"}, "status": {"conditions": 3}}),
    ] {
        let seen = Marked::of(&odd);
        assert_eq!(seen.effect(), None);
        assert!(seen.bears(None));
    }
}

fn taint() -> impl Strategy<Value = Value> {
    let key = prop_oneof![Just(KEY), Just("a"), Just("node.kubernetes.io/not-ready")];
    let effect = prop_oneof![
        Just("NoSchedule"),
        Just("PreferNoSchedule"),
        Just("NoExecute")
    ];
    (key, effect, any::<bool>()).prop_map(|(key, effect, valued)| {
        let mut taint = json!({"key": key, "effect": effect});
        if valued {
            taint["value"] = json!("v");
        }
        taint
    })
}

fn effect() -> impl Strategy<Value = Option<TaintEffect>> {
    prop_oneof![Just(None), Just(NO), Just(PREFER)]
}

proptest! {
    #[test]
    fn an_edit_does_what_it_has_to_once_and_touches_nobody_elses(
        taints in vec(taint(), 0..6),
        wanted in effect(),
    ) {
        let before = node(&json!(taints), None);
        let after = before.edited(wanted).unwrap_or_else(|| taints.clone());
        let seen = node(&json!(after), None);
        prop_assert_eq!(seen.effect(), wanted);
        prop_assert_eq!(seen.edited(wanted), None);
        let strangers = |taints: &[Value]| -> Vec<Value> {
            taints.iter().filter(|taint| ours(taint).is_none()).cloned().collect()
        };
        prop_assert_eq!(strangers(&taints), strangers(&after));
        prop_assert_eq!(after.iter().filter(|taint| ours(taint).is_some()).count(), usize::from(wanted.is_some()));
    }
}
