//! What is known of a pod besides its figures.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::units::MilliCpu;

/// A pod's UID. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PodUid(pub Arc<str>);

impl From<&str> for PodUid {
    fn from(uid: &str) -> Self {
        Self(uid.into())
    }
}

impl fmt::Display for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Kubernetes' quality-of-service class. The order is the order of victims: `BestEffort` is acted on first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum QosClass {
    /// No container has a request or a limit.
    BestEffort,
    /// Neither of the others.
    Burstable,
    /// Every container's CPU and memory limits are set and equal to its requests.
    Guaranteed,
}

impl fmt::Display for QosClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Why a pod is never evicted, whatever the policies say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Kept {
    /// A mirror or static pod: the kubelet would start it again.
    Static,
    /// A `DaemonSet`'s pod: it would come back to this node.
    DaemonSet,
    /// System-critical priority (2 000 000 000 and above).
    SystemCritical,
    /// Annotated `cluster-autoscaler.kubernetes.io/safe-to-evict: "false"` or `karpenter.sh/do-not-disrupt: "true"`.
    DoNotDisrupt,
}

/// The facts about one pod that decisions rest on.
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent facts, each read by name"
)]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pod {
    /// UID.
    pub uid: PodUid,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// Labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// `spec.priority`, 0 where absent.
    #[serde(default)]
    pub priority: i32,
    /// Quality-of-service class.
    pub qos: QosClass,
    /// When it started, in seconds since the Unix epoch; a later start is a younger pod.
    #[serde(default)]
    pub started: i64,
    /// Phase `Running`. Pods that wait or have finished are never acted on.
    pub running: bool,
    /// Deletion has begun.
    #[serde(default)]
    pub terminating: bool,
    /// It uses an elastic resource (`gocrane.io/*`).
    #[serde(default)]
    pub elastic: bool,
    /// CPU requested by all its containers together.
    #[serde(default)]
    pub cpu_request: MilliCpu,
    /// CPU requested by each container whose cgroup folder (or name) is known, for throttling by container.
    #[serde(default)]
    pub container_requests: BTreeMap<String, MilliCpu>,
    /// `spec.terminationGracePeriodSeconds`, 30 s where absent; while it is terminating `metadata.deletionGracePeriodSeconds`.
    pub grace: Duration,
    /// Never acted on at all: annotated `plimsoll.dev/protected: "true"`, one of our own, or a unit that the
    /// machine needs.
    #[serde(default)]
    pub protected: bool,
    /// Matched only by a `PodQOS` that names its namespace or the label key given here: pods of `kube-system`,
    /// and units found by `run --pods-under` (label `plimsoll.dev/unit`).
    #[serde(default)]
    pub reserved: Option<Reserved>,
    /// Why it is never evicted; `None` where it may be.
    #[serde(default)]
    pub kept: Option<Kept>,
    /// A controller owns it, so an evicted one is replaced.
    #[serde(default)]
    pub owned: bool,
}

/// What a `PodQOS` must name to match a pod that is not meant for just any selector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reserved {
    /// The pod's namespace, in a Namespace scope.
    Namespace,
    /// The pod's namespace in a Namespace scope, or the label `plimsoll.dev/unit` in the label selector.
    NamespaceOrUnit,
}

/// The label that a unit found by `run --pods-under` bears: its folder name.
pub const UNIT_LABEL: &str = "plimsoll.dev/unit";

impl Pod {
    /// `namespace/name`, as users know it.
    pub fn full_name(&self) -> PodName<'_> {
        PodName {
            namespace: &self.namespace,
            name: &self.name,
        }
    }
}

/// Prints as `namespace/name`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodName<'a> {
    namespace: &'a str,
    name: &'a str,
}

impl fmt::Display for PodName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
