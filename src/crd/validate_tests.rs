use serde_json::json;

use super::*;

fn action(spec: &Value) -> Verdict {
    let object = json!({
        "apiVersion": "ensurance.crane.io/v1alpha1",
        "kind": "AvoidanceAction",
        "metadata": {"name": "a"},
        "spec": spec,
    });
    validate(Kind::AvoidanceAction, &object)
}

fn messages(spec: &Value) -> Vec<String> {
    let problems = action(spec).problems.into_iter();
    problems
        .map(|problem| format!("{}: {}", problem.path, problem.message))
        .collect()
}

#[test]
fn a_null_counts_as_absent_and_takes_the_default() {
    let verdict = action(
        &json!({"coolDownSeconds": null, "throttle": null, "eviction": {"maxPodsPerRound": null}}),
    );
    assert_eq!(verdict.problems, []);
    assert_eq!(
        verdict.object["spec"],
        json!({"coolDownSeconds": 300, "eviction": {"maxPodsPerRound": 1, "evictUnowned": false}})
    );
}

#[test]
fn rules_wait_until_the_schema_holds() {
    let both = json!({"throttle": {}, "coolDownSeconds": "5"});
    assert_eq!(
        messages(&both),
        [
            "spec.coolDownSeconds: coolDownSeconds is the text \"5\", and must be a whole number; remove the quotes: 5"
        ]
    );
}

#[test]
fn status_in_a_manifest_does_not_count() {
    let object = json!({
        "apiVersion": "ensurance.crane.io/v1alpha1",
        "kind": "AvoidanceAction",
        "metadata": {"name": "a"},
        "spec": {},
        "status": {"conditions": 5},
    });
    let verdict = validate(Kind::AvoidanceAction, &object);
    assert_eq!(verdict.problems, []);
    assert_eq!(verdict.object.get("status"), None);
}

#[test]
fn a_hostile_object_gets_a_bounded_answer() {
    let fields: serde_json::Map<_, _> = (0..100_000)
        .map(|index| (format!("x{index}"), json!(1)))
        .collect();
    assert_eq!(messages(&Value::Object(fields)).len(), 100);
}
