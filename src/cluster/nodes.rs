//! Which nodes Plimsoll manages, and where they are.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Taint, Toleration};

/// Label selector: Linux nodes (also unlabelled ones) except virtual nodes without cgroups.
pub const MANAGED_SELECTOR: &str = "kubernetes.io/os notin (windows),type notin (virtual-kubelet),eks.amazonaws.com/compute-type notin (fargate)";

/// The region and zone labels of a node, joined by a slash; empty without any.
pub fn zone(labels: &BTreeMap<String, String>) -> String {
    let label = |name: &str| labels.get(&format!("topology.kubernetes.io/{name}"));
    let parts = ["region", "zone"].into_iter().filter_map(label);
    let parts: Vec<&str> = parts.map(String::as_str).collect();
    parts.join("/")
}

/// Whether a pod with this toleration may run on a node with this taint, as `ToleratesTaint` of Kubernetes decides.
pub fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let all = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
    let effect = all(&toleration.effect) || toleration.effect.as_ref() == Some(&taint.effect);
    let key = all(&toleration.key) || toleration.key.as_ref() == Some(&taint.key);
    let exists = toleration.operator.as_deref() == Some("Exists");
    let value = |text: &Option<String>| text.clone().unwrap_or_default();
    effect && key && (exists || value(&toleration.value) == value(&taint.value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tolerations_are_read_as_by_kubernetes() {
        let taint: Taint =
            serde_json::from_value(json!({"key": "k", "value": "v", "effect": "NoSchedule"}))
                .expect("a taint");
        for (toleration, expected) in [
            (json!({"operator": "Exists"}), true),
            (json!({"key": "k", "operator": "Exists"}), true),
            (json!({"key": "k", "value": "v"}), true),
            (json!({"key": "k", "value": "w"}), false),
            (json!({"key": "k"}), false),
            (
                json!({"key": "k", "value": "v", "effect": "NoExecute"}),
                false,
            ),
        ] {
            let read: Toleration = serde_json::from_value(toleration.clone()).expect("one");
            assert_eq!(tolerates(&read, &taint), expected, "{toleration}");
        }
    }
}
