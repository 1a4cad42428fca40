//! Checks whether an API server knows every field of our definitions.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::Value;

/// The fields of a definition that an API server does not know and would drop, sorted, from its `OpenAPI` v3 document of the
/// group and version. `None`: it does not serve the kind.
pub fn missing_fields(
    definition: &CustomResourceDefinition,
    openapi: &Value,
) -> Option<Vec<String>> {
    let spec = &definition.spec;
    let schemas = openapi["components"]["schemas"].as_object()?;
    let is_same_kind = |schema: &&Value| {
        let kinds = schema["x-kubernetes-group-version-kind"].as_array();
        let mut kinds = kinds.into_iter().flatten();
        kinds.any(|kind| kind["group"] == *spec.group && kind["kind"] == *spec.names.kind)
    };
    let served = schemas.values().find(is_same_kind)?;
    let version = spec.versions.first()?;
    let ours = version.schema.as_ref()?.open_api_v3_schema.as_ref()?;
    let ours = serde_json::to_value(ours).ok()?;
    let mut missing = Vec::new();
    compare(&ours, served, "", &mut missing);
    missing.sort();
    Some(missing)
}

fn compare(ours: &Value, served: &Value, path: &str, missing: &mut Vec<String>) {
    if served["x-kubernetes-preserve-unknown-fields"] == true {
        return;
    }
    for (name, field) in ours["properties"].as_object().into_iter().flatten() {
        let path = match path {
            "" => name.clone(),
            path => format!("{path}.{name}"),
        };
        match served["properties"].get(name) {
            Some(served) => compare(field, served, &path, missing),
            None => missing.push(path),
        }
    }
    for (inner, sign) in [("items", "[]"), ("additionalProperties", "{}")] {
        if ours[inner].is_object() {
            let path = format!("{path}{sign}");
            compare(&ours[inner], &served[inner], &path, missing);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::definitions;
    use super::*;

    /// The document of an API server with only this definition.
    fn served(definition: &CustomResourceDefinition) -> Value {
        let schema = definition.spec.versions[0].schema.clone().unwrap();
        let mut schema = serde_json::to_value(schema.open_api_v3_schema).unwrap();
        let names = &definition.spec.names;
        schema["x-kubernetes-group-version-kind"] =
            json!([{"group": definition.spec.group, "version": "v1alpha1", "kind": names.kind}]);
        json!({"components": {"schemas": {"other": {}, "it": schema}}})
    }

    #[test]
    fn no_field_of_our_definitions_is_missing() {
        for definition in definitions() {
            let missing = missing_fields(&definition, &served(&definition));
            assert_eq!(missing, Some(Vec::new()), "{}", definition.spec.names.kind);
        }
    }

    #[test]
    fn missing_fields_are_named_also_within_lists() {
        let [.., watermark] = definitions();
        let mut document = served(&watermark);
        let spec = &mut document["components"]["schemas"]["it"]["properties"]["spec"]["properties"];
        spec.as_object_mut().unwrap().remove("softenScheduling");
        let rule = &mut spec["rules"]["items"]["properties"];
        rule.as_object_mut().unwrap().remove("restore");
        let missing = missing_fields(&watermark, &document).unwrap();
        assert_eq!(missing, ["spec.rules[].restore", "spec.softenScheduling"]);
    }

    #[test]
    fn a_kind_that_is_not_served_has_no_list_of_missing_fields() {
        let [action, node, ..] = definitions();
        assert_eq!(missing_fields(&node, &served(&action)), None);
        assert_eq!(missing_fields(&node, &Value::Null), None);
    }
}
