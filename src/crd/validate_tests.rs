use serde_json::json;

use super::*;

fn action(spec: &Value) -> Validation {
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
fn a_null_is_absent_and_gets_the_default() {
    let validation = action(
        &json!({"coolDownSeconds": null, "throttle": null, "eviction": {"maxPodsPerRound": null}}),
    );
    assert_eq!(validation.problems, []);
    assert_eq!(
        validation.object["spec"],
        json!({"coolDownSeconds": 300, "eviction": {"maxPodsPerRound": 1, "evictUnowned": false}})
    );
}

#[test]
fn cel_rules_are_evaluated_only_if_the_schema_is_valid() {
    let both = json!({"throttle": {}, "coolDownSeconds": "5"});
    assert_eq!(
        messages(&both),
        [
            "spec.coolDownSeconds: coolDownSeconds is the string \"5\", and must be an integer; remove the quotes: 5"
        ]
    );
}

#[test]
fn status_in_a_manifest_is_ignored() {
    let object = json!({
        "apiVersion": "ensurance.crane.io/v1alpha1",
        "kind": "AvoidanceAction",
        "metadata": {"name": "a"},
        "spec": {},
        "status": {"conditions": 5},
    });
    let validation = validate(Kind::AvoidanceAction, &object);
    assert_eq!(validation.problems, []);
    assert_eq!(validation.object.get("status"), None);
}

#[test]
fn the_number_of_problems_is_limited() {
    let fields: serde_json::Map<_, _> = (0..100_000)
        .map(|index| (format!("x{index}"), json!(1)))
        .collect();
    assert_eq!(messages(&Value::Object(fields)).len(), 100);
}
