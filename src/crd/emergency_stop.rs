//! The emergency stop, of all agents or of those of some nodes: a `ConfigMap` that every agent watches. An agent that it stops
//! restores what it changed, and takes no action.
//!
//! It is a `ConfigMap` of its own in the namespace of the agents' Leases, so that the command that stops everything is the same
//! in every installation, and the right to write it includes no other right. The chart creates it outside its manifests:
//! an upgrade does not change it.

use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt as _;

/// Name of the `ConfigMap`, in the namespace of the agents' Leases.
pub const OBJECT: &str = "plimsoll-stop";
/// While the object has this annotation with any value but `false`, everything is stopped. The value is the reason.
pub const ANNOTATION: &str = "plimsoll.dev/stop";
/// At most this many characters of the reason are shown.
const MAX_REASON: usize = 256;

/// Why everything is stopped; may be empty. `None`: it is not.
pub fn stop_of_all(object: &ConfigMap) -> Option<String> {
    object
        .annotations()
        .get(ANNOTATION)
        .and_then(|value| reason(value))
}

/// The nodes that are stopped by name, with the reasons: the object's data, in which any value but `false` stops.
pub fn stopped_nodes(object: &ConfigMap) -> impl Iterator<Item = (&str, String)> {
    let nodes = object.data.iter().flatten();
    nodes.filter_map(|(node, value)| Some((node.as_str(), reason(value)?)))
}

/// Why the agent of this node is stopped, with all others or alone; may be empty. `None`: it is not.
pub fn stop_of(object: &ConfigMap, node: &str) -> Option<String> {
    let alone = || {
        object
            .data
            .as_ref()?
            .get(node)
            .and_then(|value| reason(value))
    };
    stop_of_all(object).or_else(alone)
}

fn reason(value: &str) -> Option<String> {
    let value = value.trim();
    if value.eq_ignore_ascii_case("false") {
        return None;
    }
    let printable = value.chars().filter(|it| !it.is_control());
    Some(printable.take(MAX_REASON).collect())
}

/// The stop as text for messages.
pub fn stop_message(reason: &str) -> String {
    match reason {
        "" => "stopped".to_owned(),
        reason => format!("stopped: {reason}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object(annotations: &Value, data: &Value) -> ConfigMap {
        let object = json!({"metadata": {"annotations": annotations}, "data": data});
        serde_json::from_value(object).expect("a ConfigMap")
    }

    fn order_of(value: &str) -> Option<String> {
        stop_of_all(&object(&json!({ANNOTATION: value}), &json!({})))
    }

    #[test]
    fn any_value_but_false_stops() {
        for value in ["true", "", "no", "0", "nightly batch jobs starve"] {
            assert_eq!(order_of(value).as_deref(), Some(value));
        }
        for value in ["false", " False\n"] {
            assert_eq!(order_of(value), None, "{value:?}");
        }
        assert_eq!(stop_of_all(&ConfigMap::default()), None);
    }

    #[test]
    fn a_node_is_stopped_with_all_others_or_alone() {
        let nodes = json!({"worker-1": "too slow", "worker-2": "false", "worker-3": ""});
        let some = object(&json!({}), &nodes);
        assert_eq!(stop_of_all(&some), None);
        assert_eq!(stop_of(&some, "worker-1").as_deref(), Some("too slow"));
        assert_eq!(stop_of(&some, "worker-2"), None);
        assert_eq!(stop_of(&some, "worker-3").as_deref(), Some(""));
        assert_eq!(stop_of(&some, "worker"), None);
        let names: Vec<_> = stopped_nodes(&some).map(|(name, _)| name).collect();
        assert_eq!(names, ["worker-1", "worker-3"]);
        let all = object(&json!({ANNOTATION: "all slow"}), &nodes);
        for node in ["worker-1", "worker-2", "elsewhere"] {
            assert_eq!(stop_of(&all, node).as_deref(), Some("all slow"));
        }
    }

    #[test]
    fn control_characters_and_long_reasons_are_cut() {
        assert_eq!(order_of("a\nb\u{1b}[2Jc").as_deref(), Some("ab[2Jc"));
        let long = order_of(&"ä".repeat(300_000)).expect("stopped");
        assert_eq!(long.chars().count(), MAX_REASON);
        assert_eq!(stop_message(""), "stopped");
        assert_eq!(stop_message("why"), "stopped: why");
    }
}
