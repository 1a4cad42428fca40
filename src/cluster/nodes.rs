//! Which nodes Plimsoll manages, and where they are.

use std::collections::BTreeMap;

/// Label selector: Linux nodes (also unlabelled ones) except virtual nodes without cgroups.
pub const MANAGED_SELECTOR: &str = "kubernetes.io/os notin (windows),type notin (virtual-kubelet),eks.amazonaws.com/compute-type notin (fargate)";

/// The region and zone labels of a node, joined by a slash; empty without any.
pub fn zone(labels: &BTreeMap<String, String>) -> String {
    let label = |name: &str| labels.get(&format!("topology.kubernetes.io/{name}"));
    let parts = ["region", "zone"].into_iter().filter_map(label);
    let parts: Vec<&str> = parts.map(String::as_str).collect();
    parts.join("/")
}
