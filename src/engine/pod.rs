//! Facts about a pod, apart from its usage.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::units::{Bytes, MilliCpu};

/// How long a pod takes to exit at most, beyond its grace period.
const EXIT_TIMEOUT: Duration = Duration::from_mins(1);
/// The longest that an exit is waited for: a long grace period must not keep other pods.
const MAX_EXIT_TIME: Duration = Duration::from_mins(5);

/// For how long a pod with that grace period counts as released while it is terminating.
pub(super) fn exit_time(grace: Duration) -> Duration {
    (grace + EXIT_TIMEOUT).min(MAX_EXIT_TIME)
}

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

/// Kubernetes' quality-of-service class, in victim order: `BestEffort` comes first.
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
pub enum EvictionExemption {
    /// A mirror or static pod: the kubelet would restart it.
    Static,
    /// A `DaemonSet`'s pod: it would be recreated on this node.
    DaemonSet,
    /// System-critical priority (2 000 000 000 and above).
    SystemCritical,
    /// Annotated `cluster-autoscaler.kubernetes.io/safe-to-evict: "false"` or `karpenter.sh/do-not-disrupt: "true"`.
    DoNotDisrupt,
}

/// The facts about one pod that decisions are based on.
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
    /// `spec.priority`, 0 if absent.
    #[serde(default)]
    pub priority: i32,
    /// Quality-of-service class.
    pub qos: QosClass,
    /// Start time in seconds since the Unix epoch.
    #[serde(default)]
    pub started: i64,
    /// Phase `Running`. Pending and finished pods are never acted on.
    pub running: bool,
    /// Deletion has started.
    #[serde(default)]
    pub terminating: bool,
    /// The kubelet reports the CPU and memory of the whole pod as it reads them from the cgroup (`status.resources`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resources_reported: bool,
    /// An in-place resize is waiting or under way.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub resizing: bool,
    /// It uses an elastic resource (`gocrane.io/*`).
    #[serde(default)]
    pub elastic: bool,
    /// CPU requested by all its containers.
    #[serde(default)]
    pub cpu_request: MilliCpu,
    /// Its memory request, and its limits.
    #[serde(default)]
    pub resources: Resources,
    /// A probe of one of its containers runs a command, within the pod's quota.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub exec_probes: bool,
    /// CPU requested by each container whose cgroup directory (or name) is known, for throttling by container.
    #[serde(default)]
    pub container_requests: BTreeMap<String, MilliCpu>,
    /// `spec.terminationGracePeriodSeconds`, 30 s if absent; `metadata.deletionGracePeriodSeconds` while it is terminating.
    pub grace: Duration,
    /// Never acted on: annotated `plimsoll.dev/protected: "true"`, one of our own, or a unit that the machine needs.
    #[serde(default)]
    pub protected: bool,
    /// Matched only by a `PodQOS` that names it: pods of `kube-system`, and units found by `run --pods-under`.
    #[serde(default)]
    pub reserved: Option<Reserved>,
    /// Why it is never evicted; `None` if it may be.
    #[serde(default, rename = "kept")]
    pub eviction_exemption: Option<EvictionExemption>,
    /// A controller owns it and replaces it after an eviction.
    #[serde(default)]
    pub owned: bool,
    /// UID of its controller, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Arc<str>>,
}

/// What a pod may use beside its CPU request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Resources {
    /// CPU limit; `None` if a container has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_limit: Option<MilliCpu>,
    /// Memory requested by all its containers.
    pub memory_request: Bytes,
    /// Memory limit; `None` if a container has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Bytes>,
}

/// What a `PodQOS` must name to match a reserved pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reserved {
    /// The pod's namespace, in a Namespace scope.
    Namespace,
    /// The pod's namespace in a Namespace scope, or the label `plimsoll.dev/unit` in the label selector.
    NamespaceOrUnit,
}

/// Label of a unit found by `run --pods-under`; its value is the directory name.
pub const UNIT_LABEL: &str = "plimsoll.dev/unit";

impl Pod {
    /// `namespace/name`.
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
