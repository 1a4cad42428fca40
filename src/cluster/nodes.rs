//! Which nodes are ours to keep.

/// A selector of labels: all whose system is Linux, also where no label says so, but for those without cgroups to keep.
pub const KEPT: &str = "kubernetes.io/os notin (windows),type notin (virtual-kubelet),eks.amazonaws.com/compute-type notin (fargate)";
