//! The checked-in definitions of the kinds.

use std::path::Path;
use std::process::Command;

use plimsoll::crd::definitions;
use serde_json::{Value, json};

fn all() -> Vec<Value> {
    definitions()
        .iter()
        .map(|definition| serde_json::to_value(definition).unwrap())
        .collect()
}

fn schema(definition: &Value) -> &Value {
    &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
}

/// Calls `visit` with the path and schema of every field.
fn walk(schema: &Value, path: &str, visit: &mut dyn FnMut(&str, &Value)) {
    visit(path, schema);
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        walk(field, &format!("{path}.{name}"), visit);
    }
    for (key, suffix) in [("items", "[]"), ("additionalProperties", "{}")] {
        if let Some(inner) = schema.get(key) {
            walk(inner, &format!("{path}{suffix}"), visit);
        }
    }
}

#[test]
fn the_checked_in_definitions_are_up_to_date() {
    for directory in ["crds", "charts/plimsoll/files/crds"] {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(["crds", "--check"])
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(directory))
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}\nrepair: make generate");
    }
}

#[test]
fn the_chart_has_all_definitions_that_differ_for_older_clusters() {
    let dir = tempfile::tempdir().unwrap();
    let written = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(["crds", "--kubernetes", "v1.33.4", "--output-dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert!(written.status.success(), "{written:?}");
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/plimsoll/files");
    let mut differing = 0;
    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let name = entry.unwrap().file_name();
        let text = |path: &Path| std::fs::read_to_string(path.join(&name)).ok();
        let ours = text(dir.path());
        let differs = ours != text(&files.join("crds"));
        let expected = if differs { ours } else { None };
        let checked_in = text(&files.join("crds-before-1.34"));
        assert!(checked_in == expected, "{name:?}; repair: make generate");
        differing += usize::from(differs);
    }
    assert_eq!(differing, 1);
}

#[test]
fn an_invalid_or_too_old_version_is_rejected() {
    for (version, expected) in [
        ("new", "write for example 1.33"),
        ("1.32", "needs Kubernetes 1.33"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(["crds", "--kubernetes", version])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(expected), "{stderr}");
    }
}

#[test]
fn an_outdated_definition_is_reported_with_the_command_to_update_it() {
    let dir = tempfile::tempdir().unwrap();
    let run = |flag: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
        command
            .args(["crds", flag])
            .arg(dir.path())
            .output()
            .unwrap()
    };
    assert!(run("--output-dir").status.success());
    assert!(run("--check").status.success());
    let file = dir.path().join("ensurance.crane.io_podqoss.yaml");
    std::fs::write(&file, "changed").unwrap();
    let output = run("--check");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(
        stderr.contains("podqoss.yaml") && stderr.contains("run: plimsoll crds --output-dir"),
        "{stderr}"
    );
}

const CRANE: &str = "ensurance.crane.io";

#[test]
fn names_short_names_scope_and_status_are_cranes_and_ours_beside_them() {
    let names: Vec<_> = all()
        .iter()
        .map(|definition| {
            let spec = &definition["spec"];
            assert_eq!(spec["scope"], "Cluster");
            assert_eq!(spec["versions"][0]["name"], "v1alpha1");
            assert_eq!(spec["versions"][0]["subresources"], json!({"status": {}}));
            (
                spec["group"].clone(),
                spec["names"]["kind"].clone(),
                spec["names"]["plural"].clone(),
                spec["names"]["shortNames"].clone(),
            )
        })
        .collect();
    let expected = [
        (CRANE, "AvoidanceAction", "avoidanceactions", "avoid"),
        (CRANE, "NodeQOS", "nodeqoss", "nq"),
        (CRANE, "PodQOS", "podqoss", "pq"),
        ("plimsoll.dev", "NodeWatermark", "nodewatermarks", "nwm"),
    ];
    assert_eq!(
        names,
        expected.map(|(group, kind, plural, short)| (
            json!(group),
            json!(kind),
            json!(plural),
            json!([short])
        ))
    );
}

#[test]
fn every_field_of_the_spec_has_a_description() {
    for definition in all() {
        walk(
            &schema(&definition)["properties"]["spec"],
            "spec",
            &mut |path, schema| {
                let named = !path.ends_with(']') && !path.ends_with('}');
                if named {
                    let text = schema["description"].as_str().unwrap_or_default();
                    assert!(
                        text.len() > 8 && text.ends_with(['.', '`', ')', 'i']),
                        "{path}: {text:?}"
                    );
                    assert!(!text.contains('\n'), "{path}: {text:?}");
                }
            },
        );
    }
}

