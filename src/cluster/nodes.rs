//! Which nodes Plimsoll manages.

/// Label selector: Linux nodes (also unlabelled ones) except virtual nodes without cgroups.
pub const MANAGED_SELECTOR: &str = "kubernetes.io/os notin (windows),type notin (virtual-kubelet),eks.amazonaws.com/compute-type notin (fargate)";
