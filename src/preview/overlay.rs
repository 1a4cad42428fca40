//! Replaces policies of the cluster by those in files.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::crd::Kind;

/// The objects of the cluster that `files` do not replace: one of the same kind and name is replaced, as
/// `kubectl apply` would.
pub fn overlay<'a>(
    cluster: impl IntoIterator<Item = Value>,
    files: impl IntoIterator<Item = &'a Value>,
) -> Vec<Value> {
    let replaced: BTreeSet<_> = files.into_iter().filter_map(key).collect();
    let objects = cluster.into_iter();
    objects
        .filter(|object| key(object).is_none_or(|key| !replaced.contains(&key)))
        .collect()
}

fn key(object: &Value) -> Option<(Kind, String)> {
    let name = object.pointer("/metadata/name")?.as_str()?;
    Some((Kind::of(object)?, name.to_owned()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(kind: &str, name: &str, spec: u8) -> Value {
        json!({
            "apiVersion": "ensurance.crane.io/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": {"at": spec},
        })
    }

    #[test]
    fn a_file_replaces_only_the_object_of_its_kind_and_name() {
        let cluster = [
            object("NodeQOS", "a", 1),
            object("NodeQOS", "b", 1),
            object("PodQOS", "a", 1),
        ];
        let file = object("NodeQOS", "a", 2);
        let left = overlay(cluster.clone(), [&file]);
        assert_eq!(left, cluster[1..]);
    }

    #[test]
    fn files_of_other_kinds_replace_nothing() {
        let cluster = [object("NodeQOS", "a", 1)];
        let mut other = object("NodeQOS", "a", 2);
        other["apiVersion"] = json!("v1");
        assert_eq!(overlay(cluster.clone(), [&other]), cluster);
        assert_eq!(overlay(cluster.clone(), []), cluster);
    }
}