/// Floating-point numbers: in the spec only those that are deprecated, in the status what was measured.
const FLOATS: [&str; 4] = [
    ".spec.rules[].restore",
    ".spec.rules[].watermark",
    ".status.rules[].mark",
    ".status.rules[].value",
];

#[test]
fn every_field_follows_the_api_conventions() {
    for definition in all() {
        let group = &definition["spec"]["group"];
        walk(schema(&definition), "", &mut |path, schema| {
            let named = !path.is_empty() && !path.ends_with([']', '}']);
            let text = schema["description"].as_str().unwrap_or_default();
            assert!(!named || text.len() > 8, "{path}: {text:?}");
            let format = schema["format"].as_str();
            match schema["type"].as_str() {
                Some("integer") => {
                    assert!(matches!(format, Some("int32" | "int64")), "{path}");
                }
                Some("array") => {
                    let list_type = schema["x-kubernetes-list-type"].as_str();
                    assert!(matches!(list_type, Some("atomic" | "map")), "{path}");
                    let keys = &schema["x-kubernetes-list-map-keys"];
                    assert_eq!(keys.is_array(), list_type == Some("map"), "{path}");
                }
                Some("number") => {
                    assert!(group == "plimsoll.dev" && FLOATS.contains(&path), "{path}");
                    let deprecated = text.starts_with("Deprecated: ");
                    assert_eq!(deprecated, path.starts_with(".spec"), "{path}");
                }
                Some("string") => {
                    let is_time = ["Time", ".time", ".since"];
                    let is_time = is_time.iter().any(|end| path.ends_with(end));
                    assert_eq!(format, is_time.then_some("date-time"), "{path}");
                }
                _ => {}
            }
        });
    }
}

#[test]
fn every_kind_has_a_ready_condition_as_a_column() {
    for definition in all() {
        let version = &definition["spec"]["versions"][0];
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let ready = columns.iter().find(|column| column["name"] == "Ready");
        let path = ready.unwrap()["jsonPath"].as_str().unwrap();
        assert!(
            path.starts_with(".status.conditions[?(@.type==\"Ready\")]"),
            "{path}"
        );
        let conditions = &schema(&definition)["properties"]["status"]["properties"]["conditions"];
        assert_eq!(conditions["x-kubernetes-list-map-keys"], json!(["type"]));
    }
}

#[test]
fn every_list_map_and_string_has_a_maximum() {
    for definition in all() {
        walk(
            &schema(&definition)["properties"]["spec"],
            "spec",
            &mut |path, schema| {
                let limited = match schema["type"].as_str() {
                    Some("array") => schema.get("maxItems").is_some(),
                    Some("string") => {
                        schema.get("maxLength").is_some() || schema.get("enum").is_some()
                    }
                    Some("object") if schema.get("additionalProperties").is_some() => {
                        schema.get("maxProperties").is_some()
                    }
                    _ => true,
                };
                assert!(limited, "{path} has no maximum");
            },
        );
    }
}

#[test]
fn definitions_use_only_keywords_that_our_validation_supports() {
    let known = [
        "type",
        "description",
        "default",
        "enum",
        "format",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "maxProperties",
        "properties",
        "additionalProperties",
        "items",
        "required",
        "title",
        "x-kubernetes-int-or-string",
        "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-validations",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
    ];
    for definition in all() {
        walk(schema(&definition), "", &mut |path, schema| {
            for keyword in schema.as_object().unwrap().keys() {
                assert!(known.contains(&keyword.as_str()), "{path} uses {keyword}");
            }
            let list_type = schema["x-kubernetes-list-type"].as_str();
            assert!(
                matches!(list_type, None | Some("atomic" | "map")),
                "{path}: {list_type:?}"
            );
        });
    }
}

#[test]
fn fields_with_computed_defaults_have_no_default_in_the_schema() {
    for definition in all() {
        walk(schema(&definition), "", &mut |path, schema| {
            let resolved = ["restoreThreshold", "restoredThreshold", "restoreValue"];
            if resolved.iter().any(|name| path.ends_with(name)) {
                assert_eq!(schema.get("default"), None, "{path}");
            }
        });
    }
}

#[test]
fn every_cel_rule_has_a_message_with_a_fix() {
    for definition in all() {
        walk(schema(&definition), "", &mut |path, schema| {
            for rule in schema["x-kubernetes-validations"]
                .as_array()
                .into_iter()
                .flatten()
            {
                let message = rule["message"].as_str().unwrap();
                assert!(message.contains("; "), "{path}: {message}");
                let field = rule["fieldPath"]
                    .as_str()
                    .unwrap_or(path)
                    .rsplit('.')
                    .next()
                    .unwrap();
                assert!(
                    message.starts_with(field),
                    "{path}: {message:?} does not begin with {field}"
                );
            }
        });
    }
}
