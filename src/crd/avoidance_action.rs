//! `AvoidanceAction`: what to do when a rule is breached.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// What to do when a rule of a `NodeQOS` is breached. An action with neither `throttle` nor `eviction` disables
/// scheduling on the node. An action with `eviction` also disables scheduling while it is in force, so that evicted pods
/// are not scheduled back to the node. An action with only `throttle` leaves the node schedulable, unless
/// `disableScheduling` is set.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, CustomResource, KubeSchema,
)]
#[kube(
    group = "ensurance.crane.io",
    version = "v1alpha1",
    kind = "AvoidanceAction",
    plural = "avoidanceactions",
    shortname = "avoid",
    category = "plimsoll",
    status = "AvoidanceActionStatus",
    derive = "PartialEq",
    doc = "An AvoidanceAction defines what to do when a rule of a NodeQOS is breached: disable scheduling, throttle pods, evict pods.",
    printcolumn(
        name = "Cool-Down",
        type_ = "integer",
        json_path = ".spec.coolDownSeconds",
        description = "Minimum seconds that the action stays in force after the last breach"
    ),
    printcolumn(
        name = "Throttle-Step",
        type_ = "integer",
        json_path = ".spec.throttle.cpuThrottle.stepCPURatio",
        description = "Percent of the base quota removed at each step"
    ),
    printcolumn(
        name = "Throttle-Floor",
        type_ = "integer",
        json_path = ".spec.throttle.cpuThrottle.minCPURatio",
        description = "Minimum percent of the base quota that a pod keeps"
    ),
    printcolumn(
        name = "Evict-Per-Round",
        type_ = "integer",
        json_path = ".spec.eviction.maxPodsPerRound",
        description = "Maximum number of pods evicted per round"
    ),
    printcolumn(
        name = "Used-By",
        type_ = "string",
        json_path = ".status.usedBy",
        description = "The NodeQOS objects that use the action"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Description",
        type_ = "string",
        json_path = ".spec.description",
        priority = 1
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct AvoidanceActionSpec {
    /// The minimum number of seconds that the action stays in force after the last breach. Defaults to 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX), extend("default" = 300))]
    pub cool_down_seconds: Option<i64>,
    /// Disables scheduling on the node with a taint whose key is `interference.crane.io`. Only needed together with
    /// `throttle`, or to choose the effect: an action without `throttle` always disables scheduling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disable_scheduling: Option<DisableScheduling>,
    /// Throttles pods for which a `PodQOS` allows it. At least one of its fields is required: `throttle: {}` is rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("has(self.cpuThrottle) || (has(self.memoryThrottle) && has(self.memoryThrottle.forceGC) && self.memoryThrottle.forceGC)")
            .message("throttle is empty; write cpuThrottle: {minCPURatio: 10, stepCPURatio: 10}, or memoryThrottle: {forceGC: true}, or remove throttle"),
    )]
    pub throttle: Option<Throttle>,
    /// Evicts pods for which a `PodQOS` allows it, through the eviction API, which respects `PodDisruptionBudgets`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<Eviction>,
    /// A description of the action for people. At most 1024 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub description: Option<String>,
}

/// How scheduling is disabled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DisableScheduling {
    /// The effect of the taint. `NoSchedule` (default): no new pods are scheduled to the node. `PreferNoSchedule`: the
    /// scheduler avoids the node where it can. Neither affects running pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["NoSchedule", "PreferNoSchedule"], "default" = "NoSchedule"))]
    pub effect: Option<String>,
}

/// What is throttled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Throttle {
    /// Lowers the CPU quota of pods step by step. `{}` uses the defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle: Option<CpuThrottle>,
    /// Reclaims memory from pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_throttle: Option<MemoryThrottle>,
}

/// How CPU is throttled. 100 percent (the base quota) is the pod's quota, or its usage when it is first throttled if that is
/// lower.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CpuThrottle {
    /// The percent of the base quota that a pod always keeps, from 0 to 100. Defaults to 10. A pod is never throttled
    /// below its CPU request.
    #[serde(
        rename = "minCPURatio",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(range(min = 0, max = 100), extend("default" = 10))]
    pub min_cpu_ratio: Option<i64>,
    /// The percent of the base quota that is removed at each evaluation above the threshold, and restored at each
    /// evaluation once the rule is Normal again. From 1 to 100. Defaults to 10.
    #[serde(
        rename = "stepCPURatio",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(range(min = 1, max = 100), extend("default" = 10))]
    pub step_cpu_ratio: Option<i64>,
    /// Whether the pod is first put into the idle scheduling class (`cpu.idle`), in which it only uses CPU time that no
    /// other pod of its `QoS` class wants. It gets the lowest CPU weight instead where the kernel has no such class, and where
    /// the kubelet would reject new pods (Kubernetes 1.36 and later). Defaults to false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub idle: Option<bool>,
}

/// How memory is reclaimed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemoryThrottle {
    /// Whether page cache of the pods is reclaimed. Requires cgroup v2.
    #[serde(rename = "forceGC", default, skip_serializing_if = "Option::is_none")]
    pub force_gc: Option<bool>,
}

/// How pods are evicted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Eviction {
    /// The grace period of evicted pods in seconds. Defaults to the pod's own grace period. 0 is sent as 1, because 0 would
    /// delete the pod without waiting for the kubelet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = i32::MAX))]
    pub termination_grace_period_seconds: Option<i64>,
    /// The maximum number of pods evicted per round. The next round waits until these pods are gone. Defaults to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("default" = 1))]
    pub max_pods_per_round: Option<i64>,
    /// Whether pods without a controller may be evicted. They are not recreated. Defaults to false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub evict_unowned: Option<bool>,
}

/// The status of an `AvoidanceAction`, set by the controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct AvoidanceActionStatus {
    /// The `metadata.generation` that this status was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The names of the first 64 `NodeQOS` objects whose rules use the action.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(max = 253)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub used_by: Vec<String>,
    /// The conditions of the object. `Ready` is True when all of its fields can take effect;
    /// if not, `Stalled` is True.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}
