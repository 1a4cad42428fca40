//! `AvoidanceAction`: what to do when a rule is broken.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// What to do when a rule of a `NodeQOS` is broken. With neither `throttle` nor `eviction` it disables scheduling: new
/// pods are kept away from the node. With `eviction` scheduling is disabled too while it is in force, so that an
/// evicted pod doesn't come straight back. With `throttle` alone the node stays open, unless `disableScheduling` is
/// given.
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
    doc = "An AvoidanceAction says what to do when a rule of a NodeQOS is broken: keep new pods away, throttle CPU, evict.",
    printcolumn(
        name = "Cool-Down",
        type_ = "integer",
        json_path = ".spec.coolDownSeconds",
        description = "Seconds in force after the last breach, at least"
    ),
    printcolumn(
        name = "Throttle-Step",
        type_ = "integer",
        json_path = ".spec.throttle.cpuThrottle.stepCPURatio",
        description = "Percent of the base quota taken at each step"
    ),
    printcolumn(
        name = "Throttle-Floor",
        type_ = "integer",
        json_path = ".spec.throttle.cpuThrottle.minCPURatio",
        description = "Percent of the base quota that is left"
    ),
    printcolumn(
        name = "Evict-Per-Round",
        type_ = "integer",
        json_path = ".spec.eviction.maxPodsPerRound",
        description = "Pods evicted at a time, at most"
    ),
    printcolumn(
        name = "Used-By",
        type_ = "string",
        json_path = ".status.usedBy",
        description = "The NodeQOS whose rules name it"
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
    /// Least time in seconds that the action stays in force after the last breach, before it is undone. Default 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX), extend("default" = 300))]
    pub cool_down_seconds: Option<i64>,
    /// Keep new pods away from the node, by a taint with key `interference.crane.io`. Only needed beside `throttle`, or
    /// to choose the effect: an action without `throttle` disables scheduling anyway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disable_scheduling: Option<DisableScheduling>,
    /// Slow pods down that a `PodQOS` allows it for. Say what to throttle: `throttle: {}` is rejected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("has(self.cpuThrottle) || (has(self.memoryThrottle) && has(self.memoryThrottle.forceGC) && self.memoryThrottle.forceGC)")
            .message("throttle says nothing to throttle; write cpuThrottle: {minCPURatio: 10, stepCPURatio: 10}, or memoryThrottle: {forceGC: true}, or remove throttle"),
    )]
    pub throttle: Option<Throttle>,
    /// Evict pods that a `PodQOS` allows it for, through the API server, so that `PodDisruptionBudgets` hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<Eviction>,
    /// What the action is for, in your words. At most 1024 characters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub description: Option<String>,
}

/// How new pods are kept away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DisableScheduling {
    /// `NoSchedule` (default): no new pod is placed on the node. `PreferNoSchedule`: new pods go elsewhere where they
    /// can. Pods that run are not touched by either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["NoSchedule", "PreferNoSchedule"], "default" = "NoSchedule"))]
    pub effect: Option<String>,
}

/// What is throttled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Throttle {
    /// Lower the CPU quota of pods step by step. `{}` takes the defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle: Option<CpuThrottle>,
    /// Take memory back from pods without hurting them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_throttle: Option<MemoryThrottle>,
}

/// How CPU is throttled. 100 percent is the pod's quota, or its usage when first throttled if that is less.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CpuThrottle {
    /// The floor: percent of the base quota that a pod always keeps. 0 to 100, default 10. Whatever is written here, a
    /// pod is never taken below its CPU request.
    #[serde(
        rename = "minCPURatio",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(range(min = 0, max = 100), extend("default" = 10))]
    pub min_cpu_ratio: Option<i64>,
    /// The step: percent of the base quota taken at each evaluation above the watermark, and given back at each
    /// evaluation once the rule has ended. 1 to 100, default 10.
    #[serde(
        rename = "stepCPURatio",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(range(min = 1, max = 100), extend("default" = 10))]
    pub step_cpu_ratio: Option<i64>,
    /// Before the first step make the pod idle class (`cpu.idle`): it then runs only where nobody else wants the CPU.
    /// Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub idle: Option<bool>,
}

/// How memory is taken back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MemoryThrottle {
    /// Reclaim page cache of the pods. Needs cgroup v2.
    #[serde(rename = "forceGC", default, skip_serializing_if = "Option::is_none")]
    pub force_gc: Option<bool>,
}

/// How pods are evicted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Eviction {
    /// Seconds from the first signal to the kill. Absent: the pod's own grace period. 0 is sent as 1, since 0 would
    /// delete the pod without waiting for its node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = i32::MAX))]
    pub termination_grace_period_seconds: Option<i64>,
    /// At most so many pods are evicted at a time; the next round waits until these are gone. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("default" = 1))]
    pub max_pods_per_round: Option<i64>,
    /// Evict pods without a controller too. Nobody starts them again. Default false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = false))]
    pub evict_unowned: Option<bool>,
}

/// What the controller found about an `AvoidanceAction`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct AvoidanceActionStatus {
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The `NodeQOS` whose rules name it; the first 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(max = 253)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub used_by: Vec<String>,
    /// What holds for the object. `Ready` is True when all of it can take effect.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}
