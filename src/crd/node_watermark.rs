//! `NodeWatermark`: the compiled policies of one node, and their status on the node.
//!
//! Only the controller writes the spec, and only the agent of the node writes the status.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

mod convert;
mod hash;
mod part;
mod status;

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use convert::{ParsedSpec, SpecError, UnenforcedEntry};
pub use hash::Hash;
pub use part::Part;
pub use status::{
    AgentStatus, BurstStatus, Counts, EvictionStatus, NodeWatermarkStatus, PodPolicyStatus,
    RefusedStatus, RuleStatus, SchedulingStatus, ThrottledStatus, WouldLastDay, WouldStatus,
    condition, scheduling, stopped,
};

/// The API group of the kinds that plimsoll writes.
pub const GROUP: &str = "plimsoll.dev";
/// The maximum number of rules of a node.
pub const MAX_RULES: usize = 256;
/// The maximum number of pod policies of a node.
pub const MAX_POD_POLICIES: usize = 1024;
/// The maximum number of entries in `sources`.
pub const MAX_SOURCES: usize = 2048;

/// The compiled policies of one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "plimsoll.dev",
    version = "v1alpha1",
    kind = "NodeWatermark",
    plural = "nodewatermarks",
    shortname = "nwm",
    category = "plimsoll",
    status = "NodeWatermarkStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "A NodeWatermark contains the compiled rules of the node with the same name, and their status. It is written by plimsoll: edit NodeQOS, PodQOS and AvoidanceAction instead.",
    printcolumn(name = "Rules", type_ = "integer", json_path = ".status.counts.rules"),
    printcolumn(
        name = "Breached",
        type_ = "integer",
        json_path = ".status.counts.breached"
    ),
    printcolumn(
        name = "Scheduling",
        type_ = "string",
        json_path = ".status.scheduling.state",
        description = "Enabled, or the effect of the taint set by plimsoll"
    ),
    printcolumn(
        name = "Throttled",
        type_ = "integer",
        json_path = ".status.counts.throttled",
        description = "Throttled pods"
    ),
    printcolumn(
        name = "Evicted(1h)",
        type_ = "integer",
        json_path = ".status.counts.evictedLastHour"
    ),
    printcolumn(
        name = "Would(24h)",
        type_ = "integer",
        json_path = ".status.counts.wouldLastDay",
        description = "How often rules with strategy Preview would have acted; empty if there are none"
    ),
    printcolumn(
        name = "Stopped",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Stopped\")].reason",
        description = "Progress of an emergency stop: Releasing or Released; empty if there is none"
    ),
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agent.version"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1,
        description = "RulesEnforced, or why the rules are not enforced or not evaluated"
    ),
    printcolumn(
        name = "Degraded",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Degraded\")].reason",
        priority = 1,
        description = "AllInOrder, or the problem of the agent"
    ),
    printcolumn(
        name = "Ineffective",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"ActionIneffective\")].reason",
        priority = 1,
        description = "ActionsEffective, or why an action has no effect"
    ),
    printcolumn(
        name = "Idle",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"IdleClass\")].reason",
        priority = 1,
        description = "IdleUnsafe while pods get the lowest CPU weight instead of the idle class"
    ),
    printcolumn(
        name = "BatchWeight",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"BatchWeightHigh\")].reason",
        priority = 1,
        description = "TooManyBusyPods while there are too many busy batch pods for the idle class to protect"
    ),
    printcolumn(
        name = "Unknown",
        type_ = "string",
        json_path = ".status.rules[?(@.unknown)].id",
        priority = 1,
        description = "The first rule whose value is unknown"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.rules[?(@.unknown)].unknown",
        priority = 1,
        description = "Why the value is unknown"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NodeWatermarkSpec {
    /// The UID of the Node. The agent of a node with another UID ignores the spec.
    #[serde(rename = "nodeUID")]
    #[schemars(length(max = 64))]
    pub node_uid: String,
    /// The hash of `nodeUID`, `rules`, `actions`, `podPolicies` and `softenScheduling`. The agent reports it as
    /// `status.observedHash`.
    #[schemars(length(max = 64))]
    pub hash: String,
    /// The rules, sorted by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub rules: Vec<Part<WatermarkRule>>,
    /// The actions of the rules, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub actions: Vec<Part<WatermarkAction>>,
    /// The policies that allow actions on pods, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub pod_policies: Vec<Part<WatermarkPodPolicy>>,
    /// Whether the node gets a `PreferNoSchedule` taint where a rule says `NoSchedule`, because more nodes are breached than
    /// may be unschedulable at the same time.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub soften_scheduling: bool,
    /// The objects that the spec was compiled from, with their generations, for example `NodeQOS/watermark1@3`. Not part of the
    /// hash: an edit that does not affect the node is not written to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 2048),
        inner(length(max = 300)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub sources: Vec<String>,
    /// Fields of later versions.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: BTreeMap<String, Value>,
}

/// A rule with all defaults resolved. The definition has no enums: the agent reports each rule that has values it does not
/// support.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkRule {
    /// The id: `<NodeQOS>/<rule>`.
    #[schemars(length(max = 320))]
    pub id: String,
    /// The name of the metric.
    #[schemars(length(max = 200))]
    pub metric: String,
    /// Whether the metric is a series of the probe.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_probe: bool,
    /// What the metric summarizes, if it is a window of the node's settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<WatermarkWindow>,
    /// The selector over the labels of the series of the metric. Defaults to all series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub series: Option<Vec<WatermarkRequirement>>,
    /// The threshold, a quantity in the unit of the metric: an evaluation above it is a breach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub value: Option<String>,
    /// The quantity at or below which an evaluation counts towards `restoreThreshold`. Defaults to `value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub restore_value: Option<String>,
    /// Deprecated: `value` as a floating-point number, for agents that do not read `value`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watermark: Option<f64>,
    /// Deprecated: `restoreValue` as a floating-point number, for agents that do not read `restoreValue`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<f64>,
    /// The number of consecutive breaches after which the action starts.
    pub avoidance_threshold: i64,
    /// The number of consecutive evaluations at or below `restoreValue` after which the action may end.
    pub restore_threshold: i64,
    /// The maximum age of a sample in seconds; the value of an older one is unknown.
    #[serde(rename = "sampleTTLSeconds")]
    pub sample_ttl_seconds: i64,
    /// The HTTP probe that provides series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<WatermarkProbe>,
    /// The id, or else the name, of one of `spec.actions`.
    #[schemars(length(max = 328))]
    pub action: String,
    /// The strategy: `Enforce` (take the action) or `Preview` (only report).
    #[schemars(length(max = 32))]
    pub strategy: String,
    /// The hours in which the rule is active, for example `22:00-06:00 Europe/Berlin`. Defaults to always.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        inner(length(max = 64)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub active_during: Vec<String>,
}

/// A window over a metric. The node's settings define where the source is read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkWindow {
    /// The metric, or the series of a probe, that is summarized.
    #[schemars(length(max = 200))]
    pub source: String,
    /// How and over which time, for example `avg_5m`.
    #[schemars(length(max = 32))]
    pub statistic: String,
}

