use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn node(taints: &Value, condition: Option<&str>) -> NodeSnapshot {
    let conditions = condition.map(|status| {
        json!({"type": CONDITION, "status": status, "reason": "q/r", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z"})
    });
    let ready = json!({"type": "Ready", "status": "True"});
    let conditions: Vec<Value> = [ready].into_iter().chain(conditions).collect();
    NodeSnapshot::of(&json!({
        "metadata": {"name": "n", "uid": "u", "resourceVersion": "7"},
        "spec": {"taints": taints},
        "status": {"conditions": conditions},
    }))
}

fn desired() -> NodeTaint {
    NodeTaint {
        effect: TaintEffect::NoSchedule,
        reason: "q/r".to_owned(),
        message: "m".to_owned(),
    }
}

const NO: Option<TaintEffect> = Some(TaintEffect::NoSchedule);
const PREFER: Option<TaintEffect> = Some(TaintEffect::PreferNoSchedule);

#[test]
fn the_first_taint_creates_the_list_and_the_last_removes_it() {
    let bare = node(&Value::Null, None);
    let patch = bare.patch(NO, false).expect("an edit");
    assert_eq!(
        patch,
        json!([
            {"op": "test", "path": "/metadata/uid", "value": "u"},
            {"op": "test", "path": "/metadata/resourceVersion", "value": "7"},
            {"op": "add", "path": "/spec/taints", "value": [{"key": KEY, "effect": "NoSchedule"}]},
        ])
    );
    let tainted = node(&json!([{"key": KEY, "effect": "NoSchedule"}]), None);
    let patch = tainted.patch(None, false).expect("an edit");
    assert_eq!(patch[2], json!({"op": "remove", "path": "/spec/taints"}));
    assert_eq!(bare.patch(None, false), None);
    assert_eq!(tainted.patch(NO, false), None);
}

#[test]
fn the_effect_is_replaced_and_other_taints_keep_fields_and_order() {
    let others = [
        json!({"key": "a", "value": "x", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z", "later": 1}),
        json!({"key": "b", "effect": "NoSchedule"}),
    ];
    let taints =
        json!([others[0], {"key": KEY, "effect": "PreferNoSchedule", "value": "v"}, others[1]]);
    let seen = node(&taints, None);
    assert_eq!(seen.effect(), PREFER);
    assert_eq!(
        seen.edited(PREFER, false),
        None,
        "its value does not matter"
    );
    let edited = seen.edited(NO, false).expect("an edit");
    assert_eq!(
        edited,
        [
            others[0].clone(),
            others[1].clone(),
            json!({"key": KEY, "effect": "NoSchedule"})
        ]
    );
    assert_eq!(seen.edited(None, false).expect("an edit"), others);
}

#[test]
fn a_taint_with_our_key_and_an_effect_we_never_use_is_not_ours() {
    let taints = json!([{"key": KEY, "effect": "NoExecute"}]);
    let seen = node(&taints, None);
    assert_eq!(seen.effect(), None);
    assert_eq!(seen.edited(None, false), None);
    assert_eq!(seen.edited(NO, false).expect("an edit").len(), 2);
}

#[test]
fn the_transition_time_changes_only_with_the_status() {
    let now = "2026-02-02T00:00:00Z";
    let since = |seen: &NodeSnapshot, wanted: DesiredTaint<'_>| {
        let patch = seen.condition_patch(wanted, now);
        patch["status"]["conditions"][0]["lastTransitionTime"].clone()
    };
    let before = "2026-01-01T00:00:00Z";
    let (over, taint) = (DesiredTaint::Absent, desired());
    let taint = DesiredTaint::Present(&taint);
    assert_eq!(since(&node(&Value::Null, Some("True")), taint), before);
    assert_eq!(since(&node(&Value::Null, Some("True")), over), now);
    assert_eq!(since(&node(&Value::Null, Some("False")), over), before);
    assert_eq!(since(&node(&Value::Null, None), taint), now);
}

#[test]
fn nothing_is_written_in_the_desired_state_and_no_false_condition_is_created() {
    let tainted = json!([{"key": KEY, "effect": "NoSchedule"}]);
    let (over, mine) = (DesiredTaint::Absent, desired());
    let mine = DesiredTaint::Present(&mine);
    assert!(node(&Value::Null, None).matches(over));
    assert!(node(&Value::Null, Some("False")).matches(over));
    assert!(!node(&Value::Null, Some("True")).matches(over));
    assert!(!node(&Value::Null, Some("Unknown")).matches(over));
    assert!(!node(&tainted, Some("False")).matches(over));
    assert!(node(&tainted, Some("True")).matches(mine));
    assert!(!node(&tainted, None).matches(mine));
    let other = NodeTaint {
        reason: "q/other".to_owned(),
        ..desired()
    };
    assert!(!node(&tainted, Some("True")).matches(DesiredTaint::Present(&other)));
}

#[test]
fn no_trace_removes_the_condition_whatever_its_status() {
    let tainted = json!([{"key": KEY, "effect": "NoSchedule"}]);
    assert!(node(&Value::Null, None).matches(DesiredTaint::Removed));
    assert!(!node(&tainted, None).matches(DesiredTaint::Removed));
    for status in ["True", "False", "Unknown"] {
        let seen = node(&Value::Null, Some(status));
        assert!(!seen.matches(DesiredTaint::Removed), "{status}");
        assert_eq!(
            seen.condition_patch(DesiredTaint::Removed, "now"),
            json!({"metadata": {"uid": "u"}, "status": {"conditions": [{"type": CONDITION, "$patch": "delete"}]}})
        );
    }
}

#[test]
fn a_malformed_object_is_a_node_without_taints() {
    for odd in [
        json!(null),
        json!([]),
        json!({"spec": {"taints": "x"}, "status": {"conditions": 3}}),
    ] {
        let seen = NodeSnapshot::of(&odd);
        assert_eq!(seen.effect(), None);
        assert!(seen.matches(DesiredTaint::Absent));
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
    fn an_edit_is_idempotent_and_leaves_other_taints_alone(
        taints in vec(taint(), 0..6),
        wanted in effect(),
    ) {
        let before = node(&json!(taints), None);
        let after = before.edited(wanted, false).unwrap_or_else(|| taints.clone());
        let seen = node(&json!(after), None);
        prop_assert_eq!(seen.effect(), wanted);
        prop_assert_eq!(seen.edited(wanted, false), None);
        let others = |taints: &[Value]| -> Vec<Value> {
            taints.iter().filter(|taint| ours(taint).is_none()).cloned().collect()
        };
        prop_assert_eq!(others(&taints), others(&after));
        prop_assert_eq!(after.iter().filter(|taint| ours(taint).is_some()).count(), usize::from(wanted.is_some()));
    }
}

#[test]
fn the_taint_of_a_busy_node_is_independent_of_the_other() {
    let other = json!({"key": "gpu", "effect": "NoSchedule"});
    let busy = json!({"key": "plimsoll.dev/busy", "effect": "PreferNoSchedule"});
    let foreign = json!({"key": "plimsoll.dev/busy", "effect": "NoExecute"});
    let closed = json!({"key": KEY, "effect": "NoSchedule"});
    let of = |taints: Value| {
        NodeSnapshot::of(&json!({"metadata": {"name": "n"}, "spec": {"taints": taints}}))
    };
    let both = of(json!([other, closed, busy]));
    assert_eq!(both.edited(NO, true), None);
    assert!(both.is_busy() && both.needs_cleanup());
    let only =
        |it: &NodeSnapshot, effect, busy| Value::from(it.edited(effect, busy).expect("an edit"));
    assert_eq!(only(&both, NO, false), json!([other, closed]));
    assert_eq!(only(&both, None, true), json!([other, busy]));
    assert_eq!(only(&of(json!([closed])), NO, true), json!([closed, busy]));
    let twice = of(json!([busy, busy]));
    assert_eq!(only(&twice, None, true), json!([busy]), "one is enough");
    // A taint with our key and another effect is not ours.
    assert!(!of(json!([foreign])).is_busy());
    assert_eq!(of(json!([foreign])).edited(None, false), None);
}

#[test]
fn a_load_label_is_to_be_cleaned_up() {
    let labelled = |labels: Value| {
        NodeSnapshot::of(&json!({"metadata": {"name": "n", "labels": labels}, "spec": {}}))
    };
    let ours = labelled(json!({"plimsoll.dev/load": "95"}));
    assert_eq!(ours.load_label(), Some("95"));
    assert!(ours.needs_cleanup());
    assert!(!labelled(json!({"pool": "a"})).needs_cleanup());
}
