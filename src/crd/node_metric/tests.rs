use super::*;

/// An object with a value in every field.
fn sample() -> Value {
    json!({
        "apiVersion": "metrics.plimsoll.dev/v1alpha1",
        "kind": "NodeMetric",
        "metadata": {"name": "worker-1", "labels": {"zone": "a"}},
        "status": {
            "timestamp": "2026-01-02T03:04:05Z",
            "window": "10s",
            "agent": {"version": "0.1.0", "bootID": "b", "sequence": 7},
            "capacity": {"cpu": "8", "memory": "32Gi"},
            "usage": {
                "node": {"cpu": "1250m", "memory": "8123Mi"},
                "pods": {"cpu": "1100m", "memory": "6000Mi"},
                "system": {"cpu": "150m", "memory": "2123Mi"},
            },
            "pressure": {
                "cpu": {"some": {"avg10": 1.5, "avg60": 1.0, "avg300": 0.0}},
                "memory": {"some": stalled(), "full": stalled()},
                "io": {"some": stalled(), "full": stalled()},
            },
            "windows": {"cpu": windows(), "memory": windows()},
            "pods": 12,
            "topPods": [{
                "namespace": "shop", "name": "web-0", "cpu": "700m", "memory": "1Gi",
                "cpuDelay": 2.5, "memoryPressure": 0.0, "ioPressure": 0.1,
            }],
            "rules": {"total": 3, "breached": 1, "cooling": 1, "unknown": 0},
            "breached": ["q/cpu"],
            "conditions": [{
                "type": "Healthy", "status": "True", "reason": "AgentReporting", "message": "",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
            }],
        },
    })
}

fn stalled() -> Value {
    json!({"avg10": 0.1, "avg60": 0.2, "avg300": 0.3})
}

fn windows() -> Value {
    let stats = json!({
        "avg": 15.5, "p50": 14.0, "p90": 20.0, "p95": 22.0, "p99": 30.0, "max": 31.0, "coverage": 1.0,
    });
    let peak = json!({"value": 18.0, "coverage": 0.75});
    json!({"last5m": stats, "last30m": stats, "last1h": stats, "maxAvg1h": peak, "maxAvg1d": peak})
}

/// Calls `visit` with each schema within `schema` and its path.
fn walk(schema: &Value, path: &str, visit: &mut impl FnMut(&str, &Value)) {
    visit(path, schema);
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        walk(field, &format!("{path}.{name}"), visit);
    }
    for inner in ["items", "additionalProperties"] {
        if schema[inner].is_object() {
            walk(&schema[inner], &format!("{path}[]"), visit);
        }
    }
}

#[test]
fn a_metric_survives_a_round_trip() {
    let metric: NodeMetric = serde_json::from_value(sample()).unwrap();
    assert_eq!(serde_json::to_value(&metric).unwrap(), sample());
}

#[test]
fn unknown_values_are_absent_not_zero() {
    let metric = NodeMetric::default();
    let written = serde_json::to_value(&metric).unwrap();
    assert_eq!(written["metadata"], json!({}));
    assert_eq!(written["status"], json!({}));
    assert_eq!(
        serde_json::from_value::<NodeMetric>(written).unwrap(),
        metric
    );
}

#[test]
fn the_schema_is_structural_and_every_field_has_a_description() {
    walk(&NodeMetric::schema(), "", &mut |path, schema| {
        assert!(schema["type"].is_string(), "{path} has no type: {schema}");
        for key in ["$ref", "anyOf", "oneOf", "allOf", "definitions", "nullable"] {
            assert!(schema.get(key).is_none(), "{path} has {key}");
        }
        let described = schema["description"]
            .as_str()
            .is_some_and(|text| text.len() > 5);
        assert!(
            described || path.ends_with("[]"),
            "{path} has no description: {schema}"
        );
    });
}

#[test]
fn the_schema_has_every_serialized_field() {
    fn covers(schema: &Value, value: &Value, path: &str) {
        match value {
            Value::Object(_) if path == ".metadata" => {}
            Value::Object(fields) => {
                for (name, value) in fields {
                    let path = format!("{path}.{name}");
                    let field = &schema["properties"][name];
                    assert!(field.is_object(), "the schema lacks {path}");
                    covers(field, value, &path);
                }
            }
            Value::Array(items) => items
                .iter()
                .for_each(|item| covers(&schema["items"], item, &format!("{path}[]"))),
            Value::String(_) => assert_eq!(schema["type"], "string", "{path}"),
            Value::Number(_) => {
                assert!(
                    ["number", "integer"].iter().any(|t| schema["type"] == *t),
                    "{path}"
                );
            }
            other => panic!("{path}: {other}"),
        }
    }
    covers(&NodeMetric::schema(), &sample(), "");
}