/// The HTTP probe of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkProbe {
    /// The URL of metrics in the Prometheus text format.
    #[schemars(length(max = 2048))]
    pub url: String,
    /// Additional request headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub headers: Vec<WatermarkHeader>,
    /// The timeout in seconds.
    pub timeout_seconds: i64,
}

/// A request header.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkHeader {
    /// The name of the header.
    #[schemars(length(max = 128))]
    pub name: String,
    /// The value of the header.
    #[schemars(length(max = 4096))]
    pub value: String,
}

/// An `AvoidanceAction` with all defaults resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkAction {
    /// The id that rules refer to. Only set during a rollout, if some rules already use an edited version of the action and
    /// others do not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 328))]
    pub id: Option<String>,
    /// The name of the object, or of the rule that it is of: `NODEQOS/RULE`.
    #[schemars(length(max = 317))]
    pub name: String,
    /// The minimum number of seconds that the action stays in force after the last breach.
    pub cool_down_seconds: i64,
    /// The effect of the taint that disables scheduling: `NoSchedule` or `PreferNoSchedule`. Absent if scheduling is not
    /// disabled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub disable_scheduling: Option<String>,
    /// The parameters of CPU throttling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle: Option<WatermarkThrottle>,
    /// Whether page cache is reclaimed.
    #[serde(
        rename = "forceGC",
        default,
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub force_gc: bool,
    /// The parameters of eviction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<WatermarkEviction>,
}

/// The parameters of CPU throttling, in percent of the base quota.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkThrottle {
    /// The percent that a pod always keeps.
    #[serde(rename = "minCPURatio")]
    pub min_cpu_ratio: i64,
    /// The percent that is removed at each step.
    #[serde(rename = "stepCPURatio")]
    pub step_cpu_ratio: i64,
    /// Whether the pod is first put into the idle scheduling class.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
}

/// The parameters of eviction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkEviction {
    /// The grace period in seconds. Defaults to that of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<i64>,
    /// The maximum number of pods evicted per round.
    pub max_pods_per_round: i64,
    /// Whether pods without a controller may be evicted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evict_unowned: bool,
}

/// The pods that a `PodQOS` selects, and the actions that it allows on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkPodPolicy {
    /// The name of the object, or of the rule that the pods are of: `NODEQOS/RULE`.
    #[schemars(length(max = 317))]
    pub name: String,
    /// The requirements on the labels of pods; all must be met. An empty list matches every pod. Absent if there is no label
    /// selector.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub labels: Option<Vec<WatermarkRequirement>>,
    /// The requirements on properties of pods; all must be met. The keys are `QOSClass`, `Priority` and `Namespace`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub scopes: Vec<WatermarkRequirement>,
    /// The allowed actions: names of actions or keywords for types of action, in lower case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(max = 317)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub allowed: Vec<String>,
    /// What it does to these pods at all times. Absent if nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standing: Option<WatermarkStanding>,
}

/// What a `PodQOS` does to its pods at all times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkStanding {
    /// Whether they are in the idle class.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
    /// The burst above the CPU limit of their cgroups, in millicores.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(min = 0))]
    pub burst_millicores: i64,
    /// Whether that is only reported.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preview: bool,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde asks for"
)]
const fn is_zero(number: &i64) -> bool {
    *number == 0
}

/// A requirement on a label, or on a property of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkRequirement {
    /// The key of the label, or the property.
    #[schemars(length(max = 317))]
    pub key: String,
    /// The operator: `In`, `NotIn`, `Exists` or `DoesNotExist`.
    #[schemars(length(max = 32))]
    pub operator: String,
    /// The values of `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}
